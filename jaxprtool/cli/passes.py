"""`jaxprtool passes`: which passes and named pipelines there are, and the options of one pass."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.errors import PluginError

_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A pass, to show its options.",
        show_default=False,
        autocompletion=completion.complete_passes,
    ),
]


def passes(
    name: _Name = None,
    plugin: options.Plugin = None,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """List the passes and pipelines that a pipeline may name, or the options of a pass.

    [bold]Examples[/]

      jaxprtool passes
      jaxprtool passes dce
      jaxprtool passes --plugin my_passes.py
    """
    options.load_plugins(plugin)
    if name is None:
        _list_all(json)
    else:
        _show_one(name, json)


def _list_all(json: bool) -> None:
    from jaxprtool.passes import registry
    from jaxprtool.passes.base import summary
    from jaxprtool.passes.levels import levels

    found = []
    for source in registry.available().values():
        try:
            help_line = summary(source.load())
        except PluginError as error:
            output.warning(error.message)
            continue
        found.append({"name": source.name, "help": help_line, "origin": source.origin})
    pipelines = {f"-{name}": str(level) for name, level in levels.items()}
    if json:
        output.write_json({"passes": found, "pipelines": pipelines})
    else:
        rows = [(p["name"], p["help"], p["origin"]) for p in found]
        output.write_table(("pass", "what it does", "from"), rows)
        output.write("")
        output.write_table(("pipeline", "its passes"), list(pipelines.items()))


def _show_one(name: str, json: bool) -> None:
    from jaxprtool.passes import registry
    from jaxprtool.passes.base import options as options_of
    from jaxprtool.passes.base import summary

    cls = registry.find(name)
    origin = registry.available()[name].origin
    known: list[dict[str, Any]] = [
        {"name": o.name, "type": o.type_name, "default": None if o.required else repr(o.default)}
        for o in options_of(cls)
    ]
    if json:
        described: dict[str, Any] = {"name": name, "help": summary(cls), "origin": origin}
        output.write_json({"passes": [{**described, "options": known}]})
        return
    output.write(f"{name} (from {origin})\n{summary(cls)}\n")
    if known:
        rows = [(o["name"], o["type"], o["default"] or "must be given") for o in known]
        output.write("")
        output.write_table(("option", "type", "default"), rows)
