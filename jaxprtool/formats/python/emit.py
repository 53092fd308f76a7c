"""Emission of Programs as Python modules: `to_python` and `write_python`.

    print(jaxprtool.to_python(program))

The module needs only JAX, and jaxprtool if values are sown. Its function has the program's name and
is called like the original. Tracing it reproduces the program: each line is checked before it is
written (`selection`). Bodies of loops and branches are local functions; calls of `jax.jit` and
custom derivatives are module-level functions.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.files import check_path, is_stream
from jaxprtool.formats.npz import ProgramText, constants_file, mention, write_texts
from jaxprtool.formats.python.block import (
    Block,
    CallSignature,
    call_signature,
    define,
    local_names,
    result_structure,
)
from jaxprtool.formats.python.expressions import (
    ROOTS,
    CallExpression,
    Expression,
    Name,
    Slot,
    call,
    pieces_of,
    plain_text,
)
from jaxprtool.formats.python.layout import INDENT, definition, statement
from jaxprtool.formats.python.module import HexRows, Line, PythonModule
from jaxprtool.formats.python.rules import arrays, calls, effects  # noqa: F401  (they fill the table)
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.ir.custom_rules import are_stubs, rules_followed
from jaxprtool.ir.dtypes import x64_enabled
from jaxprtool.ir.equations import has_64_bit_types, type_of
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import JitOptions, Program, require_program
from jaxprtool.ir.symbols import names_of
from jaxprtool.ir.trees import filled
from jaxprtool.jaxcompat import open_jaxpr

__all__ = ["python_rules", "to_python", "write_python"]


def to_python(
    program: Program,
    *,
    constants: str | None = None,
    callbacks: str = "refuse",
    source: bool = True,
) -> str:
    """Return the source of a Python module with a function equivalent to the program.

    Args:
        program: The program.
        constants: The name of an .npz file in the module's folder from which it reads large
            constants (see `write_python`). If None, all constants are in the text.
        callbacks: "refuse" raises an error for callbacks, "stub" replaces them by functions that
            raise.
        source: Whether comments name the user's functions from which the lines come.

    Raises:
        UnsupportedError: If an equation cannot be written, such as a Python callback; it names the
            equation and its source line.
    """
    require_program(program)
    file = None if constants is None else lambda names: constants
    return "".join(_source(PythonModule(program, file, are_stubs(callbacks), source)))


def python_parts(program: Program, callbacks: str, source: bool) -> Iterator[str]:
    """Return what `to_python` does in parts, of which only the one that is read is in memory."""
    return _source(PythonModule(program, None, are_stubs(callbacks), source))


def write_python(
    program: Program,
    path: str | os.PathLike[str],
    *,
    callbacks: str = "refuse",
    source: bool = True,
) -> None:
    """Write the module to a file, and its large constants, if any, to an .npz file next to it.

    The constants are in the module if it goes to a device or a pipe. Raises the errors of
    `to_python`, and OutputError; existing files are then left unchanged.
    """
    write_modules([(program, path)], callbacks, source)


def write_modules(
    programs: Iterable[tuple[Program, str | os.PathLike[str]]],
    callbacks: str = "refuse",
    source: bool = True,
) -> None:
    """Write modules with `write_python`: all of them, or none if one cannot be written."""
    texts = []
    for program, path in programs:
        name = check_path(path)
        file = None if is_stream(name) else partial(constants_file, name)
        module = PythonModule(program, file, are_stubs(callbacks), source)
        texts.append(ProgramText(name, "".join(_source(module)), module.arrays))
    # A module reads its constants only once, some time after its import starts.
    write_texts(texts, keep_previous=True)


_NEEDS_X64 = "It needs 64-bit types: jax_enable_x64 must be set."

_STORED = "STORED = np.load(Path(__file__).resolve().with_name({file}))"


def _source(module: PythonModule) -> Iterator[str]:
    """Return the parts of the text of a module, independent of the process's JAX configuration."""
    program = module.program
    wide = x64_enabled() or has_64_bit_types(program.jaxpr)
    settings = jaxcompat.default_settings(x64=wide)
    called = call_signature(program)
    axes = jaxcompat.axes_bound(program.axis_env)
    with settings, axes, rules_followed(), without_collector():
        name = module.claim(program.name)
        main, notes = _main(module, name, called)
        functions = [define(module, *queued, module.names(), 0) for queued in module.queued()]
    if module.file is not None and module.arrays:
        file = module.file(module.arrays)
        module.helpers["stored"] = [_STORED.format(file=plain_text(file))]
        notes.append(f"Large constants are read from {mention(file)}, in the same folder.")
    header = [
        f'"""`{name}`, written as Python from its jaxpr by jaxprtool, under JAX {jax.__version__}.',
        "",
        f"    {name}({', '.join(called.call)})",
        "",
        "The comment after a line is the type of its value.",
        *notes,
        '"""',
    ]
    helpers = module.helpers.values()
    parts: list[Sequence[Line]] = [header, _imports(module.roots), *helpers]
    parts += module.definitions, main, *functions
    return _texts([part for part in parts if part])


def _main(module: PythonModule, name: str, called: CallSignature) -> tuple[list[str], list[str]]:
    """Return the lines of the main function, and notes on it."""
    program, names = module.program, module.names()
    for parameter in called.parameters:
        if parameter != "*":
            names.take(parameter.lstrip("*"))
    block = Block(module, program.jaxpr, {}, names, 1)
    invars = dict(zip(called.places, program.jaxpr.invars, strict=True))
    types = [type_of(invars[p].aval) if p in invars else None for p in called.parameters]
    for local, root in called.flattened.items():
        module.mention("jax")
        names.take(local)
        block.lines.append(f"{INDENT}{local} = jax.tree.leaves({root})")
    for symbol in sorted(names_of([v.shape for v in program.in_avals])):
        module.symbol(symbol)
    block.arguments(called.places, local_names(called.places), called.parameters)
    results, note = result_structure(program, called)
    start = len(block.lines)
    block.stage(open_jaxpr(program.jaxpr).constvars)
    with module.inside(nullcontext):
        block.write(results)
    block.bind_symbols(dict(enumerate(called.places)), start)
    lines = [*definition(name, called.parameters, types, 0), *block.lines]
    if program.jit is not None:
        decorator = jit_decorator(program, program.jit, results)
        lines = [*statement("@", pieces_of(decorator, module), "", 0), *lines]
    wide = _NEEDS_X64 if x64_enabled() else None
    axes = ", ".join(f"{axis} of size {size}" for axis, size in program.axis_env)
    bound = f"It must be called where these named axes are bound: {axes}." if axes else None
    sizes = [f"`{name}` is {bound}." for name, bound in program.bounds]
    return lines, [n for n in (note, bound, wide, *sizes) if n]


def _imports(roots: set[str]) -> list[str]:
    """Return the imports of the names in use: the standard library's, then others."""
    texts = {text for root in roots if (text := ROOTS.get(root))}
    standard = {t for t in texts if t.startswith(_STANDARD)}
    groups = sorted(standard), sorted(texts - standard, key=lambda t: (t.startswith("from"), t))
    return [*groups[0], *([""] if all(groups) else []), *groups[1]]


_STANDARD = ("from collections", "from functools", "from pathlib")


def _texts(parts: list[Sequence[Line]]) -> Iterator[str]:
    """Yield a module in its parts, with two blank lines around functions, else one."""
    lines = list(parts[0])
    for previous, part in itertools.pairwise(parts):
        functions = any(isinstance(p, str) and p.startswith("def ") for p in (*previous, *part))
        lines += [*([""] * (1 + functions)), *part]
    texts: list[str] = []
    for line in lines:
        if isinstance(line, HexRows):
            yield "".join(texts)
            yield from line.texts()
            texts = []
        else:
            texts.append(f"{line}\n")
    yield "".join(texts)


# --- jit ------------------------------------------------------------------------------------------
# The decorator of an emitted function whose original is under `jax.jit`.


def jit_decorator(program: Program, options: JitOptions, results: Any) -> Expression:
    """Return `jax.jit`, or a call of it with the options of a program.

    Args:
        program: The program, whose flat arguments and results the options refer to.
        options: The options.
        results: The results of the emitted function, with a slot for each one.

    Raises:
        UnsupportedError: For options of a part of an argument, if only the whole argument can have
            them.
    """
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    taken = options.of_arguments(program.arguments)
    keywords = _donation(program, args, kwargs, [asked.donated for asked in taken])
    placements = [asked.placement for asked in taken]
    if any(placement is not None for placement in placements):
        for name, arg in kwargs.items():
            if any(placements[i] is not None for i in _positions(arg)):
                names = [program.arg_names[i] for i in _positions(arg)]
                raise _refusal(program, f"has a sharding for the keyword argument {name}", names)
        keywords["in_shardings"] = tuple(
            _prefix(program, arg, placements, "argument", program.arg_names) for arg in args
        )
    placements = [asked.placement for asked in options.of_results(program.results)]
    if any(placement is not None for placement in placements):
        keywords["out_shardings"] = _prefix(
            program, results, placements, "result", program.out_names
        )
    if options.keep_unused:
        keywords["keep_unused"] = True
    if jaxcompat.inline_as_word(options.inline):
        inline = options.inline  # a member of jax.Inline since 0.12
        keywords["inline"] = inline if inline is True else Name(f"jax.Inline.{inline.name}")
    if options.compiler_options:
        keywords["compiler_options"] = dict(options.compiler_options)
    return call("jax.jit", **keywords) if keywords else Name("jax.jit")


def _donation(
    program: Program, args: Sequence[Any], kwargs: dict[str, Any], donated: Sequence[bool]
) -> dict[str, Any]:
    """Return `donate_argnums` and `donate_argnames`."""

    def is_donated(arg: Any) -> bool:
        flags = {donated[i] for i in _positions(arg)}
        if flags == {True, False}:
            names = [program.arg_names[i] for i in _positions(arg)]
            raise _refusal(program, "donates a part of an argument", names)
        return flags == {True}

    keywords: dict[str, Any] = {}
    if numbers := tuple(i for i, arg in enumerate(args) if is_donated(arg)):
        keywords["donate_argnums"] = numbers[0] if len(numbers) == 1 else numbers
    if names := tuple(name for name, arg in kwargs.items() if is_donated(arg)):
        keywords["donate_argnames"] = names[0] if len(names) == 1 else names
    return keywords


def _prefix(
    program: Program, tree: Any, placements: Sequence[Any], what: str, names: Sequence[str]
) -> Any:
    """Return the placements of a tree of flat positions: one for all, or a tree of them."""
    positions = _positions(tree)
    chosen = [placements[i] for i in positions]
    if all(placement == chosen[0] for placement in chosen):
        return chosen[0] if chosen else None

    def inside(part: Any) -> Any:
        return _prefix(program, part, placements, what, names)

    if type(tree) in (tuple, list):
        return type(tree)(map(inside, tree))
    if type(tree) is dict:
        return {key: inside(part) for key, part in tree.items()}
    # The structure of an argument is unknown before the call.
    if isinstance(tree, CallExpression) and tree.function != Name("jax.tree.unflatten"):
        parts = {name: inside(part) for name, part in tree.kwargs.items()}
        return CallExpression(tree.function, tuple(map(inside, tree.args)), parts)
    message = f"has several shardings for one {what} of a class"
    raise _refusal(program, message, [names[i] for i in positions])


def _positions(tree: Any) -> list[int]:
    """Return the flat positions in a tree, including those in its calls."""
    positions: list[int] = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, CallExpression):
            positions += _positions((leaf.args, leaf.kwargs))
        elif isinstance(leaf, Slot | int):
            positions.append(leaf.index if isinstance(leaf, Slot) else leaf)
    return positions


def _refusal(program: Program, what: str, names: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{program.name} cannot be written as Python: its jit {what} ({', '.join(names[:3])})",
        "a .jaxpr file keeps it: --to jaxpr",
    )
