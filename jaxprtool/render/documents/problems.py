"""What `check` and `lint` find, as plain data for every format of output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from jaxprtool.ir.basics.documents import document

#: How bad a problem is, in the words of SARIF and of GitHub.
Level: TypeAlias = Literal["error", "warning"]


class Place(NamedTuple):
    """A line of a file, by its absolute path."""

    file: str
    line: int


@document(without=("level", "place"))
class Problem(NamedTuple):
    """Something that was found, for a format of output."""

    code: Annotated[
        str,
        "The budget or check: `flops`, `no`, `donated`, `snapshot`, a code of `lint`, or `error`.",
    ]
    line: Annotated[str, "The user's line, `model.py:9`; empty if unknown."]
    message: Annotated[str, "What is wrong, in one line."]
    details: Annotated[Sequence[str], "More lines: the parts of an amount, differences, hints."]
    place: Place | None = None
    level: Level = "error"

    @property
    def text(self) -> str:
        """The message and the details, as lines."""
        return "\n".join([self.message, *self.details])


class CheckedTarget(NamedTuple):
    """A target of `[tool.jaxprtool.targets]`, checked."""

    name: Annotated[str, "The name of the target in pyproject.toml."]
    target: Annotated[str, "The function or program: `train.py:step`."]
    budget: Annotated[Mapping[Any, float], "Each budget: `flops`, `peak_bytes`, …"]
    measured: Annotated[
        Mapping[Any, float], "What is measured of each; without those that cannot be measured."
    ]
    passed: Annotated[bool, "Whether no problem was found."]
    problems: Annotated[Sequence[Problem], "What was found."]


class Change(NamedTuple):
    """What `check --update` has written."""

    name: Annotated[str, "The name of the target."]
    key: Annotated[str, "The budget, or `snapshot`."]
    before: Annotated[str, "The value before; empty for a snapshot."]
    after: Annotated[str, "The value now, or the file of a snapshot."]


@document(optional=("updated",))
class CheckDocument(NamedTuple):
    """`check`."""

    targets: Annotated[Sequence[CheckedTarget], "The targets, the worst first."]
    updated: Annotated[Sequence[Change] | None, "With `--update`: what was written."] = None
