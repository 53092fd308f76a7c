"""The samples as cases, and their gradients."""

import jax
import numpy as np
import pytest

from tests.programs import sample_programs
from tests.programs.samples import sample_files


def test_every_sample_file_has_cases():
    files = sample_files()
    assert "transformer.py" in files
    assert len(files) >= 12
    assert all(sample_programs(file) for file in files)


def test_a_scalar_function_has_its_gradient_as_a_case():
    names = {case.name for case in sample_programs("transformer.py")}
    assert {"transformer.loss", "transformer.loss gradient"} <= names
    assert "transformer.forward gradient" not in names


def test_the_gradient_is_that_of_the_sample():
    cases = {case.name: case for case in sample_programs("custom_gradients.py")}
    loss, gradient = cases["custom_gradients.loss"], cases["custom_gradients.loss gradient"]
    value = jax.tree.leaves(_run(loss))[0]
    results = _run(gradient)
    np.testing.assert_array_equal(value, results[0])
    assert [r.shape for r in results[1:]] == [(8,), (4, 8)]


def _run(case):
    program = case.program()
    return jax.tree.leaves(jax.extend.core.jaxpr_as_fun(program.jaxpr)(*case.arguments()))


@pytest.mark.parametrize("file", sample_files())
def test_arguments_are_concrete_and_match_the_types(file):
    for case in sample_programs(file):
        avals, args = case.program().in_avals, case.arguments()
        assert [a.shape for a in avals] == [np.shape(x) for x in args]
        assert not any(isinstance(x, jax.ShapeDtypeStruct) for x in args)
