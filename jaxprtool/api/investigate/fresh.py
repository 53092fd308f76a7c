"""Trace and run a function in another process, and return its program and its results.

The process runs the same command line. If the environment variable FOLDER is set, the command
writes its program and results to that folder, and does nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprtool import processes
from jaxprtool.api.investigate.isolated import dump, load, logical
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.compare.repeated import FreshRun
from jaxprtool.execute.compare.variants import Runner, Variant
from jaxprtool.execute.running.arrays import as_numpy
from jaxprtool.formats.jaxpr import write
from jaxprtool.ir.programs.program import Program

#: The environment variable that names the folder.
FOLDER = "JAXPRTOOL_FRESH_RUN"

_FILE = "run.pickle"


def run_fresh(command: Sequence[str], environment: Mapping[str, str], program: Program) -> FreshRun:
    """Run a command line in a new process, and return the program and the results it writes.

    `program` is the program of this process, whose types the results get. Raises UnsupportedError
    if the process fails.
    """
    with processes.temporary_folder() as folder:
        outcome = processes.run(command, env={**os.environ, **environment, FOLDER: folder})
        if outcome.status != 0:
            raise UnsupportedError(f"the process failed: {outcome}")
        text, results = load(os.path.join(folder, _FILE))
    if list(results) == list(program.out_names):
        values = logical(list(results.values()), program.out_avals)
        results = dict(zip(results, values, strict=True))
    return FreshRun(text, results)


def write_fresh(folder: str, program: Program, arguments: Sequence[Any]) -> None:
    """Run a program on flat arguments, and write it and its results to the folder."""
    values = map(as_numpy, Runner(Variant(program.name, program))(arguments))
    results = dict(zip(program.out_names, values, strict=True))
    dump((write.text(program, callbacks="stub"), results), os.path.join(folder, _FILE))
