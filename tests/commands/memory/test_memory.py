"""memory: the peak, the live values there, its location, and the curve; compared with XLA."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat, memory, trace
from jaxprtool.commands.memory.table import memory_icicle
from jaxprtool.errors import UnsupportedError
from jaxprtool.jaxcompat.tracing import NO_SOURCE
from jaxprtool.loading.argspec import read_args
from jaxprtool.render.page import SourceLink
from tests.programs.samples import sample_files, sample_programs
from tests.share import first_and_proofs

X = jnp.full((256, 256), 0.5)
SIZE = X.nbytes
HERE = "test_memory.py:"


def found(function, *args):
    return memory(trace(function, *args))


def line(function, below):
    return f"{HERE}{function.__code__.co_firstlineno + below}"


def adds_up(each):
    """Assert that the parts of a peak add up to the peak."""
    parts = each.argument_bytes + each.result_bytes + each.constant_bytes + each.temporary_bytes
    assert each.peak_bytes == parts - each.donated_bytes == sum(live.bytes for live in each.live)
    assert each.at.bytes == each.peak_bytes == max(point.bytes for point in each.curve)
    assert [live.bytes for live in each.live] == sorted((v.bytes for v in each.live), reverse=True)
    return True


def of_kind(each, kind):
    return [live for live in each.live if live.kind == kind]


# --- live values ----------------------------------------------------------------------------------


def test_values_in_a_shard_map_have_their_size_on_one_device():
    mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))

    def product(x):
        return jnp.sort(jnp.sin(x) @ jnp.ones((256, 256)))[:1, :1].sum(keepdims=True)

    def function(x):
        sharded = P("rows")
        return jax.shard_map(product, mesh=mesh, in_specs=sharded, out_specs=P("rows"))(x)

    whole, each = found(product, X), found(function, X)
    assert adds_up(each) and (each.argument_bytes, each.result_bytes) == (SIZE, 4 * 4)
    of_rows = [live.bytes for live in of_kind(each, "value") if live.type.startswith("f32[64,256]")]
    assert of_rows == 2 * [SIZE // 4]
    assert each.temporary_bytes < whole.temporary_bytes


def test_values_have_the_line_that_makes_them_and_their_last_reader():
    def function(x):
        y = jnp.sin(x)
        z = jnp.cos(x)
        return jnp.sort(y @ z)[0, 0]

    each = found(function, X)
    assert adds_up(each) and each.temporary_bytes == 3 * SIZE
    assert each.at.primitive == "dot_general" and each.at.source.endswith(line(function, 3))
    made = {live.primitive: live for live in of_kind(each, "value")}
    assert made.keys() == {"sin", "cos", "dot_general"}
    assert made["sin"].source.endswith(line(function, 1)) and made["sin"].type == "f32[256,256]"
    assert made["sin"].reader == "dot_general"
    assert made["sin"].reader_source.endswith(line(function, 3))


def test_equal_values_are_one_row():
    def function(params, x):
        return sum((jnp.sin(x @ w) @ w for w in params), x).sum()

    each = found(function, [jnp.ones((256, 256))] * 3, X)
    assert adds_up(each)
    (params,) = [live for live in of_kind(each, "argument") if live.count > 1]
    assert (params.name, params.count, params.bytes) == ("params[0..2]", 3, 3 * SIZE)


def test_fused_values_are_not_live():
    each = found(lambda x: jnp.sin(x) * 2 + 1, X)
    assert adds_up(each) and each.peak_bytes == 2 * SIZE
    assert found(jnp.sin, jnp.float32(1)).peak_bytes == 8


def test_values_that_only_a_reduction_reads_are_not_live():
    def distances(x):
        return jnp.sqrt(jnp.square(x[:, None] - x[None]).sum(-1))

    each = found(distances, X)
    assert adds_up(each) and each.temporary_bytes == 0
    assert found(lambda x: jnp.square(jnp.tanh(x @ x) @ x).sum(), X).temporary_bytes == 0
    both = found(lambda x: (jnp.exp(x).sum(0), jnp.exp(x) @ x), X)
    assert [live.primitive for live in of_kind(both, "value")] == ["exp"]


def test_a_broadcast_that_a_reduction_and_another_equation_read_is_stored_once():
    def weights(x):
        total = jnp.exp(x).sum(1, keepdims=True)
        return jnp.exp(x) / total, (x / total).sum(0)

    each = found(weights, X)
    assert adds_up(each)
    assert [live.type for live in of_kind(each, "value") if live.bytes == SIZE] == ["f32[256,256]"]


def test_results_are_allocated_from_the_start_and_hold_other_values():
    def function(x):
        y = jnp.sin(x) @ x
        return y @ x

    each = found(function, X)
    assert adds_up(each) and each.temporary_bytes == SIZE
    assert found(lambda x: (x, x), X).result_bytes == 2 * SIZE


def test_constants_count():
    each = found(lambda x: x @ X, X)
    assert adds_up(each) and each.constant_bytes == SIZE
    assert [live.type for live in of_kind(each, "constant")] == ["f32[256,256]"]


def test_a_program_without_equations_has_a_peak():
    each = found(lambda x: x, X)
    assert adds_up(each) and each.peak_bytes == 2 * SIZE
    assert (each.at.primitive, each.at.source, len(each.curve)) == ("", "", 1)
    assert found(lambda: ()).peak_bytes == 0


# --- loops, branches and calls --------------------------------------------------------------------


def test_the_peak_is_found_inside_a_loop_and_outer_live_values_count():
    def function(x, w):
        outside = jnp.exp(x)

        @jax.jit
        def called(x):
            def body(x, _):
                wide = jnp.sin(jnp.concatenate([x, x]))
                return wide.T @ wide, None

            return jax.lax.scan(body, x, length=3)[0]

        return jnp.sort(called(x) @ outside)[0, 0] + w

    each = found(function, X, 1.0)
    assert adds_up(each)
    inside = {live.primitive: live for live in of_kind(each, "value")}
    assert inside["sin"].source.endswith(line(function, 6))
    assert inside["exp"].source.endswith(line(function, 1)) and inside["exp"].bytes == SIZE
    assert each.at.source.endswith(line(function, 6))


def test_stacked_results_are_stored_once_and_so_are_rows_read_by_a_product():
    def function(xs, x):
        def body(x, w):
            y = w @ x
            return x + 1, jnp.sin(y)

        return jax.lax.scan(body, x, xs)[1].sum()

    each = found(function, jnp.ones((10, 256, 256)), X)
    assert adds_up(each)
    stacked = next(live for live in of_kind(each, "value") if live.type == "f32[10,256,256]")
    assert stacked.bytes == 10 * SIZE and stacked.source.endswith(line(function, 3))
    (row,) = of_kind(each, "row")
    assert (row.name, row.type, row.bytes) == ("xs", "f32[256,256]", SIZE)


def test_a_branch_needs_the_memory_of_its_largest_body():
    def function(i, x):
        return jax.lax.switch(i, [lambda x: x + 1, lambda x: jnp.sin(x) @ x], x)

    each = found(function, 1, X)
    assert adds_up(each) and each.at.source.endswith(line(function, 1))
    assert math.isclose(each.temporary_bytes, SIZE, rel_tol=0.01)


def test_a_curve_has_a_point_for_each_equation_that_writes_including_loops():
    def function(x):
        def body(x, _):
            return jnp.sin(x) @ x, None

        return jax.lax.scan(body, x @ x, length=5)[0]

    each = found(function, X)
    assert [point.primitive for point in each.curve] == ["", "dot_general", "sin", "dot_general"]
    assert [point.position for point in each.curve] == [0, 1, 2, 3]
    assert each.curve[0].bytes == each.argument_bytes + each.result_bytes


def test_a_long_curve_has_a_thousand_points_and_the_peak():
    def function(x):
        for _ in range(1500):
            x = jnp.sin(x) @ x
        return x

    each = found(function, jnp.ones((4, 4)))
    assert adds_up(each) and len(each.curve) <= 1001
    assert each.curve[-1].position >= 2990


# --- dead values ----------------------------------------------------------------------------------


def test_dead_values_are_not_live():
    def function(x):
        unused = jnp.sin(x) @ x
        jax.lax.scan(lambda c, _: (c @ x, c @ unused), x, length=10)
        return jnp.sort(x)

    each = found(function, X)
    assert adds_up(each) and each.temporary_bytes == 0


def test_dead_results_and_carries_of_loops_and_branches_are_not_live():
    def function(x, flag):
        def step(carry, _):
            x, unused = carry
            return (x @ x, unused @ x), jnp.sin(x)

        (y, _), _ = jax.lax.scan(step, (x, jnp.cos(x)), length=10)
        branches = lambda x: (x @ x, jnp.exp(x)), lambda x: (x, x @ x)
        return jax.lax.cond(flag, *branches, y)[0]

    each = found(function, X, True)
    assert adds_up(each) and each.temporary_bytes < 4 * SIZE
    assert {live.primitive for live in each.live}.isdisjoint({"cos", "sin", "exp"})


def test_operands_of_effects_are_live():
    def function(x):
        jax.debug.callback(lambda y: None, jnp.sin(x) @ x)
        return x

    assert found(function, X).temporary_bytes >= 2 * SIZE


# --- recomputation --------------------------------------------------------------------------------


def blocks(wrap):
    block = wrap(lambda w, x: x + jnp.tanh(jnp.tanh(x @ w) @ w.T))

    def loss(weights, x):
        for w in weights:
            x = block(w, x)
        return jnp.square(x).sum()

    return jax.grad(loss), [jnp.ones((64, 256))] * 6, jnp.ones((512, 64))


@pytest.mark.proof
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_recomputation_by_checkpoint_waits_at_xlas_barriers(wrap):
    function, *args = blocks(wrap)
    each = found(function, *args)
    assert adds_up(each)
    assert each.peak_bytes == pytest.approx(measured(function, (), *args), rel=0.05)


def test_a_users_barrier_has_the_same_effect():
    def function(x, y):
        x, _ = jax.lax.optimization_barrier((x, y @ y))
        return jnp.sort(jnp.sin(x) @ x)

    each = found(function, X, X)
    assert adds_up(each)
    assert each.peak_bytes == pytest.approx(measured(function, (), X, X), rel=0.01)


# --- donation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_result_reuses_a_donated_argument(donate):
    def step(state, x):
        return state + jnp.sin(x @ x), x.sum()

    each = memory(jaxprtool.trace(jax.jit(step, donate_argnums=donate), X, X))
    assert adds_up(each) and each.donated_bytes == SIZE * len(donate)
    assert each.peak_bytes == measured(step, donate, X, X)


# --- compared with XLA ----------------------------------------------------------------------------


def measured(function, donate, *args):
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    stats = compiled.memory_analysis()
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    table = 8 * len(jax.tree.leaves(jax.eval_shape(function, *args)))  # the memory of the results
    return sum(sizes) - stats.alias_size_in_bytes - (table if table > 8 else 0)


def test_the_iterations_of_an_unrolled_scan_are_fused_as_by_xla():
    def horner(x):
        start = jnp.zeros_like(x)
        return jax.lax.scan(lambda y, c: (y * x + c, None), start, jnp.arange(8.0), unroll=8)[0]

    assert memory(jaxprtool.trace(horner, X)).peak_bytes <= measured(horner, (), X) * 1.1


def layers(params, x):
    def layer(x, w):
        hidden = jax.nn.gelu(x @ w["up"])
        return x + jax.nn.softmax(x @ x.T) @ hidden @ w["down"], None

    return jnp.square(jax.lax.scan(layer, x, params)[0]).sum()


def unrolled(params, x):
    for i in range(4):
        x = jnp.tanh(x @ params["up"][i]) @ params["down"][i] + x
    return jnp.square(x).sum()


PARAMS = {"up": jnp.ones((4, 64, 256)), "down": jnp.ones((4, 256, 64))}


@pytest.mark.parametrize("function", [layers, jax.grad(layers), jax.grad(unrolled)])
def test_peaks_are_within_a_fifth_of_xlas(function):
    x = jnp.ones((512, 64))
    each = found(function, PARAMS, x)
    assert adds_up(each)
    assert each.peak_bytes == pytest.approx(measured(function, (), PARAMS, x), rel=0.2)


# --- other cases ----------------------------------------------------------------------------------


def test_symbolic_sizes_are_refused():
    program = trace(lambda x, y: x @ y, *read_args("f32[n,d], f32[d,n]")[0])
    with pytest.raises(UnsupportedError, match="needs sizes that are numbers") as refused:
        memory(program)
    assert "specialize(n=…, d=…)" in refused.value.hint
    assert memory(program.apply("specialize(n=4, d=8)")).argument_bytes == 2 * 4 * 4 * 8


def test_exponentially_nested_calls_are_analyzed_fast(monkeypatch):
    # Bodies of up to so many equations are opened, at each level.
    monkeypatch.setattr("jaxprtool.analysis.kernels.MOST_OPENED", 500)

    def doubled(f):
        return jax.jit(lambda x: f(x) + f(x * 2))

    f = jax.jit(jnp.sin)
    for _ in range(25):
        f = doubled(f)
    assert adds_up(found(f, X))


def test_a_program_without_sources_has_primitives_as_names():
    jaxpr = jaxprtool.trace(lambda x: jnp.sin(x) @ x, X).jaxpr
    body = jaxcompat.open_jaxpr(jaxpr)
    bare = [eqn.replace(source_info=NO_SOURCE) for eqn in body.eqns]
    each = memory(jaxcompat.replace_jaxpr(jaxpr, eqns=bare))
    assert adds_up(each) and (each.at.source, each.at.primitive) == ("", "sin")
    assert {live.source for live in each.live} == {""}


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_samples_add_up(file):
    for case in sample_programs(file):
        assert adds_up(memory(case.program())), case.name


def test_a_part_of_a_split_array_may_be_a_result():
    def step(key, x):
        key, following = jax.random.split(key)
        return jax.random.normal(key, x.shape) * x, following

    def halves(x):
        first, second = jnp.split(x, 2)
        return jnp.sin(first) @ first, second

    each = found(step, jax.random.PRNGKey(0), X[0])
    assert adds_up(each)
    assert each.result_bytes == X[0].nbytes + 8
    each = found(halves, X[0])
    assert adds_up(each)
    assert each.result_bytes == 4 + X[0].nbytes // 2


def test_a_flame_graph_has_the_values_live_at_the_peak():
    def layer(params, x):
        return jnp.tanh(x @ params["w"])

    def loss(params, x):
        return layer(params, layer(params, x)).sum()

    program = trace(jax.grad(loss), {"w": X}, X)
    usage = memory(program)
    graph = memory_icicle(usage, program.roots, lambda name: SourceLink(name, "", name))
    assert graph.root.amount == usage.peak_bytes
    top = {frame.name: frame for frame in graph.root.inside}
    assert top["arguments"].amount == usage.argument_bytes
    (params, _) = top["arguments"].inside
    assert [params.name, params.inside[0].name] == ["params", "w"]
    (function,) = top["temporaries"].inside
    assert function.name == "loss" and function.inside[0].name == "layer"
    assert line(layer, 1) in function.inside[0].inside[0].name
