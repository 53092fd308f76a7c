"""JAX's own batching rules, and the context and types of values that are mapped over an axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import callback, config, core, effects, pjit, shard_map, source_info_util
from jax._src import mesh as mesh_lib
from jax._src.interpreters import batching, pxla
from jax._src.lax.control_flow import loops
from jax._src.state.types import RefEffect
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var

from jaxprtool.jaxcompat.checking import inside_shard_map
from jaxprtool.jaxcompat.jaxprs import open_jaxpr

#: What JAX has for the name of a mapped axis that has none.
NO_AXIS_NAME = core.no_axis_name


def axis_data(name: Any, size: Any, spmd_name: Any, mesh_axes: Any) -> Any:
    """The mapped axis as JAX's own batching rules take it; a name of None is no name."""
    name = core.no_axis_name if name is None else name
    return batching.AxisData(name, size, spmd_name, mesh_axes)


@contextmanager
def axis_mapped(axis: Any) -> Iterator[None]:
    """The context in which JAX calls a batching rule; `axis` is an `axis_data`."""
    with (
        core.extend_axis_env_nd([(axis.name, axis.size)]),
        core.add_spmd_axis_names(axis.spmd_name),
    ):
        yield


def jaxs_batching_rule(primitive: Primitive) -> Callable[..., Any] | None:
    """JAX's rule for a primitive: `rule(axis_data, operands, dims, **params)`; None without one."""
    return batching.fancy_primitive_batchers.get(primitive)


def broadcasting_primitives() -> list[str]:
    """The names of the primitives that JAX batches by leaving it to them to broadcast."""
    return [
        primitive.name
        for primitive, rule in batching.fancy_primitive_batchers.items()
        if getattr(rule, "func", None) is batching.broadcast_batcher
    ]


def match_axis(axis: Any, source: int | None, target: int, x: Any) -> Any:
    """A value mapped along dimension `source`, or unmapped, made to be mapped along `target`."""
    return batching.matchaxis(axis, source, target, x)


def varying_alike(*values: Any) -> Sequence[Any]:
    """Return operands of one equation, varying over the same manual mesh axes.

    `jax.lax` casts the operands of its functions so; a primitive that is bound does not.
    """
    return core.auto_insert_reshard(*values)


def mapped_aval(axis: Any, dim: int | None, aval: Any) -> Any:
    """The type of a value whose every lane is of type `aval`, mapped along dimension `dim`."""
    if dim is None:
        return aval
    aval = core.unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)
    if axis.spmd_name is None or not config._check_vma.value:
        return aval
    varying = aval.mat.varying | frozenset(axis.spmd_name)
    return aval.update(manual_axis_type=aval.mat.update(varying=varying))


def mapped_sharding(axis: Any, sharding: Any, dim: int, mesh: Any, aval: Any) -> Any:
    """The sharding of a jit's operand or result that is of type `aval`, mapped along `dim`."""
    if not _SHARDINGS_ARE_OF_TYPES:
        aval = aval.ndim
    return pjit._pjit_batcher_for_sharding(sharding, dim, axis.spmd_name, mesh, aval)


#: Since 0.12 JAX asks for the type there, and before for its number of dimensions.
_SHARDINGS_ARE_OF_TYPES = "aval" in pjit._pjit_batcher_for_sharding.__annotations__


def tracing_context() -> Hashable:
    """All that tracing depends on besides the function and its operands: flags, axes, meshes."""
    return config.trace_context()


def renamed_effects(effs: Iterable[Any], names: Mapping[Var, Any]) -> set[Any]:
    """The effects of an equation whose operands are renamed: those on its refs name these."""
    return {
        effect.replace(names.get(effect.input, effect.input))
        if isinstance(effect, effects.JaxprInputEffect)
        else effect
        for effect in effs
    }


_VMAP = source_info_util.NameStack().transform("vmap")


def under_vmap(name_stack: Any) -> Any:
    """The name scopes of an equation, with `vmap` around them."""
    return _VMAP + name_stack


def source_under(call: JaxprEqn) -> Callable[[Any], Any]:
    """What an equation inside a call has for its `source_info` once it stands in its place.

    Its name scopes come to be inside those of the call.
    """
    outer = call.source_info.name_stack
    if not outer.stack:
        return lambda info: info
    return lambda info: info.replace(name_stack=outer + info.name_stack)


#: What makes a `source_info` of a traceback and name scopes.
source_info = source_info_util.SourceInfo

#: The `source_info` of an equation that comes from no place in the user's code.
NO_SOURCE = source_info_util.new_source_info()


def result_types(primitive: Primitive, avals: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The types of an equation's results."""
    results, _ = primitive.abstract_eval(*avals, **params)
    return list(results) if primitive.multiple_results else [results]


def aval_of(value: Any) -> Any:
    """The type of a constant."""
    return core.typeof(value)


def names_axis(params: dict[str, Any], name: Any) -> bool:
    """Whether parameters name an axis, at any depth: not every collective has an effect."""
    seen: set[Any] = set()

    def names(params: dict[str, Any]) -> bool:
        if any(
            name in value if type(value) is tuple else type(value) is type(name) and value == name
            for value in params.values()
        ):
            return True
        held = jax.tree.leaves(list(params.values()))
        inner = {open_jaxpr(x) for x in held if isinstance(x, Jaxpr | ClosedJaxpr)} - seen
        seen.update(inner)
        return any(names(eqn.params) for jaxpr in inner for eqn in jaxpr.eqns)

    return names(params)


@contextmanager
def manual_mesh(mesh: Any, newly_manual_axes: frozenset[Any], **params: Any) -> Iterator[None]:
    """The setting of the body of a `shard_map` with these parameters, its mesh included."""
    inner = shard_map._as_manual_mesh(mesh, newly_manual_axes)
    with (
        inside_shard_map(mesh, newly_manual_axes, **params),
        mesh_lib.use_abstract_mesh(inner),
    ):
        yield


def axes_of_spec(spec: Any) -> set[Any]:
    """The mesh axes that a partition spec names."""
    return set(shard_map.used_axis_names(spec))


def spec_with_entry(spec: Any, dim: int, axes: Any) -> Any:
    """A partition spec for values with one dimension more, sharded over these mesh axes."""
    return pxla.batch_spec(spec, dim, axes)


def forbidden_in_branches(effs: Iterable[Any]) -> str | None:
    """What JAX does not batch in a branch that lanes may take or not; None for nothing."""
    if any(isinstance(effect, RefEffect) for effect in effs):
        return "State effect not supported in vmap-of-cond."
    if any(effect in (callback._IOEffect, callback._OrderedIOEffect) for effect in effs):
        return "IO effect not supported in vmap-of-cond."
    return None


def forbidden_in_loops(effs: Iterable[Any], masked: bool) -> str | None:
    """What JAX does not batch in a while loop, whose lanes may be `masked`; None for nothing."""
    if callback._OrderedIOEffect in effs:
        return "Ordered IO effects not supported in vmap."
    if masked and callback._IOEffect in effs:
        return "Unordered IO effects not supported in while_loop with batched predicate"
    return None


#: Since 0.12 JAX's rule for scan leaves constants mapped where they are.
SCAN_LEAVES_CONSTS = "const_axes" in loops._scan_batching_rule.__code__.co_varnames
