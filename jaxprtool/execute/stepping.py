"""Step through a program: the base interpreter, loops, shards, effects, and execution traces.

It tracks the enclosing equations and the iterations of loops, and records external calls in order.
Subclasses observe the values, and compile loops where possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from jaxprtool import jaxcompat
from jaxprtool.errors import Details
from jaxprtool.execute.running.arrays import (
    Comparison,
    ValueDifference,
    as_numpy,
    dtype_and_shape,
    is_on_host,
    value_difference,
    values_agree,
)
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import bodies, equations, has_external_effect, named
from jaxprtool.ir.equivalence import action_difference
from jaxprtool.ir.evaluation import (
    NUMERIC,
    RULES,
    Evaluation,
    Interpreter,
    LoopOperands,
    bind,
    evaluate_exactly,
    is_prescribed,
    numeric_rule,
    row_of,
    slice_number,
    without_options,
)
from jaxprtool.ir.meshes import mesh_of
from jaxprtool.ir.regions import (
    Call,
    Cond,
    CustomJVP,
    Scan,
    ShardMap,
    View,
    While,
    holds_jaxpr,
    view,
)
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Var

# --- interpreter ----------------------------------------------------------------------------------
# The base interpreter of `nans`, `watch` and `verify`, which runs a program by equation.


@dataclass(eq=False)
class Frame:
    """An equation whose bodies are running.

    Attributes:
        eqn: The equation.
        held: Its view.
        length: The number of iterations of a loop, if known.
        entered: The number of bodies entered.
    """

    eqn: JaxprEqn
    held: View
    length: int | None = None
    entered: int = 0

    @property
    def iteration(self) -> int | None:
        """The number of the iteration of a loop; for a scan, the index of the slice it reads."""
        if isinstance(self.held, Scan):
            return slice_number(self.held, self.entered - 1)  # type: ignore[no-any-return]
        return (self.entered - 1) // 2 if isinstance(self.held, While) else None

    def skip_to(self, number: int) -> None:
        """Make the iteration `number` the next one."""
        self.entered = number if isinstance(self.held, Scan) else 2 * number + 1


class SteppingInterpreter(Interpreter):
    """Steps through a program.

    Attributes:
        effects: The recorded external calls.
        frames: The running equations, outermost first.
    """

    def __init__(self, earlier: Sequence[EquationCall] = ()):
        self.effects = Effects(earlier)
        self.frames: list[Frame] = []

    @property
    def around(self) -> tuple[JaxprEqn, ...]:
        """The equations whose bodies are running, outermost first."""
        return tuple(frame.eqn for frame in self.frames)

    @property
    def iterations(self) -> tuple[int, ...]:
        """The current iteration of each running loop."""
        return tuple(n for frame in self.frames if (n := frame.iteration) is not None)

    # --- hooks ------------------------------------------------------------------------------------

    def frame(self, structured: View, operands: list[Any]) -> Frame:
        """Return the frame of an equation whose bodies are about to run."""
        return Frame(
            structured.eqn, structured, structured.length if isinstance(structured, Scan) else None
        )

    def is_compiled(self, loop: Scan | While) -> bool:
        """Return True if the iterations of a compilable loop are to be compiled."""
        return False

    def compiled_loop(self, loop: Scan | While, operands: list[Any]) -> list[Any]:
        """Return the results of a loop with compiled iterations."""
        raise NotImplementedError

    def shards(self, shard_map: ShardMap, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a `shard_map` whose shards can be inspected."""
        return self.evaluate(shard_map.eqn, operands)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        return self.effects.results(eqn, operands)

    def stack(self, rows: Sequence[Any], var: Var) -> Any:
        if not rows or not all(map(_is_numpys, rows)):
            return super().stack(rows, var)
        whole = np.stack([np.asarray(row) for row in rows])
        return jaxcompat.array_beside(whole, var.aval.weak_type, rows[0])

    def enter(self, body: ClosedJaxpr, operands: list[Any], predicate: Any = None) -> list[Any]:
        self.frames[-1].entered += 1
        return self.run(body, operands)

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        structured = view(eqn)
        if isinstance(structured, ShardMap) and can_be_checked(structured):
            return self.shards(structured, operands)
        if not isinstance(structured, Scan | While | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        self.frames.append(self.frame(structured, operands))
        if (
            isinstance(structured, Scan | While)
            and can_be_compiled(structured)
            and self.is_compiled(structured)
        ):
            results: Sequence[Any] = self.compiled_loop(structured, operands)
        else:
            results = super().equation(eqn, operands)
        self.frames.pop()
        return results


# --- iterations -----------------------------------------------------------------------------------
# Iterations of a scan or a while loop, shared by all code that compiles them.

#: Returns the results of a body for given arguments.
RunBody = Callable[[ClosedJaxpr, list[Any]], list[Any]]


class Progress(NamedTuple):
    """The progress of a loop.

    Attributes:
        number: The number of iterations run.
        carry: The carry after them.
        ys: The stacked results of a scan, if needed.
        more: Whether there is another iteration.
    """

    number: Any
    carry: list[Any]
    ys: list[Any]
    more: Any


def row_at(stack: Any, i: Any) -> Any:
    """Return the row at an index of the first axis, which may be traced."""
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def put_at(stack: Any, row: Any, i: Any) -> Any:
    """Return a stack with the row at an index replaced."""
    return jax.lax.dynamic_update_index_in_dim(stack, row, i, 0)


def run_whole(body: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
    """Return the results of a body, with its loops and calls unchanged."""
    return list(jaxcompat.jaxpr_as_fun(body)(*arguments))


def resumed_progress(
    loop: Scan | While,
    operands: LoopOperands,
    number: Any,
    carry: Sequence[Any],
    run: RunBody = run_whole,
) -> Progress:
    """Return the progress of a loop that continues from an iteration, without stacked results."""
    return Progress(number, list(carry), [], _has_more(loop, operands, number, carry, run))


def advanced(
    loop: Scan | While,
    operands: LoopOperands,
    progress: Progress,
    run: RunBody = run_whole,
    row: Callable[[Any, Any], Any] = row_at,
    put: Callable[[Any, Any, Any], Any] = put_at,
) -> Progress:
    """Return the progress of a loop after one more iteration.

    Args:
        loop: The loop.
        operands: Its operands.
        progress: Its progress before.
        run: Runs a body.
        row: Returns the slice of a scanned operand at an index.
        put: Returns a stacked result with a row at an index.
    """
    place, count = slice_number(loop, progress.number), len(progress.carry)
    rows = [row(x, place) for x in operands.xs]
    outs = run(loop.body, [*operands.consts, *progress.carry, *rows])
    number, carry = progress.number + 1, outs[:count]
    ys = [put(y, out, place) for y, out in zip(progress.ys, outs[count:], strict=False)]
    return Progress(number, carry, ys, _has_more(loop, operands, number, carry, run))


def _has_more(
    loop: Scan | While, operands: LoopOperands, number: Any, carry: Sequence[Any], run: RunBody
) -> Any:
    if isinstance(loop, Scan):
        return number < loop.length
    # A value may be a pytree with additional data; a predicate is not.
    (more,) = jax.tree.leaves(run(loop.cond, [*operands.cond_consts, *carry]))
    return more


def bodies_of(loop: Scan | While) -> tuple[ClosedJaxpr, ...]:
    """Return the body of a scan, or the body and the condition of a while loop."""
    return (loop.body,) if isinstance(loop, Scan) else (loop.body, loop.cond)


def can_be_compiled(loop: Scan | While) -> bool:
    """Return True if the iterations of a loop can be compiled and rerun."""
    if loop.eqn.effects:
        return False
    if any(mesh_of(atom.aval) is not None for atom in (*loop.eqn.invars, *loop.eqn.outvars)):
        return False
    stacked = loop.ys if isinstance(loop, Scan) else ()
    return not any(is_extended(var.aval.dtype) for var in stacked)


# --- shards ---------------------------------------------------------------------------------------
# A `shard_map` compiled as a whole, with results of its equations as additional results.


def can_be_checked(shard_map: ShardMap) -> bool:
    """Return True if a `shard_map` runs on known devices and over all axes of their mesh."""
    if not isinstance(shard_map.mesh, Mesh) or shard_map.eqn.effects:
        return False
    return shard_map.eqn.params["newly_manual_axes"] == set(shard_map.mesh.axis_names)


def on_shards(
    shard_map: ShardMap, function: Callable[..., Any], with_results: bool = True
) -> Callable[..., Any]:
    """Return a function of shards under a `shard_map` like an existing one.

    Args:
        shard_map: The `shard_map`.
        function: Returns its results, and values to stack along a leading device axis.
        with_results: If False, it returns only the latter.
    """
    everywhere = PartitionSpec(shard_map.mesh.axis_names)
    return jax.shard_map(
        function,
        mesh=shard_map.mesh,
        in_specs=tuple(shard_map.in_specs),
        out_specs=(list(shard_map.out_specs), everywhere) if with_results else everywhere,
        check_vma=shard_map.eqn.params["check_vma"],
    )


# --- effects --------------------------------------------------------------------------------------
# External calls of a program, recorded while it is stepped through.
#
# A call without results (a print, a debug callback, a check) is recorded but not executed. A call
# with results is executed, or replaced by its results in an earlier run.


@dataclass(eq=False)
class EquationCall:
    """One call: the equation, its operands and its results."""

    eqn: JaxprEqn
    operands: list[Any]
    results: Sequence[object] = ()

    def difference(
        self, other: EquationCall, agree: Callable[[int], Comparison] = lambda i: values_agree
    ) -> ValueDifference | None:
        """Return the difference from another call, or None; `agree(i)` compares operand `i`."""
        if self.eqn.primitive.name != other.eqn.primitive.name:
            return ValueDifference(f"is {named(self.eqn)} before, {named(other.eqn)} after")
        other_action = _action_difference(self.eqn, other.eqn)
        if other_action is not None:
            return ValueDifference(f"({named(other.eqn)}) does something else: {other_action}")
        operands, others = (jaxcompat.numbered_errors(e.eqn, e.operands) for e in (self, other))
        different = f"({named(other.eqn)}) receives different values: "
        if len(operands) != len(others):
            return ValueDifference(f"{different}{len(operands)} values before, {len(others)} after")
        for i, (a, b) in enumerate(zip(operands, others, strict=True)):
            fault = value_difference(f"value {i}", a, b, agree(i))
            if fault is not None:
                details = [("operand" if k == "result" else k, v) for k, v in fault.details]
                return ValueDifference(f"{different}{fault}", details)
        return None


def _action_difference(before: JaxprEqn, after: JaxprEqn) -> str | None:
    """Return how two calls differ in what they do; those in bodies are compared in order."""
    fault = action_difference(before, after)
    if fault is not None:
        return fault
    inside = (
        [eqn for _, body in bodies(e) for eqn in equations(body) if has_external_effect(eqn)]
        for e in (before, after)
    )
    for old, new in zip_longest(*inside):
        if old is None or new is None:
            return f"{named(old or new)} in it is {'removed' if new is None else 'added'}"
        fault = action_difference(old, new)
        if fault is not None:
            return f"{named(new)} in it, {fault}"
    return None


@dataclass
class Effects:
    """The calls of one run, in order; `earlier` are those of a previous run."""

    earlier: Sequence[EquationCall] = ()
    events: list[EquationCall] = field(default_factory=list)

    def results(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Return the results of an equation that may have an external effect."""
        run = self.call if has_external_effect(eqn) else _bind_quickly
        return list(run(eqn, operands))

    def call(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[object]:
        """Return the results of an equation for which `has_external_effect` holds."""
        number, event = len(self.events), EquationCall(eqn, operands)
        self.events.append(event)
        whole = holds_jaxpr(eqn.params.values())
        if not eqn.outvars and not whole:
            return []
        previous = self.earlier[number] if number < len(self.earlier) else None
        if previous is not None and not whole and previous.difference(event) is None:
            event.results = previous.results
        else:
            event.results = bind(eqn, operands)
        return event.results


# --- numpy ----------------------------------------------------------------------------------------
# Equations that NumPy computes as a CPU does. XLA takes tens of milliseconds for a kernel.


def _quotient(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    divide = numeric_rule("f", np.divide, any_nan=True)
    if x.shape == y.shape:
        return divide(eqn, x, y)
    if y.shape or x.size == 1:
        return None
    # XLA multiplies by the reciprocal of a scalar.
    multiply = numeric_rule("f", np.multiply, any_nan=True)
    reciprocal = divide(eqn, np.ones_like(y), y)
    return None if reciprocal is None else multiply(eqn, x, reciprocal)


def _power(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    return numeric_rule("iuf", np.square, any_nan=True)(eqn, x) if eqn.params["y"] == 2 else None


def _greatest(function: Callable[..., Any]) -> Evaluation:
    """Return a rule for a maximum or a minimum, which of 0 and -0 may be either."""
    compute = numeric_rule("biuf", function, any_nan=True)

    def rule(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray | None:
        floats = [x for x in operands if x.dtype.kind == "f"]
        if any((np.signbit(x) & (x == 0)).any() for x in floats):
            return None
        return compute(eqn, *operands)

    return rule


def _reduced(function: np.ufunc) -> Evaluation:
    def rule(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
        axes = tuple(eqn.params["axes"])
        if not x.size:
            return None
        return _greatest(lambda x: function.reduce(x, axes))(eqn, x)

    return rule


def _to_dtype(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    target = eqn.outvars[0].aval.dtype
    if x.dtype.kind == "f" and x.dtype.itemsize in (4, 8) and target in (x.dtype, bool):
        return x.astype(target) if is_prescribed(x, any_nan=True) else None
    return RULES["convert_element_type"](eqn, x)


def _starts(eqn: JaxprEqn, x: np.ndarray, size: Sequence[int], at: Sequence[Any]) -> Any:
    """Return the slice of a size at a place, moved so that it is inside of an array."""
    bounds = zip(map(int, at), x.shape, size, strict=True)
    starts = [min(max(start, 0), n - k) for start, n, k in bounds]
    return tuple(slice(start, start + k) for start, k in zip(starts, size, strict=True))


def _dynamic_slice(eqn: JaxprEqn, x: np.ndarray, *at: np.ndarray) -> np.ndarray | None:
    return x[_starts(eqn, x, eqn.params["slice_sizes"], at)]


def _dynamic_update(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray, *at: np.ndarray) -> np.ndarray:
    result = x.copy()
    result[_starts(eqn, x, y.shape, at)] = y
    return result


_CPU_RULES: dict[str, Evaluation] = {
    **{name: numeric_rule(*row, any_nan=True) for name, row in NUMERIC.items()},
    "add_any": numeric_rule("iuf", np.add, any_nan=True),
    "div": _quotient,
    "square": numeric_rule("iuf", np.square, any_nan=True),
    "integer_pow": _power,
    "sqrt": numeric_rule("f", np.sqrt, any_nan=True),
    "is_finite": numeric_rule("f", np.isfinite, any_nan=True),
    "max": _greatest(np.maximum),
    "min": _greatest(np.minimum),
    "reduce_max": _reduced(np.maximum),
    "reduce_min": _reduced(np.minimum),
    "convert_element_type": _to_dtype,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
}

#: Rules by primitive for equations that a CPU computes on their own. Only a NaN's bits may differ.
CPU_RULES = RULES | {name: without_options(rule) for name, rule in _CPU_RULES.items()}


#: The most elements of a value that NumPy computes.
_NUMPY_SIZE = 1 << 16


def _bind_quickly(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation as `bind` does, by NumPy if its bits are the same.

    XLA compiles a kernel for each equation of other shapes, which takes tens of milliseconds. The
    bits of a NaN may differ.
    """
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    is_plain = eqn.primitive.name in CPU_RULES and all(map(_is_small, (*eqn.invars, *eqn.outvars)))
    if not is_plain or not all(map(_is_on_cpu, arrays)):
        return bind(eqn, operands)
    pairs, weak = zip(operands, eqn.invars, strict=True), eqn.outvars[0].aval.weak_type
    values = [np.asarray(x, atom.aval.dtype) for x, atom in pairs]
    # The result of literals is on the default device, whichever this is.
    result = evaluate_exactly(eqn, values, CPU_RULES if arrays else RULES)
    if result is None:
        return bind(eqn, operands)
    if not arrays:
        return [jaxcompat.weakly_typed(result) if weak else jax.device_put(result)]
    device = next((x for x in arrays if x.committed), arrays[0])
    return [jaxcompat.array_beside(result, weak, device)]


def _is_on_cpu(array: jax.Array) -> bool:
    return type(array.sharding) is SingleDeviceSharding and is_on_host(array)


def row_quickly(stack: Any, i: int) -> Any:
    """Return the slice at one index of the first axis, by NumPy if possible."""
    if not _is_numpys(stack):
        return row_of(stack, i)
    return jaxcompat.array_beside(np.array(np.asarray(stack)[i]), stack.aval.weak_type, stack)


def _is_numpys(value: Any) -> bool:
    """Return True for a small array of a CPU."""
    return isinstance(value, jax.Array) and _is_small(value) and _is_on_cpu(value)


def _is_small(atom: Atom | jax.Array) -> bool:
    """Return True for an array of few numbers that names no mesh."""
    aval = atom.aval
    is_plain = not is_extended(aval.dtype) and mesh_of(aval) is None
    return is_plain and math.prod(aval.shape) <= _NUMPY_SIZE


def effects_differ(
    before: Sequence[EquationCall],
    after: Sequence[EquationCall],
    agree: Callable[[int, int], Comparison],
) -> ValueDifference | None:
    """Return the first call in which two runs differ; None if there is none.

    Args:
        before: The calls of the first run.
        after: Those of the second run.
        agree: Returns the comparison of an operand, by the position of its call and its own.
    """
    for number, (old, new) in enumerate(zip_longest(before, after), 1):
        if new is None:
            of = f"effect {number} of {len(before)}"
            return ValueDifference(f"{named(old.eqn)} is no longer called ({of})")
        if old is None:
            message = f"{named(new.eqn)} is called, but was not before (effect {number})"
            return ValueDifference(message)
        fault = old.difference(new, partial(agree, number - 1))
        if fault is not None:
            return ValueDifference(f"effect {number} {fault}", fault.details)
    return None


# --- execution trace ------------------------------------------------------------------------------
# Find the first equation in which two programs differ, by comparing their execution traces.
#
# Both programs are evaluated one equation at a time. Their traces record the operands and results
# of each equation, at every depth and in every iteration. A value has a *match* in the other trace
# if an equation with the same primitive and source line, or the same line, or any equation,
# returned an equal value up to the tolerance of its dtype. (Booleans and scalars easily match by
# chance: for them only values of the same line count, if that line returned any.)
#
# Blame the first equation whose result has no match in the other trace and reaches a wrong result
# only through values without a match: all of its operands have one. A correct rewrite may also
# produce values without a match, but values computed from them match again before they reach a
# result.


@dataclass(eq=False)
class Execution:
    """One execution of an equation: its results and the executions on which they depend."""

    number: int
    eqn: JaxprEqn
    needs: list[Execution]
    results: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class TracedValue:
    """A value, and the executions that computed it."""

    data: Any
    made: tuple[Execution, ...] = ()


class ExecutionTrace(Interpreter):
    """Evaluates a program and records every execution, in order."""

    def __init__(self, closed: ClosedJaxpr, args: Sequence[Any], effects: Effects):
        self.effects = effects
        self.executions: list[Execution] = []
        #: Arguments and constants.
        self.inputs: list[Any] = list(args)
        self._predicates: list[TracedValue] = []
        self._states: dict[int, TracedValue] = {}
        self.results = self.run(closed, [TracedValue(x) for x in args])

    def constant(self, value: Any, aval: Aval) -> TracedValue:
        # A literal is a Python number with a dtype.
        self.inputs.append(value if hasattr(value, "shape") else jnp.asarray(value))
        return TracedValue(value)

    def concrete(self, value: TracedValue) -> Any:
        return value.data

    def row(self, value: TracedValue, i: int) -> TracedValue:
        return TracedValue(row_quickly(value.data, i), value.made)

    def stack(self, rows: Sequence[TracedValue], var: Var) -> TracedValue:
        executions = dict.fromkeys(execution for row in rows for execution in row.made)
        return TracedValue(super().stack([row.data for row in rows], var), tuple(executions))

    def enter(
        self, body: ClosedJaxpr, operands: list[Any], predicate: TracedValue | None = None
    ) -> list[Any]:
        if predicate is None:
            return self.run(body, operands)
        self._predicates.append(predicate)
        results = self.run(body, operands)
        self._predicates.pop()
        return results

    def selected(self, values: list[Any], predicate: TracedValue) -> list[Any]:
        return [TracedValue(value.data, (*value.made, *predicate.made)) for value in values]

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[TracedValue]:
        # The current value of a ref comes from the equation that wrote it last.
        states = [self._states[id(x.data)] for x in operands if id(x.data) in self._states]
        sources = [*operands, *states, *self._predicates]
        needs = list(dict.fromkeys(execution for value in sources for execution in value.made))
        execution = Execution(len(self.executions), eqn, needs)
        self.executions.append(execution)
        values = [x.data for x in operands]
        results = self.effects.results(eqn, values)
        for x in (*values, *results):
            if isinstance(jax.typeof(x), jaxcompat.AbstractRef):
                contents = x[...]
                self._states[id(x)] = TracedValue(contents, (execution,))
                execution.results.append(contents)
        execution.results += [x for x in results if _is_array(x)]
        return [TracedValue(x, (execution,)) for x in results]


def _is_array(x: object) -> bool:
    return not isinstance(jax.typeof(x), jaxcompat.AbstractRef) and hasattr(x, "dtype")


class ValueIndex:
    """The values of an execution trace, to look up matches in."""

    def __init__(self, trace: ExecutionTrace):
        self._groups: dict[Hashable, _TypedArrays] = {}
        for value in trace.inputs:
            if _is_array(value):
                self._put([(dtype_and_shape(value),)], value)
        for execution in trace.executions:
            for value in execution.results:
                self._put(_keys(execution.eqn, value), value)

    def _put(self, keys: Iterable[Hashable], value: Any) -> None:
        array = as_numpy(value)
        for key in keys:
            self._groups.setdefault(key, _TypedArrays()).add(array)

    def has(self, value: Any, eqn: JaxprEqn) -> bool:
        """Return True if a value returned by an equation of another trace has a match here."""
        array = as_numpy(value)
        groups = [g for g in map(self._groups.get, _keys(eqn, value)) if g is not None]
        if array.size <= 1 or array.dtype == bool:
            groups = groups[:1]
        return any(group.has(array) for group in groups)

    def misses(self, execution: Execution) -> bool:
        """Return True if some result of an execution in another trace has no match here."""
        return not all(self.has(value, execution.eqn) for value in execution.results)


def _keys(eqn: JaxprEqn, value: Any) -> list[Hashable]:
    """Return the keys of the groups of a value, narrowest first."""
    line, type_text = (jaxcompat.user_frame(eqn) or ())[:2], dtype_and_shape(value)
    return [(eqn.primitive.name, line, type_text), (line, type_text), (type_text,)]


class _TypedArrays:
    """Arrays of one type."""

    def __init__(self) -> None:
        self._exact: dict[bytes, np.ndarray] = {}

    def add(self, array: np.ndarray) -> None:
        self._exact[array.tobytes()] = array

    def has(self, array: np.ndarray) -> bool:
        if array.tobytes() in self._exact:
            return True
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return False
        return any(values_agree(other, array)[0].all() for other in self._exact.values())


def first_difference(
    before: ExecutionTrace, after: ExecutionTrace, wrong: Sequence[int]
) -> Details:
    """Return the first equations of both traces that lead to the differing results `wrong`."""
    new = _first(after, ValueIndex(before), wrong)
    old = _first(before, ValueIndex(after), wrong)
    details = []
    if new is not None:
        details.append(("first equation", f"{_shown(new)}, from the same values as before"))
    if old is not None:
        label = "instead of" if new is not None else "removed"
        details.append((label, _shown(old)))
    same = "every equation computes the same values as before, but different values are passed on"
    return details or [("equations", same)]


def _first(trace: ExecutionTrace, index: ValueIndex, wrong: Sequence[int]) -> Execution | None:
    todo = [execution for i in wrong for execution in trace.results[i].made]
    seen: set[Execution] = set()
    blamed: list[Execution] = []
    while todo:
        execution = todo.pop()
        if execution in seen:
            continue
        seen.add(execution)
        if index.misses(execution):
            blamed.append(execution)
            todo += execution.needs
    return min(blamed, key=lambda e: e.number, default=None)


def _shown(execution: Execution) -> str:
    values = ", ".join(_short(value) for value in execution.results)
    return f"{named(execution.eqn)}, giving {values}"


def _short(value: Any) -> str:
    array = as_numpy(value)
    some = ", ".join(map(str, array.ravel()[:4])) + (", …" if array.size > 4 else "")
    return f"{dtype_and_shape(value)} {f'[{some}]' if array.ndim else some}"
