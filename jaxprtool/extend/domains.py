"""The engine of passes that rewrite a program by a kind of each value: `batch`, `mask`, `ragged`.

A `Domain` defines the kinds of values and how two kinds join; its `BodyBuilder` rewrites one body,
equation by equation. Loops, branches, calls and custom derivatives, also those of plug-ins, are
rewritten on the edges of their bodies: `by_edges` and `custom_derivative` are rules for a table of
structured rules, and `Domain.body` rewrites a body. `rule(builder, eqn)` of such a table, as of
"mask_bodies", "ragged_bodies" and "batch_bodies", writes an equation that holds jaxprs and returns
True, or writes nothing and returns False. `solve` and `write` are the two steps of `by_edges`, for
a rule that changes the solution in between.
"""

from jaxprtool.passes.mapping.domains import (
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

__all__ = [
    "BodyBuilder",
    "Domain",
    "Rewritten",
    "Role",
    "Solution",
    "by_edges",
    "custom_derivative",
    "solve",
    "write",
]
