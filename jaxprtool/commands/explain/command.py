"""`jaxprtool explain`: descriptions of passes, named pipelines and primitives."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from json import loads
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.launch import start_jax
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import command, load_plugins
from jaxprtool.errors import ArgumentsError, PipelineError, PluginError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.commands.explain.explanation import (
        LintRuleDocument,
        PassDocument,
        PassSummary,
        PipelineDocument,
        PrimitiveDocument,
    )
    from jaxprtool.render.terminal.tables import Rendering

    _Explanation: TypeAlias = PassDocument | PipelineDocument | PrimitiveDocument | LintRuleDocument


_Full = Annotated[bool, options.OUTPUT.flag("--full", "Show all rules, on a terminal too.")]
_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A pass, a named pipeline (O1), a primitive (scan; scan_p if a pass has the same "
        "name), or a code of lint (JT602).",
        show_default=False,
        autocompletion=completion.complete_passes,
    ),
]
_Level = Annotated[
    str | None,
    typer.Option("-O", metavar="LEVEL", help="A named pipeline: -O0, -O1, -O2 or -O3."),
]


_Schema = Annotated[
    str | None,
    options.OUTPUT.option(
        "--schema", "COMMAND", "Print the JSON Schema of what COMMAND prints with --json."
    ),
]


@command
def explain_command(
    name: _Name = None,
    level: _Level = None,
    schema: _Schema = None,
    plugin: options.Plugin = None,
    json: options.Json = False,
    full: _Full = False,
    *,
    on_progress: OnProgress,
) -> None:
    """List the passes; describe a pass, a pipeline, a primitive or a lint code.

    Without NAME, list the passes and the named pipelines.

    [bold]Examples[/]

      jaxprtool explain
      jaxprtool explain simplify
      jaxprtool explain dot_general
      jaxprtool explain -O1
      jaxprtool explain JT602
      jaxprtool explain --schema cost
    """
    if schema is not None:
        output.write_text(schema_text(schema))
        return
    from jaxprtool.passes.framework import levels

    load_plugins(plugin)
    described = {} if plugin else descriptions()
    wanted = f"O{level}" if level is not None else (name or "").removeprefix("-")
    if level is not None and wanted not in levels:
        available = ", ".join(f"-{other}" for other in levels)
        raise PipelineError(f"'-{wanted}' is not a pipeline", f"available: {available}")
    if level is not None and name is not None:
        raise PipelineError(
            f"explain takes one name, not '{name}' and '-{wanted}'", did_you_mean(name, levels)
        )
    if not wanted:
        write_passes(described, json)
        return
    if _LINT_CODE.fullmatch(wanted):
        explanation: _Explanation = _lint_rule(wanted.upper())
    elif wanted in levels:
        explanation = described.get(f"-{wanted}") or _level(wanted)
    elif (own := described.get(wanted)) is not None and _is_own(wanted):
        explanation = own
    else:
        explanation = _pass_or_primitive(wanted, on_progress)
    if json:
        output.write_json(explanation)
    else:
        output.write_rendered(_rendered(explanation, full or not sys.stdout.isatty()))


def schema_text(command: str) -> str:
    """Return the JSON Schema of the documents of a command.

    Raises:
        ArgumentsError: If there is no such command, or it has no documents.
    """
    folder = files("jaxprtool.commands.explain") / "schemas"
    available = sorted(path.name.removesuffix(".json") for path in folder.iterdir())
    if command not in available:
        hint = did_you_mean(command, available) or f"available: {', '.join(available)}"
        raise ArgumentsError(f"'{command}' is no command with --json", hint)
    return (folder / f"{command}.json").read_text().rstrip()


def _rendered(document: _Explanation, full: bool) -> Rendering:
    from jaxprtool.commands.explain import explanation
    from jaxprtool.commands.explain import explanation as documents

    width = output.width()
    if isinstance(document, documents.PipelineDocument):
        return explanation.pipeline_explanation(document, width)
    if isinstance(document, documents.LintRuleDocument):
        return explanation.lint_rule_explanation(document, width)
    if isinstance(document, documents.PrimitiveDocument):
        return explanation.primitive_explanation(document, width, full)
    return explanation.pass_explanation(document, width, full)


#: A code of lint, of ours or of a plug-in.
_LINT_CODE = re.compile(r"[A-Za-z]{2,}\d{3}")


def _lint_rule(code: str) -> LintRuleDocument:
    from jaxprtool.commands.explain import explanation as documents
    from jaxprtool.commands.lint.lint import all_rules

    rules = {rule.code: rule for rule in all_rules()}
    if code not in rules:
        raise PipelineError(
            f"no rule of lint has the code {code}",
            did_you_mean(code, rules) or f"available: {', '.join(rules)}",
        )
    rule = rules[code]
    bad, good = (text.partition("\n\n")[2].strip("\n") for text in (rule.bad, rule.good))
    return documents.LintRuleDocument(code, rule.name, rule.about, rule.kind, bad, good)


def _level(name: str) -> PipelineDocument:
    from jaxprtool.commands.explain import explanation as documents
    from jaxprtool.passes import framework
    from jaxprtool.passes.framework import Pipeline, levels, pass_summary

    level = levels[name]
    parts = (("repeated", level.repeated), ("once, at the end", level.last))
    steps = [
        documents.PipelineStep(
            str(step), when, pass_summary(framework.find_pass(step.transform.name))
        )
        for when, text in parts
        for step in Pipeline.parse(text).steps
    ]
    return documents.PipelineDocument(f"-{name}", level.help, steps)


def _pass_or_primitive(name: str, on_progress: OnProgress) -> _Explanation:
    from jaxprtool.passes import framework

    if name in framework.available():
        return _pass(name)
    start_jax(on_progress)
    from jaxprtool import jaxcompat

    primitives = jaxcompat.registered_primitives()
    for primitive in (name, name.removesuffix("_p")):
        if primitive in primitives:
            return _primitive(primitive)
    try:
        return _pass(name)  # one installed since, or raises the error
    except PipelineError as error:
        names = [*framework.available(), *primitives]
        raise PipelineError(error.message, did_you_mean(name, names) or error.hint) from None


def _primitive(name: str) -> PrimitiveDocument:
    from jaxprtool import extend
    from jaxprtool.commands.explain import explanation as documents
    from jaxprtool.ir import traits
    from jaxprtool.passes.cleanup.simplify import Simplify

    return documents.PrimitiveDocument(
        name,
        "A primitive: the operation of an equation.",
        [
            documents.Trait(trait, repr(value), text)
            for trait, (value, text) in traits.described_traits(name).items()
        ],
        [table for table in extend.TABLES if extend.table_named(table).get(name) is not None],
        [
            documents.RewriteRule(**rule)
            for rule in Simplify.rules()
            if rule["pattern"].startswith(f"{name}(")
        ],
    )


def _pass(name: str) -> PassDocument:
    from jaxprtool.commands.explain import explanation as documents
    from jaxprtool.commands.explain.explanation import documentation
    from jaxprtool.passes import framework

    cls = framework.find_pass(name)
    said = documentation(cls)
    return documents.PassDocument(
        name,
        said.text,
        cls.group,
        framework.available()[name].origin,
        _pipelines(name),
        [
            documents.Option(
                "NAME, …" if option.name == cls.more_options else option.name,
                option.type_name,
                option.default_text,
                said.parameters.get(option.name, ""),
            )
            for option in framework.pass_options(cls)
        ],
        said.raises,
        [documents.Section(*section) for section in said.sections.items()],
        [documents.RewriteRule(**rule) for rule in cls.rules()] if hasattr(cls, "rules") else None,
    )


# --- written descriptions -------------------------------------------------------------------------
# Our own passes and pipelines are described in a file, since their classes import JAX. A plug-in
# may add rules, passes and pipelines: with one, or for its passes, the classes are asked.

#: The documents of our passes and pipelines. `python -m tests.documentation.json_page` writes it.
_DESCRIPTIONS = "passes.json"


def descriptions() -> dict[str, PassDocument | PipelineDocument]:
    """Return the documents of our passes by name, and of the pipelines by `-O1`."""
    from jaxprtool.commands.explain import explanation as documents

    text = (files("jaxprtool.commands.explain") / _DESCRIPTIONS).read_text()
    described: dict[str, PassDocument | PipelineDocument] = {}
    for document in loads(text):
        if "passes" in document:
            steps = [documents.PipelineStep(**step) for step in document.pop("passes")]
            described[document["name"]] = documents.PipelineDocument(**document, passes=steps)
            continue
        options = [documents.Option(**option) for option in document.pop("options")]
        sections = [documents.Section(**section) for section in document.pop("sections")]
        rules = document.pop("rules")
        described[document["name"]] = documents.PassDocument(
            **document,
            options=options,
            sections=sections,
            rules=rules and [documents.RewriteRule(**rule) for rule in rules],
        )
    return described


def described_afresh() -> list[PassDocument | PipelineDocument]:
    """Return what `descriptions` must return, from the classes of the passes."""
    from jaxprtool.passes import framework

    own = [_pass(name) for name in framework.available() if _is_own(name)]
    return [*own, *map(_level, framework.levels)]


def _is_own(name: str) -> bool:
    from jaxprtool.passes import framework

    source = framework.available().get(name)
    return source is not None and source.origin == "jaxprtool"


def _pipelines(name: str) -> list[str]:
    """Return the named pipelines that contain a pass."""
    from jaxprtool.passes.framework import Pipeline, levels

    return [
        f"-{level}"
        for level, passes in levels.items()
        for text in (passes.repeated, passes.last)
        if name in {step.transform.name for step in Pipeline.parse(text).steps}
    ]


# --- passes ---------------------------------------------------------------------------------------
# The list of passes and named pipelines, as `jaxprtool explain` without a name shows it.

#: The groups of built-in passes, in listing order; plug-ins may add others.
_GROUPS = "clean up", "transform", "split", "schedule and compile"


def write_passes(
    described: Mapping[str, PassDocument | PipelineDocument], json: bool = False
) -> None:
    """Write the passes by group, and the named pipelines.

    Args:
        described: The documents of some passes; the classes of the others are imported.
        json: Write a document.
    """
    from jaxprtool.commands.explain.explanation import PassDocument, PassesDocument, PassSummary
    from jaxprtool.passes import framework
    from jaxprtool.passes.framework import levels, pass_summary

    pipelines = {f"-{name}": str(level) for name, level in levels.items()}
    summaries = []
    for source in framework.available().values():
        known = described.get(source.name)
        if isinstance(known, PassDocument) and source.origin == "jaxprtool":
            first = known.text.partition("\n")[0]
            summaries.append(PassSummary(source.name, first, known.group, source.origin))
            continue
        try:
            cls = source.load()
        except PluginError as error:
            output.warning(error.message)
            continue
        summaries.append(PassSummary(source.name, pass_summary(cls), cls.group, source.origin))
    if json:
        output.write_json(PassesDocument(summaries, pipelines))
        return
    _write_groups({**_grouped(summaries), "pipelines": list(pipelines.items())})


def _grouped(passes: list[PassSummary]) -> dict[str, list[tuple[str, str]]]:
    """Return names and help of passes by group, with ungrouped passes last."""
    groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS}
    for entry in sorted(passes, key=lambda entry: not entry.group):
        title = entry.group or f"from {entry.origin}"
        origin = f" ({entry.origin})" if entry.group and entry.origin != "jaxprtool" else ""
        groups.setdefault(title, []).append((entry.name, entry.help + origin))
    return groups


def _write_groups(groups: dict[str, list[tuple[str, str]]]) -> None:
    """Write each group with its title; on a terminal, a pass has one line."""
    names = max(len(name) for rows in groups.values() for name, _ in rows)
    room = output.width() - names - 4 if sys.stdout.isatty() else None
    for i, (title, rows) in enumerate(groups.items()):
        output.write_text(("\n" if i else "") + title)
        for name, text in rows:
            lines = textwrap.wrap(text, room) if room else [text]
            if room and len(lines) > 1 and not name.startswith("-"):
                lines = [textwrap.shorten(text, room, placeholder=" …")]
            output.write_text(f"  {name:<{names}}  " + f"\n{'':<{names + 4}}".join(lines))
