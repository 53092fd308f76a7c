"""JAX's transformations of harvested functions, and harvesting of transformed functions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprtool_harvest import call_and_reap, harvest, plant, reap

import jaxprtool
from jaxprtool import nest, sow
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.jaxcompat import open_jaxpr, replace_jaxpr

value = partial(sow, tag="t")
reap_t, plant_t, harvest_t = (partial(f, tag="t") for f in (reap, plant, harvest))
call_and_reap_t = partial(call_and_reap, tag="t")


def square(x):
    y = value(x * 2.0, name="y")
    return y**2.0


def test_grad_of_what_is_reaped_and_of_what_is_planted():
    (_, reaps), (tangent, of_reaps) = jax.jvp(call_and_reap_t(square), (3.0,), (1.0,))
    assert (reaps, tangent, of_reaps) == ({"y": 6.0}, 24.0, {"y": 2.0})
    assert jax.grad(lambda x: reap_t(square)(x)["y"])(3.0) == 2.0
    assert jax.grad(plant_t(square), argnums=(0, 1))({"y": 3.0}, 2.0) == ({"y": 6.0}, 0.0)
    assert jax.grad(plant_t(square))({"y": 3.0, "z": 1.0}, 2.0) == {"y": 6.0, "z": 0.0}


@pytest.mark.parametrize("planted", [2.0, np.float32(2)])
@pytest.mark.parametrize("name", ["plain", "inside", "either", "all"])
def test_results_and_gradients_of_what_is_planted_keep_their_types(name, planted):
    def fun(x, row):
        plain = value(jnp.sin(x), name="plain")
        inside = jax.jit(lambda x: value(x + 1, name="inside") * 2)(x)
        branches = [partial(lambda n, x: value(x * n, name="either"), n) for n in (2, 3)]
        each = jax.lax.scan(lambda c, _: (value(c * 2, name="all", mode="append"),) * 2, x, row)
        return plain, inside, jax.lax.cond(row[0] > 0, *branches, x), each, row * plain

    plants = {name: planted * np.ones(3, np.float32) if name == "all" else planted}
    row = np.ones(3, np.float32)
    found = plant_t(fun)(plants, 0.5, row)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, jax.jit(fun)(0.5, row))
    gradient = jax.grad(lambda *args: sum(map(jnp.sum, jax.tree.leaves(plant_t(fun)(*args)))))
    assert jax.typeof(gradient(plants, 0.5, row)[name]) == jax.typeof(plants[name])


def test_what_is_sown_in_a_function_is_reaped_from_its_gradient():
    assert harvest_t(jax.grad(square))({}, 3.0) == (24.0, {"y": 6.0})
    assert plant_t(jax.grad(square))({"y": 1.0}, 3.0) == 4.0
    assert reap_t(jax.value_and_grad(jax.jit(square)))(3.0) == {"y": 6.0}


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: jax.checkpoint(jax.checkpoint(f))])
def test_what_a_gradient_computes_anew_is_the_same_value(wrap):
    f = wrap(square)
    assert jax.grad(plant_t(f))({"y": 3.0}, 2.0) == {"y": 6.0}
    assert call_and_reap_t(jax.grad(f))(3.0) == (24.0, {"y": 6.0})
    # dy/dx is 2 whatever y is, and d(y**2)/dy is 2 y: of the planted y, here and there.
    assert harvest_t(jax.value_and_grad(f))({"y": 5.0}, 3.0) == ((25.0, 20.0), {})


def test_what_a_gradient_computes_anew_in_a_scan_is_the_same_value():
    @jax.checkpoint
    def step(x, a):
        return value(a * x, name="y", mode="append") ** 2.0, None

    def f(x):
        return jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0]

    plants = {"y": jnp.array([0.5, 0.25, 2.0])}
    reaps = reap_t(jax.grad(f))(1.5)
    np.testing.assert_allclose(reaps["y"], reap_t(f)(1.5)["y"])
    expected = np.prod(2 * plants["y"] * jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(plant_t(jax.grad(f))(plants, 1.5), expected)


def with_remat_differentiated(fun):
    """The program of `fun`, a call and then a remat, as if JAX had differentiated the remat."""
    program = jaxprtool.trace(fun, 1.0)
    first, again = program.jaxpr.eqns
    again = again.replace(params={**again.params, "differentiated": True})
    return program.replace(jaxpr=replace_jaxpr(program.jaxpr, eqns=[first, again]))


def test_a_body_that_is_also_computed_anew_is_reaped_where_it_is_computed_first():
    g = jax.jit(lambda x: value(2 * x, name="x"))
    program = with_remat_differentiated(lambda x: jax.checkpoint(g)(g(x)))
    first, again = program.jaxpr.eqns
    (inner,) = again.params["jaxpr"].eqns
    assert open_jaxpr(first.params["jaxpr"]) is open_jaxpr(inner.params["jaxpr"])
    assert call_and_reap_t(program)(1.0) == (4.0, {"x": 2.0})
    assert plant_t(program)({"x": 3.0}, 1.0) == 3.0


def test_a_name_that_is_sown_elsewhere_too_is_not_what_is_computed_anew():
    def f(x):
        return value(2 * x, name="x", mode="append")

    def g(x):
        return value(3 * x, name="x", mode="append")

    program = with_remat_differentiated(lambda x: jax.checkpoint(g)(jax.jit(f)(x)))
    with pytest.raises(UnsupportedError, match="cannot be told from the first one"):
        reap_t(program)(1.0)
    with pytest.raises(UnsupportedError, match="occurrences cannot be told apart"):
        plant_t(program)({"x": 3.0}, 1.0)


@pytest.mark.parametrize("second", [lambda x: x, jnp.sin])
def test_two_appended_values_that_a_gradient_computes_anew_cannot_be_told_apart(second):
    def sown(x):
        return value(x, name="y", mode="append")

    @jax.checkpoint
    def f(x):
        return second(sown(2 * x)) + second(sown(x) ** 2)

    assert reap_t(jax.grad(f))(3.0) == {"y": [6.0, 3.0]}
    with pytest.raises(JaxprToolError, match="'y' is planted more than once and recomputed"):
        plant_t(jax.grad(f))({"y": [1.0, 2.0]}, 3.0)


@pytest.mark.parametrize("p", [True, False])
def test_a_branch_that_is_computed_anew_may_have_lost_what_it_sows(p):
    @jax.checkpoint
    def f(p, x):
        def squared(x):
            return value(2 * x, name="y") ** 2

        return jax.lax.cond(p, squared, lambda x: 5 * value(3 * x, name="y"), x)

    gradient = jax.grad(f, argnums=1)
    assert call_and_reap_t(gradient)(p, 3.0) == ((24.0, {"y": 6.0}) if p else (15.0, {"y": 9.0}))
    assert plant_t(gradient)({"y": 1.0}, p, 3.0) == (4.0 if p else 15.0)


def test_what_may_or_may_not_be_computed_anew_is_refused():
    step = jax.checkpoint(lambda c, x: (value(c * x, name="y", mode="append") ** 2, None))

    @jax.checkpoint
    def f(x):
        return jax.lax.scan(step, x, jnp.arange(1.0, 4.0))[0]

    reaps = reap_t(f)(1.0)
    with pytest.raises(UnsupportedError, match="'y' is sown in the gradient of a `remat`") as e:
        reap_t(jax.grad(f))(1.0)
    assert "has_aux" in e.value.hint
    with pytest.raises(UnsupportedError, match="'y' is planted more than once and recomputed"):
        plant_t(jax.grad(f))(reaps, 1.0)
    gradient, inside = jax.grad(call_and_reap_t(f), has_aux=True)(1.0)
    assert gradient == jax.grad(f)(1.0) and (inside["y"] == reaps["y"]).all()


def test_vmap_of_what_is_reaped_and_planted():
    x = jnp.arange(3.0)
    y, reaps = jax.vmap(call_and_reap_t(square))(x)
    assert reaps["y"].tolist() == (2 * x).tolist() and y.tolist() == (4 * x**2).tolist()
    assert jax.vmap(plant_t(square))({"y": x}, x).tolist() == (x**2).tolist()
    assert jax.vmap(plant_t(square), in_axes=(None, 0))({"y": 2.0}, x).tolist() == [4.0] * 3


def test_what_is_sown_under_vmap_has_the_mapped_axis_first():
    x = jnp.arange(6.0).reshape(2, 3)
    f = jax.vmap(lambda x: value(2 * x, name="y") + value(1.0, name="z"), in_axes=1, out_axes=1)
    reaps = reap_t(f)(x)
    assert reaps["y"].tolist() == (2 * x.T).tolist() and reaps["z"] == 1.0
    assert plant_t(f)({"y": x.T}, x).tolist() == (x + 1).tolist()


def test_scopes_are_found_under_transformations():
    f = nest(lambda x: jnp.sin(value(2 * x, name="y")), scope="s")
    x = jnp.arange(3.0)
    assert reap_t(jax.grad(f))(1.0) == {"s": {"y": 2.0}}
    assert reap_t(jax.jit(jax.vmap(jax.value_and_grad(f))))(x)["s"]["y"].tolist() == [0, 2, 4]


def test_named_axes_are_those_around_the_harvested_function():
    f = call_and_reap_t(lambda x: value(jax.lax.psum(x, "i"), name="sum") - x)
    y, reaps = jax.vmap(f, axis_name="i")(jnp.arange(3.0))
    assert y.tolist() == [3, 2, 1] and reaps["sum"].tolist() == [3, 3, 3]


def test_jit_of_harvested_functions():
    assert jax.jit(harvest_t(square))({}, 3.0) == (36.0, {"y": 6.0})
    assert jax.jit(harvest_t(square))({"y": 1.0}, 3.0) == (1.0, {})


def test_the_functions_are_traced_by_jaxprtool():
    program = jaxprtool.trace(plant_t(square), {"y": 1.0}, 2.0)
    assert program({"y": 3.0}, 2.0) == 9.0
