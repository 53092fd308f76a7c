"""Find the shared bodies that a program calls more than once, and the equations outside of them.

A repeated body is the jaxpr of `jit` equations that is called more than once and that has the mark
of the pass `outline`, or was created by it. Equations are counted at every depth, those in the body
of a loop once, as in `stats`. The equations of a program are counted as if each copy were inlined.
XLA compiles the body of marked calls once; it inlines other calls.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.documents import document
from jaxprtool.ir.equations import all_jaxprs, equations, holders
from jaxprtool.ir.frames import Frames, Root, frames_now
from jaxprtool.ir.meshes import left_to_partitioner
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.source_text import Place
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame


@document(without=("file", "first"), names={"last": "last_line"}, also=("place",))
@dataclass(frozen=True)
class SourceRange:
    """Lines of a source file.

    Attributes:
        file: The file.
        first: The first line, from 1.
        last: The last line.
    """

    file: str
    first: int
    last: int

    @property
    def place(self) -> Place:
        """The first line."""
        return frames_now().at(self.file, self.first)


@document(names={"source": "lines"})
@dataclass(frozen=True)
class RepeatedBody:
    """A body that a program calls more than once, where the program or another body calls it.

    Attributes:
        name: The name of its calls.
        copies: The number of calls from there, by all copies of the caller.
        equations: The number of equations of a copy, including those of the bodies that it calls.
        share: The fraction of the program's equations that these copies account for.
        source: The source lines of its equations, if known.
        bodies: The bodies that it calls; given only where this body is listed first.
    """

    name: str
    copies: int
    equations: int
    share: float
    source: SourceRange | None
    bodies: tuple[RepeatedBody, ...]


@dataclass(frozen=True)
class TemporaryMemory:
    """The estimated temporary memory of an outlined program.

    Attributes:
        as_traced: The bytes that it would need if XLA inlined the calls.
        outlined: The bytes that it needs.
    """

    as_traced: int
    outlined: int

    @property
    def needs_warning(self) -> bool:
        """True if outlining costs so much more memory that a warning is due."""
        more = self.outlined - self.as_traced
        return more > WARNED_FRACTION * self.as_traced and more > WARNED_BYTES


#: A warning is due if outlining adds more than this fraction of the memory, and this many bytes.
WARNED_FRACTION, WARNED_BYTES = 0.5, 2**20

#: The maximum number of bodies that the line names.
_MOST_NAMED = 3


@document(without=("roots",))
@dataclass(frozen=True)
class Repetition:
    """The repeated bodies of a program.

    Attributes:
        name: The name of the program.
        written: The number of equations as traced, as `show --stats` counts them: each call is an
            equation.
        equations: The number of equations with every call inlined.
        compiled: The number of equations that XLA compiles, including the calls.
        rest: The number of equations outside of repeated bodies.
        bodies: The repeated bodies that the program calls, the largest share first.
        small: If `bodies` is empty, repeated segments that would save too little when outlined.
        memory: The temporary memory with and without the calls, if estimated.
        roots: The folders of the user's files, as recorded in the program.
        left_to_partitioner: Arguments, results and equations with a sharding over several devices,
            whose arrays are counted whole.
    """

    name: str
    written: int
    equations: int
    compiled: int
    rest: int
    bodies: tuple[RepeatedBody, ...]
    small: tuple[RepeatedBody, ...] = ()
    memory: TemporaryMemory | None = None
    roots: tuple[Root, ...] = ()
    left_to_partitioner: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """A line on the repetition in the program, with the largest of the repeated bodies."""
        if not self.bodies:
            return f"{self.name} has nothing to outline"
        names = [f"{body.name} {body.copies} times" for body in self.bodies]
        shown = ", ".join([*names[:_MOST_NAMED], *["…"][: len(names) > _MOST_NAMED]])
        counts = f"{self.compiled:,} of {self.equations:,} equations to compile"
        return f"{self.name} has {shown}: {counts}"


def repetition(program: Program, before: Program) -> Repetition:
    """Return the repeated bodies of a program.

    Args:
        program: The program after the pass `outline`.
        before: The program before the pass. Bodies that it already has, and whose calls are not
            marked, are not repetitions, since XLA inlines them.
    """
    top, old, frames = top_jaxpr(program), top_jaxpr(before), frames_now(program.roots)
    old_bodies = {*all_jaxprs(old)}
    graph = _CallGraph(top, old_bodies, frozenset(), frames)
    once = {body for body in graph.copies if body is not top and graph.copies[body] == 1}
    if once:
        graph = _CallGraph(top, old_bodies, once, frames)
    result = graph.repetition(program.name, Selection().count(old))
    left = left_to_partitioner(before)
    return replace(result, roots=program.roots, left_to_partitioner=left)


@dataclass(frozen=True)
class _UnrepeatedPart:
    """The part of a jaxpr outside of repeated bodies: its equations, and calls of these bodies."""

    size: int
    calls: Counter[Jaxpr]

    @property
    def rest(self) -> int:
        """The number of equations that are not such calls."""
        return self.size - self.calls.total()


class _CallGraph:
    """The repeated bodies of a program, and the calls between them.

    Args:
        top: The program's open jaxpr.
        known: Jaxprs that are repeated bodies only if their calls are marked.
        single: Jaxprs that are not repeated bodies.
        frames: Decides which files are the user's.
    """

    def __init__(
        self, top: Jaxpr, old_bodies: Set[Jaxpr], single: Set[Jaxpr], frames: Frames
    ) -> None:
        self._frames = frames
        self._top, self._known, self._single = top, old_bodies, single
        #: A call of each repeated body.
        self._bodies: dict[Jaxpr, JaxprEqn] = {}
        self._parts: dict[Jaxpr, _UnrepeatedPart] = {}
        self._part(top)
        self._callers: dict[Jaxpr, list[Jaxpr]] = {body: [] for body in self._bodies}
        for caller in (top, *self._bodies):
            for body in self._parts[caller].calls:
                self._callers[body].append(caller)
        #: The number of calls of the program and of each body.
        self.copies = {top: 1}
        for body in self._bodies:
            self._count(body)

    def repetition(self, name: str, written: int) -> Repetition:
        """Return the repetition of the program."""
        compiled = self._parts[self._top].size
        for body, call in self._bodies.items():
            part = self._parts[body]
            marked = jaxcompat.mark_of(call) != "plain"
            compiled += part.size if marked else self.copies[body] * (part.size - 1)
        top = self._parts[self._top]
        rows = self._rows(self._top, 1, set())
        return Repetition(name, written, self._size(self._top), compiled, top.rest, rows)

    def _rows(self, caller: Jaxpr, times: int, shown: set[Jaxpr]) -> tuple[RepeatedBody, ...]:
        """Return the bodies that `caller` calls in `times` runs; do not open those in `shown`."""
        calls = self._parts[caller].calls
        rows = []
        for body in sorted(calls, key=lambda body: -calls[body] * self._size(body)):
            opened = body not in shown
            shown.add(body)
            copies, size = times * calls[body], self._size(body)
            rows.append(
                RepeatedBody(
                    self._bodies[body].params["name"],
                    copies,
                    size,
                    copies * size / self._size(self._top),
                    source_range(equations(body), self._frames),
                    self._rows(body, copies, shown) if opened else (),
                )
            )
        return tuple(rows)

    def _part(self, jaxpr: Jaxpr) -> _UnrepeatedPart:
        """Return the part of a jaxpr, and find the repeated bodies in it."""
        if jaxpr not in self._parts:
            size, calls = len(jaxpr.eqns), Counter[Jaxpr]()
            for eqn, inside in holders(jaxpr):
                for _, body in inside:
                    part = self._part(body)
                    if self._repeats(eqn, body):
                        self._bodies.setdefault(body, eqn)
                        calls[body] += 1
                    else:
                        size += part.size
                        calls.update(part.calls)
            self._parts[jaxpr] = _UnrepeatedPart(size, calls)
        return self._parts[jaxpr]

    def _repeats(self, eqn: JaxprEqn, body: Jaxpr) -> bool:
        marked = jaxcompat.mark_of(eqn) != "plain"
        new = eqn.primitive.name == "jit" and body not in self._known
        return (marked or new) and body not in self._single

    def _count(self, body: Jaxpr) -> int:
        if body not in self.copies:
            callers = self._callers[body]
            self.copies[body] = sum(self._count(c) * self._parts[c].calls[body] for c in callers)
        return self.copies[body]

    @cached_method
    def _size(self, body: Jaxpr) -> int:
        """Return the number of equations of a body with each copy inlined."""
        part = self._parts[body]
        return part.rest + sum(n * self._size(inner) for inner, n in part.calls.items())


# --- source lines -----------------------------------------------------------------------------

#: The share of equations that must come from one line for its function to count as theirs.
_MOST = 0.9


def source_range(eqns: Iterable[JaxprEqn], reader: Frames) -> SourceRange | None:
    """Return the lines of the function that equations have in common; None if it is unknown.

    This is the outermost function on whose lines they diverge: not the loop that calls a layer, and
    not the library behind it, but the layer. If they diverge into several functions, it is the line
    that calls these; if no callers are known, it is the file that most come from. Library frames
    count only if there are no others.
    """
    every = [frames[::-1] for eqn in eqns if (frames := reader.of(eqn))]
    stacks = [kept for stack in every if (kept := [f for f in stack if reader.is_users(f.file)])]
    stacks = stacks or every
    if not stacks:
        return None
    least = _MOST * len(stacks)
    common: list[UserFrame] = []
    for level in itertools.count():
        stacks = [stack for stack in stacks if len(stack) > level]
        frames = [stack[level] for stack in stacks]
        if len(frames) < least or (common and _most(frames, _function)[1] < least):
            break
        place, count = _most(frames, _line)
        if count < least:
            common = frames
            break
        stacks = [stack for stack in stacks if _line(stack[level]) == place]
        common = [stack[level] for stack in stacks]
    file, _ = _most(common, _file)
    lines = [frame.line for frame in common if frame.file == file]
    return SourceRange(file, min(lines), max(lines))


def _most(frames: Iterable[UserFrame], key: Callable[[UserFrame], Any]) -> tuple[Any, int]:
    """Return the most frequent key of frames, and its count."""
    return Counter(map(key, frames)).most_common(1)[0]


_file = attrgetter("file")
_line = attrgetter("file", "line")
_function = attrgetter("file", "function")
