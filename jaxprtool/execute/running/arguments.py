"""Checks and conversions of a program's flat arguments before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from jaxprtool.errors import ArgumentsError, StructureError, UnsupportedError
from jaxprtool.ir.basics.dtypes import as_array
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import all_contents
from jaxprtool.ir.programs.trees import filled
from jaxprtool.ir.shapes.symbols import example_sizes, found_sizes


def require_program(program: object) -> None:
    """Raise ArgumentsError unless this is a `Program`, for instance for an untraced function."""
    if not isinstance(program, Program):
        name = getattr(program, "__name__", None) or type(program).__name__
        hint = "create one with jaxprtool.trace(function, *arguments)"
        raise ArgumentsError(f"{name} is not a Program", hint)


def require_count(program: Program, arguments: Sequence[object]) -> None:
    """Raise ArgumentsError unless the number of flat arguments matches the program."""
    count = len(program.in_avals)
    if len(arguments) != count:
        raise ArgumentsError(f"{program.name} takes {count} arrays, not {len(arguments)}")


def flat_arguments(program: Program, args: object) -> list[Any]:
    """Return the flat arguments of a call, with keyword arguments last, or of any other pytree.

    A Ref is replaced by its value.

    Raises:
        ArgumentsError: If `program` is not a Program, or one Ref is given for two arguments.
    """
    require_program(program)
    positional, keywords = filled(program.in_tree, program.in_avals)
    if isinstance(args, tuple | list) and len(args) == len(positional) + len(keywords):
        with suppress(StructureError):
            named = dict(zip(keywords, args[len(positional) :], strict=True))
            return all_contents(program, program.matched(args[: len(positional)], named).leaves)
    return all_contents(program, jax.tree.leaves(args))


def at_one_size(
    before: Program, after: Program, arguments: Sequence[Any] | None = None
) -> tuple[Program, Program]:
    """Return the programs at the sizes of the flat arguments of `before`, or at small sizes.

    Raises ArgumentsError if no sizes fit.
    """
    if arguments is not None and len(arguments) == len(before.in_avals):
        before = before.at(list(map(np.shape, arguments)))
    elif before.arg_names == after.arg_names:  # `after` may have fewer symbols than `before`
        after = after.specialized(example_sizes(after.name, after.in_avals))
        return before.at([aval.shape for aval in after.in_avals]), after
    else:
        before = before.specialized(example_sizes(before.name, before.in_avals))
    shapes = {name: aval.shape for name, aval in before.arguments}
    known = [(name, aval) for name, aval in after.arguments if name in shapes]
    found = found_sizes(after.name, known, [shapes[name] for name, _ in known])
    return before, after.specialized(found)


def require_runnable(program: Program) -> None:
    """Raise UnsupportedError for a program that cannot be run on its own."""
    if program.axis_env:
        axes = ", ".join(repr(name) for name, _ in program.axis_env)
        raise UnsupportedError(
            f"{program.name} cannot be run: it has the free named axes {axes}",
            "bind one with batch(axis_name=…)",
        )


def fitting(program: Program, arguments: Sequence[object]) -> list[Any]:
    """Return flat arguments as arrays of a program's argument types.

    Raises:
        ArgumentsError: If their number or a type differs, if one is a type instead of an array, or
            if a size exceeds its bound.
    """
    require_count(program, arguments)
    return [as_array(x) for x in program.checked(arguments)]
