"""The messages of failures: the excess, the lines that cost most, and the lines that grew."""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.api.investigate.budgets import (
    Growth,
    Measure,
    Quantity,
    amount_text,
)
from jaxprtool.ir.basics.quantities import plural

#: The maximum number of source lines in a message.
_MOST = 5

#: The verb of a message by quantity: `loss takes 3 GFLOP`.
_VERBS: dict[Quantity, str] = {
    "flops": "takes",
    "peak_bytes": "needs",
    "equations": "has",
    "residual_bytes": "keeps",
    "collectives_bytes": "sends",
    "compiles": "compiled",
}

_WHAT: dict[Quantity, str] = {
    "peak_bytes": " at its peak",
    "residual_bytes": " of residuals",
    "collectives_bytes": " from each device",
}


def over_budget(
    name: str, measure: Measure, limit: float, since: str = "", grown: Sequence[Growth] = ()
) -> str:
    """Return the message that a measure exceeds its budget, with the lines that contribute most.

    Args:
        name: The name of the program.
        measure: The amount.
        limit: The budget.
        since: The name of an earlier program: "the snapshot test_step.jaxpr"; "" without one.
        grown: The lines that grew since that program.
    """
    quantity = measure.quantity
    what = _WHAT.get(quantity, "")
    text = amount_text(quantity, measure.amount)
    budget = amount_text(quantity, limit)
    if text == budget:  # the difference is in digits that are not shown
        text, budget = (f"{round(number):,}" for number in (measure.amount, limit))
    by = "" if quantity == "compiles" else _more(measure.amount, limit)
    lines = [f"{name} {_VERBS[quantity]} {text}{what}, but the budget is {budget}{by}"]
    if since:
        lines += grown_text(quantity, since, grown)
    lines += _indented(measure.notes)
    if not measure.parts:
        return "\n".join(lines)
    rows = [
        (part.where or "no line", amount_text(quantity, part.amount), _share(part.amount, measure))
        for part in measure.parts[:_MOST]
    ]
    heading = "the largest parts" if measure.parts[_MOST:] else "the parts"
    return "\n".join([*lines, f"{heading}:", *_table(rows)])


def grown_text(quantity: Quantity, since: str, grown: Sequence[Growth]) -> list[str]:
    """Return the lines that grew since an earlier program, as text."""
    if not grown:
        return [f"no line grew since {since}"]
    rows = []
    for each in grown[:_MOST]:
        more, before, after = (
            amount_text(quantity, n) for n in (each.after - each.before, each.before, each.after)
        )
        change = f"{before} → {after}" if each.before else "new"
        rows.append((each.where or "no line", f"+{more}", change))
    left = len(grown) - _MOST
    rest = [f"  … {plural(left, 'more line')}"] if left > 0 else []
    return [f"{_OF[quantity]} grew since {since}:", *_table(rows), *rest]


_OF: dict[Quantity, str] = {
    "flops": "FLOPs",
    "peak_bytes": "bytes at the peak",
    "equations": "equations",
    "residual_bytes": "residuals",
    "collectives_bytes": "bytes sent",
}


def _indented(notes: Sequence[str]) -> list[str]:
    return [f"  {line}" for note in notes for line in note.splitlines()]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _share(amount: float, measure: Measure) -> str:
    return _percent(amount / measure.amount) if measure.amount else ""


def _more(amount: float, limit: float) -> str:
    """Return by how much an amount exceeds a budget: `, 7.4% more`."""
    if not limit:
        return ""
    ratio = amount / limit
    return f", {_percent(ratio - 1)} more" if ratio < 2 else f": {ratio:,.1f} times as much"


def _percent(share: float) -> str:
    return f"{share:.1%}"
