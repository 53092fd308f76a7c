"""roll(stack="arguments") takes stacked parameters, and returns functions to stack and unstack."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.passes.loops.roll import Roll
from tests.programs import interpreter

x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
stacked = Roll(stack="arguments")


def layer(h, p):
    return jnp.tanh(h @ p["w"] + p["b"]) * 0.5 + jnp.sin(h)


def parameters(count=5):
    layers = {
        f"layer_{i}": {"w": jax.random.normal(jax.random.key(i), (4, 4)), "b": jnp.full(4, i / 9)}
        for i in range(count)
    }
    return {"head": jnp.ones((4, 2)), **layers}


def loss(params, h):
    for i in range(len(params) - 1):
        h = layer(h, params[f"layer_{i}"])
    return ((h @ params["head"]) ** 2).sum()


def same_bits(a, b):
    """Return True if two trees have the same structure and the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def evaluated(program, *args):
    """Return the results of a program, computed one equation at a time."""
    flat = interpreter.evaluate(program.jaxpr, jax.tree.leaves(args))
    return jax.tree.unflatten(program.out_tree, flat)


def primitives(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


@pytest.mark.proof
def test_stacked_arrays_replace_the_first_of_a_dict_of_layers():
    params = parameters()
    program = jaxprtool.trace(loss, params, x)
    parts = stacked(program)
    assert list(parts) == ["rolled", "stack", "unstack"]
    assert "stack" not in primitives(parts["rolled"])
    new = parts["stack"](params)
    assert new["layer_0"]["w"].shape == (5, 4, 4)
    assert new["layer_1"] == {"w": None, "b": None}
    assert new["head"] is not None
    same_bits(parts["unstack"](new), params)
    same_bits(evaluated(parts["rolled"], new, x), evaluated(program, params, x))
    assert parts["rolled"].arg_names == (
        "params['head']",
        "params['layer_0']['b']",
        "params['layer_0']['w']",
        "h",
    )


@pytest.mark.proof
def test_gradients_have_the_tree_of_the_stacked_parameters():
    params = parameters()
    program = jaxprtool.trace(jax.value_and_grad(loss), params, x)
    parts = stacked(program)
    value, grads = evaluated(parts["rolled"], parts["stack"](params), x)
    assert jax.tree.structure(grads) == jax.tree.structure(parts["stack"](params))
    same_bits((value, parts["unstack"](grads)), evaluated(program, params, x))
    assert "unstack" not in primitives(parts["rolled"])


def step(params, state, h, rate=0.1):
    """A training step with Adam's two moments, in trees like the parameters."""
    value, grads = jax.value_and_grad(loss)(params, h)
    mean, square = state
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, grads)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (1e-3 + s**0.5), params, mean, square)
    return params, (mean, square), value


def test_the_state_of_a_training_step_stays_stacked_between_steps():
    params = parameters()
    state = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    program = jaxprtool.trace(step, params, state, x)
    parts = stacked(program)
    assert not {"stack", "unstack", "concatenate"} & set(primitives(parts["rolled"]))
    given = parts["stack"](params, state)
    plain = params, state
    for _ in range(2):
        *given, value = evaluated(parts["rolled"], *given, x)
        *plain, expected = evaluated(program, *plain, x)
        assert value == expected
    same_bits(parts["unstack"](*given), tuple(plain))


@partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclass
class Linear:
    w: jax.Array
    b: jax.Array
    name: str


def test_a_list_of_modules_keeps_its_classes_and_static_fields():
    def run(layers, h):
        for each in layers:
            h = layer(h, {"w": each.w, "b": each.b})
        return h

    layers = [Linear(**p, name="l") for n, p in parameters().items() if n != "head"]
    program = jaxprtool.trace(run, layers, x)
    parts = stacked(program)
    new = parts["stack"](layers)
    assert isinstance(new[0], Linear) and new[0].w.shape == (5, 4, 4)
    assert new[1] == Linear(None, None, "l")
    same_bits(parts["unstack"](new), layers)
    same_bits(evaluated(parts["rolled"], new, x), evaluated(program, layers, x))


@pytest.mark.proof
def test_separate_arguments_become_one_and_keywords_stay_keywords():
    def run(a, b, c, h, *, scales):
        for w, s in zip((a, b, c), scales, strict=True):
            h = layer(h, {"w": w, "b": s})
        return h

    ws, scales = [x.T @ x * i for i in range(3)], [jnp.full(4, i / 3) for i in range(3)]
    program = jaxprtool.trace(run, *ws, x, scales=scales)
    parts = stacked(program)
    args, kwargs = parts["stack"](*ws, scales=scales)
    assert args[0].shape == (3, 4, 4) and kwargs["scales"][0].shape == (3, 4)
    assert parts["rolled"].arg_names[:2] == ("a", "h")
    np.testing.assert_allclose(parts["rolled"](*args, x, **kwargs), program(*ws, x, scales=scales))
    args, kwargs = parts["unstack"](*args, **kwargs)
    same_bits((args, kwargs), (tuple(ws), {"scales": scales}))


def test_stack_and_unstack_can_be_written_to_files(tmp_path):
    params = parameters()
    parts = stacked(jaxprtool.trace(loss, params, x))
    for name, part in parts.items():
        jaxprtool.write(part, tmp_path / f"{name}.jaxpr")
    stack, unstack = (jaxprtool.read(tmp_path / f"{n}.jaxpr") for n in ("stack", "unstack"))
    same_bits(unstack(stack(params)), params)


def test_donated_arguments_are_donated_in_stacked_form():
    params = parameters()
    program = jaxprtool.trace(jax.jit(loss, donate_argnums=0), params, x)
    rolled = stacked(program)["rolled"]
    settings = rolled.jit.of_arguments(rolled.arguments)
    assert [value.donated for value in settings] == [True, True, True, False]


def test_an_argument_that_is_used_outside_the_loop_is_refused_with_its_name_and_line():
    def run(params, h):
        return loss(params, h) + params["layer_2"]["w"].sum()

    where = r"params\['layer_2'\]\['w'\].*reduce_sum at .*\.py:"
    with pytest.raises(UnsupportedError, match=where):
        jaxprtool.trace(run, parameters(), x).apply("roll(stack='arguments')")

    def result(params, h):
        return loss(params, h), params["layer_3"]

    with pytest.raises(UnsupportedError, match=r"params\['layer_3'\].*a result"):
        jaxprtool.trace(result, parameters(), x).apply("roll(stack='arguments')")


def test_a_sharding_of_an_argument_is_refused():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(UnsupportedError, match="sharding"):
        stacked(jaxprtool.trace(jax.jit(loss, in_shardings=(place, None)), parameters(), x))


def test_different_literals_and_duplicate_arguments_are_stacked_inside():
    def run(ws, h):
        for w, rate in zip((*ws, ws[0]), (0.1, 0.2, 0.4, 0.8, 0.9), strict=True):
            h = jnp.tanh(h @ w) * rate + jnp.sin(h)
        return h

    ws = [x.T @ x * i for i in range(4)]
    program = jaxprtool.trace(run, ws, x)
    assert isinstance(stacked(program), jaxprtool.Program)
    same_bits(evaluated(stacked(program), ws, x), evaluated(program, ws, x))


def test_without_arguments_to_stack_there_is_one_program():
    def run(xs, h):
        for i in range(5):
            h = jnp.sin(h) * xs[i] + jnp.cos(h)
        return h

    program = jaxprtool.trace(run, jnp.ones((5, 4)), x)
    assert isinstance(stacked(program), jaxprtool.Program)
    program = jaxprtool.trace(jnp.sin, x)
    assert stacked(program) is program
