"""hoist moves loop-invariant code in front of a loop, if it is worth its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat, sow
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import view
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.loops.schedule import SMALL, Hoist
from tests.programs import Case, prove
from tests.programs.same import count_equations

x = jnp.arange(12.0).reshape(3, 4) / 10
w = jnp.arange(16.0).reshape(4, 4) / 10


def hoist(fun, *args, gradients=False):
    """Return the program of `fun`, inlined, after hoist, which computes the same."""
    case = Case("fun", fun, args)
    before, after, _ = prove(case, lambda p: Hoist()(Inline()(p)), gradients=gradients)
    assert count_equations(after.jaxpr) <= count_equations(before.jaxpr)
    assert Hoist()(after).jaxpr is after.jaxpr
    return after


def traced(fun, *args):
    """Return the same without running it."""
    before = Inline()(jaxprtool.trace(fun, *args))
    after = Hoist()(before)
    type_check(after)
    assert count_equations(after.jaxpr) == count_equations(before.jaxpr)
    return after


def at_top(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def loop_of(jaxpr):
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    return view(eqn)


def inside(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


ZERO = np.float32(0)


def repeat(fun, n, init=ZERO):
    """Return the sum of `n` equal terms; a while loop if `n` is traced."""
    return lax.fori_loop(0, n, lambda i, total: total + fun(), init)


# --- what is hoisted ------------------------------------------------------------------------------


@pytest.mark.proof
def test_equations_of_scan_constants_are_hoisted():
    def run(a, b):
        return lax.scan(lambda c, row: (c + jnp.sin(b) @ jnp.cos(b), row @ b), b, a)

    after = hoist(run, x, w, gradients=True)
    assert at_top(after) == ["sin", "cos", "dot_general", "scan"]
    assert inside(loop_of(after.jaxpr).body) == ["add", "dot_general"]


def test_unused_constants_are_no_longer_operands_of_the_loop():
    after = hoist(lambda a, b: lax.scan(lambda c, row: (c + jnp.sin(b).sum(), row), 0.0, a), x, w)
    (const,) = loop_of(after.jaxpr).consts
    assert const.aval.shape == ()


def test_code_leaves_all_loops_in_which_it_is_invariant():
    def run(a, b, n):
        def body(c, row):
            return c + repeat(lambda: jnp.sin(b).sum() + jnp.exp(row).sum(), n), None

        return lax.scan(body, ZERO, a)

    after = hoist(run, x, w, 2)
    assert at_top(after) == ["sin", "reduce_sum", "scan"]
    scan = loop_of(after.jaxpr)
    assert "exp" in inside(scan.body)
    assert inside(loop_of(scan.body).body) == ["add", "add"]


def test_a_while_loops_condition_and_body_are_hoisted_separately():
    def run(a, b):
        limit = lambda c: c < jnp.exp(b).sum()  # noqa: E731
        return lax.while_loop(limit, lambda c: c + jnp.sin(b).sum(), a)

    after = hoist(run, jnp.float32(1), w)
    assert at_top(after) == ["exp", "reduce_sum", "sin", "reduce_sum", "while"]
    loop = loop_of(after.jaxpr)
    assert (inside(loop.cond), inside(loop.body)) == (["lt"], ["add"])


def test_code_of_loops_in_branches_and_calls_moves_to_the_branch_or_call():
    run = lambda b, n: lax.cond(  # noqa: E731
        n > 0, lambda: repeat(lambda: jnp.sin(b).sum(), n), lambda: jnp.cos(b).sum()
    )
    after = hoist(jax.checkpoint(run), w, 2)
    (remat,) = after.jaxpr.eqns
    assert inside(view(remat).body)[-1] == "cond"
    branches = view(view(remat).body.eqns[-1]).branches
    assert sorted(map(inside, branches)) == [
        ["cos", "reduce_sum"],
        ["sin", "reduce_sum", "while"],
    ]


@pytest.mark.proof
def test_whole_loops_calls_and_draws_are_hoisted():
    @jax.custom_jvp
    def ruled(b):
        return jnp.sin(b)

    ruled.defjvp(lambda p, t: (ruled(*p), 10 * t[0]))

    def run(key, b, n):
        draw = lambda: jax.random.normal(key, (4, 4))  # noqa: E731
        inner = lambda: lax.scan(lambda c, r: (c @ r, None), b, jnp.stack([b] * 3))[0]  # noqa: E731
        return repeat(lambda: ruled(b) + inner() + draw(), n, b)

    after = hoist(run, jax.random.key(0), w, 3)
    assert {"custom_jvp_call", "scan", "random_bits"} <= set(at_top(after))
    assert inside(loop_of_kind(after.jaxpr, "while").body) == ["add", "add"]


def loop_of_kind(jaxpr, kind):
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == kind]
    return view(eqn)


def test_hoisted_equations_keep_the_scopes_of_the_loop():
    def run(b, n):
        with jax.named_scope("out"):
            return lax.scan(lambda c, _: (c + jnp.sin(b), None), b, None, length=3)

    sin, _ = traced(run, w, 2).jaxpr.eqns
    assert str(sin.source_info.name_stack) == "out"


def test_loops_that_share_a_body_share_the_remaining_body():
    body = lambda c, row: (c + jnp.sin(w).sum() + row.sum(), None)  # noqa: E731
    after = hoist(lambda a: (lax.scan(body, 0.0, a)[0], lax.scan(body, 1.0, a)[0]), x)
    first, second = (eqn for eqn in after.jaxpr.eqns if eqn.primitive.name == "scan")
    assert first.params["jaxpr"] is second.params["jaxpr"]
    assert "sin" not in inside(view(first).body)


TABLE = np.arange(4, dtype=np.float32)
from_table = jax.jit(lambda: jnp.sin(TABLE))  # has the table as a constant of its own


def test_constants_of_the_body_are_hoisted_with_their_readers():
    run = lambda a: lax.scan(lambda c, r: (c + from_table() * r, None), a[0], a)  # noqa: E731
    assert len(loop_of(Inline()(jaxprtool.trace(run, x)).jaxpr).body.consts) == 1
    after = hoist(run, x)
    assert "sin" in at_top(after)
    assert not loop_of(after.jaxpr).body.consts
    assert len(after.jaxpr.consts) == 1


# --- what is kept ---------------------------------------------------------------------------------


def test_moves_and_fills_are_kept_unless_hoisted_code_needs_them():
    def run(a, b):
        big = lambda v: jnp.broadcast_to(v, (3, 4, 4))  # noqa: E731
        return lax.scan(lambda c, r: (c * big(b).T.T + lax.iota(jnp.float32, 4), r), big(b), a)

    program = jaxprtool.trace(run, x, w)
    assert Hoist()(program).jaxpr is program.jaxpr
    needed = hoist(lambda a, b: lax.scan(lambda c, r: (c @ jnp.sin(b.T), r), b, a), x, w)
    assert at_top(needed) == ["transpose", "sin", "scan"]


@pytest.mark.proof
def test_equations_of_literals_only_are_kept_unless_expensive():
    def run(a):
        def body(c, row):
            noise = jax.random.uniform(jax.random.key(0), (4,))
            return c + jnp.sqrt(lax.iota(jnp.float32, 4)) + noise * row, None

        return lax.scan(body, a[0], a)

    after = hoist(run, x)
    assert "sqrt" in inside(loop_of(after.jaxpr).body)
    assert {"random_seed", "random_bits"} <= set(at_top(after))


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def test_a_result_larger_than_its_operands_is_kept():
    long = SMALL // 4
    outer = lambda v: v[:, None] * v[None, :]  # noqa: E731

    def run(combine):
        return lambda v, c: lax.scan(lambda c, _: (combine(c, v), None), c, None, length=3)

    sizes = (long,), (long, long)
    after = traced(run(lambda c, v: c * outer(v)), *shapes(*sizes))
    assert at_top(after) == ["scan"]
    # A small result computed from it is hoisted together with it.
    after = traced(run(lambda c, v: c * outer(v).sum()), *shapes(*sizes))
    assert at_top(after)[-2:] == ["reduce_sum", "scan"]
    # So is it if it is small itself, or costs more than its memory.
    after = traced(run(lambda c, v: c * outer(v)), *shapes((100,), (100, 100)))
    assert "mul" in at_top(after)
    dot = lambda c, v: c * (v[:, None] @ v[None, :])  # noqa: E731
    assert "dot_general" in at_top(traced(run(dot), *shapes(*sizes)))


def test_results_of_incomparable_sizes_are_kept():
    n, m = jax.export.symbolic_shape("n, m")
    avals = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]

    def run(a, b):
        outer = a[:, None] * b[None, :]
        body = lambda c, _: (c + jnp.sin(b).sum() + (a[:, None] * b[None, :]), None)  # noqa: E731
        return lax.scan(body, outer, None, length=3)

    program = Inline()(jaxprtool.trace(run, *avals))
    after = Hoist()(program)
    type_check(after)
    assert "sin" in at_top(after)
    assert "mul" in inside(loop_of(after.jaxpr).body)


def collective(a):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    f = lambda b: repeat(lambda: lax.ppermute(b, "d", [(0, 1), (1, 0)]), 2, b)  # noqa: E731
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(a)


def pure(a):
    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return jax.pure_callback(lambda v: np.sin(v), shape, a)


def printing(a):
    jax.debug.print("{}", a)
    return a


STAYS = {
    "callback": lambda a: repeat(lambda: printing(a), 2, a),
    "pure_callback": lambda a: repeat(lambda: pure(a), 2, a),
    "optimization_barrier": lambda a: repeat(lambda: lax.optimization_barrier(a), 2, a),
    "remat": lambda a: repeat(lambda: jax.checkpoint(jnp.sin)(a), 2, a),
    "sow": lambda a: repeat(lambda: sow(a, tag="t", name="v"), 2, a),
    "sow in a call": lambda a: repeat(
        lambda: with_rule(lambda v: sow(v, tag="t", name="v"))(a), 2, a
    ),
    "collective": collective,
    "device_put": lambda a: repeat(lambda: jax.device_put(a, jax.devices()[0]), 2, a),
}


def with_rule(fun):
    function = jax.custom_jvp(fun)
    function.defjvp(lambda p, t: (fun(*p), t[0]))
    return function


@pytest.mark.parametrize("kind", STAYS)
def test_loop_is_unchanged(kind):
    program = Inline()(jaxprtool.trace(STAYS[kind], w))
    assert Hoist()(program).jaxpr is program.jaxpr


def test_equations_on_refs_are_kept():
    def run(a):
        ref = jax.new_ref(a)

        def body(c, _):
            seen = ref[...]
            ref[...] = seen + jnp.sin(a)
            return c + seen.sum(), jax.freeze(jax.new_ref(a))

        return lax.scan(body, ZERO, None, length=3), ref[...]

    after = hoist(run, w)
    assert at_top(after) == ["new_ref", "sin", "scan", "get"]
    names = inside(loop_of(after.jaxpr).body)
    assert names == ["get", "add", "swap", "reduce_sum", "add", "new_ref", "freeze"]


def endless(b):
    return lax.while_loop(lambda v: v < 5, lambda v: v + 1, b)


def test_a_while_loop_is_hoisted_only_from_loops_that_are_known_to_run():
    b = jnp.float32(0.5)
    in_scan = hoist(lambda b: lax.scan(lambda c, _: (c + endless(b), None), 0.0, None, 3)[0], b)
    assert at_top(in_scan) == ["while", "scan"]
    in_condition = hoist(lambda b: lax.while_loop(lambda c: c < endless(b), lambda c: c + 1, b), b)
    assert at_top(in_condition) == ["while", "while"]
    for maybe in (endless, with_rule(endless)):
        program = Inline()(jaxprtool.trace(lambda b, n, f=maybe: repeat(lambda: f(b), n), b, 3))
        assert Hoist()(program).jaxpr is program.jaxpr


def test_possibly_empty_scans_keep_while_loops_and_empty_ones_keep_everything():
    (n,) = jax.export.symbolic_shape("n")
    rows = jax.ShapeDtypeStruct((n, 4), jnp.float32)
    run = lambda a, b: lax.scan(lambda c, r: (c + endless(b) + jnp.sin(b), r), 0.0, a)  # noqa: E731
    after = traced(run, rows, jnp.float32(1))
    assert at_top(after) == ["sin", "scan"]
    program = jaxprtool.trace(run, x[:0], jnp.float32(1))
    assert Hoist()(program).jaxpr is program.jaxpr


def test_constants_are_kept_if_the_enclosing_body_cannot_hold_them():
    @jax.checkpoint
    def run(a):
        body = lambda c, r: (c + from_table() * r + jnp.cos(a[0]), None)  # noqa: E731
        return lax.scan(body, a[0], a)[0]

    (remat,) = hoist(run, x).jaxpr.eqns
    assert "cos" in inside(view(remat).body)
    assert inside(loop_of(view(remat).body).body) == ["sin", "mul", "add", "add"]


def test_a_program_without_loop_invariant_code_is_the_same_object():
    program = jaxprtool.trace(lambda a: lax.scan(lambda c, r: (c + r, c * r), a[0], a), x)
    assert Hoist()(program).jaxpr is program.jaxpr


def test_a_body_has_as_many_argument_names_as_arguments():
    after = traced(lambda a, b: lax.scan(lambda c, r: (c + jnp.sin(b), r), b, a), x, w)
    body = jaxcompat.open_jaxpr(loop_of(after.jaxpr).body)
    names = body.debug_info.arg_names
    assert names is None or len(names) == len(body.invars)
