"""The half of many programs to prove on the JAX release of this run.

CI runs two releases, which together prove all programs. The sweep proves all on either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

#: 0 on JAX 0.10, 1 on later releases. Found without importing JAX, when tests are collected.
HALF = int(version("jax").split(".")[1] != "10")


def share(items: Sequence[T]) -> Sequence[T]:
    """Return every second item, starting with the first or the second by release."""
    return items[HALF::2]


def on_one_release(test: Test) -> Test:
    """Mark a test whose outcome does not depend on the JAX release, such as one of processes.

    It is a proof on one of CI's two releases, chosen by its name, and marked `sweep` on the other.
    """
    is_here = crc32(test.__name__.encode()) % 2 == HALF
    return (pytest.mark.proof if is_here else pytest.mark.sweep)(test)


def shared_proofs(items: Iterable[Any]) -> list[Any]:
    """Return the items as parameters of a test, tuples as several.

    Those in this release's share are proofs, and the others are marked `sweep`.
    """
    return [
        _parameter(item, pytest.mark.proof if number % 2 == HALF else pytest.mark.sweep)
        for number, item in enumerate(items)
    ]


def for_sweep_unless(chosen: Sequence[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test. Names that are not chosen are marked `sweep`.

    All chosen ones but the first are proofs.
    """
    first, *proofs = chosen
    marks = {first: (), **dict.fromkeys(proofs, pytest.mark.proof)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.sweep)) for name in names]


def first_and_proofs(items: Iterable[Any]) -> list[Any]:
    """Return the items as parameters of a test, tuples as several.

    The first one is no proof, and the others are shared among the releases.
    """
    items = list(items)
    return [_parameter(items[0]), *shared_proofs(items)[1:]]


def _parameter(item: Any, *marks: Any) -> Any:
    if isinstance(item, type(pytest.param())):
        return pytest.param(*item.values, id=item.id, marks=[*item.marks, *marks])
    return pytest.param(*(item if isinstance(item, tuple) else (item,)), marks=marks)
