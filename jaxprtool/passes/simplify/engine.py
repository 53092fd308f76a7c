"""The engine of `simplify`: rows looked up by primitive, tried on each equation until none applies.

A body is walked once, from the front. What an equation is simplified to depends on the equations
before it alone, and those are final, so that one walk reaches the fixed point.

It ends: a row puts one atom, or one equation, in the place of one equation. Rows whose pattern
reaches through an operand to the equation behind it leave an equation that reads older values;
those that look at one equation alone make another primitive, or constant, of it that no row turns
back. Rows of a plug-in that turn an equation in circles are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from jaxprtool.errors import PluginError
from jaxprtool.ir.outline import named
from jaxprtool.ir.writer import Rule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal
from jaxprtool.passes.simplify.pattern import Call, Match, Name
from jaxprtool.passes.simplify.row import Outcome, Row

#: No equation is rewritten as often by rows that do not undo each other.
MOST_STEPS = 100

#: The rows of a primitive by what one of the operands must be: the name of the primitive that
#: defines it, `_CONSTANT`, or None where that is left open.
_Table = dict[str, dict[str | None, list[Row]]]
_CONSTANT = "a constant"


def simplified(jaxpr: Any, rows: Sequence[Row], *, fast: bool) -> Any:
    """`jaxpr` with the rows applied in it, at every depth; the same object if none applies.

    Raises PluginError if rows undo each other for ever.
    """
    table = _table_of(tuple(row for row in rows if fast or row.exact is not False))
    return rewrite(jaxpr, partial(_visitor, table, fast))


@lru_cache(maxsize=8)
def _table_of(rows: tuple[Row, ...]) -> _Table:
    table: _Table = {}
    for row in rows:
        for primitive in row.tree.primitives:
            of_primitive = table.setdefault(primitive, {})
            for head in _heads(row.tree):
                of_primitive.setdefault(head, []).append(row)
    return table


def _heads(tree: Call) -> Sequence[str | None]:
    """What one of the operands is, wherever the pattern fits."""
    for node in tree.operands:
        if isinstance(node, Call):
            return sorted(node.primitives)
        if not isinstance(node, Name) or node.is_constant:
            return [_CONSTANT]
    return [None]


def _visitor(table: _Table, fast: bool, writer: Writer) -> Rule:
    definition, constants = writer.definition, writer.constant_values

    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        of_primitive = table.get(eqn.primitive.name)
        if of_primitive is None or eqn.effects:
            return None
        new, steps = eqn, 0
        while of_primitive is not None:
            outcome = None
            for head in _operand_heads(new):
                for row in of_primitive.get(head, ()):
                    outcome = _apply(row, new, writer, fast)
                    if outcome is not None:
                        break
                if outcome is not None:
                    break
            if outcome is None:
                break
            if not isinstance(outcome, JaxprEqn):
                return [outcome]
            steps += 1
            if steps > MOST_STEPS:
                raise PluginError(f"simplify: '{row.name}' never ends on {named(eqn)}")
            new = outcome
            of_primitive = table.get(new.primitive.name)
        return None if new is eqn else writer.add(new)

    def _operand_heads(eqn: JaxprEqn) -> list[str | None]:
        heads: list[str | None] = [None]
        for atom in eqn.invars:
            if type(atom) is Literal or atom in constants:
                head = _CONSTANT
            elif atom in definition:
                head = definition[atom].primitive.name
            else:
                continue
            if head not in heads:
                heads.append(head)
        return heads

    return rule


def _apply(row: Row, eqn: JaxprEqn, writer: Writer, fast: bool) -> Outcome:
    match = Match(writer)
    if not match.matches(row.tree, eqn):
        return None
    outcome = row.outcome(match, fast)
    if outcome is None:
        return None
    if isinstance(outcome, JaxprEqn):
        return outcome if _is_plain(eqn) and _is_plain(outcome) else None
    was, now = eqn.outvars[0].aval, outcome.aval
    same = was == now or was.strip_weak_type() == now.strip_weak_type()
    return outcome if same else None


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether no type has a sharding: what a new equation makes of that is for JAX to say."""
    avals = (v.aval for v in (*eqn.invars, *eqn.outvars))
    return not any(any(getattr(getattr(a, "sharding", None), "spec", ())) for a in avals)
