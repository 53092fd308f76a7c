"""Rules for loops, branches and linear solves, with their bodies as local functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    CallExpression,
    Grouping,
    MultiResult,
    Proposal,
    PythonFunction,
    Slot,
    call,
)
from jaxprtool.formats.python.helpers import BRANCH_AT, PLATFORM_INDEX
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.structured import Cond, Scan, While
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn


def group(indexes: Sequence[Any]) -> Any:
    """Return the structure of values: a single one without a tuple, none as None."""
    if len(indexes) == 1:
        return indexes[0]
    return tuple(indexes) or None


def _own_name(jaxpr: AnyJaxpr, otherwise: str) -> str:
    """Return the name of a body's Python function, or `otherwise` if it is generic."""
    name = jaxcompat.open_jaxpr(jaxpr).debug_info.func_name
    # A body read from a file is called "jaxpr".
    says_something = name.isidentifier() and not name.startswith("_") and name != "jaxpr"
    return name if says_something else otherwise


@rule(python_rules, "scan")
def _scan(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    loop = Scan.of(eqn)
    n, k, total = len(loop.consts), len(loop.carry), len(operands)
    outs = range(len(eqn.outvars))
    results = (group(outs[:k]), group(outs[k:]))
    step = PythonFunction(
        loop.body,
        _own_name(loop.body, "step"),
        (group(range(n, n + k)), group(range(n + k, total))),
        results,
        ("carry", "x"),
        captured=range(n),
        passed=range(n, total),
    )
    arguments = [step, group(operands[n : n + k]), group(operands[n + k :])]
    options: dict[str, object] = {}
    if not loop.xs:
        options["length"] = loop.length
    if loop.reverse:
        options["reverse"] = True
    if loop.unroll != 1:
        options["unroll"] = loop.unroll
    yield MultiResult(call("lax.scan", *arguments, **options), results)


@rule(python_rules, "while")
def _while(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    loop = While.of(eqn)
    if loop.cond.outvars[0].aval.shape:
        return  # a batched loop runs while any of its predicates is true
    c, b, k = len(loop.cond_consts), len(loop.body_consts), len(loop.carry)
    carry, results = range(c + b, c + b + k), group(range(k))
    condition = PythonFunction(
        loop.cond,
        _own_name(loop.cond, "condition"),
        (group(range(c, c + k)),),
        0,
        ("carry",),
        captured=range(c),
        passed=carry,
    )
    body = PythonFunction(
        loop.body,
        _own_name(loop.body, "body"),
        (group(range(b, b + k)),),
        results,
        ("carry",),
        captured=range(c, c + b),
        passed=carry,
    )
    start = group(operands[c + b :])
    yield MultiResult(call("lax.while_loop", condition, body, start), results)


@rule(python_rules, "cond")
def _cond(eqn: JaxprEqn, index: Slot, *operands: Slot) -> Iterator[Proposal]:
    functions, results, _ = _branches(eqn)
    more = {k: v for k, v in eqn.params.items() if k != "branches"}
    yield MultiResult(CallExpression(BRANCH_AT, (index, functions, *operands), more), results)


@rule(python_rules, "platform_index")
def _platform_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield CallExpression(PLATFORM_INDEX, eqn.params["platforms"])


def on_number(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.switch`, which clamps its first operand."""
    branches, results, (index, *operands) = _branches(eqn)
    return MultiResult(call("lax.switch", index, branches, *operands), results)


def on_predicate(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.cond`, which converts its first operand to an index."""
    (otherwise, then), results, (predicate, *operands) = _branches(eqn)
    return MultiResult(call("lax.cond", predicate, then, otherwise, *operands), results)


def on_platform(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.platform_dependent`, which queries its first operand."""
    functions, results, operands = _branches(eqn, 0)
    by_platform = {
        platform: function
        for function, platforms in zip(functions, eqn.params["branches_platforms"], strict=True)
        for platform in platforms or ("default",)
    }
    return MultiResult(call("lax.platform_dependent", *operands, **by_platform), results)


def _branches(eqn: JaxprEqn, before: int = 1) -> tuple[list[PythonFunction], Grouping, list[Slot]]:
    """Return the branches as functions, the structure of their results, and all operands.

    In Python, `before` operands precede those of the branches.
    """
    choice = Cond.of(eqn)
    results = group(range(len(choice.outs)))
    names = ["otherwise", "then"] if before and len(choice.branches) == 2 else []
    count = len(choice.operands)
    functions = [
        PythonFunction(
            body,
            names[i] if names else f"branch_{i}",
            tuple(range(count)),
            results,
            passed=range(before, before + count),
        )
        for i, body in enumerate(choice.branches)
    ]
    return functions, results, [Slot(i) for i in range(before + count)]


@rule(python_rules, "custom_linear_solve")
def _linear_solve(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    names = ("matvec", "vecmat", "solve", "transpose_solve")
    starts = dict(zip(names, accumulate(lengths, initial=0), strict=False))
    right = operands[sum(lengths) :]

    def function(name: str, takes_operator: bool) -> PythonFunction:
        body, first = getattr(jaxprs, name), starts[name]
        count = getattr(lengths, name)
        vector = group(range(count, len(body.invars)))
        return PythonFunction(
            body,
            name,
            (None, vector) if takes_operator else (vector,),
            group(range(len(body.outvars))),
            ("matvec", "b") if takes_operator else ("x",),
            captured=range(first, first + count),
        )

    solved = len(eqn.outvars) - len(right)
    given = group(range(len(right)))
    options: dict[str, object] = {}
    solve = function("solve", takes_operator=True)
    if solved:
        aux = tuple(range(len(right), len(eqn.outvars)))
        given = (given, aux)
        options["has_aux"] = True
        solve = replace(solve, results=given)
    if jaxprs.vecmat is not None and jaxprs.vecmat is jaxprs.matvec:
        options["symmetric"] = True
    elif jaxprs.transpose_solve is not None:
        options["transpose_solve"] = function("transpose_solve", takes_operator=True)
    matvec = function("matvec", takes_operator=False)
    solution = call("lax.custom_linear_solve", matvec, group(right), solve, **options)
    yield MultiResult(solution, given)
