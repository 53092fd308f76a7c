"""Check a program against its expectations in pyproject.toml, without a test.

`checked` returns as problems what the assertions of `jaxprtool.testing` raise as failures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxprtool.analysis.lint import lint
from jaxprtool.api.investigate.budgets import Growth, Measure, Quantity, grown_lines, measure
from jaxprtool.errors import JaxprToolError, UserFunctionError, user_frames
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import Root, frames_now
from jaxprtool.jaxcompat import open_jaxpr
from jaxprtool.jaxcompat.source_locations import FrameReader
from jaxprtool.render.documents.problems import Place, Problem
from jaxprtool.render.reports.lint import finding_problem
from jaxprtool.testing.assertions import (
    banned_places,
    banned_text,
    donation_failure,
    require_bannable,
)
from jaxprtool.testing.messages import over_budget
from jaxprtool.testing.snapshots import difference

#: A source line in the text of a measure or a finding: `model.py:9`.
_LINE = re.compile(r"(.+\.\w+):(\d+)\b")


_UPDATE = "`jaxprtool check --update` writes the program as it is now"


@dataclass(frozen=True)
class Expectations:
    """What a program is checked for.

    Attributes:
        budgets: The maximum amount of each quantity.
        no: The primitives and dtypes that it may not have.
        donated: Whether it must donate arguments, and results must reuse their memory.
        snapshot: The file of its snapshot, or None.
        lint: Whether to report the findings of `lint`.
        select: The codes to report, or prefixes of them; all if empty.
        ignore: The codes not to report, or prefixes of them.
    """

    budgets: Mapping[Quantity, float] = field(default_factory=dict)
    no: Sequence[str] = ()
    donated: bool = False
    snapshot: Path | None = None
    lint: bool = False
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()

    @property
    def needs_program(self) -> bool:
        """True if the function must be traced, since more than its compilations is checked."""
        return self.budgets.keys() != {"compiles"} or bool(
            self.no or self.donated or self.snapshot or self.lint
        )


@dataclass(frozen=True)
class Checked:
    """The measures of a program, and the problems found."""

    measured: Mapping[Quantity, float]
    problems: Sequence[Problem]


def checked(
    name: str,
    program: Program | None,
    expected: Expectations,
    arguments: Sequence[object] = (),
    call: Callable[[], object] | None = None,
    width: int = 80,
) -> Checked:
    """Measure a program, and return what is not as expected.

    Args:
        name: The name of the program in messages.
        program: The program; None if only compilations are counted.
        expected: What is expected.
        arguments: The flat arguments, for "collectives_bytes".
        call: Calls the function, for "compiles".
        width: The width of differences, in characters.
    """
    measured: dict[Quantity, float] = {}
    problems: list[Problem] = []
    for quantity, limit in expected.budgets.items():
        try:
            found = measure(program, [quantity], arguments=arguments, call=call)[quantity]
        except JaxprToolError as error:  # the other budgets can still be checked
            problems.append(error_problem(name, error, _key(quantity)))
            continue
        measured[quantity] = found.amount
        if found.amount > limit:
            problems.append(_over_budget(name, program, found, limit, expected.snapshot))
    if program is not None:
        problems += _contents(name, program, expected, width)
    return Checked(measured, problems)


def error_problem(name: str, error: JaxprToolError, code: str = "error") -> Problem:
    """Return an error as a problem, at the innermost of the user's lines in its traceback."""
    where: tuple[str, int] | None = None
    text = ""
    if isinstance(error, UserFunctionError):
        frames = frames_now([Root(*root) for root in error.roots])
        own = [each for each in user_frames(error) if frames.is_own(each.filename)]
        if own and (number := own[-1].lineno) is not None:
            where = os.path.abspath(own[-1].filename), number
            text = f"{frames.path(own[-1].filename)}:{number}"
    details = [f"{label}: {detail}" for label, detail in error.details]
    details += [f"hint: {error.hint}"] if error.hint else []
    message = f"{name}: {text}: {error.message}" if text else f"{name}: {error.message}"
    return Problem(code, text, message, details, where and Place(*where))


def _over_budget(
    name: str, program: Program | None, found: Measure, limit: float, snapshot: Path | None
) -> Problem:
    since, grown = _grown(program, found.quantity, snapshot)
    lines = over_budget(name, found, limit, since, grown).splitlines()
    places = [*(each.where for each in grown), *(each.where for each in found.parts)]
    line, place = next(_places(places, program), ("", None))
    return Problem(_key(found.quantity), line, lines[0], lines[1:], place)


def _grown(
    program: Program | None, quantity: Quantity, snapshot: Path | None
) -> tuple[str, Sequence[Growth]]:
    """Return a name for the snapshot and the lines that grew since; "" if they are unknown."""
    if program is None or snapshot is None or quantity == "compiles" or not snapshot.exists():
        return "", ()
    try:
        return f"the snapshot {_shown(snapshot)}", grown_lines(read(snapshot), program, quantity)
    except JaxprToolError:  # `_contents` reports a snapshot that cannot be read
        return "", ()


def _contents(name: str, program: Program, expected: Expectations, width: int) -> Iterator[Problem]:
    """Yield the problems in the equations of a program."""
    for banned in expected.no:
        wanted = require_bannable(banned)
        if places := banned_places(program, wanted):
            yield _problem("no", banned_text(name, wanted, places), list(places), program)
    if expected.donated and (failure := donation_failure(program, name)):
        yield _problem("donated", failure, (), program)
    if expected.snapshot is not None:
        shown = _shown(expected.snapshot)
        if failure := difference(program, expected.snapshot, name, shown, width):
            text = f"{failure}\nhint: {_UPDATE}"
            yield _problem("snapshot", text, failure.split("\n"), program)
    if expected.lint:
        for each in lint(program, expected.select, expected.ignore):
            found = finding_problem(each)
            yield found._replace(message=f"{name}: {found.message}")


def _problem(code: str, text: str, places: Sequence[str], program: Program) -> Problem:
    line, place = next(_places(places, program), ("", None))
    first, *others = text.splitlines()
    return Problem(code, line, first, others, place)


def _places(texts: Sequence[str], program: Program | None) -> Iterator[tuple[str, Place]]:
    """Yield the lines that texts begin with, if they are in the user's files.

    Lines of files that have changed since the program was written are others now.
    """
    bases = [os.getcwd(), *(root.base for root in (() if program is None else program.roots))]
    changed = set() if program is None else _changed_files(program)
    for text in texts:
        found = _LINE.match(text.strip())
        if found is None or found[1] in changed:
            continue
        for base in bases:
            file = os.path.join(base, found[1])
            if os.path.isfile(file):
                yield found[0], Place(os.path.abspath(file), int(found[2]))
                break


def _key(quantity: Quantity) -> str:
    """Return a quantity as a key of pyproject.toml."""
    return quantity.replace("_", "-")


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _changed_files(program: Program) -> set[str]:
    """Return the paths of the source files that have changed since a program was written."""
    reader = FrameReader()
    eqns = equations(open_jaxpr(program.jaxpr))
    files = {frame.file for eqn in eqns for frame in reader.frames(eqn)}
    return {source_text.path(file) for file in files if source_text.reason(file)}
