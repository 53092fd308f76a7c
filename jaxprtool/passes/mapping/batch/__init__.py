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

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxprtool import jaxcompat
from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.mapping.batch import (  # noqa: F401  (they fill the tables)
    branches,
    calls,
    corrections,
    custom_derivatives,
    loops,
    sharding,
)
from jaxprtool.passes.mapping.batch.axes import (
    BatchError,
    BatchTypeError,
    check_axes,
    check_unmapped,
    flat_out_axes,
    free_axes,
    program_axes,
    result_dims,
)
from jaxprtool.passes.mapping.batch.axis import Axis
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder, BatchDomain, batch_body
from jaxprtool.passes.mapping.batch.chunks import chunked_body
from jaxprtool.passes.mapping.batch.sums import summed
from jaxprtool.passes.mapping.batch.table import (
    BatchUnsupported,
    batch_rules,
    jaxs_rule,
    structured_rules,
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
