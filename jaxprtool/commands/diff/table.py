"""Render a diff of two programs as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.commands.profile.table import SPLIT
from jaxprtool.ir.documents import document, duration, in_bytes, plural, some, with_prefix
from jaxprtool.ir.equations import WEAK_NOTE, bodies, type_of, weak_marks
from jaxprtool.ir.notation import (
    AddedToken,
    BinderToken,
    ChangedToken,
    Comment,
    Heading,
    ParameterToken,
    PrimitiveName,
    RemovedToken,
    SourceLineToken,
)
from jaxprtool.ir.notation.layout import Selection, omitted_equations
from jaxprtool.ir.source_text import Place
from jaxprtool.ir.trees import Alike, alike
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.render import views
from jaxprtool.render.terminal.lines import (
    Cell,
    Listing,
    columns,
    joined_lines,
    printable,
    wrapped_cell,
)
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tables import (
    ALL,
    HEADING,
    ROWS,
    Rendering,
    colored_text,
    drawn,
    more,
    split_rows,
)
from jaxprtool.render.terminal.tree import Reader

if TYPE_CHECKING:
    from jaxprtool.commands.diff.diff import (
        BorderChange,
        Diff,
        DiffTimes,
        Hunk,
        Line,
        Seconds,
        Size,
    )
    from jaxprtool.commands.diff.modules import LineChange, ModuleDiff
    from jaxprtool.ir.differences import Difference

_MARKS = {
    "removed": RemovedToken("- "),
    "added": AddedToken("+ "),
    "changed": ChangedToken("~ "),
}

#: An operand or result of a changed equation: whether it changed, and its tokens.
_Entry: TypeAlias = tuple[bool, list[str]]

#: The maximum number of operands or results of a changed equation that are all shown.
_MANY = 24

#: The maximum number of arrays of a removed or added pytree that are listed individually.
_LISTED = 3

#: The indent of the continuation of a long line.
_INDENT = "      "


def diff_text(diff: Diff, width: int, top: int | None = ROWS, option: str = ALL) -> Listing:
    """Render the verdict, the sizes of both programs, and the hunks.

    Args:
        diff: The diff.
        width: The width of the terminal, in characters.
        top: The number of arguments and results, and of equations, shown; None for all.
        option: The option or command that shows all.
    """
    lines = [*_summary(diff), *_sizes(diff, width)]
    lines += _border(diff, width, top, option)
    lines += _hunks(diff, width, top, option)
    if diff.retyped:
        lines += [[], [Comment(_retyped(diff))]]
    return Listing(printable(joined_lines(lines)))


def diff_stat(diff: Diff, width: int, top: int | None) -> Listing:
    """Render the verdict, the sizes, and the number of equations that differ by source line.

    Args:
        diff: The diff.
        width: The width of the terminal, in characters.
        top: The number of arguments and results, and of lines, shown; None for all.
    """
    lines = [*_summary(diff), *_sizes(diff, width), *_border(diff, width, top, ALL)]
    counts: dict[str, Counter[str]] = {}
    for line in diff.lines:
        counts.setdefault(line.source or "unknown line", Counter())[line.kind] += 1
    rows: list[Sequence[Cell]] = []
    shown, rest = split_rows([*counts.items()], top)
    for source, kinds in shown:
        marks = [
            [type(mark)(f"{mark.strip()}{kinds[kind]:,}")] if kinds[kind] else []
            for kind, mark in _MARKS.items()
        ]
        rows.append([[SourceLineToken(source)], *marks])
    if rows:
        lines += [[], [*columns(rows, width)], *_more(len(rest), ALL)]
    if diff.retyped:
        lines += [[], [Comment(_retyped(diff))]]
    return Listing(printable(joined_lines(lines)))


def _summary(diff: Diff) -> Iterator[list[str]]:
    names = dict.fromkeys((diff.before.name, diff.after.name))
    counts = [
        f"{len(lines):,} {what}"
        for what, lines in (
            ("removed", diff.removed),
            ("added", diff.added),
            ("changed", diff.changed),
        )
        if lines
    ]
    rest = f": {', '.join(counts)}" if counts else ""
    yield [Heading(f"{' → '.join(names)}: {diff.verdict}{rest}")]


def _sizes(diff: Diff, width: int) -> Iterator[list[str]]:
    """Yield a table of the sizes of both programs; equal ones are shown once."""
    rows: list[Sequence[Cell]] = []
    for what, text in _QUANTITIES:
        old, new = text(diff.before), text(diff.after)
        same = old == new
        rows.append(
            [[Comment(what)], [old] if same else [RemovedToken(old), " → ", AddedToken(new)]]
        )
    if (times := diff.times) is not None:
        parts = times.whole, times.differing, times.others, times.no_line
        rows += [
            [[Comment(what)], _seconds(part)]
            for what, part in zip(_TIMES, parts, strict=True)
            if part.before or part.after
        ]
    yield []
    yield [*columns(rows, width)]
    if diff.times is not None:
        note = "each program was measured separately; `bench` tells a difference from noise"
        yield from map(list, wrapped_cell([Comment(note)], width))


#: The rows of measured times: of a call, and of its parts.
_TIMES = ("measured time", "  lines that differ", "  other lines", "  no line, or idle")


def _seconds(part: Seconds) -> list[str]:
    """Return `~3.1 ms → ~2.5 ms`."""
    mark = SPLIT if part.is_split else ""
    return _arrow(mark + duration(part.before), mark + duration(part.after))


def _number(number: Any) -> str:
    return with_prefix(number) if isinstance(number, int | float) else str(number)


def _bytes(number: Any) -> str:
    return in_bytes(number) if isinstance(number, int | float) else str(number)


_QUANTITIES: tuple[tuple[str, Any], ...] = (
    ("equations", lambda size: f"{size.equations:,}"),
    ("FLOPs", lambda size: _number(size.work.flops)),
    ("bytes", lambda size: _bytes(size.work.bytes)),
)


def _more(count: int, option: str) -> list[list[str]]:
    """Return the line on rows that are not shown, if there are any."""
    return [[Comment(more(count, option=option))]] if count else []


def _border(diff: Diff, width: int, top: int | None, option: str) -> Iterator[list[str]]:
    if diff.border:
        yield []
    lines, others = split_rows([*_border_lines(diff)], top)
    for mark, *rest in lines:
        for number, tokens in enumerate(wrapped_cell(rest, width - len(mark))):
            yield [mark if number == 0 else _INDENT, *tokens]
    yield from _more(len(others), option)
    if any("~" in change.before[:1] + change.after[:1] for change in diff.border):
        yield [Comment(WEAK_NOTE)]


def _border_lines(diff: Diff) -> Iterator[list[str]]:
    """Yield a line for each changed argument or result; alike changes share a line."""
    by_tree = groupby(diff.border, lambda change: (change.what, change.within, not change.before))
    few: list[BorderChange] = []
    for (what, within, _), group in by_tree:
        changes = list(group)
        if not within or len(changes) <= _LISTED:
            few += changes
            continue
        yield from map(_border_line, _alike(few))
        few = []
        mark = _MARKS["removed" if changes[0].before else "added"]
        yield [mark, *_named(f"{what}s", within), f"{len(changes):,} arrays"]
    yield from map(_border_line, _alike(few))


def _alike(changes: Sequence[BorderChange]) -> list[Alike[BorderChange]]:
    return alike(
        changes,
        lambda change: change.name,
        lambda change: (change.what, change.before, change.after),
    )


def _border_line(group: Alike[BorderChange]) -> list[str]:
    change = group.items[0]
    count = f"{len(group.items)} x " if group.items[1:] else ""
    named = [*_named(change.what, group.path), count]
    if change.before and change.after:
        types = [RemovedToken(change.before), " → ", AddedToken(change.after)]
        return [_MARKS["changed"], *named, *types]
    kind = "removed" if change.before else "added"
    return [_MARKS[kind], *named, change.before or change.after]


def _named(what: str, name: str) -> list[str]:
    """Return the tokens `argument x: `, or `argument[0]: ` if the name already has the kind."""
    return ["" if name.startswith(what.removesuffix("s")) else f"{what} ", BinderToken(name), ": "]


def _retyped(diff: Diff) -> str:
    has, their = ("has", "its") if len(diff.retyped) == 1 else ("have", "their")
    count = plural(len(diff.retyped), "more equation" if diff.hunks else "equation")
    return f"{count} {has} other types, because {their} operands do"


# --- hunks ------------------------------------------------------------------------------------


def _hunks(diff: Diff, width: int, top: int | None, option: str) -> Iterator[list[str]]:
    """Yield the lines of the hunks, of at most `top` equations.

    Hunks that differ only in names are shown once with a count.
    """
    if not diff.hunks:
        return
    texts = _Texts(diff)
    alike: dict[Hashable, list[int]] = {}
    for number, hunk in enumerate(diff.hunks):
        alike.setdefault(texts.key(hunk), []).append(number)
    path: tuple[str, ...] = ()
    left, hidden = top, 0
    for hunks in alike.values():
        hunk = diff.hunks[hunks[0]]
        rows, rest = split_rows([[*lines] for _, lines in groupby(hunk.lines, texts.call)], left)
        hidden += len(rest)
        if not rows:
            continue
        left = None if left is None else left - len(rows)
        yield []
        is_new = hunk.path != path
        path = hunk.path
        places = [[Comment(f"in {', in '.join(reversed(path))}")]] if path and is_new else []
        times = [[Comment(f"{len(hunks):,} times")]] if len(hunks) > 1 else []
        for tokens in (*places, *times):
            yield from map(list, wrapped_cell(tokens, width))
        if diff.times is not None and any(line.equation is not None for line in hunk.lines):
            yield [Comment("time of these lines: "), *_seconds(diff.times.hunks[hunks[0]])]
        source = None
        for line, *others in rows:
            if line.source != source and line.equation is not None:
                source = line.source
                yield from map(list, wrapped_cell(_source(line), width))
            yield from _broken(line, texts.line(hunk, line, 1 + len(others)), width)
    yield from [[], *_more(hidden, option)] if hidden else []


def _source(line: Line) -> list[str]:
    first, arrow, behind = line.source.partition(" ← ")
    if not first:
        return [Comment("unknown line")]
    return [SourceLineToken(first), *([Comment(arrow + behind)] if behind else [])]


def _broken(line: Line, tokens: list[str], width: int) -> Iterator[list[str]]:
    """Wrap the tokens of an equation, and yield its lines. The first begins with the mark."""
    room = width - len(_INDENT)
    for number, rest in enumerate(wrapped_cell(tokens, room)):
        yield ["  ", _MARKS[line.kind], *rest] if number == 0 else [_INDENT, *rest]


class _Texts:
    """The texts of equations. A variable of the first program is named as its counterpart."""

    def __init__(self, diff: Diff):
        # Two values may differ only where they would be cut.
        options = ShowOptions(names=True, terse=True, whole=True)
        self._readers = tuple(Reader(about, options) for about in diff.signatures)
        self._count = Selection().count
        self._name_alike(diff)

    def _name_alike(self, diff: Diff) -> None:
        old, new = self._readers
        taken = new.names()
        renamed = set()
        for v, w in (pair for body in diff.bodies for pair in body.values):
            # A result dropped in the second program may be used in the first.
            if id(v) not in renamed and (name := new.name(w)) != "_":
                old.rename(v, name)
                renamed.add(id(v))
        befores = dict.fromkeys(body.bodies[0] for body in diff.bodies)
        for var in (var for body in befores for eqn in body.eqns for var in eqn.outvars):
            if id(var) not in renamed and (name := old.name(var)) in taken:
                old.rename(var, f"{name}'" if name != "_" else name)

    def key(self, hunk: Hunk) -> Hashable:
        """Return a key, equal for hunks that differ only in names."""
        numbers = hunk.body.keys.equation
        lines = [
            (
                line.kind,
                line.source,
                *(eqn and numbers(eqn, 0) for eqn in (line.before, line.after)),  # type: ignore[arg-type]
                len(line.differences),
            )
            for line in hunk.lines
        ]
        alone = id(hunk) if any(line.equation is None for line in hunk.lines) else None
        return hunk.path, tuple(lines), alone

    def call(self, line: Line) -> Hashable:
        """Return a key, equal for inlined or outlined calls that are shown as one line.

        Other lines have unique keys.
        """
        if not _is_opened(line):
            return id(line)
        return line.source, *self._opened(line, 1)

    def line(self, hunk: Hunk, line: Line, times: int = 1) -> list[str]:
        """Return the tokens of a line. `times` is the number of calls that it represents."""
        if _is_opened(line):
            return self._opened(line, times)
        if line.before is not None and line.after is not None:
            return self._changed(line.before, line.after, line.differences)
        if line.equation is None:
            return [
                token
                for difference in line.differences
                for token in self._of_body(hunk, difference)
            ][1:]
        reader = self._readers[line.before is None]
        tokens = reader.line(line.equation, types=True)
        return [*(tokens if line.equation.invars else tokens[:-1]), *self._inside(line.equation)]

    def _opened(self, line: Line, times: int) -> list[str]:
        """Return the tokens of a call that was inlined or outlined."""
        eqn = line.equation
        assert eqn is not None
        count = times * sum(self._count(body) for _, body in bodies(eqn))
        how = line.differences[0].name + (f", {times:,} times" if times > 1 else "")
        said = f" was {how}: {plural(count, 'equation')} moved"
        return [*self._readers[line.before is None].head(eqn), Comment(said)]

    def _inside(self, eqn: JaxprEqn) -> list[str]:
        """Return the number of equations in the bodies of an equation, as a comment."""
        nested = bodies(eqn)
        if not nested:
            return []
        return [Comment(f" {{{omitted_equations(sum(self._count(body) for _, body in nested))}}}")]

    def _of_body(self, hunk: Hunk, difference: Difference) -> list[str]:
        what = difference.part
        if what == "constant":
            old, new = difference.before, difference.after
            var = old if new is None else new
            reader = self._readers[new is not None]
            said = (
                "was removed"
                if new is None
                else "was added"
                if old is None
                else "has another value"
            )
            name = BinderToken(reader.name(var))
            return [", ", "constant ", name, reader.type_of(var), f" {said}"]
        before, after = self._readers
        arrow = _arrow(before.operand(difference.before), after.operand(difference.after))
        return [", ", f"result {difference.place} of the body: ", *arrow]

    def _changed(
        self, old: JaxprEqn, new: JaxprEqn, differences: Sequence[Difference]
    ) -> list[str]:
        """Return the tokens of a changed equation, with each change as `old → new`."""
        after = self._readers[1]
        at = {
            (difference.part, difference.name or difference.place): difference
            for difference in differences
            if _is_new(difference)
        }
        binders: list[_Entry] = []
        for j, var in enumerate(new.outvars):
            name = [" ", BinderToken(after.name(var))]
            difference = at.get(("result", j))
            if difference is None or difference.before is None:
                binders.append((difference is not None, [*name, after.type_of(var)]))
            else:
                was_weak, is_weak = weak_marks(difference.before, difference.after)
                types = was_weak + type_of(difference.before), is_weak + type_of(difference.after)
                binders.append((True, [*name, ":", *_arrow(*types)]))
        tokens = _folded(binders)
        tokens += [" = "] if tokens else []
        was = at.get(("primitive", 0))
        tokens += [RemovedToken(was.before), " → "] if was else []
        tokens += [PrimitiveName(new.primitive.name), *self._parameters(old, new, differences)]
        tokens += _folded(self._operands(new, differences))
        said = {"rules": "with different derivative rules", "order": "in a different order"}
        more = [Comment(f"  {said[d.part]}") for d in differences if d.part in said]
        counts = len(old.outvars), len(new.outvars)
        if counts[0] != counts[1]:
            count, how = abs(counts[0] - counts[1]), "fewer" if counts[1] < counts[0] else "more"
            more.append(Comment(f"  {plural(count, 'result')} {how}"))
        return [*tokens[1 if new.outvars else 0 :], *self._inside(new), *more]

    def _parameters(
        self, old: JaxprEqn, new: JaxprEqn, differences: Sequence[Difference]
    ) -> list[str]:
        """Return the tokens of a changed equation's parameters: `[axes=(0,) → (1,)]`."""
        changed = {
            difference.name: difference
            for difference in differences
            if difference.part == "parameter"
        }
        shown = [
            reader.parameters(eqn) for reader, eqn in zip(self._readers, (old, new), strict=True)
        ]
        tokens: list[str] = []
        for name in sorted({*shown[1], *changed} - {""}):
            tokens += " ", ParameterToken(f"{name}=")
            if name not in changed:
                tokens.append(shown[1][name])
                continue
            values = changed[name].before, changed[name].after
            texts = [
                str(value)
                if callable(eqn.params.get(name, print))
                else texts.get(name) or reader.value_text(eqn, name)
                for texts, reader, eqn, value in zip(
                    shown, self._readers, (old, new), values, strict=True
                )
            ]
            tokens += _arrow(*_unlike(*texts))
        return ["[", *tokens[1:], "]"] if tokens else []

    def _operands(self, new: JaxprEqn, differences: Sequence[Difference]) -> Iterator[_Entry]:
        """Yield the operands of a changed equation, with removed ones at their old places."""
        before, after = self._readers
        differing = [difference for difference in differences if difference.part == "operand"]
        gone = {
            difference.place: difference.before
            for difference in differing
            if difference.after is None
        }
        others = {
            difference.place: difference.before
            for difference in differing
            if difference.after is not None
        }
        place = 0  # in the first equation
        for j in range(len(new.invars) + 1):
            while place in gone:
                yield True, [" (", *_arrow(before.operand(gone[place]), "nothing"), ")"]
                place += 1
            if j == len(new.invars):
                break
            if j not in others:
                yield False, [" ", after.operand(new.invars[j])]
            else:
                old = "nothing" if others[j] is None else before.operand(others[j])
                yield True, [" (", *_arrow(old, after.operand(new.invars[j])), ")"]
            place += j not in others or others[j] is not None


def _unlike(old: str, new: str) -> tuple[str, str]:
    """Return the texts of two values that differ; those of objects may be alike."""
    return (old, new) if old != new else (f"one {old}", f"another {new}")


def _folded(entries: Iterable[_Entry]) -> list[str]:
    """Return the tokens of operands or results; of many, only of those that changed."""
    entries = list(entries)
    shown = [tokens for changed, tokens in entries if changed or len(entries) <= _MANY]
    if rest := len(entries) - len(shown):
        shown.append([" ", Comment(f"… {rest:,} {'more' if shown else 'unchanged'}")])
    return [token for tokens in shown for token in tokens]


def _is_opened(line: Line) -> bool:
    """Return True if a line is a call that was inlined or outlined."""
    return bool(line.differences) and line.differences[0].part == "call"


def _is_new(difference: Difference) -> bool:
    """Return True unless the difference is an operand or result that was removed."""
    return difference.part not in ("operand", "result") or difference.after is not None


def _arrow(old: str, new: str) -> list[str]:
    return [RemovedToken(old), " → ", AddedToken(new)]


# --- HLO modules ----------------------------------------------------------------------------------
# The figures of two HLO modules by line, and the kernels that differ.

#: The columns of figures: the field of `ModuleFigures`, the heading, and how numbers are written.
_FIGURES: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("kernels", "kernels", "{:,}".format),
    ("fusions", "fusions", "{:,}".format),
    ("copies", "copies", "{:,}".format),
    ("transposes", "transposes", "{:,}".format),
    ("collectives", "collectives", "{:,}".format),
    ("flops", "FLOPs", with_prefix),
    ("bytes", "bytes", in_bytes),
    ("temporary_bytes", "temporaries", in_bytes),
    ("donated_bytes", "donated", in_bytes),
)

#: The number of kernels listed on each side of a row.
_KERNELS = 4

#: The number of operations listed below a line.
_OPERATIONS = 5


def module_diff_table(
    diff: ModuleDiff, width: int, top: int | None = ROWS, kernels: bool = False
) -> Rendering:
    """Return the figures of two HLO modules, and those of each line, or the kernels that differ.

    Args:
        diff: The differences.
        width: The width in characters.
        top: The number of rows shown; None for all.
        kernels: Whether to show kernels, and not lines.
    """
    verdict = "the same" if diff.is_same else "different"
    names = " → ".join(dict.fromkeys(diff.names))
    parts: list[RenderableType] = [Text(f"{names}: {verdict}", style=HEADING)]
    figures = [
        [Comment(heading), *_change(getattr(diff.before, field), getattr(diff.after, field), text)]
        for field, heading, text in _FIGURES
        if getattr(diff.before, field) or getattr(diff.after, field)
    ]
    parts += [colored_text([heading, " ", *texts]) for heading, *texts in figures]
    if diff.is_same:
        return Rendering(Group(*parts), width)
    if not diff.has_memory:
        parts.append(Text("temporaries: unknown, because a module has no schedule"))
    table = _kernel_table(diff) if kernels else _line_table(diff)
    if table.rows:
        parts += [Text(), drawn(table, top)]
    elif not kernels:
        parts.append(Text("no line differs in these figures; --kernels shows the kernels"))
    return Rendering(Group(*parts), width)


def _line_table(diff: ModuleDiff) -> views.Table:
    has_donations = bool(diff.lost_donations or diff.new_donations)
    figures = [
        row
        for row in _FIGURES
        if any(getattr(c.before, row[0]) != getattr(c.after, row[0]) for c in diff.lines)
        or (has_donations and row[0] == "donated_bytes")
    ]
    columns = [views.number_column(heading) for _, heading, _ in figures]
    columns.append(views.Column("line", SourceLineToken))
    rows = []
    if has_donations:
        size = diff.after.donated_bytes - diff.before.donated_bytes
        cells = [_delta(size * (field == "donated_bytes"), text) for field, _, text in figures]
        rows.append([*cells, _donations_cell(diff)])
    for change in diff.lines:
        cells = [
            _delta(getattr(change.after, field) - getattr(change.before, field), text)
            for field, _, text in figures
        ]
        rows.append([*cells, _line_cell(change)])
    return views.Table("", columns, rows)


def _donations_cell(diff: ModuleDiff) -> views.Cell:
    """Return the cell of the arguments that only one of the modules donates."""
    kinds = ("no longer donated", diff.lost_donations), ("now donated", diff.new_donations)
    texts = [f"{word}: {some(names, _OPERATIONS)}" for word, names in kinds if names]
    return views.Cell("; ".join(texts))


def _line_cell(change: LineChange) -> views.Cell:
    """Return the cell of a line, with the operations that only one of the modules has."""
    kinds = ("lost", change.removed), ("new", change.added)
    notes = [f"{word}: {some(operations, _OPERATIONS)}" for word, operations in kinds if operations]
    below = views.Cell(Comment("; ".join(notes))) if notes else None
    return _place_cell(change.place)._replace(below=below)


def _delta(difference: int, text: Callable[[int], str]) -> views.Cell:
    """Return the cell of a difference, `+5` or `-1.2 MiB`; a dot for none."""
    if not difference:
        return views.Cell(Comment("·"), 0)
    role, sign = (AddedToken, "+") if difference > 0 else (RemovedToken, "-")
    return views.Cell([role(f"{sign}{text(abs(difference))}")], difference)


def _place_cell(place: Place) -> views.Cell:
    return views.Cell(place, link=place) if place else views.Cell(Comment("XLA's own"))


def _change(old: int, new: int, text: Callable[[int], str]) -> list[str]:
    """Return `60 → 70`; the number alone in gray if it has not changed."""
    return [Comment(text(old))] if text(old) == text(new) else _arrow(text(old), text(new))


def _kernel_table(diff: ModuleDiff) -> views.Table:
    columns = [
        views.number_column("bytes"),
        views.Column("before", RemovedToken),
        views.Column("after", AddedToken),
        views.Column("line", SourceLineToken),
    ]
    rows = []
    for change in diff.kernels:
        old, new = change.bytes_before, change.bytes_after
        rows.append(
            [
                views.Cell(_change(old, new, in_bytes), new - old),
                _kernel_list(change.before, "lost", change.removed),
                _kernel_list(change.after, "new", change.added),
                _place_cell(change.place),
            ]
        )
    return views.Table("", columns, rows)


def _kernel_list(kernels: Sequence[str], word: str, operations: Sequence[str]) -> views.Cell:
    """Return the cell of the kernels of one side, and of what only they compute."""
    shown, rest = split_rows(kernels, _KERNELS)
    listed = [*shown, *filter(None, [more(len(rest), option="")])] or ["none"]
    note = f"{word}: {', '.join(operations)}" if operations and kernels else ""
    return views.Cell("\n".join(listed), below=views.Cell(Comment(note)) if note else None)


# --- as JSON ----------------------------------------------------------------------------------


def diff_document(diff: Diff) -> DiffDocument:
    """Return the document of a diff."""
    texts = _Texts(diff) if diff.hunks else None
    lines: dict[str, list[DiffLine]] = {"removed": [], "added": [], "changed": []}
    for number, hunk in enumerate(diff.hunks):
        for line in hunk.lines:
            assert texts is not None
            primitive = "" if line.equation is None else line.equation.primitive.name
            text = "".join(texts.line(hunk, line))
            kinds = {difference.kind for difference in line.differences}
            lines[line.kind].append(
                DiffLine(number, primitive, text, line.source, hunk.path, sorted(kinds))
            )
    return DiffDocument(
        diff.verdict,
        lines["removed"],
        lines["added"],
        lines["changed"],
        len(diff.retyped),
        diff.border,
        diff.before,
        diff.after,
        diff.times,
    )


@document(names={"source": "place"})
class DiffLine(NamedTuple):
    """An equation that only one program has, or that differs from its counterpart."""

    hunk: Annotated[int, "The number of its hunk, from 0."]
    primitive: Annotated[str, "The primitive; empty if a body's results or constants differ."]
    text: Annotated[str, "The equation; for a changed one, the old and the new text."]
    source: Annotated[Place, "The user's line, followed by the library's; null if unknown."]
    path: Annotated[Sequence[str], "The enclosing equations, the outermost first."]
    differs_in: Annotated[
        list[str],
        "For a changed equation: `constant`, `dtype`, `shape`, `parameter`, `operand`, "
        "`primitive`, `call`.",
    ]


@document(optional=("measured",))
class DiffDocument(NamedTuple):
    """`diff`: the differences between two programs."""

    verdict: Annotated[
        str, "`equivalent`, `same up to constants`, `same up to dtypes` or `different`."
    ]
    removed: Annotated[list[DiffLine], "The equations that only the first program has."]
    added: Annotated[list[DiffLine], "The equations that only the second program has."]
    changed: Annotated[list[DiffLine], "The equations that differ from their counterparts."]
    retyped: Annotated[
        int, "The number of equations that differ only in types, because their operands do."
    ]
    border: Annotated[Sequence[BorderChange], "The arguments, results and axes that differ."]
    before: Annotated[Size, "The size of the first program."]
    after: Annotated[Size, "The size of the second program."]
    measured: Annotated[DiffTimes | None, "With `--measure`: the measured times."] = None
