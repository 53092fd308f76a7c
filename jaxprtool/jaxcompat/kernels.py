"""Kernels of Pallas: the objects in their parameters and types, their primitives, and their axes.

The objects are dataclasses, members of enumerations and dtypes, some for all backends and some for
one. A file names them by their module and name.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

import jax
from jax._src import config, tree_util
from jax._src.state.types import TransformedRef
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.jaxprs import (
    AbstractRef,
    AnyJaxpr,
    Aval,
    Params,
    axes_bound,
    close_jaxpr,
    open_jaxpr,
    replace_jaxpr,
)

#: The start of the paths of Pallas's own objects.
PALLAS = "jax._src.pallas."

#: The modules that define the objects and primitives of kernels, and the public module of each.
#: Importing that one registers the rules of its backend.
_MODULES = {
    f"{PALLAS}{name}.": f"jax.experimental.pallas{public}"
    for name, public in (
        ("core", ""),
        ("primitives", ""),
        ("pallas_call", ""),
        ("mpmd", ""),
        ("mosaic.core", ".tpu"),
        ("mosaic.primitives", ".tpu"),
        ("mosaic.random", ".tpu"),
        ("mosaic.sc_core", ".tpu_sc"),
        ("mosaic.sc_primitives", ".tpu_sc"),
        ("mosaic.interpret.params", ".tpu"),
        ("mosaic_gpu.core", ".mosaic_gpu"),
        ("mosaic_gpu.primitives", ".mosaic_gpu"),
        ("mosaic_gpu.interpret.params", ".mosaic_gpu"),
        ("triton.core", ".triton"),
        ("triton.primitives", ".triton"),
    )
} | {
    "jax._src.state.types.": "jax.ref",
    "jax.experimental.mosaic.gpu.core.": "jax.experimental.pallas.mosaic_gpu",
    "jax.experimental.mosaic.gpu.fragmented_array.": "jax.experimental.pallas.mosaic_gpu",
    "jax.experimental.mosaic.gpu.tcgen05.": "jax.experimental.pallas.mosaic_gpu",
    "jax.experimental.mosaic.gpu.launch_context.": "jax.experimental.pallas.mosaic_gpu",
}

#: The name of a class, of a constant, or of a member of an enumeration.
_NAME = re.compile(r"\w+(?:\.\w+)?")

#: The registry of trees in which a part of a ref is a node.
_REGISTRY = getattr(tree_util, "tracing_registry", jax.tree_util.default_registry)


@cache
def kernel_object(path: str) -> Any:
    """Return the class, the member of an enumeration or the dtype that `kernel_path` names.

    Returns None for all other paths, and if this JAX lacks it.
    """
    module = next((module for module in _MODULES if path.startswith(module)), None)
    if module is None:
        return None
    name = path.removeprefix(module)
    if not _NAME.fullmatch(name):
        return None
    try:
        import_module(_MODULES[module])
        value = attrgetter(name)(import_module(module[:-1]))
    except (ImportError, AttributeError):
        return None
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__ != module[:-1]:
        return None
    if isinstance(value, type):
        if issubclass(value, import_module(f"{PALLAS}core").AbstractSemaphoreTy):
            return value()
        return value if _is_rebuildable(value) else None
    return value if isinstance(value, Enum) or name == "dynamic_grid_dim" else None


def public_kernel_name(value: Any) -> str | None:
    """Return the public name of an object's class in Pallas, or of a member of an enumeration."""
    cls = type(value)
    module = _MODULES.get(f"{cls.__module__}.")
    name = f"{cls.__qualname__}.{value.name}" if isinstance(value, Enum) else cls.__qualname__
    try:
        found = attrgetter(name)(import_module(str(module)))
    except (ImportError, AttributeError):
        return None
    return f"{module}.{name}" if found in (value, cls) else None


def _is_rebuildable(cls: type) -> bool:
    """Return True for a class of refs, and for a dataclass that takes its fields as arguments."""
    if issubclass(cls, AbstractRef):
        return True
    if not dataclasses.is_dataclass(cls):
        return False
    return {f.name for f in dataclasses.fields(cls)} <= inspect.signature(cls).parameters.keys()


def kernel_path(value: object) -> str | None:
    """Return the path of an object of Pallas: the class of a dataclass, or the object itself."""
    cls = type(value)
    if f"{cls.__module__}." not in _MODULES:
        return None
    path = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, Enum):
        path = f"{path}.{value.name}"
    if cls.__name__ == "DynamicGridDim":
        path = f"{cls.__module__}.dynamic_grid_dim"
    known = kernel_object(path)
    return path if known is cls or known == value else None


def kernel_record(path: str, fields: Mapping[str, Any]) -> Any:
    """Return a dataclass of Pallas with these fields, or None if this JAX cannot have it.

    A field that this JAX lacks is ignored if it is None, False, zero or empty, which new options
    are by default.
    """
    cls = kernel_object(path)
    if not isinstance(cls, type):
        return None
    names = inspect.signature(cls).parameters
    if any(value and name not in names for name, value in fields.items()):
        return None
    fields = {name: value for name, value in fields.items() if name in names}
    if "allow_captured_consts" in names:  # checks what the user wrote, which JAX has accepted
        fields["allow_captured_consts"] = True
    try:
        return cls(**fields)
    except (TypeError, ValueError, AssertionError, AttributeError):
        return None


def own_reference(aval: Aval) -> tuple[str, Params] | None:
    """Return the class of a ref that is one of Pallas's own, and its fields beside its content."""
    if type(aval) is AbstractRef or not (path := kernel_path(aval)):
        return None
    _, *names = inspect.signature(type(aval)).parameters
    return path, {name: getattr(aval, name) for name in names if name != "kind"}


def reference_of(path: str, content: Aval, fields: Params) -> Any:
    """Return the ref that `own_reference` describes, or None if this JAX cannot have it."""
    cls = kernel_object(path)
    if not (isinstance(cls, type) and issubclass(cls, AbstractRef)):
        return None
    return kernel_record(path, {next(iter(inspect.signature(cls).parameters)): content, **fields})


def kernel_primitive(name: str) -> Primitive | None:
    """Return the primitive of Pallas with this name; None if no imported backend has it."""
    import_module("jax.experimental.pallas")
    modules = (sys.modules.get(module[:-1]) for module in _MODULES)
    values = (value for module in modules for value in vars(module or object).values())
    return next((v for v in values if isinstance(v, Primitive) and v.name == name), None)


def tree_structure(tree: object) -> PyTreeDef:
    """Return the structure of a tree; a part of a ref is a node, as in parameters of kernels."""

    def is_part(node: object) -> bool:
        return isinstance(node, TransformedRef)

    if any(map(is_part, jax.tree.leaves(tree, is_leaf=is_part))):
        return _REGISTRY.flatten(tree)[1]
    return jax.tree.structure(tree)


def consts_as_arguments(jaxpr: AnyJaxpr) -> ClosedJaxpr:
    """Return the body of an equation whose operands are its constants, with them as arguments."""
    body = open_jaxpr(jaxpr)
    invars = [*body.constvars, *body.invars]
    return close_jaxpr(replace_jaxpr(body, constvars=(), consts=(), invars=invars))


def arguments_as_consts(jaxpr: AnyJaxpr, count: int) -> Jaxpr:
    """Return the inverse of `consts_as_arguments` for a body with so many constants."""
    body = open_jaxpr(jaxpr)
    consts, invars = body.invars[:count], body.invars[count:]
    nones = (None,) * count  # JAX takes the values from the operands
    return open_jaxpr(replace_jaxpr(body, constvars=consts, consts=nones, invars=invars))


def kernel_axes(params: Params) -> tuple[tuple[Hashable, int], ...]:
    """Return the named axes that the body of an equation is traced with, and their sizes."""
    if (mapping := params.get("grid_mapping")) is not None:
        return tuple(zip(mapping.grid_names or (), mapping.grid, strict=False))
    mesh: Any = params.get("mesh") or next(iter(params.get("meshes") or ()), None)
    return tuple(mesh.shape.items()) if kernel_path(mesh) else ()


@contextmanager
def inside_kernel(axes: Sequence[tuple[Hashable, int]]) -> Iterator[None]:
    """Enter the context in which the body of a kernel with these axes is traced."""
    with axes_bound(axes), config._check_vma(False):
        yield
