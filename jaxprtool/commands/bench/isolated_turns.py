"""Time the calls of a variant in its own process.

`python -m jaxprtool.commands.bench.isolated_turns FOLDER` compiles the variant in a folder (see
`isolated`). It prints its `VariantStart` as a line of JSON, and then, for each line that it reads,
the seconds of a call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from jaxprtool import errors, jaxcompat, processes
from jaxprtool.commands.bench.turns import TurnsHere, VariantStart
from jaxprtool.commands.compare.isolated import read_request, write_request
from jaxprtool.commands.compare.variants import OnProgress, Variant
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.execute.running.run import CompiledMemory
from jaxprtool.ir.documents import as_json

_STDERR = "stderr.txt"


@contextmanager
def isolated_turns(
    variant: Variant, arguments: Sequence[Any], on_progress: OnProgress = lambda doing: None
) -> Iterator[IsolatedTurns]:
    """Start a process for a variant; it ends with the `with` block.

    Raises UnsupportedError if the program cannot be written to a file.
    """
    with processes.temporary_folder() as folder:
        write_request(folder, variant, arguments)
        command = [sys.executable, "-m", __name__, folder]
        # The first process would take most of a GPU's memory, which all of them use.
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        with (
            open(os.path.join(folder, _STDERR), "w+", encoding="utf-8") as stderr,
            processes.Child(
                command, env=env, stdin=subprocess.PIPE, stderr=stderr, text=True
            ) as child,
        ):
            yield IsolatedTurns(variant.name, child, stderr.name, on_progress)


class IsolatedTurns:
    """A variant in another process, which may crash."""

    def __init__(self, name: str, child: processes.Child, stderr: str, on_progress: OnProgress):
        self._name, self._child, self._stderr = name, child, stderr
        self._on_progress = on_progress

    def start(self) -> VariantStart:
        """Wait until it is compiled.

        Raises the errors of `run`, and UnsupportedError if the process crashes.
        """
        self._on_progress(f"compiling {self._name} in its own process")
        reply = self._line()
        if "error" in reply:
            raise getattr(errors, reply["error"])(reply["message"], reply["hint"])
        memory = reply["memory"] and CompiledMemory(**reply["memory"])
        return VariantStart(**{**reply, "devices": tuple(reply["devices"]), "memory": memory})

    def turn(self) -> float:
        stdin = self._child.popen.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has crashed: there is no line to read
            stdin.write("\n")
            stdin.flush()
        return float(self._line())

    def _line(self) -> Any:
        stdout = self._child.popen.stdout
        assert stdout is not None
        if line := stdout.readline():
            return json.loads(line)
        outcome = self._child.wait()
        with open(self._stderr, encoding="utf-8", errors="replace") as file:
            outcome = replace(outcome, stderr=file.read())
        raise UnsupportedError(f"{self._name} crashed: {outcome}")


def main(folder: str) -> None:
    """Compile the variant in a folder, and take a turn for each line of stdin."""
    jaxcompat.keep_backend_probing_quiet()
    try:
        turns = TurnsHere(*read_request(folder))
        with compiled_afresh():
            start = turns.start()
    except JaxprToolError as error:
        name = type(error).__name__
        _say({"error": name, "message": error.message, "hint": error.hint})
        return
    _say(as_json(start))
    for _ in sys.stdin:
        _say(turns.turn())


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
