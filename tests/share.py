"""Which half of many programs is proved on the JAX release that the suite runs on.

CI runs two releases, and together they prove all of them. The sweep proves all on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TypeVar

T = TypeVar("T")

#: 0 on JAX 0.10, 1 on later releases: read without importing JAX, as tests are collected.
HALF = int(version("jax").split(".")[1] != "10")


def share(items: Sequence[T]) -> Sequence[T]:
    """Return every second item, beginning with the first or the second by release."""
    return items[HALF::2]
