from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError

ONES = jnp.ones(3)


def test_show_prints_the_program_of_a_function(capsys):
    assert jaxprtool.show(jnp.sin, ONES) is None
    program = jaxprtool.trace(jnp.sin, ONES)
    assert capsys.readouterr().out == f"{program}\n"
    jaxprtool.show(program)
    assert capsys.readouterr().out == f"{program}\n"


def test_show_of_a_program_takes_no_arguments():
    program = jaxprtool.trace(jnp.sin, ONES)
    with pytest.raises(ArgumentsError, match="a Program has its arguments"):
        jaxprtool.show(program, ONES)


def test_show_of_a_target_names_the_function_to_load_it():
    with pytest.raises(ArgumentsError, match="not the text of a TARGET"):
        jaxprtool.show("jax.numpy:sin", "f32[3]")


@pytest.mark.parametrize("args", [(), (ONES,), (ONES, ONES)])
def test_load_of_a_function_names_trace(args):
    with pytest.raises(ArgumentsError) as raised:
        jaxprtool.load(jnp.sin, *args)
    assert "load takes the text of a TARGET, not a function" in str(raised.value)
    assert "jaxprtool.trace(sin, *args)" in raised.value.hint


def test_load_takes_a_path(tmp_path):
    program = jaxprtool.trace(jnp.sin, ONES)
    jaxprtool.write(program, tmp_path / "sin.jaxpr")
    assert jaxprtool.equivalent(jaxprtool.load(Path(tmp_path / "sin.jaxpr")), program)


@pytest.mark.parametrize("args", [3, ONES, (ONES,)])
def test_arguments_of_load_are_text(args):
    with pytest.raises(ArgumentsError, match="load takes arguments as text"):
        jaxprtool.load("jax.numpy:sin", args)


@pytest.mark.parametrize(
    "name",
    [
        *("bench", "compare", "compiled_memory", "cost", "determinism", "find_nan", "lint"),
        *("memory", "precision", "profile", "residuals", "shardings", "source", "to_python"),
        *("watch", "diff", "flow_path", "reduce", "verify", "why", "why_gradient", "write"),
    ],
)
def test_a_function_in_place_of_a_program_is_an_error(name, tmp_path):
    others = {
        "diff": (jnp.sin,),
        "verify": (jnp.sin,),
        "reduce": (bool,),
        "find_nan": ((),),
        "watch": ((),),
        "flow_path": ("x", "y"),
        "write": (tmp_path / "sin.jaxpr",),
    }
    more = others.get(name, ("x",) if name.startswith("why") else ())
    with pytest.raises(ArgumentsError, match="sin is not a Program") as error:
        getattr(jaxprtool, name)(jnp.sin, *more)
    assert error.value.hint == "create one with jaxprtool.trace(function, *arguments)"
