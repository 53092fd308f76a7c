"""dce removes dead code at every depth, and nothing else."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs, view
from jaxprtool.ir.rewrite import as_constants
from jaxprtool.passes.cleanup.dce import Dce, dce_body, dce_jaxpr, dce_rules

x = jnp.arange(12.0).reshape(3, 4) / 10


def count(jaxpr):
    """Count equations by primitive, at every depth."""
    total = Counter()
    for eqn in jaxpr.eqns:
        total[eqn.primitive.name] += 1
        for _, body in sub_jaxprs(eqn):
            total += count(body)
    return total


def dce(fun, *args):
    """Return the program of `fun` after dce, which is well typed and computes the same."""
    before = jaxprtool.trace(fun, *args)
    after = Dce()(before)
    type_check(after)
    for old, new in zip(jax.tree.leaves(before(*args)), jax.tree.leaves(after(*args)), strict=True):
        np.testing.assert_array_equal(old, new)
    return after


def only(program, primitive):
    (eqn,) = [e for e in program.jaxpr.eqns if e.primitive.name == primitive]
    return view(eqn)


def test_an_unused_equation_is_removed_and_inputs_are_kept():
    after = dce(lambda a, b: (jnp.cos(b), jnp.sin(a))[1], x, x)
    assert count(after.jaxpr) == {"sin": 1}
    assert len(after.jaxpr.invars) == 2


def test_a_program_without_dead_code_is_the_same_object():
    program = jaxprtool.trace(jax.jit(lambda a: jnp.sin(a)), x)
    assert Dce()(program).jaxpr is program.jaxpr


def test_drop_inputs_puts_none_in_the_pytree():
    program = jaxprtool.trace(lambda p, y: p["used"] + 1, {"unused": x, "used": x}, x)
    after = Dce(drop_inputs=True)(program)
    type_check(after)
    assert after.arg_names == ("p['used']",)
    np.testing.assert_array_equal(after({"unused": None, "used": x}, None), x + 1)


def test_unused_constants_are_removed():
    big = np.ones((50, 4), np.float32)
    after = dce(lambda a: (a @ jnp.asarray(big).T, jnp.sin(a))[1], x)
    assert after.jaxpr.consts == []


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_calls_lose_dead_results_operands_and_equations(wrap):
    inner = wrap(lambda a, b: (jnp.sin(a), jnp.cos(b)))
    after = dce(lambda a, b: inner(a, b)[0], x, x)
    (eqn,) = after.jaxpr.eqns
    call = view(eqn)
    assert (len(call.operands), len(call.outs)) == (1, 1)
    assert count(call.body) == {"sin": 1}


def test_jit_keeps_its_name_and_the_donation_of_remaining_operands():
    inner = jax.jit(lambda a, b: (jnp.sin(a), jnp.cos(b)), donate_argnums=1)
    after = dce(lambda a, b: inner(a, b * 2)[1], x, x)
    (eqn,) = [e for e in after.jaxpr.eqns if e.primitive.name == "jit"]
    assert eqn.params["donated_invars"] == (True,)
    assert eqn.params["name"] == "<lambda>"


def test_a_shared_body_is_cleaned_once_and_stays_shared():
    inner = jax.jit(lambda a: (jnp.sin(a), jnp.cos(a)))
    after = dce(lambda a: inner(inner(a)[0])[0], x)
    first, second = (jaxcompat.open_jaxpr(view(e).body) for e in after.jaxpr.eqns)
    assert first is second
    assert count(first) == {"sin": 1}


def test_scan_loses_carries_that_only_they_depend_on():
    def body(carry, row):
        used, chain, tail = carry
        return (used + row.sum(), chain * 2, tail + chain), (row * 2, jnp.cos(row) + tail)

    after = dce(lambda a: lax.scan(body, (0.0, 1.0, 2.0), a)[0][0], x)
    scan = only(after, "scan")
    assert (len(scan.carry), len(scan.ys), len(scan.xs)) == (1, 0, 1)
    assert "mul" not in count(scan.body)


def test_scan_loses_unused_xs_and_consts():
    def run(a, k):
        return lax.scan(lambda c, row: (c + 1, (jnp.sin(c), row @ k)), 0.0, a)[1][0]

    scan = only(dce(run, x, x[0]), "scan")
    assert (len(scan.consts), len(scan.xs), scan.length) == (0, 0, 3)


def test_while_loses_dead_carries_on_every_jax_release():
    def run(a):
        body = lambda c: (c[0] + 1, c[1] * 2, c[2] + jnp.cos(c[1]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, body, (0, a, a))[1]

    loop = only(dce(run, x), "while")
    assert len(loop.carry) == 2
    assert count(loop.body) == {"add": 1, "mul": 1}


def test_while_keeps_the_carries_of_its_condition():
    def run(a):
        return lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + c[1], c[1] * 2), (a, a))

    after = dce(lambda a: jnp.sin(run(a)[1]), x)
    assert len(only(after, "while").carry) == 2


def test_cond_loses_dead_results_and_operands():
    def run(p, a, b):
        true = lambda a, b: (jnp.sin(a), jnp.cos(b))  # noqa: E731
        return lax.cond(p, true, lambda a, b: (a, b), a, b)[0]

    cond = only(dce(run, True, x, x), "cond")
    assert (len(cond.operands), len(cond.outs)) == (1, 1)
    assert count(cond.branches[1]) == {"sin": 1}


@jax.custom_jvp
def doubled(a, b):
    return jnp.sin(a), jnp.cos(b)


@doubled.defjvp
def _(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return doubled(a, b), (7 * da, 11 * db + da)


@jax.custom_vjp
def tripled(a, b):
    return jnp.sin(a), jnp.cos(b) * a


tripled.defvjp(
    lambda a, b: (tripled(a, b), (a, b)), lambda res, ct: (ct[0] * 3 + ct[1], ct[1] * res[0])
)


@pytest.mark.parametrize("fun", [doubled, tripled])
@pytest.mark.parametrize("result", [0, 1])
def test_custom_derivatives_survive_the_loss_of_a_result(fun, result):
    run = lambda a, b: fun(a, b)[result].sum()  # noqa: E731
    program = jaxprtool.trace(run, x, x)
    after = Dce()(program)
    type_check(after)
    (eqn,) = [e for e in after.jaxpr.eqns if view(e)]
    assert len(eqn.outvars) == 1
    assert len(view(eqn).body.eqns) <= 2
    for new, old in zip(
        jax.grad(after, argnums=(0, 1))(x, x), jax.grad(run, argnums=(0, 1))(x, x), strict=True
    ):
        np.testing.assert_array_equal(new, old)


def test_shard_map_loses_dead_results_operands_and_their_specs():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    inner = jax.shard_map(
        lambda a, b: (lax.psum(a, "i"), jnp.cos(b)),
        mesh=mesh,
        in_specs=(P("i"), P()),
        out_specs=(P(), P()),
    )
    call = only(dce(lambda a, b: inner(a, b)[0], x, x), "shard_map")
    assert call.in_specs == (P("i"),) and call.out_specs == (P(),)
    assert "cos" not in count(call.body)


def test_bodies_of_primitives_without_a_rule_are_cleaned():
    def solve(matvec, b):
        return b / 2.0

    def matvec(v):
        jnp.cos(v)
        return 2.0 * v

    after = dce(lambda b: lax.custom_linear_solve(matvec, b, solve, symmetric=True), x[0])
    assert "cos" not in count(after.jaxpr)


def test_effects_keep_their_order_at_every_depth():
    seen = []

    def run(a):
        def body(c, row):
            jax.debug.callback(lambda v: seen.append(float(v)), c, ordered=True)
            return c + 1, jnp.cos(row)

        lax.scan(body, 0.0, a)
        jax.debug.callback(lambda v: seen.append(float(v)), 10.0, ordered=True)
        return jnp.sin(a)

    program = Dce()(jaxprtool.trace(run, x))
    type_check(program)
    assert "cos" not in count(program.jaxpr)
    jax.block_until_ready(program(x))
    jax.effects_barrier()
    assert seen == [0.0, 1.0, 2.0, 10.0]


def test_writes_to_a_ref_are_kept():
    def run(a):
        ref = jax.new_ref(a)
        ref[0] = a[1] * 2
        unread = ref[...] + 1  # noqa: F841
        return ref[...]

    after = dce(run, x)
    assert count(after.jaxpr)["swap"] == 1


class TestDceJaxpr:
    """The contract of JAX's internal function."""

    def trace(self):
        closed = jax.make_jaxpr(lambda a, b, c: (jnp.sin(a), jnp.cos(b)))(x, x, x)
        return jaxcompat.open_jaxpr(closed)

    def test_used_inputs_are_returned(self):
        jaxpr, used = dce_jaxpr(self.trace(), [False, True])
        assert used == [False, True, False]
        assert len(jaxpr.invars) == len(jaxpr.outvars) == len(jaxpr.eqns) == 1

    @pytest.mark.parametrize("instantiate", [True, [True, True, True]])
    def test_instantiate_keeps_inputs(self, instantiate):
        jaxpr, used = dce_jaxpr(self.trace(), [True, False], instantiate)
        assert used == [True, True, True]
        assert len(jaxpr.invars) == 3 and len(jaxpr.eqns) == 1

    @pytest.mark.parametrize("flags", [True, [True, False], [False, False], False])
    def test_agrees_with_jax(self, flags):
        ours, used = dce_jaxpr(self.trace(), flags)
        theirs, used_by_theirs = jaxcompat.jax_dce_jaxpr(self.trace(), flags)
        assert used == list(used_by_theirs)
        assert str(ours) == str(theirs)

    def test_constvars_are_kept(self):
        traced = jax.make_jaxpr(lambda a: (a @ np.ones((4, 9), np.float32), jnp.sin(a)))(x)
        closed = as_constants(traced)
        jaxpr, _ = dce_jaxpr(jaxcompat.open_jaxpr(closed), [False, True])
        assert len(jaxpr.constvars) == len(closed.constvars) == 1

    def test_a_wrong_number_of_flags_is_refused(self):
        with pytest.raises(ValueError, match="used_outputs has 3 flags for the jaxpr's 2 results"):
            dce_jaxpr(self.trace(), [True, True, True])


def test_a_plug_in_adds_a_rule_for_its_primitive(monkeypatch):
    asked = []

    def rule(used_outputs, live_inputs, eqn):
        asked.append(used_outputs)
        return [True], eqn

    monkeypatch.setitem(dce_rules, "sin", rule)
    dce_body(jax.make_jaxpr(lambda a: jnp.sin(a) + 1)(x), [True])
    assert asked == [[True]]


def test_a_sown_value_is_kept_only_if_a_part_of_it_is_used():
    def f(x):
        unused = jaxprtool.variable(x * 2, name="unused")
        sown = jaxprtool.variable({"a": jnp.sin(x), "b": (jnp.cos(x), unused)}, name="used")
        jaxprtool.nest(lambda: jaxprtool.variable(jnp.exp(x), name="gone"), scope="s")()
        return sown["a"]

    after = dce(f, x)
    assert count(after.jaxpr) == {"sow": 2, "sin": 1, "cos": 1, "mul": 1}
