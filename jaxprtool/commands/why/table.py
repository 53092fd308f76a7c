"""Rendering of slices, paths and gradients by the user's lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import listed, plural
from jaxprtool.ir.frames import short_paths
from jaxprtool.ir.notation import Comment, Heading, PrimitiveName, SourceLineToken, Type
from jaxprtool.ir.program import covering
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.lines import (
    GAP,
    Cell,
    Listing,
    cut_line,
    joined_lines,
    printable,
    wrapped_cell,
)
from jaxprtool.render.terminal.tables import Rendering, more, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.why.gradients import Cause, GradientAnswer, GradientFlow, GradientGroup
    from jaxprtool.commands.why.slices import Path, Slice, SlicedLine, Why

# --- why ------------------------------------------------------------------------------------------
# Rendering of slices and paths by the user's lines.

#: The maximum number of arguments or results named, and the minimal width of a line's source.
_MOST_NAMED, _LEAST_CODE = 8, 12

#: The share of a line's width above which places are shown without folders.
_WIDE = 0.35

#: The maximum number of excluded arguments or results named.
_FEW = 3

_some = partial(listed, most=_MOST_NAMED)


def slices_by_line(why: Why, width: int, top: int | None = tables.ROWS) -> Listing:
    """Return the slices of a point, with a row for each of the user's lines.

    Args:
        why: The slices.
        width: The width in characters.
        top: The number of lines shown of each slice; None for all.
    """
    tokens: list[str] = []
    for part, sentence, note in slices_with_sentences(why):
        tokens += ["\n\n"] if tokens else []
        for line in wrapped_cell([Heading(sentence)], width):
            tokens += [*line, "\n"]
        tokens += joined_lines(_rows(part, note, width, top))
    if why.gradient is not None and (said := gradient_sentence(why.gradient, why.what)):
        tokens += ["\n\n", *joined_lines(wrapped_cell([said], width))]
    return Listing(printable(tokens))


def slices_with_sentences(why: Why) -> list[tuple[Slice, str, str]]:
    """Return each slice with a sentence about it, and a note on the lines that it excludes."""
    slices: list[tuple[Slice, str, str]] = []
    name = why.what
    several = len(why.ends) > 1
    if several:
        name += f" ({plural(len(why.ends), why.kind)})"
    if (ahead := why.forward) is not None:
        verb = "affect" if several else "affects"
        ends = _named("result", ahead.results, why.all_results)
        sentence = f"{name} {verb} {_part(ahead)} and {ends}"
        slices.append((ahead, sentence, f"that {'they do' if several else 'it does'} not affect"))
    if (behind := why.back) is not None:
        verb = "depend on" if several else "depends on"
        ends = _named("argument", behind.arguments, why.all_arguments)
        sentence = f"{name} {verb} {_part(behind)} and {ends}"
        slices.append(
            (behind, sentence, f"that {'they do' if several else 'it does'} not depend on")
        )
    return slices


def gradient_sentence(flow: GradientFlow, name: str) -> str:
    """Return what stops the gradient with respect to an argument; "" if nothing does."""
    if flow.type:
        return f"{name} is {flow.type}, which has no gradient."
    stops = _some([f"{stop.primitive} ({stop.source or 'unknown line'})" for stop in flow.stops])
    verb = "stops" if len(flow.stops) == 1 else "stop"
    if flow.zero:
        why = f": {stops} {verb} every path" if stops else ""
        return f"The gradient of {_some(flow.zero)} with respect to {name} is zero{why}."
    if stops:
        paths = plural(len(flow.stops), "path")
        return (
            f"The gradient with respect to {name} has {paths} that {verb} at {stops}, and others "
            "that do not."
        )
    return ""


def _part(part: Slice) -> str:
    if not part.equations:
        return f"none of {plural(part.of, 'equation')}" if part.of > 1 else "no equation"
    if part.equations == part.of:
        return f"all {plural(part.of, 'equation')}" if part.of != 1 else "the one equation"
    return f"{part.equations:,} of {plural(part.of, 'equation')}"


def _named(noun: str, chosen: Sequence[str], names: Sequence[str]) -> str:
    """Return `2 of 3 results: loss, aux; not step`."""
    if not names:
        return f"no {noun}"
    if len(names) == 1:
        label = f" {names[0]}" if names[0] != noun else ""
        return f"{'' if chosen else 'not '}the {noun}{label}"
    if not chosen:
        return f"none of {plural(len(names), noun)}"
    if len(chosen) == len(names):
        return f"all {plural(len(names), noun)}"
    wanted = set(chosen)
    flags = [name in wanted for name in names]
    sentence = f"{len(chosen):,} of {plural(len(names), noun)}: {_some([*covering(names, flags)])}"
    others = [*covering(names, [not flag for flag in flags])]
    return f"{sentence}; not {_some(others)}" if len(others) <= _FEW else sentence


# --- lines ------------------------------------------------------------------------------------


def _rows(part: Slice, note: str, width: int, top: int | None) -> list[Cell]:
    """Return a row for each line of a slice, and a note on the others."""
    lines, rest = split_rows(part.lines, top)
    counts, places = _counts(lines), [line.name or "unknown line" for line in lines]
    taken = max(map(len, counts), default=0) + 2 * len(GAP)
    places, room = _fitting(places, width - taken)
    rows: list[Cell] = []
    indent = " " * (taken - len(GAP))
    for line, count, place in zip(lines, counts, places, strict=True):
        is_own = line.line is not None and line.line.own
        shown = (SourceLineToken if is_own else Comment)(place)
        rows.append([count, GAP, shown, GAP, *_source(line, room)])
        if line.behind:
            rows.append(cut_line([Comment(f"{indent}{BEHIND.lstrip()}{line.behind}")], width))
    rows += [[Comment(more(len(rest)))]] if rest else []
    left = part.of - part.equations
    if left:
        others = f" on {plural(part.other_lines, 'line')}" if part.other_lines else ""
        rows.append([Comment(f"… {plural(left, 'equation')}{others} {note}")])
    return rows


def _fitting(places: Sequence[str], width: int) -> tuple[list[str], int]:
    """Return places padded to a column, without folders if wide, and the remaining width."""
    longest = max(map(len, places), default=0)
    if longest > _WIDE * width:
        places = short_paths(places)
        longest = max(map(len, places), default=0)
    return [f"{place:{longest}}" for place in places], max(width - longest, _LEAST_CODE)


def _counts(lines: Sequence[SlicedLine]) -> list[str]:
    """Return `3 of 4` for each line, or `4` if these are all, aligned."""
    numbers = [f"{line.equations:,}" for line in lines]
    wholes = [f" of {line.of:,}" if line.of != line.equations else "" for line in lines]
    left, right = (max(map(len, texts), default=0) for texts in (numbers, wholes))
    return [f"{n:>{left}}{of:{right}}" for n, of in zip(numbers, wholes, strict=True)]


def _source(line: SlicedLine, room: int) -> Cell:
    """Return the code of a line, and the primitives of its equations."""
    first = next(iter(line.primitives))
    more = line.equations - line.primitives[first]
    primitives = f"({first}, {more:,} more)" if more else f"({first})"
    code = "" if line.line is None else source_text.line(line.line.file, line.line.line)
    text = " ".join(code.split())
    if not text:
        return cut_line([Comment(primitives)], room)
    left = room - len(GAP) - len(primitives)
    if left < _LEAST_CODE:
        return cut_line([text], room)
    return [*cut_line([text], left), GAP, Comment(primitives)]


# --- paths ------------------------------------------------------------------------------------


def path_text(path: Path, width: int, top: int | None = tables.ROWS) -> Listing:
    """Return a path with a row for each equation; those in bodies are indented.

    Args:
        path: The path.
        width: The width in characters.
        top: The number of equations shown; None for all.
    """
    if path.steps is None:
        return Listing(printable([f"{path.start} does not reach {path.end}"]))
    sentence = f"{path.start} reaches {path.end} through {plural(len(path.steps), 'equation')}"
    tokens: list[str] = [Heading(sentence)]
    steps, rest = split_rows(path.steps, top)
    names = [f"{'  ' * step.depth}{step.primitive}" for step in steps]
    longest = max(map(len, names), default=0)
    types = max((len(step.type) for step in steps), default=0)
    places, room = _fitting([step.source for step in steps], width - longest - types - 3 * len(GAP))
    for step, name, place in zip(steps, names, places, strict=True):
        row = [PrimitiveName(f"{name:{longest}}"), GAP, Type(f"{step.type:{types}}"), GAP]
        code = "" if step.frame is None else source_text.line(step.frame.file, step.frame.line)
        if step.frame is not None:
            row += [SourceLineToken(place), GAP, *cut_line([" ".join(code.split())], room)]
        tokens += "\n", *row
    tokens += ["\n", Comment(more(len(rest)))] if rest else []
    return Listing(printable(tokens))


# --- gradient -------------------------------------------------------------------------------------
# Why gradients are missing, zero or NaN, as text.

_some_lines = partial(listed, most=4)

#: The number of operations shown by default for a group.
CAUSES = 6

_CAUSED = "The first operation that makes one is:"
_UNCAUSED = "No single operation makes it."


def gradient_text(answer: GradientAnswer, width: int, top: int | None = CAUSES) -> Rendering:
    """Return a paragraph for each group of arguments, with the operations that cause the result.

    Args:
        answer: The answer.
        width: The width in characters.
        top: The number of operations shown of each group; None for all.
    """
    parts: list[RenderableType] = []
    for group in answer.groups:
        parts += [Text()] if parts else []
        sentence = _sentence(answer, group)
        parts += [Text(line, style=tables.HEADING) for line in textwrap.wrap(sentence, width)]
        parts += [_causes(group, top)] if group.causes and group.kind != "nonzero" else []
        parts += map(Text, textwrap.wrap(_uses(group), width))
    return Rendering(Group(*parts), width)


def _sentence(answer: GradientAnswer, group: GradientGroup) -> str:
    """Return a sentence on the gradients of a group."""
    names, count = _group_name(answer, group), len(group.causes)
    be, do = ("is", "does") if len(group.arguments) == 1 else ("are", "do")
    of = f"The gradient of {answer.result} with respect to {names} is"
    operations, stop = plural(count, "operation"), "stops" if count == 1 else "stop"
    match group.kind:
        case "integer":
            return f"{names} {be} {group.type}, which has no gradient (JAX gives float0)."
        case "unused":
            return f"{names} {be} not used: the gradient is zero."
        case "missing":
            only = f", only {_some_lines(group.reaches)}" if group.reaches else ""
            last = "; the last of its operations:" if count else "."
            return f"{names} {do} not affect {answer.result}{only}: the gradient is zero{last}"
        case "zero":
            return f"{of} zero for all inputs" + (
                f": {operations} {stop} every path." if count else "."
            )
        case "vanishing":
            where = f": it becomes zero at {operations}." if count else "."
            return f"{of} zero on these inputs, although a path exists{where}"
        case "NaN" | "infinity":
            bad = "NaN" if group.kind == "NaN" else "infinite"
            value = f"{answer.result} itself is {str(answer.value).replace('nan', 'NaN')}"
            return f"{of} {bad}; {value}. {_CAUSED if count else _UNCAUSED}"
        case "nonzero":
            stops = [
                f"{cause.primitive} ({cause.source or 'unknown line'})" for cause in group.causes
            ]
            others = f"; {_some_lines(stops)} {stop} other paths." if count else "."
            return f"{of} not zero: its norm is {group.norm:.4g}{others}"


def _uses(group: GradientGroup) -> str:
    """Return the expressions that a gradient comes from."""
    uses = [f"{use.code} ({use.place})" for use in group.uses]
    return f"It comes from {_some_lines(uses)}." if uses else ""


def _group_name(answer: GradientAnswer, group: GradientGroup) -> str:
    """Return the names of the arguments of a group, or prefixes that cover just these."""
    count = len(group.arguments)
    if count == 1:
        return group.arguments[0]
    names = [name for other in answer.groups for name in other.arguments]
    chosen = set(group.arguments)
    paths = [*covering(names, [name in chosen for name in names])]
    return _some_lines(paths) + (f" ({count} arguments)" if len(paths) != count else "")


def _causes(group: GradientGroup, top: int | None) -> Table:
    """Return the operations of a group, each with its line, its reason and its remedy."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=tables.PRIMITIVE)
    table.add_column(style=tables.BINDER, overflow="fold")
    table.add_column(overflow="fold")
    shown, rest = split_rows(group.causes, top)
    for cause in shown:
        for number, (line, style) in enumerate(_lines(cause)):
            first = (cause.forward or cause.primitive, cause.source or "unknown line")
            table.add_row(*(first if number == 0 else ("", "")), Text(line, style=style))
    if rest:
        table.add_row(Text(more(len(rest)), style=tables.COMMENT))
    return table


def _lines(cause: Cause) -> Iterator[tuple[str, StyleType]]:
    """Yield the lines of a cause: code, loops and branches around it, reason and remedy."""
    yield cause.code, ""
    around = [place for place in cause.path if not place.startswith("jit at ")]
    if cause.iteration:
        around.append(f"iteration {', '.join(map(str, cause.iteration))} (counted from 0)")
    if around:
        yield f"in {', '.join(around)}", tables.COMMENT
    if cause.reason:
        yield cause.reason, tables.COMMENT
    if cause.remedy:
        yield f"hint: {cause.remedy}", tables.COMMENT
