"""The costs and residuals of source lines add up to those of `cost` and `residuals`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import cost, residuals, source, trace
from jaxprtool.errors import UnsupportedError
from tests.programs.sharded import SHARDED

W = np.ones((8, 8), np.float32)
X = np.ones((4, 8), np.float32)


def net(w, x):
    def layer(y, _):
        return jnp.sin(y @ w), None

    return jax.lax.scan(layer, x, length=3)[0].sum()


def lines_of(found):
    return {line.number: line for file in found.files for line in file.lines}


@pytest.mark.parametrize("passes", ["", "grad", "value_and_grad, -O2", "vmap(in_axes=(None, 0))"])
def test_lines_add_up_to_the_cost(passes):
    program = trace(net, W, np.stack([X, X]) if "vmap" in passes else X)
    program = program.apply(passes) if passes and "vmap" not in passes else program
    found, all_of_it = source(program, residuals=False), cost(program)
    assert found.total == all_of_it.total
    by_line = {group.line.line: group.work for group in all_of_it.groups if group.line}
    for number, line in lines_of(found).items():
        assert line.total.work == by_line.get(number, line.total.work)
        assert line.total.work.flops == line.forward.work.flops + line.backward.work.flops
    assert set(by_line) <= set(lines_of(found))
    assert found.has_backward == ("grad" in passes)


def test_the_total_counts_the_most_expensive_branch():
    def branches(flag, w, x):
        return jax.lax.cond(
            flag,
            lambda: (x @ w).sum(),
            lambda: jnp.sin(x).sum(),
        )

    program = trace(branches, True, W, X)
    assert source(program).total == cost(program).total


def test_a_product_has_two_products_in_the_backward_pass():
    start = net.__code__.co_firstlineno
    line = lines_of(source(trace(net, W, X).apply("grad(argnums=(0, 1))")))[start + 2]
    product = 3 * 2 * 4 * 8 * 8
    assert line.forward.products == {"f32": product}
    assert line.backward.products == {"f32": 2 * product}


def test_equations_agree_with_stats():
    program = trace(net, W, X).apply("grad")
    found = source(program)
    counted = sum(line.equations for line in lines_of(found).values()) + found.elsewhere
    assert counted == jaxprtool.why(program, "w").forward.of


def test_saved_bytes_add_up_to_the_residuals():
    program = trace(net, W, X)
    found, kept = source(program), residuals(program)
    assert found.kept.total == kept.total_bytes
    of_lines = sum(line.kept for line in lines_of(found).values())
    assert of_lines + found.kept.arguments + found.kept.elsewhere == kept.total_bytes
    assert of_lines > 0 and found.kept.arguments == W.nbytes


def test_residuals_are_those_of_losses_or_requested():
    assert source(trace(jnp.sin, X)).kept is None
    assert source(trace(jnp.sin, X), residuals=True).kept.total == X.nbytes
    assert source(trace(net, W, X).apply("grad")).kept is None
    assert source(trace(lambda n: n + 1, 1)).kept is None

    def counted(x):
        return jax.lax.while_loop(lambda c: c < 3, lambda c: c * 2, x.sum())

    found = source(trace(counted, X))
    assert found.kept is None and "while_loop" in found.why_not_kept
    with pytest.raises(UnsupportedError):
        source(trace(counted, X), residuals=True)


@pytest.mark.proof
def test_times_of_a_profile_are_those_of_its_lines():
    program = trace(net, W, X)
    times = jaxprtool.profile(program, calls=2)
    found = source(program, profile=times)
    assert found.wall_seconds == times.wall_seconds and found.explained == times.explained
    known = {line.measured for line in lines_of(found).values()} - {None}
    own = {line for line in times.lines if line.line is not None and line.line.own}
    assert known == own and own
    assert source(program).wall_seconds is None


def test_bytes_sent_by_devices_add_up_to_those_of_the_partitioner():
    sharded = SHARDED["data"]()
    with jax.set_mesh(sharded.mesh):
        program = trace(sharded.function, *sharded.arguments)
        split = jaxprtool.shardings(program)
        found = source(program, shardings=split)
    sent = {number: line.sent_bytes for number, line in lines_of(found).items()}
    assert sum(sent.values()) == found.sent_bytes == split.sent_bytes > 0
    assert found.devices == 8
    first = split.collectives[0]
    assert sent[int(first.line.rpartition(":")[2])] >= first.sent_bytes
    assert source(program).sent_bytes is None
