"""Describe functions, their arguments and settings: the `CacheKey` of a compilation.

This runs in the user's script, once for each compilation. It never raises, and keeps no reference
to a value.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import os
import re
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import TracedOptions
from jaxprtool.jaxcompat.compile_hooks import trace_settings
from jaxprtool.jaxcompat.mapping import mapped_call
from jaxprtool.jaxcompat.source_locations import is_installed
from jaxprtool.recording import calls
from jaxprtool.recording.recorded_run import Argument
from jaxprtool.recording.values import (
    LIMIT,
    ObjectNumbers,
    ValueTexts,
    attributes,
    cell_content,
    is_empty,
)

# --- describe -------------------------------------------------------------------------------------
# Describe functions and the arguments of their calls, for the `CacheKey` of a compilation.

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
        object: Its description in a `CacheKey`.
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
        is_named = key in self.positional or key in self.keyword or not self.others
        return str(key) if is_named else f"{self.others}[{key!r}]"

    def after(self, count: int, names: Mapping[str, object]) -> Parameters:
        """Return the parameters that are left when some are bound by position and by name."""
        positional = tuple(name for name in self.positional[count:] if name not in names)
        bound_between = len(positional) < len(self.positional[count:])
        keyword = self.keyword + (self.positional[count:] if bound_between else ())
        return Parameters(positional, keyword, self.rest, self.others)


@dataclass(frozen=True)
class DescribedCall:
    """A function and the structure of the arguments of its call, in the user's terms.

    Attributes:
        function: The user's function, inside the wrappers of libraries.
        structure: As in `CacheKey`.
        statics: As in `CacheKey`.
        names: The path of each flat argument in the user's call. A library may pass the arguments
            to JAX in another form.
    """

    function: Described
    structure: dict[str, str]
    statics: dict[str, str]
    names: tuple[str, ...]


def described_call(
    fun: Callable[..., Any],
    tree: PyTreeDef | None,
    names: Sequence[str],
    statics: Mapping[str, object],
    numbers: ObjectNumbers,
    jitted: object = None,
    jit_line: Place = UNKNOWN,
) -> DescribedCall:
    """Describe the call for which JAX compiles a function.

    Args:
        fun: The argument of `jax.jit`.
        tree: The structure of the dynamic arguments, `(args, kwargs)`; None if it is unknown.
        names: The paths of the flat dynamic arguments, from JAX's debug information.
        statics: The values of the static arguments by name.
        numbers: The numbers of objects in this process.
        jitted: The result of `jax.jit`.
        jit_line: The user's line that called `jax.jit`, if it is known.
    """
    values = ValueTexts(numbers)
    try:
        filtered = calls.filtered_call(fun, statics)
        if filtered is not None:
            return _filtered(filtered, tuple(names), values, jitted, jit_line)
    except Exception:
        pass  # another release of Equinox: describe the call as JAX sees it
    try:
        mapped = mapped_call(fun)
    except Exception:
        mapped = None  # another release of JAX
    if mapped is None:
        function = described_function(fun, numbers, jitted, jit_line)
    else:  # JAX looks up the function of `pmap` at each call, where the user's line is unknown
        function = described_function(mapped.fun, numbers)
        function = replace(function, object=replace(function.object, wrapper="jax.pmap"))
        statics = {function.parameters.at(i): value for i, value in mapped.statics.items()}
        tree = mapped.tree if tree is not None else None
    static_texts = {name: _safe(values, value) for name, value in statics.items()}
    parameters = function.parameters
    free = tuple(name for name in parameters.positional if name not in statics)
    parameters = Parameters(free, parameters.keyword, parameters.rest, parameters.others)
    structure = ArgumentStructure(values, names if mapped is None else None)
    try:
        if tree is not None:
            _arguments(structure, tree, parameters)
    except Exception:
        structure = ArgumentStructure(values, names)
    paths = structure.leaves if len(structure.leaves) == len(names) else names
    return DescribedCall(function, structure.texts, static_texts, tuple(paths))


def described_function(
    fun: Callable[..., Any],
    numbers: ObjectNumbers,
    jitted: object = None,
    jit_line: Place = UNKNOWN,
) -> Described:
    """Describe a function under `jax.jit`. The arguments are those of `described_call`."""
    try:
        core = _core(fun, ValueTexts(numbers, compared=False), 0)
    except Exception:
        core = _Core(type(fun).__name__, "object")
    try:
        number = numbers(fun, "functions")
        jit = 0 if jitted is None else numbers(jitted, "results of jit")
    except Exception:
        number = jit = 0
    name = core.name.strip("<>")
    closure = dict(list(core.closure.items())[:_MOST_VARIABLES])
    function = FunctionObject(number, jit, jit_line, core.kind, closure, name, calls.wrapper(fun))
    code = core.code
    if code is None:
        return Described(name, "", 0, f"{core.name} of no file", function, core.parameters)
    checksum = zlib.crc32(code.co_code + repr((code.co_names, _plain_constants(code))).encode())
    around = "".join(f"{wrapper}:" for wrapper in core.wrappers)
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

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object], values: ValueTexts
    ) -> None:
        """Add bound arguments to the closure."""
        for i, value in enumerate(args):
            self.closure[self.parameters.at(i)] = _safe(values, value)
        for name, value in kwargs.items():
            self.closure[self.parameters.of(name)] = _safe(values, value)
        self.parameters = self.parameters.after(len(args), kwargs)


def _core(fun: Any, values: ValueTexts, depth: int) -> _Core:
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
    wrapped = calls.wrapped_function(fun)
    if wrapped is not None:
        return _core(wrapped, values, depth + 1)
    method = calls.call_method(kind)
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


def _function(fun: types.FunctionType, values: ValueTexts, depth: int) -> _Core:
    """Return the core of a function, found through the `__wrapped__` of `functools.wraps`."""
    code = fun.__code__
    wrapped = attributes(fun).get("__wrapped__")
    cells = {
        name: cell_content(cell)
        for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True)
    }
    if wrapped is not None and callable(wrapped):
        wrapped = calls.referent(wrapped)
        core = _core(wrapped, values, depth + 1)
        transformation = _jaxs_transformation(fun, cells)
        core.wrappers.append(
            transformation or f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
        )
        names = () if transformation else [k for k in cells if k not in core.closure]
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
    read = (
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    )
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
    inner = [
        constant.co_code for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return [*(constant for constant in code.co_consts if isinstance(constant, plain)), *inner]


def _safe(values: ValueTexts, value: object) -> str:
    try:
        return values(value)
    except Exception:
        return type(value).__name__


# --- arguments ------------------------------------------------------------------------------------


def _arguments(structure: ArgumentStructure, tree: PyTreeDef, parameters: Parameters) -> None:
    """Add the arguments `(args, kwargs)` to a structure."""
    args, kwargs = tree.children()
    shown = []
    for i, child in enumerate(args.children()):
        name = structure.root(child, parameters.at(i))
        shown.append(name)
        structure.add(child, name)
    for key, child in zip(kwargs.node_data()[1], kwargs.children(), strict=True):
        name = structure.root(child, parameters.of(key))
        shown.append(f"{name}=")
        structure.add(child, name)
    structure.signature(shown)


def _filtered(
    filtered: calls.FilteredCall,
    names: tuple[str, ...],
    values: ValueTexts,
    jitted: object,
    jit_line: Place,
) -> DescribedCall:
    """Describe a call of `equinox.filter_jit`, which passes its arguments on in another form."""
    function = described_function(filtered.fun, values.numbers, jitted, jit_line)
    is_module = filtered.callee.num_nodes > 1 or not filtered.callee.num_leaves
    parameters = function.parameters.after(int(is_module), {})
    name = filtered.name or function.name
    object = replace(function.object, wrapper="equinox.filter_jit", name=name)
    if is_module:
        object = replace(object, kind="object" if filtered.name else "method", closure={})
    code = f"{function.code.rpartition(':')[0]}:{name}" if filtered.name else function.code
    function = replace(function, object=object, name=name, code=code, parameters=parameters)
    structure = ArgumentStructure(values)
    paths: dict[tuple[str, int], str] = {}
    statics: dict[str, str] = {}
    structure.add(filtered.callee, "self")
    ends = {"fun": len(structure.leaves)}
    shown = [parameters.at(0)] if filtered.count else []
    structure.add(filtered.first, "".join(shown))
    ends["first"] = len(structure.leaves)
    args, kwargs = filtered.rest.children()
    for i, child in enumerate(args.children()[: max(filtered.count - 1, 0)]):
        shown.append(parameters.at(i + 1))
        structure.add(child, shown[-1])
    for key, child in zip(kwargs.node_data()[1], kwargs.children(), strict=True):
        shown.append(f"{parameters.of(key)}=")
        structure.add(child, parameters.of(key))
    ends["rest"] = len(structure.leaves)
    structure.signature(shown)
    start = 0
    for part, end in ends.items():
        leaves = structure.leaves[start:end]
        for i, (path, static) in enumerate(zip(leaves, filtered.leaves[part], strict=True)):
            if static is None:
                paths[part, i] = path
            elif part != "fun" or is_module:
                text = _safe(values, static)
                if path.isidentifier():
                    statics[path] = text
                else:
                    structure.texts[path] = f"={text}"
        start = end
    return DescribedCall(function, structure.texts, statics, calls.renamed(names, paths))


# --- keys -----------------------------------------------------------------------------------------
# The cache key of one compilation: JAX looks up a compiled function by it.
#
# JAX compiles again if the key differs from those of all earlier calls. `reasons` compares keys.

FunctionKind = Literal["function", "lambda", "partial", "method", "object"]


@dataclass(frozen=True)
class FunctionObject:
    """The Python function of a compilation.

    Attributes:
        number: A number that identifies the function object.
        jit: A number that identifies the result of `jax.jit`.
        made: The user's line that made the object or called `jit` on it, if it is known.
        kind: "function", "lambda", "partial", "method" or "object" (a callable of another class).
        closure: The closed-over variables, the defaults, the arguments bound by a `partial` or a
            method, and the globals that are numbers or strings, as text by name. The text is the
            value of a number or a string, the type of an array, and the class and identity of any
            other object.
        name: Its name; for a callable object, the name of its class.
        library: Whether it is defined in an installed package, so that the user cannot change it.
        wrapper: The library's function that called `jax.jit`: `equinox.filter_jit`, `nnx.jit`. For
            a loop outside of `jit`, the function that made it: `jax.lax.scan`. Else "".
    """

    number: int
    jit: int
    made: Place
    kind: FunctionKind
    closure: dict[str, str]
    name: str = ""
    wrapper: str = ""
    library: bool = False


@dataclass(frozen=True)
class CacheKey:
    """The cache key of a compilation.

    Attributes:
        function: The Python function.
        structure: The structure of the dynamic arguments, by path: `batch: dict(ids, mask)`, `None`
            for a None, `=0.1` for a value that is part of the structure, such as a static field of
            a dataclass. The entry "" has the names of the arguments: `(params, batch, key=)`.
        arguments: The flat arguments: their types, shardings and donation.
        statics: The static arguments by name, as text.
        options: The options of `jax.jit`: donated arguments, shardings, compiler options, as text.
        context: The settings of JAX that a trace depends on, by name, as text: `enable_x64`,
            `default_matmul_precision`, `mesh`, …
        cleared: The number of times that JAX's caches, or this function's, were cleared before.
        cleared_line: The user's line that cleared them last.
        in_loop: The number of earlier calls of `jit` by the same line.
        line: The user's line of the call.
    """

    function: FunctionObject
    structure: dict[str, str]
    arguments: tuple[Argument, ...]
    statics: dict[str, str]
    options: dict[str, str]
    context: dict[str, str]
    cleared: int = 0
    cleared_line: Place = UNKNOWN
    in_loop: int = 0
    line: Place = UNKNOWN

    def to_json(self) -> dict[str, Any]:
        """Return the key as values for the module `json`. An argument is a list."""
        values = {name: getattr(self, name) for name in _KEY_FIELDS}
        return {
            **values,
            "function": vars(self.function),
            "arguments": [[getattr(a, name) for name in _ARGUMENT_FIELDS] for a in self.arguments],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CacheKey:
        """Return the key that `to_json` wrote. Unknown fields of the document are ignored.

        Raises:
            KeyError, TypeError: If `to_json` did not write the document.
        """
        values = {name: document[name] for name in _KEY_FIELDS if name in document}
        function = {k: v for k, v in document["function"].items() if k in _FUNCTION_FIELDS}
        return cls(
            **values | {"function": FunctionObject(**function)},
            arguments=tuple(
                Argument(path, dtype, tuple(shape), *rest)
                for path, dtype, shape, *rest in document["arguments"]
            ),
        )

    @cached_property
    def parts(self) -> frozenset[tuple[str, int]]:
        """A hash of each part that JAX compares: the function, each argument, each setting.

        An argument of the function is one part, with all its leaves and its structure.
        """
        parts = {"function": hash(self.function.number)}
        parts |= {f"argument {name}": hash(hashes) for name, hashes in self.leaves.items()}
        named = {"static": self.statics, "option": self.options, "context": self.context}
        for kind, values in named.items():
            parts |= {f"{kind} {name}": hash(value) for name, value in values.items()}
        return frozenset(parts.items())

    @cached_property
    def leaves(self) -> dict[str, frozenset[int]]:
        """The hashes of the leaves and of the structure, by argument of the function."""
        by_argument: dict[str, list[int]] = {}
        for path, text in self.structure.items():
            by_argument.setdefault(root(path), []).append(hash((path, text)))
        for leaf in self.arguments:
            by_argument.setdefault(root(leaf.path), []).append(hash(compared_parts(leaf)))
        return {name: frozenset(hashes) for name, hashes in by_argument.items()}


def compared_parts(argument: Argument) -> tuple[Any, ...]:
    """Return the path of a flat argument, and the parts of it that JAX compares."""
    leaf = argument
    return leaf.path, leaf.dtype, leaf.shape, leaf.weak, leaf.sharding, leaf.donated


def root(path: str) -> str:
    """Return the argument of the function that a path is in: `params` of `params['w']`."""
    match = _ROOT.match(path)
    return path if match is None else match[0]


#: A step of a path: `params`, `['w']`, `.kernel`, `[0]`.
STEP = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.?[^.\[]+""")

_ROOT = re.compile(r"\w+")

_ARGUMENT_FIELDS = [field.name for field in fields(Argument)]
_FUNCTION_FIELDS = {field.name for field in fields(FunctionObject)}
_KEY_FIELDS = [field.name for field in fields(CacheKey) if field.name != "arguments"]


# --- structures -----------------------------------------------------------------------------------
# Describe the structure of arguments: a text for each container, by path.
#
# It is read from the PyTreeDef that JAX has made. Of the user's code, only `__repr__` of static
# fields is called.


class ArgumentStructure:
    """The structure of arguments.

    Attributes:
        texts: The text of each container by its path; `=text` for a static field.
        leaves: The paths of the leaves.
    """

    def __init__(self, values: ValueTexts, names: Sequence[str] | None = None):
        self.texts: dict[str, str] = {}
        self.leaves: list[str] = []
        self._values, self._names = values, names

    def add(self, tree: PyTreeDef, path: str) -> None:
        """Add a tree at a path. Leaves are named by the given names, or else by their paths."""
        data = tree.node_data()
        if data is None:
            self.leaves.append(path if self._names is None else self._names[len(self.leaves)])
            return
        kind, aux = data
        if kind is type(None):
            self.texts[path] = "None"
            return
        if calls.is_node_states(kind):
            self._add_module(tree, path)
            return
        children = tree.children()
        node = self._node(kind, aux, children, path)
        self.texts[path] = node.text
        if aux is not None and not issubclass(kind, tuple | list | dict):
            for name, value in _statics(kind, aux, node):
                self.texts[f"{path}{name}"] = f"={self._values(value)}"
        names, leaves = self._names, self.leaves
        for step, child in zip(node.steps, children, strict=True):
            if child.num_nodes > 1 or child.num_leaves == 0:
                self.add(child, f"{path}{step}")
            else:
                leaves.append(f"{path}{step}" if names is None else names[len(leaves)])

    def root(self, tree: PyTreeDef, name: str) -> str:
        """Return the name of the next argument: the given one, unless its leaves have another."""
        if self._names is None or tree.num_leaves == 0:
            return name
        first = self._names[len(self.leaves)]
        if tree.num_nodes == 1:
            return first
        match = STEP.match(first)
        return name if match is None or first.startswith(name) else match[0]

    def signature(self, names: Sequence[str]) -> None:
        """Add the names of the arguments."""
        self.texts[""] = f"({', '.join(names)})"

    def _node(
        self, kind: type, aux: Any, children: Sequence[PyTreeDef], path: str
    ) -> _TreeNodeKind:
        """Return the description of a node: the steps to its children, its text, its statics."""
        count = len(children)
        if kind is dict:
            # Do not hash keys of other classes: that would call the user's code.
            plain = set(map(type, aux)) <= {str, int}
            return (
                _dict_node(tuple(aux))
                if plain
                else _TreeNodeKind.of(kind, [f"[{k!r}]" for k in aux])
            )
        if issubclass(kind, dict):  # JAX puts the factory of a defaultdict before the keys
            keys = aux[1] if type(aux) is tuple and len(aux) == 2 else aux
            if isinstance(keys, tuple | list) and len(keys) == count:
                return _TreeNodeKind.of(kind, [f"[{key!r}]" for key in keys])
        node = _known_node(kind, count)
        return node or _TreeNodeKind.of(kind, list(self._named_steps(children, path)))

    def _named_steps(self, children: Sequence[PyTreeDef], path: str) -> Iterator[str]:
        """Yield the steps to children, read from the names of their leaves."""
        position, names = len(self.leaves), self._names
        for i, child in enumerate(children):
            match = None
            if names is not None and child.num_leaves and names[position].startswith(path):
                match = STEP.match(names[position], len(path))
            yield f"[{i}]" if match is None else match[0]
            position += child.num_leaves

    def _add_module(self, tree: PyTreeDef, path: str) -> None:
        """Add a module of Flax NNX, which JAX sees as a graph and a list of variables."""
        start = len(self.leaves)
        self.texts[path] = tree.node_data()[0].__name__  # type: ignore[index]
        try:
            paths = calls.add_graph(tree, path, self.texts, self._values)
        except Exception:  # another release of Flax
            paths = []
        names = [path] * tree.num_leaves if self._names is None else self._names[start:]
        named = len(paths) == tree.num_leaves
        self.leaves += paths if named else islice(names, tree.num_leaves)


class _TreeNodeKind(NamedTuple):
    """A kind of node of JAX's trees.

    Attributes:
        steps: The steps of a path to its children: `['w']`, `[0]`, `.kernel`.
        text: Its text: `dict(ids, mask)`.
        statics: The steps to its static fields, if it is a dataclass.
    """

    steps: Sequence[str]
    text: str
    statics: Sequence[str] = ()

    @classmethod
    def of(cls, kind: type, steps: Sequence[str]) -> _TreeNodeKind:
        """Return the node of a class, with children at these steps."""
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        statics = [f".{field.name}" for field in fields if _is_static(field)]
        if len(statics) + len(steps) != len(fields):
            # `register_dataclass` was told which fields are children.
            statics = [f".{field.name}" for field in fields if f".{field.name}" not in steps]
        return cls(steps, f"{kind.__name__}({_shown(steps)})", statics)


@lru_cache(1000)
def _dict_node(keys: tuple[str | int, ...]) -> _TreeNodeKind:
    return _TreeNodeKind.of(dict, [f"[{key!r}]" for key in keys])


@lru_cache(1000)
def _known_node(kind: type, count: int) -> _TreeNodeKind | None:
    """Return the node of a class whose children have known names, or None."""
    if kind is tuple or kind is list:
        return _TreeNodeKind.of(kind, [f"[{i}]" for i in range(count)])
    names = list(getattr(kind, "_fields", ()))
    if not names and dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if not _is_static(field)]
    if not names or len(names) != count:
        return None
    return _TreeNodeKind.of(kind, [f".{name}" for name in names])


def _is_static(field: dataclasses.Field) -> bool:
    """Return True for a static field of JAX's, Equinox's and Flax's dataclasses."""
    return field.metadata.get("static") is True or field.metadata.get("pytree_node") is False


def _statics(kind: type, aux: Any, node: _TreeNodeKind) -> Iterator[tuple[str, Any]]:
    """Return the static fields of a node of the tree, by their steps of a path."""
    values = calls.static_fields(kind, aux)
    if len(node.statics) == len(values):
        yield from zip(node.statics, values, strict=True)
    else:
        yield (".func" if kind.__name__ == "Partial" else ".<static>"), aux


def _shown(steps: Sequence[str]) -> str:
    """Return the steps to children as short text: `ids, mask`, `3`."""
    if steps and steps[0] == "[0]":
        return str(len(steps))
    text = ", ".join(step.strip(".[]'") for step in steps[:20])
    if len(steps) > 20 or len(text) > LIMIT:
        text = f"{text[:LIMIT]}… {len(steps)}"
    return text


# --- arguments ------------------------------------------------------------------------------------
# Describe the flat arguments and results of a compilation: types and shardings.


def given_argument(path: str, aval: Any, leaf: Any, donated: bool) -> Argument:
    """Describe a flat argument that a function is called with."""
    host = ""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        host = "numpy" if hasattr(leaf, "shape") else "python"
    return argument(path, aval, _sharding(leaf), donated, host)


def argument(
    path: str, aval: Any, sharding: str = "", donated: bool = False, host: str = ""
) -> Argument:
    """Describe a flat argument or result by its type; the other parameters are fields of it."""
    text = aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)
    shape = tuple(n if isinstance(n, int) else str(n) for n in getattr(aval, "shape", ()))
    dtype = text.removeprefix("~").partition("[")[0]
    return Argument(
        path, dtype, shape, bool(getattr(aval, "weak_type", False)), sharding, donated, host
    )


def _sharding(leaf: Any) -> str:
    """Return the sharding of an array over several devices, or the device it is committed to."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ""
    if len(sharding.device_set) > 1:
        spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
        if spec is None or mesh is None:
            return str(sharding)
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        return f"{spec} on {axes}".replace("PartitionSpec", "P")
    if not getattr(leaf, "committed", False):
        return ""
    return str(next(iter(sharding.device_set)))


# --- context --------------------------------------------------------------------------------------
# Read the settings of JAX that a trace depends on, and the options of `jax.jit`, as text.

#: The maximum length of the text of a setting.
_LONGEST = 200


def context() -> dict[str, str]:
    """Return the current settings of JAX, such as `enable_x64` and `mesh`."""
    return {name: _text(value) for name, value in trace_settings().items()}


def cache_key_options(options: TracedOptions) -> dict[str, str]:
    """Return the options of `jax.jit` that are part of its cache key, without default values."""
    values: dict[str, Any] = {
        "in_shardings": _placements(options.in_placements),
        "out_shardings": _placements(options.out_placements),
        "compiler_options": dict(options.compiler_options),
        "keep_unused": options.keep_unused,
    }
    return {name: str(value)[:_LONGEST] for name, value in values.items() if value}


def _placements(placements: tuple[Any, ...]) -> str:
    if all(placement is None for placement in placements):
        return ""
    return ", ".join(_text(getattr(placement, "spec", placement)) for placement in placements)


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else repr(value)[:_LONGEST]
    except Exception:  # the context of a library may raise anything
        return type(value).__name__
