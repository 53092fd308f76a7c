"""Residuals of a backward pass as tables."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.commands.memory.table import unknown_text
from jaxprtool.ir.documents import in_bytes, plural, some, times, with_prefix
from jaxprtool.ir.notation import BinderToken, Comment, Type
from jaxprtool.ir.trees import common_path, without_numbers
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn

if TYPE_CHECKING:
    from jaxprtool.commands.residuals.residuals import (
        Placement,
        Proposal,
        Residual,
        Residuals,
        SavedValue,
    )

#: The maximum length of a policy's arguments in the table.
_MOST_ARGUMENTS = 40

#: The maximum number of arguments in the first line.
_MOST_NAMES = 4


def residuals_table(saved: Residuals, width: int, top: int | None = tables.TALL_ROWS) -> Rendering:
    """Return a row for each of the `top` largest groups (all if None), and the bytes per policy."""
    heading = kept_total_text(saved)
    kept = drawn(_values_table(saved, heading), top) if saved.residuals else Text(heading)
    parts: list[RenderableType] = [kept]
    if saved.policies:
        parts += [Text(), drawn(_placements(saved) if saved.placements else _policies(saved))]
    if saved.proposal is not None:
        parts += [Text(), *_proposal(saved.name, saved.proposal, width)]
    return Rendering(Group(*parts), width)


def _values_table(saved: Residuals, caption: str) -> views.Table:
    columns = (
        views.share_column(),
        views.number_column("bytes"),
        views.Column("type", Type),
        views.number_column("cost"),
        views.Column("value and readers"),
    )
    rows = [_value_row(*group, saved.total_bytes) for group in grouped_residuals(saved.residuals)]
    return views.Table(caption, columns, rows)


def _value_row(count: int, residual: Residual, total: int | None) -> list[views.Cell]:
    cost = residual.recompute if type(residual.recompute) is int else None
    reader = residual.readers[0].source if residual.readers else ""
    below = views.Cell(readers_text(residual), link=reader)
    return [
        views.share(residual.bytes, total),
        views.Cell(size_text(residual.bytes), residual.bytes),
        views.Cell(times(count, residual.type), count),
        views.Cell(recompute_text(residual), cost),
        views.value_cell(*residual_texts(residual))._replace(link=residual.source, below=below),
    ]


def _policies(saved: Residuals) -> views.Table:
    columns = (
        views.Column("policy"),
        views.number_column("bytes"),
        views.Column("largest dropped residual", Comment),
    )
    rows: list[views.Row] = [
        [name, views.Cell(size_text(size), size), dropped_text(saved, name)]
        for name, size in saved.policies.items()
    ]
    return views.Table("residuals under each policy of jax.checkpoint", columns, rows)


def _placements(saved: Residuals) -> views.Table:
    """Return the bytes and the peaks under each policy, in each place."""
    compiled = saved.placements[0].compiled_bytes is not None
    columns = [views.Column("policy", BinderToken), *map(views.number_column, ("bytes", "peak"))]
    columns += [views.number_column("XLA's peak")] if compiled else []
    rows: list[views.Row | views.RowGroup] = []
    for only, group in groupby(saved.placements, key=lambda placement: placement.only):
        placements = list(group)
        parts = [_placement_row(placement, compiled) for placement in placements]
        rows += [views.RowGroup([placement_text(placements[0])], parts)] if only else parts
    return views.Table("peaks under jax.checkpoint", columns, rows)


def _placement_row(placement: Placement, compiled: bool) -> list[views.Cell]:
    sizes = [placement.total_bytes, placement.peak_bytes, placement.compiled_bytes]
    return [
        views.Cell(policy_text(placement.policy), indent=1 if placement.only else 0),
        *(views.Cell(size_text(size), size) for size in sizes[: 3 if compiled else 2]),
    ]


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
        columns = views.number_column("bytes"), views.Column("line", BinderToken)
        rows = [[in_bytes(value.bytes), value.source, _to_write(value)] for value in values]
        caption = f"{heading}, save {plural(len(values), 'name')}"
        yield drawn(views.Table(caption, [*columns, views.Column("saved value")], rows))
        yield Text()
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


def _to_write(value: SavedValue) -> str:
    return f'checkpoint_name({value.code}, "{value.name}")' if value.code else value.name


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


def residuals_view(saved: Residuals | str) -> views.PageView:
    """Return the view of the residuals of a gradient, or why they are not shown."""
    if isinstance(saved, str):
        return views.PageView("residuals", [saved])
    shown = [_values_table(saved, "residuals")]
    if saved.policies:
        shown.append(_placements(saved) if saved.placements else _policies(saved))
    return views.PageView("residuals", [kept_total_text(saved)], shown)
