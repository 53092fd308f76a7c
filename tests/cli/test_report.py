"""`jaxprtool report` writes one page of listing, cost, memory and residuals."""

import re
import textwrap
from html import unescape
from itertools import pairwise

import pytest

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
    assert (done.code, done.out) == (0, "")
    text = (folder / "report.html").read_text()
    for name in ("cost", "memory", "residuals"):
        assert f'id="report-{name}"' in text
    assert "by line" in text and "by scope" in text and "by primitive" in text
    assert "live at the peak of loss" in text and "<svg" in text
    assert "loss keeps" in text and "dots_saveable" in text
    assert '<a href="#f0-8">model.py:8</a>' in text
    assert "<b>grad</b>" in text and "<b>dce</b>" in text


def test_what_is_no_loss_has_no_residuals_and_symbolic_sizes_no_memory(cli, folder):
    assert cli("report", "model.py:sin", "--args", "f32[n]", "-o", "sin.html").code == 0
    text = (folder / "sin.html").read_text()
    assert "its result is not one floating-point number, and it has no gradient inside" in text
    args = "--args", "{'w': f32[n,n]}, f32[8,n]"
    assert cli("report", "model.py:step", *args, "-o", "report.html").code == 0
    text = (folder / "report.html").read_text()
    assert "step hands its backward part" in text
    assert "the memory of step needs sizes that are numbers" in text
    assert "32*n^2" in text or "n^2" in text  # cost has polynomials


def said(page):
    """What a page says in its facts and cells, one after the other."""
    found = re.findall(r"<(?:p class=.facts.|td[^>]*)>(.*?)</(?:p|td)>", page.read_text(), re.S)
    return [unescape(re.sub(r" ?<code>.*?</code>|<[^>]+>", "", text)) for text in found]


def told(printed):
    """The cells and lines of what a terminal shows, but for headings, code and curves."""
    for line, below in pairwise([*printed.splitlines(), ""]):
        is_heading = below.startswith("─")
        if line and not is_heading and not re.search("[─│┤┬]|jax|^ +peak|equations in", line):
            yield from re.split("   +", line.strip())


@pytest.mark.parametrize("command", ["cost", "memory", "residuals"])
def test_the_page_says_what_the_terminal_does(cli, terminal, folder, command):
    args = "--args", "f32[4,16,16], f32[8,16], bool[]"
    assert cli("report", "model.py:layers", *args, "-o", "report.html").code == 0
    on_page = " | ".join(said(folder / "report.html"))
    printed = list(told(terminal(command, "model.py:layers", *args, columns=200)))
    assert len(printed) > 10 and [cell for cell in printed if cell not in on_page] == []


def test_a_program_of_no_bytes_has_no_list_of_them(cli, folder):
    assert cli("report", "model.py:sin", "--args", "f32[0]", "-o", "report.html").code == 0
    assert "sin: 0 bytes" in said(folder / "report.html")
    assert cli("memory", "model.py:sin", "--args", "f32[0]").out.startswith("sin: 0 bytes\n\nshare")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "error: report writes an HTML page, but -o is missing"),
        (("-o", "report.jaxpr"), "error: report writes .html files"),
        (("-o", "no/such/report.html"), "error: "),
    ],
)
def test_mistakes_are_one_line(cli, folder, options, message):
    done = cli("report", "model.py:loss", *options)
    assert done.code == 2 and done.out == "" and done.err.startswith(message)
    assert not list(folder.glob("*.html"))


def test_measured_times_are_in_the_table_of_lines(cli, folder):
    args = "--args", "f32[4,64,64], f32[8,64], bool[]"
    assert cli("report", "model.py:layers", *args, "--measure", "-o", "r.html").code == 0
    page = (folder / "r.html").read_text()
    by_line = page.partition("<caption>by line</caption>")[2].partition("</table>")[0]
    assert page.count(">measured<") == by_line.count(">measured<") == 1
    first = re.findall(r"<td[^>]*>(.*?)</td>", by_line, re.S)
    assert "s" in first[0] and first[1].endswith("%") and "model.py:" in first[7]
    # The loop has a time, and no cost of its own.
    assert "model.py:15" in by_line and "% explained" in page
    found = cli("report", "model.py:loss", "--device", "0", "-o", "r.html")
    assert found.code == 2 and "--device needs --measure, which runs the program" in found.err
