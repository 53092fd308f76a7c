"""Rules for Equinox's and Lineax's primitives: in `.jaxpr` files, as Python, and their costs.

jaxprtool imports this package when it meets one of these primitives. Most are written with their
parameters, or as calls of `equinox.internal`. A primitive that takes any Python object
(`filter_primitive_bind`), such as Lineax's `linear_solve`, is written with its arguments as a
tree: modules by their classes and fields, and `operand` for each array.
"""

from jaxprtool_equinox import costs, files, source  # noqa: F401  (they fill the tables)
from jaxprtool_equinox.modules import (
    enumeration,
    filtered,
    function,
    hoisted,
    module,
    operand,
    tag,
)

__all__ = ["enumeration", "filtered", "function", "hoisted", "module", "operand", "tag"]
