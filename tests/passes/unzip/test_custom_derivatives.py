"""Variables inside functions with custom derivative rules.

The user's rule applies to the operands. A variable is not one of them, and has the natural
derivative of the body. The rules here are wrong by a factor, to tell the two apart.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import sow, unzip, variable
from jaxprtool.errors import UnsupportedError, UserFunctionError
from tests.programs.init_apply import unzips

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


def assert_trees_close(actual, expected) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


def with_jvp(body):
    function = jax.custom_jvp(body)

    @function.defjvp
    def rule(primals, tangents):
        out, tangent = jax.jvp(body, primals, tangents)
        return out, 3 * tangent

    return function


def with_vjp(body):
    function = jax.custom_vjp(body)

    def bwd(saved, cotangent):
        pullback = jax.vjp(body, *saved)[1]
        return jax.tree.map(
            lambda t: t if t.dtype == jax.dtypes.float0 else 3 * t, pullback(cotangent)
        )

    function.defvjp(lambda *xs: (body(*xs), xs), bwd)
    return function


CUSTOM = {"custom_jvp": with_jvp, "custom_vjp": with_vjp}


def scaled(x, y):
    """A custom function's body, of numbers: the variable is made from the first."""
    return variable(x * 2, name="w") * jnp.sin(y)


@pytest.mark.parametrize("kind", CUSTOM)
def test_a_custom_rule_applies_to_the_inputs_and_the_body_to_the_variables(kind):
    def f(k, y):
        return CUSTOM[kind](scaled)(k, y)

    k, y = jnp.float32(1.5), jnp.float32(0.3)
    init, apply = unzips(f, k, y, count=1)
    assert_trees_close(init(k), {"w": 3.0})
    variables = {"w": jnp.float32(5.0)}
    by_variables, by_input = jax.grad(apply, argnums=(0, 1))(variables, y)
    assert_trees_close(by_input, 3 * 5 * jnp.cos(y))
    assert_trees_close(by_variables, {"w": jnp.sin(y)})


@pytest.mark.proof
@pytest.mark.parametrize("kind", CUSTOM)
def test_a_custom_rule_is_kept_under_jit_vmap_and_in_a_scan(kind):
    def body(key, x):
        return variable(jax.random.normal(key, (3,)), name="w") * jnp.sin(x)

    def f(key, x):
        def step(x, key):
            return jax.jit(CUSTOM[kind](body))(key, x), None

        return lax.scan(step, x, jax.random.split(key, 2))[0]

    init, apply = unzips(f, KEY, X, count=1)
    xs = jnp.stack([X, 2 * X])
    by_input = jax.jit(jax.vmap(jax.grad(lambda x: apply(init(KEY), x).sum())))(xs)
    assert_trees_close(by_input[0], jax.grad(lambda x: f(KEY, x).sum())(X))


@pytest.mark.proof
@pytest.mark.parametrize("kind", CUSTOM)
def test_a_custom_rule_without_variables_is_unchanged(kind):
    def f(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")
        return CUSTOM[kind](lambda w, x: w * jnp.sin(x))(w, x)

    init, apply = unzips(f, KEY, X, count=1)
    variables = init(KEY)
    by_variables = jax.grad(lambda v: apply(v, X).sum())(variables)
    assert_trees_close(by_variables, {"w": 3 * jnp.sin(X)})


@pytest.mark.proof
def test_a_jvp_rule_that_calls_its_function():
    @jax.custom_jvp
    def safe(key, x):
        return variable(jax.random.uniform(key, (3,)), name="w") * jnp.exp(x)

    @safe.defjvp
    def rule(primals, tangents):
        out = safe(*primals)
        return out, out * tangents[1] * 3

    init, apply = unzip(lambda key, x: safe(key, x))(KEY, X)
    variables = {"w": jnp.array([1.0, 2.0, 3.0])}
    by_input = jax.grad(lambda x: apply(variables, x).sum())(X)
    assert_trees_close(by_input, 3 * variables["w"] * jnp.exp(X))
    assert_trees_close(init(KEY), {"w": jax.random.uniform(KEY, (3,))})
    by_variables = jax.grad(lambda v: apply(v, X).sum())(variables)
    assert_trees_close(by_variables, {"w": jnp.exp(X)})


def test_vjp_rules_that_call_their_function():
    @jax.custom_vjp
    def safe(key, x):
        return variable(jax.random.uniform(key, (3,)), name="w") * jnp.exp(x)

    def fwd(key, x):
        out = safe(key, x)
        return out, out

    safe.defvjp(fwd, lambda out, cotangent: (None, 3 * out * cotangent))
    _, apply = unzip(lambda key, x: safe(key, x))(KEY, X)
    variables = {"w": jnp.array([1.0, 2.0, 3.0])}
    by_variables, by_input = jax.grad(lambda v, x: apply(v, x).sum(), argnums=(0, 1))(variables, X)
    assert_trees_close(by_input, 3 * variables["w"] * jnp.exp(X))
    assert_trees_close(by_variables, {"w": jnp.exp(X)})


def test_a_closed_form_jvp_rule_without_the_variable():
    @jax.custom_jvp
    def f(x, key):
        return x * variable(jax.random.uniform(key), name="w")

    @f.defjvp
    def rule(primals, tangents):
        return f(*primals), 100.0 * tangents[0]

    _, apply = unzip(lambda key, x: f(x, key))(KEY, jnp.float32(2.0))
    by_variables, by_input = jax.grad(apply, argnums=(0, 1))({"w": jnp.float32(4.0)}, 2.0)
    assert_trees_close((by_variables, by_input), ({"w": 2.0}, 100.0))


@pytest.mark.proof
def test_a_variable_of_a_key_that_a_custom_function_closes_over():
    """The call takes the key as an operand; the rule applies to the others."""

    def f(key, x):
        def body(x):
            return variable(jax.random.normal(key, (3,)), name="w") * jnp.sin(x)

        return with_jvp(body)(x)

    init, apply = unzip(f)(KEY, X)
    w = init(KEY)
    assert_trees_close(w, {"w": jax.random.normal(KEY, (3,))})
    assert_trees_close(apply(w, X), f(KEY, X))
    by_w, by_x = jax.grad(lambda w, x: apply(w, x).sum(), argnums=(0, 1))(w, X)
    assert_trees_close(by_w, {"w": jnp.sin(X)})
    assert_trees_close(by_x, jax.grad(lambda x: f(KEY, x).sum())(X))


@pytest.mark.parametrize("kind", CUSTOM)
def test_a_variable_of_a_custom_function_made_of_another_is_refused(kind):
    """apply differentiates by the other, which the user's rule takes for an operand."""

    def f(k, y):
        return CUSTOM[kind](scaled)(variable(k, name="first"), y)

    with pytest.raises(UnsupportedError, match="operand that is not a key"):
        unzip(f)(jnp.float32(1.5), jnp.float32(0.3))


@pytest.mark.parametrize("mode", ["append", "clobber"])
def test_a_custom_function_has_each_variable_once(mode):
    @jax.custom_jvp
    def f(k, y):
        return sow(k, tag="variable", name="w", mode=mode) * y

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[1]))
    with pytest.raises(UnsupportedError, match=r"custom_jvp_call at .*strict"):
        unzip(lambda k, y: f(k, y))(jnp.float32(1.5), jnp.float32(0.3))


@pytest.mark.parametrize(
    "outer, inner",
    [
        ("custom_jvp", "custom_jvp"),
        ("custom_vjp", "custom_jvp"),
        ("custom_vjp", "custom_vjp"),
    ],
)
def test_nested_custom_functions(outer, inner):
    def f(k, y):
        within = CUSTOM[inner](scaled)

        def body(k, y):
            return within(k, y) * variable(k + 1, name="v")

        return CUSTOM[outer](body)(k, y)

    unzips(f, jnp.float32(1.5), jnp.float32(0.3), count=2)


@pytest.mark.parametrize("kind", CUSTOM)
def test_second_derivatives_use_the_same_rules(kind):
    _, apply = unzip(lambda k, y: CUSTOM[kind](scaled)(k, y))(jnp.float32(1.5), jnp.float32(0.3))

    def plain(variables, y):
        return variables["w"] * jnp.sin(y)

    variables, y = {"w": jnp.float32(2.0)}, jnp.float32(0.3)
    found = jax.grad(lambda v: jax.grad(apply)(v, y)["w"] ** 2)(variables)
    expected = jax.grad(lambda v: jax.grad(plain)(v, y)["w"] ** 2)(variables)
    assert_trees_close(found, expected)


def through_a_while(w, x):
    """A function that JAX cannot differentiate in reverse mode."""
    return lax.while_loop(lambda c: c < 10, lambda c: c * (1 + w), x)


def through_a_pad(w, x):
    """A function that JAX fails to transpose by the padding only."""
    return lax.pad(jnp.stack([x, x]), w, [(1, 1, 0)]).sum()


def through_a_callback(w, x):
    """A function that JAX cannot differentiate at all."""
    return jax.pure_callback(np.multiply, x, w, x)


@pytest.mark.parametrize(
    "kind, of_body",
    [
        ("custom_vjp", through_a_while),
        ("custom_vjp", through_a_pad),
        ("custom_jvp", through_a_callback),
    ],
)
def test_variables_by_which_jax_cannot_differentiate_the_body(kind, of_body):
    """The user's rule still applies; only derivatives by the variables are refused."""

    def body(key, x):
        return of_body(variable(jax.random.uniform(key), name="w"), x)

    function = getattr(jax, kind)(body)
    if kind == "custom_jvp":
        function.defjvp(lambda primals, tangents: (body(*primals), 3 * tangents[1]))
    else:
        function.defvjp(lambda key, x: (body(key, x), x), lambda _, ct: (None, 3 * ct))
    x = jnp.float32(2.0)
    init, apply = unzip(lambda key, x: function(key, x))(KEY, x)
    variables = init(KEY)
    assert_trees_close(apply(variables, x), body(KEY, x))
    assert_trees_close(jax.jit(jax.grad(lambda x: apply(variables, x)))(x), 3.0)
    with pytest.raises(UserFunctionError, match="does not differentiate with respect to operand 0"):
        jax.grad(lambda v: apply(v, x))(variables)
