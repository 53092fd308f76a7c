"""`source`: the cost of each source line, the bytes it keeps for a backward pass, and its time.

found = jaxprtool.source(program)
found.files[0].lines[0].total.work.flops
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import jax.numpy as jnp

from jaxprtool.analysis.profile import Profile, profile_of
from jaxprtool.analysis.residuals import residuals as found_residuals
from jaxprtool.analysis.shardings import Shardings
from jaxprtool.analysis.source_lines import (
    Source,
    called_package,
    source_lines,
    with_collectives,
    with_residuals,
    with_times,
)
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.frames import current_frame_view, frames, frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import filled, structure
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes.framework.retrace import (
    chosen_argnums,
    positional,
    positional_roots,
    root_of,
)
from jaxprtool.passes.transforms.linear import Vjp


def source(
    program: Program,
    *,
    residuals: bool | None = None,
    argnums: int | Sequence[int] = 0,
    profile: Profile | None = None,
    shardings: Shardings | None = None,
) -> Source:
    """Return the cost of each line of the user's source.

    If no equation has a user's line, the lines are those of the package that is called.

    Args:
        program: A `Program`.
        residuals: Whether to count the bytes that each line keeps for the gradient. By default they
            are counted if the program returns a single float, such as a loss, and is not a
            gradient.
        argnums: The positional arguments of this gradient.
        profile: A profile of the program, `jaxprtool.profile(program)`, whose times are added.
        shardings: The shardings of the program, `jaxprtool.shardings(program)`, whose bytes sent by
            each device are added.

    Raises:
        ArgumentsError: If residuals are counted, and there is no floating-point array in an
            argument of `argnums`.
        UnsupportedError: If residuals are counted and `vjp` raises it.
    """
    annotated = source_lines(program)
    package = "" if annotated.files else called_package(program)
    if not package:
        annotated = _with_residuals(annotated, program, residuals, argnums)
        annotated = annotated if profile is None else with_times(annotated, profile)
        return _with_collectives(annotated, program, shardings)
    with frames(current_frame_view().choice, package):
        annotated = replace(source_lines(program), package=package)
        annotated = _with_residuals(annotated, program, residuals, argnums)
        if profile is not None and profile.trace is not None:
            lines = profile_of(profile.trace, profile.name, frames_now(program.roots)).lines
            annotated = with_times(annotated, replace(profile, lines=lines))
        return _with_collectives(annotated, program, shardings)


def _with_collectives(annotated: Source, program: Program, shardings: Shardings | None) -> Source:
    if shardings is None:
        return annotated
    return with_collectives(annotated, shardings, frames_now(program.roots))


def _with_residuals(
    annotated: Source, program: Program, residuals: bool | None, argnums: int | Sequence[int]
) -> Source:
    is_loss = gives_one_float(program) and any(map(_is_float, program.in_avals))
    if residuals or (residuals is None and is_loss and not annotated.has_backward):
        try:
            program, numbers, names = differentiated(program, argnums)
            gradient = Vjp(argnums=numbers)(program)
        except JaxprToolError as fault:
            if residuals:
                raise
            return replace(annotated, why_not_kept=fault.message)
        kept = found_residuals(gradient["forward"], gradient["backward"], {})
        annotated = with_residuals(annotated, kept, names)
    return annotated


def differentiated(
    program: Program, argnums: int | Sequence[int]
) -> tuple[Program, tuple[int, ...], tuple[str, ...]]:
    """Return a program with the user's arguments, and which are differentiated, with their names.

    Args:
        program: The program. That of a function of a library, such as `eqx.filter_jit`, takes the
            user's arguments in one; they are told apart by their names.
        argnums: The positions of the user's arguments.

    Raises:
        ArgumentsError: If there is no argument at a position, or it has no floating-point array.
    """
    program = _with_own_arguments(program)
    numbers = chosen_argnums(program, "residuals", argnums)
    roots, groups = positional_roots(program), positional(program)
    names = [root or f"argument {number}" for number, root in enumerate(roots)]
    moving = [any(_is_inexact(program.in_avals[i]) for i in group) for group in groups]
    for number in numbers:
        if not moving[number]:
            types = [type_of(program.in_avals[i]) for i in groups[number]]
            what = f"is {types[0]}" if len(types) == 1 else "has no floating-point array"
            floats = ", ".join(f"{i} ({names[i]})" for i, flag in enumerate(moving) if flag)
            raise ArgumentsError(
                f"{program.name} has no gradient with respect to argument {number}: "
                f"{names[number]} {what}",
                f"--argnums takes the position of another: {floats}" if floats else None,
            )
    return program, numbers, tuple(names[number] for number in numbers)


def _with_own_arguments(program: Program) -> Program:
    """Return a program with one positional argument for each of the user's.

    The program changes only if one of its arguments holds several, and they are in order.
    """
    groups = positional(program)
    roots = [root_of(name) for name in program.arg_names]
    if all(len({roots[i] for i in group}) <= 1 for group in groups):
        return program
    flat = [i for group in groups for i in group]
    runs = [list(run) for _, run in groupby(flat, lambda i: roots[i])]
    if len(runs) > len({roots[i] for i in flat}):
        return program
    _, keywords = filled(program.in_tree, range(len(program.arg_names)))
    return program.replace(in_tree=structure((tuple(runs), keywords)))


def _is_inexact(aval: Aval) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", None), jnp.inexact)


def gives_one_float(program: Program) -> bool:
    """Return True if a program returns a single floating-point number, such as a loss."""
    results = program.out_avals
    return len(results) == 1 and getattr(results[0], "shape", None) == () and _is_float(results[0])


def _is_float(aval: Aval) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", None), jnp.floating)
