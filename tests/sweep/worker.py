"""A process that runs units of the sweep, one after the other, and tells what came of each."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import resource
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: A process that holds more than this ends after its unit; XLA does not give all memory back.
MOST_BYTES = int(os.environ.get("SWEEP_MOST_BYTES", 5 * 2**30))

#: After how many new objects garbage is looked for: traces make many, and most are not garbage.
GARBAGE_EVERY = 100_000

#: After how many programs JAX's caches are emptied, which makes it trace its own functions again.
CLEAR_EVERY = 60


@dataclass(frozen=True)
class Task:
    """A unit of a part, and which of its programs are to run: a share of them, but for `done`."""

    part: str
    unit: str
    share: float
    seed: int
    done: frozenset[str]


def is_drawn(part: str, program: str, share: float, seed: int) -> bool:
    """Return whether a program is in the share; one that is, is in every larger share too."""
    return _place(part, program, seed) < share


def drawn_units(part: str, units: Sequence[str], share: float, seed: int) -> list[str]:
    """Return a share of the units, at least one; they are among those of every larger share."""
    count = math.ceil(share * len(units))
    return sorted(units, key=lambda unit: _place(part, unit, seed))[:count]


def _place(part: str, name: str, seed: int) -> float:
    """Return a number from 0 to 1 that the seed gives a name."""
    digest = hashlib.blake2b(f"{seed} {part} {name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


class PipeLog:
    """The log of a task: sends `("started", program)` and `("done", result)`."""

    def __init__(self, task: Task, connection: Connection):
        self.task, self.connection, self.count = task, connection, 0

    def wants(self, program: str) -> bool:
        task = self.task
        drawn = is_drawn(task.part, program, task.share, task.seed)
        return drawn and program not in task.done

    def started(self, program: str) -> None:
        self.connection.send(("started", program))

    def done(self, result: Any) -> None:
        self.connection.send(("done", result))
        self.count += 1


def work(connection: Connection, source: str) -> None:
    """Run the tasks that come in; `source` is the "module:function" that gives the parts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    import_module("tests.conftest")  # sets JAX up, before it is imported
    gc.set_threshold(GARBAGE_EVERY)
    parts = {part.name: part for part in parts_of(source)}
    count = 0
    while True:
        task = connection.recv()
        log = PipeLog(task, connection)
        parts[task.part].run(task.unit, log)
        count += log.count
        if count >= CLEAR_EVERY:
            count = 0
            import_module("jax").clear_caches()
        full = resident_bytes() > MOST_BYTES
        connection.send(("finished", full))
        if full:
            return


def resident_bytes() -> int:
    """Return the memory that this process holds; `ru_maxrss` begins with that of its parent."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def parts_of(source: str) -> Collection[Any]:
    """Return the parts that a "module:function" gives."""
    module, _, function = source.partition(":")
    return getattr(import_module(module), function)()
