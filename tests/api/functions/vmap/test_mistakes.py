"""Mistakes of users: `vmap` raises the same as `jax.vmap`, with a similar message."""

from collections import OrderedDict, namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_both_raise

Pair = namedtuple("Pair", "a b")
INTEGERS = VECTOR.astype(int)
OBJECT = object()


def generator(x):
    yield x


def leaked(v, use):
    held = []
    v(lambda x: held.append(x) or x)(VECTOR)
    return use(held[0])


FUNCTIONS = {
    "a number": lambda v: v(3),
    "a name": lambda v: v("f"),
    "None": lambda v: v(None),
    "an array": lambda v: v(MATRIX),
    "a generator": lambda v: v(generator),
    "a partial of a generator": lambda v: v(partial(generator))(VECTOR),
    "what gives a generator": lambda v: v(lambda x: generator(x))(VECTOR),
    "a static method": lambda v: v(staticmethod(abs)),
    "a class method": lambda v: v(classmethod(abs)),
    "no function": lambda v: v(),
    "an unknown option": lambda v: v(abs, axis=0),
    "too many options": lambda v: v(abs, 0, 0, None, None, None, False, 1),
}

IN_AXES = {
    "a word": lambda v: v(abs, in_axes="0"),
    "an integer of NumPy's": lambda v: v(abs, in_axes=np.int32(0)),
    "an integer of NumPy's in a tuple": lambda v: v(abs, in_axes=(np.int64(0),)),
    "an array": lambda v: v(abs, in_axes=jnp.int32(0)),
    "a traced value": lambda v: jax.jit(lambda i: v(abs, in_axes=i)(VECTOR))(0),
    "a set": lambda v: v(abs, in_axes={0}),
    "a range": lambda v: v(abs, in_axes=range(1)),
    "an iterator": lambda v: v(abs, in_axes=iter((0,))),
    "a named tuple": lambda v: v(lambda a, b: a, in_axes=Pair(0, 0))(VECTOR, VECTOR),
    "a list in the list": lambda v: v(lambda a: a, in_axes=[[0, 0]])((VECTOR, VECTOR)),
    "a dict of another order": lambda v: v(abs, in_axes=(OrderedDict(a=0),))({"a": VECTOR}),
    "more entries": lambda v: v(lambda x: x, in_axes=(0, 0))(VECTOR),
    "no entries": lambda v: v(lambda x: x, in_axes=())(VECTOR),
    "none mapped": lambda v: v(lambda x: x, in_axes=(None,))(VECTOR),
    "an axis too high": lambda v: v(lambda x: x, in_axes=2)(MATRIX),
    "an axis for None": lambda v: v(lambda x: x, in_axes=((0, 0),))((VECTOR, None, 1)),
}

OUT_AXES = {
    "a word": lambda v: v(abs, out_axes="x"),
    "an integer of NumPy's": lambda v: v(abs, out_axes=np.int32(0)),
    "a list for a tuple": lambda v: v(lambda x: (x, x), out_axes=[0, 0])(VECTOR),
    "a tuple for an array": lambda v: v(lambda x: x, out_axes=(0,))(VECTOR),
    "a tuple for None": lambda v: v(lambda x: None, out_axes=(0,))(VECTOR),
    "a dict for an array": lambda v: v(lambda x: x, out_axes={})(VECTOR),
    "more entries": lambda v: v(lambda x: (x, x), out_axes=(0, 0, 0))(VECTOR),
    "no entries": lambda v: v(lambda x: (x, x), out_axes=())(VECTOR),
    "too high": lambda v: v(lambda x: x, out_axes=1)(VECTOR),
    "too low": lambda v: v(lambda x: x, out_axes=-2)(VECTOR),
}

SIZES = {
    "of a keyword argument": lambda v: v(lambda x, y: x)(VECTOR, y=MATRIX.T),
    "two, and another asked for": lambda v: v(lambda x, y: x, axis_size=5)(VECTOR, MATRIX.T),
    "a word": lambda v: v(lambda x: x, axis_size="3")(VECTOR),
    "none of lanes that are there": lambda v: v(lambda x: x, axis_size=0)(VECTOR),
    "negative": lambda v: v(lambda: jnp.ones(2), axis_size=-1)(),
    "a fraction": lambda v: v(lambda: jnp.ones(2), axis_size=2.5)(),
    "traced": lambda v: jax.jit(lambda n: v(lambda x: x, axis_size=n)(VECTOR))(3),
}

ARGUMENTS = {
    "no arguments": lambda v: v(lambda: 1)(),
    "a scalar by name": lambda v: v(lambda x, y: x)(VECTOR, y=2.0),
    "a word by name": lambda v: v(lambda x, y: x)(VECTOR, y="s"),
    "an object": lambda v: v(lambda x: x)([OBJECT]),
    "words in an array": lambda v: v(lambda x: x)(np.array(["a", "b"])),
    "objects in an array": lambda v: v(lambda x: x)(np.array([object()])),
    "one key": lambda v: v(lambda k: k)(jax.random.key(0)),
    "keys of a dict that have no order": lambda v: v(lambda x: x)({1: VECTOR, "a": VECTOR}),
    "one ref twice": lambda v: v(lambda a, b: a[...])(*[jax.new_ref(MATRIX)] * 2),
    "a view of a ref": lambda v: jax.jit(lambda r: v(lambda a: a)(r.at[0]))(jax.new_ref(MATRIX)),
    "too many for the function": lambda v: v(lambda x: x)(VECTOR, VECTOR),
    "too few for the function": lambda v: v(lambda x, y: x)(VECTOR),
    "an unknown name": lambda v: v(lambda x: x)(VECTOR, z=VECTOR),
}

RESULTS = {
    "an object": lambda v: v(lambda x: OBJECT)(VECTOR),
    "a class": lambda v: v(lambda x: int)(VECTOR),
    "objects in an array": lambda v: v(lambda x: np.array([object()]))(VECTOR),
    "a dict without an order": lambda v: v(lambda x: {1: x, "a": x})(VECTOR),
}

INSIDE = {
    "a truth": lambda v: v(lambda x: 1 if x > 0 else 2)(VECTOR),
    "an int": lambda v: v(int)(VECTOR),
    "a float": lambda v: v(float)(VECTOR),
    "an index": lambda v: v(lambda i: [1, 2, 3][i])(INTEGERS),
    "a range": lambda v: v(lambda n: list(range(n)))(INTEGERS),
    "an array of NumPy's": lambda v: v(np.asarray)(VECTOR),
    "a function of NumPy's": lambda v: v(np.sin)(VECTOR),
    "an item": lambda v: v(lambda x: x.item())(VECTOR),
    "a list": lambda v: v(lambda x: x.tolist())(MATRIX),
    "a length": lambda v: v(len)(VECTOR),
    "assignment": lambda v: v(lambda x: x.__setitem__(0, 1))(MATRIX),
    "a shape": lambda v: v(jnp.zeros)(INTEGERS),
    "a mask": lambda v: v(lambda x: x[x > 1])(MATRIX),
    "shapes that differ": lambda v: v(lambda x: x + jnp.ones(3))(MATRIX),
    "an axis that is mapped away": lambda v: v(lambda x: x.sum(1))(MATRIX),
    "a carry of another type": lambda v: v(
        lambda x: lax.scan(lambda c, _: (c.astype(int), c), x, length=2)
    )(VECTOR),
    "a static argument": lambda v: v(jax.jit(lambda x: x, static_argnums=0))(VECTOR),
    "the gradient of an array": lambda v: v(jax.grad(lambda x: x))(MATRIX),
    "an unknown axis": lambda v: v(lambda x: lax.psum(x, "j"))(VECTOR),
    "a leaked value": lambda v: leaked(v, jnp.sin),
    "a leaked value, added to": lambda v: leaked(v, lambda x: x + 1),
}

TABLES = (FUNCTIONS, IN_AXES, OUT_AXES, SIZES, ARGUMENTS, RESULTS, INSIDE)


@pytest.mark.parametrize(
    "mistake", [pytest.param(action, id=name) for table in TABLES for name, action in table.items()]
)
def test_the_error_is_that_of_jax_vmap(mistake):
    theirs, ours = assert_both_raise(mistake)
    assert ours[:40] == theirs[:40]


def test_a_traced_size_is_refused():
    _, ours = assert_both_raise(lambda v: jax.jit(lambda n: v(lambda: 1.0, axis_size=n)())(3))
    assert ours.startswith("axis_size must be an integer, but got ")
