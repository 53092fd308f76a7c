"""roll turns chained repetitions into scans, and keeps all bits."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat, sow
from jaxprtool.errors import PipelineError
from jaxprtool.ir.equations import equations
from jaxprtool.passes.loops.roll import Roll
from tests.programs import Case, prove

x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def roll(fun, *args, gradients=False):
    """Return the program of `fun` after roll, which computes the same."""
    _, after, _ = prove(Case("fun", fun, args), Roll(), gradients=gradients)
    return after


def scans(program):
    """Return the length and direction of the scans of a program, at every depth, in order."""
    found = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [
        (e.params["length"], "backward" if e.params["reverse"] else "forward")
        for e in found
        if e.primitive.name == "scan"
    ]


def counts(program):
    """Count the equations of each primitive of a program, at every depth."""
    found = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return Counter(eqn.primitive.name for eqn in found)


def weights(count, shape=(4, 4)):
    return [
        (jax.random.normal(jax.random.key(i), shape), jnp.full(shape[-1:], i / 9))
        for i in range(count)
    ]


def layer(h, w, b):
    return jnp.tanh(h @ w + b) * 0.5 + jnp.sin(h)


def network(params, h):
    for w, b in params:
        h = layer(h, w, b)
    return h


def loss(params, h):
    return (network(params, h) ** 2).sum()


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.proof
def test_layers_become_one_scan_over_their_stacked_weights():
    after = roll(network, weights(6), x, gradients=True)
    assert scans(after) == [(6, "forward")]
    assert counts(after)["dot_general"] == 1
    assert counts(after)["stack"] == 2  # of the weights, and of the biases


@pytest.mark.proof
def test_the_backward_half_of_a_gradient_scans_the_stacks_of_the_forward_half_in_reverse():
    after = roll(jax.value_and_grad(loss, (0, 1)), weights(6), x)
    assert scans(after) == [(6, "forward"), (6, "backward")]
    assert counts(after)["stack"] == 2
    assert counts(after)["concatenate"] == 0
    assert counts(after)["unstack"] == 2  # the gradients


@pytest.mark.proof
def test_gradients_of_the_rolled_program_equal_those_of_the_original():
    params = weights(5)
    rolled = jaxprtool.trace(loss, params, x).apply("roll")
    old, new = jax.grad(loss)(params, x), jax.grad(rolled)(params, x)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_calls_of_the_users_own_functions_become_scans_too():
    step = jax.jit(lambda c: c * 2 + 1)

    def run(c):
        for _ in range(4):
            c = step(c)
        return c

    assert scans(roll(run, x)) == [(4, "forward")]


@pytest.mark.proof
def test_two_chains_become_two_scans_even_with_the_same_body():
    def run(wide, narrow, a, b):
        for (w, c), (v, d) in zip(wide, wide[::-1], strict=True):
            a, b = layer(a, w, c), layer(b, v, d)
        h = a[:, :2]
        return network(narrow, h) + b[:, :2]

    after = roll(run, weights(5), weights(7, (2, 2)), x, x + 1)
    assert sorted(scans(after))[-1] == (7, "forward")
    assert counts(after)["dot_general"] <= 3


@pytest.mark.parametrize("where", ["scan", "cond", "while"])
def test_chains_in_the_bodies_of_loops_and_branches_are_rolled(where):
    params = weights(4)

    def run(params, h):
        inside = lambda h: network(params, h)  # noqa: E731
        if where == "scan":
            return lax.scan(lambda h, _: (inside(h), h), h, None, length=2)
        if where == "cond":
            return lax.cond(h.sum() > 0, inside, jnp.sin, h)
        return lax.while_loop(lambda h: h.sum() > 9, inside, h)

    after = roll(run, params, x)
    assert (4, "forward") in scans(after)
    assert counts(after)["dot_general"] == 1


@pytest.mark.proof
def test_nested_chains_become_a_scan_in_a_scan():
    def run(params, scale, h):
        for i in range(4):
            for w, b in params:
                h = layer(h, w, b)
            h = jnp.cos(h * scale[i]) + lax.rsqrt(1 + h * h) / (2 + jnp.exp(-h))
        return h

    after = roll(run, weights(3), [jnp.float32(i) for i in range(4)], x)
    assert sorted(scans(after)) == [(3, "forward"), (4, "forward")]


@pytest.mark.proof
def test_equations_between_the_layers_are_moved_before_or_after():
    def run(params, h):
        kept = []
        for i, (w, b) in enumerate(params):
            w = w * i if i % 2 else w - i  # depends on no layer
            h = layer(h, w, b)
            kept.append(jnp.exp(h).sum() if i % 3 else jnp.cos(h).max())  # no layer depends on it
        return h, kept

    assert (5, "forward") in scans(roll(run, weights(5), x))


@pytest.mark.proof
def test_a_chain_is_split_at_equations_that_cannot_move():
    def run(params, h):
        for i, (w, b) in enumerate(params):
            h = layer(h, w, b)
            h = jnp.sort(h, axis=0) if i == 3 else h
        return h

    assert scans(roll(run, weights(9), x)) == [(4, "forward"), (5, "forward")]


@pytest.mark.proof
def test_layers_of_other_shapes_stay_outside():
    params = [*weights(1, (4, 6)), *weights(5, (6, 6)), *weights(1, (6, 3))]

    def run(params, h):
        for w, b in params:
            h = jnp.tanh(h @ w + b) * 0.5 + lax.rsqrt(2 + h.sum())
        return h

    assert scans(roll(run, params, x)) == [(5, "forward")]


# --- operands and results ---------------------------------------------------------------------


@pytest.mark.proof
def test_rows_of_an_array_are_not_stacked_again():
    def lstm(wi, wh, xs):
        h, c = jnp.zeros((2, 3)), jnp.zeros((2, 3))
        hs = []
        for t in range(30):
            gates = xs[t] @ wi + h @ wh
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            hs.append(h)
        return jnp.stack(hs), c

    args = jnp.ones((4, 12)) / 9, jnp.ones((3, 12)) / 7, jnp.stack([x * i for i in range(30)])
    after = roll(lstm, *args)
    assert scans(after) == [(30, "forward")]
    assert counts(after)["slice"] + counts(after)["squeeze"] <= 4  # the gates
    after = roll(jax.grad(lambda *a: lstm(*a)[0].sum(), (0, 1)), *args)
    assert {length for length, _ in scans(after)} >= {30} or {
        length for length, _ in scans(after)
    } >= {29}


@pytest.mark.proof
def test_iterations_may_share_rows_with_the_next_ones():
    def run(p, h):
        ws = [f(p) for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.sinh)]
        for here, ahead in itertools.pairwise(ws):
            h = jnp.tanh(h @ here) * 0.5 + jnp.sin(h @ ahead)
        return h

    assert scans(roll(run, jnp.eye(4), x)) == [(4, "forward")]


def test_values_shared_by_all_layers_are_constants():
    def run(params, mask, h):
        for w, b in params:
            h = layer(jnp.where(mask, h, 0.5), w, b)
        return h

    after = roll(run, weights(5), x > 0, x)
    scan = next(e for e in after.jaxpr.eqns if e.primitive.name == "scan")
    consts, carry = jaxcompat.scan_counts(scan.params)
    assert (consts, carry) == (1, 1)


def test_carries_may_be_unchanged_aliased_or_dropped():
    @jax.jit
    def step(a, b, c, w):
        return b, a * w + b, c, jnp.sin(a), jnp.cos(a)

    def run(ws, a, b):
        c = b
        outs = []
        for w in ws:
            a, b, c, s, _ = step(a, b, c, w)
            outs.append(s)
        return a, b, c, a, outs[1], outs[-1]

    after = roll(run, [jnp.float32(i) for i in range(4)], x, x * 2)
    assert (4, "forward") in scans(after)


def test_a_carried_result_of_the_last_iteration_needs_no_stack():
    after = roll(network, weights(6), x)
    scan = next(e for e in after.jaxpr.eqns if e.primitive.name == "scan")
    assert len(scan.outvars) == 1


@pytest.mark.proof
def test_keys_of_layers_are_stacked_as_keys():
    def run(key, params, h):
        for i, (w, b) in enumerate(params):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = layer(jnp.where(keep, h, 0.0), w, b)
        return h

    after = roll(run, jax.random.key(3), weights(4), x)
    assert scans(after) == [(4, "forward")]
    keys = jax.random.split(jax.random.key(3), 4)

    def given(keys, h):
        for key in list(keys):
            h = jnp.sin(h) * jax.random.normal(key, h.shape) + jnp.cos(h)
        return h

    after = roll(given, keys, x)
    assert scans(after) == [(4, "forward")]


def test_literals_that_differ_are_stacked():
    def run(h):
        for rate in (0.1, 0.2, 0.4, 0.8):
            h = jnp.sin(h) * rate + jnp.cos(h * rate) - jnp.exp(-h) * rate
        return h

    assert scans(roll(run, x)) == [(4, "forward")]


def test_weakly_typed_carries_are_supported():
    def run(h):
        total = 0.0
        for _ in range(5):
            total = jnp.sin(total) * 2 + jnp.cos(total + h).sum() + jnp.exp(-total)
        return total

    after = roll(run, x)
    assert scans(after) in ([(5, "forward")], [(4, "forward")])


# --- what is kept ---------------------------------------------------------------------------------


def test_without_repetition_the_program_is_the_same_object():
    program = jaxprtool.trace(lambda h: jnp.sin(h).sum(), x)
    assert Roll()(program) is program
    program = jaxprtool.trace(lambda h: network(weights(2), h), x)
    assert Roll()(program) is program


def test_a_program_of_effects_only_is_unchanged():
    def run(h):
        for _ in range(5):
            jax.debug.print("{}", h)

    program = jaxprtool.trace(run, x)
    assert Roll()(program) is program


def test_calls_with_effects_keep_their_order():
    shown = []

    @jax.jit
    def noisy(h):
        jax.debug.callback(lambda v: shown.append(float(v)), h[0, 0], ordered=True)
        return jnp.sin(h) + 1

    def run(h):
        for _ in range(4):
            h = noisy(h)
        jax.debug.callback(lambda v: shown.append(float(v)), h[0, 1], ordered=True)
        return h

    program = jaxprtool.trace(run, x)
    after = Roll()(program)
    assert scans(after) == [(4, "forward")]
    before_values, before_shown = program(x), list(shown)
    shown.clear()
    np.testing.assert_array_equal(after(x), before_values)
    assert shown == before_shown


def test_an_effect_between_calls_with_effects_splits_the_chain():
    @jax.jit
    def noisy(h):
        jax.debug.print("{}", h[0, 0], ordered=True)
        return jnp.sin(h) + 1

    def run(h):
        for i in range(8):
            h = noisy(h)
            if i == 3:
                jax.debug.print("between {}", h[0, 1], ordered=True)
        return h

    after = roll(run, x)  # proven to print the same, in order
    assert max(length for length, _ in scans(after)) <= 4


def test_refs_are_read_and_written_in_order():
    @jax.jit
    def step(ref, h):
        ref[...] = ref[...] + h
        return jnp.sin(h) * ref[...]

    def run(h):
        ref = jax.new_ref(h)
        for _ in range(4):
            h = step(ref, h)
        return h, ref[...]

    assert scans(roll(run, x)) == [(4, "forward")]


@pytest.mark.parametrize(
    "step",
    [
        jax.jit(lambda h: sow(jnp.sin(h), tag="t", name="v", mode="append")),
        jax.jit(lambda h: jnp.sin(h) + 1, donate_argnums=0),
    ],
    ids=["sow", "donate"],
)
def test_calls_that_cannot_be_rolled_are_kept(step):
    def run(h):
        for _ in range(4):
            h = step(h)
        return h

    program = jaxprtool.trace(run, x)
    assert Roll()(program) is program


def test_an_unknown_option_is_refused():
    with pytest.raises(PipelineError, match="stack"):
        jaxprtool.trace(network, weights(3), x).apply("roll(stack='outside')")
    with pytest.raises(PipelineError, match="stack"):
        Roll(stack="outside")


# --- unroll -----------------------------------------------------------------------------------


def test_unroll_undoes_roll():
    program = jaxprtool.trace(network, weights(6), x)
    rolled = program.apply("roll")
    back = rolled.apply("unroll, inline, simplify, dce")
    assert jaxprtool.equivalent(back, program.apply("inline, simplify, dce"))


def test_unroll_undoes_roll_in_both_halves_of_a_gradient():
    program = jaxprtool.trace(jax.value_and_grad(loss, (0, 1)), weights(6), x)
    rolled = program.apply("roll")
    back = rolled.apply("unroll, inline, simplify, dce")
    before = program.apply("inline, simplify, dce")
    assert counts(back) == counts(before)
    assert jaxprtool.equivalent(back, before)


def test_a_body_with_constants_is_not_unrolled_where_none_can_be_held():
    """Bodies of `while` hold none."""
    table = np.arange(16, dtype="f").reshape(4, 4) / 16

    @jax.jit
    def inner(x):
        y = jnp.sin(x) * jnp.cos(x) + x
        return jnp.tanh(y @ y) - jnp.square(y)

    outer = jax.jit(lambda x: inner(x) + table)

    def model(x):
        return inner(
            lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, outer(s[1])), (0, x))[1]
        )

    program = jaxprtool.trace(model, table)
    assert program.apply("roll") is program


@pytest.mark.proof
def test_double_precision_loops_are_rolled():
    def model(layers, x):
        for weights in layers:
            x = jnp.tanh(x @ weights) * jnp.cos(x) - x
        return x

    with jax.enable_x64(True):
        args = [np.eye(4) * i for i in range(4)], np.ones((2, 4))
        program = jaxprtool.trace(model, *args)
        rolled = program.apply("roll")
        assert [eqn.primitive.name for eqn in rolled.jaxpr.eqns].count("scan") == 1
        jaxprtool.verify(program, rolled, args)
