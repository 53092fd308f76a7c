"""Modules over several devices: meshes, shardings, and the collectives of manual computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.lowering import module
from jaxprtool.formats.stablehlo import read_module_program
from jaxprtool.ir.equations import equations
from jaxprtool.ir.meshes import on_axes
from jaxprtool.ir.program import top_jaxpr, type_check

X = jnp.sin(jnp.arange(64.0) + 0.1).reshape(8, 8)
TURN = [(i, (i + 1) % 4) for i in range(4)]
BOTH = P("a", "b")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def text_of(fun, *args):
    fun = fun if hasattr(fun, "lower") else jax.jit(fun)
    return fun.lower(*args).compiler_ir("stablehlo").operation.get_asm()


def mapped(fun, mesh, ins=BOTH, outs=BOTH, axes=frozenset(), check=False):
    options = {"axis_names": set(axes), "check_vma": check}
    return jax.shard_map(fun, mesh=mesh, in_specs=ins, out_specs=outs, **options)


def read(fun, *args):
    program = read_module_program(text_of(fun, *args).encode(), "m.mlir")
    type_check(program)
    return program


def names(program):
    return [eqn.primitive.name for eqn in equations(top_jaxpr(program))]


def prove(fun, mesh, has_gradient=True):
    """Read the lowering of a function, and compare the bits of its results, and its gradients."""
    program = read(fun, X)
    placed = program.on_mesh(mesh)
    wanted, result = jax.jit(fun)(X), jax.jit(placed)(X)
    assert np.asarray(wanted).tobytes() == np.asarray(result).tobytes()
    if has_gradient:
        weights = jnp.cos(jnp.arange(float(wanted.size))).reshape(wanted.shape)
        slopes = [
            jax.jit(jax.grad(lambda x, f=f: (f(x) * weights).sum()))(X) for f in (fun, placed)
        ]
        np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-6)
    return program


@pytest.mark.parametrize("check", [True, False])
def test_collectives_name_the_axes_of_the_mesh(mesh, check):
    def fun(x):
        index = lax.axis_index("a") + 2 * lax.axis_index("b")
        everywhere = lax.psum(x, ("b", "a")) + lax.pmean(x, "b")
        x = lax.ppermute(x, "a", TURN) * index + everywhere
        x = lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
        x = lax.all_gather(x, "b", axis=0, tiled=True)
        return lax.all_to_all(x, "b", 1, 0, tiled=True)

    program = prove(mapped(fun, mesh, check=check), mesh)
    assert names(program)[0] == "shard_map"
    expected = ["psum", "psum", "ppermute", "reduce_scatter", "all_gather", "all_to_all"]
    kinds = [name for name in names(program) if name in expected]
    assert sorted(kinds) == sorted(expected)
    (axes,) = [e.params["axes"] for e in equations(top_jaxpr(program)) if e.params.get("axes")][:1]
    assert set(axes) == {"a", "b"}


def test_extremes_groups_and_booleans(mesh):
    def fun(x):
        largest = lax.pmax(x, "a") - lax.pmin(x, ("a", "b"))
        pairs = lax.psum(x, "a", axis_index_groups=[[0, 2], [1, 3]])
        rows = lax.all_gather(x, "a", axis_index_groups=[[0, 1], [2, 3]], tiled=True)
        return largest + pairs + rows[:2] + lax.psum(x > 0.5, "b")

    prove(mapped(fun, mesh), mesh, has_gradient=False)


def test_orders_of_axes_are_kept(mesh):
    prove(mapped(lambda x: lax.all_gather(x, ("b", "a"), tiled=True), mesh, outs=P()), mesh)
    prove(mapped(lambda x: x * lax.axis_index(("b", "a")), mesh), mesh)


def test_loops_branches_and_functions_in_manual_computations(mesh):
    def fun(x):
        x = lax.fori_loop(0, 3, lambda i, x: jnp.where(x > 0, lax.psum(x, "a"), x), x)
        x = lax.cond(lax.axis_index("a") == 0, jnp.sin, jnp.cos, x)
        return jax.nn.silu(x) + jax.nn.silu(lax.ppermute(x, "a", TURN))

    def outside(x):
        return jax.nn.silu(mapped(fun, mesh)(jax.nn.silu(x)))

    assert "scan" in names(prove(outside, mesh))


def test_axes_may_be_left_to_the_partitioner(mesh):
    def fun(x):
        x = lax.with_sharding_constraint(jnp.cos(x), P(None, "b"))
        return lax.psum(x, "a") * lax.axis_index("a")

    program = prove(mapped(fun, mesh, P("a"), P("a"), {"a"}), mesh)
    assert "sharding_constraint" in names(program)


def test_a_manual_computation_in_another_one(mesh):
    def inner(x):
        return lax.psum(x, "b")

    def fun(x):
        options = {"axis_names": {"b"}, "check_vma": False}
        return jax.shard_map(inner, in_specs=P(None, "b"), out_specs=P(), **options)(x) * 2

    program = prove(mapped(fun, mesh, P("a"), P("a"), {"a"}), mesh)
    assert names(program).count("shard_map") == 2


@pytest.fixture
def older_partitioner():
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.usefixtures("older_partitioner")
def test_modules_of_the_older_partitioner_get_a_mesh(mesh):
    def fun(x):
        x = jnp.sin(x) * lax.axis_index("b") + lax.psum(x, "a")
        return lax.ppermute(x, "a", TURN), lax.psum(x, "b")

    outs = P("b", "a"), P("a", None)
    mapping = mapped(fun, mesh, P("b", "a"), outs)
    text = text_of(lambda x: mapping(jnp.cos(x))[0] * 2, X)
    assert "SPMDShardToFullShape" in text and "sdy." not in text
    program = read_module_program(text.encode(), "m.mlir")
    assert names(program)[:2] == ["cos", "shard_map"]
    assert program.meshes[0].shape == {"axis0": 4, "axis1": 2}
    placed = program.on_mesh(jax.make_mesh((4, 2), ("axis0", "axis1"), axis_types=mesh.axis_types))
    wanted, result = jax.jit(lambda x: mapping(jnp.cos(x))[0] * 2)(X), jax.jit(placed)(X)
    assert np.asarray(wanted).tobytes() == np.asarray(result).tobytes()


@pytest.mark.usefixtures("older_partitioner")
def test_shardings_of_the_older_partitioner_in_any_order():
    cube = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    fun = mapped(lambda x: jnp.sin(x) + lax.psum(x, "c"), cube, P(("c", "a")), P("a", "b"))
    program = read_module_program(text_of(fun, X).encode(), "m.mlir")
    assert program.meshes[0].shape == {"axis0": 2, "axis1": 2, "axis2": 2}
    placed = program.on_mesh(
        jax.make_mesh((2, 2, 2), program.meshes[0].axis_names, axis_types=cube.axis_types)
    )
    wanted, result = jax.jit(fun)(X), jax.jit(placed)(X)
    assert np.asarray(wanted).tobytes() == np.asarray(result).tobytes()
    partial = mapped(jnp.sin, cube, P("a"), P("a"), {"a"})
    with pytest.raises(UnsupportedError, match="some axes are left to the partitioner"):
        read_module_program(text_of(partial, X).encode(), "m.mlir")


def test_a_broadcast_takes_the_first_device_of_each_group(mesh):
    text = text_of(mapped(lambda x: lax.psum(x, "a"), mesh), X)
    start, end = text.index('"stablehlo.all_reduce"'), text.index("}) :") + 2
    handle = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
    groups = "replica_groups = dense<[[4, 0, 2, 6], [5, 1, 3, 7]]> : tensor<2x4xi64>"
    broadcast = f'"stablehlo.collective_broadcast"(%arg1) <{{{handle}, {groups}}}>'
    text = f"{text[:start]}{broadcast}{text[end:]}"
    program = read_module_program(text.encode(), "m.mlir").on_mesh(mesh)
    np.testing.assert_array_equal(jax.jit(program)(X), jnp.tile(X[4:6], (4, 1)))


def test_shardings_of_arguments_and_results_are_options(mesh):
    rows = NamedSharding(mesh, P("a"))
    placed = jax.device_put(X, rows)
    fun = jax.jit(jnp.sin, in_shardings=rows, out_shardings=rows, donate_argnums=0)
    program = read(fun, placed)
    options = *program.jit.arguments, *program.jit.results
    assert [(o.name, o.placement.spec) for o in options] == [
        ("arg0", P("a", None)),
        ("result", P("a", None)),
    ]
    assert options[0].donated
    again = module(program, keep_unused=True).operation.get_asm()
    assert again.count('sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>') == 2


def test_what_shardy_inserts_changes_shardings_only(mesh):
    inlined = 'mesh<["a"=4, "b"=2]>'
    both = '#sdy.sharding<@mesh, [{"a"}, {"b"}]>'
    text = f"""module {{
      sdy.mesh @mesh = <["a"=4, "b"=2]>
      func.func @main(%x: tensor<8x8xf32> {{sdy.sharding = {both}}}) -> tensor<8x8xf32> {{
        %g = sdy.all_gather [{{"a"}}, {{}}] %x out_sharding=<@mesh, [{{}}, {{"b"}}]>
          : tensor<8x8xf32>
        %y = sdy.named_computation<"square">(%g) in_shardings=[<{inlined}, [{{}}, {{"b"}}]>]
          out_shardings=[<@mesh, [{{"a"}}, {{}}]>] (%z: tensor<8x8xf32>) {{
          %w = stablehlo.multiply %z, %z : tensor<8x8xf32>
          sdy.return %w : tensor<8x8xf32>
        }} : (tensor<8x8xf32>) -> tensor<8x8xf32>
        return %y : tensor<8x8xf32>
      }}
    }}"""
    program = read_module_program(text.encode())
    constrained = ["sharding_constraint", "sharding_constraint", "mul", "sharding_constraint"]
    assert names(program) == constrained
    np.testing.assert_array_equal(jax.jit(program.on_mesh(mesh))(X), X * X)


def test_dimensions_that_are_left_to_the_partitioner(mesh):
    text = b"""module {
      sdy.mesh @mesh = <["a"=4, "b"=2]>
      func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}, {?}]>})
        -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {?}]>}) {
        %y = sdy.sharding_constraint %x <@mesh, [{?}, {"b"}]> : tensor<8x8xf32>
        return %y : tensor<8x8xf32>
      }
    }"""
    program = read_module_program(text)
    (option,) = program.jit.arguments + program.jit.results
    assert (option.name, option.placement.spec) == ("arg0", P("a", None))
    source = jaxprtool.to_python(program)
    assert 'P(P.UNCONSTRAINED, "b")' in source
    exec(source, {})  # JAX accepts the options
    np.testing.assert_array_equal(jax.jit(program.on_mesh(mesh))(X), X)


def test_shardings_of_the_results_of_operations_are_constraints(mesh):
    text = b"""module {
      sdy.mesh @mesh = <["a"=4, "b"=2]>
      func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
        %c = sdy.constant dense<2.0> : tensor<8x8xf32>
        %y = stablehlo.multiply %x, %c {
          sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"b"}, {"a"}]>]>
        } : tensor<8x8xf32>
        return %y : tensor<8x8xf32>
      }
    }"""
    program = read_module_program(text)
    assert names(program) == ["mul", "sharding_constraint"]
    assert top_jaxpr(program).eqns[1].params["sharding"].spec == P("b", "a")
    np.testing.assert_array_equal(jax.jit(program.on_mesh(mesh))(X), 2 * X)


def test_what_is_for_replicas_or_open_is_refused(mesh):
    text = text_of(mapped(lambda x: lax.psum(x, "a"), mesh), X)
    handle = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
    assert handle in text
    text = text.replace(handle, "").replace(", use_global_device_ids", "")
    with pytest.raises(
        UnsupportedError, match=r"all_reduce .* (8 devices of its mesh|over replicas)"
    ):
        read_module_program(text.encode(), "m.mlir")


# --- programs of one device -----------------------------------------------------------------------

#: Values of 8 devices, stacked along the first axis.
STACKED = np.arange(48, dtype=np.float32).reshape(8, 6)


def program_of_device(body, counts=""):
    adds = """ ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    })"""
    text = f"""module @step {counts} {{
      func.func @main(%x: tensor<6xf32>) -> tensor<6xf32> {{
        {body.replace("ADDS", adds)}
        return %y : tensor<6xf32>
      }}
    }}"""
    return read_module_program(text.encode(), "m.mlir")


def run_on_devices(program):
    type_check(program)
    return np.asarray(jax.jit(on_axes(program, program.meshes[0].shape))(STACKED))


COUNTS = "attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 2 : i32}"


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        (
            "replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        (
            "replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>,"
            "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>",
            [[0, 1, 4, 5], [2, 3, 6, 7]],
        ),
        (
            "replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>,"
            "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,"
            "use_global_device_ids",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        (
            "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>,"
            "channel_handle = #stablehlo.channel_handle<handle = 0, type = 0>",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
    ],
)
def test_collectives_of_replicas_and_partitions(attributes, groups):
    types = "(tensor<6xf32>) -> tensor<6xf32>"
    reduce = f'%y = "stablehlo.all_reduce"(%x) <{{{attributes}}}>ADDS : {types}'
    program = program_of_device(reduce, COUNTS)
    assert program.jaxpr.out_avals[0].shape == (8, 6)
    wanted = np.zeros_like(STACKED)
    for group in groups:
        wanted[group] = STACKED[group].sum(0)
    np.testing.assert_array_equal(run_on_devices(program), wanted)


def test_the_groups_of_collectives_say_how_many_devices_there_are():
    body = """
    %i = stablehlo.partition_id : tensor<ui32>
    %f = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
    %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<6xf32>
    %z = stablehlo.add %x, %b : tensor<6xf32>
    %y = "stablehlo.all_to_all"(%z) <{
      split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
      replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>
    }> : (tensor<6xf32>) -> tensor<6xf32>"""
    z = STACKED + np.arange(8, dtype=np.float32)[:, None]
    halves = z.reshape(2, 4, 2, 3)  # of both devices of a group: their halves
    wanted = halves.transpose(2, 1, 0, 3).reshape(8, 6)
    np.testing.assert_array_equal(run_on_devices(program_of_device(body)), wanted)


def test_replicas_send_data_and_know_their_number():
    body = """
    %i = stablehlo.replica_id : tensor<ui32>
    %f = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
    %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<6xf32>
    %z = stablehlo.add %x, %b : tensor<6xf32>
    %y = "stablehlo.collective_permute"(%z) <{
      source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>
    }> : (tensor<6xf32>) -> tensor<6xf32>"""
    z = STACKED + np.repeat(np.arange(4, dtype=np.float32), 2)[:, None]
    wanted = np.concatenate([np.zeros_like(z[:2]), z[:-2]])
    np.testing.assert_array_equal(run_on_devices(program_of_device(body, COUNTS)), wanted)


def test_groups_by_the_axes_of_a_mesh_need_a_computation_over_it():
    body = """%y = "stablehlo.all_reduce"(%x) <{
      replica_groups = #stablehlo.replica_group_mesh_axes<
        mesh = #stablehlo.mesh<axes = [#stablehlo.mesh_axis<name = "a", size = 4>]>,
        axes = [#stablehlo.axis_ref<name = "a">]>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids
    }>ADDS : (tensor<6xf32>) -> tensor<6xf32>"""
    with pytest.raises(UnsupportedError, match="not in a computation over a mesh"):
        program_of_device(body)


def test_an_unknown_number_of_partitions_is_refused():
    body = """%y = "stablehlo.all_reduce"(%x) <{
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>
    }>ADDS : (tensor<6xf32>) -> tensor<6xf32>"""
    with pytest.raises(UnsupportedError, match="does not say how many partitions"):
        program_of_device(body)
