"""Snapshots: programs in files beside tests, and how programs differ from them.

A program matches its snapshot if `diff` finds them equivalent: names, lines, and the order of
independent equations may change. A snapshot of another JAX release is compared by `releases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxprtool.analysis.diff import Diff, diff
from jaxprtool.api.investigate.budgets import Quantity, grown_lines
from jaxprtool.errors import ArgumentsError, JaxprToolError, ProgramFileError
from jaxprtool.formats.jaxpr.read import read, release_of
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.programs.program import Program
from jaxprtool.render.reports.diff import diff_text
from jaxprtool.render.terminal.top import ALL, ROWS
from jaxprtool.testing.messages import grown_text
from jaxprtool.testing.places import TestPlace
from jaxprtool.testing.programs import program_of, without_frames
from jaxprtool.testing.releases import same_results, simplified_diff

#: pytest leaves the frames of this module out of tracebacks.
__tracebackhide__ = True

_UPDATE = "pytest --jaxpr-update writes the program as it is now"

#: The width of differences, in characters.
_WIDTH = 100

#: The quantities whose growth is shown, in this order.
_GROWING: tuple[Quantity, ...] = ("flops", "peak_bytes")


@dataclass(repr=False)
class Snapshots:
    """The snapshots of a test: the fixture `jaxpr_snapshot`.

    Attributes:
        test: The test.
        update: Whether to write the programs that are new or have changed.
        taken: The files of its programs so far.
    """

    test: TestPlace
    update: bool
    taken: set[Path] = field(default_factory=set)

    @without_frames
    def __call__(self, program_or_function: object, *args: object, name: str | None = None) -> None:
        """Compare a program with its snapshot.

        Args:
            program_or_function: A `Program`, or a function.
            args: The arguments of the function, as `jaxprtool.trace` takes them.
            name: The name of the file. By default that of the test, with a number for each program
                after the first.

        Raises:
            AssertionError: If they differ, with the differences, or if there is no snapshot.
            ArgumentsError: If another program of the test has this name.
        """
        program = program_of(program_or_function, args)
        path = self._path(name)
        if self.update:
            update_snapshot(program, path)
        elif failure := difference(program, path):
            raise AssertionError(f"{failure}\n{_UPDATE}")

    def _path(self, name: str | None) -> Path:
        """Return the file of the next program of the test."""
        path = self.test.snapshot(self.test.name if name is None else name)
        number = 1
        while name is None and path in self.taken:
            number += 1
            path = self.test.snapshot(f"{self.test.name}-{number}")
        if path in self.taken:
            raise ArgumentsError(f"two programs of {self.test.name} have the name '{name}'")
        self.taken.add(path)
        return path


def difference(
    program: Program, path: Path, name: str = "", shown: str = "", width: int = _WIDTH
) -> str:
    """Return how a program differs from a snapshot, as text; "" if it does not.

    Args:
        program: The program.
        path: The file of the snapshot.
        name: The name of the program in the text; by default its own.
        shown: The name of the file in the text; by default its path from the folder of the tests.
        width: The width of the differences, in characters.
    """
    name, shown = name or program.name, shown or _shown(path)
    if not path.exists():
        return f"{name} has no snapshot {shown}"
    release = release_of(path)
    is_other = release != jax.__version__
    try:
        before = read(path)
    except ProgramFileError as error:
        wrote = f", which JAX {release} wrote," if is_other else ""
        return f"the snapshot{wrote} cannot be read: {error.message}"
    found = diff(before, program)
    differences, is_same = found, found.is_equivalent
    if is_other and not is_same:
        differences = simplified_diff(before, program)
        is_same = differences.is_equivalent or same_results(before, program)
    changes = [*_donation_changes(before, program)]
    if is_same and not changes:
        return ""
    by = f", which JAX {release} wrote; this is JAX {jax.__version__}" if is_other else ""
    lines = [f"{name} differs from the snapshot {shown}{by}", *changes]
    if not is_same:
        whole = f"jaxprtool diff {shown} TARGET {ALL}"
        text = diff_text(differences, width, ROWS, whole).plain()
        lines += ["", text, *_growth(before, program, found)]
    return "\n".join(lines)


def _donation_changes(before: Program, after: Program) -> Iterator[str]:
    """Yield a sentence for each argument that is no longer donated, or is donated now."""
    old, new = _donated(before), _donated(after)
    yield from (f"{name} is no longer donated" for name in before.arg_names if name in old - new)
    yield from (f"{name} is donated now" for name in after.arg_names if name in new - old)


def _donated(program: Program) -> set[str]:
    if program.jit is None:
        return set()
    options = program.jit.of_arguments(program.arguments)
    return {option.name for option in options if option.donated}


def _growth(before: Program, after: Program, found: Diff) -> Iterator[str]:
    """Yield the lines whose cost grew."""
    for quantity in _GROWING:
        try:
            grown = grown_lines(before, after, quantity, found)
        except JaxprToolError:  # sizes are symbolic: the differences say what changed
            continue
        if grown:
            yield ""
            yield from grown_text(quantity, "the snapshot", grown)


def update_snapshot(program: Program, path: Path) -> bool:
    """Write a program that differs from its snapshot, or whose snapshot is of another JAX release.

    Returns:
        Whether it was written.

    Raises:
        OutputError: If the file cannot be written.
    """
    if path.exists() and release_of(path) == jax.__version__ and not difference(program, path):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write(program, path, callbacks="stub")
    return True


def earlier(program: Program, test: TestPlace | None) -> tuple[Program, str] | None:
    """Return the snapshot of a program in the folder of its test, and a name for the snapshot.

    It has the name of the program, and arguments of the same types. The test's own snapshot is
    preferred.
    """
    if test is None or not test.folder.is_dir():
        return None
    own = test.snapshot(test.name)
    for path in sorted(test.folder.glob("*.jaxpr"), key=lambda each: (each != own, each)):
        try:
            found = read(path)
        except ProgramFileError:  # the test of that snapshot reports it
            continue
        if (found.name, found.in_avals) == (program.name, program.in_avals):
            return found, f"the snapshot {_shown(path)}"
    return None


def _shown(path: Path) -> str:
    return f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
