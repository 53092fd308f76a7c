"""Slices of `run_state`, `core_map` and `mpmd_map` have all that a value depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import Start, backward_slice, forward_slice
from tests.share import first_and_proofs

X = np.linspace(0.1, 1, 8 * 128).reshape(8, 128).astype("float32")
Y = X[::-1].copy()


def apart(a, b, c, d):
    c[...] = a[...] * 2
    d[...] = b[...] + 1


def overwritten(a, b, c, d):
    c[...] = a[...]
    d[...] = c[...]
    c[...] = b[...]


def in_a_loop(a, b, c, d):
    def body(i, _):
        c[...] += a[...]
        d[i] = b[i]

    jax.lax.fori_loop(0, 4, body, None)


def in_a_branch(a, b, c, d):
    @pl.when(a[0, 0] > 0)
    def _():
        c[...] = b[...]

    d[...] = c[...] + 1


def into_an_argument(a, b, c, d):
    a[...] = b[...]
    c[...] = a[...]


def on_cores(a, b, c, d):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    @pl.core_map(mesh, interpret=True)
    def _():
        c[...] = a[...] * 2
        d[0] = b[0]


def in_a_scope_on_cores(a, b, c, d):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    @pl.core_map(mesh, interpret=True)
    def _():
        def scoped(buffer):
            buffer[...] = a[...]
            c[...] = buffer[...] + c[...]

        pl.run_scoped(scoped, pltpu.VMEM((8, 128), jnp.float32))

    d[...] = c[...]


def dependences(program):
    """Return the pairs of a result and an argument that it changes with."""
    before, found = program(X, Y), set()
    for i, change in ((i, change) for i in range(2) for change in (0.37, -3)):
        arguments = [x + np.float32(change) * (i == j) for j, x in enumerate((X, Y))]
        after = program(*arguments)
        found |= {(o, i) for o in range(4) if not np.array_equal(before[o], after[o])}
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("body", "expected"),
    first_and_proofs(
        [
            (apart, {(0, 0), (1, 1), (2, 0), (3, 1)}),
            (overwritten, {(0, 0), (1, 1), (2, 1), (3, 0)}),
            (in_a_loop, {(0, 0), (1, 1), (2, 0), (3, 1)}),
            (in_a_branch, {(0, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}),
            (into_an_argument, {(0, 1), (1, 1), (2, 1)}),
            (on_cores, {(0, 0), (1, 1), (2, 0), (3, 1)}),
            (in_a_scope_on_cores, {(0, 0), (1, 1), (2, 0), (3, 0)}),
        ]
    ),
)
def test_a_slice_has_all_that_a_result_depends_on(body, expected):
    def function(x, y):
        zeros = jnp.zeros_like(x)
        return pl.run_state(lambda refs: body(*refs))((x, y, zeros, zeros))

    program = jaxprtool.trace(function, X, Y)
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    # JAX 0.10 loses what `core_map` stores in interpret mode.
    assert dependences(program) <= expected
    for o, i in expected:
        part = backward_slice(jaxpr, Start([(jaxpr, jaxpr.outvars[o])]))
        assert part.arguments[i]
        assert forward_slice(jaxpr, Start([(jaxpr, jaxpr.invars[i])])).results[o]
    for o in range(4):
        one = jaxcompat.replace_jaxpr(program.jaxpr, outvars=[jaxpr.outvars[o]])
        tree = jax.tree.structure(0)
        alone = program.replace(jaxpr=one, out_tree=tree, out_names=("result",)).apply("-O2")
        np.testing.assert_array_equal(alone(X, Y), program(X, Y)[o])
