"""Make programs with variables from programs without.

    sown(program, early, rng)

The arguments numbered in `early` are the keys. A value computed from them is sown, as a variable,
where it meets a value computed from the other arguments: in the bodies of calls, loops and
branches, or before them. So the variables cut every path from a key to a result, unless `leak`, a
probability, makes it skip some. Other values are sown as well, early and late, under this tag and
another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, Cond, Scan, While, view
from jaxprtool.primitives import VARIABLE, sow_p
from tests.programs.case import Case
from tests.programs.rules import with_jvp_rule, with_vjp_rule
from tests.programs.variables import CONSTANT, KEY, LATE, Fact, both, flow, flow_equation

NEITHER = Fact(False, False)


def sown(
    program: Program, early: Sequence[int], rng: random.Random, *, leak: float = 0.0
) -> Program:
    """Return the program with sown values, so that the arguments `early` can be keys."""
    facts = [KEY if i in early else LATE for i in range(len(program.in_avals))]
    sower = _Sower(rng, leak)
    jaxpr = sower.body(program.jaxpr, facts, [True] * len(program.jaxpr.outvars))
    return program.replace(jaxpr=jaxpr)


def in_custom_rule(case: Case, number: int, kind: str) -> Case:
    """Return the case as the body of a function with a custom rule. One argument is a variable."""

    def body(*args: Any) -> Any:
        from jaxprtool import variable

        given = list(args)
        given[number] = variable(given[number], name="inside")
        return case.fun(*given)

    function = CUSTOM_RULES[kind](body)
    return Case(f"{case.name} in {kind}", function, case.args, case.kwargs, case.x64)


CUSTOM_RULES: dict[str, Callable[[Any], Any]] = {
    "custom_jvp": with_jvp_rule,
    "custom_vjp": lambda body: with_vjp_rule(body, saving=False),
    "custom_vjp, saving": lambda body: with_vjp_rule(body, saving=True),
}


@dataclass
class _Sower:
    """Sows values in one program."""

    rng: random.Random
    leak: float
    count: int = 0

    def body(
        self, closed: Any, facts: Sequence[Fact], ready: Sequence[bool], counts: bool = False
    ) -> Any:
        """Return a closed jaxpr with values sown, so that the marked results are ready.

        A value that determines the trip count of an enclosing loop (`counts`) is not sown, since
        the trip count would be unknown.
        """
        block = _Block(self, closed, facts, counts)
        for eqn in closed.eqns:
            block.add(eqn)
        return block.close(ready)

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability


class _Block:
    """A body under construction. `names` has the sown values of values."""

    def __init__(self, sower: _Sower, closed: Any, facts: Sequence[Fact], counts: bool):
        self.sower, self.closed, self.counts = sower, closed, counts
        self.eqns: list[Any] = []
        self.names: dict[Any, Any] = {}
        self.known = dict.fromkeys(closed.constvars, CONSTANT)
        self.known.update(zip(closed.invars, facts, strict=True))

    def of(self, atom: Any) -> Fact:
        return CONSTANT if isinstance(atom, jaxcompat.Literal) else self.known[atom]

    def renamed(self, atoms: Sequence[Any]) -> list[Any]:
        return [a if isinstance(a, jaxcompat.Literal) else self.names.get(a, a) for a in atoms]

    def add(self, eqn: Any) -> None:
        """Add one equation, and the sowing before it, in it and after it."""
        eqn = eqn.replace(invars=self.renamed(eqn.invars))
        facts = [self.of(atom) for atom in eqn.invars]
        if both(*facts) == NEITHER:
            inside = self.inside(eqn) if self.sower.happens(0.85) else None
            if inside is None:
                inside = self.with_early_sown(eqn, eqn.invars)
            eqn = inside
        self.emit(eqn)
        self.sow_at_random(eqn)

    def emit(self, eqn: Any) -> None:
        facts = [self.of(atom) for atom in eqn.invars]
        outs = flow_equation(eqn, facts, VARIABLE).outs
        self.known.update(zip(eqn.outvars, outs, strict=True))
        self.eqns.append(eqn)

    def close(self, ready: Sequence[bool]) -> Any:
        """Return the body. Results that must be ready and are not are sown first."""
        wanted = [v for v, flag in zip(self.closed.outvars, ready, strict=True) if flag]
        last = self.eqns[-1] if self.eqns else None
        outs = self.renamed(self.closed.outvars)
        names = self.sow_early(self.renamed(wanted), last)
        outs = [
            names.get(v, v) if flag and not isinstance(v, jaxcompat.Literal) else v
            for v, flag in zip(outs, ready, strict=True)
        ]
        return jaxcompat.new_jaxpr(
            self.closed.constvars,
            self.closed.consts,
            self.closed.invars,
            outs,
            self.eqns,
            self.closed.debug_info,
        )

    # --- sowing ---------------------------------------------------------------------------------

    def sow_early(self, atoms: Sequence[Any], like: Any) -> dict[Any, Any]:
        """Sow those of `atoms` that apply could not have. Return the substituted atoms."""
        early = dict.fromkeys(a for a in atoms if self.of(a) == KEY and _can_be_sown(a))
        groups = [list(early)] if self.sower.happens(0.3) else [[atom] for atom in early]
        names: dict[Any, Any] = {}
        for group in groups:
            if group and not self.sower.happens(self.sower.leak):
                results = self.sow(group, VARIABLE, like)
                names.update(zip(group, results, strict=True))
                if self.sower.happens(0.5):
                    self.replace(group, results)
        return names

    def with_early_sown(self, eqn: Any, atoms: Sequence[Any]) -> Any:
        """Return the equation with its early operands among `atoms` sown."""
        names = self.sow_early(atoms, eqn)
        invars = [a if isinstance(a, jaxcompat.Literal) else names.get(a, a) for a in eqn.invars]
        return eqn.replace(invars=invars)

    def sow_at_random(self, eqn: Any) -> None:
        values = [v for v in eqn.outvars if _can_be_sown(v)]
        if self.counts:
            values = [v for v in values if self.of(v) != CONSTANT]
        if not values or not self.sower.happens(0.15):
            return
        tag = VARIABLE if self.sower.happens(0.7) else "other"
        chosen = [self.sower.rng.choice(values)]
        self.replace(chosen, self.sow(chosen, tag, eqn))

    def replace(self, atoms: Sequence[Any], results: Sequence[Any]) -> None:
        """Replace values by their sown ones from here on."""
        for atom, result in zip(atoms, results, strict=True):
            for old, name in [*self.names.items(), (atom, atom)]:
                if name is atom:
                    self.names[old] = result

    def sow(self, atoms: list[Any], tag: str, like: Any) -> list[Any]:
        """Sow values together."""
        self.sower.count += 1
        mode = "append" if self.sower.happens(0.2) else "strict"
        results = [jaxcompat.Var(atom.aval) for atom in atoms]
        source, context = _place(like, self.closed)
        value = (
            atoms[0] if len(atoms) == 1 else dict(zip("abcdefghijklmnopqrst", atoms, strict=False))
        )
        params = {
            "tag": tag,
            "name": "many" if mode == "append" else f"v{self.sower.count}",
            "mode": mode,
            "tree": jax.tree.structure(jax.tree.map(lambda _: 0, value)),
        }
        self.emit(jaxcompat.new_jaxpr_eqn(atoms, results, sow_p, params, set(), source, context))
        return results

    # --- inside structured equations ------------------------------------------------------------

    def inside(self, eqn: Any) -> Any | None:
        """Return the equation with values sown inside. None if this is impossible or not tried."""
        structured = view(eqn)
        match structured:
            case Scan():
                return self.in_scan(structured)
            case While():
                return self.in_while(structured)
            case Cond():
                return self.in_cond(structured)
            case Call():
                facts = [self.of(atom) for atom in eqn.invars]
                ready = [False] * len(eqn.outvars)
                eqn = structured.rebuild(
                    body=self.sower.body(structured.body, facts, ready, self.counts)
                )
                return self.scoped(eqn)
        return None

    def scoped(self, eqn: Any) -> Any:
        if eqn.primitive.name != "jit" or not self.sower.happens(0.4):
            return eqn
        self.sower.count += 1
        return eqn.replace(params={**eqn.params, "name": f"nest:s{self.sower.count}"})

    def in_scan(self, scan: Scan) -> Any:
        n, k = len(scan.consts), len(scan.carry)
        eqn, facts, ready = self.loop_carry(scan.eqn, n, k)
        others = [self.of(atom) for atom in eqn.invars]
        given = [*others[:n], *facts, *others[n + k :]]
        ready = [*ready, *[False] * len(scan.ys)]
        return Scan.of(eqn).rebuild(body=self.sower.body(scan.body, given, ready, self.counts))

    def in_while(self, loop: While) -> Any | None:
        c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
        facts = [self.of(atom) for atom in loop.eqn.invars]
        fixed = flow_equation(loop.eqn, facts, VARIABLE).outs
        if flow(loop.cond, [*facts[:c], *fixed], VARIABLE).outs != [CONSTANT]:
            return None  # the trip count is unknown
        eqn, carry, ready = self.loop_carry(loop.eqn, b, len(loop.carry))
        given = [*(self.of(atom) for atom in eqn.invars[c:b]), *carry]
        return While.of(eqn).rebuild(body=self.sower.body(loop.body, given, ready, True))

    def loop_carry(self, eqn: Any, start: int, count: int) -> tuple[Any, list[Fact], list[bool]]:
        """A loop, the facts of its carry after sowing, and which of it must stay ready."""
        outs = flow_equation(eqn, [self.of(atom) for atom in eqn.invars], VARIABLE).outs[:count]
        ready = [fact == NEITHER for fact in outs]
        carry = eqn.invars[start : start + count]
        names = self.sow_early([a for a, flag in zip(carry, ready, strict=True) if flag], eqn)
        carry = [
            names.get(a, a) if flag and _can_be_sown(a) else a
            for a, flag in zip(carry, ready, strict=True)
        ]
        eqn = eqn.replace(invars=[*eqn.invars[:start], *carry, *eqn.invars[start + count :]])
        return eqn, [LATE if fact == NEITHER else fact for fact in outs], ready

    def in_cond(self, cond: Cond) -> Any:
        eqn = self.with_early_sown(cond.eqn, [cond.index])
        facts = [self.of(atom) for atom in eqn.invars]
        outs = flow_equation(eqn, facts, VARIABLE).outs
        ready = [fact == NEITHER for fact in outs]
        bodies = [
            self.sower.body(branch, facts[1:], ready, self.counts) for branch in cond.branches
        ]
        return Cond.of(eqn).rebuild(branches=tuple(bodies))


def _can_be_sown(atom: Any) -> bool:
    return (
        isinstance(atom, jaxcompat.Var)
        and not isinstance(atom, jaxcompat.DropVar)
        and isinstance(atom.aval, jax.core.ShapedArray)
    )


def _place(like: Any, closed: Any) -> tuple[Any, Any]:
    """Return the source line and the context of an equation, or of the empty program."""
    if like is None:
        like = jax.make_jaxpr(lambda x: x + 1)(1).eqns[0]
    return like.source_info, like.ctx
