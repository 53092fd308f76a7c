"""Tests of breaking long names and paths."""

import pytest
from rich.console import Console
from rich.measure import Measurement

from jaxprtool.render.terminal.tables import PathText

CONSOLE = Console(width=80)


def lines(text, width):
    return [line.plain.rstrip() for line in PathText(text).wrap(CONSOLE, width, overflow="fold")]


@pytest.mark.parametrize(
    "text, width, wrapped",
    [
        ("model.up.kernel", 20, ["model.up.kernel"]),
        ("model.blocks[0..5].up.kernel", 18, ["model.blocks[0..5]", ".up.kernel"]),
        ("state['layers']['up']", 15, ["state['layers']", "['up']"]),
        ("flax/nnx/nn/linear.py:422 add", 14, ["flax/nnx/nn/", "linear.py:422", "add"]),
        ("until add at a.py:3 ← lib/b.py:4", 20, ["until add at a.py:3", "← lib/b.py:4"]),
        ("a_long_name_without_parts", 10, ["a_long_nam", "e_without_", "parts"]),
        ("one\n\ntwo", 10, ["one", "", "two"]),
    ],
)
def test_words_longer_than_a_line_are_broken_between_their_parts(text, width, wrapped):
    assert lines(text, width) == wrapped
    assert "".join(lines(text, width)).replace(" ", "") == text.replace(" ", "").replace("\n", "")


def test_a_column_needs_the_width_of_the_longest_part():
    text = PathText("model.blocks[0..5].kernel by model.rate")
    assert Measurement.get(CONSOLE, CONSOLE.options, text) == Measurement(7, len(text.plain))
