"""`jaxprtool cost`: where a function's FLOPs and bytes go, by the user's own lines."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.render.documents import CostDocument

_COUNTED = Panel("What is counted")


class By(StrEnum):
    """What the cost is grouped by."""

    line = "line"
    scope = "scope"
    primitive = "primitive"
    dtype = "dtype"
    argument = "argument"


_By = Annotated[
    By,
    _COUNTED.option(
        "--by",
        "<line|scope|primitive|dtype|argument>",
        "By your lines; by the scopes that modules open; by the arguments that are read.",
    ),
]
_Top = Annotated[int, _COUNTED.option("--top", "N", "Show the N dearest groups.", min=1)]
_Device = Annotated[
    str | None,
    _COUNTED.option(
        "--device",
        "NAME|FILE.toml",
        "The least time on a device, and what limits it: h200, h100, a100, l4, tpu-v5e, tpu-v5p, "
        "tpu-v6e, m3, or a file of its figures.",
    ),
]
_Seconds = Annotated[
    float | None,
    _COUNTED.option(
        "--seconds", "S", "How long it takes on the device: tells the utilisation.", min=1e-9
    ),
]


@options.command
def cost(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    by: _By = By.line,
    top: _Top = 20,
    device: _Device = None,
    seconds: _Seconds = None,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Show where a function's FLOPs and bytes go, without compiling it.

    Loops count each round, branches from the least to the most, calls at each call; bytes are those
    that go through memory once equations are fused.

    [bold]Examples[/]

      jaxprtool cost samples/transformer.py:loss -p grad
      jaxprtool cost samples/transformer.py:loss --by scope --device h100
      jaxprtool cost jax.numpy:matmul --args "f32[n,d], f32[d,d]"
    """
    if seconds is not None and device is None:
        raise OutputError("--seconds goes with --device, whose FLOPs it is held against")
    start_jax(told, function.x64)
    from jaxprtool.analysis.cost import cost as found_cost
    from jaxprtool.analysis.cost.devices import device_named
    from jaxprtool.cli import watch
    from jaxprtool.render import cost as render

    on = None if device is None else device_named(device)
    pipeline = options.pipeline(passes, plugin)
    program = function.trace(function.find(told), pipeline, told)
    programs = options.each(watch.run(pipeline, program, told))
    told("counting")
    found = [found_cost(each, by.value) for _, each in programs]
    if on is not None and any(map(render.symbols_in, found)):
        raise OutputError(
            "a time needs sizes that are numbers",
            'write them in --args, or -p "specialize(n=512)"',
        )
    if json:
        documents = [render.cost_document(each, on, seconds) for each in found]
        first = documents[0]
        document: CostDocument = {
            "total": first["total"],
            "groups": first["groups"],
            "programs": documents,
        }
        output.write_json(document)
        return
    for i, each in enumerate(found):
        if i:
            output.write("")
        output.write_rendered(render.cost_table(each, output.width(), top, on, seconds))
