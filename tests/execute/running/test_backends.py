import jax
import pytest

from jaxprtool.errors import BackendError
from jaxprtool.execute.running import backends as running
from jaxprtool.execute.running.backends import backends, device, devices_to_compile_for

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


def test_a_machine_to_compile_for_is_none_to_run_on():
    with pytest.raises(BackendError, match="no backend 'tpu:v5e:2x2' on this machine") as error:
        device("tpu:v5e:2x2")
    assert "memory --compiled" in error.value.hint


@pytest.mark.parametrize(
    ("name", "installed", "reason"),
    [
        ("tpu:v5e:2x2", False, "without the package libtpu"),
        ("tpu:v5e:0x2", True, "it has no chips"),
        ("tpu:v5e:2x", True, "it has no chips"),
    ],
)
def test_a_tpu_that_cannot_be_compiled_for_is_one_line(name, installed, reason, monkeypatch):
    monkeypatch.setattr(running, "has_tpu_library", lambda: installed)
    with pytest.raises(BackendError, match=f"'{name}'.* {reason}$"):
        devices_to_compile_for(name)


@pytest.mark.parametrize("name", ["tpu:v5e", "tpu:v5e:3x3", "tpu:nonsense:2x2"])
def test_the_compiler_says_which_tpus_there_are_not(name):
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    with pytest.raises(BackendError, match=f"XLA cannot compile for '{name}': ") as error:
        devices_to_compile_for(name)
    assert "\n" not in error.value.message and "tpu:v5e:2x4" in error.value.hint
