"""Collectives and their reasons in programs around one operation each."""

from collections import Counter

import jax
import pytest

import jaxprtool
from tests.programs.collectives import collectives as read_from_text
from tests.programs.sharded_operations import OPERATIONS
from tests.share import first_and_proofs

#: Programs that every run of the tests compiles; `sweep` marks the others.
QUICK = frozenset({
    "cumsum", "sort", "argmax", "convolution", "grouped_convolution", "embedding",
    "concatenation", "norm_clip", "branches", "callback", "gathered_result",
    "manual_kinds", "nested_manual", "mixed_axes", "remat_scan", "pmapped",
})  # fmt: skip


def _program(name):
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.sweep])


@pytest.fixture(scope="module")
def found():
    """Return the shardings of programs, by name."""
    return {}


def shardings(found, name):
    return facts(found, name).collectives


def facts(found, name):
    if name not in found:
        made = OPERATIONS[name]()
        with jax.set_mesh(made.mesh):
            program = jaxprtool.trace(made.function, *made.arguments)
            found[name] = jaxprtool.shardings(program, program.in_avals)
    return found[name]


@pytest.mark.parametrize("name", first_and_proofs(list(map(_program, OPERATIONS))))
def test_bytes_add_up_and_each_collective_has_a_line_and_a_reason(found, name):
    listed, by_kind = Counter(), Counter()
    for each in shardings(found, name):
        listed[each.kind] += each.bytes * (each.count or 1)
        assert each.line and each.axes
        assert (each.reason is None) == (each.source == "program")
    for each, count in read_from_text(OPERATIONS[name]().compiled().as_text()).items():
        by_kind[each.kind] += each.bytes * count
    assert listed == by_kind


def _text(each):
    """Return a collective as text: its kind and axes, the moved value, and the reason."""
    what = f"{each.kind} {','.join(each.axes)}"
    if each.reason is None:
        return f"{what}: {each.value.partition(' at ')[0]}"
    operand, consumer = (
        part.partition(" at ")[0] for part in (each.reason.operand, each.reason.consumer)
    )
    before, after = each.reason.operand_spec, each.reason.consumer_spec
    specs = f"{before} across" if each.reason.mixes else f"{before} → {after}"
    return f"{what}: {operand} {specs} for {consumer}"


#: The collectives of the programs. Each line was checked by hand against the program and its
#: module.
EXPECTED = {
    "cumsum": {"all-gather data: dot_general P('data') → P() for reduce_window_sum"},
    "sort": {"all-to-all data: x P('data') across for sort"},
    "argmax": {
        "all-gather data: x P('data') across for reduce",
        "all-gather data: iota P('data') across for reduce",
        "all-reduce data: x P('data') → P() for reduce_max",
    },
    "top_k": {"all-gather data: x P(None, 'data') → P() for top_k"},
    "convolution": {
        "collective-permute data: x P(None, None, 'data') across for conv_general_dilated"
    },
    "grouped_convolution": {"all-gather data: tanh P('data') → P() for conv_general_dilated"},
    "depthwise_convolution": set(),
    "batch_groups": {
        "all-gather data: x P('data') → P('data:(4)2') for conv_general_dilated",
        "all-gather data:(1)4: conv_general_dilated P('data:(4)2', 'data:(1)4') → P() for result",
        "all-gather data:(4)2: conv_general_dilated P('data:(4)2') → P() for result",
    },
    "convolution_gradient": {
        "all-gather data: x P('data') → P() for conv_general_dilated",
        "all-gather data: mul P('data') → P() for conv_general_dilated",
        "all-reduce data: x P('data') → P() for conv_general_dilated",
    },
    "solve": {
        "all-gather data: a P('data') → P() for triangular_solve",
        "all-gather data: b P(None, 'data') → P() for triangular_solve",
    },
    "pooling": {"collective-permute data: x P('data') across for reduce_window_max"},
    "gather": {"all-reduce data: params P('data') → P() for gather"},
    "embedding": {"all-gather data: broadcast_in_dim P('data') → P() for gather"},
    "dynamic_slice": {"all-gather data: x P('data') → P() for dynamic_slice"},
    "reverse": {"collective-permute data: x P('data') across for rev"},
    "concatenation": {
        "all-to-all data: x P('data') across for concatenate",
        "all-to-all data: y P('data') across for concatenate",
    },
    "padding": {"collective-permute data: x P('data') across for pad"},
    "transposed": {"all-to-all data: x P('data') → P(None, 'data') for sharding_constraint"},
    "fft": {"all-gather data: convert_element_type P(None, 'data') → P() for fft"},
    "branches": {"all-reduce data: x P('data') → P() for reduce_sum"},
    "donated": {"all-to-all data: x P('data') → P(None, 'data') for mul"},
    "gathered_result": {"all-gather data: tanh P('data') → P() for result['whole']"},
    "callback": {
        "all-gather data: x P('data') → P() for pure_callback",
        "all-reduce data: pure_callback one device → P() for add",
        "all-gather data: tanh P('data') → P() for add",
    },
    "manual_kinds": {
        "reduce-scatter y: a",
        "all-gather y: reduce_scatter",
        "collective-permute y: all_gather",
        "all-to-all x: ppermute",
        "all-reduce x,y: all_to_all",
    },
    "nested_manual": {"all-reduce y: sin", "all-reduce x: psum_invariant"},
    "mixed_axes": {
        "all-reduce m: x",
        "all-gather m: tanh P('m', 'a') → P(None, 'a') for sharding_constraint",
        "all-reduce a: tanh P(None, 'a') → P() for dot_general",
    },
    "pmapped": {"all-reduce i: transpose"},
    "ring_loop": {"collective-permute x: carry of while"},
    "spmd_vmap": set(),
}


@pytest.mark.parametrize("name", list(map(_program, EXPECTED)))
def test_collectives_and_reasons_are_those_of_the_program(found, name):
    assert set(map(_text, shardings(found, name))) == EXPECTED[name]


def test_weights_used_in_a_product_are_the_gathered_values(found):
    listed = [each for each in shardings(found, "norm_clip") if each.kind == "all-gather"]
    assert sorted(map(_text, listed)) == [
        "all-gather data: params['a'] P('data') → P() for dot_general",
        "all-gather data: params['b'] P('data') → P() for dot_general",
    ]


@pytest.mark.proof
def test_weights_sliced_by_scan_are_named_after_the_argument(found):
    listed = [each for each in shardings(found, "remat_scan") if each.kind == "all-gather"]
    assert {each.count for each in listed} == {3}
    assert set(map(_text, listed)) == {
        "all-gather fsdp: slice of params['up'] P('fsdp', 'tensor') → P(None, 'tensor') "
        "for dot_general",
        "all-gather fsdp: slice of params['down'] P('tensor', 'fsdp') → P('tensor') "
        "for dot_general",
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name, kind", [("unknown_loop", "all-reduce"), ("ring_loop", "collective-permute")]
)
def test_a_loop_of_unknown_length_has_no_count(found, name, kind):
    (only,) = shardings(found, name)
    assert (only.kind, only.count) == (kind, None)


#: How many times its share each device computes of the operations of a program.
REPEATED = {
    "grouped_convolution": {("conv_general_dilated", 8.0)},
    "depthwise_convolution": set(),
    "batch_groups": {("conv_general_dilated", 8.0)},
    "convolution_gradient": {("conv_general_dilated", 8.0), ("conv_general_dilated", 4.5)},
    "convolution": set(),
    "solve": {("triangular_solve", 8.0)},
    "cholesky": {("cholesky", 8.0)},
    "fft": {("fft", 8.0)},
    "top_k": {("top_k", 8.0)},
    "sort": set(),
    "cumsum": set(),
    "gather": {("gather", 8.0), ("scatter-add", 8.0)},
    "norm_clip": set(),
    "remat_scan": set(),
    "manual_kinds": set(),
}


@pytest.mark.parametrize("name", list(map(_program, REPEATED)))
def test_operations_that_devices_compute_alike_are_listed(found, name):
    listed = facts(found, name).repeated
    assert {(each.operation.partition(" ")[0], each.times) for each in listed} == REPEATED[name]
    assert all(each.line for each in listed)


def test_the_share_of_a_device_is_that_of_the_whole_product(found):
    """XLA states the work of the whole convolution in the module of one device."""
    given = facts(found, "grouped_convolution")
    (row,) = given.repeated
    one_device = jax.jit(OPERATIONS["grouped_convolution"]().function.__wrapped__)
    arguments = OPERATIONS["grouped_convolution"]().arguments
    whole = one_device.lower(*arguments).compile().cost_analysis()["flops"]
    assert row.flops == sum(given.products.values())
    assert given.products_share == 1 / 8 and row.flops == pytest.approx(whole, rel=0.5)
