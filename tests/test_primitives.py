"""`sow`, `variable` and `nest` are identities unless a pass uses the sown values."""

from __future__ import annotations

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxprtool import nest, sow, variable
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.primitives import scope_of

X = jnp.arange(1.0, 5.0)
MODES = ("strict", "append", "clobber")


def plain(x):
    return {"y": jnp.sin(x) * 2, "z": (x, None)}


def sown(x):
    """Return `plain`, with values of several structures sown."""
    y = variable(jnp.sin(x), name="y")
    out = sow({"y": y * 2, "z": (x, None)}, tag="seen", name="out", mode="append", key=x)
    return nest(lambda out: sow(out, tag="seen", name=None, mode="clobber"), scope="s")(out)


def on_devices(f):
    mesh = jax.sharding.Mesh(jax.devices()[:4], "i")
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def with_jvp(f):
    g = jax.custom_jvp(lambda x: f(x)["y"])
    g.defjvp(lambda x, t: (g(*x), f(x[0])["y"] * t[0]))
    return jax.grad(lambda x: g(x).sum())


def with_vjp(f):
    g = jax.custom_vjp(lambda x: f(x)["y"])
    g.defvjp(lambda x: (f(x)["y"], f(x)), lambda residuals, t: (f(residuals["y"] * t)["y"],))
    return jax.grad(lambda x: g(x).sum())


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
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
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


def test_sowing_has_no_cost_when_compiled():
    def f(x):
        return jnp.sin(variable(jnp.cos(x), name="c"))

    text = jax.jit(f).lower(X).compile().as_text()
    without = jax.jit(lambda x: jnp.sin(jnp.cos(x))).lower(X).compile().as_text()
    assert text.count(" = ") == without.count(" = ")


VALUES = {
    "a key": jax.random.key(3),
    "old key data": jax.random.PRNGKey(3),
    "float0": np.zeros(3, jax.dtypes.float0),
    "a partial function": jax.tree_util.Partial(jnp.add, X),
    "bfloat16": X.astype("bfloat16"),
    "None": None,
    "nothing": (),
    "a tree": OrderedDict(b=[X, None], a=(1, 2.0, {})),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_of_any_kind_can_be_sown(value):
    def f(value):
        return nest(variable, scope="s")(value, name="v")

    for result in (f(value), jax.jit(f)(value)):
        assert jax.tree.structure(result) == jax.tree.structure(value)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(value), strict=True):
            assert jnp.result_type(a) == jnp.result_type(b)
            if jnp.result_type(a) != jax.dtypes.float0:
                assert jnp.array_equal(a, b)


def test_integers_and_keys_have_no_gradient_when_sown():
    def f(x, n, key):
        x, n, key = sow((x, n, key), tag="t", name="n")
        return (x * n).sum() + jax.random.normal(key)

    arguments = X, jnp.arange(4), jax.random.key(0)
    np.testing.assert_array_equal(jax.grad(f)(*arguments), jnp.arange(4.0))
    tangents = jax.grad(f, argnums=1, allow_int=True)(*arguments)
    assert tangents.dtype == jax.dtypes.float0


def test_sown_values_in_a_linear_function_are_transposed():
    def linear(t):
        return sow({"t": t, "x": X}, tag="t", name="n", key=jax.random.key(0))["t"] * 3

    np.testing.assert_array_equal(jax.linear_transpose(linear, X)(X)[0], 3 * X)
    as_key = jax.linear_transpose(lambda t: sow(2 * t, tag="t", name="n", key=t), 1.0)
    assert as_key(3.0) == (6.0,)

    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (f(*x), linear(t[0])))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), jnp.full(4, 3.0))


def test_an_eager_sown_value_is_the_same_object():
    array, text = np.ones(3), "a text"
    assert variable(array, name="v") is array
    assert nest(sow, scope="s")(text, tag="t", name="v") is text


def test_a_constant_is_sown_where_a_jaxpr_is_made():
    (eqn,) = jax.make_jaxpr(lambda: variable(np.ones(3), name="v"))().eqns
    assert eqn.primitive.name == "sow"


@pytest.mark.parametrize("mode", MODES)
def test_a_sown_value_keeps_its_type_and_weak_type(mode):
    closed = jax.make_jaxpr(lambda x, k: sow((x, k), tag="t", name="n", mode=mode))(
        2.0, jax.random.key(0)
    )
    (eqn,) = closed.eqns
    assert [v.aval for v in eqn.outvars] == [v.aval for v in eqn.invars]
    assert eqn.outvars[0].aval.weak_type


def test_a_key_is_an_operand_but_not_a_result():
    closed = jax.make_jaxpr(lambda x, k: sow(x, tag="t", name="n", key=k))(X, (1.0, 2.0))
    (eqn,) = closed.eqns
    assert (len(eqn.invars), len(eqn.outvars)) == (3, 1)


def test_a_batched_value_is_sown_with_its_batch_axis_first():
    f = jax.vmap(lambda x, y: sow((x, y), tag="t", name="n"), in_axes=(1, None))
    closed = jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones(4))
    (eqn,) = (e for e in closed.eqns if e.primitive.name == "sow")
    assert [v.aval.shape for v in eqn.invars] == [(3, 2), (4,)]


def test_the_tangent_of_a_sown_value_is_not_sown():
    f = jax.make_jaxpr(lambda x: jax.jvp(lambda x: variable(x, name="v"), (x,), (x,)))
    assert [e.primitive.name for e in f(X).eqns].count("sow") == 1


def test_nest_passes_its_arguments_to_its_function():
    def f(x, how, *, flags=()):
        assert how == "twice" and flags == ({"a": None},)
        return x * 2

    for run in (lambda f: f, jax.jit):
        result = run(lambda x: nest(f, scope="s")(x, "twice", flags=({"a": None},)))(X)
        np.testing.assert_array_equal(result, 2 * X)


def test_concrete_values_can_control_a_nested_function_and_later_code():
    def layer(x, count, act, *, scale=None):
        for _ in range(count):
            x = act(x)
        return {"x": x, "count": count + 1, "act": act, "scale": scale}

    def f(x):
        first = nest(layer, scope="a")(x, 2, jnp.sin, scale=np.float32(2))
        assert first["count"] == 3 and first["act"] is jnp.sin
        assert isinstance(first["scale"], np.float32)
        return nest(layer, scope="b")(first["x"], first["count"], act=first["act"])["x"]

    assert str(jax.make_jaxpr(f)(X)).count("sin") == 5
    np.testing.assert_allclose(jax.jit(f)(X), f(X), rtol=1e-6)


def test_nest_closes_over_traced_values():
    def f(x):
        return nest(lambda: variable(x, name="v") * 2, scope="s")()

    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), jnp.full(4, 2.0))


def test_nest_leaks_no_tracers():
    def f(x):
        return nest(lambda x: (variable(jnp.sin(x), name="v"), 3), scope="s")(x)[0]

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(f)(X), jnp.sin(X))
        jax.grad(lambda x: jax.jit(f)(x).sum())(X)


def scopes(closed):
    """Return the scopes of a jaxpr, as `outer/inner`, in order."""
    found = []
    for eqn in closed.eqns:
        scope = scope_of(eqn)
        inner = [s for _, body in sub_jaxprs(eqn) for s in scopes(body)]
        found += [scope] if scope else []
        found += [f"{scope}/{s}" if scope else s for s in inner]
    return found


def block(x):
    return nest(lambda x: variable(jnp.sin(x), name="v"), scope="inner")(x)


def both_blocks(x):
    return nest(block, scope="a")(x) + nest(block, scope="b")(x)


def twice(f, scope):
    nested = nest(f, scope=scope)
    return lambda x: nested(nested(x))


NESTED = {
    "within one another": (both_blocks, ["a", "a/inner", "b", "b/inner"]),
    "named in words": (lambda x: nest(block, scope="a b at c")(x), ["a b at c", "a b at c/inner"]),
    "closing over values": (lambda x: nest(lambda: block(x), scope="a")(), ["a", "a/inner"]),
    "shared": (twice(block, "a"), ["a", "a/inner"] * 2),
    "in a jit": (jax.jit(both_blocks), ["a", "a/inner", "b", "b/inner"]),
    "under vmap": (jax.vmap(block), ["inner"]),
    "under jvp": (lambda x: jax.jvp(block, (x,), (x,)), ["inner"]),
    "under grad": (jax.grad(lambda x: block(x).sum()), ["inner", "inner"]),
    "under remat": (jax.checkpoint(block), ["inner"]),
    "in a loop": (lambda x: jax.lax.scan(lambda c, _: (block(c), None), x, None, 3), ["inner"]),
    "in shard_map": (on_devices(block), ["inner"]),
}


@pytest.mark.parametrize("f, expected", NESTED.values(), ids=NESTED)
def test_scopes_are_calls_of_their_name(f, expected):
    assert scopes(jax.make_jaxpr(f)(X)) == expected


def test_a_nested_call_has_the_argument_names_of_its_function():
    def layer(params, x):
        return params["w"] * x

    closed = jax.make_jaxpr(lambda x: nest(layer, scope="s")({"w": x}, x))(X)
    ((_, body),) = sub_jaxprs(closed.eqns[0])
    assert body.debug_info.arg_names == ("params['w']", "x")


@pytest.mark.parametrize(
    "options, error",
    [
        ({"tag": None, "name": "n"}, ValueError),
        ({"tag": "t", "name": "n", "mode": "often"}, ValueError),
        ({"tag": 3, "name": "n"}, TypeError),
        ({"tag": "t", "name": 3}, TypeError),
    ],
)
def test_an_invalid_tag_name_or_mode_is_refused(options, error):
    with pytest.raises(error):
        sow(X, **options)


def test_a_scope_is_a_string():
    with pytest.raises(TypeError, match="scope"):
        nest(plain, scope=None)
