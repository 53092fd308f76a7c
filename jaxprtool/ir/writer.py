"""Writing a jaxpr anew from the front, at every depth: what passes that replace values stand on.

`rewrite(jaxpr, visitor)` walks each body once, in order. `visitor(writer)` is asked once per body
for a *rule*; the rule gets each equation, whose operands are already what they have become and
whose bodies are already rewritten, and answers with None to keep it or with the atoms that its
results are from now on. Before it answers it may write equations of its own (`Writer.add`,
`emit`, `splice`) and make constants (`Writer.constant`); where its answer is None, or is not
taken, these are taken back. A body that several equations share is rewritten once and stays
shared; one in which nothing changes stays the very same object.

Compare `ir.rewrite.map_equations`, whose rule must define the equation's own variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var

#: What the results of an equation are from now on, one atom for each; None keeps the equation.
Rule = Callable[[JaxprEqn], Sequence[Atom] | None]
Visitor = Callable[["Writer"], Rule]


def rewrite(jaxpr: Any, visitor: Visitor, *, nested: bool = True, outside_in: bool = False) -> Any:
    """`jaxpr`, closed or open, rewritten by the rule that `visitor` gives for each of its bodies.

    Arguments and results stay in number and type, of the jaxpr and of each body in it. A rule's
    answer is not taken, and its equation kept, where a result would change its type; a weak type
    may change, except that of a body's own results. The Python closures of custom derivatives are
    left alone, and so is what a call in the same body donates. With `nested=False` only the
    outermost body is rewritten. With `outside_in=True` the rule sees an equation before its bodies
    are rewritten, which happens only if it is kept.
    """
    done: dict[tuple[Any, bool], Any] = {}

    def body_of(body: Any, constants: bool) -> Any:
        key = body, constants
        if key not in done:
            done[key] = Writer(body, constants, inside, outside_in).written(visitor)
        return done[key]

    def inside(eqn: JaxprEqn) -> JaxprEqn:
        if not nested or not holds_jaxpr(eqn.params.values()):
            return eqn
        return with_bodies(eqn, partial(body_of, constants=traits(eqn).holds_constants))

    return body_of(jaxpr, True)


class Writer:
    """One body while it is written anew: its equations so far, and what its variables are now."""

    def __init__(
        self,
        body: Any,
        holds_constants: bool,
        inside: Callable[[JaxprEqn], JaxprEqn],
        outside_in: bool = False,
    ):
        self.body = body
        #: Whether `constant` may give arrays; scalars are literals and always possible.
        self.holds_constants = holds_constants
        self._inside = inside
        self._outside_in = outside_in
        jaxpr = jaxcompat.open_jaxpr(body)
        self.eqns: list[JaxprEqn] = []
        #: Old variables that have gone, and the atoms in their place.
        self.became: dict[Var, Atom] = {}
        #: The equation that defines a variable, of those written so far.
        self.definition: dict[Var, JaxprEqn] = {}
        self._results = {v for v in jaxpr.outvars if isinstance(v, Var)}
        #: Arrays that a call deletes: under a second name one might be read after that.
        self.donated = _donated(jaxpr.eqns)
        self.constvars = list(jaxpr.constvars)
        closed = body if isinstance(body, jaxcompat.ClosedJaxpr) else None
        self.consts = list(closed.consts) if closed is not None else []
        #: The values of constants of the body, by variable.
        self.constant_values: dict[Var, Any] = dict(zip(self.constvars, self.consts, strict=False))
        #: Their variables by the identity of the value and its type, once one is asked for.
        self._constant_of: dict[tuple[int, Any], Var] | None = None

    # --- what a rule may ask and do ------------------------------------------------------------

    def now(self, atom: Atom) -> Atom:
        """What an atom of the old body is in the new one."""
        return atom if type(atom) is Literal else self.became.get(atom, atom)

    def value(self, atom: Atom) -> Any:
        """The value of an atom that is a literal or a constant; None for every other."""
        if type(atom) is Literal:
            return atom.val
        return self.constant_values.get(atom)

    def defined_by(self, atom: Atom, primitive: str) -> JaxprEqn | None:
        """The equation of this primitive that defines an atom; None if it is defined otherwise."""
        if type(atom) is Literal:
            return None
        eqn = self.definition.get(atom)
        return eqn if eqn is not None and eqn.primitive.name == primitive else None

    def add(self, eqn: JaxprEqn) -> list[Var]:
        """Write an equation as it is; gives its results."""
        self.eqns.append(eqn)
        for var in eqn.outvars:
            self.definition[var] = eqn
        return eqn.outvars

    def emit(
        self, primitive: Any, operands: Sequence[Atom], params: dict[str, Any], like: JaxprEqn
    ) -> list[Var]:
        """Write an equation without effects, with result types, source line and context of `like`.

        `primitive` is the primitive itself, `like.primitive` or that of another equation.
        """
        outs = [Var(v.aval) for v in like.outvars]
        return self.add(
            jaxcompat.new_jaxpr_eqn(
                list(operands), outs, primitive, params, set(), like.source_info, like.ctx
            )
        )

    def trace(
        self, fun: Callable[..., Any], operands: Sequence[Atom], like: JaxprEqn
    ) -> list[Atom]:
        """Write what a JAX function computes of these operands, as if at `like`; gives its results.

        The function takes and gives flat values, and is traced in the context of `like`.
        """
        closed = jaxcompat.traced_like(like, fun, operands)
        return self.splice(closed, operands, like, keep_source=False)

    def splice(
        self,
        closed: Any,
        operands: Sequence[Atom],
        call: JaxprEqn,
        *,
        keep_source: bool = True,
        rule: Rule | None = None,
    ) -> list[Atom]:
        """Write the equations of a closed jaxpr, on fresh variables; gives its results.

        They bear their own source lines in the scopes of `call`, or its own source line; calls
        among them donate nothing. A rule
        is asked about each, as if it stood in this body already; it answers as a visitor's does,
        and is the one who has to mind types. Raises ValueError if the jaxpr has constants that
        this body cannot hold.
        """
        jaxpr = jaxcompat.open_jaxpr(closed)
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            names[var] = self.constant(const, var.aval)
        source_of = jaxcompat.source_under(call) if keep_source else lambda _: call.source_info
        for eqn in jaxpr.eqns:
            ins = [v if type(v) is Literal else names[v] for v in eqn.invars]
            outs = [v if type(v) is DropVar else Var(v.aval) for v in eqn.outvars]
            changes: dict[str, Any] = {}
            if eqn.effects:
                names.update(zip(eqn.outvars, outs, strict=True))
                changes["effects"] = jaxcompat.renamed_effects(eqn.effects, names)
            if any(eqn.params.get("donated_invars", ())):
                # Of a call inside a call JAX takes no memory; in this body it would.
                changes["params"] = {**eqn.params, "donated_invars": (False,) * len(ins)}
            source = source_of(eqn.source_info)
            new = eqn.replace(invars=ins, outvars=outs, source_info=source, **changes)
            atoms: Sequence[Atom] | None = None
            if rule is not None:
                written, held = len(self.eqns), len(self.constvars)
                atoms = rule(new)
                if atoms is None:
                    self._take_back(written, held)
                    new = self._inside(new) if self._outside_in else new
            names.update(zip(eqn.outvars, self.add(new) if atoms is None else atoms, strict=True))
        return [v if type(v) is Literal else names[v] for v in jaxpr.outvars]

    def constant(self, value: Any, aval: Any) -> Atom:
        """An atom for a constant of this type: a literal for a scalar, else a constant of the body.

        Raises ValueError for an array if the body cannot hold it.
        """
        if literal := jaxcompat.as_literal(value, aval):
            return literal
        if self._constant_of is None:
            known = self.constant_values.items()
            self._constant_of = {(id(held), var.aval): var for var, held in known}
        if (id(value), aval) in self._constant_of:
            return self._constant_of[id(value), aval]
        if not self.holds_constants:
            raise ValueError("this body cannot hold constants")
        var = Var(aval)
        self.constvars.append(var)
        self.consts.append(value)
        self.constant_values[var] = value
        self._constant_of[id(value), aval] = var
        return var

    def can_hold(self, closed: Any) -> bool:
        """Whether the constants of a closed jaxpr can be constants of this body."""
        return self.holds_constants or all(
            jaxcompat.as_literal(const, var.aval)
            for var, const in zip(closed.constvars, closed.consts, strict=True)
        )

    # --- the walk ------------------------------------------------------------------------------

    def written(self, visitor: Visitor) -> Any:
        """The body as the rule of `visitor` rewrites it; the same object if nothing changes."""
        jaxpr = jaxcompat.open_jaxpr(self.body)
        became, rule, inside = self.became, visitor(self), self._inside
        before, after = (None, inside) if self._outside_in else (inside, None)
        eqns, constvars = self.eqns, self.constvars
        changed = False
        for old in jaxpr.eqns:
            eqn = old
            if became:
                operands = [v if type(v) is Literal else became.get(v, v) for v in eqn.invars]
                if any(new is not v for new, v in zip(operands, eqn.invars, strict=True)):
                    eqn = eqn.replace(invars=operands)
                    if eqn.effects:
                        effects = jaxcompat.renamed_effects(eqn.effects, became)
                        eqn = eqn.replace(effects=effects)
            if before is not None and eqn.params:
                eqn = before(eqn)
            written, held = len(eqns), len(constvars)
            atoms = rule(eqn)
            if atoms is None or not self._take(eqn.outvars, atoms, written):
                self._take_back(written, held)
                if after is not None and eqn.params:
                    eqn = after(eqn)
                self.add(eqn)
                changed |= eqn is not old
            else:
                changed = True
        outvars = list(map(self.now, jaxpr.outvars))
        if not changed and len(self.constvars) == len(jaxpr.constvars):
            return self.body
        return jaxcompat.replace_jaxpr(
            self.body,
            constvars=self.constvars,
            consts=self.consts,
            invars=jaxpr.invars,
            outvars=outvars,
            eqns=self.eqns,
            debug_info=jaxpr.debug_info,
        )

    def _take_back(self, written: int, held: int) -> None:
        """Forget all but the first of the equations and constants."""
        if len(self.eqns) > written:
            del self.eqns[written:]
        if len(self.constvars) == held:
            return
        for var in self.constvars[held:]:
            del self.constant_values[var]
        del self.constvars[held:], self.consts[held:]
        self._constant_of = None

    def _take(self, outvars: Sequence[Var], atoms: Sequence[Atom], written: int) -> bool:
        """Let results be these atoms, if all may be; equations after `written` are the rule's."""
        for var, atom in zip(outvars, atoms, strict=True):
            if not (var.aval == atom.aval or self._may_change(var, atom.aval)):
                return False
            if self.donated and var is not atom and not self._may_rename(var, atom, written):
                return False
        for var, atom in zip(outvars, atoms, strict=True):
            if var is not atom:
                self.became[var] = atom
        return True

    def _may_rename(self, var: Var, atom: Atom, written: int) -> bool:
        """Whether no donated array gets a second name: what takes its place must be new."""
        if type(atom) is not Literal and atom in self.donated:
            return False
        new = (v for eqn in self.eqns[written:] for v in eqn.outvars)
        return var not in self.donated or any(v is atom for v in new)

    def _may_change(self, var: Var, aval: Any) -> bool:
        if isinstance(var, DropVar):
            return True
        if var in self._results or not hasattr(var.aval, "weak_type"):
            return False
        return bool(var.aval.strip_weak_type() == aval.strip_weak_type())


def _donated(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The operands whose memory the calls among equations may take for their results."""
    return {
        atom
        for eqn in eqns
        if eqn.primitive.name == "jit" and any(eqn.params["donated_invars"])
        for atom, given in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        if given and isinstance(atom, Var)
    }


def occurs(jaxpr: Any, named: Callable[[str], bool], known: dict[Any, bool]) -> bool:
    """Whether an equation of a primitive with such a name is in a jaxpr, at any depth.

    `known` keeps what was found of each body; it is for one question.
    """
    if jaxpr not in known:
        known[jaxpr] = any(
            named(eqn.primitive.name)
            or any(occurs(body, named, known) for _, body in sub_jaxprs(eqn))
            for eqn in jaxpr.eqns
        )
    return known[jaxpr]
