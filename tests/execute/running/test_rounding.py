"""The tolerance for results: no reassociation exceeds it, and no wrong result is within it."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.execute.running.rounding import MARGIN, Rounding, WideProgram, explained
from tests.execute.programs import program
from tests.programs.reassociated import case
from tests.share import HALF

#: The number of programs, each of which runs on arguments of twenty magnitudes.
PROGRAMS = 100


def agree(roundings, values, i):
    """Return whether the results of two programs agree: the reference, and the variant `i`."""
    mask, _ = explained(roundings[0], roundings[i], (0, 0), values[0], values[i])
    return bool(mask.all())


def is_determined(reference, value):
    """Return False if rounding leaves no digit of a result: there is nothing to compare."""
    if reference.wide.is_exact:
        error = np.abs(value.astype(np.float64) - reference.values[0])
    else:
        error = 10 * MARGIN * reference.wide_errors[0]
    return np.linalg.norm(error) <= 0.1 * np.linalg.norm(reference.values[0])


def outcomes(seed):
    """Return the outcomes of the variants of a program for each magnitude of its arguments."""
    found = Counter()
    with jaxcompat.double_precision():
        drawn = case(seed)
        functions = drawn.reference, drawn.same, drawn.wrong
        traced = [program(f, *drawn.arguments[0]) for f in functions]
        variants, compiled = list(map(WideProgram, traced)), list(map(jax.jit, functions))
        for arguments in drawn.arguments:
            values = [np.asarray(f(*arguments)) for f in compiled]
            roundings = [Rounding(each, arguments) for each in variants]
            finite = all(np.isfinite(x.astype(float)).all() for x in values)
            if not (finite and values[0].any() and is_determined(roundings[0], values[0])):
                found["undetermined"] += 1
                continue
            found["same" if agree(roundings, values, 1) else "different"] += 1
            is_clear = MARGIN * roundings[0].wide_errors[0] < 0.01 * np.abs(roundings[0].values[0])
            if (is_clear & (values[0] != values[2])).any():
                found["missed" if agree(roundings, values, 2) else "found"] += 1
    return found, drawn.name


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_computed_from_constants_is_rounded_to_its_own_dtype(seed):
    table, key = jnp.arange(3), jax.random.key(0)

    def constants():
        return jnp.exp(table * 0.1), jax.random.normal(key, (3,))

    x = np.ones(3, np.float32)
    wide = WideProgram(program(lambda x: (x, *constants()), x))
    _, *values = wide.run([x], seed, 1.0)
    for value, constant in zip(values, jax.jit(constants)(), strict=True):
        np.testing.assert_allclose(value, constant, rtol=2e-7)
        assert (value == value.astype(np.float32)).all()


@pytest.mark.parametrize("count", [3, True, 2.0])
def test_numbers_of_python_are_arguments(count):
    x = np.arange(1, 5, dtype=np.float32)
    counted = program(lambda count, x: (count + 1, x / (count + 1)), count, x)
    rounding = Rounding(WideProgram(counted), [count, x])
    assert (rounding.errors[1] > 0).all() and (rounding.errors[1] < 1e-6 * x).all()


@pytest.mark.parametrize("function", [jax.lax.pow, jax.lax.rem])
def test_constants_that_are_integers_are_exact(function):
    x = np.array([-3.5, -1.25, 1.75, 4.5], np.float32)
    rounding = Rounding(WideProgram(program(lambda x: (function(x, jnp.full(4, 2.0)),), x)), [x])
    assert (rounding.errors[0] > 0).all() and (rounding.errors[0] < 1e-5 * np.abs(x)).all()


def test_a_loop_in_a_body_that_is_called_twice_has_the_constants_of_each_call():
    @jax.jit
    def inner(x, factor):
        return jax.lax.fori_loop(0, 3, lambda i, y: y * factor + 1, x)

    x = np.arange(1, 5, dtype=np.float32)
    calls = program(lambda x: [inner(x, np.float32(k)) for k in (2, 50)], x)
    rounding = Rounding(WideProgram(calls), [x])
    for error, value in zip(rounding.errors, rounding.values, strict=True):
        assert (error > 0).all() and (error < 1e-5 * value).all()


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(HALF, 4, 2))
def test_reassociations_agree_and_wrong_results_do_not(seed):
    found, name = outcomes(seed)
    assert not found["different"] and not found["missed"], (name, found)


@pytest.mark.sweep
def test_all_reassociations_agree_and_no_wrong_result_does():
    total = Counter()
    faults = []
    for seed in range(PROGRAMS):
        found, name = outcomes(seed)
        total += found
        if found["different"] or found["missed"]:
            faults.append((seed, name, dict(found)))
    print(dict(total), faults)
    assert not faults and total["same"] > 1500 and total["found"] > 1500, (total, faults)
