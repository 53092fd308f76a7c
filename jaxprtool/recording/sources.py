"""Keep the texts of the user's source files in the folder of a run.

A run keeps each text once, whichever of its processes and programs use it: `sources/DIGEST.txt`.
`jaxprtool.ir.source_text` shows them when the files have changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from jaxprtool.files import file_written_whole
from jaxprtool.ir import source_text


class _LoadedText(NamedTuple):
    """The text of a file when it was first kept, and the import that had run it."""

    digest: str
    spec: Any


class KeptSources:
    """Writes the source texts that a process runs to the folder of a run, each once.

    Args:
        run: The folder of the run.
        since: When the process began. A file that is edited later has the text that was kept
            earlier; without one its text is not known.
        kept: Called with a file and its digest when a text of it is first kept.
    """

    def __init__(
        self,
        run: str,
        since: float,
        kept: Callable[[str, str], None] = lambda file, digest: None,
    ) -> None:
        self._folder, self._since = os.path.join(run, source_text.SOURCES), since
        self._report = kept
        self._loaded: dict[str, _LoadedText] = {}

    def keep(self, file: str) -> str:
        """Keep the text of a file, and return its digest; "" if it is not known.

        Raises:
            OutputError: If it cannot be written.
        """
        if source_text.path(file) != file:  # of a program that was read
            return source_text.source_digest(file)
        loaded = self._loaded.get(file)
        data = source_text.text_since(file, self._since)
        if data is None:
            return loaded.digest if loaded is not None and _runs_still(file, loaded) else ""
        digest = source_text.text_digest(data)
        if loaded is None or loaded.digest != digest:
            self._loaded[file] = _LoadedText(digest, _spec(file))
            self._write(digest, data)
            self._report(file, digest)
        return digest

    def _write(self, digest: str, data: bytes) -> None:
        path = os.path.join(self._folder, f"{digest}{source_text.KEPT}")
        if not os.path.exists(path):
            with suppress(OSError):  # reported by the next line
                os.makedirs(self._folder, exist_ok=True)
            with file_written_whole(path) as file:
                file.write(data)


def _runs_still(file: str, loaded: _LoadedText) -> bool:
    """Return True if the process runs a text of a file although the file has been edited.

    It may run the new one if the module was reloaded. IPython's `%autoreload` also replaces
    functions without reloading their module.
    """
    return "IPython" not in sys.modules and _spec(file) is loaded.spec


def _spec(file: str) -> Any:
    """Return the specification of the module of a file, which a reload replaces; None for none."""
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", {})
        if variables.get("__file__") == file:
            return variables.get("__spec__")
    return None
