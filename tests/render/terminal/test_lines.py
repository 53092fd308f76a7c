"""Listings fit the terminal: long lines are broken, and nothing is lost."""

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.show.summary import overview
from jaxprtool.commands.show.table import overview_page
from jaxprtool.ir.notation import BinderToken, with_roles
from jaxprtool.render.terminal.listing import ShowOptions, listing
from jaxprtool.render.terminal.tree import table, tree
from tests.render.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("width", [50, 80, 160])
def test_a_listing_that_fits_is_unchanged(name, width):
    closed = PROGRAMS[name]()
    for source in (False, True):
        usual = listing(closed, ShowOptions(width=width, source=source, scopes=source))
        fits = listing(closed, ShowOptions(width=width, source=source, scopes=source, fit=True))
        assert max(map(len, fits.plain().splitlines())) <= width
        assert "".join(fits.plain().split()) == "".join(usual.plain().split())


def test_lines_that_fit_are_unchanged():
    program = jaxprtool.trace(lambda x: jnp.sin(x) + 1, 1.0)
    assert listing(program, ShowOptions(fit=True)).tokens == listing(program).tokens


def test_variables_are_bound_in_color_where_a_line_is_broken():
    program = jaxprtool.trace(lambda *xs: sum(xs), *[jnp.ones((10, 10))] * 20)
    for fit in (False, True):
        tokens = listing(program, ShowOptions(width=60, fit=fit)).tokens
        bound = [str(text).strip() for text, role in with_roles(tokens) if role is BinderToken]
        assert bound[:3] == ["a", "b", "c"] and len(bound) == 40


def test_escape_sequences_in_names_are_escaped_on_a_terminal():
    program = jaxprtool.trace(jnp.sin, 1.0).replace(arg_names=("\x1b[31m",))
    options = ShowOptions(names=True, fit=True)
    page = overview_page(program, overview(program), 80, 24)
    for shown in (tree(program, options), table(program, options), listing(program, options), page):
        assert "\x1b" not in shown.plain() and "\\x1b[31m" in shown.plain()
    assert "\x1b" not in repr(program)


def test_a_comment_that_does_not_fit_is_on_the_next_line():
    program = jaxprtool.trace(lambda x: jnp.zeros((100, 100)).at[x, 3:5].set(1.0), 3)
    shown = listing(program, ShowOptions(width=70, source=True, fit=True)).plain().splitlines()
    assert any(line.strip().startswith("# ") for line in shown)
