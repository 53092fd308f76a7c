"""Statistics of watched values, and values collected from compiled bodies.

Magnitudes are counted in bins. Bins are powers of two, split where a format begins to overflow or
to round to zero, so that the losses of a format are exact sums of bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running.arrays import plain_array
from jaxprtool.execute.stepping import Progress, advanced, on_shards, put_at
from jaxprtool.ir.documents import AnyFloat
from jaxprtool.ir.dtypes import array_dtypes, is_extended
from jaxprtool.ir.equations import has_external_effect, named
from jaxprtool.ir.evaluation import Interpreter, LoopOperands, bind
from jaxprtool.ir.meshes import mesh_of
from jaxprtool.ir.regions import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, DType, JaxprEqn

# --- numbers --------------------------------------------------------------------------------------
# Statistics of values: range, mean, and losses in narrower formats.

#: The formats whose losses are computed, by their short names.
FORMATS = ("bf16", "f16", "f8_e5m2", "f8_e4m3fn")


@dataclass(frozen=True)
class FormatLoss:
    """The loss if values were converted to a format, as fractions of all elements.

    Attributes:
        overflow: The fraction of finite elements beyond its largest number.
        underflow: The fraction of nonzero elements that would become zero.
        subnormal: The fraction that would become subnormal, with fewer digits.
    """

    overflow: float
    underflow: float
    subnormal: float


@dataclass(frozen=True)
class Numbers:
    """Statistics of values.

    Attributes:
        size: The number of elements in all executions.
        low: The least element that is not NaN; None if there is none. Of complex numbers,
            magnitudes.
        high: The greatest element that is not NaN.
        mean: The mean of the finite elements.
        deviation: Their standard deviation.
        zeros: The number of zeros.
        nans: The number of NaNs.
        infs: The number of infinities.
        subnormals: The number of elements that are subnormal in their own type.
        exponents: The number of elements with a magnitude of at least 2 ** e and less than 2 ** (e
            + 1), by e. Magnitudes below the least normal number count as one power below it.
        lost: The loss in narrower formats, by their short names; empty for integers.
    """

    size: int
    low: AnyFloat | None
    high: AnyFloat | None
    mean: AnyFloat | None
    deviation: AnyFloat | None
    zeros: int
    nans: int
    infs: int
    subnormals: int
    exponents: Mapping[int, int]
    lost: Mapping[str, FormatLoss]


def has_numbers(aval: Aval) -> bool:
    """Return True if a type is an array of numbers or booleans."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or isinstance(aval, AbstractRef) or dtype == jax.dtypes.float0:
        return False
    return not is_extended(dtype)


def is_inexact_dtype(dtype: DType) -> bool:
    """Return True if a dtype is floating-point or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


# --- bins -------------------------------------------------------------------------------------


class _Bins:
    """The bins of the magnitudes of f32 or f64.

    A bin is a range of bit patterns, which as integers are ordered by magnitude.
    """

    def __init__(self, bits: int):
        self.float = np.dtype(f"f{bits // 8}")
        self.int = np.dtype(f"u{bits // 8}")
        #: The right shift that leaves the exponent of a bit pattern without its sign.
        self.shift = int(np.finfo(self.float).nmant)
        self.without_sign = self.int.type((1 << (bits - 1)) - 1)
        fields = 1 << (bits - 1 - self.shift)
        powers = np.arange(fields, dtype=self.int) << self.int.type(self.shift)
        self.infinity = int(powers[-1])
        limits = {name: (*_limits(array_dtypes()[name]),) for name in FORMATS}
        cuts = {1, self.infinity + 1}
        cuts |= {self.pattern(x) for limit in limits.values() for x in limit}
        #: The starts of bins other than powers of two.
        self.cuts = sorted(cuts - set(powers.tolist()))
        self.starts = np.array(sorted({*powers.tolist(), *self.cuts}), self.int)
        self.limits = {name: [self.pattern(x) for x in limit] for name, limit in limits.items()}
        with np.errstate(invalid="ignore"):  # the last bin has NaNs
            _, exponents = np.frexp(self.starts.view(self.float))
        least = int(np.finfo(self.float).minexp) - 1
        self.exponents = np.maximum(exponents - 1, least)

    def pattern(self, number: float) -> int:
        return int(np.array(number, self.float).view(self.int))

    def between(self, counts: np.ndarray, first: int, end: int) -> int:
        """Return the number of magnitudes with a bit pattern in `range(first, end)`."""
        return int(counts[(self.starts >= first) & (self.starts < end)].sum())


@cache
def _bins(dtype: np.dtype) -> _Bins:
    return _Bins(64 if dtype == np.float64 else 32)


def _limits(dtype: DType) -> Iterator[float]:
    """Yield the magnitudes at which a format is nonzero, is normal, and overflows."""
    info = jnp.finfo(dtype)
    half = np.float32(float(info.smallest_subnormal) / 2)
    # Ties are rounded to even, which differs between formats.
    yield float(half if half.astype(dtype) != 0 else np.nextafter(half, np.float32(np.inf)))
    yield float(info.tiny)
    most = float(info.max)
    step = 2.0 ** (math.frexp(most)[1] - 1 - int(info.nmant))
    beyond = np.float32(most + step / 2)
    with np.errstate(over="ignore"):
        fits = np.isfinite(beyond.astype(dtype).astype(np.float32))
    yield float(np.nextafter(beyond, np.float32(np.inf)) if fits else beyond)


# --- measuring --------------------------------------------------------------------------------


@dataclass
class Tally:
    """Accumulated statistics of values; tallies can be added."""

    size: int = 0
    low: float = math.inf
    high: float = -math.inf
    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    subnormals: int = 0
    counts: np.ndarray | None = None

    def add(self, other: Tally) -> None:
        """Add the values of another tally."""
        both = self.finite + other.finite
        if both:
            part, apart = other.finite / both, other.mean - self.mean
            variance = (1 - part) * self.deviation**2 + part * other.deviation**2
            self.deviation = math.sqrt(variance + part * (1 - part) * apart**2)
            self.mean += part * apart
        self.finite = both
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for name in ("size", "zeros", "nans", "infs", "subnormals"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.counts is not None and self.counts is None:
            self.counts = other.counts.copy()
        elif other.counts is not None and self.counts is not None:
            if len(self.counts) < len(other.counts):
                self.counts = _widened(self.counts)
            same = len(self.counts) == len(other.counts)
            self.counts = self.counts + (other.counts if same else _widened(other.counts))

    @property
    def numbers(self) -> Numbers:
        """The statistics."""
        has_any = self.low <= self.high
        exponents: dict[int, int] = {}
        lost: dict[str, FormatLoss] = {}
        if self.counts is not None:
            bins = _of_length(len(self.counts))
            inside = (bins.starts > 0) & (bins.starts < bins.infinity) & (self.counts > 0)
            for e, n in zip(bins.exponents[inside], self.counts[inside], strict=True):
                exponents[int(e)] = exponents.get(int(e), 0) + int(n)
            lost = {name: self._lost(bins, name) for name in FORMATS}
        return Numbers(
            self.size,
            self.low if has_any else None,
            self.high if has_any else None,
            self.mean if self.finite else None,
            self.deviation if self.finite else None,
            self.zeros,
            self.nans,
            self.infs,
            self.subnormals,
            exponents,
            lost,
        )

    def _lost(self, bins: _Bins, name: str) -> FormatLoss:
        assert self.counts is not None
        least, normal, beyond = bins.limits[name]
        ranges = (beyond, bins.infinity), (1, least), (least, normal)
        counts = [bins.between(self.counts, *span) for span in ranges]
        return FormatLoss(*(number / max(self.size, 1) for number in counts))


def _of_length(number: int) -> _Bins:
    narrow, wide = _bins(np.dtype("f4")), _bins(np.dtype("f8"))
    return narrow if number == len(narrow.starts) else wide


def _widened(counts: np.ndarray) -> np.ndarray:
    """Return counts in f32 bins as counts in f64 bins."""
    narrow, wide = _bins(np.dtype("f4")), _bins(np.dtype("f8"))
    with np.errstate(invalid="ignore"):
        values = narrow.starts.view(np.float32).astype(np.float64)
    patterns = values.view(np.uint64)
    # NaNs have one bin.
    patterns[narrow.starts > narrow.infinity] = wide.infinity + 1
    widened = np.zeros(len(wide.starts), np.int64)
    np.add.at(widened, np.searchsorted(wide.starts, patterns, "right") - 1, counts)
    return widened


def tallies(values: Any, rows: int) -> list[Tally]:
    """Return a tally for each of `rows` equal parts of an array along its first axes."""
    on_device = isinstance(values, jax.Array) and len(values.devices()) == 1
    if is_inexact_dtype(values.dtype) and on_device:
        wide = jnp.float64 if values.dtype in (jnp.float64, jnp.complex128) else jnp.float32
        moments, counts = _on_device(values, rows, np.dtype(wide))
        return _tallies(values.dtype, np.size(values) // max(rows, 1), moments, counts)
    array = plain_array(values).reshape(rows, -1)
    if array.dtype.kind not in "fc":
        return _of_integers(array)
    if array.dtype.kind == "c":
        array = np.abs(array)
    array = array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)
    with np.errstate(all="ignore"):
        moments = _moments_of_finite(array) or _moments(np, array.astype(np.float64))
    indices = _indices(np, array, np.ascontiguousarray(array).view(_bins(array.dtype).int))
    bins = len(_bins(array.dtype).starts)
    counts = np.bincount(indices.astype(np.intp).reshape(-1), minlength=rows * bins)
    return _tallies(values.dtype, array.shape[1], moments, counts.reshape(rows, bins))


def on_host(array: Any) -> Any:
    """Return a NumPy array if an array is in CPU memory, else the array itself."""
    if isinstance(array, jax.Array) and all(d.platform == "cpu" for d in array.devices()):
        return np.asarray(array)
    return array


@partial(jax.jit, static_argnums=(1, 2))
def _on_device(values: Any, rows: int, wide: np.dtype) -> Any:
    array = jnp.abs(values) if jnp.iscomplexobj(values) else values
    array = array.astype(wide).reshape(rows, -1)
    bins = len(_bins(wide).starts)
    indices = _indices(jnp, array, jax.lax.bitcast_convert_type(array, _bins(wide).int))
    counts = jnp.zeros(rows * bins, jnp.uint32).at[indices.reshape(-1)].add(1)
    return _moments(jnp, array), counts.reshape(rows, bins)


def _moments_of_finite(x: np.ndarray) -> Any:
    """Return the result of `_moments` if all is finite and no square overflows; else None."""
    low, high = x.min(1, initial=np.inf), x.max(1, initial=-np.inf)
    if not x.size or not (np.maximum(np.abs(low), np.abs(high)) < 1e150).all():
        return None
    wide = x.astype(np.float64, copy=False)
    return low, high, wide.mean(1), wide.std(1)


def _moments(xp: Any, x: Any) -> Any:
    """Return the minimum, maximum, mean and standard deviation of each row."""
    finite, number = xp.isfinite(x), ~xp.isnan(x)
    low = xp.where(number, x, xp.inf).min(1, initial=xp.inf)
    high = xp.where(number, x, -xp.inf).max(1, initial=-xp.inf)
    count = xp.maximum(finite.sum(1), 1)
    # Scaled by the largest, squares neither overflow nor vanish.
    x = xp.where(finite, x, 0)
    most = xp.abs(x).max(1, initial=0)
    tiny = float(np.finfo(x.dtype).tiny)
    # XLA multiplies by the reciprocal of the scale, which must be a normal number too.
    scale = xp.clip(most, 4 * tiny, 1 / tiny)
    x = x / scale[:, None]
    mean = x.sum(1) / count
    apart = xp.where(finite, x - mean[:, None], 0)
    return low, high, mean * scale, xp.sqrt((apart * apart).sum(1) / count) * scale


def _indices(xp: Any, array: Any, patterns: Any) -> Any:
    """Return the bin of each element, with separate bins for each row."""
    bins = _bins(np.dtype(array.dtype))
    patterns = patterns & bins.without_sign
    indices = (patterns >> bins.int.type(bins.shift)).astype(xp.int32)
    most = patterns.max(initial=0) if xp is np else bins.cuts[-1]
    for cut in bins.cuts:
        if cut > most:
            break
        indices = indices + (patterns >= bins.int.type(cut))
    first = xp.arange(array.shape[0], dtype=xp.int32) * len(bins.starts)
    return indices + first[:, None]


def _tallies(dtype: DType, size: int, moments: Any, counts: Any) -> list[Tally]:
    counts = np.asarray(counts).astype(np.int64)
    bins = _of_length(counts.shape[1])
    tiny = bins.pattern(float(jnp.finfo(dtype).tiny))
    row_tallies = []
    for row, low, high, mean, deviation in zip(counts, *map(np.asarray, moments), strict=True):
        zeros = int(row[0])
        nans = bins.between(row, bins.infinity + 1, 2**64)
        infs = bins.between(row, bins.infinity, bins.infinity + 1)
        subnormals = bins.between(row, 1, tiny)
        finite = size - nans - infs
        ends = float(low), float(high)
        row_tallies.append(
            Tally(
                size,
                *ends,
                finite,
                float(mean),
                float(deviation),
                zeros,
                nans,
                infs,
                subnormals,
                row,
            )
        )
    return row_tallies


def _of_integers(array: np.ndarray) -> list[Tally]:
    row_tallies = []
    for row, exact in zip(array.astype(np.float64), array, strict=True):
        if not row.size:
            row_tallies.append(Tally())
            continue
        ends = float(exact.min()), float(exact.max())
        zeros = row.size - int(np.count_nonzero(exact))
        row_tallies.append(
            Tally(row.size, *ends, row.size, float(row.mean()), float(row.std()), zeros)
        )
    return row_tallies


# --- collected ------------------------------------------------------------------------------------
# Values of compiled bodies: collected under tracing and returned as further results.
#
# A loop whose values take much memory runs in chunks of iterations whose values fit.

#: The limit in bytes of the values of one chunk.
ITERATION_BYTES = 1 << 25

#: The maximum number of iterations of a while loop in a chunk, since the memory for a full chunk is
#: cleared each time.
_WHILE_ITERATIONS = 1 << 8

#: On the CPU each equation is a separate kernel, which compiles faster than fused kernels that
#: return all values. "fusion-wrapper" is disabled too, since XLA otherwise transposes some results
#: of scans.
_CPU_OPTIONS = {
    "xla_disable_hlo_passes": "fusion",
    "xla_backend_optimization_level": 0,
}


@dataclass(frozen=True)
class WatchSite:
    """A result of an equation in a compiled body, and the place of its values.

    Attributes:
        eqn: The equation.
        result: The index of the result.
        around: The equations between the compiled body and this one, outermost first.
        place: The position of the values among the collected ones. They have an axis for each loop
            of `around`.
        taken: For each `cond` in `around`, the position of the indices of the branches taken, and
            the index of this branch.
        offset: The offset of the iteration number: 1 in the condition of a `while`, which is
            computed at the end of the previous iteration.
    """

    eqn: JaxprEqn
    result: int
    around: tuple[JaxprEqn, ...]
    place: int
    taken: tuple[tuple[int, int], ...] = ()
    offset: int = 0


#: The most nested scans of which values are collected. Arrays of NumPy have at most 64 axes.
_MOST_LOOPS = 32

#: Decides which results of equations are watched.
Wanted = Callable[[JaxprEqn, int], bool]


@dataclass
class Collector(Interpreter):
    """Evaluates a jaxpr under tracing, and collects the values of equations.

    Attributes:
        wanted: Decides which results to collect.
        around: The enclosing equations.
        sites: The sites of the collected values.
        values: The values, and the indices of branches taken.
    """

    wanted: Wanted
    around: tuple[JaxprEqn, ...] = ()
    sites: list[WatchSite] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if is_left_out(eqn):
            return []
        return self._noted(eqn, bind(eqn, operands))

    def _noted(self, eqn: JaxprEqn, results: Sequence[Any]) -> Sequence[Any]:
        for i, x in enumerate(results):
            if self.wanted(eqn, i):
                self.sites.append(WatchSite(eqn, i, self.around, len(self.values)))
                self.values.append(x)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if not isinstance(view(eqn), Scan | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        around, self.around = self.around, (*self.around, eqn)
        results = super().equation(eqn, operands)
        self.around = around
        return self._noted(eqn, results)

    def inside(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Collector]:
        """Return the results of a body of the current equation, and the collector of its values."""
        inner = Collector(self.wanted, self.around)
        return inner.run(body, arguments), inner

    def scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        if sum(isinstance(view(eqn), Scan) for eqn in self.around) > _MOST_LOOPS:
            raise UnsupportedError(
                f"the {named(scan.eqn)} is inside {_MOST_LOOPS} scans or more: its values would "
                "have an axis for each"
            )
        carry, ys, inner, values = _scanned(self, scan, LoopOperands.of(scan, operands))
        self.add(inner, values)
        return [*carry, *ys]

    def branch(self, cond: Cond, operands: list[Any]) -> list[Any]:
        number, last = operands[0].astype(jnp.int32), len(cond.branches) - 1
        # As in XLA, an invalid index selects the last branch.
        index = jnp.where((number < 0) | (number > last), last, number)
        number = len(self.values)
        self.values.append(index)
        inners, traced = zip(*(self._traced(b, operands[1:]) for b in cond.branches), strict=True)
        avals = [closed.out_avals[len(cond.outs) :] for closed in traced]

        def taken(i: int) -> Callable[..., Any]:
            def branch(*args: Any) -> Any:
                results = jaxcompat.jaxpr_as_fun(traced[i])(*args)
                outs, values = results[: len(cond.outs)], results[len(cond.outs) :]
                others = [[_zeros(aval) for aval in of_branch] for of_branch in avals]
                return outs, [*others[:i], values, *others[i + 1 :]]

            return branch

        branches = [taken(i) for i in range(len(cond.branches))]
        outs, values = jax.lax.switch(index, branches, *operands[1:])
        for i, (inner, of_branch) in enumerate(zip(inners, values, strict=True)):
            self.add(inner, of_branch, ((number, i),))
        return list(outs)

    def _traced(
        self, branch: ClosedJaxpr, operands: Sequence[Any]
    ) -> tuple[Collector, ClosedJaxpr]:
        """Return the collector of a branch, and its trace: results, then the collected values.

        Each branch is traced once, so that nested ones take linear time.
        """
        inner = Collector(self.wanted, self.around)

        def alone(*args: Any) -> list[Any]:
            return [*inner.run(branch, args), *inner.values]

        closed = jax.make_jaxpr(alone)(*operands)
        return inner, closed

    def add(
        self, inner: Collector, values: Sequence[Any], taken: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Add the sites collected in a body, with their `values`."""
        first = len(self.values)
        self.values += values
        for site in inner.sites:
            branches = (*taken, *((place + first, branch) for place, branch in site.taken))
            self.sites.append(replace(site, place=site.place + first, taken=branches))


def _scanned(
    run: Collector, scan: Scan, operands: LoopOperands, length: int | None = None
) -> tuple[list[Any], list[Any], Collector, list[Any]]:
    """Return the carry, the stacked results, the collector and the values of a scan."""
    inner, count = Collector(run.wanted), len(operands.carry)

    def one(carry: list[Any], rows: list[Any]) -> Any:
        nonlocal inner
        outs, inner = run.inside(scan.body, [*operands.consts, *carry, *rows])
        return outs[:count], (outs[count:], inner.values)

    length, unroll = (scan.length, scan.unroll) if length is None else (length, 1)
    carry, (ys, values) = jax.lax.scan(
        one, operands.carry, operands.xs, length, scan.reverse, unroll
    )
    return carry, ys, inner, values


def _zeros(aval: Aval) -> Any:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(jaxcompat.varying_axes(aval))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def is_left_out(eqn: JaxprEqn) -> bool:
    """Return True if an equation is skipped: a call without results, such as a print."""
    return has_external_effect(eqn) and not eqn.outvars and view(eqn) is None


def is_stepped(eqn: JaxprEqn) -> bool:
    """Return True if an equation must not be compiled together with others.

    These are loops without a known number of iterations, and equations with refs, meshes or
    external effects.
    """
    structured = view(eqn)
    if isinstance(structured, While | ShardMap):
        return True
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if any(isinstance(aval, AbstractRef) or mesh_of(aval) is not None for aval in avals):
        return True
    return structured is None and has_external_effect(eqn) and not is_left_out(eqn)


def _compiled(function: Callable[..., Any], operands: Iterable[Any], **options: Any) -> Any:
    """Return a function compiled for the devices of its operands."""
    devices = [d for x in operands if isinstance(x, jax.Array) for d in x.devices()]
    platform = devices[0].platform if devices else jax.default_backend()
    if platform == "cpu":
        options["compiler_options"] = _CPU_OPTIONS
    return jax.jit(function, **options)


class BodyValues:
    """A body compiled as a whole.

    Attributes:
        sites: The sites of its values.
    """

    def __init__(self, body: ClosedJaxpr, wanted: Wanted, operands: Sequence[Any]):
        self._body, self._wanted = body, wanted
        self.sites: list[WatchSite] = []
        self._run = _compiled(self._results, operands)

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Return the results, and the values in order of place."""
        return self._run(operands)

    def _results(self, operands: Sequence[Any]) -> Any:
        run = Collector(self._wanted)
        results = run.run(self._body, operands)
        self.sites = run.sites
        return results, run.values


class CompiledScan:
    """Compiled iterations of a scan.

    Attributes:
        sites: The sites of their values.
    """

    def __init__(self, scan: Scan, wanted: Wanted, operands: LoopOperands):
        self._scan, self._wanted = scan, wanted
        self.sites: list[WatchSite] = []
        self._run = _compiled(self._iterations, chain(*operands), static_argnums=(0,))
        shapes = jax.eval_shape(lambda operands: self._iterations(1, 0, operands), operands)
        self._at_a_time = _at_a_time(shapes[2], scan.length)

    def __call__(self, number: int, operands: LoopOperands) -> Any:
        """Run iterations from `number` on.

        Returns the number of iterations run, the carry, whether there are more, their stacked
        results, and their values in order of place.
        """
        length = self._scan.length
        count = min(self._at_a_time, length - number)
        low = length - number - count if self._scan.reverse else number
        carry, ys, values = self._run(count, low, operands)
        return count, carry, number + count < length, ys, values

    def _iterations(self, count: int, low: Any, operands: LoopOperands) -> Any:
        if count != self._scan.length:
            xs = [jax.lax.dynamic_slice_in_dim(x, low, count) for x in operands.xs]
            operands = operands._replace(xs=xs)
        carry, ys, run, values = _scanned(Collector(self._wanted), self._scan, operands, count)
        self.sites = run.sites
        return carry, ys, values


class CompiledWhile:
    """Compiled iterations of a while loop.

    Attributes:
        sites: The sites of their values.
    """

    def __init__(self, loop: While, wanted: Wanted, operands: LoopOperands):
        self._loop, self._wanted = loop, wanted
        self.sites: list[WatchSite] = []
        self._run = _compiled(self._iterations, chain(*operands))

    def __call__(self, number: int, operands: LoopOperands) -> Any:
        """Run iterations; see `CompiledScan`. There may be more values than iterations run."""
        ran, carry, more, values = self._run(operands)
        return int(ran), carry, bool(more), [], values

    def _advanced(self, operands: LoopOperands, progress: Progress) -> tuple[Progress, list[Any]]:
        """Return the progress after one iteration, and its values."""
        whole, self.sites = Collector(self._wanted), []

        def run(body: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
            inner, first_site = Collector(self._wanted), len(whole.sites)
            outs = inner.run(body, arguments)
            whole.add(inner, inner.values)
            offset = int(body is self._loop.cond)
            self.sites += (replace(site, offset=offset) for site in whole.sites[first_site:])
            return outs

        return advanced(self._loop, operands, progress, run), whole.values

    def _iterations(self, operands: LoopOperands) -> Any:
        start = Progress(jnp.int32(0), operands.carry, [], jnp.array(True))
        shapes = jax.eval_shape(self._advanced, operands, start)[1]
        most = _at_a_time(shapes, _WHILE_ITERATIONS)
        kept = [jnp.zeros((most, *x.shape), x.dtype) for x in shapes]

        def one(state: Any) -> Any:
            before, kept = state
            after, values = self._advanced(operands, before)
            return after, [put_at(*pair, before.number) for pair in zip(kept, values, strict=True)]

        end, kept = jax.lax.while_loop(
            lambda state: state[0].more & (state[0].number < most), one, (start, kept)
        )
        return end.number, end.carry, end.more, kept


def _at_a_time(shapes: Any, most: int) -> int:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return max(1, min(most, ITERATION_BYTES // max(size, 1)))


def shard_map_values(
    shard_map: ShardMap, wanted: Wanted, operands: Sequence[Any]
) -> tuple[list[Any], list[WatchSite], list[Any]]:
    """Return the results of a `shard_map`, and the values of its equations, device by device."""
    sites: list[WatchSite] = []

    def collecting(*shards: Any) -> Any:
        nonlocal sites
        run = Collector(wanted)
        results = run.run(shard_map.body, shards)
        sites = run.sites
        return results, [jnp.asarray(x)[None] for x in run.values]

    outs, values = _compiled(on_shards(shard_map, collecting), operands)(*operands)
    return list(outs), sites, values
