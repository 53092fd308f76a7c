import re

import jax.numpy as jnp
import pytest
import rich.jupyter
from IPython.lib.pretty import pretty

import jaxprtool
from jaxprtool.ir.documents import Printed
from jaxprtool.registry import renderers


@pytest.fixture(scope="module")
def program():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    return jaxprtool.trace(loss, *INPUTS)


INPUTS = jnp.ones((8, 8)), jnp.ones((4, 8))
RESULTS = {
    "cost": (jaxprtool.cost, "575 FLOP, 644 bytes"),
    "memory": (jaxprtool.memory, "516 bytes, peak at "),
    "residuals": (jaxprtool.residuals, "loss keeps "),
    "lint": (jaxprtool.lint, "nothing found in loss"),
    "source": (jaxprtool.source, "loss: 575 FLOP, 644 bytes, keeps "),
    "why": (
        lambda program: jaxprtool.why(program, "w"),
        "w affects all 4 equations and the result",
    ),
    "diff": (lambda program: jaxprtool.diff(program, program), "loss: equivalent"),
    "nans": (lambda program: jaxprtool.find_nan(program, INPUTS), "loss: no equation makes a NaN"),
    "watch": (lambda program: jaxprtool.watch(program, INPUTS), "loss: values by line"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_like_its_command_and_is_a_table_in_a_notebook(program, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    function, message = RESULTS[name]
    found = function(program)
    text, page = str(found), found._repr_html_()
    assert message in text and max(map(len, text.splitlines())) <= 80
    assert page.startswith("<pre") and message.split("(")[0] in page


@pytest.mark.parametrize("name", ["cost", "lint", "watch"])
def test_the_prompt_of_ipython_shows_the_table_and_no_dataclass(program, name):
    result = RESULTS[name][0](program)
    assert pretty(result) == str(result)


def test_a_notebook_shows_a_result_once(program, monkeypatch):
    displayed = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *output: displayed.append(output))
    cost = jaxprtool.cost(program)
    in_kernel = str(cost), cost._repr_html_(), program._repr_html_(), str(program), repr(program)
    assert not displayed
    monkeypatch.undo()
    assert str(cost) == in_kernel[0]


def test_a_table_in_a_notebook_has_a_fixed_font_and_keeps_its_columns(program):
    for page in (jaxprtool.cost(program)._repr_html_(), program._repr_html_()):
        assert re.search("font(-family)?:[^;}]*monospace", page)
        assert re.search("white-space: (pre|nowrap)", page)


def test_a_braille_plot_has_the_columns_of_the_text_around_it(program):
    page = jaxprtool.memory(program)._repr_html_()
    boxes = re.findall('<i style="display: inline-block; width: 1ch; [^>]*">([⠀-⣿])</i>', page)
    assert len(boxes) == len(re.findall("[⠀-⣿]", page)) > 100


def test_every_printed_type_has_a_renderer():
    for name in jaxprtool.__all__:
        getattr(jaxprtool, name)
    types = {f"{kind.__module__}:{kind.__qualname__}" for kind in Printed.__subclasses__()}
    assert {name for name in types if name.startswith("jaxprtool.")} <= renderers().keys()
