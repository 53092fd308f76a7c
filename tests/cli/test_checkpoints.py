"""Results sharded over devices are saved as a folder, atomically, and read on any devices."""

import os
import resource
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool.ir.array_files import read_stored, stored_arrays, write_checkpoint
from jaxprtool.loading.argspec import load_arrays

MODULE = """
    import jax, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    def rows(count):
        mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,),
                             devices=jax.devices()[:count])
        return NamedSharding(mesh, P("data"))

    def results(x):
        return {"w": x * 2, "b": x.astype("bfloat16").sum(0), "none": jnp.zeros((0, 2))}

    on_eight = jax.jit(results, in_shardings=rows(8))
    on_two = jax.jit(lambda w, b: w.sum() + b.sum(), in_shardings=(rows(2), None))
    on_one = lambda saved: saved["w"].sum()
"""


@pytest.fixture
def saved(cli, folder):
    (folder / "spread.py").write_text(textwrap.dedent(MODULE))
    run = "run", "spread.py:on_eight", "--args", "arange(f32[8,4])", "--repeat", "0"
    assert cli(*run, "--save", "out").code == 0
    return run


def test_results_of_eight_devices_are_read_on_two_and_one(cli, saved, folder):
    assert (folder / "out").is_dir() and not list(folder.glob(".jaxprtool-*"))
    parts = "load('out')['result']['w'], load('out')['result']['b']"
    assert "f32[] 1488." in cli("run", "spread.py:on_two", "--args", parts, "--repeat", "0").out
    whole = cli("run", "spread.py:on_one", "--args", "load('out')['result']", "--repeat", "0")
    assert "f32[] 992." in whole.out
    assert cli(*saved, "--save", "out").code == 0  # replaces a checkpoint


def test_names_and_types_are_exact(folder):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    arrays = {
        "result['a/b']": jax.device_put(
            jnp.arange(8.0, dtype="bfloat16"), NamedSharding(mesh, P("data"))
        ),
        "result": jnp.arange(4, dtype="int4"),
        "result.x": np.zeros((0, 3), ml_dtypes.float8_e4m3fn),
        "key": jax.random.key(3),
    }
    write_checkpoint("all", arrays)
    read = read_stored("all", stored_arrays("all"))
    assert set(read) == set(arrays)
    for name in "result['a/b']", "result", "result.x":
        assert read[name].dtype == arrays[name].dtype
        np.testing.assert_array_equal(read[name], np.asarray(arrays[name]))
    np.testing.assert_array_equal(read["key"], jax.random.key_data(arrays["key"]))


def test_checkpoints_of_trees_are_read_by_path(folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"params": {"first": {"w": jnp.ones(3)}, "second": [jnp.zeros(2), jnp.ones(2)]}}
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "tree", tree)
    found = load_arrays("tree")
    assert set(found.at("params").read()) == {"first/w", "second/0", "second/1"}
    np.testing.assert_array_equal(found.at("params").at("second").at("1"), np.ones(2))


def test_results_are_one_file_if_unsharded_or_named_so(cli, saved, folder):
    one = "run", "spread.py:on_one", "--args", "{'w': ones(f32[2])}", "--repeat", "0", "--save"
    assert cli(*one, "plain").code == 0 and (folder / "plain").is_file()
    assert load_arrays("plain")["result"] == 2
    assert cli(*saved, "--save", "whole.npz").code == 0 and (folder / "whole.npz").is_file()


@pytest.mark.parametrize("path", ["full", "full.npz"])
def test_a_full_disk_leaves_no_files(cli, saved, folder, path):
    before = sorted(os.listdir(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = (*saved[:3], "arange(f32[8,40000])", *saved[4:])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        result = cli(*large, "--save", path, "--no-cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 2
    assert result.err.splitlines() == [f"error: cannot write '{path}': File too large"]
    assert sorted(os.listdir(folder)) == before


def test_mistakes_are_one_line_errors(cli, saved, folder, monkeypatch):
    (folder / "other").mkdir()
    (folder / "other" / "file").write_text("")
    assert "but not a checkpoint" in cli(*saved, "--save", "other").err
    assert "no such folder" in cli(*saved, "--save", "none/out").err

    def load(text):
        return cli("run", "spread.py:on_one", "--args", text).err

    assert "'other': the folder is not an Orbax checkpoint" in load("load('other')")
    assert "load('out') has no item 'w'" in load("load('out')['w']")
    (folder / "out" / "_METADATA").write_text("{")
    assert "cannot load 'out': the checkpoint is damaged" in load("load('out')")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "pip install orbax-checkpoint" in cli(*saved, "--save", "out").err
