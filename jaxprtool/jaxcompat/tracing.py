"""Trace flat functions to closed jaxprs, by JAX's rules of batching and forward mode."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import jax
from jax._src import api_util, callback, config, core, effects, pjit, shard_map, traceback_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops
from jax._src.state import types as state_types
from jax._src.state.types import RefEffect
from jax._src.tree_util import tracing_registry
from jax.experimental.layout import Format
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var, unmapped_aval
from jax.extend.core.primitives import jit_p
from jax.interpreters.batching import fancy_primitive_batchers
from jax.interpreters.partial_eval import trace_to_jaxpr_dynamic
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.checking import inside_shard_map
from jaxprtool.jaxcompat.jaxprs import (
    ONE_JAXPR_CLASS,
    UNSPECIFIED,
    AbstractRef,
    AnyJaxpr,
    Aval,
    Effect,
    MappedAxis,
    Params,
    axes_bound,
    close_jaxpr,
    inline_of_word,
    new_jaxpr,
    open_jaxpr,
    replace_jaxpr,
)
from jaxprtool.jaxcompat.marks import from_jax

# --- tracing --------------------------------------------------------------------------------------
# Trace flat functions to closed jaxprs, in the context that an equation was traced in.


@contextmanager
def setting_of(eqn: JaxprEqn) -> Iterator[None]:
    """Enter the context that an equation was traced in, with its manual axes bound.

    Types are checked for variation over these axes if a value of the equation varies.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    sizes = [] if mesh.empty else [(name, mesh.shape[name]) for name in mesh.manual_axes]
    types = (getattr(v.aval, "mat", None) for v in (*eqn.invars, *eqn.outvars)) if sizes else ()
    varies = any(manual is not None and manual.varying for manual in types)
    with eqn.ctx.manager, axes_bound(sizes), config._check_vma(varies):
        yield


#: The settings that determine how JAX's functions are traced, with the defaults of JAX's releases.
_DEFAULTS = {
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_enable_custom_prng": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": True,
}


@contextmanager
def default_settings(x64: bool) -> Iterator[None]:
    """Trace with JAX's default configuration, and 64-bit types if `x64`."""
    metadata = config.xla_metadata_context_manager.swap_local(None)
    try:
        with ExitStack() as stack:
            for name, value in {**_DEFAULTS, "jax_enable_x64": x64}.items():
                if name in config.config_states:  # not every release has every setting
                    stack.enter_context(config.config_states[name](value))
            yield
    finally:
        config.xla_metadata_context_manager.set_local(metadata)


@contextmanager
def double_precision() -> Iterator[None]:
    """Enable 64-bit types."""
    with config.config_states["jax_enable_x64"](True):
        yield


def trace_flat(fun: Callable[..., Any], name: str, avals: Sequence[Aval]) -> ClosedJaxpr:
    """Return the closed jaxpr of a function of flat arguments of the given types.

    Calls and loops become equations also under `jax_disable_jit`.
    """
    wrapped = lu.wrap_init(fun, debug_info=DebugInfo("custom rule", name, None, None))
    with jax.disable_jit(False):
        jaxpr, _, consts = trace_to_jaxpr_dynamic(wrapped, list(avals))
    return attach_constants(jaxpr, consts)


def trace_in_setting(
    fun: Callable[..., Any], avals: Sequence[Aval], eqn: JaxprEqn | None
) -> ClosedJaxpr:
    """Return the closed jaxpr of a flat function, in the context that an equation was traced in."""
    if eqn is None:
        return trace_flat(fun, "rule", avals)
    with setting_of(eqn):
        return trace_flat(fun, "rule", avals)


def attach_constants(jaxpr: AnyJaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """Return a closed jaxpr from the result of JAX's tracing: an open one and its constants."""
    jaxpr = from_jax(jaxpr)
    if not ONE_JAXPR_CLASS:
        return ClosedJaxpr(jaxpr, consts)
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    count = len(consts)
    constvars, invars = jaxpr.invars[:count], jaxpr.invars[count:]
    return jaxpr.replace(constvars=constvars, consts=consts, invars=invars, debug_info=names)


def detach_constants(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Return an open jaxpr and its constants: the inverse of `attach_constants`."""
    if not ONE_JAXPR_CLASS:
        return closed.jaxpr, closed.consts
    return pe.convert_constvars_jaxpr(closed), closed.consts


def traced_like(eqn: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> ClosedJaxpr:
    """Return the closed jaxpr of `fun` on flat values of `operands`' types, in `eqn`'s context."""
    return trace_in_setting(fun, [v.aval for v in operands], eqn)


def trace_lifted(
    fun: Callable[..., list[Any]], debug: DebugInfo, args: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the closed jaxpr of a flat function, and the values it takes before its arguments.

    These are the traced values and the refs that it closes over; arrays are constants. They have no
    names in the jaxpr's `debug_info`.
    """
    avals = [jax.typeof(arg) for arg in args]
    wrapped = lu.wrap_init(fun, debug_info=debug)
    wrapped.debug_info = debug  # with the paths of results, which JAX would leave out
    jaxpr, _, consts = trace_to_jaxpr_dynamic(wrapped, avals)
    jaxpr = from_jax(jaxpr)
    if not consts:
        return close_jaxpr(jaxpr), []
    count = len(consts) if ONE_JAXPR_CLASS else 0
    constvars, invars = jaxpr.invars[:count] or jaxpr.constvars, jaxpr.invars[count:]
    lifted = [
        isinstance(const, jax.core.Tracer) or isinstance(var.aval, AbstractRef)
        for const, var in zip(consts, constvars, strict=True)
    ]
    kept = [not flag for flag in lifted]
    arg_names = debug.arg_names
    names = None if arg_names is None else (*[""] * sum(lifted), *arg_names)
    closed = new_jaxpr(
        list(compress(constvars, kept)),
        list(compress(consts, kept)),
        [*compress(constvars, lifted), *invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.debug_info._replace(arg_names=names),
    )
    return closed, list(compress(consts, lifted))


def bind_jit(
    fun: Callable[..., list[Any]], name: str, debug: DebugInfo, args: Sequence[Any]
) -> list[Any]:
    """Return `fun(*args)`, called by a jit equation of this name, for flat values.

    Traced values that it closes over become operands, arrays stay constants of its jaxpr. This
    takes a fifth of the time of `jax.jit`, which handles signatures, caches and options.
    """
    closed, lifted = trace_lifted(fun, debug, args)
    return call_jit(closed, name, [*lifted, *args])


def call_jit(closed: ClosedJaxpr, name: str, args: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr, called by a jit equation of this name."""
    return jit_p.bind(*args, **_jit_params(closed, name))


def inlined_call_params(eqn: JaxprEqn) -> Params:
    """Return the parameters of a jit of a single equation, which JAX inlines when it traces it.

    The operands of the jit are those of the equation.
    """
    operands = [Var(atom.aval) for atom in eqn.invars]
    inner = eqn.replace(invars=operands, source_info=NO_SOURCE)
    debug = DebugInfo("inlined", eqn.primitive.name, None, None)
    body = new_jaxpr([], [], operands, inner.outvars, [inner], debug)
    with eqn.ctx.manager:
        return {**_jit_params(body, eqn.primitive.name), "inline": inline_of_word(True)}


def _jit_params(closed: ClosedJaxpr, name: str) -> Params:
    """Return the parameters of a jit without options."""
    ins, outs = len(closed.in_avals), len(closed.out_avals)
    return {
        "jaxpr": closed,
        "name": name,
        "ctx_mesh": pjit.get_ctx_mesh(False),
        "in_shardings": (UNSPECIFIED,) * ins,
        "out_shardings": (UNSPECIFIED,) * outs,
        "in_layouts": (None,) * ins,
        "out_layouts": (None,) * outs,
        "donated_invars": (False,) * ins,
        **_other_jit_params(),
    }


@cache
def _other_jit_params() -> Params:
    """Return the parameters that all jits without options share."""
    params = jax.make_jaxpr(jax.jit(list))().eqns[0].params
    return {k: params[k] for k in ("keep_unused", "inline", "compiler_options_kvs")}


def is_staging() -> bool:
    """Return True if the current operations become a jaxpr, also under other JAX transformations.

    Our own `vmap` does not count: some operations become a jaxpr, but it is evaluated immediately.
    """
    trace = core.trace_ctx.trace
    while trace is not None and type(trace) is not pe.DynamicJaxprTrace:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


# --- batching -------------------------------------------------------------------------------------
# JAX's own batching rules, and the context and types of values that are mapped over an axis.

#: JAX's name of a mapped axis without a name.
NO_AXIS_NAME = core.no_axis_name


def axis_data(name: object, size: Any, spmd_name: Any, mesh_axes: Any) -> MappedAxis:
    """Return the mapped axis in the form of JAX's own batching rules; None means no name."""
    name = core.no_axis_name if name is None else name
    return batching.AxisData(name, size, spmd_name, mesh_axes)


@contextmanager
def axis_mapped(axis: MappedAxis) -> Iterator[None]:
    """Enter the context in which JAX calls a batching rule; `axis` is an `axis_data`."""
    with (
        core.extend_axis_env_nd([(axis.name, axis.size)]),
        core.add_spmd_axis_names(axis.spmd_name),
    ):
        yield


#: JAX's rules by primitive: `rule(axis_data, operands, dims, **params)`.
jaxs_batching_rules = fancy_primitive_batchers

#: `match_axis(axis_data, source, target, x)` moves the mapped dimension of a value from `source` to
#: `target`, or maps an unmapped value along `target`.
match_axis = batching.matchaxis

#: Casts the operands of one equation to vary over the same manual mesh axes. `jax.lax` functions
#: do this for their operands; binding a primitive does not.
varying_alike = core.auto_insert_reshard


def mapped_aval(axis: MappedAxis, dim: int | None, aval: Aval) -> Aval:
    """Return the type of a value whose batch elements have type `aval`, mapped along `dim`."""
    if dim is None:
        return aval
    aval = unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)
    if axis.spmd_name is None or not config._check_vma.value:
        return aval
    varying = aval.mat.varying | frozenset(axis.spmd_name)
    return aval.update(manual_axis_type=aval.mat.update(varying=varying))


def mapped_sharding(axis: MappedAxis, sharding: object, dim: int, mesh: Mesh, aval: Aval) -> Any:
    """Return the sharding of a jit's operand or result, of type `aval`, mapped along `dim`."""
    if not _SHARDINGS_ARE_OF_TYPES:
        aval = aval.ndim
    return pjit._pjit_batcher_for_sharding(sharding, dim, axis.spmd_name, mesh, aval)


#: Since 0.12 JAX's function takes the type, and before the number of dimensions.
_SHARDINGS_ARE_OF_TYPES = "aval" in pjit._pjit_batcher_for_sharding.__annotations__


#: Returns the context on which tracing depends: flags, axes, meshes.
tracing_context = config.trace_context


def renamed_effects(effs: Iterable[Effect], names: Mapping[Var, Any]) -> set[Effect]:
    """Return the effects of an equation whose operands are renamed, with refs renamed likewise."""
    return {
        effect.replace(names.get(effect.input, effect.input))
        if isinstance(effect, effects.JaxprInputEffect)
        else effect
        for effect in effs
    }


#: The name scope of equations under `vmap`, to prepend to those of an equation.
VMAP_SCOPE = source_info_util.NameStack().transform("vmap")


#: Makes a `source_info` from a traceback and name scopes.
source_info = source_info_util.SourceInfo

#: The `source_info` of an equation without a location in the user's code.
NO_SOURCE = source_info_util.new_source_info()


def names_axis(params: Params, name: object) -> bool:
    """Return True if parameters name an axis, at any depth: not every collective has an effect."""
    seen: set[Jaxpr] = set()

    def names(params: Params) -> bool:
        if any(
            name in value if type(value) is tuple else type(value) is type(name) and value == name
            for value in params.values()
        ):
            return True
        leaves = jax.tree.leaves(list(params.values()))
        inner = {open_jaxpr(x) for x in leaves if isinstance(x, Jaxpr | ClosedJaxpr)} - seen
        seen.update(inner)
        return any(names(eqn.params) for jaxpr in inner for eqn in jaxpr.eqns)

    return names(params)


@contextmanager
def manual_mesh(
    mesh: Mesh, newly_manual_axes: frozenset[Hashable], **params: Any
) -> Iterator[None]:
    """Enter the context of the body of a `shard_map` with these parameters, with its mesh."""
    inner = shard_map._as_manual_mesh(mesh, newly_manual_axes)
    with (
        inside_shard_map(mesh, newly_manual_axes, **params),
        jax.sharding.use_abstract_mesh(inner),
    ):
        yield


#: Returns the mesh axes that a partition spec names.
axes_of_spec = shard_map.used_axis_names

#: `spec_with_entry(spec, dim, axes)` adds a dimension that is sharded over these mesh axes to a
#: partition spec.
spec_with_entry = pxla.batch_spec


def forbidden_in_branches(effs: Iterable[Effect]) -> str | None:
    """Return JAX's error for effects in a branch that only some batch elements take, or None."""
    if any(isinstance(effect, RefEffect) for effect in effs):
        return "State effect not supported in vmap-of-cond."
    if any(effect in (callback._IOEffect, callback._OrderedIOEffect) for effect in effs):
        return "IO effect not supported in vmap-of-cond."
    return None


def forbidden_in_loops(effs: Iterable[Effect], masked: bool) -> str | None:
    """Return JAX's error for effects in a batched while loop, or None.

    `masked` is True if the loop's predicate is batched.
    """
    if callback._OrderedIOEffect in effs:
        return "Ordered IO effects not supported in vmap."
    if masked and callback._IOEffect in effs:
        return "Unordered IO effects not supported in while_loop with batched predicate"
    return None


#: Since 0.12 JAX's rule for scan does not move the mapped dimension of constants.
SCAN_LEAVES_CONSTS = "const_axes" in loops._scan_batching_rule.__code__.co_varnames


# --- forward mode ---------------------------------------------------------------------------------
# The derivative of one equation in forward mode, by JAX's rules.


def equation_jvp(eqn: JaxprEqn, moving: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the jaxpr of an equation and its derivative, and which results have tangents.

    Args:
        eqn: The equation.
        moving: Whether each operand has a tangent.

    Returns:
        A jaxpr that takes the operands and those tangents, and returns the results and their
        tangents; and for each result, whether it has a tangent.

    Raises:
        Exception: The error of JAX or the rule if there is no derivative.
    """
    ins, outs = ([Var(v.aval) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    with setting_of(eqn):
        names = trace_flat(list, "equation", []).jaxpr.debug_info
        closed = new_jaxpr((), (), ins, outs, [eqn.replace(invars=ins, outvars=outs)], names)
        jaxpr, with_tangents = ad.jvp_jaxpr(closed, list(moving), False)
    return close_jaxpr(jaxpr), list(with_tangents)


# --- jitted ---------------------------------------------------------------------------------------
# Functions under `jax.jit`: their options, and JAX's information on a function and its call.

#: Raises TypeError for objects that JAX cannot transform: generators, static methods,
#: non-functions.
check_callable = api_util.check_callable

#: A view of a ref, such as `ref.at[0]`: a leaf that has no type.
RefView = state_types.TransformedRef

#: A context in which operations on arrays are evaluated immediately, even under an outer trace.
at_once = jax.core.eval_context

#: Make JAX hide a file's frames in the tracebacks that it shows, like its own.
hide_from_tracebacks = traceback_util.register_exclusion

#: The class of the results of `jax.jit`.
JITTED = type(jax.jit(lambda: ()))


class TracedOptions(NamedTuple):
    """The options of `jax.jit` for a call: for each flat argument and result, and for the whole.

    A placement is a sharding, a `Format` (a layout and a sharding), or None.
    """

    donated: tuple[bool, ...]
    in_placements: tuple[Any, ...]
    out_placements: tuple[Any, ...]
    compiler_options: tuple[tuple[str, Any], ...]
    keep_unused: bool
    inline: Any


def is_jitted(fun: object) -> bool:
    """Return True for a result of `jax.jit`."""
    return isinstance(fun, JITTED)


def jit_static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the static positions and names of a function under `jax.jit`."""
    info = jitted._jit_info
    return info.static_argnums, info.static_argnames


def static_values(info: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the static arguments of a call by name, from the `_jit_info` of the function."""
    names = [] if info.fun_signature is None else list(info.fun_signature.parameters.values())
    values = {}
    for i in (number + len(args) * (number < 0) for number in info.static_argnums):
        if 0 <= i < len(args):
            is_named = i < len(names) and names[i].kind is not inspect.Parameter.VAR_POSITIONAL
            values[names[i].name if is_named else f"args[{i}]"] = args[i]
    return values | {name: kwargs[name] for name in info.static_argnames if name in kwargs}


def jit_arguments(jitted: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function and the keyword arguments that `jax.jit` was called with."""
    info = jitted._jit_info
    keywords: dict[str, Any] = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
        "inline": info.inline,
    }
    for place in ("in", "out"):
        tree = getattr(info, f"{place}_shardings_treedef")
        pairs = zip(
            getattr(info, f"{place}_shardings_leaves"),
            getattr(info, f"{place}_layouts_leaves"),
            strict=True,
        )
        placements = [_placement(*pair) for pair in pairs]
        if any(placement is not None for placement in placements):
            keywords[f"{place}_shardings"] = jax.tree.unflatten(tree, placements)
    if info.compiler_options_kvs:
        keywords["compiler_options"] = dict(info.compiler_options_kvs)
    for name in ("device", "backend"):
        if getattr(info, name) is not None:
            keywords[name] = getattr(info, name)
    return jitted._fun, keywords


def traced_options(traced: jax.stages.Traced) -> TracedOptions:
    """Return the options of a traced function, for the arguments that it is called with."""
    return options_of(traced._params, len(traced._consts))


def options_of(params: Mapping[str, Any], captured: int) -> TracedOptions:
    """Return the options of a call of `jit` from its parameters.

    Args:
        params: The parameters of the primitive.
        captured: The number of values that it closes over, which come before the arguments.
    """
    ins = zip(params["in_shardings"], params["in_layouts"], strict=True)
    outs = zip(params["out_shardings"], params["out_layouts"], strict=True)
    return TracedOptions(
        donated=tuple(params["donated_invars"])[captured:],
        in_placements=tuple(_placement(*pair) for pair in ins)[captured:],
        out_placements=tuple(_placement(*pair) for pair in outs),
        compiler_options=tuple(params["compiler_options_kvs"]),
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )


def captured_values(traced: jax.stages.Traced) -> list[Any]:
    """Return the values that a traced function closes over and takes before its arguments."""
    return list(traced._consts)


def with_constants(jaxpr: AnyJaxpr, places: Sequence[int], values: Sequence[Any]) -> ClosedJaxpr:
    """Return a closed jaxpr whose arguments at `places` are constants."""
    if not places:
        return jaxpr
    bound = [jaxpr.invars[i] for i in places]
    free = [v for v in jaxpr.invars if v not in bound]
    constvars, consts = [*jaxpr.constvars, *bound], [*jaxpr.consts, *values]
    return replace_jaxpr(jaxpr, constvars=constvars, consts=consts, invars=free)


def _placement(sharding: object, layout: object) -> Any:
    specified = None if sharding is UNSPECIFIED else sharding
    return specified if layout is None else Format(layout, specified)


def static_arguments(
    fun: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], frozenset[str]]:
    """Return the static positions and names, inferred from each other as in `jax.jit`."""
    signature = api_util.fun_signature(fun)
    if signature is None:
        numbers = () if argnums is None else _indices(argnums)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
    else:
        numbers, names = api_util.infer_argnums_and_argnames(signature, argnums, argnames)
    return tuple(numbers), frozenset(names)


def _indices(argnums: Any) -> tuple[int, ...]:
    """Return a position, or positions, as a tuple."""
    try:
        return (operator.index(argnums),)
    except TypeError:
        return tuple(map(operator.index, argnums))


def open_views(tree: PyTreeDef) -> tuple[Any, jax.tree_util.PyTreeDef]:
    """Return a tree of arguments with each view replaced by a list of its ref and traced indices.

    Its leaves are those that `jax.jit` traces; the structure rebuilds the arguments from them.
    """
    flatten = tracing_registry.flatten
    opened = jax.tree.map(lambda x: flatten(x)[0] if isinstance(x, RefView) else x, tree)
    return opened, flatten(tree)[1]


hide_from_tracebacks(__file__)
