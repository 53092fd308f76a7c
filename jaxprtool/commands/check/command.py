"""`jaxprtool check`: check the budgets of pyproject.toml, and update them."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomlkit
import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.app import write_problems
from jaxprtool.cli.completion import found_file
from jaxprtool.cli.launch import start_jax, use_host_devices, use_virtual_devices, use_x64, uses_x64
from jaxprtool.cli.options import Panel
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import command, only_program
from jaxprtool.commands.lint.command import codes_about
from jaxprtool.errors import JaxprToolError
from jaxprtool.files import file_written_whole
from jaxprtool.render.documents import Change
from jaxprtool.testing.assertions import Quantity, amount_of

if TYPE_CHECKING:
    from jaxprtool.commands.check.checks import Checked
    from jaxprtool.commands.check.config import Configuration, ConfiguredTarget
    from jaxprtool.ir.program import Program
    from jaxprtool.render.documents import CheckedTarget

# --- check ----------------------------------------------------------------------------------------
# `jaxprtool check`: check the budgets of pyproject.toml, all targets in one process.

_CHECK = Panel("Check")

_Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME…]",
        help="The targets to check, by their names in pyproject.toml. Default: all.",
        show_default=False,
        autocompletion=completion.complete_configured,
    ),
]
_Config = Annotated[
    str | None,
    _CHECK.option(
        "--config",
        "FILE",
        "The file with the table [tool.jaxprtool]. Default: the nearest pyproject.toml, here or "
        "above.",
    ),
]
_Update = Annotated[
    bool,
    _CHECK.flag("--update", "Write the measured amounts as budgets, and the changed snapshots."),
]

#: Descriptions of the checks that are not rules of `lint`.
_CHECKS = {
    "flops": "The program takes more FLOPs than its budget.",
    "peak-bytes": "The program needs more memory at its peak than its budget.",
    "equations": "The program has more equations than its budget.",
    "residual-bytes": "The gradient keeps more between its passes than its budget.",
    "vmem-bytes": "A Pallas kernel takes more vector memory than its budget.",
    "hbm-bytes": "The Pallas kernels copy more than their budget.",
    "collectives-bytes": "Each device sends more than its budget.",
    "compiles": "The function compiles more programs than its budget.",
    "compile-seconds": "XLA takes more CPU time to compile the program than its budget.",
    "no": "The program has a primitive or a dtype that it may not have.",
    "donated": "Arguments are not donated, or their memory is not used.",
    "snapshot": "The program differs from its snapshot.",
    "error": "The program cannot be checked.",
}


@command
def check_command(
    names: _Names = None,
    config: _Config = None,
    update: _Update = False,
    format: options.Format = None,
    json: options.Json = False,
    *,
    on_progress: OnProgress,
) -> None:
    """Check the budgets in pyproject.toml.

    Each table [tool.jaxprtool.targets.NAME] names a function, its arguments, and its budgets of
    FLOPs, bytes, equations or compilations. It may also ask for a snapshot, and for no findings of
    lint. The exit code is 1 if a target fails a check or cannot be traced.

    [bold]Examples[/]

      jaxprtool check
      jaxprtool check step loss --update
      jaxprtool check --format sarif
    """
    chosen = options.chosen_format(format, json)
    start_jax(on_progress)
    from jaxprtool.commands.check import checks
    from jaxprtool.commands.check import config as check_config
    from jaxprtool.render.documents import CheckDocument

    path = found_file(config)
    with contextlib.chdir(path.parent):
        configuration = check_config.configuration(path, names or (), on_progress)
        results, changes = _results(configuration, update, on_progress)
        targets = checks.worst_first(results)
        if chosen == "json":
            output.write_json(CheckDocument(targets, changes))
        elif chosen == "text":
            output.write_rendered(checks.check_text(targets, changes, output.width()))
        else:
            problems = [problem for target in targets for problem in target.problems]
            write_problems(problems, chosen, {**_CHECKS, **codes_about()} if problems else {})
            output.say(checks.summary_text(targets, changes))
    if not all(target.passed for target in targets):
        raise typer.Exit(1)


def _results(
    configuration: Configuration, update: bool, on_progress: OnProgress
) -> tuple[list[CheckedTarget], list[Change] | None]:
    """Return the checked targets, and with `update` the changes written to files."""
    from jaxprtool.commands.check import config

    checker = _Checker(configuration, update)
    results = []
    for number, target in enumerate(configuration.targets, 1):
        on_progress(f"checking {target.name} {number}/{len(configuration.targets)}")
        results.append(checker.checked(target))
    if not update:
        return results, None
    changes = update_budgets(
        configuration.path, {result.name: result.measured for result in results}
    )
    now = config.configuration(configuration.path, [result.name for result in results], on_progress)
    budgets = {target.name: target.expected.budgets for target in now.targets}
    results = [result._replace(budget=budgets[result.name]) for result in results]
    return results, [*changes, *checker.written]


class _Checker:
    """Checks the targets of a configuration, one after the other, in this process.

    Attributes:
        written: The snapshots that were written.
    """

    def __init__(self, configuration: Configuration, update: bool):
        self.written: list[Change] = []
        self._update = update
        self._x64 = {"": uses_x64()}
        if configuration.host_devices is not None:
            use_host_devices(configuration.host_devices)
        elif configuration.virtual_devices is not None:
            use_virtual_devices(configuration.virtual_devices)
            for target in configuration.targets:
                with contextlib.suppress(JaxprToolError):  # it is reported when it is checked
                    self._import(target)
            use_virtual_devices(configuration.virtual_devices)  # a module may set their number

    def _import(self, target: ConfiguredTarget) -> None:
        """Import the module of a target, with the precision of the target or of the module."""
        from jaxprtool.loading.target import split_target

        function = target.session.function
        place = split_target(function.target).place
        wanted = self._x64[""] or function.tracing.x64
        use_x64(wanted or self._x64.get(place, False))
        function.import_module()
        self._x64.setdefault(place, uses_x64() and not wanted)

    def checked(self, target: ConfiguredTarget) -> CheckedTarget:
        """Check a target. An error of its tracing is reported as a problem."""
        from jaxprtool.commands.check.checks import Checked, error_problem
        from jaxprtool.render.documents import CheckedTarget

        try:
            with target.session.applied():
                self._import(target)
                outcome = self._measured(target)
        except JaxprToolError as error:
            outcome = Checked({}, [error_problem(target.name, error)])
        problems = [
            problem if problem.annotated else problem._replace(annotated=target.place)
            for problem in outcome.problems
        ]
        budgets = target.expected.budgets
        return CheckedTarget(
            target.name, target.session.target, budgets, outcome.measured, not problems, problems
        )

    def _measured(self, target: ConfiguredTarget) -> Checked:
        from jaxprtool.commands.check.checks import checked

        session, expected = target.session, target.expected
        call = session.function.caller() if "compiles" in expected.budgets else None
        if self._update:
            expected = replace(expected, budgets=dict.fromkeys(expected.budgets, math.inf))
        # With a mesh, the trace shows of which type its axes are.
        if not expected.needs_program and not session.function.tracing.mesh:
            return checked(target.name, None, expected, (), call)
        # With runs=True there is no note on arguments, which would not name the target.
        traced = session.traced(runs=True, axis_env=target.axis_env, virtual=True)
        call = call and partial(call, traced.mesh_set)
        program = only_program("check takes", session.programs(traced))
        arguments: list[object] = []
        if expected.budgets.keys() & {"collectives_bytes", "compile_seconds"}:
            inputs = traced.given_to(program)
            program = inputs.program
            arguments = [inputs.values.get(name) for name in program.arg_names]
        if self._update and expected.snapshot is not None:
            self._write_snapshot(target.name, program, expected.snapshot)
        with traced.mesh_set():
            return checked(target.name, program, expected, arguments, call, output.width())

    def _write_snapshot(self, name: str, program: Program, path: Path) -> None:
        from jaxprtool.testing.assertions import update_snapshot

        if update_snapshot(program, path):
            self.written.append(Change(name, "snapshot", "", os.path.relpath(path)))


# --- check update ---------------------------------------------------------------------------------
# `check --update`: write the measured amounts as the budgets of pyproject.toml.
#
# Comments and layout are kept. A budget with a unit keeps it, and is rounded up to three digits.

#: A number, and its unit with the space before it.
_AMOUNT = re.compile(r"\s*([\d.]+(?:e\+?\d+)?)(\s*)([kmgtp]?)(i?)(.*?)\s*", re.IGNORECASE)

#: The number of significant digits of a budget with a unit.
_DIGITS = 3


def update_budgets(path: Path, measured: Mapping[str, Mapping[Quantity, float]]) -> list[Change]:
    """Set the budgets in a file to the measured amounts, and write it if one changes.

    Args:
        path: The file.
        measured: The measured amounts by target.

    Returns:
        The changes.

    Raises:
        OutputError: If the file cannot be written. It is then unchanged.
    """
    # Bytes, as reading text would change the ends of lines.
    document: Any = tomlkit.parse(path.read_bytes().decode())
    changes = []
    for name, amounts in measured.items():
        table = document["tool"]["jaxprtool"]["targets"][name]
        for quantity, amount in amounts.items():
            key = quantity.replace("_", "-")
            before = table[key].unwrap()
            after = budget_like(before, quantity, amount)
            if after != before:
                _replace(table, key, after)
                changes.append(Change(name, key, _toml(before), _toml(after)))
    if changes:
        with file_written_whole(str(path)) as file:
            file.write(tomlkit.dumps(document).encode())
    return changes


def _replace(table: Any, key: str, value: object) -> None:
    """Set a key, and keep the comment behind it."""
    trivia = table[key].trivia
    item = tomlkit.item(value)
    item.trivia.indent, item.trivia.comment_ws = trivia.indent, trivia.comment_ws
    item.trivia.comment, item.trivia.trail = trivia.comment, trivia.trail
    table[key] = item


def _toml(value: object) -> str:
    return tomlkit.item(value).as_string()  # type: ignore[no-any-return]


def budget_like(earlier: object, quantity: Quantity, amount: float) -> object:
    """Return the smallest budget that allows an amount, written like an earlier budget.

    If the earlier one is a number, return the amount. If it is text, keep its unit, or change the
    prefix of the unit to avoid many digits, and round up.
    """
    match = _AMOUNT.fullmatch(earlier) if isinstance(earlier, str) else None
    if match is None and quantity == "compile_seconds":
        return float(_rounded_up(amount))
    if match is None:
        return math.ceil(amount)
    _, space, prefix, binary, unit = match.groups()
    base = 1024 if binary else 1000
    letters = ["", *("KMGTP" if binary else "kMGTP")]
    power = " kmgtp".index(prefix.lower() or " ")
    if not 1 <= amount / base**power <= 999 and amount:
        # 999.5 of a unit would be rounded up to 1000 of it.
        fitting = (n for n in range(len(letters)) if amount / base**n <= 999)
        power = next(fitting, len(letters) - 1)
        prefix = letters[power]
    binary = binary if power else ""
    number = _rounded_up(amount / base**power)
    text = f"{number}{space if prefix or unit else ''}{prefix}{binary}{unit}"
    return text if amount_of(quantity, text) >= amount else math.ceil(amount)


def _rounded_up(number: float) -> str:
    """Return the least number of three digits that is not smaller, as text."""
    whole = len(str(int(number)))
    places = max(_DIGITS - whole, 0)
    up = math.ceil(round(number * 10**places, 6)) / 10**places
    return f"{up:.{places}f}".rstrip("0").rstrip(".") if places else str(int(up))
