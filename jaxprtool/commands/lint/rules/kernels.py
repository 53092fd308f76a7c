"""Pallas kernels that are wrong: blocks that are outside, lost, unwritten, raced for or padded.

The steps of the grid are enumerated (`analysis.grids`). A block whose index depends on data is not
judged, and a branch whose predicate does may be taken in any step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.commands.lint.graph import LintedKernel, LintedProgram
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.equations import size_of
from jaxprtool.ir.equations import variables as all_variables
from jaxprtool.ir.regions import called_body, regions, run_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Var

if TYPE_CHECKING:
    from jaxprtool.analysis.grids import BlockSteps
    from jaxprtool.commands.cost.kernels import KernelEquation
    from jaxprtool.ir.kernel_calls import KernelBlock, KernelScratch

#: Kernels with smaller blocks are copied fast enough without overlap.
LEAST_WHOLE = 1 << 20

_HEAD = """
    import jax
    import jax.numpy as jnp
    import jaxprtool
    from jax.experimental import pallas as pl


"""


def _example(kernel: str, types: str, call: str) -> str:
    """Return the text of a module with a kernel `kernel` and a function `f` that calls it."""
    lines = [*kernel.strip("\n").splitlines(), "", "", f"    @jaxprtool.example({types})"]
    lines += ["    def f(x):", *(f"        {line}" for line in call.strip("\n").splitlines())]
    return _HEAD + "\n".join(lines) + "\n"


_DOUBLE = """
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2
"""

_TOTAL = """
    def total(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]{comment}
"""

_ON_ROWS = """
spec = pl.BlockSpec((8, 128), {index})
return pl.pallas_call({kernel}, grid=8, in_specs=[spec], out_specs=spec, out_shape=x)(x){comment}
"""


# --- accesses -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Access:
    """A load or store of a Ref of the kernel: its kind is "read", "write" or "accum"."""

    equation: KernelEquation
    ref: Var
    kind: str

    @property
    def writes(self) -> bool:
        return self.kind != "read"

    @property
    def writes_all(self) -> bool:
        """True if it writes the whole Ref, and not a part that may depend on the step."""
        return self.writes and len(self.equation.eqn.invars) == 2  # the Ref and the value

    def steps(self, count: int) -> np.ndarray:
        """Return in which steps it may run."""
        mask = self.equation.runs.mask
        return np.ones(count, bool) if mask is None else mask


def _accesses(kernel: LintedKernel) -> list[_Access]:
    """Return the accesses of a kernel's own Refs, in order."""
    from jaxprtool.analysis.grids import accesses

    found = []
    for equation in kernel.equations:
        eqn = equation.eqn
        if regions(eqn) is None and not any(run_jaxprs(eqn)):
            pairs = ((equation.refs.get(ref), kind) for ref, kind in accesses(eqn))
            found += [_Access(equation, ref, kind) for ref, kind in pairs if ref is not None]
    return found


def _path(kernel: LintedKernel, equation: KernelEquation) -> tuple[JaxprEqn, ...]:
    return (*kernel.node.path, *equation.path, equation.eqn)


def _own_outputs(kernel: LintedKernel) -> Iterator[KernelBlock]:
    """Yield the outputs that are read, and not aliased to an input, which may hold their values."""
    call = kernel.grid.kernel
    for position, (block, value) in enumerate(zip(call.outputs, kernel.node.outs, strict=True)):
        if position not in call.aliases and (value.is_result or value.live_readers):
            yield block


def _copied(kernel: LintedKernel, blocks: Iterable[KernelBlock]) -> Iterator[BlockSteps]:
    """Yield the blocks that are copied, and whose index is known in all steps."""
    for block in blocks:
        steps = kernel.grid.block(block)
        if steps.is_copied and steps.is_known:
            yield steps


def _step(kernel: LintedKernel, step: int) -> str:
    """Return the indices of a step: `step (i=3, j=0)`."""
    axes = enumerate(kernel.grid.kernel.grid)
    indices = ", ".join(f"{axis.name}={kernel.grid.axis(i)[step]}" for i, axis in axes)
    return f"step ({indices})"


def _block_index(steps: BlockSteps, step: int) -> str:
    indices = (index[step] for index in steps.indices if index is not None)
    return f"({', '.join(map(str, indices))})"


# --- blocks ---------------------------------------------------------------------------------------


@lint_rule(
    "JT901",
    "block-out-of-bounds",
    bad=_example(
        _DOUBLE,
        '"f32[64,128]"',
        _ON_ROWS.format(kernel="double", index="lambda i: (i + 1, 0)", comment="  # JT901"),
    ),
    good=_example(
        _DOUBLE,
        '"f32[64,128]"',
        _ON_ROWS.format(kernel="double", index="lambda i: (i, 0)", comment=""),
    ),
    kind="wrong",
)
def _out_of_bounds(program: LintedProgram) -> Iterator[Found]:
    """A block of a kernel that is outside of the array in some step of the grid.

    A TPU reads or overwrites other memory there. Interpret mode takes the last block instead.
    """
    for kernel in program.kernels:
        for steps in _copied(kernel, kernel.grid.kernel.blocks):
            bad = _first_outside(steps)
            if bad is None:
                continue
            step, axis = bad
            start, size = steps.starts[axis], steps.block.array.shape[axis]
            assert start is not None
            yield Found(
                kernel.node,
                f"the block {_block_index(steps, step)} of {steps.block.name} in "
                f"{_step(kernel, step)} starts at {start[step]} of {size} along axis {axis}",
                "correct the index map, which counts blocks, or the grid: pl.cdiv(size, block)",
                "reads or writes of other memory",
            )


def _first_outside(steps: BlockSteps) -> tuple[int, int] | None:
    """Return the first step whose block is outside of the array, and an axis along which it is."""
    for axis, (start, dim, size) in enumerate(
        zip(steps.starts, steps.block.dims, steps.block.array.shape, strict=True)
    ):
        if start is None or not isinstance(size, int) or not size:
            continue
        low, high = dim.padding
        outside = (start >= size + high) | (start + dim.size <= -low)
        if dim.kind in ("Blocked", "Squeezed"):
            outside |= start < 0
        if outside.any():
            return int(outside.argmax()), axis
    return None


@lint_rule(
    "JT902",
    "output-revisited",
    bad=_example(
        _TOTAL.format(comment=""),
        '"f32[64,128]"',
        """
return pl.pallas_call(
    total,  # JT902
    grid=(4, 2),
    in_specs=[pl.BlockSpec((8, 128), lambda i, j: (2 * i + j, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i, j: (j, 0)),
    out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
)(x)
""".replace(
            "return pl.pallas_call(\n    total,  # JT902",
            "return pl.pallas_call(  # JT902\n    total,",
        ),
    ),
    good=_example(
        _TOTAL.format(comment="").replace("program_id(0)", "program_id(1)"),
        '"f32[64,128]"',
        """
return pl.pallas_call(
    total,
    grid=(2, 4),
    in_specs=[pl.BlockSpec((8, 128), lambda j, i: (2 * i + j, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda j, i: (j, 0)),
    out_shape=jax.ShapeDtypeStruct((16, 128), x.dtype),
)(x)
""",
    ),
    kind="wrong",
)
def _revisited(program: LintedProgram) -> Iterator[Found]:
    """An output block that a TPU kernel leaves, and writes again in a later step.

    A block is copied out when the index changes, and is not read back when it changes again. What
    was accumulated in it is lost.
    """
    for kernel in program.kernels:
        if not kernel.grid.in_order:
            continue
        for steps in _copied(kernel, _own_outputs(kernel)):
            assert steps.changes is not None
            visits = np.flatnonzero(steps.changes)
            _, first = np.unique(steps.numbers[visits], return_index=True)
            again = np.setdiff1d(visits, visits[first])
            if len(again):
                step = int(again[0])
                yield Found(
                    kernel.node,
                    f"the block {_block_index(steps, step)} of {steps.block.name} is left, and "
                    f"written again in {_step(kernel, step)}",
                    "make the axes that accumulate into a block the last ones of the grid",
                    "values that are lost on a TPU, without a message",
                )


@lint_rule(
    "JT903",
    "output-not-written",
    bad=_example(
        """
    def first(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = x_ref[...] * 2
""",
        '"f32[64,128]"',
        _ON_ROWS.format(kernel="first", index="lambda i: (i, 0)", comment="  # JT903"),
    ),
    good=_example(
        _DOUBLE,
        '"f32[64,128]"',
        _ON_ROWS.format(kernel="double", index="lambda i: (i, 0)", comment=""),
    ),
    kind="wrong",
)
def _unwritten(program: LintedProgram) -> Iterator[Found]:
    """An output of a kernel that no step writes, or of which some blocks are not written.

    Their values are what the memory had before.
    """
    advice = "write each block of the result in some step, or alias the result to an operand"
    for kernel in program.kernels:
        accesses = _accesses(kernel)
        for block in _own_outputs(kernel):
            writes = [access for access in accesses if access.ref is block.ref and access.writes]
            if message := _what_is_unwritten(kernel, block, writes):
                cost = "values that nothing computes"
                yield Found(kernel.node, f"{block.name} {message}", advice, cost)


def _what_is_unwritten(
    kernel: LintedKernel, block: KernelBlock, writes: list[_Access]
) -> str | None:
    if not writes:
        return None if _may_be_written(kernel, block) else "is never written"
    steps = next(_copied(kernel, [block]), None)
    if steps is None:
        return None
    written = np.zeros(len(steps.numbers), bool)
    for access in writes:
        written |= access.steps(len(written))
    missing = np.setdiff1d(steps.numbers, steps.numbers[written])
    if len(missing):
        step = int((steps.numbers == missing[0]).argmax())
        return f"has a block that no step writes: {_block_index(steps, step)}"
    whole = size_of(block.array, 0)
    is_plain = all(dim.kind in ("Blocked", "Squeezed") for dim in block.dims)
    if is_plain and steps.touched_bytes < whole and _first_outside(steps) is None:
        left = in_bytes(whole - steps.touched_bytes)
        return f"is not written by its blocks: {left} of {in_bytes(whole)} are in none"
    return None


def _may_be_written(kernel: LintedKernel, block: KernelBlock) -> bool:
    """Return True if an equation that states no effect takes the Ref."""
    return any(
        equation.refs.get(var) is block.ref and not equation.eqn.effects
        for equation in kernel.equations
        for var in all_variables(equation.eqn.invars)
    )


@lint_rule(
    "JT904",
    "read-before-written",
    bad=_example(
        """
    def total(x_ref, o_ref):
        o_ref[...] += x_ref[...]  # JT904
""",
        '"f32[64,128]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
)(x)
""",
    ),
    good=_example(
        _TOTAL.format(comment=""),
        '"f32[64,128]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
)(x)
""",
    ),
    kind="wrong",
)
def _read_first(program: LintedProgram) -> Iterator[Found]:
    """An output or scratch of a kernel that is read before a step has written it.

    It has what the memory had before. Such is an accumulator that no step sets to zero.
    """
    for kernel in program.kernels:
        accesses = _accesses(kernel)
        for name, ref, starts in _fresh(kernel):
            access = _first_read(kernel, [a for a in accesses if a.ref is ref], starts)
            if access is not None:
                yield Found(
                    _path(kernel, access.equation),
                    f"{name} is read before it is written",
                    f"set it first: @pl.when(pl.program_id(axis) == 0), {name}[...] = zeros",
                    "values that nothing computes",
                )


def _fresh(kernel: LintedKernel) -> Iterator[tuple[str, Var, np.ndarray]]:
    """Yield the outputs and scratch, with the steps in which nothing has been written to them."""
    if kernel.grid.count is None or not kernel.grid.in_order:
        return
    for steps in _copied(kernel, _own_outputs(kernel)):
        yield steps.block.name, steps.block.ref, np.unique(steps.numbers, return_index=True)[1]
    for scratch in kernel.grid.kernel.scratch:
        if scratch.memory_space in ("vmem", "smem"):
            yield scratch.name, scratch.ref, np.zeros(1, int)


def _first_read(
    kernel: LintedKernel, accesses: list[_Access], starts: np.ndarray
) -> _Access | None:
    """Return the first access in one of these steps, if it is a read."""
    left, eqns = starts, [equation.eqn for equation in kernel.equations]
    for access in accesses:
        runs = access.equation.runs
        here = left if runs.mask is None else left[runs.mask[left]]
        if not len(here):
            continue
        if access.kind == "write":
            left = np.setdiff1d(left, here)  # also if a branch may not be taken
        elif runs.is_certain and not _is_chosen(access.equation.eqn.outvars, eqns):
            return access
    return None


def _is_chosen(variables: Sequence[Var], eqns: Sequence[JaxprEqn]) -> bool:
    """Return True if values are read only to choose between them and others, as by jnp.where."""
    readers = [eqn for eqn in eqns if any(v in variables for v in all_variables(eqn.invars))]
    for eqn in readers:
        if eqn.primitive.name == "select_n":
            continue
        body = called_body(eqn)
        if body is None:
            return False
        pairs = zip(jaxcompat.open_jaxpr(body).invars, eqn.invars, strict=True)
        inside = [var for var, atom in pairs if isinstance(atom, Var) and atom in variables]
        if not _is_chosen(inside, jaxcompat.open_jaxpr(body).eqns):
            return False
    return bool(readers)


@lint_rule(
    "JT905",
    "parallel-write",
    bad=_example(
        _TOTAL.format(comment=""),
        '"f32[64,128]"',
        """
from jax.experimental.pallas import tpu as pltpu

params = pltpu.CompilerParams(dimension_semantics=("parallel",))
return pl.pallas_call(  # JT905
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
    compiler_params=params,
)(x)
""",
    ),
    good=_example(
        _TOTAL.format(comment=""),
        '"f32[64,128]"',
        """
from jax.experimental.pallas import tpu as pltpu

params = pltpu.CompilerParams(dimension_semantics=("arbitrary",))
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
    compiler_params=params,
)(x)
""",
    ),
    kind="wrong",
)
def _raced(program: LintedProgram) -> Iterator[Found]:
    """An output block that several steps along a parallel axis of the grid write.

    They may run at the same time, on two cores of a TPU, or on a GPU, where all axes are parallel.
    """
    for kernel in program.kernels:
        accesses = _accesses(kernel)
        for steps in _copied(kernel, _own_outputs(kernel)):
            written = np.zeros(len(steps.numbers), bool)
            for access in accesses:
                if access.ref is steps.block.ref and access.writes_all:
                    written |= access.steps(len(written))
            axis = _raced_axis(kernel, steps.numbers, written)
            if axis is not None:
                name = kernel.grid.kernel.grid[axis].name
                yield Found(
                    kernel.node,
                    f"several steps along the parallel axis {name} write the same block of "
                    f"{steps.block.name}",
                    f'make the axis "arbitrary", or let the index map depend on {name}',
                    "results that depend on the order of the steps",
                )


def _raced_axis(kernel: LintedKernel, numbers: np.ndarray, written: np.ndarray) -> int | None:
    """Return the first parallel axis along which several steps write the same block."""
    for i, axis in enumerate(kernel.grid.kernel.grid):
        if axis.semantics != "parallel" and kernel.grid.in_order:
            continue
        pairs = np.stack([numbers[written], kernel.grid.axis(i)[written]])
        if len(np.unique(pairs, axis=1)[0]) > len(np.unique(pairs[0])):
            return i
    return None


# --- values ---------------------------------------------------------------------------------------


@lint_rule(
    "JT906",
    "padding-reduced",
    bad=_example(
        """
    def total(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(1, keepdims=True)  # JT906
""",
        '"f32[64,200]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 256), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 1), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((64, 1), x.dtype),
)(x)
""",
    ),
    good=_example(
        """
    def total(x_ref, o_ref):
        column = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
        o_ref[...] = jnp.where(column < 200, x_ref[...], 0).sum(1, keepdims=True)
""",
        '"f32[64,200]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 256), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 1), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((64, 1), x.dtype),
)(x)
""",
    ),
    kind="wrong",
)
def _reduced_padding(program: LintedProgram) -> Iterator[Found]:
    """A reduction over an axis along which the last block of a kernel exceeds the array.

    The rest of the block is not zero, but what the memory had before. The same holds for an axis
    that a product contracts.
    """
    for kernel in program.kernels:
        ragged = {
            block.ref: axes
            for block in kernel.grid.kernel.inputs
            if (axes := frozenset(_ragged_axes(kernel.grid.block(block))))
        }
        if not ragged:
            continue
        flow = _Padding(kernel, ragged)
        for path, ref, axis in flow.reduced:
            yield Found(
                (*kernel.node.path, *path),
                f"{flow.names[ref]} is reduced along axis {axis}, where its last block exceeds the "
                "array",
                "mask it: jnp.where(position < size, x, 0), with pl.program_id and an iota",
                "values from outside of the array in the result",
            )


def _ragged_axes(steps: BlockSteps) -> Iterator[int]:
    """Yield the axes of a Ref along which the last block exceeds the array."""
    axis = 0
    for dim, size, start in zip(
        steps.block.dims, steps.block.array.shape, steps.starts, strict=True
    ):
        if dim.kind == "Squeezed":
            continue
        is_ragged = dim.kind == "Blocked" and isinstance(size, int) and size % dim.size
        if is_ragged and (start is None or (start + dim.size > size).any()):
            yield axis
        axis += 1


@dataclass
class _Padding:
    """Follows padding through the body of a kernel, by the axes of values that have it.

    Attributes:
        kernel: The kernel.
        ragged: The axes of Refs that have padding.
        reduced: The paths of the reductions of padding, with the Ref and its axis.
    """

    kernel: LintedKernel
    ragged: dict[Var, frozenset[int]]
    reduced: list[tuple[tuple[JaxprEqn, ...], Var, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        call = self.kernel.grid.kernel
        self.names = {block.ref: block.name for block in call.inputs}
        self._blocks = {block.ref: block for block in call.blocks}
        body = jaxcompat.open_jaxpr(call.body)
        self._walk(body, {}, {var: var for var in body.invars}, ())

    def _walk(
        self,
        jaxpr: Jaxpr,
        padded: dict[Var, dict[int, Var]],
        refs: dict[Var, Var],
        path: tuple[JaxprEqn, ...],
    ) -> None:
        for eqn in jaxpr.eqns:
            control = regions(eqn)
            if control is not None:
                for body, region in zip(control.jaxprs, control.regions, strict=True):
                    pairs = [
                        (var, eqn.invars[i])
                        for var, i in zip(body.invars, region.ins, strict=True)
                        if isinstance(eqn.invars[i], Var)
                    ]
                    inside = {var: padded[atom] for var, atom in pairs if atom in padded}
                    inner = {var: refs[atom] for var, atom in pairs if atom in refs}
                    self._walk(body, inside, inner, (*path, eqn))
                    if control.kind == "call":
                        for out, atom in zip(eqn.outvars, body.outvars, strict=True):
                            if isinstance(atom, Var) and atom in inside:
                                padded[out] = inside[atom]
                continue
            self._equation(eqn, padded, refs, (*path, eqn))

    def _equation(
        self,
        eqn: JaxprEqn,
        padded: dict[Var, dict[int, Var]],
        refs: dict[Var, Var],
        path: tuple[JaxprEqn, ...],
    ) -> None:
        if (ref := _loaded(eqn, refs)) is not None:
            if axes := self.ragged.get(ref):
                padded[eqn.outvars[0]] = dict.fromkeys(axes, ref)
            return
        operands = [_of(atom, padded) for atom in eqn.invars]
        if not any(operands) or len(eqn.outvars) != 1:
            return
        for axis in _reduced_axes(eqn, operands):
            self.reduced.append((path, *axis))
        if kept := _kept_axes(eqn, operands):
            padded[eqn.outvars[0]] = kept


def _loaded(eqn: JaxprEqn, refs: Mapping[Var, Var]) -> Var | None:
    """Return the Ref that an equation loads as a whole, or None."""
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1 or not isinstance(eqn.invars[0], Var):
        return None
    return refs.get(eqn.invars[0])


def _of(atom: Atom, padded: dict[Var, dict[int, Var]]) -> dict[int, Var]:
    return padded.get(atom, {}) if isinstance(atom, Var) else {}


def _reduced_axes(eqn: JaxprEqn, operands: list[dict[int, Var]]) -> Iterator[tuple[Var, int]]:
    """Yield the Ref and the axis of each padded axis that an equation sums over."""
    params = eqn.params
    over: Iterable[Any] = ()
    if traits(eqn).reduces and "axes" in params:
        over = [params["axes"]]
    elif "dimension_numbers" in params and traits(eqn).bilinear:
        over = params["dimension_numbers"][0]
    for axes, operand in zip(over, operands, strict=False):
        for axis in axes:
            if axis in operand:
                yield operand[axis], axis


def _kept_axes(eqn: JaxprEqn, operands: list[dict[int, Var]]) -> dict[int, Var]:
    """Return the padded axes of a result. A choice between values is taken for a mask."""
    like, params = traits(eqn), eqn.params
    if eqn.primitive.name == "select_n":
        return {}
    if "permutation" in params:
        return {params["permutation"].index(axis): ref for axis, ref in operands[0].items()}
    if "broadcast_dimensions" in params:
        to = params["broadcast_dimensions"]
        return {to[axis]: ref for axis, ref in operands[0].items()}
    if like.elementwise or like.gives in ("same", "cast"):
        merged: dict[int, Var] = {}
        for operand in operands:
            merged |= operand
        return merged
    return {}


@lint_rule(
    "JT907",
    "narrow-accumulator",
    bad=_example(
        _TOTAL.format(comment="  # JT907"),
        '"bf16[64,128]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
)(x)
""",
    ),
    good=_example(
        _TOTAL.format(comment=""),
        '"bf16[64,128]"',
        """
return pl.pallas_call(
    total,
    grid=8,
    in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
)(x)
""",
    ),
    kind="wrong",
)
def _narrow(program: LintedProgram) -> Iterator[Found]:
    """An accumulator of bf16 or f16 in a kernel, which rounds the sum in each step.

    Small terms are lost. Accumulate in f32 scratch, and cast it in the last step.
    """
    for kernel in program.kernels:
        for equation, name, dtype in _sums_into_refs(kernel):
            yield Found(
                _path(kernel, equation),
                f"{name} accumulates in {dtype}",
                "accumulate in scratch of f32, and cast it once: pltpu.VMEM(shape, jnp.float32)",
                f"a rounding to {dtype} in each step",
            )


def _sums_into_refs(kernel: LintedKernel) -> Iterator[tuple[KernelEquation, str, str]]:
    """Yield the additions to a Ref of 16 bits that several steps share, its name and dtype."""
    call = kernel.grid.kernel
    kept = (steps.block for steps in _copied(kernel, call.outputs) if _stays(steps))
    parts: list[KernelBlock | KernelScratch] = [*kept, *call.scratch]
    names = {part.ref: part.name for part in parts if _is_narrow(part.array)}
    #: The Ref that a value is loaded from, and the equation that adds to it.
    origins: dict[Var, tuple[Var, KernelEquation | None]] = {}
    for equation in kernel.equations if names else ():
        eqn, refs = equation.eqn, equation.refs
        operands = all_variables(eqn.invars)
        if (ref := _loaded(eqn, refs)) in names:
            assert ref is not None
            origins[eqn.outvars[0]] = ref, None
        elif traits(eqn).gives == "cast" and operands and operands[0] in origins:
            origins[eqn.outvars[0]] = origins[operands[0]]
        elif traits(eqn).commutative and eqn.primitive.name.startswith("add"):
            for var in operands:
                if var in origins:
                    origins[eqn.outvars[0]] = origins[var][0], equation
        elif len(operands) == 2 and operands[0] in refs and operands[1] in origins:
            ref, addition = origins[operands[1]]
            if addition is not None and refs[operands[0]] is ref:
                yield addition, names[ref], str(ref.aval.dtype)


def _is_narrow(array: Any) -> bool:
    return getattr(array.dtype, "name", "") in ("bfloat16", "float16")


def _stays(steps: BlockSteps) -> bool:
    """Return True if a block is that of several steps in a row."""
    return steps.changes is not None and not steps.changes.all()


@lint_rule(
    "JT908",
    "whole-array-blocks",
    bad=_example(
        _DOUBLE,
        '"f32[1024,512]"',
        """
return pl.pallas_call(double, out_shape=x)(x)  # JT908
""",
    ),
    good=_example(
        _DOUBLE,
        '"f32[1024,512]"',
        """
spec = pl.BlockSpec((128, 512), lambda i: (i, 0))
return pl.pallas_call(double, grid=8, in_specs=[spec], out_specs=spec, out_shape=x)(x)
""",
    ),
)
def _whole(program: LintedProgram) -> Iterator[Found]:
    """A kernel whose blocks are the whole arrays, of 1 MiB or more.

    All copies are before the first step or after the last, so that no copy overlaps with
    computation, and they all take vector memory at once.
    """
    for kernel in program.kernels:
        if not kernel.grid.in_order:
            continue
        blocks = [kernel.grid.block(block) for block in kernel.grid.kernel.blocks]
        copied = [steps for steps in blocks if steps.is_copied]
        size = sum(size_of(steps.block.array, 0) for steps in copied)
        if size >= LEAST_WHOLE and all(steps.block.is_whole for steps in copied):
            yield Found(
                kernel.node,
                f"all blocks of the kernel are whole arrays, {plural(len(copied), 'block')}",
                "give it a grid, and BlockSpecs with blocks of some rows",
                "copies of {bytes} that overlap with nothing",
                bytes=size,
            )
