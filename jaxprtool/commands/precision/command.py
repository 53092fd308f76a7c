"""`jaxprtool precision`: the places that have to stay in f32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.session import Session, command, printed_by_functions, require_device
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.notation import BinderToken
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, facts_table
from jaxprtool.render.views import Cell, Column, Row, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.commands.compare.variants import KeptPlace, Precision

# --- table ----------------------------------------------------------------------------------------
# Places that stay in the wide dtype, as text.

#: The heading of the table.
_ERRORS = "error relative to the tolerance, if narrow"


#: The width of the columns with errors, and of the spaces between columns.
_ERRORS_WIDTH = 30


def precision_text(choice: Precision, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return the places to keep, their errors, and what the pass saves.

    Args:
        choice: The places.
        width: The width in characters.
        top: The number of places shown; None for all.
    """
    parts: list[RenderableType] = [Text(heading(choice), style=tables.HEADING), Text()]
    if choice.kept:
        columns = *map(number_column, ("alone", "with others")), Column(f"{choice.by} to keep")
        rows: list[Row] = []
        for place in choice.kept:
            errors = ratio_text(place.error), ratio_text(place.without)
            code = _fitting(place, width)
            name = [BinderToken(place.name), f"  {code}" if code else ""]
            rows.append([*errors, Cell(name)])
        parts += [drawn(Table(_ERRORS, columns, rows), top), Text()]
    parts.append(facts_table(_facts(choice)))
    return Rendering(Group(*parts), width)


def option_text(choice: Precision, passes: str) -> str:
    """Return the option `-p` with the pass, after the passes that ran before it."""
    return f'-p "{passes}, {choice.pipeline}"' if passes else f'-p "{choice.pipeline}"'


def heading(choice: Precision) -> str:
    """Return the result on one line."""
    places = plural(choice.places, choice.by)
    if not choice.within:
        return f"{choice.name}: no choice of {places} to keep is within tolerance"
    if not choice.kept:
        return f"{choice.name}: {'all ' if choice.places > 1 else ''}{places} can be {choice.dtype}"
    verb = "stays" if len(choice.kept) == 1 else "stay"
    if len(choice.kept) == choice.places:
        return f"{choice.name}: no {choice.by} can be {choice.dtype}; {places} {verb} wide"
    return (
        f"{choice.name}: {len(choice.kept)} of {places} {verb} wide, "
        f"the others can be {choice.dtype}"
    )


def ratio_text(ratio: float) -> str:
    """Return an error relative to the tolerated one: `0.42x`."""
    return "inf" if math.isinf(ratio) else f"{ratio:.2g}x"


def _fitting(place: KeptPlace, width: int) -> str:
    """Return the code of a place, as much of it as fits in its row."""
    room = max(0, width - _ERRORS_WIDTH - len(place.name))
    return place.code if len(place.code) <= room else f"{place.code[: room - 1]}…" if room else ""


def _facts(choice: Precision) -> Iterator[tuple[str, str]]:
    tolerance = (
        f"{choice.rtol:g}" if choice.atol is None else f"{choice.atol:g} + {choice.rtol:g} |x|"
    )
    if choice.failure:
        yield "failure", choice.failure
    nothing = "" if not choice.kept else f"; with nothing kept {ratio_text(choice.narrow_error)}"
    yield "error", f"{ratio_text(choice.error)} the tolerance of {tolerance}{nothing}"
    fresh = f", checked on {choice.checked} more" if choice.checked else ""
    searched = plural(choice.searched, "input")
    yield (
        "inputs",
        f"{searched} ({choice.inputs}){fresh}; {plural(choice.runs, 'program')} tried",
    )
    before, after = choice.before, choice.after
    yield "peak", _change(before.peak_bytes, after.peak_bytes)
    yield "traffic", _change(before.bytes, after.bytes)
    if after.flops:
        yield "FLOPs", f"{after.narrow_flops / after.flops:.0%} in {choice.dtype}"


def _change(before: int, after: int) -> str:
    change = f" ({after / before - 1:+.0%})" if before else ""
    return f"{in_bytes(before)} → {in_bytes(after)}{change}"


# --- command --------------------------------------------------------------------------------------
# `jaxprtool precision`: the places that have to stay in f32.

_SEARCH = Panel("Search")

#: The dtypes to compute in.
Dtype = Literal["bfloat16", "float16", "float32"]

#: The kinds of places.
By = Literal["line", "scope"]

_Dtype = Annotated[
    Dtype,
    _SEARCH.choice("--dtype", Dtype, "The narrow dtype. float32 is for programs in float64."),
]
_By = Annotated[By, _SEARCH.choice("--by", By, "Keep source lines, or module scopes.")]
_Rtol = Annotated[
    float | None,
    _SEARCH.option(
        "--rtol",
        "ERROR",
        "Relative tolerance. Default: 1e-2 for bf16, 1e-3 for f16, of an element or of the root "
        "mean square of its array.",
        min=0,
    ),
]
_Atol = Annotated[
    float | None,
    _SEARCH.option("--atol", "ERROR", "Absolute tolerance, also without --rtol.", min=0),
]
_Trials = Annotated[
    int,
    RUN.option("--trials", "N", "Search on N random inputs; all must be within tolerance.", min=1),
]


@command
def precision_command(
    session: Session,
    types: options.Types = None,
    dtype: _Dtype = "bfloat16",
    by: _By = "line",
    rtol: _Rtol = None,
    atol: _Atol = None,
    seed: options.Seed = 0,
    trials: _Trials = 1,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Find the lines that have to stay in f32.

    Search for a smallest set of lines: with one line fewer in f32, a result is out of tolerance.
    The search runs the program with different sets. The resulting pass,
    mixed_precision(keep=[[…]]), is checked on other random inputs. Exit code 1 if no set is within
    tolerance.

    [bold]Examples[/]

      jaxprtool precision samples/transformer.py:loss
      jaxprtool precision samples/rnn.py:loss -p grad --dtype float16
      jaxprtool precision samples/transformer.py:loss --by scope --trials 2
    """
    rows = options.row_limit(top, all)
    session.start(cache=True)
    from jaxprtool.commands.compare.variants import Tolerance
    from jaxprtool.commands.precision.precision import PrecisionRequest, found_precision

    require_device(session.function, None)
    request = PrecisionRequest(dtype, by, Tolerance(rtol, atol), seed, trials)
    inputs = session.given("precision takes", types)
    with printed_by_functions(json):
        result = found_precision(inputs, request, session.on_progress)
    if json:
        output.write_json(result)
    else:
        output.write_rendered(precision_text(result, output.width(), rows))
        output.write_text(f"\n{option_text(result, str(session.pipeline))}")
    if not result.within:
        raise typer.Exit(1)
