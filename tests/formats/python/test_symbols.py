"""Programs with symbolic dimensions as Python functions of arrays of any size."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import max_dim

from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program
from jaxprtool.loading.argspec import read_args
from jaxprtool.loading.trace import trace
from jaxprtool.passes import Pipeline
from tests.formats.python.emitting import defined, emitted

CASES: dict[str, tuple[Callable[..., Any], str]] = {}


def case(args: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = function, args
        return function

    return put


@case("f32[n,128], i32[n]")
def rows_and_means(x, i):
    return x[i].mean(axis=0), x.std(), x.argmax(0), jnp.median(x)


@case("f32[n,2*n], f32[n]")
def reshapes(x, y):
    flat = x.reshape(-1)
    return flat.reshape(2 * y.shape[0], -1) + y, jnp.broadcast_to(y[:, None], x.shape) + x


@case("f32[n], f32[2*n+1]")
def polynomials(x, y):
    n = x.shape[0]
    return jnp.arange(n), jnp.concatenate([x, y[1:]]), y[n:], y[: n + 1], x[: n // 2], x[::-1]


@case("f32[n,m], f32[m,k]")
def three_symbols(x, y):
    return jnp.einsum("nm,mk->kn", x, y) * (x.shape[0] + y.shape[1]), jnp.tri(x.shape[0])


@case("f32[n, 4], i32[]")
def dynamic_slices(x, i):
    part = lax.dynamic_slice(x, (i, 0), (x.shape[0] - 1, 2))
    return part, lax.dynamic_update_slice(x, part, (i, i)), x.at[i].add(1.0)


@case("f32[n, 4]")
def loops(x):
    n = x.shape[0]
    _, rows = lax.scan(lambda c, row: (c + row, c.sum()), x[0], x)
    counted = lax.fori_loop(0, n, lambda i, c: c + x[i], x[0])
    return rows, counted, lax.scan(lambda c, r: (c + r.sum(), jnp.arange(n) + c), 0.0, x)[1]


@case("f32[n,3], f32[n]")
def batched(x, y):
    @jax.vmap
    def one(row, v):
        inner = jax.jit(lambda r: jnp.outer(r, y).sum(0) + v)
        return lax.cond(v > 0, inner, lambda r: y * r[0], row)

    return one(x, y)


@case("f32[n]")
def nested_functions(x):
    n = x.shape[0]

    @jax.jit
    def ramp(start):
        return start + jnp.arange(n) / n

    @jax.jit
    def scaled(v):
        return v * ramp(2.0) / v.shape[0]

    return scaled(x), scaled(x), ramp(0.5), jnp.eye(n)


@case("f32[n,16], {'w': f32[16,3,16]}")
def attention(x, params):
    q, k, v = jnp.moveaxis(jnp.einsum("nd,dte->nte", x, params["w"]), 1, 0)
    weights = jax.nn.softmax(q @ k.T / 4.0, where=jnp.tri(x.shape[0], dtype=bool))
    return jax.nn.gelu(weights @ v).mean()


@case("f32[n]")
def custom_derivatives(x):
    @jax.custom_vjp
    def clipped(v):
        return v * v.shape[0]

    clipped.defvjp(lambda v: (clipped(v), v), lambda v, g: (g.clip(-1, 1) + v.shape[0],))

    @jax.custom_jvp
    def mean_of_ramp(s):
        return s * jnp.arange(x.shape[0]).mean()

    @mean_of_ramp.defjvp
    def _(primals, tangents):
        return mean_of_ramp(*primals), tangents[0] * mean_of_ramp(primals[0])

    return clipped(jax.nn.relu(x)).sum() + mean_of_ramp(x[0]) + jax.checkpoint(jnp.sin)(x).sum()


@case("f32[n], f32[n//2+n%3]")
def operations(x, y):
    longer = max_dim(x.shape[0], 7 - y.shape[0])
    return x[:3].sum(), jnp.arange(y.shape[0] ** 2 - 1), jnp.zeros(longer), y * longer


@case("f32[n-1], f32[3*m+n]")
def solved_in_turn(x, y):
    n = x.shape[0] + 1
    m = (y.shape[0] - n) // 3
    return jnp.arange(n), jnp.ones(m), y.sum()


@case("f32[n,4], key(3)")
def random(x, key):
    return jax.random.normal(key, x.shape) + jax.random.split(key, 3).size


def traced(name: str, passes: str = "") -> Program:
    function, text = CASES[name]
    args, kwargs = read_args(text)
    program = trace(function, *args, **kwargs)
    result = Pipeline.parse(passes)(program)
    assert isinstance(result, Program)
    return result


def arrays(program: Program, **sizes: int) -> Any:
    """Return arguments for a program with these sizes for its symbols."""
    rng = np.random.default_rng(0)
    names = {"floordiv": operator.floordiv, "mod": operator.mod, **sizes}

    def array(aval: Any) -> Any:
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.key(3)
        shape = [eval(str(size).replace("^", "**"), names) for size in aval.shape]
        if aval.dtype == jnp.int32:
            return rng.integers(0, 3, shape, np.int32)
        return rng.standard_normal(shape, np.float32)

    args, kwargs = jax.tree.unflatten(program.in_tree, map(array, program.in_avals))
    assert not kwargs
    return args


def check(program: Program, function: Callable[..., Any]) -> None:
    """Check that the source traces to the program, and agrees with the function at two sizes."""
    source, again = emitted(program)
    assert structural_difference(program, again) is None, source
    for sizes in ({"n": 5, "m": 2, "k": 3}, {"n": 8, "m": 4, "k": 1}):
        args = arrays(program, **sizes)
        found, expected = jax.jit(defined(source))(*args), jax.jit(function)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), found, expected)


#: Slow cases, for the sweep only.
SLOW = CASES.keys() - {"reshapes", "loops", "nested_functions", "solved_in_turn"}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.sweep] * (name in SLOW)) for name in names]


@pytest.mark.parametrize("name", cases(CASES))
def test_the_source_equals_the_program_at_all_sizes(name: str) -> None:
    check(traced(name), CASES[name][0])


@pytest.mark.parametrize(
    "name", ["custom_derivatives", pytest.param("attention", marks=pytest.mark.sweep)]
)
def test_the_source_of_a_gradient_equals_it_at_all_sizes(name: str) -> None:
    check(traced(name, "grad"), jax.grad(CASES[name][0]))


def source_of(function: Callable[..., Any], text: str) -> str:
    args, kwargs = read_args(text)
    return to_python(trace(function, *args, **kwargs))


def test_symbols_are_found_in_the_shapes_of_arguments() -> None:
    def f(n, params):  # an argument may have a symbol's name
        return jnp.zeros((n.shape[0] // 2, 3 * params["w"].shape[0]))

    assert source_of(f, "f32[2*n], {'w': f32[m+n+1]}").endswith("""
def f(n, params):  # f32[2*n]
    n_2 = n.shape[0] // 2
    assert n.shape[0] == 2 * n_2
    m = params["w"].shape[0] - n_2 - 1
    return jnp.zeros((n_2, 3 * n_2 + 3 * m + 3))  # f32[n,3*n + 3*m + 3]
""")


def test_a_function_that_cannot_derive_a_symbol_is_local_to_one_that_can() -> None:
    @jax.jit
    def double(x):
        return jnp.broadcast_to(x, (2 * x.shape[0], x.shape[0]))

    def f(x):
        @jax.jit
        def ones(value):
            return jnp.full(x.shape, value)

        return double(x) * ones(2.0) + ones(3.0)

    body = source_of(f, "f32[n]").partition("\n\n\n")[2].partition("\n\n\n")
    assert "    n = x.shape[0]\n\n    @jax.jit\n    def ones(value):  # f32[]\n" in body[0]
    assert body[0].count("def ") == 2
    assert "@jax.jit\ndef double(x):  # f32[n]\n    n = x.shape[0]\n" in body[2]


def test_a_function_derives_only_its_own_symbols() -> None:
    assert "shape" not in source_of(lambda x, y: (jnp.sin(x), y.sum()), "f32[n], f32[n//2]")


def test_symbols_that_no_size_determines_are_refused_with_the_arguments() -> None:
    def f(x, y):
        return jnp.arange(y.shape[0]), x

    with pytest.raises(UnsupportedError, match=r"size of m cannot be derived .*\(y:f32\[m\*n\]\)"):
        source_of(f, "f32[n], f32[n*m]")


def test_functions_with_several_callers_are_visited_once() -> None:
    function = jnp.sin
    for _ in range(40):
        function = jax.jit(lambda x, inner=function: inner(x) + inner(1.5 * x))

    assert source_of(function, "f32[n]").count("@jax.jit") == 40
