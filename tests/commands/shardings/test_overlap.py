"""Products can overlap a collective if neither depends on the other."""

from collections import Counter

from jaxlib._hlo import hlo_module_from_text

from jaxprtool.commands.shardings.partitions import independent_products
from jaxprtool.ir.hlo.module import read_module

#: `free` is independent of the gather; `before` computes its operand; `after` reads its result.
MODULE = """HloModule overlap, num_partitions=8
ENTRY main {
  p = f32[8,8] parameter(0)
  w = f32[8,16] parameter(1)
  before = f32[8,8] dot(p, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  gathered = f32[64,8] all-gather(before), dimensions={0}, channel_id=1,
    replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true
  free = f32[8,16] dot(p, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  after = f32[64,16] dot(gathered, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT all = (f32[8,16], f32[64,16]) tuple(free, after)
}
"""


def test_only_independent_products_can_overlap():
    module = read_module(hlo_module_from_text(MODULE).as_serialized_hlo_module_proto())
    assert independent_products(module) == {"gathered": Counter(f32=2 * 8 * 8 * 16)}
