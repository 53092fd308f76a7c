"""Type names for annotations of JAX objects without a public type.

`jax.Array`, `jax.tree_util.PyTreeDef`, `jax.sharding.Mesh` and the classes of `jax.extend.core` are
used directly.
"""

from typing import Any, TypeAlias

import numpy as np
from jax._src.dtypes import ExtendedDType
from jax._src.interpreters.batching import AxisData
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.extend.core import Effect as Effect

Aval: TypeAlias = AbstractValue
"""The type of a value: of an array its shape, dtype, weak type and sharding."""

Atom: TypeAlias = Var | Literal
"""An operand of an equation."""

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
"""A jaxpr with or without the values of its constants; JAX 0.12 has one class for both."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation."""

DType: TypeAlias = np.dtype | ExtendedDType
"""The dtype of an array: of plain numbers, of PRNG keys, or of another package's elements."""

MappedAxis: TypeAlias = AxisData
"""The mapped axis as JAX's batching rules take it."""
