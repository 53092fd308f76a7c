"""Results of passes are type-checked like JAX does, but faster."""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import CheckError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.jaxcompat import checking
from tests.programs import harness_programs, sample_programs
from tests.programs.samples import sample_files
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part

X = jnp.arange(1.0, 5.0)


def looped(x, key):
    def body(carry, row):
        wide = jnp.where(row > 0, carry * 2.0, jnp.sin(carry))
        return wide + jax.random.normal(key, wide.shape), wide.sum()

    carry, sums = jax.lax.scan(body, x, jnp.arange(3.0))
    return jax.lax.cond(sums[0] > 0, jnp.cos, jnp.sin, carry), sums


@pytest.fixture(scope="module")
def program():
    return jaxprtool.trace(looped, X, jax.random.key(0))


def verdict(program, before=None):
    """Return None, or the first fault that the checker reports."""
    try:
        type_check(program, before)
    except CheckError as error:
        return error.message
    return None


# --- faults -----------------------------------------------------------------------------------


def another_type(eqn):
    (old, *rest) = eqn.outvars
    aval = old.aval
    if not isinstance(aval, jax.core.ShapedArray) or aval.dtype == jax.dtypes.float0:
        return None
    wrong = jaxcompat.Var(aval.update(shape=(*aval.shape, 1), sharding=None))
    return eqn.replace(outvars=[wrong, *rest])


def another_operand(eqn):
    if not eqn.invars:
        return None
    stranger = jaxcompat.Var(eqn.invars[0].aval)
    return eqn.replace(invars=[stranger, *eqn.invars[1:]])


def one_operand_less(eqn):
    return eqn.replace(invars=eqn.invars[1:]) if eqn.invars else None


def operands_exchanged(eqn):
    return eqn.replace(invars=eqn.invars[::-1])


def no_parameters(eqn):
    return eqn.replace(params={}) if eqn.params else None


FAULTS = [another_type, another_operand, one_operand_less, operands_exchanged, no_parameters]


def damaged(program, rng):
    """Return the program with a random fault in one of its equations, at any depth."""
    number = rng.randrange(max(1, len(list(equations(jaxcompat.open_jaxpr(program.jaxpr))))))
    fault = rng.choice(FAULTS)
    seen = 0

    def rule(eqn):
        nonlocal seen
        seen += 1
        wrong = fault(eqn) if seen == number + 1 else None
        return None if wrong is None else [wrong]

    return program.replace(jaxpr=map_equations(program.jaxpr, rule))


def agree(before, seeds):
    """Assert that both checkers agree on damaged programs. Return how many have a fault."""
    faults = 0
    for seed in seeds:
        try:
            wrong = damaged(before, random.Random(seed))
        except Exception:  # programs that cannot be built need no check
            continue
        expected = verdict(wrong)
        assert verdict(wrong, before) == expected
        faults += expected is not None
    return faults


def test_faults_next_to_cached_equations_are_found(program):
    assert verdict(program, program) is None
    assert agree(program, range(40)) > 10


@pytest.mark.parametrize("file", sample_files())
def test_faults_in_samples_are_found(file):
    for number, case in enumerate(sample_programs(file)[:2]):
        with case.setting():
            agree(case.program(), range(10 * number, 10 * number + 4))


def prove(number, case):
    with case.setting():
        before = case.program()
        assert verdict(before, before) is None
        return Counter({"faults": agree(before, range(number, number + 3))})


@pytest.mark.proof
def test_faults_in_some_of_jaxs_programs_are_found():
    cases = enumerate(harness_programs(100))
    assert sum((prove(*numbered) for numbered in cases), Counter())["faults"] > 40


SWEEP = [Part("checker: harnesses", Harnesses(), prove, expected=lambda n: n["faults"] > 4000)]


def test_equal_parameters_of_other_types_are_checked():
    program = jaxprtool.trace(lambda x: (x.reshape(2, 2), x.reshape(2, 2)), X)
    (first, second), (_, other) = program.jaxpr.eqns, ((2, 2), (2, 2.0))
    wrong = second.replace(params={**second.params, "new_sizes": other})
    assert first.params["new_sizes"] == other
    changed = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[first, wrong]))
    empty = jaxprtool.trace(lambda: ())
    assert verdict(changed) is not None and verdict(changed, empty) == verdict(changed)


@pytest.mark.proof
def test_a_fault_deep_inside_is_found_fast():
    function = jnp.sin
    for _ in range(60):
        function = jax.jit(lambda x, inner=function: inner(x))
    before = jaxprtool.trace(lambda x: function(x), X)
    wrong = before.replace(
        jaxpr=map_equations(
            before.jaxpr, lambda e: [another_type(e)] if e.primitive.name == "sin" else None
        )
    )
    assert "inconsistently typed" in verdict(wrong, before)


def test_an_equation_is_checked_by_jax_once_for_all_runs(monkeypatch):
    jaxprtool.clear_caches()
    asked, rule_agrees = [], checking._rule_agrees
    monkeypatch.setattr(
        checking, "_rule_agrees", lambda *args: asked.append(1) or rule_agrees(*args)
    )

    def f(x):
        for _ in range(5):
            x = jax.jit(lambda x: jnp.sin(x) * 2.0)(x)
        return x

    program = jaxprtool.trace(f, X)
    program.apply("batch(0, axis_size=2)")
    assert 0 < len(asked) < 10
    asked.clear()
    jaxprtool.trace(f, X).apply("batch(0, axis_size=2)")
    assert len(asked) <= 5  # each call of a body that is new


def test_a_damaged_body_of_an_accepted_jit_is_rejected_each_time():
    def f(x):
        return jax.jit(lambda x: x.astype("float32") + 1)(x)

    program = jaxprtool.trace(f, X)
    (call,) = program.jaxpr.eqns
    (convert, *rest) = call.params["jaxpr"].eqns
    assert verdict(program, jaxprtool.trace(lambda: ())) is None
    wrong = convert.replace(outvars=[type(v)(v.aval.update(shape=(7,))) for v in convert.outvars])
    body = jaxcompat.replace_jaxpr(call.params["jaxpr"], eqns=[wrong, *rest])
    other = call.replace(params={**call.params, "jaxpr": body})
    changed = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[other]))
    assert verdict(changed, program) is not None
    assert verdict(changed, program) == verdict(changed)  # a rejected body is rejected again
