"""Custom rules that can be differentiated by some of their arguments only, as in Equinox."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.loading.trace import trace
from tests.formats.python.emitting import defined, emitted

X, Y, N = jnp.arange(1.0, 4.0), jnp.arange(2.0, 5.0), jnp.arange(3)


def by_the_first(kind, weights=2.0):
    """A function of x, y and an integer, with a derivative by x only."""

    @getattr(jax, f"custom_{kind}")
    def fun(x, y, n):
        return weights * x * jnp.sin(y) + n, n + 1

    def rule(primals, tangents):
        assert type(tangents[1]) is SymbolicZero
        out = fun(*primals)
        slope = 5.0 * tangents[0] * jnp.sin(primals[1])
        return out, (slope, np.zeros(np.shape(primals[2]), jax.dtypes.float0))

    def fwd(x, y, n):
        assert not y.perturbed
        return fun(x.value, y.value, n.value), y.value

    def bwd(y, cts):
        if type(cts[0]) is SymbolicZero:
            return jnp.zeros(y.shape), None, None
        return 5.0 * cts[0] * jnp.sin(y), None, None

    if kind == "jvp":
        fun.defjvp(rule, symbolic_zeros=True)
    else:
        fun.defvjp(fwd, bwd, symbolic_zeros=True)
    return fun


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("weights", [2.0, jnp.arange(3.0)], ids=["plain", "captured"])
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["alone", "mapped"])
def test_partial_rules_round_trip_with_their_derivatives(kind, weights, around):
    if around is jax.vmap:
        X2, Y2, N2 = (jnp.stack([a, a + 1]) for a in (X, Y, N))
    else:
        X2, Y2, N2 = X, Y, N
    fun = by_the_first(kind, weights)
    program = trace(around(lambda x, y, n: fun(x, y, n)), X2, Y2, N2)
    source, again = emitted(program)
    assert "symbolic_zeros=True" in source
    assert structural_difference(program, again) is None
    function = defined(source)
    results = (jax.jit(f)(X2, Y2, N2) for f in (function, program))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    slope = jax.jit(jax.grad(lambda x: function(x, Y2, N2)[0].sum()))(X2)
    np.testing.assert_allclose(slope, 5.0 * jnp.sin(Y2), rtol=1e-6)
    unused = jax.jit(jax.grad(lambda x: function(x, Y2, N2)[1].sum() * 1.0))(X2)
    np.testing.assert_array_equal(unused, jnp.zeros(X2.shape))


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_missing_derivative_is_refused(kind):
    fun = by_the_first(kind)
    function = defined(to_python(trace(lambda x, y: fun(x, y, N)[0].sum(), X, Y)))
    with pytest.raises(TypeError, match="does not differentiate with respect to operand 1"):
        jax.grad(function, argnums=1)(X, Y)
    with pytest.raises(TypeError, match="does not differentiate with respect to operand 1"):
        jax.grad(function, argnums=(0, 1))(X, Y)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_number_among_the_arguments_has_the_methods_of_an_array(kind):
    fun = by_the_first(kind)
    function = defined(to_python(trace(lambda x, y: fun(x, y, 3)[0].sum(), X, Y)))
    np.testing.assert_allclose(jax.grad(function)(X, Y), 5.0 * jnp.sin(Y), rtol=1e-6)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_number_among_the_arguments_keeps_its_dtype(kind):
    custom = {"jvp": jax.custom_jvp, "vjp": jax.custom_vjp}[kind]
    fun = custom(lambda x, n: x * (n + np.uint8(100)))
    if kind == "jvp":
        fun.defjvp(lambda primals, tangents: (fun(*primals), tangents[0] * (primals[1] + 100)))
    else:
        fun.defvjp(lambda x, n: (fun(x, n), n), lambda n, ct: (ct * (n + np.uint8(100)), None))
    program = trace(lambda x: fun(x, jnp.uint8(200)).sum(), X)
    function = defined(to_python(program))
    assert function(X) == program(X) == 44 * X.sum()
    np.testing.assert_array_equal(jax.grad(function)(X), np.full(3, 44, np.float32))
