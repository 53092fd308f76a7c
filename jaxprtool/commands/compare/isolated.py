"""Run a variant in a separate process, which a compiler crash ends with a signal.

A program goes there as a `.jaxpr` file, and keys as their data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.commands.compare.variants import OnProgress, Runner, Variant
from jaxprtool.execute.running.arrays import as_numpy
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.dtypes import is_extended, x64_enabled
from jaxprtool.jaxcompat import Aval
from jaxprtool.processes.calls import PythonProcess, python_process


class IsolatedRunner:
    """Runs a variant in a separate process, which may crash."""

    def __init__(self, variant: Variant, on_progress: OnProgress = lambda doing: None):
        self._variant, self._on_progress = variant, on_progress

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results for flat arguments, as NumPy arrays except for keys.

        Raises UnsupportedError if the process crashes or the program cannot be written to a file,
        and the errors of the run.
        """
        variant = self._variant
        with process_of(variant) as process:
            self._on_progress(f"running {variant.name} in its own process")
            return results_in(process, variant, arguments)


def process_of(variant: Variant) -> AbstractContextManager[PythonProcess]:
    """Start a process with the environment of a variant; it ends with the `with` block."""
    return python_process(f"{variant.name} crashed", dict(variant.environment))


def results_in(process: PythonProcess, variant: Variant, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a variant in a process. Raises the errors of `IsolatedRunner`."""
    results = process.call(_results, *sent(process, variant, arguments))
    return logical(results, variant.program.out_avals)


def _results(*request: Any) -> list[Any]:
    variant, arguments = received(*request)
    return list(map(as_numpy, Runner(variant)(arguments)))


def sent(process: PythonProcess, variant: Variant, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a variant and its flat arguments as values that can be sent to a process.

    Raises UnsupportedError if the program cannot be written.
    """
    path = os.path.join(process.folder, "program.jaxpr")
    write(variant.program, path)
    with jax.transfer_guard("allow"):
        values = list(map(as_numpy, arguments))
    return path, variant.name, variant.platform, variant.op_by_op, x64_enabled(), values


def received(
    path: str, name: str, platform: str | None, op_by_op: bool, x64: bool, values: Sequence[Any]
) -> tuple[Variant, list[Any]]:
    """Return the variant and the flat arguments that were sent, and configure JAX for them."""
    jaxcompat.keep_backend_probing_quiet()
    jax.config.update("jax_enable_x64", x64)
    program = read(path)
    return Variant(name, program, platform, op_by_op), logical(values, program.in_avals)


def logical(arrays: Sequence[Any], avals: Sequence[Aval]) -> list[Any]:
    """Return arrays of these types from their plain representation, such as keys from key data."""
    return [
        jaxcompat.logical_array(jax.numpy.asarray(x), aval=aval)
        if is_extended(getattr(aval, "dtype", None))
        else x
        for x, aval in zip(arrays, avals, strict=True)
    ]
