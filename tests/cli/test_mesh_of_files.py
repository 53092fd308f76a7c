"""A program file written on eight devices runs on two, by --mesh and from Python."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxprtool.cli.main import main
from tests.share import first_and_proofs, on_one_release

MODULE = """
import jax, jax.numpy as jnp, jaxprtool
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

@jaxprtool.example("{'in': f32[16,32], 'out': f32[32,8]}", "f32[32,16]", "i32[32]")
def step(params, x, labels):
    def loss(params):
        hidden = jax.nn.relu(x @ params["in"])
        hidden = jax.lax.with_sharding_constraint(hidden, P("data"))
        picked = jnp.take_along_axis(jax.nn.log_softmax(hidden @ params["out"]), labels[:, None], 1)
        return -picked.mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

@jaxprtool.example("f32[16@data,4]", "f32[4,8]")
def typed(x, w):
    return jnp.tanh(x @ w).sum(1)

@jaxprtool.example("f32[16@data]")
def shards(x):
    shard = lambda v: jax.lax.psum(v, "data")
    return jax.shard_map(shard, in_specs=P("data"), out_specs=P())(x)

def plain(x):
    return x * 2

def jitted():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), (AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    silu = jax.jit(jax.nn.silu, in_shardings=rows)

    @partial(jax.jit, in_shardings=(rows, whole), out_shardings=rows)
    def function(x, w):
        return jax.lax.with_sharding_constraint(silu(x) @ w, rows) * 2

    return function
"""

#: Writes files on eight devices from Python, and the results there.
WRITER = """
import jax, jax.numpy as jnp, numpy as np, jaxprtool, model
program = jaxprtool.trace(model.jitted(), jnp.ones((16, 4)), jnp.ones((4, 8)))
jaxprtool.write(program, "jitted.jaxpr")
x, w = np.arange(64, dtype="f").reshape(16, 4) / 64, np.arange(32, dtype="f").reshape(4, 8) / 32
np.savez("eight.npz", x=x, w=w, out=program(x, w))
"""

#: Reads a file on two devices, and compares it with the function traced there.
READER = """
import jax, numpy as np, jaxprtool, model
assert len(jax.devices()) == 2
x, w, wanted = (np.load("eight.npz")[name] for name in ("x", "w", "out"))
mesh = jax.make_mesh((2,), ("data",))
program = jaxprtool.read("jitted.jaxpr").on_mesh(mesh)
again = jaxprtool.trace(model.jitted(), x, w)
assert jaxprtool.equivalent(program, again) and program.jit == again.jit
out = program(x, w)
assert len(out.sharding.device_set) == 2
np.testing.assert_allclose(out, wanted, rtol=1e-5)
"""

IN_SPECS = ("--in-specs", "(P(), P('data'), P('data'))")
TWO = ("--mesh", "data=2", "--host-devices", "2")


@pytest.fixture
def there(folder):
    """`there(*arguments)` runs Python in a process of its own, which must exit with 0."""
    (folder / "model.py").write_text(MODULE)
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}

    def run(*arguments, code=0, **more):
        command, env = [sys.executable, *arguments], clean | {"PYTHONPATH": str(folder)} | more
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert ended.returncode == code, ended.stderr
        return ended

    return run


@pytest.fixture
def tool(there):
    return lambda *arguments, **more: there("-m", "jaxprtool", *arguments, **more)


@on_one_release
@pytest.mark.parametrize(("target", "specs"), [("step", IN_SPECS), ("typed", ())])
def test_a_file_written_on_eight_devices_returns_the_same_on_two(cli, tool, folder, target, specs):
    written = cli("opt", f"model.py:{target}", "--mesh", "data=8", *specs, "-o", "eight.jaxpr")
    assert written.code == 0, written.err
    run = "run", "eight.jaxpr", "--repeat", "0"
    assert "8 devices" in cli(*run, "--save", "eight.npz").out
    assert "cpu:0, cpu:1" in tool(*run, *TWO, "--save", "two.npz").stdout
    eight, two = np.load(folder / "eight.npz"), np.load(folder / "two.npz")
    assert eight.files == two.files
    for name in eight.files:
        np.testing.assert_allclose(eight[name], two[name], rtol=1e-4, atol=1e-6)
    # It equals the program that the function has on two devices.
    diff = "diff", "eight.jaxpr", f"model.py:{target}", *TWO, *specs
    assert f"{target}: equivalent" in tool(*diff).stdout


@on_one_release
def test_a_file_is_read_and_put_on_two_devices_from_python(there):
    there("-c", WRITER, JAX_NUM_CPU_DEVICES="8")
    there("-c", READER, JAX_NUM_CPU_DEVICES="2")


@on_one_release
def test_too_few_devices_name_the_option_and_the_axes_of_the_file(tool, cli, folder):
    assert cli("opt", "model.py:typed", "--mesh", "data=8", "-o", "eight.jaxpr").code == 0
    result = tool("run", "eight.jaxpr", "--host-devices", "2", code=2)
    assert "typed runs on a mesh of 8 devices (data=8)" in result.stderr
    assert "hint: --mesh data=… puts it on a smaller mesh; --host-devices 8" in result.stderr
    function = cli("run", "model.py:typed", "--mesh", "data=16")
    assert function.code == 2 and "hint: --host-devices 16" in function.err


# --- in this process, which has eight devices -----------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of the module, with a file of each of its functions."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "model.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, more in ("step", IN_SPECS), ("typed", ()), ("shards", ()):
            options = "--mesh", "data=4", *more, "-o", f"{name}.jaxpr"
            assert main(("opt", f"model.py:{name}", *options)) == 0
        assert main(("opt", "model.py:plain", "--args", "f32[8]", "-o", "plain.jaxpr")) == 0
    return folder


@pytest.fixture
def files(cli, place, monkeypatch):
    """Run the test in the folder of the files."""
    monkeypatch.chdir(place)


@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("cost",),
        ("source",),
        ("memory", "--compiled"),
        pytest.param(("nans",), marks=pytest.mark.proof),
        ("watch",),
        ("opt", "-p", "dce", "--verify"),
        ("opt", "-O2", "--verify"),
        ("compare", "-p", "dce", "-p", "cse"),
        ("emit", "--to", "hlo-optimized"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", first_and_proofs(["step", "typed"]))
def test_every_command_puts_a_file_on_the_mesh(cli, files, name, command):
    first, *options = command
    result = cli(first, f"{name}.jaxpr", "--mesh", "data=2", *options)
    assert result.code == 0, result.err


def test_a_file_for_more_devices_than_available_is_shown_but_not_run(cli, files):
    assert "f32[16@data,4]" in cli("show", "typed.jaxpr", "--mesh", "data=16").out
    result = cli("run", "typed.jaxpr", "--mesh", "data=16")
    assert result.code == 2 and "typed runs on a mesh of 16 devices (data=16)" in result.err


@pytest.mark.parametrize(
    ("name", "mesh", "message", "hint"),
    [
        ("typed", "x=2", "typed is for a mesh with the axes data=4, not x=2", "data=…"),
        ("typed", "data=2,x=1", "with the axes data=4, not data=2,x=1", "data=…"),
        ("typed", "data=3", "argument 'x' of typed: f32[16@data,4] has a dimension of size", ""),
        ("step", "data=5", "argument 'x' of step: f32[32,16] has a dimension of size 32", ""),
        ("plain", "data=2", "plain has no mesh, so it cannot be put on data=2", ""),
        ("shards", "data=2", "shard_map at model.py:24 has the shapes of shards over", "--mesh"),
    ],
)
def test_a_wrong_mesh_is_a_one_line_error(cli, files, name, mesh, message, hint):
    result = cli("run", f"{name}.jaxpr", "--mesh", mesh)
    assert result.code == 2 and message in result.lines[0]
    assert len(result.lines) == (2 if hint else 1) and hint in result.lines[-1]


def test_passes_may_use_the_mesh_of_the_option_for_a_file_without_one(cli, files):
    passes = "jit(in_shardings=P('data'))"
    result = cli("run", "plain.jaxpr", "--mesh", "data=2", "-p", passes)
    assert result.code == 0 and "cpu:0, cpu:1" in result.out, result.err
