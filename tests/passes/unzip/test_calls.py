"""Variables inside calls: jit, remat, devices, plug-in rules, and JAX's transformations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jaxprtool import jaxcompat, nest, sow, trace, unzip, variable
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.passes.unzip import UnzipError, unzip_rules
from tests.programs.init_apply import unzips

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


def eqns_of(program, primitive=None):
    """Return the equations of a program at every depth, of one primitive if given."""
    found = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [e for e in found if primitive is None or e.primitive.name == primitive]


def call_names(program) -> list[str]:
    """Return the names of the jit calls among the program's own equations."""
    return [e.params["name"] for e in program.jaxpr.eqns if e.primitive.name == "jit"]


def all_names(program) -> set[str]:
    return {e.params["name"] for e in eqns_of(program, "jit")}


def layer(key, x):
    w = variable(jax.random.normal(key, (3, 3)), name="w")
    return jnp.tanh(x @ w)


def assert_trees_close(actual, expected) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


# --- jit ----------------------------------------------------------------------------------------


def test_a_call_with_variables_becomes_a_call_in_each_program():
    init, apply = unzips(lambda key, x: jax.jit(layer)(key, x), KEY, X, count=1)
    assert call_names(init) == ["layer_init"]
    assert call_names(apply) == ["layer_apply"]


@pytest.mark.proof
def test_calls_within_calls_are_all_named():
    @jax.jit
    def outer(key, x):
        return jax.jit(layer)(key, x) * 2

    init, apply = unzips(lambda key, x: outer(key, x), KEY, X, count=1)
    assert {"outer_init", "layer_init"} <= all_names(init)
    assert {"outer_apply", "layer_apply"} <= all_names(apply)


@pytest.mark.proof
def test_a_call_without_variables_stays_one_call():
    @jax.jit
    def early(key):
        return jax.random.normal(key, (3,)) * 2

    @jax.jit
    def late(w, x):
        return jnp.sin(w) * x

    def f(key, x):
        return late(variable(early(key), name="w"), x)

    init, apply = unzips(f, KEY, X, count=1)
    assert call_names(init) == ["early"] and call_names(apply) == ["late"]
    bodies = [
        [e.params["jaxpr"] for e in p.jaxpr.eqns if e.primitive.name == "jit"]
        for p in (init, apply)
    ]
    original = [e.params["jaxpr"] for e in trace(f, KEY, X).jaxpr.eqns if e.primitive.name == "jit"]
    assert bodies[0][0] is original[0] and bodies[1][0] is original[1]


@pytest.mark.proof
def test_a_call_that_each_program_needs_in_part_is_one_call_in_each():
    @jax.jit
    def pair(key, x):
        return jax.random.uniform(key, (3,)), jnp.sin(x)

    def f(key, x):
        w, y = pair(key, x)
        return variable(w, name="w") * y

    init, apply = unzips(f, KEY, X, count=1)
    assert call_names(init) == call_names(apply) == ["pair"]
    assert not eqns_of(init, "sin") and not eqns_of(apply, "random_bits")


def test_a_function_called_twice_under_two_scopes():
    shared = jax.jit(layer)

    def f(key, x):
        keys = jax.random.split(key)
        x = nest(shared, scope="first")(keys[0], x)
        return nest(shared, scope="second")(keys[1], x)

    init, apply = unzips(f, KEY, X, count=2)
    assert jax.tree.map(jnp.shape, init(KEY)) == {"first": {"w": (3, 3)}, "second": {"w": (3, 3)}}
    bodies = [e.params["jaxpr"] for e in eqns_of(apply, "jit") if e.params["name"] == "layer_apply"]
    assert len({id(body) for body in bodies}) == 1


def test_a_shared_body_stays_shared_in_both_programs():
    shared = jax.jit(layer)

    def f(key, x):
        for i, k in enumerate(jax.random.split(key, 5)):
            x = nest(shared, scope=f"layer{i}")(k, x)
        return x

    init, apply = unzip(f)(KEY, X)
    for program, name in (init, "layer_init"), (apply, "layer_apply"):
        calls = [e for e in eqns_of(program, "jit") if e.params["name"] == name]
        assert len({id(jaxcompat.open_jaxpr(e.params["jaxpr"])) for e in calls}) == 1


def test_a_function_called_twice_with_one_name_is_refused():
    shared = jax.jit(layer)
    with pytest.raises(UnzipError, match="Cannot use duplicate variable name: w"):
        unzip(lambda key, x: shared(key, shared(key, x)))(KEY, X)


def test_a_shared_function_with_late_arguments_in_one_call():
    shared = jax.jit(lambda k, x: sow(k, tag="variable", name="v") * x)

    def f(key, x):
        return shared(key, x) + shared(x, x)

    _, apply = unzips(f, X + 2, X, count=1)
    assert len(eqns_of(apply, "sow")) == 1


@pytest.mark.proof
def test_a_call_that_closes_over_traced_values():
    def f(key, x):
        scale = jax.random.uniform(key)
        shift = jnp.cos(x)

        @jax.jit
        def inner(y):
            return variable(scale * 2, name="s") * y + shift

        return inner(jnp.sin(x))

    _, apply = unzips(f, KEY, X, count=1)
    assert call_names(apply) == ["inner_apply"]


@pytest.mark.proof
def test_a_call_that_closes_over_an_array():
    table = jnp.arange(3.0)

    @jax.jit
    def inner(key, x):
        return variable(jax.random.uniform(key) * table, name="w") * x + table

    unzips(lambda key, x: inner(key, x), KEY, X, count=1)


@pytest.mark.proof
def test_a_call_that_closes_over_an_outer_variable():
    def f(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")

        @jax.jit
        def inner(x):
            return x * w + variable(w * 2, name="b")

        return inner(x)

    init, _ = unzips(f, KEY, X, count=2)
    variables = init(KEY)
    np.testing.assert_allclose(variables["b"], 2 * variables["w"])


@pytest.mark.proof
def test_donation_and_unused_arguments_are_kept():
    @functools.partial(jax.jit, donate_argnums=(1,), keep_unused=True)
    def inner(key, x, unused):
        return variable(jax.random.normal(key, (3,)), name="w") * x

    def f(key, x, y):
        return inner(key, x * 2, y)

    init, apply = unzip(f)(KEY, X, X)
    (before,) = (e for e in trace(f, KEY, X, X).jaxpr.eqns if e.primitive.name == "jit")
    for program in init, apply:
        (call,) = (e for e in program.jaxpr.eqns if e.primitive.name == "jit")
        for name in "inline", "keep_unused", "compiler_options_kvs":
            assert call.params[name] == before.params[name]
        assert len(call.params["donated_invars"]) == len(call.invars)
    donated = dict(zip(call.invars, call.params["donated_invars"], strict=True))
    assert [v.aval.shape for v, flag in donated.items() if flag] == [(3,)]
    (product,) = (e for e in apply.jaxpr.eqns if e.primitive.name == "mul")
    assert donated[product.outvars[0]]
    np.testing.assert_allclose(apply(init(KEY), X, X), f(KEY, X, X), rtol=1e-6)


def test_shardings_of_operands_and_results_are_kept():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "i")
    split, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("i"), P()))

    @functools.partial(jax.jit, in_shardings=(whole, split), out_shardings=split)
    def inner(key, x):
        return variable(jax.random.normal(key, (4,)), name="w") * x

    x = jnp.arange(4.0)
    init, apply = unzip(lambda key, x: inner(key, x))(KEY, x)
    (call,) = (e for e in apply.jaxpr.eqns if e.primitive.name == "jit")
    sharded = dict(zip(call.invars, call.params["in_shardings"], strict=True))
    assert sharded[apply.jaxpr.invars[-1]] == split and call.params["out_shardings"] == (split,)
    assert apply(init(KEY), x).sharding.spec == P("i")


@pytest.mark.proof
def test_a_static_argument_of_an_inner_call():
    @functools.partial(jax.jit, static_argnums=2)
    def inner(key, x, name):
        return variable(jax.random.normal(key, (3,)), name=name) * x

    init, _ = unzips(lambda k, x: inner(k, inner(k, x, "a"), "b"), KEY, X, count=2)
    assert list(init(KEY)) == ["a", "b"]


def test_an_early_result_of_a_call_that_apply_needs_is_refused():
    @jax.jit
    def inner(key, x):
        return layer(key, x), jax.random.uniform(key)

    path = r"key -> _uniform at .*test_calls.py:\d+ -> result\[1\]"
    with pytest.raises(UnzipError, match="do not cut dependence graph. " + path):
        unzip(lambda key, x: inner(key, x))(KEY, X)


# --- nest ---------------------------------------------------------------------------------------


def test_scopes_without_sown_values_are_removed():
    init, apply = unzip(nest(layer, scope="s"))(KEY, X)
    assert call_names(init) == ["s_init"] and call_names(apply) == ["s_apply"]


def test_a_scope_with_sown_values_is_kept():
    def inner(key, x):
        return sow(layer(key, x), tag="seen", name="y")

    _, apply = unzip(nest(inner, scope="s"))(KEY, X)
    assert call_names(apply) == ["nest:s"]


# --- closed_call and remat ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ],
)
def test_remat_with_its_policy_in_both_programs(policy):
    inner = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    _, apply = unzips(lambda key, x: inner(key, x), KEY, X, count=1)
    (remat,) = eqns_of(apply, "remat2") or eqns_of(apply, "checkpoint")
    assert remat.params["policy"] is policy and remat.params["prevent_cse"] is False


@pytest.mark.proof
def test_remat_of_a_scan_of_remat():
    @jax.checkpoint
    def body(x, key):
        return layer(key, x), None

    @jax.checkpoint
    def f(key, x):
        return lax.scan(body, x, jax.random.split(key, 3))[0]

    init, _ = unzips(f, KEY, X, count=1)
    assert init(KEY)["w"].shape == (3, 3, 3)


# --- devices ------------------------------------------------------------------------------------


def on_devices(f, count, in_specs, out_specs, **options):
    mesh = jax.sharding.Mesh(jax.devices()[:count], "i")
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def assert_unzips(f, key, x, other):
    """Check that apply of init's variables is `f`, also with variables of another key."""
    init, apply = unzip(f)(key, x)
    assert_trees_close(jax.jit(apply)(jax.jit(init)(key), x), f(key, x))
    assert_trees_close(apply(init(other), x), f(other, x))
    return init, apply


@pytest.mark.proof
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_a_variable_that_all_shards_share(check_vma):
    f = on_devices(layer, 4, (P(), P("i")), P("i"), check_vma=check_vma)
    x = jnp.arange(12.0).reshape(4, 3)
    init, _ = assert_unzips(f, KEY, x, jax.random.key(1))
    if check_vma:
        np.testing.assert_array_equal(init(KEY)["w"], jax.random.normal(KEY, (3, 3)))


@pytest.mark.proof
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_a_variable_of_each_shard_stacks_them(check_vma):
    def inner(keys, x):
        return layer(keys[0], x)

    f = on_devices(inner, 4, (P("i"), P("i")), P("i"), check_vma=check_vma)
    x = jnp.arange(12.0).reshape(4, 3)
    keys = jax.random.split(KEY, 4)
    init, apply = assert_unzips(f, keys, x, keys[::-1])
    w = init(keys)["w"]
    np.testing.assert_array_equal(w, jax.vmap(lambda k: jax.random.normal(k, (3, 3)))(keys))
    out = apply({"w": w.at[1].set(0)}, x)
    assert not out[1].any() and out[2].any()


@pytest.mark.proof
def test_shard_map_with_axis_index_collectives_and_gradients():
    def inner(key, x):
        w = variable(
            jax.random.normal(jax.random.fold_in(key, lax.axis_index("i")), (3,)), name="w"
        )
        b = variable(jnp.ones(3), name="b")
        return lax.psum(x * w, "i") + b

    f = on_devices(inner, 4, (P(), P("i")), P(), check_vma=True)
    x = jnp.arange(12.0).reshape(4, 3)
    init, apply = assert_unzips(f, KEY, x, jax.random.key(1))
    variables = init(KEY)
    assert {k: v.shape for k, v in variables.items()} == {"w": (4, 3), "b": (3,)}
    found = jax.grad(lambda v: apply(v, x).sum())(variables)
    assert_trees_close(found, {"w": x, "b": jnp.ones(3)})


@pytest.mark.proof
def test_shard_map_over_two_axes():
    def inner(key, x):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        both = variable(jax.random.uniform(jax.random.fold_in(key, 2 * i + j)), name="both")
        one = variable(jax.random.uniform(jax.random.fold_in(key, j)), name="one")
        return x * both + one

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("i", "j"))
    f = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("i", "j")), out_specs=P("i", "j"))
    init, _ = assert_unzips(f, KEY, jnp.arange(8.0).reshape(4, 2), jax.random.key(1))
    assert jax.tree.map(jnp.shape, init(KEY)) == {"both": (8,), "one": (2,)}


@pytest.mark.proof
def test_a_scan_inside_shard_map():
    def inner(keys, x):
        layers = jax.random.split(keys[0], 2)
        return lax.scan(lambda x, k: (layer(k, x), None), x, layers)[0]

    f = on_devices(inner, 2, (P("i"), P("i")), P("i"))
    keys = jax.random.split(KEY, 2)
    init, _ = assert_unzips(f, keys, jnp.arange(6.0).reshape(2, 3), keys[::-1])
    assert init(keys)["w"].shape == (2, 2, 3, 3)


def test_pmap_keeps_the_mapped_axis():
    f = jax.pmap(lambda key, x: layer(key, x))
    keys, x = jax.random.split(KEY, 4), jnp.arange(12.0).reshape(4, 3)
    init, _ = assert_unzips(f, keys, x, keys[::-1])
    w = init(keys)["w"]
    expected = jax.vmap(lambda k: jax.random.normal(k, (3, 3)))(keys)
    np.testing.assert_array_equal(w.reshape(expected.shape), expected)
    assert w.shape[0] == 4


def test_pmap_of_a_variable_that_is_its_argument():
    f = jax.pmap(lambda x: variable(x, name="x"))
    init, apply = unzip(f)(jnp.ones(2))
    np.testing.assert_array_equal(init(jnp.ones(2))["x"], jnp.ones(2))
    np.testing.assert_array_equal(apply({"x": jnp.array([3.0, 4.0])}), [3.0, 4.0])


# --- other primitives with jaxprs, and rules for them ---------------------------------------------


def test_variables_inside_a_primitive_without_a_rule_are_refused_with_a_hint():
    def f(key, x):
        w = jax.random.uniform(key, (3,)) + 1

        def matvec(v):
            return v * sow(w, tag="variable", name="w")

        return lax.custom_linear_solve(matvec, x, lambda matvec, b: b / w, symmetric=True)

    with pytest.raises(UnsupportedError, match=r"custom_linear_solve at .*test_calls.py") as caught:
        unzip(f)(KEY, X)
    assert 'rule("unzip", "custom_linear_solve")' in caught.value.hint


doubled_p = Primitive("doubled")
doubled_p.def_impl(lambda x: 2 * x)
doubled_p.def_abstract_eval(lambda x: x)


def test_a_rule_for_a_user_defined_primitive(monkeypatch):
    def rule(eqn, known, context):
        """Evaluate early only what the call computes for a key."""
        asked.append((eqn.primitive.name, list(known)))
        return original(eqn, known, context)

    from jaxprtool.passes.unzip.split import whole as original

    asked = []
    monkeypatch.setitem(unzip_rules, "doubled", rule)

    def f(key, x):
        return variable(doubled_p.bind(key), name="w") * doubled_p.bind(x)

    init, apply = unzip(f)(X, X)
    assert_trees_close((init(X), apply(init(X), X)), ({"w": 2 * X}, 4 * X * X))
    assert [name for name, _ in asked] == ["doubled"] * 2
    assert asked[0][1] != asked[1][1]


# --- transformations ----------------------------------------------------------------------------


def test_unzip_inside_jit_inside_unzip():
    def f(key, x):
        @jax.jit
        def inner(key, x):
            init, apply = unzip(layer)(key, x)
            return apply(variable(init(key), name="inner"), x)

        return inner(key, x)

    init, _ = unzips(f, KEY, X, count=1)
    assert jax.tree.map(jnp.shape, init(KEY)) == {"inner": {"w": (3, 3)}}


def test_unzip_of_a_gradient():
    def f(key, x):
        return jax.grad(lambda x: layer(key, x).sum())(x)

    init, apply = unzip(f)(KEY, X)
    assert_trees_close(apply(init(KEY), X), f(KEY, X))


def test_unzip_of_a_gradient_through_remat_which_recomputes_its_variables():
    def f(key, x):
        inner = jax.checkpoint(layer)
        return jax.grad(lambda x: jnp.sin(inner(key, x)).sum())(x)

    init, apply = unzip(f)(KEY, X)
    assert jax.tree.map(jnp.shape, init(KEY)) == {"w": (3, 3)}
    variables = {"w": jnp.eye(3)}
    expected = jax.grad(lambda x: jnp.sin(jnp.tanh(x @ variables["w"])).sum())(X)
    assert_trees_close(apply(variables, X), expected)


@pytest.mark.proof
def test_unzip_of_a_vmapped_function_has_mapped_variables():
    def f(keys, x):
        return jax.vmap(layer)(keys, x)

    keys, x = jax.random.split(KEY, 4), jnp.arange(12.0).reshape(4, 3)
    init, _ = unzips(f, keys, x, count=1)
    assert init(keys)["w"].shape == (4, 3, 3)


@pytest.mark.proof
def test_vmap_of_init_and_grad_of_apply_under_jit():
    def f(key, x):
        x = nest(jax.jit(layer), scope="a")(key, x)
        return jax.checkpoint(nest(layer, scope="b"))(key, x)

    init, apply = unzip(f)(KEY, X)

    @jax.jit
    def step(keys, x):
        variables = jax.vmap(init)(keys)
        return jax.vmap(jax.grad(lambda v: apply(v, x).sum()))(variables)

    keys = jax.random.split(KEY, 3)
    expected = jax.grad(lambda v: apply(v, X).sum())(init(keys[1]))
    assert_trees_close(jax.tree.map(lambda g: g[1], step(keys, X)), expected)
