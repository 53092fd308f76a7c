"""The binding times of values when a jaxpr is split in two, and the open table of rules.

A binding time is two facts of a value, and both flow forwards:

    early   it is computed from keys and constants alone: `init` can have it
    ready   it is computed from variables, other arguments and constants: `apply` can have it
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import Contains, named
from jaxprtool.ir.core.regions import open_regions
from jaxprtool.ir.core.structured import view
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.rewriting.rewrite import Memo
from jaxprtool.jaxcompat import AbstractRef, Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.cleanup.dce import has_lasting_effect
from jaxprtool.passes.unzip.variables import Variable
from jaxprtool.primitives import sow_p


class BindingTime(NamedTuple):
    """Whether init can have a value (`early`), and whether apply can (`ready`)."""

    early: bool
    ready: bool


BOTH, EARLY, READY = BindingTime(True, True), BindingTime(True, False), BindingTime(False, True)


def meet(values: Iterable[BindingTime]) -> BindingTime:
    """Return the binding time of a value that is computed from these."""
    early = ready = True
    for value in values:
        early &= value.early
        ready &= value.ready
    return BindingTime(early, ready)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a rule makes of one equation.

    `times` has an entry for each of its results. `init` and `apply` are the equations to put in
    its place in either program; they define its results, as far as these are early or ready. For
    each leaf of each variable that is declared inside, `values` has its value in init, and
    `arguments` the variable that it is in apply. `parts` are the `Split`s of the equation's bodies.
    """

    times: tuple[BindingTime, ...]
    init: tuple[JaxprEqn, ...] = ()
    apply: tuple[JaxprEqn, ...] = ()
    variables: tuple[Variable, ...] = ()
    values: tuple[Atom, ...] = ()
    arguments: tuple[Var, ...] = ()
    parts: tuple[Any, ...] = ()


@dataclass
class Context:
    """What one unzip knows: the tag that it looks for, and what it has split already.

    `replaced` counts, by path, the values sown in mode "clobber" that a later one replaces: these
    are no variables. `scopes` are those around the body that is being split, and `bodies` that
    body and those around it, the outermost first. `reached` is what is known of the conditions
    that decide whether it is run.
    """

    tag: str | None
    replaced: dict[tuple[str, ...], int] = field(default_factory=dict)
    reached: BindingTime = BOTH
    scopes: list[str] = field(default_factory=list)
    bodies: list[ClosedJaxpr] = field(default_factory=list)
    splits: Memo = field(default_factory=Memo)
    custom_calls: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: Whether a variable may be declared in a jaxpr, at any depth.
        self.sows = Contains(self._declares)
        #: Whether a value is sown in a jaxpr under another tag, at any depth.
        self.sows_otherwise = Contains(self._is_other_sow)

    @contextmanager
    def under(self, condition: BindingTime) -> Iterator[None]:
        """While bodies are split that are run, or not, as a value says of which this is known."""
        outside = self.reached
        self.reached = meet((outside, condition))
        yield
        self.reached = outside

    def is_sow(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation sows a value under the tag."""
        return eqn.primitive is sow_p and eqn.params["tag"] == self.tag

    def _is_other_sow(self, eqn: JaxprEqn) -> bool:
        return eqn.primitive is sow_p and eqn.params["tag"] != self.tag

    def _declares(self, eqn: JaxprEqn) -> bool:
        """A plug-in's primitive may declare variables; those that hold bodies only pass them on."""
        own_rule = eqn.primitive.name in unzip_rules and view(eqn) is None
        return own_rule or self.is_sow(eqn)


#: `rule(eqn, times, context) -> Outcome`, where `times` has an entry for each operand.
Rule = Callable[[JaxprEqn, Sequence[BindingTime], Context], Outcome]

#: The open table: a plug-in adds its primitive's rule by name. An equation of a primitive without
#: one, whose regions are not known either, is kept whole.
unzip_rules: RuleTable[Rule] = RuleTable()

#: The rules of loops, branches and calls whose regions are known, by `Regions.kind`.
kind_rules: RuleTable[Rule] = RuleTable()


def rule_of(eqn: JaxprEqn) -> Rule | None:
    """Return the rule of an equation: that of its primitive, or that of its regions."""
    rule = unzip_rules.get(eqn.primitive.name)
    inside = open_regions(eqn) if rule is None else None
    return rule if inside is None else kind_rules.get(inside.kind)


def no_rule(eqn: JaxprEqn) -> UnsupportedError:
    """Return the error of an equation that declares variables where they cannot be taken out."""
    return UnsupportedError(
        f"variables are sown inside {named(eqn)}, and unzip has no rule for it",
        f'a rule can be added: @jaxprtool.extend.rule("unzip", "{eqn.primitive.name}")',
    )


def operand_of(eqn: JaxprEqn, result: int) -> int | None:
    """Return which operand a result is, as it is, in part, or laid out anew; None if it is none."""
    gives = traits(eqn).gives
    return None if not gives else result if gives == "same" else 0


def whole(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    """Return an equation kept as it is, in each program that has all of its operands.

    One with an effect, or with a ref among its values, is kept in one program alone: in apply, if
    that has its operands, and what decides whether it is run.
    """
    results = meet(times)
    if has_lasting_effect(eqn) or _meets_ref(eqn):
        results = meet((results, context.reached))
        results = READY if results.ready else results
    return Outcome(
        (results,) * len(eqn.outvars),
        init=(eqn,) if results.early else (),
        apply=(eqn,) if results.ready else (),
    )


def _meets_ref(eqn: JaxprEqn) -> bool:
    return any(isinstance(atom.aval, AbstractRef) for atom in (*eqn.invars, *eqn.outvars))
