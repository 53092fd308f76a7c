"""Errors that a user can cause, each with its exit code and, if one is known, a hint.

Every error a user can cause is a `JaxprToolError`; the command line prints its message as one
`error:` line and its hint as one `hint:` line, and exits with its code:

    0 done   1 a check failed   2 bad usage or input   3 the user's own function raised
"""

import copyreg
import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from traceback import FrameSummary, extract_tb
from typing import TypeAlias

#: Further details of an error, each with a label: `("inputs", "random, seed 0")`.
Details: TypeAlias = Sequence[tuple[str, str]]


class JaxprToolError(Exception):
    """Bad usage or bad input, described in one line.

    Attributes:
        message: The description of the fault.
        hint: How to fix it, if known.
        details: Further details, one line each. A traceback shows them as notes.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None, details: Details = ()):
        # The message may repeat a name from the user that contains line breaks.
        self.message = " ".join(message.splitlines())
        super().__init__(self.message)
        self.hint = hint
        self.details = tuple(details)
        labels = max((len(label) for label, _ in self.details), default=0)
        for label, text in self.details:
            self.add_note(f"  {label:<{labels}}  {text}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without a call of the class, whose parameters may differ from `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class TargetError(JaxprToolError):
    """A TARGET that cannot be loaded."""


class ArgumentsError(JaxprToolError):
    """Arguments that cannot be read, or do not fit the function."""


class StructureError(ArgumentsError, TypeError):
    """Arguments whose structure or types differ from a program's; names the first such argument."""


class PipelineError(JaxprToolError):
    """A pipeline that names an unknown pass or option, or is not well formed."""


class PluginError(JaxprToolError):
    """A plug-in that cannot be imported, or that provides no pass."""


class PluginWarning(UserWarning):
    """A plug-in was skipped, with the reason."""


class PointError(JaxprToolError):
    """An argument, a result, a line or a variable that a program does not have."""


class UnsupportedError(JaxprToolError):
    """A program that a pass cannot handle; names the equation and its source line."""


class ProgramFileError(JaxprToolError):
    """A program file that cannot be read; names the place: `file.jaxpr:LINE:COLUMN: fault`."""


class BackendError(JaxprToolError):
    """A backend or device that this machine does not have."""


class BackendStartError(BackendError):
    """A backend that the user has asked for, and that JAX cannot start.

    `backend` is its name, and `reason` why it does not start.
    """

    def __init__(self, backend: str, reason: str, hint: str | None):
        super().__init__(f"JAX cannot start the backend '{backend}': {reason}", hint)
        self.backend = backend
        self.reason = reason


class TooFewDevicesError(BackendError):
    """A backend with fewer devices than the mesh of a program.

    `axes` are the names of the axes of the mesh.
    """

    def __init__(self, message: str, hint: str, axes: Sequence[str]):
        super().__init__(message, hint)
        self.axes = tuple(axes)


class OutOfMemoryError(BackendError):
    """A program or an argument that does not fit in the memory of a device."""


class ConfigurationError(JaxprToolError):
    """A table of pyproject.toml that cannot be read, or that has mistakes."""


class OutputError(JaxprToolError):
    """A file that cannot be written."""


class CheckError(JaxprToolError):
    """A check that failed: an ill-typed program, a difference found."""

    exit_code = 1


class UserFunctionError(JaxprToolError):
    """The user's function raised while it was traced or run; the cause is `__cause__`.

    `roots` are the folders of the user's files, as a `Program` has them.
    """

    exit_code = 3
    roots: tuple[tuple[str, str], ...] = ()


class MeshConflictError(UserFunctionError):
    """The user's function has its own mesh, which differs from the mesh that is set.

    `is_alike` is True if the meshes differ only in the types of their axes.
    """

    is_alike = False


def did_you_mean(name: str, candidates: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return a hint that names the candidate closest to `name`, or None if none is close.

    Among thousands of candidates some name is always close: use a higher `likeness` there.
    """
    if len(name) > 200:  # not a typo, and slow to compare
        return None
    near = get_close_matches(name, list(candidates), n=1, cutoff=likeness)
    return f"did you mean '{near[0]}'?" if near else None


#: The end of a message of XLA: a link, and the places in XLA's own source.
_SOURCE_TRACE = re.compile(
    r"(?:\s*See https?://\S+[^\n]*)?\s*=== Source Location Trace:.*", re.DOTALL
)
#: An instruction of HLO in a sentence, after its name.
_INSTRUCTION = re.compile(r"(%[\w.-]+) = .*?(?=\. [A-Z]|\.?$)")


def described(error: BaseException) -> str:
    """Return an exception as the last line of its traceback: `ValueError: too many values`."""
    text = " ".join(_SOURCE_TRACE.sub("", str(error)).split())
    if "RESOURCE_EXHAUSTED" in text:  # the figures come after the whole instruction
        text = _INSTRUCTION.sub(r"\1", text)
    # XLA repeats the message for each enclosing computation; the cause comes last.
    text = ": ".join(part for part, _ in groupby(text.split(": ")))
    text = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: Packages whose frames do not help a user find the fault in their own function.
_MACHINERY = ("jax", "jaxlib", "jaxprtool")


def user_traceback(error: BaseException) -> list[FrameSummary]:
    """Return the traceback frames of an exception outside of JAX, this package and Python's own.

    Frames are outermost first. For a `UserFunctionError` they are the frames of its cause.
    """
    if isinstance(error, UserFunctionError) and error.__cause__ is not None:
        error = error.__cause__
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in _MACHINERY]
    inner = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in loaded if file)
    return [
        frame
        for frame in extract_tb(error.__traceback__)
        if not os.path.abspath(frame.filename).startswith(inner)
        and not frame.filename.startswith("<frozen ")
        and f"{os.sep}importlib{os.sep}" not in frame.filename
        and not frame.filename.endswith(f"{os.sep}contextlib.py")  # decorates functions of JAX
    ]
