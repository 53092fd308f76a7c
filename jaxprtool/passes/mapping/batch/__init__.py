"""batch: the jaxpr of vmap(f) from the jaxpr of f, without running user code.

    batched = trace(loss, w, x).apply("batch(in_axes=(None, 0), axis_size=32)")
    batched(w, xs)                      # jax.vmap(loss, in_axes=(None, 0))(w, xs)

`in_axes` and `out_axes` are those of `jax.vmap`: an int, None, or a prefix of the tree of arguments
or results. An axis of an argument is its position in the argument with the mapped axis. A program's
arguments have no mapped axis yet, so its size is required.

Every primitive that JAX can batch is batched: by a rule in `batch_rules`, or by JAX's own. A rule
is traced once for all equations that are alike (see `templates`); bodies of loops, branches and
calls are batched once for each pattern of mapped arguments (see `body`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, ClassVar

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import is_weak, type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import filled, unique
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.framework import Pass
from jaxprtool.passes.mapping.batch.axes import (
    Axis,
    BatchError,
    BatchTypeError,
    Dim,
    check_axes,
    check_unmapped,
    flat_in_axes,
    flat_out_axes,
    free_axes,
    program_axes,
    result_dims,
)
from jaxprtool.passes.mapping.batch.body import (
    BatchBodyBuilder,
    BatchDomain,
    BatchUnsupported,
    batch_body,
    batch_rules,
    jaxs_rule,
    structured_rules,
    summed,
)
from jaxprtool.passes.mapping.batch.chunks import chunked_body

__all__ = [
    "Axis",
    "Batch",
    "BatchBodyBuilder",
    "BatchDomain",
    "BatchError",
    "BatchTypeError",
    "BatchUnsupported",
    "batch_body",
    "batch_rules",
    "jaxs_rule",
    "structured_rules",
]


@dataclass(frozen=True)
class Batch(Pass):
    """Add a mapped axis: the jaxpr of vmap(f) from the jaxpr of f.

    The contract is that of `jax.vmap`, but the function is not run again. An axis of an argument is
    its position in the argument with the mapped axis. Equations that are alike are batched once.

    Args:
        in_axes: The mapped axis of each argument: an int, None, or a prefix of the tree of
            positional arguments.
        out_axes: The mapped axis of each result; None for results that are the same in all batch
            elements.
        axis_size: The number of batch elements. Required, since the program's arguments have no
            mapped axis yet.
        axis_name: The name of the axis, for collectives.
        spmd_axis_name: The mesh axis, or axes, over which the batch elements are sharded.
        chunk: The number of batch elements to map at a time, in a scan, to bound memory.
        sum_match: Sum a mapped result over the batch if its `out_axes` entry is None, instead of
            raising an error, as `vmap(sum_match=True)` of JAX does.

    Raises:
        UnsupportedError: If a primitive has no batching rule, in JAX or in `batch_rules`, or a
            result is mapped and its `out_axes` entry is None, without `sum_match`.

    Note:
        `jaxprtool vmap TARGET` does the same, and reports which arguments are mapped.

    Example:
        def f(x):
            return jnp.sin(x).sum()

        $ jaxprtool opt f.py:f --args "f32[3]" -p "batch(axis_size=8)"
        { lambda ; a:f32[8,3]. let
            b:f32[8,3] = sin a
            c:f32[8] = reduce_sum[axes=(1,) out_sharding=None] b
          in (c,) }
    """

    name: ClassVar[str] = "batch"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    in_axes: Any = 0
    out_axes: Any = 0
    axis_size: int | None = None
    axis_name: Hashable = None
    spmd_axis_name: str | tuple[str, ...] | None = None
    chunk: int | None = None
    sum_match: bool = False

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        if self.axis_name is None or self.axis_size is None:
            return ()
        return ((self.axis_name, self.axis_size),)

    def __call__(self, program: Program) -> Program:
        """Return the batched program.

        Raises:
            BatchError: If the axes do not fit the program, as `jax.vmap` does.
            BatchTypeError: If the axes have the wrong type, as `jax.vmap` does.
            BatchUnsupported: If an equation, which it names, cannot be batched.
        """
        check_axes(self.in_axes, self.out_axes)
        dims, size = program_axes(program, self.in_axes, self.axis_size)
        out_axes = flat_out_axes(program.out_tree, self.out_axes)
        ranks = [len(aval.shape) for aval in program.out_avals]
        outs = result_dims(out_axes, ranks, partial(list, program.out_names))
        spmd = self.spmd_axis_name
        axis = Axis(self.axis_name, size, (spmd,) if isinstance(spmd, str) else spmd)
        # The axis is bound here: an axis of the same name in the program is the mapped one.
        free = free_axes(program, self.axis_name, size)
        with jaxcompat.axes_bound(free):
            if self.chunk is None:
                jaxpr, out_dims = batch_body(program.jaxpr, dims, axis, outs, outermost=True)
            else:
                jaxpr, out_dims = chunked_body(program.jaxpr, dims, axis, outs, self.chunk)
        if self.sum_match:
            jaxpr, out_dims = summed(jaxpr, out_dims, outs)
        check_unmapped(out_axes, out_dims, program.out_tree, self.axis_name)
        return program.replace(jaxpr=jaxpr, axis_env=free)


# --- tile -----------------------------------------------------------------------------------------
# tile: map the program of one tile over all tiles of an axis.
#
#     def normalized(x):                  # f32[8,3] -> f32[8,3], over the rows of all tiles
#         total = jax.lax.psum(x.sum(axis=0), "tiles")
#         return x / total
#
#     program = trace(normalized, x, axis_env=[("tiles", 4)])
#     whole = program.apply("tile(tile_size=4, axis_name='tiles')")       # f32[32,3] -> f32[32,3]
#
# This is `vtile` as JAX had it in 2022, for programs. The program takes one tile; the tiled program
# takes all of them along one axis, one after the other, and concatenates their results in the same
# way. Without a `tile_size` it takes any number of tiles, a symbol in its types that the arguments
# determine, as None did in 2022. `in_axes` and `out_axes` are positions in the arguments and
# results of the program for one tile.


@dataclass(frozen=True)
class Tile(Pass):
    """Map the program of one tile over all tiles of a larger axis.

    This is `vtile` as JAX had it in 2022. The program takes one tile; the tiled program takes all
    tiles concatenated along one axis, and concatenates their results.

    Args:
        tile_size: The number of tiles. None: the size of the named axis that the program was traced
            with, or else a symbol, so that the arguments determine the number.
        axis_name: The name of the axis over the tiles, for collectives.
        in_axes: The axis along which each argument is cut, a prefix as for `batch`; None for
            arguments that all tiles share.
        out_axes: The axis along which the tiles of a result are concatenated; None if the result is
            the same for all tiles.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[4]" -p "tile(tile_size=4)"
        { lambda ; a:f32[16]. let
            b:f32[4,4] = reshape[dimensions=None new_sizes=(4, 4) sharding=None] a
            c:f32[4,4] = sin b
            d:f32[16] = reshape[dimensions=None new_sizes=(16,) sharding=None] c
          in (d,) }
    """

    name: ClassVar[str] = "tile"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    tile_size: int | None = None
    axis_name: Hashable = None
    in_axes: Any = 0
    out_axes: Any = 0

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        if self.axis_name is None or self.tile_size is None:
            return ()
        return ((self.axis_name, self.tile_size),)

    def __call__(self, program: Program) -> Program:
        """Return the tiled program: an argument of size m along its axis has size `tile_size * m`.

        Raises BatchError for axes that an argument or a result does not have, or that are None for
        results that differ, BatchTypeError for invalid axes, and BatchUnsupported for an equation
        that cannot be mapped, which the message names.
        """
        if type(self.tile_size) not in (int, NoneType):
            raise BatchTypeError(f"tile_size must be an integer, but got {self.tile_size!r}")
        if self.tile_size is not None and self.tile_size < 1:
            raise BatchError(f"tile_size must be at least 1, not {self.tile_size}")
        check_axes(self.in_axes, self.out_axes)
        in_axes = flat_in_axes(program.in_tree, self.in_axes)
        out_axes = flat_out_axes(program.out_tree, self.out_axes)
        dims = _dims("in_axes", in_axes, program.in_avals, program.arg_names)
        outs = _dims("out_axes", out_axes, program.out_avals, program.out_names)
        # Counted from 0, an axis of the tile is also the position where the axis of tiles goes.
        args, _ = filled(program.in_tree, dims)
        results = filled(program.out_tree, outs)
        tiles = self._tiles(program, dims)
        mapped = Batch(args, results, tiles, self.axis_name)(program)
        jaxpr = _between_reshapes(mapped.jaxpr, program, dims, outs, tiles)
        return mapped.replace(jaxpr=jaxpr)

    def _tiles(self, program: Program, dims: Sequence[Dim]) -> Any:
        """Return the number of tiles: a number, or a symbol that is new to the program."""
        traced = dict(program.axis_env).get(self.axis_name)
        if self.tile_size is not None or traced is not None:
            return traced if self.tile_size is None else self.tile_size
        if all(dim is None for dim in dims):
            raise BatchError(
                "tile_size must be specified, because no argument is tiled",
                "tile_size is the number of tiles",
            )
        *_, name = unique([*program.symbols, "tiles"])
        scope = next((size.scope for size in program.symbols.values()), None)
        return jax.export.symbolic_shape(name, scope=scope)[0]


def _dims(
    option: str, axes: Sequence[Any], avals: Sequence[Aval], names: Sequence[str]
) -> list[Dim]:
    """Return flat axes counted from 0. Raises BatchError for one that a value does not have."""
    dims: list[Dim] = []
    for axis, aval, name in zip(axes, avals, names, strict=True):
        rank = len(getattr(aval, "shape", ()))
        if axis is not None and not -rank <= axis < rank:
            what = "to split into tiles" if option == "in_axes" else "to join tiles along"
            raise BatchError(
                f"{name} is {type_of(aval)}, which has no axis {axis} {what}",
                f"use None in {option} for what all tiles share",
            )
        dims.append(None if axis is None else axis % rank)
    return dims


def _between_reshapes(
    body: ClosedJaxpr, program: Program, dims: Sequence[Dim], outs: Sequence[Dim], tiles: Any
) -> ClosedJaxpr:
    """Return a body mapped over tiles, [..., tiles, m, ...], for values [..., tiles * m, ...]."""

    def whole(atom: Atom, aval: Aval, dim: Dim) -> Atom:
        if dim is None:
            return atom
        shape = (*aval.shape[:dim], tiles * aval.shape[dim], *aval.shape[dim + 1 :])
        return Var(aval.update(shape=shape, weak_type=is_weak(atom.aval)))

    invars = [whole(*triple) for triple in zip(body.invars, program.in_avals, dims, strict=True)]
    results = [whole(*triple) for triple in zip(body.outvars, program.out_avals, outs, strict=True)]
    cut = [_laid_out(x, v) for x, v in zip(invars, body.invars, strict=True) if x is not v]
    joined = [_laid_out(v, x) for x, v in zip(results, body.outvars, strict=True) if x is not v]
    return jaxcompat.replace_jaxpr(
        body,
        invars=invars,
        outvars=results,
        eqns=[*cut, *body.eqns, *joined],
        debug_info=body.debug_info,
    )


def _laid_out(x: Atom, out: Var) -> JaxprEqn:
    """Return the equation that reshapes `x` to `out`."""
    shape = out.aval.shape
    jaxpr = jaxcompat.trace_flat(lambda x: [lax.reshape(x, shape)], "laid_out", [x.aval])
    nowhere = jaxcompat.NO_SOURCE
    return jaxpr.eqns[0].replace(invars=[x], outvars=[out], source_info=nowhere)


# --- jaxprs ---------------------------------------------------------------------------------------
# `batch_jaxpr`: map a jaxpr over an axis, as JAX's internal functions of 2022 did.
#
# There were three of those, one for each way to specify the axes of results; here it is an option.

#: Request that a result be mapped along its first axis if it is mapped at all.
ZERO_IF_MAPPED = "zero_if_mapped"


def batch_jaxpr(
    jaxpr: AnyJaxpr,
    size: int,
    in_axes: Dim | Sequence[Dim] = 0,
    out_axes: Any = None,
    axis_name: Hashable = None,
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Map a jaxpr over an axis: return the jaxpr of `jax.vmap` of its function.

    A single value represents a sequence of that value. Axes are positions in values with the mapped
    axis, and may count from the end.

    Args:
        jaxpr: A closed jaxpr, or an open one without constants.
        size: The size of the mapped axis, in elements.
        in_axes: The mapped axis of each argument; None for unmapped ones.
        out_axes: The requested mapped axis of each result: None accepts any, a number moves or
            broadcasts the result to be mapped there, and "zero_if_mapped" moves the mapped axis to
            the front if there is one.
        axis_name: The name of the axis, for collectives.

    Returns:
        The mapped jaxpr, closed, and the mapped axis of each result; None for unmapped ones.

    Raises:
        ValueError: If a sequence's length is not the jaxpr's, or an axis is invalid.
        BatchUnsupported: If an equation, which the message names, cannot be batched.
    """
    body = jaxcompat.close_jaxpr(jaxpr)
    if len(body.consts) != len(body.constvars):
        raise ValueError("batch_jaxpr takes a closed jaxpr, or an open one without constants")
    dims = _axes("in_axes", in_axes, body.invars)
    asked = _axes("out_axes", out_axes, body.outvars)
    axis = Axis(axis_name, size)
    new, outs = batch_body(body, dims, axis)
    pairs = zip(asked, outs, strict=True)
    wanted = tuple(
        (None if out is None else 0) if ask == ZERO_IF_MAPPED else ask for ask, out in pairs
    )
    return (new, outs) if wanted == (None,) * len(wanted) else batch_body(body, dims, axis, wanted)


def _axes(option: str, axes: Any, variables: Sequence[Var]) -> tuple[Any, ...]:
    """Return the axis of each variable, counted from 0 in a value with one more axis."""
    entries = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else None
    entries = [axes] * len(variables) if entries is None else entries
    if len(entries) != len(variables):
        raise ValueError(f"{option} has {len(entries)} entries for the jaxpr's {len(variables)}")
    dims = []
    for axis, var in zip(entries, variables, strict=True):
        rank = len(getattr(var.aval, "shape", ())) + 1
        if axis is None or (axis == ZERO_IF_MAPPED and option == "out_axes"):
            dims.append(axis)
        elif type(axis) is int and -rank <= axis < rank:
            dims.append(axis % rank)
        else:
            raise ValueError(f"{option} has {axis!r} for a value with {rank} axes when mapped")
    return tuple(dims)


# --- mapped ---------------------------------------------------------------------------------------
# Which arguments of a program are mapped, for messages to the user.


def mapped_arguments(batch: Batch, program: Program) -> list[tuple[str, int | None]]:
    """Return each flat argument with the axis along which it is mapped; None if it is unmapped."""
    dims, _ = program_axes(program, batch.in_axes, batch.axis_size)
    return list(zip(program.arg_names, dims, strict=True))


def names_by_axis(mapped: Iterable[tuple[str, int | None]]) -> dict[int | None, list[str]]:
    """Return the names of arguments by their axis, the unmapped ones last.

    An argument whose leaves are all mapped alike is named once: `params` for `params['w']`.
    """
    mapped = list(mapped)
    dims: defaultdict[str, set[int | None]] = defaultdict(set)
    for name, dim in mapped:
        dims[_root(name)].add(dim)
    names: defaultdict[int | None, dict[str, None]] = defaultdict(dict)
    for name, dim in mapped:
        root = _root(name)
        names[dim][root if len(dims[root]) == 1 else name] = None
    order = sorted(names, key=lambda dim: (dim is None, dim))
    return {dim: list(names[dim]) for dim in order}


def _root(name: str) -> str:
    """Return the argument at the root of a leaf's path: `params` of `params['w']`."""
    return re.split(r"[.\[]", name)[0]
