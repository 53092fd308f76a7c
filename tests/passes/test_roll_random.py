"""roll on random programs, repeated, that hand on what they can."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import jaxprtool
from jaxprtool.ir.program import type_check
from jaxprtool.passes.roll import Roll
from jaxprtool.passes.roll.chains import FEWEST
from tests.programs import Case, random_programs
from tests.programs.same import Original


def repeated(case, copies, shared):
    """A case that runs another's function several times, on what it gives where that fits.

    Every other argument that is not handed on is the same for all copies if they are `shared`.
    """

    def handed(args):
        outs = jax.tree.leaves(jax.eval_shape(case.fun, *args))
        free = list(range(len(outs)))
        found = {}
        for i, arg in enumerate(args):
            for j in free:
                if outs[j].shape == jnp.shape(arg) and outs[j].dtype == jnp.result_type(arg):
                    found[i] = j
                    free.remove(j)
                    break
        return found

    links = handed(case.args)
    own = [i for i in range(len(case.args)) if i not in links and not (shared and i % 2)]

    def run(args, rounds):
        seen = []
        for given_here in rounds:
            args = list(args)
            for i, value in zip(own, given_here, strict=True):
                args[i] = value
            outs = jax.tree.leaves(case.fun(*args))
            for i, j in links.items():
                args[i] = outs[j]
            seen.append(outs[-1])
        return args, seen

    rounds = [[case.args[i] for i in own] for _ in range(copies)]
    return Case("repeated", run, (list(case.args), rounds), x64=case.x64)


def check(program, shared):
    alone = program.case()
    with alone.setting():
        case = repeated(alone, FEWEST + 1, shared)
        before = jaxprtool.trace(case.fun, *case.args)
        after = Roll()(before)
        if after is before:
            return
        type_check(after)
        Original(before, jax.tree.leaves(case.args)).same_steps(after)
        back = after.apply("unroll(max_length=100), simplify, dce")
        Original(before, jax.tree.leaves(case.args)).same_steps(back)


@pytest.mark.parametrize("shared", [False, True])
@settings(max_examples=4)
@given(program=random_programs())
def test_random_programs_that_repeat(shared, program):
    check(program, shared)


@pytest.mark.sweep
@given(program=random_programs())
def test_many_random_programs_that_repeat(program):
    for shared in (False, True):
        check(program, shared)
