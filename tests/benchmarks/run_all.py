"""Run all benchmarks and write their output to the end of docs/benchmarks.md.

    python tests/benchmarks/run_all.py                  # those of the list at the top of the page
    python tests/benchmarks/run_all.py --only dce,cost  # some of them; the others keep their output
    python tests/benchmarks/run_all.py --quick          # with few repeats and small programs

They run one after the other, so nothing else should run. Each output is kept in `build/benchmarks`
with the date, and the versions of all packages; a run that was interrupted goes on where it was
with `--resume`. A benchmark that fails, for want of a package or of Chromium, has its error.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, OUTPUTS = ROOT / "docs" / "benchmarks.md", ROOT / "build" / "benchmarks"

#: The heading of what this script writes; the text before it is written by hand.
HEADING = "## Output of all benchmarks\n"

#: Packages that the benchmarks measure, or measure on.
PACKAGES = (
    *("jax", "jaxlib", "numpy", "typer", "rich", "jinja2"),
    *("flax", "optax", "equinox", "dm-haiku", "diffrax"),
)

#: Options that make a benchmark short.
QUICK = {
    "apply": ["--rounds", "3"],
    "batch": ["--max", "10000", "--rounds", "3"],
    "bench": ["--rounds", "30", "--trials", "3"],
    "cost": ["--sizes", "10000", "--rounds", "1"],
    "jit": ["--rounds", "2"],
    "lint": ["--rounds", "1"],
    "listing": ["--max", "10000"],
    "memory": ["--gradients"],
    "names": ["--max", "10000", "--rounds", "1"],
    "outline": ["transformer", "--depths", "12", "--rounds", "1"],
    "outline_scaling": ["--sizes", "1000", "10000", "--rounds", "1"],
    "program_file": ["--max", "10000"],
    "residuals": ["--sizes", "1000", "--rounds", "1"],
    "rewrite": ["--rounds", "1"],
    "shapes": ["--rounds", "3"],
    "source": ["--sizes", "10000", "--rounds", "1"],
    "unzip": ["--max", "10000", "--rounds", "3"],
}

#: The most seconds that a benchmark may take.
LONGEST = 3600


def names() -> list[str]:
    """Return the benchmarks of the list at the top of the page: `dce` for `bench_dce.py`."""
    listed = re.findall(r"^python tests/benchmarks/bench_(\w+)\.py", PAGE.read_text(), re.MULTILINE)
    return list(dict.fromkeys(listed))


def run(name: str, options: list[str]) -> None:
    """Run a benchmark, and keep its output."""
    command = ["python", f"tests/benchmarks/bench_{name}.py", *options]
    start = datetime.datetime.now(datetime.UTC)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [sys.executable, *command[1:]],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=LONGEST,
            env={**os.environ, "COLUMNS": "100"},
        )
        error = (done.stderr.strip().splitlines() or ["failed"])[-1] if done.returncode else ""
        text = done.stdout.rstrip() + (f"\n{error}" if error else "")
    except subprocess.TimeoutExpired:
        text = f"more than {LONGEST} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load = f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} CPUs"
    about = f"{start:%Y-%m-%d}, {seconds:,.0f} s of CPU time, {load}"
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    (OUTPUTS / f"{name}.txt").write_text(f"{about}\n$ {' '.join(command)}\n{text.strip()}\n")
    print(f"{name}: {about}", file=sys.stderr, flush=True)


def versions() -> Iterator[str]:
    """Yield the versions of everything that was measured."""
    yield f"Python {platform.python_version()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def section() -> str:
    """Return the section of the page from the outputs that are kept."""
    parts = [f"{HEADING}\n`python tests/benchmarks/run_all.py` has made this section.\n"]
    parts.append(f"{', '.join(versions())}.\n")
    for name in names():
        file = OUTPUTS / f"{name}.txt"
        if file.exists():
            about, _, text = file.read_text().partition("\n")
            parts.append(f"### bench_{name}.py\n\n{about}.\n\n```text\n{text}```\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="benchmarks, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few repeats, small programs")
    parser.add_argument("--resume", action="store_true", help="keep the outputs that are there")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or names()
    for name in chosen:
        if not (options.resume and (OUTPUTS / f"{name}.txt").exists()):
            run(name, QUICK.get(name, []) if options.quick else [])
    PAGE.write_text(PAGE.read_text().partition(HEADING)[0].rstrip() + "\n\n" + section())


if __name__ == "__main__":
    main()
