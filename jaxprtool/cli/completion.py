"""Shell completion, and pyproject.toml and packages read, without importing JAX.

A target is completed from the file tree and from the functions in its file, read with `ast`. If
only one file matches, its functions are offered directly, so that the shell stops after the colon
instead of adding a space after the file name.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import io
import os
import pkgutil
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import Any

from jaxprtool.errors import ArgumentsError, ConfigurationError, JaxprToolError, did_you_mean

# --- config file ----------------------------------------------------------------------------------
# The table `[tool.jaxprtool]` of pyproject.toml, found, read and checked without importing JAX.

NAME = "pyproject.toml"


def found_file(config: str | None = None) -> Path:
    """Return the file of `--config`, or the nearest pyproject.toml with a table `[tool.jaxprtool]`.

    Raises:
        ConfigurationError: If there is none, or it cannot be read.
    """
    if config is not None:
        path = Path(os.path.abspath(config))
        tool_table(path)  # report what cannot be read
        return path
    if (nearest := nearest_file()) is not None:
        return nearest
    raise ConfigurationError(
        f"no {NAME} here or above has a table [tool.jaxprtool]",
        'write one: [tool.jaxprtool.targets.step] with target = "train.py:step" and flops = 0; '
        "`jaxprtool check --update` writes the measured amounts",
    )


def nearest_file() -> Path | None:
    """Return the nearest pyproject.toml with a table `[tool.jaxprtool]`, here or above, or None."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / NAME).is_file() and "jaxprtool" in tool_table(folder / NAME):
            return folder / NAME
    return None


def tool_table(path: Path) -> Mapping[str, Any]:
    """Return the table `[tool]` of a file. Raises ConfigurationError if it cannot be read."""
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigurationError(f"cannot read '{path}': {error.strerror or error}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise ConfigurationError(f"{os.path.relpath(path)} is not valid TOML: {error}") from None
    tool = document.get("tool", {})
    return tool if isinstance(tool, dict) else {}


def target_names(path: Path) -> list[str]:
    """Return the names of the targets in a file."""
    section = tool_table(path).get("jaxprtool", {})
    targets = section.get("targets", {}) if isinstance(section, dict) else {}
    return list(targets) if isinstance(targets, dict) else []


class TableReader:
    """Reads a table of pyproject.toml, and collects mistakes, each with its key."""

    def __init__(self, path: Path):
        self.mistakes: list[tuple[str, str]] = []
        self.path = path

    def require_no_mistakes(self) -> None:
        """Raise ConfigurationError with the mistakes that were found."""
        name = self.path.name
        if not self.mistakes:
            return
        if not self.mistakes[1:]:
            raise ConfigurationError("{}: {}: {}".format(name, *self.mistakes[0]))
        raise ConfigurationError(f"{name} has {len(self.mistakes)} mistakes", None, self.mistakes)

    def mistake(self, key: str, text: str) -> None:
        """Add a mistake."""
        self.mistakes.append((key, text))

    def table(self, key: str, value: object) -> dict[str, Any]:
        """Return a value that has to be a table; else add a mistake."""
        if isinstance(value, dict):
            return value
        self.mistake(key, "write a table")
        return {}

    def known(self, where: str, table: Mapping[str, Any], keys: Sequence[str]) -> None:
        """Add a mistake for each key of a table that is not among `keys`."""
        for key in (name for name in table if name not in keys):
            near = did_you_mean(key, keys) or f"the keys are {', '.join(keys)}"
            self.mistake(f"{where}.{key}", f"unknown key; {near}")

    def read(self, where: str, key: str, read: Callable[[Any], Any], value: object) -> Any:
        """Return what a function reads from a value; add a mistake if it raises."""
        try:
            return read(value)
        except JaxprToolError as error:
            self.mistake(f"{where}.{key}", error_text(error))

    def texts(self, where: str, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """Return a list of strings in a table; else add a mistake."""
        value = table.get(key, [])
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.mistake(f"{where}.{key}", "write a list of strings")
        return ()

    def flag(self, where: str, table: Mapping[str, Any], key: str) -> bool:
        """Return a boolean in a table; else add a mistake."""
        value = table.get(key, False)
        if not isinstance(value, bool):
            self.mistake(f"{where}.{key}", "write true or false")
        return value is True


def error_text(error: JaxprToolError) -> str:
    """Return an error and its hint as one line."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


# --- completion -----------------------------------------------------------------------------------

#: Larger files are not read during completion.
MAX_FILE = 1_000_000


def complete_target(incomplete: str) -> list[str]:
    """Return targets with this prefix: folders, files, `file.py:function`, `run/step:loss`."""
    from jaxprtool.recording.folder import is_run, program_names

    if ":" not in incomplete and is_run(os.path.dirname(incomplete)):
        run = os.path.dirname(incomplete)
        names = [os.path.join(run, name) for name in program_names(run)]
        return [name for name in names if name.startswith(incomplete)]
    if ":" not in incomplete:
        return _paths(incomplete)
    place, _, typed = incomplete.partition(":")
    if files := _program_files(place):
        names = sorted(set(chain.from_iterable(map(_functions_inside, files))))
        return [f"{place}:{name}" for name in names if name.startswith(typed)]
    path = place if place.endswith(".py") else place.replace(".", "/") + ".py"
    if not os.path.exists(path):
        path = place.replace(".", "/") + "/__init__.py"
    return [f"{place}:{name}" for name in _functions(path) if name.startswith(typed)]


def _program_files(place: str) -> list[str]:
    """Return the files of a program: `step.jaxpr`, or `run/step` of a recorded run."""
    if place.endswith(".jaxpr"):
        return [place]
    from jaxprtool.recording.folder import processes, run_and_program

    run, name = run_and_program(place) or ("", "")
    return [os.path.join(process, f"{name}.jaxpr") for process in processes(run)] if name else []


def _functions_inside(path: str) -> list[str]:
    """Return the names that a program file has of functions, behind their lines: `a.py:3 (f)`."""
    return re.findall(r":\d+ \((?:[\w<>]+\.)*(\w+)\)", _read(path))


def _paths(typed: str) -> list[str]:
    folder, start = os.path.split(typed)
    paths = []
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        if not entry.name.startswith(start) or entry.name.startswith((".", "__")):
            continue
        if entry.is_dir():
            paths.append(os.path.join(folder, entry.name, ""))
        elif entry.name.endswith(".py"):
            paths.append(os.path.join(folder, entry.name) + ":")
        elif entry.name.endswith(".jaxpr"):
            paths.append(os.path.join(folder, entry.name))
    if len(paths) == 1:
        only = paths[0]
        if only.endswith(":"):
            return [only + name for name in _functions(only[:-1])] or paths
        return (_paths(only) if only.endswith(os.sep) else []) or paths
    return paths


def _functions(path: str) -> list[str]:
    """Return the public names that a module binds to functions or call results, not CONSTANTS."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(_read(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names = dict.fromkeys(_names(tree))
    return [name for name in names if not name.startswith("_") and not name.isupper()]


def _read(path: str) -> str:
    """Return the text of a file; "" if it is too large, or cannot be read."""
    try:
        if os.path.getsize(path) > MAX_FILE:
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _names(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign) and isinstance(
            statement.value, ast.Call | ast.Lambda
        ):
            yield from (t.id for t in statement.targets if isinstance(t, ast.Name))


def complete_passes(incomplete: str) -> list[str]:
    """Return pipelines with this prefix, with the last pass completed."""
    from jaxprtool.passes import levels

    if incomplete.count("(") > incomplete.count(")"):
        return []  # inside the options of a pass
    return _completed_last(incomplete, [*_installed_passes(), *(f"-{name}" for name in levels)])


def _installed_passes() -> list[str]:
    """Read the sorted names of installed passes, which the registry finds by `importlib.metadata`.

    Importing that module takes longer than reading the files of all packages.
    """
    names: set[str] = set()
    for folder in sys.path:
        for path in glob.iglob(os.path.join(glob.escape(folder), "*-info", "entry_points.txt")):
            with open(path, encoding="utf-8", errors="replace") as file:
                _, _, ours = file.read().partition("[jaxprtool.passes]\n")
            lines = ours.partition("\n[")[0].splitlines()
            names.update(line.partition("=")[0].strip() for line in lines if "=" in line)
    return sorted(names)


def complete_configured(incomplete: str) -> list[str]:
    """Return the names of the targets in the nearest pyproject.toml with this prefix."""
    try:
        return [name for name in target_names(found_file()) if name.startswith(incomplete)]
    except JaxprToolError:
        return []


def complete_backend(incomplete: str) -> list[str]:
    """Return the platforms known to JAX with this prefix, whether or not this machine has them."""
    return [name for name in _PLATFORMS if name.startswith(incomplete)]


def complete_backends(incomplete: str) -> list[str]:
    """Return lists of platforms with this prefix, with the last one completed."""
    return _completed_last(incomplete, _PLATFORMS)


def complete_checks(incomplete: str) -> list[str]:
    """Return lists of checks with this prefix, with the last one completed."""
    formats = ("bf16", "f16", "f8_e5m2", "f8_e4m3fn")
    checks = ["nan", "inf", "subnormal"]
    checks += [f"{what}-{name}" for what in ("overflow", "underflow") for name in formats]
    return _completed_last(incomplete, checks)


_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def _completed_last(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the lists with this prefix whose last name is one of `names`."""
    earlier, comma, typed = incomplete.rpartition(",")
    start = earlier + comma + typed[: len(typed) - len(typed.lstrip())]
    return [start + name for name in names if name.startswith(typed.strip())]


def print_completions(command: Any, arguments: Sequence[str], program: str) -> None:
    """Print the completions that the shell requests through the environment.

    Bash splits words at `:`: it passes `file.py:lo` as `file.py`, `:` and `lo`, and replaces only
    `lo` by the answer. The word is therefore joined before completion, and the answer cut again.
    """
    cut = _join_bash_words()
    answered = io.StringIO()
    try:
        # A warning, as of a plug-in, would be printed into the line that the user types.
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, contextlib.redirect_stdout(answered if cut else sys.stdout):
            command.main(list(arguments), program)
    finally:
        for line in answered.getvalue().splitlines():
            print(line.rpartition(":")[2])


def _join_bash_words() -> bool:
    """Join the word being completed if bash split it at a colon; return True if it did."""
    words = os.environ.get("COMP_WORDS", "").replace("\n", " ")
    cut = re.fullmatch(r"(.*[^\s:]) :(?: (\S+))?", words)
    if cut is None:
        return False
    head, typed = cut[1], cut[2] or ""
    os.environ["COMP_WORDS"] = f"{head}:{typed}"
    position = int(os.environ.get("COMP_CWORD", "0"))
    os.environ["COMP_CWORD"] = str(position - (2 if typed else 1))
    return True


# --- packages -------------------------------------------------------------------------------------
# The packages that `--mine` may name.


def require_package(name: str, target: str) -> None:
    """Raise ArgumentsError if a package is not installed; a program file may name any package."""
    top = name.partition(".")[0].replace("-", "_")
    if target == "-" or target.endswith(".jaxpr") or not top.isidentifier():
        return
    if top not in sys.modules and not PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
        packages = {module.name for module in pkgutil.iter_modules()}
        package = _package_of_distribution(name)
        hint = f"write --mine {package}" if package else did_you_mean(top, packages)
        raise ArgumentsError(f"--mine: no package '{name}' is installed", hint)


def _package_of_distribution(name: str) -> str:
    """Return the package in a distribution, `mujoco.mjx` in `mujoco-mjx`; "" if none."""
    import importlib.metadata

    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    folders = [file.parts[:-1] for file in files if file.name == "__init__.py"]
    return ".".join(sorted(folders, key=len)[0]) if folders else ""
