"""`jaxprtool show`: a function's jaxpr, as text, tree, table, page, JSON or statistics.

Its last part writes programs for other commands, too: to stdout, whole or as an overview of those
that do not fit, and as pages.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Named, Session, command, only_program
from jaxprtool.errors import OutputError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats
    from jaxprtool.ir.program import Program
    from jaxprtool.render.documents import programs as documents
    from jaxprtool.render.page import PageState, PageView
    from jaxprtool.render.terminal.lines import Listing
    from jaxprtool.render.terminal.listing import ShowOptions
    from jaxprtool.render.terminal.tables import Rendering
    from jaxprtool.render.views import Lines


_SHOWN = Panel("Contents")


#: The formats of a program.
Format = Literal["text", "tree", "table", "html", "json"]

_Format = Annotated[
    Format | None,
    _SHOWN.choice(
        "--format, -f",
        Format,
        "The output format. html is a page for a browser.",
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
        "Show only equations of these primitives: dot_general,conv*",
        parser=options.names,
    ),
]
_Uses = Annotated[
    str | None,
    _SHOWN.option(
        "--uses",
        "PATH",
        "Show only the equations that an argument (params['w']), a line (model.py:30) or a "
        "variable affects, or that a result depends on.",
    ),
]
_Source = Annotated[
    bool | None,
    _SHOWN.option(
        "--source/--no-source",
        "",
        "Show each equation's file and line, or not. Default: html does, with your files; others "
        "do not.",
    ),
]
_Scopes = Annotated[bool, _SHOWN.flag("--scopes", "Show each equation's name stack.")]
_NoTypes = Annotated[bool, _SHOWN.flag("--no-types", "Omit types.")]
_Weak = Annotated[bool, _SHOWN.flag("--weak", "Mark weak types: ~f32[].")]
_Names = Annotated[
    bool | None,
    _SHOWN.option(
        "--names/--no-names",
        "",
        "Name variables as in your source, or by JAX's letters. Default: by source in tree, "
        "table and html, by letters in text.",
    ),
]
_Terse = Annotated[
    bool | None,
    _SHOWN.option(
        "--terse/--no-terse",
        "",
        "Omit parameters that have their default values and cut long values, or not. Default: "
        "html does.",
    ),
]
_Out = Annotated[str | None, options.out_option("Write an HTML page: FILE.html.", "FILE|-")]
_Top = Annotated[
    int | None, options.top_option("20 with --stats; for a run, as many as fit a screen")
]
_Stats = Annotated[
    bool,
    _SHOWN.flag(
        "--stats", "Show the counts of equations by primitive and depth, constants and arguments."
    ),
]


@command
def show_command(
    session: Session,
    axis_env: options.AxisEnv = None,
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
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
    full: options.Full = False,
    pager: options.Pager = False,
) -> None:
    """Show a function's jaxpr in JAX's own notation.

    On a terminal, the default is one page: the program's size, arguments, results, primitives and
    source lines, and as much of the listing as fits. Of an HLO module, the kernels are listed.

    [bold]Examples[/]

      jaxprtool show samples/transformer.py:loss --depth 1
      jaxprtool show samples/rnn.py:loss --source --only scan,dot_general
      jaxprtool show jax.numpy:sinc --args "f32[8]" --stats
      jaxprtool show samples/solver.py:kepler --format tree --pager
      jaxprtool show samples/transformer.py:loss -o loss.html
      jaxprtool show dump/jit_step --only copy,transpose
    """
    rows = options.row_limit(top, all, None if full or pager else options.ROWS)
    format = _format(format, out, {"--stats": stats, "--json": json, "--pager": pager})
    from jaxprtool.recording.folder import recorded_run

    if (run := recorded_run(session.target)) is not None:
        _show_run(run, session, top, all or full, json or format == "json")
        return
    if not stats and (all or top is not None):
        raise OutputError("--top and --all need --stats", "--full shows the whole listing")
    if stats and uses is not None:
        hint = "`jaxprtool why` counts the equations"
        raise OutputError("--stats and --uses cannot be combined", hint)
    session.start()
    if (stored := session.module()) is not None:
        if format not in ("text", "json", "html") or stats or uses is not None:
            hint = "--depth, --only, --full, --json and -o apply"
            raise OutputError("the kernels of an HLO module are listed", hint)
        from jaxprtool.commands.show.page import module_document, module_listing

        if format == "html":
            from jaxprtool.commands.show.page import module_page

            output.write_page(module_page(stored), out)
            return
        if json or format == "json":
            output.write_json(module_document(stored.module, depth, only or ()))
            return
        most = rows if sys.stdout.isatty() else None
        with output.paged(pager):
            output.write_rendered(module_listing(stored.module, depth, only or (), most))
        return
    programs = session.programs(session.traced(axis_env=axis_env))
    output.say_unused_donations(program for _, program in programs)
    from jaxprtool.ir.equations import WEAK_NOTE
    from jaxprtool.render.terminal.listing import ShowOptions

    sliced = {}
    if uses is not None:
        session.on_progress("following values")
        sliced = _slice(programs, uses)
    session.on_progress("" if pager else "rendering")  # the terminal is the pager's
    if only:
        _note_missing(only, programs)

    if weak:
        output.note(WEAK_NOTE)
    shown = ShowOptions(
        width=output.width(),
        fit=sys.stdout.isatty(),
        fold=sys.stdout.isatty() and not (full or pager),
        **session.function.listed(format == "html" if source is None else source),
        scopes=scopes,
        types=not no_types,
        weak=weak,
        names=format != "text" if names is None else names,
        terse=format == "html" if terse is None else terse,
        depth=depth,
        only=only,
        **sliced,
    )
    if format == "html":
        from jaxprtool.render.page import PageState

        write_states([PageState(dict(programs))], shown, out)
        return
    if json or format == "json":
        output.write_json(_document(programs, stats, shown))
        return
    if not (full or pager or stats) and format == "text" and _plain(shown):
        write_pages(programs)
        return
    render = partial(_stats, top=rows) if stats else _form(format)
    with output.paged(pager):
        output.write_programs(programs, partial(render, options=shown))


def _show_run(path: str, session: Session, top: int | None, every: bool, json: bool) -> None:
    """Print what was recorded in a run: `top` rows of each list, all, or those that fit."""
    session.start()
    from jaxprtool.commands.record import table as render
    from jaxprtool.recording.folder import PAGE
    from jaxprtool.recording.read import read_run

    run = read_run(path)
    if json:
        output.write_json(run)
        return
    page = os.path.join(path, PAGE)
    shown = page if os.path.exists(page) else ""
    rows = render.count_rows(run) if every else top
    output.write_rendered(render.run_summary(run, output.width(), shown, rows))


def _format(chosen: Format | None, out: str | None, others: dict[str, bool]) -> Format:
    """Return the format, by default from the file name. Raises OutputError if they conflict."""
    output.check_out("show", out, False, (), "jaxprtool emit TARGET", page=True)
    format = chosen or ("html" if output.is_page(out) else "text")
    if format == "html":
        for name, is_set in others.items():
            if is_set:
                raise OutputError(f"{name} and --format html cannot be combined")
    elif out is not None:
        raise OutputError(
            f"-o writes an HTML page, but --format is {format}", "write --format html, or `> FILE`"
        )
    return format


def _slice(programs: Named, uses: str) -> dict[str, Any]:
    """Return the options of a listing for --uses."""
    from jaxprtool.commands.why.slices import why
    from jaxprtool.commands.why.table import slices_with_sentences

    answer = why(only_program("--uses takes", programs), uses)
    body_slice, _, others = slices_with_sentences(answer)[0]
    return {"among": body_slice.members, "others": others.replace("it does", f"{answer.what} does")}


def _note_missing(only: Sequence[str], programs: Named) -> None:
    """Print which patterns of --only match no primitive of the programs, with similar names."""
    from jaxprtool.analysis.stats import stats

    counts = [count for _, program in programs for count in stats(program).primitives]
    names = list(dict.fromkeys(count.name for count in counts))
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            has = f"the program has {', '.join(names[:6])}" + (", …" if len(names) > 6 else "")
            near = did_you_mean(pattern, names, likeness=0.4) or (
                has if names else "the program has no equations"
            )
            output.warning(f"--only: no equation has the primitive '{pattern}'; {near}")


def _plain(shown: ShowOptions) -> bool:
    """Return True if all display options have their defaults."""
    return shown == type(shown)(width=shown.width, fit=shown.fit, fold=shown.fold)


def _document(
    programs: Named, want_stats: bool, options: ShowOptions
) -> ShowDocument | StatsDocument:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.reports import program_document

    if want_stats:
        return StatsDocument([stats(program) for _, program in programs])
    options = replace(options, source=True, scopes=True)
    return ShowDocument([program_document(program, options) for _, program in programs])


def _stats(program: Program, options: ShowOptions, top: int | None) -> Rendering:
    from jaxprtool.analysis.stats import stats
    from jaxprtool.commands.show.table import stats_tables as tables

    return tables(stats(program), options.width, top)


def _form(format: Format) -> Callable[..., Rendering | Listing]:
    """Return the function that renders a program in a format."""
    from jaxprtool.render.terminal.listing import listing
    from jaxprtool.render.terminal.tree import table, tree

    return {"text": listing, "tree": tree, "table": table}[format]


class ShowDocument(NamedTuple):
    """`show`."""

    programs: Annotated[
        list[documents.Program], "The programs shown; several if a pass returned several."
    ]


class StatsDocument(NamedTuple):
    """`show --stats`."""

    stats: Annotated[Sequence[Stats], "The size of each program."]


# --- pages ----------------------------------------------------------------------------------------
# Programs on stdout: whole, or an overview of those that do not fit; and pages of programs.


def write_pages(programs: Sequence[tuple[str, Program]], above: int = 0) -> None:
    """Write programs to stdout: on a terminal, an overview of each that does not fit, else in full.

    `above` is the number of lines above them that must stay visible.
    """
    if not sys.stdout.isatty():
        output.write_listings(programs)
        return
    from jaxprtool.analysis.stats import count_equations
    from jaxprtool.commands.show.summary import overview
    from jaxprtool.commands.show.table import overview_page
    from jaxprtool.render.terminal.listing import ShowOptions, listing

    columns, lines = output.size(sys.stdout)
    height = lines - above - 3  # the command above and a prompt below

    def page(program: Program) -> Listing:
        if count_equations(program) < height:
            whole = listing(program, ShowOptions(width=columns, fit=True))
            if whole.plain().count("\n") < height:
                return whole
        return overview_page(program, overview(program), columns, height)

    output.write_programs(programs, page)


def write_pages_or_listings(
    programs: Sequence[tuple[str, Program]], full: bool, pager: bool, **shown: Any
) -> None:
    """Write programs as pages, or as listings with --full, --pager or source locations."""
    if not (full or pager or shown["source"]):
        write_pages(programs)
        return
    with output.paged(pager):
        fold = sys.stdout.isatty() and not (full or pager)
        output.write_listings(programs, fold=fold, **shown)


def write_states(
    states: Sequence[PageState],
    shown: ShowOptions,
    out: str | None,
    added: Callable[[Lines], tuple[Sequence[Any], Sequence[PageView]]] | None = None,
) -> None:
    """Write a page of programs to the file of -o, with a tab for each of their states.

    `added` returns the summaries and the views of a report.
    """
    from jaxprtool.analysis.stats import stats
    from jaxprtool.commands.cost.estimate import work_by_equation
    from jaxprtool.render.page import program_page

    output.write_page(program_page(states, shown, stats, work_by_equation, added), out)
