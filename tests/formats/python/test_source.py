"""The form of emitted source, which is self-contained."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.experimental.xla_metadata import set_xla_metadata

import jaxprtool
from jaxprtool import jaxcompat, nest, sow, variable
from jaxprtool.errors import OutputError, UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.formats.python.emit import python_rules, to_python, write_python
from jaxprtool.formats.python.expressions import call, plain_text
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.jaxcompat import Primitive
from jaxprtool.loading.load import find_function
from jaxprtool.loading.trace import trace
from jaxprtool.passes.cleanup.inline import Inline
from tests.formats.python.emitting import defined, emitted
from tests.programs import harness_programs, sample_programs
from tests.programs.samples import SAMPLES, sample_files
from tests.programs.values import special_values
from tests.share import HALF, for_sweep_unless

X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def code(program: Any) -> str:
    """Return the source from its first definition on, without comments on lines of their own."""
    lines = to_python(program).split('"""', 2)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("def ", "@")))
    return "\n".join(line for line in lines[start:] if not line.lstrip().startswith("# ")) + "\n"


def expected(text: str) -> str:
    return dedent(text).lstrip("\n")


def test_results_with_one_use_are_written_inline() -> None:
    def normalised(x):
        x = x - x.mean(axis=1, keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean(axis=1, keepdims=True) + 1e-5)

    assert code(trace(normalised, X)) == expected("""
        def normalised(x):  # f32[3,4]
            a = x - jnp.sum(x, axis=1)[:, None] / 4.0  # f32[3,4]
            b = jnp.sum(jnp.square(a), axis=1)[:, None] / 4.0  # f32[3,1]
            return a * lax.rsqrt(b + 1e-05)  # f32[3,4]
    """)


def test_values_are_written_in_evaluation_order() -> None:
    def f(x):
        a, b = jnp.sin(x), jnp.cos(x)
        return b - a

    assert code(trace(f, X)) == expected("""
        def f(x):  # f32[3,4]
            a = jnp.sin(x)  # f32[3,4]
            return jnp.cos(x) - a  # f32[3,4]
    """)


def test_arguments_are_extracted_from_their_trees_by_name() -> None:
    def loss(params, *rest, scale):
        return {"loss": (params["w"] @ rest[0]).sum() * scale, "params": [params["b"], None]}

    program = trace(loss, {"w": X, "b": X}, X.update(shape=(4,)), scale=2.0)
    assert code(program) == expected("""
        def loss(params, *rest, scale):  # f32[]
            b = params["b"]  # f32[3,4]
            w = params["w"]  # f32[3,4]
            rest_0 = rest[0]  # f32[4]
            a = jnp.sum(w @ rest_0) * jnp.astype(scale, jnp.float32)  # f32[]
            return {"loss": a, "params": [b, None]}
    """)
    assert structural_difference(program, emitted(program)[1]) is None


def test_loops_and_branches_are_local_functions() -> None:
    def f(x, n):
        def step(total, row):
            total = lax.cond(total > 0.0, lambda t: t + row.sum(), jnp.negative, total)
            return total, row * n

        return lax.scan(step, 0.0, x)

    program = trace(f, X, 3.0)
    assert code(program) == expected("""
        def f(x, n):  # f32[3,4], f32[]
            def step(total, row):  # f32[], f32[4]
                def then(row, t):  # f32[4], f32[]
                    a = jnp.sum(row)  # f32[]
                    return jnp.astype(t, jnp.float32) + a  # f32[]

                def otherwise(row, total):  # f32[4], f32[]
                    return -total  # f32[]

                b = lax.cond(total > 0.0, then, otherwise, row, total)  # f32[]
                return b, row * jnp.astype(n, jnp.float32)  # f32[], f32[4]

            c, d = lax.scan(step, 0.0, x)  # f32[], f32[3,4]
            return c, d
    """)
    assert structural_difference(program, emitted(program)[1]) is None


def test_jit_is_a_decorator_and_a_used_name_is_kept() -> None:
    @jax.jit
    def twice(x):
        return x + x

    def f(x):
        return twice(x), twice(x[0]), twice(x)

    program = trace(f, X)
    assert code(program).endswith(
        expected("""
        def f(x):  # f32[3,4]
            a = twice(x)  # f32[3,4]
            b = twice_2(x[:1].squeeze(0))  # f32[4]
            return a, b, twice(x)  # f32[3,4], f32[4], f32[3,4]


        @jax.jit
        def twice(x):  # f32[3,4]
            return x + x  # f32[3,4]


        @jax.jit
        @named("twice")
        def twice_2(x):  # f32[4]
            return x + x  # f32[4]
        """)
    )
    assert structural_difference(program, emitted(program)[1]) is None


def test_sown_values_are_sown_and_scopes_are_nested() -> None:
    def dense(x, w):
        params = variable({"w": w, "b": x[0]}, name="params")
        return sow(x @ params["w"], tag="seen", name="y", mode="append", key=params["b"])

    def f(x, w):
        w = variable(w, name="w")
        x, _ = sow((nest(dense, scope="a b")(x, w), w), tag="seen", name=None)
        return nest(lambda x: dense(x, w), scope="a b")(x)

    square = X.update(shape=(3, 3))
    program = trace(f, square, square)
    assert code(program) == expected("""
        def f(x, w):  # f32[3,3], f32[3,3]
            a = jaxprtool.variable(w, name="w")  # f32[3,3]
            b, _ = jaxprtool.sow((a_b(x, a), a), tag="seen", name=None)  # f32[3,3]
            return a_b_2(a, b)  # f32[3,3]


        @partial(jaxprtool.nest, scope="a b")
        def a_b(x, w):  # f32[3,3], f32[3,3]
            a = x[:1].squeeze(0)  # f32[3]
            (
                b,  # f32[3]
                c,  # f32[3,3]
            ) = jax.tree.leaves(jaxprtool.variable({"b": a, "w": w}, name="params"))
            d = x @ c  # f32[3,3]
            e = jaxprtool.sow(d, tag="seen", name="y", mode="append", key=b)  # f32[3,3]
            return e


        @partial(jaxprtool.nest, scope="a b")
        def a_b_2(a, x):  # f32[3,3], f32[3,3]
            b = x[:1].squeeze(0)  # f32[3]
            (
                c,  # f32[3]
                d,  # f32[3,3]
            ) = jax.tree.leaves(jaxprtool.variable({"b": b, "w": a}, name="params"))
            e = x @ d  # f32[3,3]
            g = jaxprtool.sow(e, tag="seen", name="y", mode="append", key=c)  # f32[3,3]
            return g
    """)
    assert structural_difference(program, emitted(program)[1]) is None


def test_a_scope_keeps_closed_over_values_outside() -> None:
    table = np.arange(4.0, dtype=np.float32)

    def f(x):
        return nest(lambda y: variable(y * table, name="w") + x, scope="s")(x[0])

    program = trace(f, X)
    assert structural_difference(program, emitted(program)[1]) is None


def test_a_scope_with_more_options_than_nest_is_a_jit_of_its_name() -> None:
    program = trace(lambda x: nest(jnp.sin, scope="s")(x), X)
    (eqn,) = program.jaxpr.eqns
    donating = eqn.replace(params={**eqn.params, "donated_invars": (True,)})
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[donating]))
    source, again = emitted(program)
    assert '@jax.jit(donate_argnums=0)\n@named("nest:s")\ndef nest_s(' in source
    assert structural_difference(program, again) is None


def test_a_sown_value_with_an_opaque_node_is_refused() -> None:
    Point = namedtuple("Point", "x y")
    with pytest.raises(UnsupportedError, match=r"sow at .*: its value has a node of type .*Point"):
        to_python(trace(lambda x: sow(Point(x, x), tag="t", name="n"), X))


def test_custom_derivatives_keep_their_rules() -> None:
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, x), lambda x, ct: (jnp.clip(ct, -x, x),))
    program = trace(lambda x: clip(x).sum(), X)
    source, again = emitted(program)
    assert "@jax.custom_vjp\ndef clip(" in source
    assert source.endswith("\nclip.defvjp(clip_fwd, clip_bwd)\n")
    assert structural_difference(program, again) is None
    x = jnp.linspace(0.0, 2.0, 12).reshape(3, 4)
    got = jax.grad(defined(source))(x)
    np.testing.assert_array_equal(got, np.minimum(1.0, x))


def test_parameters_do_not_shadow_names_that_the_function_needs() -> None:
    @jax.jit
    def relu(x):
        return jnp.sin(x)

    def f(jnp, relu_, relu):
        return relu_(jnp) + relu

    program = trace(lambda jnp, relu_: f(jnp, relu, relu_), X, X)
    program = program.replace(arg_names=("jnp", "relu"))
    source, again = emitted(program)
    assert "def lambda_(jnp_, relu):" in source
    assert '@named("relu")\ndef relu_2(' in source
    assert structural_difference(program, again) is None


def sum_with_sign(_, x):
    return _ + jnp.linalg.slogdet(x)[1]


def unused_in_a_jitted_function(_, x):
    @jax.jit
    def inner(_, x):
        return jnp.linalg.slogdet(x)[1] + _

    return inner(_, x)


def unused_in_a_loop(_, x):
    def body(carry, x):
        return carry + jnp.linalg.slogdet(x)[1] * _, lax.top_k(carry * x[0], 2)[1]

    return lax.scan(body, _, x[None])


def unused_in_a_branch(_, x):
    return lax.cond(_ > 0, lambda _: _ + jnp.linalg.slogdet(x)[1], lambda _: _ * 2, _)


def unused_beside_a_function(y, x):
    def _(x):
        return jnp.sin(x) * 2

    return y + jnp.linalg.slogdet(jax.jit(_)(x))[1]


@pytest.mark.parametrize(
    "function",
    [
        sum_with_sign,
        unused_in_a_jitted_function,
        unused_in_a_loop,
        unused_in_a_branch,
        unused_beside_a_function,
    ],
)
def test_unused_results_do_not_shadow_a_variable_called_underscore(function) -> None:
    x = jnp.arange(9.0).reshape(3, 3) + jnp.eye(3)
    program = trace(function, jnp.float32(3.0), x)
    source, again = emitted(program)
    assert structural_difference(program, again) is None
    results = (jax.tree.leaves(jax.jit(f)(3.0, x)) for f in (defined(source), program))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_keywords_with_the_names_of_imports_are_taken_as_a_dict() -> None:
    def f(x, *, P, k):
        return P * x + k

    program = trace(f, X, P=X, k=X)
    source, again = emitted(program)
    assert "def f(x, **keywords):" in source
    assert structural_difference(program, again) is None


def test_a_checkpoint_and_its_gradient_stay_checkpoints() -> None:
    @jax.checkpoint
    def twice(x):
        return jnp.sin(jnp.sin(x))

    for function in (twice, jax.grad(lambda x: twice(x).sum())):
        program = trace(function, X)
        source, again = emitted(program)
        assert structural_difference(program, again) is None
    assert "primitives.remat_p.bind(" in source


def test_a_weak_argument_and_a_strong_literal_keep_their_types() -> None:
    def f(x, n):
        return x * np.float32(2.0), n * 2, n + np.int32(1), jnp.where(n > 0, n, 7)

    program = trace(f, X, 3)
    assert structural_difference(program, emitted(program)[1]) is None


def test_a_program_of_wide_types_enables_them() -> None:
    with jax.enable_x64(True):
        program = trace(lambda x: x + jnp.arange(3.0), jnp.ones(3))
        source, again = emitted(program)
        assert structural_difference(program, again) is None
    assert "It needs 64-bit types" in source
    assert "# f64[3]" in source


def test_special_floats_round_trip_bitwise() -> None:
    bits = np.array([0xFFC00001, 0x7F800000, 0x80000000, 0x00000001], np.uint32)
    values = bits.view(np.float32)

    def f(x):
        return [lax.max(x, v) for v in values]

    program = trace(f, X)
    assert structural_difference(program, emitted(program)[1]) is None


def nans(dtype):
    """Return NaNs of all bits that a type of 8 bits has, and of several bits of a wider type."""
    values = special_values(dtype)
    if dtype.itemsize > 1:
        size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        bits = 8 * size
        infinity = int(np.array(np.inf, values.real.dtype).view(f"u{size}"))
        words = [infinity + 1, infinity + 5 + (1 << bits - 1), (1 << bits) - 1, 0]
        values = np.array(words, f"u{size}").view(dtype)
    with np.errstate(invalid="ignore"):
        return values[values != values]


def check_nans(name):
    """Require that constants, literals and parameters keep the bits of NaNs."""
    dtype = jnp.dtype(name)
    values = nans(dtype)

    def f(x, i):
        scalars = [jnp.asarray(v) + 0 * x for v in values[:2]]
        literals = [lax.select_n(i > 0, x, np.asarray(v)) for v in values[:2]]
        filled = [jnp.take(x[None], i[None], mode="fill", fill_value=v) for v in values[:2]]
        arrays = [jnp.asarray(values), jnp.asarray(np.resize(values, (5, 7)))]
        return scalars, literals, filled, arrays, jnp.asarray(values[0]), jnp.full(3, values[-1])

    args = jnp.zeros((), dtype), jnp.int32(4)
    program = trace(f, *args)
    source, again = emitted(program)
    assert structural_difference(program, again) is None
    for old, new in zip(program.apply("")(*args)[3], defined(source)(*args)[3], strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


INEXACT = ["float32", "bfloat16", "float16", "complex64", "float8_e5m2", "float8_e4m3fnuz"]
MORE = ["float64", "complex128", "float8_e4m3fn", "float8_e8m0fnu", "float8_e3m4", "float8_e4m3"]


@pytest.mark.parametrize("name", for_sweep_unless(INEXACT[HALF::2], [*INEXACT, *MORE]))
def test_nans_keep_their_bits(name: str) -> None:
    with jax.enable_x64("64" in name or "128" in name):
        check_nans(name)


def test_python_nans_keep_their_bits() -> None:
    bits = np.array([0xFFF8000000000000, 0x7FF8000020000000, 0x7FF8000000000000], np.uint64)

    def f(x):
        return [lax.max(x, v) for v in bits.view(np.float64).tolist()]

    program = trace(f, 1.0)
    source, again = emitted(program)
    assert structural_difference(program, again) is None
    assert "jnp.nan" in source and ".item()" in source


def with_settings(x):
    with set_xla_metadata(color="red"):
        y = lax.scan(lambda c, a: (c + a, None), x[0], x)[0] * 2.0
    with jax.threefry_partitionable(False):
        return y + jax.random.uniform(jax.random.key(0), (4,))


@pytest.mark.proof
def test_config_contexts_are_written() -> None:
    program = trace(with_settings, X)
    source, again = emitted(program)
    assert 'with set_xla_metadata(color="red"):' in source
    assert structural_difference(program, again) is None
    x = jnp.ones((3, 4))
    np.testing.assert_array_equal(defined(source)(x), program(x))


def test_named_axes_from_outside_are_documented() -> None:
    program = trace(lambda x: lax.psum(x, "i"), X, axis_env=[("i", 4)])
    source, again = emitted(program)
    assert "It must be called where these named axes are bound: i of size 4." in source
    assert 'lax.psum(x, "i")' in source
    assert structural_difference(program, again) is None


# --- constants ----------------------------------------------------------------------------------


def test_large_constants_are_in_a_separate_file(tmp_path: Path) -> None:
    large = np.arange(4096, dtype=np.float32).reshape(64, 64)
    half = np.arange(2048, dtype=jnp.bfloat16)
    medium = np.arange(20, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 3)

    def f(x):
        return (
            x @ large,
            half * 2,
            medium + 1,
            jax.random.bits(keys[0]),
            jnp.float32(3.0) + large[0, 0],
        )

    program = trace(f, jnp.ones((2, 64)))
    path = tmp_path / "module.py"
    write_python(program, path)
    source = path.read_text()
    assert str(tmp_path) not in source
    assert len(source) < 3000
    again = defined(source, str(path))
    for got, want in zip(again(jnp.ones((2, 64))), program(jnp.ones((2, 64))), strict=True):
        np.testing.assert_array_equal(got, want)
    assert structural_difference(program, emitted(program)[1]) is None


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "taken.py").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        write_python(trace(lambda x: x @ np.ones((64, 64)), jnp.ones(64)), tmp_path / "taken.py")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.py"]


@pytest.mark.usefixtures("processes")
def test_a_file_without_large_constants_is_self_contained(tmp_path: Path) -> None:
    write_python(trace(jnp.sin, X), tmp_path / "sin.py")
    assert [p.name for p in tmp_path.iterdir()] == ["sin.py"]
    run = "import runpy; m = runpy.run_path('sin.py'); print(m['sin'](0.0)); "
    run += "import sys; print('jaxprtool' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0.0", "False"]


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("around", [lambda f: f, jax.vmap, jax.jit])
def test_a_rule_calls_its_function_that_captures_an_array(kind, around) -> None:
    weights = jnp.arange(4.0)
    scaled = getattr(jax, f"custom_{kind}")(lambda x: x * weights)
    if kind == "jvp":
        scaled.defjvp(lambda p, t: (scaled(*p), 3 * weights * t[0]))
    else:
        scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (3 * weights * ct,))
    program = trace(lambda x: around(scaled)(x), X)
    function, x = defined(to_python(program)), jnp.ones(X.shape)
    np.testing.assert_array_equal(jax.jit(function)(x), jax.jit(program)(x))
    grads = [jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x) for f in (function, program)]
    np.testing.assert_array_equal(*grads)


def test_a_function_with_the_name_of_a_helper_is_renamed() -> None:
    @jax.jit
    def named(x):
        return jnp.sin(x)

    program = trace(lambda x: named(x) + jax.jit(lambda x: x * 2)(x), X)
    source, again = emitted(program)
    assert '@named("named")\ndef named_2(' in source
    assert structural_difference(program, again) is None


@pytest.mark.parametrize("mode", ["reduced", "complete", "raw", "r"])
def test_a_qr_decomposition_is_the_librarys_function(mode) -> None:
    program = trace(lambda x: jax.tree.leaves(jnp.linalg.qr(x, mode=mode)), X)
    source, again = emitted(program)
    assert "jnp.linalg.qr(x" in source and "def qr" not in source
    assert structural_difference(program, again) is None


def test_a_qr_decomposition_without_its_call_returns_the_same_values() -> None:
    program = Inline()(trace(lambda x: tuple(jnp.linalg.qr(x, mode="raw")), X))
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns] == ["geqrf", "transpose"]
    x = jnp.sin(jnp.arange(12.0)).reshape(X.shape)
    for ours, theirs in zip(defined(to_python(program))(x), program(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- trees with classes that the module does not import -------------------------------------------

Point = namedtuple("Point", "x y")
State = namedtuple("State", "count moments")


def test_a_node_of_a_class_is_returned_with_the_structure_of_an_argument() -> None:
    def step(state, x):
        moments = {k: v + x for k, v in state.moments.items()}
        return State(state.count + 1, moments), [state.count]

    state = State(0, {"a": 1.0, "b": 2.0})
    source = to_python(trace(step, state, 3.0))
    assert "def step(state, x):" in source
    assert defined(source)(state, 3.0) == (State(1, {"a": 4.0, "b": 5.0}), [0])
    assert isinstance(defined(source)(state, 3.0)[0], State)


def test_a_node_of_a_class_without_such_an_argument_is_a_named_tuple_of_its_fields() -> None:
    def init(x):
        return State(0, OrderedDict(b=Point(x, 2.0), a=None)), Empty()

    Empty = namedtuple("Empty", "")
    source = to_python(trace(init, 1.0))
    assert "named tuples of a class's fields: Empty, Point, State." in source
    found, empty = defined(source)(1.0)
    assert (type(found).__name__, found.count, found.moments["b"].y) == ("State", 0, 2.0)
    assert list(found.moments) == ["b", "a"]
    assert empty == ()


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_leaves_without_a_path_are_taken_from_the_flat_argument() -> None:
    def function(box, x):
        return Box(box.value + x), Box([x])

    source = to_python(trace(function, Box(1.0), 2.0))
    assert "def function(box, x):" in source
    like, other = defined(source)(Box(1.0), 2.0)
    assert (type(like), like.value) == (Box, 3.0)
    assert other == ([2.0],)


def test_static_data_of_a_class_come_from_the_argument() -> None:
    box = Box([jnp.sin, jnp.ones(2), "name"])
    program = trace(lambda box: Box([box.value[0], box.value[0](box.value[1]), "name"]), box)
    got = defined(to_python(program))(box)
    assert (got.value[0], got.value[2]) == (jnp.sin, "name")
    np.testing.assert_array_equal(got.value[1], jnp.sin(jnp.ones(2)))


def test_arguments_have_names_whatever_the_names_in_the_program() -> None:
    program = trace(lambda **kw: kw["def"] + kw["np"], **{"def": 1.0, "np": 2.0})
    assert defined(to_python(program))(**{"def": 1.0, "np": 2.0}) == 3.0
    program = trace(lambda *xs, k: xs[0] + xs[1]["a"] * k, 1.0, {"a": 2.0}, k=3.0)
    assert defined(to_python(program))(1.0, {"a": 2.0}, k=3.0) == 7.0


def test_a_branch_that_depends_on_the_platform() -> None:
    def branch(x):
        return lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=lambda x: x * 2)

    program = trace(branch, 1.0)
    source = to_python(program)
    assert "lax.platform_dependent(x, cpu=" in source
    assert structural_difference(program, trace(defined(source), 1.0)) is None


# --- plug-ins and errors --------------------------------------------------------------------------


def test_a_plug_in_adds_a_rule_for_its_primitive() -> None:
    doubled_p = Primitive("test_doubled")
    doubled_p.def_abstract_eval(lambda x: x)
    doubled_p.def_impl(lambda x: x + x)
    program = trace(lambda x: doubled_p.bind(x) + 1.0, X)
    with pytest.raises(UnsupportedError, match=r"test_doubled at .*test_source.py:\d+"):
        to_python(program)
    jnp.__dict__["test_doubled"] = doubled_p.bind
    try:
        python_rules["test_doubled"] = lambda eqn, x: [call("jnp.test_doubled", x)]
        assert "jnp.test_doubled(x) + 1.0" in to_python(program)
    finally:
        del python_rules["test_doubled"], jnp.__dict__["test_doubled"]


def test_a_rule_with_a_different_result_is_rejected() -> None:
    before = python_rules["sin"]
    try:
        python_rules["sin"] = lambda eqn, x: [call("jnp.cos", x), *before(eqn, x)]
        assert "jnp.sin(x)" in to_python(trace(lambda x: jnp.sin(x), X))
    finally:
        python_rules["sin"] = before


def test_callbacks_into_live_python_are_refused_with_their_line() -> None:
    def f(x):
        return jax.pure_callback(np.sin, X, x)

    with pytest.raises(UnsupportedError, match=r"pure_callback at .*test_source.py:\d+ cannot"):
        to_python(trace(f, X))


def test_callbacks_are_written_as_functions_that_raise_on_request() -> None:
    def f(x):
        y = jax.pure_callback(np.sin, X, x, vmap_method="sequential")
        jax.debug.callback(lambda v: None, y, ordered=True)
        return y + io_callback(np.cos, X, x, ordered=True)

    program = trace(f, X)
    with pytest.raises(UnsupportedError) as caught:
        to_python(program)
    assert "--callbacks stub" in str(caught.value.hint)
    with pytest.raises(ValueError, match="callbacks must be 'refuse' or 'stub', not 'no'"):
        to_python(program, callbacks="no")
    namespace: dict[str, Any] = {}
    exec(to_python(program, callbacks="stub"), namespace)
    again = trace(namespace["f"], X)
    for old, new in zip(program.jaxpr.eqns, again.jaxpr.eqns, strict=True):
        same = {k: v for k, v in old.params.items() if k != "callback"}
        assert old.primitive is new.primitive and same.items() <= new.params.items()
        assert old.effects == new.effects
    with pytest.raises(RuntimeError, match="was omitted"):
        jax.block_until_ready(namespace["f"](jnp.zeros(X.shape)))


def test_a_batching_rule_is_written_as_one_that_raises_on_request() -> None:
    scaled = jax.custom_batching.custom_vmap(lambda a, b: jnp.sin(a) * b)
    scaled.def_vmap(lambda size, batched, a, b: (a, True))

    def f(x):
        return scaled(x, 2.0)

    program = trace(f, jnp.ones(3))
    with pytest.raises(UnsupportedError, match=r"batching rule .*<lambda>, a Python") as caught:
        to_python(program)
    assert "custom_vmap" in str(caught.value.hint)
    namespace: dict[str, Any] = {}
    exec(to_python(program, callbacks="stub"), namespace)
    again = trace(namespace["f"], jnp.ones(3))
    assert [eqn.primitive.name for eqn in again.jaxpr.eqns] == ["custom_vmap_call"]
    np.testing.assert_array_equal(again(jnp.ones(3)), program(jnp.ones(3)))
    with pytest.raises(RuntimeError, match="was omitted"):
        jax.vmap(again)(jnp.ones((2, 3)))


def test_symbolic_dimensions_are_named_only_where_needed() -> None:
    (n,) = jax.export.symbolic_shape("n")
    rows = jax.ShapeDtypeStruct((n, 4), jnp.float32)
    source = to_python(trace(lambda x: jnp.einsum("ij,kj->ik", jnp.sin(x), x), rows))
    assert 'jnp.einsum("ab,cb->ac", jnp.sin(x), x)  # f32[n,n]' in source
    assert ".shape" not in source
    assert "return x.reshape(4 * n)" in to_python(trace(lambda x: x.reshape(-1), rows))


@pytest.mark.parametrize("captured", [True, False])
def test_rules_that_close_over_traced_values_are_refused(captured: bool) -> None:
    def f(x, y):
        @jax.custom_jvp
        def scaled(x):
            return x * y if captured else x

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * y))
        return scaled(x)

    message = r"custom_jvp_call at .*test_source\.py:\d+ .* a custom rule closes over a traced"
    with pytest.raises(UnsupportedError, match=message):
        to_python(trace(f, X, X))


def test_loops_of_a_program_from_a_file_have_the_usual_names() -> None:
    program = trace(lambda x: lax.scan(lambda c, a: (c + a, c), x[0], x), X)
    assert "def step(" in to_python(parse_program(program_file_text(program), "f.jaxpr"))


def test_bodies_may_nest_deeply() -> None:
    def nested(depth):
        if not depth:
            return jnp.sin

        @jax.jit
        def inner(x):
            return nested(depth - 1)(x) * 2.0

        return inner

    program = trace(nested(60), X)
    source, again = emitted(program)
    assert source.count("@jax.jit") == 60
    assert structural_difference(program, again) is None


def test_deep_bodies_are_moved_to_the_top_of_the_module(tmp_path: Path) -> None:
    def nested(depth, offset):
        if not depth:
            return lambda x: jnp.sin(x) + offset

        def step(carry, x):
            return nested(depth - 1, offset)(carry) * x, None

        return lambda x: lax.scan(step, x, jnp.arange(3.0))[0]

    def f(x, y):
        return nested(12, y * 2.0)(x)

    program = trace(f, 1.0, 2.0)
    source, again = emitted(program)
    assert "partial(step" in source
    assert structural_difference(program, again) is None
    check_form({"deep": source}, tmp_path)


# --- form -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_emission_is_deterministic() -> None:
    target = f"{SAMPLES / 'rnn.py'}:encode"
    code = "import jaxprtool, sys; print(jaxprtool.to_python(jaxprtool.load(sys.argv[1])))"
    runs = [
        subprocess.run([sys.executable, "-c", code, target], capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert b"/" not in runs[0].split(b'"""')[1]


def check_form(sources: dict[str, str], folder: Path) -> None:
    """Raise AssertionError if ruff would reformat a source or report a fault in it."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    for arguments in (["format", "--diff"], ["check"]):
        command = [str(ruff), *arguments, "--isolated", "--no-cache", "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-400:]


def sources_of(cases: Any) -> dict[str, str]:
    sources = {}
    for i, case in enumerate(cases):
        with case.setting():
            try:
                sources[f"module_{i}"] = to_python(case.program())
            except UnsupportedError:
                continue
    return sources


@pytest.mark.usefixtures("processes")
def test_sources_are_formatted_and_pass_ruff(tmp_path: Path) -> None:
    sources = sources_of(harness_programs(40)) | {"settings": to_python(trace(with_settings, X))}
    for file in sample_files():
        sources |= {f"{k}_{file[:-3]}": v for k, v in sources_of(sample_programs(file)).items()}
    assert len(sources) > 200
    check_form(sources, tmp_path)


@pytest.mark.sweep
def test_all_sources_are_formatted_and_pass_ruff(tmp_path: Path) -> None:
    check_form(sources_of(harness_programs(1)), tmp_path)


def test_only_public_names_are_used() -> None:
    assert jaxprtool.to_python is to_python
    assert jaxprtool.python_rules is python_rules
    assert find_function(f"{SAMPLES / 'rnn.py'}:encode").trace().name == "encode"


SCALARS = {
    "converted": lambda x, n: x * jnp.asarray(n, jnp.float32),
    "reshaped": lambda x, n: jnp.concatenate([x[0], jnp.reshape(n, 1) * 1.0]),
    "broadcast": lambda x, n: x * jnp.broadcast_to(n, (3, 4)),
    "an index": lambda x, n: x[n],
    "a start": lambda x, n: lax.dynamic_slice(x, (n, 0), (1, 2)),
    "bits": lambda x, n: x * (jnp.invert(n) & 3 | n << 1),
    "a negation": lambda x, n: x * -n // 2,
    "a choice": lambda x, n: jnp.where(n > 0, x, -x),
    "a branch": lambda x, n: lax.cond(n > 0, jnp.sin, jnp.cos, x),
    "a loop": lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 2.0 + i, x),
    "a function": lambda x, n: x * jnp.sqrt(n) + jnp.exp(n) + lax.population_count(n),
}


@pytest.mark.parametrize("how", SCALARS)
def test_python_numbers_are_accepted_as_scalars(how: str) -> None:
    x, function = np.arange(12, dtype=np.float32).reshape(3, 4), SCALARS[how]
    source = defined(to_python(trace(function, X, jax.ShapeDtypeStruct((), jnp.int32))))
    expected = function(x, jnp.int32(2))
    np.testing.assert_array_equal(source(x, 2), expected)
    np.testing.assert_array_equal(jax.jit(source)(x, 2), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("int8"), "float32"])
@pytest.mark.parametrize("placed", [False, True])
def test_empty_arrays_are_written(dtype: Any, placed: bool) -> None:
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Explicit,))
    placement = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    options = {"out_sharding": placement} if placed else {}
    program = trace(lambda: (lax.empty((4, 2), dtype, **options), jnp.empty((3, 2), **options)))
    source, again = emitted(program)
    assert ".empty(" in source and structural_difference(program, again) is None


@dataclass(frozen=True, order=True)
class Part:
    number: int


def test_results_in_a_dict_with_keys_of_a_class_are_in_the_order_of_the_keys() -> None:
    def f(x):
        return {Part(2): x, Part(1): 2 * x}, {b"sum": x.sum()}

    function = defined(to_python(trace(f, X)))
    x = jnp.ones((3, 4))
    (first, second), last = function(x)
    assert list(last) == [b"sum"]
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, x)


@pytest.mark.proof
def test_a_checkified_function_is_written() -> None:
    def f(x):
        checkify.check(x.sum() > 0, "not positive: {x}", x=x.sum())
        return x / x.sum()

    x = jnp.ones((3, 4))
    program = trace(checkify.checkify(f), X)
    found = jax.tree.leaves(defined(to_python(program))(x))
    for ours, theirs in zip(found, jax.tree.leaves(program(x)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value", ["a\\'b", "\\'", "'", "\\", 'x"y', "a'b\"c", "\n\\'\x00"])
def test_any_string_is_escaped(value):
    assert ast.literal_eval(plain_text(value)) == value


def test_names_and_values_of_metadata_are_data():
    names = {"a-b": "c", "class": "x\\'y", "x=__import__('os').abort(), y": "1", "plain": "2"}

    def f(x):
        with set_xla_metadata(**names):
            return jnp.sin(x)

    text = jaxprtool.to_python(jaxprtool.trace(f, 1.0))
    (given,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "set_xla_metadata"
    ]
    written = {
        k: v
        for keyword in given.keywords
        for k, v in (
            ast.literal_eval(keyword.value).items()
            if keyword.arg is None
            else [(keyword.arg, ast.literal_eval(keyword.value))]
        )
    }
    assert written == names


def test_a_mesh_with_missing_devices_is_an_error_not_a_smaller_mesh(monkeypatch) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("i",))
    fun = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    source = to_python(trace(fun, jnp.ones(4)))
    monkeypatch.setattr(jax, "devices", lambda platform: mesh.devices[:1])
    with pytest.raises(ValueError, match="reshape"):
        exec(source, {})


def _of_file(file: Path, source: str) -> Any:
    """Return the function `net` of a written file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    space: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), space)
    return space["net"]


def test_comments_distinguish_files_of_one_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def net(x):\n    y = x * 2.0\n    return y * y\n"
    policy, value = (_of_file(tmp_path / each / "net.py", source) for each in ("policy", "value"))
    both = to_python(trace(lambda x: value(policy(x)), 1.0))
    assert "# net, policy/net.py" in both and "# net, value/net.py" in both
    assert "# net, net.py" in to_python(trace(policy, 1.0))


def test_comments_have_the_chosen_frames(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    library = tmp_path / "site-packages" / "lib"
    inner = _of_file(library / "inner.py", "def net(x):\n    y = x * 2.0\n    return y * y\n")
    outer = _of_file(library / "outer.py", "def net(f, x):\n    return f(x)\n")
    fun = _of_file(tmp_path / "model.py", "def net(g, f, x):\n    return g(f, x)\n")
    program = trace(lambda x: fun(outer, inner, x), 1.0)
    assert "# net, model.py ← net, inner.py\n" in to_python(program)
    with jaxprtool.frames("all"):
        assert "# net, model.py ← net, outer.py ← net, inner.py\n" in to_python(program)
    with jaxprtool.frames("library"):
        assert "# net, inner.py\n" in to_python(program)


def test_comments_of_a_module_without_locations_name_its_file(tmp_path) -> None:
    path = tmp_path / "model.mlir"

    def power(x):
        y = jnp.sin(x)
        return y**y

    path.write_text(jax.jit(power).lower(1.0).as_text())
    assert "    # model.mlir\n" in to_python(jaxprtool.read(path))


def test_a_closed_over_ref_belongs_to_the_module() -> None:
    total = jax.new_ref(jnp.arange(3.0))

    def add(x):
        total[...] += x
        return total[...].sum()

    space: dict[str, Any] = {}
    exec(to_python(trace(add, 1.0)), space)
    assert [space["add"](1.0), space["add"](1.0)] == [6.0, 9.0]
    assert total[...].sum() == 3


def test_numbers_in_results_are_written() -> None:
    module = pytest.importorskip("equinox").nn.Dropout(0.25)
    source = to_python(trace(lambda x: (x + 1.0, eqx_scaled(module)), 1.0))
    assert "p=0.5" in source


def eqx_scaled(module: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 2 if isinstance(leaf, float) else leaf, module)
