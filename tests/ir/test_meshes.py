"""`--mesh` uses the default devices, and others only if nothing is run."""

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxprtool.ir.meshes import mesh_set


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine with one default device, and eight CPU devices."""
    all_devices = jax.devices("cpu")
    monkeypatch.setattr(
        jax, "devices", lambda backend=None: all_devices if backend == "cpu" else all_devices[:1]
    )


def test_a_mesh_to_run_on_is_not_moved_to_the_cpu(one_gpu):
    with mesh_set({"x": 2}, explicit=True):
        assert jax.sharding.get_mesh().empty
        assert isinstance(jax.sharding.get_abstract_mesh(), AbstractMesh)


def test_virtual_devices_are_used_if_nothing_is_run(one_gpu):
    with mesh_set({"x": 2}, explicit=True, virtual=True):
        assert len(jax.sharding.get_mesh().devices) == 2


def test_without_the_cpu_a_mesh_that_is_too_large_is_abstract(monkeypatch):
    device = jax.devices()[0]

    def devices(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return [device]

    monkeypatch.setattr(jax, "devices", devices)
    with mesh_set({"x": 2}, explicit=False, virtual=True):
        assert jax.sharding.get_mesh().empty
