"""The equations that `jaxprtool.vmap` writes into an enclosing trace."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace, vmap
from jaxprtool.ir.program import type_check
from tests.api.functions.vmap.beside import MATRIX, VECTOR

TABLE = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(4, 3)


def checked(fun, *args):
    """Return the jaxpr of a function, which must be well typed and compute the same."""
    program = trace(fun, *args)
    gc.collect()  # values that only tracers kept alive are freed
    type_check(program)
    np.testing.assert_allclose(program(*args), fun(*args), rtol=1e-6)
    return program.jaxpr


@pytest.mark.parametrize("where", ["in the function", "around it", "on a device"])
def test_constants_stay_with_the_equations_that_read_them(where):
    table = jnp.asarray(TABLE) if where == "on a device" else TABLE

    def fun(x):
        inner = jnp.asarray(table) * 2 if where == "around it" else None
        return vmap(lambda x: jnp.sin(x @ (jnp.asarray(table) if inner is None else inner)) + 1)(x)

    checked(fun, MATRIX)
    checked(lambda x: jax.jit(fun)(x) * 2, MATRIX)


def test_results_of_equations_that_read_arguments_have_readers():
    def fun(w, x):
        y = vmap(lambda x: jnp.cos(x * w) * jnp.sin(x))(x)
        return vmap(lambda y, x: y + x.sum())(y, x)

    closed = checked(fun, jnp.float32(2), MATRIX)
    names = [eqn.primitive.name for eqn in closed.eqns]
    assert names == [e.primitive.name for e in jax.make_jaxpr(fun)(jnp.float32(2), MATRIX).eqns]


def test_conversions_of_constants_are_folded_as_by_jax():
    def fun(v):
        return lambda x: v(lambda x: x + lax.convert_element_type(1, jnp.float32))(x)

    ours, theirs = (jax.make_jaxpr(fun(v))(VECTOR) for v in (vmap, jax.vmap))
    assert str(ours) == str(theirs)


def test_enclosing_name_scopes_are_those_of_jax():
    def fun(v):
        def scoped(x):
            with jax.named_scope("around"):
                return v(lambda x: jnp.sin(jax.named_call(jnp.cos, name="within")(x)))(x)

        return scoped

    stacks = [
        [str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(fun(v))(VECTOR).eqns]
        for v in (vmap, jax.vmap)
    ]
    assert stacks[0] == stacks[1] != []


def test_writes_to_a_ref_of_the_enclosing_function_name_it():
    def fun(x):
        ref = jax.new_ref(jnp.zeros(3))

        def write(i, v):
            ref[i] = v * 2
            return v

        lax.fori_loop(0, 3, lambda i, _: write(i, vmap(jnp.sin)(x)[i]) * 0, 0.0)
        return ref[...]

    checked(jax.jit(fun), VECTOR)


def test_dead_results_are_dropped_where_jax_drops_them():
    """In the linear part of a function, whose equations live as long as their results."""

    def fun(v):
        return lambda x: v(lambda x: (jnp.sin(x), jnp.exp(x) * x))(x)[0].sum()

    for function in (jax.grad, lambda f: lambda x: jax.linearize(f, x)[1](x)):
        ours, theirs = (jax.make_jaxpr(function(fun(v)))(VECTOR) for v in (vmap, jax.vmap))
        assert len(ours.eqns) <= len(theirs.eqns)
