"""What scans cost in memory: arrays that are stacked for them, and those that they stack."""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool.ir.core.equations import all_jaxprs, size_of
from jaxprtool.ir.core.structured import Scan
from jaxprtool.ir.programs.border import top_jaxpr
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Jaxpr, Literal, Var


@dataclass(frozen=True)
class Stacking:
    """What all scans of a program need besides what they compute with, those of a body once.

    Attributes:
        scans: How many scans there are.
        copied: The bytes of the arrays that are stacked of others, to be gone over by a scan.
        results: The bytes of the arrays that scans stack of what each round gives.
    """

    scans: int
    copied: int
    results: int


def stacking(program: Program) -> Stacking:
    """Return what the scans of a program stack; sizes that are symbolic count as nothing."""
    top = top_jaxpr(program)
    scans: list[Scan] = []
    stacks: set[Var] = set()
    for body in all_jaxprs(top):
        stacks |= _stacks(body)
        scans += [Scan.of(eqn) for eqn in body.eqns if eqn.primitive.name == "scan"]
    gone_over = {x for scan in scans for x in scan.xs if type(x) is not Literal}
    return Stacking(
        len(scans),
        sum(size_of(array.aval, 0) for array in stacks & gone_over),
        sum(size_of(array.aval, 0) for scan in scans for array in scan.ys),
    )


def _stacks(body: Jaxpr) -> set[Var]:
    """Return the arrays that a body makes of others, one after the other."""
    return {
        eqn.outvars[0]
        for eqn in body.eqns
        if eqn.primitive.name == "stack"
        or (eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0)
    }
