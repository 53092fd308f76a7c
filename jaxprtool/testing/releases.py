"""Compare programs of one function that different JAX releases traced.

Releases trace a function to different equations. So both programs are simplified, and newer
primitives are replaced by older ones. If the programs still differ, for example in the formula of a
derivative, they are run on the same random inputs, unless that is expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.analysis.diff import Diff, diff
from jaxprtool.api.investigate.budgets import Quantity, measure
from jaxprtool.errors import JaxprToolError
from jaxprtool.execute.verify import random_runs
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.high import LIVE, without_live_objects
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, map_equations, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.framework.pipeline import Pipeline

_SIMPLER = "-O1"

#: The maximum cost of a program that a test may run.
_LIMITS: dict[Quantity, float] = {"flops": 1e10, "peak_bytes": 1 << 30}


def simplified_diff(before: Program, after: Program) -> Diff:
    """Return the differences of two programs, except those that the JAX release explains."""
    simpler = Pipeline.parse(_SIMPLER)
    programs = (simpler(_in_older_primitives(each)) for each in (before, after))
    return diff(*(each for each in programs if isinstance(each, Program)))


def _in_older_primitives(program: Program) -> Program:
    """Return a program without primitives that older releases lack or trace to others."""

    def lowered(eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        if eqn.primitive.name not in LIVE:
            return None
        try:
            return [without_live_objects(eqn)]
        except JaxprToolError:  # without an older form it is compared as it is
            return None

    jaxpr = map_equations(program.jaxpr, lowered)
    return program.replace(jaxpr=rewrite(jaxpr, _without_unstack))


def _without_unstack(writer: Writer) -> RewriteRule:
    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        if eqn.primitive.name != "unstack":
            return None
        return writer.trace(_rows(eqn.params["axis"]), eqn.invars, eqn)

    return rule


def _rows(axis: int) -> Callable[..., list[object]]:
    """Return a function that slices an array along an axis, as indexing by a number does."""

    def rows(array: jaxcompat.Aval) -> list[object]:
        parts = (lax.slice_in_dim(array, i, i + 1, axis=axis) for i in range(array.shape[axis]))
        return [lax.squeeze(part, (axis,)) for part in parts]

    return rows


def same_results(before: Program, after: Program) -> bool:
    """Run two programs, if they are small, and return True if their finite results are the same."""
    try:
        for program in (before, after):
            found = measure(program, _LIMITS)
            if any(found[quantity].amount > most for quantity, most in _LIMITS.items()):
                return False
        return not random_runs(before, {}).compare(after).unproven()
    except JaxprToolError:  # they differ, or cannot be run here: then their differences are shown
        return False
