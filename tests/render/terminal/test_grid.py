"""Rows in columns: which columns shrink on a narrow terminal, and where words are broken."""

import pytest

from jaxprtool.ir.notation import BinderToken, Comment, Heading, PrimitiveName, Type
from jaxprtool.render.terminal.lines import grid

ROWS = [
    [[Comment("0")], [BinderToken("a"), Type(":f32[4,4,4,4]")], [PrimitiveName("dot_general")]],
    [[Comment("1")], [BinderToken("b"), Type(":f32[4]")], [PrimitiveName("broadcast_in_dim")]],
]


def lines(rows, width, headings=("#", "outputs", "primitive")):
    return "".join(grid(headings, rows, width)).splitlines()


def test_columns_are_as_wide_as_their_cells():
    assert lines(ROWS, 80) == [
        "#  outputs         primitive",
        "─" * 35,
        "0  a:f32[4,4,4,4]  dot_general",
        "1  b:f32[4]        broadcast_in_dim",
    ]


def test_a_type_is_broken_after_a_comma_and_a_primitive_is_not():
    assert lines(ROWS, 32)[2:] == [
        "0  a:f32[4,4,   dot_general",
        "   4,4]",
        "1  b:f32[4]     broadcast_in_dim",
    ]


@pytest.mark.parametrize("width", [8, 20, 33, 40, 79])
def test_nothing_is_lost_or_wider_than_the_terminal(width):
    words = [f"name_{i}=({i}, {i})" for i in range(30)]
    rows = [[[Comment("0")], [" ".join(words)], ["x" * 50]]]
    shown = lines(rows, width)
    assert max(map(len, shown)) <= width
    text = "".join("".join(shown).partition("─")[2].strip("─").split())
    assert sorted(text) == sorted("0" + "".join(words).replace(" ", "") + "x" * 50)


def test_one_long_cell_does_not_narrow_all_rows():
    short = [[["a"], ["b" * 10], ["c" * 10]] for _ in range(50)]
    shown = lines([*short, [["a"], [" ".join(["d" * 9] * 20)], ["c"]]], 40)
    assert shown[2:52] == ["a  bbbbbbbbbb                 cccccccccc"] * 50


def test_broken_pieces_keep_their_roles():
    tokens = grid(["#", "outputs", "primitive"], ROWS, 32)
    assert [str(t) for t in tokens if type(t) is Type] == [
        ":",
        "f32[4,",
        "4,",
        "4,",
        "4]",
        ":f32[4]",
    ]
    assert [str(t) for t in tokens if type(t) is Heading] == ["#", "outputs", "primitive"]


def test_text_below_a_row_starts_at_the_second_column():
    more = [[f"parameter={'x' * 20}", " ", "other=3"], []]
    shown = "".join(grid(["#", "outputs", "primitive"], ROWS, 36, more)).splitlines()
    assert shown[2:] == [
        "0  a:f32[4,4,4,4]  dot_general",
        f"     parameter={'x' * 20}",
        "     other=3",
        "1  b:f32[4]        broadcast_in_dim",
    ]


def test_the_column_of_the_longest_words_is_broken_first():
    row = [["a:f32[4,64,128]"], ["mul"], ["params['params']['Block_0']['Dense_0']['kernel']"]]
    assert lines([row], 44)[2:] == [
        "a:f32[4,64,128]  mul      params['params']",
        "                          ['Block_0']",
        "                          ['Dense_0']",
        "                          ['kernel']",
    ]
