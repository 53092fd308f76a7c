"""Custom derivative rules are converted to jaxprs and back without changing derivatives."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, UserFunctionError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.custom_rules import (
    jvp_params,
    jvp_rule,
    rule_key,
    vjp_params,
    vjp_rule,
    with_closed_over,
)
from jaxprtool.loading.trace import trace

SCALE = jnp.array([1.0, 2.0, 3.0])


@jax.custom_jvp
def scaled_sine(x, count):
    return jnp.sin(x) * count, count + 1


@scaled_sine.defjvp
def scaled_sine_jvp(primals, tangents):
    outs = scaled_sine(*primals)
    return outs, (tangents[0] * 7.0 * SCALE.sum(), np.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def weighted(x, w, count):
    return jnp.sin(x) * w, count + 1


def weighted_fwd(x, w, count):
    return weighted(x, w, count), (x, jnp.cos(x) * w, {"count": count})


def weighted_bwd(residuals, cotangents):
    _, slope, _ = residuals
    return slope * cotangents[0] * SCALE.sum(), None, None


weighted.defvjp(weighted_fwd, weighted_bwd)


@jax.custom_jvp
def lazily_squared(x, y):
    return x * x + y


@jax.tree_util.Partial(lazily_squared.defjvp, symbolic_zeros=True)
def lazily_squared_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    total = 2.0 * x
    lazy = [type(t) is jax.custom_derivatives.SymbolicZero for t in (dx, dy)]
    terms = [0.0 if lazy[0] else total * dx, 0.0 if lazy[1] else dy]
    return lazily_squared(x, y), terms[0] + terms[1] + 0.0 * x


def call_of(fun, *args):
    """Return the only equation of a traced function, and its jaxpr."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    (eqn,) = jaxpr.eqns
    return jaxpr, eqn


def rewritten(fun, *args):
    """Convert the rule of `fun` to a jaxpr and back."""
    jaxpr, eqn = call_of(fun, *args)
    body, *rest = (eqn.params[k] for k in ("call_jaxpr", "num_consts", "symbolic_zeros"))
    if "jvp_jaxpr_fun" in eqn.params:
        rule = jvp_rule(eqn)
        new = jvp_params(body, rule.name, lambda: rule, *rest)
    else:
        rule = vjp_rule(eqn)
        new = vjp_params(body, (rule.fwd_name, rule.bwd_name), lambda: rule, *rest)
    assert set(new) == set(eqn.params)
    return jaxcompat.jaxpr_as_fun(jaxcompat.replace_jaxpr(jaxpr, eqns=[eqn.replace(params=new)]))


def test_a_jvp_rule_as_a_jaxpr_differentiates_as_before_in_both_modes():
    fun = rewritten(scaled_sine, 2.0, 3)
    jvp = jax.jvp(lambda x: fun(x, 3)[0], (2.0,), (1.0,))
    assert jvp == jax.jvp(lambda x: scaled_sine(x, 3)[0], (2.0,), (1.0,)) and jvp[1] == 42.0
    assert jax.grad(lambda x: fun(x, 3)[0])(2.0) == 42.0


def test_a_jvp_rule_knows_which_tangents_are_zero():
    rule = jvp_rule(call_of(scaled_sine, 2.0, 3)[1])
    assert rule.name == "scaled_sine_jvp"
    assert len(rule.jaxpr.outvars) == 2 + rule.out_zeros.count(False)


def test_vjp_rules_as_jaxprs_differentiate_as_before():
    x, w = jnp.array([0.5, 1.5]), jnp.array([2.0, 3.0])
    fun = rewritten(weighted, x, w, 4)
    for argnum in (0, 1):
        ours, theirs = (
            jax.grad(lambda *a, f=f: f(*a, 4)[0].sum(), argnum)(x, w) for f in (fun, weighted)
        )
        np.testing.assert_array_equal(ours, theirs)


def test_vjp_rules_distinguish_forwarded_residuals_and_zero_cotangents():
    rule = vjp_rule(call_of(weighted, jnp.ones(2), jnp.ones(2), 4)[1])
    assert (rule.fwd_name, rule.bwd_name) == ("weighted_fwd", "weighted_bwd")
    # The residuals in the order of their tree: x, slope, count.
    assert rule.forwarded == (0, None, 2)
    assert rule.in_zeros == (False, True, True)


def test_second_derivatives_use_the_rules_jaxprs():
    fun = rewritten(weighted, 0.5, 2.0, 4)
    ours, theirs = (
        jax.grad(jax.grad(lambda x, f=f: f(x, 2.0, 4)[0]))(0.5) for f in (fun, weighted)
    )
    assert ours == theirs


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_a_rule_for_symbolic_zeros_accepts_all_of_them(argnums):
    fun = rewritten(lazily_squared, 3.0, 4.0)
    gradient = jax.grad(lambda x, y: fun(x, y)[0], argnums)(3.0, 4.0)
    assert gradient == jax.grad(lazily_squared, argnums)(3.0, 4.0)


def test_a_call_made_from_a_rule_returns_that_rule():
    for fun, args, made, read in (
        (scaled_sine, (2.0, 3), jvp_params, jvp_rule),
        (weighted, (0.5, 2.0, 4), vjp_params, vjp_rule),
    ):
        _, eqn = call_of(fun, *args)
        rule = read(eqn)
        names = rule.name if made is jvp_params else (rule.fwd_name, rule.bwd_name)
        params = made(eqn.params["call_jaxpr"], names, lambda rule=rule: rule)
        assert read(eqn.replace(params=params)) is rule


def inner_call(rule):
    """Return the custom call with which a rule's jaxpr starts."""
    return rule.jaxpr.eqns[0] if hasattr(rule, "jaxpr") else rule.fwd.eqns[0]


@pytest.mark.parametrize(
    ("fun", "args", "rule_of"),
    [(scaled_sine, (2.0, 3), jvp_rule), (weighted, (0.5, 2.0, 4), vjp_rule)],
)
def test_a_rule_that_calls_its_function_contains_a_call_of_the_same_key(fun, args, rule_of):
    for call in (fun, rewritten(fun, *args)):
        _, eqn = call_of(call, *args)
        inner = inner_call(rule_of(eqn))
        assert inner.primitive is eqn.primitive
        assert rule_key(inner) == rule_key(inner_call(rule_of(inner)))
        if call is fun:
            assert rule_key(inner) == rule_key(eqn)


@pytest.mark.parametrize(
    ("fun", "args", "rule_of"),
    [(scaled_sine, (2.0, 3), jvp_rule), (weighted, (0.5, 2.0, 4), vjp_rule)],
)
def test_a_call_in_a_retraced_jaxpr_keeps_its_key(fun, args, rule_of):
    def dead_code_gone(jaxpr):
        body = jaxcompat.open_jaxpr(jaxpr)
        used, _ = jaxcompat.jax_dce_jaxpr(body, [True] * len(body.outvars), True)
        return jaxcompat.close_jaxpr(used)

    jaxpr, eqn = call_of(fun, *args)
    for step in (lambda j: j, lambda j: j, dead_code_gone, dead_code_gone):
        jaxpr = jax.make_jaxpr(jaxcompat.jaxpr_as_fun(step(jaxpr)))(*args)
        again = inner_call(rule_of(jaxpr.eqns[0]))
        deeper = inner_call(rule_of(again))
        assert rule_key(inner_call(rule_of(deeper))) == rule_key(deeper)
        if step is not dead_code_gone:
            assert rule_key(jaxpr.eqns[0]) == rule_key(eqn)


def test_calls_of_other_rules_types_or_static_arguments_have_other_keys():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x, n):
        return x**n

    @power.defjvp
    def _(n, primals, tangents):
        return power(*primals, n), n * power(*primals, n - 1) * tangents[0]

    functions = [
        *(lambda x, n=n: power(x, n) for n in (2, 3)),
        lambda x: power(x[None], 2),
        jax.nn.relu,
        jax.nn.silu,
        jax.nn.relu6,
    ]
    keys = []
    for fun in functions:
        eqns = jax.make_jaxpr(fun)(jnp.ones(3)).eqns
        again = jax.make_jaxpr(fun)(jnp.ones(3)).eqns
        calls = [[e for e in es if e.primitive.name == "custom_jvp_call"] for es in (eqns, again)]
        assert [rule_key(e) for e in calls[0]] == [rule_key(e) for e in calls[1]]
        keys += [rule_key(e) for e in calls[0]]
    assert len(keys) >= 4 and len(set(keys)) == len(keys)


def test_rules_inside_shard_map_see_the_axes_of_the_mesh():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    @jax.custom_vjp
    def total(x):
        return jax.lax.psum(x, "i")

    total.defvjp(lambda x: (total(x), None), lambda _, ct: (jax.lax.psum(ct, "i"),))
    mapped = jax.shard_map(
        total, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False
    )
    jaxpr = jax.make_jaxpr(mapped)(jnp.ones(4))
    (inner,) = jaxcompat.open_jaxpr(jaxpr.eqns[0].params["jaxpr"]).eqns
    assert [e.primitive.name for e in vjp_rule(inner).bwd.eqns] == ["psum"]


def raising(**options):
    @jax.custom_jvp
    def fun(x):
        return x

    def rule(primals, tangents):
        raise ValueError("no derivative here")

    fun.defjvp(rule, **options)
    return lambda x: fun(x)


def test_a_rule_that_raises_is_converted_to_one_that_raises():
    rule = jvp_rule(call_of(raising(), 1.0)[1])
    assert (rule.jaxpr, rule.raises) == (None, "ValueError: no derivative here")
    fun = rewritten(raising(), 1.0)
    assert jvp_rule(call_of(fun, 1.0)[1]).raises == rule.raises
    assert fun(1.0)[0] == 1.0
    with pytest.raises(UserFunctionError, match="the rule rule of fun raised ValueError: no deriv"):
        jax.grad(lambda x: fun(x)[0])(1.0)


def test_a_rule_that_raises_but_might_not_for_symbolic_zeros_is_named_with_its_line():
    where = r"custom_jvp_call at .*test_custom_rules.py:\d+ .*no derivative here"
    with pytest.raises(UnsupportedError, match=where):
        jvp_rule(call_of(raising(symbolic_zeros=True), 1.0)[1])


def only_by_the_first(x, y):
    """Return a function that can be differentiated by x only, as in Equinox."""

    @jax.custom_vjp
    def fun(x, y):
        return x * jnp.sin(y)

    def fwd(x, y):
        assert not y.perturbed
        return fun(x.value, y.value), (x.value, y.value)

    fun.defvjp(fwd, lambda res, ct: (ct * 5.0 * jnp.sin(res[1]), None), symbolic_zeros=True)
    return fun(x, y)


def only_by_the_first_jvp(x, y):
    @jax.custom_jvp
    def fun(x, y):
        return x * jnp.sin(y)

    def rule(primals, tangents):
        assert type(tangents[1]) is jax.custom_derivatives.SymbolicZero
        return fun(*primals), tangents[0] * 5.0 * jnp.sin(primals[1])

    fun.defjvp(rule, symbolic_zeros=True)
    return fun(x, y)


@pytest.mark.parametrize("fun", [only_by_the_first, only_by_the_first_jvp])
def test_a_rule_for_some_operands_only_is_traced_for_these(fun):
    again = rewritten(fun, 2.0, 3.0)
    gradient = jax.grad(lambda x, y: again(x, y)[0])(2.0, 3.0)
    assert gradient == jax.grad(fun)(2.0, 3.0) == 5.0 * jnp.sin(3.0)
    with pytest.raises(UserFunctionError, match="does not differentiate with respect to operand 1"):
        jax.grad(lambda x, y: again(x, y)[0], 1)(2.0, 3.0)


def test_reading_a_rule_does_not_change_it():
    jaxpr, eqn = call_of(only_by_the_first, 2.0, 3.0)
    fun = jaxcompat.jaxpr_as_fun(jaxpr)
    gradient = jax.grad(lambda x, y: fun(x, y)[0])
    before = gradient(2.0, 3.0)
    vjp_rule(eqn)
    assert gradient(2.0, 3.0) == before


def test_a_backward_rule_may_branch_on_a_number_from_the_forward_rule():
    @jax.custom_vjp
    def fun(x):
        return x

    fun.defvjp(lambda x: (x, True), lambda flag, ct: (ct * 3.0 if flag else ct,))
    again = rewritten(lambda x: fun(x), 2.0)
    assert jax.grad(lambda x: again(x)[0])(2.0) == jax.grad(fun)(2.0) == 3.0


def test_a_call_with_constants_keeps_its_rules():
    @jax.jit
    def outer(x, w):
        factor = 2.0 * w

        @jax.custom_vjp
        def fun(x, y):
            return x * y * factor

        fun.defvjp(
            lambda x, y: (x * y * 1.0, (x, y)), lambda res, ct: (ct * res[1], ct * 7.0 * res[0])
        )
        return fun(x, w)

    jaxpr = jax.make_jaxpr(outer)(2.0, 3.0)
    (eqn,) = jaxpr.eqns
    calls = [e for e in eqn.params["jaxpr"].eqns if e.primitive.name == "custom_vjp_call"]
    (call,) = calls
    assert call.params["num_consts"] == 1
    rule = vjp_rule(call)
    assert rule.forwarded == (0, 1)


def endless(kind, branches):
    """A function whose rule calls it again with other static arguments, endlessly."""
    function = getattr(jax, f"custom_{kind}")(
        lambda n, x: jnp.sin(x * (n % 97)), nondiff_argnums=(0,)
    )

    def more(n, x):
        return sum(function(2 * n + i, x) for i in range(branches))

    if kind == "jvp":
        function.defjvp(lambda n, p, t: (function(n, *p), more(n, *p) * t[0]))
    else:
        function.defvjp(lambda n, x: (function(n, x), x), lambda n, x, ct: (more(n, x) * ct,))
    return functools.partial(function, 1)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("write", [program_file_text, jaxprtool.to_python])
def test_endlessly_nested_rules_are_refused(kind, branches, write):
    program = trace(endless(kind, branches), jnp.float32(1.0))
    with pytest.raises(UnsupportedError, match=r"custom_.*test_custom_rules\.py.*never end"):
        write(program)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_programs_with_the_same_endless_rules_are_equivalent_and_others_are_not(kind):
    function = endless(kind, 2)
    same = [trace(lambda x: function(x) + 1, jnp.float32(1.0)) for _ in range(2)]
    assert jaxprtool.equivalent(*same)
    with pytest.raises(UnsupportedError, match="never end"):
        jaxprtool.equivalent(same[0], trace(lambda x: endless(kind, 2)(x) + 1, jnp.float32(1.0)))


def test_finitely_nested_rules_are_followed():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def power(n, x):
        return x**n

    @power.defjvp
    def rule(n, primals, tangents):
        if n == 0:
            return power(n, *primals), jnp.zeros_like(tangents[0])
        both = power(n - 1, *primals) + power(n - 1, *primals)
        return power(n, *primals), n * both / 2 * tangents[0]

    program = trace(functools.partial(power, 20), jnp.float32(1.1))
    program_file_text(program)
    assert "power" in jaxprtool.to_python(program)


def test_a_call_that_jax_has_emptied_is_followed():
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (sine(x), jnp.cos(x)), lambda residual, ct: (ct * residual,))

    def total(xs):
        return jax.lax.scan(lambda c, x: (c + sine(x).sum(), None), 0.0, xs)[0]

    xs = jnp.arange(6.0).reshape(2, 3)
    program = trace(jax.grad(total), xs)
    assert any(not eqn.outvars for eqn in program.jaxpr.eqns)
    back = parse_program(program_file_text(program), "file")
    namespace: dict = {}
    exec(jaxprtool.to_python(program), namespace)
    for again in (back, namespace["total"]):
        np.testing.assert_allclose(again(xs), jnp.cos(xs), rtol=1e-6)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def shifted_square(x, options, shift=None):
    """JAX counts `options`, and `shift` if it is None, among the names of the arguments."""
    return x["a"] * x["a"] * options["k"] + (0.0 if shift is None else shift)


@shifted_square.defjvp
def shifted_square_jvp(options, primals, tangents):
    x, shift = primals
    return shifted_square(x, options, shift), tangents[0]["a"] * 11.0


def static_and_none(x):
    return shifted_square({"a": x, "b": None}, {"k": 2.0}).sum()


@pytest.mark.parametrize(
    "fun",
    [
        static_and_none,
        lambda x: jax.lax.cond(x[0] > 0, static_and_none, jnp.sum, x),
        lambda x: jax.lax.scan(lambda c, _: (c - static_and_none(c), None), x, None, 2)[0].sum(),
    ],
)
def test_a_rule_with_static_and_missing_arguments_works_in_passes(fun):
    x = jnp.array([1.0, -2.0, 0.5])
    program = jaxprtool.trace(fun, x)
    value, gradient = jax.jit(jax.value_and_grad(fun))(x)
    for passes in ("dce", "-O1", "-O3"):
        np.testing.assert_allclose(jax.jit(program.apply(passes))(x), value, rtol=1e-5)
        slope = program.apply(f"{passes}, grad, {passes}")
        np.testing.assert_allclose(jax.jit(slope)(x), gradient, rtol=1e-5)
    lanes = np.stack([x, x + 1])
    mapped = program.apply("batch(axis_size=2), -O2")
    expected = jax.jit(jax.vmap(fun))(lanes)
    np.testing.assert_allclose(jax.jit(mapped)(lanes), expected, rtol=1e-5)
    after = program.apply("-O1")
    assert jaxprtool.equivalent(parse_program(program_file_text(after), "test"), after)


def test_a_program_without_its_endless_rules_is_written_as_the_hint_suggests():
    function = endless("vjp", 1)
    program = trace(function, jnp.float32(1.0))
    with pytest.raises(UnsupportedError) as refused:
        program_file_text(program)
    inline = "inline(calls=('custom_jvp', 'custom_vjp'))"
    assert inline in refused.value.hint and "run grad before it" in refused.value.hint
    for passes, wanted in (inline, function), (f"grad, {inline}", jax.grad(function)):
        again = parse_program(program_file_text(program.apply(passes)), "test")
        np.testing.assert_allclose(again(2.0), wanted(2.0), rtol=1e-6)


def test_values_closed_over_are_found_in_deeply_nested_bodies():
    call = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns[0]
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    for _ in range(2 * sys.getrecursionlimit()):
        operands, results = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
        eqn = call.replace(invars=operands, outvars=results, params={**call.params, "jaxpr": jaxpr})
        jaxpr = jaxcompat.replace_jaxpr(jaxpr, eqns=[eqn])
    assert with_closed_over(jaxpr) is jaxpr
