"""Programs whose bodies take extra arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled, structure
from jaxprtool.ir.shapes.bounds import Bound
from jaxprtool.jaxcompat import ClosedJaxpr
from jaxprtool.passes.framework.retrace import with_names


def with_arguments(
    program: Program, body: ClosedJaxpr, bounds: Mapping[str, Bound], **changes: Any
) -> Program:
    """Return a program that takes new arguments after its positional ones.

    Args:
        program: The program without them.
        body: The jaxpr of the new program. It takes the new arguments last.
        bounds: The bound of each new argument, by its name.
        changes: Other fields of the program to change.
    """
    own, new = body.invars[: -len(bounds)], body.invars[-len(bounds) :]
    args, kwargs = filled(program.in_tree, range(len(own)))
    count = len(jax.tree.leaves(args))
    names = unique([*program.arg_names[:count], *bounds, *program.arg_names[count:]])
    jaxpr = jaxcompat.replace_jaxpr(body, invars=[*own[:count], *new, *own[count:]])
    out_names = changes.get("out_names", program.out_names)
    return program.replace(
        jaxpr=with_names(jaxpr, program.name, names, out_names),
        in_tree=structure(((*args, *bounds), kwargs)),
        arg_names=names,
        bounds=(*program.bounds, *zip(names[count:], bounds.values(), strict=False)),
        **changes,
    )
