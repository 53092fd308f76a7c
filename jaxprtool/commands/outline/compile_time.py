"""The time that XLA takes to compile a program: estimated, by stage, and with other pipelines.

XLA for the CPU spends most of it on kernels: it generates machine code for each of them, but only
once for kernels that are equal. So twelve equal layers take little more than one, while the steps
of an unrolled loop over the rows of an array take their full time each, because the position of the
row is a constant of the kernel. The estimate counts the different kernels of the model in
`kernels`, with the equations that XLA recomputes in them.

It was compared with XLA for networks: programs of matrix products and convolutions with short
elementwise chains between them (`docs/benchmarks.md`). Elsewhere it was wrong by factors of 0.04 to
20, for example in gradients of stencils and of Runge-Kutta steps, and so there is no estimate.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import KernelNode, Kernels, UnknownSize
from jaxprtool.analysis.stats import count_equations
from jaxprtool.commands.memory.estimate import temporary_memory
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.execute.running import run
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.documents import document
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.equivalence import Unkeyable, parameters_key
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.hlo.module import HloModule, compiled_module
from jaxprtool.ir.keys import atom_key
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import Scan, copies_of_body
from jaxprtool.ir.repetition import SourceRange
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, Literal
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.passes import Pipeline, Step
from jaxprtool.passes.loops.outline import Outline
from jaxprtool.passes.loops.roll import Roll

# --- compile time ---------------------------------------------------------------------------------
# An estimate of the time that XLA takes to compile a program.

#: CPU seconds for a kernel, for an equation in a kernel, and for an equation of the program, as
#: measured on one machine. Only ratios of estimates are of use on another.
KERNEL, EQUATION, PASSES = 0.013, 0.002, 0.000025

#: The equations for each coefficient of a polynomial, which has no body: a product and a sum.
_POLYNOMIAL = 2

#: CPU seconds for a draw of random bits outside of marked bodies, in JAX releases where it is slow.
DRAW = 0.2

#: CPU seconds for each product with a vector, which XLA compiles one by one, also equal ones.
VECTOR = 0.01

#: XLA does not inline more equations than this into one kernel.
_LARGEST = 60

#: The programs for which the estimate was compared with XLA: they have at most this many equations
#: for each product, this share of kernels with this many equations, and so many products with
#: vectors for each kernel.
_PER_PRODUCT, _LARGE_SHARE, _LARGE, _VECTORS = 30, 0.05, 30, 3


#: The key of a kernel, and the numbers of the nodes in it.
_Inlined: TypeAlias = tuple[Hashable, frozenset[int]]


@dataclass(frozen=True)
class CompileEstimate:
    """The equations and kernels that XLA compiles, and an estimate of the time.

    Attributes:
        equations: The number of equations, those of each body once.
        kernels: The number of kernels of these.
        different: The number of different kernels.
        seconds: The CPU time to compile them; None for a kind of program for which the estimate was
            not compared with XLA.
    """

    equations: int
    kernels: int
    different: int
    seconds: float | None


@document(flat=("estimate",), optional=("cpu_seconds",))
@dataclass(frozen=True)
class CompileWay:
    """A pipeline, and the cost of compiling the program that it returns.

    Attributes:
        pipeline: The pipeline; empty for the program as traced.
        estimate: The estimate of what XLA compiles.
        memory: The estimated temporary memory, in bytes.
        cpu_seconds: The measured CPU time of XLA, if the program was compiled.
    """

    pipeline: str
    estimate: CompileEstimate
    memory: int | None
    cpu_seconds: float | None = None


@document(names={"source": "place"})
@dataclass(frozen=True)
class UnrolledLoop:
    """A loop whose body XLA compiles several times because of its option `unroll`.

    Attributes:
        source: The user's line; "" if unknown.
        unroll: The option; the number of iterations for `unroll=True`.
        copies: How often XLA compiles the body.
        equations: The number of equations of the body.
    """

    source: Place
    unroll: int
    copies: int
    equations: int


def unrolled_loops(program: Program) -> list[UnrolledLoop]:
    """Return the loops of a program that `unroll` makes XLA compile several times."""
    loops, frames = list[UnrolledLoop](), frames_now(program.roots)
    for eqn in dict.fromkeys(equations(top_jaxpr(program))):
        copies = copies_of_body(eqn)
        if copies > 1:
            location = frames.location_of((eqn,))
            line = UNKNOWN if location is None else frames.text(location.frame)
            size = sum(count_equations(body) for _, body in bodies(eqn)) or _POLYNOMIAL
            loops.append(UnrolledLoop(line, eqn.params["unroll"], copies, size))
    return loops


def compile_estimate(
    program: Program,
    like: CompileEstimate | None = None,
    kernels: Mapping[Jaxpr, Kernels] = MappingProxyType({}),
) -> CompileEstimate | None:
    """Estimate the cost of compiling a program. Return None if sizes are symbolic.

    Args:
        program: The program.
        like: The estimate of the program that this one was made of by `outline` or `roll`, which
            decides if there is an estimate of the time.
        kernels: The kernels of its bodies, as far as they are known.
    """
    counts = _Counts(kernels)
    try:
        counts.visit(top_jaxpr(program))
    except UnknownSize:
        return None
    compared = counts.was_compared() if like is None else like.seconds is not None
    seconds = counts.seconds if compared else None
    return CompileEstimate(counts.equations, counts.kernels, len(counts.seen), seconds)


@dataclass
class _Counts:
    """The bodies of a program that have been visited, and their kernels."""

    known: Mapping[Jaxpr, Kernels]
    equations: int = 0
    kernels: int = 0
    seconds: float = 0.0
    seen: set[Hashable] = field(default_factory=set)
    bodies: set[Jaxpr] = field(default_factory=set)
    products: int = 0
    vectors: int = 0
    large: int = 0
    unrolled: bool = False

    def was_compared(self) -> bool:
        """Return True if the estimate of such programs was compared with XLA."""
        different = len(self.seen)
        return (
            not self.unrolled
            and self.equations <= _PER_PRODUCT * self.products
            and self.large <= _LARGE_SHARE * different
            and self.vectors <= _VECTORS * different
        )

    def visit(self, body: Jaxpr, marked: bool = False) -> None:
        """Count the kernels of a body, marked to be shared or not, and those of bodies in it."""
        if body in self.bodies:
            return
        self.bodies.add(body)
        kernels = self.known.get(body) or Kernels(body)
        kernel_numbers = set(kernels.kernels())
        used = {value for node in kernels.nodes for value in node.reads}.union(kernels.results)
        inlined: dict[int, _Inlined] = {}
        for number, node in enumerate(kernels.nodes):
            if node.kind == "equation":
                self._add_equation(node, marked)
            key, inside = _kernel(node, number, inlined)
            again = node.kind == "equation" and node.fusible and kernels.reads_one(node)
            for out in node.makes:
                if not kernels.written[out]:
                    inlined[out] = key, inside
                elif again and kernels.inlined[out]:
                    inlined[out] = key, frozenset([number])
            if number in kernel_numbers and node.held is None:
                self._add(node, used, key, min(len(inside), _LARGEST))

    def _add_equation(self, node: KernelNode, marked: bool) -> None:
        self.equations += 1
        self.seconds += PASSES
        for inner in node.held.jaxprs if node.held is not None else ():
            self.visit(inner, marked or jaxcompat.mark_of(node.eqn) != "plain")
        if _is_draw(node) and not marked and jaxcompat.compiles_draws_slowly():
            self.seconds += DRAW
        self.unrolled |= copies_of_body(node.eqn) > 1
        if _is_product(node.eqn):
            self.products += 1
            if min(len(v.aval.shape) for v in node.eqn.invars) < 2:
                self.vectors += 1
                self.seconds += VECTOR
        if node.eqn.primitive.name == "scan":
            self._add_rows(Scan.of(node.eqn))

    def _add(self, node: KernelNode, used: Set[int], key: Hashable, size: int) -> None:
        """Count a kernel; one of a library, such as a product, is not compiled."""
        like = traits(node.eqn)
        self.kernels += 1
        if node.kind == "equation" and like.expensive and like.bilinear:
            return
        for result, value in enumerate(node.makes):
            if value in used:  # each of `split` and `unstack` is at another position
                self._add_different((key, result), size)

    def _add_rows(self, scan: Scan) -> None:
        """Count the kernels by which a loop reads the rows of an array, and writes those of one."""
        for x in scan.xs:
            self._add_different(("row", x.aval), 1)
        for number, y in enumerate(scan.ys):
            self._add_different(("stack", y.aval), 1)
            self._add_different(("write", id(scan.eqn), number), 1)

    def _add_different(self, key: Hashable, size: int) -> None:
        if key not in self.seen:
            self.seen.add(key)
            self.large += size >= _LARGE
            self.seconds += KERNEL + EQUATION * size


def _is_product(eqn: JaxprEqn) -> bool:
    """Return True for a product or a convolution, but not for an outer product, which is fused."""
    if not (traits(eqn).expensive and traits(eqn).narrows):
        return False
    numbers = eqn.params.get("dimension_numbers")
    if not isinstance(numbers, tuple) or len(numbers) != 2:  # a convolution
        return True
    (contracted, _), _ = numbers
    return prod(eqn.invars[0].aval.shape[dimension] for dimension in contracted) > 1


def _is_draw(node: KernelNode) -> bool:
    like = traits(node.eqn)
    return like.draws and like.expensive


def _kernel(node: KernelNode, number: int, inlined: dict[int, _Inlined]) -> _Inlined:
    """Return a key, equal for equal kernels, and the numbers of the nodes in the kernel."""
    inside, operands = {number}, list[Hashable]()
    atoms = node.eqn.invars if node.kind == "equation" else [None] * len(node.places)
    for atom, value in zip(atoms, node.places, strict=True):
        if value is None:
            operands.append(atom_key(atom) if type(atom) is Literal else None)
        elif node.fusible and value in inlined:
            key, more = inlined[value]
            operands.append(key)
            inside |= more
        else:
            operands.append(node.places.index(value))
    types = [v.aval for v in (*node.eqn.invars, *node.eqn.outvars)]
    try:
        parameters, _ = parameters_key(node.eqn)
    except Unkeyable:
        parameters = id(node.eqn)
    whole = node.kind, node.eqn.primitive.name, parameters, *operands, *types
    return hash(whole), frozenset(islice(inside, _LARGEST))


# --- compile ways ---------------------------------------------------------------------------------
# Find pipelines that make a program compile faster, by trying them.
#
# `outline` and `roll` are inserted before the first transformation of a pipeline, such as `grad`,
# or after its last pass. Each pipeline is run, and the compile time of its result is estimated, or
# its kernels are counted.

#: A pipeline helps if it lowers the estimated compile time by this factor, and by this many seconds
#: of CPU time. Without an estimate, the number of different kernels counts, of programs of this
#: many equations.
FACTOR, LEAST_SECONDS, LEAST_EQUATIONS = 1.25, 0.3, 100


def compile_ways(
    traced: Program,
    pipeline: Pipeline,
    result: Program,
    outlining: Outline,
    outlined: Program | None = None,
) -> list[tuple[CompileWay, Program]]:
    """Return the pipelines that shorten compilation, after the given one.

    Args:
        traced: The program as traced.
        pipeline: The given pipeline.
        result: The program that it returns.
        outlining: The pass `outline`, with the user's options.
        outlined: What it returns for `result`, if that is known.

    Returns:
        The given pipeline and its program; then the pipelines that help, the fastest first, each
        with the program that it returns. Without an estimate of the time, those with the fewest
        kernels are first. Empty if sizes are symbolic.
    """
    original = _given(pipeline, result)
    if original is None:
        return []
    ways: list[tuple[CompileWay, Program]] = []
    others = _others(pipeline, outlining) if _is_slow(original.estimate) else ()
    for other, is_last in others:
        try:
            if not is_last:
                program = other(traced)
            elif other.steps[-1].transform is outlining and outlined is not None:
                program = outlined
            else:
                program = Pipeline(other.steps[-1:])(result)
        except JaxprToolError:
            continue  # a pass does not support the result of roll or outline
        if not isinstance(program, Program) or program.jaxpr is result.jaxpr:
            continue
        estimate = compile_estimate(program, original.estimate)
        if estimate is not None and _work(estimate) * FACTOR < _work(original.estimate):
            way = CompileWay(str(other), estimate, temporary_memory(program))
            ways.append((way, program))
    ways.sort(key=lambda pair: _order(pair[0].estimate))
    return [(original, result), *ways]


def _given(pipeline: Pipeline, result: Program) -> CompileWay | None:
    """Return the given pipeline with both estimates, which share the kernels of its result."""
    kernels: dict[Jaxpr, Kernels] = {}
    memory = temporary_memory(result, kernels=kernels)
    estimate = compile_estimate(result, kernels=kernels)
    return None if estimate is None else CompileWay(str(pipeline), estimate, memory)


def without_unroll(program: Program) -> Program:
    """Return a program whose loops are compiled as loops, whatever their option `unroll` says."""

    def loop(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if copies_of_body(eqn) == 1:
            return None
        return [eqn.replace(params={**eqn.params, "unroll": 1})]

    return program.replace(jaxpr=map_equations(program.jaxpr, loop))


def _is_slow(estimate: CompileEstimate) -> bool:
    if estimate.seconds is None:
        return estimate.equations >= LEAST_EQUATIONS
    return estimate.seconds > LEAST_SECONDS


def _work(estimate: CompileEstimate) -> float:
    """Return the seconds to compile a program, or without an estimate the different kernels."""
    return estimate.different if estimate.seconds is None else estimate.seconds


def _order(estimate: CompileEstimate) -> float:
    return estimate.kernels if estimate.seconds is None else estimate.seconds


def _others(pipeline: Pipeline, outlining: Outline) -> Iterator[tuple[Pipeline, bool]]:
    """Yield the pipelines with `roll` or `outline` before transformations, and at the end.

    The second value is True if it is at the end.
    """
    steps = tuple(pipeline.steps)
    preserve = [transform.preserves for step in steps for transform in Pipeline((step,)).passes()]
    for inserted in (Step(Roll()), Step(outlining)):
        if not all(preserve):
            yield Pipeline((inserted, *steps)), False
        yield Pipeline((*steps, inserted)), True


# --- compile profile ------------------------------------------------------------------------------
# The compile time of a program by stage, pass of XLA, and body of the user's code.
#
# XLA reports its work to JAX's profiler: passes by name, and each kernel by the name of its
# operation, whose call stack is in the compiled module. XLA for the CPU does so in JAX 0.10 and
# 0.12. For other backends, only the stages of JAX are known. The machine code of all kernels is
# generated together, so that time is divided among them in proportion to the rest of their compile
# time.

#: The maximum number of passes, and of bodies.
MOST = 10


@dataclass(frozen=True)
class Stage:
    """A stage of XLA, or one of its passes.

    Attributes:
        name: Its name.
        seconds: The wall time that it took.
    """

    name: str
    seconds: float


@document(names={"source": "lines"})
@dataclass(frozen=True)
class CompiledBody:
    """The kernels of one function of the user or of a library.

    Attributes:
        name: The name of the function; empty for kernels without a source, which XLA adds.
        kernels: The number of its kernels that XLA compiled; equal ones are compiled once.
        seconds: The time to compile them, summed over threads.
        share: The fraction of the time of all kernels.
        source: The lines of the operations.
    """

    name: str
    kernels: int
    seconds: float
    share: float
    source: SourceRange | None


@dataclass(frozen=True)
class CompileProfile:
    """The compile time of a program. Times are in seconds.

    Attributes:
        trace: The time of tracing, and of passes of jaxprtool.
        lower: The time of lowering to StableHLO.
        compile: The time of XLA.
        compile_cpu: The CPU time of all threads of XLA.
        stages: The stages of XLA, the longest first; empty if the backend reports none.
        passes: The longest passes of XLA on the whole program, each without nested passes.
        bodies: The most expensive bodies, the most expensive first.
    """

    trace: float
    lower: float
    compile: float
    compile_cpu: float
    stages: tuple[Stage, ...]
    passes: tuple[Stage, ...]
    bodies: tuple[CompiledBody, ...]


def compile_profile(
    program: Program, arguments: Sequence[object], device: jax.Device | None, trace_time: float
) -> CompileProfile:
    """Compile a program under JAX's profiler, without JAX's persistent cache.

    Args:
        program: The program.
        arguments: Its flat arguments.
        device: The device to compile for.
        trace_time: The seconds of tracing, which the result includes.

    Raises:
        UnsupportedError: If the program cannot be compiled, or not as a whole.
    """
    program = with_contents(program)
    ready = run.arguments_placed(program, arguments, device)
    with compiled_afresh(), ready as (there, _), _events() as threads:
        compilation = run.compiled_program(program, there, lambda doing: None)
    if compilation.lower is None or compilation.compile is None or compilation.compile_cpu is None:
        raise UnsupportedError("nothing is compiled as a whole under jax_disable_jit")
    main = next((thread for thread in threads if any(e.name == _WHOLE for e in thread)), [])
    kernels: list[tuple[str, float]] = []
    for thread in threads:
        kernels += _kernels(thread)
    module = compiled_module(compilation.executable)
    return CompileProfile(
        trace_time,
        compilation.lower,
        compilation.compile,
        compilation.compile_cpu,
        _stages(main, compilation.compile),
        _passes(main),
        _bodies(kernels, module, frames_now(program.roots)),
    )


def compile_seconds(
    program: Program, arguments: Sequence[object], device: jax.Device | None
) -> float:
    """Return the CPU time of XLA to compile a program, in seconds."""
    program = with_contents(program)
    with compiled_afresh(), run.arguments_placed(program, arguments, device) as (there, _):
        compilation = run.compiled_program(program, there, lambda doing: None)
    assert compilation.compile_cpu is not None
    return compilation.compile_cpu


# --- events -----------------------------------------------------------------------------------


class _ThreadEvent(NamedTuple):
    """An event of a thread: nanoseconds, and the kernel's name if it is the compilation of one."""

    start: float
    end: float
    name: str
    kernel: str = ""

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


#: The events of XLA for the CPU: the whole compilation, a task of a thread, a kernel in a task.
_WHOLE, _TASK, _KERNEL = (
    "CpuCompiler::RunBackend",
    "TaskDispatcher::dispatch",
    "FusionCompiler::Compile",
)

#: The stages by the names of their events, or the beginnings of these.
_STAGES = {
    "HLO passes": "passes on the whole program",
    "ThunkEmitter::EmitEntryComputation": "kernels written",
    "Codegen": "kernels compiled",
}


@contextmanager
def _events() -> Iterator[list[list[_ThreadEvent]]]:
    """Yield a list that holds the events of each thread after the `with` block."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    threads: list[list[_ThreadEvent]] = []
    with tempfile.TemporaryDirectory(prefix="jaxprtool-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield threads
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's types have no __module__
        for plane in data.planes:
            threads += [list(map(_event, line.events)) for line in plane.lines]


def _event(event: jax.profiler.ProfileEvent) -> _ThreadEvent:
    name, start = event.name, event.start_ns
    kernel = str(dict(event.stats).get("module", "")) if name == _KERNEL else ""
    return _ThreadEvent(start, start + event.duration_ns, name, kernel)


def _self_times(events: Sequence[_ThreadEvent]) -> Iterator[tuple[_ThreadEvent, float]]:
    """Yield events of one thread with their seconds, without those of nested events."""
    stack: list[tuple[_ThreadEvent, list[float]]] = []
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while stack and event.start >= stack[-1][0].end:
            done, inner = stack.pop()
            yield done, done.seconds - sum(inner)
        if stack:
            stack[-1][1].append(event.seconds)
        stack.append((event, []))
    for done, inner in stack:
        yield done, done.seconds - sum(inner)


# --- stages and passes ------------------------------------------------------------------------


def _stages(main: Sequence[_ThreadEvent], whole: float) -> tuple[Stage, ...]:
    seconds: dict[str, float] = defaultdict(float)
    for event in main:
        for name, stage in _STAGES.items():
            if event.name.startswith(name):
                seconds[stage] += event.seconds
    if not seconds:
        return ()
    seconds["the rest"] = max(whole - sum(seconds.values()), 0.0)
    return _longest(seconds)


def _passes(main: Sequence[_ThreadEvent]) -> tuple[Stage, ...]:
    """Return the passes on the whole program that took longest, by their own time."""
    pipelines = [event for event in main if event.name.startswith("HLO passes")]
    inside = [
        event
        for event in main
        if any(
            pipeline.start <= event.start and event.end <= pipeline.end for pipeline in pipelines
        )
    ]
    seconds: dict[str, float] = defaultdict(float)
    for event, self_seconds in _self_times(inside):
        seconds[event.name.partition(" (")[0]] += self_seconds
    return _longest(seconds)[:MOST]


def _longest(seconds: Mapping[str, float]) -> tuple[Stage, ...]:
    """Return stages, the longest first."""
    stages = (Stage(name, total) for name, total in seconds.items())
    return tuple(sorted(stages, key=lambda stage: -stage.seconds))


# --- kernels and bodies -----------------------------------------------------------------------


def _kernels(thread: Sequence[_ThreadEvent]) -> list[tuple[str, float]]:
    """Return the kernels that a thread compiled, each with its share of the thread's time."""
    kernels = [event for event in thread if event.kernel]
    kernel_seconds = sum(event.seconds for event in kernels)
    tasks = sum(event.seconds for event in thread if event.name == _TASK)
    scale = max(tasks / kernel_seconds, 1.0) if kernel_seconds else 0.0
    return [(event.kernel, scale * event.seconds) for event in kernels]


#: The end of the name of a generator or a lambda inside a function.
_INNER = re.compile(r"(\.<locals>)?\.<\w+>$")


@dataclass
class _FunctionKernels:
    """The kernels of one function."""

    seconds: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def _bodies(
    kernels: Sequence[tuple[str, float]], module: HloModule, frames: Frames
) -> tuple[CompiledBody, ...]:
    by_place: dict[tuple[str, str], _FunctionKernels] = defaultdict(_FunctionKernels)
    for kernel, seconds in kernels:
        frame = _frame(kernel, module, frames)
        place = (frame.file, _INNER.sub("", frame.function)) if frame else ("", "")
        body = by_place[place]
        body.seconds.append(seconds)
        body.lines += [frame.line] if frame else []
    whole = sum(seconds for _, seconds in kernels)
    bodies = [
        CompiledBody(
            function,
            len(body.seconds),
            sum(body.seconds),
            sum(body.seconds) / whole,
            SourceRange(file, min(body.lines), max(body.lines)) if body.lines else None,
        )
        for (file, function), body in by_place.items()
    ]
    return tuple(sorted(bodies, key=lambda body: -body.seconds)[:MOST])


def _frame(kernel: str, module: HloModule, frames: Frames) -> UserFrame | None:
    """Return the user's frame of a kernel; None if the kernel is XLA's own."""
    name = kernel.removeprefix("__compute_module_").removesuffix("_kernel_module")
    instruction = module.by_name.get(name)
    if instruction is None:
        return None
    for candidate in (instruction, *module.inside(instruction)):
        if location := frames.location_in(module.frames(candidate)):
            return location.frame
    return None
