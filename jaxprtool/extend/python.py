"""The rules of the table "python": `rule(eqn, *operands)` yields expressions, the best first.

The functions in `constructors`, by class, write parameters that are objects of other packages;
`ROOTS` lists the packages that the module may import.
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
