"""The cost of a program: each equation times its executions, by group."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.roofline import RooflineResult, register_roofline
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxprtool import cost, jaxcompat, trace
from jaxprtool.analysis.kernels import Kernels
from jaxprtool.commands.cost.estimate import BY, ProgramCost
from jaxprtool.commands.cost.rules import Work
from jaxprtool.commands.cost.table import cost_icicles
from jaxprtool.extend import rule
from jaxprtool.loading.argspec import read_args
from jaxprtool.render.page import SourceLink

W = np.ones((512, 512), np.float32)
X = np.ones(512, np.float32)


def flops(fun, *args):
    return cost(trace(fun, *args)).total.work.flops


def test_arguments_are_recognized_through_products_that_copy_them():
    def f(w, x, y):
        return jnp.einsum("abc,bde->acde", w, x), jnp.sin(y.T)

    def rematerialized(w, x, y):
        return jax.checkpoint(f)(w, x, y)[1].sum()

    args = np.ones((4, 3, 5), np.float32), np.ones((3, 2, 6), np.float32), W
    groups = {each.name: each.work for each in cost(trace(f, *args), "argument").groups}
    assert groups["w, x"].flops == 2 * 3 * (4 * 5) * (2 * 6)
    assert groups["y"].transcendentals == W.size
    differentiated = trace(jax.grad(rematerialized, argnums=2), *args)
    names = {each.name for each in cost(differentiated, "argument").groups}
    assert "y" in names and names <= {"", "w", "x", "y", "w, x"}


def test_implicit_broadcasts_have_the_size_of_their_results_at_any_size():
    def f(x, y):
        return (x * y).sum(), (x + y).sum()

    (n,) = jax.export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct((n, size), np.float32) for size in (64, 1)]
    symbolic = trace(f, *types)
    known = symbolic.apply("specialize(n=128)")
    any_size, one_size = (cost(each).total.work.bytes_read for each in (symbolic, known))
    assert any_size._evaluate({"n": 128}) == one_size


def test_joined_arrays_are_whole_only_if_they_are_taken_back_without_strides():
    def joined(x, y):
        return jnp.concatenate([x, y])

    (n,) = jax.export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct((size,), np.float32) for size in (n, 64)]
    any_size = cost(trace(joined, *types)).total.work.bytes_read
    assert any_size._evaluate({"n": 64}) == 4 * 128
    strided = kernels_of(lambda x, y: joined(x, y)[:64:2] * 2)
    assert "concatenate" in strided
    assert "concatenate" not in kernels_of(lambda x, y: joined(x, y)[:64] * 2)


def kernels_of(f):
    """Return the primitives that a program of two vectors keeps, as kernels are counted."""
    program = trace(f, *[jax.ShapeDtypeStruct((64,), np.float32)] * 2)
    nodes = Kernels(jaxcompat.open_jaxpr(program.jaxpr)).nodes
    return [node.eqn.primitive.name for node in nodes if not node.absorbed]


def test_the_body_of_a_scan_counts_in_each_iteration():
    def f(x, w):
        return lax.scan(lambda x, _: (w @ x, None), x, length=10)[0]

    assert flops(f, X, W) == 10 * 2 * 512 * 512
    assert cost(trace(f, X, W)).total.work.bytes_read == 10 * 4 * (512 * 512 + 512)


def test_a_counting_loop_has_its_iterations():
    def f(x, w, count):
        return lax.fori_loop(0, count, lambda i, x: w @ x, x)

    counted = cost(
        trace(
            lambda x, w: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, w @ c[1]), (0, x))[
                1
            ],
            X,
            W,
        )
    )
    assert counted.by == "line" and not counted.total.per_round
    assert counted.total.work.flops == 7 * (2 * 512 * 512 + 2)
    unknown = cost(trace(f, X, W, 7))
    assert unknown.total.per_round and unknown.total.work.flops == 2 * 512 * 512 + 2


def test_a_branch_has_a_range_of_costs():
    def f(i, x, w):
        return lax.switch(i, [lambda x: x + 1, lambda x: w @ x, lambda x: w @ (w @ x)], x)

    found = cost(trace(f, 1, X, W), "primitive")
    # The arithmetic on the index counts too.
    index = found.total.work.flops - 4 * 512 * 512
    assert found.total.least.flops == 512 + index and index < 5
    ranges = {group.name: (group.least.flops, group.work.flops) for group in found.groups}
    assert ranges["dot_general"] == (0, 4 * 512 * 512) and ranges["add"] == (0, 512)
    assert found.total.products == {"f32": 4 * 512 * 512}


def test_recomputation_in_the_backward_pass_counts_again():
    def f(w, x):
        return jnp.sin(w @ jnp.sin(w @ x)).sum()

    plain = cost(trace(f, W, X).apply("grad"), "primitive")
    again = cost(trace(jax.checkpoint(f), W, X).apply("grad"), "primitive")
    (first,), (second,) = ([g for g in c.groups if g.name == "dot_general"] for c in (plain, again))
    assert second.work.flops > first.work.flops


def test_a_shard_map_counts_on_all_devices_and_on_each():
    mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))

    def f(x, w):
        return jax.shard_map(
            lambda x, w: lax.psum((x @ w).sum(), "rows"),
            mesh=mesh,
            in_specs=(P("rows"), P()),
            out_specs=P(),
        )(x, w)

    found = cost(trace(f, W, W))
    assert found.per_device.work.flops * 4 == found.total.work.flops
    assert found.total.work.flops == pytest.approx(2 * 512**3 + 512 * 512, rel=1e-3)
    (collective,) = found.collectives
    assert collective.name.endswith("over rows") and collective.work.bytes_communicated == 4 * 4


def test_symbolic_sizes_give_polynomials():
    found = cost(trace(jnp.matmul, *read_args("f32[n,d], f32[d,d]")[0]))
    assert str(found.total.work.flops) == "2*d^2*n"
    assert str(found.total.work.bytes_written) == "4*d*n"


def test_bytes_exclude_fused_values():
    found = cost(trace(lambda x: jnp.tanh(x * 2 + 1) - x, X)).total.work
    assert (found.bytes_read, found.bytes_written) == (2 * 2048, 2048)
    row = cost(trace(lambda x, i: x[i], W, 3)).total.work
    assert row.bytes_read < 4 * 600


@pytest.mark.proof
def test_a_shared_body_counts_at_each_call_and_is_analyzed_once():
    f, calls = jax.jit(jnp.negative), 1
    for _ in range(8):
        f, calls = jax.jit(lambda x, f=f: reduce(lambda y, _: f(y), range(16), x)), 16 * calls
    assert flops(f, X) == 512 * calls


@pytest.mark.parametrize("by", BY)
def test_groups_add_up(by):
    def layer(x, w):
        return jnp.tanh(w @ x), None

    def f(params, x):
        y = lax.scan(layer, x, params["w"])[0]
        return jnp.where(y > 0, y, params["b"]).sum()

    params = {"w": np.stack([W] * 3), "b": X}
    found = cost(trace(f, params, X).apply("value_and_grad"), by)
    groups = [group for group in found.groups if len(group.path) <= 1]
    for field in ("flops", "transcendentals", "bytes_read", "bytes_written"):
        total = getattr(found.total.work, field)
        assert sum(getattr(group.work, field) for group in groups) == total
    assert found.groups[0].work.flops == max(group.work.flops for group in found.groups)


def test_lines_are_the_users_with_the_librarys_location_behind():
    def f(x, w):
        y = jax.nn.softmax(x)
        return y @ w

    product, softmax = cost(trace(f, X, W)).groups[:2]
    start = f.__code__.co_firstlineno
    assert product.name.endswith(f"test_cost.py:{start + 2}")
    assert softmax.name.endswith(f"test_cost.py:{start + 1}")
    assert product.line.own and product.behind == ""


def test_scopes_are_a_tree_and_the_backward_pass_has_its_own():
    def f(w, x):
        for i in range(2):
            with jax.named_scope(f"Block_{i}"):
                with jax.named_scope("Dense"):
                    x = jnp.tanh(w @ x)
                x = x + 1
        return x.sum()

    found = {g.name: g.work for g in cost(trace(f, W, X).apply("grad"), "scope").groups}
    assert found["forward/Block_1/Dense"].flops == pytest.approx(2 * 512 * 512, rel=0.01)
    assert found["forward/Block_1"].flops > found["forward/Block_1/Dense"].flops
    assert found["backward/Block_1/Dense"].flops > 2 * 512 * 512


def test_only_used_arguments_count():
    def f(params, x):
        return (
            lax.scan(lambda x, w: (w.T.astype(x.dtype) @ x, None), x, params["w"])[0] @ params["b"]
        )

    params = {"w": np.stack([W] * 3), "b": X}
    found = {g.name: g.work.flops for g in cost(trace(f, params, X), "argument").groups}
    assert found["params['w'], x"] == 3 * 2 * 512 * 512
    assert found["params['b']"] == 2 * 512


def test_primitives_of_unknown_cost_are_named_until_a_rule_is_added():
    strange = jax.extend.core.Primitive("strange_of_cost")
    strange.def_abstract_eval(lambda x: x)
    program = trace(strange.bind, X)
    assert cost(program).unknown == {"strange_of_cost": 1}

    @rule("cost", "strange_of_cost")
    def _(eqn):
        return Work(flops=7)

    assert cost(program).unknown == {} and cost(program).total.work.flops == 7


def test_a_rule_of_jaxs_roofline_is_used_as_a_fallback():
    primitive = jax.extend.core.Primitive("known_to_roofline")
    primitive.def_abstract_eval(lambda x: x)
    register_roofline(primitive)(lambda ctx, x, **_: RooflineResult(unfused_flops=3 * x.size))
    found = cost(trace(primitive.bind, X))
    n = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), "float32")
    assert found.total.work.flops == 3 * X.size and not found.unknown
    assert cost(trace(primitive.bind, n)).unknown


def test_only_the_body_that_runs_counts():
    """A linear solve also holds the product, and the transposed solve for its derivative."""

    def solve(w, x):
        return lax.custom_linear_solve(lambda v: w @ v, x, lambda _, b: jnp.sin(b), symmetric=True)

    assert flops(solve, W, X) == 0
    program = trace(jax.grad(lambda w, x: (w @ solve(w, x)).sum()), W, X)
    assert cost(program).total.work.transcendentals == 2 * 512


def test_a_product_of_a_matrix_with_itself():
    found = cost(trace(lax.linalg.symmetric_product, *map(jnp.zeros, [(4, 6), (4, 4)])))
    assert found.total.work.flops == 2 * 4 * 4 * 6 and not found.unknown


def test_dead_code_is_reported_at_every_depth():
    def function(x):
        unused = x @ x  # noqa: F841
        y, _ = jax.lax.scan(lambda c, _: (c @ x, c @ c), x, length=3)
        return y

    x = jnp.ones((8, 8))
    found = cost(trace(function, x))
    product = 2 * 8**3
    assert found.total.work.flops == 7 * product and found.dead.work.flops == 4 * product
    assert cost(trace(lambda x: x @ x, x)).dead is None


def test_operands_of_effects_are_not_dead():
    def function(x):
        jax.debug.callback(lambda y: None, x @ x)
        return x

    assert cost(trace(function, jnp.ones((8, 8)))).dead is None


# --- flame graphs -----------------------------------------------------------------------------


def line_of(name):
    return SourceLink(name, "", name) if name.rpartition(":")[2].isdecimal() else None


def layer(x, w):
    with jax.named_scope("mlp"):
        x = jnp.tanh(x @ w)
    return x + 1


def layers(ws, x):
    for w in ws:
        x = layer(x, w)
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0].sum()


def test_flame_graphs_have_the_numbers_of_the_tables():
    program = trace(jax.grad(layers), [jnp.ones((8, 8))] * 3, jnp.ones((8, 8)))
    total = cost(program).total.work
    flops, size = cost_icicles(cost(program), ProgramCost(program).by_frame(), line_of)
    assert (flops.quantity, flops.root.amount) == ("FLOPs", total.flops + total.transcendentals)
    assert (size.quantity, size.root.amount) == ("bytes", total.bytes)
    for group in cost(program).groups:
        assert flops.lines[group.name] == group.work.flops + group.work.transcendentals
        assert size.lines[group.name] == group.work.bytes
    scopes = {group.path: group.work.bytes for group in cost(program, "scope").groups}
    shown = dict(_by_path(size.root, ()))
    assert len(scopes) > 5 and {path: shown.get(path, 0) for path in scopes} == scopes


def _by_path(frame, path):
    for inner in frame.inside:
        yield (*path, inner.name), inner.amount
        yield from _by_path(inner, (*path, inner.name))


def test_a_flame_graph_says_that_it_counts_all_branches():
    def cube(x):
        return x @ x @ x

    def square(x):
        return x @ x

    program = trace(lambda flag, x: lax.cond(flag, cube, square, x), True, jnp.ones((16, 16)))
    flops, _ = cost_icicles(cost(program), ProgramCost(program).by_frame(), line_of)
    total = cost(program).total.work
    assert flops.root.amount > total.flops
    assert "all branches of conditionals; a run takes at most " in flops.note


def test_symbolic_sizes_have_no_flame_graph():
    program = trace(jnp.sin, *read_args("f32[n]")[0])
    assert cost_icicles(cost(program), ProgramCost(program).by_frame(), line_of) == []
