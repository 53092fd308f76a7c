"""`jaxprtool source`: the user's own files, with what each line costs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.cost import Device
from jaxprtool.cli.options import OUTPUT, Panel
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.render.documents.found import SourceDocument

_Residuals = Annotated[
    bool | None,
    Panel("What is counted").option(
        "--residuals/--no-residuals",
        "",
        "The bytes that each line keeps for the gradient, or not: of what gives one float, yes.",
    ),
]
_Full = Annotated[bool, OUTPUT.flag("--full", "Whole files, not the lines that matter alone.")]


@options.command
def source(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    residuals: _Residuals = None,
    device: Device = None,
    full: _Full = False,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Show your files with what each line costs beside it: FLOPs, bytes, what a gradient keeps.

    The forward and the backward part of a gradient are told apart. Nothing is compiled.

    [bold]Examples[/]

      jaxprtool source samples/transformer.py:loss
      jaxprtool source samples/transformer.py:loss -p grad --device h100
    """
    start_jax(told, function.x64)
    from jaxprtool.analysis.cost.devices import device_named, timed
    from jaxprtool.api.source import source as found_source
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.render import source as render
    from jaxprtool.render.cost import is_symbolic

    on = None if device is None else device_named(device)
    pipeline = options.pipeline(passes, plugin)
    program = function.trace(function.find(told), pipeline, told)
    programs = options.each(pipeline_steps.run(pipeline, program, told))
    told("counting")
    found = [found_source(each, residuals=residuals) for _, each in programs]
    for each in found:
        if on is not None and is_symbolic(each.total):
            raise OutputError(
                "a time needs sizes that are numbers",
                'write them in --args, or -p "specialize(n=512)"',
            )
        if not each.files:
            raise OutputError(
                f"no line of your files is known of the equations of {each.name}",
                "`jaxprtool cost --by primitive` counts without lines",
            )
    if on is not None:
        found = list(timed(tuple(found), on))
    if json:
        document: SourceDocument = {"programs": found}
        output.write_json(document)
        return
    for i, each in enumerate(found):
        if i:
            output.write("")
        output.write_rendered(render.source_text(each, output.width(), full, on))
