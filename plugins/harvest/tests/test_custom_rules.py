"""What is sown in functions with derivative rules of their own, and in the rules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprtool_harvest import call_and_reap, harvest, plant, reap

from jaxprtool import sow
from jaxprtool.errors import JaxprToolError, UnsupportedError

value = partial(sow, tag="t")
reap_t, plant_t, harvest_t = (partial(f, tag="t") for f in (reap, plant, harvest))
call_and_reap_t = partial(call_and_reap, tag="t")


def by_jvp(in_rule=lambda x: x):
    """sin(x) + y, sown as y = 2x; its rule says that the derivative is 2."""

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x) + value(2.0 * x, name="y")

    f.defjvp(lambda primals, tangents: (f(in_rule(*primals)), 2.0 * tangents[0]))
    return f


def by_vjp(in_fwd=lambda x: x, in_bwd=lambda x: x):
    """The same function, with the same derivative told by two rules."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x) + value(2.0 * x, name="y")

    f.defvjp(lambda x: (f(in_fwd(x)), None), lambda _, g: (2.0 * in_bwd(g),))
    return f


BOTH = pytest.mark.parametrize("make", [by_jvp, by_vjp])


@BOTH
def test_custom_functions_are_reaped_and_planted(make):
    f = make()
    assert call_and_reap_t(f)(3.0) == (f(3.0), {"y": 6.0})
    assert reap_t(jax.jit(lambda x: f(x + 1)))(2.0) == {"y": 6.0}
    np.testing.assert_allclose(plant_t(f)({"y": 1.0}, 3.0), np.sin(3.0) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(plant_t(f))({"y": jnp.ones(2)}, jnp.zeros(2)), 1.0)


@BOTH
def test_the_rule_differentiates_the_results_and_jax_what_is_sown(make):
    f = make()
    assert jax.grad(lambda x: call_and_reap_t(f)(x)[0])(3.0) == 2.0
    assert jax.grad(lambda x: reap_t(f)(x)["y"] ** 2)(3.0) == 24.0

    def sum_of_all(x):
        out, reaps = call_and_reap_t(f)(x)
        return out + reaps["y"] ** 2

    assert jax.grad(sum_of_all)(3.0) == 2.0 + 24.0
    assert jax.vmap(jax.grad(sum_of_all))(jnp.array([3.0])) == 26.0


@BOTH
def test_a_function_that_is_planted_in_is_not_differentiated(make):
    f = make()
    with pytest.raises(JaxprToolError, match=r"planted inside custom_.*rules.py:\d+"):
        jax.grad(lambda x: plant_t(lambda x: f(x))({"y": x}, x))(3.0)
    # Where nothing is planted, nothing changes.
    assert jax.grad(plant_t(f), argnums=1)({}, 3.0) == 2.0
    assert jax.grad(lambda x: harvest_t(f)({"z": 1.0}, x)[0])(3.0) == 2.0


@BOTH
def test_other_tags_stay_sown_once(make):
    both = make()

    def f(x):
        return sow(both(x), tag="u", name="out")

    assert reap(call_and_reap_t(f), tag="u")(0.0) == {"out": 0.0}
    inner = call_and_reap(make(), tag="u")
    assert reap_t(inner)(3.0) == {"y": 6.0}
    assert reap_t(call_and_reap(make(), tag="u", exclusive=True))(3.0) == {}


def test_a_custom_function_that_sows_two_tags_gives_each_once():
    @jax.custom_jvp
    def f(x):
        return value(x, name="x") + sow(3 * x, tag="u", name="x")

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    (out, t), u = call_and_reap(call_and_reap_t(f), tag="u")(2.0)
    assert (out, t, u) == (8.0, {"x": 2.0}, {"x": 6.0})


def test_what_rules_sow_is_reaped_where_they_are_followed():
    sown = partial(value, name="in_rule")
    assert reap_t(jax.grad(by_jvp(sown)))(3.0) == {"in_rule": 3.0, "y": 6.0}
    assert reap_t(jax.grad(by_vjp(in_fwd=sown)))(3.0) == {"in_rule": 3.0, "y": 6.0}
    assert harvest_t(jax.grad(by_vjp(in_bwd=sown)))({"in_rule": 5.0}, 3.0) == (10.0, {"y": 6.0})
    assert call_and_reap_t(by_jvp(sown))(3.0)[1] == {"y": 6.0}
    _, pullback = jax.vjp(by_vjp(in_bwd=sown), 3.0)
    assert call_and_reap_t(pullback)(1.0) == ((2.0,), {"in_rule": 1.0})
    assert plant_t(pullback)({"in_rule": 4.0}, 1.0) == (8.0,)


def test_the_rule_of_a_function_that_sows_nothing_is_kept():
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 5.0 * tangents[0]))

    def g(x):
        return f(value(x, name="x"))

    assert jax.grad(lambda x: call_and_reap_t(g)(x)[0])(1.0) == 5.0
    assert jax.grad(plant_t(g))({"x": 2.0}, 1.0) == {"x": 5.0}


@BOTH
def test_a_custom_function_that_a_gradient_computes_anew_is_reaped_once(make):
    f = make()

    @jax.checkpoint
    def g(x):
        return x * f(jax.lax.stop_gradient(x))

    assert reap_t(jax.grad(g))(3.0) == {"y": 6.0}
    np.testing.assert_allclose(plant_t(jax.grad(g))({"y": 1.0}, 3.0), np.sin(3.0) + 1, rtol=1e-6)


def test_an_effect_that_would_happen_twice_is_refused():
    @jax.custom_jvp
    def f(x):
        jax.debug.print("{}", x)
        return value(x, name="x")

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    with pytest.raises(UnsupportedError, match=r"'x' is sown inside custom_jvp_call at .*effect"):
        reap_t(lambda x: f(x))(1.0)
    assert plant_t(f)({"x": 2.0}, 1.0) == 2.0
