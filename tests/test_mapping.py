"""`jaxprtool.vmap` beside `jax.vmap`: values, types, errors, effects, transformations around it."""

import contextlib
import inspect
import io
import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.interpreters import batching
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import vmap
from jaxprtool.errors import JaxprToolError

MATRIX = jnp.arange(12.0).reshape(3, 4)
VECTOR = jnp.arange(3.0)
WEIGHTS = jnp.linspace(0.1, 2.0, 20).reshape(4, 5)
OPTIONS = ("in_axes", "out_axes", "axis_name", "axis_size", "spmd_axis_name")


def data(x):
    """A result as what can be compared: type, values, weak type."""
    if not isinstance(x, jax.Array):
        return type(x), x
    bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.typeof(x).str_short(), jax.typeof(x).weak_type, np.asarray(bits)


def assert_alike(fun, *args, around=lambda mapped: mapped, **kwargs):
    """Both vmaps of `fun` give the same, of the same types."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    expected, got = (around(v(fun, **options))(*args, **kwargs) for v in (jax.vmap, vmap))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        *kind, value = data(ours)
        *their_kind, their_value = data(theirs)
        assert kind == their_kind
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, their_value, rtol=2e-5, atol=1e-5)
        else:
            assert value == their_value


def raised(action):
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def assert_both_raise(action):
    """`action(vmap)` raises the same kind of error under both, and says the same."""
    theirs, ours = raised(partial(action, jax.vmap)), raised(partial(action, vmap))
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, JaxprToolError | type(theirs)) and "\n" not in getattr(
        ours, "message", ""
    )
    return tuple(" ".join(str(error).split()).rstrip(".") for error in (theirs, ours))


# --- the contract on pytrees --------------------------------------------------------------------

TREES = {
    "one argument": (lambda x: jnp.sin(x) * 2, (MATRIX,), {}),
    "another axis": (lambda x: x[::-1], (MATRIX,), {"in_axes": 1, "out_axes": 1}),
    "negative axes": (lambda x: x, (MATRIX[:2],), {"in_axes": -1, "out_axes": -2}),
    "axes in a list": (lambda x, y: x + y, (MATRIX, MATRIX.T), {"in_axes": [0, 1]}),
    "trees of axes": (
        lambda d, y: {"a": [d["p"], y], "b": d["q"]},
        ({"p": MATRIX, "q": VECTOR}, 2.0),
        {"in_axes": ({"p": 1, "q": None}, None), "out_axes": {"a": [1, None], "b": 0}},
    ),
    "None in the trees": (lambda t, u: (t, u), ((VECTOR, None, {"a": ()}), None), {}),
    "no result": (lambda x: None, (VECTOR,), {}),
    "an unmapped result, broadcast": (
        lambda w, x: (w * 2, 3),
        (2.0, VECTOR),
        {"in_axes": (None, 0)},
    ),
    "an unmapped result, as it is": (
        lambda w, x: (w, w * 2, x),
        (2, VECTOR),
        {"in_axes": (None, 0), "out_axes": (None, None, 0)},
    ),
    "no mapped argument": (lambda x: x, (2.0,), {"in_axes": None, "axis_size": 3}),
    "no argument": (lambda: jnp.ones(2), (), {"axis_size": 4, "out_axes": 1}),
    "no lanes": (lambda x: x.sum(), (MATRIX[:0],), {}),
    "what is no array, unmapped": (lambda s, x: x * len(s), ("ab", VECTOR), {"in_axes": (None, 0)}),
    "numpy": (lambda x: (x, x * np.float64(2)), (np.arange(3),), {}),
    "a result twice": (lambda x: (x, x, x + 1), (MATRIX,), {"out_axes": (0, 1, -1)}),
    "keyword arguments": (lambda x, *, y: x + y, (MATRIX,), {"y": VECTOR}),
    "all in stars": (lambda *a, **k: (a, k), (VECTOR, MATRIX), {"z": VECTOR, "in_axes": 0}),
    "a partial": (partial(lambda n, x, flag: x**n + flag, 3, flag=1), (MATRIX,), {}),
}


@pytest.mark.parametrize("name", TREES)
def test_it_maps_trees_as_jax_does(name):
    fun, args, options = TREES[name]
    assert_alike(fun, *args, **options)


def test_an_unmapped_argument_comes_back_as_the_object_it_is():
    text = object()
    assert vmap(lambda t, x: t, in_axes=(None, 0), out_axes=None)(VECTOR, VECTOR) is VECTOR
    assert vmap(lambda x: x)(array := np.ones(3)) is array
    seen = []
    vmap(lambda t, n, x: seen.append((t, n)) or x, in_axes=(None, None, 0))(text, 3, VECTOR)
    assert seen == [(text, 3)] and type(seen[0][1]) is int


SAME_WORDS = {
    "sizes differ": lambda v: v(lambda x, y, z: x)(MATRIX, jnp.ones(2), VECTOR),
    "sizes differ in trees": lambda v: v(lambda x, *, c: x)({"k": MATRIX}, c=[jnp.ones(2)]),
    "sizes differ in stars": lambda v: v(lambda *xs: xs)(VECTOR, VECTOR, jnp.ones(2)),
    "another size is asked for": lambda v: v(lambda x: x, axis_size=7)(MATRIX),
    "no size": lambda v: v(lambda x: x, in_axes=None)(MATRIX),
    "rank too low": lambda v: v(lambda x: x)(2.0),
    "rank too low for the axis": lambda v: v(lambda x: x, in_axes=-3)(MATRIX),
    "not an axis": lambda v: v(lambda x: x, in_axes=0.5),
    "a bool": lambda v: v(lambda x: x, in_axes=(True,)),
    "a dict": lambda v: v(lambda x: x, in_axes={"a": 0}),
    "not an out axis": lambda v: v(lambda x: x, out_axes=("a", None)),
    "too few entries": lambda v: v(lambda x, y: x, in_axes=(0,))(MATRIX, MATRIX),
    "not JAX's argument": lambda v: v(lambda x: x)("s"),
    "not JAX's result": lambda v: v(lambda x: (x, "s"))(MATRIX),
    "mapped result": lambda v: v(lambda x: (x, [x, 1]), out_axes=(0, [None, None]))(MATRIX),
    "mapped result of a named axis": lambda v: v(lambda x: x, out_axes=None, axis_name="i")(MATRIX),
    "out of bounds": lambda v: v(lambda x: x, out_axes=3)(MATRIX),
    "out of bounds and unmapped": lambda v: v(lambda x: 1.0, out_axes=-2)(MATRIX),
}


@pytest.mark.parametrize("name", SAME_WORDS)
def test_errors_say_what_jax_says(name):
    theirs, ours = assert_both_raise(SAME_WORDS[name])
    assert ours == theirs


SAME_BEGINNING = {
    "no prefix": (
        lambda v: v(lambda x: x, in_axes=((0, 0),))([MATRIX, MATRIX]),
        "vmap in_axes specification must be a tree prefix of the corresponding value; ",
    ),
    "no prefix of the results": (
        lambda v: v(lambda x: {"a": x}, out_axes={"b": 0})(MATRIX),
        "vmap out_axes specification must be a tree prefix of the corresponding value; ",
    ),
    "keyword arguments in in_axes": (
        lambda v: v(lambda x, y: x, in_axes=(0, 0))(MATRIX, y=MATRIX),
        "vmap in_axes must be an int, None, or a tuple of entries corresponding to the positional "
        "arguments passed to the function, but got len(in_axes)=2, len(args)=1",
    ),
    "nothing to map": (
        lambda v: v(lambda *x: 1)((), None),
        "vmap wrapped function must be passed at least one argument containing an array or "
        "axis_size must be specified, got empty ",
    ),
    "no function": (lambda v: v(3), "Expected a callable value, "),
}


@pytest.mark.parametrize("name", SAME_BEGINNING)
def test_errors_begin_as_jaxs(name):
    action, beginning = SAME_BEGINNING[name]
    theirs, ours = assert_both_raise(action)
    assert theirs.startswith(beginning) and ours.startswith(beginning)


def test_generators_and_staticmethods_are_no_functions_to_map():
    def generator(x):
        yield x

    for fun in generator, staticmethod(abs):
        assert_both_raise(lambda v, fun=fun: v(fun))


# --- what is unmapped stays what it is ----------------------------------------------------------


def by_sign(w, x):
    return x * w if w > 0 else x


def by_a_derived_value(w, x):
    scale = jax.nn.relu(jnp.tanh(w) * jax.jit(jnp.sum)(jnp.ones(3)))
    return x * scale if scale > 0.5 else -x


def by_an_inner_derivative(w, x):
    return x if jax.grad(jnp.sin)(w) > 0 else -x


@jax.custom_jvp
def triple_jvp(x, y):
    return x * y


@jax.custom_vjp
def triple_vjp(x, y):
    return x * y


triple_jvp.defjvp(lambda p, t: (triple_jvp(*p), t[0] * 3 + t[1] * 5))
triple_vjp.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * 3, g * r[0] * 7))


@pytest.mark.parametrize("fun", [by_sign, by_a_derived_value, by_an_inner_derivative])
@pytest.mark.parametrize("w", [2.0, -2.0, np.float32(0.1)])
def test_python_control_flow_on_unmapped_values(fun, w):
    assert_alike(fun, w, VECTOR, in_axes=(None, 0))


@pytest.mark.parametrize("fun", [by_sign, by_a_derived_value])
def test_python_control_flow_on_unmapped_values_that_are_differentiated(fun):
    def around(mapped):
        return jax.value_and_grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1))

    assert_alike(fun, 0.7, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(fun, -2.0, VECTOR, in_axes=(None, 0), around=lambda m: partial(jvp_of, m))


def jvp_of(fun, *args):
    return jax.jvp(fun, args, args)


@pytest.mark.parametrize("rule", [triple_jvp, triple_vjp])
def test_custom_derivatives_of_unmapped_values(rule):
    def fun(w, x):
        return x * rule(w, w) if rule(w, 3.0) > 1 else x

    def around(mapped):
        return jax.value_and_grad(lambda *args: mapped(*args).sum(), argnums=(0, 1))

    assert_alike(fun, 2.0, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(lambda w, x: rule(x, w), 2.0, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(jax.grad(rule), VECTOR, 2.0, in_axes=(0, None))


def test_custom_derivatives_may_close_over_mapped_values():
    def fun(x):
        @jax.custom_jvp
        def scaled(y):
            return x * y

        scaled.defjvp(lambda p, t: (scaled(*p), t[0] * 10))
        return scaled(2.0) + scaled(jnp.float32(2.0)) + scaled(x), jax.grad(scaled)(2.0)

    assert_alike(fun, VECTOR)


def scaled_by_a_count(w, x):
    count, total = lax.scan(lambda c, _: ((c[0] + w, c[1] * x), None), (w, x), length=3)[0]
    return total if count * 2 > 3 else -total


def chosen_by_a_jits_result(w, x):
    total, scale = jax.jit(lambda w, x: (x + w, jnp.sin(w) + 1))(w, x)
    offset = float(scale * 2) + np.asarray(scale) + complex(scale).real
    return total * offset if scale > 1 else -total


@pytest.mark.parametrize("fun", [scaled_by_a_count, chosen_by_a_jits_result])
@pytest.mark.parametrize("w", [0.7, -0.7])
def test_python_may_look_at_unmapped_results_of_what_has_mapped_operands(fun, w):
    assert_alike(fun, w, VECTOR, in_axes=(None, 0))


def test_it_may_look_at_them_after_an_effect_which_happens_once():
    def fun(x):
        jax.debug.print("{x}", x=x)
        count, total = lax.cond(True, lambda y: (2, y), lambda y: (3, -y), x)
        return total if count == 2 else x

    assert printed(vmap(fun)) == printed(jax.vmap(fun)) == "0.0\n1.0\n2.0\n"


def test_under_a_jit_there_is_nothing_to_look_at():
    mapped = [jax.jit(v(chosen_by_a_jits_result, in_axes=(None, 0))) for v in (jax.vmap, vmap)]
    for fun in mapped:
        with pytest.raises(jax.errors.ConcretizationTypeError):
            fun(2.0, VECTOR)


def test_python_control_flow_on_mapped_values_is_jaxs_error():
    theirs, ours = assert_both_raise(lambda v: v(by_sign)(VECTOR, VECTOR))
    assert "traced array with shape bool[]" in ours and "traced array with shape bool[]" in theirs


def test_constants_and_static_arguments():
    def fun(x):
        with jax.ensure_compile_time_eval():
            count = int(jnp.arange(3).sum())
        scale = float(jnp.sqrt(jnp.float32(2)))
        return jax.jit(lambda y, n: y * n, static_argnums=1)(x, count) * scale

    assert_alike(fun, MATRIX)


# --- what is inside -----------------------------------------------------------------------------


@jax.custom_batching.custom_vmap
def own_rule(x, y):
    return x + y


@own_rule.def_vmap
def _(size, batched, x, y):
    return x * y, True


INSIDE = {
    "jit": jax.jit(lambda x: (x @ WEIGHTS, 2)),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 30, lambda c: c + 1, x),
    "cond": lambda x: lax.cond(x.sum() > 10, jnp.sin, jnp.cos, x),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "grad": jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()),
    "jacobian": jax.jacfwd(lambda x: x * x.sum()),
    "jax.vmap": lambda x: jax.vmap(lambda y: y + x.sum())(x),
    "vmap": lambda x: vmap(lambda y: y + x.sum())(x),
    "custom_vmap": lambda x: own_rule(x, x) + own_rule(2.0, 3.0),
    "keys": lambda x: jax.random.fold_in(jax.random.key(1), x.sum().astype(int)),
    "indexing": lambda x: x.at[x.astype(int) % 4].add(1.0)[1],
    "weak types": lambda x: (x.astype(int) * 2.0, x.sum() * 1j, lax.full_like(x, 3)),
    "narrow types": lambda x: x.astype(jnp.bfloat16) * 2,
    "a pure callback": lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct((4,), "float32"), x, vmap_method="sequential"
    ),
    "an inner linearization": lambda x: jax.linearize(jnp.sin, x)[1](x),
    "fresh refs": lambda x: filled(x),
}


def filled(x):
    ref = jax.new_ref(x)
    ref[...] += 2
    return ref[...]


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_mapped_function_may_hold(name):
    assert_alike(INSIDE[name], MATRIX)


def test_random_keys_and_wide_types():
    keys = jax.random.split(jax.random.key(0), 3)
    assert_alike(lambda k, x: (jax.random.split(k), jax.random.normal(k, x.shape)), keys, MATRIX)
    with jax.enable_x64(True):
        assert_alike(lambda x, y: (x * 2.0, y * 2.0), np.ones(3), np.ones(3, np.float32))


def test_refs_from_outside_are_read():
    ref = jax.new_ref(jnp.arange(4.0))
    assert_alike(lambda x: x + ref[1] if ref[1] > 0 else x, VECTOR)
    assert_both_raise(lambda v: v(lambda x: ref.__setitem__(1, 2.0) or x)(VECTOR))


def test_without_jit_inner_jits_are_run_as_python():
    with jax.disable_jit():
        assert_alike(
            lambda x: jax.jit(jnp.sin)(x) + lax.fori_loop(0, 2, lambda i, c: c + i, x), MATRIX
        )


# --- what is around -----------------------------------------------------------------------------


def model(w, x):
    return jax.nn.relu(jnp.tanh(x @ w) - 0.5) * 2


AROUND = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda *a: f(*a).sum())),
    "jvp": lambda f: partial(jvp_of, f),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "checkpoint": lambda f: jax.grad(lambda *a: jax.checkpoint(f)(*a).sum()),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (c + f(w, x).sum(), c), 0.0, length=2),
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "vmap": lambda f: vmap(f, in_axes=(None, 1), out_axes=1),
    "vmap of grad": lambda f: vmap(jax.grad(lambda *a: f(*a).sum()), in_axes=(None, 0)),
}


@pytest.mark.parametrize("name", AROUND)
def test_transformations_around_it(name):
    x = jnp.stack([MATRIX, MATRIX - 5]) if "vmap" in name else MATRIX
    in_axes = (None, 0)
    assert_alike(model, WEIGHTS, x, in_axes=in_axes, around=AROUND[name])


def test_a_nest_of_both_kinds_with_the_axes_of_each():
    def fun(x):
        return lax.psum(x, ("i", "j")) + lax.axis_index("i") * 10 + lax.axis_index("j")

    for outer in jax.vmap, vmap:
        assert_alike(
            fun, MATRIX, axis_name="i", around=lambda f, o=outer: o(f, in_axes=1, axis_name="j")
        )


def test_shapes_may_be_symbolic():
    n, m = jax.export.symbolic_shape("n, m")

    def fun(x):
        return jnp.sin(x), jnp.arange(3.0), x.shape[0] * 1, lax.axis_index("i"), x.sum()

    def exported(v):
        mapped = v(fun, axis_name="i", axis_size=n)
        return jax.export.export(jax.jit(mapped))(jax.ShapeDtypeStruct((n, m), "float32"))

    ours, theirs = exported(vmap), exported(jax.vmap)
    assert ours.out_avals == theirs.out_avals
    for a, b in zip(ours.call(MATRIX), theirs.call(MATRIX), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# --- named axes ---------------------------------------------------------------------------------


def test_collectives_over_the_mapped_axis_of_mapped_and_unmapped_values():
    def fun(w, x):
        index = lax.axis_index("i")
        shifted = lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])
        return index, lax.psum(x, "i"), lax.psum(w, "i"), lax.pmean(x, "i"), shifted

    assert_alike(fun, 2.0, MATRIX, in_axes=(None, 0), axis_name="i")
    assert_alike(lambda x: lax.pmax(x, "i"), MATRIX, axis_name="i", out_axes=None)
    assert_alike(lambda x: lax.all_gather(x, "i"), MATRIX, axis_name="i", around=jax.jit)


def test_what_collectives_make_of_unmapped_values_python_may_look_at():
    def fun(w, x):
        turned = lax.ppermute(w, "i", [(0, 1), (1, 2), (2, 0)])
        return x if lax.psum(w, "i") > 5 else jax.jit(lambda y: lax.pmax(y, "i"))(turned) * x

    for w in 1.0, 2.0:
        assert_alike(fun, w, VECTOR, in_axes=(None, 0), axis_name="i")


def test_custom_derivatives_may_name_the_mapped_axis():
    @jax.custom_jvp
    def total(y):
        return lax.ppermute(y, "i", [(0, 2), (1, 0), (2, 1)]) + lax.axis_index("i")

    total.defjvp(lambda p, t: (total(*p), t[0] * 3))
    around = [lambda f: f, lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1))]
    for transformed in around:
        assert_alike(
            lambda w, x: total(w) * total(x),
            2.0,
            VECTOR,
            in_axes=(None, 0),
            axis_name="i",
            around=transformed,
        )


def test_the_size_of_the_mapped_axis_is_known_inside():
    def fun(x):
        return x * (2 if lax.axis_size("i") == 3 else 1) + jax.jit(lambda: lax.psum(1, "i"))()

    assert_alike(fun, VECTOR, axis_name="i")


def test_an_axis_that_is_not_mapped_is_jaxs_error():
    assert_both_raise(lambda v: v(lambda x: lax.psum(x, "j"), axis_name="i")(VECTOR))


# --- effects ------------------------------------------------------------------------------------


def printed(mapped):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        mapped(VECTOR)
        jax.effects_barrier()
    return out.getvalue()


def test_prints_come_in_the_order_of_jaxs():
    def fun(x):
        jax.debug.print("first {}", 3.0)
        jax.debug.print("mapped {x}", x=x)
        jax.debug.print("then {}", 2.0)
        jax.debug.callback(lambda: print("called"))
        jax.debug.print("last {x}", x=x + 1)
        return x

    text = printed(vmap(fun))
    assert text == printed(jax.vmap(fun)) and len(text.splitlines()) == 9


def test_callbacks_on_unmapped_values_give_values():
    def fun(x):
        value = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), "float32"))
        return x * 2 if value > 2 else x

    assert_alike(fun, VECTOR)


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_on_mapped_values(ordered):
    def fun(x):
        return io_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x, ordered=ordered)

    if ordered:
        assert_both_raise(lambda v: v(fun)(VECTOR))
    else:
        assert_alike(fun, VECTOR)


# --- registered types ---------------------------------------------------------------------------


@dataclass
class Named:
    """An array with names for its dimensions; it is mapped by name."""

    names: tuple
    data: jax.Array


@dataclass(frozen=True)
class ByName:
    name: str
    place: int


def named_lane(cont, index, value, spec):
    names = list(value.names)
    assert names.pop(spec.place) == spec.name
    lane = cont(value.data, spec.place)
    return Named(tuple(names), lane) if names else (lane, index())


def named_from_lane(cont, size, lane, spec):
    values = cont(size, lane.data, spec.place)
    names = list(lane.names)
    names.insert(spec.place, spec.name)
    assert values.ndim == len(names)
    return Named(tuple(names), values)


batching.register_vmappable(Named, ByName, int, named_lane, named_from_lane, None)


def test_registered_types_are_mapped_as_they_say():
    named = Named(("i", "j"), MATRIX)

    def fun(x, y):
        return Named(x.names, jnp.sin(x.data)), Named((), y), Named((), jnp.float32(2)), y + 1

    outs = (ByName("k", 1), ByName("u", 0), ByName("v", 0), 0)
    results = [
        v(fun, in_axes=(ByName("i", 0), 0), out_axes=outs)(named, VECTOR) for v in (jax.vmap, vmap)
    ]
    for theirs, ours in zip(*results, strict=True):
        assert getattr(ours, "names", None) == getattr(theirs, "names", None)
        np.testing.assert_array_equal(
            getattr(ours, "data", ours), np.asarray(getattr(theirs, "data", theirs))
        )
    assert results[1][0].names == ("j", "k")


def test_registered_types_may_ask_for_the_index_of_their_lane():
    row = Named(("i",), VECTOR)
    assert_alike(lambda pair: pair[0] * 10 + pair[1], row, in_axes=(ByName("i", 0),), axis_size=3)
    assert_both_raise(lambda v: v(lambda x: x, in_axes=(ByName("i", 0),))(VECTOR))
    assert_both_raise(lambda v: v(lambda x: x, out_axes=ByName("i", 0))(VECTOR))


# --- meshes -------------------------------------------------------------------------------------


def mesh(kind):
    return jax.make_mesh((1, 1), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:1])


def test_arrays_on_an_explicit_mesh():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(MATRIX, PartitionSpec("a", "b"))
        spread = jax.device_put(MATRIX, PartitionSpec(None, "b"))
        seen = []
        for v in jax.vmap, vmap:
            v(lambda y: seen.append(jax.typeof(y)) or y)(x)
        assert seen[0] == seen[1]
        assert_alike(lambda y: (y.sum(), y * 2, 3.0), x, out_axes=(0, 1, 0))
        assert_alike(lambda y, w: y @ w, x, jnp.ones(4), in_axes=(0, None))
        for action in (
            lambda v: v(lambda y, z: y)(x, spread),
            lambda v: v(lambda y, z: y, in_axes=(0, None))(x, x),
            lambda v: v(lambda y: y, spmd_axis_name="b")(x),
        ):
            assert_both_raise(action)


def test_lanes_spread_over_a_mesh_axis():
    sharding = jax.sharding.NamedSharding(mesh(AxisType.Auto), PartitionSpec("b"))

    def fun(x):
        return lax.with_sharding_constraint(x * 2, sharding)

    def constraint(v, name):
        jaxpr = jax.make_jaxpr(v(fun, spmd_axis_name=name))(MATRIX)
        return next(e.params["sharding"] for e in jaxpr.eqns if "sharding" in e.params)

    assert constraint(vmap, "a") == constraint(jax.vmap, "a")
    assert constraint(vmap, ("a",)).spec[0] == "a"


def test_shard_map_inside_and_outside():
    grid = mesh(AxisType.Auto)
    part = partial(jax.shard_map, mesh=grid, in_specs=PartitionSpec("b"))

    def inside(x, w):
        whole = part(lambda y: y * 2 + lax.axis_index("b"), out_specs=PartitionSpec("b"))
        return whole(x) + whole(w)

    assert_alike(inside, MATRIX, MATRIX[0], in_axes=(0, None))

    def outside(mapped):
        return part(mapped, out_specs=PartitionSpec("b"))

    assert_alike(
        lambda x: x * lax.axis_index("i") + lax.axis_index("b"),
        MATRIX,
        axis_name="i",
        around=outside,
    )


# --- what surrounds a call ----------------------------------------------------------------------


def test_a_mapped_function_bears_the_name_and_documentation_of_the_function():
    def fun(x: int, *, y=1):
        """Of which there is one."""
        return x

    fun.mark = 5
    ours, theirs = vmap(fun), jax.vmap(fun)
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__annotations__",
        "__wrapped__",
        "mark",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    assert inspect.signature(ours) == inspect.signature(fun)
    assert "Original documentation:\n\nOf which there is one." in ours.__doc__
    assert vmap(partial(fun, y=2)).__name__ == jax.vmap(partial(fun, y=2)).__name__ == "fun"


def test_equations_are_named_as_jaxs_are():
    def fun(x, w):
        with jax.named_scope("inner"):
            return jnp.sin(x), jnp.cos(w)

    def scopes(v):
        def outer(x):
            with jax.named_scope("outer"):
                return v(fun, in_axes=(0, None), out_axes=(0, None))(x, x)

        eqns = jax.make_jaxpr(outer)(VECTOR).eqns
        return {eqn.primitive.name: str(eqn.source_info.name_stack) for eqn in eqns}

    assert scopes(vmap) == scopes(jax.vmap)
    assert scopes(vmap) == {"sin": "outer/vmap(inner)", "cos": "outer/vmap(inner)"}


def test_tracers_do_not_outlive_the_call():
    def escaped(v, use):
        saved = []
        v(lambda x: saved.append(x) or x)(VECTOR)
        use(v, saved[0])

    for use in (lambda v, x: x + 1, lambda v, x: v(lambda y: x + y)(VECTOR)):
        _, ours = assert_both_raise(partial(escaped, use=use))
        assert re.match("Encountered an unexpected tracer", ours)


def test_leaks_are_found_and_none_is_made():
    def leaking(v):
        saved = []
        with jax.checking_leaks():
            v(lambda x: saved.append(x) or x)(VECTOR)

    for v in jax.vmap, vmap:
        with pytest.raises(Exception, match="Leaked trace"):
            leaking(v)
    with jax.checking_leaks():
        vmap(lambda x: jax.nn.relu(x) + lax.cond(x > 1, jnp.sin, lax.neg, x))(VECTOR)
        jax.make_jaxpr(vmap(jax.nn.relu))(VECTOR)


def test_user_code_is_run_once_with_what_it_raises_passed_on():
    calls = []

    def failing(x):
        calls.append(x.shape)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vmap(failing)(MATRIX)
    vmap(lambda x: calls.append(x.shape) or x)(MATRIX)
    assert calls == [(4,), (4,)]
