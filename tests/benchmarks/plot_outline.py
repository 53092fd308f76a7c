r"""Draw compile time by depth, for the README, from the measurements of `bench_outline.py`.

    python tests/benchmarks/bench_outline.py transformer_gradient --depths 6 12 24 48 96 \
        --ways traced units scan --traced-up-to 11000 --json outline.json
    python tests/benchmarks/plot_outline.py outline.json

The picture is docs/compile_time.svg, legible on light and on dark backgrounds. Times are CPU times,
which depend little on other load of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]

#: The label, color and marker of each way.
LINES = {
    "traced": ("as traced", "#d1495b", "o"),
    "scan": ("as a scan, by hand", "#7d8ca3", "s"),
    "units": ('jaxprtool.jit(f, passes="outline")', "#1f8fbf", "D"),
}

TITLE = "XLA compiles a transformer's gradient: CPU time by number of layers"

#: A gray that is legible on white and on black, for axes and text.
INK = "#808890"
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def curve(rows: list[dict[str, Any]], way: str) -> list[tuple[int, float]]:
    """Return the depths of a way and its median CPU seconds of compiling."""
    return sorted(
        (row["depth"], statistics.median(row["compile_cpu"])) for row in rows if row["way"] == way
    )


def draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for way, (label, color, marker) in LINES.items():
        depths, seconds = zip(*curve(rows, way), strict=True)
        axes.plot(depths, seconds, color=color, marker=marker, markersize=5, linewidth=2)
        above = {"xytext": (7, -3), "textcoords": "offset points"}
        axes.annotate(label, (depths[-1], seconds[-1]), color=color, **above)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    depths = sorted({row["depth"] for row in rows})
    axes.set_xticks(depths, map(str, depths))
    axes.set_yticks([1, 3, 10, 30], ["1 s", "3 s", "10 s", "30 s"])
    axes.minorticks_off()
    axes.set_title(
        "XLA compiles a transformer's gradient: CPU time by number of layers", loc="left", color=INK
    )
    axes.grid(axis="y", color=INK, alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("measured", type=Path)
    parser.add_argument("--model", default="transformer_gradient")
    parser.add_argument("--jax", help="the release; by default the last one in the file")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "compile_time.svg")
    options = parser.parse_args()
    rows = [
        row for row in json.loads(options.measured.read_text()) if row["model"] == options.model
    ]
    release = options.jax or rows[-1]["jax"]
    mpl.rcParams.update({**dict.fromkeys(INKED, INK), "svg.fonttype": "none", "svg.hashsalt": "1"})
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    draw(axes, [row for row in rows if row["jax"] == release])
    figure.savefig(options.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
