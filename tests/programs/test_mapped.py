"""The check of batch accepts JAX's own programs and detects each kind of fault."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool.loading.trace import trace
from tests.programs import mapped
from tests.programs.mapped import Cost, Mapping, cost, flat, mappings, prove_mapped, stacked, theirs

AT_0 = Mapping((0, None), (0, 0), 3)
ARGS = [jnp.arange(4.0), jnp.float32(2)]


def program():
    return flat(trace(lambda x, y: (jnp.sin(x) * y, y + 1), *ARGS))


def judged(monkeypatch, fun, mapping=AT_0):
    """Return the outcome if our pass returned the program of `fun`, of the mapped arguments."""
    result = flat(trace(fun, *mapping.stack(ARGS)))
    monkeypatch.setattr(mapped, "ours", lambda *_: result)
    return prove_mapped(program(), mapping, ARGS)


def test_the_program_of_jax_passes_as_the_same_program(monkeypatch):
    monkeypatch.setattr(mapped, "ours", lambda *args: theirs(*args)[0])
    for mapping in mappings(program(), random.Random(0), 8):
        outcome = prove_mapped(program(), mapping, ARGS)
        assert outcome.how == "the same program" and not outcome.is_worse


def test_another_program_of_the_same_values_passes_and_may_cost_more(monkeypatch):
    outcome = judged(monkeypatch, lambda x, y: (jnp.sin(x.T).T * y, jnp.broadcast_to(y + 1, (3,))))
    assert outcome.how == "the same bits"
    assert outcome.is_worse and outcome.ours.moved == outcome.theirs.moved + 2 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (lambda x, y: (jnp.sin(x) * y + 1e-3, jnp.broadcast_to(y + 1, (3,))), "results, "),
        (lambda x, y: (jnp.sin(x[::-1]) * y, jnp.broadcast_to(y + 1, (3,))), "results, "),
        (lambda x, y: (jnp.sin(x) * y, y + 1), "types of the results"),
        (lambda x, y: (jnp.sin(x) * y, jnp.ones(3, int) * 3), "types of the results"),
        (lambda x, y: (jnp.sin(x) * y, jax.debug.print("") or x[:, 0] * 0 + 3), "effects"),
    ],
)
def test_other_values_are_detected(monkeypatch, fun, message):
    with pytest.raises(AssertionError, match=message):
        judged(monkeypatch, fun)


def test_other_mapped_results_are_detected(monkeypatch):
    monkeypatch.setattr(mapped, "our_mapped_results", lambda *_: [True, True])
    with pytest.raises(AssertionError, match="mapped results"):
        prove_mapped(program(), AT_0, ARGS)


@pytest.mark.parametrize("raised", [None, TypeError("ours")])
def test_an_error_different_from_jaxs_is_detected(monkeypatch, raised):
    refused = replace(AT_0, out_axes=(None, None))
    with pytest.raises(ValueError, match="out_axes"):
        theirs(program(), refused)
    assert prove_mapped(program(), refused, ARGS).how == "raises ValueError, as JAX"

    def instead(program, mapping):
        if raised is None:
            return theirs(program, AT_0)[0]
        raise raised

    monkeypatch.setattr(mapped, "ours", instead)
    with pytest.raises(AssertionError, match=r"jax\.vmap raises"):
        prove_mapped(program(), refused, ARGS)


def test_an_error_where_jax_has_none_is_detected(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("sin")

    monkeypatch.setattr(mapped, "ours", refuse)
    with pytest.raises(AssertionError, match=r"jax\.vmap does not"):
        prove_mapped(program(), AT_0, ARGS)


def test_callbacks_are_compared(monkeypatch):
    def printed(x, y):
        return jax.debug.print("{}", x), (x, y)

    def shifted(x, y):
        return jax.debug.print("{}", x + 1), (x, y)

    before = flat(trace(printed, *ARGS))
    mapping = Mapping((0, 0), (0, 0), 2)
    result = theirs(flat(trace(shifted, *ARGS)), mapping)[0]
    monkeypatch.setattr(mapped, "ours", lambda *_: result)
    with pytest.raises(AssertionError, match="printed"):
        prove_mapped(before, mapping, ARGS)


def test_moved_bytes_are_multiplied_by_iterations():
    def moves(x):
        def body(c, _):
            return c.T + 0, lax.cond(c[0, 0] > 0, lambda: c.T, lambda: c)

        c, _ = lax.scan(body, x, None, length=5)
        return jax.jit(lambda c: jnp.broadcast_to(c, (2, 3, 3)))(c)

    jaxpr = jax.make_jaxpr(moves)(jnp.zeros((3, 3)))
    assert cost(jaxpr).moved == 4 * (5 * 9 + 5 * 9 + 18)
    assert cost(jax.make_jaxpr(lambda x: x + 1)(1.0)) == Cost(1, 0)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "x", [jnp.arange(3.0), jnp.arange(3), jnp.ones(3, bool), jnp.ones(3, int), jnp.int8(1), 2.5]
)
def test_batch_elements_start_with_the_example_and_differ(x, axis):
    axis = axis if jnp.ndim(x) else 0
    lanes = np.moveaxis(np.asarray(stacked(x, axis, 2)), axis, 0)
    np.testing.assert_array_equal(lanes[0], x)
    assert (lanes[1] != lanes[0]).any()
    assert stacked(x, axis, 0).size == 0
    assert stacked(x, axis, 2).dtype == jnp.asarray(x).dtype


def test_batch_elements_of_keys_are_keys():
    key = jax.random.key(3)
    lanes = stacked(key, 0, 2)
    assert lanes.dtype == key.dtype and lanes[0] == key and lanes[1] != key


def test_mappings_map_all_arguments_one_and_some():
    chosen = mappings(program(), random.Random(1), 40)
    assert chosen[0] == Mapping((0, 0), (0, 0), 2)
    assert sum(axis is not None for axis in chosen[1].in_axes) == 1
    assert {m.size for m in chosen} == {0, 1, 2, 3}
    assert {axis for m in chosen for axis in m.in_axes} >= {None, 0, 1, -1}
    assert {axis for m in chosen for axis in m.out_axes} >= {None, 0, 1, -1}
