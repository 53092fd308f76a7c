"""Arguments of a Program that are sizes have bounds, which are checked whenever it is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, StructureError
from jaxprtool.execute.running.arrays import random_argument
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.program import program_signature
from jaxprtool.ir.symbols import SizeBound
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.render.reports import program_document

x = np.arange(8.0, dtype=np.float32)


def total(x, n):
    return jnp.where(jnp.arange(8) < n, x, 0).sum()


@pytest.fixture
def program():
    return jaxprtool.trace(total, x, np.int32(0)).replace(bounds=(("n", SizeBound(8)),))


@pytest.mark.parametrize("size", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_a_size_is_any_integer_by_position_or_by_name(program, size):
    assert program(x, size) == program(x, n=size) == program(n=size, x=x) == 3.0


def test_a_size_has_the_dtype_of_the_argument_with_64_bit_integers(program):
    with jax.enable_x64(True):
        assert program(x, 3) == program(x, np.int64(3)) == jax.jit(program)(x, 3) == 3.0


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (600, "argument 'n' of total is 600, but must be a size from 0 to 8$"),
        (-1, "argument 'n' of total is -1, but must be a size from 0 to 8$"),
        (2.5, "argument 'n' of total is 2.5 of dtype float64, but must be a size from 0 to 8$"),
        (True, "argument 'n' of total is True of dtype bool, but must be a size"),
    ],
)
@pytest.mark.parametrize("passes", ["dce", "jit, -O1"])
def test_a_size_out_of_bounds_is_refused(program, passes, size, message):
    with pytest.raises(ArgumentsError, match=message):
        program.apply(passes)(x, size)


@pytest.mark.parametrize("traced", [False, True])
def test_an_argument_of_another_shape_is_named(program, traced):
    call = jax.jit(program) if traced else program
    with pytest.raises(ArgumentsError, match=r"argument 'n' is i32\[1\], but total takes i32"):
        call(x, np.array([3]))
    with pytest.raises(ArgumentsError, match=r"argument 'x' is f32\[9\], but total takes f32"):
        call(np.ones(9, np.float32), 3)


def test_a_missing_size_is_named(program):
    with pytest.raises(
        StructureError, match="the program takes 2 positional arguments, not 1: n is miss"
    ):
        program(x)


def test_batched_sizes_are_checked_one_by_one(program):
    lanes = program.apply("batch(axis_size=2)")
    np.testing.assert_array_equal(lanes(np.stack([x, x]), np.array([1, 8])), [0.0, 28.0])
    with pytest.raises(ArgumentsError, match="argument 'n' of total is 9, but "):
        lanes(np.stack([x, x]), np.array([1, 9]))


def test_a_traced_size_is_not_checked(program):
    assert jax.jit(program)(x, 3) == 3.0
    np.testing.assert_array_equal(jax.vmap(program, (None, 0))(x, jnp.array([1, 8])), [0.0, 28.0])
    np.testing.assert_array_equal(jax.grad(program)(x, 3), x < 3)


@pytest.mark.parametrize("passes", ["grad", "jvp", "-O2", "named_call", "batch(axis_size=2)"])
def test_passes_keep_the_bound_of_an_argument_that_they_keep(program, passes):
    assert program.apply(passes).bounds == (("n", SizeBound(8)),)


def test_the_bound_of_a_removed_argument_is_removed(program):
    assert program.apply("closed({'n': 3})").bounds == ()
    unused = jaxprtool.trace(lambda x, n: x, x, np.int32(0)).replace(bounds=(("n", SizeBound(8)),))
    assert Dce(drop_inputs=True)(unused).bounds == ()


def test_a_size_that_is_bound_to_a_value_is_checked_too(program):
    with pytest.raises(ArgumentsError, match="argument 'n' of total is 9, but "):
        program.apply("closed({'n': 9})")


def test_a_file_keeps_bounds_and_can_be_read_without_them(program):
    written = program_file_text(program)
    assert parse_program(written, "total.jaxpr").bounds == (("n", SizeBound(8)),)
    assert parse_program(written.replace("bounds = {'n': 8}\n", ""), "total.jaxpr").bounds == ()


def test_random_sizes_are_within_their_bounds():
    sizes = jaxprtool.trace(lambda n: n, np.zeros(200, np.int32))
    program = sizes.replace(bounds=(("n", SizeBound(3)),))
    assert set(random_argument(program, 0, seed=1).tolist()) == {0, 1, 2, 3}


def test_a_size_is_shown_with_its_bound(program):
    assert [value.described for value in program_signature(program).arguments] == [
        "f32[8]",
        "i32[] at most 8",
    ]
    assert [each.get("at_most") for each in program_document(program)["arguments"]] == [None, 8]
    assert "`n` is a size from 0 to 8." in jaxprtool.to_python(program)


def test_the_minimum_size_is_shown_kept_and_used_for_random_sizes(program):
    program = program.replace(bounds=(("n", SizeBound(8, at_least=7)),))
    assert program_signature(program).arguments[1].described == "i32[] from 7 to 8"
    assert program_document(program)["arguments"][1]["at_least"] == 7
    assert parse_program(program_file_text(program), "total.jaxpr").bounds == program.bounds
    assert {int(random_argument(program, 1, seed)) for seed in range(20)} == {7, 8}
