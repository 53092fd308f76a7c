"""Every pass supports a loop of a plug-in, which only registers its view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import jaxprtool
from jaxprtool import trace, variable
from jaxprtool.analysis.stats import stats
from jaxprtool.formats.pictures import dot
from jaxprtool.ir.regions import view
from jaxprtool.passes.cleanup.dce import dce_jaxpr
from tests.programs.repeat import repeat

x, w = jnp.arange(12.0).reshape(4, 3) / 7, jnp.arange(9.0).reshape(3, 3) / 5
h = jnp.ones(3)


def wasteful(x, w, h):
    """Return a loop that every pass can improve."""

    def body(rows, carry, consts):
        (row, same_row), (state, fixed, dead) = rows, carry
        w, again, factor = consts
        mixed = jnp.tanh(w @ again)  # loop-invariant
        state = state @ mixed * factor + row * fixed + jnp.sin(row) * jnp.sin(row)
        return [state, fixed, dead + same_row], [state.sum(), dead * 2.0]

    ys, _, state, fixed, _ = repeat(body, [h, h, h], [w, w, 1.5], [x, x])
    return ys, state, fixed


def loop(jaxpr):
    """Return the view of the one `repeat` in a jaxpr."""
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "repeat"]
    return view(eqn)


def primitives(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


program = trace(wasteful, x, w, h)
expected = wasteful(x, w, h)


def after(passes):
    """Return the program after some passes, which computes the same."""
    result = program.apply(passes)
    jaxprtool.verify(program, result, (x, w, h))
    for got, want in zip(result(x, w, h), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    return loop(result.jaxpr)


def test_listings_counts_and_pictures_look_inside():
    assert "repeat[" in str(program) and "tanh" in str(program)
    counts = {primitive.name: primitive for primitive in stats(program).primitives}
    assert counts["tanh"].by_depth == (0, 1)
    picture = dot(program)
    assert "repeat length=4" in picture and "carry 2" in picture and "style=dashed" in picture


def test_dead_carries_rows_and_results_are_removed():
    left = after("dce")
    assert (len(left.carry), len(left.xs), len(left.ys)) == (2, 1, 1)
    assert [len(left.body.invars), len(left.body.outvars)] == [1 + 2 + 3, 2 + 1]


def test_an_unused_loop_is_removed():
    jaxpr, used = dce_jaxpr(program.jaxpr, [False, False, False])
    assert not jaxpr.eqns and not any(used)


def test_constants_move_inside_and_duplicate_operands_are_merged():
    left = after("forward")
    assert (len(left.carry), len(left.xs)) == (2, 1)  # `fixed` never changes
    assert len(left.consts) == 2  # w once, and h for `fixed`; 1.5 moved inside
    literals = [v.val for eqn in left.body.eqns for v in eqn.invars if isinstance(v, Literal)]
    assert 1.5 in literals


def test_loop_invariant_code_is_hoisted():
    left = after("hoist")
    assert "tanh" not in primitives(left.body)
    assert primitives(program.apply("hoist").jaxpr).count("tanh") == 1


def test_equal_equations_inside_are_merged():
    assert primitives(after("cse").body).count("sin") == 1


def test_constants_inside_are_folded():
    def body(rows, carry, consts):
        return [carry[0] + jnp.cos(jnp.float32(2.0)) * rows[0]], []

    def fun(x):
        return repeat(body, [x[0]], [], [x])

    folded = trace(fun, x).apply("fold")
    assert "cos" not in primitives(loop(folded.jaxpr).body)
    np.testing.assert_allclose(folded(x)[0], fun(x)[0], rtol=1e-6)


def test_all_optimizations_together_compute_the_same():
    left = after("-O2")
    assert (len(left.carry), len(left.xs), len(left.ys)) == (1, 1, 1)
    assert "tanh" not in primitives(left.body)


@pytest.mark.proof
def test_batching_and_gradients_follow_the_rules_of_the_primitive():
    xs = jnp.stack([x, 2 * x])
    batched = program.apply("batch(in_axes=(0, None, None), axis_size=2)")
    want = jax.vmap(wasteful, in_axes=(0, None, None))(xs, w, h)
    for got, each in zip(batched(xs, w, h), want, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-5)

    def loss(x, w, h):
        return wasteful(x, w, h)[0].sum()

    derived = trace(loss, x, w, h).apply("forward, dce, grad(argnums=1)")
    np.testing.assert_allclose(derived(x, w, h), jax.grad(loss, 1)(x, w, h), rtol=1e-4)


def initialized(key, x):
    """A network with one layer per row, each with its own weights."""

    def body(rows, carry, consts):
        key, row = rows
        weights = variable(jax.random.normal(key, (3, 3)), name="w")
        return [carry[0] @ weights + row * consts[0]], []

    scale = variable(jax.random.normal(key, (3,)), name="scale")
    return repeat(body, [x[0]], [scale], [jax.random.split(key, 4), x])[0]


@pytest.mark.parametrize("passes", ["", "-O2"])
def test_variables_sown_inside_are_results_of_init_and_arguments_of_apply(passes):
    key = jax.random.key(0)
    parts = trace(initialized, key, x).apply("unzip")
    init, apply = (parts[name].apply(passes) if passes else parts[name] for name in parts)
    variables = init(key)
    assert {k: v.shape for k, v in variables.items()} == {"scale": (3,), "w": (4, 3, 3)}
    assert "random_bits" not in str(apply) and "threefry2x32" not in str(apply)
    np.testing.assert_allclose(apply(variables, x), initialized(key, x), rtol=1e-5)


@pytest.mark.proof
def test_unzip_chooses_variables_inside():
    key = jax.random.key(0)

    def network(key, x):
        def body(rows, carry, consts):
            key, row = rows
            return [jnp.tanh(carry[0] @ jax.random.normal(key, (3, 3))) + row], []

        return repeat(body, [x[0]], [], [jax.random.split(key, 4), x])[0]

    init, apply = trace(network, key, x).apply("unzip(auto=True)").values()
    assert "random_bits" not in str(apply)
    np.testing.assert_allclose(apply(init(key), x), network(key, x), rtol=1e-5)
