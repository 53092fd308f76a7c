"""Results of variants compared: where they diverge, on which inputs, and from run to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias
from typing import Literal as OneOf

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool.commands.compare.divergence import DivergencePoint, DivergenceSearch, Pair, Prefix
from jaxprtool.commands.compare.measures import Comparator, Measure, Tolerance, measured
from jaxprtool.commands.compare.variants import Compared, Executor, Risk, Variant
from jaxprtool.ir.conversions import with_scalar_predicates
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import all_jaxprs
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.places import UNKNOWN, Place
from jaxprtool.ir.program import top_jaxpr
from jaxprtool.ir.regions import holds_jaxpr, regions
from jaxprtool.ir.scopes import ScopePaths
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal

# --- bisection ------------------------------------------------------------------------------------
# Description of where two variants diverge.


@document(
    without=("reference", "code", "at_call"),
    names={"source": "place", "place": "pass_number", "step": "pass"},
)
@dataclass(frozen=True)
class Divergence:
    """The first equation at which a variant diverges from the reference.

    Attributes:
        reference: The name of the reference.
        variant: The name of the variant.
        step: The pass that causes the difference; "" if none does.
        place: The number of this pass, from 1; 0 if none.
        passes: The number of passes.
        found: Whether an equation was found.
        why: Why no equation was found, or "".
        strict: Whether it was found only by applying the tolerance to each element.
        within: Whether all results are within tolerance. The equation is then the first whose bits
            differ.
        primitive: The primitive of the equation.
        source: The user's line of the equation, followed by the library's.
        code: The source text of that line, if its file exists.
        scope: The scopes around the equation, as `cost --by scope` groups them.
        path: The enclosing equations, the outermost first.
        iteration: The iteration of each enclosing loop, from 0.
        counterpart: The equation of the variant, if it is a different one: `cos at model.py:7`.
        parameters: The parameters that differ.
        operands: The differences of its operands.
        results: The differences of its results.
        removed: The equations between these operands and results that only the reference has.
        added: The equations between them that only the variant has.
        at_call: Whether any of these equations is a call.
    """

    reference: str
    variant: str
    step: str = ""
    place: int = 0
    passes: int = 0
    found: bool = False
    why: str = ""
    strict: bool = False
    within: bool = False
    primitive: str = ""
    source: Place = UNKNOWN
    code: str = ""
    scope: str = ""
    path: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    counterpart: str = ""
    parameters: tuple[str, ...] = ()
    operands: tuple[Measure, ...] = ()
    results: tuple[Measure, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    at_call: bool = False


def find_divergence(
    variants: tuple[Variant, Variant],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]] | None,
    tolerance: Tolerance,
    on_progress: Callable[[str], object] = lambda doing: None,
    positions: Sequence[tuple[int, int]] | None = None,
    exact: bool = False,
    executor: Callable[[Variant, Sequence[Any]], Executor] = Executor,
) -> Divergence:
    """Return the first equation at which a variant diverges from the reference.

    Args:
        variants: The reference and the other variant.
        arguments: The arguments of each.
        results: The results of each, if known.
        tolerance: The tolerance.
        on_progress: Called with progress messages.
        positions: The pairs of positions of corresponding arguments, if their order differs.
        exact: Whether all bits must be equal, instead of `tolerance`.
        executor: Returns an executor of the pieces of a variant.
    """
    first, second = (
        replace(variant, program=with_scalar_predicates(variant.program)) for variant in variants
    )
    variants = first, second
    executors: Any = tuple(executor(*pair) for pair in zip(variants, arguments, strict=True))
    bodies: Any = tuple(variant.program.jaxpr for variant in variants)
    placed = executors[0].arguments, executors[1].arguments
    names = variants[0].name, variants[1].name
    for strict in (True,) if exact else (False, True):
        comparator = Comparator(tolerance, strict, exact)
        search = DivergenceSearch(comparator, executors, on_progress)
        found = search.find(bodies, placed, results, positions=positions)
        if found is not None:
            return _DivergenceDescriber(variants[0], found, tolerance).divergence(
                *names, strict and not exact
            )
    return Divergence(*names, why="every result is within tolerance")


class _DivergenceDescriber:
    """Describes a search result."""

    def __init__(self, variant: Variant, found: DivergencePoint, tolerance: Tolerance):
        self._program, self._found, self._tolerance = variant.program, found, tolerance
        self._frames = frames_now(variant.program.roots)
        self._scopes = ScopePaths(all_jaxprs(top_jaxpr(variant.program)), variant.program.roots)

    def divergence(self, reference: str, variant: str, strict: bool) -> Divergence:
        found = self._found
        old, new = found.eqns
        path = tuple(entered.eqn for entered in found.path)
        shown = old or new
        if not found.results:
            return Divergence(reference, variant, why=_FUSED, path=self._frames.path_of(path))
        around = (*path, *((shown,) if shown is not None else ()))
        same = new is None or (old is not None and old.primitive.name == new.primitive.name)
        return Divergence(
            reference,
            variant,
            found=True,
            strict=strict,
            primitive="" if shown is None else str(shown.primitive.name),
            source=self._frames.line_of(around),
            code=self._frames.code_of(around),
            scope="/".join(self._scopes.of(around)),
            path=self._frames.path_of(path),
            iteration=tuple(
                entered.iteration for entered in found.path if entered.iteration is not None
            ),
            counterpart="" if same or new is None else self._frames.named((*path, new)),
            parameters=_other_parameters(old, new),
            operands=tuple(map(self._measured, found.operands)),
            results=tuple(map(self._measured, found.results)),
            removed=tuple(self._frames.named((*path, eqn)) for eqn in found.between[0]),
            added=tuple(self._frames.named((*path, eqn)) for eqn in found.between[1]),
            at_call=any(map(_is_call, (old, new, *found.between[0], *found.between[1]))),
        )

    def _measured(self, pair: Pair) -> Measure:
        (a, b), (old, new) = self._found.runs, pair
        return measured(self._name(old), a.value(old), b.value(new), self._tolerance)

    def _name(self, atom: Atom) -> str:
        """Return the name of a value of the reference: an argument, or the equation's."""
        path, body = self._found.path, self._found.runs[0].jaxpr
        while not isinstance(atom, Literal):
            definition = next((eqn for eqn in body.eqns if atom in eqn.outvars), None)
            if definition is not None:
                return self._frames.named([*(entered.eqn for entered in path), definition])
            if atom not in body.invars:
                return "a constant"
            place = body.invars.index(atom)
            if not path:
                return self._program.arg_names[place]
            atom, body, path = path[-1].operands[place], path[-1].around, path[:-1]
        return "a literal"


_FUSED = (
    "run with intermediate values as results, no equation differs: the variants differ only "
    "where the compiler fuses equations"
)


def _is_call(eqn: JaxprEqn | None) -> bool:
    inside = None if eqn is None else regions(eqn)
    return inside is not None and inside.kind == "call"


def _other_parameters(old: JaxprEqn | None, new: JaxprEqn | None) -> tuple[str, ...]:
    """Return the differing parameters of two equations of one primitive, except for bodies."""
    if old is None or new is None or old.primitive is not new.primitive:
        return ()
    pairs = ((k, a, new.params.get(k)) for k, a in old.params.items() if not holds_jaxpr([a]))
    return tuple(f"{k}: {b} instead of {a}" for k, a, b in pairs if str(a) != str(b))


# --- trials ---------------------------------------------------------------------------------------
# Random inputs, and the reduction of an input on which two variants differ.

#: The number of inputs tried during a reduction.
MOST_TRIES = 300

#: The maximum number of elements of an input that is described.
_FEW = 4

#: The scales of floats after the first trial, as powers of ten.
_POWERS = (-2, -1, 0, 1, 2)


def scaled(values: Sequence[Any], random: Sequence[bool], trial: int) -> list[Any]:
    """Return the inputs of a trial; after the first, random floats are scaled."""
    rng = np.random.default_rng((trial, len(values)))
    return [
        (np.asarray(x) * 10.0 ** int(rng.choice(_POWERS))).astype(x.dtype)
        if trial and is_random and _is_number(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for x, is_random in zip(values, random, strict=True)
    ]


def _is_number(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and not is_extended(dtype) and dtype != jax.dtypes.float0


def minimized(
    values: Sequence[Any], free: Sequence[bool], fails: Callable[[Sequence[Any]], bool]
) -> tuple[list[Any], int]:
    """Return a reduced input that still fails, and the number of inputs tried.

    An argument becomes zero, or else keeps as few nonzero elements as needed, by bisection. The
    remaining elements become one, or else integers.

    Args:
        values: Flat arguments.
        free: Whether each argument may change.
        fails: Returns True if the failure occurs for values of the same types.
    """
    search = _Minimizer(list(values), fails)
    for place, is_free in enumerate(free):
        if is_free and _is_number(values[place]):
            search.minimize(place)
    return search.values, search.tries


class _Minimizer:
    def __init__(self, values: list[Any], fails: Callable[[Sequence[Any]], bool]):
        self.values, self.tries, self._fails = values, 0, fails

    def minimize(self, place: int) -> None:
        """Reduce one argument."""
        array = np.asarray(self.values[place])
        if not array.any() or self._take(place, np.zeros_like(array)):
            return
        self._drop(place)
        left = np.asarray(self.values[place])
        if self._take(place, (left != 0).astype(left.dtype)) or left.dtype == bool:
            return
        if jnp.issubdtype(left.dtype, jnp.floating):
            self._take(place, np.rint(left.astype(np.float64)).astype(left.dtype))

    def _drop(self, place: int) -> None:
        """Set elements to zero, starting with large parts, as long as it still fails."""
        parts = 2
        while self.tries < MOST_TRIES:
            array = np.asarray(self.values[place])
            nonzero = np.flatnonzero(array)
            if len(nonzero) < 2:
                return
            parts = min(parts, len(nonzero))
            if any(self._take(place, reduced) for reduced in _without(array, nonzero, parts)):
                parts = max(parts - 1, 2)
            elif parts == len(nonzero):
                return
            else:
                parts *= 2

    def _take(self, place: int, array: np.ndarray) -> bool:
        """Replace an argument by an array if it still fails; return whether it was replaced."""
        if self.tries >= MOST_TRIES or np.array_equal(array, np.asarray(self.values[place])):
            return False
        self.tries += 1
        tried = [*self.values[:place], array, *self.values[place + 1 :]]
        if not self._fails(tried):
            return False
        self.values = tried
        return True


def _without(array: np.ndarray, nonzero: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    for part in np.array_split(nonzero, parts):
        zeroed = array.copy()
        zeroed.reshape(-1)[part] = 0
        yield zeroed


def input_text(value: Any) -> str:
    """Return an input in words: `zero except [2, 1] = 1.0`."""
    if not _is_number(value):
        return "random"
    array = np.asarray(value)
    indices = np.argwhere(array)
    if not len(indices):
        return "zero"
    if array.ndim == 0:
        return str(array)
    if len(indices) > _FEW:
        return f"{len(indices):,} of {array.size:,} elements are not zero"
    parts = (f"{list(map(int, place))} = {array[tuple(place)]}" for place in indices)
    return "zero except " + ", ".join(parts)


# --- comparison -----------------------------------------------------------------------------------
# Results of variants of a program compared with a reference.


class SmallestArgument(NamedTuple):
    """An argument of the smallest failing input.

    Attributes:
        name: The name of the argument.
        value: Its value in words: `zero except [2] = 1.0`.
    """

    name: str
    value: str


@document(without=("arguments",), also=("within",))
@dataclass(frozen=True)
class Comparison(Printed):
    """The results of variants of a program on the same inputs.

    Attributes:
        name: The name of the program.
        reference: The name of the variant that the others are compared with.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        variants: The other variants, with the differences of their results.
        error: Why the reference has no results to compare with, or "".
        partings: The first diverging equation of each variant outside of the tolerance, if
            requested.
        arguments: The flat arguments of the compared runs.
        smallest: If trials failed, the arguments of the smallest failing input.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Divergence, ...] = ()
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    smallest: tuple[SmallestArgument, ...] = ()

    @property
    def unproven(self) -> list[str]:
        """A message for each result with mostly non-finite elements, which prove nothing."""
        results = {result.name: result for variant in self.variants for result in variant.unproven}
        return [
            f"{name} is not finite in {max(result.nonfinite):,} of {result.size:,} elements"
            for name, result in results.items()
        ]

    @property
    def within(self) -> bool:
        """Whether all variants ran, and all results are within tolerance."""
        return not self.error and all(variant.within for variant in self.variants)


# --- repeated -------------------------------------------------------------------------------------
# The results of `determinism`: the differences between runs of a program.

#: The change for a run: none, a new compilation, a new trace, another process, ….
Kind: TypeAlias = OneOf["run", "compile", "trace", "process", "device", "threads", "option"]


@document(also=("equal", "differing"))
@dataclass(frozen=True)
class Repetition:
    """A run compared with the first one, bit for bit.

    Attributes:
        name: The change: `compiled again`, `8 threads (NPROC=8)`.
        kind: The kind of this change.
        results: The difference of each result; empty if the results cannot be compared.
        other_program: How its traced program differs from that of the first run, or "".
        error: Why the run has no results, in one line, or "".
    """

    name: str
    kind: Kind
    results: tuple[Measure, ...] = ()
    other_program: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether it ran, and the program and all bits are the same. All NaNs count as equal."""
        return not (self.error or self.other_program) and self.differing == 0

    @property
    def differing(self) -> int:
        """The number of results that differ."""
        return sum(not result.equal for result in self.results)


@dataclass(frozen=True)
class Cause:
    """Where a run begins to differ from the first one.

    Attributes:
        name: The name of the run.
        divergence: The first equation whose results differ for equal operands, with intermediate
            values as results; or why none was found.
        prefix: If no equation was found, the smallest prefix of the program that differs when
            compiled as a whole; null if there is none.
    """

    name: str
    divergence: Divergence
    prefix: Prefix | None = None


@document(also=("equal",))
@dataclass(frozen=True)
class Determinism(Printed):
    """A program run again in several ways, compared bit for bit with its first run.

    Attributes:
        name: The name of the program.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        reference: The device of the first run.
        repetitions: The other runs.
        causes: Where runs begin to differ, one for each kind of change and each option.
        risks: Equations that may differ in other runs, or on other devices.
        not_tried: The kinds of runs that were not tried, each with the reason.
    """

    name: str
    inputs: str
    random: tuple[str, ...]
    reference: str
    repetitions: tuple[Repetition, ...]
    causes: tuple[Cause, ...] = ()
    risks: tuple[Risk, ...] = ()
    not_tried: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all runs gave the same bits, and all traces the same program."""
        return all(repetition.equal for repetition in self.repetitions)

    @property
    def unproven(self) -> tuple[Measure, ...]:
        """The results with mostly non-finite elements, whose equal bits prove nothing."""
        results = {m.name: m for run in self.repetitions for m in run.results if not m.is_proof}
        return tuple(results.values())


@dataclass(frozen=True)
class FreshRun:
    """The program and the results of the same function in another process.

    Attributes:
        program: The text of its program, with stubs for callbacks.
        results: Its results by name.
    """

    program: str
    results: dict[str, Any]
