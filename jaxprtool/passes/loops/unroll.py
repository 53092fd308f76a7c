"""Unrolling: replace a scan of few iterations by the equations of its iterations in sequence.

The elements of `xs` for an iteration are sliced, as in JAX's `scan(unroll=...)`, unless they were
stacked just before, and the results of the iterations are concatenated; if these are unstacked
later, the concatenated values are used. Loops are unrolled from the inside out, so that nested
scans become straight-line code too, and the program grows by the product of their lengths.

A scan stays a loop if its length is symbolic, if a value is sown in it (which would be sown again
in each iteration, under one name), if it takes refs as `xs` or creates an empty array of keys, and
if its body has constants that the enclosing body cannot hold. A scan with unrolled inner loops also
stays if it would have more than `MOST_EQUATIONS` equations: n nested loops of two iterations are
2**n iterations. While loops stay: if the number of iterations is known, as in `fori_loop` between
constants, JAX traces a scan instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError
from jaxprtool.ir.equations import Contains, equations
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Scan
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal
from jaxprtool.passes import Pass
from jaxprtool.primitives import sow_p

#: The maximum size of one unrolled loop, unless `max_length` times the program's size is larger.
MOST_EQUATIONS = 10_000


@dataclass(frozen=True)
class Unroll(Pass):
    """Replace scans of few iterations by straight-line code, at every depth.

    Nested scans are unrolled from the inside out, so the program grows by the product of their
    lengths.

    Args:
        max_length: The maximum number of iterations of a scan to unroll.

    Note:
        While loops stay. So do scans of symbolic length, scans with sown values, scans over refs,
        and nested scans that would have more than 10,000 equations when unrolled.

    Example:
        def f(x):
            return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)

        $ jaxprtool opt f.py:f --args "f32[]" -p "unroll, dce"
        { lambda ; a:f32[]. let
            b:f32[] = sin a
            c:f32[] = sin b
            d:f32[] = sin c
          in (d,) }
    """

    name: ClassVar[str] = "unroll"
    group: ClassVar[str] = "schedule and compile"

    max_length: int = 8

    def __post_init__(self) -> None:
        if self.max_length < 0:
            raise PipelineError(
                f"option 'max_length' of pass 'unroll' must not be negative: {self.max_length}"
            )

    def __call__(self, program: Program) -> Program:
        sows = Contains(lambda eqn: eqn.primitive is sow_p)
        equation_count = sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))
        most = max(MOST_EQUATIONS, self.max_length * equation_count)

        def visitor(writer: Writer) -> RewriteRule:
            rows = _Rows()

            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0:
                    return rows.get(eqn.invars[0])
                if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
                    rows[eqn.outvars[0]] = eqn.invars
                if eqn.primitive.name == "squeeze" and eqn.params["dimensions"] == (0,):
                    return rows.get(eqn.invars[0])
                if eqn.primitive.name == "slice" and (taken := _taken_rows(eqn, rows)):
                    rows[eqn.outvars[0]] = taken
                if eqn.primitive.name != "scan":
                    return None
                scan = Scan.of(eqn)
                if not isinstance(scan.length, int) or scan.length > self.max_length:
                    return None
                if scan.length * len(scan.body.eqns) > most:
                    return None
                if not writer.can_hold(scan.body) or sows(scan.body):
                    return None
                if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in scan.xs):
                    return None
                return _unrolled(writer, scan, rows) if scan.length else _not_run(writer, scan)

            return rule

        return program.replace(jaxpr=rewrite(program.jaxpr, visitor, flat=False))


#: The known rows of arrays, by array: values that were stacked need not be sliced again.
_Rows = dict[Atom, Sequence[Atom]]


def _taken_rows(eqn: JaxprEqn, rows_of: _Rows) -> Sequence[Atom]:
    """Return the rows that a slice takes of an array with known rows; empty if not whole rows."""
    (array,), shape = eqn.invars, eqn.outvars[0].aval.shape
    if type(array) is Literal or array not in rows_of or shape[1:] != array.aval.shape[1:]:
        return ()
    step = (eqn.params["strides"] or (1,))[0]
    return rows_of[array][eqn.params["start_indices"][0] : eqn.params["limit_indices"][0] : step]


def _unrolled(writer: Writer, scan: Scan, rows_of: _Rows) -> list[Atom]:
    """Write the iterations of a scan one after the other, and return its results."""
    length = scan.length
    columns = _columns(writer, scan, rows_of)

    def stacked(*values: jax.Array) -> list[jax.Array]:
        rows = (values[i::count] for i in range(count))
        return [lax.concatenate([lax.expand_dims(v, [0]) for v in r], 0) for r in rows]

    carry: Sequence[Atom] = scan.carry
    ys: list[Sequence[Atom]] = [()] * length
    for i in reversed(range(length)) if scan.reverse else range(length):
        row = [column[i] for column in columns]
        outs = writer.splice(scan.body, [*scan.consts, *carry, *row], scan.eqn)
        carry, ys[i] = outs[: len(carry)], outs[len(carry) :]
    count = len(scan.ys)
    arrays = writer.trace(stacked, [y for row in ys for y in row], scan.eqn)
    rows_of.update(zip(arrays, map(list, zip(*ys, strict=True)), strict=True))
    return [*carry, *arrays]


def _columns(writer: Writer, scan: Scan, rows_of: _Rows) -> list[Sequence[Atom]]:
    """Return the elements of each of the `xs`, which are sliced out if they are not known."""
    sliced = [x for x in scan.xs if type(x) is Literal or x not in rows_of]

    def elements(*xs: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, i, keepdims=False) for i in range(scan.length) for x in xs]

    rows = writer.trace(elements, sliced, scan.eqn)
    sliced_rows = iter([rows[i :: len(sliced)] for i in range(len(sliced))])
    return [
        next(sliced_rows) if type(x) is Literal or x not in rows_of else rows_of[x] for x in scan.xs
    ]


def _not_run(writer: Writer, scan: Scan) -> list[Atom] | None:
    """Return the results of a scan of length 0: its initial carry, and empty arrays."""
    avals = [v.aval for v in scan.ys]
    if any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
        return None

    def empty(*zeros: jax.Array) -> list[jax.Array]:
        pairs = zip(zeros, avals, strict=True)
        return [lax.broadcast_in_dim(zero, aval.shape, ()) for zero, aval in pairs]

    zeros = [writer.constant(0, jaxcompat.array_type((), a.dtype, a.weak_type)) for a in avals]
    return [*scan.carry, *writer.trace(empty, zeros, scan.eqn)]
