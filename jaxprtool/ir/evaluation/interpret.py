"""The interpreter: evaluate a jaxpr one first-order equation at a time, at every depth.

XLA compiles the body of a loop as a whole and fuses its equations, so that a result depends on the
other equations. Here loops and branches run in Python: each equation runs as a kernel of its own,
and its result depends only on its operands, to the last bit. Subclasses of `Interpreter` override
the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import JaxprCache
from jaxprtool.ir.basics.dtypes import is_extended, is_foreign
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, While, view
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var


class LoopOperands(NamedTuple):
    """The operands of a loop by role.

    Attributes:
        cond_consts: The constants of a while loop's condition.
        consts: The loop-invariant operands of the body.
        carry: The initial carry.
        xs: The operands of a scan that each iteration reads a slice of.
    """

    cond_consts: list[Any]
    consts: list[Any]
    carry: list[Any]
    xs: list[Any]

    @classmethod
    def of(cls, loop: Scan | While, operands: Iterable[Any]) -> LoopOperands:
        """Return the operands of a loop, by role."""
        if isinstance(loop, Scan):
            first, second, third = 0, len(loop.consts), len(loop.carry)
        else:
            first, second, third = map(len, (loop.cond_consts, loop.body_consts, loop.carry))
        values = iter(operands)
        cond_consts, consts, carry = (list(islice(values, n)) for n in (first, second, third))
        return cls(cond_consts, consts, carry, list(values))


def slice_number(loop: Scan | While, iteration: Any) -> Any:
    """Return the index of the slice that an iteration reads, or the iteration of a while loop."""
    if isinstance(loop, Scan) and loop.reverse:
        return loop.length - 1 - iteration
    return iteration


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr. Rules of custom derivatives are ignored."""
    return Interpreter().run(closed, args)


class Interpreter:
    """Evaluates jaxprs on arrays."""

    # --- hooks ------------------------------------------------------------------------------------

    def constant(self, value: object, aval: Aval) -> Any:
        """Return the value of a literal, or of a constant of a jaxpr."""
        return value

    def concrete(self, value: Any) -> Any:
        """Return the scalar that selects a branch, or the predicate of a loop."""
        return value

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a first-order equation, or of one without a structured view."""
        return bind(eqn, operands)

    def row(self, value: Any, i: int) -> Any:
        """Return the slice of a scanned operand that iteration `i` reads."""
        return row_of(value, i)

    def stack(self, rows: Sequence[Any], var: Var) -> Any:
        """Stack the values of the iterations of a scan as its result `var`."""
        if not rows:
            return _no_rows(var)
        if not is_foreign(var.aval.dtype):
            return jnp.stack(rows)
        return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in rows], 0)

    def enter(self, body: ClosedJaxpr, operands: list[Any], predicate: Any = None) -> list[Any]:
        """Return the results of a body. It runs because of the value of `predicate`, if given."""
        return self.run(body, operands)

    def selected(self, values: list[Any], predicate: Any) -> list[Any]:
        """Return the results of a branch or a loop, which `predicate` selected."""
        return values

    # --- evaluation -------------------------------------------------------------------------------

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the results of a closed jaxpr."""
        env: dict[Var, Any] = dict(zip(closed.invars, args, strict=True))
        for var, value in zip(closed.constvars, closed.consts, strict=True):
            env[var] = self.constant(value, var.aval)

        def read(atom: Atom) -> Any:
            return self.constant(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn, dead in zip(closed.eqns, _last_read(closed), strict=True):
            with eqn.ctx.manager:
                results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for var in dead:
                del env[var]
        return [read(atom) for atom in closed.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Return the results of one equation, running the bodies of loops, branches and calls."""
        match view(eqn):
            case Scan() as scan if isinstance(scan.length, int):
                return self.scan(scan, operands)
            case While() as loop if loop.cond.outvars[0].aval.shape == ():
                return self.while_loop(loop, operands)
            case Cond() as cond:
                return self.branch(cond, operands)
            case Call() | CustomJVP() as call:
                return self.enter(call.body, operands)
        return self.evaluate(eqn, operands)

    def branch(self, cond: Cond, operands: list[Any]) -> list[Any]:
        """Return the results of a `cond`."""
        taken = branch_of(cond, self.concrete(operands[0]))
        return self.selected(self.enter(taken, operands[1:], operands[0]), operands[0])

    def scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        """Return the results of a scan."""
        _, consts, carry, xs = LoopOperands.of(scan, operands)
        slices = []
        for i in range(scan.length):
            rows = [self.row(x, slice_number(scan, i)) for x in xs]
            outs = self.enter(scan.body, [*consts, *carry, *rows])
            carry, ys = outs[: len(carry)], outs[len(carry) :]
            slices.append(ys)
        if scan.reverse:
            slices.reverse()
        stacks = zip(*slices, strict=True) if slices else [()] * len(scan.ys)
        pairs = zip(stacks, scan.ys, strict=True)
        return [*carry, *(self.stack(rows, var) for rows, var in pairs)]

    def while_loop(self, loop: While, operands: list[Any]) -> list[Any]:
        """Return the results of a while loop."""
        cond_consts, consts, carry, _ = LoopOperands.of(loop, operands)
        while True:
            (more,) = self.enter(loop.cond, [*cond_consts, *carry])
            if not self.concrete(more):
                return self.selected(carry, more)
            carry = self.enter(loop.body, [*consts, *carry], more)


_last_reads = JaxprCache()


def _last_read(closed: ClosedJaxpr) -> list[list[Var]]:
    """Return, for each equation of a jaxpr, the variables that it is the last to read."""
    known = _last_reads.of(closed)
    if "last" not in known:
        live = {v for v in closed.outvars if type(v) is not Literal}
        found: list[list[Var]] = []
        for eqn in reversed(closed.eqns):
            here = dict.fromkeys(v for v in (*eqn.invars, *eqn.outvars) if type(v) is not Literal)
            found.append([v for v in here if v not in live])
            live.update(here)
        known["last"] = found[::-1]
    return known["last"]  # type: ignore[no-any-return]


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation on arrays, run by JAX as a single operation."""
    eqn = jaxcompat.equation_for_jax(eqn)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    if not eqn.primitive.multiple_results:
        results = [results]
    # Another package's primitive may return its operand, which may be a literal.
    return [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in results]


def branch_of(cond: Cond, index: Any) -> Any:
    """Return the branch that an index selects. Like XLA, take the last for an invalid index."""
    number = int(index)
    return cond.branches[number if 0 <= number < len(cond.branches) else -1]


def row_of(stack: Any, i: int) -> Any:
    """Return the slice at one index of the first axis."""
    # Arrays of another package's elements need not support NumPy's indexing.
    foreign = is_foreign(stack.dtype)
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False) if foreign else stack[i]


def _no_rows(var: Var) -> Any:
    """Return an empty stack."""
    aval = var.aval
    if not is_extended(aval.dtype):
        return jnp.zeros(aval.shape, aval.dtype)
    element = jaxcompat.physical_element(aval.dtype)
    zeros = jnp.zeros((*aval.shape, *element.shape), element.dtype)
    return jaxcompat.logical_array(zeros, aval=aval)
