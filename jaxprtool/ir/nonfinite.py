"""What `jax_debug_nans` and `jax_debug_infs` ask for: NaNs and infinities in results are an error.

JAX checks the results of a jitted function and then runs it again, operation by operation, to find
the one that made the NaN. A jaxpr does not say where the function turned these checks off, so a
program is checked in the same way: its results first, and only then its equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import as_array
from jaxprtool.ir.equations import named
from jaxprtool.ir.interpret import Interpreter, bind, row_of
from jaxprtool.jaxcompat import AnyJaxpr, Aval, JaxprEqn, Var


@contextmanager
def unchecked() -> Iterator[None]:
    """Turn JAX's own checks off, which stop at a NaN that no result depends on."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@dataclass(frozen=True)
class FiniteCheck:
    """What is forbidden in results."""

    nans: bool
    infs: bool

    @classmethod
    def from_config(cls) -> FiniteCheck:
        """The check that JAX's switches ask for now."""
        return cls(jax.config.jax_debug_nans, jax.config.jax_debug_infs)

    def fault_among(
        self,
        jaxpr: AnyJaxpr,
        arguments: Sequence[tuple[str, Any]],
        results: Sequence[tuple[str, Any]],
    ) -> tuple[str, str] | None:
        """The name of the first result that has what is forbidden, and what it has, from where.

        To find the equation, the jaxpr runs again, one equation at a time.

        Args:
            jaxpr: The closed jaxpr that was run.
            arguments: Its arguments by name; of Refs what they held before it was run.
            results: Its results by name; traced values are not checked.
        """
        faults = [self.fault(result) for _, result in results]
        if not any(faults):
            return None
        given = []
        with unchecked():
            for (name, value), var in zip(arguments, jaxpr.invars, strict=True):
                array = value if hasattr(value, "dtype") else jnp.asarray(value)
                origin = f"the argument '{name}'" if self.fault(array) else ""
                if isinstance(var.aval, jaxcompat.AbstractRef):
                    array = jax.new_ref(array)
                given.append(_Value(array, origin))
            values = _Origins(self).run(jaxpr, given)
        triples = zip(results, faults, values, strict=True)
        (name, _), fault, value = next(triple for triple in triples if triple[1])
        origin = value.origin or "no single equation: run one by one, none makes it"
        return name, f"{fault}, from {origin}"

    def fault(self, value: object) -> str | None:
        """What is forbidden and in a value, or in what a Ref holds, in words, or None."""
        if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
            return None
        if isinstance(value, jax.Ref):
            value = value[...]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return None
        if self.nans and bool(jnp.isnan(value).any()):
            return "a NaN"
        return "an infinity" if self.infs and bool(jnp.isinf(value).any()) else None


@dataclass
class _Value:
    """A value, and what made the NaN or infinity in it, if there is one; in a Ref, later."""

    data: Any
    origin: str = ""


class _Origins(Interpreter):
    """A run that keeps where each NaN and infinity comes from."""

    def __init__(self, check: FiniteCheck):
        self._fault = check.fault

    def constant(self, value: object, aval: Aval) -> _Value:
        return _Value(value, "a constant" if self._fault(as_array(value)) else "")

    def concrete(self, value: _Value) -> Any:
        return value.data

    def row(self, value: _Value, i: int) -> _Value:
        return _Value(row_of(value.data, i), value.origin)

    def stack(self, rows: Sequence[_Value], var: Var) -> _Value:
        return _Value(super().stack([row.data for row in rows], var), _first(rows))

    def evaluate(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        results = bind(eqn, [operand.data for operand in operands])
        origin = _first(operands) or named(eqn)
        for operand in operands:
            if isinstance(operand.data, jax.Ref) and not operand.origin:
                operand.origin = origin if self._fault(operand.data) else ""
        return [_Value(x, origin if self._fault(x) else "") for x in results]


def _first(values: Sequence[_Value]) -> str:
    return next((value.origin for value in values if value.origin), "")
