"""Programs as HTML: a page for a browser in one file, and a notebook cell without scripts.

A page loads no external resources: its policy forbids that, and all scripts but its own. Contents
of programs and source files are escaped as text.

If a program has several states, the last is included as HTML, and the others compressed, since most
are never viewed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jaxprtool.ir.basics.quantities import in_bytes, plural
from jaxprtool.ir.graphs.changes import Changes, changes
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature
from jaxprtool.ir.source.frames import Root
from jaxprtool.render.page.report import Lines, Report, View, summary_views, views
from jaxprtool.render.page.shardings import shardings_view
from jaxprtool.render.page.sources import Sources
from jaxprtool.render.page.view import Listing, listing
from jaxprtool.render.reports.overview import facts
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rendering import ShowOptions

if TYPE_CHECKING:
    from jaxprtool.analysis.cost.work import Work
    from jaxprtool.analysis.stats import PrimitiveCount, Stats

#: The maximum number of rows of a cell, since notebooks store their output.
_MOST_IN_CELL = 1000


class State(NamedTuple):
    """The programs after a pass.

    Attributes:
        programs: The programs by name; unchanged programs are the same objects as before.
        label: The pass.
        seconds: Its time.
        before: The number of equations before it.
        after: The number of equations after it.
    """

    programs: Mapping[str, Program]
    label: str = "traced"
    seconds: float | None = None
    before: int = 0
    after: int = 0


class _Shown(NamedTuple):
    """The data of a program for the listing template; `at` is the prefix of its element ids."""

    at: str
    name: str
    facts: Sequence[str]
    primitives: Sequence[PrimitiveCount]
    listing: Listing


class _Tab(NamedTuple):
    """The data of a state for the template.

    Attributes:
        state: The state.
        changes: The changes of its pass.
        counts: The number of rows for each line of the files shown.
        listing: Its programs in HTML. Empty if the pass changed nothing.
        packed: The compressed listing, used instead of `listing`.
        heated: Whether it shows the costs of equations.
    """

    state: State
    changes: Changes
    counts: Counter[str]
    listing: Markup = Markup()
    packed: str = ""
    heated: bool = False


def page(
    states: Sequence[State],
    options: ShowOptions,
    describe: Callable[[Program], Stats],
    costs: Callable[[Program], Mapping[int, Work]],
    report: Report | None = None,
) -> str:
    """Return a page of programs, with a tab for the state after each pass.

    Args:
        states: The programs as traced, and after each pass. The last one is shown first.
        options: The display options. With `source`, the user's files are next to the listing.
            Nested jaxprs are initially open up to `depth`, or as far as they fit.
        describe: Returns the size of a program.
        costs: Returns the costs of the equations of a program, at every depth, by `id`.
        report: Additional data, each part shown in a separate view.
    """
    sources = Sources(options, True, _roots(states[-1].programs))
    tabs = _tabs(states, options, sources, describe, costs)
    shown = max(i for i, tab in enumerate(tabs) if tab.listing)
    tabs = [tab if i == shown else _packed(tab) for i, tab in enumerate(tabs)]
    script = static("shared.js", "pointing.js", "page.js")
    template = environment().get_template("page.html")
    return template.render(
        title=_text(", ".join(states[-1].programs)),
        tabs=tabs,
        shown=shown,
        files=sources.files(),
        summaries=[] if report is None else summary_views(report, sources.line_of),
        views=[] if report is None else _views(report, sources.line_of),
        counts=tabs[shown].counts,
        heated=any(tab.heated for tab in tabs),
        linked=set().union(*(tab.counts for tab in tabs)),
        css=static("listing.css", "page.css"),
        script=script,
        script_hash=hash_of(script),
    )


def _views(report: Report, line_of: Lines) -> list[View]:
    found = report.shardings
    devices = [] if found is None else [shardings_view(found, line_of)]
    return [*views(report, line_of), *devices]


def _roots(programs: Mapping[str, Program]) -> list[Root]:
    """Return the folders of the user's files of programs."""
    return list(dict.fromkeys(root for program in programs.values() for root in program.roots))


def cell(programs: Mapping[str, Program], describe: Callable[[Program], Stats]) -> str:
    """Return programs as an HTML fragment for a notebook.

    Args:
        programs: The programs, by name.
        describe: Returns the size of a program.
    """
    options = ShowOptions(names=True, terse=True, source=True)
    sources = Sources(options, False, _roots(programs))
    shown = []
    for name, program in programs.items():
        found = describe(program)
        at = hashlib.sha256(f"{name} {found}".encode()).hexdigest()[:8] + "-"
        about = program_signature(program)
        rows = listing(about, options, sources, at, titles=True, most=_MOST_IN_CELL)
        shown.append(_Shown(at, _text(name), facts(found), (), rows))
    css = static("listing.css")
    template, none = environment().get_template("cell.html"), (0, "")
    return template.render(programs=shown, titles=True, css=css, at="", added=none, removed=none)


def _text(text: str) -> str:
    return "".join(printable([text]))


# --- states -----------------------------------------------------------------------------------

_NONE = Changes(frozenset(), frozenset())


def _tabs(
    states: Sequence[State],
    options: ShowOptions,
    sources: Sources,
    describe: Callable[[Program], Stats],
    costs: Callable[[Program], Mapping[int, Work]],
) -> list[_Tab]:
    """Return the tabs of states; equations that a pass removes are marked in the listing before."""
    made = [_NONE, *(_changes(*pair) for pair in pairwise(states))]
    template = environment().get_template("listing.html")
    tabs: list[_Tab] = []
    for i, state in enumerate(states):
        if i and not _differ(states[i - 1], state):
            tabs.append(_Tab(state, made[i], Counter()))
            continue
        next_one = next((j for j in range(i + 1, len(states)) if _differ(state, states[j])), None)
        added, removed = made[i].added, frozenset[int]()
        if next_one is not None:
            removed = made[next_one].removed
        marks = {**dict.fromkeys(added, "added"), **dict.fromkeys(removed, "removed")}
        marks |= dict.fromkeys(added & removed, "added removed")
        at = f"p{i}-" if len(states) > 1 else ""
        shown = []
        for k, (name, program) in enumerate(state.programs.items()):
            inside, size = f"{at}g{k}-" if k else at, describe(program)
            works = costs(program)
            rows = listing(
                program_signature(program), options, sources, inside, marks=marks, works=works
            )
            shown.append(_Shown(inside, _text(name), facts(size), size.primitives, rows))
        html = template.render(
            programs=shown,
            titles=False,
            at=at,
            added=(len(added), state.label),
            removed=(len(removed), "" if next_one is None else states[next_one].label),
        )
        counts: Counter[str] = sum((each.listing.lines for each in shown), Counter())
        heated = any(each.listing.hot for each in shown)
        tabs.append(_Tab(state, made[i], counts, Markup(html), heated=heated))
    return tabs


def _differ(before: State, after: State) -> bool:
    return before.programs != after.programs


def _changes(before: State, after: State) -> Changes:
    """Return the changes of a pass in the programs present before and after it."""
    olds = before.programs
    if len(olds) == len(after.programs) == 1:  # it may have been renamed
        olds = dict(zip(after.programs, olds.values(), strict=True))
    found = [
        changes(olds[name].jaxpr, program.jaxpr)
        for name, program in after.programs.items()
        if name in olds and olds[name] is not program
    ]
    return Changes(
        frozenset().union(*(each.removed for each in found)),
        frozenset().union(*(each.added for each in found)),
    )


def _packed(tab: _Tab) -> _Tab:
    """Return a tab with its listing compressed."""
    return tab._replace(listing=Markup(), packed=packed(tab.listing) if tab.listing else "")


def packed(html: str) -> str:
    """Return HTML compressed, as text that needs no escaping."""
    return base64.b64encode(gzip.compress(html.encode(), mtime=0)).decode()


# --- templates --------------------------------------------------------------------------------


@cache
def environment() -> Environment:
    """Return the template environment of pages."""
    made = Environment(
        loader=PackageLoader("jaxprtool.render.page"),
        keep_trailing_newline=True,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "bytes": in_bytes,
        "duration": duration,
        "plural": plural,
        "printable": _text,
    }
    return made


@cache
def static(*names: str) -> Markup:
    """Return static files in the templates' folder, one after the other."""
    loader = environment().loader
    assert loader is not None
    return Markup("".join(loader.get_source(environment(), name)[0] for name in names))


def hash_of(script: str) -> str:
    """Return the hash of a script, by which a page's policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
