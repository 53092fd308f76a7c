"""The contents of mapped functions, and the transformations around them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import vmap
from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_alike, assert_both_raise, jvp_of
from tests.share import first_and_proofs

WEIGHTS = jnp.linspace(0.1, 2.0, 20).reshape(4, 5)


# --- inside ---------------------------------------------------------------------------------------


@jax.custom_batching.custom_vmap
def own_rule(x, y):
    return x + y


@own_rule.def_vmap
def _(size, batched, x, y):
    return x * y, True


INSIDE = {
    "jit": jax.jit(lambda x: (x @ WEIGHTS, 2)),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 30, lambda c: c + 1, x),
    "cond": lambda x: lax.cond(x.sum() > 10, jnp.sin, jnp.cos, x),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "grad": jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()),
    "jacobian": jax.jacfwd(lambda x: x * x.sum()),
    "jax.vmap": lambda x: jax.vmap(lambda y: y + x.sum())(x),
    "vmap": lambda x: vmap(lambda y: y + x.sum())(x),
    "custom_vmap": lambda x: own_rule(x, x) + own_rule(2.0, 3.0),
    "keys": lambda x: jax.random.fold_in(jax.random.key(1), x.sum().astype(int)),
    "indexing": lambda x: x.at[x.astype(int) % 4].add(1.0)[1],
    "weak types": lambda x: (x.astype(int) * 2.0, x.sum() * 1j, lax.full_like(x, 3)),
    "narrow types": lambda x: x.astype(jnp.bfloat16) * 2,
    "a pure callback": lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct((4,), "float32"), x, vmap_method="sequential"
    ),
    "an inner linearization": lambda x: jax.linearize(jnp.sin, x)[1](x),
    "fresh refs": lambda x: filled(x),
}


def filled(x):
    ref = jax.new_ref(x)
    ref[...] += 2
    return ref[...]


@pytest.mark.parametrize("name", first_and_proofs(INSIDE))
def test_contents_of_a_mapped_function(name):
    assert_alike(INSIDE[name], MATRIX)


@pytest.mark.proof
def test_random_keys_and_wide_types():
    keys = jax.random.split(jax.random.key(0), 3)
    assert_alike(lambda k, x: (jax.random.split(k), jax.random.normal(k, x.shape)), keys, MATRIX)
    with jax.enable_x64(True):
        assert_alike(lambda x, y: (x * 2.0, y * 2.0), np.ones(3), np.ones(3, np.float32))


def test_refs_of_the_enclosing_function_are_read():
    ref = jax.new_ref(jnp.arange(4.0))
    assert_alike(lambda x: x + ref[1] if ref[1] > 0 else x, VECTOR)
    assert_both_raise(lambda v: v(lambda x: ref.__setitem__(1, 2.0) or x)(VECTOR))


def test_with_disable_jit_inner_jits_run_as_python():
    with jax.disable_jit():
        assert_alike(
            lambda x: jax.jit(jnp.sin)(x) + lax.fori_loop(0, 2, lambda i, c: c + i, x), MATRIX
        )


# --- outside --------------------------------------------------------------------------------------


def model(w, x):
    return jax.nn.relu(jnp.tanh(x @ w) - 0.5) * 2


AROUND = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda *a: f(*a).sum())),
    "jvp": lambda f: partial(jvp_of, f),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "checkpoint": lambda f: jax.grad(lambda *a: jax.checkpoint(f)(*a).sum()),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (c + f(w, x).sum(), c), 0.0, length=2),
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "vmap": lambda f: vmap(f, in_axes=(None, 1), out_axes=1),
    "vmap of grad": lambda f: vmap(jax.grad(lambda *a: f(*a).sum()), in_axes=(None, 0)),
}


@pytest.mark.parametrize("name", first_and_proofs(AROUND))
def test_transformations_around_vmap(name):
    x = jnp.stack([MATRIX, MATRIX - 5]) if "vmap" in name else MATRIX
    in_axes = (None, 0)
    assert_alike(model, WEIGHTS, x, in_axes=in_axes, around=AROUND[name])


@pytest.mark.proof
def test_both_kinds_of_vmap_nest_with_their_axes():
    def fun(x):
        return lax.psum(x, ("i", "j")) + lax.axis_index("i") * 10 + lax.axis_index("j")

    for outer in jax.vmap, vmap:
        assert_alike(
            fun, MATRIX, axis_name="i", around=lambda f, o=outer: o(f, in_axes=1, axis_name="j")
        )


def test_shapes_may_be_symbolic():
    n, m = jax.export.symbolic_shape("n, m")

    def fun(x):
        return jnp.sin(x), jnp.arange(3.0), x.shape[0] * 1, lax.axis_index("i"), x.sum()

    def exported(v):
        mapped = v(fun, axis_name="i", axis_size=n)
        return jax.export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((n, m), "float32"))

    ours, theirs = exported(vmap), exported(jax.vmap)
    assert ours.out_avals == theirs.out_avals
    for a, b in zip(ours.call(MATRIX), theirs.call(MATRIX), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
