"""The engine of `simplify`: rows looked up by primitive, tried on each equation until none applies.

A body is traversed once, from the front. The simplified form of an equation depends only on the
equations before it, and those are final, so that one traversal reaches the fixed point.

It terminates: a row replaces one equation by one atom, or by one equation; a row that writes two
removes two or more. Rows whose pattern includes the definition of an operand return an equation
that reads earlier values; those that match one equation alone change it to another primitive, or
constant, that no row changes back. Rows of a plug-in that undo each other are reported, and so are
rows that change the type of an equation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache, partial

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import PluginError
from jaxprtool.ir.core.equations import named, type_of
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, JaxprEqn, Literal
from jaxprtool.passes.cleanup.simplify.pattern import (
    NumberPattern,
    OperationPattern,
    RowMatch,
    Uses,
    rank,
    scalar_value,
)
from jaxprtool.passes.cleanup.simplify.row import NEVER_INEXACT, Outcome, Row, is_inexact

#: Rows that do not undo each other never rewrite an equation this often.
MOST_STEPS = 100

#: The requirement on one of the operands: the name of the primitive that defines it, the value of a
#: constant, or `_CONSTANT` for any constant; None if there is no requirement.
_Head = str | float | None
#: The rows of a primitive by their requirement on an operand.
_Rows = dict[_Head, list[Row]]
#: The rows of each primitive: all, and those for floating-point and complex numbers.
_Table = dict[str, tuple[_Rows, _Rows]]
_CONSTANT = "a constant"


class ResultTypes:
    """The result types of equations, inferred once per run for equal signatures."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Aval] = {}

    def __call__(self, eqn: JaxprEqn) -> Aval:
        operands = (v.aval for v in eqn.invars)
        key = (eqn.primitive, eqn.ctx, *operands, *eqn.params.items())
        try:
            return self._known[key]
        except KeyError:
            self._known[key] = found = self._inferred(eqn)
            return found
        except TypeError:  # a parameter that is not hashable
            return self._inferred(eqn)

    def _inferred(self, eqn: JaxprEqn) -> Aval:
        with eqn.ctx.manager:
            (aval,), _ = jaxcompat.inferred_types(eqn.primitive, eqn.params, eqn.invars)
        return aval


def simplified(jaxpr: AnyJaxpr, rows: Sequence[Row], *, fast: bool) -> AnyJaxpr:
    """Apply rows to a jaxpr at every depth; return the same object if none applies.

    Raises PluginError if rows undo each other endlessly.
    """
    return rewrite(jaxpr, partial(_visitor, _table_of(tuple(rows), fast), fast, ResultTypes()))


def _may_be_inexact(row: Row, fast: bool) -> bool:
    """Return True if a rule may apply to floating-point and complex numbers."""
    asked = row.when if fast else (*row.when, row.exact)
    return NEVER_INEXACT.isdisjoint(asked)


@lru_cache(maxsize=16)
def _table_of(rows: tuple[Row, ...], fast: bool) -> _Table:
    table: _Table = {}
    for row in (row for row in rows if fast or row.exact is not False):
        for primitive in row.tree.primitives:
            of_all, of_inexact = table.setdefault(primitive, ({}, {}))
            for head in _heads(row.tree):
                of_all.setdefault(head, []).append(row)
                if _may_be_inexact(row, fast):
                    of_inexact.setdefault(head, []).append(row)
    return table


def _heads(tree: OperationPattern) -> Sequence[_Head]:
    """Return the requirement of the pattern that the fewest operands meet."""
    # Equations and numbers are rarer than constants.
    for node in sorted(tree.operands, key=lambda node: rank(node) % 2):
        if isinstance(node, OperationPattern):
            return sorted(node.primitives)
        if rank(node) < 2:
            is_number = isinstance(node, NumberPattern) and node.text != "~0"
            return [float(node.text) if is_number else _CONSTANT]
    return [None]


def _visitor(table: _Table, fast: bool, types: ResultTypes, writer: Writer) -> RewriteRule:
    definition, constants = writer.definition, writer.constant_values
    uses = Uses(writer)

    def rows_of(eqn: JaxprEqn) -> _Rows | None:
        rows = table.get(eqn.primitive.name)
        return None if rows is None else rows[is_inexact(eqn)]

    def step(eqn: JaxprEqn, rows: _Rows) -> Outcome:
        """Return the outcome of the first rule that applies to an equation."""
        for row in rows.get(None, ()):
            if (outcome := _apply(row, eqn, writer, uses, types, fast)) is not None:
                return outcome
        for atom in eqn.invars:
            if type(atom) is Literal or atom in constants:
                heads = _constant_heads(atom, writer)
            elif (behind := definition.get(atom)) is not None:
                heads = (behind.primitive.name,)
            else:
                continue
            for head in heads:
                for row in rows.get(head, ()):
                    if (outcome := _apply(row, eqn, writer, uses, types, fast)) is not None:
                        return outcome
        return None

    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        rows = rows_of(eqn)
        if rows is None or eqn.effects:
            return None
        new, steps = eqn, 0
        while rows is not None:
            written = len(writer.eqns)
            if (outcome := step(new, rows)) is None:
                break
            if not isinstance(outcome, JaxprEqn):
                uses.rename(new, outcome)
                return [outcome]
            uses.replace(new, [*writer.eqns[written:], outcome])
            new, steps = outcome, steps + 1
            if steps > MOST_STEPS:
                raise PluginError(f"simplify: rules undo each other endlessly on {named(eqn)}")
            rows = rows_of(new)
        return None if new is eqn else writer.add(new)

    return rule


def _constant_heads(atom: Atom, writer: Writer) -> Sequence[_Head]:
    value = writer.value(atom)
    if isinstance(value, float | int):
        return _CONSTANT, float(value)
    value = scalar_value(atom, writer)
    if value is None or value.dtype == jax.dtypes.float0:
        return ()
    return _CONSTANT, float(value.real if value.dtype.kind == "c" else value)


def _apply(
    row: Row, eqn: JaxprEqn, writer: Writer, uses: Uses, types: ResultTypes, fast: bool
) -> Outcome:
    match = RowMatch(writer, uses)
    if not row.matches(match, eqn) or _may_strengthen(eqn):
        return None
    if row.once and not all(map(_is_plain, match.eqns)):
        return None
    num_eqns, num_consts = len(writer.eqns), len(writer.constvars)
    outcome = row.outcome(match, fast)
    if isinstance(outcome, JaxprEqn):
        plain = _is_plain(eqn) and _is_plain(outcome)
        accepted = plain and _keeps_type(row, outcome, types(outcome))
    else:
        accepted = outcome is not None and writer.may_replace(eqn.outvars[0], outcome, num_eqns)
    if accepted:
        return outcome
    writer.rollback(num_eqns, num_consts)
    return None


def _may_strengthen(eqn: JaxprEqn) -> bool:
    """Return True for a weakly typed array of inexact numbers.

    Its gradient by JAX's transposes of `pad`, `slice` and others is strongly typed.
    """
    aval = eqn.outvars[0].aval
    return bool(aval.shape and aval.weak_type and is_inexact(eqn))


def _keeps_type(row: Row, eqn: JaxprEqn, computed: Aval) -> bool:
    """Return True if an equation computes the weak type that it is annotated with.

    Raises PluginError if it has another shape or dtype, which is an error of the row.
    """
    aval = eqn.outvars[0].aval
    if computed.shape != aval.shape or computed.dtype != aval.dtype:
        found, wanted = (type_of(each, weak=True) for each in (computed, aval))
        raise PluginError(
            f"simplify: the rule {row.name} changes {wanted} to {found}, with {named(eqn)}"
        )
    return bool(computed.weak_type == aval.weak_type)


def _is_plain(eqn: JaxprEqn) -> bool:
    """Return True if no type has a sharding: only JAX can infer that of a new equation."""
    avals = (v.aval for v in (*eqn.invars, *eqn.outvars))
    return not any(any(getattr(getattr(a, "sharding", None), "spec", ())) for a in avals)
