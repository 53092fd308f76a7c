"""The base interpreter of `nans`, `watch` and `verify`, which runs a program by equation.

It tracks the enclosing equations and the iterations of loops, and records external calls in order.
Subclasses observe the values, and compile loops where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool.execute.stepping.effects import Effects, Event
from jaxprtool.execute.stepping.iterations import can_be_compiled
from jaxprtool.execute.stepping.shards import can_be_checked
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, ShardMap, View, While, view
from jaxprtool.ir.evaluation.interpret import Interpreter, slice_number
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn


@dataclass(eq=False)
class Frame:
    """An equation whose bodies are running.

    Attributes:
        eqn: The equation.
        held: Its view.
        length: The number of iterations of a loop, if known.
        entered: The number of bodies entered.
    """

    eqn: JaxprEqn
    held: View
    length: int | None = None
    entered: int = 0

    @property
    def iteration(self) -> int | None:
        """The number of the iteration of a loop; for a scan, the index of the slice it reads."""
        if isinstance(self.held, Scan):
            return slice_number(self.held, self.entered - 1)  # type: ignore[no-any-return]
        return (self.entered - 1) // 2 if isinstance(self.held, While) else None

    def skip_to(self, number: int) -> None:
        """Make the iteration `number` the next one."""
        self.entered = number if isinstance(self.held, Scan) else 2 * number + 1


class SteppingInterpreter(Interpreter):
    """Steps through a program.

    Attributes:
        effects: The recorded external calls.
        frames: The running equations, outermost first.
    """

    def __init__(self, earlier: Sequence[Event] = ()):
        self.effects = Effects(earlier)
        self.frames: list[Frame] = []

    @property
    def around(self) -> tuple[JaxprEqn, ...]:
        """The equations whose bodies are running, outermost first."""
        return tuple(frame.eqn for frame in self.frames)

    @property
    def iterations(self) -> tuple[int, ...]:
        """The current iteration of each running loop."""
        return tuple(n for frame in self.frames if (n := frame.iteration) is not None)

    # --- hooks ------------------------------------------------------------------------------------

    def frame(self, held: View, operands: list[Any]) -> Frame:
        """Return the frame of an equation whose bodies are about to run."""
        return Frame(held.eqn, held, held.length if isinstance(held, Scan) else None)

    def is_compiled(self, loop: Scan | While) -> bool:
        """Return True if the iterations of a compilable loop are to be compiled."""
        return False

    def compiled_loop(self, loop: Scan | While, operands: list[Any]) -> list[Any]:
        """Return the results of a loop with compiled iterations."""
        raise NotImplementedError

    def shards(self, held: ShardMap, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a `shard_map` whose shards can be inspected."""
        return self.evaluate(held.eqn, operands)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        return self.effects.results(eqn, operands)

    def enter(self, body: ClosedJaxpr, operands: list[Any], predicate: Any = None) -> list[Any]:
        self.frames[-1].entered += 1
        return self.run(body, operands)

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        held = view(eqn)
        if isinstance(held, ShardMap) and can_be_checked(held):
            return self.shards(held, operands)
        if not isinstance(held, Scan | While | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        self.frames.append(self.frame(held, operands))
        if isinstance(held, Scan | While) and can_be_compiled(held) and self.is_compiled(held):
            results: Sequence[Any] = self.compiled_loop(held, operands)
        else:
            results = super().equation(eqn, operands)
        self.frames.pop()
        return results
