"""Marked calls in JAX's form: equations of a primitive of our own, with its own lowering.

In a Program a marked call is a `jit` whose context has the mark. JAX would copy the mark to the
call and to all equations that its transformations trace in the body, wherever the program is
lowered. So the jaxpr that JAX evaluates or lowers has equations of another primitive, which follows
the rules of `jit` except for the lowering. After JAX's tracing, they become `jit` with a mark
again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from jax._src import pjit
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.extend.core import jaxpr_as_fun as _jaxs_function
from jax.extend.core.primitives import jit_p
from jax.interpreters import mlir

from jaxprtool.jaxcompat.aliases import AnyJaxpr
from jaxprtool.jaxcompat.jaxprs import open_jaxpr, replace_jaxpr
from jaxprtool.jaxcompat.marked_lowering import lower_marked_call
from jaxprtool.jaxcompat.marks import MarkedName, mark_in, marked, name_in
from jaxprtool.jaxcompat.rebound import rebound


class MarkedCall(Primitive):
    """JAX's `jit`, lowered according to its mark. Its name is a `MarkedName`."""

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        """Bind it, or bind a `jit` if another package's transformation has rules only for that."""
        known = type(trace).__module__.startswith(("jax._src.", "jaxprtool."))
        if known:
            return super().bind_with_trace(trace, args, avals, params)
        params = {**params, "name": str(params["name"])}
        return jit_p.bind_with_trace(trace, args, avals, params)


@cache
def marked_call_p() -> MarkedCall:
    """Return the primitive. JAX's tables have rows for it from the first marked call on."""
    primitive = MarkedCall(jit_p.name)
    module = SimpleNamespace(**{**vars(pjit), "jit_p": primitive})
    for name, value in vars(jit_p).items():
        setattr(primitive, name, rebound(value, jit_p=primitive))
    for table in _tables_with_jit():
        table[primitive] = rebound(table[jit_p], jit_p=primitive, pjit=module)
    mlir.register_lowering(primitive, lower_marked_call, cacheable=False)
    return primitive


def _tables_with_jit() -> Iterator[dict[Any, Any]]:
    """Yield JAX's tables that have a rule for `jit`."""
    import jax.experimental.checkify  # noqa: F401  (so that its table is among them)

    modules = [module for name, module in sys.modules.items() if name.startswith("jax.")]
    tables = {id(x): x for m in modules for x in list(vars(m).values()) if isinstance(x, dict)}
    yield from (table for table in tables.values() if jit_p in table)


# --- conversions ----------------------------------------------------------------------------------

_Known: TypeAlias = WeakKeyDictionary[AnyJaxpr, dict[tuple[type, str | None], AnyJaxpr | None]]

#: The converted jaxprs, by the marked body around them; None for those that do not change.
_for_jax: _Known = WeakKeyDictionary()
_from_jax: _Known = WeakKeyDictionary()

#: Both caches, for functions that empty caches.
CONVERTED = _for_jax, _from_jax


def for_jax(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a jaxpr, open or closed, for JAX to evaluate or lower; itself if unmarked.

    The same jaxpr is converted to the same object, and so are shared bodies.
    """
    return _mapped(jaxpr, None, _equation_for_jax, _for_jax)


def from_jax(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a jaxpr traced by JAX, with its marked calls as `jit`: the inverse of `for_jax`."""
    if not marked_call_p.cache_info().currsize:
        return jaxpr
    return _mapped(jaxpr, None, _equation_from_jax, _from_jax)


def equation_for_jax(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation for JAX to evaluate: `for_jax` of one equation."""
    return _equation_for_jax(eqn, None)


_Rule: TypeAlias = Callable[[JaxprEqn, str | None], JaxprEqn]


def _mapped(jaxpr: AnyJaxpr, around: str | None, rule: _Rule, known: _Known) -> AnyJaxpr:
    """Apply a rule to the equations of a jaxpr; `around` is the name of the marked body."""
    # In JAX 0.10 each view of an open body closes it again. Only the open jaxpr stays the same
    # object.
    lasting = jaxpr if getattr(jaxpr, "consts", ()) else open_jaxpr(jaxpr)
    made, key = known.setdefault(lasting, {}), (type(jaxpr), around)
    if key not in made:
        eqns = [rule(eqn, around) if _may_change(eqn) else eqn for eqn in jaxpr.eqns]
        same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        made[key] = None if same else replace_jaxpr(jaxpr, eqns=eqns)
    return made[key] or jaxpr


def _may_change(eqn: JaxprEqn) -> bool:
    """Return True for a marked call, or an equation with jaxprs. Fast, as all traces call it."""
    if eqn.ctx.xla_metadata or isinstance(eqn.primitive, MarkedCall):
        return True
    for value in eqn.params.values():
        if type(value) is tuple:
            if value and type(value[0]) is not int and any(isinstance(x, _JAXPRS) for x in value):
                return True
        elif isinstance(value, _JAXPRS):
            return True
    return False


def _equation_for_jax(eqn: JaxprEqn, around: str | None) -> JaxprEqn:
    if eqn.ctx.xla_metadata and (name := name_in(eqn.ctx)) is not None:
        mark = mark_in(eqn.ctx)
        eqn = eqn.replace(ctx=marked(eqn.ctx, "plain", name))
        # JAX's transformations copy the mark of a call to all equations within it.
        if eqn.primitive is jit_p and name != around:
            params = {**eqn.params, "name": MarkedName(eqn.params["name"], mark, name)}
            eqn = eqn.replace(primitive=marked_call_p(), params=params)
        around = name
    return _with_bodies(eqn, lambda body: _mapped(body, around, _equation_for_jax, _for_jax))


def _equation_from_jax(eqn: JaxprEqn, _: str | None) -> JaxprEqn:
    if isinstance(eqn.primitive, MarkedCall):
        name = eqn.params["name"]
        context = marked(eqn.ctx, name.mark, name.body)
        params = {**eqn.params, "name": str(name)}
        eqn = eqn.replace(primitive=jit_p, params=params, ctx=context)
    return _with_bodies(eqn, lambda body: _mapped(body, None, _equation_from_jax, _from_jax))


def _with_bodies(eqn: JaxprEqn, change: Callable[[AnyJaxpr], AnyJaxpr]) -> JaxprEqn:
    """Return an equation with its jaxprs changed; the same object if none changes."""
    new = {}
    for key, value in eqn.params.items():
        if isinstance(value, _JAXPRS):
            changed: Any = change(value)
            if changed is not value:
                new[key] = changed
        elif type(value) is tuple and any(isinstance(x, _JAXPRS) for x in value):
            changed = [change(x) if isinstance(x, _JAXPRS) else x for x in value]
            if any(a is not b for a, b in zip(changed, value, strict=True)):
                new[key] = tuple(changed)
    return eqn.replace(params={**eqn.params, **new}) if new else eqn


_JAXPRS = Jaxpr, ClosedJaxpr


def jaxpr_as_fun(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Return the function from flat values to flat values that a closed jaxpr computes."""
    return _jaxs_function(for_jax(closed))
