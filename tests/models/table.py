"""Print the tables of docs/models.md: `python -m tests.models.table`.

Arguments are the names of models to include. Failures are printed on stderr.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.models.commands import COMMANDS, Command, Model
from tests.models.questions import QUESTIONS
from tests.models.steps import ROWS

ZOO = Path(__file__).parent / "zoo"


def row(model: Model, commands: dict[str, Command]) -> list[str]:
    """Return the cells of a model, and print failures."""
    cells = []
    model.prepare()
    for title, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                cells.append(command(model, Path(folder)) or "yes")
            except Exception as error:
                cells.append("**no**")
                last = traceback.format_exception_only(error)[-1].strip()
                print(f"{model.name}, {title}: {last[:1000]}", file=sys.stderr, flush=True)
    return cells


def main(names: list[str]) -> None:
    """Print the tables of these models, or of all."""
    models = [Model(name) for name in names or sorted(p.stem for p in ZOO.glob("[!_]*.py"))]
    for commands in (COMMANDS, QUESTIONS, ROWS):
        print("| model |", " | ".join(commands), "|")
        print("| --- |", " | ".join("---" for _ in commands), "|")
        for model in models:
            print(f"| {model.name} |", " | ".join(row(model, commands)), "|", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
