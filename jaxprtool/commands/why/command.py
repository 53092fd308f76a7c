"""`jaxprtool why`: what a value affects and depends on, paths between values, and gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, Panel
from jaxprtool.cli.session import (
    FunctionOptions,
    Session,
    command,
    only_program,
    printed_by_functions,
    ready,
)
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.commands.why.slices import Why
    from jaxprtool.ir.program import Program

_SLICE = Panel("Dependencies")


#: The formats of a slice.
Format = Literal["lines", "text", "tree", "dot"]

_What = Annotated[
    str | None,
    typer.Argument(
        metavar="WHAT",
        help="An argument by its path, such as params['w'], or params for all its leaves; a "
        "result; a line, model.py:30; or a variable, as named by show. The end of a path is "
        "enough if it is unique.",
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
_GRADIENT = Panel("Gradient")

_Gradient = Annotated[
    str | None,
    _GRADIENT.option(
        "--gradient",
        "ARG",
        "Show why the gradient with respect to ARG, or all arguments below it, is missing, zero or "
        "NaN instead.",
    ),
]
_To = Annotated[
    str | None,
    _GRADIENT.option("--to", "RESULT", "The result to differentiate, if several are scalars."),
]
_Seed = Annotated[
    int | None,
    _GRADIENT.option(
        "--seed", "N", "Seed of the random values of arguments given as types.", min=0
    ),
]
_Format = Annotated[
    Format | None,
    _SLICE.choice(
        "--format, -f",
        Format,
        "Show source lines, or the equations as a listing, a tree or a Graphviz picture.",
    ),
]
_Top = Annotated[int | None, options.top_option("20, or 6 with --gradient")]
_Full = Annotated[bool, OUTPUT.flag("--full", "Show the equations, as with --format text.")]


@command
def why_command(
    function: FunctionOptions,
    what: _What = None,
    forward: _Forward = False,
    back: _Back = False,
    path: _Path = None,
    gradient: _Gradient = None,
    to: _To = None,
    seed: _Seed = None,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    format: _Format = None,
    full: _Full = False,
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Show what a value affects, and why a gradient is zero.

    Values are followed through calls, loops, branches and refs. In each body, only the equations
    that they pass through are shown. --gradient shows why a gradient is zero, NaN or missing.

    [bold]Examples[/]

      jaxprtool why samples/transformer.py:loss "params['positions']"
      jaxprtool why samples/rnn.py:loss result --format tree
      jaxprtool why samples/transformer.py:loss --path tokens result
      jaxprtool why samples/transformer.py:loss --gradient params
    """
    rows = options.row_limit(top, all)
    others = {"WHAT": what, "--path": path, "--gradient": gradient}
    _check([name for name, value in others.items() if value is not None])
    if json and (format or full):
        raise OutputError("--json and --format cannot be combined")
    if what is None and (format or full or forward or back):
        mode = "--path" if path else "--gradient"
        raise OutputError(f"{mode} cannot be combined with --forward, --back, --format or --full")
    if (all or top is not None) and (full or format not in (None, "lines")):
        raise OutputError("--top and --all are for source lines, not for --format or --full")
    if gradient is None and (to is not None or seed is not None):
        raise OutputError(f"{'--to' if to is not None else '--seed'} needs --gradient ARG")
    function.start(cache=True if gradient else None)
    from jaxprtool.commands.why import table as render
    from jaxprtool.commands.why.slices import flow_path
    from jaxprtool.commands.why.slices import why as found_why
    from jaxprtool.commands.why.why_gradient import zero_gradient_flows

    session = Session(function, passes, plugin)
    if gradient is not None:
        _write_gradient(session, gradient, to, seed or 0, top, all, json)
        return
    traced = session.traced()
    program = only_program("why takes", session.programs(traced))
    session.on_progress("following values")
    if path is not None:
        way = flow_path(program, *path)
        if json:
            output.write_json(way)
        else:
            output.write_rendered(render.path_text(way, output.width(), rows))
        return
    assert what is not None
    asked = {"forward": forward, "back": back} if forward or back else {}
    answer = found_why(program, what, **asked)
    if json:
        output.write_json(answer)
    elif full or format not in (None, "lines"):
        _write_equations(program, answer, format or "text")
    else:
        output.write_rendered(render.slices_by_line(answer, output.width(), rows))
    if not json and answer.back is not None and not answer.back.arguments:
        for flow in zero_gradient_flows(traced.program, program, session.pipeline, answer.ends):
            output.write_text(render.gradient_sentence(flow, flow.argument))


def _check(names: Sequence[str]) -> None:
    """Raise OutputError unless exactly one of WHAT, --path and --gradient is given."""
    if len(names) != 1:
        fault = f"{' and '.join(names)} cannot be combined" if names else "WHAT is missing"
        hint = "give an argument, a result, a line or a variable; --path A B; or --gradient ARG"
        raise OutputError(fault, hint)


def _write_gradient(
    session: Session,
    argument: str,
    to: str | None,
    seed: int,
    top: int | None,
    all: bool,
    json: bool,
) -> None:
    """Write why a gradient is missing, zero or NaN."""
    from jaxprtool.commands.why.table import CAUSES, gradient_text
    from jaxprtool.commands.why.why_gradient import why_gradient

    traced = session.traced(runs=True)
    program = only_program("why takes", session.programs(traced))
    prepared = ready(traced.given_to(program), seed)
    with printed_by_functions(json):
        answer = why_gradient(
            prepared.program,
            argument,
            prepared.filled.arguments,
            to=to,
            on_progress=session.on_progress,
        )
    if answer.value is not None:
        prepared.note_random(session.target)
    if json:
        output.write_json(answer)
    else:
        output.write_rendered(
            gradient_text(answer, output.width(), options.row_limit(top, all, CAUSES))
        )


def _write_equations(program: Program, answer: Why, format: Format) -> None:
    """Write the equations of a slice, with a sentence for each direction."""
    from jaxprtool.commands.why.table import slices_with_sentences
    from jaxprtool.formats.pictures import dot

    slices = slices_with_sentences(answer)
    if format == "dot":
        members = frozenset[int]().union(*(body_slice.members for body_slice, _, _ in slices))
        ends = [
            end
            for body_slice, _, _ in slices
            for end in (*body_slice.arguments, *body_slice.results)
        ]
        output.write_text(dot(program, among=members, ends={*answer.ends, *ends}))
        return
    from jaxprtool.render.terminal.listing import ShowOptions, listing
    from jaxprtool.render.terminal.tree import tree

    for number, (body_slice, sentence, others) in enumerate(slices):
        shown = ShowOptions(
            width=output.width(),
            fit=sys.stdout.isatty(),
            among=body_slice.members,
            others=others,
            names=format == "tree",
        )
        output.write_text(f"{chr(10) if number else ''}# {sentence}")
        output.write_rendered((tree if format == "tree" else listing)(program, shown))
