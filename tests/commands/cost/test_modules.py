"""The cost of HLO modules, held against XLA's own count and against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxlib import xla_client

from jaxprtool.commands.cost import modules
from jaxprtool.commands.cost.modules import MODULE_BY, kernel_runs, module_cost
from jaxprtool.ir.hlo.module import read_module
from jaxprtool.jaxcompat.lowering import HloSyntaxError, parsed_hlo
from tests.programs import harness_programs
from tests.programs.modules import OLD, TILED, stored

W, X = jnp.ones((4, 4)), jnp.ones((8, 4))


def scanned(w, x):
    def body(carry, row):
        return jnp.tanh(carry @ w + row), carry.sum()

    return lax.scan(body, x[:2], x)[1]


def agrees(case):
    """Return how the cost of a case's module compares with XLA's, in a word."""
    (module,) = jax.jit(case.fun).lower(*case.args).compile().runtime_executable().hlo_modules()
    theirs = xla_client._xla.hlo_module_cost_analysis(jax.devices()[0].client, module)
    read = read_module(module.as_serialized_hlo_module_proto())
    opcodes = {op.opcode for op in read.instructions.values()}
    if opcodes & {"convert", "sort", "fft", "custom-call", "rng-bit-generator", "reduce-precision"}:
        return "counted otherwise"
    if any(op.shape.dtype.startswith("c") for op in read.instructions.values()):
        return "complex numbers"
    ours = module_cost(read).total.work
    for mine, name in ((ours.flops, "flops"), (ours.transcendentals, "transcendentals")):
        assert mine == pytest.approx(theirs.get(name, 0), rel=0.01), (case.name, name)
    assert ours.bytes <= 1.01 * theirs.get("bytes accessed", 0) + 64, case.name
    return "agrees"


def test_modules_of_harnesses_cost_what_xla_counts(monkeypatch):
    # XLA counts one iteration of each loop.
    monkeypatch.setattr(modules, "while_trip_count", lambda module, loop: 1)
    words = [agrees(case) for case in harness_programs(1)[::250]]
    assert words.count("agrees") > 0.5 * len(words)


@pytest.mark.sweep
def test_modules_of_all_harnesses_cost_what_xla_counts(monkeypatch):
    monkeypatch.setattr(modules, "while_trip_count", lambda module, loop: 1)
    words = [agrees(case) for case in harness_programs(1)]
    assert words.count("agrees") > 0.5 * len(words)


def test_a_loop_counts_as_often_as_it_runs():
    module = stored(scanned, W, X).module
    work = module_cost(module).total.work
    assert work.transcendentals == 64 and work.flops >= 8 * 2 * 2 * 4 * 4
    assert max(kernel_runs(module).values()) == 8


def test_slices_and_updates_move_their_own_elements():
    def rows(x, y, i):
        return lax.dynamic_update_slice(x, y, (i, 0)), lax.dynamic_slice(x, (i, 0), (1, 1024))

    x, y = jnp.ones((1024, 1024)), jnp.ones((1, 1024))
    module = stored(rows, x, y, 3, donate_argnums=0).module
    by_name = module_cost(module, "kernel").groups
    assert all(group.work.bytes <= 3 * y.nbytes for group in by_name if "copy" not in group.name)


def test_lines_have_what_is_computed_on_them():
    lines = module_cost(stored(scanned, W, X).module).groups
    first = scanned.__code__.co_firstlineno
    products = [group for group in lines if group.line.line == first + 2]
    assert products[0].work.transcendentals == 64
    assert products[0].products["f32"] == 8 * 2 * 2 * 4 * 4


@pytest.mark.parametrize("by", MODULE_BY)
def test_groups_add_up_to_the_whole(by):
    cost = module_cost(stored(scanned, W, X).module, by)
    groups = [group for group in cost.groups if len(group.path) < 2]
    assert sum(group.work.flops for group in groups) == cost.total.work.flops
    assert sum(group.work.bytes for group in groups) == cost.total.work.bytes


def test_one_branch_runs():
    def chosen(i, x):
        return lax.switch(i, [lambda x: x, lambda x: jnp.sin(x @ x)], x)

    total = module_cost(stored(chosen, 1, W).module).total
    assert total.work.transcendentals == 16 and total.least.transcendentals == 0


def test_a_module_of_another_release_has_lines(tmp_path, cli):
    (tmp_path / "old.hlo").write_text(OLD)
    found = cli("cost", str(tmp_path / "old.hlo"))
    assert found.code == 0 and "step.py:7" in found.out and "256" in found.out
    assert "tanh.1: tanh" in cli("cost", str(tmp_path / "old.hlo"), "--by", "kernel").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "dce"], "is an HLO module: -p does not apply"),
        (["--args", "f32[3]"], "is an HLO module: --args does not apply"),
        (["--measure"], "need a program, not an HLO module"),
        (["--by", "argument"], "--by argument"),
    ],
)
def test_options_of_programs_are_refused(tmp_path, cli, options, message):
    (tmp_path / "old.hlo").write_text(OLD)
    found = cli("cost", str(tmp_path / "old.hlo"), *options)
    assert found.code == 2 and message in found.err and found.out == ""


def test_other_commands_say_which_read_modules(tmp_path, cli):
    (tmp_path / "old.hlo").write_text(OLD)
    found = cli("nans", str(tmp_path / "old.hlo"))
    assert found.code == 2 and "is an HLO module" in found.err and "cost, diff, memory" in found.err


SHARED = """\
HloModule jit_shared

twice {
  p = f32[8] parameter(0)
  ROOT sine.1 = f32[8] sine(p)
}

ENTRY main {
  x = f32[8] parameter(0)
  a = f32[8] call(x), to_apply=twice
  b = f32[8] call(a), to_apply=twice
  ROOT c = f32[8] call(b), to_apply=twice
}
"""


def test_a_function_that_is_called_again_counts_again():
    module = read_module(parsed_hlo(SHARED))
    assert {op.name: count for op, count in kernel_runs(module).items()} == {"sine.1": 3}
    assert module_cost(module).total.work.transcendentals == 3 * 8


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (
            "a = f32[11,5] parameter(0) b = f32[3,5,7] parameter(1) c = u32[3] parameter(2) "
            "ROOT d = f32[11,7] ragged-dot(a, b, c), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}",
            2 * 11 * 5 * 7,
        ),
        (
            "a = f32[11,5] parameter(0) b = f32[11,7] parameter(1) c = u32[3] parameter(2) "
            "ROOT d = f32[3,5,7] ragged-dot(a, b, c), lhs_contracting_dims={0}, "
            "rhs_contracting_dims={0}, lhs_ragged_dims={0}",
            2 * 11 * 5 * 7,
        ),
        (
            "a = f32[2,10] parameter(0) b = f32[10,2] parameter(1) s = f32[2,2] parameter(2) "
            "t = f32[2,2] parameter(3) ROOT d = f32[2,2] scaled-dot(a, b, s, t), "
            "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 2 * 10 * 2,
        ),
        ("a = f32[2,6,6] parameter(0) ROOT l = f32[2,6,6] cholesky(a), lower=true", 2 * 6**3 // 3),
        (
            "a = c64[6,6] parameter(0) b = c64[6,3] parameter(1) "
            "ROOT x = c64[6,3] triangular-solve(a, b), left_side=true, transpose_a=NO_TRANSPOSE",
            4 * 6 * 6 * 3,
        ),
        (
            "a = f32[8,16] parameter(0) z = f32[] constant(0) ROOT w = f32[8,16] "
            "reduce-window(a, z), window={size=1x31 pad=0_0x15_15}, to_apply=sum",
            8 * 15,
        ),
        (
            "a = f32[8,16] parameter(0) z = f32[] constant(0) ROOT w = f32[8,16] "
            "reduce-window(a, z), window={size=1x3 pad=0_0x1_1}, to_apply=sum",
            8 * 16 * 2,
        ),
        ("a = f32[8] parameter(0) ROOT m = f32[8] map(a), dimensions={0}, to_apply=mapped", 2 * 8),
    ],
    ids=["rows", "sums", "scaled", "Cholesky", "triangular", "all", "windows", "map"],
)
def test_products_and_solvers_count_what_they_compute(text, flops):
    function = "p = f32[] parameter(0) s = f32[] add(p, p) ROOT r = f32[] multiply(s, p)"
    mapped = "p = f32[] parameter(0) ROOT f = f32[] fusion(p), kind=kLoop, calls=fused"
    added = "p = f32[] parameter(0) q = f32[] parameter(1) ROOT s = f32[] add(p, q)"
    bodies = {"fused": function, "mapped": mapped, "sum": added, "ENTRY main": text}
    text = "HloModule m " + " ".join(f"{name} {{ {body} }}" for name, body in bodies.items())
    try:
        module = read_module(parsed_hlo(text))
    except HloSyntaxError as error:
        assert "scaled-dot" in error.reason
        pytest.skip("this jaxlib has no scaled-dot")
    assert module_cost(module).total.work.flops == flops


def test_memory_on_the_chip_is_no_traffic():
    # `near` is on the chip: of its traffic, only what x, y and z have is in the main memory.
    work = module_cost(read_module(parsed_hlo(TILED))).total.work
    assert (work.bytes_read, work.bytes_written) == (2 * 60, 2 * 60)


def test_a_scatter_of_two_arrays_reads_no_array():
    def written(x, y, i, u):
        numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
        return lax.scatter(x, i, u, numbers) + y

    x, i, u = jnp.ones(4096), jnp.arange(4)[:, None], jnp.ones(4)
    lowered = jax.jit(written).lower(x, x, i, u).compiler_ir("hlo")
    module = read_module(lowered.as_serialized_hlo_module_proto())
    scatters = [g for g in module_cost(module, "kernel").groups if g.name.startswith("scatter")]
    assert all(group.work.bytes < 200 for group in scatters) and scatters
