"""The traits of primitives: the one table of properties that passes look up by primitive.

`traits(eqn)` returns the `Traits` of an equation's primitive. A primitive that is not in the table
has the defaults. They suit a pure function of its operands about which nothing else is known. A
plug-in adds the traits of its own primitives with `add_traits`.

The treatment of a primitive by one pass (a batching rule, an expression in Python) is a rule, in
that pass's table of rules (`ir.rules`), not here.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import clear_caches
from jaxprtool.ir.dtypes import dtype_kind
from jaxprtool.ir.rules import load_rules_of
from jaxprtool.jaxcompat import CALL_HIGH, DType, JaxprEqn


@dataclass(frozen=True)
class Traits:
    """The traits of one primitive.

    Attributes:
        commutative: The kinds of dtypes (`np.dtype.kind`; "V" for the small floats of ML, "E" for
            extended dtypes) for which the two operands may be exchanged. The result is then the
            same number, up to the rounding of the last bit, the sign of a zero, and subnormal
            numbers that a backend treats as zero.
        commutative_bits: The kinds for which the exchange changes no bit of the result, except the
            bits of a NaN.
        broadcasts: Takes two operands, and broadcasts scalars and dimensions of size 1 itself.
        neutral: The number that returns the first operand if it is the second; if the primitive is
            commutative, it also returns the second if it is the first.
        shape_exact: Computes each element from the elements of the operands at the same position,
            with the same bits in an array of any shape. XLA's `exp`, `log` and `tanh` round
            differently in another shape.
        elementwise: Computes each element of its results from the elements of the operands at the
            same position; an operand of rank 0 is broadcast.
        bilinear: Is linear in each of its two operands, and sums over axes of both.
        keeps_finite: Returns a NaN only if an operand has one, and an infinity only if an operand
            has one, or a NaN.
        keeps_nonfinite: Returns a NaN or an infinity if an operand has one, unless its result is
            empty or has another kind of dtype.
        finite_between: The open interval of values of its first operand for which the result is
            finite; None if it is finite for every number.
        stops_derivative: Its result has no derivative, or one that is zero everywhere.
        gives: The relation of the result to the first operand. "same": the operand itself;
            "layout": all its elements, in another shape or order, or repeated; "part": some of its
            elements; "cast": its elements in another precision.
        moves: Only moves, repeats or generates elements. A compiler fuses it with the readers of
            its result.
        updates: Returns its first operand with some elements replaced. A compiler updates that
            array in place if nothing else needs it.
        joins: Joins its operands along the axis in its parameter `dimension` or `axis`.
        branches: Its code has branches, so that a compiler does not repeat it in one kernel.
        fills: Expands a small value to a large array. Computing it is as cheap as reading a
            constant.
        reduces: Combines elements along axes.
        narrows: May compute in a narrower float dtype, with the same parameters. It accumulates
            nothing, or a backend accumulates in a wider dtype.
        absorbs: The dtypes for which it is a reduction that XLA's CPU kernels fuse with its
            operands: with `absorbed` equations that nothing else reads.
        absorbed: Is fused by XLA's CPU kernels into an `absorbs` reduction that alone reads it, so
            that its result is not written to memory.
        expensive: Costs far more than reading its result.
        opaque: Runs a kernel, or an algorithm of a library. Which units of a device compute it is
            unknown.
        costly: Is elementwise, but so expensive that a compiler stores its result instead of
            recomputing it.
        floats_of_complex: The number of arrays of floats that XLA stores to compute it on complex
            numbers.
        may_merge: Two equations with equal operands and parameters, and without effects, may be
            merged. An equation that may not be merged may not be hoisted or folded either.
        may_hoist: An equation may be moved out of a loop in which its operands are constant.
        may_fold: An equation may be computed ahead of time, on another device, if its operands are
            known.
        may_outline: An equation may be moved into a call, if it has no effects.
        collective: Communicates over a mesh axis.
        draws: Draws random bits or numbers from a key.
        key_words: The number of leading operands that are the words of one random key.
        callback: Calls a Python function on the host while the program runs.
        names_value: Returns its operand under the name in its parameter `name`.
        call: The kind of call, as in the option `calls` of `inline`: "jit", "custom_jvp", …. Empty
            if the primitive is not a call.
        custom_derivative: A call with its own derivative rule, held as a Python function.
        holds_constants: Its bodies are closed jaxprs that may have constants of their own.
        ends_ref: Frees the ref that is its first operand.
        transposes_integers: JAX also transposes it for integers, if it is linear.
        parameters: The parameters that say what it computes, such as `axes`. Each rule about the
            primitive handles them. All others are options, such as `out_dtype` and `reverse`.
        defaults: The options whose default is neither None nor False, each with its default.
    """

    commutative: str = ""
    commutative_bits: str = ""
    broadcasts: bool = False
    neutral: float | None = None
    shape_exact: bool = False
    elementwise: bool = False
    bilinear: bool = False
    keeps_finite: bool = False
    keeps_nonfinite: bool = False
    finite_between: tuple[float, float] | None = None
    stops_derivative: bool = False
    gives: Literal["", "same", "layout", "part", "cast"] = ""
    moves: bool = False
    updates: bool = False
    joins: bool = False
    branches: bool = False
    fills: bool = False
    reduces: bool = False
    narrows: bool = False
    absorbs: tuple[str, ...] = ()
    absorbed: bool = False
    expensive: bool = False
    opaque: bool = False
    costly: bool = False
    floats_of_complex: int = 0
    may_merge: bool = True
    may_hoist: bool = True
    may_fold: bool = True
    may_outline: bool = True
    collective: bool = False
    draws: bool = False
    key_words: int = 0
    callback: bool = False
    names_value: bool = False
    call: str = ""
    custom_derivative: bool = False
    holds_constants: bool = False
    ends_ref: bool = False
    transposes_integers: bool = True
    parameters: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    def commutes(self, dtype: DType, *, to_the_bit: bool = False) -> bool:
        """Return True if two operands of a dtype may be exchanged."""
        return dtype_kind(dtype) in (self.commutative_bits if to_the_bit else self.commutative)


_table: dict[str, Traits] = {}
_UNKNOWN = Traits()

#: The rows that have been looked up.
_known: dict[str, Traits] = {}


def traits(primitive: JaxprEqn | str) -> Traits:
    """Return the traits of a primitive.

    Args:
        primitive: An equation, or the name of a primitive.

    Returns:
        Its row of the table. A primitive without a row, in the table or in an installed plug-in
        that the entry-point group `jaxprtool.primitives` lists for it, has the defaults.

    Raises:
        PluginError: If the plug-in cannot be imported.
    """
    name = primitive if isinstance(primitive, str) else primitive.primitive.name
    try:
        return _known[name]
    except KeyError:
        if name not in _table:
            load_rules_of(name)
        return _known.setdefault(name, _table.get(name, _UNKNOWN))


def add_traits(*primitives: str, **changes: Any) -> None:
    """Set traits of primitives.

    If they have been looked up before, jaxprtool's caches are cleared.

    Args:
        primitives: The names of the primitives.
        changes: Fields of `Traits`, added to those that have been set before.
    """
    if changes.get("may_merge") is False:
        changes = {"may_hoist": False, "may_fold": False, **changes}
    for name in primitives:
        _table[name] = replace(_table.get(name, _UNKNOWN), **changes)
        if _known.pop(name, None) is not None:
            clear_caches()


def nondefault_options(eqn: JaxprEqn) -> frozenset[str]:
    """Return the optional parameters of an equation that are not at their defaults.

    A rule that knows nothing about one of them must not be applied to the equation: it may change
    what the primitive computes. An option that JAX adds in a later release is among them, and so
    are the parameters of a plug-in's primitive that its traits do not list.
    """
    row = traits(eqn)
    parameters, defaults = row.parameters, dict(row.defaults) if row.defaults else {}
    changed = _NO_OPTIONS
    for name, value in eqn.params.items():  # written for speed: it runs for each match of a row
        if name not in parameters:
            default = defaults.get(name)
            if (value is not None and value is not False) if default is None else value != default:
                changed |= {name}
    return changed


_NO_OPTIONS: frozenset[str] = frozenset()


def described_traits(primitive: str) -> dict[str, tuple[Any, str]]:
    """Return the traits of a primitive that are not the defaults, each with its description."""
    text = inspect.cleandoc(Traits.__doc__ or "").partition("Attributes:\n")[2]
    descriptions = dict(re.findall(r"^ *(\w+): (.*)$", re.sub(r"\n {6,}", " ", text), re.MULTILINE))
    values = {field.name: getattr(traits(primitive), field.name) for field in fields(Traits)}
    return {
        name: (value, descriptions[name])
        for name, value in values.items()
        if value != getattr(_UNKNOWN, name)
    }


def primitives_with(condition: Callable[[Traits], bool]) -> tuple[str, ...]:
    """Return the names of the primitives in the table whose traits meet a condition."""
    return tuple(name for name, entry in _table.items() if condition(entry))


# --- arithmetic -----------------------------------------------------------------------------------

# Products of complex numbers may be contracted to fused operations, which round the two orders
# differently. `max` and `min` return the first of two floats that compare equal: 0.0 and -0.0, or
# subnormal numbers that the backend flushes to zero. Complex numbers are ordered by comparisons, so
# their `max` and `min` with a NaN depend on the order too.
add_traits("add", "add_any", commutative="iufcV", commutative_bits="iufcV")
add_traits("mul", commutative="iufcV", commutative_bits="iufV")
add_traits("max", "min", commutative="biufV", commutative_bits="biu")
add_traits("and", "or", "xor", commutative="biu", commutative_bits="biu")
add_traits("eq", "ne", commutative="biufcVE", commutative_bits="biufcV")
add_traits("add", "sub", neutral=0.0)
add_traits("mul", "div", neutral=1.0)
add_traits("max", neutral=-math.inf)
add_traits("min", neutral=math.inf)

add_traits(
    *("add", "and", "atan2", "complex", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul"),
    *("ne", "nextafter", "or", "pow", "rem", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sub", "xor"),
    broadcasts=True,
)
add_traits(
    *("abs", "add", "and", "ceil", "complex", "conj", "convert_element_type", "div", "eq", "floor"),
    *("ge", "gt", "imag", "integer_pow", "is_finite", "le", "lt", "max", "min", "mul", "ne"),
    *("nextafter", "not", "or", "real", "rem", "round", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sqrt", "square", "sub", "xor"),
    shape_exact=True,
)
add_traits(
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
    *("convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a"),
    *("igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p"),
    *("log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg"),
    *("nextafter", "not", "one_minus_square", "optimization_barrier", "or", "polygamma"),
    *("polynomial", "population_count", "pow"),
    *("real", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt"),
    *("select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"),
    *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "tie", "xor", "zeta"),
    elementwise=True,
)
add_traits(
    *("abs", "atan", "broadcast_in_dim", "ceil", "clamp", "concatenate", "conj", "copy", "cummax"),
    *("cummin", "device_put", "dynamic_slice", "dynamic_update_slice", "erf", "erfc", "floor"),
    *("imag", "logistic", "max", "min", "name", "neg", "optimization_barrier", "pad", "pvary"),
    *(
        "real",
        "reshape",
        "rev",
        "round",
        "select_n",
        "sharding_constraint",
        "sign",
        "slice",
        "sort",
    ),
    *("split", "squeeze", "stop_gradient", "tanh", "tie", "tile", "transpose"),
    keeps_finite=True,
)
add_traits("cos", "iota", "scatter", "scatter-max", "scatter-min", "sin", keeps_finite=True)
add_traits(
    *("abs", "add", "add_any", "broadcast_in_dim", "concatenate", "copy", "cumsum", "dot_general"),
    *("mul", "neg", "reduce_sum", "reshape", "rev", "square", "squeeze", "sub", "transpose"),
    keeps_nonfinite=True,
)
add_traits(
    *("digamma", "lgamma", "log", "pow", "rsqrt", "sqrt"),
    finite_between=(0.0, math.inf),
)
add_traits("log1p", finite_between=(-1.0, math.inf))
add_traits("acosh", finite_between=(1.0, math.inf))
add_traits("acos", "asin", "atanh", "erf_inv", finite_between=(-1.0, 1.0))
add_traits(
    *("abs", "acos", "acosh", "add", "add_any", "argmax", "argmin", "asin", "asinh", "atan"),
    *("atan2", "atanh", "broadcast_in_dim", "broadcast_to", "cbrt", "ceil", "clamp"),
    *("concatenate", "conv_general_dilated", "convert_element_type", "copy", "cos", "cosh", "div"),
    *("dot_general", "dynamic_slice", "dynamic_update_slice", "eq", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "floor", "gather", "ge", "gt", "integer_pow", "is_finite", "le"),
    *("log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "pad"),
    *("pow", "reduce_max", "reduce_min", "rem", "reshape", "rev", "round", "rsqrt", "select_n"),
    *("sharding_constraint", "sign", "sin", "sinh", "slice", "split", "sqrt", "square"),
    *("squeeze", "stop_gradient", "sub", "tan", "tanh", "tile", "transpose", "unstack"),
    narrows=True,
)
add_traits("ceil", "floor", "round", "sign", "stop_gradient", stops_derivative=True)
add_traits("dot_general", bilinear=True)
add_traits(
    *("conv_general_dilated", "dot_general", "fft", "ragged_dot_general", "scaled_dot"),
    *("scaled_matmul", "symmetric_product", "triangular_solve"),
    expensive=True,
)
add_traits(
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
    *("householder_product", "lu", "ormqr", "qr", "schur", "svd", "tridiagonal"),
    opaque=True,
)
add_traits(
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma"),
    *("div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p"),
    *("logistic", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
    costly=True,
)
add_traits("gather", costly=True)
add_traits("acos", "asin", "asinh", floats_of_complex=7)
add_traits("acosh", floats_of_complex=8)
add_traits("sqrt", floats_of_complex=2)
add_traits(
    *("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce"),
    *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"),
    *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_xor"),
    *("sort", "top_k"),
    reduces=True,
)
add_traits("reduce_sum", absorbs=("float32", "float64"))
add_traits("reduce_max", "reduce_min", absorbs=("bfloat16", "float32", "float64"))
# If one of these is compiled alone with a sum on the CPU, XLA does not store its result. It stores
# those of comparisons, slices, `select_n`, `cbrt`, `is_finite`, `asin` and `atan2`.
add_traits(
    *("abs", "add", "add_any", "broadcast_in_dim", "ceil", "convert_element_type", "div"),
    *("dot_general", "erf", "exp", "exp2", "expm1", "floor", "integer_pow", "iota", "log", "log1p"),
    *("logistic", "max", "min", "mul", "neg", "pow", "reduce_max", "reduce_min", "reduce_sum"),
    *("reshape", "round", "rsqrt", "sign", "sqrt", "square", "squeeze", "sub", "tanh"),
    "transpose",
    absorbed=True,
)
if jaxcompat.fuses_sines_and_pads():
    add_traits("cos", "pad", "sin", "tan", absorbed=True)
# JAX treats conversions of integers as constant, and does not transpose products that keep them.
add_traits(
    *("convert_element_type", "dot_general", "conv_general_dilated"), transposes_integers=False
)


# --- data movement --------------------------------------------------------------------------------

add_traits(
    *("broadcast_in_dim", "broadcast_to", "reshape", "rev", "squeeze", "tile", "transpose"),
    # Change only the type: the mesh axes over which a value varies.
    *("pvary", "reduced_vary_cast", "reduced_vary_cast_p"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p"),
    gives="layout",
    moves=True,
)
add_traits("slice", "dynamic_slice", "split", "unstack", gives="part", moves=True)
add_traits("gather", gives="part")
add_traits(
    *("dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min"),
    *("scatter-mul", "scatter-sub"),
    updates=True,
)
add_traits("name", "stop_gradient", gives="same", moves=True)
add_traits("convert_element_type", "reduce_precision", gives="cast")
add_traits("bitcast_convert_type", "concatenate", "pad", "stack", moves=True)
add_traits("concatenate", "stack", joins=True)
add_traits("concatenate", "dynamic_update_slice", "pad", "stack", branches=True)
add_traits("random_clone", "random_unwrap", "random_wrap", moves=True)
add_traits("iota", "iota_2x32_shape", moves=True)
add_traits("iota", "broadcast_in_dim", "broadcast_to", "tile", fills=True)
add_traits("name", "sow", names_value=True)
# Barriers that keep computations or copies apart.
add_traits("copy", gives="layout", may_merge=False)
add_traits("optimization_barrier", gives="same", may_merge=False)
add_traits("device_put", "tie", "pin", "unpin", may_merge=False)
# These state the placement or kind of a value, and may not be moved to another value.
add_traits("sharding_constraint", gives="same")
add_traits(
    *("inspect_sharding", "layout_constraint", "relayout", "reshard", "sharding_constraint"),
    "with_memory_space_constraint",
    may_hoist=False,
    may_fold=False,
)
add_traits("name", "pvary", may_fold=False)


# --- randomness, state, and the outside -----------------------------------------------------------

add_traits("random_bits", "random_gamma", "rng_bit_generator", "threefry2x32", draws=True)
add_traits("random_bits", "rng_bit_generator", "threefry2x32", expensive=True)
add_traits("random_wrap", "rng_bit_generator", key_words=1)
add_traits("threefry2x32", key_words=2)
# Their results differ from call to call, have an identity, or are counted.
add_traits("after_all", "create_token", "rng_uniform", "sow", may_merge=False)
add_traits(
    *("create_linear", "empty", "empty2", "empty_ref", "new_box", "new_log"), may_merge=False
)
add_traits("free_ref", "freeze", ends_ref=True)
add_traits("freeze", moves=True)
add_traits("run_state", may_fold=False)
add_traits("debug_callback", "debug_print", "io_callback", "pure_callback", callback=True)
add_traits("debug_callback", "debug_print", "io_callback", may_hoist=False)
add_traits("pure_callback", may_merge=False)
add_traits(
    *("create_token", "debug_callback", "debug_print", "io_callback", "pure_callback"),
    *("rng_uniform", "sow", CALL_HIGH),
    may_outline=False,
)
# Code outside of JAX, and values that depend on the machine.
add_traits(
    *("call_exported", "call_hi_primitive_linearized", "custom_partitioning", "ffi_call"),
    *("pallas_call", "shard_map"),
    may_hoist=False,
    may_fold=False,
)
add_traits("ffi_call", "pallas_call", "tpu_custom_call", opaque=True)
add_traits(CALL_HIGH, "core_map", "remat_opt", "stage", "tpu_custom_call", may_hoist=False)
add_traits(
    *("axis_index", "composite", "custom_lin", "dim_as_value", "dimension_size", "linear_call"),
    *("platform_index", "shape_assertion"),
    may_fold=False,
)


def _with_asynchronous(*names: str) -> list[str]:
    """Return the names of collectives, each with its asynchronous start and done."""
    return [f"{name}{half}" for name in names for half in ("", "_start", "_done")]


add_traits(
    *_with_asynchronous("all_gather", "all_gather_reduced", "all_to_all", "pbroadcast", "ppermute"),
    *_with_asynchronous("psum", "psum_invariant", "reduce_scatter"),
    *_with_asynchronous("unreduced_psum", "unreduced_reduce_scatter"),
    *("all_gather_invariant", "pbroadcast_dynamic", "pgather", "pmax", "pmin", "preduced"),
    *("ragged_all_to_all", "unreduced_pmax", "unreduced_pmin"),
    collective=True,
    may_hoist=False,
)
add_traits("precv", "psend", collective=True, may_merge=False)


# --- calls, loops and branches --------------------------------------------------------------------

add_traits("jit", call="jit", holds_constants=True)
add_traits("call", call="closed_call")
add_traits("closed_call", "eval_jaxpr", call="closed_call", holds_constants=True)
add_traits("custom_jvp_call", call="custom_jvp", custom_derivative=True)
add_traits("custom_vjp_call", call="custom_vjp", custom_derivative=True)
add_traits("custom_vmap_call", call="custom_vmap")
add_traits("remat2", call="remat", may_merge=False)
add_traits(CALL_HIGH, custom_derivative=True)
add_traits("cond", "scan", holds_constants=True)
# The bodies of `while` may not: JAX does not run such a loop if one of its constants is a ref.
add_traits("while", may_fold=False)


# --- parameters -----------------------------------------------------------------------------------


def _add_parameters(*primitives: str, names: str, **defaults: Any) -> None:
    add_traits(*primitives, parameters=tuple(names.split()), defaults=tuple(defaults.items()))


_add_parameters("bitcast_convert_type", names="new_dtype")
_add_parameters("broadcast_in_dim", names="shape broadcast_dimensions")
_add_parameters("concatenate", names="dimension")
_add_parameters("conj", names="input_dtype")
_add_parameters("convert_element_type", names="new_dtype weak_type")
_add_parameters("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", names="axis")
_add_parameters("dot_general", names="dimension_numbers")
_add_parameters("dynamic_slice", names="slice_sizes")
_add_parameters("integer_pow", names="y")
_add_parameters("iota", names="dtype shape dimension")
_add_parameters("pad", names="padding_config")
_add_parameters("reduce_and", "reduce_max", "reduce_min", "reduce_or", names="axes")
_add_parameters("reduce_prod", "reduce_sum", "reduce_xor", names="axes")
_add_parameters("reduce_precision", names="exponent_bits mantissa_bits")
_add_parameters("reshape", names="new_sizes")
_add_parameters("rev", "squeeze", names="dimensions")
_add_parameters("round", names="rounding_method")
_add_parameters("slice", names="start_indices limit_indices strides")
_add_parameters("sort", names="dimension num_keys", is_stable=True)
_add_parameters("split", names="sizes axis")
_add_parameters("transpose", names="permutation")
