"""The commands that are installed, found by entry points: ours and those of plug-ins.

A package names its commands in the entry-point group `jaxprtool.commands`; each entry is a
`CommandInfo`, in a module that is fast to import. The command itself is imported when it is called.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from rich.console import Console

from jaxprtool.errors import PluginError, PluginWarning, described

GROUP = "jaxprtool.commands"

#: The panels of `jaxprtool --help`, in order. Those of plug-ins follow.
PANELS = (
    "Look",
    "Measure",
    "Run and debug",
    "Rewrite and export",
    "Several devices",
    "In your repository",
    "Reference",
)


@dataclass(frozen=True)
class CommandInfo:
    """What is known of a command before it is imported.

    Attributes:
        panel: The panel of `jaxprtool --help` that lists it.
        summary: What it does, in one line: the first line of its docstring.
        run: The function that is the command, as "module:function".
        tables: For each type of its results, as "module:class", the function that renders it for
            the terminal, as "module:function". It takes the result and the width.
        documents: The types of what it prints with `--json`, as "module:class".
        rules: The tables of rules by primitive that it has, to which plug-ins add, by name.
        position: Its place in its panel; commands without one follow, by name.
    """

    panel: str
    summary: str
    run: str
    tables: Mapping[str, str] = field(default_factory=dict)
    documents: Sequence[str] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    position: int = sys.maxsize


def imported(path: str) -> Any:
    """Import and return an object, named as "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def command_info(name: str) -> CommandInfo | None:
    """Return what is known of a command, or None if there is no such command.

    Raises:
        PluginError: If the package that has it cannot be imported, or if the metadata of jaxprtool
            is missing or older than the code, as after `git pull` in a clone.
    """
    own = _own(_path())
    if not own:
        raise PluginError(
            "the installed metadata of jaxprtool names no commands",
            "install it again, in a clone with `pip install -e .`",
        )
    point = own.get(name) or _installed(_path()).get(name)
    return None if point is None else _loaded(point)


def panels() -> dict[str, dict[str, CommandInfo]]:
    """Return the commands by panel, in the order of `jaxprtool --help`.

    A command whose package cannot be imported is left out, with a warning.
    """
    infos: dict[str, CommandInfo] = {}
    for name, point in _installed(_path()).items():
        try:
            infos[name] = _loaded(point)
        except PluginError as error:
            _warn(str(error))
    titles = dict.fromkeys((*PANELS, *sorted(each.panel for each in infos.values())))
    ordered = sorted(infos.items(), key=lambda command: (command[1].position, command[0]))
    return {
        title: {name: each for name, each in ordered if each.panel == title} for title in titles
    }


def commands() -> dict[str, CommandInfo]:
    """Return all commands by name, in the order of `jaxprtool --help`."""
    return {name: each for panel in panels().values() for name, each in panel.items()}


def tables_of_rules() -> dict[str, str]:
    """Return the tables of rules of our own commands by name, each as "module:table"."""
    points = _own(_path()).values()
    return {name: path for point in points for name, path in _loaded(point).rules.items()}


@lru_cache(maxsize=1)
def renderers() -> Mapping[str, Callable[[Any, int], Any]]:
    """Return for each type of result, as "module:class", the function that renders it."""
    return {
        name: _when_called(path)
        for command in commands().values()
        for name, path in command.tables.items()
    }


def _when_called(path: str) -> Callable[[Any, int], Any]:
    return lambda result, width: imported(path)(result, width)


def _path() -> tuple[str, ...]:
    return tuple(sys.path)


@lru_cache(maxsize=1)
def _own(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return our own commands, which are found faster than those of all packages on `sys.path`."""
    try:
        points = distribution("jaxprtool").entry_points
    except PackageNotFoundError:
        return {}
    return {point.name: point for point in points.select(group=GROUP)}


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return the commands of all packages on `sys.path`."""
    points = dict(_own(path))
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.value):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            _warn(
                f"command '{point.name}' of {_origin(point)} is ignored: {_origin(other)} has a "
                "command of that name"
            )
    return points


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _loaded(point: EntryPoint) -> CommandInfo:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"command '{point.name}' of {_origin(point)} cannot be imported: {described(error)}"
        ) from error
    if not isinstance(loaded, CommandInfo):
        raise PluginError(f"command '{point.name}' of {_origin(point)} is not a CommandInfo")
    return loaded


def _warn(message: str) -> None:
    import warnings

    warnings.warn(PluginWarning(message), stacklevel=2)


# --- results in Python ----------------------------------------------------------------------------
# The text and HTML of results, as their commands show them; see `ir.documents`.

#: The width of a result in a notebook, in characters.
_NOTEBOOK_WIDTH = 100

#: The style of a result in a notebook: a fixed font and no wrapped lines, which nbconvert and
#: VS Code do not give a `<pre>`, and a light page for the colors of the theme.
_LOOK = (
    "white-space: pre; overflow-x: auto; line-height: 1.3; padding: 0.5em; "
    "font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
    "background: #fff; color: #111"
)

#: Few fixed fonts have the braille patterns of plots, and those of other fonts have other widths.
_BRAILLE = re.compile("[\u2800-\u28ff]")

#: The style of a character that takes one column in any font.
_BOX = "display: inline-block; width: 1ch; font-style: normal"


def result_text(result: object) -> str:
    """Return a result as text, at the width of the terminal."""
    return str(_rendering(result, shutil.get_terminal_size().columns).plain())


def result_html(result: object) -> str:
    """Return a result as HTML, with the colors of the terminal."""
    # Rich displays what is printed in a notebook's kernel, whatever file it is for.
    console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH, force_jupyter=False)
    console.print(_rendering(result, _NOTEBOOK_WIDTH), soft_wrap=True)
    pre = f'<pre style="{_LOOK}">{{code}}</pre>'
    page = console.export_html(inline_styles=True, code_format=pre)
    return _BRAILLE.sub(rf'<i style="{_BOX}">\g<0></i>', page)


def _rendering(result: object, width: int) -> Any:
    kind = type(result)
    return renderers()[f"{kind.__module__}:{kind.__qualname__}"](result, width)
