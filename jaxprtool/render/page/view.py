"""The rows of a program's page: equations with what they hold, folded by nesting and by scope.

Consecutive equations of one name scope are in a `Scope`, those of a nested jaxpr in a `Body`. A
variable is known by a number where it is bound and where it is read, so that one can be linked to
the other. Equations bear the place that the table gives them: `3.0` is equation 0 in that of 3.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.border import Border, NamedValue, ValueGroup, grouped
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation import tokens
from jaxprtool.ir.notation.tokens import LiteralToken, Type
from jaxprtool.jaxcompat import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render.lines import printable
from jaxprtool.render.page.sources import Place, Sources
from jaxprtool.render.rendering import ShowOptions
from jaxprtool.render.rows import Reader

#: So many rows are in sight at first, if the program can be folded to so few.
_IN_SIGHT = 80

#: A row of more pieces is clamped to a few lines.
_LONG = 60


class Piece(NamedTuple):
    """A piece of a row's text.

    Attributes:
        element: The HTML element that it is in; `dfn` is a variable where it is bound, `a` where
            it is read. Empty for what has none.
        text: The text.
        variable: The number of the variable.
    """

    element: str
    text: str
    variable: int = 0


@dataclass(eq=False, slots=True)
class Row:
    """An equation.

    Attributes:
        place: Where it stands, as the table has it.
        pieces: Its text, in one line.
        source: Where it comes from.
        path: Its name stack.
        scope: What of that the scopes around it do not say.
        mark: What passes have done to it: `added`, `removed`, or both.
        repeats: Whether it comes from the same place as the row before it.
        inside: How many equations its bodies have.
        bodies: The jaxprs that it holds.
        opened: Whether these are in sight at first.
    """

    kind: ClassVar[str] = "row"

    place: str
    pieces: list[Piece]
    source: Place | None
    path: str
    scope: str
    mark: str = ""
    repeats: bool = False
    inside: int = 0
    bodies: list[Body | Reference] = field(default_factory=list)
    opened: bool = False

    @property
    def is_long(self) -> bool:
        return len(self.pieces) > _LONG


@dataclass(frozen=True, slots=True)
class Skipped:
    """Equations that are left out."""

    kind: ClassVar[str] = "skipped"
    count: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A jaxpr that is shown further up."""

    kind: ClassVar[str] = "reference"
    path: str
    number: int


@dataclass(eq=False, slots=True)
class Scope:
    """Consecutive equations of a name scope."""

    kind: ClassVar[str] = "scope"

    name: str
    items: list[Item]
    count: int
    marks: Counter[str]
    opened: bool = False


@dataclass(eq=False, slots=True)
class Body:
    """A nested jaxpr."""

    kind: ClassVar[str] = "body"
    path: str
    number: int
    count: int
    parameters: list[Piece]
    items: list[Item]
    results: list[Piece]
    opened: bool = False


Item: TypeAlias = Row | Scope | Skipped


class Values(NamedTuple):
    """Arguments, constants or results that belong to one pytree."""

    group: ValueGroup
    rows: list[tuple[list[Piece], NamedValue]]


class Listing(NamedTuple):
    """A program's rows, and its values at the border.

    Attributes:
        types: The types of variables, by their numbers.
        lines: How many rows come from each line of the files that are shown.
        arguments: The arguments of the program.
        constants: Its constants.
        results: Its results.
        items: Its equations.
    """

    types: Sequence[str]
    lines: Counter[str]
    arguments: list[Values]
    constants: list[Values]
    results: list[Values]
    items: list[Item]


#: The HTML element of each role of token.
_ELEMENTS: dict[type[str], str] = {
    tokens.Type: "i",
    tokens.PrimitiveName: "b",
    tokens.ParameterToken: "u",
    tokens.LiteralToken: "samp",
    tokens.SharedName: "em",
}


def listing(
    about: Border,
    options: ShowOptions,
    sources: Sources,
    marks: Mapping[int, str],
    most: int | None = None,
) -> Listing:
    """Return the rows of a program.

    Args:
        about: The program.
        options: What is shown. To the `depth` bodies are open at first; the others are folded.
        sources: Where equations come from.
        marks: The marks of equations, by identity.
        most: The number of rows, beyond which equations are counted and left out.
    """
    maker = _Maker(about, options, sources, marks, most)
    jaxpr = about.jaxpr
    arguments = maker.values(about.arguments, jaxpr.invars, True)
    constants = maker.values(about.constants, jaxpr.constvars, True)
    items = maker.items(jaxpr, "")
    if options.depth is None:
        _open_what_fits(items)
    results = maker.values(about.outputs, jaxpr.outvars, False)
    return Listing(maker.types, maker.lines, arguments, constants, results, items)


class _Maker:
    """Makes the rows of a program."""

    def __init__(
        self,
        about: Border,
        options: ShowOptions,
        sources: Sources,
        marks: Mapping[int, str],
        most: int | None,
    ):
        self.types: list[str] = []
        self.lines: Counter[str] = Counter()
        self._left = sys.maxsize if most is None else most
        self._reader = Reader(about, options)
        self._with_types = options.types
        self._depth = options.depth
        self._selection = options.selection()
        self._selection.depth = None
        self._sources = sources
        self._marks = marks
        self._variables: dict[int, int] = {}
        self._bodies: dict[Jaxpr, int] = {}
        self._scopes: dict[int, str] = {}

    def values(
        self, named: Sequence[NamedValue], atoms: Sequence[Atom], bound: bool
    ) -> list[Values]:
        """Return values at the border, those of a pytree together."""
        rows = [
            (list(self._bound([atom], False) if bound else self._read([atom])), value)
            for atom, value in zip(atoms, named, strict=True)
        ]
        found, start = [], 0
        for group in grouped(named):
            found.append(Values(group, rows[start : start + group.values]))
            start += group.values
        return found

    def items(self, jaxpr: Jaxpr, before: str, depth: int = 0) -> list[Item]:
        """Return the rows of the equations of a jaxpr, with their scopes around them."""
        rows: list[Row | Skipped] = []
        last, rest = None, 0
        for found in self._selection.rows(jaxpr):
            if isinstance(found, int):
                rows.append(Skipped(found))
            elif not self._left:
                rest += self._selection.count_equation(found[1])
            else:
                self._left -= 1
                row = self._row(*found, before, depth)
                row.repeats = row.source is not None and row.source == last
                last = row.source
                rows.append(row)
        rows += [Skipped(rest)] if rest else []
        return _in_scopes(rows, self._depth is not None)

    def _row(self, index: int, eqn: JaxprEqn, before: str, depth: int) -> Row:
        place = f"{before}{index}"
        source, scope = self._sources.place(eqn), self._scope(eqn)
        mark = self._marks.get(id(eqn), "")
        row = Row(place, list(self._pieces(eqn)), source, scope, scope, mark)
        if source is not None and source.line:
            self.lines[source.line] += 1
        if inside := bodies(eqn):
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
        parameters = list(self._bound([*jaxpr.constvars, *jaxpr.invars], self._with_types))
        count = self._selection.count(jaxpr)
        items = self.items(jaxpr, before, depth)
        opened = self._depth is not None and depth <= self._depth
        results = list(self._read(jaxpr.outvars))
        return Body(path, number, count, parameters, items, results, opened)

    def _scope(self, eqn: JaxprEqn) -> str:
        key = id(eqn.source_info.name_stack)
        if key not in self._scopes:
            self._scopes[key] = "".join(printable([jaxcompat.name_stack(eqn)]))
        return self._scopes[key]

    # --- pieces -------------------------------------------------------------------------------

    def _pieces(self, eqn: JaxprEqn) -> Iterator[Piece]:
        """Yield the pieces of `c:f32[3] = mul[…] a b`."""
        reader = self._reader
        yield from self._bound(eqn.outvars, self._with_types)
        if eqn.outvars:
            yield Piece("", " = ")
        shown = reader.parameter_tokens(eqn)
        yield from _pieces(reader.head(eqn))
        if bodies(eqn) and shown[:1] == ["name="]:
            shown = shown[3:]  # the head has it
        if shown:
            yield from _pieces(["[", *shown, "]"])
        if eqn.invars:
            yield Piece("", " ")
            yield from self._read(eqn.invars)

    def _bound(self, variables: Sequence[Var], types: bool) -> Iterator[Piece]:
        for i, var in enumerate(variables):
            if i:
                yield Piece("", " ")
            name = _printable(self._reader.name(var))
            if isinstance(var, DropVar) or name == "_":
                yield Piece("", name)
            else:
                yield Piece("dfn", name, self._number(var))
            if types:
                yield from _pieces([Type(f":{type_of(var.aval)}")])

    def _read(self, atoms: Sequence[Atom]) -> Iterator[Piece]:
        for i, atom in enumerate(atoms):
            if i:
                yield Piece("", " ")
            if isinstance(atom, Literal):
                yield from _pieces([LiteralToken(self._reader.operand(atom))])
            else:
                yield Piece("a", _printable(self._reader.name(atom)), self._number(atom))

    def _number(self, var: Var) -> int:
        number = self._variables.setdefault(id(var), len(self.types))
        if number == len(self.types):
            self.types.append(_printable(type_of(var.aval)))
        return number


def _printable(text: str) -> str:
    return text if text.isprintable() else printable([text])[0]


def _pieces(texts: Iterable[str]) -> list[Piece]:
    return [Piece(_ELEMENTS.get(type(text), ""), _printable(text)) for text in texts]


# --- folding ----------------------------------------------------------------------------------


def _in_scopes(rows: Sequence[Row | Skipped], opened: bool) -> list[Item]:
    """Return rows with those of a name scope together, where there are several in a row."""
    items: list[Item] = []
    for first, run in groupby(rows, lambda row: _first_step(row)):
        together = list(run)
        if not first or len(together) == 1:
            items += together
            continue
        scoped = [row for row in together if isinstance(row, Row)]
        name = _common([row.scope for row in scoped])
        for row in scoped:
            row.scope = row.scope[len(name) + 1 :]
        marks = Counter(mark for row in scoped for mark in row.mark.split())
        count = sum(1 + row.inside for row in scoped)
        items.append(Scope(name, _in_scopes(scoped, opened), count, marks, opened))
    return items


def _first_step(row: Row | Skipped) -> str:
    return row.scope.partition("/")[0] if isinstance(row, Row) else ""


def _common(scopes: Sequence[str]) -> str:
    """Return the scope that all of some are in, or are."""
    least, most = min(scopes).split("/"), max(scopes).split("/")
    steps = 0
    for a, b in zip(least, most, strict=False):
        if a != b:
            break
        steps += 1
    return "/".join(least[:steps])


def _open_what_fits(items: Sequence[Item]) -> None:
    """Open scopes and bodies from the outermost inwards, as long as there are not too many rows."""
    level: list[Row | Scope | Body] = _folded(items)
    shown = len(items)
    while level:
        inside = [_items_of(each) for each in level]
        shown += sum(map(len, inside))
        if shown > _IN_SIGHT:
            return
        for each in level:
            each.opened = True
        level = [folded for items in inside for folded in _folded(items)]


def _items_of(folded: Row | Scope | Body) -> Sequence[Item | Body]:
    if isinstance(folded, Row):
        held = [body for body in folded.bodies if isinstance(body, Body)]
        return held if len(held) > 1 else [item for body in held for item in body.items]
    return folded.items


def _folded(items: Iterable[Item | Body]) -> list[Row | Scope | Body]:
    return [
        item
        for item in items
        if isinstance(item, Scope | Body) or (isinstance(item, Row) and item.bodies)
    ]
