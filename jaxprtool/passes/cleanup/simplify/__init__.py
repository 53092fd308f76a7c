"""Simplify: algebraic rules, as rows of data, applied at every depth until none applies.

A rule is a `SimplifyRule`: a pattern, its replacement, and conditions, all readable:

    Row("add(x, neg(y))", "sub(x, y)")

A lower-case letter matches any value, a capital letter any constant, a number the constant of that
value (`0` is not `-0`; `~0` has all bits set), and `*xs` all other operands. `unary` and
`elementwise2` are elementwise primitives with one and two operands, `resize` is a reshape or
squeeze, `layout` is a reshape, squeeze or broadcast. A rule that is exact only under a condition
requires `fast` if the condition does not hold.

An option of a primitive, such as `out_dtype` of `mul`, may change what it computes. A rule applies
to an equation with an option that is not at its default only if its pattern names the option:
`cumsum[reverse](x)`. This includes options that a later JAX adds, and parameters of a plug-in's
primitive that its trait `parameters` does not list.

`simplify_rules` is the open list of rows; a plug-in appends its own, also for its own primitives
(`row.py` defines rows, `pattern.py` the syntax of patterns). `jaxprtool explain simplify` prints
the list. By default only exact rules apply. They keep every bit of a result and of its derivatives
under IEEE arithmetic, including NaN, infinities and the sign of zero; a backend that flushes
subnormal numbers to zero may do so in fewer places. So `x * 0` stays, since x may be NaN, and so
does `x + 0`, since x may be -0.

Equations with a purpose besides their value stay: `copy`, `reduce_precision`,
`optimization_barrier`, and all that request a sharding of their result.

Based on tinygrad's symbolic rules (patterns as data) and XLA's algebraic simplifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxprtool.ir.program import Program
from jaxprtool.passes.cleanup.simplify import rules
from jaxprtool.passes.cleanup.simplify.engine import (
    Condition,
    RowMatch,
    SettledEquations,
    SimplifyRule,
    emit,
    equation,
    full,
    simplified,
)
from jaxprtool.passes.framework import Pass, notes_of_run

__all__ = [
    "Condition",
    "RowMatch",
    "Simplify",
    "SimplifyRule",
    "emit",
    "equation",
    "full",
    "simplify_rules",
]

_FAMILIES = {
    "element by element": rules.ELEMENTWISE,
    "shapes and types": rules.LAYOUT,
    "parts of arrays": rules.SLICING,
    "reductions and products": rules.REDUCTIONS,
    "both operands at once": rules.TOGETHER,
}

#: The open list: the first rule that applies to an equation is used.
simplify_rules: list[SimplifyRule] = [row for rows in _FAMILIES.values() for row in rows]


@dataclass(frozen=True)
class Simplify(Pass):
    """Apply algebraic rules until none applies; only exact rules unless `fast` is set.

    By default every bit of a result is preserved, including NaN, infinities and the sign of zero:
    `x * 0` is not replaced by 0, since x may be NaN, and `x + 0` is not replaced by x, since x may
    be -0. Plug-ins can add rules.

    Args:
        fast: Also apply rules that hold for real numbers but may change floating-point results.

    Note:
        Equations with a purpose besides their value stay: `copy`, `reduce_precision`,
        `optimization_barrier`, and equations that request a sharding of their result.

    Example:
        def f(x, y):
            return x + -y

        $ jaxprtool opt f.py:f --args "f32[3], f32[3]" -p "simplify, dce"
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = sub a b in (c,) }
    """

    name: ClassVar[str] = "simplify"
    group: ClassVar[str] = "clean up"

    fast: bool = False

    @staticmethod
    def rules() -> list[dict[str, str]]:
        """Return the rules in words, for `jaxprtool explain`."""
        families = {row: name for name, rows in _FAMILIES.items() for row in rows}
        return [
            {
                "pattern": row.pattern,
                "replacement": row.replacement,
                "condition": row.condition,
                "exact": row.exactness,
                "family": families.get(row, ""),
            }
            for row in simplify_rules
        ]

    def __call__(self, program: Program) -> Program:
        notes = notes_of_run()
        if self not in notes:
            notes[self] = SettledEquations(simplify_rules)
        settled = notes[self]
        jaxpr = simplified(program.jaxpr, simplify_rules, fast=self.fast, settled=settled)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program
