"""Find pipelines that make a program compile faster, by trying them.

`outline` and `roll` are inserted before the first transformation of a pipeline, such as `grad`, or
after its last pass. Each pipeline is run, and the compile time of its result is estimated, or its
kernels are counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.analysis.compile_time import CompileEstimate, CompileWay, compile_estimate
from jaxprtool.analysis.memory import temporary_memory
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import copies_of_body
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.framework.pipeline import Pipeline, Step
from jaxprtool.passes.loops.outline import Outline
from jaxprtool.passes.loops.roll import Roll

#: A pipeline helps if it lowers the estimated compile time by this factor, and by this many seconds
#: of CPU time. Without an estimate, the number of different kernels counts, of programs of this
#: many equations.
FACTOR, LEAST_SECONDS, LEAST_EQUATIONS = 1.25, 0.2, 100


def compile_ways(
    traced: Program, pipeline: Pipeline, result: Program, outlining: Outline
) -> list[tuple[CompileWay, Program]]:
    """Return the pipelines that shorten compilation, after the given one.

    Args:
        traced: The program as traced.
        pipeline: The given pipeline.
        result: The program that it returns.
        outlining: The pass `outline`, with the user's options.

    Returns:
        The given pipeline and its program; then the pipelines that help, the fastest first, each
        with the program that it returns. Without an estimate of the time, those with the fewest
        kernels are first. Empty if sizes are symbolic.
    """
    original = _way(str(pipeline), result)
    if original is None:
        return []
    ways: list[tuple[CompileWay, Program]] = []
    for other in _others(pipeline, outlining) if _is_slow(original.estimate) else ():
        try:
            program = other(traced)
        except JaxprToolError:
            continue  # a pass does not support the result of roll or outline
        if not isinstance(program, Program):
            continue
        way = _way(str(other), program, original.estimate)
        if way is not None and _work(way.estimate) * FACTOR < _work(original.estimate):
            ways.append((way, program))
    ways.sort(key=lambda pair: _order(pair[0].estimate))
    return [(original, result), *ways]


def without_unroll(program: Program) -> Program:
    """Return a program whose loops are compiled as loops, whatever their option `unroll` says."""

    def loop(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if copies_of_body(eqn) == 1:
            return None
        return [eqn.replace(params={**eqn.params, "unroll": 1})]

    return program.replace(jaxpr=map_equations(program.jaxpr, loop))


def _is_slow(estimate: CompileEstimate) -> bool:
    if estimate.seconds is None:
        return estimate.equations >= LEAST_EQUATIONS
    return estimate.seconds > LEAST_SECONDS


def _work(estimate: CompileEstimate) -> float:
    """Return the seconds to compile a program, or without an estimate the different kernels."""
    return estimate.different if estimate.seconds is None else estimate.seconds


def _order(estimate: CompileEstimate) -> float:
    return estimate.kernels if estimate.seconds is None else estimate.seconds


def _others(pipeline: Pipeline, outlining: Outline) -> Iterator[Pipeline]:
    """Yield the pipelines with `roll` or `outline` before transformations, and at the end."""
    steps = tuple(pipeline.steps)
    preserve = [transform.preserves for step in steps for transform in Pipeline((step,)).passes()]
    for inserted in (Step(Roll()), Step(outlining)):
        if not all(preserve):
            yield Pipeline((inserted, *steps))
        yield Pipeline((*steps, inserted))


def _way(pipeline: str, program: Program, like: CompileEstimate | None = None) -> CompileWay | None:
    estimate = compile_estimate(program, like)
    if estimate is None:
        return None
    return CompileWay(pipeline, estimate, temporary_memory(program))
