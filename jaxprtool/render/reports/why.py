"""Rendering of slices and paths by the user's lines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxprtool.ir.basics.quantities import listed, plural
from jaxprtool.ir.notation.tokens import Comment, Heading, PrimitiveName, SourceLine, Type
from jaxprtool.ir.programs.program_signature import covering
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import BEHIND, short_paths
from jaxprtool.render.terminal.grid import GAP
from jaxprtool.render.terminal.lines import Cell, cut, joined, printable, wrapped
from jaxprtool.render.terminal.listing import Listing
from jaxprtool.render.terminal.top import more, split

if TYPE_CHECKING:
    from jaxprtool.analysis.flow_paths import Path
    from jaxprtool.analysis.gradient_flow import GradientFlow
    from jaxprtool.analysis.slices import Slice, SlicedLine, Why

#: The maximum number of arguments or results named, and the minimal width of a line's source.
_MOST_NAMED, _LEAST_CODE = 8, 12

#: The share of a line's width above which places are shown without folders.
_WIDE = 0.35

#: The maximum number of excluded arguments or results named.
_FEW = 3

_some = partial(listed, most=_MOST_NAMED)


def slices_by_line(found: Why, width: int, top: int | None) -> Listing:
    """Return the slices of a point, with a row for each of the user's lines.

    Args:
        found: The slices.
        width: The width in characters.
        top: The number of lines shown of each slice; None for all.
    """
    tokens: list[str] = []
    for each, sentence, note in slices_with_sentences(found):
        tokens += ["\n\n"] if tokens else []
        for line in wrapped([Heading(sentence)], width):
            tokens += [*line, "\n"]
        tokens += joined(_rows(each, note, width, top))
    if found.gradient is not None and (said := gradient_sentence(found.gradient, found.what)):
        tokens += ["\n\n", *joined(wrapped([said], width))]
    return Listing(printable(tokens))


def slices_with_sentences(found: Why) -> list[tuple[Slice, str, str]]:
    """Return each slice with a sentence about it, and a note on the lines that it excludes."""
    slices: list[tuple[Slice, str, str]] = []
    name = found.what
    several = len(found.ends) > 1
    if several:
        name += f" ({plural(len(found.ends), found.kind)})"
    if (ahead := found.forward) is not None:
        verb = "affect" if several else "affects"
        ends = _named("result", ahead.results, found.all_results)
        sentence = f"{name} {verb} {_part(ahead)} and {ends}"
        slices.append((ahead, sentence, f"that {'they do' if several else 'it does'} not affect"))
    if (behind := found.back) is not None:
        verb = "depend on" if several else "depends on"
        ends = _named("argument", behind.arguments, found.all_arguments)
        sentence = f"{name} {verb} {_part(behind)} and {ends}"
        slices.append(
            (behind, sentence, f"that {'they do' if several else 'it does'} not depend on")
        )
    return slices


def gradient_sentence(flow: GradientFlow, name: str) -> str:
    """Return what stops the gradient with respect to an argument; "" if nothing does."""
    if flow.type:
        return f"{name} is {flow.type}, which has no gradient."
    stops = _some([f"{each.primitive} ({each.source or 'unknown line'})" for each in flow.stops])
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


def _part(found: Slice) -> str:
    if not found.equations:
        return f"none of {plural(found.of, 'equation')}" if found.of > 1 else "no equation"
    if found.equations == found.of:
        return f"all {plural(found.of, 'equation')}" if found.of != 1 else "the one equation"
    return f"{found.equations:,} of {plural(found.of, 'equation')}"


def _named(noun: str, chosen: Sequence[str], names: Sequence[str]) -> str:
    """Return `2 of 3 results: loss, aux; not step`."""
    if not names:
        return f"no {noun}"
    if len(names) == 1:
        own = f" {names[0]}" if names[0] != noun else ""
        return f"{'' if chosen else 'not '}the {noun}{own}"
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


def _rows(found: Slice, note: str, width: int, top: int | None) -> list[Cell]:
    """Return a row for each line of a slice, and a note on the others."""
    lines, rest = split(found.lines, top)
    counts, places = _counts(lines), [line.name or "unknown line" for line in lines]
    taken = max(map(len, counts), default=0) + 2 * len(GAP)
    places, room = _fitting(places, width - taken)
    rows: list[Cell] = []
    indent = " " * (taken - len(GAP))
    for line, count, place in zip(lines, counts, places, strict=True):
        own = line.line is not None and line.line.own
        shown = (SourceLine if own else Comment)(place)
        rows.append([count, GAP, shown, GAP, *_source(line, room)])
        if line.behind:
            rows.append(cut([Comment(f"{indent}{BEHIND.lstrip()}{line.behind}")], width))
    rows += [[Comment(more(len(rest)))]] if rest else []
    left = found.of - found.equations
    if left:
        others = f" on {plural(found.other_lines, 'line')}" if found.other_lines else ""
        rows.append([Comment(f"… {plural(left, 'equation')}{others} {note}")])
    return rows


def _fitting(places: list[str], width: int) -> tuple[list[str], int]:
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
    left, right = (max(map(len, each), default=0) for each in (numbers, wholes))
    return [f"{n:>{left}}{of:{right}}" for n, of in zip(numbers, wholes, strict=True)]


def _source(line: SlicedLine, room: int) -> Cell:
    """Return the code of a line, and the primitives of its equations."""
    first = next(iter(line.primitives))
    more = line.equations - line.primitives[first]
    primitives = f"({first}, {more:,} more)" if more else f"({first})"
    code = "" if line.line is None else source_text.line(line.line.file, line.line.line)
    text = " ".join(code.split())
    if not text:
        return cut([Comment(primitives)], room)
    left = room - len(GAP) - len(primitives)
    if left < _LEAST_CODE:
        return cut([text], room)
    return [*cut([text], left), GAP, Comment(primitives)]


# --- paths ------------------------------------------------------------------------------------


def path_text(found: Path, width: int, top: int | None) -> Listing:
    """Return a path with a row for each equation; those in bodies are indented.

    Args:
        found: The path.
        width: The width in characters.
        top: The number of equations shown; None for all.
    """
    if found.steps is None:
        return Listing(printable([f"{found.start} does not reach {found.end}"]))
    sentence = f"{found.start} reaches {found.end} through {plural(len(found.steps), 'equation')}"
    tokens: list[str] = [Heading(sentence)]
    steps, rest = split(found.steps, top)
    names = [f"{'  ' * step.depth}{step.primitive}" for step in steps]
    longest = max(map(len, names), default=0)
    types = max((len(step.type) for step in steps), default=0)
    places = [step.source for step in steps]
    places, room = _fitting(places, width - longest - types - 3 * len(GAP))
    for step, name, place in zip(steps, names, places, strict=True):
        row = [PrimitiveName(f"{name:{longest}}"), GAP, Type(f"{step.type:{types}}"), GAP]
        code = "" if step.frame is None else source_text.line(step.frame.file, step.frame.line)
        if step.frame is not None:
            row += [SourceLine(place), GAP, *cut([" ".join(code.split())], room)]
        tokens += "\n", *row
    tokens += ["\n", Comment(more(len(rest)))] if rest else []
    return Listing(printable(tokens))
