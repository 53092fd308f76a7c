"""`jaxprtool explain`: all that a pass, or a named pipeline, has to say of itself."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.errors import PipelineError, did_you_mean

_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A pass, or a named pipeline: O1.",
        show_default=False,
        autocompletion=completion.complete_passes,
    ),
]
_Level = Annotated[
    str | None,
    typer.Option("-O", metavar="LEVEL", help="A named pipeline: -O0, -O1 or -O2."),
]

#: What is shown in tables: the key of the explanation, the titles of the columns, and their keys.
_TABLES = (
    ("passes", ("pass", "when", "what it does"), ("name", "when", "help")),
    ("options", ("option", "type", "default"), ("name", "type", "default")),
    (
        "rules",
        ("equation", "replacement", "condition", "exact"),
        ("pattern", "replacement", "condition", "exact"),
    ),
)


def explain(
    name: _Name = None,
    level: _Level = None,
    plugin: options.Plugin = None,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Explain a pass: what it does, its options, its rules; or a named pipeline: its passes.

    [bold]Examples[/]

      jaxprtool explain simplify
      jaxprtool explain dce
      jaxprtool explain -O1
    """
    from jaxprtool.passes.levels import levels

    options.load_plugins(plugin)
    wanted = f"O{level}" if level is not None else (name or "").removeprefix("-")
    if level is not None and wanted not in levels:
        known = ", ".join(f"-{each}" for each in levels)
        raise PipelineError(f"'-{wanted}' is no pipeline", f"there are: {known}")
    if not wanted:
        raise PipelineError("explain wants a pass", "`jaxprtool passes` lists those there are")
    if level is not None and name is not None:
        raise PipelineError(
            f"explain takes one name, not '{name}' and '-{wanted}'", did_you_mean(name, levels)
        )
    explanation = _level(wanted) if wanted in levels else _pass(wanted)
    if json:
        output.write_json(explanation)
    else:
        _write(explanation)


def _level(name: str) -> dict[str, Any]:
    from jaxprtool.passes import levels, registry
    from jaxprtool.passes.base import summary
    from jaxprtool.passes.pipeline import Pipeline

    level = levels.levels[name]
    passes = [
        {
            "name": str(step),
            "when": when,
            "help": summary(registry.find(step.transform.name)),
        }
        for when, text in (("repeated", level.repeated), ("once, at the end", level.last))
        for step in Pipeline.parse(text).steps
    ]
    return {"name": f"-{name}", "text": _text(levels), "passes": passes}


def _pass(name: str) -> dict[str, Any]:
    from jaxprtool.passes import registry
    from jaxprtool.passes.base import options as options_of

    cls = registry.find(name)
    known = [
        {"name": o.name, "type": o.type_name, "default": None if o.required else repr(o.default)}
        for o in options_of(cls)
    ]
    text = "\n\n".join(filter(None, (_text(cls), _text(sys.modules.get(cls.__module__)))))
    # A pass that works by rules says which they are.
    rules = {"rules": cls.rules()} if hasattr(cls, "rules") else {}
    return {"name": name, "text": text, "options": known, **rules}


def _text(what: Any) -> str:
    return inspect.getdoc(what) or ""


def _write(explanation: dict[str, Any]) -> None:
    output.write(f"{explanation['name']}\n\n{explanation['text']}\n")
    for key, titles, columns in _TABLES:
        rows = [
            ["must be given" if row[c] is None else row[c] for c in columns]
            for row in explanation.get(key, ())
        ]
        if rows:
            output.write("")
            output.write_table(titles, rows)
