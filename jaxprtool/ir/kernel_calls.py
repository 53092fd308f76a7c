"""One view of a Pallas kernel, `pallas_call`: its grid, its blocks, and its body on Refs.

A `pallas_call` runs its body once for each step of its grid. The body has no results: it reads and
writes Refs of blocks of the operands and results, and scratch. The view is the same in every JAX
release, for the compilers of TPUs (Mosaic) and GPUs (Mosaic GPU and Triton), and for a kernel that
a file only describes.

    kernel = kernel_call(eqn)
    [axis.size for axis in kernel.grid]              # [8, 4]
    kernel.inputs[0].sizes                           # (128, 512), of an operand f32[1024,512]
    kernel.inputs[0].axes                            # ({0}, set()): rows follow the first axis
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import fields_of, type_of, without_defaults
from jaxprtool.jaxcompat import AbstractRef, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.kernels import PALLAS

#: The names of the axes of a grid that has none.
_AXES = "ijklmnop"


@dataclass(frozen=True)
class GridAxis:
    """An axis of the grid.

    Attributes:
        name: Its name, or a letter if it has none.
        size: The number of steps: an integer or a symbolic dimension; None if it is an operand.
        operand: The operand with the size, if it is known at run time only.
        semantics: `parallel`, `arbitrary`, or another name that the compiler's parameters give.
        is_named: Whether the kernel's author named it, so that the body may refer to the name.
        is_batch: Whether `vmap` has added it.
    """

    name: str
    size: Any
    operand: Atom | None
    semantics: str | None
    is_named: bool
    is_batch: bool


@dataclass(frozen=True)
class BlockDimension:
    """A dimension of a block.

    Attributes:
        size: The number of elements; 1 if it is squeezed.
        kind: How the index map addresses it, by the name of Pallas's class: `Blocked` (an index
            counts blocks), `Element` (an index is the first element), `Squeezed` (one element, for
            which the Ref has no dimension), `BoundedSlice` (a slice of at most `size` elements) or
            `Indirect` (an array of indices).
        padding: The elements that are added before and after the array, for `Element`.
    """

    size: Any
    kind: str
    padding: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class KernelBlock:
    """The block of an operand or of a result that a step of the grid reads or writes.

    Attributes:
        name: The kernel's own name of the Ref, or `args[0]` and `outputs[0]`.
        value: The operand or result of the equation.
        ref: The argument of the body.
        array: The type of the whole array.
        dims: A dimension for each of the array.
        index_map: Maps the indices of the grid's axes, and the Refs of the prefetched scalars, to
            where the block is. It has no constants.
        axes: For each dimension, the positions of the axes of the grid that its index depends on.
        scalars: For each dimension, the positions of the prefetched scalars that its index reads.
        memory_space: Where the Ref is: `default`, `any`, `vmem`, `smem`, `gmem`, ...
        options: What the kernel's author adds: the pipeline mode, and the transforms of a GPU's
            shared memory, such as tiling and swizzling.
    """

    name: str
    value: Atom
    ref: Var
    array: Any
    dims: tuple[BlockDimension, ...]
    index_map: Jaxpr
    axes: tuple[frozenset[int], ...]
    scalars: tuple[frozenset[int], ...]
    memory_space: str
    options: tuple[Any, ...]

    @property
    def buffers(self) -> Any:
        """The number of buffers, or None if the compiler chooses it."""
        counts = (getattr(option, "buffer_count", None) for option in self.options)
        return next((count for count in counts if count is not None), None)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The size of each dimension in elements."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def is_whole(self) -> bool:
        """True if each step has the whole array."""
        zeros = (isinstance(a, Literal) and a.val == 0 for a in self.index_map.outvars)
        return self.sizes == tuple(self.array.shape) and all(zeros)


@dataclass(frozen=True, eq=False)
class KernelScratch:
    """Memory that all steps of the grid share: an accumulator, a buffer or semaphores.

    Attributes:
        name: The kernel's own name of the Ref, or `scratch[0]`.
        ref: The argument of the body.
        array: The type of its content; a semaphore has a dtype of its own.
        memory_space: Where it is: `vmem`, `smem`, `semaphore_mem`, `gmem`, `tmem`, ...
    """

    name: str
    ref: Var
    array: Any
    memory_space: str


@dataclass(frozen=True, eq=False)
class PrefetchedScalar:
    """An operand that is in scalar memory before the kernel starts, and that index maps may read.

    Attributes:
        name: The kernel's own name of the Ref.
        value: The operand of the equation.
        ref: The argument of the body.
    """

    name: str
    value: Atom
    ref: Var


class KernelEdge(NamedTuple):
    """What an argument of a kernel's body begins with, and what it becomes.

    Attributes:
        operand: The position of the operand; None if the memory has no value yet.
        result: The position of the result, or None.
    """

    operand: int | None
    result: int | None


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A `pallas_call`: the body runs once for each step of the grid, the last axis fastest.

    Attributes:
        eqn: The equation.
        name: The name of the kernel.
        grid: The axes of the grid; none if the body runs once.
        captured: The Refs that the kernel closes over: pairs of an operand and the body's variable.
        prefetched: The prefetched scalars.
        inputs: The blocks of the other operands.
        outputs: The blocks of the results.
        scratch: The scratch memory.
        body: The kernel on Refs: those of the prefetched scalars, of the inputs, of the outputs and
            of the scratch, in this order. Captured Refs are its constants; in an equation that a
            file only describes, they are its first arguments.
        aliases: The position of the operand whose memory a result has, by that of the result.
        backend: The compiler that the parameters or memory spaces are for: `tpu`, `mosaic_gpu` or
            `triton`; None if they do not say.
        compiler_params: The compiler's parameters, as an object with fields, or None.
        cost_estimate: The author's estimate: `flops`, `transcendentals`, `bytes_accessed`; or None.
        interpret: Whether the kernel runs as a JAX function, in interpret mode.
    """

    eqn: JaxprEqn
    name: str
    grid: tuple[GridAxis, ...]
    captured: tuple[tuple[Atom, Var], ...]
    prefetched: tuple[PrefetchedScalar, ...]
    inputs: tuple[KernelBlock, ...]
    outputs: tuple[KernelBlock, ...]
    scratch: tuple[KernelScratch, ...]
    body: ClosedJaxpr
    aliases: dict[int, int]
    backend: str | None
    compiler_params: Any
    cost_estimate: Any
    interpret: bool

    @property
    def blocks(self) -> tuple[KernelBlock, ...]:
        """The blocks of the operands, and those of the results."""
        return (*self.inputs, *self.outputs)

    @property
    def steps(self) -> Any:
        """The number of steps of the grid; None if a size is known at run time only."""
        steps: Any = 1
        for axis in self.grid:
            if axis.size is None:
                return None
            steps *= axis.size
        return steps

    @property
    def vmem_limit_bytes(self) -> int | None:
        """The limit of vector memory that the kernel's author sets, for a TPU."""
        return getattr(self.compiler_params, "vmem_limit_bytes", None)

    @cached_property
    def edges(self) -> tuple[KernelEdge, ...]:
        """For each argument of the body, the operand that it begins with, and its result."""
        start = len(self.eqn.invars) - len(self.prefetched) - len(self.inputs)
        ins = range(start, len(self.eqn.invars))
        operands = (*((i, None) for i in ins), *((self.aliases.get(i), i) for i in self._results))
        captured = len(self.body.invars) - len(operands) - len(self.scratch)
        first = ((i, None) for i in range(captured))
        pairs = (*first, *operands, *((None, None) for _ in self.scratch))
        return tuple(map(KernelEdge._make, pairs))

    @property
    def _results(self) -> range:
        return range(len(self.outputs))

    @cached_property
    def controls(self) -> tuple[int, ...]:
        """The operands that set the number of steps, or where blocks are."""
        sizes = [axis.operand for axis in self.grid if axis.operand is not None]
        read = {i for block in self.blocks for scalars in block.scalars for i in scalars}
        values = [*sizes, *(self.prefetched[i].value for i in read)]
        return tuple(i for i, v in enumerate(self.eqn.invars) if any(v is x for x in values))

    @property
    def selects_blocks(self) -> bool:
        """Whether `rebuild` can leave blocks out: no option depends on their positions."""
        params = self.eqn.params
        fusion = getattr(self.compiler_params, "allow_input_fusion", None)
        effects = getattr(self.compiler_params, "has_side_effects", False)
        is_pure = str(getattr(effects, "value", effects)) in ("False", "pure")
        special = params.get("mesh") or params.get("kernel_arg_transforms") or fusion
        return is_pure and not (special or self.captured)

    def rebuild(
        self, body: ClosedJaxpr, inputs: Sequence[bool], outputs: Sequence[bool]
    ) -> JaxprEqn:
        """Return the kernel with another body, and with a selection of its inputs and outputs.

        Args:
            body: Takes the Refs of those that are kept.
            inputs: Which inputs are kept. One that has the memory of a result must be.
            outputs: Which outputs are kept.
        """
        eqn, params = self.eqn, self.eqn.params
        kept = [*inputs, *outputs]
        mapping = replace(
            params["grid_mapping"],
            block_mappings=tuple(compress(params["grid_mapping"].block_mappings, kept)),
            num_inputs=sum(inputs),
            num_outputs=sum(outputs),
        )
        scalars = len(self.prefetched)
        aliases = [
            (scalars + sum(inputs[: i - scalars]) if i >= scalars else i, sum(outputs[:out]))
            for i, out in params["input_output_aliases"]
            if outputs[out]
        ]
        first = len(eqn.invars) - len(inputs)
        return eqn.replace(
            invars=[*eqn.invars[:first], *compress(eqn.invars[first:], inputs)],
            outvars=[*compress(eqn.outvars, outputs)],
            params={
                **params,
                "jaxpr": self._as_held(body),
                "grid_mapping": mapping,
                "out_avals": tuple(compress(params["out_avals"], outputs)),
                "input_output_aliases": tuple(aliases),
            },
        )

    def _as_held(self, body: ClosedJaxpr) -> Any:
        is_closed = isinstance(self.eqn.params["jaxpr"], ClosedJaxpr)
        return body if is_closed else jaxcompat.open_jaxpr(body)

    @property
    def index_names(self) -> list[str]:
        """The names of the arguments of each index map."""
        return [axis.name for axis in self.grid] + [scalar.name for scalar in self.prefetched]


def kernel_call(eqn: JaxprEqn) -> KernelCall | None:
    """Return the view of a `pallas_call`; None for any other equation.

    Also returns None if the equation comes from a file that describes too little of it.
    """
    if eqn.primitive.name != "pallas_call":
        return None
    params = eqn.params
    mapping, body = params.get("grid_mapping"), params.get("jaxpr")
    if not hasattr(mapping, "block_mappings") or not isinstance(body, Jaxpr | ClosedJaxpr):
        return None
    return _Reader(eqn, mapping, jaxcompat.close_jaxpr(body)).call()


class _Reader:
    """Reads the parameters of a `pallas_call`.

    The operands are the captured Refs, the dynamic sizes of the grid, the prefetched scalars and
    the inputs. The arguments of the body are the prefetched scalars, the inputs, the outputs and
    the scratch.
    """

    def __init__(self, eqn: JaxprEqn, mapping: Any, body: ClosedJaxpr) -> None:
        self._eqn, self._mapping, self._body = eqn, mapping, body
        jaxpr = jaxcompat.open_jaxpr(body)
        blocks, scalars = mapping.block_mappings, mapping.num_index_operands
        first = len(jaxpr.invars) - scalars - len(blocks) - len(mapping.scratch_avals)
        self._captured = [*jaxpr.constvars, *jaxpr.invars[:first]]
        self._refs = jaxpr.invars[first:]
        names = (jaxpr.debug_info.arg_names or ())[first:]
        origins = [f"prefetched[{i}]" for i in range(scalars)]
        origins += [block.origin for block in blocks]
        origins += [f"scratch[{i}]" for i in range(len(self._refs) - len(origins))]
        own = [*names, *origins[len(names) :]]
        self._names = [name or origin for name, origin in zip(own, origins, strict=True)]
        self._dynamic = [i for i, size in enumerate(mapping.grid) if _is_dynamic(size)]
        self._first_operand = len(self._captured) + len(self._dynamic)

    def call(self) -> KernelCall:
        eqn, mapping, params = self._eqn, self._mapping, self._eqn.params
        start, scalars = self._first_operand, mapping.num_index_operands
        operands = eqn.invars[start:]
        refs, names = self._refs, self._names
        values = [*operands[scalars:], *eqn.outvars]
        end = scalars + len(values)
        blocks = [
            self._block(*row)
            for row in zip(
                names[scalars:end],
                values,
                refs[scalars:end],
                mapping.block_mappings,
                strict=True,
            )
        ]
        inputs = len(blocks) - len(eqn.outvars)
        compiler_params = params.get("compiler_params")
        return KernelCall(
            eqn=eqn,
            name=params.get("name") or self._body.debug_info.func_name,
            grid=tuple(self._axes(compiler_params)),
            captured=tuple(zip(eqn.invars[: len(self._captured)], self._captured, strict=True)),
            prefetched=tuple(
                map(PrefetchedScalar, names[:scalars], operands[:scalars], refs[:scalars])
            ),
            inputs=tuple(blocks[:inputs]),
            outputs=tuple(blocks[inputs:]),
            scratch=tuple(
                KernelScratch(name, ref, _content(ref.aval), _space(ref.aval))
                for name, ref in zip(names[end:], refs[end:], strict=True)
            ),
            body=self._body,
            aliases={out: start + i for i, out in params.get("input_output_aliases") or ()},
            backend=_backend(compiler_params, [ref.aval for ref in refs]),
            compiler_params=compiler_params,
            cost_estimate=params.get("cost_estimate"),
            interpret=bool(params.get("interpret")),
        )

    def _axes(self, compiler_params: Any) -> list[GridAxis]:
        mapping, first = self._mapping, len(self._captured)
        sizes = dict(zip(self._dynamic, self._eqn.invars[first:], strict=False))
        semantics = getattr(compiler_params, "dimension_semantics", None) or ()
        return [
            GridAxis(
                name=str(mapping.grid_names[i]) if mapping.grid_names else _AXES[i],
                size=None if i in sizes else size,
                operand=sizes.get(i),
                semantics=_word(semantics[i]) if i < len(semantics) else None,
                is_named=bool(mapping.grid_names),
                is_batch=i in mapping.vmapped_dims,
            )
            for i, size in enumerate(mapping.grid)
        ]

    def _block(self, name: str, value: Atom, ref: Var, block: Any) -> KernelBlock:
        index_map = jaxcompat.open_jaxpr(block.index_map_jaxpr)
        leaves = [child.num_leaves for child in block.index_map_out_tree.children()]
        sources, axes = _sources(index_map), len(self._mapping.grid)
        by_dimension = []
        for count in leaves:
            by_dimension.append(frozenset().union(*sources[:count]))
            del sources[:count]
        return KernelBlock(
            name=name,
            value=value,
            ref=ref,
            array=block.array_aval,
            dims=tuple(map(_dimension, block.block_shape)),
            index_map=index_map,
            axes=tuple(frozenset(i for i in inputs if i < axes) for inputs in by_dimension),
            scalars=tuple(
                frozenset(i - axes for i in inputs if i >= axes) for inputs in by_dimension
            ),
            memory_space=_space(block.transformed_block_aval),
            options=tuple(filter(None, (block.pipeline_mode, *block.transforms))),
        )


def _is_dynamic(size: Any) -> bool:
    return not isinstance(size, int) and not jaxcompat.is_symbolic_dimension(size)


def _dimension(dim: Any) -> BlockDimension:
    class_name, fields = fields_of(dim) or (type(dim).__name__, {})
    kind = class_name.rpartition(".")[2]
    return BlockDimension(fields.get("block_size", 1), kind, tuple(fields.get("padding", (0, 0))))


def _sources(jaxpr: Jaxpr) -> list[frozenset[int]]:
    """Return the positions of the arguments that each result depends on."""
    sources = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)}

    def of(atoms: Sequence[Atom]) -> list[frozenset[int]]:
        return [sources.get(a, frozenset()) if isinstance(a, Var) else frozenset() for a in atoms]

    for eqn in jaxpr.eqns:
        inputs = frozenset().union(*of(eqn.invars))
        sources.update((var, inputs) for var in eqn.outvars)
    return of(jaxpr.outvars)


def _content(aval: Any) -> Any:
    return aval.inner_aval if isinstance(aval, AbstractRef) else aval


def _space(aval: Any) -> str:
    space = getattr(aval, "memory_space", None)
    return "default" if space is None else str(space)


def _word(value: Any) -> str:
    """Return `parallel` for a text or a member of an enumeration, also from a file."""
    return str(getattr(value, "value", value)).rpartition(".")[2].lower()


#: The backend, by the part of a module's name between Pallas's own and the object's.
_BACKENDS = {"mosaic": "tpu", "mosaic_gpu": "mosaic_gpu", "triton": "triton"}


def _backend(compiler_params: Any, avals: Sequence[Any]) -> str | None:
    record = fields_of(compiler_params)
    spaces = (type(getattr(aval, "memory_space", None)) for aval in avals)
    paths = [record[0]] if record else [f"{cls.__module__}." for cls in spaces]
    parts = (path.removeprefix(PALLAS).partition(".")[0] for path in paths)
    return next((_BACKENDS[part] for part in parts if part in _BACKENDS), None)


# --- texts ----------------------------------------------------------------------------------------
# The grid of a kernel, and a row for each of its blocks:
#
#     grid=(i=2, j=4, k=2)
#     x=f32[128,128] in [64,64] at (i, k)
#     acc=f32[64,64] scratch in vmem

#: The operators of index maps, by primitive and the name of a function of `jax.numpy`.
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    ("jit", "floor_divide"): "//",
    ("jit", "remainder"): "%",
}

_OPERATOR = re.compile(r" [-+*/%<>=!]")


def kernel_rows(eqn: JaxprEqn) -> list[tuple[str, str]]:
    """Return the grid of a kernel, its blocks and its scratch, each with its name and text.

    Returns none for an equation that is no kernel.
    """
    kernel = kernel_call(eqn)
    if kernel is None:
        return []
    sizes = ["?" if axis.size is None else str(axis.size) for axis in kernel.grid]
    axes = [f"{axis.name}={size}" for axis, size in zip(kernel.grid, sizes, strict=True)]
    rows = [("grid", f"({', '.join(axes)})")]
    rows += [(block.name, block_text(block, kernel.index_names)) for block in kernel.blocks]
    for scratch in kernel.scratch:
        text = f"{type_of(scratch.array)} scratch in {scratch.memory_space}"
        rows.append((scratch.name, text))
    return rows


def block_text(block: KernelBlock, names: Sequence[str]) -> str:
    """Return `f32[128,128] in [64,64] at (i, k)`, and the memory space if not the default.

    Args:
        block: A block of a kernel.
        names: The names of the arguments of its index map.
    """
    where = "whole"
    if not block.is_whole:
        sizes = ",".join(map(_block_size, block.dims))
        where = f"in [{sizes}] at ({', '.join(index_texts(block.index_map, names))})"
    options = [str(without_defaults(option)) for option in block.options]
    notes = options if block.memory_space == "default" else [block.memory_space, *options]
    return ", ".join([f"{type_of(block.array)} {where}", *notes])


def _block_size(dim: BlockDimension) -> str:
    """Return the size of a dimension of a block, with its kind unless it counts blocks."""
    if dim.kind == "Squeezed":
        return "None"
    padding = f", padding={dim.padding}" if any(dim.padding) else ""
    return str(dim.size) if dim.kind == "Blocked" else f"{dim.kind}({dim.size}{padding})"


def index_texts(jaxpr: Jaxpr, names: Sequence[str]) -> list[str]:
    """Return the results of an index map as expressions of the axes of the grid."""
    texts: dict[Any, str] = dict(zip(jaxpr.invars, names, strict=False))

    def text(atom: Any) -> str:
        return str(np.asarray(atom.val)) if isinstance(atom, Literal) else texts.get(atom, "?")

    for eqn in jaxpr.eqns:
        primitive, operands = eqn.primitive.name, [text(atom) for atom in eqn.invars]
        name = eqn.params.get("name", primitive)
        operator = _INFIX.get(primitive if name == primitive else (primitive, name))
        if primitive == "convert_element_type":
            expression = operands[0]
        elif primitive == "get":
            expression = f"{operands[0]}[{', '.join(operands[1:])}]"
        elif operator is not None:
            sides = [f"({t})" if _OPERATOR.search(t) else t for t in operands]
            expression = f" {operator} ".join(sides)
        else:
            expression = f"{name}({', '.join(operands)})"
        texts.update((var, expression) for var in eqn.outvars)
    return [text(atom) for atom in jaxpr.outvars]
