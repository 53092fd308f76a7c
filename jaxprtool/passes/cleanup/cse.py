"""Common-subexpression elimination: merge equal equations, and equal constants, in each body.

Equations are equal by structure: the same primitive on the same operands (in either order if that
changes no bit), with equal parameters and contexts. Bodies are equal up to the names of their
variables, arrays by content, numbers to the bit, functions only if they are identical; see
`ir.equivalence`. Custom derivatives are equal if their rules are the same functions.

These are never merged: equations with effects, including reads of a ref, at any depth; `sow`, and
equations that hold one; `optimization_barrier`, remat and `copy`, whose purpose is to keep
computations apart; and equations whose results may differ from call to call (`Traits.may_merge`).
Equations in different bodies are not merged either, so values that a remat recomputes are still
recomputed. Collectives are merged, since their only effect is to name an axis.

Bodies that are equal but distinct objects become one object, which JAX then lowers once. Their
equations all have the source locations of the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import is_flat
from jaxprtool.ir.equivalence import Unkeyable, jaxpr_structure, parameters_key, value_key
from jaxprtool.ir.keys import literal_key
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite, with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass


@dataclass(frozen=True)
class Cse(Pass):
    """Merge equal equations, constants and bodies, at every depth.

    Two equations are equal if they apply the same primitive with equal parameters to the same
    operands. The operands may be in either order if the order does not affect any bit of the
    result. Equal bodies become one body, which is compiled once.

    Note:
        Equations that are kept apart on purpose are not merged: equations with effects, sown
        values, random draws that may differ, `optimization_barrier`, `copy`, and the recomputation
        of `jax.checkpoint`.

    Example:
        def f(x):
            return jnp.sin(x) * jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p cse
        { lambda ; a:f32[3]. let b:f32[3] = sin a; c:f32[3] = mul b b in (c,) }
    """

    name: ClassVar[str] = "cse"
    group: ClassVar[str] = "clean up"

    def __call__(self, program: Program) -> Program:
        jaxpr = cse_body(program.jaxpr)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program


def cse_body(body: ClosedJaxpr) -> ClosedJaxpr:
    """Merge equal equations and constants of a closed jaxpr, at every depth."""
    return jaxcompat.close_jaxpr(rewrite(body, _Merger().visit))


class _Merger:
    """The state of one run of the pass, which shares equal bodies across the program."""

    def __init__(self) -> None:
        self._bodies: dict[Hashable, AnyJaxpr] = {}

    def visit(self, writer: Writer) -> RewriteRule:
        _share_constants(writer)
        eqns, is_nested = writer.eqns, not is_flat(jaxcompat.open_jaxpr(writer.body))
        # The first equation on some operands, by position, and the first with the same operation.
        # Most equations are the only ones on their operands, and need no key of parameters.
        first: dict[Hashable, int] = {}
        alike: dict[Hashable, int] = {}

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            like = traits(eqn)
            if like.may_merge and not (eqn.effects and not jaxcompat.only_names_axes(eqn.effects)):
                operands: list[Hashable] = [
                    literal_key(v) if type(v) is Literal else v for v in eqn.invars
                ]
                if like.commutative_bits and like.commutes(
                    eqn.invars[0].aval.dtype, to_the_bit=True
                ):
                    operands = [frozenset(operands)]
                key = eqn.primitive, *operands
                index = first.setdefault(key, len(eqns))
                if index < len(eqns) and (operation := _operation(eqn)) is not None:
                    alike.setdefault((key, _operation(eqns[index])), index)
                    index = alike.setdefault((key, operation), len(eqns))
                    if index < len(eqns):
                        return _results(writer, index)
            if is_nested and eqn.params:
                shared = with_bodies(eqn, self._shared)
                return None if shared is eqn else writer.add(shared)
            return None

        return rule

    def _shared(self, body: AnyJaxpr) -> AnyJaxpr:
        """Return the first body that is equal to this one."""
        try:
            return self._bodies.setdefault((jaxpr_structure(body), type(body)), body)
        except Unkeyable:
            return body


def _operation(eqn: JaxprEqn) -> Hashable:
    """Return a key for an equation's operation; None if it must not be merged."""
    try:
        key, bodies = parameters_key(eqn)
    except Unkeyable:
        return None
    return (key, eqn.ctx) if all(body.repeatable for body in bodies) else None


def _results(writer: Writer, index: int) -> Sequence[Var]:
    """Return the results of a written equation, and turn its DropVars into variables."""
    eqn = writer.eqns[index]
    if any(type(v) is DropVar for v in eqn.outvars):
        outs = [Var(v.aval) if type(v) is DropVar else v for v in eqn.outvars]
        writer.eqns[index] = eqn = eqn.replace(outvars=outs)
        writer.definition.update(dict.fromkeys(outs, eqn))
    return eqn.outvars


def _share_constants(writer: Writer) -> None:
    """Replace equal constants of a body by the first. Only those of equal type are compared."""
    if len(writer.consts) != len(writer.constvars):
        return  # the body's primitive passes the constants in its own way
    by_type: dict[Aval, list[int]] = {}
    for i, var in enumerate(writer.constvars):
        by_type.setdefault(var.aval, []).append(i)
    removed: set[int] = set()
    for same_type in by_type.values():
        first: dict[Hashable, Var] = {}
        for i in same_type if len(same_type) > 1 else ():
            var = writer.constvars[i]
            kept = first.setdefault(_constant_key(writer.consts[i]), var)
            if kept is not var:
                writer.env[var] = kept
                del writer.constant_values[var]
                removed.add(i)
    if removed:
        for items in writer.constvars, writer.consts:
            items[:] = [item for i, item in enumerate(items) if i not in removed]


def _constant_key(value: object) -> Hashable:
    try:
        return value_key(value)
    except Unkeyable:
        return "itself", id(value)
