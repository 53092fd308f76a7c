"""The arrays of a `.jaxpr` file: small ones as nested lists, large ones in an `.npz` file.

    a:f32[3]=[1.0, 2.0, 3.0]               a small constant, at its binder
    b:f32[512,512]=npz('sha256:1f2e...')   a large one, under its digest in the constants file
    c:f32[512,512]=base64('AACAPw...')     a large one in a text without a constants file

The digest is computed from an array's dtype, shape and bits, so that an array used in several
programs, or several times in one, is stored once. PRNG keys are stored as their key data. Dtypes
that NumPy's file format lacks are stored as integers of the same width.
"""

from __future__ import annotations

import ast
import base64
import binascii
import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.values import Unreadable, Unwritable, as_scalar, scalar_text
from jaxprtool.ir.array_files import NpzReader, storable
from jaxprtool.jaxcompat import Aval, KeyType

#: The maximum number of elements of an array that is part of the text.
MOST_INLINE = 64

#: The number of digits of the SHA-256 digest in the text.
_DIGITS = 32


# --- arrays and their bits ------------------------------------------------------------------------


def _data(value: Any, aval: Aval) -> np.ndarray:
    """Return the plain NumPy array that is written for an array of the type `aval`."""
    if isinstance(aval.dtype, KeyType):
        return np.asarray(jax.random.key_data(value))
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, bool)
    return np.asarray(value).astype(aval.dtype, copy=False)


def _data_type(aval: Aval) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and shape of the array that is written for an array of this type."""
    if isinstance(aval.dtype, KeyType):
        key_shape = jaxcompat.key_implementation(aval.dtype).key_shape
        return np.dtype(np.uint32), (*aval.shape, *key_shape)
    if aval.dtype == jax.dtypes.float0:
        return np.dtype(bool), aval.shape
    return aval.dtype, aval.shape


def _array(data: np.ndarray, aval: Aval) -> Any:
    """Return the array of the type `aval` from its written `data`."""
    if isinstance(aval.dtype, KeyType):
        return jax.random.wrap_key_data(data, impl=jaxcompat.key_implementation(aval.dtype))
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return jaxcompat.weakly_typed(data) if aval.weak_type and aval.shape else data


def constant_digest(data: np.ndarray) -> str:
    """Return the digest of an array."""
    data = np.ascontiguousarray(data).reshape(data.shape)
    seen = _digest_of(data.dtype, data.shape)
    seen.update(storable(data).data)
    return _digest_text(seen)


def _digest_of(dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    return hashlib.sha256(f"{dtype.name}{shape}".encode())


def _digest_text(seen: Any) -> str:
    return f"sha256:{seen.hexdigest()[:_DIGITS]}"


# --- writing --------------------------------------------------------------------------------------


class ConstantWriter:
    """Writes arrays. Large ones are added to `stored` by digest, or to the text if `inline`."""

    def __init__(self, inline: bool):
        self.inline = inline
        self.stored: dict[str, np.ndarray] = {}

    def constant(self, value: Any, aval: Aval) -> str:
        """Return the text of a constant of the type `aval`. Raises Unwritable."""
        if not hasattr(aval, "dtype") or isinstance(aval, jaxcompat.AbstractRef):
            raise Unwritable(f"a constant of the type {aval}, which is not an array")
        try:
            data = _data(value, aval)
        except Exception as error:  # an array on other hosts, or deleted
            raise Unwritable(f"a constant whose value is unavailable: {error}") from error
        if data.size <= MOST_INLINE:
            return _nested(data)
        if self.inline:
            text = base64.b64encode(np.ascontiguousarray(data).tobytes()).decode()
            return f"base64('{text}')"
        name = constant_digest(data)
        self.stored[name] = data
        return f"npz({name!r})"


def literal_text(value: Any, aval: Aval) -> str:
    """Return the text of a literal, without its type. Raises Unwritable."""
    if isinstance(value, float) and not isinstance(value, np.generic) and value == value:
        return repr(float(value))  # a Python number, rounded to the type
    return ConstantWriter(inline=True).constant(value, aval)


def _nested(data: np.ndarray) -> str:
    return f"[{', '.join(map(_nested, data))}]" if data.shape else scalar_text(data[()])


# --- reading --------------------------------------------------------------------------------------


class Constants:
    """Reads the arrays of one file; its constants file is the first of `paths` that exists."""

    def __init__(self, paths: Sequence[Path] = ()):
        self._paths = paths
        self._stored: NpzReader | None = None

    def close(self) -> None:
        """Close the constants file."""
        if self._stored is not None:
            self._stored.close()

    def array(self, node: ast.expr, aval: Aval) -> Any:
        """Return the constant of type `aval` of an expression. Raises Unreadable."""
        return _array(self._read(node, aval), aval)

    def literal(self, node: ast.expr, aval: Aval) -> Any:
        """Return the value of a literal of the type `aval`. Raises Unreadable."""
        data = self._read(node, aval)
        value = None if aval.shape else values.decode(node)
        is_number = type(value) in (int, float, complex)
        return jaxcompat.literal_value(value if is_number else _array(data, aval), aval)

    def _read(self, node: ast.expr, aval: Aval) -> np.ndarray:
        if not hasattr(aval, "dtype") or isinstance(aval, jaxcompat.AbstractRef):
            raise Unreadable(node, f"a value of the type {aval} cannot be written")
        dtype, shape = _data_type(aval)
        if not all(type(size) is int for size in shape):
            raise Unreadable(node, "a value cannot have symbolic dimensions")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "npz":
                return self._from_npz(node, dtype, shape)
            if node.func.id == "base64":
                return _from_base64(node, dtype, shape)
        return np.array([*_scalars(node, dtype, shape)], dtype).reshape(shape)

    def _from_npz(self, node: ast.Call, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        name = _only_text(node)
        if not self._paths:
            raise Unreadable(
                node, f"the constant {name} is in a file, but the program names no file"
            )
        path = next(filter(Path.exists, self._paths), self._paths[0])
        seen = _digest_of(dtype, shape)
        try:
            if self._stored is None:
                self._stored = NpzReader(path)
            data = self._stored.array(name, dtype, shape, seen.update)
        except FileNotFoundError:
            fault = f"the constant {name} is missing, because the file {path} is missing"
            raise Unreadable(node, fault) from None
        except KeyError:
            raise Unreadable(node, f"the constant {name} is missing from {path}") from None
        except Exception as error:  # zipfile and NumPy raise many classes
            said = getattr(error, "strerror", None) or error
            fault = f"the constant {name} in {path} cannot be read: {said}"
            raise Unreadable(node, fault) from error
        if data is None or _digest_text(seen) != name:
            raise Unreadable(node, f"the constant {name} in {path} was modified")
        return data


def _from_base64(node: ast.Call, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    try:
        data = base64.b64decode(_only_text(node), validate=True)
    except binascii.Error as error:
        raise Unreadable(node, f"invalid base64: {error}") from None
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise Unreadable(node, f"the data has {len(data):,} bytes, but the type has {wanted:,}")
    return np.frombuffer(data, dtype).reshape(shape)


def _only_text(node: ast.Call) -> str:
    match node:
        case ast.Call(args=[ast.Constant(value=str(text))], keywords=[]):
            return text
    raise Unreadable(node, "expected a single string in quotes")


def _scalars(node: ast.expr, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[np.generic]:
    """Yield the numbers in nested lists of this shape."""
    if shape:
        if not isinstance(node, ast.List) or len(node.elts) != shape[0]:
            raise Unreadable(node, f"expected a list of {shape[0]}")
        for item in node.elts:
            yield from _scalars(item, dtype, shape[1:])
        return
    value = values.decode(node)
    try:
        yield as_scalar(dtype, value)
    except (ValueError, OverflowError, TypeError) as error:
        raise Unreadable(node, str(error)) from None
