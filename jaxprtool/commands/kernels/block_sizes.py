"""Other block sizes of a Pallas kernel, for which it computes the same function.

    sizes = BlockSizes(kernel_cost(eqn).grid)
    [(axis.name, axis.size, axis.choices) for axis in sizes.axes]   # [("i", 2048, (8, 16, ...))]
    sizes.resized({0: 512})                                         # the equation

The body of a kernel has the shapes of its blocks. It is rewritten at another block size only if
this provably preserves the function of the kernel. The dimensions of all values in the body are put
in classes (`dimensions`). A class that no equation fixes may have another size in two cases:

- Nothing sums along it. The kernel then maps each index along the class, and may do so in blocks
  of any size, if the body does not depend on the step along the axis of the grid, and no memory
  carries values from one such step to the next.
- Products and sums along it are only added to an accumulator, which the first step along the axis
  sets, and the last one reads. The results are then the same up to rounding.

If a block is whole along a class of the first kind, a new axis of the grid can divide it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import DeviceSpec
from jaxprtool.analysis.grids import GridSteps, accesses
from jaxprtool.commands.cost.kernels import (
    KernelCost,
    KernelEquation,
    kernel_cost,
    kernel_equations,
)
from jaxprtool.commands.kernels.dimensions import (
    POSITIONS,
    BodyResizing,
    Dim,
    DimensionClasses,
    Path,
    Reason,
    value_shape,
    whole_dims,
)
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir.documents import Number, document
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import all_jaxprs, variables
from jaxprtool.ir.kernel_calls import KernelBlock, KernelCall, index_texts, kernel_call
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import regions, run_jaxprs
from jaxprtool.ir.source_text import Place
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var

if TYPE_CHECKING:
    from jaxprtool.ir.frames import Frames
    from jaxprtool.jaxcompat import JaxprEqn

# --- sizes ----------------------------------------------------------------------------------------
# The axes along which a kernel may have other block sizes, and the kernel with these.


@dataclass(frozen=True, eq=False)
class BlockAxis:
    """An axis along which blocks may have another size.

    Attributes:
        name: The name of the axis of the grid.
        grid_axis: Its position; None if blocks are whole along it, so that a new axis divides them.
        size: The size of the blocks along it.
        extent: The size of the arrays along it.
        choices: The sizes that divide the arrays, and have whole tiles of a TPU.
        sums: Whether the kernel sums along it, so that another size changes the rounding.
        places: The blocks that have it, by position, each with the dimension.
        roots: The classes of its dimensions.
    """

    name: str
    grid_axis: int | None
    size: int
    extent: int
    choices: tuple[int, ...]
    sums: bool
    places: tuple[tuple[int, int], ...]
    roots: frozenset[Dim]


@dataclass(frozen=True, eq=False)
class FixedAxis:
    """An axis of the grid along which the block size is fixed, and why.

    Attributes:
        name: The name of the axis of the grid.
        reason: What fixes it.
    """

    name: str
    reason: Reason


class _Fixed(Exception):
    """Raised with the `Reason` if a size is fixed."""

    @property
    def reason(self) -> Reason:
        reason: Reason = self.args[0]
        return reason


class BlockSizes:
    """The block sizes for which a kernel computes the same function.

    Args:
        grid: The steps of the kernel.

    Attributes:
        axes: The axes along which blocks may have another size.
        fixed: The axes of the grid along which they may not.
    """

    def __init__(self, grid: GridSteps) -> None:
        self.grid, self.kernel = grid, grid.kernel
        self.axes: list[BlockAxis] = []
        self.fixed: list[FixedAxis] = []
        kernel = self.kernel
        self._jaxpr = jaxcompat.open_jaxpr(kernel.body)
        self._classes = DimensionClasses(self._jaxpr)
        self._by_dim = self._block_dims()
        try:
            self._require_plain()
        except _Fixed as fault:
            self.fixed.append(FixedAxis("", fault.reason))
            return
        for position, axis in enumerate(kernel.grid):
            try:
                found = self._axis(position)
            except _Fixed as fault:
                self.fixed.append(FixedAxis(axis.name, fault.reason))
            else:
                self.axes += [] if found is None else [found]
        self.axes += self._whole_axes()

    def _block_dims(self) -> dict[tuple[int, int], Dim]:
        """Return the dimension of the Ref for each dimension of a block that is not squeezed."""
        found = {}
        for number, block in enumerate(self.kernel.blocks):
            kept = [d for d, dim in enumerate(block.dims) if dim.kind != "Squeezed"]
            if len(kept) == len(value_shape(block.ref)):
                found.update({(number, d): (block.ref, i) for i, d in enumerate(kept)})
        return found

    # --- what all axes need -----------------------------------------------------------------------

    def _require_plain(self) -> None:
        kernel, grid = self.kernel, self.grid
        if not grid.in_order or grid.count is None:
            raise _Fixed(Reason("the steps of the grid are not known, or have no order"))
        if self._classes.unsupported is not None:
            raise _Fixed(self._classes.unsupported)
        if kernel.captured or kernel.eqn.params.get("mesh") is not None:
            raise _Fixed(Reason("it closes over Refs, or runs on a mesh"))
        if any(axis.is_named for axis in kernel.grid):
            raise _Fixed(Reason("the axes of its grid have names"))
        for block in kernel.blocks:
            mapping = self._mapping(block)
            if mapping.transforms or mapping.transformed_block_aval != block.ref.aval:
                raise _Fixed(Reason(f"{block.name} has transforms"))
        for out, operand in kernel.aliases.items():
            first = operand - (len(kernel.eqn.invars) - len(kernel.inputs))
            pair = (kernel.inputs[first] if first >= 0 else None), kernel.outputs[out]
            if not _is_same_block(*pair, kernel.index_names):
                name = kernel.outputs[out].name
                raise _Fixed(Reason(f"{name} is aliased to an input that has other blocks"))
        for block in kernel.inputs:
            if any(access.ref is block.ref and access.kind != "read" for access in self._accesses):
                raise _Fixed(Reason(f"it writes the input {block.name}"))

    def _mapping(self, block: KernelBlock) -> Any:
        number = next(i for i, b in enumerate(self.kernel.blocks) if b is block)
        return self.kernel.eqn.params["grid_mapping"].block_mappings[number]

    @cached_property
    def _accesses(self) -> list[RefAccess]:
        return list(ref_accesses(self.grid))

    # --- axes of the grid -------------------------------------------------------------------------

    def _axis(self, position: int) -> BlockAxis | None:
        """Return an axis of the grid that moves blocks; None if it moves none.

        Raises:
            _Fixed: If the blocks along it may not have another size.
        """
        axis = self.kernel.grid[position]
        places = self._places(position)
        if not places or axis.is_batch:
            return None
        pairs = [(self.kernel.blocks[i], d) for i, d in places]
        sizes = {(block.dims[d].size, block.array.shape[d]) for block, d in pairs}
        if len(sizes) > 1:
            raise _Fixed(Reason("blocks of different sizes follow it"))
        ((size, extent),) = sizes
        if axis.size != -(-extent // size):
            raise _Fixed(Reason(f"its {axis.size} steps are not all blocks of {size} in {extent}"))
        roots = self._roots(places)
        sums = [path for root in roots for path in self._classes.sums.get(root, ())]
        if sums:
            _SummedAxis(self, position, roots, sums).check()
            if extent % size:
                raise _Fixed(Reason(f"it sums over a last block that is not whole: {extent}"))
        else:
            self._check_mapped(position, places)
        return self._with_choices(axis.name, position, size, extent, bool(sums), places, roots)

    def _places(self, position: int) -> list[tuple[int, int]]:
        """Return the dimensions of blocks that follow an axis of the grid."""
        names, places = self.kernel.index_names, []
        for number, block in enumerate(self.kernel.blocks):
            dims = [d for d, axes in enumerate(block.axes) if position in axes]
            if not dims:
                continue
            texts = index_texts(block.index_map, names)
            for d in dims:
                kind = block.dims[d].kind
                if kind == "Squeezed" and texts[d] == names[position]:
                    continue
                if kind != "Blocked" or texts[d] != names[position] or len(dims) > 1:
                    raise _Fixed(Reason(f"the index of {block.name} is not {names[position]}"))
                places.append((number, d))
            if len(dims) == 1 and block.dims[dims[0]].kind == "Squeezed" and places:
                raise _Fixed(Reason(f"{block.name} has one element for each step along it"))
        squeezed = [
            block.name
            for block in self.kernel.blocks
            for d, axes in enumerate(block.axes)
            if position in axes and block.dims[d].kind == "Squeezed"
        ]
        if squeezed and places:
            raise _Fixed(Reason(f"{squeezed[0]} has one element for each step along it"))
        return places

    def _roots(self, places: Sequence[tuple[int, int]]) -> frozenset[Dim]:
        """Return the classes of some dimensions of blocks, if only these have them."""
        classes = self._classes
        roots = frozenset(classes.root(self._by_dim[place]) for place in places)
        for root in roots:
            if (reason := classes.fixed.get(root)) is not None:
                raise _Fixed(reason)
        for place, dim in self._by_dim.items():
            if place not in places and classes.root(dim) in roots:
                name = self.kernel.blocks[place[0]].name
                raise _Fixed(Reason(f"a dimension of {name} has the same size, and is not moved"))
        for scalar in self.kernel.prefetched:
            if any(
                classes.root((scalar.ref, d)) in roots for d in range(len(value_shape(scalar.ref)))
            ):
                raise _Fixed(Reason(f"the scalars {scalar.name} have this size"))
        return roots

    def _check_mapped(self, position: int | None, places: Sequence[tuple[int, int]]) -> None:
        """Check that the kernel maps each index along an axis alone."""
        kernel = self.kernel
        moved = {number for number, _ in places}
        for number, block in enumerate(kernel.blocks):
            if number >= len(kernel.inputs) and number not in moved:
                raise _Fixed(Reason(f"{block.name} is the same for all of its steps"))
        if position is not None:
            for path in self._positions(position):
                raise _Fixed(Reason("the body reads the step along it", path))
        assert self.grid.count is not None
        inner = self.grid.count if position is None else _inner_steps(kernel, position)
        self._check_state(inner)

    def _positions(self, position: int) -> Iterator[Path]:
        """Yield the equations that read the index or size of an axis of the grid."""
        axes = [i for i, axis in enumerate(self.kernel.grid) if not axis.is_batch]
        for equation in self._equations:
            eqn = equation.eqn
            if eqn.primitive.name in POSITIONS and axes[eqn.params["axis"]] == position:
                yield (*equation.path, eqn)

    @cached_property
    def _equations(self) -> list[KernelEquation]:
        return list(kernel_equations(self.grid))

    def _check_state(self, inner: int) -> None:
        """Check that memory is written before it is read in each of the runs of `inner` steps."""
        kernel = self.kernel
        names = {block.ref: block.name for block in kernel.outputs}
        names |= {scratch.ref: scratch.name for scratch in kernel.scratch}
        for ref, name in names.items():
            used = [access for access in self._accesses if access.ref is ref]
            reads = [access for access in used if access.kind != "write"]
            if reads and not _is_written_first(used, inner, self.grid.count or 0):
                path = (*reads[0].equation.path, reads[0].equation.eqn)
                raise _Fixed(Reason(f"{name} may carry values from one step along it on", path))

    # --- new axes ---------------------------------------------------------------------------------

    def _whole_axes(self) -> Iterator[BlockAxis]:
        """Yield the axes along which blocks are whole, and may be divided by a new axis."""
        taken = {root for axis in self.axes for root in axis.roots}
        groups: dict[Dim, list[tuple[int, int]]] = {}
        for place, dim in self._by_dim.items():
            groups.setdefault(self._classes.root(dim), []).append(place)
        letters = (c for c in "nmpqrstuvwxyz" if c not in self.kernel.index_names)
        if self.kernel.prefetched or any(axis.is_batch for axis in self.kernel.grid):
            return
        for root, places in groups.items():
            if root in taken or root in self._classes.sums or not self._are_whole(places):
                continue
            block, d = self.kernel.blocks[places[0][0]], places[0][1]
            extent = block.array.shape[d]
            try:
                roots = self._roots(places)
                self._check_mapped(None, places)
            except _Fixed:
                continue
            found = self._with_choices("", None, extent, extent, False, tuple(places), roots)
            if found is not None:
                yield replace(found, name=next(letters))

    def _are_whole(self, places: Sequence[tuple[int, int]]) -> bool:
        for number, d in places:
            block = self.kernel.blocks[number]
            is_plain = block.dims[d].kind == "Blocked" and len(block.index_map.outvars) == len(
                block.dims
            )
            index = block.index_map.outvars[d] if is_plain else None
            is_first = isinstance(index, Literal) and index.val == 0
            if not is_first or block.dims[d].size != block.array.shape[d]:
                return False
        return True

    # --- choices ----------------------------------------------------------------------------------

    def _with_choices(
        self,
        name: str,
        position: int | None,
        size: int,
        extent: int,
        sums: bool,
        places: Sequence[tuple[int, int]],
        roots: frozenset[Dim],
    ) -> BlockAxis | None:
        tile = max(self._tile(*place) for place in places)
        divisors = [n for n in range(1, extent + 1) if extent % n == 0]
        choices = tuple(n for n in divisors if n == extent or n % tile == 0)
        if set(choices) <= {size}:
            return None
        return BlockAxis(name, position, size, extent, choices, sums, tuple(places), roots)

    def _tile(self, number: int, d: int) -> int:
        """Return the elements of a tile of a TPU along a dimension of a block."""
        ref, i = self._by_dim[number, d]
        packing = max(4 // itemsize(ref.aval.dtype), 1)
        rank = len(value_shape(ref))
        if i == rank - 1:
            return 128 if rank > 1 else 128 * packing * 8
        return 8 * packing if i == rank - 2 else 1

    # --- the kernel -------------------------------------------------------------------------------

    def resized(self, sizes: Mapping[int, int]) -> JaxprEqn:
        """Return the kernel with other block sizes.

        Args:
            sizes: The size along each axis, by its position in `axes`. Others stay.
        """
        changes = {self.axes[i]: n for i, n in sizes.items() if n != self.axes[i].size}
        new_axes = [axis for axis in changes if axis.grid_axis is None]
        kernel, params = self.kernel, self.kernel.eqn.params
        sizes_of_classes = {root: n for axis, n in changes.items() for root in axis.roots}
        numbers = unbatched_axes(kernel)
        last = {
            numbers[axis.grid_axis]: (kernel.grid[axis.grid_axis].size - 1, axis.extent // n - 1)
            for axis, n in changes.items()
            if axis.grid_axis is not None and axis.sums
        }
        resizing = BodyResizing(self._classes, sizes_of_classes, last, len(new_axes))
        body = resizing.jaxpr(params["jaxpr"])
        mapping = params["grid_mapping"]
        steps = [*mapping.grid]
        for axis, size in changes.items():
            if axis.grid_axis is not None:
                steps[axis.grid_axis] = axis.extent // size
        grid = (*(axis.extent // changes[axis] for axis in new_axes), *steps)
        refs = jaxcompat.open_jaxpr(body).invars
        scalars = len(kernel.prefetched)
        blocks = [
            self._resized_block(number, block, refs[scalars + number].aval, changes, new_axes)
            for number, block in enumerate(mapping.block_mappings)
        ]
        count = len(kernel.scratch)
        changed = {
            "grid": grid,
            "block_mappings": tuple(blocks),
            "scratch_avals": tuple(ref.aval for ref in refs[len(refs) - count :]),
        }
        if new_axes:
            step = jax.core.ShapedArray((), np.dtype("int32"))
            avals = (*(step for _ in new_axes), *mapping.index_map_avals)
            changed |= {
                "index_map_avals": avals,
                "index_map_tree": jax.tree.structure((avals, {})),
            }
        options = _with_axes(kernel.compiler_params, len(new_axes))
        return kernel.eqn.replace(
            params={
                **params,
                "jaxpr": body,
                "grid_mapping": replace(mapping, **changed),
                "compiler_params": options,
            }
        )

    def _resized_block(
        self,
        number: int,
        block: Any,
        aval: Any,
        changes: Mapping[BlockAxis, int],
        new_axes: Sequence[BlockAxis],
    ) -> Any:
        shape = [*block.block_shape]
        for axis, size in changes.items():
            for place in axis.places:
                if place[0] == number:
                    shape[place[1]] = replace(shape[place[1]], block_size=size)
        index_map = block.index_map_jaxpr
        if new_axes:
            jaxpr = jaxcompat.open_jaxpr(index_map)
            first = [Var(jax.core.ShapedArray((), np.dtype("int32"))) for _ in new_axes]
            outvars = [*jaxpr.outvars]
            for axis, var in zip(new_axes, first, strict=True):
                for _, d in (place for place in axis.places if place[0] == number):
                    outvars[d] = var
            index_map = jaxcompat.replace_jaxpr(
                index_map, invars=[*first, *jaxpr.invars], outvars=outvars
            )
        return replace(
            block,
            block_shape=tuple(shape),
            transformed_block_aval=aval,
            index_map_jaxpr=index_map,
        )


def unbatched_axes(kernel: KernelCall) -> dict[int, int]:
    """Return the axis of `program_id` for each axis of the grid that `vmap` has not added."""
    axes = [i for i, axis in enumerate(kernel.grid) if not axis.is_batch]
    return {axis: number for number, axis in enumerate(axes)}


def _is_same_block(a: KernelBlock | None, b: KernelBlock, names: Sequence[str]) -> bool:
    if a is None:
        return False
    texts = [index_texts(block.index_map, names) for block in (a, b)]
    return a.dims == b.dims and texts[0] == texts[1] and a.array.shape == b.array.shape


def _inner_steps(kernel: KernelCall, position: int) -> int:
    """Return the number of steps of the axes of the grid after one."""
    return int(np.prod([axis.size for axis in kernel.grid[position + 1 :]], dtype=np.int64))


def _with_axes(options: Any, count: int) -> Any:
    """Return the compiler's parameters for a grid with new first axes."""
    semantics = getattr(options, "dimension_semantics", None)
    if not semantics or not count:
        return options
    arbitrary = "arbitrary" if isinstance(semantics[0], str) else type(semantics[0]).ARBITRARY
    return replace(options, dimension_semantics=(*(count * [arbitrary]), *semantics))


# --- accesses -------------------------------------------------------------------------------------


class RefAccess(NamedTuple):
    """A load or store of a Ref of the kernel: its kind is "read", "write" or "accum"."""

    equation: KernelEquation
    ref: Var
    kind: str

    @property
    def is_whole(self) -> bool:
        """True if it has the whole Ref."""
        kept, shape = whole_dims(self.equation.eqn), value_shape(self.equation.eqn.invars[0])
        have = {d for d, n in enumerate(shape) if n == 1} | {d for d, _ in kept or ()}
        return kept is not None and len(have) == len(shape)

    def mask(self, count: int) -> np.ndarray:
        """Return in which steps it may run."""
        mask = self.equation.runs.mask
        return np.ones(count, bool) if mask is None else mask


def ref_accesses(grid: GridSteps) -> Iterator[RefAccess]:
    """Yield the loads and stores of a kernel's Refs that run, in order."""
    bodies = [*all_jaxprs(jaxcompat.open_jaxpr(grid.kernel.body))]
    read = {v for body in bodies for atoms in _atoms(body) for v in atoms if isinstance(v, Var)}
    for equation in kernel_equations(grid):
        eqn = equation.eqn
        if regions(eqn) is not None:
            continue
        for ref, kind in accesses(eqn):
            own = equation.refs.get(ref)
            if own is not None:
                is_swap = eqn.primitive.name == "swap" and not read.isdisjoint(eqn.outvars)
                yield RefAccess(equation, own, "accum" if is_swap else kind)


def _atoms(jaxpr: Jaxpr) -> Iterator[Sequence[Atom]]:
    yield from (eqn.invars for eqn in jaxpr.eqns)
    yield jaxpr.outvars


def _is_written_first(used: Sequence[RefAccess], inner: int, count: int) -> bool:
    """Return True if each run of `inner` steps writes a whole Ref before it reads it."""
    order = []
    for access in used:
        mask = access.mask(count).reshape(-1, inner)
        order.append(np.where(mask.any(1), mask.argmax(1), inner))
    firsts = np.stack(order)
    first = firsts.argmin(0)  # of several in one step, the first in the body
    runs = np.flatnonzero(firsts.min(0) < inner)
    for number in np.unique(first[runs]):
        access = used[number]
        runs_always = access.equation.runs.is_certain and not access.equation.runs.per_round
        if access.kind != "write" or not access.is_whole or not runs_always:
            return False
    return True


# --- sums -----------------------------------------------------------------------------------------


#: The equations that may store a sum: whether they add it themselves.
_ACCUMULATIONS = {"swap": False, "addupdate": True}


class _SummedAxis:
    """An axis of the grid along which products or sums are added to accumulators.

    The body must set each accumulator in the first step along the axis, add to it in each step, and
    read it elsewhere in the last step. Other memory is written in the first or last step alone.
    """

    def __init__(
        self, sizes: BlockSizes, position: int, roots: frozenset[Dim], sums: Sequence[Path]
    ) -> None:
        self._sizes, self._position, self._roots, self._sums = sizes, position, roots, sums
        kernel = sizes.kernel
        self._axis = kernel.grid[position]
        self._eqns = sizes._jaxpr.eqns
        self._order = {id(eqn): i for i, eqn in enumerate(self._eqns)}
        self._makes = {var: eqn for eqn in self._eqns for var in eqn.outvars}
        count, steps = sizes.grid.count or 0, self._axis.size
        index = np.arange(count) % steps
        self._first, self._last = index == 0, index == steps - 1

    def check(self) -> None:
        """Check all of this.

        Raises:
            _Fixed: With the first fault.
        """
        sizes, kernel = self._sizes, self._sizes.kernel
        if self._axis.size < 2 or _inner_steps(kernel, self._position) != 1:
            raise _Fixed(Reason("it sums along it, and it is not the last axis of several steps"))
        written = {access.ref for access in sizes._accesses if access.kind != "read"}
        for ref in written:
            if any(
                sizes._classes.root((ref, d)) in self._roots for d in range(len(value_shape(ref)))
            ):
                raise _Fixed(Reason("it sums along it, and also stores values along it"))
        accumulated = self._accumulators()
        last_sum = max(self._order[id(eqn)] for eqn in accumulated.values())
        first_sum = min(self._order[id(eqn)] for eqn in self._reads(accumulated))
        for access in sizes._accesses:
            self._check_access(access, accumulated, first_sum, last_sum)
        self._check_reads(accumulated)
        for path in sizes._positions(self._position):
            self._check_position(path)

    def _accumulators(self) -> dict[Var, JaxprEqn]:
        """Return the stores of accumulators by Ref, which must read all of the sums."""
        found: dict[Var, JaxprEqn] = {}
        left = {id(path[-1]): path for path in self._sums}
        for path in self._sums:
            if len(path) > 1 or id(path[-1]) not in self._order:
                raise _Fixed(Reason("it sums along it in a loop, branch or call", path))
        for eqn in self._eqns:
            if eqn.primitive.name not in _ACCUMULATIONS:
                continue
            terms = self._terms(eqn)
            if terms is None:
                continue
            ref = eqn.invars[0]
            if ref in found or whole_dims(eqn) is None:
                raise _Fixed(Reason("it is accumulated more than once", (eqn,)))
            found[ref] = eqn
            for term in terms:
                left.pop(id(term), None)
        for path in left.values():
            raise _Fixed(Reason("it sums along it, and the sum is not only accumulated", path))
        return found

    def _terms(self, eqn: JaxprEqn) -> list[JaxprEqn] | None:
        """Return the sums that a store adds to its Ref; None if it is no accumulation."""
        ref, value = eqn.invars[0], eqn.invars[1]
        if _ACCUMULATIONS[eqn.primitive.name]:
            return self._sums_in(value)
        add = self._made_by(value, "add")
        if add is None:
            return None
        for old, new in (add.invars, add.invars[::-1]):
            read = self._made_by(old, "get")
            if read is not None and read.invars[0] is ref and self._is_read_once(old):
                return self._sums_in(new)
        return None

    def _sums_in(self, atom: Atom) -> list[JaxprEqn] | None:
        """Return the sums of which a value is a linear function; None if it is not."""
        eqn = self._makes.get(atom) if isinstance(atom, Var) else None
        if eqn is None or not self._is_read_once(atom):
            return None
        if any(eqn is path[-1] for path in self._sums):
            return [eqn]
        name = eqn.primitive.name
        if traits(eqn).gives in ("cast", "layout") or name == "neg":
            return self._sums_in(eqn.invars[0])
        if name == "mul":
            factors = [a for a in eqn.invars if isinstance(a, Literal)]
            others = [a for a in eqn.invars if not isinstance(a, Literal)]
            return self._sums_in(others[0]) if len(factors) == 1 else None
        if name == "add":
            parts = [self._sums_in(a) for a in eqn.invars]
            return None if None in parts else [e for part in parts for e in part or ()]
        return None

    def _made_by(self, atom: Atom, name: str) -> JaxprEqn | None:
        eqn = self._makes.get(atom) if isinstance(atom, Var) else None
        return eqn if eqn is not None and eqn.primitive.name == name else None

    def _is_read_once(self, atom: Atom) -> bool:
        readers = sum(a is atom for eqn in self._eqns for a in eqn.invars)
        return readers == 1

    def _reads(self, accumulated: Mapping[Var, JaxprEqn]) -> Iterator[JaxprEqn]:
        """Yield the equations that sum, and those that read the accumulators for an addition."""
        yield from (path[-1] for path in self._sums)
        for ref, store in accumulated.items():
            if (add := self._made_by(store.invars[1], "add")) is not None:
                for atom in add.invars:
                    read = self._made_by(atom, "get")
                    if read is not None and read.invars[0] is ref:
                        yield read

    def _check_access(
        self, access: RefAccess, accumulated: Mapping[Var, JaxprEqn], first: int, last: int
    ) -> None:
        """Check in which steps, and where in the body, an access runs."""
        eqn, kernel = access.equation.eqn, self._sizes.kernel
        place = self._place(access)
        is_own = any(eqn is own for own in self._own(accumulated))
        is_state = access.ref in accumulated or access.kind != "read"
        if is_own or not is_state or access.ref in {b.ref for b in kernel.inputs}:
            return
        mask = access.mask(self._sizes.grid.count or 0)
        runs = access.equation.runs
        is_first = place < first and (mask <= self._first).all()
        is_last = place > last and (mask <= self._last).all()
        if access.ref in accumulated and is_first:
            is_first = access.kind == "write" and access.is_whole
        if not (is_first or is_last) or not runs.is_certain:
            path = (*access.equation.path, eqn)
            raise _Fixed(Reason("it sums along it, and other steps read or write the sum", path))

    def _check_reads(self, accumulated: Mapping[Var, JaxprEqn]) -> None:
        """Check that all steps read the same in memory that the first or last step writes."""
        accesses = self._sizes._accesses
        for access in accesses:
            writes = [a for a in accesses if a.ref is access.ref and a.kind != "read"]
            if access.kind != "read" or access.ref in accumulated or not writes:
                continue
            place = self._place(access)
            for write in writes:
                after = (write.mask(len(self._first)) <= self._first).all()
                if (self._place(write) >= place) if after else (self._place(write) <= place):
                    path = (*access.equation.path, access.equation.eqn)
                    raise _Fixed(
                        Reason("it sums along it, and steps differ in what they read", path)
                    )

    def _place(self, access: RefAccess) -> int:
        """Return the position in the body of the equation that has an access."""
        equation = access.equation
        return self._order[id(equation.path[0] if equation.path else equation.eqn)]

    def _own(self, accumulated: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
        return [*accumulated.values(), *self._reads(accumulated)]

    def _check_position(self, path: Path) -> None:
        """Check that the step along the axis is only compared with the first and last one."""
        eqn, jaxpr = path[-1], self._body_of(path)
        ends = (0, self._axis.size - 1)
        readers = [e for e in jaxpr.eqns if eqn.outvars[0] in e.invars]
        for reader in readers:
            numbers = [int(a.val) for a in reader.invars if isinstance(a, Literal)]
            if reader.primitive.name != "eq" or numbers[:1] not in ([ends[0]], [ends[1]]):
                raise _Fixed(Reason("the body reads the step along it", path))
        if eqn.primitive.name != "program_id" or eqn.outvars[0] in jaxpr.outvars:
            raise _Fixed(Reason("the body reads the number of steps along it", path))

    def _body_of(self, path: Path) -> Jaxpr:
        if len(path) == 1:
            return self._sizes._jaxpr
        bodies = (body for _, body in run_jaxprs(path[-2]))
        inner = (jaxcompat.open_jaxpr(body) for body in bodies)
        return next(body for body in inner if any(eqn is path[-1] for eqn in body.eqns))


# --- figures --------------------------------------------------------------------------------------
# Other block sizes of a kernel, with their figures, and what the compiler of a TPU says.
#
#     fit = block_choices(cost, device, frames, path)
#     fit.choices[0].sizes, fit.choices[0].vmem_bytes  # (1024, 1024), 12582912
#
# All sizes for which the kernel computes the same (`block_sizes`) have figures of the same model as
# the kernel itself. They are ranked by the lower bound of the time, then by the bytes that are
# copied, then by the number of steps. The model is no promise: it counts neither the time that a
# step takes to start, nor the VMEM that the compiler needs besides the blocks.


#: The maximum number of combinations of sizes that have figures.
MOST_TRIED = 512

#: The number of them that are shown, and compiled.
MOST_SHOWN = 5


@document(optional=("fits", "bytes", "message"))
@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler of a TPU says about a kernel.

    Attributes:
        fits: Whether the kernel fits; None if it was not compiled for another reason.
        bytes: The vector memory that it has assigned, if it says.
        message: The error, if it was not compiled.
    """

    fits: bool | None
    bytes: int | None = None
    message: str | None = None


@dataclass(frozen=True)
class FitAxis:
    """An axis along which a kernel may have other block sizes.

    Attributes:
        name: The name of the axis of the grid.
        is_new: Whether the grid does not have it yet, so that blocks are whole along it.
        size: The size of the blocks along it.
        extent: The size of the arrays along it.
        sums: Whether the kernel sums along it, so that another size changes the rounding.
        dimensions: The dimensions of blocks that it moves: `x_ref axis 0`.
    """

    name: str
    is_new: bool
    size: int
    extent: int
    sums: bool
    dimensions: tuple[str, ...]


@document(optional=("place",))
@dataclass(frozen=True)
class FixedSize:
    """An axis of the grid along which the block size is not changed, and why.

    Attributes:
        name: The name of the axis; "" for all of them.
        reason: What fixes the size.
        place: The line that does it, if one does.
    """

    name: str
    reason: str
    place: Place | None = None


@document(optional=("compiled",))
@dataclass(frozen=True)
class BlockChoice:
    """Block sizes of a kernel, with the figures of a call.

    Attributes:
        sizes: The size of blocks along each axis.
        grid: The sizes of the grid, with new axes first.
        seconds: A lower bound of the time of a call.
        limit: What limits it.
        bytes: The bytes that a call copies between HBM and the core, at least.
        vmem_bytes: The bytes of all blocks and the scratch in vector memory, at least.
        fits: Whether these are less than the limit.
        compiled: What the compiler says, if it was asked.
    """

    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    seconds: float
    limit: str
    bytes: Number
    vmem_bytes: int
    fits: bool
    compiled: CompiledKernel | None = None


@dataclass(frozen=True)
class KernelFit:
    """Other block sizes of a kernel.

    Attributes:
        axes: The axes along which they may differ.
        fixed: The axes of the grid along which they may not.
        tried: The number of combinations that have figures.
        now: The sizes that the kernel has.
        choices: The combinations that fit, the best first.
    """

    axes: tuple[FitAxis, ...]
    fixed: tuple[FixedSize, ...]
    tried: int
    now: BlockChoice
    choices: tuple[BlockChoice, ...]


def block_choices(
    cost: KernelCost, device: DeviceSpec, frames: Frames, path: Sequence[JaxprEqn]
) -> KernelFit:
    """Return other block sizes of a kernel for a TPU, the best first.

    Args:
        cost: The cost of the kernel.
        device: A device with vector memory.
        frames: The lines of the program.
        path: The equations around the kernel, and its own.
    """
    sizes = BlockSizes(cost.grid)
    fixed = [
        FixedSize(f.name, f.reason.text, frames.line_of((*path, *f.reason.path)))
        if f.reason.path
        else FixedSize(f.name, f.reason.text)
        for f in sizes.fixed
    ]
    now = _choice(tuple(axis.size for axis in sizes.axes), cost, device)
    tried = [
        choice
        for chosen in _combinations(sizes)
        if (choice := _figures(sizes, chosen, device)) is not None
    ]
    ranked = sorted((c for c in tried if c.fits), key=_rank)
    axes = tuple(_fit_axis(sizes, axis) for axis in sizes.axes)
    return KernelFit(axes, tuple(fixed), len(tried), now, tuple(ranked))


def _rank(choice: BlockChoice) -> tuple[Any, ...]:
    return choice.seconds, choice.bytes, math.prod(choice.grid), choice.vmem_bytes


def _fit_axis(sizes: BlockSizes, axis: BlockAxis) -> FitAxis:
    names = tuple(f"{sizes.kernel.blocks[i].name} axis {d}" for i, d in axis.places)
    is_new = axis.grid_axis is None
    return FitAxis(axis.name, is_new, axis.size, axis.extent, axis.sums, names)


def _combinations(sizes: BlockSizes) -> Iterator[tuple[int, ...]]:
    """Yield the sizes along each axis, other than those of the kernel.

    If there are too many, every second of the most choices is left out, but not the largest.
    """
    choices = [axis.choices for axis in sizes.axes]
    while math.prod(map(len, choices)) > MOST_TRIED:
        longest = max(range(len(choices)), key=lambda i: len(choices[i]))
        choices[longest] = choices[longest][::-2][::-1]
    now = tuple(axis.size for axis in sizes.axes)
    yield from (chosen for chosen in product(*choices) if choices and chosen != now)


def _figures(sizes: BlockSizes, chosen: Sequence[int], device: DeviceSpec) -> BlockChoice | None:
    """Return the figures of the kernel with other sizes; None if it would not be the same."""
    inner_of_sum = [axis.grid_axis for axis in sizes.axes if axis.sums]
    for axis, size in zip(sizes.axes, chosen, strict=True):
        is_inner = any(a is not None and (axis.grid_axis or 0) > a for a in inner_of_sum)
        if is_inner and axis.extent != size:
            return None
    cost = kernel_cost(sizes.resized(dict(enumerate(chosen))), in_order=True)
    return None if cost is None else _choice(tuple(chosen), cost, device)


def _choice(sizes: tuple[int, ...], cost: KernelCost, device: DeviceSpec) -> BlockChoice:
    bound = cost.bound(device)
    copied = cost.traffic("input")[0] + cost.traffic("output")[0]
    grid = tuple(axis.size for axis in cost.kernel.grid)
    limit = cost.kernel.vmem_limit_bytes or device.kernel_vmem
    vmem = cost.vmem_bytes
    fits = limit is None or vmem < limit  # the compiler always needs some bytes more
    return BlockChoice(sizes, grid, bound.seconds, bound.limit, copied, vmem, fits)


# --- compiling ------------------------------------------------------------------------------------

#: The vector memory that the compiler has assigned to a kernel.
_ASSIGNED = re.compile(
    r'custom_call_target="tpu_custom_call".*'
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}'
)


def compiled_choices(
    fit: KernelFit, cost: KernelCost, devices: Sequence[jax.Device], most: int
) -> KernelFit:
    """Compile a kernel, and the first of the other block sizes, for a TPU.

    Args:
        fit: The block sizes.
        cost: The cost of the kernel.
        devices: A description of the TPU.
        most: How many of the choices to compile.
    """
    sizes = BlockSizes(cost.grid)
    eqns = [sizes.resized(dict(enumerate(choice.sizes))) for choice in fit.choices[:most]]
    compiled = [compiled_kernel(eqn, devices) for eqn in eqns]
    choices = [
        replace(choice, compiled=result)
        for choice, result in zip(fit.choices[:most], compiled, strict=True)
    ]
    return replace(fit, choices=(*choices, *fit.choices[most:]))


def tpu_devices(backend: str) -> Sequence[jax.Device]:
    """Return the devices of a TPU by the name of the backend: `tpu:v5e:2x2`.

    Raises:
        BackendError: If there is no such backend.
        ArgumentsError: If it is no TPU.
    """
    from jaxprtool.execute.running.backends import devices_to_compile_for

    if backend.partition(":")[0].lower() != "tpu":
        raise ArgumentsError(
            f"'{backend}' is no TPU: kernels are compiled for TPUs only",
            "name a TPU, which this machine may lack: --backend tpu:v5e:2x2",
        )
    return devices_to_compile_for(backend)


def compiled_kernel(eqn: JaxprEqn, devices: Sequence[jax.Device]) -> CompiledKernel:
    """Compile a kernel alone for a TPU, and return what its compiler says."""
    from jaxprtool.formats.lowering import compiled

    try:
        text = compiled(alone(eqn), (), devices[0], devices[:1]).as_text()
    except JaxprToolError as error:
        cause = error.__cause__ or error
        message = "\n".join(line.rstrip() for line in str(cause).strip().splitlines())
        is_large = "RESOURCE_EXHAUSTED" in message
        return CompiledKernel(False if is_large else None, message=message)
    found = _ASSIGNED.search(text)
    return CompiledKernel(True, int(found[1]) if found else None)


def alone(eqn: JaxprEqn) -> Program:
    """Return the program of a kernel alone, which is compiled and not interpreted."""
    kernel = kernel_call(eqn)
    assert kernel is not None
    eqn = eqn.replace(params={**eqn.params, "interpret": False})
    invars = [*dict.fromkeys(variables(eqn.invars))]
    debug = jaxcompat.DebugInfo(kernel.name, kernel.name, None, None)
    jaxpr = jaxcompat.new_jaxpr((), (), invars, eqn.outvars, [eqn], debug)
    avals = [v.aval for v in invars], [v.aval for v in eqn.outvars]
    trees = jax.tree.structure((tuple(avals[0]), {})), jax.tree.structure(tuple(avals[1]))
    names = tuple(f"x{i}" for i in range(len(avals[0])))
    results = tuple(f"y{i}" for i in range(len(avals[1])))
    return Program(kernel.name, jaxpr, *trees, names, results)
