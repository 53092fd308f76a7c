"""`precision`: find the places that have to stay in the wide dtype.

    found = jaxprtool.precision(program, (params, batch))
    found.kept, found.pipeline

A candidate is the program under `mixed_precision` with some places kept. It is compiled, run on all
inputs of the search, and compared with the program. Delta debugging finds a set of places of which
none can be dropped. The result is then checked on new inputs. Inputs for which it fails are added
to the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.api.targets import RunInputs
from jaxprtool.commands.compare.requested import inputs_from
from jaxprtool.commands.compare.variants import (
    Compared,
    KeptPlace,
    Needs,
    OnProgress,
    Precision,
    Runner,
    Tolerance,
    Variant,
    compared,
)
from jaxprtool.commands.cost.estimate import cost
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.commands.nans.nans import finite_fill
from jaxprtool.commands.reduce.reduction import minimal_subset
from jaxprtool.commands.watch.watch import watch
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.passes.precision import By, EquationPath, MixedPrecision, Narrowing, places_of

#: The number of fresh random inputs that the result is compared on.
_FRESH = 3

#: The number of searches. Each adds the inputs for which the result of the previous one failed.
_SEARCHES = 3


def precision(
    program: Program,
    args: object = None,
    *,
    dtype: str = "bfloat16",
    by: By = "line",
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    trials: int = 1,
) -> Precision:
    """Find the places that have to stay in the wide dtype for results within a tolerance.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves; None for random
            values.
        dtype: The narrow dtype: `bfloat16`, `float16`, or `float32` for double precision.
        by: The kind of places: the user's "line", or the "scope" that modules open.
        rtol: The relative tolerance. By default that of JAX's own tests for the narrow dtype,
            relative to an element, or to the root mean square of its array if that is larger.
        atol: The absolute tolerance; if only one of the two is given, the other is 0.
        seed: The seed of random values.
        trials: The number of random inputs of the search.

    Returns:
        The places, and the pass that keeps them. Without any one of them, some result is not within
        tolerance.

    Raises:
        ArgumentsError: If there is nothing to narrow, the arguments do not fit, a tolerance is
            negative, or there are several trials of given arguments.
        PipelineError: If there is no such dtype.
    """
    inputs = inputs_from([program], args)(program)
    return found_precision(inputs, PrecisionRequest(dtype, by, Tolerance(rtol, atol), seed, trials))


@dataclass(frozen=True)
class PrecisionRequest:
    """The arguments of `precision`."""

    dtype: str
    by: By
    tolerance: Tolerance
    seed: int
    trials: int


def found_precision(
    inputs: RunInputs, request: PrecisionRequest, on_progress: OnProgress = lambda doing: None
) -> Precision:
    """Return the result of `precision` for a program with its inputs."""
    dtype = MixedPrecision(request.dtype).jax_dtype
    request = replace(request, tolerance=replace(request.tolerance, dtype=dtype))
    filled = fill_arguments(inputs.program, inputs.values, request.seed)
    program = inputs.program
    if program.symbols:
        program = program.at([getattr(value, "shape", ()) for value in filled.arguments])
    inputs = replace(inputs, program=with_contents(program))
    return _PrecisionSearch(inputs, request, on_progress).run()


class _PrecisionSearch:
    """The search for places to keep."""

    def __init__(
        self, inputs: RunInputs, request: PrecisionRequest, on_progress: OnProgress
    ) -> None:
        self._given, self._request, self._on_progress = inputs, request, on_progress
        self._program, self._tolerance = inputs.program, request.tolerance
        self._codes = narrow_places(inputs.program, request.dtype, request.by)
        if not self._codes:
            raise ArgumentsError(
                f"{inputs.program.name} computes no floats wider than {request.dtype}"
                + (f" in a known {request.by}" if request.by == "scope" else "")
            )
        self._reference = Runner(Variant("as traced", inputs.program))
        self._filled = finite_fill(inputs.program, inputs.values, self._reference, request.seed)
        if not self._filled.random and request.trials > 1:
            raise ArgumentsError(
                f"several trials need random arguments, but {inputs.program.name} has none",
                "give some arguments by type alone: f32[8,3]",
            )
        self._inputs = [self._input(i) for i in range(request.trials)]
        self._runners: dict[frozenset[str], Runner] = {}
        self._ratios: dict[frozenset[str], list[float]] = {}

    def _input(self, number: int) -> tuple[Sequence[Any], list[Any]]:
        """Return arguments, those of a seed if they are random, and the reference's results."""
        arguments = self._filled.arguments
        if number:
            seed = self._request.seed + number
            arguments = fill_arguments(
                self._program, self._given.values, seed, self._filled.within
            ).arguments
        return arguments, self._reference(arguments)

    def run(self) -> Precision:
        """Return the result."""
        narrow_error = self._ratio(())
        places = list(self._codes)
        fresh = _FRESH if self._filled.random else 0
        more = list[tuple[Sequence[Any], list[Any]]]()
        for search in range(_SEARCHES):
            kept = self._minimal(places)
            if len(kept) == len(places):  # nothing is narrow, and no other inputs change that
                break
            start = self._request.trials + search * fresh
            more = [self._input(start + i) for i in range(fresh)]
            good = [self._compared(kept, trial).within for trial in more]
            if all(good):
                break
            self._inputs += [
                trial for trial, is_good in zip(more, good, strict=True) if not is_good
            ]
            more = [trial for trial, is_good in zip(more, good, strict=True) if is_good]
        return self._found(kept, more, narrow_error)

    def _minimal(self, places: list[str]) -> list[str]:
        """Return places of which none can be dropped; all of them if even these do not suffice."""
        if self._holds(()):
            return []
        guess = [name for name in self._out_of_range() if name in self._codes]
        if guess and self._holds(guess):
            return minimal_subset(guess, self._holds)
        if not self._holds(places):
            return places
        rest = [name for name in places if name not in guess]
        return minimal_subset([*rest, *guess], self._holds)

    def _out_of_range(self) -> list[str]:
        """Return the places with values that overflow or underflow in the narrow dtype."""
        self._on_progress("looking for values outside of the range of the dtype")
        name = jaxcompat.short_dtype_name(jnp.dtype(self._request.dtype))
        try:
            rows = watch(self._program, self._inputs[0][0], by=self._request.by).rows
        except JaxprToolError:  # only a guess
            return []
        lost = [(row.name.partition(BEHIND)[0], row.numbers.lost.get(name)) for row in rows]
        return list(
            dict.fromkeys(
                where for where, loss in lost if loss and (loss.overflow or loss.underflow)
            )
        )

    # --- candidates -----------------------------------------------------------------------------

    def _pass(self, kept: Sequence[str]) -> MixedPrecision:
        names = [name for name in self._codes if name in kept]
        return MixedPrecision(self._request.dtype, names or ())

    def _runner(self, kept: Sequence[str]) -> Runner:
        key = frozenset(kept)
        if key not in self._runners:
            program = self._pass(kept)(self._program)
            variant = Variant("mixed precision", program)
            self._runners = {key: Runner(variant)}  # executables are large: keep the last
        return self._runners[key]

    def _compared(self, kept: Sequence[str], trial: tuple[Sequence[Any], list[Any]]) -> Compared:
        arguments, reference = trial
        runner = self._runner(kept)
        return compared(runner.variant, reference, lambda: runner(arguments), self._tolerance)

    def _ratio_on(self, kept: Sequence[str], trial: tuple[Sequence[Any], list[Any]]) -> float:
        done = self._compared(kept, trial)
        if done.error:
            return float("inf")
        return max((result.error for result in done.results), default=0.0)

    def _ratio(self, kept: Sequence[str]) -> float:
        """Return the largest error on all inputs of the search, relative to the tolerated one."""
        ratios = self._ratios.setdefault(frozenset(kept), [])
        if len(ratios) < len(self._inputs):
            self._on_progress(
                f"run {len(self._ratios)}: {len(kept)} of {len(self._codes)} "
                f"{self._request.by}s kept"
            )
        for trial in self._inputs[len(ratios) :]:
            ratios.append(self._ratio_on(kept, trial))
        return max(ratios)

    def _holds(self, kept: Sequence[str]) -> bool:
        failed = any(ratio > 1 for ratio in self._ratios.get(frozenset(kept), ()))
        return not failed and self._ratio(kept) <= 1

    # --- the result -----------------------------------------------------------------------------

    def _found(
        self,
        kept: Sequence[str],
        more: Sequence[tuple[Sequence[Any], list[Any]]],
        narrow_error: float,
    ) -> Precision:
        chosen = self._pass(kept)
        inputs = [*self._inputs, *more]
        ratios = [self._ratio_on(kept, trial) for trial in inputs]
        worst = inputs[ratios.index(max(ratios))]
        done = self._compared(kept, worst)
        return Precision(
            self._program.name,
            self._request.dtype,
            self._request.by,
            len(self._codes),
            tuple(self._places(kept)),
            str(chosen),
            self._tolerance.relative(self._tolerance.dtype),
            self._tolerance.atol,
            narrow_error,
            max(ratios),
            done.results,
            self._filled.described(self._request.seed),
            len(self._inputs),
            len(more),
            len(self._ratios),
            needs(self._program, self._request.dtype),
            needs(chosen(self._program), self._request.dtype),
            done.error,
        )

    def _places(self, kept: Sequence[str]) -> Iterator[KeptPlace]:
        """Yield the kept places, with the largest error first."""
        places = []
        for name in kept:
            others = [other for other in self._codes if other != name]
            rest = [other for other in kept if other != name]
            errors = self._ratio(others), self._ratio(rest)
            places.append(KeptPlace(name, self._codes[name], *errors))
        yield from sorted(places, key=lambda place: (-place.error, -place.without))


def narrow_places(program: Program, dtype: str, by: By) -> dict[str, str]:
    """Return the places that `mixed_precision` makes narrow, in program order, with their code."""
    place, frames = places_of(program, by), frames_now(program.roots, chosen=False)
    codes: dict[str, str] = {}

    def note(path: EquationPath) -> bool:
        name = place(path)
        if name and name not in codes:
            codes[name] = frames.code_of(path) if by == "line" else ""
        return False

    Narrowing(MixedPrecision(dtype).jax_dtype, note).of(program.jaxpr)
    return codes


def needs(program: Program, dtype: str) -> Needs:
    """Return the estimated memory and work of a program."""
    estimate = cost(program, "dtype")
    short = jaxcompat.short_dtype_name(jnp.dtype(dtype))
    narrow = [group for group in estimate.groups if group.name.split(" ")[0].rstrip(",") == short]
    total = estimate.total.work
    return Needs(
        memory(program).peak_bytes,
        total.bytes,
        total.flops,
        sum(group.work.flops for group in narrow),
    )
