"""What a pass knows of the values of a program: the base class of all domains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.regions import Regions
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.templates import Template
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Primitive, Var

if TYPE_CHECKING:
    from jaxprtool.passes.domains.body import Writing

K = TypeVar("K", bound=Hashable)

#: What a value is to a loop, branch or call: an operand that its bodies take as it is, a carry, the
#: row of an operand that one iteration takes, or a result of a body.
Role: TypeAlias = Literal["operand", "carry", "row", "result"]

#: `rule(writing, eqn) -> bool`. It writes an equation that holds jaxprs and returns True, or writes
#: nothing and returns False.
StructuredRule: TypeAlias = Callable[[Any, JaxprEqn], bool]


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

    A kind is immutable and hashable. Subclasses define `kind_of` and `join`, and the hooks below
    them where the default is not right.

    Attributes:
        writing: The class that rewrites one body.
        rules: The table of rules of the domain, by primitive.
        structured_rules: The table of rules for equations that hold jaxprs.
        extras: The names of values that every derivative rule gets as extra arguments. Any other
            body gets those that it uses.
        templates: The template of each rule that was traced, None for a rule that returned None.
        with_floats: Primitives with a float in the parameters of some equation.
        derivatives: The rewritten derivative rules of custom calls.
    """

    writing: ClassVar[type[Writing[Any]]]
    rules: ClassVar[RuleTable[Any]] = RuleTable()
    structured_rules: ClassVar[RuleTable[StructuredRule]] = RuleTable()
    extras: Sequence[Any] = ()

    def __init__(self) -> None:
        self.templates: dict[Hashable, Template | None] = {}
        self.with_floats: set[Primitive] = set()
        self.derivatives: dict[Hashable, Callable[[], Any]] = {}
        self._bodies: dict[Hashable, tuple[AnyJaxpr, Rewritten[K]]] = {}
        self._numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)

    def number(self, aval: Aval, kind: K) -> int:
        """Return the number that stands for a type and a kind in keys: these are slow to hash."""
        return self._numbers[aval, kind]

    # --- kinds ----------------------------------------------------------------------------------

    def kind_of(self, atom: Atom) -> K:
        """Return the kind of a literal, or of a variable that is not rewritten."""
        raise NotImplementedError

    def join(self, first: K, second: K) -> K:
        """Return the kind of a value that has either kind."""
        raise NotImplementedError

    def widened(self, before: K, now: K) -> K:
        """Return the kind of a carry, from that before an iteration and that after it.

        A sequence of such kinds must come to an end.
        """
        return self.join(before, now)

    def aval(self, kind: K, aval: Aval) -> Aval:
        """Return the type of the array that holds a value of an old type."""
        return aval

    def settled(self, kind: K, aval: Aval, role: Role, found: Regions) -> K:
        """Return the kind that a value gets where several equations must agree on one.

        Args:
            kind: The kind of the value; with the role "row", that of the whole operand.
            aval: The old type of the value in the body.
            role: What the value is to the equation.
            found: The regions of the equation.
        """
        return kind

    def stacked(self, kind: K, length: Any) -> K:
        """Return the kind of the values of all iterations, from the kind of one."""
        return kind

    def fits(self, kind: K, wanted: K | None) -> bool:
        """Return True if a value of a kind can be used as it is where another is wanted."""
        return wanted is None or kind == wanted

    def uniform(self, kind: K) -> bool:
        """Return True if a value of this kind can decide which body runs."""
        return True

    # --- bodies ---------------------------------------------------------------------------------

    def extra_aval(self, name: Any) -> Aval:
        """Return the type of an extra argument."""
        raise NotImplementedError

    def fact_aval(self, fact: Any) -> Aval:
        """Return the type of a fact; see `Writing.fact`."""
        raise NotImplementedError

    def context(self, context: Any, found: Regions) -> Any:
        """Return the context of the bodies of an equation, from the context of the equation."""
        return context

    def failed(self, eqn: JaxprEqn, error: Exception) -> JaxprToolError:
        """Return the error for an equation whose rule raised one."""
        raise NotImplementedError

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
            context: What else its equations depend on.
        """
        wanted = (None,) * len(body.outvars) if wanted is None else tuple(wanted)
        key = id(jaxcompat.open_jaxpr(body)), tuple(kinds), wanted, context
        if key not in self._bodies:
            # Keep the old body alive, so that no other gets its id.
            self._bodies[key] = body, self.writing(self, context).body(body, kinds, wanted)
        return self._bodies[key][1]

    def matched(
        self, body: ClosedJaxpr, kinds: Sequence[K], wanted: Sequence[K | None], context: Any
    ) -> Rewritten[K]:
        """Return the rewritten form whose results have the wanted kinds; see `body`.

        If they have these kinds as they are, the body that was made to find out is shared.
        """
        made = self.body(body, kinds, None, context)
        fit = all(map(self.fits, made.kinds, wanted))
        return made if fit else self.body(body, kinds, wanted, context)

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
