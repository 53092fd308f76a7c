"""Arrays that JAX writes into a jaxpr as literals become constants of a Program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import stats
from jaxprtool.commands.cost.estimate import cost
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.ir.equations import equations
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.ir.rewrite import as_constants
from tests.share import first_and_proofs

X = jnp.array([0.5, -1.0, 2.0])
W = jnp.arange(9.0).reshape(3, 3) / 10
TABLE = np.arange(9, dtype=np.float32).reshape(3, 3) / 8


@jax.custom_jvp
def by_jvp(x):
    return jnp.sin(x @ W)


@by_jvp.defjvp
def _(primals, tangents):
    return by_jvp(*primals), 2 * jnp.cos(primals[0] @ W) * (tangents[0] @ W)


@jax.custom_vjp
def by_vjp(x):
    return jnp.sin(x @ W)


by_vjp.defvjp(lambda x: (jnp.sin(x @ W), x), lambda x, g: (3 * (g * jnp.cos(x @ W)) @ W.T,))


def sharded(spec):
    mesh = jax.make_mesh((3,), ("i",), (AxisType.Auto,), devices=jax.devices()[:3])
    body = lambda x: x * W.sum() + TABLE[0, 1] + (x[0] * W[0])[: x.shape[0]]  # noqa: E731
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)


def looped(x):
    def step(carry, row):
        return carry @ W + row, jax.jit(lambda v: v @ W)(carry)

    return lax.scan(step, x, jnp.ones((2, 3)))


def branched(x):
    return lax.switch(1, [lambda v: v @ W, lambda v: v @ TABLE + v @ W, jnp.sin], x)


FUNCTIONS = {
    "read": lambda x: (jnp.tanh(x @ W).sum(), x @ TABLE, W),
    "jit": lambda x: jax.jit(lambda v: v @ W)(x) @ W,
    "jit in jit": lambda x: jax.jit(lambda v: jax.jit(lambda u: u @ W)(v) + 1)(x),
    "scan": looped,
    "while": lambda x: lax.while_loop(lambda v: v.sum() < W.sum(), lambda v: v + W[0] + 1, x),
    "switch": branched,
    "remat": jax.checkpoint(lambda x: jnp.sin(x @ W) @ W),
    "custom_jvp": lambda x: by_jvp(x) * W[1],
    "custom_vjp": lambda x: lax.cond(x[0] > 0, by_vjp, jnp.sin, x),
    "shard_map": sharded(PartitionSpec()),
    "split shard_map": sharded(PartitionSpec("i")),
    "vmap": jax.vmap(lambda a: a * TABLE @ W),
    "grad": jax.grad(lambda x: (by_jvp(x) + by_vjp(x) + jnp.tanh(x @ W)).sum()),
    "random": lambda x: jax.random.normal(jax.random.key(0), (3,)) * x,
}


@pytest.fixture
def simplified():
    """Enable JAX's option that puts arrays into equations."""
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", False)


def literals(jaxpr):
    """Return the array literals of a jaxpr at any depth."""
    inside = [body for eqn in equations(jaxpr) for _, body in sub_jaxprs(eqn)]
    bodies = [jaxcompat.open_jaxpr(body) for body in (jaxpr, *inside)]
    atoms = [v for body in bodies for eqn in body.eqns for v in eqn.invars]
    atoms += [v for body in bodies for v in body.outvars]
    return [v for v in atoms if type(v) is Literal and np.ndim(v.val)]


def sizes(program):
    found = memory(program)
    return (
        sorted((c.type, c.bytes) for c in stats(program).constants),
        (found.constant_bytes, found.peak_bytes),
        cost(program).total.work,
    )


@pytest.mark.parametrize("name", first_and_proofs(FUNCTIONS))
def test_a_program_is_the_same_with_and_without_the_option(name, request, tmp_path):
    fun = FUNCTIONS[name]
    plain = jaxprtool.trace(fun, X)
    request.getfixturevalue("simplified")
    program = jaxprtool.trace(fun, X)
    assert not literals(program.jaxpr)
    assert sizes(program) == sizes(plain)
    for a, b in zip(jax.tree.leaves(program(X)), jax.tree.leaves(plain(X)), strict=True):
        np.testing.assert_array_equal(a, b)
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    assert jaxprtool.equivalent(jaxprtool.read(tmp_path / "p.jaxpr"), program)
    assert jaxprtool.to_python(program)
    gradient = "jvp" if name == "while" else "vjp"
    for passes in ("-O2", "open_constants, apply.dce", "batch(axis_size=2)", gradient):
        made, expected = (p.apply(passes) for p in (program, plain))
        for each, other in zip(*map(programs, (made, expected)), strict=True):
            assert not literals(each.jaxpr)
            assert sizes(each) == sizes(other)


def programs(made):
    return [made] if isinstance(made, jaxprtool.Program) else list(made.values())


def test_constants_of_a_bare_jaxpr_are_counted(simplified):
    jaxpr = jax.make_jaxpr(FUNCTIONS["switch"])(X)
    assert len(literals(jaxpr)) == 3
    assert memory(jaxpr).constant_bytes == 2 * W.nbytes
    assert [each.bytes for each in stats(jaxpr).constants] == [W.nbytes] * 2
    assert as_constants(jaxpr) is as_constants(jaxpr)


def test_an_array_is_one_constant_however_often_it_is_read(simplified):
    def fun(x):
        return x @ TABLE + x @ W, lax.scan(lambda c, _: (c @ W @ TABLE, None), x, None, 2), W

    program = jaxprtool.trace(fun, X)
    assert len(program.jaxpr.consts) == 2
    assert memory(program).constant_bytes == W.nbytes + TABLE.nbytes


@pytest.mark.parametrize("function", [lambda x: x @ W, jax.jit(lambda x: x @ W)])
def test_array_literals_next_to_equations_without_become_constants(simplified, function):
    whole = jax.make_jaxpr(lambda x: function(jnp.sin(x)))(X)
    first = whole.eqns[:1]
    start = jaxcompat.replace_jaxpr(whole, eqns=first, outvars=first[0].outvars)
    program = jaxprtool.trace(jnp.sin, X).replace(jaxpr=start).replace(jaxpr=whole)
    assert literals(whole) and not literals(program.jaxpr)
    np.testing.assert_allclose(program(X), jnp.sin(X) @ W, rtol=1e-6)


def test_bodies_that_calls_share_stay_shared(simplified):
    inner = jax.jit(lambda x: x @ W)
    program = jaxprtool.trace(lambda x: inner(inner(x)), X)
    first, second = program.jaxpr.eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_bodies_that_loops_share_stay_shared(simplified):
    body = lambda c, row: (c + jnp.sin(W).sum() + row.sum(), None)  # noqa: E731
    fun = lambda rows: (lax.scan(body, 0.0, rows)[0], lax.scan(body, 1.0, rows)[0])  # noqa: E731
    program = jaxprtool.trace(fun, W)
    first, second = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan")
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_a_jaxpr_without_array_literals_is_unchanged():
    jaxpr = jax.make_jaxpr(FUNCTIONS["scan"])(X)
    assert as_constants(jaxpr) is jaxpr


def test_a_custom_vjp_that_returns_its_operand_has_its_gradient(simplified):
    program = jaxprtool.trace(by_vjp, X)
    expected = jax.grad(lambda x: by_vjp(x).sum())(X)
    np.testing.assert_array_equal(jax.grad(lambda x: program(x).sum())(X), expected)
