"""The first equation at which two variants differ is found, for planted faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.commands.compare.divergence import find_divergence
from jaxprtool.commands.compare.variants import Comparator, Tolerance, Variant

X = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def parted(right, wrong, *args, op_by_op=False, **tolerance):
    """Return where two functions differ on the same arguments."""
    first = Variant("right", jaxprtool.trace(right, *args))
    second = Variant("wrong", jaxprtool.trace(wrong, *args), op_by_op=op_by_op)
    flat = jax.tree.leaves(args)
    return find_divergence((first, second), (flat, flat), None, Tolerance(**tolerance))


def chain(factor):
    """Return a chain of a hundred equations, one of which multiplies by a given factor."""

    def f(x):
        for i in range(50):
            x = jnp.sin(x) * (factor if i == 47 else 1.5)
        return x, x.sum()

    return f


def test_the_first_of_many_equations_is_found_with_the_different_literal():
    found = parted(chain(1.5), chain(1.6), X)
    assert (found.found, found.strict, found.primitive) == (True, False, "mul")
    assert found.source.startswith("tests/commands/compare/test_divergence.py:")
    given, literal = found.operands
    assert given.equal and given.name.startswith("sin at ")
    assert literal.name == "a literal" and literal.absolute == pytest.approx(0.1)
    assert found.results[0].relative == pytest.approx(0.1 / 1.5, rel=1e-3)


@pytest.mark.proof
@pytest.mark.parametrize("narrow", [False, True])
def test_a_difference_in_a_literal_or_a_cast_is_named_before_equations_that_pass_it_on(narrow):
    def f(eps, dtype):
        def normalized(x, w):
            n = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
            y = (n.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
            return jnp.tanh((y @ w) @ w)

        return normalized

    rng = np.random.default_rng(0)
    args = [jnp.asarray(50 * rng.standard_normal((8, 16)), jnp.float32), jnp.eye(16) + 0.1]
    wrong = f(1e-5, jnp.bfloat16) if narrow else f(1e-2, jnp.float32)
    found = parted(f(1e-5, jnp.float32), wrong, *args, rtol=1e-6)
    assert found.primitive == ("dot_general" if narrow else "add")
    assert all(each.equal for each in found.operands if each.name != "a literal")


def test_equal_programs_have_no_difference():
    found = parted(chain(1.5), chain(1.5), X)
    assert not found.found and found.why == "every result is within tolerance"


def test_calls_and_the_taken_branch_are_searched():
    def f(factor):
        @jax.jit
        def inner(x):
            return jnp.cos(x) * factor

        def outer(x):
            return lax.cond(x.sum() > 0, lambda x: inner(x) + 1, lambda x: x, x)

        return outer

    found = parted(f(2.0), f(2.5), X)
    assert found.primitive == "mul"
    assert [each.split()[0] for each in found.path] == ["cond", "jit"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op_by_op", [False, True])
def test_the_iteration_of_a_scan_is_found_by_its_carry(reverse, op_by_op):
    def f(factor):
        def body(x, i):
            return jnp.where(i == 5, jnp.sin(x) * factor, jnp.cos(x)), None

        return lambda x: lax.scan(body, x, jnp.arange(16), reverse=reverse)[0]

    found = parted(f(1.0), f(1.5), X, op_by_op=op_by_op)
    assert found.iteration == (5,)  # the row, whichever comes first
    assert found.primitive == "mul" and found.path[0].startswith("scan at ")


@pytest.mark.proof
def test_the_iteration_of_a_scan_is_found_by_its_stacked_results():
    def f(factor):
        def body(x, row):
            return x, jnp.where(row[0] == 7, row * factor, row)

        return lambda xs: lax.scan(body, 0.0, xs, reverse=True)

    found = parted(f(1.0), f(1.5), np.arange(36.0, dtype=np.float32).reshape(12, 3) - 2)
    assert found.iteration == (3,)  # the row that starts with 7
    assert found.primitive == "mul" and found.operands[0].name == "xs"


def test_the_iteration_of_a_while_loop_is_found_and_its_condition_searched():
    def f(factor, most):
        def body(state):
            i, x = state
            return i + 1, jnp.where(i == 9, x * factor, jnp.cos(x))

        return lambda x: lax.while_loop(lambda state: state[0] < most, body, (0, x))

    found = parted(f(1.0, 20), f(1.5, 20), X)
    assert found.iteration == (9,) and found.primitive == "mul"
    longer = parted(f(1.0, 20), f(1.0, 21), X)
    assert longer.iteration == (20,) and longer.primitive == "lt"


def test_scans_of_other_lengths_or_directions_are_blamed_themselves():
    def f(length, reverse=False):
        def body(c, _):
            return c * 1.1, c

        return lambda x: lax.scan(body, x, None, length=length, reverse=reverse)[0]

    longer = parted(f(10), f(11), X)
    assert (longer.primitive, longer.parameters) == ("scan", ("length: 11 instead of 10",))

    def g(reverse):
        return lambda x: lax.scan(lambda c, i: (c * 1.1 + i, None), x, X, reverse=reverse)[0]

    backwards = parted(g(False), g(True), X)
    assert (backwards.primitive, backwards.iteration) == ("scan", ())
    assert backwards.parameters == ("reverse: True instead of False",)


@pytest.mark.parametrize("op_by_op", [False, True])
def test_the_iteration_of_a_loop_with_a_batched_predicate_is_found(op_by_op):
    def f(factor, most):
        def body(state):
            i, x = state
            return i + 1, jnp.where(i == 9, x * factor, jnp.cos(x))

        return jax.vmap(lambda i, x: lax.while_loop(lambda s: s[0] < most, body, (i, x)))

    starts, x = jnp.array([1, 3]), jnp.ones(2)
    found = parted(f(1.0, 20), f(1.5, 20), starts, x, op_by_op=op_by_op)
    # in the batch element that starts with 3
    assert (found.primitive, found.iteration) == ("mul", (6,))
    longer = parted(f(1.0, 20), f(1.0, 21), starts, x, op_by_op=op_by_op)
    assert longer.found and longer.iteration == (17,)


def test_a_literal_is_not_paired_with_an_array():
    found = parted(lambda x: x * 3 // 2, lambda x: x * 3 // 2 + (x > 2), jnp.arange(4))
    assert found.found and "gt" in {each.split()[0] for each in found.added}


@pytest.mark.proof
def test_a_nested_loop_has_two_iterations():
    def f(factor):
        def inner(x, j):
            return jnp.where((j == 2) & (x[0] > 1.4), x * factor, x + 0.1), None

        def outer(x, _):
            return lax.scan(inner, x, jnp.arange(4))[0] * 0.9, None

        return lambda x: lax.scan(outer, x, None, length=5)[0]

    found = parted(f(1.0), f(1.5), X)
    assert len(found.iteration) == 2 and found.iteration[1] == 2


def test_equations_that_only_one_program_has_are_blamed():
    def right(x):
        return jnp.cos(x / jnp.sqrt(x * x + 1.0))

    def wrong(x):
        return jnp.cos(x * lax.rsqrt(x * x + 1.0) * 1.01)

    found = parted(right, wrong, X)
    assert found.found and found.operands and all(each.within for each in found.operands)
    assert {each.split()[0] for each in found.added} & {"rsqrt", "mul"}


def test_arguments_correspond_by_position_and_results_may_be_arguments():
    found = parted(lambda x: (x, x + 1), lambda x: (x * 2, x + 1), X)
    assert found.found and found.results[0].relative == 1.0


def test_keys_integers_and_refs_are_compared_too():
    def f(shift):
        def g(key, x):
            ref = jax.new_ref(x)
            ref[...] += jax.random.randint(jax.random.split(key)[0], (8,), 0, 9) + shift
            return ref[...] * 2

        return g

    found = parted(f(0), f(1), jax.random.key(0), X)
    assert found.found and found.primitive in ("add", "mul")


def test_a_shard_map_is_one_equation():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def f(factor):
        return jax.shard_map(
            lambda x: jnp.sin(x) * factor, mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )

    assert parted(f(1.0), f(2.0), X).primitive == "shard_map"


def test_rounding_differences_are_found_only_by_the_strict_tolerance():
    def right(x):
        return x * 3.0

    def wrong(x):
        return x * np.float32(3.0000007)

    found = parted(right, wrong, X, rtol=1e-9, atol=1e-9)
    assert found.found and found.strict and found.primitive == "mul"


def test_errors_are_relative_to_the_largest_element_unless_strict():
    a, b = np.array([1000.0, 1e-6], np.float32), np.array([1000.0, 5e-6], np.float32)
    assert not Comparator(Tolerance()).differ(a, b)
    assert Comparator(Tolerance(), strict=True).differ(a, b)
    assert Comparator(Tolerance()).differ(a, np.array([1000.0, np.nan], np.float32))
    mask = np.array([True, False])
    assert not Comparator(Tolerance()).differ(mask, ~mask)
    assert Comparator(Tolerance()).differ(np.bool_(True), np.bool_(False))
