"""The machine under `nans`, `watch` and `verify`: it steps through a program equation by equation.

It knows the equations around what runs and the iterations of loops, and has calls that leave the
program noted in order. A subclass observes the values, and compiles the loops that it can.
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
        length: How many iterations a loop has, if that is known.
        entered: How many bodies were entered.
    """

    eqn: JaxprEqn
    held: View
    length: int | None = None
    entered: int = 0

    @property
    def iteration(self) -> int | None:
        """The number of the iteration of a loop; of a scan that of the slice it reads."""
        if isinstance(self.held, Scan):
            return slice_number(self.held, self.entered - 1)  # type: ignore[no-any-return]
        return (self.entered - 1) // 2 if isinstance(self.held, While) else None

    def skip_to(self, number: int) -> None:
        """Have the body of an iteration entered next."""
        self.entered = number if isinstance(self.held, Scan) else 2 * number + 1


class SteppingInterpreter(Interpreter):
    """Steps through a program.

    Attributes:
        effects: The calls that have left the program.
        frames: What is running, the outermost first.
    """

    def __init__(self, earlier: Sequence[Event] = ()):
        self.effects = Effects(earlier)
        self.frames: list[Frame] = []

    @property
    def around(self) -> tuple[JaxprEqn, ...]:
        """The equations whose bodies are running, the outermost first."""
        return tuple(frame.eqn for frame in self.frames)

    @property
    def iterations(self) -> tuple[int, ...]:
        """The number of the iteration of each loop that is running."""
        return tuple(n for frame in self.frames if (n := frame.iteration) is not None)

    # --- hooks ------------------------------------------------------------------------------------

    def frame(self, held: View, operands: list[Any]) -> Frame:
        """Return the frame of an equation whose bodies are about to run."""
        return Frame(held.eqn, held, held.length if isinstance(held, Scan) else None)

    def is_compiled(self, loop: Scan | While) -> bool:
        """Return True if iterations of a loop, which can be compiled, are."""
        return False

    def compiled_loop(self, loop: Scan | While, operands: list[Any]) -> list[Any]:
        """Return the results of a loop whose iterations are compiled."""
        raise NotImplementedError

    def shards(self, held: ShardMap, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a `shard_map` whose shards can be looked at."""
        return self.evaluate(held.eqn, operands)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        return self.effects.results(eqn, operands)

    def enter(self, body: ClosedJaxpr, operands: list[Any], decider: Any = None) -> list[Any]:
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
