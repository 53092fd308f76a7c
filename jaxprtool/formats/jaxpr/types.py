"""How a type is spelled in a `.jaxpr` file, both ways: JAX's short form, and what that drops.

    f32[8,16]   key<fry>[2]   f32<host>[3]   Ref{f32[3]}   Tok     as JAX's listing has them
    ~f32[]                                                         weakly typed
    f32[2*n,128]                                                   symbolic dimensions
    f32[8@x,4]@m0   f32[2]{V:i}@m1                                 on a mesh of the header's table

A type on a mesh names it, since the axes of several meshes may have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import Unwritable
from jaxprtool.ir.dtypes import array_dtypes, is_foreign


class TypeWriter:
    """Spells types, and collects what the header must say for them to be read.

    `meshes` has the name of each mesh; `scope` is the scope of the symbolic dimensions, or None.
    """

    def __init__(self) -> None:
        self.meshes: dict[Any, str] = {}
        self.scope: Any = None

    def __call__(self, aval: Any) -> str:
        """The spelling of a type. Raises Unwritable."""
        if isinstance(aval, jaxcompat.AbstractToken):
            return "Tok"
        if isinstance(aval, jaxcompat.AbstractRef):
            text = self._reference(aval)
        elif type(aval) is jax.core.ShapedArray:
            text = self._array(aval)
        else:
            raise Unwritable(f"a type of {type(aval).__module__}.{type(aval).__qualname__}")
        # Most types have no more to them than shape and dtype. Of others JAX may know more than
        # its listing says.
        if not _PLAIN.fullmatch(text) and not self._reads_back(text, aval):
            raise Unwritable(f"a type of which {text} does not say all")
        return text

    def dimension(self, size: Any) -> str:
        """The text of a symbolic dimension. Raises Unwritable."""
        if self.scope is None:
            self.scope = size.scope
        if size.scope is not self.scope:
            raise Unwritable("symbolic dimensions of two scopes")
        return str(size)

    def _reads_back(self, text: str, aval: Any) -> bool:
        meshes = {name: mesh for mesh, name in self.meshes.items()}
        try:
            return TypeReader(meshes, self.scope)(text) == aval
        except Exception:  # whatever JAX says against it
            return False

    def _array(self, aval: Any) -> str:
        if is_foreign(aval.dtype):
            raise Unwritable(f"the element type {aval.dtype}, which a package has brought")
        if not jaxcompat.has_plain_layout(aval):
            raise Unwritable(f"a type with a layout of its own ({aval})")
        for size in aval.shape:
            if jaxcompat.is_symbolic_dimension(size):
                self.dimension(size)
        text = ("~" if aval.weak_type else "") + aval.str_short(short_dtypes=True)
        mesh = aval.sharding.mesh
        if mesh.empty:
            return text
        return f"{text}@{self.meshes.setdefault(mesh, f'm{len(self.meshes)}')}"

    def _reference(self, aval: Any) -> str:
        if aval.kind is not None:  # which JAX's comparison of types does not look at
            raise Unwritable(f"a type of the kind {aval.kind!r}")
        space = "" if aval.memory_space is None else f"<{_name_of(aval.memory_space)}>"
        return f"Ref{space}{{{self(aval.inner_aval)}}}"


#: A type that is told by its dtype and its shape.
_PLAIN = re.compile(r"~?[a-z]\w*\[[\d,]*\]")


def _name_of(memory_space: Any) -> str:
    name = getattr(memory_space, "name", None)
    if not isinstance(name, str):
        raise Unwritable(f"the memory space {memory_space}")
    return name.lower()


class TypeReader:
    """Reads types, each text once.

    `meshes` are the header's, by name; `scope` is that of the symbolic dimensions, or None if the
    header has none; `mesh` is the one that equations are traced in, for whoever reads those.
    """

    def __init__(
        self, meshes: Mapping[str, Any] | None = None, scope: Any = None, mesh: Any = None
    ):
        self.mesh = mesh
        self._meshes = meshes or {}
        self._scope = scope
        self._known: dict[str, Any] = {}

    def __call__(self, text: str) -> Any:
        """The type that `text` spells. Raises ValueError."""
        aval = self._known.get(text)
        if aval is None:
            aval = self._known[text] = self._read(text)
        return aval

    def dimension(self, text: str) -> Any:
        """The size that `text` spells: an int, or a symbolic dimension. Raises ValueError."""
        if text.isdecimal() and text.isascii() and len(text) < 20:
            return int(text)
        if self._scope is None:
            raise ValueError(f"'{text}' is no size, and the header names no symbolic dimensions")
        if len(text) > 1000 or text.count("(") > 20:
            raise ValueError("a symbolic dimension that long is not read")
        (size,) = jax.export.symbolic_shape(text, scope=self._scope)
        return size

    def _read(self, text: str) -> Any:
        if text == "Tok":
            return jaxcompat.ABSTRACT_TOKEN
        if reference := _REFERENCE.fullmatch(text):
            space, inner = reference.groups()
            return jaxcompat.AbstractRef(self(inner), space and _memory_space(space))
        parts = _ARRAY.fullmatch(text)
        if parts is None:
            raise ValueError(f"'{text}' is no type")
        weak, dtype, space, shape, axes, mesh = parts.groups()
        sizes, partitions = self._shape(shape)
        return jaxcompat.array_type(
            sizes,
            _dtype(dtype),
            bool(weak),
            memory_space=_memory_space(space or "device"),
            **self._laid_out(mesh, partitions, _axes(axes or "")),
        )

    def _shape(self, text: str) -> tuple[list[Any], list[Any]]:
        sizes, partitions = [], []
        for item in _split(text):
            size, _, axes = item.partition("@")
            sizes.append(self.dimension(size))
            several = tuple(_split(axes[1:-1])) if axes.startswith("(") else axes
            partitions.append(several or None)
        return sizes, partitions

    def _laid_out(
        self, name: str | None, partitions: list[Any], axes: dict[str, list[str]]
    ) -> dict[str, Any]:
        """How an array is laid out over the mesh of that name."""
        if name is None:
            if axes or any(partitions):
                raise ValueError("a type that mentions axes must name a mesh, as in f32[8@x]@m0")
            return {}
        if name not in self._meshes:
            raise ValueError(f"the header has no mesh '{name}'")
        mesh = self._meshes[name]
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        manual: dict[str, list[str]] = {"varying": axes.pop("varying", [])}
        spec: dict[str, set[str]] = {}
        for kind, names in axes.items():
            manual[kind] = [a for a in names if types.get(a) == AxisType.Manual]
            spec[kind] = {a for a in names if types.get(a) != AxisType.Manual}
        return {
            "sharding": NamedSharding(mesh, PartitionSpec(*partitions, **spec)),
            "varying": manual,
        }


_ARRAY = re.compile(
    r"(~?)(key<\w+>|[a-z]\w*)(?:<(\w+)>)?\[([^\[\]{}]*)\](?:\{([^{}]*)\})?(?:@(\w+))?"
)
_REFERENCE = re.compile(r"Ref(?:<(\w+)>)?\{(.*)\}")
_COMMA = re.compile(r",\s*(?![^()]*\))")

#: What JAX calls the kinds of axes that a type mentions.
_AXES = {"V": "varying", "U": "unreduced", "R": "reduced"}


def _split(text: str) -> list[str]:
    """The items between the commas that no parentheses are around."""
    items, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()] if text else []


def _axes(text: str) -> dict[str, list[str]]:
    """The axes of `V:i, U:(j,k)` by kind."""
    found = {}
    for item in _split(text):
        kind, _, names = item.partition(":")
        if kind not in _AXES or not names:
            raise ValueError(f"'{item}' mentions no axes")
        found[_AXES[kind]] = _split(names[1:-1]) if names.startswith("(") else [names]
    return found


def _memory_space(name: str) -> Any:
    for space in jax.memory.Space:
        if space.name.lower() == name:
            return space
    raise ValueError(f"there is no memory space '{name}'")


def _dtype(text: str) -> Any:
    if text.startswith("key<"):
        known, name = jaxcompat.key_implementations(), text[4:-1]
        if name not in known:
            raise ValueError(f"there is no random number generator '{name}'")
        return jaxcompat.key_type(known[name])
    found = array_dtypes().get(text)
    if found is None:
        raise ValueError(f"there is no dtype '{text}'")
    return found
