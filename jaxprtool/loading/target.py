"""Resolution of a TARGET: `package.module:attr.path` or `path/file.py:attr.path`.

A factory that takes arguments is called in the TARGET: `train.py:make_train({'lr': 1e-3})`.

A file inside a package is imported by its dotted name, so that its relative imports work. Any other
file is imported under its stem, with its folder on the path as when Python runs it. If another
module has that name (a user's `json.py`), the file is imported under a different one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from jaxprtool.errors import (
    TargetError,
    UserFunctionError,
    described,
    did_you_mean,
    user_frames,
)
from jaxprtool.ir.basics import recursion
from jaxprtool.ir.source.frames import Root, target_root

_FORM = "write package.module:function or path/file.py:function"


#: A TARGET with a call. The part before the colon may have brackets, the name may not.
_CALL = re.compile(r"(.+?:[\w.]+)\((.*)", re.DOTALL)


class TargetText(NamedTuple):
    """The parts of a TARGET: before the colon, after it, and between the brackets of a call."""

    place: str
    path: str
    call: str | None


def split_target(target: str) -> TargetText:
    """Return the parts of a TARGET; without a colon, all of it is the place.

    Raises:
        TargetError: If a call is not closed, or something follows it.
    """
    call = None
    if (found := _CALL.fullmatch(target)) is not None:
        if not found[2].endswith(")"):
            message = f"the target '{target}' must end with the ')' of its call"
            raise TargetError(message, "write file.py:make({'lr': 1e-3}), in quotes")
        target, call = found[1], found[2][:-1]
    place, colon, path = target.rpartition(":")
    return TargetText(place, path, call) if colon else TargetText(target, "", None)


def is_call(target: str) -> bool:
    """Return True if a TARGET ends with a call, in which `@` does not start a revision."""
    return target.endswith(")") and _CALL.fullmatch(target) is not None


@dataclass(frozen=True)
class Target:
    """A callable that a TARGET names, the module it was found in, and its path of attributes.

    `call` is the text of the arguments in the TARGET's call.
    """

    value: Callable
    module: ModuleType
    name: str
    call: str | None = None

    @property
    def roots(self) -> tuple[Root, ...]:
        """The folders whose files are the user's."""
        file = getattr(self.module, "__file__", None)
        return () if file is None else (target_root(file),)


def resolve(target: str) -> Target:
    """Import the module of a TARGET and find the callable in it.

    Raises TargetError if the module, file or attribute does not exist or is not callable, and
    UserFunctionError if the module raises during import.
    """
    place, path, call = split_target(target)
    if ":" not in target:
        raise _without_attribute(target)
    if not place or not path:
        missing = "module or file" if not place else "function"
        raise TargetError(f"the target '{target}' has no {missing}", _FORM)
    module = import_place(place)
    value = _attribute(module, path, place)
    if not callable(value):
        type_name = type(value).__name__
        own = [name for name in ("apply", "update", "init") if _is_callable(value, name)]
        hint = " or ".join(f"{target}.{name}" for name in own)
        raise TargetError(
            f"'{path}' in {place} is not callable; its type is {type_name}",
            f"write {hint}" if own and not isinstance(value, dict | set) else _listing(module),
        )
    return Target(value, module, path, call)


def import_place(place: str) -> ModuleType:
    """Return the module named before the colon of a TARGET, by dotted name or by file."""
    if "\0" in place:
        raise TargetError("the target contains a NUL character")
    if place.endswith(".py") or os.sep in place or os.path.isfile(place):
        return _import_file(place)
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"'{place}' is not the name of a module", _FORM)
    _make_importable(os.getcwd())
    return _import(place, place)


# --- importing --------------------------------------------------------------------------------


def _import_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise TargetError(f"no file '{path}'", _file_hint(path))
    if not path.endswith(".py"):
        raise TargetError(f"'{path}' is not a Python file", _FORM)
    path = os.path.abspath(path)
    root, name = _dotted_name(path)
    if root == os.path.dirname(path):
        return _import_lone_file(path, name)
    _make_importable(root)
    module = _import(name, path)
    if not _is_file(module, path):
        raise TargetError(
            f"'{_short(path)}' has the module name {name}, but {name} is imported from "
            f"{module.__file__}",
            "rename the package, or run where only one of them can be imported",
        )
    return module


def _dotted_name(path: str) -> tuple[str, str]:
    """Return the folder to import a file from, above all its packages, and its dotted name."""
    folder, stem = os.path.dirname(path), os.path.basename(path).removesuffix(".py")
    parts = [] if stem == "__init__" else [stem]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        above, package = os.path.split(folder)
        if not package.isidentifier():
            break
        folder, parts = above, [package, *parts]
    return folder, ".".join(parts) or stem


def _import_lone_file(path: str, stem: str) -> ModuleType:
    folder = os.path.dirname(path)
    name = stem = stem.replace(".", "_")
    number = 1
    while _belongs_to_another(name, path):
        number += 1
        name = f"{stem}_{number}"
    # A file with the name of an installed module must not shadow that module.
    _make_importable(folder, last=name != stem)
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _guarded(partial(spec.loader.exec_module, module), name, path)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _belongs_to_another(name: str, path: str) -> bool:
    """Return True if `import name` would import another module than the file at `path`."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return not _is_file(loaded, path)
    folder = os.path.dirname(path)
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = PathFinder.find_spec(name, elsewhere)
    return name in sys.stdlib_module_names or (spec is not None and spec.origin is not None)


def _import(name: str, shown: str) -> ModuleType:
    return _guarded(partial(importlib.import_module, name), name, shown)


def _guarded(load: Callable[[], Any], name: str, shown: str) -> Any:
    """Import with `load`; report a missing module differently from one that raises."""
    try:
        with recursion.limit_of_user():
            return load()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not user_frames(error) and (missing == name or name.startswith(f"{missing}.")):
            raise TargetError(f"no module named '{missing}'", _module_hint(name, missing)) from None
        raise _raised(f"importing {_short(shown)}", error) from error
    except SyntaxError as error:
        where = f"{_short(error.filename or shown)}:{error.lineno}"
        raise UserFunctionError(f"{where}: {type(error).__name__}: {error.msg}") from error
    except SystemExit as error:
        message = f"{_short(shown)} called sys.exit({error.code!r}) while it was imported"
        hint = 'move the script\'s code under `if __name__ == "__main__":`'
        raise UserFunctionError(message, hint) from error
    except OSError as error:
        if user_frames(error):
            raise _raised(f"importing {_short(shown)}", error) from error
        raise TargetError(f"cannot read '{_short(shown)}': {error.strerror or error}") from error
    except Exception as error:
        raise _raised(f"importing {_short(shown)}", error) from error


def _raised(doing: str, error: Exception) -> UserFunctionError:
    return UserFunctionError(f"{doing} raised {described(error)}")


def _make_importable(folder: str, *, last: bool = False) -> None:
    """Add a folder to Python's path, first or last, unless it is there."""
    if not any(os.path.abspath(entry) == folder for entry in sys.path):
        sys.path.insert(len(sys.path) if last else 0, folder)


def _is_file(module: ModuleType, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.exists(file) and os.path.samefile(file, path)


# --- attributes -------------------------------------------------------------------------------


def _attribute(module: ModuleType, path: str, place: str) -> Any:
    value: Any = module
    for i, part in enumerate(path.split(".")):
        try:
            value = getattr(value, part)
        except AttributeError:
            owner = ".".join([place, *path.split(".")[:i]])
            names = _public(dir(value))
            if i == path.count("."):
                names = [name for name in names if _is_callable(value, name)]
            hint = did_you_mean(part, names) or (_listing(module) if value is module else None)
            raise TargetError(f"'{owner}' has no attribute '{part}'", hint) from None
        except Exception as error:  # a property of a user class may raise anything
            raise _raised(f"reading {place}:{path}", error) from error
    return value


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def _is_callable(owner: object, name: str) -> bool:
    try:
        return callable(getattr(owner, name))
    except Exception:  # a property of a user class may raise anything
        return False


def _functions(module: ModuleType) -> list[str]:
    """Return the public callables that the module itself defines, without classes."""
    return [
        name
        for name in _public(vars(module))
        if callable(value := getattr(module, name))
        and not isinstance(value, type)
        and getattr(value, "__module__", None) == module.__name__
    ]


def _listing(module: ModuleType) -> str | None:
    names = _functions(module)
    more = ", ..." if len(names) > 8 else ""
    return f"it has {', '.join(names[:8])}{more}" if names else None


# --- hints ------------------------------------------------------------------------------------


def _without_attribute(target: str) -> TargetError:
    """Return the error for a TARGET without a colon, with a suggestion."""
    message = f"the target '{target}' does not name a function"
    module, _, name = target.rpartition(".")
    try:
        names = _functions(import_place(target))
    except (TargetError, UserFunctionError):
        dotted = module and all(part.isidentifier() for part in target.split("."))
        return TargetError(message, f"did you mean '{module}:{name}'?" if dotted else _FORM)
    if not names:
        return TargetError(message, f"write {target}:NAME")
    return TargetError(message, "write " + " or ".join(f"{target}:{name}" for name in names[:5]))


def _file_hint(path: str) -> str | None:
    folder, name = os.path.split(path)
    if os.path.isfile(path + ".py"):
        return f"did you mean '{path}.py'?"
    try:
        files = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
    except OSError:
        return f"folder '{folder}' does not exist"
    hint = did_you_mean(name, files)
    return hint.replace("'", f"'{os.path.join(folder, '')}", 1) if hint else None


def _module_hint(name: str, missing: str) -> str | None:
    parent, _, last = missing.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    names = [module.name for module in pkgutil.iter_modules(paths)]
    near = did_you_mean(last, names, likeness=0.8)
    if near and parent:
        near = near.replace("'", f"'{parent}.", 1)
    as_path = name.replace(".", os.sep) + ".py"
    return f"did you mean '{as_path}'?" if os.path.isfile(as_path) else near


def _short(path: str) -> str:
    """Return a path relative to the current folder if it is inside it, else unchanged."""
    inside = os.path.isabs(path) and path.startswith(os.getcwd() + os.sep)
    return os.path.relpath(path) if inside else path
