"""Descriptions of functions and their calls, recorded in the script's own process."""

import dataclasses
import datetime
import enum
import functools
import gc
import time
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.recording import describe
from jaxprtool.recording.values import LIMIT, ObjectNumbers, ValueTexts
from tests.recording.recorded import Calls


@pytest.fixture
def values():
    return ValueTexts(ObjectNumbers())


@pytest.fixture
def calls():
    return Calls()


def scaled(rate):
    return lambda x: x * rate


def line_of(fun):
    return f"test_describe.py:{fun.__code__.co_firstlineno}"


# --- values ---------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3
    name: str = "a"
    inner: object = None


class Raises:
    def __repr__(self):
        raise RuntimeError

    def __hash__(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"),
        (10**18, "1" + "0" * 18),
        (0.1, "0.1"),
        ("a'b", '"a\'b"'),
        (None, "None"),
        ((1,), "(1,)"),
        ([1, {"a": (2, None)}], "[1, {'a': (2, None)}]"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (Point(1, 2.0), "Point(x=1, y=2.0)"),
        (OrderedDict(a=1), "OrderedDict{'a': 1}"),
        (Color.RED, "Color.RED"),
        (int, "int"),
        (jnp.float32, "float32"),
        (np.dtype("float32"), "dtype('float32')"),
        (np.float32(2), "np.float32(2.0)"),
        (jnp.ones((2, 3), jnp.bfloat16), "bf16[2,3]"),
        (Config(), "Config()"),
        (Config(4, inner=Config(5)), "Config(size=4, inner=Config(size=5))"),
        (Raises(), "Raises"),
        ([Raises()], "[Raises]"),
        (Plain(), "Plain #1"),
        (datetime.date(2020, 1, 2), "datetime.date(2020, 1, 2)"),
        (len, "len"),
    ],
)
def test_texts_of_values(values, value, text):
    assert values(value) == text


def test_functions_that_jax_compares_by_identity_have_numbers(values):
    first, second = map(scaled, (0.1, 0.2))
    text = values(first)
    assert text.endswith(f"{line_of(first)} #1")
    assert values(second).endswith("#2") and values(first) == text
    closure = ValueTexts(ObjectNumbers(), compared=False)
    other = lambda x: x  # noqa: E731
    assert closure(first) == closure(scaled(0.1)) != closure(other)
    assert closure(first) != closure(second) and "#" not in closure(first)
    assert values(jax.nn.relu) == "relu #1"
    assert values(jax.jit(other)) == f"<lambda> {line_of(other)} #3"


def test_equal_values_have_equal_texts(values):
    class Equal:
        def __init__(self, size):
            self.size = size

        def __eq__(self, other):
            return self.size == other.size

        def __hash__(self):
            return hash(self.size)

    assert values(Equal(1)) == values(Equal(1)) == "Equal(size=1)" != values(Equal(2))


def test_long_values_are_truncated_and_still_differ():
    closure = ValueTexts(ObjectNumbers(), compared=False)
    for first, second in [
        ("x" * 5000 + "a", "x" * 5000 + "b"),
        (list(range(5000)), [*range(4999), 1]),
        ({i: i for i in range(100)}, {i: i + (i == 99) for i in range(100)}),
        (10**5000, 10**5000 + 1),
    ]:
        texts = closure(first), closure(second)
        assert max(map(len, texts)) <= LIMIT
        assert texts[0] != texts[1] or isinstance(first, int)


def test_cyclic_values_are_supported(values):
    cycle = []
    cycle.append(cycle)
    assert len(values(cycle)) < 1000

    def own():
        return own

    assert values(own)
    holder = Plain()
    holder.own = functools.partial(own, holder)
    assert values(functools.partial(own, holder.own))


def test_closures_are_not_printed_by_user_code():
    """The repr of a tokenizer or a dataset may take long."""

    class Large:
        def __repr__(self):
            raise AssertionError

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

    assert ValueTexts(ObjectNumbers(), compared=False)(Large()) == "Large #1"


@pytest.mark.proof
def test_no_value_is_kept_alive(calls):
    class Held:
        pass

    def make():
        held, array = Held(), jnp.ones(3)
        fun = lambda x: (held, x + array)[1]  # noqa: E731
        calls.numbers(held)
        describe.described_call(fun, None, (), {"held": held, "fun": fun}, calls.numbers)
        return weakref.ref(held), weakref.ref(fun)

    references = make()
    gc.collect()
    assert [each() for each in references] == [None, None]


def test_the_number_of_a_freed_object_is_not_reused():
    numbers = ObjectNumbers()
    assert len({numbers(Plain()) for _ in range(50)}) == 50
    assert [numbers(Plain(), "other"), numbers(Plain())] == [1, 51]


# --- functions ------------------------------------------------------------------------------------


def of(fun, numbers=None):
    return describe.described_function(fun, numbers or ObjectNumbers())


def test_a_function():
    def step(x, y=2, *, key=None):
        return x

    found = of(step)
    assert (found.name, found.place) == ("step", line_of(step))
    assert found.file == __file__
    assert found.object.kind == "function" and found.object.name == "step"
    assert found.object.closure == {"y": "2", "key": "None"}


def test_functions_with_the_same_code_are_one():
    first, second = map(scaled, (0.1, 0.2))
    other = lambda x: x + 1  # noqa: E731
    assert of(first).code == of(second).code != of(other).code
    assert of(functools.partial(first)).code == of(first).code
    assert of(jax.jit(first)).code == of(first).code
    assert of(first).object.kind == "lambda" and of(first).name == "lambda"


def test_closure_variables_of_a_function():
    rate, scale = 0.1, jnp.ones((2, 3))
    rule = lambda x: x  # noqa: E731

    def step(x):
        return rule(x) * rate * scale

    assert of(step).object.closure == {
        "rate": "0.1",
        "scale": "f32[2,3]",
        "rule": f"<lambda> {line_of(rule)}",
    }


def test_a_partial_and_a_method():
    class Trainer:
        def step(self, x, rate=0.1):
            return x

    trainer, numbers = Trainer(), ObjectNumbers()
    found = of(trainer.step, numbers)
    assert (found.name, found.object.kind, found.place) == (
        "step",
        "method",
        line_of(Trainer.step),
    )
    assert found.object.closure == {"rate": "0.1", "self": "Trainer #1"}
    assert of(trainer.step, numbers).object.number == found.object.number
    assert of(Trainer().step, numbers).object.number != found.object.number
    bound = of(functools.partial(trainer.step, 3, rate=0.2), numbers)
    assert (bound.name, bound.object.kind) == ("step", "partial")
    assert bound.object.closure == {"rate": "0.2", "self": "Trainer #1", "x": "3"}


def test_a_wrapped_function_has_its_own_name_and_line():
    def logged(level):
        def decorate(fun):
            @functools.wraps(fun)
            def wrapper(*args):
                return fun(*args), level

            return wrapper

        return decorate

    def plain(x):
        return x

    found = of(logged(3)(plain))
    assert (found.name, found.place) == ("plain", line_of(plain))
    assert found.code == of(logged(4)(plain)).code != of(plain).code
    assert found.object.closure == {"level": "3"}
    assert found.parameters.positional == ("x",)


def test_a_function_and_its_jax_transformations_are_distinct():
    def loss(x, rate=0.1):
        return x * rate

    several = [loss, jax.grad(loss), jax.value_and_grad(loss), jax.vmap(loss), jax.checkpoint(loss)]
    assert len({of(each).code for each in several}) == len(several)
    for fun in several:
        assert (of(fun).name, of(fun).place) == ("loss", line_of(loss))
        assert of(fun).object.closure == {"rate": "0.1"}
    assert of(jax.grad(loss, argnums=0)).code == of(jax.grad(loss, argnums=1)).code


def test_callable_objects():
    class Model:
        def __call__(self, x):
            return x

    found = of(Model())
    assert (found.name, found.object.kind, found.place) == (
        "Model",
        "object",
        line_of(Model.__call__),
    )
    assert found.object.closure == {"self": "Model #1"}
    assert of(jnp.add).name == "add"
    assert of(pytest.main).object.library and not of(Model()).object.library
    assert of(len).name == "len" and of(len).place == ""
    assert of(dict).name == "dict"


def test_a_function_under_jaxprtools_jit():
    def step(x):
        return x

    found = of(jaxprtool.jit(step))
    assert (found.name, found.place) == ("step", line_of(step))


def test_nothing_raises():
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError

        def __call__(self, x):
            return x

    def step(x=Hostile(), *, y=Raises()):  # noqa: B008
        return hostile

    hostile = Raises()
    assert of(step).object.closure == {"x": "Hostile #1", "y": "Raises #1", "hostile": "Raises #2"}
    assert of(Hostile()).name == "Hostile"
    found = describe.described_call(
        step, None, ("x",), {"a": Raises(), "b": Hostile()}, ObjectNumbers()
    )
    assert found.statics == {"a": "Raises", "b": "Hostile #2"} and found.names == ("x",)


# --- arguments ------------------------------------------------------------------------------------


def test_the_structure_of_arguments(calls):
    def fun(a, *args, b, c=None, **others):
        return a

    state = OrderedDict(x=1, y=Point((2, 3), None))
    counts = defaultdict(int, z=[1])
    call, _ = calls.call(fun, {"k": (1, None)}, 2, state, b=counts, d={}, c=None)
    assert call.structure == {
        "": "(a, args[0], args[1], b=, c=, others['d']=)",
        "a": "dict(k)",
        "a['k']": "tuple(2)",
        "a['k'][1]": "None",
        "args[1]": "OrderedDict(x, y)",
        "args[1]['y']": "Point(x, y)",
        "args[1]['y'].x": "tuple(2)",
        "args[1]['y'].y": "None",
        "b": "defaultdict(z)",
        "b['z']": "list(1)",
        "c": "None",
        "others['d']": "dict()",
    }
    assert call.names == (
        "a['k'][0]",
        "args[0]",
        "args[1]['x']",
        "args[1]['y'].x[0]",
        "args[1]['y'].x[1]",
        "b['z'][0]",
    )


def test_static_fields_of_dataclasses(calls):
    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["size", "rule"]
    )
    @dataclasses.dataclass
    class State:
        size: int
        x: object
        rule: object
        y: object

    @jax.tree_util.register_pytree_node_class
    class Custom:
        def __init__(self, x, size):
            self.x, self.size = x, size

        def tree_flatten(self):
            return (self.x,), self.size

        @classmethod
        def tree_unflatten(cls, size, children):
            return cls(*children, size)

    def fun(state, custom, call):
        return state.x

    partial = jax.tree_util.Partial(fun, 1)
    call, _ = calls.call(fun, State(3, 1.0, jax.nn.relu, [2]), Custom(1, 7), partial)
    assert {path: text for path, text in call.structure.items() if text[0] == "="} == {
        "state.size": "=3",
        "state.rule": "=relu #1",
        "custom.<static>": "=7",
        "call.func": f"=fun {line_of(fun)} #1",
    }
    assert call.structure["state"] == "State(x, y)"
    assert call.structure["state.y"] == "list(1)"


def test_static_arguments_leave_the_names_of_the_others(calls):
    def fun(x, training, y=None, size=3):
        return x

    call, _ = calls.call(fun, 1, static={"training": True, "size": 4}, y=None)
    assert call.statics == {"training": "True", "size": "4"}
    names = describe.described_call(
        fun, jax.tree.structure(((1, None), {})), ("x",), call.statics, ObjectNumbers()
    ).structure
    assert names == {"": "(x, y)", "y": "None"}


def test_keys_of_dictionaries_with_brackets(calls):
    call, _ = calls.call(lambda x: x, {"a][.b": (1, {})})
    assert call.structure == {
        "": "(x)",
        "x": "dict(a][.b)",
        "x['a][.b']": "tuple(2)",
        "x['a][.b'][1]": "dict()",
    }


# --- libraries ------------------------------------------------------------------------------------


def filtered(jitted, calls, *args, **kwargs):
    """Describe the function that `equinox.filter_jit` passes to JAX."""
    from equinox._jit import _preprocess

    donate = jitted.donate_first, jitted.donate_rest
    info = (jitted._signature, jitted._dynamic_fun, jitted._static_fun, *donate)
    donated, others, static = _preprocess(info, args, kwargs, return_static=True)
    traced = jitted._cached.trace(donated, others, static)
    jaxpr = traced.jaxpr
    names = (jaxpr if hasattr(jaxpr, "debug_info") else jaxpr.jaxpr).debug_info.arg_names
    tree = jax.tree.structure(((donated, others), {}))
    inner = jitted._cached.__wrapped__
    return describe.described_call(
        inner, tree, names, {"static": static}, calls.numbers, jitted._cached
    )


def test_equinox_filter_jit(calls):
    eqx = pytest.importorskip("equinox")

    @eqx.filter_jit
    def step(model, x, training, *, rate):
        return jax.vmap(model)(x)

    model = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    call = filtered(step, calls, model, jnp.ones((2, 2)), True, rate=0.1)
    assert call.function.name == "step" and call.function.place == line_of(step.__wrapped__)
    assert call.function.object.wrapper == "equinox.filter_jit"
    assert call.names == (
        "model.layers[0].weight",
        "model.layers[0].bias",
        "model.layers[1].weight",
        "model.layers[1].bias",
        "x",
    )
    assert call.statics == {"training": "True", "rate": "0.1"}
    assert call.structure["model.layers[1]"] == "Linear(weight, bias)"
    assert call.structure["model.layers[1].in_features"] == "=3"
    assert call.structure["model.activation"] == "=relu #1"
    assert call.structure[""] == "(model, x, training, rate=)"


def test_equinox_modules_and_methods_under_filter_jit(calls):
    eqx = pytest.importorskip("equinox")

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            return self.factor * x

        def times(self, x, count):
            return self.factor * x

    scale = Scale(jnp.ones(2))
    call = filtered(eqx.filter_jit(scale), calls, jnp.ones(2))
    assert (call.function.name, call.function.object.kind) == ("Scale", "object")
    assert call.function.code == of(scale).code
    assert sorted(call.names) == ["self.factor", "x"]
    call = filtered(eqx.filter_jit(scale.times, donate="all"), calls, jnp.ones(2), 3)
    assert (call.function.name, call.function.object.kind) == ("times", "method")
    assert sorted(call.names) == ["self.factor", "x"] and call.statics == {"count": "3"}
    call = filtered(eqx.filter_jit(lambda: jnp.ones(2)), calls)
    assert call.names == () and call.structure == {"": "()"}


@pytest.mark.models
def test_flax_nnx_jit(calls, monkeypatch):
    nnx = pytest.importorskip("flax.nnx")
    from flax.nnx.transforms import compilation

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.same = self.linear

        def __call__(self, x):
            return self.dropout(self.linear(x))

    found = []
    original = compilation.JitFn.__call__

    def called(self, *args, **kwargs):
        leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        names = [("model", "x")[p[1].idx] + jax.tree_util.keystr(p[2:]) for p, _ in leaves]
        found.append(describe.described_call(self, tree, names, {}, calls.numbers))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(compilation.JitFn, "__call__", called)

    @nnx.jit
    def forward(model, x):
        return model(x)

    net = Net(nnx.Rngs(0))
    forward(net, jnp.ones((1, 2)))
    net.eval()
    forward(net, jnp.ones((1, 2)))
    train, test = found
    assert (train.function.name, train.function.object.wrapper) == ("forward", "nnx.jit")
    assert train.function.place == line_of(forward.__wrapped__)
    assert {"model.linear.kernel", "model.linear.bias", "x"} <= set(train.names)
    assert train.structure["model.linear"] == "Linear"
    assert train.structure["model.same"] == "=model.linear"
    differing = {k for k in train.structure if train.structure[k] != test.structure[k]}
    assert differing == {"model.dropout.deterministic"}
    assert test.structure["model.dropout.deterministic"] == "=True"


# --- speed ----------------------------------------------------------------------------------------


def test_five_hundred_arrays_are_described_in_a_millisecond(calls):
    """The limit has a margin for slow machines: 0.9 ms were measured."""
    params = {f"layer{i}": {"kernel": np.ones(2), "bias": np.ones(1)} for i in range(250)}

    def step(params, batch):
        return batch

    tree = jax.tree.structure(((params, 1), {}))
    names = [f"params{jax.tree_util.keystr(p)}" for p, _ in jax.tree.leaves_with_path(params)]

    def seconds():
        start = time.process_time()
        describe.described_call(step, tree, (*names, "batch"), {}, calls.numbers)
        return time.process_time() - start

    assert min(seconds() for _ in range(10)) < 4e-3
