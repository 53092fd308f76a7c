"""Split a jaxpr in two: the part that can be computed early, from keys, and the rest.

A binding time is two facts about a value, and both flow forwards:

    early   it is computed from keys and constants alone: `init` can have it
    ready   it is computed from variables, other arguments and constants: `apply` can have it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.extend.core import Effect
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import (
    Contains,
    free_variables,
    named,
    needed_equations,
    substitute,
    type_of,
    with_operands,
)
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Scan, While, holds_jaxpr, keep, open_regions, regions, view
from jaxprtool.ir.rewrite import Memo, narrow
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
)
from jaxprtool.passes.cleanup.dce import dce_regions, has_lasting_effect
from jaxprtool.primitives import SCOPE_PREFIX, sow_p

# --- binding times --------------------------------------------------------------------------------
# The binding times of values when a jaxpr is split in two, and the open table of rules.


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


def unzip_rule(eqn: JaxprEqn) -> Rule | None:
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


# --- split ----------------------------------------------------------------------------------------
# Split a jaxpr in two: the part that can be computed early, from keys, and the rest.
#
# A value that was sown under the tag and is early is a *variable*: a result of init, an argument of
# apply, and so both early and ready from there on (see `binding_times`). The rules in `unzip_rules`
# enter structured equations; a body is split once for each pattern of binding times, so that shared
# bodies stay shared. An effect happens once.


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
            for new in eqns:
                equations.add(new)
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
                earlier, firsts = self._first[variable.path]
                _check_same(earlier, variable)
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
        early = {e for new in outcome.init for e in new.effects}
        if jaxcompat.ordered_effects(early) & self._ordered:
            raise UnsupportedError(
                f"{named(eqn)} has an ordered effect that belongs to init, "
                "and follows one that belongs to apply"
            )
        ready = {e for new in outcome.apply for e in new.effects}
        self._ordered |= jaxcompat.ordered_effects(ready)


def split_body(body: ClosedJaxpr, ins: Sequence[BindingTime], context: Context) -> Split:
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
    rule = unzip_rule(eqn)
    if rule is not None:
        return rule(eqn, times, context)
    if context.sows.inside(eqn):
        raise no_rule(eqn)
    return whole(eqn, times, context)


_KNOWN: dict[tuple[bool, bool], BindingTime] = {
    times: times for times in (BOTH, EARLY, READY, BindingTime(False, False))
}


def _check_same(earlier: Variable, variable: Variable) -> None:
    """Refuse a variable that may be another one of the same name, rather than recomputed.

    JAX keeps the location where a value was sown first. In a remat within a loop within a remat,
    JAX marks even values as recomputed that are computed for the first time.
    """
    traces = (v.eqn.source_info.traceback for v in (earlier, variable))
    if earlier.again or len(set(map(id, traces))) > 1:
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


# --- variables ------------------------------------------------------------------------------------
# The variables that a function declares, and the pytree in which init returns them.
#
# A variable is one sown value. In that pytree, scopes are nested dicts and a name is the key of the
# value; values sown several times in mode "append" are a list, in program order.

#: The tag under which unzip sows variables that it chooses itself, and the separator between scopes
#: and name in their names.
CHOSEN, SEPARATOR = "unzip.chosen", "/"


class UnzipError(JaxprToolError, ValueError):
    """A function that cannot be unzipped: its variables are invalid, or do not cut the keys off."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A value that was sown.

    Attributes:
        path: Its scopes, and its name.
        mode: The mode of the sow: "strict", "clobber" or "append".
        tree: The pytree of the value.
        avals: The types of its leaves in init, with an additional axis for each loop around the
            equation.
        eqn: The equation that sows it.
        again: True if it may be an earlier variable, recomputed by JAX for a `remat`.
    """

    path: tuple[str, ...]
    mode: str
    tree: PyTreeDef
    avals: tuple[Aval, ...]
    eqn: JaxprEqn
    again: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, tree: PyTreeDef, avals: Sequence[Aval]) -> Variable:
        """Return the variable that an equation declares, under the name in its parameters.

        Raises UnzipError if it has no name.
        """
        name, mode = eqn.params["name"], eqn.params.get("mode", "strict")
        if name is None:
            raise UnzipError(f"Must provide name for variable. It is the {named(eqn)}")
        chosen = eqn.params.get("tag") == CHOSEN
        path = tuple(name.split(SEPARATOR)) if chosen else (name,)
        return cls(path, mode, tree, tuple(avals), eqn)

    def under(self, scope: str) -> Variable:
        """Return the variable with its path outside a `nest` with this scope."""
        return replace(self, path=(scope, *self.path))

    def stacked(self, length: int) -> Variable:
        """Return the variable outside a loop, with the values of all iterations stacked."""
        avals = tuple(jaxcompat.stacked_aval(length, aval) for aval in self.avals)
        return replace(self, avals=avals)


def replaced(variables: Sequence[Variable]) -> dict[tuple[str, ...], int]:
    """Return, by path, the number of values sown in mode "clobber" that a later one replaces."""
    counts = Counter(v.path for v in variables if v.mode == "clobber")
    return {path: count - 1 for path, count in counts.items() if count > 1}


def leaf_tree(variables: Sequence[Variable]) -> dict[str, Any]:
    """Return the pytree of variables with, for each leaf, its number in the order of declaration.

    Raises UnzipError if two variables have the same name, or a name is also that of a scope.
    """
    tree: dict[str, Any] = {}
    names: dict[tuple[str, ...], Variable] = {}
    scopes: dict[tuple[str, ...], Variable] = {}
    count = 0
    for variable in variables:
        leaves = range(count, count + len(variable.avals))
        count += len(variable.avals)
        value = filled(variable.tree, leaves)
        path, level = variable.path, tree
        for depth, scope in enumerate(path[:-1], start=1):
            _check(variable, path[:depth], names.get(path[:depth]))
            scopes.setdefault(path[:depth], variable)
            level = level.setdefault(scope, {})
        earlier = names.get(path)
        if earlier is not None and earlier.mode == variable.mode == "append":
            level[path[-1]].append(value)
            continue
        _check(variable, path, earlier or scopes.get(path))
        names[path] = variable
        level[path[-1]] = [value] if variable.mode == "append" else value
    return tree


def _check(variable: Variable, path: tuple[str, ...], earlier: Variable | None) -> None:
    """Refuse a variable if its name, or one of its scopes, is the name of another one."""
    if earlier is not None:
        both = f"{named(earlier.eqn)} and {named(variable.eqn)}"
        raise UnzipError(f"Cannot use duplicate variable name: {'/'.join(path)} ({both})")


# --- keys -----------------------------------------------------------------------------------------
# Find the arguments of a program that are keys: those at given positions, or all keys by type.
#
# A key by type is typed (`key<fry>[]`), or it is an array of words (`u32[2]`) that the program
# wraps into a typed key, or draws random bits from. If there is neither, an integer from which a
# key is created counts as one.


@dataclass(frozen=True)
class Arguments:
    """The `(args, kwargs)` of init, and of apply without variables: trees of flat positions."""

    early: Any
    late: Any

    @property
    def marks(self) -> list[bool]:
        """For each flat argument of the program, True if it is an argument of init."""
        early, late = map(jax.tree.leaves, (self.early, self.late))
        return [i in set(early) for i in range(len(early) + len(late))]


def at_positions(program: Program, keys: Sequence[int]) -> Arguments:
    """Split off the positional arguments `keys`. Raises ArgumentsError if one does not exist."""
    args, kwargs = _positions(program)
    # A function without positional arguments has no key; the default position 0 is ignored.
    keys = keys if args else [key for key in keys if key != 0]
    for key in keys:
        if not -len(args) <= key < len(args):
            has = f"it has {len(args)}" if args else "it has none"
            raise ArgumentsError(f"{program.name} has no positional argument {key}; {has}")
    chosen = {key % len(args) for key in keys}
    early = tuple(arg for i, arg in enumerate(args) if i in chosen)
    late = tuple(arg for i, arg in enumerate(args) if i not in chosen)
    return Arguments((early, {}), (late, kwargs))


def by_type(program: Program) -> Arguments:
    """Split off all keys, wherever they are. Raises UnzipError if there is none.

    An argument of keys alone is passed to init unchanged; any other key is a positional argument of
    init, and replaced by None in apply.
    """
    key_positions = _key_positions(program)
    if not key_positions:
        raise UnzipError(
            f"{program.name} has no key among its arguments: none has a key's type (key<fry>[]), "
            "or is used as a key (u32[2])",
            "name the key arguments with --key-args (key_args), or arguments of any type with "
            "--known (known)",
        )
    args, kwargs = _positions(program)
    keys: list[Any] = []
    late = tuple(rest for arg in args if (rest := _without(arg, key_positions, keys)) is not _GONE)
    named, others = {}, {}
    for name, arg in kwargs.items():
        if _is_whole(arg, key_positions):
            named[name] = arg
        else:
            others[name] = _without(arg, key_positions, keys)
    return Arguments((tuple(keys), named), (late, others))


_GONE = object()


def _without(arg: Any, key_positions: set[int], keys: list[Any]) -> Any:
    """Return an argument without its keys, which are added to `keys`; `_GONE` if empty."""
    if _is_whole(arg, key_positions):
        keys.append(arg)
        return _GONE
    keys += [i for i in jax.tree.leaves(arg) if i in key_positions]
    return jax.tree.map(lambda i: None if i in key_positions else i, arg)


def _is_whole(arg: object, key_positions: set[int]) -> bool:
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and key_positions.issuperset(leaves)


def _positions(program: Program) -> Any:
    count = program.in_tree.num_leaves
    return filled(program.in_tree, list(range(count)))


# --- keys by type ---------------------------------------------------------------------------------


def _key_positions(program: Program) -> set[int]:
    """Return the flat arguments that are keys by type; if there are none, those that are seeds."""
    avals = dict(enumerate(program.in_avals))
    keys = {i for i, aval in avals.items() if is_of(aval, jax.dtypes.prng_key)}
    words = {i for i, aval in avals.items() if is_of(aval, jnp.uint32) and aval.ndim}
    if words:
        keys |= words & _used_by(program, _UseFinder(lambda eqn: traits(eqn).key_words))
    integers = {i for i, aval in avals.items() if is_of(aval, jnp.integer)}
    return keys or (
        integers and integers & _used_by(program, _UseFinder(_makes_key, computed=True))
    )


def is_of(aval: Aval, scalar_type: type) -> bool:
    """Return True if a value is an array of a kind of dtype."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, scalar_type)


def _used_by(program: Program, uses: _UseFinder) -> set[int]:
    """Return the flat arguments that are used in the way `uses` searches for."""
    flags = uses.arguments(program.jaxpr, [False] * len(program.jaxpr.outvars))
    return {i for i, flag in enumerate(flags) if flag}


def _makes_key(eqn: JaxprEqn) -> int:
    return int(eqn.primitive.name == "random_seed")


class _UseFinder:
    """Find the values that some primitives use, backwards; visits each body once.

    Between an argument and its use it may change its layout or be taken in parts; if `computed`,
    any computation is allowed.
    """

    def __init__(self, consumed: Callable[[JaxprEqn], int], computed: bool = False):
        #: The number of operands of an equation, from the first, that it uses in this way.
        self.consumed, self.computed = consumed, computed
        self.found: dict[Hashable, list[bool]] = {}

    def arguments(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        """Return which arguments of a body are used, if the marked results are."""
        jaxpr = jaxcompat.open_jaxpr(body)
        request = jaxpr, tuple(outs)
        if request not in self.found:
            used = {v for v, flag in zip(jaxpr.outvars, outs, strict=True) if flag}
            for eqn in reversed(jaxpr.eqns):
                flags = self.operands(eqn, [v in used for v in eqn.outvars])
                used.update(
                    atom
                    for atom, flag in zip(eqn.invars, flags, strict=True)
                    if flag and type(atom) is not Literal
                )
            self.found[request] = [v in used for v in jaxpr.invars]
        return self.found[request]

    def operands(self, eqn: JaxprEqn, outs: list[bool]) -> list[bool]:
        """Return which operands of an equation are used, if the marked results are."""
        count = len(eqn.invars)
        if consumed := self.consumed(eqn):
            return [i < consumed for i in range(count)]
        if eqn.primitive.name == "concatenate":
            return [any(outs)] * count
        if traits(eqn).gives in ("same", "layout", "part"):
            used = {operand_of(eqn, result) for result, flag in enumerate(outs) if flag}
            return [i in used for i in range(count)]
        inside = regions(eqn)
        if inside is None:
            return [self.computed and any(outs)] * count
        bodies = inside.bodies
        return inside.backward(outs, lambda number, asked: self.arguments(bodies[number], asked))


# --- loops ----------------------------------------------------------------------------------------
# Conversion of a `while` with a known number of iterations to a `scan`.
#
# The number is found by running it: only the part of it that its condition depends on, on initial
# values that are constants. `lax.fori_loop` creates such loops if its bounds are arrays.

#: The number of iterations after which a loop is considered too long.
LIMIT = 1_000_000


def as_scan(eqn: JaxprEqn, context: Context) -> JaxprEqn:
    """Return the `scan` that is equivalent to this `while`.

    Raises UnsupportedError with the reason if the number of iterations is not known.
    """
    loop = While.of(eqn)
    if context.sows(loop.cond):
        raise _refused(eqn, "a variable is sown in its condition")
    length = _length(eqn, context)
    count_to_one = partial(jax.lax.scan, lambda count, _: (count + 1, None), 0, length=1)
    jaxpr = jaxcompat.traced_like(eqn, lambda: [count_to_one()[0]], ())
    scan = Scan.of(next(inner for inner in jaxpr.eqns if inner.primitive.name == "scan"))
    new = scan.rebuild(
        consts=loop.body_consts,
        carry=loop.carry,
        xs=(),
        carry_outs=loop.outs,
        ys=(),
        body=loop.body,
        length=length,
    )
    return new.replace(source_info=eqn.source_info)


def _length(eqn: JaxprEqn, context: Context) -> int:
    """Return how often the body runs."""
    loop = _counter(eqn)
    if any(map(context.sows, (loop.cond, loop.body))):
        raise _refused(eqn, "its condition depends on a variable")
    values = _constants(loop.eqn.invars, context)
    if values is None:
        raise _refused(eqn, "its condition depends on values that are not constant")
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    cond, body = map(jaxcompat.jaxpr_as_fun, (loop.cond, loop.body))

    def going(state: tuple[jax.Array, ...]) -> jax.Array:
        count, *carry = state
        return cond(*values[:c], *carry)[0] & (count < LIMIT)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count, *carry = state
        return count + 1, *body(*values[c:b], *carry)

    with jax.ensure_compile_time_eval():
        count = int(jax.lax.while_loop(going, step, (0, *values[b:]))[0])
    if count == LIMIT:
        raise _refused(eqn, f"it runs {LIMIT:,} or more iterations")
    return count


def _counter(eqn: JaxprEqn) -> While:
    """Return the part of a loop that its condition depends on."""
    loop = While.of(eqn)
    # dce keeps equations with effects; here they have to be read as well.
    bare = [inner.replace(effects=set()) for inner in loop.body.eqns]
    bare_loop = loop.rebuild(body=jaxcompat.replace_jaxpr(loop.body, eqns=bare))
    _, counter = dce_regions([False] * len(loop.outs), [True] * len(eqn.invars), bare_loop)
    part = While.of(counter)
    read = {v for inner in part.body.eqns for v in inner.outvars}
    if loop.cond.effects or any(
        inner.effects and not read.isdisjoint(inner.outvars) for inner in loop.body.eqns
    ):
        raise _refused(eqn, "its condition depends on an effect")
    return part


def _constants(atoms: Sequence[Atom], context: Context) -> list[jax.Array] | None:
    """Return the values of operands in the body being split; None if not all are constant."""
    body = context.bodies[-1]
    pairs = zip(body.constvars, body.consts, strict=True)
    constants = {v for v, value in pairs if not isinstance(value, jax.core.Tracer)}
    eqns = needed_equations(body.eqns, atoms)
    if not constants.issuperset(free_variables(eqns, atoms)):
        return None
    if any(eqn.effects or context.is_sow(eqn) or context.sows.inside(eqn) for eqn in eqns):
        return None
    with jax.ensure_compile_time_eval():
        return jaxcompat.jaxpr_as_fun(narrow(body, (), atoms, eqns))()


def _refused(eqn: JaxprEqn, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"variables are sown inside {named(eqn)}, whose number of iterations is unknown: {why}",
        "sow them before the loop, or use a fixed number of iterations (lax.scan)",
    )
