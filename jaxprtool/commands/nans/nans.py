"""The search for the origins of NaNs and infinities.

    found = jaxprtool.find_nan(program, (params, batch))
    found.first.source, found.first.reaches

The program first runs as a whole (`screened`) and then, if it produces a NaN or an infinity,
equation by equation, at every depth and in every iteration (`search`). Each equation is then
computed separately, so that rounding may differ from fused equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_, or_
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.values import (
    FINITE,
    INF,
    NAN,
    Evaluation,
    NonfiniteOrigin,
    Tracked,
    count_in_state,
    element,
    first_place,
    has_state,
    may_make,
    moves_constants,
    place_after,
    state_of,
)
from jaxprtool.errors import UnsupportedError, UserFunctionError
from jaxprtool.execute.running.arrays import (
    FilledArguments,
    as_numpy,
    fill_arguments,
    plain_array,
    statistics,
    wide,
)
from jaxprtool.execute.running.run import error_line, failures_reported, ready_to_step
from jaxprtool.ir.dataflow import POSITIVE, Domain
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.equations import Contains, all_jaxprs, has_external_effect, type_of
from jaxprtool.ir.evaluation import Interpreter, bind
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.meshes import mesh_in_types
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import Call, Cond, CustomJVP, Scan, ShardMap, While, sub_jaxprs, view
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.scopes import ScopePaths, is_backward
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, Jaxpr, JaxprEqn

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


@document(optional=("position", "note"))
@dataclass(frozen=True)
class KernelStep:
    """The step of a Pallas kernel that makes a NaN or an infinity.

    Attributes:
        name: The name of the kernel.
        axes: The names of the axes of its grid.
        position: The index of the step along each of them; None if it is not known.
        ref: The name of the Ref that has the NaN first.
        note: What the Ref has, if no step has written it; or why the step is not known.
    """

    name: str
    axes: tuple[str, ...]
    position: tuple[int, ...] | None
    ref: str
    note: str = ""


@document(names={"source": "place"}, without=("code", "raises"), optional=("kernel",))
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
        kernel: In a Pallas kernel, the step of its grid.
        raises: Whether the program raised an error that depends on it.
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
    kernel: KernelStep | None = None
    raises: bool = False


@dataclass(frozen=True)
class NanSearch(Printed):
    """The result of a search.

    Attributes:
        name: The program's name.
        found: All NaNs and infinities, those that reach a result or lead to an error first,
            otherwise in program order.
        raised: The error that the program then raised: `ValueError: not finite`; or "".
    """

    name: str
    found: tuple[BadValue, ...]
    raised: str = ""

    @property
    def first(self) -> BadValue | None:
        """The first one that reaches a result, or else the first one; None if nothing was found."""
        return self.found[0] if self.found else None


def find_nan(program: Program, args: object, device: jax.Device | None = None) -> NanSearch:
    """Find the equations that compute a NaN or an infinity from values without any.

    Values are followed to the results; a value that a `where` drops reaches none. Prints and other
    calls without results are skipped. If a callback raises an error, the search ends there.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        device: The device to run on; by default placed by JAX and the arguments.

    Raises:
        ArgumentsError: If the number of arguments is wrong.
        StructureError: If an argument has another type.
        UnsupportedError: If the program has free named axes.
        UserFunctionError: If the program raises an error before any NaN or infinity.
    """
    with searched(program, args, device) as (program, origins, raised):
        reading = _OriginDescriber(program)
        bad_values = map(reading.described, origins)
        found = sorted(bad_values, key=lambda bad: not (bad.reaches or bad.raises))
    return NanSearch(program.name, tuple(found), raised)


@contextmanager
def searched(
    program: Program, args: object, device: jax.Device | None
) -> Iterator[tuple[Program, list[NonfiniteOrigin], str]]:
    """Search a program.

    Yields, in the context of its device:
        The program that was run, the origins, and the error that it raised after them, or "".
    """
    with ready_to_step(_interpreted(program, device), args, device) as (program, arguments):
        look = None
        if mesh_in_types(program) is None:
            with suppress(UserFunctionError), failures_reported(program):
                look = screened(program.jaxpr, arguments)
        bad, clean = look or (True, set())
        if not bad:
            yield program, [], ""
            return
        from jaxprtool.commands.nans.search import OriginSearch  # most programs need no search

        search = OriginSearch(program.jaxpr, arguments, program.arg_names, clean)
        raised = ""
        try:
            with failures_reported(program):
                search.run_program()
        except UserFunctionError as error:
            raised = error_line(error.__cause__ or error)
            if not search.origins:
                raise
        yield program, search.origins, raised


def _interpreted(program: Program, device: jax.Device | None) -> Program:
    """Return a program whose Pallas kernels run in interpret mode, if the device is a CPU."""
    platform = jax.default_backend() if device is None else device.platform
    if platform != "cpu" or not _has_kernel(top_jaxpr(program)):
        return program
    from jaxprtool.commands.nans.kernels import in_interpret_mode

    return program.replace(jaxpr=map_equations(program.jaxpr, in_interpret_mode))


@Contains
def _has_kernel(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "pallas_call"


class _OriginDescriber:
    """Describes the origins found."""

    def __init__(self, program: Program) -> None:
        self._program, self._frames = program, frames_now(program.roots)
        self._scopes = ScopePaths(all_jaxprs(top_jaxpr(program)), program.roots)

    def described(self, origin: NonfiniteOrigin) -> BadValue:
        """Return a NaN or an infinity, and inside of a kernel the step that makes it."""
        if origin.step is None or origin.step.eqn.primitive.name != "pallas_call":
            return self.bad_value(origin)
        from jaxprtool.commands.nans.kernels import kernel_origin

        found = kernel_origin(origin)
        if found is None:
            return self.bad_value(origin)
        axes = tuple(axis.name for axis in found.kernel.grid)
        step = KernelStep(found.kernel.name, axes, found.step, found.ref, found.note)
        return replace(self.bad_value(found.origin), kernel=step)

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
            dropped="" if origin.reached or origin.raises else self._named(origin.dropped),
            leads_to=tuple(self._named(other.step) for other in origin.led_to.values()),
            forward=self._forward(step),
            raises=origin.raises,
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


# --- screening ------------------------------------------------------------------------------------
# Screening: the program is compiled as a whole, with a flag for any NaN or infinity produced.
#
# Most programs produce neither, and need no further search. The flag may have false positives but
# no false negatives, apart from differences in XLA's computation.
#
# Few values are checked. A value is not checked if a non-finite element would make a value computed
# from it non-finite as well (`add`, `dot_general`), which is checked instead, up to operations that
# may hide it: a comparison, a `where` or a division. Infinities in constants and arguments are
# followed through operations that usually forward them, such as a mask; other values computed from
# them must be finite.

#: The maximum number of elements of values that are checked together; larger ones would
#: be kept alive.
_SMALL = 1024

#: The maximum number of values with a possible infinity in one body. Each needs its own kernels,
#: into which XLA duplicates the computation of the value.
_INFINITE = 250


class _TooMany(Exception):
    """Too many values may have an infinity."""


class _Screened:
    """A traced value.

    Attributes:
        data: The value.
        state: The non-finite elements it may have while no flag is set.
        held: Whether it is a constant, possibly moved.
    """

    def __init__(self, data: Any, state: int = FINITE, held: bool = False):
        self.data, self.state, self.held = data, state, held

    @cached_property
    def has_inf(self) -> Any:
        """Whether it has an infinity."""
        return jnp.isinf(self.data).any() if self.state & INF else False


def screened(closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[bool, set[int]] | None:
    """Return whether a program may produce a NaN or infinity, and the `id`s of loops that do not.

    Only outermost loops are included. Returns None if unknown: an argument has a NaN, the program
    has effects or a `shard_map`, or an infinity is forwarded to many values.
    """
    states = list(map(state_of, arguments))
    if any(state & NAN for state in states) or _refused(closed):
        return None
    loops: list[JaxprEqn] = []

    def flags(*data: Any) -> Any:
        whole, of_loops = flags_of(closed, data, states)
        loops[:] = [eqn for eqn, _ in of_loops]
        return whole, [flag for _, flag in of_loops]

    try:
        whole, of_loops = jax.jit(flags)(*arguments)
    except _TooMany:
        return None
    pairs = list(zip(map(id, loops), map(bool, of_loops), strict=True))
    return bool(whole), {loop for loop, _ in pairs} - {loop for loop, flag in pairs if flag}


def flags_of(
    closed: ClosedJaxpr, data: Sequence[Any], states: Sequence[int]
) -> tuple[Any, list[tuple[JaxprEqn, Any]]]:
    """Return the flag of a program for traced arguments, and those of its loops.

    Args:
        closed: The program's jaxpr.
        data: The arguments.
        states: The state of each: its possible non-finite elements.
    """
    run = _Screener()
    for value in run.run(closed, list(map(_Screened, data, states))):
        run.require(value, INF)
    return run.flag(), run.loops


@Contains
def _refused(eqn: JaxprEqn) -> bool:
    structured = view(eqn)
    if isinstance(structured, While | Cond | Call | CustomJVP):
        return False
    if isinstance(structured, Scan):
        return not isinstance(structured.length, int)
    refs = any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars))
    return refs or isinstance(structured, ShardMap) or bool(eqn.effects and eqn.outvars)


class _Screener(Interpreter):
    """Evaluates a jaxpr under tracing, and collects the values that must be finite."""

    def __init__(self) -> None:
        #: The outermost loops, each with its flag.
        self.loops: list[tuple[JaxprEqn, Any]] = []
        self._flags: list[Any] = []
        #: Values to check unless their readers are checked, by `id`, and values to check in any
        #: case.
        self._unchecked: dict[int, Any] = {}
        self._checked: list[Any] = []

    def flag(self) -> Any:
        """Return the traced flag for any NaN or infinity produced."""
        # One kernel for all values of a shape compiles faster than one for each.
        by_shape: dict[Any, list[Any]] = {}
        for x in map(jnp.asarray, (*self._unchecked.values(), *self._checked)):
            shared = x.shape if x.size <= _SMALL else len(by_shape)
            by_shape.setdefault(shared, []).append(jnp.isfinite(x))
        flags = [~reduce(and_, finite).all() for finite in by_shape.values()]
        return reduce(or_, [*flags, *self._flags], jnp.array(False))

    def require(self, value: _Screened, allowed: int) -> None:
        """Set the flag if a value has a state that is not allowed."""
        forbidden = value.state & ~allowed
        if forbidden & INF:
            self._checked.append(value.data)
        elif forbidden:
            self._flags.append(jnp.isnan(value.data).any())

    def constant(self, value: object, aval: Aval) -> _Screened:
        return _Screened(value, state_of(value), held=True)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[_Screened]:
        if has_external_effect(eqn) and not eqn.outvars:
            return []
        results = bind(eqn, [x.data for x in operands])
        state = reduce(or_, (x.state for x in operands), FINITE)
        if state and moves_constants(eqn) and all(x.held for x in operands):
            return [_Screened(x, state if has_state(x) else FINITE, held=True) for x in results]
        return [self._result(eqn, operands, state, x) for x in results]

    def _result(self, eqn: JaxprEqn, operands: list[_Screened], state: int, data: Any) -> _Screened:
        if not has_state(data) or not jnp.size(data):
            return _Screened(data)
        like = traits(eqn)
        makes = may_make(eqn) or bool(state & NAN)
        passes_through = like.keeps_finite or like.broadcasts or like.gives or like.updates
        if state & INF and passes_through:
            result = _Screened(data, INF)
            if makes:
                if len(self._flags) > 2 * _INFINITE:
                    raise _TooMany
                operand_inf = reduce(or_, (x.has_inf for x in operands), jnp.array(False))
                self._flags += [jnp.isnan(data).any(), result.has_inf & ~operand_inf]
            return result
        if like.keeps_nonfinite:
            left = [self._unchecked.pop(id(x.data), None) is not None for x in operands]
            makes |= any(left)
        if makes or state & INF:
            if like.costly:
                # XLA may combine the product of two of these into one, whose result may be finite.
                self._checked.append(data)
            else:
                self._unchecked[id(data)] = data
        return _Screened(data)

    # --- loops and branches -----------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[_Screened]:
        match structured := view(eqn):
            case Scan() | While():
                for value in operands:
                    self.require(value, INF)
                loop = self._scanned if isinstance(structured, Scan) else self._looped
                results, flag = loop(structured, operands)  # type: ignore[arg-type]
                self.loops.append((eqn, flag))
                self._flags.append(flag)
                return results
            case Cond():
                return self._branched(structured, operands)
        return super().equation(eqn, operands)

    def _inside(
        self, body: ClosedJaxpr, data: Sequence[Any], states: Sequence[int]
    ) -> tuple[list[_Screened], _Screener]:
        run = _Screener()
        return run.run(body, list(map(_Screened, data, states))), run

    def _scanned(self, scan: Scan, operands: list[_Screened]) -> tuple[list[_Screened], Any]:
        n, k = len(scan.consts), len(scan.carry)
        data, states = _data(operands), [x.state & INF for x in operands]
        stacked: list[int] = []

        def one(state: Any, rows: Any) -> Any:
            outs, run = self._inside(scan.body, [*data[:n], *state[0], *rows], states)
            for value, allowed in zip(outs, states[n : n + k], strict=False):
                run.require(value, allowed)
            stacked[:] = [value.state for value in outs[k:]]
            new = _data(outs)
            return (new[:k], state[1] | run.flag()), new[k:]

        start = data[n : n + k], jnp.array(False)
        (carry, flag), ys = jax.lax.scan(
            one, start, data[n + k :], scan.length, scan.reverse, scan.unroll
        )
        nan_flags = [
            jnp.isnan(y).any() for y, state in zip(ys, stacked, strict=True) if state & NAN
        ]
        states = [*states[n : n + k], *(state & INF for state in stacked)]
        return list(map(_Screened, (*carry, *ys), states)), reduce(or_, nan_flags, flag)

    def _looped(self, loop: While, operands: list[_Screened]) -> tuple[list[_Screened], Any]:
        c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
        data, states = _data(operands), [x.state & INF for x in operands]

        def asked(carry: Sequence[Any]) -> tuple[Any, Any]:
            outs, run = self._inside(loop.cond, [*data[:c], *carry], [*states[:c], *states[b:]])
            return outs[0].data, run.flag()

        def one(state: Any) -> Any:
            outs, run = self._inside(loop.body, [*data[c:b], *state[0]], states[c:])
            for value, allowed in zip(outs, states[b:], strict=True):
                run.require(value, allowed)
            more, flag = asked(_data(outs))
            return _data(outs), more, state[2] | run.flag() | flag

        carry, _, flag = jax.lax.while_loop(
            lambda state: state[1], one, (data[b:], *asked(data[b:]))
        )
        return list(map(_Screened, carry, states[b:])), flag

    def _branched(self, cond: Cond, operands: list[_Screened]) -> list[_Screened]:
        states = [FINITE] * len(cond.eqn.outvars)

        def branch(body: ClosedJaxpr) -> Callable[..., Any]:
            def taken(*data: Any) -> Any:
                outs, run = self._inside(body, data, [x.state for x in operands[1:]])
                states[:] = map(or_, states, (value.state for value in outs))
                return _data(outs), run.flag()

            return taken

        branches = list(map(branch, cond.branches))
        outs, flag = jax.lax.switch(operands[0].data, branches, *_data(operands[1:]))
        self._flags.append(flag)
        return list(map(_Screened, outs, states))


def _data(values: Sequence[_Screened]) -> list[Any]:
    return [value.data for value in values]


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
