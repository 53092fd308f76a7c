"""Hints for wrong targets, arguments and values, with the text to type."""

import jax.numpy as jnp
import pytest

from jaxprtool.api.targets import find_entry
from jaxprtool.errors import ArgumentsError, TargetError, UserFunctionError
from jaxprtool.loading import load
from jaxprtool.loading.argspec import read_args
from jaxprtool.loading.load import find_function
from jaxprtool.loading.trace import trace

MODEL = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np

SIZE = 3
settings = {"width": 3}

class Net:
    def __init__(self, width=3): self.width = width
    def __call__(self, x): return x * self.width

class Layer:
    def __init__(self, width): self.width = width + 1

class HandsOn(type):
    def __call__(cls, *args, **kwargs): return super().__call__(*args, **kwargs)

class Module(metaclass=HandsOn):
    def __init__(self, n, *, rngs, init=jnp.zeros): self.w = init((n, n))
    def __call__(self, x): return self.w @ x


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array
    def __call__(self, x): return self.w * x

class Transformed:
    def init(self, key): return key
    def apply(self, w, x): return w * x

network = Transformed()
def step(x, y=1): return x * y
def make(): return step, (np.ones(3, np.float32),)
def make_model(): return [Model(jnp.ones(3)), (jnp.ones(3),), {}]
def train(state, x): return Model(state[0] * x), (state[0],), x.sum()
def build(): return step
def build_net(): return Net()
def scaled(width): return functools.partial(step, y=width)
def weights(): return {"w": jnp.ones(3), "f": step}
def config(): return Layer(3)
def pair(): return jnp.ones(3), (1, 2)
def nothing(): pass

def flag(x, training): return x * 2 if training else x
def count(x, n): return sum(x for _ in range(n))
def shaped(x, n, m): return x.reshape(n, m)
def setting(x, config): return x * 2 if config["train"] else x
def branch(x): return x if x.sum() > 0 else -x
def to_numpy(x): return np.asarray(x)
def to_float(x): return float(x)
def inner(x, n):
    return jax.jit(lambda n: [1, 2][n])(n) * x
def width(config, x): return x * config.width
def no_rngs(x): return Module(3)(x)
def no_transform(x): raise ValueError("must be initialized inside an `hk.transform`.")
def linked(x): raise ValueError("It is wrong. (https://example.org/errors.html#Wrong)")
"""


@pytest.fixture
def model(project):
    project("hints_file.py", MODEL)
    return lambda name, *args, **options: find_function(f"hints_file.py:{name}", *args, **options)


def said(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize("name", ["make", "make_model"])
def test_a_factory_that_was_not_called(model, name):
    assert said(TargetError, model(name).trace) == (
        f"{name} returns a function and its arguments | to trace that function, add --factory: "
        f"hints_file.py:{name} --factory"
    )
    model(name, factory=True).trace()


@pytest.mark.parametrize("name", ["build", "build_net"])
def test_a_function_that_returns_another_one(model, name):
    assert said(TargetError, model(name).trace) == (
        f"{name} returns a function, not arrays | to trace that function, add --factory: "
        f"hints_file.py:{name} --factory"
    )
    assert model(name, "f32[3]", factory=True).trace().arg_names == ("x",)
    message = said(ArgumentsError, lambda: model(name, factory=True))
    assert " needs arguments | pass them, e.g. --args " in message


def test_a_function_that_returns_another_one_of_its_arguments(model):
    expected = 'to trace that function, write the call in TARGET: "hints_file.py:scaled(...)"'
    assert said(TargetError, model("scaled", "3").trace).endswith(expected)


def test_arguments_for_the_function_that_a_factory_returns(model):
    assert said(ArgumentsError, model("build", "f32[3]").trace).endswith(
        "too many positional arguments | if it returns the function that takes them, add --factory"
    )


def test_a_flax_module_is_called_by_its_apply(model, project):
    pytest.importorskip("flax.linen")
    project(
        "linen_file.py",
        "import flax.linen as nn\nnet = nn.Dense(3)\ndef make(): return net, (1.0,)\n",
    )
    hint = (
        'pass a key to create its variables: linen_file.py:net.init_with_output --args "key(0), {}"'
    )
    assert said(ArgumentsError, lambda: find_function("linen_file.py:net")).endswith(
        hint.format("f32[8,128]")
    )
    trace = find_function("linen_file.py:net", "f32[2,4]").trace
    assert said(UserFunctionError, trace).endswith(hint.format("f32[2,4]"))
    find_function("linen_file.py:net.init_with_output", "key(0), f32[2,4]").trace()
    trace = find_function("linen_file.py:make", factory=True).trace
    assert said(UserFunctionError, trace).endswith("(variables, x) as its arguments")


def test_an_object_without_arrays_is_not_a_result(model):
    assert said(TargetError, model("config").trace) == (
        "config returns a value of type Layer, not arrays | None"
    )


@pytest.mark.parametrize("name", ["weights", "pair", "nothing"])
def test_functions_that_return_arrays_or_nothing_are_traced(model, name):
    model(name).trace()


def test_a_training_step_may_return_a_callable_module(model):
    assert len(model("train", "(f32[3],), f32[3]").trace().out_avals) == 3


def test_a_class_is_not_a_function(model):
    hint = "Layer is a class; name a function that returns Layer(...), and add --factory"
    assert said(ArgumentsError, lambda: model("Layer")).endswith(hint)
    assert said(UserFunctionError, model("Layer", "{}").trace).endswith(hint)


def test_a_class_with_a_catch_all_metaclass_reports_its_parameters(model):
    hint = "Module is a class; name a function that returns Module(...), and add --factory"
    shown = "Module(n, *, rngs, init=...)"
    assert said(ArgumentsError, lambda: model("Module")) == f"{shown} needs arguments | {hint}"
    message = said(ArgumentsError, model("Module", "f32[3]").trace)
    assert message.startswith(f"the arguments do not fit {shown}: missing a required")
    assert message.endswith(f"'rngs' | {hint}")
    message = said(TargetError, lambda: model("Module", factory=True))
    assert message == f"the factory {shown} cannot be called without arguments | {hint}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_rngs", "missing 1 required keyword-only argument: 'rngs' | give it rngs=nnx.Rngs(0)"),
        ("no_transform", "write net = hk.transform(f) in the file, and name net.apply as TARGET"),
        ("linked", "raised ValueError: It is wrong. | None"),
    ],
)
def test_errors_of_module_libraries_have_a_hint(model, name, expected):
    assert said(UserFunctionError, model(name, "f32[3]").trace).endswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n", "it has "),
        ("net", "did you mean 'Net'?"),
        ("np.su", "did you mean 'sum'?"),
        ("nnp", "it has "),
        ("stp", "did you mean 'step'?"),
        ("SIZ", "it has "),
        ("network.aply", "did you mean 'apply'?"),
        ("netwrk.apply", "did you mean 'network'?"),
        ("network", "write hints_file.py:network.apply or hints_file.py:network.init"),
        ("settings", "it has step, make"),
    ],
)
def test_similar_names_can_be_called(model, name, expected):
    assert expected in said(TargetError, lambda: model(name))


@pytest.mark.parametrize(
    ("name", "args", "hint"),
    [
        ("flag", "f32[3], True", "to make it static, add --static-argnames training"),
        ("count", "f32[3], 2", "to make it static, add --static-argnames n"),
        ("shaped", "f32[6], 2, 3", "to make it static, add --static-argnames n,m"),
        (
            "flag",
            "f32[3], bool[]",
            "to make training static, write its value in --args as static(True)",
        ),
        (
            "setting",
            "f32[3], {'train': False}",
            "to make config['train'] static, write its value in --args as static(False)",
        ),
        ("branch", "f32[3]", "choose by an array with jnp.where or jax.lax.cond"),
        ("to_numpy", "f32[3]", "use jax.numpy instead of numpy for traced arrays"),
        ("to_float", "f32[]", "convert an array with jnp.asarray(x, float)"),
        ("inner", "f32[3], 1", "None"),
        (
            "width",
            "{'width': 3}, f32[3]",
            "to pass an object of the target's module, write ref('NAME') in --args",
        ),
    ],
)
def test_values_that_python_needs_are_static(model, name, args, hint):
    message = said(UserFunctionError, model(name, args).trace)
    assert message.endswith(f" | {hint}")
    assert "error occurred while tracing" not in message


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (
            lambda x: x if x.shape[0] > 3 else 2 * x,
            "Symbolic dimension comparison 'n' > '3' is inconclusive | f32[n<=3] declares at "
            "most 3 rows; f32[n>=4], or f32[n+3], declares at least 4",
        ),
        (
            lambda x: x if x.shape[0] - 1 <= 63 else 2 * x,
            "Symbolic dimension comparison 'n - 1' <= '63' is inconclusive | f32[n<=64] declares "
            "at most 64 rows; f32[n>=65], or f32[n+64], declares at least 65",
        ),
        (
            lambda x: x if x.shape[0] > 3 * x.shape[0] - 7 else 2 * x,
            "Symbolic dimension comparison 'n' > '3*n - 7' is inconclusive | a symbol is any "
            "size from 1; f32[n+1] declares at least 2 rows",
        ),
        (
            lambda x: x + jnp.arange(9.0)[: x.shape[0]],
            "add got incompatible shapes for broadcasting: (n,), (min(9, n),) | f32[n<=9] "
            "declares at most 9 rows",
        ),
        (
            lambda x: x.reshape(-1, 4),
            "Cannot divide evenly the sizes of shapes (n,) and (-1, 4). The remainder mod(n, - "
            "4) should be 0 | with type f32[8*n] the number of rows is a multiple of 8",
        ),
        (
            lambda x: x if x.shape[0] // 2 > 3 else 2 * x,
            "Symbolic dimension comparison 'floordiv(n, 2)' > '3' is inconclusive | with type "
            "f32[8*n] the number of rows is a multiple of 8",
        ),
        (
            lambda x: x / len(x),
            "'_DimExpr' object cannot be interpreted as an integer | a symbol is not a number: "
            "x.shape[0] can be symbolic, but len(x) and float(x.shape[0]) cannot",
        ),
    ],
)
def test_sizes_that_python_needs_are_symbols(fun, message):
    with pytest.raises(UserFunctionError) as caught:
        trace(fun, *read_args("f32[n]")[0])
    assert f"{caught.value.message} | {caught.value.hint}".endswith(message)


@pytest.mark.parametrize(
    ("name", "args", "more"),
    [
        ("flag", "f32[3], True", {"static_argnames": ["training"]}),
        ("shaped", "f32[6], 2, 3", {"static_argnames": ["n", "m"]}),
        ("flag", "f32[3], static(True)", {}),
        ("setting", "f32[3], {'train': static(False)}", {}),
    ],
)
def test_the_hints_work(model, name, args, more):
    assert model(name, args, **more).trace().arg_names == ("x",)


def test_a_string_is_written_static(model):
    message = said(ArgumentsError, lambda: model("flag", "f32[3], 'train'"))
    assert message.endswith("as static('train')")


def test_a_slow_factory_is_reported(model, monkeypatch):
    monkeypatch.setattr(load, "LONG", -1)
    assert model("make_model", factory=True).needless_work is None  # a few bytes
    monkeypatch.setattr(load, "LARGE", 1)
    # JAX does no work to create a NumPy array
    assert model("make", factory=True).needless_work is None
    assert model("step", "f32[3]").needless_work is None
    assert "jax.eval_shape(init, ...)" in model("make_model", factory=True).needless_work
    monkeypatch.setattr(load, "LONG", 60)
    assert model("make_model", factory=True).needless_work is None


class Scaled:
    def call(self, x):
        return x * 2


def test_a_method_without_an_object_is_said_to_be_one():
    with pytest.raises(ArgumentsError) as raised:
        trace(Scaled.call, jnp.ones(3))
    assert "Scaled.call is a method without an object" in raised.value.message
    assert "instance = Scaled(...)" in raised.value.hint and "instance.call" in raised.value.hint
    assert trace(Scaled().call, jnp.ones(3)).out_avals[0].shape == (3,)


@pytest.mark.parametrize("target", ["cells.ipynb", "cells.ipynb:f"])
def test_a_notebook_is_no_target(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells.ipynb").write_text('{"cells": [null]}')
    with pytest.raises(TargetError, match="is a notebook") as raised:
        find_entry(target)
    assert "%%record" in raised.value.hint


def test_a_script_without_functions_can_be_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_runs.py").write_text("print(1)")
    with pytest.raises(TargetError) as raised:
        find_entry("only_runs.py")
    assert raised.value.hint.endswith("or record the script: jaxprtool record only_runs.py")


def test_a_list_of_numbers_where_an_array_is_needed_is_hinted():
    with pytest.raises(UserFunctionError, match="raised TypeError") as raised:
        trace(lambda x: x + 1, [1.0, 2.0])
    assert "write array([1.0, 2.0]) in --args" in raised.value.hint
    with pytest.raises(UserFunctionError) as other:
        trace(lambda x: x + "a", 1.0)
    assert "array([" not in (other.value.hint or "")
