"""Outlining: replace repeated segments of a program by calls of one shared body.

A model written as a Python loop over its layers consists of the same equations repeated, and XLA
compiles each copy, in superlinear time. Here, segments of equations that are the same except for
the variables that they use become a body that all copies share and call. The equations and their
operands do not change. Calls that `inline` opens are inlined first; segments are also searched
for in the bodies of calls, loops and branches, and in the shared bodies themselves.

Literals that differ between copies become arguments. Copies may differ in the weak types of
literals, in scopes and source locations, but not in parameters, types or the flow of values inside.
Equations with effects stay in place, and so do calls that donate.

Segments are chosen by their total saving: the equations of all copies but one, minus the measured
costs of the shared body and the calls (see `choice`). With `equations=N`, every repeated segment of
N equations is chosen. If nothing is saved, the same program object is returned.

The calls are marked for XLA: with `mark="unit"` it compiles each shared body once, as a unit; with
`mark="call"` it does not inline the calls; with `mark="plain"` it does. The pass `inline` inlines
plain calls, and marked ones with `force=True`. A body that writes into a large argument is marked
"call" instead of "unit" (see `in_place`). Marks that a backend does not support, or with which XLA
cannot partition, are omitted in lowering (see `jaxcompat.marks`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.keys import atom_key
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.repetition import repetition
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Mark, Var
from jaxprtool.passes import MemoryNote, Pass
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.loops.outline.choice import (
    Costs,
    Item,
    ItemSequence,
    OutlineBody,
    ProgramBodies,
    Segment,
    SegmentChoice,
    SegmentCopy,
    Windows,
    calls,
    copied,
    first_equation,
    first_text,
    rough_tokens,
    scopes,
    source_of_item,
    text_of,
)

#: The minimum number of equations of a body, unless requested otherwise.
LEAST = 10

#: The minimum number of equations of an iteration that `roll` finds.
SHORTEST = 3

#: More repetitions than a program has levels of nesting.
MAX_ITERATIONS = 12


@dataclass(frozen=True)
class Outline(Pass):
    """Replace repeated equations by calls of one shared body, which is compiled once.

    The layers of a model that is written as a Python loop are the same equations repeated, and XLA
    compiles each copy. Here they become one body that all copies call. Literals that differ become
    arguments. A body is made if the equations saved outweigh the cost of the calls.

    Args:
        copies: The minimum number of copies; at least 2.
        equations: The minimum number of equations of a body. If given, the cost of the calls is
            ignored.
        mark: How XLA treats the calls: `unit` compiles each body once as a unit, `call` keeps the
            calls without inlining them, and `plain` lets XLA inline them.

    Note:
        Equations with effects, and calls that donate, stay in place. `jaxprtool outline TARGET`
        reports the repetition, and the memory that the calls cost.

    Example:
        $ jaxprtool opt samples/layers.py:loss -p "value_and_grad, outline" --stats
    """

    name: ClassVar[str] = "outline"
    group: ClassVar[str] = "schedule and compile"

    copies: int = 2
    equations: int | None = None
    mark: Mark = "unit"

    def __post_init__(self) -> None:
        for option, least in (("copies", 2), ("equations", 1)):
            value = getattr(self, option)
            if value is not None and value < least:
                raise PipelineError(
                    f"option '{option}' of pass 'outline' must be at least {least}, not {value}"
                )

    def __call__(self, program: Program) -> Program:
        return with_calls(program, [self._costs()], self.mark)

    def notes(self, before: Program, after: Program | Programs) -> Iterator[str | MemoryNote]:
        """Yield a line on the repetition found, and a note on memory if there are calls."""
        assert isinstance(after, Program)
        summary = repetition(after, before)
        yield summary.line
        if summary.bodies:
            yield MemoryNote(after)

    def _costs(self) -> Costs:
        """Return the costs: XLA compiles a module for a marked call, and cannot fuse it."""
        if self.equations is not None or self.mark == "plain":
            return Costs(self.copies, self.equations or LEAST, body=0.0, operand=0.0)
        return Costs(self.copies, LEAST, body=150.0, operand=0.4, fusible=False)


def with_calls(program: Program, costs: Sequence[Costs], mark: Mark) -> Program:
    """Return a program in which repeated segments are calls of shared bodies.

    Args:
        program: The program.
        costs: The costs to use, one after the other.
        mark: How the calls are marked.

    Returns:
        The new program; the same object if nothing is saved.
    """
    bodies = ProgramBodies(with_calls_inlined(program))
    if not any(_may_repeat(bodies, cost) for cost in costs):
        return program
    text: ItemSequence | None
    (text, tokens), names = first_text(bodies), UsedNames(bodies.names)
    for cost in costs:
        for _ in range(MAX_ITERATIONS):
            latest, text = text or text_of(list(bodies), tokens), None
            if not _outline(bodies, latest, names, cost):
                break
    if not bodies.shared:
        return program
    return program.replace(jaxpr=bodies.build(mark))


#: Programs with their calls inlined: the command `outline` outlines a program several times, and
#: `roll` does too.
_without_calls = JaxprCache()


def with_calls_inlined(program: Program) -> ClosedJaxpr:
    """Return the jaxpr of a program with its calls inlined."""
    known = _without_calls.of(program.jaxpr)
    if "inlined" not in known:
        opened = Inline()(program).jaxpr
        known["inlined"] = None if opened is program.jaxpr else opened  # it would keep itself
    result: ClosedJaxpr | None = known["inlined"]
    return program.jaxpr if result is None else result


def _may_repeat(bodies: ProgramBodies, costs: Costs) -> bool:
    """Return False if a cheap check proves that nothing repeats."""
    if len(bodies.found) > 1:
        return True
    windows = Windows(rough_tokens(bodies.found))
    return any(groups for _, groups in windows.groups(costs.equations, costs.copies))


def _outline(bodies: ProgramBodies, text: ItemSequence, names: UsedNames, costs: Costs) -> bool:
    """Replace the segments that save most by calls; return False if none saves anything."""
    old_bodies = list(bodies)
    calls: dict[int, tuple[int, SegmentCopy]] = {}
    for segment in SegmentChoice(text, costs).segments():
        body, segment_calls = outlined(text, segment, names)
        bodies.shared.append(body)
        for start, call in zip(segment.starts.tolist(), segment_calls, strict=True):
            calls[start] = segment.length, call
    for number, body in enumerate(old_bodies):
        body.items = _replaced(text, text.starts[number], text.starts[number + 1] - 1, calls)
    bodies.open_calls()
    return bool(calls)


def _replaced(
    text: ItemSequence, start: int, end: int, calls: dict[int, tuple[int, SegmentCopy]]
) -> list[Item]:
    """Return the items of a range of the text, with segments replaced by calls."""
    items: list[Item] = []
    while start < end:
        length, call = calls.get(start, (1, None))
        item = call or text.items[start]
        assert item is not None
        items.append(item)
        start += length
    return items


# --- write ----------------------------------------------------------------------------------------
# The shared body of a segment, and the calls that replace its copies.
#
# Operands from outside become arguments of the body; operands that are the same atom in each copy
# share one argument. A literal that is the same in all copies stays in the body. A value that is
# read outside of some copy is a result of the body, which the calls of the other copies drop.


def outlined(
    text: ItemSequence, segment: Segment, names: UsedNames
) -> tuple[OutlineBody, list[SegmentCopy]]:
    """Return the shared body of a segment, and the call of each copy."""
    copies = [text.copy(start, segment.length) for start in segment.starts]
    links = text.links(segment.starts[:1], segment.length)[0]
    columns, argument = _arguments(copies, links)
    used = text.results(segment.starts, segment.length)
    kept = np.flatnonzero(used.any(0))
    sources = names.sources(copies)
    body = _body(copies[0], sources[0], links, argument, columns, kept)
    body.name = names.name(copies)
    calls = []
    for i, copy in enumerate(copies):
        values = [v for item in copy for v in item.outvars]
        outs = [values[k] if used[i][k] else DropVar(values[k].aval) for k in kept]
        operands = [column[i] for column in columns]
        calls.append(SegmentCopy(body, operands, outs, first_equation(copy), sources[1][i]))
    return body, calls


def _arguments(
    copies: Sequence[Sequence[Item]], links: np.ndarray
) -> tuple[list[list[Atom]], dict[int, int]]:
    """Return the atom of each argument in each copy, and the argument for each operand."""
    operands = [[v for item in copy for v in item.invars] for copy in copies]
    columns: dict[Hashable, int] = {}
    atoms: list[list[Atom]] = []
    argument: dict[int, int] = {}
    for slot in np.flatnonzero(links < 0).tolist():
        column = [copy[slot] for copy in operands]
        keys = tuple(map(atom_key, column))
        if type(column[0]) is Literal and all(key == keys[0] for key in keys):
            continue
        if keys not in columns:
            columns[keys] = len(atoms)
            atoms.append(column)
        argument[slot] = columns[keys]
    return atoms, argument


def _body(
    items: Sequence[Item],
    sources: Sequence[Any],
    links: np.ndarray,
    argument: dict[int, int],
    columns: Sequence[Sequence[Atom]],
    kept: np.ndarray,
) -> OutlineBody:
    """Return the body, on fresh variables."""
    firsts = [next((v for v in column if type(v) is not Literal), column[0]) for column in columns]
    invars = [Var(first.aval) for first in firsts]
    read = {*links.tolist(), *kept.tolist()}
    values: list[Var] = []
    new: list[Item] = []
    slot = 0
    for item, source in zip(items, sources, strict=True):
        operands = []
        for atom in item.invars:
            if links[slot] >= 0:
                operands.append(values[links[slot]])
            else:
                operands.append(invars[argument[slot]] if slot in argument else atom)
            slot += 1
        outs = []
        for var in item.outvars:
            outs.append(Var(var.aval) if len(values) in read else DropVar(var.aval))
            values.append(outs[-1])
        new.append(copied(item, operands, outs, source))
    return OutlineBody(new, invars, [values[k] for k in kept])


# --- names ----------------------------------------------------------------------------------------
# The names of shared bodies, and the source locations of them and their calls.
#
# A body has the name of the scope that most of its equations are in, without the number that
# distinguishes copies (`layer` for `layer_3`); without a scope, the name of the user's function
# that they were traced in, or of the called class. Backward equations decide if there are many of
# them, and the name then has a suffix. The common part of the name stack of a copy goes to the
# call, the rest to the body, as in every call.

#: The number of equations of a long body whose scope and source are considered.
_ASKED = 64

#: The share of the equations with a scope, or function, that must be in the one that names them.
_MOST = 0.75

#: The share of the equations that must have a scope, or function.
_ENOUGH = 0.5

#: The share of backward equations from which they decide.
_SOME = 0.25


class UsedNames:
    """The names that are used in one program."""

    def __init__(self, taken: Iterable[str]):
        self._taken = set(taken)

    def name(self, copies: Sequence[Sequence[Item]]) -> str:
        """Return a unique name for the shared body of some copies."""
        like = [item.like if isinstance(item, SegmentCopy) else item for item in copies[0]]
        like = like[:: max(1, len(like) // _ASKED)]
        backward = [eqn for eqn in like if "transpose(" in jaxcompat.name_stack(eqn)]
        if is_backward := len(backward) > _SOME * len(like):
            like = backward
        scope = _common([*map(scopes, like)]) or _common([*map(_functions, like)]) or ""
        name = re.sub(r"\W+", "_", re.sub(r"[_\d]+$", "", scope)).strip("_") or "repeated"
        return self.unique(name + "_transpose" * is_backward)

    def unique(self, name: str) -> str:
        """Return a name that is not in use yet, and reserve it."""
        candidate, number = name, 1
        while candidate in self._taken:
            candidate, number = f"{name}_{number}", number + 1
        self._taken.add(candidate)
        return candidate

    def sources(self, copies: Sequence[Sequence[Item]]) -> tuple[list[Any], list[Any]]:
        """Return the source of each item of the body, and of the call of each copy."""
        infos = [[source_of_item(item) for item in copy] for copy in copies]
        depths = [jaxcompat.common_scope(copy) for copy in infos]
        inside = [jaxcompat.in_scope(info, depths[0], None) for info in infos[0]]
        calls = [
            jaxcompat.in_scope(copy[0], 0, depth) for copy, depth in zip(infos, depths, strict=True)
        ]
        return inside, calls


def _functions(eqn: JaxprEqn) -> list[str]:
    """Return the names of the user's functions that an equation was traced in, outermost first."""
    return [name for name, _ in calls(eqn)]


def _common(paths: Sequence[Sequence[str]]) -> str | None:
    """Return the last element of the longest path that most paths begin with; None if none.

    Scopes of a few equations, such as those that `jnp.einsum` opens, name no body.
    """
    nonempty = [path for path in paths if path]
    if len(nonempty) < _ENOUGH * len(paths):
        return None
    counts = Counter(tuple(path[:i]) for path in nonempty for i in range(1, len(path) + 1))
    most = [path for path, n in counts.items() if n >= _MOST * len(nonempty)]
    named = [path for path in most if re.match("[A-Za-z]", path[-1])]
    return max(named, key=len)[-1] if named else None
