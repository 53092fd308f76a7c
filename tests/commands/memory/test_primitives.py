"""The estimate counts what is inside a primitive, as XLA allocates it, or names the primitive."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat, memory, trace
from jaxprtool.commands.memory.table import heading_text, peak_text
from tests.benchmarks.bench_memory_primitives import compared, programs
from tests.programs.megabytes import PROGRAMS, gradient

MIB = 1 << 20

#: Programs that compile fast, and those that also do as gradients.
SAMPLE = (
    *("ragged_dot", "custom_vmap", "equal constants", "roll", "roll by a known shift"),
    *("cumsum over axis 1", "cumlogsumexp over axis 1", "gather of pairs", "circuit", "svd"),
    *("convolution of signals", "complex inverse", "select and sort", "pad"),
)
GRADIENTS = (
    *("max pooling", "convolution", "stack", "take_along_axis", "roll of two axes"),
    *("dot_general, transposed", "circuit", "kron", "outer"),
)


@pytest.fixture(autouse=True)
def optimized():
    """Compile as users do: the tests disable most of XLA's optimizations."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


@pytest.mark.parametrize("name", [*SAMPLE, *(f"{each}, gradient" for each in GRADIENTS)])
def test_the_estimate_is_within_a_factor_of_one_and_a_half(name):
    function, types = PROGRAMS[name.removesuffix(", gradient")]
    if name.endswith(", gradient"):
        function, types = gradient(function, types)
    row = compared(name, trace(function, *types))
    assert row.agrees and not row.unknown, row


def test_top_k_of_integers_sorts_a_copy():
    types = (jax.ShapeDtypeStruct((512, 1024), jnp.int32),)
    row = compared("", trace(lambda x: lax.top_k(x, 4), *types))
    assert row.agrees and not row.unknown, row


def test_copies_of_small_floats_that_only_xla_for_the_cpu_makes_are_named():
    def half(dtype, rank=2):
        return jax.ShapeDtypeStruct((64,) * rank, dtype)

    def named(function, *types):
        return dict(memory(trace(function, *types)).unknown)

    f16, bf16 = half(jnp.float16), half(jnp.bfloat16)
    assert named(jnp.matmul, f16, f16) == {"dot_general of float16 on the CPU": 1}
    by_columns = named(partial(jnp.einsum, "ki,kj->ij"), bf16, bf16)
    assert by_columns == {"dot_general of bfloat16 on the CPU": 1}
    into_f32 = partial(jnp.matmul, preferred_element_type=jnp.float32)
    assert not named(into_f32, bf16, bf16) and not named(jnp.matmul, half("float32"), half("int8"))
    convolve = named(lambda x, k: lax.conv(x, k, (1,), "SAME"), *(half(jnp.bfloat16, 3),) * 2)
    assert convolve == {"conv_general_dilated of bfloat16 on the CPU": 1}


def test_lgamma_is_named_where_its_coefficients_are_looked_up():
    found = memory(trace(lax.igamma, jnp.ones(4096), jnp.ones(4096)))
    assert found.unknown == ({"lgamma": 1} if jaxcompat.lgamma_reads_tables() else {})


@pytest.mark.sweep
def test_nineteen_of_twenty_programs_are_within_the_factor_or_name_what_is_unknown():
    rows = [compared(name, program) for name, program in programs()]
    apart = [row for row in rows if not row.agrees and not row.unknown]
    assert len(rows) > 400 and len(apart) <= len(rows) / 20, apart


def unknown(x):
    return jax.ffi.ffi_call("somewhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x) + 1


def test_a_primitive_about_which_nothing_is_known_is_named_in_the_first_line():
    found = memory(trace(unknown, jnp.ones((512, 512))))
    assert found.unknown == {"ffi_call": 1} and found.peak_bytes >= 2 * MIB
    first = peak_text(found).partition(", peak at")[0]
    assert first == "unknown: 2.0 MiB, not counted inside: ffi_call (--compiled counts it)"


def test_unknown_primitives_in_loops_and_dead_ones():
    def looped(x):
        return lax.scan(lambda c, _: (unknown(c), None), x, length=3)[0]

    x = jnp.ones((8, 8))
    assert memory(trace(looped, x)).unknown == {"ffi_call": 1}
    assert memory(trace(lambda x: (unknown(x), x)[1], x)).unknown == {}


def test_a_compiled_peak_repeats_what_the_estimate_does_not_count():
    sizes = {"estimate_is_whole": False, "unknown": {"ffi_call": 2}}
    program = trace(lambda x: jnp.sin(x) @ x, jnp.ones((64, 64)))
    found = jaxprtool.compiled_memory(program)
    assert "not counted" not in heading_text(found)
    text = heading_text(found.__class__(**{**vars(found), **sizes}))
    assert text.endswith("estimated, not counted inside: ffi_call")


def test_a_budget_says_what_is_not_counted():
    with pytest.raises(AssertionError, match="not counted inside: ffi_call"):
        jaxprtool.testing.assert_budget(unknown, jnp.ones((512, 512)), peak_bytes="1MiB")


def test_a_workspace_has_the_line_that_needs_it():
    found = memory(trace(lambda x: lax.cumsum(x, axis=1), jnp.ones((512, 4096))))
    (workspace,) = [live for live in found.live if live.kind == "workspace"]
    assert workspace.bytes >= 8 * MIB and "test_primitives.py" in workspace.source
    assert found.peak_bytes == sum(live.bytes for live in found.live)


def test_a_custom_vmap_function_keeps_its_lines():
    found = memory(trace(*[PROGRAMS["custom_vmap"][0], *PROGRAMS["custom_vmap"][1]]))
    values = [live.source for live in found.live if live.kind == "value"]
    assert values and all("megabytes.py" in source for source in values)


def test_constants_count_once_by_content_at_every_depth():
    def table():
        return jnp.arange(256.0 * 256).reshape(256, 256)

    with jax.ensure_compile_time_eval():
        one, other = table(), table()

    def function(x):
        return jax.jit(lambda x: x @ one)(x @ other) @ one

    found = memory(trace(function, jnp.ones((8, 256))))
    assert found.constant_bytes == one.nbytes
    assert memory(trace(lambda x: x @ one + x @ (one + 0), jnp.ones((8, 256)))).constant_bytes
