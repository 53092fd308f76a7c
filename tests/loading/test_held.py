"""Leaves that are not arrays are held: the function and the caller receive them unchanged."""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import UserFunctionError

X = np.arange(4.0, dtype=np.float32)


class Mode(Enum):
    SUM = 1
    MEAN = 2


@partial(jax.tree_util.register_dataclass, data_fields=["w", "act", "kind", "rate"], meta_fields=[])
@dataclass
class Layer:
    """A class like an Equinox module, whose functions and strings are leaves."""

    w: Any
    act: Any
    kind: Any = "dense"
    rate: Any = 0.5

    def __call__(self, x):
        assert self.kind in ("dense", Mode.SUM)
        return self.act(self.w * x) * self.rate


class Filtered:
    """A callable like the result of `equinox.filter_jit`: traces only arrays, is immutable."""

    __slots__ = ("fun",)
    __module__ = "equinox._like"

    def __init__(self, fun):
        self.fun = fun

    @property
    def __wrapped__(self):
        return self.fun

    def __call__(self, *args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        assert not any(isinstance(x, jax.core.Tracer) for x in leaves if np.shape(x) == ())
        return self.fun(*args, **kwargs)


def step(layer, x):
    assert layer.kind
    return Layer(layer.w - layer(x), layer.act, layer.kind, layer.rate), layer(x).sum()


layer = Layer(X, jnp.tanh)


@pytest.fixture
def read(tmp_path):
    def again(program):
        jaxprtool.write(program, tmp_path / "program.jaxpr")
        return jaxprtool.read(tmp_path / "program.jaxpr")

    return again


def test_a_function_in_an_argument_is_held_and_a_scalar_is_traced():
    program = jaxprtool.trace(step, layer, X)
    assert program.arg_names == ("layer.w", "layer.rate", "x")
    assert program.out_names == ("result[0].w", "result[0].rate", "result[1]")
    (after, loss), (expected, total) = program(layer, X), step(layer, X)
    assert after.act is jnp.tanh and after.kind == "dense"
    np.testing.assert_allclose(after.w, expected.w, rtol=1e-6)
    np.testing.assert_allclose(loss, total, rtol=1e-6)
    program(after, X)


def test_filtered_functions_have_their_scalars_held_too():
    program = jaxprtool.trace(Filtered(step), layer, X)
    assert program.arg_names == ("layer.w", "x") and program.name == "step"
    after, _ = program(layer, X)
    assert type(after.rate) is float
    with pytest.raises(TypeError, match=r"layer.rate is not an array, .* must be 0.5, not 0.25$"):
        program(Layer(X, jnp.tanh, rate=0.25), X)
    bound = jaxprtool.trace(partial(Filtered(step), layer), X)
    np.testing.assert_allclose(bound(X)[1], step(layer, X)[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": jnp.sin}, "layer.act is not an array, .* must be .*tanh.*, not .*sin"),
        ({"kind": "other"}, "layer.kind is not an array, .* must be 'dense', not 'other'$"),
        ({"kind": X}, r"layer.kind is not an array, .* must be 'dense', not array\(\[0., 1., 2."),
        ({"w": "text"}, "layer.w must be an array, not 'text'$"),
    ],
)
def test_a_leaf_other_than_the_traced_one_is_reported_by_its_path(change, message, read):
    given = Layer(**{**vars(layer), **change})
    program = jaxprtool.trace(step, layer, X)
    for each in program, read(program):
        with pytest.raises(TypeError, match=message):
            each(given, X)


@pytest.mark.parametrize("kind", ["dense", Mode.SUM])
def test_a_file_keeps_literals_and_identifies_objects_by_repr(kind, read):
    given = Layer(X, jnp.tanh, kind)
    program = jaxprtool.trace(step, given, X)
    again = read(program)
    assert jaxprtool.equivalent(program, again)
    after, loss = again(given, X)
    assert after.act is jnp.tanh and after.kind == kind
    np.testing.assert_array_equal(loss, program(given, X)[1])
    np.testing.assert_array_equal(again({"w": X, "rate": 0.5}, X)[1], loss)
    assert jaxprtool.equivalent(read(again), again)


def test_whole_arguments_and_results_may_be_anything():
    program = jaxprtool.trace(lambda x, mode: {"y": x + mode.value, "mode": mode}, X, Mode.MEAN)
    assert program(X, Mode.MEAN)["mode"] is Mode.MEAN
    with pytest.raises(
        TypeError, match=r"args\[1\] is not an array, .* must be <Mode.MEAN: 2>, not <Mode.SUM: 1>$"
    ):
        program(X, Mode.SUM)


def test_passes_keep_held_leaves(read):
    program = jaxprtool.trace(step, layer, X)
    for pipeline in "dce(drop_inputs=True), -O1", "inline, cse", "batch((None, 0), axis_size=3)":
        x = np.stack([X] * 3) if "batch" in pipeline else X
        assert program.apply(pipeline)(layer, x)[0].act is jnp.tanh
    gradient = jaxprtool.trace(lambda layer, x: layer(x).sum(), layer, X).apply("grad")
    assert gradient(layer, X).act is jnp.tanh
    jaxprtool.verify(program, program.apply("-O1"), (layer, X))
    forward, _ = jaxprtool.trace(lambda layer, x: layer(x), layer, X).apply("vjp").values()
    forward(layer, X)


def test_jit_takes_what_equinox_jits():
    count = []

    def counted(layer, x):
        count.append(1)
        return step(layer, x)

    jitted = jaxprtool.jit(Filtered(counted))
    after, _ = jitted(layer, X)
    after, loss = jitted(after, X)
    assert after.act is jnp.tanh and type(after.rate) is float and len(count) == 1
    np.testing.assert_allclose(loss, step(step(layer, X)[0], X)[1], rtol=1e-6)
    jitted(Layer(X, jnp.sin), X)
    assert len(count) == 2
    assert "tanh" in jitted.lower(layer, X).as_text()


def test_a_target_may_be_filtered_and_refer_to_a_module(tmp_path, monkeypatch):
    (tmp_path / "held_target.py").write_text(
        "import jaxprtool\n"
        "from tests.loading.test_held import Filtered, layer, step\n"
        'train = jaxprtool.example("ref(\'layer\')", "f32[4]")(Filtered(lambda m, x: step(m, x)))\n'
        'typed = jaxprtool.example(type(layer)("f32[4]", abs), "f32[4]")(lambda m, x: step(m, x))\n'
    )
    monkeypatch.chdir(tmp_path)
    for target, args in (
        ("held_target.py:train", None),
        ("held_target.py:train", "ref('layer'), f32[4]"),
        ("held_target.py:typed", None),
    ):
        program = jaxprtool.load(target, args)
        assert program.arg_names[0] == "m.w" and program.in_avals[0].shape == (4,)


def test_static_may_be_used_in_an_argument():
    program = jaxprtool.load(
        "tests/loading/test_held.py:apply_named", "{'w': f32[4], 'act': static('tanh')}"
    )
    np.testing.assert_array_equal(program({"w": X, "act": "tanh"}), jnp.tanh(X))
    assert program.arg_names == ("p['w']",)


def apply_named(p):
    return getattr(jnp, p["act"])(p["w"])


def test_an_object_that_the_function_cannot_use_is_its_own_error():
    with pytest.raises(UserFunctionError, match="raised TypeError"):
        jaxprtool.trace(jnp.sin, "text")
