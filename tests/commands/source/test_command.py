"""`jaxprtool source` shows the user's files with the cost of each line."""

import json
import textwrap

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.ir.source_text import Place

FUNCTIONS = """
    import jax
    import jax.numpy as jnp


    def layer(w, x):
        # a comment
        return jnp.sin(x @ w)


    def loss(w, x):
        hidden = layer(w, x)
        shape = x.shape
        return hidden.sum()


    def picked(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: x @ jnp.outer(x, x), x)


    def counted(x):
        return jax.lax.while_loop(lambda c: c < 3, lambda c: c * 2, x.sum())
"""

LOSS = "source", "kept.py:loss", "--args", "f32[8,8], f32[4,8]"


@pytest.fixture(autouse=True)
def kept(folder):
    (folder / "kept.py").write_text(textwrap.dedent(FUNCTIONS).lstrip())


def rows(text):
    """Return the words before the number of each shown line, by line number."""
    _, heading, *lines = text.partition("kept.py")[2].partition("\n\n")[0].splitlines()
    end = len(heading)
    numbered = ((line[end : end + 4], line[:end].split()) for line in lines)
    return {int(number): words for number, words in numbered if number.strip().isdecimal()}


def test_relevant_lines_have_numbers_and_their_functions(cli):
    found = cli(*LOSS)
    assert found.code == 0
    assert found.out.startswith("loss: 543 FLOP, 644 bytes, keeps 256 bytes\n\nkept.py\n")
    shown = rows(found.out)
    assert set(shown) == {5, 6, 7, 10, 11, 12, 13}
    assert shown[5] == shown[6] == shown[11] == []
    assert shown[7][:2] == ["94.6%", "512"] and "bytes" in shown[7]
    assert "    return jnp.sin(x @ w)" in found.out and "…" in found.out
    assert "with respect to w; 128 bytes are arguments" in found.out


def test_full_shows_whole_files(cli):
    shown = rows(cli(*LOSS, "--full").out)
    assert set(shown) == set(range(1, 22))
    assert shown[7][0] == "94.6%" and shown[20] == []


def test_the_parts_of_a_gradient_are_distinguished(cli):
    found = cli(*LOSS, "-p", "grad(argnums=(0, 1))")
    assert "forward" in found.out and "backward" in found.out and "keeps" not in found.out
    document = json.loads(cli(*LOSS, "-p", "grad(argnums=(0, 1))", "--json").out)
    (file,) = document["programs"][0]["files"]
    line = next(line for line in file["lines"] if line["line"] == 7)
    assert line["total"]["flops"] == line["forward"]["flops"] + line["backward"]["flops"]
    assert line["backward"]["flops"] >= 2 * 2 * 4 * 8 * 8


def test_json_has_all_lines_and_adds_up_to_cost(cli):
    (program,) = json.loads(cli(*LOSS, "--json").out)["programs"]
    cost = json.loads(cli("cost", *LOSS[1:], "--json").out)
    (file,) = program["files"]
    assert program["total"] == cost["total"]
    for key in ("flops", "transcendentals", "bytes_read", "bytes_written"):
        assert sum(line["total"][key] for line in file["lines"]) == cost["total"][key]
    assert [line["line"] for line in file["lines"]] == [7, 13]
    assert sum(line["residual_bytes"] for line in file["lines"]) == 128
    assert program["residual_bytes"] == 256 and program["elsewhere"] == 0


def test_residuals_are_those_of_the_loss_by_default(cli):
    assert "keeps" not in cli(*LOSS, "--no-residuals").out
    layer = "source", "kept.py:layer", "--args", "f32[8,8], f32[4,8]"
    assert "keeps" not in cli(*layer).out and "keeps" in cli(*layer, "--residuals").out
    counted = "source", "kept.py:counted", "--args", "f32[8]"
    assert "residuals unknown: vjp of counted" in cli(*counted).out.replace("\n", " ")
    refused = cli(*counted, "--residuals")
    assert (refused.code, refused.out) == (2, "") and refused.err.startswith("error: vjp of")


def test_times_symbols_branches_and_loops_are_shown(cli):
    assert "min time" in cli(*LOSS, "--device", "h100").out
    symbols = "source", "kept.py:layer", "--args", "f32[n,n], f32[4,n]"
    assert "8*n^2" in cli(*symbols).out
    refused = cli(*symbols, "--device", "h100")
    assert refused.code == 2 and refused.err.startswith("error: a time estimate needs sizes")
    assert "≤ 194" in cli("source", "kept.py:picked", "--args", "f32[8]").out
    counted = cli("source", "kept.py:counted", "--args", "f32[8]").out
    assert "9*" in counted and "* counts one iteration" in counted


def test_programs_without_lines_are_a_one_line_error(cli):
    found = cli("source", "jax.numpy:matmul", "--args", "f32[3,3], f32[3,3]")
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(
        "error: the equations of matmul come from no known line of your files"
    )


def test_missing_or_changed_files_are_reported(cli, folder):
    assert cli("emit", *LOSS[1:], "-o", "loss.jaxpr").code == 0
    assert "jnp.sin" in cli("source", "loss.jaxpr").out
    path = folder / "kept.py"
    text = path.read_text()
    path.write_text("# a comment\n" + text)
    changed = cli("source", "loss.jaxpr")
    assert "kept.py (source has changed since it was recorded: record it again)" in changed.out
    assert "94.6%" in changed.out and "jnp.sin" not in changed.out
    assert "note: kept.py has changed since it was recorded" in changed.err
    path.rename(folder / "gone.py")
    assert "jnp.sin" not in cli("source", "loss.jaxpr").out
    path.write_text(text)
    cli("emit", *LOSS[1:], "-o", "bare.jaxpr", "--no-source")
    assert "come from no known line of your files" in cli("source", "bare.jaxpr").err


def test_every_command_that_cites_a_changed_file_says_so_once(cli, folder):
    cli("emit", *LOSS[1:], "-o", "loss.jaxpr")
    cli("emit", "kept.py:layer", *LOSS[2:], "-o", "layer.jaxpr")
    path = folder / "kept.py"
    path.write_text("# a comment\n" + path.read_text())
    commands = (
        ("cost", "loss.jaxpr"),
        ("memory", "loss.jaxpr"),
        ("residuals", "loss.jaxpr"),
        ("why", "loss.jaxpr", "result"),
        ("diff", "loss.jaxpr", "layer.jaxpr"),
        ("show", "loss.jaxpr", "--source"),
        ("show", "loss.jaxpr", "-o", "page.html"),
        ("emit", "loss.jaxpr", "--to", "python"),
        ("emit", "loss.jaxpr", "--to", "stablehlo", "--source"),
    )
    for command in commands:
        found = cli(*command)
        assert found.err.count("kept.py has changed since it was recorded") == 1, command
        assert "# a comment" not in found.out  # the line of that number now
    page = (folder / "page.html").read_text()
    assert "kept.py has changed since it was recorded" in page and "# a comment" not in page
    assert "changed since" not in cli("cost", *LOSS[1:]).err
    assert "changed since" not in cli("cost", "loss.jaxpr", "--by", "primitive").err


def test_a_recorded_program_shows_the_text_that_was_recorded_and_one_note(cli, folder):
    path = folder / "kept.py"
    text = path.read_text()
    scope = {}
    with jaxprtool.record("run"):
        exec(compile(text, str(path), "exec"), scope)
        layer = jax.jit(scope["layer"])
        layer(jnp.ones((3, 3)), jnp.ones((4, 3)))
    path.write_text("# an edit\n\n" + text)
    note = "note: kept.py has changed since run/ was recorded (2 lines); record it again\n"
    for words in (("cost",), ("source",), ("show", "--source"), ("why", "result")):
        command, *options = words
        shown = cli(command, "run/layer", *options)
        assert shown.code == 0 and shown.err.count(note) == 1, words
        assert shown.err.count("kept.py has changed") == 1, words
    assert "return jnp.sin(x @ w)" in cli("source", "run/layer").out
    assert "return jnp.sin(x @ w)" in cli("source", "run/process-0/layer.jaxpr").out
    page = cli("show", "run/layer", "-o", "page.html")
    assert page.code == 0 and "# an edit" not in (folder / "page.html").read_text()


def test_a_line_that_is_now_empty_means_that_the_file_changed(folder):
    import jaxprtool
    from jaxprtool.commands.source.table import source_text

    program = jaxprtool.load("kept.py:loss", "f32[8,8], f32[4,8]")
    text = (folder / "kept.py").read_text().replace("    return jnp.sin", "\n    return jnp.sin")
    (folder / "kept.py").write_text(text)
    shown = source_text(jaxprtool.source(program), 80, False, None).plain()
    assert "kept.py (changed since: line 7 has no code now)" in shown


def test_cells_of_notebooks_have_their_text():
    import linecache

    import jax.numpy as jnp

    import jaxprtool
    from jaxprtool.commands.source.table import source_text

    name, code = "<ipython-input-7-abc>", "def cell(x):\n    return jnp.sin(x) @ x\n"
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    space = {"jnp": jnp}
    exec(compile(code, name, "exec"), space)
    found = jaxprtool.source(jaxprtool.trace(space["cell"], jnp.ones(8)))
    assert "return jnp.sin(x) @ x" in source_text(found, 80, False, None).plain()


MEASURED = *LOSS, "--measure", "--no-residuals"


def test_measured_times_are_an_additional_column(cli):
    found = cli(*MEASURED)
    assert found.code == 0 and " a call" in found.out.splitlines()[0]
    assert "measured  share" in found.out and "a call without the profiler" in found.out
    assert "filled with random values" in found.err
    assert max(map(len, found.out.splitlines())) <= 80
    value, _, share, *_ = rows(found.out)[7]
    assert float(value.strip("~")) > 0 and share.endswith("%")


@pytest.mark.proof
def test_measured_times_in_json_are_those_of_lines(cli):
    (program,) = json.loads(cli(*MEASURED, "--json").out)["programs"]
    times = [line["measured"] for line in program["files"][0]["lines"] if "measured" in line]
    assert {Place.from_json(each["place"]) for each in times} <= {
        "kept.py:7",
        "kept.py:13",
    } and times
    seconds = sum(each["seconds"] for each in times)
    assert 0 < seconds <= program["explained"] * program["wall_seconds"] * (1 + 1e-6)
    assert "wall_seconds" not in json.loads(cli(*LOSS, "--json").out)["programs"][0]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--args", "f32[n,n], f32[4,n]", "--measure"), "n needs a number before the program"),
        (("-p", "vjp", "--measure"), "--measure takes one program, but the passes returned"),
        (("--backend", "cpu"), "--backend needs --measure, which runs the program"),
    ],
)
def test_what_cannot_be_measured_is_a_one_line_error(cli, options, message):
    found = cli(*LOSS, *options)
    assert (found.code, found.out) == (2, "") and message in found.err


def test_a_device_without_events_is_reported(cli, monkeypatch):
    monkeypatch.setattr("jaxprtool.execute.profile._operation", lambda *event: None)
    found = cli(*MEASURED)
    assert (found.code, found.out) == (2, "") and "recorded no operations" in found.err
    assert "leave out --measure" in found.err and "--estimate" not in found.err
