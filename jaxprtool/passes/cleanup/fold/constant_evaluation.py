"""Constant evaluation: compute the values that depend on literals and constants alone.

Equations are evaluated on demand, one at a time, and equal ones only once. NumPy evaluates those
whose bits are prescribed (`ir.evaluation.exact_numpy`), and the default backend all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import itemsize
from jaxprtool.ir.core.equations import size_of
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, holds_jaxpr, view
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.structural_key import Unkeyable, parameters_key
from jaxprtool.ir.equality.value_keys import literal_key
from jaxprtool.ir.evaluation.exact_numpy import evaluate_exactly
from jaxprtool.ir.evaluation.interpret import Interpreter, bind
from jaxprtool.ir.evaluation.nonfinite import unchecked
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Literal, Var

#: The maximum number of equations that run when an equation with bodies is evaluated.
_MOST_STEPS = 1000

#: A value; random keys are JAX arrays.
Array = np.ndarray | jax.Array

#: The id of a known value: the number of its equation, and the index of the result.
Number = tuple[int, int]


class Values:
    """The known values of a program, each computed on first use."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[int, tuple[JaxprEqn, list[Number]]] = {}
        self._results: dict[int, Sequence[Array] | None] = {}
        self._plain_settings: dict[object, bool] = {}

    def of_atom(self, atom: Atom, known: dict[Var, Number]) -> Number | None:
        """Return the number of a literal, or of a variable that is known."""
        if type(atom) is not Literal:
            return known.get(atom)
        return self._given(literal_key(atom), np.asarray(atom.val).astype(atom.aval.dtype))

    def of_constant(self, value: object) -> Number | None:
        """Return the number of a constant's value; None if the constant must not be folded."""
        if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
            return None
        if isinstance(value, jax.Array) and (value.committed or not value.is_fully_addressable):
            return None
        return self._given(id(value), value) if size_of(value, 0) <= self._largest else None

    def _given(self, key: Hashable, value: Array) -> Number:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._results.setdefault(number, [value])
        return number, 0

    def follow(self, eqns: Sequence[JaxprEqn], known: dict[Var, Number]) -> list[JaxprEqn]:
        """Return the equations whose results are known, and add these results to `known`."""
        found = []
        for eqn in eqns:
            for atom in eqn.invars:
                if type(atom) is not Literal and atom not in known:
                    break
            else:
                if (number := self._of_equation(eqn, known)) is not None:
                    known.update((v, (number, i)) for i, v in enumerate(eqn.outvars))
                    found.append(eqn)
        return found

    def _of_equation(self, eqn: JaxprEqn, known: dict[Var, Number]) -> int | None:
        if eqn.effects or not traits(eqn).may_fold or not self._is_plain(eqn):
            return None
        if not eqn.outvars:
            return None  # nothing to know; dce removes it
        try:
            key, held = parameters_key(eqn)
        except Unkeyable:
            return None
        if held and not all(body.repeatable for body in held):
            return None
        if held and self._steps(eqn) > _MOST_STEPS:
            return None
        numbers = (self.of_atom(atom, known) for atom in eqn.invars)
        operands = [number for number in numbers if number is not None]
        whole = eqn.primitive, key, eqn.ctx, *operands
        number = self._numbers.setdefault(whole, len(self._numbers))
        self._made.setdefault(number, (eqn, operands))
        return number

    def _is_plain(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation has the default context, and plain, small results."""
        if eqn.ctx not in self._plain_settings:
            settings = jaxcompat.context_settings(eqn.ctx)
            self._plain_settings[eqn.ctx] = all(
                name == "threefry_partitionable" or value == jaxcompat.CONTEXT_DEFAULTS[name]
                for name, value in settings.items()
            )
        return self._plain_settings[eqn.ctx] and all(
            is_plain_type(v.aval) and size_of(v.aval, 0) <= self._largest for v in eqn.outvars
        )

    def _steps(self, eqn: JaxprEqn) -> float:
        """Return how many equations an evaluation runs; infinity if one must not be folded."""
        if not traits(eqn).may_fold or not self._is_plain(eqn):
            return float("inf")
        structured = view(eqn)
        match structured:
            case Scan() if type(structured.length) is int:
                return structured.length * sum(map(self._steps, structured.body.eqns))
            case Cond():
                return max(sum(map(self._steps, branch.eqns)) for branch in structured.branches)
            case Call() | CustomJVP():
                return sum(map(self._steps, structured.body.eqns))
            case None if not holds_jaxpr(eqn.params.values()) or eqn.primitive.name == "reduce":
                return 1
        return float("inf")

    def value(self, number: Number) -> Array | None:
        """Return a known value; None if the backend fails to compute it."""
        todo = [number[0]]
        with _computing():
            while todo:
                if todo[-1] in self._results:
                    todo.pop()
                    continue
                eqn, operands = self._made[todo[-1]]
                missing = [n for n, _ in operands if n not in self._results]
                if missing:
                    todo += missing
                    continue
                self._results[todo.pop()] = self._computed(eqn, operands)
        results = self._results[number[0]]
        return None if results is None else results[number[1]]

    def _computed(self, eqn: JaxprEqn, operands: Sequence[Number]) -> Sequence[Array] | None:
        values = []
        for number, i in operands:
            results = self._results[number]
            if results is None:
                return None
            values.append(results[i])
        try:
            results = list(map(_on_host, _Evaluator().equation(eqn, list(map(_on_host, values)))))
        except Exception:  # a backend, or a plug-in's rule, may raise anything
            return None
        types = [(value.shape, value.dtype) for value in results]
        return results if types == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars] else None


def is_plain_type(aval: Aval) -> bool:
    """Return True if a type is an array type with nothing but dtype and shape."""
    return (
        isinstance(aval, jax.core.ShapedArray)
        and all(type(size) is int for size in aval.shape)
        and aval.dtype != jax.dtypes.float0
        and aval.sharding.mesh.empty
        and aval.memory_space == jax.memory.Space.Device
        and not jaxcompat.varying_axes(aval)
    )


# --- computing --------------------------------------------------------------------------------


@contextmanager
def _computing() -> Iterator[None]:
    """Evaluate eagerly, even under a trace, and allow NaNs, infinities and transfers."""
    with jax.ensure_compile_time_eval(), unchecked(), jax.transfer_guard("allow"):
        yield


def _on_host(value: Array) -> Array:
    """Return a result as a NumPy array; random keys stay JAX arrays."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return np.asarray(value)


class _Evaluator(Interpreter):
    """Evaluate equations by NumPy where the bits are prescribed, by the backend elsewhere."""

    def constant(self, value: Any, aval: Aval) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if all(isinstance(x, np.ndarray) for x in operands):
            result = evaluate_exactly(eqn, operands)
            if result is not None:
                return [result]
        wide = any(itemsize(atom.aval.dtype) >= 8 for atom in (*eqn.invars, *eqn.outvars))
        with jaxcompat.setting_of(eqn), jax.enable_x64(True) if wide else nullcontext():
            return bind(eqn, operands)
