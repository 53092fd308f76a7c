"""The settings of a recording, passed to the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxprtool.errors import ArgumentsError

#: The environment variable with the settings, as JSON.
VARIABLE = "JAXPRTOOL_RECORD"


@dataclass(frozen=True)
class Settings:
    """The settings of a recording.

    Attributes:
        run: The folder of the run, as an absolute path.
        start: The start of the run, by `time.time`.
        constants: The maximum size of the large constants that a process writes, in bytes; 0 for
            none.
        calls: Whether to count calls, and the time until their results are ready.
        keep: Pairs of a function's name and the number of last calls whose arguments are kept.
        keep_bytes: The maximum size of the arguments kept for one function, in bytes.
        until: The results that end the script: "nan", or "".
        profile: The number of steps of each process to profile; 0 for none.
        programs: Whether to write programs, not only the facts of each compilation.
    """

    run: str
    start: float
    constants: int = 1 << 30
    calls: bool = False
    keep: tuple[tuple[str, int], ...] = ()
    keep_bytes: int = 1 << 32
    until: str = ""
    profile: int = 0
    programs: bool = True


def require_until(until: str, keep: Mapping[str, int]) -> None:
    """Raise ArgumentsError if `until` is unknown, or there are no functions to check."""
    if until not in ("", "nan"):
        raise ArgumentsError(f"--until {until}: only nan is known")
    if until and not keep:
        raise ArgumentsError("--until nan needs the functions to check", "add --keep NAME")


def kept_calls_of(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of calls to keep for each function, from texts such as `step,loss:3`.

    Raises:
        ArgumentsError: If a text is not of this form.
    """
    found: dict[str, int] = {}
    for name in (part.strip() for text in texts for part in text.split(",")):
        function, _, count = name.partition(":")
        if not function or (count and not (count.isdigit() and int(count))):
            raise ArgumentsError(f"--keep {name}: write NAME, or NAME:N for the last N calls")
        found[function] = int(count or 1)
    return found
