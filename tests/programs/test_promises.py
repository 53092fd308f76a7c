"""Promises of in-bounds indices are checked against the operands."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from tests.passes.mapping.mask.proving import prove
from tests.programs.promises import NOT_AS_PROMISED, keeps_promises

PROMISE = "promise_in_bounds"

#: Functions of an f32[n], and the smallest n at which their indices are in bounds.
FUNCTIONS = {
    "gather": (lambda x: x.at[jnp.array([0, 2])].get(mode=PROMISE), 3),
    "window": (
        lambda x: lax.gather(
            x,
            jnp.array([[1]]),
            lax.GatherDimensionNumbers((1,), (), (0,)),
            (2,),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        ),
        3,
    ),
    "scatter": (lambda x: x.at[jnp.array([3])].add(1.0, mode=PROMISE), 4),
    "in a loop": (lambda x: lax.fori_loop(0, 4, lambda i, x: x.at[i].mul(2.0, mode=PROMISE), x), 4),
    "without a promise": (lambda x: x.at[jnp.array([0, 2])].get(mode="clip"), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_indices_are_checked_at_each_size(name):
    function, least = FUNCTIONS[name]
    (n,) = jax.export.symbolic_shape("n")
    program = trace(function, jax.ShapeDtypeStruct((n + 1,), np.float32))
    for size in range(2, 6):
        args = [np.ones(size, np.float32)]
        assert keeps_promises(program, {"n": size - 1}, args) == (size >= least)


def test_a_wrong_result_is_detected_where_promises_hold(monkeypatch):
    from jaxprtool.passes.mapping.mask.table import mask_rules

    gather = mask_rules["gather"]
    broken = {**mask_rules, "gather": lambda *args: gather(*args).array * 0}
    function, _ = FUNCTIONS["gather"]
    assert prove(function, "f32[n]", least=2)[NOT_AS_PROMISED] == 2
    monkeypatch.setattr("jaxprtool.passes.mapping.mask.mask_rules", broken)
    with pytest.raises(AssertionError, match="differs"):
        prove(function, "f32[n]", least=2)
