"""Lines and scopes that must stay in the wide dtype: the set is minimal, and sufficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.compare.requested import inputs_from
from jaxprtool.commands.compare.variants import Tolerance
from jaxprtool.commands.precision.precision import PrecisionRequest, found_precision
from jaxprtool.commands.reduce.reduction import minimal_subset
from jaxprtool.errors import ArgumentsError, PipelineError

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32) / 3


def overflows(x, w):
    h = jnp.tanh(x @ w)
    big = jnp.square(1000 * h)
    return jnp.sqrt(big.mean()) / 1000 + h.mean()


def steps(x):
    def step(x, _):
        change = 0.01 * jnp.sin(x)
        x = x + change
        return x, None

    return lax.scan(step, x, None, length=300)[0]


def line(fun, offset):
    return f"tests/commands/precision/test_precision.py:{fun.__code__.co_firstlineno + offset}"


def names(found):
    return [place.name for place in found.kept]


def test_minimal_subsets_need_each_item_and_few_tests():
    for wanted in ({3}, {0, 99}, {5, 6, 50}, set(), set(range(100))):
        tests = []

        def holds(items, wanted=wanted, tests=tests):
            tests.append(items)
            return wanted <= set(items)

        assert set(minimal_subset(range(100), holds)) == wanted
        assert len(tests) <= 60 or len(wanted) == 100


def test_a_non_monotonic_condition_has_a_subset_without_redundant_items():
    def holds(items):
        return sum(items) % 3 == 0

    found = minimal_subset([3, 1, 2, 4, 5], holds)
    assert holds(found)
    assert not any(holds([x for x in found if x != each]) for each in found)


def test_a_function_of_small_values_is_narrowed_completely():
    found = jaxprtool.precision(jaxprtool.trace(lambda x, w: jnp.tanh(x @ w), X, W), (X, W))
    assert found.within and found.kept == ()
    assert found.pipeline == "mixed_precision"
    assert found.checked == 0 and found.searched == found.runs == 1
    assert (found.rtol, found.atol) == (1e-2, None)
    assert found.after.narrow_flops > 0.9 * found.after.flops


@pytest.mark.proof
def test_lines_that_overflow_are_kept():
    program = jaxprtool.trace(overflows, X, W)
    found = jaxprtool.precision(program, dtype="float16")
    assert found.within and found.error <= 1 < found.narrow_error
    assert line(overflows, 2) in names(found)
    assert line(overflows, 1) not in names(found)
    assert found.checked == 3
    for place in found.kept:  # none can be dropped
        assert place.without > 1
    args = X, W
    after = program.apply(found.pipeline)
    np.testing.assert_allclose(after(*args), program(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.proof
def test_the_state_of_many_steps_is_kept():
    found = jaxprtool.precision(jaxprtool.trace(steps, X), (X,))
    assert names(found) == [line(steps, 3)]
    assert found.kept[0].code == "x = x + change"
    assert found.kept[0].error > 1 and found.within


@pytest.mark.proof
def test_scopes_can_be_kept():
    def fun(x, w):
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
            x = jnp.sin(x)
        with jax.named_scope("loss"):
            x = jnp.square(1000 * x)
            return jnp.sqrt(x.mean()) / 1000

    found = jaxprtool.precision(jaxprtool.trace(fun, X, W), by="scope", dtype="float16")
    assert names(found) == ["loss"]
    assert found.pipeline == "mixed_precision(compute_dtype='float16', keep=['loss'])"


@pytest.mark.proof
def test_a_tolerance_of_zero_keeps_everything_that_rounds():
    found = jaxprtool.precision(jaxprtool.trace(overflows, X, W), (X, W), rtol=0, atol=0)
    assert found.within and len(found.kept) >= 3


def test_the_search_ends_if_nothing_can_be_narrowed():
    def fun(x, w):
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
        return jnp.sin(x)  # narrow, since it is in no scope

    told = []
    program = jaxprtool.trace(fun, X, W)
    request = PrecisionRequest("bfloat16", "scope", Tolerance(0, 0), seed=0, trials=1)
    inputs = inputs_from([program], None)(program)
    found = found_precision(inputs, request, told.append)
    assert not found.within and names(found) == ["layer"]
    assert len([text for text in told if text.startswith("run ")]) == 2  # not 7


def test_the_result_holds_for_each_input_of_several_trials():
    program = jaxprtool.trace(steps, X)
    found = jaxprtool.precision(program, trials=2)
    assert found.searched >= 2 and found.within
    with pytest.raises(ArgumentsError, match="several trials need random arguments"):
        jaxprtool.precision(program, (X,), trials=2)


def test_nothing_to_narrow_and_unknown_dtypes_are_errors():
    with pytest.raises(ArgumentsError, match="computes no floats wider than bfloat16"):
        jaxprtool.precision(jaxprtool.trace(lambda x: x + 1, np.arange(3)))
    with pytest.raises(PipelineError, match="is not a compute_dtype"):
        jaxprtool.precision(jaxprtool.trace(steps, X), dtype="int8")


def test_the_search_ends_if_nothing_can_be_narrow():
    found = jaxprtool.precision(
        jaxprtool.trace(lambda x: jnp.sin(x * 3.1), jnp.ones(4)), rtol=1e-12, atol=0.0
    )
    assert len(found.kept) == found.places and found.checked == 0
    assert "no line can be bfloat16; 1 line stays wide" in str(found)
