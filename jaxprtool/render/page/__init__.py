"""Programs as HTML: a page for a browser in one file, and a notebook cell without scripts.

A page loads no external resources: its policy forbids that, and all scripts but its own. Contents
of programs and source files are escaped as text.

If a program has several states, the last is included as HTML, and the others compressed, since most
are never viewed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise, takewhile
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from jaxprtool import jaxcompat
from jaxprtool.ir import notation as tokens
from jaxprtool.ir import source_text
from jaxprtool.ir.differences import Changes, changes
from jaxprtool.ir.documents import duration, in_bytes, plural, with_prefix
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.frames import Root, frames_now
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import (
    NamedValue,
    Program,
    ProgramSignature,
    ValueGroup,
    grouped_values,
    program_signature,
)
from jaxprtool.ir.scopes import ScopeReader
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.jaxcompat import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import is_installed
from jaxprtool.render.reports import facts
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.listing import OPAQUE, ShowOptions
from jaxprtool.render.terminal.tree import Reader
from jaxprtool.render.views import Cell, Curve, Lines, PageView, Row, RowGroup, Table

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import PrimitiveCount, Stats

#: The maximum number of rows of a cell, since notebooks store their output.
_MOST_IN_CELL = 1000


class HasWork(Protocol):
    """The cost of an equation: numbers, or symbolic sizes."""

    @property
    def flops(self) -> Any: ...
    @property
    def transcendentals(self) -> Any: ...
    @property
    def bytes(self) -> Any: ...


class PageState(NamedTuple):
    """The programs after a pass.

    Attributes:
        programs: The programs by name; unchanged programs are the same objects as before.
        label: The pass.
        seconds: Its time.
        before: The number of equations before it.
        after: The number of equations after it.
    """

    programs: Mapping[str, Program]
    label: str = "traced"
    seconds: float | None = None
    before: int = 0
    after: int = 0


class _ListingData(NamedTuple):
    """The data of a program for the listing template; `at` is the prefix of its element ids."""

    at: str
    name: str
    facts: Sequence[str]
    primitives: Sequence[PrimitiveCount]
    listing: ProgramRows


class _Tab(NamedTuple):
    """The data of a state for the template.

    Attributes:
        state: The state.
        changes: The changes of its pass.
        counts: The number of rows for each line of the files shown.
        listing: Its programs in HTML. Empty if the pass changed nothing.
        packed: The compressed listing, used instead of `listing`.
        heated: Whether it shows the costs of equations.
    """

    state: PageState
    changes: Changes
    counts: Counter[str]
    listing: Markup = Markup()
    packed: str = ""
    heated: bool = False


@without_collector()
def program_page(
    states: Sequence[PageState],
    options: ShowOptions,
    describe: Callable[[Program], Stats],
    costs: Callable[[Program], Mapping[int, HasWork]],
    added: Callable[[Lines], tuple[Sequence[Any], Sequence[PageView]]] | None = None,
) -> str:
    """Return a page of programs, with a tab for the state after each pass.

    Args:
        states: The programs as traced, and after each pass. The last one is shown first.
        options: The display options. With `source`, the user's files are next to the listing.
            Nested jaxprs are initially open up to `depth`, or as far as they fit.
        describe: Returns the size of a program.
        costs: Returns the costs of the equations of a program, at every depth, by `id`.
        added: Returns the summaries and the views of a report, given a function that finds lines.
    """
    sources = PageSources(options, True, _roots(states[-1].programs))
    tabs = _tabs(states, options, sources, describe, costs)
    shown = max(i for i, tab in enumerate(tabs) if tab.listing)
    tabs = [tab if i == shown else _packed(tab) for i, tab in enumerate(tabs)]
    script = static_files("shared.js", "pointing.js", "page.js", "icicle.js")
    summaries, views = ([], []) if added is None else added(sources.line_of)
    template = environment().get_template("page.html")
    return template.render(
        title=_text(", ".join(states[-1].programs)),
        tabs=tabs,
        shown=shown,
        files=sources.files(),
        summaries=summaries,
        views=views,
        counts=tabs[shown].counts,
        heated=any(tab.heated for tab in tabs),
        linked=set().union(*(tab.counts for tab in tabs)),
        css=static_files("listing.css", "page.css", "icicle.css"),
        script=script,
        script_hash=hash_of(script),
    )


def _roots(programs: Mapping[str, Program]) -> list[Root]:
    """Return the folders of the user's files of programs."""
    return list(dict.fromkeys(root for program in programs.values() for root in program.roots))


def cell(programs: Mapping[str, Program], describe: Callable[[Program], Stats]) -> str:
    """Return programs as an HTML fragment for a notebook.

    Args:
        programs: The programs, by name.
        describe: Returns the size of a program.
    """
    options = ShowOptions(names=True, terse=True, source=True)
    sources = PageSources(options, False, _roots(programs))
    shown = []
    for name, program in programs.items():
        size = describe(program)
        at = hashlib.sha256(f"{name} {size}".encode()).hexdigest()[:8] + "-"
        about = program_signature(program)
        rows = program_rows(about, options, sources, at, titles=True, most=_MOST_IN_CELL)
        shown.append(_ListingData(at, _text(name), facts(size), (), rows))
    css = static_files("listing.css")
    template, none = environment().get_template("cell.html"), (0, "")
    return template.render(programs=shown, titles=True, css=css, at="", added=none, removed=none)


def _text(text: str) -> str:
    return "".join(printable([text]))


# --- states -----------------------------------------------------------------------------------

_NONE = Changes(frozenset(), frozenset())


def _tabs(
    states: Sequence[PageState],
    options: ShowOptions,
    sources: PageSources,
    describe: Callable[[Program], Stats],
    costs: Callable[[Program], Mapping[int, HasWork]],
) -> list[_Tab]:
    """Return the tabs of states; equations that a pass removes are marked in the listing before."""
    all_changes = [_NONE, *(_changes(*pair) for pair in pairwise(states))]
    template = environment().get_template("listing.html")
    tabs: list[_Tab] = []
    for i, state in enumerate(states):
        if i and not _differ(states[i - 1], state):
            tabs.append(_Tab(state, all_changes[i], Counter()))
            continue
        next_one = next((j for j in range(i + 1, len(states)) if _differ(state, states[j])), None)
        added, removed = all_changes[i].added, frozenset[int]()
        if next_one is not None:
            removed = all_changes[next_one].removed
        marks = {**dict.fromkeys(added, "added"), **dict.fromkeys(removed, "removed")}
        marks |= dict.fromkeys(added & removed, "added removed")
        at = f"p{i}-" if len(states) > 1 else ""
        shown = []
        for k, (name, program) in enumerate(state.programs.items()):
            inside, size = f"{at}g{k}-" if k else at, describe(program)
            works = costs(program)
            rows = program_rows(
                program_signature(program), options, sources, inside, marks=marks, works=works
            )
            shown.append(_ListingData(inside, _text(name), facts(size), size.primitives, rows))
        html = template.render(
            programs=shown,
            titles=False,
            at=at,
            added=(len(added), state.label),
            removed=(len(removed), "" if next_one is None else states[next_one].label),
        )
        counts: Counter[str] = sum((data.listing.lines for data in shown), Counter())
        heated = any(data.listing.hot for data in shown)
        tabs.append(_Tab(state, all_changes[i], counts, Markup(html), heated=heated))
    return tabs


def _differ(before: PageState, after: PageState) -> bool:
    return before.programs != after.programs


def _changes(before: PageState, after: PageState) -> Changes:
    """Return the changes of a pass in the programs present before and after it."""
    olds = before.programs
    if len(olds) == len(after.programs) == 1:  # it may have been renamed
        olds = dict(zip(after.programs, olds.values(), strict=True))
    all_changes = [
        changes(olds[name].jaxpr, program.jaxpr)
        for name, program in after.programs.items()
        if name in olds and olds[name] is not program
    ]
    return Changes(
        frozenset().union(*(change.removed for change in all_changes)),
        frozenset().union(*(change.added for change in all_changes)),
    )


def _packed(tab: _Tab) -> _Tab:
    """Return a tab with its listing compressed."""
    return tab._replace(listing=Markup(), packed=compressed(tab.listing) if tab.listing else "")


def compressed(html: str) -> str:
    """Return HTML compressed, as text that needs no escaping."""
    return base64.b64encode(gzip.compress(html.encode(), mtime=0)).decode()


# --- templates --------------------------------------------------------------------------------


@cache
def environment() -> Environment:
    """Return the template environment of pages."""
    env = Environment(
        loader=PackageLoader("jaxprtool.render.page"),
        keep_trailing_newline=True,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "bytes": in_bytes,
        "cite": _cited,
        "duration": duration,
        "heat": _heat_element,
        "plural": plural,
        "printable": _text,
        "row": _row_element,
        "unbroken": _unbroken,
    }
    return env


def _row_element(row: EquationRow, tag: str, at: str, titles: bool) -> Markup:
    """Return an equation as an element: a page has one for each, so no macro makes them."""
    about = f' id="{at}e{row.place}"'
    if row.mark or row.is_long:
        about += f' class="{row.mark}{" long" if row.is_long else ""}"'
    if row.scope:
        about += f' data-scope="{escape("/".join(row.scope))}"'
    if titles and (row.source or row.scope):
        lines = filter(None, (row.source.text, row.source.behind) if row.source else ())
        about += f' title="{escape(BEHIND.join(lines))} {escape("/".join(row.path))}"'
    added = '<ins title="added">+</ins>' if "added" in row.mark else ""
    removed = f'<del title="to be removed">{_MINUS}</del>' if "removed" in row.mark else ""
    inside = f" <small>{plural(row.inside, 'equation')}</small>" if row.inside else ""
    cited = f" {_cited(row.source, row.repeats, behind=True)}" if row.source else ""
    code = f"<code>{added}{removed}{row.text}{inside}</code>"
    return Markup(f"<{tag}{about}>{code}{cited}{_heat_element(row.heat, titles)}</{tag}>")


def _cited(place: SourceLink, repeats: bool = False, behind: bool = False) -> Markup:
    """Return a source location, as a link to its line if its file is on the page."""
    text = escape(place.text)
    link = f'<a href="#{place.line}">{text}</a>' if place.line else f"<bdi>{text}</bdi>"
    library = f"<span>{BEHIND}<bdi>{escape(place.behind)}</bdi></span>"
    more = library if place.behind and behind else ""
    repeated = ' class="q"' if repeats else ""
    return Markup(f"<cite{repeated}>{link}{more}</cite>")


def _heat_element(heat: Heat | None, titles: bool) -> Markup:
    """Return the bars of a cost, if it has a visible share of the program's."""
    if heat is None or titles:
        return Markup()
    shares = heat.flops_percent, heat.bytes_percent
    if max(shares) < _LEAST_SHARE:
        return Markup()
    flops, moved = (f"{share:.1f}%" if share >= _LEAST_SHARE else "" for share in shares)
    style = "--f:{:.0f};--b:{:.0f}".format(*shares)
    data = f'value="{escape(heat.text)}" data-f="{flops}" data-b="{moved}"'
    return Markup(f'<data {data} style="{style}"></data>')


_MINUS = "\N{MINUS SIGN}"

#: The least share of a cost that is shown, in percent.
_LEAST_SHARE = 0.05

#: A word that browsers break after a slash.
_PATH = re.compile(r"(?<!\S)(?=\S*/)\S{1,60}(?!\S)")


def _unbroken(text: str) -> Markup:
    """Return text as HTML in which no path or target is broken into lines."""
    return Markup(_PATH.sub(r'<span class="word">\g<0></span>', _escaped(text)))


@cache
def static_files(*names: str) -> Markup:
    """Return static files in the templates' folder, one after the other."""
    loader = environment().loader
    assert loader is not None
    return Markup("".join(loader.get_source(environment(), name)[0] for name in names))


def hash_of(script: str) -> str:
    """Return the hash of a script, by which a page's policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


# --- tables -----------------------------------------------------------------------------------
# The tables of a page, which templates show; a link is to a line of a displayed file.

#: The maximum number of rows of a table.
_MOST_IN_TABLE = 500


def linked_view(view: PageView, line_of: Lines) -> PageView:
    """Return a view with the tables of `page_table`, and curves linked to the same lines."""
    return view._replace(
        tables=[page_table(table, line_of) for table in view.tables],
        curves=[_linked_curve(curve, line_of) for curve in view.curves],
    )


def _linked_curve(curve: Curve, line_of: Lines) -> Curve:
    steps = [step._replace(link=_linked(step.link, line_of)) for step in curve.steps]
    return curve._replace(
        steps=steps,
        peak=steps[list(curve.steps).index(curve.peak)],
        at_peak=[on_page(cell, line_of) for cell in curve.at_peak],
    )


def page_table(table: Table, line_of: Lines) -> Table:
    """Return a table for a page: its first rows, linked to the lines of displayed files."""
    rows = [row for whole in table.rows for row in _page_rows(table, whole)]
    shown = [[on_page(cell, line_of) for cell in row] for row in rows[:_MOST_IN_TABLE]]
    return table._replace(rows=shown, more=table.more + len(rows) - len(shown))


def _page_rows(table: Table, row: Row | RowGroup) -> Iterator[list[Cell]]:
    """Yield a row, or its parts with its name."""
    cells, parts = table.cells(row)
    if not parts:
        yield cells
    at = table.name_column
    whole = cells[at]
    for part in parts:
        text = f"{''.join(whole.text)} {''.join(part[at].text)}"
        part[at] = part[at]._replace(text=text, link=whole.link, indent=0)
        yield part


def _linked(link: SourceLink | str | None, line_of: Lines) -> SourceLink | None:
    """Return the user's line in a place, if its file is displayed."""
    return line_of(link.partition(BEHIND)[0]) if isinstance(link, str) else link


def on_page(cell: Cell, line_of: Lines) -> Cell:
    """Return a cell with its text in one part, linked to the user's line in a place."""
    link = _linked(cell.link, line_of)
    below = None if cell.below is None else on_page(cell.below, line_of)
    return cell._replace(text="".join(cell.text), link=link, below=below)


# --- view -----------------------------------------------------------------------------------------
# The rows of a program's page: equations with their bodies, folded by nesting and by scope.
#
# Equations of one scope, as `cost --by scope` groups them, are in a `ScopeRow`; so are consecutive
# ones of one source line if they have no scope. Those of a nested jaxpr are in a `BodyRow`.
# Equations have the same place as in the table: `3.0` is equation 0 in the body of equation 3.

#: The maximum number of rows initially visible, unless more cannot be folded.
_IN_SIGHT = 60

#: The minimum number of equations of a line without scope that are folded.
_LEAST_OF_LINE = 4

#: A row with more characters of HTML is clamped to a few lines.
_LONG = 800


@dataclass(eq=False, slots=True)
class EquationRow:
    """An equation.

    Attributes:
        place: Its place, as in the table.
        text: The equation, in one line.
        is_long: Whether the text is very long.
        source: Its source location.
        path: The scopes around it in its jaxpr, the outermost first.
        scope: The part of the path beyond the enclosing scopes.
        mark: The change by passes: `added`, `removed`, or both.
        repeats: Whether it has the same source location as the previous row.
        inside: The number of equations in its bodies.
        bodies: Its bodies.
        opened: Whether the bodies are initially open.
        heat: Its cost, if known.
    """

    kind: ClassVar[str] = "row"

    place: str
    text: Markup
    is_long: bool
    source: SourceLink | None
    path: tuple[str, ...]
    scope: tuple[str, ...]
    mark: str = ""
    repeats: bool = False
    inside: int = 0
    bodies: list[BodyRow | Reference] = field(default_factory=list)
    opened: bool = False
    heat: Heat | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """A row of values: the arguments or results of a jaxpr."""

    text: Markup
    count: int


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """Equations that are left out."""

    kind: ClassVar[str] = "skipped"
    count: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a jaxpr shown above."""

    kind: ClassVar[str] = "reference"
    path: str
    number: int


@dataclass(eq=False, slots=True)
class ScopeRow:
    """Consecutive equations of a scope, or of a source line if they have no scope."""

    kind: ClassVar[str] = "scope"
    name: str
    line: SourceLink | None
    items: Sequence[Item]
    count: int
    marks: Counter[str]
    opened: bool
    heat: Heat | None = None


@dataclass(eq=False, slots=True)
class BodyRow:
    """A nested jaxpr."""

    kind: ClassVar[str] = "body"
    path: str
    number: int
    count: int
    parameters: Several
    items: list[Item]
    results: Several
    opened: bool = False


Item: TypeAlias = EquationRow | ScopeRow | SkippedRow


class TreeValues(NamedTuple):
    """Arguments, constants or results that belong to one pytree."""

    group: ValueGroup
    rows: list[tuple[Markup, NamedValue]]


class ProgramRows(NamedTuple):
    """A program's rows, arguments, constants and results.

    Attributes:
        lines: The number of rows for each line of the files shown.
        arguments: The arguments of the program.
        constants: Its constants.
        results: Its results.
        items: Its equations.
        hot: Whether costs are known.
    """

    lines: Counter[str]
    arguments: list[TreeValues]
    constants: list[TreeValues]
    results: list[TreeValues]
    items: list[Item]
    hot: bool


def program_rows(
    about: ProgramSignature,
    options: ShowOptions,
    sources: PageSources,
    at: str,
    titles: bool = False,
    marks: Mapping[int, str] = MappingProxyType({}),
    most: int = sys.maxsize,
    works: Mapping[int, HasWork] = MappingProxyType({}),
) -> ProgramRows:
    """Return the rows of a program.

    Args:
        about: The program.
        options: The display options. Bodies are initially open up to `depth`.
        sources: The source locations of equations.
        at: The prefix of element ids.
        titles: Whether types of values are in titles, for use without scripts.
        marks: The marks of equations, by identity.
        most: The number of rows beyond which equations are only counted.
        works: The costs of equations, at every depth, by identity.
    """
    text = EquationText(Reader(about, options), at, titles)
    jaxpr = about.jaxpr
    heats = Heats(jaxpr, works)
    builder = _RowBuilder(text, options, sources, marks, most, heats, ScopeReader(about.roots))
    items = builder.items(jaxpr, "")
    if options.depth is None:
        _open_what_fits(items)
    return ProgramRows(
        builder.lines,
        _values(about.arguments, [text.bound([var], False) for var in jaxpr.invars]),
        _values(about.constants, [text.bound([var], False) for var in jaxpr.constvars]),
        _values(about.outputs, [text.read([atom]) for atom in jaxpr.outvars]),
        items,
        bool(heats),
    )


def _values(named: Sequence[NamedValue], texts: Iterable[Markup]) -> list[TreeValues]:
    """Return arguments, constants or results grouped by pytree."""
    rows, groups, start = list(zip(texts, named, strict=True)), [], 0
    for group in grouped_values(named):
        groups.append(TreeValues(group, rows[start : start + group.values]))
        start += group.values
    return groups


#: Equations of deeper bodies are only counted: browsers do not nest elements any further, and
#: Python does not nest the macros of the template.
_DEEPEST = 48


class _RowBuilder:
    """Builds the rows of a program."""

    def __init__(
        self,
        text: EquationText,
        options: ShowOptions,
        sources: PageSources,
        marks: Mapping[int, str],
        most: int,
        heats: Heats,
        scopes: ScopeReader,
    ):
        self.lines: Counter[str] = Counter()
        self._text = text
        self._types = options.types
        self._depth = options.depth
        self._selection = Selection(only=options.only, among=options.among)
        self._sources = sources
        self._marks = marks
        self._left = most
        self._heats = heats
        self._bodies: dict[Jaxpr, int] = {}
        self._scopes = scopes

    def items(self, jaxpr: Jaxpr, prefix: str, depth: int = 0) -> list[Item]:
        """Return the rows of the equations of a jaxpr, with their scopes around them."""
        if depth > _DEEPEST:
            return [SkippedRow(self._selection.count(jaxpr))]
        rows: list[EquationRow | SkippedRow] = []
        last, rest = None, 0
        paths = self._scopes.paths(jaxpr)
        for entry in self._selection.rows(jaxpr):
            if isinstance(entry, int):
                rows.append(SkippedRow(entry))
            elif not self._left:
                rest += self._selection.count_equation(entry[1])
            else:
                self._left -= 1
                row = self._row(*entry, paths[entry[0]], prefix, depth)
                row.heat = self._heats.of(entry[1])
                row.repeats = row.source is not None and row.source == last
                last = row.source
                rows.append(row)
        rows += [SkippedRow(rest)] if rest else []
        return _in_scopes(rows, self._depth is not None)

    def _row(
        self, index: int, eqn: JaxprEqn, around: tuple[str, ...], prefix: str, depth: int
    ) -> EquationRow:
        place = f"{prefix}{index}"
        source = self._sources.location(eqn)
        scope = tuple("".join(printable([name])) for name in around)
        inside = bodies(eqn)
        text = self._text.equation(eqn, bool(inside), self._types)
        mark = self._marks.get(id(eqn), "")
        row = EquationRow(place, text, len(text) > _LONG, source, scope, scope, mark)
        if source is not None and source.line:
            self.lines[source.line] += 1
        if inside:
            row.inside = self._selection.count_equation(eqn) - 1
            row.opened = self._depth is not None and depth < self._depth
            for number, (path, body) in enumerate(inside):
                which = f"[{number}]" if len(inside) > 1 else ""
                row.bodies.append(self._body(path, body, f"{place}{which}.", depth + 1))
        return row

    def _body(self, path: str, jaxpr: Jaxpr, prefix: str, depth: int) -> BodyRow | Reference:
        if jaxpr in self._bodies:
            return Reference(path, self._bodies[jaxpr])
        number = self._bodies[jaxpr] = len(self._bodies)
        bound = [*jaxpr.constvars, *jaxpr.invars]
        parameters = Several(self._text.bound(bound, self._types), len(bound))
        count = self._selection.count(jaxpr)
        items = self.items(jaxpr, prefix, depth)
        opened = self._depth is not None and depth <= self._depth
        results = Several(self._text.read(jaxpr.outvars), len(jaxpr.outvars))
        return BodyRow(path, number, count, parameters, items, results, opened)


# --- folding ----------------------------------------------------------------------------------


def _in_scopes(rows: Sequence[EquationRow | SkippedRow], opened: bool) -> list[Item]:
    """Return rows grouped by scope, and by line for those without a scope."""
    items: list[Item] = []
    for (step, line), run in groupby(rows, _step_or_line):
        together = list(run)
        within = [row for row in together if isinstance(row, EquationRow)]
        if step and len(within) > 1:
            around = _common([row.scope for row in within])
            for row in within:
                row.scope = row.scope[len(around) :]
            items.append(_scope("/".join(around), None, _in_scopes(within, opened), within, opened))
        elif line and _LEAST_OF_LINE <= len(within) < len(rows):
            items.append(_scope("", within[0].source, within, within, opened))
        else:
            items += together
    return items


def _step_or_line(row: EquationRow | SkippedRow) -> tuple[str, str]:
    """Return the next part of a row's scope, or its source line if it has none."""
    if isinstance(row, SkippedRow):
        return "", ""
    if row.scope:
        return row.scope[0], ""
    return "", row.source.text if row.source else ""


def _scope(
    name: str,
    line: SourceLink | None,
    items: Sequence[Item],
    rows: Sequence[EquationRow],
    opened: bool,
) -> ScopeRow:
    marks = Counter(mark for row in rows for mark in row.mark.split())
    heat = sum_of(row.heat for row in rows)
    return ScopeRow(name, line, items, sum(1 + row.inside for row in rows), marks, opened, heat)


def _common(scopes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the scopes that all begin with."""
    pairs = zip(min(scopes), max(scopes), strict=False)
    return tuple(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _open_what_fits(items: Sequence[Item]) -> None:
    """Open all of a small program, or else the outer scopes that fit.

    A lone item is open: the only call of a function that is jitted as a whole.
    """
    everything = list(_folded(items))
    for folded in everything:
        everything += _folded(_items_of(folded))
    small = len(items) + sum(len(_items_of(folded)) for folded in everything) <= _IN_SIGHT
    shown, todo = len(items), deque(_folded(items))
    while todo:
        folded = todo.popleft()
        inside = _items_of(folded)
        fits = isinstance(folded, ScopeRow) and folded.name and shown + len(inside) <= _IN_SIGHT
        alone = shown == 1
        if small or fits or alone:
            shown += len(inside) - alone
            folded.opened = True
            todo += _folded(inside)


def _folded(items: Iterable[Item | BodyRow]) -> Iterator[EquationRow | ScopeRow | BodyRow]:
    for item in items:
        if isinstance(item, ScopeRow | BodyRow) or (isinstance(item, EquationRow) and item.bodies):
            yield item


def _items_of(folded: EquationRow | ScopeRow | BodyRow) -> Sequence[Item | BodyRow]:
    if isinstance(folded, EquationRow):
        nested = [body for body in folded.bodies if isinstance(body, BodyRow)]
        return nested if len(nested) > 1 else [item for body in nested for item in body.items]
    return folded.items


# --- text -----------------------------------------------------------------------------------------
# The text of equations in HTML, with links between definitions and uses of variables.
#
# Each role of a token has its own element with a short name, since a page has many.

#: The HTML element of each role of token.
_ELEMENTS: dict[type[str], str] = {
    tokens.Type: "i",
    tokens.PrimitiveName: "b",
    tokens.ParameterToken: "u",
    tokens.LiteralToken: "samp",
    tokens.SharedName: "em",
}


class EquationText:
    """Builds the text of a program's equations.

    Args:
        reader: The names of its variables.
        at: The prefix of element ids.
        titles: Whether operands have their type as a title.
    """

    def __init__(self, reader: Reader, at: str, titles: bool):
        self._reader = reader
        self._at = at
        self._titles = titles
        self._variables: dict[Var, int] = {}
        self._made: dict[tuple[type[str], str], str] = {}

    def equation(self, eqn: JaxprEqn, holds_jaxprs: bool, types: bool) -> Markup:
        """Return `c:f32[3] = mul[...] a b`, without jaxprs in parameters.

        An opaque equation has its mark behind it.
        """
        head, parameters = self._reader.head(eqn), self._reader.parameter_tokens(eqn)
        if not holds_jaxprs:
            head = head[:1]
        elif len(head) > 1 and parameters[:1] == ["name="]:
            parameters = parameters[3:]  # already in the head
        return Markup(
            (self._bound(eqn.outvars, types) + " = " if eqn.outvars else "")
            + "".join(map(self._token, head))
            + (f"[{''.join(map(self._token, parameters))}]" if parameters else "")
            + (" " + self._read(eqn.invars) if eqn.invars else "")
            + (f" <small>{OPAQUE}</small>" if jaxcompat.is_opaque(eqn) else "")
        )

    def bound(self, variables: Sequence[Var], types: bool) -> Markup:
        """Return binders with spaces between them."""
        return Markup(self._bound(variables, types))

    def read(self, atoms: Sequence[Atom]) -> Markup:
        """Return operands with spaces between them."""
        return Markup(self._read(atoms))

    def _bound(self, variables: Sequence[Var], types: bool) -> str:
        texts = map(self._binder, variables)
        if not types:
            return " ".join(texts)
        types_of = map(self._token, map(self._reader.type_of, variables))
        return " ".join(map(add, texts, types_of))

    def _read(self, atoms: Sequence[Atom]) -> str:
        return " ".join(map(self._operand, atoms))

    def _binder(self, var: Var) -> str:
        name = self._reader.name(var)
        if isinstance(var, DropVar) or name == "_":
            return "_"
        return f'<dfn id="{self._at}v{self._number(var)}">{_escaped(name)}</dfn>'

    def _operand(self, atom: Atom) -> str:
        text = self._reader.operand(atom)
        if isinstance(atom, Literal):
            return self._token(text)
        title = f' title="{_escaped(self._reader.type_of(atom)[1:])}"' if self._titles else ""
        return f'<a href="#{self._at}v{self._number(atom)}"{title}>{_escaped(text)}</a>'

    def _number(self, var: Var) -> int:
        return self._variables.setdefault(var, len(self._variables))

    def _token(self, token: str) -> str:
        key = type(token), token
        html = self._made.get(key)
        if html is None:
            element, html = _ELEMENTS.get(type(token)), _escaped(token)
            html = f"<{element}>{html}</{element}>" if element else html
            self._made[key] = html
        return html


def _escaped(text: str) -> str:
    """Return text escaped as HTML, with unprintable characters written out."""
    return str(escape(text if text.isprintable() else "".join(printable([text]))))


# --- heat -----------------------------------------------------------------------------------------
# The costs of equations on a page as shares of the program's cost.
#
# The cost of an equation with bodies, or of a scope, is that of its contents.


@dataclass(frozen=True, slots=True)
class Heat:
    """A cost in absolute numbers and in percent of the program's cost.

    Attributes:
        flops: FLOPs and transcendentals.
        bytes: Bytes of memory traffic.
        flops_percent: The share of the program's FLOPs.
        bytes_percent: The share of the program's bytes.
    """

    flops: int
    bytes: int
    flops_percent: float
    bytes_percent: float

    @property
    def text(self) -> str:
        """The numbers."""
        return f"{with_prefix(self.flops)} FLOPs, {in_bytes(self.bytes)}"


class Heats:
    """The costs of the equations of a program.

    Args:
        jaxpr: The program.
        works: The cost of each equation, at every depth, by `id`. Costs with symbolic sizes are
            left out, since they have no shares.
    """

    def __init__(self, jaxpr: Jaxpr, works: Mapping[int, HasWork]) -> None:
        self._works = {key: numbers for key, work in works.items() if (numbers := _numbers(work))}
        pairs = [self._works[id(eqn)] for eqn in jaxpr.eqns if id(eqn) in self._works]
        self._flops, self._bytes = (sum(pair[i] for pair in pairs) for i in (0, 1))

    def __bool__(self) -> bool:
        """Return True if any cost is known."""
        return bool(self._works)

    def of(self, eqn: JaxprEqn) -> Heat | None:
        """Return the cost of an equation; None if zero or unknown."""
        flops, size = self._works.get(id(eqn), (0, 0))
        if not (flops or size):
            return None
        parts = flops / (self._flops or 1), size / (self._bytes or 1)
        return Heat(flops, size, *(100 * part for part in parts))


def sum_of(heats: Iterable[Heat | None]) -> Heat | None:
    """Return the sum of costs; None if zero or unknown."""
    amounts = [
        (heat.flops, heat.bytes, heat.flops_percent, heat.bytes_percent)
        for heat in heats
        if heat is not None
    ]
    return Heat(*map(sum, zip(*amounts, strict=True))) if amounts else None


def _numbers(work: HasWork) -> tuple[int, int] | None:
    flops, size = work.flops + work.transcendentals, work.bytes
    return (flops, size) if type(flops) is int and type(size) is int else None


# --- sources --------------------------------------------------------------------------------------
# The source files on a page, and the locations of equations in them.
#
# Only the user's own Python files are shown in full, and those of installed packages if their
# frames are selected; others are referred to by path. A file that has changed since a program was
# recorded has no lines; the page says why.


@dataclass(frozen=True)
class SourceLink:
    """The source location of an equation.

    Attributes:
        text: The nearest frame of the user's files, `model.py:9`, or its substitute.
        behind: The library frames it calls, `flax/linen/linear.py:199`.
        line: The line, if its file is shown.
        code: The code of the line, if the file may be shown.
    """

    text: str
    behind: str
    line: str = ""
    code: str = ""


@dataclass(frozen=True, eq=False)
class PageFile:
    """A displayed file: its number on the page, its path, and its lines in HTML.

    A file without lines has a `fault`, the reason.
    """

    number: int
    path: str
    lines: Sequence[Markup]
    fault: str = ""


class PageSources:
    """The source locations of equations, and their files.

    Args:
        options: The display options: whether sources are shown, and which frames.
        whole: Whether to show whole files instead of single lines.
        roots: The folders of the user's files, as a `Program` has them.
        texts: The text of files to show, by displayed path. The files need not exist.
    """

    def __init__(
        self,
        options: ShowOptions,
        whole: bool,
        roots: Sequence[Root],
        texts: Mapping[str, str] = MappingProxyType({}),
    ):
        self._whole = whole
        self._wanted = options.source
        self._frames = frames_now(roots)
        self._choice = options.frames or self._frames.choice
        self._locations: dict[object, SourceLink | None] = {}
        self._files: dict[str, PageFile | None] = {}
        self._known: dict[str, PageFile] = {}
        for path, text in texts.items():
            self._known[path] = PageFile(len(self._known), _printable(path), _colored(text))

    def location(self, eqn: JaxprEqn) -> SourceLink | None:
        """Return the source location of an equation; None if unknown or not shown."""
        traceback = eqn.source_info.traceback
        if not self._wanted or traceback is None:
            return None
        if traceback not in self._locations:
            self._locations[traceback] = self._found(eqn)
        return self._locations[traceback]

    def files(self) -> list[PageFile]:
        """Return the displayed files in order of first use."""
        read = [file for file in self._files.values() if file is not None]
        return list(dict.fromkeys((*self._known.values(), *read)))

    def line_of(self, name: str) -> SourceLink | None:
        """Return a line by its name, `model.py:9`; None if its file is not shown."""
        path, _, number = name.rpartition(":")
        for file in self.files():
            if file.path == path and number.isdecimal() and 0 < int(number) <= len(file.lines):
                code = Markup(file.lines[int(number) - 1].strip())
                return SourceLink(name, "", f"f{file.number}-{number}", code)
        return None

    def _found(self, eqn: JaxprEqn) -> SourceLink | None:
        location = self._frames.location(eqn)
        if location is None:
            return None
        frame, behind = location.chosen(self._choice)
        if frame.file not in self._files:
            self._files[frame.file] = self._read(frame.file)
        file = self._files[frame.file]
        first, *others = printable(map(self._frames.text, (frame, *behind)))
        if file is None or not 0 < frame.line <= len(file.lines):
            return SourceLink(first, BEHIND.join(others))
        code = Markup(file.lines[frame.line - 1].strip())
        line = f"f{file.number}-{frame.line}" if self._whole else ""
        return SourceLink(first, BEHIND.join(others), line, code)

    def _read(self, file: str) -> PageFile | None:
        """Return a file if its text, or the reason why it has none, is known and may be shown."""
        if source_file := self._known.get(self._frames.path(file)):
            return source_file
        shown = self._frames.is_own(file) or (self._choice != "mine" and is_installed(file))
        if not (shown and file.endswith(".py")):
            return None
        text, path = source_text.file_text(file), _printable(self._frames.path(file))
        fault = source_text.citation_note(path) if source_text.reason(file) else ""
        lines = _colored(text) if text else ()
        return PageFile(len(self.files()), path, lines, fault) if text or fault else None


def _printable(path: str) -> str:
    return "".join(printable([path]))


def _colored(text: str) -> list[Markup]:
    """Return the lines of Python source as HTML with Pygments classes."""
    plain = "\n".join("".join(printable([line.expandtabs()])) for line in text.split("\n"))
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    html = highlight(plain, lexer, HtmlFormatter(nowrap=True))
    return [Markup(line) for line in html.removesuffix("\n").split("\n")]
