"""Counts and sizes are formatted for people."""

import pytest

from jaxprtool.ir.documents import in_bytes, with_prefix


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (7 * 2**40, "7.0 TiB"),
    ],
)
def test_bytes_have_the_largest_unit_below_them(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1500, "1.5 k"), (2.5e9, "2.5 G"), (4e21, "4,000.0 E")],
)
def test_numbers_have_an_si_prefix(number, text):
    assert with_prefix(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B/s"), (999, "999 B/s"), (1500, "1.5 kB/s"), (2e18, "2.0 EB/s")]
)
def test_numbers_have_their_unit_after_the_prefix(number, text):
    assert with_prefix(number, "B/s") == text
