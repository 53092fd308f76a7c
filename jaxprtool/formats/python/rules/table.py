"""The open table of rules: how the equations of each primitive may be written.

    @rule("python", "my_primitive")
    def _(eqn, x, y):
        yield call("jnp.hypot", x, y)

A rule gets an equation and a `Slot` for each operand, and yields expressions, the most readable
first. The first that traces to the very equation is taken, so a rule need not know whether a
proposal fits. It may look at the parameters, at the types, and at literal operands that are 0 or
1; equations that differ in none of these are written alike. Where none fits, the primitive's
`bind` is written, if the primitive is public and its parameters are plain data.

An expression may hold a `PythonFunction`, made from a jaxpr that the equation holds. One wrapped in
`MultiResult`, which says in what structure it gives the results, is taken unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import Proposal, Slot
from jaxprtool.ir.basics.plugins import missing_plugin
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.jaxcompat import JaxprEqn

PythonRule: TypeAlias = Callable[..., Iterable[Proposal]]

#: Rules by the primitive's name. A plug-in adds those of its own primitives.
python_rules: RuleTable[PythonRule] = RuleTable()


def proposals(eqn: JaxprEqn, *operands: Slot) -> Iterable[Proposal]:
    """Return what the table proposes for an equation, most readable first."""
    found = python_rules.get(eqn.primitive.name)
    return found(eqn, *operands) if found else ()


def unsupported(eqn: JaxprEqn, why: str) -> UnsupportedError:
    """Return the error that an equation cannot be written as Python."""
    message = f"{named(eqn)} cannot be written as Python: {why}"
    return UnsupportedError(message, missing_plugin(eqn.primitive.name))


def options(params: Mapping[str, Any], **defaults: object) -> dict[str, Any]:
    """Return the parameters that are there and differ from their defaults, in this order."""
    return {k: params[k] for k, default in defaults.items() if params.get(k, default) != default}
