"""The rules of the table "jaxpr": a `Form` of a primitive's parameters in `.jaxpr` files.

`add_class` and similar functions add support for parameter values that are objects of other
packages. `readable_params`, the table "equivalence", has functions that return the parameters of an
equation as comparable data.
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
from jaxprtool.ir.equivalence import readable_params
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
    "add_constructor",
    "add_enum",
    "add_name",
    "add_record",
    "decode_params",
    "encode_params",
    "readable_params",
]
