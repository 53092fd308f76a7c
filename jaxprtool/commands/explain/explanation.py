"""Documents of passes, primitives and backends, and their text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, NamedTuple

from docstring_parser import Docstring, DocstringParam, DocstringRaises, ParseError, google
from docstring_parser.numpydoc import NumpydocParser
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.documents import document
from jaxprtool.ir.notation.tokens import PrimitiveName
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Code, Prose, Rendering

# --- passes ---------------------------------------------------------------------------------------
# Documents of passes, primitives and backends, independent of any program.


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


class Device(NamedTuple):
    """A device."""

    id: Annotated[int, "Its number."]
    kind: Annotated[str, "Its model: `cpu`, `NVIDIA H100 80GB HBM3`."]
    memory: Annotated[int | None, "The bytes of memory that JAX may use; null if unknown."]


class Backend(NamedTuple):
    """A backend."""

    platform: Annotated[str, "Its name."]
    version: Annotated[str, "Its version."]
    default: Annotated[bool, "Whether it is JAX's default."]
    devices: Annotated[list[Device], "Its devices."]


class PjrtPlugin(NamedTuple):
    """A PJRT plug-in."""

    module: Annotated[str, "The module that JAX imports."]
    package: Annotated[str, "The package that it is from; empty if unknown."]
    version: Annotated[str, "The version of the package; empty if unknown."]


class BackendFailure(NamedTuple):
    """A backend or plug-in that does not start."""

    name: Annotated[str, "Its name, or the plug-in's package or module."]
    reason: Annotated[str, "The reason, in one line."]


class BackendsDocument(NamedTuple):
    """`backends`."""

    backends: Annotated[list[Backend], "The backends of this machine."]
    plugins: Annotated[list[PjrtPlugin], "The PJRT plug-ins that are installed."]
    failures: Annotated[
        list[BackendFailure], "The backends and plug-ins that are installed and do not start."
    ]
    versions: Annotated[dict[str, str], "The versions of JAX and jaxlib."]


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
