"""The named pipelines: `-O0` to `-O3`, in one table that plug-ins may add to.

| level | passes |
| --- | --- |
| O0 | none: the program as it was traced |
| O1 | inline, forward, fold, simplify, cse, dce, until none of them changes anything |
| O2 | those of O1 and hoist, likewise; then schedule |
| O3 | those of O2, and then outline: what repeats is compiled once |

All are exact: they change no value but for the rounding of what XLA compiles as a whole. None of
O1's passes ever leaves more equations than it found.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Passes are repeated at most as often.
MOST_ROUNDS = 10


@dataclass(frozen=True)
class Level:
    """Passes that are repeated until none changes anything, and those that run once after them."""

    repeated: str = ""
    last: str = ""

    def __str__(self) -> str:
        repeated = f"{self.repeated}, until nothing changes" if self.repeated else "none"
        return f"{repeated}; then {self.last}" if self.last else repeated


_EXACT = "inline, forward, fold, simplify, cse, dce"

levels: dict[str, Level] = {
    "O0": Level(),
    "O1": Level(_EXACT),
    "O2": Level(f"{_EXACT}, hoist", last="schedule"),
    "O3": Level(f"{_EXACT}, hoist", last="schedule, outline"),
}
