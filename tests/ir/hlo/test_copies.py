"""The copies that XLA inserts: what is copied, how often, and the lines that need it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.origins import inserted_copies
from tests.programs.modules import stored

X, ROWS = jnp.ones(1000), jnp.arange(50)
FILE = "tests/ir/hlo/test_copies.py"


@pytest.fixture(autouse=True)
def optimized():
    """Compile as users do: the tests disable most of XLA's optimizations."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


def copies(function, *args, **options):
    """Return the copies of arrays, after a check that the schedule alone gives them too."""
    module, assignment = vars(stored(function, *args, **options)).values()
    found, by_schedule = (
        [copy for copy in inserted_copies(module, a, frames_now()) if copy.type != "s32[]"]
        for a in (assignment, None)
    )
    assert [(c.operations, c.bytes, c.reason) for c in found] == [
        (c.operations, c.bytes, c.reason) for c in by_schedule
    ]
    return found


def line(function, below):
    return f"{FILE}:{function.__code__.co_firstlineno + below}"


def popped(x, rows):
    def pop(x, i):
        old = x[i]
        return x.at[i].set(0.0), old

    return lax.scan(pop, x, rows)


def test_a_copy_in_a_loop_is_made_in_each_iteration():
    carried, entered = copies(popped, X, ROWS)
    assert (carried.count, carried.runs, carried.bytes) == (2, 100, 100 * X.nbytes)
    assert (carried.kind, carried.value, carried.loop) == ("carry", "x", line(popped, 5))
    assert carried.reason == "overwritten" and carried.place == line(popped, 3)
    assert carried.written.endswith(f" at {line(popped, 3)}")
    assert (entered.kind, entered.value, entered.reason) == ("argument", "x", "not donated")
    assert (entered.runs, entered.bytes, entered.loop) == (1, X.nbytes, "")


def test_a_donated_argument_is_not_copied_before_a_loop():
    (carried,) = copies(popped, X, ROWS, donate_argnums=0)
    assert carried.kind == "carry"


def test_an_update_in_place_needs_no_copy():
    def steps(x, rows):
        return lax.scan(lambda x, i: (x.at[i].set(0.0), None), x * 2, rows)[0]

    assert copies(steps, X, ROWS) == []


def test_a_loop_of_unknown_length_counts_one_iteration():
    def steps(x, n):
        def step(i, pair):
            x, total = pair
            return x.at[i].set(0.0), total + x[i]

        return lax.fori_loop(0, n, step, (x * 2, 0.0))

    carried = next(copy for copy in copies(steps, X, 7) if copy.kind == "carry")
    assert carried.runs is None and carried.bytes == carried.count * X.nbytes == 2 * X.nbytes
    assert carried.value == f"mul at {line(steps, 5)}"


def test_a_result_that_is_an_argument_and_one_in_another_layout_are_copied():
    def both(x):
        return x, x.reshape(10, 100).T

    reasons = {copy.type: copy.reason for copy in copies(both, X)}
    assert reasons == {"f32[1000]": "returned", "f32[100,10]": "layout"}


def test_an_argument_that_is_updated_and_kept_is_copied():
    def updated(x, i):
        return x.at[i].set(0.0)

    (copy,) = copies(updated, X, 3)
    assert (copy.value, copy.reason, copy.place) == ("x", "not donated", line(updated, 1))
    assert copies(updated, X, 3, donate_argnums=0) == []


def test_a_carry_that_becomes_another_one_is_copied():
    def steps(x, y, rows):
        return lax.scan(lambda pair, i: ((pair[0] + 1, pair[0]), None), (x, y), rows)[0]

    found = [copy for copy in copies(steps, X, X, ROWS) if copy.kind == "carry"]
    assert [copy.runs for copy in found] == [50]
    assert found[0].written == f"add at {line(steps, 1)}"
