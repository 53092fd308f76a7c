"""Estimate the cost of a program: FLOPs, bytes and more, by source line, scope and so on.

    cost(program).total.work.flops
    cost(program, by="scope").groups[0]

Nothing is compiled. A rule returns the cost of one run of an equation (`rules`), the loops around
it determine how often it runs (`tallies`), and a model of XLA's fusion determines which bytes go
through memory (`analysis.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from jaxprtool.analysis.cost.bodies import Bodies
from jaxprtool.analysis.cost.groupings import (
    ByArgument,
    ByLine,
    ByName,
    ByScope,
    BySide,
    ByUse,
    Line,
    LineReader,
    Whole,
    argument_names,
    collective_of,
    dtypes_of,
    primitive_name,
)
from jaxprtool.analysis.cost.rules import ANY_UNIT
from jaxprtool.analysis.cost.tallies import Sums, Tallies, Tally
from jaxprtool.analysis.cost.work import Work
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.documents import Number, document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.dataflow.slicing import live_part
from jaxprtool.ir.programs.auto_sharding import left_to_partitioner
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import ProgramSignature, program_signature
from jaxprtool.ir.shapes.symbols import symbols_of, value_of
from jaxprtool.ir.source.frames import BEHIND, Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr

#: The criteria by which a program's cost is grouped.
By = Literal["line", "scope", "primitive", "dtype", "argument"]

BY: tuple[By, ...] = get_args(By)

#: The size of symbolic dimensions at which groups are compared, and fusion is decided.
TYPICAL_SIZE = 512


@document(
    without=("least", "products", "line", "path"),
    names={"behind": "library", "lower_bound": "least"},
    also=("any_unit", "lower_bound"),
    flat=("work",),
    optional=("any_unit", "behind", "lower_bound", "seconds", "limit"),
)
@dataclass(frozen=True)
class Group:
    """The cost of a group of equations.

    Attributes:
        name: The line, scope, … of the group: `model.py:9`, `GPT/Block_0`, `dot_general`;
            "" if that is unknown.
        work: Their cost, with the most expensive branch of each `cond`.
        least: Their cost with the cheapest branch.
        per_round: Whether some are in a loop with an unknown trip count, and counted once.
        products: The FLOPs of matrix products by their precision: `bf16`, `f32`, `f32 highest`; and
            those of kernels and library algorithms, as `any unit`.
        line: The source line, if grouped by line.
        behind: The location in a library that the line calls, if there is only one:
            `flax/linen/linear.py:199`. With `jaxprtool.frames("all")`, all library frames behind
            the line, by which groups are also distinguished.
        path: The scopes, the outermost first, if grouped by scope.
        seconds: A lower bound of its time, if a device was chosen (`devices.timed`).
        limit: The limiting factor on this device: `compute` or `memory`.
    """

    name: str
    work: Work
    least: Work
    per_round: bool = False
    products: Mapping[str, Any] = field(default_factory=dict)
    line: Line | None = None
    behind: str = ""
    path: tuple[str, ...] = ()
    seconds: float | None = None
    limit: str = ""

    @property
    def any_unit(self) -> Number | None:
        """The FLOPs that any unit of a device may compute: of kernels, and of factorizations."""
        return self.products.get(ANY_UNIT)

    @property
    def lower_bound(self) -> Work | None:
        """The cost with the cheapest branch of each `cond`; None if all branches cost the same."""
        return None if self.least == self.work else self.least


@dataclass(frozen=True)
class Cost(Printed):
    """The cost of a program.

    Attributes:
        name: The name of the program.
        by: The criterion of the groups.
        total: The cost of the whole program, on all devices of a `shard_map`.
        per_device: The cost on one device, if there is a `shard_map` over several.
        groups: The groups, the most expensive first. A scope includes the scopes in it.
        collectives: The bytes that devices send in each kind of collective.
        unknown: The number of equations of each primitive whose cost is unknown.
        left_to_partitioner: Arguments, results and equations with a sharding over several devices,
            whose arrays are counted at their global size.
        seconds: The time that the program takes, if it was measured or is known.
        utilization: The fraction of the device's peak FLOPs that matrix products achieve in this
            time.
        dead: The cost of dead equations, which XLA removes; None if there are none.
    """

    name: str
    by: By
    total: Group
    per_device: Group | None
    groups: tuple[Group, ...]
    collectives: tuple[Group, ...]
    unknown: Mapping[str, int]
    left_to_partitioner: tuple[str, ...] = ()
    seconds: float | None = None
    utilization: float | None = None
    dead: Group | None = None


@without_collector()
def cost(program: Program | AnyJaxpr, by: By = "line") -> Cost:
    """Estimate the cost of a program, in total and by groups of its equations.

    Args:
        program: A `Program`, or a jaxpr.
        by: The criterion of the groups: the user's "line", the "scope" that modules open, the
            "primitive", the "dtype", or the "argument" that is read.

    Returns:
        The cost. If sizes are symbolic, its numbers are polynomials in them.
    """
    about = program_signature(program)
    typical = dict.fromkeys(symbols_of(about.jaxpr), TYPICAL_SIZE)
    bodies, order = Bodies(typical), _order(typical)
    jaxpr = about.jaxpr
    groups = _groups(by, about, bodies)
    collectives = []
    if bodies.communicates:
        collectives = _named(Sums(bodies, ByName(collective_of))[jaxpr], str)
    return Cost(
        about.name,
        by,
        _total(bodies, jaxpr),
        _total(bodies, jaxpr, all_devices=False) if bodies.has_mesh else None,
        tuple(sorted(groups, key=order)),
        tuple(sorted((each for each in collectives if each.name), key=order)),
        dict(bodies.unknown),
        left_to_partitioner(program),
        dead=_dead(bodies, jaxpr),
    )


def _dead(bodies: Bodies, jaxpr: Jaxpr) -> Group | None:
    live = live_part(jaxpr)
    if all(len(run.inside) == len(run.jaxpr.eqns) for run in live.runs()):
        return None
    tally = Sums(bodies, ByUse(live.members()))[jaxpr].get(False)
    return None if tally is None else _group(tally)


class Sides(NamedTuple):
    """The cost of the equations of a line.

    Attributes:
        total: All of them.
        forward: Those that are not in a backward pass.
        backward: Those in a backward pass.
    """

    total: Group
    forward: Group
    backward: Group


@dataclass(frozen=True)
class CostBySide:
    """The cost of a program by line, forward and backward.

    Attributes:
        total: The cost of the whole program.
        lines: The cost of each line; None is for equations whose line is unknown.
        unknown: The number of equations of each primitive whose cost is unknown.
    """

    total: Group
    lines: Mapping[Line | None, Sides]
    unknown: Mapping[str, int]


@without_collector()
def cost_by_side(program: Program | AnyJaxpr) -> CostBySide:
    """Estimate the cost of a program by line, with forward and backward passes apart."""
    about = program_signature(program)
    jaxpr = about.jaxpr
    bodies = Bodies(dict.fromkeys(symbols_of(jaxpr), TYPICAL_SIZE))
    sums = Sums(bodies, BySide(frames_now(about.roots)))[jaxpr]
    sides: dict[Line | None, Sides] = {}
    for line in dict.fromkeys(line for line, _ in sums):
        both = [sums.get((line, backward), Tally()) for backward in (False, True)]
        merged = _merged(("", tally) for tally in both)[""]
        sides[line] = Sides(*map(_group, (merged, *both)))
    return CostBySide(_total(bodies, jaxpr), sides, dict(bodies.unknown))


def _total(bodies: Bodies, jaxpr: Jaxpr, all_devices: bool = True) -> Group:
    return _group(Sums(bodies, Whole(), all_devices)[jaxpr].get("", Tally()))


def _order(typical: Mapping[str, int]) -> Callable[[Group], Any]:
    """Return a sort key for groups, the most expensive first."""

    def key(group: Group) -> tuple[Any, ...]:
        work = group.work.map(lambda number: value_of(number, typical))
        return -work.flops - work.transcendentals, -work.bytes, group.name

    return key


def _groups(by: By, about: ProgramSignature, bodies: Bodies) -> list[Group]:
    jaxpr = about.jaxpr
    if by == "line":
        frames = frames_now(about.roots)
        lines = LineReader(frames, by_library=frames.choice == "all")
        sums = Sums(bodies, ByLine(lines))[jaxpr]
        return [_by_line(key, tally, lines, frames) for key, tally in sums.items()]
    if by == "scope":
        scopes = _merged(_prefixes(Sums(bodies, ByScope(jaxpr, about.roots))[jaxpr]))
        return [_group(tally, "/".join(path), path=path) for path, tally in scopes.items()]
    if by == "argument":
        names = argument_names([each.name for each in about.arguments], len(jaxpr.constvars))
        return _named(Sums(bodies, ByArgument())[jaxpr], names)
    name = {"primitive": primitive_name, "dtype": dtypes_of}[by]
    return _named(Sums(bodies, ByName(name))[jaxpr], str)


def _named(sums: Tallies, name: Callable[[Any], str]) -> list[Group]:
    """Return the groups with names, merging those with the same name."""
    return [
        _group(tally, name)
        for name, tally in _merged((name(k), t) for k, t in sums.items()).items()
    ]


def _prefixes(sums: Tallies) -> Iterator[tuple[Any, Tally]]:
    """Yield each group, whose key is a path, once for each prefix of the path."""
    for path, tally in sums.items():
        for end in range(1, len(path) + 1) if path else [0]:
            yield path[:end], tally


def _merged(tallies: Iterable[tuple[Any, Tally]]) -> Tallies:
    found: Tallies = {}
    for key, tally in tallies:
        found.setdefault(key, Tally()).add(tally)
    return found


def _group(tally: Tally, name: str = "", **more: Any) -> Group:
    return Group(name, tally.most, tally.least, tally.per_round, tally.products, **more)


def _by_line(key: Line | None, tally: Tally, lines: LineReader, frames: Frames) -> Group:
    if key is None:
        return _group(tally)
    behind = [f"{frames.path(file)}:{number}" for file, number in key.behind]
    called = list(lines.behind.get(key, {}))
    if not behind and len(called) == 1 and called[0] is not None:
        behind = [frames.text(called[0])]
    name = f"{frames.path(key.file)}:{key.line}"
    return _group(tally, name, line=key, behind=BEHIND.join(behind))
