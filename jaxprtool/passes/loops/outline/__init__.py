"""Outlining: what a program repeats becomes one shared body, which is called for every copy.

A model written as a Python loop over its layers is the same equations again and again, and XLA
compiles each copy, in more than linear time. Here segments of equations that are the same but for
the variables that they use become a body that all copies share and call. The equations and their
operands stay what they are. Calls that `inline` opens are seen through first; segments are looked
for in the bodies of calls, loops and branches too, and in the shared bodies themselves.

Where the copies have different literals, these become arguments. Whether a literal's type is weak,
scopes and source lines may differ; parameters, types and the flow of values inside may not.
Equations with effects stay where they are, and so do calls that donate.

Which segments are taken is decided by what they save in all: the equations of all copies but one,
less the shared body and the calls, at what these were measured to cost (see `choice`). With
`equations=N` whatever repeats N equations is taken. Where nothing is gained the program stays the
same object.

The calls are marked for XLA: with `mark="unit"` each shared body is a unit that is compiled once,
with `mark="call"` the calls are not inlined, with `mark="plain"` they are (by XLA, and by the pass
`inline`, which opens marked ones with `force=True`). A body that writes into a large array that it
is given is marked as a call where a unit is asked for (see `in_place`), and what a backend does not
take, or XLA cannot partition, is left out when it is lowered (see `jaxcompat.marked_lowering`).
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

#: A body of fewer equations is not made unless it is asked for.
LEAST = 10

#: More rounds than a program has levels of nesting.
MOST_ROUNDS = 12


@dataclass(frozen=True)
class Outline(Pass):
    """Make what repeats one shared body that is called, and compiled once.

    The layers of a model that a Python loop writes out are the same equations again and again,
    of which XLA compiles each copy. Here they become one body that all copies call. Literals
    that differ become arguments. Without `equations`, a body is made where the equations saved
    outweigh what calls cost.

    Args:
        copies: The least number of copies, at least two.
        equations: The least number of equations of a body, each of which is then taken.
        mark: What the calls are to XLA: units that are compiled once (`unit`), calls that it
            does not inline (`call`), or plain calls, which it inlines (`plain`).

    Note:
        Equations with effects stay where they are, and so do calls that donate. `jaxprtool
        outline TARGET` says what repeats, and what the calls cost in memory.

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
                    f"option '{option}' of pass 'outline' is {given}: it is at least {least}"
                )

    def __call__(self, program: Program) -> Program:
        return with_calls(program, [self._costs()], self.mark)

    def notes(self, before: Program, after: Program | Programs) -> Iterator[str | MemoryNote]:
        """Say what is found, and what the calls cost in memory, or that nothing repeats."""
        assert isinstance(after, Program)
        found = repetition(after, before)
        yield found.line
        if found.bodies:
            yield MemoryNote(after)

    def _costs(self) -> Costs:
        """Return what is gained: of a marked call XLA compiles a module, and cannot fuse it."""
        if self.equations is not None or self.mark == "plain":
            return Costs(self.copies, self.equations or LEAST, body=0.0, operand=0.0)
        return Costs(self.copies, LEAST, body=150.0, operand=0.4, fusible=False)


def with_calls(program: Program, costs: Sequence[Costs], mark: Mark) -> Program:
    """Return a program in which segments that repeat are calls of shared bodies.

    Args:
        program: The program.
        costs: What counts as a gain, at first and later on.
        mark: How the calls are marked.

    Returns:
        The new program; the same object if nothing is gained.
    """
    bodies = Bodies(Inline()(program).jaxpr)
    if not any(_may_repeat(bodies, each) for each in costs):
        return program
    tokens, names = Tokens(), Names(bodies.names)
    for each in costs:
        for _ in range(MOST_ROUNDS):
            if not _round(bodies, tokens, names, each):
                break
    if not bodies.shared:
        return program
    return program.replace(jaxpr=bodies.written(mark))


def _may_repeat(bodies: Bodies, costs: Costs) -> bool:
    """Return False if it is certain, at little cost, that nothing repeats."""
    if len(bodies.found) > 1:
        return True
    windows = Windows(rough_tokens(bodies.found))
    return any(groups for _, groups in windows.groups(costs.equations, costs.copies))


def _round(bodies: Bodies, tokens: Tokens, names: Names, costs: Costs) -> bool:
    """Replace the segments that save most in the bodies as they are; return False if none does."""
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
    """Return the items of a stretch of the text, with calls in the places of segments."""
    items: list[Item] = []
    while start < end:
        length, call = calls.get(start, (1, None))
        item = call or text.items[start]
        assert item is not None
        items.append(item)
        start += length
    return items
