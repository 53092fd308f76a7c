"""`jaxprtool explain`: what a pass, a named pipeline or a primitive is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.render.documents import (
        PassDocument,
        PipelineDocument,
        PrimitiveDocument,
        RewriteRule,
    )

_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A pass, a named pipeline (O1), or a primitive (scan; scan_p if a pass has its name).",
        show_default=False,
        autocompletion=completion.complete_passes,
    ),
]
_Level = Annotated[
    str | None,
    typer.Option("-O", metavar="LEVEL", help="A named pipeline: -O0, -O1, -O2 or -O3."),
]

#: What is shown in tables: the key of the explanation, the titles of the columns, and their keys.
_TABLES = (
    ("passes", ("pass", "when", "what it does"), ("name", "when", "help")),
    ("traits", ("trait", "value", "what it says"), ("name", "value", "text")),
    ("options", ("option", "type", "default"), ("name", "type", "default")),
    (
        "rules",
        ("equation", "replacement", "condition", "exact"),
        ("pattern", "replacement", "condition", "exact"),
    ),
)


@options.command
def explain(
    name: _Name = None,
    level: _Level = None,
    plugin: options.Plugin = None,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Explain a pass, its options and rules; a named pipeline; or what a primitive is like.

    [bold]Examples[/]

      jaxprtool explain simplify
      jaxprtool explain dot_general
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
    explanation: Any = _level(wanted) if wanted in levels else _pass_or_primitive(wanted, told)
    if json:
        output.write_json(explanation)
    else:
        _write(explanation)


def _level(name: str) -> PipelineDocument:
    from jaxprtool.passes import levels, registry
    from jaxprtool.passes.base import documentation, summary
    from jaxprtool.passes.pipeline import Pipeline

    level = levels.levels[name]
    parts = (("repeated", level.repeated), ("once, at the end", level.last))
    return {
        "name": f"-{name}",
        "text": documentation(levels),
        "passes": [
            {"name": str(step), "when": when, "help": summary(registry.find(step.transform.name))}
            for when, text in parts
            for step in Pipeline.parse(text).steps
        ],
    }


def _pass_or_primitive(name: str, told: Told) -> PassDocument | PrimitiveDocument:
    from jaxprtool.passes import registry

    if name in registry.available():
        return _pass(name)
    start_jax(told)
    from jaxprtool import jaxcompat

    primitives = jaxcompat.registered_primitives()
    for primitive in (name, name.removesuffix("_p")):
        if primitive in primitives:
            return _primitive(primitive)
    try:
        return _pass(name)  # one that was installed since, or the error
    except PipelineError as error:
        known = [*registry.available(), *primitives]
        raise PipelineError(error.message, did_you_mean(name, known) or error.hint) from None


def _primitive(name: str) -> PrimitiveDocument:
    from jaxprtool.ir import rules, traits
    from jaxprtool.passes.simplify import Simplify

    known = cast("list[RewriteRule]", Simplify.rules())
    return {
        "name": name,
        "text": "A primitive: the operation of an equation.",
        "traits": [
            {"name": trait, "value": repr(value), "text": text}
            for trait, (value, text) in traits.described(name).items()
        ],
        "tables": [
            table for table in rules.TABLES if rules.table_named(table).get(name) is not None
        ],
        "rules": [rule for rule in known if rule["pattern"].startswith(f"{name}(")],
    }


def _pass(name: str) -> PassDocument:
    from jaxprtool.passes import base, registry

    cls = registry.find(name)
    document: PassDocument = {
        "name": name,
        "text": base.documentation(cls),
        "origin": registry.available()[name].origin,
        "options": [
            {"name": o.name, "type": o.type_name, "default": o.default_text}
            for o in base.options(cls)
        ],
    }
    if hasattr(cls, "rules"):  # of a pass that works by rules
        document["rules"] = cls.rules()
    return document


def _write(explanation: dict[str, Any]) -> None:
    origin = f" (from {explanation['origin']})" if "origin" in explanation else ""
    output.write(f"{explanation['name']}{origin}\n\n")
    output.write_prose(explanation["text"])
    if explanation.get("tables"):
        output.write(f"It has rules of its own in: {', '.join(explanation['tables'])}")
    for key, titles, columns in _TABLES:
        rows = [
            ["must be given" if row[c] is None else row[c] for c in columns]
            for row in explanation.get(key, ())
        ]
        if rows:
            output.write("")
            output.write_table(titles, rows)
