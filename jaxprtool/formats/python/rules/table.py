"""The open table of rules for writing the equations of each primitive.

    @rule("python", "my_primitive")
    def _(eqn, x, y):
        yield call("jnp.hypot", x, y)

A rule takes an equation and a `Slot` for each operand, and yields expressions, most readable first.
The first expression that traces to exactly this equation is used, so a rule need not check its
proposals. It may depend on the parameters, the types, and literal operands that are 0 or 1;
equations equal in all of these are written alike. If no proposal fits, the primitive's `bind` is
written, provided that the primitive is public and its parameters are plain data.

An expression may contain a `PythonFunction` for a jaxpr of the equation. An expression wrapped in
`MultiResult`, which has the structure of its results, is used unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import Proposal, Slot
from jaxprtool.ir.basics.plugins import missing_plugin
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.jaxcompat import JaxprEqn

PythonRule: TypeAlias = Callable[..., Iterable[Proposal]]

#: Rules by the primitive's name. Plug-ins add rules for their own primitives.
python_rules: RuleTable[PythonRule] = RuleTable()


def proposals(eqn: JaxprEqn, *operands: Slot) -> Iterable[Proposal]:
    """Return the table's proposals for an equation, most readable first."""
    found = python_rules.get(eqn.primitive.name)
    return found(eqn, *operands) if found else ()


def unsupported(eqn: JaxprEqn, why: str) -> UnsupportedError:
    """Return the error for an equation that cannot be written as Python."""
    message = f"{named(eqn)} cannot be written as Python: {why}"
    name, module = eqn.primitive.name, jaxcompat.defining_module(eqn.primitive)
    hint = missing_plugin(name)
    if hint is None and module is not None and not module.startswith("jax."):
        hint = f"add a rule with @rule('python', {name!r}) to a module, and --plugin MODULE"
    return UnsupportedError(message, hint)


def options(params: Mapping[str, Any], **defaults: object) -> dict[str, Any]:
    """Return the parameters that differ from these defaults, in this order."""
    return {k: params[k] for k, default in defaults.items() if params.get(k, default) != default}
