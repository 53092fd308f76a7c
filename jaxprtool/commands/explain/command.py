"""`jaxprtool explain`: descriptions of passes, named pipelines and primitives."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from json import loads
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from docstring_parser import Docstring, DocstringParam, DocstringRaises, ParseError, google
from docstring_parser.numpydoc import NumpydocParser
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.launch import start_jax
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import command, load_plugins
from jaxprtool.errors import ArgumentsError, PipelineError, PluginError, did_you_mean
from jaxprtool.ir.documents import document
from jaxprtool.ir.notation import PrimitiveName
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Code, Prose, Rendering

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
    from jaxprtool.passes import levels

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

    width = output.width()
    if isinstance(document, PipelineDocument):
        return pipeline_explanation(document, width)
    if isinstance(document, LintRuleDocument):
        return lint_rule_explanation(document, width)
    if isinstance(document, PrimitiveDocument):
        return primitive_explanation(document, width, full)
    return pass_explanation(document, width, full)


#: A code of lint, of ours or of a plug-in.
_LINT_CODE = re.compile(r"[A-Za-z]{2,}\d{3}")


def _lint_rule(code: str) -> LintRuleDocument:
    from jaxprtool.commands.lint.lint import all_rules

    rules = {rule.code: rule for rule in all_rules()}
    if code not in rules:
        raise PipelineError(
            f"no rule of lint has the code {code}",
            did_you_mean(code, rules) or f"available: {', '.join(rules)}",
        )
    rule = rules[code]
    bad, good = (text.partition("\n\n")[2].strip("\n") for text in (rule.bad, rule.good))
    return LintRuleDocument(code, rule.name, rule.about, rule.kind, bad, good)


def _level(name: str) -> PipelineDocument:
    from jaxprtool.passes import Pipeline, find_pass, levels, pass_summary

    level = levels[name]
    parts = (("repeated", level.repeated), ("once, at the end", level.last))
    steps = [
        PipelineStep(str(step), when, pass_summary(find_pass(step.transform.name)))
        for when, text in parts
        for step in Pipeline.parse(text).steps
    ]
    return PipelineDocument(f"-{name}", level.help, steps)


def _pass_or_primitive(name: str, on_progress: OnProgress) -> _Explanation:
    from jaxprtool.passes import available

    if name in available():
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
        names = [*available(), *primitives]
        raise PipelineError(error.message, did_you_mean(name, names) or error.hint) from None


def _primitive(name: str) -> PrimitiveDocument:
    from jaxprtool import extend
    from jaxprtool.ir import traits
    from jaxprtool.passes.cleanup.simplify import Simplify

    return PrimitiveDocument(
        name,
        "A primitive: the operation of an equation.",
        [
            Trait(trait, repr(value), text)
            for trait, (value, text) in traits.described_traits(name).items()
        ],
        [table for table in extend.TABLES if extend.table_named(table).get(name) is not None],
        [
            RewriteRule(**rule)
            for rule in Simplify.rules()
            if rule["pattern"].startswith(f"{name}(")
        ],
    )


def _pass(name: str) -> PassDocument:
    from jaxprtool.passes import available, find_pass, pass_options

    cls = find_pass(name)
    said = documentation(cls)
    return PassDocument(
        name,
        said.text,
        cls.group,
        available()[name].origin,
        _pipelines(name),
        [
            Option(
                "NAME, …" if option.name == cls.more_options else option.name,
                option.type_name,
                option.default_text,
                said.parameters.get(option.name, ""),
            )
            for option in pass_options(cls)
        ],
        said.raises,
        [Section(*section) for section in said.sections.items()],
        [RewriteRule(**rule) for rule in cls.rules()] if hasattr(cls, "rules") else None,
    )


# --- written descriptions -------------------------------------------------------------------------
# Our own passes and pipelines are described in a file, since their classes import JAX. A plug-in
# may add rules, passes and pipelines: with one, or for its passes, the classes are asked.

#: The documents of our passes and pipelines. `python -m tests.documentation.json_page` writes it.
_DESCRIPTIONS = "passes.json"


def descriptions() -> dict[str, PassDocument | PipelineDocument]:
    """Return the documents of our passes by name, and of the pipelines by `-O1`."""
    text = (files("jaxprtool.commands.explain") / _DESCRIPTIONS).read_text()
    described: dict[str, PassDocument | PipelineDocument] = {}
    for entry in loads(text):
        if "passes" in entry:
            steps = [PipelineStep(**step) for step in entry.pop("passes")]
            described[entry["name"]] = PipelineDocument(**entry, passes=steps)
            continue
        options = [Option(**option) for option in entry.pop("options")]
        sections = [Section(**section) for section in entry.pop("sections")]
        rules = entry.pop("rules")
        described[entry["name"]] = PassDocument(
            **entry,
            options=options,
            sections=sections,
            rules=rules and [RewriteRule(**rule) for rule in rules],
        )
    return described


def described_afresh() -> list[PassDocument | PipelineDocument]:
    """Return what `descriptions` must return, from the classes of the passes."""
    from jaxprtool.passes import available, levels

    own = [_pass(name) for name in available() if _is_own(name)]
    return [*own, *map(_level, levels)]


def _is_own(name: str) -> bool:
    from jaxprtool.passes import available

    source = available().get(name)
    return source is not None and source.origin == "jaxprtool"


def _pipelines(name: str) -> list[str]:
    """Return the named pipelines that contain a pass."""
    from jaxprtool.passes import Pipeline, levels

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
    from jaxprtool.passes import available, levels, pass_summary

    pipelines = {f"-{name}": str(level) for name, level in levels.items()}
    summaries = []
    for source in available().values():
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


# --- documents ------------------------------------------------------------------------------------
# Of passes, pipelines, primitives and lint rules; none is of a program.


class PassSummary(NamedTuple):
    """A pass in the list."""

    name: Annotated[str, "Its name in a pipeline."]
    help: Annotated[str, "A one-line description."]
    group: Annotated[str, "Its group: `clean up`; empty if none."]
    origin: Annotated[str, "The package, module or file that defines it."]


class PassesDocument(NamedTuple):
    """`passes`."""

    passes: Annotated[list[PassSummary], "The passes, by name."]
    pipelines: Annotated[dict[str, str], "The named pipelines: the passes of each, as text."]


class Option(NamedTuple):
    """An option of a pass."""

    name: Annotated[str, "Its name."]
    type: Annotated[str, "Its type, as in the source."]
    default: Annotated[str | None, "Its default, as text; null if it is required."]
    help: Annotated[str, "Its description; empty if there is none."]


class RewriteRule(NamedTuple):
    """A rule of a pass."""

    pattern: Annotated[str, "The equations that it matches."]
    replacement: Annotated[str, "The equation that replaces them."]
    condition: Annotated[str, "The condition under which it applies."]
    exact: Annotated[str, "`exact` if it preserves every bit of a result; else when it is applied."]
    family: Annotated[str, "The family of rules that it belongs to; empty if none."]


class Section(NamedTuple):
    """A section of the help of a pass."""

    title: Annotated[str, "Its title: `Example`, `Note`, …."]
    text: Annotated[str, "Its text."]


@document(optional=("rules",))
class PassDocument(NamedTuple):
    """`explain` of a pass."""

    name: Annotated[str, "The name of the pass."]
    text: Annotated[str, "A description."]
    group: Annotated[str, "Its group: `clean up`; empty if none."]
    origin: Annotated[str, "The package, module or file that defines it."]
    pipelines: Annotated[list[str], "The named pipelines that contain it: `-O1`."]
    options: Annotated[list[Option], "Its options."]
    refuses: Annotated[list[str], "The errors that it raises."]
    sections: Annotated[list[Section], "The other sections of its help: an example, notes."]
    rules: Annotated[list[RewriteRule] | None, "Its rules, if it has any."] = None


class Trait(NamedTuple):
    """A trait of a primitive that differs from the default."""

    name: Annotated[str, "The trait."]
    value: Annotated[str, "Its value, as Python source."]
    text: Annotated[str, "The meaning of the trait."]


class PrimitiveDocument(NamedTuple):
    """`explain` of a primitive."""

    name: Annotated[str, "The name of the primitive."]
    text: Annotated[str, "A description of the primitive."]
    traits: Annotated[list[Trait], "The traits of the primitive that differ from the defaults."]
    tables: Annotated[
        list[str], "The tables that have a rule for it: `batch`, `dce`, `python`, `unzip`, …."
    ]
    rules: Annotated[list[RewriteRule], "The rules of `simplify` for it."]


class LintRuleDocument(NamedTuple):
    """`explain` of a rule of `lint`."""

    code: Annotated[str, "Its code: `JT602`."]
    name: Annotated[str, "Its name: `key-reuse`."]
    text: Annotated[str, "What it finds, and why that matters."]
    kind: Annotated[str, "Whether a finding makes results `wrong`, or is `waste`."]
    bad: Annotated[str, "A function in which it finds something."]
    good: Annotated[str, "The same function without the fault."]


class PipelineStep(NamedTuple):
    """A pass of a named pipeline."""

    name: Annotated[str, "The pass, with its options."]
    when: Annotated[str, "`repeated`, or `once, at the end`."]
    help: Annotated[str, "A one-line description."]


class PipelineDocument(NamedTuple):
    """`explain` of a named pipeline."""

    name: Annotated[str, "The name of the pipeline."]
    text: Annotated[str, "A description."]
    passes: Annotated[list[PipelineStep], "Its passes, in order."]


_Explanation: TypeAlias = PassDocument | PipelineDocument | PrimitiveDocument | LintRuleDocument


# --- explanation ----------------------------------------------------------------------------------
# The text of `jaxprtool explain` on a pass, a named pipeline or a primitive, in sections.

#: The number of rules shown per family, unless all are.
_FEW = 3

#: Longer names of primitives are on separate lines.
_SHORT = 8

_LEGEND = (
    "Each row has a pattern, its replacement, and the condition. A lowercase letter stands for "
    "any value, a capital for a constant, `*xs` for all other operands, and `a|b` for either, "
    "the same one on both sides. `~0` has all bits set. `unary` and `elementwise2` are "
    "elementwise primitives of one and of two operands, `ordered2` those of two that are not "
    "symmetric; `resize` is a reshape or a squeeze, `layout` one of these or a broadcast."
)


def pass_explanation(document: PassDocument, width: int, full: bool) -> Rendering:
    """Return the summary of a pass, its options, an example, its errors, and its rules.

    Args:
        document: The document of the pass.
        width: The width in columns.
        full: Whether to show all of its rules instead of the first of each family.
    """
    about = [document.group, f"from {document.origin}"]
    if document.pipelines:
        about.append(f"part of {', '.join(document.pipelines)}")
    parts = [*_head(document.name, about), Text(), Prose(document.text)]
    if document.options:
        parts += _section("Options", *map(_option, document.options))
    for section in document.sections:
        example = section.title.startswith("Example")
        parts += _section(section.title, (Code if example else Prose)(section.text))
    if document.refuses:
        parts += _section("Errors", *map(_bullet, document.refuses))
    if rules := document.rules:
        parts += _section("Rules", Prose(_LEGEND), *_rules(rules, width - 2, full))
    return Rendering(Group(*parts), width)


def lint_rule_explanation(document: LintRuleDocument, width: int) -> Rendering:
    """Return what a rule of `lint` finds, with an example and what to write instead."""
    effect = "makes results wrong" if document.kind == "wrong" else "wastes time or memory"
    about = [document.name, "a rule of lint", effect]
    parts = [*_head(document.code, about), Text(), Prose(document.text)]
    parts += _section("Example", Code(document.bad))
    parts += _section("Instead", Code(document.good))
    parts += _section("Silence", Code(f"# jaxprtool: ignore[{document.code}]"))
    return Rendering(Group(*parts), width)


def pipeline_explanation(document: PipelineDocument, width: int) -> Rendering:
    """Return the summary of a named pipeline, and its passes."""
    parts = [*_head(document.name, ["a named pipeline"]), Text(), Prose(document.text)]
    for when, steps in groupby(document.passes, key=lambda step: step.when):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for step in steps:
            table.add_row(Text(step.name, tables.STYLES[PrimitiveName]), Text(step.help))
        title = "Until nothing changes" if when == "repeated" else "Once, at the end"
        parts += _section(title, table)
    return Rendering(Group(*parts), width)


def primitive_explanation(document: PrimitiveDocument, width: int, full: bool) -> Rendering:
    """Return the traits of a primitive for passes, and the rules about it."""
    parts = _head(document.name, ["a primitive"])
    if not (document.traits or document.tables or document.rules):
        parts += Text(), Prose("Passes treat it as a pure function of its operands.")
    if document.traits:
        traits = [_trait(*trait) for trait in document.traits]
        parts += _section("Traits", *traits)
    if document.tables:
        parts += _section("Tables with a rule for it", Prose(", ".join(document.tables)))
    if document.rules:
        parts += _section("Rules of simplify", *_rules(document.rules, width - 2, full))
    return Rendering(Group(*parts), width)


def _head(name: str, about: Iterable[str]) -> list[RenderableType]:
    said = Text(f"   {'; '.join(filter(None, about))}", tables.COMMENT)
    return [Text.assemble((name, tables.HEADING), said)]


def _section(title: str, *parts: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, tables.HEADING), *(Padding(part, (0, 0, 0, 2)) for part in parts)]


def _bullet(text: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row("•", Prose(text))
    return table


def _option(option: Option) -> RenderableType:
    """Return `argnums: int = 0`, in Python syntax, with its meaning below."""
    default = option.default
    head = Text.assemble(
        (option.name, tables.PARAMETER),
        f": {option.type}",
        ("  (required)", tables.COMMENT) if default is None else f" = {default}",
        overflow="fold",
    )
    return Group(head, Padding(Prose(option.help), (0, 0, 0, 4))) if option.help else head


def _trait(name: str, value: str, text: str) -> RenderableType:
    said = f"No: {text}" if value == "False" else text
    shown = "" if value in ("True", "False") else f" = {value}"
    head = Text.assemble((name, tables.PARAMETER), shown)
    return Group(head, Padding(Prose(said), (0, 0, 0, 4)))


# --- rules --------------------------------------------------------------------------------------


def _rules(rules: Sequence[RewriteRule], width: int, full: bool) -> Iterator[RenderableType]:
    """Yield a table for each family of rules."""
    from jaxprtool.render.terminal.lines import Listing, columns

    for family, members in groupby(rules, key=lambda rule: rule.family):
        merged = list(_merged(members))
        shown = merged if full or len(merged) <= _FEW + 1 else merged[:_FEW]
        yield Text()
        if family or len(rules) > len(merged):
            yield Text(f"{family or 'others'}", tables.KEYWORD)
        yield Listing(columns([_row(rule) for rule in shown], width))
        if len(shown) < len(merged):
            more = f"… {len(merged) - len(shown)} more; --full shows them"
            yield Text(more, tables.COMMENT)


def _row(rule: RewriteRule) -> tuple[list[str], ...]:
    exact = rule.exact.removeprefix("exact").strip()
    limit = "only with fast=True" if exact == "fast" else exact and f"{exact}, or with fast=True"
    when = "; ".join(filter(None, [rule.condition, limit]))
    return [rule.pattern], ["→"], [rule.replacement], [when]


def _merged(rules: Iterable[RewriteRule]) -> Iterator[RewriteRule]:
    """Yield rules; those that differ only in a short name of a primitive are merged."""
    kept: dict[Any, list[RewriteRule]] = {}
    for rule in rules:
        name = rule.pattern.partition("(")[0]
        mark = "?" if len(name) <= _SHORT else name
        shape = (part.replace(name, mark) for part in (rule.pattern, rule.replacement))
        kept.setdefault((*shape, rule.condition, rule.exact), []).append(rule)
    for alike in kept.values():
        first = alike[0]
        name, *others = (rule.pattern.partition("(")[0] for rule in alike)
        names = "|".join([name, *others])
        yield first._replace(
            pattern=first.pattern.replace(name, names),
            replacement=first.replacement.replace(name, names),
        )


# --- docstrings -----------------------------------------------------------------------------------
# Docstrings in parts: the sections of Google's and NumPy's styles.

_TITLES = {"examples": "Example"}
_MORE = ("Note", "Notes", "See Also", "References", "Warning", "Warnings")
_GOOGLE = google.GoogleParser(
    [
        *google.DEFAULT_SECTIONS,
        *(google.Section(title, title, google.SectionType.SINGULAR) for title in _MORE),
    ]
)


@dataclass(frozen=True)
class Documentation:
    """A docstring in parts.

    Attributes:
        text: The text before the sections, with its line breaks.
        parameters: The description of each parameter or attribute.
        raises: The descriptions of exceptions.
        sections: All other sections by their titles: an example, notes.
    """

    text: str
    parameters: dict[str, str]
    raises: list[str]
    sections: dict[str, str]


def documentation(cls: type) -> Documentation:
    """Return the documentation of a class, with the parameters and exceptions of its bases."""
    parsed = _documentation(cls)
    for base in cls.__mro__[1:-1]:
        inherited = _documentation(base)
        parsed.parameters.update({**inherited.parameters, **parsed.parameters})
        parsed.raises.extend(text for text in inherited.raises if text not in parsed.raises)
    return parsed


def _documentation(cls: type) -> Documentation:
    parsed = max(_parsed(inspect.cleandoc(cls.__doc__ or "")), key=lambda parsed: len(parsed.meta))
    documentation = Documentation(_prose(parsed), {}, [], {})
    for part in parsed.meta:
        text = part.description or ""
        if isinstance(part, DocstringParam):
            documentation.parameters[part.arg_name] = text
        elif isinstance(part, DocstringRaises):
            documentation.raises.append(text)
        else:
            snippet = getattr(part, "snippet", None)  # NumPy's, of an example
            title = _TITLES.get(part.args[0], part.args[0].replace("_", " ").capitalize())
            lines = [documentation.sections.get(title), snippet, text]
            documentation.sections[title] = "\n".join(filter(None, lines))
    return documentation


def _prose(parsed: Docstring) -> str:
    space = "\n\n" if parsed.blank_after_short_description else "\n"
    return space.join(filter(None, [parsed.short_description, parsed.long_description]))


def _parsed(text: str) -> list[Docstring]:
    """Return a docstring as parsed in each style; as plain text if neither parses it."""
    docstrings = []
    for parser in (_GOOGLE, NumpydocParser()):
        with suppress(ParseError):  # a section that this style cannot parse
            docstrings.append(parser.parse(text))
    if not docstrings:
        docstrings.append(Docstring())
        docstrings[0].short_description = text
    return docstrings
