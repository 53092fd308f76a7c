"""A process that runs units of the sweep, and sends the results of their programs."""

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

#: A process with more memory ends after its unit, since XLA does not free all memory.
MOST_BYTES = int(os.environ.get("SWEEP_MOST_BYTES", 5 * 2**30))

#: The threshold of garbage collection: traces make many objects, most of which are not garbage.
GARBAGE_EVERY = 100_000

#: The number of programs after which JAX's caches are cleared, so that it traces its functions
#: again.
CLEAR_EVERY = 60


@dataclass(frozen=True)
class Task:
    """A unit of a part, and the programs to run: a share of them, except `done`."""

    part: str
    unit: str
    share: float
    seed: int
    done: frozenset[str]


def is_drawn(part: str, program: str, share: float, seed: int) -> bool:
    """Return True if a program is in the share. Larger shares contain smaller ones."""
    return _place(part, program, seed) < share


def drawn_units(part: str, units: Sequence[str], share: float, seed: int) -> list[str]:
    """Return a share of the units, at least one. Larger shares contain smaller ones."""
    count = math.ceil(share * len(units))
    return sorted(units, key=lambda unit: _place(part, unit, seed))[:count]


def _place(part: str, name: str, seed: int) -> float:
    """Return a number from 0 to 1, determined by the seed and the name."""
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
    """Run the tasks that are received. `source` is the "module:function" that returns the parts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates this process
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    import_module("tests.conftest")  # configures JAX before its import
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
    """Return the memory of this process. `ru_maxrss` would start with that of its parent."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def parts_of(source: str) -> Collection[Any]:
    """Return the parts of a "module:function"."""
    module, _, function = source.partition(":")
    return getattr(import_module(module), function)()
