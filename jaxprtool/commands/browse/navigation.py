"""Navigation from a row to definitions and uses, and the search for rows."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from jaxprtool.commands.browse.document import CallStack, Document
from jaxprtool.commands.browse.outline import AFTER, Kind, OutlineNode, ProgramOutline, RowPlace
from jaxprtool.extend import Atom, Jaxpr, Literal, Var, bodies, is_flat, type_of
from jaxprtool.extend.programs import Holder

# --- navigation -----------------------------------------------------------------------------------
# Navigation from a row to the definitions of its operands and the uses of its results.


@dataclass(frozen=True)
class Way:
    """A destination of a jump.

    Attributes:
        label: The value that leads there.
        node: The row.
    """

    label: str
    node: OutlineNode


class Navigator:
    """Finds the destinations of jumps from a row.

    Args:
        document: The program.
        outline: Its rows.
    """

    def __init__(self, document: Document, outline: ProgramOutline):
        self._document = document
        self._flow = document.flow
        self._outline = outline

    def definitions(self, node: OutlineNode) -> list[Way]:
        """Return the definitions of a row's operands: equations or arguments of the program.

        An argument of a body is defined by the operand of the call, and by the carry of a loop.
        """
        ways: list[Way] = []
        if (eqn := node.eqn) is not None:
            for atom in dict.fromkeys(v for v in eqn.invars if type(v) is not Literal):
                ways += self._definition(node.container, node.jaxpr, atom)
            if node.folds:
                ways += self._made_inside(node)
        elif node.kind is Kind.result:
            ways += self._definition(self._outline.root, node.jaxpr, node.jaxpr.outvars[node.index])
        return _distinct(ways)

    def sources(self, node: OutlineNode) -> list[str]:
        """Return a short description of the source of each operand of an equation."""
        return [
            "" if type(atom) is Literal else self._source(node, atom)
            for atom in node.jaxpr.eqns[node.index].invars
        ]

    def _source(self, node: OutlineNode, var: Var) -> str:
        for note, where in self._binders(node.container, node.jaxpr, var):
            if note:
                return note.strip(", ")
            eqn = where.eqn
            return "an argument" if eqn is None else f"← {eqn.primitive.name}"
        return ""

    def _definition(self, container: OutlineNode, jaxpr: Jaxpr, atom: Atom) -> Iterator[Way]:
        if type(atom) is Literal:
            return
        label = self._document.name(atom)
        for where, node in self._binders(container, jaxpr, atom):
            yield Way(f"{label}{where}", node)

    def _binders(
        self, container: OutlineNode, jaxpr: Jaxpr, var: Var
    ) -> Iterator[tuple[str, OutlineNode]]:
        """Yield the rows that bind a variable, with a description of each."""
        index = self._flow.definition(jaxpr, var)
        if index is not None:
            yield "", self._outline.leaf(container, index)
            return
        position = self._flow.argument(jaxpr, var)
        if position is None:
            return
        if container.kind is Kind.program:
            yield "", self._outline.locate((-1, position))
            return
        call = container if container.kind is Kind.equation else container.container
        holder = self._holder(call, container)
        origins = self._flow.origins(holder, position)
        if not origins:
            yield ", bound by the call", call
        for number, (where, atom) in enumerate(origins):
            note = ", from the previous iteration" if number else f" = {self._document.name(atom)}"
            if type(atom) is Literal:
                yield note, call
                continue
            if where is call.jaxpr:
                yield from ((note, node) for _, node in self._binders(call.container, where, atom))
            elif (inside := self._outline.inside(call, where)) is not None:
                back = self._flow.definition(where, atom)
                yield note, call if back is None else self._outline.leaf(inside, back)

    def _made_inside(self, node: OutlineNode) -> Iterator[Way]:
        """Yield the rows in bodies that compute the results of a call or a loop."""
        eqn = node.jaxpr.eqns[node.index]
        for number, (_, body) in enumerate(bodies(eqn)):
            inside = self._outline.inside(node, body)
            for position, atom in enumerate(body.outvars):
                index = None if type(atom) is Literal else self._flow.definition(body, atom)
                if inside is None or index is None:
                    continue
                for where, var in self._flow.destinations(
                    Holder(node.jaxpr, node.index, number), position
                ):
                    if where is node.jaxpr:
                        label = f"{self._document.name(var)}, computed inside"
                        yield Way(label, self._outline.leaf(inside, index))

    def uses(self, node: OutlineNode) -> list[Way]:
        """Return the uses of the values that a row binds, including those in bodies."""
        ways: list[Way] = []
        container = self._outline.root if node.eqn is None else node.container
        for jaxpr, atom in self._document.values(node):
            if type(atom) is not Literal and node.kind is not Kind.result:
                ways += self._uses(container, jaxpr, atom, self._document.name(atom))
        return _distinct(ways)

    def _uses(self, container: OutlineNode, jaxpr: Jaxpr, var: Var, label: str) -> Iterator[Way]:
        for index in self._flow.readers(jaxpr, var):
            leaf = self._outline.leaf(container, index)
            yield Way(label, leaf)
            if leaf.folds:
                yield from self._uses_inside(leaf, var, label)
        for position in self._flow.results(jaxpr, var):
            if container.kind is Kind.program:
                yield Way(label, self._outline.locate((AFTER, position)))
                continue
            call = container if container.kind is Kind.equation else container.container
            yield Way(f"{label}, a result", call)
            for where, value in self._flow.destinations(self._holder(call, container), position):
                if where is call.jaxpr:
                    alias = f"{label} = {self._document.name(value)}"
                    for index in self._flow.readers(where, value):
                        yield Way(alias, self._outline.leaf(call.container, index))
                    if call.container.kind is Kind.program:
                        for place in self._flow.results(where, value):
                            yield Way(alias, self._outline.locate((AFTER, place)))

    def _uses_inside(self, call: OutlineNode, var: Var, label: str) -> Iterator[Way]:
        """Yield the rows in the bodies of an equation that use an operand's argument."""
        eqn = call.jaxpr.eqns[call.index]
        for number, (_, body) in enumerate(bodies(eqn)):
            inside = self._outline.inside(call, body)
            for position, arg in enumerate(body.invars):
                readers = self._flow.readers(body, arg)
                if inside is None or not readers:
                    continue
                origins = self._flow.origins(Holder(call.jaxpr, call.index, number), position)
                if origins and origins[0] == (call.jaxpr, var):
                    for index in readers:
                        yield Way(f"{label}, inside", self._outline.leaf(inside, index))

    def _holder(self, call: OutlineNode, container: OutlineNode) -> Holder:
        nested = bodies(call.jaxpr.eqns[call.index])
        number = next(i for i, (_, body) in enumerate(nested) if body is container.body)
        return Holder(call.jaxpr, call.index, number)


def _distinct(ways: list[Way]) -> list[Way]:
    """Return the first way to each row."""
    by_row: dict[int, Way] = {}
    for way in ways:
        by_row.setdefault(id(way.node), way)
    return list(by_row.values())


def way_text(way: Way, document: Document) -> str:
    """Return the text of a destination, preceded by its label unless the row starts with it."""
    text = "".join(document.row(way.node))
    return text if text.startswith(f"{way.label}:") else f"{way.label}   {text}"


def counterpart(
    node: OutlineNode, document: Document, outline: ProgramOutline
) -> OutlineNode | None:
    """Return the row in another state or grouping that corresponds to a row."""
    if node.kind in (Kind.argument, Kind.result):
        is_there = node.index < len(document.ends(node.kind))
        return outline.locate(node.place) if is_there else None
    if (eqn := node.eqn) is None:
        return None
    results = set(map(id, eqn.outvars))
    matching = RowMatches(document, lambda jaxpr, index, _: jaxpr.eqns[index] is eqn)
    if not matching.total:
        matching = RowMatches(
            document,
            lambda jaxpr, index, _: any(id(var) in results for var in jaxpr.eqns[index].outvars),
        )
    if not matching.total:
        return None
    return outline.locate(node.place if node.place in matching else matching.at(0))


# --- search ---------------------------------------------------------------------------------------
# Queries of a search, and matching rows.
#
#     dot_general            a primitive, or part of its name; also reduce_*
#     f32[8,3]  bf16  [8,3]  a type, a dtype or a shape of a result or operand
#     params['w']            an argument, and its readers
#     Dense_0                a scope, or the function of a call
#     model.py:9  :9         a line of the source
#
# All words of a query must match. Lower case letters also match capitals.

_LINE = re.compile(r"(?P<file>\S*):(?P<line>\d+)")

#: Returns True if an equation matches: a body, a position in it, and the call stack of the body.
Fits: TypeAlias = Callable[[Jaxpr, int, CallStack], bool]

#: A body, and the call stack that its equations without user code inherit; empty if not needed.
_Called: TypeAlias = tuple[Jaxpr, CallStack]


class _BodyMatches:
    """The matches in a body: the steps to them, and how many are before each step."""

    def __init__(self) -> None:
        self.steps: list[RowPlace] = []
        self.bodies: list[_Called | None] = []
        self.before = [0]

    def add(self, step: RowPlace, body: _Called | None = None, count: int = 1) -> None:
        """Append a matching row, or a body with matches."""
        self.steps.append(step)
        self.bodies.append(body)
        self.before.append(self.before[-1] + count)


class RowMatches:
    """The places of matching rows, in program order; a shared body counts at each of its calls.

    Places are counted, not listed: bodies that share bodies have exponentially many.

    Args:
        document: The program.
        fits: Returns True if an equation matches.
        ends: The places of matching arguments and results.
        by_line: Whether `fits` reads the call stack.
    """

    def __init__(
        self, document: Document, fits: Fits, ends: Sequence[RowPlace] = (), by_line: bool = False
    ):
        self._document, self._fits, self._ends, self._by_line = document, fits, ends, by_line
        self._top: _Called = document.top, ()
        self._counts: dict[_Called, _BodyMatches] = {}
        todo: list[_Called] = [self._top]
        calls: dict[_Called, dict[int, list[_Called]]] = {self._top: self._calls(self._top)}
        while todo:  # inner bodies first
            inside = chain.from_iterable(calls[todo[-1]].values())
            if new := [body for body in inside if body not in self._counts]:
                calls |= {body: self._calls(body) for body in new if body not in calls}
                todo += new
            elif (body := todo.pop()) not in self._counts:
                self._counts[body] = self._counted(body, calls[body])

    def _calls(self, called: _Called) -> dict[int, list[_Called]]:
        """Return the bodies in each equation of a body, by its position."""
        jaxpr, above = called
        calls = {}
        for index, eqn in enumerate(() if is_flat(jaxpr) else jaxpr.eqns):
            if nested := bodies(eqn):
                stack = self._document.stack(eqn, above) if self._by_line else ()
                calls[index] = [(body, stack) for _, body in nested]
        return calls

    def _counted(self, called: _Called, calls: Mapping[int, list[_Called]]) -> _BodyMatches:
        (jaxpr, above), counts = called, _BodyMatches()
        ends = self._ends if jaxpr is self._document.top else ()
        for place in ends:
            if place < (0,):
                counts.add(place)
        for index in range(len(jaxpr.eqns)):
            if self._fits(jaxpr, index, above):
                counts.add((index,))
            for number, body in enumerate(calls.get(index, ())):
                if count := self._counts[body].before[-1]:
                    counts.add((index, number), body, count)
        for place in ends:
            if place > (0,):
                counts.add(place)
        return counts

    @property
    def total(self) -> int:
        """The number of matches."""
        return self._counts[self._top].before[-1]

    def at(self, number: int) -> RowPlace:
        """Return the place of a match."""
        place: RowPlace = ()
        body: _Called | None = self._top
        while body is not None:
            counts = self._counts[body]
            row = bisect_right(counts.before, number) - 1
            number -= counts.before[row]
            place += counts.steps[row]
            body = counts.bodies[row]
        return place

    def before(self, place: RowPlace) -> int:
        """Return the number of matches before a place."""
        number = 0
        body: _Called | None = self._top
        while body is not None and place:
            counts = self._counts[body]
            step, place = place[:2], place[2:]
            row = bisect_left(counts.steps, step)
            number += counts.before[row]
            body = counts.bodies[row] if counts.steps[row : row + 1] == [step] else None
        return number

    def __contains__(self, place: RowPlace) -> bool:
        number = self.before(place)
        return number < self.total and self.at(number) == place

    def next(self, place: RowPlace, by: int) -> int:
        """Return the number of the next match relative to a place; the search wraps around.

        With `by` 0 it is at or after the place, with 1 after it, with -1 before it.
        """
        number = self.before(place)
        if by > 0 and place in self:
            number += 1
        return (number - (by < 0)) % self.total


def matches(document: Document, query: str) -> RowMatches:
    """Return the matches of a query."""
    words = [_Word(document, word) for word in query.split()]

    def fits(jaxpr: Jaxpr, index: int, above: CallStack) -> bool:
        return all(word.fits(jaxpr, index, above) for word in words)

    ends = [
        (first, index)
        for first, values in ((-1, document.about.arguments), (AFTER, document.about.outputs))
        for index, value in enumerate(values)
        if all(word.fits_text(value.name) or word.fits_text(value.type) for word in words)
    ]
    return RowMatches(document, fits, ends, any(word.is_line for word in words))


def matches_of_line(document: Document, line: tuple[str, int]) -> RowMatches:
    """Return the equations of a source line: a file, and a number."""
    return RowMatches(
        document,
        lambda jaxpr, index, above: document.line(jaxpr.eqns[index], above) == line,
        by_line=True,
    )


class _Word:
    """One word of a query."""

    def __init__(self, document: Document, word: str):
        self._document = document
        self._folds = word == word.lower()
        self._word = word
        self._types: dict[int, bool] = {}
        self._texts: dict[str, bool] = {}
        self._stacks: dict[CallStack, bool] = {}
        escaped = re.escape(word).replace(r"\*", ".*")
        self._pattern = re.compile(escaped) if "*" in word else None
        line = _LINE.fullmatch(word)
        self._line = (line["file"], int(line["line"])) if line else None
        self.is_line = line is not None
        self._arguments = {
            var
            for var, value in zip(document.top.invars, document.about.arguments, strict=True)
            if self.fits_text(value.name)
        }

    def fits_text(self, text: str) -> bool:
        """Return True if a text contains the word or matches its pattern."""
        fits = self._texts.get(text)
        if fits is None:
            fits = self._texts[text] = self._is_in(text)
        return fits

    def _is_in(self, text: str) -> bool:
        text = text.lower() if self._folds else text
        return self._pattern.fullmatch(text) is not None if self._pattern else self._word in text

    def fits(self, jaxpr: Jaxpr, index: int, above: CallStack) -> bool:
        """Return True if an equation matches, in a body called from a stack."""
        eqn = jaxpr.eqns[index]
        if self._line is not None:
            return self._fits_line(self._document.stack(eqn, above), *self._line)
        name = eqn.params.get("name")
        if self.fits_text(eqn.primitive.name) or (isinstance(name, str) and self.fits_text(name)):
            return True
        if any(map(self._fits_value, eqn.outvars)) or any(map(self._fits_value, eqn.invars)):
            return True
        if self._arguments and any(
            type(v) is not Literal and v in self._arguments for v in eqn.invars
        ):
            return True
        return self.fits_text("/".join(self._document.scopes(jaxpr)[index]))

    def _fits_value(self, atom: Atom) -> bool:
        key = id(atom.aval)
        fits = self._types.get(key)
        if fits is None:
            fits = self._types[key] = self.fits_text(type_of(atom.aval))
        return fits

    def _fits_line(self, stack: CallStack, file: str, line: int) -> bool:
        if stack not in self._stacks:
            frames = self._document.frames
            shown = stack if file else stack[frames.nearest(stack) :][:1]
            self._stacks[stack] = any(
                frame.line == line
                and (not file or f"/{frames.path(frame.file)}".endswith(f"/{file}"))
                for frame in shown
            )
        return self._stacks[stack]
