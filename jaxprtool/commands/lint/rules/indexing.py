"""Gathers, scatters and sorts that could be cheaper operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxprtool.commands.lint.graph import LintedProgram, Node, Value, ends, is_same
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.commands.lint.ranges import Elements, element_rules
from jaxprtool.ir.rules import RuleTable, rule

#: Smaller gathers are not reported.
LEAST_BYTES = 1 << 10

#: A part of a sorted axis up to this share of it counts as its top.
TOP_SHARE = 4

#: Fewer updates are applied fast enough.
LEAST_INDICES = 32

#: Shorter axes are sorted fast enough.
LEAST_SORTED = 32

_BAD_GATHER = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]")
    def f(x):
        return jnp.tanh(x[jnp.arange(100, 200)])  # JT401
"""

_GOOD_GATHER = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]")
    def f(x):
        return jnp.tanh(x[100:200])
"""

_BAD_SCATTER = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]", "i32[512]")
    def f(x, column):
        rows = jnp.arange(512)
        return x.at[rows, column].add(1.0)  # JT402
"""

_GOOD_SCATTER = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]", "i32[512]")
    def f(x, column):
        rows = jnp.arange(512)
        return x.at[rows, column].add(1.0, unique_indices=True)
"""

_BAD_SORT = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[8,4096]")
    def f(x):
        return jnp.sort(x)[:, -5:]  # JT403
"""

_GOOD_SORT = """
    import jax
    import jaxprtool


    @jaxprtool.example("f32[8,4096]")
    def f(x):
        return jax.lax.top_k(x, 5)[0]
"""


@lint_rule("JT401", "gather-of-slice", bad=_BAD_GATHER, good=_GOOD_GATHER)
def gathers_of_slices(program: LintedProgram) -> Iterator[Found]:
    """An array is indexed by known, evenly spaced numbers.

    This is a gather, which computes the position of each element, and whose gradient is a scatter.
    A slice is cheaper: XLA fuses it into the equations that read it.
    """
    for node in program.of("gather"):
        if node.is_backward or node.bytes < LEAST_BYTES or not _is_indexing(program, node):
            continue
        steps = _steps(node, program.array(node.ins[1]))
        if steps:
            spaced = "" if set(steps) == {1} else f" (every {', '.join(map(str, steps))})"
            axes = (f"start:stop:{step}".removesuffix(":1") for step in steps)
            yield Found(
                node,
                f"a gather at known, evenly spaced indices{spaced} is a slice",
                f"write the slice: x[{', '.join(axes)}]",
                "a gather of {bytes}",
                bytes=node.bytes,
            )


def _is_indexing(program: LintedProgram, node: Node) -> bool:
    """Return True if the user's source indexes an array, and not only a function of JAX."""
    text = program.expression(node)
    return text.endswith("]") or "take(" in text or ".at[" in text


def _steps(node: Node, indices: np.ndarray | None) -> list[int]:
    """Return the steps of the slice that a gather is, by axis; empty if it is not one."""
    if indices is None or indices.size == 0:
        return []
    numbers, sizes = node.eqn.params["dimension_numbers"], node.eqn.params["slice_sizes"]
    shape, indexed = node.ins[0].shape, numbers.start_index_map
    whole = all(sizes[i] == n for i, n in enumerate(shape) if i not in indexed)
    if not whole or any(sizes[i] != 1 for i in indexed) or numbers.operand_batching_dims:
        return []
    rows = indices.astype(np.int64)
    if (rows < 0).any() or (rows >= np.array([shape[i] for i in indexed])).any():
        return []
    by_axis: dict[int, int] = {}
    for dimension in range(rows.ndim - 1):
        if rows.shape[dimension] > 1:
            spaces = np.diff(rows, axis=dimension).reshape(-1, rows.shape[-1])
            (moving,) = np.nonzero(spaces[0])
            if (spaces != spaces[0]).any() or len(moving) != 1 or int(moving[0]) in by_axis:
                return []
            by_axis[int(moving[0])] = int(spaces[0, moving[0]])
    return [by_axis[axis] for axis in sorted(by_axis)]


@lint_rule("JT402", "undeclared-unique", bad=_BAD_SCATTER, good=_GOOD_SCATTER)
def undeclared_unique(program: LintedProgram) -> Iterator[Found]:
    """A scatter does not declare that its indices are unique, although they are known to be.

    A GPU then applies the updates with atomics. XLA for the CPU applies them one after the other in
    either case. In the backward pass of a gradient, the scatter belongs to an indexing in the
    forward pass.
    """
    for node in program.where(lambda node: node.name.startswith("scatter") and node.traits.updates):
        params = node.eqn.params
        if params["unique_indices"] or params["dimension_numbers"].operand_batching_dims:
            continue
        indices = node.ins[1]
        count = prod(indices.shape[:-1]) if all(isinstance(n, int) for n in indices.shape) else 0
        if node.is_backward and program.array(indices) is not None:
            continue  # the gradient of a gather at known indices, which is reported itself
        if (
            not _is_indexing(program, node)
            or count < LEAST_INDICES
            or not _are_unique(program, indices)
        ):
            continue
        where = (
            "x.at[…].get(unique_indices=True) there" if node.is_backward else "unique_indices=True"
        )
        yield Found(
            node,
            f"the {count:,} indices of this {node.name} are unique, but not declared so",
            f"pass {where}, or index with a slice or take_along_axis",
            "{bytes} of updates that a GPU applies with atomics (nothing on a CPU)",
            bytes=node.ins[2].bytes * node.scope.runs,
        )


class _IndexColumn(NamedTuple):
    """How one of the indices of a scatter depends on its position among the updates.

    Attributes:
        constant: The axes of the updates along which it is constant.
        distinct: The axes along which it differs, for each position on the others.
    """

    constant: frozenset[int]
    distinct: frozenset[int]


def _are_unique(program: LintedProgram, indices: Value) -> bool:
    """Return True if index vectors are known to differ: in all their parts, or already in some."""
    array = program.array(indices)
    if array is not None:
        vectors = array.reshape(-1, array.shape[-1])
        return len(vectors) > 0 and len(np.unique(vectors, axis=0)) == len(vectors)
    node, last = indices.node, len(indices.shape) - 1
    is_joined = node is not None and node.traits.moves and len(node.ins) > 1
    parts = node.ins if is_joined and node is not None else (indices,)
    columns = [_column(program, value) for value in parts]
    missing = {axis for axis, size in enumerate(indices.shape[:last]) if size > 1}
    while missing:  # a column that depends on some axes alone tells the positions on them
        axis_sets = (c.distinct & missing for c in columns if c.constant >= missing - c.distinct)
        axes = next(filter(None, axis_sets), frozenset())
        if not axes:
            return False
        missing -= axes
    return True


_NOTHING = _IndexColumn(frozenset(), frozenset())


#: Returns the column of an operand.
_Look: TypeAlias = Callable[[Value], _IndexColumn]

#: Rules from an equation, the number of its result, and its operands' columns, to a column.
column_rules: RuleTable[Callable[[Node, int, _Look], _IndexColumn]] = RuleTable()


def _column(program: LintedProgram, value: Value, steps: int = 24) -> _IndexColumn:
    """Return how integers depend on their position in an array."""
    if value.outer is not None:
        return _column(program, value.outer, steps)
    array, node = program.array(value), value.node
    if array is not None:
        return _column_of(array)
    if node is None or not steps:
        return _NOTHING
    rule = column_rules.get(node.name)
    if rule is None and node.traits.gives in ("same", "cast"):
        return _column(program, node.ins[0], steps - 1)
    if rule is None:
        return _NOTHING
    column: _IndexColumn = rule(node, value.index, lambda other: _column(program, other, steps - 1))
    return column


def _column_of(array: np.ndarray) -> _IndexColumn:
    axes = range(array.ndim)
    constant = (
        [axis for axis in axes if (array == array.take([0], axis)).all()] if array.size else []
    )
    distinct = [axis for axis in axes if (np.diff(np.sort(array, axis), axis=axis) != 0).all()]
    if array.size and len(np.unique(array)) != array.size:
        # Along one axis at most: rows that differ in themselves may be equal to each other.
        distinct = [axis for axis in distinct if axis not in constant][:1]
    return _IndexColumn(frozenset(constant), frozenset(distinct))


@rule(column_rules, "rev", "slice")
def _reordered(node: Node, out: int, look: _Look) -> _IndexColumn:
    return look(node.ins[0])


@rule(column_rules, "sort")
def _permuted(node: Node, out: int, look: _Look) -> _IndexColumn:
    axis = node.eqn.params["dimension"]
    is_distinct = axis in look(node.ins[out]).distinct
    return _IndexColumn(frozenset(), frozenset([axis])) if is_distinct else _NOTHING


@rule(column_rules, "top_k")
def _places_of_top(node: Node, out: int, look: _Look) -> _IndexColumn:
    last = frozenset([len(node.outs[out].shape) - 1])
    return _IndexColumn(frozenset(), last) if out == 1 else _NOTHING


@rule(column_rules, "select_n")
def _counted_from_the_end(node: Node, out: int, look: _Look) -> _IndexColumn:
    """Return the column of an index, whose negative numbers count from the end of the axis."""
    compared = node.ins[0].node
    is_sign = compared is not None and compared.name == "lt" and compared.ins[0] is node.ins[1]
    return look(node.ins[1]) if is_sign else _NOTHING


@rule(column_rules, "add", "mul", "sub")
def _shifted(node: Node, out: int, look: _Look) -> _IndexColumn:
    one, two = node.ins
    for value, other in ((one, two), (two, one)):
        if other.literal is not None and (node.name != "mul" or other.literal != 0):
            return look(value)
    return _NOTHING


@rule(column_rules, "broadcast_in_dim")
def _broadcast(node: Node, out: int, look: _Look) -> _IndexColumn:
    column, before, after = look(node.ins[0]), node.ins[0].shape, node.outs[0].shape
    places = node.eqn.params["broadcast_dimensions"]
    repeated = {new for old, new in enumerate(places) if before[old] != after[new]}
    repeated |= set(range(len(after))) - set(places)
    return _IndexColumn(
        frozenset(places[axis] for axis in column.constant) | repeated,
        frozenset(places[axis] for axis in column.distinct) - repeated,
    )


@rule(column_rules, "transpose")
def _transposed(node: Node, out: int, look: _Look) -> _IndexColumn:
    order, column = node.eqn.params["permutation"], look(node.ins[0])
    constant, distinct = (frozenset(map(order.index, axes)) for axes in column)
    return _IndexColumn(constant, distinct)


@rule(column_rules, "reshape", "squeeze")
def _reshaped(node: Node, out: int, look: _Look) -> _IndexColumn:
    """Return the column after axes of size 1 are added or removed."""
    column, before, after = look(node.ins[0]), node.ins[0].shape, node.outs[0].shape
    old, new = ([axis for axis, n in enumerate(shape) if n != 1] for shape in (before, after))
    if [before[axis] for axis in old] != [after[axis] for axis in new]:
        return _NOTHING
    by_old = dict(zip(old, new, strict=True))
    constant, distinct = (frozenset(by_old[a] for a in axes if a in by_old) for axes in column)
    return _IndexColumn(constant.union(axis for axis, n in enumerate(after) if n == 1), distinct)


@lint_rule("JT403", "sort-for-top-k", bad=_BAD_SORT, good=_GOOD_SORT)
def sorts_for_top(program: LintedProgram) -> Iterator[Found]:
    """A whole axis is sorted, but only a small part at one of its ends is read."""
    for node in program.of("sort"):
        axis = node.eqn.params["dimension"]
        length = node.outs[0].shape[axis]
        if not isinstance(length, int) or length < LEAST_SORTED or node.is_backward:
            continue
        # XLA merges equal sorts.
        equal = [sort for sort in program.of("sort") if is_same(sort.outs[0], node.outs[0])]
        outs = [out for sort in equal for out in sort.outs]
        kept = [_top(end, reader, axis) for out in outs for end, reader in ends(out, ("same",))]
        if kept and all(count is not None and count * TOP_SHARE <= length for count in kept):
            most = max(count for count in kept if count is not None)
            instead = "jnp.min or jnp.max" if most == 1 else "jax.lax.top_k, of -x for the smallest"
            yield Found(
                node,
                f"{length:,} elements are sorted, but at most {most:,} of them are read",
                f"use {instead}",
                "{flops} of comparisons, most of them for nothing",
                flops=node.operations,
            )


def _top(value: Value, reader: Node | None, axis: int) -> int | None:
    """Return how many elements at one end of an axis a slice reads; None for other readers."""
    if reader is None:
        return None
    if reader.name == "rev":
        return _top_of_all(reader.outs[0], axis)
    if reader.name != "slice":
        return None
    start, limit = (reader.eqn.params[key][axis] for key in ("start_indices", "limit_indices"))
    is_end = start == 0 or limit == value.shape[axis]
    return int(limit - start) if is_end and isinstance(limit - start, int) else None


def _top_of_all(value: Value, axis: int) -> int | None:
    counts = [_top(end, reader, axis) for end, reader in ends(value, ("same",))]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


# --- overflow -------------------------------------------------------------------------------------

_BAD_OVERFLOW = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[8]")
    def f(x):
        row, column = jnp.indices((50_000, 50_000))
        position = row * 50_000 + column  # JT404
        return x[position % 8].sum()
"""

_GOOD_OVERFLOW = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[8]")
    def f(x):
        row, column = jnp.indices((50_000, 50_000))
        position = (row % 8) * (50_000 % 8) + column
        return x[position % 8].sum()
"""


@lint_rule("JT404", "index-overflow", bad=_BAD_OVERFLOW, good=_GOOD_OVERFLOW, kind="wrong")
def overflowing_indices(program: LintedProgram) -> Iterator[Found]:
    """The arithmetic of indices overflows their type.

    JAX's integers have 32 bits, also those of `jnp.indices` with `jax_enable_x64`. Above
    2,147,483,647 they become negative, without a message. The rule computes the first and last
    elements of integers that depend on sizes and positions alone.
    """
    elements = Elements()
    for node in program.nodes:
        for value in node.outs:
            if getattr(value.dtype, "kind", "") == "i" and _is_used(value):
                elements.visit_corners(value)
        size = _unreachable(node)
        if size and program.is_own(node):
            yield _overflow(node, f"an axis of {size:,} elements is indexed", node.ins[-1])
    for node, number in elements.overflows.items():
        if program.is_own(node):
            yield _overflow(node, f"this {node.name} is {number:,} at one end", node.outs[0])


def _overflow(node: Node, what: str, value: Value) -> Found:
    return Found(
        node,
        f"{what}, which does not fit in {value.dtype}",
        "compute it in int64 (jax_enable_x64 and a dtype), or index each axis by itself",
        "numbers that are wrong, without a message",
    )


def _is_used(value: Value) -> bool:
    """Return True unless only arithmetic with integers reads a value."""
    return value.is_result or any(
        reader.name not in element_rules
        or any(getattr(out.dtype, "kind", "") not in "iu" for out in reader.outs)
        for reader in value.live_readers
    )


def _unreachable(node: Node) -> int:
    """Return the size of an axis whose last element an index is too small for; 0 if none is."""
    if not node.name.startswith("dynamic_"):
        return 0
    dtype = node.ins[-1].dtype
    largest = np.iinfo(dtype).max if getattr(dtype, "kind", "") in "iu" else 0
    sizes = [size for size in node.ins[0].shape if isinstance(size, int)]
    return max((size for size in sizes if size - 1 > largest), default=0)
