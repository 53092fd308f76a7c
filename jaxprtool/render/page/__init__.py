"""Programs as HTML: a page for a browser, in one file, and a cell for a notebook, with no script.

A page asks for nothing from elsewhere: its policy forbids that, and every script but its own. What
a program, or a source file, has in it is text there.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jaxprtool.ir.border import border
from jaxprtool.ir.program import Program
from jaxprtool.render.lines import printable
from jaxprtool.render.overview import facts
from jaxprtool.render.page.sources import Sources
from jaxprtool.render.page.view import Listing, listing
from jaxprtool.render.rendering import ShowOptions
from jaxprtool.render.stats import in_bytes, plural

if TYPE_CHECKING:
    from jaxprtool.analysis.overview import Overview
    from jaxprtool.analysis.stats import PrimitiveCount

#: A notebook keeps what it shows: of longer programs, a cell has so many rows.
_MOST_IN_CELL = 2000


class Shown(NamedTuple):
    """A program as the template of listings needs it.

    Attributes:
        at: What the ids of its elements begin with.
        name: Its name.
        facts: What it is, in a few words.
        primitives: Its primitives, with how many equations each has.
        listing: Its rows.
    """

    at: str
    name: str
    facts: Sequence[str]
    primitives: Sequence[PrimitiveCount]
    listing: Listing


def page(
    programs: Sequence[tuple[str, Program]],
    options: ShowOptions,
    describe: Callable[[Program], Overview],
) -> str:
    """Return a page of programs.

    Args:
        programs: The programs, by name.
        options: What is shown. With `source` the files of the user's are beside the listing.
            Nested jaxprs are open at first as deep as `depth`, or as far as they are in sight.
        describe: Returns what a program is at first sight.
    """
    sources = Sources(options)
    shown = [
        _shown(f"p{i}-" if i else "", name, program, options, sources, describe(program))
        for i, (name, program) in enumerate(programs)
    ]
    counts: Counter[str] = sum((each.listing.lines for each in shown), Counter())
    script = _static("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("page.html")
    return template.render(
        title=", ".join(each.name for each in shown),
        programs=shown,
        titles=False,
        files=sources.files(),
        counts=counts,
        css=Markup(_static("listing.css") + _static("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def cell(programs: Sequence[tuple[str, Program]], describe: Callable[[Program], Overview]) -> str:
    """Return programs as a piece of HTML for a notebook.

    Args:
        programs: The programs, by name.
        describe: Returns what a program is at first sight.
    """
    options = ShowOptions(names=True, terse=True, source=True)
    sources = Sources(options, whole=False)
    shown = []
    for name, program in programs:
        found = describe(program)
        at = hashlib.sha256(f"{name} {found}".encode()).hexdigest()[:8] + "-"
        each = _shown(at, name, program, options, sources, found, _MOST_IN_CELL)
        shown.append(each._replace(primitives=()))  # they are for searching
    css = Markup(_static("listing.css"))
    return _environment().get_template("cell.html").render(programs=shown, titles=True, css=css)


def _shown(
    at: str,
    name: str,
    program: Program,
    options: ShowOptions,
    sources: Sources,
    found: Overview,
    most: int | None = None,
) -> Shown:
    """Return a program as the templates need it."""
    rows = listing(border(program), options, sources, {}, most)
    name = "".join(printable([name]))
    return Shown(at, name, facts(found), found.stats.primitives, rows)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("jaxprtool.render.page"),
        keep_trailing_newline=True,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plural": plural,
        "bytes": in_bytes,
        "printable": lambda text: "".join(printable([text])),
    }
    return environment


@cache
def _static(name: str) -> str:
    """Return a file of the templates' folder that is no template."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]
