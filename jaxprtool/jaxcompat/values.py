"""What parameters, types and equation contexts hold that has no public name."""

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

#: The classes whose instances 0.12's `call_hi_primitive` holds, for some of `jax.numpy`'s
#: functions: those that are made of types and plain values.
_HIGH_PRIMITIVES = (
    getattr(numpy_hijax, "Nonzero", None),
    getattr(numpy_hijax, "SearchSorted", None),
    getattr(numpy_hijax, "Einsum", None),
    getattr(ufuncs, "Ldexp", None),
    getattr(ufuncs, "Frexp", None),
)
HIGH_PRIMITIVES: tuple[type, ...] = tuple(filter(None, _HIGH_PRIMITIVES))

#: What a jit's sharding is if nothing was asked for.
UNSPECIFIED = sharding_impls.UNSPECIFIED

#: The mesh of devices of which nothing is said.
EMPTY_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())

#: Since 0.12 a jit says how it is to be inlined with an enumeration; before, with a bool.
_Inline = getattr(api, "Inline", None)


def inline_as_word(inline: Any) -> bool | str:
    """How a jit is to be inlined: False (as JAX likes), True (at once), or one of other ways."""
    if _Inline is None or isinstance(inline, bool):
        return bool(inline)
    return {_Inline.AUTO: False, _Inline.JAX_EARLY: True}.get(inline, inline.value)


def inline_of_word(word: bool | str) -> Any:
    """The reverse of `inline_as_word`. Raises ValueError for a way that this JAX does not have."""
    if _Inline is None:
        if not isinstance(word, bool):
            raise ValueError(f"JAX {jax.__version__} cannot inline like '{word}'")
        return word
    if isinstance(word, bool):
        return _Inline.JAX_EARLY if word else _Inline.AUTO
    return _Inline(word)


def linear_call_transpose(eqn: JaxprEqn) -> ClosedJaxpr:
    """The transpose of a `linear_call` as a closed jaxpr. Raises what the user's function does."""
    closed, consts = eqn.params["transpose_thunk"]()
    body, count = open_jaxpr(closed), len(consts)
    bound, free = body.invars[:count], body.invars[count:]
    return replace_jaxpr(close_jaxpr(closed), constvars=bound, consts=consts, invars=free)


def linear_call_transpose_param(closed: ClosedJaxpr) -> Params:
    """Return the parameter that makes a `linear_call` have this transpose."""
    transpose = close_jaxpr(pe.convert_constvars_jaxpr(open_jaxpr(closed)))
    return {"transpose_thunk": lambda: (transpose, closed.consts)}


_INTEGERS: frozenset[type] = frozenset({int})


def nested_type(value: object) -> Any:
    """Return the type of a parameter; of a tuple, the types of all that it holds, at any depth.

    Equal parameters of other types are others: 2 is not 2.0, and 1 is not True.
    """
    kind = type(value)
    if not isinstance(value, tuple) or (kind is tuple and _INTEGERS.issuperset(map(type, value))):
        return kind  # so a tuple is one of integers, as most are
    return kind, *map(nested_type, value)


def literal_value(value: object, aval: Aval) -> Any:
    """Return a number or an array as JAX keeps it in a literal of the type `aval`."""
    data = np.asarray(value, aval.dtype)
    typed = {float: literals.TypedFloat, int: literals.TypedInt, complex: literals.TypedComplex}
    kind = type(data.item()) if data.shape == () else None
    # A Python number stays one: the type may hold less of it than its digits say.
    if kind in typed and type(value) in typed and (aval.weak_type or data.item() != value):
        return typed[kind](kind(value), aval.dtype)
    return literals.TypedNdArray(data, aval)


def as_literal(value: object, aval: Aval) -> Literal | None:
    """A literal for a scalar of this type; None for what cannot be one: arrays, keys, refs."""
    if getattr(aval, "shape", None) != () or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if isinstance(aval, AbstractRef) or isinstance(value, jax.core.Tracer):
        return None
    data = np.asarray(value).astype(aval.dtype, copy=False)
    return Literal(literal_value(data.item() if aval.weak_type else data, aval), aval)


def with_weak_type(value: Any, dtype: DType, weak_type: bool) -> Any:
    """Return the array of a value of this dtype, weakly typed or not."""
    if isinstance(value, float | int | complex) and not weak_type:
        return np.asarray(value, dtype)
    return lax._convert_element_type(value, dtype, weak_type=weak_type)


def weakly_typed(value: Any) -> jax.Array:
    """Return an array with a weak type, which an array of NumPy cannot have."""
    if isinstance(value, jax.core.Tracer) or getattr(value, "weak_type", False):
        return value
    with jax.ensure_compile_time_eval(), jax.enable_x64(True), jax.transfer_guard("allow"):
        held = jax.device_put(value)
    aval = held.aval.update(weak_type=True)
    return type(held)(aval, held.sharding, held._arrays, committed=held.committed)


#: Returns the type of the array that holds one element of an extended dtype.
physical_element = core.physical_element_aval


def _reinterpretation(name: str, type_of_result: Any) -> Primitive:
    """A primitive that takes an array for one of another type, of the same representation."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(type_of_result)
    jitted = jax.jit(primitive.bind, static_argnames="aval")

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # which would bind it again, without end
            return jitted(*args, **params)

    primitive.def_impl(run)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    return primitive


#: Returns the array of plain numbers that holds an array of an extended dtype.
physical_array = _reinterpretation("physical_array", core.physical_aval).bind

#: Returns the array of the type `aval`, given by this name, that an array of plain numbers holds.
logical_array = _reinterpretation("logical_array", lambda x, aval: aval).bind


def key_implementations() -> dict[str, Any]:
    """Return the implementations of random number generators by the short names that types bear."""
    return {implementation.tag: implementation for implementation in prng.prngs.values()}


def key_implementation(dtype: Any) -> Any:
    """Return the implementation that a dtype of keys belongs to."""
    return dtype._impl


def has_plain_layout(aval: Aval) -> bool:
    """Return whether nothing is said about how an array of this type lies in memory."""
    return str(getattr(aval, "layout", "AutoLayout")) == "AutoLayout"


def array_type(
    shape: Sequence[Any],
    dtype: DType,
    weak_type: bool,
    sharding: object = None,
    varying: dict[str, Iterable[str]] | None = None,
    memory_space: Any = jax.memory.Space.Device,
) -> Aval:
    """The type of an array, with the axes of manual meshes that it is `varying`, ... over."""
    manual = jax.sharding.ManualAxisType(**{k: frozenset(v) for k, v in (varying or {}).items()})
    return jax.core.ShapedArray(
        tuple(shape),
        dtype,
        weak_type,
        sharding=sharding,
        manual_axis_type=manual,
        memory_space=memory_space,
    )


#: The settings that an equation was traced in, each with the value that says nothing.
CONTEXT_DEFAULTS: dict[str, Any] = {
    "compute_type": None,
    "threefry_partitionable": True,
    "cur_abstract_mesh": jax.sharding.AbstractMesh((), ()),
    "cur_layout_mode": getattr(getattr(layout, "LayoutMode", None), "AUTO", None),
    "remove_size_one_mesh_axis": False,
    "no_collectives": frozenset(),
    "xla_metadata": None,
}

#: Those that this JAX has, in its order.
_CONTEXT_SETTINGS = [name for name in core.JaxprEqnContext.__slots__ if name in CONTEXT_DEFAULTS]


def context_settings(context: object) -> dict[str, Any]:
    """Return the settings of an equation's context (`eqn.ctx`) by name."""
    return {name: getattr(context, name) for name in _CONTEXT_SETTINGS}


def equation_context(settings: dict[str, Any]) -> Any:
    """Return the context with these settings; those that are left out say nothing.

    Raises ValueError for one that this JAX does not have, unless it says nothing.
    """
    for name, value in settings.items():
        if name not in _CONTEXT_SETTINGS and value != CONTEXT_DEFAULTS.get(name, settings):
            raise ValueError(f"JAX {jax.__version__} has no setting '{name}' of equations")
    known = {**CONTEXT_DEFAULTS, **settings}
    metadata = known["xla_metadata"]
    known["xla_metadata"] = None if metadata is None else tuple(sorted(metadata.items()))
    # By position: JAX keeps one context for the same arguments, and takes names to be others.
    return core.JaxprEqnContext._create(*[known[name] for name in _CONTEXT_SETTINGS])


def with_metadata(context: Any, metadata: dict[str, str | None]) -> Any:
    """The context of an equation with other XLA metadata; a value of None takes away what it has.

    Contexts with the same settings are one object.
    """
    settings = context_settings(context)
    merged = {**(settings["xla_metadata"] or {}), **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    return equation_context({**settings, "xla_metadata": kept or None})
