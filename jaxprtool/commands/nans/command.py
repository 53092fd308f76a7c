"""`jaxprtool nans`: the first equation that produces a NaN or an infinity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.cli import options, output
from jaxprtool.cli.session import Session, command, printed_by_functions, ready, require_device
from jaxprtool.ir.documents import document, plural, some
from jaxprtool.ir.notation import BinderToken, Comment, PrimitiveName, Type
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import ALL, Rendering, drawn, facts_table, line_text
from jaxprtool.render.views import Cell, Column, Row, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.commands.nans.nans import BadValue, KernelStep, NanSearch, Operand
    from jaxprtool.commands.nans.nans import Operand as NanOperand

# --- table ----------------------------------------------------------------------------------------
# NaNs and infinities found, as text and as JSON.

#: The maximum number of results, equations or devices named.
_FEW = 4


def first_found(search: NanSearch, width: int) -> Rendering:
    """Return the details of the first one found, and the number of others."""
    first = search.first
    if first is None:
        return Rendering(Text(f"{search.name}: no equation makes a NaN or an infinity"), width)
    parts: list[RenderableType] = [Text(_heading(search, first), style=tables.HEADING), Text()]
    if first.source:
        parts.append(line_text(first.source, first.code))
    parts.append(facts_table(_facts(first)))
    if first.operands:
        parts += [Text(), drawn(_values("operands", first.operands))]
        earlier = [value for value in first.way if value not in first.operands]
        if earlier:
            parts += [Text(), drawn(_values("earlier values, nearest first", earlier))]
    others = len(search.found) - 1
    if others:
        verb = "makes" if others == 1 else "make"
        said = f"{plural(others, 'other')} {verb} one; {ALL} shows them"
        parts += [Text(), Text(said, style=tables.COMMENT)]
    return Rendering(Group(*parts), width)


def all_found(search: NanSearch, width: int, top: int | None) -> Rendering:
    """Return a row for each value found; those that reach a result come first.

    Args:
        search: The result of the search.
        width: The width in characters.
        top: The number of rows; None for all.
    """
    if not search.found:
        return first_found(search, width)
    columns = [
        Column("what"),
        Column("from", PrimitiveName),
        Column("line", BinderToken),
        Column("iteration"),
        Column("reaches"),
    ]
    counts = Counter[tuple[str, ...]]()
    for value in search.found:
        iterations = ", ".join(map(str, value.iteration))
        made_by = value.primitive or value.argument or "the program"
        reached = _reached(value)
        reached = reached if len(reached) <= width // 2 else _reached(value, 1)
        counts[value.kind, made_by, value.source, iterations, reached] += 1
    rows: list[Row] = [
        [f"{kind} ({count:,} times)" if count > 1 else kind, *others]
        for (kind, *others), count in counts.items()  # equal blocks of a model
    ]
    table = Table(f"{search.name}: {len(search.found):,} found", columns, rows)
    after = [Text(f"\nthe program then raised {search.raised}")] if search.raised else []
    return Rendering(Group(drawn(table, top), *after), width)


def _heading(search: NanSearch, first: BadValue) -> str:
    a = "a NaN" if first.kind == "NaN" else "an infinity"
    leads = "" if first.raises else f", which reaches {_reached(first)}"
    then = f"; the program then raised {search.raised}" if search.raised else ""
    outcome = f"{a}{leads}{then}"
    if first.argument:
        return f"{search.name}: argument {first.argument} contains {outcome}"
    if first.raises and not first.primitive:
        return f"{search.name}: a constant of the program contains {outcome}"
    if not first.primitive:
        verb = "is" if len(first.reaches) == 1 else "are"
        return f"{search.name}: {_reached(first)} {verb} NaN (a constant of the program)"
    what = first.primitive
    if first.kernel is not None:
        kernel = f"the kernel {first.kernel.name}"
        what = kernel if what == "pallas_call" else f"{what} in {kernel}"
    return f"{search.name}: {what} makes {outcome}"


def _reached(value: BadValue, most: int = _FEW) -> str:
    """Return the results that a value reaches, of which at most so many are named."""
    if value.raises:
        return "the error"
    if value.reaches:
        return some(value.reaches, most)
    return f"no result: {value.dropped} drops it" if value.dropped else "no result"


def _facts(first: BadValue) -> Iterator[tuple[str, str]]:
    kinds = "infinite" if first.kind == "infinity" else "NaN"
    if not first.count:
        yield "value", f"{first.type}, some {kinds}"
    elif first.size == 1:
        yield "value", f"{first.type}, {kinds}"
    else:
        which = "all" if first.count == first.size else f"{first.count:,} of {first.size:,}"
        place = ", ".join(map(str, first.position))
        yield "value", f"{first.type}, {which} {kinds}, the first at [{place}]"
    if first.kernel is not None:
        yield from _step(first.kernel)
    if first.devices:
        yield "on", some(first.devices, _FEW)
    if first.path:
        yield "in", ", ".join(first.path)
    if first.iteration:
        yield "iteration", ", ".join(map(str, first.iteration)) + " (counted from 0)"
    if first.times > 1:
        yield "times", f"{first.times:,}"
    if first.scope:
        yield "scope", first.scope
    if first.forward:
        yield "derivative of", first.forward
    if first.leads_to:
        yield "leads to", some([f"another in {name}" for name in first.leads_to], _FEW)


def _step(kernel: KernelStep) -> Iterator[tuple[str, str]]:
    """Yield the step of a kernel and the Ref that has the value, or why they are not known."""
    if kernel.position is None:
        yield "kernel", kernel.note
        return
    step = zip(kernel.axes, kernel.position, strict=True)
    yield "step", ", ".join(f"{axis}={i}" for axis, i in step) or "the only one"
    yield "Ref", f"{kernel.ref}, {kernel.note}" if kernel.note else kernel.ref


def _values(heading: str, values: Sequence[Operand]) -> Table:
    numbers = map(number_column, ("minimum", "maximum", "element"))
    rows: list[Row] = []
    for value in values:
        wrong = [(value.nans, "NaN"), (value.infs, "infinite")]
        bad = ", ".join(f"{count:,} {kind}" for count, kind in wrong if count)
        what = [
            PrimitiveName(value.argument or value.primitive or "a constant"),
            BinderToken(f" {value.source}" if value.source else ""),
            Comment(f" ({bad})" if bad else ""),
        ]
        bounds = map(_number, (value.low, value.high, value.element))
        rows.append([Cell(what), value.type, *bounds])
    return Table(heading, [Column("value"), Column("type", Type), *numbers], rows)


def _number(number: object) -> str:
    return "" if number is None else f"{number:.6g}" if isinstance(number, float) else str(number)


def nans_document(search: NanSearch) -> NansDocument:
    """Return the document of the first one found and all others."""
    first = search.first
    if first is None:
        return NansDocument(search.name, False)
    of_first = first.primitive, first.source, first.path, first.iteration, first.operands
    return NansDocument(search.name, True, *of_first, search.found, search.raised)


@document(names={"source": "place"}, optional=("raised",))
class NansDocument(NamedTuple):
    """`nans`: the first NaN or infinity that reaches a result, or else the first; and all others.

    If it is in an argument, `primitive` is empty and `place` null.
    """

    name: Annotated[str, "The name of the program."]
    found: Annotated[bool, "Whether a NaN or an infinity was found."]
    primitive: Annotated[str, "The primitive that computes it; empty if there is none."] = ""
    source: Annotated[Place, "The user's line; null if unknown."] = UNKNOWN
    path: Annotated[Sequence[str], "The enclosing equations, the outermost first."] = ()
    iteration: Annotated[Sequence[int], "The iteration of each enclosing loop, from 0."] = ()
    operands: Annotated[Sequence[NanOperand], "The operands of the equation."] = ()
    all: Annotated[Sequence[BadValue], "All values found; those that reach a result first."] = ()
    raised: Annotated[str, "The error that the program then raised; missing if none."] = ""


# --- command --------------------------------------------------------------------------------------
# `jaxprtool nans`: the first equation that produces a NaN or an infinity.

_Top = Annotated[int | None, options.top_option("only the first, in detail")]


@command
def nans_command(
    session: Session,
    types: options.Types = None,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Find the equation that produces the first NaN or infinity.

    Run the function equation by equation, also inside calls, branches and every iteration of loops.
    Show the first NaN or infinity that reaches a result or, if none does, the first one. The exit
    code is 1 if there is one. --all shows every equation that produces one, those that reach a
    result first.

    [bold]Examples[/]

      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool nans samples/rnn.py:loss -p value_and_grad --all
    """
    rows = options.row_limit(top, all)
    session.start(cache=True)
    from jaxprtool.commands.nans.nans import find_nan

    require_device(session.function, backend)
    prepared = ready(session.given("nans takes", types), seed, backend)
    session.on_progress(f"running {prepared.program.name}, equation by equation")
    with printed_by_functions(json):
        search = find_nan(prepared.program, prepared.filled.arguments, prepared.device)
    prepared.note_random(session.target)
    if json:
        output.write_json(nans_document(search))
    elif top or all:
        output.write_rendered(all_found(search, output.width(), rows))
    else:
        output.write_rendered(first_found(search, output.width()))
    if search.found:
        raise typer.Exit(1)
