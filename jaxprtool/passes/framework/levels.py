"""The named pipelines: `-O0` to `-O3`, in one table that plug-ins may extend.

All are exact: values change only by the rounding of code that XLA compiles as a whole. None of O1's
passes ever returns more equations than it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The maximum number of repetitions.
MAX_ITERATIONS = 10


@dataclass(frozen=True)
class Level:
    """Passes to repeat until none changes anything, and passes to run once after them.

    `help` describes their purpose.
    """

    repeated: str = ""
    last: str = ""
    help: str = ""

    def __str__(self) -> str:
        repeated = f"{self.repeated}, until nothing changes" if self.repeated else "none"
        return f"{repeated}; then {self.last}" if self.last else repeated


_EXACT = "inline, forward, fold, simplify, cse, dce"

levels: dict[str, Level] = {
    "O0": Level(help="Leave the program as it was traced."),
    "O1": Level(
        _EXACT,
        help="Remove duplicate and unused computations. There are never more "
        "equations than before, and results change at most by the rounding of what XLA "
        "compiles as a whole.",
    ),
    "O2": Level(
        f"{_EXACT}, hoist",
        last="schedule",
        help="Clean up as `-O1` does, move loop-invariant equations out of loops, and put "
        "equations in an order that needs less memory.",
    ),
    "O3": Level(
        f"{_EXACT}, hoist",
        last="schedule, outline",
        help="Do what `-O2` does, and then compile repeated parts only once, such as the layers "
        "of a model, so that deep models compile faster.",
    ),
}
