"""Make a Program from a lowering of JAX, and write it with its constants, shared and limited."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxprtool import jaxcompat
from jaxprtool.files import file_written_whole
from jaxprtool.formats.jaxpr.notation import Opaque
from jaxprtool.formats.jaxpr.write import rendered
from jaxprtool.formats.npz import write_npz
from jaxprtool.formats.with_constants import constants_file
from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.programs.auto_sharding import is_over_devices
from jaxprtool.ir.programs.jit_options import JitOptions
from jaxprtool.ir.programs.lifted import with_lifted
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import structure
from jaxprtool.ir.rewriting.closed_over import with_closed_over
from jaxprtool.jaxcompat.compile_hooks import Lowering
from jaxprtool.recording import libraries

#: Constants of fewer bytes are part of a program's text, and are always written.
SMALL = 1024


def program_of(lowering: Lowering, arguments: Sequence[str]) -> Program:
    """Return the program that JAX lowers, with the trees of its call.

    Args:
        lowering: The lowering.
        arguments: The user's names of the flat arguments.
    """
    jaxpr = with_closed_over(jaxcompat.from_jax(lowering.jaxpr))
    in_avals, out_avals = jaxpr.in_avals, jaxpr.out_avals
    call = lowering.call
    if call is None:
        in_tree, out_tree = structure((tuple(in_avals), {})), structure(list(out_avals))
    else:
        in_tree, out_tree = call.in_tree, call.out_tree
    known = jaxcompat.open_jaxpr(lowering.jaxpr).debug_info
    own = arguments if len(arguments) == len(in_avals) else known.arg_names
    arg_names = _names(own, len(in_avals), "arg")
    results: Sequence[str | None] | None = known.result_paths
    if call is not None and results is not None:
        results = libraries.result_paths(call.fun, call.out_tree, [each or "" for each in results])
    out_names = _names(results, len(out_avals), "result")
    taken = list(zip(arg_names, in_avals, strict=True))
    options = None
    if call is not None:
        given = list(zip(out_names, out_avals, strict=True))
        options = JitOptions.from_traced(taken, given, call.options)
    placements = [_over_mesh(each) for each in lowering.in_shardings]
    if any(placements):
        # JAX compiles for the devices of arguments that lie on several devices.
        options = (options or JitOptions()).placing(taken, placements)
    return Program(
        name=lowering.name,
        jaxpr=jaxpr,
        in_tree=in_tree,
        out_tree=out_tree,
        arg_names=arg_names,
        out_names=out_names,
        jit=options,
        sharded=tuple(
            name
            for name, sharding in zip(arg_names, lowering.in_shardings, strict=True)
            if is_over_devices(sharding) and not isinstance(sharding, NamedSharding)
        ),
    )


def _over_mesh(sharding: Any) -> NamedSharding | None:
    """Return a sharding if it is over a mesh of several devices, else None."""
    is_known = isinstance(sharding, NamedSharding) and is_over_devices(sharding)
    return sharding if is_known else None


def _names(known: Sequence[str | None] | None, count: int, root: str) -> tuple[str, ...]:
    """Return unique names for `count` values; `root[i]` for values that JAX has not named."""
    found = list(known or ())
    if len(found) != count:
        found = [None] * count
    return unique([name or f"{root}[{i}]" for i, name in enumerate(found)])


def equation_count(program: Program) -> int:
    """Return the number of equations of a program, at all depths."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


class ConstantsStore:
    """Writes programs to a folder, and each set of large constants once.

    Args:
        folder: The folder.
        limit: The maximum size of all constants, in bytes. A program whose constants do not fit
            takes them as arguments `closed_over[i]`.
        since: The time since when the script runs: files that are edited later are not its source.
    """

    def __init__(self, folder: str, limit: int, since: float | None = None) -> None:
        self._folder, self._left, self._since = folder, limit, since

    def write(self, program: Program, name: str) -> None:
        """Write a program to a file of this name.

        Raises:
            UnsupportedError: If the program cannot be written to a file.
            OutputError: If the file cannot be written.
        """
        if self._large(program) > self._left:
            program = with_constants_lifted(program)
        text, arrays = rendered(
            program, "constants", stubs=True, opaque=Opaque.foreign, since=self._since
        )
        if arrays:
            path = os.path.join(self._folder, constants_file("constants", arrays))
            if not os.path.exists(path):
                with file_written_whole(path) as file:
                    write_npz(file, arrays)
                self._left -= sum(array.nbytes for array in arrays.values())
        with file_written_whole(os.path.join(self._folder, name)) as file:
            file.write(text.encode())

    def _large(self, program: Program) -> int:
        return sum(size for size in map(_bytes, program.jaxpr.consts) if size >= SMALL)


def with_constants_lifted(program: Program) -> Program:
    """Return a program that takes its large constants as arguments `closed_over[i]`."""
    jaxpr = program.jaxpr
    pairs = list(zip(jaxcompat.open_jaxpr(jaxpr).constvars, jaxpr.consts, strict=True))
    lifted = [var for var, value in pairs if _bytes(value) >= SMALL]
    kept = [(var, value) for var, value in pairs if _bytes(value) < SMALL]
    new = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=[var for var, _ in kept],
        consts=[value for _, value in kept],
        invars=[*jaxcompat.open_jaxpr(jaxpr).invars, *lifted],
    )
    return with_lifted(program, new, len(lifted))


def _bytes(value: Any) -> int:
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * getattr(dtype, "itemsize", 0)
