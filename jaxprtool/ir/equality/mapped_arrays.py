"""Arrays that are parts of a file, which is mapped into memory and read on use."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


class FileMap(mmap.mmap):
    """A map of a whole file that is never written through, so that its pages may be released."""

    @classmethod
    def of(cls, file: Any) -> FileMap:
        """Map an open file, which may be closed afterwards."""
        return cls(file.fileno(), 0, access=mmap.ACCESS_READ)


def release_pages(array: np.ndarray) -> None:
    """Release the memory of a mapped array; it is read again on its next use."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, FileMap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
