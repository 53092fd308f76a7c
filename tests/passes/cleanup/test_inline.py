"""inline replaces calls by their bodies, at every depth, except calls with a reason to be kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Format, Layout
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat, nest, sow
from jaxprtool.errors import PipelineError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.notation.signatures import source_names
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs, view
from jaxprtool.passes.cleanup.inline import Inline
from tests.programs import Case, prove
from tests.programs.rules import with_jvp_rule, with_vjp_rule
from tests.programs.same import count_equations

x = jnp.arange(12.0).reshape(3, 4) / 10


def inline(fun, *args, **options):
    """Return the program of `fun` after inline, which computes the same."""
    _, after, _ = prove(Case("fun", fun, args), Inline(**options))
    return after


def names(jaxpr):
    """Return the primitives of all equations, at every depth."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for _, body in sub_jaxprs(eqn):
            found |= names(body)
    return found


def at_top(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


double = jax.jit(lambda a: a * 2)


def test_nested_calls_become_their_equations_in_order():
    inner = jax.jit(lambda a: jnp.sin(double(a)))
    after = inline(jax.jit(lambda a: jnp.cos(inner(a)) + double(a)), x)
    assert at_top(after) == ["mul", "sin", "cos", "mul", "add"]


AROUND = {
    "scan": lambda f: lambda a: lax.scan(lambda c, r: (f(c), f(r)), 1.0, a),
    "while": lambda f: lambda a: lax.while_loop(lambda c: f(c).sum() < 50, f, a),
    "cond": lambda f: lambda a: lax.cond(a.sum() > 0, f, lambda b: b, a),
    "remat": jax.checkpoint,
    "custom_jvp": with_jvp_rule,
    "custom_vjp": lambda f: with_vjp_rule(f, saving=True),
}


@pytest.mark.parametrize("around", AROUND)
def test_calls_inside_other_primitives_are_inlined(around):
    before, after, _ = prove(Case(around, AROUND[around](double), (x,)), Inline())
    assert "jit" in names(before.jaxpr)
    assert "jit" not in names(after.jaxpr)
    assert len(after.jaxpr.eqns) == len(before.jaxpr.eqns)


@pytest.mark.proof
def test_a_function_with_a_batching_rule_is_inlined_on_request():
    @custom_vmap
    def scaled(a, b):
        return jnp.sin(a) * b

    scaled.def_vmap(lambda size, batched, a, b: (jnp.cos(a) * b, True))
    assert "custom_vmap_call" in at_top(inline(scaled, x, x))
    after = inline(scaled, x, x, calls=("custom_vmap",))
    assert at_top(after) == ["sin", "mul"]
    pushed = inline(lambda a, b: jax.jvp(scaled, (a, b), (b, a)), x, x, calls=("custom_vmap",))
    assert "custom_vmap_call" not in names(pushed.jaxpr)
    text = jaxprtool.to_python(inline(jax.jit(scaled), x, x, calls=("custom_vmap",)))
    assert "jnp.sin" in text


def test_pass_through_and_unused_arguments_and_literals_need_no_equation():
    inner = jax.jit(lambda a, b: (a, 1.5, a, jnp.sin(b)))
    after = Inline()(jaxprtool.trace(lambda a, b: inner(a, b)[:3], x, x))
    type_check(after)
    first, literal, third = after.jaxpr.outvars
    assert first is third is after.jaxpr.invars[0]
    assert literal.val == 1.5
    assert at_top(after) == ["sin"]


def test_equations_keep_their_source_lines_inside_the_scopes_of_the_call():
    @jax.jit
    def inner(a):
        with jax.named_scope("in"):
            return jnp.sin(a)

    def outer(a):
        with jax.named_scope("out"):
            return inner(a)

    before = jaxprtool.trace(outer, x)
    (call,) = before.jaxpr.eqns
    (sin,) = Inline()(before).jaxpr.eqns
    assert str(sin.source_info.name_stack) == "out/in"
    assert sin.source_info.traceback is view(call).body.eqns[0].source_info.traceback


@pytest.mark.parametrize("pipeline", ["inline", "-O2"])
def test_equations_of_a_librarys_function_get_the_line_of_each_call(pipeline):
    @jax.jit
    def twice(a):
        return a + a

    def fun(a):
        b = jax.nn.silu(a)
        c = jax.nn.silu(b)
        d = jnp.where(a > 0, c, b)
        return twice(d)

    fun(jnp.ones(3))  # JAX caches the traces of these functions.
    first = fun.__code__.co_firstlineno
    eqns = jaxprtool.trace(fun, jnp.ones(3)).apply(pipeline).jaxpr.eqns
    found = [(eqn.primitive.name, jaxcompat.user_frame(eqn).line - first) for eqn in eqns]
    once = [("logistic", 1), ("mul", 1), ("logistic", 2), ("mul", 2)]
    assert sorted(found) == sorted([*once, ("gt", 3), ("select_n", 3), ("add", -2)])


def test_the_result_name_of_a_call_does_not_apply_to_equations_inside(tmp_path):
    def fun(a):
        b = jax.nn.silu(a)
        return b - 1

    fun(jnp.ones(3))
    jaxprtool.write(jaxprtool.trace(fun, jnp.ones(3)), tmp_path / "a.jaxpr")
    inlined = jaxprtool.read(tmp_path / "a.jaxpr").apply("inline")
    lines = [jaxcompat.user_frame(eqn).line for eqn in inlined.jaxpr.eqns]
    assert lines[0] == lines[1] == lines[2] - 1 and not source_names(inlined.jaxpr.jaxpr, ())


MESH = Mesh(np.array(jax.devices()[:1]), ("d",))
SHARDED = NamedSharding(MESH, P())


def under(context, call):
    def run(a):
        with context:
            return call(a)

    return run


REASONS = {
    "donation": jax.jit(jnp.sin, donate_argnums=0),
    "in_shardings": jax.jit(jnp.sin, in_shardings=SHARDED),
    "out_shardings": jax.jit(jnp.sin, out_shardings=SHARDED),
    "layout": jax.jit(jnp.sin, out_shardings=Format(Layout((1, 0)), SHARDED)),
    "keep_unused": jax.jit(jnp.sin, keep_unused=True),
    "set_xla_metadata": under(set_xla_metadata(inlineable="false"), jax.jit(jnp.sin)),
}
if hasattr(jax, "Inline"):
    REASONS["inline"] = jax.jit(jnp.sin, inline=jax.Inline.XLA_LATE)


@pytest.mark.parametrize("reason", REASONS)
def test_a_call_with_a_reason_is_kept_unless_forced(reason):
    program = jaxprtool.trace(lambda a: double(REASONS[reason](a)), x)
    assert at_top(Inline()(program)) == ["jit", "mul"]
    forced = Inline(force=True)(program)
    type_check(forced)
    assert at_top(forced) == ["sin", "mul"]


@pytest.mark.parametrize("reason", ["compiler options", "compute_on"])
def test_a_call_that_jax_cannot_inline_is_kept_too(reason):
    program = jaxprtool.trace(double, x)
    (call,) = program.jaxpr.eqns
    if reason == "compute_on":
        settings = jaxcompat.context_settings(call.ctx)
        context = jaxcompat.equation_context({**settings, "compute_type": "device_host"})
        call = call.replace(ctx=context)
    else:
        call = call.replace(params={**call.params, "compiler_options_kvs": (("a", "b"),)})
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[call]))
    assert Inline()(program).jaxpr is program.jaxpr
    assert at_top(Inline(force=True)(program)) == ["mul"]


def test_a_kept_call_loses_the_calls_inside():
    stays = jax.jit(lambda a: double(a), keep_unused=True)
    program = jaxprtool.trace(lambda a: stays(a), x)
    (call,) = Inline()(program).jaxpr.eqns
    assert [eqn.primitive.name for eqn in view(call).body.eqns] == ["mul"]


@pytest.mark.parametrize("force", [False, True])
def test_nest_is_kept_if_something_is_sown_in_it(force):
    def sows(a):
        return jax.jit(lambda b: sow(double(b), tag="t", name="v"))(a)

    def quiet(a):
        return double(a) + 1

    after = inline(lambda a: nest(sows, scope="s")(a) + nest(quiet, scope="q")(a), x, force=force)
    assert at_top(after) == ["jit", "mul", "add", "add"]
    assert names(view(after.jaxpr.eqns[0]).body) == {"mul", "sow"}


def test_sown_values_leave_calls_without_a_scope():
    after = inline(jax.jit(lambda a: sow(a, tag="t", name="v") + 1), x)
    assert at_top(after) == ["sow", "add"]


@jax.custom_jvp
def ruled(a):
    return jnp.sin(a)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), 10 * tangents[0]))


@jax.custom_vjp
def ruled_back(a):
    return jnp.cos(a)


ruled_back.defvjp(lambda a: (ruled_back(a), None), lambda _, g: (10 * g,))


def test_rules_and_remat_are_inlined_only_on_request():
    def fun(a):
        return ruled_back(ruled(jax.checkpoint(jnp.exp)(a)))

    program = jaxprtool.trace(fun, x)
    kinds = ["remat2", "custom_jvp_call", "custom_vjp_call"]
    assert at_top(Inline()(program)) == kinds
    for i, kind in enumerate(["remat", "custom_jvp", "custom_vjp"]):
        after = Inline(calls=(kind,))(program)
        type_check(after)
        assert at_top(after) == [*kinds[:i], ["exp", "sin", "cos"][i], *kinds[i + 1 :]]
        np.testing.assert_array_equal(after(x), fun(x))


def closed_call_of(fun, *args):
    """Return a program that is a closed_call (eval_jaxpr in 0.12) of a function."""
    program = jaxprtool.trace(lambda *args: jax.jit(fun)(*args), *args)
    (jit,) = program.jaxpr.eqns
    primitives = jaxcompat.registered_primitives()
    params = {"call_jaxpr": view(jit).body}
    call = jit.replace(
        primitive=primitives.get("closed_call") or primitives["eval_jaxpr"], params=params
    )
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[call]))


def test_a_closed_call_is_inlined_or_kept_by_option():
    program = closed_call_of(jnp.sin, x)
    assert at_top(Inline()(program)) == ["sin"]
    assert Inline(calls=("jit",))(program).jaxpr is program.jaxpr


def test_an_unknown_kind_of_call_is_refused_with_the_known_ones():
    with pytest.raises(PipelineError, match="available: jit, closed_call, custom_jvp") as error:
        Inline(calls=("closedcall",))
    assert "closed_call" in error.value.hint


@pytest.mark.proof
def test_constants_of_calls_become_those_of_the_enclosing_body():
    table, weights = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    inner = jax.jit(lambda a: a * table + weights)

    def run(a):
        return lax.scan(lambda c, r: (c + inner(r), inner(c)), inner(a[0]), a)

    after = inline(run, x)
    assert "jit" not in names(after.jaxpr)
    assert len(after.jaxpr.consts) == 2


def test_a_call_with_constants_is_kept_if_the_enclosing_body_cannot_hold_them():
    table = np.arange(4, dtype=np.float32)
    inner = jax.jit(lambda a: a * table)
    after = inline(jax.checkpoint(lambda a: inner(a) + double(a)), x, force=True)
    (remat,) = after.jaxpr.eqns
    assert [eqn.primitive.name for eqn in view(remat).body.eqns] == ["jit", "mul", "add"]


def test_refs_and_callbacks_are_unchanged():
    seen = []

    @jax.jit
    def write(ref, a):
        jax.debug.callback(lambda v: seen.append(float(v)), a.sum(), ordered=True)
        ref[...] += a
        return ref[...] * 2

    def run(a):
        ref = jax.new_ref(a)
        first = write(ref, a)
        jax.debug.callback(lambda v: seen.append(float(v)), 0.5, ordered=True)
        return first, write(ref, first), jax.freeze(ref)

    program = jaxprtool.trace(run, x)
    after = Inline()(program)
    type_check(after)
    assert "jit" not in names(after.jaxpr)
    before_values, before_seen = program(x), seen[:]
    seen.clear()
    for old, new in zip(before_values, after(x), strict=True):
        np.testing.assert_array_equal(old, new)
    assert seen == before_seen and len(seen) == 3


def test_a_ref_of_the_caller_keeps_its_effects_inside_loops():
    @jax.jit
    def write(ref, i):
        ref[...] = ref[...] + i

    def run(a):
        ref = jax.new_ref(a)
        lax.fori_loop(0, 3, lambda i, _: write(ref, i), None)
        return ref[...]

    after = inline(run, x)
    assert "jit" not in names(after.jaxpr)
    np.testing.assert_array_equal(after(x), x + 3)


def test_each_call_of_a_shared_body_is_inlined_and_counted():
    shared = jax.jit(lambda a: jnp.sin(jnp.cos(a)))
    before = jaxprtool.trace(lambda a: shared(shared(shared(a))), x)
    after = Inline()(before)
    type_check(after)
    assert count_equations(after.jaxpr) == count_equations(before.jaxpr) - 3
    made = [v for eqn in after.jaxpr.eqns for v in eqn.outvars]
    assert len(set(made)) == len(made)


def test_nested_calls_are_inlined_once(monkeypatch):
    def nested(depth):
        return jax.jit(lambda a: jnp.sin(nested(depth - 1)(a)) if depth else a)

    program = jaxprtool.trace(nested(40), x)
    written = []
    replace = jaxcompat.JaxprEqn.replace
    counted = lambda self, **changes: written.append(1) or replace(self, **changes)  # noqa: E731
    monkeypatch.setattr(jaxcompat.JaxprEqn, "replace", counted)
    after = Inline()(program)
    assert at_top(after) == ["sin"] * 40
    assert len(written) <= 90


def test_a_program_without_calls_is_the_same_object():
    after = inline(lambda a: double(a), x)
    assert Inline()(after).jaxpr is after.jaxpr


def doubled(depth, outermost=lambda f: f):
    """Return a function of nested calls, each made twice: 2**depth when all are inlined."""
    function = jnp.sin
    for _ in range(depth):
        inner = jax.jit(function)

        def function(a, inner=inner):
            return inner(a) + inner(a / 2)

    return outermost(function)


@pytest.mark.parametrize("pipeline", ["inline(force=True)", "disable_jit", "-O2"])
def test_calls_that_would_let_a_program_explode_are_kept(pipeline):
    program = jaxprtool.trace(doubled(40), x)
    assert count_folded(program.apply(pipeline)) <= 10_000


def count_folded(program):
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


@pytest.mark.parametrize("around", ["nothing", "scan", "cond"])
def test_in_large_programs_only_calls_of_long_bodies_are_kept(around, monkeypatch):
    monkeypatch.setattr("jaxprtool.passes.cleanup.inline.MOST_EQUATIONS", 10)
    monkeypatch.setattr("jaxprtool.passes.cleanup.inline.LONG", 9)
    fun = doubled(4, jax.jit if around == "nothing" else AROUND[around])
    program = jaxprtool.trace(fun, x)
    _, after, _ = prove(Case("fun", fun, (x,)), Inline())
    assert {"jit", "sin"} <= names(after.jaxpr)
    assert count_folded(after) < 2 * count_folded(program)
    assert Inline()(after).jaxpr is after.jaxpr
    monkeypatch.setattr("jaxprtool.passes.cleanup.inline.MOST_EQUATIONS", 1000)
    assert "jit" not in names(Inline()(program).jaxpr)


def test_in_large_programs_calls_of_unshared_bodies_are_inlined(monkeypatch):
    monkeypatch.setattr("jaxprtool.passes.cleanup.inline.MOST_EQUATIONS", 10)
    monkeypatch.setattr("jaxprtool.passes.cleanup.inline.LONG", 1)
    after = Inline()(jaxprtool.trace(lambda a: jax.jit(doubled(5))(a), x))
    assert at_top(after) == ["jit", "div", "jit", "add"]
