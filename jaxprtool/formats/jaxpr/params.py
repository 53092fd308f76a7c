"""Which parameters of an equation a `.jaxpr` file holds, and what the file calls them, both ways.

`written` gives the parameters to write, `restored` makes the running JAX's out of those that a
file gives. Between the two,

- a parameter that JAX's listing hides, and that says nothing, is not in the file;
- one that only some JAX have is in it only if it says something;
- the structured primitives have one spelling on every JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxprtool.jaxcompat import JaxprEqn


def primitive_name(eqn: JaxprEqn) -> str:
    """The name that the file gives an equation's primitive, the same on every JAX."""
    return eqn.primitive.name


def written(eqn: JaxprEqn) -> list[tuple[str, Any]]:
    """The parameters of `eqn` that are written, in the order in which they are.

    A value is what `values.encode` takes, or a jaxpr, open or closed; or, for the rules of custom
    derivatives, a `Named` jaxpr. Equation contexts are among them, with an `@` before their names.
    """
    return sorted(eqn.params.items())


def restored(
    primitive: str, given: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, dict[str, Any]]:
    """The primitive of this JAX, and its parameters, from the name and parameters in a file.

    `operands` and `results` are the types of the equation's operands and results. `given` holds
    no equation contexts: see `contexts`. Raises ValueError that says which parameter is missing,
    unknown, or of a wrong value.
    """
    raise NotImplementedError
