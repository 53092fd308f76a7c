"""The steps of a Pallas kernel's grid: the block that each step reads or writes, and its memory.

    grid = GridSteps(kernel_call(eqn))
    grid.steps                                       # 256
    grid.block(kernel.inputs[0]).fetches             # (32, 32): at least, at most

The grid is enumerated: index maps, and the scalars of the body that depend on nothing but the step,
are evaluated for all steps at once. A step is in the order of a TPU, which runs the grid one step
after another, the last axis fastest, and fetches a block only if it is not that of the step before.
What depends on a prefetched scalar, or on a size that is known at run time only, is unknown, and
counts as a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dtypes import is_extended, itemsize
from jaxprtool.ir.equations import size_in_bytes
from jaxprtool.ir.evaluation import evaluate_exactly
from jaxprtool.ir.kernel_calls import KernelBlock, KernelCall, KernelScratch
from jaxprtool.ir.regions import Call, Cond, regions, run_jaxprs, view
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var

#: The maximum number of steps that are enumerated.
MOST_STEPS = 1 << 21

#: The values of scalars in each step of a grid.
Scalars = dict[Var, np.ndarray]

#: Memory spaces whose operands are not copied in blocks: the kernel copies parts of them itself.
_UNBLOCKED = frozenset({"any", "hbm", "gmem", "semaphore_mem", "host"})


class GridSteps:
    """The steps of a kernel's grid, in order.

    Args:
        kernel: The kernel.
        in_order: Whether the steps run one after another, as on a TPU. On a GPU they do not, and a
            block may be copied in each of them. By default, the kernel's parameters say.

    Attributes:
        steps: The number of steps, which may be symbolic; None if it is known at run time only.
        count: The number of steps, if they are enumerated; None if the number is not an integer, or
            above `MOST_STEPS`.
    """

    def __init__(self, kernel: KernelCall, in_order: bool | None = None) -> None:
        self.kernel = kernel
        self.in_order = kernel.backend in (None, "tpu") if in_order is None else in_order
        self.steps = kernel.steps
        sizes = [axis.size for axis in kernel.grid]
        is_counted = all(isinstance(n, int) for n in sizes) and 0 < self.steps <= MOST_STEPS
        self.count: int | None = self.steps if is_counted else None

    @cached_method
    def axis(self, number: int) -> np.ndarray:
        """Return the index along an axis of the grid in each step."""
        assert self.count is not None
        sizes = [axis.size for axis in self.kernel.grid]
        index = np.arange(sizes[number], dtype=np.int32)
        inner = math.prod(sizes[number + 1 :])
        return np.tile(np.repeat(index, inner), self.count // (inner * sizes[number]))

    @cached_method
    def block(self, block: KernelBlock) -> BlockSteps:
        """Return what a block is in each step."""
        indices: list[np.ndarray | None] = [None] * len(block.dims)
        jaxpr = block.index_map
        if self.count is not None and len(jaxpr.outvars) == len(block.dims):
            axes = enumerate(jaxpr.invars[: len(self.kernel.grid)])
            scalars = self.scalars(jaxpr, {var: self.axis(i) for i, var in axes})
            indices = [self.value(atom, scalars) for atom in jaxpr.outvars]
        return BlockSteps(self, block, tuple(indices))

    @cached_property
    def parts(self) -> tuple[BlockMemory, ...]:
        """The blocks and the scratch."""
        kernel, parts = self.kernel, list[BlockMemory]()
        for kind, blocks in (("input", kernel.inputs), ("output", kernel.outputs)):
            for block in blocks:
                steps = self.block(block)
                parts.append(BlockMemory(block.name, kind, steps.buffers, steps.vmem_bytes, steps))
        for scratch in kernel.scratch:
            size = 0
            if scratch.memory_space == "vmem" and is_kept(self, scratch):
                size = padded_bytes(scratch.array.shape, scratch.array.dtype)
            parts.append(BlockMemory(scratch.name, "scratch", 1, size))
        return tuple(parts)

    @property
    def vmem_bytes(self) -> Any:
        """The bytes of all blocks and the scratch in the vector memory of a TPU, at least."""
        return sum(part.bytes for part in self.parts)

    def scalars(self, jaxpr: Jaxpr, values: Mapping[Var, np.ndarray]) -> Scalars:
        """Return the scalars of a body that are known in each step, from those of its arguments."""
        scalars = dict(values)
        for eqn in jaxpr.eqns:
            self.evaluate(eqn, scalars)
        return scalars

    def evaluate(self, eqn: JaxprEqn, scalars: Scalars) -> None:
        """Add the results of an equation to the scalars, if they are known."""
        if any(getattr(var.aval, "shape", None) != () for var in eqn.outvars):
            return
        if (value := self._position(eqn)) is not None:
            scalars[eqn.outvars[0]] = value
            return
        operands = [self.value(atom, scalars) for atom in eqn.invars]
        call = view(eqn)
        if isinstance(call, Call):
            body = jaxcompat.open_jaxpr(call.body)
            pairs = zip(body.invars, operands, strict=True)
            inside = self.scalars(body, {var: x for var, x in pairs if x is not None})
            results = [self.value(atom, inside) for atom in body.outvars]
            scalars.update(
                (v, x) for v, x in zip(eqn.outvars, results, strict=True) if x is not None
            )
        elif operands and len(eqn.outvars) == 1:
            known = [x for x in operands if x is not None]
            result = _scalar_result(eqn, known) if len(known) == len(operands) else None
            if result is not None:
                scalars[eqn.outvars[0]] = result

    def _position(self, eqn: JaxprEqn) -> np.ndarray | None:
        """Return the result of `program_id` or `num_programs` in each step."""
        rule = _POSITIONS.get(eqn.primitive.name)
        if self.count is None or rule is None:
            return None
        axes = [i for i, axis in enumerate(self.kernel.grid) if not axis.is_batch]
        return rule(self, axes[eqn.params["axis"]])

    def value(self, atom: Atom, scalars: Scalars) -> np.ndarray | None:
        """Return a scalar in each step; None if it is unknown."""
        if isinstance(atom, Literal):
            is_scalar = np.shape(atom.val) == () and self.count is not None
            return np.full(self.count or 0, atom.val, atom.aval.dtype) if is_scalar else None
        return scalars.get(atom)


#: The primitives of a position in the grid, and their values in each step, by axis.
_POSITIONS: dict[str, Callable[[GridSteps, int], np.ndarray]] = {
    "program_id": lambda grid, axis: grid.axis(axis),
    "num_programs": lambda grid, axis: np.full_like(grid.axis(axis), grid.kernel.grid[axis].size),
}


def _scalar_result(eqn: JaxprEqn, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the result of an equation on scalars, one for each step; None if it is unknown."""
    like = traits(eqn)
    if like.gives in ("same", "layout"):
        return operands[0]
    if (rule := _ON_INTEGERS.get(eqn.primitive.name)) and operands[0].dtype.kind in "iu":
        return rule(*operands) if operands[-1].all() or len(operands) == 1 else None
    return evaluate_exactly(eqn, operands) if like.elementwise else None


#: Operations on integers, which round toward zero.
_ON_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "div": lambda x, y: (x - np.fmod(x, y)) // y,
    "rem": np.fmod,
    "sign": np.sign,
}


@dataclass(frozen=True, eq=False)
class BlockSteps:
    """What the block of an operand or of a result is in each step.

    Attributes:
        grid: The steps.
        block: The block.
        indices: The index along each dimension in each step, by the index map; None if it is
            unknown.
    """

    grid: GridSteps
    block: KernelBlock
    indices: tuple[np.ndarray | None, ...]

    @property
    def is_copied(self) -> bool:
        """True if the block is copied to the memory of the kernel before a step, or after it."""
        return self.block.memory_space not in _UNBLOCKED

    @property
    def is_known(self) -> bool:
        """True if all indices are known."""
        return all(index is not None for index in self.indices) and self.grid.count is not None

    @cached_property
    def starts(self) -> tuple[np.ndarray | None, ...]:
        """The first element along each dimension in each step; None if it is unknown."""
        pairs = zip(self.indices, self.block.dims, strict=True)
        return tuple(
            None
            if index is None or not isinstance(dim.size, int)
            else index.astype(np.int64) * dim.size
            if dim.kind in ("Blocked", "Squeezed")
            else index.astype(np.int64) - dim.padding[0]
            for index, dim in pairs
        )

    @cached_property
    def is_constant(self) -> bool:
        """True if the block is the same in all steps."""
        if self.is_known:
            return all((index == index[0]).all() for index in self.indices if index is not None)
        return not any(self.block.axes) and not any(self.block.scalars)

    @cached_property
    def changes(self) -> np.ndarray | None:
        """Whether each step has another block than the step before; None if that is unknown."""
        return self._changes(self.indices) if self.is_known else None

    @cached_property
    def numbers(self) -> np.ndarray:
        """A number for each step, equal if the blocks are; all indices must be known."""
        numbers = self._zeros
        for index in self.indices:
            assert index is not None
            low, high = int(index.min()), int(index.max())
            numbers = numbers * (high - low + 1) + (index - low)
        return numbers

    @cached_property
    def fetches(self) -> tuple[Any, Any]:
        """How often the block is copied, at least and at most; symbolic if the grid is."""
        if not self.is_copied:
            return 0, 0
        if not self.grid.in_order:
            return (len(np.unique(self.numbers)) if self.is_known else 1), self.grid.steps
        if self.is_constant:
            return 1, 1
        if self.grid.count is None:
            return 1, self.grid.steps
        return tuple(int(mask.sum()) for mask in (self._least, self._most))  # type: ignore[return-value]

    @cached_property
    def bytes(self) -> tuple[Any, Any]:
        """The bytes that are copied, at least and at most; None if the most is unknown.

        Only the part of a block that is in the array is copied.
        """
        least, most = self.fetches
        if not self.is_copied:
            return 0, 0
        size = itemsize(self.block.array.dtype)
        if self.grid.count is None:
            smallest, whole = self._smallest, math.prod(self.block.sizes)
            return least * smallest * size, None if most is None else most * whole * size
        low, high = self._elements
        if not self.grid.in_order:
            return self.touched_bytes, int(high.sum()) * size
        return int(low[self._least].sum()) * size, int(high[self._most].sum()) * size

    @cached_property
    def touched_bytes(self) -> Any:
        """The bytes of the part of the array that is in some block, at least."""
        if not self.is_copied:
            return 0
        size = itemsize(self.block.array.dtype)
        kinds = {dim.kind for dim in self.block.dims}
        if not self.is_known or kinds - {"Blocked", "Squeezed"}:
            return self._smallest * size
        _, first = np.unique(self.numbers, return_index=True)
        return int(self._elements[0][first].sum()) * size

    @property
    def _smallest(self) -> int:
        """The elements of the smallest block, at the end of the array."""
        number = 1
        for dim, size in zip(self.block.dims, self.block.array.shape, strict=True):
            if not (isinstance(dim.size, int) and isinstance(size, int)):
                return 0
            number *= (size % dim.size or dim.size) if dim.kind == "Blocked" else min(dim.size, 1)
        return number

    @cached_property
    def _elements(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of elements of the array in each step's block, at least and at most."""
        low, high = self._zeros + 1, self._zeros + 1
        for start, dim, size in zip(
            self.starts, self.block.dims, self.block.array.shape, strict=True
        ):
            if start is None:
                low = low * ((size % dim.size or dim.size) if dim.kind == "Blocked" else 1)
                high = high * dim.size
            else:
                part = np.clip(np.minimum(start + dim.size, size) - np.maximum(start, 0), 0, None)
                low, high = low * part, high * part
        return low, high

    @property
    def _zeros(self) -> np.ndarray:
        return np.zeros(self.grid.count or 0, np.int64)

    @cached_property
    def _least(self) -> np.ndarray:
        return self._changes(self.indices)

    @cached_property
    def _most(self) -> np.ndarray:
        """The steps in which the block may be another: an unknown index may follow its axes."""
        indices = list(self.indices)
        for index, axes in zip(self.indices, self.block.axes, strict=True):
            if index is None:
                indices += [self.grid.axis(i) for i in axes]
        return self._changes(indices)

    def _changes(self, indices: Sequence[np.ndarray | None]) -> np.ndarray:
        changes = np.zeros(self.grid.count or 0, bool)
        changes[:1] = True
        for index in indices:
            if index is not None:
                changes[1:] |= index[1:] != index[:-1]
        return changes

    # --- memory ---------------------------------------------------------------------------------

    @property
    def buffers(self) -> int:
        """The number of buffers: two if the block depends on the step, unless the kernel says."""
        if self.block.buffers is not None:
            return int(self.block.buffers)
        return 1 if self.is_constant else 2

    @property
    def vmem_bytes(self) -> Any:
        """The bytes of all buffers in the vector memory of a TPU."""
        if not self.is_copied or self.block.memory_space == "smem":
            return 0
        kept = [dim.size for dim in self.block.dims if dim.kind != "Squeezed"]
        return self.buffers * padded_bytes(kept, self.block.array.dtype)


#: The lanes and sublanes of a TPU's vector registers, and the bytes of an element of one.
_LANES, _SUBLANES, _WORD = 128, 8, 4


def padded_bytes(shape: Sequence[Any], dtype: Any) -> Any:
    """Return the bytes of an array in the vector memory of a TPU, padded to its tiles.

    A tile has 128 lanes, and as many sublanes as the second last dimension needs, up to eight, but
    at least as many as elements of the dtype fill 32 bits. (`infer_tiling` of JAX, and
    infer-memref-layout of Mosaic, from TPU v4 on.)
    """
    size = itemsize(dtype)
    packing = max(_WORD // size, 1)
    if not shape:
        return _WORD
    *leading, last = shape
    if not leading:
        return _ceiling(last, packing * _LANES) * size
    *leading, rows = leading
    tile = packing
    while isinstance(rows, int) and tile < min(rows, _SUBLANES):
        tile *= 2
    return math.prod(leading) * _ceiling(rows, tile) * _ceiling(last, _LANES) * size


def _ceiling(number: Any, multiple: int) -> Any:
    return -(-number // multiple) * multiple


class BlockMemory(NamedTuple):
    """A block of a kernel, its scratch, or a prefetched scalar, in the memory of a TPU's core.

    Attributes:
        name: The name of the Ref.
        kind: "input", "output", "scratch" or "scalar".
        buffers: The number of buffers.
        bytes: The bytes of all buffers in vector memory, padded to tiles.
        steps: What the block is in each step; None for scratch and scalars.
    """

    name: str
    kind: str
    buffers: int
    bytes: Any
    steps: BlockSteps | None = None


def accesses(eqn: JaxprEqn) -> Iterator[tuple[Any, str]]:
    """Yield the Refs that an equation reads or writes, each with the kind of its effect.

    The kinds are "read", "write" and "accum" (adding to it, which reads and writes).
    """
    for text in jaxcompat.effect_texts(eqn):
        if isinstance(text, tuple) and isinstance(text[1], int):
            yield eqn.invars[text[1]], text[0].removesuffix("Effect").lower()


def is_kept(grid: GridSteps, scratch: KernelScratch) -> bool:
    """Return False if scratch may stay in registers, so that Mosaic allocates none for it.

    It may if the body only stores and loads it, outside of loops and branches, and stores it first.
    A branch that all steps take, or none, is not one for Mosaic.
    """
    kinds = [*_access_kinds(grid, jaxcompat.open_jaxpr(grid.kernel.body), scratch.ref, {})]
    return "" in kinds or (bool(kinds) and kinds[0] != "write")


def _access_kinds(grid: GridSteps, jaxpr: Jaxpr, ref: Var, scalars: Scalars) -> Iterator[str]:
    """Yield the kinds of accesses of a Ref; "" for one in a loop or a branch."""
    for eqn in jaxpr.eqns:
        refs = dict(accesses(eqn))
        if ref in refs:
            control = regions(eqn)
            taken = _branch_of_all(grid, eqn, scalars)
            if control is not None and taken is not None:
                body, ins = control.jaxprs[taken], control.regions[taken].ins
                pairs = zip(body.invars, ins, strict=True)
                inside = [var for var, position in pairs if eqn.invars[position] is ref]
                for var in inside:
                    yield from _access_kinds(grid, body, var, {})
            else:
                is_plain = len(refs) == 1 and control is None and not any(run_jaxprs(eqn))
                yield refs[ref] if is_plain else ""
        grid.evaluate(eqn, scalars)


def _branch_of_all(grid: GridSteps, eqn: JaxprEqn, scalars: Scalars) -> int | None:
    """Return the branch that all steps take; None if they do not, or it is unknown."""
    branches = view(eqn)
    index = grid.value(branches.index, scalars) if isinstance(branches, Cond) else None
    if index is None or not (index == index[0]).all():
        return None
    return int(np.clip(index[0], 0, len(branches.branches) - 1))


# --- shared memory --------------------------------------------------------------------------------


def shared_bytes(jaxpr: Jaxpr, own: Sequence[Var] = ()) -> int:
    """Return the bytes that a kernel allocates in the shared memory of a GPU, at least.

    Memory that it allocates for a part of its body (`run_scoped`) counts where most is live.
    Barriers do not count.

    Args:
        jaxpr: The body of the kernel.
        own: Its arguments that are scratch.
    """
    most = 0
    for eqn in jaxpr.eqns:
        scoped = eqn.primitive.name == "run_scoped"
        for _, inner in run_jaxprs(eqn):
            body = jaxcompat.open_jaxpr(inner)
            most = max(most, shared_bytes(body, body.invars if scoped else ()))
    return most + sum(map(_shared_size, own))


def _shared_size(ref: Var) -> int:
    space = getattr(ref.aval, "memory_space", None)
    content = getattr(ref.aval, "inner_aval", None)
    if str(space) != "smem" or content is None or is_extended(content.dtype):
        return 0
    return int(size_in_bytes(content))
