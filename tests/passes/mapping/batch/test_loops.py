"""Batched scan and while: the batched carries, their axes, and the cost compared with JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxprtool.ir.regions import Scan, While, view
from jaxprtool.passes.mapping.batch import BatchUnsupported
from tests.programs.beside import batched, prove

RNG = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, W, XS, S = array(4), array(4, 4), array(5, 4), jnp.float32(0.7)

#: For two or three operands: the mapped ones, and their axes.
WAYS = [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (1, 2, 1), (1, 1, 2)]


def loop_of(program):
    (loop,) = [v for eqn in program.jaxpr.eqns if isinstance(v := view(eqn), Scan | While)]
    return loop


# --- scan ---------------------------------------------------------------------------------------


def recurrent(c, w, xs):
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), (c, x * 2)), c, xs)


@pytest.mark.parametrize("in_axes", WAYS)
def test_a_scan_is_mapped_over_any_of_its_operands_at_any_axis(in_axes):
    prove(recurrent, X, W, XS, in_axes=in_axes, derivatives=2 * (in_axes == (0, 0, 0)))


@pytest.mark.proof
def test_a_reversed_and_unrolled_scan_stays_one():
    def backwards(c, xs):
        return lax.scan(lambda c, x: (c * x, c.sum()), c, xs, reverse=True, unroll=2)

    outcome = prove(backwards, X, XS)
    loop = loop_of(outcome.program)
    assert (loop.reverse, loop.unroll, loop.length) == (True, 2, 5)


@pytest.mark.parametrize("in_axes", [(0, 0), (2, 3), (1, 1)])
def test_the_stack_and_the_carry_of_a_scan_may_be_mapped_at_any_axis(in_axes):
    def products(c, ws):
        return lax.scan(lambda c, w: (jnp.tanh(w @ c), c), c, ws)

    prove(products, W, array(3, 4, 4), in_axes=in_axes, derivatives=in_axes == (2, 3))


def test_the_stack_and_the_constant_of_a_scan_may_be_mapped_at_their_last_axis():
    def filtered(xs, k):
        return lax.scan(lambda c, x: (c + x @ k, (x @ k).sum(0)), jnp.zeros((4, 3)), xs)

    prove(filtered, array(6, 4, 3), array(3, 3), in_axes=(3, 2), derivatives=0)


def test_swapping_carries_of_a_scan_does_not_swap_dimensions():
    def swapped(x):
        return lax.scan(lambda c, _: ((c[1], c[0]), c[0]), (x, jnp.ones_like(x)), None, length=3)

    for axis in (0, 1, 2):
        prove(swapped, XS, in_axes=axis, derivatives=0)


@pytest.mark.proof
def test_a_mapped_carry_maps_others_one_iteration_after_another():
    def shifted(x):
        first = (S, S, S, x[0])
        return lax.scan(lambda c, _: ((jnp.float32(0), *c[:-1]), c[-1]), first, None, length=5)

    def spread(x):
        return lax.scan(lambda c, _: ((c[0], c[0] * 2, c[1]), c[2]), (x, S, S), None, length=5)

    prove(shifted, X)
    outcome = prove(spread, S)
    assert all(v.aval.shape == (3,) for v in loop_of(outcome.program).carry_outs)


def test_unmapped_carries_stay_unmapped():
    def counted(x):
        return lax.scan(lambda c, _: ((c[0] + 1, c[1] * x), c[0]), (0, 1.0), None, length=4)

    program = batched(counted, X[0])
    loop = loop_of(program)
    assert [v.aval.shape for v in (*loop.carry_outs, *loop.ys)] == [(), (3,), (4,)]


def test_scans_of_length_zero_and_without_operands():
    def empty(c, x):
        return lax.scan(lambda c, a: (c + a.sum(), a * c), c, jnp.zeros((0, 4)) + x)

    prove(empty, S, X)
    prove(lambda x: lax.scan(lambda c, _: (c, None), x, None, length=2), X)


def test_loops_of_jax_numpy_and_lax():
    prove(lambda x: lax.associative_scan(jnp.multiply, x), XS, derivatives=0)
    prove(lambda x: (lax.map(jnp.sum, x), lax.map(jnp.sin, x, batch_size=2)), XS, derivatives=0)
    prove(lambda x: jnp.cumsum(x) + jnp.polyval(x, 2.0), X, derivatives=0)


@pytest.mark.proof
def test_a_scan_that_is_split_when_it_is_transposed():
    def split(c, xs):
        return lax.scan(lambda c, x: (jnp.sin(c) * x, c), c, xs, _split_transpose=True)

    prove(split, X, XS)


def test_a_gradient_of_a_scan():
    def loss(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(w @ c), None), x, None, length=3)[0].sum()

    for in_axes in ((0, 0), (0, None), (1, 2)):
        prove(jax.grad(loss, (0, 1)), X, W, in_axes=in_axes, derivatives=0)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_scans_with_prints_and_refs(in_axes):
    def with_effects(x, n):
        ref = jax.new_ref(x * 1.0)

        def body(c, y):
            jax.debug.print("{}", c + n)
            ref[...] = ref[...] * y + n
            return c + y, ref[0]

        return lax.scan(body, 0.0, x), ref[...]

    prove(with_effects, X, S, in_axes=in_axes, derivatives=0)


def test_a_scanned_ref_is_not_transposed():
    def over_ref(x):
        ref = jax.new_ref(x)

        def body(i, c):
            ref[i] = ref[i] * 2
            return c + ref[i]

        return lax.fori_loop(0, 5, body, jnp.zeros(4)), ref[...]

    prove(over_ref, XS, in_axes=0, derivatives=0)


def test_the_time_of_nested_scans_is_not_exponential_in_their_depth():
    calls = []

    def nested(depth):
        def body(c, x):
            if depth == 0:
                return c @ x.T, c.T
            return lax.scan(nested(depth - 1), c.T, jnp.stack([x, x.T]))[0], c

        return body

    from jaxprtool.passes.mapping.batch import body as engine

    run = engine.BatchBodyBuilder.body

    def counting(self, *args):
        calls.append(1)
        return run(self, *args)

    counts = []
    for depth in (2, 4, 8):
        calls.clear()
        engine.BatchBodyBuilder.body = counting
        try:
            batched(nested(depth), W, W, in_axes=(1, 2))
        finally:
            engine.BatchBodyBuilder.body = run
        counts.append(len(calls))
    assert counts[2] < 3 * counts[1], counts


# --- while --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (0, 1)])
def test_a_mapped_predicate_masks_finished_batch_elements(in_axes):
    def grown(n, x):
        def body(c):
            return c[0] * 1.5 + 0.1, jnp.sin(c[1]) + n

        return lax.while_loop(lambda c: c[0] < jnp.abs(n) * 3, body, (0.0, x))

    prove(grown, S, X, in_axes=in_axes, derivatives=in_axes == (0, 0))


def test_an_unmapped_predicate_and_its_operands_stay_unmapped():
    def powers(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))

    outcome = prove(powers, X, in_axes=1)
    loop = loop_of(outcome.program)
    assert [v.aval.shape for v in loop.outs] == [(), (3, 4)]
    assert loop.cond.outvars[0].aval.shape == ()


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (3, 0), (1, 0)])
def test_carries_of_a_while_may_be_mapped_at_any_axis(in_axes):
    def products(w, n):
        def body(c):
            return jnp.tanh(c[0] @ w[0].T @ w[1] * n), c[1].T, c[2] + 1

        return lax.while_loop(lambda c: c[2] < 3, body, (w[0], w[0] @ w[1].T, 0))

    prove(products, array(2, 3, 4), S, in_axes=in_axes, derivatives=in_axes == (3, 0))


@pytest.mark.proof
def test_a_while_that_is_already_batched():
    def masked(x):
        def one(y):
            start = jnp.abs(y) + jnp.abs(x) + 0.1
            return lax.while_loop(lambda c: jnp.sum(c) < 3.0, lambda c: c * 2.0, start)

        return jax.vmap(one)(jnp.arange(3.0))

    def with_a_predicate_of_a_rank(x):
        def one(y):
            start = jnp.abs(y) + 0.1, y * x, y
            body = lambda c: (c[0] * 2.0, c[1] * x, c[2] + 1)  # noqa: E731
            return lax.while_loop(lambda c: c[0] < 3.0, body, start)

        return jax.vmap(one)(jnp.arange(3.0))

    prove(masked, S)
    prove(with_a_predicate_of_a_rank, S)
    prove(with_a_predicate_of_a_rank, X, in_axes=1, derivatives=0)


def test_nested_whiles():
    def nested(w, n):
        def body(c):
            i, x = c
            inner = lax.while_loop(lambda d: jnp.sum(d) < n * 2, lambda d: jnp.abs(d) * 2 + 0.1, x)
            return i + 1, inner

        return lax.while_loop(lambda c: c[0] < 2, body, (0, jnp.abs(w)))

    for in_axes in ((0, 0), (None, 0), (2, None)):
        prove(nested, W, S, in_axes=in_axes, derivatives=0)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_fori_loops_with_known_and_with_mapped_bounds(in_axes):
    def known(x, c):
        return lax.fori_loop(0, 4, lambda i, c: c * jnp.sin(c) + x[i], c)

    def mapped(n, x):
        return lax.fori_loop(0, n, lambda i, c: c * 2 + x[i % 4], 0.5)

    order = int(in_axes == (0, 0))
    prove(known, X, S, in_axes=in_axes, derivatives=order)
    prove(mapped, jnp.int32(4), X, in_axes=in_axes, derivatives=order)


def test_callbacks_in_a_while_are_batched_as_in_jax():
    def loop(x, n, ordered=False):
        def body(c):
            io_callback(lambda v: None, None, c[1], ordered=ordered)
            return c[0] + 1, c[1] * 2

        return lax.while_loop(lambda c: c[0] < n, body, (0.0, x))

    prove(loop, X, S, in_axes=(0, None))
    with pytest.raises(BatchUnsupported, match="Unordered IO effects not supported in while_loop"):
        batched(loop, X, S)
    with pytest.raises(BatchUnsupported, match=r"while at .*Ordered IO effects not supported"):
        batched(lambda x: loop(x, 2.0, ordered=True), X)
