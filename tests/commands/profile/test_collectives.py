"""The bytes of collectives in a profile agree with the compiled module's text, by line."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.execute.running.backends import compiled_afresh
from tests.programs.collectives import collectives
from tests.programs.sharded import SHARDED, floats, mesh_of, under_jit


def profiled(function, arguments, calls=1):
    """Profile calls of a jitted function, without JAX's cache, which may have other lines."""
    values = jax.tree.map(lambda each: np.ones(each.shape, each.dtype), arguments)
    with compiled_afresh():
        jax.block_until_ready(function(*values))
        with jaxprtool.profiling() as found:
            for _ in range(calls):
                jax.block_until_ready(function(*values))
    return found.profile


def moved(profile):
    """Return the moved bytes, by kind."""
    found = Counter()
    for line in profile.lines:
        for each in line.moved:
            found[each.kind] += each.bytes
    return found


@pytest.mark.parametrize("name", ["tensor", "scanned", "pipeline"])
def test_bytes_are_those_of_the_text_for_each_run_of_the_module(name):
    sharded = SHARDED[name]()
    with jax.set_mesh(sharded.mesh):
        profile = profiled(sharded.function, sharded.arguments, calls=3)
    wanted = Counter()
    for each, count in collectives(sharded.compiled().as_text()).items():
        wanted[each.kind] += 3 * count * each.bytes
    assert moved(profile) == wanted and profile.devices == 8
    assert profile.moved_bytes == wanted.total()


def test_values_moved_by_one_operation_have_their_own_lines():
    mesh = mesh_of(data=8)

    def sums(x, y):
        first = jnp.sin(x).sum(0)
        second = jnp.cos(y).sum(0)
        return first, second

    function = under_jit(sums, mesh, P("data"), P("data"))
    arguments = floats(16, 16), floats(16, 48)
    with compiled_afresh():
        text = function.lower(*arguments).compile().as_text()
    assert sum(collectives(text).values()) == 1  # XLA merges both
    profile = profiled(function, arguments)
    start = sums.__code__.co_firstlineno
    lines = {line.line.line - start: line for line in profile.lines if line.moved_bytes}
    assert {number: line.moved_bytes for number, line in lines.items()} == {1: 64, 2: 192}
    assert all(line.is_split and line.seconds > 0 for line in lines.values())
    assert [(each.kind, each.count) for each in lines[1].moved] == [("all-reduce", 1)]


def test_the_iterations_of_a_loop_of_unknown_length_are_counted():
    mesh = mesh_of(data=8)

    def halved(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) > 20, lambda y: y / 2, x)

    profile = profiled(under_jit(halved, mesh, P("data")), (floats(128),))
    (line,) = (line for line in profile.lines if line.moved_bytes)
    # The sum of 128 ones is halved three times; the condition sums four times.
    assert [(each.bytes, each.count) for each in line.moved] == [(16, 4)]


def test_a_program_without_collectives_moves_nothing():
    profile = profiled(jax.jit(jnp.sin), (floats(8),))
    assert profile.devices is None and profile.moved_bytes is None
    assert all(line.moved is None and line.moved_bytes is None for line in profile.lines)
