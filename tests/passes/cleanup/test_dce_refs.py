"""Dead writes to refs: the contract of `live_inputs`, compared with JAX's results."""

from __future__ import annotations

import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.loading.trace import trace
from jaxprtool.passes.cleanup.dce import Dce, dce_jaxpr
from tests.programs.same import count_equations

X = jnp.arange(3.0)


def jaxpr_of(fun, refs=1):
    """Return the jaxpr of `fun(x, *refs)`."""
    return jaxcompat.open_jaxpr(jax.make_jaxpr(fun)(X, *(jax.new_ref(X) for _ in range(refs))))


def writes(jaxpr) -> int:
    inside = (writes(body) for eqn in jaxpr.eqns for _, body in sub_jaxprs(eqn))
    return sum(eqn.primitive.name == "swap" for eqn in jaxpr.eqns) + sum(inside)


def wrapped(kind, body):
    """Wrap `body(x, ref)`, which has no results, in a call, loop or branch."""

    def loop(x, ref):
        lax.scan(lambda c, _: (c, body(x, ref)), (), length=2)

    def whilst(x, ref):
        lax.while_loop(lambda i: i < 2, lambda i: (body(x, ref), i + 1)[1], 0)

    def branch(x, ref):
        lax.cond(x[0] > 0, lambda: body(x, ref), lambda: body(2 * x, ref))

    return {"plain": body, "jit": jax.jit(body), "scan": loop, "while": whilst, "cond": branch}[
        kind
    ]


KINDS = ["plain", "jit", "scan", "while", "cond"]


def write(x, ref):
    ref[...] = jnp.sin(x)


@pytest.mark.parametrize("kind", KINDS)
def test_writes_to_a_ref_that_is_never_read_are_removed(kind):
    jaxpr = jaxpr_of(wrapped(kind, write))
    fewer, used = dce_jaxpr(jaxpr, [], live_inputs=[True, False])
    assert (fewer.eqns, used) == ([], [False, False])
    for live in True, [False, True]:
        same, used = dce_jaxpr(jaxpr, [], live_inputs=live)
        assert same is jaxpr and used == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_writes_to_a_local_ref_are_kept_if_they_are_read(kind):
    def fun(x):
        read, unread = jax.new_ref(x), jax.new_ref(x)
        wrapped(kind, write)(x, read)
        wrapped(kind, write)(x, unread)
        return read[...]

    program = trace(fun, X)
    after = Dce()(program)
    each = 2 if kind == "cond" else 1
    assert (writes(program.jaxpr), writes(after.jaxpr)) == (2 * each, each)
    np.testing.assert_array_equal(after(X), fun(X))


def test_writes_after_the_last_read_are_removed():
    def fun(x, ref):
        ref[...] = jnp.sin(x)
        y = ref[0]
        ref[...] = jnp.cos(x)
        return y

    jaxpr, used = dce_jaxpr(jaxpr_of(fun), [True], live_inputs=False)
    assert Counter(e.primitive.name for e in jaxpr.eqns) == {"sin": 1, "swap": 1, "get": 1}
    assert used == [True, True]
    jaxpr, used = dce_jaxpr(jaxpr_of(fun), [False], live_inputs=False)
    assert (jaxpr.eqns, used) == ([], [False, False])


@pytest.mark.parametrize("kind", ["scan", "while"])
def test_an_iteration_may_read_writes_of_the_previous_one(kind):
    def step(x, ref, out):
        out[...] = ref[...] + x
        ref[...] = jnp.sin(x)

    def fun(x, ref, out):
        wrapped(kind, lambda x, refs: step(x, *refs))(x, (ref, out))

    jaxpr = jaxpr_of(fun, 2)
    assert dce_jaxpr(jaxpr, [], live_inputs=[True, False, True])[0] is jaxpr
    assert dce_jaxpr(jaxpr, [], live_inputs=[True, True, False])[0].eqns
    assert not dce_jaxpr(jaxpr, [], live_inputs=False)[0].eqns


def test_a_condition_may_read_writes_of_the_body():
    def fun(x, ref):
        def body(i):
            ref[...] = ref[...] + x
            return i + 1

        return lax.while_loop(lambda i: ref[0] < 2.0, body, 0)

    jaxpr = jaxpr_of(fun)
    assert dce_jaxpr(jaxpr, [True], live_inputs=False)[0] is jaxpr


def test_a_freed_ref_is_kept():
    def fun(x):
        ref = jax.new_ref(x)
        jax.free_ref(ref)
        return x

    before = trace(fun, X)
    assert len(Dce()(before).jaxpr.eqns) == len(before.jaxpr.eqns)


def test_there_must_be_as_many_flags_as_inputs():
    with pytest.raises(ValueError, match="live_inputs has 1 flags for the jaxpr's 2 inputs"):
        dce_jaxpr(jaxpr_of(write), [], live_inputs=[True])


# --- compared with JAX ----------------------------------------------------------------------------


def random_body(rng: random.Random, depth: int):
    """Return a function of a value and refs, which reads and writes some, and returns a value."""
    names = ["read", "write", "add", "swap", "own", "nest"]
    count = rng.randint(1, 5)
    steps = [(rng.choice(names), rng.randrange(3), rng.random()) for _ in range(count)]
    inner = [random_body(rng, depth - 1) if depth and s[0] == "nest" else None for s in steps]
    kinds = [rng.choice(KINDS[1:]) for _ in steps]

    def body(x, *refs):
        for (kind, i, scale), nested, how in zip(steps, inner, kinds, strict=True):
            ref = refs[i]
            if kind == "read":
                x = x + ref[...]
            elif kind == "write":
                ref[...] = scale * x
            elif kind == "add":
                jax.ref.addupdate(ref, (), scale * x)
            elif kind == "swap":
                x = x * jax.ref.swap(ref, (), jnp.sin(x))
            elif kind == "own":
                own = jax.new_ref(x)
                own[0] = scale
                x = own[...] if i else x
            elif nested is not None:
                x = nest(how, nested, x, refs)
        return x

    return body


def nest(how, body, x, refs):
    if how == "jit":
        return jax.jit(lambda x: body(x, *refs))(x)
    if how == "scan":
        return lax.scan(lambda c, _: (body(c, *refs), None), x, length=2)[0]
    if how == "while":
        step = lambda c: (c[0] + 1, body(c[1], *refs))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]
    return lax.cond(x[0] > 0.5, lambda: body(x, *refs), lambda: x)


def prove(seed: int) -> None:
    """Assert that our jaxpr computes the same, with no more equations and inputs than JAX's."""
    rng = random.Random(seed)
    jaxpr = jaxpr_of(random_body(rng, 2), 3)
    outputs, live = [rng.random() < 0.5], [True, *(rng.random() < 0.5 for _ in range(3))]
    ours, used = dce_jaxpr(jaxpr, outputs, False, live)
    theirs, used_by_theirs = jaxcompat.jax_dce_jaxpr(jaxpr, outputs, False, live)
    assert not any(u and not t for u, t in zip(used, used_by_theirs, strict=True))
    assert count_equations(ours) <= count_equations(theirs)
    jaxcompat.check_jaxpr(ours)
    runs = []
    for each, taken in ((jaxpr, [True] * 4), (ours, used)):
        given = [X + 1, *(jax.new_ref(X + i) for i in range(3))]
        closed = jaxcompat.close_jaxpr(each)
        args = [a for a, flag in zip(given, taken, strict=True) if flag]
        outs = jaxcompat.jaxpr_as_fun(closed)(*args)
        wanted = outs if taken is used or outputs[0] else []
        left = [ref[...] for ref, flag in zip(given[1:], live[1:], strict=True) if flag]
        runs.append([*wanted, *left])
    for before, after in zip(*runs, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_of_refs_compute_the_same(seed):
    prove(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4, 200))
def test_many_random_programs_of_refs_compute_the_same(seed):
    prove(seed)
