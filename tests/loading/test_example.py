"""Examples can be attached to anything with attributes, without importing JAX."""

import functools
import subprocess
import sys

import pytest

from jaxprtool import example, static
from jaxprtool.errors import ArgumentsError
from jaxprtool.loading import Example, Static


def test_the_example_is_attached_and_the_function_is_the_same_object():
    def f(x, y):
        return x

    assert example("f32[3]", y=static([1]))(f) is f
    assert f.example_args == Example(("f32[3]",), {"y": Static([1])})


class Model:
    def __call__(self, x):
        return x


@pytest.mark.parametrize("fun", [functools.partial(max, 1), Model(), Model, Model.__call__])
def test_callables_with_attributes_are_accepted(fun):
    assert example(1)(fun).example_args.args == (1,)


@pytest.mark.parametrize("fun", [len, Model().__call__])
def test_callables_without_attributes_are_refused(fun):
    with pytest.raises(ArgumentsError, match="cannot be attached to an object of type"):
        example(1)(fun)


def test_attaching_an_example_does_not_import_jax():
    code = """if 1:
        import sys, jaxprtool
        @jaxprtool.example("f32[3]", jaxprtool.static(1))
        def f(x, n): pass
        import jaxprtool.ir.notation.expressions
        assert "jax" not in sys.modules and "numpy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
