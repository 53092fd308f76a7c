"""The search of a reduction as a process: it forks for every try.

    python -m jaxprtool.commands.reduce.worker FOLDER

The process never starts a backend of JAX, whose threads a fork would lack. FOLDER holds the
request, and the smallest program so far is written there. Each line on stdout is a JSON document:
the progress and, in the end, the result.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

#: The files in the folder.
REQUEST, ORIGINAL, BEST, VALUES = "request.pickle", "original.jaxpr", "best.jaxpr", "values.pickle"


@dataclass(frozen=True)
class ReductionRequest:
    """The arguments of `reduce`, as they are sent to the worker.

    Attributes:
        check: The check, as text.
        values: The packed values of arguments, by name.
        seed: The seed of random values.
        jobs: The number of tries that run in parallel.
        seconds: The time limit of a try; None to set it by the first.
        memory: The memory limit of a try, in bytes; None for no limit.
        plugins: Files or modules with passes.
        x64: Whether 64-bit types are enabled.
    """

    check: str
    values: dict[str, Any]
    seed: int
    jobs: int
    seconds: float | None
    memory: int | None
    plugins: tuple[str, ...]
    x64: bool


def main(folder: str) -> None:
    """Reduce the program in a folder, and write the result there."""
    with open(os.path.join(folder, REQUEST), "rb") as file:
        request: ReductionRequest = pickle.load(file)
    import jax

    jax.config.update("jax_enable_x64", request.x64)
    from jaxprtool.commands.reduce import checks
    from jaxprtool.commands.reduce.search import ForkingOracle, ReductionSearch, ReductionState
    from jaxprtool.errors import JaxprToolError
    from jaxprtool.execute.sandbox import Limits
    from jaxprtool.files import file_written_whole
    from jaxprtool.formats.jaxpr.read import read
    from jaxprtool.formats.jaxpr.write import write
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.framework.pipeline import load_plugin
    from jaxprtool.passes.reduction import equations_left

    os.environ[checks.FOLDER] = folder
    program: Program = read(os.path.join(folder, ORIGINAL))
    best = [ReductionState(program, request.values)]

    def on_progress(state: ReductionState, doing: str) -> None:
        if state is not best[0]:
            best[0] = state
            with file_written_whole(os.path.join(folder, VALUES)) as file:
                pickle.dump(dict(state.values), file)
            write(state.program, os.path.join(folder, BEST), callbacks="stub")
        _say(doing=doing, equations=equations_left(state.program), tries=oracle.tries)

    try:
        for plugin in request.plugins:
            load_plugin(plugin)
        check = checks.parse_check(request.check, request.seed)
        limits = Limits(request.seconds or 600.0, request.memory)
        oracle = ForkingOracle(check, request.jobs, limits, request.plugins)
        _say(doing="trying the original program", equations=equations_left(program), tries=0)
        seen = oracle.first_look(best[0], request.seconds)
        _say(seen=seen if isinstance(seen, str) else "")
        state = ReductionSearch(oracle, on_progress).run(best[0])
        on_progress(state, "trying the result again")
        _say(ended=True, holds=oracle.holds(state), tries=oracle.tries)
    except JaxprToolError as error:
        _say(fault=error.message, hint=error.hint)


def _say(**document: Any) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
