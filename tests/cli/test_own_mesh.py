"""A function with its own mesh runs with `--mesh` of the same axes, whatever their axis types."""

import pytest

MODULE = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)


def summed(mesh):
    def local(v):
        return jax.lax.psum(v.sum(), "x")

    return lambda v: jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P())(v)


mesh = Mesh(jax.devices()[:4], ("x",))
nested = jax.pmap(jax.pmap(jnp.sin))
named = jax.pmap(jax.pmap(jnp.sin, "i"), "j")
plain = jax.numpy.sin
auto, abstract = summed(mesh), summed(mesh.abstract_mesh)
bare = summed(jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,)))
explicit = summed(
    jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,))
)
"""


@pytest.fixture
def own(cli, folder):
    (folder / "own.py").write_text(MODULE)

    def run(command, name, args, *options):
        return cli(command, f"own.py:{name}", "--args", args, "--mesh", "x=4", *options)

    return run


@pytest.mark.parametrize("command", ["run", "show", "opt", "memory", "nans", "shardings"])
@pytest.mark.parametrize("name", ["auto", "abstract"])
def test_auto_axes_of_the_same_mesh_are_accepted(own, command, name):
    result = own(command, name, "arange(f32[8])")
    assert result.code == 0, result.err
    assert command != "run" or ("f32[] 28." in result.out and "cpu:3" in result.out)


@pytest.mark.parametrize("budgets", ["flops = 9\ncompiles = 9", "compiles = 9"])
def test_check_calls_a_function_on_the_mesh_that_it_was_traced_on(cli, folder, own, budgets):
    table = f'target = "own.py:auto"\nargs = "arange(f32[8])"\nmesh = "x=4"\n{budgets}'
    (folder / "pyproject.toml").write_text(f"[tool.jaxprtool.targets.own]\n{table}\n")
    result = cli("check")
    assert result.code == 0, result.err


def test_explicit_axes_and_specs_work_as_before(own):
    assert own("run", "explicit", "f32[8@x]").code == 0
    assert own("run", "auto", "f32[8]", "--in-specs", "P('x')").code == 0


@pytest.mark.parametrize(
    ("name", "args", "options", "hint"),
    [
        ("auto", "f32[8@x]", (), "mesh are Auto: shard its arguments with --in-specs"),
        ("explicit", "f32[8]", ("--in-specs", "P('x')"), "mesh are Explicit: shard its arguments"),
        ("auto", "f32[8]", ("--mesh", "x=2"), "the function has a mesh of its own; omit --mesh"),
        ("bare", "f32[8]", (), "the function has a mesh of its own; omit --mesh"),
        ("auto", "f32[8]", ("--mesh", "y=4"), "the function has a mesh of its own; omit --mesh"),
    ],
)
def test_another_mesh_is_a_one_line_error_with_the_option_to_write(own, name, args, options, hint):
    result = own("run", name, args, *options)
    assert result.code == 3 and result.err.count("error: ") == 1
    assert hint in result.err


@pytest.mark.parametrize("name", ["nested", "named"])
def test_a_nested_pmap_has_its_own_hint(cli, own, name):
    found = cli("run", f"own.py:{name}", "--args", "f32[2,2]")
    assert found.code != 0 and "maps over devices within a pmap or shard_map" in found.err
    assert "--in-specs" not in found.err and "omit --mesh" not in found.err


@pytest.mark.parametrize("command", ["opt", "compare", "diff"])
def test_passes_have_the_mesh_of_the_command_line(own, command):
    passes = ["-p", "jit(in_shardings=\"P('x')\")"]
    passes = passes if command == "opt" else ["-p", "", *passes]
    result = own(command, "plain", "f32[8]", *passes)
    assert result.code == (command == "diff") and "error" not in result.err, result.err
