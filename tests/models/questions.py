"""The analysis commands that are run on each model, with consistency checks of their totals.

A question is a function of a `Model` and a folder to write into, as in `tests.models.commands`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.commands import Command, Model, run_command

#: Models with a `while`, which JAX cannot differentiate in reverse mode.
FORWARD_ONLY = frozenset(
    {"blackjax_nuts", "diffrax_gradient", "mctx_search", "numpyro_nuts", "tfp_hmc"}
)

#: Models whose every equation comes from an installed library.
WITHOUT_LINES = frozenset({"brax_pendulum", "flaxdiff_unet"})


def _asked(command: str, model: Model, *more: str, codes: tuple[int, ...] = (0,)) -> Any:
    """Return the document that a command prints."""
    text = run_command(command, model.target, *more, "--factory", "--json", codes=codes)
    return json.loads(text)


def cost(model: Model, folder: Path) -> None:
    """The groups of `cost` add up to the total for each grouping; with branches, to more."""
    for by in ("line", "primitive", "dtype", "argument"):
        told = _asked("cost", model, "--by", by)
        for number in ("flops", "transcendentals", "bytes_read", "bytes_written"):
            groups = sum(group[number] for group in told["groups"])
            # The most expensive branch in total is not the most expensive one of each group.
            branches = "cond[" in str(model.program) and groups > told["total"][number]
            assert branches or groups == pytest.approx(told["total"][number])


def memory(model: Model, folder: Path) -> None:
    """The live values at the peak of `memory` add up to the peak."""
    told = _asked("memory", model)
    assert sum(each["bytes"] for each in told["live"]) == told["peak_bytes"] > 0


def residuals(model: Model, folder: Path) -> str | None:
    """The residuals add up to their total."""
    if model.name in FORWARD_ONLY:
        return "no gradient"
    told = _asked("residuals", model)
    assert sum(each["bytes"] for each in told["residuals"]) == told["total_bytes"]
    return None


def source(model: Model, folder: Path) -> str | None:
    """The lines of `source` are the user's."""
    if model.name in WITHOUT_LINES:
        run_command("source", model.target, "--factory", codes=(2,))
        return "no line"
    (told,) = _asked("source", model)["programs"]
    assert told["files"]
    return None


def why(model: Model, folder: Path) -> None:
    """`why` describes the first argument and the first result."""
    for name in (model.program.arg_names[0], model.program.out_names[0]):
        assert _asked("why", model, name)["what"] == name


def report(model: Model, folder: Path) -> None:
    """`report` writes a page that names the model's program."""
    page = folder / "report.html"
    run_command("report", model.target, "--factory", "-o", str(page))
    assert model.program.name in page.read_text()


def nans(model: Model, folder: Path) -> str | None:
    """A finding of `nans` reaches a result if the model returns a NaN or an infinity."""
    told = _asked("nans", model, codes=(0, 1))
    bad = any(
        each.dtype.kind in "fc" and not (abs(each) < float("inf")).all() for each in model.results
    )
    assert bad <= told["found"]
    return "found" if told["found"] else None


#: The columns of the second table, and their questions.
QUESTIONS: dict[str, Command] = {
    "cost": cost,
    "memory": memory,
    "residuals": residuals,
    "source": source,
    "why": why,
    "report": report,
    "nans": nans,
}
