"""The view of a kernel is what its author wrote, also if a file only describes it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

import jaxprtool
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import OpaqueEquations, rendered
from jaxprtool.ir.equations import equations
from jaxprtool.ir.kernel_calls import KernelCall, kernel_call

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
