"""The memory cost of scans: arrays that are stacked for them, and those that they stack."""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool.ir.core.equations import all_jaxprs, size_of
from jaxprtool.ir.core.structured import Scan
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.jaxcompat import Jaxpr, Literal, Var


@dataclass(frozen=True)
class Stacking:
    """The additional memory of all scans of a program; scans of a shared body count once.

    Attributes:
        scans: The number of scans.
        copied: The bytes of the arrays that are stacked from others as inputs of a scan.
        results: The bytes of the results that scans stack.
    """

    scans: int
    copied: int
    results: int


def stacking(program: Program) -> Stacking:
    """Return the additional memory of the scans of a program; symbolic sizes count as 0."""
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
    """Return the arrays that a body stacks or concatenates along the first axis."""
    return {
        eqn.outvars[0]
        for eqn in body.eqns
        if eqn.primitive.name == "stack"
        or (eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0)
    }
