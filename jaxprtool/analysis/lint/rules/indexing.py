"""Gathers, scatters and sorts that could be cheaper operations."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import LintedProgram, ends
from jaxprtool.analysis.lint.table import lint_rule

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
        step = _step(node, program.array(node.ins[1]))
        if step is not None:
            yield Found(
                node,
                f"a gather at known, evenly spaced indices{_every(step)} is a slice",
                "write the slice: x[start:stop" + ("]" if step == 1 else f":{step}]"),
                "a gather of {bytes}",
                bytes=node.bytes,
            )


def _is_indexing(program: LintedProgram, node: Node) -> bool:
    """Return True if the user's source indexes an array, and not only a function of JAX."""
    text = program.expression(node)
    return text.endswith("]") or "take(" in text or ".at[" in text


def _every(step: int) -> str:
    return "" if step == 1 else f" (every {step})"


def _step(node: Node, indices: np.ndarray | None) -> int | None:
    """Return the step of the slice that a gather is, or None."""
    if indices is None or indices.size == 0:
        return None
    numbers, sizes = node.eqn.params["dimension_numbers"], node.eqn.params["slice_sizes"]
    shape, indexed = node.ins[0].shape, numbers.start_index_map
    whole = all(sizes[i] == n for i, n in enumerate(shape) if i not in indexed)
    if not whole or any(sizes[i] != 1 for i in indexed) or numbers.operand_batching_dims:
        return None
    if sum(n > 1 for n in indices.shape[:-1]) != 1:
        return None
    rows = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    steps = np.diff(rows, axis=0)
    if (steps != steps[0]).any() or np.count_nonzero(steps[0]) != 1 or steps.max() <= 0:
        return None
    ends = np.array([shape[i] for i in indexed])
    if (rows < 0).any() or (rows >= ends).any():
        return None
    return int(steps.max())


@lint_rule("JT402", "undeclared-unique", bad=_BAD_SCATTER, good=_GOOD_SCATTER)
def undeclared_unique(program: LintedProgram) -> Iterator[Found]:
    """A scatter does not declare that its indices are unique, although they are known to be.

    XLA then applies the updates one after the other, or with atomics on a GPU. In the backward pass
    of a gradient, the scatter belongs to an indexing in the forward pass.
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
            "{bytes} of updates that are applied one by one, or with atomics on a GPU",
            bytes=node.ins[2].bytes * node.scope.runs,
        )


def _are_unique(program: LintedProgram, indices: Value) -> bool:
    """Return True if index vectors are known to differ: in all their parts, or already in one."""
    known = program.array(indices)
    columns = [] if known is None else [known.reshape(-1, known.shape[-1])]
    node = indices.node
    if node is not None and node.name == "concatenate":
        found = [program.array(value) for value in node.ins if value.shape[-1:] == (1,)]
        columns += [each.reshape(-1, 1) for each in found if each is not None]
    return any(len(each) > 0 and len(np.unique(each, axis=0)) == len(each) for each in columns)


@lint_rule("JT403", "sort-for-top-k", bad=_BAD_SORT, good=_GOOD_SORT)
def sorts_for_top(program: LintedProgram) -> Iterator[Found]:
    """A whole axis is sorted, but only a small part at one of its ends is read."""
    for node in program.of("sort"):
        axis = node.eqn.params["dimension"]
        length = node.outs[0].shape[axis]
        if not isinstance(length, int) or length < LEAST_SORTED or node.is_backward:
            continue
        kept = [
            _top(end, reader, axis) for out in node.outs for end, reader in ends(out, ("same",))
        ]
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
