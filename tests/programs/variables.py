"""The reference for `unzip`: evaluate a program with other values for its variables.

It shares no code with `unzip`. It walks the original jaxpr equation by equation, runs loops in
Python, and looks up, or records, the value of each variable where it is sown. A variable inside
loops has one index per loop.

Two facts are tracked for each value: whether it depends on keys and constants only (`early`), and
whether it depends on variables, other arguments and constants only (`ready`). An effect depends on
its operands and also on `reached`: the conditions of enclosing branches and loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.primitives import scope_of
from tests.programs.interpreter import Call, Cond, Scan, While, closed, read, rows_of, stacked
from tests.programs.rules import RULE_FACTOR
from tests.programs.stepwise import bind

Path = tuple[str, ...]

CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")


class Fact(NamedTuple):
    """Which of init and apply can compute a value."""

    early: bool
    ready: bool


CONSTANT, KEY, LATE = Fact(True, True), Fact(True, False), Fact(False, True)


def both(*facts: Fact) -> Fact:
    """Return the fact of a result computed from values with these facts."""
    return Fact(all(f.early for f in facts), all(f.ready for f in facts))


@dataclass(frozen=True)
class Site:
    """A variable where it is sown: its path, its equation, and the lengths of enclosing loops."""

    path: Path
    eqn: Any
    lengths: tuple[int | None, ...] = ()

    def inside(self, scope: str | None = None, length: Any = ()) -> Site:
        """Return the site as seen from outside a scope or a loop."""
        path = self.path if scope is None else (scope, *self.path)
        lengths = self.lengths if length == () else (length, *self.lengths)
        return Site(path, self.eqn, lengths)


# --- which values are variables -----------------------------------------------------------------


@dataclass
class Flow:
    """The facts of a jaxpr or an equation, given the facts of its operands.

    `outs` are the facts of its results, `sites` its variables in program order, and `stuck` the
    equations with an effect that neither init nor apply can execute.
    """

    outs: list[Fact]
    sites: list[Site] = field(default_factory=list)
    stuck: list[Any] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        """True if apply can compute all results, and each effect belongs to one program."""
        return all(out.ready for out in self.outs) and not self.stuck

    def inside(self, outs: list[Fact], scope: str | None = None, **loop: Any) -> Flow:
        """Return the flow of the equation that contains this jaxpr and has results `outs`."""
        return Flow(outs, [site.inside(scope, **loop) for site in self.sites], self.stuck)


def flow(jaxpr: Any, facts: Sequence[Fact], tag: str, reached: Fact = CONSTANT) -> Flow:
    """Return the flow through a closed jaxpr."""
    known = dict.fromkeys(jaxpr.constvars, CONSTANT)
    known.update(zip(jaxpr.invars, facts, strict=True))
    found = Flow([])

    def of(atom: Any) -> Fact:
        return CONSTANT if isinstance(atom, jaxcompat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inner = flow_equation(eqn, [of(atom) for atom in eqn.invars], tag, reached)
        known.update(zip(eqn.outvars, inner.outs, strict=True))
        found.sites += inner.sites
        found.stuck += inner.stuck
    found.outs = [of(atom) for atom in jaxpr.outvars]
    return found


def flow_equation(eqn: Any, facts: list[Fact], tag: str, reached: Fact = CONSTANT) -> Flow:
    """Return the flow through one equation."""
    found = _flow_inside(eqn, facts, tag, reached)
    whole = _as_a_whole(eqn, facts, reached)
    # An effect on a ref of its own may happen in any program that has all operands of the equation,
    # in both if both have them.
    if not found.sites and (all(whole) or (found.stuck and any(whole))):
        return Flow([whole] * len(eqn.outvars))
    return found


def _flow_inside(eqn: Any, facts: list[Fact], tag: str, reached: Fact) -> Flow:
    if eqn.primitive.name == "sow" and eqn.params["tag"] == tag and both(*facts).early:
        return Flow([CONSTANT] * len(eqn.outvars), [Site((eqn.params["name"],), eqn)])
    name = eqn.primitive.name
    match read(eqn):
        case Scan() as scan:
            return _flow_scan(scan, facts, tag, reached)
        case While() as loop:
            return _flow_while(loop, facts, tag, reached)
        case Cond(branches):
            taken = both(reached, facts[0])
            sides = [flow(branch, facts[1:], tag, taken) for branch in branches]
            if not any(side.sites for side in sides):
                # All effects in a branch depend on the index too.
                given = [both(facts[0], fact) for fact in facts[1:]]
                sides = [flow(branch, given, tag, taken) for branch in branches]
            outs = [both(facts[0], *each) for each in zip(*(s.outs for s in sides), strict=True)]
            sites, stuck = ([x for s in sides for x in getattr(s, k)] for k in ("sites", "stuck"))
            return Flow(outs, sites, stuck)
        case Call(body) if name in CUSTOM_RULES:
            # It is kept as a whole, with its custom rules.
            inner = flow(body, facts, tag, reached)
            out = both(*facts)
            if inner.sites:
                ready = all(out.ready for out in inner.outs)
                out = Fact(ready and out.early, ready)
            return inner.inside([out] * len(eqn.outvars))
        case Call(body):
            inner = flow(body, facts, tag, reached)
            return inner.inside(inner.outs, scope_of(eqn))
    if name == "shard_map":
        inner = flow(closed(eqn.params["jaxpr"]), facts, tag, reached)
        return inner.inside(inner.outs, scope_of(eqn))
    out = _as_a_whole(eqn, facts, reached)
    stuck = [eqn] if _has_lasting_effect(eqn) and not any(out) else []
    return Flow([out] * len(eqn.outvars), stuck=stuck)


def _as_a_whole(eqn: Any, facts: list[Fact], reached: Fact) -> Fact:
    """Return the fact of an equation that is not split. An effect happens in one program."""
    out = both(*facts)
    if _meets_ref(eqn) or _has_lasting_effect(eqn):
        out = both(out, reached)
        return LATE if out.ready else out
    return out


def _has_lasting_effect(eqn: Any) -> bool:
    return not all(map(jaxcompat.is_removable_effect, eqn.effects))


def _meets_ref(eqn: Any) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    return any(isinstance(atom.aval, jaxcompat.AbstractRef) for atom in atoms)


def _flow_scan(scan: Scan, facts: list[Fact], tag: str, reached: Fact) -> Flow:
    n, k = scan.consts, scan.carry
    carry = facts[n : n + k]
    while True:
        body = flow(scan.body, [*facts[:n], *carry, *facts[n + k :]], tag, reached)
        new = [both(*pair) for pair in zip(carry, body.outs[:k], strict=True)]
        if new == carry:
            return body.inside([*carry, *body.outs[k:]], length=scan.length)
        carry = new


def _flow_while(loop: While, facts: list[Fact], tag: str, reached: Fact) -> Flow:
    c, b = loop.cond_consts, loop.cond_consts + loop.body_consts
    carry = facts[b:]
    while True:
        (more,) = flow(loop.cond, [*facts[:c], *carry], tag, reached).outs
        body = flow(loop.body, [*facts[c:b], *carry], tag, both(reached, more))
        new = [both(more, *pair) for pair in zip(carry, body.outs, strict=True)]
        if new == carry:
            return body.inside(carry, length=None)
        carry = new


# --- values ---------------------------------------------------------------------------------------


@dataclass
class Reference:
    """One evaluation, with the variables in `given`, or recording them if there are none.

    `recorded` has, by path, one entry for each time that the path is sown in the program: the
    leaves of the value by the indices of the enclosing loops.
    """

    tag: str
    given: Mapping[str, Any] | None = None
    recorded: dict[Path, list[dict[tuple[int, ...], list[Any]]]] = field(default_factory=dict)
    _count: Counter[Path] = field(default_factory=Counter)
    _reached: Fact = CONSTANT

    def evaluate(self, closed: Any, facts: Sequence[Fact], args: Sequence[Any]) -> list[Any]:
        """Return the results of a closed jaxpr on flat arguments."""
        return self._run(closed, list(facts), list(args), (), ())[0]

    def _run(
        self, jaxpr: Any, facts: list[Fact], args: list[Any], scopes: Path, at: tuple[int, ...]
    ) -> tuple[list[Any], list[Fact]]:
        env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        known = dict.fromkeys(jaxpr.constvars, CONSTANT)
        known.update(zip(jaxpr.invars, facts, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, jaxcompat.Literal) else env[atom]

        def of(atom: Any) -> Fact:
            return CONSTANT if isinstance(atom, jaxcompat.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            ins, operands = ([f(atom) for atom in eqn.invars] for f in (of, value))
            outs = flow_equation(eqn, ins, self.tag, self._reached).outs
            with eqn.ctx.manager:
                results = self._equation(eqn, ins, operands, scopes, at)
            known.update(zip(eqn.outvars, outs, strict=True))
            env.update(zip(eqn.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars], [of(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: Any, facts: list[Fact], operands: list[Any], scopes: Path, at: tuple[int, ...]
    ) -> Sequence[Any]:
        if eqn.primitive.name == "sow":
            value = operands[: len(eqn.outvars)]
            if eqn.params["tag"] == self.tag and both(*facts).early:
                return self._variable(eqn, value, scopes, at)
            return value
        match read(eqn):
            case Scan() as scan:
                return self._scan(eqn, scan, facts, operands, scopes, at)
            case While() as loop:
                return self._while(loop, facts, operands, scopes, at)
            case Cond(branches):
                index = min(max(int(operands[0]), 0), len(branches) - 1)
                # All branches, so that the variables of each are visited.
                sides = {}
                outside, self._reached = self._reached, both(self._reached, facts[0])
                for i, branch in enumerate(branches):
                    given = operands[1:] if i == index else _with_refs_copied(operands[1:])
                    if i == index or flow(branch, facts[1:], self.tag, self._reached).sites:
                        sides[i] = self._run(branch, facts[1:], given, scopes, at)[0]
                self._reached = outside
                return sides[index]
            case Call(body) if eqn.primitive.name in CUSTOM_RULES:
                if flow(body, facts, self.tag, self._reached).sites:
                    # The rules of `tests.programs.rules`, which depend on the operands only.
                    scaled = [_scaled(x) for x in operands]
                    return self._run(body, facts, scaled, scopes, at)[0]
            case Call(body):
                scope = scope_of(eqn)
                inner = scopes if scope is None else (*scopes, scope)
                return self._run(body, facts, operands, inner, at)[0]
        return bind(eqn, operands)

    def _variable(self, eqn: Any, value: list[Any], scopes: Path, at: Any) -> list[Any]:
        path = (*scopes, eqn.params["name"])
        number = self._count[path]
        self._count[path] += 1
        if self.given is None:
            entries = self.recorded.setdefault(path, [])
            entries += [{} for _ in range(number + 1 - len(entries))]
            entries[number][at] = value
            return value
        found: Any = self.given
        for name in path:
            found = found[name]
        found = found[number] if eqn.params["mode"] == "append" else found
        return [leaf[at] if at else leaf for leaf in jax.tree.leaves(found)]

    def _scan(
        self, eqn: Any, scan: Scan, facts: list[Fact], operands: list[Any], scopes: Path, at: Any
    ) -> list[Any]:
        n, k = scan.consts, scan.carry
        consts, carry = operands[:n], operands[n : n + k]
        columns = [x if _is_traced(x) else rows_of(x) for x in operands[n + k :]]
        found = _flow_scan(scan, facts, self.tag, self._reached)
        inner = [*facts[:n], *found.outs[:k], *facts[n + k :]]
        start, rows = self._count.copy(), {}
        for i in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            self._count = start.copy()
            given = [*consts, *carry, *(column[i] for column in columns)]
            results, _ = self._run(scan.body, inner, given, scopes, (*at, i))
            carry, rows[i] = results[:k], results[k:]
        self._count = start + Counter((*scopes, *site.path) for site in found.sites)
        ys = [[rows[i][j] for i in sorted(rows)] for j in range(len(eqn.outvars) - k)]
        pairs = zip(ys, eqn.outvars[k:], strict=True)
        return [
            *carry,
            *(jnp.stack(y) if any(map(_is_traced, y)) else stacked(y, var) for y, var in pairs),
        ]

    def _while(
        self, loop: While, facts: list[Fact], operands: list[Any], scopes: Path, at: Any
    ) -> list[Any]:
        c, b = loop.cond_consts, loop.body_consts
        cond_consts, consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
        found = _flow_while(loop, facts, self.tag, self._reached)
        inner = found.outs
        start, i = self._count.copy(), 0
        while True:
            (more,), _ = self._run(loop.cond, [*facts[:c], *inner], [*cond_consts, *carry], (), ())
            if not more:
                break
            self._count = start.copy()
            carry, _ = self._run(
                loop.body, [*facts[c : c + b], *inner], [*consts, *carry], scopes, (*at, i)
            )
            i += 1
        self._count = start + Counter((*scopes, *site.path) for site in found.sites)
        return carry


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _with_refs_copied(values: Sequence[Any]) -> list[Any]:
    return [
        jax.new_ref(x[...]) if isinstance(jax.typeof(x), jaxcompat.AbstractRef) else x
        for x in values
    ]


@jax.custom_jvp
def _scaled(x: Any) -> Any:
    return x


@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    (t,) = tangents
    inexact = jnp.issubdtype(t.dtype, jnp.inexact)
    return primals[0], t * jnp.asarray(RULE_FACTOR, t.dtype) if inexact else t
