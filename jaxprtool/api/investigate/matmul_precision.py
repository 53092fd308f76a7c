"""Set the precision of matrix products and convolutions that have none."""

from __future__ import annotations

from typing import Any

import jax

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import map_equations
from jaxprtool.jaxcompat import JaxprEqn

#: The valid precisions, as in `jax.default_matmul_precision`.
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


def with_precision(program: Program, name: str) -> Program:
    """Return a program in which products and convolutions without a precision have this one.

    The result is that of tracing under `jax.default_matmul_precision(name)`. Raises ArgumentsError
    for a name that is not in `PRECISIONS`.
    """
    if name not in PRECISIONS:
        raise ArgumentsError(
            f"unknown precision '{name}'",
            did_you_mean(name, PRECISIONS) or f"available: {', '.join(PRECISIONS)}",
        )
    precision: Any = jax.lax.Precision(name)

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if eqn.params.get("precision", eqn) is not None:
            return None
        return [eqn.replace(params={**eqn.params, "precision": (precision, precision)})]

    return program.replace(jaxpr=map_equations(program.jaxpr, rule))
