"""The engine of passes that rewrite a program by a *kind* of each value.

`batch` (the batch dimension of a value), `mask` (its logical shape and known padding) and `ragged`
(its layout) are such passes. A `Domain` defines the kinds of values, how two kinds join, and which
extra arguments a body needs. Its `BodyBuilder` rewrites one body, equation by equation.

Loops, branches and calls (`regions`) and custom derivatives (`custom_derivatives`) are rewritten
here for all domains, on the edges of their bodies (`ir.core.regions`).
"""

from jaxprtool.passes.mapping.domains.body import BodyBuilder
from jaxprtool.passes.mapping.domains.custom_derivatives import custom_derivative
from jaxprtool.passes.mapping.domains.domain import Domain, Rewritten, Role
from jaxprtool.passes.mapping.domains.regions import Solution, by_edges, lifted, solve, write

__all__ = [
    "BodyBuilder",
    "Domain",
    "Rewritten",
    "Role",
    "Solution",
    "by_edges",
    "custom_derivative",
    "lifted",
    "solve",
    "write",
]
