"""Bisection: the pass and the equation at which a variant diverges from the reference.

If two variants of one function differ in backend, precision or compilation, this is first tested as
the cause. Otherwise the programs between passes form a chain: from the result of the reference's
passes back to the traced function, and from there to the result of the variant's passes. A binary
search, as in LLVM's opt-bisect-limit, finds the first program with different results, which is
compared equation by equation with its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxprtool.api.investigate.variants import Planned
from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.compare.bisection import Divergence, find_divergence
from jaxprtool.execute.compare.measures import Tolerance
from jaxprtool.execute.compare.variants import (
    OnProgress,
    Runner,
    Variant,
    arguments_of,
    compared,
    positions_of,
)
from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.cleanup.inline import Inline

_INLINE = Inline(("jit", "closed_call", "custom_jvp", "custom_vjp", "custom_vmap"), force=True)


@dataclass(frozen=True, eq=False)
class _Link:
    """A program between passes, and the pass that produced it from its predecessor."""

    step: str
    variant: Variant


class Bisection:
    """The search for where variants diverge from a reference.

    Args:
        reference: The reference.
        arguments: Its arguments.
        results: Its results.
        tolerance: The tolerance.
        on_progress: Called with progress messages.
    """

    def __init__(
        self,
        reference: Planned,
        arguments: Sequence[Any],
        results: Sequence[Any],
        tolerance: Tolerance,
        on_progress: OnProgress,
    ):
        self._reference, self._arguments, self._results = reference, arguments, results
        self._tolerance, self._on_progress = tolerance, on_progress
        self._program = reference.variant.program

    def of(self, other: Planned, results: Sequence[Any]) -> Divergence:
        """Return where a variant with known results diverges."""
        first = self._reference
        if other.target != first.target:
            return self._divergence(first.variant, other.variant, (self._results, results))
        chain = self._chain(other)
        moved = chain[0].variant
        same_run = _how(first) == _how(other)
        if not same_run and (len(chain) == 1 or not self._agrees(moved)):
            known = (self._results, results) if len(chain) == 1 else None
            found = self._divergence(first.variant, moved, known)
            return replace(found, variant=other.variant.name)
        return self._by_passes(chain, other)

    def within(self, other: Planned, results: Sequence[Any]) -> Divergence:
        """Return where the bits of another program, with results within tolerance, first differ."""
        variants = self._reference.variant, other.variant
        return replace(self._divergence(*variants, (self._results, results), True), within=True)

    def _by_passes(self, chain: Sequence[_Link], other: Planned) -> Divergence:
        low, high = 0, len(chain) - 1
        while high - low > 1:
            middle = (low + high) // 2
            self._on_progress(f"pass {middle} of {len(chain) - 1}")
            if self._agrees(chain[middle].variant):
                low = middle
            else:
                high = middle
        found = self._divergence(chain[low].variant, chain[high].variant)
        if not found.found and low > 0:
            from_first = self._divergence(chain[0].variant, chain[high].variant)
            found = from_first if from_first.found else found
        return replace(
            found,
            reference=self._reference.variant.name,
            variant=other.variant.name,
            step=chain[high].step,
            place=high,
            passes=len(chain) - 1,
        )

    def _chain(self, other: Planned) -> list[_Link]:
        """Return the programs between the reference and a variant, run like the variant."""
        back, there = self._reference.states, other.states
        same = 0
        for (a, _), (b, _) in zip(back, there, strict=False):
            if a != b:
                break
            same += 1
        undone = [text for text, _ in back[same:]]
        links = [
            _Link(
                f"without {undone[i - same + 1]}" if i + 1 < len(back) else "",
                self._at(other, back[i][1]),
            )
            for i in range(len(back) - 1, same - 2, -1)
        ]
        links += [_Link(text, self._at(other, program)) for text, program in there[same:]]
        return list(self._kept(links))

    def _kept(self, links: Sequence[_Link]) -> Iterator[_Link]:
        """Yield the comparable programs; the passes of skipped ones are added to the next."""
        steps: list[str] = []
        for i, link in enumerate(links):
            steps.append(link.step)
            if i in (0, len(links) - 1) or self._fits(link.variant):
                redone = {f"without {each}" for each in steps}
                yield replace(link, step=", ".join(x for x in steps if x not in redone))
                steps = []

    def _at(self, other: Planned, program: Program) -> Variant:
        if program.symbols:
            program = program.at([getattr(value, "shape", ()) for value in self._arguments])
        return other.at_state(program)

    def _fits(self, variant: Variant) -> bool:
        """Return True if a program has the argument and result types of the reference."""
        try:
            arguments_of(variant, self._program, self._arguments)
        except (ArgumentsError, IndexError):
            return False
        return True

    def _agrees(self, variant: Variant) -> bool:
        """Return True if the results of a program equal the reference's within tolerance."""
        values = arguments_of(variant, self._program, self._arguments)
        runner = Runner(variant, self._on_progress)
        return compared(variant, self._results, lambda: runner(values), self._tolerance).within

    def _divergence(
        self,
        first: Variant,
        second: Variant,
        results: Any = None,
        exact: bool = False,
    ) -> Divergence:
        """Return the equation at which two variants diverge."""
        given = tuple(
            arguments_of(each, self._program, self._arguments) for each in (first, second)
        )
        places = [positions_of(each.program, self._program) for each in (first, second)]
        positions = [(places[0].index(p), j) for j, p in enumerate(places[1]) if p in places[0]]

        def searched(variants: tuple[Variant, Variant]) -> Divergence:
            values = given[0], given[1]
            return find_divergence(
                variants,
                values,
                results,
                self._tolerance,
                self._on_progress,
                positions,
                exact,
            )

        found = searched((first, second))
        if first.program.jaxpr is second.program.jaxpr or not found.at_call:
            return found
        opened = searched((_opened(first), _opened(second)))
        if not opened.found:
            return found
        # Equations inside a call lack the user's source line if JAX traced its function before.
        return opened if opened.source else replace(opened, source=found.source, code=found.code)


def _opened(variant: Variant) -> Variant:
    """Return a variant with inlined calls, since a pass may have inlined calls of the other one."""
    program = _INLINE(variant.program)
    assert isinstance(program, Program)
    return replace(variant, program=program)


def _how(planned: Planned) -> Any:
    """Return the backend, precision and compilation mode of a variant."""
    return planned.variant.platform, planned.variant.op_by_op, planned.precision
