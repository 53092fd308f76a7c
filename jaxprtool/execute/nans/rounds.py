"""Rounds of a loop, compiled: they run until an equation makes a NaN or an infinity.

A loop stops before the first round in which something is made that is not to be ignored, or from
which something gets out that no value had before, so that this round can be run again, equation by
equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.compiled import Compiled, Mask, Results, any_of, either
from jaxprtool.ir.equations import equations
from jaxprtool.ir.structured import Scan, While
from jaxprtool.jaxcompat import JaxprEqn


class Known(NamedTuple):
    """What is known before rounds run.

    Attributes:
        ignored: For each equation whether a NaN and an infinity that it makes are no reason to
            stop.
        places: For each equation the places in masks of the NaN and the infinity that it is known
            to make, or -1; None if nothing is followed.
        watched: Whether to stop where an origin gets out of a round that no value had before.
    """

    ignored: Any
    places: Any
    watched: Any


class Ran(NamedTuple):
    """How far rounds have run.

    Attributes:
        number: The number of the round before which they stopped, or of all rounds.
        carry: The carry then.
        carry_masks: Its masks.
        counts: How often each equation made a NaN and an infinity in these rounds.
        ys: The stacked results of a scan.
        ys_masks: Their masks.
        more: Whether a while loop has another round.
    """

    number: Any
    carry: Sequence[Any]
    carry_masks: Sequence[Mask]
    counts: Any
    ys: Sequence[Any]
    ys_masks: Sequence[Mask]
    more: Any


def body_equations(loop: Scan | While) -> list[JaxprEqn]:
    """Return the equations that have counts: those of the bodies of a loop, at any depth."""
    bodies = (loop.body,) if isinstance(loop, Scan) else (loop.body, loop.cond)
    found = {id(e): e for body in bodies for e in equations(jaxcompat.open_jaxpr(body))}
    return list(found.values())


def scan_rounds(scan: Scan) -> Callable[..., Ran]:
    """Return a function that runs rounds of a scan.

    It takes what is known, how far it has run, the constants and the scanned operands, and the
    masks of these. It returns how far it has run then.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(scan))}

    @jax.jit
    def run(known: Known, ran: Ran, consts: Any, xs: Any, masks: Any) -> Ran:
        const_masks, xs_masks = masks

        def one(ran: Ran) -> tuple[Ran, Any]:
            place = scan.length - 1 - ran.number if scan.reverse else ran.number
            rows = [jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for x in xs]
            outs = Compiled(numbers, known.places).results(
                scan.body,
                [*consts, *ran.carry, *rows],
                [*const_masks, *ran.carry_masks, *xs_masks],
            )
            count = len(ran.carry)
            stacked = [
                jax.lax.dynamic_update_index_in_dim(y, row, place, 0)
                for y, row in zip(ran.ys, outs.data[count:], strict=True)
            ]
            after = Ran(
                ran.number + 1,
                outs.data[:count],
                outs.masks[:count],
                ran.counts + outs.counts,
                stacked,
                either(ran.ys_masks, outs.masks[count:]),
                ran.more,
            )
            before = [*const_masks, *xs_masks, *ran.carry_masks, *ran.ys_masks]
            return after, _stops(known, before, outs)

        return _until_stopped(lambda ran: ran.number < scan.length, one, ran)

    return run


def while_rounds(loop: While) -> Callable[..., Ran]:
    """Return a function that runs rounds of a while loop.

    It takes what is known, how far it has run, the constants of the condition and of the body, and
    the masks of these. It returns how far it has run then.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(loop))}

    @jax.jit
    def run(known: Known, ran: Ran, deciding: Any, consts: Any, masks: Any) -> Ran:
        deciding_masks, const_masks = masks

        def one(ran: Ran) -> tuple[Ran, Any]:
            outs = Compiled(numbers, known.places).results(
                loop.body, [*consts, *ran.carry], [*const_masks, *ran.carry_masks]
            )
            asked = Compiled(numbers, known.places).results(
                loop.cond, [*deciding, *outs.data], [*deciding_masks, *outs.masks]
            )
            outs = outs._replace(counts=outs.counts + asked.counts)
            after = ran._replace(
                number=ran.number + 1,
                carry=outs.data,
                carry_masks=outs.masks,
                counts=ran.counts + outs.counts,
                more=asked.data[0],
            )
            before = [*deciding_masks, *const_masks, *ran.carry_masks]
            return after, _stops(known, before, outs)

        return _until_stopped(lambda ran: ran.more, one, ran)

    return run


def _stops(known: Known, before: Sequence[Mask], outs: Results) -> Any:
    """Return whether a round is to be run by hand."""
    stops = ((outs.counts > 0) & ~known.ignored).any()
    new = any_of(outs.masks) & ~any_of(before)
    return stops | (known.watched & new.any())


def _until_stopped(
    more: Callable[[Ran], Any], one: Callable[[Ran], tuple[Ran, Any]], start: Ran
) -> Ran:
    def round_(state: tuple[Ran, Any]) -> tuple[Ran, Any]:
        before, _ = state
        after, stops = one(before)
        # Stacked results need not be restored: the round writes its rows again.
        pair = before._replace(ys=[]), after._replace(ys=[])
        kept: Ran = jax.tree.map(lambda a, b: jnp.where(stops, a, b), *pair)
        return kept._replace(ys=after.ys), stops

    return jax.lax.while_loop(
        lambda state: more(state[0]) & ~state[1], round_, (start, jnp.array(False))
    )[0]
