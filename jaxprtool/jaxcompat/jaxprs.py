"""Jaxprs, effects, scan's operand counts and JAX's own dce, the same in every JAX release."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import compress
from typing import Any

from jax._src import core, dtypes, effects
from jax._src.interpreters import partial_eval as pe
from jax._src.state import types as state_types
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var, unmapped_aval
from jax.interpreters.partial_eval import dce_jaxpr, dce_rules

from jaxprtool.jaxcompat.aliases import AnyJaxpr, Atom, Aval, Effect, Params

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
    given = {"constvars": constvars, "invars": invars, "outvars": outvars, "eqns": eqns}
    parts = {k: getattr(old, k) if part is None else list(part) for k, part in given.items()}
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
            known = dict(zip(old.invars, names, strict=True))
            names = tuple(known.get(v, "") for v in invars)
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
        held = {k: params[k] for k in ("ft_in", "ft_out")}
        if tuple(tuple(map(len, tree.unpack())) for tree in held.values()) == sizes:
            return held
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


def _is_high(eqn: JaxprEqn) -> bool:
    """Return True if JAX must replace an equation by others before it can be compiled."""
    if not eqn.params:
        return False
    return bool(eqn.primitive.is_high(*(atom.aval for atom in eqn.invars), **eqn.params))


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
    parts = *parts, debug_info, any(map(_is_high, eqns))
    if ONE_JAXPR_CLASS:
        return Jaxpr(*parts, consts=list(consts))
    return ClosedJaxpr(Jaxpr(*parts), list(consts))


def policy_keeps(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Return True if a policy of `jax.checkpoint` saves or offloads an equation's results."""
    decision = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return not isinstance(pe.ensure_enum(decision), pe.RecomputeType)
