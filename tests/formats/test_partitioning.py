"""The modules around XLA's partitioner: arrays are whole before it, and split after it."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.lowering import partitioned
from jaxprtool.ir.hlo.partitions import collectives
from tests.programs.sharded import SHARDED, floats


@pytest.fixture(autouse=True)
def without_cache():
    with compiled_afresh():
        yield


def test_a_program_is_whole_before_the_partitioner_and_split_after_it():
    function, arguments, _ = SHARDED["tensor"]()
    found = partitioned(jaxprtool.trace(function, *arguments))
    assert not list(collectives(found.before))
    assert {each.kind for each in collectives(found.final)} == {"all-reduce"}
    whole, split = (
        {str(i.shape) for i in m.entry.instructions} for m in (found.before, found.final)
    )
    assert "f32[32,64]" in whole - split and "f32[16,16]" in split - whole


@pytest.mark.proof
def test_explicit_collectives_exist_before_the_partitioner():
    function, arguments, _ = SHARDED["pipeline"]()
    found = partitioned(jaxprtool.trace(function, *arguments))
    assert {each.kind for each in collectives(found.before)} >= {"collective-permute"}


def test_a_single_device_program_is_not_partitioned():
    with pytest.raises(UnsupportedError, match="is not partitioned: it is compiled for one device"):
        partitioned(jaxprtool.trace(lambda x: x + 1, floats(8)))


def test_symbolic_sizes_are_refused_with_their_names():
    rows, columns = jax.export.symbolic_shape("m, n")
    program = jaxprtool.trace(jnp.sin, floats(rows, columns))
    with pytest.raises(UnsupportedError, match="sizes of sin that are numbers") as refused:
        partitioned(program)
    assert '-p "specialize(m=…, n=…)"' in refused.value.hint
