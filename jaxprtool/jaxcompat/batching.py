"""JAX's own batching rules, and the context and types of values that are mapped over an axis."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import callback, config, core, effects, pjit, shard_map
from jax._src.interpreters import batching, pxla
from jax._src.lax.control_flow import loops
from jax._src.state.types import RefEffect
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, unmapped_aval
from jax.interpreters.batching import fancy_primitive_batchers
from jax.sharding import Mesh

from jaxprtool.jaxcompat.aliases import Aval, Effect, MappedAxis, Params
from jaxprtool.jaxcompat.checking import inside_shard_map
from jaxprtool.jaxcompat.jaxprs import open_jaxpr

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
        held = jax.tree.leaves(list(params.values()))
        inner = {open_jaxpr(x) for x in held if isinstance(x, Jaxpr | ClosedJaxpr)} - seen
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
