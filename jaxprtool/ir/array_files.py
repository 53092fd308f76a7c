"""Files of arrays: `.npz`, aligned to be mapped into memory, and checkpoints of Orbax.

NumPy stores arrays in a zip archive with their memory layout, but without alignment. Here each one
begins at a multiple of 64 bytes. Files of other writers, whose arrays may also be compressed, are
read into memory.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import numpy as np

from jaxprtool.errors import ArgumentsError, JaxprToolError, OutputError, described
from jaxprtool.files import (
    TEMPORARY,
    file_written_whole,
    finish_folder,
    is_stream,
    locked,
    opened_plain,
    unfinished_folder,
)
from jaxprtool.ir.dtypes import array_dtypes, physical
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


# --- checkpoints ----------------------------------------------------------------------------------
# Folders of sharded arrays, written and read with Orbax.
#
# Every process writes the shards that it holds, so that no process needs all of an array. The
# folder holds the arrays by name; checkpoints of other writers have trees, whose paths are read as
# names: `params/w`. Orbax does not store arrays without bytes: their types are in the metadata
# instead.

#: The file in every Orbax checkpoint.
_MARK = "_CHECKPOINT_METADATA"
#: The entry of the metadata with the types of arrays without bytes, by name.
_EMPTY = "empty"


def is_spread(array: Any) -> bool:
    """Return True if an array is split over devices, or is not wholly in this process."""
    if not isinstance(array, jax.Array):
        return False
    return not (array.is_fully_replicated or array.sharding.num_devices == 1)


def check_folder(path: str) -> None:
    """Raise OutputError if a checkpoint cannot be written to a path: it replaces only another."""
    if os.path.isdir(path) and os.listdir(path) and not is_checkpoint(path):
        raise OutputError(f"cannot write '{path}': it is a folder, but not a checkpoint")
    parent = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        reason = "no permission" if os.path.isdir(parent) else "no such folder"
        raise OutputError(f"cannot write '{path}': {reason}: {parent}")


def is_checkpoint(path: str) -> bool:
    """Return True if a folder is an Orbax checkpoint."""
    return os.path.isfile(os.path.join(path, _MARK))


def write_checkpoint(path: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to a folder, which gets its name once it is complete.

    With several processes, all call this. PRNG keys are written as their key data.

    Raises:
        OutputError: If it cannot be written, or Orbax is not installed.
    """
    with _orbax(OutputError, f"cannot write '{path}': its arrays are sharded") as ocp:
        unfinished = unfinished_folder(path)  # Orbax replaces what a killed process left there
        plain = {name: physical(array) for name, array in arrays.items()}
        if jax.process_count() > 1:  # Orbax takes arrays of one process, equal in all, from NumPy
            plain = {
                name: np.asarray(array) if getattr(array, "is_fully_addressable", True) else array
                for name, array in plain.items()
            }
        full = {name: array for name, array in plain.items() if array.nbytes}
        empty = {
            name: [array.dtype.name, list(array.shape)]
            for name, array in plain.items()
            if name not in full
        }
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
                args = ocp.args.PyTreeSave(full, custom_metadata={_EMPTY: empty})
                writer.save(unfinished, args=args, force=True)
            if jax.process_index() == 0:
                finish_folder(path)
        except Exception as error:  # Orbax passes on the errors of TensorStore, of many types
            raise OutputError(f"cannot write '{path}': {_cause(error)}") from error
        finally:
            if jax.process_index() == 0:
                for left in (unfinished, f"{unfinished}.orbax-checkpoint-tmp"):
                    shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class Stored:
    """An array in a checkpoint, which `read_stored` reads.

    Attributes:
        name: Its name in the checkpoint.
        empty: The array, if it has no bytes: these are not stored by Orbax.
    """

    name: str
    empty: np.ndarray | None = None


def stored_arrays(folder: str) -> dict[str, Stored]:
    """Return the arrays in a checkpoint by name. None is read yet.

    Raises:
        ArgumentsError: If it is not a checkpoint of arrays, is damaged, or Orbax is not installed.
    """
    if not is_checkpoint(folder):
        steps = sorted(n for n in os.listdir(folder) if is_checkpoint(os.path.join(folder, n)))
        hint = f"name one of its steps: {os.path.join(folder, steps[-1])!r}" if steps else None
        raise ArgumentsError("the folder is not an Orbax checkpoint", hint)
    with _reader(folder) as (_, reader):
        metadata = reader.metadata(os.path.realpath(folder)).item_metadata
        arrays = {name: Stored(name) for name, _ in _by_name(_tree(metadata, folder))}
        types = (metadata.custom_metadata or {}).get(_EMPTY, {})
        for name, (dtype, shape) in types.items():
            arrays[name] = Stored(name, np.zeros(shape, array_dtypes()[dtype]))
    return arrays


def read_stored(folder: str, wanted: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """Return arrays of a checkpoint, and read no others.

    They are not bound to devices: the program places them on its own mesh, whatever mesh they were
    written from.

    Raises:
        ArgumentsError: If the checkpoint is damaged.
    """
    read = {stored.name: stored.empty for stored in wanted.values() if stored.empty is not None}
    names = {stored.name for stored in wanted.values()}
    if len(read) < len(names):
        with _reader(folder) as (ocp, reader):
            path = os.path.realpath(folder)
            tree = _tree(reader.metadata(path).item_metadata, folder)
            entries = _by_name(tree)
            chosen = [entry if name in names else ocp.PLACEHOLDER for name, entry in entries]
            item = jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_entry), chosen)
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            kinds = jax.tree.map(lambda _: as_numpy, item, is_leaf=_is_entry)
            args = ocp.args.PyTreeRestore(item=item, restore_args=kinds)
            values = jax.tree.leaves(reader.restore(path, args=args))
        pairs = zip(entries, values, strict=True)
        read |= {name: np.asarray(value) for (name, _), value in pairs if name in names}
    return {key: read[stored.name] for key, stored in wanted.items()}


def _tree(metadata: Any, folder: str) -> Any:
    """Return the tree of entries in Orbax's metadata."""
    tree = getattr(metadata, "tree", None)
    if tree is not None:
        return tree
    if os.path.exists(os.path.join(folder, "_METADATA")):
        raise ArgumentsError("the checkpoint is damaged: its arrays cannot be read")
    items = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    hint = f"name one of its items: {os.path.join(folder, items[0])!r}" if items else None
    raise ArgumentsError("the checkpoint has no tree of arrays", hint)


def _by_name(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_entry)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _is_entry(node: Any) -> bool:
    return hasattr(node, "dtype")


@contextmanager
def _reader(folder: str) -> Iterator[tuple[Any, Any]]:
    with _orbax(ArgumentsError, "the folder is an Orbax checkpoint") as ocp:
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                yield ocp, reader
        except JaxprToolError:
            raise
        except Exception as error:  # Orbax passes on the errors of TensorStore, of many types
            raise ArgumentsError(f"the checkpoint is damaged: {_cause(error)}") from error


@contextmanager
def _orbax(error: type[JaxprToolError], why: str) -> Iterator[Any]:
    """Import Orbax, which takes a second, and silence its log: errors are raised as well."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as fault:
        if fault.name is None or fault.name.partition(".")[0] != "orbax":
            raise
        raise error(
            f"{why}, and orbax-checkpoint is not installed",
            "pip install orbax-checkpoint",
        ) from None
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL)
    # After one array fails, TensorStore's threads report the others to an event loop that is gone.
    sys.unraisablehook = lambda _: None
    try:
        yield ocp
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    """Return an error in one line: the operating system's, if that is its cause."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    for reason in ("No space left on device", "File too large"):
        if reason in str(error):
            return reason
    return described(error)
