"""The Textual app of the browser: panes, dialogs, keys, the user's editor, and exit."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from jaxprtool.commands.browse.document import (
    Document,
    Kind,
    Navigator,
    OutlineNode,
    PassState,
    ProgramOutline,
    RowMatches,
    RowPlace,
    Way,
    counterpart,
    matches,
    matches_of_line,
    way_text,
)
from jaxprtool.commands.browse.panes import (
    InfoPane,
    LinePane,
    ProgramPane,
    SourcePane,
    document_of,
    info,
)
from jaxprtool.errors import JaxprToolError, OutputError
from jaxprtool.extend.listing import Sources, plural
from jaxprtool.extend.programs import Start, backward_slice, forward_slice

# --- app ------------------------------------------------------------------------------------------
# The Textual app of the browser: panes, keys, and exit.

_FOOTER = (
    ("/", "search"),
    ("d", "def"),
    ("u", "uses"),
    ("t", "scopes"),
    ("tab", "pane"),
    ("[ ]", "pass"),
    ("e", "edit"),
    ("?", "keys"),
    ("q", "quit"),
)


#: The maximum number of destinations offered.
_MOST_WAYS = 200

#: An upper bound on the width of a terminal.
_MOST_COLUMNS = 1000


class Browser(App[None]):
    """A full-screen view of a program.

    Args:
        states: The program's states; the last one is shown first.

    Attributes:
        fault: The exception raised by the browser itself, or None.
        stopped_by: The number of the signal that ended it, or None.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    CSS_PATH = "browser.tcss"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("question_mark", "keys", show=False),
        Binding("tab", "pane(1)", show=False, priority=True),
        Binding("shift+tab", "pane(-1)", show=False, priority=True),
        Binding("t", "regroup", show=False),
        Binding("slash", "search", show=False, priority=True),
        Binding("n", "match(1)", show=False),
        Binding("N", "match(-1)", show=False),
        Binding("d", "definitions", show=False),
        Binding("u", "uses", show=False),
        Binding("m", "mark", show=False),
        Binding("alt+left,less_than_sign,backspace", "travel(-1)", show=False),
        Binding("alt+right,greater_than_sign", "travel(1)", show=False),
        Binding("left_square_bracket", "state(-1)", show=False),
        Binding("right_square_bracket", "state(1)", show=False),
        Binding("s", "states", show=False),
        Binding("c", "change(1)", show=False),
        Binding("C", "change(-1)", show=False),
        Binding("f", "frame", show=False),
        Binding("e", "edit", show=False),
        Binding("y", "copy", show=False),
        Binding("v", "names", show=False),
        Binding("i", "alone", show=False),
        Binding("escape", "clear", show=False),
    ]

    def __init__(self, states: Sequence[PassState]):
        super().__init__(ansi_color=True)  # the terminal's own colors, or none
        self._states, self._names = states, True
        self.fault: Exception | None = None
        self.stopped_by: int | None = None
        self._documents: dict[tuple[PassState, bool], Document] = {}
        self._outlines: dict[tuple[PassState, bool], ProgramOutline] = {}
        self._by_scope = False
        self._matches: RowMatches | None = None
        self._match = -1
        #: The kind of marks, 1 for dependents of a row, 2 for its dependencies; and that row.
        self._marked: tuple[int, OutlineNode | None] = 0, None
        self._history: list[tuple[PassState, bool, OutlineNode]] = []
        self._here = 0
        self._sources = Sources()
        self._state = states[-1]
        document, outline = self._shown(self._state)
        self.program = ProgramPane(document, outline)
        self.source = SourcePane(document, self._sources)
        self.info = InfoPane(document.noun)

    # --- start and exit -----------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Create the panes."""
        yield Static(id="top")
        with Container(id="panes"):
            yield self.program
            with Container(id="beside"):
                yield self.source
                yield self.info
        yield Static(id="status")
        yield Input(id="search", compact=True, placeholder=self.program.document.searched)
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Show the program, and set up the exit on signals."""
        self.theme = "ansi-dark"
        keys = Text("  ", no_wrap=True, overflow="ellipsis").join(
            Text.assemble((key, "bold"), " ", meaning) for key, meaning in _FOOTER
        )
        self.query_one("#keys", Static).update(keys)
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._stop, number)
        self.program.focus()
        self.program.show_lines()
        rows = self.program.outline.rows
        self.program.go_to(next((i for i, node in enumerate(rows) if node.eqn is not None), 0))
        self._tell_state()
        self._complete()

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        self.exit()

    def action_interrupt(self) -> None:
        """Exit as a command does on Ctrl-C."""
        self._stop(signal.SIGINT)

    def _handle_exception(self, error: Exception) -> None:
        # Textual would print a traceback with the values of variables, without a public hook to
        # change that: `browse` reraises the error once the terminal is restored.
        if self.fault is None:
            self.fault = error
        super()._handle_exception(error)
        self._exit_renderables.clear()

    def _complete(self) -> None:
        """Compute the names of a large program after it is first shown."""
        document = self.program.document
        if document.is_complete:
            return
        self._say("naming variables …")

        def complete() -> None:
            try:
                document.complete()
                self.call_from_thread(self._completed, document)
            except Exception as error:
                if self.is_running:
                    self.call_from_thread(self._handle_exception, error)

        threading.Thread(target=complete, daemon=True).start()

    def _completed(self, document: Document) -> None:
        if self.program.document is document:
            self._say("")
            self._tell_state()
            self.program.refresh()
            self._tell_row()

    # --- display ------------------------------------------------------------------------------

    def _shown(self, state: PassState) -> tuple[Document, ProgramOutline]:
        key = state, self._names
        if key not in self._documents:
            self._documents[key] = document_of(state, self._names)
        document = self._documents[key]
        place = state, self._by_scope
        if place not in self._outlines:
            self._outlines[place] = ProgramOutline(
                document.flow, document.scopes if self._by_scope else None
            )
        return document, self._outlines[place]

    @property
    def _navigator(self) -> Navigator:
        return Navigator(self.program.document, self.program.outline)

    def _show(self, state: PassState) -> None:
        """Show a state, and keep the cursor on its row if the state has it."""
        node = self.program.node
        self._state = state
        document, outline = self._shown(state)
        self.program.show(document, outline)
        self.source.document = document
        self._marked, self._matches, self._match = (0, None), None, -1
        self.program.show_lines()
        target = None if node is None else counterpart(node, document, outline)
        if target is None:
            self.program.go_to(self.program.cursor)
        else:
            self.program.go_to_node(target)
        self._tell_state()
        self._complete()

    def _tell_state(self) -> None:
        """Show the program and its state in the first line."""
        document, number = self.program.document, self._states.index(self._state)
        text = Text(f" {document.about.name}", no_wrap=True, overflow="ellipsis")
        text.append(f"  {plural(document.count, document.noun)}")
        if len(self._states) > 1:
            text.append(f"  [{number + 1}/{len(self._states)}] {self._state.label}")
            if self._state.before is not None and (document.is_complete or self._state.is_compared):
                changed = self._state.changes
                text.append(f"  +{len(changed.added)} -{len(changed.removed)}")
        for note in document.notes:
            text.append(f"  {note}")
        text.pad_right(_MOST_COLUMNS)
        self.query_one("#top", Static).update(text)

    def _tell_row(self) -> None:
        """Show the source location and the details of the current row."""
        node = located = self.program.node
        if node is not None and node.kind is Kind.scope:
            located = next((n for n in node.children or () if n.eqn is not None), node)
        self.source.show(located)
        self.query_one("#beside").set_class(self.source.frame is None, "-sourceless")
        if node is None:
            self.info.show(Text(f"the program has no {self.program.document.noun}s", "dim"))
        else:
            self.info.show(info(self.program.document, self._navigator, node))

    def _say(self, text: str) -> None:
        self.query_one("#status", Static).update(Text(text, no_wrap=True, overflow="ellipsis"))

    def on_line_pane_moved(self, event: LinePane.Moved) -> None:
        """Follow the cursor."""
        if event.pane is self.program:
            self._tell_row()
        else:
            self._mark_line()

    # --- navigation ---------------------------------------------------------------------------

    def _jump(self, node: OutlineNode) -> None:
        """Go to a row, and add the jump to the history."""
        if self.program.node is not None:
            del self._history[self._here :]
            self._history.append(self._place())
            self._here = len(self._history)
        self._say("")
        self.program.go_to_node(node)

    def _place(self) -> tuple[PassState, bool, OutlineNode]:
        assert self.program.node is not None
        return self._state, self._by_scope, self.program.node

    def action_travel(self, by: int) -> None:
        """Go back or forward in the history of jumps."""
        here = self._here + by
        if not 0 <= here < len(self._history):
            self._say("this is the first place" if by < 0 else "this is the last place")
            return
        if self._here == len(self._history):
            self._history.append(self._place())
        self._here = here
        state, by_scope, node = self._history[here]
        if (state, by_scope) != (self._state, self._by_scope):
            self._by_scope = by_scope
            self._show(state)
        self.program.go_to_node(node)

    def action_pane(self, by: int) -> None:
        """Go to another pane."""
        if len(self.screen_stack) > 1:  # a dialog is open, which ignores the key
            return
        self._show_entry(False)
        panes: list[LinePane | InfoPane] = [self.program, self.source, self.info]
        if self.source.frame is None:
            panes.remove(self.source)
        focused = panes.index(self.focused) if self.focused in panes else 0  # type: ignore[arg-type]
        self.screen.remove_class("-alone")
        chosen = panes[(focused + by) % len(panes)]
        self.query_one("#beside").set_class(chosen is self.info, "-info")
        chosen.focus()

    def action_regroup(self) -> None:
        """Toggle between grouping by nesting and by scopes."""
        self._by_scope = not self._by_scope
        self._show(self._state)
        self._say("grouped by scopes" if self._by_scope else "grouped by nesting")

    def action_alone(self) -> None:
        """Toggle the panes next to the program."""
        self.screen.toggle_class("-alone")
        self.program.focus()

    def action_definitions(self) -> None:
        """Go to a definition of the row's operands."""
        node = self.program.node
        if node is not None:
            ways = self._navigator.definitions(node)
            noun = self.program.document.noun
            self._choose_way("definitions", ways, f"no {noun} computes its operands")

    def action_uses(self) -> None:
        """Go to a use of the row's results, and mark all dependents."""
        node = self.program.node
        if node is not None:
            self._mark(1)
            self._choose_way("uses", self._navigator.uses(node), "it has no uses")

    def _choose_way(self, title: str, ways: Sequence[Way], otherwise: str) -> None:
        if not ways:
            self._say(otherwise)
            return
        document = self.program.document
        rows = [way_text(way, document) for way in ways[:_MOST_WAYS]]
        if len(ways) > _MOST_WAYS:
            title += f": the first {_MOST_WAYS} of {len(ways):,}"
        self._choose(title, rows, lambda i: self._jump(ways[i].node))

    def _choose(
        self, title: str, choices: Sequence[str], take: Callable[[int], None], current: int = 0
    ) -> None:
        """Take the only choice, or ask the user to choose."""
        if len(choices) == 1:
            take(0)
            return

        def chosen(number: int | None) -> None:
            if number is not None:
                take(number)

        self.push_screen(Chooser(title, choices, current), chosen)

    # --- searching and marking ----------------------------------------------------------------

    def action_search(self) -> None:
        """Ask for a query."""
        entry = self.query_one("#search", Input)
        entry.value = ""
        self._show_entry(True)
        # At once, as the key has priority: else the keys after it, typed fast or pasted, are the
        # program's.
        self.screen.set_focus(entry)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for a search in a dialog, or while a query is typed."""
        is_typing = len(self.screen_stack) > 1 or isinstance(self.focused, Input)
        return not (action == "search" and is_typing)

    def _show_entry(self, is_shown: bool) -> None:
        self.query_one("#search").display = is_shown
        self.query_one("#status").display = not is_shown

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the first matching row."""
        self._leave_search()
        if not event.value.strip():
            return
        matching = matches(self.program.document, event.value)
        if matching.total:
            self._show_matches(matching)
        else:
            self._say(f"no match for {event.value}")

    def _leave_search(self) -> None:
        self._show_entry(False)
        self.screen.set_focus(self.program)

    def _show_matches(self, matching: RowMatches, number: int | None = None) -> None:
        self._matches = matching
        self._match = matching.next(self._cursor_place(), 0) if number is None else number
        self._show_match()

    def _cursor_place(self) -> RowPlace:
        node = self.program.node
        return () if node is None else node.place

    def action_match(self, by: int) -> None:
        """Go to the next or previous matching row."""
        if self._matches is None:
            self._say("search with /")
            return
        self._match = (self._match + by) % self._matches.total
        self._show_match()

    def _show_match(self) -> None:
        assert self._matches is not None
        self._jump(self.program.outline.locate(self._matches.at(self._match)))
        self._say(f"{self._match + 1:,} of {self._matches.total:,}   n next  N before")

    def action_mark(self) -> None:
        """Cycle marks: dependents of the row, its dependencies, none."""
        kind, node = self._marked
        self._mark((kind + 1) % 3 if node is self.program.node else 1)

    def _mark(self, kind: int) -> None:
        node, top = self.program.node, self.program.document.top
        if node is None:
            return
        self._marked = kind, node
        values = self.program.document.values(node)
        ids = frozenset[int]()
        if kind:
            slicer = forward_slice if kind == 1 else backward_slice
            ids = slicer(top, Start(values)).members()
        if node.eqn is not None:
            ids -= {id(node.eqn)}
        self._mark_ids(ids)
        note = ("", "* depends on this row", "* this row depends on it")[kind]
        noun = self.program.document.noun
        self._say(f"{note}   {plural(len(ids), noun)}" if kind else "")

    def _mark_ids(self, ids: Collection[int]) -> None:
        self.program.is_marked = lambda node: node.eqn is not None and id(node.eqn) in ids
        self.program.refresh()

    def _line_matches(self) -> RowMatches | None:
        """Return the equations of the source line at the cursor; None if there are none."""
        place, document = self.source.place, self.program.document
        if place is None or place not in document.lines:
            return None
        return matches_of_line(document, place)

    def _mark_line(self) -> None:
        """Mark the equations of the source line at the cursor."""
        matching = self._line_matches()
        self.program.is_marked = lambda node: (
            matching is not None and node.eqn is not None and node.place in matching
        )
        self.program.refresh()
        count = plural(matching.total, self.program.document.noun) if matching else ""
        self._say(f"{count} from this line   enter goes there" if matching else "")

    def on_source_pane_taken(self) -> None:
        """Go to the first equation of the source line at the cursor."""
        matching = self._line_matches()
        if matching is None:
            self._say(f"no {self.program.document.noun} comes from this line")
            return
        self.program.focus()
        self._show_matches(matching, 0)

    def action_clear(self) -> None:
        """Remove marks and end the search."""
        self._leave_search()
        self._marked = 0, None
        self._mark_ids(set())
        self._say("")

    # --- states -------------------------------------------------------------------------------

    def action_state(self, by: int) -> None:
        """Show the program before or after a pass."""
        number = self._states.index(self._state) + by
        if 0 <= number < len(self._states):
            self._show(self._states[number])
        elif len(self._states) == 1:
            self._say(self.program.document.unchanged)
        else:
            self._say("this is the first state" if by < 0 else "this is the last state")

    def action_states(self) -> None:
        """Choose a state."""
        if len(self._states) == 1:
            self._say(self.program.document.unchanged)
            return
        rows = [
            state.label
            if state.before is None
            else f"{state.label}   +{len(state.changes.added)} -{len(state.changes.removed)}"
            for state in self._states
        ]
        here = self._states.index(self._state)
        self._choose("the program", rows, lambda i: self._show(self._states[i]), here)

    def action_change(self, by: int) -> None:
        """Go to the next or previous changed equation."""
        document, marks = self.program.document, self._state.marks
        if len(self._states) == 1:
            self._say(document.unchanged)
            return
        changed = RowMatches(document, lambda jaxpr, index, _: id(jaxpr.eqns[index]) in marks)
        if not changed.total:
            self._say("no equation has changed")
            return
        number = changed.next(self._cursor_place(), by)
        self._jump(self.program.outline.locate(changed.at(number)))
        self._say(f"{number + 1:,} of {changed.total:,} changed")

    # --- the rest -----------------------------------------------------------------------------

    def action_names(self) -> None:
        """Toggle between the user's names and JAX's letters for variables."""
        if self._state.module is not None:
            self._say("an HLO module has the names of XLA only")
            return
        self._names = not self._names
        self._show(self._state)
        self._say("your names" if self._names else "JAX's letters")

    def action_frame(self) -> None:
        """Show the next frame of the equation."""
        self.source.show_next()

    def action_edit(self) -> None:
        """Open the editor at the line."""
        place = self.source.place
        if place is None or not os.path.isfile(place[0]):
            self._say("its source is unavailable")
            return
        try:
            with self.suspend():
                edit(*place)
            self._say("")
        except SuspendNotSupported:
            self._say("this terminal cannot run another program")
        except JaxprToolError as error:
            self._say(error.message)
        self._sources.forget()
        self._tell_row()

    def action_copy(self) -> None:
        """Copy a text of the row."""
        node, document = self.program.node, self.program.document
        if node is None:
            return
        texts = {"path": lambda: document.path(node), document.noun: lambda: document.text(node)}
        if node.kind in (Kind.argument, Kind.result):
            texts = {"name": lambda: document.ends(node.kind)[node.index].name, **texts}
        if self.source.frame is not None:
            line = document.frames.text(self.source.frame)
            texts["line"] = lambda: line
        dependencies = "its dependencies"
        texts[dependencies] = lambda: document.slice_text(node)

        def take(number: int) -> None:
            text = list(texts.values())[number]()
            self.copy_to_clipboard(text)
            lines = text.count("\n") + 1
            self._say(f"copied {lines} lines" if lines > 1 else f"copied {text}")

        shown = [
            name if name == dependencies else f"{name}   {make()}" for name, make in texts.items()
        ]
        self._choose("copy", shown, take)

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(Keys())


def browse(states: Sequence[PassState]) -> None:
    """Show the states of a program on the terminal until the user quits.

    Raises KeyboardInterrupt for Ctrl-C, and any exception of the browser itself.
    """
    app = Browser(states)
    app.run()
    if app.fault is not None:
        raise app.fault
    if app.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if app.stopped_by is not None:
        signal.signal(app.stopped_by, signal.SIG_DFL)
        os.kill(os.getpid(), app.stopped_by)


# --- dialogs --------------------------------------------------------------------------------------
# Dialogs above the panes: a list of choices, and the keys.

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


# --- editor ---------------------------------------------------------------------------------------
# The user's editor, opened at a line of a file.

#: The line options of editors that do not accept `+LINE FILE`.
_PLACES = {
    "code": ("-g", "{file}:{line}"),
    "codium": ("-g", "{file}:{line}"),
    "cursor": ("-g", "{file}:{line}"),
    "subl": ("{file}:{line}",),
    "zed": ("{file}:{line}",),
    "hx": ("{file}:{line}",),
    "helix": ("{file}:{line}",),
    "pycharm": ("--line", "{line}", "{file}"),
}


def editor_command(file: str, line: int) -> list[str]:
    """Return the command that opens a file at a line in $VISUAL or $EDITOR, or vi."""
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        editor = shlex.split(chosen)
    except ValueError:
        editor = []
    if not editor:
        raise OutputError(f"the editor '{chosen}' is not a command", "set EDITOR to a command")
    place = _PLACES.get(os.path.basename(editor[0]), ("+{line}", "{file}"))
    return [*editor, *(part.format(file=file, line=line) for part in place)]


def edit(file: str, line: int) -> None:
    """Run the editor until the user quits it. Raises OutputError if it cannot be started."""
    argv = editor_command(file, line)
    try:
        code = subprocess.run(argv).returncode
    except OSError as error:
        raise OutputError(
            f"cannot start the editor '{argv[0]}': {error.strerror}", "set EDITOR to a command"
        ) from error
    if code:
        raise OutputError(f"the editor '{argv[0]}' exited with code {code}")
