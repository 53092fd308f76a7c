"""`jaxprtool shapecheck`: check the types of results for all sizes of the arguments."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import FUNCTION
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import FunctionOptions, Tracing, command

_Target = Annotated[
    str,
    options.target_argument(
        "TARGET",
        "The function, package.module:function or path/file.py:function; or file.jaxpr.",
    ),
]
_Arguments = Annotated[
    str,
    typer.Argument(
        metavar="ARGUMENTS",
        help='The types of the arguments, as in --args: "f32[n,d], i32[n]".',
        show_default=False,
    ),
]
_Results = Annotated[
    str,
    typer.Argument(
        metavar="RESULTS",
        help='The expected types of the results, with the same symbols: "f32[n,d]", or "(f32[n], '
        'f32[])".',
        show_default=False,
    ),
]


@command
def shapecheck_command(
    target: _Target,
    arguments: _Arguments,
    results: _Results,
    factory: Annotated[
        bool, FUNCTION.flag("--factory", "Call TARGET() to get the function.")
    ] = False,
    x64: Annotated[bool, FUNCTION.flag("--x64", "Enable JAX's 64-bit types.")] = False,
    json: options.Json = False,
    *,
    on_progress: OnProgress,
) -> None:
    """Check the types of results for all sizes of the arguments.

    If a result has another type, the error names the equation that causes it, and its line.

    [bold]Examples[/]

      jaxprtool shapecheck jax.nn:softmax "f32[n,d]" "f32[n,d]"
      jaxprtool shapecheck jax.numpy:outer "f32[n], f32[m]" "f32[n,m]"
      jaxprtool shapecheck jax.numpy:cumsum "f32[n,_], axis=static(0)" "f32[n,_]"
    """
    function = FunctionOptions(
        target, arguments, Tracing(factory=factory, x64=x64), on_progress=on_progress
    )
    function.start()
    from jaxprtool.passes import Pipeline
    from jaxprtool.sizes.shapecheck import check_claim

    program = function.trace(Pipeline()).program
    check_claim(program, results)
    if json:
        output.write_json(ClaimDocument(program.name, arguments, results))
    else:
        output.write_text(f"{program.name}: ({arguments}) -> {results}")


class ClaimDocument(NamedTuple):
    """Types of results that hold for all sizes.

    Attributes:
        function: The name of the function.
        arguments: The types of its arguments, as given.
        results: The types of its results, as given.
    """

    function: str
    arguments: str
    results: str
