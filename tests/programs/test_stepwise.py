"""Results computed in NumPy are bitwise equal to JAX's."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax

from tests.programs import harness_programs, interpreter
from tests.programs.recorder import recording
from tests.programs.stepwise import RULES, in_numpy
from tests.programs.values import bits_agree, first_value_difference
from tests.share import share

X = np.array([[2, 1.5, -3], [-0.0, 7, 0]], np.float32)
N = np.array([[2, -1, 3], [0, 2**31 - 1, -(2**31)]], np.int32)
TINY = np.float32(1e-40)


def compared(jaxpr, args):
    """Evaluate a jaxpr both ways, and return the primitives that NumPy evaluated."""
    found = Counter()

    def apply(eqn, operands):
        results = interpreter.bind(eqn, operands)
        ours = in_numpy(eqn, operands)
        if ours is not None:
            found[eqn.primitive.name] += 1
            assert first_value_difference(results, ours, bits_agree) is None, eqn
            assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in ours]
        return results

    with recording():
        interpreter.evaluate(jaxpr, args, apply)
    return found


#: Equations that no harness has, on values where implementations could differ.
FUNCTIONS = {
    "sums that overflow": lambda x, i: (i + i, i - 1 - i, i * i, -i, abs(i), lax.square(i)),
    "numbers": lambda x, i: (x + x, x * -x, x - x, lax.integer_pow(x, 2), x == 0),
    "the larger": lambda x, i: (
        lax.max(x, x[::-1]), lax.min(i, i[::-1]), lax.reduce_max(x - 9, (0,)),
        lax.reduce_min(x - 9, (1,)), lax.reduce_max(i, (0, 1)), lax.reduce_sum(i, (0,)),
    ),
    "conditions": lambda x, i: (
        x < i, x <= 2, i > 1, i >= 2, x != i, ~(x > 0) & (i > 0) | (x > 1) ^ (i < 1),
        lax.reduce_and(x > 0, (0,)), lax.reduce_or(x > 0, (1,)), lax.select_n(x > 0, x, -x),
        lax.is_finite(x), i & 3, i | 8, i ^ i[::-1],
    ),
    "types": lambda x, i: (
        i.astype("int8"), i.astype("uint32"), i.astype("float32"), i.astype("uint8"),
        x.astype(bool), (x > 0).astype("float32"), (i > 0).astype("int32"),
    ),
    "places": lambda x, i: (
        x.T, x.reshape(3, 2), lax.rev(x, (0, 1)), x[:, None], lax.concatenate([x, -x], 1),
        lax.slice(x, (0, 1), (2, 3)), lax.slice(i, (0, 0), (2, 3), (1, 2)),
        lax.dynamic_slice(x, (5, -1), (1, 2)), lax.dynamic_update_slice(x, x[:1], (7, 0)),
        lax.pad(x, np.asarray(4, x.dtype), ((1, 0, 0), (0, 2, 0))), lax.iota("int32", 4),
        lax.broadcasted_iota("float32", (2, 3), 1), lax.split(x, (1, 2), 1),
        lax.squeeze(x[:1], (0,)), lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_bitwise_equal(name):
    found = compared(jax.make_jaxpr(FUNCTIONS[name])(X, N), [X, N])
    assert found.total() >= 6


def test_every_rule_is_used():
    found = sum((compared(jax.make_jaxpr(f)(X, N), [X, N]) for f in FUNCTIONS.values()), Counter())
    made = {"stack", "tile", "unstack", "copy"}  # the first three from JAX 0.12 on
    missing = set(RULES) - set(found) - made
    assert not missing


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: x - x, [np.float32(np.inf)]),
        (lambda x: x * 0.5, [np.array([1, np.nan], np.float32)]),
        (lambda x: x * np.float32(0.5), [np.finfo(np.float32).tiny]),
        (lambda x: x == 0, [TINY]),
        (lambda x: lax.max(x, np.float32(-0.0)), [np.float32(0)]),
        (lambda x: lax.reduce_sum(x, (0,)), [X[0]]),
        (lambda x: x.astype("int32"), [np.float32(1e20)]),
        (lambda x: x / 3, [X]),
        (lambda x: x + x, [np.float16(1)]),
    ],
)
def test_equations_that_might_differ_are_left_to_jax(function, args):
    assert not compared(jax.make_jaxpr(function)(*args), args)


def test_moves_and_comparisons_accept_any_value():
    values = np.array([np.nan, -np.nan, TINY, -0.0, np.inf, 1], np.float32).reshape(2, 3)
    moves, more = FUNCTIONS["places"], ["bfloat16", "float16", "complex64"]
    for x in (values, *(jax.numpy.asarray(values, dtype) for dtype in more)):
        jaxpr = jax.make_jaxpr(lambda x, i: jax.tree.leaves(moves(x, i)))(x, N)
        assert compared(jaxpr, [x, N]).total() > 10
    compared(jax.make_jaxpr(lambda x: [x < x[::-1], x == x, lax.is_finite(x)])(values), [values])


def test_numpy_agrees_with_jax_on_jaxs_test_programs():
    found = Counter()
    for case in share(harness_programs(1)[::50]):
        with case.setting():
            found += compared(case.program().jaxpr, case.arguments())
    assert found.total() > 8
