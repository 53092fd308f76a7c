"""What the equations of a page cost, as parts of what the program costs.

An equation that holds bodies has what they have, and a scope what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from jaxprtool.ir.basics.quantities import in_bytes, with_prefix
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn

if TYPE_CHECKING:
    from jaxprtool.analysis.cost.work import Work


@dataclass(frozen=True, slots=True)
class Heat:
    """What something costs, in numbers and in percent of the program.

    Attributes:
        flops: FLOPs and transcendentals.
        bytes: Bytes that go through memory.
        flops_percent: The part of the program's FLOPs.
        bytes_percent: The part of the program's bytes.
    """

    flops: int
    bytes: int
    flops_percent: float
    bytes_percent: float

    @property
    def text(self) -> str:
        """The numbers."""
        return f"{with_prefix(self.flops)} FLOPs, {in_bytes(self.bytes)}"


class Heats:
    """What the equations of a program cost.

    Args:
        jaxpr: The program.
        works: What each equation costs, at every depth, by its `id`. Polynomials of symbolic
            sizes, which are no parts of one another, are left out.
    """

    def __init__(self, jaxpr: Jaxpr, works: Mapping[int, Work]) -> None:
        self._works = {key: found for key, work in works.items() if (found := _numbers(work))}
        known = [self._works[id(eqn)] for eqn in jaxpr.eqns if id(eqn) in self._works]
        self._flops, self._bytes = (sum(each[i] for each in known) for i in (0, 1))

    def __bool__(self) -> bool:
        """Return True if something is known."""
        return bool(self._works)

    def of(self, eqn: JaxprEqn) -> Heat | None:
        """Return what an equation costs; None if that is nothing, or not known."""
        flops, size = self._works.get(id(eqn), (0, 0))
        if not (flops or size):
            return None
        parts = flops / (self._flops or 1), size / (self._bytes or 1)
        return Heat(flops, size, *(100 * part for part in parts))


def sum_of(heats: Iterable[Heat | None]) -> Heat | None:
    """Return what several cost together; None if that is nothing, or not known."""
    known = [astuple(each) for each in heats if each is not None]
    return Heat(*map(sum, zip(*known, strict=True))) if known else None


def _numbers(work: Work) -> tuple[int, int] | None:
    flops, size = work.flops + work.transcendentals, work.bytes
    return (flops, size) if type(flops) is int and type(size) is int else None
