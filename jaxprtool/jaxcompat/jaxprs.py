"""Jaxprs and their parts, the same in every JAX release: values, dimensions, printing, ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import compress
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import (
    api,
    core,
    dtypes,
    effects,
    frozen_dict,
    indexing,
    layout,
    literals,
    sharding_impls,
)
from jax._src.dtypes import ExtendedDType
from jax._src.export import shape_poly
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters.batching import AxisData
from jax._src.interpreters.pxla import batched_device_put
from jax._src.lax import lax
from jax._src.lax.control_flow import solves
from jax._src.lib import xla_client
from jax._src.numpy import hijax as numpy_hijax
from jax._src.numpy import ufuncs
from jax._src.random import prng
from jax._src.state import indexing as state_indexing
from jax._src.state import types as state_types
from jax.core import AbstractValue
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Effect,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxprs_in_params,
    unmapped_aval,
)
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr, dce_rules

# --- jaxprs ---------------------------------------------------------------------------------------
# Jaxprs, effects, scan's operand counts and JAX's own dce, the same in every JAX release.

#: Since 0.11 a `Jaxpr` has its own constants and `ClosedJaxpr` is another name for it.
ONE_JAXPR_CLASS = ClosedJaxpr is Jaxpr


# --- jaxprs ------------------------------------------------------------------------------------


def open_jaxpr(closed: ClosedJaxpr) -> Jaxpr:
    """Return the `Jaxpr` in a closed jaxpr; in 0.12, and for an open one, the argument itself."""
    return closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed


def close_jaxpr(jaxpr: AnyJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr for the open body that an equation holds (remat, shard_map)."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def replace_jaxpr(
    jaxpr: AnyJaxpr,
    *,
    constvars: Sequence[Var] | None = None,
    consts: Sequence[Any] | None = None,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
    debug_info: DebugInfo | None = None,
) -> ClosedJaxpr:
    """Return a jaxpr like the given one, closed or open, with some parts replaced.

    Its effects are its equations'. Unless `debug_info` is given, arguments keep their names, and
    results keep theirs if they are the same atoms; see `filter_debug_info`.
    """
    old = open_jaxpr(jaxpr)
    changes = {"constvars": constvars, "invars": invars, "outvars": outvars, "eqns": eqns}
    parts = {k: getattr(old, k) if part is None else list(part) for k, part in changes.items()}
    effs = pe.make_jaxpr_effects(*parts.values())
    if debug_info is None:
        debug_info = _with_names_of(old, parts["invars"], parts["outvars"])
    parts |= {"effects": effs, "debug_info": debug_info}
    if isinstance(jaxpr, ClosedJaxpr) and consts is None:
        consts = jaxpr.consts
    if ONE_JAXPR_CLASS:
        return jaxpr.replace(**parts, consts=consts)
    body = old.replace(**parts)
    return ClosedJaxpr(body, consts) if isinstance(jaxpr, ClosedJaxpr) else body


def _with_names_of(old: Jaxpr, invars: Sequence[Var], outvars: Sequence[Atom]) -> DebugInfo:
    debug_info = old.debug_info
    if debug_info.arg_names is not None and invars is not old.invars:
        names = debug_info.arg_names
        if len(names) == len(old.invars):
            name_of = dict(zip(old.invars, names, strict=True))
            names = tuple(name_of.get(v, "") for v in invars)
        else:
            names = None
        debug_info = debug_info._replace(arg_names=names)
    if [*map(id, outvars)] != [*map(id, old.outvars)]:
        debug_info = debug_info._replace(result_paths=None)
    return debug_info


def filter_debug_info(
    debug_info: DebugInfo, kept_invars: Sequence[bool], kept_outvars: Sequence[bool]
) -> DebugInfo:
    """Return `debug_info` without the names of the invars and outvars that a pass has dropped.

    Names are left out if there is not one for each variable: JAX counts a static argument of a
    custom rule, and an argument that is None, among the names.
    """
    names, results = debug_info.arg_names, debug_info.result_paths
    return debug_info._replace(
        arg_names=_filtered(names, kept_invars), result_paths=_filtered(results, kept_outvars)
    )


def _filtered(names: Sequence[str] | None, kept: Sequence[bool]) -> tuple[str, ...] | None:
    if names is None or len(names) != len(kept):
        return None
    return tuple(compress(names, kept))


# --- types -------------------------------------------------------------------------------------


#: Returns a dtype's name in a jaxpr: `f32`, `bf16`, `f8_e4m3fn`, `key<fry>`.
short_dtype_name = dtypes.short_dtype_name


def stacked_aval(length: int, aval: Aval) -> Aval:
    """Return the type of `length` values of one type, on a new leading axis."""
    return unmapped_aval(length, 0, aval)


def varying_axes(aval: Aval) -> frozenset[Hashable]:
    """Return the manual mesh axes over which a value in a `shard_map` with check_vma varies."""
    return aval.mat.varying


# --- effects -----------------------------------------------------------------------------------


#: Whether an equation with this effect may be removed if its results are unused. Reading a ref,
#: allocating one, or naming an axis has no visible effect; writes, prints and all others do.
is_removable_effect = pe.dceable_effects.contains


def ref_of(effect: Effect) -> Any:
    """Return the variable of the ref that an equation with this effect reads or writes, or None."""
    return effect.input if isinstance(effect, state_types.RefEffect) else None


def allocates_refs(jaxpr: AnyJaxpr) -> bool:
    """Return True if a jaxpr, open or closed, allocates refs."""
    return core.internal_mutable_array_effect in jaxpr.effects


def ordered_effects(effs: Iterable[Effect]) -> set[Effect]:
    """Return those of `effs` that are ordered."""
    return {effect for effect in effs if effects.ordered_effects.contains(effect)}


def allowed_in_loops(effs: Iterable[Effect]) -> bool:
    """Return True if the body of a loop may have all of these effects."""
    return not effects.control_flow_allowed_effects.filter_not_in(effs)


def operand_effects(body: ClosedJaxpr, operands: Sequence[Atom]) -> set[Effect]:
    """Return the effects of running `body` on `operands`: effects on its invars become theirs."""
    return set(core.eqn_effects(open_jaxpr(body), operands))


def without_named_axes(effs: Iterable[Effect], axis_names: Iterable[Any]) -> set[Effect]:
    """Return `effs` without the effects on named axes that an equation binds itself."""
    return set(core.filter_named_axis_effects(set(effs), set(axis_names)))


def only_names_axes(effs: Iterable[Effect]) -> bool:
    """Return True if an equation with these effects has no other effect than to name axes."""
    return all(isinstance(effect, core.NamedAxisEffect) for effect in effs)


#: The context in which named axes, given as pairs with their sizes, are bound.
axes_bound = core.extend_axis_env_nd


# --- scan's operand counts ---------------------------------------------------------------------


def scan_counts(params: Params) -> tuple[int, int]:
    """Return the numbers of constants and of carries among a scan's operands."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_count_params(
    params: Params, num_consts: int, num_carry: int, num_xs: int, num_ys: int
) -> Params:
    """Return the parameters in which a scan of this JAX release stores its operand counts."""
    if not SCAN_KEEPS_TREES:
        return {"num_consts": num_consts, "num_carry": num_carry}
    sizes = (num_consts, num_carry, num_xs), (num_carry, num_ys)
    if "ft_in" in params:
        trees = {k: params[k] for k in ("ft_in", "ft_out")}
        if tuple(tuple(map(len, tree.unpack())) for tree in trees.values()) == sizes:
            return trees
    return {"ft_in": _tree_of(*sizes[0]), "ft_out": _tree_of(*sizes[1])}


@lru_cache(maxsize=1024)
def _tree_of(*sizes: int) -> Any:
    """Return a flat tree with the given number of leaves in each part."""
    from jax._src import flattree

    return flattree.pack(tuple(map(flattree.nones, sizes)))


#: Since 0.12 a scan has flat trees of its operands, and no counts.
SCAN_KEEPS_TREES = find_spec("jax._src.flattree") is not None


# --- dead-code elimination ---------------------------------------------------------------------


#: JAX's own table of rules by primitive, other packages' included.
jax_dce_rules = dce_rules


def apply_jax_dce_rule(
    used_outputs: Sequence[bool], eqn: JaxprEqn, live_inputs: Sequence[bool] | None = None
) -> tuple[list[bool], JaxprEqn | None]:
    """Apply JAX's own rule for an equation's primitive; raise KeyError if it has none.

    `live_inputs` are the operands that may be read after the equation; all if it is None.
    """
    rule = dce_rules[eqn.primitive]
    if _DCE_RULES_TAKE_LIVE_INPUTS:
        live = [True] * len(eqn.invars) if live_inputs is None else list(live_inputs)
        return rule(list(used_outputs), live, eqn)
    return rule(list(used_outputs), eqn)


#: In 0.12 a rule also takes which refs are read after the equation.
_DCE_RULES_TAKE_LIVE_INPUTS = "live_inputs" in dce_jaxpr.__annotations__


def jax_dce_jaxpr(
    jaxpr: Jaxpr, used_outputs: Any, instantiate: Any = False, live_inputs: Any = True
) -> Any:
    """Run JAX's own `dce_jaxpr`, to compare with ours; before 0.12 it keeps all refs live."""
    more = (live_inputs,) if _DCE_RULES_TAKE_LIVE_INPUTS else ()
    return dce_jaxpr(jaxpr, used_outputs, instantiate, *more)


def _any_is_high(eqns: Sequence[JaxprEqn]) -> bool:
    """Return True if JAX must replace an equation by others before these can be compiled."""
    alike: dict[int, JaxprEqn] = {}  # by the parameters, which many equations of a file share
    for eqn in (eqn for eqn in eqns if eqn.params):
        is_high = eqn.primitive.is_high
        if getattr(is_high, "__func__", None) is Primitive.is_high:  # which looks at bodies alone
            alike[identity(eqn.params)] = eqn
        elif is_high(*(atom.aval for atom in eqn.invars), **eqn.params):
            return True
    return any(eqn.primitive.is_high(**eqn.params) for eqn in alike.values())


def new_jaxpr(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    debug_info: DebugInfo,
) -> ClosedJaxpr:
    """Return a closed jaxpr with the effects of its equations."""
    effs = pe.make_jaxpr_effects(constvars, invars, outvars, eqns)
    parts: tuple[Any, ...] = list(constvars), list(invars), list(outvars), list(eqns), effs
    parts = *parts, debug_info, _any_is_high(eqns)
    if ONE_JAXPR_CLASS:
        return Jaxpr(*parts, consts=list(consts))
    return ClosedJaxpr(Jaxpr(*parts), list(consts))


def policy_keeps(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Return True if a policy of `jax.checkpoint` saves or offloads an equation's results."""
    decision = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return not isinstance(pe.ensure_enum(decision), pe.RecomputeType)


# --- values ---------------------------------------------------------------------------------------
# Objects in parameters, types and equation contexts that have no public name.

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
    if inline is _Inline.AUTO:
        return False
    return inline is _Inline.JAX_EARLY or inline.value


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


def holds_integers(values: tuple[object, ...]) -> bool:
    """Return True for a tuple of integers, or of such tuples at any depth."""
    for value in values:
        cls = type(value)
        if cls is int:
            continue
        if not (isinstance(value, tuple) and cls is tuple and holds_integers(value)):
            return False
    return True


def nested_type(value: object) -> Any:
    """Return the type of a parameter; for a tuple, the types of its elements, at any depth.

    Equal parameters of different types are different: 2 is not 2.0, and 1 is not True.
    """
    cls = type(value)
    if not isinstance(value, tuple) or (cls is tuple and holds_integers(value)):
        return cls  # denotes integers at any depth, the most common
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
        array = jax.device_put(value)
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed)


def array_beside(value: np.ndarray, weak_type: bool, other: jax.Array) -> jax.Array:
    """Return an array on the one device of another. `jax.device_put` takes four times as long."""
    aval = jax.core.ShapedArray(value.shape, value.dtype, weak_type=weak_type)
    devices, committed = list(other.devices()), other.committed
    return batched_device_put(aval, other.sharding, [value], devices, committed, enable_x64=True)


def physical_element(dtype: Any) -> jax.core.ShapedArray:
    """Return the type of the array that represents one element of an extended dtype."""
    if getattr(dtype, "_rules", None) is None:  # a barrier of a GPU
        return jax.core.ShapedArray((0,), np.dtype(np.int8))
    return core.physical_element_aval(dtype)


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
    all_settings = {**CONTEXT_DEFAULTS, **settings}
    metadata = all_settings["xla_metadata"]
    all_settings["xla_metadata"] = None if metadata is None else tuple(sorted(metadata.items()))
    # By position: JAX caches one context for the same arguments, and distinguishes keywords.
    return core.JaxprEqnContext._create(*[all_settings[name] for name in _CONTEXT_SETTINGS])


def with_metadata(context: Any, metadata: dict[str, str | None]) -> Any:
    """Return the context of an equation with other XLA metadata; a value of None removes a key.

    Contexts with the same settings are one object.
    """
    settings = context_settings(context)
    merged = {**(settings["xla_metadata"] or {}), **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    return equation_context({**settings, "xla_metadata": kept or None})


# --- shapes ---------------------------------------------------------------------------------------
# JAX's symbolic dimensions: their constraints, and the sizes that fit actual shapes.

SymbolicDimension = shape_poly._DimExpr

#: The primitive whose equations return the value of a symbolic dimension.
DIM_AS_VALUE = shape_poly.dim_as_value_p.name

#: Whether a size is an expression such as `2*n`.
is_symbolic_dimension = jax.export.is_symbolic_dim


def lacks_a_size(error: Exception) -> bool:
    """Return True if JAX raised an error because no argument determines a symbol."""
    if isinstance(error, NotImplementedError):  # for an equation that is evaluated by itself
        return DIM_AS_VALUE in str(error)
    return isinstance(error, shape_poly.UnexpectedDimVar)


def mentions_symbols(value: Any) -> bool:
    """Return True if a parameter has a symbolic dimension, or is a body with one."""
    if isinstance(value, dict):
        return any(map(mentions_symbols, value.values()))
    if isinstance(value, tuple | list):
        return any(map(mentions_symbols, value))
    if isinstance(value, ClosedJaxpr):
        value = open_jaxpr(value)
    if not isinstance(value, Jaxpr):
        return is_symbolic_dimension(value)
    variables = [*value.invars, *(v for eqn in value.eqns for v in eqn.outvars)]
    shapes = (getattr(v.aval, "shape", ()) for v in variables)
    return any(map(mentions_symbols, shapes)) or any(mentions_symbols(e.params) for e in value.eqns)


def dimension_terms(size: Any) -> list[tuple[int, list[tuple[Any, int]]]]:
    """Return the terms of a symbolic dimension: coefficients, and factors with exponents.

    A factor is the name of a symbol, or a tuple of an operation ("floordiv", "mod", "max" or
    "min") and its operands, which are symbolic dimensions or constants of their type.
    """
    return [
        (coefficient, [(f.var or (f.operation, *f.operands), n) for f, n in term._factors])
        for term, coefficient in size._sorted_terms
    ]


@dataclass(frozen=True)
class SymbolicConstraint:
    """A constraint of a scope: `left == right`, or `left >= right`; `text` is the user's."""

    text: str
    equal: bool
    left: Any
    right: Any


def symbolic_constraints(scope: jax.export.SymbolicScope) -> tuple[SymbolicConstraint, ...]:
    """Return the constraints on the dimensions of a scope, in the order of their definition."""
    return tuple(
        SymbolicConstraint(c.debug_str, c.cmp == shape_poly.Comparator.EQ, c.e1, c.e2)
        for c in scope._explicit_constraints
    )


def solved_symbols(avals: Sequence[Aval], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the size of each symbol for which these types have these shapes, of the same ranks.

    Raises ValueError, with JAX's message, if there are none. The message names a size by the
    position of its type: `args[1].shape[0]`.
    """
    tree = jax.tree.structure(((0,) * len(avals), {}))
    solution, constraints, places = shape_poly.solve_dim_vars(tuple(avals), tree)
    env = {name: shapes[argument][axis] for name, argument, axis in places}
    evaluator = shape_poly.ShapeEvaluator(env)
    constraints.check_statically(evaluator)
    sizes = {name: evaluator.evaluate(size) for name, size in solution.items()}
    return {
        name: size if is_symbolic_dimension(size) else operator.index(size)
        for name, size in sizes.items()
    }


# --- printing -------------------------------------------------------------------------------------
# JAX's own printing rules.


def printing_rule(primitive: Primitive) -> str | None:
    """Return the name of JAX's printing function for equations of `primitive`, or None."""
    rule = core.pp_eqn_rules.get(primitive)
    return None if rule is None else getattr(rule, "__name__", repr(rule))


def add_printing_rule(
    primitive: Primitive, name: str, shown: Callable[[Params], list[tuple[str, Any]]]
) -> None:
    """Make JAX print the parameters of `primitive` that `shown` returns, by a rule `name`."""

    def rule(eqn: JaxprEqn, context: object, settings: Any) -> Any:
        params = dict(shown(eqn.params))
        return core._pp_eqn(eqn.replace(params=params), context, settings, list(params))

    rule.__name__ = name
    core.pp_eqn_rules[primitive] = rule


def print_with_rule(
    eqn: JaxprEqn, var_names: Any, shared: dict[Jaxpr, str], types: bool
) -> Callable[[int, int | None], str]:
    """Return a function from an indentation and a width to `eqn` printed by JAX's own rule.

    Without a width, all of it is on one line. Lines after the first are indented by that many
    columns. The first line is laid out for the same indentation, which is left out. `var_names`
    maps variables to names, and names new ones; `shared` maps jaxprs that are printed elsewhere to
    their names.
    """
    context = core.JaxprPpContext()
    context.var_names = var_names
    context.shared_jaxprs = shared
    settings = core.JaxprPpSettings(print_shapes=types)
    doc = core.pp_eqn_rules[eqn.primitive](eqn, context, settings)

    def text(indent: int, width: int | None) -> str:
        if width is None:
            return core.pp.group(doc).format(1 << 30, use_color=False)
        margin = core.pp.text(" " * indent)
        lines = core.pp.nest(indent, core.pp.concat([margin, doc]))
        return lines.format(width, use_color=False)[indent:]

    return text


def printed_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs, open, that JAX prints separately if it meets them twice."""
    rule = getattr(core, "pp_subjaxprs_rules", {}).get(eqn.primitive)
    if rule is not None:
        return [open_jaxpr(jaxpr) for _, jaxpr in rule(eqn)]
    return list(jaxprs_in_params(eqn.params))


def is_unspecified(sharding: object) -> bool:
    """Return True if a jit's sharding is unspecified."""
    return sharding is UNSPECIFIED


# --- aliases --------------------------------------------------------------------------------------
# Type names for annotations of JAX objects without a public type.
#
# `jax.Array`, `jax.tree_util.PyTreeDef`, `jax.sharding.Mesh` and the classes of `jax.extend.core`
# are used directly.

Aval: TypeAlias = AbstractValue
"""The type of a value: of an array its shape, dtype, weak type and sharding."""

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
"""A jaxpr with or without the values of its constants; JAX 0.12 has one class for both."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation."""

DType: TypeAlias = np.dtype | ExtendedDType
"""The dtype of an array: of plain numbers, of PRNG keys, or of another package's elements."""

MappedAxis: TypeAlias = AxisData
"""The mapped axis as JAX's batching rules take it."""


# --- identity -------------------------------------------------------------------------------------
# A fast `id` of objects.

#: Returns a number that no other living object has, like `id`. From Python 3.12 on, `id` notifies
#: audit hooks of each call, and JAX imports filelock if it is installed, which has such a hook.
#: Calls of `id` then take ten times as long, which matters for look-ups of every operand.
identity: Callable[[object], int] = object.__hash__


# --- rebound --------------------------------------------------------------------------------------
# Copies of JAX's functions in which some global names have other values.
#
# JAX's rules for a call bind JAX's own primitive, which they name as a global, and its type checker
# calls itself by a global name. A copy with another value for that name is the same rule for
# another primitive, or the same checker that visits each body once. JAX's own function does not
# change.


def rebound(function: Any, **names: Any) -> Any:
    """Return a copy of a function in which global names have other values.

    Functions that it calls are not copied.

    Args:
        function: A function, or a `functools.partial` of functions. Other objects are returned.
        names: The values by name.

    Returns:
        The copy; the function itself if it mentions none of the names.
    """
    if isinstance(function, partial):
        inner, *args = (rebound(part, **names) for part in (function.func, *function.args))
        return partial(inner, *args, **function.keywords)
    if not isinstance(function, FunctionType):
        return function
    if names.keys().isdisjoint(_names(function.__code__)):
        return function
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions defined in it, look up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
