"""Writing and reading of types in a `.jaxpr` file: JAX's short form, plus the parts that it drops.

The notation is that of `ir.notation.types`, with `Ref{f32[3]}` and `Tok` in addition. A type on a
mesh names the mesh, since several meshes may have axes of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import Unwritable
from jaxprtool.ir.basics.dtypes import is_foreign
from jaxprtool.ir.notation import types
from jaxprtool.jaxcompat import Aval

#: The empty mesh.
NO_MESH: AbstractMesh = jaxcompat.CONTEXT_DEFAULTS["cur_abstract_mesh"]


class TypeWriter:
    """Writes types, and collects the header entries needed to read them.

    `meshes` has the name of each mesh; `scope` is the scope of the symbolic dimensions, or None.
    With `opaque`, a type may name another package's dtype or memory space: `foreign` has for each
    dtype the text of the type that stores an element, and "" for a memory space.
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
            return TypeReader(meshes, self.scope)(text) == aval
        except Exception:  # JAX may raise anything
            return False

    def _is_foreign(self, aval: Aval) -> bool:
        """Return True for a type in a memory space that JAX does not have; note its name."""
        name = getattr(getattr(aval, "memory_space", None), "name", None)
        if not (self._opaque and isinstance(name, str) and name.isidentifier()):
            return False
        return self.foreign.setdefault(name.lower(), "") == ""

    def _array(self, aval: Aval) -> str:
        if is_foreign(aval.dtype):
            name = str(aval.dtype)
            if not (self._opaque and name.isidentifier()):
                raise Unwritable(f"the element type {aval.dtype}, which a package defines")
            self.foreign[name] = jaxcompat.physical_element(aval.dtype).str_short(True)
        if not jaxcompat.has_plain_layout(aval):
            raise Unwritable(f"a type with its own layout ({aval})")
        for size in aval.shape:
            if jaxcompat.is_symbolic_dimension(size):
                self.dimension(size)
        text = ("~" if aval.weak_type else "") + aval.str_short(short_dtypes=True)
        mesh = aval.sharding.mesh
        if mesh.empty:
            return text
        return f"{text}@{self.meshes.setdefault(mesh, f'm{len(self.meshes)}')}"

    def _reference(self, aval: Aval) -> str:
        if aval.kind is not None:  # JAX's comparison of types ignores it
            raise Unwritable(f"a type of the kind {aval.kind!r}")
        space = "" if aval.memory_space is None else f"<{_name_of(aval.memory_space)}>"
        return f"Ref{space}{{{self(aval.inner_aval)}}}"


#: A type with only a dtype and a shape.
_PLAIN = re.compile(r"~?[a-z]\w*\[[\d,]*\]")


def _name_of(memory_space: object) -> str:
    name = getattr(memory_space, "name", None)
    if not isinstance(name, str):
        raise Unwritable(f"the memory space {memory_space}")
    return name.lower()


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
            known = jaxcompat.OpaqueDType(name, self(stored)) if stored else None
            self._foreign[name] = known or jaxcompat.OpaqueMemory(name)

    def __call__(self, text: str) -> Aval:
        """Return the type of this text. Raises ValueError."""
        aval = self._known.get(text)
        if aval is None:
            aval = self._known[text] = self._read(text)
        return aval

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
            return jaxcompat.AbstractRef(self(inner), memory)
        parsed = types.parse(text)
        sizes = [self.dimension(dim.size) for dim in parsed.dims]
        return types.array_type(parsed, sizes, self._mesh(parsed), self._foreign)

    def _mesh(self, parsed: types.TypeText) -> AbstractMesh | None:
        """Return the mesh that a type names, or None."""
        if parsed.mesh is None:
            if parsed.axis_names:
                raise ValueError("a type that mentions axes must name a mesh, as in f32[8@x]@m0")
            return None
        if parsed.mesh not in self._meshes:
            raise ValueError(f"the header has no mesh '{parsed.mesh}'")
        return self._meshes[parsed.mesh]


_REFERENCE = re.compile(r"Ref(?:<(\w+)>)?\{(.*)\}")
