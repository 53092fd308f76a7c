"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from jaxprtool.errors import OutputError


@contextmanager
def file_written_whole(path: str) -> Iterator[BinaryIO]:
    """A file to write that takes its name when all is written, and leaves no trace if it is not.

    It is opened at once, so that a path that cannot be written is known before the work is done.
    Raises OutputError.
    """
    import tempfile  # a while to import, and seldom needed

    folder, name = os.path.split(path)
    if os.path.isdir(path) or not name:
        raise OutputError(f"cannot write '{path}': it is a folder")
    try:
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115
            dir=folder or ".", prefix=f".{name}.", delete=False
        )
    except OSError as fault:
        raise OutputError(f"cannot write '{path}': {fault.strerror}") from fault
    try:
        with file:
            yield file  # type: ignore[misc]
        os.chmod(file.name, 0o666 & ~_umask())
        os.replace(file.name, path)
    except OSError as fault:
        os.unlink(file.name)
        raise OutputError(f"cannot write '{path}': {fault.strerror}") from fault
    except BaseException:
        os.unlink(file.name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
