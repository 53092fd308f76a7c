"""Resolution of a TARGET, `package.module:attr.path` or `path/file.py:attr.path`, and hints.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.tree_util import PyTreeDef

from jaxprtool.errors import (
    MeshConflictError,
    TargetError,
    UserFunctionError,
    described,
    did_you_mean,
    user_traceback,
)
from jaxprtool.files import NOTEBOOK, NOTEBOOK_HINT
from jaxprtool.ir import process
from jaxprtool.ir.frames import Root, target_root
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import StaticLeaf

# --- target ---------------------------------------------------------------------------------------
# Resolution of a TARGET: `package.module:attr.path` or `path/file.py:attr.path`.

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
    if (match := _CALL.fullmatch(target)) is not None:
        if not match[2].endswith(")"):
            message = f"the target '{target}' must end with the ')' of its call"
            raise TargetError(message, "write file.py:make({'lr': 1e-3}), in quotes")
        target, call = match[1], match[2][:-1]
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
        hint = methods_hint(value, target)
        raise TargetError(
            f"'{path}' in {place} is not callable; its type is {type(value).__name__}",
            f"write {hint}" if hint else _listing(module),
        )
    return Target(value, module, path, call)


def methods_hint(value: object, name: str) -> str:
    """Return the methods that are traced of an object with a name, `net.apply or net.init`, or "".

    These are the methods of modules, of optimizers, and of artifacts of `jax.export`.
    """
    methods = ("apply", "update", "init", "call")
    if isinstance(value, dict | set):
        return ""
    return " or ".join(f"{name}.{method}" for method in methods if _is_callable(value, method))


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
    if path.endswith(NOTEBOOK):
        raise TargetError(f"'{path}' is a notebook, not a Python file", NOTEBOOK_HINT)
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
        with process.limit_of_user():
            return load()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not user_traceback(error) and (missing == name or name.startswith(f"{missing}.")):
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
        if user_traceback(error):
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
        recorded = f", or record the script: jaxprtool record {target}"
        is_file = target.endswith(".py")
        return TargetError(message, f"write {target}:NAME{recorded if is_file else ''}")
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


# --- hints ----------------------------------------------------------------------------------------
# Hints for targets that cannot be traced: what the user can write instead.

# --- targets that are not the function to trace -----------------------------------------------


def target_hint(fun: Callable, target: str, args: str, from_factory: bool) -> str | None:
    """Return what to write instead of a target that is a class or a Flax Linen module.

    Args:
        fun: The object that the target names, or the result of the factory that it names.
        target: The target.
        args: Its arguments, in the notation of `--args`.
        from_factory: Whether `fun` was returned by a factory.
    """
    if hint := class_hint(fun):
        return hint
    if any(cls.__module__.startswith("flax.linen") for cls in type(fun).__mro__):
        if from_factory:
            return "return the module's apply, with (variables, x) as its arguments"
        return (
            f'pass a key to create its variables: {target}.init_with_output --args "key(0), {args}"'
        )
    return None


def class_hint(fun: Callable) -> str | None:
    """Return what to write instead of a class whose instance is to be traced."""
    if not isinstance(fun, type):
        return None
    name = fun.__name__
    return f"{name} is a class; name a function that returns {name}(...), and add --factory"


#: The axes of a mesh in a message, and the type of the first one.
_MESH = re.compile(r"Mesh\(([^()]*), axis_types=\((\w+)")


def mesh_conflict(message: str) -> MeshConflictError | None:
    """Return the error for the message of a function with a mesh of its own; None for others."""
    if "should match the mesh passed to shard_map" not in message:
        return None
    error = MeshConflictError(message, "the function has a mesh of its own; omit --mesh")
    meshes = _MESH.findall(message)
    if meshes and meshes[0][1] == AxisType.Manual.name:
        error.hint = (
            "the function maps over devices within a pmap or shard_map, which JAX refuses; "
            "use vmap for one of them, or a shard_map over both axes"
        )
        return error
    if len(meshes) != 2:  # a long message is cut
        return error
    (axes, kind_set), (own_axes, kind) = meshes
    error.is_alike = axes == own_axes and kind_set != kind
    if error.is_alike:
        error.hint = f"the axes of the function's own mesh are {kind}: " + (
            "shard its arguments with --in-specs, not by type"
            if kind == AxisType.Auto.name
            else "shard its arguments by type, f32[8@x], not with --in-specs"
        )
    return error


def require_arrays(program: Program, target: str, hint: str | None) -> None:
    """Raise TargetError for a function that returns a function, or an object without arrays.

    `hint` is the hint for the target in other cases.
    """
    tree, name = program.out_tree, program.name
    add = f"to trace that function, add --factory: {target} --factory"
    if _is_made_by_factory(tree, bool(program.jaxpr.invars)):
        raise TargetError(f"{name} returns a function and its arguments", add)
    node = tree.node_data()
    if node is None or node[0] is not StaticLeaf:
        return
    value = node[1].value
    if not callable(value):
        type_name = type(value).__name__
        raise TargetError(f"{name} returns a value of type {type_name}, not arrays", hint)
    if program.jaxpr.invars:
        add = f'to trace that function, write the call in TARGET: "{target}(...)"'
    raise TargetError(f"{name} returns a function, not arrays", hint or add)


def _is_made_by_factory(tree: PyTreeDef, takes_arrays: bool) -> bool:
    """Return True if a structure is (function, args) or (function, args, kwargs).

    A function that takes arrays may return a callable module, as a training step does.
    """
    parts = [part.node_data() for part in tree.children()]
    if (tree.node_data() or (None,))[0] not in (tuple, list) or len(parts) not in (2, 3):
        return False
    fun, args = parts[:2]
    if fun is None or args is None or args[0] not in (tuple, list):
        return False
    return (
        callable(fun[1].value) if fun[0] is StaticLeaf else not takes_arrays and _has_call(fun[0])
    )


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


# --- errors of module libraries -----------------------------------------------------------------

#: Messages of module libraries for incorrect use, and what to write instead.
_OF_MODULES = (
    (r"missing .* argument: 'rngs'", "give it rngs=nnx.Rngs(0)"),
    (
        r"`deterministic` is False, but no `rngs`",
        "turn dropout off with model.eval(), or pass rngs",
    ),
    (
        r"Cannot mutate \w+ from a different trace level",
        "pass the module that it changes as an argument: def f(model, x), --args \"ref('model'), "
        'f32[3]"',
    ),
    (r"missing .* argument: 'key'", "pass key=jax.random.key(0)"),
    (
        r"Dropout requires a key",
        "turn dropout off with eqx.nn.inference_mode(model), or pass a key to the call",
    ),
    (r"Can't call compact methods on unbound modules", "call it as model.apply(variables, x)"),
    (
        r'from collection "\w+" in .* but the collection is empty',
        "pass its variables as the first argument: jax.eval_shape(model.init, jax.random.key(0), "
        "x)",
    ),
    (r"needs PRNG for \"dropout\"", 'pass apply rngs={"dropout": key}, or deterministic=True'),
    (
        r"must be initialized inside an `hk.transform`",
        "write net = hk.transform(f) in the file, and name net.apply as TARGET",
    ),
)


def module_hint(text: str) -> str | None:
    """Return what to write instead if modules are used incorrectly."""
    return next((hint for said, hint in _OF_MODULES if re.search(said, text)), None)


# --- values that Python code needs during tracing ---------------------------------------------

_ASKED_BY = re.compile(
    r"\s*The error occurred while tracing the function (?P<function>\S+) at \S+ for \w+\."
    r"(?: This concrete value was not available in Python because it depends on the values? of "
    r"the arguments? (?P<arguments>.+?)\.)?"
)

#: Messages of JAX for a traced value that Python code needs, and what to write instead.
_INSTEAD = {
    "boolean conversion": "choose by an array with jnp.where or jax.lax.cond",
    "__array__": "use jax.numpy instead of numpy for traced arrays",
    "`float` function": "convert an array with jnp.asarray(x, float)",
    "`int` function": "convert an array with jnp.asarray(x, int)",
}


def value_needed(text: str, name: str, arguments: Mapping[str, object]) -> tuple[str, str | None]:
    """Return a shortened JAX message for a traced value that Python code needs, and a hint.

    Args:
        text: JAX's message, on one line.
        name: The name of the traced function.
        arguments: Its flat arguments, by path.
    """
    matches = list(_ASKED_BY.finditer(text))  # one per value
    if not matches:
        return _size_needed(text)
    said = _ASKED_BY.sub("", text).rstrip(" .")
    asked = dict.fromkeys(
        part
        for match in matches
        for part in re.split(r", | and ", match["arguments"] or "")
        if part
    )
    if not asked:
        return said, None
    said += f"; it depends on {', '.join(asked)}"
    in_function = all(match["function"].strip("<>") == name for match in matches)
    if in_function and all(_is_setting(arguments.get(path)) for path in asked):
        return said, _static_hint(list(asked), arguments)
    return said, next((hint for words, hint in _INSTEAD.items() if words in text), None)


#: Messages of JAX and Python for a symbolic size where the function needs a number.
_SYMBOL_ASKED = re.compile(r"Symbolic dimension .*?'|'_DimExpr'")

_LINEAR = r"(?P<name>\w+)(?: (?P<sign>[+-]) (?P<added>\d+))?"

#: A comparison of a symbol plus an offset with a number.
_COMPARED = re.compile(rf"'{_LINEAR}' (?P<by>[<>]=?) '(?P<to>\d+)'")

#: The size of a slice clipped to the array, such as `table[:n]`.
_CUT = re.compile(rf"min\((?P<to>\d+), {_LINEAR}\)")


_MULTIPLE = "with type f32[8*n] the number of rows is a multiple of 8"


def _size_needed(text: str) -> tuple[str, str | None]:
    """Return a shortened JAX message for a symbolic size where a number is needed, and a hint."""
    said = re.split(r"[. ]+(?:This error arises for|Using symbolic scope)", text)[0].rstrip(".")
    if "Cannot divide evenly the sizes" in text:
        return said, _MULTIPLE
    cut = _CUT.search(text)
    if cut and "incompatible shapes" in text:
        return said, _no_more(cut["name"], _limit(cut))
    if not _SYMBOL_ASKED.search(text):
        return text, None
    if "comparison" in said:
        return said, _comparison_hint(said)
    return said, (
        "a symbol is not a number: x.shape[0] can be symbolic, but len(x) and float(x.shape[0]) "
        "cannot"
    )


def _limit(match: re.Match[str]) -> int:
    """Return the number that the symbol alone is compared with."""
    return int(match["to"]) - int(f"{match['sign'] or ''}{match['added'] or 0}")


def _no_more(name: str, most: int) -> str:
    return f"f32[{name}<={most}] declares {_rows(most, 'at most')}"


def _rows(count: int, bound: str) -> str:
    return f"{bound} 1 row" if count == 1 else f"{bound} {count} rows"


def _comparison_hint(said: str) -> str:
    """Return a hint with a type that makes a comparison of sizes true or false."""
    match = _COMPARED.search(said)
    if "floordiv" in said or "mod(" in said:
        return _MULTIPLE
    if match is None:
        return "a symbol is any size from 1; f32[n+1] declares at least 2 rows"
    name, least = match["name"], _limit(match) + (match["by"] in (">", "<="))
    if least <= 1:
        return _no_more(name, 1)
    more = f"f32[{name}>={least}], or f32[{name}+{least - 1}], declares at least {least}"
    return f"{_no_more(name, least - 1)}; {more}"


def _is_setting(value: object) -> bool:
    """Return True if an argument can be a setting: an integer or a boolean."""
    if isinstance(value, bool | int):
        return True
    dtype = getattr(value, "dtype", None)
    scalar_types = jax.numpy.bool_, jax.numpy.integer
    return getattr(value, "shape", None) == () and any(
        jax.numpy.issubdtype(dtype, scalar_type) for scalar_type in scalar_types
    )


def _static_hint(paths: Sequence[str], arguments: Mapping[str, Any]) -> str:
    if all(path.isidentifier() and isinstance(arguments[path], int) for path in paths):
        return f"to make it static, add --static-argnames {','.join(paths)}"
    path, value = paths[0], arguments[paths[0]]
    if not isinstance(value, int):  # a type, or an array
        value = value.dtype == bool or 1
    return f"to make {path} static, write its value in --args as static({value})"
