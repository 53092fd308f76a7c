"""The sample's rewrite replaces attention by `jax.nn.dot_product_attention`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import jaxpr_as_fun
from jaxprtool.loading.load import find_function
from jaxprtool.passes.patterns import load_rewrites

SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.fixture(scope="module")
def rewrites():
    return {each.name: each for each in load_rewrites(str(SAMPLES / "attention_rewrite.py"))}


def traced(target):
    entry = find_function(f"{SAMPLES}/{target}")
    program = entry.trace()
    given = dict(zip(program.arg_names, entry.arguments(), strict=True))
    return program, fill_arguments(program, given, seed=0).arguments


def assert_close(before, after, args, tolerance=1e-5):
    type_check(after)
    for old, new in zip(
        *(jax.jit(jaxpr_as_fun(p.jaxpr))(*args) for p in (before, after)), strict=True
    ):
        scale = max(1e-6, float(np.abs(old).max()))
        np.testing.assert_allclose(np.asarray(new) / scale, np.asarray(old) / scale, atol=tolerance)


def naive(query, key, value, mask):
    scores = jnp.where(mask, query @ key.mT * 0.125, -jnp.inf)
    return jax.nn.softmax(scores) @ value


def shapes(*lead, dtype="float32"):
    array = jax.ShapeDtypeStruct((*lead, 6, 4), dtype)
    return array, array, array, jax.ShapeDtypeStruct((6, 6), "bool")


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_found_in_any_rank_and_precision(rewrites, lead, dtype):
    program = jaxprtool.trace(naive, *shapes(*lead, dtype=dtype))
    (match,) = rewrites["attention"].matches(program)
    assert match.sizes == {"n": 6, "m": 6, "d": 4}
    assert match.types["query"].shape == (*lead, 6, 4) and match.types["query"].dtype == dtype
    assert match.values["scale"] == 0.125
    assert match.source.startswith("tests/passes/patterns/test_attention.py:")


@pytest.mark.proof
def test_attention_is_found_under_vmap_and_scan(rewrites):
    def layers(x, masks):
        return jax.lax.scan(lambda x, mask: (naive(x, x, x, mask), None), x, masks)[0]

    mapped = jax.vmap(layers, in_axes=(0, None))
    args = jax.random.normal(jax.random.key(0), (3, 6, 4)), jnp.ones((2, 6, 6), bool)
    program = jaxprtool.trace(mapped, *args)
    after, matches = rewrites["attention"].applied(program)
    assert len(matches) == 1
    assert_close(program, after, args)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("attention_rewrite.py:causal", "attention"),
        ("transformer.py:forward", "attention"),
        ("transformer.py:loss", "attention"),
        pytest.param("transformer.py:grad_loss", "saved_attention", marks=pytest.mark.sweep),
    ],
)
def test_attention_is_found_in_the_samples_and_computes_nearly_the_same(rewrites, target, name):
    program, args = traced(target)
    # Larger random weights would amplify rounding errors.
    args = [0.1 * x if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    after, matches = rewrites[name].applied(program)
    assert len(matches) == 1
    assert_close(program, after, args)


@pytest.mark.proof
def test_in_a_gradient_only_a_pattern_with_the_shared_values_is_found(rewrites):
    program, _ = traced("transformer.py:grad_loss")
    assert rewrites["attention"](program) is program
    after, matches = rewrites["saved_attention"].applied(program)
    type_check(after)
    assert len(matches) == 1 and "transformer.py:" in matches[0].source


@pytest.mark.proof
def test_under_checkpoint_the_forward_part_of_a_gradient_shares_no_values(rewrites):
    def loss(x, mask):
        return jax.checkpoint(naive)(x, x, x, mask).sum()

    args = jax.random.normal(jax.random.key(0), (6, 4)), jnp.tri(6, dtype=bool)
    program = jaxprtool.trace(jax.value_and_grad(loss), *args)
    after, matches = rewrites["attention"].applied(program)
    assert len(matches) == 1
    assert_close(program, after, args)


@pytest.mark.proof
def test_after_a_rewrite_the_gradient_has_no_softmax_of_its_own(rewrites):
    program, args = traced("attention_rewrite.py:causal")
    after = rewrites["attention"](program)

    def loss(p):
        return jax.jit(jax.grad(lambda *xs: jnp.square(jaxpr_as_fun(p.jaxpr)(*xs)[0]).sum()))

    np.testing.assert_allclose(loss(after)(*args), loss(program)(*args), rtol=1e-3, atol=1e-4)


def test_a_non_constant_scale_is_left_alone(rewrites):
    def with_scale(q, k, v, mask, scale):
        return jax.nn.softmax(jnp.where(mask, q @ k.mT * scale, -jnp.inf)) @ v

    program = jaxprtool.trace(with_scale, *shapes(2), jax.ShapeDtypeStruct((), "float32"))
    assert rewrites["attention"].matches(program) == []
