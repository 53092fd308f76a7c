"""Specs and sizes are those of the compiled program, and listed values exist in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.commands.shardings.table import shardings_tables
from jaxprtool.ir.documents import in_bytes
from tests.programs.sharded import MISTAKES, SHARDED, Sharded, floats, mesh_of, under_jit
from tests.share import first_and_proofs

PROGRAMS = {**SHARDED, **MISTAKES}


def shardings(made: Sharded):
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
        return jaxprtool.shardings(program, program.in_avals)


def test_values_left_out_of_a_table_are_counted_as_often_as_they_occur():
    found = shardings(next(iter(PROGRAMS.values()))())
    values = [replace(value, count=3) for value in found.values]
    last = shardings_tables(replace(found, values=values), 100, top=0).plain().splitlines()[-1]
    assert f"{in_bytes(3 * sum(value.bytes for value in values))} " in last


@pytest.mark.parametrize("name", first_and_proofs(PROGRAMS))
def test_shardings_of_arguments_and_results_are_those_of_xla(name):
    made = PROGRAMS[name]()
    compiled, found = made.compiled(), shardings(made)
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
    placed = dict(zip(program.arg_names, jax.tree.leaves(compiled.input_shardings), strict=True))
    placed |= dict(zip(program.out_names, jax.tree.leaves(compiled.output_shardings), strict=True))
    avals = dict((*program.arguments, *program.results))
    listed = [each for each in found.values if each.kind != "value"]
    assert {each.name for each in listed} == set(placed)
    for each in listed:
        sharding, aval = placed[each.name], avals[each.name]
        size = np.prod(sharding.shard_shape(aval.shape), dtype=int) * aval.dtype.itemsize
        assert each.bytes_per_device == size
        assert each.bytes == np.prod(aval.shape, dtype=int) * aval.dtype.itemsize
        assert each.replicated == sharding.is_fully_replicated


def test_a_large_replicated_array_is_found():
    found = shardings(MISTAKES["replicated_embedding"]())
    large = [each.name for each in found.values if found.is_large_copy(each)]
    assert "params['embedding']" in large and "result[1]['embedding']" in large
    assert "params['weights']" not in large


def test_padding_is_counted():
    found = shardings(SHARDED["uneven"]())
    (value,) = (each for each in found.values if each.type == "f32[30,12]")
    assert value.spec == "P(None, 'data')"
    assert value.bytes_per_device == 30 * 2 * 4  # 12 columns over 8 devices: two on each
    assert value.padded_bytes == 30 * 4 * 4


def test_values_that_xla_fuses_away_are_not_listed():
    mesh = mesh_of(data=8)

    def mean(x):
        return jnp.square(jnp.exp(x) + 1.0).mean()

    found = shardings(Sharded(under_jit(mean, mesh, P("data")), (floats(64, 64),), mesh))
    names = [each.name.partition(" ")[0] for each in found.values]
    # XLA writes the squares, and fuses the operations before
    assert names == ["x", "square", "result"]


def test_a_value_that_a_constraint_gathers_is_replicated():
    mesh = mesh_of(data=8)

    def forward(weights, x):
        whole = with_sharding_constraint(jnp.tanh(x @ weights), P())
        return jnp.sort(whole, axis=0)

    made = Sharded(under_jit(forward, mesh, P(), P("data")), (floats(32, 32), floats(64, 32)), mesh)
    found = shardings(made)
    assert any(each.kind == "value" and found.is_large_copy(each) for each in found.values)


@pytest.mark.proof
def test_arrays_in_the_body_of_a_shard_map_are_not_whole_ones():
    found = shardings(SHARDED["expert"]())
    assert {each.type for each in found.values} <= {"f32[8,16,16]", "f32[128,16]", "f32[]"}
