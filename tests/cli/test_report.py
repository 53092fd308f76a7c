"""`jaxprtool report` writes one page of listing, cost, memory and residuals."""

import textwrap

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
    assert "alive at the peak of loss" in text and "<svg" in text
    assert "loss keeps" in text and "dots_saveable" in text
    assert '<a href="#f0-8">model.py:8</a>' in text
    assert "<b>grad</b>" in text and "<b>dce</b>" in text


def test_what_is_no_loss_has_no_residuals_and_symbolic_sizes_no_memory(cli, folder):
    args = "--args", "{'w': f32[n,n]}, f32[8,n]"
    assert cli("report", "model.py:step", *args, "-o", "report.html").code == 0
    text = (folder / "report.html").read_text()
    assert "its result is not one floating-point number" in text
    assert "the memory of step needs sizes that are numbers" in text
    assert "32*n^2" in text or "n^2" in text  # cost has polynomials


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "error: report writes a page, and -o does not say where"),
        (("-o", "report.jaxpr"), "error: report writes .html files"),
        (("-o", "no/such/report.html"), "error: "),
    ],
)
def test_mistakes_are_one_line(cli, folder, options, message):
    done = cli("report", "model.py:loss", *options)
    assert done.code == 2 and done.out == "" and done.err.startswith(message)
    assert not list(folder.glob("*.html"))
