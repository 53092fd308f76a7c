"""Compute how many bytes of a program's own values are alive at once, equation by equation.

A value lives from the equation that defines it to its last use, and a result of the program to the
end; arguments and constants belong to the caller. Nothing is computed in place. An equation with
bodies also needs the largest peak of its bodies; a loop needs its own results besides, while the
results of a call or branch are those of its body. The peak of a body with a value of symbolic size
is unknown, and so is that of a body that holds such a body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import bodies, size_of
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Lifetimes:
    """The values of a body's equations, as numbers, with their definitions and uses.

    `makes[i]` and `reads[i]` are the values of equation `i`, without duplicates, and `working[i]`
    the bytes that it needs while it runs, including its results. `sizes`, `defined_by` and
    `readers` have an entry per value; the results of the body, `kept`, are alive to the end.
    """

    makes: list[list[int]]
    reads: list[list[int]]
    working: list[int]
    sizes: list[int]
    defined_by: list[int]
    readers: list[list[int]]
    kept: frozenset[int]

    def peak(self, order: Sequence[int]) -> int:
        """Return the largest number of bytes alive at once if the equations run in this order."""
        left = [len(readers) for readers in self.readers]
        for value in self.kept:
            left[value] += 1
        live = most = 0
        sizes = self.sizes
        for i in order:
            most = max(most, live + self.working[i])
            for value in self.makes[i]:
                if left[value]:
                    live += sizes[value]
            for value in self.reads[i]:
                left[value] -= 1
                if not left[value]:
                    live -= sizes[value]
        return most


class Liveness:
    """Computes the peaks of bodies, each once, since equations may share them."""

    def __init__(self) -> None:
        self._peaks: dict[Jaxpr, int | None] = {}

    def peak(self, jaxpr: AnyJaxpr) -> int | None:
        """Return the most bytes of a jaxpr's own values alive at once, or None if unknown."""
        anchor = jaxcompat.open_jaxpr(jaxpr)
        if anchor not in self._peaks:
            lifetimes = self.lifetimes(anchor.eqns, anchor.outvars)
            order = range(len(anchor.eqns))
            self._peaks[anchor] = None if lifetimes is None else lifetimes.peak(order)
        return self._peaks[anchor]

    def lifetimes(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> Lifetimes | None:
        """Return the definitions and uses of the values of equations; None if a size is unknown."""
        number: dict[Var, int] = {}
        found = Lifetimes([], [], [], [], [], [], frozenset())
        for i, eqn in enumerate(eqns):
            reads = {number[v] for v in eqn.invars if type(v) is not Literal and v in number}
            for value in reads:
                found.readers[value].append(i)
            found.reads.append(sorted(reads))
            total, makes = 0, []
            for var in eqn.outvars:
                size = _size(var.aval)
                if size is None:
                    return None
                total += size
                if isinstance(var, DropVar):
                    continue
                number[var] = len(found.sizes)
                makes.append(number[var])
                found.sizes.append(size)
                found.defined_by.append(i)
                found.readers.append([])
            working = self._working(eqn, total)
            if working is None:
                return None
            found.makes.append(makes)
            found.working.append(working)
        kept = frozenset(number[v] for v in results if type(v) is not Literal and v in number)
        return Lifetimes(**{**vars(found), "kept": kept})

    def _working(self, eqn: JaxprEqn, results: int) -> int | None:
        """Return the bytes that an equation needs, given those of its results; None if unknown."""
        if not eqn.params or not holds_jaxpr(eqn.params.values()):
            return results
        peaks = [self.peak(body) for _, body in bodies(eqn)]
        known = [peak for peak in peaks if peak is not None]
        if len(known) != len(peaks):
            return None
        hungriest = max(known, default=0)
        inside = regions(eqn)
        # The results of a loop are allocated in addition to those of its body.
        loop = inside is not None and inside.repeats
        return results + hungriest if loop else max(results, hungriest)


def _size(aval: Aval) -> int | None:
    """Return the bytes of a value; 0 for a token, and None for a symbolic size."""
    return size_of(aval) if hasattr(aval, "shape") else 0
