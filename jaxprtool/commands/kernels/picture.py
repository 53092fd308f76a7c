"""Pictures of kernels: which block each step of the grid reads or writes, drawn by matplotlib.

Each Ref has two panels: its array in blocks, coloured by the first step that has the block, and the
number of the block in each step, with a mark where it is copied.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.commands.kernels.kernels import GridTable, KernelPart, KernelReport

#: The number of steps that are drawn, if no other is requested.
MOST_DRAWN = 256

#: The most blocks of an array that are numbered.
_NUMBERED = 64


def kernels_picture(report: KernelReport, file_format: str) -> bytes:
    """Return a picture of the first steps of each kernel, "svg" or "png".

    Args:
        report: The kernels, with steps (`KernelReport.steps`).
        file_format: The format.

    Raises:
        OutputError: If no kernel has steps that are known.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = [(row, grid) for row, grid in zip(report.kernels, report.steps, strict=True)]
    drawn = [(row, grid) for row, grid in drawn if grid.steps and grid.blocks]
    if not drawn:
        raise OutputError(f"{report.name} has no Pallas kernel with steps that are known")
    count = sum(len(grid.blocks) for _, grid in drawn)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "1", "font.size": 8}):
        figure = Figure(figsize=(9, 0.5 + 1.7 * count), layout="constrained")
        title = f"{report.name}: blocks, each with the first step that has it"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
        panels = figure.subplots(count, 2, squeeze=False, width_ratios=(1, 2.2))
        line = 0
        for row, grid in drawn:
            parts = {part.name: part for part in row.parts}
            for number, name in enumerate(grid.blocks):
                indices = _indices(grid, number)
                title = f"{row.name}, " if not number and len(drawn) > 1 else ""
                _draw_array(panels[line, 0], parts[name], indices, title)
                _draw_steps(panels[line, 1], parts[name], grid, indices)
                line += 1
        file = io.BytesIO()
        figure.savefig(
            file, format=file_format, metadata={"Date": None} if file_format == "svg" else None
        )
    return file.getvalue()


def _indices(grid: GridTable, number: int) -> list[tuple[int, ...] | None]:
    """Return the index of a block in each step; None where it depends on data."""
    indices: list[tuple[int, ...] | None] = []
    for step in grid.steps:
        index = step.indices[number]
        if index is None:  # that of the step before
            indices.append(indices[-1])
        else:
            indices.append(None if None in index else index)  # type: ignore[arg-type]
    return indices


def _draw_array(
    axes: Any, part: KernelPart, indices: Sequence[tuple[int, ...] | None], title: str
) -> None:
    """Draw an array in blocks, each with the first step that has it."""
    axes.set_title(f"{title}{part.name}: {part.text}", loc="left", fontsize=8, parse_math=False)
    axes.set_xticks([])
    axes.set_yticks([])
    known = [(step, index) for step, index in enumerate(indices) if index is not None]
    if not known:
        axes.text(0.5, 0.5, "depends on data", ha="center", va="center")
        return
    first = _first_steps(known)
    axes.imshow(first, cmap="viridis", aspect="auto", interpolation="nearest")
    if first.size <= _NUMBERED:
        middle = np.nanmax(first) / 2
        for (i, j), step in np.ndenumerate(first):
            if not np.isnan(step):
                colour = "white" if step <= middle else "black"
                axes.text(j, i, f"{step:.0f}", ha="center", va="center", color=colour, fontsize=7)


def _first_steps(known: Sequence[tuple[int, tuple[int, ...]]]) -> np.ndarray:
    """Return the first step of each block, in rows and columns; NaN for a block of no step."""
    index = np.array([index or (0,) for _, index in known])
    index = index - np.minimum(index.min(0), 0)
    shape = index.max(0) + 1
    moving = [d for d, n in enumerate(shape) if n > 1]
    columns = moving[-1:] if len(moving) > 1 or moving == [len(shape) - 1] else []
    rows = [d for d in moving if d not in columns]
    first = np.full(tuple(shape), np.nan)
    for (step, _), where in zip(reversed(known), index[::-1], strict=True):
        first[tuple(where)] = step
    height = int(np.prod([shape[d] for d in rows], dtype=int))
    return first.reshape(height, -1)


def _draw_steps(
    axes: Any, part: KernelPart, grid: GridTable, indices: Sequence[tuple[int, ...] | None]
) -> None:
    """Draw the number of the block in each step, with a mark where it is copied."""
    numbers = {index: i for i, index in enumerate(sorted({i for i in indices if i is not None}))}
    steps = [(step, numbers[index]) for step, index in enumerate(indices) if index is not None]
    colour = "tab:orange" if part.kind == "output" else "tab:blue"
    if steps:
        xs, ys = zip(*steps, strict=True)
        copied = [(x, y) for i, (x, y) in enumerate(steps) if not i or indices[x] != indices[x - 1]]
        axes.plot(xs, ys, drawstyle="steps-post", color=colour, linewidth=0.8)
        axes.plot(*zip(*copied, strict=True), ".", color=colour, markersize=4)
    axes.set_xlim(-0.5, len(indices) - 0.5)
    axes.margins(y=0.15)
    axes.locator_params(axis="both", integer=True)
    verb = "written" if part.kind == "output" else "read"
    axes.set_ylabel(f"block {verb}")
    if part.name == grid.blocks[-1]:
        names = ", ".join(grid.axes)
        axes.set_xlabel(f"step ({names}; the last axis fastest)" if names else "step")
    axes.spines[["top", "right"]].set_visible(False)
