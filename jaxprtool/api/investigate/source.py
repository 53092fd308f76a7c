"""`source`: the cost of each source line, the bytes it keeps for a backward pass, and its time.

found = jaxprtool.source(program)
found.files[0].lines[0].total.work.flops
"""

from __future__ import annotations

from dataclasses import replace

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
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frame_choice import current_frame_view, frames
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes.transforms.linear import Vjp


def source(
    program: Program,
    *,
    residuals: bool | None = None,
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
        profile: A profile of the program, `jaxprtool.profile(program)`, whose times are added.
        shardings: The shardings of the program, `jaxprtool.shardings(program)`, whose bytes sent by
            each device are added.

    Raises:
        UnsupportedError: If residuals are counted and `vjp` raises it.
    """
    found = source_lines(program)
    package = "" if found.files else called_package(program)
    if not package:
        found = _with_residuals(found, program, residuals)
        found = found if profile is None else with_times(found, profile)
        return _with_collectives(found, program, shardings)
    with frames(current_frame_view().choice, package):
        found = replace(source_lines(program), package=package)
        found = _with_residuals(found, program, residuals)
        if profile is not None and profile.trace is not None:
            lines = profile_of(profile.trace, profile.name, frames_now(program.roots)).lines
            found = with_times(found, replace(profile, lines=lines))
        return _with_collectives(found, program, shardings)


def _with_collectives(found: Source, program: Program, shardings: Shardings | None) -> Source:
    if shardings is None:
        return found
    return with_collectives(found, shardings, frames_now(program.roots))


def _with_residuals(found: Source, program: Program, residuals: bool | None) -> Source:
    is_loss = gives_one_float(program) and any(map(_is_float, program.in_avals))
    if residuals or (residuals is None and is_loss and not found.has_backward):
        try:
            differentiated = Vjp()(program)
        except JaxprToolError as fault:
            if residuals:
                raise
            return replace(found, why_not_kept=fault.message)
        kept = found_residuals(differentiated["forward"], differentiated["backward"], {})
        found = with_residuals(found, kept)
    return found


def gives_one_float(program: Program) -> bool:
    """Return True if a program returns a single floating-point number, such as a loss."""
    results = program.out_avals
    return len(results) == 1 and getattr(results[0], "shape", None) == () and _is_float(results[0])


def _is_float(aval: Aval) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", None), jnp.floating)
