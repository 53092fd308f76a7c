import pytest

from jaxprtool.ir.trees import alike, common_path, named_by_end


def grouped(*items):
    return [(g.path, len(g.items)) for g in alike(items, lambda i: i[0], lambda i: i[1])]


def test_paths_that_differ_in_numbers_only_are_merged_at_the_first():
    found = grouped(("b[0].w", 1), ("b[0].b", 2), ("out", 3), ("b[1].w", 1), ("b[1].b", 2))
    assert found == [("b[0..1].w", 2), ("b[0..1].b", 2), ("out", 1)]


def test_items_of_another_kind_are_not_merged():
    found = grouped(("b[0]", "f32"), ("b[1]", "f32"), ("b[2]", "f16"))
    assert found == [("b[0..1]", 2), ("b[2]", 1)]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([3], "3"),
        ([0, 1], "0..1"),
        ([9, 10, 11], "9..11"),
        ([4, 0], "0,4"),
        (range(0, 40, 2), "*"),
    ],
)
def test_numbers_are_ranges_or_short_lists(numbers, shown):
    assert common_path([f"p['Dense_{n}']" for n in numbers]) == f"p['Dense_{shown}']"


def test_two_numbers_are_ranges_only_if_all_combinations_occur():
    square = [f"s[{i}].r[{j}].x8" for i in range(2) for j in range(3)]
    assert common_path(square) == "s[0..1].r[0..2].x8"
    assert common_path(square[:-1]) == "s[*].r[*].x8"


def test_numbers_keep_their_leading_zeros():
    assert common_path(["block_01.w"]) == "block_01.w"
    assert common_path([f"block_{n:02}.w" for n in range(8, 12)]) == "block_08..11.w"


NAMES = ["params['blocks'][0]['qkv']['kernel']", "params['blocks'][0]['out']['kernel']", "x.mask"]


@pytest.mark.parametrize(
    ("end", "names"),
    [
        ("qkv.kernel", NAMES[:1]),
        ("['qkv']['kernel']", NAMES[:1]),
        ("mask", NAMES[2:]),
        ("kernel", NAMES[:2]),
        ("blocks", ["params['blocks']"]),
        ("blocks[0].out", ["params['blocks'][0]['out']"]),
        ("ask", []),
        ("0", []),
        ("", []),
    ],
)
def test_a_path_suffix_names_the_paths_that_end_with_it(end, names):
    assert named_by_end(NAMES, end) == names
