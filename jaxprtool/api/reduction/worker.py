"""The process that searches: it forks for every try, and starts no backend of JAX itself.

    python -m jaxprtool.api.reduction.worker FOLDER

FOLDER holds the request; the smallest program so far is written there whenever it gets smaller.
Each line on stdout is a JSON document: what is being done, and in the end how it went.
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
class Request:
    """What is asked for: see `reduce`."""

    check: str
    values: dict[str, Any]
    seed: int
    jobs: int
    seconds: float | None
    memory: int | None
    plugins: tuple[str, ...]
    x64: bool


def main(folder: str) -> None:
    """Reduce the program in a folder."""
    with open(os.path.join(folder, REQUEST), "rb") as file:
        request: Request = pickle.load(file)
    import jax

    jax.config.update("jax_enable_x64", request.x64)
    from jaxprtool.api.program import Program
    from jaxprtool.api.reduction import checks
    from jaxprtool.api.reduction.search import ForkingJudge, Search, State
    from jaxprtool.errors import JaxprToolError
    from jaxprtool.execute.tries import Limits
    from jaxprtool.files import file_written_whole
    from jaxprtool.formats.jaxpr.read import read
    from jaxprtool.formats.jaxpr.write import write
    from jaxprtool.passes.reduction.candidates import count_of
    from jaxprtool.passes.registry import load_plugin

    os.environ[checks.FOLDER] = folder
    program: Program = read(os.path.join(folder, ORIGINAL))
    best = [State(program, request.values)]

    def told(state: State, doing: str) -> None:
        if state is not best[0]:
            best[0] = state
            with file_written_whole(os.path.join(folder, VALUES)) as file:
                pickle.dump(dict(state.values), file)
            write(state.program, os.path.join(folder, BEST), callbacks="stub")
        _say(doing=doing, equations=count_of(state.program), tries=judge.tries)

    try:
        for plugin in request.plugins:
            load_plugin(plugin)
        check = checks.parse(request.check, request.seed)
        limits = Limits(request.seconds or 600.0, request.memory)
        judge = ForkingJudge(check, request.jobs, limits, request.plugins)
        _say(doing="trying the program as it is", equations=count_of(program), tries=0)
        seen = judge.first_look(best[0], request.seconds)
        _say(seen=seen if isinstance(seen, str) else "")
        state = Search(judge, told).run(best[0])
        told(state, "trying the result again")
        _say(ended=True, holds=judge.holds(state), tries=judge.tries)
    except JaxprToolError as error:
        _say(fault=error.message, hint=error.hint)


def _say(**document: Any) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
