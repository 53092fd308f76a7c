"""Measures of the difference of two arrays, and criteria for when values differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from typing import Literal as OneOf

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.nans import count_nonfinite, is_mostly_nonfinite
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError, described
from jaxprtool.execute.calls import PythonProcess, python_process
from jaxprtool.execute.running.arrays import as_numpy, bits_agree, wide
from jaxprtool.execute.running.rounding import Rounding, explained
from jaxprtool.execute.running.run import (
    arguments_placed,
    choose_device,
    compiled_program,
    failures_reported,
    require_runnable,
)
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.documents import AnyFloat, Printed, document
from jaxprtool.ir.dtypes import as_array, is_extended, x64_enabled
from jaxprtool.ir.equations import bodies, free_variables, is_inexact, type_of, variables
from jaxprtool.ir.evaluation import evaluate
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import Place, place_in
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

# --- measures -------------------------------------------------------------------------------------
# Measures of the difference of two arrays: bits, errors, units in the last place, angle, NaNs.

#: Returns a mask of the elements of a value that agree with the reference, and tolerated errors.
Explain: TypeAlias = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Tolerance:
    """The tolerated errors, given or by default.

    A given tolerance is |b - a| <= atol + rtol |a|, where a is the reference; the one that is not
    given is 0. By default, the error is relative to the element, or to the root mean square of its
    array if that is larger. (`execute.running.rounding` has the default for results of programs.)

    Attributes:
        rtol: The relative error.
        atol: The absolute error.
        dtype: The dtype whose tolerance in JAX's own tests is the default; None for the dtypes of
            the values.
    """

    rtol: float | None = None
    atol: float | None = None
    dtype: Any = None

    def __post_init__(self) -> None:
        """Raise ArgumentsError for a tolerance that is negative or not a number."""
        for name, error in (("rtol", self.rtol), ("atol", self.atol)):
            if error is not None and not error >= 0:
                raise ArgumentsError(f"{name} must be a number of at least 0, not {error}")

    @property
    def is_given(self) -> bool:
        """Whether any tolerance is given."""
        return not (self.rtol is None and self.atol is None)

    def relative(self, *dtypes: Any) -> float:
        """Return the relative tolerance for values of these dtypes."""
        if any(map(_is_exact, dtypes)):
            return 0.0
        if self.is_given:
            return self.rtol or 0.0
        return max(map(jaxcompat.default_tolerance, dtypes if self.dtype is None else [self.dtype]))

    def tolerated(self, reference: np.ndarray, dtype: Any) -> np.ndarray:
        """Return the tolerated error of each element of a value of some dtype."""
        if any(map(_is_exact, (reference.dtype, dtype))):
            return np.zeros(reference.shape)
        relative = self.relative(reference.dtype, dtype)
        sizes = np.abs(wide(reference))
        if self.is_given:
            return (self.atol or 0.0) + relative * sizes
        finite = sizes[np.isfinite(sizes)]
        largest = float(finite.max(initial=0.0))  # whose square may overflow
        scale = largest * float(np.sqrt(np.mean(np.square(finite / largest)))) if largest else 0.0
        return relative * np.fmax(sizes, scale)


def _is_exact(dtype: Any) -> bool:
    """Return True for dtypes without errors: booleans, keys, and float0."""
    return is_extended(dtype) or dtype in (np.dtype(bool), jax.dtypes.float0)


@document(
    without=("nans", "nonfinite"),
    names={"own_nans": "nans", "is_proof": "proof"},
    also=("own_nans", "reference_nans", "infinities", "reference_infinities", "is_proof"),
)
@dataclass(frozen=True)
class Measure:
    """The difference between a value and its reference.

    Elements that are not finite in either array have no error.

    Attributes:
        name: The path of the result.
        reference_type: The type of the reference.
        type: The type of the value.
        equal: Whether types and bits are equal. All NaNs count as equal.
        within: Whether each element is within tolerance. NaNs and infinities must match.
        rtol: The relative tolerance, if given.
        atol: The absolute tolerance, if given.
        tolerated: The tolerated absolute error at `position`, or the largest one.
        error: The largest error relative to the tolerated one; infinite where none is tolerated.
        differing: The number of elements whose bits differ.
        beyond: The number of elements outside of the tolerance.
        size: The number of elements.
        position: The position of the first element outside of the tolerance, or else of the largest
            error; None if no element differs.
        absolute: The largest absolute error; None for values without numbers.
        relative: The largest error relative to the reference, where the reference is not zero.
        ulps: The largest error in units in the last place; None if the dtypes are not the same
            floating-point dtype.
        cosine: The cosine of the angle between the two; None for fewer than two elements.
        nans: The number of NaNs in the reference and in the value.
        nonfinite: The number of NaNs and infinities in the reference and in the value.
    """

    name: str
    reference_type: str
    type: str
    equal: bool
    within: bool
    rtol: float | None
    atol: float | None
    tolerated: float
    error: AnyFloat
    differing: int
    beyond: int
    size: int
    position: tuple[int, ...] | None
    absolute: float | None
    relative: float | None
    ulps: int | None
    cosine: float | None
    nans: tuple[int, int]
    nonfinite: tuple[int, int]

    @property
    def own_nans(self) -> int:
        """The number of NaNs in the value."""
        return self.nans[1]

    @property
    def reference_nans(self) -> int:
        """The number of NaNs in the reference."""
        return self.nans[0]

    @property
    def infinities(self) -> int:
        """The number of infinities in the value."""
        return self.nonfinite[1] - self.nans[1]

    @property
    def reference_infinities(self) -> int:
        """The number of infinities in the reference."""
        return self.nonfinite[0] - self.nans[0]

    @property
    def is_proof(self) -> bool:
        """Whether most elements are finite. Otherwise equality proves little."""
        return not any(is_mostly_nonfinite(count, self.size) for count in self.nonfinite)


@jax.transfer_guard("allow")
def measured(
    name: str, reference: Any, value: Any, tolerance: Tolerance, explain: Explain | None = None
) -> Measure:
    """Return the measure of a value relative to a reference of the same shape.

    Args:
        name: The name of the value.
        reference: The reference.
        value: The value.
        tolerance: The tolerance, if given; otherwise it is the default without `explain`.
        explain: Returns the errors that rounding explains.
    """
    types = type_of(jax.typeof(reference)), type_of(jax.typeof(value))
    limits = tolerance.rtol, tolerance.atol
    if not all(hasattr(x, "dtype") for x in (reference, value)):  # tokens have no data
        reference = value = np.zeros(0, bool)
    extended = any(is_extended(x.dtype) for x in (reference, value) if hasattr(x, "dtype"))
    a, b = as_numpy(reference), as_numpy(value)
    same = _same_bits(a, b)
    inexact = not extended and all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b))
    if extended:
        within, tolerated = same, np.zeros(a.shape)
    elif explain is not None and not tolerance.is_given and inexact:
        within, tolerated = explain(a, b)
    else:
        tolerated = tolerance.tolerated(a, b.dtype)
        is_exact = tolerance.is_given and not tolerated.any()
        within = same if is_exact else same | _within(a, b, tolerated)
    absolute, relative, place = _errors(a, b, same)
    if not within.all():
        place = tuple(map(int, np.argwhere(~within)[0]))
    return Measure(
        name,
        *types,
        equal=bool(same.all()) and types[0] == types[1],
        within=bool(within.all()),
        rtol=limits[0],
        atol=limits[1],
        tolerated=float(tolerated.max(initial=0.0) if place is None else tolerated[place]),
        error=_error_ratio(a, b, same, within, tolerated),
        differing=int((~same).sum()),
        beyond=int((~within).sum()),
        size=a.size,
        position=place,
        absolute=None if extended else absolute,
        relative=None if extended else relative,
        ulps=None if extended else _ulps(a, b),
        cosine=None if extended else _cosine(a, b),
        nans=(_nans(a), _nans(b)),
        nonfinite=(count_nonfinite(a), count_nonfinite(b)),
    )


def _error_ratio(
    a: np.ndarray, b: np.ndarray, same: np.ndarray, within: np.ndarray, tolerated: np.ndarray
) -> float:
    """Return the largest error of an element relative to the tolerated one.

    It is infinite where NaNs or infinities do not match, or no error is tolerated.
    """
    if same.all():
        return 0.0
    if jax.dtypes.float0 in (a.dtype, b.dtype) or same.shape != a.shape:
        return float("inf")
    with np.errstate(all="ignore"):
        ratios = np.abs(wide(b)[~same] - wide(a)[~same]) / tolerated[~same]
    ratio = float(np.where(np.isnan(ratios), np.inf, ratios).max())
    return ratio if within.all() else max(ratio, 1.0)


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == jax.dtypes.float0 or b.dtype == jax.dtypes.float0:
        return np.full(a.shape, a.dtype == b.dtype)
    if a.dtype != b.dtype:  # compare both in double precision
        return bits_agree(wide(a), wide(b))
    return bits_agree(a, b)


def _within(a: np.ndarray, b: np.ndarray, tolerated: np.ndarray) -> np.ndarray:
    if jax.dtypes.float0 in (a.dtype, b.dtype):
        return np.zeros(a.shape, bool)
    with np.errstate(all="ignore"):
        errors = np.abs(wide(b) - wide(a))
    return np.asarray(np.isfinite(errors) & (errors <= tolerated))


def _errors(
    a: np.ndarray, b: np.ndarray, same: np.ndarray
) -> tuple[float | None, float | None, tuple[int, ...] | None]:
    """Return the largest absolute and relative error, and the position of the absolute one."""
    if jax.dtypes.float0 in (a.dtype, b.dtype) or bool in (a.dtype, b.dtype):
        wrong = np.argwhere(~same)
        return None, None, tuple(map(int, wrong[0])) if len(wrong) else None
    if same.all():
        return 0.0, 0.0, None
    a, b = wide(a), wide(b)
    finite = np.isfinite(a) & np.isfinite(b)
    if not (finite & ~same).any():
        return 0.0, 0.0, tuple(map(int, np.argwhere(~same)[0]))
    errors = np.zeros(a.shape)
    errors[finite] = np.abs(b[finite] - a[finite])
    sizes = np.abs(a)
    nonzero = finite & (sizes > 0)
    relative = float((errors[nonzero] / sizes[nonzero]).max()) if nonzero.any() else None
    place = np.unravel_index(int(errors.argmax()), errors.shape)
    return float(errors.max()), relative, tuple(map(int, place))


def _ulps(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the largest difference in units in the last place among elements finite in both."""
    if a.dtype != b.dtype or not jnp.issubdtype(a.dtype, jnp.inexact):
        return None
    if np.iscomplexobj(a):
        return max(_ulps(a.real, b.real) or 0, _ulps(a.imag, b.imag) or 0)
    info = jnp.finfo(a.dtype)
    if info.bits != 8 * a.dtype.itemsize or float(info.min) >= 0:
        return None
    finite = np.isfinite(a) & np.isfinite(b)
    (sign_a, size_a), (sign_b, size_b) = (_sign_and_size(x[finite]) for x in (a, b))
    distance = np.where(
        sign_a == sign_b,
        np.maximum(size_a, size_b) - np.minimum(size_a, size_b),
        size_a + size_b,
    )
    return int(distance.max(initial=0))


def _sign_and_size(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sign of floats, and their magnitude as the number of floats below it."""
    bits = 8 * x.dtype.itemsize
    whole = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = whole >> np.uint64(bits - 1)
    return sign, whole & np.uint64((1 << (bits - 1)) - 1)


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.size < 2 or not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b)):
        return None
    a, b = wide(a).ravel(), wide(b).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    sizes = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.vdot(a, b).real) / sizes if sizes else None


def _nans(x: np.ndarray) -> int:
    return int(np.isnan(x).sum()) if jnp.issubdtype(x.dtype, jnp.inexact) else 0


# --- comparator -----------------------------------------------------------------------------------
# Criteria for when intermediate values differ.

#: The number of accumulated rounding errors that do not count as a difference, unless no other
#: difference is found.
_ROUNDINGS = 64


@dataclass(frozen=True)
class Comparator:
    """Determines which elements of two arrays differ.

    Attributes:
        tolerance: The tolerance of results.
        strict: Whether the tolerance applies to each element. Otherwise errors are relative to the
            largest element, at least 64 rounding errors are tolerated, and masks may differ, since
            the values that they select are compared. This ignores differences from cancellation of
            rounding errors.
        exact: Whether instead all bits must be equal. All NaNs count as equal.
    """

    tolerance: Tolerance
    strict: bool = False
    exact: bool = False

    @jax.transfer_guard("allow")
    def wrong(self, reference: Any, value: Any) -> np.ndarray:
        """Return a mask of the elements of an array that differ from the reference."""
        if not (hasattr(reference, "dtype") and hasattr(value, "dtype")):
            return np.zeros((), bool)  # tokens
        if np.shape(reference) != np.shape(value):
            return np.ones(np.shape(value), bool)
        extended = is_extended(reference.dtype)
        a, b = as_numpy(reference), as_numpy(value)
        if jax.dtypes.float0 in (a.dtype, b.dtype):
            return np.zeros(a.shape, bool)
        inexact = jnp.issubdtype(a.dtype, jnp.inexact) and jnp.issubdtype(b.dtype, jnp.inexact)
        if extended or not inexact:
            if a.dtype == bool and a.ndim and not (self.strict or self.exact):
                return np.zeros(a.shape, bool)
            wrong = a != b
            while wrong.ndim > np.ndim(reference):  # the base array of keys has one more axis
                wrong = wrong.any(-1)
            return wrong
        same = bits_agree(wide(a), wide(b))
        return ~same if self.exact else ~(same | self._near(a, b))

    def _near(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        relative, atol = self.tolerance.relative(a.dtype, b.dtype), self.tolerance.atol or 0.0
        sizes = np.abs(wide(a))
        if not self.strict:
            rounding = _ROUNDINGS * max(float(jnp.finfo(x.dtype).eps) for x in (a, b))
            relative, sizes = max(relative, rounding), sizes[np.isfinite(sizes)].max(initial=0.0)
        with np.errstate(all="ignore"):
            errors = np.abs(wide(b) - wide(a))
            return np.asarray(np.isfinite(errors) & (errors <= atol + relative * sizes))

    def differ(self, reference: Any, value: Any) -> bool:
        """Return True if some element differs."""
        return bool(self.wrong(reference, value).any())


def is_comparable(var: Any) -> bool:
    """Return True if the values of a variable can be compared: it is an array but not a ref."""
    aval = var.aval
    return not isinstance(aval, AbstractRef) and getattr(aval, "shape", None) is not None


# --- variants -------------------------------------------------------------------------------------
# Variants of a program, or pieces of them, run on the same inputs; their precision and risks.

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
        return not (self.error or self.effects) and all(result.within for result in self.results)

    @property
    def unproven(self) -> tuple[Measure, ...]:
        """The equal results with mostly non-finite elements, which prove nothing."""
        return tuple(result for result in self.results if result.within and not result.is_proof)

    @property
    def equal(self) -> bool:
        """Whether the variant ran, with the same effects, and every result has the same bits."""
        return not (self.error or self.effects) and all(result.equal for result in self.results)


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
        with (
            arguments_placed(program, arguments, self._device) as (there, _),
            failures_reported(program),
        ):
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
                    self._call = compiled_program(program, there, self._on_progress).call
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
    old, new = (listed[first] if first < len(listed) else "nothing" for listed in texts)
    what = "arguments" if verb == "takes" else "results"
    return ArgumentsError(
        f"{variant.name} cannot be compared, because it {verb} different {what}: {new}, where "
        f"the first {verb} {old}"
    )


# --- body runs ------------------------------------------------------------------------------------
# Pieces of a program: the equations that compute some values from known ones.
#
# A piece is run in the same way as its variant: compiled as a whole, or one equation at a time.

_DEBUG = DebugInfo("piece", "piece", None, None)


class Executor:
    """The place and mode in which a variant runs.

    Args:
        variant: The variant.
        arguments: Its flat arguments.
    """

    def __init__(self, variant: Variant, arguments: Sequence[Any]):
        program = variant.program
        self._program, self.op_by_op = program, variant.op_by_op
        self._options = dict(program.jit.compiler_options) if program.jit else {}
        self.arguments = arguments
        self._device = choose_device(program, variant.platform, variant.index)
        with self.running() as self.arguments:
            pass

    @contextmanager
    def running(self) -> Iterator[Sequence[Any]]:
        """Run the block where the variant runs, and yield its arguments there."""
        place = arguments_placed(self._program, self.arguments, self._device)
        with failures_reported(self._program), place as (arguments, _):
            yield arguments

    def run(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a body.

        Raises UnsupportedError if the body cannot be compiled.
        """
        with self.running():
            if self.op_by_op:
                return list(map(as_array, evaluate(body, arguments)))
            try:
                fun = jax.jit(jaxcompat.jaxpr_as_fun(body), compiler_options=self._options or None)
                compiled = fun.trace(*arguments).lower().compile()
            except Exception as error:  # lowering rules may raise anything
                name = self._program.name
                raise UnsupportedError(
                    f"a part of {name} cannot be compiled: {described(error)}"
                ) from error
            return list(jax.block_until_ready(compiled(*arguments)))


class BodyRun:
    """A body that a variant runs, and its known values.

    Args:
        executor: Runs the body.
        body: The body.
        arguments: Its arguments.
    """

    def __init__(self, executor: Executor, body: ClosedJaxpr, arguments: Sequence[Any]):
        self.executor, self.body = executor, body
        jaxpr = jaxcompat.open_jaxpr(body)
        self.jaxpr: Jaxpr = jaxpr
        self._given: dict[Var, Any] = dict(zip(jaxpr.constvars, body.consts, strict=True))
        self._given.update(zip(jaxpr.invars, arguments, strict=True))
        self._values = dict(self._given)
        self.definitions = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def compute(self, wanted: Iterable[Atom]) -> None:
        """Compute values as one piece from the known ones."""
        missing = [v for v in dict.fromkeys(variables(wanted)) if v not in self._values]
        if missing:
            eqns = needed(self.jaxpr, missing, self._values)
            free = list(free_variables(eqns, missing))
            piece = jaxcompat.new_jaxpr((), (), free, missing, eqns, _DEBUG)
            values = self.executor.run(piece, [self._values[v] for v in free])
            self._values.update(zip(missing, values, strict=True))

    def value(self, atom: Atom) -> Any:
        """Return a known value."""
        return as_array(atom.val) if isinstance(atom, Literal) else self._values[atom]

    def values(self, atoms: Sequence[Atom]) -> list[Any]:
        """Return values, after computing the unknown ones."""
        self.compute(atoms)
        return list(map(self.value, atoms))

    def evict(self, keep: Iterable[Var]) -> None:
        """Drop all values but the arguments of the body and `keep`."""
        kept = {v: self._values[v] for v in keep if v in self._values}
        self._values = {**self._given, **kept}


def needed(jaxpr: Jaxpr, wanted: Iterable[Var], known: Collection[Var]) -> list[JaxprEqn]:
    """Return the equations that compute some variables from known ones.

    The contents of refs are unknown: all earlier equations that access a ref are included.
    """
    needs, refs = set(wanted), set[Var]()
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        operands = variables(eqn.invars)
        if needs.isdisjoint(eqn.outvars) and refs.isdisjoint(operands):
            continue
        eqns.append(eqn)
        for var in operands:
            if isinstance(var.aval, AbstractRef):
                refs.add(var)
                needs.add(var)
            elif var not in known:
                needs.add(var)
    return eqns[::-1]


# --- precision ------------------------------------------------------------------------------------
# The places of a program that have to stay in a wide dtype, with the errors otherwise.


@document(without=("name",), also=("label", "place"), names={"label": "name"}, optional=("place",))
@dataclass(frozen=True)
class KeptPlace:
    """A place that stays in the wide dtype.

    Attributes:
        name: The line or the scope.
        code: The source text of the line, if its file exists.
        error: The largest error if only this place is narrow, relative to the tolerated error;
            infinite if NaNs or infinities differ.
        without: The largest error if this place is narrow together with all that are not kept.
        cause: Why there is no error, in one line, if the program fails; else "".
    """

    name: str
    code: str
    error: AnyFloat
    without: AnyFloat
    cause: str = ""

    @property
    def label(self) -> str:
        """The line or the scope."""
        return str(self.name)

    @property
    def place(self) -> Place | None:
        """The line; None for a scope."""
        return place_in(self.name)


@dataclass(frozen=True)
class Needs:
    """The estimated memory and work of a program.

    Attributes:
        peak_bytes: The bytes of memory at the peak.
        bytes: The bytes read and written.
        flops: The floating-point operations.
        narrow_flops: The floating-point operations in the narrow dtype.
    """

    peak_bytes: int
    bytes: int
    flops: int
    narrow_flops: int


@document(also=("within",))
@dataclass(frozen=True)
class Precision(Printed):
    """The places of a program that stay in the wide dtype.

    Attributes:
        name: The name of the program.
        dtype: The narrow dtype.
        by: The kind of places.
        places: The number of places that compute floats.
        kept: The places that have to stay in the wide dtype.
        pipeline: The pass, with these places.
        rtol: The relative tolerance.
        atol: The absolute tolerance, if a tolerance is given.
        narrow_error: The largest error if no place is kept, relative to the tolerated error.
        error: The same with the kept places, on all inputs.
        results: The difference of each result, on the input with the largest error.
        inputs: A description of the inputs.
        searched: The number of inputs of the search.
        checked: The number of other inputs that the result was compared on.
        runs: The number of programs that were compiled and compared.
        before: The memory and work of the program.
        after: The memory and work with the pass.
        failure: Why the program fails with the pass, or "".
    """

    name: str
    dtype: str
    by: OneOf["line", "scope"]
    places: int
    kept: tuple[KeptPlace, ...]
    pipeline: str
    rtol: float
    atol: float | None
    narrow_error: AnyFloat
    error: AnyFloat
    results: tuple[Measure, ...]
    inputs: str
    searched: int
    checked: int
    runs: int
    before: Needs
    after: Needs
    failure: str = ""

    @property
    def within(self) -> bool:
        """Whether all results are within tolerance with the pass, on all inputs."""
        return not self.failure and all(result.within for result in self.results)


# --- risks ----------------------------------------------------------------------------------------
# Equations whose results may differ from run to run, or from machine to machine.
#
# The program is inspected, not run.

_CALLBACK = "calls Python, which may return different values in each run"
_GPU_ORDER = "not deterministic on GPU: threads add in any order where indices are not unique"
_GPU_LAST = "on GPU, any of the updates with the same index may be the last"
_WINDOW = "not deterministic on GPU: windows that overlap are added in any order"
_GENERATOR = "its bits come from the backend's own generator, which differs on CPU, GPU and TPU"
_COLLECTIVE = "sums over devices: another number or order of devices rounds differently"
_UNSTABLE = "the order of equal keys is not defined: is_stable is False"


@document(names={"lines": "places"})
@dataclass(frozen=True)
class Risk:
    """Equations of one primitive whose results may differ, and why.

    Attributes:
        primitive: The primitive.
        why: Why its results may differ.
        count: The number of such equations.
        lines: The user's lines of these equations, without repeats.
    """

    primitive: str
    why: str
    count: int
    lines: tuple[Place, ...]


def risks(program: Program) -> tuple[Risk, ...]:
    """Return the equations of a program, at any depth, that may not be deterministic.

    Kernels of Pallas are not searched.
    """
    frames, lines_by_risk = frames_now(program.roots), dict[tuple[str, str], list[Place]]()
    _search(jaxcompat.open_jaxpr(program.jaxpr), (), frames, lines_by_risk)
    return tuple(
        Risk(primitive, why, len(lines), tuple(dict.fromkeys(filter(None, lines))))
        for (primitive, why), lines in lines_by_risk.items()
    )


def _search(
    jaxpr: Jaxpr,
    around: tuple[JaxprEqn, ...],
    frames: Frames,
    lines_by_risk: dict[tuple[str, str], list[Place]],
) -> None:
    for eqn in jaxpr.eqns:
        name = str(eqn.primitive.name)
        if why := _why(eqn, name):
            lines_by_risk.setdefault((name, why), []).append(frames.line_of((*around, eqn)))
        if name != "pallas_call":
            for _, body in bodies(eqn):
                _search(body, (*around, eqn), frames, lines_by_risk)


def _why(eqn: JaxprEqn, name: str) -> str:
    """Return why the results of an equation may differ, or ""."""
    eqn_traits = traits(eqn)
    if eqn_traits.callback:
        # Prints have no results.
        return _CALLBACK if eqn.outvars else ""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn)
    return _COLLECTIVE if eqn_traits.collective and _sums(eqn, name) else ""


def _adds_in_any_order(eqn: JaxprEqn) -> str:
    if eqn.params["unique_indices"] or not is_inexact(eqn.outvars[0]):
        return ""
    return "" if _is_one_update(eqn) else _GPU_ORDER


def _writes_in_any_order(eqn: JaxprEqn) -> str:
    return "" if eqn.params["unique_indices"] or _is_one_update(eqn) else _GPU_LAST


def _is_one_update(eqn: JaxprEqn) -> bool:
    """Return True if a scatter has a single index vector, so that no two can be equal."""
    shape = eqn.invars[1].aval.shape[:-1]
    return all(isinstance(size, int) for size in shape) and int(np.prod(shape, dtype=int)) <= 1


def _sorts_unstably(eqn: JaxprEqn) -> str:
    moves_more = len(eqn.invars) > eqn.params["num_keys"]
    return _UNSTABLE if moves_more and not eqn.params["is_stable"] else ""


def _generates(eqn: JaxprEqn) -> str:
    # The key's implementation decides: bits of threefry are the same everywhere.
    text = str(eqn.invars[0].aval)
    return _GENERATOR if "rbg" in text else ""


def _sums(eqn: JaxprEqn, name: str) -> bool:
    """Return True for a collective that adds floats."""
    adds = "psum" in name or "reduce_scatter" in name
    return adds and any(map(is_inexact, eqn.outvars))


#: Why results may differ, by primitive; "" if they may not.
_RULES: Mapping[str, Callable[[JaxprEqn], str]] = {
    "scatter-add": _adds_in_any_order,
    "scatter-mul": _adds_in_any_order,
    "scatter": _writes_in_any_order,
    "select_and_scatter_add": lambda eqn: _WINDOW if is_inexact(eqn.outvars[0]) else "",
    "sort": _sorts_unstably,
    "random_bits": _generates,
    "rng_bit_generator": lambda eqn: _GENERATOR,
    "rng_uniform": lambda eqn: _GENERATOR,
}


# --- isolated -------------------------------------------------------------------------------------
# Run a variant in a separate process, which a compiler crash ends with a signal.
#
# A program goes there as a `.jaxpr` file, and keys as their data.


class IsolatedRunner:
    """Runs a variant in a separate process, which may crash."""

    def __init__(self, variant: Variant, on_progress: OnProgress = lambda doing: None):
        self._variant, self._on_progress = variant, on_progress

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results for flat arguments, as NumPy arrays except for keys.

        Raises UnsupportedError if the process crashes or the program cannot be written to a file,
        and the errors of the run.
        """
        variant = self._variant
        with process_of(variant) as process:
            self._on_progress(f"running {variant.name} in its own process")
            return results_in(process, variant, arguments)


def process_of(variant: Variant) -> AbstractContextManager[PythonProcess]:
    """Start a process with the environment of a variant; it ends with the `with` block."""
    return python_process(f"{variant.name} crashed", dict(variant.environment))


def results_in(process: PythonProcess, variant: Variant, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a variant in a process. Raises the errors of `IsolatedRunner`."""
    results = process.call(_results, *sent(process, variant, arguments))
    return logical(results, variant.program.out_avals)


def _results(*request: Any) -> list[Any]:
    variant, arguments = received(*request)
    return list(map(as_numpy, Runner(variant)(arguments)))


def sent(process: PythonProcess, variant: Variant, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a variant and its flat arguments as values that can be sent to a process.

    Raises UnsupportedError if the program cannot be written.
    """
    path = os.path.join(process.folder, "program.jaxpr")
    write(variant.program, path)
    with jax.transfer_guard("allow"):
        values = list(map(as_numpy, arguments))
    return path, variant.name, variant.platform, variant.op_by_op, x64_enabled(), values


def received(
    path: str, name: str, platform: str | None, op_by_op: bool, x64: bool, values: Sequence[Any]
) -> tuple[Variant, list[Any]]:
    """Return the variant and the flat arguments that were sent, and configure JAX for them."""
    jaxcompat.keep_backend_probing_quiet()
    jax.config.update("jax_enable_x64", x64)
    program = read(path)
    return Variant(name, program, platform, op_by_op), logical(values, program.in_avals)


def logical(arrays: Sequence[Any], avals: Sequence[Aval]) -> list[Any]:
    """Return arrays of these types from their plain representation, such as keys from key data."""
    return [
        jaxcompat.logical_array(jax.numpy.asarray(x), aval=aval)
        if is_extended(getattr(aval, "dtype", None))
        else x
        for x, aval in zip(arrays, avals, strict=True)
    ]
