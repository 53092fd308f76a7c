"""Measure pages of large programs: `python tests/benchmarks/bench_page.py [--max 10000]`.

The program is the gradient of an unrolled transformer, as `show` writes it and as `opt -O2` writes
it with a tab for each pass. The table has the time to make the page, its size, and the time that
Chromium takes to open it, to fold and unfold everything, to search, and to switch to another pass.
The same is measured for the page of a recorded run of 500 programs, with listings of 10,000
equations: opening it, filtering, and opening a row. Times of the browser end at the paint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from jaxprtool import trace
from jaxprtool.analysis.stats import count_equations, stats
from jaxprtool.commands.cost.estimate import cost, work_by_equation
from jaxprtool.commands.record.page import Details, run_page, with_listing
from jaxprtool.ir.program import Program
from jaxprtool.passes import Observer, Pipeline, Step
from jaxprtool.render.page import PageState, program_page
from jaxprtool.render.terminal.listing import ShowOptions
from tests.benchmarks.models import transformer_loss, transformer_shapes
from tests.render.browser import chromium
from tests.render.recorded import large

#: What is timed, and the script that does it.
ACTIONS = {
    "unfold": "document.getElementById('unfold').click()",
    "fold": "document.getElementById('fold').click()",
    "search": "const q = document.getElementById('query'); q.value = 'dot_general'; "
    "q.dispatchEvent(new Event('input'))",
    "nesting": "document.getElementById('nesting').click()",
}

#: Calls back with the milliseconds from an action to the paint of its frame.
TIMED = """
const done = arguments[arguments.length - 1], start = performance.now();
Promise.resolve(eval(arguments[0])).then(() =>
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start))));
"""


class Kept(Observer):
    """Keeps the program after each pass."""

    def __init__(self, program: Program):
        self.states = [PageState({program.name: program}, after=count_equations(program))]

    def after(self, step: Step, program: Program, result: Any, seconds: float) -> None:
        counts = count_equations(program), count_equations(result)
        self.states.append(PageState({result.name: result}, str(step), seconds, *counts))


def timed(driver: Any, script: str) -> float:
    return driver.execute_async_script(TIMED, script) / 1000


def opened(driver: Any, path: Path) -> float:
    """Return the seconds from requesting a page to its paint."""
    driver.get("about:blank")
    driver.get(path.as_uri())
    driver.execute_async_script(TIMED, "")
    (entry,) = driver.execute_script("return performance.getEntriesByType('navigation')")
    # The paint time is known only once the frame was presented, maybe after the next frame.
    painted = "return performance.getEntriesByName('first-contentful-paint')"
    (paint,) = WebDriverWait(driver, 10, 0.02).until(lambda _: driver.execute_script(painted))
    return max(entry["loadEventEnd"], paint["startTime"]) / 1000


def measured(name: str, states: Sequence[PageState], driver: Any, folder: Path) -> list[str]:
    start = time.perf_counter()
    shown = ShowOptions(names=True, terse=True, source=True)
    path = folder / f"{len(states)}.html"
    path.write_text(program_page(states, shown, stats, work_by_equation))
    rendered = time.perf_counter() - start
    opening = min(opened(driver, path) for _ in range(3))
    times = [timed(driver, script) for script in ACTIONS.values()]
    switched = [timed(driver, "show(0)")] if len(states) > 1 else []
    size = f"{path.stat().st_size / 2**20:.1f} MiB"
    return [name, f"{rendered:.2f} s", size, *(f"{t:.2f} s" for t in (opening, *times, *switched))]


def recorded(driver: Any, folder: Path) -> list[str]:
    """Write the page of a recorded run of 500 programs, each with 40 arguments."""

    def function(x: jax.Array) -> jax.Array:
        for _ in range(40):
            x = jax.numpy.tanh(x) * 2
        return x

    run, program = large(), trace(function, jax.numpy.ones(3))
    details = Details(program, stats(program), work_by_equation(program), cost(program, "line"))
    start = time.perf_counter()
    text = run_page(run, {each.file: details for each in with_listing(run)})
    rendered, path = time.perf_counter() - start, folder / "run.html"
    path.write_text(text)
    opening = min(opened(driver, path) for _ in range(3))
    filtered = timed(driver, ACTIONS["search"].replace("dot_general", "name_17"))
    row = timed(driver, "open(document.getElementById('fn17'))")
    size = f"{path.stat().st_size / 2**20:.1f} MiB"
    return [f"{rendered:.2f} s", size, *(f"{t:.2f} s" for t in (opening, filtered, row))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=54, help="186 equations each")
    shapes = transformer_shapes(parser.parse_args().layers)
    program = trace(jax.value_and_grad(transformer_loss), *shapes)
    kept = Kept(program)
    Pipeline.parse("-O2").run(program, kept)
    table = Table(title=f"pages of {count_equations(program):,} equations")
    for column in ("page", "made in", "size", "opens", *ACTIONS, "first tab"):
        table.add_column(column, justify="left" if column == "page" else "right", no_wrap=True)
    with chromium() as driver, tempfile.TemporaryDirectory() as folder:
        for name, states in (("show", kept.states[:1]), ("opt -O2", kept.states)):
            table.add_row(*measured(name, states, driver, Path(folder)))
        runs = Table(title="a recorded run of 500 programs")
        for column in ("made in", "size", "opens", "filter", "open a row"):
            runs.add_column(column, justify="right", no_wrap=True)
        runs.add_row(*recorded(driver, Path(folder)))
    Console(width=120).print(table, runs)


if __name__ == "__main__":
    main()
