"""Pictures of the memory curve of a program, drawn by matplotlib."""

from __future__ import annotations

import importlib.util
import io
import os
from typing import TYPE_CHECKING

from jaxprtool.errors import OutputError
from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.render.reports.memory import marks, place_text

if TYPE_CHECKING:
    from jaxprtool.analysis.memory import Memory

_FORMATS = (".svg", ".png")


def picture_format(path: str) -> str:
    """Return the picture format of a file name.

    Raises:
        OutputError: If it has none, or matplotlib is not installed.
    """
    file_format = os.path.splitext(path)[1].lower()
    if file_format not in _FORMATS:
        raise OutputError(f"cannot draw '{path}': its name must end in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise OutputError(
            f"cannot draw '{path}': matplotlib is not installed", 'pip install "jaxprtool[plot]"'
        )
    return file_format[1:]


def picture(found: Memory, file_format: str) -> bytes:
    """Return the curve of a program's memory as a picture, "svg" or "png"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "1"}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axes = figure.add_subplot()
        positions = [point.position for point in found.curve]
        axes.fill_between(positions, [point.bytes for point in found.curve], step="post", alpha=0.4)
        axes.step(positions, [point.bytes for point in found.curve], where="post")
        axes.plot([found.at.position], [found.at.bytes], "o", markersize=4)
        axes.set_title(f"{found.name}: {in_bytes(found.peak_bytes)}", loc="left", parse_math=False)
        axes.annotate(
            place_text(found.at),
            (found.at.position, found.at.bytes),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right" if found.at.position > positions[-1] / 2 else "left",
            parse_math=False,
        )
        axes.set_xlim(0, max(positions[-1], 1))
        axes.set_ylim(0, 1.15 * max(found.peak_bytes, 1))
        axes.set_xlabel("equations in execution order")
        ticks = marks(found.peak_bytes, 8)
        axes.set_yticks(ticks, list(map(in_bytes, ticks)))
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(
            file, format=file_format, metadata={"Date": None} if file_format == "svg" else None
        )
    return file.getvalue()
