"""A program from a file can be called with the containers of the original."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.ir.trees import Opaque

X = np.arange(3.0, dtype=np.float32)


class Moments(NamedTuple):
    """A dataclass whose fields are not in alphabetical order."""

    nu: Any
    mu: Any


@partial(jax.tree_util.register_dataclass, data_fields=["params", "moments"], meta_fields=["rate"])
@dataclass
class State:
    params: Any
    moments: Any
    rate: float


@jax.tree_util.register_pytree_node_class
class Unkeyable:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children)


def step(state, x):
    mu = {k: v * 0.5 + x for k, v in state.moments.mu.items()}
    params = {k: v - state.rate * mu[k] for k, v in state.params.items()}
    return State(params, Moments(state.moments.nu + 1, mu), state.rate), {"loss": x.sum()}


def state(rate=0.5, names=("w", "b")):
    params = {name: X + i for i, name in enumerate(names)}
    return State(params, Moments(jnp.zeros(()), params), rate)


@pytest.fixture
def read(tmp_path):
    def again(program):
        jaxprtool.write(program, tmp_path / "program.jaxpr")
        return jaxprtool.read(tmp_path / "program.jaxpr")

    return again


def test_a_program_from_a_file_takes_and_returns_nodes_of_the_users_classes(read):
    program = read(jaxprtool.trace(step, state(), X))
    assert isinstance(jax.tree.unflatten(program.in_tree, range(6))[0][0], Opaque)
    expected, given = step(state(), X), program(state(), X)
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, given, expected)
    again, _ = jax.jit(program)(given[0], X)
    assert type(again) is State and type(again.moments) is Moments


def test_its_paths_are_those_of_the_original(read):
    program = jaxprtool.trace(step, state(), X)
    again = read(program)
    assert again.arg_names == program.arg_names and again.out_names == program.out_names
    total = jaxprtool.trace(lambda s, x: (step(s, x)[0].params["w"].sum(), s.moments), state(), X)
    before, after = (p.apply("grad(has_aux=True)") for p in (total, read(total)))
    assert before.out_names == after.out_names
    assert "result[1].mu['b']" in after.out_names and "result[0].params['w']" in after.out_names


def test_any_container_with_the_same_children_matches_by_name_or_else_in_order(read):
    program = read(jaxprtool.trace(step, state(), X))
    expected = program(state(), X)[1]["loss"]
    params = state().params
    moments = {"mu": params, "nu": 0.0}
    by_name, _ = program({"moments": moments, "params": params}, X)
    in_order, loss = program((params, (0.0, params)), X)
    assert loss["loss"] == expected
    for given in (by_name, in_order):
        assert isinstance(given, Opaque)
        leaves = zip(jax.tree.leaves(given), jax.tree.leaves(step(state(), X)[0]), strict=True)
        assert all(np.array_equal(*pair) for pair in leaves)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            state(rate=0.25),
            r"state, of class .*State, must have the auxiliary data .*0.5.*, not .*0.2",
        ),
        (state(names=("w", "c")), r"state.params\['b'\] is missing$"),
        (
            {"params": {}, "moment": ()},
            r"state.params\['b'\] is missing$|state.moments is missing$",
        ),
        (({}, {}, {}), "state must have 2 entries, not 3$"),
        (X, "state must be a State, not an array$"),
        (None, "state must be a State, not None$"),
        (len, "state must be a State, not <built-in function len>$"),
        (State(state().params, (0.0, 1.0), 0.5), r"state.moments.mu must be a dict, not an array"),
        (State(state().params, state(), 0.5), r"state.moments.nu is missing$"),
    ],
)
def test_a_mismatch_is_reported_by_its_path_on_one_line(read, argument, message):
    program = read(jaxprtool.trace(step, state(), X))
    with pytest.raises(TypeError, match=message) as caught:
        program(argument, X)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_in_the_process_of_its_trace_a_program_is_as_strict_as_jax(read):
    program = jaxprtool.trace(step, state(), X)
    with pytest.raises(TypeError, match="state must be a State, not a tuple"):
        program((state().params, state().moments), X)
    stand_in = read(program)((state().params, (0.0, state().params)), X)[0]
    np.testing.assert_array_equal(program(stand_in, X)[1]["loss"], X.sum())


def test_a_result_with_other_static_data_has_its_class_if_the_data_are_literals(read):
    program = read(
        jaxprtool.trace(lambda s: [State(s.params, None, r) for r in (2.5, len)], state())
    )
    doubled, other = program(state())
    assert type(doubled) is State and doubled.rate == 2.5
    assert isinstance(other, Opaque) and other.aux == "(<built-in function len>,)"


def test_nodes_without_keys_are_matched_in_order(read):
    program = read(jaxprtool.trace(lambda k: k.children[0] - k.children[1], Unkeyable(3.0, 1.0)))
    assert program(Unkeyable(3.0, 1.0)) == program((3.0, 1.0)) == 2
    with pytest.raises(TypeError, match="k must have 2 entries, not 1"):
        program(Unkeyable(3.0))


def test_an_entry_without_leaves_may_be_omitted(read):
    program = read(jaxprtool.trace(lambda s: s.params, State(X, None, 0.5)))
    np.testing.assert_array_equal(program({"params": X}), X)


def test_verify_and_closed_take_the_users_classes(read):
    program = read(jaxprtool.trace(step, state(), X))
    jaxprtool.verify(program, program.apply("-O1"), (state(), X))
    from jaxprtool.passes.transforms.calls import Closed

    bound = Closed({"state": state()})(program)
    np.testing.assert_array_equal(bound(X)[1]["loss"], X.sum())
