"""The name of a mapped function, the names of its equations, and the lifetime of tracers."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxprtool import vmap
from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_both_raise


def test_a_mapped_function_has_the_name_and_documentation_of_the_function():
    def fun(x: int, *, y=1):
        """Of which there is one."""
        return x

    fun.mark = 5
    ours, theirs = vmap(fun), jax.vmap(fun)
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__annotations__",
        "__wrapped__",
        "mark",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    assert inspect.signature(ours) == inspect.signature(fun)
    assert "Original documentation:\n\nOf which there is one." in ours.__doc__
    assert vmap(partial(fun, y=2)).__name__ == jax.vmap(partial(fun, y=2)).__name__ == "fun"


def test_equations_are_named_as_by_jax():
    def fun(x, w):
        with jax.named_scope("inner"):
            return jnp.sin(x), jnp.cos(w)

    def scopes(v):
        def outer(x):
            with jax.named_scope("outer"):
                return v(fun, in_axes=(0, None), out_axes=(0, None))(x, x)

        eqns = jax.make_jaxpr(outer)(VECTOR).eqns
        return {eqn.primitive.name: str(eqn.source_info.name_stack) for eqn in eqns}

    assert scopes(vmap) == scopes(jax.vmap)
    assert scopes(vmap) == {"sin": "outer/vmap(inner)", "cos": "outer/vmap(inner)"}


def test_tracers_do_not_outlive_the_call():
    def escaped(v, use):
        saved = []
        v(lambda x: saved.append(x) or x)(VECTOR)
        use(v, saved[0])

    for use in (lambda v, x: x + 1, lambda v, x: v(lambda y: x + y)(VECTOR)):
        _, ours = assert_both_raise(partial(escaped, use=use))
        assert re.match("Encountered an unexpected tracer", ours)


@pytest.mark.proof
def test_leaks_of_the_user_are_found_and_vmap_makes_none():
    def leaking(v):
        saved = []
        with jax.checking_leaks():
            v(lambda x: saved.append(x) or x)(VECTOR)

    for v in jax.vmap, vmap:
        with pytest.raises(Exception, match="Leaked trace"):
            leaking(v)
    with jax.checking_leaks():
        vmap(lambda x: jax.nn.relu(x) + lax.cond(x > 1, jnp.sin, lax.neg, x))(VECTOR)
        jax.make_jaxpr(vmap(jax.nn.relu))(VECTOR)


def test_user_code_is_run_once_and_its_errors_are_passed_on():
    calls = []

    def failing(x):
        calls.append(x.shape)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vmap(failing)(MATRIX)
    vmap(lambda x: calls.append(x.shape) or x)(MATRIX)
    assert calls == [(4,), (4,)]


def test_nans_are_reported_where_they_arise():
    with jax.debug_nans(True):
        assert_both_raise(lambda v: v(lambda x: lax.log(x - 1))(VECTOR))


def test_tokens_can_be_results():
    tokens = [v(lambda x: lax.create_token(), out_axes=None)(VECTOR) for v in (jax.vmap, vmap)]
    assert type(tokens[0]) is type(tokens[1])
