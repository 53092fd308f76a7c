"""Updated budgets keep their unit, comment, and place in the file."""

import random

import pytest

from jaxprtool.commands.check.command import budget_like, update_budgets
from jaxprtool.testing.assertions import amount_of


@pytest.mark.parametrize(
    ("before", "quantity", "amount", "after"),
    [
        ("3 GFLOP", "flops", 2_817_000_001, "2.82 GFLOP"),
        ("3GFLOP", "flops", 2_817_000_001, "2.82GFLOP"),
        ("3G", "flops", 2_000_000_000, "2G"),
        ("3 gflops", "flops", 2_999_999_999, "3 gflops"),
        ("3 GFLOP", "flops", 999_999, "1 MFLOP"),
        ("3 GFLOP", "flops", 12, "12 FLOP"),
        ("0 FLOP", "flops", 1_234_567, "1.24 MFLOP"),
        ("0", "flops", 1_234_567, "1.24M"),
        ("2e9", "flops", 1_234_567_890, "1.24G"),
        ("16MiB", "peak_bytes", 15 << 20, "15MiB"),
        ("16 MiB", "peak_bytes", (15 << 20) + 1, "15.1 MiB"),
        ("16MB", "peak_bytes", 15_000_001, "15.1MB"),
        ("16MiB", "peak_bytes", 3 << 33, "24GiB"),
        ("16MiB", "peak_bytes", 0, "0MiB"),
        (500, "equations", 23, 23),
        (1e9, "flops", 23, 23),
        ("2 s", "compile_seconds", 1.2341, "1.24 s"),
        ("0s", "compile_seconds", 0.0301, "0.04s"),
        (3, "compile_seconds", 12.341, 12.4),
    ],
)
def test_a_budget_keeps_its_unit_and_is_rounded_up(before, quantity, amount, after):
    assert budget_like(before, quantity, amount) == after


def test_a_budget_is_never_below_the_amount_and_at_most_one_percent_above():
    chosen = random.Random(0)
    units = {"flops": ("3 GFLOP", "1 FLOP", "5M", "2e3"), "peak_bytes": ("1KiB", "7 MB", "3", "1g")}
    for _ in range(5000):
        quantity = chosen.choice(list(units))
        amount = int(10 ** chosen.uniform(0, 14))
        after = budget_like(chosen.choice(units[quantity]), quantity, amount)
        assert amount <= amount_of(quantity, after) <= max(amount * 1.01, amount + 1), after
        assert budget_like(after, quantity, amount) == after


TABLES = {
    "inline": "[tool]\njaxprtool = { targets = { a = { flops = 7 }, b = { flops = 1 } } }\n",
    "dotted": "tool.jaxprtool.targets.a.flops = 7 # a\ntool.jaxprtool.targets.b.flops = 1 # b\n",
    "apart": "[tool.jaxprtool.targets.a]\nflops = 7 # a\n\n[tool.x]\ny = 1\n\n"
    "[tool.jaxprtool]\ntargets.b.flops = 1 # b\n",
    "windows": "[tool.jaxprtool.targets]\r\na = { flops = 7 } # a\r\nb = { flops = 1 }\r\n",
    "unicode": '[tool.jaxprtool.targets]\na = { flops = 7 }\n"b".flops = 1\n# größer\n',
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_every_form_are_updated_in_place(tmp_path, kind):
    path = tmp_path / "pyproject.toml"
    path.write_bytes(TABLES[kind].encode())
    changes = update_budgets(path, {"a": {"flops": 12}, "b": {"flops": 1}})
    assert [tuple(each) for each in changes] == [("a", "flops", "7", "12")]
    assert path.read_bytes().decode() == TABLES[kind].replace("flops = 7", "flops = 12")
