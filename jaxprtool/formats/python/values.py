"""Expressions for parameter values and literals of equations.

This module fills the table by Python type, `expressions.constructors`, for values in JAX programs:
dtypes, enums, dimension-number records, meshes and shardings, PRNG implementations, arrays. Other
values are live Python objects and cannot be written.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.extend.core.primitives
import jax.extend.random
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    Attribute,
    CallExpression,
    Expression,
    ModuleValue,
    Name,
    Prefix,
    PythonFunction,
    Subscript,
    call,
    constructors,
    late_constructors,
    method,
)
from jaxprtool.formats.python.naming import identifier
from jaxprtool.formats.python.symbols import dimension
from jaxprtool.ir.basics.dtypes import is_foreign
from jaxprtool.ir.core.equations import type_of
from jaxprtool.jaxcompat import ClosedJaxpr, Jaxpr, Primitive

# --- parameters -------------------------------------------------------------------------------


def dtype_name(dtype: Any) -> Expression:
    """Return a dtype as a function argument: `jnp.float32`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return _dtype(dtype)
    return Name("jnp.bool_" if dtype == np.bool_ else f"jnp.{np.dtype(dtype).name}")


def _dtype(dtype: Any) -> Expression:
    """Return a dtype as a parameter value."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        name = jaxcompat.key_implementation(dtype).name
        # Created outside of any trace, which would otherwise capture the key.
        made = Attribute(call("jax.random.key", 0, impl=name), "dtype")
        return ModuleValue(("key", name), "key_dtype", made)
    if is_foreign(dtype):
        raise TypeError(f"the element type {dtype} has no public name")
    if dtype == jax.dtypes.float0:
        return Name("jax.dtypes.float0")
    return call("jnp.dtype", np.dtype(dtype).name)


def _scalar_type(scalar_type: type) -> Expression:
    """Return a dtype that is the class of its scalars in a parameter."""
    if scalar_type.__module__ == "numpy":
        return Name(f"np.{scalar_type.__name__}")
    return dtype_name(np.dtype(scalar_type))


def _float(value: float) -> object:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        bits = np.float64(value).view(np.uint64)
        if bits == np.float64(math.nan).view(np.uint64):
            return Name("jnp.nan")
        return method(method(call("np.uint64", int(bits)), "view", Name("np.float64")), "item")
    return Name("jnp.inf") if value > 0 else Prefix("-", Name("jnp.inf"))


def _enum(member: enum.Enum) -> Expression:
    cls = type(member)
    if cls is jax.memory.Space:
        return Name(f"jax.memory.Space.{member.name}")
    for home, path in ((lax, "lax"), (lax.linalg, "lax.linalg"), (jax, "jax")):
        if getattr(home, cls.__name__, None) is cls:
            return Name(f"{path}.{cls.__name__}.{member.name}")
    raise TypeError(f"{cls.__qualname__} has no public name")


def _record(value: Any) -> Expression:
    cls = type(value)
    if getattr(lax, cls.__name__, None) is not cls:
        raise TypeError(f"{cls.__qualname__} has no public name")
    return _record_of(value, f"lax.{cls.__name__}")


def _record_of(value: Any, path: str) -> Expression:
    """Return a named tuple by the path of its class."""
    defaults = getattr(value, "_field_defaults", {})
    fields = value._asdict().items()
    said = {k: v for k, v in fields if k not in defaults or v != defaults[k]}
    return call(path, **said)


def _types_if_needed(mesh: Mesh | AbstractMesh) -> dict[str, object]:
    if all(t is AxisType.Auto for t in mesh.axis_types):
        return {}
    return {"axis_types": tuple(Name(f"jax.sharding.AxisType.{t.name}") for t in mesh.axis_types)}


def _mesh(mesh: Mesh) -> Expression:
    if mesh.empty:
        return call("jax.sharding.Mesh", call("np.empty", (), Name("np.object_")), ())
    flat = list(mesh.devices.flat)
    everything = call("jax.devices", flat[0].platform)
    ids = [device.id for device in flat]
    if ids == list(range(len(ids))):
        devices: object = Subscript(everything, (slice(None, len(ids)),))
    else:
        devices = [Subscript(everything, (i,)) for i in ids]
    return ModuleValue(mesh, "mesh", _mesh_of(devices, mesh))


def _mesh_of(devices: object, mesh: Mesh | AbstractMesh) -> Expression:
    # Also for one axis: with fewer devices than before, raise an error instead of using a smaller
    # mesh.
    array = method(call("np.array", devices), "reshape", *mesh.axis_sizes)
    return call("jax.sharding.Mesh", array, mesh.axis_names, **_types_if_needed(mesh))


def _abstract_mesh(mesh: AbstractMesh) -> Expression:
    abstract_device = getattr(mesh, "abstract_device", None)
    if abstract_device is not None and not mesh.empty:
        # The kind of devices can only be given by a mesh of such devices.
        everything = call("jax.devices", abstract_device.platform)
        devices = Subscript(everything, (slice(None, mesh.size),))
        return ModuleValue(mesh, "mesh", Attribute(_mesh_of(devices, mesh), "abstract_mesh"))
    made = call(
        "jax.sharding.AbstractMesh", mesh.axis_sizes, mesh.axis_names, **_types_if_needed(mesh)
    )
    return ModuleValue(mesh, "mesh", made)


def _partition_spec(spec: PartitionSpec) -> Expression:
    marks = {
        name: frozenset(getattr(spec, name))
        for name in ("reduced", "unreduced")
        if getattr(spec, name, None)
    }
    return call("P", *spec, **marks)


def _named_sharding(sharding: NamedSharding) -> Expression:
    memory_kind = sharding.memory_kind
    more = {} if memory_kind is None else {"memory_kind": memory_kind}
    return call("jax.sharding.NamedSharding", sharding.mesh, sharding.spec, **more)


def _single_device(sharding: SingleDeviceSharding) -> Expression:
    (device,) = sharding.device_set
    return call("jax.sharding.SingleDeviceSharding", device)


def _prng(impl: Any) -> Expression:
    for name in ("threefry_prng_impl", "rbg_prng_impl", "unsafe_rbg_prng_impl"):
        if getattr(jax.extend.random, name) is impl:
            return Name(f"rng.{name}")
    raise TypeError(f"the PRNG implementation {impl.name} has no public name")


def array(value: Any, namespace: str = "np") -> Expression:
    """Return a small array: `np.array([1.0, 2.0], np.float32)`, or from its bits if it must be."""
    value = np.asarray(value)
    if not value.size:
        return call(f"{namespace}.zeros", value.shape, dtype_name(value.dtype))
    if not _same_bits(np.array(nested(value), value.dtype), value):
        made = _from_bits(value)
        return call("jnp.asarray", made) if namespace == "jnp" else made
    if namespace == "jnp":
        return call("jnp.array", nested(value), dtype_name(value.dtype))
    return call("np.array", nested(value), _numpy_dtype(value.dtype))


def _from_bits(value: np.ndarray) -> Expression:
    """Return an array by the bits of its numbers: NaNs differ in bits that no text shows."""
    # A complex number is two words.
    size = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(value).reshape(-1).view(f"u{size}")
    listed = call("np.array", words.tolist(), Name(f"np.{words.dtype.name}"))
    made = method(listed, "view", _numpy_dtype(value.dtype))
    return made if value.ndim == 1 else method(made, "reshape", value.shape)


def _word(scalar: Any) -> Expression:
    """Return a NumPy scalar by its bits: `np.uint16(32705).view(jnp.bfloat16)`."""
    word = np.asarray(scalar).view(f"u{scalar.dtype.itemsize}")[()]
    made = call(f"np.{word.dtype.name}", int(word))
    return method(made, "view", _numpy_dtype(scalar.dtype))


def _numpy_dtype(dtype: np.dtype) -> Expression:
    """Return a dtype for a function of NumPy: `np.float32`, `jnp.bfloat16`."""
    module = "np" if dtype.type.__module__ == "numpy" else "jnp"
    return Name("np.bool_" if dtype == np.bool_ else f"{module}.{dtype.name}")


def nested(value: np.ndarray) -> Any:
    """Return the array's elements in nested lists, as the shortest exact numbers."""
    if value.ndim:
        return [nested(part) for part in value]
    return number(value[()])


_PRNG_IMPLEMENTATION = type(next(iter(jaxcompat.key_implementations().values())))


def primitive(value: Primitive) -> Expression:
    """Return a primitive by its public name; TypeError if it has none."""
    for path, home in (
        ("primitives", jax.extend.core.primitives),
        ("lax", lax),
        ("lax.linalg", lax.linalg),
        ("rng", jax.extend.random),
        *_sparse(),
    ):
        for name in (f"{value.name.replace('-', '_')}_p", *_OTHER_NAMES):
            if vars(home).get(name) is value:
                return Name(f"{path}.{name}")
    raise TypeError(f"the primitive {value.name} is not public")


def _sparse() -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules of JAX's sparse matrices if they are imported."""
    for path in ("sparse", "sparse.bcoo"):
        if module := sys.modules.get(f"jax.experimental.{path}"):
            yield path, module


#: Primitives with a different public name.
_OTHER_NAMES = ("linear_solve_p", "remat_p", "add_jaxvals_p")


def shape_of(aval: Any) -> Expression:
    """Return a type as an abstract argument; raise TypeError if it is not a plain array's."""
    if not hasattr(aval, "dtype"):
        raise TypeError(f"the type {type_of(aval)} has no public name")
    weak = {"weak_type": True} if aval.weak_type else {}
    return call("jax.ShapeDtypeStruct", aval.shape, dtype_name(aval.dtype), **weak)


def _jaxpr(jaxpr: Any) -> Expression:
    """Return a jaxpr as the trace of a local function, with `.jaxpr` for an open one."""
    closed = jaxcompat.close_jaxpr(jaxpr)
    if closed.consts:
        raise TypeError("a jaxpr with constants cannot be written")
    name = identifier(jaxcompat.open_jaxpr(closed).debug_info.func_name)
    results = range(len(closed.outvars))
    function = PythonFunction(closed, name, tuple(range(len(closed.invars))), tuple(results))
    shapes = [shape_of(v.aval) for v in closed.invars]
    made = CallExpression(CallExpression(Name("jax.make_jaxpr"), (function,)), tuple(shapes))
    return made if jaxpr is closed else Attribute(made, "jaxpr")


late_constructors.update(
    {
        f"jax.experimental.{path}": partial(_record_of, path=path)
        for path in ("sparse.util.SparseInfo", "sparse.coo.COOInfo")
    }
)
constructors.update(
    {
        # Before `float` and `complex`, of which f64 and c128 numbers are instances.
        np.floating: lambda value: _typed(value, number(value)),
        np.complexfloating: lambda value: _typed(value, number(value)),
        float: _float,
        complex: lambda value: call("complex", value.real, value.imag),
        np.bool_: bool,
        np.integer: int,
        jaxcompat.SymbolicDimension: dimension,
        np.dtype: _dtype,
        type: _scalar_type,
        jaxcompat.KeyType: _dtype,
        enum.Enum: _enum,
        lax.GatherDimensionNumbers: _record,
        lax.ScatterDimensionNumbers: _record,
        lax.ConvDimensionNumbers: _record,
        lax.RaggedDotDimensionNumbers: _record,
        Mesh: _mesh,
        AbstractMesh: _abstract_mesh,
        PartitionSpec: _partition_spec,
        NamedSharding: _named_sharding,
        SingleDeviceSharding: _single_device,
        jax.Device: lambda value: Subscript(call("jax.devices", value.platform), (value.id,)),
        _PRNG_IMPLEMENTATION: _prng,
        frozenset: lambda value: call("frozenset", *([sorted(value)] if value else ())),
        slice: lambda value: call("slice", value.start, value.stop, value.step),
        np.ndarray: array,
        np.generic: _word,  # of another type, such as bfloat16
        Primitive: primitive,
        ClosedJaxpr: _jaxpr,
        Jaxpr: _jaxpr,
    }
)


# --- literals ---------------------------------------------------------------------------------


def number(value: Any) -> Any:
    """Return the Python number with the shortest text that reproduces a NumPy scalar's bits."""
    dtype = value.dtype
    if dtype == np.bool_:
        return bool(value)
    if np.issubdtype(dtype, np.integer) or jax.dtypes.issubdtype(dtype, np.integer):
        return int(value)
    if np.issubdtype(dtype, np.complexfloating):
        return complex(number(value.real), number(value.imag))
    if value != value:
        return math.nan  # whatever its bits: `_typed` and `array` compare them
    short = float(str(value))
    with np.errstate(over="ignore"):
        return short if _same_bits(dtype.type(short), value) else float(value)


def _same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@dataclass(frozen=True)
class LiteralText:
    """A literal operand: as a plain Python number, if possible, and with its type.

    `key` distinguishes literals that a rule may treat differently.
    """

    plain: Any
    typed: Any
    key: tuple[object, ...]

    def of(self, typed: bool) -> object:
        """Return the plain number, or the expression with the type."""
        return self.typed if typed else self.plain


def literal(atom: Any) -> LiteralText:
    """Return the texts of a jaxpr's literal."""
    aval, value = atom.aval, atom.val
    if aval.dtype == jax.dtypes.float0:
        nothing = call("np.zeros", aval.shape, Name("jax.dtypes.float0"))
        return LiteralText(nothing, nothing, ("float0",))
    weak = bool(getattr(aval, "weak_type", False))
    scalar = np.asarray(value, aval.dtype)[()]
    bare = number(scalar) if not weak else _python_number(value, scalar)
    special = bare in (0, 1) if not isinstance(bare, complex) else False
    wide = isinstance(bare, int) and not -(2**31) <= bare < 2**31
    key = (aval.dtype, weak, bare if special else None, str(bare) if wide else None)
    exact = _same_bits(np.asarray(bare).astype(aval.dtype), scalar)
    typed = bare if weak and exact else _typed(scalar, bare)
    return LiteralText(bare if exact else typed, typed, (*key, exact))


def _python_number(value: Any, scalar: Any) -> Any:
    """Return a weakly typed literal with all digits of its Python number."""
    scalar_types: tuple[Any, ...] = (bool, int, float, complex)
    known = (scalar_type(value) for scalar_type in scalar_types if isinstance(value, scalar_type))
    return next(known, None) if isinstance(value, scalar_types) else number(scalar)


def _typed(scalar: Any, bare: Any) -> Any:
    """Return a NumPy scalar: `np.float32(0.5)`, or from its bits if it must be."""
    dtype = scalar.dtype
    if not _same_bits(np.asarray(bare).astype(dtype), scalar):
        if dtype.kind == "c":
            return Subscript(_from_bits(np.asarray(scalar)[None]), (0,))
        return _word(scalar)
    if dtype.type.__module__ == "numpy":
        return call("np.bool_" if dtype == np.bool_ else f"np.{dtype.name}", bare)
    return call("np.array", bare, Name(f"jnp.{dtype.name}"))
