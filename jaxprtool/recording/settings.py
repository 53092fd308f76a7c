"""What to record, as it is handed to the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxprtool.errors import ArgumentsError

#: The environment variable with the settings, as JSON.
VARIABLE = "JAXPRTOOL_RECORD"


@dataclass(frozen=True)
class Settings:
    """What to record.

    Attributes:
        run: The folder of the run, as an absolute path.
        start: When the run began, by `time.time`.
        constants: The most bytes of large constants that a process writes; 0 for none.
        calls: Whether to count calls, and the time until their results are ready.
        keep: How many of the last calls to keep the arguments of, by the names of functions.
        keep_bytes: The most bytes that are kept of one function.
        until: The results that end the script: "nan", or "".
        profile: How many steps of each process to profile; 0 for none.
        programs: Whether programs are written, and not only what is known of each compilation.
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
    """Raise ArgumentsError for an end of the script that is unknown, or checks no function."""
    if until not in ("", "nan"):
        raise ArgumentsError(f"--until {until}: only nan is known")
    if until and not keep:
        raise ArgumentsError("--until nan needs the functions to check", "add --keep NAME")


def kept_calls_of(texts: Sequence[str]) -> dict[str, int]:
    """Return how many calls of each function to keep, from texts such as `step,loss:3`.

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
