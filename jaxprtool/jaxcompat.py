"""The one module that imports `jax._src` or asks which JAX this is.

JAX spells its intermediate language differently from release to release: a closed jaxpr is a
`ClosedJaxpr` in 0.10 and a plain `Jaxpr` in 0.12; `scan` counts its operands with `num_consts` and
`num_carry` in 0.10 and with the flat trees `ft_in` and `ft_out` in 0.12. Everything that differs is
made the same here, so that the rest of the package reads one spelling.

A *closed* jaxpr below is what `jax.make_jaxpr` returns: a jaxpr with the values of its constants.
On both versions it has `.constvars`, `.consts`, `.invars`, `.outvars`, `.eqns`, `.effects` and
`.debug_info`.
"""

from __future__ import annotations

import ast
import logging
import operator
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from types import FunctionType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import (
    ad_util,
    api,
    config,
    core,
    dtypes,
    effects,
    indexing,
    layout,
    pjit,
    sharding_impls,
    source_info_util,
)
from jax._src import linear_util as lu
from jax._src.export import shape_poly
from jax._src.interpreters import ad, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import solves
from jax._src.lib import _jax, hlo, xla_client
from jax._src.lib.mlir import ir
from jax._src.random import prng
from jax._src.state import indexing as state_indexing
from jax._src.state import types as state_types
from jax.extend.core import (  # noqa: F401  (the IR's classes, for the rest of the package)
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Jaxpr,
    JaxprEqn,
    JaxprTypeError,
    Literal,
    Primitive,
    Var,
    check_jaxpr,
    jaxpr_as_fun,
    new_jaxpr_eqn,
)

Atom: TypeAlias = Var | Literal

#: JAX releases that the test suite runs on, newest last; another one earns a warning.
TESTED_VERSIONS = ((0, 10), (0, 11), (0, 12))

#: Since 0.11 a `Jaxpr` carries its own constants and `ClosedJaxpr` is another name for it.
ONE_JAXPR_CLASS = ClosedJaxpr is Jaxpr


def untested_version() -> str | None:
    """The running JAX's version if the test suite has never seen its release, else None."""
    return None if jax.__version_info__[:2] in TESTED_VERSIONS else jax.__version__


# --- jaxprs -----------------------------------------------------------------------------------


def open_jaxpr(closed: Any) -> Jaxpr:
    """The `Jaxpr` inside a closed jaxpr; on 0.12, and for an open one, the argument itself."""
    return closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed


def close_jaxpr(jaxpr: Any) -> Any:
    """A closed jaxpr for the body of an equation that holds an open one (remat, shard_map)."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def replace_jaxpr(
    jaxpr: Any,
    *,
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    debug_info: DebugInfo,
) -> Any:
    """A jaxpr like the given one, closed or open, from new parts; its effects are its equations'.

    `debug_info` must name as many arguments and results as there are invars and outvars; see
    `filter_debug_info`.
    """
    parts = {
        "constvars": constvars,
        "invars": invars,
        "outvars": outvars,
        "eqns": eqns,
        "effects": pe.make_jaxpr_effects(constvars, invars, outvars, eqns),
        "debug_info": debug_info,
    }
    if ONE_JAXPR_CLASS:
        return jaxpr.replace(**parts, consts=consts)
    new = open_jaxpr(jaxpr).replace(**parts)
    return ClosedJaxpr(new, consts) if isinstance(jaxpr, ClosedJaxpr) else new


def with_equations(jaxpr: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """`jaxpr`, open or closed, with other equations, and with the effects that they have."""
    body = open_jaxpr(jaxpr)
    effs = pe.make_jaxpr_effects(body.constvars, body.invars, body.outvars, eqns)
    body = body.replace(eqns=list(eqns), effects=effs)
    closed = isinstance(jaxpr, ClosedJaxpr) and not ONE_JAXPR_CLASS
    return ClosedJaxpr(body, jaxpr.consts) if closed else body


def with_function_name(jaxpr: Any, name: str) -> Any:
    """A jaxpr, open or closed, that is said to be of a function of this name."""
    body = open_jaxpr(jaxpr)
    body = body.replace(debug_info=body.debug_info._replace(func_src_info=name))
    return body if body is jaxpr or ONE_JAXPR_CLASS else ClosedJaxpr(body, jaxpr.consts)


def filter_debug_info(
    debug_info: DebugInfo, kept_invars: Sequence[bool], kept_outvars: Sequence[bool]
) -> DebugInfo:
    """`debug_info` without the names of the invars and outvars that a pass has dropped."""
    return debug_info._replace(
        arg_names=debug_info.filter_arg_names(kept_invars),
        result_paths=debug_info.filter_result_paths(kept_outvars),
    )


# --- types ------------------------------------------------------------------------------------


def short_dtype_name(dtype: Any) -> str:
    """A dtype's name in a jaxpr: `f32`, `bf16`, `f8_e4m3fn`, `key<fry>`."""
    return dtypes.short_dtype_name(dtype)


# --- effects ----------------------------------------------------------------------------------


def is_removable_effect(effect: Any) -> bool:
    """Whether an equation with this effect may go when its results are unused.

    Reading a ref, allocating one, and mentioning a named axis leave no trace; every other effect
    (writes, prints, callbacks, a primitive's own) does.
    """
    return pe.dceable_effects.contains(effect)


def operand_effects(body: Any, operands: Sequence[Atom]) -> set[Any]:
    """The effects of running `body` on `operands`: those on its invars become theirs."""
    return set(core.eqn_effects(open_jaxpr(body), operands))


def without_named_axes(effs: Iterable[Any], axis_names: Iterable[Any]) -> set[Any]:
    """`effs` less the named-axis effects of axes that an equation binds itself."""
    return set(core.filter_named_axis_effects(set(effs), set(axis_names)))


@contextmanager
def axes_bound(sizes: Iterable[tuple[Any, int]]) -> Iterator[None]:
    """Named axes of these sizes, for tracing and type checking."""
    with core.extend_axis_env_nd(list(sizes)):
        yield


# --- scan's operand counts --------------------------------------------------------------------


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carries."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_count_params(
    params: dict[str, Any], num_consts: int, num_carry: int, num_xs: int, num_ys: int
) -> dict[str, Any]:
    """The parameters in which a scan of this JAX keeps its operand counts."""
    if not SCAN_KEEPS_TREES:
        return {"num_consts": num_consts, "num_carry": num_carry}
    sizes = (num_consts, num_carry, num_xs), (num_carry, num_ys)
    if "ft_in" in params and _scan_sizes(params) == sizes:
        return {"ft_in": params["ft_in"], "ft_out": params["ft_out"]}
    from jax._src import flattree as ft

    nones = ft.nones
    return {
        "ft_in": ft.pack((nones(num_consts), nones(num_carry), nones(num_xs))),
        "ft_out": ft.pack((nones(num_carry), nones(num_ys))),
    }


#: Since 0.12 a scan has flat trees of its operands, and no counts.
SCAN_KEEPS_TREES = find_spec("jax._src.flattree") is not None


def _scan_sizes(params: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(len, params[k].unpack())) for k in ("ft_in", "ft_out"))


# --- dead-code elimination --------------------------------------------------------------------


def jax_dce_rules() -> dict[Primitive, Callable]:
    """The primitives that have a rule in JAX's own table, other packages' included."""
    return pe.dce_rules


def apply_jax_dce_rule(
    used_outputs: Sequence[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    """JAX's own rule for an equation's primitive; KeyError if it has none."""
    rule = pe.dce_rules[eqn.primitive]
    if _DCE_RULES_TAKE_LIVE_INPUTS:
        return rule(list(used_outputs), [True] * len(eqn.invars), eqn)
    return rule(list(used_outputs), eqn)


#: In 0.12 a rule is also told which refs are read after the equation.
_DCE_RULES_TAKE_LIVE_INPUTS = "live_inputs" in pe.dce_jaxpr.__annotations__


def jax_dce_jaxpr(jaxpr: Jaxpr, used_outputs: Any, instantiate: Any = False) -> Any:
    """JAX's own `dce_jaxpr`: what ours is measured against."""
    return pe.dce_jaxpr(jaxpr, used_outputs, instantiate)


# --- the rules of custom_jvp and custom_vjp ---------------------------------------------------


def custom_jvp_rule(eqn: JaxprEqn) -> tuple[str, Any, tuple[bool, ...]]:
    """A custom_jvp call's rule: its name, its closed jaxpr, and which tangents out are zero.

    The jaxpr takes the primals and all of their tangents, and gives the results and those of
    their tangents that are not symbolic zeros. Raises what the user's rule raises.
    """
    params = eqn.params
    rule = params["jvp_jaxpr_fun"]
    count = len(eqn.invars) - params["num_consts"]
    with _setting(eqn):
        jaxpr, consts, out_zeros = rule.call_wrapped(*[False] * count)
    return rule.debug_info.func_name, _attach(jaxpr, consts), tuple(out_zeros)


def custom_jvp_rule_param(
    name: str, rule: Callable[[], tuple[Any, Sequence[bool]]]
) -> dict[str, Any]:
    """The parameter that makes a custom_jvp call follow a closed jaxpr.

    `rule()`, which is called when the call is differentiated, gives the jaxpr and the mask of
    `custom_jvp_rule`.
    """

    def jvp(*in_zeros: bool) -> tuple[Any, Sequence[Any], list[bool]]:
        jaxpr, out_zeros = rule()
        if not any(in_zeros):
            return *_detach(jaxpr), list(out_zeros)
        avals = [v.aval for v in jaxpr.invars]
        num_primals = len(avals) // 2
        tangents = avals[num_primals:]

        def with_zeros(*args: Any) -> Any:
            given = iter(args[num_primals:])
            pairs = zip(in_zeros, tangents, strict=True)
            full = [ad_util.zeros_like_aval(a) if zero else next(given) for zero, a in pairs]
            return jaxpr_as_fun(jaxpr)(*args[:num_primals], *full)

        given = [a for zero, a in zip(in_zeros, tangents, strict=True) if not zero]
        made = _trace(with_zeros, name, [*avals[:num_primals], *given])
        return *_detach(made), list(out_zeros)

    debug = DebugInfo("custom_jvp jvp", name, None, None)
    return {"jvp_jaxpr_fun": lu.wrap_init(jvp, debug_info=debug)}


def custom_vjp_rule(
    eqn: JaxprEqn,
) -> tuple[tuple[str, str], Any, Any, tuple[int | None, ...], tuple[bool, ...]]:
    """A custom_vjp call's rules: their names, fwd and bwd as closed jaxprs, and two masks.

    fwd takes the primals and gives the residuals, then the results. Residuals that are primals
    are left out of what it gives: the first mask has a primal's index for each of these, None
    for the others. bwd takes all residuals and the results' cotangents and gives the primals'
    cotangents, without the symbolic zeros that the second mask marks. Raises what the rules raise,
    and TypeError for a kind of rule that is more than a function of residuals and cotangents.
    """
    params = eqn.params
    fwd, bwd = params["fwd_jaxpr_thunk"], params["bwd"]
    primals = [v.aval for v in eqn.invars[params["num_consts"] :]]
    if getattr(bwd.f, "call_with_accums", None) is not None:
        raise TypeError("its backward rule accumulates into gradient buffers")
    with _setting(eqn):
        forward = _attach(*fwd.call_wrapped(*[True] * len(primals)))
        _, res_tree, forwarded = params["out_trees"]()
        new = iter(v.aval for v in forward.outvars)
        residuals = [next(new) if i is None else primals[i] for i in forwarded]
        assert len(residuals) == res_tree.num_leaves
        cotangents = [v.aval.to_ct_aval() for v in eqn.outvars]
        zeros: list[bool] = []

        def backward(*args: Any) -> list[Any]:
            cts = bwd.call_wrapped(*args)
            if BWD_GIVES_LOGS:
                cts, logs = cts
                if logs is not None:
                    raise TypeError("its backward rule writes a log")
            zeros[:] = [isinstance(ct, ad_util.Zero | ad_util.SymbolicZero) for ct in cts]
            return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

        made = _trace(backward, bwd.debug_info.func_name, [*residuals, *cotangents])
    names = fwd.debug_info.func_name, bwd.debug_info.func_name
    return names, forward, made, tuple(forwarded), tuple(zeros)


def custom_vjp_rule_params(
    names: tuple[str, str], rules: Callable[[], tuple[Any, ...]], primals: Sequence[Any]
) -> dict[str, Any]:
    """The parameters that make a custom_vjp call follow two closed jaxprs.

    `rules()`, which is called when the call is differentiated, gives the two jaxprs and the two
    masks of `custom_vjp_rule`. `primals` are the types of the operands that are no constants.
    """

    def fwd(*perturbed: bool) -> tuple[Any, Sequence[Any]]:
        return _detach(rules()[0])

    def bwd(*args: Any) -> Any:
        _, backward, forwarded, in_zeros = rules()
        residuals, cts = args[: len(forwarded)], args[len(forwarded) :]
        cotangents = [v.aval for v in backward.invars[len(forwarded) :]]
        full = [
            ad_util.zeros_like_aval(aval) if isinstance(ct, ad_util.SymbolicZero) else ct
            for ct, aval in zip(cts, cotangents, strict=True)
        ]
        given = iter(jaxpr_as_fun(backward)(*residuals, *full))
        result = [
            ad_util.Zero(aval.to_ct_aval()) if zero else next(given)
            for zero, aval in zip(in_zeros, primals, strict=True)
        ]
        return (result, None) if BWD_GIVES_LOGS else result

    def out_trees() -> tuple[Any, Any, list[int | None]]:
        _, backward, forwarded, _ = rules()
        num_residuals = len(forwarded)
        results, residuals = len(backward.invars) - num_residuals, num_residuals
        return _flat_tree(results), _flat_tree(residuals), list(forwarded)

    fwd_name, bwd_name = names
    fwd_debug = DebugInfo("custom_vjp fwd", fwd_name, None, None)
    bwd_debug = DebugInfo("custom_vjp bwd", bwd_name, None, None)
    return {
        "fwd_jaxpr_thunk": lu.wrap_init(fwd, debug_info=fwd_debug),
        "bwd": lu.wrap_init(bwd, debug_info=bwd_debug),
        "out_trees": out_trees,
    }


def _flat_tree(count: int) -> Any:
    return jax.tree.structure([0] * count)


class _Identity:
    """An object that equals nothing but itself, to be part of a key."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


#: What JAX makes anew for each call of a custom rule, and what the rule does not depend on.
_OF_ONE_CALL = (core.Trace, lu.Store, lu.EqualStore, lu.InitialResultPaths)


def live_key(value: Any) -> Hashable:
    """A key for a live rule: equal for two closures that JAX made around the same functions.

    JAX wraps a user's rule anew for each call of the custom function. The key is made of what the
    wrappers close over: the user's functions and static arguments, trees and types.
    """
    match value:
        case lu.WrappedFun():
            return live_key(value.f), live_key(tuple(value.transforms))
        case FunctionType() if value.__module__.startswith(("jax.", "jaxprtool.")):
            free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            # `_memoize` keeps its table, and a mark, beside the function.
            cells = [cell for name, cell in free if name not in ("cells", "sentinel")]
            return value.__code__, tuple(live_key(cell.cell_contents) for cell in cells)
        case tuple() | list():
            return tuple(map(live_key, value))
        case _ if isinstance(value, _OF_ONE_CALL):
            return None
    value = getattr(value, "val", value)  # Hashable and Unhashable hold static arguments
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


#: Since 0.12 a backward rule gives its cotangents and a log, which is None for most.
BWD_GIVES_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")


@contextmanager
def _setting(eqn: JaxprEqn) -> Iterator[None]:
    """The context an equation was traced in, with the axes that are manual there bound."""
    mesh = eqn.ctx.cur_abstract_mesh
    sizes = [] if mesh.empty else [(name, mesh.shape[name]) for name in mesh.manual_axes]
    with eqn.ctx.manager, axes_bound(sizes):
        yield


def _trace(fun: Callable[..., Any], name: str, avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function that takes and gives flat values, all of the types given."""
    wrapped = lu.wrap_init(fun, debug_info=DebugInfo("custom rule", name, None, None))
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return _attach(jaxpr, consts)


def _attach(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A closed jaxpr from what JAX's tracing gives: an open one and its constants apart."""
    if not ONE_JAXPR_CLASS:
        return ClosedJaxpr(jaxpr, consts)
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    count = len(consts)
    constvars, invars = jaxpr.invars[:count], jaxpr.invars[count:]
    return jaxpr.replace(constvars=constvars, consts=consts, invars=invars, debug_info=names)


def _detach(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The reverse of `_attach`."""
    if not ONE_JAXPR_CLASS:
        return closed.jaxpr, closed.consts
    return pe.convert_constvars_jaxpr(closed), closed.consts


# --- where an equation comes from -------------------------------------------------------------


#: Our own frames, as JAX's, are no place where a user would look for an equation.
source_info_util.register_exclusion(os.path.join(os.path.dirname(os.path.abspath(__file__)), ""))


def user_frame(eqn: JaxprEqn) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that made `eqn`, or None if unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name)


def user_place(eqn: JaxprEqn) -> tuple[str, int, int, str] | None:
    """File, line, column (from 1) and function of the user's code that made `eqn`, or None."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.start_column + 1, frame.function_name


def name_stack(eqn: JaxprEqn) -> str:
    """The name scopes around `eqn`, as `outer/inner`, relative to the jaxpr it stands in."""
    return str(eqn.source_info.name_stack)


# --- JAX's own printing -----------------------------------------------------------------------


def printing_rule(primitive: Primitive) -> str | None:
    """The name of the function with which JAX prints equations of `primitive`, if it has one."""
    rule = core.pp_eqn_rules.get(primitive)
    return None if rule is None else getattr(rule, "__name__", repr(rule))


def print_with_rule(
    eqn: JaxprEqn, var_names: Any, shared: dict[Any, str], types: bool
) -> Callable[[int, int | None], str]:
    """`eqn` as JAX's own printing rule writes it, as a function of an indentation and a width.

    With no width, all of it comes on one line. Further lines are indented by that many columns;
    so is the first, but its indentation is left out. `var_names` maps variables to names, and
    names those it has not seen; `shared` maps jaxprs that are printed elsewhere to their names.
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


def printed_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs, open, that JAX prints apart if it meets them twice."""
    rule = getattr(core, "pp_subjaxprs_rules", {}).get(eqn.primitive)
    if rule is not None:
        return [open_jaxpr(jaxpr) for _, jaxpr in rule(eqn)]
    return list(core.jaxprs_in_params(eqn.params))


def is_unspecified(sharding: Any) -> bool:
    """Whether a jit's sharding says that nothing was asked for."""
    return isinstance(sharding, sharding_impls.UnspecifiedValue)


# --- what parameters and types hold -----------------------------------------------------------


AbstractRef = state_types.AbstractRef
AbstractToken = core.AbstractToken
ArrayCopySemantics = xla_client.ArrayCopySemantics
IndexSlice = indexing.Slice
KeyType = prng.KeyTy
LinearSolveTuple = solves._LinearSolveTuple
NDIndexer = state_indexing.NDIndexer

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
    return {False: _Inline.AUTO, True: _Inline.JAX_EARLY}.get(word) or _Inline(word)


def linear_call_transpose(eqn: JaxprEqn) -> Any:
    """The transpose of a `linear_call` as a closed jaxpr. Raises what the user's function does."""
    closed, consts = eqn.params["transpose_thunk"]()
    body, count = open_jaxpr(closed), len(consts)
    return new_jaxpr(
        body.invars[:count],
        consts,
        body.invars[count:],
        body.outvars,
        body.eqns,
        body.debug_info._replace(arg_names=None, result_paths=None),
    )


def linear_call_transpose_param(closed: Any) -> dict[str, Any]:
    """The parameter that makes a `linear_call` have this transpose."""
    transpose = close_jaxpr(pe.convert_constvars_jaxpr(open_jaxpr(closed)))
    return {"transpose_thunk": lambda: (transpose, closed.consts)}


def key_implementations() -> dict[str, Any]:
    """The implementations of random number generators by the short names that types bear."""
    return {implementation.tag: implementation for implementation in prng.prngs.values()}


def key_type(implementation: Any) -> Any:
    """The dtype of keys of an implementation."""
    return prng.KeyTy(implementation)


def key_implementation(dtype: Any) -> Any:
    """The implementation that a dtype of keys belongs to."""
    return dtype._impl


def is_symbolic_dimension(size: Any) -> bool:
    """Whether a size is an expression such as `2*n`."""
    return core.is_symbolic_dim(size)


SymbolicDimension = shape_poly._DimExpr


def symbolic_constraints(scope: jax.export.SymbolicScope) -> tuple[str, ...]:
    """What is known of the dimensions of a scope, as `jax.export.symbolic_shape` takes it."""
    return tuple(constraint.debug_str for constraint in scope._explicit_constraints)


def has_plain_layout(aval: Any) -> bool:
    """Whether nothing is said about how an array of this type lies in memory."""
    return str(getattr(aval, "layout", "AutoLayout")) == "AutoLayout"


def array_type(
    shape: Sequence[Any],
    dtype: Any,
    weak_type: bool,
    sharding: Any = None,
    varying: dict[str, Iterable[str]] | None = None,
    memory_space: Any = jax.memory.Space.Device,
) -> Any:
    """The type of an array, with the axes of manual meshes that it is `varying`, ... over."""
    manual = jax.sharding.ManualAxisType(**{k: frozenset(v) for k, v in (varying or {}).items()})
    return core.ShapedArray(
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


def context_settings(context: Any) -> dict[str, Any]:
    """The settings of an equation's context (`eqn.ctx`) by name."""
    return {name: getattr(context, name) for name in _CONTEXT_SETTINGS}


def equation_context(settings: dict[str, Any]) -> Any:
    """The context with these settings; those that are left out say nothing.

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


# --- JAX's own test programs ------------------------------------------------------------------


def primitive_test_programs() -> Iterator[Any]:
    """JAX's own primitive test harnesses, thousands of them; needs absl-py."""
    from jax._src.internal_test_util import test_harnesses

    yield from test_harnesses.all_harnesses


# --- lowering ---------------------------------------------------------------------------------


def with_border_names(jaxpr: Any, arg_names: Sequence[str], out_names: Sequence[str]) -> Any:
    """A closed jaxpr whose lowering names its arguments and results like this."""
    body = open_jaxpr(jaxpr)
    debug = body.debug_info._replace(arg_names=tuple(arg_names), result_paths=tuple(out_names))
    body = body.replace(debug_info=debug)
    return body if ONE_JAXPR_CLASS else ClosedJaxpr(body, jaxpr.consts)


def traced_jaxpr(
    jaxpr: Any,
    name: str,
    in_tree: Any,
    out_tree: Any,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
) -> jax.stages.Traced:
    """A closed jaxpr as `jax.jit(fun).trace(...)` gives that of `fun`, ready for `.lower()`.

    `name` is the function's, `in_tree` the structure of its `(args, kwargs)`; `donated` are
    positions among the flat arguments.
    """
    empty = jax.jit(lambda *flat: (), donate_argnums=tuple(donated), keep_unused=keep_unused)
    traced = empty.trace(*map(_as_argument, (v.aval for v in jaxpr.invars)))
    count = len(jaxpr.outvars)
    traced._params = {
        **traced._params,
        "jaxpr": jaxpr,
        "name": name,
        "out_shardings": (sharding_impls.UNSPECIFIED,) * count,
        "out_layouts": (None,) * count,
    }
    traced._in_tree, traced.out_tree = in_tree, out_tree
    return traced


def _as_argument(aval: Any) -> jax.ShapeDtypeStruct:
    """What stands for an argument of this type when a function is traced."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def module_under_axes(
    jaxpr: Any,
    name: str,
    axis_env: Sequence[tuple[Any, int]],
    platform: str,
    donated: Sequence[int],
) -> Any:
    """The StableHLO module of a closed jaxpr with free named axes, one replica per index of them.

    JAX itself gives its collectives to the partitions of one program; here they go to replicas,
    as those of `pmap` did: without channels, and with `replica_id` for `partition_id`.
    """
    names, sizes = zip(*axis_env, strict=True)
    manual = (jax.sharding.AxisType.Manual,) * len(names)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=manual)
    avals = {"in_avals": jaxpr.in_avals, "out_avals": jaxpr.out_avals}
    known = mlir.lower_jaxpr_to_module.__annotations__
    with axes_bound(axis_env), _DENSE_REPLICA_GROUPS():
        module = mlir.lower_jaxpr_to_module(
            name,
            jaxpr,
            num_const_args=0,
            ordered_effects=list(effects.ordered_effects.filter_in(jaxpr.effects)),
            platforms=(platform,),
            backend=None,
            axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset(names)),
            donated_args=[i in donated for i in range(len(jaxpr.in_avals))],
            arg_names=open_jaxpr(jaxpr).debug_info.arg_names,
            result_names=open_jaxpr(jaxpr).debug_info.result_paths,
            lowering_parameters=mlir.LoweringParameters(hoist_constants_as_args=False),
            **{key: avals[key] for key in avals if key in known},
        ).module
    _give_to_replicas(module, mesh.size)
    return module


#: Since 0.12 replica groups are written as axes of a mesh, unless that is turned off.
_DENSE_REPLICA_GROUPS = (
    partial(config.use_rgv3, False) if hasattr(config, "use_rgv3") else nullcontext
)


def _give_to_replicas(module: Any, count: int) -> None:
    """Turn the collectives of a module from those of partitions to those of replicas."""

    def visit(op: Any) -> Any:
        for name in ("channel_handle", "use_global_device_ids"):
            if name in op.attributes:
                del op.attributes[name]
        if op.name == "stablehlo.partition_id":
            with ir.InsertionPoint(op), op.location:
                new = ir.Operation.create("stablehlo.replica_id", [op.result.type])
            op.result.replace_all_uses_with(new.result)
            op.erase()
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with module.context:
        i32 = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(i32, count)


def exported_names(artifact: jax.export.Exported) -> tuple[dict[int, str], dict[int, str]]:
    """The names that an exported function's module has for its flat arguments and results."""
    kept, count = artifact.module_kept_var_idx, len(artifact.out_avals)
    with mlir.make_ir_context():
        module = _jax.mlir.deserialize_portable_artifact(artifact.mlir_module_serialized)
        functions = {
            op.attributes["sym_name"].value: op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        # Where sizes are symbolic, `main` computes them and calls the function proper.
        main = functions.get("_wrapped_jax_export_main", functions["main"])
        places = [a.location for a in main.arguments][-len(kept) :] if kept else []
        results = list(main.result_attrs)[-count:] if count else []
        named = zip(kept, places, strict=True)
        return (
            {i: place.name_str for i, place in named if isinstance(place, ir.NameLoc)},
            {
                i: attributes["jax.result_info"].value
                for i, attributes in enumerate(results)
                if "jax.result_info" in attributes
            },
        )


def hlo_text(computation: Any) -> str:
    """The text of an `XlaComputation`, with the names and source lines of its operations."""
    options = hlo.HloPrintOptions.short_parsable()
    options.print_metadata = True
    return computation.as_hlo_module().to_string(options)


def xla_computation(module: Any, tuple_args: bool, return_tuple: bool) -> Any:
    """A StableHLO module as the `XlaComputation` of jaxlib."""
    code = mlir.module_to_bytecode(module)
    return _jax.mlir.mlir_module_to_xla_computation(code, tuple_args, return_tuple)


# --- running ----------------------------------------------------------------------------------


def keep_backend_probing_quiet() -> None:
    """Keep JAX from logging which accelerators it looks for and does not find."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)


class _Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def callback_failures() -> Iterator[list[BaseException]]:
    """Collect the exceptions that a program's Python callbacks raise while it runs.

    XLA hands on no more than their text; JAX logs each with its traceback before that, and here
    the log is read instead of printed.
    """
    handler = _Failures()
    loggers = [logging.getLogger(f"jax._src.{name}") for name in ("callback", "debugging")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.errors
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def has_checks(jaxpr: Any) -> bool:
    """Whether a jaxpr holds `checkify.check`s that nothing has functionalized yet."""
    return any(type(effect).__name__ == "ErrorEffect" for effect in jaxpr.effects)


# --- trying what a function traces to ---------------------------------------------------------


def traced_like(eqn: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> Any:
    """The closed jaxpr of `fun` on flat values of the types of `operands`, in `eqn`'s context."""
    with _setting(eqn):
        return _trace(fun, "trial", [v.aval for v in operands])


def alone(eqn: JaxprEqn, operands: Sequence[Var], like: Any) -> Any:
    """The closed jaxpr of one equation of `operands`; `like` is one with as many arguments."""
    debug = like.debug_info._replace(arg_names=None, result_paths=None)
    outs = list(eqn.outvars)
    parts = {"invars": list(operands), "outvars": outs, "eqns": [eqn]}
    return replace_jaxpr(like, constvars=[], consts=[], debug_info=debug, **parts)


# --- making programs anew ---------------------------------------------------------------------


def new_jaxpr(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    debug_info: DebugInfo,
) -> Any:
    """A closed jaxpr; its effects are its equations'."""
    effs = pe.make_jaxpr_effects(constvars, invars, outvars, eqns)
    parts = list(constvars), list(invars), list(outvars), list(eqns), effs, debug_info
    if ONE_JAXPR_CLASS:
        return Jaxpr(*parts, consts=list(consts))
    return ClosedJaxpr(Jaxpr(*parts), list(consts))


def registered_primitives() -> dict[str, Primitive]:
    """The primitives that JAX can run, differentiate or check, by name; plug-ins' own included."""
    tables: list[Iterable[Any]] = [
        mlir._lowerings,
        *mlir._platform_specific_lowerings.values(),
        ad.primitive_jvps,
        core.custom_typechecks,
        pe.dce_rules,
    ]
    return {primitive.name: primitive for table in tables for primitive in table}


def inferred_types(
    primitive: Primitive, params: dict[str, Any], operands: Sequence[Atom]
) -> tuple[list[Any], set[Any]]:
    """The types of an equation's results, and its effects, as JAX's type checker finds them.

    The effects are those of an equation on these operands. The equation's bodies are not checked,
    nor how they fit the operands of a jit. Raises what the primitive's rule raises.
    """
    rule = core.custom_typechecks.get(primitive)
    if rule is None and primitive.call_primitive:
        results, effs = core._check_call(_names_for_printing, primitive, operands, params)
    elif rule is None or primitive is pjit.jit_p:
        results, effs = primitive.abstract_eval(*(x.aval for x in operands), **params)
        results = results if primitive.multiple_results else [results]
    else:
        results, effs = rule(_names_for_printing, *operands, **params)
    return list(results), core.resolve_input_effects(effs, operands)


def _names_for_printing() -> tuple[Any, Any]:
    return core.JaxprPpContext(), core.JaxprPpSettings()


def fits(declared: Any, actual: Any) -> bool:
    """Whether a variable of one type may stand for a value of another; weak types aside."""
    return core.typecompat(declared, actual)


@contextmanager
def inside_shard_map(
    mesh: Any, newly_manual_axes: frozenset[Any], check_vma: bool, **_: Any
) -> Iterator[None]:
    """The setting in which the body of a `shard_map` with these parameters is traced."""
    axes = newly_manual_axes | set(mesh.manual_axes)
    sizes = [(name, size) for name, size in mesh.shape.items() if name in axes]
    with axes_bound(sizes), config._check_vma(check_vma):
        yield


def source_infos(places: Sequence[tuple[tuple[str, int, int, str] | None, str]]) -> list[Any]:
    """What equations bear as their `source_info`, made from where they come from.

    A place is a frame of the user's code, if known (file, line, column, function), and the name
    scopes around the equation, as `name_stack` gives them.
    """
    frames = [frame for frame, _ in places if frame is not None]
    tracebacks = iter(_tracebacks(frames))
    return [
        source_info_util.SourceInfo(
            None if frame is None else next(tracebacks), source_info_util.new_name_stack(scope)
        )
        for frame, scope in places
    ]


def _tracebacks(frames: Sequence[tuple[str, int, int, str]]) -> list[Any]:
    """A traceback for each frame, with no other of a user's frames in it.

    A traceback can only be taken of a running stack. So for each frame there is a function whose
    code says that it comes from there, called at the bottom of a thread's empty stack.
    """
    results: list[Any] = []
    functions = [_function_at(frame) for frame in frames]
    calls = map(operator.call, functions, repeat(xla_client.Traceback.get_traceback))
    thread = threading.Thread(target=results.extend, args=(calls,))
    thread.start()
    thread.join()
    return results


def _function_at(frame: tuple[str, int, int, str]) -> Callable[..., Any]:
    """A function that calls its argument, and seems to do so in another place."""
    file, line, column, name = frame
    tree = ast.parse("lambda f: f()", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.arg):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = column
    code = compile(tree, file, "eval").co_consts[0]
    return FunctionType(code.replace(co_name=name, co_qualname=name), {})
