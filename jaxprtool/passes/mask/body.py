"""Mask a jaxpr, in one forward pass over its equations.

Variables whose types mention a masked symbol become padded variables.

- An equation that mentions no masked symbol stays as it is.
- An equation that holds jaxprs has a structured rule, which masks these in turn.
- Any other equation is replaced by the equations of its rule. Equations that are alike share a
  template, for which the rule is traced once (`ir.templates`).

A masked body takes the symbols that it needs as its first arguments. It computes each size and each
mask from these once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.structured import CALLS
from jaxprtool.ir.templates import (
    Template,
    has_float,
    instantiated,
    signature,
    template_of_jaxpr,
)
from jaxprtool.ir.traits import traits
from jaxprtool.ir.weak_types import keep_weak_types
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var
from jaxprtool.passes.dce import dce_body
from jaxprtool.passes.mask.guards import guarded, mixes_rounds
from jaxprtool.passes.mask.sizes import Bounds, UnboundedSize
from jaxprtool.passes.mask.table import Masking, mask_rules, refusal
from jaxprtool.passes.mask.values import Facts, Padded, result_facts

#: The type of a symbol.
SCALAR = jax.core.ShapedArray((), np.dtype(np.int32))
#: The type of the flag that says if a round of a scan is real, and not padding.
_FLAG = jax.core.ShapedArray((), np.dtype(np.bool_))


@dataclass(frozen=True, eq=False)
class MaskedBody:
    """A masked jaxpr.

    Attributes:
        jaxpr: The jaxpr. It takes the values of `symbols`, the flag of the round if `rounds` is
            True, then the arguments of the old body.
        symbols: The masked symbols that it needs.
        facts: The facts about its results.
        rounds: Whether it takes a flag that says if the current round of a scan is real.
    """

    jaxpr: ClosedJaxpr
    symbols: tuple[str, ...]
    facts: tuple[Facts, ...]
    rounds: bool = False


#: `rule(writing, eqn, operands, facts)` writes the new form of an equation, with `Writing.add`. It
#: is passed the new operands, and the facts about them.
StructuredRule = Callable[..., None]

#: The open table of rules for equations that hold jaxprs.
structured_mask_rules: RuleTable[StructuredRule] = RuleTable()


@dataclass(eq=False)
class Run:
    """The state of masking one program, shared by all its bodies.

    Attributes:
        bounds: The masked symbols and their bounds.
        templates: The templates of rules, sizes and masks.
        numbers: A number for each padded type and the facts about it, for the keys of templates.
        with_floats: Primitives with a float in the parameters of some equation.
        bodies: The masked bodies.
        rules: The masked derivative rules of custom calls.
        new_number: Yields the numbers.
        in_scan: Whether the body that is masked is that of a scan, or is inside it.
    """

    bounds: Bounds
    templates: dict[Hashable, Template] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    with_floats: set[Primitive] = field(default_factory=set)
    bodies: dict[Hashable, tuple[AnyJaxpr, MaskedBody]] = field(default_factory=dict)
    rules: dict[Hashable, Callable[[], Any]] = field(default_factory=dict)
    new_number: Any = field(default_factory=count)
    in_scan: bool = False

    def body(self, body: ClosedJaxpr, facts: Sequence[Facts], rounds: bool = False) -> MaskedBody:
        """Return the masked form of a closed jaxpr.

        Args:
            body: The jaxpr.
            facts: The facts about its arguments.
            rounds: Whether it is, or is inside, the body of a scan of masked length.
        """
        key = id(jaxcompat.open_jaxpr(body)), tuple(facts), rounds, self.in_scan
        if key not in self.bodies:
            writing = Writing(self, round=Var(_FLAG) if rounds else None)
            # Keep the old body alive, so that no other gets its id.
            self.bodies[key] = body, writing.body(body, facts)
        return self.bodies[key][1]

    @contextmanager
    def scanned(self) -> Iterator[None]:
        """Set `in_scan` while the body of a scan is masked."""
        before, self.in_scan = self.in_scan, True
        try:
            yield
        finally:
            self.in_scan = before

    def number(self, aval: Aval, facts: Facts) -> int:
        """Return the number that stands for a padded type and the facts about a value of it."""
        key = aval, facts
        if key not in self.numbers:
            self.numbers[key] = next(self.new_number)
        return self.numbers[key]

    def aval(self, aval: Aval) -> Aval:
        """Return the padded type of a logical one."""
        shape = getattr(aval, "shape", ())
        return aval.update(shape=self.bounds.shape(shape)) if self.bounds.axes(shape) else aval


@dataclass(eq=False)
class Writing:
    """One new body while it is written.

    Attributes:
        run: The masking of the program.
        round: The flag of the current round, in the body of a scan of masked length.
        eqns: The equations written so far.
        env: The atoms of the new body that replace variables of the old one.
        facts: The facts about variables of the old body.
        symbols: The arguments of the new body that are values of symbols.
        consts: The constants that rules have used, by id.
    """

    run: Run
    round: Var | None = None
    eqns: list[JaxprEqn] = field(default_factory=list)
    env: dict[Var, Atom] = field(default_factory=dict)
    facts: dict[Var, Facts] = field(default_factory=dict)
    symbols: dict[str, Var] = field(default_factory=dict)
    consts: dict[int, tuple[Var, Any]] = field(default_factory=dict)
    _size_atoms: dict[Hashable, Atom] = field(default_factory=dict)
    _guards: dict[Atom, Atom] = field(default_factory=dict)

    def body(
        self,
        body: ClosedJaxpr,
        facts: Sequence[Facts],
        sizes: Sequence[Any] = (),
        outermost: bool = False,
    ) -> MaskedBody:
        """Write the masked form of a closed jaxpr; see `Run.body`.

        Args:
            body: The jaxpr.
            facts: The facts about its arguments.
            sizes: Logical sizes to return after its results.
            outermost: Whether it is the body of the whole program.
        """
        invars = []
        for var, known in zip(body.invars, facts, strict=True):
            aval = self.run.aval(var.aval)
            invars.append(var if aval is var.aval else Var(aval))
            apart = outermost and known.active and aval is not var.aval
            self._bind(var, self._apart(invars[-1], known) if apart else invars[-1], known)
        for eqn in jaxcompat.open_jaxpr(body).eqns:
            self._equation(eqn)
        outvars = [*map(self.atom, body.outvars), *map(self.size, sizes)]
        made = self.consts.values()
        flag = [] if self.round is None else [self.round]
        names = tuple(name for name in self.run.bounds if name in self.symbols)
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *(var for var, _ in made)],
            consts=[*body.consts, *(value for _, value in made)],
            invars=[*(self.symbols[name] for name in names), *flag, *invars],
            outvars=outvars,
            eqns=self.eqns,
        )
        return MaskedBody(new, names, tuple(map(self.known, body.outvars)), bool(flag))

    # --- values ---------------------------------------------------------------------------------

    def atom(self, atom: Atom) -> Atom:
        """Return the atom of the new body that replaces one of the old."""
        return atom if type(atom) is Literal else self.env.get(atom, atom)

    def known(self, atom: Atom) -> Facts:
        """Return the facts about an atom of the old body."""
        found = None if type(atom) is Literal else self.facts.get(atom)
        return Facts.of(atom, active=False) if found is None else found

    def _bind(self, var: Var, atom: Atom, facts: Facts) -> None:
        if atom is not var:
            self.env[var] = atom
        self.facts[var] = facts

    def symbol(self, name: str) -> Var:
        """Return the argument of the new body that is the value of a symbol."""
        if name not in self.symbols:
            self.symbols[name] = Var(SCALAR)
        return self.symbols[name]

    def size(self, size: Any) -> Atom:
        """Return the atom of the value of a logical size."""
        if isinstance(size, int):
            return jaxcompat.as_literal(size, SCALAR)
        return self._computed("size", size, lambda masking: masking.size(size))

    def valid(self, size: Any) -> Atom:
        """Return the atom of the mask of an axis of a logical size."""
        return self._computed("valid", size, lambda masking: masking.valid(size))

    def _computed(self, what: str, size: Any, compute: Callable[[Masking], Any]) -> Atom:
        key = what, size
        if key not in self._size_atoms:
            sizes = [size] if what == "valid" else []
            known = self.run.templates.get(key)
            if known is None:
                known = self._traced(lambda masking: [compute(masking)], (), sizes)
                self.run.templates[key] = known
            self._size_atoms[key] = self._written(known, (), sizes, jaxcompat.NO_SOURCE)[0]
        return self._size_atoms[key]

    def _apart(self, atom: Atom, facts: Facts) -> Atom:
        """Return an argument of the program whose derivative is zero in its padding.

        The caller may have computed the padding from something that is differentiated.
        """
        key = "apart", atom.aval, facts
        axes = self.run.bounds.axes(facts.shape)
        sizes = list(dict.fromkeys(facts.shape[axis] for axis in axes))
        if key not in self.run.templates:

            def call(masking: Masking, array: Any) -> list[Any]:
                return [masking.apart(array, facts.shape, axes, active=True)]

            self.run.templates[key] = self._traced(call, [atom.aval], sizes, "argument")
        return self._written(self.run.templates[key], [atom], sizes, jaxcompat.NO_SOURCE)[0]

    # --- equations ------------------------------------------------------------------------------

    def outs(self, variables: Sequence[Var]) -> list[Var]:
        """Return variables for results: new ones if they are padded, otherwise the same."""
        avals = [self.run.aval(var.aval) for var in variables]
        return [
            var if aval is var.aval else type(var)(aval)
            for var, aval in zip(variables, avals, strict=True)
        ]

    def add(self, eqn: JaxprEqn, like: JaxprEqn, facts: Sequence[Facts]) -> None:
        """Add an equation whose results replace those of the old equation `like`."""
        self.eqns.append(eqn)
        for old, new, known in zip(like.outvars, eqn.outvars, facts, strict=True):
            self._bind(old, new, known)

    def _equation(self, eqn: JaxprEqn) -> None:
        operands = [self.atom(atom) for atom in eqn.invars]
        facts = [self.known(atom) for atom in eqn.invars]
        # In a scan, the derivative of a value that is the same in all rounds is a sum over the
        # rounds, to which those of the padding must add zero. Rules of bilinear primitives, and
        # bodies of calls, ensure that themselves.
        mixed = self.round is not None and mixes_rounds(facts)
        sums_itself = traits(eqn).bilinear or eqn.primitive.name in CALLS
        try:
            if mixed and not sums_itself:
                operands = [
                    self._guarded(atom) if each.active and not each.varies else atom
                    for atom, each in zip(operands, facts, strict=True)
                ]
            if not (self.run.bounds.mentions(eqn) or (mixed and sums_itself)):
                self._unchanged(eqn, operands, facts)
            elif structured := structured_mask_rules.get(eqn.primitive.name):
                structured(self, eqn, operands, facts)
            else:
                self._by_rule(eqn, operands, facts)
        except UnboundedSize as error:
            raise refusal(eqn, error.message, error.hint) from error
        except JaxprToolError:
            raise
        except Exception as error:  # a rule, JAX's or a plug-in's, may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise refusal(eqn, reason) from error

    def _unchanged(self, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
        active = any(each.active for each in facts) and not traits(eqn).stops_derivative
        same = all(a is b for a, b in zip(operands, eqn.invars, strict=True))
        effects = eqn.effects
        if effects and not same:
            effects = jaxcompat.renamed_effects(effects, self.env)
        self.eqns.append(eqn if same else eqn.replace(invars=operands, effects=effects))
        varies = any(each.varies for each in facts)
        for var in eqn.outvars:
            self.facts[var] = replace(Facts.of(var, active=active), varies=varies)

    def _by_rule(self, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
        if eqn.effects:
            raise refusal(eqn, "it has an effect on a value that is padded")
        run = self.run
        kinds = [run.number(a.aval, f) for a, f in zip(operands, facts, strict=True)]
        outs = tuple(v.aval.shape for v in eqn.outvars)
        key: Hashable
        try:
            key = signature(eqn, kinds, run.with_floats), outs, self.round is None, run.in_scan
            template = run.templates.get(key)
        except TypeError:  # a parameter that cannot be hashed
            key, template = id(eqn), None
        sizes = self._sizes(eqn)
        if template is None:
            template = self._traced_rule(eqn, operands, facts, sizes)
            run.templates[key] = template
            if any(map(has_float, eqn.params.values())):
                run.with_floats.add(eqn.primitive)
        results = self._written(template, operands, sizes, eqn.source_info)
        for var, atom, known in zip(eqn.outvars, results, template.kinds, strict=True):
            self._bind(var, atom, known)

    def _sizes(self, eqn: JaxprEqn) -> list[Any]:
        """Return the masked sizes in the types of an equation, without duplicates."""
        is_masked = self.run.bounds.is_masked
        atoms = (*eqn.invars, *eqn.outvars)
        found = {n: None for v in atoms for n in getattr(v.aval, "shape", ()) if is_masked(n)}
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            found[eqn.params["dim"]] = None
        return list(found)

    def _guarded(self, atom: Atom) -> Atom:
        """Return a value whose derivative is zero in rounds of the padding."""
        if atom not in self._guards:
            key = "guarded", atom.aval
            if key not in self.run.templates:
                jaxpr = jaxcompat.trace_in_setting(
                    lambda flag, x: [guarded(flag, x)], [_FLAG, atom.aval], None
                )
                self.run.templates[key] = template_of_jaxpr(jaxpr, ())
            values = [self.round, atom]
            eqns, results = instantiated(self.run.templates[key], values, jaxcompat.NO_SOURCE)
            self.eqns += eqns
            self._guards[atom] = results[0]
        return self._guards[atom]

    # --- templates ------------------------------------------------------------------------------

    def _traced_rule(
        self, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts], sizes: Sequence[Any]
    ) -> Template:
        apply = rule_of(eqn)
        active = any(each.active for each in facts) and not traits(eqn).stops_derivative
        varies = any(each.varies for each in facts)
        found: list[Facts] = []

        def call(masking: Masking, *arrays: Any) -> list[Any] | None:
            def outs(*arrays: Any) -> list[Any]:
                made = apply(masking, eqn, *map(Padded, arrays, facts))
                results = made if eqn.primitive.multiple_results else [made]
                pairs = [
                    result_facts(each, var.aval.shape, active, varies)
                    for each, var in zip(results, eqn.outvars, strict=True)
                ]
                found[:] = [known for _, known in pairs]
                return [array for array, _ in pairs]

            return keep_weak_types(outs, arrays, [v.aval for v in eqn.outvars], eqn)

        template = self._traced(call, [a.aval for a in operands], sizes, eqn.primitive.name, eqn)
        return replace(template, kinds=tuple(found))

    def _traced(
        self,
        call: Callable[..., list[Any] | None],
        avals: Sequence[Aval],
        sizes: Sequence[Any],
        name: str | None = None,
        eqn: JaxprEqn | None = None,
    ) -> Template:
        """Trace a template of `call(masking, *operands)`.

        The operands of the template are those of `call`, the flag of the round, the symbols, the
        values of the sizes, and their masks.

        Args:
            call: Return a list of results.
            avals: The types of its operands.
            sizes: The logical sizes whose values and masks it may use.
            name: The name of the primitive that is masked; None if a size or mask is computed.
            eqn: The equation in whose context (mesh, precision, …) it is traced.
        """
        bounds = self.run.bounds
        masks = [jax.core.ShapedArray((bounds.padded(size),), jnp.bool_) for size in sizes]
        count = len(avals)
        avals = [*avals, _FLAG, *[SCALAR] * (len(bounds.bounds) + len(sizes)), *masks]

        def fun(*values: Any) -> list[Any]:
            arrays, flag, rest = values[:count], values[count], iter(values[count + 1 :])
            symbols = {name: next(rest) for name in bounds}
            known = {size: next(rest) for size in sizes}
            valid = dict(zip(sizes, rest, strict=True)) if name else {}
            flag = None if self.round is None else flag
            masking = Masking(name or "", bounds, symbols, known, valid, flag, self.run.in_scan)
            return call(masking, *arrays) or []

        jaxpr = jaxcompat.trace_in_setting(fun, avals, eqn)
        jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        return template_of_jaxpr(jaxpr, ())

    def _written(
        self, template: Template, operands: Sequence[Atom], sizes: Sequence[Any], source: Any
    ) -> list[Atom]:
        """Write the equations of a template, with the sizes and masks that it uses."""
        names = list(self.run.bounds)
        makers: list[Callable[[], Any]] = [lambda: self.round]
        makers += [partial(self.symbol, name) for name in names]
        makers += [partial(self.size, size) for size in sizes]
        makers += [partial(self.valid, size) for size in sizes]
        values: list[Any] = list(operands)
        for maker in makers:
            values.append(maker() if len(values) in template.used else None)
        values += map(self._constant, template.consts)
        eqns, results = instantiated(template, values, source)
        self.eqns += eqns
        return results

    def _constant(self, value: Any) -> Var:
        """Return the constvar of a constant that a rule has used."""
        if id(value) not in self.consts:
            self.consts[id(value)] = Var(jax.typeof(value)), value
        return self.consts[id(value)][0]


def rule_of(eqn: JaxprEqn) -> Callable[..., Any]:
    """Return the masking rule of an equation.

    Raises:
        UnsupportedError: If its primitive has none.
    """
    found = mask_rules.get(eqn.primitive.name)
    if found is None and traits(eqn).elementwise:
        found = mask_rules["elementwise"]
    if found is None:
        raise refusal(
            eqn,
            f"there is no masking rule for '{eqn.primitive.name}'",
            '@rule("mask", …) of jaxprtool.extend adds one',
        )
    return found
