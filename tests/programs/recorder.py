"""Record the values that the callbacks of a running program receive, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Event:
    """One call of a recording callback. `tag` identifies it, `ordered` says if its position counts.

    Its position is relative to calls of the same `kind`, as JAX orders callbacks of one effect
    only.
    """

    tag: int
    ordered: bool
    value: np.ndarray
    kind: str = ""


@dataclass
class Recording:
    """The events of a run, and its printed output."""

    events: list[Event] = field(default_factory=list)
    printed: StringIO = field(default_factory=StringIO)


_recordings: list[Recording] = []


def record(tag: int, ordered: bool, value: Any, kind: str = "") -> None:
    """Record, in a callback, that the callback `tag` received `value`."""
    if _recordings:
        _recordings[-1].events.append(Event(tag, ordered, np.asarray(value), kind))


@contextmanager
def recording() -> Iterator[Recording]:
    """Collect events and standard output. Both are complete after the block."""
    from contextlib import redirect_stdout

    new = Recording()
    _recordings.append(new)
    try:
        with redirect_stdout(new.printed):
            yield new
            jax.effects_barrier()
    finally:
        _recordings.remove(new)
