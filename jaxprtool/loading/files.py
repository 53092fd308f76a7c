"""Loading of arrays from `.npy`, `.npz` and `.safetensors` files, and checkpoints of Orbax.

Nothing is unpickled. Only regular files are read, and only if they fit into memory. A
`.safetensors` file is mapped into memory, and a checkpoint is read array by array, so that unused
arrays are not read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxprtool.errors import ArgumentsError
from jaxprtool.files import opened_plain
from jaxprtool.ir.basics.paths import path_steps
from jaxprtool.ir.programs.checkpoints import read_stored, stored_arrays

#: Bytes; the header of a model with a hundred thousand tensors takes a tenth of it.
_MAX_HEADER = 100_000_000

_SAFETENSORS_DTYPES: dict[str, type] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class Arrays(dict[str, Any]):
    """The arrays of a file by name. Names with dots and slashes stay flat.

    Those of a checkpoint are `Stored` until they are read from `folder`.
    """

    folder: str | None = None

    def at(self, path: str) -> np.ndarray | Arrays:
        """Return the array of this name, or the `Arrays` whose names have this path as a prefix.

        The prefix is removed from their names: `0/w`. Raises KeyError if there is none.
        """
        if path in self:
            return self.read([path])[path]  # type: ignore[no-any-return]
        found = Arrays()
        found.folder = self.folder
        for name, array in self.items():
            rest = name.removeprefix(path)
            if rest.startswith("/"):
                found[rest[1:]] = array
            elif name.startswith((f"{path}[", f"{path}.")) and (steps := path_steps(f"_{rest}")):
                found["/".join(steps)] = array
        return found or self[path]

    def read(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the arrays of these names, or all, in a plain dict.

        Raises ArgumentsError if a checkpoint is damaged.
        """
        wanted = {name: self[name] for name in (self if names is None else names)}
        if self.folder is None:
            return wanted
        with _named(self.folder):
            return read_stored(self.folder, wanted)


def load_arrays(path: str) -> np.ndarray | Arrays:
    """Return the array in a `.npy` file, or the `Arrays` in another file or in a checkpoint.

    Raises ArgumentsError if the file cannot be read, is damaged, or holds Python objects.
    """
    if os.path.isdir(path):
        with _named(path):
            found = Arrays(stored_arrays(path))
        found.folder = path
        return found
    suffix = os.path.splitext(path)[1].lower()
    reader = {".npy": _numpy, ".npz": _numpy, ".safetensors": _safetensors, "": _numpy}.get(suffix)
    if reader is None:
        raise ArgumentsError(
            f"cannot load {path!r}: only .npy, .npz and .safetensors files, and "
            "checkpoints of Orbax, can be read"
        )
    try:
        with _named(path), opened_plain(path) as file:
            return reader(file)
    except ArgumentsError:
        raise
    except OSError as error:
        raise ArgumentsError(f"cannot load {path!r}: {error.strerror or error}") from None
    except Exception as error:  # numpy and zipfile report damage with many exception types
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentsError(f"cannot load {path!r}: {detail}") from error


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the path to the message of an ArgumentsError."""
    try:
        yield
    except ArgumentsError as error:
        raise ArgumentsError(f"cannot load {path!r}: {error.message}", error.hint) from None


def _numpy(file: BinaryIO) -> np.ndarray | Arrays:
    # Check the first bytes, so that numpy does not read a file of another format as a pickle.
    start = file.read(6)
    file.seek(0)
    if not start.startswith((b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")):
        raise ArgumentsError("it is not a file written by numpy.save or numpy.savez")
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    size = sum(entry.file_size for entry in loaded.zip.infolist())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:  # decompressed data may be a thousand times larger
        message = f"it holds {size:,} bytes of arrays, but this machine has {memory:,} of memory"
        raise ArgumentsError(message)
    return Arrays({name: loaded[name] for name in loaded.files})


def _safetensors(file: BinaryIO) -> Arrays:
    empty = os.fstat(file.fileno()).st_size == 0
    data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER, len(data) - 8):
        raise ArgumentsError("its header is truncated, or it is not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        raise ArgumentsError("its header is damaged, or it is not a safetensors file") from None
    if not isinstance(header, dict):
        raise ArgumentsError("its header is damaged")
    header.pop("__metadata__", None)
    buffer = memoryview(data)[8 + size :]
    return Arrays({name: _tensor(name, entry, buffer) for name, entry in header.items()})


def _tensor(name: str, entry: Any, buffer: memoryview) -> np.ndarray:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ArgumentsError(f"its entry for '{name}' is damaged") from None
    if dtype_name not in _SAFETENSORS_DTYPES:
        raise ArgumentsError(f"'{name}' has dtype {dtype_name}, which is not supported")
    dtype = np.dtype(_SAFETENSORS_DTYPES[dtype_name])
    numbers = [*shape, begin, end] if isinstance(shape, list) else [-1]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ArgumentsError(f"its entry for '{name}' is damaged")
    if end > len(buffer) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ArgumentsError(
            f"its data for '{name}' is truncated, or its size differs from the header's"
        )
    return np.frombuffer(buffer[begin:end], dtype).reshape(shape)
