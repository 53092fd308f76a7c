"""Flame graphs add up, are bounded, and give each line its whole amount."""

import json

import pytest

from jaxprtool.ir.documents import in_bytes
from jaxprtool.render.page import SourceLink
from jaxprtool.render.views import icicle


def line_of(name):
    return SourceLink(name, "", name) if ":" in name else None


def graph_of(amounts):
    return icicle("bytes", "loss", amounts, in_bytes, line_of)


def frames(frame):
    yield frame
    for inner in frame.inside:
        yield from frames(inner)


def test_frames_hold_the_amounts_of_those_inside_the_largest_first():
    graph = graph_of({("f", "a.py:1"): 1024, ("f", "g", "a.py:2"): 2048, ("a.py:1",): 1, ("",): 5})
    assert [(frame.name, frame.amount, frame.line) for frame in frames(graph.root)] == [
        ("loss", 3078, ""),
        ("f", 3072, ""),
        ("g", 2048, ""),
        ("a.py:2", 2048, "a.py:2"),
        ("a.py:1", 1024, "a.py:1"),
        ("unknown line", 5, ""),
        ("1 under 0.1%", 1, ""),
    ]
    assert graph.root.text == "3.0 KiB" and graph.lines["a.py:1"] == 1025


def test_no_amount_has_no_graph():
    assert graph_of({("a.py:1",): 0}) is None and graph_of({}) is None


def test_small_layers_are_one_frame_and_their_lines_are_not():
    amounts = {(f"Block_{i}", f"a.py:{line}"): 1 for i in range(100) for line in range(4)}
    graph = graph_of(amounts)
    (block,) = graph.root.inside
    assert (block.name, block.amount, len(block.inside)) == ("Block_0..99", 400, 4)
    assert {frame.amount for frame in block.inside} == {100}


@pytest.mark.parametrize(
    "amounts",
    [
        {(f"f{i}", f"a.py:{i}"): 1 for i in range(20_000)},
        {(*["f"] * i, f"a.py:{i}"): 1 for i in range(900)},
    ],
    ids=["wide", "deep"],
)
def test_a_graph_is_bounded_and_loses_nothing(amounts):
    graph = graph_of(amounts)
    assert graph.root.amount == len(amounts) == sum(graph.lines.values())
    assert len(json.dumps(graph)) < 200_000 + 40 * len(graph.lines)
    for frame in frames(graph.root):
        assert not frame.inside or sum(inner.amount for inner in frame.inside) <= frame.amount
