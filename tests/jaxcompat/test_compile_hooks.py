"""The events of hooks into JAX's compilation, and their effects on the user's program."""

import traceback

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.jaxcompat import compile_hooks


class Observer:
    """Records the arrays that Python waited for."""

    def __init__(self, around=None):
        self.around, self.waits = around, []

    def jit_made(self, fun, jit, made):
        return self.around

    def describe(self, call):
        return None

    def begins(self, phase, name):
        return None

    def traced(self, begun):
        pass

    def compiling(self, lowered):
        pass

    def lowered(self, lowering):
        return None

    def compiled(self, lowered, times):
        pass

    def cleared(self, fun):
        pass

    def waited(self, array, value, seconds):
        self.waits.append(array.shape)

    def failed(self, error):
        raise error


@pytest.fixture
def removed_frames():
    """Make JAX remove its frames from tracebacks, even if IPython is imported."""
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("removed_frames")
@pytest.mark.parametrize("is_watched", [False, True])
def test_tracebacks_are_the_same_as_without_the_hooks(is_watched):
    def call(f, args, kwargs):
        return f(*args, **kwargs)

    def wrong(x):
        raise ValueError("the user's")

    with compile_hooks.observed(Observer(call if is_watched else None)):
        f = jax.jit(wrong)
        with pytest.raises(ValueError, match="the user's") as raised:
            f(1.0)
    names = [frame.name for frame in traceback.extract_tb(raised.tb)]
    watching = ["__call__", "call"] if is_watched else []
    assert names == ["test_tracebacks_are_the_same_as_without_the_hooks", *watching, "wrong"]


def test_item_is_a_wait_like_float():
    observer = Observer()
    x, y = jnp.arange(3.0), jnp.float32(2.0)
    with compile_hooks.observed(observer):
        assert x.item(1) == 1.0
        assert y.item() == float(y) == 2.0
        with pytest.raises(ValueError, match="size 1"):
            x.item()
    assert observer.waits == [(3,), (), ()]
