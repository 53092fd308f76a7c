"""A user's source lines with their cost, the bytes that they keep, and their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxprtool.analysis.devices import DeviceSpec
from jaxprtool.commands.cost.estimate import Group, LineReader, Sides, cost_by_side, with_time
from jaxprtool.commands.cost.rules import NOTHING
from jaxprtool.commands.profile.lines import Profile, TimedLine, profile_of
from jaxprtool.commands.residuals.policies import differentiated, gives_one_float, is_float_aval
from jaxprtool.commands.residuals.residuals import ResidualOrigins
from jaxprtool.commands.shardings.partitions import Shardings
from jaxprtool.commands.why.slices import EquationsByLine
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir import source_text
from jaxprtool.ir.dataflow import everything
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.equations import equations, size_of
from jaxprtool.ir.frames import Frames, current_frame_view, frames, frames_now
from jaxprtool.ir.meshes import left_to_partitioner
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.passes.transforms.linear import Vjp

# --- source lines ---------------------------------------------------------------------------------
# A user's source files with the cost of each line, its residuals, and its measured time.

_NONE = Group("", NOTHING, NOTHING)
_NOTHING = Sides(_NONE, _NONE, _NONE)


_KEYS = {"number": "line", "kept": "residual_bytes"}
_OPTIONAL = "kept", "measured", "sent_bytes"


@document(without=("forward", "backward"), names=_KEYS, optional=_OPTIONAL)
@dataclass(frozen=True)
class SourceLine:
    """The equations of a source line, and their cost.

    Attributes:
        number: The line, from 1.
        equations: The number of its equations; those of a called body count at each call.
        total: Their cost.
        forward: The cost of equations outside of the backward pass of a gradient.
        backward: The cost of equations in the backward pass.
        kept: The bytes of the residuals that it computes; None if unknown.
        measured: Its measured time; None if it was not measured, or no operation is of this line.
        sent_bytes: The bytes that each device sends for its collectives; None if the program was
            not partitioned.
    """

    number: int
    equations: int
    total: Group
    forward: Group
    backward: Group
    kept: int | None = None
    measured: TimedLine | None = None
    sent_bytes: int | None = None


@document(names=_KEYS, optional=_OPTIONAL)
class GradientLine(SourceLine):
    """A line of a program with the backward pass of a gradient: its document has both passes."""


@document(
    without=("file",), names={"path": "display", "absolute_path": "path"}, also=("absolute_path",)
)
@dataclass(frozen=True)
class SourceFile:
    """A source file of the user.

    Attributes:
        file: The file.
        path: The path as the terminal shows it.
        lines: The lines with equations, in order.
    """

    file: str
    path: str
    lines: tuple[SourceLine, ...]

    @property
    def absolute_path(self) -> str:
        """The file, with its absolute path if that is known."""
        return source_text.current_file(self.file) or source_text.path(self.file)


@dataclass(frozen=True)
class Kept:
    """The residuals of a program, in bytes.

    Attributes:
        total: The bytes of all residuals except those of symbolic size.
        arguments: The bytes of residuals that are arguments.
        elsewhere: The bytes of residuals that no line of the user computes.
        with_respect_to: The names of the arguments of the gradient.
    """

    total: int
    arguments: int
    elsewhere: int
    with_respect_to: tuple[str, ...]


@document(
    without=("has_backward", "kept", "why_not_kept", "package", "profile"),
    also=("residual_bytes", "wall_seconds", "explained"),
    optional=("wall_seconds", "explained", "sent_bytes", "devices"),
)
@dataclass(frozen=True)
class Source(Printed):
    """The cost of the lines of the user's source.

    Attributes:
        name: The name of the program.
        total: The cost of the whole program.
        files: The files, the one with the most equations first.
        elsewhere: The number of equations without a line of the user.
        has_backward: Whether the program has the backward pass of a gradient.
        unknown: The number of equations of each primitive whose cost is unknown.
        kept: The residuals; None if unknown.
        why_not_kept: Why the residuals are unknown, if they were requested.
        package: The package that the files belong to, if no line is the user's.
        profile: The profile that the measured times are from; None if none were measured.
        left_to_partitioner: Arguments, results and equations with a sharding over several devices;
            their arrays are counted at their global size.
        sent_bytes: The bytes that each device sends; None if the program was not partitioned.
        devices: The number of devices that it was partitioned for.
    """

    name: str
    total: Group
    files: tuple[SourceFile, ...]
    elsewhere: int
    has_backward: bool
    unknown: Mapping[str, int]
    kept: Kept | None = None
    why_not_kept: str = ""
    package: str = ""
    profile: Profile | None = None
    left_to_partitioner: tuple[str, ...] = ()
    sent_bytes: int | None = None
    devices: int | None = None

    @property
    def residual_bytes(self) -> int | None:
        """The bytes of all residuals; None if unknown."""
        return None if self.kept is None else self.kept.total

    @property
    def wall_seconds(self) -> float | None:
        """The measured time of one call; None if it was not measured."""
        return None if self.profile is None else self.profile.wall_seconds

    @property
    def explained(self) -> float | None:
        """The share of the measured time in which an operation ran."""
        return None if self.profile is None else self.profile.explained


@without_collector()
def source_lines(program: Program | AnyJaxpr) -> Source:
    """Return the cost of each line of the user's source."""
    about = program_signature(program)
    frames = frames_now(about.roots)
    costs = cost_by_side(program)
    counts = EquationsByLine(LineReader(frames)).of(everything(about.jaxpr))
    backward = any(is_some(sides.backward) for sides in costs.lines.values())
    line_type = GradientLine if backward else SourceLine
    by_file: dict[str, list[SourceLine]] = {}
    elsewhere = 0
    for line, count in counts.items():
        if line is None or not line.own:
            elsewhere += count.total()
            continue
        sides = costs.lines.get(line, _NOTHING)
        by_file.setdefault(line.file, []).append(line_type(line.line, count.total(), *sides))
    files = [
        SourceFile(file, frames.path(file), tuple(sorted(lines, key=lambda line: line.number)))
        for file, lines in by_file.items()
    ]
    files.sort(key=lambda file: -sum(line.equations for line in file.lines))
    return Source(
        about.name,
        costs.total,
        tuple(files),
        elsewhere,
        backward,
        costs.unknown,
        left_to_partitioner=left_to_partitioner(program),
    )


def called_package(program: Program | AnyJaxpr) -> str:
    """Return the package that most equations are first called from; "" if no lines are known."""
    about, counts = program_signature(program), Counter[str]()
    frames = frames_now(about.roots)
    for eqn in equations(about.jaxpr):
        if stack := frames.of(eqn):
            counts[frames.package(stack[-1].file)] += 1
    return max(counts, key=counts.__getitem__, default="")


def is_some(group: Group) -> bool:
    """Return True if a group has any cost."""
    return any(type(number) is not int or number for number in group.work)


def with_residuals(
    source: Source, residuals: ResidualOrigins, with_respect_to: tuple[str, ...]
) -> Source:
    """Add to each line the bytes of the residuals that it computes.

    Args:
        source: The lines.
        residuals: The residuals of a gradient. Who reads them, and what it costs to recompute them,
            is not asked: it takes as long as to differentiate.
        with_respect_to: The names of the arguments of this gradient.
    """
    total = arguments = 0
    kept: Counter[str] = Counter()
    for value in residuals.kept:
        size = size_of(value.aval) or 0
        total += size
        if residuals.argument(value):
            arguments += size
        else:
            kept[residuals.place(value).user] += size
    files = []
    for file in source.files:
        lines = (
            replace(line, kept=kept.pop(f"{file.path}:{line.number}", 0)) for line in file.lines
        )
        files.append(replace(file, lines=tuple(lines)))
    totals = Kept(total, arguments, kept.total(), with_respect_to)
    return replace(source, files=tuple(files), kept=totals)


def with_line_times(source: Source, profile: Profile) -> Source:
    """Add to each line its time in a profile of the program."""
    times = {line.name: line for line in profile.lines}
    files = []
    for file in source.files:
        lines = (
            replace(line, measured=times.get(f"{file.path}:{line.number}")) for line in file.lines
        )
        files.append(replace(file, lines=tuple(lines)))
    return replace(source, files=tuple(files), profile=profile)


def with_collectives(source: Source, shardings: Shardings, frames: Frames) -> Source:
    """Add to each line the bytes that each device sends for its collectives.

    Args:
        source: The lines.
        shardings: The collectives and shardings of the partitioned program.
        frames: Chooses the lines of collectives; pass the one that chose the lines of equations.
    """
    sent: Counter[str] = Counter()
    for collective in shardings.collectives:
        sent[frames.place(frames.location_in(collective.frames)).user] += collective.sent_bytes
    files = []
    for file in source.files:
        lines = (
            replace(line, sent_bytes=sent[f"{file.path}:{line.number}"]) for line in file.lines
        )
        files.append(replace(file, lines=tuple(lines)))
    total, devices = shardings.sent_bytes, shardings.devices
    return replace(source, files=tuple(files), sent_bytes=total, devices=devices)


def with_device(source: Source, device: DeviceSpec) -> Source:
    """Return a source with lower bounds of the times of its lines on a device."""

    def timed(line: SourceLine) -> SourceLine:
        return replace(
            line,
            total=with_time(line.total, device),
            forward=with_time(line.forward, device),
            backward=with_time(line.backward, device),
        )

    files = (replace(file, lines=tuple(map(timed, file.lines))) for file in source.files)
    return replace(source, total=with_time(source.total, device), files=tuple(files))


# --- source ---------------------------------------------------------------------------------------
# `source`: the cost of each source line, the bytes it keeps for a backward pass, and its time.
#
# found = jaxprtool.source(program)
# found.files[0].lines[0].total.work.flops


def source(
    program: Program,
    *,
    residuals: bool | None = None,
    argnums: int | Sequence[int] = 0,
    profile: Profile | None = None,
    shardings: Shardings | None = None,
) -> Source:
    """Return the cost of each line of the user's source.

    If no equation has a user's line, the lines are those of the package that is called.

    Args:
        program: A `Program`.
        residuals: Whether to count the bytes that each line keeps for the gradient. By default they
            are counted if the program returns a single float, such as a loss, and is not a
            gradient.
        argnums: The positional arguments of this gradient.
        profile: A profile of the program, `jaxprtool.profile(program)`, whose times are added.
        shardings: The shardings of the program, `jaxprtool.shardings(program)`, whose bytes sent by
            each device are added.

    Raises:
        ArgumentsError: If residuals are counted, and there is no floating-point array in an
            argument of `argnums`.
        UnsupportedError: If residuals are counted and `vjp` raises it.
    """
    annotated = source_lines(program)
    package = "" if annotated.files else called_package(program)
    if not package:
        annotated = _with_residuals(annotated, program, residuals, argnums)
        annotated = annotated if profile is None else with_line_times(annotated, profile)
        return _with_collectives(annotated, program, shardings)
    with frames(current_frame_view().choice, package):
        annotated = replace(source_lines(program), package=package)
        annotated = _with_residuals(annotated, program, residuals, argnums)
        if profile is not None and profile.trace is not None:
            lines = profile_of(profile.trace, profile.name, frames_now(program.roots)).lines
            annotated = with_line_times(annotated, replace(profile, lines=lines))
        return _with_collectives(annotated, program, shardings)


def _with_collectives(annotated: Source, program: Program, shardings: Shardings | None) -> Source:
    if shardings is None:
        return annotated
    return with_collectives(annotated, shardings, frames_now(program.roots))


def _with_residuals(
    annotated: Source, program: Program, residuals: bool | None, argnums: int | Sequence[int]
) -> Source:
    is_loss = gives_one_float(program) and any(map(is_float_aval, program.in_avals))
    if residuals or (residuals is None and is_loss and not annotated.has_backward):
        try:
            program, numbers, names = differentiated(program, argnums)
            gradient = Vjp(argnums=numbers)(program)
        except JaxprToolError as fault:
            if residuals:
                raise
            return replace(annotated, why_not_kept=fault.message)
        kept = ResidualOrigins(gradient["forward"], gradient["backward"])
        annotated = with_residuals(annotated, kept, names)
    return annotated
