"""`jaxprtool.jit(fun, passes="outline")` composes with JAX's transformations like `jax.jit`.

`tests/jaxcompat` tests how XLA treats the marked calls, and the tests of the pass which segments
are outlined.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from tests.share import first_and_proofs

DEPTH = 2


def layer(x: Any, p: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]
    scores = jax.nn.softmax((h @ p["q"]) @ h.T)
    return x + jnp.tanh(scores @ h @ p["w"])


def blocks(params: Any, x: Any) -> Any:
    return functools.reduce(layer, params, x)


def loss(params: Any, x: Any) -> Any:
    return (blocks(params, x) ** 2).sum()


def arrays(*shape: int) -> Any:
    size = int(np.prod(shape))
    return np.sin(np.arange(1, size + 1, dtype="f")).reshape(shape)


def params(count: int = DEPTH) -> list[dict[str, Any]]:
    made = {"scale": arrays(4), "q": arrays(4, 4), "w": arrays(4, 4)}
    return [{k: v * (i + 1) / 4 for k, v in made.items()} for i in range(count)]


X = arrays(8, 4)
#: These programs are small, so the minimum size is given explicitly.
OUTLINE = "outline(equations=8)"

outlined = jaxprtool.jit(loss, passes=OUTLINE)


def calls(lowered: Any) -> tuple[int, int]:
    """Return the number of functions that a lowered program calls as units, and of the calls."""
    called = re.findall(r"call @(\w+)\(.*?\) \{.*compilation_unit", lowered.as_text())
    return len(set(called)), len(called)


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected
    )


TRANSFORMED: dict[str, Callable[[Callable], Callable]] = {
    "itself": lambda f: f,
    "grad": lambda f: jax.value_and_grad(f),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: (
        lambda p, x: jax.lax.scan(lambda c, _: (c + f(p, x + c), None), 0.0, length=2)[0]
    ),
    "jit": jax.jit,
}


@pytest.mark.parametrize("order", ["under", "over"])
@pytest.mark.parametrize("name", first_and_proofs(TRANSFORMED))
def test_transformations_of_an_outlined_function(name: str, order: str) -> None:
    transform = TRANSFORMED[name]
    x = np.stack([X, X / 2]) if name == "vmap" else X
    if order == "under":
        fun = jax.jit(transform(outlined))
    else:
        fun = jaxprtool.jit(transform(loss), passes=OUTLINE)
    lowered = fun.lower(params(), x)
    kinds, count = calls(lowered)
    assert kinds >= 1
    assert count >= DEPTH
    assert_close(lowered.compile()(params(), x), jax.jit(transform(loss))(params(), x))


@pytest.mark.proof
def test_ahead_of_time_compilation() -> None:
    traced = outlined.trace(params(), jax.ShapeDtypeStruct(X.shape, "float32"))
    assert sum(eqn.primitive.name == "jit" for eqn in traced.jaxpr.eqns) == DEPTH
    lowered = traced.lower()
    assert calls(lowered) == (1, DEPTH)
    assert_close(lowered.compile()(params(), X), loss(params(), X))
    assert outlined.eval_shape(params(), X).shape == ()


@pytest.mark.proof
def test_donated_arguments_are_reused() -> None:
    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(state, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads)

    fun = jaxprtool.jit(step, passes=OUTLINE, donate_argnums=0)
    state = jax.tree.map(jnp.array, params())
    compiled = fun.lower(state, X).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert_close(fun(state, X), jax.jit(step)(params(), X))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.proof
def test_static_arguments_make_separate_programs() -> None:
    def fun(x: Any, depth: int, power: int = 2) -> Any:
        for p in params(depth):
            x = layer(x, p)
        return (x**power).sum()

    jitted = jaxprtool.jit(fun, passes=OUTLINE, static_argnums=1, static_argnames="power")
    for depth, power in ((2, 2), (3, 2), (3, 1)):
        assert calls(jitted.lower(X, depth, power=power)) == (1, depth)
        assert_close(jitted(X, depth, power=power), fun(X, depth, power))


@pytest.mark.proof
def test_the_persistent_cache_stores_compilations(tmp_path) -> None:
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            events.append(event.rpartition("_")[2])

    def compiled() -> Any:
        jax.clear_caches()
        lowered = jaxprtool.jit(loss, passes=OUTLINE).lower(params(), X)
        events.clear()
        return lowered.compile()

    jax.monitoring.register_event_listener(listen)
    before = jax.config.jax_compilation_cache_dir
    try:
        use_cache(str(tmp_path))
        first = compiled()
        assert events == ["misses"]
        assert_close(first(params(), X), compiled()(params(), X))
        assert events == ["hits"]
    finally:
        jax.monitoring.unregister_event_listener(listen)
        use_cache(before)


def use_cache(directory: str | None) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", directory)


@pytest.mark.proof
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings_are_kept(kind: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(None, "d")))
        p = jax.device_put(params(), NamedSharding(mesh, P()))
        expected = jax.jit(blocks)(p, x)
        found = jaxprtool.jit(blocks, passes=OUTLINE)(p, x)
    assert found.sharding.is_equivalent_to(expected.sharding, 2)
    assert_close(np.asarray(found), np.asarray(expected))


@pytest.mark.proof
def test_requested_shardings_are_used() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    rows, columns = (NamedSharding(mesh, spec) for spec in (P("d"), P(None, "d")))
    fun = jaxprtool.jit(blocks, passes=OUTLINE, in_shardings=(None, rows), out_shardings=columns)
    lowered = fun.lower(params(), X)
    assert calls(lowered) == (0, 0)
    out = lowered.compile()(params(), jax.device_put(X, rows))
    assert out.sharding.is_equivalent_to(columns, 2)
    assert_close(out, blocks(params(), X))
