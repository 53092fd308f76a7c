"""`jaxprtool why`: what a value affects, what it depends on, and paths between values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, Panel
from jaxprtool.cli.session import Function, Session, command, only_program
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.analysis.slices import Why
    from jaxprtool.ir.programs.program import Program

_SLICE = Panel("Dependencies")


#: The formats of a slice.
Format = Literal["lines", "text", "tree", "dot"]

_What = Annotated[
    str | None,
    typer.Argument(
        metavar="WHAT",
        help="An argument by its path, such as params['w'], or params for all below it; a result; "
        "a line, model.py:30; or a variable, as named by show.",
        show_default=False,
    ),
]
_Forward = Annotated[
    bool, _SLICE.flag("--forward", "Show what WHAT affects. Default, unless WHAT is a result.")
]
_Back = Annotated[
    bool, _SLICE.flag("--back", "Show what WHAT depends on. Default, unless WHAT is an argument.")
]
_Path = Annotated[
    tuple[str, str] | None,
    _SLICE.option("--path", "A B", "Show the shortest chain of equations from A to B instead."),
]
_Format = Annotated[
    Format | None,
    _SLICE.choice(
        "--format, -f",
        Format,
        "Show source lines, or the equations as a listing, a tree or a Graphviz picture.",
    ),
]
_Full = Annotated[bool, OUTPUT.flag("--full", "Show the equations, as with --format text.")]


@command
def why(
    function: Function,
    what: _What = None,
    forward: _Forward = False,
    back: _Back = False,
    path: _Path = None,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    format: _Format = None,
    full: _Full = False,
    json: options.Json = False,
) -> None:
    """Show what an argument affects, or what a result depends on, by source line.

    Values are followed through calls, loops, branches and refs. In each body, only the equations
    that they pass through are shown.

    [bold]Examples[/]

      jaxprtool why samples/transformer.py:loss "params['positions']"
      jaxprtool why samples/rnn.py:loss result --format tree
      jaxprtool why samples/transformer.py:loss --path tokens result
    """
    if (what is None) == (path is None):
        fault = "WHAT and --path cannot be combined" if path else "WHAT is missing"
        raise OutputError(fault, "give an argument, a result, a line or a variable; or --path A B")
    if json and (format or full):
        raise OutputError("--json and --format cannot be combined")
    if path and (format or full or forward or back):
        raise OutputError("--path cannot be combined with --forward, --back, --format or --full")
    function.start()
    from jaxprtool.analysis.flow_paths import flow_path
    from jaxprtool.analysis.slices import why as found_why
    from jaxprtool.api.functions.gradients import zero_gradients
    from jaxprtool.render.reports import why as render

    session = Session(**vars(function), passes=passes, plugin=plugin)
    traced = session.traced()
    program = only_program("why takes", session.programs(traced))
    session.on_progress("following values")
    if path is not None:
        way = flow_path(program, *path)
        if json:
            output.write_json(way)
        else:
            output.write_rendered(render.path_text(way, output.width()))
        return
    assert what is not None
    asked = {"forward": forward, "back": back} if forward or back else {}
    found = found_why(program, what, **asked)
    if json:
        output.write_json(found)
    elif full or format not in (None, "lines"):
        _write_equations(program, found, format or "text")
    else:
        output.write_rendered(render.slices_by_line(found, output.width()))
    if not json and found.back is not None and not found.back.arguments:
        for flow in zero_gradients(traced.program, program, session.pipeline, found.ends):
            output.write(render.gradient_sentence(flow, flow.argument))


def _write_equations(program: Program, found: Why, format: Format) -> None:
    """Write the equations of a slice, with a sentence for each direction."""
    from jaxprtool.formats.dot import dot
    from jaxprtool.render.reports.why import slices_with_sentences

    slices = slices_with_sentences(found)
    if format == "dot":
        members = frozenset[int]().union(*(each.members for each, _, _ in slices))
        ends = [end for each, _, _ in slices for end in (*each.arguments, *each.results)]
        output.write(dot(program, among=members, ends={*found.ends, *ends}))
        return
    from jaxprtool.render.terminal.listing import listing
    from jaxprtool.render.terminal.rendering import ShowOptions
    from jaxprtool.render.terminal.tree import tree

    for number, (each, sentence, others) in enumerate(slices):
        shown = ShowOptions(
            width=output.width(),
            fit=sys.stdout.isatty(),
            among=each.members,
            others=others,
            names=format == "tree",
        )
        output.write(f"{chr(10) if number else ''}# {sentence}")
        output.write_rendered((tree if format == "tree" else listing)(program, shown))
