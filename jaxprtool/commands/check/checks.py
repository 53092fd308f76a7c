"""Check a program against its expectations in pyproject.toml, and show the results.

`checked` returns as problems what the assertions of `jaxprtool.testing` raise as failures.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxprtool.commands.lint.lint import lint
from jaxprtool.commands.lint.table import finding_problem
from jaxprtool.errors import JaxprToolError, UserFunctionError, user_traceback
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import plural
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import Root, frames_now
from jaxprtool.ir.notation import Comment, Heading, PrimitiveName
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import open_jaxpr
from jaxprtool.jaxcompat.source_locations import FrameReader
from jaxprtool.render.documents import Change, CheckedTarget, Problem
from jaxprtool.render.terminal.lines import (
    Cell,
    Listing,
    grid,
    joined_lines,
    printable,
    wrapped_cell,
)
from jaxprtool.testing.assertions import (
    Growth,
    Quantity,
    QuantityAmount,
    amount_text,
    banned_places,
    banned_text,
    donation_failure,
    exceeds,
    grown_lines,
    has_growth,
    measure,
    over_budget,
    quantity_of,
    require_bannable,
    snapshot_difference,
)

# --- checks ---------------------------------------------------------------------------------------
# Check a program against its expectations in pyproject.toml, without a test.

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
        arguments: The flat arguments, for "collectives_bytes" and "compile_seconds".
        call: Calls the function, for "compiles".
        width: The width of differences, in characters.
    """
    measured: dict[Quantity, float] = {}
    problems: list[Problem] = []
    for quantity, limit in expected.budgets.items():
        try:
            result = measure(program, [quantity], arguments=arguments, call=call)[quantity]
        except JaxprToolError as error:  # the other budgets can still be checked
            problems.append(error_problem(name, error, _key(quantity)))
            continue
        measured[quantity] = result.amount
        if exceeds(result, limit):
            problems.append(_over_budget(name, program, result, limit, expected.snapshot))
    if program is not None:
        problems += _contents(name, program, expected, width)
    return Checked(measured, problems)


def error_problem(name: str, error: JaxprToolError, code: str = "error") -> Problem:
    """Return an error as a problem, at the innermost of the user's lines in its traceback."""
    place = UNKNOWN
    if isinstance(error, UserFunctionError):
        frames = frames_now([Root(*root) for root in error.roots])
        own_frames = [frame for frame in user_traceback(error) if frames.is_own(frame.filename)]
        if own_frames and (number := own_frames[-1].lineno) is not None:
            file = os.path.abspath(own_frames[-1].filename)
            place = frames.at(file, number, own_frames[-1].name)
    details = [f"{label}: {detail}" for label, detail in error.details]
    details += [f"hint: {error.hint}"] if error.hint else []
    message = ": ".join(filter(None, (name, place, error.message)))
    return Problem(code, place, message, details, place)


def _over_budget(
    name: str,
    program: Program | None,
    measured: QuantityAmount,
    limit: float,
    snapshot: Path | None,
) -> Problem:
    since, grown = _grown(program, measured.quantity, snapshot)
    lines = over_budget(name, measured, limit, since, grown).splitlines()
    places = [*(part.where for part in grown), *(part.where for part in measured.parts)]
    place = next(_places(places, program), UNKNOWN)
    return Problem(_key(measured.quantity), place, lines[0], lines[1:], place)


def _grown(
    program: Program | None, quantity: Quantity, snapshot: Path | None
) -> tuple[str, Sequence[Growth]]:
    """Return a name for the snapshot and the lines that grew since; "" if they are unknown."""
    if program is None or snapshot is None or not has_growth(quantity) or not snapshot.exists():
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
        if failure := snapshot_difference(program, expected.snapshot, name, shown, width):
            text = f"{failure}\nhint: {_UPDATE}"
            yield _problem("snapshot", text, failure.split("\n"), program)
    if expected.lint:
        for finding in lint(program, expected.select, expected.ignore):
            problem = finding_problem(finding)
            yield problem._replace(message=f"{name}: {problem.message}")


def _problem(code: str, text: str, places: Sequence[str], program: Program) -> Problem:
    place = next(_places(places, program), UNKNOWN)
    first, *others = text.splitlines()
    return Problem(code, place, first, others, place)


def _places(texts: Sequence[str], program: Program | None) -> Iterator[Place]:
    """Yield the lines that texts begin with, if they are in the user's files.

    Lines of files that have changed since the program was written are others now.
    """
    bases = [os.getcwd(), *(root.base for root in (() if program is None else program.roots))]
    changed = set() if program is None else _changed_files(program)
    for text in texts:
        match = _LINE.match(text.strip())
        if match is None or match[1] in changed:
            continue
        for base in bases:
            file = os.path.join(base, match[1])
            if os.path.isfile(file):
                yield Place(os.path.abspath(file), int(match[2]), display=match[1])
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
    return {source_text.path(file) for file in files if source_text.has_changed(file)}


# --- report ---------------------------------------------------------------------------------------
# The results of `check` as text: a table of budgets, the problems, and a summary.

#: The extra indent of continuation lines.
_HANGING = "    "

_HEADINGS = "name", "quantity", "budget", "measured", "used"


def check_text(
    targets: Sequence[CheckedTarget], updated: Sequence[Change] | None, width: int
) -> Listing:
    """Return checked targets as text, the worst first.

    Args:
        targets: The targets.
        updated: The values that `--update` has written; None without it.
        width: The width in columns.
    """
    blocks = [_table(targets, width), *(_problems(target, width) for target in targets)]
    blocks.append([joined_lines(_changes(updated or ()))])
    shown = [tokens for block in blocks for tokens in block if tokens]
    summary = [Comment(summary_text(targets, updated))]
    spaced = [token for tokens in shown for token in (*tokens, "\n\n")]
    return Listing(printable([*spaced, *summary]))


def summary_text(targets: Sequence[CheckedTarget], updated: Sequence[Change] | None) -> str:
    """Return how many targets passed, in one line."""
    failed = sum(not target.passed for target in targets)
    count = plural(len(targets), "target")
    text = f"{failed} of {count} failed" if failed else f"{count} passed"
    return text if updated is None else f"{text}; {plural(len(updated), 'value')} updated"


def worst_first(targets: Sequence[CheckedTarget]) -> list[CheckedTarget]:
    """Sort targets: failed ones first, and then by the largest share of a budget that they use."""
    return sorted(
        targets, key=lambda target: (target.passed, -max([0.0, *_shares(target).values()]))
    )


def _shares(target: CheckedTarget) -> dict[str, float]:
    """Return the share of each budget that is used, the largest first."""
    shares: dict[str, float] = {}
    for quantity, amount in target.measured.items():
        if budget := target.budget[quantity]:
            shares[quantity] = amount / budget
        else:
            shares[quantity] = math.inf if amount else 0.0
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _table(targets: Sequence[CheckedTarget], width: int) -> list[list[str]]:
    rows: list[list[Cell]] = []
    for target in targets:
        for quantity, share in _shares(target).items():
            rows.append(_row(target, quantity, share))
    return [grid(_HEADINGS, rows, width)] if rows else []


def _row(target: CheckedTarget, quantity: str, share: float) -> list[Cell]:
    budget, measured = target.budget[quantity], target.measured[quantity]
    checked_quantity = quantity_of(quantity)
    used = f"{share:.1%}" if budget else ("" if measured <= budget else "over")
    if measured > budget and used == "100.0%":  # the difference is in digits that are not shown
        used = f"+{measured - budget:,.0f}"
    is_over = PrimitiveName if measured > budget else str
    return [
        [target.name],
        [quantity.replace("_", "-")],
        [amount_text(checked_quantity, budget)],
        [amount_text(checked_quantity, measured)],
        [is_over(used)],
    ]


def _problems(target: CheckedTarget, width: int) -> list[list[str]]:
    """Return the problems of a target, each as a block of lines."""
    blocks = []
    for problem in target.problems:
        lines: list[Cell] = [*_wrapped(Heading(problem.message), width)]
        for detail in problem.details:
            is_hint = detail.lstrip().startswith("hint: ")
            lines += _wrapped(Comment(detail) if is_hint else detail, width)
        blocks.append(joined_lines(lines))
    return blocks


def _wrapped(text: str, width: int) -> Iterator[Cell]:
    """Wrap a line at the width, and indent its continuation lines."""
    if len(text) <= width:
        yield [text]
        return
    bare = type(text)(text.lstrip())
    indent = " " * (len(text) - len(bare))
    first, *others = wrapped_cell([bare], max(width - len(indent) - len(_HANGING), 20))
    yield [indent, *first]
    yield from ([indent, _HANGING, *line] for line in others)


def _changes(updated: Sequence[Change]) -> Iterator[Cell]:
    for change in updated:
        if change.before:
            yield [f"{change.name}: {change.key} = {change.before} → {change.after}"]
        else:
            yield [f"{change.name}: wrote {change.after}"]
