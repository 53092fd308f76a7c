"""Writing and reading of types and parameter values, with JAX's and NumPy's classes.

A text is a Python expression of displays, names and calls. A fixed table defines its value: nothing
is imported or evaluated. `encode` and `decode` are inverses:

    encode((1, None, np.dtype("float32")))       (1, None, float32)
    encode(GatherScatterMode.CLIP)               GatherScatterMode.CLIP
    encode("relu"), encode(("i",))               relu, ('i',)

A string is a bare word only if it is the whole parameter, as in JAX's listing, and no name of the
table equals it; `decode` reads an unknown bare word as a string.

The table is open: a plug-in whose primitives have parameters of new classes adds them with
`add_name`, `add_enum`, `add_record`, or the more general `add_class`. JAX's classes are added by
`jax_values`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import keyword
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
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
from jaxprtool.ir.custom_rules import POLICIES, POLICY_FACTORIES, Stub, callback_name
from jaxprtool.ir.dtypes import array_dtypes, is_foreign
from jaxprtool.ir.equations import Record, equations, fields_of
from jaxprtool.ir.notation import types
from jaxprtool.ir.notation.expressions import WhitelistReader
from jaxprtool.ir.trees import LITERALS, Opaque, Placeholder, StaticLeaf, description
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, Jaxpr

# --- values ---------------------------------------------------------------------------------------
# Writing and reading of parameter values in a `.jaxpr` file.


class Unwritable(Exception):
    """A value that cannot be written; the message describes it, as in `a Python function (f)`."""


class Unreadable(ValueError):
    """An invalid expression; `node` is the invalid part."""

    def __init__(self, node: ast.expr, message: str):
        super().__init__(message)
        self.node = node


#: Encodes a value inside another one.
Encode: TypeAlias = Callable[[Any], str]
#: Encodes a value of one class, given the encoder of inner values.
Encoder: TypeAlias = Callable[[Any, Encode], str]

#: The encoder of each class. It applies to subclasses too, except for builtin classes: a subclass
#: of tuple that is not in the table cannot be written.
ENCODERS: dict[type, Encoder] = {}

#: Encoders of classes that may not be imported, by module and name.
_LATE: dict[tuple[str, str], Encoder] = {}

#: The functions behind `Name(...)`, called with decoded arguments. Since a file may be edited by
#: anyone, they must raise an exception for invalid arguments and have no side effects.
CONSTRUCTORS: dict[str, Callable[..., Any]] = {}

#: The values of names and dotted names.
NAMES: dict[str, Any] = {}


# --- adding to the table ------------------------------------------------------------------------


def add_class(cls: type, encode: Encoder, **constructors: Callable[..., Any]) -> None:
    """Write values of `cls` by `encode(value, encode_inner)`, as calls of `constructors`.

    Args:
        cls: The class. Unless it is a builtin class, its subclasses are written the same way.
        encode: Returns the text of a value, given a function that returns the text of an inner
            value. It raises `Unwritable` for a value that it cannot write.
        **constructors: The functions that read the text, by the name that is called in it. They
            must raise an exception for invalid arguments, and have no side effects.
    """
    ENCODERS[cls] = encode
    CONSTRUCTORS.update(constructors)


def add_name(name: str, value: Any) -> None:
    """Read `name` as `value`, and write `value` as `name` unless its class has an encoder."""
    NAMES[name] = value


def add_constructor(name: str, make: Callable[..., Any]) -> None:
    """Read `name(...)` as the result of `make` on the arguments."""
    CONSTRUCTORS[name] = make


def add_singleton(name: str, value: Any) -> None:
    """Read `name` as `value`, the only one of its class, and write it so."""
    NAMES[name] = value
    ENCODERS[type(value)] = lambda value, encode: name


def add_enum(cls: type[Enum]) -> None:
    """Write and read the members of an enumeration as `Class.MEMBER`."""
    NAMES.update((f"{cls.__name__}.{member.name}", member) for member in cls)
    ENCODERS[cls] = lambda member, encode: f"{cls.__name__}.{member.name}"


def add_record(cls: Any, fields: Sequence[str] | None = None) -> None:
    """Write and read values of `cls` as `Class(field=value, ...)`.

    Args:
        cls: The class, which is called with the fields by name.
        fields: The names of the fields; by default those of a named tuple or a dataclass.
    """
    if fields is None:
        fields = getattr(cls, "_fields", None) or [f.name for f in dataclasses.fields(cls)]
    names = tuple(fields)

    def encode_record(value: Any, encode: Encode) -> str:
        return call_text(cls.__name__, **{name: encode(getattr(value, name)) for name in names})

    add_class(cls, encode_record, **{cls.__name__: cls})


def add_late_record(module: str, name: str) -> None:
    """Add a named tuple as `add_record` does, without importing its module.

    The module is imported when a file has such a value, since importing it is slow.
    """

    def encode_record(value: Any, encode: Encode) -> str:
        return call_text(name, **{word: encode(item) for word, item in value._asdict().items()})

    def construct(**fields: Any) -> Any:
        return getattr(import_module(module), name)(**fields)

    _LATE[module, name] = encode_record
    CONSTRUCTORS[name] = construct


# --- writing ------------------------------------------------------------------------------------


def encode(
    value: Any,
    special: Mapping[type, Callable[[Any], str]] | None = None,
    opaque: Encoder | None = None,
) -> str:
    """Return the text of a parameter's value.

    Args:
        value: The value.
        special: The encoder of classes with the file's own notation (jaxprs, types), anywhere in
            the value.
        opaque: The encoder of a value, anywhere in the value, that cannot be written otherwise.

    Raises:
        Unwritable: If the value contains a class that is not in the table, and `opaque` is None.
    """
    if type(value) is str:
        return value if is_bare(value) else repr(value)
    special = special or {}

    def inside(value: Any) -> str:
        try:
            return encoded(value)
        except Unwritable:
            if opaque is None:
                raise
            return opaque(value, inside)

    def encoded(value: Any) -> str:
        cls = type(value)
        if cls in special:
            return special[cls](value)
        exact = ENCODERS.get(cls) or _LATE.get((cls.__module__, cls.__qualname__))
        encoder = exact or _inherited(cls)
        if encoder is None and jaxcompat.kernel_path(value):
            encoder = record_text
        if encoder is None:
            raise Unwritable(f"a value of {cls.__module__}.{cls.__qualname__}")
        return encoder(value, inside)

    return inside(value)


def is_bare(text: str) -> bool:
    """Return True if a text may be written without quotes as a whole parameter."""
    is_reserved = text in NAMES or keyword.iskeyword(text)
    return text.isidentifier() and text.isascii() and not is_reserved


def call_text(name: str, *args: str, **keywords: str | None) -> str:
    """Return the text of a call from the texts of its arguments, without those that are None."""
    named = (f"{word}={text}" for word, text in keywords.items() if text is not None)
    return f"{name}({', '.join((*args, *named))})"


def _inherited(cls: type) -> Encoder | None:
    bases = (base for base in cls.__mro__[1:] if base in ENCODERS and base not in _BUILTINS)
    return next((ENCODERS[base] for base in bases), None)


def _tuple(value: tuple, encode: Encode) -> str:
    return f"({encode(value[0])},)" if len(value) == 1 else call_text("", *map(encode, value))


def _dict(value: dict, encode: Encode) -> str:
    return f"{{{', '.join(f'{encode(k)}: {encode(v)}' for k, v in value.items())}}}"


def _frozenset(value: frozenset, encode: Encode) -> str:
    # Sorted by text, so that output is deterministic.
    items = ", ".join(sorted(map(encode, value)))
    return f"frozenset({{{items}}})" if items else "frozenset()"


def _as_frozenset(*items: Any) -> frozenset:
    if len(items) > 1 or (items and not isinstance(items[0], set)):
        raise TypeError("frozenset takes a set in braces")
    return frozenset(*items)


for _cls in (type(None), bool, int, float, str, bytes, type(Ellipsis)):
    add_class(_cls, lambda value, encode: repr(value))
add_class(tuple, _tuple)
add_class(list, lambda value, encode: f"[{', '.join(map(encode, value))}]")
add_class(dict, _dict)
add_class(
    complex, lambda v, encode: call_text("complex", *map(encode, (v.real, v.imag))), complex=complex
)
add_class(frozenset, _frozenset, frozenset=_as_frozenset)
add_class(
    slice,
    lambda v, encode: call_text("slice", *map(encode, (v.start, v.stop, v.step))),
    slice=slice,
)
add_name("inf", float("inf"))
add_name("nan", float("nan"))
add_name("Ellipsis", Ellipsis)

_BUILTINS = frozenset({*ENCODERS, object})


# --- reading ------------------------------------------------------------------------------------


def decode(node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an expression.

    Args:
        node: The expression.
        names: The names of this file, looked up before the table's: shared jaxprs, placeholders of
            inline jaxprs, and the functions `aval` (of a type's text) and `dim` (of a symbolic
            dimension's text). A parameter called `name` is always a text and is read without them:
            `name=relu jaxpr=relu`.

    Raises:
        Unreadable: With the invalid node.
    """
    names = names or {}
    if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in names:
        return node.id
    return _FileValueReader(names).visit(node)


class _FileValueReader(WhitelistReader):
    """Reads the values of a file with these names in addition to the table's."""

    what = "a value"

    def __init__(self, names: Mapping[str, Any]):
        self._names = names

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Unreadable:
        return Unreadable(node, message)

    def visit_Set(self, node: ast.Set) -> set[Any]:
        try:
            return set(map(self.visit, node.elts))
        except TypeError as error:
            raise self.fail(node, str(error)) from None

    def visit_Name(self, node: ast.Name) -> Any:
        return self._named(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._named(node)

    def _named(self, node: ast.expr) -> Any:
        name = self._dotted(node)
        table = self._names if name in self._names else NAMES
        if name not in table:
            raise self.fail(node, f"unknown name '{name}'")
        return table[name]

    def visit_Call(self, node: ast.Call) -> Any:
        name = self._dotted(node.func)
        make = self._names.get(name) or CONSTRUCTORS.get(name)
        if not callable(make):
            raise self.fail(node, f"unknown constructor '{name}(...)'")
        args = [self.visit(arg) for arg in node.args]
        kwargs: dict[str, Any] = {}
        for word in node.keywords:
            if word.arg is None or word.arg in kwargs:
                raise self.fail(word.value, "a parameter is given twice, or without a name")
            kwargs[word.arg] = self.visit(word.value)
        try:
            return make(*args, **kwargs)
        except Unreadable:
            raise
        except Exception as error:  # of any class: JAX's constructors check their arguments
            raise self.fail(node, f"{name}(...) cannot be created: {error}") from error

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return node.id
        raise self.fail(node, "a dotted name must begin with a name")


# --- jax values -----------------------------------------------------------------------------------
# The notation of JAX and NumPy classes whose values occur in parameters.
#
# They are written as JAX prints them if that is complete: enumerations and records of dimension
# numbers by their fields, dtypes and PRNG implementations by name. Devices are written by platform
# and number; a mesh of devices that this machine lacks is read as an abstract mesh.

# --- numbers and dtypes -------------------------------------------------------------------------


def scalar_text(value: np.generic | np.ndarray) -> str:
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
    """Return a NumPy scalar of `dtype` from the output of `scalar_text`.

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
    if name in array_dtypes() and array_dtypes()[name] == getattr(cls, "dtype", None):
        return f"jnp.{name}"
    raise Unwritable(f"the class {name}")


add_class(np.dtype, _dtype)
add_class(np.generic, lambda v, encode: f"np.{v.dtype.name}({scalar_text(v)})", bits=Bits)
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
    values = {"out_dtype": getattr(value.out_aval, "dtype", None), **value.params}
    named = inspect.signature(type(value)).parameters.values()
    keywords = {p.name: encode(values[p.name]) for p in named if p.kind is p.KEYWORD_ONLY}
    return call_text(type(value).__name__, *map(encode, value.in_avals), **keywords)


for _class in jaxcompat.HIGH_PRIMITIVES:
    add_class(_class, _high_primitive, **{_class.__name__: _class})
for _mapping in (jaxcompat.FrozenDict, OrderedDict):
    add_class(
        _mapping,
        lambda value, encode: call_text(type(value).__name__, encode(dict(value.items()))),
        **{_mapping.__name__: _mapping},
    )
add_singleton("UnspecifiedValue", jaxcompat.UNSPECIFIED)
add_singleton("Layout.AUTO", Layout.AUTO)
add_singleton("P.UNCONSTRAINED", PartitionSpec.UNCONSTRAINED)


# --- records --------------------------------------------------------------------------------------
# Objects by the name of their class and their fields: those of kernels, which are rebuilt, and
# those in opaque equations.


def record_text(value: Any, encode: Encode) -> str:
    """Return the text of a record, a dataclass or a constant of kernels. Raises Unwritable."""
    if (record := fields_of(value)) is not None:
        fields = {name: encode(field) for name, field in record[1].items()}
        return call_text("Record", repr(record[0]), **fields)
    path = jaxcompat.kernel_path(value)
    if path is not None and jaxcompat.kernel_object(path) == value:
        return f"Constant({path!r})"
    raise Unwritable(f"a value of {type(value).__module__}.{type(value).__qualname__}")


def _read_record(class_name: str, /, **fields: Any) -> Any:
    rebuilt = jaxcompat.kernel_record(class_name, fields) if is_whole(fields) else None
    return Record(class_name, **fields) if rebuilt is None else rebuilt


def _read_constant(path: str) -> Any:
    value = jaxcompat.kernel_object(path)
    return Record(path) if value is None or isinstance(value, type) else value


def is_whole(value: Any) -> bool:
    """Return True if a value that was read is the value that was written."""
    if isinstance(value, Record | StaticLeaf | jaxcompat.OpaqueMemory | jaxcompat.OpaqueDType):
        return False
    if isinstance(value, ClosedJaxpr | Jaxpr):
        body = jaxcompat.open_jaxpr(value)
        return is_whole([v.aval for v in body.invars]) and not any(
            map(jaxcompat.is_opaque, equations(body))
        )
    if isinstance(value, jax.core.AbstractValue):
        parts = (getattr(value, name, None) for name in ("inner_aval", "memory_space", "dtype"))
        return all(map(is_whole, parts))
    if isinstance(value, Mapping):
        return all(map(is_whole, value.values()))
    return not isinstance(value, tuple | list) or all(map(is_whole, value))


add_class(Record, record_text, Record=_read_record)
add_constructor("Constant", _read_constant)


# --- callbacks ------------------------------------------------------------------------------------


def _callback(function: Any, encode: Encode) -> str:
    raise Unwritable(f"a Python function ({callback_name(function)})")


def _read_stub(name: str, source: str = "") -> Stub:
    if not (isinstance(name, str) and isinstance(source, str)):
        raise ValueError("write a stub as stub('module.function', 'digest of its source')")
    return Stub(name, source)


def _written_stub(stub: Stub, encode: Encode) -> str:
    return f"stub({', '.join(encode(part) for part in (stub.name, stub.source) if part)})"


add_class(jaxcompat.FlatCallback, _callback)
add_class(Stub, _written_stub, stub=_read_stub)
for _name, _value in jaxcompat.DEBUG_EFFECTS.items():
    add_singleton(_name, _value)


# --- devices and shardings ------------------------------------------------------------------------


def _read_device(platform: str, number: int) -> jax.Device:
    if devices := _devices(platform, [number]):
        return devices[0]
    raise ValueError("this machine has no such device")


def _devices(platform: str, numbers: Sequence[int]) -> list[jax.Device] | None:
    """Return the devices of these numbers, or None if one is missing."""
    try:
        by_number = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # no such platform
        return None
    return [by_number[n] for n in numbers] if all(n in by_number for n in numbers) else None


def _spec(spec: PartitionSpec, encode: Encode) -> str:
    kind = getattr(spec, "unreduced_kind", None)
    if kind is not None and kind.name != "sum":
        raise Unwritable(f"a partition of kind {kind}")
    axes = {word: getattr(spec, word) for word in ("unreduced", "reduced")}
    named = {word: encode(frozenset(names)) for word, names in axes.items() if names}
    return call_text("P", *map(encode, spec.partitions), **named)


def _mesh(mesh: Mesh | AbstractMesh, encode: Encode) -> str:
    if isinstance(mesh, Mesh) and mesh.empty:
        return "Mesh((), ())"
    device, devices = mesh.abstract_mesh.abstract_device, None
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flatten())
        if len({member.platform for member in devices}) > 1:
            raise Unwritable("a mesh of devices of several platforms")
    return call_text(
        type(mesh).__name__,
        encode(mesh.axis_sizes),
        encode(mesh.axis_names),
        axis_types=encode(mesh.axis_types) if mesh.axis_names else None,
        abstract_device=None if device is None else encode(device),
        devices=None if devices is None else encode(tuple(member.id for member in devices)),
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
    local_devices = _devices(abstract_device.platform, devices)
    if local_devices is None:
        return AbstractMesh(axis_sizes, axis_names, axis_types, abstract_device=abstract_device)
    return Mesh(np.array(local_devices).reshape(axis_sizes), axis_names, axis_types)


def _memory_kind(sharding: jax.sharding.Sharding, encode: Encode) -> str | None:
    return None if sharding.memory_kind is None else encode(sharding.memory_kind)


def _named_sharding(sharding: NamedSharding, encode: Encode) -> str:
    parts = {"mesh": encode(sharding.mesh), "spec": encode(sharding.spec)}
    return call_text("NamedSharding", **parts, memory_kind=_memory_kind(sharding, encode))


def _single_device(sharding: SingleDeviceSharding, encode: Encode) -> str:
    (device,) = sharding.device_set
    kind = _memory_kind(sharding, encode)
    return call_text("SingleDeviceSharding", encode(device), memory_kind=kind)


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
    return call_text("tree", encode(jax.tree.unflatten(tree, [_LEAF] * tree.num_leaves)))


def _opaque(node: Opaque, encode: Encode) -> str:
    children = dict(zip(node.keys, node.children, strict=True)) if node.keys else [*node.children]
    return call_text("Node", *map(encode, (node.type_name, children, *filter(None, [node.aux]))))


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


def _held(leaf: StaticLeaf, encode: Encode) -> str:
    if type(leaf.value) in LITERALS:
        return f"Static({encode(leaf.value)})"
    return f"Object({description(leaf.value)!r})"


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
add_class(PyTreeDef, _tree, tree=jaxcompat.tree_structure)


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
        arguments = {name: cell.cell_contents for name, cell in cells}
    else:
        arguments = vars(policy)
    sets = (set, frozenset)
    return {k: tuple(sorted(v)) if isinstance(v, sets) else v for k, v in arguments.items()}


def _policy(policy: Policy, encode: Encode) -> str:
    for name, predefined in POLICIES.items():
        if policy is predefined or (not isinstance(policy, FunctionType) and policy == predefined):
            return f"checkpoint_policies.{name}"
    name = _FAMILIES.get(_family(policy), "")
    if not name:
        raise Unwritable(f"a Python function ({getattr(policy, '__qualname__', policy)})")
    arguments = _arguments(policy)
    kinds = [p.kind for p in inspect.signature(POLICY_FACTORIES[name]).parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL]:
        items = [encode(item) for names in arguments.values() for item in names]
        return call_text(f"checkpoint_policies.{name}", *items)
    return call_text(f"checkpoint_policies.{name}", **{k: encode(v) for k, v in arguments.items()})


for _name, _value in POLICIES.items():
    add_name(f"checkpoint_policies.{_name}", _value)
    add_class(type(_value), _policy)
for _name, _factory in POLICY_FACTORIES.items():
    add_constructor(f"checkpoint_policies.{_name}", _factory)
    add_class(type(_SAMPLES[_name]), _policy)


# --- types ----------------------------------------------------------------------------------------
# Writing and reading of types in a `.jaxpr` file: JAX's short form, plus the parts that it drops.
#
# The notation is that of `ir.notation.types`, with `Ref{f32[3]}` and `Tok` in addition. A type on a
# mesh names the mesh, since several meshes may have axes of the same name.

#: The empty mesh.
NO_MESH: AbstractMesh = jaxcompat.CONTEXT_DEFAULTS["cur_abstract_mesh"]


class TypeWriter:
    """Writes types, and collects the header entries needed to read them.

    `meshes` has the name of each mesh; `scope` is the scope of the symbolic dimensions, or None.
    `foreign` has the path of each dtype and memory space of kernels. With `opaque`, a type may name
    others: `foreign` has for a dtype the text of the type that stores an element, and "" for a
    memory space.
    """

    def __init__(self, opaque: bool = False) -> None:
        self.meshes: dict[AbstractMesh, str] = {}
        self.scope: Any = None
        self.foreign: dict[str, str] = {}
        self._opaque = opaque

    def __call__(self, aval: Aval) -> str:
        """Return the text of a type. Raises Unwritable."""
        if isinstance(aval, jaxcompat.AbstractToken):
            return "Tok"
        if isinstance(aval, jaxcompat.AbstractRef):
            text = self._reference(aval)
        elif type(aval) is jax.core.ShapedArray:
            text = self._array(aval)
        else:
            raise Unwritable(f"a type of {type(aval).__module__}.{type(aval).__qualname__}")
        # Most types have only a shape and a dtype. Others may have parts that JAX's listing drops.
        if not (_PLAIN.fullmatch(text) or self._reads_back(text, aval) or self._is_foreign(aval)):
            raise Unwritable(f"a type that {text} does not fully describe")
        return text

    def dimension(self, size: Any) -> str:
        """Return the text of a symbolic dimension. Raises Unwritable."""
        if self.scope is None:
            self.scope = size.scope
        if size.scope is not self.scope:
            raise Unwritable("symbolic dimensions of two scopes")
        return str(size)

    def _reads_back(self, text: str, aval: Aval) -> bool:
        meshes = {name: mesh for mesh, name in self.meshes.items()}
        try:
            return TypeReader(meshes, self.scope, foreign=self.foreign)(text) == aval
        except Exception:  # JAX may raise anything
            return False

    def _is_foreign(self, aval: Aval) -> bool:
        """Return True for a type of another package that is written by the name of its space."""
        return self._opaque and self._space(aval) in self.foreign

    def _space(self, aval: Aval) -> str:
        """Return the name of a type's memory space, and note it if JAX does not have it.

        The space of a type of another package's class stands for that class, too.
        """
        space = aval.memory_space
        name = getattr(space, "name", None)
        path = "" if jaxcompat.kernel_path(space) is None else encode(space)
        is_other = type(aval) not in (jaxcompat.AbstractRef, jax.core.ShapedArray)
        if self._opaque and (is_other or not (isinstance(name, str) and name.isidentifier())):
            name, path = "_".join(_WORDS.findall(f"{space} {type(aval).__name__}")), ""
        if not isinstance(name, str):
            raise Unwritable(f"the memory space {space}")
        name = name.lower()
        if path or (self._opaque and not isinstance(space, jax.memory.Space)):
            return self._noted_name(name, path)
        return name

    def _foreign_dtype(self, dtype: Any) -> str:
        """Return what `foreign` has for a dtype of a package. Raises Unwritable."""
        if jaxcompat.kernel_path(dtype) is not None:
            return encode(dtype)
        if not (self._opaque and str(dtype).isidentifier()):
            raise Unwritable(f"the element type {dtype}, which a package defines")
        return jaxcompat.physical_element(dtype).str_short(True)

    def _noted_name(self, name: str, stored: str) -> str:
        """Return the name under which `foreign` has this, which is new if another has the name."""
        while self.foreign.setdefault(name, stored) != stored:
            name += "_"
        return name

    def _array(self, aval: Aval) -> str:
        dtype = ""
        if is_foreign(aval.dtype):
            name, stored = str(aval.dtype), self._foreign_dtype(aval.dtype)
            dtype = self._noted_name(name, stored)
        if not jaxcompat.has_plain_layout(aval):
            raise Unwritable(f"a type with its own layout ({aval})")
        for size in aval.shape:
            if jaxcompat.is_symbolic_dimension(size):
                self.dimension(size)
        text = ("~" if aval.weak_type else "") + aval.str_short(short_dtypes=True)
        text = dtype + text.removeprefix(str(aval.dtype)) if dtype else text
        mesh = aval.sharding.mesh
        if mesh.empty:
            return text
        return f"{text}@{self.meshes.setdefault(mesh, f'm{len(self.meshes)}')}"

    def _reference(self, aval: Aval) -> str:
        if aval.kind is not None:  # JAX's comparison of types ignores it
            raise Unwritable(f"a type of the kind {aval.kind!r}")
        content = self(aval.inner_aval)
        if (own := jaxcompat.own_reference(aval)) is not None:
            return f"Ref<{self._own_reference(aval, *own)}>{{{content}}}"
        is_plain = aval.memory_space is None and type(aval) is jaxcompat.AbstractRef
        space = "" if is_plain else f"<{self._space(aval)}>"
        return f"Ref{space}{{{content}}}"

    def _own_reference(self, aval: Aval, path: str, fields: Mapping[str, Any]) -> str:
        """Return the name of a class of refs with these fields, and note it. Raises Unwritable."""
        types = {jax.core.ShapedArray: lambda aval: f"aval({self(aval)!r})"}
        name = "_".join(_WORDS.findall(f"{aval.memory_space} {type(aval).__name__}")).lower()
        return self._noted_name(name, encode(Record(path, **fields), types))


#: A type with only a dtype and a shape.
_PLAIN = re.compile(r"~?[a-z]\w*\[[\d,]*\]")


#: The words of a text, from which a name is made.
_WORDS = re.compile(r"\w+")


class TypeReader:
    """Reads types, with a cache by text.

    `meshes` are the header's, by name; `scope` is that of the symbolic dimensions, or None if the
    header has none; `mesh` is the one in which equations are traced, for their readers. `foreign`
    is a `TypeWriter`'s.
    """

    def __init__(
        self,
        meshes: Mapping[str, AbstractMesh] | None = None,
        scope: Any = None,
        mesh: AbstractMesh = NO_MESH,
        foreign: Mapping[str, str] | None = None,
    ):
        self.mesh = mesh
        self._known: dict[str, Aval] = {}
        self._meshes = meshes or {}
        self._scope = scope
        self._foreign: dict[str, Any] = {}
        for name, stored in (foreign or {}).items():
            self._foreign[name] = self._stored(name, stored)

    def __call__(self, text: str) -> Aval:
        """Return the type of this text. Raises ValueError."""
        aval = self._known.get(text)
        if aval is None:
            aval = self._known[text] = self._read(text)
        return aval

    def _stored(self, name: str, stored: str) -> Any:
        """Return the dtype or the memory space of an entry of `foreign`. Raises ValueError."""
        if _CALL.match(stored):
            try:
                value = decode(ast.parse(stored, mode="eval").body, {"aval": self})
            except SyntaxError:
                raise ValueError(f"{name} is not a value of a kernel") from None
            if is_whole(value) or self._reference(value, self("f32[]")) is not None:
                return value
            stored = "" if value._class_name.rpartition(".")[2].isupper() else "i32[]"
        return jaxcompat.OpaqueDType(name, self(stored)) if stored else jaxcompat.OpaqueMemory(name)

    def dimension(self, text: str) -> Any:
        """Return the size of this text: an int, or a symbolic dimension. Raises ValueError."""
        if text.isdecimal() and text.isascii() and len(text) < 20:
            return int(text)
        if self._scope is None:
            raise ValueError(f"'{text}' is not a size, and the header names no symbolic dimensions")
        if len(text) > 1000 or text.count("(") > 20:
            raise ValueError("this symbolic dimension is too long to read")
        (size,) = jax.export.symbolic_shape(text, scope=self._scope)
        return size

    def _read(self, text: str) -> Aval:
        if text == "Tok":
            return jaxcompat.ABSTRACT_TOKEN
        if reference := _REFERENCE.fullmatch(text):
            space, inner = reference.groups()
            memory = self._foreign.get(space) or (space and types.memory_space_named(space))
            own = self._reference(memory, self(inner))
            return jaxcompat.AbstractRef(self(inner), memory) if own is None else own
        parsed = types.parse_type(text)
        sizes = [self.dimension(dim.size) for dim in parsed.dims]
        return types.aval_of_type(parsed, sizes, self._mesh(parsed), self._foreign)

    def _reference(self, stored: object, content: Aval) -> Any:
        """Return the ref of a class of Pallas that `foreign` has; None for anything else."""
        class_name, fields = fields_of(stored) or ("", {})
        if not (isinstance(stored, Record) and is_whole(fields)):
            return None
        return jaxcompat.reference_of(class_name, content, fields)

    def _mesh(self, parsed: types.TypeText) -> AbstractMesh | None:
        """Return the mesh that a type names, or None."""
        if parsed.mesh is None:
            if parsed.axis_names:
                raise ValueError("a type that mentions axes must name a mesh, as in f32[8@x]@m0")
            return None
        if parsed.mesh not in self._meshes:
            raise ValueError(f"the header has no mesh '{parsed.mesh}'")
        return self._meshes[parsed.mesh]


#: What begins a call, but not a type.
_CALL = re.compile(r"\w+\(")

_REFERENCE = re.compile(r"Ref(?:<(\w+)>)?\{(.*)\}")
