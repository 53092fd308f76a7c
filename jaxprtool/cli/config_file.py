"""The pyproject.toml with the table `[tool.jaxprtool]`, found and read without importing JAX."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprtool.errors import ConfigurationError

NAME = "pyproject.toml"


def found_file(given: str | None = None) -> Path:
    """Return the file of `--config`, or the nearest pyproject.toml with a table `[tool.jaxprtool]`.

    Raises:
        ConfigurationError: If there is none, or it cannot be read.
    """
    if given is not None:
        path = Path(os.path.abspath(given))
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
    own = tool_table(path).get("jaxprtool", {})
    targets = own.get("targets", {}) if isinstance(own, dict) else {}
    return list(targets) if isinstance(targets, dict) else []
