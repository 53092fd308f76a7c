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
        help="Remove redundant and dead computations. The number of equations never grows, and "
        "results differ at most by the rounding of XLA's compilation.",
    ),
    "O2": Level(
        f"{_EXACT}, hoist",
        last="schedule",
        help="Run `-O1`, move loop-invariant computations out of loops, and order equations to "
        "use less memory.",
    ),
    "O3": Level(
        f"{_EXACT}, hoist",
        last="schedule, outline",
        help="Run `-O2`, then let XLA compile repeated bodies once, such as the layers of a "
        "model, which shortens the compilation of deep models.",
    ),
}
