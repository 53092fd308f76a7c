"""cse merges equal equations, at every depth, and no others."""

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
from jaxprtool.passes.cleanup.cse import Cse
from tests.programs.same import same

x = jnp.arange(12.0).reshape(3, 4) / 10
y = x + 1


def count(jaxpr):
    """Count equations by primitive, at every depth."""
    total = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for _, body in sub_jaxprs(eqn):
            total += count(body)
    return total


def cse(fun, *args):
    """Return the program of `fun` after cse, which computes the same and is final for cse."""
    before = jaxprtool.trace(fun, *args)
    after = Cse()(before)
    type_check(after)
    assert Cse()(after).jaxpr is after.jaxpr
    if after.jaxpr is not before.jaxpr:
        same(before, after, jax.tree.leaves(args), gradients=False)
    return after


def test_equal_equations_are_merged():
    after = cse(lambda a: jnp.sin(a) * 2.0 + jnp.sin(a) * 2.0, x)
    assert count(after.jaxpr) == {"sin": 1, "mul": 1, "add": 1}


def test_a_program_without_repetition_is_the_same_object():
    program = jaxprtool.trace(lambda a: jax.jit(jnp.sort)(jnp.sin(a)) + jnp.cos(a), x)
    assert Cse()(program) is program


def scan_twice(a, first, second):
    def by(function):
        return lax.scan(lambda c, row: (c + function(row), c * 2.0), a[0] * 0, a)

    return by(first), by(second)


@pytest.mark.proof
def test_equal_loops_are_merged_after_their_bodies():
    after = cse(lambda a: scan_twice(a, jnp.sin, lambda row: jnp.sin(row) * 1), x)
    assert count(after.jaxpr)["scan"] == 2
    after = cse(lambda a: scan_twice(a, jnp.sin, jnp.sin), x)
    assert count(after.jaxpr)["scan"] == 1
    after = cse(lambda a: lax.scan(lambda c, r: (c + jnp.sin(r), jnp.sin(r)), a[0], a), x)
    assert count(after.jaxpr)["sin"] == 1


def test_equal_branches_and_calls_are_merged():
    def fun(a):
        calls = [jax.jit(lambda b: jnp.sort(b) + 1)(a) for _ in range(2)]
        branches = [lax.cond(a[0, 0] > 0, lambda b: b * 2, jnp.sin, a) for _ in range(2)]
        return calls, branches

    after = cse(fun, x)
    assert count(after.jaxpr)["cond"] == 1
    assert count(after.jaxpr)["sort"] == 1


@pytest.mark.parametrize("op", [jnp.add, jnp.multiply, jnp.equal, jnp.not_equal])
def test_commutative_operands_are_reordered_if_all_bits_agree(op):
    after = cse(lambda a, b: (op(a, b), op(b, a)), x, y)
    assert len(after.jaxpr.eqns) == 1


@pytest.mark.parametrize("op", [jnp.subtract, jnp.divide, jnp.maximum, jnp.minimum, jnp.less])
def test_operands_in_another_order_differ_if_a_bit_might(op):
    # The larger of 0.0 and -0.0 depends on the order.
    assert len(cse(lambda a, b: (op(a, b), op(b, a)), x, y).jaxpr.eqns) == 2


@pytest.mark.proof
def test_integers_commute_where_floats_do_not():
    i, j = jnp.arange(3), jnp.arange(3) + 1
    assert len(cse(lambda a, b: (lax.max(a, b), lax.max(b, a)), i, j).jaxpr.eqns) == 1
    assert len(cse(lambda a, b: (a & b, b & a, a ^ b, b ^ a), i, j).jaxpr.eqns) == 2
    a = x.astype(complex)
    assert len(cse(lambda a, b: (a * b, b * a), a, 1j * a).jaxpr.eqns) == 2


@pytest.mark.parametrize(
    "fun",
    [
        lambda a: (a * 0.0, a * -0.0),
        lambda a: (a * 2.0, a + 2.0),
        lambda a: (a.sum(0), a.sum(1)),
        lambda a: (lax.integer_pow(a, 2), lax.integer_pow(a, 3)),
        lambda a: (a.astype(int), a.astype(jnp.bfloat16)),
        lambda a: (lax.reduce_precision(a, 5, 10), lax.reduce_precision(a, 8, 7)),
    ],
)
def test_different_literals_or_parameters_prevent_merging(fun):
    program = jaxprtool.trace(fun, x)
    assert Cse()(program).jaxpr is program.jaxpr


@pytest.mark.proof
def test_random_bits_are_merged_only_with_the_same_key():
    def fun(key):
        one, other = jax.random.split(key)
        return [jax.random.bits(k, (2,)) for k in (one, other, one, key)]

    after = cse(fun, jax.random.key(0))
    assert count(after.jaxpr)["random_bits"] == 3


def test_effects_are_never_merged():
    def fun(a):
        ref = jax.new_ref(a)
        first = ref[...]
        ref[...] = first * 2
        jax.debug.print("x")
        jax.debug.print("x")
        return first, ref[...], jax.jit(lambda: ref[...])(), jax.jit(lambda: ref[...])()

    before = jaxprtool.trace(fun, x)
    assert count(Cse()(before).jaxpr) == count(before.jaxpr)


@pytest.mark.parametrize(
    "fun",
    [
        lax.optimization_barrier,
        jnp.copy,
        jax.checkpoint(jnp.sin),
        jax.jit(lambda a: lax.optimization_barrier(a) * 2),
        lambda a: jax.pure_callback(np.sin, a, a),
        lambda a: lax.rng_uniform(0.0, 1.0, (2,)),
        lambda a: jaxprtool.sow(a, tag="t", name="n", mode="append"),
        jaxprtool.nest(lambda a: jaxprtool.sow(a, tag="t", name="n", mode="append"), scope="s"),
    ],
)
def test_deliberate_repetition_is_kept(fun):
    before = jaxprtool.trace(lambda a: (fun(a), fun(a)), x)
    assert count(Cse()(before).jaxpr) == count(before.jaxpr)


def test_remat_still_recomputes():
    def loss(a):
        return jax.checkpoint(lambda b: jnp.sin(jnp.sin(b)))(a).sum()

    before = jaxprtool.trace(jax.value_and_grad(loss), x)
    after = Cse()(before)
    assert count(after.jaxpr)["remat2"] == count(before.jaxpr)["remat2"] > 0
    assert count(after.jaxpr)["sin"] == count(before.jaxpr)["sin"]


def test_custom_calls_are_merged_if_their_rules_are_the_same_functions():
    def make(factor):
        @jax.custom_jvp
        def f(a):
            return jnp.sin(a)

        f.defjvp(lambda primals, tangents: (f(*primals), factor * tangents[0]))
        return f

    f, g = make(2.0), make(3.0)
    after = cse(lambda a: (f(a), f(a), g(a)), x)
    assert count(after.jaxpr)["custom_jvp_call"] == 2

    @jax.custom_vjp
    def h(a):
        return jnp.cos(a)

    h.defvjp(lambda a: (h(a), a), lambda a, ct: (ct * a,))
    after = cse(lambda a: h(a) + h(a), x)
    assert count(after.jaxpr)["custom_vjp_call"] == 1


def test_results_dropped_by_one_equation_are_taken_from_the_other():
    both = jax.jit(lambda b: (jnp.sin(b), jnp.cos(b)))
    before = jaxprtool.trace(lambda b: both(b), x)
    jaxpr, (eqn,), (v,) = before.jaxpr, before.jaxpr.eqns, before.jaxpr.invars
    one, other = (
        eqn.replace(
            outvars=[
                jaxcompat.DropVar(o.aval) if i == dropped else jaxcompat.Var(o.aval)
                for i, o in enumerate(eqn.outvars)
            ],
        )
        for dropped in (0, 1)
    )
    parts = {"constvars": [], "consts": [], "invars": [v], "eqns": [one, other]}
    outs = [one.outvars[1], other.outvars[0]]
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, outvars=outs, debug_info=jaxpr.debug_info, **parts)
    program = before.replace(jaxpr=jaxpr)
    after = Cse()(program)
    type_check(after)
    assert len(after.jaxpr.eqns) == 1
    same(program, after, [x])


def test_equal_constants_are_stored_once():
    one, other = (np.arange(12.0, dtype=np.float32).reshape(3, 4) for _ in range(2))
    third = one.copy()
    third[0, 0] = -0.0
    program = jaxprtool.trace(lambda a: (a + one, a + other, a + third), x)
    before = len(program.jaxpr.consts)
    after = cse(lambda a: (a + one, a + other, a + third), x)
    assert before == 3 and len(after.jaxpr.consts) == 2
    assert len(after.jaxpr.eqns) == 2


@pytest.mark.proof
def test_equal_random_keys_are_stored_once():
    keys = [jax.random.key(7) for _ in range(2)] + [jax.random.key(8)]
    after = cse(lambda a: [jax.random.bits(k, a.shape) for k in keys], x)
    assert count(after.jaxpr)["random_bits"] == 2
    assert len(after.jaxpr.consts) == 2


def test_equal_constants_of_inner_bodies_are_stored_once():
    one, other = (np.arange(4.0, dtype=np.float32) for _ in range(2))
    inner = jax.make_jaxpr(lambda r: (r + one, r * other))(x[0])
    outer = jax.jit(lambda r: jaxcompat.jaxpr_as_fun(inner)(r))
    program = jaxprtool.trace(lambda r: outer(r), x[0])
    call = view(program.jaxpr.eqns[0]).rebuild(body=inner, operands=tuple(program.jaxpr.invars))
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[call]))
    after = Cse()(program)
    type_check(after)
    assert len(view(after.jaxpr.eqns[0]).body.consts) == 1
    same(program, after, [x[0]])


def test_equal_bodies_become_one_object():
    def layer(a):
        return jax.checkpoint(lambda b: jnp.sin(b) * 2)(a)

    after = cse(lambda a: layer(layer(a)), x)
    first, second = [view(e) for e in after.jaxpr.eqns]
    bodies = [jaxcompat.open_jaxpr(call.body) for call in (first, second)]
    assert bodies[0] is bodies[1]


def test_collectives_on_the_same_operand_are_merged():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=P("i"), out_specs=P())
    def fun(a):
        return lax.psum(a, "i") + lax.psum(a, "i")

    after = cse(fun, x)
    total = count(after.jaxpr)
    assert sum(n for name, n in total.items() if name.startswith("psum")) == 1


def test_symbolic_dimensions_are_compared():
    n, m = jax.export.symbolic_shape("n, m")
    shape = jax.ShapeDtypeStruct((n, m), jnp.float32)

    def fun(a):
        flat = [a.reshape(-1), a.reshape(-1)]
        return flat[0] + flat[1], jnp.zeros((n,)), jnp.zeros((m,))

    before = jaxprtool.trace(fun, shape)
    after = Cse()(before)
    type_check(after)
    assert count(after.jaxpr)["reshape"] == 1
    assert count(after.jaxpr)["broadcast_in_dim"] == count(before.jaxpr)["broadcast_in_dim"]
