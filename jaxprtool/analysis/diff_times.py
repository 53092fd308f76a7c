"""The measured times of the differences between two programs, by source line.

Times are measured by line, not by equation. The lines of a hunk in one program are those of its
equations, and those of the counterparts of equations at the hunk's lines in the other program. So
the time of a line that gained a small equation is compared with its time before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxprtool.analysis.diff import Diff, DiffTimes, Hunk, Seconds
from jaxprtool.analysis.profile import Profile, TimedLine
from jaxprtool.ir.core.equations import bodies
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import JaxprEqn

#: The lines of a hunk in the first and in the second program, by name: `model.py:9`.
_Lines = tuple[set[str], set[str]]


def with_times(found: Diff, before: Profile, after: Profile) -> Diff:
    """Add the measured times of two programs, and sort the hunks by how much their time changed.

    Args:
        found: The diff of the programs.
        before: The profile of the first program.
        after: The profile of the second program.
    """
    profiles = before, after
    known = tuple({line.name: line for line in each.lines if line.name} for each in profiles)
    reader = _LineNames(found)
    timed = [(hunk, reader.of_hunk(hunk)) for hunk in found.hunks]
    times = [(hunk, _seconds(known, lines)) for hunk, lines in timed]
    times.sort(key=lambda each: -abs(each[1].after - each[1].before))
    differing: _Lines = set(), set()
    for _, lines in timed:
        for all_of_them, some in zip(differing, lines, strict=True):
            all_of_them |= some
    others = set(known[0]) - differing[0], set(known[1]) - differing[1]
    whole = Seconds(before.wall_seconds, after.wall_seconds, False)
    parts = _seconds(known, differing), _seconds(known, others)
    rest = Seconds(
        max(whole.before - sum(each.before for each in parts), 0.0),
        max(whole.after - sum(each.after for each in parts), 0.0),
        False,
    )
    hunks = tuple(hunk for hunk, _ in times)
    by_hunk = tuple(seconds for _, seconds in times)
    return replace(found, hunks=hunks, times=DiffTimes(whole, *parts, rest, by_hunk))


def _seconds(known: Sequence[dict[str, TimedLine]], lines: _Lines) -> Seconds:
    """Return the time of lines of both programs. Lines without operations take no time."""
    timed = [
        [of[name] for name in names if name in of] for of, names in zip(known, lines, strict=True)
    ]
    before, after = (sum(each.seconds for each in found) for found in timed)
    return Seconds(before, after, any(each.is_split for found in timed for each in found))


class _LineNames:
    """Finds the lines of hunks.

    Args:
        found: The diff.
    """

    def __init__(self, found: Diff) -> None:
        self._frames = [frames_now(each.roots) for each in found.signatures]
        #: The lines of equations that correspond, for each line of a program.
        self._counterparts: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
        for body in found.bodies:
            around = [[pair[which] for pair in body.path] for which in (0, 1)]
            for i, j in body.pairs.items():
                eqns = body.bodies[0].eqns[i], body.bodies[1].eqns[j]
                names = [self._name(k, [*around[k], eqns[k]]) for k in (0, 1)]
                if all(names):
                    for k in (0, 1):
                        self._counterparts[k].setdefault(names[k], set()).add(names[1 - k])

    def of_hunk(self, hunk: Hunk) -> _Lines:
        """Return the lines of a hunk in both programs."""
        own: _Lines = set(), set()
        for line in hunk.lines:
            for which, eqn in enumerate((line.before, line.after)):
                if eqn is not None:
                    around = [pair[which] for pair in hunk.body.path]
                    own[which].update(self._names(which, [*around, eqn]))
        return own[0] | self._across(own[1], 1), own[1] | self._across(own[0], 0)

    def _across(self, names: Iterable[str], which: int) -> set[str]:
        """Return the lines in the other program of the counterparts of equations at some lines."""
        return {each for name in names for each in self._counterparts[which].get(name, ())}

    def _names(self, which: int, around: Sequence[JaxprEqn]) -> Iterator[str]:
        """Yield the lines of the last equation in `around`, and of all equations in its bodies."""
        if name := self._name(which, around):
            yield name
        for _, body in bodies(around[-1]):
            for eqn in body.eqns:
                yield from self._names(which, [*around, eqn])

    def _name(self, which: int, around: Sequence[JaxprEqn]) -> str:
        location = self._frames[which].location_of(around)
        return "" if location is None else self._frames[which].text(location.frame)
