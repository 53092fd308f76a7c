import jax
import pytest

from jaxprtool.errors import BackendError
from jaxprtool.execute.running.backends import backends, device

PRESENT = {b.platform for b in backends()}


def test_the_default_backend_comes_first_with_its_devices():
    first = backends()[0]
    assert first.default
    assert first.devices == tuple(jax.local_devices())
    assert [b.default for b in backends()].count(True) == 1


def test_device_without_a_name_is_the_default_one():
    assert device() == jax.local_devices()[0]
    assert device("CPU", 0) == jax.local_devices(backend="cpu")[0]


@pytest.mark.parametrize("name", ["gpu", "tpu", "cuda", "rocm", "nonsense"])
def test_a_missing_backend_is_a_one_line_error_with_the_available_ones(name, capfd):
    if name in PRESENT or (name == "gpu" and PRESENT & {"cuda", "rocm"}):
        pytest.skip(f"this machine has {name}")
    with pytest.raises(BackendError) as error:
        device(name)
    assert f"no backend '{name}' on this machine; it has: " in error.value.message
    assert f"cpu ({len(jax.devices('cpu'))} devices)" in error.value.message
    assert "\n" not in error.value.message
    assert capfd.readouterr().err == ""


def test_a_misspelt_backend_is_reported_with_the_nearest_name():
    with pytest.raises(BackendError) as error:
        device("cpuu")
    assert error.value.hint == "did you mean 'cpu'?"


@pytest.mark.parametrize("index", [-1, 4096])
def test_a_device_number_out_of_range_is_refused(index):
    with pytest.raises(BackendError, match=f"no device {index} on backend 'cpu'"):
        device("cpu", index)
