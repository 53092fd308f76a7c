"""The binding times of values when a jaxpr is split in two, and the open table of rules.

A binding time is two facts about a value, and both flow forwards:

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
    """The programs that can compute a value.

    Attributes:
        early: True if init can: it is computed from keys and constants alone.
        ready: True if apply can: it is computed from variables, other arguments and constants.
    """

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
    """The result of a rule for one equation.

    Attributes:
        times: The binding time of each result.
        init: The equations that replace it in init. They define its early results.
        apply: The equations that replace it in apply. They define its ready results.
        variables: The variables that are declared inside.
        values: The value in init of each leaf of these variables.
        arguments: The variable of apply for each of these leaves.
        parts: The `Split`s of the equation's bodies.
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
    """The state of one unzip.

    Attributes:
        tag: The tag of the variables.
        replaced: The number of values sown in mode "clobber" that a later one replaces, by path.
            They are not variables.
        reached: The binding time of the conditions that decide whether the body that is being split
            runs.
        scopes: The scopes around this body.
        bodies: This body and those around it, the outermost first.
        splits: The splits made so far.
        custom_calls: The parameters of calls with custom derivatives made so far.
    """

    tag: str | None
    replaced: dict[tuple[str, ...], int] = field(default_factory=dict)
    reached: BindingTime = BOTH
    scopes: list[str] = field(default_factory=list)
    bodies: list[ClosedJaxpr] = field(default_factory=list)
    splits: Memo = field(default_factory=Memo)
    custom_calls: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: Return True if a variable may be declared in a jaxpr, at any depth.
        self.sows = Contains(self._declares)
        #: Return True if a value is sown in a jaxpr under another tag, at any depth.
        self.sows_otherwise = Contains(self._is_other_sow)

    @contextmanager
    def under(self, condition: BindingTime) -> Iterator[None]:
        """Split bodies under a condition with this binding time while the context is active."""
        outside = self.reached
        self.reached = meet((outside, condition))
        yield
        self.reached = outside

    def is_sow(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation sows a value under the tag."""
        return eqn.primitive is sow_p and eqn.params["tag"] == self.tag

    def _is_other_sow(self, eqn: JaxprEqn) -> bool:
        return eqn.primitive is sow_p and eqn.params["tag"] != self.tag

    def _declares(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation sows under the tag, or is a plug-in's that may.

        Equations that hold bodies only pass the variables of these on.
        """
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
    """Return the error for an equation from which no rule can extract its variables."""
    return UnsupportedError(
        f"variables are sown inside {named(eqn)}, and unzip has no rule for it",
        f'add a rule with @jaxprtool.extend.rule("unzip", "{eqn.primitive.name}")',
    )


def operand_of(eqn: JaxprEqn, result: int) -> int | None:
    """Return which operand a result is a copy, part or other layout of; None if it is none."""
    gives = traits(eqn).gives
    return None if not gives else result if gives == "same" else 0


def whole(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    """Return the outcome of an equation that is not split: each program that can have it gets it.

    An equation with an effect, or with a ref among its operands or results, is kept in one program
    only: in apply, if apply has its operands and the conditions that decide whether it runs; else
    in init.
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
