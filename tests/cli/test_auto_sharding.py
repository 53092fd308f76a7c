"""Commands that do not partition a program count it as a whole, and warn about it first."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool import trace
from jaxprtool.ir.meshes import left_to_partitioner

MODULE = """
import jax, jaxprtool
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("x"))
alone = NamedSharding(jax.make_mesh((1,), ("x",)), P("x"))

def plain(v):
    return (v * v).sum()

given = jax.jit(plain, in_shardings=rows)
made = jax.jit(lambda v: v * v, out_shardings=rows)
one_device = jax.jit(plain, in_shardings=alone)

def called(v):
    return given(v) + 1

def constrained(v):
    return jax.lax.with_sharding_constraint(v * v, rows).sum()

@jaxprtool.example(jax.ShapeDtypeStruct((8,), "float32", sharding=rows))
def typed(v):
    return (v * v).sum()

def array(v):
    return (v * v).sum()

array.example_args = lambda: (jax.device_put(jax.numpy.ones(8), rows),)

@jaxprtool.example(jax.ShapeDtypeStruct((8,), "float32", sharding=rows))
@jax.jit
def typed_in_jit(v):
    return (v * v).sum()

both = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def half_mapped(v):
    return jax.jit(jax.shard_map(
        lambda w: w * w, mesh=both, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))(v)

def mapped(v):
    return jax.shard_map(lambda w: w * w, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(v)
"""

NOTE = " is not partitioned; XLA would partition it by its shardings. "


LEFT = {
    "given": ["v"],
    "made": ["result"],
    "called": ["jit at sharded.py:16"],
    "constrained": ["sharding_constraint at sharded.py:19"],
    "typed": ["v"],
    "array": ["v"],
    "typed_in_jit": ["v"],
    "half_mapped": ["shard_map"],
    "plain": [],
    "one_device": [],
    "mapped": [],
}


@pytest.mark.parametrize("name", LEFT)
def test_unpartitioned_programs_are_announced_first(cli, folder, name):
    (folder / "sharded.py").write_text(MODULE)
    own = name.startswith(("typed", "array"))
    target = f"sharded.py:{name}", *(() if own else ("--args", "f32[8]"))
    for command in "cost", "memory", "outline":
        result = cli(command, *target)
        assert result.code == 0 and (NOTE in result.out.splitlines()[0]) == bool(LEFT[name])
        document = cli(command, *target, "--json")
        (program,) = json.loads(document.out)["programs"]
        left = [part.partition(" at ")[0] for part in program["left_to_partitioner"]]
        assert set(left) == {part.partition(" at ")[0] for part in LEFT[name]}
        assert (NOTE in document.err) == bool(LEFT[name])


@pytest.mark.parametrize("name", ["given", "typed", "mapped"])
def test_the_page_of_a_report_has_the_warning_too(cli, folder, name):
    (folder / "sharded.py").write_text(MODULE)
    target = f"sharded.py:{name}", *(() if name == "typed" else ("--args", "f32[8]"))
    assert cli("report", *target, "-o", "page.html").code == 0
    assert (folder / "page.html").read_text().count(NOTE) == (2 if LEFT[name] else 0)


def test_the_warning_remains_after_passes(folder):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rows = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("x")))
    program = trace(lambda v, w: (v * w).sum(), rows, jnp.float32(2))
    for passes in "dce", "-O2", "grad", "value_and_grad":
        assert left_to_partitioner(program.apply(passes)) == ("v",)
    explicit = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        typed = jax.device_put(jnp.ones(8), P("x"))
        assert left_to_partitioner(trace(lambda v: v * 2, typed)) == ("v", "result")


@pytest.mark.parametrize("command", ["cost", "memory", "show"])
def test_an_unreduced_argument_is_on_several_devices(cli, folder, command):
    (folder / "twice.py").write_text("def twice(x):\n    return x + x\n")
    found = cli(command, "twice.py:twice", "--args", "f32[64]{U:x}", "--mesh", "x=2")
    assert found.code == 0, found.err
