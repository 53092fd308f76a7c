"""Arrays in an `.npz` file, aligned so that they can be mapped into memory instead of read.

NumPy stores arrays in a zip archive with their memory layout, but without alignment. Here each one
begins at a multiple of 64 bytes. Files of other writers, whose arrays may also be compressed, are
read into memory.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from jaxprtool.files import opened_plain
from jaxprtool.ir.equality.mapped_arrays import FileMap

_ALIGNMENT = 64
#: The id that other tools use for a padding extra field of a zip file.
_PADDING = 0xD935
#: Bytes before a member besides its name: zip's header, 64-bit sizes, the padding's header.
_HEADER = 30 + 20 + 4
#: Bytes to read at a time.
_BLOCK = 1 << 20

#: Receives the bytes of an array in chunks.
See: TypeAlias = Callable[[bytes | memoryview], None]


def write_npz(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, readable by `numpy.load`; equal arrays give equal bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name in sorted(arrays):
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            assert archive.fp is not None
            room = -(archive.fp.tell() + _HEADER + len(entry.filename.encode())) % _ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING, room) + bytes(room)
            with archive.open(entry, "w", force_zip64=True) as member:
                data = np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape)
                np.lib.format.write_array(member, storable(data), allow_pickle=False)


def storable(data: np.ndarray) -> np.ndarray:
    """Return an array in a dtype that NumPy's file format supports."""
    # For other dtypes the format keeps only the item size. `isbuiltin` is not usable: it is 0 for
    # an unpickled NumPy array.
    own = data.dtype.type.__module__ == "numpy"
    return data if own else data.view(f"u{data.dtype.itemsize}")


class NpzReader:
    """Reads arrays of one file, each with a dtype and a shape known in advance.

    Raises OSError if the file cannot be read, and the errors of zipfile if it is damaged.
    """

    def __init__(self, path: Path):
        self._file = opened_plain(path)
        try:
            self._archive = zipfile.ZipFile(self._file)
        except BaseException:
            self._file.close()
            raise
        self._map: FileMap | None = None

    def close(self) -> None:
        """Close the file. Mapped arrays stay valid."""
        self._archive.close()
        self._file.close()

    def array(
        self,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        see: See,
    ) -> np.ndarray | None:
        """Return an array, or None if it is not of this dtype and shape.

        Args:
            name: Its name in the file.
            dtype: The expected dtype; the file has that of `storable`.
            shape: The expected shape.
            see: Called with its bytes in chunks, which need not be kept in memory.

        Raises:
            KeyError: If there is no array of this name.
        """
        entry = self._archive.getinfo(f"{name}.npy")
        as_stored = storable(np.zeros((), dtype)).dtype
        size = math.prod(shape) * dtype.itemsize
        with self._archive.open(entry) as member:
            np.lib.format.read_magic(member)
            found = np.lib.format.read_array_header_1_0(member)
            # Never more than the caller expects, whatever the file contains.
            if found != (shape, False, as_stored) or entry.file_size != member.tell() + size:
                return None
            data = self._mapped(entry, member.tell(), size, see)
            if data is None:
                data = _read(member, size, see)
        return None if data is None else data.view(dtype).reshape(shape)

    def _mapped(
        self,
        entry: zipfile.ZipInfo,
        before: int,
        size: int,
        see: See,
    ) -> np.ndarray | None:
        """Return a member's bytes after the first `before`, mapped if they are not compressed."""
        if entry.compress_type != zipfile.ZIP_STORED or not size:
            return None
        lengths = os.pread(self._file.fileno(), 4, entry.header_offset + 26)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", lengths)) + before
        if start % _ALIGNMENT:
            return None
        if self._map is None:
            self._map = FileMap.of(self._file)
        if start + size > len(self._map):
            return None
        # Reading through the file instead of the map does not load the map's pages into memory.
        for at in range(start, start + size, _BLOCK):
            see(os.pread(self._file.fileno(), min(_BLOCK, start + size - at), at))
        return np.frombuffer(self._map, np.uint8, size, start)


def _read(member: Any, size: int, see: See) -> np.ndarray | None:
    data = np.empty(size, np.uint8)
    done = 0
    while done < size and (count := member.readinto(data[done : done + _BLOCK].data)):
        see(data[done : done + count].data)
        done += count
    return data if done == size else None
