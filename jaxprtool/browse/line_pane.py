"""A pane of lines with a cursor, which renders only visible lines."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

_CURSOR, _CURSOR_ELSEWHERE = Style(reverse=True), Style(bold=True)


class LinePane(ScrollView, can_focus=True):
    """A list of lines with a current one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+f", "page(1)", show=False),
        Binding("home,g", "go(0)", show=False),
        Binding("end,G", "go(-1)", show=False),
    ]

    DEFAULT_CSS = """
    LinePane { scrollbar-size: 1 1; overflow-x: hidden; overflow-y: auto; }
    """

    class Moved(Message):
        """The cursor has moved to another line."""

        def __init__(self, pane: LinePane):
            super().__init__()
            self.pane = pane

        @property
        def control(self) -> LinePane:
            """The pane whose cursor it is."""
            return self.pane

    def __init__(self, id: str):
        super().__init__(id=id)
        self.cursor = 0

    @property
    def line_count(self) -> int:
        """The number of lines."""
        raise NotImplementedError

    def line(self, number: int) -> tuple[str, Text]:
        """Return the margin marks of a line, and the line."""
        raise NotImplementedError

    def show_lines(self) -> None:
        """Refresh the lines and their number."""
        self.virtual_size = Size(self.size.width, self.line_count)
        self.cursor = max(min(self.cursor, self.line_count - 1), 0)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        width, number = self.scrollable_content_region.width, y + self.scroll_offset.y
        if number >= self.line_count:
            return Strip.blank(width)
        margin, text = self.line(number)
        is_current = number == self.cursor
        line = Text(f"{'>' if is_current else ' '}{margin}", no_wrap=True, end="")
        line.append_text(text)
        line.truncate(width, overflow="ellipsis")
        if is_current and self.has_focus:  # in one style: reversed colors are hard to read
            line = Text(line.plain, end="")
            line.pad_right(width - line.cell_len)
        if is_current:
            line.stylize(_CURSOR if self.has_focus else _CURSOR_ELSEWHERE)
        return Strip(line.render(self.app.console)).extend_cell_length(width)

    def go_to(self, number: int, center: bool = False) -> None:
        """Move the cursor to a line, and scroll it into view."""
        self.cursor = max(min(number, self.line_count - 1), 0)
        self._see(center)
        self.refresh()
        self.post_message(self.Moved(self))

    def _see(self, center: bool) -> None:
        """Scroll as far as needed to show the cursor's line."""
        height, top = self.size.height, self.scroll_offset.y
        if top <= self.cursor < top + height:
            return
        if center or height == 0:
            top = self.cursor - height // 3
        else:
            top = self.cursor if self.cursor < top else self.cursor - height + 1
        self.scroll_to(y=max(top, 0), animate=False, immediate=True)

    def action_move(self, by: int) -> None:
        """Move down by `by` lines."""
        self.go_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Move down by `by` screens."""
        height = max(self.size.height - 1, 1)
        self.scroll_to(y=self.scroll_offset.y + by * height, animate=False, immediate=True)
        self.go_to(self.cursor + by * height)

    def action_go(self, number: int) -> None:
        """Go to a line; negative numbers count from the end."""
        self.go_to(number if number >= 0 else self.line_count + number)

    def on_click(self, event: events.Click) -> None:
        """Go to the clicked line."""
        number = event.y + self.scroll_offset.y
        if number < self.line_count:
            self.go_to(number)

    def on_focus(self) -> None:
        """Show that this pane has the focus."""
        self.refresh()

    def on_blur(self) -> None:
        """Show that this pane has lost the focus."""
        self.refresh()

    def on_resize(self) -> None:
        """Keep the cursor's line in view."""
        self.virtual_size = Size(self.size.width, self.line_count)
        self.call_after_refresh(self._see, center=False)
