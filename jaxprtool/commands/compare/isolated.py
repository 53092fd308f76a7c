"""Run a variant in a separate process: `python -m jaxprtool.commands.compare.isolated FOLDER`.

The folder has the program as a `.jaxpr` file, and a pickle of its arguments and options; the
results are written there. A compiler crash ends the process with a signal.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat, processes
from jaxprtool.commands.compare.variants import OnProgress, Runner, Variant
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.execute.running.arrays import as_numpy
from jaxprtool.files import file_written_whole
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.dtypes import is_extended, x64_enabled
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import Aval

_PROGRAM, _REQUEST, _RESULTS = "program.jaxpr", "request.pickle", "results.pickle"


class IsolatedRunner:
    """Runs a variant in a separate process, which may crash."""

    def __init__(self, variant: Variant, on_progress: OnProgress = lambda doing: None):
        self._variant, self._on_progress = variant, on_progress

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results for flat arguments, as NumPy arrays except for keys.

        Raises UnsupportedError if the process crashes or the program cannot be written to a file,
        and the errors of the run.
        """
        variant, program = self._variant, self._variant.program
        with processes.temporary_folder() as folder:
            write_request(folder, variant, arguments)
            self._on_progress(f"running {variant.name} in its own process")
            command = [sys.executable, "-m", __name__, folder]
            env = {**os.environ, **dict(variant.environment)}
            outcome = processes.run_process(command, env=env)
            if outcome.status != 0:
                raise UnsupportedError(f"{variant.name} crashed: {outcome}")
            return load_results(folder, program)


def write_request(folder: str, variant: Variant, arguments: Sequence[Any]) -> None:
    """Write a variant and its flat arguments to a folder, for another process.

    Raises UnsupportedError if the program cannot be written.
    """
    write(variant.program, os.path.join(folder, _PROGRAM))
    with jax.transfer_guard("allow"):
        values = list(map(as_numpy, arguments))
    request = values, variant.name, variant.platform, variant.op_by_op, x64_enabled()
    dump(request, os.path.join(folder, _REQUEST))


def read_request(folder: str) -> tuple[Variant, list[Any]]:
    """Return the variant and the flat arguments in a folder, and configure JAX for them."""
    values, name, platform, op_by_op, x64 = load_pickled(os.path.join(folder, _REQUEST))
    jax.config.update("jax_enable_x64", x64)
    program = read(os.path.join(folder, _PROGRAM))
    return Variant(name, program, platform, op_by_op), logical(values, program.in_avals)


def load_results(folder: str, program: Program) -> list[Any]:
    """Return the results of a program that `main` wrote to a folder, or raise its error."""
    error, results = load_pickled(os.path.join(folder, _RESULTS))
    if error is not None:
        raise error
    return logical(results, program.out_avals)


def logical(arrays: Sequence[Any], avals: Sequence[Aval]) -> list[Any]:
    """Return arrays of these types from their plain representation, such as keys from key data."""
    return [
        jaxcompat.logical_array(jax.numpy.asarray(x), aval=aval)
        if is_extended(getattr(aval, "dtype", None))
        else x
        for x, aval in zip(arrays, avals, strict=True)
    ]


def dump(value: object, path: str) -> None:
    """Pickle a value to a file, written whole or not at all."""
    with file_written_whole(path) as file:
        pickle.dump(value, file)


def load_pickled(path: str) -> Any:
    """Return the value pickled in a file of this process's own."""
    with open(path, "rb") as file:
        return pickle.load(file)


def main(folder: str) -> None:
    """Run the variant in a folder, and write its results or its error there."""
    jaxcompat.keep_backend_probing_quiet()
    error, results = None, None
    try:
        variant, arguments = read_request(folder)
        results = list(map(as_numpy, Runner(variant)(arguments)))
    except JaxprToolError as fault:
        error = type(fault)(fault.message, fault.hint)
    dump((error, results), os.path.join(folder, _RESULTS))


if __name__ == "__main__":
    main(sys.argv[1])
