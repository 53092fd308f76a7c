"""One example of each rule of `simplify`: a function to which it applies, by the rule's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

#: The dtypes of the arguments by one letter.
DTYPES: dict[str, tuple[str, ...]] = {"f": ("float32",), "i": ("int32",), "b": ("bool",)}
DTYPES |= {"c": ("complex64",), "u": ("uint8",), "h": ("bfloat16",)}


@dataclass(frozen=True)
class Example:
    """A function of arguments of these shapes, to which the rule applies.

    `kinds` are the dtypes it applies to exactly, `fast` those it applies to only with `fast`.
    """

    fun: Callable[..., Any]
    kinds: str = ""
    fast: str = ""
    shapes: tuple[tuple[int, ...], ...] = ((144,),)
    #: Returns the primitive and parameters to replace `copy` by, if JAX does not trace them.
    for_copy: Callable[[Any], tuple[Any, dict[str, Any]]] | None = None


def _of(x: Any, value: Any) -> Any:
    """Return a constant of the dtype of x, as an operand that JAX does not fold."""
    return np.asarray(value, x.dtype)


def _two(fun: Callable[..., Any], kinds: str = "", fast: str = "") -> Example:
    return Example(fun, kinds, fast, ((144,), (144,)))


def _bound(x: Any, *, least: bool) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _of(x, -np.inf if least else np.inf)
    return _of(x, (jnp.iinfo(x.dtype).min if least else jnp.iinfo(x.dtype).max))


def _all_bits(x: Any) -> Any:
    return _of(x, True) if x.dtype == jnp.bool_ else ~_of(x, 0)


def _add_any(x: Any, y: Any) -> Any:
    return primitives.add_jaxvals_p.bind(x, y)


def _c(fun: Callable[..., Any], value: Any) -> Callable[..., Any]:
    return lambda x: fun(x, _of(x, value))


def _broadcast(x: Any, shape: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(x, shape, dims)


BIT = {"or": lax.bitwise_or, "and": lax.bitwise_and, "xor": lax.bitwise_xor}

EXAMPLES: dict[str, Example] = {
    # --- elementwise
    "mul(x, 1) → x": Example(_c(lax.mul, 1), "fi"),
    "div(x, 1) → x": Example(_c(lax.div, 1), "fi"),
    "sub(x, 0) → x": Example(_c(lax.sub, 0), "fic"),
    "add(x, -0) → x": Example(_c(lax.add, -0.0), "f"),
    "add_any(x, -0) → x": Example(lambda x: _add_any(x, _of(x, -0.0)), "f", shapes=((),)),
    "add(x, 0) → x": Example(_c(lax.add, 0), "i", "f"),
    "add_any(x, 0) → x": Example(lambda x: _add_any(x, _of(x, 0)), "", "f", ((),)),
    "sub(x, -0) → x": Example(_c(lax.sub, -0.0), "", "f"),
    "or(x, 0) → x": Example(_c(BIT["or"], 0), "iub"),
    "xor(x, 0) → x": Example(_c(BIT["xor"], 0), "ib"),
    "and(x, ~0) → x": Example(lambda x: lax.bitwise_and(x, _all_bits(x)), "iub"),
    "shift_left(x, 0) → x": Example(_c(lax.shift_left, 0), "i"),
    "shift_right_arithmetic(x, 0) → x": Example(_c(lax.shift_right_arithmetic, 0), "i"),
    "shift_right_logical(x, 0) → x": Example(_c(lax.shift_right_logical, 0), "i"),
    "pow(x, 1) → x": Example(_c(lax.pow, 1), "f"),
    "integer_pow(x) → x": Example(lambda x: primitives.integer_pow_p.bind(x, y=1), "fic"),
    "integer_pow(neg(x)) → integer_pow(x)": Example(lambda x: lax.integer_pow(-x, 4), "fi"),
    "square(neg(x)) → square(x)": Example(lambda x: lax.square(-x), "fi"),
    "max(x, C) → x": Example(lambda x: lax.max(x, _bound(x, least=True)), "i", "f"),
    "min(x, C) → x": Example(lambda x: lax.min(x, _bound(x, least=False)), "i", "f"),
    "clamp(C, x, D) → x": Example(
        lambda x: lax.clamp(_bound(x, least=True), x, _bound(x, least=False)), "i", "f"
    ),
    "max(x, x) → x": Example(lambda x: lax.max(x, x), "ib", "f"),
    "min(x, x) → x": Example(lambda x: lax.min(x, x), "ib", "f"),
    "neg(neg(x)) → x": Example(lambda x: lax.neg(lax.neg(x)), "fic"),
    "add(x, neg(y)) → sub(x, y)": _two(lambda x, y: lax.add(x, -y), "fic"),
    "add_any(x, neg(y)) → sub(x, y)": _two(lambda x, y: _add_any(x, -y), "fc"),
    "sub(x, neg(y)) → add(x, y)": _two(lambda x, y: lax.sub(x, -y), "fic"),
    "mul(x, -1) → neg(x)": Example(_c(lax.mul, -1), "f"),
    "div(x, -1) → neg(x)": Example(_c(lax.div, -1), "f"),
    "mul(neg(x), C) → mul(x, -C)": Example(lambda x: lax.mul(-x, _of(x, 3)), "fi"),
    "div(neg(x), C) → div(x, -C)": Example(lambda x: lax.div(-x, _of(x, 3)), "f"),
    "div(C, neg(x)) → div(-C, x)": Example(lambda x: lax.div(_of(x, 3), -x), "f"),
    "neg(mul(x, C)) → mul(x, -C)": Example(lambda x: -lax.mul(x, _of(x, 3)), "fi"),
    "neg(div(x, C)) → div(x, -C)": Example(lambda x: -lax.div(x, _of(x, 3)), "f"),
    "neg(div(C, x)) → div(-C, x)": Example(lambda x: -lax.div(_of(x, 3), x), "f"),
    "mul(neg(x), neg(y)) → mul(x, y)": _two(lambda x, y: lax.mul(-x, -y), "fi"),
    "div(neg(x), neg(y)) → div(x, y)": _two(lambda x, y: lax.div(-x, -y), "f"),
    "neg(sub(x, y)) → sub(y, x)": _two(lambda x, y: -lax.sub(x, y), "i", "f"),
    "abs(neg(x)) → abs(x)": Example(lambda x: lax.abs(-x), "f"),
    "abs(abs(x)) → abs(x)": Example(lambda x: lax.abs(lax.abs(x)), "fi"),
    "sign(sign(x)) → sign(x)": Example(lambda x: lax.sign(lax.sign(x)), "fi"),
    "not(not(x)) → x": Example(lambda x: lax.bitwise_not(lax.bitwise_not(x)), "ib"),
    "conj(conj(x)) → x": Example(lambda x: lax.conj(lax.conj(x)), "c"),
    "real(complex(x, y)) → x": _two(lambda x, y: lax.real(lax.complex(x, y)), "f"),
    "imag(complex(y, x)) → x": _two(lambda x, y: lax.imag(lax.complex(x, y)), "f"),
    "complex(real(x), imag(x)) → x": Example(lambda x: lax.complex(lax.real(x), lax.imag(x)), "c"),
    "real(conj(x)) → real(x)": Example(lambda x: lax.real(lax.conj(x)), "c"),
    "floor(floor(x)) → floor(x)": Example(lambda x: lax.floor(lax.floor(x)), "f"),
    "ceil(ceil(x)) → ceil(x)": Example(lambda x: lax.ceil(lax.ceil(x)), "f"),
    "round(round(x)) → round(x)": Example(lambda x: lax.round(lax.round(x)), "f"),
    "stop_gradient(stop_gradient(x)) → stop_gradient(x)": Example(
        lambda x: primitives.stop_gradient_p.bind(primitives.stop_gradient_p.bind(x)), "f"
    ),
    "stop_gradient(x) → x": Example(lambda x: primitives.stop_gradient_p.bind(x), "i"),
    "and(x, x) → x": Example(lambda x: lax.bitwise_and(x, x), "ib"),
    "or(x, x) → x": Example(lambda x: lax.bitwise_or(x, x), "ib"),
    "xor(x, x) → 0": Example(lambda x: lax.bitwise_xor(x, x), "ib"),
    "and(x, 0) → 0": Example(_c(BIT["and"], 0), "ib"),
    "or(x, ~0) → ~0": Example(lambda x: lax.bitwise_or(x, _all_bits(x)), "iub"),
    "mul(x, 0) → 0": Example(_c(lax.mul, 0), "i", "f"),
    "sub(x, x) → 0": Example(lambda x: lax.sub(x, x), "i", "f"),
    "rem(x, 1) → 0": Example(_c(lax.rem, 1), "i"),
    "div(x, x) → 1": Example(lambda x: lax.div(x, x), "", "f"),
    "eq(x, x) → 1": Example(lambda x: lax.eq(x, x), "ib", "f"),
    "ge(x, x) → 1": Example(lambda x: lax.ge(x, x), "i", "f"),
    "le(x, x) → 1": Example(lambda x: lax.le(x, x), "i", "f"),
    "ne(x, x) → 0": Example(lambda x: lax.ne(x, x), "ib", "f"),
    "lt(x, x) → 0": Example(lambda x: lax.lt(x, x), "fi"),
    "gt(x, x) → 0": Example(lambda x: lax.gt(x, x), "fi"),
    "not(eq(x, y)) → ne(x, y)": _two(lambda x, y: ~lax.eq(x, y), "fib"),
    "not(ne(x, y)) → eq(x, y)": _two(lambda x, y: ~lax.ne(x, y), "fib"),
    "not(lt(x, y)) → ge(x, y)": _two(lambda x, y: ~lax.lt(x, y), "i", "f"),
    "not(le(x, y)) → gt(x, y)": _two(lambda x, y: ~lax.le(x, y), "i", "f"),
    "not(gt(x, y)) → le(x, y)": _two(lambda x, y: ~lax.gt(x, y), "i", "f"),
    "not(ge(x, y)) → lt(x, y)": _two(lambda x, y: ~lax.ge(x, y), "i", "f"),
    "eq(x, ~0) → x": Example(_c(lax.eq, True), "b"),
    "ne(x, 0) → x": Example(_c(lax.ne, False), "b"),
    "add(add(x, C), D) → add(x, C+D)": Example(lambda x: x + _of(x, 3) + _of(x, 5), "iu", "f"),
    "sub(sub(x, C), D) → sub(x, C+D)": Example(lambda x: x - _of(x, 3) - _of(x, 5), "iu", "f"),
    "sub(add(x, C), D) → add(x, C-D)": Example(lambda x: x + _of(x, 3) - _of(x, 5), "iu", "f"),
    "add(sub(x, C), D) → sub(x, C-D)": Example(lambda x: x - _of(x, 3) + _of(x, 5), "iu", "f"),
    "mul(mul(x, C), D) → mul(x, C*D)": Example(lambda x: x * _of(x, 3) * _of(x, 5), "iu", "f"),
    "and(and(x, C), D) → and(x, C&D)": Example(lambda x: x & _of(x, 3) & _of(x, 5), "iu"),
    "or(or(x, C), D) → or(x, C|D)": Example(lambda x: x | _of(x, 3) | _of(x, 5), "iu"),
    "xor(xor(x, C), D) → xor(x, C^D)": Example(lambda x: x ^ _of(x, 3) ^ _of(x, 5), "iu"),
    "div(div(x, C), D) → div(x, C*D)": Example(lambda x: x / _of(x, 3) / _of(x, 5), "", "f"),
    "log(exp(x)) → x": Example(lambda x: lax.log(lax.exp(x)), "", "f"),
    "exp(log(x)) → x": Example(lambda x: lax.exp(lax.log(x)), "", "f"),
    "log1p(expm1(x)) → x": Example(lambda x: lax.log1p(lax.expm1(x)), "", "f"),
    "expm1(log1p(x)) → x": Example(lambda x: lax.expm1(lax.log1p(x)), "", "f"),
    "mul(sqrt(x), sqrt(x)) → x": Example(lambda x: lax.mul(lax.sqrt(x), lax.sqrt(x)), "", "f"),
    "square(sqrt(x)) → x": Example(lambda x: lax.square(lax.sqrt(x)), "", "f"),
    "sqrt(square(x)) → abs(x)": Example(lambda x: lax.sqrt(lax.square(x)), "", "f"),
    "mul(div(x, y), y) → x": _two(lambda x, y: lax.mul(lax.div(x, y), y), "", "f"),
    "div(mul(x, y), y) → x": _two(lambda x, y: lax.div(lax.mul(x, y), y), "", "f"),
    "sub(add(x, y), y) → x": _two(lambda x, y: lax.sub(lax.add(x, y), y), "i", "f"),
    "add(sub(x, y), y) → x": _two(lambda x, y: lax.add(lax.sub(x, y), y), "i", "f"),
    # --- layout
    "resize(x) → x": Example(lambda x: primitives.squeeze_p.bind(x, dimensions=()), "fb"),
    "resize(resize(x)) → reshape(x)": Example(lambda x: x.reshape(12, 12).reshape(9, 16), "f"),
    "resize(broadcast_in_dim(x)) → reshape(x)": Example(
        lambda x: lax.reshape(_broadcast(x, (144, 1), (0,)), (9, 16)), "f"
    ),
    "resize(unary[accuracy](layout(x))) → unary(x)": Example(
        lambda x: lax.sign(x.reshape(9, 16)).reshape(144), "fi"
    ),
    "resize(elementwise2(layout(x), C)) → elementwise2(x, C)": (
        Example(lambda x: lax.sub(x.reshape(9, 16), _of(x, 3)).reshape(144), "fi")
    ),
    "resize(elementwise2(C, layout(x))) → elementwise2(C, x)": (
        Example(lambda x: lax.squeeze(lax.sub(_of(x, 3), lax.expand_dims(x, [1])), [1]), "fi")
    ),
    "broadcast_in_dim(x) → x": Example(
        jnp.copy,
        "fb",
        for_copy=lambda aval: (
            primitives.broadcast_in_dim_p,
            {"shape": aval.shape, "broadcast_dimensions": (0,), "sharding": None},
        ),
    ),
    "broadcast_in_dim(broadcast_in_dim(x)) → broadcast_in_dim(x)": Example(
        lambda x: _broadcast(_broadcast(x, (2, 144), (1,)), (2, 3, 144), (0, 2)), "f"
    ),
    "broadcast_in_dim(resize(x)) → broadcast_in_dim(x)": Example(
        lambda x: _broadcast(x.reshape(12), (5, 12, 2), (1,)), "f", shapes=((12, 1),)
    ),
    "elementwise2(x, broadcast_in_dim(y)) → elementwise2(x, y)": Example(
        lambda x, y: lax.sub(x, _broadcast(y, (12, 12), (0, 1))), "fi", shapes=((12, 12), (12, 1))
    ),
    "ordered2(broadcast_in_dim(y), x) → ordered2(y, x)": Example(
        lambda x, y: lax.sub(_broadcast(y, (12, 12), ()), x), "fi", shapes=((12, 12), ())
    ),
    "add_any(x, broadcast_in_dim(y)) → add(x, y)": Example(
        lambda x, y: _add_any(x, _broadcast(y, (12, 12), (0, 1))), "f", shapes=((12, 12), (1, 12))
    ),
    "select_n(broadcast_in_dim(p), *xs) → select_n(p, *xs)": Example(
        lambda x, y: lax.select_n(_broadcast(x[0] < y[0], (144,), ()), x, y),
        "f",
        shapes=((144,), (144,)),
    ),
    "transpose(x) → x": Example(
        lambda x: primitives.transpose_p.bind(x, permutation=(0, 1)), "f", shapes=((12, 12),)
    ),
    "transpose(transpose(x)) → transpose(x)": Example(
        lambda x: x.transpose(1, 2, 0).transpose(1, 0, 2), "f", shapes=((2, 3, 4),)
    ),
    "transpose(broadcast_in_dim(x)) → broadcast_in_dim(x)": Example(
        lambda x: _broadcast(x, (5, 3, 4), (1, 2)).transpose(1, 0, 2), "f", shapes=((3, 4),)
    ),
    "rev(x) → x": Example(lambda x: lax.rev(x, (0,)), "f", shapes=((1, 4),)),
    "rev(rev(x)) → rev(x)": Example(
        lambda x: lax.rev(lax.rev(x, (0, 1)), (1, 2)), "f", shapes=((2, 3, 4),)
    ),
    "convert_element_type(x) → x": Example(
        jnp.copy,
        "fib",
        for_copy=lambda aval: (
            primitives.convert_element_type_p,
            {"new_dtype": aval.dtype, "weak_type": False, "sharding": None},
        ),
    ),
    "convert_element_type(convert_element_type(x)) → convert_element_type(x)": Example(
        lambda x: lax.convert_element_type(lax.convert_element_type(x, "float32"), "float16"),
        "hb",
    ),
    # --- slicing
    "slice(x) → x": Example(
        lambda x: primitives.slice_p.bind(
            x, start_indices=(0,), limit_indices=(144,), strides=None
        ),
        "f",
    ),
    "slice(slice(x)) → slice(x)": Example(
        lambda x: lax.slice(lax.slice(x, (3,), (140,), (2,)), (4,), (50,), (3,)), "f"
    ),
    "slice(concatenate(*xs)) → slice(x)": _two(
        lambda x, y: lax.slice(lax.concatenate([x, y], 0), (150,), (200,), (3,)), "f"
    ),
    "slice(broadcast_in_dim(x)) → broadcast_in_dim(x)": Example(
        lambda x: lax.slice(_broadcast(x, (7, 144), (1,)), (2, 0), (5, 144)), "f"
    ),
    "slice(pad(x, y)) → slice(x)": Example(
        lambda x: lax.slice(lax.pad(x, _of(x, 0), [(3, -2, 0)]), (5,), (100,), (2,)), "f"
    ),
    "dynamic_slice(x, *i) → x": Example(
        lambda x, i: lax.dynamic_slice(x, (i.astype("int32"),), (144,)), "f", shapes=((144,), ())
    ),
    "dynamic_slice(x, *i) → slice(x)": Example(
        lambda x: primitives.dynamic_slice_p.bind(x, np.int32(142), slice_sizes=(5,)), "f"
    ),
    "dynamic_update_slice(x, y, *i) → y": _two(
        lambda x, y: primitives.dynamic_update_slice_p.bind(x, y, np.int32(7)), "f"
    ),
    "concatenate(x) → x": Example(lambda x: primitives.concatenate_p.bind(x, dimension=0), "f"),
    "concatenate(*xs) → concatenate(*ys) #0": Example(
        lambda x, y: lax.concatenate([x, y, x], 0), "f", shapes=((144,), (0,))
    ),
    "concatenate(*xs) → concatenate(*ys) #1": _two(
        lambda x, y: lax.concatenate([x, lax.concatenate([y, x], 0)], 0), "f"
    ),
    "concatenate(*xs) → slice(x)": Example(
        lambda x: lax.concatenate([x[3:7], x[7:20], x[20:25]], 0), "f"
    ),
    "concatenate(*xs) → x": Example(lambda x: lax.concatenate(lax.split(x, (44, 100)), 0), "f"),
    "split(x) → x": Example(lambda x: lax.split(x, (144,))[0], "f"),
    "pad(x, y) → x": Example(lambda x: lax.pad(x, _of(x, 0), [(0, 0, 0)]), "f"),
    "pad(pad(x, y), z) → pad(x, y)": Example(
        lambda x: lax.pad(lax.pad(x, _of(x, 2), [(1, 2, 0)]), _of(x, 2), [(3, 4, 0)]), "f"
    ),
    # --- selection
    "select_n(C, *xs) → the case of xs": _two(
        lambda x, y: primitives.select_n_p.bind(np.True_, x, y), "f"
    ),
    "select_n(p, *xs) → the case of xs": _two(lambda x, y: lax.select_n(y > x, x, x), "f"),
    "select_n(not(p), x, y) → select_n(p, y, x)": _two(
        lambda x, y: lax.select_n(~(x < y), x, y), "f"
    ),
    "select_n(p, select_n(p, x, y), z) → select_n(p, x, z)": _two(
        lambda x, y: (lambda p: lax.select_n(p, lax.select_n(p, x, y), y))(x < y), "f"
    ),
    "select_n(p, x, select_n(p, y, z)) → select_n(p, x, z)": _two(
        lambda x, y: (lambda p: lax.select_n(p, x, lax.select_n(p, x, y)))(x < y), "f"
    ),
    "select_n(p, 0, 1) → p": Example(
        lambda x: primitives.select_n_p.bind(x, np.False_, np.True_), "b", shapes=((),)
    ),
    "select_n(p, 1, 0) → not(p)": Example(
        lambda x: primitives.select_n_p.bind(x, np.True_, np.False_), "b", shapes=((),)
    ),
    # --- reductions
    "reduce_sum(x) → squeeze(x)": Example(
        lambda x: lax.reduce_sum(x, (0, 2)), "fic", shapes=((1, 144, 1),)
    ),
    "reduce_prod(x) → squeeze(x)": Example(
        lambda x: lax.reduce_prod(x, (0, 2)), "fi", shapes=((1, 144, 1),)
    ),
    "reduce_max(x) → squeeze(x)": Example(
        lambda x: lax.reduce_max(x, (1,)), "i", "f", shapes=((144, 1),)
    ),
    "reduce_min(x) → squeeze(x)": Example(
        lambda x: lax.reduce_min(x, (1,)), "i", "f", shapes=((144, 1),)
    ),
    "reduce_and(x) → squeeze(x)": Example(
        lambda x: lax.reduce_and(x, (1,)), "b", shapes=((144, 1),)
    ),
    "reduce_or(x) → squeeze(x)": Example(lambda x: lax.reduce_or(x, (1,)), "b", shapes=((144, 1),)),
    "reduce_max(reduce_max(x)) → reduce_max(x)": Example(
        lambda x: lax.reduce_max(lax.reduce_max(x, (1,)), (0,)), "i", "f", shapes=((4, 3, 12),)
    ),
    "reduce_min(reduce_min(x)) → reduce_min(x)": Example(
        lambda x: lax.reduce_min(lax.reduce_min(x, (0,)), (1,)), "i", "f", shapes=((4, 3, 12),)
    ),
    "reduce_and(reduce_and(x)) → reduce_and(x)": Example(
        lambda x: lax.reduce_and(lax.reduce_and(x, (2,)), (0,)), "b", shapes=((4, 3, 2),)
    ),
    "reduce_or(reduce_or(x)) → reduce_or(x)": Example(
        lambda x: lax.reduce_or(lax.reduce_or(x, (2,)), (0,)), "b", shapes=((4, 3, 2),)
    ),
    "reduce_sum(reduce_sum(x)) → reduce_sum(x)": Example(
        lambda x: lax.reduce_sum(lax.reduce_sum(x, (2,)), (0,)), "i", "f", shapes=((4, 3, 12),)
    ),
    "reduce_sum(broadcast_in_dim(x)) → mul(x, n)": Example(
        lambda x: lax.reduce_sum(_broadcast(x, (5, 144, 3), (1,)), (0, 2)), "i", "f"
    ),
    "cumsum[reverse](x) → x": Example(lambda x: lax.cumsum(x, 1), "i", "f", ((144, 1),)),
    "cumprod[reverse](x) → x": Example(lambda x: lax.cumprod(x, 1), "i", "f", ((144, 1),)),
    "cummax[reverse](x) → x": Example(lambda x: lax.cummax(x, 1), "i", "f", ((144, 1),)),
    "cummin[reverse](x) → x": Example(lambda x: lax.cummin(x, 1), "i", "f", ((144, 1),)),
    "cumlogsumexp[reverse](x) → x": Example(lambda x: lax.cumlogsumexp(x, 1), "", "f", ((144, 1),)),
    # --- contractions
    "dot_general[precision, preferred_element_type](transpose(x), y) → dot_general(x, y)": Example(
        lambda x, y: lax.dot(x.T, y), "i", "f", ((4, 3), (4, 5))
    ),
    "dot_general[precision, preferred_element_type](x, transpose(y)) → dot_general(x, y)": Example(
        lambda x, y: lax.dot(x, y.T), "i", "f", ((3, 4), (5, 4))
    ),
    "transpose(dot_general[precision, preferred_element_type](x, y)) → dot_general(y, x)": Example(
        lambda x, y: lax.dot(x, y).T, "i", "f", ((3, 4), (4, 5))
    ),
    # --- --- combined -----------------------------------------------------------------------------
    "add|add_any|sub|mul|div|max|min(transpose(x), transpose(y)) → transpose(add|…(x, y))": Example(
        lambda x, y: lax.sub(x.T, y.T), "fi", shapes=((12, 12), (12, 12))
    ),
    "add|add_any|sub|mul|div|max|min(reshape(x), reshape(y)) → reshape(add|…(x, y))": _two(
        lambda x, y: lax.div(x.reshape(9, 16), y.reshape(9, 16)), "f"
    ),
    "mul(mul(neg(x), y), C) → mul(mul(x, y), -C)": _two(lambda x, y: y * -x * _of(x, 3), "fi"),
    "div(mul(neg(x), y), C) → div(mul(x, y), -C)": _two(lambda x, y: -x * y / _of(x, 3), "f"),
    "add|add_any(z, mul(neg(x), y)) → sub(z, mul(x, y))": _two(
        lambda x, y: -x * y + lax.sign(y), "fi"
    ),
    "sub(z, mul(neg(x), y)) → add(z, mul(x, y))": _two(lambda x, y: lax.sign(y) - y * -x, "fi"),
}
