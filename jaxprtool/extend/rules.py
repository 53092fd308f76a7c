"""Types and functions for rules of the tables "jaxpr", "equivalence", "python" and "unzip".

"jaxpr": a `Form` of a primitive's parameters in `.jaxpr` files. `add_class` and similar functions
add support for parameter values that are objects of other packages. `readable_params`, the table
"equivalence", has functions that return the parameters of an equation as comparable data.

"python": `rule(eqn, *operands)` yields expressions, the best first. The functions in
`constructors`, by class, write parameters that are objects of other packages; `ROOTS` lists the
packages that the module may import.

"unzip": `rule(eqn, times, context)` returns an `Outcome`.
"""

from jaxprtool.formats.jaxpr.params import BadParameter, Form, Params, decode_params, encode_params
from jaxprtool.formats.jaxpr.values import (
    ENCODERS,
    Encode,
    Unwritable,
    add_class,
    add_constructor,
    add_enum,
    add_name,
    add_record,
)
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
from jaxprtool.formats.python.rules_of_calls import unsupported
from jaxprtool.ir.equivalence import readable_params
from jaxprtool.jaxcompat import NO_AXIS_NAME
from jaxprtool.passes.unzip import BindingTime, Context, Outcome, Variable, whole

__all__ = [
    "ENCODERS",
    "NO_AXIS_NAME",
    "ROOTS",
    "BadParameter",
    "BindingTime",
    "CallExpression",
    "Context",
    "Encode",
    "Expression",
    "Form",
    "Name",
    "Outcome",
    "Params",
    "Slot",
    "Unwritable",
    "Variable",
    "add_class",
    "add_constructor",
    "add_enum",
    "add_name",
    "add_record",
    "as_expression",
    "call",
    "constructors",
    "decode_params",
    "encode_params",
    "readable_params",
    "unsupported",
    "whole",
]
