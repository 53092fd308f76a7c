"""Atomic writing of texts together with the `.npz` files of their large constants.

    loss.jaxpr    loss.jaxpr.1f2e3d4c5b6a7988.npz

A text names its constants file, whose name contains a digest of its contents. Each text thus finds
its own constants, even while others are written or after a writer was killed. A constants file is
in place before the text that names it, and is removed when no text in the folder names it any more.
Writers to one folder lock it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np

from jaxprtool.files import TEMPORARY, file_written_whole, is_stream, locked, opened_plain
from jaxprtool.formats.npz import write_npz

_CONSTANTS = re.compile(r"(.*)\.[0-9a-f]{16}\.npz", re.DOTALL)
#: The number of bytes at the start of a text that contain the name of its constants file.
_HEAD = 1 << 16


@dataclass(frozen=True)
class Text:
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


def write_texts(texts: Iterable[Text], keep_previous: bool = False) -> None:
    """Write texts with their constants files: all of them, or none if one cannot be written.

    With `keep_previous`, the constants file of a replaced text is kept until the text is replaced
    by one with other constants again, for readers that have read the text but not yet its
    constants.

    Raises:
        OutputError: If a file cannot be written.
    """
    texts = list(texts)
    targets = [_Target.of(text) for text in texts if not is_stream(text.path)]
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
class _Target:
    """The destination of a text after symbolic links; `constants` is its constants file's name."""

    text: Text
    folder: str
    name: str
    constants: str | None

    @classmethod
    def of(cls, text: Text) -> _Target:
        constants = constants_file(text.path, text.arrays) if text.arrays else None
        return cls(text, *os.path.split(os.path.realpath(text.path)), constants)


def _remove_unused(target: _Target, replaced: bytes, keep_previous: bool) -> None:
    """Remove the former constants files of a text that no text in the folder names."""
    found = [n for n in os.listdir(target.folder) if _CONSTANTS.fullmatch(n)]
    was = {n for n in found if mention(n).encode() in replaced}
    own = {n for n in found if _CONSTANTS.sub(r"\1", n) == target.name}
    unused = (own | was) - {target.constants}
    if keep_previous:
        unused = set() if target.constants in was else unused - was
    for entry in os.scandir(target.folder) if unused else ():
        if not entry.name.startswith(TEMPORARY) and entry.name not in found and entry.is_file():
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
