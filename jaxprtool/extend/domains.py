"""The engine of passes that rewrite a program by a kind of each value: `batch`, `mask`, `ragged`.

A `Domain` defines the kinds of values and the join of two kinds. `Domain.body` returns the
rewritten form of a body; the domain's `BodyBuilder` writes it, equation by equation.

Equations that hold jaxprs have rules in a table such as "batch_bodies", "mask_bodies" or
"ragged_bodies". `rule(builder, eqn)` writes the rewritten equation and returns True, or writes
nothing and returns False. `by_edges` is the rule for loops, branches and calls, also those of
plug-ins; `custom_derivative` is the rule for calls with a custom derivative. A rule that changes
the solution of `by_edges` calls its two steps, `solve` and `write`.
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
