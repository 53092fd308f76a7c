"""A Program is called like the function that it was traced from, and is checked as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import CheckError
from jaxprtool.ir.program import type_check

x = np.arange(3.0, dtype=np.float32)


@pytest.fixture
def program():
    return jaxprtool.trace(lambda p, *, scale: {"y": p["w"] * scale}, {"w": x}, scale=2.0)


def test_a_program_is_called_like_its_function(program):
    np.testing.assert_array_equal(program({"w": x}, scale=3.0)["y"], x * 3)


def test_a_program_works_under_jaxs_transformations(program):
    total = lambda w: program({"w": w}, scale=2.0)["y"].sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(x), np.full(3, 2.0))
    np.testing.assert_array_equal(jax.vmap(total)(jnp.stack([x, x])), [6.0, 6.0])


def test_arguments_of_another_structure_are_refused(program):
    with pytest.raises(TypeError, match="takes arguments of structure"):
        program({"v": x}, scale=3.0)


def test_it_prints_as_its_jaxpr_and_shows_in_a_notebook(program):
    assert str(program) == str(program.jaxpr)
    assert "mul" in program._repr_html_()


def test_programs_are_an_ordered_mapping(program):
    programs = jaxprtool.Programs({"b": program, "a": program})
    assert list(programs) == ["b", "a"] and len(programs) == 2 and programs["a"] is program
    assert repr(programs) == "Programs(b, a)"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arg_names": ()}, "arguments"),
        ({"out_names": ("a", "b")}, "results"),
        ({"out_tree": jax.tree.structure((0, 0))}, "results"),
    ],
)
def test_trees_and_names_must_fit_the_jaxpr(program, change, what):
    with pytest.raises(CheckError, match=rf"the counts of {what} disagree"):
        type_check(program.replace(**change))


def test_an_ill_typed_equation_is_found(program):
    eqn = program.jaxpr.eqns[-1]
    wrong = eqn.replace(invars=[eqn.invars[0], jax.make_jaxpr(jnp.sin)(1.0).invars[0]])
    program.jaxpr.eqns[-1] = wrong
    with pytest.raises(CheckError, match=r"is not well typed: Variable .* not defined") as caught:
        type_check(program)
    assert "\n" not in caught.value.message


def test_a_result_that_is_a_number_is_an_array():
    program = jaxprtool.trace(lambda x: (x, 2.0, True), 1.0)
    results = program(1.0)
    assert [(r.shape, str(r.dtype), r.weak_type) for r in map(jnp.asarray, results)] == [
        ((), "float32", True),
        ((), "float32", True),
        ((), "bool", False),
    ]
    assert all(isinstance(r, jax.Array) for r in results[1:])
