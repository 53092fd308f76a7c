"""A program with copies of one body, one of which differs."""

from __future__ import annotations

from tests.programs.case import Case
from tests.programs.ops import Type
from tests.programs.plans import Block, Copy, Detail, Op, Plan, Repeat
from tests.programs.random_programs import RandomProgram

#: The number of copies.
COPIES = 6

_A = Type("f32", (3,))
_STEPS = Op("sin", _A, (1,)), Op("mul", _A, (0, 1)), Detail(_A, (0, 2)), Op("exp", _A, (0,))
_BODY = Block((_A, _A), (*_STEPS, Op("dot", _A, (0, 3)), Op("add", _A, (0, 1))), (0,))


def repeating(difference: str, *, chained: bool) -> Case:
    """Return a program whose fourth copy has one of `plans.DIFFERENCES`, or none."""
    copies = tuple(Copy((0, 3), difference if i == 3 else "") for i in range(COPIES))
    repeat = Repeat(_BODY, copies, (Op("neg", _A, (0,)),), chained, closed=True)
    return RandomProgram(Plan(Block((_A, _A), (repeat,)))).case()
