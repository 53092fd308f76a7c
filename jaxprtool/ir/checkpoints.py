"""Folders of sharded arrays, written and read with Orbax.

Every process writes the shards that it holds, so that no process needs all of an array. The folder
holds the arrays by name; checkpoints of other writers have trees, whose paths are read as names:
`params/w`. Orbax does not store arrays without bytes: their types are in the metadata instead.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprtool.errors import ArgumentsError, JaxprToolError, OutputError, described
from jaxprtool.files import finish_folder, unfinished_folder
from jaxprtool.ir.dtypes import array_dtypes, physical

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
