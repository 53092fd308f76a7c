"""Errors between arrays, and between variants of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.compare.variants import Tolerance, measured
from jaxprtool.errors import ArgumentsError, BackendError, PipelineError

USUAL = Tolerance()
X = jnp.arange(4.0)


def test_equal_bits_have_no_error_and_all_nans_are_equal():
    x = np.array([1.0, np.nan, -np.inf], np.float32)
    found = measured("x", x, x.copy(), USUAL)
    assert found.equal and found.within and found.nans == (1, 1)
    assert (found.absolute, found.ulps, found.differing, found.position) == (0.0, 0, 0, None)


def test_zeros_of_different_signs_have_other_bits_within_tolerance():
    found = measured("x", np.float32(0.0), np.float32(-0.0), USUAL)
    assert not found.equal and found.within and found.ulps == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32, np.float64])
def test_one_unit_in_the_last_place_is_counted_as_one(dtype):
    one = np.ones((2,), dtype)
    next_one = (one + jnp.finfo(dtype).eps).astype(dtype)
    assert measured("x", one, next_one, USUAL).ulps == 1
    smallest = np.array([jnp.finfo(dtype).smallest_subnormal], dtype)
    assert measured("x", -smallest, smallest, USUAL).ulps == 2


def test_tolerances_are_those_of_jax_by_dtype_or_given():
    f32, bf16 = np.dtype(np.float32), jnp.dtype(jnp.bfloat16)
    assert USUAL.relative(f32) == 1e-6 and USUAL.relative(f32, bf16) == 1e-2
    assert (Tolerance(0.5).relative(f32), Tolerance(atol=0.5).relative(f32)) == (0.5, 0.0)
    assert Tolerance(0.5, 0.5).relative(np.dtype(bool)) == 0.0
    values = np.array([1e-9, 0.0, -1e-9], np.float32)
    np.testing.assert_allclose(USUAL.tolerated(values, f32), [1e-15, 8.2e-16, 1e-15], rtol=0.01)
    assert list(Tolerance(atol=0.5).tolerated(values, f32)) == [0.5, 0.5, 0.5]


def test_errors_are_of_finite_pairs_and_a_single_nan_exceeds_any_tolerance():
    found = measured("x", np.array([1.0, 2.0, 4.0]), np.array([np.nan, 2.0, 5.0]), Tolerance(0.5))
    assert (found.absolute, found.relative, found.nans) == (1.0, 0.25, (0, 1))
    assert (found.beyond, found.position, found.within) == (1, (0,), False)


def test_integers_booleans_and_keys_must_be_equal():
    for a, b in (
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([True, False]), np.array([True, True])),
        (jax.random.split(jax.random.key(0)), jax.random.split(jax.random.key(1))),
    ):
        found = measured("x", a, b, USUAL)
        assert not found.within and found.ulps is None
        assert measured("x", a, a, USUAL).equal


def test_complex_numbers_empty_arrays_and_float0_are_measured():
    found = measured("x", np.array([3 + 4j], np.complex64), np.array([3 + 5j], np.complex64), USUAL)
    assert found.absolute == 1.0 and found.relative == pytest.approx(0.2) and found.ulps
    assert measured("x", np.zeros((0, 2)), np.zeros((0, 2)), USUAL).equal
    nothing = np.zeros((2,), jax.dtypes.float0)
    assert measured("x", nothing, nothing, USUAL).equal


def test_arrays_of_other_dtypes_are_compared_but_never_equal():
    found = measured("x", np.ones(3, np.float32), np.ones(3, jnp.bfloat16), USUAL)
    assert found.within and not found.equal and found.ulps is None


def loss(x, key):
    picked = jax.random.normal(key, (3,)) * x
    return {"loss": picked.sum(), "key": jax.random.split(key), "index": picked.argmax()}


@pytest.mark.proof
def test_all_variants_are_built_and_the_first_is_the_reference():
    program = jaxprtool.trace(loss, jnp.ones(3), jax.random.key(0))
    found = jaxprtool.compare(
        program, passes=["", "-O1"], precisions=["default", "highest"], op_by_op=True
    )
    assert found.within and len(found.variants) == 7
    assert found.reference == "as traced, default, compiled"
    assert found.random == ("x", "key")
    assert [each.name for each in found.variants[0].results] == [
        "result['index']",
        "result['key']",
        "result['loss']",
    ]


def test_programs_receive_the_arguments_of_the_first_by_name_or_in_order():
    first = jaxprtool.trace(lambda x, y: x - y, 1.0, 2.0)
    swapped = jaxprtool.trace(lambda y, x: x - y, 1.0, 2.0)
    renamed = jaxprtool.trace(lambda a, b: a - b, 1.0, 2.0)
    assert jaxprtool.compare([first, swapped, renamed], (3.0, 5.0)).within


def test_programs_with_other_arguments_or_results_are_refused():
    first = jaxprtool.trace(lambda x: x, jnp.ones(3))
    other = jaxprtool.trace(lambda x: x, jnp.ones(4))
    sums = jaxprtool.trace(lambda x: x.sum(), jnp.ones(3))
    with pytest.raises(ArgumentsError, match=r"takes different arguments: x: f32\[4\]"):
        jaxprtool.compare([first, other])
    with pytest.raises(ArgumentsError, match=r"gives different results: result: f32\[\]"):
        jaxprtool.compare([first, sums])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": (X, X)}, "takes 1 arrays, not 2"),
        ({"trials": 0}, "trials must be at least 1, not 0"),
        ({"rtol": -1.0}, "rtol must be a number of at least 0, not -1.0"),
        ({"atol": float("nan")}, "atol must be a number of at least 0, not nan"),
        ({"passes": "dce"}, "at least two variants"),  # one pipeline, not three
    ],
)
def test_invalid_options_are_refused(options, message):
    program = jaxprtool.trace(jnp.sin, X)
    with pytest.raises(ArgumentsError, match=message):
        jaxprtool.compare(program, **{"passes": ["", "dce"], **options})


def test_a_function_that_was_not_traced_is_refused():
    program = jaxprtool.trace(jnp.sin, X)
    for programs in (jnp.sin, [program, jnp.sin]):
        with pytest.raises(ArgumentsError, match="sin is not a Program"):
            jaxprtool.compare(programs, (X,), op_by_op=True)


def test_a_single_variant_a_missing_backend_and_several_programs_are_refused():
    program = jaxprtool.trace(lambda x: x, jnp.ones(3))
    with pytest.raises(ArgumentsError, match="at least two variants"):
        jaxprtool.compare(program)
    with pytest.raises(BackendError, match="no backend 'abacus'"):
        jaxprtool.compare(program, backends=["cpu", "abacus"])
    with pytest.raises(PipelineError, match="returns forward, backward"):
        jaxprtool.compare(program, passes=["", "vjp"])
    with pytest.raises(ArgumentsError, match="unknown precision 'hihgest'"):
        jaxprtool.compare(program, precisions=["default", "hihgest"])


def test_a_failing_variant_is_reported_and_the_others_continue():
    def fails(x):
        return jax.pure_callback(lambda value: 1 / 0, x, x)

    right, wrong = (jaxprtool.trace(f, 1.0) for f in (lambda x: x, fails))
    found = jaxprtool.compare([right, wrong, right], (1.0,))
    assert [each.within for each in found.variants] == [False, True]
    assert "ZeroDivisionError" in found.variants[0].error
    assert "ZeroDivisionError" in jaxprtool.compare([wrong, right], (1.0,)).error


def test_arguments_that_a_program_donates_are_available_to_the_others():
    program = jaxprtool.trace(jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(3))
    assert jaxprtool.compare(program, (jnp.ones(3),), passes=["", "-O1"]).within


def test_a_backend_that_does_not_start_is_an_error_and_no_result(monkeypatch):
    def missing():
        raise BackendError("JAX cannot start the backend 'cuda'")

    monkeypatch.setattr("jaxprtool.commands.compare.compare.start_backends", missing)
    programs = [jaxprtool.trace(fun, X) for fun in (jnp.sin, jnp.cos)]
    with pytest.raises(BackendError, match="cannot start"):
        jaxprtool.compare(programs)
