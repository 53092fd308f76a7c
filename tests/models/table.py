"""Print the table of models in docs/models.md by command: `python -m tests.models.table`.

Names of models after it restrict it to these. What fails is printed on stderr.
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


def row(name: str) -> list[str]:
    """Return the cells of a model, and print what went wrong."""
    model, cells = Model(name), []
    for title, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                cells.append(command(model, Path(folder)) or "yes")
            except Exception as error:
                cells.append("**no**")
                last = traceback.format_exception_only(error)[-1].strip()
                print(f"{name}, {title}: {last[:1000]}", file=sys.stderr, flush=True)
    return cells


def main(names: list[str]) -> None:
    """Print the table of these models, or of all."""
    print("| model |", " | ".join(COMMANDS), "|")
    print("| --- |", " | ".join("---" for _ in COMMANDS), "|")
    for name in names or sorted(p.stem for p in ZOO.glob("[!_]*.py")):
        print(f"| {name} |", " | ".join(row(name)), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
