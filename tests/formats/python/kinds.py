"""Features of jaxprs that JAX's functions cannot express: the list in docs/languages.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprtool.ir.custom_rules import jvp_rule, rules_followed, vjp_rule
from jaxprtool.ir.equations import equations
from jaxprtool.ir.expansions import without_live_objects
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Scan, While
from jaxprtool.jaxcompat import JaxprEqn, Literal, open_jaxpr


def kinds(program: Program) -> set[str]:
    """Return the listed features of a program, at every depth and in its custom rules."""
    found: set[str] = set()
    with rules_followed():
        _note(program.jaxpr, found, set())
    return found


def _note(jaxpr: Any, found: set[str], rules: set[int]) -> None:
    for eqn in equations(open_jaxpr(jaxpr)):
        found.update(_kinds(eqn))
        eqn = without_live_objects(eqn)
        if eqn.primitive.name == "custom_jvp_call":
            held = [jvp_rule(eqn).jaxpr]
        elif eqn.primitive.name == "custom_vjp_call":
            rule = vjp_rule(eqn)
            held = [rule.fwd, rule.bwd]
        else:
            continue
        for body in held:
            if body is not None and id(body) not in rules:
                rules.add(id(body))
                _note(body, found, rules)


def _kinds(eqn: JaxprEqn) -> Iterator[str]:
    name = eqn.primitive.name
    if name in ("convert_element_type", "device_put") and isinstance(eqn.invars[0], Literal):
        yield "an operation on a literal"
    if name == "scan":
        loop = Scan.of(eqn)
        yield from _of_body(loop.body, len(loop.consts), len(loop.carry), loop.consts)
    if name == "while":
        both = While.of(eqn)
        yield from _of_body(both.body, len(both.body_consts), len(both.carry), both.body_consts)
        yield from _of_body(both.cond, len(both.cond_consts), 0, both.cond_consts)


def _of_body(closed: Any, consts: int, carry: int, operands: Any) -> Iterator[str]:
    body = open_jaxpr(closed)
    if body.constvars:
        yield "a constant in a loop"
    read = {v for e in body.eqns for v in e.invars if not isinstance(v, Literal)}
    read |= {v for v in body.outvars if not isinstance(v, Literal)}
    if not read.issuperset(body.invars[:consts]):
        yield "a value that a loop does not read"
    if len({id(v) for v in operands}) < len(operands):
        yield "an operand twice"
    handed = zip(body.invars[consts : consts + carry], body.outvars, strict=False)
    given = set(body.invars[consts + carry :])
    ys = [v for v in body.outvars[carry:] if not isinstance(v, Literal)]
    if any(a is b for a, b in handed) or given.intersection(ys):
        yield "a value that a loop hands on"
