"""Dialogs above the panes: a list of choices, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

#: The number of choices with a digit.
_DIGITS = 9


class Chooser(ModalScreen[int | None]):
    """A list from which the user chooses by digit or with the cursor.

    Args:
        title: The title of the list.
        choices: The choices.
        current: The choice initially at the cursor.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("j", "app.simulate_key('down')", show=False),
        Binding("k", "app.simulate_key('up')", show=False),
    ]

    DEFAULT_CSS = """
    Chooser { align: center middle; background: transparent; }
    Chooser OptionList {
        width: auto; min-width: 40; max-width: 90%; height: auto; max-height: 80%;
        border: solid $foreground; background: $background; padding: 0 1;
        text-wrap: nowrap; text-overflow: ellipsis;
        border-title-color: $foreground; border-subtitle-color: $foreground;
    }
    Chooser OptionList:focus { border: solid $foreground; }
    """

    def __init__(self, title: str, choices: Sequence[str], current: int = 0):
        super().__init__()
        self._title, self._choices, self._current = title, choices, current

    def compose(self) -> ComposeResult:
        """Create the list."""
        options = [
            Option(
                Text(f"{i if i <= _DIGITS else ' '} {choice}", no_wrap=True, overflow="ellipsis")
            )
            for i, choice in enumerate(self._choices, 1)
        ]
        choices = OptionList(*options)
        choices.border_title = self._title
        choices.border_subtitle = "digit or enter chooses; escape closes"
        yield choices

    def on_mount(self) -> None:
        """Put the cursor on the current choice."""
        self.query_one(OptionList).highlighted = self._current

    def on_key(self, event: events.Key) -> None:
        """Choose by a digit."""
        if event.key.isdigit() and 1 <= int(event.key) <= min(len(self._choices), _DIGITS):
            event.stop()
            self.dismiss(int(event.key) - 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Choose the item at the cursor."""
        self.dismiss(event.option_index)

    def action_leave(self) -> None:
        """Choose nothing."""
        self.dismiss(None)


_KEYS = (
    ("", "moving"),
    ("↑ ↓ k j", "one row up or down; also page up, page down, g, G"),
    ("enter", "fold or unfold; also ← →"),
    ("* -", "unfold or fold everything"),
    ("tab", "to the source, to the details of the row, and back"),
    ("t", "group by nesting, or by scopes too"),
    ("", "finding"),
    ("/", "search: dot_general  f32[8,3]  params['w']  Dense_0  model.py:9"),
    ("n N", "the next match, the previous one"),
    ("d", "definitions of the operands; for a call, the equations of its results"),
    ("u", "uses of the results; also marks all rows that depend on them"),
    ("m", "mark the rows that depend on this one, its dependencies, nothing"),
    ("< >", "back and forth; also alt+←, alt+→"),
    ("", "the source"),
    ("enter", "in the source: go to the equations of the line, then n N"),
    ("f", "the next frame: your line, the library's behind it"),
    ("e", "open $EDITOR at the line"),
    ("", "passes"),
    ("[ ]", "the program before, and after a pass;  + added, - removed next, ± both"),
    ("s", "choose among all states"),
    ("c C", "the next changed row, the previous one"),
    ("", "other"),
    ("y", "copy a path, a line, an equation, or its dependencies"),
    ("v", "your names, or JAX's letters"),
    ("i", "hide or show the panes beside the program"),
    ("escape", "remove marks, and leave a search"),
    ("q", "quit"),
)


class Keys(ModalScreen[None]):
    """The list of keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "dismiss", show=False)
    ]

    DEFAULT_CSS = """
    Keys { align: center middle; background: transparent; }
    Keys VerticalScroll {
        width: 78; max-width: 100%; height: auto; max-height: 100%;
        border: solid $foreground; background: $background; padding: 0 1;
    }
    """

    def compose(self) -> ComposeResult:
        """Create the table."""
        text = Text()
        for key, meaning in _KEYS:
            if key:
                text.append(f"{key:<9}", "bold")
                text.append(f"{meaning}\n")
            else:
                text.append(f"{meaning}\n", "bold underline")
        text.rstrip()
        box = VerticalScroll(Static(text))
        box.border_title = "keys"
        yield box
