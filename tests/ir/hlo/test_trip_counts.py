"""Counting loops are recognized, with XLA's trip count where it states one."""

import jax
import jax.numpy as jnp
import pytest
from jaxlib._hlo import hlo_module_from_text

from jaxprtool.ir.hlo.module import compiled_module, counted_trips, read_module, while_trip_count
from tests.programs.sharded import floats


def loops(module):
    return [each for each in module.instructions.values() if each.opcode == "while"]


def counted(function, *args):
    """Return the trip counts of each loop: recognized before XLA's passes, stated after them."""
    lowered = jax.jit(function).lower(*args)
    before = read_module(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    after = compiled_module(lowered.compile())
    return (
        [counted_trips(before, each) for each in loops(before)],
        [while_trip_count(after, each) for each in loops(after)],
    )


def step(_, x):
    return jnp.sort(jnp.tanh(x))  # a body that XLA does not unroll


@pytest.mark.parametrize("first, last", [(0, 12), (3, 12), (0, 1000), (5, 6)])
def test_a_loop_between_two_constants(first, last):
    alone, known = counted(lambda x: jax.lax.fori_loop(first, last, step, x), floats(300))
    assert alone == [last - first]
    assert known == [last - first] or (known == [] and last - first == 1)


def test_a_scan_and_a_nested_scan():
    def both(x):
        def outer(x, _):
            return jax.lax.scan(lambda y, _: (step(0, y), None), x, None, 5)[0], None

        return jax.lax.scan(outer, x, None, 7)[0]

    alone, known = counted(both, floats(300))
    assert sorted(alone) == sorted(known) == [5, 7]


def test_a_loop_of_unknown_length_has_no_count():
    alone, known = counted(
        lambda x: jax.lax.while_loop(lambda y: y.sum() < 10, lambda y: step(0, y), x), floats(300)
    )
    assert alone == known == [None]


def test_a_loop_up_to_an_argument_has_no_count():
    def upto(x, n):
        return jax.lax.fori_loop(0, n, step, x)

    alone, known = counted(upto, floats(300), jax.ShapeDtypeStruct((), jnp.int32))
    assert alone == known == [None]


#: A loop as XLA for TPU leaves it, without a trip count.
LOOP = """HloModule counts
body {
  carry = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  x = f32[8] get-tuple-element(carry), index=1
  two = s32[] constant(2)
  next = s32[] add(i, two)
  ROOT made = (s32[], f32[8]) tuple(next, x)
}
condition {
  carry = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  last = s32[] constant(11)
  ROOT less = pred[] compare(i, last), direction=LT
}
ENTRY main {
  x = f32[8] parameter(0)
  first = s32[] constant(4)
  copied = s32[] copy(first)
  start = (s32[], f32[8]) tuple(copied, x)
  ROOT loop = (s32[], f32[8]) while(start), condition=condition, body=body
}
"""


def test_a_loop_that_counts_in_steps():
    module = read_module(hlo_module_from_text(LOOP).as_serialized_hlo_module_proto())
    (loop,) = loops(module)
    assert while_trip_count(module, loop) == len(range(4, 11, 2))


@pytest.mark.parametrize(
    "change",
    [("direction=LT", "direction=NE"), ("constant(11)", "negate(i)"), ("add(i,", "subtract(i,")],
)
def test_other_loops_are_not_counting_loops(change):
    text = LOOP.replace(*change)
    assert text != LOOP
    module = read_module(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    (loop,) = loops(module)
    assert while_trip_count(module, loop) is None


#: A loop whose counter is changed by an inner loop before it is incremented.
CHANGED_INSIDE = """HloModule changed
inner_body {
  carry = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  x = f32[8] get-tuple-element(carry), index=1
  doubled = s32[] add(i, i)
  ROOT made = (s32[], f32[8]) tuple(doubled, x)
}
inner_condition {
  carry = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  last = s32[] constant(7)
  ROOT less = pred[] compare(i, last), direction=LT
}
body {
  carry = (s32[], f32[8]) parameter(0)
  inner = (s32[], f32[8]) while(carry), condition=inner_condition, body=inner_body
  i = s32[] get-tuple-element(inner), index=0
  x = f32[8] get-tuple-element(inner), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT made = (s32[], f32[8]) tuple(next, x)
}
condition {
  carry = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  last = s32[] constant(100)
  ROOT less = pred[] compare(i, last), direction=LT
}
ENTRY main {
  x = f32[8] parameter(0)
  first = s32[] constant(1)
  start = (s32[], f32[8]) tuple(first, x)
  ROOT loop = (s32[], f32[8]) while(start), condition=condition, body=body
}
"""


def test_a_counter_that_an_inner_loop_changes_has_no_count():
    module = read_module(hlo_module_from_text(CHANGED_INSIDE).as_serialized_hlo_module_proto())
    assert [while_trip_count(module, each) for each in loops(module)] == [None, None]
