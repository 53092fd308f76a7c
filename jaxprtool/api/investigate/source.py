"""`source`: the cost of each source line, the bytes it keeps for a backward pass, and its time.

found = jaxprtool.source(program)
found.files[0].lines[0].total.work.flops
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxprtool.analysis.profile import Profile, profile_of
from jaxprtool.analysis.residuals import passed_residuals as found_residuals
from jaxprtool.analysis.shardings import Shardings
from jaxprtool.analysis.source_lines import (
    Source,
    called_package,
    source_lines,
    with_collectives,
    with_line_times,
    with_residuals,
)
from jaxprtool.api.investigate.residuals import differentiated, gives_one_float, is_float_aval
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.frames import current_frame_view, frames, frames_now
from jaxprtool.ir.program import Program
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
        annotated = annotated if profile is None else with_line_times(annotated, profile)
        return _with_collectives(annotated, program, shardings)
    with frames(current_frame_view().choice, package):
        annotated = replace(source_lines(program), package=package)
        annotated = _with_residuals(annotated, program, residuals, argnums)
        if profile is not None and profile.trace is not None:
            lines = profile_of(profile.trace, profile.name, frames_now(program.roots)).lines
            annotated = with_line_times(annotated, replace(profile, lines=lines))
        return _with_collectives(annotated, program, shardings)


def _with_collectives(annotated: Source, program: Program, shardings: Shardings | None) -> Source:
    if shardings is None:
        return annotated
    return with_collectives(annotated, shardings, frames_now(program.roots))


def _with_residuals(
    annotated: Source, program: Program, residuals: bool | None, argnums: int | Sequence[int]
) -> Source:
    is_loss = gives_one_float(program) and any(map(is_float_aval, program.in_avals))
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
