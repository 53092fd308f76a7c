"""Estimate the cost of a program: FLOPs, bytes and more, by source line, scope and so on.

    cost(program).total.work.flops
    cost(program, by="scope").groups[0]

Nothing is compiled. A rule returns the cost of one run of an equation (`rules`), the loops around
it determine how often it runs (`tallies`), and a model of XLA's fusion determines which bytes go
through memory (`analysis.kernels`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from jaxprtool.analysis.devices import ANY_UNIT, DeviceSpec
from jaxprtool.analysis.kernels import KernelNode
from jaxprtool.commands.cost.bodies import (
    BodyCosts,
    CostedBody,
    CostTally,
    Item,
    Key,
    Sums,
    Tallies,
)
from jaxprtool.commands.cost.rules import Work, runs_of, total
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.dataflow import live_part
from jaxprtool.ir.documents import Number, Printed, document
from jaxprtool.ir.equations import all_jaxprs, outer_first
from jaxprtool.ir.frames import Frames, Line, Root, frames_now
from jaxprtool.ir.meshes import left_to_partitioner
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, ProgramSignature, program_signature, top_jaxpr
from jaxprtool.ir.scopes import ScopePaths, is_backward
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.symbols import symbols_of, value_of
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.jaxcompat.source_locations import UserFrame

if TYPE_CHECKING:
    from jaxprtool.ir.hlo.origins import InsertedCopy

#: The criteria by which a program's cost is grouped.
By = Literal["line", "scope", "primitive", "dtype", "argument"]

BY: tuple[By, ...] = get_args(By)

#: The size of symbolic dimensions at which groups are compared, and fusion is decided.
TYPICAL_SIZE = 512


@document(
    without=("least", "products", "line", "path"),
    names={"lower_bound": "least"},
    also=("any_unit", "lower_bound"),
    flat=("work",),
    optional=("any_unit", "place", "lower_bound", "seconds", "limit"),
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
        place: The line, if grouped by line, and that of a library that it calls, if there is only
            one. With `jaxprtool.frames("all")`, all library frames are behind the line, by which
            groups are also distinguished.
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
    place: Place = UNKNOWN
    path: tuple[str, ...] = ()
    seconds: float | None = None
    limit: str = ""

    @property
    def behind(self) -> str:
        """The lines of libraries behind the line: `flax/linen/linear.py:199`, or ""."""
        return self.place.behind

    @property
    def any_unit(self) -> Number | None:
        """The FLOPs that any unit of a device may compute: of kernels, and of factorizations."""
        return self.products.get(ANY_UNIT)

    @property
    def lower_bound(self) -> Work | None:
        """The cost with the cheapest branch of each `cond`; None if all branches cost the same."""
        return None if self.least == self.work else self.least


@document(optional=("copies",))
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
        copies: The copies that XLA inserted in a module, those of most bytes first; None for a
            program.
    """

    name: str
    by: By | Literal["kernel"]
    total: Group
    per_device: Group | None
    groups: tuple[Group, ...]
    collectives: tuple[Group, ...]
    unknown: Mapping[str, int]
    left_to_partitioner: tuple[str, ...] = ()
    seconds: float | None = None
    utilization: float | None = None
    dead: Group | None = None
    copies: tuple[InsertedCopy, ...] | None = None


def cost(program: Program | AnyJaxpr, by: By = "line") -> Cost:
    """Estimate the cost of a program, in total and by groups of its equations.

    Args:
        program: A `Program`, or a jaxpr.
        by: The criterion of the groups: the user's "line", the "scope" that modules open, the
            "primitive", the "dtype", or the "argument" that is read.

    Returns:
        The cost. If sizes are symbolic, its numbers are polynomials in them.
    """
    return ProgramCost(program).by(by)


class ProgramCost:
    """The cost of a program by several criteria; the cost of each equation is estimated once.

    Args:
        program: A `Program`, or a jaxpr.
    """

    def __init__(self, program: Program | AnyJaxpr) -> None:
        self._program, self._about = program, program_signature(program)
        self._typical = dict.fromkeys(symbols_of(self._about.jaxpr), TYPICAL_SIZE)
        self._bodies = BodyCosts(self._typical)

    @without_collector()
    def by(self, by: By) -> Cost:
        """Return the cost by a criterion, as `cost` does."""
        bodies, order, jaxpr = self._bodies, _order(self._typical), self._about.jaxpr
        groups = _groups(by, self._about, bodies)
        collectives = []
        if bodies.communicates:
            collectives = _named(Sums(bodies, ByName(collective_of))[jaxpr], str)
        whole, per_device, dead = self._totals
        return Cost(
            self._about.name,
            by,
            whole,
            per_device,
            tuple(sorted(groups, key=order)),
            tuple(sorted((group for group in collectives if group.name), key=order)),
            dict(bodies.unknown),
            left_to_partitioner(self._program),
            dead=dead,
        )

    @cached_property
    def _totals(self) -> tuple[Group, Group | None, Group | None]:
        """The cost of the program, on one device if it has a mesh, and of its dead equations."""
        bodies, jaxpr = self._bodies, self._about.jaxpr
        whole = _total(bodies, jaxpr)
        per_device = _total(bodies, jaxpr, all_devices=False) if bodies.has_mesh else None
        return whole, per_device, _dead(bodies, jaxpr)

    @without_collector()
    def by_frame(self) -> list[FrameCost]:
        """Return the cost by scope and line."""
        jaxpr, frames = self._about.jaxpr, frames_now(self._about.roots)
        grouping = ByFrame(ByScope(jaxpr, self._about.roots), ByLine(LineReader(frames)))
        by_path = added_tallies(
            ((*scope, f"{frames.path(line.file)}:{line.line}" if line else ""), tally)
            for (scope, line), tally in Sums(self._bodies, grouping)[jaxpr].items()
        )
        return [FrameCost(path, tally.most) for path, tally in by_path.items()]


@without_collector()
def total_work(program: Program | AnyJaxpr) -> Work:
    """Return the work in the total of `cost`, without the groups, which take longer."""
    jaxpr = program_signature(program).jaxpr
    return _total(BodyCosts(dict.fromkeys(symbols_of(jaxpr), TYPICAL_SIZE)), jaxpr).work


@without_collector()
def total_flops(program: Program | AnyJaxpr) -> Number:
    """Return the FLOPs of a program, as in the total of `cost`."""
    jaxpr = program_signature(program).jaxpr
    bodies = BodyCosts(dict.fromkeys(symbols_of(jaxpr), TYPICAL_SIZE), has_bytes=False)
    return _total(bodies, jaxpr).work.flops


def _dead(bodies: BodyCosts, jaxpr: Jaxpr) -> Group | None:
    live = live_part(jaxpr)
    if all(len(run.inside) == len(run.jaxpr.eqns) for run in live.runs()):
        return None
    members = {*live.members(), *bodies.members_of_kernels()}
    tally = Sums(bodies, ByUse(members))[jaxpr].get(False)
    return None if tally is None else group_of(tally)


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
    bodies = BodyCosts(dict.fromkeys(symbols_of(jaxpr), TYPICAL_SIZE))
    sums = Sums(bodies, BySide(frames_now(about.roots)))[jaxpr]
    sides: dict[Line | None, Sides] = {}
    for line in dict.fromkeys(line for line, _ in sums):
        both = [sums.get((line, backward), CostTally()) for backward in (False, True)]
        both_sides = added_tallies(("", tally) for tally in both)[""]
        sides[line] = Sides(*map(group_of, (both_sides, *both)))
    return CostBySide(_total(bodies, jaxpr), sides, dict(bodies.unknown))


def _total(bodies: BodyCosts, jaxpr: Jaxpr, all_devices: bool = True) -> Group:
    return group_of(Sums(bodies, Whole(), all_devices)[jaxpr].get("", CostTally()))


def _order(typical: Mapping[str, int]) -> Callable[[Group], Any]:
    """Return a sort key for groups, the most expensive first."""

    def key(group: Group) -> tuple[Any, ...]:
        work = group.work.map(lambda number: value_of(number, typical))
        return -work.flops - work.transcendentals, -work.bytes, group.name

    return key


def _groups(by: By, about: ProgramSignature, bodies: BodyCosts) -> list[Group]:
    jaxpr = about.jaxpr
    if by == "line":
        frames = frames_now(about.roots)
        lines = LineReader(frames, by_library=frames.choice == "all")
        sums = Sums(bodies, ByLine(lines))[jaxpr]
        return [_by_line(key, tally, lines, frames) for key, tally in sums.items()]
    if by == "scope":
        scopes = added_tallies(prefixes(Sums(bodies, ByScope(jaxpr, about.roots))[jaxpr].items()))
        return [group_of(tally, "/".join(path), path=path) for path, tally in scopes.items()]
    if by == "argument":
        names = argument_names([value.name for value in about.arguments], len(jaxpr.constvars))
        return _named(Sums(bodies, ByArgument())[jaxpr], names)
    name = {"primitive": primitive_name, "dtype": dtypes_of}[by]
    return _named(Sums(bodies, ByName(name))[jaxpr], str)


def _named(sums: Tallies, name: Callable[[Any], str]) -> list[Group]:
    """Return the groups with names, merging those with the same name."""
    return [
        group_of(tally, name)
        for name, tally in added_tallies((name(k), t) for k, t in sums.items()).items()
    ]


def prefixes(sums: Iterable[tuple[Any, CostTally]]) -> Iterator[tuple[Any, CostTally]]:
    """Yield each group, whose key is a path, once for each prefix of the path."""
    for path, tally in sums:
        for end in range(1, len(path) + 1) if path else [0]:
            yield path[:end], tally


def added_tallies(tallies: Iterable[tuple[Any, CostTally]]) -> Tallies:
    """Return the tallies of groups, those of one group added."""
    sums: Tallies = {}
    for key, tally in tallies:
        sums.setdefault(key, CostTally()).add(tally)
    return sums


def group_of(tally: CostTally, name: str = "", **more: Any) -> Group:
    """Return a group with a tally."""
    return Group(name, tally.most, tally.least, tally.per_round, tally.products, **more)


def _by_line(key: Line | None, tally: CostTally, lines: LineReader, frames: Frames) -> Group:
    if key is None:
        return group_of(tally)
    place, called = lines.place(key), list(lines.behind.get(key, {}))
    if not place.library and len(called) == 1 and called[0] is not None:
        place = place.calling(frames.text(called[0]))
    return group_of(tally, str(place.user), line=key, place=place)


# --- groupings ------------------------------------------------------------------------------------
# Ways to group equations: by line, scope, primitive, dtype, argument, or collective.
#
# Each class is a `Grouping` (`tallies`). If a body does not determine the group of an equation, as
# for a library body without a line of user code, it is the group of the enclosing equation.


class Whole:
    """One group of all equations."""

    def key(self, item: Item, body: CostedBody) -> str:
        return ""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return key


class ByUse:
    """Groups by whether a result or an effect of the program depends on the equation.

    Args:
        members: The equations of the live part, by `id`.
    """

    def __init__(self, members: Collection[int]) -> None:
        self._members = members

    def key(self, item: Item, body: CostedBody) -> bool:
        return self._is_live(item)

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> bool:
        return key and self._is_live(item)

    def _is_live(self, item: Item) -> bool:
        return all(id(eqn) in self._members for eqn in (*item.node.calls, item.eqn))


class ByName:
    """Groups that depend on the equation alone, such as its primitive.

    Args:
        name: A function that returns the group of an equation.
    """

    def __init__(self, name: Callable[[JaxprEqn], str | None]) -> None:
        self._name = name

    def key(self, item: Item, body: CostedBody) -> str:
        return self._name(item.eqn) or ""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return key


def primitive_name(eqn: JaxprEqn) -> str:
    """Return the name of an equation's primitive."""
    return str(eqn.primitive.name)


def dtypes_of(eqn: JaxprEqn) -> str:
    """Return the dtype of an equation's result; for a product, also those of its operands."""
    result, *of = [
        str(v.aval.str_short(short_dtypes=True)).partition("[")[0]
        for v in (*eqn.outvars[:1], *eqn.invars)
        if hasattr(v.aval, "dtype")
    ] or ["no array"]
    operands = list(dict.fromkeys(of))
    if traits(eqn).expensive and operands != [result]:
        return f"{', '.join(operands)} → {result}"
    return result


def collective_of(eqn: JaxprEqn) -> str | None:
    """Return the name of a collective and its mesh axes, or None if it is not a collective."""
    if not traits(eqn).collective:
        return None
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = [str(axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]
    return f"{eqn.primitive.name} over {', '.join(names) or 'no axis'}"


# --- lines ----------------------------------------------------------------------------------------


class LineReader:
    """Reads the line of equations: the nearest line of user code, or else of a library.

    Args:
        frames: Reads frames, and decides which files are the user's.
        by_library: Whether lines are distinguished by the library frames behind them.
    """

    def __init__(self, frames: Frames, by_library: bool = False) -> None:
        self._frames, self._by_library = frames, by_library
        # By the traceback, which many equations have in common.
        self._known: dict[int, Line | None] = {}
        #: The frames of libraries that each line calls.
        self.behind: defaultdict[Line, dict[UserFrame | None, None]] = defaultdict(dict)
        self._functions: dict[tuple[str, int], str] = {}

    def line(self, eqn: JaxprEqn) -> Line | None:
        """Return the line of an equation; None if it is unknown."""
        at = identity(eqn.source_info.traceback)
        if at not in self._known:
            location, line = self._frames.location(eqn), None
            if location is not None:
                file, number = location.frame[:2]
                for frame in (location.frame, *location.behind):
                    self._functions.setdefault(frame[:2], frame.function)
                behind = tuple(frame[:2] for frame in location.behind) if self._by_library else ()
                line = Line(file, number, self._frames.is_users(file), behind)
                if line.own:
                    self.behind[line][location.library] = None
            self._known[at] = line
        return self._known[at]

    def place(self, line: Line | None) -> Place:
        """Return a line as a place, in the function of the first equation that was read there."""
        if line is None:
            return UNKNOWN
        user, *library = (
            self._frames.at(*place, self._functions.get(place, ""))
            for place in (line[:2], *line.behind)
        )
        return self._frames.at(*line[:2], user.function, library)

    def line_around(self, inner: Line | None, line: Line | None) -> Line | None:
        """Return the line of an equation in a body: its own, or that of the body's equation."""
        if inner is None:
            return line
        if inner.own or line is None or not line.own:
            return inner
        return line._replace(behind=(*line.behind, inner[:2])) if self._by_library else line


class ByLine:
    """Groups by line.

    Args:
        lines: Reads the lines.
    """

    def __init__(self, lines: LineReader) -> None:
        self._lines = lines

    def key(self, item: Item, body: CostedBody) -> Line | None:
        line = None
        for eqn in (item.eqn, *reversed(item.node.calls)):
            line = self._lines.line_around(line, self._lines.line(eqn))
            if line is not None and line.own:
                break
        return line

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        if key is not None and key.own:
            return key
        return self._lines.line_around(key, self.key(item, body))


class BySide:
    """Groups by line and by whether the equation is in a backward pass.

    Args:
        frames: Reads frames, and decides which files are the user's.
    """

    def __init__(self, frames: Frames) -> None:
        self._lines = ByLine(LineReader(frames))
        # By the traceback and the name stack, which many equations have in common.
        self._known: dict[tuple[int, int], tuple[Line | None, bool]] = {}

    def key(self, item: Item, body: CostedBody) -> tuple[Line | None, bool]:
        info, calls = item.eqn.source_info, item.node.calls
        if calls:
            return self._lines.key(item, body), any(map(is_backward, (*calls, item.eqn)))
        at = identity(info.traceback), identity(info.name_stack)
        key = self._known.get(at)
        if key is None:
            key = self._known[at] = self._lines.key(item, body), is_backward(item.eqn)
        return key

    def lifted(
        self, key: Key, item: Item, body: CostedBody, number: int
    ) -> tuple[Line | None, bool]:
        line, backward = key
        line = self._lines.lifted(line, item, body, number)
        return line, backward or any(map(is_backward, (*item.node.calls, item.eqn)))


# --- scopes ---------------------------------------------------------------------------------------


class ByScope:
    """Groups by the path of scopes and functions around an equation.

    Args:
        top: The open jaxpr of the program.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, top: Jaxpr, roots: Sequence[Root]) -> None:
        self._paths = ScopePaths(all_jaxprs(top), roots)

    def key(self, item: Item, body: CostedBody) -> tuple[str, ...]:
        return self._paths.of((*item.node.calls, item.eqn))

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return self.key(item, body) + key


# --- frames ---------------------------------------------------------------------------------------
# Estimate the cost of each line in each scope, for flame graphs.


class FrameCost(NamedTuple):
    """The cost of a line in a scope, with the most expensive branch of each `cond`.

    Attributes:
        path: The scopes, the outermost first, and the line; "" if the line is unknown.
        work: Their cost.
    """

    path: tuple[str, ...]
    work: Work


class ByFrame:
    """Groups by scope and by line.

    Args:
        scopes: Groups by scope.
        lines: Groups by line.
    """

    def __init__(self, scopes: ByScope, lines: ByLine) -> None:
        self._scopes, self._lines = scopes, lines

    def key(self, item: Item, body: CostedBody) -> tuple[tuple[str, ...], Line | None]:
        return self._scopes.key(item, body), self._lines.key(item, body)

    def lifted(
        self, key: Key, item: Item, body: CostedBody, number: int
    ) -> tuple[tuple[str, ...], Line | None]:
        scope, line = key
        lifted = self._scopes.lifted(scope, item, body, number)
        return lifted, self._lines.lifted(line, item, body, number)


# --- arguments ------------------------------------------------------------------------------------

#: The positions of the arguments of a body whose elements a value holds.
_Origins = frozenset[int]

_NONE: _Origins = frozenset()


@dataclass
class ByArgument:
    """Groups by the arguments that an equation reads, also through casts, layouts and slices."""

    def __post_init__(self) -> None:
        self._known: dict[int, list[_Origins]] = {}

    def key(self, item: Item, body: CostedBody) -> _Origins:
        origins = self._origins(body)
        return _NONE.union(*(origins[value] for value in _operands(item.node)))

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        if item.held is None:
            return _NONE
        origins, region = self._origins(body), item.held.regions[number]
        constants = len(item.held.jaxprs[number].constvars)
        values = item.node.places
        outer = [values[region.ins[i - constants]] for i in key if i >= constants]
        return _NONE.union(*(origins[value] for value in outer if value is not None))

    def _origins(self, body: CostedBody) -> list[_Origins]:
        """Return the origins of each value of a body."""
        if id(body) not in self._known:
            count = len(body.kernels.arguments)
            origins = [frozenset({i}) for i in range(count)]
            for node in body.kernels.nodes:
                if node.kind != "equation":  # each result is an operand, or a copy of it
                    origins += [origins[value] for value in node.reads]
                    continue
                kept = _NONE
                if traits(node.eqn).gives:
                    kept = _NONE.union(*(origins[value] for value in _operands(node)[:1]))
                origins += [kept] * len(node.makes)
            self._known[id(body)] = origins
        return self._known[id(body)]


def _operands(node: KernelNode) -> list[int]:
    return [value for value in node.places if value is not None]


def argument_names(names: Iterable[str], constants: int) -> Callable[[Any], str]:
    """Return a function that names the groups of `ByArgument` at the top level.

    Args:
        names: The names of the program's arguments.
        constants: The number of the program's constants.
    """
    all_names = list(names)

    def name(origins: _Origins) -> str:
        return ", ".join(all_names[i - constants] for i in sorted(origins) if i >= constants)

    return name


# --- stacks ---------------------------------------------------------------------------------------
# Estimate the cost of equations by call stack, as in a profile.


class Stack(NamedTuple):
    """The call stack of equations of one primitive.

    Attributes:
        frames: The frames of the user and of libraries, the innermost first.
        primitive: The name of the primitive.
    """

    frames: tuple[UserFrame, ...]
    primitive: str


@dataclass(frozen=True)
class StackCost:
    """The cost of the equations of a stack, with the most expensive branch of each `cond`."""

    stack: Stack
    work: Work


@without_collector()
def cost_by_stack(program: Program | AnyJaxpr) -> list[StackCost]:
    """Estimate the cost of a program by the call stacks of its equations.

    Raises:
        ArgumentsError: If a size is symbolic.
    """
    about = program_signature(program)
    if symbols_of(about.jaxpr):
        raise ArgumentsError(
            "a profile needs sizes that are numbers",
            'write them in --args, or -p "specialize(n=512)"',
        )
    sums = Sums(BodyCosts({}), _ByStack(frames_now(about.roots)))[about.jaxpr]
    return [StackCost(stack, tally.most) for stack, tally in sums.items()]


class _ByStack:
    """Groups by stack."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def key(self, item: Item, body: CostedBody) -> Stack:
        frames = self._frames.stack((*item.node.calls, item.eqn))
        return Stack(frames, str(item.eqn.primitive.name))

    def lifted(self, key: Stack, item: Item, body: CostedBody, number: int) -> Stack:
        if any(self._frames.is_users(frame.file) for frame in key.frames):
            return key
        return key._replace(frames=(*key.frames, *self._frames.of(item.eqn)))


# --- all runs -------------------------------------------------------------------------------------
# Estimate the cost of each equation of a program, at every depth, summed over all its runs.

#: The size of symbolic dimensions at which fusion is decided.
_SIZE = 512


def work_by_equation(program: Program | AnyJaxpr) -> dict[int, Work]:
    """Return the cost of each equation, at every depth, summed over all its runs.

    The cost of an equation with bodies is that of its bodies. Inside a `cond` every branch counts
    as if it ran. A loop with an unknown trip count counts as one iteration.

    Args:
        program: A `Program`, or a jaxpr.

    Returns:
        The cost by the `id` of the equation.
    """
    jaxpr = top_jaxpr(program)
    bodies = BodyCosts(dict.fromkeys(symbols_of(jaxpr), _SIZE))
    sums = Sums(bodies, Whole())
    runs = defaultdict[Jaxpr, Any](int, {jaxpr: 1})
    by_eqn: defaultdict[int, list[Work]] = defaultdict(list)

    def inside(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
        return (body for item in bodies[jaxpr].items for body in item.bodies)

    for outer in outer_first(jaxpr, inside):
        body = bodies[outer]
        for item in body.items:
            work = item.work
            if item.bodies:
                work = total(tally.most for tally in sums.inside(item, body).values())
            work = work.times(runs[outer] * item.devices)
            for eqn in (*item.node.calls, item.eqn):
                by_eqn[id(eqn)].append(work)
            for inner in item.bodies:
                runs[inner] += runs[outer] * item.devices * runs_of(item.held)
    return {key: total(works) if len(works) > 1 else works[0] for key, works in by_eqn.items()}


def with_time(group: Group, device: DeviceSpec) -> Group:
    """Return a group with a lower bound of its time on a device."""
    bound = device.bound(group)
    return replace(group, seconds=bound.seconds, limit=bound.limit)


def with_times(cost: Cost, device: DeviceSpec | None, seconds: float | None) -> Cost:
    """Return a cost with the time of the program, and the times of its groups on a device.

    Collectives have no time: the rates of links are not known.
    """
    if device is None:
        return replace(cost, seconds=seconds)
    return replace(
        cost,
        seconds=seconds,
        utilization=None if seconds is None else device.utilization(cost.total, seconds),
        total=with_time(cost.total, device),
        per_device=cost.per_device and with_time(cost.per_device, device),
        groups=tuple(with_time(group, device) for group in cost.groups),
        dead=cost.dead and with_time(cost.dead, device),
    )
