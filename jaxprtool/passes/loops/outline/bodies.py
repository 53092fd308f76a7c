"""The bodies of a program while its repeated segments become calls.

An `OutlineBody` is a jaxpr, or one of the new shared bodies, as a list of items: equations, and
`Repeated` ones, which will be calls. Items are replaced repeatedly; the calls are written at the
end, from the innermost bodies outwards, since a shared body may contain calls itself by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import anchor
from jaxprtool.ir.basics.reachability import reachable
from jaxprtool.ir.core.equations import bodies, holders, substitute
from jaxprtool.ir.core.structured import CustomJVP, call, holds_jaxpr, view
from jaxprtool.ir.rewriting.rewrite import with_bodies
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Mark,
    Var,
)
from jaxprtool.passes.loops.outline.in_place import writes_into_arguments


@dataclass(eq=False)
class OutlineBody:
    """The items of one jaxpr.

    Attributes:
        items: Its equations and calls, in order.
        invars: Its arguments.
        outvars: Its results.
        name: The name of the calls of a shared body.
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
        source: The source info of the call.
    """

    body: OutlineBody
    invars: Sequence[Atom]
    outvars: Sequence[Var]
    like: JaxprEqn
    source: Any


Item: TypeAlias = "JaxprEqn | Repeated"


@dataclass(eq=False)
class Bodies:
    """All bodies of a program, from which the program is rebuilt with its calls.

    Attributes:
        jaxpr: The program's jaxpr.
        found: A body for each jaxpr that calls may be written in, the outermost first.
        shared: The new shared bodies.
        names: The body names that calls of the program are already marked with.
    """

    jaxpr: AnyJaxpr
    found: dict[Jaxpr, OutlineBody] = field(default_factory=dict)
    shared: list[OutlineBody] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for body in reachable((jaxcompat.open_jaxpr(self.jaxpr),), _open_jaxprs):
            self.found[body] = OutlineBody(list(body.eqns), body.invars, body.outvars)
            marked = (jaxcompat.marked_name(eqn) for eqn, _ in holders(body))
            self.names.update(name for name in marked if name is not None)

    def __iter__(self) -> Any:
        yield from self.found.values()
        yield from self.shared

    def open_calls(self) -> None:
        """Inline the calls of shared bodies that are called once, or consist of one call.

        Such bodies remain when they were found as a part of others.
        """
        self._drop_unused()
        mentions = Counter(
            item.body for body in self for item in body.items if isinstance(item, Repeated)
        )
        removed = set()
        for body in self.shared:
            wraps = len(body.items) == 1 and isinstance(body.items[0], Repeated)
            if wraps:
                body.items[0].body.name = body.name
            if wraps or mentions[body] < 2:
                removed.add(body)
        self.shared = [body for body in self.shared if body not in removed]
        for body in self if removed else ():
            body.items = list(chain.from_iterable(_without(removed, item) for item in body.items))

    def _drop_unused(self) -> None:
        """Forget the bodies that are no longer held or called: those of loops in copies."""
        start = self.found[jaxcompat.open_jaxpr(self.jaxpr)]
        reached = set(reachable((start,), self._inside))
        self.found = {jaxpr: body for jaxpr, body in self.found.items() if body in reached}
        self.shared = [body for body in self.shared if body in reached]

    def _inside(self, body: OutlineBody) -> Iterator[OutlineBody]:
        for item in body.items:
            if isinstance(item, Repeated):
                yield item.body
            elif item.params and holds_jaxpr(item.params.values()) and _open(item):
                yield from (self.found[jaxpr] for _, jaxpr in bodies(item))

    def build(self, mark: Mark) -> AnyJaxpr:
        """Return the program with its calls written, and marked."""
        return _Builder(self, mark).closed(self.jaxpr)


def first_equation(items: Sequence[Item]) -> JaxprEqn:
    """Return the first equation among items; for a call, the first of its copy."""
    first = items[0]
    return first.like if isinstance(first, Repeated) else first


def _without(removed: Collection[OutlineBody], item: Item) -> Iterator[Item]:
    """Yield an item; for a call of one of these bodies, its equations on fresh variables."""
    if not isinstance(item, Repeated) or item.body not in removed:
        yield item
        return
    atoms: dict[Atom, Atom] = dict(zip(item.body.invars, item.invars, strict=True))
    results = dict(zip(item.body.outvars, item.outvars, strict=True))
    source_of = jaxcompat.source_under(item.like.replace(source_info=item.source))
    for inner in item.body.items:
        operands = substitute(inner.invars, atoms)
        outs = [
            out if type(out := results.get(v, v)) is not DropVar and out is not v else _fresh(v)
            for v in inner.outvars
        ]
        atoms.update(zip(inner.outvars, outs, strict=True))
        yield from _without(
            removed, copied(inner, operands, outs, source_of(source_of_item(inner)))
        )


def _fresh(var: Var) -> Var:
    return DropVar(var.aval) if type(var) is DropVar else Var(var.aval)


def copied(item: Item, operands: list[Atom], outs: list[Var], source: Any) -> Item:
    """Return an item with other operands, results and source info."""
    if isinstance(item, Repeated):
        return Repeated(item.body, operands, outs, item.like, source)
    return item.replace(invars=operands, outvars=outs, source_info=source)


def source_of_item(item: Item) -> Any:
    """Return the `source_info` of an item."""
    return item.source if isinstance(item, Repeated) else item.source_info


def _open(eqn: JaxprEqn) -> bool:
    """Return True if calls may be written in the bodies of an equation.

    JAX differentiates the function of a custom derivative in place of its body.
    """
    seen = view(eqn)
    return seen is not None and not isinstance(seen, CustomJVP)


def _open_jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Return the bodies in a jaxpr that calls may be written in."""
    return (body for eqn, held in holders(jaxpr) if _open(eqn) for _, body in held)


class _Builder:
    """The rebuilt jaxprs of bodies with their calls, each made once."""

    def __init__(self, bodies: Bodies, mark: Mark):
        self._bodies = bodies
        self._mark = mark
        self._closed: dict[Any, AnyJaxpr] = {}
        self._calls: dict[OutlineBody, JaxprEqn] = {}

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


def _jaxpr(body: OutlineBody, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    debug = jaxcompat.DebugInfo("jit", body.name, ("",) * len(body.invars), None)
    return jaxcompat.new_jaxpr((), (), body.invars, body.outvars, eqns, debug)
