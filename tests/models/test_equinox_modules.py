"""Equinox modules as arguments: leaves that are not arrays are held, as by `filter_jit`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import jaxprtool

pytestmark = pytest.mark.models
eqx = pytest.importorskip("equinox")

X = np.arange(4.0, dtype=np.float32)


class Net(eqx.Module):
    """A module with a Python `depth` and `scale`, and the flag of its dropout."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    depth: int
    scale: float
    act: Any

    def __init__(self, depth=2):
        self.linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.1, inference=True)
        self.depth, self.scale, self.act = depth, 2.0, jax.nn.relu

    def __call__(self, x):
        for _ in range(self.depth):
            x = self.act(self.linear(x))
        return self.dropout(x * self.scale if self.scale > 1 else x)


def loss(model, x, rate=0.5):
    return (model(x) ** 2).mean() * rate


@partial(jax.tree_util.register_dataclass, data_fields=["model", "step"], meta_fields=[])
@dataclass
class State:
    model: Any
    step: int


NET = Net()
ARRAYS = (".linear.weight", ".linear.bias")


def test_scalars_of_a_module_are_held_without_filter_jit():
    program = jaxprtool.trace(loss, NET, X)
    assert program.arg_names == ("model.linear.weight", "model.linear.bias", "x")
    assert program(NET, X) == pytest.approx(loss(NET, X))
    again = program(Net(), X)
    assert again == pytest.approx(loss(NET, X))
    with pytest.raises(TypeError, match=r"model\.depth is not an array, .* must be 2, not 3"):
        program(Net(depth=3), X)


def test_a_scalar_outside_of_a_module_is_traced_and_weakly_typed():
    program = jaxprtool.trace(loss, NET, X, 0.5)
    assert program.arg_names[-1] == "rate" and program.in_avals[-1].weak_type
    assert program(NET, X, 0.25) == pytest.approx(loss(NET, X, 0.25))


@pytest.mark.parametrize(
    "tree, place",
    [({"net": NET}, "['net']"), ([NET], "[0]"), (State(NET, 3), ".model")],
    ids=["dict", "list", "dataclass"],
)
def test_modules_in_other_nodes_hold_their_scalars_and_the_nodes_do_not(tree, place):
    def first_loss(tree, x):
        nets = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Net))
        return loss(nets[0], x) + sum(nets[1:])

    program = jaxprtool.trace(first_loss, tree, X)
    others = ("tree.step",) if isinstance(tree, State) else ()
    assert program.arg_names == (*(f"tree{place}{name}" for name in ARRAYS), *others, "x")
    assert program(tree, X) == pytest.approx(first_loss(tree, X))


def test_a_step_with_filter_value_and_grad_returns_the_module(tmp_path):
    def step(model, x):
        value, gradient = eqx.filter_value_and_grad(loss)(model, x)
        return eqx.apply_updates(model, gradient), value

    program = jaxprtool.trace(step, NET, X)
    assert program.out_names == (*(f"result[0]{name}" for name in ARRAYS), "result[1]")
    (after, value), (expected, known) = program(NET, X), step(NET, X)
    assert type(after.depth) is int and after.act is jax.nn.relu
    np.testing.assert_allclose(after.linear.weight, expected.linear.weight, rtol=1e-6)
    assert value == pytest.approx(known)
    jaxprtool.write(program, tmp_path / "step.jaxpr")
    assert jaxprtool.read(tmp_path / "step.jaxpr")(NET, X)[1] == pytest.approx(known)


def test_held_leaves_of_a_module_have_no_gradient():
    gradient = jaxprtool.trace(loss, NET, X).apply("grad")(NET, X)
    expected = eqx.filter_grad(loss)(NET, X)
    np.testing.assert_allclose(gradient.linear.bias, expected.linear.bias, rtol=1e-6)
    assert gradient.depth == 2


def test_a_held_number_may_be_too_large_for_an_array():
    assert jaxprtool.trace(lambda model, x: x * 2, Net(depth=2**70), X)(Net(depth=2**70), X)[1] == 2


def test_a_function_under_jax_jit_traces_the_scalars_of_a_module_as_in_jax():
    fun = jax.jit(lambda model, x: x * model.p)
    assert jaxprtool.trace(fun, eqx.nn.Dropout(0.5), X).arg_names[0] == "model.p"
