"""Repeated runs of a program under other conditions are compared bit for bit with the first."""

import itertools
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.determinism.determinism import Ways, run_again, run_fresh
from jaxprtool.commands.determinism.table import heading
from jaxprtool.errors import ArgumentsError, UnsupportedError
from tests.share import first_and_proofs

X = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)


@pytest.fixture(autouse=True)
def optimized(monkeypatch):
    """Let XLA optimize as it does for users."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # of other processes
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def repeated(function, *args, **how):
    return jaxprtool.determinism(jaxprtool.trace(function, *args), args, threads=(), **how)


def rows(found):
    return {each.name: each for each in found.repetitions}


def from_python(values):
    """Return a function that adds to its argument the next of some values, in each run."""
    values = itertools.cycle(map(np.float32, values))

    def function(x):
        drawn = jax.pure_callback(lambda: next(values), jax.ShapeDtypeStruct((), np.float32))
        return jnp.sin(x) + 1, drawn

    return function


@pytest.mark.proof
def test_a_pure_function_returns_the_same_bits_on_every_device():
    found = repeated(lambda x: jnp.tanh(x @ x), X)
    assert found.equal and found.causes == () and found.reference == "cpu:0"
    assert [*rows(found)][:2] == ["run again", "compiled again"]
    assert "on cpu:1" in rows(found)
    assert rows(found)["run again"].results[0].size == 64 * 64


@pytest.mark.proof
def test_each_run_is_told_with_its_number_and_the_number_of_all():
    told = []
    program = jaxprtool.trace(lambda x: x * 2, 1.0)
    found = run_again(program, (1.0,), Ways(runs=2, threads=()), told.append)
    names = ["the first run", *rows(found)]
    begun = [f"run {i} of {len(names)}: {name}" for i, name in enumerate(names, 1)]
    assert [text for text in told if " · " not in text] == begun
    assert told[1] == f"{begun[0]} · lowering lambda"


def test_a_run_that_fails_does_not_count_as_one_that_differs():
    program = jaxprtool.trace(lambda x: x * 2, 1.0)

    def cannot_be_written(environment):
        raise UnsupportedError("the program cannot be written to a file")

    found = run_again(program, (1.0,), Ways(runs=2, threads=(), run_fresh=cannot_be_written))
    failed = [each for each in found.repetitions if each.error]
    assert failed and not found.equal
    runs = len(found.repetitions)
    assert heading(found).endswith(f": {len(failed)} of {runs} runs failed")


def test_a_process_that_fails_is_reported_with_its_last_words():
    program = jaxprtool.trace(lambda x: x * 2, 1.0)
    with pytest.raises(UnsupportedError, match="the process failed: exit status 1: error: no"):
        run_fresh(partial(sys.exit, "error: no"), {}, program)


def test_a_counting_callback_is_the_first_equation_that_differs():
    found = repeated(from_python([1, 2, 3]), X)
    assert not found.equal and rows(found)["run again"].differing == 1
    (cause,) = found.causes  # the others differ for the same reason
    assert cause.name == "run again" and cause.divergence.primitive == "pure_callback"
    assert cause.divergence.source.startswith("tests/commands/determinism/test_determinism.py:")
    assert [risk.primitive for risk in found.risks] == ["pure_callback"]


@pytest.mark.proof
def test_signs_of_zeros_are_compared_but_the_bits_of_nans_are_not():
    assert not repeated(from_python([0.0, -0.0]), X).equal
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert repeated(from_python(nans), X).equal


def test_a_function_that_reads_other_numbers_when_retraced_has_another_constant():
    draws = itertools.count()

    def noisy(x):
        return jnp.sin(x) * (np.arange(64, dtype=np.float32) + next(draws)) + x

    found = repeated(noisy, X, trace_again=lambda: jaxprtool.trace(noisy, X))
    other = rows(found)["traced again"].other_program
    assert other.startswith("another constant in broadcast_in_dim at tests/") and not found.equal


def test_a_function_that_traces_to_other_equations_is_reported_with_the_line():
    functions = itertools.cycle([jnp.sin, jnp.cos])

    def other(x):
        return next(functions)(x)

    found = repeated(other, X, trace_again=lambda: jaxprtool.trace(other, X))
    said = rows(found)["traced again"].other_program
    assert "sin at tests/commands" in said or "cos at tests/commands" in said


@pytest.mark.parametrize(
    "option, function, x",
    first_and_proofs(
        [
            ({"xla_cpu_enable_fast_math": True}, lambda x: x * 1.7 + x * x * x - 2 * x, X),
            ({"xla_backend_optimization_level": 0}, lambda x: x * 1.7 + x * x * x - 2 * x, X),
            (
                {"xla_allow_excess_precision": False},
                lambda x: jax.nn.softmax(x * 2 + 1),
                X.astype(jnp.bfloat16),
            ),
            (
                {"xla_cpu_enable_platform_dependent_math": False},
                lambda x: 1 / jnp.sqrt(x * x + 1),
                X,
            ),
        ]
    ),
    ids=["fast math", "optimization level", "excess precision", "library of the platform"],
)
def test_an_xla_option_changes_bits_and_the_equation_is_named(option, function, x):
    found = repeated(function, x, xla_options=option)
    ((name, _),) = option.items()
    (changed,) = [each for each in found.repetitions if each.kind == "option"]
    assert changed.name.startswith(name) and changed.differing == 1 and changed.results[0].ulps
    (cause,) = found.causes
    where = cause.prefix or cause.divergence
    assert where.results and where.source.startswith("tests/commands/determinism/")
    if cause.divergence.found:  # equal operands, and other results
        assert all(each.equal for each in cause.divergence.operands)
        assert not any(each.equal for each in cause.divergence.results)


@pytest.mark.usefixtures("processes")
def test_products_depend_on_the_number_of_threads():
    def weight_gradient(x, dy):
        return jnp.einsum("bi,bo->io", x, jnp.tanh(dy))

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4096, 16)), jnp.float32)
    program = jaxprtool.trace(weight_gradient, x, x)
    found = jaxprtool.determinism(program, (x, x), threads=(1, 8))
    assert any(each.differing for each in found.repetitions if each.kind == "threads")
    (cause,) = found.causes
    assert cause.divergence.primitive == "dot_general"
    assert [each.equal for each in cause.divergence.operands] == [True, True]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"runs": 1}, "runs must be at least 2, not 1"),
        ({"threads": [1, 0]}, "a number of threads must be at least 1, not 0"),
        ({"xla_options": {"xla_nosuch": 1}}, "has no option 'xla_nosuch'"),
        ({"xla_options": {"xla_cpu_enable_fast_math": "maybe"}}, "XLA does not accept xla_cpu"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(how, message):
    with pytest.raises(ArgumentsError, match=message):
        jaxprtool.determinism(jaxprtool.trace(jnp.sin, X), (X,), **how)
