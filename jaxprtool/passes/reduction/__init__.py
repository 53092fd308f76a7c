"""The steps of delta debugging: ways to make a program smaller.

A `ReductionStep` lists the sites of a program where it applies, and builds a candidate by
simplifying some of them. The search (`api.investigate.reduction`) keeps a candidate if the check
still holds; it tries many sites at once first, and single ones at the end. Candidates are well
typed, but need not compute the same as the program.
"""

from __future__ import annotations

from jaxprtool.passes.reduction.candidates import (
    Candidate,
    ReductionStep,
    checked,
    flattened,
    simpler,
)
from jaxprtool.passes.reduction.inside import CALLS, INSIDE
from jaxprtool.passes.reduction.parts import PARTS
from jaxprtool.passes.reduction.types import TYPES

__all__ = ["STEPS", "Candidate", "ReductionStep", "checked", "flattened", "simpler"]

#: All steps, in the order in which they are tried. Calls are inlined first, because only equations
#: of the top level can be cut; then come the steps that remove most.
STEPS: tuple[ReductionStep, ...] = (*CALLS, *PARTS, *INSIDE, *TYPES)
