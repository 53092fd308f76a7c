"""The registry of passes: entry points, plug-in files and modules, and `register`.

Every pass, built-in ones included, is found in the entry-point group `jaxprtool.passes`, and is
imported only when a pipeline names it. `register` adds a class by hand, and `load_plugin` imports a
file or module and registers the passes that it defines. A plug-in that cannot be imported, or whose
name is in use, causes a `PluginWarning` that names it; everything else continues to work.

Reading the entry points of all installed packages takes tens of milliseconds. It is done once, and
again when `sys.path` has changed or a name is not found: the package may have been installed since.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jaxprtool.errors import PipelineError, PluginError, described, did_you_mean
from jaxprtool.passes.framework.base import Pass

GROUP = "jaxprtool.passes"

P = TypeVar("P", bound=type[Pass])


class PluginWarning(UserWarning):
    """A plug-in was skipped, with the reason."""


@dataclass(frozen=True)
class PassSource:
    """The source of a pass.

    Attributes:
        name: The name of the pass.
        find_origin: Returns its package, file or module; reading a package's name takes time.
        load: Imports the class.
    """

    name: str
    find_origin: Callable[[], str]
    load: Callable[[], type[Pass]]

    @property
    def origin(self) -> str:
        """Return the package, file or module that defines the pass."""
        return self.find_origin()


_registered: dict[str, PassSource] = {}


def register(cls: P) -> P:
    """Make a Pass subclass available to pipelines under its `name`; usable as a decorator.

    A class redefined under the same name in the same module replaces the old one, as when a
    notebook cell is run again. A name that another module or package has taken is not replaced;
    the class is ignored with a `PluginWarning`.

    Args:
        cls: The class, with a `name`.

    Returns:
        The class.

    Raises:
        TypeError: If `cls` is not a subclass of `Pass` with a name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass) and cls.name):
        raise TypeError(f"register takes a subclass of jaxprtool.Pass with a name, not {cls!r}")
    _add(cls, cls.__module__)
    return cls


def _add(cls: type[Pass], origin: str) -> None:
    taken = available().get(cls.name)
    if taken is not None and taken.origin != origin:
        _warn_of_clash(cls.name, origin, taken)
        return
    _registered[cls.name] = PassSource(cls.name, lambda: origin, lambda: cls)


def _warn_of_clash(name: str, origin: str, taken: PassSource) -> None:
    message = f"pass '{name}' of {origin} is ignored: {taken.origin} has a pass of that name"
    warnings.warn(PluginWarning(message), stacklevel=3)


def available() -> dict[str, PassSource]:
    """Return every pass that a pipeline may name, sorted by name; imports none of them."""
    return dict(sorted({**_registered, **_installed(tuple(sys.path))}.items()))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Mapping[str, PassSource]:
    """Return the passes of the packages installed on `path`, which is `sys.path`."""
    found: dict[str, PassSource] = {}
    for point in sorted(entry_points(group=GROUP), key=_builtin_first):
        source = PassSource(point.name, partial(_origin, point), partial(_load, point))
        known = found.setdefault(point.name, source)
        if known is not source and known.origin != source.origin:
            _warn_of_clash(point.name, source.origin, known)
    return found


def _builtin_first(point: EntryPoint) -> tuple[bool, str]:
    return (not point.value.startswith("jaxprtool."), point.value)


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _load(point: EntryPoint) -> type[Pass]:
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"pass '{point.name}' of {_origin(point)} cannot be imported: {described(error)}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PluginError(
            f"pass '{point.name}' of {_origin(point)} is not a subclass of jaxprtool.Pass"
        )
    return cls


def find(name: str) -> type[Pass]:
    """Import and return the pass class of that name.

    Raises PipelineError, with the nearest name, for an unknown name, and PluginError if its module
    cannot be imported.
    """
    sources = available()
    if name not in sources:
        _installed.cache_clear()
        sources = available()
    if name not in sources:
        raise PipelineError(
            f"unknown pass '{name}'",
            did_you_mean(name, sources) or "`jaxprtool explain` lists the passes",
        )
    return sources[name].load()


def load_plugin(where: str) -> None:
    """Import a plug-in, a file `path/plugin.py` or a module's dotted name, and register its passes.

    The passes are the Pass subclasses that the module itself defines; a plug-in may also only add
    rules to the open tables (`dce_rules`). One that fails is skipped with a PluginWarning.
    """
    try:
        if where.endswith(".py"):
            module = import_file(Path(where), "jaxprtool_plugin")
        else:
            module = _import_module(where)
    except (Exception, SystemExit) as error:
        warnings.warn(
            PluginWarning(f"plug-in {where} is ignored: {described(error)}"), stacklevel=2
        )
        return
    for value in list(vars(module).values()):
        ours = isinstance(value, type) and issubclass(value, Pass) and value is not Pass
        if ours and value.__module__ == module.__name__ and value.name:
            _add(value, where)


def import_file(path: Path, prefix: str) -> ModuleType:
    """Import a Python file as a separate module, whose name begins with `prefix`."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"{prefix}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)
