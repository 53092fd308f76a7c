"""The findings of `lint`: a code, the user's line, the cost, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from jaxprtool.analysis.lint.graph import Node
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Whether a finding makes results wrong (or NaN), or wastes memory or time.
Kind: TypeAlias = Literal["wrong", "waste"]


@dataclass(frozen=True)
class FindingCost:
    """The cost of a finding.

    Attributes:
        bytes: The bytes that are stored, moved or sent for nothing.
        flops: The operations that are done for nothing, or in too wide a type.
        text: The cost in words.
    """

    bytes: int
    flops: int
    text: str

    @property
    def weight(self) -> int:
        """A number to compare costs by: a byte takes as long as a hundred operations."""
        return self.flops + 100 * self.bytes


@document(without=("frames",))
@dataclass(frozen=True)
class Finding:
    """A finding of a rule.

    Attributes:
        code: The code of the rule: `JT101`.
        line: The user's line, `model.py:9`; "" if unknown.
        message: What is wrong there.
        cost: What it costs.
        advice: How to fix it.
        kind: "wrong" if results may be wrong, or "waste".
        programs: The names of the programs that it is in.
        frames: The frames of the line, the innermost first.
    """

    code: str
    line: str
    message: str
    cost: FindingCost
    advice: str
    kind: Kind
    programs: tuple[str, ...]
    frames: tuple[UserFrame, ...] = field(repr=False)


@document(without=("silenced",))
@dataclass(frozen=True)
class Findings(Printed):
    """The findings of all rules in a program, or in several.

    Attributes:
        name: The name of the program, or of the recorded run.
        findings: The findings: first those that make results wrong, then the most expensive.
        programs: The number of programs that were checked.
        silenced: The number of findings that comments in the source silence.
    """

    name: str
    findings: tuple[Finding, ...]
    programs: int
    silenced: int = 0

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)


class Found(NamedTuple):
    """What the check of a rule yields.

    Attributes:
        where: The place: an equation, its path (the equations around it, and its own), or a line.
            None if it is the function.
        message: What is wrong, without a full stop.
        advice: How to fix it.
        cost: What follows the word "costs": a phrase in which `{bytes}` and `{flops}` stand for
            the sums over all findings of the rule on the same line.
        bytes: The bytes that it costs.
        flops: The operations that it costs.
        argument: The argument at fault, if the place is the function.
    """

    where: Node | tuple[JaxprEqn, ...] | UserFrame | None
    message: str
    advice: str
    cost: str
    bytes: int = 0
    flops: int = 0
    argument: str = ""

    @property
    def path(self) -> tuple[JaxprEqn, ...]:
        """The path of the equation; () if it is about a line or the function."""
        if isinstance(self.where, UserFrame):
            return ()
        return self.where.path if isinstance(self.where, Node) else self.where or ()
