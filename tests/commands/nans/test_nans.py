"""find_nan names the equations that make NaNs and infinities, and what these reach."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.commands.nans import nans, search
from jaxprtool.commands.nans.nans import find_nan
from jaxprtool.errors import ArgumentsError, StructureError, UnsupportedError, UserFunctionError
from jaxprtool.execute import stepping
from jaxprtool.ir.evaluation import bind
from tests.programs import harness_programs
from tests.share import first_and_proofs, share

X = jnp.arange(4.0)


def found_in(function, *args):
    return find_nan(jaxprtool.trace(function, *args), args).found


def only(function, *args):
    (found,) = found_in(function, *args)
    return found


def line_of(text):
    """Return the location of a line of this file that ends with a comment."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))
    return f"tests/commands/nans/test_nans.py:{number}"


# --- which equation ---------------------------------------------------------------------------


def test_the_equation_that_makes_an_infinity_is_named_with_its_operands_and_position():
    found = only(lambda x: jnp.log(x) + 1.0, X)  # the logarithm
    assert (found.kind, found.primitive, found.reaches) == ("infinity", "log", ("result",))
    assert found.source == line_of("the logarithm")
    assert found.code.startswith("found = only(lambda x: jnp.log(x) + 1.0")
    assert (found.type, found.count, found.size, found.position) == ("f32[4]", 1, 4, (0,))
    (operand,) = found.operands
    assert (operand.argument, operand.low, operand.high, operand.element) == ("x", 0.0, 3.0, 0.0)


def test_nothing_is_found_where_all_is_finite():
    result = find_nan(jaxprtool.trace(jnp.exp, X), (X,))
    assert result.found == () and result.first is None


@pytest.mark.proof
def test_a_mask_of_infinities_is_not_a_fault_but_a_row_of_nothing_else_is():
    def attention(scores, mask):
        return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))

    scores, mask = jnp.ones((2, 3)), jnp.array([[True, False, True], [True, True, False]])
    assert found_in(attention, scores, mask) == ()
    found = only(attention, scores, mask.at[1].set(False))
    assert (found.kind, found.primitive, found.position) == ("NaN", "sub", (1, 0))


def test_a_nan_constant_is_a_fault_if_it_reaches_a_result():
    found = only(lambda x: jnp.where(x > 1.0, x, jnp.nan), X)
    assert found.kind == "NaN" and found.reaches == ("result",)
    assert found_in(lambda x: jnp.where(x < 9.0, x, jnp.nan), X) == ()
    constant = np.array([1.0, np.nan, 3.0, 4.0], np.float32)
    assert only(lambda x: x * constant, X).primitive == "mul"


NAN_AT_1 = jnp.array([1.0, jnp.nan, 3.0, 4.0])


def rows(c, row):
    return c + row, c


HELD_BY = {
    "a literal": (lambda x: (x.mean(), jnp.nan), ["result[1]"]),
    "a constant": (lambda x: (x, NAN_AT_1), ["result[1]"]),
    "in containers": (lambda x: {"a": x, "b": [(NAN_AT_1,)]}, ["result['b'][0][0]"]),
    "twice": (lambda x: (NAN_AT_1, x, NAN_AT_1), ["result[0]", "result[2]"]),
    "complex": (lambda x: (x, np.array([complex(0, np.nan)], np.complex64)), ["result[1]"]),
    "handed through a call": (lambda x: jax.jit(lambda y: (y, jnp.nan))(x), ["result[1]"]),
    "of a branch": (lambda x: lax.cond(x[1] > 0, lambda: NAN_AT_1, lambda: X), ["result"]),
    "rows of a scan": (lambda x: lax.scan(rows, x[1], NAN_AT_1), ["result[0]", "result[1]"]),
    "the start of a loop": (lambda x: lax.scan(lambda c, r: (c, r), NAN_AT_1, x), ["result[0]"]),
    "each round": (lambda x: lax.scan(lambda c, _: (c, jnp.nan), x, length=5000), ["result[1]"]),
    "read in a long loop": (
        lambda x: lax.scan(lambda c, _: (c + NAN_AT_1, None), x, length=5000)[0],
        ["result"],
    ),
}


@pytest.mark.parametrize("case", first_and_proofs(HELD_BY))
def test_a_nan_that_no_equation_makes_is_a_constant_of_the_program(case):
    function, reached = HELD_BY[case]
    found = only(function, X)
    assert (found.kind, found.argument, found.primitive) == ("NaN", "", "")
    assert list(found.reaches) == reached


def test_an_unused_nan_constant_and_an_infinite_constant_are_no_faults():
    def dropped(x):
        return lax.scan(lambda c, r: (c + jnp.where(jnp.isnan(r), 0.0, r), None), x[0], NAN_AT_1)[0]

    assert found_in(dropped, X) == ()
    assert found_in(lambda x: lax.cond(x[1] > 9, lambda: NAN_AT_1, lambda: X), X) == ()
    assert found_in(lambda x: (x, jnp.inf, jnp.array([jnp.inf, 1.0])), X) == ()


def test_an_equation_that_only_moves_a_nan_constant_is_named():
    found = only(lambda x: jnp.concatenate([x, NAN_AT_1]), X)
    assert (found.primitive, found.position) == ("concatenate", (5,))


def test_an_argument_with_a_nan_is_named():
    found = only(lambda p: jnp.sin(p["w"]).sum(), {"w": X.at[2].set(jnp.nan)})
    assert (found.argument, found.primitive, found.position) == ("p['w']", "", (2,))
    assert found.reaches == ("result",)
    assert found_in(lambda x: jnp.exp(-x), X.at[2].set(jnp.inf)) == ()


def test_dropped_values_are_distinguished_from_those_that_reach_a_result():
    def safe(x):
        y = jnp.where(x > 0, jnp.log(x), 0.0)
        return y, jnp.sqrt(x - 1.0)

    reaching, dropped = found_in(safe, X)
    assert reaching.primitive == "sqrt" and reaching.reaches == ("result[1]",)
    assert dropped.primitive == "log" and dropped.reaches == ()
    assert dropped.dropped.startswith("select_n")


def test_a_nan_made_from_an_infinity_is_a_fault_of_its_own():
    def function(x):
        y = jnp.log(x)
        return y - y

    infinity, nan = found_in(function, X)
    assert infinity.kind == "infinity" and nan.kind == "NaN" and nan.primitive == "sub"
    assert len(infinity.leads_to) == 1 and infinity.leads_to[0].startswith("sub")


def test_the_path_goes_back_to_an_argument_by_the_responsible_element():
    def loss(params, x):
        hidden = jnp.maximum(x @ params["w"], 0.0)
        return 1.0 / hidden

    found = only(loss, {"w": jnp.array([[1.0, -1.0]])}, jnp.ones((3, 1)))
    assert found.position == (0, 1)
    assert [each.primitive or each.argument for each in found.way[:2]] == ["max", "dot_general"]
    assert found.way[0].element == 0.0 and found.way[1].element == -1.0
    assert found.way[-1].argument in ("params['w']", "x")


TABLE = np.array([[0.0, -9.0], [2.0, 1.0]], np.float32)


def filled(x):
    """Return a buffer of infinities with one number in it."""
    return jnp.full(4, jnp.inf).at[1].set(x - 3.0)


def in_a_loop(x, rounds):
    """Return a loop with a buffer of infinities and a number that becomes NaN."""

    def body(i, carry):
        y, buffer = carry
        return y - 1.0, buffer.at[i % 4].set(jnp.sqrt(y) + 1.0)

    return lax.fori_loop(0, rounds, body, (x, jnp.full(4, jnp.inf)))[1]


#: The path to a NaN or an infinity: the values, each with its element.
WAYS = {
    "an update": (
        lambda x: jnp.log(filled(x[1])[1]),
        [("convert_element_type", -2.0), ("sub", -2.0), ("x", 1.0)],
    ),
    "a where": (
        lambda x: jnp.sqrt(jnp.where(x > 2, jnp.inf, -x)),
        [("select_n", -1.0), ("neg", -1.0), ("x", 1.0)],
    ),
    "a predicate that is an integer": (
        lambda x: jnp.log(lax.select_n(x.astype(int) - 5, -x, x)),
        [("select_n", -1.0), ("neg", -1.0), ("x", 1.0)],
    ),
    "what a where replaces": (
        lambda x: 1 / jnp.where(x - 3 > 0, x * 2, 0.0),
        [("select_n", 0.0), ("mul", 0.0), ("x", 0.0)],
    ),
    "a maximum of a mask": (
        lambda x: jnp.log(-jnp.where(x < 3, x, -jnp.inf).max()),
        [("neg", -2.0), ("reduce_max", 2.0), ("select_n", 2.0), ("x", 2.0)],
    ),
    "a table": (
        lambda x: jnp.log(jnp.asarray(TABLE)[x.astype(int)[1]] @ -x[1:3]),
        [("dot_general", -4.0), ("neg", -2.0), ("x", 2.0)],
    ),
    "the row of a product": (
        lambda x: jnp.log(jnp.stack([x + 9.0, x - 7.0]) @ jnp.ones(4)),
        [("dot_general", -22.0), ("sub", -7.0), ("x", 0.0)],
    ),
    "a sort": (lambda x: jnp.sqrt(jnp.sort(1 - x)), [("sort", -2.0), ("sub", -2.0), ("x", 3.0)]),
    "rows": (
        lambda x: lax.scan(lambda c, r: (c, jnp.sqrt(r * -1.0)), 0.0, x + 1)[1],
        [("mul", -1.0), ("add", 1.0), ("x", 0.0)],
    ),
    "a stack": (
        lambda x: jnp.sqrt(lax.scan(lambda c, r: (jnp.minimum(c, 1 / r), r - 2), 9.0, x)[1][1:]),
        [("sub", -1.0), ("x", 1.0)],
    ),
    "a difference": (lambda x: jnp.sqrt(x * 0 - x), [("sub", -1.0), ("x", 1.0)]),
    "a loop": (lambda x: in_a_loop(x[3], 9), [*[("sub", -1.0 + i) for i in range(4)], ("x", 3.0)]),
    "a compiled loop": (
        lambda x: in_a_loop(x[3] + 3999, 4100),
        [("scan", -1.0), ("add", None), ("x", None)],
    ),
}


@pytest.mark.parametrize("case", first_and_proofs(WAYS))
def test_the_path_follows_the_element_it_starts_at(case):
    function, expected = WAYS[case]
    way = found_in(function, X)[0].way
    assert [(each.primitive or each.argument, each.element) for each in way] == expected


def test_in_a_backward_pass_the_forward_equation_is_named():
    def loss(x):
        y = x * 1e30  # the forward product
        return y.sum() * 1e30

    found = only(jax.value_and_grad(loss), jnp.zeros(3))
    assert (found.kind, found.primitive, found.reaches) == ("infinity", "mul", ("result[1]",))
    assert found.forward == f"mul at {line_of('the forward product')}"


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: lambda x: lax.scan(f, x, None, 1)])
def test_the_forward_equation_is_named_if_the_backward_part_is_in_a_body(wrap):
    def function(x, _=None):
        y = x * 1e35  # the product inside
        return y * 1e-30, y

    def outer(x):
        return (wrap(function)(x)[0] * 1e35).sum()

    found = only(jax.grad(outer), X * 0)
    assert found.primitive == "mul" and len(found.path) == 1
    assert found.forward == f"mul at {line_of('the product inside')}"


def test_values_recomputed_for_a_backward_part_are_not_derivatives():
    recomputed = jax.checkpoint(lambda x: jnp.sin(x * 1e38 * 1e38) * x)
    found = found_in(jax.grad(lambda x: recomputed(x).sum()), X)
    again = [each for each in found if each.path and each.kind == "infinity"]
    assert again and not any(each.forward for each in again)


# --- where it is ------------------------------------------------------------------------------


def of_rounds(count, start=10.0, reverse=False):
    def function(xs):
        def body(carry, x):
            carry = jnp.sqrt(carry - x)
            return carry**2, carry

        return lax.scan(body, start, xs, reverse=reverse)

    return function, jnp.zeros(count).at[count // 2].set(1e9)


@pytest.fixture
def by_hand(monkeypatch):
    """Return the equations that run one by one, by primitive."""
    names, run = [], stepping.Effects.results

    def counted(self, eqn, operands):
        names.append(eqn.primitive.name)
        return run(self, eqn, operands)

    monkeypatch.setattr(stepping.Effects, "results", counted)
    return names


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [5, 501])
def test_the_iteration_of_a_scan_is_named_whether_it_is_compiled_or_not(count, reverse, by_hand):
    function, xs = of_rounds(count, reverse=reverse)
    found = only(function, xs)
    assert (found.kind, found.primitive, found.iteration) == ("NaN", "sqrt", (count // 2,))
    assert len(found.path) == 1 and found.path[0].startswith("scan")
    assert found.operands[0].low == pytest.approx(-1e9)
    assert set(found.reaches) == {"result[0]", "result[1]"}
    assert by_hand.count("sqrt") == (5 if count == 5 else 1)


@pytest.mark.proof
@pytest.mark.parametrize("count", [5, 5000])
def test_the_iteration_of_a_while_loop_is_named(count):
    def function(x, n):
        def body(state):
            i, x = state
            return i + 1, jnp.where(i == n // 2, jnp.log(x - x), x * 1.0)

        return lax.while_loop(lambda state: state[0] < n, body, (0, x))

    infinity = found_in(function, 2.0, count)[0]
    assert (infinity.kind, infinity.primitive) == ("infinity", "log")
    assert infinity.times >= 1 and infinity.path[0].startswith("while")


@pytest.mark.proof
def test_the_first_faulty_iteration_is_named_late_in_a_while_loop(by_hand):
    def function(x):
        return lax.while_loop(
            lambda state: state[0] < 4000, lambda s: (s[0] + 1, jnp.sqrt(s[1] - 1.0) ** 2), (0, x)
        )

    found = only(function, 1000.5)
    assert found.primitive == "sqrt" and found.iteration[0] in range(995, 1005)
    assert 0 < by_hand.count("sqrt") < 200
    assert found.reaches == ("result[1]",)


@pytest.mark.parametrize("start", [0.0, 2000.0])
def test_a_loop_with_a_batched_predicate_is_searched_too(start):
    def count_down(n):
        return lax.while_loop(lambda n: n > 0, lambda n: n - jnp.exp(jnp.log(n - 3.5) * 0), n)

    found = only(jax.vmap(count_down), jnp.array([2.0, start + 3.0, start + 4.0]))
    assert (found.kind, found.primitive, found.reaches) == ("NaN", "log", ("result",))
    assert (found.iteration, found.position) == ((0,), (0,))


def test_iterations_of_nested_loops_are_named_outermost_first():
    def function(x):
        def inner(j, c):
            i, x = c
            bad = (i == 7) & (j == 3)
            return i, jnp.where(bad, jnp.log(x - 9.0), x)

        def outer(i, x):
            return lax.fori_loop(0, 40, inner, (i, x))[1]

        return lax.fori_loop(0, 40, outer, x)

    found = only(function, 2.0)
    assert found.primitive == "log"
    # It is made in each iteration, and dropped in all previous ones.
    assert found.iteration == (7, 3) and found.times == 7 * 40 + 4
    assert found.reaches == ("result",)


def test_branches_calls_and_custom_rules_are_searched():
    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(x)

    root.defjvp(lambda primals, tangents: (root(*primals), tangents[0]))

    @jax.jit
    def inner(x):
        return lax.cond(x.sum() > 0, lambda x: root(-x), lambda x: x, x)

    found = only(lambda x: inner(x) + 1.0, X)
    assert (found.primitive, found.count) == ("sqrt", 3)
    assert [each.split()[0] for each in found.path][:2] == ["jit", "cond"]


def test_an_equation_that_runs_often_is_reported_once_with_a_count():
    @jax.jit
    def layer(x):
        return jnp.log(x * 0.0)

    found = found_in(lambda x: (layer(x), layer(x + 1.0)), X)
    assert [(f.primitive, f.times) for f in found] == [("log", 2)]


@pytest.mark.parametrize("count", [4, 400])
def test_an_equation_that_makes_an_infinity_and_then_a_nan_is_reported_for_each(count):
    def function(x):
        return lax.scan(lambda x, _: (jnp.log(x), None), x, None, length=count)[0]

    infinity, nan = found_in(function, 1.0)
    assert (infinity.kind, infinity.iteration, infinity.times) == ("infinity", (1,), 1)
    assert (nan.kind, nan.iteration, nan.times) == ("NaN", (2,), 1)
    assert len(infinity.leads_to) == 1 and nan.leads_to == ()


def test_a_loop_of_few_iterations_is_not_compiled(monkeypatch):
    def function(x):
        def body(c, r):
            for _ in range(40):
                c = jnp.sin(c) + 1.0
            return jnp.sqrt(c - r), c

        return lax.scan(body, 1.0, x)[0]

    monkeypatch.setattr(search, "compiled_iterations", None)
    found = only(function, X.at[2].set(9.0))
    assert (found.primitive, found.iteration, found.reaches) == ("sqrt", (2,), ("result",))


@pytest.mark.proof
def test_values_dropped_in_each_iteration_stop_a_compiled_loop_once(by_hand):
    def both(c, x):
        bad = jnp.log(x * c)
        return jnp.where(jnp.isfinite(bad), bad, c), None

    found = found_in(lambda x: lax.scan(lambda c, _: both(c, x), x, None, length=400)[0], X - 1.0)
    assert {f.primitive for f in found} == {"log"} and by_hand.count("log") == len(found)


@pytest.mark.parametrize("count", [8, 400])
def test_values_dropped_in_each_iteration_are_distinguished_from_later_faults(count):
    def function(x):
        def body(c, i):
            dropped = jnp.where(c > 0, jnp.log(-c), 0.0)  # dropped
            return c, dropped + 1 / (i - 6.0)  # kept

        return lax.scan(body, x, jnp.arange(float(count)))

    kept, dropped = found_in(function, -X * 0)
    assert (kept.source, kept.iteration, kept.times) == (line_of("kept"), (6,), 1)
    assert kept.reaches == ("result[1]",) and kept.leads_to == ()
    assert (dropped.source, dropped.iteration) == (line_of("dropped"), (0,))
    assert (dropped.reaches, dropped.times) == ((), count)
    assert dropped.dropped.startswith("select_n at ")


@pytest.mark.parametrize("count", [8, 100])
def test_the_iteration_is_the_one_from_which_the_nan_reaches_a_result(count):
    def function(x):
        def body(c, i):
            bad = jnp.log(-1.0 - i)
            # From iteration 2 on it is carried, and replaced. The result is from the third-to-last
            # iteration.
            kept = jnp.where(i % 2 == 0, 0.0, bad)
            return (jnp.where(i < count - 2, kept, c[0]), c[1] + 1), None

        return lax.scan(body, (x, x), jnp.arange(float(count)))[0]

    found = only(function, 0.0)
    assert (found.reaches, found.times) == (("result[0]",), count)
    assert found.iteration == (count - 3,)


def test_of_several_calls_of_a_function_the_one_that_reaches_a_result_is_reported():
    @jax.jit
    def inverse(x):
        return 1 / x

    found = only(lambda x: jnp.where(x > 0, inverse(x), 0.0) + inverse(x - 2.0), X)
    assert (found.position, found.times, found.reaches) == ((2,), 2, ("result",))


def test_values_in_refs_are_followed():
    def function(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.log(ref[...])
        ref[...] += 1.0
        return ref[...], x

    found = only(function, X)
    assert found.primitive == "log" and found.reaches == ("result[0]",)


def test_a_nan_reaches_the_contents_of_a_ref_argument():
    def function(r, x):
        r[...] += jnp.log(x)
        return x

    ref = jax.new_ref(X)
    (found,) = found_in(function, ref, -X - 1.0)
    assert (found.kind, found.primitive, found.reaches) == ("NaN", "log", ("r[...]",))
    np.testing.assert_array_equal(ref[...], X)
    (found,) = found_in(function, jax.new_ref(X * jnp.nan), X + 1.0)
    assert (found.argument, found.reaches) == ("r", ("r[...]",))


def test_loops_with_effects_and_keys_are_run_too():
    def function(key, x):
        def body(carry, _):
            key, x = carry
            key, one = jax.random.split(key)
            jax.debug.print("{}", x)
            return (key, jnp.log(x) * jax.random.normal(one)), key

        return lax.scan(body, (key, x), None, length=40)

    found = found_in(function, jax.random.key(0), 0.5)
    assert found[0].primitive == "log" and found[0].kind == "NaN"

    def silent(key, x):
        def body(state):
            i, key, x = state
            key, one = jax.random.split(key)
            return i + 1, key, jnp.log(x) * jax.random.normal(one)

        return lax.while_loop(lambda s: s[0] < 3000, body, (0, key, x))[2]

    assert found_in(silent, jax.random.key(0), 0.5)[0].primitive == "log"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "complex64"])
def test_every_kind_of_number_is_searched(dtype):
    found = only(lambda x: x / (x - x), jnp.ones(3, dtype))
    assert found.primitive == "div" and found.count == 3


def test_arrays_with_a_sharding_in_their_type_are_read():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("d")
    found = only(jnp.log, jax.device_put(X, jax.NamedSharding(mesh, spec)))
    assert (found.primitive, found.operands[0].element) == ("log", 0.0)


@pytest.mark.proof
def test_jit_may_state_a_sharding_on_explicit_axes_that_no_type_has():
    spec = jax.sharding.PartitionSpec("d")
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        function = jax.jit(lambda x: jnp.log(x) @ jnp.exp(x), in_shardings=spec)
        assert only(function, np.asarray(X)).primitive == "log"


def test_a_fault_in_a_shard_map_is_found_on_its_device():
    devices = jax.devices()[:1]
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,), devices=devices)
    spec = jax.sharding.PartitionSpec("d")

    def shard(x):
        return lax.psum(jnp.log(x), "d")

    function = jax.shard_map(
        shard, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    found = only(function, X)
    assert found.primitive == "log" and found.devices == (str(devices[0]),)
    assert found.operands[0].low == 0.0 and found.reaches == ("result",)


@pytest.mark.proof
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_collective_passes_on_the_nan_of_another_device(check_vma):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def shard(x):
        dropped = jnp.where(x > 9, jnp.sqrt(x - 9), 0.0)
        return dropped, lax.psum(jnp.log(x), "d"), lax.cumsum(dropped + 1.0)

    outs = spec, jax.sharding.PartitionSpec(), spec
    function = jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=outs, check_vma=check_vma)
    log, sqrt = found_in(function, X)
    assert (log.primitive, log.reaches) == ("log", ("result[1]",))
    assert log.devices == (str(jax.devices()[0]),)
    assert (sqrt.primitive, sqrt.reaches, len(sqrt.devices)) == ("sqrt", (), 2)


# --- --- screening --------------------------------------------------------------------------------


@jax.jit
def _root(x):
    return jnp.sqrt(x)


def _late(x):
    return lax.while_loop(lambda s: s[0] < 50, lambda s: (s[0] + 1, s[1] * 10.0), (0, x))[1]


def _deciding(x):
    return lax.while_loop(lambda s: jnp.log(s - 2.0) < 1.0, lambda s: s + 1.0, x)


#: Functions whose results do not show the NaNs that they make.
HIDING = {
    "nobody reads it": lambda x: (jnp.log(x), x)[1],
    "a where": lambda x: jnp.where(x > 0, jnp.log(x), 0.0),
    "a comparison": lambda x: jnp.log(x) < 0,
    "an integer": lambda x: (x / x).astype(int),
    "a division": lambda x: 1 / (1 / x),
    "an exponential": lambda x: jnp.exp(jnp.log(x) * 2),
    "a maximum": lambda x: jnp.maximum(jnp.log(x), -1.0),
    "a slice": lambda x: jnp.log(x)[1:],
    "a dynamic slice": lambda x: lax.dynamic_slice_in_dim(jnp.log(x) + 1, 2, 2),
    "an update": lambda x: jnp.log(x).at[0].set(1.0),
    "a gather": lambda x: jnp.log(x)[jnp.array([1, 2])],
    "a sum that is compared": lambda x: (jnp.sqrt(x - 1) * 2 + x).sum() > 0,
    "an empty result": lambda x: jnp.log(x)[:, None] + jnp.ones((1, 0)),
    "a call": lambda x: jnp.where(x > 1, _root(x - 1), 0.0),
    "a scan": lambda x: lax.scan(lambda c, r: (jnp.minimum(1 / r, 1.0), c), x[1], x),
    "a carry": lambda x: lax.scan(lambda c, r: (1 / r, jnp.minimum(c, 9.0)), x[1], x),
    "rows": lambda x: lax.scan(lambda c, r: (c, jnp.log(r)), 0.0, x)[1][1:],
    "the end of a loop": lambda x: jnp.minimum(_late(x), 1.0),
    "the predicate of a loop": lambda x: _deciding(x[1]),
    "a branch": lambda x: lax.cond(x[0] > 1, jnp.cos, lambda x: jnp.minimum(1 / x, 2.0), x),
    "an infinity that a mask has": lambda x: jnp.isnan(jnp.where(x > 0, x, -jnp.inf) + jnp.inf),
    "a difference of infinities": lambda x: (jnp.where(x > 0, x, jnp.inf) - jnp.inf) > 0,
    "a product with a constant": lambda x: jnp.isnan(x * jnp.array([jnp.inf, 1, 1, 1])),
    "an overflow": lambda x: jnp.minimum(x * 1e38 * 10, 1.0),
    "a product of exponentials": lambda x: jnp.exp(x * 90) * jnp.exp(x * -90) < 2,
}


@pytest.mark.parametrize("case", HIDING)
def test_screening_misses_no_hidden_nan(case, monkeypatch):
    function = HIDING[case]
    found = found_in(function, X)
    monkeypatch.setattr(nans, "screened", lambda *_: None)
    assert found and found == found_in(function, X)


#: Functions that make no NaN or infinity of their own, from infinities and NaNs in constants or
#: arguments.
CLEAN = {
    "a mask": lambda x: jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)),
    "a gather that fills": lambda x: x.at[jnp.array([1, 2])].get(mode="fill", fill_value=jnp.nan),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x), 0) * 2,
    "a NaN that a where drops": lambda x: lax.scan(
        lambda c, r: (c + jnp.where(r < 9, r, jnp.nan), None), 0.0, x
    )[0],
    "a bound": lambda x: jnp.minimum(x, jnp.array([jnp.inf, 1, 2, 3])) * 2,
    "a buffer": lambda x: lax.fori_loop(
        0, 4, lambda i, b: b.at[i].set(x[i] * 2), jnp.full(9, jnp.inf)
    )[:4],
    "a branch that is not taken": lambda x: lax.cond(x[1] > 9, lambda: NAN_AT_1, lambda: X),
}


@pytest.mark.parametrize("case", CLEAN)
def test_a_program_without_faults_runs_no_equation_on_its_own(case, by_hand):
    assert found_in(CLEAN[case], X) == () and by_hand == []


def test_parts_without_faults_are_compiled_next_to_faulty_ones(by_hand):
    def function(x):
        y = lax.scan(lambda c, r: (jnp.cos(c) + r, c), 0.0, x)[1]
        return jnp.log(y.sum() - 1e9)

    assert only(function, X).primitive == "log"
    assert by_hand.count("scan") == 1 and "cos" not in by_hand


def test_infinite_arguments_are_no_fault_in_screening(by_hand):
    assert found_in(lambda x: jnp.minimum(x, 1.0) + x, X.at[1].set(jnp.inf)) == ()
    assert by_hand == []


def test_a_program_with_many_infinities_is_not_screened_as_a_whole(monkeypatch):
    def function(times, x):
        for _ in range(times):
            x = lax.reduce_precision(jnp.minimum(x, 1e9), 8, 7)
        return x

    # As many as in a gradient by Diffrax, which fills its buffers with infinities, are screened.
    many = jaxprtool.trace(partial(function, 110), X)
    infinity = nans.INF
    jax.eval_shape(lambda x: nans.flags_of(many.jaxpr, [x], [infinity])[0], X)
    infinite = X.at[1].set(jnp.inf)
    program = jaxprtool.trace(partial(function, 8), X)
    monkeypatch.setattr(nans, "_INFINITE", 4)
    assert nans.screened(program.jaxpr, [infinite]) is None
    assert nans.screened(program.jaxpr, [X]) == (False, set())


def test_screening_does_not_keep_large_values_alive():
    def function(x):
        for _ in range(20):
            x = jnp.cos(jnp.log(x + 2))
        return x

    program = jaxprtool.trace(function, jnp.ones(100_000))
    look = jax.jit(lambda x: nans.flags_of(program.jaxpr, [x], [0])[0])
    memory = look.lower(jnp.ones(100_000)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 400_000


# --- --- errors and limits ------------------------------------------------------------------------


def test_arguments_that_do_not_fit_and_free_axes_are_refused():
    with pytest.raises(ArgumentsError, match="takes 1 arrays, not 2"):
        find_nan(jaxprtool.trace(jnp.sin, X), (X, X))
    with pytest.raises(StructureError, match=r"'x' is f32\[3\], but sin takes f32\[4\]"):
        find_nan(jaxprtool.trace(jnp.sin, X), (X[:3],))
    with pytest.raises(StructureError, match="argument 'x' is a type, not an array"):
        find_nan(jaxprtool.trace(jnp.sin, X), (jax.ShapeDtypeStruct((4,), "float32"),))
    with pytest.raises(ArgumentsError, match="sin is not a Program"):
        find_nan(jnp.sin, (X,))
    free = jaxprtool.trace(lambda x: lax.psum(x, "i"), X, axis_env=[("i", 2)])
    with pytest.raises(UnsupportedError, match="free named axes 'i'"):
        find_nan(free, (X,))


def test_symbolic_sizes_are_those_of_the_arguments():
    symbolic = jaxprtool.load("jax.numpy:log", args="f32[n]")
    assert find_nan(symbolic, (X,)).first.type == "f32[4]"


def test_a_path_ends_where_too_many_values_would_be_kept(monkeypatch):
    monkeypatch.setattr(search, "_RETAINED_BYTES", 0)
    found = only(lambda x: jnp.log(jnp.sin(x) * 2.0), X)
    assert [each.primitive for each in found.way] == ["mul"]


def test_jax_config_does_not_affect_the_search():
    with jax.debug_nans(True):
        assert only(lambda x: jnp.where(x > 0, jnp.sqrt(-x), 0.0) + 1.0, X).primitive == "sqrt"


# --- programs that raise --------------------------------------------------------------------------


def refused(value):
    raise ValueError("is not finite\nsays a check")


def checked(x, is_wrong=None):
    """Return `x`, and raise an error at run time if it has a NaN."""
    is_wrong = jnp.isnan(x).any() if is_wrong is None else is_wrong
    type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return lax.cond(is_wrong, lambda: jax.pure_callback(refused, type, 0), lambda: x)


def in_rounds(rounds):
    """Return a function whose NaN, in the round before the last one, leads to an error there."""

    def body(c, i):
        y = jnp.sqrt(rounds - 3.0 - i)  # the root
        return c + checked(y), y

    return lambda x: lax.scan(body, x[1], jnp.arange(float(rounds)))


RAISING = {
    "at the top": (lambda x: checked(jnp.sqrt(x - 1.0)) * 2, "sqrt", ()),
    "of an operand": (
        lambda x: (
            jax.pure_callback(refused, jax.ShapeDtypeStruct((), jnp.int32), jnp.sqrt(x - 1.0)) + 1
        ),
        "sqrt",
        (),
    ),
    "io": (
        lambda x: io_callback(refused, jax.ShapeDtypeStruct((), jnp.int32), jnp.sqrt(x - 1.0)),
        "sqrt",
        (),
    ),
    "after another": (
        lambda x: (jnp.where(x > 0, jnp.log(-x), x), checked(jnp.sqrt(x - 1.0))),
        "sqrt",
        (),
    ),
    "of a loss": (lambda x: jax.grad(lambda x: checked(jnp.sqrt(x - 1.0)).sum())(x), "sqrt", ()),
    "in a loop": (in_rounds(9), "sqrt", (7,)),
    "in a long loop": (in_rounds(3000), "sqrt", (2998,)),
    "after an iteration": (
        lambda x: lax.while_loop(
            lambda c: c[0] < 900.0,
            lambda c: (
                c[0] + 1.0,
                checked(c[1], jnp.isnan(c[1]) & (c[0] > 700.0)) + jnp.log(600.5 - c[0]),
            ),
            (x[0], x[0]),
        ),
        "log",
        (601,),
    ),
}


@pytest.mark.parametrize("case", first_and_proofs(RAISING))
def test_a_nan_that_leads_to_an_error_is_found(case):
    function, primitive, iteration = RAISING[case]
    search = find_nan(jaxprtool.trace(function, X), (X,))
    assert (search.first.primitive, search.first.iteration) == (primitive, iteration)
    assert search.first.raises and search.first.reaches == () and search.first.dropped == ""
    assert search.raised == "ValueError: is not finite"


def test_an_argument_whose_nan_leads_to_an_error_is_named():
    x = X.at[2].set(jnp.nan)
    search = find_nan(jaxprtool.trace(checked, x), (x,))
    assert (search.first.argument, search.first.raises) == ("x", True)


def test_a_nan_before_an_error_that_does_not_depend_on_it_is_said_to_be_dropped():
    def function(x):
        y = jnp.where(x > 0, jnp.log(x), 0.0)
        return y, checked(x, x[0] < 1.0)

    search = find_nan(jaxprtool.trace(function, X), (X,))
    assert not search.first.raises and search.first.dropped.startswith("select_n")
    assert search.raised


def test_a_primitive_may_raise_its_own_error_for_that_of_a_callback():
    """As those of Equinox do, which lineax has."""
    own = Primitive("own_error")
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(checked, multiple_results=False))

    @own.def_impl
    def run(x):
        try:
            return jax.jit(checked)(x)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError("an error of a package") from error

    search = find_nan(jaxprtool.trace(lambda x: own.bind(jnp.sqrt(x - 1.0)), X), (X,))
    assert search.first.primitive == "sqrt" and search.first.raises
    assert search.raised == "ValueError: is not finite"


def test_an_error_without_a_nan_is_raised():
    program = jaxprtool.trace(lambda x: checked(x, x[0] < 1.0), X)
    with pytest.raises(UserFunctionError, match=r"raised ValueError: is not finite$"):
        find_nan(program, (X,))


# --- JAX's own test programs ------------------------------------------------------------------


@pytest.mark.proof
def test_every_nan_in_a_result_is_explained():
    looked_at = 0
    for case in share(harness_programs(40)):
        before = case.program()
        args = jax.tree.leaves(case.args)
        nan_search = find_nan(before, args)
        reached = {name for found in nan_search.found for name in found.reaches}
        leaves = jax.tree.leaves(before(*case.args))
        for name, value in zip(before.out_names, leaves, strict=True):
            if jnp.issubdtype(value.dtype, jnp.inexact) and bool(jnp.isnan(value).any()):
                assert name in reached, case.name
                looked_at += 1
    assert looked_at


HELD = np.array([1.0, np.nan], np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.mean(), jnp.nan),
        lambda x: (x.mean(), jnp.asarray(HELD)),
        lambda x: (x.mean(), {"a": HELD}),
        lambda x: (x.mean(), jax.jit(lambda x: (x, jnp.nan))(x)[1]),
    ],
    ids=["literal", "constant", "in a dict", "in a call"],
)
def test_a_nan_constant_that_is_returned_is_found(function):
    program = jaxprtool.trace(function, jnp.ones(3))
    found = find_nan(program, (jnp.ones(3),))
    (held,) = found.found
    assert (held.kind, held.primitive, held.argument) == ("NaN", "", "")
    assert held.reaches == (program.out_names[1],)


def test_operands_in_a_shard_map_lead_to_the_equations_that_compute_them():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def sharded(x):
        return jax.jit(lambda y: jnp.log(-y))(x) + jnp.sqrt(x - 2)

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def handed(x):
        return jax.jit(jnp.log)(x)

    found = found_in(sharded, jnp.ones(2))
    assert {each.operands[0].primitive for each in found} == {"neg", "sub"}
    assert only(lambda y: handed(-y), jnp.ones(2)).operands[0].primitive == "neg"
    assert only(handed, jnp.zeros(2)).operands[0].argument == "x"


# --- small equations --------------------------------------------------------------------------


def test_a_small_equation_is_computed_without_a_kernel_where_its_operands_are(monkeypatch):
    def function(x):
        return (2 * x[::-1] + 1).reshape(2, 2), x > 1, jnp.ones(2)

    x = jax.device_put(X, jax.devices()[-1])
    program = jaxprtool.trace(function, x)
    expected = program(x)
    monkeypatch.setattr(stepping, "bind", None)
    results = stepping.SteppingInterpreter().run(program.jaxpr, [x])
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype and np.array_equal(result, wanted)
    assert [result.devices() for result in results[:2]] == [x.devices()] * 2


def test_a_large_equation_and_one_of_unprescribed_bits_are_left_to_xla(monkeypatch):
    bound = []
    monkeypatch.setattr(stepping, "bind", lambda eqn, xs: bound.append(eqn) or bind(eqn, xs))
    unprescribed = (
        (lambda x: x + x, jnp.zeros(1 << 17)),
        (lambda x: x + x, jnp.array([1e-40])),
        (lambda x: x / np.float32(2e38), jnp.array([1.0, 2.0])),
        (lambda x: jnp.maximum(x, -0.0), jnp.zeros(2)),
        (jnp.exp, jnp.ones(2)),
        (jnp.sum, jnp.ones(2)),
    )
    for function, x in unprescribed:
        program = jaxprtool.trace(function, x)
        stepping.SteppingInterpreter().run(program.jaxpr, [x])
    assert len(bound) == len(unprescribed)


#: Functions of a matrix `x`, its reverse `y` and integers `i`, each of one equation or two.
NUMPYS = {
    "sums": lambda x, y, i: (x + y, x - y, x * y, -x, abs(x), lax.square(x), lax.integer_pow(x, 2)),
    "sums of cotangents": lambda x, y, i: jax.vjp(lambda z: (z, z * 1), x)[1]((x, y)),
    "quotients": lambda x, y, i: (x / y, x / 3, x / x[0, 0], x[:1, :1] / y[:1, :1], x / 0.0),
    "roots": lambda x, y, i: lax.sqrt(x),
    "extremes": lambda x, y, i: (
        lax.max(x, y), lax.min(x, y), x.max(0), x.min((0, 1)), lax.max(i, i[::-1]), i.max(1),
    ),
    "comparisons": lambda x, y, i: (x < y, x == x, lax.is_finite(x), x != y, x >= 2),
    "types": lambda x, y, i: (x.astype(bool), i.astype("float32"), (x > 1).astype("float32")),
    "slices": lambda x, y, i: (
        lax.dynamic_slice(x, (i[0, 0], -9), (1, 2)), lax.dynamic_slice(i, (1, 9), (1, 2)),
        lax.dynamic_update_slice(x, y[:1, 1:], (i[0, 1], 0)),
    ),
    "loops": lambda x, y, i: lax.scan(lambda c, row: (c + row, (row, 2.0)), x[0], y),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_numpy_computes_what_a_kernel_computes(name, monkeypatch):
    numbers = np.array([[1.5, -3, 7], [np.nan, np.inf, 0.1], [4, -np.inf, 3e38]], np.float32)
    arguments = numbers, numbers[::-1].copy(), np.array([[7, -2], [2**31 - 1, 3]], np.int32)
    program = jaxprtool.trace(NUMPYS[name], *arguments)
    found = []
    for by_numpy in (True, False):
        if not by_numpy:
            monkeypatch.setattr(stepping, "_bind_quickly", bind)
            monkeypatch.setattr(stepping, "_is_numpys", lambda value: False)
        steps = stepping.SteppingInterpreter()
        found.append(steps.run(program.jaxpr, list(map(jnp.asarray, arguments))))
    for ours, theirs in zip(*found, strict=True):
        assert jax.typeof(ours) == jax.typeof(theirs) and np.array_equal(
            ours, theirs, equal_nan=ours.dtype.kind == "f"
        )


def test_numpy_computes_all_of_its_functions(monkeypatch):
    monkeypatch.setattr(stepping, "bind", None)
    numbers = np.array([[1.5, -3, 7], [np.nan, np.inf, 0.1], [4, -np.inf, 3e38]], np.float32)
    arguments = numbers, numbers[::-1].copy(), np.array([[7, -2], [2**31 - 1, 3]], np.int32)
    for function in NUMPYS.values():
        program = jaxprtool.trace(function, *arguments)
        stepping.SteppingInterpreter().run(program.jaxpr, list(map(jnp.asarray, arguments)))
