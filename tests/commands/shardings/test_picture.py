"""Pictures of shardings: each device is in the block that JAX assigns to it."""

from itertools import pairwise, product

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.cells import cell_len

from jaxprtool.commands.shardings.table import sharding_picture
from jaxprtool.render.terminal.tables import Rendering
from tests.share import first_and_proofs

WIDTHS = [80, 160]


def drawn(shape, ranges, width=80, terms=None):
    text = Rendering(sharding_picture(shape, ranges, width, terms), width).plain()
    assert all(cell_len(line) <= width for line in text.splitlines())
    return text


def read(text):
    """Return the devices of each block of a picture, by the texts of its row and column."""
    lines = text.splitlines()
    top = next(number for number, line in enumerate(lines) if "┐" in line)
    marks = [at for at, char in enumerate(lines[top]) if char in "┌┬┐"]
    has_labels = "┌" not in lines[top]
    columns = list(pairwise(marks))
    headings = lines[lines.index("") + 1 : top] if "" in lines else []
    heads = ["".join(line[a + 1 : b].strip() for line in headings) for a, b in columns]
    blocks, label, cells = {}, "", [""] * len(columns)
    for line in lines[top + 1 :]:
        if "┤" in line or "┘" in line:
            for head, cell in zip(heads, cells, strict=True):
                assert (label.strip(), head) not in blocks
                blocks[label.strip(), head] = devices(cell)
            label, cells = "", [""] * len(columns)
            if "┘" in line:
                return blocks
        else:
            assert all(line[mark] == "│" for mark in marks)
            label += line[: marks[0]].strip() + " " if has_labels else ""
            cells = [c + line[a + 1 : b] for c, (a, b) in zip(cells, columns, strict=True)]
    raise AssertionError("the picture has no end")


def devices(cell):
    """Return the device numbers in a block: `0-3, 8`."""
    numbers = []
    for run in filter(None, cell.replace(" ", "").split(",")):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == sorted(numbers)
    return set(numbers)


def by_jax(shape, mesh, spec):
    """Return the ranges that JAX assigns to each device."""
    found = NamedSharding(mesh, spec).devices_indices_map(shape)
    return {
        device.id: tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
        for device, index in found.items()
    }


def dimensions(line):
    """Return the dimensions in a part of the caption: `dimensions 0, 2 down`."""
    return [int(word) for word in line.replace(",", " ").split() if word.isdigit()]


def places(text, shape):
    """Return the ranges of the devices of a picture, from its caption, edges and blocks."""
    caption = text.splitlines()[0]
    down, across = [], []
    if "not split" not in caption:
        before, has_rows, rest = caption.partition(" down")
        down = dimensions(before) if has_rows else []
        across = dimensions(rest if has_rows else before)
    found = {}
    for (label, head), numbers in read(text).items():
        ranges = [(0, size) for size in shape]
        texts = (label.split(", ") if down else []) + ([head] if across else [])
        for dimension, each in zip(down + across, texts, strict=True):
            ranges[dimension] = tuple(map(int, each.split(":")))
        for number in numbers:
            assert number not in found
            found[number] = tuple(ranges)
    return found


MESHES = [((8,), "x"), ((2, 4), "xy"), ((4, 2), "xy"), ((2, 2, 2), "xyz"), ((1, 8), "xy")]
#: Orders of devices: ascending, reversed, and mixed.
ORDERS = [list(range(8)), list(range(8))[::-1], [3, 0, 7, 5, 1, 6, 2, 4]]


def specs(axes, rank):
    """Yield many specs: each dimension is split along none, one or two axes of the mesh."""
    entries = [None, *axes, *((a, b) for a, b in product(axes, axes) if a != b)]
    for spec in product(entries, repeat=rank):
        used = [axis for entry in spec if entry for axis in entry]
        if len(set(used)) == len(used):
            yield P(*spec)


@pytest.mark.parametrize("width", first_and_proofs(WIDTHS))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_each_device_is_in_the_block_that_jax_assigns(sizes, axes, order, width):
    mesh = Mesh(np.array(jax.devices())[order].reshape(sizes), tuple(axes))
    count = 0
    for shape in [(), (8,), (16, 8), (8, 24, 40), (8, 8, 16, 8)]:
        for spec in specs(axes, len(shape)):
            expected = by_jax(shape, mesh, spec)
            assert places(drawn(shape, expected, width), shape) == expected, (shape, spec)
            count += 1
    assert count > 10


def cut(size, parts):
    """Return the ranges of equal parts of a size. The last one may be smaller or empty."""
    part = -(-size // parts)
    return [(min(i * part, size), min(i * part + part, size)) for i in range(parts)]


@pytest.mark.parametrize("width", WIDTHS)
def test_sizes_need_not_be_divisible(width):
    ranges = dict(enumerate(product(cut(10, 4), cut(5, 2))))
    assert places(drawn((10, 5), ranges, width), (10, 5)) == ranges


def test_devices_without_a_part_share_a_block():
    ranges = [(0, 2), (2, 3), (3, 3), (4, 3), (3, 3)]
    blocks = read(drawn((3,), {device: (each,) for device, each in enumerate(ranges)}))
    assert blocks == {("", "0:2"): {0}, ("", "2:3"): {1}, ("", "empty"): {2, 3, 4}}


def test_a_dimension_of_no_size_is_not_split():
    text = drawn((0, 4), {0: ((0, 0), (0, 2)), 1: ((0, 0), (2, 4))})
    assert "not split: dimension 0 (0)" in text
    assert read(text) == {("", "0:2"): {0}, ("", "2:4"): {1}}


def test_the_devices_of_one_process_may_hold_one_part():
    text = drawn((8, 4), {2: ((4, 8), (0, 4)), 3: ((4, 8), (0, 4))})
    assert read(text) == {("4:8", ""): {2, 3}}


def test_a_picture_of_a_matrix():
    ranges = {i: (row, column) for i, (row, column) in enumerate(product(cut(8, 2), cut(16, 2)))}
    assert drawn((8, 16), ranges) == (
        "dimension 0 down, dimension 1 across\n"
        "\n"
        "        0:8    8:16\n"
        "──────┬──────┬──────┐\n"
        "  0:4 │  0   │  1   │\n"
        "──────┼──────┼──────┤\n"
        "  4:8 │  2   │  3   │\n"
        "──────┴──────┴──────┘"
    )


def test_a_replicated_array_is_one_block():
    assert drawn((8, 4), dict.fromkeys(range(8), ((0, 8), (0, 4)))) == (
        "the array is not split: each device holds all of it\n┌─────┐\n│ 0-7 │\n└─────┘"
    )


def test_terms_of_a_sum_are_joined_by_a_plus():
    ranges = {i: ((0, 4) if i % 2 else (4, 8),) for i in range(8)}
    terms = {i: i // 4 for i in range(8)}
    text = drawn((8,), ranges, terms=terms)
    assert "unreduced: the value is the sum of what the devices joined by + hold" in text
    assert "(1, 3) + (5, 7)" in text and "(0, 2) + (4, 6)" in text
    whole = drawn((8,), dict.fromkeys(range(20), ((0, 8),)), terms={i: i for i in range(20)})
    assert whole.startswith("the array is not split\n") and "0 + 1 + 2" in whole
    assert "+ … 12 more" in whole


def test_unsplit_dimensions_are_named():
    ranges = {i: ((0, 5), each, (0, 70_000)) for i, each in enumerate(cut(8, 2))}
    lines = drawn((5, 8, 70_000), ranges).splitlines()
    assert lines[:2] == ["dimension 1 down", "not split: dimensions 0, 2 (5 x 70,000)"]


def test_two_devices_in_a_row_are_listed_individually():
    assert "│ 0, 1 │" in drawn((8,), dict.fromkeys((0, 1), ((0, 8),)))
    assert "│ 0-2, 5 │" in drawn((8,), dict.fromkeys((0, 1, 2, 5), ((0, 8),)))


@pytest.mark.parametrize(("size", "width"), [(2**6, 20), (2**26, 40), *product([2**26], WIDTHS)])
def test_many_blocks_are_truncated_and_counted(size, width):
    whole = list(product(cut(size, 32), cut(size, 64)))
    text = drawn((size, size), dict(enumerate(whole)), width)
    blocks = read(text)
    rows, columns = (set(each) for each in zip(*blocks, strict=True))
    assert len(rows) == 16 and 1 <= len(columns) <= 8
    for (row, column), numbers in blocks.items():
        start, stop = (tuple(map(int, each.replace(" ", "").split(":"))) for each in (row, column))
        assert numbers == {whole.index((start, stop))}
    last = " ".join(text.partition("┘")[2].split())
    assert last == f"… 16 of 32 rows and {64 - len(columns)} of 64 columns are left out"


def test_many_parts_of_one_dimension_are_rows():
    text = drawn((64,), {i: (each,) for i, each in enumerate(cut(64, 16))})
    assert text.startswith("dimension 0 down") and len(read(text)) == 16
    assert "left out" not in text


def test_long_ranges_of_one_dimension_are_rows():
    ranges = {i: (each,) for i, each in enumerate(cut(2**26, 8))}
    assert drawn((2**26,), ranges, 80).startswith("dimension 0 down")
    assert drawn((2**26,), ranges, 200).startswith("dimension 0 across")


def test_many_devices_of_a_block_are_counted():
    text = drawn((8,), {i: (cut(8, 2)[i % 2],) for i in range(512)}, 160)
    assert " 0, 2, 4, 6, 8, 10, 12, 14, … 248 more " in text
    assert " 1, 3, 5, 7, 9, 11, 13, 15, … 248 more " in text


def test_blocks_that_no_device_holds_are_empty():
    n = 40
    across = {i: (a, b) for i, (a, b) in enumerate(zip(cut(n, n), cut(n, n)[::-1], strict=True))}
    blocks = read(drawn((n, n), across))
    assert len(blocks) == 16 * 8 and not any(blocks.values())
