"""Origins followed through a compiled body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxprtool.execute.nans.compiled import FOLLOWED, Mask, Masked
from jaxprtool.execute.nans.states import INF, NAN, has_state
from jaxprtool.execute.nans.tracked import Origin, Tracked, origins_of, union
from jaxprtool.jaxcompat import JaxprEqn


class OriginTable:
    """Origins by their mask index; false if there are none.

    Args:
        made: The origins of equations of the body, by `id` and state.
        values: The arguments of the body.
    """

    def __init__(self, made: Mapping[tuple[int, int], Origin], values: Iterable[Tracked]):
        origins = union([*origins_of(values), *made.values()])
        self._indices = {origin: min(i, FOLLOWED - 1) for i, origin in enumerate(origins)}
        self._made = made

    def __bool__(self) -> bool:
        return bool(self._indices)

    def indices(self, eqns: Sequence[JaxprEqn]) -> np.ndarray:
        """Return for each equation the mask indices of its NaN and its infinity, or -1."""
        rows = [[self._made_at(id(eqn), state) for state in (NAN, INF)] for eqn in eqns]
        return np.array(rows, np.int32).reshape(-1, 2)

    def _made_at(self, eqn: int, state: int) -> int:
        origin = self._made.get((eqn, state))
        return -1 if origin is None else self._indices[origin]

    def traced(self, values: Iterable[Tracked]) -> list[Masked]:
        """Return values as arguments of a compiled body, with masks if any origin is followed."""
        return [Masked(value.data, self._mask(value)) for value in values]

    def _mask(self, value: Tracked) -> Mask:
        if not self or not has_state(value.data):
            return None
        mask = np.zeros(FOLLOWED, bool)
        mask[[self._indices[origin] for origin in value.origins]] = True
        return mask

    def origins(self, value: Masked) -> tuple[Origin, ...]:
        """Return the origins of a result of a compiled body."""
        if value.mask is None:
            return ()
        mask = np.asarray(value.mask)
        return tuple(origin for origin, index in self._indices.items() if mask[index])
