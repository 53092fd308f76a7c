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
from dataclasses import dataclass, replace
from functools import partial
from operator import or_
from types import NoneType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import (
    bodies,
    equations,
    free_variables,
    is_weak,
    named,
    type_of,
    variables,
)
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, Regions, keep, regions
from jaxprtool.ir.rewrite import Memo, map_equations, narrow
from jaxprtool.ir.trees import filled, unique
from jaxprtool.jaxcompat import (
    AbstractRef,
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    Effect,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from jaxprtool.passes import Pass
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


# --- chunks ---------------------------------------------------------------------------------------
# `chunk=k`: map k batch elements at a time, so that memory is bounded by k, not by the axis size.
#
# A scan maps the program over n // k chunks of k batch elements each. The remaining n % k are
# mapped once more after it. Values that are the same in all batch elements are computed once,
# before the scan; for that, the body of each jit is split in two.
#
# Arguments are cut before the scan, by a reshape and, if the mapped axis is not the leading one,
# one transpose. Slices taken in the scan would move fewer bytes, but not in reverse: the gradient
# of each slice is as large as the whole argument, and n // k of these would be added up.
#
# Batch elements of different chunks are never computed together. So collectives over the mapped
# axis are refused, and the axis has no name in a chunk: code that is only traced later, such as the
# rule of a custom derivative, then raises instead of summing over one chunk. Random bits that
# depend on the whole batch, as in JAX's rule for `rbg` keys, depend on the chunk.


#: A value, and its batch dimension.
Batched = tuple[jax.Array, Dim]


def chunked_body(
    body: ClosedJaxpr, dims: Sequence[Dim], axis: Axis, outs: Sequence[Dim], chunk: int
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Map a closed jaxpr over an axis, `chunk` batch elements at a time; see `batch_body`.

    A mapped result without a requested batch dimension has it at 0.

    Raises:
        BatchTypeError: If the chunk is not an integer.
        BatchError: If the chunk or the axis is invalid.
        BatchUnsupported: If there is a collective over the axis, a ref that chunks would share, or
            an effect that would happen once for each chunk. The message names the equation.
    """
    _check_chunk(chunk, axis)
    _check_no_collectives(body, axis.name, chunk)
    if axis.size <= chunk:
        return batch_body(body, dims, axis, outs, outermost=True)
    # An argument that is a result need not be cut and concatenated again.
    computed = [v for v in variables(body.outvars) if v not in body.invars]
    wanted = jaxcompat.replace_jaxpr(body, outvars=computed)
    split_body = _split(wanted, [dim is not None for dim in dims], Memo())
    varying = split_body.second
    _check_no_ref_enters([*varying.constvars, *varying.invars], varying.eqns)
    dim_of = dict(zip(body.invars, dims, strict=True))
    _check_effects(varying, [dim_of.get(v) is not None for v in varying.invars], chunk)
    out_of = {v: out for v, out in zip(body.outvars, outs, strict=True) if type(v) is not Literal}
    out_dims: list[Dim] = []

    def whole(*args: jax.Array) -> list[jax.Array]:
        env: dict[Atom, Batched] = dict(zip(body.invars, zip(args, dims, strict=True), strict=True))
        once = jaxpr_as_fun(split_body.first)(*(x for x, dim in env.values() if dim is None))
        env.update((v, (x, None)) for v, x in zip(split_body.first.outvars, once, strict=True))
        if varying.eqns:
            asked = [out_of[v] or 0 for v in varying.outvars]
            results = _in_chunks(varying, [env[v] for v in varying.invars], asked, axis, chunk)
            env.update(zip(varying.outvars, results, strict=True))
        values = []
        for v, out in zip(body.outvars, outs, strict=True):
            x, dim = (v.val, None) if type(v) is Literal else env[v]
            if out is not None and out != dim:
                x, dim = jaxcompat.match_axis(axis.data, dim, out, x), out
            values.append(x)
            out_dims.append(dim)
        return values

    avals = [axis.aval(v.aval, dim) for v, dim in dim_of.items()]
    try:
        new = _without_our_source(jaxcompat.trace_flat(whole, "chunks", avals), body)
    except JaxprToolError:
        raise
    except NotImplementedError as error:  # an effect that JAX does not allow in a scan
        raise BatchUnsupported(f"chunk={chunk}: {error}", "omit chunk") from error
    return jaxcompat.replace_jaxpr(new, debug_info=body.debug_info), tuple(out_dims)


def _in_chunks(
    body: ClosedJaxpr, operands: Sequence[Batched], outs: Sequence[int], axis: Axis, chunk: int
) -> list[Batched]:
    """Return the results of a body in chunks, the mapped ones with batch dimensions `outs`."""
    dims = [dim for _, dim in operands]

    def batched(size: int) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
        return batch_body(body, dims, replace(axis, name=None, size=size), outermost=True)

    mapped, places = batched(chunk)
    count, rest = divmod(axis.size, chunk)
    if not rest and None in places:  # the last chunk returns the unmapped results
        count, rest = count - 1, chunk

    def scanned(_: None, rows: Sequence[jax.Array]) -> tuple[None, Sequence[jax.Array]]:
        cut = iter(rows)
        args = [x if dim is None else next(cut) for x, dim in operands]
        return None, keep(jaxpr_as_fun(mapped)(*args), [place is not None for place in places])

    rows = [_chunks_of(x, dim, count, chunk) for x, dim in operands if dim is not None]
    _, stacked = lax.scan(scanned, None, rows, length=count)
    stacks, lasts, last_places = iter(stacked), [], places
    if rest:
        last, last_places = batched(rest)
        lasts = jaxpr_as_fun(last)(
            *(
                x if dim is None else lax.slice_in_dim(x, count * chunk, None, axis=dim)
                for x, dim in operands
            )
        )
    results: list[Batched] = []
    for i, (place, out) in enumerate(zip(places, outs, strict=True)):
        if place is None:
            results.append((lasts[i], None))
            continue
        # Chunks, [count, ..., chunk, ...], and the batch elements after them.
        stack = jnp.moveaxis(next(stacks), (0, place + 1), (out, out + 1))
        pieces = [_reshaped(stack, out, 2, (count * chunk,))]
        if rest:
            pieces.append(jaxcompat.match_axis(axis.data, last_places[i], out, lasts[i]))
        results.append((lax.concatenate(pieces, out), out))
    return results


def _chunks_of(x: jax.Array, dim: int, count: int, chunk: int) -> jax.Array:
    """Return the first chunks along a dimension: [..., n, ...] to [count, ..., chunk, ...]."""
    if count * chunk < x.shape[dim]:
        x = lax.slice_in_dim(x, 0, count * chunk, axis=dim)
    return jnp.moveaxis(_reshaped(x, dim, 1, (count, chunk)), dim, 0)


def _reshaped(x: jax.Array, start: int, many: int, sizes: tuple[int, ...]) -> jax.Array:
    """Return an array with some of its dimensions reshaped to `sizes` of the same product."""
    return lax.reshape(x, (*x.shape[:start], *sizes, *x.shape[start + many :]))


def _without_our_source(jaxpr: ClosedJaxpr, body: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr in which only the equations of `body` have source locations."""
    tracebacks = {id(eqn.source_info.traceback) for eqn in equations(jaxcompat.open_jaxpr(body))}

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        source = eqn.source_info
        if id(source.traceback) in tracebacks:
            return None
        return [eqn.replace(source_info=jaxcompat.source_info(None, source.name_stack))]

    return map_equations(jaxpr, rule)


# --- refused programs -------------------------------------------------------------------------


def _check_chunk(chunk: object, axis: Axis) -> None:
    if type(chunk) is not int:
        raise BatchTypeError(f"chunk must be an integer, but got {chunk!r}")
    if chunk < 1:
        raise BatchError(f"chunk must be at least 1, but got {chunk}")
    if not isinstance(axis.size, int):
        raise BatchError(f"chunk needs an axis size that is a number, but it is {axis.size}")
    if axis.spmd_name is not None:
        raise BatchError(
            "chunk and spmd_axis_name cannot be combined: batch elements sharded over a mesh are "
            "computed all at once",
            "omit one of them",
        )
    if axis.mesh_axes is not None:
        over = ", ".join(map(str, axis.mesh_axes))
        raise BatchError(f"chunk cannot split an axis that is sharded over the mesh axes {over}")


def _check_no_collectives(body: ClosedJaxpr, name: Hashable, chunk: int) -> None:
    """Refuse equations over the axis of this name, at any depth: they need the whole batch."""
    if name is None:
        return
    for eqn in equations(jaxcompat.open_jaxpr(body)):
        inner = (sub_eqn for _, jaxpr in bodies(eqn) for sub_eqn in jaxpr.eqns)
        if _is_over(eqn, name) and not any(_is_over(sub_eqn, name) for sub_eqn in inner):
            raise BatchUnsupported(
                f"{named(eqn)} needs all elements of the mapped axis '{name}', but chunk={chunk} "
                f"computes {chunk} at a time",
                "omit chunk",
            )


def _is_over(eqn: JaxprEqn, name: Hashable) -> bool:
    """Return True if an equation is over a named axis. Some, as ppermute, have no effect for it."""
    over = eqn.params.get("axis_name", eqn.params.get("axes"))
    if over == name or (isinstance(over, tuple | list) and name in over):
        return True
    return jaxcompat.without_named_axes(eqn.effects, [name]) != set(eqn.effects)


def _check_no_ref_enters(values: Iterable[Var], eqns: Sequence[JaxprEqn]) -> None:
    """Refuse equations of the scan that use refs from outside."""
    refs = {v for v in values if isinstance(v.aval, AbstractRef)}
    for eqn in eqns:
        if not refs.isdisjoint(variables(eqn.invars)):
            raise BatchUnsupported(
                f"{named(eqn)} uses a ref that all chunks would share", "omit chunk"
            )


def _check_effects(body: ClosedJaxpr, mapped: Sequence[bool], chunk: int) -> None:
    """Refuse effects of unmapped values in a body that each chunk runs.

    In an unchunked batch such an effect happens once; in chunks it would happen for each of them.
    """
    if not any(map(_is_external, body.effects)):
        return
    eqn = _repeated_effect(body, mapped, Memo())[1]
    if eqn is not None:
        raise BatchUnsupported(
            f"{named(eqn)} happens once for the whole batch, but would happen for each chunk of "
            f"{chunk}",
            "omit chunk",
        )


def _repeated_effect(
    body: ClosedJaxpr, mapped: Sequence[bool], memo: Memo
) -> tuple[list[bool], JaxprEqn | None]:
    """Return which results are mapped, and the first equation with an effect of unmapped values."""

    def inside(bodies: Sequence[ClosedJaxpr], number: int, mapped: Sequence[bool]) -> Any:
        inner = bodies[number]
        return memo(partial(_repeated_effect, inner, mapped, memo), inner, tuple(mapped))

    env, external = set(keep(body.invars, mapped)), None
    for eqn in body.eqns:
        facts = [type(v) is not Literal and v in env for v in eqn.invars]
        outs = [any(facts)] * len(eqn.outvars)
        nested = regions(eqn)
        if nested is not None:
            look = partial(inside, nested.bodies)
            facts, outs = nested.forward(facts, lambda *at, f=look: f(*at)[0], or_, control=True)
            # All branches of a mapped index are computed, with mapped operands.
            chosen = any(facts[i] for i in nested.predicates)
            for number, region in enumerate(nested.regions):
                external = external or look(number, [chosen or facts[i] for i in region.ins])[1]
        elif not any(facts) and any(map(_is_external, eqn.effects)):
            external = external or eqn
        env.update(keep(eqn.outvars, outs))
    return [type(v) is not Literal and v in env for v in body.outvars], external


def _is_external(effect: Effect) -> bool:
    """Return True if an effect is visible from outside. Refs are not: each chunk has its own."""
    return not jaxcompat.is_removable_effect(effect) and jaxcompat.ref_of(effect) is None


# --- values that are the same in all batch elements -------------------------------------------


@dataclass(frozen=True, eq=False)
class _SplitBody:
    """A body in two: the part that is the same in all batch elements, and the rest.

    `first` takes the unmapped arguments. It returns the results marked in `same`, then the values
    that `second` takes before the arguments marked in `taken`; `second` returns the other results.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    same: list[bool]
    taken: list[bool]


def _split(body: ClosedJaxpr, mapped: Sequence[bool], memo: Memo) -> _SplitBody:
    """Split a body, and those of the jits in it, by which of its arguments are mapped."""
    once: list[JaxprEqn] = []
    mapped_eqns: list[JaxprEqn] = []
    inside = set(keep(body.invars, mapped))
    for eqn in body.eqns:
        # A ref holds all batch elements, each of which may write to it: each chunk has its own.
        makes_ref = any(isinstance(v.aval, AbstractRef) for v in eqn.outvars) or any(
            jaxcompat.allocates_refs(inner) for _, inner in bodies(eqn)
        )
        if inside.isdisjoint(variables(eqn.invars)) and not makes_ref:
            once.append(eqn)
            continue
        if eqn.primitive.name == "jit":
            first, eqn = _split_call(Call.of(eqn), inside, memo)
            once += first
        mapped_eqns.append(eqn)
        inside.update(eqn.outvars)
    same = [type(v) is Literal or v not in inside for v in body.outvars]
    differing = keep(body.outvars, _not(same))
    read = free_variables(mapped_eqns, differing)
    passed = [v for eqn in once for v in eqn.outvars if v in read]
    _check_no_ref_enters(passed, mapped_eqns)
    taken = [v in read for v in body.invars]
    results = [*keep(body.outvars, same), *passed]
    return _SplitBody(
        narrow(body, keep(body.invars, _not(mapped)), results, once),
        narrow(body, [*passed, *keep(body.invars, taken)], differing, mapped_eqns),
        same,
        taken,
    )


def _split_call(call: Call, inside: set[Var], memo: Memo) -> tuple[list[JaxprEqn], JaxprEqn]:
    """Return the call of the part of a jit to compute once, if any, and the call of the rest."""
    mapped = tuple(type(v) is not Literal and v in inside for v in call.operands)
    split_body = memo(partial(_split, call.body, mapped, memo), call.body, mapped)
    first, same = split_body.first, split_body.same
    # A call that only computes constants for the other saves nothing.
    arguments = {
        v for v, x in zip(call.body.invars, call.operands, strict=True) if type(x) is not Literal
    }
    if not any(same) and not any(
        eqn.effects or not arguments.isdisjoint(variables(eqn.invars)) for eqn in first.eqns
    ):
        return [], call.eqn
    # Operands that both calls take can be donated to neither.
    kept = {**call.operand_params, "donated_invars": (False,) * len(call.operands)}
    called = Regions.of(replace(call, operand_params=kept))
    passed = [Var(v.aval) for v in first.outvars[sum(same) :]]
    return (
        [called.rebuild([first], _not(mapped), same, more_results={"outs": passed})],
        called.rebuild(
            [split_body.second], split_body.taken, _not(same), more={"operands": passed}, first=True
        ),
    )


def _not(flags: Iterable[bool]) -> list[bool]:
    return [not flag for flag in flags]
