"""`Program.on_mesh` equals tracing on that mesh, or is refused by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import ArgumentsError, TooFewDevicesError, UnsupportedError
from jaxprtool.execute.running.run import run
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.meshes import on_axes
from tests.programs import sharded
from tests.programs.sharded import SHARDED, mesh_of
from tests.share import first_and_proofs

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "typed"])


def traced(make: Callable[[Any], Any], mesh: Any) -> jaxprtool.Program:
    """Trace the function with the arguments, both returned by `make(mesh)`, with the mesh set."""
    with jax.set_mesh(mesh):
        function, args = make(mesh)
        return jaxprtool.trace(function, *args)


def results(program: jaxprtool.Program) -> list[np.ndarray]:
    """Return the results for random arguments, which are the same for equal types."""
    args = [
        np.asarray(jax.random.normal(jax.random.key(i), aval.shape) / 4).astype(aval.dtype)
        for i, aval in enumerate(program.in_avals)
    ]
    return [np.asarray(each.value) for each in run(program, args, repeat=0).outputs]


def require_same(made: jaxprtool.Program, wanted: jaxprtool.Program) -> None:
    assert structural_difference(made, wanted) is None
    assert made.jit == wanted.jit
    for a, b in zip(results(made), results(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def typed(mesh: Any, spec: Any, *shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


# --- the ten programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "name",
    first_and_proofs(["data", "tensor", "fsdp", "scanned", "sequence", "uneven", "explicit"]),
)
def test_a_program_on_eight_devices_equals_its_trace_on_fewer(name, size, monkeypatch):
    def make(mesh_of_program: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(sharded, "mesh_of", mesh_of_program)
        made = SHARDED[name]()
        with jax.set_mesh(made.mesh):
            return made.mesh, jaxprtool.trace(made.function, *made.arguments)

    def small(kind: AxisType = AxisType.Auto, **axes: int) -> Any:
        return mesh_of(kind, **dict.fromkeys(axes, size))

    (_, eight), (mesh, fewer) = make(mesh_of), make(small)
    made = eight.on_mesh(mesh)
    require_same(made, fewer)
    for a, b in zip(results(made), results(eight), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "axis"), [("expert", "expert"), ("pipeline", "stage")])
def test_a_shard_map_over_an_axis_that_changes_is_refused_with_its_line(name, axis):
    made = SHARDED[name]()
    program = jaxprtool.trace(made.function, *made.arguments)
    with pytest.raises(UnsupportedError, match=f"shard_map.*over {axis}=8.*over {axis}=2") as info:
        program.on_mesh(mesh_of(**{axis: 2}))
    assert f"--mesh {axis}=2" in info.value.hint
    assert name == "pipeline" or "sharded.py:164" in str(info.value)
    same = program.on_mesh(mesh_of(**{axis: 8}))  # nothing changes
    assert jaxprtool.equivalent(same, program)


@pytest.mark.proof
def test_a_shard_map_over_an_axis_that_stays_is_kept(monkeypatch):
    made = SHARDED["partly_manual"]()
    program = jaxprtool.trace(made.function, *made.arguments)
    alone = program.on_mesh(mesh_of(data=2, model=1))
    np.testing.assert_allclose(results(alone)[0], results(program)[0], rtol=1e-4)
    with pytest.raises(UnsupportedError, match="over data=2, so it cannot run over data=1"):
        program.on_mesh(mesh_of(data=1, model=4))


@KINDS
def test_a_shard_map_over_the_set_mesh_equals_its_trace_on_the_new_mesh(kind):
    def summed(mesh):
        def shard(v):
            return jax.lax.psum(jnp.sin(v), "y")

        function = jax.shard_map(shard, in_specs=P("y"), out_specs=P(), axis_names={"y"})
        return lambda x: function(x), (typed(mesh, P("y"), 16, 4),)

    eight, four = (mesh_of(kind, x=size, y=2) for size in (4, 2))
    require_same(traced(summed, eight).on_mesh(four), traced(summed, four))


# --- objects with a mesh --------------------------------------------------------------------------


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def double_sine(x):
    return jnp.sin(x) * 2


double_sine.defjvp(lambda p, t: (double_sine(*p), jnp.cos(p[0]) * 2 * t[0]))


def rules(mesh):
    def function(x):
        return (sine(x) * double_sine(x) + jax.nn.relu(x) + jax.nn.gelu(x)).sum()

    return function, (typed(mesh, P("x"), 16, 4),)


def loops(mesh):
    def function(x, n):
        _, ys = jax.lax.scan(lambda c, v: (c + v, c * v), x[0] * 0, x)
        z = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (n, ys))[1]
        return jax.lax.cond(n > 1, jnp.sin, jnp.cos, z).sum()

    return function, (typed(mesh, P(None, "x"), 4, 16), jax.ShapeDtypeStruct((), "int32"))


def keys(mesh):
    key = jax.random.key(0)
    return lambda x: x + jax.random.normal(key, x.shape), (typed(mesh, P("x"), 16),)


def constants(mesh):
    table = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("x")))
    weights = jnp.ones((3,))
    return lambda x: x * table + weights.sum(), (typed(mesh, P("x"), 16),)


def objects(mesh):
    """Wrap operations that newer JAX represents as objects with their own rules."""

    def function(x):
        return jnp.nonzero(x, size=4)[0] + jnp.searchsorted(jnp.arange(8.0), x[:4])

    return function, (typed(mesh, P(None), 16),)


def refs(mesh):
    def function(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    return function, (typed(mesh, P("x"), 16),)


@KINDS
@pytest.mark.parametrize("make", first_and_proofs([rules, loops, keys, constants, objects, refs]))
def test_objects_with_a_mesh_equal_those_traced_on_fewer_or_more_devices(make, kind):
    eight, two = (mesh_of(kind, x=size) for size in (8, 2))
    on_eight, on_two = traced(make, eight), traced(make, two)
    require_same(on_eight.on_mesh(two), on_two)
    require_same(on_two.on_mesh(eight), on_eight)


@KINDS
@pytest.mark.parametrize("passes", ["grad", "value_and_grad, -O1"])
def test_derivatives_use_rules_on_the_new_mesh(passes, kind):
    eight, two = (mesh_of(kind, x=size) for size in (8, 2))
    made = traced(rules, eight).on_mesh(two).apply(passes)
    require_same(made, traced(rules, two).apply(passes))


def options(mesh):
    rows = NamedSharding(mesh, P("x"))
    inner = jax.jit(jnp.sin, in_shardings=rows, out_shardings=rows)

    def function(x, y):
        return x + y, inner(y), jax.device_put(x, rows)

    out = rows, NamedSharding(mesh, P()), None
    jitted = jax.jit(function, in_shardings=(rows, None), out_shardings=out, donate_argnums=0)
    return jitted, (jnp.ones(16), jnp.ones(16))


def layouts(mesh):
    rows = Format(Layout((0, 1)), NamedSharding(mesh, P("x")))
    return jax.jit(lambda x: x + 1, in_shardings=rows, out_shardings=rows), (jnp.ones((16, 4)),)


def transposed(mesh):
    def rows(r, y):
        return jax.lax.with_sharding_constraint(y * r, P("x"))

    def function(x):
        return jax.custom_derivatives.linear_call(rows, rows, x, x * 2).sum()

    return function, (typed(mesh, P("x"), 16),)


@pytest.mark.parametrize("make", [options, layouts, transposed])
def test_shardings_left_to_the_partitioner_are_those_of_the_new_mesh(make):
    eight, two = mesh_of(x=8), mesh_of(x=2)
    require_same(traced(make, eight).on_mesh(two), traced(make, two))


def made_sharded(mesh):
    def function(x):
        rows = jax.lax.broadcasted_iota("float32", (16, 4), 0, out_sharding=P("x", None))
        more = jnp.zeros((16, 4), out_sharding=P("x", None)) + jnp.arange(4.0)
        return jnp.reshape(x + rows + more, (4, 16), out_sharding=P(None, "x"))

    return function, (typed(mesh, P("x"), 16, 4),)


def gathered(mesh):
    args = typed(mesh, P(None, None), 16, 4), typed(mesh, P("x"), 8, dtype="int32")
    return lambda x, i: x.at[i].get(out_sharding=P("x", None)), args


def mapped(mesh):
    return jax.vmap(lambda x: (x @ x.T).sum()), (typed(mesh, P("x"), 8, 3, 3),)


@pytest.mark.parametrize("make", [made_sharded, gathered, mapped])
def test_results_with_a_given_sharding_are_those_of_the_new_mesh(make):
    eight, two = (mesh_of(AxisType.Explicit, x=size) for size in (8, 2))
    require_same(traced(make, eight).on_mesh(two), traced(make, two))


def test_a_mesh_in_a_custom_rule_is_replaced():
    rows = NamedSharding(mesh_of(x=8), P("x"))

    @jax.custom_vjp
    def function(x):
        return jnp.sin(x).sum()

    def backward(x, g):
        return (jax.lax.with_sharding_constraint(g * jnp.cos(x), rows),)

    function.defvjp(lambda x: (function(x), x), backward)
    program = jaxprtool.trace(function, jnp.ones(16))
    assert not program.meshes
    grad = jax.grad(program.on_mesh(mesh_of(x=2)))(jnp.arange(16.0))
    assert grad.sharding == NamedSharding(mesh_of(x=2), P("x"))
    np.testing.assert_allclose(grad, np.cos(np.arange(16.0)), rtol=1e-5)


# --- forms of meshes ------------------------------------------------------------------------------


def two_axes(mesh):
    return lambda x: jax.lax.with_sharding_constraint(x * 2, P("x", "y")), (jnp.ones((8, 8)),)


def test_axes_may_come_in_any_order_with_their_devices():
    program = traced(two_axes, mesh_of(x=4, y=2))
    mesh = mesh_of(y=4, x=2)
    with jax.set_mesh(mesh):
        (wanted,) = run(traced(two_axes, mesh), [np.ones((8, 8), "f")], repeat=0).outputs
    made = program.on_mesh(mesh)
    assert [dict(each.shape) for each in made.meshes] == [{"x": 2, "y": 4}] * len(made.meshes)
    with jax.set_mesh(jax.sharding.Mesh(mesh.devices.T, ("x", "y"), axis_types=mesh.axis_types)):
        (found,) = run(made, [np.ones((8, 8), "f")], repeat=0).outputs
    shape = (8, 8)
    assert found.value.sharding.devices_indices_map(
        shape
    ) == wanted.value.sharding.devices_indices_map(shape)


@KINDS
def test_a_mesh_without_devices_runs_on_the_set_mesh_or_the_first_devices(kind):
    program = traced(constants, mesh_of(kind, x=8))
    made = program.on_mesh(AbstractMesh((2,), ("x",)))
    assert {type(mesh) for mesh in made.meshes} == {AbstractMesh}
    np.testing.assert_allclose(results(made)[0], results(program)[0], rtol=1e-5)
    devices = jax.devices()[2:4]
    with jax.set_mesh(jax.make_mesh((2,), ("x",), (kind,), devices=devices)):
        (found,) = run(made, [np.ones(16, "f")], repeat=0).outputs
    assert found.value.devices() == set(devices)


def test_a_mesh_in_equations_only_may_lack_devices():
    rows = NamedSharding(mesh_of(x=8), P("x"))
    program = jaxprtool.trace(lambda x: jax.lax.with_sharding_constraint(x, rows), jnp.ones(64))
    larger = on_axes(program, {"x": 64})
    with pytest.raises(TooFewDevicesError, match=r"mesh of 64 devices \(x=64\)") as info:
        run(larger, [np.ones(64)])
    assert info.value.axes == ("x",)
    assert jaxprtool.equivalent(larger.on_mesh(rows.mesh), program)


# --- errors ---------------------------------------------------------------------------------------


def test_an_indivisible_size_names_the_argument_or_result():
    two, three = (mesh_of(x=size) for size in (2, 3))
    rows, columns = (NamedSharding(two, spec) for spec in (P("x"), P(None, "x")))
    jitted = jax.jit(lambda x: x.reshape(3, 2), in_shardings=rows, out_shardings=columns)
    program = jaxprtool.trace(jitted, jnp.ones(6))
    with pytest.raises(ArgumentsError, match=r"argument 'x'.*f32\[6\].*size 6, which x=4 does not"):
        program.on_mesh(mesh_of(x=4))
    with pytest.raises(ArgumentsError, match=r"result 'result'.*f32\[3,2\].*size 2, which x=3"):
        program.on_mesh(three)
    explicit = mesh_of(AxisType.Explicit, x=2)
    program = traced(lambda mesh: (jnp.sin, (typed(mesh, P("x"), 6),)), explicit)
    with pytest.raises(ArgumentsError, match=r"argument 'x'.*f32\[6@x\].*size 6, which x=4"):
        program.on_mesh(mesh_of(x=4))


def test_an_indivisible_value_names_the_equation_and_its_line():
    def resharded(mesh):
        return lambda x: jax.reshard(jnp.sin(x), P("x")).sum(), (typed(mesh, P(), 6),)

    program = traced(resharded, mesh_of(AxisType.Explicit, x=2))
    with pytest.raises(
        UnsupportedError, match=r"in the reshard at .*test_on_mesh.py:\d+, f32\[6@x"
    ):
        program.on_mesh(mesh_of(x=4))

    def called(mesh):
        rows = NamedSharding(mesh, P("x"))
        return lambda x: jax.jit(jnp.sin, in_shardings=rows)(x), (jnp.ones(6),)

    program = traced(called, mesh_of(x=2))
    with pytest.raises(UnsupportedError, match=r"in the jit at .*mesh.py:\d+, f32\[6\]"):
        program.on_mesh(mesh_of(x=4))


def test_an_indivisible_constant_is_refused():
    table = jax.device_put(jnp.arange(6.0), NamedSharding(mesh_of(x=2), P("x")))
    program = jaxprtool.trace(
        lambda x: jax.lax.with_sharding_constraint(x, table.sharding) + table, table
    )
    with pytest.raises(UnsupportedError, match=r"a constant f32\[6\].*size 6, which x=4"):
        program.on_mesh(mesh_of(x=4))


def test_a_mesh_with_other_axes_or_a_second_mesh_is_refused():
    x, y = mesh_of(x=2), mesh_of(y=2)

    def constrained(*meshes):
        def function(value):
            for mesh in meshes:
                spec = NamedSharding(mesh, P(mesh.axis_names[0]))
                value = jax.lax.with_sharding_constraint(value, spec)
            return value

        return jaxprtool.trace(function, jnp.ones(8))

    for other in mesh_of(y=2), mesh_of(x=2, y=1):
        with pytest.raises(ArgumentsError, match="is for a mesh with the axes x=2, not") as info:
            constrained(x).on_mesh(other)
        assert info.value.hint == "give a size to each of its axes: x=…"
    with pytest.raises(ArgumentsError, match="has no mesh, so it cannot be put on x=2"):
        constrained().on_mesh(x)
    with pytest.raises(ArgumentsError, match="has several meshes"):
        constrained(x, y).on_mesh(x)


def test_an_indivisible_type_in_a_body_is_refused():
    def split(mesh):
        return lambda x: x.reshape(4, 4).sum(), (typed(mesh, P("x"), 16),)

    program = traced(split, mesh_of(AxisType.Explicit, x=2))
    assert results(program.on_mesh(mesh_of(x=4)))[0] == pytest.approx(results(program)[0], rel=1e-4)
    with pytest.raises(UnsupportedError, match="size 4, which x=8 does not divide"):
        program.on_mesh(mesh_of(x=8))
