"""The difference that rounding explains between two programs that compute the same.

A result of 1e-9 may be wrong by a factor of 100 where no absolute tolerance sees it, and one that
is the difference of large terms may have no correct digit without a fault. So the tolerance of each
element is estimated from the reference, by Monte Carlo arithmetic (Parker, 1997): the program runs
in double precision, with the operands and the results of each equation changed at random by a
rounding error of their dtype, and the spread of an element over some runs is its error. Sums of n
terms get errors of sqrt(n) roundings. `MARGIN` times the error is tolerated.

Where a difference is more than some roundings of the element itself, and always in bf16 and f16,
the two programs are compared in double precision too. Rounding to the dtypes of the programs is
left out there, so they agree if, and only if, they compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.execute.running.arrays import (
    ValueDifference,
    as_numpy,
    bits_agree,
    value_difference,
    wide,
)
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import equations
from jaxprtool.ir.evaluation import Interpreter, LoopOperands, bind, checks_disabled
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Cond, Scan, While, holds_jaxpr, view
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, Jaxpr, JaxprEqn

#: The tolerated multiple of the estimated error.
MARGIN = 8.0

#: A difference in double precision, relative to the result, that the rounding of a constant may
#: explain.
CLEAR = 2.0**-8

#: Options of XLA for programs that run a few times: compiling takes longer than running.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

#: The number of runs with random errors.
_RUNS = 8

_EPS64 = 2.0**-52


class WideProgram:
    """A program that can run in double precision, with random rounding errors.

    Attributes:
        program: The program.
        narrow: The primitives that only ran in their own dtypes, after the first run.
        effects: The equations without results that are outside of loops and branches, in order,
            after the first run. Their operands follow the results.
    """

    def __init__(self, program: Program):
        self.program = program
        self.narrow: list[str] = []
        self.effects: list[JaxprEqn] = []

        self._exact = jax.jit(partial(self._evaluated, None), compiler_options=_QUICK)
        self._compiled: dict[int, Callable[..., Any]] = {}

    @property
    def is_exact(self) -> bool:
        """Whether double precision is finer than the dtypes of the program."""
        epsilons = (rounding(aval.dtype) for aval in self._inexact)
        return min(epsilons, default=0.0) > _EPS64 and not self.narrow

    @jax.transfer_guard("allow")
    def run(
        self, arguments: Sequence[Any], seed: int = 0, amplitude: float = 0.0, relative: float = 0.0
    ) -> list[Any] | None:
        """Return the results, and the operands of effects, with random errors.

        Return None if the program cannot be run so.

        Args:
            arguments: The arguments.
            seed: The seed of the errors; 0 for none.
            amplitude: Their size in roundings of the dtype of each value.
            relative: Their size relative to each value, in addition.
        """
        if not self._is_pure:
            return None
        try:
            # Python's numbers have another dtype as arrays of NumPy.
            avals = self.program.in_avals
            values = [
                _widened(_on_host(x, aval.dtype)) for x, aval in zip(arguments, avals, strict=True)
            ]
            on_host = jax.default_device(jax.devices("cpu")[0])
            with jaxcompat.double_precision(), on_host, checks_disabled():
                if not seed:
                    return [_on_host(x) for x in self._exact(values)]
                numbers = _random(np.uint32(seed), _PLACES + self._largest)
                errors = _Errors(numbers, np.array([amplitude, relative]), self._dtypes)
                return [_on_host(x) for x in self._evaluated(errors, map(jnp.asarray, values))]
        except Exception:  # primitives may raise anything in other dtypes
            return None

    def _evaluated(self, errors: _Errors | None, arguments: Iterable[Any]) -> list[Any]:
        """Return the results of the program, and the operands of its effects."""
        compiled = None if errors is None else self._compiled
        moved = _PerturbedInterpreter(errors, self.narrow, np.uint32(0), compiled)
        results = moved.results(self.program.jaxpr, list(arguments))
        self.effects = [eqn for eqn, _ in moved.effects]
        return [*results, *(x for _, operands in moved.effects for x in operands)]

    @cached_property
    def _equations(self) -> list[JaxprEqn]:
        return list(equations(jaxcompat.open_jaxpr(self.program.jaxpr)))

    @cached_property
    def _is_pure(self) -> bool:
        """Whether no equation with results has effects or calls back. Prints are left out."""
        return not any(
            traits(eqn).callback
            or not (holds_jaxpr(eqn.params.values()) or jaxcompat.only_names_axes(eqn.effects))
            for eqn in self._equations
            if eqn.outvars
        )

    @cached_property
    def _inexact(self) -> list[Any]:
        """The types of the operands and results with rounding errors."""
        avals = (v.aval for eqn in self._equations for v in (*eqn.invars, *eqn.outvars))
        return list(filter(_is_inexact, avals))

    @property
    def _dtypes(self) -> set[Any]:
        return {aval.dtype for aval in self._inexact}

    @property
    def _largest(self) -> int:
        """The number of elements of the largest of them."""
        return max((math.prod(aval.shape) for aval in self._inexact), default=1)


class Rounding:
    """The results of a program on fixed arguments in double precision, and their errors.

    Args:
        wide_program: The program.
        arguments: The arguments.
        reference: The one whose errors are those of this program too, if any: that of the program
            that passes rewrote to this one.
    """

    def __init__(
        self,
        wide_program: WideProgram,
        arguments: Sequence[Any],
        reference: Rounding | None = None,
    ):
        self.wide, self._arguments, self._reference = wide_program, arguments, reference

    @cached_property
    def values(self) -> list[Any] | None:
        """The results in double precision; None if the program cannot be run so."""
        return self.wide.run(self._arguments)

    @cached_property
    def errors(self) -> list[Any] | None:
        """The error of each element of each result, from one rounding in each equation."""
        return self._reference.errors if self._reference else self._spread(amplitude=1.0)

    @cached_property
    def wide_errors(self) -> list[Any] | None:
        """The same if each equation is rounded to double precision."""
        return self._reference.wide_errors if self._reference else self._spread(relative=_EPS64)

    def operand_places(self, effects: Sequence[JaxprEqn]) -> dict[int, int]:
        """Return the place of the first operand of effects among the values, by their position.

        Effects in loops and branches have none.
        """
        if self.values is None:
            return {}
        places, first, rest = {}, len(self.wide.program.jaxpr.outvars), list(self.wide.effects)
        for i, eqn in enumerate(effects):
            skipped = next((k for k, other in enumerate(rest) if other is eqn), None)
            if skipped is not None:
                places[i] = first + sum(len(other.invars) for other in rest[:skipped])
                first = places[i] + len(eqn.invars)
                del rest[: skipped + 1]
        return places

    def _spread(self, **sizes: float) -> list[Any] | None:
        """Return the largest changes of results by random errors."""
        exact = self.values
        if exact is None:
            return None
        errors = [np.zeros(np.shape(x)) for x in exact]
        for i in range(_RUNS):
            moved = self.wide.run(self._arguments, i + 1, **sizes)
            if moved is None:
                return None
            for error, a, b in zip(errors, exact, moved, strict=True):
                if _is_inexact(a):
                    with np.errstate(all="ignore"):
                        spread = np.abs(b - a)
                    np.fmax(error, spread, out=error, where=np.isfinite(spread))
        return errors


def rounding(dtype: Any) -> float:
    """Return the relative distance of neighboring numbers of an inexact dtype."""
    return float(jnp.finfo(dtype).eps)


def _smallest(dtype: Any) -> float:
    """Return the rounding error near zero. XLA flushes subnormals to zero, but not those of f16."""
    limits = jnp.finfo(dtype)
    normal = float(limits.smallest_normal)
    return normal if normal < 2.0**-100 else float(limits.smallest_subnormal)


def unexplained(
    before: Rounding,
    after: Rounding,
    values: Sequence[object],
    others: Sequence[object],
    names: Sequence[str],
) -> dict[int, ValueDifference]:
    """Return the differences of results that rounding does not explain, by position.

    Args:
        before: The errors of the reference.
        after: Those of the other program.
        values: The results of the reference.
        others: The results of the other program.
        names: Their names.
    """
    faults = {}
    for i, (name, a, b) in enumerate(zip(names, values, others, strict=True)):
        fault = value_difference(name, a, b, partial(explained, before, after, (i, i)))
        if fault is not None:
            faults[i] = fault
    return faults


def explained(
    before: Rounding, after: Rounding, places: tuple[int, int], a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of the elements of a result that agree, and the tolerated errors.

    Args:
        before: The errors of the reference.
        after: Those of the other program.
        places: The position of the result in each.
        a: The result of the reference.
        b: The result of the other program.
    """
    clear, tolerated = near(a, b)
    if clear.all() or not _is_inexact(a):
        return clear, tolerated
    eps = _coarser(a, b)
    with np.errstate(all="ignore"):
        tolerated = np.fmax(tolerated, MARGIN * _error(before, places[0], a, eps))
        doubtful = (_distance(a, b) <= tolerated) & ~clear
        if doubtful.any():
            doubtful &= _agree_exactly(before, after, places, eps, a.shape)
    return clear | doubtful, tolerated


def near(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of the elements that surely agree, and the tolerated errors.

    They differ by at most some roundings of themselves, or not at all in dtypes as coarse as bf16.
    """
    if not _is_inexact(a):
        return a == b, np.zeros(a.shape)
    eps = _coarser(a, b)
    with np.errstate(all="ignore"):
        sizes = np.abs(wide(a))
        tolerated = np.where(np.isfinite(sizes), MARGIN * eps * sizes, 0.0)
    same = bits_agree(a, b) if a.dtype == b.dtype else bits_agree(wide(a), wide(b))
    return same | ((_distance(a, b) <= tolerated) & (MARGIN * eps < CLEAR)), tolerated


def _coarser(a: np.ndarray, b: np.ndarray) -> float:
    return max(rounding(a.dtype), rounding(b.dtype))


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        difference = np.abs(wide(b) - wide(a))
    return np.where(np.isfinite(difference), difference, np.inf)


def _error(reference: Rounding, place: int, a: np.ndarray, eps: float) -> np.ndarray:
    """Return the error of each element of a result of the reference."""
    # Elements of an extended dtype are several numbers each.
    if reference.errors is not None and reference.errors[place].shape == a.shape:
        return np.asarray(reference.errors[place] * (eps / rounding(a.dtype)))
    sizes = np.abs(wide(a))  # the largest element stands for the terms of all
    return np.full(a.shape, 8 * eps * sizes[np.isfinite(sizes)].max(initial=0.0))


def _agree_exactly(
    before: Rounding,
    after: Rounding,
    places: tuple[int, int],
    eps: float,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Return a mask of the elements of a result that agree in double precision."""
    if before.errors is None or before.wide_errors is None or after.values is None:
        return np.ones(1, bool)
    if not (before.wide.is_exact and after.wide.is_exact):
        return np.ones(1, bool)
    assert before.values is not None
    x, y = before.values[places[0]], after.values[places[1]]
    if x.shape != shape:
        return np.ones(1, bool)
    noise = MARGIN * before.wide_errors[places[0]]
    one = np.fmax(2 * eps * np.abs(x), before.errors[places[0]] / 32)  # of a constant, say
    rounded = np.fmin(CLEAR * np.abs(x), one)
    return np.asarray((x == y) | (np.abs(y - x) <= rounded + noise))


# --- the run with random errors -------------------------------------------------------------------


class _Errors:
    """Random errors of the sizes of rounding errors.

    They are slices of one array of random numbers, from random places: a program that computes
    them anew for each value takes several times as long.

    Args:
        numbers: Random numbers between -1 and 1, `_PLACES` more than the largest value has.
        sizes: The sizes of errors: in roundings of the dtype of each value, and relative to it.
        dtypes: The dtypes of values.
    """

    def __init__(self, numbers: Any, sizes: Any, dtypes: Iterable[Any]):
        self.numbers, self.sizes, self.dtypes = numbers, sizes, dtypes
        #: The size relative to values, and the smallest one, by dtype.
        self._sizes = {
            dtype: (sizes[0] * rounding(dtype) + sizes[1], sizes[0] * _smallest(dtype))
            for dtype in dtypes
        }

    def moved(self, x: Any, dtype: Any, number: float, place: Any) -> Any:
        """Return a value with the errors of `number` roundings to a dtype, from a random place."""
        relative, smallest = self._sizes[dtype]
        is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
        places = (place, place ^ np.uint32(1 << 31)) if is_complex else (place,)
        starts = [_mixed(each) & np.uint32(_PLACES - 1) for each in places]
        function = _moved if isinstance(self.numbers, jax.core.Tracer) else _compiled_moved
        return function(x, self.numbers, starts, number * relative, number * smallest)


def _moved(x: Any, numbers: Any, starts: Sequence[Any], relative: Any, smallest: Any) -> Any:
    """Return a value with errors of these sizes, slices of `numbers`: two if it is complex."""

    def part(start: Any) -> Any:
        return lax.mul(
            lax.reshape(lax.dynamic_slice(numbers, [start], [math.prod(x.shape)]), x.shape), sizes
        )

    by_size = lax.mul(lax.abs(x), lax.full(x.shape, relative))
    sizes = lax.max(by_size, lax.full(x.shape, smallest))
    parts = list(map(part, starts))
    errors = lax.complex(*parts) if len(parts) == 2 else parts[0]
    moved = lax.add(x, errors)
    return lax.select(lax.eq(x, lax.add(x, x)), x, moved)  # zeros and infinities are exact


_compiled_moved = jax.jit(_moved, compiler_options=_QUICK)


class _PerturbedInterpreter(Interpreter):
    """Evaluates a jaxpr in double precision, and changes all values of equations at random.

    Values that do not depend on arguments are computed in their own dtypes: rewrites that compute
    them ahead of time round them. These are NumPy's arrays, and the others JAX's.

    Errors keep XLA from fusing equations, so that it takes a hundred times as long to compile a
    long program with errors as without. Then each equation runs by itself, and what holds a body
    is compiled.

    Args:
        errors: The random errors; None for none.
        narrow: Filled with the primitives that only ran in their own dtypes.
        state: The state of a generator of random places.
        compiled: The loops and branches that were compiled of a program whose equations run by
            themselves, by their number in the run: a body that is called twice may have other
            constants; None for a program that is compiled as a whole.

    Attributes:
        effects: The equations without results, but those in loops and branches, with operands.
    """

    def __init__(
        self,
        errors: _Errors | None,
        narrow: list[str],
        state: Any,
        compiled: dict[int, Callable[..., Any]] | None = None,
    ):
        self._errors, self._narrow, self._state = errors, narrow, state
        self._compiled = compiled
        self._count = 0
        self._fixed: dict[int, Any] = {}
        self.effects: list[tuple[JaxprEqn, list[Any]]] = []

    def results(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a closed jaxpr, in double precision."""
        return [_widened(x) for x in self.run(closed, arguments)]

    def constant(self, value: Any, aval: Aval) -> Any:
        if _is_inexact(aval):
            return np.asarray(value, aval.dtype)
        return self._known(value) if self._depends(value) else value

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if not eqn.outvars:  # a print or a check
            self.effects.append((eqn, list(map(_widened, operands))))
            return []
        if not any(map(self._depends, operands)):
            if sum(math.prod(v.aval.shape) for v in eqn.outvars) <= _CONSTANT:
                with jax.ensure_compile_time_eval():
                    return [self._known(x) for x in bind(eqn, operands)]
            return [_widened(x) for x in bind(eqn, operands)]
        row = traits(eqn)
        moves = row.gives or row.moves or not any(_is_inexact(v.aval) for v in eqn.invars)
        size = 0.0 if moves else math.sqrt(_terms(eqn))
        operands = [
            self._moved(_widened(x), v.aval, size)
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        results = self._wide(eqn, operands)
        return [self._moved(x, v.aval, size) for x, v in zip(results, eqn.outvars, strict=True)]

    def _wide(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Return the results of an equation in double precision, or else in its own dtypes."""
        try:
            params = {name: _wide_parameter(value) for name, value in eqn.params.items()}
            results = list(bind(eqn.replace(params=params), operands))
        except Exception:  # not every primitive has every dtype
            results = []
        if [_type(x) for x in results] == [_wide_type(v.aval) for v in eqn.outvars]:
            return results
        if any(map(_is_inexact, operands)) and any(_is_inexact(v.aval) for v in eqn.outvars):
            self._narrow.extend({eqn.primitive.name} - {*self._narrow})
        narrowed = [_of_type(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]
        return [_widened(x) for x in bind(eqn, narrowed)]

    def _moved(self, x: Any, aval: Aval, size: float) -> Any:
        """Return a value with random errors of some roundings of its dtype."""
        if self._errors is None or not size or not _is_inexact(aval):
            return x
        # No program rounds the constant of `x**2.0` or `rem(x, 1.0)`, and a negative number has no
        # power of another exponent.
        if not self._depends(x) and (x == np.round(x)).all():
            return x
        return self._errors.moved(x, aval.dtype, size, self._next())

    def _depends(self, x: Any) -> bool:
        """Return True if a value depends on arguments."""
        return isinstance(x, jax.Array) and id(x) not in self._fixed

    def _known(self, x: Any) -> Any:
        """Return a value that does not depend on arguments so that `_depends` knows it."""
        if isinstance(x, jax.core.Tracer):
            return x
        if hasattr(x, "dtype") and not is_extended(x.dtype):
            return np.asarray(x)
        self._fixed[id(x)] = x
        return x

    # --- bodies -------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if self._compiled is None or not isinstance(view(eqn), Scan | While | Cond):
            return super().equation(eqn, operands)
        assert self._errors is not None
        dtypes, fixed = self._errors.dtypes, dict(enumerate(operands))
        given = {i: fixed.pop(i) for i, x in enumerate(operands) if self._depends(x)}

        def run(numbers: Any, sizes: Any, state: Any, given: dict[int, Any]) -> Sequence[Any]:
            errors, all_operands = _Errors(numbers, sizes, dtypes), {**fixed, **given}
            inner = _PerturbedInterpreter(errors, self._narrow, state)
            return inner.equation(eqn, [all_operands[i] for i in range(len(operands))])

        errors, state = self._errors, self._next()
        if self._count not in self._compiled:
            self._compiled[self._count] = jax.jit(run, compiler_options=_QUICK)
        return self._compiled[self._count](errors.numbers, errors.sizes, state, given)

    def _inside(self, state: Any) -> _PerturbedInterpreter:
        return _PerturbedInterpreter(self._errors, self._narrow, state)

    def _next(self) -> Any:
        self._count += 1
        with np.errstate(over="ignore"):
            return self._state * np.uint32(747796405) + np.uint32(self._count * 2891336453 % 2**32)

    def scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        _, consts, carry, xs = LoopOperands.of(scan, map(_widened, operands))

        def body(state: Any, rows: Any) -> Any:
            inner = self._inside(state[0])
            outs = inner.results(scan.body, [*consts, *state[1], *rows])
            return (inner._next(), outs[: len(carry)]), outs[len(carry) :]

        (_, carry), ys = lax.scan(
            body, (self._next(), carry), xs, length=scan.length, reverse=scan.reverse
        )
        return [*carry, *ys]

    def while_loop(self, loop: While, operands: list[Any]) -> list[Any]:
        cond_consts, consts, carry, _ = LoopOperands.of(loop, map(_widened, operands))

        def cond(state: Any) -> Any:
            return self._inside(state[0]).run(loop.cond, [*cond_consts, *state[1]])[0]

        def body(state: Any) -> Any:
            inner = self._inside(state[0])
            outs = inner.results(loop.body, [*consts, *state[1]])
            return inner._next(), outs

        return lax.while_loop(cond, body, (self._next(), carry))[1]

    def branch(self, cond: Cond, operands: list[Any]) -> list[Any]:
        def taken(branch: ClosedJaxpr, state: Any, *args: Any) -> list[Any]:
            return self._inside(state).results(branch, args)

        index = jnp.asarray(operands[0]).astype(np.int32)
        branches = [partial(taken, branch) for branch in cond.branches]
        return lax.switch(index, branches, self._next(), *map(_widened, operands[1:]))


#: The number of elements of the largest constants that are computed ahead of time.
_CONSTANT = 1 << 16

#: The number of places at which the random errors of a value may start, a power of two.
_PLACES = 1 << 16


def _terms(eqn: JaxprEqn) -> float:
    """Return the number of terms that an equation sums for each element of its results."""
    row = traits(eqn)
    shapes = [v.aval.shape for v in eqn.invars if hasattr(v.aval, "shape")]
    sizes = list(map(math.prod, shapes))
    if row.elementwise or not sizes:
        return 1.0
    out = max([1, *(math.prod(v.aval.shape) for v in eqn.outvars)])
    if row.bilinear or (len(sizes) == 2 and row.expensive):
        return max(1.0, math.sqrt(math.prod(sizes[:2]) / out))
    return float(max(1, max(sizes) / out, *(max(shape, default=1) for shape in shapes)))


def _random(seed: Any, count: int) -> Any:
    """Return numbers between -1 and 1."""
    x = _mixed(lax.iota(np.uint32, count) * np.uint32(0x9E3779B9) + seed)
    return x.astype(np.int32).astype(np.float64) * 2.0**-31


def _mixed(x: Any) -> Any:
    """Return a hash of 32-bit integers: the finalizer of murmur3."""
    with np.errstate(over="ignore"):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(16))


# --- double precision -----------------------------------------------------------------------------


def _is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and not is_extended(dtype) and jnp.issubdtype(dtype, jnp.inexact)


def _wide_dtype(dtype: Any) -> Any:
    inexact = not is_extended(dtype) and jnp.issubdtype(dtype, jnp.inexact)
    if not inexact:
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def _widened(x: Any) -> Any:
    if not _is_inexact(x):
        return x
    return x.astype(_wide_dtype(x.dtype))


def _of_type(x: Any, aval: Aval) -> Any:
    return x.astype(aval.dtype) if _is_inexact(aval) else x


def _type(x: Any) -> Any:
    return np.shape(x), getattr(x, "dtype", None)


def _wide_type(aval: Aval) -> Any:
    return aval.shape, _wide_dtype(aval.dtype)


def _wide_parameter(value: Any) -> Any:
    """Return a parameter for double precision: with wide dtypes, without algorithms of products."""
    if isinstance(value, np.dtype):
        return _wide_dtype(value)
    if isinstance(value, Jaxpr | ClosedJaxpr):
        closed = jaxcompat.close_jaxpr(value)
        types = [jax.ShapeDtypeStruct(*_wide_type(v.aval)) for v in closed.invars]
        traced = jax.make_jaxpr(lambda *args: Interpreter().run(closed, args))(*types)
        return traced if isinstance(value, ClosedJaxpr) else jaxcompat.open_jaxpr(traced)
    if isinstance(value, tuple) and holds_jaxpr(value):
        items = list(map(_wide_parameter, value))
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return None if isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset) else value


def _on_host(x: Any, dtype: Any = None) -> Any:
    extended = hasattr(x, "dtype") and is_extended(x.dtype)
    return x if extended else np.asarray(as_numpy(x), dtype)
