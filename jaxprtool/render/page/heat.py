"""The costs of equations on a page as shares of the program's cost.

The cost of an equation with bodies, or of a scope, is that of its contents.
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
    """A cost in absolute numbers and in percent of the program's cost.

    Attributes:
        flops: FLOPs and transcendentals.
        bytes: Bytes of memory traffic.
        flops_percent: The share of the program's FLOPs.
        bytes_percent: The share of the program's bytes.
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
    """The costs of the equations of a program.

    Args:
        jaxpr: The program.
        works: The cost of each equation, at every depth, by `id`. Costs with symbolic sizes are
            left out, since they have no shares.
    """

    def __init__(self, jaxpr: Jaxpr, works: Mapping[int, Work]) -> None:
        self._works = {key: found for key, work in works.items() if (found := _numbers(work))}
        known = [self._works[id(eqn)] for eqn in jaxpr.eqns if id(eqn) in self._works]
        self._flops, self._bytes = (sum(each[i] for each in known) for i in (0, 1))

    def __bool__(self) -> bool:
        """Return True if any cost is known."""
        return bool(self._works)

    def of(self, eqn: JaxprEqn) -> Heat | None:
        """Return the cost of an equation; None if zero or unknown."""
        flops, size = self._works.get(id(eqn), (0, 0))
        if not (flops or size):
            return None
        parts = flops / (self._flops or 1), size / (self._bytes or 1)
        return Heat(flops, size, *(100 * part for part in parts))


def sum_of(heats: Iterable[Heat | None]) -> Heat | None:
    """Return the sum of costs; None if zero or unknown."""
    known = [astuple(each) for each in heats if each is not None]
    return Heat(*map(sum, zip(*known, strict=True))) if known else None


def _numbers(work: Work) -> tuple[int, int] | None:
    flops, size = work.flops + work.transcendentals, work.bytes
    return (flops, size) if type(flops) is int and type(size) is int else None
