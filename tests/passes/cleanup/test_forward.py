"""forward removes pass-through and duplicate operands and results of loops, branches and calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.regions import view
from jaxprtool.passes.cleanup.forward import Forward
from tests.programs import Case, prove
from tests.programs.same import count_equations

X = jnp.arange(12.0).reshape(3, 4) / 10


def forward(fun, *args, **options):
    """Return the program after forward, which computes the same and is final for forward."""
    before, after, _ = prove(Case("case", fun, args), Forward(), **options)
    assert count_equations(after.jaxpr) <= count_equations(before.jaxpr)
    assert Forward()(after).jaxpr is after.jaxpr
    return after


def only(program, primitive):
    (found,) = [e for e in equations(program.jaxpr) if e.primitive.name == primitive]
    return view(found)


def read(call):
    """Return which operands the body of a call still reads."""
    used = {v for e in call.body.eqns for v in e.invars if not isinstance(v, jaxcompat.Literal)}
    return [v in used for v in call.body.invars]


def same(program, *args):
    """Assert that nothing in it is forwarded."""
    traced = jaxprtool.trace(program, *args)
    assert Forward()(traced).jaxpr is traced.jaxpr


# --- calls ------------------------------------------------------------------------------------


def passes_through(a, b, k):
    y = jnp.sin(a) * k + b
    return a, y, 3, y


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_pass_through_results_of_a_call_bypass_it(wrap):
    after = forward(lambda a: wrap(passes_through)(a, a, 2.0), X)
    (eqn,) = after.jaxpr.eqns
    call = view(eqn)
    assert (len(call.operands), len(call.outs)) == (1, 1)
    argument, result = after.jaxpr.invars[0], call.outs[0]
    first, second, third, fourth = after.jaxpr.outvars
    assert first is argument and second is fourth is result and third.val == 3


def test_a_constant_of_a_body_becomes_one_outside():
    after = forward(lambda a: jax.jit(lambda b: (jnp.cos(b), X))(a), X)
    assert len(only(after, "jit").outs) == 1
    assert after.jaxpr.outvars[1] in after.jaxpr.constvars


def test_values_pass_through_nested_calls():
    def inner(a, k):
        return a, jnp.sin(a) * k

    after = forward(lambda a: jax.jit(lambda b: jax.jit(inner)(b, 2.0))(a), X)
    assert after.jaxpr.outvars[0] is after.jaxpr.invars[0]
    calls = [view(e) for e in equations(after.jaxpr) if e.primitive.name == "jit"]
    assert [(len(c.operands), len(c.outs)) for c in calls] == [(1, 1)] * 2


def test_calls_that_share_a_body_keep_sharing_it():
    inner = jax.jit(lambda a, k: (a, jnp.sin(a) * k))
    after = forward(lambda a: inner(inner(a, 2.0)[1], 2.0), X)
    first, second = (jaxcompat.open_jaxpr(view(e).body) for e in after.jaxpr.eqns)
    assert first is second


def test_donated_operands_are_kept():
    inner = jax.jit(lambda a, b, c: (a, jnp.sin(b) + c), donate_argnums=0)
    after = forward(lambda a: inner(a * 2, a, a), X)
    call = only(after, "jit")
    assert (len(call.operands), len(call.outs)) == (2, 2)
    assert call.operand_params["donated_invars"] == (True, False)


def test_a_donated_operand_gets_no_second_name():
    copy = jax.jit(lambda a: (a, jnp.sin(a)))
    consume = jax.jit(lambda a: a + 1, donate_argnums=0)

    def run(a):
        b, c = copy(a)
        return consume(b), c, a

    program = Forward()(jaxprtool.trace(run, X))
    assert len(view(program.jaxpr.eqns[0]).outs) == 2


def test_results_and_operands_with_a_sharding_are_kept():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, P())
    same(jax.jit(lambda a: (a, jnp.sin(a)), out_shardings=sharding), X)
    same(jax.jit(lambda a, k: (a, jnp.sin(a)), in_shardings=sharding), X, 2.0)


def test_results_of_a_differentiated_remat_stay_behind_its_barrier():
    program = jaxprtool.trace(lambda a: jax.checkpoint(passes_through)(a, a, 2.0), X)
    (eqn,) = program.jaxpr.eqns
    eqn = eqn.replace(params={**eqn.params, "differentiated": True})
    after = Forward()(program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[eqn])))
    call = only(after, "remat2")
    assert (len(call.operands), len(call.outs)) == (1, 3)  # the two equal ones are merged


@jax.custom_jvp
def forwarded(a, b, k):
    return a, b * k


@forwarded.defjvp
def _(primals, tangents):
    a, b, k = primals
    return forwarded(a, b, k), (tangents[0] * 3, tangents[0] + tangents[1] * 5)


@jax.custom_vjp
def backward_forwarded(a, b, k):
    return a, b * k


backward_forwarded.defvjp(
    lambda a, b, k: (backward_forwarded(a, b, k), k),
    lambda k, ct: (ct[0] * 3 + ct[1], ct[1] * 5, k),
)


@pytest.mark.parametrize("fun", [forwarded, backward_forwarded])
def test_custom_derivatives_keep_their_signature_and_are_rewritten_inside(fun):
    run = lambda a: fun(a, a, 2.0)  # noqa: E731
    after = forward(run, X)
    (eqn,) = after.jaxpr.eqns
    call = view(eqn)
    assert (len(call.operands), len(call.outs)) == (3, 2)
    assert read(call) == [True, False, False]
    loss = lambda f: jax.grad(lambda a: sum(jnp.sum(r) for r in f(a)))  # noqa: E731
    np.testing.assert_array_equal(loss(after)(X), loss(run)(X))


# --- branches ---------------------------------------------------------------------------------


@pytest.mark.proof
def test_results_that_all_branches_pass_through_bypass_them():
    branches = [
        lambda a, b, k: (b, a * k, 1, a * k, a),
        lambda a, b, k: (a, a, 1, a, jnp.sin(b)),
        lambda a, b, k: (b, b + k, 1, b + k, a),
    ]
    after = forward(lambda i, a: lax.switch(i, branches, a, a, 2.0), 1, X)
    cond = only(after, "cond")
    assert (len(cond.operands), len(cond.outs)) == (1, 3)
    handed, _, one, *_ = after.jaxpr.outvars
    assert handed is after.jaxpr.invars[1] and one.val == 1


def test_a_result_that_one_branch_computes_is_kept():
    branches = [lambda a: (a, 1), lambda a: (jnp.sin(a), 1)]
    after = forward(lambda i, a: lax.switch(i, branches, a), 1, X)
    assert len(only(after, "cond").outs) == 1


# --- loops ------------------------------------------------------------------------------------


def test_loop_invariant_carries_of_a_scan_become_constants():
    def run(a, w):
        start = jnp.sum(a), w, w, 2.0

        def body(carry, row):
            c, p, q, k = carry
            return (c + row @ p * k, q, p, 2.0), c

        (c, p, _, k), ys = lax.scan(body, start, a)
        return c, p, k, ys

    after = forward(run, X, X[0], gradients=False)  # a scalar has no gradient
    scan = only(after, "scan")
    assert (len(scan.consts), len(scan.carry), len(scan.xs)) == (1, 1, 1)
    assert after.jaxpr.outvars[1] is after.jaxpr.invars[1]
    assert after.jaxpr.outvars[2].val == 2.0


def test_carries_that_swap_different_values_are_kept():
    body = lambda c, row: ((c[1], c[0]), row + c[0])  # noqa: E731
    same(lambda a, w: lax.scan(body, (a[0], w), a), X, X[1])


def test_carries_that_start_and_stay_equal_are_merged():
    def body(carry, row):
        a, b, c = carry
        shared = b + row  # a, b and c are always equal and feed each other
        return (shared, shared, shared), a * c

    after = forward(lambda a, w: lax.scan(body, (w, w, w), a), X, X[0])
    assert len(only(after, "scan").carry) == 1
    first, second, third, _ = after.jaxpr.outvars
    assert first is second and second is third


def test_a_long_delay_line_is_resolved_by_doubling():
    def delayed(carry, row):
        return (*carry[1:], row), carry[0]

    run = lambda body: lambda a, w: lax.scan(body, (w,) * 12, a)  # noqa: E731
    same(run(delayed), X, X[0])  # in the end all differ

    def turned(carry, row):
        return (*carry[1:], carry[0]), carry[0] + row

    after = forward(run(turned), X, X[0])
    assert len(only(after, "scan").carry) == 0


def test_one_carry_represents_equal_ones():
    def body(carry, row):
        both = carry[0] * row
        return (both, both), None

    after = forward(lambda a, w: lax.scan(body, (w, w), a)[0][1], X, X[0])
    assert len(only(after, "scan").carry) == 1


def test_slices_that_are_passed_through_duplicated_or_repeated():
    def body(carry, rows):
        a, b, zero, row = rows
        return carry + a * b + zero + row, (a, carry, carry)

    def run(a, r):
        xs = a, a, jnp.zeros(3), jnp.broadcast_to(r, (3, 4))
        return lax.scan(body, r, xs)

    after = forward(run, X, X[0])
    scan = only(after, "scan")
    assert (len(scan.consts), len(scan.xs), len(scan.ys)) == (1, 1, 1)
    _, slices, first, second = after.jaxpr.outvars
    assert slices is after.jaxpr.invars[0] and first is second


def test_a_reversed_scan_passes_its_slices_through_in_order():
    after = forward(lambda a: lax.scan(lambda c, r: (c + r, r), a[0], a, reverse=True), X)
    assert after.jaxpr.outvars[1] is after.jaxpr.invars[0]


def test_loop_invariant_carries_of_a_while_become_constants_of_their_readers():
    def run(n, a, w):
        body = lambda c: (c[0] + 1, c[1] * c[2] * c[3], c[2], c[3], c[4])  # noqa: E731
        return lax.while_loop(lambda c: c[0] < c[4], body, (0, a, w, 2.0, n))

    after = forward(run, 3, X, X[0], gradients=False)  # a scalar has no gradient
    loop = only(after, "while")
    counts = len(loop.cond_consts), len(loop.body_consts), len(loop.carry)
    assert counts == (1, 1, 2)
    assert after.jaxpr.outvars[2] is after.jaxpr.invars[2]
    assert after.jaxpr.outvars[3].val == 2.0


def test_a_while_that_never_starts_returns_its_operands():
    def run(n, a):
        body = lambda c: (c[0] + 1, c[1] + c[2], c[1] + c[2])  # noqa: E731
        return lax.while_loop(lambda c: c[0] < n, body, (5, a, a))

    forward(run, 3, X)


# --- what is kept ---------------------------------------------------------------------------------


def test_refs_are_neither_merged_nor_forwarded():
    def run(a):
        first, second = jax.new_ref(a), jax.new_ref(a)

        def body(i, carry):
            first[i] = carry
            second[i] = carry + first[i]
            return carry * 1.5

        lax.fori_loop(0, 3, body, a[0])
        return first[...], second[...]

    forward(run, X)


def test_effects_keep_their_loops_and_calls():
    def run(a):
        def body(carry, row):
            jax.debug.callback(lambda *_: None, carry, ordered=True)
            return carry, row

        return lax.scan(body, a[0], a)

    after = forward(run, X)
    scan = only(after, "scan")
    assert (len(scan.carry), len(scan.ys), len(scan.consts)) == (0, 0, 1)
    assert scan.eqn.effects


def test_shard_map_merges_only_values_of_the_same_spec():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    inner = jax.shard_map(
        lambda a, b, c: (a * b, a * b, a, c),
        mesh=mesh,
        in_specs=(P("i"), P("i"), P()),
        out_specs=(P("i"), P("i"), P("i"), P()),
    )

    def run(a):
        return inner(a, a, a)

    call = only(forward(run, X, gradients=False), "shard_map")
    assert (call.in_specs, len(call.outs)) == ((P("i"), P()), 4)


def test_symbolic_lengths():
    (n,) = jax.export.symbolic_shape("n")
    body = lambda c, r: ((c[0] + r[0] + r[1], c[1]), (c[1], r[0]))  # noqa: E731
    run = lambda a: lax.scan(body, (0.0, 1.0), (a, a))  # noqa: E731
    program = jaxprtool.trace(run, jax.ShapeDtypeStruct((n,), jnp.float32))
    scan = only(Forward()(program), "scan")
    assert (len(scan.carry), len(scan.xs), len(scan.ys)) == (1, 1, 1)


def test_a_program_with_nothing_to_forward_is_the_same_object():
    same(jax.jit(lambda a, b: (jnp.sin(a), jnp.cos(b))), X, X)
    same(lambda a: lax.scan(lambda c, r: (c + r, c), a[0], a), X)


def test_sown_values_are_kept():
    def run(a):
        inner = jaxprtool.nest(lambda b, c: (jaxprtool.variable(b * c, name="w"), b), scope="s")
        return inner(a, a)

    after = forward(run, X)
    assert [e.primitive.name for e in equations(after.jaxpr)].count("sow") == 1
    assert after.jaxpr.outvars[1] is after.jaxpr.invars[0]
