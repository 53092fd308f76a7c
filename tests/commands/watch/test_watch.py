"""watch summarises the values that equations compute, by line, scope or equation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.analysis.points import point
from jaxprtool.commands.watch import values as watch_values
from jaxprtool.commands.watch import watch as watch_package
from jaxprtool.commands.watch.values import FORMATS, Tally, tallies
from jaxprtool.commands.watch.watch import watch
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.dtypes import array_dtypes
from tests.share import first_and_proofs

X = jnp.arange(4.0)


def watched(function, *args, **options):
    return watch(jaxprtool.trace(function, *args), args, **options)


def rows(function, *args, **options):
    return watched(function, *args, **options).rows


# --- --- statistics -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_histograms_are_made_without_a_warning():
    for bits in (32, 64):
        watch_values._Bins(bits)


def spread():
    """Return floats of all magnitudes, and those next to the limits of formats."""
    random = np.random.default_rng(0)
    some = random.normal(size=2000) * 10.0 ** random.integers(-44, 38, 2000)
    edges = [463.9, 464.0, 464.1, 65519.0, 65520.0, 2.0**-25, 2.0**-24, 2.0**-10, 0.0, -0.0, 3.4e38]
    return np.array([*some, *edges], np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wide", ["f4", "f8"])
def test_the_loss_of_a_format_is_that_of_a_cast(name, wide):
    values, dtype = spread(), array_dtypes()[name]
    with np.errstate(all="ignore"):
        cast = values.astype(dtype).astype(np.float32)
    (tally,) = tallies(values.astype(wide), 1)
    lost = tally.numbers.lost[name]
    assert lost.overflow == (~np.isfinite(cast)).mean() > 0
    assert lost.underflow == ((cast == 0) & (values != 0)).mean() > 0
    normal = float(ml_dtypes.finfo(dtype).tiny)
    assert lost.subnormal == ((cast != 0) & (np.abs(values) < normal)).mean()


def test_the_kernel_of_a_device_counts_like_the_host():
    values = np.array([*spread(), np.nan], np.float32).reshape(4, -1)
    of_rows = tallies(values, 4)
    made = watch_values._tallies(
        values.dtype, values.shape[1], *watch_values._on_device(jnp.array(values), 4, values.dtype)
    )
    for ours, theirs in zip(of_rows, made, strict=True):
        assert (ours.counts == theirs.counts).all()
        assert (ours.low, ours.high, ours.finite) == (theirs.low, theirs.high, theirs.finite)
        np.testing.assert_allclose(
            (ours.mean, ours.deviation), (theirs.mean, theirs.deviation), rtol=1e-5
        )


def test_tallies_of_parts_add_up_to_the_total():
    values = np.array([*spread() / 1e20, np.nan, np.inf], np.float32)
    (whole,) = tallies(values, 1)
    parts = Tally()
    for part in np.split(values, [3, 3, 500]):
        parts.add(tallies(part, 1)[0])
    mixed = Tally()
    for part in (values[:7], values[7:].astype(np.float64)):
        mixed.add(tallies(part, 1)[0])
    for sum_ in (parts, mixed):
        a, b = sum_.numbers, whole.numbers
        assert (a.size, a.low, a.high, a.nans, a.infs, a.lost) == (
            *(b.size, b.low, b.high, b.nans, b.infs, b.lost),
        )
        np.testing.assert_allclose((a.mean, a.deviation), (b.mean, b.deviation))
    finite = values[np.isfinite(values)].astype(np.float64)
    np.testing.assert_allclose((b.mean, b.deviation), (finite.mean(), finite.std()))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "complex64", "int8", "bool"]
)
def test_every_kind_of_number_has_a_summary(dtype):
    values = jnp.array([0, 1, 1, 0]).astype(dtype)
    (row,) = rows(lambda x: x.reshape(2, 2), values, by="equation")
    assert (row.numbers.low, row.numbers.high, row.numbers.mean) == (0.0, 1.0, 0.5)
    assert (row.numbers.zeros, row.numbers.deviation) == (2, 0.5)
    assert row.numbers.exponents == ({0: 2} if dtype[0] in "bfc" and dtype != "bool" else {})


# --- rows -------------------------------------------------------------------------------------


def layered(params, x):
    def layer(x, w):
        with jax.named_scope("block"):
            y = jnp.tanh(x @ w)
            return lax.cond(y.sum() > 0, jnp.sin, lambda y: y * 2.0, y), y.sum()

    x, sums = lax.scan(layer, x, params)
    return (x**2).sum() + sums.sum()


LAYERED = jax.random.normal(jax.random.key(0), (6, 4, 4)), jnp.ones((2, 4))


@pytest.mark.proof
def test_rows_are_by_line_with_forward_and_backward_separate():
    found = rows(jax.grad(layered), *LAYERED)
    lines = {(row.code.partition(" ")[0], row.backward) for row in found}
    assert {("y", False), ("y", True), ("return", False), ("return", True)} <= lines
    assert all(row.source.startswith("tests/commands/watch/test_watch.py:") for row in found)
    (tanh,) = (row for row in found if "tanh" in row.primitives and not row.backward)
    (product,) = (row for row in found if "dot_general" in row.primitives and not row.backward)
    assert tanh.primitives == ("tanh",) and not tanh.intermediate
    assert tanh.source == product.source and product.intermediate
    assert tanh.numbers.size == tanh.times * 8 and tanh.times == 6
    assert tanh.numbers.high <= 1 < product.numbers.high


def recurrent(x):
    for _ in range(3):
        x = jnp.tanh(x * 2.0)
    return x


def calling(x):
    layer = jax.jit(lambda x: jnp.tanh(x * 2.0))
    return layer(layer(layer(x)))


def reshaped(x):
    return jnp.tanh(x * 2.0).reshape(-1, 1)


def looping(x):
    return lax.scan(lambda x, _: (jnp.tanh(x * 2.0), None), x, length=3)[0]


def test_a_value_that_a_library_reads_on_another_line_is_no_intermediate():
    def function(x):
        both, later = jnp.sin(x), lambda x: jax.nn.silu(x)
        y = jax.nn.silu(both)
        return y + later(both)

    (sin,) = (row for row in rows(function, X) if "sin" in row.primitives)
    assert not sin.intermediate


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("function", [recurrent, calling, reshaped, looping])
def test_a_line_that_runs_again_reads_values_and_no_intermediates(function, gradient):
    def loss(x):
        return function(x).sum()

    found = rows(jax.value_and_grad(loss) if gradient else loss, X)
    forward = [row for row in found if {"tanh", "mul"} & {*row.primitives} and not row.backward]
    value, inside = forward[:2]
    assert (value.primitives, value.intermediate) == (("tanh",), False)
    assert inside.intermediate and "mul" in inside.primitives
    assert value.times == (1 if function is reshaped else 3)


def test_a_constant_is_not_in_the_row_of_its_line():
    value, inside = rows(lambda x: jnp.var(jnp.sin(x)), X)
    assert "sin" in inside.primitives and value.numbers.nans == inside.numbers.nans == 0


def test_values_from_a_callback_without_operands_are_in_the_row_of_their_line():
    def f(x):
        read = jax.pure_callback(lambda: np.float32(np.nan), jax.ShapeDtypeStruct((), "float32"))
        return x + read

    assert sum(row.numbers.nans for row in rows(f, X)) == 1 + X.size


def test_lines_of_a_library_follow_the_users_line_that_calls_them():
    library = {}
    code = "import jax.numpy as jnp\ndef one(x):\n    return jnp.sin(x)\n"
    code += "def two(x):\n    y = jnp.cos(x)\n    return y * 2.0\n"
    exec(compile(code, "/venv/lib/python3/site-packages/tinylib/waves.py", "exec"), library)

    def function(x):
        x = library["one"](x)
        return library["two"](x)

    once, twice, inside = rows(function, X)
    assert once.source.endswith(" ← tinylib/waves.py:3") and once.name == once.source
    assert "←" not in twice.source and twice.primitives == ("mul",)
    assert inside.name == twice.name and inside.primitives == ("cos",) and inside.intermediate


@pytest.mark.proof
def test_rows_are_by_scope():
    names = [row.name for row in rows(layered, *LAYERED, by="scope")]
    assert any("block" in name for name in names)
    assert not any(row.source for row in rows(layered, *LAYERED, by="scope"))


@pytest.mark.proof
def test_a_row_by_equation_has_the_users_name_and_the_path_of_the_equation():
    found = {row.name: row for row in rows(layered, *LAYERED, by="equation")}
    assert found["y"].primitives == ("tanh",) and found["y"].types == ("f32[2,4]",)
    assert [each.split()[0] for each in found["sin"].path] == ["scan", "cond", "jit"][
        : len(found["sin"].path)
    ]
    assert found["sin"].times < 6
    assert "gt" in found and found["gt"].numbers.lost == {}


@pytest.mark.proof
def test_only_some_primitives_are_watched_and_calls_and_loops_on_request():
    assert {row.primitives for row in rows(layered, *LAYERED, only=["dot*"])} == {("dot_general",)}
    (scan, sums) = rows(layered, *LAYERED, only=["scan"], by="equation")
    assert (scan.types, sums.types) == (("f32[2,4]",), ("f32[6]",))
    assert rows(layered, *LAYERED, only=["conv*"]) == ()
    (moved,) = rows(lambda x: x.reshape(2, 2), X, only=["reshape"])
    assert moved.numbers.high == 3.0
    assert rows(lambda x: x.reshape(2, 2), X) == ()


def test_a_function_that_is_called_twice_has_rows_for_each_call():
    norm = jax.jit(lambda x: x / jnp.sum(x))
    found = watched(lambda x: norm(norm(x + 1.0) * 5.0), X, by="equation", values=True)
    named = {row.name: row.numbers.high for row in found.rows}
    assert named["reduce_sum"] == 10.0 and named["reduce_sum #2"] == pytest.approx(5.0)
    assert found.values["reduce_sum #2"].shape == ()


# --- --- iterations -------------------------------------------------------------------------------


def looped(x, n):
    def body(state):
        i, x = state
        return i + 1, x * 2.0

    return lax.while_loop(lambda state: state[0] < n, body, (0, x))[1]


MODES = "together", "loop by loop", "by step"


def set_mode(monkeypatch, mode):
    """Compile the whole program, only its loops, or none of it."""
    monkeypatch.setattr(watch_package, "ITERATION_BYTES", 1 << 25 if mode == "together" else -1)
    if mode == "by step":
        monkeypatch.setattr(watch_package, "is_stepped", lambda eqn: True)


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    set_mode(monkeypatch, request.param)


@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_of_a_scan_have_their_own_rows(mode, reverse):
    def function(xs):
        return lax.scan(lambda c, x: (c + x, x * 2.0), 0.0, xs, reverse=reverse)

    found = rows(function, jnp.arange(10.0), only=["mul"], rounds=[0, slice(2, 8, 3), -1])
    assert [(row.iteration, row.numbers.mean) for row in found] == [
        *(((0,), 0.0), ((2,), 4.0), ((5,), 10.0), ((9,), 18.0)),
    ]
    (all_,) = rows(function, jnp.arange(10.0), only=["mul"])
    assert (all_.times, all_.iteration, all_.numbers.mean) == (10, (), 9.0)


@pytest.mark.parametrize("n", [5, 5000])
def test_iterations_of_a_while_loop_can_be_counted_from_the_end(n):
    found = rows(looped, 1e-30, n, only=["mul"], rounds=[1, -1], by="equation")
    assert [row.iteration for row in found] == [(1,), (n - 1,)]
    assert found[0].numbers.mean == pytest.approx(4e-30)


def test_a_loop_with_a_batched_predicate_is_watched(mode):
    count = jax.vmap(lambda n: lax.while_loop(lambda n: n < 7, lambda n: n + 1, n))
    (row,) = rows(count, X, by="equation", only=["add"], rounds=[-1])
    assert row.iteration == (6,)
    assert (row.numbers.low, row.numbers.high) == (7.0, 8.0)  # a finished batch element continues


@pytest.mark.proof
def test_iterations_of_loops_in_while_loops_are_counted_from_the_end():
    def function(x):
        def body(state):
            i, x = state
            x = lax.cond(
                x > 4.0, lambda x: x, lambda x: lax.fori_loop(0, i, lambda _, x: x * 2.0, x), x
            )
            return i + 1, x

        return lax.while_loop(lambda state: state[0] < 4, body, (1, x))

    found = rows(function, 1.0, only=["mul"], rounds=[-2, -1], by="equation")
    assert [(row.iteration, row.numbers.mean) for row in found] == [((1, 0), 4.0), ((1, 1), 8.0)]


def test_iterations_of_a_loop_with_effects_cannot_be_counted_from_the_end():
    def function(x):
        def body(i, x):
            jax.debug.print("{}", x, ordered=True)
            return x + 1.0

        return lax.fori_loop(0, x.astype(int), body, x)

    found = rows(function, jnp.array(3.0), only=["add"], rounds=[2], by="equation")
    assert [row.numbers.mean for row in found if row.types == ("f32[]",)] == [6.0]
    with pytest.raises(
        UnsupportedError, match=r"iterations of while.* cannot be counted from the last one"
    ):
        rows(function, jnp.array(3.0), rounds=[-1])


def test_nested_loops_have_an_iteration_of_each(mode):
    def function(x):
        def outer(c, a):
            inner = lax.scan(lambda d, b: (d + b, d * b), c, jnp.arange(3.0))[1]
            return looped(c, 2) + a, inner

        return lax.scan(outer, x, jnp.arange(4.0))

    found = watched(function, 1.0, only=["mul"], by="equation", rounds=[0, -1], values=True)
    named = {row.name: [] for row in found.rows}
    for row in found.rows:
        named[row.name].append(row.iteration)
    assert [*named.values()] == [
        [(0, 0), (0, 2), (3, 0), (3, 2)],
        [(0, 0), (0, 1), (3, 0), (3, 1)],
    ]
    _, inner = function(1.0)
    np.testing.assert_allclose(
        found.values["mul"], inner[jnp.array([0, 0, 3, 3]), jnp.array([0, 2, 0, 2])]
    )


@pytest.mark.proof
def test_compiled_iterations_run_in_groups(monkeypatch):
    set_mode(monkeypatch, "loop by loop")
    monkeypatch.setattr(watch_values, "ITERATION_BYTES", 4 * 4 * 7)

    def function(xs):
        def body(c, x):
            return jnp.sin(c) + x, c * x

        return lax.scan(body, 0.5, xs, reverse=True), looped(xs[1], 23)

    xs = jnp.linspace(0.0, 1.0, 30)
    found = watched(function, xs, by="equation", values=True)
    (_, made), _ = function(xs)
    np.testing.assert_allclose(np.sort(found.values["mul"]), np.sort(made), rtol=1e-6)
    assert found.values["mul_1"].shape == (23,)


@pytest.mark.proof
@pytest.mark.parametrize("function", [layered, jax.grad(layered)], ids=["forward", "gradient"])
def test_groups_of_iterations_have_the_same_values_as_single_ones(monkeypatch, function):
    found = []
    for mode in MODES:
        with monkeypatch.context() as patch:
            set_mode(patch, mode)
            found.append(watched(function, *LAYERED, by="equation", values=True))
    *compiled, stepped = found
    for each in compiled:
        assert each.values.keys() == stepped.values.keys()
        for name, value in each.values.items():
            np.testing.assert_allclose(value, stepped.values[name], 1e-5, 1e-6)
        for a, b in zip(each.rows, stepped.rows, strict=True):
            assert (a.name, a.times, a.path) == (b.name, b.times, b.path)
            assert a.numbers.size == b.numbers.size


def emptied(x, n):
    """Loop over empty arrays, and loops without iterations."""

    def layer(carry, row):
        gone, x = carry
        gone = jnp.sin(gone) * row.sum()
        gone = lax.cond(x.sum() > 0, jnp.cos, lambda y: y, gone)
        return (gone, x + 1.0), (jnp.tanh(gone), row.sum())

    none = jnp.zeros((0, 3))
    (gone, x), (rows, sums) = lax.scan(layer, (none, x), jnp.ones((4, 2)))
    (gone, x), _ = lax.scan(layer, (gone, x), jnp.ones((0, 2)))
    gone, x = lax.fori_loop(0, n, lambda _, c: (jnp.exp(c[0]), jnp.sqrt(c[1])), (gone, x))
    lax.scan(lambda c, _: (c, None), (), None, length=3)
    return x.sum() + rows.sum() + sums.sum() + jnp.log(gone).sum()


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("by", first_and_proofs(["line", "scope", "equation"]))
def test_empty_arrays_and_loops_without_iterations_are_watched(mode, by, n):
    for rounds in (None, [0, -1]):
        found = watched(emptied, X, n, by=by, rounds=rounds, values=True)
        sizes = {row.name: row.numbers.size for row in found.rows}
        if by == "equation":
            assert sizes["tanh"] == sizes["sin"] == 0 and sizes["reduce_sum"] > 0
            assert ("sqrt" in sizes) == (n > 0)
        assert found.values["tanh"].shape == (4 if rounds is None else 2, 0, 3)


# --- --- values, breakpoints, devices -------------------------------------------------------------


@pytest.mark.proof
def test_values_are_saved_by_name_with_an_axis_for_the_iterations():
    found = watched(layered, *LAYERED, values=True)
    carry, expected = LAYERED[1], []
    for w in LAYERED[0]:
        y = jnp.tanh(carry @ w)
        expected.append(y)
        carry = jnp.sin(y) if y.sum() > 0 else y * 2.0
    np.testing.assert_allclose(found.values["y"], expected, rtol=1e-5)
    assert found.values["add"].shape == ()
    assert len(found.values["sin"]) + len(found.values["mul"]) == 6


def test_a_program_stops_after_a_line_with_its_values():
    program = jaxprtool.trace(layered, *LAYERED)
    line = layered.__code__.co_firstlineno + 3
    ids = point(program, f"line:tests/commands/watch/test_watch.py:{line}").start.equations.values()
    stopped = []
    watch(
        program,
        LAYERED,
        stops=[each for of_body in ids for each in of_body],
        stop=stopped.append,
        rounds=[0, -1],
    )
    assert [each.iteration for each in stopped] == [(0,), (5,)]
    first = stopped[0].values
    np.testing.assert_allclose(first["y"], jnp.tanh(LAYERED[1] @ LAYERED[0][0]), rtol=1e-6)
    assert {"x", "w", "y", "dot_general"} <= first.keys()
    assert stopped[0].source == f"tests/commands/watch/test_watch.py:{line}"


def test_the_values_of_all_shards_are_watched():
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])

    def body(x):
        y = lax.psum(jnp.sin(x), "d")
        z = lax.scan(lambda c, _: (c * 2.0, c), x, None, length=3)[0]
        return lax.while_loop(lambda s: s.sum() < 0, lambda s: s + 1.0, z) + y

    spec = jax.sharding.PartitionSpec("d")
    function = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    found = watched(function, X, by="equation")
    named = {row.name: row for row in found.rows}
    assert named["sin"].numbers.high == pytest.approx(float(jnp.sin(X).max()))
    assert named["mul"].times == 3
    assert named["mul"].path[0].startswith("shard_map")
    assert [each.split()[0] for each in found.left_out] == ["while"]


@pytest.mark.proof
def test_values_in_refs_and_keys_are_skipped():
    def function(x):
        ref = jax.new_ref(x)
        ref[0] = 5.0
        return ref[...] + jax.random.normal(jax.random.key(0), (4,))

    found = rows(function, X, by="equation")
    assert found[-1].primitives == ("add",)


def test_refs_among_the_arguments_are_unchanged():
    def function(r, x):
        r[...] *= x
        return r[...] + 1.0

    ref = jax.new_ref(X)
    found = rows(function, ref, X)
    assert [row.numbers.high for row in found if not row.intermediate] == [9.0, 10.0]
    np.testing.assert_array_equal(ref[...], X)


def test_a_single_pattern_or_iteration_needs_no_list():
    def function(x):
        return lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, None, length=3)

    (row,) = rows(function, X, only="si*", rounds=1, by="equation")
    assert (row.name, row.iteration) == ("sin", (1,))
    with pytest.raises(ArgumentsError, match="an iteration must be a number or a slice, not '0'"):
        rows(function, X, rounds="0")


def test_bad_input_is_refused():
    program = jaxprtool.trace(jnp.sin, X)
    with pytest.raises(ArgumentsError, match="by line, scope or equation"):
        watch(program, (X,), by="file")
    with pytest.raises(ArgumentsError):
        watch(program, (X, X))
    with pytest.raises(UnsupportedError, match="free named axes"):
        axis = jaxprtool.trace(lambda x: lax.psum(x, "i"), X, axis_env=[("i", 2)])
        watch(axis, (X,))


def test_jax_config_does_not_affect_it():
    with jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow"):
        (row,) = rows(lambda x: jnp.log(x - 1.0), X, only=["log"])
    assert (row.numbers.nans, row.numbers.infs) == (1, 1)
    assert row.numbers.mean == pytest.approx(np.log(2) / 2)


def test_values_of_many_nested_scans_are_refused_with_the_line():
    def nested(x, levels):
        if levels == 0:
            return jnp.sin(x)
        return lax.scan(lambda c, _: (nested(c, levels - 1), None), x, length=1)[0]

    message = r"the scan at tests/commands/watch/test_watch.py:\d+ is inside 32 scans or more"
    with pytest.raises(UnsupportedError, match=message):
        rows(lambda x: nested(x, 40), 1.0)


@pytest.mark.proof
def test_branches_on_devices_vary_over_the_axes_of_their_values():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("b",))

    def body(x):
        return lax.cond(
            x.sum() > 6,
            lambda y: jnp.sin(y),
            lambda y: lax.cond(y[0] > 1, lambda z: jnp.cos(z), lambda z: jnp.exp(z), y),
            x,
        )

    spec = jax.sharding.PartitionSpec("b")
    on_devices = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    found = {row.primitives: row for row in rows(on_devices, jnp.arange(8.0), by="equation")}
    times = {name: found[name,].times for name in ("exp", "cos", "sin")}
    assert times == {"exp": 1, "cos": 1, "sin": 2}


@pytest.mark.proof
def test_each_of_many_nested_branches_is_traced_once():
    def nested(x, levels):
        if levels == 0:
            return jnp.sin(x)
        return lax.cond(x > 0, lambda y: nested(y, levels - 1), lambda y: y * 2, x)

    found = rows(lambda x: nested(x, 30), 1.0, by="equation")
    (path,) = (row.path for row in found if row.primitives == ("sin",))
    assert [each.split()[0] for each in path].count("cond") == 30


@pytest.mark.parametrize("index", [-3, 0, 1, 7])
def test_the_branch_of_an_invalid_index_is_the_last_as_in_xla(index):
    (eqn,) = jax.make_jaxpr(lambda i, x: lax.cond(i, lax.sin, lax.neg, x))(True, 1.0).eqns[-1:]

    def branch(i, x):
        return eqn.primitive.bind(i, x, **eqn.params)[0]

    found = rows(branch, jnp.int32(index), 1.0, by="equation")
    taken = "neg" if index == 0 else "sin"
    assert [row.primitives for row in found if row.times] == [(taken,)]
