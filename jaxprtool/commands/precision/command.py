"""`jaxprtool precision`: the places that have to stay in f32."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.running import printed_by_functions, require_device
from jaxprtool.cli.session import Session, command

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
    from jaxprtool.commands.precision.table import option_text, precision_text

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
