"""Runs the units of all parts in parallel processes, and saves their results.

If a process dies, or is silent for too long, its current program fails, and a new process continues
after it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.sweep.parts import Result
from tests.sweep.worker import Task, work

#: The time limit for one program, in seconds.
PATIENCE = 900.0


class State:
    """The results so far, each a line of JSON in a file."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.results = {(r.part, r.program): r for r in map(_read, lines) if r is not None}

    def add(self, result: Result) -> None:
        """Add a result. It replaces one of the same program."""
        self.results[result.part, result.program] = result
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def done(self, part: str) -> frozenset[str]:
        """Return the programs of a part that have run."""
        return frozenset(program for name, program in self.results if name == part)


def _read(line: str) -> Result | None:
    try:
        return Result(**json.loads(line))
    except ValueError:  # the line that was being written when the machine stopped
        return None


class _Process:
    """A worker, its task, and its current program."""

    def __init__(self, source: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, source), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.is_full = False
        self.program, self.heard = "", time.monotonic()

    def give(self, task: Task) -> None:
        self.task, self.program, self.heard = task, "", time.monotonic()
        self.connection.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Runner:
    """Runs tasks in `jobs` processes; `progress` is called after each result and each task."""

    def __init__(self, state: State, source: str, jobs: int, patience: float = PATIENCE):
        self.state, self.source, self.jobs, self.patience = state, source, jobs, patience
        self.progress: Callable[[Result | None], None] = lambda result: None

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks to the end."""
        waiting = list(tasks)[::-1]
        with self._processes(min(self.jobs, len(waiting))) as processes:
            while waiting or any(p.task for p in processes):
                for i, each in enumerate(processes):
                    if each.task is None and waiting:
                        processes[i] = self._given(each, waiting.pop())
                self._listen(processes, waiting)

    @contextmanager
    def _processes(self, count: int) -> Iterator[list[_Process]]:
        processes = [_Process(self.source) for _ in range(count)]
        try:
            yield processes
        finally:
            for each in processes:
                each.end()

    def _given(self, process: _Process, task: Task) -> _Process:
        """Give a task to a process, or to a new one if its memory is full."""
        task = replace(task, done=task.done | self.state.done(task.part))
        if process.is_full:
            process.end()
            process = _Process(self.source)
        process.give(task)
        return process

    def _listen(self, processes: list[_Process], waiting: list[Task]) -> None:
        ready = wait([p.connection for p in processes if p.task], timeout=1)
        for i, each in enumerate(processes):
            try:
                if each.connection in ready:
                    self._take(each, *each.connection.recv())
                elif each.program and time.monotonic() - each.heard > self.patience:
                    raise TimeoutError(f"nothing heard for {self.patience:.0f} s")
            except (EOFError, OSError) as error:
                each.process.join(1)
                self._lost(each, error, waiting)
                each.end()
                processes[i] = _Process(self.source)

    def _take(self, process: _Process, kind: str, value: Any) -> None:
        process.heard = time.monotonic()
        match kind:
            case "started":
                process.program = value
            case "done":
                process.program = ""
                self.state.add(value)
                self.progress(value)
            case "finished":
                process.task, process.is_full = None, value
                self.progress(None)

    def _lost(self, process: _Process, error: Exception, waiting: list[Task]) -> None:
        """Fail the current program of a lost process, and reschedule the rest of its task."""
        task, code = process.task, process.process.exitcode
        assert task is not None
        why = str(error) if isinstance(error, TimeoutError) else f"the process ended with {code}"
        name = process.program or f"(unit {task.unit})"
        result = Result(task.part, name, "failed", time.monotonic() - process.heard, error=why)
        self.state.add(result)
        self.progress(result)
        if process.program:  # otherwise, its unit cannot even start
            waiting.append(task)
        else:
            self.progress(None)
