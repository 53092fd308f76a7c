"""The pane with the source file of the current equation."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message

from jaxprtool.browse.document import Document
from jaxprtool.browse.line_pane import LinePane
from jaxprtool.extend import JaxprEqn
from jaxprtool.extend.sources import BEHIND, Sources, UserFrame


class SourcePane(LinePane):
    """A source file with the line of the current equation."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "take", show=False)]

    class Taken(Message):
        """A line was chosen, to go to its equations."""

    def __init__(self, document: Document, sources: Sources):
        super().__init__("source")
        self.document = document
        self._sources = sources
        self._eqn: JaxprEqn | None = None
        self._frames: list[UserFrame] = []
        self._shown = 0
        self._lines: list[Text] = []

    @property
    def frame(self) -> UserFrame | None:
        """The frame shown; None if the current row has no source location."""
        return self._frames[self._shown] if self._frames else None

    @property
    def place(self) -> tuple[str, int] | None:
        """The file, and the line at the cursor."""
        return (self.frame.file, self.cursor + 1) if self.frame is not None else None

    @property
    def line_count(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> tuple[str, Text]:
        width = len(str(self.line_count))
        frame = self.frame
        is_here = frame is not None and number + 1 == frame.line
        has_equations = (
            self.has_focus
            and self.frame is not None
            and ((self.frame.file, number + 1) in self.document.by_line)
        )
        text = Text.assemble((f"{number + 1:>{width}} ", "bold" if is_here else "dim"), end="")
        text.append_text(self._lines[number])
        if is_here:
            text.stylize("bold")
        return "=" if is_here else "*" if has_equations else " ", text

    def show(self, eqn: JaxprEqn | None, number: int = 0) -> None:
        """Show one of the frames of an equation, if it has any."""
        self._eqn = eqn
        self._frames = [] if eqn is None else self.document.all_frames(eqn)
        self._shown = number % max(len(self._frames), 1)
        frame = self.frame
        self._lines = [] if frame is None else self._sources.lines(frame.file)
        self.border_title = self._title().replace("[", r"\[")
        self.show_lines()
        if frame is not None and frame.line <= self.line_count:
            self.cursor = frame.line - 1
            self._see(center=True)

    def _title(self) -> str:
        frame, frames = self.frame, self.document.frames
        if frame is None or self._eqn is None:
            return "no source"
        missing = "" if self._lines else f" ({self._sources.fault(frame.file)})"
        if self._shown == 0:
            return BEHIND.join(self.document.frames.texts(self._eqn)) + missing
        return f"{frames.text(frame)}{missing}  frame {self._shown + 1} of {len(self._frames)}"

    def show_next(self) -> None:
        """Show the next frame."""
        self.show(self._eqn, self._shown + 1)

    def action_take(self) -> None:
        """Go to the equations of the current line."""
        self.post_message(self.Taken())
