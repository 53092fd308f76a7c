"""Equations are replaced by calls of what JAX lowers them to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.extend.core import Primitive

from jaxprtool import jaxcompat, memory, trace
from jaxprtool.commands.memory.walk import Workspace, workspace_rules
from jaxprtool.ir.equations import equations
from jaxprtool.ir.expansions import expanded, expansion_rules
from jaxprtool.ir.rules import rule

X = jnp.arange(12.0).reshape(3, 4)


def names(jaxpr):
    return {eqn.primitive.name for eqn in equations(jaxcompat.open_jaxpr(jaxpr))}


def sparse_product(data, indices, x):
    return sparse.BCOO((data, indices), shape=(3, 3)) @ x


POSITIONS = jnp.array([[0, 1], [2, 2]])
CASES = {
    "cumsum": (lambda x: lax.cumsum(x, axis=1), (X,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, axis=0, reverse=True), (X,)),
    "bcoo_dot_general": (sparse_product, (jnp.array([2.0, 3.0]), POSITIONS, X)),
    "ragged_dot_general": (
        lambda x: lax.ragged_dot(x, jnp.ones((2, 4, 5)), jnp.array([1, 2])),
        (X,),
    ),
    "igamma": (jax.scipy.special.gammainc, (X + 1, X + 2)),
    "custom_linear_solve": (
        lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x)[0],
        (jnp.ones(4),),
    ),
}


@pytest.mark.parametrize("primitive", CASES)
def test_a_primitive_that_is_lowered_by_a_function_expands_and_computes_the_same(primitive):
    function, args = CASES[primitive]

    def in_loop(*args):
        return lax.map(lambda _: jax.jit(function)(*args), jnp.arange(2))

    jaxpr = trace(in_loop, *args).jaxpr
    new = expanded(jaxpr)
    assert primitive in names(jaxpr) and primitive not in names(new)
    (before,), (after,) = (jaxcompat.jaxpr_as_fun(each)(*args) for each in (jaxpr, new))
    np.testing.assert_allclose(before, after, rtol=1e-6)


def test_a_jaxpr_in_which_nothing_expands_stays_the_same_object():
    for function in (lambda x: jnp.sin(x) @ x.T, jax.nn.sigmoid, jax.nn.gelu):
        jaxpr = trace(function, X).jaxpr
        assert expanded(jaxpr) is jaxpr


def test_calls_in_which_nothing_expands_are_not_rewritten(monkeypatch):
    jaxpr = trace(lambda x: jax.jit(jnp.sin)(x) @ x.T, X).jaxpr
    monkeypatch.setattr("jaxprtool.ir.expansions.map_equations", None)
    assert expanded(jaxpr) is jaxpr


def test_the_body_of_a_custom_vmap_function_keeps_its_equations():
    @jax.custom_batching.custom_vmap
    def double(x):
        return lax.cumsum(jnp.sin(x))

    @double.def_vmap
    def rule(size, batched, x):
        raise NotImplementedError

    jaxpr = trace(double, X).jaxpr
    sines = [
        next(eqn for eqn in equations(jaxcompat.open_jaxpr(each)) if eqn.primitive.name == "sin")
        for each in (jaxpr, expanded(jaxpr))
    ]
    assert sines[0] is sines[1]
    assert names(expanded(jaxpr)).isdisjoint({"custom_vmap_call", "cumsum"})


def opaque(name):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda aval: aval)
    return primitive


@pytest.mark.parametrize("unroll, is_loop", [(1, True), (2, True), (4, False), (9, False)])
def test_a_scan_whose_iterations_are_all_unrolled_is_no_loop(unroll, is_loop):
    def product(x):
        def step(carry, row):
            return carry * x[0, 0] + row, carry

        return lax.scan(step, jnp.zeros(4), jnp.tile(x, (2, 1))[:4], unroll=unroll)

    program = trace(product, X)
    found = expanded(program.jaxpr)
    assert ("scan" in names(found)) == is_loop
    for one, other in zip(
        jaxcompat.jaxpr_as_fun(found)(X), jax.tree.leaves(product(X)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_plug_ins_add_expansions_and_workspaces():
    spread, thick = opaque("test_spread"), opaque("test_thick")
    sizes = jnp.ones((512, 512))
    for primitive in (spread, thick):
        found = memory(trace(lambda x, p=primitive: p.bind(x) + 1, sizes))
        assert found.unknown == {primitive.name: 1} and found.temporary_bytes == 0

    @rule(expansion_rules, "test_spread")
    def _(eqn):
        return jax.make_jaxpr(lambda x: jnp.sort(x @ x) @ x)(*(v.aval for v in eqn.invars))

    @rule(workspace_rules, "test_thick")
    def _(eqn):
        return Workspace(12345)

    found = memory(trace(lambda x: spread.bind(x) + 1, sizes))
    assert not found.unknown and found.temporary_bytes >= sizes.nbytes
    found = memory(trace(lambda x: thick.bind(x) + 1, sizes))
    assert not found.unknown and found.temporary_bytes == 12345


def test_a_function_that_cannot_be_traced_leaves_the_equation():
    from jax.interpreters import mlir

    primitive = opaque("test_untraceable")
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 1 / 0, multiple_results=False))
    jaxpr = trace(lambda x: primitive.bind(x), X).jaxpr
    assert expanded(jaxpr) is jaxpr
    assert memory(jaxpr).unknown == {"test_untraceable": 1}
