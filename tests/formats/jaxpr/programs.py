"""Small programs with features of users' programs that JAX's own test programs lack."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.custom_derivatives import linear_call
from jax.experimental import xla_metadata
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxprtool import nest, sow, variable
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace

PROGRAMS: dict[str, Callable[[], Program]] = {}

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add to PROGRAMS the result of `function`, or the trace of a function and arguments."""

    def traced() -> Program:
        made = function()
        return made if isinstance(made, Program) else trace(*made)

    PROGRAMS[function.__name__] = traced
    return function


def _mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 1), ("x", "y"), axis_types=(kind, kind))


# --- functions that JAX itself defines ------------------------------------------------------------


def _remat(policy: Any) -> tuple[Any, Any]:
    layer = jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y @ y.T) @ y), policy=policy)
    return jax.grad(lambda y: layer(layer(y)).sum()), X


_POLICIES = jax.checkpoint_policies
for _name, _policy in {
    "everything": _POLICIES.everything_saveable,
    "dots": _POLICIES.dots_with_no_batch_dims_saveable,
    "names": _POLICIES.save_only_these_names("b", "a"),
    "other_names": _POLICIES.save_any_names_but_these("a"),
    "both": _POLICIES.save_from_both_policies(
        _POLICIES.dots_saveable, _POLICIES.save_only_these_names("a")
    ),
    "offload": _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}.items():
    PROGRAMS[f"remat_{_name}"] = lambda policy=_policy: trace(*_remat(policy))


@program
def linear_calls():
    def f(x, y):
        return linear_call(lambda r, v: v * r, lambda r, t: t * r * 2, x, y)

    return lambda x, y: (f(x, y), jax.linear_transpose(partial(f, x), y)(y)), X, X


# --- --- parameters of equations ------------------------------------------------------------------


@program
def settings():
    def f(x):
        with jax.threefry_partitionable(False):
            x = x + 1
        with xla_metadata.set_xla_metadata(group="first", depth=2):
            x = jnp.sin(x)
        return x * 2

    return f, X


@program
def computed_elsewhere():
    if jax.__version_info__ < (0, 11):
        return compute_on("device_host")(jax.jit(jnp.sin)), X
    space = jax.memory.Space.Device
    return compute_on(jnp.sin, compute_type="device_host", out_memory_spaces=space), X


# --- meshes and shardings -------------------------------------------------------------------------


@program
def explicit_sharding():
    mesh = _mesh(AxisType.Explicit)
    argument = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, _P("x")))

    def f(x):
        return jnp.sin(x) @ jax.reshard(x, NamedSharding(mesh, _P())).T, x[:, 0]

    return f, argument


_P = PartitionSpec


@program
def set_mesh():
    mesh = _mesh(AxisType.Explicit)
    argument = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, _P("x")))

    def f(x):
        return jnp.sin(x) @ jax.reshard(x, _P()).T, jnp.arange(3)

    with jax.set_mesh(mesh):
        return trace(f, argument)


@program
def sharded_bodies():
    mesh = _mesh(AxisType.Auto)

    @partial(jax.shard_map, mesh=mesh, in_specs=_P("x"), out_specs=_P("x", "y"))
    def f(x):
        return jnp.sin(x) + lax.psum(jax.jit(jnp.cos)(x), "x") * lax.axis_index("y")

    return jax.value_and_grad(lambda x: f(x).sum()), X


@program
def jit_options():
    mesh = _mesh(AxisType.Auto)
    sharding = NamedSharding(mesh, _P("x"))
    jitted = jax.jit(
        lambda x, y: (x * y, y),
        donate_argnums=0,
        keep_unused=True,
        in_shardings=(sharding, None),
        out_shardings=(NamedSharding(mesh, _P(None, "x")), None),
    )
    return lambda x: jitted(x[:, :2], 2.0), X


@program
def constrained():
    mesh = _mesh(AxisType.Auto)

    def f(x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, _P("x", _P.UNCONSTRAINED)))
        return jax.device_put(x, jax.memory.Space.Host), jax.device_put(x, jax.devices()[1])

    return f, X


# --- types ----------------------------------------------------------------------------------------


@program
def references():
    def f(x):
        ref = jax.new_ref(x)
        ref[0] = ref[1] * 2
        ref[1:3, 0] += 1.0

        def body(i, carry):
            ref[i] = ref[i] + carry.sum()
            return carry * 2

        carry = lax.fori_loop(0, 3, body, x[0])
        return ref[...], carry, ref[jnp.array([0, 1])]

    return f, X


@program
def other_generators():
    keys = jax.random.key(3, impl="rbg"), jax.random.key(4, impl="unsafe_rbg")
    fixed = jax.random.split(jax.random.key(5), 3)

    def f(a, b):
        return jax.random.normal(a, (2,)), jax.random.split(b), jax.random.bits(fixed[1]), fixed

    return f, *keys


@program
def small_types():
    def f(x):
        names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4", "int2")
        return [x.astype(name) for name in names], jnp.float8_e5m2(0.3) * x.astype("float8_e5m2")

    return f, X


@program
def no_tangents():
    def f(x):
        out, tangent = jax.jvp(lambda n: n * 2, (x,), (np.zeros(x.shape, jax.dtypes.float0),))
        return out, jnp.zeros(tangent.shape)

    return f, np.arange(3)


@program
def symbolic_dimensions():
    n, m = export.symbolic_shape("n, 2*m", constraints=["n >= 8", "m >= 2"])

    def f(x):
        rows, columns = x.shape
        joined = jnp.concatenate([x, x]).sum(0) + jnp.arange(columns)
        return joined, jnp.broadcast_to(x[0], (rows * 2 + 1, columns // 2, columns))

    return f, jax.ShapeDtypeStruct((n, m), jnp.float32)


@program
def weak_types():
    return lambda x, y: (x * 2.0, y + 1, jnp.where(x > 0.1, y, 1j)), 3.0, 4


@program
def float_extremes():
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    return lambda x: (x + bits.view(np.float32), *(x * y for y in bits.view(np.float32))), X[0, 0]


# --- primitives -----------------------------------------------------------------------------------


@program
def foreign_call():
    call = jax.ffi.ffi_call(
        "tests.nothing", jax.ShapeDtypeStruct((4, 3), jnp.float32), has_side_effect=True
    )
    return lambda x: call(x, count=np.int32(3), label="a b", flags={"on": True}), X


@program
def printed():
    def f(x):
        jax.debug.print("x is {} and {y}", x, y=x.sum(), ordered=True)
        return x

    return f, X


@program
def precise():
    def f(x):
        preset = lax.DotAlgorithmPreset.BF16_BF16_F32
        products = lax.dot(x, x.T, precision=preset), lax.dot(x, x.T, precision="highest")
        return (
            products,
            lax.exp(x, accuracy=lax.Tolerance(1e-3, 0.0, 2)),
            lax.optimization_barrier(x),
        )

    return f, X


@program
def ragged():
    return lambda x: lax.ragged_dot(x, jnp.ones((2, 3, 5)), jnp.array([1, 3])), X


@program
def composites():
    @partial(lax.composite, name="my.thing", version=2)
    def thing(x, *, scale, label):
        return x * scale

    return lambda x: thing(x, scale=np.float32(2), label="a"), X


@program
def odd_names():
    def f(x):
        inner = lambda y: jnp.sin(y) + 1  # noqa: E731
        inner.__name__ = "lambda"
        other = lambda y: jnp.cos(y) * y  # noqa: E731
        other.__name__ = "no word, 'quoted'\nü"
        return [jax.jit(g)(jax.jit(g)(x)) for g in (inner, other, jax.jit(lambda y: y * 2))]

    return f, X


@program
def words_and_bodies():
    def i(x):
        return lax.psum(jnp.sin(x), "i")

    jitted = jax.jit(i)
    return lambda x: jax.vmap(lambda y: jitted(y) + jitted(y) + lax.axis_index("i"), axis_name="i")(
        x
    ), X


@program
def sown_values():
    def layer(key, x):
        params = {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)}
        params = variable(params, name="params")
        return sow(x @ params["w"] + params["b"], tag="seen", name="y", mode="append")

    def f(key, x):
        x = nest(layer, scope="first")(key, x), (x, None, [x])
        return sow(x, tag="no word", name="True", mode="clobber", key=(key, key))

    return f, jax.random.key(0), X
