"""A program with symbols can be called with arrays of any size, which determine the symbols."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxprtool
from jaxprtool.errors import ArgumentsError
from jaxprtool.formats.lowering import exported, read_exported
from jaxprtool.ir.symbols import chosen_sizes, example_sizes, sizes_by_symbol, value_of
from jaxprtool.loading.argspec import read_args


def traced(fun, args):
    positional, keywords = read_args(args)
    return jaxprtool.trace(fun, *positional, **keywords)


def rows(x, y):
    return jnp.outer(x, y).sum(0) / x.shape[0]


@pytest.fixture
def program():
    return traced(rows, "f32[n], f32[2*m]")


@pytest.mark.proof
def test_a_program_is_called_with_arrays_of_any_size(program):
    for n, m in ((1, 1), (3, 2), (4, 8)):
        x, y = jnp.arange(n) + 1.0, jnp.arange(2 * m) + 1.0
        np.testing.assert_allclose(program(x, y), rows(x, y), rtol=1e-6)


@pytest.mark.proof
def test_a_program_is_called_under_jaxs_transformations_and_with_symbolic_sizes(program):
    x, y = jnp.arange(3.0), jnp.arange(4.0)
    np.testing.assert_allclose(jax.jit(program)(x, y), rows(x, y), rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x, y: program(x, y).sum())(x, y),
        jax.grad(lambda x, y: rows(x, y).sum())(x, y),
        rtol=1e-6,
    )
    inner = traced(lambda a: program(a, a), "f32[2*k]")
    np.testing.assert_allclose(inner(y), rows(y, y), rtol=1e-6)
    np.testing.assert_allclose(jaxprtool.jit(program)(x, y), rows(x, y), rtol=1e-6)


def test_a_program_is_specialized_once_for_each_choice_of_sizes(program):
    x, y = jnp.ones(3), jnp.ones(4)
    assert program.at([(3,), (4,)]) is program.at([(3,), (4,)])
    jitted = traced(jax.jit(rows), "f32[n], f32[2*m]")
    for _ in range(3):
        jitted(x, y)
        jitted(x, jnp.ones(6))
    at_4, at_6 = (jitted.at([(3,), (size,)]) for size in (4, 6))
    assert at_4._jitted._cache_size() == at_6._jitted._cache_size() == 1


def test_the_number_of_cached_specializations_is_bounded(program, monkeypatch):
    monkeypatch.setattr("jaxprtool.ir.program.MOST_SIZES", 2)
    first, second = program.at([(1,), (2,)]), program.at([(2,), (2,)])
    assert program.at([(1,), (2,)]) is first
    program.at([(3,), (2,)])
    assert program.at([(1,), (2,)]) is first
    assert program.at([(2,), (2,)]) is not second


@pytest.mark.parametrize(
    ("types", "shapes", "message", "hint"),
    [
        (
            "f32[n], f32[n]",
            [(3,), (4,)],
            "found inconsistency between dimension size y.shape[0] (= 4) and the specification "
            "'n' (= 3)",
            "'n' = 3 from specification 'n' for dimension x.shape[0] (= 3)",
        ),
        (
            "f32[2*n], f32[3]",
            [(5,), (3,)],
            "division had remainder 1 when computing the value of 'n'",
            None,
        ),
        ("f32[n+4], f32[3]", [(4,), (3,)], "expected value >= 1 for dimension variable 'n'", None),
        ("f32[n], f32[4]", [(5,), (3,)], "argument 'y' has shape [3], but rows takes f32[4]", None),
        ("f32[n], f32[4]", [(5, 1), (4,)], "'x' has shape [5,1], but rows takes f32[n]", None),
        (
            "f32[n*m], f32[n+m]",
            [(6,), (5,)],
            "cannot solve for values of dimension variables",
            None,
        ),
    ],
)
def test_invalid_sizes_are_named_with_their_argument(types, shapes, message, hint):
    program = traced(rows, types)
    with pytest.raises(ArgumentsError) as caught:
        program(*map(jnp.ones, shapes))
    assert message in caught.value.message and "\n" not in caught.value.message
    assert "Please see" not in caught.value.message
    assert hint is None or hint in caught.value.hint


def test_constraints_of_the_symbols_are_checked():
    (n,) = export.symbolic_shape("n", constraints=["n >= 3", "mod(n, 2) == 0"])
    program = jaxprtool.trace(jnp.sin, jax.ShapeDtypeStruct((n,), jnp.float32))
    assert program(jnp.ones(4)).shape == (4,)
    with pytest.raises(ArgumentsError, match=r"do not match the symbolic shape constraint n >= 3"):
        program(jnp.ones(2))
    with pytest.raises(ArgumentsError, match=r"constraint 2\*floordiv\(n, 2\) == n"):
        program(jnp.ones(5))


def test_arguments_are_called_by_their_own_names():
    program = traced(lambda tree, key: tree["w"] + key, "{'w': f32[n], 'v': f32[m]}, key=f32[n]")
    with pytest.raises(ArgumentsError, match=r"key.shape\[0\] \(= 4\) and the specification 'n'"):
        program({"w": jnp.ones(3), "v": jnp.ones(2)}, key=jnp.ones(4))


def test_an_exported_artifact_is_called_with_any_size(program):
    artifact = read_exported(exported(program))
    x, y = jnp.arange(3.0), jnp.arange(4.0)
    np.testing.assert_allclose(artifact(x, y), rows(x, y), rtol=1e-6)
    np.testing.assert_allclose(artifact.apply("specialize(n=3, m=2)")(x, y), rows(x, y), rtol=1e-6)
    with pytest.raises(ArgumentsError, match="division had remainder 1"):
        artifact(x, jnp.ones(5))


# --- arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("m", [2, 3, 7])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n", lambda n, m: n),
        ("2*n + 3*m - 1", lambda n, m: 2 * n + 3 * m - 1),
        ("n*m^2", lambda n, m: n * m**2),
        ("floordiv(n, m)", lambda n, m: n // m),
        ("mod(n + 5, m)", lambda n, m: (n + 5) % m),
        ("max(n, m) - min(n, 4)", lambda n, m: max(n, m) - min(n, 4)),
        ("floordiv(n*m, 2) + n", lambda n, m: n * m // 2 + n),
        ("max(n - 3, 0)", lambda n, m: max(n - 3, 0)),
    ],
)
def test_the_value_of_a_size_is_that_of_the_expression(text, expected, n, m):
    (size,) = export.symbolic_shape(text)
    assert value_of(size, {"n": n, "m": m}) == expected(n, m)
    partly = value_of(size, {"n": n})
    assert value_of(partly, {"m": m}) == expected(n, m)


def test_example_sizes_differ_and_satisfy_the_constraints():
    n, m = export.symbolic_shape("n, m", constraints=["n >= 4", "mod(m, 4) == 0"])
    avals = jaxprtool.trace(lambda x: x, jax.ShapeDtypeStruct((n, m, n - 2), jnp.float32)).in_avals
    sizes = example_sizes("f", avals)
    assert sizes["n"] >= 4 and sizes["m"] % 4 == 0 and sizes["n"] != sizes["m"]
    (k,) = export.symbolic_shape("k", constraints=["k >= 1000"])
    avals = jaxprtool.trace(lambda x: x, jax.ShapeDtypeStruct((k,), jnp.float32)).in_avals
    with pytest.raises(ArgumentsError, match="no small sizes for k satisfy its constraints"):
        example_sizes("f", avals)
    assert chosen_sizes("f", sizes_by_symbol(avals), {"k": 1000}) == {"k": 1000}
