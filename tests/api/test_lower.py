"""`xla_computation` and `make_jaxpr`, as JAX documented them in 2022."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

import jaxprtool
from jaxprtool import make_jaxpr, xla_computation
from jaxprtool.errors import (
    ArgumentsError,
    BackendError,
    UnsupportedError,
    UserFunctionError,
)

SCALAR = types.SimpleNamespace(shape=(), dtype=np.dtype(np.float32))


def f(x):
    return jnp.sin(jnp.cos(x))


def lines(computation):
    """Return the instructions of the entry computation, without the numbers in their names."""
    text = computation.as_hlo_text().partition("ENTRY")[2]
    return [line.strip() for line in text.splitlines()[1:] if line.strip() not in ("", "}")]


# --- the documented examples ------------------------------------------------------------------


def test_a_function_of_a_scalar():
    computation = xla_computation(f)(3.0)
    assert computation.as_hlo_text().startswith("HloModule xla_computation_f,")
    assert lines(computation) == [
        "x.1 = f32[] parameter(0)",
        "cos.1 = f32[] cosine(x.1)",
        "sin.1 = f32[] sine(cos.1)",
        "ROOT tuple.1 = (f32[]) tuple(sin.1)",
    ]


def test_an_object_with_shape_and_dtype_is_accepted():
    given, expected = xla_computation(f)(SCALAR), xla_computation(f)(3.0)
    assert given.as_hlo_text() == expected.as_hlo_text()


def test_the_result_is_jaxlibs_own_object():
    computation = xla_computation(f)(SCALAR)
    assert isinstance(computation, xla_client.XlaComputation)
    assert str(computation.program_shape()) == "(p0: f32[]) -> (f32[])"
    assert computation.as_hlo_dot_graph().startswith("digraph G {")
    proto = computation.as_serialized_hlo_module_proto()
    assert xla_client.XlaComputation(proto).as_hlo_text() == computation.as_hlo_text()


def test_a_collective_over_one_axis():
    def g(x):
        return x - jax.lax.psum(x, "i")

    entry = lines(xla_computation(g, axis_env=[("i", 4)])(2))
    assert entry[1].startswith("psum.5 = s32[] all-reduce(x.1), replica_groups={{0,1,2,3}}, to_app")
    assert entry[2] == "sub.1 = s32[] subtract(x.1, psum.5)"


def test_collectives_over_two_axes():
    def g(x):
        rowsum = jax.lax.psum(x, "i")
        colsum = jax.lax.psum(x, "j")
        allsum = jax.lax.psum(x, ("i", "j"))
        return rowsum, colsum, allsum

    text = xla_computation(g, axis_env=[("i", 4), ("j", 2)])(5.0).as_hlo_text()
    groups = [part.split(", ")[0] for part in text.split("replica_groups=")[1:]]
    assert groups == [
        "{{0,2,4,6},{1,3,5,7}}",
        "{{0,1},{2,3},{4,5},{6,7}}",
        "{{0,1,2,3,4,5,6,7}}",
    ]


def test_the_jaxpr_of_a_function():
    jaxpr = make_jaxpr(f)(3.0)
    assert str(jaxpr) == str(jax.make_jaxpr(f)(3.0))
    assert "cos a" in str(make_jaxpr(jax.grad(f))(SCALAR))


def powers(x, n):
    return x**n


class Scaled:
    @functools.partial(jax.jit, static_argnums=0)
    def method(self, x):
        return 2 * x


JITTED = {
    "options": (jax.jit(f, donate_argnums=0, keep_unused=True, inline=True), ()),
    "twice": (jax.jit(jax.jit(f)), ()),
    "called twice": (lambda x: jax.jit(f)(jax.jit(f)(x)), ()),
    "of a partial": (jax.jit(functools.partial(powers, n=2)), ()),
    "in a partial": (functools.partial(jax.jit(powers), n=2.0), ()),
    "static": (jax.jit(powers, static_argnums=1), (3,)),
    "unused": (jax.jit(lambda x, y: x), (1.0,)),
    "gradient": (jax.grad(jax.jit(f)), ()),
    "of a gradient": (jax.jit(jax.grad(f)), ()),
    "mapped": (jax.vmap(jax.jit(f), axis_size=2, in_axes=None), ()),
    "rematerialized": (jax.checkpoint(jax.jit(f)), ()),
    "method": (Scaled().method, ()),
    "no results": (jax.jit(lambda x: ()), ()),
    "an array": (jax.jit(lambda x: x + np.arange(3.0)), ()),
    "a random number": (lambda x: jax.random.normal(jax.random.key(0)) + x, ()),
}


@pytest.mark.parametrize("name", JITTED)
def test_a_function_under_jit_is_an_equation(name):
    fun, others = JITTED[name]
    static = (1,) if name == "static" else ()
    jaxpr = make_jaxpr(fun, static_argnums=static)(3.0, *others)
    expected = jax.make_jaxpr(fun, static_argnums=static)(3.0, *others)
    assert str(jaxpr) == str(expected)
    for eqn, other in zip(jaxpr.eqns, expected.eqns, strict=True):
        assert eqn.params.keys() == other.params.keys()
        for key in eqn.params.keys() & {"donated_invars", "keep_unused", "inline", "name"}:
            assert eqn.params[key] == other.params[key]


# --- their options ----------------------------------------------------------------------------


def test_static_arguments_reach_the_function():
    def chosen(x, kinds, y):
        return jnp.sin(x) if kinds["sine"] else y

    static = {"sine": True}  # jax.jit would refuse it, since it is not hashable
    assert str(make_jaxpr(chosen, static_argnums=1)(SCALAR, static, SCALAR)) == (
        "{ lambda ; a:f32[] b:f32[]. let c:f32[] = sin a in (c,) }"
    )
    made = xla_computation(chosen, static_argnums=(1,))(SCALAR, static, SCALAR)
    assert [line.split(" = f32[] ")[-1] for line in lines(made)[:-1]] == [
        "parameter(1)",
        "parameter(0)",
        "sine(x.1)",
    ]


def test_the_shape_can_be_returned_too():
    def g(x, *, scale):
        return {"y": x * scale, "n": 3}

    for make in (xla_computation, make_jaxpr):
        _, shape = make(g, return_shape=True)(jnp.ones((2, 3)), scale=SCALAR)
        assert sorted(shape) == ["n", "y"]
        assert (shape["y"].shape, shape["y"].dtype) == ((2, 3), jnp.float32)
        assert isinstance(shape["n"], jax.ShapeDtypeStruct)
    assert (
        make_jaxpr(g, return_shape=True)(jnp.ones(2), scale=1.0)[1]
        == (jax.make_jaxpr(g, return_shape=True)(jnp.ones(2), scale=1.0)[1])
    )


def test_no_argument_is_dropped_and_constants_are_instantiated():
    for instantiate in (True, False, None):
        made = xla_computation(lambda x, y: 3.0, instantiate_const_outputs=instantiate)
        assert str(made(SCALAR, SCALAR).program_shape()) == "(p0: f32[], p1: f32[]) -> (f32[])"


@pytest.mark.parametrize(
    ("tuple_args", "count", "one"),
    [(False, 101, False), (True, 2, True), (None, 100, False), (None, 101, True)],
)
def test_arguments_can_be_one_tuple(tuple_args, count, one):
    made = xla_computation(lambda *args: sum(args), tuple_args=tuple_args)(*[SCALAR] * count)
    assert len(made.program_shape().parameter_shapes()) == (1 if one else count)


def test_donated_arguments_share_memory_with_results():
    def step(n, params, x):
        return {"b": params["b"] + n, "w": params["w"] * x}

    params = {"b": jnp.ones(3), "w": jnp.ones(4)}
    made = xla_computation(step, static_argnums=0, donate_argnums=(1,))(2, params, SCALAR)
    alias = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
    assert alias in made.as_hlo_text()
    tupled = xla_computation(step, static_argnums=0, donate_argnums=-2, tuple_args=True)
    assert "{0}: (0, {0}, may-alias)" in tupled(2, params, SCALAR).as_hlo_text()


def test_arguments_are_donated_by_each_replica():
    def step(total, x):
        return total + jax.lax.psum(x, "i")

    made = xla_computation(step, axis_env=[("i", 4)], donate_argnums=0, return_shape=True)
    computation, shape = made(SCALAR, SCALAR)
    assert "input_output_alias={ {0}: (0, {}, may-alias) }" in computation.as_hlo_text()
    assert shape.shape == ()


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_the_backend_need_not_be_available(backend):
    text = xla_computation(jnp.linalg.cholesky, backend=backend)(jnp.eye(3)).as_hlo_text()
    assert {"cpu": "lapack", "gpu": "cusolver", "tpu": "cholesky"}[backend] in text


def test_parts_are_shardings_of_parameters_and_results():
    def g(params, x, *, scale):
        return params["w"] @ x * scale, params["b"]

    params = {"b": jnp.ones(4), "w": jnp.ones((4, 6))}
    made = xla_computation(
        g, in_parts=({"b": None, "w": P(2, 1)}, P(1, 2)), out_parts=(P(2, 2), None)
    )
    text = made(params, jnp.ones((6, 8)), scale=2.0).as_hlo_text()
    shardings = {
        line.split(" = ")[0]: line.partition(", sharding=")[2]
        for line in map(str.strip, text.splitlines())
        if "parameter(" in line
    }
    assert shardings == {
        "params__b__.1": "{replicated}",
        "params__w__.1": "{devices=[2,1]0,1}",
        "x.1": "{devices=[1,2]0,1}",
        "scale.1": "{replicated}",
    }
    assert "sharding={{devices=[2,2]0,1,2,3}, {replicated}}" in text
    assert "sharding" not in xla_computation(g)(params, jnp.ones((6, 8)), scale=2.0).as_hlo_text()


# --- mistakes ---------------------------------------------------------------------------------


MATRIX = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"in_parts": P("data")},
            ArgumentsError,
            r"in_parts has P\('data',?\) for x; it must be a Part",
        ),
        (
            {"in_parts": 2},
            ArgumentsError,
            r"in_parts has 2 for x; it must be a PartitionSpec of num",
        ),
        ({"in_parts": P(2)}, ArgumentsError, r"for x, which has 2 dimensions"),
        ({"in_parts": P(-1, 2)}, ArgumentsError, r"for x; it must be a PartitionSpec of numbers"),
        (
            {"in_parts": (None, None)},
            ArgumentsError,
            r"in_parts is not a prefix of the tree of values",
        ),
        (
            {"out_parts": [P(2, 1)]},
            ArgumentsError,
            r"out_parts is not a prefix of the tree of values",
        ),
        (
            {"donate_argnums": 1},
            ArgumentsError,
            r"donate_argnums has 1, but the function has 1",
        ),
        ({"donate_argnums": 0, "static_argnums": 0}, ArgumentsError, r"argument 0 is static"),
        ({"static_argnums": 3}, ArgumentsError, r"static_argnums has 3"),
        ({"backend": "abacus"}, BackendError, r"does not lower for 'abacus'"),
    ],
)
def test_a_mistake_is_explained(options, error, message):
    with pytest.raises(error, match=message):
        xla_computation(lambda x: x, **options)(MATRIX)


def test_errors_of_the_function_and_of_lowering():
    def unbound(x):
        return jax.lax.psum(x, "k")

    for make in (xla_computation, make_jaxpr):
        with pytest.raises(UserFunctionError, match="unbound axis name: k"):
            make(unbound)(1.0)
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(UnsupportedError, match="HLO has no symbolic sizes"):
        xla_computation(f)(jax.ShapeDtypeStruct((n,), "float32"))
    with pytest.raises(UnsupportedError, match="because of eig at"):
        xla_computation(lambda x: jnp.linalg.eig(x), backend="tpu")(MATRIX)


# --- arguments by shape and dtype -----------------------------------------------------------------


class Tensor:
    """A tensor specification like those of PyTorch and TensorFlow."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


class TorchDtype:
    def __repr__(self):
        return "torch.bfloat16"


class TensorFlowDtype:
    as_numpy_dtype = np.int32


class Size(list):
    """A shape that is not a tuple."""


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        (np.dtype("float16"), "f16"),
        (np.int8, "i8"),
        ("float32", "f32"),
        (jnp.bfloat16, "bf16"),
        (TorchDtype(), "bf16"),
        (TensorFlowDtype(), "i32"),
        (jax.random.key(0).dtype, "key<fry>"),
    ],
)
def test_anything_with_shape_and_dtype_is_an_argument(dtype, short):
    for shape in ((2, 3), Size([2, 3]), np.array([2, 3])):
        given = {"tensor": Tensor(shape, dtype)}
        program = jaxprtool.trace(lambda tree: tree["tensor"], given)
        assert str(program.in_avals[0].str_short(short_dtypes=True)) == f"{short}[2,3]"
        assert str(make_jaxpr(lambda tree: tree["tensor"])(given)) == str(program.jaxpr)


def test_an_unknown_dtype_is_an_error():
    with pytest.raises(ArgumentsError, match="argument x is an array of dtype nonsense"):
        jaxprtool.trace(lambda x: x, Tensor((2,), "nonsense"))
    with pytest.raises(ArgumentsError, match="argument x"):
        jaxprtool.trace(lambda x: x, Tensor((None, 2), TensorFlowDtype()))
