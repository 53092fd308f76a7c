"""batch: the jaxpr of vmap(f) from the jaxpr of f; no code of the user's is run.

    batched = trace(loss, w, x).apply("batch(in_axes=(None, 0), axis_size=32)")
    batched(w, xs)                      # jax.vmap(loss, in_axes=(None, 0))(w, xs)

`in_axes` and `out_axes` are those of `jax.vmap`: an int, None, or a prefix of the tree of arguments
or results. An axis of an argument is its position in the argument as it will be, with the mapped
axis. A program's arguments have none yet, so that the size must be given.

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
from jaxprtool.ir.program import Program
from jaxprtool.passes.base import Pass
from jaxprtool.passes.batch import (  # noqa: F401  (they fill the tables)
    branches,
    calls,
    corrections,
    custom_derivatives,
    loops,
    sharding,
)
from jaxprtool.passes.batch.axes import (
    BatchError,
    BatchTypeError,
    check_axes,
    check_unmapped,
    flat_out_axes,
    free_axes,
    program_axes,
    result_dims,
)
from jaxprtool.passes.batch.axis import Axis
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.chunks import chunked_body
from jaxprtool.passes.batch.table import (
    BatchUnsupported,
    Rebuilt,
    batch_rules,
    jaxs_rule,
    structured_rules,
)

__all__ = [
    "Axis",
    "Batch",
    "BatchError",
    "BatchTypeError",
    "BatchUnsupported",
    "Rebuilt",
    "batch_body",
    "batch_rules",
    "jaxs_rule",
    "structured_rules",
]


@dataclass(frozen=True)
class Batch(Pass):
    """Add a mapped axis: the jaxpr of vmap(f) from the jaxpr of f."""

    name: ClassVar[str] = "batch"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    #: Where arguments are mapped: an int, None, or a prefix of the tree of positional arguments.
    in_axes: Any = 0

    #: Where results are to be mapped; None for those that are the same in all lanes.
    out_axes: Any = 0

    #: The number of lanes.
    axis_size: int | None = None

    #: The name by which collectives call the axis.
    axis_name: Hashable = None

    #: The mesh axis, or axes, that the lanes are spread over.
    spmd_axis_name: str | tuple[str, ...] | None = None

    #: Map so many lanes at a time, in a scan, so that memory is bounded.
    chunk: int | None = None

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
        # The axis is bound here; a name of the program's that is the same is the mapped one.
        free = free_axes(program, self.axis_name, size)
        with jaxcompat.axes_bound(free):
            if self.chunk is None:
                jaxpr, out_dims = batch_body(program.jaxpr, dims, axis, outs, outermost=True)
            else:
                jaxpr, out_dims = chunked_body(program.jaxpr, dims, axis, outs, self.chunk)
        check_unmapped(out_axes, out_dims, program.out_tree, self.axis_name)
        return program.replace(jaxpr=jaxpr, axis_env=free)
