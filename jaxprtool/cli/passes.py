"""`jaxprtool passes`: which passes and named pipelines there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.cli import options, output
from jaxprtool.errors import PluginError

if TYPE_CHECKING:
    from jaxprtool.render.documents import PassesDocument


@options.command
def passes(plugin: options.Plugin = None, json: options.Json = False) -> None:
    """List the passes and pipelines that a pipeline may name; `explain NAME` tells more of one.

    [bold]Examples[/]

      jaxprtool passes
      jaxprtool passes --plugin my_passes.py
    """
    options.load_plugins(plugin)
    from jaxprtool.passes import registry
    from jaxprtool.passes.base import summary
    from jaxprtool.passes.levels import levels

    document: PassesDocument = {
        "passes": [],
        "pipelines": {f"-{name}": str(level) for name, level in levels.items()},
    }
    for source in registry.available().values():
        try:
            help_line = summary(source.load())
        except PluginError as error:
            output.warning(error.message)
            continue
        document["passes"].append({"name": source.name, "help": help_line, "origin": source.origin})
    if json:
        output.write_json(document)
        return
    rows = [(p["name"], p["help"], p["origin"]) for p in document["passes"]]
    output.write_table(("pass", "what it does", "from"), rows)
    output.write("")
    output.write_table(("pipeline", "its passes"), list(document["pipelines"].items()))
