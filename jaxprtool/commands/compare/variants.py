"""Variants of a program, or pieces of them, run on the same inputs; their precision and risks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from typing import Literal as OneOf

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.commands.compare.measures import Measure, Tolerance, measured
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError, described
from jaxprtool.execute.running.arrays import as_numpy
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
from jaxprtool.ir.places import Place, place_in
from jaxprtool.ir.program import Program
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
from jaxprtool.processes.calls import PythonProcess, python_process

# --- variants -------------------------------------------------------------------------------------
# Variants of a program, run on the same inputs and compared with the first of them.

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
