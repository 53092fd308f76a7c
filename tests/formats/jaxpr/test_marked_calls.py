"""Calls that share a marked body are restored: one body, and marks on the calls only."""

from __future__ import annotations

import pytest

from jaxprtool.errors import ProgramFileError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from tests.formats.jaxpr.round_trips import round_trip
from tests.programs.outlined import assert_layers, layers


def test_a_shared_body_is_written_once_and_read_as_one_object() -> None:
    written = program_file_text(layers(12))
    assert written.count(" tanh ") == 1
    assert_layers(round_trip(layers(12)).jaxpr, 12)


def test_the_size_of_a_file_is_linear_in_the_number_of_calls() -> None:
    few, more, most = (len(program_file_text(layers(copies)).split()) for copies in (12, 24, 48))
    assert most - more == pytest.approx(2 * (more - few), rel=0.02)


def test_a_mark_contains_no_jaxpr() -> None:
    written = program_file_text(layers(2))
    spoiled = written.replace("'compilation_unit': 'layer'", "'compilation_unit': layer", 1)
    with pytest.raises(ProgramFileError, match="layer"):
        parse_program(spoiled, "spoiled.jaxpr")
