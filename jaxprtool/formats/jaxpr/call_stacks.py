"""Call stacks of equations in the header of a `.jaxpr` file.

    stacks = {
        '1': 'train.py:30:13-30:24 (train_step)',
        '2': 'model.py:12:9-12:20 (Block.__call__) from 1',
    }

An entry is a frame and the entry of the frame that called it. A range of columns is that of the
call expression. `# model.py:12:9 (Block.__call__) from 2` refers to an entry, so a program has the
same layers after it is written and read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxprtool.jaxcompat.source_locations import UserFrame

#: The maximal number of frames in a stack. Reading recurses once for each frame.
DEEPEST = 200

_FRAME = re.compile(
    r"(?P<file>\S.*?):(?P<line>\d{1,8})"
    r"(?::(?P<column>\d{1,8})(?:-(?P<end_line>\d{1,8}):(?P<end_column>\d{1,8}))?)?"
    r"(?: \((?P<function>[^()]*)\))?"
)
_ENTRY = re.compile(r"(?P<frame>.*?)(?: from (?P<caller>\w+))?")


def frame_text(file: str, frame: UserFrame, ends: bool = False) -> str:
    """Return `model.py:12:9 (loss)`; with the end of the expression, `model.py:12:9-12:20 (loss)`.

    Args:
        file: The name of the frame's file.
        frame: The frame.
        ends: Whether to write the end of its expression.
    """
    function = frame.function
    known = function.isprintable() and not set(function) & set("()")
    has_range = frame.column >= 0 and frame[-2:] >= (frame.line, frame.column)  # else unknown
    until = f"-{frame.end_line}:{frame.end_column + 1}" if ends and has_range else ""
    named = f" ({function})" if known else ""
    return f"{file}:{frame.line}:{frame.column + 1}{until}{named}"


def read_frame(text: str, files: Mapping[str, str]) -> UserFrame | None:
    """Return the frame that `frame_text` wrote.

    The result is None if the text has another form, another file, or an invalid range.
    """
    found = _FRAME.fullmatch(text)
    if found is None or found["file"] not in files:
        return None
    line, column = int(found["line"]), int(found["column"] or 1) - 1
    end_line, end_column = line, column
    if found["end_line"]:
        end_line, end_column = int(found["end_line"]), int(found["end_column"]) - 1
        if column < 0 or end_column < 0 or (end_line, end_column) < (line, column):
            return None
    function = found["function"] or "<unknown>"
    return UserFrame(files[found["file"]], line, function, column, end_line, end_column)


class StackWriter:
    """Numbers the call stacks of equations."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    @property
    def table(self) -> dict[str, str]:
        """The text of each entry, by its number."""
        return {number: text for text, number in self._numbers.items()}

    def entry(self, frames: Sequence[str]) -> str:
        """Return the entry of a call stack, the innermost frame first; "" if it is too deep."""
        if len(frames) > DEEPEST:
            return ""
        entry = ""
        for frame in reversed(frames):
            text = f"{frame} from {entry}" if entry else frame
            entry = self._numbers.setdefault(text, str(len(self._numbers) + 1))
        return entry


def read_stacks(
    table: Mapping[str, str], files: Mapping[str, str]
) -> dict[str, tuple[UserFrame, ...]]:
    """Return the frames of each entry, the outermost first. Raises ValueError."""
    stacks: dict[str, tuple[UserFrame, ...]] = {}
    for number, text in table.items():
        entry = _ENTRY.fullmatch(text)
        frame = read_frame(entry["frame"], files) if entry else None
        if entry is None or frame is None:
            raise ValueError(f"entry {number!r} of stacks is not a frame of a file: {text!r}")
        caller = entry["caller"]
        if caller is not None and caller not in stacks:
            raise ValueError(f"entry {number!r} of stacks comes before its caller {caller!r}")
        stacks[number] = (*stacks.get(caller or "", ()), frame)
        if len(stacks[number]) > DEEPEST:
            raise ValueError(f"entry {number!r} of stacks has more than {DEEPEST - 1} callers")
    return stacks
