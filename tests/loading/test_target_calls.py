"""A factory with arguments is called in the TARGET. The arguments are parsed, never evaluated."""

import pytest

from jaxprtool.errors import ArgumentsError, TargetError, UserFunctionError
from jaxprtool.loading.load import find_function
from jaxprtool.loading.remote_target import elsewhere

TRAIN = """
import jax, jax.numpy as jnp
CONFIG = {"lr": 2.0, "steps": 1}

def make_train(config, scale=1, *, name=None, layers=()):
    assert name is None or name == "a@b:(c)"
    def train(w):
        for _ in range(config["steps"]):
            w = w - config["lr"] * scale * w
        return w if config.get("net", {}).get("act") != "tanh" else jnp.tanh(w)
    return train

def with_arguments(count, shape=(2,)): return (lambda x: x * count), (jnp.ones(shape),)
def with_types(like): return (lambda x: x + 1), (like,)
def given(*values): return (lambda x: x), (jnp.ones(len(values)),), {} if values == (
    2**40, -0.5, True, None, "s", [1, ("t",)], {1: "one", "two": 2}
) else 1 / 0

class Net:
    def __init__(self, width): self.width = width
    def __call__(self, x): return x * self.width

class Makers:
    make = staticmethod(make_train)
"""


@pytest.fixture
def entry(project):
    project("train_file.py", TRAIN)
    return lambda call, args=None, **options: find_function(
        f"train_file.py:{call}", args, **options
    )


@pytest.mark.parametrize(
    "call, equations",
    [
        ("make_train({'lr': 1e-3, 'steps': 2})", 4),
        ("make_train({'lr': 1e-3, 'steps': 2, 'net': {'act': 'tanh'}}, 2, name='a@b:(c)')", 5),
        ("make_train(ref('CONFIG'), layers=[1, (2,)])", 2),
        ("make_train(static({'lr': 1.0, 'steps': 3}), scale=static(3))", 6),
        ("Makers.make({'lr': 1.0, 'steps': 1,},)", 2),
        ("Net(3)", 1),
    ],
)
def test_the_result_of_the_call_is_traced(entry, call, equations):
    for factory in False, True:
        assert len(entry(call, "f32[3]", factory=factory).trace().jaxpr.eqns) == equations
    assert entry(call, "f32[3]").trace().name in ("train", "Net")


def test_the_call_may_return_the_arguments_too(entry):
    assert entry("with_arguments(3, shape=(4, 5))").trace().in_avals[0].shape == (4, 5)
    assert entry("with_types(f32[7])").trace().in_avals[0].shape == (7,)
    assert entry("with_arguments(3)", "f32[6]").trace().in_avals[0].shape == (6,)


def test_values_are_those_of_python(entry):
    entry("given(1099511627776, -0.5, True, None, 's', [1, ('t',)], {1: 'one', 'two': 2})")


@pytest.mark.parametrize(
    "call, kind, message",
    [
        ("make_train({'lr': 1}", TargetError, r"must end with the '\)' of its call"),
        ("make_train({'lr': 1}).inner", TargetError, r"must end with the '\)' of its call"),
        ("make_train({'lr': 1)", ArgumentsError, r"'{' in the call of make_train is not closed"),
        ("make_train(lambda: 1)", ArgumentsError, "a lambda is not allowed in the call of"),
        ("make_train(open('f'))", ArgumentsError, "unknown name 'open' in the call of make_train"),
        ("make_train(CONFIG)", ArgumentsError, "unknown name 'CONFIG' in the call of make_train"),
        ("make_train({}, depth=2)", TargetError, "do not fit make_train.*'depth'"),
        ("make_train()", TargetError, "do not fit make_train.* 'config'"),
        ("make_trains({})", TargetError, "no attribute 'make_trains'"),
        ("make_train(3)", UserFunctionError, "train raised TypeError: 'int' object"),
    ],
)
def test_a_mistake_is_a_one_line_error(entry, call, kind, message):
    with pytest.raises(kind, match=message):
        entry(call, "f32[3]").trace()


def test_a_factory_that_is_not_called_has_a_hint(entry):
    with pytest.raises(TargetError) as error:
        entry("make_train", "f32[3]", factory=True)
    assert 'write them in TARGET: "train_file.py:make_train(...)"' in error.value.hint


def test_an_at_sign_in_a_call_is_not_a_revision():
    call = "m.py:make({'name': 'a@b'})"
    assert elsewhere(call).is_here
    assert elsewhere(f"{call}@HEAD~1") == elsewhere(f"{call}@HEAD~1")
    assert (elsewhere(f"{call}@HEAD~1").target, elsewhere(f"{call}@HEAD~1").revision) == (
        call,
        "HEAD~1",
    )
