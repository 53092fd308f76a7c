"""Placements of jax.checkpoint: estimates for the rewritten program agree with XLA."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxprtool import residuals, trace
from jaxprtool.api.investigate.placements import measured, places

WEIGHTS = {"up": jnp.ones((8, 64, 256)), "down": jnp.ones((8, 256, 64))}
X = jnp.ones((512, 64))


def layer(x, w):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return checkpoint_name(x + jax.nn.silu(hidden) @ w["down"], "layer"), None


def loss(weights, x):
    return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()


def chunks(w, xs):
    def step(h, x):
        return jnp.tanh(h @ w + x), None

    def chunk(h, xs):
        return jax.lax.scan(step, h, xs)

    return jnp.square(jax.lax.scan(chunk, jnp.zeros_like(xs[0, 0]), xs)[0]).mean()


def of(found, only, policy):
    return next(each for each in found if (each.only, each.policy) == (only, policy))


def test_the_ranking_is_that_of_xla_and_passes_make_the_program():
    program = trace(loss, WEIGHTS, X)
    cases = [((), ""), ((), "nothing_saveable"), (("layer",), "nothing_saveable")]
    plain, whole, body = (measured(program, *case, compiled=True) for case in cases)
    for each in (plain, whole, body):
        assert each.peak_bytes == pytest.approx(each.compiled_bytes, rel=0.2)
    assert body.compiled_bytes < whole.compiled_bytes and body.peak_bytes < whole.peak_bytes
    assert body.passes == "checkpoint(only='layer', policy=nothing_saveable)"
    assert residuals(program.apply(body.passes)).total_bytes == body.total_bytes


def test_a_scope_may_have_brackets_in_its_name():
    def loss(w, x):
        for i in range(3):
            with jax.named_scope(f"block[{i}]"):
                x = jnp.tanh(x @ w)
        return x.sum()

    found = residuals(trace(loss, jnp.ones((64, 64)), X), peaks=True).placements
    (only,) = {each.only for each in found if each.only}
    assert only == ("block[[]*]",)


def test_offloaded_values_need_no_device_memory():
    found = residuals(trace(loss, WEIGHTS, X), peaks=True).placements
    saved = of(found, ("layer",), "save_only_these_names('hidden', 'layer')")
    offloaded = next(each for each in found if each.only and "offload" in each.policy)
    assert offloaded.peak_bytes < saved.peak_bytes
    assert residuals(trace(loss, WEIGHTS, X).apply(offloaded.passes)).total_bytes > 0


def test_nested_loops_are_placements_separately_and_together():
    program = trace(chunks, jnp.ones((64, 64)), jnp.ones((16, 16, 32, 64)))
    assert places(program) == [(), ("chunk",), ("step",), ("chunk", "step")]
    plain = measured(program, (), "")
    inner, both = (
        measured(program, only, "nothing_saveable") for only in (("step",), ("chunk", "step"))
    )
    assert both.passes.startswith("checkpoint(only='step'") and "only='chunk'" in both.passes
    assert both.peak_bytes < plain.peak_bytes and both.total_bytes < inner.total_bytes


def test_the_placement_with_the_lowest_peak_is_proposed():
    proposal = residuals(trace(loss, WEIGHTS, X), "8MiB").proposal
    assert proposal.placement.only == ("layer",)
    assert proposal.placement.total_bytes <= proposal.budget
    assert proposal.placement.peak_bytes < 0.7 * proposal.before.peak_bytes


def test_a_training_step_passes_on_the_residuals_of_its_loss():
    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    found = residuals(trace(step, WEIGHTS, X))
    assert found.is_inside and found.policies == {} and found.placements == ()
    kept = {(each.type, each.name) for each in residuals(trace(loss, WEIGHTS, X)).residuals}
    inside = {(each.type, each.name) for each in found.residuals}
    assert ("f32[8,512,256]", "hidden") in kept & inside
