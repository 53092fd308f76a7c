"""The table `[tool.jaxprtool]` of pyproject.toml, found, read and checked without importing JAX."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprtool.errors import ConfigurationError, JaxprToolError, did_you_mean

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
