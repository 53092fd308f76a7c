"""`jaxprtool show`: a function's jaxpr, as text, tree, table, JSON or statistics."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program

    Programs = list[tuple[str, Program]]

_SHOWN = "What is shown"


class Format(StrEnum):
    """How a program is shown."""

    text = "text"
    tree = "tree"
    table = "table"
    json = "json"


_Format = Annotated[
    Format,
    typer.Option("--format", "-f", help="How to show it.", rich_help_panel=_SHOWN),
]
_Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="N",
        min=0,
        help="Fold jaxprs nested deeper than N to one line.",
        rich_help_panel=_SHOWN,
    ),
]
_Only = Annotated[
    Any,
    typer.Option(
        "--only",
        metavar="NAME,…",
        parser=options.names,
        help="Only these primitives, where they stand: dot_general,conv*",
        rich_help_panel=_SHOWN,
    ),
]
_Source = Annotated[
    bool,
    typer.Option(
        "--source", metavar="", help="Each equation's file and line.", rich_help_panel=_SHOWN
    ),
]
_Scopes = Annotated[
    bool,
    typer.Option(
        "--scopes", metavar="", help="Each equation's name stack.", rich_help_panel=_SHOWN
    ),
]
_NoTypes = Annotated[
    bool,
    typer.Option("--no-types", metavar="", help="Leave types out.", rich_help_panel=_SHOWN),
]
_Stats = Annotated[
    bool,
    typer.Option(
        "--stats",
        metavar="",
        help="Instead: equations by primitive and depth, constants, arguments.",
        rich_help_panel=_SHOWN,
    ),
]
_Pager = Annotated[
    bool,
    typer.Option("--pager", metavar="", help="Show it in $PAGER (less).", rich_help_panel="Output"),
]


def show(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    format: _Format = Format.text,
    depth: _Depth = None,
    only: _Only = None,
    source: _Source = False,
    scopes: _Scopes = False,
    no_types: _NoTypes = False,
    stats: _Stats = False,
    json: options.Json = False,
    pager: _Pager = False,
    traceback: options.Traceback = False,
) -> None:
    """Show a function's jaxpr in JAX's own notation.

    [bold]Examples[/]

      jaxprtool show samples/transformer.py:loss --depth 1
      jaxprtool show samples/rnn.py:loss --source --only scan,dot_general
      jaxprtool show jax.numpy:sinc --args "f32[8]" --stats
      jaxprtool show samples/solver.py:kepler --format tree --pager
    """
    options.start_jax(x64)
    pipeline = options.pipeline(passes, plugin)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    programs = options.each(pipeline(options.trace(entry, pipeline)))
    selected = {"depth": depth, "only": only, "types": not no_types}
    if json or format is Format.json:
        output.write_json(_document(programs, stats, selected))
        return
    with output.paged(pager):
        if stats:
            render = _stats
        else:
            render = partial(_FORMS[format], **selected, source=source, scopes=scopes)
        output.write_programs(programs, partial(render, width=output.width()))


def _document(programs: Programs, want_stats: bool, selected: dict[str, Any]) -> dict[str, Any]:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.as_json import program_document, stats_document

    if want_stats:
        return {"stats": [stats_document(stats(program)) for _, program in programs]}
    return {"programs": [program_document(program, **selected) for _, program in programs]}


def _stats(program: Program, width: int) -> Any:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.stats import stats as tables

    return tables(stats(program), width=width)


def _text(program: Program, **chosen: Any) -> Any:
    from jaxprtool.render.listing import listing

    return listing(program, **chosen)


def _tree(program: Program, **chosen: Any) -> Any:
    from jaxprtool.render.tree import tree

    return tree(program, **chosen)


def _table(program: Program, **chosen: Any) -> Any:
    from jaxprtool.render.table import table

    return table(program, **chosen)


_FORMS: dict[Format, Callable[..., Any]] = {
    Format.text: _text,
    Format.tree: _tree,
    Format.table: _table,
}
