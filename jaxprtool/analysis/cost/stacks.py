"""Estimate the cost of equations by call stack, as in a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxprtool.analysis.cost.bodies import Bodies, CostedBody, Item
from jaxprtool.analysis.cost.tallies import Sums
from jaxprtool.analysis.cost.work import Work
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature
from jaxprtool.ir.shapes.symbols import symbols_of
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.jaxcompat.source_locations import UserFrame


class Stack(NamedTuple):
    """The call stack of equations of one primitive.

    Attributes:
        frames: The frames of the user and of libraries, the innermost first.
        primitive: The name of the primitive.
    """

    frames: tuple[UserFrame, ...]
    primitive: str


@dataclass(frozen=True)
class StackCost:
    """The cost of the equations of a stack, with the most expensive branch of each `cond`."""

    stack: Stack
    work: Work


@without_collector()
def cost_by_stack(program: Program | AnyJaxpr) -> list[StackCost]:
    """Estimate the cost of a program by the call stacks of its equations.

    Raises:
        ArgumentsError: If a size is symbolic.
    """
    about = program_signature(program)
    if symbols_of(about.jaxpr):
        raise ArgumentsError(
            "a profile needs sizes that are numbers",
            'write them in --args, or -p "specialize(n=512)"',
        )
    sums = Sums(Bodies({}), _ByStack(frames_now(about.roots)))[about.jaxpr]
    return [StackCost(stack, tally.most) for stack, tally in sums.items()]


class _ByStack:
    """Groups by stack."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def key(self, item: Item, body: CostedBody) -> Stack:
        frames = self._frames.stack((*item.node.calls, item.eqn))
        return Stack(frames, str(item.eqn.primitive.name))

    def lifted(self, key: Stack, item: Item, body: CostedBody, number: int) -> Stack:
        if any(self._frames.is_users(frame.file) for frame in key.frames):
            return key
        return key._replace(frames=(*key.frames, *self._frames.of(item.eqn)))
