"""Whether an expression says exactly what an equation does: it is traced, and must give it.

So no rule has to know when an operator promotes, when a function adds a conversion, or what
another JAX makes of it: rules propose, the trial decides.
"""

from __future__ import annotations

from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import Expression, Structure, computed
from jaxprtool.formats.python.values import literal
from jaxprtool.ir.equivalence import equivalent
from jaxprtool.jaxcompat import JaxprEqn, Literal


def gives(expression: Expression, eqn: JaxprEqn, typed: bool) -> Any:
    """The structure of the expression's results in a list, if tracing it gives the equation alone.

    Its operands are the equation's; literals are given as plain numbers, or with their types if
    `typed`. False if it gives anything else, or raises.
    """
    structures: list[Structure] = []
    variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))

    def evaluate(*values: Any) -> list[Any]:
        known = dict(zip(variables, values, strict=True))
        slots = [_literal(v, typed) if isinstance(v, Literal) else known[v] for v in eqn.invars]
        result = expression.value(slots)
        if result is None:
            structures.append(None)
            return []
        several = isinstance(result, tuple | list)
        structures.append(tuple(range(len(result))) if several else 0)
        results = list(result) if several else [result]
        # Nobody may return a ref.
        return [r for r, v in zip(results, eqn.outvars, strict=True) if not _is_ref(v)]

    try:
        traced = jaxcompat.traced_like(eqn, evaluate, variables)
        outs = [] if structures[0] is None else [v for v in eqn.outvars if not _is_ref(v)]
        same = len(traced.outvars) == len(outs) and equivalent(
            jaxcompat.alone(eqn, variables, outs, traced), traced
        )
    except Exception:  # a proposal that does not fit fails in whatever way the function likes
        return False
    return same and structures


def _literal(atom: Literal, typed: bool) -> Any:
    spelling = literal(atom)
    return computed(spelling.typed if typed else spelling.plain, ())


def _is_ref(var: Any) -> bool:
    return isinstance(var.aval, jaxcompat.AbstractRef)
