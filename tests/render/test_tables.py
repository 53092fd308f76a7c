"""A table has the same rows in the terminal and on a page."""

from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.notation import BinderToken, Comment
from jaxprtool.render.page import SourceLink, page_table
from jaxprtool.render.terminal.tables import Rendering, drawn
from jaxprtool.render.views import (
    Cell,
    Column,
    RowGroup,
    Table,
    bytes_cell,
    number_column,
    share,
    share_column,
)

COLUMNS = share_column(is_summed=True), number_column("bytes", in_bytes), Column("line")
LINE = SourceLink("model.py:9", "", "f0-9", "x @ w")


def row(size, text, **more):
    return [share(size, 400), bytes_cell(size), Cell(text, link="model.py:9", **more)]


def lines(table, width=60, top=None):
    return Rendering(drawn(table, top), width).plain().splitlines()


def on_page(table):
    return page_table(table, {"model.py:9": LINE}.get)


TABLE = Table(
    "memory",
    COLUMNS,
    [
        row(200, [BinderToken("model.py:9"), Comment(" ← flax.py:3")], below=Cell("until add")),
        row(120, "a", code="x = jax.nn.gelu(x @ w) @ v"),
        RowGroup(row(80, "b"), [row(48, "tanh", indent=1), row(32, "sin", indent=1)]),
    ],
)


def test_the_terminal_draws_what_is_below_a_name_and_the_parts_of_a_row():
    assert lines(TABLE, 34) == [
        "memory",
        "share       bytes   line",
        "─" * 34,
        "50.0%   200 bytes   model.py:9 ←",
        "                    flax.py:3",
        "                    until add",
        "30.0%   120 bytes   a",
        "                    x = jax.nn.ge…",
        "20.0%    80 bytes   b",
        "         48 bytes     tanh",
        "         32 bytes     sin",
    ]


def test_what_is_left_out_has_the_sums_of_its_columns():
    assert lines(TABLE, top=1)[-1] == "50.0%   200 bytes   … 2 more: --all"
    first_column = Table("", [Column("line"), number_column("times")], [["a", "1"], ["b", "2"]])
    assert lines(first_column, top=0)[-1] == "… 2 more: --all"


def test_a_page_has_the_numbers_to_sort_by_the_links_and_the_parts_of_rows():
    page = on_page(TABLE)
    assert [[cell.text for cell in cells] for cells in page.rows] == [
        ["50.0%", "200 bytes", "model.py:9 ← flax.py:3"],
        ["30.0%", "120 bytes", "a"],
        ["12.0%", "48 bytes", "b tanh"],
        ["8.0%", "32 bytes", "b sin"],
    ]
    assert [cells[1].number for cells in page.rows] == [200, 120, 48, 32]
    assert all(cells[2].link == LINE for cells in page.rows)


def test_a_page_says_how_many_rows_are_left_out():
    page = on_page(Table("", [Column("line")], [["a"]] * 501, more=2))
    assert len(page.rows) == 500 and page.more == 3


def test_the_share_of_a_symbolic_or_unknown_whole_is_empty():
    assert share(1, None) == share(None, 2) == share(1, 0) == Cell("")
