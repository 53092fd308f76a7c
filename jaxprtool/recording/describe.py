"""Describe functions and the arguments of their calls, for the `Key` of a compilation.

This runs in the user's script, once for each compilation. It never raises, and keeps no reference
to a value.
"""

from __future__ import annotations

import dis
import functools
import os
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.pmapped import mapped_call
from jaxprtool.jaxcompat.source_locations import is_installed
from jaxprtool.recording import libraries
from jaxprtool.recording.keys import FunctionKind, FunctionObject
from jaxprtool.recording.structures import Structure
from jaxprtool.recording.values import Numbers, Values, attributes, cell_content, is_empty

#: The maximum number of variables of a closure.
_MOST_VARIABLES = 50

#: The maximum number of wrappers around a function.
_MOST_WRAPPERS = 20


@dataclass(frozen=True)
class Described:
    """A Python function.

    Attributes:
        name: Its name, without angle brackets: `lambda`. For a callable object, the name of its
            class.
        file: The file of its definition; "" if it is unknown.
        line: The line of its definition; 0 if it is unknown.
        code: A text that is the same for functions with the same code, whatever they close over or
            bind. It differs for a function and its gradient.
        object: Its description in a `Key`.
        parameters: Its parameters that are not bound.
    """

    name: str
    file: str
    line: int
    code: str
    object: FunctionObject
    parameters: Parameters

    @property
    def place(self) -> str:
        """The file's name and line of its definition: `train.py:24`; "" if it is unknown."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        positional: The parameters that may be given by position.
        keyword: The keyword-only parameters.
        rest: The name of `*args`; "" if there is none.
        others: The name of `**kwargs`; "" if there is none.
    """

    positional: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    rest: str = "args"
    others: str = "kwargs"

    def at(self, position: int) -> str:
        """Return the name of the argument at a position: `x`, `args[0]`."""
        count = len(self.positional)
        if position < count:
            return self.positional[position]
        return f"{self.rest or 'args'}[{position - count}]"

    def of(self, key: object) -> str:
        """Return the name of the argument with a keyword: `x`, `kwargs['x']`."""
        known = key in self.positional or key in self.keyword or not self.others
        return str(key) if known else f"{self.others}[{key!r}]"

    def after(self, count: int, names: Mapping[str, object]) -> Parameters:
        """Return the parameters that are left when some are bound by position and by name."""
        positional = tuple(each for each in self.positional[count:] if each not in names)
        bound_between = len(positional) < len(self.positional[count:])
        keyword = self.keyword + (self.positional[count:] if bound_between else ())
        return Parameters(positional, keyword, self.rest, self.others)


@dataclass(frozen=True)
class Call:
    """A function and the structure of the arguments of its call, in the user's terms.

    Attributes:
        function: The user's function, inside the wrappers of libraries.
        structure: As in `Key`.
        statics: As in `Key`.
        names: The path of each flat argument in the user's call. A library may pass the arguments
            to JAX in another form.
    """

    function: Described
    structure: dict[str, str]
    statics: dict[str, str]
    names: tuple[str, ...]


def call(
    fun: Callable[..., Any],
    tree: PyTreeDef | None,
    names: Sequence[str],
    statics: Mapping[str, object],
    numbers: Numbers,
    jitted: object = None,
    made: str = "",
) -> Call:
    """Describe the call for which JAX compiles a function.

    Args:
        fun: The argument of `jax.jit`.
        tree: The structure of the dynamic arguments, `(args, kwargs)`; None if it is unknown.
        names: The paths of the flat dynamic arguments, from JAX's debug information.
        statics: The values of the static arguments by name.
        numbers: The numbers of objects in this process.
        jitted: The result of `jax.jit`.
        made: The user's line that called `jax.jit`, if it is known.
    """
    values = Values(numbers)
    try:
        filtered = libraries.filtered_call(fun, statics)
        if filtered is not None:
            return _filtered(filtered, tuple(names), values, jitted, made)
    except Exception:
        pass  # another release of Equinox: describe the call as JAX sees it
    try:
        mapped = mapped_call(fun)
    except Exception:
        mapped = None  # another release of JAX
    if mapped is None:
        function = described(fun, numbers, jitted, made)
    else:  # JAX looks up the function of `pmap` at each call, where the user's line is unknown
        function = described(mapped.fun, numbers)
        function = replace(function, object=replace(function.object, wrapper="jax.pmap"))
        statics = {function.parameters.at(i): each for i, each in mapped.statics.items()}
        tree = mapped.tree if tree is not None else None
    static_texts = {name: _safe(values, value) for name, value in statics.items()}
    parameters = function.parameters
    free = tuple(each for each in parameters.positional if each not in statics)
    parameters = Parameters(free, parameters.keyword, parameters.rest, parameters.others)
    structure = Structure(values, names if mapped is None else None)
    try:
        if tree is not None:
            _arguments(structure, tree, parameters)
    except Exception:
        structure = Structure(values, names)
    found = structure.leaves if len(structure.leaves) == len(names) else names
    return Call(function, structure.texts, static_texts, tuple(found))


def described(
    fun: Callable[..., Any], numbers: Numbers, jitted: object = None, made: str = ""
) -> Described:
    """Describe the function that `jax.jit` was called with. The arguments are those of `call`."""
    try:
        core = _core(fun, Values(numbers, compared=False), 0)
    except Exception:
        core = _Core(type(fun).__name__, "object")
    try:
        number = numbers(fun, "functions")
        jit = 0 if jitted is None else numbers(jitted, "results of jit")
    except Exception:
        number = jit = 0
    name = core.name.strip("<>")
    closure = dict(list(core.closure.items())[:_MOST_VARIABLES])
    function = FunctionObject(number, jit, made, core.kind, closure, name, libraries.wrapper(fun))
    code = core.code
    if code is None:
        return Described(name, "", 0, f"{core.name} of no file", function, core.parameters)
    checksum = zlib.crc32(code.co_code + repr((code.co_names, _plain_constants(code))).encode())
    around = "".join(f"{each}:" for each in core.wrappers)
    identity = f"{code.co_filename}:{code.co_firstlineno}:{checksum:08x}:{around}{core.name}"
    file, line = code.co_filename, code.co_firstlineno
    function = replace(function, library=_is_installed(file))
    return Described(name, file, line, identity, function, core.parameters)


@lru_cache(1000)
def _is_installed(file: str) -> bool:
    return is_installed(file)


# --- functions ------------------------------------------------------------------------------------


@dataclass
class _Core:
    """The innermost function of partials, methods and wrappers."""

    name: str
    kind: FunctionKind
    code: types.CodeType | None = None
    parameters: Parameters = field(default_factory=Parameters)
    closure: dict[str, str] = field(default_factory=dict)
    wrappers: list[str] = field(default_factory=list)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object], values: Values) -> None:
        """Add bound arguments to the closure."""
        for i, each in enumerate(args):
            self.closure[self.parameters.at(i)] = _safe(values, each)
        for name, each in kwargs.items():
            self.closure[self.parameters.of(name)] = _safe(values, each)
        self.parameters = self.parameters.after(len(args), kwargs)


def _core(fun: Any, values: Values, depth: int) -> _Core:
    kind = type(fun)
    if depth > _MOST_WRAPPERS:
        return _Core(kind.__name__, "object")
    if isinstance(fun, functools.partial):
        core = _core(fun.func, values, depth + 1)
        core.bind(fun.args, fun.keywords, values)
        core.kind = "partial"
        return core
    if kind is types.MethodType:
        core = _core(fun.__func__, values, depth + 1)
        core.bind((fun.__self__,), {}, values)
        core.kind = "method"
        return core
    if kind is types.FunctionType:
        return _function(fun, values, depth)
    wrapped = libraries.wrapped(fun)
    if wrapped is not None:
        return _core(wrapped, values, depth + 1)
    method = libraries.call_method(kind)
    if isinstance(fun, type) or type(method) is not types.FunctionType:
        return _Core(_own_name(fun), "object")
    core = _core(method, values, depth + 1)
    core.bind((fun,), {}, values)
    core.kind, core.name = "object", _own_name(fun)
    return core


def _own_name(fun: Any) -> str:
    """Return the name of a class or of a builtin function, else the name of the object's class."""
    named = isinstance(fun, type) or type(fun) is types.BuiltinFunctionType
    name = fun.__name__ if named else attributes(fun).get("__name__")
    return name if isinstance(name, str) else type(fun).__name__


def _function(fun: types.FunctionType, values: Values, depth: int) -> _Core:
    """Return the core of a function, found through the `__wrapped__` of `functools.wraps`."""
    code = fun.__code__
    wrapped = attributes(fun).get("__wrapped__")
    cells = {
        name: cell_content(cell)
        for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True)
    }
    if wrapped is not None and callable(wrapped):
        wrapped = libraries.referent(wrapped)
        core = _core(wrapped, values, depth + 1)
        own = _jaxs_transformation(fun, cells)
        core.wrappers.append(own or f"{PurePath(code.co_filename).name}:{code.co_firstlineno}")
        names = () if own else [k for k in cells if k not in core.closure]
        cells = {k: cells[k] for k in names if cells[k] is not wrapped}
    else:
        core = _Core(fun.__name__, "lambda" if code.co_name == "<lambda>" else "function", code)
        core.parameters = _parameters(code)
        positional = core.parameters.positional
        defaults = fun.__defaults__ or ()
        optional = positional[len(positional) - len(defaults) :]
        for name, value in zip(optional, defaults, strict=True):
            core.closure[name] = _safe(values, value)
        for name, value in (fun.__kwdefaults__ or {}).items():
            core.closure[name] = _safe(values, value)
        for name in global_names(code):
            value = fun.__globals__.get(name)
            if type(value) in _PLAIN and name not in core.closure:
                core.closure[name] = _safe(values, value)
    for name, value in cells.items():
        if value is not fun and not is_empty(value):
            core.closure[name] = _safe(values, value)
    return core


def _jaxs_transformation(fun: types.FunctionType, cells: Mapping[str, object]) -> str:
    """Return the name of the JAX transformation that made a function, such as `vmap`, or ""."""
    if not fun.__code__.co_filename.startswith(_JAX):
        return ""
    # The outermost function only removes frames from tracebacks.
    inner = cells.get("fun")
    behind = type(inner) is types.FunctionType and inner.__code__.co_filename.startswith(_JAX)
    return inner.__code__.co_name if behind else fun.__code__.co_name  # type: ignore[attr-defined]


_JAX = os.path.join(os.path.dirname(jax.__file__), "")

#: The types of globals that are recorded with the closure of a function, such as the variable of a
#: loop at the top level of a script. Other globals are modules, functions and arrays.
_PLAIN = frozenset({int, float, complex, bool, str})


@lru_cache(1000)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a function reads."""
    if not code.co_names:
        return ()
    read = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(read))


def _parameters(code: types.CodeType) -> Parameters:
    names, count = code.co_varnames, code.co_argcount
    last = count + code.co_kwonlyargcount
    has_rest, has_others = code.co_flags & 4, code.co_flags & 8  # inspect.CO_VARARGS, …
    rest = names[last] if has_rest else ""
    others = names[last + bool(has_rest)] if has_others else ""
    return Parameters(names[:count], names[count:last], rest, others)


def _plain_constants(code: types.CodeType) -> list[object]:
    """Return the constants of a code object whose text is the same in every process."""
    plain = (int, float, complex, str, bytes, type(None))
    inner = [each.co_code for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*(each for each in code.co_consts if isinstance(each, plain)), *inner]


def _safe(values: Values, value: object) -> str:
    try:
        return values(value)
    except Exception:
        return type(value).__name__


# --- arguments ------------------------------------------------------------------------------------


def _arguments(structure: Structure, tree: PyTreeDef, parameters: Parameters) -> None:
    """Add the arguments `(args, kwargs)` to a structure."""
    args, kwargs = tree.children()
    shown = []
    for i, each in enumerate(args.children()):
        name = structure.root(each, parameters.at(i))
        shown.append(name)
        structure.add(each, name)
    for key, each in zip(kwargs.node_data()[1], kwargs.children(), strict=True):
        name = structure.root(each, parameters.of(key))
        shown.append(f"{name}=")
        structure.add(each, name)
    structure.signature(shown)


def _filtered(
    found: libraries.FilteredCall,
    names: tuple[str, ...],
    values: Values,
    jitted: object,
    made: str,
) -> Call:
    """Describe a call of `equinox.filter_jit`, which passes its arguments on in another form."""
    function = described(found.fun, values.numbers, jitted, made)
    is_module = found.callee.num_nodes > 1 or not found.callee.num_leaves
    parameters = function.parameters.after(int(is_module), {})
    name = found.name or function.name
    object = replace(function.object, wrapper="equinox.filter_jit", name=name)
    if is_module:
        object = replace(object, kind="object" if found.name else "method", closure={})
    code = f"{function.code.rpartition(':')[0]}:{name}" if found.name else function.code
    function = replace(function, object=object, name=name, code=code, parameters=parameters)
    structure = Structure(values)
    paths: dict[tuple[str, int], str] = {}
    statics: dict[str, str] = {}
    structure.add(found.callee, "self")
    ends = {"fun": len(structure.leaves)}
    shown = [parameters.at(0)] if found.count else []
    structure.add(found.first, "".join(shown))
    ends["first"] = len(structure.leaves)
    args, kwargs = found.rest.children()
    for i, each in enumerate(args.children()[: max(found.count - 1, 0)]):
        shown.append(parameters.at(i + 1))
        structure.add(each, shown[-1])
    for key, each in zip(kwargs.node_data()[1], kwargs.children(), strict=True):
        shown.append(f"{parameters.of(key)}=")
        structure.add(each, parameters.of(key))
    ends["rest"] = len(structure.leaves)
    structure.signature(shown)
    start = 0
    for part, end in ends.items():
        leaves = structure.leaves[start:end]
        for i, (path, static) in enumerate(zip(leaves, found.leaves[part], strict=True)):
            if static is None:
                paths[part, i] = path
            elif part != "fun" or is_module:
                text = _safe(values, static)
                if path.isidentifier():
                    statics[path] = text
                else:
                    structure.texts[path] = f"={text}"
        start = end
    return Call(function, structure.texts, statics, libraries.renamed(names, paths))
