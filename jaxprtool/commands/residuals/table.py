"""Residuals of a backward pass as tables."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.commands.memory.table import unknown_text
from jaxprtool.ir.documents import in_bytes, plural, some, times, with_prefix
from jaxprtool.ir.paths import common_path, without_numbers
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import (
    Rendering,
    add_more,
    new_table,
    number_column,
    share_text,
    split_rows,
    text_column,
    value_cell,
)

if TYPE_CHECKING:
    from jaxprtool.commands.residuals.residuals import (
        Placement,
        Proposal,
        Residual,
        Residuals,
        SavedValue,
    )

#: The heading of the table of places.
PLACEMENTS = "peaks under jax.checkpoint"

#: The maximum length of a policy's arguments in the table.
_MOST_ARGUMENTS = 40

#: The maximum number of arguments in the first line.
_MOST_NAMES = 4


def residuals_table(saved: Residuals, width: int, top: int | None = tables.TALL_ROWS) -> Rendering:
    """Return a row for each of the `top` largest groups (all if None), and the bytes per policy."""
    heading = kept_total_text(saved)
    columns = (
        number_column("share"),
        number_column("bytes"),
        text_column("type", tables.TYPE),
        number_column("cost"),
    )
    table = new_table(heading, *columns, text_column("value and readers"))
    shown, rest = split_rows(grouped_residuals(saved.residuals), top)
    for count, residual in shown:
        table.add_row(*_cells(count, residual, saved.total_bytes))
    add_more(table, len(rest), "", "", "", "")
    parts: list[RenderableType] = [table, Text()] if saved.residuals else [Text(heading), Text()]
    if saved.policies:
        parts.append(_policies(saved))
    if saved.proposal is not None:
        parts += [Text(), *_proposal(saved.name, saved.proposal, width)]
    return Rendering(Group(*parts), width)


def _cells(count: int, residual: Residual, total: int | None) -> list[str | Text]:
    share = share_text(residual.bytes, total)
    what = value_cell(*residual_texts(residual), readers_text(residual))
    type_ = times(count, residual.type)
    return [share, size_text(residual.bytes), type_, recompute_text(residual), what]


def _policies(saved: Residuals) -> Table:
    if saved.placements:
        return _placements(saved)
    columns = (
        text_column("policy"),
        number_column("bytes"),
        text_column("largest dropped residual", tables.COMMENT),
    )
    table = new_table("residuals under each policy of jax.checkpoint", *columns)
    for name, size in saved.policies.items():
        table.add_row(name, size_text(size), dropped_text(saved, name))
    return table


def _placements(saved: Residuals) -> Table:
    """Return the bytes and the peaks under each policy, in each place."""
    compiled = saved.placements[0].compiled_bytes is not None
    columns = [text_column("policy", tables.BINDER), number_column("bytes"), number_column("peak")]
    columns += [number_column("XLA's peak")] if compiled else []
    table = new_table(PLACEMENTS, *columns)
    for only, group in groupby(saved.placements, key=lambda placement: placement.only):
        rows = list(group)
        if only:
            table.add_row(placement_text(rows[0]))
        for placement in rows:
            sizes = [in_bytes(placement.total_bytes), in_bytes(placement.peak_bytes)]
            sizes += [size_text(placement.compiled_bytes)] if compiled else []
            table.add_row(("  " if only else "") + policy_text(placement.policy), *sizes)
    return table


def placement_text(placement: Placement) -> str:
    """Return the place of `jax.checkpoint`: `around layer`; empty for the whole function."""
    return f"around {' and '.join(placement.only)}" if placement.only else ""


def policy_text(policy: str) -> str:
    """Return a policy without arguments that are too long for a table."""
    name, _, arguments = policy.partition("(")
    return f"{name}(…)" if len(arguments) > _MOST_ARGUMENTS else policy or "none"


def _proposal(name: str, proposal: Proposal, width: int) -> Iterator[RenderableType]:
    """Yield what a proposal saves within a budget and where, and a cheaper one if there is one."""
    heading = f"within {in_bytes(proposal.budget)}"
    if not proposal.policy:
        yield Text(f"{heading}: all residuals of {name} fit, without a policy")
        return
    placement, before = proposal.placement, proposal.before
    if placement is None or before is None:
        peak = "" if before is None else f", {_peak_text(before)}"
        yield Text(f"{heading}: no place of jax.checkpoint lowers the peak of its gradient{peak}")
        return
    yield from _placement(name, heading, proposal, placement, before, width)
    if proposal.cheaper is not None:
        heading = "with fewer FLOPs"
        yield from (Text(), *_placement(name, heading, proposal, proposal.cheaper, before, width))


def _placement(
    name: str, heading: str, proposal: Proposal, placement: Placement, before: Placement, width: int
) -> Iterator[RenderableType]:
    """Yield the names to save and their lines, the policy and where to put it, and its cost."""
    values = proposal.values if placement.policy == proposal.policy else ()
    if values:
        columns = (
            number_column("bytes"),
            text_column("line", tables.BINDER),
            text_column("saved value"),
        )
        table = new_table(f"{heading}, save {plural(len(values), 'name')}", *columns)
        for value in values:
            table.add_row(in_bytes(value.bytes), value.source, _to_write(value))
        yield from (table, Text())
    else:
        policy = policy_text(placement.policy)
        saved = "save nothing" if policy == "nothing_saveable" else f"save as {policy} does"
        yield Text(f"{heading}, {saved}")
    # Break lines only between names, so that the code can be pasted.
    lines = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    policy = f"policy=jax.checkpoint_policies.{placement.policy}"
    for function in placement.only or (name,):
        around = f"jax.checkpoint({function}, {policy})"
        yield Text(lines.fill(f"around each {function}, {policy}" if "*" in function else around))
    named = ", with these names" if any(value.code for value in values) else ""
    yield Text(lines.fill(f"as a pass{named}: {placement.passes}"))
    more = placement.flops / before.flops - 1 if before.flops else 0
    took, takes = (with_prefix(place.flops) for place in (before, placement))
    yield Text(f"peak {_peak_text(placement)} instead of {_peak_text(before)}")
    kept = in_bytes(placement.total_bytes)
    yield Text(f"keeps {kept}, for {more:.1%} more FLOPs: {takes} instead of {took}")


def _peak_text(placement: Placement) -> str:
    """Return the estimated peak, and that of XLA if it is known."""
    if placement.compiled_bytes is None:
        left_out = unknown_text(placement.unknown)
        return f"{in_bytes(placement.peak_bytes)}{f' ({left_out})' if left_out else ''}"
    compiled = in_bytes(placement.compiled_bytes)
    return f"{compiled} (estimated: {in_bytes(placement.peak_bytes)})"


def _to_write(value: SavedValue) -> Text:
    if not value.code:
        return Text(value.name)
    return Text(f'checkpoint_name({value.code}, "{value.name}")')


# --- texts ------------------------------------------------------------------------------------


def grouped_residuals(residuals: Sequence[Residual]) -> list[tuple[int, Residual]]:
    """Return residuals grouped over the layers of a model, with the size of each group.

    A group has the total bytes and recomputation cost. The largest is first.
    """
    groups: defaultdict[tuple[object, ...], list[Residual]] = defaultdict(list)
    for residual in residuals:
        what, *primitive = residual_texts(residual)
        alike = (
            without_numbers(what) if residual.argument else what,
            *primitive,
            readers_text(residual),
        )
        groups[residual.type, residual.policies, *alike].append(residual)
    merged = [(len(group), _merged(group)) for group in groups.values()]
    return sorted(merged, key=lambda pair: -(pair[1].bytes or 0))


def _merged(group: Sequence[Residual]) -> Residual:
    sizes = [residual.bytes for residual in group if residual.bytes is not None]
    costs = [residual.recompute for residual in group if residual.recompute is not None]
    return replace(
        group[0],
        argument=common_path([residual.argument for residual in group]),
        bytes=sum(sizes) if len(sizes) == len(group) else None,
        recompute=sum(costs) if len(costs) == len(group) else None,
    )


def kept_total_text(saved: Residuals) -> str:
    """Return the total: `loss keeps 3 residuals, 1.5 MiB, with respect to params`."""
    kept = plural(len(saved.residuals), "residual")
    size = "" if saved.total_bytes is None else f", {in_bytes(saved.total_bytes)}"
    name = f"the gradient inside {saved.name}" if saved.is_inside else saved.name
    names = f", with respect to {some(saved.with_respect_to, _MOST_NAMES)}"
    return f"{name} keeps {kept}{size}{names if saved.with_respect_to else ''}"


def size_text(number: int | None) -> str:
    """Return a number of bytes as text; "?" where it is unknown."""
    return "?" if number is None else in_bytes(number)


def recompute_text(residual: Residual) -> str:
    """Return the operations that recompute a residual; empty for an argument, "?" if unknown."""
    number = residual.recompute
    if residual.argument:
        return ""
    if number is None:
        return "?"
    return with_prefix(number) if type(number) is int else str(number)


def residual_texts(residual: Residual) -> tuple[str, str]:
    """Return the argument of a residual, or its line and the primitive that computes it."""
    if residual.argument:
        return residual.argument, ""
    return residual.source or "unknown line", residual.name or residual.primitive


def readers_text(residual: Residual) -> str:
    """Return the readers of a residual: `for dot_general at model.py:9 and 2 more`."""
    if not residual.readers:
        return ""
    reader, *others = residual.readers
    where = f" at {reader.source}" if reader.source not in ("", residual.source) else ""
    more = f" and {len(others)} more" if others else ""
    return f"for {reader.primitive}{where}{more}"


def dropped_text(saved: Residuals, policy: str) -> str:
    """Return the largest residual that a policy drops: `f32[8] tanh`; empty if none."""
    dropped = next((residual for residual in saved.residuals if policy in residual.policies), None)
    return "" if dropped is None else f"{dropped.type} {dropped.name or dropped.primitive}"


# --- page -----------------------------------------------------------------------------------------
# The view of a page: sortable tables, with the contents of those of the terminal.


def residuals_view(saved: Residuals | str, line_of: views.Lines) -> views.PageView:
    """Return the view of the residuals of a gradient, or why they are not shown."""
    if isinstance(saved, str):
        return views.PageView("residuals", [saved])
    shown = [_page_residuals(saved, line_of)]
    if saved.placements:
        shown.append(_page_placements(saved))
    elif saved.policies:
        shown.append(_page_policies(saved))
    return views.PageView("residuals", [kept_total_text(saved)], shown)


def _page_residuals(saved: Residuals, line_of: views.Lines) -> views.Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("type", False),
        ("recompute", True),
        ("value and readers", False),
    )
    groups = grouped_residuals(saved.residuals)
    rows = [_page_row(*group, saved.total_bytes, line_of) for group in groups]
    return views.page_table("residuals", columns, rows)


def _page_row(
    count: int, residual: Residual, total: int | None, line_of: views.Lines
) -> list[views.Cell]:
    reader = residual.readers[0].source if residual.readers else ""
    return [
        views.Cell(size_text(residual.bytes), residual.bytes),
        views.share(residual.bytes, total),
        views.Cell(times(count, residual.type), count),
        views.Cell(
            recompute_text(residual),
            residual.recompute if type(residual.recompute) is int else None,
        ),
        views.Cell(
            views.joined(residual_texts(residual)),
            link=views.linked(residual.source, line_of),
            below=views.Cell(readers_text(residual), link=views.linked(reader, line_of)),
        ),
    ]


def _page_placements(saved: Residuals) -> views.Table:
    columns = (("bytes", True), ("peak", True), ("place", False), ("policy", False))
    rows = [
        [
            views.Cell(size_text(placement.total_bytes), placement.total_bytes),
            views.Cell(size_text(placement.peak_bytes), placement.peak_bytes),
            views.Cell(placement_text(placement)),
            views.Cell(policy_text(placement.policy)),
        ]
        for placement in saved.placements
    ]
    return views.page_table(PLACEMENTS, columns, rows)


def _page_policies(saved: Residuals) -> views.Table:
    columns = (("bytes", True), ("policy", False), ("largest dropped residual", False))
    rows = [
        [
            views.Cell(size_text(size), size),
            views.Cell(name),
            views.Cell(dropped_text(saved, name)),
        ]
        for name, size in saved.policies.items()
    ]
    return views.page_table("residuals under each policy of jax.checkpoint", columns, rows)
