"""The strategy for random programs is reproducible, and covers all operations and dtypes."""

from collections import Counter
from functools import cache

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, given, settings

from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import Call, Cond, CustomJVP, CustomVJP, Scan, While, sub_jaxprs, view
from jaxprtool.jaxcompat import Literal, Var
from tests.programs import plans, random_programs
from tests.programs.build import arguments_of, function_of
from tests.programs.corpus import draws, prove_corpus
from tests.programs.ops import (
    AXES,
    COLLECTIVES,
    DTYPES,
    DTYPES_X64,
    OPS,
    SHAPES,
    T,
    Type,
    coerce,
)
from tests.programs.random_programs import RandomProgram
from tests.share import on_one_release

#: The features that random programs must contain, in addition to all dtypes and operations.
FEATURES = {
    # higher-order equations
    "jit", "scan", "while", "cond", "switch", "custom_jvp", "custom_vjp", "remat",
    "depth 3", "shared jaxpr",
    "scan: reverse", "scan: unrolled", "scan: length 0", "scan: length 1", "scan: length n",
    "scan: consts", "scan: carry", "scan: xs", "scan: ys", "scan: effect",
    "scan: unused const", "scan: unused carry", "scan: unused x", "scan: unused y",
    "scan: key carry", "while: cond consts", "while: body consts", "while: unused carry",
    "while: effect", "cond: unused operand", "cond: unused output", "cond: effect",
    "call: unused operand", "call: unused output", "custom: unused operand",
    "custom: unused output", "custom: several outputs",
    # effects
    "OrderedDebug", "Debug", "IO", "OrderedIO", "pure_callback", "ref write", "ref read",
    "ref written in a body",
    # data
    "constants", "literals", "scalar", "zero size", "weak argument", "NaN argument",
    "infinite argument", "key argument", "key array", "random bits", "64 bits",
    # uses
    "repeated output", "output is an input", "literal output", "unused argument",
    "repeated operand", "dead at depth 0", "dead at depth 1", "dead at depth 2",
}  # fmt: skip


def walk(jaxpr, depth=0):
    """Yield each equation at every depth, with depth, jaxpr, and the variables read there."""
    read = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, Var)}
    read |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        yield eqn, depth, read
        for _, body in sub_jaxprs(eqn):
            yield from walk(body, depth + 1)


def reads(body):
    found = {v for e in body.eqns for v in e.invars if isinstance(v, Var)}
    found |= {v for v in body.outvars if isinstance(v, Var)}
    return [v in found for v in body.invars]


def loop_features(v, read):
    if isinstance(v, While):
        unused = [out not in read for out in v.outs]
        yield "while"
        yield "while: cond consts" if v.cond_consts else ""
        yield "while: body consts" if v.body_consts else ""
        pairs = zip(unused, reads(v.body)[len(v.body_consts) :], strict=True)
        yield "while: unused carry" if any(u and not r for u, r in pairs) else ""
        yield "while: effect" if v.eqn.effects else ""
        return
    n, k = len(v.consts), len(v.carry)
    used = reads(v.body)
    yield "scan"
    yield "scan: reverse" if v.reverse else ""
    yield "scan: unrolled" if v.unroll > 1 else ""
    yield f"scan: length {v.length if v.length < 2 else 'n'}"
    yield "scan: effect" if v.eqn.effects else ""
    for what, group in (("consts", v.consts), ("carry", v.carry), ("xs", v.xs), ("ys", v.ys)):
        yield f"scan: {what}" if group else ""
    yield "scan: unused const" if not all(used[:n]) else ""
    yield (
        "scan: unused carry"
        if any(
            not u and out not in read for u, out in zip(used[n : n + k], v.carry_outs, strict=True)
        )
        else ""
    )
    yield "scan: unused x" if not all(used[n + k :]) else ""
    yield "scan: unused y" if any(out not in read for out in v.ys) else ""
    yield "scan: key carry" if any("key" in str(c.aval) for c in v.carry) else ""


def call_features(v, read):
    kind, operands = "call", reads(v.body) if not isinstance(v, Cond) else []
    if isinstance(v, Cond):
        kind = "cond"
        yield "cond" if len(v.branches) == 2 else "switch"
        operands = [any(flags) for flags in zip(*map(reads, v.branches), strict=True)]
        yield "cond: effect" if v.eqn.effects else ""
    elif isinstance(v, CustomJVP):
        kind = "custom"
        yield "custom_vjp" if isinstance(v, CustomVJP) else "custom_jvp"
        yield "custom: several outputs" if len(v.outs) > 1 else ""
    else:
        yield "jit" if v.eqn.primitive.name == "jit" else "remat"
    yield f"{kind}: unused operand" if not all(operands) else ""
    yield f"{kind}: unused output" if any(out not in read for out in v.outs) else ""


def equation_features(jaxpr):
    bodies: Counter = Counter()
    for eqn, depth, read in walk(jaxpr):
        name, v = eqn.primitive.name, view(eqn)
        if isinstance(v, Scan | While):
            yield from loop_features(v, read)
        elif isinstance(v, Cond | Call | CustomJVP):
            yield from call_features(v, read)
        bodies.update(id(body) for _, body in sub_jaxprs(eqn) if name == "jit")
        for effect in eqn.effects:
            yield str(effect)
        if name in ("swap", "addupdate"):
            yield "ref write"
            yield "ref written in a body" if depth else ""
        yield {"get": "ref read", "pure_callback": name, "random_bits": "random bits"}.get(name, "")
        yield "depth 3" if depth == 3 else ""
        operands = [x for x in eqn.invars if isinstance(x, Var)]
        yield "repeated operand" if len(set(operands)) < len(operands) else ""
        yield "literals" if len(operands) < len(eqn.invars) else ""
        yield f"dead at depth {depth}" if read.isdisjoint(eqn.outvars) and not eqn.effects else ""
        for x in (*eqn.invars, *eqn.outvars):
            if hasattr(x.aval, "shape"):
                yield x.aval.str_short(short_dtypes=True).partition("[")[0]
                yield "scalar" if x.aval.shape == () else ""
                yield "zero size" if 0 in x.aval.shape else ""
                yield "key array" if "key<fry>[3]" in x.aval.str_short(short_dtypes=True) else ""
    yield "shared jaxpr" if any(count > 1 for count in bodies.values()) else ""


def program_features(drawn: RandomProgram):
    case = drawn.case()
    with case.setting():
        jaxpr, args = case.program().jaxpr, case.arguments()
    yield from equation_features(jaxpr)
    yield "64 bits" if drawn.plan.x64 else ""
    yield "constants" if jaxpr.consts else ""
    outs = [v for v in jaxpr.outvars if isinstance(v, Var)]
    yield "literal output" if any(isinstance(v, Literal) for v in jaxpr.outvars) else ""
    yield "repeated output" if len(set(outs)) < len(outs) else ""
    yield "output is an input" if set(outs) & set(jaxpr.invars) else ""
    yield "unused argument" if not all(reads(jaxpr)) else ""
    for v, x in zip(jaxpr.invars, args, strict=True):
        yield v.aval.str_short(short_dtypes=True).partition("[")[0]
        yield "weak argument" if v.aval.weak_type else ""
        if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key):
            yield "key argument"
        elif jnp.issubdtype(v.aval.dtype, jnp.inexact):
            yield "NaN argument" if np.isnan(x).any() else ""
            yield "infinite argument" if np.isinf(x).any() else ""


def plan_operations(block):
    for step in block.steps:
        if isinstance(step, plans.Op):
            yield f"op {step.name}"
        for body in (*getattr(step, "branches", ()), *filter(None, [getattr(step, "body", None)])):
            yield from plan_operations(body)


@cache
def many_draws():
    """Return some hundred draws, each with its features."""
    return [
        (drawn, {*program_features(drawn), *plan_operations(drawn.plan.body)})
        for drawn in draws(300)
    ]


@on_one_release
def test_some_hundred_draws_contain_every_feature():
    found = Counter(feature for _, features in many_draws() for feature in features)
    wanted = FEATURES | {*DTYPES, *DTYPES_X64}
    assert not wanted - set(found), f"never drawn: {sorted(wanted - set(found))}"
    assert len([name for name in OPS if found[f"op {name}"]]) > 0.9 * len(OPS)


@on_one_release
def test_most_draws_have_dead_code_and_few_are_equal():
    dead = [any("dead" in feature for feature in features) for _, features in many_draws()]
    assert sum(dead) > len(dead) / 2
    assert len({repr(drawn) for drawn, _ in many_draws()}) > 250


def test_draws_are_the_same_for_the_same_seed():
    assert draws(20) == draws(20)


def test_a_program_prints_as_the_code_that_makes_it():
    names = {**vars(plans), "RandomProgram": RandomProgram, "T": T}
    for drawn in draws(40):
        assert eval(repr(drawn), names) == drawn


def test_programs_are_well_typed_and_their_arguments_fit():
    def prove(number, case):
        with case.setting():
            program = case.program()
            type_check(program)
            jax.block_until_ready(jax.extend.core.jaxpr_as_fun(program.jaxpr)(*case.arguments()))

    prove_corpus(20, prove)


def test_arguments_are_the_same_each_time():
    plan = plans.Plan(plans.Block((T("f32[2,3]"), T("key<fry>[3]"), T("bool[3]"))), seed=4)
    first, again = arguments_of(plan), arguments_of(plan)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_booleans_have_both_values_and_integers_are_small():
    plans_ = [plans.Plan(plans.Block((T("bool[2,3]"), T("i32[3]"))), seed=s) for s in range(5)]
    values = [arguments_of(plan) for plan in plans_]
    assert {bool(x) for flags, _ in values for x in flags.ravel()} == {True, False}
    assert all(abs(i).max() < 8 for _, i in values)


def test_any_value_can_be_coerced_to_any_type():
    types = [Type(dtype, SHAPES[i % 2]) for i, dtype in enumerate(DTYPES)]
    types += [T("f32[0]"), T("key<fry>[0]"), T("f32[3,0]"), T("i32[2,3]")]

    def coerced(x, t):
        return jax.eval_shape(lambda x: coerce(x, t), x)

    values = [coerced(jnp.float32(1.5), t) for t in types]
    for x in values:
        for t in types:
            got = coerced(x, t)
            assert (got.shape, str(got.dtype)) == (t.shape, str(coerced(got, t).dtype))


def test_every_collective_traces_for_all_its_types():
    names = {"f": "f32", "i": "i32", "c": "c64", "u": "u8", "b": "bool"}
    for name, operation in COLLECTIVES.items():
        for t in (Type(names[kind], shape) for kind in operation.kinds for shape in SHAPES):
            block = plans.Block((t,), (plans.Op(name, t, (0,) * operation.arity),))
            jax.make_jaxpr(function_of(plans.Plan(block)), axis_env=AXES)(coerce(1, t))


@on_one_release
def test_collectives_are_drawn_if_requested():
    found: set[str] = set()

    @hypothesis.seed(0)
    @settings(max_examples=80, phases=[Phase.generate])
    @given(random_programs(collectives=True))
    def collect(drawn):
        found.update(name for name in COLLECTIVES if repr(name) in repr(drawn))

    collect()
    assert len(found) > len(COLLECTIVES) / 2


def test_a_plan_with_references_out_of_range_wraps_around():
    block = plans.Block((T("f32[3]"),), (plans.Op("sin", T("f32[3]"), (7,)),), (3, 4))
    outs = function_of(plans.Plan(block))(jnp.zeros(3))
    assert [out.shape for out in outs] == [(3,), (3,)]


def test_custom_rules_differ_from_the_derivative():
    for how in ("custom_jvp", "custom_vjp", "custom_vjp_saving"):
        body = plans.Block((T("f32[]"),), (plans.Op("square", T("f32[]"), (0,)),))
        plan = plans.Plan(plans.Block((T("f32[]"),), (plans.Call(how, body, (0,)),)))
        assert jax.grad(lambda x, plan=plan: function_of(plan)(x)[0])(1.0) == 6.0
