"""The notation of JAX and NumPy classes whose values occur in parameters.

They are written as JAX prints them if that is complete: enumerations and records of dimension
numbers by their fields, dtypes and PRNG implementations by name. Devices are written by platform
and number; a mesh of devices that this machine lacks is read as an abstract mesh.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import (
    Encode,
    Unwritable,
    add_class,
    add_constructor,
    add_enum,
    add_late_record,
    add_name,
    add_record,
    add_singleton,
    call,
)
from jaxprtool.ir.basics.dtypes import array_dtypes
from jaxprtool.ir.programs.checkpoint_policies import POLICIES, POLICY_FACTORIES
from jaxprtool.ir.programs.static_leaf import LITERALS, Placeholder, StaticLeaf, description
from jaxprtool.ir.programs.trees import Opaque
from jaxprtool.ir.rewriting.callbacks import Stub, callback_name

# --- numbers and dtypes -------------------------------------------------------------------------


def number(value: np.generic | np.ndarray) -> str:
    """Return a NumPy scalar's value; its class and this text determine it bit for bit."""
    item = value.item()
    text = f"complex({item.real!r}, {item.imag!r})" if isinstance(item, complex) else repr(item)
    if item != item:  # the text of a NaN lacks its sign and payload
        plain = complex(float(repr(item.real)), float(repr(item.imag)))
        again = as_scalar(value.dtype, plain if isinstance(item, complex) else plain.real)
        if again.tobytes() != value.tobytes():
            return f"bits({hex(int.from_bytes(value.tobytes(), 'little'))})"
    return text


class Bits(int):
    """The bits of a NaN, which its value does not determine."""


def as_scalar(dtype: np.dtype, value: Any) -> np.generic:
    """Return a NumPy scalar of `dtype` from the output of `number`.

    Raises ValueError or OverflowError.
    """
    if isinstance(value, Bits):
        return np.frombuffer(value.to_bytes(dtype.itemsize, "little"), dtype)[0]
    if type(value) not in next(v for k, v in _ACCEPTED.items() if jnp.issubdtype(dtype, k)):
        raise ValueError(f"the value is not of dtype {dtype.name}")
    return dtype.type(value)


#: The Python types for scalars of each class; the first matching class applies.
_ACCEPTED = {
    np.bool_: (bool,),
    np.integer: (int,),
    np.floating: (int, float),
    np.generic: (int, float, complex),
}


def _dtype(dtype: np.dtype, encode: Encode) -> str:
    name = "float0" if dtype == jax.dtypes.float0 else dtype.name
    if array_dtypes().get(name) != dtype:
        raise Unwritable(f"the dtype {dtype}")
    return name


def _scalar_class(cls: type, encode: Encode) -> str:
    name = getattr(cls, "__name__", "")
    if issubclass(cls, np.generic) and getattr(np, name, None) is cls:
        return f"np.{name}"
    if array_dtypes().get(name) == getattr(cls, "dtype", None):
        return f"jnp.{name}"
    raise Unwritable(f"the class {name}")


add_class(np.dtype, _dtype)
add_class(np.generic, lambda v, encode: f"np.{v.dtype.name}({number(v)})", bits=Bits)
add_class(type, _scalar_class)
for _name, _value in array_dtypes().items():
    if _value.name == _name:  # skips its short name
        add_name(_name, _value)
        add_name(f"np.{_name}", _value.type)
        add_name(f"jnp.{_name}", getattr(jnp, f"{_name}_" if _name == "bool" else _name))
        add_constructor(f"np.{_name}", partial(as_scalar, _value))
add_name("float0", jax.dtypes.float0)


def _read_key_dtype(name: str) -> Any:
    return jaxcompat.KeyType(jaxcompat.key_implementations()[name])


add_class(
    jaxcompat.KeyType,
    lambda dtype, encode: f"key({jaxcompat.key_implementation(dtype).tag!r})",
    key=_read_key_dtype,
)
for _name, _value in jaxcompat.key_implementations().items():
    add_name(_name, _value)
    add_class(type(_value), lambda implementation, encode: implementation.tag)


# --- enumerations, records and names --------------------------------------------------------------

for _enum in (
    AxisType,
    jax.memory.Space,
    jaxcompat.ArrayCopySemantics,
    lax.AccuracyMode,
    lax.DotAlgorithmPreset,
    lax.FftType,
    lax.GatherScatterMode,
    lax.Precision,
    lax.RandomAlgorithm,
    lax.RoundingMethod,
):
    add_enum(_enum)

for _record, _fields in (
    (lax.ConvDimensionNumbers, None),
    (lax.GatherDimensionNumbers, None),
    (lax.ScatterDimensionNumbers, None),
    (
        lax.RaggedDotDimensionNumbers,
        ["dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions"],
    ),
    (lax.DotAlgorithm, None),
    (lax.Tolerance, ["atol", "rtol", "ulps"]),
    (AbstractDevice, None),
    (Layout, ["major_to_minor", "tiling", "sub_byte_element_size_in_bits"]),
    (Format, ["layout", "sharding"]),
    (jaxcompat.LinearSolveTuple, None),
    (jaxcompat.IndexSlice, None),
    (jaxcompat.NDIndexer, ["indices", "shape", "int_indexer_shape"]),
):
    add_record(_record, _fields)
add_late_record("jax.experimental.sparse.util", "SparseInfo")
add_late_record("jax.experimental.sparse.coo", "COOInfo")


def _high_primitive(value: Any, encode: Encode) -> str:
    """Return `Nonzero(aval('f32[8]'), size=3, ...)`: operand types, and the rest by name."""
    known = {"out_dtype": getattr(value.out_aval, "dtype", None), **value.params}
    named = inspect.signature(type(value)).parameters.values()
    given = {p.name: encode(known[p.name]) for p in named if p.kind is p.KEYWORD_ONLY}
    return call(type(value).__name__, *map(encode, value.in_avals), **given)


for _class in jaxcompat.HIGH_PRIMITIVES:
    add_class(_class, _high_primitive, **{_class.__name__: _class})
for _mapping in (jaxcompat.FrozenDict, OrderedDict):
    add_class(
        _mapping,
        lambda value, encode: call(type(value).__name__, encode(dict(value.items()))),
        **{_mapping.__name__: _mapping},
    )
add_singleton("UnspecifiedValue", jaxcompat.UNSPECIFIED)
add_singleton("Layout.AUTO", Layout.AUTO)
add_singleton("P.UNCONSTRAINED", PartitionSpec.UNCONSTRAINED)


# --- callbacks ------------------------------------------------------------------------------------


def _callback(held: Any, encode: Encode) -> str:
    raise Unwritable(f"a Python function ({callback_name(held)})")


def _read_stub(name: str, source: str = "") -> Stub:
    if not (isinstance(name, str) and isinstance(source, str)):
        raise ValueError("write a stub as stub('module.function', 'digest of its source')")
    return Stub(name, source)


def _written_stub(stub: Stub, encode: Encode) -> str:
    return f"stub({', '.join(encode(each) for each in (stub.name, stub.source) if each)})"


add_class(jaxcompat.FlatCallback, _callback)
add_class(Stub, _written_stub, stub=_read_stub)
for _name, _value in jaxcompat.DEBUG_EFFECTS.items():
    add_singleton(_name, _value)


# --- devices and shardings ------------------------------------------------------------------------


def _read_device(platform: str, number: int) -> jax.Device:
    if found := _devices(platform, [number]):
        return found[0]
    raise ValueError("this machine has no such device")


def _devices(platform: str, numbers: Sequence[int]) -> list[jax.Device] | None:
    """Return the devices of these numbers, or None if one is missing."""
    try:
        known = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # no such platform
        return None
    return [known[n] for n in numbers] if all(n in known for n in numbers) else None


def _spec(spec: PartitionSpec, encode: Encode) -> str:
    kind = getattr(spec, "unreduced_kind", None)
    if kind is not None and kind.name != "sum":
        raise Unwritable(f"a partition of kind {kind}")
    axes = {word: getattr(spec, word) for word in ("unreduced", "reduced")}
    named = {word: encode(frozenset(names)) for word, names in axes.items() if names}
    return call("P", *map(encode, spec.partitions), **named)


def _mesh(mesh: Mesh | AbstractMesh, encode: Encode) -> str:
    if isinstance(mesh, Mesh) and mesh.empty:
        return "Mesh((), ())"
    device, devices = mesh.abstract_mesh.abstract_device, None
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flatten())
        if len({each.platform for each in devices}) > 1:
            raise Unwritable("a mesh of devices of several platforms")
    return call(
        type(mesh).__name__,
        encode(mesh.axis_sizes),
        encode(mesh.axis_names),
        axis_types=encode(mesh.axis_types) if mesh.axis_names else None,
        abstract_device=None if device is None else encode(device),
        devices=None if devices is None else encode(tuple(each.id for each in devices)),
    )


def _read_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    *,
    axis_types: Any = None,
    abstract_device: AbstractDevice | None = None,
    devices: Sequence[int] = (),
) -> Mesh | AbstractMesh:
    if not axis_names:
        return Mesh(np.empty((), dtype=object), ())
    if abstract_device is None:
        raise ValueError("abstract_device, which describes the devices, is missing")
    # JAX aborts the process on a sharding over a mesh with axes but no devices.
    if not devices or len(devices) != math.prod(axis_sizes):
        raise ValueError(f"{len(devices)} devices do not fill a mesh of {tuple(axis_sizes)}")
    found = _devices(abstract_device.platform, devices)
    if found is None:
        return AbstractMesh(axis_sizes, axis_names, axis_types, abstract_device=abstract_device)
    return Mesh(np.array(found).reshape(axis_sizes), axis_names, axis_types)


def _memory_kind(sharding: jax.sharding.Sharding, encode: Encode) -> str | None:
    return None if sharding.memory_kind is None else encode(sharding.memory_kind)


def _named_sharding(sharding: NamedSharding, encode: Encode) -> str:
    parts = {"mesh": encode(sharding.mesh), "spec": encode(sharding.spec)}
    return call("NamedSharding", **parts, memory_kind=_memory_kind(sharding, encode))


def _single_device(sharding: SingleDeviceSharding, encode: Encode) -> str:
    (device,) = sharding.device_set
    kind = _memory_kind(sharding, encode)
    return call("SingleDeviceSharding", encode(device), memory_kind=kind)


add_class(jax.Device, lambda d, encode: f"device({d.platform!r}, {d.id})", device=_read_device)
add_class(PartitionSpec, _spec, P=PartitionSpec)
add_class(AbstractMesh, _mesh, AbstractMesh=AbstractMesh)
add_class(Mesh, _mesh, Mesh=_read_mesh)
add_class(NamedSharding, _named_sharding, NamedSharding=NamedSharding)
add_class(SingleDeviceSharding, _single_device, SingleDeviceSharding=SingleDeviceSharding)


# --- tree structures ------------------------------------------------------------------------------


class Leaf:
    """Represents a leaf in the structure of a tree."""


_LEAF = Leaf()


def _tree(tree: PyTreeDef, encode: Encode) -> str:
    return call("tree", encode(jax.tree.unflatten(tree, [_LEAF] * tree.num_leaves)))


def _opaque(node: Opaque, encode: Encode) -> str:
    children = dict(zip(node.keys, node.children, strict=True)) if node.keys else [*node.children]
    return call("Node", *map(encode, (node.type_name, children, *filter(None, [node.aux]))))


def _read_opaque(type_name: str, children: Any, aux: str = "") -> Opaque:
    keys = tuple(children) if isinstance(children, dict) else ()
    if not (
        isinstance(type_name, str)
        and isinstance(children, dict | list)
        and all(isinstance(key, str) for key in keys)
        and isinstance(aux, str)
    ):
        raise ValueError("write a node as Node('type', {'.key': child}, 'its data')")
    parts = children.values() if isinstance(children, dict) else children
    return Opaque(type_name, aux, keys, tuple(parts))


add_class(Opaque, _opaque, Node=_read_opaque)


def _held(held: StaticLeaf, encode: Encode) -> str:
    if type(held.value) in LITERALS:
        return f"Static({encode(held.value)})"
    return f"Object({description(held.value)!r})"


def _static(value: Any) -> StaticLeaf:
    if type(value) not in LITERALS:
        raise ValueError(
            "Static takes a number, a bool, a string or bytes; write other values as Object('...')"
        )
    return StaticLeaf(value)


def _object(text: str) -> StaticLeaf:
    if not isinstance(text, str):
        raise ValueError("write an object as Object('its repr')")
    return StaticLeaf(Placeholder(text))


add_class(StaticLeaf, _held, Static=_static, Object=_object)

# In JAX releases with a separate class for closed jaxprs, a parameter may contain an open one.
add_constructor("open", jaxcompat.open_jaxpr)
add_singleton("leaf", _LEAF)
add_class(PyTreeDef, _tree, tree=jax.tree.structure)


# --- policies of jax.checkpoint -------------------------------------------------------------------

# JAX's own policies are functions, written by name: `checkpoint_policies.dots_saveable` is one, and
# `checkpoint_policies.save_only_these_names('a', 'b')` returns one. Its arguments are recovered
# from the closure of the function or, in JAX 0.10, from the fields of an object.

Policy: TypeAlias = Callable[..., Any]


def _sample(make: Callable[..., Policy]) -> Policy:
    """Return a sample policy of `make`; each argument is the name of its parameter."""
    named = inspect.signature(make).parameters.values()
    args = [p.name for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return make(
        *args, **{p.name: [p.name] for p in named if p.kind is inspect.Parameter.KEYWORD_ONLY}
    )


def _family(policy: Policy) -> CodeType | type:
    """Return the common part of the policies of one function: their code, or their class."""
    return policy.__code__ if isinstance(policy, FunctionType) else type(policy)


_SAMPLES = {name: _sample(make) for name, make in POLICY_FACTORIES.items()}
_FAMILIES = {_family(sample): name for name, sample in _SAMPLES.items()}


def _arguments(policy: Policy) -> dict[str, Any]:
    """Return the arguments from which a policy was created; sets of names as sorted tuples."""
    if isinstance(policy, FunctionType):
        cells = zip(policy.__code__.co_freevars, policy.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells}
    else:
        found = vars(policy)
    sets = (set, frozenset)
    return {k: tuple(sorted(v)) if isinstance(v, sets) else v for k, v in found.items()}


def _policy(policy: Policy, encode: Encode) -> str:
    for name, known in POLICIES.items():
        if policy is known or (not isinstance(policy, FunctionType) and policy == known):
            return f"checkpoint_policies.{name}"
    name = _FAMILIES.get(_family(policy), "")
    if not name:
        raise Unwritable(f"a Python function ({getattr(policy, '__qualname__', policy)})")
    found = _arguments(policy)
    kinds = [p.kind for p in inspect.signature(POLICY_FACTORIES[name]).parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL]:
        items = [encode(item) for names in found.values() for item in names]
        return call(f"checkpoint_policies.{name}", *items)
    return call(f"checkpoint_policies.{name}", **{k: encode(v) for k, v in found.items()})


for _name, _value in POLICIES.items():
    add_name(f"checkpoint_policies.{_name}", _value)
    add_class(type(_value), _policy)
for _name, _factory in POLICY_FACTORIES.items():
    add_constructor(f"checkpoint_policies.{_name}", _factory)
    add_class(type(_SAMPLES[_name]), _policy)
