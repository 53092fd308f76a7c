"""Changes of plain Python objects during tracing are reported in one warning."""

import functools
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import load, static, trace

MODULE = """
    import jax

    losses, cache, total = [], {}, 0

    class Logger:
        def __init__(self):
            self.seen, self.last = [], None

        def step(self, x):
            self.seen.append(x)
            return x * 3

    logger = Logger()
    step = logger.step

    def appends(x):
        losses.append(x)
        return x * 2

    def updates(x):
        y = x * 2
        cache.update(y=y)
        return y

    def sets(x):
        logger.last = x
        return x

    def counts(x):
        global total
        total += 1
        return x

    def called(x):
        return appends(x) + 1

    jitted = jax.jit(appends)

    def own(x):
        here = []
        here.append(x)
        return here[0] * (len(losses) + total)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told.py").write_text(textwrap.dedent(MODULE).lstrip())
    yield
    sys.modules.pop("told", None)


@pytest.mark.parametrize(
    "name, message",
    [
        ("appends", "appends changes losses in place at told.py:17"),
        ("called", "called changes losses in place at told.py:17"),
        ("jitted", "appends changes losses in place at told.py:17"),
        ("updates", "updates changes cache in place at told.py:22"),
        ("sets", "sets changes logger in place at told.py:26"),
        ("counts", "counts changes total in place at told.py:31"),
        ("step", "step changes self.seen in place at told.py:10"),
        ("own", None),
    ],
)
def test_changes_by_a_function_are_reported_with_the_line(module, name, message):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(f"told.py:{name}", "f32[3]")
    tail = ": the change happens once, during tracing, and not when the Program is called"
    assert [str(each.message) for each in told] == ([message + tail] if message else [])


class Settings:
    def __init__(self):
        self.scale, self.calls = 2.0, 0


def bumped(x, settings):
    settings.calls += 1
    return x * settings.scale


class Layer:
    def __init__(self):
        self.scale, self.calls = 2.0, 0

    def __call__(self, x):
        return x * self.scale


class Counting(Layer):
    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


def put(parts, x):
    parts["sum"] = parts["a"] + x
    return parts["sum"]


def test_changed_arguments_are_reported_too():
    with pytest.warns(UserWarning, match=r"bumped changes settings in place at .*:\d+"):
        trace(bumped, 1.0, static(Settings()))
    with pytest.warns(UserWarning, match=r"bumped changes settings in place"):
        trace(functools.partial(bumped, settings=Settings()), 1.0)
    with pytest.warns(UserWarning, match=r"Counting changes self in place at .*:\d+"):
        trace(Counting(), 1.0)
    with pytest.warns(UserWarning, match=r"put changes parts in place at .*:\d+"):
        trace(put, {"a": jnp.ones(3)}, 1.0)


def test_changed_closures_are_reported_and_unchanged_ones_are_not():
    found, sizes = [], {"n": 3, "nan": float("nan")}

    def closes_over(x):
        found.extend([x])
        return x

    def reads(x):
        sizes["n"] = 3
        return x * sizes["n"]

    with pytest.warns(UserWarning, match="closes_over changes found in place"):
        trace(closes_over, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(reads, 1.0)
        trace(jax.jit(reads), 1.0)
        trace(jnp.sin, 1.0)
        trace(Layer(), 1.0)
        trace(jax.jit(Layer()), 1.0)
        trace(functools.partial(Layer(), 1.0))
        trace(Layer().__call__, 1.0)
