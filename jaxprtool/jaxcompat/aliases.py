"""Names for annotations of what JAX's own modules give no public type.

`jax.Array`, `jax.tree_util.PyTreeDef`, `jax.sharding.Mesh` and the classes of `jax.extend.core` are
written as they are.
"""

from typing import TypeAlias

from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

Aval: TypeAlias = AbstractValue
"""The type of a value: of an array its shape, dtype, weak type and sharding."""

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
"""A jaxpr with or without the values of its constants; JAX 0.12 has one class for both."""
