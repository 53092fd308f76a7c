"""Name values of a program, as `checkpoint_name` in its source would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.ad_checkpoint import checkpoint_name

from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var


def name_values(program: Program, names: Mapping[Var, str]) -> Program:
    """Return a program in which variables, at any depth, are passed through `checkpoint_name`."""

    def visitor(writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if not any(v in names for v in eqn.outvars):
                return None
            outs = writer.add(eqn)
            new = [v for v in outs if v in names]
            given = [names[v] for v in new]
            named = writer.trace(
                lambda *values: list(map(checkpoint_name, values, given)), new, eqn
            )
            by_old = dict(zip(new, named, strict=True))
            return [by_old.get(v, v) for v in outs]

        return rule

    return program.replace(jaxpr=rewrite(program.jaxpr, visitor))
