"""Programs as HTML: a page for a browser, in one file, and a cell for a notebook, with no script.

A page asks for nothing from elsewhere: its policy forbids that, and every script but its own. What
a program, or a source file, has in it is text there.

Of several states of a program, which passes have made, the last is in the page as it is, and the
others are compressed: they have as many elements, and most are never looked at.
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
from jaxprtool.ir.programs.border import border
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import Root
from jaxprtool.render.page.report import Report, views
from jaxprtool.render.page.sources import Sources
from jaxprtool.render.page.view import Listing, listing
from jaxprtool.render.reports.overview import facts
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rendering import ShowOptions

if TYPE_CHECKING:
    from jaxprtool.analysis.cost.work import Work
    from jaxprtool.analysis.stats import PrimitiveCount, Stats

#: A notebook keeps what it shows: of longer programs, a cell has so many rows.
_MOST_IN_CELL = 1000


class State(NamedTuple):
    """The programs that there are after a pass.

    Attributes:
        programs: The programs, by name: the same objects as before, if a pass has left them.
        label: The pass.
        seconds: How long it took.
        before: How many equations it was given.
        after: How many it left.
    """

    programs: Mapping[str, Program]
    label: str = "traced"
    seconds: float | None = None
    before: int = 0
    after: int = 0


class _Shown(NamedTuple):
    """A program as the template of listings needs it; `at` begins the ids of its elements."""

    at: str
    name: str
    facts: Sequence[str]
    primitives: Sequence[PrimitiveCount]
    listing: Listing


class _Tab(NamedTuple):
    """A state as the template needs it.

    Attributes:
        state: The state.
        changes: What its pass has changed.
        counts: How many rows come from each line of the files that are shown.
        listing: Its programs in HTML. Empty if the pass has changed nothing.
        packed: The same in place of that, compressed.
        heated: Whether it says what equations cost.
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
    """Return a page of programs, or of what passes have made of them, with a tab for each pass.

    Args:
        states: The programs as they were traced, and after each pass. The last is shown first.
        options: What is shown. With `source` the files of the user's are beside the listing.
            Nested jaxprs are open at first as deep as `depth`, or as far as they are in sight.
        describe: Returns the size of a program.
        costs: Returns what the equations of a program cost, at every depth, by their `id`.
        report: What else is known, each in a view of its own.
    """
    sources = Sources(options, True, _roots(states[-1].programs))
    tabs = _tabs(states, options, sources, describe, costs)
    shown = max(i for i, tab in enumerate(tabs) if tab.listing)
    tabs = [tab if i == shown else _packed(tab) for i, tab in enumerate(tabs)]
    script = _static("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment().get_template("page.html")
    return template.render(
        title=_text(", ".join(states[-1].programs)),
        tabs=tabs,
        shown=shown,
        files=sources.files(),
        views=list(views(report, sources.line_of)) if report is not None else [],
        counts=tabs[shown].counts,
        heated=any(tab.heated for tab in tabs),
        linked=set().union(*(tab.counts for tab in tabs)),
        css=Markup(_static("listing.css") + _static("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _roots(programs: Mapping[str, Program]) -> list[Root]:
    """Return the folders of the user's files that programs have."""
    return list(dict.fromkeys(root for program in programs.values() for root in program.roots))


def cell(programs: Mapping[str, Program], describe: Callable[[Program], Stats]) -> str:
    """Return programs as a piece of HTML for a notebook.

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
        about = border(program)
        rows = listing(about, options, sources, at, titles=True, most=_MOST_IN_CELL)
        shown.append(_Shown(at, _text(name), facts(found), (), rows))
    css = Markup(_static("listing.css"))
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
    """Return the tabs of states, with what a pass removes marked in the listing before it."""
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
            rows = listing(border(program), options, sources, inside, marks=marks, works=works)
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
    """Return what a pass has changed in the programs that are there before and after it."""
    olds = before.programs
    if len(olds) == len(after.programs) == 1:  # it may have another name now
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
    packed = base64.b64encode(gzip.compress(tab.listing.encode(), mtime=0)).decode()
    return tab._replace(listing=Markup(), packed=packed if tab.listing else "")


# --- templates --------------------------------------------------------------------------------


@cache
def environment() -> Environment:
    """Return what reads the templates of pages."""
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
def _static(name: str) -> str:
    """Return a file of the templates' folder that is no template."""
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]
