"""Views of an equation are the same on every JAX release, and rebuild it unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxprtool import jaxcompat
from jaxprtool.ir import regions
from jaxprtool.ir.regions import (
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Scan,
    ShardMap,
    While,
    holds_jaxpr,
    map_sub_jaxprs,
    sub_jaxprs,
    view,
)

x = jnp.arange(12.0).reshape(3, 4)


def equation(fun, *args):
    """Return the last equation of a traced function."""
    return jax.make_jaxpr(fun)(*args).eqns[-1]


@jax.custom_jvp
def jvp_fun(a):
    return jnp.sin(a)


jvp_fun.defjvp(lambda p, t: (jvp_fun(p[0]), t[0]))


@jax.custom_vjp
def vjp_fun(a):
    return jnp.sin(a)


vjp_fun.defvjp(lambda a: (vjp_fun(a), ()), lambda res, ct: (ct,))


def sharded(a):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(a)


def printing(a):
    jax.debug.print("{}", a)
    return a


CASES = {
    "scan": (Scan, lambda a: lax.scan(lambda c, r: (c + r @ a[0], r * c), 0.0, a, reverse=True)),
    "scan with effects": (Scan, lambda a: lax.scan(lambda c, r: (c, printing(r)), 0.0, a)),
    "while": (While, lambda a: lax.while_loop(lambda c: c.sum() < a.sum(), lambda c: c + a[0], a)),
    "cond": (Cond, lambda a: lax.switch(2, [jnp.sin, jnp.cos, printing], a)),
    "jit": (Call, lambda a: jax.jit(jnp.sin, donate_argnums=0)(a)),
    "remat": (Call, lambda a: jax.checkpoint(lambda b: jnp.sin(jnp.sin(b)))(a)),
    "custom_jvp": (CustomJVP, jvp_fun),
    "custom_vjp": (CustomVJP, vjp_fun),
    "shard_map": (ShardMap, sharded),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rebuilt_equation_is_the_same_equation(case):
    cls, fun = CASES[case]
    eqn = equation(fun, x)
    new = view(eqn).rebuild()
    assert type(view(eqn)) is cls
    assert str(new) == str(eqn)
    assert new.effects == eqn.effects
    assert new.params.keys() == eqn.params.keys()
    assert new.source_info is eqn.source_info and new.ctx is eqn.ctx


@pytest.mark.parametrize("case", CASES)
def test_bodies_are_closed_jaxprs(case):
    eqn = equation(CASES[case][1], x)
    v = view(eqn)
    bodies = [b for n in ("body", "cond") if (b := getattr(v, n, None))]
    for body in [*bodies, *getattr(v, "branches", ())]:
        assert isinstance(body, jaxcompat.ClosedJaxpr)
        assert len(body.constvars) == len(body.consts)


def test_scan_sorts_its_operands_by_role():
    scan = view(equation(CASES["scan"][1], x))
    assert [len(g) for g in (scan.consts, scan.carry, scan.xs)] == [1, 1, 1]
    assert [len(g) for g in (scan.carry_outs, scan.ys)] == [1, 1]
    assert (scan.length, scan.reverse, scan.unroll) == (3, True, 1)


def test_scan_rebuilt_with_fewer_operands_has_new_counts():
    scan = view(equation(lambda a: lax.scan(lambda c, r: (c + 1.0, r), 0.0, a), x))
    trimmed = jax.make_jaxpr(lambda c: c + 1.0)(0.0)
    new = view(scan.rebuild(xs=(), ys=(), body=trimmed))
    assert [len(g) for g in (new.consts, new.carry, new.xs, new.ys)] == [0, 1, 0, 0]


def test_while_sorts_its_operands_by_role():
    loop = view(equation(CASES["while"][1], x))
    assert [len(g) for g in (loop.cond_consts, loop.body_consts, loop.carry)] == [1, 1, 1]
    assert loop.cond.out_avals[0].dtype == bool


def test_a_plain_equation_has_no_view():
    assert view(equation(jnp.sin, x)) is None


def test_custom_rules_are_adapted_to_the_remaining_results():
    @jax.custom_jvp
    def two(a):
        return jnp.sin(a), jnp.cos(a)

    two.defjvp(lambda p, t: (two(p[0]), (3 * t[0], 5 * t[0])))
    kept = view(equation(two, x)).with_outputs([False, True])
    jaxpr = jax.make_jaxpr(two)(x)
    closed = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=(),
        consts=(),
        invars=kept.operands,
        outvars=kept.outs,
        eqns=[kept.eqn],
        debug_info=jaxcompat.filter_debug_info(jaxpr.debug_info, [True], [False, True]),
    )
    primal, tangent = jax.jvp(jax.extend.core.jaxpr_as_fun(closed), (x,), (x,))
    np.testing.assert_array_equal(primal[0], jnp.cos(x))
    np.testing.assert_array_equal(tangent[0], 5 * x)


def test_sub_jaxprs_are_found_in_tuples_and_records():
    solve = lambda a: lax.custom_linear_solve(lambda v: 2 * v, a, lambda m, b: b / 2)  # noqa: E731
    paths = [path for path, _ in sub_jaxprs(equation(solve, x[0]))]
    assert "jaxprs.matvec" in paths and "jaxprs.solve" in paths
    paths = [path for path, _ in sub_jaxprs(equation(CASES["cond"][1], x))]
    assert paths == ["branches[0]", "branches[1]", "branches[2]"]


@pytest.mark.parametrize("case", CASES)
def test_an_identity_over_sub_jaxprs_keeps_every_parameter(case):
    eqn = equation(CASES[case][1], x)
    assert holds_jaxpr(eqn.params.values())
    assert all(v is eqn.params[k] for k, v in map_sub_jaxprs(lambda j: j, eqn).items())


def test_holds_jaxpr_is_false_for_plain_parameters():
    eqn = equation(lambda a: a @ a.T, x)
    assert eqn.params and not holds_jaxpr(eqn.params.values())


def test_keep_refuses_flags_of_another_length():
    with pytest.raises(ValueError):
        regions.keep((1, 2), [True])
