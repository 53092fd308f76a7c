"""A roofline: the minimum time of a program on a device, and device files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import cost, trace
from jaxprtool.analysis.devices import DEVICES, DeviceSpec, device_named
from jaxprtool.errors import ArgumentsError

SLOW = DeviceSpec("slow", {"bf16": 1e9, "f32 highest": 1e6}, vector=1e6, bandwidth=1e9)


def total(fun, *args):
    return cost(trace(fun, *args)).total


def test_products_run_at_the_speed_of_their_dtype():
    matrix = np.ones((64, 64))
    bound = SLOW.bound(total(jnp.matmul, *2 * [matrix.astype(jnp.bfloat16)]))
    assert bound.limit == "compute" and bound.seconds == 2 * 64**3 / 1e9
    whole = total(lambda x: jnp.matmul(x, x, precision="highest"), matrix.astype(np.float32))
    assert SLOW.bound(whole).seconds == 2 * 64**3 / 1e6
    assert (
        DEVICES["h100"].bound(whole).seconds
        > 7 * DEVICES["h100"].bound(total(jnp.matmul, *2 * [matrix.astype(np.float32)])).seconds
        - 1e-6
    )


def test_the_units_of_library_algorithms_are_unknown():
    """No bound may exceed the time at the highest rate: an algorithm may consist of products."""
    group = total(jnp.linalg.cholesky, np.ones((32, 32), np.float32))
    operations = group.any_unit
    assert operations == pytest.approx(32**3 / 3, rel=0.01)
    assert group.products == {"any unit": operations}
    rest = group.work.flops + group.work.transcendentals - operations
    assert SLOW.bound(group).seconds == pytest.approx(max(operations / 1e9, rest / 1e6))
    assert SLOW.utilization(group, 1.0) == 0


def test_units_compute_at_the_same_time():
    matrix = np.ones((64, 64), np.float32)
    both = total(lambda x, y: jnp.tanh(x @ y) + x, matrix, matrix)
    rest = both.work.flops + both.work.transcendentals - 2 * 64**3
    assert DEVICES["tpu-v5e"].bound(both).seconds == max(
        2 * 64**3 / 197e12, rest / 6.1e12, both.work.bytes / 819e9
    )


@pytest.mark.parametrize("dtype", ["int4", "uint8", "bool", "float8_e5m2fnuz", "float8_e4m3fn"])
def test_a_product_of_a_narrow_type_runs_at_most_at_the_highest_rate(dtype):
    types = [jax.ShapeDtypeStruct((64, 64), dtype)] * 2
    bound = SLOW.bound(total(lambda x, y: jax.lax.dot(x, y), *types))
    assert bound.seconds == pytest.approx(2 * 64**3 / 1e9)


def test_a_complex_product_consists_of_real_ones():
    for real, name in [(np.float32, "complex64"), (np.float64, "complex128")]:
        types = [jax.ShapeDtypeStruct((64, 64), each) for each in (real, name)]
        by_type = [total(lambda x: x @ x, each) for each in types]
        alone, both = (DEVICES["h100"].rate(*group.products) for group in by_type)
        assert alone == both


def test_programs_that_move_more_than_they_compute_are_memory_bound():
    bound = DEVICES["h200"].bound(total(lambda x: x + 1, np.ones(10**6, np.float32)))
    assert bound.limit == "memory" and bound.seconds == pytest.approx(8e6 / 4.8e12)


def test_utilization_is_of_products():
    group = total(lambda x: jnp.sin(x @ x), np.ones((64, 64), jnp.bfloat16))
    assert SLOW.utilization(group, 1.0) == pytest.approx(2 * 64**3 / 1e9)


def test_a_file_has_the_figures_of_a_device(tmp_path):
    file = tmp_path / "b7.toml"
    file.write_text("name = 'b7'\nvector = 40e12\nbandwidth = 2e12\nproducts = {bf16 = 600e12}\n")
    assert device_named(str(file)) == DeviceSpec("b7", {"bf16": 600e12}, 40e12, 2e12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vector = 1", "lacks the figure 'bandwidth'"),
        ("vector = 1\nbandwidth = -2", "bandwidth = -2 is not a positive number"),
        ("vector = 1\nbandwidth = 2\nproducts = 3", "products must be FLOP/s by dtype"),
        ("vector = 1\nbandwith = 2", "unknown figure 'bandwith'"),
        ("vector = ", "is not valid TOML"),
    ],
)
def test_files_with_missing_figures_are_refused(tmp_path, text, message):
    file = tmp_path / "b7.toml"
    file.write_text(text)
    with pytest.raises(ArgumentsError, match=message):
        device_named(str(file))


def test_unknown_devices_are_refused():
    with pytest.raises(ArgumentsError, match="unknown device 'h10'"):
        device_named("h10")
    with pytest.raises(ArgumentsError, match=r"cannot read none.toml"):
        device_named("none.toml")
