"""Keep the arguments of the last calls of a function on disk, so that a call can be replayed.

    run/process-0/kept/step.000041.npz

A file has the flat arguments of one call, as bytes, and their types, in `about`. It is written
before the call, since the call may crash, and gets its name when it is complete.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import ProgramFileError
from jaxprtool.files import file_written_whole
from jaxprtool.formats.npz import write_npz
from jaxprtool.ir.basics.dtypes import array_dtypes
from jaxprtool.loading.files import load_arrays
from jaxprtool.recording.folder import KEPT

_FILE = re.compile(r"(.+)\.(\d{6,})\.npz")


class Leaf(NamedTuple):
    """A flat argument as stored.

    Attributes:
        dtype: The dtype of the stored array; for keys, the dtype of their data.
        shape: The shape of the argument.
        key: The implementation of keys, or "".
        weak: Whether its type is weak.
    """

    dtype: str
    shape: tuple[int, ...]
    key: str
    weak: bool


class KeptCall(NamedTuple):
    """A call whose arguments were kept.

    Attributes:
        function: The name of the function.
        number: The number of the call, from 1.
        path: The file.
    """

    function: str
    number: int
    path: str


def write_call(folder: str, function: str, number: int, leaves: Sequence[Any], last: int) -> None:
    """Write the arguments of a call, and keep only those of the `last` calls.

    Raises:
        OutputError: If they cannot be written.
    """
    about, arrays = [], {}
    for i, leaf in enumerate(leaves):
        array, known = _stored(leaf)
        about.append(known)
        arrays[str(i)] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    path = os.path.join(folder, KEPT)
    os.makedirs(path, exist_ok=True)
    with file_written_whole(os.path.join(path, f"{function}.{number:06}.npz")) as file:
        write_npz(file, arrays)
    old = os.path.join(path, f"{function}.{number - last:06}.npz")
    if number > last and os.path.exists(old):
        os.unlink(old)


def _stored(leaf: Any) -> tuple[np.ndarray, Leaf]:
    """Return the values of a flat argument on the host, and its type."""
    key, weak = "", bool(getattr(leaf, "weak_type", not hasattr(leaf, "dtype")))
    shape = np.shape(leaf)
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array, Leaf(str(array.dtype), shape, key, weak)


def kept_calls(process: str) -> list[KeptCall]:
    """Return the calls that a process kept, in order."""
    try:
        names = sorted(os.listdir(os.path.join(process, KEPT)))
    except OSError:
        return []
    found = [(name, _FILE.fullmatch(name)) for name in names]
    return [
        KeptCall(match[1], int(match[2]), os.path.join(process, KEPT, name))
        for name, match in found
        if match is not None
    ]


def kept_types(call: KeptCall) -> list[Leaf]:
    """Return the types of the arguments of a call. Raises ProgramFileError."""
    with np.load(call.path) as file:
        return _about(file["about"])


def kept_arguments(call: KeptCall) -> list[Any]:
    """Return the flat arguments of a call: NumPy arrays, keys, and numbers of weak types.

    Raises:
        ProgramFileError: If the file is damaged.
    """
    arrays: Any = load_arrays(call.path)
    try:
        about = _about(arrays["about"])
        return [_restored(arrays[str(i)], leaf) for i, leaf in enumerate(about)]
    except (KeyError, ValueError, TypeError) as error:
        raise ProgramFileError(f"'{call.path}' is damaged: {error}") from None


def _about(data: np.ndarray) -> list[Leaf]:
    return [Leaf(d, tuple(s), k, w) for d, s, k, w in json.loads(data.tobytes())]


def _restored(data: np.ndarray, leaf: Leaf) -> Any:
    dtypes = {str(np.dtype(each)): np.dtype(each) for each in array_dtypes().values()}
    dtype = dtypes.get(leaf.dtype) or np.dtype(leaf.dtype)
    array = np.frombuffer(data.tobytes(), dtype)
    if leaf.key:
        data_of_key = array.reshape(*leaf.shape, -1)
        return jax.random.wrap_key_data(jnp.asarray(data_of_key), impl=leaf.key)
    array = array.reshape(leaf.shape)
    return array.item() if leaf.weak and not leaf.shape else array
