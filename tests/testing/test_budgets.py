"""Budgets limit what the commands report, by line. Moved lines are recognized."""

import linecache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.analysis.stats import count_equations
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.testing.assertions import (
    QUANTITIES,
    Growth,
    amount_of,
    amount_text,
    assert_budget,
    exceeds,
    grown_lines,
    measure,
)
from tests.programs import sample_programs
from tests.programs.samples import sample_files

ESTIMATED = ("flops", "peak_bytes", "equations", "residual_bytes")
X = jax.ShapeDtypeStruct((8, 8), "float32")


def function(source, name="model.py"):
    """Return a function `f` of a source text, whose lines JAX knows."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"jax": jax, "jnp": jnp}
    exec(compile(source, name, "exec"), scope)
    return scope["f"]


def loss(w, x):
    def body(carry, _):
        return jnp.tanh(carry @ w), None

    return (jax.lax.scan(body, x, None, length=5)[0] ** 2).mean()


def test_measures_agree_with_the_commands():
    program = jaxprtool.trace(loss, X, X)
    found = measure(program, ESTIMATED)
    assert list(found) == list(ESTIMATED)
    assert found["flops"].amount == jaxprtool.cost(program).total.work.flops
    assert found["peak_bytes"].amount == jaxprtool.memory(program).peak_bytes
    assert found["equations"].amount == count_equations(program)
    assert found["residual_bytes"].amount == jaxprtool.residuals(program).total_bytes


@pytest.mark.parametrize("quantity", ESTIMATED)
def test_parts_add_up_to_the_amount_the_largest_first(quantity):
    found = measure(jaxprtool.trace(loss, X, X), [quantity])[quantity]
    amounts = [part.amount for part in found.parts]
    assert sum(amounts) == found.amount and amounts == sorted(amounts, reverse=True)
    assert all(part.where for part in found.parts)


def test_a_measure_of_a_program_without_equations_has_no_parts():
    assert measure(jaxprtool.trace(lambda x: x, X), ["flops"])["flops"].parts == ()


def test_compilations_are_counted_for_a_call_only():
    double = jax.jit(lambda x: 2 * x)
    found = measure(None, ["compiles"], call=lambda: [double(jnp.ones(n)) for n in (2, 3, 2)])
    assert found["compiles"].amount == 2
    first, again = found["compiles"].notes
    assert first.endswith(": the first one seen") and "x: f32[2] → f32[3]" in again
    lowered = measure(None, ["compiles"], call=lambda: double.lower(jnp.ones(7)))
    assert lowered["compiles"].amount == 0
    with pytest.raises(ArgumentsError, match="needs a function to call"):
        measure(jaxprtool.trace(loss, X, X), ["compiles"])
    with pytest.raises(ArgumentsError, match="flops needs a program"):
        measure(None, ["flops"])


def takes_times(monkeypatch, *times):
    """Let the clock of the CPU show some times, one after the other."""
    clock = SimpleNamespace(process_time=iter(times).__next__)
    monkeypatch.setattr("jaxprtool.testing.assertions.time", clock)


def test_compile_time_is_the_least_of_a_few_and_may_exceed_its_budget_a_little(monkeypatch):
    takes_times(monkeypatch, 0.0, 0.4, 1.0, 1.3, 2.0, 2.5)
    found = measure(jaxprtool.trace(loss, X, X), ["compile_seconds"])["compile_seconds"]
    assert found.amount == pytest.approx(0.3)
    assert not exceeds(found, 0.25) and exceeds(found, 0.23)


def test_a_long_compilation_is_measured_once(monkeypatch):
    takes_times(monkeypatch, 0.0, 7.0)
    program = jaxprtool.trace(loss, X, X)
    with pytest.raises(AssertionError, match="compiles for 7 s of CPU time, but the budget is 5 s"):
        assert_budget(program, compile_seconds="5 s")


def test_compiling_takes_cpu_time():
    found = measure(jaxprtool.trace(loss, X, X), ["compile_seconds"])["compile_seconds"]
    assert 0 < found.amount < 20


def test_a_program_on_one_device_has_no_collectives_to_measure():
    with pytest.raises(UnsupportedError, match="not partitioned"):
        measure(jaxprtool.trace(loss, X, X), ["collectives_bytes"])


def test_an_unknown_quantity_is_an_error_with_the_nearest():
    with pytest.raises(ArgumentsError, match="no budget of 'flop'") as found:
        measure(jaxprtool.trace(loss, X, X), ["flop"])
    assert found.value.hint == "did you mean 'flops'?"


@pytest.mark.parametrize(
    ("quantity", "given", "amount", "text"),
    [
        ("flops", "3 GFLOP", 3_000_000_000, "3.0 GFLOP"),
        ("flops", "1.5e3 flops", 1500, "1.5 kFLOP"),
        ("flops", 12, 12, "12 FLOP"),
        ("peak_bytes", "16MiB", 16 << 20, "16.0 MiB"),
        ("collectives_bytes", 1.0, 1.0, "1 byte"),
        ("equations", 1200, 1200, "1,200 equations"),
        ("compiles", 1, 1, "1 program"),
        ("compile_seconds", "2.5 s", 2.5, "2.5 s"),
        ("compile_seconds", 0.25, 0.25, "250 ms"),
    ],
)
def test_amounts_are_numbers_or_texts_with_a_unit(quantity, given, amount, text):
    assert amount_of(quantity, given) == amount
    assert amount_text(quantity, amount) == text


@pytest.mark.parametrize("given", [True, "", "3 G 3", None, float("nan"), -1, [1]])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_an_invalid_amount_is_an_error(quantity, given):
    with pytest.raises(ArgumentsError):
        amount_of(quantity, given)


def test_moved_lines_are_recognized_and_new_ones_grow_from_zero():
    old = function("def f(x):\n    y = jnp.sin(x)\n    return y @ y\n")
    new = function(
        "def f(x):\n\n    z = jnp.cos(x) + 1\n    y = jnp.sin(z)\n    return y @ y @ y\n"
    )
    grown = grown_lines(jaxprtool.trace(old, X), jaxprtool.trace(new, X), "flops")
    assert grown == (Growth("model.py:5", 1024, 2048), Growth("model.py:3", 0, 64))
    assert grown_lines(jaxprtool.trace(new, X), jaxprtool.trace(old, X), "flops") == ()


def test_a_reused_line_number_does_not_match_the_removed_line():
    old = function("def f(x):\n    x = x @ x @ x @ x\n    return jnp.sin(x) * 2\n")
    new = function("def f(x):\n    x = x * 3 + 1\n    return jnp.sin(x) * 2\n")
    (grown,) = grown_lines(jaxprtool.trace(old, X), jaxprtool.trace(new, X), "flops")
    assert (grown.where, grown.before) == ("model.py:2", 0)


@pytest.mark.parametrize("file", sample_files())
def test_a_program_has_not_grown_from_itself(file):
    case = sample_programs(file)[0]
    with case.setting():
        program, again = case.trace(), case.trace()
        for quantity in ("flops", "peak_bytes", "equations"):
            found = measure(program, [quantity])[quantity]
            # The total has the most expensive branch of a `cond`.
            total, parts = found.amount, sum(part.amount for part in found.parts)
            assert parts == total if quantity != "flops" else parts >= total
            assert grown_lines(program, again, quantity) == ()
