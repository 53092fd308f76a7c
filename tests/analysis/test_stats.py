"""The counts of stats, and their locations."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.analysis.stats import PrimitiveCount, count_equations, stats
from jaxprtool.ir.program import NamedValue

X = np.arange(3, dtype=np.float32)


def count(function, *args):
    return stats(jax.make_jaxpr(function)(*args))


def test_equations_are_counted_by_primitive_and_depth():
    def f(x):
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(c) * jnp.sin(x), x) + jnp.sin(x)

    counted = count(f, X)
    assert counted.equations == 7 and counted.by_depth == (3, 4)
    assert counted.primitives[0] == PrimitiveCount("sin", 3, (1, 2))
    assert {p.name for p in counted.primitives} == {"sin", "mul", "add", "scan"}


def test_a_shared_body_counts_at_each_call_and_fast():
    def double(f):
        return jax.jit(lambda x: f(x) + f(x * 2))

    f, expected = jax.jit(jnp.sin), 1
    for _ in range(50):
        f, expected = double(f), 2 * (expected + 1) + 2
    counted = count(f, X)
    assert counted.equations == expected + 1
    assert counted.by_depth[:3] == (1, 4, 8)


def test_all_branches_count():
    counted = count(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), 1, X)
    assert {"sin", "cos", "tan"} <= {p.name for p in counted.primitives}


def test_values_have_names_types_and_bytes():
    table = np.ones((4, 3), np.float32)
    counted = count(lambda p, key: {"y": jnp.asarray(table) @ p["w"]}, {"w": X}, jax.random.key(0))
    assert counted.arguments[0] == NamedValue("p['w']", "f32[3]", 12)
    assert counted.arguments[1].type == "key<fry>[]" and counted.arguments[1].bytes == 8
    assert [(v.type, v.bytes) for v in counted.outputs] == [("f32[4]", 16)]
    assert counted.constants == (NamedValue("constant[0]", "f32[4,3]", 48),)
    assert counted.constant_bytes == 48


def test_a_symbolic_size_is_unknown():
    (n,) = jax.export.symbolic_shape("n")
    counted = count(jnp.sin, jax.ShapeDtypeStruct((n,), jnp.float32))
    assert counted.arguments[0].type == "f32[n]" and counted.arguments[0].bytes is None


def test_an_empty_program_has_nothing():
    counted = count(lambda: ())
    assert (counted.equations, counted.by_depth, counted.primitives) == (0, (), ())


def test_equations_alone_are_counted_as_by_stats():
    def f(x):
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(c) * jax.jit(jnp.cos)(x), x)

    jaxpr = jax.make_jaxpr(f)(X)
    assert count_equations(jaxpr) == stats(jaxpr).equations == 6
