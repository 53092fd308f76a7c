"""Find out what to do about a recorded run: faults of its programs and values, with commands.

    for step in next_steps(run, programs):
        step.text, step.line, step.advice, step.command

At the end of a run, `lint` checks the recorded programs, the smallest first, within a part of the
run's time.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

import jax
from jax import numpy as jnp

from jaxprtool.commands.lint.lint import Findings, all_rules, lint_programs
from jaxprtool.commands.why.gradients import main_loss
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.documents import listed, plural, some
from jaxprtool.ir.equations import is_inexact, type_of
from jaxprtool.ir.program import Program, path_parts
from jaxprtool.recording.calls import UNTIL
from jaxprtool.recording.reasons import compiled_again
from jaxprtool.recording.recorded_run import Compilation, Function, NextStep, NotFinite, Run

#: The time that `lint` may always take, in seconds.
_LEAST_SECONDS = 0.5

#: The equations that `lint` reads and checks in a second; it is faster on most machines.
_PER_SECOND = 5000

#: The maximum number of kinds of findings in a sentence, and of steps of one kind.
_MOST_KINDS, _MOST = 3, 2

#: The code of the rule about states that could be donated.
_DONATION = "JT304"

#: The end of the error of JAX about an array that a function has taken as a donated argument.
_DELETED = re.compile(r"Array has been deleted with shape=(\w+)\[([\d,]*)\]")

#: Reads the program of a compilation; raises JaxprToolError if it cannot.
ReadCompiled = Callable[[Compilation], Program]


def next_steps(
    run: Run,
    read: ReadCompiled,
    codes: tuple[Sequence[str], Sequence[str]] = ((), ()),
    most_of_run: float = inf,
) -> tuple[NextStep, ...]:
    """Return what to do about a run, the most urgent first.

    Args:
        run: The run.
        read: Reads the program of a compilation.
        codes: The codes of `lint` to select, and to ignore.
        most_of_run: The part of the time of the run that `lint` may take.
    """
    most = max(most_of_run * run.seconds, _LEAST_SECONDS)
    folder = shlex.quote(run.folder.rstrip("/"))
    gradients = list[NextStep]()
    steps = (
        *_of_kept_calls(run, folder),
        *_of_deleted(run, folder),
        *(_of_values(run, reads) for reads in list(dict.fromkeys(run.not_finite))[:_MOST]),
        *_of_programs(run, read, codes, folder, most, gradients),
        *list(_of_recompilations(run, folder))[:_MOST],
    )
    urgent = any(step.kind in ("not_finite", "gradient", "again") for step in steps)
    return (*(steps or _of_slowest(run, folder)), *(() if urgent else gradients[-1:]))


# --- values that are not finite ---------------------------------------------------------------


def _of_kept_calls(run: Run, folder: str) -> Iterator[NextStep]:
    """Yield the functions whose NaN ended the script, with the command that finds its line."""
    for function in run.functions:
        ended = f" of {function.name} has a NaN ({UNTIL})"
        if function.kept and any(ended in process.ending for process in run.processes):
            text = f"the arguments of the call of {function.name} that made a NaN are kept"
            command = f"jaxprtool nans {folder}/{shlex.quote(function.name)}"
            yield NextStep("not_finite", text, command=command, program=function.name)


def _of_deleted(run: Run, folder: str) -> Iterator[NextStep]:
    """Yield the functions that took the memory of an array whose reading ended the script."""
    endings = (_DELETED.search(process.ending) for process in run.processes)
    for dtype, shape in {(end[1], end[2]) for end in endings if end}:
        sizes = tuple(int(size) for size in shape.split(",") if size)
        wanted = type_of(jax.core.ShapedArray(sizes, jnp.dtype(dtype)))
        for function in run.functions:
            first = next((c for c in function.compilations if c.file), None)
            arguments = () if first is None else first.arguments
            paths = [a.path for a in arguments if a.donated and a.type.lstrip("~") == wanted]
            if first is not None and paths:
                yield NextStep(
                    "donate",
                    f"an array {wanted} was read after {function.name} took its memory: "
                    f"{function.name} donates {some(paths, _MOST)}",
                    function.line,
                    "use the result instead, copy the array before the call, or do not donate it",
                    f"jaxprtool memory {folder}/{shlex.quote(first.name)}",
                    first.name,
                )


def _of_values(run: Run, reads: NotFinite) -> NextStep:
    what = "NaN" if reads.is_nan else "infinite"
    if reads.count == reads.bad > 1:
        text = f"all {reads.count:,} values read here are {what}"
    elif reads.count == 1:
        text = f"the value read here is {what}"
    elif not reads.count or reads.bad == reads.count - reads.first + 1:
        of = f" of {reads.count:,}" if reads.count else ""
        text = f"the values read here are {what} from number {reads.first:,}{of} on"
    else:
        text = f"{reads.bad:,} of {reads.count:,} values read here are {what}, "
        text += f"first number {reads.first:,}"
    function = _returning(run.functions, reads.type)
    command = _recorded_again(run.command, function.name) if function is not None else ""
    name = function.name if function is not None else ""
    return NextStep("not_finite", text, reads.line, "", command, name)


def _returning(functions: Iterable[Function], type: str) -> Function | None:
    """Return the function that most likely returned a value of a type: the largest that could."""
    functions = [
        function
        for function in functions
        if any(compilation.file for compilation in function.compilations)
    ]
    return max(
        functions,
        key=lambda function: (
            any(
                result.type.removeprefix("~") == type
                for compilation in function.compilations
                for result in compilation.results
            ),
            max(compilation.equations for compilation in function.compilations),
        ),
        default=None,
    )


def _recorded_again(command: Sequence[str], function: str) -> str:
    """Return the command that ends the script at the first NaN in the results of a function."""
    if not command:
        return f"%%record --keep {function} --until nan"  # the first line of the cell
    is_python = os.path.basename(command[0]).startswith("python") and len(command) > 1
    words = command[1:] if is_python else command
    again = (
        shlex.join(words) if is_python or command[0].endswith(".py") else f"-- {shlex.join(words)}"
    )
    return f"jaxprtool record --keep {function} --until nan {again}"


# --- findings of lint -------------------------------------------------------------------------


def _of_programs(
    run: Run,
    read: ReadCompiled,
    codes: tuple[Sequence[str], Sequence[str]],
    folder: str,
    most_seconds: float,
    gradients: list[NextStep],
) -> Iterator[NextStep]:
    """Yield the findings of `lint` in the programs: by kind, and the states to donate.

    Appends the step that shows the gradient of each program that has one to `gradients`.
    """
    compilations = [compilation for compilation in run.compilations if compilation.file]
    compilations.sort(key=lambda compilation: compilation.equations)
    checked, deadline = 0, time.process_time() + most_seconds

    def programs() -> Iterator[tuple[str, Program]]:
        nonlocal checked
        for compilation in compilations:
            if time.process_time() + compilation.equations / _PER_SECOND > deadline:
                return
            checked += 1
            try:
                program = read(compilation)
            except JaxprToolError:
                continue  # a plug-in of the script's is missing here; `lint` says so
            gradients.extend(_of_gradient(compilation, program, folder))
            yield compilation.name, program

    if not compilations:
        return
    lint_command = f"jaxprtool lint {folder}/"
    try:
        findings = lint_programs(run.folder, programs(), *codes)
    except JaxprToolError as error:  # a plug-in with rules cannot be imported
        yield NextStep("skipped", f"lint was not run: {error.message}", command=lint_command)
        return
    yield from _of_findings(findings.on(lambda name: f"{run.folder.rstrip('/')}/{name}"), folder)
    if checked < len(compilations):
        count = len(compilations) - checked
        of = f"{plural(count, 'program')} of {len(compilations):,}"
        yield NextStep("skipped", f"not checked by lint, to save time: {of}", command=lint_command)


def _of_gradient(compilation: Compilation, program: Program, folder: str) -> Iterator[NextStep]:
    """Yield the command that shows which arguments have a gradient."""
    pairs = zip(program.arg_names, program.jaxpr.invars, strict=True)
    loss = main_loss(program)
    first = next((name for name, var in pairs if is_inexact(var)), "")
    if loss and first:
        name = f"{folder}/{shlex.quote(compilation.name.partition('@')[0])}:{loss}"
        command = f"jaxprtool why {name} --gradient {path_parts(first)[0]}"
        text = f"see which arguments the gradient of {loss} reaches, and what stops it"
        yield NextStep("gradient", text, command=command, program=compilation.name)


def _of_findings(findings: Findings, folder: str) -> Iterator[NextStep]:
    donations = [finding for finding in findings if finding.code == _DONATION]
    gradients = [finding for finding in findings if finding.command]
    others = [finding for finding in findings if finding not in (*donations, *gradients)]
    for finding in gradients[:_MOST]:
        program, command = finding.programs[0], finding.command
        yield NextStep("gradient", finding.message, finding.line, finding.advice, command, program)
    if others:
        names = {rule.code: rule.name.replace("-", " ") for rule in all_rules()}
        counts = Counter(finding.code for finding in others)
        lines = {finding.code: finding.line for finding in reversed(others)}
        kinds = []
        for code in dict.fromkeys(finding.code for finding in others):
            times = f" ({counts[code]:,} times)" if counts[code] > 1 else ""
            place = f" at {lines[code]}" if lines[code] else ""
            kinds.append(f"{names[code]}{place}{times}")
        text = f"{plural(len(others), 'finding')} of lint: {listed(kinds, _MOST_KINDS)}"
        yield NextStep(
            "lint", text, others[0].line, "", f"jaxprtool lint {folder}/", others[0].programs[0]
        )
    for finding in donations[:_MOST]:
        program = finding.programs[0]
        command = f"jaxprtool memory {folder}/{shlex.quote(program)}"
        yield NextStep("donate", finding.advice, finding.line, finding.message, command, program)


# --- functions compiled again -----------------------------------------------------------------


def _of_recompilations(run: Run, folder: str) -> Iterator[NextStep]:
    """Yield the functions that were compiled again, the slowest first, with the first advice."""
    for function in run.functions:
        if (found := compiled_again(function)) is None:
            continue
        text, advised = found
        again = [compilation for compilation in function.compilations if compilation.reasons]
        second = next(filter(_may_differ, again), again[0])
        names = (shlex.quote(name) for name in (second.nearest, second.name))
        command = ""
        if second.file and second.nearest and _may_differ(second):
            command = "jaxprtool diff " + " ".join(f"{folder}/{name}" for name in names)
        yield NextStep("again", text, advised.line, advised.advice, command, second.name)


def _may_differ(compilation: Compilation) -> bool:
    """Return True if the program of a compilation may differ from the earlier one."""
    return any(reason.kind not in ("function", "cache") for reason in compilation.reasons)


# --- nothing found ----------------------------------------------------------------------------


def _of_slowest(run: Run, folder: str) -> Iterator[NextStep]:
    """Yield the summary of the program that took longest to compile."""
    compilations = (compilation for compilation in run.compilations if compilation.file)
    slowest = max(compilations, key=lambda compilation: compilation.seconds, default=None)
    if slowest is not None:
        text = f"see the FLOPs, bytes, memory and gradient of {slowest.name}"
        command = f"jaxprtool report {folder}/{shlex.quote(slowest.name)}"
        yield NextStep("lint", text, command=command, program=slowest.name)
