"""Programs for the benchmarks: a deep transformer's gradient, and synthetic ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat, nest, trace, variable
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import Var


def transformer_gradient(layers: int = 48) -> Any:
    """Return the closed jaxpr of value_and_grad of an unrolled pre-norm transformer's loss."""
    return jax.make_jaxpr(jax.value_and_grad(transformer_loss))(*transformer_shapes(layers))


def transformer_loss(params: Any, x: Any) -> Any:
    """Return the mean square of the output of the layers for f32[32,64]."""

    def norm(x, scale):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return scale * (x - mean) / jnp.sqrt(variance + 1e-5)

    def layer(x, p):
        h = norm(x, p["norm1"])
        q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
        x = x + jax.nn.softmax(q @ k.T / 8.0) @ v @ p["o"]
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    for p in params:
        x = layer(x, p)
    return jnp.square(x).mean()


def transformer_shapes(layers: int) -> tuple[Any, Any]:
    """Return the types of the arguments of `transformer_loss`."""

    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = {name: spec(64, 64) for name in ("q", "k", "v", "o")}
    shapes |= {"norm1": spec(64), "norm2": spec(64), "up": spec(64, 256), "down": spec(256, 64)}
    return [shapes] * layers, spec(32, 64)


def small_jits(count: int) -> Callable[[Any], Any]:
    """Return a function of f32[8] that calls `count` small jitted functions, one after the other.

    JAX traces their bodies only once.
    """
    functions = [jax.jit(lambda x, i=i: jnp.sin(x) * (i + 1.0) + x) for i in range(count)]

    def chain(x):
        for function in functions:
            x = function(x)
        return x

    return chain


def synthetic(size: int, live_every: int = 2) -> Any:
    """Return a closed jaxpr of `size` equations, one in `live_every` of them live.

    Its equations repeat those of a small traced function, with fresh variables.
    """

    def step(x):
        y = jnp.sin(x) * 2.0
        return (x @ y + y.sum(0)).reshape(8, 8)

    sample = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    first = x = Var(sample.invars[0].aval)
    eqns: list[Any] = []
    block = 0
    while len(eqns) < size:
        names = {sample.invars[0]: x}
        for eqn in sample.eqns[: size - len(eqns)]:
            outs = [Var(v.aval) for v in eqn.outvars]
            ins = [names[v] if isinstance(v, Var) else v for v in eqn.invars]
            names.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        block += 1
        if block % live_every == 0 and sample.outvars[0] in names:
            x = names[sample.outvars[0]]
    return jaxcompat.replace_jaxpr(
        sample,
        constvars=(),
        consts=(),
        invars=[first],
        outvars=[x],
        eqns=eqns,
        debug_info=sample.debug_info,
    )


def with_variables_inside(size: int, nested: bool) -> Program:
    """Return a Program of a key and f32[8,8]: about `size` equations in blocks of one variable.

    A block splits the key, draws a variable with a unique name, and maps the input by it. With
    `nested`, ten blocks at a time are in a scope.
    """
    arguments = jax.random.key(0), jnp.zeros((8, 8))

    def block(key, x, name="w"):
        key, own = jax.random.split(key)
        return key, jnp.tanh(x @ variable(jax.random.normal(own, (8, 8)), name=name))

    def blocks(count, key, x):
        for i in range(count):
            key, x = block(key, x, f"w{i}")
        return key, x

    def in_scopes(count, key, x):
        for i in range(count // 10):
            key, x = nest(partial(blocks, 10), scope=f"scope{i}")(key, x)
        return key, x

    count = size // len(jax.make_jaxpr(block)(*arguments).eqns)
    return trace(lambda key, x: (in_scopes if nested else blocks)(count, key, x)[1], *arguments)
