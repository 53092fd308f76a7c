"""`jaxprtool report` writes one page of listing, cost, memory and residuals."""

import json
import re
import shlex
import textwrap
from html import unescape
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from tests.documentation.blocks import ROOT
from tests.programs.modules import OLD
from tests.share import on_one_release

MODEL = """
    import jax
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example({"w": "f32[64,64]"}, "f32[8,64]")
    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"])
        return jnp.square(hidden).sum()

    def step(params, x):
        return jax.grad(loss)(params, x)

    def layers(weights, x, deep):
        rows = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)[0]
        return jax.lax.cond(deep, lambda x: (x @ x.T).sum(), lambda x: x[0, 0], rows)

    def sin(x):
        return jnp.sin(x)
"""


@pytest.fixture(autouse=True)
def model(folder):
    (folder / "model.py").write_text(textwrap.dedent(MODEL))


def test_the_page_has_all_views(cli, folder):
    done = cli("report", "model.py:loss", "-p", "grad, dce", "-o", "report.html")
    assert done.code == 0 and done.out.startswith("loss: ")
    text = (folder / "report.html").read_text()
    for name in ("cost", "memory", "residuals"):
        assert f'id="report-{name}"' in text
    assert "by line" in text and "by scope" in text and "by primitive" in text
    assert "live at the peak of loss" in text and "<svg" in text
    assert "loss keeps" in text and "dots_saveable" in text
    assert '<a href="#f0-8">model.py:8</a>' in text
    assert "<b>grad</b>" in text and "<b>dce</b>" in text


def test_the_summary_cuts_no_figure(cli):
    args = "--args", "{'w': f32[256,256]}, f32[256,256]"
    out = cli("report", "model.py:loss", *args, "-o", "report.html").out
    assert out.count("%  256.0 KiB  ") >= 4


def test_a_vector_result_has_no_residuals_and_symbolic_sizes_no_memory(cli, folder):
    assert cli("report", "model.py:sin", "--args", "f32[n]", "-o", "sin.html").code == 0
    text = (folder / "sin.html").read_text()
    assert "its result is not one floating-point number, and it has no gradient inside" in text
    args = "--args", "{'w': f32[n,n]}, f32[8,n]"
    assert cli("report", "model.py:step", *args, "-o", "report.html").code == 0
    text = (folder / "report.html").read_text()
    assert "the gradient inside step keeps" in text
    assert "the memory of step needs sizes that are numbers" in text
    assert "32*n^2" in text or "n^2" in text  # cost has polynomials


def page_cells(page):
    """Return the facts and cells of a page, in order."""
    found = re.findall(r"<(?:p class=.facts.|td[^>]*)>(.*?)</(?:p|td)>", page.read_text(), re.S)
    return [unescape(re.sub(r" ?<code>.*?</code>|<[^>]+>", "", text)) for text in found]


def terminal_cells(printed):
    """Yield the cells and lines of a terminal's output, without headings, code and curves."""
    for line, below in pairwise([*printed.splitlines(), ""]):
        is_heading = below.startswith("─")
        if line and not is_heading and not re.search("[─│┤┬]|jax|^ +peak|equations in", line):
            yield from re.split("   +", line.strip())


@pytest.mark.parametrize("command", ["cost", "memory", "residuals"])
def test_the_page_agrees_with_the_terminal(cli, terminal, folder, command):
    args = "--args", "f32[4,16,16], f32[8,16], bool[]"
    assert cli("report", "model.py:layers", *args, "-o", "report.html").code == 0
    on_page = " | ".join(page_cells(folder / "report.html"))
    printed = list(terminal_cells(terminal(command, "model.py:layers", *args, columns=200)))
    assert len(printed) > 10 and [cell for cell in printed if cell not in on_page] == []


def test_a_program_of_no_bytes_has_an_empty_list(cli, folder):
    assert cli("report", "model.py:sin", "--args", "f32[0]", "-o", "report.html").code == 0
    assert "sin: 0 bytes" in page_cells(folder / "report.html")
    assert cli("memory", "model.py:sin", "--args", "f32[0]").out.startswith("sin: 0 bytes\n\nshare")


# --- the summary ------------------------------------------------------------------------------

BLOCKS = """
    import jax
    import jax.numpy as jnp
    import jaxprtool

    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"] * jax.nn.sigmoid(x).mean(-1, keepdims=True)

    @jaxprtool.example([{"up": "f32[16,64]", "down": "f32[64,16]"}] * 6, "f32[128,16]")
    def loss(layers, x):
        for w in layers:
            x = block(x, w)
        return jnp.square(x).mean()

    @jaxprtool.example("f32[8]")
    def unsafe(x):
        return jnp.where(x > 0, jnp.log(x), 0.0).sum()

    def step(layers, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers, x))

    @jaxprtool.example("f32[8]")
    def plain(x):
        return x
"""


@pytest.fixture
def blocks(folder):
    (folder / "blocks.py").write_text(textwrap.dedent(BLOCKS))


def summaries(cli, *words):
    done = cli("report", *words, "-o", "page.html", "--json")
    assert done.code == 0
    return json.loads(done.out)["programs"]


@pytest.mark.proof
def test_a_report_starts_with_an_overview_and_the_most_expensive_parts(cli, folder, blocks):
    (found,) = summaries(cli, "blocks.py:loss", "-p", "grad")
    assert found["name"] == "loss" and found["arguments"]["count"] == 13
    assert found["lines"][0]["name"] == "blocks.py:7"
    memory = json.loads(cli("memory", "blocks.py:loss", "-p", "grad", "--json").out)
    assert found["peak"] == memory["at"] and found["live"] == memory["live"][:3]
    kept = json.loads(cli("residuals", "blocks.py:loss", "--json").out)
    assert found["residual_bytes"] == kept["total_bytes"]
    assert found["residual_count"] == len(kept["residuals"])
    page = (folder / "page.html").read_text()
    assert page.index('id="report-summary"') < page.index('id="report-cost"')
    assert "what to do next" in page and 'id="view-summary" autocomplete="off" checked' in page


@pytest.mark.proof
def test_the_summary_is_printed_and_fits_the_terminal(terminal, folder, blocks):
    shown = terminal("report", "blocks.py:loss", "-p", "grad", "-o", "page.html", columns=80)
    assert max(map(len, shown.splitlines())) <= 80
    parts = ["lines by FLOPs", "peak of memory: ", "gradient: loss keeps ", "lint: ", "what to do"]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


@on_one_release
def test_a_suggestion_has_a_fact_and_a_working_command(cli, folder):
    (folder / "samples").symlink_to(ROOT / "samples")
    (found,) = summaries(cli, "samples/layers.py:loss", "-p", "grad", "--frames", "mine")
    commands = {each["command"]: each["fact"] for each in found["suggestions"]}
    fact = commands["jaxprtool outline samples/layers.py:loss -p grad"]
    assert fact.startswith("4 copies of layer") and "% of the equations" in fact
    assert 2 <= len(commands) <= 5
    for command in commands:
        assert cli(*shlex.split(command)[1:]).code == 0


def test_a_suggestion_follows_from_a_finding(cli, blocks):
    (found,) = summaries(cli, "blocks.py:unsafe")
    assert found["finding_count"] == 1 and found["findings"][0]["code"] == "JT702"
    lint, nans, *_ = found["suggestions"]
    assert lint["command"] == "jaxprtool lint blocks.py:unsafe"
    assert lint["fact"] == "1 finding of lint may make results wrong"
    assert nans["command"] == "jaxprtool nans blocks.py:unsafe -p grad"
    assert nans["fact"].startswith("blocks.py:17: a where guards the result of this log")


def test_a_step_with_a_gradient_inside_has_residuals(cli, blocks):
    args = "[{'up': f32[16,64], 'down': f32[64,16]}], f32[128,16]"
    (found,) = summaries(cli, "blocks.py:step", "--args", args)
    facts = {each["command"]: each["fact"] for each in found["suggestions"]}
    residuals = shlex.join(["jaxprtool", "residuals", "blocks.py:step", "--args", args])
    assert facts[residuals].startswith("the backward part reads ")


def test_without_facts_nothing_is_suggested(cli, folder, blocks):
    (found,) = summaries(cli, "blocks.py:plain")
    assert found["suggestions"] == [] and found["lines"] == []
    assert "what to do next" not in (folder / "page.html").read_text()


@on_one_release
def test_measuring_is_not_suggested_after_a_measurement(cli, terminal, blocks):
    (found,) = summaries(cli, "blocks.py:loss", "--measure")
    assert found["measured"] and "measured" not in summaries(cli, "blocks.py:loss")[0]
    assert not any(" profile " in each["command"] + " " for each in found["suggestions"][-1:])


def test_each_of_several_programs_has_a_summary(cli):
    target = f"{ROOT / 'samples' / 'mlp_variables.py'}:loss"
    found = summaries(cli, target, "-p", "unzip")
    assert [each["name"] for each in found] == ["loss_init", "loss_apply"]
    assert not any(each["suggestions"] for each in found)


def test_with_a_page_on_stdout_nothing_else_is_printed(cli, blocks):
    assert cli("report", "blocks.py:loss", "-o", "-").out.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "error: report writes an HTML page, but -o is missing"),
        (("-o", "report.jaxpr"), "error: report writes .html files"),
        (("-o", "no/such/report.html"), "error: "),
    ],
)
def test_mistakes_are_one_line_errors(cli, folder, options, message):
    done = cli("report", "model.py:loss", *options)
    assert done.code == 2 and done.out == "" and done.err.startswith(message)
    assert not list(folder.glob("*.html"))


def test_the_page_of_a_program_of_a_run_is_in_its_folder(cli, folder):
    with jaxprtool.record("run"):
        jax.jit(lambda x: x + 1)(jnp.ones(3))
    done = cli("report", "run/lambda")
    assert done.code == 0 and (folder / "run" / "lambda.html").exists()
    assert "wrote run/lambda.html" in done.err


def test_measured_times_are_in_the_table_of_lines(cli, folder):
    args = "--args", "f32[4,64,64], f32[8,64], bool[]"
    assert cli("report", "model.py:layers", *args, "--measure", "-o", "r.html").code == 0
    page = (folder / "r.html").read_text()
    by_line = page.partition("<caption>by line</caption>")[2].partition("</table>")[0]
    assert page.count(">measured<") == by_line.count(">measured<") == 1
    first = re.findall(r"<td[^>]*>(.*?)</td>", by_line, re.S)
    assert first[0].endswith("%") and first[1].endswith("s") and "model.py:" in first[7]
    # The loop has a time, but no cost of its own.
    assert "model.py:15" in by_line and "% explained" in page
    found = cli("report", "model.py:loss", "--device", "0", "-o", "r.html")
    assert found.code == 2 and "--device needs --measure, which runs the program" in found.err


def test_a_page_has_the_suffix_of_one(cli, folder):
    wrong = cli("report", "model.py:loss", "-o", "report.txt")
    assert wrong.code == 2 and not (folder / "report.txt").exists()
    assert wrong.err == "error: report writes .html files, but -o names 'report.txt'\n"


def test_the_document_of_an_hlo_module_has_its_cost_and_memory(cli, folder):
    (folder / "old.hlo").write_text(OLD)
    done = cli("report", "old.hlo", "-o", "page.html", "--json")
    document = json.loads(done.out)
    assert document["programs"] == [] and document["module"]["cost"]["total"]["flops"] == 256
    lines = [group["name"] for group in document["module"]["cost"]["groups"]]
    assert lines == ["step.py:7", "step.py:8"]
    memory = json.loads(cli("memory", "old.hlo", "--json").out)
    peak = document["module"]["memory"]
    assert peak["peak_bytes"] == memory["peak_bytes"] > 0
