"""The problems that `check` and `lint` find, as plain data for every format of output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from jaxprtool.ir.documents import document

#: The severity of a problem, in the terms of SARIF and GitHub.
Level: TypeAlias = Literal["error", "warning"]


class Place(NamedTuple):
    """A line of a file, by its absolute path."""

    file: str
    line: int


@document(without=("level", "place"))
class Problem(NamedTuple):
    """A problem that was found."""

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
        Mapping[Any, float], "The measured amount of each, except those that cannot be measured."
    ]
    passed: Annotated[bool, "Whether no problem was found."]
    problems: Annotated[Sequence[Problem], "The problems that were found."]


class Change(NamedTuple):
    """A change that `check --update` has written."""

    name: Annotated[str, "The name of the target."]
    key: Annotated[str, "The budget, or `snapshot`."]
    before: Annotated[str, "The value before; empty for a snapshot."]
    after: Annotated[str, "The value now, or the file of a snapshot."]


@document(optional=("updated",))
class CheckDocument(NamedTuple):
    """`check`."""

    targets: Annotated[Sequence[CheckedTarget], "The targets, the worst first."]
    updated: Annotated[Sequence[Change] | None, "With `--update`: the written changes."] = None
