"""For rules of the table "jaxpr", each a `Form`: how `.jaxpr` files have a primitive's parameters.

The values of parameters that are objects of other packages are added by `add_class` and the like.
`readable_params`, the table "equivalence", has functions that return the parameters of an equation
as data that can be compared.
"""

from jaxprtool.formats.jaxpr.params import BadParameter, Form, Params, restored, written
from jaxprtool.formats.jaxpr.values import (
    ENCODERS,
    Encode,
    Unwritable,
    add_class,
    add_enum,
    add_maker,
    add_name,
    add_record,
)
from jaxprtool.ir.equality.equivalence import readable_params
from jaxprtool.jaxcompat import NO_AXIS_NAME

__all__ = [
    "ENCODERS",
    "NO_AXIS_NAME",
    "BadParameter",
    "Encode",
    "Form",
    "Params",
    "Unwritable",
    "add_class",
    "add_enum",
    "add_maker",
    "add_name",
    "add_record",
    "readable_params",
    "restored",
    "written",
]
