"""Passes that map a program over an axis, and their engine: a program by a *kind* of each value.

`batch` (the batch dimension of a value), `mask` (its logical shape and known padding) and `ragged`
(its layout) are such passes. A `Domain` defines the kinds of values, how two kinds join, and which
extra arguments a body needs. Its `BodyBuilder` rewrites one body, equation by equation.

Loops, branches and calls (`regions`) and custom derivatives (`custom_derivatives`) are rewritten
here for all domains, on the edges of their bodies (`ir.regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count, pairwise
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar
from typing import Literal as OneOf

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.custom_rules import following, jvp_rule, rule_key, vjp_rule
from jaxprtool.ir.equations import keep_weak_types, named
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import CustomJVP, Region, Regions, regions
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.symbols import Bound
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled, structure, unique
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    Effect,
    Jaxpr,
    JaxprEqn,
    JVPRule,
    Literal,
    Params,
    Primitive,
    Var,
    VJPRule,
)
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.retrace import with_names

# --- domain ---------------------------------------------------------------------------------------
# The base class of all domains, which define the kinds of values.

K = TypeVar("K", bound=Hashable)

#: Ids of pairs of a type and a kind, unique in the process and across threads.
_new_id = count()

#: The role of a value in a loop, branch or call: an operand that its bodies take unchanged, a
#: carry, the row of an operand that one iteration takes, or a result of a body.
Role: TypeAlias = OneOf["operand", "carry", "row", "result"]

#: `rule(builder, eqn) -> bool`. It writes an equation that holds jaxprs and returns True, or writes
#: nothing and returns False.
StructuredRule: TypeAlias = Callable[[Any, JaxprEqn], bool]

#: `compute(facts, *arrays) -> (results, kinds)`, or None if the rule does not apply.
Compute: TypeAlias = Callable[..., tuple[Sequence[Any], Sequence[Any]] | None]


@dataclass(frozen=True, eq=False)
class Rewritten(Generic[K]):
    """A rewritten jaxpr.

    Attributes:
        jaxpr: The jaxpr. It takes the values of `extras`, then the arguments of the old jaxpr.
        extras: The names of its extra arguments.
        kinds: The kinds of its results.
    """

    jaxpr: ClosedJaxpr
    extras: tuple[Any, ...]
    kinds: tuple[K, ...]

    def taking(self, domain: Domain[K], names: Sequence[Any]) -> ClosedJaxpr:
        """Return the jaxpr with exactly these extra arguments, used or not."""
        arguments = dict(zip(self.extras, self.jaxpr.invars, strict=False))
        first = [arguments.get(name) or Var(domain.extra_aval(name)) for name in names]
        rest = self.jaxpr.invars[len(self.extras) :]
        return jaxcompat.replace_jaxpr(self.jaxpr, invars=[*first, *rest])


class Domain(Generic[K]):
    """The kinds of values, and the state of rewriting one program by them.

    A kind is immutable and hashable. Subclasses define `kind_of` and `join`, and override the hooks
    whose defaults do not apply.

    Attributes:
        builder_class: The class that rewrites one body.
        rules: The table of rules of the domain, by primitive.
        structured_rules: The table of rules for equations that hold jaxprs.
        facts: The names of facts about sizes, in the order in which they are computed from each
            other; see `rules.RuleContext`.
        extras: The names of values that every derivative rule gets as extra arguments. Any other
            body gets those that it uses.
        templates: The template of each rule that was traced, None for a rule that returned None,
            and the facts that it may use.
        with_floats: Primitives with a float in the parameters of some equation.
        kinds: The kind of each id; see `aval_id`.
        derivatives: The rewritten derivative rules of custom calls.
    """

    builder_class: ClassVar[type[BodyBuilder[Any]]]
    rules: ClassVar[RuleTable[Any]] = RuleTable()
    structured_rules: ClassVar[RuleTable[StructuredRule]] = RuleTable()
    facts: ClassVar[tuple[str, ...]] = ()
    extras: Sequence[Any] = ()

    def __init__(self) -> None:
        self.templates: dict[Hashable, Any] = {}
        self.with_floats: set[Primitive] = set()
        self.derivatives: dict[Hashable, Callable[[], Any]] = {}
        self.kinds: dict[int, K] = {}
        self._bodies: dict[Hashable, tuple[AnyJaxpr, Rewritten[K]]] = {}
        self._aval_ids: dict[Hashable, int] = {}

    def aval_id(self, aval: Aval, kind: K) -> int:
        """Return the id that represents a type and a kind in keys: these are slow to hash."""
        aval_id = self._aval_ids.get((aval, kind))
        if aval_id is None:
            aval_id = next(_new_id)
            self.kinds[aval_id] = kind
            aval_id = self._aval_ids.setdefault((aval, kind), aval_id)
        return aval_id

    def key(self, eqn: JaxprEqn, aval_ids: Sequence[int]) -> tuple[Hashable, ...]:
        """Return the signature of an equation, from the ids of its operands."""
        return equation_signature(eqn, aval_ids, self.with_floats)

    # --- kinds ----------------------------------------------------------------------------------

    def kind_of(self, atom: Atom) -> K:
        """Return the kind of a literal, or of a variable that is not rewritten."""
        raise NotImplementedError

    def join(self, first: K, second: K) -> K:
        """Return the kind of a value that has either kind."""
        raise NotImplementedError

    def widened(self, before: K, now: K) -> K:
        """Return the kind of a carry, from those before and after an iteration.

        A sequence of such kinds must be finite.
        """
        return self.join(before, now)

    def aval(self, kind: K, aval: Aval) -> Aval:
        """Return the type of the array that holds a value of an old type."""
        return aval

    def settled(self, kind: K, aval: Aval, role: Role, inside: Regions) -> K:
        """Return the kind of a value where several equations must agree on one.

        Args:
            kind: The kind of the value; with the role "row", that of the whole operand.
            aval: The old type of the value in the body.
            role: The role of the value in the equation.
            inside: The regions of the equation.
        """
        return kind

    def stacked(self, kind: K, length: Any) -> K:
        """Return the kind of the stacked values of all iterations, from the kind of one."""
        return kind

    def fits(self, kind: K, wanted: K | None) -> bool:
        """Return True if a value of a kind can be used unchanged as one of the wanted kind."""
        return wanted is None or kind == wanted

    def uniform(self, kind: K) -> bool:
        """Return True if a value of this kind can be a predicate or branch index."""
        return True

    # --- bodies ---------------------------------------------------------------------------------

    def extra_aval(self, name: Any) -> Aval:
        """Return the type of an extra argument."""
        raise NotImplementedError

    def fact_aval(self, fact: Any) -> Aval:
        """Return the type of a fact; see `BodyBuilder.fact`."""
        raise NotImplementedError

    def sizes_of(self, eqn: JaxprEqn) -> Sequence[Any]:
        """Return the sizes that an equation mentions, whose facts its rule may use."""
        return ()

    def in_params(self, eqn: JaxprEqn) -> bool:
        """Return True if parameters, such as the length of a loop, must be rewritten too."""
        return False

    def context(self, context: Any, inside: Regions) -> Any:
        """Return the context of the bodies of an equation, from the context of the equation."""
        return context

    def failed(self, eqn: JaxprEqn, error: Exception) -> JaxprToolError:
        """Return the error for an equation whose rule raised one."""
        if isinstance(error, JaxprToolError):
            return error
        return self.refusal(eqn, " ".join(str(error).split()) or type(error).__name__)

    def refusal(self, eqn: JaxprEqn, reason: str) -> JaxprToolError:
        """Return the error for an equation that cannot be rewritten."""
        return UnsupportedError(f"{named(eqn)} cannot be rewritten: {reason}")

    def body(
        self,
        body: ClosedJaxpr,
        kinds: Sequence[K],
        wanted: Sequence[K | None] | None = None,
        context: Any = None,
    ) -> Rewritten[K]:
        """Return the rewritten form of a closed jaxpr.

        Args:
            body: The jaxpr.
            kinds: The kinds of its arguments.
            wanted: The kinds of its results; None for a result that may have any.
            context: The context of its equations besides their operands.
        """
        wanted = (None,) * len(body.outvars) if wanted is None else tuple(wanted)
        key = id(jaxcompat.open_jaxpr(body)), tuple(kinds), wanted, context
        if key not in self._bodies:
            # Keep the old body alive, so that no other body gets its id.
            self._bodies[key] = body, self.builder_class(self, context).body(body, kinds, wanted)
        return self._bodies[key][1]

    def matched(
        self, body: ClosedJaxpr, kinds: Sequence[K], wanted: Sequence[K | None], context: Any
    ) -> Rewritten[K]:
        """Return the rewritten form whose results have the wanted kinds; see `body`.

        If the results have these kinds anyway, the shared body for any kinds is returned.
        """
        rewritten = self.body(body, kinds, None, context)
        fit = all(map(self.fits, rewritten.kinds, wanted))
        return rewritten if fit else self.body(body, kinds, wanted, context)

    # --- templates ------------------------------------------------------------------------------

    def traced(
        self,
        compute: Compute,
        avals: Sequence[Aval],
        facts: Sequence[Any],
        eqn: JaxprEqn | None,
    ) -> Template | None:
        """Trace the template of `compute(facts, *operands)`; return None if it returns None.

        Args:
            compute: The rule.
            avals: The types of the operands.
            facts: The facts that it may use. They are operands of the template, after the others.
            eqn: The equation in whose context (mesh, precision, …) it is traced.
        """
        types = [*avals, *map(self.fact_aval, facts)]
        kinds: Sequence[Any] | None = None

        def fun(*values: Any) -> list[Any]:
            nonlocal kinds  # a traced function returns arrays alone
            by_fact: Mapping[Any, Any] = dict(zip(facts, values[len(avals) :], strict=True))
            results, kinds = compute(by_fact, *values[: len(avals)]) or ((), None)
            return [*results]

        jaxpr = jaxcompat.trace_in_setting(fun, types, eqn)
        if kinds is None:
            return None
        jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        out_kinds = self.template_kinds([v.aval for v in jaxpr.outvars], kinds)
        return template_of_jaxpr(jaxpr, out_kinds)

    def template_kinds(self, avals: Sequence[Aval], kinds: Sequence[Any]) -> Sequence[Any]:
        """Return the kinds of results of these types in the form that templates keep."""
        return kinds

    # --- custom derivatives ---------------------------------------------------------------------

    def differentiated(self, kind: K, aval: Aval) -> K:
        """Return the kind of a result of a custom call, from that of its function's result.

        The derivative rule returns the result too, and may return another kind.
        """
        return kind

    def tangent(self, kind: K, aval: Aval) -> K:
        """Return the kind of a tangent or cotangent, from that of its primal."""
        return kind

    def backward(
        self, bwd: ClosedJaxpr, kinds: Sequence[K], primals: Sequence[K], context: Any
    ) -> ClosedJaxpr:
        """Return the rewritten backward rule, which takes all extra arguments first.

        Args:
            bwd: The backward rule.
            kinds: The kinds of its arguments, the residuals and the cotangents.
            primals: The kinds of the primals whose cotangents it returns.
            context: The context of the call.
        """
        return self.body(bwd, kinds, None, context).taking(self, self.extras)


# --- body -----------------------------------------------------------------------------------------
# Rewrite a jaxpr, in one forward pass over its equations.


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

    domain: Domain[K]
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
        outvars, out_kinds = self.results(body.outvars, wanted)
        new_consts = self.consts.values()
        alike = not self.extras and len(outvars) == len(body.outvars)
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *(var for var, _ in new_consts)],
            consts=[*body.consts, *(value for _, value in new_consts)],
            invars=[*self.extras.values(), *invars],
            outvars=outvars,
            eqns=self.eqns,
            debug_info=body.debug_info if alike else None,
        )
        return Rewritten(new, tuple(self.extras), tuple(out_kinds))

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
        entry = None if type(atom) is Literal else self.values.get(atom)
        return self.domain.kind_of(atom) if entry is None else entry[1]

    def held(self, atom: Atom, kind: K) -> Atom:
        """Return the atom that holds an atom of the old body as this kind; convert it if needed."""
        entry = None if type(atom) is Literal else self.values.get(atom)
        return atom if entry is None else entry[0]

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
        earlier = facts[: facts.index(what)]
        return self.computed(fact, lambda rules: rules.fact(what, value), [], [value], earlier)

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
        inside = regions(eqn)
        if inside is None or inside.kind not in ("loop", "branch") or domain.in_params(eqn):
            return False
        return by_edges(self, eqn)

    # --- templates ------------------------------------------------------------------------------

    def rule_context(self, name: str, facts: dict[Any, Any]) -> Any:
        """Return the context argument of a primitive's rule."""
        raise NotImplementedError

    def operand(self, array: Any, kind: K, shape: tuple[Any, ...]) -> Any:
        """Return an operand as it is passed to a rule."""
        raise NotImplementedError

    def result(self, value: Any, eqn: JaxprEqn, var: Var, kinds: Sequence[K]) -> tuple[Any, K]:
        """Return the array of a result of a rule, and its kind, from the kinds of the operands."""
        raise NotImplementedError

    def uses(self, sizes: Iterable[Any], facts: Sequence[str] | None = None) -> list[Any]:
        """Return the facts that a rule may use if an equation mentions these sizes."""
        facts = self.domain.facts if facts is None else facts
        of_sizes = [(what, size) for size in dict.fromkeys(sizes) for what in facts]
        return [*(("extra", name) for name in self.domain.extras), *of_sizes]

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

        def one(by_fact: dict[Any, Any], *arrays: Any) -> tuple[list[Any], list[None]]:
            return [compute(self.rule_context("value", by_fact), *arrays)], [None]

        result = self.applied(key, one, operands, lambda: self.uses(sizes, facts))
        assert result is not None
        return result[0][0]

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

        def compute(facts: dict[Any, Any], *arrays: Any) -> tuple[list[Any], list[K]] | None:
            context = self.rule_context(eqn.primitive.name, facts)
            shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]

            def one(*arrays: Any) -> tuple[list[Any], list[K]] | None:
                output = apply(context, eqn, *map(self.operand, arrays, kinds, shapes))
                if output is None:
                    return None
                results = output if eqn.primitive.multiple_results else [output]
                pairs = zip(results, eqn.outvars, strict=True)
                both = [self.result(result, eqn, var, kinds) for result, var in pairs]
                return [array for array, _ in both], [kind for _, kind in both]

            return keep_weak_types(one, arrays, [v.aval for v in eqn.outvars], eqn)

        aval_ids = [domain.aval_id(a.aval, k) for a, k in zip(operands, kinds, strict=True)]
        template = domain.key(eqn, aval_ids), key, self.context
        written = self.applied(
            template, compute, operands, lambda: self.uses(domain.sizes_of(eqn)), eqn
        )
        if written is None:
            return False
        for var, atom, kind in zip(eqn.outvars, *written, strict=True):
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
            entry = templates.get(key)
        except TypeError:  # a parameter that is not hashable
            key = id(eqn)
            entry = templates.get(key)
        if entry is None:
            uses, avals = facts(), [atom.aval for atom in operands]
            entry = templates[key] = self.domain.traced(compute, avals, uses, eqn), uses
            if eqn is not None and any(map(has_float, eqn.params.values())):
                self.domain.with_floats.add(eqn.primitive)
        template, uses = entry
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


# --- regions --------------------------------------------------------------------------------------
# Loops, branches and calls, rewritten on the edges of their bodies.

#: Bodies that take their constants as arguments, by their original body.
_lifted = JaxprCache()


@dataclass(frozen=True, eq=False)
class Solution(Generic[K]):
    """The kinds of the operands and results of an equation that holds jaxprs, and its new bodies.

    Attributes:
        found: The regions of the equation.
        operands: The kinds of the operands; for a sliced operand, the kind of one row.
        results: The kinds of the results; for a stacked result, the kind of one row.
        bodies: The rewritten bodies.
    """

    found: Regions
    operands: list[K]
    results: list[K]
    bodies: list[Rewritten[K]]


def by_edges(builder: BodyBuilder[K], eqn: JaxprEqn) -> bool:
    """Write a loop, branch or call; return False if a predicate or index is not uniform."""
    inside = regions(eqn)
    assert inside is not None
    solution = solve(builder, inside)
    if solution is not None:
        write(builder, solution)
    return solution is not None


def solve(
    builder: BodyBuilder[K], inside: Regions, kinds: Sequence[K] | None = None, context: Any = None
) -> Solution[K] | None:
    """Return the kinds that hold in every iteration, or None if a predicate is not uniform.

    Args:
        builder: The body that the equation is in. It is not written to.
        inside: The regions of the equation.
        kinds: The kinds of the operands, if they are not those in `builder`.
        context: The context of the bodies; if None, the one that the domain returns.
    """
    domain = builder.domain
    context = domain.context(builder.context, inside) if context is None else context
    kinds = [*map(builder.kind, inside.eqn.invars)] if kinds is None else kinds
    if not all(domain.uniform(kinds[i]) for i in inside.predicates):
        return None
    types = [v.aval for v in inside.eqn.invars]
    for body, region in zip(inside.bodies, inside.regions, strict=True):
        for i, var in zip(region.ins, body.invars, strict=True):
            types[i] = var.aval
    roles = _roles(inside)
    triples = zip(kinds, types, roles, strict=True)
    start = [domain.settled(kind, aval, role, inside) for kind, aval, role in triples]

    by_region: dict[int, Rewritten[K]] = {}

    def through(number: int, kinds: Sequence[K]) -> Sequence[Any]:
        body, region = inside.bodies[number], inside.regions[number]
        if region.is_predicate:
            return (None,)  # rewritten below, once
        by_region[number] = rewritten = domain.body(body, kinds, None, context)
        result_roles: list[Role] = [
            "result" if operand is None else "carry" for operand in region.next_iteration
        ]
        triples = zip(rewritten.kinds, body.outvars, result_roles, strict=True)
        return [domain.settled(kind, v.aval, role, inside) for kind, v, role in triples]

    operands, results = inside.forward(start, through, domain.join, domain.widened)
    bodies = []
    for number, region in enumerate(inside.regions):
        wanted = [None if out is None else results[out] for out in region.outs]
        rewritten = by_region.get(number)
        if rewritten is None or not all(map(domain.fits, rewritten.kinds, wanted)):
            kinds = [operands[i] for i in region.ins]
            rewritten = domain.body(inside.bodies[number], kinds, wanted, context)
        if region.is_predicate and not domain.uniform(rewritten.kinds[0]):
            return None
        bodies.append(rewritten)
    return Solution(inside, operands, results, bodies)


def _roles(inside: Regions) -> list[Role]:
    """Return the role of each operand in the bodies."""
    roles: list[Role] = ["operand"] * len(inside.eqn.invars)
    for i, _ in inside.carried:
        roles[i] = "carry"
    for i in _positions(inside.edges.sliced, inside.operands):
        roles[i] = "row"
    return roles


def _positions(fields: Sequence[str], ranges: Mapping[str, range]) -> set[int]:
    return {i for field in fields for i in ranges[field]}


def write(
    builder: BodyBuilder[K],
    solution: Solution[K],
    by_iteration: Mapping[Any, Atom] | None = None,
    **changes: Any,
) -> None:
    """Write the equation of a solution.

    Args:
        builder: The body that is written.
        solution: The kinds and the bodies.
        by_iteration: Extra arguments of the bodies that differ between iterations, by name: the
            stacked operands. The others are taken from `builder`.
        changes: Fields of the view to change, such as the length of a scan.
    """
    inside, domain = solution.found, builder.domain
    eqn, trips = inside.eqn, inside.view.trips

    def whole(kinds: Sequence[K], rows: set[int]) -> list[K]:
        return [domain.stacked(kind, trips) if i in rows else kind for i, kind in enumerate(kinds)]

    ins = whole(solution.operands, _positions(inside.edges.sliced, inside.operands))
    outs = whole(solution.results, _positions(inside.edges.stacked, inside.results))
    bodies = solution.bodies
    if inside.kind == "call" and not traits(eqn).holds_constants:
        bodies = [_with_constants_as_extras(builder, body) for body in bodies]
    extras: dict[str, dict[Any, Atom]] = {}
    for rewritten, region in zip(bodies, inside.regions, strict=True):
        for name in rewritten.extras:
            row = None if by_iteration is None else by_iteration.get(name)
            place = _place(inside, region, row is not None)
            atom = name if isinstance(name, Var) else builder.extra(name) if row is None else row
            extras.setdefault(place, {})[name] = atom
    values = {"invars": [*map(builder.held, eqn.invars, ins)]}
    values["outvars"] = builder.outs(eqn.outvars, outs)
    # The fast path: nothing is added, and no effect names an operand that has been replaced.
    if not (extras or changes or eqn.effects):
        rebuilt = inside.with_bodies([rewritten.jaxpr for rewritten in bodies]).replace(**values)
    else:
        pairs = zip(bodies, inside.regions, strict=True)
        new = eqn.replace(**values)
        rebuilt = Regions.of(replace(type(inside.view).of(new), **changes)).rebuild(
            [
                _with_extras(domain, inside, region, rewritten, extras)
                for rewritten, region in pairs
            ],
            more={field: [*atoms.values()] for field, atoms in extras.items()},
            first=True,
        )
    builder.add(rebuilt, eqn, outs)


def _place(inside: Regions, region: Region, sliced: bool) -> str:
    """Return the field of operands to which extra arguments of a body are added."""
    edges = inside.edges
    changing = {field for field, _ in edges.carried}.union(edges.sliced)
    fields = edges.sliced if sliced else [f for f in region.groups if f not in changing]
    if not fields:
        raise UnsupportedError(
            f"{named(inside.eqn)} takes no constants, but its body now needs some"
        )
    return fields[0]


def _with_extras(
    domain: Domain[K],
    inside: Regions,
    region: Region,
    rewritten: Rewritten[K],
    extras: Mapping[str, Mapping[Any, Atom]],
) -> ClosedJaxpr:
    """Return a body that takes, in each field, the extra arguments that were added to it."""
    count = len(rewritten.extras)
    arguments = dict(zip(rewritten.extras, rewritten.jaxpr.invars, strict=False))
    more = {
        field: [arguments.pop(name, None) or Var(domain.extra_aval(name)) for name in extras[field]]
        for field in region.groups
        if field in extras
    }
    invars = inside.arguments(region, rewritten.jaxpr.invars[count:], more, first=True)
    if invars == rewritten.jaxpr.invars:
        return rewritten.jaxpr  # shared by all equations whose bodies are rewritten to it
    return jaxcompat.replace_jaxpr(rewritten.jaxpr, invars=invars)


def _with_constants_as_extras(builder: BodyBuilder[K], rewritten: Rewritten[K]) -> Rewritten[K]:
    """Return a body whose constants are extra arguments, named by their variables."""
    body, consts = lifted(rewritten.jaxpr)
    return replace(
        rewritten, jaxpr=body, extras=(*map(builder.constant, consts), *rewritten.extras)
    )


def lifted(body: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """Return a closed jaxpr that takes its constants before its arguments, and these constants.

    Use it for equations whose bodies hold no constants. Shared bodies stay shared.
    """
    if not body.consts:
        return body, ()
    cached = _lifted.of(body)
    new = cached.get("lifted")
    if new is None:
        invars = [*body.constvars, *body.invars]
        new = jaxcompat.replace_jaxpr(body, constvars=(), consts=(), invars=invars)
        cached["lifted"] = new
    return new, tuple(body.consts)


# --- custom derivatives ---------------------------------------------------------------------------
# `custom_jvp` and `custom_vjp` calls.
#
# The function is rewritten at once, its derivative rules when JAX first needs them: a rule may call
# its own function. The extra arguments become operands of the call, since the derivative rules need
# them too; they have no derivative.


def custom_derivative(builder: BodyBuilder[K], eqn: JaxprEqn) -> bool:
    """Write a `custom_jvp` or `custom_vjp` call."""
    domain, p, inside = builder.domain, eqn.params, regions(eqn)
    assert inside is not None
    context, consts, names = domain.context(builder.context, inside), p["num_consts"], domain.extras
    kinds = [*map(builder.kind, eqn.invars)]
    (body,) = inside.bodies
    plain = domain.body(body, kinds, None, context).kinds
    outs = [domain.differentiated(k, v.aval) for k, v in zip(plain, eqn.outvars, strict=True)]
    jaxpr = domain.matched(body, kinds, outs, context).taking(domain, names)
    first, const_vars, rest = _cut(jaxpr.invars, len(names), len(names) + consts)
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, invars=[*const_vars, *first, *rest])
    rules = _DerivativeRules(domain, eqn, kinds[consts:], outs, context)
    key = rule_key(eqn), tuple(rules.primals), tuple(outs), context
    of_call = rules.jvp if eqn.primitive.name in CustomJVP.primitives else rules.vjp
    rule = domain.derivatives.setdefault(key, cache(of_call))
    params = following(eqn, jaxpr, rule, consts, p["symbolic_zeros"])
    operands = [*map(builder.held, eqn.invars, kinds)]
    invars = [*operands[:consts], *map(builder.extra, names), *operands[consts:]]
    outvars = builder.outs(eqn.outvars, outs)
    builder.add(eqn.replace(invars=invars, outvars=outvars, params={**p, **params}), eqn, outs)
    return True


def _cut(values: Sequence[Any], *inner: int) -> list[Sequence[Any]]:
    edges = [0, *inner, len(values)]
    return [values[a:b] for a, b in pairwise(edges)]


@dataclass(frozen=True, eq=False)
class _DerivativeRules(Generic[K]):
    """The derivative rules of a call, for the kinds of its primals and of its results."""

    domain: Domain[K]
    eqn: JaxprEqn
    primals: Sequence[K]
    outs: Sequence[K]
    context: Any

    def jvp(self) -> JVPRule:
        """Return the rewritten rule of a `custom_jvp` call."""
        rule, domain, names = jvp_rule(self.eqn), self.domain, self.domain.extras
        if rule.jaxpr is None:
            return rule
        count = len(self.primals)
        pairs = zip(self.primals, rule.jaxpr.invars[count:], strict=True)
        kinds = [*self.primals, *(domain.tangent(kind, var.aval) for kind, var in pairs)]
        moving = [k for k, zero in zip(self.outs, rule.out_zeros, strict=True) if not zero]
        rewritten = domain.body(rule.jaxpr, kinds, [*self.outs, *moving], self.context)
        body = rewritten.taking(domain, names)
        zeros = [Var(var.aval.to_tangent_aval()) for var in body.invars[: len(names)]]
        primals, tangents = _cut(body.invars, len(names) + count)
        new = jaxcompat.replace_jaxpr(body, invars=[*primals, *zeros, *tangents])
        return replace(rule, jaxpr=new, perturbed=(*(True for _ in names), *rule.perturbed))

    def vjp(self) -> VJPRule:
        """Return the rewritten rules of a `custom_vjp` call."""
        rule, domain, names = vjp_rule(self.eqn), self.domain, self.domain.extras
        if rule.raises is not None:
            return rule
        new = sum(i is None for i in rule.forwarded)
        fwd = domain.body(rule.fwd, self.primals, [*(None,) * new, *self.outs], self.context)
        fwd_kinds = iter(fwd.kinds)
        kinds = [next(fwd_kinds) if i is None else self.primals[i] for i in rule.forwarded]
        pairs = zip(self.outs, rule.bwd.invars[len(kinds) :], strict=True)
        kinds += [domain.tangent(kind, var.aval) for kind, var in pairs]
        moving = [k for k, zero in zip(self.primals, rule.in_zeros, strict=True) if not zero]
        more = (True,) * len(names)
        shifted = [None if i is None else i + len(names) for i in rule.forwarded]
        return replace(
            rule,
            fwd=fwd.taking(domain, names),
            bwd=domain.backward(rule.bwd, kinds, moving, self.context),
            forwarded=(*range(len(names)), *shifted),
            in_zeros=(*more, *rule.in_zeros),
            perturbed=(*more, *rule.perturbed),
        )


# --- arguments ------------------------------------------------------------------------------------
# Programs whose bodies take extra arguments.


def with_arguments(
    program: Program, body: ClosedJaxpr, bounds: Mapping[str, Bound], **changes: Any
) -> Program:
    """Return a program that takes new arguments after its positional ones.

    Args:
        program: The program without them.
        body: The jaxpr of the new program. It takes the new arguments last.
        bounds: The bound of each new argument, by its name.
        changes: Other fields of the program to change.
    """
    old, new = body.invars[: -len(bounds)], body.invars[-len(bounds) :]
    args, kwargs = filled(program.in_tree, range(len(old)))
    count = len(jax.tree.leaves(args))
    names = unique([*program.arg_names[:count], *bounds, *program.arg_names[count:]])
    jaxpr = jaxcompat.replace_jaxpr(body, invars=[*old[:count], *new, *old[count:]])
    out_names = changes.get("out_names", program.out_names)
    return program.replace(
        jaxpr=with_names(jaxpr, program.name, names, out_names),
        in_tree=structure(((*args, *bounds), kwargs)),
        arg_names=names,
        bounds=(*program.bounds, *zip(names[count:], bounds.values(), strict=False)),
        **changes,
    )


# --- rules ----------------------------------------------------------------------------------------
# The rule context of domains whose types mention sizes that are only known at run time.


class RuleContext:
    """The context argument of a rule while it is traced.

    A *fact* is a value that is computed from a size, such as the mask of an axis of this size. Each
    is computed once in a body, and passed to the templates that use it. The method `_NAME(size)` of
    a subclass computes the fact NAME.

    Args:
        symbols: The value of each symbol.
        known: The facts computed so far, by name and size.
    """

    #: The class of an operand, whose attribute `array` is its array.
    operand: ClassVar[type[Any]]

    def __init__(self, symbols: Mapping[str, Any], facts: dict[tuple[str, Any], Any]) -> None:
        self._symbols = symbols
        self._known = facts

    def fact(self, what: str, size: Any) -> Any:
        """Return the fact of this name about a size."""
        if (what, size) not in self._known:
            self._known[what, size] = getattr(self, f"_{what}")(size)
        return self._known[what, size]

    def held_size(self, size: Any) -> Any:
        """Return the size of the axis of an array that holds an axis of a logical size."""
        raise NotImplementedError

    def bind(self, eqn: JaxprEqn, *operands: Any, **params: Any) -> Any:
        """Apply an equation's primitive to the arrays of operands.

        Args:
            eqn: The equation.
            operands: Arrays, or operands, whose arrays are used.
            params: Parameters that replace those of the equation, used as they are.
        """
        arrays = [x.array if isinstance(x, self.operand) else x for x in operands]
        return eqn.primitive.bind(*arrays, **{**self.params(eqn), **params})

    def params(self, eqn: JaxprEqn) -> dict[str, Any]:
        """Return the parameters of an equation, with the sizes that arrays have."""
        return {name: self._held(value) for name, value in eqn.params.items()}

    def _held(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._held, value))
        return self.held_size(value)


# --- templates ------------------------------------------------------------------------------------
# Templates: equations that replace one equation, traced once for all equations that are alike.
#
# The equations of a program have few signatures: all of an equation except the names of its
# operands and its source location. A pass traces its rule once for each signature, to a *template*,
# and rewrites an equation by looking up its template and instantiating it with the equation's
# operands.

#: A value in a template: a literal, or the index of one.
TemplateAtom: TypeAlias = Literal | int


@dataclass(frozen=True, eq=False, slots=True)
class TemplateEquation:
    """An equation of a template.

    Attributes:
        inputs: Literals, or indices of values: of the operands, then of the constants, then of the
            results of the steps in order.
        avals: The types of the results.
        single: True if it has one result.
    """

    primitive: Primitive
    params: Params
    effects: set[Effect]
    ctx: Any
    inputs: tuple[TemplateAtom, ...]
    avals: tuple[Aval, ...]
    single: bool


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The equations that replace an equation.

    Attributes:
        consts: Constants that the rule closes over.
        outs: The results, as the `inputs` of a step.
        kinds: The kinds of the results, as the pass defines them.
        binders: The variables that effects on refs name.
        only_step: The only step, if it takes the operands as they are and its results are the
            template's.
        used: The operands that its steps and its results read.
    """

    consts: tuple[Any, ...]
    steps: tuple[TemplateEquation, ...]
    outs: tuple[TemplateAtom, ...]
    kinds: tuple[Any, ...]
    binders: tuple[Var, ...]
    only_step: TemplateEquation | None
    used: frozenset[int]


def template_of_jaxpr(jaxpr: ClosedJaxpr, kinds: Sequence[Any]) -> Template:
    """Return the template that writes the equations of a jaxpr, in terms of its arguments."""
    values = [*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    numbers: dict[Var, int] = {v: i for i, v in enumerate(values)}

    def numbered(atoms: Sequence[Atom]) -> tuple[TemplateAtom, ...]:
        return tuple(atom if type(atom) is Literal else numbers[atom] for atom in atoms)

    steps = tuple(
        TemplateEquation(
            eqn.primitive,
            {name: _without_numpy(value) for name, value in eqn.params.items()},
            eqn.effects,
            eqn.ctx,
            numbered(eqn.invars),
            tuple(v.aval for v in eqn.outvars),
            len(eqn.outvars) == 1,
        )
        for eqn in jaxpr.eqns
    )
    outs = numbered(jaxpr.outvars)
    only_step = None
    if len(steps) == 1 and not (steps[0].effects or jaxpr.consts):
        whole = [*jaxpr.eqns[0].invars, *jaxpr.eqns[0].outvars]
        only_step = steps[0] if whole == [*jaxpr.invars, *jaxpr.outvars] else None
    read = {i for i in chain(outs, *(step.inputs for step in steps)) if type(i) is int}
    used = frozenset(read.intersection(range(len(jaxpr.invars))))
    return Template(tuple(jaxpr.consts), steps, outs, tuple(kinds), tuple(values), only_step, used)


def _without_numpy(value: Any) -> Any:
    """Replace NumPy's integers, which JAX's rules leave in dimensions and shapes, by Python's."""
    if isinstance(value, np.integer):
        return int(value)
    if type(value) in (tuple, list):
        return type(value)(map(_without_numpy, value))
    return value


def instantiated(
    template: Template, operands: Sequence[Atom], source: Any
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Return the equations of a template for operands, and its results.

    Args:
        template: The template.
        operands: The operands, followed by a variable for each constant of the template.
        source: The source information for the equations.
    """
    values = list(operands)
    eqns: list[JaxprEqn] = []
    for step in template.steps:
        ins = [values[i] if type(i) is int else i for i in step.inputs]
        outs = [Var(aval) for aval in step.avals]
        effs = step.effects
        if effs:
            effs = jaxcompat.renamed_effects(
                effs, dict(zip(template.binders, values, strict=False))
            )
        eqns.append(JaxprEqn(ins, outs, step.primitive, step.params, effs, source, step.ctx))
        values += outs
    return eqns, [values[i] if type(i) is int else i for i in template.outs]


# --- signatures -----------------------------------------------------------------------------------


def equation_signature(
    eqn: JaxprEqn, aval_ids: Sequence[int], with_floats: Container[Primitive]
) -> tuple[Hashable, ...]:
    """Return the signature of an equation: its primitive, context, parameters, and kinds.

    Args:
        eqn: The equation.
        aval_ids: The ids of its operands' types and kinds (`Domain.aval_id`). Types are slow to
            hash and to compare, and every equation needs a signature.
        with_floats: The primitives that may have floats among their parameters. Their signatures
            also hold the parameters as text, since 0.0 and -0.0 are equal.
    """
    primitive, params = eqn.primitive, eqn.params
    if not params:
        return primitive, eqn.ctx, *aval_ids
    names = repr(params) if primitive in with_floats else tuple(params)
    values = params.values()
    types = [jaxcompat.nested_type(v) if isinstance(v, tuple) else type(v) for v in values]
    return primitive, eqn.ctx, names, *types, *values, *aval_ids


_FLOATS: frozenset[type] = frozenset({float, complex, np.float32, np.float64})


def has_float(value: object) -> bool:
    """Return True for a float, and for a tuple that has one at any depth."""
    return any(map(has_float, value)) if isinstance(value, tuple) else type(value) in _FLOATS
