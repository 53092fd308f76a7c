"""Constant folding: compute values that do not depend on the program's arguments ahead of time.

A *known* value is a literal, a constant of the body it is in, or the result of a pure equation of
known values. Where another equation needs a known value, the value replaces the equations that
compute it:

*   a scalar becomes a literal;
*   an array whose elements all have the same bits becomes a broadcast literal, which costs no bytes
    (if its equation has no other result);
*   another array becomes a constant of the body, if the program's constants then take no more than
    `max_bytes`, or if it is no larger than the constants that only it used, which it replaces.
    Equal arrays count once in each body.

An equation that only expands a small array to a big one (`iota`, and `broadcast_in_dim`) stays: it
is as cheap as the constant, and smaller. Then its own operands are the needed values. Equations
stay too if they have an intermediate value of more than 1 MiB (or 16 times `max_bytes`), or too
much work in their loops.

Values are computed by the default backend, one equation at a time, each as a kernel of its own;
on another backend an `exp` may differ in the last bit. They become NumPy arrays, which are on no
device. Constants that are committed to a device or are tracers (while JAX traces around the pass)
are not folded, nor are equations that run under a mesh, have effects, or have traits that forbid
it. A call with custom derivatives is folded if all its operands are constants: nothing
differentiates it.

Control flow with a known outcome is replaced: a cond with a constant index by its branch, a scan of
length 0 by its initial carry, a scan of length 1 by its body (unless slicing and stacking would
take more equations), and a while whose condition is false at once by its initial carry. It stays if
that would remove an effect that it declares, such as a print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError
from jaxprtool.ir.core.equations import is_flat, size_of
from jaxprtool.ir.core.structured import holds_jaxpr, keep, sub_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.fold.constant_evaluation import Array, Number, Values, is_plain_type
from jaxprtool.passes.cleanup.fold.opening import OPENERS
from jaxprtool.passes.framework.base import Pass


@dataclass(frozen=True)
class Fold(Pass):
    """Evaluate constant expressions, and replace control flow with a known outcome.

    A value that does not depend on the program's arguments becomes a literal, a broadcast literal
    or a constant. A cond with a known index is replaced by its branch, a scan of length 1 by its
    body, and a while loop whose condition is false at once by its initial carry. Values are
    computed on the default backend, one equation at a time.

    Args:
        max_bytes: The maximum total size of the program's constants, in bytes.

    Note:
        Equations that only expand a small value to a large array, such as `iota`, stay: they are as
        cheap as the constant, and smaller. Equations that have effects, run under a mesh, or take
        too long to evaluate stay too.

    Example:
        def f(x):
            return x + jnp.sqrt(jnp.float32(2.0)) * 3

        $ jaxprtool opt f.py:f --args "f32[3]" -p fold
        { lambda ; a:f32[3]. let b:f32[3] = add a 4.242640495300293:f32[] in (b,) }
    """

    name: ClassVar[str] = "fold"
    group: ClassVar[str] = "clean up"

    max_bytes: int = 65536

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise PipelineError(
                f"option 'max_bytes' of pass 'fold' must not be negative: {self.max_bytes}"
            )

    def __call__(self, program: Program) -> Program:
        jaxpr = fold_jaxpr(program.jaxpr, self.max_bytes)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program


def fold_jaxpr(jaxpr: ClosedJaxpr, max_bytes: int) -> ClosedJaxpr:
    """Compute the constant parts of a closed jaxpr; return the jaxpr itself if it has none."""
    folding = _Folder(jaxpr, max_bytes)
    while True:
        folding.opened = False
        before, jaxpr = jaxpr, rewrite(jaxpr, folding.visit)
        if jaxpr is before or not folding.opened:
            return jaxpr


# --- the pass ---------------------------------------------------------------------------------

#: The largest intermediate value, in bytes, unless `max_bytes` is large.
_LARGEST = 1 << 20


def _constant_bytes(jaxpr: AnyJaxpr, seen: set[AnyJaxpr]) -> int:
    """Return the bytes of the constants of a jaxpr and of the distinct jaxprs in it."""
    seen.add(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    total = sum(size_of(value, 0) for value in consts if is_plain_type(jax.typeof(value)))
    for eqn in () if is_flat(jaxcompat.open_jaxpr(jaxpr)) else jaxpr.eqns:
        if holds_jaxpr(eqn.params.values()):
            bodies = (body for _, body in sub_jaxprs(eqn))
            total += sum(_constant_bytes(body, seen) for body in bodies if body not in seen)
    return total


class _Folder:
    """The state of one run: the known values of the program, and the remaining bytes."""

    def __init__(self, jaxpr: ClosedJaxpr, max_bytes: int) -> None:
        self._left = max_bytes - _constant_bytes(jaxpr, set())
        self._values = Values(max(_LARGEST, 16 * max_bytes))
        #: True if control flow was replaced by equations that have not been visited.
        self.opened = False

    def visit(self, writer: Writer) -> RewriteRule:
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        known: dict[Var, Number] = {}
        for var, value in writer.constant_values.items():
            number = self._values.of_constant(value) if is_plain_type(var.aval) else None
            if number is not None:
                known[var] = number
        found = self._values.follow(jaxpr.eqns, known)
        values: dict[Var, Array | None] = {}
        if not all(traits(eqn).fills for eqn in found):
            values = self._needed_values(writer, known, found)

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if eqn.outvars and eqn.outvars[0] in values:
                return [_atom(writer, eqn, var, values[var]) for var in eqn.outvars]
            opener = OPENERS.get(eqn.primitive.name)
            atoms = opener(writer, eqn, self._values) if opener is not None else None
            self.opened |= atoms is not None
            return atoms

        return rule

    def _needed_values(
        self, writer: Writer, known: dict[Var, Number], found: Sequence[JaxprEqn]
    ) -> dict[Var, Array | None]:
        """Return the results of the removed equations, with the values of those that are needed.

        The value of a result that nothing needs is None.
        """
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        freed = _freed(writer, found) if writer.constvars else {}
        folded, held = {id(eqn) for eqn in found}, set[Number]()
        needed = {v for v in jaxpr.outvars if type(v) is not Literal}
        values: dict[Var, Array | None] = {}
        for eqn in reversed(jaxpr.eqns):
            if id(eqn) in folded and writer.donated.isdisjoint(eqn.outvars):
                wanted = {v: known[v] for v in eqn.outvars if v in needed}
                taken = self._taken(writer, eqn, wanted, freed.get(id(eqn), 0), held)
                if taken is not None:
                    values.update(dict.fromkeys(eqn.outvars))
                    values.update(taken)
                    continue
            needed.update(v for v in eqn.invars if type(v) is not Literal)
        if values and len(writer.consts) == len(writer.constvars):
            _drop_constants(writer, needed)
        return values

    def _taken(
        self,
        writer: Writer,
        eqn: JaxprEqn,
        wanted: dict[Var, Number],
        freed: int,
        held: set[Number],
    ) -> dict[Var, Array] | None:
        """Return the values of an equation's needed results; None if the equation must stay."""
        arrays = {v: number for v, number in wanted.items() if v.aval.shape != ()}
        cost = sum(size_of(v.aval, 0) for v, number in arrays.items() if number not in held)
        if arrays and (_expands(eqn) or cost - freed > max(self._left, 0)):
            return None
        if any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in wanted):
            return None
        values = {
            v: value
            for v, number in wanted.items()
            if (value := self._values.value(number)) is not None
        }
        if len(values) < len(wanted):
            return None
        if arrays and len(eqn.outvars) == 1:
            element = _element(values[eqn.outvars[0]])
            if element is not None:
                return {eqn.outvars[0]: element}
        if arrays and not writer.holds_constants:
            return None
        held.update(arrays.values())
        self._left -= cost - freed if cost else 0
        return values


def _drop_constants(writer: Writer, needed: set[Var]) -> None:
    """Drop the constants of a body that nothing reads any more."""
    flags = [v in needed for v in writer.constvars]
    for v, flag in zip(writer.constvars, flags, strict=True):
        if not flag:
            del writer.constant_values[v]
    writer.constvars[:] = keep(writer.constvars, flags)
    writer.consts[:] = keep(writer.consts, flags)


def _freed(writer: Writer, found: Sequence[JaxprEqn]) -> dict[int, int]:
    """Return the bytes of constants that removing each equation frees, by its id."""
    jaxpr = jaxcompat.open_jaxpr(writer.body)
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if type(v) is not Literal)
    uses.update(v for v in jaxpr.outvars if type(v) is not Literal)
    free = {v: size_of(value, 0) for v, value in writer.constant_values.items() if v.aval.shape}
    by_equation: dict[int, int] = {}
    for eqn in found:
        operands = (v for v in eqn.invars if type(v) is not Literal and uses[v] == 1)
        by_equation[id(eqn)] = total = sum(free.get(v, 0) for v in operands)
        if len(eqn.outvars) == 1:
            free[eqn.outvars[0]] = total
    return by_equation


def _expands(eqn: JaxprEqn) -> bool:
    """Return True if an equation only fills a larger array, so that a constant saves nothing."""
    size = sum(size_of(v.aval, 0) for v in eqn.invars if type(v) is not Literal)
    return traits(eqn).fills and size_of(eqn.outvars[0].aval, 0) > size


def _element(value: Array) -> np.ndarray | None:
    """Return the scalar that an array is filled with, if all its elements have the same bits."""
    if value.size == 0:
        return None
    element = np.asarray(value[(0,) * value.ndim])
    return element if value.tobytes() == element.tobytes() * value.size else None


def _atom(writer: Writer, eqn: JaxprEqn, var: Var, value: Array | None) -> Atom:
    """Return the atom that replaces a result: its value, or a broadcast of the scalar value."""
    if value is None:
        return var  # nothing reads it
    if value.shape == var.aval.shape:
        return writer.constant(value, var.aval)
    scalar = jaxcompat.array_type((), var.aval.dtype, var.aval.weak_type)
    operand = writer.constant(value, scalar)
    params = {"shape": var.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return writer.emit(lax.broadcast_in_dim_p, [operand], params, eqn)[0]
