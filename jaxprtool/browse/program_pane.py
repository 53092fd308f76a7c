"""The pane with the rows of a program."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType

from jaxprtool.browse.document import Document
from jaxprtool.browse.info import styled
from jaxprtool.browse.line_pane import LinePane
from jaxprtool.browse.outline import Node, Outline
from jaxprtool.extend.listing import STYLES, AddedToken, ChangedToken, RemovedToken

#: The style of each mark of a changed equation; others are changed in place.
_CHANGES: dict[str, type[str]] = {"+": AddedToken, "-": RemovedToken}

#: The signs before a row; the Linux console lacks some characters.
_FOLDED, _UNFOLDED = ("► ", "▼ ") if os.environ.get("TERM") == "linux" else ("▸ ", "▾ ")
_FLAT = "  "


class ProgramPane(LinePane):
    """The foldable rows of a program.

    Args:
        document: The program.
        outline: Its rows.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "fold", show=False),
        Binding("left,h", "close", show=False),
        Binding("right,l", "open", show=False),
        Binding("asterisk", "open_all", show=False),
        Binding("minus", "close_all", show=False),
    ]

    def __init__(self, document: Document, outline: Outline):
        super().__init__("program")
        self.show(document, outline)

    def show(self, document: Document, outline: Outline) -> None:
        """Show a program."""
        self.document, self.outline = document, outline
        #: Returns True if a row is marked, as a dependent or as part of a source line.
        self.is_marked: Callable[[Node], bool] = lambda node: False

    @property
    def node(self) -> Node | None:
        """The current row; None if there are no rows."""
        rows = self.outline.rows
        return rows[self.cursor] if rows else None

    @property
    def line_count(self) -> int:
        return len(self.outline.rows)

    def line(self, number: int) -> tuple[str, Text]:
        node = self.outline.rows[number]
        eqn = node.eqn
        change = "" if eqn is None else self.document.mark(eqn)
        mark = "*" if self.is_marked(node) else " "
        fold = (_UNFOLDED if node.is_open else _FOLDED) if node.folds else _FLAT
        before = ["  " * node.depth, fold]
        room = self.scrollable_content_region.width - len(f"> *{''.join(before)}")
        text = styled([*before, *self.document.row(node, room)])
        if change:
            text.stylize(STYLES[_CHANGES.get(change, ChangedToken)])
        return f"{change or ' '}{mark}", text

    def go_to_node(self, node: Node) -> None:
        """Unfold the ancestors of a row and go to it."""
        number = self.outline.show(node)
        self.show_lines()
        self.go_to(number, center=True)

    def action_fold(self) -> None:
        """Fold or unfold the current row."""
        if self.line_count:
            self.outline.toggle(self.cursor)
            self.show_lines()

    def action_open(self) -> None:
        """Unfold the current row; if it is unfolded, go to its first child."""
        node = self.node
        if node is None or not node.folds:
            return
        if node.is_open:
            self.action_move(1)
        else:
            self.action_fold()

    def action_close(self) -> None:
        """Fold the current row; if it is folded, go to its parent."""
        node = self.node
        if node is None:
            return
        if node.folds and node.is_open:
            self.action_fold()
        elif node.parent is not None and node.parent.parent is not None:
            self.go_to(self.outline.rows.index(node.parent))

    def action_open_all(self) -> None:
        """Unfold all rows."""
        self._keeping_place(self.outline.open_all)

    def action_close_all(self) -> None:
        """Fold all rows."""
        self._keeping_place(self.outline.close_all)

    def _keeping_place(self, change: Callable[[], None]) -> None:
        node = self.node
        change()
        shown = set(map(id, self.outline.rows))
        while node is not None and id(node) not in shown:
            node = node.parent
        self.show_lines()
        if node is not None:
            self.go_to(self.outline.rows.index(node), center=True)

    def on_click(self, event: events.Click) -> None:
        super().on_click(event)
        if event.chain == 2:
            self.action_fold()
