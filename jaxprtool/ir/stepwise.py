"""Evaluate a jaxpr one first-order equation at a time, at every depth.

JAX compiles the body of a loop or a branch as a whole, and XLA may then round differently when
the body holds other equations beside those that matter: it fuses, and contracts a product and a
sum into one rounding. Here loops and branches run in Python, so that each equation runs as a
kernel of its own and its result depends on its operands alone, to the last bit.

A subclass of `Stepper` may keep something beside each value: what it does with literals, rows of
stacks and the like is in methods of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import is_extended, is_foreign
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, While, view
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var


def evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr. Custom derivative rules are not looked at."""
    return Stepper().run(closed, args)


class Stepper:
    """Runs jaxprs on plain values."""

    # --- what a subclass may do otherwise -----------------------------------------------------

    def constant(self, value: Any) -> Any:
        """A literal or a constant of a jaxpr."""
        return value

    def number(self, value: Any) -> Any:
        """A scalar that says which branch is taken, or whether there is another round."""
        return value

    def apply(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """The results of an equation that is not looked into."""
        return self.bind(eqn, operands)

    @staticmethod
    def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation on arrays, as JAX runs it by itself."""
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]

    def row(self, value: Any, i: int) -> Any:
        """What one round of a scan is given of a stack."""
        return row_of(value, i)

    def stack(self, rows: Sequence[Any], var: Var) -> Any:
        """What a scan gives of what its rounds have given."""
        if not rows:
            return _no_rows(var)
        if not is_foreign(var.aval.dtype):
            return jnp.stack(rows)
        return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in rows], 0)

    def inside(self, body: Any, operands: list[Any], decider: Any = None) -> list[Any]:
        """The results of a body of an equation; a branch or a round runs because of `decider`."""
        return self.run(body, operands)

    def decided(self, values: list[Any], decider: Any) -> list[Any]:
        """What a branch or a loop gives, which it does because of `decider`."""
        return values

    # --- the walk -----------------------------------------------------------------------------

    def run(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr."""
        env = dict(zip(closed.constvars, map(self.constant, closed.consts), strict=True))
        env.update(zip(closed.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return self.constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in closed.eqns:
            with eqn.ctx.manager:
                results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in closed.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        structured = view(eqn)
        match structured:
            case Scan() if isinstance(structured.length, int):
                return self._scan(structured, operands)
            case While() if structured.cond.outvars[0].aval.shape == ():
                return self._while(structured, operands)
            case Cond():
                last = len(structured.branches) - 1
                taken = min(max(int(self.number(operands[0])), 0), last)
                outs = self.inside(structured.branches[taken], operands[1:], operands[0])
                return self.decided(outs, operands[0])
            case Call() | CustomJVP():
                return self.inside(structured.body, operands)
        return self.apply(eqn, operands)

    def _scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        n, k = len(scan.consts), len(scan.carry)
        consts, carry, xs = operands[:n], operands[n : n + k], operands[n + k :]
        rounds = range(scan.length)
        slices = []
        for i in reversed(rounds) if scan.reverse else rounds:
            rows = [self.row(x, i) for x in xs]
            outs = self.inside(scan.body, [*consts, *carry, *rows])
            carry = outs[:k]
            slices.append(outs[k:])
        if scan.reverse:
            slices.reverse()
        ys = zip(*slices, strict=True) if slices else [()] * len(scan.ys)
        pairs = zip(ys, scan.ys, strict=True)
        return [*carry, *(self.stack(rows, var) for rows, var in pairs)]

    def _while(self, loop: While, operands: list[Any]) -> list[Any]:
        c, b = len(loop.cond_consts), len(loop.body_consts)
        cond_consts, body_consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
        while True:
            (more,) = self.inside(loop.cond, [*cond_consts, *carry])
            if not self.number(more):
                return self.decided(carry, more)
            carry = self.inside(loop.body, [*body_consts, *carry], more)


def row_of(stack: Any, i: int) -> Any:
    """What is at one index of the first axis."""
    # Arrays of a package's own elements need not have NumPy's indexing.
    foreign = is_foreign(stack.dtype)
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False) if foreign else stack[i]


def _no_rows(var: Var) -> Any:
    """The stack of no rows."""
    aval = var.aval
    if not is_extended(aval.dtype):
        return jnp.zeros(aval.shape, aval.dtype)
    element = jaxcompat.physical_element(aval.dtype)
    return jaxcompat.logical_array(jnp.zeros((*aval.shape, *element.shape), element.dtype), aval)
