"""Two HLO modules are compared by line and by kernel."""

import json

import jax.numpy as jnp
import pytest
from jax import lax

from jaxprtool.commands.diff.modules import (
    LineChange,
    ModuleFigures,
    causes_first,
    diff_modules,
)
from jaxprtool.commands.diff.table import module_diff_table
from jaxprtool.formats.hlo import stored_module
from jaxprtool.ir.frames import frames_now
from tests.programs.modules import OLD, TILED, stored

X = jnp.ones((64, 64))


def plain(x, w):
    y = jnp.tanh(x @ w)
    return (y * y).sum(axis=0) + 1


def line(function, offset):
    return function.__code__.co_firstlineno + offset


def test_two_compilations_of_a_program_are_the_same():
    found = diff_modules(stored(plain, X, X), stored(plain, X, X))
    assert found.is_same and found.lines == found.kernels == ()
    assert found.before == found.after


def test_names_and_lines_do_not_make_a_difference():
    def other(x, w):
        y = jnp.tanh(x @ w)
        return (y * y).sum(axis=0) + 1

    assert diff_modules(stored(plain, X, X), stored(other, X, X)).is_same


def with_fault(fault):
    """Return `plain` with a fault that XLA cannot remove, on its first line."""

    def plain(x, w):
        y = jnp.tanh(fault(x @ w))
        return (y * y).sum(axis=0) + 1

    return plain


FAULTS = {
    "a cast": lambda y: jnp.sort(y.astype("float16")).astype("float32"),
    "a loop": lambda y: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), y),
    "a gather": lambda y: y[jnp.argsort(y[:, 0])],
    "a sort": lambda y: jnp.sort(y),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_of_a_fault_is_the_first(name):
    without = with_fault(lambda y: y)
    found = diff_modules(stored(without, X, X), stored(with_fault(FAULTS[name]), X, X))
    assert not found.is_same
    first = found.lines[0]
    assert first.place.line in (line(without, 1), line(FAULTS[name], 0))
    assert first.after.bytes > first.before.bytes


def test_a_lost_donation_is_a_difference():
    def update(x):
        return x + jnp.sort(x)

    found = diff_modules(stored(update, X, donate_argnums=0), stored(update, X))
    assert not found.is_same
    assert (found.before.donated_bytes, found.after.donated_bytes) == (X.nbytes, 0)


def test_the_arguments_of_a_lost_donation_are_the_first_row():
    def update(state):
        return {name: x + 1 for name, x in state.items()}

    state = {"w": X, "b": X}
    found = diff_modules(stored(update, state, donate_argnums=0), stored(update, state))
    assert found.lost_donations == ("state['b']", "state['w']") and not found.new_donations
    rows = module_diff_table(found, 100).plain().split("─\n")[1].splitlines()
    assert rows[0].strip() == "-32.0 KiB   no longer donated: state['b'], state['w']"


#: `OLD` with a new operation in line 9, for which XLA copies the result of line 7 twice.
COPIED = OLD.replace(
    "ROOT tanh.1 = f32[8,4]{1,0} tanh(dot.1)",
    """copy.1 = f32[8,4]{1,0} copy(dot.1), metadata={source_file="/home/me/step.py" source_line=7}
  copy.2 = f32[8,4]{1,0} copy(copy.1), metadata={source_file="/home/me/step.py" source_line=7}
  floor.1 = f32[8,4]{1,0} floor(copy.2), metadata={source_file="/home/me/step.py" source_line=9}
  ROOT tanh.1 = f32[8,4]{1,0} tanh(floor.1)""",
)


def test_a_line_with_other_operations_is_before_what_xla_copies_for_it(tmp_path):
    (tmp_path / "old.hlo").write_text(OLD)
    (tmp_path / "new.hlo").write_text(COPIED)
    modules = [stored_module(str(tmp_path / name)) for name in ("old.hlo", "new.hlo")]
    first, second = diff_modules(*modules).lines
    assert (first.place.line, first.added, first.removed) == (9, ("floor",), ())
    assert (second.place.line, second.added, second.removed) == (7, (), ())
    assert second.after.bytes > first.after.bytes
    assert "new: floor" in module_diff_table(diff_modules(*modules), 80).plain()


def test_a_line_with_more_work_is_before_those_whose_values_live_at_another_peak():
    def line_with(number, **figures):
        place = frames_now().at("/home/me/step.py", number)
        return LineChange(place, ModuleFigures(bytes=100), ModuleFigures(**figures))

    peak_moved = line_with(1, bytes=100, temporary_bytes=352)
    more_work = line_with(2, bytes=400)
    whole = ModuleFigures(bytes=10_000), ModuleFigures(bytes=10_300, temporary_bytes=352)
    assert causes_first([peak_moved, more_work], *whole, 5000) == [more_work, peak_moved]
    # A difference of work below a tenth of the largest difference is no cause.
    little = line_with(3, bytes=101)
    assert causes_first([little, peak_moved], *whole, 5000) == [peak_moved, little]
    # Nor does a peak that is elsewhere and as high count.
    same = ModuleFigures(bytes=10_000), ModuleFigures(bytes=10_001)
    assert causes_first([peak_moved, little], *same, 5000) == [little, peak_moved]


def test_the_kernels_of_a_fusion_that_fell_apart_are_one_row():
    def of(between):
        def plain(x):
            return between(jnp.sin(x)) * 2 + 1

        return stored(plain, X)

    found = diff_modules(of(lambda y: y), of(lambda y: jnp.sort(y, axis=0)))
    parts = [change for change in found.kernels if change.before]
    assert len(parts) == 1 and len(parts[0].after) >= 2
    assert "sort" in {added for change in found.kernels for added in change.added}


def test_the_command_ends_with_one_if_modules_differ(tmp_path, cli):
    files = {"old.hlo": OLD, "same.hlo": OLD.replace("tanh.1", "t"), "new.hlo": TILED}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    same = cli("diff", str(tmp_path / "old.hlo"), str(tmp_path / "same.hlo"))
    assert same.code == 0 and "the same" in same.out
    other = cli("diff", str(tmp_path / "old.hlo"), str(tmp_path / "new.hlo"))
    assert other.code == 1 and "step.py:7" in other.out and "jit_step → jit_tiled" in other.out
    kernels = cli("diff", str(tmp_path / "old.hlo"), str(tmp_path / "new.hlo"), "--kernels")
    assert "dot.1: dot" in kernels.out
    document = json.loads(
        cli("diff", str(tmp_path / "old.hlo"), str(tmp_path / "new.hlo"), "--json").out
    )
    assert document["is_same"] is False and document["before"]["flops"] == 288
    program = cli("diff", str(tmp_path / "old.hlo"), "jax.numpy:sin")
    assert program.code == 2 and "compared with another one" in program.err


def test_programs_are_compiled_and_compared(cli):
    found = cli("diff", "jax.numpy:sinc", "--args", "f32[8]", "-p", "", "-p", "", "--compiled")
    assert found.code == 0 and "the same" in found.out
    alone = cli("diff", "jax.numpy:sinc", "--args", "f32[8]", "-p", "dce", "--kernels")
    assert alone.code == 2 and "add --compiled" in alone.err
