"""tile: map the program of one tile over all tiles of an axis.

    def normalized(x):                  # f32[8,3] -> f32[8,3], over the rows of all tiles
        total = jax.lax.psum(x.sum(axis=0), "tiles")
        return x / total

    program = trace(normalized, x, axis_env=[("tiles", 4)])
    whole = program.apply("tile(tile_size=4, axis_name='tiles')")       # f32[32,3] -> f32[32,3]

This is `vtile` as JAX had it in 2022, for programs. The program takes one tile; the tiled program
takes all of them along one axis, one after the other, and concatenates their results in the same
way. Without a `tile_size` it takes any number of tiles, a symbol in its types that the arguments
determine, as None did in 2022. `in_axes` and `out_axes` are positions in the arguments and results
of the program for one tile.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.weak_types import is_weak
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.mapping.batch import Batch
from jaxprtool.passes.mapping.batch.axes import (
    BatchError,
    BatchTypeError,
    check_axes,
    flat_in_axes,
    flat_out_axes,
)
from jaxprtool.passes.mapping.batch.axis import Dim


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

    invars = [whole(*each) for each in zip(body.invars, program.in_avals, dims, strict=True)]
    results = [whole(*each) for each in zip(body.outvars, program.out_avals, outs, strict=True)]
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
