"""Possible nondeterminism is detected in the program, with its lines."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.compare.variants import risks

X, ROWS = jnp.ones(8), jnp.zeros(8, int)


def primitives(function, *args):
    return {each.primitive for each in risks(jaxprtool.trace(function, *args))}


def test_a_segment_sum_adds_in_any_order_on_a_gpu():
    (found,) = risks(jaxprtool.trace(lambda x, i: jax.ops.segment_sum(x, i, 3), X, ROWS))
    assert found.primitive == "scatter-add" and found.count == 1
    assert found.why.startswith("not deterministic on GPU")
    (line,) = found.lines
    assert line.startswith("tests/commands/compare/test_risks.py:")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.at[i].add(1.0, unique_indices=True),
        lambda x, i: i.at[i].add(1),  # sums of integers do not depend on the order
        lambda x, i: x.at[3].add(1.0),
        lambda x, i: x.at[i[0]].set(1.0),
        lambda x, i: (x.sum(), jnp.sort(x), x @ x, jax.debug.print("{}", x)),
    ],
)
def test_other_equations_are_no_risk(function):
    assert primitives(function, X, ROWS) == set()


def test_writes_to_the_same_element_may_come_in_any_order_on_a_gpu():
    assert primitives(lambda x, i: x.at[i].set(x), X, ROWS) == {"scatter"}


def test_overlapping_windows_are_added_in_any_order_on_a_gpu():
    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3,), (1,), "VALID").sum()

    assert primitives(jax.grad(pooled), X) == {"select_and_scatter_add"}


def test_callbacks_with_results_are_named_also_inside_loops():
    def stepped(x):
        def body(carry, _):
            return carry + jax.pure_callback(lambda: 1.0, jax.ShapeDtypeStruct((), x.dtype)), None

        return jax.lax.scan(body, x, None, length=2)[0]

    assert primitives(stepped, X) == {"pure_callback"}


def test_an_unstable_sort_that_moves_other_values_is_named():
    def sort(x, i):
        return jax.lax.sort((x, i), num_keys=1, is_stable=False)

    assert primitives(sort, X, ROWS) == {"sort"}
    assert primitives(lambda x, i: jax.lax.sort((x, i), is_stable=True), X, ROWS) == set()


@pytest.mark.parametrize("kind, named", [("rbg", {"random_bits"}), ("threefry2x32", set())])
def test_random_generators_of_the_backend_are_named(kind, named):
    key = jax.random.key(0, impl=kind)
    assert primitives(lambda key: jax.random.uniform(key, (3,)), key) == named


def test_sums_over_devices_are_named():
    def total(x):
        return jax.lax.psum(x, "i"), jax.lax.pmax(x, "i")

    program = jaxprtool.trace(total, X, axis_env=[("i", 2)])
    (found,) = risks(program)
    assert "psum" in found.primitive and "rounds differently" in found.why
