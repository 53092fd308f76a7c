"""`jaxprtool lint`: wasted memory and time, and likely mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.app import write_problems
from jaxprtool.cli.completion import TableReader, nearest_file, tool_table
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command
from jaxprtool.errors import ArgumentsError, JaxprToolError, TargetError
from jaxprtool.ir.documents import plural

if TYPE_CHECKING:
    from jaxprtool.commands.lint.lint import Findings
    from jaxprtool.ir.program import Program

_FINDINGS = Panel("Findings")

#: The maximum number of functions of a run that are named because they were compiled again.
_MOST_RECOMPILED = 3

_Select = Annotated[
    Any,
    _FINDINGS.option(
        "--select",
        "CODE,…",
        "Report only these codes, or codes with these prefixes: JT1,JT602.",
        parser=options.names,
    ),
]
_Ignore = Annotated[
    Any,
    _FINDINGS.option(
        "--ignore", "CODE,…", "Do not report these codes or prefixes.", parser=options.names
    ),
]


@command
def lint_command(
    session: Session,
    select: _Select = None,
    ignore: _Ignore = None,
    format: options.Format = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Find wasted memory and time, and likely mistakes.

    Each finding has a code, your line, what it costs, and what to do. The worst come first. To
    silence a finding, write # jaxprtool: ignore[JT101] on its line, on the line above, or at the
    def of its function; without codes, this silences all. If TARGET is the folder of a recorded
    run, all its programs are checked together. The exit code is 1 if anything is found.

    [bold]Examples[/]

      jaxprtool lint samples/transformer.py:loss
      jaxprtool lint samples/transformer.py:loss -p grad --select JT6,JT7
      jaxprtool lint jax.numpy:median --args "f32[4096]" --json
    """
    chosen, rows = options.chosen_format(format, json), options.row_limit(top, all)
    session.start()
    from jaxprtool.commands.lint import table as render
    from jaxprtool.commands.lint.lint import chosen_rules
    from jaxprtool.commands.lint.table import finding_problem
    from jaxprtool.recording.folder import recorded_run
    from jaxprtool.recording.read import read_run
    from jaxprtool.recording.reasons import recompile_advice

    if select is None and ignore is None:
        select, ignore = configured_codes()
    chosen_rules(select or (), ignore or ())  # report wrong codes before anything is loaded
    run = recorded_run(session.target)
    if run is not None:
        findings = _of_run(run, session, select or (), ignore or ())
    else:
        findings = _of_programs(session, select or (), ignore or ())
    findings = findings.on(lambda name: session.target if run is None else f"{run}/{name}")
    if chosen == "json":
        output.write_json(findings)
    elif chosen == "text":
        output.write_rendered(render.findings_by_line(findings, output.width(), rows))
    else:
        write_problems(
            [finding_problem(finding) for finding in findings.findings[:top]], chosen, codes_about()
        )
    if run is not None:
        for advice in recompile_advice(read_run(run).functions)[:_MOST_RECOMPILED]:
            output.note(advice)
    if findings.findings:
        raise typer.Exit(1)


def codes_about() -> dict[str, str]:
    """Return the descriptions of the codes of findings."""
    from jaxprtool.commands.lint.lint import all_rules

    return {rule.code: rule.about for rule in all_rules()}


def configured_codes() -> tuple[Sequence[str], Sequence[str]]:
    """Return the codes to select and to ignore of the nearest pyproject.toml."""
    path = nearest_file()
    if path is None:
        return (), ()
    reader = TableReader(path)
    codes = lint_codes(reader, tool_table(path).get("jaxprtool", {}))
    reader.require_no_mistakes()
    return codes.get("select", ()), codes.get("ignore", ())


def lint_codes(reader: TableReader, section: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the codes of `[tool.jaxprtool.lint]`."""
    where = "tool.jaxprtool.lint"
    table = reader.table(where, section.get("lint", {}))
    reader.known(where, table, ["select", "ignore"])
    return codes_in(reader, where, table)


def codes_in(
    reader: TableReader, where: str, table: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the codes to select and to ignore in a table."""
    from jaxprtool.commands.lint.lint import chosen_rules

    codes = {}
    for key in ("select", "ignore"):
        if key in table:
            codes[key] = reader.texts(where, table, key)
            reader.read(where, key, chosen_rules, codes[key])
    return codes


def _of_programs(session: Session, select: Iterable[str], ignore: Iterable[str]) -> Findings:
    """Return the findings in the program of TARGET, or in those that its passes return."""
    from jaxprtool.commands.lint.lint import lint, lint_programs

    programs = session.programs()
    session.on_progress("looking for findings")
    if len(programs) == 1:
        return lint(programs[0][1], select, ignore)
    return lint_programs(session.target, programs, select, ignore)


def require_whole(run: str, session: Session) -> None:
    """Raise ArgumentsError for options that do not apply to a recorded run of programs."""
    settings = {
        "-p": session.passes,
        "--args": session.function.args,
        "--mesh": session.function.tracing.mesh,
    }
    for option in (option for option, value in settings.items() if value):
        hint = f"give the name of one program: {run}/NAME"
        raise ArgumentsError(f"{option} does not apply to a recorded run of programs", hint)


def _of_run(run: str, session: Session, select: Iterable[str], ignore: Iterable[str]) -> Findings:
    """Return the findings in all programs of a run; print a note on unreadable programs."""
    from jaxprtool.commands.lint.lint import lint_programs
    from jaxprtool.recording.read import every_program

    require_whole(run, session)
    failed: dict[str, JaxprToolError] = {}

    def programs() -> Iterator[tuple[str, Program]]:
        for name, program in every_program(run, failed.__setitem__):
            session.on_progress(f"looking for findings in {name}")
            yield name, program

    findings = lint_programs(run, programs(), select, ignore)
    if not findings.programs and not failed:
        raise TargetError(f"'{run}' is a recorded run without programs: nothing was compiled")
    if failed:
        name, error = next(iter(failed.items()))
        count = plural(len(failed), "program")
        output.note(f"{count} cannot be read: {name}: {error}")
    return findings
