"""Batched custom_jvp and custom_vjp calls keep their rules, in all later transformations."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.api.vmap import vmap
from jaxprtool.ir.custom_rules import rule_key
from jaxprtool.ir.equivalence import equivalent
from jaxprtool.loading.trace import trace
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.mapping.batch import Batch
from tests.programs.beside import batched, prove

RNG = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, W, S = array(4), array(4, 4), jnp.float32(0.7)
PAIRS = [(0, 0), (0, None), (None, 0), (1, 1)]


@jax.custom_jvp
def forwards(x, y):
    return jnp.sin(x) * y


@forwards.defjvp
def forwards_rule(primals, tangents):
    (x, y), (s, t) = primals, tangents
    return forwards(x, y), jnp.cos(x) * s * y * 2 + jnp.sin(x) * t


@jax.custom_vjp
def backwards(x, y):
    return jnp.sin(x) * y


def backwards_fwd(x, y):
    return backwards(x, y), (x, y, jnp.cos(x))


def backwards_bwd(residuals, ct):
    x, y, slope = residuals
    return ct * slope * y * 2, ct * jnp.sin(x)


backwards.defvjp(backwards_fwd, backwards_bwd)


# --- derivatives as in JAX ----------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", PAIRS)
@pytest.mark.parametrize("function", [forwards, backwards])
def test_the_custom_rule_is_used_whichever_arguments_are_mapped(function, in_axes):
    prove(function, X, X + 1, in_axes=in_axes, derivatives=1)


@pytest.mark.proof
def test_unmapped_and_mapped_derivatives_of_second_order():
    prove(lambda x, w: forwards(x, w[0]), X, W, derivatives=2)

    def loss(x, w):
        return (backwards(x, w[0]) * forwards(x, w[1])).sum()

    prove(jax.grad(loss, (0, 1)), X, W, in_axes=(0, None), derivatives=0)
    prove(lambda x, w: jax.jvp(lambda x: forwards(x, w), (x,), (x,)), X, X, in_axes=(None, 0))


@pytest.mark.proof
def test_jaxprtools_vmap_under_and_over_gradients():
    def summed(v, function, y):
        return v(function, (0, None))(W, y).sum()

    for function in (forwards, backwards):
        got, expected = (
            jax.value_and_grad(functools.partial(summed, v, function))(X) for v in (vmap, jax.vmap)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)
        gradient = jax.grad(lambda x, function=function: function(x, X).sum())
        np.testing.assert_allclose(vmap(gradient)(W), jax.vmap(gradient)(W), rtol=1e-6)


@pytest.mark.proof
def test_rules_that_take_symbolic_zeros():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    def rule(primals, tangents):
        (x, y), (s, t) = primals, tangents
        out = x * y
        parts = [s * y * 3] * (type(s) is not SymbolicZero)
        parts += [t * x * 5] * (type(t) is not SymbolicZero)
        return out, sum(parts) if parts else SymbolicZero(jax.typeof(out))

    product.defjvp(rule, symbolic_zeros=True)

    def all_kinds(x, y):
        return product(x, y), product(x, jnp.ones(4)), product(jnp.ones(4), y)

    for in_axes in PAIRS[:2]:
        prove(all_kinds, X, X, in_axes=in_axes)

    @jax.custom_vjp
    def two(x, y):
        return x * y, x + 1

    def fwd(x, y):
        kept = x.value if y.perturbed else None, y.value if x.perturbed else None
        return (x.value * y.value, x.value + 1), kept

    def bwd(kept, cts):
        ct = 0.0 if type(cts[0]) is SymbolicZero else cts[0]
        return tuple(None if k is None else ct * k * 2 for k in kept[::-1])

    two.defvjp(fwd, bwd, symbolic_zeros=True)
    for in_axes in PAIRS[:2]:
        prove(lambda x, y: (two(x, y)[0], two(x, jnp.ones(4))[0]), X, X, in_axes=in_axes)


def test_static_arguments_and_closed_over_values():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def applied(f, x):
        return f(x)

    applied.defvjp(lambda f, x: (f(x), x), lambda f, x, ct: (ct * 3,))
    prove(lambda x: applied(jnp.sin, x), X)

    def closing(x, z):
        scaled = jax.custom_jvp(lambda y: y * z)
        scaled.defjvp(lambda p, t: (p[0] * 2.0, t[0] * 2.0))
        return jax.jit(scaled)(x)

    for in_axes in PAIRS[:3]:
        prove(closing, X, X, in_axes=in_axes, derivatives=0)


@pytest.mark.proof
def test_custom_calls_inside_all_other_primitives():
    def everywhere(x, w):
        def both(c):
            return backwards(c, w[0]) + forwards(c, w[1])

        looped = lax.scan(lambda c, r: (backwards(c, r), forwards(c, r)), x, w)
        chosen = lax.cond(x[0] > 0, both, lambda c: c * 2, x)
        counted = lax.fori_loop(0, 2, lambda i, c: both(c), x)
        return looped, chosen, counted, jax.jit(jax.checkpoint(both))(x)

    prove(everywhere, X, W, in_axes=(0, None))
    nested = jax.vmap(backwards, (0, None))
    prove(lambda x, w: nested(w, x), X, W, in_axes=(None, 0), derivatives=0)


def test_a_forward_rule_with_optimize_remat():
    optimized = jax.custom_vjp(jnp.sin)
    optimized.defvjp(
        lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x) * 2,), optimize_remat=True
    )
    prove(lambda x: jax.checkpoint(lambda x: optimized(jnp.cos(x)))(x), X, derivatives=0)
    prove(lambda x: jax.grad(lambda x: optimized(x).sum())(x), X, derivatives=0)


def test_constants_of_a_batched_call_become_its_operands():
    @jax.custom_vjp
    def picked(x, i):
        return x[i] * x.sum()

    picked.defvjp(
        lambda x, i: (picked(x, i), (x, i)),
        lambda r, ct: (jnp.zeros_like(r[0]).at[r[1]].set(ct) * 2, None),
    )
    prove(picked, X, jnp.int32(2))
    prove(picked, X, jnp.int32(2), in_axes=(None, 0))


def test_collectives_in_rules_over_the_mapped_axis():
    @jax.custom_jvp
    def centred(x):
        return x - lax.pmean(x, "i")

    centred.defjvp(lambda p, t: (centred(*p), t[0] - lax.pmean(t[0], "i")))

    def derivative(v):
        return jax.jvp(v(centred, axis_name="i"), (W,), (W * 2,))

    got, expected = derivative(vmap), derivative(jax.vmap)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


@pytest.mark.proof
def test_jax_s_own_custom_functions():
    def activations(x):
        return jax.nn.relu(x), jax.nn.gelu(x), jax.nn.logsumexp(x * jnp.arange(3.0))

    prove(activations, S)


# --- results that are batched only according to a rule --------------------------------------------


def test_a_batched_derivative_of_an_unbatched_result():
    @jax.custom_jvp
    def second(x, y):
        return y * 1.0

    second.defjvp(lambda p, t: (second(*p), t[1] * p[0]))
    weighted = jax.custom_vjp(lambda x, y: y * 1.0)
    weighted.defvjp(lambda x, y: (y * x / x, x), lambda x, ct: (ct, ct * x))

    for function in (second, weighted):

        def loss(y, function=function, v=vmap):
            return v(function, (0, None))(X, y).sum()

        expected = jax.grad(functools.partial(loss, v=jax.vmap))(S)
        np.testing.assert_allclose(jax.grad(loss)(S), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(S), expected, rtol=1e-6)


def test_an_unbatched_result_with_a_cotangent_is_summed_or_refused_as_in_jax():
    @jax.custom_vjp
    def shared(x, y):
        return x * 1.0, y * 1.0

    shared.defvjp(lambda x, y: (shared(x, y), (x,)), lambda r, ct: (ct[0], ct[1] * r[0]))

    def gradient(v):
        def loss(y):
            return sum(map(jnp.sum, v(shared, (0, None), (0, None))(X, y)))

        try:
            return jax.grad(loss)(S)
        except ValueError as error:  # from JAX 0.12 on
            return str(error)

    assert gradient(vmap) == gradient(jax.vmap)


# --- batched calls in other parts of the package --------------------------------------------------


def both_kinds(x, w):
    return backwards(x, w[0]), lax.scan(lambda c, r: (forwards(c, r), c), x, w)[0]


@pytest.fixture(scope="module")
def mapped():
    return batched(both_kinds, X, W, in_axes=(0, None))


def test_two_batchings_of_one_program_are_equivalent(mapped):
    jaxprtool.clear_caches()
    again = batched(both_kinds, X, W, in_axes=(0, None))
    assert equivalent(mapped.jaxpr, again.jaxpr)
    calls = [next(eqn for eqn in p.jaxpr.eqns if "bwd" in eqn.params) for p in (mapped, again)]
    assert rule_key(calls[0]) == rule_key(calls[1])
    other = batched(lambda x, w: (forwards(x, w[0]), both_kinds(x, w)[1]), X, W, in_axes=(0, None))
    assert not equivalent(mapped.jaxpr, other.jaxpr)


@pytest.mark.proof
def test_a_batched_program_is_written_and_read_with_its_rules(mapped, tmp_path):
    jaxprtool.write(mapped, tmp_path / "mapped.jaxpr")
    read = jaxprtool.read(tmp_path / "mapped.jaxpr")
    xs = array(3, 4)
    gradients = [
        jax.grad(lambda x, p=p: sum(map(jnp.sum, jaxcompat.jaxpr_as_fun(p.jaxpr)(x, W))))(xs)
        for p in (mapped, read)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-5)


def test_a_batched_program_is_emitted_as_python(mapped):
    scope: dict = {}
    exec(jaxprtool.to_python(mapped), scope)
    function = scope["both_kinds"]
    xs = array(3, 4)
    expected = jaxcompat.jaxpr_as_fun(mapped.jaxpr)(xs, W)
    for got, value in zip(jax.tree.leaves(function(xs, W)), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5)


@pytest.mark.proof
def test_dce_and_a_second_batching_keep_the_rules(mapped):
    twice = Batch((None, 0), 0, 2)(Dce()(mapped))
    xs, ws = array(3, 4), array(2, 4, 4)

    def loss(f, *args):
        return sum(jnp.sum(r * r) for r in jax.tree.leaves(f(*args)))

    reference = jax.vmap(jax.vmap(both_kinds, (0, None)), (None, 0))
    got = jax.grad(functools.partial(loss, jaxcompat.jaxpr_as_fun(twice.jaxpr)), (0, 1))(xs, ws)
    expected = jax.grad(functools.partial(loss, reference), (0, 1))(xs, ws)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), got, expected)


def test_one_call_is_differentiated_by_some_operands_and_then_by_others():
    program = batched(backwards, X, X)
    function = jaxcompat.jaxpr_as_fun(program.jaxpr)
    xs, ys = array(3, 4), array(3, 4)
    for argnums in ((0,), (1,), (0, 1), (0,)):
        got, expected = (
            jax.grad(lambda *args, f=f: jnp.sum(f(*args)[0]), argnums)(xs, ys)
            for f in (function, lambda *args: [jax.vmap(backwards)(*args)])
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


@pytest.mark.proof
def test_no_tracer_leaks():
    with jax.checking_leaks():
        jax.grad(lambda x: vmap(both_kinds, (0, None))(x, W)[0].sum())(array(3, 4))


@pytest.mark.proof
def test_a_program_can_be_freed_after_batching():
    def local(x):
        return lax.scan(lambda c, _: (jax.jit(backwards)(c, x), forwards(c, x)), x, None, length=2)

    program = trace(local, X)  # JAX caches the program itself, so this is a copy
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=program.jaxpr.eqns))
    mapped = Batch(0, 0, 3)(program)
    dead = [weakref.ref(jaxcompat.open_jaxpr(p.jaxpr)) for p in (program, mapped)]
    del program, mapped
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


@pytest.mark.proof
def test_endlessly_nested_rules_are_traced_only_a_few_times():
    traced = []

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def constant(n, x):
        return jnp.ones(3) * (n % 97)  # not batched, with a batched derivative

    @constant.defjvp
    def rule(n, primals, tangents):
        traced.append(n)
        (x,), (t,) = primals, tangents
        return constant(n, x), (constant(2 * n, x) + constant(2 * n + 1, x)) * t * x

    xs = jnp.arange(6.0).reshape(2, 3)
    outs = jaxprtool.vmap(functools.partial(constant, 1))(xs)
    assert len(traced) <= 16
    np.testing.assert_array_equal(outs, jax.vmap(functools.partial(constant, 1))(xs))
    grads = [
        jax.grad(lambda xs, vmap=vmap: vmap(functools.partial(constant, 1))(xs).sum())(xs)
        for vmap in (jax.vmap, jaxprtool.vmap)
    ]
    np.testing.assert_array_equal(*grads)
