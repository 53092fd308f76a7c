"""Files that are written whole or not at all, and files that are read only if they are plain ones.

What is written goes into a temporary file, which then takes the place of the one that it is for.
A symbolic link stays, and the file that it leads to is replaced. Devices, pipes and this process's
own descriptors (`/dev/stdout`) cannot be replaced: they are written to.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO

from jaxprtool.errors import OutputError

#: What temporary files are called; those of writers that were killed stay.
TEMPORARY = ".jaxprtool-"
_DESCRIPTOR = re.compile(r"/dev/(?:fd/|std)(\d+|in|out|err)")
_STANDARD = {"in": 0, "out": 1, "err": 2}


# --- writing --------------------------------------------------------------------------------------


def check_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text. Raises OutputError for one that can be no file's."""
    path = os.fsdecode(path)
    if "\0" in path:
        raise OutputError(f"cannot write {path!r}: a path has no NUL characters")
    if os.path.isdir(path) or not os.path.basename(path):
        raise OutputError(f"cannot write '{path}': it is a folder")
    return path


@contextmanager
def file_written_whole(path: str) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name when all is written, and leaves no trace if not.

    A file that is there keeps its mode and, where that is allowed, its owner. A stream (see
    `is_stream`) is written to at once. The path is opened at once, so that one that cannot be
    written is known before the work is done.

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
    """Whether a path leads to a device, a pipe or a descriptor, which has nothing beside it."""
    if _DESCRIPTOR.fullmatch(path):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # not there, or no path: opening it says so
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _opened_stream(path: str) -> BinaryIO:
    found = _DESCRIPTOR.fullmatch(path)
    if found is None:
        return open(path, "wb")
    # Opened by its path, a file that stdout is sent to would be cut off, and have two positions.
    sys.stdout.flush()
    number = _STANDARD.get(found[1])
    return os.fdopen(os.dup(int(found[1]) if number is None else number), "wb")


@contextmanager
def _temporary(path: str, folder: str) -> Iterator[BinaryIO]:
    """Open a new file in `folder` that is gone at the end, unless it has been given another name.

    It has the mode that a new file has, or that of the file at `path`.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    name = os.path.join(folder, TEMPORARY + os.urandom(8).hex())
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


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold a folder against others that lock it; where that is not possible, go on without."""
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
    """Return whether an open file is a device and no terminal: one may give zeros for ever."""
    try:
        mode = os.fstat(file.fileno()).st_mode
    except (OSError, ValueError):  # a file in memory
        return False
    return stat.S_ISCHR(mode) and not file.isatty()


def opened_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading, or what a symbolic link to one leads to.

    Raises:
        OSError: If it cannot be opened, or is a device, a pipe or a folder, which may have no end.
    """
    # Opening a pipe would wait for someone who writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a device or a pipe, and no plain file")
