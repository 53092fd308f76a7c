"""Caches are freed with their jaxprs, bounded, and can be cleared at any time."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache, process_cache

x = jnp.arange(3.0)


def traced():
    return jax.make_jaxpr(lambda a: jnp.sin(a))(x)


@pytest.mark.proof
def test_values_are_cached_as_long_as_their_jaxpr():
    cache, jaxpr, value = JaxprCache(), traced(), object()
    cache.of(jaxpr)["request"] = value
    assert cache.of(jaxpr)["request"] is value
    kept = weakref.ref(jaxcompat.open_jaxpr(jaxpr))
    del jaxpr
    jax.clear_caches()
    gc.collect()
    assert kept() is None and not len(cache._by_jaxpr)


def test_a_jaxpr_has_a_bounded_number_of_cached_requests():
    cache, jaxpr = JaxprCache(most=4), traced()
    for request in range(100):
        values = cache.of(jaxpr)
        values[request] = request
        assert len(values) <= 5


def test_clear_caches_empties_every_cache_of_the_process():
    cache, mine, jaxpr = JaxprCache(), process_cache({}), traced()
    cache.of(jaxpr)["request"] = mine["key"] = 1
    jaxprtool.clear_caches()
    assert not cache.of(jaxpr) and not mine


def test_results_are_the_same_after_clearing_the_caches():
    def fun(a):
        return jax.lax.scan(lambda c, row: (jnp.cos(c) + row, c), a[0], a)

    program = jaxprtool.trace(fun, x)
    pipeline = "batch(axis_size=4), -O1, dce"
    before = program.apply(pipeline)
    jaxprtool.clear_caches()
    assert str(program.apply(pipeline)) == str(before)
    assert jaxprtool.jit(fun, passes="-O1")(x)[0] == fun(x)[0]
