"""Passes that rewrite a program by a kind of each value, such as `batch`, `mask` and `ragged`.

The engine: a `Domain` defines the kinds of values and the join of two kinds. `Domain.body` returns
the rewritten form of a body; the domain's `BodyBuilder` writes it, equation by equation.

Equations that hold jaxprs have rules in a table such as "batch_bodies", "mask_bodies" or
"ragged_bodies". `rule(builder, eqn)` writes the rewritten equation and returns True, or writes
nothing and returns False. `by_edges` is the rule for loops, branches and calls, also those of
plug-ins; `custom_derivative` is the rule for calls with a custom derivative. A rule that changes
the solution of `by_edges` calls its two steps, `solve` and `write`.

The table "batch": `rule(axis, primitive, operands, dims, params)` computes on operands, some of
which have a batch dimension. It returns the results and their batch dimensions, or None to use
JAX's rule.

Functions to map a user's function over examples, as `vmap` does: `TracedElement` traces the
function for one example. `flat_out_axes`, `axis_size_of` and `check_unmapped` handle `in_axes` and
`out_axes` like `jax.vmap`, with its errors, and `match_axis` moves the mapped axis of a value.

The pass `ragged` as a function: `ragged_jaxpr` rewrites the jaxpr of one example for examples of
different lengths; a `Kind` is the layout of the values of all examples: `Packed`, `Batched`, or
`Shared` by all. `RaggedContext.lengths` computes a size of each example.
"""

from jaxprtool.jaxcompat import match_axis
from jaxprtool.jaxcompat.mapping import TracedElement
from jaxprtool.passes.mapping import (
    BodyBuilder,
    Domain,
    Rewritten,
    Role,
    Solution,
    by_edges,
    custom_derivative,
    solve,
    write,
)
from jaxprtool.passes.mapping.batch import (
    Axis,
    BatchBodyBuilder,
    BatchDomain,
    batch_body,
    jaxs_rule,
)
from jaxprtool.passes.mapping.batch.axes import (
    BatchError,
    BatchTypeError,
    Dim,
    Names,
    axis_size_of,
    check_unmapped,
    flat_out_axes,
    result_type,
)
from jaxprtool.passes.mapping.ragged import (
    Batched,
    Kind,
    Packed,
    RaggedContext,
    Shared,
    Sizes,
    ragged_jaxpr,
)

__all__ = [
    "Axis",
    "BatchBodyBuilder",
    "BatchDomain",
    "BatchError",
    "BatchTypeError",
    "Batched",
    "BodyBuilder",
    "Dim",
    "Domain",
    "Kind",
    "Names",
    "Packed",
    "RaggedContext",
    "Rewritten",
    "Role",
    "Shared",
    "Sizes",
    "Solution",
    "TracedElement",
    "axis_size_of",
    "batch_body",
    "by_edges",
    "check_unmapped",
    "custom_derivative",
    "flat_out_axes",
    "jaxs_rule",
    "match_axis",
    "ragged_jaxpr",
    "result_type",
    "solve",
    "write",
]
