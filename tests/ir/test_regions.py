"""Regions: the edges of loops, branches and calls match JAX, and equations follow them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, Var, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.ir.regions import regions
from jaxprtool.jaxcompat import replace_jaxpr
from tests.programs.repeat import repeat

x, c = jnp.arange(6.0).reshape(3, 2), jnp.float32(0.5)


def of(fun, *args):
    """Return the regions of the last equation with a body, and its jaxpr."""
    closed = jax.make_jaxpr(fun)(*args)
    found = [inside for eqn in closed.eqns if (inside := regions(eqn)) is not None]
    return found[-1], closed


def scanned(x, c):
    def step(carry, row):
        total, count = carry
        return (total + row * c, count + 1), (row.sum(), count)

    return jax.lax.scan(step, (x[0], 0), x, reverse=True)


def looped(x, c):
    def body(state):
        total, count, _ = state
        return total + c, count + 1, total

    return jax.lax.while_loop(lambda state: state[1] < c * 8, body, (x, 0, x))


def branched(x, c):
    return jax.lax.switch(
        (c * 2).astype(int), [lambda a, b: (a, b), lambda a, b: (b * a, b + 1)], x, c
    )


def called(x, c):
    return jax.jit(lambda a, b: (a * b, b))(x, c)


def repeated(x, c):
    def body(rows, carry, consts):
        return [carry[1] + consts[0], carry[0] * rows[0].sum()], [carry[0]]

    return repeat(body, [c, c + 1], [c], [x])


FUNCTIONS = [scanned, looped, branched, called, repeated]


def run(inside, operands, reverse):
    """Evaluate an equation, using only its edges."""
    sliced = {i for field in inside.edges.sliced for i in inside.operands[field]}
    stacked = {i for field in inside.edges.stacked for i in inside.results[field]}
    state, results = list(operands), {out: operands[i] for i, out in inside.carried}
    rows = {i: [] for i in stacked}
    trips = range(100) if inside.view.trips is None else range(inside.view.trips)
    for trip in reversed(trips) if reverse else trips:
        now = [v[trip] if i in sliced else v for i, v in enumerate(state)]
        numbers = range(len(inside.bodies))
        if inside.predicates:
            numbers = [int(np.clip(now[inside.predicates[0]], 0, len(inside.bodies) - 1))]
        for number in numbers:
            region = inside.regions[number]
            outs = jaxpr_as_fun(inside.bodies[number])(*(now[i] for i in region.ins))
            if region.is_predicate and not outs[0]:
                return results
            for value, out, operand in zip(outs, region.outs, region.next_iteration, strict=True):
                if out in stacked:
                    rows[out].append(value)
                elif out is not None:
                    results[out] = value
                if operand is not None:
                    state[operand] = value
    order = -1 if reverse else 1
    return results | {i: jnp.stack(values[::order]) for i, values in rows.items()}


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_evaluation_along_the_edges_agrees_with_jax(fun):
    inside, closed = of(fun, x, c)
    before = closed.eqns[: closed.eqns.index(inside.eqn)]
    names = dict(zip(closed.jaxpr.invars, (x, c), strict=True))
    for eqn in before:
        operands = [v.val if isinstance(v, Literal) else names[v] for v in eqn.invars]
        outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        names.update(
            zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True)
        )
    operands = [v.val if isinstance(v, Literal) else names[v] for v in inside.eqn.invars]
    results = run(inside, operands, reverse=inside.eqn.params.get("reverse", False))
    names.update((var, results[i]) for i, var in enumerate(inside.eqn.outvars))
    got = [names[v] for v in closed.jaxpr.outvars]
    for ours, theirs in zip(got, jax.tree.leaves(fun(x, c)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_an_equation_rebuilt_from_the_same_bodies_is_the_same(fun):
    inside, closed = of(fun, x, c)
    new, old = inside.rebuild(inside.bodies), inside.eqn
    assert new.invars == list(old.invars) and new.outvars == list(old.outvars)
    assert new.effects == old.effects
    before = closed.eqns[: closed.eqns.index(old)]
    assert str(jaxcompat.replace_jaxpr(closed, eqns=[*before, new])) == str(closed)


@pytest.mark.parametrize("fun", [scanned, looped, called, repeated])
@pytest.mark.parametrize("first", [False, True])
def test_new_constants_are_passed_to_the_body(fun, first):
    inside, closed = of(fun, x, c)
    number = len(inside.bodies) - 1
    region, body = inside.regions[number], inside.bodies[number]
    atom, inner = closed.jaxpr.invars[1], Var(closed.jaxpr.invars[1].aval)
    more = {region.constants: [atom]}
    invars = inside.arguments(region, body.invars, {region.constants: [inner]}, first=first)
    bodies = [*inside.bodies[:number], replace_jaxpr(body, invars=invars)]
    new = regions(inside.rebuild(bodies, more=more, first=first))
    at = new.regions[number].ins[new.bodies[number].invars.index(inner)]
    assert new.eqn.invars[at] is atom and at in new.operands[region.constants]
    assert (at == new.operands[region.constants][0]) or not first
    new_eqns = [*closed.eqns[: closed.eqns.index(inside.eqn)], new.eqn]
    changed = jaxcompat.replace_jaxpr(closed, eqns=new_eqns)
    for got, want in zip(jaxpr_as_fun(changed)(x, c), jax.tree.leaves(fun(x, c)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fun", [scanned, called, repeated])
def test_new_results_are_returned(fun):
    inside, closed = of(fun, x, c)
    (region,), (body,) = inside.regions, inside.bodies
    field = (*inside.edges.stacked, region.result_fields[-1])[0]
    value = body.outvars[-1]
    outvars = inside.outcomes(region, body.outvars, {field: [value]})
    aval = value.aval
    if inside.edges.stacked:
        aval = jaxcompat.stacked_aval(3, aval)
    out = Var(aval)
    new = inside.rebuild([replace_jaxpr(body, outvars=outvars)], more_results={field: [out]})
    before = closed.eqns[: closed.eqns.index(inside.eqn)]
    debug = closed.jaxpr.debug_info._replace(result_paths=None)
    parts = closed.jaxpr.constvars, closed.consts, closed.jaxpr.invars
    changed = jaxcompat.new_jaxpr(*parts, [out, *closed.jaxpr.outvars], [*before, new], debug)
    got = jaxpr_as_fun(changed)(x, c)
    for ours, theirs in zip(got[1:], jax.tree.leaves(fun(x, c)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert got[0].shape == aval.shape


def test_facts_flow_forward_to_a_fixed_point_over_iterations():
    inside, _ = of(looped, x, c)
    condition, body = inside.regions
    assert condition.is_predicate and not body.is_predicate
    start = {i: n for n, (i, _) in enumerate(inside.carried)}
    facts = [start.get(i) != 0 for i in range(len(inside.eqn.invars))]  # `total` is unknown

    def through(number, known):
        jaxpr = jaxcompat.open_jaxpr(inside.bodies[number])
        env = dict(zip(jaxpr.invars, known, strict=True))
        for eqn in jaxpr.eqns:
            fact = all(env.get(v, True) for v in eqn.invars if not isinstance(v, Literal))
            env.update(dict.fromkeys(eqn.outvars, fact))
        return [isinstance(v, Literal) or env[v] for v in jaxpr.outvars]

    operands, results = inside.forward(facts, through, lambda a, b: a and b)
    assert results == [False, True, False]  # `last` becomes `total` in the first iteration
    assert [operands[i] for i, _ in inside.carried] == results
    facts = [start.get(i) != 1 for i in range(len(inside.eqn.invars))]  # `count` is unknown
    assert inside.forward(facts, through, lambda a, b: a and b)[1] == [True, False, True]
    assert not any(inside.forward(facts, through, lambda a, b: a and b, control=True)[1])


def test_facts_flow_backward_through_all_iterations():
    inside, _ = of(looped, x, c)

    def through(number, asked):
        jaxpr = jaxcompat.open_jaxpr(inside.bodies[number])
        used = {v for v, flag in zip(jaxpr.outvars, asked, strict=True) if flag}
        for eqn in reversed(jaxpr.eqns):
            if not used.isdisjoint(eqn.outvars):
                used.update(v for v in eqn.invars if not isinstance(v, Literal))
        return [v in used for v in jaxpr.invars]

    carried = [i for i, _ in inside.carried]
    # `last` is `total` of a previous iteration
    facts = inside.backward([False, False, True], through)
    assert [facts[i] for i in carried] == [True, False, True]
    facts = inside.backward([False, True, False], through)
    assert [facts[i] for i in carried] == [False, True, False]


def test_user_rules_keep_their_operands():
    @jax.custom_jvp
    def f(a, b):
        return a * 2, a + 1

    f.defjvp(lambda primals, tangents: (f(*primals), tangents))
    inside, _ = of(lambda a, b: f(a, b)[0], x, x)
    assert inside.edges.has_rule and inside.kind == "call"
    new = inside.rebuild(inside.bodies, results=[True, False])
    assert len(new.outvars) == 1 and len(new.invars) == 2


def test_new_operands_of_shard_map_are_the_same_on_every_shard():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("i")
    sharded = jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    inside, closed = of(sharded, jnp.arange(4.0))
    (body,), (region,) = inside.bodies, inside.regions
    invars = inside.arguments(region, body.invars, {"operands": [Var(closed.jaxpr.invars[0].aval)]})
    new = inside.rebuild(
        [replace_jaxpr(body, invars=invars)], more={"operands": closed.jaxpr.invars}
    )
    assert tuple(new.params["in_specs"]) == (spec, PartitionSpec())


def test_equations_without_bodies_have_none():
    closed = jax.make_jaxpr(jnp.sin)(x)
    assert regions(closed.eqns[0]) is None
