"""Values that are sown, as calls of jaxprtool's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jaxprtool.formats.python.expressions import Expression, Slot, call
from jaxprtool.formats.python.rules.table import python_rules, unsupported
from jaxprtool.ir.rules import rule
from jaxprtool.ir.trees import Tree, describe
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.primitives import VARIABLE


@rule(python_rules, "sow")
def _sow(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    p = eqn.params
    if unknown := _unknown(describe(p["tree"])):
        raise unsupported(eqn, f"its value has a node of type {unknown}")
    count = p["tree"].num_leaves
    value, key = jax.tree.unflatten(p["tree"], operands[:count]), operands[count:]
    if (p["tag"], p["mode"], key) == (VARIABLE, "strict", ()):
        sown = call("jaxprtool.variable", value, name=p["name"])
    else:
        more: dict[str, Any] = {} if p["mode"] == "strict" else {"mode": p["mode"]}
        more |= {"key": key[0] if len(key) == 1 else key} if key else {}
        sown = call("jaxprtool.sow", value, tag=p["tag"], name=p["name"], **more)
    yield sown
    yield call("jax.tree.leaves", sown)


def _unknown(tree: Tree) -> str | None:
    """The type of a node of a structure for which Python has no display."""
    if tree.kind in ("custom", "OrderedDict"):
        return tree.type_name or tree.kind
    return next(filter(None, map(_unknown, tree.children)), None)
