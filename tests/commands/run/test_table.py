"""A run as text."""

import pytest

from jaxprtool.ir.documents import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (12.34e-6, "12.3 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (1e-3, "1 ms"),
        (0.1234, "123 ms"),
        (0.9996, "1 s"),
        (26.54, "26.5 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_no_exponent(seconds, text):
    assert duration(seconds) == text
