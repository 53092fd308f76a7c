"""`determinism`: run a program in several ways, and compare the results bit for bit.

    found = jaxprtool.determinism(program, (params, batch), threads=(1, 8))
    found.equal, found.repetitions[0].results, found.causes

The first run is the reference. A run in another process, such as one with another number of
threads, reads the program from a file. A program that calls Python functions has no such runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import jax

from jaxprtool.commands.compare.divergence import (
    Cause,
    Determinism,
    FreshRun,
    Kind,
    Repetition,
    differing_prefix,
    find_divergence,
)
from jaxprtool.commands.compare.requested import inputs_from
from jaxprtool.commands.compare.variants import (
    Executor,
    IsolatedRunner,
    Measure,
    OnProgress,
    Runner,
    Tolerance,
    Variant,
    logical,
    measured,
    process_of,
    results_in,
    risks,
)
from jaxprtool.commands.diff.diff import Diff, Hunk, diff
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError
from jaxprtool.execute.calls import PythonProcess, python_process, report
from jaxprtool.execute.running.arrays import as_numpy, fill_arguments
from jaxprtool.execute.running.backends import backends, compiled_afresh, exchanged, is_first
from jaxprtool.execute.running.run import own_devices
from jaxprtool.formats.jaxpr import write
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.documents import plural
from jaxprtool.ir.equations import variables
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import JitOptions, Program, Programs
from jaxprtool.jaxcompat import ClosedJaxpr
from jaxprtool.passes.cleanup.inline import Inline

_EXACT = Tolerance(0, 0)
_INLINE = Inline(force=True)

#: The hash seeds of Python in other processes.
_HASH_SEEDS = "1", "2"

#: Traces the function again in this process.
TraceAgain: TypeAlias = Callable[[], Program]
MakeExecutor: TypeAlias = Callable[[Variant, Sequence[Any]], Executor]
#: Traces and runs the function in a new process with these environment variables.
RunFresh: TypeAlias = Callable[[Mapping[str, str]], FreshRun]

#: The options of XLA that `default` stands for, by platform; others have none.
DEFAULT_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": True,
        "xla_backend_optimization_level": 0,
        "xla_cpu_enable_platform_dependent_math": False,
    },
    "gpu": {
        "xla_allow_excess_precision": False,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
    },
}


@dataclass(frozen=True)
class Ways:
    """The ways in which a program is run again.

    Attributes:
        runs: The number of runs of the compiled program, with the first.
        threads: The numbers of threads of XLA's CPU backend.
        options: Options of XLA, each of which is tried alone.
        trace_again: Traces the function again; None if there is only a program.
        run_fresh: Traces and runs the function in another process; None if there is only a program.
    """

    runs: int = 3
    threads: Sequence[int] = (1, 8)
    options: Mapping[str, Any] = field(default_factory=dict)
    trace_again: TraceAgain | None = None
    run_fresh: RunFresh | None = None


def determinism(
    program: Program,
    args: object = None,
    *,
    runs: int = 3,
    threads: Sequence[int] = (1, 8),
    xla_options: Mapping[str, Any] | None = None,
    trace_again: TraceAgain | None = None,
    seed: int = 0,
) -> Determinism:
    """Run a program again in several ways, and compare the results bit for bit.

    Args:
        program: The program.
        args: The arguments, as a tuple, or as any pytree of the same leaves; None for random
            values.
        runs: The number of runs of the compiled program.
        threads: The numbers of threads of XLA's CPU backend, each run in its own process.
        xla_options: Options of XLA, each of which is tried alone: `{"xla_cpu_enable_fast_math":
            True}`.
        trace_again: Traces the function again, to find what tracing depends on: `lambda:
            jaxprtool.trace(f, x)`.
        seed: The seed of random values.

    Raises:
        ArgumentsError: If the arguments do not fit, a number is too small, or XLA does not know an
            option.
        JaxprToolError: If the first run fails.
    """
    inputs = inputs_from([program], args)(program)
    filled = fill_arguments(inputs.program, inputs.values, seed)
    ways = Ways(runs, threads, xla_options or {}, trace_again)
    outcome = run_again(inputs.program, filled.arguments, ways)
    return replace(outcome, inputs=filled.described(seed), random=filled.random)


def run_again(
    program: Program,
    arguments: Sequence[Any],
    ways: Ways,
    on_progress: OnProgress = lambda doing: None,
) -> Determinism:
    """Run a program again on flat arguments in several ways, and return the differences.

    Raises the errors of `determinism`.
    """
    if ways.runs < 2:
        raise ArgumentsError(f"runs must be at least 2, not {ways.runs}")
    if bad := [count for count in ways.threads if count < 1]:
        raise ArgumentsError(f"a number of threads must be at least 1, not {bad[0]}")
    require_options(ways.options)
    with compiled_afresh():
        return _RepeatedRuns(program, arguments, ways, on_progress).found()


def require_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentsError for an option or a value that XLA does not accept."""
    for name, value in options.items():
        if error := _refusal(name, value):
            raise ArgumentsError(error)


def _refusal(name: str, value: Any) -> str:
    """Return XLA's error about an option in one line, or ""."""
    try:
        jax.jit(lambda: 0).lower().compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return f"XLA of JAX {jax.__version__} has no option '{name}'"
        return f"XLA does not accept {name}={value}: {str(error).splitlines()[0]}"
    return ""


def default_options() -> tuple[dict[str, Any], list[str]]:
    """Return the default options of the platform, and those that this release of JAX lacks."""
    platform = backends()[0].platform
    defaults = DEFAULT_OPTIONS.get({"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), {})
    lacking = [name for name, value in defaults.items() if _refusal(name, value)]
    return {k: v for k, v in defaults.items() if k not in lacking}, lacking


class _RepeatedRuns:
    """The runs of a program."""

    def __init__(
        self, program: Program, arguments: Sequence[Any], ways: Ways, on_progress: OnProgress
    ):
        self._program, self._arguments, self._ways = program, arguments, ways
        self._on_progress, self._not_tried = on_progress, list[str]()
        self._variants = [*self._on_devices(), *self._with_threads(), *self._with_options()]
        fresh = 0 if ways.run_fresh is None else len(_HASH_SEEDS)
        traced = ways.trace_again is not None
        self._number, self._count = 0, ways.runs + 1 + traced + fresh + len(self._variants)
        self._doing = ""
        self._reference = Variant("the first run", program)
        self._run = Runner(self._reference, self._tell)
        self._begin("the first run")
        self._results = self._run(arguments)

    def _begin(self, name: str) -> None:
        """Begin the next run: its number and name precede the steps that it tells."""
        self._number += 1
        self._doing = f"run {self._number} of {self._count}: {name}"
        self._on_progress(self._doing)

    def _tell(self, doing: str) -> None:
        self._on_progress(f"{self._doing} · {doing}")

    def found(self) -> Determinism:
        tried = [*self._here(), *self._fresh(), *self._elsewhere()]
        causes = list(self._causes(tried))
        return Determinism(
            self._program.name,
            "",
            (),
            ", ".join(sorted({str(d) for result in self._results for d in _devices(result)})),
            tuple(run for run, _ in tried),
            tuple(causes),
            risks(self._program),
            tuple(self._not_tried),
        )

    def _causes(self, tried: Sequence[tuple[Repetition, Variant | None]]) -> Iterator[Cause]:
        """Yield where runs begin to differ, once for each kind of change, option and device."""
        located = set[str]()
        for run, variant in tried:
            key = run.name if run.kind in ("option", "device") else run.kind
            if not run.differing or run.other_program or variant is None or key in located:
                continue
            located.add(key)
            yield self._cause(run.name, variant)
            if run.kind in ("run", "compile"):  # other runs differ at least for this reason
                return

    def _here(self) -> Iterator[tuple[Repetition, Variant | None]]:
        """Yield the runs of the same program in this process."""
        runs = [self._compared("run", "run again", self._run) for _ in range(self._ways.runs - 1)]
        yield next((run for run in runs if not run.equal), runs[-1]), self._reference
        again = Runner(self._reference, self._tell)
        yield self._compared("compile", "compiled again", again), self._reference
        if self._ways.trace_again is not None:
            name = "traced again"
            self._begin(name)
            jax.clear_caches()
            try:
                text = _text(self._ways.trace_again())
            except JaxprToolError as error:
                yield Repetition(name, "trace", error=error.message), None
            else:
                yield Repetition(name, "trace", (), self._other(text)), None

    def _fresh(self) -> Iterator[tuple[Repetition, Variant | None]]:
        """Yield the runs of the function in other processes, with other hash seeds of Python."""
        if self._ways.run_fresh is None:
            return
        for seed in _HASH_SEEDS:
            name = f"another process, hash seed {seed}"
            environment = {"PYTHONHASHSEED": seed}
            self._begin(name)
            try:
                fresh = self._ways.run_fresh({**_ENVIRONMENT, **environment})
            except JaxprToolError as error:
                yield Repetition(name, "process", error=error.message), None
                continue
            measures = self._measures_by_name(fresh.results)
            repetition = Repetition(name, "process", measures, self._other(fresh.program))
            alone = self._not_isolated() is None
            yield repetition, self._in_process(name, environment) if alone else None

    def _elsewhere(self) -> Iterator[tuple[Repetition, Variant | None]]:
        """Yield the runs on other devices, and with other threads or options of XLA."""
        for kind, variant in self._variants:
            runner = IsolatedRunner if variant.environment else Runner
            run = runner(variant, self._tell)
            yield self._compared(kind, variant.name, run), variant

    def _on_devices(self) -> Iterator[tuple[Kind, Variant]]:
        first, *others = backends()
        if own_devices(self._program) or self._program.meshes:
            self._not_tried.append("other devices: the program has its own mesh")
            return
        if len(first.devices) == 1 and not others:
            only = f"{first.devices[0]} is the only one (--host-devices adds some)"
            self._not_tried.append(f"other devices: {only}")
        for index, device in enumerate(first.devices[1:], 1):
            yield "device", Variant(f"on {device}", self._program, first.platform, index=index)
        for other in others:
            yield "device", Variant(f"on {other.devices[0]}", self._program, other.platform)

    def _with_threads(self) -> Iterator[tuple[Kind, Variant]]:
        if not self._ways.threads:
            return
        if backends()[0].platform != "cpu":
            self._not_tried.append("numbers of threads: the program does not run on a CPU")
            return
        if (reason := self._not_isolated()) is not None:
            self._not_tried.append(f"numbers of threads: {reason}")
            return
        if self._program.meshes or own_devices(self._program):
            self._not_tried.append("numbers of threads: the program has its own mesh")
            return
        # XLA has at least one thread for each virtual device.
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        one_device = {"XLA_FLAGS": " ".join(kept), "JAX_NUM_CPU_DEVICES": "1"}
        for count in self._ways.threads:
            name = plural(count, "thread")
            yield "threads", self._in_process(name, {**one_device, "NPROC": str(count)})

    def _with_options(self) -> Iterator[tuple[Kind, Variant]]:
        jit_options = self._program.jit or JitOptions()
        for name, value in self._ways.options.items():
            options = {**dict(jit_options.compiler_options), name: value}
            jit = replace(jit_options, compiler_options=tuple(options.items()))
            text = str(value).lower() if isinstance(value, bool) else value
            yield "option", Variant(f"{name}={text}", self._program.replace(jit=jit))

    def _not_isolated(self) -> str | None:
        """Return why the program cannot run in a separate process, or None."""
        try:
            write.program_file_text(self._program, source=False)
        except UnsupportedError as error:
            return error.message.partition(": ")[0]  # without the Python function
        return None

    def _in_process(self, name: str, environment: Mapping[str, str]) -> Variant:
        variables = tuple({**_ENVIRONMENT, **environment}.items())
        return Variant(name, self._program, environment=variables)

    def _compared(
        self, kind: Kind, name: str, run: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> Repetition:
        self._begin(name)
        try:
            return Repetition(name, kind, self._measures(run(self._arguments)))
        except JaxprToolError as error:
            return Repetition(name, kind, error=error.message)

    def _measures(self, results: Sequence[Any]) -> tuple[Measure, ...]:
        triples = zip(self._program.out_names, self._results, results, strict=True)
        return tuple(measured(*triple, _EXACT) for triple in triples)

    def _measures_by_name(self, results: Mapping[str, Any]) -> tuple[Measure, ...]:
        """Return the differences of results by name; none if names or shapes are not the same."""
        if list(results) != list(self._program.out_names):
            return ()
        shapes = (
            [getattr(x, "shape", ()) for x in values]
            for values in (self._results, results.values())
        )
        return self._measures(list(results.values())) if len(set(map(tuple, shapes))) == 1 else ()

    def _other(self, text: str) -> str:
        """Return how a program, as text, differs from that of the first run; "" if it does not."""
        differences = diff(
            parse_program(_text(self._program), "<first>"), parse_program(text, "<again>")
        )
        if differences.is_equivalent:
            return ""
        for edge in differences.border:
            return f"{edge.what} {edge.name}: {edge.before or 'none'}, then {edge.after or 'none'}"
        for hunk in differences.hunks:
            line = hunk.lines[0]
            if line.equation is None:
                return _other_constant(self._program, hunk)
            where = f" at {line.source}" if line.source else ""
            return f"{line.equation.primitive.name}{where} {line.kind}"
        return f"the programs are {differences.verdict}"

    def _cause(self, name: str, variant: Variant) -> Cause:
        """Return where a run begins to differ."""
        if not variant.environment:
            return self._located(name, variant, Executor)
        with process_of(variant) as process:
            return self._located(name, variant, partial(_PieceExecutor, process))

    def _located(self, name: str, variant: Variant, executor: MakeExecutor) -> Cause:
        first, arguments = self._reference, self._arguments

        def make_executor(variant: Variant, values: Sequence[Any]) -> Executor:
            return (executor if variant.environment else Executor)(variant, values)

        pair = first, variant
        inputs = arguments, arguments
        divergence = find_divergence(
            pair, inputs, None, _EXACT, self._on_progress, exact=True, executor=make_executor
        )
        divergence = replace(divergence, variant=name)
        if divergence.found:
            return Cause(name, divergence)
        for variants in (map(_inlined, pair), pair):
            old, new = variants
            both = make_executor(old, arguments), make_executor(new, arguments)
            prefix = differing_prefix(old.program, both, self._on_progress)
            if prefix is not None:
                return Cause(name, divergence, prefix)
        return Cause(name, divergence)


class _PieceExecutor(Executor):
    """Runs pieces of a variant in a process with the variant's environment, which may crash."""

    def __init__(self, process: PythonProcess, variant: Variant, arguments: Sequence[Any]):
        super().__init__(variant, arguments)
        self._process, self._variant = process, variant

    def run(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        taken = tuple(f"x{i}" for i in range(len(body.in_avals)))
        out_names = tuple(f"y{i}" for i in range(len(body.out_avals)))
        trees = jax.tree.structure((taken, {})), jax.tree.structure(out_names)
        piece = Program(self._variant.program.name, body, *trees, taken, out_names)
        return results_in(self._process, replace(self._variant, program=piece), arguments)


#: Other processes compile everything, and leave the memory of a GPU to this one.
_ENVIRONMENT = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def _inlined(variant: Variant) -> Variant:
    """Return a variant with its calls inlined, as XLA inlines them."""
    program = _INLINE(variant.program)
    assert not isinstance(program, Programs)
    return replace(variant, program=program)


def _other_constant(program: Program, hunk: Hunk) -> str:
    """Return the first equation that reads a constant that differs in the other trace."""
    (difference, *_), body = hunk.lines[0].differences, hunk.body.bodies[0]
    reader = next((eqn for eqn in body.eqns if difference.before in variables(eqn.invars)), None)
    if difference.part != "constant" or reader is None:
        return "a constant or a result"
    return f"another constant in {frames_now(program.roots).named((reader,))}"


def _text(program: Program) -> str:
    return write.program_file_text(program, callbacks="stub")


def _devices(value: Any) -> Sequence[Any]:
    return sorted(value.devices(), key=str) if isinstance(value, jax.Array) else ()


# --- fresh ----------------------------------------------------------------------------------------
# Trace and run a function in another process, and return its program and its results.
#
# The process runs the same command line. If the environment variable FRESH is set, the command
# reports its program and results, and does nothing else.

FRESH = "JAXPRTOOL_FRESH_RUN"


def run_fresh(
    run: Callable[[], None], environment: Mapping[str, str], program: Program
) -> FreshRun:
    """Run a command line in a new process, and return the program and the results it reports.

    `run` runs it there. `program` is the program of this process, whose types the results get.
    Raises UnsupportedError if the process fails.
    """
    reported: list[tuple[str, dict[str, Any]]] = []
    environment = {**environment, FRESH: "1"}
    with python_process("the process failed", environment, reported.append) as process:
        process.call(run)
    ((text, results),) = reported
    if list(results) == list(program.out_names):
        values = logical(list(results.values()), program.out_avals)
        results = dict(zip(results, values, strict=True))
    return FreshRun(text, results)


def report_fresh(program: Program, arguments: Sequence[Any]) -> None:
    """Run a program on flat arguments, and report it and its results."""
    values = map(as_numpy, Runner(Variant(program.name, program))(arguments))
    results = dict(zip(program.out_names, values, strict=True))
    report((write.program_file_text(program, callbacks="stub"), results))


# --- same program ---------------------------------------------------------------------------------
# Compare the program of this process with those of the other processes of its cluster.


@dataclass(frozen=True)
class Differing:
    """Two processes of a cluster that do not run the same program.

    Attributes:
        pair: Their numbers; the first is 0.
        why: The kind of difference.
        first: Whether this is process 0.
        diff: The differences of their programs; None if they could not be compared.
    """

    pair: tuple[int, int]
    why: str
    first: bool
    diff: Diff | None


def differing(program: Program) -> Differing | None:
    """Return the first process whose program differs from that of process 0, or None.

    The programs' text without source lines, JAX's release and the platform are compared. All
    processes must call this; a single process returns None.
    """
    start_backends()
    if jax.process_count() == 1:
        return None
    setting = f"JAX {jax.__version__} on {jax.default_backend()}, {jax.device_count()} devices"
    text = write.program_file_text(program, callbacks="stub", source=False)
    marks = exchanged(hashlib.sha256(text.encode()).digest() + setting.encode())
    other = next((i for i, mark in enumerate(marks) if mark != marks[0]), None)
    if other is None:
        return None
    settings = [mark[32:].decode() for mark in (marks[0], marks[other])]
    if settings[0] != settings[1]:
        return Differing((0, other), " against ".join(settings), is_first(), None)
    texts = exchanged(text.encode())
    differences = None
    try:
        differences = diff(
            parse_program(texts[0], "<process 0>"),
            parse_program(texts[other], f"<process {other}>"),
        )
        why = f"they are {differences.verdict}"
    except JaxprToolError as error:
        why = f"their texts differ ({error.message})"
    return Differing((0, other), why, is_first(), differences)
