"""Delta debugging: the smallest program of which something is still true."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxprtool.api.reduction import checks, worker
from jaxprtool.api.reduction.search import CallingJudge, Search, State
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.program import Program
from jaxprtool.passes.reduction.candidates import count_of
from jaxprtool.processes import Child, last_words, temporary_folder

#: Is told what is being done.
_Told = Callable[[str], object]


@dataclass(frozen=True)
class Reduction:
    """What a reduction has come to.

    Attributes:
        program: The smallest program found.
        values: The values of its arguments that the check depends on, by name.
        equations_before: The number of equations at first, at every depth.
        equations_after: The number now.
        tries: How many programs were tried.
        seconds: How long it took.
        seen: What the check saw of the program as it was given: a signal, a message.
        is_smaller: Whether anything smaller was found.
        holds: Whether the check held for the result when it was tried once more.
        interrupted: Whether the search was cut short.
    """

    program: Program
    values: dict[str, Any]
    equations_before: int
    equations_after: int
    tries: int
    seconds: float
    seen: str = ""
    is_smaller: bool = True
    holds: bool = True
    interrupted: bool = False


def reduce(
    program: Program,
    predicate: str | Callable[[Program], object],
    *,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    jobs: int = 2,
    seconds: float | None = None,
    memory: int | None = None,
    plugins: Sequence[str] = (),
    told: _Told = lambda doing: None,
) -> Reduction:
    """Make a program smaller as long as something stays true of it.

    No step of the reduction can be taken further at any single place of the result.

    Args:
        program: The program.
        predicate: A check, as `jaxprtool reduce --check` takes it: "crash", "nan", "mismatch -p
            fold", …, or a command; each try runs in a process of its own. Or a function of a
            program, which is called in this one, and whose exceptions are not caught.
        values: Values of arguments by name; those not given are random.
        seed: Of random values.
        jobs: How many tries run side by side.
        seconds: How long a try may run; three times what the first took, and 10 at least, if None.
        memory: Bytes of memory that a try may have; without a limit if None.
        plugins: Files or modules with passes, for the pipelines of the check.
        told: Is told what is being done.

    Returns:
        The smallest program found; on Ctrl-C, the smallest so far.

    Raises:
        ArgumentsError: If the predicate is not true of the program, or differs from try to try.
        UnsupportedError: If the program cannot be written to a file.
    """
    start = time.monotonic()
    before = count_of(program)
    given = dict(values or {})
    if isinstance(predicate, str):
        packed = {name: checks.packed(value) for name, value in given.items()}
        x64 = bool(jax.config.jax_enable_x64)
        request = worker.Request(
            predicate, packed, seed, jobs, seconds, memory, tuple(plugins), x64
        )
        found = _in_worker(program, request, told)
    else:
        found = _here(program, given, predicate, told)
    return replace(found, equations_before=before, seconds=time.monotonic() - start)


def _here(
    program: Program, values: dict[str, Any], predicate: Callable[[Program], object], told: _Told
) -> Reduction:
    """Reduce with a function as the predicate, which is called in this process."""
    judge, state = CallingJudge(predicate), State(program, values)
    if not judge.holds(state):
        raise ArgumentsError("the predicate is not true of the program as it was given")
    if not judge.holds(state):
        raise ArgumentsError("the predicate was true of the program, and not a second time")
    best, interrupted = [state], False

    def found(state: State, doing: str) -> None:
        best[0] = state
        told(_line(doing, count_of(state.program), judge.tries))

    try:
        best[0] = Search(judge, found).run(state)
    except KeyboardInterrupt:
        interrupted = True
    return _reduction(best[0].program, dict(best[0].values), program, judge.tries, interrupted)


def _reduction(
    new: Program, values: dict[str, Any], old: Program, tries: int, interrupted: bool, **more: Any
) -> Reduction:
    counts = count_of(old), count_of(new)
    is_smaller = counts[1] < counts[0] or len(str(new.jaxpr)) < len(str(old.jaxpr))
    return Reduction(
        new, values, *counts, tries, 0.0, is_smaller=is_smaller, interrupted=interrupted, **more
    )


def _in_worker(program: Program, request: worker.Request, told: _Told) -> Reduction:
    """Reduce in a process that forks for each try."""
    with temporary_folder("jaxprtool-reduce-") as folder:
        write(program, os.path.join(folder, worker.ORIGINAL), callbacks="stub")
        with open(os.path.join(folder, worker.REQUEST), "wb") as file:
            pickle.dump(request, file)
        errors = os.path.join(folder, "stderr")
        command = [sys.executable, "-m", worker.__name__, folder]
        last: dict[str, Any] = {"tries": 0, "seen": ""}
        interrupted, env = False, dict(os.environ)
        if jax.config.jax_num_cpu_devices > 0:
            env["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
        with open(errors, "wb") as stderr, Child(command, env=env, stderr=stderr) as child:
            try:
                _follow(child.popen, last, told)
            except KeyboardInterrupt:
                interrupted = True
        if "fault" in last:
            raise ArgumentsError(last["fault"], last.get("hint"))
        if not interrupted and "ended" not in last:
            with open(errors, errors="replace") as file:
                said = last_words(file.read())
            raise UnsupportedError(f"the reduction has failed: {said}")
        best, values = program, request.values
        if os.path.exists(os.path.join(folder, worker.BEST)):
            best = read(os.path.join(folder, worker.BEST))
            with open(os.path.join(folder, worker.VALUES), "rb") as file:
                values = pickle.load(file)
        return _reduction(
            best,
            {n: checks.unpacked(v) for n, v in values.items() if n in best.arg_names},
            program,
            last["tries"],
            interrupted,
            seen=last["seen"],
            holds=last.get("holds", True),
        )


def _follow(popen: subprocess.Popen[bytes], last: dict[str, Any], told: _Told) -> None:
    """Follow what a worker says, and keep the last of each thing."""
    assert popen.stdout is not None
    for line in popen.stdout:
        said = json.loads(line)
        last.update(said)
        if "doing" in said:
            told(_line(said["doing"], said["equations"], said["tries"]))


def _line(doing: str, equations: int, tries: int) -> str:
    return f"{doing} · {equations} equations · {tries} tries"
