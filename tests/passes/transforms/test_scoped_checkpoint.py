"""checkpoint(only=...): scopes and bodies of loops become calls, and compute the same."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat, residuals, trace
from jaxprtool.errors import PipelineError, UnsupportedError
from jaxprtool.ir.equations import equations
from tests.share import first_and_proofs

RANDOM = np.random.default_rng(0)
W = RANDOM.normal(0, 0.3, (8, 8)).astype(np.float32)
X = RANDOM.normal(size=(4, 8)).astype(np.float32)


def block(w, x):
    return x + jnp.tanh(jnp.sin(x @ w) @ w)


def scopes(w, x):
    for i in range(3):
        with jax.named_scope(f"Block_{i}"):
            y = jnp.sin(x)
            with jax.named_scope("Inner"):
                z = jnp.cos(y @ w) * y
            x = x + z
        x = x * 2
    return x.sum()


def functions(w, x):
    x = block(w, x)
    x = jnp.exp(-x)
    return block(w, x).sum()


def scanned(w, x):
    def layer(x, _):
        x = block(w, x)
        return x, x.sum()

    x, sums = jax.lax.scan(layer, x, length=3)
    return x.sum() + sums.sum()


def calls(w, x):
    called = jax.jit(block)
    x = called(w, called(w, x))
    return jnp.exp(called(w, x)).sum()


def calls_in_a_loop(w, x):
    called = jax.jit(block)
    return jax.lax.scan(lambda x, _: (called(w, called(w, x)), None), x, length=3)[0].sum()


def calls_in_a_call(w, x):
    called = jax.jit(block)
    return jax.jit(lambda w, x: jnp.sin(called(w, called(w, x))))(w, x).sum()


@jax.custom_jvp
def ruled(w, x):
    return block(w, x)


@ruled.defjvp
def _(primals, tangents):
    return jax.jvp(block, primals, tangents)


def with_a_rule(w, x):
    return ruled(w, jnp.exp(-ruled(w, x))).sum()


@cache
def value_and_gradients(fun):
    return jax.jit(jax.value_and_grad(fun, (0, 1)))(W, X)


def remats(program):
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in eqns if eqn.primitive.name == "remat2"]


@pytest.mark.parametrize(
    ("fun", "only", "count"),
    [
        (scopes, "Block_*", 3),
        (scopes, "Block_1", 1),
        (scopes, "Inner", 3),
        (scopes, "Block_2/Inner", 1),
        (scopes, "Block_?/I*", 3),
        (functions, "block", 2),
        (scanned, "layer", 1),
        (calls, "block", 3),
        (calls, "block #2", 1),
        (calls_in_a_loop, "block #*", 2),
        (calls_in_a_call, "block", 2),
        (with_a_rule, "ruled", 2),
    ],
)
@pytest.mark.parametrize("policy", first_and_proofs(["nothing_saveable", "dots_saveable"]))
def test_each_scope_is_a_call_and_gradients_are_the_same(fun, only, count, policy):
    program = trace(fun, W, X)
    found = program.apply(f"checkpoint(only='{only}', policy='{policy}')")
    jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(found.jaxpr))
    assert len(remats(found)) == count
    result, grads = jax.jit(jax.value_and_grad(found, (0, 1)))(W, X)
    expected, wanted = value_and_gradients(fun)
    np.testing.assert_array_equal(result, expected)
    for one, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fun", "only"), [(scopes, "Block_*"), (scanned, "layer")])
def test_fewer_residuals_are_saved(fun, only):
    program = trace(fun, W, X)
    few = program.apply(f"checkpoint(only='{only}')")
    some = program.apply(f"checkpoint(only='{only}', policy='dots_saveable')")
    sizes = [residuals(each).total_bytes for each in (few, some, program)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[2]


def test_a_missing_scope_is_refused_with_the_nearest_name():
    with pytest.raises(PipelineError, match="no scope of scopes matches 'Blok_1'") as error:
        trace(scopes, W, X).apply("checkpoint(only='Blok_1')")
    assert "Block_1" in error.value.hint
    with pytest.raises(PipelineError, match="no scope") as error:
        trace(jnp.sin, X).apply("checkpoint(only='Block_*')")
    assert error.value.hint == "it has no scopes"


def test_effects_are_refused():
    def fun(x):
        with jax.named_scope("Block"):
            y = jnp.sin(x)
            jax.debug.print("{}", y.sum())
            return jnp.cos(y)

    with pytest.raises(UnsupportedError, match=r"test_scoped_checkpoint.py.* has an effect"):
        trace(fun, X).apply("checkpoint(only='Block')")


def test_equal_scopes_of_the_same_lines_share_a_body():
    def layers(x, scales):
        for i, scale in enumerate(scales):
            with jax.named_scope("Layer"):
                x = jnp.sin(x @ x) * scale
            x = jnp.cos(x) + i
        return x

    def bodies(*scales):
        program = trace(lambda x: layers(x, scales), jnp.ones((4, 4)))
        program = program.apply("checkpoint(only='Layer')")
        return [eqn.params["jaxpr"] for eqn in program.jaxpr.eqns if "policy" in eqn.params]

    first, second, other = map(id, bodies(2.0, 2.0, 3.0))
    assert first == second != other


def test_scopes_of_the_same_lines_that_read_other_values_do_not_share_a_body():
    def layers(x, y):
        outs = []
        for reads_sine in (True, False):
            with jax.named_scope("Layer"):
                keys, values = jax.lax.sort((x, y), num_keys=1)
                sine = jnp.sin(keys)
                z = {True: sine, False: values}[reads_sine] * keys
            outs.append(jnp.cos(z))
        return outs

    x, y = jnp.array([3.0, 1.0, 2.0]), jnp.array([5.0, 7.0, 9.0])
    checkpointed = trace(layers, x, y).apply("checkpoint(only='Layer')")
    np.testing.assert_allclose(checkpointed(x, y), layers(x, y))
