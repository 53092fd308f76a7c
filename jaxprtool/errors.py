"""What a user can have done wrong, each with its exit code and, where we know one, a hint.

Every error a user can cause is a `JaxprToolError`; the command line prints its message as one
`error:` line and its hint as one `hint:` line, and exits with its code:

    0 done   1 a check failed   2 bad usage or input   3 the user's own function raised
"""

import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from traceback import FrameSummary, extract_tb
from typing import TypeAlias

#: What is known of a fault besides, each with a label: `("inputs", "random, seed 0")`.
Details: TypeAlias = Sequence[tuple[str, str]]


class JaxprToolError(Exception):
    """Bad usage or bad input, said in one line.

    Attributes:
        message: What is wrong.
        hint: How to mend it, if that is known.
        details: What else is known of it, one line each. A traceback has them as notes.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None, details: Details = ()):
        # A name that the user gave, and that the message repeats, may hold line breaks.
        self.message = " ".join(message.splitlines())
        super().__init__(self.message)
        self.hint = hint
        self.details = tuple(details)
        labels = max((len(label) for label, _ in self.details), default=0)
        for label, text in self.details:
            self.add_note(f"  {label:<{labels}}  {text}")


class TargetError(JaxprToolError):
    """A TARGET that names nothing we can load."""


class ArgumentsError(JaxprToolError):
    """Arguments that cannot be read, or do not fit the function."""


class StructureError(ArgumentsError, TypeError):
    """Arguments of another structure, or of other types, than a program takes; names the first."""


class PipelineError(JaxprToolError):
    """A pipeline that names an unknown pass or option, or is not well formed."""


class PluginError(JaxprToolError):
    """A plug-in that cannot be imported, or that provides no pass."""


class PointError(JaxprToolError):
    """An argument, a result, a line or a variable that a program does not have."""


class UnsupportedError(JaxprToolError):
    """A program that a pass cannot handle; names the equation and its source line."""


class ProgramFileError(JaxprToolError):
    """A program's file that cannot be read; says where in it: `file.jaxpr:LINE:COLUMN: fault`."""


class BackendError(JaxprToolError):
    """A backend or device that this machine does not have."""


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


def did_you_mean(name: str, candidates: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the hint that names the candidate nearest to `name`, or None if nothing is near.

    Among thousands of candidates something is always near: there, ask for more `likeness`.
    """
    if len(name) > 200:  # no name that anyone has mistyped, and slow to compare
        return None
    near = get_close_matches(name, list(candidates), n=1, cutoff=likeness)
    return f"did you mean '{near[0]}'?" if near else None


def described(error: BaseException) -> str:
    """An exception on one line, as Python ends a traceback: `ValueError: too many values`."""
    text = " ".join(str(error).split())
    # XLA says the same of each computation on the way, and the cause in the end.
    text = ": ".join(part for part, _ in groupby(text.split(": ")))
    text = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: Packages whose frames tell a user nothing about their own function.
_MACHINERY = ("jax", "jaxlib", "jaxprtool")


def user_frames(error: BaseException) -> list[FrameSummary]:
    """The frames of an exception's traceback that are neither JAX's, nor ours, nor importlib's.

    Of a `UserFunctionError`, the frames of its cause: outermost first, as a traceback has them.
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
    ]
