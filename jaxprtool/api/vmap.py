"""`vmap`, a drop-in for `jax.vmap` that maps a function by rewriting its jaxpr.

The function is traced once, for one batch element, with its mapped arguments; values that do not
depend on these stay concrete, so that Python code can inspect them. The pass builds the mapped
jaxpr of the trace, which is then evaluated on the arguments, under JAX's outer transformations or
eagerly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from itertools import compress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, mapping
from jaxprtool.passes.mapping.batch.axes import (
    Axis,
    BatchError,
    BatchTypeError,
    Dim,
    axis_size_of,
    check_axes,
    check_unmapped,
    flat_in_axes,
    flat_out_axes,
    result_dims,
    result_type,
)
from jaxprtool.passes.mapping.batch.body import batch_body
from jaxprtool.sizes.ragged_vmap import is_ragged, ragged_vmap


def vmap(
    fun: Callable,
    in_axes: object = 0,
    out_axes: object = 0,
    axis_name: Hashable | None = None,
    axis_size: Any = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
) -> Callable:
    """Return `fun` mapped over an axis of its arguments, as `jax.vmap` does.

    The mapping is a pass over the jaxpr of `fun`. Keyword arguments are mapped along their first
    axis.

    An argument may be `Ragged`: `fun` is then written for one example, and each example has its own
    number of rows. Results with a row for each row of the example are also Ragged, and others have
    a leading batch axis.

    Args:
        fun: The function.
        in_axes: The mapped axis of each positional argument: an int, None (not mapped), or a pytree
            of these that is a prefix of the arguments.
        out_axes: The mapped axis of the results, in the same form.
        axis_name: The name of the axis, for collectives in `fun`.
        axis_size: The size of the axis; required if no argument is mapped.
        spmd_axis_name: The mesh axes over which the batch is sharded.
        sum_match: Whether to sum a mapped result over the batch if its `out_axes` is None. By
            default it is an error.

    Raises:
        BatchError: A ValueError, from the returned function, if axes and sizes do not fit.
        BatchTypeError: A TypeError, for an invalid axis.
        BatchUnsupported: From the returned function, for an equation that cannot be mapped.
        TypeError: If `fun` is not a valid function for `jax.vmap`.
    """
    jaxcompat.check_callable(fun)
    check_axes(in_axes, out_axes, mapping.vmappable_specs())

    def mapped(*args: object, **kwargs: object) -> object:
        values, in_tree = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
        axes = flat_in_axes(in_tree, in_axes)
        debug = jax.api_util.debug_info("vmap", fun, args, kwargs)

        def apply_to_element(elements: Sequence[object]) -> tuple[list[object], PyTreeDef]:
            args, kwargs = jax.tree.unflatten(in_tree, elements)
            with _sizes_explained():
                return jax.tree.flatten(fun(*args, **kwargs), is_leaf=mapping.is_vmappable)

        if any(map(is_ragged, values)):
            options = {
                "axis_name": axis_name,
                "spmd_axis_name": spmd_axis_name,
                "sum_match": sum_match,
            }
            _require_none(options)
            names = partial(_names, fun, args, kwargs)
            return ragged_vmap(apply_to_element, values, axes, out_axes, axis_size, debug, names)
        mapping.check_refs(debug, values, axes)
        avals = [_mapped_type(value, axis) for value, axis in zip(values, axes, strict=True)]
        size = axis_size_of(axis_size, axes, avals, lambda: _names(fun, args, kwargs))
        mesh_axes = mapping.mapped_mesh_axes(values, axes)
        spmd = mapping.spmd_axis_names(spmd_axis_name, mesh_axes)
        axis = Axis(axis_name, size, spmd, mesh_axes)
        traced = mapping.TracedElement(axis.data, debug)
        outs, out_tree = _results(
            traced, apply_to_element, axis, (values, axes), out_axes, sum_match
        )
        traced.close()
        return jax.tree.unflatten(out_tree, outs)

    update_wrapper(mapped, fun)
    name = _function_name(fun)
    mapped.__name__, mapped.__doc__ = name, _documentation(fun, name)
    return mapped


#: What JAX says where the size of an array is not a number.
_NO_SIZE = re.compile(
    r"in the jnp\.\w+ argument|Shapes must be 1D sequences|must have static start/stop/step"
    r"|Slice entries must be static integers"
)


@contextmanager
def _sizes_explained() -> Iterator[None]:
    """Add a note to JAX's error for an array whose size depends on a mapped value."""
    try:
        yield
    except (TypeError, IndexError) as error:
        if _NO_SIZE.search(str(error)):
            error.add_note(
                "jaxprtool.vmap: the size of an array cannot depend on a mapped value. To map over "
                "examples of different lengths, pass a Ragged, and take x.shape[0]"
            )
        raise


def _results(
    traced: mapping.TracedElement,
    apply_to_element: Callable,
    axis: Axis,
    batched: tuple[Sequence[object], Sequence[object]],
    out_axes: object,
    sum_match: bool,
) -> tuple[list[object], PyTreeDef]:
    """Return the flat results and their tree.

    A result of a registered type is first split into its parts, and assembled when they are mapped:
    its `from_elt` is called twice.
    """
    parts: list[_ResultArray] = []
    with traced.inside():
        results, out_tree = apply_to_element(traced.elements(*batched))
        specs = flat_out_axes(out_tree, out_axes)
        for place, (result, spec) in enumerate(zip(results, specs, strict=True)):
            registered = mapping.is_element(result)
            note = partial(_noted, parts, place, axis if registered else None)
            mapping.assembled(axis.data, result, spec, note)
        closed = traced.jaxpr([part.element for part in parts if traced.holds(part.element)])
    outs = _evaluated(traced, closed, axis, parts, out_tree, sum_match)
    if any(map(mapping.is_element, results)):
        remaining = iter(outs)
        with traced.inside():
            outs = [
                mapping.assembled(axis.data, result, spec, lambda *_: next(remaining))
                for result, spec in zip(results, specs, strict=True)
            ]
    return outs, out_tree


class _ResultArray(NamedTuple):
    """An array in a result: its place, its value for one batch element, and its mapped axis."""

    place: int
    element: Any
    axis: Any


def _noted(
    parts: list[_ResultArray], place: int, axis: Axis | None, value: object, spec: Any
) -> object:
    """Record a part of a result; if there is an `axis`, return an array of its mapped type.

    The array is a placeholder for a registered type, without values.
    """
    aval = result_type(value)
    if not (spec is None or type(spec) is int):
        raise BatchError(f"at vmap out_axes, got axis spec {spec} but output has type {aval}")
    parts.append(_ResultArray(place, value, spec))
    if axis is None or spec is None or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    aval = axis.aval(aval, spec % (aval.ndim + 1))
    return np.broadcast_to(np.zeros((), aval.dtype), aval.shape)


def _evaluated(
    traced: mapping.TracedElement,
    closed: ClosedJaxpr,
    axis: Axis,
    parts: Sequence[_ResultArray],
    out_tree: PyTreeDef,
    sum_match: bool,
) -> list[object]:
    """Return the parts of the results for the whole batch, mapped along the requested axes.

    With `sum_match`, a mapped part whose requested axis is None is summed over the batch.
    """
    dims = result_dims(
        [part.axis for part in parts],
        [getattr(jax.typeof(part.element), "ndim", 0) for part in parts],
        lambda: [f"result {part.place}" for part in parts],
    )
    staged = [traced.holds(part.element) for part in parts]
    outs = list(compress(dims, staged))
    body, out_dims = batch_body(closed, traced.dims, axis, outs, outermost=True)
    if not sum_match:
        leaf_dims: list[Dim] = [None] * out_tree.num_leaves
        for part, dim in zip(compress(parts, staged), out_dims, strict=True):
            if part.axis is None:
                leaf_dims[part.place] = dim
        check_unmapped([None] * len(leaf_dims), leaf_dims, out_tree, axis.name)
    mapped = zip(mapping.evaluated(body, traced.operands), out_dims, strict=True)
    values = [
        next(mapped) if flag else (part.element, None)
        for part, flag in zip(parts, staged, strict=True)
    ]
    return [
        _moved(value, source, target, axis)
        for (value, source), target in zip(values, dims, strict=True)
    ]


def _moved(value: Any, source: Dim, target: Dim, axis: Axis) -> Any:
    """Return a value mapped along `source` moved to `target`, or summed if that is None.

    A value for which neither is a dimension is returned unchanged.
    """
    if source == target:
        return value
    if target is None:
        return value.sum(source)  # by a method, as in JAX: it may be a NumPy array
    return jaxcompat.match_axis(axis.data, source, target, value)


# --- arguments ----------------------------------------------------------------------------------


def _is_leaf(value: object) -> bool:
    return mapping.is_vmappable(value) or is_ragged(value)


def _require_none(options: dict[str, Any]) -> None:
    """Raise an error for options that do not support Ragged arguments."""
    for name, value in options.items():
        if value not in (None, False):
            raise BatchError(f"vmap {name}={value!r} cannot be combined with a Ragged argument")


def _mapped_type(value: Any, axis: object) -> Aval | None:
    """Return the type of a mapped argument; None if not mapped or of a registered type."""
    if type(axis) is not int:
        return None
    if mapping.is_vmappable(value):
        likely = hasattr(value, "shape") and hasattr(value, "dtype")
        return jax.core.ShapedArray(value.shape, value.dtype) if likely else None
    try:
        aval = jax.typeof(value)
    except TypeError:
        raise BatchTypeError(
            f"Argument {value!r} of type {type(value)} is not a valid JAX type"
        ) from None
    if not hasattr(aval, "shape"):
        raise BatchError(
            f"vmap was requested to map a value of non-array type {aval} along axis {axis}, but "
            "non-array types can't be mapped along an integer axis"
        )
    return aval


def _names(fun: Callable, args: Sequence[object], kwargs: dict[str, object]) -> list[str]:
    """Return the name of each flat argument in errors: `argument params['w']`."""
    try:
        parameters = list(inspect.signature(fun).bind(*args, **kwargs).signature.parameters)
    except (TypeError, ValueError):
        parameters = []

    def name(path: Sequence[Any]) -> str:
        first = path[0].idx
        if first < len(parameters):
            return f"argument {parameters[first]}{jax.tree_util.keystr(path[1:])}"
        return f"args{jax.tree_util.keystr(path)}"

    flat = partial(jax.tree.leaves_with_path, is_leaf=_is_leaf)
    return [
        *(name(path) for path, _ in flat(args)),
        *(f"kwargs{jax.tree_util.keystr(path)}" for path, _ in flat(kwargs)),
    ]


# --- metadata -----------------------------------------------------------------------------------


def _function_name(fun: Callable) -> str:
    """Return the name of a function, or of the function in a partial."""
    while not hasattr(fun, "__name__") and isinstance(fun, partial):
        fun = fun.func
    return getattr(fun, "__name__", "<unnamed function>")


def _documentation(fun: Callable, name: str) -> str:
    text = f"`{name}` mapped over an additional axis of its mapped arguments."
    return f"{text}\n\nOriginal documentation:\n\n{fun.__doc__}" if fun.__doc__ else text
