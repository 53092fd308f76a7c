"""find combines a function with its arguments, wherever they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.errors import ArgumentsError, TargetError, UserFunctionError
from jaxprtool.loading.load import find_function

MODEL = """
import functools, jax, jaxprtool, numpy as np
from jaxprtool import example, static
scale = np.float32(2)

@example({"w": "f32[3,4]"}, "f32[3]", training=static(False))
def forward(params, x, training): return x if training else x @ params["w"]

jitted = jax.jit(forward, static_argnames="training")
bound = functools.partial(forward, {"w": np.ones((3, 4), np.float32)})
named = functools.partial(forward, training=True)

@example("f32[5]")
@jax.jit
def outside(x): return x

@jax.jit
@example("ref('scale')", 3)
def inside(x, y): return x

class Net:
    @example("f32[2]")
    def __call__(self, x): return x
    @example("f32[n]", "f32[n]")
    def add(self, x, y): return x + y
net = Net()
add = net.add

def plain(x): return x
plain.example_args = (np.ones(3, np.float32),)
def lazy(x, y): return x
lazy.example_args = lambda: ("f32[3]", 1)
def wrong(x): return x
wrong.example_args = 3
def raising(x): return x
raising.example_args = lambda: 1 / 0

def bare(params: dict, x: jax.Array, *, key, training=False) -> jax.Array: return x
def nothing(): return 1
def defaults(x=1.0): return x
square = lambda x: x
"""


@pytest.fixture
def model(project):
    project("model_file.py", MODEL)
    return lambda name, *args, **options: find_function(f"model_file.py:{name}", *args, **options)


def shapes(entry):
    return [jax.typeof(leaf).str_short(True) for leaf in entry.arguments()]


def fault(kind, call, *args, **kwargs):
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward", ["f32[3,4]", "f32[3]"]),
        ("jitted", ["f32[3,4]", "f32[3]"]),
        ("bound", ["f32[3]"]),
        ("named", ["f32[3,4]", "f32[3]"]),
        ("outside", ["f32[5]"]),
        ("inside", ["f32[]", "i32[]"]),
        ("net", ["f32[2]"]),
        ("net.add", ["f32[n]", "f32[n]"]),
        ("add", ["f32[n]", "f32[n]"]),
        ("plain", ["f32[3]"]),
        ("lazy", ["f32[3]", "i32[]"]),
        ("nothing", []),
        ("defaults", []),
    ],
)
def test_a_function_may_have_example_arguments(model, name, expected):
    entry = model(name)
    assert shapes(entry) == expected
    program = entry.trace()
    assert [aval.str_short(True) for aval in program.in_avals] == expected


def test_args_take_precedence_over_the_example(model):
    entry = model("forward", "{'w': f32[7,1]}, zeros(f32[7]), training=static(False)")
    assert shapes(entry) == ["f32[7,1]", "f32[7]"]
    assert isinstance(entry.arguments()[1], np.ndarray)
    assert model("inside", "ref('scale'), 1").arguments() == [np.float32(2), 1]


def test_static_arguments_are_not_among_the_arguments(model):
    entry = model("forward", "{'w': f32[7,1]}, f32[7], True", static_argnums=2)
    assert shapes(entry) == ["f32[7,1]", "f32[7]"]
    assert entry.trace().jaxpr.eqns == []
    entry = model("forward", "{'w': f32[7,1]}, f32[7], True", static_argnames=["training"])
    assert entry.trace().arg_names == ("params['w']", "x")


@pytest.mark.parametrize(
    ("target", "name"),
    [("forward", "forward"), ("bound", "forward"), ("net", "Net"), ("add", "add")],
)
def test_the_program_is_named_after_the_function(model, target, name):
    assert (model(target).name, model(target).trace().name) == (name, name)


def test_a_lambda_is_named_after_its_attribute(model):
    assert model("square", "1").trace().name == "square"


def test_without_arguments_the_error_explains_how_to_give_them(model):
    message = fault(ArgumentsError, model, "bare")
    assert message == (
        "bare(params, x, *, key, training=False) needs arguments | pass them, e.g. --args "
        "\"{'w': f32[3,4]}, f32[8,128], key=key(0)\", or attach @jaxprtool.example(...) to the "
        "function"
    )
    assert model("bare", "{'w': f32[3,4]}, f32[8,128], key=key(0)").trace().name == "bare"


def test_invalid_example_args_are_refused(model):
    assert "example_args of wrong is a value of type int | it must be a tuple" in fault(
        ArgumentsError, model, "wrong"
    )
    assert "example_args of raising raised ZeroDivisionError" in fault(
        UserFunctionError, model, "raising"
    )


# --- factories

FACTORY = """
import jax, numpy as np
def step(x, y=1): return x * y
def two(): return step, (np.ones(3, np.float32),)
def three(size=4): return [step, [jax.ShapeDtypeStruct((size,), np.float32)], {"y": 2.0}]
def needs(x): return step, (x,)
def raising(): raise ValueError("no data")
def leaving(): raise SystemExit(2)
def one(): return step
def six(): return 6
def four(): return step, (), {}, 1
def nothing(): pass
def array(): return step, np.ones(3)
def swapped(): return (np.ones(3),), step
def pairs(): return step, (), [("y", 2)]
"""


@pytest.fixture
def factory(project):
    project("factory_file.py", FACTORY)
    return lambda name, args=None: find_function(f"factory_file.py:{name}", args, factory=True)


def test_a_factory_returns_the_function_and_its_arguments(factory):
    assert shapes(factory("two")) == ["f32[3]"]
    assert shapes(factory("three")) == ["f32[4]", "f32[]"]
    assert factory("three").trace().name == "step"
    assert shapes(factory("two", "f32[9]")) == ["f32[9]"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("needs", "the factory needs(x) cannot be called without arguments"),
        ("six", "the factory six returned a value of type int | a factory must return"),
        ("four", "the factory four returned 4 values"),
        ("nothing", "the factory nothing returned None"),
        ("array", "the factory array returned a value of type ndarray for its args"),
        ("swapped", "the factory swapped returned a value of type tuple for its function"),
        ("pairs", "the factory pairs returned a value of type list for its kwargs"),
    ],
)
def test_other_results_of_a_factory_are_refused(factory, name, expected):
    assert expected in fault(TargetError, factory, name)


def test_a_factory_that_raises_is_reported(factory):
    assert "the factory raising raised ValueError: no data" in fault(
        UserFunctionError, factory, "raising"
    )
    assert "the factory leaving raised SystemExit" in fault(UserFunctionError, factory, "leaving")


def test_the_function_of_a_factory_runs(factory):
    entry = factory("two")
    np.testing.assert_array_equal(entry.trace()(*entry.arguments()), jnp.ones(3))
