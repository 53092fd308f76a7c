"""For rules of the table "python": `rule(eqn, *operands)` yields expressions, the best first.

Objects of other packages among the parameters are written by the functions in `constructors`, by
class; packages that the module is to import stand in `ROOTS`.
"""

from jaxprtool.formats.python.expressions import (
    ROOTS,
    CallExpression,
    Expression,
    Name,
    Slot,
    as_expression,
    call,
    constructors,
)
from jaxprtool.formats.python.rules.table import unsupported

__all__ = [
    "ROOTS",
    "CallExpression",
    "Expression",
    "Name",
    "Slot",
    "as_expression",
    "call",
    "constructors",
    "unsupported",
]
