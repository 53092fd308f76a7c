"""`jaxprtool lint`: what costs memory or time for nothing, or makes results wrong."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command, only_program

_FINDINGS = Panel("Findings")

_Select = Annotated[
    Any,
    _FINDINGS.option(
        "--select",
        "CODE,…",
        "Look only for these codes, or those that begin so: JT1,JT602.",
        parser=options.names,
    ),
]
_Ignore = Annotated[
    Any,
    _FINDINGS.option(
        "--ignore", "CODE,…", "Do not look for these codes, likewise.", parser=options.names
    ),
]
_Top = Annotated[int | None, _FINDINGS.option("--top", "N", "Show the N worst findings.", min=1)]


@command
def lint(
    session: Session,
    select: _Select = None,
    ignore: _Ignore = None,
    top: _Top = None,
    json: options.Json = False,
) -> None:
    """Find what costs memory or time for nothing, or is wrong.

    Each finding has a code, your line, what it costs, and what to do; the worst come first. A
    comment silences it on its line, on the line below, or in the function whose def it is at:
    # jaxprtool: ignore, with the codes in brackets, or without for all. The exit code is 1 if
    anything is found.

    [bold]Examples[/]

      jaxprtool lint samples/transformer.py:loss
      jaxprtool lint samples/transformer.py:loss -p grad --select JT6,JT7
      jaxprtool lint jax.numpy:median --args "f32[4096]" --json
    """
    session.start()
    from jaxprtool.analysis.lint import lint as found_lint
    from jaxprtool.analysis.lint.table import chosen_rules
    from jaxprtool.render.reports import lint as render

    chosen_rules(select or (), ignore or ())  # report wrong codes before anything is loaded
    program = only_program("lint takes", session.programs())
    session.on_progress("looking for findings")
    found = found_lint(program, select or (), ignore or ())
    if json:
        output.write_json(found)
    else:
        output.write_rendered(render.findings_by_line(found, output.width(), top))
    if found.findings:
        raise typer.Exit(1)
