"""roll on random programs that repeat, with copies that differ a little; unroll undoes it."""

import jax
import pytest
from hypothesis import given

from jaxprtool.ir.program import Programs, type_check
from jaxprtool.passes.pipeline import Pipeline
from jaxprtool.passes.roll import Roll
from tests.programs.ops import Type
from tests.programs.plans import DIFFERENCES, Block, Copy, Detail, Op, Plan, Repeat
from tests.programs.random_programs import RandomProgram, random_programs, repeating_programs
from tests.programs.same import Original

_A = Type("f32", (3,))
_STEPS = Op("sin", _A, (0,)), Op("mul", _A, (0, 1)), Detail(_A, (0, 2)), Op("exp", _A, (0,))
BODY = Block((_A, _A), (*_STEPS, Op("dot", _A, (0, 3)), Op("add", _A, (0, 1))), (0,))


def check(program):
    """Prove the program after roll, and after unroll too, one equation at a time."""
    case = program.case()
    with case.setting():
        before = case.program()
        after = Roll()(before)
        if after is before:
            return False
        type_check(after)
        original = Original(before, jax.tree.leaves(case.args), fewer_effects=True)
        original.same_steps(after)
        back = Pipeline.parse("unroll(max_length=100), simplify, dce")(after)
        original.same_steps(back)
        parts = Roll(stack="arguments")(before)
        for part in parts.values() if isinstance(parts, Programs) else ():
            type_check(part)
        return True


@pytest.mark.parametrize("difference", ["", *DIFFERENCES])
def test_copies_that_differ_in_one_thing(difference):
    copies = tuple(Copy((0, 3), difference if i == 6 else "") for i in range(9))
    repeat = Repeat(BODY, copies, (Op("neg", _A, (0,)),), True, closed=True)
    rolled = check(RandomProgram(Plan(Block((_A, _A), (repeat,)))))
    assert rolled or difference not in ("", "scale", "scope")


@pytest.mark.sweep
@given(program=repeating_programs() | random_programs())
def test_many_random_programs(program):
    check(program)
