"""How a type is spelled in a `.jaxpr` file, both ways: JAX's short form, and what that drops.

    f32[8,16]   key<fry>[2]   f32<host>[3]   Ref{f32[3]}   Tok     as JAX's listing has them
    ~f32[]                                                         weakly typed
    f32[2*n,128]                                                   symbolic dimensions
    f32[8@x,4]@m0   f32[2]{V:i}@m1                                 on a mesh of the header's table

A type on a mesh names it, since a type is laid out over the axes of one mesh among several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import Unwritable


class TypeWriter:
    """Spells types, and collects the meshes that they name (`meshes`) and symbolic dimensions."""

    def __init__(self) -> None:
        self.meshes: dict[Any, str] = {}
        self.dimensions: dict[str, Any] = {}

    def __call__(self, aval: Any) -> str:
        """The spelling of a type. Raises Unwritable."""
        if isinstance(aval, jaxcompat.AbstractRef):
            return self._ref(aval)
        if isinstance(aval, jaxcompat.AbstractToken):
            return "Tok"
        if type(aval) is not jax.core.ShapedArray:
            raise Unwritable(f"a type of {type(aval).__module__}.{type(aval).__qualname__}")
        return self._array(aval)

    def _array(self, aval: Any) -> str:
        weak = "~" if aval.weak_type else ""
        for size in aval.shape:
            if type(size) is not int:
                self.dimensions[str(size)] = size
        if not jaxcompat.is_plain_layout(aval):
            raise Unwritable(f"a type with a layout of its own ({aval})")
        mesh = aval.sharding.mesh
        text = f"{weak}{aval.str_short(short_dtypes=True)}"
        if mesh.empty:
            return text
        return f"{text}@{self.meshes.setdefault(mesh, f'm{len(self.meshes)}')}"

    def _ref(self, aval: Any) -> str:
        if aval.kind is not None:
            raise Unwritable(f"a reference of kind {aval.kind}")
        space = "" if aval.memory_space is None else f"<{aval.memory_space.name.lower()}>"
        return f"Ref{space}{{{self(aval.inner_aval)}}}"


class TypeReader:
    """Reads types, each text once.

    `meshes` are the header's, by name; `dimension` gives a symbolic dimension for its text.
    """

    def __init__(self, meshes: Mapping[str, Any], dimension: Any):
        self._meshes = meshes
        self._dimension = dimension
        self._known: dict[str, Any] = {}

    def __call__(self, text: str) -> Any:
        """The type that `text` spells. Raises ValueError."""
        aval = self._known.get(text)
        if aval is None:
            aval = self._known[text] = self._read(text)
        return aval

    def _read(self, text: str) -> Any:
        raise NotImplementedError
