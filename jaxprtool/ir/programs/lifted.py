"""Programs that take the traced values that their function closes over as their last argument."""

from __future__ import annotations

from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled, structure
from jaxprtool.jaxcompat import ClosedJaxpr

#: The keyword argument for these values, so that positions keep their meaning for the user. It
#: sorts after all others.
CLOSED_OVER = "\U0010ffff closed over"


def with_lifted(program: Program, jaxpr: ClosedJaxpr, count: int) -> Program:
    """Return a program with a jaxpr that takes `count` more values, after its arguments."""
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    in_tree = structure((args, {**kwargs, CLOSED_OVER: [0] * count}))
    names = (*program.arg_names, *(f"closed_over[{i}]" for i in range(count)))
    return program.replace(jaxpr=jaxpr, in_tree=in_tree, arg_names=unique(names))
