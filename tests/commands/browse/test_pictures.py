"""Snapshots of the browser's screen. `pytest --snapshot-update` writes them."""

import pytest


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_a_program_beside_its_source(browser, snap_compare, size):
    assert snap_compare(browser(), terminal_size=size, press=["enter", "down", "m"])


def test_without_colors(browser, snap_compare, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(browser("dce"), terminal_size=(80, 24), press=["left_square_bracket", "c"])


def test_after_a_pass_by_scopes(browser, snap_compare):
    passes = "dce, batch(axis_size=2)"
    press = ["t", "asterisk", "c", "c"]
    assert snap_compare(browser(passes), terminal_size=(120, 30), press=press)


def test_a_choice(browser, snap_compare):
    assert snap_compare(browser(), terminal_size=(80, 24), press=["u"])
