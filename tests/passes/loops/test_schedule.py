"""sink and schedule reduce the live bytes, and keep values and the order of effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.regions import view
from jaxprtool.passes.loops.schedule import (
    Liveness,
    Schedule,
    Sink,
    _Scheduler,
    backward_order,
    depth_first,
    forward_order,
    sunk,
)
from tests.programs import Case, prove
from tests.share import first_and_proofs

X = jnp.arange(8.0)
ROW = 32  # the size of X in bytes

PASSES = pytest.mark.parametrize("transform", [Sink(), Schedule()], ids=["sink", "schedule"])


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def reordered(transform, fun, *args):
    """Return the program after a pass, which computes the same with no higher peak."""
    before, after, _ = prove(Case("case", fun, args), transform)
    assert sorted(names(before.jaxpr)) == sorted(names(after.jaxpr))
    assert transform(after).jaxpr is after.jaxpr
    old, new = Liveness().peak(before.jaxpr), Liveness().peak(after.jaxpr)
    assert new < old if after.jaxpr is not before.jaxpr else new == old
    return after


def early(a):
    """Compute five values in a row, each of which is read once, later."""
    parts = [jnp.sin(a), jnp.cos(a), jnp.tan(a), jnp.exp(a), jnp.tanh(a)]
    total = a
    for part in parts:
        total = total + part
    return total


# --- the model --------------------------------------------------------------------------------


def peak(fun, *args):
    return Liveness().peak(jax.make_jaxpr(fun)(*args))


def test_operands_and_results_of_an_equation_are_live_together():
    assert peak(lambda a: jnp.sin(a), X) == ROW
    assert peak(lambda a: jnp.sin(jnp.sin(jnp.sin(a))), X) == 2 * ROW
    assert peak(lambda a: jnp.sin(jnp.sin(a)).sum(), X) == 2 * ROW


def test_results_are_live_to_the_end_and_arguments_are_not_counted():
    assert peak(lambda a, b: (jnp.sin(a), jnp.cos(b), jnp.tan(a)), X, X) == 3 * ROW
    assert peak(lambda a, b: (a, b, 2.0), X, X) == 0


def test_an_unused_value_is_freed_at_once():
    assert peak(lambda a: (jnp.sin(a), jnp.cos(a), jnp.tan(a))[2], X) == ROW


def test_a_call_needs_the_peak_of_its_body_and_a_loop_also_its_results():
    inner = lambda a: jnp.sin(jnp.sin(a)).sum()  # noqa: E731
    assert peak(jax.jit(inner), X) == 2 * ROW
    loop = lambda a: lax.fori_loop(0, 3, lambda i, c: jnp.sin(jnp.sin(c)), a)  # noqa: E731
    body = 4 + 2 * ROW  # the counter, two rows
    assert peak(loop, X) == (4 + ROW) + body
    branches = [inner, lambda a: jnp.sin(jnp.sin(jnp.cos(a) * a)).sum()]
    assert peak(lambda i, a: lax.switch(i, branches, a), 0, X) == 4 + 2 * ROW


def test_symbolic_sizes_at_any_depth_have_no_known_peak():
    (n,) = jax.export.symbolic_shape("n")
    rows = jax.ShapeDtypeStruct((n,), jnp.float32)
    run = lambda a: (jax.jit(lambda b: jnp.sin(b).sum())(a), jnp.cos(3.0))  # noqa: E731
    assert peak(run, rows) is None
    program = jaxprtool.trace(run, rows)
    assert Schedule()(program).jaxpr is program.jaxpr


# --- the passes -------------------------------------------------------------------------------


@PASSES
def test_values_are_computed_just_before_their_use(transform):
    after = reordered(transform, early, X)
    assert peak(early, X) == 6 * ROW
    assert Liveness().peak(after.jaxpr) == 3 * ROW


@PASSES
def test_an_order_that_cannot_be_improved_is_the_same_object(transform):
    def run(a):
        first = jnp.sin(a)
        return jnp.cos(first) * first, jnp.exp(a)

    program = jaxprtool.trace(run, X)
    assert transform(program).jaxpr is program.jaxpr


@PASSES
@pytest.mark.parametrize(
    "wrap",
    first_and_proofs(
        [
            jax.jit,
            jax.checkpoint,
            lambda f: lambda a: lax.scan(lambda c, r: (f(c) + r, c), a, jnp.stack([a, a])),
            lambda f: lambda a: lax.while_loop(lambda c: c[0] < 1, f, a),
            lambda f: lambda a: lax.cond(a[0] > 1, f, jnp.sin, a),
        ]
    ),
    ids=["jit", "remat", "scan", "while", "cond"],
)
def test_bodies_are_reordered_too(transform, wrap):
    after = reordered(transform, wrap(early), X)
    before = jaxprtool.trace(wrap(early), X)
    assert after.jaxpr is not before.jaxpr
    assert Liveness().peak(after.jaxpr) <= Liveness().peak(before.jaxpr) - 3 * ROW


def test_a_shared_body_stays_shared():
    inner = jax.jit(early)
    after = reordered(Schedule(), lambda a: inner(inner(a)), X)
    first, second = (jaxcompat.open_jaxpr(view(e).body) for e in after.jaxpr.eqns)
    assert first is second


@pytest.mark.proof
def test_a_call_with_a_large_peak_runs_while_little_else_is_live():
    def hungry(a):
        big = jnp.outer(a, a)
        return (big @ big).sum()

    def run(a):
        parts = [jnp.sin(a), jnp.cos(a), jnp.tan(a)]
        total = jax.jit(hungry)(a)
        return parts[0] + parts[1] * parts[2] + total

    after = reordered(Schedule(), run, X)
    assert names(after.jaxpr)[0] == "jit"


@pytest.mark.proof
def test_values_that_free_more_than_they_need_are_computed_at_once():
    def run(a):
        bigs = [jnp.outer(f(a), a) for f in (jnp.sin, jnp.cos, jnp.tan)]
        return [big.sum() for big in bigs]

    assert Liveness().peak(reordered(Schedule(), run, X).jaxpr) < 2 * ROW * 8


@PASSES
def test_effects_keep_their_order(transform):
    def run(a):
        parts = [f(a) for f in (jnp.sin, jnp.cos, jnp.tan, jnp.exp)]
        for part in reversed(parts):
            jax.debug.callback(lambda *_: None, part, ordered=True)
            jax.debug.print("{}", part.sum())
        return early(a)

    after = reordered(transform, run, X)
    assert after.jaxpr is not jaxprtool.trace(run, X).jaxpr


@PASSES
def test_reads_and_writes_of_refs_keep_their_order(transform):
    def run(a):
        ref = jax.new_ref(a)
        before = [ref[...] for _ in range(3)]
        ref[...] = jnp.sin(a)
        after = ref[...]
        ref[0] = 7.0
        return early(a) + before[0] * before[1] * before[2] * after, ref[...]

    program = reordered(transform, run, X)
    kinds = [n for n in names(program.jaxpr) if n in ("new_ref", "get", "swap")]
    assert kinds == ["new_ref", "get", "get", "get", "swap", "get", "swap", "get"]


@PASSES
def test_sown_values_keep_their_order(transform):
    def run(a):
        for part in (jnp.sin(a), jnp.cos(a), jnp.tan(a)):
            sown = jaxprtool.sow(part, tag="t", name="all", mode="append")
        nested = jaxprtool.nest(lambda b: jaxprtool.variable(b, name="w"), scope="s")(a)
        last = jaxprtool.sow(early(a), tag="t", name="all", mode="append")
        return last + nested + sown

    def sows(jaxpr):
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "sow":
                found.append(eqn.invars[0])
            elif eqn.params.get("name") == "nest:s":
                found.append("nest")
        return found

    program = jaxprtool.trace(run, X)
    assert sows(transform(program).jaxpr) == sows(program.jaxpr)


@pytest.mark.parametrize("transform", [Sink(), Schedule(), Schedule(memory=False)])
def test_a_value_is_read_before_it_is_donated(transform):
    consume = jax.jit(lambda a: a * 2, donate_argnums=0)

    def run(a):
        b = a + 1
        read = jnp.sin(b)
        return consume(b), early(a) + read

    program = jaxprtool.trace(run, X)
    after = transform(program)
    assert after.jaxpr is not program.jaxpr
    for old, new in zip(program(X), after(X), strict=True):  # the donated array is deleted
        np.testing.assert_array_equal(old, new)


def test_without_memory_every_value_is_close_to_its_reader():
    def run(a):
        big, small = jnp.sin(a), jnp.exp(a)
        return small.sum(), big.sum()

    program = jaxprtool.trace(run, X)
    assert names(program.jaxpr) == ["sin", "exp", "reduce_sum", "reduce_sum"]
    after = program.apply("schedule(memory=False)")
    assert names(after.jaxpr) == ["exp", "reduce_sum", "sin", "reduce_sum"]
    np.testing.assert_array_equal(program(X)[1], after(X)[1])


# --- the orders -------------------------------------------------------------------------------


def graph_of(jaxpr):
    lifetimes = Liveness().lifetimes(jaxpr.eqns, jaxpr.outvars)
    return _Scheduler(lambda _: [])._graph(jaxpr.eqns, lifetimes)


@pytest.mark.parametrize(
    "orders",
    [
        sunk,
        lambda graph: forward_order(graph, False),
        lambda graph: forward_order(graph, True),
        lambda graph: backward_order(graph, False),
        lambda graph: backward_order(graph, True),
        lambda graph: depth_first(graph, by_need=True),
        lambda graph: depth_first(graph, by_need=False),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_every_order_contains_each_equation_once_after_its_operands(orders, seed):
    rng = np.random.default_rng(seed)

    def run(a):
        values = [a, a.sum()]
        for step in range(40):
            p, q = (values[i] for i in rng.integers(len(values), size=2))
            values.append((p + q, jnp.outer(p, q).sum(), jnp.sin(p), p.max() * q)[step % 4])
        return values[-1], values[7]

    graph = graph_of(jax.make_jaxpr(run)(X))
    order = orders(graph)
    assert sorted(order) == list(range(len(graph.before)))
    at = {i: position for position, i in enumerate(order)}
    assert all(at[j] < at[i] for i, earlier in enumerate(graph.before) for j in earlier)


def test_the_best_order_of_a_tree_is_found():
    def tree(depth, a):
        if depth == 0:
            return jnp.sin(a)
        left, right = jnp.outer(a, a).sum() * tree(depth - 1, a), tree(depth - 1, a)
        return left + right

    program = jaxprtool.trace(lambda a: tree(4, a), X)
    graph = graph_of(program.jaxpr)
    best = graph.lifetimes.peak(depth_first(graph, by_need=True))
    assert best <= min(graph.lifetimes.peak(f(graph, g)) for f in (forward_order,) for g in (0, 1))
    assert Liveness().peak(Schedule()(program).jaxpr) <= best
