"""The process: Python's recursion limit, its garbage collector, and the programs beside it.

JAX traces programs of about 140 nested bodies within Python's default limit of 1,000 calls. Passes,
tables and pages take up to 15 calls for each body, twice as many as tracing, so a command raises
the limit. A user's code still has the limit that it has without jaxprtool: twice as many bodies
overflow the stack of XLA's compiler, which ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# --- recursion ------------------------------------------------------------------------------------
# Python's recursion limit during a command, and while a user's code is imported or traced.

#: The limit during a command.
_LIMIT = 4000

#: The stack in bytes for each call: what Python's default limit has of the usual 8 MiB. A call
#: through C takes up to 3 kB of it, and a full stack ends the process without a word.
_STACK_PER_CALL = 8192

#: The limit that a command has raised, as it was before.
_default: ContextVar[int | None] = ContextVar("_default", default=None)


@contextlib.contextmanager
def limit_raised() -> Iterator[None]:
    """Raise the recursion limit, so that whatever JAX traces can be rewritten and shown.

    The limit stays where the stack cannot grow: outside the main thread, under a hard limit of the
    system, and on a system without such limits.
    """
    old_limit = sys.getrecursionlimit()
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread() and old_limit < _LIMIT:
            with contextlib.suppress(ImportError, ValueError, OSError):
                stack.enter_context(_stack_raised(_LIMIT * _STACK_PER_CALL))
                stack.callback(sys.setrecursionlimit, old_limit)
                sys.setrecursionlimit(_LIMIT)
                stack.callback(_default.reset, _default.set(old_limit))
        yield


@contextlib.contextmanager
def limit_of_user() -> Iterator[None]:
    """Lower the recursion limit to that before the command, unless the user has set another one."""
    default = _default.get()
    if default is None or sys.getrecursionlimit() != _LIMIT:
        yield
        return
    sys.setrecursionlimit(default)
    try:
        yield
    finally:
        if sys.getrecursionlimit() == default:
            sys.setrecursionlimit(_LIMIT)


@contextlib.contextmanager
def _stack_raised(size: int) -> Iterator[None]:
    """Let the stack of the main thread grow to a size in bytes.

    Raises ImportError, ValueError or OSError if the system does not allow it.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        yield
        return
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


# --- collector ------------------------------------------------------------------------------------
# Pause Python's garbage collector while many long-lived objects are created, or let it run rarely.

#: The number of new objects after which it runs during a command. With Python's 700, it takes a
#: seventh of the time of most commands: nearly all of their objects live until they end.
_NEW_OBJECTS = 20_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run rarely during a command, unless it is set otherwise."""
    old = gc.get_threshold()
    if old[0] in range(1, _NEW_OBJECTS):
        gc.set_threshold(_NEW_OBJECTS, *old[1:])
    try:
        yield
    finally:
        gc.set_threshold(*old)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector, so that it does not scan new objects again and again.

    All of them live until the work is done; the scans would take a third to a half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- other programs -------------------------------------------------------------------------------
# The CPU time of other programs while something is measured, as Linux counts it.


class OtherPrograms:
    """The CPU time that programs other than this one and its children take from now on."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), _cpu_seconds()

    def cpus(self) -> float | None:
        """Return how many CPUs they have kept busy, on average; None if the system does not say."""
        now, seconds = _cpu_seconds(), time.monotonic() - self._start
        if now is None or self._before is None or seconds < _LEAST_SECONDS:
            return None
        return max((now - self._before) / seconds, 0.0)


#: CPU times are counted in hundredths of a second, so a shorter time says little.
_LEAST_SECONDS = 0.2


def _cpu_seconds() -> float | None:
    """Return the CPU seconds of all programs since the system has started, without our own."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, interrupts, soft, steal = map(
                int, file.readline().split()[1:9]
            )
        parents, times = {}, {}
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                # With the times of its children that have ended.
                parents[int(process)], times[int(process)] = int(fields[1]), fields[11:15]
    except (OSError, ValueError):
        return None
    ours, family = 0, [os.getpid()]
    for parent in family:
        ours += sum(map(int, times.get(parent, ())))
        family += [process for process, above in parents.items() if above == parent]
    busy = user + nice + system + interrupts + soft + steal
    return (busy - ours) / os.sysconf("SC_CLK_TCK")
