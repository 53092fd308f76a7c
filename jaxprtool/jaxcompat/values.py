"""Objects in parameters, types and equation contexts that have no public name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    api,
    core,
    frozen_dict,
    indexing,
    layout,
    literals,
    sharding_impls,
)
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax
from jax._src.lax.control_flow import solves
from jax._src.lib import xla_client
from jax._src.numpy import hijax as numpy_hijax
from jax._src.numpy import ufuncs
from jax._src.random import prng
from jax._src.state import indexing as state_indexing
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import mlir

from jaxprtool.jaxcompat.aliases import Aval, DType, Params
from jaxprtool.jaxcompat.jaxprs import close_jaxpr, open_jaxpr, replace_jaxpr

AbstractRef = jax.ref.AbstractRef
ABSTRACT_TOKEN = core.abstract_token
ArrayCopySemantics = xla_client.ArrayCopySemantics
FrozenDict = frozen_dict.FrozenDict
IndexSlice = indexing.Slice
KeyType = prng.KeyTy
LinearSolveTuple = solves._LinearSolveTuple
NDIndexer = state_indexing.NDIndexer

#: The classes whose instances `call_hi_primitive` of 0.12 holds for some functions of `jax.numpy`:
#: those that consist of types and plain values.
_HIGH_PRIMITIVES = (
    getattr(numpy_hijax, "Nonzero", None),
    getattr(numpy_hijax, "SearchSorted", None),
    getattr(numpy_hijax, "Einsum", None),
    getattr(ufuncs, "Ldexp", None),
    getattr(ufuncs, "Frexp", None),
)
HIGH_PRIMITIVES: tuple[type, ...] = tuple(filter(None, _HIGH_PRIMITIVES))

#: The sharding of a jit's operand or result that is unspecified.
UNSPECIFIED = sharding_impls.UNSPECIFIED

#: The mesh of devices if none is set.
EMPTY_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())

#: Since 0.12 jit's `inline` is an enumeration; before, a bool.
_Inline = getattr(api, "Inline", None)


def inline_as_word(inline: Any) -> bool | str:
    """Return how a jit is inlined: False (as JAX decides), True (immediately), or another way."""
    if _Inline is None or isinstance(inline, bool):
        return bool(inline)
    return {_Inline.AUTO: False, _Inline.JAX_EARLY: True}.get(inline, inline.value)


def inline_of_word(word: bool | str) -> Any:
    """Return the inverse of `inline_as_word`. Raises ValueError for a way unknown to this JAX."""
    if _Inline is None:
        if not isinstance(word, bool):
            raise ValueError(f"JAX {jax.__version__} does not support inline='{word}'")
        return word
    if isinstance(word, bool):
        return _Inline.JAX_EARLY if word else _Inline.AUTO
    return _Inline(word)


def linear_call_transpose(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the transpose of a `linear_call` as a closed jaxpr. Raises the user's exceptions."""
    with eqn.ctx.manager:  # it may name axes of the mesh
        closed, consts = eqn.params["transpose_thunk"]()
    body, count = open_jaxpr(closed), len(consts)
    bound, free = body.invars[:count], body.invars[count:]
    return replace_jaxpr(close_jaxpr(closed), constvars=bound, consts=consts, invars=free)


def linear_call_transpose_param(closed: ClosedJaxpr) -> Params:
    """Return the parameter that gives a `linear_call` this transpose."""
    transpose = close_jaxpr(pe.convert_constvars_jaxpr(open_jaxpr(closed)))
    return {"transpose_thunk": lambda: (transpose, closed.consts)}


_INTEGERS: frozenset[type] = frozenset({int})


def nested_type(value: object) -> Any:
    """Return the type of a parameter; for a tuple, the types of its elements, at any depth.

    Equal parameters of different types are different: 2 is not 2.0, and 1 is not True.
    """
    cls = type(value)
    if not isinstance(value, tuple) or (cls is tuple and _INTEGERS.issuperset(map(type, value))):
        return cls  # denotes a tuple of integers, the most common
    return cls, *map(nested_type, value)


def literal_value(value: object, aval: Aval) -> Any:
    """Return a number or an array in the form of JAX's literals of the type `aval`."""
    data = np.asarray(value, aval.dtype)
    typed = {float: literals.TypedFloat, int: literals.TypedInt, complex: literals.TypedComplex}
    scalar_type = type(data.item()) if data.shape == () else None
    # A Python number stays one: the type may represent it less precisely.
    if scalar_type in typed and type(value) in typed and (aval.weak_type or data.item() != value):
        return typed[scalar_type](scalar_type(value), aval.dtype)
    return literals.TypedNdArray(data, aval)


def as_literal(value: object, aval: Aval) -> Literal | None:
    """Return a literal for a scalar of this type; None for arrays, keys and refs."""
    if getattr(aval, "shape", None) != () or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if isinstance(aval, AbstractRef) or isinstance(value, jax.core.Tracer):
        return None
    data = np.asarray(value).astype(aval.dtype, copy=False)
    return Literal(literal_value(data.item() if aval.weak_type else data, aval), aval)


def with_weak_type(value: Any, dtype: DType, weak_type: bool) -> Any:
    """Convert a value to an array of this dtype, weakly typed or not."""
    if isinstance(value, float | int | complex) and not weak_type:
        return np.asarray(value, dtype)
    return lax._convert_element_type(value, dtype, weak_type=weak_type)


def weakly_typed(value: Any) -> jax.Array:
    """Return a weakly typed array; a NumPy array cannot be weakly typed."""
    if isinstance(value, jax.core.Tracer) or getattr(value, "weak_type", False):
        return value
    with jax.ensure_compile_time_eval(), jax.enable_x64(True), jax.transfer_guard("allow"):
        held = jax.device_put(value)
    aval = held.aval.update(weak_type=True)
    return type(held)(aval, held.sharding, held._arrays, committed=held.committed)


#: Returns the type of the array that represents one element of an extended dtype.
physical_element = core.physical_element_aval


def _reinterpretation(name: str, type_of_result: Any) -> Primitive:
    """Return a primitive that reinterprets an array as another type of the same representation."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(type_of_result)
    jitted = jax.jit(primitive.bind, static_argnames="aval")

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # otherwise it would bind it again, without end
            return jitted(*args, **params)

    primitive.def_impl(run)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    return primitive


#: Returns the array of plain numbers that represents an array of an extended dtype.
physical_array = _reinterpretation("physical_array", core.physical_aval).bind

#: Returns the array of the type `aval` that an array of plain numbers represents.
logical_array = _reinterpretation("logical_array", lambda x, aval: aval).bind


def key_implementations() -> dict[str, Any]:
    """Return the implementations of random number generators by their short names in types."""
    return {implementation.tag: implementation for implementation in prng.prngs.values()}


def key_implementation(dtype: Any) -> Any:
    """Return the implementation of a dtype of keys."""
    return dtype._impl


def has_plain_layout(aval: Aval) -> bool:
    """Return True if an array of this type has no explicit layout in memory."""
    return str(getattr(aval, "layout", "AutoLayout")) == "AutoLayout"


def array_type(
    shape: Sequence[Any],
    dtype: DType,
    weak_type: bool,
    sharding: object = None,
    varying: dict[str, Iterable[str]] | None = None,
    memory_space: Any = jax.memory.Space.Device,
) -> Aval:
    """Return the type of an array; `varying` has its manual mesh axes, by kind."""
    manual = jax.sharding.ManualAxisType(**{k: frozenset(v) for k, v in (varying or {}).items()})
    return jax.core.ShapedArray(
        tuple(shape),
        dtype,
        weak_type,
        sharding=sharding,
        manual_axis_type=manual,
        memory_space=memory_space,
    )


#: The settings that an equation was traced in, each with its neutral value.
CONTEXT_DEFAULTS: dict[str, Any] = {
    "compute_type": None,
    "threefry_partitionable": True,
    "cur_abstract_mesh": jax.sharding.AbstractMesh((), ()),
    "cur_layout_mode": getattr(getattr(layout, "LayoutMode", None), "AUTO", None),
    "remove_size_one_mesh_axis": False,
    "no_collectives": frozenset(),
    "xla_metadata": None,
}

#: The settings of this JAX release, in its order.
_CONTEXT_SETTINGS = [name for name in core.JaxprEqnContext.__slots__ if name in CONTEXT_DEFAULTS]


def context_settings(context: object) -> dict[str, Any]:
    """Return the settings of an equation's context (`eqn.ctx`) by name."""
    return {name: getattr(context, name) for name in _CONTEXT_SETTINGS}


def equation_context(settings: dict[str, Any]) -> Any:
    """Return the context with these settings; others are neutral.

    Raises ValueError for a setting that this JAX does not have, unless it is neutral.
    """
    for name, value in settings.items():
        if name not in _CONTEXT_SETTINGS and value != CONTEXT_DEFAULTS.get(name, settings):
            raise ValueError(f"JAX {jax.__version__} has no setting '{name}' of equations")
    known = {**CONTEXT_DEFAULTS, **settings}
    metadata = known["xla_metadata"]
    known["xla_metadata"] = None if metadata is None else tuple(sorted(metadata.items()))
    # By position: JAX caches one context for the same arguments, and distinguishes keywords.
    return core.JaxprEqnContext._create(*[known[name] for name in _CONTEXT_SETTINGS])


def with_metadata(context: Any, metadata: dict[str, str | None]) -> Any:
    """Return the context of an equation with other XLA metadata; a value of None removes a key.

    Contexts with the same settings are one object.
    """
    settings = context_settings(context)
    merged = {**(settings["xla_metadata"] or {}), **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    return equation_context({**settings, "xla_metadata": kept or None})
