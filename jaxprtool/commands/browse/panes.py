"""The panes of the browser: a program or an HLO module, its source, and the details of a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from jaxprtool.commands.browse.document import (
    Document,
    Kind,
    Navigator,
    OutlineNode,
    PassState,
    ProgramOutline,
)
from jaxprtool.extend import Atom, Jaxpr, JaxprEqn, Literal, ProgramSignature, bodies, type_of
from jaxprtool.extend.listing import (
    BEHIND,
    STYLES,
    AddedToken,
    BinderToken,
    ChangedToken,
    Comment,
    ModuleJaxpr,
    ParameterToken,
    PrimitiveName,
    Reader,
    RemovedToken,
    Sources,
    Type,
    UserFrame,
    printable,
    with_roles,
)

# --- line pane ------------------------------------------------------------------------------------
# A pane of lines with a cursor, which renders only visible lines.

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
        self.refresh_line(self.cursor)
        self.cursor = max(min(number, self.line_count - 1), 0)
        self._see(center)
        self.refresh_line(self.cursor)
        self.post_message(self.Moved(self))

    def _see(self, center: bool) -> None:
        """Scroll as far as needed to show the cursor's line."""
        height, top = self.size.height, self.scroll_offset.y
        if height == 0 or top <= self.cursor < top + height:
            return
        if center:
            top = self.cursor - height // 3
        else:
            top = self.cursor if self.cursor < top else self.cursor - height + 1
        # Before a layout has made the scrollbar, only `force` scrolls, without a refresh.
        self.scroll_to(y=max(top, 0), animate=False, immediate=True, force=True)
        self.refresh()

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
        self.call_after_refresh(self._see, center=True)


# --- modules --------------------------------------------------------------------------------------
# An HLO module in these panes.


def document_of(state: PassState, names: bool = True) -> Document:
    """Return the displayed content of a program, or of the HLO module that it stands for."""
    return Document(state, names) if state.module is None else ModuleDocument(state, state.module)


#: Attributes in the details of an instruction only: they are long, or in its row in other words.
_DETAILS = frozenset(
    (
        *("op_name", "shape", "backend_config", "frontend_attributes", "calls", "to_apply"),
        "custom_call_target",
        *("body", "condition", "branch_computations", "true_computation", "false_computation"),
    )
)

#: The number of types of a tuple in a row.
_IN_TUPLE = 3


class ModuleDocument(Document):
    """The displayed content of an HLO module: instructions, as XLA names and describes them.

    Args:
        state: The state of the module.
        module: The module.
    """

    noun: ClassVar[str] = "instruction"
    searched: ClassVar[str] = "opcode, name, type, argument, scope, file:line"
    unchanged: ClassVar[str] = "an HLO module has one state: passes do not apply to it"
    nests_scopes: ClassVar[bool] = False

    def __init__(self, state: PassState, module: ModuleJaxpr):
        self.module = module
        super().__init__(state)

    def _signature(self) -> ProgramSignature:
        return self.module.signature

    def _read(self, named: bool) -> Reader:
        return Reader(self.about, self._options, self.module.names)

    @property
    def notes(self) -> list[str]:
        return self.module.notes

    def scopes(self, jaxpr: Jaxpr) -> Sequence[tuple[str, ...]]:
        if jaxpr not in self._scopes:
            self._scopes[jaxpr] = self.module.scopes(jaxpr)
        return self._scopes[jaxpr]

    def line_of(self, eqn: JaxprEqn, most: int | None = None, parameters: bool = True) -> list[str]:
        attributes = self.module.attributes(eqn)
        pairs = [pair for pair in attributes.items() if pair[0] not in _DETAILS]
        shown = [token for k, v in pairs for token in (" ", ParameterToken(f"{k}="), v)][1:]
        if shown:
            shown = ["[", *(shown if parameters else [Comment("…")]), "]"]
        return [*self.results(eqn), *self.head(eqn), *shown, " ", *self.operands(eqn, most)]

    def operands(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        names, position = list[str](), 0
        while position < len(eqn.invars) and (most is None or len(names) < most):
            atom = eqn.invars[position]
            name, values = self.reader.operand(atom), [atom]
            if not isinstance(atom, Literal) and atom in self.module.tuples:
                # A tuple that is passed on as a whole is one operand.
                whole, elements = self.module.tuples[atom]
                if eqn.invars[position : position + len(elements)] == elements:
                    name, values = whole, elements
            names.append(name)
            position += len(values)
        left = len(eqn.invars) - position
        tokens = [token for name in names for token in (" ", name)][1:]
        return [*tokens, Comment(f" … {left} more")] if left else tokens

    def results(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        if len(eqn.outvars) == 1:
            return self.reader.results(eqn, True)
        types = [type_of(var.aval) for var in eqn.outvars]
        more = ", …" if types[_IN_TUPLE:] else ""
        shape = Type(f":({', '.join(types[:_IN_TUPLE])}{more})")
        return [BinderToken(self.called(eqn)), shape, " = "]

    def head(self, eqn: JaxprEqn) -> list[str]:
        opcode = self.module.opcode(eqn)
        is_named = opcode == "custom-call" or bodies(eqn)
        return [PrimitiveName(self.module.computes(eqn) if is_named else opcode)]

    def body_name(self, eqn: JaxprEqn, number: int) -> str:
        return self.module.roles(eqn)[number]

    def called(self, eqn: JaxprEqn) -> str:
        return self.module.instruction(eqn).name

    def explained(self, eqn: JaxprEqn) -> str:
        return self.module.computes(eqn).removeprefix(self.module.opcode(eqn)).strip("[]")

    def path(self, node: OutlineNode) -> str:
        if node.kind in (Kind.argument, Kind.result):
            return node.path
        return "/".join(map(self.called, node.equations))

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        return self.module.attributes(eqn)


# --- program pane ---------------------------------------------------------------------------------
# The pane with the rows of a program.

#: The style of each mark of a changed equation; others are changed in place.
_CHANGES: dict[str, type[str]] = {"+": AddedToken, "-": RemovedToken}

#: The signs before a row; the Linux console lacks some characters.
_FOLDED, _UNFOLDED = ("► ", "▼ ") if os.environ.get("TERM") == "linux" else ("▸ ", "▾ ")
_FLAT = "  "

#: The part of the width that rows may be indented by: one third.
_INDENTED = 3


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

    def __init__(self, document: Document, outline: ProgramOutline):
        super().__init__("program")
        self.show(document, outline)

    def show(self, document: Document, outline: ProgramOutline) -> None:
        """Show a program."""
        self.document, self.outline = document, outline
        #: Returns True if a row is marked, as a dependent or as part of a source line.
        self.is_marked: Callable[[OutlineNode], bool] = lambda node: False

    @property
    def node(self) -> OutlineNode | None:
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
        width = self.scrollable_content_region.width
        # Rows at a great depth are not indented further, but have its number.
        is_deep = 2 * node.depth > width // _INDENTED
        indent = f"{node.depth} ".rjust(width // _INDENTED) if is_deep else "  " * node.depth
        prefix = [indent, fold]
        room = width - len(f"> *{''.join(prefix)}")
        text = styled([*prefix, *self.document.row(node, room)])
        if change:
            text.stylize(STYLES[_CHANGES.get(change, ChangedToken)])
        return f"{change or ' '}{mark}", text

    def go_to_node(self, node: OutlineNode) -> None:
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


# --- source pane ----------------------------------------------------------------------------------
# The pane with the source file of the current equation.


class SourcePane(LinePane):
    """A source file with the line of the current equation."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "take", show=False)]

    class Taken(Message):
        """A line was chosen, to go to its equations."""

    def __init__(self, document: Document, sources: Sources):
        super().__init__("source")
        self.document = document
        self._sources = sources
        self._node: OutlineNode | None = None
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
            and (self.frame.file, number + 1) in self.document.lines
        )
        text = Text.assemble((f"{number + 1:>{width}} ", "bold" if is_here else "dim"), end="")
        text.append_text(self._lines[number])
        if is_here:
            text.stylize("bold")
        return "=" if is_here else "*" if has_equations else " ", text

    def show(self, node: OutlineNode | None, number: int = 0) -> None:
        """Show one of the frames of a row, if it has any."""
        self._node = node
        self._frames = [] if node is None else self.document.all_frames(node)
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
        if frame is None or self._node is None:
            return "no source"
        missing = "" if self._lines else f" ({self._sources.fault(frame.file)})"
        if self._shown == 0:
            return frames.line_of(self._node.equations) + missing
        return f"{frames.text(frame)}{missing}  frame {self._shown + 1} of {len(self._frames)}"

    def show_next(self) -> None:
        """Show the next frame."""
        self.show(self._node, self._shown + 1)

    def action_take(self) -> None:
        """Go to the equations of the current line."""
        self.post_message(self.Taken())


# --- info pane ------------------------------------------------------------------------------------
# The pane with the details of a row, below the source.


class InfoPane(ScrollView, can_focus=True):
    """Shows a text, which is laid out once: a `Static` takes several layouts of the screen."""

    def __init__(self, title: str) -> None:
        super().__init__(id="info")
        self.border_title = title
        self.strips: list[Strip] = []
        self._shown: RenderableType = ""

    def show(self, shown: RenderableType) -> None:
        """Show a text from its start."""
        self._shown = shown
        self.on_resize()
        self.scroll_to(y=0, animate=False)

    def on_resize(self) -> None:
        """Lay out the text."""
        width = self.scrollable_content_region.width
        options = self.app.console.options.update(width=max(width - 1, 1))
        lines = self.app.console.render_lines(self._shown, options, pad=False)
        self.strips = [Strip([Segment(" "), *line]).extend_cell_length(width) for line in lines]
        self.virtual_size = Size(width, len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        number = y + self.scroll_offset.y
        return self.strips[number] if number < len(self.strips) else Strip.blank(self.size.width)


#: The maximum number of operands, and results, listed.
_MOST_LISTED = 40


def styled(tokens: Sequence[str]) -> Text:
    """Return tokens as text in their styles."""
    text = Text(end="")
    for piece, role in with_roles(tokens):
        text.append(piece, STYLES.get(role))
    return text


def info(document: Document, navigator: Navigator, node: OutlineNode) -> RenderableType:
    """Return the details of a row."""
    eqn = node.eqn
    if eqn is None:
        title, rows = styled(document.row(node)), _of_value(document, node)
        title.end = "\n"
    else:
        title = Text.assemble((eqn.primitive.name, "bold"))
        if doc := document.explained(eqn):
            title.append(f"  {_plain(doc)}", "dim")
        rows = _of_equation(document, navigator, node, eqn)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return Group(title, table)


def _of_equation(
    document: Document, navigator: Navigator, node: OutlineNode, eqn: JaxprEqn
) -> Iterator[tuple[str, Text]]:
    frames = document.frames
    if (location := frames.location_of(node.equations)) is not None:
        behind = "".join(BEHIND + frames.text(frame) for frame in location.behind)
        yield "line", Text.assemble(_plain(frames.text(location.frame)), (_plain(behind), "dim"))
    # Scopes and the index of values take time in a large program.
    if document.is_complete and (scope := "/".join(_scopes(document, node))):
        yield "scope", Text(_plain(scope))
    yield from _values(document, "gives", eqn.outvars)
    sources = navigator.sources(node) if document.is_complete else ()
    yield from _values(document, "reads", eqn.invars, sources)
    pairs = document.parameters(eqn).items()
    for number, (name, value) in enumerate(pairs):
        yield (
            "" if number else "with",
            Text.assemble((name, STYLES[ParameterToken]), "=", _plain(value)),
        )
    yield "path", Text(_plain(document.path(node)), "dim")


def _scopes(document: Document, node: OutlineNode) -> tuple[str, ...]:
    """Return the scopes around an equation, preceded by those whose bodies contain it."""
    path: tuple[str, ...] = ()
    above: OutlineNode | None = node
    while above is not None and (document.nests_scopes or not path):
        if above.kind is Kind.equation:
            path = (*document.scopes(above.jaxpr)[above.index], *path)
        above = above.parent
    return path


def _values(
    document: Document, label: str, atoms: Sequence[Atom], notes: Sequence[str] = ()
) -> Iterator[tuple[str, Text]]:
    for number, atom in enumerate(atoms[:_MOST_LISTED]):
        name = document.name(atom)
        typed = "" if isinstance(atom, Literal) else f":{type_of(atom.aval)}"
        source = f"  {notes[number]}" if number < len(notes) and notes[number] else ""
        text = Text.assemble(
            (name, STYLES[BinderToken]), (typed, STYLES[Type]), (_plain(source), "dim")
        )
        yield "" if number else label, text
    if len(atoms) > _MOST_LISTED:
        yield "", Text(f"… {len(atoms) - _MOST_LISTED} more", "dim")


def _of_value(document: Document, node: OutlineNode) -> Iterator[tuple[str, Text]]:
    if node.kind in (Kind.arguments, Kind.results):
        values = document.ends(node.kind)
        for value in values[:_MOST_LISTED]:
            yield value.name, Text(f"{value.type}", STYLES[Type])
        if len(values) > _MOST_LISTED:
            yield "", Text(f"… {len(values) - _MOST_LISTED} more", "dim")
    if node.kind in (Kind.argument, Kind.result):
        size = document.ends(node.kind)[node.index].bytes
        if size is not None:
            yield "size", Text(f"{size:,} bytes")
        yield "path", Text(_plain(node.path), "dim")


def _plain(text: str) -> str:
    return "".join(printable([text]))
