"""Compiled iterations of a loop, which run until an equation produces a NaN or an infinity.

A loop stops before the first iteration that produces a NaN or an infinity that is not ignored, or
whose results have an origin that no value had before, so that this iteration can be rerun equation
by equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.compiled import OriginCounter, any_of, put_at, row_at
from jaxprtool.execute.stepping.iterations import Progress, advanced, bodies_of
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.structured import Scan, While
from jaxprtool.ir.evaluation.interpret import LoopOperands
from jaxprtool.jaxcompat import JaxprEqn


class SearchState(NamedTuple):
    """The state of the search before iterations run.

    Attributes:
        ignored: For each equation, whether a NaN and an infinity that it produces are ignored.
        indices: For each equation, the mask indices of the NaN and the infinity that it is known to
            produce, or -1; None if nothing is followed.
        watched: Whether to stop if a result of an iteration has an origin that no value had before.
    """

    ignored: Any
    indices: Any
    watched: Any


def body_equations(loop: Scan | While) -> list[JaxprEqn]:
    """Return the equations with counts: those in the bodies of a loop, at any depth."""
    found = {id(e): e for body in bodies_of(loop) for e in equations(jaxcompat.open_jaxpr(body))}
    return list(found.values())


def compiled_iterations(loop: Scan | While) -> Callable[..., tuple[Progress, Any]]:
    """Return a function that runs iterations of a loop.

    It takes the `SearchState` state, the progress of the loop, and its operands. It returns the new
    progress, and how often each equation produced a NaN and an infinity.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(loop))}

    @jax.jit
    def run(known: SearchState, start: Progress, given: LoopOperands) -> tuple[Progress, Any]:
        def one(state: Any) -> Any:
            before, counts, _ = state
            inner = OriginCounter(numbers, known.indices)
            after = advanced(loop, given, before, inner.results, row_at, put_at)
            made = inner.counts()
            values = *given.cond_consts, *given.consts, *given.xs, *before.carry, *before.ys
            new = _origins(after.carry, after.ys) & ~_origins(values)
            stops = ((made > 0) & ~known.ignored).any() | (known.watched & new.any())
            # Stacked results need not be restored: the iteration rewrites its rows.
            pair = (before._replace(ys=[]), counts), (after._replace(ys=[]), counts + made)
            kept, counts = jax.tree.map(lambda a, b: jnp.where(stops, a, b), *pair)
            return kept._replace(ys=after.ys), counts, stops

        counts = jnp.zeros((len(numbers), 2), jnp.int32)
        state = start, counts, jnp.array(False)
        return jax.lax.while_loop(lambda state: state[0].more & ~state[2], one, state)[:2]

    return run


def _origins(*groups: Any) -> Any:
    return any_of([x.mask for group in groups for x in group])
