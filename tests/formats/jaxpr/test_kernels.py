"""Kernels of Pallas in files: what is written is what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

import jaxprtool
from jaxprtool import jaxcompat, trace
from jaxprtool.errors import ProgramFileError, UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import (
    OpaqueEquations,
    program_file_text,
    rendered,
    write_program_files,
)
from jaxprtool.ir.custom_rules import with_stubs
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.render.terminal.listing import ShowOptions, listing
from tests.formats.python.emitting import emitted
from tests.programs.pallas_ops import CASES
from tests.share import first_and_proofs

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
ROWS = pl.BlockSpec((4, 128), lambda i: (i, 0))


def call(kernel, *args, **options):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return pl.pallas_call(kernel, shape, **{"interpret": True, **options})(*args)


def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def with_scratch(x):
    def kernel(x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...] + pl.num_programs(0)

    params = pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=1 << 20)
    cost = pl.CostEstimate(flops=3, transcendentals=0, bytes_accessed=5)
    return call(
        kernel,
        x,
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(1))],
        out_specs=pl.BlockSpec((pl.Element(4), 128), lambda i: (4 * i, 0)),
        scratch_shapes=[pltpu.VMEM((4, 128), jnp.float32)],
        compiler_params=params,
        cost_estimate=cost,
    )


def with_copies(x):
    def kernel(x_ref, o_ref, semaphore):
        def body(row_ref):
            row_ref[...] = x_ref[pl.ds(0, 4)]
            copy = pltpu.make_async_copy(row_ref, o_ref.at[pl.ds(4, 4)], semaphore)
            copy.start()
            copy.wait()

        pltpu.sync_copy(x_ref, o_ref)
        pl.run_scoped(body, pltpu.VMEM((4, 128), jnp.float32))

    spec = pl.BlockSpec(memory_space=pl.ANY)
    return call(
        kernel, x, in_specs=[spec], out_specs=spec, scratch_shapes=[pltpu.SemaphoreType.DMA]
    )


def with_prefetch(x):
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 128), lambda i, order: (order[i], 0))],
        out_specs=pl.BlockSpec((4, 128), lambda i, order: (i, 0)),
    )
    return call(
        lambda order, x, o: double(x, o), jnp.array([1, 0], jnp.int32), x, grid_spec=grid_spec
    )


def for_triton(x):
    params = plgpu.CompilerParams(num_warps=2, num_stages=3)
    grid = {"grid": (2,), "in_specs": [ROWS], "out_specs": ROWS}
    return jax.vmap(lambda x: call(double, x, compiler_params=params, **grid))(x[None])


@pytest.mark.parametrize(
    "function", [with_scratch, with_copies, with_prefetch, for_triton], ids=lambda f: f.__name__
)
def test_a_kernel_that_is_read_is_the_kernel_that_was_written(function):
    program = trace(function, X)
    read = parse_program(program_file_text(program), "p.jaxpr")
    assert not any(map(jaxcompat.is_opaque, equations(read.jaxpr)))
    assert jaxprtool.equivalent(read, program)
    assert np.array_equal(read(X), program(X))
    recorded = parse_program(rendered(program, "", opaque=OpaqueEquations.foreign)[0], "p.jaxpr")
    assert jaxprtool.equivalent(recorded, program)


def test_a_kernel_of_another_release_is_opaque_in_a_recorded_program_and_refused_in_a_file():
    program = trace(with_scratch, X)
    for opaque in (OpaqueEquations.none, OpaqueEquations.foreign):
        text = rendered(program, "", opaque=opaque)[0]
        kept = text.replace("vmem_limit_bytes=", "new_flag=False, vmem_limit_bytes=")
        assert jaxprtool.equivalent(parse_program(kept, "p.jaxpr"), program)
        changed = text.replace("vmem_limit_bytes=", "new_limit=")
        if opaque is OpaqueEquations.none:
            with pytest.raises(ProgramFileError, match="compiler_params has a value that this JAX"):
                parse_program(changed, "p.jaxpr")
        else:
            read = parse_program(changed, "p.jaxpr")
            assert jaxcompat.is_opaque(read.jaxpr.eqns[-1]) and "new_limit" in str(read)


def test_the_body_of_an_opaque_equation_has_the_refs_that_it_closes_over(monkeypatch):
    monkeypatch.setattr(jaxcompat, "kernel_path", lambda value: None)
    text = rendered(trace(with_copies, X), "", opaque=OpaqueEquations.foreign)[0]
    monkeypatch.undo()
    [kernel] = [e for e in parse_program(text, "p.jaxpr").jaxpr.eqns if jaxcompat.is_opaque(e)]
    scoped = [e for e in kernel.params["jaxpr"].eqns if e.primitive.name == "run_scoped"]
    bodies = [jaxcompat.open_jaxpr(eqn.params["jaxpr"]) for eqn in scoped]
    assert all(len(b.invars) == len(e.invars) + 1 for b, e in zip(bodies, scoped, strict=True))
    assert all("dma_start" in str(body) for body in bodies)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_opaque_equation_on_refs_is_refused_by_its_line(monkeypatch):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    def on_cores(refs):
        pl.core_map(mesh)(lambda: pltpu.sync_copy(*refs))

    def function(x):
        return pl.run_state(on_cores)((x, jnp.zeros_like(x)))[1]

    monkeypatch.setattr(jaxcompat, "kernel_path", lambda value: None)
    text = rendered(trace(function, X), "", opaque=OpaqueEquations.foreign)[0]
    read = parse_program(text, "p.jaxpr")
    with pytest.raises(UnsupportedError, match=r"_map at .*test_kernels\.py:\d+ is opaque"):
        read(X)


@pytest.mark.parametrize("function", [with_scratch, with_prefetch])
def test_a_kernel_is_written_as_python(function):
    program = trace(function, X)
    source, again = emitted(program)
    assert "pl.pallas_call(" in source and "pl.BlockSpec(" in source
    assert structural_difference(program, again) is None
    assert np.array_equal(again(X), program(X))


def test_python_has_no_kernel_whose_parts_have_no_public_names():
    batched = jax.vmap(for_triton)
    for function, part in ((with_copies, "scratch semaphore"), (batched, "axis of its grid")):
        with pytest.raises(UnsupportedError, match=f"pallas_call at .*{part}"):
            jaxprtool.to_python(trace(function, jnp.stack([X, X]) if function is batched else X))


def test_a_file_names_only_objects_of_kernels():
    text = program_file_text(trace(lambda x: call(double, x), X))
    for path in ("os.getcwd", "jax._src.pallas.core.jax.jit", "jax._src.pallas.core.MemorySpace"):
        edited = text.replace("jax._src.pallas.core.GridMapping", path)
        with pytest.raises(ProgramFileError, match="grid_mapping has a value that this JAX"):
            parse_program(edited, "p.jaxpr")


# --- the kernels that ship with JAX ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", first_and_proofs(CASES))
def test_a_kernel_that_ships_with_jax_is_recorded_shown_and_run_to_the_bit(name, tmp_path):
    case, path = CASES[name](), tmp_path / "p.jaxpr"
    with case.context():
        program = trace(case.function, *case.args)
    write_program_files([(program, path)], "stub", opaque=OpaqueEquations.foreign)
    read = jaxprtool.read(path)
    if not any(map(jaxcompat.is_opaque, equations(read.jaxpr))):
        stubs = program.replace(jaxpr=with_stubs(program.jaxpr))
        assert jaxprtool.equivalent(read, stubs)
    else:  # inline PTX; an anonymous axis, from JAX 0.12 on
        assert name in ("gpu.blackwell_matmul", "gpu.blackwell_ragged_dot")
    assert "GridMapping" not in listing(read, ShowOptions(terse=True)).plain()
    if case.runs:
        expected = jax.tree.leaves(program(*case.args))
        for other in (read, program.apply("-O2")):
            pairs = zip(jax.tree.leaves(other(*case.args)), expected, strict=True)
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
