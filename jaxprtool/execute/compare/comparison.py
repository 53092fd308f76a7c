"""Results of variants of a program compared with a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxprtool.execute.compare.bisection import Parting
from jaxprtool.execute.compare.variants import Compared
from jaxprtool.ir.basics.documents import document


class SmallestArgument(NamedTuple):
    """An argument of the smallest input for which a variant fails.

    Attributes:
        name: The argument.
        value: What it is, in words: `zero but for [2] = 1.0`.
    """

    name: str
    value: str


@document(without=("arguments",), also=("within",))
@dataclass(frozen=True)
class Comparison:
    """What variants of a program gave on the same inputs.

    Attributes:
        name: The program.
        reference: The variant that the others are compared with.
        inputs: What the inputs are, in words.
        random: The names of the arguments that are random.
        variants: The others, each with how its results differ.
        error: Why the reference has no results, and so nothing could be compared, or "".
        partings: Where those that are not within tolerance part from the reference, if asked for.
        arguments: The flat arguments that the results are for.
        smallest: Of trials that have failed, the arguments that were made smaller, in words.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Parting, ...] = ()
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    smallest: tuple[SmallestArgument, ...] = ()

    @property
    def unproven(self) -> list[str]:
        """What to say of each result that is not finite in most elements: it proves nothing."""
        results = {each.name: each for variant in self.variants for each in variant.unproven}
        return [
            f"{name} is not finite in {max(each.nonfinite):,} of {each.size:,} elements"
            for name, each in results.items()
        ]

    @property
    def within(self) -> bool:
        """Whether all ran, and all results are within tolerance."""
        return not self.error and all(each.within for each in self.variants)
