"""`jaxprtool show`: a function's jaxpr, as text, tree, table, JSON or statistics."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from jaxprtool.cli import options, output

_SHOWN = "What is shown"


class Format(StrEnum):
    """How a program is shown."""

    text = "text"
    tree = "tree"
    table = "table"
    json = "json"


def show(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    format: Annotated[
        Format,
        typer.Option("--format", "-f", help="How to show it.", rich_help_panel=_SHOWN),
    ] = Format.text,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            metavar="N",
            min=0,
            help="Fold jaxprs nested deeper than N to one line.",
            rich_help_panel=_SHOWN,
        ),
    ] = None,
    only: Annotated[
        Any,
        typer.Option(
            "--only",
            metavar="NAME,…",
            parser=options.names,
            help="Only these primitives, where they stand: dot_general,conv*",
            rich_help_panel=_SHOWN,
        ),
    ] = None,
    source: Annotated[
        bool,
        typer.Option("--source", help="Each equation's file and line.", rich_help_panel=_SHOWN),
    ] = False,
    scopes: Annotated[
        bool,
        typer.Option("--scopes", help="Each equation's name stack.", rich_help_panel=_SHOWN),
    ] = False,
    no_types: Annotated[
        bool, typer.Option("--no-types", help="Leave types out.", rich_help_panel=_SHOWN)
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Instead: equations by primitive and depth, constants, arguments.",
            rich_help_panel=_SHOWN,
        ),
    ] = False,
    json: options.Json = False,
    pager: Annotated[
        bool,
        typer.Option("--pager", help="Show it in $PAGER (less).", rich_help_panel="Output"),
    ] = False,
    traceback: options.Traceback = False,
) -> None:
    """Show a function's jaxpr in JAX's own notation.

    [bold]Examples[/]

      jaxprtool show samples/transformer.py:loss --depth 1
      jaxprtool show samples/rnn.py:run --source --only scan,dot_general
      jaxprtool show jax.numpy:sinc --args "f32[8]" --stats
      jaxprtool show samples/solver.py:newton --format tree --pager
    """
    options.start_jax(x64)
    pipeline = options.pipeline(passes, plugin)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    programs = options.each(pipeline(options.trace(entry)))
    if json or format is Format.json:
        _write_json([program for _, program in programs], stats)
        return
    with output.paged(pager):
        if stats:
            _write_stats(programs)
        else:
            from jaxprtool.render.listing import listing

            selected = {"depth": depth, "only": only}
            marked = {"source": source, "scopes": scopes, "types": not no_types}
            output.write_programs(programs, listing, width=output.width(), **selected, **marked)


def _write_json(programs: list[Any], stats: bool) -> None:
    if stats:
        from jaxprtool.analysis.stats import stats as count

        output.write_json({"stats": [count(program) for program in programs]})
    else:
        from jaxprtool.render.as_json import as_json

        output.write_json({"programs": [as_json(program) for program in programs]})


def _write_stats(programs: list[tuple[str, Any]]) -> None:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.stats import stats as table

    output.write_programs(programs, lambda program: table(stats(program)))
