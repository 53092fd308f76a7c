"""A Program is called with the types of its trace, like a compiled function of JAX."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import StructureError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text

x = jnp.arange(4.0)


def scaled(p, by):
    return {"y": jax.jit(lambda w: w * by)(p["w"])}


@pytest.fixture(params=["traced", "from a file", "-O1", "jit"])
def program(request):
    made = jaxprtool.trace(scaled, {"w": x}, 2.0)
    if request.param == "from a file":
        return parse_program(program_file_text(made), "f.jaxpr")
    return made if request.param == "traced" else made.apply(request.param)


@pytest.mark.parametrize(
    ("w", "by", "message"),
    [
        (jnp.ones(8), 2.0, r"argument 'p\['w'\]' is f32\[8\], but scaled takes f32\[4\]$"),
        (jnp.ones((4, 1)), 2.0, r"argument 'p\['w'\]' is f32\[4,1\], but scaled takes f32\[4\]$"),
        (1.0, 2.0, r"argument 'p\['w'\]' is f32\[\], but scaled takes f32\[4\]$"),
        (np.arange(4), 2.0, r"argument 'p\['w'\]' is i32\[4\], but scaled takes f32\[4\]$"),
        (x.astype(jnp.bfloat16), 2.0, r"is bf16\[4\], but scaled takes f32\[4\]$"),
        (x, 2, r"argument 'by' is i32\[\], but scaled takes f32\[\]$"),
        (x, 2**40, r"argument 'by' is 1099511627776, too large for its type, but scaled takes"),
        (jax.ShapeDtypeStruct((4,), "float32"), 2.0, "'p.*' is a type, not an array, but scaled"),
        (np.zeros(4, "datetime64[s]"), 2.0, "of dtype datetime64.*, which is not a JAX array"),
    ],
)
def test_another_type_is_refused_with_the_path_of_the_argument(program, w, by, message):
    with pytest.raises(StructureError, match=message) as caught:
        program({"w": w}, by)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: jax.vmap(f, ({"w": 0}, None)),
        lambda f: jax.grad(lambda p, by: f(p, by)["y"].sum()),
        lambda f: lambda *a: jax.eval_shape(f, *a),
        lambda f: lambda *a: jax.jvp(f, a, a),
    ],
    ids=["jit", "vmap", "grad", "eval_shape", "jvp"],
)
def test_another_type_is_refused_under_transformations_of_jax_too(program, transform, request):
    stacked = "vmap" in request.node.callspec.id
    shape = (3, 4) if stacked else (4,)
    transform(program)({"w": jnp.ones(shape)}, 2.0)
    with pytest.raises(StructureError, match=r"'p\['w'\]' is f32\[5\], but scaled takes f32\[4\]"):
        transform(program)({"w": jnp.ones((*shape[:-1], 5))}, 2.0)


SCALARS = [1.0, 2, True, 1j, np.float64(1), np.float32(1), np.int64(1), np.int8(1), np.bool_(True)]
SINGLE = [jnp.float32(1), jnp.asarray(1.0), jnp.asarray(1), jnp.bfloat16(1), np.ones(())]
ARRAYS = [*SINGLE, jnp.ones(1), x, np.ones(4)]
KEYS = [jax.random.key(0), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)]
ONE_OF_EACH = [1.0, 1, True, np.float32(1), np.int32(1), jnp.bfloat16(1), x, *KEYS]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("traced_on", ONE_OF_EACH, ids=repr)
def test_a_program_takes_what_a_compiled_function_takes_and_returns_the_same_types(traced_on, x64):
    def fun(x):
        return x, [x]

    program, compiled = jaxprtool.trace(fun, traced_on), jax.jit(fun).lower(traced_on).compile()
    taken = 0
    with jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in [*SCALARS, *ARRAYS, *KEYS]:
            try:
                expected = compiled(value)
            except TypeError:
                with pytest.raises(StructureError):
                    program(value)
                continue
            taken += 1
            given = program(value)
            assert jax.tree.map(jax.typeof, given) == jax.tree.map(jax.typeof, expected)
    assert taken or x64  # with 64-bit types, nothing may be of the type


def test_a_weakly_typed_value_does_not_change_the_types_of_results():
    def fun(x):
        return x + jnp.bfloat16(2)

    program = jaxprtool.trace(fun, jnp.float32(1))
    assert program(1.0).dtype == jax.jit(program)(1.0).dtype == jnp.float32


@pytest.mark.parametrize(
    ("pipeline", "part", "name"),
    [
        ("jvp", None, "d_x"),
        ("vjp", "backward", "cotangents"),
        ("linearize", "backward", "x"),
        ("linear_transpose", None, "cotangents"),
    ],
)
@pytest.mark.parametrize("wrong", [jnp.ones(5), jnp.ones(4, jnp.bfloat16), jnp.ones((4, 1))])
def test_a_tangent_or_cotangent_of_another_type_is_refused(pipeline, part, name, wrong):
    made = jaxprtool.trace(lambda x: x * 2, x).apply(pipeline)
    made = made if part is None else made[part]
    types = [jnp.zeros(aval.shape, aval.dtype) for aval in made.in_avals]
    args, kwargs = jax.tree.unflatten(made.in_tree, types)
    made(*args, **kwargs)
    place = made.arg_names.index(name) if name in made.arg_names else len(types) - 1
    types[place] = wrong
    args, kwargs = jax.tree.unflatten(made.in_tree, types)
    with pytest.raises(StructureError, match=r"takes f32\[4\]"):
        made(*args, **kwargs)


def test_the_programs_of_unzip_check_their_arguments():
    def net(key, x):
        w = jaxprtool.variable(jax.random.normal(key, x.shape), name="w")
        return w * x

    init, apply = jaxprtool.unzip(net)(jax.random.key(0), x)
    with pytest.raises(StructureError, match=r"takes key<fry>\[\]"):
        init(jax.random.PRNGKey(0))
    with pytest.raises(StructureError, match=r"is f32\[5\], but .* takes f32\[4\]"):
        apply(init(jax.random.key(0)), jnp.ones(5))


def test_with_symbols_rank_and_dtype_are_checked():
    (n,) = jax.export.symbolic_shape("n")
    struct = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    program = jaxprtool.trace(lambda x: x.sum(0), struct)
    assert program(jnp.ones((2, 3))).shape == (3,)
    for wrong in (jnp.ones((2, 4)), jnp.ones(3), jnp.ones((2, 3), int)):
        for call in (program, jax.jit(program)):
            with pytest.raises(StructureError, match=r"argument 'x' .* takes f32\[(n|2),3\]"):
                call(wrong)


def test_a_ref_and_an_array_cannot_replace_each_other():
    def add(x, ref):
        ref[...] += x
        return x

    program = jaxprtool.trace(add, x, jax.new_ref(x))
    program(x, jax.new_ref(x))
    with pytest.raises(StructureError, match=r"'ref' is f32\[4\], but add takes Ref{f32\[4\]}"):
        program(x, x)
    with pytest.raises(StructureError, match=r"'x' is Ref{f32\[4\]}, but add takes f32\[4\]"):
        program(jax.new_ref(x), jax.new_ref(x))
    with pytest.raises(StructureError, match=r"'ref' is Ref{f32\[5\]}, but add takes Ref{f32"):
        program(x, jax.new_ref(jnp.ones(5)))


def test_an_object_that_converts_to_an_array_is_accepted():
    class Scalar:
        def __jax_array__(self):
            return jnp.float32(3)

    assert jaxprtool.trace(lambda x: x + 1, jnp.float32(1))(Scalar()) == 4
