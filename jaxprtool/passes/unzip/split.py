"""Split a jaxpr in two: the part that can be computed early, from keys, and the rest.

A value that was sown under the tag and is early is a *variable*: a result of init, an argument of
apply, and so both early and ready from there on (see `binding_times`). The rules in `unzip_rules`
enter structured equations; a body is split once for each pattern of binding times, so that shared
bodies stay shared. An effect happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
from jax.extend.core import Effect

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import named, substitute, type_of, with_operands
from jaxprtool.ir.core.structured import holds_jaxpr, keep
from jaxprtool.jaxcompat import AbstractRef, Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import has_lasting_effect
from jaxprtool.passes.unzip.binding_times import (
    BOTH,
    EARLY,
    READY,
    BindingTime,
    Context,
    Outcome,
    no_rule,
    rule_of,
    unzip_rules,
    whole,
)
from jaxprtool.passes.unzip.variables import Variable
from jaxprtool.primitives import SCOPE_PREFIX


@dataclass(eq=False)
class _Equations:
    """The equations of init or of apply, and the atoms that replace values no longer sown."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    names: dict[Var, Atom] = field(default_factory=dict)

    def lookup(self, atoms: Iterable[Atom]) -> list[Atom]:
        """Return the atoms that replace atoms of the body."""
        return substitute(atoms, self.names)

    def add(self, eqn: JaxprEqn) -> None:
        """Add an equation of the body."""
        self.eqns.append(with_operands(eqn, self.names) if self.names else eqn)

    @cached_property
    def effects(self) -> set[Effect]:
        """The effects of these equations that must stay."""
        return {e for eqn in self.eqns if has_lasting_effect(eqn) for e in eqn.effects}


class Split:
    """A closed jaxpr split into init and apply.

    `ins`, `outs` and `times` are the binding times of its arguments, of its results, and of every
    variable bound in the body itself. For each leaf of each variable, `values` has its value in
    init, and `arguments` the corresponding variable in apply. `parts` are the splits of the bodies
    inside, by the position of the equation that holds them. `stuck` are equations with an effect
    that neither init nor apply can have. `passes_on` is True if a value sown under the tag is not a
    variable and stays sown. `reached` is the binding time of the conditions that decide whether it
    is run.
    """

    def __init__(self, body: ClosedJaxpr, ins: tuple[BindingTime, ...], reached: BindingTime):
        self.body, self.ins, self.reached = body, ins, reached
        self.times = dict.fromkeys(body.constvars, BOTH)
        self.times.update(zip(body.invars, ins, strict=True))
        self.parts: dict[int, tuple[Split, ...]] = {}
        self.variables: list[Variable] = []
        self.values: list[Atom] = []
        self.arguments: list[Var] = []
        self.stuck: list[JaxprEqn] = []
        self.passes_on = False
        self.early, self.ready = _Equations(), _Equations()
        self._first: dict[tuple[str, ...], tuple[Variable, Sequence[Var]]] = {}
        self._ordered: set[Effect] = set()
        self._built: dict[Hashable, ClosedJaxpr] = {}

    @cached_property
    def outs(self) -> tuple[BindingTime, ...]:
        """The binding times of the results."""
        return tuple(map(self.of, self.body.outvars))

    def of(self, atom: Atom) -> BindingTime:
        """Return the binding time of an operand or a result."""
        return BOTH if type(atom) is Literal else self.times[atom]

    # --- init and apply as jaxprs ----------------------------------------------------------------

    def init(self, outs: Sequence[bool], variables: bool = True) -> ClosedJaxpr:
        """Return the closed jaxpr from the early arguments to the marked results and variables.

        The marked results must be early. The same request returns the same object.
        """
        request = "init", tuple(outs), variables
        if request not in self._built:
            invars = keep(self.body.invars, [v.early for v in self.ins])
            outvars = [*self._results(self.early, outs), *(self.values if variables else ())]
            self._built[request] = self._jaxpr("init", invars, outvars, self.early.eqns)
        return self._built[request]

    def apply(self, outs: Sequence[bool], at: int = 0) -> ClosedJaxpr:
        """Return the closed jaxpr from variables and the ready arguments to the marked results.

        The variables come before the ready argument number `at`. The marked results must be
        ready. The same request returns the same object.
        """
        request = "apply", tuple(outs), at
        if request not in self._built:
            ready = keep(self.body.invars, [v.ready for v in self.ins])
            invars = (*ready[:at], *self.arguments, *ready[at:])
            outvars = self._results(self.ready, outs)
            self._built[request] = self._jaxpr("apply", invars, outvars, self.ready.eqns)
        return self._built[request]

    def _results(self, equations: _Equations, outs: Sequence[bool]) -> list[Atom]:
        return equations.lookup(keep(self.body.outvars, outs))

    def _jaxpr(
        self, suffix: str, invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
    ) -> ClosedJaxpr:
        jaxpr = jaxcompat.replace_jaxpr(self.body, invars=invars, outvars=outvars, eqns=eqns)
        if not self.variables:
            return jaxpr
        debug = jaxpr.debug_info
        name = debug.func_name.removeprefix(SCOPE_PREFIX)
        debug = debug._replace(func_src_info=f"{name}_{suffix}")
        return jaxcompat.replace_jaxpr(jaxpr, debug_info=debug)

    # --- the equations of the body, in order ---------------------------------------------------

    def declare(self, eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> None:
        """Declare an early value a variable, or pass it on if a later one replaces it."""
        variable = Variable.of(eqn, eqn.params["tree"], [v.aval for v in eqn.outvars])
        operands = eqn.invars[: len(eqn.outvars)]
        values = self.early.lookup(operands)
        self.early.names.update(zip(eqn.outvars, values, strict=True))
        path = (*context.scopes, *variable.path)
        if context.replaced.get(path):
            context.replaced[path] -= 1
            passed = self.ready.lookup(operands)
            self.ready.names.update(zip(eqn.outvars, passed, strict=True))
            self.times.update(zip(eqn.outvars, times[: len(operands)], strict=True))
            return
        arguments = [Var(v.aval) if isinstance(v, DropVar) else v for v in eqn.outvars]
        self.times.update(dict.fromkeys(eqn.outvars, BOTH))
        self._add_variable(variable, values, arguments)

    def add_plain(self, eqn: JaxprEqn) -> None:
        """Add a plain equation: the same as `add` with `whole`, at a fraction of the cost."""
        times = self.times
        early = ready = True
        for atom in eqn.invars:
            if type(atom) is not Literal:
                of = times[atom]
                early &= of[0]
                ready &= of[1]
        results = _KNOWN[early, ready]
        for v in eqn.outvars:
            times[v] = results
        if early:
            self.early.add(eqn)
        if ready:
            self.ready.add(eqn)

    def add(self, position: int, eqn: JaxprEqn, outcome: Outcome) -> None:
        """Add the outcome of a rule for an equation."""
        self._check_order(eqn, outcome)
        self.times.update(zip(eqn.outvars, outcome.times, strict=True))
        self._add_variables(outcome)
        for equations, eqns in ((self.early, outcome.init), (self.ready, outcome.apply)):
            for each in eqns:
                equations.add(each)
        if outcome.parts:
            self.parts[position] = outcome.parts
            stuck = any(part.stuck for part in outcome.parts)
            self.passes_on |= any(part.passes_on for part in outcome.parts)
        else:
            stuck = has_lasting_effect(eqn) and not (outcome.init or outcome.apply)
        if stuck:
            self.stuck.append(eqn)

    def _add_variables(self, outcome: Outcome) -> None:
        """Add variables from inside an equation; the earlier one replaces a recomputed one."""
        start = 0
        for variable in outcome.variables:
            end = start + len(variable.avals)
            values, arguments = outcome.values[start:end], outcome.arguments[start:end]
            start = end
            if variable.again and variable.path in self._first:
                before, firsts = self._first[variable.path]
                _check_same(before, variable)
                for place, first in zip(arguments, firsts, strict=True):
                    self._put_in_place(first, place, variable)
            else:
                self._add_variable(variable, values, arguments)

    def _put_in_place(self, first: Var, place: Var, variable: Variable) -> None:
        """Replace a recomputed variable by the earlier one.

        JAX moves loop-invariant values out of a loop, and recomputes them inside.
        """
        shape, wanted = first.aval.shape, place.aval.shape
        if shape == wanted:
            self.ready.names[place] = first
        elif shape == wanted[len(wanted) - len(shape) :]:
            more = wanted[: len(wanted) - len(shape)]
            self.ready.eqns.append(equation_of(lambda x: jax.lax.broadcast(x, more), first, place))
        else:
            raise UnsupportedError(
                f"variable '{variable.path[-1]}' is recomputed by {named(variable.eqn)} as "
                f"{type_of(place.aval)}, but was {type_of(first.aval)} before"
            )

    def _add_variable(
        self, variable: Variable, values: Sequence[Atom], arguments: Sequence[Var]
    ) -> None:
        self.variables.append(variable)
        self.values += values
        self.arguments += arguments
        self._first.setdefault(variable.path, (variable, arguments))

    def _check_order(self, eqn: JaxprEqn, outcome: Outcome) -> None:
        """Check that ordered effects of init come first: init runs before all of apply."""
        early = {e for each in outcome.init for e in each.effects}
        if jaxcompat.ordered_effects(early) & self._ordered:
            raise UnsupportedError(
                f"{named(eqn)} has an ordered effect that belongs to init, "
                "and follows one that belongs to apply"
            )
        ready = {e for each in outcome.apply for e in each.effects}
        self._ordered |= jaxcompat.ordered_effects(ready)


def split(body: ClosedJaxpr, ins: Sequence[BindingTime], context: Context) -> Split:
    """Split a closed jaxpr by the binding times of its arguments; see `Split`.

    Raises UnzipError for a variable without a name, and UnsupportedError, which names the
    equation, for a variable that cannot be extracted, and for ordered effects that init
    and apply would reorder.
    """
    # Which of the values sown in mode "clobber" is the last depends on where a body is called.
    if context.replaced and context.sows(body):
        return _split(body, tuple(ins), context)
    request = tuple(ins), context.reached
    return context.splits(lambda: _split(body, tuple(ins), context), body, *request)


def _split(body: ClosedJaxpr, ins: tuple[BindingTime, ...], context: Context) -> Split:
    part = Split(body, ins, context.reached)
    context.bodies.append(body)
    for position, eqn in enumerate(body.eqns):
        if _is_plain(eqn):
            part.add_plain(eqn)
            continue
        times = [part.of(atom) for atom in eqn.invars]
        if context.is_sow(eqn) and all(v.early for v in times):
            part.declare(eqn, times, context)
        else:
            part.passes_on |= context.is_sow(eqn)
            part.add(position, eqn, _outcome(eqn, times, context))
    context.bodies.pop()
    return part


def _is_plain(eqn: JaxprEqn) -> bool:
    """Return True for an equation without a rule, bodies, effects or refs: the common case."""
    name = eqn.primitive.name
    return not (
        eqn.effects
        or name in unzip_rules
        or name == "sow"
        or holds_jaxpr(eqn.params.values())
        or any(type(v.aval) is AbstractRef for v in eqn.outvars)
    )


def _outcome(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    rule = rule_of(eqn)
    if rule is not None:
        return rule(eqn, times, context)
    if context.sows.inside(eqn):
        raise no_rule(eqn)
    return whole(eqn, times, context)


_KNOWN: dict[tuple[bool, bool], BindingTime] = {
    times: times for times in (BOTH, EARLY, READY, BindingTime(False, False))
}


def _check_same(before: Variable, variable: Variable) -> None:
    """Refuse a variable that may be another one of the same name, rather than recomputed.

    JAX keeps the location where a value was sown first. In a remat within a loop within a remat,
    JAX marks even values as recomputed that are computed for the first time.
    """
    traces = (each.eqn.source_info.traceback for each in (before, variable))
    if before.again or len(set(map(id, traces))) > 1:
        raise UnsupportedError(
            f"'{variable.path[-1]}' is sown more than once by {named(variable.eqn)}, in a "
            "gradient through remat, so a recomputed variable cannot be told from a second one",
            "unzip the function first, then differentiate its apply",
        )


def reordered(parts: Iterable[Split]) -> bool:
    """Return True if running a loop of init and one of apply would reorder ordered effects."""
    early: set[Effect] = set()
    ready: set[Effect] = set()
    for part in parts:
        early |= jaxcompat.ordered_effects(part.early.effects)
        ready |= jaxcompat.ordered_effects(part.ready.effects)
    return bool(early & ready)


def equation_of(function: Callable[[jax.Array], jax.Array], operand: Atom, result: Var) -> JaxprEqn:
    """Return the only equation of a function of one array, from `operand` to `result`."""
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype))
    (eqn,) = jaxpr.eqns
    return eqn.replace(invars=[operand], outvars=[result])
