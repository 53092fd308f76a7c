"""ragged: one program for examples of different length, without padding where possible.

    program.apply("ragged(axis='n', lanes=32)")

An argument of `f32[n,d]` becomes `f32[N,d]`, the rows of all examples one after the other, and
the lengths of the examples are an additional argument. Rules for primitives are in an open table,
`@rule("ragged", …)`. A primitive without a rule is computed on padded examples, by its `mask` rule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.export
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, PipelineError, UnsupportedError
from jaxprtool.ir.equations import as_weak_as, is_weak, strongly_typed, type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import CALLS, CustomJVP, CustomVJP, Regions
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.symbols import MOST, LengthsBound, check_symbols, known_range
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass
from jaxprtool.passes.mapping import (
    BodyBuilder,
    Domain,
    Role,
    StructuredRule,
    Template,
    by_edges,
    custom_derivative,
    equation_signature,
    template_of_jaxpr,
    with_arguments,
)
from jaxprtool.passes.mapping.batch.axes import Axis, flat_in_axes
from jaxprtool.passes.mapping.batch.body import batch_body
from jaxprtool.passes.mapping.mask import MaskDomain
from jaxprtool.passes.mapping.mask.table import (
    Facts,
    check_constraints,
    fill_bytes,
    is_numeric_type,
    mask_rules,
    with_own_constraints,
)
from jaxprtool.passes.mapping.ragged import rules as _rules  # noqa: F401  # fill the tables
from jaxprtool.passes.mapping.ragged.pairs import (
    pair_rules,
    pairs_to_stacked,
    stacked_to_pairs,
    without_others,
)
from jaxprtool.passes.mapping.ragged.table import (
    FACTS,
    Batched,
    Kind,
    Layout,
    Packed,
    Pairs,
    RaggedContext,
    RaggedOperand,
    RowsFirst,
    Shared,
    Sizes,
    Stacked,
    packed_to_stacked,
    ragged_error,
    ragged_rules,
    select,
    shared_to_batched,
    stacked_to_packed,
)

__all__ = [
    "Batched",
    "Kind",
    "Layout",
    "Packed",
    "Pairs",
    "RaggedBatch",
    "RaggedContext",
    "RaggedJaxpr",
    "RaggedOperand",
    "Shared",
    "Sizes",
    "ragged_error",
    "ragged_jaxpr",
    "ragged_rules",
    "structured_ragged_rules",
]

# --- body -----------------------------------------------------------------------------------------
# Rewrite the jaxpr of one example into the jaxpr of all: the domain of ragged programs.
#
# - An equation whose operands are all shared stays as it is.
# - An equation of packed operands is replaced by the equations of its rule. Equations with the same
#   signature share a template, for which the rule is traced once (`mapping.domains`).
# - An equation that holds jaxprs has a structured rule, which rewrites these jaxprs in turn.
#   Branches and loops are rewritten if all examples take them together.
# - Any other equation is computed example by example, padded and masked (`by_example`).
#
# A value is packed where possible. A stacked result of a masking rule stays stacked while only
# cheap equations use it. When an equation needs another layout, the value is converted, once. The
# kind of a value (`mapping.domains`) is its layout.
#
# A rewritten body takes the lengths of the ragged symbols that it needs as its first arguments.

#: The conversion to each kind. Pairs are converted by `pairs_to_stacked` instead.
_CONVERSIONS = {
    Batched: shared_to_batched,
    Packed: stacked_to_packed,
    Pairs: stacked_to_pairs,
    Stacked: packed_to_stacked,
}

#: The open table of rules for equations that hold jaxprs.
structured_ragged_rules: RuleTable[StructuredRule] = RuleTable()
rule(structured_ragged_rules, *CALLS, "cond", "while")(by_edges)
rule(structured_ragged_rules, *CustomJVP.primitives, *CustomVJP.primitives)(custom_derivative)

#: The name of the fallback rule in this table, which writes any equation example by example.
BY_EXAMPLE = "by example"


@rule(structured_ragged_rules, "scan")
def _scan(builder: RaggedBodyBuilder, eqn: JaxprEqn) -> bool:
    """Write a scan over the rows of an example by its packed rule (`scans`)."""
    if builder.domain.sizes.axes([eqn.params["length"]]):
        return builder.packed_rule(eqn)
    return by_edges(builder, eqn)


@dataclass(eq=False)
class RaggedBodyBuilder(BodyBuilder[Kind]):
    """Builds one new body.

    Attributes:
        forms: For each variable of the old body, the atoms of the new body that hold it, by kind.
    """

    domain: RaggedDomain
    forms: dict[Var, dict[Kind, Atom]] = field(default_factory=dict)

    # --- values ---------------------------------------------------------------------------------

    def kind(self, atom: Atom) -> Kind:
        """Return the layout of an atom of the old body; if there are several, the packed one."""
        forms = {} if type(atom) is Literal else self.forms.get(atom, {})
        return next(
            (kind for kind in forms if isinstance(kind, Packed | Pairs)),
            next(iter(forms), Shared()),
        )

    def is_shared(self, atom: Atom) -> bool:
        """Return True for an atom that is the same in all examples."""
        return isinstance(self.kind(atom), Shared)

    def bind(self, var: Var, kind: Kind, atom: Atom) -> None:
        if isinstance(kind, RowsFirst):
            kind, atom = kind.kind, self._swapped(atom)
        self.forms.setdefault(var, {})[kind] = atom

    def held(self, atom: Atom, kind: Kind) -> Atom:
        if isinstance(kind, RowsFirst):
            return self._swapped(self.held(atom, kind.kind))
        if type(atom) is Literal and isinstance(kind, Shared):
            return atom
        forms = {} if type(atom) is Literal else self.forms.setdefault(atom, {})
        if isinstance(kind, Shared):
            return forms.get(kind, atom)
        for other, form in forms.items():
            if isinstance(other, type(kind)):  # there is at most one of each class
                return form
        converted = self._converted(atom, self.kind(atom), kind)
        if type(atom) is not Literal:
            forms[kind] = converted
        return converted

    def _converted(self, atom: Atom, source: Kind, kind: Kind) -> Atom:
        shape = tuple(atom.aval.shape)
        array = self.held(atom, source)
        convert = pairs_to_stacked if isinstance(source, Pairs) else _CONVERSIONS[type(kind)]

        def compute(context: RaggedContext, value: Any) -> Any:
            # The gradient of a gather of rows by JAX's transpose is strongly typed.
            converted = convert(context, RaggedOperand(strongly_typed(value), source, shape))
            return as_weak_as(converted, array.aval)

        sizes = (shape[axis] for axis in self.domain.sizes.axes(shape))
        return self.computed((convert, source, kind, array.aval), compute, [array], sizes)

    def _swapped(self, atom: Atom) -> Atom:
        """Exchange the axes of examples and rows."""
        key = RowsFirst, atom.aval
        return self.computed(key, lambda _, array: jnp.swapaxes(array, 0, 1), [atom])

    # --- rules ----------------------------------------------------------------------------------

    def rule_context(self, name: str, facts: dict[Any, Any]) -> RaggedContext:
        symbols = {fact: facts.pop(("extra", fact)) for fact in self.domain.extras}
        return RaggedContext(self.domain.sizes, symbols, facts)

    def operand(self, array: Any, kind: Kind, shape: tuple[Any, ...]) -> RaggedOperand:
        return RaggedOperand(array, kind, shape)

    def result(
        self, value: Any, eqn: JaxprEqn, var: Var, kinds: Sequence[Kind]
    ) -> tuple[Any, Kind]:
        return value, self.domain.sizes.canonical(var.aval)

    # --- equations ------------------------------------------------------------------------------

    def rewrite(self, eqn: JaxprEqn) -> None:
        sizes = self.domain.sizes
        mentions = sizes.bounds.mentions(eqn)
        if not mentions and all(map(self.is_shared, eqn.invars)):
            self.unchanged(eqn, [self.held(atom, Shared()) for atom in eqn.invars])
            return
        refs = any(isinstance(v.aval, jaxcompat.AbstractRef) for v in (*eqn.invars, *eqn.outvars))
        if eqn.effects and (mentions or refs):
            on = "a ref" if refs else "the rows of examples"
            raise ragged_error(eqn, f"it has an effect on {on}")
        if mentions and sizes.layout != "padded" and self._packed(eqn):
            return
        shapes = [tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
        if sizes.layout == "packed" and mentions and any(map(sizes.axes, shapes)):
            reason = "it needs padding, but the layout is 'packed'"
            raise ragged_error(eqn, reason, "use layout=None, which pads what cannot be packed")
        structured_ragged_rules[BY_EXAMPLE](self, eqn)

    def _packed(self, eqn: JaxprEqn) -> bool:
        """Write an equation by its structured or packed rule; return False if it has none."""
        return self.structured(eqn) or (
            eqn.primitive.name not in structured_ragged_rules and self.packed_rule(eqn)
        )

    def _prefers_packed(self, eqn: JaxprEqn) -> bool:
        """Return True if a packed rule is preferred for an equation.

        It is not if a value can only be padded. Nor is it for a cheap equation with a masking rule
        whose ragged operands are all padded already.
        """
        atoms = [*eqn.invars, *eqn.outvars]
        sizes = self.domain.sizes
        if any(isinstance(sizes.canonical(atom.aval), Stacked) for atom in atoms):
            return False
        ragged = [atom for atom in eqn.invars if sizes.axes(getattr(atom.aval, "shape", ()))]
        stacked = ragged and all(isinstance(self.kind(atom), Stacked) for atom in ragged)
        return not stacked or traits(eqn).expensive or eqn.primitive.name not in mask_rules

    def packed_rule(self, eqn: JaxprEqn) -> bool:
        """Write an equation by its packed rule; return False if it has none, or it returns None."""
        if not self._prefers_packed(eqn):
            return False
        sizes = self.domain.sizes
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
        return self.by_rule(eqn, apply, kinds, tuple(shapes), tuple(v.aval for v in eqn.outvars))


class RaggedDomain(Domain[Kind]):
    """The domain of ragged programs.

    Args:
        sizes: The sizes of the program, and the layout of its values.
    """

    builder_class = RaggedBodyBuilder
    rules = ragged_rules
    structured_rules = structured_ragged_rules
    facts = FACTS
    refusal = staticmethod(ragged_error)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.extras = tuple(sizes.bounds)
        self.masks = MaskDomain(sizes.bounds)
        #: The results of `by_example` for equations without a packed rule.
        self.by_example: dict[Hashable, Any] = {}

    def kind_of(self, atom: Atom) -> Kind:
        return Shared()

    def join(self, first: Kind, second: Kind) -> Kind:
        return second if isinstance(first, Shared) else first

    def aval(self, kind: Kind, aval: Aval) -> Aval:
        return self.sizes.aval(kind, aval)

    def settled(self, kind: Kind, aval: Aval, role: Role, inside: Regions) -> Kind:
        if role == "operand" or inside.kind == "call":
            return kind
        return self.sizes.canonical(aval, shared=isinstance(kind, Shared))

    def stacked(self, kind: Kind, length: Any) -> Kind:
        if isinstance(kind, Packed):
            return Packed(kind.axis + 1, kind.size)
        if isinstance(kind, Pairs):
            first, second = kind.axes
            return Pairs((first + 1, second + 1), kind.size)
        if isinstance(kind, Stacked):
            facts = kind.facts
            shape, fills = (length, *facts.shape), (None, *facts.fills)
            return RowsFirst(Stacked(type(facts)(shape, fills, facts.active)))
        return RowsFirst(kind) if isinstance(kind, Batched) else kind

    def uniform(self, kind: Kind) -> bool:
        return isinstance(kind, Shared)

    def differentiated(self, kind: Kind, aval: Aval) -> Kind:
        return self.sizes.canonical(aval)

    def tangent(self, kind: Kind, aval: Aval) -> Kind:
        return _unknown(kind)

    def backward(
        self, bwd: ClosedJaxpr, kinds: Sequence[Kind], primals: Sequence[Kind], context: Any
    ) -> ClosedJaxpr:
        """Return the rewritten backward rule.

        The cotangent of a shared primal is summed over the examples. In spare rows and invalid
        pairs it is zero.
        """
        sizes = self.sizes
        wanted = [
            sizes.canonical(var.aval) if isinstance(kind, Shared) else _unknown(kind)
            for var, kind in zip(bwd.outvars, primals, strict=True)
        ]
        body = self.body(bwd, kinds, wanted, context).taking(self, self.extras)
        evaluate = jaxcompat.jaxpr_as_fun(body)

        def fun(*args: Any) -> list[Any]:
            context = RaggedContext(sizes, dict(zip(self.extras, args, strict=False)), {})
            results = []
            for kind, cotangent in zip(primals, evaluate(*args), strict=True):
                if isinstance(kind, Shared):
                    cotangent = cotangent.sum(0)
                elif isinstance(kind, Packed) and not sizes.is_exact(kind.size):
                    cotangent = select(context.real(kind.size), kind.axis, cotangent, 0)
                elif isinstance(kind, Pairs):
                    cotangent = without_others(context, cotangent, kind, kind.axes[1])
                results.append(cotangent)
            return results

        return jaxcompat.trace_in_setting(fun, [v.aval for v in body.invars], None)

    def sizes_of(self, eqn: JaxprEqn) -> list[Any]:
        return self.sizes.bounds.sizes_of(eqn)

    def in_params(self, eqn: JaxprEqn) -> bool:
        return self.sizes.bounds.in_params(eqn)

    def extra_aval(self, name: str) -> Aval:
        return self.sizes.lengths_aval

    def fact_aval(self, fact: tuple[str, Any]) -> Aval:
        what, size = fact
        # No rule uses the facts about rows of a size that cannot be packed: any type will do.
        count = (
            self.sizes.count(size) if what in ("examples", "batch_indices", "positions") else None
        )
        lengths = self.sizes.lengths_aval
        return lengths if count is None else jax.core.ShapedArray((count,), jnp.int32)

    def failed(self, eqn: JaxprEqn, error: Exception) -> JaxprToolError:
        if isinstance(error.__cause__ or error, jax.errors.InconclusiveDimensionOperation):
            reason = "the largest number of rows of an example is unknown"
            return ragged_error(eqn, reason, "give it with longest=512")
        return super().failed(eqn, error)


def _unknown(kind: Kind) -> Kind:
    """Return a kind with unknown padding."""
    if not isinstance(kind, Stacked):
        return kind
    facts = kind.facts
    return Stacked(replace(facts, fills=(None,) * len(facts.shape), active=True))


# --- by example -----------------------------------------------------------------------------------
# The fallback rule, which computes an equation example by example.
#
# The masking rule of the equation computes one padded example, and is then batched over all
# examples.


class ByExample(NamedTuple):
    """The equations that replace one equation.

    Attributes:
        symbols: The ragged symbols whose lengths the template needs.
        template: The equations. Their operands are the lengths, then the operands of the equation.
        kinds: The layouts of the results.
    """

    symbols: tuple[str, ...]
    template: Template
    kinds: tuple[Kind, ...]


@rule(structured_ragged_rules, BY_EXAMPLE)
def _by_example(builder: RaggedBodyBuilder, eqn: JaxprEqn) -> bool:
    """Write an equation for each padded example, by its masking rule."""
    domain = builder.domain
    kinds = [_operand_kind(builder, atom) for atom in eqn.invars]
    facts = [
        kind.facts if isinstance(kind, Stacked) else Facts.of(atom, active=True)
        for atom, kind in zip(eqn.invars, kinds, strict=True)
    ]
    operands = [builder.held(atom, kind) for atom, kind in zip(eqn.invars, kinds, strict=True)]
    outs = tuple(v.aval for v in eqn.outvars)
    types = tuple(zip((a.aval for a in operands), kinds, facts, strict=True))
    key: Hashable = ByExample, equation_signature(eqn, (), domain.with_floats), types, outs
    try:
        entry = domain.by_example.get(key)
    except TypeError:  # a parameter that is not hashable
        key, entry = id(eqn), None
    if entry is None:
        domain.by_example[key] = entry = _masked_and_batched(domain, eqn, kinds, facts)
    lengths: list[Atom] = [builder.extra(name) for name in entry.symbols]
    results = builder.instantiate(entry.template, [*lengths, *operands], eqn.source_info)
    for var, kind, atom in zip(eqn.outvars, entry.kinds, results, strict=True):
        builder.bind(var, kind, atom)
    return True


def _masked_and_batched(
    domain: RaggedDomain, eqn: JaxprEqn, kinds: Sequence[Kind], facts: Sequence[Facts]
) -> ByExample:
    sizes = domain.sizes
    operands, outs = [Var(a.aval) for a in eqn.invars], [Var(v.aval) for v in eqn.outvars]
    body = jaxcompat.replace_jaxpr(
        jaxcompat.trace_in_setting(list, [], None),
        invars=operands,
        outvars=outs,
        eqns=[eqn.replace(invars=operands, outvars=outs)],
    )
    masked = domain.masks.masked(body, facts)
    dims: list[int | None] = [0] * len(masked.extras)
    dims += [None if isinstance(kind, Shared) else 0 for kind in kinds]
    axis = Axis(None, sizes.batch_size)
    wanted: list[int | None] = [0 if _axes(sizes, var) else None for var in outs]
    batched, out_dims = batch_body(masked.jaxpr, dims, axis, wanted)
    if any(dim not in (None, 0) for dim in out_dims):  # examples must be axis 0: batch again
        wanted = [None if dim is None else 0 for dim in out_dims]
        batched, out_dims = batch_body(masked.jaxpr, dims, axis, wanted)
    results = [
        Stacked(out_facts) if _axes(sizes, var) else Shared() if dim is None else Batched()
        for var, dim, out_facts in zip(outs, out_dims, masked.kinds, strict=True)
    ]
    batched = _as_weak(batched, outs, eqn)
    return ByExample(masked.extras, template_of_jaxpr(batched, ()), tuple(results))


def _as_weak(batched: ClosedJaxpr, variables: Sequence[Var], eqn: JaxprEqn) -> ClosedJaxpr:
    """Return a jaxpr whose results are as weakly typed as these variables.

    JAX turns updates into scatters, which are weakly typed if the array alone is.
    """
    avals = [var.aval for var in variables]
    if all(is_weak(a) == is_weak(b.aval) for a, b in zip(avals, batched.outvars, strict=True)):
        return batched

    def strongly(*args: Any) -> list[Any]:
        outs = jaxcompat.jaxpr_as_fun(batched)(*map(strongly_typed, args))
        return [as_weak_as(out, aval) for out, aval in zip(outs, avals, strict=True)]

    return jaxcompat.trace_in_setting(strongly, [v.aval for v in batched.invars], eqn)


def _axes(sizes: Sizes, atom: Atom) -> tuple[int, ...]:
    return sizes.axes(getattr(atom.aval, "shape", ()))


def _operand_kind(builder: RaggedBodyBuilder, atom: Atom) -> Kind:
    """Return the layout of an operand of an equation that is computed example by example."""
    kind = builder.kind(atom)
    if not isinstance(kind, Packed | Pairs):
        return kind
    stacked = [form for form in builder.forms[atom] if isinstance(form, Stacked)]
    return stacked[0] if stacked else Stacked(_zero_padded(atom, kind))


def _zero_padded(atom: Atom, kind: Packed | Pairs) -> Facts:
    """Return the facts of a packed value or pairs when padded with zeros."""
    shape = tuple(atom.aval.shape)
    zero = fill_bytes(0, atom.aval.dtype) if is_numeric_type(atom.aval) else None
    axes = (kind.axis,) if isinstance(kind, Packed) else kind.axes
    fills = tuple(zero if i in axes else None for i in range(len(shape)))
    return Facts(shape, fills, Facts.of(atom, active=True).active)


# --- ragged ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RaggedBatch(Pass):
    """Batch over examples of different length, without padding where possible.

    An argument of `f32[n,d]` becomes `f32[N,d]`, the rows of all examples one after the other, and
    the lengths of the examples, `i32[lanes]`, are an argument after the other positional ones.
    Results with a row for each row of an example are packed in the same way. Other results have
    the examples along axis 0.

    Values stay packed where possible: a row-by-row computation costs as much as for one example
    with all the rows, and a sum over n is a segment sum. An equation without a rule for packed
    rows, such as a convolution, is computed on padded and masked examples. A scan over rows scans
    all examples at once, without padding them to the longest.

    A value with two ragged axes, such as the scores of attention, has one of two layouts: pairs of
    rows less than `longest` apart, about `N * 2.5 * longest` elements, of which pairs of two
    examples are masked; or padded examples, `lanes * longest * longest` elements. The layout with
    fewer elements is chosen. If the two numbers cannot be compared because one of them is symbolic,
    examples are padded.

    Args:
        axis: The symbol that is the length of an example; or several symbols, for arguments whose
            lengths are independent. Then each has an argument of lengths, in this order.
        lanes: The number of examples.
        layout: "packed" always uses pairs of rows, and raises an error for a value that can only be
            padded. "padded" pads all intermediate values. None chooses as above.
        longest: The maximum number of rows of an example, to which examples are padded. The default
            is the bound in the type, as in `f32[n<=512,d]`, or else N.
        in_axes: 0 for an argument without the symbol that has a value for each example, along axis
            0; None for one that all examples share. A prefix of the tree of positional arguments.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, or an argument has two ragged
            axes.
        UnsupportedError: If an equation cannot be computed for examples of different lengths, or a
            result has two ragged axes.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[n,3]" -p "ragged(axis='n', lanes=2)"
        { lambda ; a:f32[N,3] b:i32[2]. let c:f32[N,3] = sin a in (c,) }
    """

    name: ClassVar[str] = "ragged"
    group: ClassVar[str] = "transform"
    symbolic: ClassVar[bool] = True
    preserves: ClassVar[bool] = False

    axis: str | tuple[str, ...]
    lanes: int
    layout: Layout | None = None
    longest: int | None = None
    in_axes: Any = None

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MOST:
            raise PipelineError(f"ragged: lanes must be from 1 to {MOST}, not {self.lanes}")
        if self.longest is not None and not 1 <= self.longest <= MOST:
            raise PipelineError(f"ragged: longest must be from 1 to {MOST}, not {self.longest}")
        if not self.axes:
            raise PipelineError("ragged: axis=() must name a symbol")
        if len(set(self.axes)) < len(self.axes):
            raise PipelineError(f"ragged: axis={self.axis} names a symbol twice")

    @property
    def axes(self) -> tuple[str, ...]:
        """The ragged symbols."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def __call__(self, program: Program) -> Program:
        what = f"ragged: {program.name}"
        check_symbols(what, self.axes, program.symbols)
        limits = {name: self.longest or _longest(program.symbols[name]) for name in self.axes}
        shortest = {name: known_range(program.symbols[name])[0] for name in self.axes}
        for name, least in shortest.items():
            if self.longest is not None and self.longest < least:
                raise ArgumentsError(
                    f"{what}: longest={self.longest}, but {name} is at least {least}"
                )
        check_constraints(
            what, program.symbols, {name: most or MOST for name, most in limits.items()}, shortest
        )
        rows = {name: self._rows(program, name) for name in self.axes}
        longest = {name: limits[name] or rows[name] for name in self.axes}
        sizes = Sizes(self.lanes, rows, longest, frozenset(self.axes), self.layout)
        result = ragged_jaxpr(
            jaxcompat.close_jaxpr(program.jaxpr),
            self._kinds(program, sizes),
            sizes,
            lambda: program.out_names,
        )
        lengths = {
            "lengths" if len(self.axes) == 1 else f"{name}_lengths": LengthsBound(
                rows[name], limits[name], shortest=shortest[name]
            )
            for name in self.axes
        }
        return with_own_constraints(with_arguments(program, result.jaxpr, lengths, jit=None))

    def _rows(self, program: Program, name: str) -> Any:
        """Return a new symbol for the number of all rows."""
        taken = set(program.symbols)
        new = next(
            candidate for candidate in (name.upper(), f"{name}_rows") if candidate not in taken
        )
        return jax.export.symbolic_shape(new, scope=program.symbols[name].scope)[0]

    def _kinds(self, program: Program, sizes: Sizes) -> list[Kind]:
        """Return the layouts of the arguments."""
        args, _ = program.in_tree.children()
        axes = [None] * program.in_tree.num_leaves
        if self.in_axes is not None:
            axes[: args.num_leaves] = flat_in_axes(program.in_tree, self.in_axes)[: args.num_leaves]
        if not set(axes) <= {None, 0}:
            raise PipelineError(f"ragged: in_axes={self.in_axes} may contain only 0 and None")
        kinds: list[Kind] = []
        for (name, aval), axis in zip(program.arguments, axes, strict=True):
            kind = sizes.canonical(aval, shared=axis is None)
            if isinstance(kind, Pairs | Stacked):
                raise ArgumentsError(
                    f"ragged: argument {name} is {type_of(aval)}, but an argument can have only "
                    "one ragged axis, of a size such as n, 2*n or n + 1"
                )
            kinds.append(kind)
        return kinds


def _longest(symbol: Any) -> int | None:
    """Return the upper bound that the constraints give a symbol, or None."""
    most = known_range(symbol)[1]
    return None if most is None or most >= MOST else most


# --- outermost ------------------------------------------------------------------------------------
# Rewrite the jaxpr of one example into the jaxpr of all lanes: the entry point of `ragged`.


@dataclass(frozen=True, eq=False)
class RaggedJaxpr:
    """The jaxpr of all examples.

    Attributes:
        jaxpr: The jaxpr. It takes the arguments, then the lengths of each ragged symbol.
        kinds: The layouts of its results: `Shared`, `Batched`, or `Packed`.
    """

    jaxpr: ClosedJaxpr
    kinds: tuple[Kind, ...]


def ragged_jaxpr(
    body: ClosedJaxpr,
    kinds: Sequence[Kind],
    sizes: Sizes,
    result_names: Callable[[], Sequence[str]],
) -> RaggedJaxpr:
    """Return the jaxpr of all examples, from the jaxpr of one.

    Args:
        body: The jaxpr of one example.
        kinds: The layouts of its arguments.
        sizes: The ragged symbols, the number of their rows, and the layout of values.
        result_names: Returns the names of the results, for errors.

    Raises:
        UnsupportedError: If an equation cannot be computed for examples of different lengths, or a
            result has two ragged axes.
    """
    wanted = [_result_kind(sizes, v.aval, i, result_names) for i, v in enumerate(body.outvars)]
    domain = RaggedDomain(sizes)
    rewritten = _ProgramBuilder(domain).body(body, kinds, wanted)
    jaxpr, count = rewritten.taking(domain, domain.extras), len(domain.extras)
    invars = [*jaxpr.invars[count:], *jaxpr.invars[:count]]
    return RaggedJaxpr(jaxcompat.replace_jaxpr(jaxpr, invars=invars), rewritten.kinds)


def _result_kind(
    sizes: Sizes, aval: Aval, place: int, names: Callable[[], Sequence[str]]
) -> Kind | None:
    if not sizes.axes(getattr(aval, "shape", ())):
        return None
    kind = sizes.canonical(aval)
    if isinstance(kind, Pairs | Stacked):
        raise UnsupportedError(
            f"{names()[place]} is {type_of(aval)} for each example, but a result can have only "
            "one ragged axis, of a size such as n, 2*n or n + 1"
        )
    return kind


class _ProgramBuilder(RaggedBodyBuilder):
    """The outermost body, which defines the spare rows of arguments and results.

    The spare rows of an argument may hold anything: they are made equal to the first row before use
    (see `values`). Those of a result are set to zero.
    """

    def body(self, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None]) -> Any:
        self._arguments = set(body.invars)
        self._spared: dict[Var, Atom] = {}
        return super().body(body, kinds, wanted)

    def held(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom that holds an atom of the old body, with its spare rows defined."""
        value = super().held(atom, kind)
        if not isinstance(kind, Packed) or self.domain.sizes.is_exact(kind.size):
            return value
        if type(atom) is not Var or atom not in self._arguments:
            return value
        if atom not in self._spared:
            self._spared[atom] = self._rows(_spared, value, kind)
        return self._spared[atom]

    def _rows(self, convert: Callable[..., Any], atom: Atom, kind: Packed) -> Atom:
        """Apply `_spared` or `_cleared`."""

        def compute(context: RaggedContext, array: Any) -> Any:
            return convert(context, array, kind)

        return self.computed((convert, atom.aval, kind), compute, [atom], [kind.size])

    def results(
        self, atoms: Sequence[Atom], wanted: Sequence[Kind | None]
    ) -> tuple[list[Atom], list[Kind]]:
        """Return the atoms of the results, with zeros in their spare rows."""
        outs, kinds = super().results(atoms, wanted)
        for i, kind in enumerate(kinds):
            if isinstance(kind, Packed) and not self.domain.sizes.is_exact(kind.size):
                outs[i] = self._rows(_cleared, outs[i], kind)
        return outs, kinds


def _spared(context: RaggedContext, array: Any, kind: Packed) -> Any:
    return context.spared(array, kind.axis, kind.size)


def _cleared(context: RaggedContext, array: Any, kind: Packed) -> Any:
    return select(context.real(kind.size), kind.axis, array, 0)
