"""Pages and notebook cells: contents and links, and that names stay text."""

import base64
import gzip
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.analysis.stats import count_equations, stats
from jaxprtool.commands.cost.estimate import work_by_equation
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Programs
from jaxprtool.render.page import PageState, cell, program_page
from jaxprtool.render.terminal.listing import ShowOptions
from tests.render.programs import PROGRAMS, X
from tests.share import shared_proofs

SHOWN = ShowOptions(names=True, terse=True, source=True)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b[31m\u202e"

FIRST, *OTHERS = PROGRAMS

#: Void elements.
VOID = {"meta", "input", "img"}


class Reading(HTMLParser):
    """Parses a page: its elements, which must be closed in order, and the text of its rows."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.rows = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert len(set(attributes)) == len(attributes)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("p", "summary"):
            self.rows.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if {"p", "summary"} & set(self.open):
            self.rows[-1] += text

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self):
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]


def page_of(program, **shown):
    options = ShowOptions(**{"names": True, "terse": True, "source": True, **shown})
    return program_page([PageState({program.name: program})], options, stats, work_by_equation)


def traced(name):
    closed = PROGRAMS[name]()
    return jaxprtool.trace(jax.extend.core.jaxpr_as_fun(closed), *closed.in_avals)


def nested(x):
    with jax.named_scope("outer"):
        y = jnp.sin(x)
        with jax.named_scope("inner"):
            y = jnp.cos(y) + y
    return jax.lax.cond(y[0] > 0, jnp.tanh, lambda v: jnp.exp(v) * 2, y)


@pytest.fixture(scope="module")
def program():
    return jaxprtool.trace(nested, X)


@pytest.mark.parametrize("name", [FIRST, *shared_proofs(OTHERS)])
def test_every_equation_is_a_row_of_a_page_that_is_well_formed(name):
    program = traced(name)
    read = Reading(page_of(program))
    wanted = Counter(e.primitive.name for e in equations(jaxprtool.ir.program.top_jaxpr(program)))
    rows = [
        attributes
        for tag, attributes in read.elements
        if re.match(r"e\d", attributes.get("id", ""))
    ]
    assert len(rows) == sum(wanted.values())
    assert len(read.ids) == len(set(read.ids))


@pytest.mark.parametrize("name", [FIRST, *shared_proofs(OTHERS)])
def test_links_have_targets(name):
    for text in (page_of(traced(name)), traced(name)._repr_html_()):
        read = Reading(text)
        links = {a["href"][1:] for a in read.of("a") if not a["href"].startswith("#q=")}
        assert links <= set(read.ids)


def test_uses_of_a_value_link_to_its_definition(program):
    text = page_of(program)
    bound = re.search(
        r'<dfn id="(v\d+)">y</dfn><i>:f32\[3\]</i> = <b>sin</b> <a href="#(v\d+)">x</a>', text
    )
    assert f'<dfn id="{bound[2]}">x</dfn>' in text
    assert f'<b>cos</b> <a href="#{bound[1]}">y</a>' in text


def test_scopes_and_bodies_are_folded(program):
    text = page_of(program)
    read = Reading(text)
    assert [d["data-scope"] for d in read.of("details") if "data-scope" in d] == ["outer", "inner"]
    assert "branches[0] 2 equations" in read.rows and "branches[1] 1 equation" in read.rows
    assert all("open" in d for d in read.of("details"))  # so few rows are all in sight
    folded = Reading(page_of(program, depth=0)).of("details")
    assert ["open" in d for d in folded if d.get("class") == "row"] == [False]


def stepped(w, x):
    def loss(w):
        hidden = x
        with jax.named_scope("LM"):
            for i in range(2):
                with jax.named_scope(f"block_{i}"):
                    hidden = jnp.tanh(hidden @ w) * jnp.cos(hidden)
        return jnp.square(hidden).sum()

    return w - 0.1 * jax.grad(loss)(w)


def test_scopes_are_those_of_cost():
    program = jaxprtool.trace(stepped, jnp.ones((3, 3)), jnp.ones((3, 3)))
    read = Reading(page_of(program))
    shown = {d["data-scope"] for d in read.of("details") if "data-scope" in d}
    paths = [group.path for group in jaxprtool.cost(program, by="scope").groups if group.path]
    assert {name for path in paths for name in path} == shown
    assert {"forward", "backward"} <= {name.partition("/")[0] for name in shown}
    assert not any("jvp(" in name for name in shown)


def test_rows_that_do_not_fit_are_initially_folded():
    def f(x):
        for i in range(40):
            with jax.named_scope(f"layer_{i}"):
                for _ in range(8):
                    x = jnp.sin(x)
        return x

    read = Reading(page_of(jaxprtool.trace(f, X)))
    scopes = [d for d in read.of("details") if "data-scope" in d]
    assert ["open" in d for d in scopes] == [True] * 2 + [False] * 38


def test_a_function_that_is_jitted_as_a_whole_is_initially_open():
    @jax.jit
    def jitted(x):
        for i in range(30):
            x = jax.jit(lambda y, i=i: jnp.sin(y) * i)(x)
        return x

    read = Reading(page_of(jaxprtool.trace(lambda x: jax.jit(lambda y: jitted(y))(x), X)))
    rows = [d for d in read.of("details") if d.get("class") == "row"]
    assert ["open" in d for d in rows] == [True] * 2 + [False] * 30


def test_equations_of_a_line_without_a_scope_are_folded():
    def f(x):
        y = jnp.cos(x) + jnp.tanh(x) * 2  # all in one
        return jnp.sin(y)

    read = Reading(page_of(jaxprtool.trace(f, X)))
    assert any(
        row.endswith("y = jnp.cos(x) + jnp.tanh(x) * 2  # all in one 4 equations")
        for row in read.rows
    )
    assert len(read.of("details")) == 1


def test_only_and_no_types_omit_parts(program):
    read = Reading(page_of(program, only=["tanh"], types=False))
    rows = [row for row in read.rows if " = " in row]
    assert [re.search(r"(\S+ = \w+)", row)[1] for row in rows] == [
        "f = cond",
        "i = tanh",
        "result = f",
    ]
    assert "… 7 equations" in read.rows


def test_the_users_file_is_next_to_the_listing(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n\n\ndef f(x):\n    return jnp.sin(x)  # </pre>\n"
    )
    monkeypatch.chdir(tmp_path)
    program = jaxprtool.load("mine.py:f", "f32[3]")
    text = page_of(program)
    read = Reading(text)
    assert [s["aria-label"] for s in read.of("section") if "aria-label" in s] == ["mine.py"]
    assert '<cite><a href="#f0-5">mine.py:5</a></cite>' in text
    assert '<span id="f0-5"><a href="#q=%22mine.py%3A5%22"><small>1</small>' in text
    assert "&lt;/pre&gt;" in text
    assert str(tmp_path) not in text
    plain = page_of(program, source=False)
    assert "<aside" not in plain and "mine.py:5" not in plain


@pytest.mark.parametrize("named", ["secret.py", "../" * 9 + "etc/passwd", "/etc/passwd"])
def test_other_files_than_the_users_python_are_not_shown(named, tmp_path, monkeypatch, program):
    (tmp_path / "secret.py").write_text("PASSWORD = 'open sesame'\n")
    monkeypatch.chdir(tmp_path)
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    written = (tmp_path / "p.jaxpr").read_text()
    assert "test_page.py:" in written
    (tmp_path / "q.jaxpr").write_text(re.sub(r"[^'\s]*test_page\.py", named, written))
    text = page_of(jaxprtool.read(tmp_path / "q.jaxpr"))
    assert f"{named}:" in text or "passwd:" in text
    assert 'id="f0-1"' not in text and "sesame" not in text and "root:" not in text


def test_hostile_names_are_text(tmp_path, monkeypatch):
    def f(x):
        with jax.named_scope(HOSTILE.replace("/", "")):
            return {
                HOSTILE: jax.jit(
                    lambda v: jnp.sin(v) * 2,
                )(x[HOSTILE])
            }

    program = jaxprtool.trace(f, {HOSTILE: X}).replace(name=HOSTILE)
    for text in (page_of(program), program._repr_html_()):
        read = Reading(text)
        assert len(read.of("script")) <= 1 and read.of("img") == []
        assert "\x1b" not in text and "\u202e" not in text
        assert not any(name.startswith("on") for _, a in read.elements for name in a)
        assert any("alert(1)" in row for row in read.rows)


def test_only_the_pages_own_script_may_run_and_no_requests_are_made(program):
    text = page_of(program, source=False)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_body_that_is_called_twice_is_shown_once():
    read = Reading(page_of(traced("shared_within_shared")))
    assert sum(row.endswith("shown above") for row in read.rows) > 0


def test_programs_are_sections_of_one_page():
    def f(key, x):
        return jaxprtool.variable(jax.random.normal(key, (3,)), name="w") * x

    programs = jaxprtool.trace(f, jax.random.key(0), X).apply("unzip")
    for text in (
        program_page([PageState(programs)], SHOWN, stats, work_by_equation),
        programs._repr_html_(),
    ):
        read = Reading(text)
        assert [a["aria-label"] for a in read.of("article")] == ["init", "apply"]
        assert len(read.ids) == len(set(read.ids))


def test_a_notebook_cell_needs_no_script_and_has_its_own_styles(program):
    text = program._repr_html_()
    read = Reading(text)
    assert read.of("script") == [] and len(read.of("details")) == 6
    assert ' title="f32[3]">y</a>' in text and " outer/inner" in text
    css = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    outside = re.sub(
        r"\{(?:[^{}]|\{[^{}]*\})*\}", "", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    )
    assert set(outside.split()) == {".jaxpr"}


def test_cells_of_a_notebook_do_not_share_ids(program):
    other = jaxprtool.trace(lambda x: jnp.cos(x), X)
    ids = [Reading(each._repr_html_()).ids for each in (program, other)]
    assert set(ids[0]).isdisjoint(ids[1])


def test_a_cell_of_a_long_program_says_how_much_it_omits():
    def f(x):
        for _ in range(1100):
            x = jnp.sin(x)
        return x

    program = jaxprtool.trace(f, X)
    text = cell({"f": program}, stats)
    assert count_equations(program) == 1100 and text.count("<b>sin</b>") == 1000
    assert "… 100 equations" in text


def test_programs_are_shown_in_a_notebook(program):
    assert "sin" in Programs({"one": program})._repr_html_()


# --- results of passes ----------------------------------------------------------------------------


def wasteful(x):
    _ = jnp.sin(x)
    return jnp.cos(x) * 1.0 + jnp.cos(x)


def states_of(*passes):
    states = [PageState({"wasteful": jaxprtool.trace(wasteful, X)}, after=5)]
    for name in passes:
        (program,) = states[-1].programs.values()
        states.append(PageState({"wasteful": program.apply(name)}, name, 0.001, 5, 4))
    return states


def unpacked(text, state):
    packed = re.search(rf'id="state{state}">([^<]*)</script>', text)[1]
    return gzip.decompress(base64.b64decode(packed)).decode()


def test_each_pass_has_a_tab_with_its_changes():
    text = program_page(
        states_of("dce", "cse", "cse"), replace(SHOWN, source=False), stats, work_by_equation
    )
    read = Reading(text)
    tabs = [a for a in read.of("input") if a.get("name") == "state"]
    assert ["disabled" in tab for tab in tabs] == [False, False, False, True]
    assert ["checked" in tab for tab in tabs] == [False, False, True, False]
    label = re.search(r"<b>dce</b> <small>1 ms</small><span>5 → 4 (.*?)</span>", text)[1]
    assert label == '<del aria-label="1 removed">\u22121</del>'
    traced = unpacked(text, 0)
    (row,) = re.findall(r'<p id="p0-e(\d)" class="removed">.*?<b>(\w+)</b>', traced)
    assert row == ("0", "sin") and "1 equation to be removed by dce" in traced
    assert "<b>sin</b>" not in unpacked(text, 1) and 'id="p1-e0"' in unpacked(text, 1)
    assert 'id="p2-e0"' in text and 'id="state3"' not in text
    assert not re.search(r'id="p[013]-', text)


def test_additions_of_a_pass_are_marked():
    text = program_page(states_of("jvp"), SHOWN, stats, work_by_equation)
    assert re.search(r'class="added"><code><ins title="added">\+</ins>', text)
    assert "equations added by jvp" in text


def test_bodies_nested_deeper_than_a_browser_shows_are_counted():
    function = jnp.sin
    for _ in range(90):
        function = jax.jit(lambda x, inner=function: inner(x) * 2)
    program = jaxprtool.trace(function, X)
    text = program_page([PageState({program.name: program})], SHOWN, stats, work_by_equation)
    assert "equations</p>" in text and text.count('class="inside"') < 60
