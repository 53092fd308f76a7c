"""The listing equals JAX's text byte for byte, apart from additions."""

from __future__ import annotations

import io
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxprtool import jaxcompat
from jaxprtool.ir.notation.layout import Layout, Naming, Selection
from jaxprtool.ir.program import program_signature
from jaxprtool.ir.rewrite import as_constants
from jaxprtool.jaxcompat import jaxpr_as_fun
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.listing import ShowOptions, listing
from tests.programs.harnesses import harness_programs
from tests.render.programs import PROGRAMS, X, jaxpr_of
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part

WIDTHS = (40, 80, 120, 160)


def same_as_jax(closed, width, types=True):
    closed = as_constants(closed)  # as the listing writes arrays that JAX writes as literals
    ours = listing(closed, ShowOptions(width=width, types=types)).plain()
    theirs = jaxcompat.open_jaxpr(closed).pretty_print(
        width=width, print_shapes=types, use_color=False
    )
    assert ours == theirs


def same_names(closed):
    """Compare the names computed without writing a listing with those in it."""
    about = program_signature(closed)
    for options in (ShowOptions(), ShowOptions(names=True, terse=True)):
        notation = options.notation(about)
        layout = Layout(about.jaxpr, 60, True, Selection(), None, notation)
        layout.tokens()
        naming = Naming(about.jaxpr, options.notation(about))
        naming.name_all()
        assert naming.variables.spaced == layout.names.spaced
        assert naming.shared == layout.shared


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_equals_jaxs(name):
    closed = PROGRAMS[name]()
    same_names(closed)
    for width in (*range(10, 130, 7), *WIDTHS):
        same_as_jax(closed, width)
        same_as_jax(closed, width, types=False)
    assert listing(closed).plain() == str(jaxcompat.open_jaxpr(as_constants(closed)))


@pytest.mark.parametrize("width", WIDTHS)
def test_text_of_gradients_equals_jaxs(width):
    for name in ("deep_nesting", "custom_jvp", "scan_while_cond_switch", "nested_jit"):
        closed = PROGRAMS[name]()
        flat = jaxpr_as_fun(closed)
        args = [np.ones(v.aval.shape, v.aval.dtype) for v in closed.invars]
        tangents = [
            np.zeros(x.shape, jax.dtypes.float0 if x.dtype.kind == "i" else x.dtype) for x in args
        ]
        same_as_jax(
            jaxpr_of(lambda *xs, f=flat, t=tangents: jax.jvp(f, xs, tuple(t)), *args), width
        )
        same_as_jax(jaxpr_of(lambda *xs, f=flat: jax.linearize(f, *xs)[0], *args), width)


def prove(number, case):
    """Compare the listing of a program with JAX's at some widths."""
    closed = jax.make_jaxpr(case.fun)(*case.args)
    try:
        str(closed)
    except KeyError:
        listing(closed)  # JAX cannot print its own program; we can
        return "JAX fails"
    for width in WIDTHS:
        same_as_jax(closed, width)
    same_names(closed)
    return "compared"


@pytest.mark.proof
def test_text_of_jaxs_own_test_programs_equals_jaxs():
    cases = enumerate(harness_programs(every=15))
    assert [prove(*numbered) for numbered in cases].count("compared") > 300


SWEEP = [Part("listing: harnesses", Harnesses(), prove, expected=lambda n: n["compared"] > 5000)]


# --- additions to JAX's notation ------------------------------------------------------------------


def nested():
    def layer(x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ jnp.ones((3, 3)))

    def loss(x):
        carry, _ = jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=2)
        return jnp.sin(carry).sum()

    return jaxpr_of(lambda x: jax.jit(loss)(x), X)


def lines(closed, **options):
    return listing(closed, ShowOptions(**options)).plain().splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_comments_change_only_the_ends_of_lines(name):
    closed = PROGRAMS[name]()
    bare = listing(closed, ShowOptions(width=60)).plain()
    marked = listing(closed, ShowOptions(width=60, source=True, scopes=True)).plain()
    uncommented = re.sub(r" +# [^\n]*$", "", marked, flags=re.M)
    assert "".join(uncommented.split()) == "".join(bare.split())


def test_each_equation_has_its_source_line_at_the_end_of_its_first_line():
    shown = lines(nested(), source=True)
    for line in shown:
        starts_equation = re.match(r" +\S+:\S+ = ", line)
        assert bool(starts_equation) == bool(
            re.search(r"# tests/render/terminal/test_listing\.py:\d+$", line)
        )
    assert sum("# " in line for line in shown) == str(nested()).count(" = ")


def test_comments_are_aligned_where_the_lines_allow():
    shown = [line for line in lines(nested(), source=True) if "  # " in line]
    columns = {line.index("#") for line in shown if len(line.split("  #")[0]) <= 48}
    assert columns == {50} and len(shown) == 7


def test_scopes_are_shown_with_and_without_source():
    assert any(line.endswith("# scope: layer") for line in lines(nested(), scopes=True))
    both = lines(nested(), scopes=True, source=True)
    assert any(
        re.search(r"# tests/render/terminal/test_listing\.py:\d+, scope: layer$", b) for b in both
    )


def test_types_can_be_omitted():
    assert lines(jaxpr_of(lambda x: jnp.sin(x) * 2.0, X), types=False) == [
        "{ lambda ; a. let b = sin a; c = mul b 2.0:f32[] in (c,) }"
    ]


def test_depth_folds_bodies_to_a_line_with_the_number_of_equations():
    assert lines(nested(), depth=0) == [
        "{ lambda ; a:f32[3]. let",
        "    b:f32[] = jit[name=loss jaxpr={ lambda ; a:f32[3]. … 6 equations }] a",
        "  in (b,) }",
    ]
    assert "jaxpr={ lambda ; d:f32[3]. … 3 equations }" in map(str.strip, lines(nested(), depth=1))
    assert lines(nested(), depth=9) == lines(nested())


def test_depth_folds_the_definition_of_a_shared_body():
    closed = PROGRAMS["shared_within_shared"]()
    shown = lines(closed, depth=0)
    assert shown[0] == "let a = { lambda ; b:f32[3]. … 16 equations } in"
    assert not any("let g" in line for line in shown), "nothing that is shown mentions g"


def test_only_keeps_equations_in_place_with_their_names():
    everything, shown = lines(nested()), lines(nested(), only=["dot*", "sin"])
    assert [line for line in shown if "…" not in line] == [
        line for line in everything if line in shown
    ]
    assert sum("dot_general" in line or " sin " in line for line in shown) == 2
    assert any("scan[" in line for line in shown) and not any("tanh" in line for line in shown)
    assert [line.strip() for line in shown if "…" in line] == ["… 1 equation"] * 3


def test_only_without_matches_counts_all_equations():
    assert lines(nested(), only=["cos"]) == ["{ lambda ; a:f32[3]. let … 7 equations in (b,) }"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_lines_can_be_written_without_the_rest(name):
    jaxpr = program_signature(PROGRAMS[name]()).jaxpr
    for width, selection in itertools.product((50, 200), (Selection(), Selection(1))):
        for comment in (None, lambda eqn: ("# comment",)):
            layouts = (Layout(jaxpr, width, True, selection, comment) for _ in range(9))
            whole = "".join(next(layouts).tokens()).split("\n")
            for most, layout in enumerate(layouts, 1):
                first = "".join(layout.tokens(most)).split("\n")
                assert first[:most] == whole[:most]
                assert len(first) > most or first == whole


def test_segments_have_the_styles_of_their_roles_and_the_same_text():
    shown = listing(nested(), ShowOptions(source=True))
    segments = shown.segments()
    assert "".join(segment.text for segment in segments) == shown.plain()
    styles = {str(segment.style) for segment in segments if segment.style}
    roles = tables.BINDER, tables.TYPE, tables.PRIMITIVE, tables.PARAMETER, tables.LITERAL
    assert styles == set(map(str, (*roles, tables.KEYWORD, tables.COMMENT)))


def test_a_rich_console_prints_the_whole_text_in_color():
    shown = listing(nested(), ShowOptions(width=40))
    console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system="standard")
    console.print(shown, soft_wrap=True)
    printed = console.file.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", printed) == shown.plain() + "\n"
    assert "\x1b[1mtanh\x1b[0m" in printed


def test_shared_bodies_that_unfold_to_billions_of_equations_are_listed_once_each():
    def double(f):
        return jax.jit(lambda x: f(x) + f(x * 2))

    f, count = jax.jit(jnp.sin), 1
    for _ in range(40):
        f, count = double(f), 2 * (count + 1) + 2
    closed = jax.make_jaxpr(f)(X)
    assert listing(closed).plain().count("let lambda") == 39
    assert f"… {count:,} equations" in listing(closed, ShowOptions(depth=0)).plain()
