"""The step of a Pallas kernel's grid that makes a NaN or an infinity, and the line that does.

    found = kernel_origin(origin)
    found.step, found.ref                            # (3, 0), "o_ref"

A kernel whose operands are as they should be, and whose results are not, is run step by step, with
NaN in what a block has beyond its array, as in JAX's interpret mode. The first step after which an
output has a NaN is then run equation by equation. If that only reads what an earlier step has left
in scratch memory, the search goes on there. Memory that no step has written is zero at first; only
if no step makes a NaN then, it is NaN, as in interpret mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.analysis.grids import GridSteps
from jaxprtool.commands.nans.search import OriginSearch
from jaxprtool.commands.nans.values import (
    FINITE,
    NAN,
    Evaluation,
    NonfiniteOrigin,
    Tracked,
    can_be_nonfinite,
    union,
    with_origins,
)
from jaxprtool.errors import described
from jaxprtool.execute.running.arrays import wide
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.evaluation import Interpreter, bind
from jaxprtool.ir.kernel_calls import BlockDimension, KernelBlock, KernelCall, kernel_call
from jaxprtool.ir.substitution import Substitution
from jaxprtool.jaxcompat import AbstractRef, AnyJaxpr, Aval, JaxprEqn

#: The maximum number of steps that are run.
MOST_STEPS = 1 << 16

#: The number of steps that are searched for reads of memory that no step has written.
_MOST_TRIES = 64

#: The kinds of dimensions of blocks that are run.
_KINDS = {"Blocked", "Element", "Squeezed"}


class KernelOrigin(NamedTuple):
    """Where a kernel makes a NaN or an infinity.

    Attributes:
        origin: The equation of the body, among the equations around it.
        kernel: The kernel.
        step: The index of the step along each axis of the grid; None if it is not known.
        ref: The name of the Ref that has the NaN first.
        note: What the Ref has, if no step has written it; or why the step is not known.
    """

    origin: NonfiniteOrigin
    kernel: KernelCall
    step: tuple[int, ...] | None
    ref: str
    note: str


def kernel_origin(origin: NonfiniteOrigin) -> KernelOrigin | None:
    """Return where a kernel makes a NaN or an infinity.

    Returns None if the origin is no kernel.

    Args:
        origin: A NaN or an infinity that an equation makes.
    """
    outer = origin.step
    kernel = None if outer is None else kernel_call(outer.eqn)
    if outer is None or kernel is None:
        return None
    reason = _unsupported(kernel, origin)
    if not reason:
        try:
            found = _SteppedKernel(kernel, [x.data for x in origin.operands], origin.state).origin()
        except Exception as error:  # the rules of JAX for Refs may raise anything
            reason = described(error)
    if reason or found is None:
        reason = reason or "run one by one, none makes it"
        return KernelOrigin(origin, kernel, None, "", f"its steps are not shown: {reason}")
    inner, step, ref, note = found
    if inner is None:
        return KernelOrigin(origin, kernel, step, ref, note)
    evaluated = inner.step
    assert evaluated is not None
    around = (*outer.around, outer.eqn, *evaluated.around)
    iterations = (*outer.iterations, *evaluated.iterations)
    moved = Evaluation(evaluated.eqn, around, iterations, inner.operands)
    results = [Tracked(x.data, moved, position=x.position) for x in inner.results]
    new = NonfiniteOrigin(
        origin.state,
        moved,
        "",
        results,
        inner.operands,
        inner.provenance,
        times=origin.times,
        reached=origin.reached,
        dropped=origin.dropped,
        led_to=origin.led_to,
    )
    return KernelOrigin(new, kernel, step, ref, note)


def in_interpret_mode(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    """Return a kernel that runs as a JAX function; None for all other equations."""
    if eqn.primitive.name != "pallas_call" or eqn.params.get("interpret", True):
        return None
    return [eqn.replace(params={**eqn.params, "interpret": True})]


def _unsupported(kernel: KernelCall, origin: NonfiniteOrigin) -> str:
    """Return why the steps of a kernel cannot be run one by one; "" if they can."""
    sizes = [axis.size for axis in kernel.grid]
    kinds = {dim.kind for block in kernel.blocks for dim in block.dims} - _KINDS
    if kernel.captured or kernel.eqn.params.get("mesh") is not None:
        return "it closes over Refs, or runs on a mesh"
    if not all(isinstance(n, int) for n in sizes):
        return "the size of its grid is known at run time only"
    if not 0 < kernel.steps <= MOST_STEPS:
        return f"it has {kernel.steps:,} of them"
    if kinds:
        return f"it has blocks of the kind {min(kinds)}"
    if any(is_extended(part.array.dtype) for part in kernel.scratch):
        return "it has semaphores"
    return "" if origin.operands else "its operands were too large to keep"


@dataclass
class _KernelMemory:
    """The memory of a kernel between two steps.

    Attributes:
        arrays: The arrays of inputs and outputs, padded to whole blocks.
        scratch: The contents of the scratch.
    """

    arrays: list[Any]
    scratch: list[Any]
    #: The first step after which each Ref has a NaN or an infinity that it had not before.
    first: dict[int, int] = field(default_factory=dict)


class _SteppedKernel:
    """A kernel that runs step by step.

    Args:
        kernel: The kernel.
        operands: Its operands.
        state: What is looked for: NaN or infinity.
    """

    def __init__(self, kernel: KernelCall, operands: Sequence[Any], state: int) -> None:
        self.kernel, self._state = kernel, state
        count = len(kernel.prefetched)
        self._scalars = list(operands[len(operands) - len(kernel.inputs) - count :][:count])
        inputs = operands[len(operands) - len(kernel.inputs) :]
        outputs = [
            operands[kernel.aliases[i]] if i in kernel.aliases else None
            for i, block in enumerate(kernel.outputs)
        ]
        self._given = [*inputs, *outputs]
        self._body = _WithoutSpaces().jaxpr(kernel.body)
        self._run = jax.jit(self._stepped)
        self._grid = GridSteps(kernel, in_order=True)
        self._steps = list(product(*(range(axis.size) for axis in kernel.grid)))
        self._outputs = range(len(kernel.inputs), len(kernel.blocks))

    def origin(self) -> tuple[NonfiniteOrigin | None, tuple[int, ...], str, str] | None:
        """Return the origin in the body, its step, the Ref, and what it has if nobody wrote it."""
        number = self._first_bad()
        while number is not None:
            memory = self._before(number, 0)
            found = self._in_step(number, memory)
            if found is None:
                return None
            origin, ref = found
            source = self._read_ref(origin)
            if source is None:
                return origin, self._steps[number], self._name(ref), ""
            earlier = memory.first.get(source)
            if earlier is None:
                return origin, self._steps[number], self._name(source), "padding beyond the array"
            number = earlier
        return self._of_unwritten() if self._state == NAN else None

    def _of_unwritten(self) -> tuple[NonfiniteOrigin | None, tuple[int, ...], str, str] | None:
        """Return the first step that reads memory that no step has written, or leaves it so."""
        memory, tries = self._start(np.nan), 0
        left = None
        for number in range(len(self._steps)):
            before = replace(memory, arrays=[x.copy() for x in memory.arrays])
            self._step(number, memory)
            for i in self._outputs:
                block, starts = self.kernel.blocks[i], self._starts(self.kernel.blocks[i], number)
                if np.isnan(_real(_part(memory.arrays[i], block, starts))).any():
                    tries += 1
                    if tries <= _MOST_TRIES and (found := self._in_step(number, before)):
                        source = self._read_ref(found[0])
                        ref = found[1] if source is None else source
                        note = "" if source is None else "which no step has written"
                        return found[0], self._steps[number], self._name(ref), note
        for number in range(len(self._steps)):
            for i in self._outputs:
                block, starts = self.kernel.blocks[i], self._starts(self.kernel.blocks[i], number)
                if left is None and np.isnan(_real(_part(memory.arrays[i], block, starts))).any():
                    left = None, self._steps[number], block.name, "which no step writes"
        return left

    # --- steps ------------------------------------------------------------------------------------

    @property
    def _inputs(self) -> range:
        return range(len(self.kernel.inputs))

    def _start(self, fill: float) -> _KernelMemory:
        scratch = [_unwritten(part.array, fill) for part in self.kernel.scratch]
        arrays = []
        for block, value in zip(self.kernel.blocks, self._given, strict=True):
            array = _unwritten(block.array, fill) if value is None else np.asarray(value)
            arrays.append(np.array(_padded(block, array)))
        return _KernelMemory(arrays, scratch)

    def _first_bad(self) -> int | None:
        """Return the first step after which an output has what is looked for."""
        memory = self._start(0)
        for number in range(len(self._steps)):
            self._step(number, memory)
            if any(memory.first.get(i) == number for i in self._outputs):
                return number
        return None

    def _before(self, number: int, fill: float) -> _KernelMemory:
        """Return the memory before a step."""
        memory = self._start(fill)
        for earlier in range(number):
            self._step(earlier, memory)
        return memory

    def _step(self, number: int, memory: _KernelMemory) -> None:
        starts, blocks = self._blocks(number, memory)
        values = [*self._scalars, *blocks, *memory.scratch]
        results = self._run(self._position(number), values)[len(self._scalars) :]
        new = [np.asarray(x) for x in results]
        for i, (before, after) in enumerate(zip((*blocks, *memory.scratch), new, strict=True)):
            if self._has_new(before, after):
                memory.first.setdefault(i, number)
        for i in self._outputs:
            _put(memory.arrays[i], self.kernel.blocks[i], starts[i], new[i])
        memory.scratch = new[len(blocks) :]

    def _has_new(self, before: Any, after: np.ndarray) -> bool:
        if not can_be_nonfinite(after.dtype):
            return False
        wrong = np.isnan if self._state == NAN else np.isinf
        return bool((wrong(_real(after)) & ~wrong(_real(before))).any())

    def _blocks(self, number: int, memory: _KernelMemory) -> tuple[list[Any], list[Any]]:
        starts = [self._starts(block, number) for block in self.kernel.blocks]
        rows = zip(memory.arrays, self.kernel.blocks, starts, strict=True)
        return starts, [_part(*row) for row in rows]

    def _starts(self, block: KernelBlock, number: int) -> list[int]:
        steps = self._grid.block(block)
        if steps.is_known:
            starts = zip(steps.indices, block.dims, strict=True)
            return [int(i[number]) * _unit(dim) for i, dim in starts if i is not None]
        scalars = [jax.new_ref(jnp.asarray(x)) for x in self._scalars]
        operands = [*map(np.int32, self._steps[number]), *scalars]
        index_map = jaxcompat.close_jaxpr(block.index_map)
        indices = Interpreter().run(index_map, operands)
        return [int(i) * _unit(dim) for i, dim in zip(indices, block.dims, strict=True)]

    def _position(self, number: int) -> list[np.int32]:
        axes = zip(self._steps[number], self.kernel.grid, strict=True)
        return [np.int32(i) for i, axis in axes if not axis.is_batch]

    def _stepped(self, position: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        refs = [jax.new_ref(x) for x in values]
        _Positioned(self.kernel, position).run(self._body, refs)
        return [ref[...] for ref in refs]

    # --- one step ---------------------------------------------------------------------------------

    def _in_step(self, number: int, memory: _KernelMemory) -> tuple[NonfiniteOrigin, int] | None:
        """Run a step by equation; return the origin that an output or scratch has, and that Ref."""
        _, blocks = self._blocks(number, memory)
        values = [*self._scalars, *blocks, *memory.scratch]
        refs = [jax.new_ref(jnp.asarray(x)) for x in values]
        search = _StepSearch(self.kernel, self._body, self._position(number), refs)
        search.run_program()
        for i in (*self._outputs, *range(len(blocks), len(blocks) + len(memory.scratch))):
            content = refs[len(self._scalars) + i]
            for origin in search.origins_in(content):
                if origin.state == self._state:
                    return origin, i
        return None

    def _read_ref(self, origin: NonfiniteOrigin) -> int | None:
        """Return the Ref that an origin only reads; None if it computes."""
        assert origin.step is not None
        if origin.step.eqn.primitive.name != "get":
            return None
        name = origin.operands[0].name
        names = [self._name(i) for i in range(len(self.kernel.blocks) + len(self.kernel.scratch))]
        return names.index(name) if name in names else None

    def _name(self, number: int) -> str:
        blocks, scratch = self.kernel.blocks, self.kernel.scratch
        return [*(block.name for block in blocks), *(part.name for part in scratch)][number]


class _Positioned(Interpreter):
    """Runs a body at a position in the grid, with loops and branches as JAX runs them."""

    def __init__(self, kernel: KernelCall, position: Sequence[Any]) -> None:
        self._values = _positions(kernel, position)

    def constant(self, value: object, aval: Aval) -> Any:
        return value

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        of_grid = self._values.get(eqn.primitive.name)
        return bind(eqn, operands) if of_grid is None else [of_grid[eqn.params["axis"]]]


def _positions(kernel: KernelCall, position: Sequence[Any]) -> dict[str, Sequence[Any]]:
    sizes = [np.int32(axis.size) for axis in kernel.grid if not axis.is_batch]
    return {"program_id": position, "num_programs": sizes}


class _StepSearch(OriginSearch):
    """Runs one step on Refs, and finds what makes a NaN or an infinity in it."""

    def __init__(
        self, kernel: KernelCall, body: AnyJaxpr, position: Sequence[Any], refs: Sequence[Any]
    ) -> None:
        self._positions = _positions(kernel, position)
        names = [scalar.name for scalar in kernel.prefetched]
        names += [block.name for block in kernel.blocks]
        names += [part.name for part in kernel.scratch]
        super().__init__(body, refs, names)

    def origins_in(self, ref: Any) -> tuple[NonfiniteOrigin, ...]:
        """Return the origins of what a Ref has."""
        return self._refs.get(id(ref), ())

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Tracked]:
        of_grid = self._positions.get(eqn.primitive.name)
        if of_grid is not None:
            _, results = self.step(eqn, operands, [of_grid[eqn.params["axis"]]])
            return results
        if eqn.primitive.name != "swap":
            return super().evaluate(eqn, operands)
        # What a store overwrites is often memory that no step has written.
        ref, value = operands[0].data, operands[1]
        outs = self.effects.results(eqn, [x.data for x in operands])
        _, results = self.step(eqn, operands, outs)
        content = Tracked(ref[...])
        before = self._refs.get(id(ref), ())
        with_origins(content, union([*value.origins, *before]))
        self._refs[id(ref)] = content.origins if content.state != FINITE else ()
        return results


class _WithoutSpaces(Substitution):
    """A substitution of plain Refs, which JAX can allocate, for those in a memory of the device."""

    def aval(self, aval: Aval) -> Aval:
        if isinstance(aval, AbstractRef):
            return AbstractRef(super().aval(aval.inner_aval))
        return super().aval(aval)

    def array_type(self, aval: Aval) -> Aval:
        space = jax.core.ShapedArray((), aval.dtype).memory_space
        return aval if aval.memory_space == space else aval.update(memory_space=space)


def _unit(dim: BlockDimension) -> int:
    """Return the elements that an index counts in."""
    return int(dim.size) if dim.kind == "Blocked" else 1


# --- blocks ---------------------------------------------------------------------------------------


def _unwritten(aval: Aval, fill: float) -> np.ndarray:
    """Return memory that no step has written; integers are as in JAX's interpret mode."""
    aval = aval.inner_aval if isinstance(aval, AbstractRef) else aval
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return np.full(aval.shape, jnp.iinfo(aval.dtype).min, aval.dtype)
    return np.full(aval.shape, fill if can_be_nonfinite(aval.dtype) else False, aval.dtype)


def _real(array: Any) -> np.ndarray:
    """Return an array in a dtype of which NumPy knows what is finite; zeros if it has no floats."""
    if not can_be_nonfinite(array.dtype):
        return np.zeros(array.shape)
    return wide(np.asarray(array))


def _padded(block: KernelBlock, array: np.ndarray) -> np.ndarray:
    """Return an array padded to whole blocks, and by the block's own padding."""
    widths = []
    for size, dim in zip(array.shape, block.dims, strict=True):
        before, after = dim.padding
        whole = -(-(size + before + after) // dim.size) * dim.size
        widths.append((before, whole - size - before))
    if not any(map(any, widths)):
        return array
    fill = _unwritten(jax.core.ShapedArray((), array.dtype), np.nan)
    return np.pad(array, widths, constant_values=fill)


def _slices(block: KernelBlock, array: Any, starts: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of a block, which is inside of the array as in interpret mode."""
    index = []
    for dim, size, start in zip(block.dims, array.shape, starts, strict=True):
        first = min(max(start, 0), size - dim.size)
        index.append(first if dim.kind == "Squeezed" else slice(first, first + dim.size))
    return tuple(index)


def _part(array: Any, block: KernelBlock, starts: Sequence[int]) -> Any:
    return array[_slices(block, array, starts)]


def _put(array: Any, block: KernelBlock, starts: Sequence[int], values: Any) -> None:
    array[_slices(block, array, starts)] = values
