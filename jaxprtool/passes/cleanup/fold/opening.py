"""Replace control flow whose outcome is known by the equations that would run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jax import lax
from jax.extend.core import Effect

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import Contains
from jaxprtool.ir.core.structured import Cond, Scan, While
from jaxprtool.ir.evaluation.interpret import branch_of
from jaxprtool.ir.rewriting.rewrite import Writer
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal
from jaxprtool.passes.cleanup.fold.constant_evaluation import Number, Values, is_plain_type
from jaxprtool.primitives import sow_p

#: Opens an equation: returns its results, or None if it must stay.
Opener = Callable[[Writer, JaxprEqn, Values], Sequence[Atom] | None]


def _numbers(writer: Writer, atoms: Sequence[Atom], values: Values) -> list[Number | None]:
    """Return the numbers of the atoms that are literals, or constants of the body."""
    known = {
        v: number
        for v in atoms
        if type(v) is not Literal and v in writer.constant_values
        if (number := values.of_constant(writer.constant_values[v])) is not None
    }
    return [values.of_atom(atom, known) for atom in atoms]


def _open_cond(writer: Writer, eqn: JaxprEqn, values: Values) -> Sequence[Atom] | None:
    (number,) = _numbers(writer, eqn.invars[:1], values)
    if number is None:
        return None
    cond = Cond.of(eqn)
    branch = branch_of(cond, values.value(number))
    if eqn.effects:
        # JAX gives each branch the effects of all: its own are those of its equations.
        alone = jaxcompat.replace_jaxpr(branch, eqns=branch.eqns)
        if _lasting(jaxcompat.operand_effects(alone, cond.operands)) != _lasting(eqn.effects):
            return None
    return writer.splice(branch, cond.operands, eqn) if writer.can_hold(branch) else None


def _lasting(effects: Iterable[Effect]) -> set[Effect]:
    """Return the effects that are visible from outside: a program must still declare them."""
    return {effect for effect in effects if not jaxcompat.is_removable_effect(effect)}


def _open_while(writer: Writer, eqn: JaxprEqn, values: Values) -> Sequence[Atom] | None:
    if eqn.effects:
        return None
    loop = While.of(eqn)
    numbers = _numbers(writer, (*loop.cond_consts, *loop.carry), values)
    known = {v: n for v, n in zip(loop.cond.invars, numbers, strict=True) if n is not None}
    values.follow(loop.cond.eqns, known)
    result = values.of_atom(loop.cond.outvars[0], known)
    goes_on = None if result is None else values.value(result)
    return None if goes_on is None or np.any(goes_on) else loop.carry


def _open_scan(writer: Writer, eqn: JaxprEqn, values: Values) -> Sequence[Atom] | None:
    length = eqn.params["length"]
    if type(length) is not int or length > 1:
        return None
    scan = Scan.of(eqn)
    if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in scan.xs):
        return None  # a ref has no rows
    if Contains(lambda eqn: eqn.primitive is sow_p)(scan.body):
        return None  # a value sown in a scan is collected once for each iteration
    return _without_iterations(writer, scan) if length == 0 else _with_one_iteration(writer, scan)


def _without_iterations(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    used = [v for v in scan.ys if type(v) is not DropVar]
    plain = all(is_plain_type(v.aval) and isinstance(v.aval.dtype, np.dtype) for v in used)
    if scan.eqn.effects or not plain or (used and not writer.holds_constants):
        return None
    empty = {v: np.zeros(v.aval.shape, v.aval.dtype) for v in used}
    ys = [writer.constant(empty[v], v.aval) if v in empty else v for v in scan.ys]
    return [*scan.carry, *ys]


def _with_one_iteration(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    """Return the results of the body inlined, or None if slicing and stacking cost too much."""
    eqn, body, before = scan.eqn, scan.body, len(writer.eqns)
    if not writer.can_hold(body):
        return None
    read = {v for inner in body.eqns for v in inner.invars if type(v) is not Literal}
    read.update(v for v in body.outvars if type(v) is not Literal)
    firsts = body.invars[len(body.invars) - len(scan.xs) :]
    xs = [
        _only_row(writer, x, eqn) if first in read else x
        for x, first in zip(scan.xs, firsts, strict=True)
    ]
    results = writer.splice(body, [*scan.consts, *scan.carry, *xs], eqn)
    k = len(scan.carry)
    ys = [
        y if type(v) is DropVar else _stacked(writer, y, eqn)
        for y, v in zip(results[k:], scan.ys, strict=True)
    ]
    if len(writer.eqns) - before > 1 + len(body.eqns):
        return None
    return [*results[:k], *ys]


def _only_row(writer: Writer, x: Atom, eqn: JaxprEqn) -> Atom:
    """Return the only row of an array."""
    if (row := writer.repeated_row(x)) is not None:
        return row
    return writer.trace(lambda array: [lax.squeeze(array, (0,))], [x], eqn)[0]


def _stacked(writer: Writer, y: Atom, eqn: JaxprEqn) -> Atom:
    return writer.trace(lambda row: [lax.expand_dims(row, (0,))], [y], eqn)[0]


OPENERS: dict[str, Opener] = {"cond": _open_cond, "while": _open_while, "scan": _open_scan}
