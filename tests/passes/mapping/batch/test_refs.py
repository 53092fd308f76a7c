"""Refs in batched functions: each batch element has its own, at any axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.ir.program import type_check
from jaxprtool.passes.mapping.batch import Batch, BatchUnsupported


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def whole(x, y):
    ref = jax.new_ref(x)
    before = jax.ref.swap(ref, ..., y) if hasattr(jax, "ref") else ref[...]
    ref[...] = y
    ref[...] += x
    return before, ref[...]


def parts(x, y):
    ref = jax.new_ref(jnp.zeros((3, 3)))
    ref[1] = x[0]
    ref[:, 2] += y[:, 0]
    return ref[...]


def shared(x, y):
    ref = jax.new_ref(jnp.zeros(()))
    jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] + x[i, i] * y[0, i]), None)
    return ref[...]


@pytest.mark.parametrize("fun", [whole, parts, shared])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, 1), (2, 0), (1, None), (None, 2)])
def test_batch_elements_write_to_their_own_refs(fun, in_axes):
    program = Batch(in_axes, axis_size=3)(trace(fun, values(3, 3), values(3, 3)))
    type_check(program)
    args = [values(3, 3, 3) + i if a is not None else values(3, 3) for i, a in enumerate(in_axes)]
    expected = [
        fun(*(x if a is None else jnp.take(x, k, a) for x, a in zip(args, in_axes, strict=True)))
        for k in range(3)
    ]
    expected = jax.tree.map(lambda *lanes: jnp.stack(lanes), *expected)
    jax.tree.map(np.testing.assert_allclose, jax.jit(program)(*args), expected)


def test_refs_in_branches_are_refused_as_in_jax():
    def f(x):
        ref = jax.new_ref(x)
        jax.lax.cond(x > 0, lambda: ref.__setitem__(..., 2.0), lambda: None)
        return ref[...]

    with pytest.raises(BatchUnsupported, match=r"cond at .*: State effect not supported in vmap"):
        Batch(axis_size=3)(trace(f, 1.0))
