"""Results of variants of a program compared with a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxprtool.execute.compare.bisection import Divergence
from jaxprtool.execute.compare.variants import Compared
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed


class SmallestArgument(NamedTuple):
    """An argument of the smallest failing input.

    Attributes:
        name: The name of the argument.
        value: Its value in words: `zero except [2] = 1.0`.
    """

    name: str
    value: str


@document(without=("arguments",), also=("within",))
@dataclass(frozen=True)
class Comparison(Printed):
    """The results of variants of a program on the same inputs.

    Attributes:
        name: The name of the program.
        reference: The name of the variant that the others are compared with.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        variants: The other variants, with the differences of their results.
        error: Why the reference has no results to compare with, or "".
        partings: The first diverging equation of each variant outside of the tolerance, if
            requested.
        arguments: The flat arguments of the compared runs.
        smallest: If trials failed, the arguments of the smallest failing input.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Divergence, ...] = ()
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    smallest: tuple[SmallestArgument, ...] = ()

    @property
    def unproven(self) -> list[str]:
        """A message for each result with mostly non-finite elements, which prove nothing."""
        results = {each.name: each for variant in self.variants for each in variant.unproven}
        return [
            f"{name} is not finite in {max(each.nonfinite):,} of {each.size:,} elements"
            for name, each in results.items()
        ]

    @property
    def within(self) -> bool:
        """Whether all variants ran, and all results are within tolerance."""
        return not self.error and all(each.within for each in self.variants)
