"""mask: one program for every length up to a bound.

    program.apply("mask(n=512)")

Arguments of `f32[n,d]` become padded ones, `f32[512,d]`, and n an argument. The contents of the
padding never reach a result or a gradient. Rules for primitives are in an open table,
`@rule("mask", …)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, PipelineError
from jaxprtool.ir.equations import Contains, as_weak_as
from jaxprtool.ir.expansions import LIVE, without_live_objects
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.regions import CALLS, CustomJVP, CustomVJP, Regions, Scan, While, regions
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.symbols import MOST, SizeBound, check_symbols, known_range
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled, paths, structure
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes import Pass
from jaxprtool.passes.cleanup.cse import cse_body
from jaxprtool.passes.mapping import (
    BodyBuilder,
    Domain,
    Rewritten,
    Role,
    StructuredRule,
    by_edges,
    custom_derivative,
    solve,
    with_arguments,
    write,
)
from jaxprtool.passes.mapping.mask import moves, reductions  # noqa: F401  # their rules
from jaxprtool.passes.mapping.mask.table import (
    FACTS,
    Bounds,
    Facts,
    Filled,
    MaskContext,
    Padded,
    UnboundedSize,
    check_constraints,
    guard_derivative,
    is_float,
    mask_error,
    mask_rules,
    mixes_iterations,
    result_facts,
    select_if,
    with_own_constraints,
)

__all__ = [
    "Bounds",
    "Filled",
    "Mask",
    "MaskBodyBuilder",
    "MaskContext",
    "MaskDomain",
    "Padded",
    "mask_error",
    "mask_rules",
    "masked",
    "structured_mask_rules",
]

# --- body -----------------------------------------------------------------------------------------
# Mask a jaxpr: the domain of masked programs, and scans of masked length.
#
# Variables whose types mention a masked symbol become padded variables. The kind of a value is the
# known `Facts` about it.
#
# - An equation that mentions no masked symbol stays as it is.
# - An equation that holds jaxprs has a structured rule, which masks these in turn.
# - Any other equation is replaced by the equations of its rule. Equations with the same signature
#   share a template, for which the rule is traced once (`mapping.domains`).
#
# A masked body takes the symbols that it needs as its first arguments. It computes each size and
# each mask from these once.


#: The type of a symbol.
SCALAR = jax.core.ShapedArray((), np.dtype(np.int32))
#: The name and the type of the flag that is True in an iteration of a scan that is not padding.
ITERATION = "iteration"
_FLAG = jax.core.ShapedArray((), np.dtype(np.bool_))

#: The open table of rules for equations that hold jaxprs.
structured_mask_rules: RuleTable[StructuredRule] = RuleTable()
rule(structured_mask_rules, *CALLS, "cond", "while")(by_edges)
rule(structured_mask_rules, *CustomJVP.primitives, *CustomVJP.primitives)(custom_derivative)


class BodyContext(NamedTuple):
    """The position of a body in the program.

    Attributes:
        iterations: True if it is, or is called by, the body of a scan of masked length. It may then
            take a flag that is True if the current iteration is not padding, `ITERATION`.
        in_scan: True if it is the body of a scan, or inside one.
    """

    iterations: bool = False
    in_scan: bool = False


class MaskBodyBuilder(BodyBuilder[Facts]):
    """Builds one masked body."""

    domain: MaskDomain

    # True while the operands of an equation are to be guarded.
    _guarding = False

    def held(self, atom: Atom, facts: Facts) -> Atom:
        value = super().held(atom, facts)
        if not self._guarding or not facts.active or facts.varies:
            return value
        return self.fact(("guarded", value))

    def rewrite(self, eqn: JaxprEqn) -> None:
        facts = [*map(self.kind, eqn.invars)]
        # In a scan, the derivative of a loop-invariant value is a sum over iterations, to which
        # those of the padding must add zero. Rules of bilinear primitives, and bodies of calls,
        # ensure that themselves.
        mixed = self.context.iterations and mixes_iterations(facts)
        sums_itself = traits(eqn).bilinear or eqn.primitive.name in CALLS
        self._guarding = mixed and not sums_itself
        if not (self.domain.bounds.mentions(eqn) or (mixed and sums_itself)):
            self.unchanged(eqn, [*map(self.held, eqn.invars, facts)])
            active, varies = _active_varies(eqn, facts)
            for var in eqn.outvars:
                self.bind(var, replace(Facts.of(var, active=active), varies=varies), var)
        elif not self.structured(eqn):
            if eqn.effects:
                raise mask_error(eqn, "it has an effect on a padded value")
            self.by_rule(eqn, masking_rule(eqn), facts, tuple(v.aval.shape for v in eqn.outvars))
        self._guarding = False

    def rule_context(self, name: str, facts: dict[Any, Any]) -> MaskContext:
        symbols = {fact: facts.pop(("extra", fact)) for fact in self.domain.extras}
        flag = facts.pop(("extra", ITERATION))
        flag = flag if self.context.iterations else None
        return MaskContext(name, self.domain.bounds, symbols, facts, flag, self.context.in_scan)

    def uses(self, sizes: Iterable[Any], facts: Sequence[str] | None = None) -> list[Any]:
        return [("extra", ITERATION), *super().uses(sizes, facts)]

    def operand(self, array: Any, facts: Facts, shape: tuple[Any, ...]) -> Padded:
        return Padded(array, facts)

    def result(
        self, value: Any, eqn: JaxprEqn, var: Var, kinds: Sequence[Facts]
    ) -> tuple[Any, Facts]:
        return result_facts(value, var.aval.shape, *_active_varies(eqn, kinds))

    # --- sizes and masks ------------------------------------------------------------------------

    def size(self, size: Any) -> Atom:
        """Return the atom of the value of a logical size."""
        if isinstance(size, int):
            return jaxcompat.as_literal(size, SCALAR)
        return self.fact(("size", size))

    def valid(self, size: Any) -> Atom:
        """Return the atom of the mask of an axis of a logical size."""
        return self.fact(("valid", size))

    def made_fact(self, fact: tuple[str, Any]) -> Atom:
        what, value = fact
        if what != "guarded":
            return super().made_fact(fact)
        # A value whose derivative is zero in iterations of the padding.
        operands = [self.extra(ITERATION), value]
        return self.computed((what, value.aval), lambda _, *args: guard_derivative(*args), operands)

    def isolate_cotangent(self, atom: Atom, facts: Facts) -> Atom:
        """Return an argument of the program whose derivative is zero in its padding.

        The caller may have computed the padding from a differentiated value.
        """
        shape, axes = facts.shape, self.domain.bounds.axes(facts.shape)

        def compute(context: MaskContext, array: Any) -> Any:
            return context.isolate_cotangent(array, shape, axes, active=True)

        sizes = (shape[axis] for axis in axes)
        return self.computed(("isolated", atom.aval, facts), compute, [atom], sizes)


@dataclass(eq=False)
class MaskProgramBuilder(MaskBodyBuilder):
    """The body of the whole program.

    Attributes:
        sizes: Logical sizes to return after its results.
    """

    sizes: Sequence[Any] = field(default_factory=tuple)

    def arguments(self, variables: Sequence[Var], kinds: Sequence[Facts]) -> list[Var]:
        invars = super().arguments(variables, kinds)
        for var, kind, new in zip(variables, kinds, invars, strict=True):
            if kind.active and new is not var:
                self.bind(var, kind, self.isolate_cotangent(new, kind))
        return invars

    def results(
        self, atoms: Sequence[Atom], wanted: Sequence[Facts | None]
    ) -> tuple[list[Atom], list[Facts]]:
        outvars, facts = super().results(atoms, wanted)
        return [*outvars, *map(self.size, self.sizes)], facts


class MaskDomain(Domain[Facts]):
    """The domain of masked programs.

    Args:
        bounds: The masked symbols and their bounds.
    """

    builder_class = MaskBodyBuilder
    rules = mask_rules
    structured_rules = structured_mask_rules
    facts = FACTS
    refusal = staticmethod(mask_error)

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self.bounds = bounds
        self.extras = tuple(bounds)

    def masked(
        self, body: ClosedJaxpr, facts: Sequence[Facts], *, in_scan: bool = False
    ) -> Rewritten[Facts]:
        """Return the masked form of a closed jaxpr, from the facts about its arguments."""
        return self.body(body, facts, None, BodyContext(in_scan=in_scan))

    def kind_of(self, atom: Atom) -> Facts:
        return Facts.of(atom, active=False)

    def join(self, first: Facts, second: Facts) -> Facts:
        return first.joined(second)

    def aval(self, facts: Facts, aval: Aval) -> Aval:
        shape = getattr(aval, "shape", ())
        return aval.update(shape=self.bounds.shape(shape)) if self.bounds.axes(shape) else aval

    def settled(self, facts: Facts, aval: Aval, role: Role, inside: Regions) -> Facts:
        if role == "row":
            return replace(facts, shape=facts.shape[1:], fills=facts.fills[1:])
        agrees = role != "operand" and inside.kind != "call"
        return replace(facts, literal=None) if agrees else facts

    def stacked(self, facts: Facts, length: Any) -> Facts:
        return replace(
            facts, shape=(length, *facts.shape), fills=(None, *facts.fills), literal=None
        )

    def fits(self, facts: Facts, wanted: Facts | None) -> bool:
        return True

    def differentiated(self, facts: Facts, aval: Aval) -> Facts:
        # The derivative rule may leave other padding in the results than the function does.
        return replace(facts, fills=(None,) * len(facts.fills))

    def tangent(self, facts: Facts, aval: Aval) -> Facts:
        return Facts.unknown(getattr(aval, "shape", ()), active=is_float(aval))

    def extra_aval(self, name: str) -> Aval:
        return _FLAG if name == ITERATION else SCALAR

    def fact_aval(self, fact: tuple[str, Any]) -> Aval:
        what, value = fact
        if what == "valid":
            return jax.core.ShapedArray((self.bounds.padded(value),), jnp.bool_)
        return self.extra_aval(value) if what == "extra" else SCALAR

    def context(self, context: BodyContext, inside: Regions) -> BodyContext:
        if inside.kind == "call" and not inside.edges.has_rule:
            return context
        # JAX differentiates a loop in reverse if the number of its iterations is known.
        in_scan = context.in_scan or (inside.repeats and inside.view.trips is not None)
        return BodyContext(in_scan=in_scan)

    def sizes_of(self, eqn: JaxprEqn) -> list[Any]:
        return self.bounds.sizes_of(eqn)

    def in_params(self, eqn: JaxprEqn) -> bool:
        return self.bounds.in_params(eqn)

    def failed(self, eqn: JaxprEqn, error: Exception) -> JaxprToolError:
        if isinstance(error, UnboundedSize):
            return mask_error(eqn, error.message, error.hint)
        return super().failed(eqn, error)


def _active_varies(eqn: JaxprEqn, facts: Sequence[Facts]) -> tuple[bool, bool]:
    """Return whether the results of an equation are active, and whether they vary."""
    active = any(operand.active for operand in facts) and not traits(eqn).stops_derivative
    return active, any(operand.varies for operand in facts)


def masking_rule(eqn: JaxprEqn) -> Callable[..., Any]:
    """Return the masking rule of an equation.

    Raises:
        UnsupportedError: If its primitive has none.
    """
    rule = mask_rules.get(eqn.primitive.name)
    if rule is None and traits(eqn).elementwise:
        rule = mask_rules["elementwise"]
    if rule is None:
        raise mask_error(
            eqn,
            f"no masking rule for '{eqn.primitive.name}'",
            'add one with @rule("mask", …) of jaxprtool.extend',
        )
    return rule


# --- scans ----------------------------------------------------------------------------------------
# Masking of scans of masked length: the iterations of the padding change nothing.

#: Return True if a jaxpr holds a while loop, at any depth.
has_while = Contains(lambda eqn: eqn.primitive.name in While.primitives)


@rule(structured_mask_rules, "scan")
def _scan(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    domain, inside = builder.domain, regions(eqn)
    assert inside is not None
    scan = Scan.of(eqn)
    if not domain.bounds.is_masked(scan.length):
        return by_edges(builder, eqn)
    if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in eqn.invars) or eqn.effects:
        raise mask_error(eqn, "its iterations have effects, and their number is masked")
    guards = not has_while(scan.body)
    consts, carried = len(scan.consts), len(scan.carry)
    facts = [*map(builder.kind, eqn.invars)]
    varying = [replace(operand, varies=operand.varies or guards) for operand in facts[consts:]]
    solution = solve(
        builder, inside, [*facts[:consts], *varying], BodyContext(guards, in_scan=True)
    )
    assert solution is not None
    (masked,) = solution.bodies
    names = (*(name for name in masked.extras if name != ITERATION), ITERATION)
    body = masked.taking(domain, names)
    iteration = _guarded_iteration if guards else _skipped_iteration
    step = iteration(body, len(names) - 1, len(names) + consts, carried)
    # Merge equal masks: JAX would store each of them in every iteration, for derivatives.
    body = cse_body(jaxcompat.trace_in_setting(step, [v.aval for v in body.invars], eqn))
    # Results differ between iterations of an outer scan only if the operands do.
    outer = any(operand.varies for operand in facts)
    solution = replace(
        solution,
        results=[replace(result, varies=outer) for result in solution.results],
        bodies=[Rewritten[Facts](body, names, masked.kinds)],
    )
    flags = {ITERATION: builder.valid(scan.length)}
    write(builder, solution, flags, length=domain.bounds.padded(scan.length))
    return True


def _guarded_iteration(
    body: ClosedJaxpr, flag_at: int, start: int, carried: int
) -> Callable[..., Any]:
    """Return one iteration of a scan, in which the carry is kept if the flag is False.

    An iteration in the padding may compute NaN, with a NaN derivative. The masked body keeps these
    out of the derivatives of loop-invariant values. This function keeps them out of the carry.

    Args:
        body: The masked body.
        flag_at: The position of the flag among its arguments.
        start: The position of the first carry.
        carried: The number of carries.
    """
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def guard(flag: Any, x: Any) -> Any:
        return guard_derivative(flag, x) if is_float(x) else x

    def step(*args: Any) -> list[Any]:
        flag, carry = args[flag_at], args[start : start + carried]
        safe = [guard(flag, x) for x in carry]
        outs = evaluate(*args[:start], *safe, *args[start + carried :])
        kept = [select_if(flag, new, old) for new, old in zip(outs, carry, strict=False)]
        return [*kept, *(guard(flag, y) for y in outs[carried:])]

    return step


def _skipped_iteration(
    body: ClosedJaxpr, flag_at: int, start: int, carried: int
) -> Callable[..., Any]:
    """Return one iteration of a scan, which is skipped if the flag is False.

    It is used for bodies with a while loop, which might not terminate in the padding. See
    `_guarded_iteration` for the arguments.
    """
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def step(*args: Any) -> list[Any]:
        def skip(*args: Any) -> list[Any]:
            avals = (v.aval for v in body.outvars[carried:])
            zeros = (as_weak_as(jnp.zeros(aval.shape, aval.dtype), aval) for aval in avals)
            return [*args[start : start + carried], *zeros]

        return lax.cond(args[flag_at], lambda *operands: evaluate(*operands), skip, *args)

    return step


# --- expanded -------------------------------------------------------------------------------------
# Structured masking rules for calls with live objects and `custom_linear_solve`.


@rule(structured_mask_rules, *LIVE)
def _live(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    older = without_live_objects(eqn)
    if not builder.structured(older):
        raise mask_error(eqn, "no masking rule for the operation that it computes")
    return True


@rule(structured_mask_rules, "custom_linear_solve")
def _linear_solve(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    """Mask each of its functions for vectors of unknown padding, as derivatives pass them."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    facts = [*map(builder.kind, eqn.invars)]
    operands = [*map(builder.held, eqn.invars, facts)]
    start = sum(lengths)
    vectors = [Facts.unknown(operand.shape, active=True) for operand in facts[start:]]
    ins: list[Atom] = []
    new_lengths, new_jaxprs, at = [], [], 0
    for length, jaxpr in zip(lengths, jaxprs, strict=True):
        symbols: list[Atom] = []
        if jaxpr is not None:
            var_facts = [*facts[at : at + length], *vectors]
            masked = builder.domain.masked(jaxpr, var_facts, in_scan=builder.context.in_scan)
            symbols = [builder.extra(name) for name in masked.extras]
            jaxpr = masked.jaxpr
        new_jaxprs.append(jaxpr)
        new_lengths.append(length + len(symbols))
        ins += [*symbols, *operands[at : at + length]]
        at += length
    params = {
        **eqn.params,
        "const_lengths": type(lengths)(*new_lengths),
        "jaxprs": type(jaxprs)(*new_jaxprs),
    }
    active = any(operand.active for operand in facts)
    varies = any(operand.varies for operand in facts)
    var_facts = [Facts.unknown(var.aval.shape, active=active) for var in eqn.outvars]
    outs = builder.outs(eqn.outvars, var_facts)
    new = eqn.replace(invars=[*ins, *operands[start:]], outvars=outs, params=params)
    builder.add(new, eqn, [replace(result, varies=varies) for result in var_facts])
    return True


# --- mask -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask(Pass):
    """Replace symbolic sizes by padded ones: one program for all sizes up to a bound.

    An argument of `f32[n,d]` becomes `f32[512,d]`, of which the first n rows are used, and n
    becomes an argument `i32[]` after the other positional ones: `p(x, 9)`, or `p(x, n=9)`. The
    contents of the padding, NaN included, never reach a result or a derivative. If the type of a
    result mentions n, the program returns a pair: the padded results, and their logical sizes, with
    None for results without padding.

    Symbols without a bound stay symbolic. Several symbols are arguments in the order of their
    names.

    Args:
        sizes: The bound of each symbol, by name: with n=512, n is at most 512. The minimum is 0, or
            the one in the type, as in `f32[n>=2]`.
        buckets: Several bounds of a symbol, with one program for each: `(64, 128)` if there is one
            symbol, or `{'n': (64, 128)}`. The programs are named `n64` and `n128`.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, a constraint does not hold at all
            sizes up to the bound, it is ambiguous which symbol has the buckets, or a bucket is
            larger than the bound.
        UnsupportedError: If an equation cannot be masked.

    Example:
        def f(x):
            return x.sum()

        $ jaxprtool opt f.py:f --args "i32[n]" -p "mask(n=4)"
        { lambda ; a:i32[4] b:i32[]. let
            c:i32[4] = iota[dimension=0 dtype=int32 shape=(4,) sharding=None]
            d:bool[4] = lt c b
            e:i32[4] = broadcast_in_dim 0:i32[]
            f:i32[4] = select_n d e a
            g:i32[] = reduce_sum[axes=(0,) out_sharding=None] f
          in (g,) }
    """

    name: ClassVar[str] = "mask"
    group: ClassVar[str] = "transform"
    symbolic: ClassVar[bool] = True
    more_options: ClassVar[str] = "sizes"
    preserves: ClassVar[bool] = False

    sizes: dict[str, int]
    buckets: tuple[int, ...] | dict[str, tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if not self.sizes and not self.buckets:
            raise PipelineError(
                "pass 'mask' needs the bound of a symbol",
                "mask(n=512) declares that n is at most 512",
            )
        buckets = self.buckets
        several = (
            list(buckets.values()) if isinstance(buckets, dict) else [buckets] if buckets else []
        )
        for name, bound in self.sizes.items():
            if not 1 <= bound <= MOST:
                raise PipelineError(f"mask: the bound {name}={bound} must be from 1 to {MOST}")
        if self.buckets and not all(
            isinstance(sizes, tuple) and _are_sizes(sizes) for sizes in several
        ):
            raise PipelineError(
                f"mask: buckets must be sizes from 1 to {MOST}, not {self.buckets!r}"
            )

    def __call__(self, program: Program) -> Program | Programs:
        buckets = self._buckets(program)
        bounds = {**self.sizes, **{name: max(sizes) for name, sizes in buckets.items()}}
        check_sizes(program, bounds)
        choices = [[(name, bound) for bound in bounds] for name, bounds in buckets.items()]
        programs = {
            "_".join(f"{name}{bound}" for name, bound in choice): masked(
                program, {**self.sizes, **dict(choice)}
            )
            for choice in itertools.product(*choices)
        }
        return Programs(programs) if buckets else programs[""]

    def _buckets(self, program: Program) -> dict[str, list[int]]:
        """Return the sorted bounds of each symbol with buckets."""
        buckets = self.buckets
        if isinstance(buckets, tuple):
            if buckets and len(program.symbols) != 1:
                has = ", ".join(program.symbols) or "none"
                raise ArgumentsError(
                    f"mask: buckets=(…) needs a program with one symbol; {program.name} has: {has}",
                    "name the symbol: buckets={'n': (64, 128)}",
                )
            buckets = dict.fromkeys(program.symbols, buckets) if buckets else {}
        for name, bounds in buckets.items():
            bound = self.sizes.get(name)
            if bound is not None and max(bounds, default=0) > bound:
                raise ArgumentsError(
                    f"mask: the bucket {name}={max(bounds)} exceeds the bound {name}={bound}"
                )
        more = {name: [self.sizes[name]] for name in buckets if name in self.sizes}
        return {name: sorted({*buckets[name], *more.get(name, [])}) for name in buckets}


def _are_sizes(bounds: tuple[int, ...]) -> bool:
    return bool(bounds) and all(type(bound) is int and 1 <= bound <= MOST for bound in bounds)


def check_sizes(program: Program, bounds: Mapping[str, int]) -> None:
    """Check that all sizes up to the bounds satisfy the constraints of a program.

    Args:
        program: A program with symbolic dimensions.
        bounds: The largest size of some of its symbols, in elements.

    Raises:
        ArgumentsError: If some size does not.
    """
    what, least = f"mask: {program.name}", _least(program, bounds)
    for name, bound in bounds.items():
        if bound < least.get(name, 0):
            raise ArgumentsError(
                f"{what}: {name}={bound} is too small: {name} is at least {least[name]}"
            )
    check_constraints(what, program.symbols, bounds, least)


def _least(program: Program, names: Iterable[str]) -> dict[str, int]:
    """Return the least size of each of these symbols that the program has."""
    symbols = program.symbols
    return {name: known_range(symbols[name])[0] for name in names if name in symbols}


def masked(program: Program, sizes: Mapping[str, int]) -> Program:
    """Return the masked program for some bounds; see `Mask`.

    Args:
        program: A program with symbolic dimensions.
        sizes: The bound of each symbol to mask, in elements.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, or a constraint does not hold at
            all sizes up to the bounds.
        UnsupportedError: If an equation cannot be masked.
    """
    check_symbols(f"mask: {program.name}", sizes, program.symbols)
    result = _masked(program, Bounds({name: sizes[name] for name in sorted(sizes)}))
    return with_own_constraints(result)


def _masked(program: Program, bounds: Bounds) -> Program:
    old = jaxcompat.close_jaxpr(program.jaxpr)
    padded = [aval for aval in program.out_avals if bounds.axes(getattr(aval, "shape", ()))]
    facts = [Facts.of(var, active=True) for var in old.invars]
    sizes = [n for aval in padded for n in aval.shape]
    domain = MaskDomain(bounds)
    rewritten = MaskProgramBuilder(domain, BodyContext(), sizes=sizes).body(
        old, facts, (None,) * len(old.outvars)
    )
    body, count = rewritten.taking(domain, domain.extras), len(domain.extras)
    body = jaxcompat.replace_jaxpr(body, invars=[*body.invars[count:], *body.invars[:count]])
    least = _least(program, bounds)
    limits = {name: SizeBound(most, least[name]) for name, most in bounds.bounds.items()}
    results = filled(program.out_tree, program.out_avals)
    out_names = program.out_names
    if padded:
        results = results, jax.tree.map(lambda aval: _sizes(bounds, aval), results)
        out_names = tuple(paths("result", results))
    return with_arguments(program, body, limits, out_tree=structure(results), out_names=out_names)


def _sizes(bounds: Bounds, aval: Aval) -> tuple[int, ...] | None:
    """Return a tree with a leaf for each size of a padded result; None for unpadded ones."""
    shape = getattr(aval, "shape", ())
    return tuple(range(len(shape))) if bounds.axes(shape) else None
