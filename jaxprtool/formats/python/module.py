"""A module being written: its imports, definitions and constants."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr.constants import constant_digest
from jaxprtool.formats.python import rules_of_calls
from jaxprtool.formats.python.expressions import (
    ATOM,
    ROOTS,
    SIGN,
    Expression,
    Helper,
    ModuleValue,
    Name,
    NameScope,
    PythonFunction,
    Subscript,
    array,
    bindings,
    call,
    determines_its_symbols,
    dtype_name,
    literal,
    method,
    pieces_of,
)
from jaxprtool.formats.python.layout import (
    INDENT,
    RESERVED,
    WIDTH,
    LocalNames,
    flat,
    identifier,
    numbered,
    statement,
)
from jaxprtool.formats.python.rules_of_calls import FROM_HEX, HELPERS, NAMED
from jaxprtool.formats.python.selection import TextTemplates
from jaxprtool.ir.dtypes import is_foreign
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import SourceLocation, frames_now, short_paths
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.ir.symbols import sizes_by_symbol
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn, Literal, Var, open_jaxpr
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.primitives import scope_of

# --- module ---------------------------------------------------------------------------------------
# A module being written: its imports and definitions.

#: Creates the context in which JAX traces a body.
Setting = Callable[[], AbstractContextManager[object]]


class FunctionOrigin(NamedTuple):
    """A user's function, its file, and the library functions it calls, as shown in a comment."""

    function: str
    file: str
    behind: str


class PythonModule:
    """The imports and definitions of a module. It is the scope of shared definitions.

    Args:
        program: The program to write.
        file: The function from the constants in the file next to the module to its name; None if
            all constants are in the text.
        stub_callbacks: Whether to replace callbacks by functions that raise.
        source: Whether comments name the user's functions from which the lines come.
    """

    def __init__(
        self,
        program: Program,
        file: Callable[[Iterable[str]], str] | None,
        stub_callbacks: bool,
        source: bool = True,
    ):
        self.program = program
        self.file = file
        self.stub_callbacks = stub_callbacks
        self.arrays: dict[str, np.ndarray] = {}
        self.definitions: list[Line] = []
        self.helpers: dict[str, list[str]] = {}
        self.templates = TextTemplates(self, sizes_by_symbol(program.in_avals))
        #: The settings around functions that are defined now.
        self.settings_now: tuple[str, ...] = ()
        #: Local functions in scope in the function being written, by key.
        self.functions_around: dict[object, str] = {}
        self.roots: set[str] = set()
        self._reserved = _function_names(program.jaxpr)
        self._taken = {*ROOTS, *HELPERS, *self._reserved}
        self._everywhere: set[str] = set(HELPERS)
        self._functions: dict[object, str] = {}
        self._queue: deque[tuple[PythonFunction, str, dict[Var, str], tuple[Setting, ...]]] = (
            deque()
        )
        self._settings: tuple[Setting, ...] = ()
        self._module_values: dict[object, str] = {}
        self._constants: dict[int, str] = {}
        self._literals: dict[tuple[int, bool], tuple[str, int, Literal]] = {}
        self._origins: dict[object, FunctionOrigin | None] = {}
        self._source = source
        self._frames = frames_now(program.roots)
        self._kept: list[AnyJaxpr] = []
        self._contexts: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._symbols: dict[str, str] = {}
        self._numbered: dict[str, Iterator[str]] = {}

    # --- names --------------------------------------------------------------------------------

    def names(self) -> LocalNames:
        """Return a name scope for a function of the module."""
        return LocalNames(self._taken, self._everywhere)

    def claim(self, hint: str) -> str:
        """Return a name in the module that no function uses for a local name."""
        # A name that was taken once is taken for good, so the next search goes on behind it.
        for name in self._numbered.setdefault(hint, numbered(hint)):
            is_free = name in self._reserved or name not in self._taken
            if is_free and name not in self._everywhere and name not in RESERVED:
                self._taken.add(name)
                self._everywhere.add(name)
                return name
        raise AssertionError("there are endlessly many names")

    def mention(self, path: str) -> None:
        self.roots.add(path.partition(".")[0])

    def symbol(self, name: str) -> str:
        if name not in self._symbols:
            self._symbols[name] = self.claim(name)
        return self._symbols[name]

    def module_value(self, value: ModuleValue) -> str:
        name = self._module_values.get(value.key)
        if name is None:
            pieces = pieces_of(value.of, self)
            name = self._module_values[value.key] = self.claim(value.name)
            self.definitions += statement(f"{name} = ", pieces, "", 0)
        return name

    def helper(self, helper: Helper) -> str:
        if helper.name not in self.helpers:
            self.helpers[helper.name] = helper.text.splitlines()
            for root in helper.roots:
                self.mention(root)
        return helper.name

    def renaming(self, name: str) -> str:
        """Return the decorator that sets a function's name to a taken or invalid identifier."""
        return f"@{self.helper(NAMED)}({flat(pieces_of(name, self))})"

    # --- functions ----------------------------------------------------------------------------

    def function(self, function: PythonFunction, texts: dict[Var, str] | None = None) -> str:
        """Return the name of a module-level function, and queue it for writing.

        Args:
            function: The function.
            texts: The names of captured constants.
        """
        name = self._functions.get(function.key)
        if name is None:
            name = self._functions[function.key] = self.claim(function.name)
            self._queue.append((function, name, texts or {}, self._settings))
        return name

    def queued(self) -> Iterator[tuple[PythonFunction, str, dict[Var, str]]]:
        """Yield the queued functions with their names, each in the settings of its body."""
        while self._queue:
            function, name, texts, self._settings = self._queue.popleft()
            with ExitStack() as stack:
                for setting in self._settings:
                    stack.enter_context(setting())
                yield function, name, texts

    @contextmanager
    def inside(self, setting: Setting) -> Iterator[None]:
        """Enter the setting of a body, for it and the functions found in it."""
        around, self._settings = self._settings, (*self._settings, setting)
        functions, self.functions_around = self.functions_around, dict(self.functions_around)
        with setting():
            yield
        self._settings, self.functions_around = around, functions

    @contextmanager
    def within(self, settings: tuple[str, ...]) -> Iterator[None]:
        """Set the settings around functions that are defined in the `with` block."""
        around, self.settings_now = self.settings_now, settings
        yield
        self.settings_now = around

    def settings_of(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Return the context managers of a `with` statement for an equation."""
        marked = rules_of_calls.call_marks(eqn) is not None
        settings = self._contexts.get((id(eqn.ctx), marked))
        if settings is None:
            settings = tuple(flat(s.pieces(self)) for s in _settings(eqn.ctx, marked))
            self._contexts[id(eqn.ctx), marked] = settings
        return settings

    def determines_symbols(self, function: PythonFunction) -> bool:
        """Return True if a function can be at module level: its arguments determine its symbols."""
        return not self._symbols or determines_its_symbols(function)

    def bindings(self, arguments: Sequence[tuple[Var, str]], body: Sequence[str]) -> list[str]:
        """Return the lines that compute a body's symbols from the shapes of arguments.

        Raises:
            UnsupportedError: If the shapes do not determine them; it names the arguments.
        """
        return bindings(arguments, body, self._symbols, self) if self._symbols else []

    # --- constants, literals, sources ---------------------------------------------------------

    def keep(self, jaxpr: AnyJaxpr) -> None:
        """Keep a jaxpr alive as long as the module, since its parts are keys by identity."""
        self._kept.append(jaxpr)

    def constants_of(self, jaxpr: AnyJaxpr) -> dict[Var, str]:
        """Return the names of a closed jaxpr's constants."""
        pairs = zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True)
        return {var: self._constant(value) for var, value in pairs}

    def are_constants(self, names: Iterable[str]) -> bool:
        """Return True if all names are constants of the module."""
        return set(names) <= set(self._constants.values())

    def _constant(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.claim("CONSTANT")
            store = None if self.file is None else self._stored
            self.definitions += definition_of(name, value, self, store)
        return name

    def _stored(self, data: np.ndarray) -> Expression:
        """Return the expression that reads an array from the constants file."""
        key = constant_digest(data)
        is_native = data.dtype.type.__module__ == "numpy"
        # NumPy's files support only NumPy's dtypes: others are stored as unsigned integers.
        self.arrays[key] = data if is_native else data.view(f"u{data.dtype.itemsize}")
        self.mention("Path")
        self.mention("np")
        self.helpers["stored"] = []  # written last: the file name depends on all arrays
        stored = Subscript(Name("STORED"), (key,))
        return stored if is_native else method(stored, "view", dtype_name(data.dtype))

    def literal(self, atom: Literal, typed: bool) -> tuple[str, int]:
        """Return the text of a literal and its precedence."""
        entry = self._literals.get((id(atom), typed))
        if entry is None:
            text = flat(pieces_of(literal(atom).of(typed), self))
            entry = text, SIGN if text.startswith("-") else ATOM, atom
            self._literals[id(atom), typed] = entry
        return entry[:2]

    def origin(self, eqn: JaxprEqn) -> FunctionOrigin | None:
        """Return the user's function from which an equation comes, if comments name it."""
        traceback = eqn.source_info.traceback
        if traceback not in self._origins:
            location = self._location(eqn) if self._source else None
            self._origins[traceback] = None if location is None else self._origin(location)
        return self._origins[traceback]

    def _location(self, eqn: JaxprEqn) -> SourceLocation | None:
        location = self._frames.location(eqn)
        return None if location is None else location.chosen(self._frames.choice)

    def _origin(self, location: SourceLocation) -> FunctionOrigin | None:
        pairs = [
            (_function(f), self._file_name(f.file)) for f in (location.frame, *location.behind)
        ]
        behind = "".join(BEHIND + ", ".join(filter(None, pair)) for pair in pairs[1:])
        origin = FunctionOrigin(*pairs[0], behind)
        return origin if all(map(str.isprintable, origin)) else None  # must be one line

    def _file_name(self, file: str) -> str:
        """Return a file's name, with folders if another file of the program has the same name."""
        path = self._frames.path(file)
        return self._file_names.get(path) or os.path.basename(path)

    @cached_property
    def _file_names(self) -> dict[str, str]:
        locations = filter(None, map(self._location, equations(open_jaxpr(self.program.jaxpr))))
        frames = (frame for location in locations for frame in (location.frame, *location.behind))
        paths = list(dict.fromkeys(self._frames.path(frame.file) for frame in frames))
        return dict(zip(paths, short_paths(paths), strict=True))


def _function(frame: UserFrame) -> str:
    """Return a function's name; for a special method, the name of its class."""
    *outer, name = frame.function.split(".")
    return outer[-1] if outer and name.startswith("__") else name


def _settings(context: Any, marked: bool) -> Iterator[Expression]:
    """Yield the context managers that turn the default context into this one.

    They exclude the mesh of a `shard_map`'s body, which `shard_map` sets, and the metadata of a
    call whose function marks its calls (`marked`).
    """
    if context.compute_type is not None:
        yield call("compute_on", context.compute_type)
    if not context.threefry_partitionable:
        yield call("jax.threefry_partitionable", False)
    if context.xla_metadata and not marked:
        yield call("set_xla_metadata", **context.xla_metadata)
    mesh = context.cur_abstract_mesh
    if not mesh.empty and not mesh.manual_axes:
        yield call("jax.sharding.use_abstract_mesh", mesh)


def _function_names(jaxpr: AnyJaxpr) -> set[str]:
    """Return the names of the functions of the module, at every depth."""
    called = (eqn for eqn in equations(open_jaxpr(jaxpr)) if traits(eqn).call)
    names = {identifier(scope_of(eqn) or rules_of_calls.called_name(eqn)) for eqn in called}
    return {"mesh", "CONSTANT", *names}


# --- constants ------------------------------------------------------------------------------------
# The constants of a program in Python: small ones as lists, others as bytes or in an .npz file.
#
# They are JAX arrays, so that each is traced as one constant regardless of its number of uses, and
# a scalar as a constant instead of a literal.

#: The maximum number of elements of an array written as a list, and the maximum number of bytes of
#: an array in the text.
_MOST_ELEMENTS, MOST_BYTES = 16, 2048


#: Stores an array in the file next to the module, and returns the expression that reads it.
Store = Callable[[np.ndarray], Expression]

#: A line of a module, or lines that are made when they are written.
Line: TypeAlias = "str | HexRows"


def definition_of(name: str, value: Any, scope: NameScope, store: Store | None) -> list[Line]:
    """Return the lines that define a constant; large ones are passed to `store`, if given."""
    if isinstance(value, jax.Ref):  # with its current value
        new_ref = call("jax.new_ref", Name(name))
        lines = definition_of(name, value[...], scope, store)
        return [*lines, *statement(f"{name} = ", pieces_of(new_ref, scope), "", 0)]
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _keys(name, value, scope, store)
    if is_foreign(value.dtype):
        raise UnsupportedError(
            f"a constant of the element type {value.dtype}, which a package defines, cannot be "
            "written as Python"
        )
    if jax.typeof(value).weak_type:
        dtype, strong = dtype_name(value.dtype), np.asarray(value)
        bind = call(
            "lax.convert_element_type_p.bind",
            Name(name),
            new_dtype=dtype,
            weak_type=True,
            sharding=None,
        )
        lines = definition_of(name, strong, scope, store)
        return [*lines, *statement(f"{name} = ", pieces_of(bind, scope), "", 0)]
    data = np.asarray(value)
    if data.dtype == jax.dtypes.float0:
        expression: Expression = call("np.zeros", data.shape, data.dtype)
    elif data.size <= _MOST_ELEMENTS:
        expression = array(data, "jnp")
    elif store and data.nbytes > MOST_BYTES:
        expression = call("jnp.asarray", store(data))
    else:
        return _bytes(name, data, scope)
    return [*statement(f"{name} = ", pieces_of(expression, scope), "", 0)]


def _keys(name: str, value: Any, scope: NameScope, store: Store | None) -> list[Line]:
    words = f"{name}_DATA"
    implementation = jaxcompat.key_implementation(value.dtype).name
    scope.mention("jax.random")
    return [
        *definition_of(words, jax.random.key_data(value), scope, store),
        f'{name} = jax.random.wrap_key_data({words}, impl="{implementation}")',
    ]


def _bytes(name: str, data: np.ndarray, scope: NameScope) -> list[Line]:
    from_hex = scope.helper(FROM_HEX)
    dtype = "".join(map(str, pieces_of(dtype_name(data.dtype), scope)))
    shape = [f"{INDENT}{size}," for size in data.shape]
    return [
        f"{name} = {from_hex}(",
        f'{INDENT}"""',
        HexRows(data),
        f'{INDENT}""",',
        f"{INDENT}{dtype},",
        *shape,
        ")",
    ]


@dataclass(frozen=True, eq=False)
class HexRows:
    """Lines with the bytes of an array, which are made when they are written."""

    data: np.ndarray

    def texts(self) -> Iterator[str]:
        """Yield the lines, up to a megabyte at a time."""
        width = WIDTH // 2 - len(INDENT)
        data = np.ascontiguousarray(self.data).reshape(-1).view(np.uint8)
        step = width << 14
        for start in range(0, data.size, step):
            rows = data[start : start + step].tobytes().hex("\n", -width)
            yield f"{INDENT}{rows}\n".replace("\n", f"\n{INDENT}").removesuffix(INDENT)
