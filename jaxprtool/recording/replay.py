"""Find the program of a recorded run that a TARGET names, and the arguments kept for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Aval
from jaxprtool.recording.kept import Leaf, kept_arguments, kept_calls, kept_types
from jaxprtool.recording.read import program_file, read_program


def replayed(run: str, name: str) -> tuple[Program, list[Any] | None]:
    """Return a program of a run, and the arguments of its last kept call.

    Args:
        run: The folder of the run.
        name: The name of the program: `step@2`. For `step`, the compilation that the last kept call
            used; without kept calls, the first one.

    Returns:
        The program, and its flat arguments; None if no call of it was kept.

    Raises:
        TargetError: If the run has no such program.
        ProgramFileError: If a file is damaged.
    """
    file = program_file(run, name)
    process, base = os.path.split(file)
    function, at, _ = base.removesuffix(".jaxpr").partition("@")
    calls = [call for call in kept_calls(process) if call.function == function]
    named = bool(at) or name.endswith("@1")
    for call in reversed(calls):
        types = kept_types(call)
        for each in [file] if named else _compilations(process, function):
            program = read_program(run, each)
            if _fits(types, program.in_avals):
                return program, kept_arguments(call)
    return read_program(run, file), None


def _compilations(process: str, function: str) -> list[str]:
    """Return the files of all compilations of a function, the last one first."""
    found, count = [], 1
    file = os.path.join(process, f"{function}.jaxpr")
    while os.path.isfile(file):
        found.append(file)
        count += 1
        file = os.path.join(process, f"{function}@{count}.jaxpr")
    return found[::-1]


def _fits(types: Sequence[Leaf], avals: Sequence[Aval]) -> bool:
    """Return True if a program takes arguments of these types."""
    return len(types) == len(avals) and all(map(_is, types, avals))


def _is(leaf: Leaf, aval: Aval) -> bool:
    if leaf.shape != aval.shape or bool(leaf.key) != is_extended(aval.dtype):
        return False
    if leaf.key:
        return True
    if leaf.weak != bool(getattr(aval, "weak_type", False)):
        return False
    return leaf.dtype == str(aval.dtype) or leaf.dtype == _WIDE.get(str(aval.dtype))


#: The NumPy dtype that JAX converts to each narrow dtype without `jax_enable_x64`.
_WIDE = {"float32": "float64", "int32": "int64", "uint32": "uint64", "complex64": "complex128"}
