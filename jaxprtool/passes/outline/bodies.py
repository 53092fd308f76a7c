"""The bodies of a program while its repeated segments become calls.

A `Body` is a jaxpr, or one of the shared bodies that the pass makes, as a list of items: equations,
and `Repeated` ones, which are the calls to be. Items are replaced from round to round; the calls
are written at the end, from the innermost bodies outwards, since a shared body may itself have
calls in it by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.caches import anchor
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.structured import CustomJVP, call, holds_jaxpr, sub_jaxprs, view
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Mark,
    Var,
)
from jaxprtool.passes.outline.in_place import writes_into_arguments
from jaxprtool.passes.outline.order import finished_early


@dataclass(eq=False)
class Body:
    """The items of one jaxpr.

    Attributes:
        items: Its equations and calls, in order.
        invars: Its arguments.
        outvars: Its results.
        name: What the calls of a shared body are called.
    """

    items: list[Item]
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    name: str = ""


@dataclass(eq=False)
class Repeated:
    """One copy of a segment: a call of its shared body.

    Attributes:
        body: The shared body.
        invars: The operands.
        outvars: The results.
        like: The first equation of the copy.
        source: Where the call says that it comes from.
    """

    body: Body
    invars: Sequence[Atom]
    outvars: Sequence[Var]
    like: JaxprEqn
    source: Any


Item: TypeAlias = "JaxprEqn | Repeated"


@dataclass(eq=False)
class Bodies:
    """All bodies of a program, and the program again with its calls written.

    Attributes:
        jaxpr: The program's jaxpr.
        found: A body for each jaxpr that calls may be written in, the outermost first.
        shared: The bodies that have been made since.
        names: The names of bodies that calls of the program have been marked with before.
    """

    jaxpr: AnyJaxpr
    found: dict[Jaxpr, Body] = field(default_factory=dict)
    shared: list[Body] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._add(self.jaxpr)

    def __iter__(self) -> Any:
        yield from self.found.values()
        yield from self.shared

    def _add(self, jaxpr: AnyJaxpr) -> None:
        todo = [jaxcompat.open_jaxpr(jaxpr)]
        while todo:
            body = todo.pop()
            if body in self.found:
                continue
            self.found[body] = Body(list(body.eqns), body.invars, body.outvars)
            for eqn in body.eqns:
                if not eqn.params or not holds_jaxpr(eqn.params.values()):
                    continue
                if jaxcompat.mark_of(eqn) != "plain":
                    self.names.add(eqn.params["name"])
                if _open(eqn):
                    todo += [jaxcompat.open_jaxpr(inner) for _, inner in sub_jaxprs(eqn)]

    def finish_early(self) -> None:
        """Put the equations of all bodies in the order in which repetition is looked for."""
        for jaxpr, body in self.found.items():
            body.items = list(finished_early(jaxpr.eqns, jaxpr.outvars))

    def open_wrappers(self) -> None:
        """Have who calls a shared body that is but a call itself call what that one calls.

        It is what is left of a body that has been found as a part of others.
        """
        wrappers = set()
        for body in self.shared:
            if len(body.items) == 1 and isinstance(body.items[0], Repeated):
                wrappers.add(body)
                body.items[0].body.name = body.name
        self.shared = [body for body in self.shared if body not in wrappers]
        for body in self:
            for i, item in enumerate(body.items):
                while isinstance(item, Repeated) and item.body in wrappers:
                    item = body.items[i] = _unwrapped(item)

    def written(self, mark: Mark) -> AnyJaxpr:
        """Return the program with its calls written, and marked."""
        return _Written(self, mark).closed(self.jaxpr)


def _unwrapped(call: Repeated) -> Repeated:
    """Return for the call of a body that is one call the same call of what that one calls."""
    inner = call.body.items[0]
    assert isinstance(inner, Repeated)
    given: dict[Atom, Atom] = dict(zip(call.body.invars, call.invars, strict=True))
    results = dict(zip(call.body.outvars, call.outvars, strict=True))
    return Repeated(
        inner.body,
        [v if type(v) is Literal else given[v] for v in inner.invars],
        [results.get(v, DropVar(v.aval)) for v in inner.outvars],
        call.like,
        call.source,
    )


def _open(eqn: JaxprEqn) -> bool:
    """Return True if calls may be written in the bodies of an equation.

    Those of a custom derivative stand for its function, which JAX differentiates in their place.
    """
    seen = view(eqn)
    return seen is not None and not isinstance(seen, CustomJVP)


class _Written:
    """The jaxprs of bodies with their calls, each made once."""

    def __init__(self, bodies: Bodies, mark: Mark):
        self._bodies = bodies
        self._mark = mark
        self._closed: dict[Any, AnyJaxpr] = {}
        self._calls: dict[Body, JaxprEqn] = {}

    def closed(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr with the calls in it, at every depth."""
        body = self._bodies.found.get(jaxcompat.open_jaxpr(jaxpr))
        if body is None:
            return jaxpr
        key = anchor(jaxpr), type(jaxpr)
        if key not in self._closed:
            eqns = list(map(self._equation, body.items))
            old = jaxcompat.open_jaxpr(jaxpr).eqns
            same = len(eqns) == len(old) and all(a is b for a, b in zip(eqns, old, strict=True))
            self._closed[key] = jaxpr if same else jaxcompat.replace_jaxpr(jaxpr, eqns=eqns)
        return self._closed[key]

    def _equation(self, item: Item) -> JaxprEqn:
        if not isinstance(item, Repeated):
            if item.params and holds_jaxpr(item.params.values()) and _open(item):
                return with_bodies(item, self.closed)
            return item
        if item.body not in self._calls:
            self._calls[item.body] = self._first_call(item)
        return self._calls[item.body].replace(
            invars=list(item.invars), outvars=list(item.outvars), source_info=item.source
        )

    def _first_call(self, item: Repeated) -> JaxprEqn:
        body = item.body
        closed = _jaxpr(body, list(map(self._equation, body.items)))
        eqn = call(closed, item.invars, item.outvars, item.like)
        mark = self._mark
        if mark == "unit" and writes_into_arguments(closed):
            mark = "call"
        context = jaxcompat.marked(item.like.ctx, mark, body.name)
        return eqn.replace(ctx=context, effects=closed.effects)


def _jaxpr(body: Body, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    debug = jaxcompat.DebugInfo("jit", body.name, ("",) * len(body.invars), None)
    return jaxcompat.new_jaxpr((), (), body.invars, body.outvars, eqns, debug)
