"""Graph matching of two programs: JAX's test programs, random ones, and planted changes."""

import random

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Literal
from tests.programs import harness_programs
from tests.programs.corpus import prove_corpus


def shuffled(program, seed):
    """Return a program with its equations in another order. Those with effects keep theirs."""
    body = jaxcompat.open_jaxpr(program.jaxpr)
    rng, definitions = random.Random(seed), {}
    needs = []
    last = None
    for i, eqn in enumerate(body.eqns):
        read = {
            definitions[v] for v in eqn.invars if not isinstance(v, Literal) and v in definitions
        }
        if eqn.effects:
            read |= set() if last is None else {last}
            last = i
        needs.append(read)
        definitions.update((v, i) for v in eqn.outvars)
    order, left = [], set(range(len(needs)))
    while left:
        ready = sorted(i for i in left if not needs[i] & left)
        order.append(rng.choice(ready))
        left.remove(order[-1])
    eqns = [body.eqns[i] for i in order]
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))


def without(program, position):
    """Return a program without one equation: readers of its result read its operand."""
    body = jaxcompat.open_jaxpr(program.jaxpr)
    gone = body.eqns[position]
    swap = {gone.outvars[0]: gone.invars[0]}

    def swapped(atoms):
        return [v if isinstance(v, Literal) else swap.get(v, v) for v in atoms]

    eqns = [
        eqn.replace(invars=swapped(eqn.invars)) for i, eqn in enumerate(body.eqns) if i != position
    ]
    outs = swapped(body.outvars)
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns, outvars=outs))


def removable(program):
    """Return the equations with one operand and a result of the same type."""
    body = jaxcompat.open_jaxpr(program.jaxpr)
    read = {v for eqn in body.eqns for v in eqn.invars if not isinstance(v, Literal)}
    read |= {v for v in body.outvars if not isinstance(v, Literal)}
    return [
        i
        for i, eqn in enumerate(body.eqns)
        if len(eqn.outvars) == len(eqn.invars) == 1
        and not isinstance(eqn.invars[0], Literal)
        and not eqn.effects
        and eqn.outvars[0].aval == eqn.invars[0].aval
        and eqn.outvars[0] in read
    ]


def prove(case, seed):
    """Prove that a reordered program matches itself, and that a removed equation is found alone."""
    with case.setting():
        program = case.program()
        for other in (program, shuffled(program, seed)):
            found = jaxprtool.diff(program, other)
            assert found.is_equivalent and not found.hunks and not found.border
        for position in removable(program)[:2]:
            shorter = without(program, position)
            there, back = jaxprtool.diff(program, shorter), jaxprtool.diff(shorter, program)
            assert there.verdict == back.verdict == "different"
            assert (len(there.removed), len(there.added)) == (1, 0), there.lines
            assert (len(back.removed), len(back.added)) == (0, 1), back.lines
            assert not there.changed and not back.changed


def test_programs_of_jax_match_themselves():
    for number, case in enumerate(harness_programs(60)):
        prove(case, number)


@pytest.mark.proof
def test_random_programs_match_themselves():
    prove_corpus(15, lambda number, case: prove(case, number))


@pytest.mark.sweep
def test_all_test_programs_of_jax_match_themselves():
    for number, case in enumerate(harness_programs(1)):
        prove(case, number)


@pytest.mark.parametrize("position", [0, 11, 29])
def test_a_different_literal_in_a_chain_is_the_only_change(position):
    def chain(odd):
        def fun(a):
            for i in range(30):
                a = jnp.sin(a * (3.0 if i == odd else 2.0)) + a
            return a

        return jaxprtool.trace(fun, jax.ShapeDtypeStruct((6,), "float32"))

    found = jaxprtool.diff(chain(None), chain(position))
    assert found.verdict == "same up to constants" and len(found.changed) == 1
