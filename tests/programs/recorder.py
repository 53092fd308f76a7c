"""What the callbacks of a running program saw, in the order in which they saw it."""

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
    """One call of a recording callback; `tag` tells which, `ordered` whether its place counts.

    Its place is one among those of its `kind`: JAX orders callbacks of one effect alone.
    """

    tag: int
    ordered: bool
    value: np.ndarray
    kind: str = ""


@dataclass
class Recording:
    """The events of a run, and what it printed."""

    events: list[Event] = field(default_factory=list)
    printed: StringIO = field(default_factory=StringIO)


_recordings: list[Recording] = []


def record(tag: int, ordered: bool, value: Any, kind: str = "") -> None:
    """For callbacks: note that the callback `tag` saw `value`, in the innermost recording."""
    if _recordings:
        _recordings[-1].events.append(Event(tag, ordered, np.asarray(value), kind))


@contextmanager
def recording() -> Iterator[Recording]:
    """Collect events and standard output; both are complete when the block is left."""
    from contextlib import redirect_stdout

    new = Recording()
    _recordings.append(new)
    try:
        with redirect_stdout(new.printed):
            yield new
            jax.effects_barrier()
    finally:
        _recordings.remove(new)
