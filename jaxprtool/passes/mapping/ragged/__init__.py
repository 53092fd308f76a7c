"""ragged: one program for examples of different length, without padding where possible.

    program.apply("ragged(axis='n', lanes=32)")

An argument of `f32[n,d]` becomes `f32[N,d]`, the rows of all examples one after the other, and
the lengths of the examples are an additional argument. Rules for primitives are in an open table,
`@rule("ragged", …)`. A primitive without a rule is computed on padded examples, by its `mask` rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.export

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.symbols import MOST, LengthsBound, check_symbols, known_range
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Var
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.mapping.batch.axes import flat_in_axes
from jaxprtool.passes.mapping.domains import with_arguments
from jaxprtool.passes.mapping.mask.table import check_constraints, with_own_constraints
from jaxprtool.passes.mapping.ragged import pairs, rules  # noqa: F401  # their rules
from jaxprtool.passes.mapping.ragged.body import (
    RaggedBodyBuilder,
    RaggedDomain,
    structured_ragged_rules,
)
from jaxprtool.passes.mapping.ragged.table import (
    Batched,
    Kind,
    Layout,
    Packed,
    Pairs,
    RaggedContext,
    RaggedOperand,
    Shared,
    Sizes,
    Stacked,
    ragged_error,
    ragged_rules,
    select,
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
