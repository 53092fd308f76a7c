"""Random inputs for which two programs differ are found and minimized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.compare.divergence import input_text, minimized, scaled
from jaxprtool.errors import ArgumentsError


def test_an_input_shrinks_to_the_one_element_that_matters():
    values = np.arange(1.0, 65.0, dtype=np.float32).reshape(8, 8), np.ones(3, np.float32)
    (x, y), tries = minimized(values, (True, True), lambda given: given[0][5, 2] != 0)
    assert input_text(x) == "zero except [5, 2] = 1.0" and input_text(y) == "zero"
    assert tries < 40


def test_given_values_are_kept_and_a_necessary_value_is_rounded():
    values = np.array([0.7, 3.6], np.float32), np.array([2.5], np.float32)
    (x, y), _ = minimized(
        values, (True, False), lambda given: given[0][1] > 3 and given[1][0] == 2.5
    )
    assert input_text(x) == "zero except [1] = 4.0" and y[0] == 2.5


def test_an_input_that_fails_for_zero_is_zero():
    (x, key), _ = minimized(
        (np.ones(4, np.int32), jax.random.key(0)), (True, True), lambda given: True
    )
    assert input_text(x) == "zero" and input_text(key) == "random"


def test_floats_of_later_trials_have_other_magnitudes():
    x = np.ones(4, np.float32), np.ones(4, np.int32), np.ones(4, np.float32)
    sizes = {float(scaled(x, (True, True, False), trial)[0][0]) for trial in range(20)}
    assert len(sizes) > 3 and scaled(x, (True, True, False), 0)[0] is x[0]
    assert all((scaled(x, (True, True, False), 3)[i] == 1).all() for i in (1, 2))


def wrong_above_five(x, n):
    return jnp.where(x > 5, x * 1.1, x) + n


def test_trials_find_and_shrink_an_input_that_one_draw_misses():
    programs = [
        jaxprtool.trace(f, jax.ShapeDtypeStruct((16,), "float32"), 1)
        for f in (lambda x, n: x + n, wrong_above_five)
    ]
    assert jaxprtool.compare(programs).within
    found = jaxprtool.compare(programs, trials=20, bisect=True)
    (name, text), other = found.smallest
    assert not found.within and name == "x" and text.startswith("zero except [")
    assert other == ("n", "zero")
    assert np.count_nonzero(found.arguments[0]) == 1
    assert "minimized in" in found.inputs and found.partings[0].found


def test_the_number_of_agreeing_trials_is_reported():
    program = jaxprtool.trace(lambda x: x * 2, jnp.ones(3))
    found = jaxprtool.compare(program, passes=["", "dce"], trials=3)
    assert found.within and found.inputs == "3 random inputs; the last is shown"


def test_trials_without_random_inputs_or_isolated_are_refused():
    program = jaxprtool.trace(lambda x: x * 2, jnp.ones(3))
    with pytest.raises(ArgumentsError, match="has none"):
        jaxprtool.compare(program, (jnp.ones(3),), passes=["", "dce"], trials=3)
    with pytest.raises(ArgumentsError, match="run in one process"):
        jaxprtool.compare(program, passes=["", "dce"], trials=3, isolate=True)
