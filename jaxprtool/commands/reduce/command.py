"""`jaxprtool reduce`: reduce a program to the smallest one for which a check still holds."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, RUN, Panel
from jaxprtool.cli.session import Session, command, only_program
from jaxprtool.commands.show.command import write_pages
from jaxprtool.errors import JaxprToolError, OutputError
from jaxprtool.files import STDOUT, check_path
from jaxprtool.formats.emission import Emission, format_of

if TYPE_CHECKING:
    from jaxprtool.commands.reduce.checks import Check
    from jaxprtool.commands.reduce.reduction import Reduction

_KEPT = Panel("Check")
_CheckText = Annotated[
    str | None,
    _KEPT.option(
        "--check",
        "CHECK",
        "crash; timeout SECONDS; nan; mismatch -p PIPELINE; mismatch --backends A,B; error TEXT; "
        "or a command that exits with 0 if the check holds, with {} for the program's file, "
        "{mlir} for its StableHLO.",
    ),
]
_Jobs = Annotated[
    int | None,
    RUN.option("--jobs", "N", "Number of parallel tries. Default: the number of cores.", min=1),
]
_Timeout = Annotated[
    float | None,
    RUN.option(
        "--timeout",
        "SECONDS",
        "Time limit of a try. Default: three times the time of the first, at least 10 s.",
        min=0.1,
    ),
]
_Memory = Annotated[float | None, RUN.option("--memory", "GIB", "Memory limit of a try.", min=0.1)]
_Out = Annotated[
    str | None,
    OUTPUT.option(
        "-o, --output",
        "FILE",
        "Write the program (.jaxpr, .mlir), and a script FILE.py next to it that shows the fault.",
    ),
]


@command
def reduce_command(
    session: Session,
    types: options.Types = None,
    check: _CheckText = None,
    jobs: _Jobs = None,
    timeout: _Timeout = None,
    memory: _Memory = None,
    seed: options.Seed = 0,
    out: _Out = None,
    json: options.Json = False,
) -> None:
    """Shrink a function while a check holds, to reproduce a fault.

    Each try runs in its own process. TARGET may be the folder of `opt --reproducer` or `run
    --reproducer`. Ctrl-C ends the search with the smallest program so far.

    [bold]Examples[/]

      jaxprtool reduce samples/rnn.py:loss --check "grep -q tanh {}" -o small.jaxpr

      jaxprtool reduce samples/rnn.py:loss --check "grep -q hlo.tanh {mlir}" -o small.mlir
    """
    if out is not None:
        _check_output(out)  # before the search, which may take minutes
    if os.path.isdir(session.target):
        failure = options.read_reproducer(session.target)
        function = session.function
        tracing = replace(function.tracing, x64=function.tracing.x64 or failure.x64)
        session = replace(
            session,
            function=replace(function, target=failure.program, tracing=tracing),
            plugin=[*(session.plugin or ()), *failure.plugins],
        )
        check = check or failure.check
    if check is None:
        raise JaxprToolError("--check is missing", "add --check crash, or see --help")
    session.start()
    from jaxprtool.commands.reduce import checks
    from jaxprtool.commands.reduce.reduction import reduce
    from jaxprtool.execute.running.arrays import fill_arguments

    session.function.import_module()
    wanted = checks.parse_check(check, seed)
    traced = session.traced(wanted.reads_values, types=types, symbolic=True)
    try:
        programs = session.programs(traced)
    except JaxprToolError:
        if not isinstance(wanted, checks.ErrorCheck) or wanted.pipelines:
            raise
        # The passes fail: reduce the program before them.
        check = f"{check} -p {shlex.quote(str(session.passes))}"
        wanted = checks.parse_check(check, seed)
        programs = [(traced.program.name, traced.program)]
    inputs = traced.given_to(only_program("reduce takes", programs))
    program, values = inputs.program, _arrays(inputs.values)
    if wanted.reads_values:
        filled = fill_arguments(program, inputs.values, seed)
        values = dict(zip(program.arg_names, filled.arguments, strict=True))
    reduction = reduce(
        program,
        check,
        values=values,
        seed=seed,
        jobs=jobs or os.cpu_count() or 1,
        seconds=timeout,
        memory=None if memory is None else int(memory * 2**30),
        plugins=[os.path.abspath(p) if os.path.exists(p) else p for p in session.plugin or ()],
        on_progress=session.on_progress,
    )
    if out is not None:
        session.on_progress("writing")
        _write(reduction, wanted, out)
    if json:
        output.write_json(reduction)
    elif out is None:
        write_pages([(reduction.program.name, reduction.program)])
    _print_summary(reduction)
    if reduction.interrupted:
        raise typer.Exit(130)


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the arguments that are given by value."""
    import jax

    return {n: v for n, v in values.items() if not isinstance(v, jax.ShapeDtypeStruct)}


def _check_output(out: str) -> None:
    """Raise OutputError if the program or its script cannot be written.

    The script may replace an earlier generated script, but no other file.
    """
    if out == STDOUT or not out.endswith(_SUFFIXES):
        message = "-o takes FILE.jaxpr or FILE.mlir, because a script is written next to it"
        raise OutputError(message)
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise OutputError(f"cannot write '{out}': folder '{folder}' does not exist")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write '{out}': no permission to write in folder '{folder}'")
    check_path(out)
    beside = _script_of(out)
    if not os.path.exists(beside):
        return
    with open(beside, errors="replace") as file:
        if "from its jaxpr by jaxprtool" not in file.readline():  # as in the output of `to_python`
            message = f"-o {out} would overwrite {beside}, which jaxprtool did not write"
            raise OutputError(message, "choose another name")


#: The files that hold a whole program.
_SUFFIXES = (".jaxpr", ".mlir", ".mlirbc")


def _script_of(out: str) -> str:
    return os.path.splitext(out)[0] + ".py"


def _write(reduction: Reduction, check: Check, out: str) -> None:
    """Write the program and, if possible, a script next to it that shows the fault."""
    from jaxprtool.commands.reduce.reduction import script

    name, binary = format_of(out)
    emission = Emission(name, binary, source=True, callbacks="stub", on_opaque=output.note)
    output.write_files([(reduction.program.name, reduction.program)], emission, out)
    beside = _script_of(out)
    try:
        text = script(reduction.program, check, reduction.values)
    except JaxprToolError as error:
        output.warning(f"{beside} is not written: {error.message}")
        return
    with output.written_file(beside) as file:
        file.write(text.encode())


def _print_summary(reduction: Reduction) -> None:
    """Describe the result on stderr."""
    counts = f"{reduction.equations_before} equations to {reduction.equations_after}"
    output.note(f"reduced {counts} in {reduction.tries} tries and {reduction.seconds:.0f} s")
    if reduction.seen:
        output.note(f"first seen: {reduction.seen}")
    if reduction.interrupted and not reduction.is_smaller:
        output.warning("interrupted: no smaller program was found")
    elif reduction.interrupted:
        output.warning("interrupted: this is the smallest program so far")
    elif not reduction.is_smaller:
        output.warning("the check holds for no smaller program")
    if not reduction.holds:
        output.warning(
            "the check is not deterministic: it did not hold for the result a second time"
        )
