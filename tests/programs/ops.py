"""The first-order operations of random programs, and the types they work on.

A type is spelled as JAX prints it: `f32[2,3]`, `key<fry>[]`. `coerce` converts any value to any
type, so that a plan may apply any operation to any operands and still be well typed. So types do
not restrict how plans are drawn and shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES: dict[str, Any] = {
    "f32": jnp.float32,
    "i32": jnp.int32,
    "bool": jnp.bool_,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "c64": jnp.complex64,
    "u32": jnp.uint32,
    "i8": jnp.int8,
    "u8": jnp.uint8,
    "i16": jnp.int16,
    "u16": jnp.uint16,
    "f8_e4m3fn": jnp.float8_e4m3fn,
    "f8_e5m2": jnp.float8_e5m2,
    "i4": jnp.int4,
    "u4": jnp.uint4,
    "key<fry>": None,
}
DTYPES_X64: dict[str, Any] = {
    "f64": np.float64,
    "i64": np.int64,
    "u64": np.uint64,
    "c128": np.complex128,
}
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (1,), (0,), (3, 0))


@dataclass(frozen=True)
class Type:
    """A dtype's short name and a shape. It prints as `T('f32[2,3]')`."""

    dtype: str
    shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"T('{self}')"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def kind(self) -> str:
        """One letter: f, c, i, u, b; e and n for 8-bit floats and 4-bit integers; k for keys."""
        special = {"bf16": "f", "key<fry>": "k", "i4": "n", "u4": "n"}
        if self.dtype in special:
            return special[self.dtype]
        return "e" if self.dtype.startswith("f8") else self.dtype[0]

    @property
    def jax_dtype(self) -> Any:
        return DTYPES.get(self.dtype) or DTYPES_X64[self.dtype]

    def stacked(self, length: int) -> Type:
        """Return this type with a leading axis."""
        return Type(self.dtype, (length, *self.shape))


def T(text: str) -> Type:
    """Return the type that prints as `text`."""
    dtype, _, shape = text.rstrip("]").partition("[")
    return Type(dtype, tuple(map(int, shape.split(","))) if shape else ())


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def coerce(x: Any, to: Type) -> Any:
    """Return `x` as a value of type `to`: `x` itself, or an array of some of its elements."""
    x = jnp.asarray(x)
    if to.kind == "k":
        if not is_key(x):
            x = jax.random.fold_in(jax.random.key(7), coerce(x, Type("u32")))
        return x if x.shape == to.shape else jnp.broadcast_to(_first_key(x), to.shape)
    if is_key(x):
        x = jax.random.bits(_first_key(x), to.shape, "uint8")
    if x.dtype != to.jax_dtype:
        x = _convert(x, to)
    if x.shape == to.shape:
        return x
    if x.size == 0:
        return lax.full(to.shape, 0, to.jax_dtype)
    if _corners.get():
        return jnp.broadcast_to(_corner(x), to.shape)
    return jnp.resize(x, to.shape) if x.ndim else lax.broadcast(x, to.shape)


_corners: ContextVar[bool] = ContextVar("corners", default=False)


@contextmanager
def corners_alone() -> Iterator[None]:
    """Within this context, convert shapes by broadcasting the first element, at any size."""
    token = _corners.set(True)
    try:
        yield
    finally:
        _corners.reset(token)


def _corner(x: Any) -> Any:
    """Return the first element, without reading sizes."""
    if x.ndim == 0:
        return x
    return lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))


def _first_key(keys: Any) -> Any:
    if keys.size == 0:
        return jax.random.key(3)
    if _corners.get():
        return _corner(keys)
    return keys if keys.ndim == 0 else keys.reshape(-1)[0]


def _convert(x: Any, to: Type) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and to.kind != "c":
        x = lax.real(x)
    if to.kind == "b":
        return x > lax.full((), 0, x.dtype)
    if x.dtype.itemsize == 1 and to.dtype in ("i4", "u4"):
        x = lax.convert_element_type(x, jnp.int8)  # JAX 0.12 cannot convert constants
    return lax.convert_element_type(x, to.jax_dtype)


@dataclass(frozen=True)
class Operation:
    """`apply(*operands)`: operands of one type with a kind in `kinds`, one or more results."""

    arity: int
    kinds: str
    apply: Callable[..., Any]


def _index(x: Any) -> Any:
    """Return a traced index computed from a value's first element."""
    return coerce(x, Type("i32")) % 3


def _first_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function` to operands with at least one axis."""
    return lambda *xs: function(*(x if x.ndim else x[None] for x in xs))


def _gather(x: Any, y: Any) -> Any:
    return x.at[_index(y)].get(mode="clip") if x.shape[0] else x


def _take(x: Any, y: Any) -> Any:
    return jnp.take(x, coerce(y, Type("i32", (2,))), axis=0, mode="wrap") if len(x) else x


def _dynamic_slice(x: Any, y: Any) -> Any:
    return lax.dynamic_slice_in_dim(x, _index(y), min(1, len(x)))


def _dynamic_update(x: Any, y: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x, y[:1], _index(y), 0)


def _convolve(x: Any, y: Any) -> Any:
    return jnp.convolve(x.reshape(-1), y.reshape(-1), mode="same") if x.size else x


def _windows(x: Any) -> Any:
    ones = (1,) * (x.ndim - 1)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (2, *ones), (1, *ones), "SAME")


def _first(x: Any) -> Any:
    if _corners.get() and x.size:
        return _corner(x)
    return x.reshape(-1)[0] if x.size else lax.full((), 1, x.dtype)


OPS: dict[str, Operation] = {
    # elementwise
    "sin": Operation(1, "fc", lax.sin),
    "tanh": Operation(1, "f", lax.tanh),
    "exp": Operation(1, "f", lambda x: lax.exp(-lax.abs(x))),
    "log1p": Operation(1, "f", lambda x: lax.log1p(lax.abs(x))),
    "neg": Operation(1, "fciuen", lax.neg),
    "abs": Operation(1, "fci", lambda x: lax.abs(x)),
    "floor": Operation(1, "f", lax.floor),
    "square": Operation(1, "fciu", lax.square),
    "conj": Operation(1, "c", lax.conj),
    "real_imag": Operation(1, "c", lambda x: (lax.real(x), lax.imag(x))),
    "add": Operation(2, "fciuen", lax.add),
    "sub": Operation(2, "fciu", lax.sub),
    "mul": Operation(2, "fciuen", lax.mul),
    "div": Operation(2, "f", lax.div),
    "max": Operation(2, "fiub", lax.max),
    "less": Operation(2, "fiub", lax.lt),
    "equal": Operation(2, "fciub", lax.eq),
    "and": Operation(2, "iub", lax.bitwise_and),
    "xor": Operation(2, "iub", lax.bitwise_xor),
    "not": Operation(1, "iub", lax.bitwise_not),
    "select": Operation(3, "fciub", lambda x, y, z: jnp.where(x > 0 * x, y, z)),
    "select_all": Operation(2, "fciub", lambda x, y: lax.select(_first(x) > 0 * _first(y), x, y)),
    "clip": Operation(3, "fiu", lax.clamp),
    "clip_all": Operation(2, "fiu", lambda x, y: lax.clamp(_first(y), x, _first(y) + _first(x))),
    # literals, weakly typed scalars, and captured constants
    "add_one": Operation(1, "fciu", lambda x: x + 1),
    "half": Operation(1, "fc", lambda x: x * 0.5),
    "weak": Operation(1, "fi", lambda x: jnp.sum(x > 0) * 1.5 + jnp.where(x.sum() > 1, 2, 3)),
    "iota": Operation(1, "fciu", lambda x: x + lax.iota(jnp.int32, 3)[1].astype(x.dtype)),
    # shapes, slices, scatters
    "reshape": Operation(1, "fciubenk", lambda x: x.reshape(-1)),
    "transpose": Operation(1, "fciubenk", lambda x: x.T),
    "broadcast": Operation(1, "fciubenk", lambda x: jnp.broadcast_to(x, (2, *x.shape))),
    "concatenate": Operation(2, "fciubenk", _first_axis(lambda x, y: jnp.concatenate([x, y]))),
    "slice": Operation(1, "fciubenk", _first_axis(lambda x: x[1:])),
    "reverse": Operation(1, "fciub", _first_axis(lambda x: x[::-1])),
    "pad": Operation(1, "fciu", _first_axis(lambda x: jnp.pad(x, 1))),
    "gather": Operation(2, "fciubnk", _first_axis(_gather)),
    "scatter_add": Operation(2, "fciu", _first_axis(lambda x, y: x.at[0:1].add(y[0:1]))),
    "take": Operation(2, "fciub", _first_axis(_take)),
    "dynamic_slice": Operation(2, "fciubk", _first_axis(_dynamic_slice)),
    "dynamic_update": Operation(2, "fciub", _first_axis(_dynamic_update)),
    "scatter_at": Operation(
        2, "fciu", _first_axis(lambda x, y: x.at[coerce(y, Type("i32", (2,)))].add(_first(y)))
    ),
    "split": Operation(1, "fciub", _first_axis(lambda x: tuple(jnp.array_split(x, 2)))),
    # reductions, sorts, products
    "sum": Operation(1, "fciu", lambda x: x.sum()),
    "prod": Operation(1, "fi", lambda x: x.prod()),
    "any": Operation(1, "b", lambda x: x.any()),
    "maximum": Operation(1, "fi", lambda x: jnp.max(x, initial=0)),
    "argmax": Operation(1, "fi", _first_axis(lambda x: jnp.argmax(x, 0) if len(x) else x)),
    "cumsum": Operation(1, "fciu", _first_axis(lambda x: lax.cumsum(x))),
    "sort": Operation(1, "fiu", _first_axis(lambda x: lax.sort(x))),
    "sort_pair": Operation(2, "fiu", _first_axis(lambda x, y: lax.sort((x, y), num_keys=1))),
    "dot": Operation(2, "fci", _first_axis(lambda x, y: jnp.dot(x, y.T))),
    "dot_batched": Operation(2, "fci", _first_axis(lambda x, y: jnp.einsum("i...,i...->i", x, y))),
    "convolve": Operation(2, "f", _first_axis(_convolve)),
    "windows": Operation(1, "fi", _first_axis(_windows)),
    # conversions
    "to_bf16": Operation(1, "fe", lambda x: lax.convert_element_type(x, jnp.bfloat16)),
    "to_f32": Operation(1, "fiubenk", lambda x: coerce(x, Type("f32", x.shape))),
    "to_int": Operation(1, "fiub", lambda x: coerce(x, Type("i32", x.shape))),
    "stop_gradient": Operation(1, "fc", lax.stop_gradient),
    # random numbers
    "split_key": Operation(1, "k", lambda k: tuple(jax.random.split(_first_key(k)))),
    "split_keys": Operation(1, "k", lambda k: jax.random.split(_first_key(k), 3)),
    "fold_in": Operation(1, "k", lambda k: jax.random.fold_in(_first_key(k), 5)),
    "bits": Operation(1, "k", lambda k: jax.random.bits(_first_key(k), (3,))),
    "uniform": Operation(1, "k", lambda k: jax.random.uniform(_first_key(k), (2, 3))),
    "key_data": Operation(1, "k", lambda k: jax.random.key_data(k)),
    "wrap_key": Operation(1, "u", lambda x: jax.random.wrap_key_data(coerce(x, Type("u32", (2,))))),
}

#: The named axes, with their sizes, for tracing programs with collectives.
AXES: tuple[tuple[str, int], ...] = (("i", 2), ("j", 3))


def _collectives(name: Any, size: int) -> dict[str, Operation]:
    """Return the collectives over one named axis, or over several together."""

    def wide(x: Any) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) * jnp.ones((), x.dtype)

    def varying(x: Any) -> Any:  # JAX adds two dimensions too many to values that are not batched
        return x + lax.axis_index(name).astype(x.dtype)

    around = [(k, (k + 1) % size) for k in range(size)]
    operations = {
        "psum": Operation(1, "fciu", lambda x: lax.psum(x, name)),
        "pmax": Operation(1, "fi", lambda x: lax.pmax(x, name)),
        "pmin": Operation(1, "fi", lambda x: lax.pmin(x, name)),
        "pmean": Operation(1, "f", lambda x: lax.pmean(x, name)),
        "psum_const": Operation(1, "fi", lambda x: x * lax.psum(2, name)),
        "axis_index": Operation(1, "fiu", lambda x: x + lax.axis_index(name).astype(x.dtype)),
    }
    if isinstance(name, str):  # JAX cannot map the others over one of several axes
        operations |= {
            "all_gather": Operation(1, "fciub", lambda x: lax.all_gather(x, name, axis=x.ndim)),
            "psum_scatter": Operation(1, "fi", lambda x: lax.psum_scatter(wide(x), name)),
            "all_gather_tiled": Operation(
                1, "fi", _first_axis(lambda x: lax.all_gather(x, name, tiled=True))
            ),
            "ppermute": Operation(1, "fciub", lambda x: lax.ppermute(x, name, around)),
            "all_to_all": Operation(
                1, "fi", lambda x: lax.all_to_all(varying(wide(x)), name, 0, x.ndim)
            ),
        }
    return {f"{what} over {name}": operation for what, operation in operations.items()}


COLLECTIVES: dict[str, Operation] = {
    **_collectives("i", 2),
    **_collectives("j", 3),
    **_collectives(("i", "j"), 6),
}
