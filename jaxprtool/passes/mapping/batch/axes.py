"""The axis that a program is mapped over: checks of `in_axes` and `out_axes`, and its values.

An axes tree is an int, None, or a prefix of the tree of arguments or results with ints and None at
its leaves. `Batch` reads it against a `Program`, whose arguments have no mapped axis yet, and
`jaxprtool.vmap` against arguments that have one. Both make the same checks, with JAX's messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import filled
from jaxprtool.jaxcompat import Aval, is_symbolic_dimension

# --- axes -----------------------------------------------------------------------------------------
# Checks of `in_axes`, `out_axes` and `axis_size`, with the contract of `jax.vmap`.


class BatchError(JaxprToolError, ValueError):
    """Axes that do not fit the arguments, the results or each other."""


class BatchTypeError(JaxprToolError, TypeError):
    """Axes or a size of the wrong type, or a value without a JAX type."""


def result_type(value: object) -> Aval:
    """Return the type of a result of a mapped function. Raises BatchTypeError if it has none."""
    try:
        return jax.typeof(value)
    except TypeError as error:
        raise BatchTypeError(
            f"Output from batched function {value!r} with type {type(value)} is not a valid JAX "
            "type"
        ) from error


#: A readable name per flat value, for error messages; called only when there is an error.
Names = Callable[[], Sequence[str]]


def check_axes(in_axes: object, out_axes: object, specs: tuple[type, ...] = ()) -> None:
    """Check the types of `in_axes` and `out_axes`.

    Args:
        in_axes: The mapped axes of arguments, as for `jax.vmap`.
        out_axes: The mapped axes of results.
        specs: More types that a leaf may have, besides int and None.

    Raises:
        BatchTypeError: If a leaf has another type.
    """
    if not (in_axes is None or type(in_axes) in {int, tuple, list, *specs}):
        raise BatchTypeError(
            "vmap in_axes must be an int, None, or a tuple of entries corresponding to the "
            f"positional arguments passed to the function, but got {in_axes}."
        )
    for option, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        if not all(type(axis) in {int, *specs} for axis in jax.tree.leaves(axes)):
            raise BatchTypeError(
                f"vmap {option} must be an int, None, or (nested) container with those types as "
                f"leaves, but got {axes}."
            )


def flat_in_axes(in_tree: PyTreeDef, in_axes: object) -> list[Any]:
    """Return the axis of each flat argument.

    Keyword arguments are mapped along their first axis, as in `jax.vmap`.

    Args:
        in_tree: The tree of `(args, kwargs)`.
        in_axes: The mapped axes, a prefix of the tree of `args`.

    Raises:
        BatchError: If `in_axes` is not a prefix of the tree.
    """
    args, kwargs = in_tree.children()
    count = len(args.children())
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != count:
        names = ", ".join(kwargs.node_data()[1])
        raise BatchError(
            "vmap in_axes must be an int, None, or a tuple of entries corresponding to the "
            "positional arguments passed to the function, but got "
            f"len(in_axes)={len(in_axes)}, len(args)={count}",
            f"in_axes has no entries for keyword arguments, here {names}, which are mapped along "
            "axis 0; bind those that are not mapped with functools.partial"
            if names
            else "give in_axes one entry for each positional argument",
        )
    return [*_spread(in_axes, args, "in_axes"), *[0] * kwargs.num_leaves]


def flat_out_axes(out_tree: PyTreeDef, out_axes: object) -> list[Any]:
    """Return the axis of each flat result.

    Args:
        out_tree: The tree of the results.
        out_axes: The mapped axes, a prefix of the tree.

    Raises:
        BatchError: If `out_axes` is not a prefix of the tree.
    """
    return _spread(out_axes, out_tree, "out_axes")


def axis_size_of(axis_size: Any, axes: Sequence[Any], avals: Sequence[Any], names: Names) -> Any:
    """Return the size of the mapped axis, from the mapped arguments and the requested size.

    Args:
        axis_size: The requested size, in elements, or None.
        axes: The mapped axis of each argument.
        avals: The type of each argument, with the mapped axis; None for a value without a type.
        names: Returns the names of the arguments, for errors.

    Raises:
        BatchError: If sizes differ, none is known, or a rank is too low.
        BatchTypeError: If the requested size is not an integer.
    """
    sizes = [
        None if aval is None or type(axis) is not int else _size_along(axis, aval, names, i)
        for i, (axis, aval) in enumerate(zip(axes, avals, strict=True))
    ]
    counts = Counter(size for size in sizes if size is not None).most_common()
    asked = [] if axis_size is None else [axis_size]
    traced = isinstance(axis_size, jax.core.Tracer)  # a tracer has no hash and equals no size
    if traced and not counts:
        raise BatchTypeError(f"axis_size must be an integer, but got {axis_size}")
    distinct = asked if traced else list(dict.fromkeys([*asked, *(size for size, _ in counts)]))
    if len(distinct) == 1 and not traced:
        return distinct[0]
    if not distinct:
        raise BatchError(
            "vmap must have at least one non-None value in in_axes or axis_size must be specified"
            if axes
            else "vmap wrapped function must be passed at least one argument containing an array "
            "or axis_size must be specified, got empty arguments"
        )
    parts = [f"the `axis_size` argument was {size}" for size in asked]
    for size, count in counts:
        place = sizes.index(size)
        most = "most" if size == counts[0][0] else "some"
        many = f"{most} axes ({count} of them) had size {size}, e.g."
        parts.append(
            f"{f'one axis had size {size}:' if count == 1 else many} axis {axes[place]} of "
            f"{names()[place]} of type {avals[place].str_short()}"
        )
    listing = "; ".join(f"* {part}" for part in parts)
    raise BatchError(f"vmap got inconsistent sizes for array axes to be mapped: {listing}")


def _size_along(axis: int, aval: Aval, names: Names, place: int) -> Any:
    rank = len(aval.shape)
    if not -rank <= axis < rank:  # as JAX says it
        raise BatchError(
            f"vmap was requested to map its argument along axis {axis}, which implies that its "
            f"rank should be at least {axis + 1 if axis >= 0 else -axis}, but is only {rank} "
            f"(its shape is {aval.shape})",
            f"the argument is {names()[place]}",
        )
    return aval.shape[axis]


def program_axes(program: Program, in_axes: object, axis_size: Any) -> tuple[list[Dim], Any]:
    """Return the checked batch dimension of each flat argument of a program, and the axis size.

    An axis is a position in the batched argument: for one with n dimensions now, from -(n+1) to n.
    Raises BatchError and BatchTypeError.
    """
    axes = flat_in_axes(program.in_tree, in_axes)
    if axis_size is None:
        raise BatchError(
            "axis_size must be specified: the arguments of a program do not have the mapped axis",
            "axis_size is the size of the mapped axis",
        )
    names: Names = partial(list, program.arg_names)
    dims: list[Dim] = []
    for i, (axis, aval) in enumerate(zip(axes, program.in_avals, strict=True)):
        if axis is None:
            dims.append(None)
            continue
        shape = getattr(aval, "shape", None)
        if shape is None:
            raise BatchTypeError(
                f"{names()[i]} has type {aval}, which cannot be mapped",
                "use None for it in in_axes",
            )
        rank = len(shape) + 1
        if not -rank <= axis < rank:
            raise BatchError(
                f"in_axes has {axis} for {names()[i]}, but its mapped axis is from {-rank} to "
                f"{rank - 1}",
                f"{names()[i]} has type {aval.str_short(short_dtypes=True)} and gets one more axis",
            )
        dims.append(axis % rank)
    return dims, _checked_size(axis_size)


def _checked_size(axis_size: Any) -> Any:
    """Check a requested axis size and return it as a number or a symbolic dimension."""
    if is_symbolic_dimension(axis_size):
        return axis_size
    try:
        size = index(axis_size)
    except TypeError:
        raise BatchTypeError(f"axis_size must be an integer, but got {axis_size!r}") from None
    if isinstance(axis_size, bool) or size < 0:
        raise BatchError(f"axis_size must be an integer that is not negative, but got {axis_size}")
    return size


def result_dims(out_axes: Sequence[Any], ranks: Sequence[int], names: Names) -> list[Dim]:
    """Return the batch dimension of each flat result, counted from 0; None if it is unmapped.

    Args:
        out_axes: The mapped axis of each flat result.
        ranks: The ranks of the results without the mapped axis.
        names: Returns the names of the results, for errors.

    Raises:
        BatchError: If an axis is out of bounds.
    """
    dims: list[Dim] = []
    for i, (axis, rank) in enumerate(zip(out_axes, ranks, strict=True)):
        if axis is not None and not -(rank + 1) <= axis <= rank:
            raise BatchError(
                f"axis {axis} is out of bounds for array of dimension {rank + 1}",
                f"change out_axes for {names()[i]}",
            )
        dims.append(None if axis is None else axis % (rank + 1))
    return dims


def check_unmapped(
    out_axes: Sequence[Any],
    out_dims: Sequence[Dim],
    out_tree: PyTreeDef,
    axis_name: Hashable | None,
) -> None:
    """Check that results whose `out_axes` entry is None are unmapped.

    Args:
        out_axes: The `out_axes` entry of each flat result.
        out_dims: The batch dimension of each flat result.
        out_tree: The tree of the results.
        axis_name: The name of the mapped axis, for the error.

    Raises:
        BatchError: If a result is mapped whose entry is None.
    """
    for i, (axis, dim) in enumerate(zip(out_axes, out_dims, strict=True)):
        if axis is not None or dim is None:
            continue
        paths = jax.tree.leaves_with_path(filled(out_tree, range(out_tree.num_leaves)))
        path = jax.tree_util.keystr(paths[i][0])
        if axis_name is not None:
            raise BatchError(
                f"vmap has mapped output (axis_name={axis_name}) but out_axes is None",
                f"out_axes{path} must be the position of the mapped axis",
            )
        raise BatchError(
            f"at vmap out_axes{path}, got axis spec None but output was batched on axis {dim}"
        )


def free_axes(
    program: Program, axis_name: Hashable | None, size: Any
) -> tuple[tuple[Hashable, int], ...]:
    """Return the named axes that stay free in a program when one is bound.

    Raises BatchError if the program was traced with another size of that axis, since the size is
    part of the jaxpr.
    """
    for name, traced in program.axis_env:
        if name == axis_name and traced != size:
            raise BatchError(
                f"{program.name} was traced with an axis '{name}' of size {traced}, not {size}"
            )
    return tuple(entry for entry in program.axis_env if entry[0] != axis_name)


# --- prefix trees -------------------------------------------------------------------------------


def _spread(axes: object, tree: PyTreeDef, option: str) -> list[Any]:
    """Return the leaves of a prefix, including None, each repeated for the leaves it covers."""
    if axes is None or type(axes) is int:
        return [axes] * tree.num_leaves
    leaves, prefix = jax.tree.flatten(axes, is_leaf=lambda node: node is None)
    return list(_covered(iter(leaves), prefix, tree, f"vmap {option}"))


def _covered(
    leaves: Iterator[Any], prefix: PyTreeDef, tree: PyTreeDef, place: str
) -> Iterator[Any]:
    """Yield the leaves as `_spread` does, for structures; `place` is their path, for errors."""
    node = prefix.node_data()
    if node is None:
        yield from [next(leaves)] * tree.num_leaves
        return
    parts, children = prefix.children(), tree.children()
    if node != tree.node_data() or len(parts) != len(children):
        option = place.partition("[")[0]
        raise BatchError(
            f"{option} specification must be a tree prefix of the corresponding "
            f"value; at {place} it is {_described(prefix)}, but the value is {_described(tree)}"
        )
    keys = node[1] if node[0] is dict else range(len(parts))
    for key, part, child in zip(keys, parts, children, strict=True):
        yield from _covered(leaves, part, child, f"{place}[{key!r}]")


def _described(tree: PyTreeDef) -> str:
    """Describe a node of a tree structure in words."""
    node = tree.node_data()
    if node is None:
        return "a leaf"
    node_type, data = node
    if node_type is type(None):
        return "None"
    name = f"a {node_type.__name__}"
    return f"{name} with keys {data}" if node_type is dict else f"{name} of {len(tree.children())}"


# --- axis -----------------------------------------------------------------------------------------
# The axis that a program is mapped over, and the batch dimensions of values.

#: The batch dimension of a value; None if it is unmapped, the same in all batch elements.
Dim = int | None


@dataclass(frozen=True)
class Axis:
    """A mapped axis.

    Attributes:
        name: The name of the axis for collectives, or None.
        size: The number of batch elements.
        spmd_name: The mesh axes over which batch elements are sharded (`spmd_axis_name` of
            `jax.vmap`).
        mesh_axes: The explicit mesh axes over which the batch dimension of arguments is sharded.
        derivatives: Map an unmapped result of a custom derivative call if its derivative is mapped.
    """

    name: Hashable
    size: Any
    spmd_name: tuple[Hashable, ...] | None = None
    mesh_axes: tuple[Hashable, ...] | None = None
    derivatives: bool = True

    @cached_property
    def data(self) -> Any:
        """The axis in the form that JAX's own batching rules take."""
        return jaxcompat.axis_data(self.name, self.size, self.spmd_name, self.mesh_axes)

    def aval(self, aval: Aval, dim: Dim) -> Aval:
        """Return the type of a value whose batch elements have type `aval`, batched at `dim`."""
        return jaxcompat.mapped_aval(self.data, dim, aval)
