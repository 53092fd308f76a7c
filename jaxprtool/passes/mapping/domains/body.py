"""Rewrite a jaxpr, in one forward pass over its equations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.weak_types import keep_weak_types
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.mapping.domains.domain import Compute, K, Rewritten
from jaxprtool.passes.mapping.domains.regions import by_edges
from jaxprtool.passes.mapping.domains.templates import Template, has_float, instantiated


@dataclass(eq=False)
class BodyBuilder(Generic[K]):
    """Builds one new body.

    Attributes:
        domain: The domain of the program.
        context: The context of the equations besides their operands; see `Domain.context`.
        eqns: The equations written so far.
        values: The atom of the new body that holds each variable of the old one, and its kind.
        extras: The extra arguments of the new body, by name.
        consts: The constants that rules have used, by id.
        source: The source info of the equation that is being rewritten.
    """

    domain: Any
    context: Any = None
    eqns: list[JaxprEqn] = field(default_factory=list)
    values: dict[Var, tuple[Atom, K]] = field(default_factory=dict)
    extras: dict[Any, Var] = field(default_factory=dict)
    consts: dict[int, tuple[Var, Any]] = field(default_factory=dict)
    source: Any = jaxcompat.NO_SOURCE
    _facts: dict[Hashable, Atom] = field(default_factory=dict)

    def body(
        self, body: ClosedJaxpr, kinds: Sequence[K], wanted: Sequence[K | None]
    ) -> Rewritten[K]:
        """Write the new form of a closed jaxpr; see `Domain.body`."""
        invars = self.arguments(body.invars, kinds)
        self.equations(jaxcompat.open_jaxpr(body))
        self.source = jaxcompat.NO_SOURCE
        outvars, found = self.results(body.outvars, wanted)
        made = self.consts.values()
        alike = not self.extras and len(outvars) == len(body.outvars)
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *(var for var, _ in made)],
            consts=[*body.consts, *(value for _, value in made)],
            invars=[*self.extras.values(), *invars],
            outvars=outvars,
            eqns=self.eqns,
            debug_info=body.debug_info if alike else None,
        )
        return Rewritten(new, tuple(self.extras), tuple(found))

    def arguments(self, variables: Sequence[Var], kinds: Sequence[K]) -> list[Var]:
        """Return the arguments of the new body that hold those of the old body."""
        invars = self.outs(variables, kinds)
        for var, kind, new in zip(variables, kinds, invars, strict=True):
            self.bind(var, kind, new)
        return invars

    def equations(self, jaxpr: Jaxpr) -> None:
        """Write the new form of each equation."""
        for eqn in jaxpr.eqns:
            self.source = eqn.source_info
            try:
                self.rewrite(eqn)
            except Exception as error:  # a rule of JAX or a plug-in may raise anything
                if (other := self.domain.failed(eqn, error)) is error:
                    raise
                raise other from error

    def results(
        self, atoms: Sequence[Atom], wanted: Sequence[K | None]
    ) -> tuple[list[Atom], list[K]]:
        """Return the atoms of the results and their kinds: the wanted kinds, or any where None."""
        pairs = zip(atoms, wanted, strict=True)
        kinds = [self.kind(atom) if want is None else want for atom, want in pairs]
        return [*map(self.held, atoms, kinds)], kinds

    def rewrite(self, eqn: JaxprEqn) -> None:
        """Write the new form of an equation."""
        raise NotImplementedError

    # --- values ---------------------------------------------------------------------------------

    def kind(self, atom: Atom) -> K:
        """Return the kind of an atom of the old body."""
        found = None if type(atom) is Literal else self.values.get(atom)
        return self.domain.kind_of(atom) if found is None else found[1]

    def held(self, atom: Atom, kind: K) -> Atom:
        """Return the atom that holds an atom of the old body as this kind; convert it if needed."""
        found = None if type(atom) is Literal else self.values.get(atom)
        return atom if found is None else found[0]

    def bind(self, var: Var, kind: K, atom: Atom) -> None:
        """Record that an atom of the new body holds a variable of the old one, as this kind."""
        self.values[var] = atom, kind

    def outs(self, variables: Sequence[Var], kinds: Sequence[K]) -> list[Var]:
        """Return variables for results of these kinds: new ones if their type changes."""
        avals = [self.domain.aval(k, v.aval) for v, k in zip(variables, kinds, strict=True)]
        return [
            var if aval is var.aval else type(var)(aval)
            for var, aval in zip(variables, avals, strict=True)
        ]

    def extra(self, name: Any) -> Var:
        """Return the extra argument of the new body with this name."""
        if name not in self.extras:
            self.extras[name] = Var(self.domain.extra_aval(name))
        return self.extras[name]

    def fact(self, fact: Any) -> Atom:
        """Return the atom of a value that rules use, which is computed once in this body."""
        if fact not in self._facts:
            self._facts[fact] = self.made_fact(fact)
        return self._facts[fact]

    def made_fact(self, fact: tuple[str, Any]) -> Atom:
        """Compute a fact: an extra argument, or a value computed from a size."""
        what, value = fact
        if what == "extra":
            return self.extra(value)
        facts = self.domain.facts
        before = facts[: facts.index(what)]
        return self.computed(fact, lambda rules: rules.fact(what, value), [], [value], before)

    def constant(self, value: Any) -> Var:
        """Return the constvar of a constant that a rule has used."""
        if id(value) not in self.consts:
            self.consts[id(value)] = Var(jax.typeof(value)), value
        return self.consts[id(value)][0]

    # --- equations ------------------------------------------------------------------------------

    def add(self, eqn: JaxprEqn, like: JaxprEqn, kinds: Sequence[K]) -> None:
        """Add an equation whose results hold the results of the old equation `like`."""
        self.eqns.append(eqn)
        for old, new, kind in zip(like.outvars, eqn.outvars, kinds, strict=True):
            self.bind(old, kind, new)

    def unchanged(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> None:
        """Write an equation unchanged except for its operands."""
        same = all(a is b for a, b in zip(operands, eqn.invars, strict=True))
        effects = eqn.effects
        if effects and not same:
            pairs = zip(eqn.invars, operands, strict=True)
            names = {old: new for old, new in pairs if type(old) is not Literal}
            effects = jaxcompat.renamed_effects(effects, names)
        self.eqns.append(eqn if same else eqn.replace(invars=[*operands], effects=effects))

    def structured(self, eqn: JaxprEqn) -> bool:
        """Write an equation that holds jaxprs; return False if it has another rule, or none.

        A plug-in's loop or branch without a rule is written by its edges.
        """
        domain, name = self.domain, eqn.primitive.name
        apply = domain.structured_rules.get(name)
        if apply is not None:
            return apply(self, eqn)
        if not eqn.params or domain.rules.get(name) is not None:
            return False
        found = regions(eqn)
        if found is None or found.kind not in ("loop", "branch") or domain.in_params(eqn):
            return False
        return by_edges(self, eqn)

    # --- templates ------------------------------------------------------------------------------

    def rule_context(self, name: str, known: dict[Any, Any]) -> Any:
        """Return the context argument of a primitive's rule."""
        raise NotImplementedError

    def operand(self, array: Any, kind: K, shape: tuple[Any, ...]) -> Any:
        """Return an operand as it is passed to a rule."""
        raise NotImplementedError

    def result(self, made: Any, eqn: JaxprEqn, var: Var, kinds: Sequence[K]) -> tuple[Any, K]:
        """Return the array of a result of a rule, and its kind, from the kinds of the operands."""
        raise NotImplementedError

    def uses(self, sizes: Iterable[Any], facts: Sequence[str] | None = None) -> list[Any]:
        """Return the facts that a rule may use if an equation mentions these sizes."""
        facts = self.domain.facts if facts is None else facts
        found = [(what, size) for size in dict.fromkeys(sizes) for what in facts]
        return [*(("extra", name) for name in self.domain.extras), *found]

    def computed(
        self,
        key: Hashable,
        compute: Callable[..., Any],
        operands: Sequence[Atom],
        sizes: Iterable[Any] = (),
        facts: Sequence[str] | None = None,
    ) -> Atom:
        """Write the equations of `compute(context, *operands)`, and return its result.

        Args:
            key: Equal for calls that trace to the same equations.
            compute: Returns an array.
            operands: The atoms of the new body that it is applied to.
            sizes: The sizes whose facts it may use.
            facts: The facts that are passed to it; it computes any others itself.
        """

        def one(known: dict[Any, Any], *arrays: Any) -> tuple[list[Any], list[None]]:
            return [compute(self.rule_context("value", known), *arrays)], [None]

        made = self.applied(key, one, operands, lambda: self.uses(sizes, facts))
        assert made is not None
        return made[0][0]

    def by_rule(
        self, eqn: JaxprEqn, apply: Callable[..., Any], kinds: Sequence[K], *key: Hashable
    ) -> bool:
        """Write an equation by `apply(context, eqn, *operands)`; return False if that is None.

        Args:
            eqn: The equation.
            apply: The rule of its primitive.
            kinds: The kinds in which the rule takes the operands.
            key: The dependencies of the template besides the equation, the kinds, and the context.
        """
        domain, operands = self.domain, [*map(self.held, eqn.invars, kinds)]

        def compute(known: dict[Any, Any], *arrays: Any) -> tuple[list[Any], list[K]] | None:
            context, found = self.rule_context(eqn.primitive.name, known), list[K]()
            shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]

            def one(*arrays: Any) -> list[Any] | None:
                made = apply(context, eqn, *map(self.operand, arrays, kinds, shapes))
                if made is None:
                    return None
                results = made if eqn.primitive.multiple_results else [made]
                pairs = zip(results, eqn.outvars, strict=True)
                both = [self.result(each, eqn, var, kinds) for each, var in pairs]
                found[:] = [kind for _, kind in both]
                return [array for array, _ in both]

            results = keep_weak_types(one, arrays, [v.aval for v in eqn.outvars], eqn)
            return None if results is None else (results, found)

        aval_ids = [domain.aval_id(a.aval, k) for a, k in zip(operands, kinds, strict=True)]
        template = domain.key(eqn, aval_ids), key, self.context
        made = self.applied(
            template, compute, operands, lambda: self.uses(domain.sizes_of(eqn)), eqn
        )
        if made is None:
            return False
        for var, atom, kind in zip(eqn.outvars, *made, strict=True):
            self.bind(var, kind, atom)
        return True

    def applied(
        self,
        key: Hashable,
        compute: Compute,
        operands: Sequence[Atom],
        facts: Callable[[], Sequence[Any]],
        eqn: JaxprEqn | None = None,
    ) -> tuple[list[Atom], Sequence[Any]] | None:
        """Write the equations of `compute(facts, *operands)`, which is traced once for a key.

        Args:
            key: Equal for calls that trace to the same equations.
            compute: Returns results and their kinds, or None. It takes the facts by name.
            operands: The atoms of the new body that it is applied to.
            facts: Returns the facts that it may use. Those that it does not use are not computed.
            eqn: The equation in whose context (mesh, precision, …) it is traced.

        Returns:
            The atoms of the results and their kinds, or None if `compute` returns None.
        """
        templates = self.domain.templates
        try:
            known = templates.get(key)
        except TypeError:  # a parameter that is not hashable
            key = id(eqn)
            known = templates.get(key)
        if known is None:
            uses, avals = facts(), [atom.aval for atom in operands]
            known = templates[key] = self.domain.traced(compute, avals, uses, eqn), uses
            if eqn is not None and any(map(has_float, eqn.params.values())):
                self.domain.with_floats.add(eqn.primitive)
        template, uses = known
        if template is None:
            return None
        values: list[Any] = [*operands]
        for i, fact in enumerate(uses, len(operands)):
            values.append(self.fact(fact) if i in template.used else None)
        # A value computed from facts alone has no source location.
        source = self.source if operands or eqn is not None else jaxcompat.NO_SOURCE
        return self.instantiate(template, values, source), template.kinds

    def instantiate(self, template: Template, operands: Sequence[Any], source: Any) -> list[Atom]:
        """Write the equations of a template, and return the atoms of its results."""
        values = [*operands, *map(self.constant, template.consts)]
        eqns, results = instantiated(template, values, source)
        self.eqns += eqns
        return results
