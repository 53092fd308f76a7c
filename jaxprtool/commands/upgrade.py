"""`jaxprtool upgrade`: what changes from one environment to another, such as a newer JAX.

    for change in upgraded(["train.py:step"], "old/bin/python", "new/bin/python"):
        print(change.target, change.begins, change.values)

Each environment has a process of `jaxprtool serve`. They are asked in turns to trace, lower,
compile and run each TARGET on the same inputs, and the answers are compared: the jaxprs, the
modules before and after XLA's optimizations, the values, and the times.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from jaxprtool import processes
from jaxprtool.cli import options, output
from jaxprtool.cli.options import FUNCTION, PASSES, Panel
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import command
from jaxprtool.errors import (
    ArgumentsError,
    CheckError,
    JaxprToolError,
    ProgramFileError,
    TargetError,
)

if TYPE_CHECKING:
    from jaxprtool.commands.diff.modules import ModuleDiff
    from jaxprtool.execute.running.rounding import Rounding
    from jaxprtool.ir.program import Program
    from jaxprtool.render.terminal.tables import Rendering


#: The number of runs of each TARGET in each environment, in turns.
ROUNDS = 3

#: The seconds that tracing, compiling or running a TARGET may take.
_SECONDS = 3600

# --- environments ---------------------------------------------------------------------------------

#: What an environment prints of itself, without importing JAX.
_ASK = """
import importlib.metadata as metadata, importlib.util, json, sys
names = "jax", "jaxlib", "libtpu", "numpy"
installed = {d.name: d.version for d in metadata.distributions() if d.name in names}
has = importlib.util.find_spec("jaxprtool") is not None
print(json.dumps([".".join(map(str, sys.version_info[:3])), installed, has]))
"""


@dataclass(frozen=True)
class Environment:
    """A Python environment.

    Attributes:
        python: The interpreter.
        versions: The versions of Python, JAX and what belongs to it, by name.
    """

    python: str
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"JAX {self.versions.get('jax', 'none')}"


class _Server:
    """A process of `jaxprtool serve` in an environment."""

    def __init__(self, python: str, folder: str) -> None:
        interpreter = shutil.which(os.path.expanduser(python))
        if interpreter is None:
            raise TargetError(
                f"cannot run '{python}' as a Python interpreter",
                "name the interpreter of an environment, such as .venv/bin/python",
            )
        python = os.path.abspath(interpreter)
        env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        asked = processes.run_process([python, "-P", "-c", _ASK], env=env)
        if asked.status != 0:
            raise TargetError(f"{python}: {processes.stderr_tail(asked.stderr)}")
        version, installed, has_jaxprtool = json_module.loads(asked.stdout)
        self.environment = Environment(python, {"python": version, **installed})
        if not has_jaxprtool:
            path = [_linked(folder), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(path)
        self._child = processes.Child(
            [python, "-P", "-m", "jaxprtool", "serve"],
            env=env,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, *words: str) -> dict[str, Any]:
        """Return the answer to a command line.

        Raises:
            TargetError: If the process ended, as without the packages that jaxprtool needs.
        """
        request = {"command": words, "timeout_s": _SECONDS}
        popen = self._child.popen
        assert popen.stdin is not None and popen.stdout is not None
        try:
            popen.stdin.write(json_module.dumps(request).encode() + b"\n")
            popen.stdin.flush()
            line = popen.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            python = self.environment.python
            raise TargetError(
                f"jaxprtool does not run with {python}",
                f"install it there, in a clone with `{python} -m pip install .`",
            )
        return json_module.loads(line)

    def end(self) -> None:
        """End the process."""
        self._child.kill()


def _linked(folder: str) -> str:
    """Return a folder with links to this package and its metadata, to import it elsewhere."""
    place = os.path.join(folder, "path")
    os.makedirs(place, exist_ok=True)
    package = Path(__file__).resolve().parents[1]
    metadata = Path(str(distribution("jaxprtool")._path)).resolve()  # type: ignore[attr-defined]
    for path in (package, metadata):
        link = os.path.join(place, path.name)
        if not os.path.lexists(link):
            os.symlink(path, link)
    return place


@contextlib.contextmanager
def _servers(pythons: Sequence[str], folder: str) -> Iterator[list[_Server]]:
    with contextlib.ExitStack() as stack:
        started = []
        for python in pythons:
            started.append(_Server(python, folder))
            stack.callback(started[-1].end)
        yield started


# --- what an environment makes of a TARGET --------------------------------------------------------

#: The files of the modules before and after XLA's optimizations.
_BEFORE, _AFTER = "before.pb", "after.optimized.pb"

#: The file of the jaxpr.
_PROGRAM = "program.jaxpr"


class Phases(NamedTuple):
    """The seconds of each phase; null if it was not run."""

    trace: Annotated[float | None, "Tracing."]
    lower: Annotated[float | None, "Lowering."]
    compile: Annotated[float | None, "Compiling, the CPU time of all threads."]
    run: Annotated[float | None, "A call after the first."]


#: The keys of the phases in the times of `run`.
_TIMES = {"trace": "trace", "lower": "lower", "compile": "compile_cpu", "run": "repeat"}


@dataclass(frozen=True)
class _Artifacts:
    """What an environment makes of a TARGET: files in a folder, and times.

    Attributes:
        folder: The folder.
        error: What it says if a step fails; "" otherwise.
        times: The times of each round.
        unwritten: Why its jaxpr cannot be written to a file; "" if it is there.
    """

    folder: str
    error: str
    times: tuple[dict[str, Any], ...] = ()
    unwritten: str = ""

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, name)

    @property
    def phases(self) -> Phases:
        """The median time of each phase."""
        turns = {name: self.turns(name) for name in Phases._fields}
        return Phases(**{n: statistics.median(s) if s else None for n, s in turns.items()})

    def turns(self, phase: str) -> list[float]:
        """Return the seconds of a phase in each turn."""
        found = (times[_TIMES[phase]] for times in self.times)
        return [seconds for seconds in found if seconds is not None]


@dataclass(frozen=True)
class _Asked:
    """A TARGET, and how it is traced and compiled.

    Attributes:
        target: The TARGET.
        args: Its arguments, or None.
        passes: The passes to run first, or None.
        backend: A machine to compile for, `tpu:v5e:2x2`; None to run it here.
        factory: Whether TARGET is called to get the function.
    """

    target: str
    args: str | None
    passes: str | None
    backend: str | None
    factory: bool

    @property
    def words(self) -> list[str]:
        """TARGET and its options, as words of a command line."""
        words = [self.target, *(("--args", self.args) if self.args else ())]
        words += ["--factory"] if self.factory else []
        return [*words, *(("-p", self.passes) if self.passes else ())]


def _made(server: _Server, folder: str, asked: _Asked) -> _Artifacts:
    """Trace, lower and compile a TARGET in an environment, into files of a folder."""
    os.makedirs(folder)
    made = _Artifacts(folder, "")
    on = ("--backend", asked.backend) if asked.backend else ()
    program = "-o", made.file(_PROGRAM), "--callbacks", "stub"
    answer = server.ask("opt", *asked.words, *program)
    # Some jaxprs cannot be written; their modules can still be compared.
    unwritten = _error(answer) if answer["exit_code"] else ""
    steps = (
        # Protos: the parser of one release does not know all that another one prints.
        ("emit", "-o", made.file(_BEFORE), *on),
        ("emit", "-o", made.file(_AFTER), *on),
    )
    for name, *words in steps:
        answer = server.ask(name, *asked.words, *words)
        if answer["exit_code"]:
            return _Artifacts(folder, _error(answer))
    return replace(made, unwritten=unwritten)


def _error(answer: dict[str, Any]) -> str:
    lines = [line for line in answer["stderr"].splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {answer['exit_code']}"


def _run(server: _Server, made: _Artifacts, asked: _Asked) -> _Artifacts:
    """Run a TARGET once more, and save its results. Add the times to those of earlier rounds."""
    from jaxprtool.api.targets import is_file

    options = "--seed", "0", "--json", "--save", made.file("results.npz")
    answer = server.ask("run", *asked.words, *options)
    if answer["exit_code"]:
        return replace(made, error=_error(answer))
    times = answer["document"]["times"]
    if is_file(asked.target):
        times["trace"] = None  # it was read, not traced
    return replace(made, times=(*made.times, times))


# --- changes --------------------------------------------------------------------------------------

#: Where the difference of two environments begins; "" if there is none.
Layer: TypeAlias = Literal["", "traced", "lowered", "compiled", "fails"]


@dataclass(frozen=True)
class TargetChange:
    """What changes for a TARGET from one environment to another.

    Attributes:
        target: The TARGET.
        begins: Where the difference begins: "traced" if the jaxprs differ, "lowered" if the modules
            before XLA's optimizations do, "compiled" if those after them do, "" if none do, or
            "fails" if an environment cannot trace, compile or run it.
        error: What that environment says; "" if none fails.
        values: How the results compare: "the same bits", "within rounding", "different", or "" if
            it was not run.
        differing_results: The paths of the results that are outside of the tolerance.
        phases: The seconds of each phase in both environments.
        peak_bytes: The bytes that the compiled program needs in both.
        modules: The differences of the compiled modules; None if an environment fails.
        unwritten: Why the jaxprs cannot be compared; "" if they are.
        noisy: The phases of which the fastest turn with the slower environment was no slower than
            the slowest turn with the other one, so that their times tell no difference.
    """

    target: str
    begins: Layer
    error: str = ""
    values: str = ""
    differing_results: tuple[str, ...] = ()
    phases: tuple[Phases, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    modules: ModuleDiff | None = None
    unwritten: str = ""
    noisy: tuple[str, ...] = ()

    @property
    def ratios(self) -> dict[str, float]:
        """The quotient of each figure after and before: of the phases, and of the module."""
        pairs: dict[str, tuple[float | None, float | None]] = {}
        if self.phases:
            before, after = self.phases
            pairs |= {name: (getattr(before, name), getattr(after, name)) for name in after._fields}
        if self.modules is not None:
            for name in ("kernels", "bytes"):
                old, new = (getattr(m, name) for m in (self.modules.before, self.modules.after))
                pairs[name] = (old, new)
        if self.peak_bytes:
            pairs["peak"] = self.peak_bytes[0], self.peak_bytes[1]
        return {name: new / old for name, (old, new) in pairs.items() if old and new is not None}

    @property
    def is_bad(self) -> bool:
        """Whether it fails, or has other values."""
        return self.begins == "fails" or self.values == "different"


class UpgradeDocument(NamedTuple):
    """`upgrade`: what changes in another environment."""

    before: Annotated[dict[str, str], "The versions of the first environment, by package."]
    after: Annotated[dict[str, str], "Those of the second."]
    targets: Annotated[Sequence[TargetChange], "Each TARGET, the worst first."]


def upgraded(
    targets: Sequence[str],
    before: str,
    after: str,
    args: str | None = None,
    passes: str | None = None,
    backend: str | None = None,
    factory: bool = False,
    on_progress: OnProgress = lambda doing: None,
) -> UpgradeDocument:
    """Compare what two environments make of TARGETs.

    Args:
        targets: The TARGETs. The folder of a recorded run stands for all of its programs.
        before: The interpreter of the first environment.
        after: That of the second.
        args: The arguments of the TARGETs; by default their example arguments.
        passes: Passes to run on each first.
        backend: A TPU that this machine lacks, `tpu:v5e:2x2`, to compile for; nothing is run then.
        factory: Whether the TARGETs are called to get the functions.
        on_progress: Called with progress messages.

    Raises:
        TargetError: If an environment cannot be started, or a run has no programs.
    """
    targets = list(dict.fromkeys(name for target in targets for name in _expanded(target)))
    with processes.temporary_folder() as folder, _servers([before, after], folder) as servers:
        changes = [
            _change(
                servers,
                os.path.join(folder, str(number)),
                _Asked(target, args, passes, backend, factory),
                _numbered(on_progress, number, len(targets)),
            )
            for number, target in enumerate(targets, 1)
        ]
        old, new = (server.environment.versions for server in servers)
    return UpgradeDocument(old, new, sorted(changes, key=_worst_first))


def _expanded(target: str) -> list[str]:
    """Return the programs of a recorded run, if a TARGET is one; else the TARGET."""
    from jaxprtool.recording.folder import is_run, program_names

    path = target.rstrip("/")
    if not is_run(path):
        return [target]
    names = program_names(path)
    if not names:
        raise TargetError(f"the run '{path}' has no programs to compare")
    return [f"{path}/{name}" for name in names]


def _numbered(on_progress: OnProgress, number: int, count: int) -> OnProgress:
    """Return a function that shows progress messages with the number of the TARGET."""
    return on_progress if count == 1 else lambda doing: on_progress(f"{number}/{count} {doing}")


def _worst_first(change: TargetChange) -> tuple[bool, bool, float]:
    told = (ratio for name, ratio in change.ratios.items() if name not in change.noisy)
    return not change.is_bad, not change.begins, -max(told, default=0.0)


def _change(
    servers: Sequence[_Server], folder: str, asked: _Asked, on_progress: OnProgress
) -> TargetChange:
    sides = []
    for number, server in enumerate(servers):
        on_progress(f"{asked.target}: compiling with {server.environment}")
        sides.append(_made(server, os.path.join(folder, str(number)), asked))
    for turn in range(0 if asked.backend or any(side.error for side in sides) else ROUNDS):
        on_progress(f"{asked.target}: run {turn + 1} of {ROUNDS} with each")
        pairs = zip(servers, sides, strict=True)
        sides = [_run(server, side, asked) for server, side in pairs]
    for server, side in zip(servers, sides, strict=True):
        if side.error:
            return TargetChange(asked.target, "fails", f"{server.environment}: {side.error}")
    try:
        return _compared(asked, sides)
    except JaxprToolError as error:
        return TargetChange(asked.target, "fails", error.message)


def _compared(asked: _Asked, sides: Sequence[_Artifacts]) -> TargetChange:
    from jaxprtool.commands.diff.diff import diff
    from jaxprtool.commands.diff.modules import diff_modules
    from jaxprtool.commands.memory.compiled import module_peak
    from jaxprtool.formats.hlo import stored_module
    from jaxprtool.formats.jaxpr.read import read

    before, after = sides
    lowered = [stored_module(side.file(_BEFORE)) for side in sides]
    compiled = [stored_module(side.file(_AFTER)) for side in sides]
    modules = diff_modules(*compiled)
    layer: Layer = ""
    unwritten = next((side.unwritten for side in sides if side.unwritten), "")
    programs: list[Program] = []
    try:
        paths = [] if unwritten else [side.file(_PROGRAM) for side in sides]
        programs = [read(path, opaque=True) for path in paths]
    except ProgramFileError as error:
        # One release wrote a value that this one cannot make: `p.jaxpr:3:4: cannot be created`.
        unwritten = error.message.split(": ", 1)[-1]
    if programs and not diff(*programs).is_equivalent:
        layer = "traced"
    elif not diff_modules(*lowered).is_same:
        layer = "lowered"
    elif not modules.is_same:
        layer = "compiled"
    values, differing = _values(sides, _roundings(asked, programs)) if before.times else ("", ())
    return TargetChange(
        asked.target,
        layer,
        "",
        values,
        differing,
        (before.phases, after.phases),
        tuple(module_peak(stored).peak_bytes for stored in compiled),
        modules,
        unwritten,
        tuple(name for name in Phases._fields if overlap(before.turns(name), after.turns(name))),
    )


def overlap(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True if the ranges of the times of two environments overlap."""
    return bool(before and after) and max(min(before), min(after)) <= min(max(before), max(after))


def _values(
    sides: Sequence[_Artifacts], roundings: tuple[Rounding, Rounding] | None
) -> tuple[str, tuple[str, ...]]:
    """Return how the results compare, and which are outside of the tolerance."""
    import numpy as np

    from jaxprtool.commands.compare.variants import Tolerance, measured

    files = [np.load(side.file("results.npz")) for side in sides]
    before, after = ({name: file[name] for name in file} for file in files)
    if {n: x.shape for n, x in before.items()} != {n: x.shape for n, x in after.items()}:
        return "different", tuple(dict.fromkeys([*before, *after]))
    measures = [
        measured(name, before[name], after[name], Tolerance(), _rule(name, roundings))
        for name in before
    ]
    if differing := tuple(measure.name for measure in measures if not measure.within):
        return "different", differing
    is_equal = all(measure.equal for measure in measures)
    return ("the same bits" if is_equal else "within rounding"), ()


def _rule(name: str, roundings: tuple[Rounding, Rounding] | None) -> Callable[..., Any] | None:
    """Return what decides whether rounding explains the difference of a result, if that is known.

    The files of results do not have them in the order of the program.
    """
    from functools import partial

    from jaxprtool.execute.running.rounding import explained

    if roundings is None:
        return None
    before, after = (rounding.wide.program.out_names for rounding in roundings)
    if name not in before or name not in after:
        return None
    return partial(explained, *roundings, (before.index(name), after.index(name)))


def _roundings(asked: _Asked, programs: Sequence[Program]) -> tuple[Rounding, Rounding] | None:
    """Return what rounding explains of the results; None if this process cannot load TARGET.

    It needs the arguments of the runs, which this process fills in the same way. A program with
    primitives that the JAX of this process lacks has the rounding of the other one.
    """
    import jax

    from jaxprtool.api.targets import find_entry, trace_entry
    from jaxprtool.execute.running.arrays import fill_arguments
    from jaxprtool.execute.running.rounding import Rounding, WideProgram
    from jaxprtool.ir.equations import equations
    from jaxprtool.jaxcompat import is_opaque, open_jaxpr

    known = [
        program
        for program in programs
        if not any(map(is_opaque, equations(open_jaxpr(program.jaxpr))))
    ]
    if not known:
        return None
    x64 = jax.config.jax_enable_x64
    try:
        with contextlib.redirect_stdout(sys.stderr):
            traced = trace_entry(find_entry(asked.target, asked.args, asked.factory))
            inputs = [traced.given_to(program) for program in known]
        roundings = [
            Rounding(
                WideProgram(given.program), fill_arguments(given.program, given.values).arguments
            )
            for given in inputs
        ]
    except JaxprToolError:
        return None
    finally:  # the module of a TARGET may set it, for those that follow too
        jax.config.update("jax_enable_x64", x64)
    return roundings[0], roundings[-1]


# --- table ----------------------------------------------------------------------------------------

#: The figures of a row, in order, and the least change that is shown: times vary.
_COLUMNS = {
    "trace": 0.1,
    "compile": 0.1,
    "run": 0.1,
    "kernels": 0.005,
    "bytes": 0.005,
    "peak": 0.005,
}

#: What a layer means, below the table.
_BEGINS = {
    "traced": "JAX traces it to another jaxpr: jaxprtool diff --jax-a … --jax-b … shows it",
    "lowered": "JAX lowers the same jaxpr to another module",
    "compiled": "XLA compiles the same module to other kernels",
    "fails": "it fails",
}

#: The number of lines below the table for each TARGET, and of TARGETs that have some.
_LINES, _DETAILED = 3, 8


def upgrade_table(found: UpgradeDocument, width: int) -> Rendering:
    """Return a row for each TARGET, and the lines of those that changed most."""
    from rich.console import Group
    from rich.text import Text

    from jaxprtool.ir.documents import plural
    from jaxprtool.ir.notation import BinderToken, Comment
    from jaxprtool.render import views
    from jaxprtool.render.terminal.tables import HEADING, Rendering, drawn

    columns = [views.Column("begins"), views.Column("values", Comment)]
    columns += [views.number_column(name) for name in _COLUMNS]
    columns.append(views.Column("target", BinderToken))
    functions = [change.target.rpartition(":")[2] for change in found.targets]
    is_clear = len(set(functions)) == len(functions)
    rows = []
    for function, change in zip(functions, found.targets, strict=True):
        ratios = change.ratios
        cells = [
            _percent_cell(ratios.get(name), least, name in change.noisy)
            for name, least in _COLUMNS.items()
        ]
        rows.append(
            [change.begins or "·", change.values, *cells, function if is_clear else change.target]
        )
    parts: list[Any] = [Text(_versions_text(found), style=HEADING)]
    if found.targets[1:]:
        parts.append(Text(_summary(found.targets)))
    parts += [Text(), drawn(views.Table("", columns, rows))]
    parts += [Text(line) for change in found.targets[:_DETAILED] for line in _details(change)]
    if left := sum(bool(change.begins) for change in found.targets[_DETAILED:]):
        parts.append(Text(f"… the lines of {plural(left, 'more target')}: --json"))
    return Rendering(Group(*parts), width)


def _summary(changes: Sequence[TargetChange]) -> str:
    """Return how many TARGETs change: `5 targets: 1 fails, 2 compiled otherwise, 2 the same`."""
    from jaxprtool.ir.documents import plural

    counts = Counter(change.begins for change in changes if change.begins != "fails")
    failing, different = (
        sum(change.begins == "fails" for change in changes),
        sum(change.values == "different" for change in changes),
    )
    parts = [f"{failing} fail{'s' if failing == 1 else ''}"] if failing else []
    parts += [f"{different} with different values"] if different else []
    for layer in ("traced", "lowered", "compiled"):
        parts += [f"{counts[layer]} {layer} otherwise"] if counts[layer] else []
    parts += [f"{counts['']} the same"] if counts[""] else []
    return f"{plural(len(changes), 'target')}: {', '.join(parts)}"


def _percent_cell(ratio: float | None, least: float, noisy: bool) -> Any:
    from jaxprtool.ir.notation import AddedToken, Comment, RemovedToken
    from jaxprtool.render.views import Cell

    if ratio is None:
        return Cell("")
    if abs(ratio - 1) < least or noisy:
        return Cell(Comment("·"), ratio)
    role = AddedToken if ratio < 1 else RemovedToken
    return Cell([role(f"{ratio - 1:+.0%}" if least >= 0.1 else f"{ratio - 1:+.1%}")], ratio)


def _versions_text(found: UpgradeDocument) -> str:
    """Return the versions of both environments: `jax 0.10.2 → 0.12.0, python 3.11.7`."""
    names = dict.fromkeys((*found.before, *found.after))
    pairs = (
        (name, found.before.get(name, "none"), found.after.get(name, "none")) for name in names
    )
    return ", ".join(
        f"{name} {old}" if old == new else f"{name} {old} → {new}" for name, old, new in pairs
    )


def _details(change: TargetChange) -> Iterator[str]:
    """Yield the error, or the lines of the user with the largest differences."""
    from jaxprtool.ir.documents import in_bytes, some

    if not change.begins:
        return
    yield f"{change.target}: {_BEGINS[change.begins]}"
    if change.error:
        yield f"  {change.error}"
    if change.unwritten:
        yield f"  its jaxprs are not compared: {change.unwritten}"
    if change.differing_results:
        yield f"  different results: {some(change.differing_results, 4)}"
    if change.modules is not None and change.modules.lost_donations:
        yield f"  no longer donated: {some(change.modules.lost_donations, 4)}"
    for line in change.modules.lines[:_LINES] if change.modules is not None else ():
        size = line.after.bytes - line.before.bytes
        kernels = line.after.kernels - line.before.kernels
        figures = [f"{kernels:+,} kernels"] if kernels else []
        figures += [f"{'+' if size > 0 else '-'}{in_bytes(abs(size))}"] if abs(size) > 64 else []
        if figures:
            yield f"  {line.place or 'XLA itself'}: {', '.join(figures)}"


# --- command --------------------------------------------------------------------------------------

_OTHER = Panel("Environments")

_Python = Annotated[
    list[str],
    _OTHER.option(
        "--python",
        "PYTHON",
        "The interpreters of the two environments, such as old/bin/python. Given once: of the "
        "second; the first is this one.",
    ),
]
_Limits = Panel("Exit code 1")


def _limit(name: str, what: str) -> Any:
    return Annotated[
        str | None, _Limits.option(f"--max-{name}", "+N%", f"If {what} grows by more than this.")
    ]


_MaxCompile: TypeAlias = _limit("compile", "the CPU time of compiling")  # type: ignore[valid-type]
_MaxRun: TypeAlias = _limit("run", "the time of a call")  # type: ignore[valid-type]
_MaxPeak: TypeAlias = _limit("peak", "the memory that a program needs")  # type: ignore[valid-type]


@command
def upgrade_command(
    targets: Annotated[
        list[str], options.target_argument("TARGET…", "The functions or programs to compare.")
    ],
    python: _Python,
    args: Annotated[
        str | None, FUNCTION.option("--args", "EXPR", "The arguments of the TARGET.")
    ] = None,
    passes: Annotated[
        str | None, PASSES.option("-p, --passes", "PIPELINE", "Passes to run on each first.")
    ] = None,
    backend: Annotated[
        str | None,
        options.backend_option(
            "A TPU that this machine lacks: tpu:v5e:2x2. It is compiled for, and nothing is run.",
            _OTHER,
        ),
    ] = None,
    factory: Annotated[
        bool, FUNCTION.flag("--factory", "Call TARGET() to get the function and its arguments.")
    ] = False,
    max_compile: _MaxCompile = None,
    max_run: _MaxRun = None,
    max_peak: _MaxPeak = None,
    json: options.Json = False,
    *,
    on_progress: OnProgress,
) -> None:
    """Show what changes in another environment, such as a newer JAX.

    Both environments trace, lower, compile and run each TARGET on the same inputs, in turns. A row
    says where the first difference is, whether the values are the same, and how times, kernels,
    memory traffic and peak memory change; below it are the lines that changed most. Of a recorded
    run, run/, all programs are compared, as they were traced when they were recorded.

    [bold]Examples[/]

      jaxprtool upgrade train.py:step --python old/bin/python --python new/bin/python
      jaxprtool upgrade train.py:step --python new/bin/python --max-peak +5% --max-run +10%
      jaxprtool upgrade run/ --python old/bin/python --python new/bin/python
    """
    if len(python) > 2:
        raise typer.BadParameter(f"--python is given {len(python)} times, but there are two")
    if backend is not None and ":" not in backend:
        raise ArgumentsError("--backend names a machine to compile for", "such as tpu:v5e:2x2")
    limits = {"compile": max_compile, "run": max_run, "peak": max_peak}
    most = {name: _share(name, text) for name, text in limits.items() if text is not None}
    before, after = python if len(python) == 2 else (sys.executable, *python)
    found = upgraded(targets, before, after, args, passes, backend, factory, on_progress)
    if json:
        output.write_json(found)
    else:
        output.write_rendered(upgrade_table(found, output.width()))
    _require(found, most)


def _share(name: str, text: str) -> float:
    """Return the quotient that a limit such as `+5%` allows."""
    number = text.strip().removeprefix("+").removesuffix("%")
    try:
        return 1 + float(number) / 100
    except ValueError:
        raise ArgumentsError(f"--max-{name} {text} is not a percentage", "write +5%") from None


def _require(found: UpgradeDocument, most: dict[str, float]) -> None:
    """Raise CheckError for a TARGET that fails, has other values, or exceeds a limit."""
    from jaxprtool.ir.documents import some

    for change in found.targets:
        if change.is_bad:
            what = change.error or f"different results: {some(change.differing_results, 4)}"
            raise CheckError(f"{change.target}: {what}")
        for name, limit in most.items():
            ratio = change.ratios.get(name, 1.0)
            if ratio > limit and name not in change.noisy:
                raise CheckError(
                    f"{change.target}: {name} grows by {ratio - 1:.1%}, over --max-{name} "
                    f"{limit - 1:+.1%}"
                )
