"""The open tables of batching rules, JAX's own rules, and corrections of these.

A rule of `batch_rules` is a Python function that computes with JAX on operands, some of which have
a batch dimension. It is traced once per signature (see `templates`). A rule of `structured_rules`
is for an equation that holds jaxprs (see `mapping.domains`); if it returns False, the rule in
`batch_rules` applies instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import as_weak_as, is_weak, named, strongly_typed
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import JaxprEqn, Params, Primitive
from jaxprtool.passes.mapping.batch.axes import Axis, BatchError, BatchTypeError, Dim
from jaxprtool.passes.mapping.domains import BodyBuilder, StructuredRule

# --- table ----------------------------------------------------------------------------------------
# The open tables of batching rules, and JAX's own rules for every other primitive.


class BatchUnsupported(UnsupportedError, NotImplementedError):
    """An equation that cannot be mapped over an axis; names it and its source line."""


#: The operands of a rule.
Operands = Sequence[jax.Array]

#: `rule(axis, primitive, operands, dims, params) -> (results, dims)`. Results and their dimensions
#: are lists if the primitive has multiple results, as in JAX's own table. At least one operand is
#: mapped, unless the equation has an effect. A rule that returns None leaves the case to JAX's own.
BatchRule = Callable[[Axis, Primitive, Operands, Sequence[Dim], Params], tuple[Any, Any] | None]

#: The open table: a plug-in adds its primitive's rule by name.
batch_rules: RuleTable[BatchRule] = RuleTable()


#: The open table of rules for equations that hold jaxprs.
structured_rules: RuleTable[StructuredRule] = RuleTable()


def jaxs_rule(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[Any, Any]:
    """Apply JAX's own batching rule for a primitive, or one that a package registered in JAX.

    Arguments and results are those of a rule in `batch_rules`. Raises NotImplementedError if there
    is no rule.
    """
    rule = jaxcompat.jaxs_batching_rules.get(primitive)
    if rule is None and not any(dim is not None for dim in dims):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results) if primitive.multiple_results else None
    if rule is None:
        raise NotImplementedError(f"Batching rule for '{primitive}' not implemented")
    return rule(axis.data, tuple(operands), tuple(dims), **params)


def batch_error(
    eqn: JaxprEqn, reason: str, error_type: type[JaxprToolError] = BatchUnsupported
) -> JaxprToolError:
    """Return the error for an equation that cannot be batched; its message names the equation."""
    return error_type(f"{named(eqn)} cannot be batched: {reason}")


def failed(eqn: JaxprEqn, error: Exception) -> JaxprToolError:
    """Return the error for an equation whose rule raised one, with its kind and message."""
    reason = " ".join(str(error).split()) or type(error).__name__
    error_types = {ValueError: BatchError, TypeError: BatchTypeError}
    error_type = next(
        (error_types[k] for k in error_types if isinstance(error, k)), BatchUnsupported
    )
    return batch_error(eqn, reason, error_type)


# --- corrections ----------------------------------------------------------------------------------
# Rules that replace JAX's where those fail, compute wrong types, or yield slower programs.

#: A result, and its batch dimension.
Batched = tuple[jax.Array, Dim]


def _at_bdim(axis: Axis, x: jax.Array, bdim: Dim, target: int) -> jax.Array:
    """Return a value moved, or broadcast, to have the batch dimension at `target`."""
    return jaxcompat.match_axis(axis.data, bdim, target, x)


def _element_shape(x: jax.Array, bdim: Dim) -> tuple[int, ...]:
    """Return the shape of one batch element of a value."""
    return x.shape if bdim is None else x.shape[:bdim] + x.shape[bdim + 1 :]


# --- wrong in JAX -------------------------------------------------------------------------------


@rule(batch_rules, "clamp")
def _clamp(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Clamp a scalar per batch element. JAX's rule fails if only the upper bound is mapped."""
    if _element_shape(operands[1], dims[1]):
        return None
    batched = _at_bdim(axis, operands[1], dims[1], 0)
    return primitive.bind(operands[0], batched, operands[2], **params), 0


@rule(batch_rules, "tie")
def _tie(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Return the second operand with its batch dimension; that of the first is arbitrary."""
    return primitive.bind(*operands, **params), dims[1]


@rule(batch_rules, "bitcast_convert_type")
def _bitcast_convert_type(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Keep the batch dimension from being last where a wider type consumes the last dimension.

    JAX's rule would combine batch elements into elements of the new type.
    """
    (x,), (bdim,) = operands, dims
    element = jax.ShapeDtypeStruct(_element_shape(x, bdim), x.dtype)
    result = jax.eval_shape(lambda x: lax.bitcast_convert_type(x, params["new_dtype"]), element)
    if not result.ndim < element.ndim == bdim:
        return None
    return primitive.bind(_at_bdim(axis, x, bdim, 0), **params), 0


# --- refs ---------------------------------------------------------------------------------------


# A function that returns a ref cannot be traced: JAX's rule makes no template.
@rule(structured_rules, "new_ref")
def _new_ref(builder: BodyBuilder[Dim], eqn: JaxprEqn) -> bool:
    """Allocate the ref with a batch dimension, since any batch element may write to it."""
    dims = [builder.kind(atom) or 0 for atom in eqn.invars]
    operands = [*map(builder.held, eqn.invars, dims)]
    outs = builder.outs(eqn.outvars, dims)
    builder.add(eqn.replace(invars=operands, outvars=outs), eqn, dims)
    return True


@rule(batch_rules, "swap", "addupdate")
def _write_whole(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[list[jax.Array], list[Dim]]:
    """Move a value written to a whole ref to the ref's batch dimension, as JAX's rule requires."""
    ref, value, *others = operands
    dim = dims[0]
    if not others and dim is not None and dims[1] is not None:
        value = _at_bdim(axis, value, dims[1], dim)
        dims = (dim, dim)
    return jaxs_rule(axis, primitive, (ref, value, *others), dims, params)


# --- collectives over the mapped axis, wrong in JAX -----------------------------------------------


_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


@rule(batch_rules, "psum", "pmax", "pmin")
def _reduce(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Reduce over the batch dimension as over any other, if no other named axis is left.

    JAX's rule keeps a collective over numbered dimensions, some of which have no derivative.
    """
    ((x,), (bdim,)), names = (operands, dims), params["axes"]
    if bdim is None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    others = [name for name in names if name != axis.name]
    if not all(isinstance(name, int) for name in others) or not jnp.issubdtype(x.dtype, jnp.number):
        return None
    axes = (bdim, *(name + (name >= bdim) for name in others))
    return _REDUCTIONS[primitive.name](x, axes), None


@rule(batch_rules, "ppermute")
def _ppermute(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Permute batch elements by one gather. Those without a source are zero, as on devices.

    JAX's rule does not fill in these zeros.
    """
    (x,), (bdim,) = operands, dims
    if params["axis_name"] not in (axis.name, (axis.name,)):
        return None
    sources = np.full(axis.size, axis.size, np.int32)
    for source, target in params["perm"]:
        sources[target] = source
    is_whole = len(params["perm"]) == axis.size
    if bdim is None:
        if is_whole:
            return x, None
        x, bdim = _at_bdim(axis, x, None, 0), 0
    mode = lax.GatherScatterMode
    gathered = lax.gather(
        x,
        sources[:, None],
        lax.GatherDimensionNumbers(tuple(d for d in range(x.ndim) if d != bdim), (bdim,), (bdim,)),
        (*x.shape[:bdim], 1, *x.shape[bdim + 1 :]),
        unique_indices=is_whole,
        mode=mode.PROMISE_IN_BOUNDS if is_whole else mode.FILL_OR_DROP,
        fill_value=None if is_whole else 0,
    )
    return gathered, bdim


@rule(batch_rules, "all_to_all")
def _all_to_all(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Send equal parts from all batch elements; JAX's rule misreads an unmapped operand's shape."""
    (x,), (bdim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if bdim is not None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    return jaxs_rule(axis, primitive, [_at_bdim(axis, x, None, 0)], [0], params)


@rule(batch_rules, "reduce_scatter")
def _reduce_scatter(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Scatter over another axis. Untiled it removes a dimension, but JAX's rule adds one."""
    (x,), (bdim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if bdim is None or axis.name in names or params["tiled"] or bdim <= params["scatter_dimension"]:
        return None
    return primitive.bind(x, **params), bdim - 1


# --- slow in JAX --------------------------------------------------------------------------------
#
# JAX turns every dynamic slice into a gather, and every dynamic update into a scatter. Where the
# start is unmapped, XLA compiles that scatter to twice the instructions, and reads the array twice.
# The batch dimension is in front, as with JAX's rules.


@rule(batch_rules, "dynamic_slice")
def _dynamic_slice(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Slice all batch elements at the same start."""
    (x, *starts), (bdim, *start_dims) = operands, dims
    if _is_left_to_jax(axis, starts, start_dims) or bdim is None or len(starts) != x.ndim - 1:
        return None
    sizes = (axis.size, *params["slice_sizes"])
    values = jaxcompat.varying_alike(_at_bdim(axis, x, bdim, 0), *_with_zero(starts))
    return primitive.bind(*values, slice_sizes=sizes), 0


@rule(batch_rules, "dynamic_update_slice")
def _dynamic_update_slice(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Update all batch elements at the same start."""
    (x, update, *starts), (bdim, update_bdim, *start_dims) = operands, dims
    if _is_left_to_jax(axis, starts, start_dims) or bdim is update_bdim is None:
        return None
    like = jax.typeof(x)
    if is_weak(like):
        # JAX's scatter, and so its gradient, is weakly typed if the array is. An update is only if
        # the starts are, too.
        x, update = strongly_typed(x), strongly_typed(update)
    batched = _at_bdim(axis, x, bdim, 0), _at_bdim(axis, update, update_bdim, 0)
    updated = primitive.bind(*jaxcompat.varying_alike(*batched, *_with_zero(starts)))
    return as_weak_as(updated, like), 0


def _is_left_to_jax(axis: Axis, starts: Operands, start_dims: Sequence[Dim]) -> bool:
    """Return True if the start is mapped, or if batch elements are sharded over a mesh."""
    spread = axis.spmd_name is not None or axis.mesh_axes is not None
    return spread or any(bdim is not None for bdim in start_dims)


def _with_zero(starts: Operands) -> list[jax.Array | np.generic]:
    """Return the starts for the batched array, from those of one batch element."""
    dtype = starts[0].dtype if starts else np.dtype(np.int32)
    return [dtype.type(0), *starts]
