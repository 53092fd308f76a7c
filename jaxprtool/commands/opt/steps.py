"""The steps of a running pipeline: programs between passes, and the effects of passes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from jaxprtool.analysis.stats import count_equations
from jaxprtool.cli import output
from jaxprtool.cli.pipeline_steps import named_programs
from jaxprtool.ir.program import Program, Programs
from jaxprtool.passes import Observer, Pass, Step
from jaxprtool.render.documents.programs import PassRun

if TYPE_CHECKING:
    from jaxprtool.render.page import PageState


class Watcher(Observer):
    """Prints programs between passes as requested, and records a row for each pass.

    With `keeps`, `states` are the programs before the first pass and after each pass. `noted` are
    the passes with notes, each with the programs before and after it.
    """

    def __init__(
        self,
        before_all: bool = False,
        after_all: bool = False,
        after: frozenset[str] = frozenset(),
        keeps: bool = False,
        changed: bool = False,
    ):
        self.rows: list[PassRun] = []
        self.states: list[dict[str, Program]] = []
        self._keeps, self._several = keeps, False
        self.noted: list[tuple[Pass, Program, Program | Programs]] = []
        self._before_all = before_all
        self._after_all = after_all
        self._after = after
        self._changed = changed

    def before(self, step: Step, program: Program) -> None:
        if self._keeps and not self.states:
            self.states.append({program.name: program})
        if self._before_all:
            _dump(f"before {step}", program)

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        programs = [produced for _, produced in named_programs(result)]
        left = sum(map(count_equations, programs))
        self.rows.append(PassRun(str(step), program.name, seconds, count_equations(program), left))
        if self._keeps:
            self._keep(program, result)
        assert isinstance(step.transform, Pass)
        if type(step.transform).notes is not Pass.notes:  # programs are large: keep few
            self.noted.append((step.transform, program, result))
        if self._after_all or type(step.transform).name in self._after:
            for produced in programs:
                _dump(f"after {step}", produced)

        if self._changed and result is not program:
            for produced in programs:
                _dump_changes(step, program, produced)

    def _keep(self, program: Program, result: Program | Programs) -> None:
        """Record the programs after a step, by the names in the pipeline."""
        programs: dict[str, Program] = {}
        for name, current in self.states[-1].items():
            if current is not program:
                programs[name] = current
            elif isinstance(result, Programs):
                prefix = f"{name}." if self._several else ""
                programs |= {prefix + part: part_program for part, part_program in result.items()}
            else:
                programs[name if self._several else result.name] = result
        self._several |= isinstance(result, Programs)
        self.states.append(programs)


def states(watcher: Watcher, programs: Sequence[tuple[str, Program]]) -> list[PageState]:
    """Return the programs as traced and after each pass."""
    from jaxprtool.render.page import PageState

    traced, *later = watcher.states or [dict(programs)]
    states = [PageState(traced, after=sum(map(count_equations, traced.values())))]
    for state, row in zip(later, watcher.rows, strict=True):
        which = f", {row.program}" if len(states[-1].programs) > 1 else ""
        counts = row.equations_before, row.equations_after
        states.append(PageState(state, row.step + which, row.seconds, *counts))
    return states


def write_notes(noted: Iterable[tuple[Pass, Program, Program | Programs]]) -> None:
    """Print the notes of passes on stderr."""
    from jaxprtool.commands.memory.estimate import outlined_memory
    from jaxprtool.commands.memory.table import memory_line

    for transform, before, after in noted:
        for note in transform.notes(before, after):
            if isinstance(note, str):
                output.note(f"{type(transform).name}: {note}")
            elif memory := outlined_memory(note.program):
                print_line = output.warning if memory.needs_warning else output.note
                print_line(f"{type(transform).name}: temporary memory is {memory_line(memory)}")


def _dump(when: str, program: Program) -> None:
    output.say(f"# {when}: {program.name}")
    output.write_listings([(program.name, program)], sys.stderr)
    output.say("")


def _dump_changes(step: Step, before: Program, after: Program) -> None:
    from jaxprtool.commands.diff.diff import diff
    from jaxprtool.commands.diff.table import diff_text

    differences = diff(before, after)
    if not differences.is_equivalent:
        output.say(f"# {step}")
        output.write_rendered(diff_text(differences, output.width(sys.stderr), None), sys.stderr)
        output.say("")


def merged(rows: list[PassRun]) -> list[PassRun]:
    """Merge the rows of consecutive passes that removed no equation of a program."""
    groups = groupby(rows, lambda row: (row.program, row.equations_before == row.equations_after))
    merged_rows: list[PassRun] = []
    for (_, is_same), group in groups:
        several = list(group)
        if not is_same or len(several) == 1:
            merged_rows += several
            continue
        step = f"{len(several)} that removed none"
        seconds = sum(row.seconds for row in several)
        merged_rows.append(several[0]._replace(step=step, seconds=seconds))
    return merged_rows


def write_rows(rows: list[PassRun], equations: bool, timing: bool) -> None:
    """Write a table of the rows: equations if `equations`, seconds if `timing`."""
    columns = ["pass", "program"]
    columns += ["equations before", "after", "removed"] if equations else []
    columns += ["seconds"] if timing else []
    table = []
    for row in rows:
        before, after = row.equations_before, row.equations_after
        cells = [row.step, row.program]
        cells += [str(n) for n in (before, after, before - after)] if equations else []
        table.append([*cells, f"{row.seconds:.4f}"] if timing else cells)
    if timing:
        total = sum(row.seconds for row in rows)
        table.append(["total", *[""] * (len(columns) - 2), f"{total:.4f}"])
    output.write_table(columns, table, right=columns[2:], stream=sys.stderr)
