"""map_equations reaches every depth, once for each body, and leaves the rest alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.structured import view

x = jnp.arange(12.0).reshape(3, 4)


def sin_to_cos(eqn):
    if eqn.primitive.name != "sin":
        return None
    (body_eqn,) = jax.make_jaxpr(jnp.cos)(jnp.zeros(eqn.outvars[0].aval.shape)).eqns
    return [body_eqn.replace(invars=eqn.invars, outvars=eqn.outvars)]


def test_every_depth_is_rewritten():
    def f(fun, a):
        loop = lax.scan(lambda c, r: (jax.jit(fun)(c), fun(r)), 0.5, a)[1]
        return lax.cond(True, lambda b: jax.checkpoint(fun)(b), lambda b: b, loop)

    new = map_equations(jax.make_jaxpr(lambda a: f(jnp.sin, a))(x), sin_to_cos)
    jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(new))
    (result,) = jaxcompat.jaxpr_as_fun(new)(x)
    np.testing.assert_allclose(result, f(jnp.cos, x), rtol=1e-6)


def test_a_jaxpr_without_a_match_stays_the_same_object():
    jaxpr = jax.make_jaxpr(jax.jit(jnp.tan))(x)
    assert map_equations(jaxpr, sin_to_cos) is jaxpr


def test_a_shared_body_is_rewritten_once_and_stays_shared():
    asked = []

    def rule(eqn):
        asked.append(eqn.primitive.name)
        return sin_to_cos(eqn)

    inner = jax.jit(jnp.sin)
    new = map_equations(jax.make_jaxpr(lambda a: inner(inner(a)))(x), rule)
    first, second = (jaxcompat.open_jaxpr(view(e).body) for e in new.eqns)
    assert first is second
    assert asked.count("sin") == 1


def test_effects_are_computed_anew():
    def f(a):
        jax.debug.print("{}", a)
        return jnp.sin(a)

    drop = lambda eqn: [] if eqn.primitive.name.startswith("debug") else None  # noqa: E731
    new = map_equations(jax.make_jaxpr(jax.jit(f))(x), drop)
    assert not new.effects and not new.eqns[0].effects
