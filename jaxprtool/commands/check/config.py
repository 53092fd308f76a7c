"""The table `[tool.jaxprtool]` of pyproject.toml: the targets of `check`, and their budgets.

    [tool.jaxprtool.targets.step]
    target = "train.py:step"
    args = "f32[8,128]"
    flops = "3 GFLOP"
    no = ["sort", "f64"]

Keys that say how a target is loaded are options of the command line, read by the same code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import typer

from jaxprtool.cli.completion import TableReader, error_text, tool_table
from jaxprtool.cli.options import AxisEnv, Passes, Plugin
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import FunctionOptions, Session, reader
from jaxprtool.commands.check.checks import Expectations
from jaxprtool.commands.lint.command import codes_in, lint_codes
from jaxprtool.errors import ConfigurationError, JaxprToolError, did_you_mean
from jaxprtool.ir.source_text import Place
from jaxprtool.testing.assertions import QUANTITIES, Quantity, amount_of, require_bannable
from jaxprtool.testing.places import FOLDER, snapshot_file

#: The keys of budgets.
BUDGETS: dict[str, Quantity] = {quantity.replace("_", "-"): quantity for quantity in QUANTITIES}

#: The other keys of a target that are not options of the command line.
_EXPECTED = ("no", "donated", "snapshot", "lint", "select", "ignore")

#: Options of the command line that say how results are shown.
_SHOWING = ("--frames", "--host-devices", "--traceback", "--help")


@dataclass(frozen=True)
class _Loading:
    """A group of options: how a target is loaded."""

    function: FunctionOptions
    axis_env: AxisEnv = None
    passes: Passes = None
    plugin: Plugin = None


@dataclass(frozen=True)
class ConfiguredTarget:
    """A target of the table.

    Attributes:
        name: Its name.
        session: The options to load it with.
        axis_env: Its named axes, and their sizes.
        expected: The checks.
        place: Its line in the file.
    """

    name: str
    session: Session
    axis_env: dict[str, int] | None
    expected: Expectations
    place: Place

    @property
    def needs_devices(self) -> bool:
        """Whether it is compiled for the devices of a mesh, or traced on a mesh."""
        return (
            bool(self.session.function.tracing.mesh) or "collectives_bytes" in self.expected.budgets
        )


@dataclass(frozen=True)
class Configuration:
    """The table `[tool.jaxprtool]`.

    Attributes:
        path: The file, by its absolute path.
        host_devices: The number of virtual devices of the CPU for all targets; None for the
            machine's devices.
        virtual_devices: The number of virtual CPU devices for targets that need a mesh; None if no
            target does.
        targets: The targets.
    """

    path: Path
    host_devices: int | None
    virtual_devices: int | None
    targets: Sequence[ConfiguredTarget]


def configuration(path: Path, names: Sequence[str], on_progress: OnProgress) -> Configuration:
    """Return the table of a file, with the targets of these names, or all.

    Names of files in it are relative to its folder, which must be the current one.

    Raises:
        ConfigurationError: With one line for each mistake.
    """
    reader = _ConfigReader(path, on_progress)
    config = reader.configuration(tool_table(path).get("jaxprtool"))
    reader.require_no_mistakes()
    by_name = {target.name: target for target in config.targets}
    for name in names:
        if name not in by_name:
            hint = did_you_mean(name, by_name) or f"the targets are {', '.join(by_name)}"
            raise ConfigurationError(f"{path.name} has no target '{name}'", hint)
    chosen = [by_name[name] for name in dict.fromkeys(names)] or config.targets
    return replace(config, targets=chosen)


class _ConfigReader(TableReader):
    """Reads the table, and collects mistakes, each with its key."""

    def __init__(self, path: Path, on_progress: OnProgress):
        super().__init__(path)
        self._on_progress = on_progress
        self._text = path.read_text(encoding="utf-8")
        self._snapshots: dict[Path, str] = {}

    def configuration(self, table: object) -> Configuration:
        section, devices = self.table("tool.jaxprtool", table), None
        self.known("tool.jaxprtool", section, ["targets", "lint", "host-devices"])
        if "host-devices" in section:
            devices = section["host-devices"]
            if type(devices) is not int or devices < 1:
                self.mistake("tool.jaxprtool.host-devices", "write a number, 1 or more")
        defaults = lint_codes(self, section)
        tables = self.table("tool.jaxprtool.targets", section.get("targets", {}))
        if not tables and not self.mistakes:
            self.mistake("tool.jaxprtool.targets", "there is no target: add a table targets.NAME")
        parsed = [self._target(name, value, defaults) for name, value in tables.items()]
        targets = [target for target in parsed if target is not None]
        return Configuration(self.path, devices, _virtual_devices(targets), targets)

    def _target(
        self, name: str, value: object, defaults: Mapping[str, Sequence[str]]
    ) -> ConfiguredTarget | None:
        where = f"tool.jaxprtool.targets.{name}"
        mistake_count = len(self.mistakes)
        table = self.table(where, value)
        options = _options()
        self.known(where, table, ["target", *options, *BUDGETS, *_EXPECTED])
        if not isinstance(table.get("target"), str) and len(self.mistakes) == mistake_count:
            text = 'write a function, "train.py:step", or a program, "step.jaxpr"'
            self.mistake(f"{where}.target", text)
        expected = self._expectations(name, where, table, defaults)
        values = {key: table[key] for key in options if key in table}
        words = [word for key, value in values.items() for word in self._words(where, key, value)]
        if len(self.mistakes) > mistake_count:
            return None
        if "compiles" in table and "passes" in table:
            self.mistake(f"{where}.compiles", "cannot be combined with passes")
        loaded = self._loaded(where, [*words, "--", table["target"]])
        if loaded is None:
            return None
        return ConfiguredTarget(
            name, *loaded, expected, Place(str(self.path), self._line(name), display=str(self.path))
        )

    def _line(self, name: str) -> int:
        """Return the number of the line that opens the table of a target, from 1."""
        key = rf"[\"']?{re.escape(name)}[\"']?"
        header = rf"^[ \t]*\[[ \t]*tool\.jaxprtool\.targets\.{key}[ \t]*\]"
        inside = rf"^[ \t]*(tool\.jaxprtool\.)?(targets\.)?{key}[ \t]*[.=]"
        lines = re.compile(header, re.MULTILINE), re.compile(inside, re.MULTILINE)
        start = self._text.rfind("\n", 0, self._text.find("jaxprtool")) + 1
        match = lines[0].search(self._text) or lines[1].search(self._text, start)
        return self._text.count("\n", 0, match.end()) + 1 if match else 1

    # --- checks -------------------------------------------------------------------------------

    def _expectations(
        self, name: str, where: str, table: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> Expectations:
        budgets = {
            quantity: self.read(where, key, partial(amount_of, quantity), table[key])
            for key, quantity in BUDGETS.items()
            if key in table
        }
        no = self.texts(where, table, "no")
        for banned in no:
            self.read(where, "no", require_bannable, banned)
        flags = {key: self.flag(where, table, key) for key in ("donated", "lint")}
        codes = {**defaults, **codes_in(self, where, table)}
        if not flags["lint"]:
            for key in codes.keys() & table.keys():
                self.mistake(f"{where}.{key}", "needs lint = true")
        return Expectations(
            budgets=budgets,
            no=no,
            donated=flags["donated"],
            snapshot=self._snapshot(name, where, table.get("snapshot", False)),
            lint=flags["lint"],
            **codes,
        )

    def _snapshot(self, name: str, where: str, value: object) -> Path | None:
        if value is False:
            return None
        if value is not True and not (isinstance(value, str) and value.endswith(".jaxpr")):
            self.mistake(f"{where}.snapshot", 'write true, or the name of a file, "step.jaxpr"')
            return None
        path = Path(FOLDER, snapshot_file(name)) if value is True else Path(str(value))
        path = self.path.parent / path
        if (other := self._snapshots.setdefault(path, name)) != name:
            shown = os.path.relpath(path)
            self.mistake(f"{where}.snapshot", f"{shown} is the snapshot of '{other}' too")
        return path

    # --- how it is loaded ---------------------------------------------------------------------

    def _words(self, where: str, key: str, value: object) -> Iterator[str]:
        """Yield an option as the words of a command line."""
        option = _options()[key]
        if option.is_flag:
            if self.flag(where, {key: value}, key):
                yield f"--{key}"
        elif option.multiple and isinstance(value, list):
            yield from (f"--{key}={item}" for item in self.texts(where, {key: value}, key))
        elif (text := _option_text(value)) is None:
            self.mistake(f"{where}.{key}", f"write what --{key} takes, as a string")
        else:
            yield f"--{key}={text}"

    def _loaded(self, where: str, words: list[str]) -> tuple[Session, dict[str, int] | None] | None:
        """Return the options of a command line, checked as the command line does."""
        try:
            with reader(_Loading).make_context("check", words) as context:
                given: _Loading = context.command.invoke(context)
            function = replace(given.function, on_progress=self._on_progress)
            session = Session(function, given.passes, given.plugin)
            _ = session.pipeline
        except typer.BadParameter as error:
            option = getattr(error.param, "opts", ["--target"])[-1]
            self.mistake(f"{where}.{option.lstrip('-')}", error.message)
            return None
        except JaxprToolError as error:
            self.mistake(f"{where}.passes", error_text(error))
            return None
        return session, given.axis_env


def _virtual_devices(targets: Sequence[ConfiguredTarget]) -> int | None:
    """Return the number of devices for the meshes of all targets, checked or not."""
    sizes = [
        target.session.function.tracing.virtual_devices
        for target in targets
        if target.needs_devices
    ]
    return max(sizes, default=None)


def _option_text(value: object) -> str | None:
    """Return the value of an option as on the command line: `[0, 1]` is `0,1`."""
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    if isinstance(value, list) and all(type(item) in (int, str) for item in value):
        return ",".join(map(str, value))
    if isinstance(value, dict) and all(type(size) is int for size in value.values()):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    return None


@cache
def _options() -> dict[str, Any]:
    """Return the options that say how a target is loaded, by name, without `--`."""
    names = {
        next(name for name in param.opts if name.startswith("--")): param
        for param in reader(_Loading).params
        if param.opts[0].startswith("-")
    }
    return {name.lstrip("-"): option for name, option in names.items() if name not in _SHOWING}
