"""The command line of the sweep: see the package."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tests.conftest  # noqa: F401  # sets JAX up, before it is imported

# isort: split
import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.sweep.parts import ROOT, Result, find_parts
from tests.sweep.runner import Runner, State
from tests.sweep.worker import Task, drawn_units

SOURCE = "tests.sweep.parts:find_parts"
SHARE = 0.1


def main() -> int:
    """Run the sweep. Return 1 if something failed."""
    options = parse()
    parts = [p for p in find_parts() if not options.only or any(o in p.name for o in options.only)]
    if options.list:
        print(*(f"{len(part.units()):4} units  {part.name}" for part in parts), sep="\n")
        return 0
    if not parts:
        sys.exit(f"no part is called {' or '.join(options.only)}: see --list")
    if options.program:
        (part,) = [p for p in parts if p.name in options.only] or parts[:1]
        part.run_alone(options.program)
        return 0
    state = State(options.state)
    if options.again:
        state.results = {k: r for k, r in state.results.items() if r.kind != "failed"}
    console = Console(stderr=True)
    console.print(
        f"JAX {jax.__version__}, share {options.share:g} drawn by --seed {options.seed},"
        f" {len(state.results)} programs done before, kept in {state.path}",
        highlight=False,
        soft_wrap=True,
    )
    stopped = run(state, parts, options, console)
    names = {part.name for part in parts}
    results = [r for r in state.results.values() if r.part in names]
    print(table(results))
    failed = [failure(result) for result in results if result.kind == "failed"]
    if options.share >= 1 and not stopped:
        found = outcomes(results)
        unexpected = (p.name for p in parts if not p.expected(found.get(p.name, Counter())))
        failed += [f"failed: {name}: the outcomes are not those expected" for name in unexpected]
    print(*failed, sep="\n")
    if stopped:
        console.print("stopped; the same command goes on from here")
    return 1 if failed or stopped else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    add = parser.add_argument
    add("--share", type=float, default=SHARE, help=f"of each part's programs, {SHARE} if not given")
    add("--seed", type=int, help="what the share is drawn by; if not given, by the commit")
    add("--jobs", type=int, default=os.cpu_count(), help="processes, as many as there are cores")
    add("--only", action="append", default=[], help="parts whose name holds this; repeatable")
    add("--program", help="run this program of the one part --only here, and show what it raises")
    add("--state", type=Path, help="the file of results; if not given, one for each commit")
    add("--again", action="store_true", help="run programs that failed before once more")
    add("--list", action="store_true", help="list the parts")
    options = parser.parse_args()
    tree = tested_tree()
    if options.seed is None:
        options.seed = int(tree[:8], 16)
    if options.state is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        options.state = cache / "jaxprtool-tests" / "sweep" / f"{jax.__version__}-{tree}.jsonl"
    return options


def tested_tree() -> str:
    """Return the commit that is tested, and a digest of what is changed since."""

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.strip()

    commit = git("rev-parse", "HEAD")[:12] or "0" * 12
    changes = git("diff", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return f"{commit}-{blake2b(changes.encode(), digest_size=4).hexdigest()}" if changes else commit


def run(state: State, parts: Sequence[Any], options: Any, console: Console) -> bool:
    """Run the remaining parts. Return True if interrupted."""
    tasks = [task for part in parts for task in tasks_of(part, options.share, options.seed)]
    random.Random(options.seed).shuffle(tasks)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("units, {task.description}"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    bar = progress.add_task("", total=len(tasks))
    counts: Counter[str] = Counter()

    def follow(result: Result | None) -> None:
        if result is None:
            progress.advance(bar)
            return
        counts[result.kind] += 1
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        progress.update(bar, description=f"{shown}; {result.part}")
        if result.kind == "failed":
            line = result.error.splitlines()[:1]
            progress.console.print(
                escape(f"failed: {result.part}: {result.program}: {' '.join(line)[:300]}"),
                soft_wrap=True,
            )

    runner = Runner(state, SOURCE, options.jobs)
    runner.progress = follow
    start = time.monotonic()
    try:
        # Parts share compilations in a folder, which would grow if it were kept after the sweep.
        with progress, TemporaryDirectory() as folder:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
            runner.run(tasks)
    except KeyboardInterrupt:
        return True
    console.print(f"{time.monotonic() - start:.0f} s with {options.jobs} processes")
    return False


def tasks_of(part: Any, share: float, seed: int) -> list[Task]:
    """Return the tasks of a part, for a share of it."""
    units = part.units()
    if part.whole:
        units, share = drawn_units(part.name, units, share, seed), 1.0
    return [Task(part.name, unit, share, seed, frozenset()) for unit in units]


def table(results: Iterable[Result]) -> str:
    """Return the counts as a table of Markdown, followed by the outcomes."""
    kinds: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    results = sorted(results, key=lambda r: r.part)
    for r in results:
        for part in (r.part, "all"):
            kinds.setdefault(part, Counter())[r.kind] += 1
            seconds[part] += r.seconds
    lines = [
        "| part | programs | passed | refused as expected | failed | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for part in sorted(kinds, key=lambda name: (name == "all", name)):
        n = kinds[part]
        row = (n.total(), n["passed"], n["refused"], n["failed"], f"{seconds[part]:.0f}")
        lines.append(f"| {part} | " + " | ".join(map(str, row)) + " |")
    lines.append("")
    for part, counts in outcomes(results).items():
        shown = (f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        lines.append(f"{part}: " + ", ".join(shown))
    return "\n".join(lines)


def outcomes(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """Return the sums of the outcomes of each part."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.part, Counter()).update(result.outcomes)
    return {part: counts for part, counts in found.items() if counts}


def failure(result: Result) -> str:
    """Return a failure, and the command that reproduces it."""
    command = f"python -m tests.sweep --only '{result.part}' --program '{result.program}'"
    return f"\nfailed: {command}\n    " + result.error.strip().replace("\n", "\n    ")


if __name__ == "__main__":
    sys.exit(main())
