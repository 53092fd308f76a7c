"""Atomic writing of files and folders, and reading restricted to regular files.

Output goes to a temporary file, which then replaces the destination. A symbolic link is kept and
its target replaced. Devices, pipes and this process's own descriptors (`/dev/stdout`) cannot be
replaced and are written directly.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO

from jaxprtool.errors import OutputError

#: The name of a file that stands for stdin or stdout.
STDOUT = "-"

#: The prefix of temporary files. A killed process leaves its temporary files behind.
TEMPORARY = ".jaxprtool-"
#: The environment variable of a supervised process with the mark in the names of its temporary
#: files. The supervisor removes files with this mark (`remove_unfinished`).
SUPERVISED = "JAXPRTOOL_SUPERVISED"
#: How the name of a notebook ends, and what to do with its cells.
NOTEBOOK = ".ipynb"
NOTEBOOK_HINT = "in the notebook, run `%load_ext jaxprtool`, and begin a cell with `%%record`"
_DESCRIPTOR = re.compile(r"/dev/(?:fd/|std)(\d+|in|out|err)")
_STANDARD = {"in": 0, "out": 1, "err": 2}


# --- writing --------------------------------------------------------------------------------------


def check_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text. Raises OutputError if no file can have this path."""
    path = os.fsdecode(path)
    if "\0" in path:
        raise OutputError(f"cannot write {path!r}: a path cannot contain NUL characters")
    if os.path.isdir(path) or not os.path.basename(path):
        raise OutputError(f"cannot write '{path}': it is a folder")
    return path


@contextmanager
def file_written_whole(path: str) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name once it is complete, and is removed on failure.

    An existing file keeps its mode and, where permitted, its owner. A stream (see `is_stream`) is
    written directly. The path is opened first, so that an unwritable path is reported before the
    work is done.

    Raises:
        OutputError: If the file cannot be written.
    """
    check_path(path)
    try:
        if is_stream(path):
            with _opened_stream(path) as stream:
                yield stream
        else:
            target = os.path.realpath(path)
            with _temporary(path, os.path.dirname(target)) as file:
                yield file
                file.close()
                os.replace(file.name, target)
    except OSError as fault:
        raise OutputError(f"cannot write '{path}': {fault.strerror or fault}") from fault


def is_stream(path: str) -> bool:
    """Return True if a path is a device, a pipe or a descriptor, which is written directly."""
    if _DESCRIPTOR.fullmatch(path):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # missing or invalid: reported when it is opened
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _opened_stream(path: str) -> BinaryIO:
    match = _DESCRIPTOR.fullmatch(path)
    if match is None:
        return open(path, "wb")
    # Opening by path a file that stdout is redirected to would truncate it and create a second file
    # offset.
    sys.stdout.flush()
    number = _STANDARD.get(match[1])
    return os.fdopen(os.dup(int(match[1]) if number is None else number), "wb")


@contextmanager
def _temporary(path: str, folder: str) -> Iterator[BinaryIO]:
    """Open a new file in `folder` that is removed on exit unless it has been renamed.

    Its mode is the mode of the file at `path`, or the default mode of new files.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    mark = os.environ.get(SUPERVISED, "")
    name = os.path.join(folder, TEMPORARY + mark + os.urandom(8).hex())
    try:
        with open(name, "xb") as file:
            if old:
                with suppress(PermissionError):
                    os.chown(name, old.st_uid, old.st_gid)
                os.chmod(name, stat.S_IMODE(old.st_mode))
            yield file  # type: ignore[misc]
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def unfinished_folder(path: str) -> str:
    """Return the temporary name of a folder, the same in all processes that write it."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f"{TEMPORARY}{name}")


def finish_folder(path: str) -> None:
    """Rename a complete folder to its final name, and remove the folder that had this name."""
    unfinished, path = unfinished_folder(path), os.path.realpath(path)
    old = f"{unfinished}-old"
    if os.path.isdir(path):
        os.rename(path, old)
    os.rename(unfinished, path)
    shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(path: str, mark: str) -> None:
    """Remove the temporary files of killed processes that were writing a file or folder.

    A folder that they were replacing gets its name back.

    Args:
        path: The file or folder that they were writing.
        mark: The mark in the names of their temporary files; see `SUPERVISED`.
    """
    if is_stream(path):
        return
    folder, _ = os.path.split(os.path.realpath(path))
    unfinished = unfinished_folder(path)
    old = f"{unfinished}-old"
    with suppress(OSError):
        if os.path.isdir(old) and not os.path.lexists(os.path.realpath(path)):
            os.rename(old, os.path.realpath(path))
        for name in os.listdir(folder):
            left = os.path.join(folder, name)
            if name.startswith(TEMPORARY + mark):
                os.unlink(left)
            elif left in (unfinished, old) or left.startswith(f"{unfinished}.orbax-"):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Lock a folder against other processes; without support for locks, proceed unlocked."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- reading --------------------------------------------------------------------------------------


def is_device(file: IO[Any]) -> bool:
    """Return True if an open file is a device but not a terminal, since it may never end."""
    try:
        mode = os.fstat(file.fileno()).st_mode
    except (OSError, ValueError):  # a file in memory
        return False
    return stat.S_ISCHR(mode) and not file.isatty()


def opened_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one, for reading.

    Raises:
        OSError: If it cannot be opened, or is a device, a pipe or a folder.
    """
    # Opening a pipe would block until a process opens it for writing.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a device or a pipe, not a regular file")


def suffix_of(path: str | None) -> str:
    """Return the suffix of a file name, in lower case."""
    return os.path.splitext(path or "")[1].lower()
