import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.execute.running.arrays import ArraySummary, plain_array, summarize


def test_small_arrays_are_shown_in_full():
    summary = summarize(jnp.arange(16).reshape(4, 4))
    assert summary.value.tolist() == np.arange(16).reshape(4, 4).tolist()
    assert summary.statistics == {}
    assert summarize(np.zeros((0, 7))).value.shape == (0, 7)
    assert summarize(3.5).value == 3.5


def test_large_floats_count_non_finite_values():
    values = np.arange(20, dtype=np.float32)
    values[3], values[4], values[5] = np.nan, np.inf, -np.inf
    assert summarize(values).value is None
    finite = values[np.isfinite(values)]
    assert summarize(values).statistics == {
        "min": -np.inf,
        "max": np.inf,
        "mean": pytest.approx(float(finite.mean())),
        "nan": 1,
        "inf": 2,
    }


def test_an_array_of_nans_has_no_extrema():
    statistics = summarize(np.full(20, np.nan)).statistics
    assert statistics == {"min": None, "max": None, "mean": None, "nan": 20, "inf": 0}


def test_large_integers_booleans_complex_numbers_and_keys():
    assert summarize(np.arange(20)).statistics == {"min": 0, "max": 19, "mean": 9.5}
    assert summarize(np.arange(20) < 5).statistics == {"true": 5, "false": 15}
    assert summarize(np.full(20, 3 + 4j)).statistics == {
        "min": 5.0,
        "max": 5.0,
        "mean": 3 + 4j,
        "nan": 0,
        "inf": 0,
    }
    assert summarize(jax.random.split(jax.random.key(0), 20)).statistics == {}


@pytest.mark.parametrize(
    ("dtype", "numpys"),
    [("bfloat16", "float32"), ("float8_e5m2", "float32"), ("int4", "int8"), ("uint4", "uint8")],
)
def test_plain_returns_numpys_own_dtypes_with_the_same_values(dtype, numpys):
    values = plain_array(jnp.array([0, 1, 2, 3], dtype))
    assert values.dtype == numpys and values.tolist() == [0, 1, 2, 3]


def test_plain_keeps_numpy_dtypes_and_unwraps_keys():
    assert plain_array(np.float16(1)).dtype == np.float16
    assert plain_array(jax.random.key(0)).dtype == np.uint32


def test_float0_has_no_value():
    nothing = jax.jit(lambda x: x)(np.zeros(3, jax.dtypes.float0))
    assert plain_array(nothing).dtype == jax.dtypes.float0
    for shape in (), (100,):
        assert summarize(np.zeros(shape, jax.dtypes.float0)) == ArraySummary(None)
