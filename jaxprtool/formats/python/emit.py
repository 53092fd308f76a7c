"""A Program as a Python module: `to_python` and `write_python`.

    print(jaxprtool.to_python(program))

The module needs nothing but JAX, and jaxprtool if values are sown. Its function bears the
program's name and is called as the original is. Tracing it gives the program again: each line was
tried before it was written (`trial`), so what looks simple is exact. Loops and branches are local
functions, calls of `jax.jit` and custom derivatives are functions of the module.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.files import check_path, is_stream
from jaxprtool.formats.jaxpr.constants import digest
from jaxprtool.formats.python import constants, contexts
from jaxprtool.formats.python.arguments import local_names, result_structure, signature
from jaxprtool.formats.python.block import Block, define
from jaxprtool.formats.python.expressions import (
    ATOM,
    ROOTS,
    SIGN,
    Function,
    Hoisted,
    Name,
    Subscript,
    method,
    plain,
    written,
)
from jaxprtool.formats.python.helpers import HELPERS, NAMED, Helper
from jaxprtool.formats.python.jit import jit_decorator
from jaxprtool.formats.python.layout import INDENT, definition, flat, statement
from jaxprtool.formats.python.naming import RESERVED, Names, identifier, numbered
from jaxprtool.formats.python.rules import (  # noqa: F401  (they fill the table)
    arrays,
    calls,
    effects,
    elementwise,
    loops,
    numerics,
    randomness,
    sown,
    stubs,
)
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.formats.python.spelling import Spellings
from jaxprtool.formats.python.symbols import bindings, finds_its_symbols, names_of
from jaxprtool.formats.python.values import dtype_name, literal
from jaxprtool.formats.with_constants import Text, constants_file, mention, write_texts
from jaxprtool.ir.callbacks import are_stubs
from jaxprtool.ir.custom_rules import rules_followed
from jaxprtool.ir.dtypes import x64_enabled
from jaxprtool.ir.equations import has_64_bit_types, type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.structured import sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import JaxprEqn, Literal, open_jaxpr
from jaxprtool.primitives import scope_of

__all__ = ["python_rules", "to_python", "write_python"]


def to_python(program: Program, *, constants: str | None = None, callbacks: str = "refuse") -> str:
    """The source of a Python module whose function computes what the program does.

    All constants are in the text; with `constants`, the name of an .npz file, the module reads
    large ones from that file beside it (see `write_python`). Raises UnsupportedError, naming the
    equation and its source line, for what cannot be written: callbacks into live Python above all,
    unless `callbacks` is "stub": then functions that raise stand for them.
    """
    file = None if constants is None else lambda names: constants
    return _Module(program, file, are_stubs(callbacks)).source()


def write_python(
    program: Program, path: str | os.PathLike[str], *, callbacks: str = "refuse"
) -> None:
    """Write the module to a file, and its large constants, if any, to an .npz file beside it.

    The constants are in the module where it goes to a device or a pipe. Raises as `to_python` does,
    and OutputError; then neither file is there, or as it was.
    """
    write_all([(program, path)], callbacks)


def write_all(
    programs: Iterable[tuple[Program, str | os.PathLike[str]]], callbacks: str = "refuse"
) -> None:
    """Write modules as `write_python` does: all of them, or none if one cannot be written."""
    texts = []
    for program, path in programs:
        name = check_path(path)
        file = None if is_stream(name) else partial(constants_file, name)
        module = _Module(program, file, are_stubs(callbacks))
        texts.append(Text(name, module.source(), module.arrays))
    # A module is imported for a while before it reads its constants, and only once.
    write_texts(texts, keep_previous=True)


class _Module:
    """A module being written: what it imports and defines, and what its functions share."""

    def __init__(
        self,
        program: Program,
        file: Callable[[Iterable[str]], str] | None,
        stub_callbacks: bool,
    ):
        self.program = program
        self.stub_callbacks = stub_callbacks
        self.arrays: dict[str, np.ndarray] = {}
        self.spellings = Spellings(self)
        self._file = file
        self._roots: set[str] = set()
        self._taken = {*ROOTS, *HELPERS}
        self._everywhere: set[str] = set(HELPERS)
        self._functions: dict[Any, str] = {}
        self._queue: deque[tuple[Function, str, dict[Any, str], tuple[Any, ...]]] = deque()
        self._settings: tuple[Any, ...] = ()
        self._definitions: list[str] = []
        self._hoisted: dict[Any, str] = {}
        self._constants: dict[int, str] = {}
        self._literals: dict[tuple[int, bool], tuple[str, int, Any]] = {}
        self._origins: dict[int, tuple[str, str] | None] = {}
        self._kept: list[Any] = []
        self._contexts: dict[int, tuple[str, ...]] = {}
        self.settings_now: tuple[str, ...] = ()
        self._helpers: dict[str, list[str]] = {}
        self._symbols: dict[str, str] = {}
        # Functions inside the one that is being written which can be called there, by their keys.
        self.functions_around: dict[Any, str] = {}
        self._names = Names(self._taken, self._everywhere)
        self._reserved = _function_names(program.jaxpr)
        self._taken |= self._reserved

    def source(self) -> str:
        """The text of the module; what the process has configured does not change it."""
        wide = x64_enabled() or has_64_bit_types(self.program.jaxpr)
        settings = jaxcompat.default_settings(x64=wide)
        with settings, jaxcompat.axes_bound(self.program.axis_env), rules_followed():
            name = self.claim(self.program.name)
            main, note = self._main(name)
            functions = []
            while self._queue:
                function, own, texts, self._settings = self._queue.popleft()
                with ExitStack() as stack:
                    for setting in self._settings:
                        stack.enter_context(setting())
                    functions.append(define(self, function, own, texts, self._names.within(), 0))
        if self._file is not None and self.arrays:
            file = self._file(self.arrays)
            self._helpers["stored"] = [_STORED.format(file=plain(file))]
            note.append(f"Large constants are read from {mention(file)}, which must lie beside.")
        parts = [self._header(name, note), self._imports(), *self._helpers.values()]
        parts += [self._definitions, main, *functions]
        return _joined(list(filter(None, parts)))

    # --- the main function --------------------------------------------------------------------

    def _main(self, name: str) -> tuple[list[str], list[str]]:
        program = self.program
        called = signature(program)
        self._signature = called
        names = self._names.within()
        for parameter in called.parameters:
            if parameter != "*":
                names.take(parameter.lstrip("*"))
        block = Block(self, program.jaxpr, {}, names, 1)
        types: list[str | None] = []
        invars = dict(zip(called.places, program.jaxpr.invars, strict=True))
        for parameter in called.parameters:
            var = invars.get(parameter)
            types.append(type_of(var.aval) if var is not None else None)
        for local, root in called.flattened.items():
            self.mention("jax")
            names.take(local)
            block.lines.append(f"{INDENT}{local} = jax.tree.leaves({root})")
        for symbol in sorted(names_of([v.shape for v in program.in_avals])):
            self.symbol(symbol)
        block.arguments(called.places, local_names(called.places), called.parameters)
        results, note = result_structure(program, called)
        start = len(block.lines)
        with self.inside(nullcontext):
            block.write(results)
        block.bind_symbols(dict(enumerate(called.places)), start)
        lines = [*definition(name, called.parameters, types, 0), *block.lines]
        if program.jit is not None:
            decorator = jit_decorator(program, program.jit, results)
            lines = [*statement("@", written(decorator, self), "", 0), *lines]
        wide = _NEEDS_X64 if x64_enabled() else None
        axes = ", ".join(f"{axis} of size {size}" for axis, size in program.axis_env)
        bound = f"It must be called where these named axes are bound: {axes}." if axes else None
        return lines, [n for n in (note, bound, wide) if n]

    def _header(self, name: str, notes: list[str]) -> list[str]:
        shown = f"{name}({', '.join(self._signature.call)})"
        origin = f"written as Python from its jaxpr by jaxprtool, under JAX {jax.__version__}."
        lines = [
            f'"""`{name}`, {origin}',
            "",
            f"    {shown}",
            "",
            "The comment after each line is the type of what the line computes.",
            *notes,
        ]
        return [*lines, '"""']

    def _imports(self) -> list[str]:
        plain: list[str] = []
        named: list[str] = []
        for root in ROOTS:
            if root in self._roots and ROOTS[root][1]:
                text = ROOTS[root][1]
                (plain if text.startswith("import") else named).append(text)
        first = [
            t for t in named if t.startswith(("from collections", "from functools", "from pathlib"))
        ]
        rest = sorted([*plain, *(t for t in named if t not in first)], key=_import_order)
        return [*sorted(first), *([""] if first and rest else []), *rest]

    # --- what blocks ask for ------------------------------------------------------------------

    def mention(self, path: str) -> None:
        """Import what the first part of a dotted name means."""
        self._roots.add(path.partition(".")[0])

    def hoisted(self, value: Hoisted) -> str:
        """The name of something that is made once."""
        name = self._hoisted.get(value.key)
        if name is None:
            pieces = written(value.of, self)
            name = self._hoisted[value.key] = self.claim(value.name)
            self._definitions += statement(f"{name} = ", pieces, "", 0)
        return name

    def function(self, function: Function, texts: dict[Any, str] | None = None) -> str:
        """The name of a function of the module, which is written when its turn comes.

        `texts` has the names of the constants that it captures.
        """
        name = self._functions.get(function.key)
        if name is None:
            name = self._functions[function.key] = self.claim(function.name)
            self._queue.append((function, name, texts or {}, self._settings))
        return name

    def symbol(self, name: str) -> str:
        """The variable that holds the size of a symbol, in all functions."""
        if name not in self._symbols:
            self._symbols[name] = self.claim(name)
        return self._symbols[name]

    def tells_symbols(self, function: Function) -> bool:
        """Whether a function may stand alone: it finds the symbols that it mentions."""
        return not self._symbols or finds_its_symbols(function)

    def bindings(self, arguments: Sequence[tuple[Any, str]], body: Sequence[str]) -> list[str]:
        """The lines that find the symbols which a body mentions, from its arguments' shapes.

        Raises UnsupportedError, naming the arguments, if their shapes do not tell.
        """
        if not self._symbols:
            return []
        return bindings(arguments, body, self._symbols, self)

    @contextmanager
    def inside(self, setting: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """The setting of a body, for it and for the functions that are found in it."""
        around, self._settings = self._settings, (*self._settings, setting)
        functions, self.functions_around = self.functions_around, dict(self.functions_around)
        with setting():
            yield
        self._settings, self.functions_around = around, functions

    def keep(self, jaxpr: Any) -> None:
        """Keep a jaxpr as long as the module: what is known of its parts goes by identity."""
        self._kept.append(jaxpr)

    def settings_of(self, context: Any) -> tuple[str, ...]:
        """What a `with` statement enters for equations of a context."""
        found = self._contexts.get(id(context))
        if found is None:
            texts = tuple(flat(s.pieces(self)) for s in contexts.settings(context))
            found = self._contexts[id(context)] = texts
        return found

    @contextmanager
    def within(self, settings: tuple[str, ...]) -> Iterator[None]:
        """The settings that functions stand in which are defined meanwhile."""
        around, self.settings_now = self.settings_now, settings
        yield
        self.settings_now = around

    def constants_of(self, jaxpr: Any) -> dict[Any, str]:
        """The names of a closed jaxpr's constants."""
        pairs = zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True)
        return {var: self._constant(value) for var, value in pairs}

    def are_constants(self, names: Iterable[str]) -> bool:
        """Whether all names are of constants of the module."""
        return set(names) <= set(self._constants.values())

    def _constant(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.claim("CONSTANT")
            self._definitions += constants.definition_of(name, value, self, self._file is not None)
        return name

    def stored(self, data: np.ndarray) -> Any:
        """The expression that reads an array from the file beside the module."""
        key = digest(data)
        own = data.dtype.type.__module__ == "numpy"
        # Numpy's files know no types but numpy's: others are kept as unsigned integers.
        self.arrays[key] = data if own else data.view(f"u{data.dtype.itemsize}")
        self.mention("Path")
        self.mention("np")
        self._helpers["stored"] = []  # written when all are known, which the file is named by
        stored = Subscript(Name("STORED"), (key,))
        return stored if own else method(stored, "view", dtype_name(data.dtype))

    def helper(self, helper: Helper) -> str:
        """The name of a helper, which is defined at the top of the module."""
        if helper.name not in self._helpers:
            self._helpers[helper.name] = helper.text.splitlines()
            for root in helper.roots:
                self.mention(root)
        return helper.name

    def renaming(self, name: str) -> str:
        """The decorator that gives a function a name that another has, or that is none."""
        return f"@{self.helper(NAMED)}({flat(written(name, self))})"

    def origin(self, eqn: JaxprEqn) -> tuple[str, str] | None:
        """The function of the user's code that an equation comes from, and its file."""
        traceback = eqn.source_info.traceback
        if id(traceback) not in self._origins:
            frame = jaxcompat.user_frame(eqn)
            found = (frame[2].split(".")[-1], os.path.basename(frame[0])) if frame else None
            self._origins[id(traceback)] = found
        return self._origins[id(traceback)]

    def literal(self, atom: Literal, typed: bool) -> tuple[str, int]:
        """The text of a literal and how tightly it binds."""
        known = self._literals.get((id(atom), typed))
        if known is None:
            spelling = literal(atom)
            text = flat(written(spelling.typed if typed else spelling.plain, self))
            known = text, SIGN if text.startswith("-") else ATOM, atom
            self._literals[id(atom), typed] = known
        return known[:2]

    def claim(self, wish: str) -> str:
        """A name in the module, that no function has taken for something of its own."""
        for name in numbered(wish):
            own = name in self._reserved or name not in self._taken
            if own and name not in self._everywhere and name not in RESERVED:
                self._taken.add(name)
                self._everywhere.add(name)
                return name
        raise AssertionError("there are endlessly many names")


_NEEDS_X64 = "It needs 64-bit types: jax_enable_x64 must be set."

_STORED = "STORED = np.load(Path(__file__).resolve().with_name({file}))"


def _import_order(text: str) -> tuple[bool, str]:
    return text.startswith("from"), text


def _joined(parts: list[list[str]]) -> str:
    """The parts of a module, two blank lines around functions and one elsewhere."""
    lines = list(parts[0])
    for before, part in itertools.pairwise(parts):
        functions = any(line.startswith("def ") for line in (*before, *part))
        lines += [*([""] * (1 + functions)), *part]
    return "\n".join(lines) + "\n"


def _function_names(jaxpr: Any) -> set[str]:
    """The names that functions of the module will bear, at every depth."""
    names, seen, todo = {"mesh", "CONSTANT"}, set(), [jaxpr]
    while todo:
        body = todo.pop()
        if id(open_jaxpr(body)) in seen:
            continue
        seen.add(id(open_jaxpr(body)))
        for eqn in open_jaxpr(body).eqns:
            inner = [found for _, found in sub_jaxprs(eqn)]
            if traits(eqn).call:
                names.add(identifier(scope_of(eqn) or calls.called_name(eqn)))
            todo += inner
    return names
