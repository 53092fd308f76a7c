"""The collectives agree with an independent parser of the compiled module's text."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxlib._hlo import hlo_module_from_text

from jaxprtool.ir.hlo.module import compiled_module, read_module
from jaxprtool.ir.hlo.partitions import collectives, moved_values, started_collective
from tests.programs.collectives import Collective
from tests.programs.collectives import collectives as read_from_text
from tests.programs.sharded import MISTAKES, SHARDED, floats, mesh_of, under_jit


@pytest.mark.parametrize("name", [*SHARDED, *MISTAKES])
def test_kinds_bytes_and_counts_agree_with_the_text(name):
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


#: XLA's modules for GPU and TPU: asynchronous collectives, some of them merged.
STARTED = """HloModule started, num_partitions=8
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}
ENTRY main {
  p = f32[8] parameter(0)
  q = f32[4] parameter(1)
  reduce = (f32[8], f32[4]) all-reduce-start(p, q), replica_groups={{0,1,2,3,4,5,6,7}},
    channel_id=1, use_global_device_ids=true, to_apply=add
  reduced = (f32[8], f32[4]) all-reduce-done(reduce)
  gather = ((f32[8], f32[4]), (f32[64], f32[32])) all-gather-start(p, q), dimensions={0},
    replica_groups={{0,1,2,3,4,5,6,7}}, channel_id=2, use_global_device_ids=true
  gathered = (f32[64], f32[32]) all-gather-done(gather)
  permute = (f32[8], f32[8], u32[], u32[]) collective-permute-start(p), channel_id=3,
    source_target_pairs={{0,1},{1,0}}
  permuted = f32[8] collective-permute-done(permute)
  ROOT all = ((f32[8], f32[4]), (f32[64], f32[32]), f32[8]) tuple(reduced, gathered, permuted)
}
"""


def test_the_bytes_of_an_asynchronous_collective_are_those_of_all_results():
    module = read_module(hlo_module_from_text(STARTED).as_serialized_hlo_module_proto())
    assert [(each.kind, each.bytes) for each in collectives(module)] == [
        ("all-reduce", 4 * (8 + 4)),
        ("all-gather", 4 * (64 + 32)),
        ("collective-permute", 4 * 8),
    ]


MERGED = """HloModule merged, num_partitions=8
ENTRY main {
  p = f32[8] parameter(0)
  q = f32[4] parameter(1)
  gather = ((f32[8], f32[4]), (f32[64], f32[32])) all-gather-start(p, q), dimensions={0},
    replica_groups={{0,1,2,3,4,5,6,7}}, channel_id=2, use_global_device_ids=true,
    metadata={op_name="jit(f)/tanh"}
  gathered = (f32[64], f32[32]) all-gather-done(gather)
  second = f32[32] get-tuple-element(gathered), index=1, metadata={op_name="jit(f)/sin"}
  first = f32[64] get-tuple-element(gathered), index=0, metadata={op_name="jit(f)/tanh"}
  again = f32[4] all-to-all(q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT all = (f32[64], f32[32], f32[4]) tuple(first, second, again)
}
"""


def test_merged_values_have_their_own_names():
    module = read_module(hlo_module_from_text(MERGED).as_serialized_hlo_module_proto())
    gather, again = (each.instruction for each in collectives(module))
    moved = [(value.path, str(shape)) for value, shape in moved_values(module, gather)]
    assert moved == [("jit(f)/tanh", "f32[64]"), ("jit(f)/sin", "f32[32]")]
    assert moved_values(module, again) == [(again, again.shape)]
    named = module.by_name
    assert (
        started_collective(module, named["gathered"])
        is started_collective(module, gather)
        is gather
    )
    assert (
        started_collective(module, again) is again
        and started_collective(module, named["first"]) is None
    )


ASYNC = """
HloModule background, num_partitions=8

inner {
  p = f32[16] parameter(0)
  ROOT exchanged = f32[16] all-to-all(p), dimensions={0}, channel_id=1,
    replica_groups={{0,1,2,3,4,5,6,7}}
}

ENTRY main {
  p = f32[16] parameter(0)
  start = ((f32[16]), f32[16], u32[]) async-start(p), calls=inner
  update = ((f32[16]), f32[16], u32[]) async-update(start), calls=inner
  ROOT done = f32[16] async-done(update), calls=inner
}
"""


def test_an_asynchronous_collective_is_counted_once():
    module = read_module(hlo_module_from_text(ASYNC).as_serialized_hlo_module_proto())
    assert [(each.kind, each.bytes, each.count) for each in collectives(module)] == [
        ("all-to-all", 4 * 16, 1)
    ]
