"""The pass `intervals`, and the bounds of a program's results."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxprtool import Pass, Program
from jaxprtool_intervals.domain import Interval, rewritten


@dataclass(frozen=True)
class Intervals(Pass):
    """Remove each `max` and `min` whose outcome is known from bounds of its operands.

    The bounds of a value hold for all its elements. They are computed from literals, constants and
    the bounds of arguments, and hold in every iteration of a loop and for every branch.

    Args:
        arguments: The bounds of arguments, by name: `{'x': (0, 1)}`. Such an argument holds no NaN.

    Raises:
        ArgumentsError: If the program has no such argument.

    Example:
        def f(x):
            return jnp.maximum(jnp.tanh(x), -2.0)

        $ jaxprtool opt f.py:f --args "f32[3]" -p intervals
        { lambda ; a:f32[3]. let b:f32[3] = tanh a in (b,) }
    """

    name: ClassVar[str] = "intervals"

    arguments: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, program: Program) -> Program:
        return program.replace(jaxpr=rewritten(program, self.arguments).jaxpr)


def bounds(
    program: Program, arguments: dict[str, tuple[float, float]] | None = None
) -> dict[str, Interval]:
    """Return the bounds of the results of a program.

    Args:
        program: The program.
        arguments: The bounds of arguments, by name: `{'x': (0, 1)}`. Such an argument holds no NaN.

    Returns:
        The interval of each result, by its name.

    Raises:
        ArgumentsError: If the program has no such argument.
    """
    return dict(zip(program.out_names, rewritten(program, arguments or {}).kinds, strict=True))
