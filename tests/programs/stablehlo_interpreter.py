"""Evaluate equations in StableHLO's reference interpreter, which compiles nothing.

A proof that runs each of many small equations a few times spends its time in XLA's compiler.
`interpret` replaces `interpreter.bind`: it lowers an equation as JAX does, once for each tuple of
operand types, and evaluates the result according to StableHLO's specification. It adds in the order
of the elements, so that padding with zeros does not change the rounding of a sum. XLA runs large
operations, and those that the interpreter lacks: its own calls, random bits, effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from tests.programs.interpreter import bind

#: XLA runs operations with more elements than this, or more steps of a product or a window. The
#: interpreter takes about a microsecond for each.
MOST_ELEMENTS = 2_000
MOST_STEPS = 10_000

#: The supported operations. At any other one, the interpreter aborts the process.
_OPERATIONS = frozenset(
    """
    abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil clamp compare complex
    concatenate constant convert convolution cosine count_leading_zeros divide dot_general
    dynamic_slice dynamic_update_slice exponential exponential_minus_one floor gather if imag
    iota is_finite log log_plus_one logistic maximum minimum multiply negate not
    optimization_barrier or pad popcnt power real reduce reduce_precision reduce_window
    remainder reshape return reverse round_nearest_afz round_nearest_even rsqrt scatter select
    select_and_scatter shift_left shift_right_arithmetic shift_right_logical sign sine slice sort
    sqrt subtract tan tanh transpose while xor
    """.split()  # noqa: SIM905
)

_DTYPES = frozenset(
    map(np.dtype, (bool, *"bBhHiIlLefdFD", jnp.bfloat16))  # NumPy's type codes
)

_LEGALIZE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
stablehlo.register_stablehlo_passes()


def interpret(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation: NumPy arrays, or JAX's if XLA ran it."""
    ins, outs = ([v.aval for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    if eqn.effects or not all(map(_is_plain, (*ins, *outs))):
        return bind(eqn, operands)
    try:
        types = tuple((aval.shape, aval.dtype) for aval in ins)
        params = tuple(sorted(eqn.params.items()))
        module = _module(eqn.primitive, params, types, bool(jax.config.jax_enable_x64))
    except TypeError:  # a parameter is not hashable
        module = None
    if module is None:
        return bind(eqn, operands)
    values = [np.asarray(x, dtype) for x, (_, dtype) in zip(operands, types, strict=True)]
    found = _evaluated(module, values)
    return [_read(found, aval) for aval in outs]


def _is_plain(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in _DTYPES and prod(aval.shape) <= MOST_ELEMENTS


@lru_cache(maxsize=300)  # each context takes a megabyte
def _module(primitive: Any, params: Any, types: Any, x64: bool) -> Any | None:
    """Return an equation in StableHLO. None if the interpreter does not support all operations."""

    def function(*operands: Any) -> Any:
        results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
        return [_readable(x) for x in (results if primitive.multiple_results else [results])]

    structs = [jax.ShapeDtypeStruct(*each) for each in types]
    module = jax.jit(function, keep_unused=True).lower(*structs).compiler_ir()
    with module.context:
        PassManager.parse(_LEGALIZE).run(module.operation)
    return module if all(map(_is_known, _operations(module.operation))) else None


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for each in block:
                yield each.operation
                yield from _operations(each.operation)


def _is_known(operation: Any) -> bool:
    dialect, _, name = operation.name.partition(".")
    return dialect == "func" or (
        dialect == "stablehlo" and name in _OPERATIONS and _CONDITIONS.get(name, bool)(operation)
    )


def _of_floats(operation: Any) -> bool:
    """Return True if no integer is divided by zero, which aborts the process."""
    return not isinstance(operation.results[0].type.element_type, ir.IntegerType)


def _real_power(operation: Any) -> bool:
    """Return True if the power is real. For complex zero, XLA returns NaN on JAX 0.10."""
    element = operation.results[0].type.element_type
    return _of_floats(operation) and not isinstance(element, ir.ComplexType)


def _in_order(operation: Any) -> bool:
    """Return True if no NaN is compared or sorted: the interpreter orders NaN differently."""
    attributes = operation.attributes
    return "compare_type" not in attributes or "TOTAL" not in str(attributes["compare_type"])


def _product(operation: Any) -> bool:
    """Return True if a product is small, of one type, and not empty, which aborts the process."""
    types = [ir.RankedTensorType(x.type) for x in (*operation.operands, *operation.results)]
    steps = prod(types[2].shape) * prod(types[1].shape)
    return 0 < steps <= MOST_STEPS and len({str(t.element_type) for t in types}) == 1


def _convolution(operation: Any) -> bool:
    """Return True if a convolution is small, with the batch before the features.

    Other layouts may abort the process.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    in_order = numbers.output_batch_dimension < numbers.output_feature_dimension
    return in_order and _product(operation)


def _windows(operation: Any) -> bool:
    """Return True if windows are small."""
    window = ir.DenseI64ArrayAttr(operation.attributes["window_dimensions"])
    return prod(ir.RankedTensorType(operation.results[0].type).shape) * prod(window) <= MOST_STEPS


#: The condition under which the interpreter supports an operation.
_CONDITIONS = {
    "divide": _of_floats,
    "remainder": _of_floats,
    "power": _real_power,
    "compare": _in_order,
    "convolution": _convolution,
    "dot_general": _product,
    "reduce_window": _windows,
}


def _evaluated(module: Any, values: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    main = next(f for f in module.body.operations if f.name.value == "main")
    with module.context:
        attributes = [
            ir.DenseElementsAttr.get(
                np.ascontiguousarray(x), type=ir.RankedTensorType(type_).element_type, shape=x.shape
            )
            for x, type_ in zip(values, main.type.inputs, strict=True)
        ]
        return iter([np.array(x) for x in stablehlo.eval_module(module, attributes)])


def _readable(x: Any) -> Any:
    """Return a value with types that NumPy can read from MLIR's attributes."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.real, x.imag
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def _read(found: Iterator[np.ndarray], aval: Any) -> np.ndarray:
    """Return the next value, which `_readable` may have split."""
    if not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return next(found).astype(aval.dtype, copy=False)
    value = np.empty(aval.shape, aval.dtype)
    value.real, value.imag = next(found), next(found)
    return value
