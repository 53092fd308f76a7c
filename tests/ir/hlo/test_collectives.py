"""Collectives are those that an independent reader finds in the text of the compiled module."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxprtool.ir.hlo.collectives import collectives
from jaxprtool.ir.hlo.module import compiled_module
from tests.programs.collectives import Collective
from tests.programs.collectives import collectives as read_from_text
from tests.programs.sharded import MISTAKES, SHARDED, floats, mesh_of, under_jit


@pytest.mark.parametrize("name", [*SHARDED, *MISTAKES])
def test_kinds_bytes_and_counts_are_those_of_the_text(name):
    compiled = {**SHARDED, **MISTAKES}[name]().compiled()
    found = Counter()
    for each in collectives(compiled_module(compiled)):
        found[Collective(each.kind, each.bytes)] += each.count
    assert found == read_from_text(compiled.as_text())


def test_the_count_in_a_loop_of_unknown_length_is_unknown():
    mesh = mesh_of(x=8)

    def halved(w, x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) > 1, lambda y: (y @ w) / 2, x)

    step = under_jit(halved, mesh, P("x"), P())
    found = list(collectives(compiled_module(step.lower(floats(8, 8), floats(8, 8)).compile())))
    assert found and any(each.count is None for each in found)
