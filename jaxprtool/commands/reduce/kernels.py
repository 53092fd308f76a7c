"""Reduction steps on Pallas kernels: fewer steps of the grid, and smaller blocks.

The arrays of a kernel become as small as its blocks: a smaller kernel reads the first part of each
operand, and its results are padded with zeros. Such a kernel is valid: its blocks are inside of its
arrays, and each block of its results is written by some step. A comparison with the last step along
an axis is with the new last step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.analysis.grids import GridSteps
from jaxprtool.commands.kernels.block_sizes import RefAccess, ref_accesses, unbatched_axes
from jaxprtool.commands.kernels.dimensions import (
    BodyResizing,
    Dim,
    DimensionClasses,
    transforms_of,
    value_shape,
)
from jaxprtool.ir.equations import all_jaxprs, equations
from jaxprtool.ir.kernel_calls import KernelBlock, KernelCall, index_texts, kernel_call
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var, open_jaxpr
from jaxprtool.passes.reduction import STEPS, Candidate, ReductionStep, with_body


@dataclass(frozen=True, eq=False)
class _Site:
    """A way to make a kernel smaller along an axis of its grid.

    Attributes:
        var: The first result of its equation.
        axis: The axis of the grid.
        steps: The new number of steps along it.
        size: The new size of blocks along it; None if they stay.
    """

    var: Var
    axis: int
    steps: int
    size: int | None = None


def _kernels(program: Program) -> Iterator[KernelCall]:
    for eqn in equations(open_jaxpr(program.jaxpr)):
        kernel = kernel_call(eqn)
        if kernel is not None and all(isinstance(axis.size, int) for axis in kernel.grid):
            yield kernel


def _grids(program: Program) -> list[_Site]:
    """Return fewer steps along each axis of a grid: one, or half of them."""
    return [
        _Site(kernel.eqn.outvars[0], axis, steps)
        for kernel in _kernels(program)
        for axis, found in enumerate(kernel.grid)
        for steps in dict.fromkeys((1, found.size // 2))
        if 0 < steps < found.size
    ]


def _blocks(program: Program) -> list[_Site]:
    """Return smaller blocks along each axis of a grid: of one element, of a tile, or half."""
    sites = []
    for kernel in _kernels(program):
        for axis, found in enumerate(kernel.grid):
            places = _places(kernel, axis) or []
            sizes = {kernel.blocks[i].dims[d].size for i, d in places}
            size = max(sizes, default=1)
            smaller = [n for n in dict.fromkeys((1, 8, 128, size // 2)) if 0 < n < size]
            sites += [_Site(kernel.eqn.outvars[0], axis, found.size, n) for n in smaller]
    return sites


def _places(kernel: KernelCall, axis: int) -> list[tuple[int, int]] | None:
    """Return the dimensions of blocks that follow an axis, each at its index; None if others do."""
    names, places = kernel.index_names, []
    for number, block in enumerate(kernel.blocks):
        texts = index_texts(block.index_map, names)
        for d, axes in enumerate(block.axes):
            if axis not in axes:
                continue
            if texts[d] != names[axis] or block.dims[d].kind not in ("Blocked", "Squeezed"):
                return None
            places.append((number, d))
    return places


def _applied(program: Program, chosen: Sequence[_Site]) -> Candidate | None:
    (site,) = chosen

    def visitor(writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            same = eqn.outvars and eqn.outvars[0] is site.var
            kernel = kernel_call(eqn) if same else None
            return None if kernel is None else _smaller(writer, kernel, site)

        return rule

    jaxpr = rewrite(program.jaxpr, visitor)
    return None if jaxpr is program.jaxpr else Candidate(with_body(program, jaxpr))


def _smaller(writer: Writer, kernel: KernelCall, site: _Site) -> Sequence[Atom] | None:
    """Write a smaller kernel on parts of the operands, and return its results padded."""
    places = _places(kernel, site.axis)
    plain = not kernel.captured and kernel.eqn.params.get("mesh") is None
    if places is None or not plain or kernel.aliases:
        return None
    changes = _new_sizes(kernel, site, places)
    if changes is None:
        return None
    body, blocks = changes
    shapes = _array_shapes(kernel, site, places)
    eqn = _with_shapes(kernel, site, body, blocks, shapes)
    start = len(kernel.eqn.invars) - len(kernel.inputs)
    cut = range(len(kernel.inputs))
    operands = kernel.eqn.invars[start:]

    def parts(*xs: Any) -> list[Any]:
        return [lax.slice(x, (0,) * x.ndim, shapes[i]) for i, x in zip(cut, xs, strict=True)]

    def whole(*ys: Any) -> list[Any]:
        widths = [
            [(0, n - m) for n, m in zip(v.aval.shape, y.shape, strict=True)]
            for v, y in zip(kernel.eqn.outvars, ys, strict=True)
        ]
        return [jnp.pad(y, width) for y, width in zip(ys, widths, strict=True)]

    small = writer.trace(parts, operands, kernel.eqn) if operands else []
    results = [Var(aval) for aval in eqn.params["out_avals"]]
    new = eqn.replace(invars=[*kernel.eqn.invars[:start], *small], outvars=results)
    made = kernel_call(new)
    if made is None or not _is_valid(made):
        return None
    writer.add(new)
    return writer.trace(whole, results, kernel.eqn)


def _new_sizes(
    kernel: KernelCall, site: _Site, places: Sequence[tuple[int, int]]
) -> tuple[Any, dict[tuple[int, int], int]] | None:
    """Return the body, and the new sizes of dimensions of blocks; None if they cannot change."""
    classes = DimensionClasses(open_jaxpr(kernel.body))
    sizes: dict[Dim, int] = {}
    blocks: dict[tuple[int, int], int] = {}
    if site.size is not None:
        for number, d in places:
            block = kernel.blocks[number]
            if block.dims[d].kind != "Squeezed":
                root = classes.root((block.ref, _ref_dim(block, d)))
                if root in classes.fixed:
                    return None
                blocks[number, d] = site.size
                sizes[root] = site.size
        others = (
            (block.ref, _ref_dim(block, d))
            for number, block in enumerate(kernel.blocks)
            for d, dim in enumerate(block.dims)
            if dim.kind != "Squeezed" and (number, d) not in places
        )
        if not blocks or any(classes.root(dim) in sizes for dim in others):
            return None
    old, axis = kernel.grid[site.axis].size - 1, unbatched_axes(kernel).get(site.axis)
    last = {} if axis is None or site.size is not None else {axis: (old, site.steps - 1)}
    resizing = BodyResizing(classes, sizes, last)
    return resizing.jaxpr(kernel.eqn.params["jaxpr"]), blocks


def _ref_dim(block: KernelBlock, d: int) -> int:
    """Return the dimension of the Ref that a dimension of a block is."""
    return sum(dim.kind != "Squeezed" for dim in block.dims[:d])


def _array_shapes(
    kernel: KernelCall, site: _Site, places: Sequence[tuple[int, int]]
) -> list[tuple[int, ...]]:
    """Return the shapes of the smaller arrays."""
    shapes = []
    for number, block in enumerate(kernel.blocks):
        shape = [*block.array.shape]
        for place in places:
            if place[0] == number:
                dim = block.dims[place[1]]
                is_sized = site.size is not None and dim.kind == "Blocked"
                size = site.size if is_sized else dim.size
                shape[place[1]] = min(shape[place[1]], site.steps * (size or 1))
        shapes.append(tuple(shape))
    return shapes


def _with_shapes(
    kernel: KernelCall,
    site: _Site,
    body: Any,
    blocks: Mapping[tuple[int, int], int],
    shapes: Sequence[tuple[int, ...]],
) -> JaxprEqn:
    """Return the equation with another body, and other sizes of blocks, arrays and its grid."""
    params = kernel.eqn.params
    mapping, refs = params["grid_mapping"], open_jaxpr(body).invars
    first = len(refs) - len(kernel.scratch) - len(kernel.blocks)
    grid = [*mapping.grid]
    grid[site.axis] = site.steps
    mappings = []
    for number, (old, shape) in enumerate(zip(mapping.block_mappings, shapes, strict=True)):
        dims = [*old.block_shape]
        for (i, d), size in blocks.items():
            if i == number:
                dims[d] = replace(dims[d], block_size=size)
        array = old.array_aval.update(shape=shape)
        mappings.append(
            replace(
                old,
                block_shape=tuple(dims),
                array_aval=array,
                transformed_block_aval=refs[first + number].aval,
            )
        )
    scratch = tuple(ref.aval for ref in refs[len(refs) - len(kernel.scratch) :])
    outputs = shapes[len(kernel.inputs) :]
    avals = [a.update(shape=s) for a, s in zip(params["out_avals"], outputs, strict=True)]
    changed = {
        "grid": tuple(grid),
        "block_mappings": tuple(mappings),
        "scratch_avals": scratch if kernel.scratch else mapping.scratch_avals,
    }
    new = {"jaxpr": body, "grid_mapping": replace(mapping, **changed), "out_avals": tuple(avals)}
    return kernel.eqn.replace(params={**params, **new})


def stays_valid(candidate: Program, program: Program) -> bool:
    """Return True if a candidate has valid kernels, or the program it is made from has not."""
    return all(map(_is_valid, _kernels(candidate))) or not all(map(_is_valid, _kernels(program)))


def _is_valid(kernel: KernelCall) -> bool:
    """Return True if blocks are in their arrays, results are written, and memory is not read first.

    Memory that no step has written may have any values, with which a check holds by chance.
    """
    grid = GridSteps(kernel)
    if grid.count is None or not _is_well_typed(kernel):
        return False
    accesses = list(ref_accesses(grid))
    for number, block in enumerate(kernel.blocks):
        steps = grid.block(block)
        if not steps.is_copied:
            continue
        for start, size in zip(steps.starts, block.array.shape, strict=True):
            if start is None or (start < 0).any() or (start >= size).any():
                return False
        if number >= len(kernel.inputs):
            written = np.zeros(grid.count, bool)
            for access in accesses:
                if access.ref is block.ref and access.kind != "read":
                    written |= access.mask(grid.count)
            if not set(steps.numbers) <= set(steps.numbers[written]):
                return False
    fresh = [part.ref for part in kernel.scratch]
    fresh += [b.ref for i, b in enumerate(kernel.outputs) if i not in kernel.aliases]
    return not any(_is_read_first([a for a in accesses if a.ref is ref], grid) for ref in fresh)


def _is_well_typed(kernel: KernelCall) -> bool:
    """Return True if the body of a kernel is, which JAX does not check with the call."""
    body = open_jaxpr(kernel.body)
    try:
        with jaxcompat.inside_kernel(jaxcompat.kernel_axes(kernel.eqn.params)):
            jaxcompat.check_jaxpr(body)
    except Exception:  # of JAX's checker
        return False
    return all(_fits(eqn) for inner in all_jaxprs(body) for eqn in inner.eqns)


def _fits(eqn: JaxprEqn) -> bool:
    """Return False for a load or store whose value has another shape, which JAX does not check."""
    first = {"get": eqn.outvars, "swap": eqn.invars[1:2], "addupdate": eqn.invars[1:2]}
    values = first.get(eqn.primitive.name)
    if not values:
        return True
    shape = value_shape(eqn.invars[0])
    for transform in transforms_of(eqn) or ():
        if not isinstance(transform, jaxcompat.NDIndexer) or tuple(transform.shape) != shape:
            return not isinstance(transform, jaxcompat.NDIndexer)
        shape = tuple(transform.get_indexer_shape())
    return bool(value_shape(values[0]) == shape)


def _is_read_first(accesses: Sequence[RefAccess], grid: GridSteps) -> bool:
    """Return True if the first access of a Ref reads it."""
    assert grid.count is not None
    firsts = [
        (int(mask.argmax()), i, access.kind)
        for i, access in enumerate(accesses)
        if (mask := access.mask(grid.count)).any()
    ]
    return bool(firsts) and min(firsts)[2] != "write"


#: All steps, with those on kernels before those on types.
ALL_STEPS: tuple[ReductionStep, ...] = (
    *STEPS,
    ReductionStep("shrinking grids", _grids, _applied, alone=True),
    ReductionStep("shrinking blocks", _blocks, _applied, alone=True),
)
