"""--in-specs, --out-specs and --host-devices in the commands that trace."""

import os
import subprocess
import sys

import pytest

from tests.share import on_one_release

MODULE = """
import jax, jax.numpy as jnp, jaxprtool
from jax.sharding import PartitionSpec as P

@jaxprtool.example("f32[4,4]", "f32[8,4]")
def step(w, batch):
    return jax.lax.with_sharding_constraint(jnp.tanh(batch @ w), P("x")).sum()
"""

SPECS = ("step.py:step", "--mesh", "x=2", "--in-specs", "(P(), P('x'))")


@pytest.fixture(autouse=True)
def module(folder):
    (folder / "step.py").write_text(MODULE)


@pytest.mark.proof
def test_commands_take_specs(cli, folder):
    for command in "run", "show", "cost", "nans", "source":
        assert cli(command, *SPECS).code == 0, command
    assert "on each of 2 devices" in cli("memory", *SPECS, "--compiled").out
    assert "all-reduce" in cli("emit", *SPECS, "--to", "hlo-optimized").out
    assert '[{"x"}, {}]' in cli("emit", *SPECS, "--to", "stablehlo").out


def test_arrays_of_a_factory_are_moved_to_their_specs(cli, folder):
    made = "\ndef made():\n    return step, (jnp.ones((4, 4)), jnp.ones((8, 4)))\n"
    (folder / "made.py").write_text(MODULE + made)
    options = ("made.py:made", "--factory", *SPECS[1:])
    for command in ("run",), ("compare", "-p", "", "-p", "dce"), ("memory", "--compiled"):
        result = cli(command[0], *options, *command[1:])
        assert result.code == 0, result.err


def test_source_first_lists_what_is_not_partitioned(cli):
    assert " is not partitioned; " in cli("source", *SPECS).out.splitlines()[0]


def test_hints_for_an_explicit_mesh_point_to_specs(cli):
    assert "--in-specs" in cli("show", *SPECS[:3]).err
    assert "--mesh" in cli("show", "step.py:step").err
    assert "need a mesh" in cli("show", "step.py:step", *SPECS[3:]).err


def test_a_mesh_larger_than_the_machine_names_the_option(cli):
    larger = ("step.py:step", "--mesh", "x=64", "--args", "f32[4,4], f32[64,4]", *SPECS[3:])
    assert cli("cost", *larger).code == 0
    result = cli("run", *larger)
    assert result.code == 2 and "mesh of 64 devices (x=64)" in result.err
    assert "--host-devices 64" in result.err


@on_one_release
def test_virtual_devices_cannot_be_created_after_a_backend_started(cli, folder):
    result = cli("run", *SPECS, "--host-devices", "3")
    assert result.code == 2 and "--host-devices 3 comes too late" in result.err
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "jaxprtool", "run", *SPECS, "--host-devices", "2"]
    ended = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert ended.returncode == 0 and "cpu:0, cpu:1" in ended.stdout, ended.stderr
