"""The rows of a program's page: equations with their bodies, folded by nesting and by scope.

Equations of one scope, as `cost --by scope` groups them, are in a `Scope`; so are consecutive ones
of one source line if they have no scope. Those of a nested jaxpr are in a `Body`. Equations have
the same place as in the table: `3.0` is equation 0 in the body of equation 3.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from markupsafe import Markup

from jaxprtool.ir.core.equations import bodies
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.programs.program_signature import (
    NamedValue,
    ProgramSignature,
    ValueGroup,
    grouped,
)
from jaxprtool.ir.source.scopes import ScopeReader
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.render.page.heat import Heat, Heats, sum_of
from jaxprtool.render.page.sources import SourceLink, Sources
from jaxprtool.render.page.text import Text
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rendering import ShowOptions
from jaxprtool.render.terminal.rows import Reader

if TYPE_CHECKING:
    from jaxprtool.analysis.cost.work import Work

#: The maximum number of rows initially visible, unless more cannot be folded.
_IN_SIGHT = 60

#: The minimum number of equations of a line without scope that are folded.
_LEAST_OF_LINE = 4

#: A row with more characters of HTML is clamped to a few lines.
_LONG = 800


@dataclass(eq=False, slots=True)
class Row:
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
    bodies: list[Body | Reference] = field(default_factory=list)
    opened: bool = False
    heat: Heat | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """A row of values: the arguments or results of a jaxpr."""

    text: Markup
    count: int


@dataclass(frozen=True, slots=True)
class Skipped:
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
class Scope:
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
class Body:
    """A nested jaxpr."""

    kind: ClassVar[str] = "body"
    path: str
    number: int
    count: int
    parameters: Several
    items: list[Item]
    results: Several
    opened: bool = False


Item: TypeAlias = Row | Scope | Skipped


class Values(NamedTuple):
    """Arguments, constants or results that belong to one pytree."""

    group: ValueGroup
    rows: list[tuple[Markup, NamedValue]]


class Listing(NamedTuple):
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
    arguments: list[Values]
    constants: list[Values]
    results: list[Values]
    items: list[Item]
    hot: bool


def listing(
    about: ProgramSignature,
    options: ShowOptions,
    sources: Sources,
    at: str,
    titles: bool = False,
    marks: Mapping[int, str] = MappingProxyType({}),
    most: int = sys.maxsize,
    works: Mapping[int, Work] = MappingProxyType({}),
) -> Listing:
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
    text = Text(Reader(about, options), at, titles)
    jaxpr = about.jaxpr
    heats = Heats(jaxpr, works)
    builder = _Builder(text, options, sources, marks, most, heats, ScopeReader(about.roots))
    items = builder.items(jaxpr, "")
    if options.depth is None:
        _open_what_fits(items)
    return Listing(
        builder.lines,
        _values(about.arguments, [text.bound([var], False) for var in jaxpr.invars]),
        _values(about.constants, [text.bound([var], False) for var in jaxpr.constvars]),
        _values(about.outputs, [text.read([atom]) for atom in jaxpr.outvars]),
        items,
        bool(heats),
    )


def _values(named: Sequence[NamedValue], texts: Iterable[Markup]) -> list[Values]:
    """Return arguments, constants or results grouped by pytree."""
    rows, found, start = list(zip(texts, named, strict=True)), [], 0
    for group in grouped(named):
        found.append(Values(group, rows[start : start + group.values]))
        start += group.values
    return found


#: Equations of deeper bodies are only counted: browsers do not nest elements any further, and
#: Python does not nest the macros of the template.
_DEEPEST = 48


class _Builder:
    """Builds the rows of a program."""

    def __init__(
        self,
        text: Text,
        options: ShowOptions,
        sources: Sources,
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

    def items(self, jaxpr: Jaxpr, before: str, depth: int = 0) -> list[Item]:
        """Return the rows of the equations of a jaxpr, with their scopes around them."""
        if depth > _DEEPEST:
            return [Skipped(self._selection.count(jaxpr))]
        rows: list[Row | Skipped] = []
        last, rest = None, 0
        paths = self._scopes.paths(jaxpr)
        for found in self._selection.rows(jaxpr):
            if isinstance(found, int):
                rows.append(Skipped(found))
            elif not self._left:
                rest += self._selection.count_equation(found[1])
            else:
                self._left -= 1
                row = self._row(*found, paths[found[0]], before, depth)
                row.heat = self._heats.of(found[1])
                row.repeats = row.source is not None and row.source == last
                last = row.source
                rows.append(row)
        rows += [Skipped(rest)] if rest else []
        return _in_scopes(rows, self._depth is not None)

    def _row(
        self, index: int, eqn: JaxprEqn, around: tuple[str, ...], before: str, depth: int
    ) -> Row:
        place = f"{before}{index}"
        source = self._sources.location(eqn)
        scope = tuple("".join(printable([name])) for name in around)
        inside = bodies(eqn)
        text = self._text.equation(eqn, bool(inside), self._types)
        mark = self._marks.get(id(eqn), "")
        row = Row(place, text, len(text) > _LONG, source, scope, scope, mark)
        if source is not None and source.line:
            self.lines[source.line] += 1
        if inside:
            row.inside = self._selection.count_equation(eqn) - 1
            row.opened = self._depth is not None and depth < self._depth
            for number, (path, body) in enumerate(inside):
                which = f"[{number}]" if len(inside) > 1 else ""
                row.bodies.append(self._body(path, body, f"{place}{which}.", depth + 1))
        return row

    def _body(self, path: str, jaxpr: Jaxpr, before: str, depth: int) -> Body | Reference:
        if jaxpr in self._bodies:
            return Reference(path, self._bodies[jaxpr])
        number = self._bodies[jaxpr] = len(self._bodies)
        bound = [*jaxpr.constvars, *jaxpr.invars]
        parameters = Several(self._text.bound(bound, self._types), len(bound))
        count = self._selection.count(jaxpr)
        items = self.items(jaxpr, before, depth)
        opened = self._depth is not None and depth <= self._depth
        results = Several(self._text.read(jaxpr.outvars), len(jaxpr.outvars))
        return Body(path, number, count, parameters, items, results, opened)


# --- folding ----------------------------------------------------------------------------------


def _in_scopes(rows: Sequence[Row | Skipped], opened: bool) -> list[Item]:
    """Return rows grouped by scope, and by line for those without a scope."""
    items: list[Item] = []
    for (step, line), run in groupby(rows, _step_or_line):
        together = list(run)
        within = [row for row in together if isinstance(row, Row)]
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


def _step_or_line(row: Row | Skipped) -> tuple[str, str]:
    """Return the next part of a row's scope, or its source line if it has none."""
    if isinstance(row, Skipped):
        return "", ""
    if row.scope:
        return row.scope[0], ""
    return "", row.source.text if row.source else ""


def _scope(
    name: str, line: SourceLink | None, items: Sequence[Item], rows: Sequence[Row], opened: bool
) -> Scope:
    marks = Counter(mark for row in rows for mark in row.mark.split())
    heat = sum_of(row.heat for row in rows)
    return Scope(name, line, items, sum(1 + row.inside for row in rows), marks, opened, heat)


def _common(scopes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the scopes that all begin with."""
    pairs = zip(min(scopes), max(scopes), strict=False)
    return tuple(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _open_what_fits(items: Sequence[Item]) -> None:
    """Open all of a small program, or else the outer scopes that fit.

    A lone item is open: the only call of a function that is jitted as a whole.
    """
    everything = list(_folded(items))
    for each in everything:
        everything += _folded(_items_of(each))
    small = len(items) + sum(len(_items_of(each)) for each in everything) <= _IN_SIGHT
    shown, todo = len(items), deque(_folded(items))
    while todo:
        each = todo.popleft()
        inside = _items_of(each)
        fits = isinstance(each, Scope) and each.name and shown + len(inside) <= _IN_SIGHT
        alone = shown == 1
        if small or fits or alone:
            shown += len(inside) - alone
            each.opened = True
            todo += _folded(inside)


def _folded(items: Iterable[Item | Body]) -> Iterator[Row | Scope | Body]:
    for item in items:
        if isinstance(item, Scope | Body) or (isinstance(item, Row) and item.bodies):
            yield item


def _items_of(folded: Row | Scope | Body) -> Sequence[Item | Body]:
    if isinstance(folded, Row):
        held = [body for body in folded.bodies if isinstance(body, Body)]
        return held if len(held) > 1 else [item for body in held for item in body.items]
    return folded.items
