"""The packages that `--mine` may name."""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib.machinery import PathFinder

from jaxprtool.errors import ArgumentsError, did_you_mean


def require_package(name: str, target: str) -> None:
    """Raise ArgumentsError if a package is not installed; a program file may name any package."""
    top = name.partition(".")[0].replace("-", "_")
    if target == "-" or target.endswith(".jaxpr") or not top.isidentifier():
        return
    if top not in sys.modules and not PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
        known = {module.name for module in pkgutil.iter_modules()}
        held = _package_of_distribution(name)
        hint = f"write --mine {held}" if held else did_you_mean(top, known)
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
