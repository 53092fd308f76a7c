"""`jaxprtool show`: a function's jaxpr, as text, tree, table, page, JSON or statistics."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import OutputError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program
    from jaxprtool.render.documents.programs import ShowDocument, StatsDocument
    from jaxprtool.render.listing import Listing
    from jaxprtool.render.rendering import Rendering, ShowOptions

    Programs = list[tuple[str, Program]]

_SHOWN = Panel("What is shown")


class Format(StrEnum):
    """How a program is shown."""

    text = "text"
    tree = "tree"
    table = "table"
    html = "html"
    json = "json"


_Format = Annotated[
    Format | None,
    _SHOWN.option(
        "--format, -f",
        "<text|tree|table|html|json>",
        "How to show it; html is a page for a browser.",
    ),
]
_Depth = Annotated[
    int | None,
    _SHOWN.option("--depth", "N", "Fold jaxprs nested deeper than N to one line.", min=0),
]
_Only = Annotated[
    Any,
    _SHOWN.option(
        "--only",
        "NAME,…",
        "Only these primitives, where they stand: dot_general,conv*",
        parser=options.names,
    ),
]
_Uses = Annotated[
    str | None,
    _SHOWN.option(
        "--uses",
        "PATH",
        "Only the equations that an argument (params['w']), a line (model.py:30) or a variable "
        "touches, or that a result depends on.",
    ),
]
_Source = Annotated[
    bool | None,
    _SHOWN.option(
        "--source/--no-source",
        "",
        "Each equation's file and line, or not: html has them, with your files, the others do not.",
    ),
]
_Scopes = Annotated[bool, _SHOWN.flag("--scopes", "Each equation's name stack.")]
_NoTypes = Annotated[bool, _SHOWN.flag("--no-types", "Leave types out.")]
_Weak = Annotated[bool, _SHOWN.flag("--weak", "Mark weak types: ~f32[].")]
_Names = Annotated[
    bool | None,
    _SHOWN.option(
        "--names/--no-names",
        "",
        "Call variables what your source does, or by JAX's letters: the tree, the table and the "
        "page do, text does not.",
    ),
]
_Terse = Annotated[
    bool | None,
    _SHOWN.option(
        "--terse/--no-terse", "", "Leave parameters at their defaults out, or not: the page does."
    ),
]
_Out = Annotated[str | None, options.out_option("Write a page: FILE.html.", "FILE|-")]
_Stats = Annotated[
    bool,
    _SHOWN.flag("--stats", "Instead: equations by primitive and depth, constants, arguments."),
]


@options.command
def show(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    format: _Format = None,
    depth: _Depth = None,
    only: _Only = None,
    uses: _Uses = None,
    source: _Source = None,
    scopes: _Scopes = False,
    no_types: _NoTypes = False,
    weak: _Weak = False,
    names: _Names = None,
    terse: _Terse = None,
    stats: _Stats = False,
    out: _Out = None,
    json: options.Json = False,
    full: options.Full = False,
    pager: options.Pager = False,
    *,
    told: Told,
) -> None:
    """Show a function's jaxpr in JAX's own notation.

    On a terminal, unless more is asked for, that is a page: the size of the program, what it takes,
    gives and is made of, the lines it comes from, and the listing as far as it fits.

    [bold]Examples[/]

      jaxprtool show samples/transformer.py:loss --depth 1
      jaxprtool show samples/rnn.py:loss --source --only scan,dot_general
      jaxprtool show jax.numpy:sinc --args "f32[8]" --stats
      jaxprtool show samples/solver.py:kepler --format tree --pager
      jaxprtool show samples/transformer.py:loss -o loss.html
    """
    format = _format(format, out, {"--stats": stats, "--json": json, "--pager": pager})
    if stats and uses is not None:
        raise OutputError("--stats and --uses do not go together", "`jaxprtool why` counts")
    start_jax(told, function.x64)
    pipeline = options.pipeline(passes, plugin)
    entry = function.find(told)
    program = function.trace(entry, pipeline, told)
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.render.rendering import ShowOptions

    programs = options.each(pipeline_steps.run(pipeline, program, told))
    sliced = {}
    if uses is not None:
        told("following values")
        sliced = _slice(programs, uses)
    told("" if pager else "rendering")  # on the terminal, it is the pager's
    if only:
        _note_missing(only, programs)

    shown = ShowOptions(
        width=output.width(),
        fit=sys.stdout.isatty(),
        fold=sys.stdout.isatty() and not (full or pager),
        **function.listed(format is Format.html if source is None else source),
        scopes=scopes,
        types=not no_types,
        weak=weak,
        names=format is not Format.text if names is None else names,
        terse=format is Format.html if terse is None else terse,
        depth=depth,
        only=only,
        **sliced,
    )
    if format is Format.html:
        from jaxprtool.analysis.cost.all_runs import work_by_equation
        from jaxprtool.analysis.stats import stats as size
        from jaxprtool.render.page import State, page

        output.write_page(page([State(dict(programs))], shown, size, work_by_equation), out)
        return
    if json or format is Format.json:
        output.write_json(_document(programs, stats, shown))
        return
    if not (full or pager or stats) and format is Format.text and _plain(shown):
        output.write_pages(programs)
        return
    render = _stats if stats else _form(format)
    with output.paged(pager):
        output.write_programs(programs, partial(render, options=shown))


def _format(chosen: Format | None, out: str | None, others: dict[str, bool]) -> Format:
    """Return the format, which a file's name may tell. Raises OutputError for what does not fit."""
    output.check_out("show", out, False, (), "jaxprtool emit TARGET", page=True)
    format = chosen or (Format.html if output.is_page(out) else Format.text)
    if format is Format.html:
        for name, given in others.items():
            if given:
                raise OutputError(f"{name} and a page (--format html) do not go together")
    elif out is not None:
        raise OutputError(
            f"-o writes a page, and --format is {format}", "write --format html, or `> FILE`"
        )
    return format


def _slice(programs: Programs, uses: str) -> dict[str, Any]:
    """Return the options of a listing that shows what --uses names."""
    from jaxprtool.analysis.slices import why
    from jaxprtool.render.why import told_of

    found = why(options.only_program("--uses is of", programs), uses)
    each, _, others = told_of(found)[0]
    return {"among": each.members, "others": others.replace("it does", f"{found.what} does")}


def _note_missing(only: Sequence[str], programs: Programs) -> None:
    """Say which patterns of --only fit no primitive of the programs, and what is near."""
    from jaxprtool.analysis.stats import stats

    counts = [count for _, program in programs for count in stats(program).primitives]
    names = list(dict.fromkeys(count.name for count in counts))
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            has = f"there are {', '.join(names[:6])}" + (", …" if len(names) > 6 else "")
            near = did_you_mean(pattern, names, likeness=0.4) or (has if names else "there is none")
            output.warning(f"--only: no equation is of '{pattern}'; {near}")


def _plain(shown: ShowOptions) -> bool:
    """Whether nothing particular is asked for."""
    return shown == type(shown)(width=shown.width, fit=shown.fit, fold=shown.fold)


def _document(
    programs: Programs, want_stats: bool, options: ShowOptions
) -> ShowDocument | StatsDocument:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.as_json import program_document

    if want_stats:
        return {"stats": [stats(program) for _, program in programs]}
    options = replace(options, source=True, scopes=True)
    return {"programs": [program_document(program, options) for _, program in programs]}


def _stats(program: Program, options: ShowOptions) -> Rendering:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.stats import stats as tables

    return tables(stats(program), width=options.width)


def _form(format: Format) -> Callable[..., Rendering | Listing]:
    """Return the function that renders a program in a format."""
    name = "listing" if format is Format.text else format.value
    return getattr(import_module(f"jaxprtool.render.{name}"), name)
