"""Evaluates jaxprs one first-order equation at a time, at every depth, for the oracles.

XLA rounds the body of a loop or a branch differently if other equations are in it. Here, loops and
branches run in Python and each equation is a kernel of its own, so that its result depends bitwise
on its operands only.

It reads JAX's own parameters and uses no code of the package, so that it does not share the
package's bugs. `read` returns the bodies of an equation and their operands. A `scan` has
`num_consts` and `num_carry` in JAX 0.10, and the flat tree `ft_in` in 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

#: The parameter that holds the body of each call primitive.
_BODY_OF_CALL = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


class Scan(NamedTuple):
    """body(*consts, *carry, *x) -> (*carry, *y), for each x of the rest of the operands."""

    body: Any
    consts: int
    carry: int
    length: Any
    reverse: bool


class While(NamedTuple):
    """The operands are the constants of the condition, those of the body, and the carry of both."""

    cond: Any
    body: Any
    cond_consts: int
    body_consts: int


class Cond(NamedTuple):
    """The first operand selects a branch, the last if it is invalid. The others are arguments."""

    branches: tuple[Any, ...]


class Call(NamedTuple):
    """The body takes all operands and returns all results."""

    body: Any


def read(eqn: Any) -> Scan | While | Cond | Call | None:
    """Return a view of an equation with bodies. None if it is evaluated as a whole."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        if "ft_in" in params:
            consts, carry = (len(tree) for tree in params["ft_in"].unpack()[:2])
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return Scan(closed(params["jaxpr"]), consts, carry, params["length"], params["reverse"])
    if name == "while":
        cond, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
        return While(cond, body, params["cond_nconsts"], params["body_nconsts"])
    if name == "cond":
        return Cond(tuple(map(closed, params["branches"])))
    if name in _BODY_OF_CALL:
        return Call(closed(params[_BODY_OF_CALL[name]]))
    return None


def closed(body: Any) -> Any:
    """Return a body with its constants. An open one has none."""
    return body if hasattr(body, "consts") else ClosedJaxpr(body, ())


def bodies(eqn: Any) -> Iterator[Any]:
    """Return every jaxpr in the parameters of an equation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Jaxpr | ClosedJaxpr):
                yield each


def bind(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation, evaluated by JAX on its own."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]] = bind,
) -> list[Any]:
    """Return the results of a closed jaxpr.

    Args:
        jaxpr: The jaxpr. Its custom derivative rules are ignored.
        args: The values of its arguments.
        apply: Returns the results of an equation that is evaluated as a whole.
    """
    env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with eqn.ctx.manager:
            results = _evaluate_equation(eqn, [value(atom) for atom in eqn.invars], apply)
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _evaluate_equation(eqn: Any, operands: list[Any], apply: Any) -> Sequence[Any]:
    match read(eqn):
        case Scan(length=int()) as scan:
            return _evaluate_scan(eqn, scan, operands, apply)
        case While(cond) as loop if cond.outvars[0].aval.shape == ():
            return _evaluate_while(loop, operands, apply)
        case Cond(branches):
            index = int(operands[0])
            taken = branches[index if 0 <= index < len(branches) else -1]
            return evaluate(taken, operands[1:], apply)
        case Call(body):
            return evaluate(body, operands, apply)
    return apply(eqn, operands)


def _evaluate_scan(eqn: Any, scan: Scan, operands: list[Any], apply: Any) -> list[Any]:
    first_x = scan.consts + scan.carry
    consts, carry = operands[: scan.consts], operands[scan.consts : first_x]
    columns = [rows_of(x) for x in operands[first_x:]]
    ys: list[Any] = [None] * scan.length
    for i in range(scan.length)[:: -1 if scan.reverse else 1]:
        outs = evaluate(scan.body, [*consts, *carry, *(rows[i] for rows in columns)], apply)
        carry, ys[i] = outs[: scan.carry], outs[scan.carry :]
    stacks = [[row[k] for row in ys] for k in range(len(eqn.outvars) - scan.carry)]
    variables = eqn.outvars[scan.carry :]
    return [*carry, *(stacked(rows, v) for rows, v in zip(stacks, variables, strict=True))]


def _evaluate_while(loop: While, operands: list[Any], apply: Any) -> list[Any]:
    first, second = loop.cond_consts, loop.cond_consts + loop.body_consts
    carry = operands[second:]
    while evaluate(loop.cond, [*operands[:first], *carry], apply)[0]:
        carry = evaluate(loop.body, [*operands[first:second], *carry], apply)
    return carry


def rows_of(stack: Any) -> list[Any]:
    """Return the slices along the first axis."""
    if not _is_plain(stack.dtype):
        take = jax.lax.dynamic_index_in_dim
        return [take(stack, i, keepdims=False) for i in range(stack.shape[0])]
    # NumPy compiles nothing.
    return [_on_device(row) for row in np.asarray(stack)]


def stacked(rows: Sequence[Any], var: Any) -> Any:
    """Return the stack of rows, with the type of a variable of a jaxpr."""
    aval = var.aval
    if _is_plain(aval.dtype):
        values = np.stack(list(map(np.asarray, rows))) if rows else np.empty(aval.shape)
        return _on_device(values.astype(aval.dtype, copy=False))
    if not rows:  # XLA cannot create these types
        return jax.jit(lambda: jax.lax.empty(aval.shape, aval.dtype))()
    return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in rows], 0)


def _on_device(x: Any) -> Any:
    """Return a JAX array. A zero tangent of integers has none."""
    return x if x.dtype == jax.dtypes.float0 else jax.device_put(x)


def _is_plain(dtype: Any) -> bool:
    """Return True if NumPy has this element type: not keys or other extended dtypes."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended)
