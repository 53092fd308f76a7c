"""The results of `check` as text: a table of budgets, the problems, and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxprtool.api.investigate.budgets import amount_text, quantity_of
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.notation.tokens import Comment, Heading, PrimitiveName
from jaxprtool.render.documents.problems import Change, CheckedTarget
from jaxprtool.render.terminal.grid import Cell, grid
from jaxprtool.render.terminal.lines import joined, printable, wrapped
from jaxprtool.render.terminal.listing import Listing

#: The extra indent of continuation lines.
_HANGING = "    "

_HEADINGS = "name", "quantity", "budget", "measured", "used"


def check_text(
    targets: Sequence[CheckedTarget], updated: Sequence[Change] | None, width: int
) -> Listing:
    """Return checked targets as text, the worst first.

    Args:
        targets: The targets.
        updated: The values that `--update` has written; None without it.
        width: The width in columns.
    """
    blocks = [_table(targets, width), *(_problems(each, width) for each in targets)]
    blocks.append([joined(_changes(updated or ()))])
    shown = [tokens for block in blocks for tokens in block if tokens]
    summary = [Comment(summary_text(targets, updated))]
    spaced = [token for tokens in shown for token in (*tokens, "\n\n")]
    return Listing(printable([*spaced, *summary]))


def summary_text(targets: Sequence[CheckedTarget], updated: Sequence[Change] | None) -> str:
    """Return how many targets passed, in one line."""
    failed = sum(not each.passed for each in targets)
    count = plural(len(targets), "target")
    text = f"{failed} of {count} failed" if failed else f"{count} passed"
    return text if updated is None else f"{text}; {plural(len(updated), 'value')} updated"


def worst_first(targets: Sequence[CheckedTarget]) -> list[CheckedTarget]:
    """Sort targets: failed ones first, and then by the largest share of a budget that they use."""
    return sorted(targets, key=lambda each: (each.passed, -max([0.0, *_shares(each).values()])))


def _shares(target: CheckedTarget) -> dict[str, float]:
    """Return the share of each budget that is used, the largest first."""
    shares: dict[str, float] = {}
    for quantity, amount in target.measured.items():
        if budget := target.budget[quantity]:
            shares[quantity] = amount / budget
        else:
            shares[quantity] = math.inf if amount else 0.0
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _table(targets: Sequence[CheckedTarget], width: int) -> list[list[str]]:
    rows: list[list[Cell]] = []
    for target in targets:
        for quantity, share in _shares(target).items():
            rows.append(_row(target, quantity, share))
    return [grid(_HEADINGS, rows, width)] if rows else []


def _row(target: CheckedTarget, quantity: str, share: float) -> list[Cell]:
    budget, measured = target.budget[quantity], target.measured[quantity]
    known = quantity_of(quantity)
    used = f"{share:.1%}" if budget else ("" if measured <= budget else "over")
    if measured > budget and used == "100.0%":  # the difference is in digits that are not shown
        used = f"+{measured - budget:,.0f}"
    is_over = PrimitiveName if measured > budget else str
    return [
        [target.name],
        [quantity.replace("_", "-")],
        [amount_text(known, budget)],
        [amount_text(known, measured)],
        [is_over(used)],
    ]


def _problems(target: CheckedTarget, width: int) -> list[list[str]]:
    """Return the problems of a target, each as a block of lines."""
    blocks = []
    for each in target.problems:
        lines: list[Cell] = [*_wrapped(Heading(each.message), width)]
        for detail in each.details:
            is_hint = detail.lstrip().startswith("hint: ")
            lines += _wrapped(Comment(detail) if is_hint else detail, width)
        blocks.append(joined(lines))
    return blocks


def _wrapped(text: str, width: int) -> Iterator[Cell]:
    """Wrap a line at the width, and indent its continuation lines."""
    if len(text) <= width:
        yield [text]
        return
    bare = type(text)(text.lstrip())
    indent = " " * (len(text) - len(bare))
    first, *others = wrapped([bare], max(width - len(indent) - len(_HANGING), 20))
    yield [indent, *first]
    yield from ([indent, _HANGING, *line] for line in others)


def _changes(updated: Sequence[Change]) -> Iterator[Cell]:
    for each in updated:
        if each.before:
            yield [f"{each.name}: {each.key} = {each.before} → {each.after}"]
        else:
            yield [f"{each.name}: wrote {each.after}"]
