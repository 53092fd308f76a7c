"""Python functions in programs are equal if they do the same, whichever object they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import jaxprtool
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.keys import function_difference

F32 = jax.ShapeDtypeStruct((), jnp.float32)


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, v):
        return v * self.by

    def method(self, v):
        return v * self.by


class Slotted:
    __slots__ = ("by",)


def scale(by):
    def local(v):
        return v * by

    return local


def local_class(by):
    class Local:
        def method(self, v):
            return v * by

    return Local().method


#: Functions made for each trace, by a number.
FUNCTIONS = {
    "closure": scale,
    "closure over an array": lambda by: scale(np.full(3, by)),
    "closure over a list": lambda by: lambda v, held=[by]: v * held[0],
    "closure over a function": lambda by: lambda v: scale(by)(v),
    "code": lambda by: (lambda v: v * 2) if by == 2 else (lambda v: v * 3),
    "default": lambda by: lambda v, k=by: v * k,
    "keyword": lambda by: lambda v, *, k=by: v * k,
    "partial": lambda by: functools.partial(lambda k, v: v * k, by),
    "method": lambda by: Scale(by).method,
    "callable object": Scale,
    "method of a local class": local_class,
    "jit": lambda by: jax.jit(lambda v: v * by),
    "cache": lambda by: functools.lru_cache(lambda v: v * by),
}

#: The ways to call a function from a program.
CALLS = {
    "pure_callback": lambda f, x: jax.pure_callback(f, F32, x),
    "io_callback": lambda f, x: io_callback(f, F32, x, ordered=True),
    "debug.callback": lambda f, x: (jax.debug.callback(f, x), x)[1],
    "in a scan": lambda f, x: lax.scan(lambda c, _: (io_callback(f, F32, c), None), x, length=2)[0],
    "in a branch": lambda f, x: lax.cond(x > 0, lambda y: jax.pure_callback(f, F32, y), abs, x),
    "in a batch": lambda f, x: jax.vmap(lambda y: io_callback(f, F32, y))(jnp.stack([x, x])),
}


def calling(call, name, by):
    return jaxprtool.trace(lambda x: CALLS[call](FUNCTIONS[name](by), x), jnp.float32(1))


@pytest.mark.parametrize(
    ("call", "name"),
    [*(("pure_callback", name) for name in FUNCTIONS), *((call, "closure") for call in CALLS)],
)
def test_a_function_equals_that_of_another_trace_but_not_one_that_does_something_else(call, name):
    first, again, other = (calling(call, name, by) for by in (2, 2, 3))
    assert structural_difference(first, again) is None
    assert jaxprtool.diff(first, again).is_equivalent
    found = structural_difference(first, other)
    texts = found.split("parameter callback: ")[-1].split(" against ")
    assert len(texts) == 2 and texts[0] != texts[1]
    assert jaxprtool.diff(first, other).verdict == "different"


def test_the_first_difference_of_two_functions_is_described():
    assert function_difference(scale(2), scale(2)) is None
    assert function_difference(scale(2), scale(3)) == ("local: by = 2", "local: by = 3")
    assert function_difference(scale, local_class) == ("scale", "local_class")
    assert function_difference(np.sin, np.cos) is not None
    assert function_difference(Scale(2), Scale(3)) == ("Scale: by = 2", "Scale: by = 3")


def test_objects_that_cannot_be_compared_are_equal_by_identity_and_told_apart():
    one, other = Slotted(), Slotted()
    assert function_difference(scale(one), scale(one)) is None
    texts = function_difference(scale(one), scale(other))
    assert texts is not None and texts[0] != texts[1]


def test_functions_that_hold_themselves_are_compared():
    def recursive(factor):
        def run(v):
            return v if v > factor else run(v * factor)

        return run

    assert function_difference(recursive(2), recursive(2)) is None
    assert function_difference(recursive(2), recursive(3)) is not None


def test_checks_are_compared_by_their_texts():
    def checked(text):
        return jaxprtool.trace(lambda x: (checkify.check(x > 0, text, x), x)[1], jnp.float32(1))

    first, again, other = map(checked, ("{} is bad", "{} is bad", "{} is wrong"))
    jaxprtool.verify(first, again)
    with pytest.raises(jaxprtool.errors.CheckError, match="is bad against"):
        jaxprtool.verify(first, other)
