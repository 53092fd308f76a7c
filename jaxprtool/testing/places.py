"""Locate the snapshots of a test: in the folder `__jaxprs__` beside its file.

    tests/test_model.py::test_step      tests/__jaxprs__/test_model/test_step.jaxpr

The pytest plug-in states here which test runs, so this module does not import JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

FOLDER = "__jaxprs__"


@dataclass(frozen=True)
class TestPlace:
    """A running test.

    Attributes:
        file: The file of the test.
        name: The name of the test in the file: `TestModel.test_step[8]`.
    """

    __test__ = False  # pytest takes a class of this name for tests

    file: Path
    name: str

    @property
    def folder(self) -> Path:
        """The folder with the snapshots of all tests of the file."""
        return self.file.parent / FOLDER / self.file.stem

    def snapshot(self, name: str) -> Path:
        """Return the file of a snapshot."""
        return self.folder / snapshot_file(name)


def snapshot_file(name: str) -> str:
    """Return the name of a snapshot's file. `_` replaces characters that some systems forbid."""
    safe = re.sub(r"[^\w.,=+@\[\]-]+", "_", name)
    return f"{safe}.jaxpr"


_current: ContextVar[TestPlace | None] = ContextVar("current", default=None)


@contextmanager
def running(place: TestPlace) -> Iterator[None]:
    """State which test runs in a `with` block."""
    token = _current.set(place)
    try:
        yield
    finally:
        _current.reset(token)


def current_test() -> TestPlace | None:
    """Return the test that runs; None without the pytest plug-in."""
    return _current.get()
