"""The search for the origins of NaNs and infinities.

    found = jaxprtool.find_nan(program, (params, batch))
    found.first.source, found.first.reaches

The program first runs as a whole (`screening`) and then, if it produces a NaN or an infinity,
equation by equation, at every depth and in every iteration (`search`). Each equation is then
computed separately, so that rounding may differ from fused equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.compiled import cone_of, screened
from jaxprtool.commands.nans.search import (
    OriginSearch,
    count_in_state,
    element,
    first_place,
    place_after,
)
from jaxprtool.commands.nans.values import INF, NAN, Evaluation, NonfiniteOrigin, Tracked
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running.arrays import (
    FilledArguments,
    as_numpy,
    fill_arguments,
    plain_array,
    statistics,
    wide,
)
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.ir.dataflow import POSITIVE, Domain
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.equations import all_jaxprs, named, type_of
from jaxprtool.ir.evaluation import FiniteCheck, checks_disabled
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.meshes import mesh_in_types
from jaxprtool.ir.places import UNKNOWN, Place
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.ir.scopes import ScopePaths, is_backward
from jaxprtool.jaxcompat import ClosedJaxpr, Jaxpr, JaxprEqn

#: The name scope of rematerialized equations of `jax.checkpoint`.
_RECOMPUTED = "rematted_computation"


@document(names={"source": "place"}, without=("element",))
@dataclass(frozen=True)
class Operand:
    """An operand of an equation, or a value that it was computed from.

    Attributes:
        type: Its type.
        argument: The name of the argument, or "".
        primitive: The primitive that computes it; "" for an argument or a constant.
        source: The user's line that computes it; "" if unknown.
        low: Its least number; None if it has no numbers.
        high: Its greatest number.
        nans: The number of NaNs in it.
        infs: The number of infinities in it.
        element: Its element at the position of the first element that is not finite, if it has one
            there.
    """

    type: str
    argument: str
    primitive: str
    source: Place
    low: float | None
    high: float | None
    nans: int
    infs: int
    element: Any


@document(names={"source": "place"}, without=("code",))
@dataclass(frozen=True)
class BadValue:
    """A NaN or an infinity in an argument, or computed by an equation from values without any.

    Attributes:
        kind: "NaN" or "infinity".
        argument: The argument that holds it, or "".
        primitive: The primitive that computes it; "" for an argument, and for a NaN in a literal or
            constant that is a result itself.
        source: The user's line of the equation, followed by the library's.
        code: The source text of that line, if its file exists.
        scope: The scopes around the equation, as `cost --by scope` groups them.
        path: The enclosing equations, the outermost first: `scan at model.py:7`.
        iteration: The iteration of each enclosing loop, from 0.
        times: The number of executions that compute one.
        type: The type of the result.
        count: The number of such elements in the result; 0 in loops of a `shard_map`, where only
            the equation and the devices are known.
        size: The number of elements of the result.
        position: The position of the first such element.
        devices: The devices that hold it, if the result is on several.
        operands: The operands of the equation.
        way: The values from which it was computed, the nearest first.
        reaches: The results of the program that are not finite because of it.
        dropped: The last equation that read it, if it reaches no result.
        leads_to: The equations that compute another NaN or infinity from it.
        forward: In the backward pass of a gradient, the forward equation whose derivative it is.
    """

    kind: str
    argument: str
    primitive: str
    source: Place
    code: str
    scope: str
    path: tuple[str, ...]
    iteration: tuple[int, ...]
    times: int
    type: str
    count: int
    size: int
    position: tuple[int, ...]
    devices: tuple[str, ...]
    operands: tuple[Operand, ...]
    way: tuple[Operand, ...]
    reaches: tuple[str, ...]
    dropped: str
    leads_to: tuple[str, ...]
    forward: str


@dataclass(frozen=True)
class NanSearch(Printed):
    """The result of a search.

    Attributes:
        name: The program's name.
        found: All NaNs and infinities, those that reach a result first, otherwise in program order.
    """

    name: str
    found: tuple[BadValue, ...]

    @property
    def first(self) -> BadValue | None:
        """The first one that reaches a result, or else the first one; None if nothing was found."""
        return self.found[0] if self.found else None


def find_nan(program: Program, args: object, device: jax.Device | None = None) -> NanSearch:
    """Find the equations that compute a NaN or an infinity from values without any.

    Values are followed to the results; a value that a `where` drops reaches none. Prints and other
    calls without results are skipped.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        device: The device to run on; by default placed by JAX and the arguments.

    Raises:
        ArgumentsError: If the number of arguments is wrong.
        StructureError: If an argument has another type.
        UnsupportedError: If the program has free named axes.
    """
    with _searched(program, args, device) as (program, origins):
        reading = _OriginDescriber(program)
        bad_values = [
            reading.bad_value(origin) for origin in origins if origin.reached or not origin.held
        ]
    return NanSearch(program.name, tuple(sorted(bad_values, key=lambda bad: not bad.reaches)))


def nan_cone(program: Program, args: object) -> tuple[ClosedJaxpr, list[Any]] | None:
    """Return a jaxpr of the equation that produces the first NaN that reaches a result.

    If it has infinite operands, the jaxpr includes the equations that produced these, back to
    finite values.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.

    Returns:
        A jaxpr of these equations with the finite values that they read as arguments, and these
        values. None if no equation produces a NaN that reaches a result.
    """
    with _searched(program, args, None) as (_, origins):
        nans = [origin for origin in origins if origin.state == NAN and origin.reached]
    if not nans or nans[0].step is None:
        return None
    return cone_of(nans[0].step, nans[0].operands)


def origin_of(program: Program, arguments: Sequence[Any], position: int, check: FiniteCheck) -> str:
    """Return the origin of the first fault in a result: `log at model.py:9`.

    Args:
        program: A `Program`.
        arguments: Its flat arguments, with the values of Refs before it was run.
        position: The position of the result.
        check: The kind of fault.
    """
    with checks_disabled(), ready_to_step(program, list(arguments), None) as (program, placed):
        search = OriginSearch(program.jaxpr, placed, program.arg_names, known=NAN | INF)
    result, states = search.results[position], NAN * check.nans | INF * check.infs
    origin = next((origin for origin in result.origins if origin.state & states), None)
    if origin is not None and origin.step is not None:
        return named(origin.step.eqn)
    if origin is not None and origin.name:
        return f"the argument '{origin.name}'"
    if result.state & states:
        return "a constant"
    return "no single equation: run one at a time, none produces it"


@contextmanager
def _searched(
    program: Program, args: object, device: jax.Device | None
) -> Iterator[tuple[Program, list[NonfiniteOrigin]]]:
    """Search a program, and yield the result in the context of its device."""
    with ready_to_step(program, args, device) as (program, arguments):
        has_mesh = mesh_in_types(program) is not None
        look = None if has_mesh else screened(program.jaxpr, arguments)
        bad, clean = look or (True, set())
        search = OriginSearch(program.jaxpr, arguments, program.arg_names, clean) if bad else None
        yield program, [] if search is None else search.origins


class _OriginDescriber:
    """Describes the origins found."""

    def __init__(self, program: Program) -> None:
        self._program, self._frames = program, frames_now(program.roots)
        self._scopes = ScopePaths(all_jaxprs(top_jaxpr(program)), program.roots)

    def bad_value(self, origin: NonfiniteOrigin) -> BadValue:
        step, value = origin.step, next((x for x in origin.results if x.state & origin.state), None)
        place = () if value is None else first_place(value)
        names = self._program.out_names
        return BadValue(
            kind="NaN" if origin.state == NAN else "infinity",
            argument=origin.name,
            primitive="" if step is None else str(step.eqn.primitive.name),
            source=self._source(step),
            code="" if step is None else self._frames.code_of(step.eqns),
            scope="" if step is None else "/".join(self._scopes.of(step.eqns)),
            path=() if step is None else self._frames.path_of(step.around),
            iteration=() if step is None else step.iterations,
            times=origin.times,
            type=type_of(_type(origin, value)),
            count=0 if value is None else count_in_state(value, origin.state),
            size=np.size(_type(origin, value)),
            position=place,
            devices=origin.devices or tuple(_devices(value, origin.state)),
            operands=tuple(self._operands(origin, place)),
            way=tuple(self._operand(*source) for source in origin.provenance),
            reaches=tuple(names[i] for i in origin.reached),
            dropped="" if origin.reached else self._named(origin.dropped),
            leads_to=tuple(self._named(other.step) for other in origin.led_to.values()),
            forward=self._forward(step),
        )

    def _source(self, step: Evaluation | None) -> Place:
        return UNKNOWN if step is None else self._frames.line_of(step.eqns)

    def _named(self, step: Evaluation | None) -> str:
        return "" if step is None else self._frames.named(step.eqns)

    def _operands(self, origin: NonfiniteOrigin, place: tuple[int, ...]) -> Iterator[Operand]:
        if origin.step is not None:
            within = place_after(origin.step, place)
            yield from (self._operand(x, within) for x in origin.operands)

    def _operand(self, value: Tracked, place: tuple[int, ...] | None) -> Operand:
        low, high, nans, infs = _range(value.data)
        return Operand(
            type_of(jax.typeof(value.data)),
            value.name,
            "" if value.step is None else str(value.step.eqn.primitive.name),
            self._source(value.step),
            low,
            high,
            nans,
            infs,
            element(value, place),
        )

    def _forward(self, step: Evaluation | None) -> str:
        """Return the forward equation of an equation in the backward pass, if any.

        Both have the same source location; among several, the one of the same primitive is used.
        """
        if step is None or not any(map(is_backward, step.eqns)):
            return ""
        if _RECOMPUTED in jaxcompat.name_stack(step.eqn).split("/"):
            return ""
        place = self._frames.of(step.eqn)
        program = jaxcompat.open_jaxpr(self._program.jaxpr)
        alike = [eqn for eqn in _forward_equations(program) if self._frames.of(eqn) == place]
        same = [eqn for eqn in alike if eqn.primitive is step.eqn.primitive]
        if not place or not alike:
            return ""
        return self._frames.named([(same or alike)[0]])


def _forward_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations outside of backward passes, at any depth."""
    for eqn in jaxpr.eqns:
        if not is_backward(eqn):
            yield eqn
            for _, inner in sub_jaxprs(eqn):
                yield from _forward_equations(jaxcompat.open_jaxpr(inner))


def _range(data: Any) -> tuple[float | None, float | None, int, int]:
    """Return the minimum, the maximum, and the numbers of NaNs and infinities of an array."""
    if isinstance(jax.typeof(data), jaxcompat.AbstractRef):
        return None, None, 0, 0
    array = plain_array(data)
    if array.dtype.kind not in "fciu" or not array.size:
        return None, None, 0, 0
    stats = statistics(array)
    return stats["min"], stats["max"], stats.get("nan", 0), stats.get("inf", 0)


def _type(origin: NonfiniteOrigin, value: Tracked | None) -> Any:
    if value is not None:
        return jax.typeof(value.data)
    assert origin.step is not None
    return origin.step.eqn.outvars[0].aval


def _devices(value: Tracked | None, state: int) -> Iterator[str]:
    """Yield the devices on which a value on several devices is not finite."""
    shards = [] if value is None else getattr(value.data, "addressable_shards", [])
    wrong = np.isnan if state == NAN else np.isinf
    if len(shards) > 1:
        yield from (str(s.device) for s in shards if wrong(plain_array(s.data)).any())


# --- finite ---------------------------------------------------------------------------------------
# Count non-finite results, which prove nothing, and find random inputs that avoid them.

#: The domains tried for arguments that lead to a NaN, in this order.
_DOMAINS: tuple[Domain, ...] = (
    "positive definite",
    POSITIVE,
    (0.0, 1.0),
    (-0.1, 0.1),
    (1.0, math.inf),
    (-math.inf, 0.0),
)

#: The number of searches for origins of NaNs.
_ORIGINS = 4


def count_nonfinite(value: Any) -> int:
    """Return the number of NaNs and infinities in a value."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0
    return int((~np.isfinite(wide(as_numpy(value)))).sum())


def is_mostly_nonfinite(count: int, size: int) -> bool:
    """Return True if `count` non-finite elements are most of a value."""
    return 2 * count > size


def unproven(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return a message for each result that is not finite in most elements."""
    messages = []
    for name, value in zip(names, values, strict=True):
        count, size = count_nonfinite(value), getattr(value, "size", 0)
        if is_mostly_nonfinite(count, size):
            messages.append(f"{name} is not finite in {count:,} of {size:,} elements")
    return messages


def finite_fill(
    program: Program,
    by_name: Mapping[str, Any],
    run: Callable[[Sequence[Any]], Sequence[Any]],
    seed: int = 0,
) -> FilledArguments:
    """Return flat arguments like `fill_arguments`, chosen for as many finite results as possible.

    While a result contains a NaN or is not finite in most elements, other domains are tried: for
    the random arguments that the responsible equation depends on, and for all random arguments
    without a known domain.

    Args:
        program: The program.
        by_name: Values by argument name; a `jax.ShapeDtypeStruct` is filled.
        run: Runs the program on flat arguments.
        seed: The seed of random values.
    """

    def attempt(domains: Mapping[str, Domain]) -> _Attempt:
        filled = fill_arguments(program, by_name, seed, domains)
        values = run(filled.arguments)
        mostly = len(unproven(program.out_names, values))
        nans = any(
            bool(np.isnan(wide(as_numpy(value))).any())
            for value in values
            if count_nonfinite(value)
        )
        return _Attempt(filled, mostly, sum(map(count_nonfinite, values)), nans)

    best = attempt({})
    for _ in range(_ORIGINS):
        if not (best.nans or best.mostly):
            break
        previous = best
        for domains in _other_domains(program, previous.filled):
            tried = attempt({**previous.filled.within, **domains})
            best = min(best, tried, key=lambda candidate: (candidate.mostly, candidate.elements))
            if not best.elements:
                return best.filled
        if best is previous:
            break
    return best.filled


@dataclass(frozen=True)
class _Attempt:
    """Arguments, and the non-finite results for them.

    Attributes:
        filled: The arguments.
        mostly: The number of results that are not finite in most elements.
        elements: The number of non-finite elements in results.
        nans: Whether any of them is a NaN.
    """

    filled: FilledArguments
    mostly: int
    elements: int
    nans: bool


def _other_domains(program: Program, filled: FilledArguments) -> Iterator[dict[str, Domain]]:
    """Yield domains of arguments that may keep results finite, most likely first."""
    avals = dict(program.arguments)
    drawn = [name for name in filled.random if jnp.issubdtype(avals[name].dtype, jnp.floating)]
    free = [name for name in drawn if name not in filled.within]
    leading = [name for name in _leading_to_nan(program, filled) if name in drawn]
    for names in (leading, free):
        square = [name for name in names if _is_square(avals[name].shape)]
        for domain in _DOMAINS:
            drawn_so = square if domain == "positive definite" else names
            if drawn_so:
                yield dict.fromkeys(drawn_so, domain)


def _leading_to_nan(program: Program, filled: FilledArguments) -> list[str]:
    """Return the arguments that lead to the first NaN or infinity in the results."""
    first = None
    with suppress(UnsupportedError):
        first = find_nan(program, filled.arguments).first
    if first is None:
        return []
    return [operand.argument for operand in (*first.operands, *first.way) if operand.argument]


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2] > 1
