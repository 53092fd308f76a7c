"""Batched cond and switch: when they are kept, what is selected otherwise, and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxprtool import jaxcompat
from jaxprtool.ir.regions import Cond, sub_jaxprs, view
from jaxprtool.passes.mapping.batch import BatchUnsupported
from tests.programs.beside import batched, prove
from tests.programs.recorder import record

RNG = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, W, S, FLAG, INDEX = array(4), array(4, 4), jnp.float32(0.7), jnp.array(True), jnp.int32(1)
WAYS = [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 1, 2), (None, 1, 1)]


def count(program, name: str) -> int:
    def inside(jaxpr):
        own = sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
        return own + sum(inside(body) for eqn in jaxpr.eqns for _, body in sub_jaxprs(eqn))

    return inside(program.jaxpr)


# --- kept or replaced by selects ------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", WAYS)
def test_a_switch_is_mapped_over_any_of_its_operands_at_any_axis(in_axes):
    def three(i, x, w):
        branches = [lambda x, w: (x, w), lambda x, w: (x @ w, w.T), lambda x, w: (x * 2, w)]
        return lax.switch(i, branches, x, w)

    order = int(in_axes in ((0, 0, 0), (0, 1, 2)))
    outcome = prove(three, INDEX, X, W, in_axes=in_axes, derivatives=order)
    stays = any(isinstance(view(eqn), Cond) for eqn in outcome.program.jaxpr.eqns)
    assert stays == (in_axes[0] is None)


@pytest.mark.parametrize("in_axes", WAYS)
def test_a_cond_is_mapped_over_any_of_its_operands_at_any_axis(in_axes):
    def two(p, x, w):
        return lax.cond(p, lambda x, w: (w.T, x, 1.0), lambda x, w: (w, x, 2.0), x, w)

    order = {(0, 0, 0): 2, (0, None, None): 1}.get(in_axes, 0)
    prove(two, FLAG, X, W, in_axes=in_axes, derivatives=order)


@pytest.mark.parametrize("index", [-3, 0, 2, 7])
def test_an_index_out_of_range_selects_the_nearest_branch(index):
    def three(i, x):
        return lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x)

    prove(three, jnp.int32(index), X, derivatives=0)


def test_a_cond_whose_branches_differ_in_mapped_results():
    def mixed(p, x, y):
        return lax.cond(p, lambda x, y: (x, y, 1.0), lambda x, y: (y, y, 1.0), x, y)

    for in_axes in ((None, 0, None), (None, None, 0)):
        prove(mixed, FLAG, X, X + 1, in_axes=in_axes, derivatives=0)


@pytest.mark.proof
def test_conds_in_loops_and_in_conds():
    def looped(p, x, w):
        def body(c, r):
            return lax.cond(r[0] > 0, lambda c: c * r, lambda c: c - 1.0, c), p

        return lax.scan(body, x, w)

    def nested(x, n):
        def inner(x):
            return lax.cond(x[0] > 0, jnp.sin, lambda x: x / 3.0, x)

        return lax.cond(n > 0, inner, lambda x: lax.scan(lambda c, y: (c + n, y), 0.0, x)[1], x)

    for in_axes in ((0, 0, 0), (None, None, 0), (0, 1, 2)):
        prove(looped, FLAG, X, W, in_axes=in_axes, derivatives=in_axes == (0, 0, 0))
    for in_axes in ((0, 0), (0, None), (None, 0)):
        prove(nested, X, S, in_axes=in_axes, derivatives=in_axes == (0, 0))


@pytest.mark.proof
def test_a_platform_dependent_cond_is_kept():
    def by_platform(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    prove(by_platform, X)
    prove(lambda x: jax.vmap(by_platform)(x), W)


# --- selects --------------------------------------------------------------------------------------


def test_only_operands_with_a_derivative_are_selected_before_a_branch():
    def floats_and_ints(p, x, n):
        return lax.cond(p, lambda x, n: x * n, lambda x, n: x + n, x, n)

    outcome = prove(floats_and_ints, FLAG, X, jnp.arange(4))
    assert count(outcome.program, "select_n") == 3  # one for x in each branch, one for the result


def test_pass_through_results_of_both_branches_are_not_selected():
    def passed_on(p, x, w):
        return lax.cond(p, lambda x, w: (x, w), lambda x, w: (x, w.T), x, w)

    outcome = prove(passed_on, FLAG, X, W)
    # one for w, which one branch transposes, and one for the second result
    assert count(outcome.program, "select_n") == 2


def test_an_unmapped_operand_without_a_derivative_stays_unmapped():
    def looked_up(p, x, table):
        return lax.cond(p, lambda x, t: x * t.sum(), lambda x, t: x, x, table)

    program = batched(looked_up, FLAG, X, jnp.arange(12), in_axes=(0, 0, None))
    shapes = [v.aval.shape for eqn in program.jaxpr.eqns for v in eqn.outvars]
    assert (3, 12) not in shapes


@pytest.mark.proof
def test_the_index_is_broadcast_once_for_each_shape():
    def two(p, x):
        return lax.cond(p, lambda x: (jnp.sin(x), x), lambda x: (jnp.cos(x), x * 2), x)

    assert count(prove(two, FLAG, X).program, "broadcast_in_dim") == 1


def test_pass_through_operands_are_broadcast_once_for_all_results():
    def passed_on(p, x, y):
        return lax.cond(p, lambda x, y: (x, x, x), lambda x, y: (y, y, y), x, y)

    ints = jnp.arange(4)
    outcome = prove(passed_on, FLAG, ints, ints + 1, in_axes=(0, None, None), derivatives=0)
    assert count(outcome.program, "broadcast_in_dim") == 3  # both, and the flag


@pytest.mark.proof
def test_random_keys_and_empty_branches():
    def drawn(p, x):
        key = jax.random.key(0)
        return lax.cond(p, lambda k, x: jax.random.normal(k, (4,)) * x, lambda k, x: x, key, x)

    prove(drawn, FLAG, X)
    prove(lambda p, x: lax.cond(p, lambda: (1.0, 2, x), lambda: (2.0, 2, x)), FLAG, X)


# --- derivatives and effects --------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("branches", [2, 3])
def test_a_branch_that_is_not_taken_does_not_affect_the_gradient(branches):
    def root(x):
        safe = [lambda x: x * 0.0, jnp.sqrt, lambda x: x * 2][:branches]
        return lax.switch((x > 0).astype(jnp.int32), safe, x)

    program = batched(root, S)
    xs = jnp.array([-1.0, 0.0, 4.0])
    (gradient,) = jax.grad(lambda x: sum(jaxcompat.jaxpr_as_fun(program.jaxpr)(x)[0]), (0,))(xs)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 0.25])
    prove(root, S, derivatives=2)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_prints_in_branches_are_those_of_jax(in_axes):
    def printed(x, n):
        def branch(x):
            jax.debug.print("{}", x)
            return x

        return lax.cond(n > 0, branch, lambda x: x * 2, x)

    prove(printed, X, S, in_axes=in_axes, derivatives=0)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_effect_in_a_branch_happens_once_per_batch_element_as_in_jax(ordered):
    def fun(i, n, x):
        def branch(n, x):
            jax.debug.callback(lambda n: record(1, ordered, n), n, ordered=ordered)
            jax.debug.callback(lambda: record(2, ordered, 0), ordered=ordered)
            return n + 1, x

        return lax.switch(i, [branch, lambda n, x: (n, x), lambda n, x: (n - 1, x * 2)], n, x)

    for in_axes in [(0, None, 0), (0, None, None), (None, None, 0)]:
        outcome = prove(fun, INDEX, INDEX, S, in_axes=in_axes, derivatives=0)
        assert outcome.how.startswith("the same")


def test_callbacks_and_writes_in_branches_are_refused():
    def with_callback(p, x):
        def branch(x):
            io_callback(lambda v: None, None, x)
            return x

        return lax.cond(p, branch, lambda x: x, x)

    def with_ref(p, x):
        ref = jax.new_ref(x)

        def branch(x):
            ref[...] = x
            return x

        return lax.cond(p, branch, lambda x: x, x), ref[...]

    for fun, reason in ((with_callback, "IO effect"), (with_ref, "State effect")):
        with pytest.raises(BatchUnsupported, match=rf"cond at .*{reason} not supported in vmap"):
            batched(fun, FLAG, X)
