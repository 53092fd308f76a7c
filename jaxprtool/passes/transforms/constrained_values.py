"""Add sharding constraints to values, as `with_sharding_constraint` in the source would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var


def constrain_values(
    program: Program, shardings: Mapping[Var, jax.sharding.NamedSharding | None]
) -> Program:
    """Return a program in which variables, at any depth, have these shardings.

    A variable that is the result of a constraint gets another constraint in its place.

    Args:
        program: The program.
        shardings: The shardings of results of its equations; None removes a constraint.
    """

    def visitor(writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            wanted = [v for v in eqn.outvars if v in shardings]
            if not wanted:
                return None
            is_constraint = eqn.primitive.name == "sharding_constraint"
            outs = list(eqn.invars) if is_constraint else writer.add(eqn)
            by_old = dict(zip(eqn.outvars, outs, strict=True))
            wanted = [v for v in wanted if shardings[v] is not None]
            if not wanted:
                return outs
            placed = [shardings[v] for v in wanted]
            new = writer.trace(
                lambda *values: list(map(jax.lax.with_sharding_constraint, values, placed)),
                [by_old[v] for v in wanted],
                eqn,
            )
            by_old |= dict(zip(wanted, new, strict=True))
            return [by_old[v] for v in eqn.outvars]

        return rule

    return program.replace(jaxpr=rewrite(program.jaxpr, visitor))
