"""The constants of a program in Python: small ones as lists, others as bytes or in an .npz file.

They are JAX arrays, so that each is traced as one constant regardless of its number of uses, and a
scalar as a constant instead of a literal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import Expression, Name, Scope, call, pieces_of
from jaxprtool.formats.python.helpers import FROM_HEX
from jaxprtool.formats.python.layout import INDENT, WIDTH, statement
from jaxprtool.formats.python.values import array, dtype_name
from jaxprtool.ir.basics.dtypes import is_foreign

#: The maximum number of elements of an array written as a list, and the maximum number of bytes of
#: an array in the text.
_MOST_ELEMENTS, MOST_BYTES = 16, 2048


#: Stores an array in the file next to the module, and returns the expression that reads it.
Store = Callable[[np.ndarray], Expression]


def definition_of(name: str, value: Any, scope: Scope, store: Store | None) -> list[str]:
    """Return the lines that define a constant; large ones are passed to `store`, if given."""
    if isinstance(value, jax.Ref):  # with its current value
        made = call("jax.new_ref", Name(name))
        lines = definition_of(name, value[...], scope, store)
        return lines + statement(f"{name} = ", pieces_of(made, scope), "", 0)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _keys(name, value, scope, store)
    if is_foreign(value.dtype):
        raise UnsupportedError(
            f"a constant of the element type {value.dtype}, which a package defines, cannot be "
            "written as Python"
        )
    if jax.typeof(value).weak_type:
        dtype, strong = dtype_name(value.dtype), np.asarray(value)
        bind = call(
            "lax.convert_element_type_p.bind",
            Name(name),
            new_dtype=dtype,
            weak_type=True,
            sharding=None,
        )
        lines = definition_of(name, strong, scope, store)
        return lines + statement(f"{name} = ", pieces_of(bind, scope), "", 0)
    data = np.asarray(value)
    if data.dtype == jax.dtypes.float0:
        expression: Expression = call("np.zeros", data.shape, data.dtype)
    elif data.size <= _MOST_ELEMENTS:
        expression = array(data, "jnp")
    elif store and data.nbytes > MOST_BYTES:
        expression = call("jnp.asarray", store(data))
    else:
        return _bytes(name, data, scope)
    return statement(f"{name} = ", pieces_of(expression, scope), "", 0)


def _keys(name: str, value: Any, scope: Scope, store: Store | None) -> list[str]:
    words = f"{name}_DATA"
    implementation = jaxcompat.key_implementation(value.dtype).name
    scope.mention("jax.random")
    return [
        *definition_of(words, jax.random.key_data(value), scope, store),
        f'{name} = jax.random.wrap_key_data({words}, impl="{implementation}")',
    ]


def _bytes(name: str, data: np.ndarray, scope: Scope) -> list[str]:
    from_hex = scope.helper(FROM_HEX)
    text = data.tobytes().hex()
    width = WIDTH - 2 * len(INDENT)
    rows = [f"{INDENT}{text[i : i + width]}" for i in range(0, len(text), width)]
    dtype = "".join(map(str, pieces_of(dtype_name(data.dtype), scope)))
    shape = [f"{INDENT}{size}," for size in data.shape]
    return [
        f"{name} = {from_hex}(",
        f'{INDENT}"""',
        *rows,
        f'{INDENT}""",',
        f"{INDENT}{dtype},",
        *shape,
        ")",
    ]
