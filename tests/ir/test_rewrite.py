"""Rewriting equation by equation: what a rule sees, and what stays the same object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.structured import sub_jaxprs
from jaxprtool.jaxcompat import check_jaxpr, jaxpr_as_fun, open_jaxpr

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)


def sine_to_cosine(eqn):
    """A rule with one equation for another."""
    if eqn.primitive.name != "sin":
        return None
    return [eqn.replace(primitive=lax.cos_p)]


def keep(eqn):
    return None


def names(jaxpr):
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn.primitive.name
        for _, body in sub_jaxprs(eqn):
            yield from names(body)


@jax.custom_jvp
def custom_jvp_sine(x):
    return jnp.sin(x)


custom_jvp_sine.defjvps(lambda t, _, x: t * jnp.cos(x))


@jax.custom_vjp
def custom_vjp_sine(x):
    return jnp.sin(x)


custom_vjp_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def sine_of_shard(x):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


PROGRAMS = {
    "flat": jnp.sin,
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "scan": lambda x: lax.scan(lambda c, y: (jnp.sin(c), c * jnp.sin(y)), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: jnp.sin(c).sum() > 9, jnp.sin, x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: 2 * jnp.sin(x), x),
    "switch": lambda x: lax.switch(2, [jnp.sin, jnp.tanh, lambda x: jnp.sin(x) + 1], x),
    "remat": lambda x: jax.checkpoint(jnp.sin)(x),
    "custom_jvp": custom_jvp_sine,
    "custom_vjp": custom_vjp_sine,
    "shard_map": sine_of_shard,
    "linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: (3 + jnp.sin(x)) * v, x, lambda f, b: b / f(jnp.ones_like(b)), symmetric=True
    ),
}


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_a_rule_reaches_every_depth(fun):
    before = jax.make_jaxpr(fun)(X)
    after = map_equations(before, sine_to_cosine)
    check_jaxpr(open_jaxpr(after))
    expected = ["cos" if name == "sin" else name for name in names(before)]
    assert "cos" in expected
    assert list(names(after)) == expected


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_a_jaxpr_in_which_nothing_changes_is_the_same_object(fun):
    before = jax.make_jaxpr(fun)(X)
    assert map_equations(before, keep) is before


def test_the_result_computes_what_the_rule_made_of_it():
    after = map_equations(jax.make_jaxpr(PROGRAMS["jit"])(X), sine_to_cosine)
    np.testing.assert_allclose(jaxpr_as_fun(after)(X)[0], np.cos(X), rtol=1e-6)


def test_a_shared_body_is_rewritten_once_and_stays_shared():
    inner = jax.jit(lambda x: jnp.sin(x))
    seen = []

    def rule(eqn):
        seen.append(eqn.primitive.name)
        return sine_to_cosine(eqn)

    after = map_equations(jax.make_jaxpr(lambda x: inner(inner(x)))(X), rule)
    first, second = after.eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]
    assert seen == ["sin", "jit", "jit"]


def test_an_untouched_body_beside_a_rewritten_one_is_the_same_object():
    before = jax.make_jaxpr(lambda x: jax.jit(jnp.tanh)(jax.jit(jnp.sin)(x)))(X)
    after = map_equations(before, sine_to_cosine)
    assert after.eqns[0].params["jaxpr"] is not before.eqns[0].params["jaxpr"]
    assert after.eqns[1] is before.eqns[1]


def test_the_rule_sees_an_equation_after_its_bodies():
    bodies = []

    def rule(eqn):
        bodies.extend(list(names(body)) for _, body in sub_jaxprs(eqn))
        return sine_to_cosine(eqn)

    map_equations(jax.make_jaxpr(PROGRAMS["jit"])(X), rule)
    assert bodies == [["cos"]]


def test_effects_are_computed_anew_up_to_the_top():
    def noisy(x):
        jax.debug.print("{}", x)
        return x

    before = jax.make_jaxpr(lambda x: lax.map(noisy, x))(X)
    assert before.effects
    after = map_equations(before, lambda eqn: [] if "debug" in eqn.primitive.name else None)
    check_jaxpr(open_jaxpr(after))
    assert not after.effects
    assert not after.eqns[-1].effects


def test_constants_and_the_jaxpr_given_stay_as_they_are():
    table = jnp.arange(6.0)
    before = jax.make_jaxpr(lambda x: jnp.sin(x) + table)(X)
    text = str(before)
    after = map_equations(before, sine_to_cosine)
    assert str(before) == text
    assert after.consts is before.consts or list(after.consts) == list(before.consts)
    assert after.invars == before.invars and after.outvars == before.outvars
