"""Marked calls, as JAX lowers and XLA compiles them, on one device and on several."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import Mark, mark_of, marked

WEIGHTS = tuple(np.linspace(-1, 1, 16, dtype="f").reshape(4, 4) * s for s in (1, 2, 3))
X = np.linspace(0, 1, 32, dtype="f").reshape(8, 4)


@jax.jit
def activation(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@jax.jit
def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + activation(x @ w)


def model(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return x


def marking(mark: Mark, name: str = "layer"):
    """A pass that marks the calls of `layer` at the top level."""

    def run(program: Program) -> Program:
        eqns = [
            eqn.replace(ctx=marked(eqn.ctx, mark, name)) if eqn.params.get("name") == name else eqn
            for eqn in program.jaxpr.eqns
        ]
        return replace(program, jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))

    return run


def xla_attributes(lowered: jax.stages.Lowered) -> dict[str, set[str]]:
    """Return the attributes that XLA receives for the calls of each function."""
    calls = re.findall(r"call @(\w+)\(.*?\)(?: \{(.*)\})? :", lowered.as_text())
    found: dict[str, set[str]] = {}
    for name, text in calls:
        keys = re.findall(r"\b(inlineable|compilation_unit) = ", text)
        found.setdefault(re.sub(r"_\d+$", "", name), set()).update(keys)
    return found


UNIT = {"inlineable", "compilation_unit"}


@pytest.mark.parametrize(
    ("mark", "expected"), [("unit", UNIT), ("call", {"inlineable"}), ("plain", set())]
)
def test_only_the_call_is_marked_for_xla(mark, expected) -> None:
    lowered = jaxprtool.jit(model, passes=marking(mark)).lower(X, WEIGHTS)
    assert xla_attributes(lowered) == {"layer": expected, "activation": set()}


def test_equal_contexts_are_one_object() -> None:
    program = jaxprtool.trace(model, X, WEIGHTS)
    contexts = [eqn.ctx for eqn in marking("unit")(program).jaxpr.eqns]
    assert len(set(map(id, contexts))) == 1
    assert marked(contexts[0], "plain", "layer") is program.jaxpr.eqns[0].ctx


def test_our_marks_are_recognized() -> None:
    (eqn, *_) = jaxprtool.trace(model, X, WEIGHTS).jaxpr.eqns
    for mark in ("unit", "call", "plain"):
        assert mark_of(eqn.replace(ctx=marked(eqn.ctx, mark, "layer"))) == mark
    with set_xla_metadata(inlineable="false"):
        (eqn, *_) = jaxprtool.trace(model, X, WEIGHTS).jaxpr.eqns
    assert mark_of(eqn) == "plain"
    assert eqn.ctx.xla_metadata == {"inlineable": "false"}


def loss(x, weights):
    return (jaxprtool.jit(model, passes=marking("unit"))(x, weights) ** 2).sum()


TRANSFORMED = {
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "vmap": lambda f: jax.vmap(f, (1, None)),
    "jvp": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)),
    "remat": lambda f: jax.grad(jax.checkpoint(f), argnums=1),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (f(x, w) + c, c), 0.0, length=2),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformed_calls_are_units_and_their_callees_are_not(transform) -> None:
    x = np.stack([X, X], 1) if transform is TRANSFORMED["vmap"] else X
    lowered = jax.jit(transform(loss)).lower(x, WEIGHTS)
    found = xla_attributes(lowered)
    assert found["layer"] == UNIT
    assert found["activation"] == set()
    expected = jax.jit(transform(lambda x, w: (model(x, w) ** 2).sum()))(x, WEIGHTS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        lowered.compile()(x, WEIGHTS),
        expected,
    )


@jax.jit
def noisy(key: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.random.bits(key, (2,)))


def test_functions_that_jax_traces_while_lowering_a_body_are_not_marked() -> None:
    def keys(key):
        return noisy(noisy(key))

    lowered = jaxprtool.jit(keys, passes=marking("unit", "noisy")).lower(jax.random.key(0))
    assert xla_attributes(lowered) == {"noisy": UNIT, "_hash": UNIT}


def test_callees_of_a_unit_have_no_source_locations() -> None:
    """XLA may hang where they have, even if they are lowered for other callers first."""

    def fun(x, weights):
        return model(activation(x), weights)

    module = jaxprtool.jit(fun, passes=marking("unit")).lower(X, WEIGHTS).compiler_ir()
    places = [
        any(__file__ in str(op.location) for op in function.body.blocks[0].operations)
        for function in module.body.operations
        if "activation" in str(function.name)
    ]
    assert sorted(places) == [False, True]


@jax.jit
def dropout(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    key, used = jax.random.split(key)
    return jnp.tanh(x) * jax.random.bernoulli(used, 0.5, x.shape), key


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    for _ in range(3):
        x, key = dropout(x, key)
    return x


@pytest.mark.parametrize(
    ("mark", "transform"),
    [
        ("call", lambda f: f),
        ("unit", lambda f: jax.grad(lambda x, key: f(x, key).sum())),
        ("unit", lambda f: jax.vmap(f, (0, None))),
    ],
    ids=["call", "gradient", "vmap"],
)
def test_random_bits_in_marked_bodies_are_compiled_once_and_are_the_same(mark, transform) -> None:
    key = jax.random.key(3)
    fun = jaxprtool.jit(dropped, passes=marking(mark, "dropout"))
    lowered = jax.jit(transform(fun)).lower(X, key)
    assert xla_attributes(lowered)["_hash"] == UNIT
    compiled = lowered.compile()
    assert "while" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(X, key), transform(dropped)(X, key))


@pytest.mark.proof
def test_random_bits_elsewhere_are_drawn_as_by_jax() -> None:
    def fun(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape), dropped(x, key)

    key = jax.random.key(3)
    assert "while" in jax.jit(fun).lower(X, key).compile().as_text()
    compiled = jaxprtool.jit(fun, passes=marking("unit", "dropout")).lower(X, key).compile()
    assert "while" in compiled.as_text()
    jax.tree.map(np.testing.assert_array_equal, compiled(X, key), fun(X, key))


# --- several devices ------------------------------------------------------------------------------


def mesh(kind: AxisType, count: int = 4) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), ("d",), axis_types=(kind,))


@jax.jit
def pinned(x: jax.Array, w: jax.Array) -> jax.Array:
    spec = NamedSharding(mesh(AxisType.Auto), P("d"))
    return jax.lax.with_sharding_constraint(x + jnp.tanh(x @ w), spec)


@pytest.mark.parametrize("body", [layer, pinned], ids=["propagated", "constrained"])
def test_units_are_calls_when_xla_partitions(body) -> None:
    """XLA gathers the operands of a unit, and aborts for a sharding within one."""
    sharded = jax.device_put(X, NamedSharding(mesh(AxisType.Auto), P("d")))

    def fun(x, weights):
        for w in weights:
            x = body(x, w)
        return x

    lowered = jaxprtool.jit(fun, passes=marking("unit", body.__name__)).lower(sharded, WEIGHTS)
    assert xla_attributes(lowered)[body.__name__] == {"inlineable"}
    compiled, expected = lowered.compile(), jax.jit(fun)(sharded, WEIGHTS)
    out = compiled(sharded, WEIGHTS)
    assert out.sharding.is_equivalent_to(expected.sharding, out.ndim)
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_units_are_calls_on_explicit_axes() -> None:
    axes = mesh(AxisType.Explicit)
    with jax.set_mesh(axes):
        sharded = jax.device_put(X, NamedSharding(axes, P("d")))
        weights = jax.device_put(WEIGHTS, NamedSharding(axes, P()))
        out = jaxprtool.jit(model, passes=marking("unit"))(sharded, weights)
        np.testing.assert_allclose(out, jax.jit(model)(sharded, weights), rtol=1e-6)
    assert out.sharding.spec == P("d", None)


def test_units_stay_within_shard_map() -> None:
    axes = mesh(AxisType.Auto)
    fun = jaxprtool.jit(model, passes=marking("unit"))
    sharded = jax.shard_map(fun, mesh=axes, in_specs=(P("d"), P()), out_specs=P("d"))
    lowered = jax.jit(sharded).lower(X, WEIGHTS)
    assert xla_attributes(lowered)["layer"] == UNIT
    np.testing.assert_allclose(lowered.compile()(X, WEIGHTS), jax.jit(model)(X, WEIGHTS), rtol=1e-6)


@jax.jit
def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return activation(jax.lax.conv(x[None], w[None, None], (1, 1), "SAME")[0])


def test_convolutions_that_cannot_be_in_units_are_not_in_calls() -> None:
    """XLA for the CPU has a slow convolution in calls that it does not inline."""

    def fun(x, weights):
        for w in weights:
            x = convolved(x, w)
        return x

    image = X[None]
    one = jaxprtool.jit(fun, passes=marking("unit", "convolved")).lower(image, WEIGHTS)
    assert xla_attributes(one)["convolved"] == UNIT
    asked = jaxprtool.jit(fun, passes=marking("call", "convolved")).lower(image, WEIGHTS)
    assert xla_attributes(asked)["convolved"] == set()
    sharded = jax.device_put(image, NamedSharding(mesh(AxisType.Auto), P(None, "d")))
    several = jaxprtool.jit(fun, passes=marking("unit", "convolved")).lower(sharded, WEIGHTS)
    assert xla_attributes(several)["convolved"] == set()


def test_units_with_ordered_effects_keep_their_order() -> None:
    seen: list[float] = []

    @jax.jit
    def noisy(x: jax.Array, w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0], ordered=True)
        return jnp.sin(x @ w)

    def run(x: jax.Array) -> jax.Array:
        for w in WEIGHTS:
            x = noisy(x, w)
        return x

    program = jaxprtool.trace(run, X)
    expected = jax.block_until_ready(jax.jit(program)(X))
    jax.effects_barrier()
    plain, seen[:] = list(seen), []
    np.testing.assert_allclose(jax.jit(marking("unit", "noisy")(program))(X), expected, rtol=1e-6)
    jax.effects_barrier()
    assert seen == plain and len(seen) == 3


def test_exported_units_are_calls() -> None:
    """A partitioned program may call one that is exported for one device."""
    exported = jax.export.export(jaxprtool.jit(model, passes=marking("unit")))(X, WEIGHTS)
    assert "compilation_unit" not in exported.mlir_module()
    assert 'inlineable = "false"' in exported.mlir_module()


# --- backends that reject marks -------------------------------------------------------------------


@pytest.fixture
def rejecting(monkeypatch):
    """A backend that cannot compile an attribute of this name."""

    def reject(attribute: str) -> None:
        def compiled(lowered, *args, **kwargs):
            if f"{attribute} = " in lowered.as_text():
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: {attribute} is unknown")
            return compile_(lowered, *args, **kwargs)

        compile_ = jax.stages.Lowered.compile
        monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
        jaxcompat.marks._supported.cache_clear()

    yield reject
    jaxcompat.marks._supported.cache_clear()


@pytest.mark.parametrize(
    ("attribute", "left"), [("compilation_unit", {"inlineable"}), ("inlineable", set())]
)
def test_a_backend_gets_the_marks_that_it_supports(rejecting, attribute, left) -> None:
    rejecting(attribute)
    with pytest.warns(UserWarning) as caught:
        lowered = jaxprtool.jit(model, passes=marking("unit")).lower(X, WEIGHTS)
        again = jaxprtool.jit(model, passes=marking("unit")).lower(X + 1, WEIGHTS)
    assert [str(w.message).splitlines() for w in caught] == [
        [
            "the backend 'cpu' does not support calls marked as 'unit'; outlined calls are "
            f"marked as '{'call' if left else 'plain'}' instead: "
            f"INVALID_ARGUMENT: {attribute} is unknown"
        ]
    ]
    assert xla_attributes(lowered)["layer"] == xla_attributes(again)["layer"] == left
    np.testing.assert_array_equal(lowered.compile()(X, WEIGHTS), jax.jit(model)(X, WEIGHTS))


def test_a_backend_that_supports_all_is_probed_without_the_users_settings() -> None:
    jaxcompat.marks._supported.cache_clear()
    axes = mesh(AxisType.Explicit, 1)
    with jax.set_mesh(axes), jax.transfer_guard("disallow"), jax.debug_nans(True):
        lowered = jaxprtool.jit(model, passes=marking("unit")).lower(X, WEIGHTS)
    assert xla_attributes(lowered)["layer"] == UNIT
