"""`sow`, `variable` and `nest` change nothing where nobody looks for what is sown."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxprtool import nest, sow, variable

X = jnp.arange(1.0, 5.0)
MODES = ("strict", "append", "clobber")


def plain(x):
    return {"y": jnp.sin(x) * 2, "z": (x, None)}


def sown(x):
    """`plain`, with values of several structures sown."""
    y = variable(jnp.sin(x), name="y")
    out = sow({"y": y * 2, "z": (x, None)}, tag="seen", name="out", mode="append", key=x)
    return nest(lambda out: sow(out, tag="seen", name=None, mode="clobber"), scope="s")(out)


def on_devices(f):
    mesh = jax.sharding.Mesh(jax.devices()[:4], "i")
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x)["y"].sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (2 * x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](f(x)),
    "hessian": lambda f: jax.hessian(lambda x: f(x)["y"].sum()),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap": jax.vmap,
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x)["y"])),
    "vmap, last axis": lambda f: lambda x: jax.vmap(f, 1, 1)(x.reshape(2, 2)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c + 1, f(x)), 0, x),
    "while": lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x)["y"], x),
    "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, plain, x),
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x)["y"].sum()),
    "shard_map": on_devices,
    "jit of grad of shard_map": lambda f: jax.jit(jax.grad(lambda x: on_devices(f)(x)["y"].sum())),
    "pmap": lambda f: lambda x: jax.pmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_sowing_is_the_identity_under(name):
    transformation = TRANSFORMATIONS[name]
    expected, actual = transformation(plain)(X), transformation(sown)(X)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_sowing_costs_nothing_compiled():
    def f(x):
        return jnp.sin(variable(jnp.cos(x), name="c"))

    text = jax.jit(f).lower(X).compile().as_text()
    without = jax.jit(lambda x: jnp.sin(jnp.cos(x))).lower(X).compile().as_text()
    assert text.count(" = ") == without.count(" = ")


@pytest.mark.parametrize("mode", MODES)
def test_a_sown_value_keeps_its_type_and_weakness(mode):
    closed = jax.make_jaxpr(lambda x, k: sow((x, k), tag="t", name="n", mode=mode))(
        2.0, jax.random.key(0)
    )
    (eqn,) = closed.eqns
    assert [v.aval for v in eqn.outvars] == [v.aval for v in eqn.invars]
    assert eqn.outvars[0].aval.weak_type


def test_a_key_is_an_operand_and_no_result():
    closed = jax.make_jaxpr(lambda x, k: sow(x, tag="t", name="n", key=k))(X, (1.0, 2.0))
    (eqn,) = closed.eqns
    assert (len(eqn.invars), len(eqn.outvars)) == (3, 1)


def test_a_mapped_value_is_sown_with_its_axis_first():
    f = jax.vmap(lambda x, y: sow((x, y), tag="t", name="n"), in_axes=(1, None))
    closed = jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones(4))
    (eqn,) = (e for e in closed.eqns if e.primitive.name == "sow")
    assert [v.aval.shape for v in eqn.invars] == [(3, 2), (4,)]


def test_the_tangent_of_a_sown_value_is_not_sown():
    f = jax.make_jaxpr(lambda x: jax.jvp(lambda x: variable(x, name="v"), (x,), (x,)))
    assert [e.primitive.name for e in f(X).eqns].count("sow") == 1


def test_nest_gives_its_function_what_it_was_given():
    def f(x, how, *, flags=()):
        assert how == "twice" and flags == ({"a": None},)
        return x * 2

    for run in (lambda f: f, jax.jit):
        result = run(lambda x: nest(f, scope="s")(x, "twice", flags=({"a": None},)))(X)
        np.testing.assert_array_equal(result, 2 * X)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"tag": None, "name": "n"}, ValueError),
        ({"tag": "t", "name": "n", "mode": "often"}, ValueError),
        ({"tag": 3, "name": "n"}, TypeError),
        ({"tag": "t", "name": 3}, TypeError),
    ],
)
def test_what_is_no_tag_name_or_mode_is_refused(options, error):
    with pytest.raises(error):
        sow(X, **options)


def test_a_scope_is_a_string():
    with pytest.raises(TypeError, match="scope"):
        nest(plain, scope=None)
