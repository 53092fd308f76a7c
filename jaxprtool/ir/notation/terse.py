"""JAX's notation in short: without default values of parameters, and with long values cut.

split[axis=0 sizes=(3, 4)]            of JAX's split[axis=0 sizes=(np.int64(3), np.int64(4))]
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

from jaxprtool.ir.notation.signatures import Notation, Signature
from jaxprtool.jaxcompat import JaxprEqn

#: The maximum length of a parameter's value.
_LONGEST = 100

_NUMPY_SCALAR = re.compile(r"\bnp\.(?:u?int|float)\d+\(([^()]*)\)")


class TerseNotation(Notation):
    """Writes equations without parameters at their defaults: None, known flags, steps of one.

    A longer value of a parameter is cut in its middle, and NumPy's numbers are written as Python's.

    Args:
        whole: Whether to write values as they are.
    """

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self._whole = whole

    def text(self, value: object) -> str:
        """Return the text of a parameter's value that is not a jaxpr."""
        if self._whole:
            return super().text(value)
        text = _NUMPY_SCALAR.sub(r"\1", super().text(value))
        if len(text) <= _LONGEST:
            return text
        half = (_LONGEST - 1) // 2
        return self._noted(f"{text[:half]}…{text[-half:]}")

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key for the primitive, and for the dtype, which a default may depend on."""
        return (*super().context_key(eqn), _result_dtype(eqn))

    def _make(self, eqn: JaxprEqn) -> Signature:
        whole = super()._make(eqn)
        pairs = [
            (name, value)
            for name, value in whole.pairs
            if not _is_default(name.removesuffix("="), eqn)
        ]
        if len(pairs) == len(whole.pairs):
            return whole
        return Signature(whole.name, pairs, whole.called, whole.by_rule, whole.named_by_call)


#: The defaults of parameters with two values. All other parameters are written, since the default
#: of one primitive may not be that of another.
_BOOLEANS = {
    "compute_left_eigenvectors": True,
    "compute_right_eigenvectors": True,
    "compute_uv": True,
    "conjugate_a": False,
    "full_matrices": True,
    "indices_are_sorted": False,
    "is_stable": True,
    "prevent_cse": True,
    "reverse": False,
    "symbolic_zeros": False,
    "symmetrize_input": True,
    "transpose_a": False,
    "unique_indices": False,
    "unit_diagonal": False,
    "weak_type": False,
}

#: Parameters that are numbers, or tuples of numbers, and are one by default.
_ONE = {
    "base_dilation",
    "batch_group_count",
    "feature_group_count",
    "lhs_dilation",
    "rhs_dilation",
    "strides",
    "unroll",
    "window_dilation",
    "window_strides",
}


def _is_default(name: str, eqn: JaxprEqn) -> bool:
    value = eqn.params.get(name, ...)
    if isinstance(value, bool):
        return value is _BOOLEANS.get(name)
    if name == "preferred_element_type":
        return value is None or value == _result_dtype(eqn)
    if name in _ONE:
        return value is None or _numbers(value) == {1}
    if name == "padding":
        return isinstance(value, tuple) and _numbers(value) == {0}
    if name == "linear":
        return isinstance(value, tuple) and not any(value)
    return value is None


def _numbers(value: Any) -> set[Any]:
    """Return the numbers in a number, or in a tuple of tuples of numbers."""
    if not isinstance(value, tuple):
        return {value}
    return set().union(*map(_numbers, value))


def _result_dtype(eqn: JaxprEqn) -> Any:
    return getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
