"""`jit(shapes=…)`: one compiled program for each bucket, at any sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError

PARAMS = {"w": jnp.linspace(-1, 1, 9).reshape(3, 3), "b": jnp.ones(3)}


def encode(params, x: "f32[n,d]", *, scale=1.0):  # noqa: F821, UP037
    h = jnp.tanh(x @ params["w"] + params["b"]) * scale
    return {"rows": h - h.mean(0), "total": (h * h).sum(), "n": x.shape[0]}


def loss(params, x: "f32[n,3]"):  # noqa: F821, UP037
    return encode(params, x)["total"]


def rows(n, d=3):
    return np.random.default_rng(n).standard_normal((n, d), np.float32)


@contextmanager
def compiles_counted() -> Iterator[list[str]]:
    """Record each program that XLA compiles in the block."""
    found: list[str] = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def close(ours, theirs):
    """Compare results with those of the function. Lists stand for arrays."""
    theirs = jax.tree.map(np.asarray, theirs, is_leaf=lambda x: isinstance(x, list))
    assert jax.tree.map(np.shape, ours) == jax.tree.map(np.shape, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.proof
def test_a_program_is_compiled_once_for_each_bucket():
    fun = jaxprtool.jit(encode, shapes={"n": (8, 4)})
    counts = []
    for n in (1, 4, 2, 3, 5, 8, 7, 6, 2):
        x = rows(n) if n % 3 else jnp.asarray(rows(n))
        with compiles_counted() as compiled:
            got = fun(PARAMS, x, scale=2.0)
        counts.append(len(compiled))
        close(got, encode(PARAMS, x, scale=2.0))
        assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(got))
    assert counts == [1, 0, 0, 0, 1, 0, 0, 0, 0]


def test_an_axis_may_be_empty():
    fun = jaxprtool.jit(lambda x: (x.sum(), x * 2), shapes={"n": 4}, types="f32[n]")
    close(fun(rows(0)[:, 0]), (0.0, np.zeros(0)))
    ahead = jaxprtool.jit(lambda x, y: x.sum() + y.sum(), shapes={"n": 4}, types="f32[n+1], f32[n]")
    close(ahead(jnp.ones(1), jnp.ones(0)), 1.0)


def test_other_symbols_have_the_sizes_of_the_arguments():
    fun = jaxprtool.jit(lambda x: x @ jnp.ones(x.shape[1]), shapes={"n": (4,)}, types="f32[n,d]")
    counts = []
    for n, d in ((2, 3), (3, 3), (3, 2), (1, 2)):
        with compiles_counted() as compiled:
            close(fun(rows(n, d)), rows(n, d).sum(1))
        counts.append(len(compiled))
    assert counts[1] == counts[3] == 0 and counts[0] and counts[2]


def test_two_symbols_have_separate_buckets():
    fun = jaxprtool.jit(
        lambda x, y: x[:, None] + y, shapes={"n": (2, 4), "m": (3, 8)}, types="f32[n], f32[m]"
    )
    for n, m in ((1, 2), (4, 1), (3, 8)):
        close(fun(jnp.arange(n * 1.0), jnp.arange(m * 1.0)), np.add.outer(range(n), range(m)))


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "types",
    [
        "batch={'x': f32[n], 'y': (f32[n], f32[n])}",
        {"batch": "f32[n]"},
        {"batch": {"x": "f32[n]", "y": ("f32[n]", "f32[n]")}},
        [None, {"x": jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32), "y": None}],
    ],
)
def test_types_can_be_given_for_some_parameters_and_parts_of_them(types):
    def fun(scale, batch):
        return (batch["x"] * scale["s"]).sum()

    batch = {"x": jnp.arange(3.0), "y": (jnp.ones(3), jnp.ones(3))}
    jitted = jaxprtool.jit(fun, shapes={"n": (4,)}, types=types)
    close(jitted({"s": 2.0}, batch), fun({"s": 2.0}, batch))
    close(jitted(batch=batch, scale={"s": 2.0}), fun({"s": 2.0}, batch))


def test_annotations_are_types_as_text_or_objects():
    def quoted(x: "f32[n]", y: int = 2):  # noqa: F821, UP037
        return x * y

    def bare(x: f32[n], y: dict[str, jax.Array]):  # noqa: F821
        return x * y

    for fun in (quoted, bare):
        close(jaxprtool.jit(fun, shapes={"n": 4})(jnp.ones(3), 3), jnp.full(3, 3.0))


def test_example_arguments_determine_the_variable_axes():
    @jaxprtool.example({"w": "f32[9,9]"}, {"x": "f32[n]", "y": "f32[3]"}, power=jaxprtool.static(2))
    def fun(params, batch, power=1):
        return (params["w"] * batch["x"].sum() + batch["y"]) ** power

    args = {"w": 2.0}, {"x": jnp.arange(3.0), "y": 1.0}
    for wrapped in (fun, jax.value_and_grad(fun, argnums=1)):
        close(jaxprtool.jit(wrapped, shapes={"n": 4})(*args), wrapped(*args))


def test_arrays_of_keys_and_of_small_floats_are_padded_too():
    def fun(keys, x):
        return x.astype("float32") * 2, x.sum(), jnp.ones(keys.shape)

    jitted = jaxprtool.jit(fun, shapes={"n": 4}, types="key<fry>[n], bf16[n]")
    args = jax.random.split(jax.random.key(0), 3), jnp.arange(3, dtype=jnp.bfloat16)
    close(jitted(*args), fun(*args))


# --- features of jax.jit --------------------------------------------------------------------------


@pytest.mark.proof
def test_weakly_typed_arrays_and_their_gradients_stay_weakly_typed():
    def fun(s, x: f32[n]):  # noqa: F821
        return s * 2, x * s, jnp.sin(x), x.sum() * s

    weak = jaxcompat.weakly_typed(np.linspace(0, 1, 5, dtype=np.float32))
    for x in (weak, jax.device_put(weak, jax.devices()[0]), weak[:0], np.ones(5, np.float32)):
        found, wanted = (f(0.5, x) for f in (jaxprtool.jit(fun, shapes={"n": (8,)}), jax.jit(fun)))
        assert list(map(jax.typeof, found)) == list(map(jax.typeof, wanted))

        def total(f, *args):
            return sum(map(jnp.sum, f(*args)))

        for argnum in (0, 1):
            found, wanted = (
                jax.grad(partial(total, f), argnum)(0.5, x)
                for f in (jaxprtool.jit(fun, shapes={"n": (8,)}), jax.jit(fun))
            )
            assert jax.typeof(found) == jax.typeof(wanted)


def test_static_arguments_methods_and_defaults():
    @jaxprtool.jit(shapes={"n": (4,)}, static_argnames="power")
    def scaled(x: "f32[n]", power=1, shift=None):  # noqa: F821, UP037
        return x**power + (0 if shift is None else shift)

    close(scaled(jnp.arange(3.0), 2), [0, 1, 4])
    close(scaled(jnp.arange(3.0), power=3, shift=1.0), [1, 2, 9])
    assert list(inspect.signature(scaled).parameters) == ["x", "power", "shift"]

    class Model:
        @jaxprtool.jit(shapes={"n": (4,)}, static_argnums=0)
        def total(self, x: "f32[n]"):  # noqa: F821, UP037
            return x.sum()

    close(Model().total(jnp.arange(3.0)), 3.0)


@pytest.mark.proof
def test_bucketed_functions_can_be_differentiated_and_mapped():
    fun, x = jaxprtool.jit(loss, shapes={"n": (4, 8)}), jnp.asarray(rows(3))
    for argnum in (0, 1):
        wanted = jax.grad(loss, argnum)(PARAMS, x)
        close(jax.grad(fun, argnum)(PARAMS, x), wanted)
        close(jax.jit(jax.grad(fun, argnum))(PARAMS, x), wanted)
    close(
        jax.vmap(fun, (None, 0))(PARAMS, jnp.stack([x, 2 * x])),
        [loss(PARAMS, x), loss(PARAMS, 2 * x)],
    )
    tangents = jax.tree.map(jnp.ones_like, (PARAMS, x))
    close(jax.jvp(fun, (PARAMS, x), tangents), jax.jvp(loss, (PARAMS, x), tangents))


@pytest.mark.proof
def test_a_training_step_is_compiled_once_for_each_bucket():
    def step(params, x: "f32[n,3]"):  # noqa: F821, UP037
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    inside = jaxprtool.jit(step, shapes={"n": (4, 8)})
    outside = jax.grad(jaxprtool.jit(loss, shapes={"n": (4, 8)}))
    of_gradient = jaxprtool.jit(jax.value_and_grad(loss, 1), shapes={"n": (4, 8)})
    inside(PARAMS, rows(3)), outside(PARAMS, rows(3)), of_gradient(PARAMS, rows(3))
    references = [jax.jit(f) for f in (step, jax.grad(loss), jax.value_and_grad(loss, 1))]
    for n in (1, 2, 4):
        with compiles_counted() as compiled:
            made = inside(PARAMS, rows(n)), outside(PARAMS, rows(n)), of_gradient(PARAMS, rows(n))
        assert not compiled
        for result, reference in zip(made, references, strict=True):
            close(result, reference(PARAMS, rows(n)))


def test_traced_values_may_be_closed_over():
    def outer(scale, x):
        return jaxprtool.jit(lambda x: (x * scale).sum(), shapes={"n": 4}, types="f32[n]")(x)

    close(jax.grad(outer)(2.0, jnp.arange(3.0)), 3.0)
    close(jax.jit(outer)(2.0, jnp.arange(3.0)), 6.0)


def test_results_of_full_buckets_are_unchanged_and_others_stay_on_their_device():
    fun = jaxprtool.jit(lambda x: x * 2, shapes={"n": 4}, types="f32[n]")
    x = jax.device_put(jnp.arange(3.0), jax.devices()[0])
    assert fun(x).committed and not fun(jnp.arange(3.0)).committed
    assert fun(x).devices() == fun(jnp.arange(4.0)).devices() == x.devices()


def test_lower_uses_the_program_of_a_bucket_and_disable_jit_the_function():
    fun = jaxprtool.jit(loss, shapes={"n": (4, 8)})
    lowered = fun.lower(PARAMS, jax.ShapeDtypeStruct((5, 3), jnp.float32)).as_text()
    assert "tensor<8x3xf32>" in lowered and "tensor<5x3xf32>" not in lowered
    with jax.disable_jit():
        close(fun(PARAMS, rows(9)), loss(PARAMS, rows(9)))


def test_wrappers_of_a_function_share_compilations():
    x = rows(3)
    jaxprtool.jit(loss, shapes={"n": (4, 16)})(PARAMS, x)
    with compiles_counted() as compiled:
        jaxprtool.jit(loss, shapes={"n": [16, 4]})(PARAMS, x)
        assert not compiled
        jaxprtool.jit(loss, shapes={"n": (6, 16)})(PARAMS, x)
    assert len(compiled) == 1


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "types", "message"),
    [
        ({"n": (4, 8)}, None, "no parameter of fun has a type with the symbol 'n'"),
        ({"m": 4}, "f32[n]", "no parameter of fun has a type with the symbol 'm'"),
        ({"n": ()}, "f32[n]", r"the buckets of n must be sizes from 1 to 2147483647, not \(\)"),
        (
            {"n": (0, 4)},
            "f32[n]",
            r"the buckets of n must be sizes from 1 to 2147483647, not \(0, 4\)",
        ),
        ({"n": 2.5}, "f32[n]", "the buckets of n must be sizes from 1 to 2147483647, not 2.5"),
        (
            (64, 128),
            "f32[n]",
            r"shapes must be buckets by symbol, {'n': \(64, 128\)}, not \(64, 128\)",
        ),
        ({"n": 4}, "f32[n", "is not closed"),
        ({"n": 4}, {"z": "f32[n]"}, "types has 'z', which is not a parameter"),
        ({"n": 4}, ["f32[n]", 3.0], "3.0 is not a type"),
        (
            {"n": 4},
            "f32[n], i32[], i32[]",
            "types has 3, but the function takes 2 positional arguments",
        ),
        (
            {"n": 2**31},
            "f32[n]",
            "the buckets of n must be sizes from 1 to 2147483647, not 2147483648",
        ),
        ({"n": 4}, 3, "types of arguments must be a string, .* or a sequence, not 3"),
        (None, "f32[n]", "types is only used with shapes"),
    ],
)
def test_invalid_options_are_refused_at_once(shapes, types, message):
    def fun(x, y=0):
        return x

    with pytest.raises(ArgumentsError, match=message):
        jaxprtool.jit(fun, shapes=shapes, types=types)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (np.ones(9, np.float32),),
            "argument 'x' of fun has n=9, but the largest bucket of n is",
        ),
        ((np.ones((2, 2), np.float32),), r"argument 'x' has shape \[2,2\], but fun takes f32\[n\]"),
        ((np.ones(2, np.int32),), r"argument 'x' of fun is i32\[2\], but its type is f32\[n\]"),
        (("text",), r"argument 'x' of fun is not an array, but its type is f32\[n\]"),
        ((np.ones(2, np.float32), {"a": np.ones(3, np.float32)}), "found inconsistency between"),
        (
            (np.ones(2, np.float32), [1]),
            "argument 'y' of fun has a different structure than",
        ),
    ],
)
def test_invalid_arguments_are_a_one_line_error(args, message):
    def fun(x, y=None):
        return x

    types = {"x": "f32[n]", "y": {"a": "f32[n]"}}
    jitted = jaxprtool.jit(fun, shapes={"n": (4, 8)}, types=types)
    with pytest.raises(ArgumentsError, match=message):
        jitted(*args)


def test_shardings_of_arguments_are_refused():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ArgumentsError, match="in_shardings cannot be combined with shapes"):
        jaxprtool.jit(lambda x: x, shapes={"n": 4}, types="f32[n]", in_shardings=sharding)


def test_a_symbol_without_an_argument_is_named():
    jitted = jaxprtool.jit(lambda x, y=None: x, shapes={"n": 4}, types={"y": "f32[n]"})
    with pytest.raises(
        ArgumentsError, match="no argument of the call of lambda has the symbol 'n'"
    ):
        jitted(1.0)


def test_functions_that_cannot_be_masked_are_refused_with_their_line():
    jitted = jaxprtool.jit(lambda x: jax.lax.linalg.qr(x), shapes={"n": 4}, types="f32[n,n]")
    with pytest.raises(UnsupportedError, match=r"at .*test_buckets.py:\d+ cannot be masked"):
        jitted(jnp.eye(3))


def test_passes_that_change_arguments_are_refused():
    jitted = jaxprtool.jit(loss, shapes={"n": 4}, passes="jvp")
    with pytest.raises(PipelineError, match="the passes 'jvp' change the arguments of loss"):
        jitted(PARAMS, rows(2))


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_a_transfer_guard_applies_to_the_users_transfers(level):
    fun = jaxprtool.jit(lambda w, x: (w * x, x.sum()), shapes={"n": (4, 8)}, types={"x": "f32[n]"})
    w, arrays = jnp.float32(2), [jnp.arange(float(n)) for n in (4, 5, 3)]
    for x in arrays:
        fun(w, x)
    with jax.transfer_guard(level):
        for x in arrays:
            rows, total = fun(w, x)
            assert isinstance(rows, jax.Array) and rows.shape == x.shape
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            fun(w, np.ones(3, np.float32))
    assert np.allclose(rows, [0, 2, 4]) and float(total) == 3


@pytest.mark.proof
def test_calls_of_one_type_pad_and_cut_independently():
    """Cached data of a call exclude its values, and calls with other static parts differ."""

    def f(batch, scale, *, twice=False):
        rows = batch["x"] * scale["a"]
        return {"rows": rows + rows if twice else rows, "n": batch["x"].shape[0], "w": batch["w"]}

    types = {"batch": {"x": "f32[n,d]", "w": None}}
    fun = jaxprtool.jit(f, shapes={"n": (4, 8)}, types=types, static_argnames="twice")
    rng = np.random.default_rng(0)
    for n, d, twice, width in [
        (3, 2, False, 1),
        (3, 2, True, 2),
        (5, 2, True, 1),
        (3, 4, False, 1),
    ] * 2:
        x, scale = rng.normal(size=(n, d)).astype(np.float32), {"a": float(rng.normal())}
        given = {"x": x, "w": np.ones(width)}
        found = fun(given, scale, twice=twice)
        assert np.allclose(found["rows"], x * scale["a"] * (2 if twice else 1), rtol=1e-6)
        assert found["n"] == n and found["w"].shape == (width,)
        by_name = fun(scale=scale, batch=given, twice=twice)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, by_name))
        assert given["x"] is x
    with pytest.raises(ArgumentsError, match="a different structure than its type"):
        fun({"x": np.ones((3, 2), np.float32)}, {"a": 1.0})
