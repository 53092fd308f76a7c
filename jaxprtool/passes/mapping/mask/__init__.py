"""mask: one program for every length up to a bound.

    program.apply("mask(n=512)")

Arguments of `f32[n,d]` become padded ones, `f32[512,d]`, and n an argument. The contents of the
padding never reach a result or a gradient. Rules for primitives are in an open table,
`@rule("mask", …)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, PipelineError
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.symbols import MOST, SizeBound, check_symbols, known_range
from jaxprtool.ir.trees import filled, paths, structure
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.mapping.domains import with_arguments
from jaxprtool.passes.mapping.mask import moves, reductions  # noqa: F401  # their rules
from jaxprtool.passes.mapping.mask.body import (
    BodyContext,
    MaskBodyBuilder,
    MaskDomain,
    MaskProgramBuilder,
    structured_mask_rules,
)
from jaxprtool.passes.mapping.mask.table import (
    Bounds,
    Facts,
    Filled,
    MaskContext,
    Padded,
    check_constraints,
    mask_error,
    mask_rules,
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
