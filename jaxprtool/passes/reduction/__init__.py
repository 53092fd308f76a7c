"""Steps by which a program is made smaller while something of it is kept: delta debugging.

Each `Step` finds in a program the sites where it can make it simpler, and makes a candidate from a
choice of them. The caller keeps a candidate if it is still interesting (`api.reduction`): first
with many sites at once, in the end with each alone. Candidates are well typed, and need not compute
what the program does.
"""

from __future__ import annotations

from jaxprtool.passes.reduction.candidates import Candidate, Step, checked, flattened, simpler
from jaxprtool.passes.reduction.inside import CALLS, INSIDE
from jaxprtool.passes.reduction.parts import PARTS
from jaxprtool.passes.reduction.types import TYPES

__all__ = ["STEPS", "Candidate", "Step", "checked", "flattened", "simpler"]

#: All steps. Calls come first, since equations are cut where none is around them, and then the
#: steps that remove most.
STEPS: tuple[Step, ...] = (*CALLS, *PARTS, *INSIDE, *TYPES)
