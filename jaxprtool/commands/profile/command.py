"""`jaxprtool profile`: the measured time of a function, by the user's own lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, RUN, Panel
from jaxprtool.cli.session import (
    Session,
    command,
    only_program,
    printed_by_functions,
    ready,
    require_device,
)
from jaxprtool.errors import OutputError, TargetError, UnsupportedError

if TYPE_CHECKING:
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.cli.session import Ready
    from jaxprtool.commands.profile.lines import Profile
    from jaxprtool.ir.program import Program

_MEASURED = Panel("Time")

#: The groupings of the time.
By = Literal["line", "scope", "function", "op", "primitive"]

ByOption = Annotated[
    By,
    _MEASURED.choice(
        "--by", By, "Group by source line, scope, function, compiled operation or primitive."
    ),
]
_Calls = Annotated[
    int | None,
    RUN.option(
        "--calls",
        "N",
        "Number of measured calls. Default: up to 20 within a second, or 1 if the function has "
        "effects.",
        min=1,
    ),
]
_Estimate = Annotated[
    bool,
    RUN.flag("--estimate", "If the profiler records nothing on the device, show `cost` instead."),
]
PprofOption = Annotated[
    str | None,
    OUTPUT.option(
        "--pprof", "FILE.pb.gz", "Also write a profile by call stack, for pprof and speedscope."
    ),
]
PerfettoOption = Annotated[
    str | None,
    OUTPUT.option("--perfetto", "FILE.json", "Also write the operations over time, for Perfetto."),
]
OutOption = Annotated[
    str | None,
    options.out_option("Also write a page with the source beside the table.", "FILE.html"),
]


@command
def profile_command(
    session: Session,
    types: options.Types = None,
    by: ByOption = "line",
    calls: _Calls = None,
    estimate: _Estimate = False,
    backend: options.Backend = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    no_cache: options.NoCache = False,
    pprof: PprofOption = None,
    perfetto: PerfettoOption = None,
    out: OutOption = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Time a compiled function by your lines, with JAX's profiler.

    TARGET may also be a folder that `jax.profiler.trace` wrote, or an .xplane.pb file in it.

    [bold]Examples[/]

      jaxprtool profile samples/transformer.py:loss -p grad
      jaxprtool profile samples/transformer.py:loss -p grad --by scope
      jaxprtool profile samples/transformer.py:loss -p grad -o time.html
    """
    most = options.row_limit(top, all)
    for option, path in (("--pprof", pprof), ("--perfetto", perfetto), ("-o", out)):
        output.refuse_stdout(option, path, "profile")
    if out is not None and not output.is_page(out):
        raise OutputError(f"profile writes a page, but -o names '{out}'", "name it FILE.html")
    session.start(not no_cache)
    if _is_trace(session.target):
        from jaxprtool.commands.profile.profile import profile_in

        _refuse_for_trace(session, types, calls)
        result = profile_in(session.target)
    else:
        require_device(session.function, backend, device)
        traced = session.traced(runs=True, types=types, symbolic=True)
        program = only_program("profile takes", session.programs(traced))
        prepared = ready(traced.given_to(program), seed, backend, device)
        measured = _measured(session, prepared, calls, json, estimate)
        prepared.note_random(session.target)
        if measured is None:
            _write_estimate(prepared.program, most, json)
            return
        result = measured
    write_profile(result, by, most, json, pprof, perfetto, out)


def _is_trace(target: str) -> bool:
    from jaxprtool.execute.profile import SUFFIX

    return target.endswith(SUFFIX) or os.path.isdir(target)


def _refuse_for_trace(session: Session, types: str | None, calls: int | None) -> None:
    """Raise TargetError for an option that says what to run or how, if TARGET is a profile."""
    settings = {"-p": session.passes, "--types": types, "--calls": calls}
    names = [*session.function.arguments(), *(name for name, value in settings.items() if value)]
    if names:
        raise TargetError(f"{names[0]} does not apply to '{session.target}', which is a profile")


def _measured(
    session: Session, prepared: Ready, calls: int | None, json: bool, estimate: bool
) -> Profile | None:
    """Return the profile of a program; with `estimate`, None instead of an empty one."""
    from jaxprtool.commands.profile.lines import NoOperationsError

    try:
        return profiled(prepared, calls, json, session.on_progress)
    except NoOperationsError as error:
        if not estimate:
            hint = "add --estimate for the estimate of `cost` instead"
            raise NoOperationsError(error.message, hint) from None
        output.note(f"{error.message}; this is an estimate")
        return None


def profiled(
    prepared: Ready, calls: int | None, json: bool, on_progress: Callable[[str], object]
) -> Profile:
    """Run a program under the profiler, and return its profile."""
    from jaxprtool.commands.profile.profile import profile_on

    with printed_by_functions(json):
        return profile_on(
            prepared.program, prepared.filled.arguments, prepared.device, calls, on_progress
        )


def _write_estimate(program: Program, top: int | None, json: bool) -> None:
    """Write the cost of a program, as `cost` does."""
    from jaxprtool.commands.cost.estimate import cost
    from jaxprtool.commands.cost.table import cost_table

    estimate = cost(program)
    if json:
        from jaxprtool.commands.cost.table import CostDocument

        output.write_json(CostDocument(estimate.total, estimate.groups, [estimate]))
    else:
        output.write_rendered(cost_table(estimate, output.width(), top, None))


def write_profile(
    result: Profile,
    by: By,
    top: int | None,
    json: bool,
    pprof: str | None,
    perfetto: str | None,
    out: str | None,
) -> None:
    """Write a profile to stdout and to files; warn if much of its time is not explained."""
    from jaxprtool.commands.profile.table import profile_table

    if pprof is not None:
        with output.written_file(pprof) as file:
            file.write(_stacks(result))
    if perfetto is not None:
        from jaxprtool.commands.profile.profile import perfetto_of_profile

        with output.written_file(perfetto) as file:
            file.write(perfetto_of_profile(result).encode())
    if out is not None:
        from jaxprtool.commands.profile.table import profile_page

        output.write_page(profile_page(result), out)
    if json:
        output.write_json(result)
    else:
        output.write_rendered(profile_table(result, output.width(), by, top))
    warn_unexplained(result)


def warn_unexplained(result: Profile) -> None:
    """Print a warning if much of the time of a profile is not that of operations."""
    from jaxprtool.commands.profile.lines import TRUSTED

    if result.explained < TRUSTED:
        kinds = [part.kind for part in result.own if part.kind in UNEXPLAINED][:2]
        output.warning(
            f"operations ran in only {result.explained:.0%} of the time; the rest is "
            f"{' and '.join(kinds)}"
        )


#: The kinds of time in which no operation runs.
UNEXPLAINED = ("between operations", "dispatch", "compiling", "idle")


def _stacks(result: Profile) -> bytes:
    """Return the time by call stack, as a profile."""
    from jaxprtool.formats.pprof import Sample, pprof_profile

    samples = [
        Sample(frames, primitive, (round(seconds * 1e9),))
        for (frames, primitive), seconds in result.stacks.items()
    ]
    return pprof_profile(result.name, [("time", "nanoseconds")], samples)


# --- measured -------------------------------------------------------------------------------------
# `--measure`: measured times in the output of other commands.

Measure = Annotated[
    bool,
    RUN.flag(
        "--measure", "Compile and run the program as `profile` does, and show the measured times."
    ),
]


def measured_profile(
    inputs: RunInputs,
    target: str,
    seed: int,
    backend: str | None,
    device: int | None,
    json: bool,
    on_progress: Callable[[str], object],
) -> Profile:
    """Run a program under the profiler; print which arguments are random, and warnings.

    Raises:
        UnsupportedError: If it cannot be compiled, or the profiler records nothing on the device.
    """
    from jaxprtool.commands.profile.lines import NoOperationsError

    prepared = ready(inputs, seed, backend, device)
    try:
        result = profiled(prepared, None, json, on_progress)
    except NoOperationsError as error:
        raise UnsupportedError(error.message, "leave out --measure") from None
    prepared.note_random(target)
    warn_unexplained(result)
    return result


def require_measure(measure: bool, backend: str | None, device: int | None = None) -> None:
    """Raise OutputError for a device to run on if nothing is run."""
    if not measure and (backend is not None or device is not None):
        option = "--device" if backend is None else "--backend"
        raise OutputError(f"{option} needs --measure, which runs the program", "add --measure")
