"""Compare `jaxprtool.vmap` with `jax.vmap`, on the same function and the same arguments."""

import contextlib
import io
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import vmap

MATRIX = jnp.arange(12.0).reshape(3, 4)
VECTOR = jnp.arange(3.0)
OPTIONS = ("in_axes", "out_axes", "axis_name", "axis_size", "spmd_axis_name", "sum_match")


def data(x):
    """Return a result in comparable form: type, weak type, values."""
    if not isinstance(x, jax.Array):
        return type(x), x
    bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.typeof(x).str_short(), jax.typeof(x).weak_type, np.asarray(bits)


def assert_alike(fun, *args, around=lambda mapped: mapped, **kwargs):
    """Assert that both vmaps of `fun`, each wrapped by `around`, have equal results and types."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    expected, got = (around(v(fun, **options))(*args, **kwargs) for v in (jax.vmap, vmap))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        *kind, value = data(ours)
        *their_kind, their_value = data(theirs)
        assert kind == their_kind
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, their_value, rtol=2e-5, atol=1e-5)
        else:
            assert value == their_value


def raised(action):
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def assert_both_raise(action):
    """Assert that `action` raises the same kind of error for both vmaps. Return both messages."""
    theirs, ours = raised(partial(action, jax.vmap)), raised(partial(action, vmap))
    assert isinstance(ours, type(theirs))
    return tuple(" ".join(str(error).split()).rstrip(".") for error in (theirs, ours))


def printed(mapped):
    """Return what is printed while a mapped function runs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        mapped(VECTOR)
        jax.effects_barrier()
    return out.getvalue()


def jvp_of(fun, *args):
    """Return the value of a function at a point, and its derivative along the point."""
    return jax.jvp(fun, args, args)
