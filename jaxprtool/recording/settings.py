"""The settings of a recording, passed to the processes of a run, and the summary of one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from jaxprtool.errors import ArgumentsError
from jaxprtool.recording.folder import SUMMARY, processes, write_json_file

#: The environment variable with the settings, as JSON.
VARIABLE = "JAXPRTOOL_RECORD"


#: The longest time of a run that its process summarizes, in seconds. During a longer one, `record`
#: imports JAX, so that its process ends when the script does.
SHORT = 10.0


@dataclass(frozen=True)
class SummaryRequest:
    """How `record` prints the summary of a run, for a process that can make it at its end.

    Attributes:
        command: The process of `record`.
        path: The folder of the run, as `record` names it.
        width: The width of the summary in characters.
        colored: Whether it has colors.
        top: The number of rows of each part; None for those that fit a screen.
        all: Whether to show all rows.
        json: Whether to print the JSON document instead.
        max_bytes: The most bytes of that document; None for any number.
        environment: The `summary_environment` of that process.
    """

    command: int
    path: str
    width: int
    colored: bool
    top: int | None
    all: bool
    json: bool
    max_bytes: int | None
    environment: Mapping[str, str]


def summary_environment() -> dict[str, str]:
    """Return the environment variables that a summary depends on: of JAX, and of the terminal."""
    names = ("JAX_", "XLA_", "TERM", "COLORTERM")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


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
        summary: The summary that the recorded process makes at its end if it can; None if it must
            not.
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
    summary: SummaryRequest | None = None

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `json.dumps(asdict(settings))` has written."""
        fields = json.loads(text)
        request = fields.get("summary")
        return cls(**{**fields, "summary": request and SummaryRequest(**request)})


class RunSummary(NamedTuple):
    """The summary of a run that its process has made.

    Attributes:
        exit_code: The exit code that it shows.
        text: The text to print.
    """

    exit_code: int
    text: str


def write_summary(process: str, summary: RunSummary) -> None:
    """Write the summary that a process has made to its folder."""
    write_json_file(os.path.join(process, SUMMARY), summary._asdict())


def taken_summary(path: str) -> RunSummary | None:
    """Remove and return the summary of a run that its only process has made; None without one."""
    found = processes(path)
    summary = None
    for process in found:
        with suppress(OSError, ValueError, TypeError):
            file = os.path.join(process, SUMMARY)
            with open(file, encoding="utf-8") as opened:
                summary = RunSummary(**json.load(opened))
            os.unlink(file)
    return summary if len(found) == 1 else None


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
    counts: dict[str, int] = {}
    for name in (part.strip() for text in texts for part in text.split(",")):
        function, _, count = name.partition(":")
        if not function or (count and not (count.isdigit() and int(count))):
            raise ArgumentsError(f"--keep {name}: write NAME, or NAME:N for the last N calls")
        counts[function] = int(count or 1)
    return counts
