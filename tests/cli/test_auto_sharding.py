"""What XLA would partition is counted whole, and cost and memory say so first."""

import json

import pytest

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

def mapped(v):
    return jax.shard_map(lambda w: w * w, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(v)
"""

NOTE = " was not partitioned: XLA would do so, by its shardings; "


@pytest.mark.parametrize("command", ["cost", "memory"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, True) for name in ("given", "made", "called", "constrained")),
        *((name, False) for name in ("plain", "one_device", "mapped")),
    ],
)
def test_the_first_line_says_that_a_program_was_not_partitioned(cli, folder, command, name, said):
    (folder / "sharded.py").write_text(MODULE)
    result = cli(command, f"sharded.py:{name}", "--args", "f32[8]")
    assert result.code == 0 and (NOTE in result.out.splitlines()[0]) == said
    document = cli(command, f"sharded.py:{name}", "--args", "f32[8]", "--json")
    assert json.loads(document.out) and (NOTE in document.err) == said
