"""Proposals of values that `jax.checkpoint` should save within a budget of bytes.

The names to save are chosen by a model (`analysis.saving`) and verified: the program is
differentiated under `jax.checkpoint` with them. If it keeps other values than predicted, the model
is updated and the choice repeated. Of these names and of JAX's policies, in each place
(`placements`), the one with the lowest peak memory is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost import cost
from jaxprtool.analysis.expressions import Named, nameable_values, named
from jaxprtool.analysis.residuals import (
    Placement,
    Proposal,
    SavedValue,
    kept_values,
    peak_of,
    total_bytes,
)
from jaxprtool.analysis.saving import Saving
from jaxprtool.api.investigate.placements import Argnums, measured, places
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.transforms.calls import Checkpoint
from jaxprtool.passes.transforms.linear import Vjp
from jaxprtool.passes.transforms.named_values import name_values

#: A part of the names of policies that move values to the memory of the host.
_OFFLOAD = "offload"

#: The number of times a choice is repeated with an updated model.
_TRIES = 5


def proposal(
    program: Program,
    argnums: Argnums,
    gradient: Programs,
    budget: int,
    rows: Sequence[Placement],
    compiled: bool = False,
) -> Proposal:
    """Return what to save so that the gradient of a program stays within a budget.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.
        gradient: The result of the pass `vjp` on it, forward and backward.
        budget: The number of bytes that may be kept.
        rows: The memory of the gradient as it is, and with each policy in each place.
        compiled: Whether to compile the gradients, for the peaks that XLA states.

    Raises:
        ArgumentsError: If nothing stays within the budget, with the minimum possible; if sizes
            are symbolic.
    """
    kept, flops = total_bytes(gradient["backward"]), _flops(gradient)
    if kept is None:
        hint = 'write them in --args, or -p "specialize(n=512)"'
        raise ArgumentsError("a budget needs sizes that are numbers", hint)
    if kept <= budget:
        return Proposal(budget, "", (), kept, flops, flops)
    before, *tested = rows
    choice = _Choice(program, argnums, budget)
    tested += choice.placements(compiled)
    least = min(choice.bytes, *(each.total_bytes for each in tested))
    if least > budget:
        raise ArgumentsError(
            f"no choice of values to save keeps {program.name} within {budget:,} bytes: the "
            f"minimum is {least:,}, including arguments that are read again",
            f"the minimum budget is {least}, which is {in_bytes(least)}",
        )
    fitting = [each for each in tested if each.total_bytes <= budget]
    lower = [each for each in fitting if peak_of(each) < peak_of(before)]
    best = min(lower, key=_rank, default=None)
    found = choice.policy, choice.values, choice.bytes, choice.flops
    if choice.bytes > budget:
        fits = min(fitting, key=lambda each: each.flops)
        found = fits.policy, (), fits.total_bytes, fits.flops
    cheaper = None if best is None else _cheaper(best, before, lower)
    return Proposal(budget, *found, flops, before, best, cheaper)


def _rank(placement: Placement) -> tuple[object, ...]:
    """Return a sort key for placements, the best first."""
    offloads = _OFFLOAD in placement.policy  # its transfers are in no figure
    is_simple = placement.policy == _policy(())
    return peak_of(placement), offloads, placement.flops, placement.total_bytes, not is_simple


def _cheaper(best: Placement, before: Placement, lower: Sequence[Placement]) -> Placement | None:
    """Return the placement of the fewest FLOPs that saves at least half as much as the best."""
    limit = (peak_of(best) + peak_of(before)) / 2
    worth = [p for p in lower if peak_of(p) <= limit and _OFFLOAD not in p.policy]
    found = min(worth, key=lambda each: (each.flops, peak_of(each)), default=best)
    return found if found.flops < best.flops else None


class _Choice:
    """The named values to save within a budget, with the fewest FLOPs.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.
        budget: The number of bytes that may be kept.

    Attributes:
        policy: The policy that saves them, as source.
        values: The values.
        bytes: The bytes that are kept with the policy around the whole program. More than the
            budget if no choice fits.
        flops: The FLOPs of the gradient with it.
    """

    def __init__(self, program: Program, argnums: Argnums, budget: int) -> None:
        self._argnums = argnums
        self._program, places = _with_names(program)
        labelled = Vjp(argnums=argnums)(self._program)
        jaxpr = jaxcompat.open_jaxpr(labelled["forward"].jaxpr)
        given = checkpoint_names(program)
        model = Saving(jaxpr, kept_values(labelled["forward"], labelled["backward"]), given)
        proven = _choose(self._program, argnums, model, budget)
        largest = sorted(proven.names, key=lambda name: -model.bytes[name])
        new = [label for label in largest if label not in given]
        # New names differ from those in the program, whose other values would be saved too.
        called = unique([*given, *(places[label].name for label in new)])[len(given) :]
        names = {**dict(zip(given, given, strict=True)), **dict(zip(new, called, strict=True))}
        self.values = tuple(
            SavedValue(names[label], places[label].source, places[label].code, model.bytes[label])
            for label in largest
        )
        self._labels = proven.names
        self.policy = _policy([value.name for value in self.values])
        self.bytes, self.flops = proven.bytes, proven.flops

    def placements(self, compiled: bool) -> Iterator[Placement]:
        """Yield the memory of the gradient with these values saved, in each place."""
        for only in places(self._program) if self.values else ():
            with suppress(UnsupportedError):  # it has effects
                policy = _policy(self._labels)
                found = measured(self._program, self._argnums, only, policy, compiled)
                yield replace(found, policy=self.policy)


def _flops(gradient: Programs) -> Any:
    """Return the FLOPs of a gradient: of its forward and backward programs."""
    return sum(cost(program).total.work.flops for _, program in gradient.items())


# --- values that can be saved -----------------------------------------------------------------


def checkpoint_names(program: Program) -> list[str]:
    """Return the names of `checkpoint_name` in a program."""
    return sorted({str(eqn.params["name"]) for eqn in _names(program)})


def _names(program: Program) -> list[JaxprEqn]:
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in eqns if eqn.primitive.name == "name"]


def _with_names(program: Program) -> tuple[Program, dict[str, Named]]:
    """Return a program with a name for each value of a user's expression, and the named values.

    A value that already has a name keeps it.
    """
    frames, jaxpr = frames_now(program.roots), jaxcompat.open_jaxpr(program.jaxpr)
    places: dict[str, Named] = {}
    for eqn in _names(program):
        name = str(eqn.params["name"])
        places.setdefault(name, Named(name, BEHIND.join(frames.texts(eqn)), ""))
    found = nameable_values(jaxpr, frames)
    primitives = {v: str(e.primitive.name) for e in equations(jaxpr) for v in e.outvars}
    new = unique([*places, *map(str, range(len(found)))])[len(places) :]
    labels = {v: label for label, each in zip(new, found.values(), strict=True) for v in each}
    places.update(zip(new, named(found, primitives, frames), strict=True))
    return name_values(program, labels), places


# --- choice of the saved values ---------------------------------------------------------------


class _Proven(NamedTuple):
    """Names to save, and the measured bytes and FLOPs of the gradient with them."""

    names: tuple[str, ...]
    bytes: int
    flops: int


def _choose(program: Program, argnums: Argnums, model: Saving, budget: int) -> _Proven:
    """Return the best names to save within a budget, or those that keep least if none fit."""
    proven: dict[tuple[str, ...], _Proven] = {}
    limit = budget
    for _ in range(_TRIES):
        names = model.choose(limit)
        if names is None or names in proven:
            break
        proven[names] = _prove(program, argnums, names)
        limit = budget + model.kept(names) - proven[names].bytes
    if not any(each.bytes <= budget for each in proven.values()):
        for names in ((), model.least()):
            proven.setdefault(names, _prove(program, argnums, names))
    fitting = [each for each in proven.values() if each.bytes <= budget]
    if not fitting:
        return min(proven.values(), key=lambda each: each.bytes)
    return min(fitting, key=lambda each: (each.flops, each.bytes))


def _prove(program: Program, argnums: Argnums, names: Sequence[str]) -> _Proven:
    """Return the measurements of a program's gradient under `jax.checkpoint` with names saved."""
    gradient = Vjp(argnums=argnums)(Checkpoint(_policy(names))(program))
    return _Proven(tuple(names), total_bytes(gradient["backward"]) or 0, _flops(gradient))


def _policy(names: Sequence[str]) -> str:
    """Return the source of a policy that saves these names."""
    return f"save_only_these_names({', '.join(map(repr, names))})" if names else "nothing_saveable"
