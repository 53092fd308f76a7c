"""Corresponding dimensions of operands and results, in hand-written modules."""

import pytest
from jaxlib._hlo import hlo_module_from_text

from jaxprtool.ir.hlo.module import read_module
from jaxprtool.ir.hlo.partitions import Reading, contracted, reading

ADD = """
add { a = f32[] parameter(0)
 b = f32[] parameter(1)
 ROOT c = f32[] add(a, b) }
"""

#: For each operation, the dimensions of its operands, and those that it mixes.
CASES = {
    "f32[8,4] tanh(f32[8,4] a)": [((0, 1), ())],
    "f32[4,8] transpose(f32[8,4] a), dimensions={1,0}": [((1, 0), ())],
    "f32[3,8,4] broadcast(f32[8,4] a), dimensions={1,2}": [((1, 2), ())],
    "f32[8,12] reshape(f32[8,3,4] a)": [((0, 1, None), (2,))],
    "f32[8,3,4] reshape(f32[8,12] a)": [((0, 1), ())],
    "f32[8] reshape(f32[1,8] a)": [((None, 0), (0,))],
    "f32[2,8,5] dot(f32[2,8,4] a, f32[2,4,5] b), lhs_batch_dims={0}, rhs_batch_dims={0}, "
    "lhs_contracting_dims={2}, rhs_contracting_dims={1}": [
        ((0, 1, None), (2,)),
        ((0, None, 2), (1,)),
    ],
    "f32[8] reduce(f32[8,4] a, f32[] b), dimensions={1}, to_apply=add": [
        ((0, None), (1,)),
        ((), ()),
    ],
    "f32[8,4] reduce-window(f32[8,4] a, f32[] b), window={size=3x1 pad=1_1x0_0}, to_apply=add": [
        ((0, 1), (0,)),
        ((), ()),
    ],
    "f32[8,2] slice(f32[8,4] a), slice={[0:8], [0:2]}": [((0, 1), (1,))],
    "f32[8,4] reverse(f32[8,4] a), dimensions={1}": [((0, 1), (1,))],
    "f32[16,4] concatenate(f32[8,4] a, f32[8,4] b), dimensions={0}": [((0, 1), (0,))] * 2,
    "f32[8,6] pad(f32[8,4] a, f32[] b), padding=0_0x1_1": [((0, 1), (1,)), ((), ())],
    "f32[5,4] gather(f32[8,4] a, s32[5,1] b), offset_dims={1}, collapsed_slice_dims={0}, "
    "start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}": [
        ((None, 1), (0,)),
        ((0, None), ()),
    ],
    "f32[8,4] scatter(f32[8,4] a, s32[5,1] b, f32[5,4] c), update_window_dims={1}, "
    "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, "
    "to_apply=add": [((0, 1), (0,)), ((None, None), (0, 1)), ((None, 1), (0,))],
    "f32[2,6,8] convolution(f32[2,3,8] a, f32[6,3,3] b), window={size=3 pad=1_1}, "
    "dim_labels=bf0_oi0->bf0": [((0, None, 2), (1, 2)), ((1, None, None), (1, 2))],
}  # fmt: skip


def _operation(text):
    """Return a module with one operation, whose operands are parameters."""
    result, _, rest = text.partition(" ")
    opcode, _, rest = rest.partition("(")
    operands, _, attributes = rest.partition(")")
    lines, names = [], []
    for part in operands.split(", "):
        kind, _, name = part.rpartition(" ")
        lines.append(f"  {name} = {kind} parameter({len(names)})")
        names.append(name)
    lines.append(f"  ROOT result = {result} {opcode}({', '.join(names)}){attributes}")
    body = "\n".join(lines)
    module = hlo_module_from_text(f"HloModule m\n{ADD}\nENTRY main {{\n{body}\n}}\n")
    return read_module(module.as_serialized_hlo_module_proto())


@pytest.mark.parametrize("text", CASES)
def test_dimensions_and_mixed_ones(text):
    module = _operation(text)
    root = module.entry.root
    operands = [module.instructions[each].shape for each in root.operands]
    found = [reading(root, position, shape) for position, shape in enumerate(operands)]
    assert found == [Reading(dims, frozenset(mixed)) for dims, mixed in CASES[text]]


def test_a_product_sums_over_pairs_of_dimensions():
    text = next(each for each in CASES if " dot(" in each)
    assert contracted(_operation(text).entry.root) == [(2, 1)]


def test_a_tuple_has_no_dimensions_itself():
    root = _operation("(f32[8]) tuple(f32[8] a)").entry.root
    assert reading(root, 0, root.shape) is None
    assert reading(root, 0, root.shape.parts[0]) == Reading((0,), frozenset())
