"""The base class of all domains, which define the kinds of values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.regions import Regions
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Primitive, Var
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.mapping.domains.templates import Template, signature, template_of_jaxpr

if TYPE_CHECKING:
    from jaxprtool.passes.mapping.domains.body import BodyBuilder

K = TypeVar("K", bound=Hashable)

#: Ids of pairs of a type and a kind, unique in the process and across threads.
_new_id = count()

#: The role of a value in a loop, branch or call: an operand that its bodies take unchanged, a
#: carry, the row of an operand that one iteration takes, or a result of a body.
Role: TypeAlias = Literal["operand", "carry", "row", "result"]

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
        own = dict(zip(self.extras, self.jaxpr.invars, strict=False))
        first = [own.get(name) or Var(domain.extra_aval(name)) for name in names]
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
        return signature(eqn, aval_ids, self.with_floats)

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

    def settled(self, kind: K, aval: Aval, role: Role, found: Regions) -> K:
        """Return the kind of a value where several equations must agree on one.

        Args:
            kind: The kind of the value; with the role "row", that of the whole operand.
            aval: The old type of the value in the body.
            role: The role of the value in the equation.
            found: The regions of the equation.
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

    def context(self, context: Any, found: Regions) -> Any:
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
        made = self.body(body, kinds, None, context)
        fit = all(map(self.fits, made.kinds, wanted))
        return made if fit else self.body(body, kinds, wanted, context)

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
        kinds: list[Sequence[Any]] = []

        def fun(*values: Any) -> list[Any]:
            known: Mapping[Any, Any] = dict(zip(facts, values[len(avals) :], strict=True))
            made = compute(known, *values[: len(avals)])
            kinds[:] = [] if made is None else [made[1]]
            return [] if made is None else [*made[0]]

        jaxpr = jaxcompat.trace_in_setting(fun, types, eqn)
        if not kinds:
            return None
        jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        found = self.template_kinds([v.aval for v in jaxpr.outvars], kinds[0])
        return template_of_jaxpr(jaxpr, found)

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
