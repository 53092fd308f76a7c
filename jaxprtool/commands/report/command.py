"""`jaxprtool report`: a page with a program's summary, listing, cost, memory and residuals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Compiled, Panel
from jaxprtool.cli.session import Session, command, only_program, require_device
from jaxprtool.commands.lint.command import configured_codes, require_whole
from jaxprtool.commands.profile.command import Measure, measured_profile, require_measure
from jaxprtool.commands.shardings.command import compiled_partition
from jaxprtool.commands.show.command import write_states
from jaxprtool.errors import ArgumentsError, JaxprToolError, OutputError
from jaxprtool.ir.documents import document
from jaxprtool.ir.process import without_collector
from jaxprtool.recording.folder import PAGE, recorded_run, run_and_program

if TYPE_CHECKING:
    from jaxprtool.cli.session import Named
    from jaxprtool.commands.cost.estimate import By, Cost
    from jaxprtool.commands.memory.compiled import CompiledPeak
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.commands.report.page import Report
    from jaxprtool.commands.residuals.residuals import Residuals
    from jaxprtool.commands.show.summary import Summary
    from jaxprtool.ir.program import Program

#: The groupings of the tables of costs.
_GROUPINGS: tuple[By, ...] = ("line", "scope", "primitive")

_Argnums = Annotated[Any, options.argnums_option(Panel("Report"))]
_Out = Annotated[str | None, options.out_option("Write the page to this file.", "FILE.html")]


@command
def report_command(
    session: Session,
    argnums: _Argnums = None,
    compiled: Compiled = False,
    measure: Measure = False,
    backend: options.Backend = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    out: _Out = None,
    json: options.Json = False,
) -> None:
    """Write an HTML report: each pass, cost, memory and residuals.

    The page begins with a summary, which is also printed: the size and cost of the program, the
    lines with the most FLOPs, the peak of memory, the residuals, findings of lint, and what to do
    next.

    Cost and memory are those of the program after the passes. Residuals are those of the gradient
    of the function as traced, with respect to its first argument, unless --argnums has others.
    Nothing is compiled without --measure or --compiled.

    If TARGET is the folder of a recorded run, the report is the page of the whole run, with its
    compilations and what to do. -o may be left out, and for a program of a run too: the page of
    run/step is run/step.html.

    Of an HLO module, the page has the kernels in order, their cost, the memory at the peak and the
    copies.

    [bold]Examples[/]

      jaxprtool report samples/transformer.py:loss -o report.html
      jaxprtool report samples/transformer.py:loss -p "grad, -O2" -o report.html
      jaxprtool report samples/transformer.py:loss -p grad --measure -o report.html
    """
    run = recorded_run(session.target)
    if run is not None:
        _report_run(run, session, out, json, measure or compiled)
        return
    is_named, out = out is not None, out or _in_run(session.target)
    if out is None:
        raise OutputError("report writes an HTML page, but -o is missing", "add -o report.html")
    output.check_out("report", out, json, (), "jaxprtool opt TARGET", page=True)
    require_measure(measure, backend, device)
    session.start(True if measure else None)
    if (stored := session.module()) is not None:
        if measure or compiled:
            raise OutputError("--measure and --compiled need a program, not an HLO module")
        from jaxprtool.commands.show.page import module_page

        output.write_page(module_page(stored), out)
        if json:
            from jaxprtool.commands.cost.modules import module_cost
            from jaxprtool.commands.memory.compiled import module_peak

            work = module_cost(stored.module, "line", stored.assignment)
            peak = module_peak(stored) if stored.module.schedule else None
            facts = ModuleFacts(work, peak)
            output.write_json(ReportDocument(out, os.path.getsize(out), (), facts))
        return
    from jaxprtool.commands.cost.estimate import ProgramCost
    from jaxprtool.commands.kernels.kernels import kernels
    from jaxprtool.commands.opt import steps
    from jaxprtool.commands.report.page import Report, report_views
    from jaxprtool.render.terminal.listing import ShowOptions

    watcher = steps.Watcher(keeps=True)
    require_device(session.function, backend, device)
    traced = session.traced(runs=measure)
    programs = session.programs(traced, watcher)
    times = None
    if measure:
        inputs = traced.given_to(only_program("--measure takes", programs))
        times = measured_profile(
            inputs, session.target, seed, backend, device, False, session.on_progress
        )
    session.on_progress("counting")
    with without_collector():
        costs = [ProgramCost(program) for _, program in programs]
        figures = Report(
            [program_cost.by(by) for program_cost in costs for by in _GROUPINGS],
            [_memory(program) for _, program in programs],
            _residuals(traced.program, argnums or 0),
            times,
            compiled_partition(session, traced, programs) if compiled else None,
            frames=[program_cost.by_frame() for program_cost in costs],
            roots=[program.roots for _, program in programs],
            kernels=[kernels(program) for _, program in programs],
        )
        figures = replace(figures, summaries=_summaries(session, programs, figures))
    session.on_progress("rendering")
    shown = ShowOptions(names=True, terse=True, source=True)
    views = partial(report_views, figures)
    write_states(steps.states(watcher, programs), shown, out, views)
    if json:
        output.write_json(ReportDocument(out, os.path.getsize(out), figures.summaries))
    elif out != output.STDOUT:
        from jaxprtool.commands.show.table import summary_table

        if not is_named:
            output.say_written([out])
        output.write_each(summary_table(entry, output.width()) for entry in figures.summaries)


def _in_run(target: str) -> str | None:
    """Return the page of a program of a run, beside the run's own; None for other targets."""
    place = run_and_program(target)
    return None if place is None else os.path.join(place[0], f"{place[1].replace('/', '-')}.html")


def _report_run(
    run: str, session: Session, out: str | None, json: bool, runs_programs: bool
) -> None:
    """Write the page of a recorded run, to its folder unless -o has another file."""
    require_whole(run, session)
    if runs_programs:
        option = "--measure and --compiled apply to one program"
        raise ArgumentsError(option, f"give the name of one: {run}/NAME")
    page = os.path.join(run, PAGE) if out is None else out
    output.check_out("report", page, json, (), "jaxprtool show TARGET", page=True)
    session.start()
    from jaxprtool.commands.record.record import written_page
    from jaxprtool.commands.record.table import run_summary

    session.on_progress("looking for findings")
    recorded = written_page(run, page, configured_codes())
    if json:
        output.write_json(ReportDocument(page, os.path.getsize(page), ()))
    elif page != output.STDOUT:
        output.say_written([page])
        output.write_rendered(run_summary(recorded, output.width(), page))


def _summaries(session: Session, programs: Named, figures: Report) -> list[Summary]:
    """Return the summaries of programs; suggestions are made for a single one with a name."""
    from jaxprtool.api.targets import STDIN
    from jaxprtool.commands.show.summary import facts_of, summarized

    session.on_progress("looking for findings")
    costs = (estimate for estimate in figures.costs if estimate.by == "line")
    several = zip(programs, costs, figures.memories, strict=True)
    codes = configured_codes()
    facts = [
        facts_of(
            program,
            estimate,
            memory,
            figures.residuals,
            figures.profile,
            figures.shardings is not None,
            codes,
        )
        for (_, program), estimate, memory in several
    ]
    is_named = len(programs) == 1 and session.target != STDIN
    command_line = session.command_line if is_named else None
    return [summarized(entry, command_line) for entry in facts]


def _memory(program: Program) -> Memory | str:
    """Return the memory of a program, or the reason that it is unknown."""
    from jaxprtool.commands.memory.estimate import memory

    try:
        return memory(program)
    except JaxprToolError as error:
        return str(error)


def _residuals(program: Program, argnums: int | Sequence[int]) -> Residuals | str:
    """Return the residuals of a loss or a training step, or the reason that there are none."""
    from jaxprtool.commands.residuals.policies import gives_one_float, halves_inside, residuals

    if not gives_one_float(program) and halves_inside(program) is None:
        return (
            f"{program.name} has no residuals here: its result is not one floating-point number, "
            "and it has no gradient inside"
        )
    try:
        return residuals(program, argnums=argnums, peaks=True)
    except JaxprToolError as error:
        return str(error)


@document(optional=("memory",))
class ModuleFacts(NamedTuple):
    """What the page of an HLO module shows.

    Attributes:
        cost: The cost of its kernels by line, and the copies that XLA inserts.
        memory: The memory at the peak; left out if the module has no schedule.
    """

    cost: Cost
    memory: CompiledPeak | None


@document(optional=("module",))
class ReportDocument(NamedTuple):
    """`report`: the written page, and the summaries at its start.

    Attributes:
        path: The file of the page.
        bytes: Its size, in bytes.
        programs: The summary of each program.
        module: What the page shows, if it is that of an HLO module.
    """

    path: str
    bytes: int
    programs: Sequence[Summary]
    module: ModuleFacts | None = None
