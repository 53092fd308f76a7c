"""Programs as layers: an output of a layer with the type of an input is the next layer's input."""

from __future__ import annotations

from typing import Any

import jax

from jaxprtool import jaxcompat
from tests.programs.case import Case

#: The number of layers.
LAYERS = 3


def in_layers(case: Any) -> Case | None:
    """Return a case of layers, each a call of a case's function. None if no type matches.

    Each layer has its own arguments for the inputs that the previous one does not provide.
    """
    with case.setting():
        program, args = case.program(), case.arguments()
    types = [v.aval.strip_weak_type() for v in program.jaxpr.invars]
    given = [v.aval.strip_weak_type() for v in program.jaxpr.outvars]
    pairs = [(i, given.index(t)) for i, t in enumerate(types) if t in given]
    if not pairs or program.jaxpr.effects:
        return None
    position, result = pairs[0]
    layer = jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr))

    def layers(first: Any, others: list[list[Any]]) -> tuple[Any, list[Any]]:
        carried, kept = first, []
        for own in others:
            outs = list(layer(*own[:position], carried, *own[position:]))
            carried = outs.pop(result)
            kept.append(outs)
        return carried, kept

    own = [*args[:position], *args[position + 1 :]]
    x64 = getattr(case, "x64", False)
    return Case(f"layers of {case.name}", layers, (args[position], [own] * LAYERS), x64=x64)
