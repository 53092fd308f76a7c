"""Arrays in `.npz` files, aligned to be mapped into memory, and texts written with them.

NumPy stores arrays in a zip archive with their memory layout, but without alignment. Here each one
begins at a multiple of 64 bytes. Files of other writers, whose arrays may also be compressed, are
read into memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from jaxprtool.files import TEMPORARY, file_written_whole, is_stream, locked, opened_plain
from jaxprtool.ir.keys import FileMap

# --- npz ------------------------------------------------------------------------------------------
# Arrays in an `.npz` file, aligned so that they can be mapped into memory instead of read.

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
    is_native = data.dtype.type.__module__ == "numpy"
    return data if is_native else data.view(f"u{data.dtype.itemsize}")


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
            header = np.lib.format.read_array_header_1_0(member)
            # Never more than the caller expects, whatever the file contains.
            if header != (shape, False, as_stored) or entry.file_size != member.tell() + size:
                return None
            data = self._mapped(entry, member.tell(), size, see)
            if data is None:
                data = _read(member, size, see)
        return None if data is None else data.view(dtype).reshape(shape)

    def _mapped(
        self,
        entry: zipfile.ZipInfo,
        offset: int,
        size: int,
        see: See,
    ) -> np.ndarray | None:
        """Return a member's bytes after the first `offset`, mapped if they are not compressed."""
        if entry.compress_type != zipfile.ZIP_STORED or not size:
            return None
        lengths = os.pread(self._file.fileno(), 4, entry.header_offset + 26)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", lengths)) + offset
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


# --- with constants -------------------------------------------------------------------------------
# Atomic writing of texts together with the `.npz` files of their large constants.
#
#     loss.jaxpr    loss.jaxpr.1f2e3d4c5b6a7988.npz
#
# A text names its constants file, whose name contains a digest of its contents. Each text thus
# finds its own constants, even while others are written or after a writer was killed. A constants
# file is in place before the text that names it, and is removed when no text in the folder names it
# any more. Writers to one folder lock it.

_CONSTANTS = re.compile(r"(.*)\.[0-9a-f]{16}\.npz", re.DOTALL)
#: The number of bytes at the start of a text that contain the name of its constants file.
_HEAD = 1 << 16


@dataclass(frozen=True)
class ProgramText:
    """The text of a file, and the arrays of its constants file by digest."""

    path: str
    content: str
    arrays: Mapping[str, np.ndarray]


def constants_file(path: str, names: Iterable[str]) -> str:
    """Return the name of a text's constants file from the digests of its arrays."""
    digest = hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:16]
    return f"{os.path.basename(os.path.realpath(path))}.{digest}.npz"


def mention(name: str) -> str:
    """Return a file's name as written in a text, within quotes or not."""
    return repr(name)[1:-1]


def write_texts(texts: Iterable[ProgramText], keep_previous: bool = False) -> None:
    """Write texts with their constants files: all of them, or none if one cannot be written.

    With `keep_previous`, the constants file of a replaced text is kept until the text is replaced
    by one with other constants again, for readers that have read the text but not yet its
    constants.

    Raises:
        OutputError: If a file cannot be written.
    """
    texts = list(texts)
    targets = [_Destination.of(text) for text in texts if not is_stream(text.path)]
    with ExitStack() as locks:
        for folder in sorted({target.folder for target in targets}):
            locks.enter_context(locked(folder))
        replaced = [_head(target.text.path) for target in targets]
        with ExitStack() as files:
            for text in texts:
                files.enter_context(file_written_whole(text.path)).write(text.content.encode())
            for target in targets:  # the last file entered is renamed first
                if target.constants:
                    beside = os.path.join(target.folder, target.constants)
                    write_npz(files.enter_context(file_written_whole(beside)), target.text.arrays)
        for target, head in zip(targets, replaced, strict=True):
            with suppress(OSError):  # the folder may not be readable
                _remove_unused(target, head, keep_previous)


@dataclass(frozen=True)
class _Destination:
    """The destination of a text after symbolic links; `constants` is its constants file's name."""

    text: ProgramText
    folder: str
    name: str
    constants: str | None

    @classmethod
    def of(cls, text: ProgramText) -> _Destination:
        constants = constants_file(text.path, text.arrays) if text.arrays else None
        return cls(text, *os.path.split(os.path.realpath(text.path)), constants)


def _remove_unused(target: _Destination, replaced: bytes, keep_previous: bool) -> None:
    """Remove the former constants files of a text that no text in the folder names."""
    names = [n for n in os.listdir(target.folder) if _CONSTANTS.fullmatch(n)]
    was = {n for n in names if mention(n).encode() in replaced}
    of_target = {n for n in names if _CONSTANTS.sub(r"\1", n) == target.name}
    unused = (of_target | was) - {target.constants}
    if keep_previous:
        unused = set() if target.constants in was else unused - was
    for entry in os.scandir(target.folder) if unused else ():
        if not entry.name.startswith(TEMPORARY) and entry.name not in names and entry.is_file():
            head = _head(entry.path)
            unused -= {n for n in unused if mention(n).encode() in head}
    for n in unused:
        os.unlink(os.path.join(target.folder, n))


def _head(path: str) -> bytes:
    try:
        with opened_plain(path) as file:
            return file.read(_HEAD)
    except (OSError, ValueError):
        return b""
