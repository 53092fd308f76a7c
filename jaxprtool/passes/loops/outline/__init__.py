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
cannot partition, are omitted in lowering (see `jaxcompat.marked_lowering`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxprtool.errors import PipelineError
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.repetition import repetition
from jaxprtool.jaxcompat import Mark
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.framework.base import MemoryNote, Pass
from jaxprtool.passes.loops.outline.bodies import Bodies, Item, Repeated
from jaxprtool.passes.loops.outline.choice import Choice, Costs
from jaxprtool.passes.loops.outline.names import Names
from jaxprtool.passes.loops.outline.text import Text, Tokens, rough_tokens, text_of
from jaxprtool.passes.loops.outline.windows import Windows
from jaxprtool.passes.loops.outline.write import outlined

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
            given = getattr(self, option)
            if given is not None and given < least:
                raise PipelineError(
                    f"option '{option}' of pass 'outline' must be at least {least}, not {given}"
                )

    def __call__(self, program: Program) -> Program:
        return with_calls(program, [self._costs()], self.mark)

    def notes(self, before: Program, after: Program | Programs) -> Iterator[str | MemoryNote]:
        """Yield a line on the repetition found, and a note on memory if there are calls."""
        assert isinstance(after, Program)
        found = repetition(after, before)
        yield found.line
        if found.bodies:
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
    bodies = Bodies(Inline()(program).jaxpr)
    if not any(_may_repeat(bodies, each) for each in costs):
        return program
    tokens, names = Tokens(), Names(bodies.names)
    for each in costs:
        for _ in range(MAX_ITERATIONS):
            if not _outline(bodies, tokens, names, each):
                break
    if not bodies.shared:
        return program
    return program.replace(jaxpr=bodies.build(mark))


def _may_repeat(bodies: Bodies, costs: Costs) -> bool:
    """Return False if a cheap check proves that nothing repeats."""
    if len(bodies.found) > 1:
        return True
    windows = Windows(rough_tokens(bodies.found))
    return any(groups for _, groups in windows.groups(costs.equations, costs.copies))


def _outline(bodies: Bodies, tokens: Tokens, names: Names, costs: Costs) -> bool:
    """Replace the segments that save most by calls; return False if none saves anything."""
    before = list(bodies)
    text = text_of(before, tokens)
    calls: dict[int, tuple[int, Repeated]] = {}
    for segment in Choice(text, costs).segments():
        body, found = outlined(text, segment, names)
        bodies.shared.append(body)
        for start, call in zip(segment.starts.tolist(), found, strict=True):
            calls[start] = segment.length, call
    for number, body in enumerate(before):
        body.items = _replaced(text, text.starts[number], text.starts[number + 1] - 1, calls)
    bodies.open_calls()
    return bool(calls)


def _replaced(
    text: Text, start: int, end: int, calls: dict[int, tuple[int, Repeated]]
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
