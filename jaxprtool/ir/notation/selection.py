"""Select the part of a program that is shown: its depth, and its equations.

`depth` folds the bodies that are nested deeper. `only` keeps the equations whose primitive matches
a pattern, and the equations around them. `among` keeps some equations, such as those of a slice.
Everything left out is counted, including the equations inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from jaxprtool.ir.core.equations import Contains, bodies, holders
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn


class Selection:
    """The equations of a program to show, and to which depth.

    Args:
        depth: The depth to show bodies to; None for all. A program's own equations are at depth 0.
        only: Patterns of primitives to show, as for `fnmatch`; None for all primitives.
        among: The equations to show, by `id`; None for all.
        others: Describes the equations left out: "that x does not touch".
    """

    def __init__(
        self,
        depth: int | None = None,
        only: Sequence[str] | None = None,
        among: frozenset[int] | None = None,
        others: str = "",
    ):
        self.depth = depth
        self.only = None if only is None else tuple(only)
        self.among = among
        self._others = f" {others}" if others else ""
        self._counts: dict[Jaxpr, int] = {}
        self._fits: dict[str, bool] = {}
        self._contains = Contains(self.fits)

    @property
    def everything(self) -> bool:
        """True if nothing is left out."""
        return self.depth is None and self.has_all

    @property
    def has_all(self) -> bool:
        """True if no equation is left out at the depths that are shown."""
        return self.only is None and self.among is None

    def folds(self, depth: int) -> bool:
        """Return True if a body whose equations are at `depth` is shown only as a count."""
        return self.depth is not None and depth > self.depth

    def count(self, jaxpr: Jaxpr) -> int:
        """Return the number of equations of `jaxpr`, including those of its bodies at each call."""
        found = self._counts.get(jaxpr)
        if found is None:
            inside = (body for _, held in holders(jaxpr) for _, body in held)
            found = self._counts[jaxpr] = len(jaxpr.eqns) + sum(map(self.count, inside))
        return found

    def count_equation(self, eqn: JaxprEqn) -> int:
        """Return the number of equations in an equation's bodies, plus one for itself."""
        return 1 + sum(self.count(body) for _, body in bodies(eqn))

    def shows(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation, or one inside it, is selected."""
        return self.fits(eqn) or self._contains.inside(eqn)

    def fits(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation itself is selected."""
        if self.among is not None and id(eqn) not in self.among:
            return False
        if self.only is None:
            return True
        name = eqn.primitive.name
        if name not in self._fits:
            self._fits[name] = any(fnmatchcase(name, pattern) for pattern in self.only)
        return self._fits[name]

    def left_out(self, count: int) -> str:
        """Return `… 12 equations` for equations that are not selected."""
        return f"{equations(count)}{self._others}"

    def rows(self, jaxpr: Jaxpr) -> Iterator[tuple[int, JaxprEqn] | int]:
        """Yield the equations to show with their indices, and how many are left out between."""
        skipped = 0
        for index, eqn in enumerate(jaxpr.eqns):
            if not self.shows(eqn):
                skipped += self.count_equation(eqn)
                continue
            if skipped:
                yield skipped
                skipped = 0
            yield index, eqn
        if skipped:
            yield skipped


def equations(count: int) -> str:
    """Return `… 12 equations`, for those left out."""
    return f"… {count:,} equation{'' if count == 1 else 's'}"
