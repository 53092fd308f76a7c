"""The classes of JAX and NumPy whose values parameters hold, each with its spelling.

They are spelled as JAX prints them where that says all: enumerations and records of dimension
numbers by their fields, dtypes and random number generators by name. Devices are spelled by
platform and number; a mesh of devices that this machine does not have is read as an abstract one.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

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

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import (
    Encode,
    Unwritable,
    add_enum,
    add_kind,
    add_maker,
    add_name,
    add_record,
)
from jaxprtool.ir.callbacks import Stub, callback_name
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.held import LITERALS, Held, StandIn, description
from jaxprtool.ir.trees import Opaque

# --- numbers and dtypes -------------------------------------------------------------------------


def number(value: Any) -> str:
    """A NumPy scalar's value, so that its class and this text tell it to the bit."""
    item = value.item()
    text = f"complex({item.real!r}, {item.imag!r})" if isinstance(item, complex) else repr(item)
    if item != item:  # a NaN has a sign and a payload, and its text has neither
        plain = complex(float(repr(item.real)), float(repr(item.imag)))
        again = as_scalar(value.dtype, plain if isinstance(item, complex) else plain.real)
        if again.tobytes() != value.tobytes():
            return f"bits({hex(int.from_bytes(value.tobytes(), 'little'))})"
    return text


class Bits(int):
    """The bits of a number whose value does not tell them: a NaN."""


def _scalar(value: Any, encode: Encode) -> str:
    return f"np.{value.dtype.name}({number(value)})"


def as_scalar(dtype: Any, value: Any) -> Any:
    """A NumPy scalar of `dtype` from what `number` has spelled.

    Raises ValueError or OverflowError.
    """
    if isinstance(value, Bits):
        return np.frombuffer(value.to_bytes(dtype.itemsize, "little"), dtype)[0]
    if type(value) not in _NUMBERS[_kind(dtype)]:
        raise ValueError(f"this is no {dtype.name}")
    return dtype.type(value)


_NUMBERS = {"bool": (bool,), "int": (int,), "float": (int, float), "complex": (int, float, complex)}


def _kind(dtype: Any) -> str:
    kinds = {"bool": np.bool_, "int": np.integer, "float": np.floating}
    return next((k for k, cls in kinds.items() if jnp.issubdtype(dtype, cls)), "complex")


def _dtype(dtype: Any, encode: Encode) -> str:
    name = "float0" if dtype == jax.dtypes.float0 else dtype.name
    if array_dtypes().get(name) != dtype:
        raise Unwritable(f"the dtype {dtype}")
    return name


def _scalar_class(cls: Any, encode: Encode) -> str:
    name = getattr(cls, "__name__", "")
    if issubclass(cls, np.generic) and getattr(np, name, None) is cls:
        return f"np.{name}"
    if array_dtypes().get(name) == getattr(cls, "dtype", None):
        return f"jnp.{name}"
    raise Unwritable(f"the class {name}")


add_kind(np.dtype, _dtype)
add_kind(np.generic, _scalar, bits=Bits)
add_kind(type, _scalar_class)
for _name, _value in array_dtypes().items():
    if _value.name == _name:  # not its short name
        add_name(_name, _value)
        add_name(f"np.{_name}", _value.type)
        add_name(f"jnp.{_name}", getattr(jnp, f"{_name}_" if _name == "bool" else _name))
        add_maker(f"np.{_name}", partial(as_scalar, _value))
add_name("float0", jax.dtypes.float0)


def _key_dtype(dtype: Any, encode: Encode) -> str:
    return f"key({jaxcompat.key_implementation(dtype).tag!r})"


def _read_key_dtype(name: str) -> Any:
    return jaxcompat.key_type(jaxcompat.key_implementations()[name])


add_kind(jaxcompat.KeyType, _key_dtype, key=_read_key_dtype)
for _name, _value in jaxcompat.key_implementations().items():
    add_name(_name, _value)
    add_kind(type(_value), lambda implementation, encode: implementation.tag)


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

add_record(lax.ConvDimensionNumbers)
add_record(lax.GatherDimensionNumbers)
add_record(lax.ScatterDimensionNumbers)
add_record(
    lax.RaggedDotDimensionNumbers,
    ["dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions"],
)
add_record(lax.DotAlgorithm)
add_record(lax.Tolerance, ["atol", "rtol", "ulps"])
add_record(AbstractDevice)
add_record(Layout, ["major_to_minor", "tiling", "sub_byte_element_size_in_bits"])
add_record(Format, ["layout", "sharding"])
add_record(jaxcompat.LinearSolveTuple)
add_record(jaxcompat.IndexSlice)
add_record(jaxcompat.NDIndexer, ["indices", "shape", "int_indexer_shape"])


def _frozen_dict(value: Any, encode: Encode) -> str:
    return f"FrozenDict({encode(dict(value.items()))})"


def _high_primitive(value: Any, encode: Encode) -> str:
    """`Nonzero(aval('f32[8]'), size=3, ...)`: the types of its operands, and the rest by name."""
    known = {"out_dtype": getattr(value.out_aval, "dtype", None), **value.params}
    named = inspect.signature(type(value)).parameters.values()
    given = [f"{p.name}={encode(known[p.name])}" for p in named if p.kind is p.KEYWORD_ONLY]
    return f"{type(value).__name__}({', '.join([*map(encode, value.in_avals), *given])})"


for _class in jaxcompat.HIGH_PRIMITIVES:
    add_kind(_class, _high_primitive, **{_class.__name__: _class})
add_kind(jaxcompat.FrozenDict, _frozen_dict, FrozenDict=jaxcompat.FrozenDict)
add_name("UnspecifiedValue", jaxcompat.UNSPECIFIED)
add_kind(type(jaxcompat.UNSPECIFIED), lambda value, encode: "UnspecifiedValue")
add_name("Layout.AUTO", Layout.AUTO)
add_kind(type(Layout.AUTO), lambda value, encode: "Layout.AUTO")
add_name("P.UNCONSTRAINED", PartitionSpec.UNCONSTRAINED)
add_kind(type(PartitionSpec.UNCONSTRAINED), lambda value, encode: "P.UNCONSTRAINED")


# --- callbacks ------------------------------------------------------------------------------------


def _callback(held: Any, encode: Encode) -> str:
    raise Unwritable(f"a Python function ({callback_name(held)})")


def _read_stub(name: str) -> Stub:
    if not isinstance(name, str):
        raise ValueError("a stub is written stub('module.function')")
    return Stub(name)


add_kind(jaxcompat.FlatCallback, _callback)
add_kind(Stub, lambda stub, encode: f"stub({encode(stub.name)})", stub=_read_stub)
for _name, _value in jaxcompat.DEBUG_EFFECTS.items():
    add_name(_name, _value)
    add_kind(type(_value), lambda effect, encode: type(effect).__name__)


# --- devices and shardings ------------------------------------------------------------------------


def _device(device: jax.Device, encode: Encode) -> str:
    return f"device({device.platform!r}, {device.id})"


def _read_device(platform: str, number: int) -> jax.Device:
    found = _devices(platform, [number])
    if found is None:
        raise ValueError("this machine has no such device")
    return found[0]


def _devices(platform: str, numbers: Sequence[int]) -> list[jax.Device] | None:
    """The devices of these numbers, or None if one is not there."""
    try:
        known = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # no such platform
        return None
    return [known[n] for n in numbers] if all(n in known for n in numbers) else None


def _spec(spec: PartitionSpec, encode: Encode) -> str:
    items = list(map(encode, spec.partitions))
    for word in ("unreduced", "reduced"):
        axes = getattr(spec, word)
        items += [f"{word}={encode(frozenset(axes))}"] if axes else []
    kind = getattr(spec, "unreduced_kind", None)
    if kind is not None and kind.name != "sum":
        raise Unwritable(f"a partition of kind {kind}")
    return f"P({', '.join(items)})"


def _axes(mesh: Mesh | AbstractMesh, device: Any, encode: Encode) -> str:
    items = [encode(mesh.axis_sizes), encode(mesh.axis_names)]
    items += [f"axis_types={encode(mesh.axis_types)}"] if mesh.axis_names else []
    items += [] if device is None else [f"abstract_device={encode(device)}"]
    return ", ".join(items)


def _abstract_mesh(mesh: AbstractMesh, encode: Encode) -> str:
    return f"AbstractMesh({_axes(mesh, mesh.abstract_device, encode)})"


def _mesh(mesh: Mesh, encode: Encode) -> str:
    if mesh.empty:
        return "Mesh((), ())"
    devices = list(mesh.devices.flatten())
    if len({device.platform for device in devices}) > 1:
        raise Unwritable("a mesh of devices of several platforms")
    axes = _axes(mesh, mesh.abstract_mesh.abstract_device, encode)
    return f"Mesh({axes}, devices={encode(tuple(device.id for device in devices))})"


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
        raise ValueError("abstract_device is missing, which says what the devices are")
    # JAX aborts the process for a sharding over a mesh of axes without devices.
    if not devices or len(devices) != math.prod(axis_sizes):
        raise ValueError(f"{len(devices)} devices do not fill a mesh of {tuple(axis_sizes)}")
    found = _devices(abstract_device.platform, devices)
    if found is None:
        return AbstractMesh(axis_sizes, axis_names, axis_types, abstract_device=abstract_device)
    return Mesh(np.array(found).reshape(axis_sizes), axis_names, axis_types)


def _named_sharding(sharding: NamedSharding, encode: Encode) -> str:
    kind = sharding.memory_kind
    known = "" if kind is None else f", memory_kind={encode(kind)}"
    return f"NamedSharding(mesh={encode(sharding.mesh)}, spec={encode(sharding.spec)}{known})"


def _single_device(sharding: SingleDeviceSharding, encode: Encode) -> str:
    (device,) = sharding.device_set
    kind = sharding.memory_kind
    known = "" if kind is None else f", memory_kind={encode(kind)}"
    return f"SingleDeviceSharding({encode(device)}{known})"


add_kind(jax.Device, _device, device=_read_device)
add_kind(PartitionSpec, _spec, P=PartitionSpec)
add_kind(AbstractMesh, _abstract_mesh, AbstractMesh=AbstractMesh)
add_kind(Mesh, _mesh, Mesh=_read_mesh)
add_kind(NamedSharding, _named_sharding, NamedSharding=NamedSharding)
add_kind(SingleDeviceSharding, _single_device, SingleDeviceSharding=SingleDeviceSharding)


# --- tree structures ------------------------------------------------------------------------------


def _ordered(value: OrderedDict, encode: Encode) -> str:
    return f"OrderedDict({encode(dict(value))})"


add_kind(OrderedDict, _ordered, OrderedDict=OrderedDict)


class Leaf:
    """Stands for a leaf in the structure of a tree."""


_LEAF = Leaf()


def _tree(tree: Any, encode: Encode) -> str:
    return f"tree({encode(jax.tree.unflatten(tree, [_LEAF] * tree.num_leaves))})"


def _opaque(node: Opaque, encode: Encode) -> str:
    children = node.children
    held = encode(dict(zip(node.keys, children, strict=True)) if node.keys else list(children))
    aux = f", {node.aux!r}" if node.aux else ""
    return f"Node({node.type_name!r}, {held}{aux})"


def _read_opaque(type_name: str, children: Any, aux: str = "") -> Opaque:
    keys = tuple(children) if isinstance(children, dict) else ()
    if not (
        isinstance(type_name, str)
        and isinstance(children, dict | list)
        and all(isinstance(key, str) for key in keys)
        and isinstance(aux, str)
    ):
        raise ValueError("a node is written Node('type', {'.key': child}, 'what is its own')")
    parts = children.values() if isinstance(children, dict) else children
    return Opaque(type_name, aux, keys, tuple(parts))


add_kind(Opaque, _opaque, Node=_read_opaque)


def _held(held: Held, encode: Encode) -> str:
    if type(held.value) in LITERALS:
        return f"Static({encode(held.value)})"
    return f"Object({description(held.value)!r})"


def _static(value: Any) -> Held:
    if type(value) not in LITERALS:
        raise ValueError("static is a number, a bool, a text or bytes; else it is an Object('...')")
    return Held(value)


def _object(text: str) -> Held:
    if not isinstance(text, str):
        raise ValueError("an object is written Object('how it prints')")
    return Held(StandIn(text))


add_kind(Held, _held, Static=_static, Object=_object)

# Where JAX has a class of its own for closed jaxprs, a parameter may hold one that is open.
add_maker("open", jaxcompat.open_jaxpr)
add_name("leaf", _LEAF)
add_kind(Leaf, lambda leaf, encode: "leaf")
add_kind(jax.tree_util.PyTreeDef, _tree, tree=jax.tree.structure)
