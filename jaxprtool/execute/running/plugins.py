"""The PJRT plug-ins that are installed, as JAX finds them.

A plug-in is a module of the namespace package `jax_plugins`, or one that a package names as an
entry point of the group `jax_plugins`. JAX imports each and calls its `initialize()`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from jaxprtool.errors import described

_GROUP = "jax_plugins"


@dataclass(frozen=True)
class Plugin:
    """A plug-in: its module, and the package that it is from with its version, "" if unknown."""

    module: str
    package: str = ""
    version: str = ""

    @property
    def import_error(self) -> str | None:
        """The reason why its module cannot be imported; None if it can."""
        if self.module in sys.modules:
            return None
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a plug-in's module may raise anything
            return described(error)
        return None


def plugins() -> list[Plugin]:
    """Return the installed plug-ins by module."""
    spec = find_spec(_GROUP)
    folders = spec.submodule_search_locations if spec is not None else None
    found = {
        each.name: Plugin(each.name) for each in pkgutil.iter_modules(folders or [], f"{_GROUP}.")
    }
    for entry in metadata.entry_points(group=_GROUP):
        package = entry.dist.name if entry.dist else ""
        version = entry.dist.version if entry.dist else ""
        found[entry.value] = Plugin(entry.value, package, version)
    return [found[module] for module in sorted(found)]


def not_installed() -> list[str]:
    """Return the backends that JAX tries to start although they are not installed."""
    asked = {"tpu": has_tpu_library(), "proxy": "JAX_BACKEND_TARGET" in os.environ}
    return [name for name, installed in asked.items() if not installed]


def has_tpu_library() -> bool:
    """Return True if the library of TPUs is installed."""
    return find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
