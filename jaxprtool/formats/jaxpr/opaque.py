"""The parameters of opaque equations in a `.jaxpr` file: see `jaxcompat.opaque`.

    y:f32[8,128] = pallas_call[
      @opaque=()
      compiler_params=Record('jax…CompilerParams', dimension_semantics=('arbitrary',), …)
      jaxpr=open({ lambda ; … })
      …
    ] x

`@opaque` has the equation's effects. A value that the file cannot have is a record of its fields,
if it has some, or else the description of an object. Jaxprs in records are written as jaxprs.
"""

from __future__ import annotations

from typing import Any

from jaxprtool.formats.jaxpr.values import Encode, add_class, call
from jaxprtool.ir.basics.records import Record, fields_of
from jaxprtool.ir.programs.static_leaf import Placeholder, StaticLeaf, description

#: The setting of an opaque equation that has its effects.
OPAQUE = "opaque"


def encode_opaque(value: Any, encode: Encode) -> str:
    """Return the text of a value that cannot be written otherwise: a record, or a description."""
    record = fields_of(value)
    if record is None:
        return encode(StaticLeaf(Placeholder(_described(value))))
    class_name, fields = record
    return call("Record", repr(class_name), **{k: encode(field) for k, field in fields.items()})


def _described(value: Any) -> str:
    """Return the description of an object, whose `repr` may raise."""
    try:
        return " ".join(description(value).split())
    except Exception:
        return f"a value of {type(value).__module__}.{type(value).__qualname__}"


def is_whole(value: Any) -> bool:
    """Return True if a value that was read is the value that was written."""
    if isinstance(value, Record | StaticLeaf):
        return False
    if isinstance(value, dict):
        return all(map(is_whole, value.values()))
    return not isinstance(value, tuple | list) or all(map(is_whole, value))


add_class(Record, encode_opaque, Record=Record)
