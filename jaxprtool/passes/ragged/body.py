"""Rewrite the jaxpr of one example into the jaxpr of all, in one forward pass over its equations.

- An equation whose operands are all shared stays as it is.
- An equation of packed operands is replaced by the equations of its rule. Equations that are alike
  share a template, for which the rule is traced once (`ir.templates`).
- An equation that holds jaxprs has a structured rule, which rewrites these jaxprs in turn.
- Any other equation is computed lane by lane, padded and masked (`by_lanes`).

A value is packed where possible. One that comes stacked out of a masking rule stays stacked while
only cheap equations use it. When an equation needs another layout, the value is converted, once.

A rewritten body takes the lengths of the ragged symbols that it needs as its first arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.templates import (
    Template,
    has_float,
    instantiated,
    signature,
    template_of_jaxpr,
)
from jaxprtool.ir.traits import traits
from jaxprtool.ir.weak_types import as_weak_as, keep_weak_types, strongly_typed
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var
from jaxprtool.passes.dce import dce_body
from jaxprtool.passes.mask.body import Run as Masks
from jaxprtool.passes.mask.table import mask_rules
from jaxprtool.passes.ragged.pairs import lanes_of_pairs, pair_rules, pairs_of_lanes
from jaxprtool.passes.ragged.stacked import packed_rows, stacked_lanes, to_lanes
from jaxprtool.passes.ragged.table import FACTS, Ragging, ragged_rules, refusal
from jaxprtool.passes.ragged.values import Kind, Lanes, Packed, Pairs, Shared, Sizes, Stacked, Value


@dataclass(frozen=True, eq=False)
class RaggedBody:
    """A rewritten jaxpr.

    Attributes:
        jaxpr: The jaxpr. It takes the lengths of `symbols`, then the arguments of the old body.
        symbols: The ragged symbols whose lengths it needs.
        kinds: The layouts of its results.
    """

    jaxpr: ClosedJaxpr
    symbols: tuple[str, ...]
    kinds: tuple[Kind, ...]


#: `rule(writing, eqn) -> bool`. It writes the equation, with `Writing.add`, and returns True; or it
#: writes nothing and returns False.
StructuredRule = Callable[..., bool]

#: The conversion to each kind. Pairs are converted by `lanes_of_pairs` instead.
_CONVERSIONS = {
    Lanes: to_lanes,
    Packed: packed_rows,
    Pairs: pairs_of_lanes,
    Stacked: stacked_lanes,
}

#: The open table of rules for equations that hold jaxprs.
structured_ragged_rules: RuleTable[StructuredRule] = RuleTable()

#: The name of the fallback rule in this table, which writes any equation lane by lane.
BY_LANES = "by lanes"


@dataclass(eq=False)
class Run:
    """The state of rewriting one program, shared by all its bodies.

    Attributes:
        sizes: The sizes of the program.
        templates: The template of each packed rule, None for a rule that returned None.
        with_floats: Primitives with a float in the parameters of some equation.
        by_lanes: What `by_lanes` has made for equations without a packed rule.
        bodies: The rewritten bodies.
    """

    sizes: Sizes
    templates: dict[Hashable, Template | None] = field(default_factory=dict)
    with_floats: set[Primitive] = field(default_factory=set)
    by_lanes: dict[Hashable, Any] = field(default_factory=dict)
    bodies: dict[Hashable, tuple[AnyJaxpr, RaggedBody]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.masks = Masks(self.sizes.bounds)

    def body(
        self, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None] | None = None
    ) -> RaggedBody:
        """Return the rewritten form of a closed jaxpr.

        Args:
            body: The jaxpr.
            kinds: The layouts of its arguments.
            wanted: The layouts of its results; None for a result that may have any.
        """
        wanted = (None,) * len(body.outvars) if wanted is None else tuple(wanted)
        key = id(jaxcompat.open_jaxpr(body)), tuple(kinds), wanted
        if key not in self.bodies:
            # Keep the old body alive, so that no other gets its id.
            self.bodies[key] = body, Writing(self).body(body, kinds, wanted)
        return self.bodies[key][1]


@dataclass(eq=False)
class Writing:
    """One new body while it is written.

    Attributes:
        run: The rewriting of the program.
        eqns: The equations written so far.
        forms: For each variable of the old body, the atoms of the new body that hold it, by kind.
        symbols: The arguments of the new body that are the lengths of ragged symbols.
        consts: The constants that rules have used, by id.
        source: The source info of the equation that is being rewritten.

    `_facts` has the facts about sizes that are computed in this body.
    """

    run: Run
    eqns: list[JaxprEqn] = field(default_factory=list)
    forms: dict[Var, dict[Kind, Atom]] = field(default_factory=dict)
    symbols: dict[str, Var] = field(default_factory=dict)
    consts: dict[int, tuple[Var, Any]] = field(default_factory=dict)
    source: Any = jaxcompat.NO_SOURCE
    _facts: dict[Hashable, Atom] = field(default_factory=dict)

    def body(
        self, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None]
    ) -> RaggedBody:
        """Write the new body of a closed jaxpr; see `Run.body`."""
        sizes, invars = self.run.sizes, []
        for var, kind in zip(body.invars, kinds, strict=True):
            invars.append(var if isinstance(kind, Shared) else Var(sizes.aval(kind, var.aval)))
            self.forms[var] = {kind: invars[-1]}
        for eqn in jaxcompat.open_jaxpr(body).eqns:
            self.source = eqn.source_info
            self.equation(eqn)
        self.source = jaxcompat.NO_SOURCE
        found = [
            self.kind(atom) if want is None else want
            for atom, want in zip(body.outvars, wanted, strict=True)
        ]
        outvars = [self.result(atom, kind) for atom, kind in zip(body.outvars, found, strict=True)]
        made = self.consts.values()
        names = tuple(name for name in sizes.bounds if name in self.symbols)
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *(var for var, _ in made)],
            consts=[*body.consts, *(value for _, value in made)],
            invars=[*(self.symbols[name] for name in names), *invars],
            outvars=outvars,
            eqns=self.eqns,
        )
        return RaggedBody(new, names, tuple(found))

    # --- values ---------------------------------------------------------------------------------

    def result(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom of a result in the layout in which it leaves the body."""
        return self.held(atom, kind)

    def kind(self, atom: Atom) -> Kind:
        """Return the layout of an atom of the old body; if there are several, the packed one."""
        forms = {} if type(atom) is Literal else self.forms.get(atom, {})
        return next(
            (kind for kind in forms if isinstance(kind, Packed | Pairs)),
            next(iter(forms), Shared()),
        )

    def is_shared(self, atom: Atom) -> bool:
        """Return True for an atom that is the same in all lanes."""
        return isinstance(self.kind(atom), Shared)

    def bind(self, var: Var, kind: Kind, atom: Atom) -> None:
        """Record that an atom of the new body holds a variable of the old one."""
        self.forms.setdefault(var, {})[kind] = atom

    def held(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom that holds an atom of the old body in a layout; convert it if needed."""
        if type(atom) is Literal and isinstance(kind, Shared):
            return atom
        forms = {} if type(atom) is Literal else self.forms.setdefault(atom, {})
        if isinstance(kind, Shared):
            return forms.get(kind, atom)
        for each, held in forms.items():
            if isinstance(each, type(kind)):  # there is at most one of each class
                return held
        made = self._converted(atom, self.kind(atom), kind)
        if type(atom) is not Literal:
            forms[kind] = made
        return made

    def _converted(self, atom: Atom, source: Kind, kind: Kind) -> Atom:
        shape = tuple(atom.aval.shape)
        array = self.held(atom, source)
        convert = lanes_of_pairs if isinstance(source, Pairs) else _CONVERSIONS[type(kind)]
        wide = list(dict.fromkeys(n for n in shape if self.run.sizes.axes([n])))
        key = convert, source, kind, array.aval

        def compute(ragging: Ragging, value: Any) -> list[Any]:
            # JAX's transpose of a look-up of rows gives a strongly typed gradient.
            made = convert(ragging, Value(strongly_typed(value), source, shape))
            return [as_weak_as(made, array.aval)]

        return self.template(key, compute, [array], wide, None)[0]

    def symbol(self, name: str) -> Var:
        """Return the argument of the new body that is the lengths of a ragged symbol."""
        if name not in self.symbols:
            self.symbols[name] = Var(self.run.sizes.lengths_aval)
        return self.symbols[name]

    def fact(self, what: str, size: Any) -> Atom:
        """Return a fact about a size (see `table.FACTS`), which is computed once in this body."""
        key = what, size
        if key not in self._facts:
            before = FACTS[: FACTS.index(what)]

            def compute(ragging: Ragging) -> list[Any]:
                return [ragging.fact(what, size)]

            self._facts[key] = self.template(key, compute, [], [size], None, before)[0]
        return self._facts[key]

    # --- equations ------------------------------------------------------------------------------

    def add(self, eqn: JaxprEqn, like: JaxprEqn, kinds: Sequence[Kind]) -> None:
        """Add an equation whose results hold the results of the old equation `like`."""
        self.eqns.append(eqn)
        for old, new, kind in zip(like.outvars, eqn.outvars, kinds, strict=True):
            self.bind(old, kind, new)

    def outs(self, variables: Sequence[Var], kinds: Sequence[Kind]) -> list[Var]:
        """Return new variables for results in these layouts."""
        sizes = self.run.sizes
        return [
            type(var)(sizes.aval(kind, var.aval))
            for var, kind in zip(variables, kinds, strict=True)
        ]

    def equation(self, eqn: JaxprEqn) -> None:
        """Write the new form of an equation.

        Raises:
            UnsupportedError: If the equation cannot be computed for lanes of different lengths.
        """
        try:
            mentions = self.run.sizes.bounds.mentions(eqn)
            if not mentions and all(map(self.is_shared, eqn.invars)):
                self._unchanged(eqn)
                return
            refs = any(
                isinstance(v.aval, jaxcompat.AbstractRef) for v in (*eqn.invars, *eqn.outvars)
            )
            if eqn.effects and (mentions or refs):
                on = "a ref" if refs else "the rows of lanes"
                raise refusal(eqn, f"it has an effect on {on}")
            layout = self.run.sizes.layout
            if not (mentions and layout != "padded" and self._packed(eqn)):
                if layout == "packed" and mentions and self._pads(eqn):
                    reason = "it needs padding, but the layout is 'packed'"
                    raise refusal(eqn, reason, "layout=None pads what cannot be packed")
                structured_ragged_rules[BY_LANES](self, eqn)
        except Exception as error:  # a rule, JAX's or a plug-in's, may raise anything
            if isinstance(error.__cause__ or error, jax.errors.InconclusiveDimensionOperation):
                reason = "the largest number of rows of an example is not known"
                raise refusal(eqn, reason, "longest=512 gives it") from error
            if isinstance(error, JaxprToolError):
                raise
            raise refusal(eqn, " ".join(str(error).split()) or type(error).__name__) from error

    def _pads(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation would pad a value when it is computed by lanes."""
        shapes = [tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
        return any(map(self.run.sizes.axes, shapes))

    def _unchanged(self, eqn: JaxprEqn) -> None:
        operands = [self.held(atom, Shared()) for atom in eqn.invars]
        same = all(a is b for a, b in zip(operands, eqn.invars, strict=True))
        effects = eqn.effects
        if effects and not same:
            pairs = zip(eqn.invars, operands, strict=True)
            names = {old: new for old, new in pairs if type(old) is not Literal}
            effects = jaxcompat.renamed_effects(effects, names)
        self.eqns.append(eqn if same else eqn.replace(invars=operands, effects=effects))

    def _packed(self, eqn: JaxprEqn) -> bool:
        """Write an equation by its structured or packed rule; return False if it has none."""
        structured = structured_ragged_rules.get(eqn.primitive.name)
        if structured is not None:
            return structured(self, eqn)
        return self.by_rule(eqn)

    def _prefers_packed(self, eqn: JaxprEqn) -> bool:
        """Return True if a packed rule is preferred for an equation.

        It is not if a value can only be padded. Nor is it for a cheap equation with a masking rule
        whose ragged operands are all padded already.
        """
        atoms = [*eqn.invars, *eqn.outvars]
        sizes = self.run.sizes
        if any(isinstance(sizes.canonical(atom.aval), Stacked) for atom in atoms):
            return False
        ragged = [atom for atom in eqn.invars if sizes.axes(getattr(atom.aval, "shape", ()))]
        stacked = ragged and all(isinstance(self.kind(atom), Stacked) for atom in ragged)
        return not stacked or traits(eqn).expensive or eqn.primitive.name not in mask_rules

    def by_rule(self, eqn: JaxprEqn) -> bool:
        """Write an equation by its packed rule; return False if it has none, or it returns None."""
        if not self._prefers_packed(eqn):
            return False
        run, sizes = self.run, self.run.sizes
        avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        pairs = any(isinstance(sizes.canonical(aval), Pairs) for aval in avals)
        rules = pair_rules if pairs else ragged_rules
        apply = rules.get(eqn.primitive.name)
        if apply is None and traits(eqn).elementwise:
            apply = rules["elementwise"]
        if apply is None:
            return False
        kinds = [sizes.canonical(atom.aval, shared=self.is_shared(atom)) for atom in eqn.invars]
        shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
        operands = [self.held(atom, kind) for atom, kind in zip(eqn.invars, kinds, strict=True)]
        outs = tuple(v.aval for v in eqn.outvars)
        types = tuple((a.aval, kind) for a, kind in zip(operands, kinds, strict=True))
        key: Hashable
        try:
            key = signature(eqn, (), run.with_floats), types, tuple(shapes), outs
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            key = id(eqn)

        def compute(ragging: Ragging, *arrays: Any) -> list[Any] | None:
            def rule(*arrays: Any) -> list[Any] | None:
                made = apply(ragging, eqn, *map(Value, arrays, kinds, shapes))
                return made if made is None or eqn.primitive.multiple_results else [made]

            return keep_weak_types(rule, arrays, outs, eqn)

        mentioned = {n: None for shape in [*shapes, *(v.shape for v in outs)] for n in shape}
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            mentioned[eqn.params["dim"]] = None
        wide = [n for n in mentioned if sizes.axes([n])]
        results = self.template(key, compute, operands, wide, eqn)
        if any(map(has_float, eqn.params.values())):
            run.with_floats.add(eqn.primitive)
        if results is None:
            return False
        for var, atom in zip(eqn.outvars, results, strict=True):
            self.bind(var, sizes.canonical(var.aval), atom)
        return True

    # --- templates ------------------------------------------------------------------------------

    def template(
        self,
        key: Hashable,
        compute: Callable[..., Any],
        operands: Sequence[Atom],
        wide: Sequence[Any],
        eqn: JaxprEqn | None,
        facts: Sequence[str] = FACTS,
    ) -> Any:
        """Write the equations of `compute(ragging, *operands)`, which is traced once for a key.

        Args:
            key: Equal for calls that trace to the same equations.
            compute: Return a sequence of results, or None.
            operands: The atoms of the new body that it is applied to.
            wide: The ragged sizes whose facts it may use.
            eqn: The equation in whose context (mesh, precision, …) it is traced.
            facts: The facts that are passed to it; it computes any others itself.

        Returns:
            The atoms of the results, or None if `compute` returns None.
        """
        if key not in self.run.templates:
            self.run.templates[key] = self._traced(compute, operands, wide, eqn, facts)
        template = self.run.templates[key]
        if template is None:
            return None
        values: list[Any] = list(operands)
        symbols = self.run.sizes.bounds
        values += [None] * (len(symbols.bounds) + len(wide) * len(facts))
        if max(template.used, default=0) >= len(operands):
            makers: list[Callable[[], Atom]] = [partial(self.symbol, name) for name in symbols]
            makers += [partial(self.fact, what, size) for size in wide for what in facts]
            for i, maker in enumerate(makers, len(operands)):
                values[i] = maker() if i in template.used else None
        # What is computed from lengths alone comes from no line of the source.
        source = self.source if operands else jaxcompat.NO_SOURCE
        return self.instantiate(template, values, source)

    def instantiate(self, template: Template, operands: Sequence[Any], source: Any) -> list[Atom]:
        """Write the equations of a template, and return the atoms of its results."""
        values = [*operands, *map(self._constant, template.consts)]
        eqns, results = instantiated(template, values, source)
        self.eqns += eqns
        return results

    def _traced(
        self,
        compute: Callable[..., Any],
        operands: Sequence[Atom],
        wide: Sequence[Any],
        eqn: JaxprEqn | None,
        facts: Sequence[str],
    ) -> Template | None:
        sizes = self.run.sizes
        names = list(sizes.bounds)
        lanes = sizes.lengths_aval
        keys = [(what, size) for size in wide for what in facts]
        per_row = ("examples", "lanes", "positions")
        avals = [a.aval for a in operands] + [lanes] * len(names)
        # Of a size that cannot be packed, no rule uses the facts about rows: any type will do.
        for what, size in keys:
            count = sizes.count(size)
            rows = jax.core.ShapedArray((count,), jnp.int32) if count is not None else lanes
            avals.append(rows if what in per_row else lanes)
        found: list[bool] = []

        def fun(*values: Any) -> list[Any]:
            arrays = values[: len(operands)]
            symbols = dict(zip(names, values[len(operands) :], strict=False))
            known = dict(zip(keys, values[len(operands) + len(names) :], strict=True))
            made = compute(Ragging(sizes, symbols, known), *arrays)
            found.append(made is not None)
            return [] if made is None else list(made)

        jaxpr = jaxcompat.trace_in_setting(fun, avals, eqn)
        if not found[-1]:
            return None
        jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        return template_of_jaxpr(jaxpr, ())

    def _constant(self, value: Any) -> Var:
        """Return the constvar of a constant that a rule has used."""
        if id(value) not in self.consts:
            self.consts[id(value)] = Var(jax.typeof(value)), value
        return self.consts[id(value)][0]
