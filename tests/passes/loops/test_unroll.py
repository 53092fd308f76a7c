"""unroll replaces short scans by their iterations, and keeps all bits and effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat, sow
from jaxprtool.errors import PipelineError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.loops.unroll import Unroll
from tests.programs import Case, prove

x = jnp.arange(12.0).reshape(3, 4) / 10


def unroll(fun, *args, gradients=False, **options):
    """Return the program of `fun` after unroll, which computes the same."""
    _, after, _ = prove(Case("fun", fun, args), Unroll(**options), gradients=gradients)
    assert Unroll(**options)(after).jaxpr is after.jaxpr
    return after


def names(jaxpr):
    """Return the primitives of all equations in order, at every depth."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for _, body in sub_jaxprs(eqn):
            found += names(body)
    return found


def decay(c, row):
    c = c * 0.5 + row
    return c, (jnp.sin(c), c.sum())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_short_scan_becomes_its_iterations(length, reverse):
    run = lambda a: lax.scan(decay, jnp.ones(4), a, reverse=reverse)  # noqa: E731
    after = unroll(run, x[:length], gradients=length == 3)
    assert "scan" not in names(after.jaxpr)
    assert names(after.jaxpr).count("sin") == length


def test_a_longer_scan_is_the_same_object():
    program = jaxprtool.trace(lambda a: lax.scan(decay, jnp.ones(4), a), x)
    assert Unroll(max_length=2)(program).jaxpr is program.jaxpr
    assert "scan" not in names(Unroll(max_length=3)(program).jaxpr)


@pytest.mark.parametrize("options", [{"unroll": 2}, {"_split_transpose": True}])
def test_options_for_running_and_differentiating_a_scan_do_not_matter(options):
    run = lambda a: lax.scan(decay, jnp.ones(4), a, **options)  # noqa: E731
    assert "scan" not in names(unroll(run, x, gradients=True).jaxpr)


def test_scans_inside_scans_branches_and_loops_are_unrolled_too():
    def inner(c, n):
        return lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=n)[0]

    def run(a):
        body = lambda c, r: (inner(c, 2) + r, inner(r, 9))  # noqa: E731
        c, ys = lax.scan(body, a[0], a)
        c = lax.cond(c.sum() > 0, lambda c: inner(c, 2), jnp.cos, c)
        return lax.while_loop(lambda c: c.sum() > 9, lambda c: inner(c, 2), c), ys

    found = names(unroll(run, x).jaxpr)
    assert found.count("scan") == 3  # those of nine iterations, one in each of the three
    assert found.count("sin") == 3 * 2 + 3 + 2 + 2


@pytest.mark.proof
def test_keys_and_narrow_types_are_sliced_and_stacked_like_others():
    keys = jax.random.split(jax.random.key(0), 3)
    small = jnp.arange(3, dtype=jnp.int4)

    def body(c, row):
        key, i = row
        first, second = jax.random.split(key)
        return c + jax.random.uniform(first), (second, i, i > 0, key)

    after = unroll(lambda k, i: lax.scan(body, jnp.float32(0), (k, i)), keys, small)
    assert "scan" not in names(after.jaxpr)


def test_an_empty_scan_that_returns_keys_is_kept():
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    program = jaxprtool.trace(
        lambda k: lax.scan(lambda c, k: (c, jax.random.fold_in(k, 1)), 0, k), keys
    )
    assert Unroll()(program).jaxpr is program.jaxpr


@pytest.mark.proof
def test_rows_of_stacked_results_are_not_sliced_again():
    def run(rows):
        array = jnp.stack(rows)
        forwards, _ = lax.scan(lambda c, r: (jnp.sin(c) * r, None), rows[0], array)
        return lax.scan(lambda c, r: (jnp.cos(c) * r, None), forwards, array[1::2])[0]

    rows = [x[0] * i for i in range(5)]
    one = lambda *rows: (jnp.stack(rows)[2], lax.map(jnp.sin, jnp.stack(rows))[-1])  # noqa: E731
    after = jaxprtool.trace(one, *rows).apply("inline, unroll, dce")
    assert names(after.jaxpr) == ["sin"]
    after = jaxprtool.trace(run, rows).apply("inline, unroll, dce")
    assert set(names(after.jaxpr)) == {"sin", "cos", "mul"}
    prove(Case("run", run, (rows,)), Unroll())


@pytest.mark.proof
def test_effects_happen_in_the_order_of_the_iterations():
    def run(a):
        ref = jax.new_ref(a[0])

        def body(c, row):
            jax.debug.callback(seen.append, row[0], ordered=True)
            ref[...] = ref[...] * c + row
            return c + 1, ref[...]

        return lax.scan(body, jnp.float32(1), a, reverse=True), ref[...]

    seen = []
    program = jaxprtool.trace(run, x)
    after = Unroll()(program)
    type_check(after)
    assert "scan" not in names(after.jaxpr)
    before_leaves, before_seen = jax.tree.leaves(program(x)), list(map(float, seen))
    seen.clear()
    for old, new in zip(before_leaves, jax.tree.leaves(after(x)), strict=True):
        np.testing.assert_array_equal(old, new)
    assert list(map(float, seen)) == before_seen == [float(v) for v in x[::-1, 0]]


def test_weak_types_of_carries_and_results_are_kept():
    def run(a):
        return lax.scan(lambda c, r: (c + r.sum(), (c * 2, 1.5, 2)), 0.0, a)

    before = jaxprtool.trace(run, x)
    after = Unroll()(before)
    type_check(after)
    assert "scan" not in names(after.jaxpr)
    assert after.out_avals == before.out_avals
    for old, new in zip(jax.tree.leaves(before(x)), jax.tree.leaves(after(x)), strict=True):
        np.testing.assert_array_equal(old, new)
        assert (old.dtype, old.weak_type) == (new.dtype, new.weak_type)


def test_a_scan_of_symbolic_length_is_kept_and_one_over_symbolic_rows_is_unrolled():
    (n,) = jax.export.symbolic_shape("n")
    fold = lambda a: lax.scan(lambda c, r: (c + jnp.sin(r).sum(), r * 2), 0.0, a)  # noqa: E731
    program = jaxprtool.trace(fold, jax.ShapeDtypeStruct((n, 4), jnp.float32))
    assert Unroll()(program).jaxpr is program.jaxpr
    program = jaxprtool.trace(fold, jax.ShapeDtypeStruct((3, n), jnp.float32))
    after = Unroll()(program)
    type_check(after)
    assert "scan" not in names(after.jaxpr)
    assert after.out_avals == program.out_avals


def test_iterations_on_devices_vary_over_the_axes_of_the_scan():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def run(a):
        body = lambda c, r: (c + lax.psum(r, "d"), c * 2)  # noqa: E731
        return lax.scan(body, a[0] * 0, a)[1]

    with jax.set_mesh(mesh):
        spec = P(None, "d")
        program = jaxprtool.trace(jax.shard_map(run, in_specs=spec, out_specs=spec), x)
        after = Unroll()(program)
        type_check(after)
        np.testing.assert_array_equal(jax.jit(after)(x), jax.jit(program)(x))
    assert "scan" not in names(after.jaxpr)


def test_a_scan_with_a_sown_value_is_kept():
    def body(c, row):
        return c + jax.jit(lambda r: sow(r, tag="t", name="v"))(row), None

    program = jaxprtool.trace(lambda a: lax.scan(body, a[0], a), x)
    assert Unroll()(program).jaxpr is program.jaxpr


def test_constants_of_the_body_are_held_once_where_they_can_be():
    table = np.arange(4, dtype=np.float32)
    read = jax.jit(lambda c: c * table)  # has the table as a constant of its own
    run = lambda a: lax.scan(lambda c, r: (read(c) + r, None), a[0], a)[0]  # noqa: E731
    after = unroll(lambda a: Inline()(jaxprtool.trace(run, x))(a), x)
    assert "scan" not in names(after.jaxpr)
    assert len(after.jaxpr.consts) == 1
    program = Inline()(jaxprtool.trace(jax.checkpoint(run), x))
    assert "jit" not in names(program.jaxpr)
    assert Unroll()(program).jaxpr is program.jaxpr


def test_iterations_keep_the_scopes_of_the_scan():
    def body(c, row):
        with jax.named_scope("in"):
            return jnp.sin(c) + row, None

    def run(a):
        with jax.named_scope("out"):
            return lax.scan(body, a[0], a)

    sines = [e for e in unroll(run, x).jaxpr.eqns if e.primitive.name == "sin"]
    assert [str(eqn.source_info.name_stack) for eqn in sines] == ["out/in"] * 3


def test_a_negative_length_is_refused():
    with pytest.raises(PipelineError, match="max_length"):
        Unroll(max_length=-1)


def nested(depth):
    """Return a function of nested loops of two iterations."""
    body = jnp.sin
    for _ in range(depth):

        def body(a, inner=body):
            return lax.scan(lambda c, _: (inner(c), None), a, None, length=2)[0]

    return body


def test_nested_loops_are_kept_if_the_program_would_explode():
    after = jaxprtool.trace(nested(30), x).apply("unroll")
    assert "scan" in {eqn.primitive.name for eqn in after.jaxpr.eqns}
    assert sum(1 for _ in equations(jaxcompat.open_jaxpr(after.jaxpr))) <= 20_000


@pytest.mark.proof
def test_only_the_inner_ones_of_nested_loops_are_unrolled(monkeypatch):
    monkeypatch.setattr("jaxprtool.passes.loops.unroll.MOST_EQUATIONS", 5)
    after = Unroll(max_length=2)(jaxprtool.trace(nested(5), x))
    prove(Case("fun", nested(5), (x,)), Unroll(max_length=2))
    assert names(after.jaxpr) == ["scan"] + ["sin"] * 8 + ["scan"] + ["sin"] * 8
