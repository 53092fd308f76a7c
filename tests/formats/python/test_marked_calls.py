"""A body that marked calls share is one function, whose decorator marks its calls."""

from __future__ import annotations

import ast
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from jaxprtool import jaxcompat
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.loading.trace import trace
from tests.formats.python.emitting import defined, emitted
from tests.programs.outlined import assert_layers, layers, with_marked_calls

X = jnp.linspace(0.1, 0.9, 3)


def functions(source: str) -> dict[str, ast.FunctionDef]:
    body = ast.parse(source).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def test_a_shared_body_is_one_function_that_is_called_often() -> None:
    source, again = emitted(layers(12))
    assert list(functions(source)) == ["mark_calls", "model", "layer", "block"]
    called = [
        n.func.id
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert (called.count("layer"), called.count("block")) == (12, 2)
    assert_layers(again.jaxpr, 12)


def test_marks_are_a_decorator_and_no_with_statement() -> None:
    layer = functions(to_python(layers(2)))["layer"]
    marks, jit = map(ast.unparse, layer.decorator_list)
    assert marks == "mark_calls(compilation_unit='layer', inlineable='false', outlined='layer')"
    assert jit == "jax.jit"
    assert not any(isinstance(node, ast.With) for node in ast.walk(layer))


@pytest.mark.proof
def test_the_module_computes_the_same_as_is_and_under_transformations() -> None:
    program = layers(3)
    model = defined(to_python(program))
    x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
    weights = [(jnp.eye(4) * (i + 1), jnp.full((4, 4), 0.1 * i)) for i in range(3)]

    def total(function: Any) -> Any:
        return lambda x: function(x, weights)[0].sum()

    for make in (lambda f: f, jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])):
        got, expected = (make(total(f))(x) for f in (model, program))
        np.testing.assert_allclose(got, expected, rtol=1e-5)


# --- calls of all kinds ---------------------------------------------------------------------------


@jax.jit
def plain(x: Any) -> Any:
    return jnp.sin(x) * 2.0


def in_loops_and_branches(x: Any) -> Any:
    x = jax.lax.fori_loop(0, 3, lambda i, y: plain(y), x)
    x = jax.lax.cond(x.sum() > 0, plain, lambda y: y, x)
    return jax.lax.scan(lambda c, y: (plain(c), plain(c)), x, None, length=2)


def with_options(x: Any) -> Any:
    donated = jax.jit(lambda y, z: y + z, donate_argnums=0)
    return donated(x * 2.0, 3.0), jax.jit(lambda: jnp.ones(2))()


def with_constants(x: Any) -> Any:
    table = jnp.asarray(np.arange(30.0, dtype=np.float32).reshape(10, 3))
    inner = jax.jit(lambda y: y + table[2] * table[3])
    return inner(inner(x))


def with_refs_and_effects(x: Any) -> Any:
    ref = jax.new_ref(x)

    @jax.jit
    def add(ref: Any, y: Any) -> None:
        ref[...] += y

    add(ref, x)
    add(ref, 2.0 * x)
    return ref[...]


def in_other_metadata(x: Any) -> Any:
    x = plain(x)
    with set_xla_metadata(color="red"):
        return jnp.cos(x) + 1.0


@pytest.mark.parametrize(
    "function",
    [
        in_loops_and_branches,
        with_options,
        with_constants,
        with_refs_and_effects,
        in_other_metadata,
        jax.grad(lambda x: plain(plain(x)).sum()),
        jax.vmap(lambda x: jnp.linalg.norm(plain(x))),
    ],
)
def test_calls_of_all_kinds_round_trip(function: Any) -> None:
    x = X[None] if function.__name__ == "<lambda>" else X
    program = with_marked_calls(trace(function, x))
    source, again = emitted(program)
    assert "@mark_calls(" in source
    assert structural_difference(program, again) is None


def test_metadata_around_a_call_stays_a_with_statement() -> None:
    def colored(x: Any) -> Any:
        with set_xla_metadata(color="red"):
            return plain(x)

    program = trace(colored, X)
    source, again = emitted(program)
    assert "mark_calls" not in source and 'with set_xla_metadata(color="red"):' in source
    assert structural_difference(program, again) is None


def test_one_body_with_and_without_marks_is_two_functions_of_one_name() -> None:
    program = trace(lambda x: plain(plain(x)), X)
    marked = with_marked_calls(program).jaxpr.eqns[0]
    first, second = program.jaxpr.eqns
    eqns = [first.replace(ctx=marked.ctx), second]
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))
    source, again = emitted(program)
    assert {"plain", "plain_2"} <= set(functions(source))
    assert structural_difference(program, again) is None


def test_a_marked_body_of_symbolic_sizes_round_trips() -> None:
    n, m = jax.export.symbolic_shape("n, m")
    function = jax.jit(lambda x: x.reshape(-1) * x.shape[0])

    def model(x: Any) -> Any:
        return function(x) + function(2.0 * x)

    program = with_marked_calls(trace(model, jax.ShapeDtypeStruct((n, m), jnp.float32)))
    source, again = emitted(program)
    assert source.count("@mark_calls(") == 1
    assert structural_difference(program, again) is None
