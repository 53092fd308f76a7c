"""The overview of a program that a terminal shows first."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.show.summary import overview
from jaxprtool.commands.show.table import overview_page


def deep(params, x):
    for w in params:
        x = jax.nn.silu(x @ w)
    return x.sum()


def page(program, width=80, height=30):
    return overview_page(program, overview(program), width, height).plain().splitlines()


@pytest.fixture(scope="module")
def program():
    return jaxprtool.trace(jax.grad(deep), [jnp.ones((3, 3))] * 30, jnp.ones((2, 3)))


@pytest.mark.parametrize(("width", "height"), [(80, 21), (80, 24), (80, 60), (160, 40), (40, 30)])
def test_a_page_fits_the_terminal(program, width, height):
    lines = page(program, width, height)
    assert max(map(len, lines)) <= width
    assert width < 80 or len(lines) <= height


def test_a_page_has_arguments_results_and_equations(program):
    lines = page(program)
    assert lines[0].startswith("deep: ") and "31 arguments" in lines[0]
    text = "\n".join(lines)
    for fact in ("params  ", "30 arrays", "f32[2,3]", "dot_general 89", "silu"):
        assert fact in text, fact
    assert re.fullmatch("… --full or --pager shows all [0-9]{3} equations", lines[-1])


def test_a_page_shows_the_source_lines_of_equations(program):
    assert any("equations  x = jax.nn.silu(x @ w)" in line for line in page(program, 120))


def test_bytes_that_depend_on_a_symbol_are_left_out():
    n, d = jax.export.symbolic_shape("n, d")
    weights = [jax.ShapeDtypeStruct((d, d), jnp.float32)] * 30
    symbolic = jaxprtool.trace(deep, weights, jax.ShapeDtypeStruct((n, d), jnp.float32))
    text = "\n".join(page(symbolic))
    assert "31 arguments; 1 result, 4 bytes" in text and "30 arrays\n" in text, text


def test_long_rows_of_variables_are_truncated_and_counted(program):
    assert any("{ lambda ;" in line and "… " in line for line in page(program, 80, 60))


def test_a_program_that_fits_is_shown_whole():
    lines = page(jaxprtool.trace(lambda x: jnp.sin(x) * 2, 1.0))
    assert lines[-1].endswith("in (b,) }")
    assert not any("--full" in line for line in lines)


def test_repr_of_a_program_is_one_line(program):
    assert repr(jaxprtool.trace(deep, [jnp.ones((3, 3))] * 2, jnp.ones((2, 3)))) == (
        "Program deep(params: 2 arrays of 72 bytes, x: f32[2,3]) -> f32[], 9 equations"
    )
    assert repr(jaxprtool.trace(lambda: ())) == "Program lambda() -> (), 0 equations"
    assert repr(program).endswith("-> 30 arrays of 1.1 KiB, 421 equations")
    many = jaxprtool.trace(lambda a, b, c, d, e, f, g: (a, b), *range(7))
    assert repr(many).startswith("Program lambda(a: i32[], ") and "… 2 more) -> " in repr(many)
