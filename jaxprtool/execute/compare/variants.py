"""Variants of a program, run on the same inputs and compared with the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError, described
from jaxprtool.execute.compare.measures import Measure, Tolerance, measured
from jaxprtool.execute.running.arguments import require_runnable
from jaxprtool.execute.running.rounding import Rounding, explained
from jaxprtool.execute.running.run import choose_device, compiled, failures_reported, ready
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.dtypes import as_array
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.evaluation.interpret import evaluate
from jaxprtool.ir.programs.program import Program

OnProgress = Callable[[str], object]


@dataclass(frozen=True, eq=False)
class Variant:
    """A program and how it is run.

    Attributes:
        name: Its name: `-O2 on gpu`.
        program: The program.
        platform: The backend; None for the placement by JAX and the arguments.
        op_by_op: Whether each equation runs separately instead of compiled as a whole.
        index: The device of the backend, by its index; None for the placement by JAX.
        environment: Environment variables; if any, the variant runs in a separate process.
    """

    name: str
    program: Program
    platform: str | None = None
    op_by_op: bool = False
    index: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


@document(without=("values",), also=("equal", "within"))
@dataclass(frozen=True)
class Compared:
    """A variant compared with the reference.

    Attributes:
        name: The name of the variant.
        results: The difference of each result; empty if the variant failed.
        error: Why it has no results, in one line, or "".
        effects: The first difference of its effects, such as callbacks and prints, or "".
        values: The results.
    """

    name: str
    results: tuple[Measure, ...]
    error: str = ""
    effects: str = ""
    values: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def within(self) -> bool:
        """Whether the variant ran, with the same effects, and every result is within tolerance."""
        return not (self.error or self.effects) and all(each.within for each in self.results)

    @property
    def unproven(self) -> tuple[Measure, ...]:
        """The equal results with mostly non-finite elements, which prove nothing."""
        return tuple(each for each in self.results if each.within and not each.is_proof)

    @property
    def equal(self) -> bool:
        """Whether the variant ran, with the same effects, and every result has the same bits."""
        return not (self.error or self.effects) and all(each.equal for each in self.results)


class Runner:
    """Runs a variant; it is compiled once for all inputs."""

    def __init__(self, variant: Variant, on_progress: OnProgress = lambda doing: None):
        require_runnable(variant.program)
        self.variant, self._on_progress = variant, on_progress
        self._device = choose_device(variant.program, variant.platform, variant.index)
        self._call: Callable[..., Any] | None = None

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results for flat arguments.

        Raises UnsupportedError if the program cannot be compiled, BackendError if the device cannot
        run it, and UserFunctionError if a user's callback or check fails.
        """
        program = self.variant.program
        with ready(program, arguments, self._device) as (there, _), failures_reported(program):
            if self.variant.op_by_op:
                self._on_progress(f"running {self.variant.name}")
                try:
                    outs = evaluate(program.jaxpr, there)
                except JaxprToolError:
                    raise
                except (TypeError, ValueError, NotImplementedError) as error:
                    raise UnsupportedError(
                        f"{program.name} cannot be run op by op: {described(error)}"
                    ) from error
            else:
                if self._call is None:
                    self._call = compiled(program, there, self._on_progress).call
                self._on_progress(f"running {self.variant.name}")
                outs = self._call(there)
            return list(jax.block_until_ready(list(map(as_array, outs))))


def compared(
    variant: Variant,
    reference: Sequence[Any],
    run: Callable[[], Sequence[Any]],
    tolerance: Tolerance,
    roundings: tuple[Rounding, Rounding] | None = None,
) -> Compared:
    """Return the comparison of the results of `run` with those of the reference.

    `roundings` are those of the reference and the variant, for the default tolerance.
    """
    try:
        results = run()
    except JaxprToolError as error:
        return Compared(variant.name, (), error.message)
    names = variant.program.out_names
    measures = []
    for i, (name, a, b) in enumerate(zip(names, reference, results, strict=True)):
        explain = None if roundings is None else partial(explained, *roundings, (i, i))
        measures.append(measured(name, a, b, tolerance, explain))
    return Compared(variant.name, tuple(measures), values=tuple(results))


def positions_of(program: Program, reference: Program) -> list[int]:
    """Return the position in the reference of each argument of a program, by name or in order."""
    positions = {name: i for i, name in enumerate(reference.arg_names)}
    if positions.keys() >= set(program.arg_names):
        return [positions[name] for name in program.arg_names]
    return list(range(len(reference.arg_names)))


def taken_by(variant: Variant, reference: Program, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of a variant from those of the reference.

    Raises ArgumentsError if they differ.
    """
    program = variant.program
    values = [arguments[i] for i in positions_of(program, reference)]
    avals = [jax.typeof(value) for value in values]
    if list(map(_type, avals)) != list(map(_type, program.in_avals)):
        raise _others("takes", reference, variant)
    return values


def arguments_of(variant: Variant, reference: Program, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of a variant from those of the reference.

    Raises ArgumentsError if its arguments or the shapes of its results differ.
    """
    program = variant.program
    values = taken_by(variant, reference, arguments)
    shapes = [[getattr(v, "shape", None) for v in p.out_avals] for p in (reference, program)]
    if shapes[0] != shapes[1]:
        raise _others("gives", reference, variant)
    return values


def _type(aval: Any) -> Any:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def _others(verb: str, reference: Program, variant: Variant) -> ArgumentsError:
    """Return the error for programs with different arguments or results; names the first."""
    pairs = [p.arguments if verb == "takes" else p.results for p in (reference, variant.program)]
    texts = [[f"{name}: {type_of(aval)}" for name, aval in values] for values in pairs]
    first = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
    if first is None:
        first = min(map(len, texts))
    old, new = (each[first] if first < len(each) else "nothing" for each in texts)
    what = "arguments" if verb == "takes" else "results"
    return ArgumentsError(
        f"{variant.name} cannot be compared, because it {verb} different {what}: {new}, where "
        f"the first {verb} {old}"
    )
