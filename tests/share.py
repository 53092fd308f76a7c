"""The half of many programs to prove on the JAX release of this run.

CI runs two releases, which together prove all programs. The sweep proves all on either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: 0 on JAX 0.10, 1 on later releases. Found without importing JAX, when tests are collected.
HALF = int(version("jax").split(".")[1] != "10")


def share(items: Sequence[T]) -> Sequence[T]:
    """Return every second item, starting with the first or the second by release."""
    return items[HALF::2]


def for_sweep_unless(chosen: Sequence[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test. Names that are not chosen are marked `sweep`."""
    sweep = pytest.mark.sweep
    return [name if name in chosen else pytest.param(name, marks=sweep) for name in names]
