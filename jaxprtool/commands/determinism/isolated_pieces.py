"""Run pieces of a variant, one after the other, in a process with the variant's environment.

`python -m jaxprtool.commands.determinism.isolated_pieces` runs the variant in each folder whose
path it reads (see `isolated`), and prints a line when it is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import jax

from jaxprtool import processes
from jaxprtool.commands.compare import isolated
from jaxprtool.commands.compare.variants import Executor, Variant
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import ClosedJaxpr

_STDERR = "stderr.txt"


@contextmanager
def piece_runner(variant: Variant) -> Iterator[PieceRunner]:
    """Start a process with the environment of a variant; it ends with the `with` block."""
    command = [sys.executable, "-m", __name__]
    env = {**os.environ, **dict(variant.environment)}
    with (
        processes.temporary_folder() as folder,
        open(os.path.join(folder, _STDERR), "w+", encoding="utf-8") as stderr,
        processes.Child(command, env=env, stdin=subprocess.PIPE, stderr=stderr, text=True) as child,
    ):
        yield PieceRunner(variant, folder, child)


class PieceRunner:
    """A process that runs pieces of a variant, and may crash."""

    def __init__(self, variant: Variant, folder: str, child: processes.Child):
        self._variant, self._folder, self._child = variant, folder, child

    def executor(self, variant: Variant, arguments: Sequence[Any]) -> Executor:
        """Return an executor that runs the pieces of a variant in the process."""
        return _PieceExecutor(variant, arguments, self)

    def run(self, piece: Program, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a piece.

        Raises UnsupportedError if it cannot be written to a file or the process crashes, and the
        errors of the run.
        """
        isolated.write_request(self._folder, replace(self._variant, program=piece), arguments)
        stdin, stdout = self._child.popen.stdin, self._child.popen.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # it has crashed: there is no line to read
            stdin.write(self._folder + "\n")
            stdin.flush()
        if not stdout.readline():
            outcome = self._child.wait()
            with open(os.path.join(self._folder, _STDERR), errors="replace") as file:
                outcome = replace(outcome, stderr=file.read())
            raise UnsupportedError(f"{self._variant.name} crashed: {outcome}")
        return isolated.load_results(self._folder, piece)


class _PieceExecutor(Executor):
    """Runs pieces in another process."""

    def __init__(self, variant: Variant, arguments: Sequence[Any], runner: PieceRunner):
        super().__init__(variant, arguments)
        self._name, self._runner = variant.program.name, runner

    def run(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        taken = tuple(f"x{i}" for i in range(len(body.in_avals)))
        out_names = tuple(f"y{i}" for i in range(len(body.out_avals)))
        trees = jax.tree.structure((taken, {})), jax.tree.structure(out_names)
        return self._runner.run(Program(self._name, body, *trees, taken, out_names), arguments)


def main() -> None:
    """Run the variant in each folder that stdin names."""
    for line in sys.stdin:
        isolated.main(line.rstrip("\n"))
        print("done", flush=True)


if __name__ == "__main__":
    main()
