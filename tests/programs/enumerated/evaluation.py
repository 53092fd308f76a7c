"""The values of many programs on one set of arguments, each value computed once.

A value's key is what computes it: a primitive, its parameters, and the numbers of its operands.
Programs that share equations share their values. So do a program and its rewritten form.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxprtool.jaxcompat import weakly_typed
from tests.programs import interpreter, stepwise


class Values:
    """Values by number. Arguments come first."""

    def __init__(self, arguments: Sequence[jax.Array], lanes: tuple[int, ...] = ()) -> None:
        self.lanes = lanes
        self._arrays: list[Any] = []
        self._types: list[Any] = []
        self._bits: dict[int, Any] = {}
        self._numbers: dict[Hashable, tuple[int, ...]] = {}
        self._contents: dict[Hashable, int] = {}
        #: Objects compared by identity, kept alive so that their ids are not reused.
        self._kept: list[Any] = []
        self.arguments = [self._new(array) for array in arguments]

    def run(self, jaxpr: Any) -> list[int]:
        """Return the numbers of the results of a closed jaxpr.

        Raises AssertionError if an equation has another type than its value, and KeyError if a
        variable is read that no equation before defines.
        """
        if any(eqn.params and interpreter.read(eqn) for eqn in jaxpr.eqns):
            return self._run_bodies(jaxpr)
        env = dict(zip(jaxpr.invars, self.arguments, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self._of_content(value, var.aval)
        for eqn in jaxpr.eqns:
            operands = tuple(
                [self._of_literal(v) if type(v) is Literal else env[v] for v in eqn.invars]
            )
            for var, number in zip(eqn.outvars, self._equation(eqn, operands), strict=True):
                env[var] = number
                found, aval = self._types[number], var.aval
                assert found == (aval.shape, aval.dtype, aval.weak_type), f"{eqn} gives {found}"
        return [self._of_literal(v) if type(v) is Literal else env[v] for v in jaxpr.outvars]

    def _run_bodies(self, jaxpr: Any) -> list[int]:
        """Return the numbers of the results of a closed jaxpr with nested jaxprs."""

        def apply(eqn: Any, operands: Sequence[Any]) -> list[Any]:
            pairs = zip(operands, eqn.invars, strict=True)
            numbers = tuple([self._of_content(value, atom.aval) for value, atom in pairs])
            return [self._arrays[n] for n in self._equation(eqn, numbers)]

        given = [self._arrays[n] for n in self.arguments]
        results = interpreter.evaluate(jaxpr, given, apply)
        pairs = zip(results, jaxpr.outvars, strict=True)
        return [self._of_content(value, atom.aval) for value, atom in pairs]

    def bits(self, number: int) -> Any:
        """Return what rewrites must keep of a value: type and bits, with all NaNs equal."""
        if number not in self._bits:
            array = np.array(self._arrays[number])
            if array.dtype.kind in "fc":
                for part in (array.real, array.imag) if array.dtype.kind == "c" else (array,):
                    part[np.isnan(part)] = np.nan
            elif array.dtype.kind == "V":  # bfloat16 and other extension dtypes
                array = array.astype(np.float32)
                array[np.isnan(array)] = np.nan
            self._bits[number] = (*self._types[number], array.tobytes())
        return self._bits[number]

    def _equation(self, eqn: Any, operands: tuple[int, ...]) -> tuple[int, ...]:
        key = eqn.primitive, self._key(eqn.params), operands
        numbers = self._numbers.get(key)
        if numbers is None:
            is_weak = any(v.aval.weak_type for v in eqn.outvars)
            bind = interpreter.bind if is_weak else stepwise.bind
            results = bind(eqn, [self._arrays[n] for n in operands])
            numbers = self._numbers[key] = tuple(map(self._new, results))
        return numbers

    def _key(self, params: dict[str, Any]) -> Hashable:
        key = tuple(params.items())
        try:
            hash(key)
        except TypeError:
            self._kept.append(params)
            return id(params)
        return key

    def _of_literal(self, atom: Any) -> int:
        return self._of_content(atom.val, atom.aval)

    def _of_content(self, value: Any, aval: Any) -> int:
        """Return the number of a value by its elements."""
        array = np.asarray(value, aval.dtype)
        key = array.shape, aval.dtype, aval.weak_type, array.tobytes()
        number = self._contents.get(key)
        if number is None:
            whole = np.broadcast_to(array, self.lanes + array.shape)
            new = weakly_typed(whole) if aval.weak_type else jax.numpy.asarray(whole)
            number = self._contents[key] = self._new(new)
        return number

    def _new(self, array: Any) -> int:
        aval = jax.typeof(array)
        lanes = len(self.lanes)
        shape = aval.shape[lanes:] if aval.shape[:lanes] == self.lanes else aval.shape
        self._arrays.append(array)
        self._types.append((shape, aval.dtype, aval.weak_type))
        return len(self._arrays) - 1
