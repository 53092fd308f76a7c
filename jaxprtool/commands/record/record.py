"""Record what JAX compiles in a `with` block, and finish the folder of a recorded run."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxprtool.errors import JaxprToolError
from jaxprtool.files import file_written_whole
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import as_json
from jaxprtool.ir.process import limit_raised, without_collector
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat.source_locations import is_installed
from jaxprtool.recording import folder
from jaxprtool.recording.folder import KeptSources
from jaxprtool.recording.new_run import NewRun, new_run
from jaxprtool.recording.read import (
    WrittenProgram,
    programs,
    read_about,
    read_program,
    read_run,
    written_programs,
)
from jaxprtool.recording.recorded_run import Compilation, Reason, Run
from jaxprtool.recording.recorder import Recorder
from jaxprtool.recording.settings import (
    RunSummary,
    Settings,
    SummaryRequest,
    require_until,
    write_summary,
)

if TYPE_CHECKING:
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.commands.record.page import Details

# --- record ---------------------------------------------------------------------------------------
# Record what JAX compiles in a `with` block, and finish the folder of a recorded run.

#: The width of differences on the page of a run, in characters.
_DIFF_WIDTH = 100


#: The recordings of this process, whose folders may be renamed.
_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()

#: The part of the time of a run that `lint` may take at its end.
MOST_OF_RUN = 0.1

#: The codes of `lint` to select, and to ignore.
Codes: TypeAlias = tuple[Sequence[str], Sequence[str]]


class Recording:
    """A recorded run, in the block that is recorded or after it. Properties read its folder.

    Attributes:
        folder: The folder of the run. It changes if this process records another run there.
    """

    def __init__(self, path: str) -> None:
        self.folder = path
        _recordings.add(self)

    @property
    def run(self) -> Run:
        """The run as recorded so far."""
        return read_run(self.folder)

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The compilations of functions under `jax.jit`, in order."""
        return self.run.compilations

    @property
    def programs(self) -> Mapping[str, Program]:
        """The recorded programs by name: `step`, `step@2`."""
        return programs(self.run)

    @property
    def reasons(self) -> Mapping[str, tuple[Reason, ...]]:
        """The reasons of each recompilation, by name: `step@2`."""
        return {
            compilation.name: compilation.reasons
            for compilation in self.compilations
            if compilation.reasons
        }

    def __repr__(self) -> str:
        run = self.run
        return f"<recorded run in '{self.folder}': {len(run.compilations)} compilations>"


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    calls: bool = False,
    keep: Mapping[str, int] = MappingProxyType({}),
    keep_bytes: int = Settings.keep_bytes,
    until: str = "",
    constants: bool = True,
) -> Iterator[Recording]:
    """Record what JAX compiles in a `with` block.

    Args:
        path: The folder to write, by default `run`. A run that is there is renamed: `run` to
            `run-1`, the next one to `run-2`, …
        overwrite: Whether to replace a run in the folder instead.
        calls: Whether to count calls of functions made in the block, and the time until their
            results are ready.
        keep: The number of last calls whose arguments are kept, by function name. The functions
            must be jitted in the block.
        keep_bytes: The maximum size of the arguments kept for one function, in bytes.
        until: "nan" to raise FloatingPointError at the first NaN in a result of those functions.
        constants: Whether programs are written with the large arrays that they close over.

    Returns:
        The recording, which can be read in the block and after it.

    Raises:
        ArgumentsError: If `until` is unknown, or there are no functions to check.
        OutputError: If the folder holds other files, or a run that another process is writing, or
            cannot be written.
    """
    require_until(until, keep)
    with _new_run(None if path is None else os.fspath(path), overwrite) as new:
        settings = Settings(
            run=os.path.abspath(new.path),
            start=time.time(),
            constants=Settings.constants if constants else 0,
            calls=calls,
            keep=tuple(keep.items()),
            keep_bytes=keep_bytes,
            until=until,
        )
        try:
            with _recorded(new.path, settings) as recording:
                yield recording
        finally:
            finished(new.path)


@contextlib.contextmanager
def recorded_compilations(path: str) -> Iterator[Recording]:
    """Record which functions JAX compiles in a `with` block, and why, but not the programs.

    Args:
        path: A folder, which must be empty.
    """
    settings = Settings(run=os.path.abspath(path), start=time.time(), programs=False)
    with _new_run(path, overwrite=False), _recorded(path, settings) as recording:
        yield recording


def _new_run(path: str | None, overwrite: bool) -> NewRun:
    """Create the folder of a run, as `new_run`, and let recordings follow a renamed one."""
    new = new_run(path, overwrite)
    if new.older:
        renamed = os.path.abspath(new.path)
        for recording in _recordings:
            if os.path.abspath(recording.folder) == renamed:
                recording.folder = new.older
    return new


@contextlib.contextmanager
def _recorded(where: str, settings: Settings) -> Iterator[Recording]:
    """Record a `with` block as the settings say, into the folder of a new run."""
    about: dict[str, Any] = {
        "version": 1,
        "command": [] if hasattr(sys, "ps1") else sys.argv,  # an interactive session has no script
        "folder": os.getcwd(),
        "start": settings.start,
        "calls": settings.calls,
    }
    folder.write_json_file(os.path.join(where, folder.RUN), about)
    code = 1
    try:
        with Recorder(settings).recording():
            yield Recording(where)
        code = 0
    finally:
        ending = {"seconds": time.time() - settings.start, "exit_code": code, "pid": os.getpid()}
        folder.write_json_file(os.path.join(where, folder.RUN), about | ending)


def finished(path: str, codes: Codes = ((), ())) -> Run:
    """Write the page and the trace of a run that has ended, and return the run.

    Args:
        path: The folder of the run.
        codes: The codes of `lint` to select, and to ignore.
    """
    from jaxprtool.recording.recorded_run import perfetto

    run, about = read_run(path), read_about(path)
    # Lines that only the summary shows, as of calls, may be in files that no process kept.
    sources = KeptSources(path, since=about["start"])
    users = {file: name for file, name in run.files.items() if not is_installed(name)}
    now = [name for name in users.values() if source_text.path(name) == name]
    digests = {name: sources.keep(name) for name in now}
    folder.write_json_file(os.path.join(path, folder.RUN), about | {"digests": digests})
    with file_written_whole(os.path.join(path, folder.TRACE)) as file:
        file.write(perfetto(run).encode())
    return written_page(path, os.path.join(path, folder.PAGE), codes, most_of_run=MOST_OF_RUN)


def summarize_run(
    settings: Settings, request: SummaryRequest, exit_code: int, process: str
) -> None:
    """Finish the run of this process, which is about to end, and write what `record` prints.

    Args:
        settings: The settings of the recording.
        request: The summary to make.
        exit_code: The exit code with which the process is about to end.
        process: The folder of this process.
    """
    ending = {
        "pid": os.getpid(),
        "seconds": time.time() - settings.start,
        "exit_code": exit_code,
    }
    about = read_about(request.path) | ending
    folder.write_json_file(os.path.join(request.path, folder.RUN), about)
    with _silent(), limit_raised(), without_collector():
        text = printed_summary(finished(request.path), request)
    write_summary(process, RunSummary(exit_code, text))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let neither warnings nor JAX's log appear among the output of the script."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def printed_summary(run: Run, request: SummaryRequest) -> str:
    """Return what `record` prints at the end of a run: its summary, or its JSON document."""
    if request.json:
        from jaxprtool.render.documents import document_text

        return document_text(run, request.max_bytes)
    from jaxprtool.cli import output
    from jaxprtool.commands.record.table import count_rows, run_summary

    page = os.path.join(request.path, folder.PAGE)
    rows = count_rows(run) if request.all else request.top
    text = io.StringIO()
    output.write_rendered(run_summary(run, request.width, page, rows), text, request.colored)
    return text.getvalue()


def written_page(path: str, page: str, codes: Codes = ((), ()), most_of_run: float = inf) -> Run:
    """Find out what to do about a run, write its page, and return the run.

    Args:
        path: The folder of the run.
        page: The file of the page.
        codes: The codes of `lint` to select, and to ignore.
        most_of_run: The part of the time of the run that `lint` may take.
    """
    from jaxprtool.commands.record import page as pages
    from jaxprtool.commands.record.next_steps import next_steps

    run, about = read_run(path), read_about(path)
    read = _ReadPrograms(run, pages.with_listing(run))
    run = replace(run, next_steps=next_steps(run, read, codes, most_of_run))
    steps = [as_json(step) for step in run.next_steps]
    folder.write_json_file(os.path.join(path, folder.RUN), about | {"next_steps": steps})
    details = {}
    for compilation in pages.with_listing(run):
        with contextlib.suppress(JaxprToolError):  # a plug-in of the script's is missing here
            details[compilation.file] = _details(read(compilation))
    is_inside = os.path.dirname(os.path.abspath(page)) == os.path.abspath(path)
    trace = folder.TRACE if is_inside else ""
    html = pages.run_page(run, details, _texts(run, about), trace, dict(_differences(run)))
    with file_written_whole(page) as file:
        file.write(html.encode())
    return run


def _texts(run: Run, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the user's files that lines of a run are in, as they were recorded.

    A file that was edited while the script ran has no digest: its lines may be others now.
    """
    digests = about.get("digests", {})
    users = {file: name for file, name in run.files.items() if not is_installed(name)}
    return {
        file: text
        for file, name in users.items()
        if digests.get(name, name) and (text := source_text.file_text(name))
    }


class _ReadPrograms:
    """Reads the programs of compilations; those of the page once."""

    def __init__(self, run: Run, listed: Iterable[Compilation]) -> None:
        self._path = run.folder
        self._kept = {compilation.file for compilation in listed}
        self._facts: dict[str, Mapping[str, WrittenProgram]] = {}
        self._programs: dict[str, Program] = {}

    def __call__(self, compilation: Compilation) -> Program:
        """Return the program of a compilation. Raises JaxprToolError if it cannot be read."""
        file = os.path.join(self._path, compilation.file)
        process = os.path.dirname(file)
        if process not in self._facts:
            self._facts[process] = written_programs(process)
        if compilation.file in self._programs:
            return self._programs[compilation.file]
        program = read_program(self._path, file, self._facts[process])
        if compilation.file in self._kept:
            self._programs[compilation.file] = program
        return program


def _details(program: Program) -> Details:
    """Return the facts about a program for the page."""
    from jaxprtool.analysis.stats import stats
    from jaxprtool.commands.cost.estimate import ProgramCost, work_by_equation
    from jaxprtool.commands.memory.estimate import memory
    from jaxprtool.commands.record.page import Details

    needed: Memory | str
    try:
        needed = memory(program)
    except JaxprToolError as error:
        needed = str(error)
    costs = ProgramCost(program)
    return Details(
        program,
        stats(program),
        work_by_equation(program),
        costs.by("line"),
        needed,
        costs.by_frame(),
    )


def _differences(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the name of each program that differs between processes, and its diff.

    The diff is between the first two processes that differ.
    """
    for name in run.differing:
        from jaxprtool.commands.diff.diff import diff  # few runs need them
        from jaxprtool.commands.diff.table import diff_text

        files = [
            compilation.file
            for compilation in run.compilations
            if compilation.name == name and compilation.file
        ]
        with contextlib.suppress(JaxprToolError):
            first, *others = (read_program(run.folder, os.path.join(run.folder, f)) for f in files)
            for differences in (diff(first, other) for other in others):
                if differences.hunks or differences.border:
                    yield name, diff_text(differences, _DIFF_WIDTH, None).plain()
                    break
