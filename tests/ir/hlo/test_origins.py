"""A compiled operation is attributed to its source lines."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.module import compiled_module
from jaxprtool.ir.hlo.origins import OperationOrigins
from jaxprtool.ir.hlo.partitions import collectives
from tests.programs.sharded import floats, mesh_of, under_jit


def scanned(weights, x):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), jnp.sin(x).sum()

    return jax.lax.scan(layer, x, weights)


def compiled(function, *args):
    """Compile without JAX's cache: a cached executable may have the lines of another file."""
    with compiled_afresh():
        return compiled_module(jax.jit(function).lower(*args).compile())


@pytest.fixture(scope="module")
def module():
    def loss(weights, x):
        return scanned(weights, x)[0].sum()

    return compiled(jax.grad(loss), jnp.ones((4, 64, 64)), jnp.ones((32, 64)))


@pytest.fixture(scope="module")
def origins(module):
    return OperationOrigins(module, frames_now(), frozenset(module.by_name))


@pytest.mark.proof
def test_the_parts_of_an_operation_add_up(module, origins):
    for name in module.by_name:
        assert sum(share for _, share in origins.of(name)) == pytest.approx(1)


def test_a_product_has_its_line_scope_and_direction(module, origins):
    products = [each.name for each in module.by_name.values() if each.opcode == "dot"]
    found = {origin for name in products for origin, _ in origins.of(name)}
    assert {each.line.file.rpartition("/")[2] for each in found} == {"test_origins.py"}
    # XLA merges a product with the transposition of its operand.
    assert {each.primitive for each in found} <= {"dot_general", "transpose"}
    assert {each.backward for each in found} == {False, True}
    assert all("layer" in each.scope for each in found)


def scoped(w, x):
    def norm(x):
        return x - x.mean() * jnp.cos(x)

    def loss(w):
        with jax.named_scope("LM"):
            hidden = norm(x @ w) * jnp.sin(x)
        return jnp.square(norm(hidden)).sum()

    return norm(w) - 0.1 * jax.grad(loss)(w)


def test_scopes_are_those_of_cost():
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    module = compiled(scoped, w, x)
    found = OperationOrigins(module, frames_now(), frozenset(module.by_name))
    scopes = {origin.scope for name in module.by_name for origin, _ in found.of(name)}
    cost = jaxprtool.cost(jaxprtool.trace(scoped, w, x), by="scope")
    paths = {"/".join(group.path) for group in cost.groups}
    shown = {"/".join(scope) for scope in scopes}
    assert {path.partition(" #")[0] for path in paths} & shown >= {"forward/loss/LM", "norm"}
    assert any(scope.startswith("backward/loss") for scope in shown)
    assert not any("scoped" in scope for scope in shown)


def test_a_loop_is_overhead_unless_it_is_compiled_to_one_operation(module, origins):
    loops = [each.name for each in module.by_name.values() if each.opcode == "while"]
    assert loops and all(origins.own(each) == "loop overhead" for each in loops)
    whole = OperationOrigins(module, frames_now(), frozenset(loops))
    assert all(whole.own(each) == "" and len(whole.of(each)) > 1 for each in loops)


def filtered(p, xs):
    def body(carry, x):
        p, total = carry
        gain = p @ x
        p = p - jnp.outer(gain, gain) / (1 + x @ gain)
        return (p, total + gain.sum()), gain

    return jax.lax.scan(body, (p, jnp.float32(0)), xs)


def test_the_time_of_a_loop_compiled_to_one_operation_is_on_the_lines_of_its_body():
    # A step writes three numbers of an array of thousands, in place.
    module = compiled(filtered, jnp.ones((3, 3)), jnp.ones((5000, 3)))
    (loop,) = (op for op in module.by_name.values() if op.opcode == "while")
    outer = {op.name for op in module.entry.instructions}
    origins = OperationOrigins(module, frames_now(), frozenset(outer))
    times = dict.fromkeys(range(8), 0.0)
    first = filtered.__code__.co_firstlineno
    for origin, share in origins.of(loop.name):
        times[origin.line.line - first] += share
    assert sum(times[line] for line in (3, 4, 5)) > 0.7


def test_every_operation_with_work_has_a_line(module, origins):
    worked = [each.name for each in module.entry.instructions if each.opcode in ("fusion", "while")]
    assert all(origin.line is not None for name in worked for origin, _ in origins.of(name))


def test_a_collective_has_the_lines_of_the_values_it_moves():
    def sums(x, y):
        first = jnp.sin(x).sum(0)
        second = jnp.cos(y).sum(0)
        return first, second

    function = under_jit(sums, mesh_of(data=8), P("data"), P("data"))
    with compiled_afresh():  # JAX's cache keeps the lines of an earlier source
        module = compiled_module(function.lower(floats(16, 16), floats(16, 48)).compile())
    (merged,) = (each.instruction for each in collectives(module))
    of = OperationOrigins(module, frames_now(), frozenset(module.by_name)).of(merged.name)
    assert sorted(share for _, share in of) == [0.25, 0.75]
    lines = [origin.line.line for origin, _ in sorted(of, key=lambda each: each[1])]
    assert lines[1] == lines[0] + 1


def test_an_operation_that_is_in_no_module_is_unknown(origins):
    ((origin, share),) = origins.of("missing.3")
    assert (origin.line, origin.primitive, share) == (None, "missing", 1.0)
