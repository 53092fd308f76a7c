"""Trees of axes, sizes, registered types; errors have JAX's wording."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.interpreters import batching

from jaxprtool import vmap
from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_alike, assert_both_raise

TREES = {
    "one argument": (lambda x: jnp.sin(x) * 2, (MATRIX,), {}),
    "another axis": (lambda x: x[::-1], (MATRIX,), {"in_axes": 1, "out_axes": 1}),
    "negative axes": (lambda x: x, (MATRIX[:2],), {"in_axes": -1, "out_axes": -2}),
    "axes in a list": (lambda x, y: x + y, (MATRIX, MATRIX.T), {"in_axes": [0, 1]}),
    "trees of axes": (
        lambda d, y: {"a": [d["p"], y], "b": d["q"]},
        ({"p": MATRIX, "q": VECTOR}, 2.0),
        {"in_axes": ({"p": 1, "q": None}, None), "out_axes": {"a": [1, None], "b": 0}},
    ),
    "None in the trees": (lambda t, u: (t, u), ((VECTOR, None, {"a": ()}), None), {}),
    "no result": (lambda x: None, (VECTOR,), {}),
    "an unmapped result, broadcast": (
        lambda w, x: (w * 2, 3),
        (2.0, VECTOR),
        {"in_axes": (None, 0)},
    ),
    "an unmapped result, as it is": (
        lambda w, x: (w, w * 2, x),
        (2, VECTOR),
        {"in_axes": (None, 0), "out_axes": (None, None, 0)},
    ),
    "no mapped argument": (lambda x: x, (2.0,), {"in_axes": None, "axis_size": 3}),
    "no argument": (lambda: jnp.ones(2), (), {"axis_size": 4, "out_axes": 1}),
    "no lanes": (lambda x: x.sum(), (MATRIX[:0],), {}),
    "what is no array, unmapped": (lambda s, x: x * len(s), ("ab", VECTOR), {"in_axes": (None, 0)}),
    "numpy": (lambda x: (x, x * np.float64(2)), (np.arange(3),), {}),
    "a result twice": (lambda x: (x, x, x + 1), (MATRIX,), {"out_axes": (0, 1, -1)}),
    "keyword arguments": (lambda x, *, y: x + y, (MATRIX,), {"y": VECTOR}),
    "all in stars": (lambda *a, **k: (a, k), (VECTOR, MATRIX), {"z": VECTOR, "in_axes": 0}),
    "a partial": (partial(lambda n, x, flag: x**n + flag, 3, flag=1), (MATRIX,), {}),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_are_mapped_as_in_jax(name):
    fun, args, options = TREES[name]
    assert_alike(fun, *args, **options)


def test_an_unmapped_argument_is_returned_as_the_same_object():
    text = object()
    assert vmap(lambda t, x: t, in_axes=(None, 0), out_axes=None)(VECTOR, VECTOR) is VECTOR
    assert vmap(lambda x: x)(array := np.ones(3)) is array
    seen = []
    vmap(lambda t, n, x: seen.append((t, n)) or x, in_axes=(None, None, 0))(text, 3, VECTOR)
    assert seen == [(text, 3)] and type(seen[0][1]) is int


SAME_WORDS = {
    "sizes differ": lambda v: v(lambda x, y, z: x)(MATRIX, jnp.ones(2), VECTOR),
    "sizes differ in trees": lambda v: v(lambda x, *, c: x)({"k": MATRIX}, c=[jnp.ones(2)]),
    "sizes differ in stars": lambda v: v(lambda *xs: xs)(VECTOR, VECTOR, jnp.ones(2)),
    "another size is asked for": lambda v: v(lambda x: x, axis_size=7)(MATRIX),
    "no size": lambda v: v(lambda x: x, in_axes=None)(MATRIX),
    "rank too low": lambda v: v(lambda x: x)(2.0),
    "rank too low for the axis": lambda v: v(lambda x: x, in_axes=-3)(MATRIX),
    "not an axis": lambda v: v(lambda x: x, in_axes=0.5),
    "a bool": lambda v: v(lambda x: x, in_axes=(True,)),
    "a dict": lambda v: v(lambda x: x, in_axes={"a": 0}),
    "not an out axis": lambda v: v(lambda x: x, out_axes=("a", None)),
    "too few entries": lambda v: v(lambda x, y: x, in_axes=(0,))(MATRIX, MATRIX),
    "not JAX's argument": lambda v: v(lambda x: x)("s"),
    "not JAX's result": lambda v: v(lambda x: (x, "s"))(MATRIX),
    "mapped result": lambda v: v(lambda x: (x, [x, 1]), out_axes=(0, [None, None]))(MATRIX),
    "mapped result of a named axis": lambda v: v(lambda x: x, out_axes=None, axis_name="i")(MATRIX),
    "out of bounds": lambda v: v(lambda x: x, out_axes=3)(MATRIX),
    "out of bounds and unmapped": lambda v: v(lambda x: 1.0, out_axes=-2)(MATRIX),
}


@pytest.mark.parametrize("name", SAME_WORDS)
def test_errors_have_jaxs_message(name):
    theirs, ours = assert_both_raise(SAME_WORDS[name])
    assert ours == theirs


SAME_BEGINNING = {
    "not a prefix": (
        lambda v: v(lambda x: x, in_axes=((0, 0),))([MATRIX, MATRIX]),
        "vmap in_axes specification must be a tree prefix of the corresponding value; ",
    ),
    "no prefix of the results": (
        lambda v: v(lambda x: {"a": x}, out_axes={"b": 0})(MATRIX),
        "vmap out_axes specification must be a tree prefix of the corresponding value; ",
    ),
    "keyword arguments in in_axes": (
        lambda v: v(lambda x, y: x, in_axes=(0, 0))(MATRIX, y=MATRIX),
        "vmap in_axes must be an int, None, or a tuple of entries corresponding to the positional "
        "arguments passed to the function, but got len(in_axes)=2, len(args)=1",
    ),
    "nothing to map": (
        lambda v: v(lambda *x: 1)((), None),
        "vmap wrapped function must be passed at least one argument containing an array or "
        "axis_size must be specified, got empty ",
    ),
}


@pytest.mark.parametrize("name", SAME_BEGINNING)
def test_errors_start_like_jaxs(name):
    action, beginning = SAME_BEGINNING[name]
    theirs, ours = assert_both_raise(action)
    assert theirs.startswith(beginning) and ours.startswith(beginning)


# --- registered types ---------------------------------------------------------------------------


@dataclass
class Named:
    """An array with named dimensions, which is mapped by name."""

    names: tuple
    data: jax.Array


@dataclass(frozen=True)
class ByName:
    name: str
    place: int | None


def named_lane(cont, index, value, spec):
    names = list(value.names)
    assert names.pop(spec.place) == spec.name
    lane = cont(value.data, spec.place)
    return Named(tuple(names), lane) if names else (lane, index())


def named_from_lane(cont, size, lane, spec):
    values = cont(size, lane.data, spec.place)
    names = list(lane.names)
    if spec.place is not None:
        names.insert(spec.place, spec.name)
    assert values.ndim == len(names)
    return Named(tuple(names), values)


batching.register_vmappable(Named, ByName, int, named_lane, named_from_lane, None)


def test_registered_types_are_mapped_by_their_own_functions():
    named = Named(("i", "j"), MATRIX)

    def fun(x, y):
        return Named(x.names, jnp.sin(x.data)), Named((), y), Named((), jnp.float32(2)), y + 1

    outs = (ByName("k", 1), ByName("u", 0), ByName("v", 0), 0)
    results = [
        v(fun, in_axes=(ByName("i", 0), 0), out_axes=outs)(named, VECTOR) for v in (jax.vmap, vmap)
    ]
    for theirs, ours in zip(*results, strict=True):
        assert getattr(ours, "names", None) == getattr(theirs, "names", None)
        np.testing.assert_array_equal(
            getattr(ours, "data", ours), np.asarray(getattr(theirs, "data", theirs))
        )
    assert results[1][0].names == ("j", "k")


def test_registered_types_may_request_the_batch_index():
    row = Named(("i",), VECTOR)
    assert_alike(lambda pair: pair[0] * 10 + pair[1], row, in_axes=(ByName("i", 0),), axis_size=3)
    assert_both_raise(lambda v: v(lambda x: x, in_axes=(ByName("i", 0),))(VECTOR))
    assert_both_raise(lambda v: v(lambda x: x, out_axes=ByName("i", 0))(VECTOR))


def test_parts_of_registered_types_are_summed_if_requested_unmapped():
    def summed(v):
        return v(lambda x: Named((), x * 2), out_axes=ByName("k", None), sum_match=True)(VECTOR)

    theirs, ours = summed(jax.vmap), summed(vmap)
    assert ours == theirs == Named((), 6.0)


@pytest.mark.proof
def test_sparse_arrays_registered_by_jax():
    def batches(count):
        dense = jnp.arange(1.0, 9.0).reshape(count, -1, 2)
        return sparse.BCOO.fromdense(dense, n_batch=1), dense.shape

    stack, shape = batches(2)
    assert_alike(lambda m: m.todense(), stack)
    doubled = [v(lambda m: m * 2, out_axes=0)(stack).todense() for v in (jax.vmap, vmap)]
    assert (doubled[0] == doubled[1]).all() and doubled[1].shape == shape
