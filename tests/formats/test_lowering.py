"""Programs as StableHLO and HLO equal JAX's lowering of the function, with the same names."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib import xla_client

from jaxprtool import nest, sow, trace, variable
from jaxprtool.errors import BackendError, UnsupportedError, described
from jaxprtool.formats import lowering
from jaxprtool.loading import Static
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.outlined import layers
from tests.programs.samples import sample_files
from tests.share import first_and_proofs
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part


def loss(params, x, *, unused):
    return {"y": params["w"] @ x, "total": x.sum()}


ARGS = ({"w": jnp.ones((3, 4))}, jnp.ones(4))


@pytest.fixture
def program():
    return trace(loss, *ARGS, unused=2.0)


@pytest.fixture
def jitted():
    return jax.jit(loss).lower(*ARGS, unused=2.0)


def test_stablehlo_equals_that_of_jit(program, jitted):
    assert lowering.stablehlo(program) == jitted.as_text()


def test_hlo_equals_that_of_jit_with_the_names_of_operations(program, jitted):
    text = lowering.hlo(program)
    assert computations(text) == computations(jitted.as_text("hlo", debug_info=True))
    assert text.startswith("HloModule jit_loss,")
    assert 'op_name="jit(loss)/dot_general"' in text
    assert "params[\\'w\\']" in text and "test_lowering.py" in text


def test_marks_of_calls_are_attributes_of_calls_only():
    program = layers(3)
    for text, quote in ((lowering.stablehlo(program), ' = "'), (lowering.hlo(program), '="')):
        lines = [line for line in text.splitlines() if "get-tuple-element" not in line]
        marked = [line for line in lines if "compilation_unit" in line]
        assert marked == [line for line in lines if re.search(r"\bcall\b", line)]
        units = Counter(re.findall(rf'compilation_unit{quote}(\w+)"', "".join(marked)))
        assert units == {"layer": 3, "block": 2}


def computations(text):
    """Return HLO text without the tables of source lines and the references to them."""
    return re.sub(r" stack_frame_id=\d+", "", text.partition("\n\n\n")[2])


def test_locations_are_only_the_users_lines(program):
    text = lowering.stablehlo(program, locations=True)
    assert "%arg0: tensor<3x4xf32> loc(\"params['w']\")" in text
    assert "jax.result_info = \"result['total']\"" in text
    assert "test_lowering.py" in text and "/jaxprtool/formats/" not in text


def test_bytecode_is_the_same_module(program):
    data = lowering.stablehlo_bytecode(program)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = mlir.deserialize_portable_artifact(data, context)
        assert str(module.body.operations[0].arguments[1].location) == 'loc("x")'
        assert "module @jit_loss" in str(module) and "stablehlo.dot_general" in str(module)


@jax.tree_util.register_pytree_node_class
class Checked:
    """A class that checks its children whenever it is built, as GPJax's data sets do."""

    def __init__(self, x, y):
        if x.ndim != y.ndim + 1:
            raise ValueError("a matrix and a vector")
        self.x, self.y = x, y

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_arguments_and_results_of_self_checking_classes_are_lowered_and_compiled():
    def centered(data):
        return Checked(data.x - data.y, data.y.mean(keepdims=True))

    program = trace(centered, Checked(jnp.ones((3, 4)), jnp.ones(4)))
    assert "func.func public @main" in lowering.stablehlo(program)
    assert lowering.hlo(program).startswith("HloModule jit_centered")
    assert "is_scheduled=true" in lowering.hlo_optimized(program)


def test_optimized_hlo_proto_and_graph_are_of_this_program(program):
    assert "HloModule jit_loss, is_scheduled=true" in lowering.hlo_optimized(program)
    on_device = lowering.hlo_optimized(program, jax.devices("cpu")[1:])
    assert "HloModule jit_loss" in on_device
    read = xla_client.XlaComputation(lowering.hlo_proto(program))
    assert read.name() == "jit_loss"
    assert lowering.hlo_dot(program).startswith("digraph G {")


@pytest.mark.parametrize("platform", lowering.PLATFORMS)
def test_other_platforms_need_not_be_available(platform):
    program = trace(lambda x: jnp.linalg.cholesky(x), jnp.eye(3))
    text = lowering.stablehlo(program, platform)
    expected = {"cpu": "lapack_spotrf_ffi", "cuda": "cusolver_potrf_ffi"}
    assert expected.get(platform, "cholesky") in text
    assert "HloModule" in lowering.hlo(program, platform)


def test_gpu_means_cuda_if_there_is_none():
    assert lowering.platform_names(["gpu", "cpu", "CUDA"]) == ("cuda", "cpu")


def test_constants_are_written_in_full():
    table = jnp.arange(2000.0)
    text = lowering.hlo(trace(lambda i: table[i], 3))
    assert "1998, 1999}" in text
    assert "..." not in lowering.stablehlo(trace(lambda i: table[i], 3))


def test_sown_values_are_lowered_as_if_not_sown():
    def layer(w, x):
        return jnp.sin(variable(w, name="w")) * x

    def lowered(f):
        text = lowering.stablehlo(
            trace(lambda w, x: sow({"y": f(w, x)}, tag="t", name="n"), 1.0, x)
        )
        return re.sub(r'@\w+|@"[^"]*"', "@name", text)

    x = jnp.ones(3)
    assert lowered(nest(layer, scope="s")) == lowered(jax.jit(lambda w, x: jnp.sin(w) * x))


def test_keys_are_lowered_to_their_data():
    program = trace(lambda key: jax.random.bits(key, (2,)), jax.random.key(0))
    assert "%arg0: tensor<2xui32>" in lowering.stablehlo(program)


def test_donated_arguments_are_marked():
    program = trace(lambda x, y: (x + y, y), jnp.ones(3), jnp.ones(3))
    text = str(lowering.module(program, donated=[1]))
    assert "%arg1: tensor<3xf32> {tf.aliasing_output = 0" in text


def test_symbolic_sizes_are_kept_in_stablehlo_and_refused_in_hlo():
    (n,) = jax.export.symbolic_shape("n")
    program = trace(lambda x: x @ x, jax.ShapeDtypeStruct((n,), "float32"))
    assert "tensor<?xf32>" in lowering.stablehlo(program)
    for refused in (lowering.hlo, lowering.hlo_proto, lowering.hlo_optimized):
        with pytest.raises(UnsupportedError, match=r"takes x:f32\[n\], but HLO has no symbolic"):
            refused(program)


def prints(x):
    jax.debug.print("{}", x, ordered=True)
    return x


def checks(x):
    checkify.check(x > 0, "negative")
    return x


def test_callbacks_are_lowered_as_custom_calls():
    text = lowering.stablehlo(trace(prints, 1.0))
    assert "stablehlo.custom_call @xla" in text and "!stablehlo.token" in text


@pytest.mark.parametrize(
    ("fun", "args", "platform", "message"),
    [
        (jnp.linalg.eig, (jnp.eye(2),), "tpu", "lowered for tpu because of eig"),
        (prints, (1.0,), "cuda", "lowered for cuda because of debug_print at .*test_lowering.py"),
        (checks, (1.0,), None, "lowered for cpu because of check at .*test_lowering.py"),
    ],
)
def test_unsupported_equations_are_named(fun, args, platform, message):
    with pytest.raises(UnsupportedError, match=message):
        lowering.stablehlo(trace(fun, *args), platform)


def test_an_unknown_platform_is_refused(program):
    with pytest.raises(BackendError, match="does not lower for 'cudaa'") as caught:
        lowering.stablehlo(program, "cudaa")
    assert caught.value.hint == "did you mean 'cuda'?"


# --- named axes -------------------------------------------------------------------------------


AXES = [("i", 4), ("j", 2)]

COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "i"),
    "psum of the inner axis": lambda x: jax.lax.psum(x, "j"),
    "psum of both": lambda x: jax.lax.psum(x, ("i", "j")),
    "psum of both, swapped": lambda x: jax.lax.psum(x, ("j", "i")),
    "psum in groups": lambda x: jax.lax.psum(x, "i", axis_index_groups=[[0, 3], [2, 1]]),
    "pmax": lambda x: jax.lax.pmax(x, "i"),
    "pmin": lambda x: jax.lax.pmin(x, "j"),
    "pmean": lambda x: jax.lax.pmean(x, "i"),
    "all_gather": lambda x: jax.lax.all_gather(x, "i"),
    "all_gather, tiled": lambda x: jax.lax.all_gather(x, ("i", "j"), axis=0, tiled=True),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "i", 0, 1),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 3)]),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "i"),
    "axis_index": lambda x: x + jax.lax.axis_index("i"),
    "axis_index of both": lambda x: x + jax.lax.axis_index(("i", "j")),
    "axis_size": lambda x: x * jax.lax.axis_size("j"),
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jax.lax.psum(y, "j"), x),
    "in a jit": lambda x: jax.jit(lambda y: jax.lax.psum(y, "i") / 2)(x),
    "in a branch": lambda x: jax.lax.cond(
        jax.lax.psum(x.sum(), "i") > 0, lambda y: jax.lax.pmax(y, "i"), jnp.sin, x
    ),
}


def test_groups_are_those_of_the_axes():
    def sums(x):
        return tuple(jax.lax.psum(x, axes) for axes in ("i", "j", ("i", "j")))

    program = trace(sums, 1.0, axis_env=AXES)
    text = lowering.hlo(program)
    for groups in ("{{0,2,4,6},{1,3,5,7}}", "{{0,1},{2,3},{4,5},{6,7}}", "{{0,1,2,3,4,5,6,7}}"):
        assert f"replica_groups={groups}" in text
    assert "channel_id" not in text and "global_device_ids" not in text
    assert "mhlo.num_replicas = 8" in lowering.stablehlo(program)
    assert 'op_name="jit(sums)/psum"' in text


def test_an_unimplemented_collective_on_cpu_has_its_groups_too():
    def exchanged(x, offsets, sizes):
        return jax.lax.ragged_all_to_all(x, x, offsets, sizes, offsets, sizes, axis_name="i")

    table = jnp.arange(4)
    text = lowering.hlo(trace(exchanged, jnp.ones(4), table, table, axis_env=AXES), "cuda")
    (line,) = [line for line in text.splitlines() if "ragged-all-to-all(" in line]
    assert "replica_groups={{0,2,4,6},{1,3,5,7}}" in line and "channel_id" not in line


@pytest.mark.parametrize("name", COLLECTIVES)
def test_replicas_compute_the_same_as_a_mesh_of_devices(name):
    fun = COLLECTIVES[name]
    values = np.arange(96.0, dtype=np.float32).reshape(8, 4, 3)
    program = trace(fun, values[0], axis_env=AXES)
    mesh = jax.make_mesh((4, 2), ("i", "j"), (jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec(("i", "j"))
    mapped = jax.shard_map(
        lambda x: fun(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(run_on_replicas(program, values), jax.jit(mapped)(values))


def run_on_replicas(program, values):
    """Return a program's only result on each of eight replicas, for `values[n]` on the n-th."""
    devices = jax.devices("cpu")[:8]
    options = xla_client.CompileOptions()
    options.num_replicas = 8
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(8)[:, None])
    text = lowering.module(program, "cpu").operation.get_asm()
    executable = devices[0].client.compile_and_load(
        text, xla_client.DeviceList(tuple(devices)), options
    )
    # JAX takes the replicas' arguments for copies of one array, but here they differ.
    shards = [jax.device_put(v, d) for v, d in zip(values, devices, strict=True)]
    mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,), devices=devices)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    argument = jax.make_array_from_single_device_arrays(values[0].shape, everywhere, shards)
    (result,) = executable.execute_sharded([argument]).disassemble_into_single_device_arrays()
    return np.stack([np.asarray(shard) for shard in result])


def test_free_axes_are_not_compiled():
    program = trace(COLLECTIVES["psum"], 1.0, axis_env=AXES)
    with pytest.raises(UnsupportedError, match=r"free named axes \(i, j\)"):
        lowering.hlo_optimized(program)


def test_a_collective_without_a_lowering_is_named():
    program = trace(lambda x: jax.lax.pbroadcast(x, "i", 0), 1.0, axis_env=AXES)
    with pytest.raises(UnsupportedError, match="lowered for cpu because of pbroadcast at"):
        lowering.stablehlo(program, "cpu")
    assert "collective_broadcast" in lowering.stablehlo(program, "cuda")


# --- many programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_every_sample_is_lowered_as_jit_lowers_it(file):
    for sample in sample_programs(file):
        entry = getattr(sample, "entry", None)
        if entry is None:
            continue  # a gradient, for which there is no function to pass to jit
        if not any(isinstance(v, Static) for v in (*entry.args, *entry.kwargs.values())):
            jitted = entry.fun if hasattr(entry.fun, "lower") else jax.jit(entry.fun)
            expected = jitted.lower(*entry.args, **entry.kwargs).as_text()
            assert lowering.stablehlo(sample.program()) == expected, sample.name


@pytest.mark.proof
def test_random_programs_are_lowered():
    def prove(number, case):
        with case.setting():
            program = case.program()
            assert f"module @jit_{program.name}" in lowering.stablehlo(program)
            assert lowering.hlo_proto(program)

    prove_corpus(10, prove)


def prove(number, case):
    with case.setting():
        program = case.program()
        assert "func.func public @main" in lowering.stablehlo(program)
        assert lowering.hlo(program).startswith("HloModule")


@pytest.mark.proof
def test_some_of_jaxs_programs_are_lowered():
    for number, case in enumerate(harness_programs(every=1)[::500]):
        prove(number, case)


SWEEP = [Part("lowering: harnesses", Harnesses(), prove)]


def test_the_figures_of_an_error_out_of_memory_are_not_cut():
    instruction = "%f.1 = bf16[4096,4096]{1,0} custom-call(%x), config={" + "a" * 500 + "}"
    figures = "Scoped allocation with size 48.00M and limit 16.00M exceeded it by 32.00M."
    message = f"RESOURCE_EXHAUSTED: E1001:\nRan out of memory for {instruction}. {figures}"
    trace = "\nSee https://openxla.org/e for more.\n=== Source Location Trace: ===\nfile.cc:1\n"
    assert described(RuntimeError(message + trace)) == (
        f"RuntimeError: RESOURCE_EXHAUSTED: E1001: Ran out of memory for %f.1. {figures}"
    )
