"""drop_checks removes checks that have no results, at every depth, and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import jaxprtool
from jaxprtool.commands.compare.verify import Runs
from jaxprtool.errors import CheckError
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs

x = jnp.arange(1.0, 4.0)


def dropped(fun, *args):
    """Return the program of `fun` without checks, which returns the same."""
    before = jaxprtool.trace(fun, *args)
    after = before.apply("drop_checks")
    type_check(after)
    runs = Runs(before, jax.tree.leaves(args))
    runs.compare(after, checks=False)
    return after


def names(jaxpr):
    """The primitives of all equations, at every depth."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for _, body in sub_jaxprs(eqn):
            found |= names(body)
    return found


def raises(_index):
    raise RuntimeError("the check failed")


raises.__module__, raises.__qualname__ = "equinox._errors", "_error.<locals>.raises"


@jax.custom_jvp
def _error(value, pred):
    return lax.cond(pred, lambda: jax.pure_callback(raises, value, 0), lambda: value)


@_error.defjvp
def _error_jvp(primals, tangents):
    return _error(*primals), tangents[0]


def branched_error_if_impl(value, pred):
    return _error(value, jnp.any(pred))


def error_if(value, pred):
    """Apply what Equinox's `error_if` traces to, without importing Equinox."""
    return jax.jit(branched_error_if_impl)(value, pred)


def positive(a):
    return jnp.sqrt(error_if(a, a < 0))


def test_error_if_is_removed_with_its_operands():
    assert names(dropped(positive, x).jaxpr) == {"sqrt"}


def squared(a):
    jax.debug.callback(lambda v: None, a)
    jax.debug.print("{}", a)
    checkify.check(a.sum() > 0, "a sum of {}", a.sum())
    return error_if(a, a < 0) ** 2


CHECKS = {"pure_callback", "debug_callback", "debug_print", "check", "reduce_or", "lt"}

AROUND = {
    "scan": lambda f: lambda a: lax.scan(lambda c, r: (c + f(r), f(c)), a[0], a),
    "while": lambda f: lambda a: lax.while_loop(lambda c: f(c).sum() < 50, f, a + 1.0),
    "cond": lambda f: lambda a: lax.cond(a.sum() > 0, f, lambda b: b, a),
    "jit": lambda f: jax.jit(f),
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("around", AROUND)
def test_checks_are_removed_at_every_depth(around):
    def fun(a):
        return AROUND[around](squared if around != "remat" else positive)(a)

    after = dropped(fun, x)
    assert not names(after.jaxpr) & (CHECKS - {"lt"})
    assert not after.jaxpr.effects


def test_gradients_pass_through_removed_checks():
    before = jaxprtool.trace(lambda a: positive(a).sum(), x)
    after = before.apply("drop_checks, grad")
    assert names(after.jaxpr).isdisjoint(CHECKS)
    np.testing.assert_array_equal(after(x), jax.grad(lambda a: jnp.sqrt(a).sum())(x))


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_rules_of_custom_derivatives_lose_their_checks(kind):
    if kind == "jvp":
        f = jax.custom_jvp(lambda a: error_if(a, a < 0) * 2)
        f.defjvp(lambda p, t: (f(*p), 7.0 * error_if(t[0], t[0] > 9)))
    else:
        f = jax.custom_vjp(lambda a: error_if(a, a < 0) * 2)
        f.defvjp(lambda a: (f(a), None), lambda _, ct: (7.0 * error_if(ct, ct > 9),))
    after = dropped(f, x)
    assert names(after.jaxpr) >= {f"custom_{kind}_call", "mul"}
    slope = jax.make_jaxpr(jax.grad(lambda a: after(a).sum()))(x)
    assert names(slope).isdisjoint(CHECKS)
    np.testing.assert_array_equal(jax.grad(lambda a: after(a).sum())(x), 7.0 * jnp.ones(3))


def test_a_rule_that_is_not_an_identity_is_kept():
    @jax.custom_jvp
    def f(a):
        return error_if(a, a < 0)

    f.defjvp(lambda p, t: (f(*p), 3.0 * t[0]))
    after = dropped(f, x)
    assert names(after.jaxpr) == {"custom_jvp_call"}
    np.testing.assert_array_equal(jax.grad(lambda a: after(a).sum())(x), 3.0 * jnp.ones(3))


def test_callbacks_with_used_values_are_kept():
    def host(a):
        return np.sin(a)

    def fun(a):
        b = jax.pure_callback(host, a, a)
        c = lax.cond(a.sum() > 0, lambda: jax.pure_callback(host, a, a), lambda: a)
        return b + c + io_callback(host, a, a)

    before = jaxprtool.trace(fun, x)
    assert before.apply("drop_checks") is before or names(before.apply("drop_checks").jaxpr) == (
        names(before.jaxpr)
    )


def test_a_branch_with_a_dead_call_is_kept():
    def fun(a):
        def failing():
            jax.pure_callback(raises, a, 0)
            return a + 1.0

        return lax.cond(a.sum() > 0, failing, lambda: a)

    before = jaxprtool.trace(fun, x)
    assert before.apply("drop_checks") is before or "cond" in names(
        before.apply("drop_checks").jaxpr
    )


def test_a_program_without_checks_is_the_same_object():
    before = jaxprtool.trace(lambda a: jax.nn.relu(jax.jit(jnp.sin)(a)), x)
    assert before.apply("drop_checks").jaxpr is before.jaxpr


def test_verification_without_checks_still_compares_other_effects():
    log = partial(io_callback, lambda v: None, None)

    def fun(a):
        jax.debug.print("{}", a)
        log(a)
        return a + 1.0

    before = jaxprtool.trace(fun, x)
    Runs(before, [x]).compare(before.apply("drop_checks"), checks=False)
    with pytest.raises(CheckError, match="effect 1 is debug_print"):
        Runs(before, [x]).compare(before.apply("drop_checks"))
    with pytest.raises(CheckError, match="no longer called"):
        Runs(before, [x]).compare(jaxprtool.trace(lambda a: a + 1.0, x), checks=False)


def test_mutually_recursive_rules_all_lose_their_checks():
    @jax.custom_jvp
    def first(a):
        return jnp.sin(a)

    @jax.custom_jvp
    def second(a):
        return jnp.cos(a)

    @first.defjvp
    def _(primals, tangents):
        jax.debug.print("{}", primals[0])
        return first(*primals), second(*primals) * tangents[0]

    second.defjvp(lambda p, t: (second(*p), -first(*p) * t[0]))
    after = jaxprtool.trace(lambda a: second(first(second(a))), x).apply("drop_checks")
    slope = jaxprtool.trace(jax.hessian(lambda a: after(a).sum()), x)
    assert not {"debug_print", "debug_callback"} & names(slope.jaxpr)


def test_bodies_of_rules_are_traversed_once():
    function = jnp.sin
    for _ in range(40):
        inner = jax.jit(function)

        def function(a, inner=inner):
            return inner(a) + inner(2 * a)

    @jax.custom_jvp
    def fun(a):
        return jnp.sin(a)

    fun.defjvp(lambda p, t: (function(*p), t[0]))
    before = jaxprtool.trace(lambda a: fun(a), x)
    assert before.apply("drop_checks").jaxpr is before.jaxpr


def test_operations_with_custom_rules_are_traversed():
    def fun(a):
        jax.debug.print("{}", a)
        return jnp.frexp(a)[0]

    np.testing.assert_array_equal(dropped(fun, x)(x), jnp.frexp(x)[0])
