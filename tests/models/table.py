"""Print the README's table of models by command: `python -m tests.models.table`.

Names of models after it restrict it to these. What fails is printed below the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.models.commands import COMMANDS, Model

ZOO = Path(__file__).parent / "zoo"


def row(name: str) -> tuple[list[str], list[str]]:
    """Return the cells of a model, and what went wrong."""
    model, cells, faults = Model(name), [], []
    for title, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                cells.append(command(model, Path(folder)) or "yes")
            except Exception as error:
                cells.append("**no**")
                last = traceback.format_exception_only(error)[-1].strip()
                faults.append(f"{name}, {title}: {last[:1000]}")
    return cells, faults


def main(names: list[str]) -> None:
    """Print the table, then the faults."""
    print("| model |", " | ".join(COMMANDS), "|")
    print("| --- |", " | ".join("---" for _ in COMMANDS), "|")
    found = []
    for name in names or sorted(p.stem for p in ZOO.glob("[!_]*.py")):
        cells, faults = row(name)
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
        found += faults
    print(*found, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
