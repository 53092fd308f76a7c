"""Small programs for the renderers, one for each special case of JAX's text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import nest, sow, variable

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add to PROGRAMS a function that returns a closed jaxpr, which is traced once."""
    PROGRAMS[function.__name__] = cache(function)
    return function


def jaxpr_of(function: Callable, *args: Any) -> Any:
    return jax.make_jaxpr(function)(*args)


X = np.arange(3, dtype=np.float32)
M = np.ones((4, 3), np.float32)


@program
def nothing():
    return jaxpr_of(lambda: ())


@program
def identity_and_literals():
    return jaxpr_of(lambda x: (x, 1, 2.5, True, x), X)


@program
def many_arguments():
    return jaxpr_of(lambda *xs: tuple(x + 1 for x in xs), *[X] * 40)


@program
def closed_over_constants():
    table = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    return jaxpr_of(lambda x: jnp.asarray(table)[1] @ M + x, X)


@program
def unused_results():
    def f(x):
        jnp.sin(x)
        values, _ = lax.top_k(x, 2)
        return values

    return jaxpr_of(f, X)


@program
def nested_jit():
    inner = jax.jit(lambda x, y: (x * y, jnp.sin(x)))

    def f(x):
        a, b = inner(x, x)
        return jax.jit(lambda u, v: inner(v, u), inline=False)(a, b)

    return jaxpr_of(f, X)


@program
def shared_body_called_twice():
    @jax.jit
    def block(x):
        return jnp.tanh(x) @ jnp.eye(3)

    return jaxpr_of(lambda x: block(block(x)) + jax.jit(lambda z: block(z) * 2)(x), X)


@program
def shared_bodies_of_one_name():
    def twice(power):
        def block(x):
            return x**power

        block = jax.jit(block)
        return lambda x: block(block(x))

    return jaxpr_of(lambda x: twice(2)(twice(3)(twice(4)(x))), X)


@program
def shared_within_shared():
    f = jax.jit(lambda x: jnp.sin(x))

    @jax.jit
    def g(x):
        return f(x) + f(x * 2)

    @jax.jit
    def a(x):
        return g(x) * g(x + 1)

    return jaxpr_of(lambda x: a(x) + a(-x) + f(x), X)


@program
def long_body_called_once():
    @jax.jit
    def long(x):
        for i in range(12):
            x = x * i + jnp.sin(x)
        return x

    return jaxpr_of(lambda x: long(x) + 1, X)


@program
def jit_aliased_arguments_and_results():
    inner = jax.jit(lambda a, b, c: (a + b, c, c, a + b, 1.0))
    return jaxpr_of(lambda x: inner(x, x, 2.0)[0], X)


@program
def jit_options():
    f = jax.jit(lambda x, y: x + 1, donate_argnums=0, keep_unused=True)
    return jaxpr_of(lambda x: f(x, x), X)


@program
def unicode_names():
    def größe(x):
        return x * 2

    return jaxpr_of(lambda x: jax.jit(größe)(jax.jit(größe)(x)), X)


@program
def scan_while_cond_switch():
    def f(x, n):
        carry, ys = lax.scan(lambda c, y: (c + y, (c * y, y)), x[0], x)
        total = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * carry), (0, x))
        branch = lax.cond(n > 2, lambda a: a * 2, lambda a: a, x)
        return lax.switch(n, [jnp.sin, jnp.cos, lambda a: a], branch), total, ys

    return jaxpr_of(f, X, 3)


@program
def deep_nesting():
    def f(x):
        def step(c, y):
            return lax.cond(
                y > 0, lambda a: lax.fori_loop(0, 3, lambda i, b: b * y, a), jnp.sin, c
            ), y

        return jax.jit(lambda z: lax.scan(step, z[0], z))(x)

    return jaxpr_of(f, X)


@program
def custom_jvp():
    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def f(x, n):
        return jnp.sin(x) * n

    f.defjvp(lambda n, primals, tangents: (f(primals[0], n), tangents[0] * n))
    return jaxpr_of(lambda x: f(x, 3) + jax.nn.relu(x) + jax.nn.silu(x), X)


@program
def custom_vjp():
    @jax.custom_vjp
    def f(x, y):
        return jnp.sin(x) * y

    f.defvjp(lambda x, y: (f(x, y), (x, y)), lambda res, g: (g * res[1], g * res[0]))
    return jaxpr_of(lambda x: (f(x, x), jax.jvp(jax.jit(lambda z: z * f(x, z)), (x,), (x,))[0]), X)


@program
def gradient_with_remat():
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(x):
        return jnp.tanh(M @ x).sum() * x

    return jaxpr_of(jax.value_and_grad(lambda x: block(block(x)).sum()), X)


@program
def gradient_of_scan():
    def loss(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(w * c), c.sum()), x, None, length=4)[0].sum()

    return jaxpr_of(jax.grad(loss), X, X)


@program
def linear_solve():
    def f(x):
        return lax.custom_linear_solve(lambda v: 2.0 * v, x, lambda mv, b: b / 2.0, symmetric=True)

    return jaxpr_of(jax.jacrev(f), X)


@program
def reductions_gather_scatter_sort():
    def f(x, i):
        a = x.at[i].add(x[i] * 2)
        b = lax.reduce(x, 0.0, lambda p, q: p + q * 2, (0,))
        return (
            a,
            b,
            jnp.sort(x),
            jnp.argsort(-x),
            lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME"),
        )

    return jaxpr_of(f, X, np.array([0, 2]))


@program
def convolution():
    image, kernel = np.ones((1, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32)
    return jaxpr_of(lambda a, b: lax.conv(a, b, (1, 1), "SAME"), image, kernel)


@program
def random_keys():
    def f(key):
        a, b = jax.random.split(key)
        return jax.random.normal(a, (3,)), jax.random.key_data(b), jax.random.uniform(b, (2,))

    return jaxpr_of(f, jax.random.key(0))


@program
def callbacks_and_prints():
    def f(x):
        jax.debug.print("x = {x}", x=x)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), np.float32), x)
        jax.debug.callback(lambda v: None, y)
        return y

    return jaxpr_of(f, X)


@program
def refs():
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        ref[1:] += x[:2]
        old = ref[...]

        def body(i, c):
            ref[i] = ref[i] * c
            return c + ref[0]

        total = lax.fori_loop(0, 3, body, 1.0)
        return old, total, jax.freeze(ref)

    return jaxpr_of(f, X)


@program
def shard_map_with_collectives():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("devices")

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    def f(x):
        return lax.psum(jnp.sin(x), "devices")

    return jaxpr_of(lambda x: f(x) * 2, np.ones(4, np.float32))


@program
def explicit_shardings():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    sharding = jax.NamedSharding(mesh, PartitionSpec("a", None))
    x = jax.device_put(np.ones((4, 6), np.float32), sharding)

    def f(x):
        y = jax.sharding.reshard(jnp.sin(x) * 2, jax.NamedSharding(mesh, PartitionSpec("a", "b")))
        return lax.with_sharding_constraint(y + 1, jax.NamedSharding(mesh, PartitionSpec("a", "b")))

    with jax.set_mesh(mesh):
        return jaxpr_of(lambda x: jax.jit(f)(x), x)


@program
def many_dtypes():
    kinds = ("bfloat16", "float8_e4m3fn", "int8", "uint32", "complex64", "bool", "float16")

    def f(x):
        return [lax.convert_element_type(x, kind) for kind in kinds]

    return jaxpr_of(f, X)


@program
def symbolic_shapes():
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, m), jnp.float32)
    return jaxpr_of(lambda x: (x.T @ x).reshape(-1).sum() * x.shape[0], x)


class Pair(NamedTuple):
    left: Any
    right: Any


@program
def named_tuples():
    return jaxpr_of(lambda p: Pair(p.right * 2, p.left), Pair(X, M))


@program
def zero_size_and_big_literals():
    return jaxpr_of(
        lambda x: (x.reshape(0, 5).sum(), 1e-30 * x, -0.0 * x, jnp.inf - x, 3 * x.astype(int)),
        np.ones((0, 5), np.float32),
    )


@program
def vmapped_loop():
    def f(x, n):
        return lax.while_loop(lambda c: (c < n).all(), lambda c: c * 2 + 1, x)

    return jaxpr_of(jax.vmap(f, in_axes=(0, None)), M, 100.0)


@program
def long_transcendental_chain():
    def f(x):
        for _ in range(30):
            x = jnp.exp(x) * jnp.log(x + 1) - lax.rsqrt(x) + lax.logistic(x)
        return x

    return jaxpr_of(jax.grad(lambda x: f(x).sum()), X)


@program
def sown_values():
    def f(x):
        y = nest(lambda x: variable(jnp.sin(x), name="y"), scope="s")(x)
        return sow({"y": y, "x": (x, None)}, tag="seen", name="all", mode="append")

    return jaxpr_of(f, X)
