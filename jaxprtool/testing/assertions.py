"""The assertions of `jaxprtool.testing`, and snapshots: programs in files beside tests.

Releases trace a function to different equations. So both programs are simplified, and newer
primitives are replaced by older ones. If the programs still differ, for example in the formula of a
derivative, they are run on the same random inputs, unless that is expensive.
"""

from __future__ import annotations

import functools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args

import jax
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.commands.compare.verify import random_runs
from jaxprtool.commands.cost.estimate import LineReader, cost
from jaxprtool.commands.diff.diff import Diff, diff
from jaxprtool.commands.diff.table import diff_text
from jaxprtool.commands.kernels.kernels import kernels
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.commands.record.record import Recording, recorded_compilations
from jaxprtool.commands.record.table import reason_text
from jaxprtool.commands.residuals.policies import residuals
from jaxprtool.commands.shardings.shardings import shardings
from jaxprtool.commands.why.slices import EquationsByLine
from jaxprtool.errors import ArgumentsError, JaxprToolError, ProgramFileError, did_you_mean
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.jaxpr.read import read, release_of
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.formats.lowering import compile_errors_reported, lowered_on
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.dataflow import everything
from jaxprtool.ir.documents import bytes_of, duration, flops_of, in_bytes, plural, with_prefix
from jaxprtool.ir.donation import donations, with_donation_of_call
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.equations import holders
from jaxprtool.ir.expansions import LIVE, without_live_objects
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.rewrite import RewriteRule, Writer, map_equations, rewrite
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.ir.traits import primitives_with
from jaxprtool.jaxcompat import Atom, DType, Jaxpr, JaxprEqn
from jaxprtool.loading.trace import function_name, trace
from jaxprtool.passes import Pipeline
from jaxprtool.recording.recorded_run import Compilation
from jaxprtool.render.terminal.tables import ALL, ROWS
from jaxprtool.testing.places import TestPlace, current_test

#: pytest leaves the frames of this module out of tracebacks.
__tracebackhide__ = True

#: The width of differences, in characters.
_WIDTH = 100

# --- releases -------------------------------------------------------------------------------------
# Compare programs of one function that different JAX releases traced.

_SIMPLER = "-O1"

#: The maximum cost of a program that a test may run.
_LIMITS: dict[Quantity, float] = {"flops": 1e10, "peak_bytes": 1 << 30}


def simplified_diff(before: Program, after: Program) -> Diff:
    """Return the differences of two programs, except those that the JAX release explains."""
    simpler = Pipeline.parse(_SIMPLER)
    programs = (simpler(_in_older_primitives(program)) for program in (before, after))
    return diff(*(program for program in programs if isinstance(program, Program)))


def _in_older_primitives(program: Program) -> Program:
    """Return a program without primitives that older releases lack or trace to others."""

    def lowered(eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        if eqn.primitive.name not in LIVE:
            return None
        try:
            return [without_live_objects(eqn)]
        except JaxprToolError:  # without an older form it is compared as it is
            return None

    jaxpr = map_equations(program.jaxpr, lowered)
    return program.replace(jaxpr=rewrite(jaxpr, _without_unstack))


def _without_unstack(writer: Writer) -> RewriteRule:
    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        if eqn.primitive.name != "unstack":
            return None
        return writer.trace(_rows(eqn.params["axis"]), eqn.invars, eqn)

    return rule


def _rows(axis: int) -> Callable[..., list[object]]:
    """Return a function that slices an array along an axis, as indexing by a number does."""

    def rows(array: jaxcompat.Aval) -> list[object]:
        parts = (lax.slice_in_dim(array, i, i + 1, axis=axis) for i in range(array.shape[axis]))
        return [lax.squeeze(part, (axis,)) for part in parts]

    return rows


def same_results(before: Program, after: Program) -> bool:
    """Run two programs, if they are small, and return True if their finite results are the same."""
    try:
        for program in (before, after):
            measures = measure(program, _LIMITS)
            if any(measures[quantity].amount > most for quantity, most in _LIMITS.items()):
                return False
        return not random_runs(before, {}).compare(after).unproven()
    except JaxprToolError:  # they differ, or cannot be run here: then their differences are shown
        return False


# --- messages -------------------------------------------------------------------------------------
# The messages of failures: the excess, the lines that cost most, and the lines that grew.

#: The maximum number of source lines in a message.
_MOST_PARTS = 5

#: The verb of a message by quantity: `loss takes 3 GFLOP`.
_VERBS: dict[Quantity, str] = {
    "flops": "takes",
    "peak_bytes": "needs",
    "equations": "has",
    "residual_bytes": "keeps",
    "vmem_bytes": "takes",
    "hbm_bytes": "copies",
    "collectives_bytes": "sends",
    "compiles": "compiled",
    "compile_seconds": "compiles for",
}

_WHAT: dict[Quantity, str] = {
    "peak_bytes": " at its peak",
    "residual_bytes": " of residuals",
    "vmem_bytes": " of vector memory",
    "hbm_bytes": " in kernels",
    "collectives_bytes": " from each device",
    "compile_seconds": " of CPU time",
}


def over_budget(
    name: str, measure: QuantityAmount, limit: float, since: str = "", grown: Sequence[Growth] = ()
) -> str:
    """Return the message that a measure exceeds its budget, with the lines that contribute most.

    Args:
        name: The name of the program.
        measure: The amount.
        limit: The budget.
        since: The name of an earlier program: "the snapshot test_step.jaxpr"; "" without one.
        grown: The lines that grew since that program.
    """
    quantity = measure.quantity
    what = _WHAT.get(quantity, "")
    text = amount_text(quantity, measure.amount)
    budget = amount_text(quantity, limit)
    if text == budget:  # the difference is in digits that are not shown
        text, budget = (f"{round(number):,}" for number in (measure.amount, limit))
    by = "" if quantity == "compiles" else _more(measure.amount, limit)
    lines = [f"{name} {_VERBS[quantity]} {text}{what}, but the budget is {budget}{by}"]
    if since:
        lines += grown_text(quantity, since, grown)
    lines += _indented(measure.notes)
    if not measure.parts:
        return "\n".join(lines)
    rows = [
        (part.where or "no line", amount_text(quantity, part.amount), _share(part.amount, measure))
        for part in measure.parts[:_MOST_PARTS]
    ]
    heading = "the largest parts" if measure.parts[_MOST_PARTS:] else "the parts"
    return "\n".join([*lines, f"{heading}:", *_table(rows)])


def grown_text(quantity: Quantity, since: str, grown: Sequence[Growth]) -> list[str]:
    """Return the lines that grew since an earlier program, as text."""
    if not grown:
        return [f"no line grew since {since}"]
    rows = []
    for growth in grown[:_MOST_PARTS]:
        more, before, after = (
            amount_text(quantity, n)
            for n in (growth.after - growth.before, growth.before, growth.after)
        )
        change = f"{before} → {after}" if growth.before else "new"
        rows.append((growth.where or "no line", f"+{more}", change))
    left = len(grown) - _MOST_PARTS
    rest = [f"  … {plural(left, 'more line')}"] if left > 0 else []
    return [f"{_OF[quantity]} grew since {since}:", *_table(rows), *rest]


_OF: dict[Quantity, str] = {
    "flops": "FLOPs",
    "peak_bytes": "bytes at the peak",
    "equations": "equations",
    "residual_bytes": "residuals",
    "vmem_bytes": "vector memory",
    "hbm_bytes": "bytes that kernels copy",
    "collectives_bytes": "bytes sent",
}


def _indented(notes: Sequence[str]) -> list[str]:
    return [f"  {line}" for note in notes for line in note.splitlines()]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _share(amount: float, measure: QuantityAmount) -> str:
    return _percent(amount / measure.amount) if measure.amount else ""


def _more(amount: float, limit: float) -> str:
    """Return by how much an amount exceeds a budget: `, 7.4% more`."""
    if not limit:
        return ""
    ratio = amount / limit
    return f", {_percent(ratio - 1)} more" if ratio < 2 else f": {ratio:,.1f} times as much"


def _percent(share: float) -> str:
    return f"{share:.1%}"


# --- programs -------------------------------------------------------------------------------------
# Parts that the assertions share: the program to check, and errors without inner frames.

P = ParamSpec("P")
R = TypeVar("R")


def as_program(program_or_function: object, args: Sequence[object]) -> Program:
    """Return a Program as it is, or trace a function with its arguments.

    Raises:
        ArgumentsError: If a Program is given with arguments, or the object is neither a Program nor
            a function.
        UserFunctionError: If the function raises.
    """
    if isinstance(program_or_function, Program):
        if args:
            raise ArgumentsError(f"{program_or_function.name} is a program: it takes no arguments")
        return program_or_function
    if not callable(program_or_function):
        kind = type(program_or_function).__name__
        raise ArgumentsError(f"expected a Program or a function, not an object of type {kind}")
    return with_donation_of_call(trace(program_or_function, *args))


def without_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise its failures and usage errors without the frames below it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except JaxprToolError as error:
            if error.hint:
                error.add_note(f"hint: {error.hint}")
            raise error.with_traceback(None)  # noqa: B904  (its own cause is kept)
        except AssertionError as error:
            failure: Any = error
        raise failure.with_traceback(None)

    return called


# --- snapshots ------------------------------------------------------------------------------------
# Snapshots: programs in files beside tests, and how programs differ from them.
#
# A program matches its snapshot if `diff` finds them equivalent: names, lines, and the order of
# independent equations may change. A snapshot of another JAX release is compared by `releases`.

_UPDATE = "pytest --jaxpr-update writes the program as it is now"

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
        program = as_program(program_or_function, args)
        path = self._path(name)
        if self.update:
            update_snapshot(program, path)
        elif failure := snapshot_difference(program, path):
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


def snapshot_difference(
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
        snapshot = read(path)
    except ProgramFileError as error:
        wrote = f", which JAX {release} wrote," if is_other else ""
        return f"the snapshot{wrote} cannot be read: {error.message}"
    all_differences = diff(snapshot, program)
    differences, is_same = all_differences, all_differences.is_equivalent
    if is_other and not is_same:
        differences = simplified_diff(snapshot, program)
        is_same = differences.is_equivalent or same_results(snapshot, program)
    changes = [*_donation_changes(snapshot, program)]
    if is_same and not changes:
        return ""
    by = f", which JAX {release} wrote; this is JAX {jax.__version__}" if is_other else ""
    lines = [f"{name} differs from the snapshot {shown}{by}", *changes]
    if not is_same:
        whole = f"jaxprtool diff {shown} TARGET {ALL}"
        text = diff_text(differences, width, ROWS, whole).plain()
        lines += ["", text, *_growth(snapshot, program, all_differences)]
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


def _growth(before: Program, after: Program, differences: Diff) -> Iterator[str]:
    """Yield the lines whose cost grew."""
    for quantity in _GROWING:
        try:
            grown = grown_lines(before, after, quantity, differences)
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
    if (
        path.exists()
        and release_of(path) == jax.__version__
        and not snapshot_difference(program, path)
    ):
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
    own_path = test.snapshot(test.name)
    for path in sorted(test.folder.glob("*.jaxpr"), key=lambda file: (file != own_path, file)):
        try:
            snapshot = read(path)
        except ProgramFileError:  # the test of that snapshot reports it
            continue
        if (snapshot.name, snapshot.in_avals) == (program.name, program.in_avals):
            return snapshot, f"the snapshot {_shown(path)}"
    return None


def _shown(path: Path) -> str:
    return f"{path.parent.parent.name}/{path.parent.name}/{path.name}"


# --- assertions -----------------------------------------------------------------------------------
# The assertions of `jaxprtool.testing`: each raises one AssertionError, with the user's lines.

#: The most lines that a failure lists.
_MOST = 10


@without_frames
def assert_budget(
    program_or_function: object,
    /,
    *args: object,
    flops: float | str | None = None,
    peak_bytes: float | str | None = None,
    equations: int | None = None,
    compiles: int | None = None,
    collectives_bytes: float | str | None = None,
    residual_bytes: float | str | None = None,
    vmem_bytes: float | str | None = None,
    hbm_bytes: float | str | None = None,
    compile_seconds: float | str | None = None,
) -> None:
    """Assert that a program stays within budgets.

    All but `compiles`, `compile_seconds` and `collectives_bytes` are estimates from the jaxpr: they
    are the same on every machine. If a snapshot of the program is in the test's file, a failure
    names the lines that grew since.

    Args:
        program_or_function: A `Program`, or a function.
        args: The arguments of the function, as `jaxprtool.trace` takes them.
        flops: The maximum number of FLOPs, such as 3e9 or `"3 GFLOP"`, as `jaxprtool cost` counts
            them.
        peak_bytes: The maximum memory in use at once, in bytes or as `"16MiB"`; see `jaxprtool
            memory`.
        equations: The maximum number of equations, at every depth.
        compiles: The maximum number of programs that JAX compiles when the function is called with
            these arguments, which must be values.
        collectives_bytes: The maximum number of bytes that each device sends; see `jaxprtool
            shardings`.
        residual_bytes: The maximum number of bytes that the gradient keeps from the forward to the
            backward pass; see `jaxprtool residuals`.
        vmem_bytes: The maximum vector memory that a Pallas kernel takes; see `jaxprtool kernels`.
        hbm_bytes: The maximum number of bytes that all Pallas kernels copy; see `jaxprtool
            kernels`.
        compile_seconds: The maximum CPU time in which XLA compiles it, such as 2.5 or `"2.5 s"`, on
            this machine. It passes if it is at most 25 % more.

    Raises:
        AssertionError: If a budget is exceeded. The message has the lines that cost most.
        ArgumentsError: If no budget is given, or one cannot be read.
    """
    budgets: dict[Quantity, Any] = {
        "flops": flops,
        "peak_bytes": peak_bytes,
        "equations": equations,
        "residual_bytes": residual_bytes,
        "vmem_bytes": vmem_bytes,
        "hbm_bytes": hbm_bytes,
        "collectives_bytes": collectives_bytes,
        "compiles": compiles,
        "compile_seconds": compile_seconds,
    }
    limits = {q: amount_of(q, value) for q, value in budgets.items() if value is not None}
    if not limits:
        raise ArgumentsError("assert_budget needs a budget", f"write one of {', '.join(budgets)}")
    # With `compiles` alone the function is not traced: it may be a whole training loop.
    traced = limits.keys() - {"compiles"}
    program = as_program(program_or_function, args) if traced else None
    call = _call(program_or_function, args) if "compiles" in limits else None
    measures = measure(program, limits, arguments=_placed(args), call=call)
    over = [measured for q, measured in measures.items() if exceeds(measured, limits[q])]
    if over:
        name = function_name(program_or_function) if program is None else program.name
        raise AssertionError("\n\n".join(_over_budget(name, program, over, limits)))


def _over_budget(
    name: str, program: Program | None, over: list[QuantityAmount], limits: Mapping[Quantity, float]
) -> Iterator[str]:
    """Yield a message for each measure that exceeds its budget."""
    since = None if program is None else earlier(program, current_test())
    for measured in over:
        grown: dict[str, Any] = {}
        if since is not None and program is not None and has_growth(measured.quantity):
            grown = _grown(*since, program, measured.quantity)
        yield over_budget(name, measured, limits[measured.quantity], **grown)


def _call(function: object, args: tuple[object, ...]) -> Callable[[], object] | None:
    """Return the call to count compilations in. Raises ArgumentsError for types as arguments."""
    if isinstance(function, Program) or not callable(function):
        return None
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        hint = "give arrays; types are enough for the other budgets"
        raise ArgumentsError("compiles calls the function, so its arguments must be values", hint)
    return lambda: function(*args)


def _placed(args: tuple[object, ...]) -> list[object]:
    """Return the flat arguments if some lie on several devices, otherwise []."""
    leaves = jax.tree.leaves(args)
    several = (len(leaf.sharding.device_set) > 1 for leaf in leaves if isinstance(leaf, jax.Array))
    return leaves if any(several) else []


def _grown(before: Program, since: str, after: Program, quantity: Quantity) -> dict[str, Any]:
    try:
        return {"since": since, "grown": grown_lines(before, after, quantity)}
    except JaxprToolError:  # the snapshot cannot be measured, as on fewer devices
        return {}


@without_frames
def assert_no(program_or_function: object, banned: object, /, *args: object) -> None:
    """Assert that a program has no equation of a primitive, or no value of a dtype.

    Args:
        program_or_function: A `Program`, or a function.
        banned: The name of a primitive, `"sort"`, or a dtype, `jnp.float64` or `"f64"`. Bodies of
            loops, branches and calls are searched too.
        args: The arguments of the function, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If there is one. The message has the lines.
        ArgumentsError: If JAX knows no such primitive or dtype.
    """
    wanted = require_bannable(banned)
    program = as_program(program_or_function, args)
    if places := banned_places(program, wanted):
        raise AssertionError(banned_text(program.name, wanted, places))


def banned_places(program: Program, wanted: str | DType) -> Counter[str]:
    """Count the equations of a primitive, or the values of a dtype, by source line."""
    about = program_signature(program)
    frames, places = frames_now(about.roots), Counter[str]()
    if not isinstance(wanted, str):
        values = [*zip(about.jaxpr.invars, about.arguments, strict=True)]
        values += zip(about.jaxpr.constvars, about.constants, strict=True)
        has = [value for var, value in values if getattr(var.aval, "dtype", None) == wanted]
        places.update(f"{value.name}: {value.type}" for value in has)
    for around in _nested(about.jaxpr):
        eqn = around[-1]
        if _is_banned(eqn, wanted):
            places[f"{frames.line_of(around) or 'unknown line'}: {eqn.primitive.name}"] += 1
    return places


def require_bannable(banned: object) -> str | DType:
    """Return a dtype, or the name of a primitive. Raises ArgumentsError for another object."""
    if not isinstance(banned, str):
        try:
            return np.dtype(banned)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            shown = f"an object of type {type(banned).__name__}"
            raise ArgumentsError(f"expected a primitive or a dtype, not {shown}") from None
    dtypes = array_dtypes()
    if banned in dtypes:
        return dtypes[banned]
    known = {*jaxcompat.registered_primitives(), *primitives_with(lambda traits: True)}
    if banned not in known:
        hint = did_you_mean(banned, [*known, *dtypes])
        raise ArgumentsError(f"JAX has no primitive or dtype '{banned}'", hint)
    return banned


def banned_text(name: str, wanted: str | DType, places: Counter[str]) -> str:
    """Return the message that a program has banned equations or values, with their lines."""
    if isinstance(wanted, str):
        count = plural(places.total(), f"{wanted} equation")
    else:
        count = f"{plural(places.total(), 'value')} of dtype {jaxcompat.short_dtype_name(wanted)}"
    lines = [f"{name} has {count}:"]
    for where, times in [*places.items()][:_MOST]:
        lines.append(f"  {where}" + (f", {times:,} times" if times > 1 else ""))
    left = len(places) - _MOST
    return "\n".join([*lines, *([f"  … {left:,} more"] if left > 0 else [])])


def _is_banned(eqn: JaxprEqn, wanted: str | DType) -> bool:
    if isinstance(wanted, str):
        return bool(eqn.primitive.name == wanted)
    return any(getattr(var.aval, "dtype", None) == wanted for var in eqn.outvars)


def _nested(jaxpr: Jaxpr) -> Iterator[list[JaxprEqn]]:
    """Yield each equation, preceded by those around it; those of a shared body once."""
    seen, todo = {jaxpr}, [(jaxpr, list[JaxprEqn]())]
    while todo:
        outer, around = todo.pop()
        inside = {id(eqn): bodies for eqn, bodies in holders(outer)}
        for eqn in outer.eqns:
            yield [*around, eqn]
            for _, body in inside.get(id(eqn), ()):
                if body not in seen:
                    seen.add(body)
                    todo.append((body, [*around, eqn]))


@without_frames
def assert_equivalent(p: object, q: object, /, *args: object) -> None:
    """Assert that two programs compute the same by the same equations.

    Names, source lines, and the order of independent equations do not matter.

    Args:
        p: A `Program`, or a function.
        q: The program to compare it with, or a function.
        args: The arguments of the functions, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If they differ. The message has the differences, as `jaxprtool diff` shows
            them.
    """
    programs = [side if isinstance(side, Program) else as_program(side, args) for side in (p, q)]
    differences = diff(*programs)
    if not differences.is_equivalent:
        raise AssertionError(diff_text(differences, _WIDTH, None).plain())


@without_frames
def assert_donated(function: object, /, *args: object) -> None:
    """Assert that a function donates arguments, and that results reuse the memory of all of them.

    Args:
        function: A function under `jax.jit`, `nnx.jit` or `eqx.filter_jit` that donates arguments,
            or the `Program` of a function under `jax.jit`.
        args: Its arguments, as `jaxprtool.trace` takes them.

    Raises:
        AssertionError: If no argument is donated, or one cannot be used. The message has its path
            and the reason.
    """
    program = as_program(function, args)
    if failure := donation_failure(program, program.name):
        raise AssertionError(failure)


def donation_failure(program: Program, name: str) -> str:
    """Return a message if a program donates nothing, or cannot use a donated argument, else ""."""
    donated = donations(program)
    if not donated.by_result and not donated.unused:
        hint = "jax.jit takes donate_argnums or donate_argnames"
        return f"{name} donates no argument: {hint}"
    if donated.unused:
        count = plural(len(donated.unused), "donated argument")
        lines = [
            f"  {donation.argument}, {donation.type}: {donation.reason}"
            for donation in donated.unused
        ]
        return "\n".join([f"{name} cannot use {count}:", *lines])
    return ""


# --- compiles -------------------------------------------------------------------------------------
# Limit how many programs a block compiles; failures have the reasons of `jaxprtool.record`.


@dataclass(frozen=True, repr=False)
class CompileLimit:
    """A `with` block that may compile a limited number of programs.

    Attributes:
        recording: The recording, which began with the test.
        at_most: The maximum number of programs.
        before: The number of programs that the test had compiled before the block.
    """

    recording: Recording
    at_most: float
    before: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            compiled = compile_measure(self.recording.compilations[self.before :])
            if compiled.amount > self.at_most:
                raise AssertionError(over_budget("the block", compiled, self.at_most))


@dataclass(frozen=True, repr=False)
class CompileCounter:
    """The fixture `jax_compiles`, which records from the start of a test.

    A reason compares a compilation with all earlier ones of the test.

    Attributes:
        recording: The recording.
    """

    recording: Recording

    @without_frames
    def __call__(self, *, at_most: int) -> CompileLimit:
        """Return a context manager that limits the number of programs that a block compiles.

        If the block compiles more, an AssertionError with the reasons is raised at its end.

        Args:
            at_most: The maximum number of programs. Single operations outside of `jit` do not
                count, nor do programs that JAX has compiled before.

        Raises:
            ArgumentsError: If `at_most` is not a number.
        """
        return CompileLimit(
            self.recording, amount_of("compiles", at_most), len(self.recording.compilations)
        )


@contextmanager
def counting_compiles() -> Iterator[CompileCounter]:
    """Record what JAX compiles in a `with` block."""
    with tempfile.TemporaryDirectory() as folder, recorded_compilations(folder) as recording:
        yield CompileCounter(recording)


# --- budgets --------------------------------------------------------------------------------------
# Measure the quantities of budgets by source line, and find lines that grew between programs.
#
#     measure(program, ["flops", "peak_bytes"])["flops"].amount
#     grown_lines(before, after, "flops")[0].where
#
# `jaxprtool.testing` compares the amounts with those that a test allows.

#: The quantities that a budget may limit.
Quantity: TypeAlias = Literal[
    "flops",
    "peak_bytes",
    "equations",
    "residual_bytes",
    "vmem_bytes",
    "hbm_bytes",
    "collectives_bytes",
    "compiles",
    "compile_seconds",
]

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


#: The part of a budget by which measured times may exceed it, as CPU times vary by this much.
_TOLERANCE = 0.25

#: XLA compiles a program that takes less CPU time than this again, and the least time counts.
_SHORT, _COMPILATIONS = 1.0, 3


@dataclass(frozen=True)
class AmountPart:
    """The part of an amount that comes from one place.

    Attributes:
        where: The user's line, `model.py:9`, or the path of an argument; "" if it is unknown.
        amount: The part.
    """

    where: str
    amount: float


@dataclass(frozen=True)
class QuantityAmount:
    """The amount of a quantity that a program takes.

    Attributes:
        quantity: The quantity.
        amount: The amount.
        parts: The amount by place, the largest part first.
        notes: A sentence for each compilation with its reason, for "compiles"; what is not counted,
            for "peak_bytes".
    """

    quantity: Quantity
    amount: float
    parts: tuple[AmountPart, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Growth:
    """A place whose part of an amount grew from one program to another.

    Attributes:
        where: The place in the second program, as in `AmountPart`.
        before: Its part in the first program; 0 if it is new.
        after: Its part in the second program.
    """

    where: str
    before: float
    after: float


def measure(
    program: Program | None,
    quantities: Iterable[str],
    *,
    arguments: Sequence[object] = (),
    call: Callable[[], object] | None = None,
) -> dict[Quantity, QuantityAmount]:
    """Measure quantities of a program.

    Args:
        program: The program; None if only compilations are counted.
        quantities: Their names: "flops", "peak_bytes" and "equations" as `cost`, `memory` and
            `show --stats` state them, "residual_bytes" as `residuals` does, "vmem_bytes" and
            "hbm_bytes" as `kernels` does, "collectives_bytes" for the bytes that each device sends,
            as `shardings` does, "compiles", and "compile_seconds" for the CPU time of XLA.
        arguments: The flat arguments, if they lie on several devices, for "collectives_bytes" and
            "compile_seconds".
        call: Calls the function, for "compiles": the programs that JAX compiles in this call are
            counted, without single operations outside of `jit`.

    Returns:
        The measures by quantity, in the given order.

    Raises:
        ArgumentsError: If a name is unknown, sizes are symbolic, or a required argument is missing.
        UnsupportedError: As in `memory`, `residuals` and `shardings`.
    """
    measures: dict[Quantity, QuantityAmount] = {}
    for name in quantities:
        quantity = quantity_of(name)
        if quantity == "compiles":
            if call is None:
                raise ArgumentsError("compiles needs a function to call, not a program")
            measures[quantity] = _compiles(call)
        elif program is None:
            raise ArgumentsError(f"{quantity} needs a program")
        elif quantity == "collectives_bytes":
            measures[quantity] = _collectives(program, arguments)
        elif quantity == "compile_seconds":
            measures[quantity] = _compile_seconds(program, arguments)
        else:
            measures[quantity] = _MEASURES[quantity](program)
    return measures


def exceeds(measured: QuantityAmount, limit: float) -> bool:
    """Return True if an amount is over its budget, also by more than times may vary."""
    is_time = measured.quantity == "compile_seconds"
    return measured.amount > limit * (1 + _TOLERANCE if is_time else 1)


def has_growth(quantity: Quantity) -> bool:
    """Return True if an amount can be compared by line with that of an earlier program."""
    return quantity not in ("compiles", "compile_seconds")


def quantity_of(name: str) -> Quantity:
    """Return the quantity of a name. Raises ArgumentsError, with the nearest, if it is unknown."""
    for quantity in QUANTITIES:
        if name == quantity:
            return quantity
    hint = did_you_mean(name, QUANTITIES) or f"write one of {', '.join(QUANTITIES)}"
    raise ArgumentsError(f"there is no budget of '{name}'", hint)


def amount_of(quantity: Quantity, value: object) -> float:
    """Return the amount that a budget states: a number, `"16MiB"`, `"3 GFLOP"` or `"2.5 s"`.

    Raises:
        ArgumentsError: If the value is not an amount of this quantity.
    """
    if isinstance(value, str) and quantity == "flops":
        return flops_of(value)
    if isinstance(value, str) and quantity.endswith("bytes"):
        return bytes_of(value)
    if isinstance(value, str) and quantity == "compile_seconds":
        if (match := _SECONDS.fullmatch(value)) is None:
            raise ArgumentsError(f"{value!r} is not a time", 'write "2.5 s", or a number')
        return float(match[1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ArgumentsError(
            f"{value!r} is not a budget of {quantity}", "write a number, 0 or more"
        )
    return value


_SECONDS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*s\s*")


def amount_text(quantity: Quantity, amount: float) -> str:
    """Return an amount with its unit: `1.5 MiB`, `3.0 GFLOP`, `12 equations`."""
    if quantity.endswith("bytes"):
        return in_bytes(int(amount))
    if quantity == "flops":
        return with_prefix(amount, "FLOP") if amount >= 1000 else f"{amount:,} FLOP"
    if quantity == "compile_seconds":
        return duration(amount)
    noun = "program" if quantity == "compiles" else "equation"
    return plural(int(amount), noun)


# --- measures ---------------------------------------------------------------------------------


def _flops(program: Program) -> QuantityAmount:
    estimate = cost(program)
    by_line: Counter[str] = Counter()
    for group in estimate.groups:
        by_line[group.name] += _number("flops", group.work.flops)
    return _measure("flops", _number("flops", estimate.total.work.flops), by_line)


def _peak_bytes(program: Program) -> QuantityAmount:
    estimate = memory(program)
    by_place: Counter[str] = Counter()
    for live in estimate.live:
        by_place[_own(live.source) or live.name] += live.bytes
    measure = _measure("peak_bytes", estimate.peak_bytes, by_place)
    left_out = ", ".join(estimate.unknown)
    return replace(measure, notes=(f"not counted inside: {left_out}",)) if left_out else measure


def _equations(program: Program) -> QuantityAmount:
    about = program_signature(program)
    frames = frames_now(about.roots)
    counts = EquationsByLine(LineReader(frames)).of(everything(about.jaxpr))
    by_line: Counter[str] = Counter()
    for line, count in counts.items():
        by_line["" if line is None else f"{frames.path(line.file)}:{line.line}"] += count.total()
    return _measure("equations", by_line.total(), by_line)


def _residual_bytes(program: Program) -> QuantityAmount:
    kept = residuals(program)
    by_place: Counter[str] = Counter()
    for residual in kept.residuals:
        by_place[residual.argument or _own(residual.source)] += residual.bytes or 0
    return _measure("residual_bytes", _number("residual_bytes", kept.total_bytes), by_place)


def _vmem_bytes(program: Program) -> QuantityAmount:
    report = kernels(program)
    by_line: Counter[str] = Counter()
    for row in report.kernels:
        by_line[_own(row.place)] = max(by_line[_own(row.place)], row.vmem_bytes or 0)
    return _measure("vmem_bytes", report.vmem_bytes, by_line)


def _hbm_bytes(program: Program) -> QuantityAmount:
    report = kernels(program)
    by_line: Counter[str] = Counter()
    for row in report.kernels:
        by_line[_own(row.place)] += _number("hbm_bytes", row.work.bytes * row.calls)
    return _measure("hbm_bytes", by_line.total(), by_line)


_MEASURES: Mapping[str, Callable[[Program], QuantityAmount]] = {
    "flops": _flops,
    "peak_bytes": _peak_bytes,
    "equations": _equations,
    "residual_bytes": _residual_bytes,
    "vmem_bytes": _vmem_bytes,
    "hbm_bytes": _hbm_bytes,
}


def _collectives(program: Program, arguments: Sequence[object]) -> QuantityAmount:
    facts = shardings(program, arguments)
    by_line: Counter[str] = Counter()
    for collective in facts.collectives:
        by_line[_own(collective.line)] += collective.sent_bytes
    return _measure("collectives_bytes", facts.sent_bytes, by_line)


def _compile_seconds(program: Program, arguments: Sequence[object]) -> QuantityAmount:
    times: list[float] = []
    program = with_contents(program)
    with compiled_afresh():
        while not times or (min(times) < _SHORT and len(times) < _COMPILATIONS):
            lowered = lowered_on(program, arguments)
            start = time.process_time()
            with compile_errors_reported(program, "compiled"):
                lowered.compile()
            times.append(time.process_time() - start)
    return _measure("compile_seconds", min(times), Counter())


def _compiles(call: Callable[[], object]) -> QuantityAmount:
    with tempfile.TemporaryDirectory() as folder:
        with recorded_compilations(folder) as recording:
            call()
        return compile_measure(recording.compilations)


def compile_measure(compilations: Iterable[Compilation]) -> QuantityAmount:
    """Return recorded compilations as a measure, without what was lowered but not compiled."""
    compiled = [
        compilation for compilation in compilations if compilation.compile_seconds is not None
    ]
    by_line = Counter[str](compilation.line for compilation in compiled)
    return _measure("compiles", len(compiled), by_line, map(compilation_text, compiled))


def compilation_text(compilation: Compilation) -> str:
    """Return a line on a compilation, its reasons and remedies: `step@2 at train.py:9: x: …`."""
    at = f" at {compilation.line}" if compilation.line else ""
    why = "; ".join(map(reason_text, compilation.reasons)) or "the first one seen"
    advice = dict.fromkeys(reason.advice for reason in compilation.reasons if reason.advice)
    return "\n  advice: ".join([f"{compilation.name}{at}: {why}", *advice])


def _number(quantity: str, number: Any) -> int:
    if number is None or jaxcompat.is_symbolic_dimension(number):
        hint = "trace the function with sizes that are numbers, or specialize the program"
        raise ArgumentsError(f"a budget of {quantity} needs sizes that are numbers", hint)
    return int(number)


def _own(line: str) -> str:
    """Return the user's line, without the library's line behind it."""
    return line.partition(BEHIND)[0]


def _measure(
    quantity: Quantity, amount: float, by_place: Counter[str], notes: Iterable[str] = ()
) -> QuantityAmount:
    parts = (AmountPart(where, number) for where, number in by_place.most_common() if number)
    return QuantityAmount(quantity, amount, tuple(parts), tuple(notes))


# --- growth -----------------------------------------------------------------------------------


def grown_lines(
    before: Program, after: Program, quantity: Quantity, differences: Diff | None = None
) -> tuple[Growth, ...]:
    """Return the places whose part of a quantity grew, the one that grew most first.

    Lines correspond if most of their equations do, so that lines may have moved in the file.

    Args:
        before: The earlier program.
        after: The later program.
        quantity: The quantity to compare, one that `has_growth`.
        differences: The diff of the two, if it is known.

    Raises:
        ArgumentsError: If sizes are symbolic.
        UnsupportedError: As in `measure` and `diff`.
    """
    lines = _moved_lines(before, after, diff(before, after) if differences is None else differences)
    old, new = (measure(program, [quantity])[quantity] for program in (before, after))
    was: Counter[str] = Counter()
    for part in old.parts:
        was[lines.get(part.where, part.where)] += part.amount  # type: ignore[assignment]
    grown = [Growth(p.where, was[p.where], p.amount) for p in new.parts if p.amount > was[p.where]]
    return tuple(sorted(grown, key=lambda growth: growth.before - growth.after))


def _moved_lines(before: Program, after: Program, differences: Diff) -> dict[str, str]:
    """Return the line in the second program of each line in the first that has one."""
    frames = frames_now(before.roots), frames_now(after.roots)
    votes: dict[str, Counter[str]] = {}
    for body in differences.bodies:
        around = tuple([pair[which] for pair in body.path] for which in (0, 1))
        for pair in body.equations:
            old, new = (
                _own(frames[which].line_of([*around[which], pair[which]])) for which in (0, 1)
            )
            votes.setdefault(old, Counter())[new] += 1
    moved = {old: counts.most_common(1)[0][0] for old, counts in votes.items() if old}
    # A line whose equations have no counterpart is gone: its number may be that of another line.
    return {old: f"{old} (before)" for old in _lines(before) - moved.keys()} | moved


def _lines(program: Program) -> set[str]:
    return {part.where for part in _equations(program).parts if part.where}
