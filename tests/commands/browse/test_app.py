"""The browser and its keys."""

import asyncio
import contextlib
import shlex
import sys

import jax
import pytest
from textual import events
from textual.widgets import Input, OptionList

import jaxprtool
from jaxprtool.commands.browse import document
from jaxprtool.commands.browse.app import Chooser, Keys


def plain(widget):
    return str(widget.render())


class Screen:
    """A running browser, and its visible text."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    async def press(self, *keys):
        await self.pilot.press(*keys)

    async def search(self, query):
        await self.press("slash")
        self.app.query_one(Input).value = query
        await self.press("enter")

    @property
    def row(self):
        """Return the current row."""
        return "".join(self.app.program.document.row(self.app.program.node))

    @property
    def rows(self):
        return ["".join(self.app.program.document.row(n)) for n in self.app.program.outline.rows]

    @property
    def status(self):
        return plain(self.app.query_one("#status"))

    @property
    def top(self):
        return plain(self.app.query_one("#top"))

    @property
    def said(self):
        """Return the lines of the description of the row."""
        return [strip.text for strip in self.app.info.strips]

    @property
    def marked(self):
        shown = self.app.program
        return [
            node.eqn.primitive.name
            for node in shown.outline.rows
            if node.eqn and shown.is_marked(node)
        ]


def browsed(app, use, size=(160, 50)):
    """Run an app and interact with it."""

    async def run():
        async with app.run_test(size=size) as pilot:
            await use(Screen(app, pilot))

    asyncio.run(run())


def test_the_cursor_starts_at_the_first_equation_next_to_its_source(browser):
    async def use(screen):
        assert screen.row.startswith("hidden:f32[3] = jit")
        assert screen.app.source.border_title == "tests/commands/browse/tiny.py:19"
        assert screen.app.source.line(18)[1].plain.endswith("""hidden = layer(x, params["w"])""")
        assert screen.app.source.cursor == 18
        await screen.press("down")
        assert screen.app.source.cursor == 19
        assert screen.said[0].split()[:3] == ["cos", "Elementwise", "cosine:"]
        assert ["reads", "hidden:f32[3]", "←", "jit"] in [line.split() for line in screen.said]

    browsed(browser(), use)


def test_rows_fold_and_unfold(browser):
    async def use(screen):
        count = len(screen.rows)
        await screen.press("enter")
        assert len(screen.rows) == count + 3
        await screen.press("right", "right")
        assert screen.row.startswith("z:f32[3]")
        await screen.press("left")
        assert screen.row.startswith("hidden")
        await screen.press("left")
        assert len(screen.rows) == count
        await screen.press("asterisk")
        assert len(screen.rows) == count + 5
        await screen.press("j", "minus")
        assert len(screen.rows) == count and screen.row.startswith("hidden")
        await screen.press("G", "down", "pagedown")
        assert screen.row == "1 result  12 bytes"
        await screen.press("g", "up", "pageup")
        assert screen.row == "3 arguments  36 bytes"

    browsed(browser(), use, (80, 24))


@pytest.mark.proof
def test_a_search_goes_from_match_to_match_and_unfolds(browser):
    async def use(screen):
        await screen.search("mul")
        assert screen.row.startswith("z:f32[3] = mul") and screen.status.startswith("1 of 3")
        await screen.press("n")
        assert screen.row.startswith("e:f32[3] = mul")
        await screen.press("N", "N")
        assert screen.row.startswith("scaled") and screen.status.startswith("3 of 3")
        await screen.search("nowhere")
        assert screen.status == "no match for nowhere" and screen.row.startswith("scaled")
        await screen.press("slash", "x", "tab")
        assert screen.app.focused is screen.app.source
        await screen.press("tab", "tab", "slash", "x", "escape")
        assert screen.app.focused is screen.app.program
        await screen.search("params['w']")
        assert screen.row == "params['w']:f32[3]"

    browsed(browser(), use)


@pytest.mark.proof
def test_a_query_typed_in_one_burst_is_searched(browser):
    async def use(screen):
        for character in "/browse/tiny.py:12\r":
            key = {"/": "slash", "\r": "enter"}.get(character, character)
            screen.app.post_message(events.Key(key, character))
        await screen.pilot.pause()
        await screen.pilot.pause()
        assert screen.row.startswith("z:f32[3] = mul") and screen.status.startswith("1 of 1")

    browsed(browser(), use)


def test_go_to_a_definition_and_back_and_forth(browser):
    async def use(screen):
        await screen.search("tiny.py:24")
        await screen.press("d")
        assert isinstance(screen.app.screen, Chooser)
        await screen.press("2")
        assert screen.row.startswith("hidden")
        await screen.press("alt+left")
        assert screen.row.startswith("f:f32[3] = sub")
        await screen.press("greater_than_sign")
        assert screen.row.startswith("hidden")
        await screen.press("less_than_sign", "less_than_sign", "less_than_sign")
        assert screen.status == "this is the first place"
        await screen.search("iota")
        await screen.search(":13")
        await screen.press("d")  # the only value that it reads
        assert screen.row.startswith("z:f32[3] = mul")

    browsed(browser(), use)


def test_go_to_uses_and_mark_dependents(browser):
    async def use(screen):
        await screen.search("tanh")
        await screen.press("u")
        choices = screen.app.screen.query_one(OptionList)
        assert choices.option_count >= 3
        await screen.press("down", "enter")
        assert screen.row.startswith("_:f32[3] = cos")
        assert screen.marked == ["jit", "cos", "scan", "mul", "sub"]
        await screen.press("asterisk")
        assert screen.marked == ["jit", "cos", "scan", "sin", "mul", "mul", "sub"]
        await screen.press("escape")
        assert screen.marked == []
        await screen.press("u")
        assert screen.status == "it has no uses"
        await screen.search("scaled")
        await screen.search(":23")
        await screen.press("m", "m")
        assert "depends on it" in screen.status and "cos" not in screen.marked
        assert {"tanh", "sin"} <= set(screen.marked)

    browsed(browser(), use)


def test_go_from_a_source_line_to_its_equations(browser):
    async def use(screen):
        await screen.press("tab")
        assert screen.app.focused is screen.app.source
        await screen.press("down", "down", "down")
        assert "3 equations from this line" in screen.status
        assert screen.marked == ["scan"]
        await screen.press("enter")
        assert screen.row.startswith("b:f32[3] = scan")
        assert screen.app.focused is screen.app.program
        await screen.press("n")
        assert screen.row.startswith("d:f32[3] = sin")
        await screen.press("tab", "up", "enter")
        assert screen.status == "no equation comes from this line"

    browsed(browser(), use)


def test_states_before_and_after_passes(browser):
    async def use(screen):
        assert screen.top.startswith(" net  ") and "[3/3] batch(axis_size=2)" in screen.top
        changes = [screen.app.program.line(n)[0][0] for n in range(screen.app.program.line_count)]
        assert changes == [" ", "+", "+", "+", "+", " "]
        await screen.press("left_square_bracket", "left_square_bracket")
        assert "[1/3] traced" in screen.top
        await screen.press("c")
        assert screen.row.startswith("_:f32[3] = cos")
        assert screen.app.program.line(screen.app.program.cursor)[0][0] == "-"
        await screen.press("left_square_bracket")
        assert screen.status == "this is the first state"
        await screen.press("s", "2")
        assert "[2/3] dce" in screen.top and "+0 -1" in screen.top

    browsed(browser("dce, batch(axis_size=2)"), use)


def test_a_state_is_shown_at_the_row_of_the_cursor(browser):
    async def use(screen):
        await screen.search("tanh")
        await screen.press("left_square_bracket")
        assert screen.row.startswith("a:f32[3] = tanh")
        await screen.press("t")
        assert screen.row.startswith("a:f32[3] = tanh") and "grouped by scopes" in screen.status

    browsed(browser("dce"), use)


def test_several_programs_are_several_states(browser, states):
    program = jaxprtool.load("samples/mlp_variables.py:net")

    async def use(screen):
        assert "apply" in screen.top
        await screen.press("left_square_bracket")
        assert "init" in screen.top

    browsed(browser("unzip", program), use)


def test_text_to_copy(browser):
    async def use(screen):
        await screen.search("scaled")
        await screen.search(":23")
        await screen.press("y", "1")
        assert screen.app.clipboard == "eqns[3]"
        await screen.press("y", "2")
        assert screen.app.clipboard == "scaled:f32[3] = mul b params['scale']"
        await screen.press("y", "3")
        assert screen.app.clipboard == "tests/commands/browse/tiny.py:23"
        await screen.press("y", "4")
        assert "tanh" in screen.app.clipboard and "cos" not in screen.app.clipboard
        await screen.search("params['w']")
        await screen.press("y", "1")
        assert screen.app.clipboard == "params['w']"

    browsed(browser(), use)


def test_the_editor_is_opened_at_the_line(browser, monkeypatch, tmp_path):
    script, log = tmp_path / "editor.py", tmp_path / "log"
    script.write_text(f"import sys; open({str(log)!r}, 'w').write(' '.join(sys.argv[1:]))")

    async def use(screen):
        monkeypatch.setattr(screen.app, "suspend", contextlib.nullcontext)
        monkeypatch.setenv("EDITOR", shlex.join([sys.executable, str(script)]))
        await screen.press("e")
        assert log.read_text().split()[0] == "+19"
        assert log.read_text().endswith("tests/commands/browse/tiny.py")
        monkeypatch.setenv("EDITOR", "/no/such/editor")
        await screen.press("e")
        assert "cannot start the editor" in screen.status

    browsed(browser(), use)


def test_names_are_the_users_or_jaxs(browser):
    async def use(screen):
        await screen.press("v")
        assert screen.row.startswith("g:f32[3] = jit layer c b") or screen.row[1] == ":"
        await screen.press("v")
        assert screen.row.startswith("hidden")

    browsed(browser(), use)


def test_the_keys_are_listed(browser):
    async def use(screen):
        await screen.press("question_mark", "tab")
        assert isinstance(screen.app.screen, Keys)
        await screen.press("escape")
        assert not isinstance(screen.app.screen, Keys)

    browsed(browser(), use, (80, 24))


def test_the_panes_of_a_small_terminal_alternate(browser):
    async def use(screen):
        assert screen.app.source.display and screen.app.source.size.height >= 5
        await screen.press("tab", "tab")
        assert screen.app.focused is screen.app.info and screen.app.info.size.height >= 5
        await screen.press("tab", "i")
        assert screen.app.program.size.height >= 20

    browsed(browser(), use, (80, 24))


@pytest.mark.proof
def test_a_row_without_source_leaves_its_room_to_the_details(browser):
    async def use(screen):
        await screen.press("g")
        assert not screen.app.source.display
        assert [line.split() for line in screen.said][:2] == [
            ["3", "arguments", "36", "bytes"],
            ["params['scale']", "f32[3]"],
        ]
        await screen.press("tab")
        assert screen.app.focused is screen.app.info
        await screen.press("tab", "down")
        assert screen.app.source.display

    browsed(browser(), use, (80, 24))
    browsed(browser(), use)


@pytest.mark.proof
def test_a_shared_body_of_jax_has_the_source_of_its_call(browser):
    def fun(x):
        return jax.nn.silu(jax.nn.silu(x))

    async def use(screen):
        await screen.search("logistic")
        assert screen.status.startswith("1 of 2")
        assert screen.app.source.place == (__file__, fun.__code__.co_firstlineno + 1)
        assert any("test_app.py" in line for line in screen.said)
        assert "\\" not in screen.said[0]
        await screen.press("n", "tab", "up", "down")
        assert screen.status.startswith("6 equations from this line")

    browsed(browser(program=jaxprtool.trace(fun, 1.0)), use)


def test_rows_at_a_great_depth_are_in_view(browser):
    fun = jax.numpy.sin
    for _ in range(50):
        fun = jax.jit(lambda x, fun=fun: fun(x) + 1)

    async def use(screen):
        await screen.search("sin")
        program = screen.app.program
        text = program.line(program.cursor)[1]
        assert 0 <= program.cursor - program.scroll_offset.y < program.size.height
        assert text.plain.lstrip().startswith("50   ") and "= sin x" in text.plain[:50]

    browsed(browser(program=jaxprtool.trace(lambda x: fun(x), 1.0)), use, (80, 24))


def test_nearly_empty_programs(browser, monkeypatch):
    async def use(screen):
        await screen.press(
            "down", "enter", "d", "u", "m", "t", "c", "v", "f", "e", "asterisk", "minus"
        )
        await screen.press("y", "escape", "escape", "tab", "enter", "n", "less_than_sign", "i")

    monkeypatch.setenv("EDITOR", "true")
    for fun, args in ((lambda: (), ()), (lambda a: a, (1.0,))):
        browsed(browser(program=jaxprtool.trace(fun, *args)), use, (20, 5))


@pytest.mark.proof
def test_a_program_from_a_file_and_one_of_symbolic_sizes(browser, tmp_path, net):
    jaxprtool.write(net, tmp_path / "net.jaxpr")

    async def use(screen):
        assert screen.row.startswith("hidden") or "jit" in screen.row
        await screen.press("asterisk", "d", "escape", "tab", "down", "enter")

    browsed(browser(program=jaxprtool.read(tmp_path / "net.jaxpr")), use)

    async def use_symbolic(screen):
        await screen.search("f32[n]")
        assert screen.status.startswith("2 of 3")

    symbolic = jaxprtool.load("jax.numpy:sin", args="f32[n]")
    browsed(browser(program=symbolic), use_symbolic)


def test_variables_of_a_large_program_are_named_while_it_is_shown(browser, monkeypatch):
    monkeypatch.setattr(document, "MANY", 3)

    async def use(screen):
        while not screen.app.program.document.is_complete:
            await asyncio.sleep(0.01)
        await screen.pilot.pause()
        assert screen.row.startswith("hidden")

    app = browser()
    assert not app.program.document.is_complete
    node = app.program.outline.rows[1]
    assert "".join(app.program.document.row(node)).startswith("·:f32[3] = jit layer · ·")
    browsed(app, use)


def test_an_error_in_the_browser_ends_it_and_is_kept(browser, monkeypatch):
    async def use(screen):
        monkeypatch.setattr(screen.app, "action_names", lambda: 1 / 0)
        await screen.press("v")

    app = browser()
    with pytest.raises(ZeroDivisionError):
        browsed(app, use)
    assert isinstance(app.fault, ZeroDivisionError)
