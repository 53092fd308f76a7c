"""The view of a kernel is what its author wrote, also if a file only describes it."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import OpaqueEquations, rendered
from jaxprtool.ir.dataflow import Start, backward_slice, forward_slice
from jaxprtool.ir.equations import equations
from jaxprtool.ir.kernel_calls import KernelCall, kernel_call
from tests.share import shared_proofs

X = jnp.ones((16, 256))


def program_of(fun, *args, described=False):
    program = jaxprtool.trace(fun, *args)
    if described:
        text = rendered(program, "", opaque=OpaqueEquations.foreign)[0]
        text = text.replace("get_grid_indices=", "unknown_option=1, get_grid_indices=")
        program = parse_program(text, "p.jaxpr")
    return program


def kernel_of(program):
    return next(filter(None, map(kernel_call, equations(program.jaxpr))))


def scaled(order, x, y):
    def kernel(order_ref, x_ref, y_ref, o_ref, acc_ref, sem):
        acc_ref[...] = x_ref[...] + y_ref[...]
        o_ref[...] = acc_ref[...]

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(("rows", 4), ("columns", 2)),
        in_specs=[
            pl.BlockSpec((4, 128), lambda i, j, order: (order[i], j), pipeline_mode=pl.Buffered(3)),
            pl.BlockSpec((None, 4, pl.Element(128)), lambda i, j, order: (0, i, 128 * j)),
        ],
        out_specs=pl.BlockSpec((4, 128), lambda i, j, _: (i, j)),
        scratch_shapes=[pltpu.VMEM((4, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    semantics = ("parallel", pltpu.ARBITRARY)
    params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=1 << 20)
    cost = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=5)
    options = {"compiler_params": params, "cost_estimate": cost, "input_output_aliases": {1: 0}}
    call = pl.pallas_call(kernel, x, grid_spec=grid, name="scaled", interpret=True, **options)
    return call(order, x, y)


@pytest.mark.parametrize("described", [False, True])
def test_a_kernel_has_its_grid_blocks_scratch_and_options(described):
    program = program_of(scaled, jnp.arange(4), X, X[None], described=described)
    kernel = kernel_of(program)
    assert isinstance(kernel, KernelCall) and kernel.interpret and kernel.backend == "tpu"
    assert [(axis.name, axis.size) for axis in kernel.grid] == [("rows", 4), ("columns", 2)]
    assert [axis.semantics for axis in kernel.grid] == ["parallel", "arbitrary"]
    assert kernel.steps == 8 and kernel.aliases == {0: 1}
    assert kernel.vmem_limit_bytes == 1 << 20 and kernel.cost_estimate.flops == 7
    [order] = kernel.prefetched
    assert order.value is kernel.eqn.invars[0] and order.ref.aval.shape == (4,)
    x, y = kernel.inputs
    assert x.value is kernel.eqn.invars[1] and x.buffers == 3 and not x.is_whole
    assert x.axes == ({0}, {1}) and x.scalars == ({0}, set())
    assert y.sizes == (1, 4, 128) and y.axes == (set(), {0}, {1})
    assert [dim.kind for dim in y.dims] == ["Squeezed", "Blocked", "Element"]
    [out] = kernel.outputs
    assert out.value is kernel.eqn.outvars[0] and out.array.shape == X.shape
    assert [(s.array.shape, s.memory_space) for s in kernel.scratch] == [
        ((4, 128), "vmem"),
        ((), "semaphore_mem"),
    ]
    refs = [x.ref for x in (*kernel.prefetched, *kernel.blocks, *kernel.scratch)]
    assert refs == [*kernel.body.invars]


def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def test_a_size_of_the_grid_may_be_an_operand_and_an_axis_of_a_batch():
    spec = pl.BlockSpec((4, 256), lambda i: (i, 0))

    def function(n, x):
        options = {"in_specs": [spec], "out_specs": spec, "interpret": True}
        params = plgpu.CompilerParams(num_warps=2)
        return pl.pallas_call(double, x, grid=(n,), compiler_params=params, **options)(x)

    kernel = kernel_of(program_of(jax.vmap(function, (None, 0)), 4, jnp.stack([X, X])))
    assert kernel.backend == "triton" and kernel.steps is None
    assert [axis.is_batch for axis in kernel.grid] == [True, False]
    assert [axis.operand for axis in kernel.grid] == [None, kernel.eqn.invars[0]]
    assert kernel.inputs[0].axes == ({0}, {1}, set())
    assert kernel.inputs[0].value is kernel.eqn.invars[1]


def test_a_kernel_without_a_grid_runs_once_on_whole_arrays():
    kernel = kernel_of(program_of(lambda x: pl.pallas_call(double, x, interpret=True)(x), X))
    assert kernel.steps == 1 and kernel.name == "double" and kernel.backend is None
    assert all(block.is_whole for block in kernel.blocks)
    assert [block.name for block in kernel.blocks] == ["x_ref", "o_ref"]


# --- what works through the view ------------------------------------------------------------------


def two_results(x, y):
    """A kernel with an accumulator, an input and an output for each of two results."""

    def kernel(x_ref, y_ref, sum_ref, shifted_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        sum_ref[...] = acc_ref[...]
        shifted_ref[...] = y_ref[...] + 1

    spec = pl.BlockSpec((4, 256), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        (x, y),
        grid=(4,),
        in_specs=[spec, spec],
        out_specs=(spec, spec),
        scratch_shapes=[pltpu.VMEM((4, 256), jnp.float32)],
        interpret=True,
    )(x, y)


Y = jnp.arange(16 * 256.0).reshape(16, 256)


@pytest.mark.parametrize("result", [0, 1])
def test_the_results_of_a_kernel_depend_on_what_is_written_to_them(result):
    program = jaxprtool.trace(two_results, X, Y)
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    part = backward_slice(jaxpr, Start([(jaxpr, jaxpr.outvars[result])]))
    assert part.arguments == ((True, False), (False, True))[result]
    names = Counter(run.jaxpr.eqns[i].primitive.name for run in part.runs() for i in run.inside)
    assert names["cond"] == 1 - result and names["swap"] == (3, 1)[result]
    reached = forward_slice(jaxpr, Start([(jaxpr, jaxpr.invars[result])]))
    assert reached.results == ((True, False), (False, True))[result]


@pytest.mark.parametrize("result", [0, 1])
def test_dce_removes_unused_results_of_a_kernel_and_the_inputs_of_them(result):
    program = jaxprtool.trace(lambda x, y: two_results(x, y)[result], X, Y)
    cleaned = program.apply("dce")
    kernel = kernel_of(cleaned)
    assert len(kernel.outputs) == 1 and len(kernel.scratch) == 1
    assert [block.name for block in kernel.inputs] == [["x_ref"], ["x_ref", "y_ref"]][result]
    assert jnp.array_equal(cleaned(X, Y), program(X, Y))


def test_dce_keeps_the_memory_that_a_result_shares_with_an_input():
    def kernel(x_ref, y_ref, o_ref, p_ref):
        o_ref[...] = 2 * x_ref[...]
        p_ref[...] = p_ref[...] + 1

    def function(x, y):
        options = {"input_output_aliases": {1: 1}, "interpret": True}
        return pl.pallas_call(kernel, (x, y), **options)(x, y)

    for result, aliases in ((0, {}), (1, {0: 0})):
        program = jaxprtool.trace(lambda x, y, i=result: function(x, y)[i], X, Y)
        cleaned = program.apply("dce")
        assert kernel_of(cleaned).aliases == aliases
        assert jnp.array_equal(cleaned(X, Y), program(X, Y))


def test_a_kernel_in_a_file_has_its_names():
    program = jaxprtool.trace(two_results, X, Y)
    kernel = kernel_of(parse_program(rendered(program, "")[0], "p.jaxpr"))
    assert kernel.name == "kernel" and kernel.scratch[0].name == "acc_ref"
    assert "acc_ref=f32[4,256] scratch in vmem" in str(program)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_derivative_that_jax_does_not_have_names_the_kernel(transform):
    def with_rule(x):
        function = jax.custom_vjp(lambda x: pl.pallas_call(double, x, interpret=True)(x))
        function.defvjp(lambda x: (2 * x, None), lambda _, t: (2 * t,))
        return function(x)

    program = jaxprtool.trace(lambda x: two_results(with_rule(x), x)[0].sum(), X)
    with pytest.raises(UnsupportedError, match="the kernel 'kernel', the pallas_call at ") as error:
        program.apply(transform)
    assert "custom_vjp" in error.value.hint


@pytest.mark.parametrize("axes", shared_proofs([((0, None),), ((0, 0),), ((None, 0),)]))
def test_a_batched_kernel_with_prefetched_scalars_is_that_of_vmap(axes):
    def function(order, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[pl.BlockSpec((4, 256), lambda i, order: (order[i], 0))],
            out_specs=pl.BlockSpec((4, 256), lambda i, order: (i, 0)),
        )
        call = pl.pallas_call(lambda _, x, o: double(x, o), x, grid_spec=spec, interpret=True)
        return call(order, x)

    order = jnp.array([2, 0, 3, 1])
    batched = jaxprtool.trace(function, order, Y).apply(f"batch(in_axes={axes}, axis_size=2)")
    arrays = jnp.stack([order, order[::-1]]), jnp.stack([Y, Y + 1])
    args = [a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True)]
    assert jnp.array_equal(batched(*args), jax.vmap(function, axes)(*args))


def test_a_folded_start_of_a_slice_is_one_that_mosaic_compiles():
    def kernel(x_ref, o_ref):
        start = jnp.int32(4) * jax.lax.convert_element_type(True, jnp.int32)
        o_ref[pl.ds(start, 4)] = x_ref[pl.ds(start, 4)]

    program = jaxprtool.trace(lambda x: pl.pallas_call(kernel, x)(x), X).apply("fold")
    names = [eqn.primitive.name for eqn in kernel_of(program).body.eqns]
    assert names == ["get", "swap"]
    jax.jit(program).trace(X).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("passes", ["fold", "-O2"])
def test_no_pass_puts_an_array_into_a_call_in_a_kernel(passes):
    """A kernel takes arrays as operands only: JAX's interpreter of TPUs ignores constants."""

    def kernel(x_ref, o_ref):
        @jax.jit
        def masked(x):
            return jnp.where(jnp.arange(128) % 3 == 0, x, 0)

        o_ref[...] = jax.lax.fori_loop(0, 3, lambda i, x: masked(x) + i, x_ref[...])

    def function(x):
        return pl.pallas_call(kernel, x, interpret=pltpu.InterpretParams())(x)

    x = jnp.ones((8, 128))
    program = jaxprtool.trace(function, x)
    assert jnp.array_equal(program.apply(passes)(x), program(x))
