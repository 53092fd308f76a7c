import pytest

from jaxprtool.ir.notation.alike_paths import alike


def grouped(*items):
    return [(g.path, len(g.items)) for g in alike(items, lambda i: i[0], lambda i: i[1])]


def test_paths_that_differ_in_an_index_are_one_in_the_order_of_the_first():
    found = grouped(("b[0].w", 1), ("b[0].b", 2), ("out", 3), ("b[1].w", 1), ("b[1].b", 2))
    assert found == [("b[0..1].w", 2), ("b[0..1].b", 2), ("out", 1)]


def test_items_of_another_kind_are_apart():
    assert grouped(("b[0]", "f32"), ("b[1]", "f32"), ("b[2]", "f16")) == [
        ("b[0..1]", 2),
        ("b[2]", 1),
    ]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([3], "3"),
        ([0, 1], "0..1"),
        ([0, 2], "0,2"),
        ([1, 4, 7, 10, 13], "1..13:3"),
        ([4, 0], "0,4"),
    ],
)
def test_indices_are_shown_exactly(numbers, shown):
    assert grouped(*((f"p['x'][{n}]", 0) for n in numbers)) == [(f"p['x'][{shown}]", len(numbers))]


def test_two_indices_are_folded_if_all_combinations_are_there():
    square = [(f"s[{i}].r[{j}]", 0) for i in range(2) for j in range(3)]
    assert grouped(*square) == [("s[0..1].r[0..2]", 6)]
    assert grouped(*square[:-1]) == [(path, 1) for path, _ in square[:-1]]


def test_names_with_numbers_of_linen_are_indices_and_sizes_in_names_are_not():
    assert grouped(("['Dense_0']['kernel']", 0), ("['Dense_1']['kernel']", 0)) == [
        ("['Dense_0..1']['kernel']", 2)
    ]
    assert grouped(("conv_3x3", 0), ("conv_1x1", 0)) == [("conv_3x3", 1), ("conv_1x1", 1)]
