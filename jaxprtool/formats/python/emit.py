"""Emission of Programs as Python modules: `to_python` and `write_python`.

    print(jaxprtool.to_python(program))

The module needs only JAX, and jaxprtool if values are sown. Its function has the program's name and
is called like the original. Tracing it reproduces the program: each line is checked before it is
written (`selection`). Bodies of loops and branches are local functions; calls of `jax.jit` and
custom derivatives are module-level functions.
"""

from __future__ import annotations

import itertools
import keyword
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.files import check_path, is_stream
from jaxprtool.formats.python import (  # they fill the table of rules
    rules_of_arrays,  # noqa: F401
    rules_of_calls,  # noqa: F401
)
from jaxprtool.formats.python.expressions import (
    ATOM,
    ROOTS,
    CallExpression,
    Expression,
    Grouping,
    ModuleValue,
    Name,
    PythonFunction,
    Slot,
    as_expression,
    call,
    literal,
    pieces_of,
    plain_text,
    slots,
)
from jaxprtool.formats.python.layout import (
    INDENT,
    WIDTH,
    Bracket,
    LocalNames,
    Piece,
    Targets,
    definition,
    filled_holes,
    flat,
    identifier,
    numbered,
    statement,
    unpacking,
)
from jaxprtool.formats.python.module import FunctionOrigin, HexRows, Line, PythonModule
from jaxprtool.formats.python.rules_of_calls import python_rules
from jaxprtool.formats.python.selection import SelectedEquation, TextTemplate, selected_equations
from jaxprtool.ir.array_files import ProgramText, constants_file, mention, write_texts
from jaxprtool.ir.custom_rules import are_stubs, rules_followed, stubbed
from jaxprtool.ir.dtypes import x64_enabled
from jaxprtool.ir.equations import has_64_bit_types, type_of
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import JitOptions, Program, require_program
from jaxprtool.ir.symbols import names_of
from jaxprtool.ir.trees import (
    DESCRIBED_AS_TUPLES,
    LITERALS,
    Opaque,
    StaticLeaf,
    SubstituteNode,
    filled,
    one_level,
)
from jaxprtool.jaxcompat import AnyJaxpr, Atom, DropVar, JaxprEqn, Literal, Var, open_jaxpr

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


# --- block ----------------------------------------------------------------------------------------
# The body of a Python function for one jaxpr: one line for one or more equations.
#
# A result that is used once may be inlined into the expression that uses it, if the order of
# evaluation is kept and the line is short. Such results are pending until they are used; if another
# line must be written first, they are written as lines before it.

#: Limits for inlining: parts and characters of an expression, and pending expressions.
_MOST_PARTS, _LONGEST, _MOST_PENDING = 4, 60, 8
#: The width reserved for a line's target and comment.
_MARGIN = 28


#: An expression that ends with a key, and the key, at which a long line may break.
_LAST_KEY = re.compile(r"""(.*)\[("(?:[^"\\]|\\.)*"|'[^']*'|\w+)\]""")

#: Functions nested more deeply are defined at module level and take captured values as arguments.
_DEEPEST = 8


@dataclass(frozen=True)
class Pending:
    """An expression without a line yet: its precedence, number of parts, variable and origin."""

    var: Var | None
    text: str
    pieces: Sequence[Piece]
    level: int
    parts: int
    origin: FunctionOrigin | None = None


class Block:
    """The lines of one function's body at nesting level `depth`.

    `texts` has the text of each variable defined outside; `module` has shared definitions.
    """

    def __init__(
        self,
        module: PythonModule,
        jaxpr: AnyJaxpr,
        texts: dict[Var, str],
        names: LocalNames,
        depth: int,
    ):
        self.lines: list[str] = []
        self._module = module
        self.mention, self.symbol = module.mention, module.symbol
        self.module_value, self.helper = module.module_value, module.helper
        self._jaxpr = open_jaxpr(jaxpr)
        module.keep(jaxpr)
        self._texts = {**module.constants_of(jaxpr), **texts}
        self._names = names
        self._depth = depth
        self._pending: list[Pending] = []
        self._lines = selected_equations(self._jaxpr)
        mentioned = chain(self._jaxpr.outvars, *(line.operands for line in self._lines))
        self._uses = Counter(v for v in mentioned if not isinstance(v, Literal))
        self._operands: Sequence[Atom] = ()
        # Descriptive names of variables.
        self._hints: dict[Var, str] = {}
        # The settings of the lines: those around the function, and those of the current `with`.
        self._around: tuple[str, ...] = module.settings_now
        self._entered: tuple[str, ...] = self._around
        # The user's function from which the last line comes.
        self._origin: FunctionOrigin | None = None

    def write(self, results: object) -> None:
        """Write all equations, and the return of `results`.

        Args:
            results: An expression, or a container of expressions; slot i is the result i of the
                jaxpr; the slots after the results are its arguments.
        """
        for line in self._lines:
            self._equation(line)
        self._return(results)

    def name(self, var: Var, hint: str | None = None) -> str:
        """Return a new name for a variable: the hint if it is free."""
        text = self._names.claim(hint) if hint else self._names.fresh()
        self._texts[var] = text
        if hint:
            self._hints[var] = hint
        return text

    def arguments(self, places: Sequence[str], hints: Sequence[str], names: Sequence[str]) -> None:
        """Name the arguments: parameters keep their names, others are assigned on separate lines.

        `places` are their expressions.
        """
        for var, place, hint in zip(self._jaxpr.invars, places, hints, strict=True):
            if place in names:
                self._texts[var] = self._hints[var] = place
            elif self._uses[var]:
                last = _LAST_KEY.fullmatch(place)
                key = Bracket("[", [[last[2]]], "]", call=True) if last else None
                self.assign(var, [last[1], key] if last and key else [place], hint)

    def assign(self, var: Var, pieces: Sequence[Piece], hint: str | None = None) -> None:
        """Write `name = pieces  # type`; an unused value gets no name."""
        target = self.name(var, hint) if self._uses[var] else self._names.unused()
        self.lines += statement(f"{target} = ", pieces, f"  # {type_of(var.aval)}", self._depth)

    def unpack(
        self,
        structure: Grouping,
        variables: Sequence[Atom],
        pieces: list[Piece],
        hints: dict[int, str] | None = None,
    ) -> None:
        """Write `a, b = pieces  # types` for the variables in this structure."""
        targets = self._targets(structure, variables, hints or {})
        self.lines += unpacking(targets, pieces, self._depth)

    def stage(self, closed_over: Sequence[Var]) -> None:
        """Write `lax.stage` calls so that JAX closes over variables in the order of the constants.

        Without `lax.stage`, JAX orders them by their first use in the body.
        """
        jaxpr, wanted = self._jaxpr, [v for v in closed_over if self._uses[v]]
        atoms = chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
        met = dict.fromkeys(v for v in atoms if not isinstance(v, Literal) and v in wanted)
        count = 0
        while wanted[count:] != [v for v in met if v not in wanted[:count]]:
            count += 1
        if count == 1:
            self.assign(wanted[0], pieces_of(call("lax.stage", Name(self._texts[wanted[0]])), self))
        elif count:
            self.mention("lax")
            texts: list[list[Piece]] = [[self._texts[v]] for v in wanted[:count]]
            items: list[list[Piece]] = [["lax.stage"], [Bracket("(", texts, ")")]]
            staged: list[Piece] = ["map", Bracket("(", items, ")", call=True)]
            self.unpack(tuple(range(count)), wanted, staged)

    def bind_symbols(self, places: Mapping[int, str], start: int) -> None:
        """Insert the definitions of the symbols used in the body at its line `start`.

        `places` are the expressions of arguments without names.
        """
        pairs = [(v, self._texts.get(v, places.get(i))) for i, v in enumerate(self._jaxpr.invars)]
        reached = [(v, text) for v, text in pairs if text]
        bound = self._module.bindings(reached, self.lines)
        if bound and self.lines[start].lstrip().startswith(("def ", "@")):
            bound.append("")
        self.lines[start:start] = bound

    # --- equations ----------------------------------------------------------------------------

    def _equation(self, line: SelectedEquation) -> None:
        self._operands, outs = line.operands, line.eqn.outvars
        self._enter(self._module.settings_of(line.eqn))
        if line.expression is None:
            eqn = stubbed(line.eqn) if self._module.stub_callbacks else line.eqn
            template = self._module.templates.of(self._without_unused(eqn), self)
        else:
            proposal = line.expression
            template = TextTemplate(proposal.of.pieces(self), proposal.of.level, proposal.results)
        whole = self._filled(template, line.operands)
        if template.results == 0 and self._may_pend(outs[0], line.eqn, whole):
            origin = self._module.origin(line.eqn)
            self._pending.append(replace(whole, var=outs[0], origin=origin))
            return
        self._flush()
        self._comment(self._module.origin(line.eqn))
        if not outs or template.results is None:
            self.lines += statement("", whole.pieces, "", self._depth)
        elif template.results == 0:
            self.assign(outs[0], whole.pieces)
        else:
            self.unpack(template.results, outs, list(whole.pieces))

    def _without_unused(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation; if it is used only for its effect, its results are `DropVar`s."""
        if not eqn.effects or any(self._uses[v] for v in eqn.outvars):
            return eqn
        return eqn.replace(outvars=[DropVar(v.aval) for v in eqn.outvars])

    def _enter(self, settings: tuple[str, ...]) -> None:
        """Enter these settings for the next lines, by a `with` if they are not the outer ones."""
        if settings == self._entered:
            return
        self._flush()
        self._depth -= self._entered != self._around
        more = [text for text in settings if text not in self._around]
        if more:
            self.lines.append(f"{INDENT * self._depth}with {', '.join(more)}:")
            self._depth += 1
        self._entered = settings if more else self._around

    def _may_pend(self, var: Var, eqn: JaxprEqn, whole: Pending) -> bool:
        return (
            self._uses[var] == 1
            and not eqn.effects
            and whole.parts < _MOST_PARTS
            and len(whole.text) <= _LONGEST
            and len(self._pending) < _MOST_PENDING
        )

    def _filled(self, template: TextTemplate, atoms: Sequence[Atom]) -> Pending:
        """Return the template with these operands, inlining pending ones where allowed.

        Operands may be inlined if they are the last pending ones, in the template's order.
        """
        while self._pending:
            waiting = {w.var: i for i, w in enumerate(self._pending)}
            operands = [atoms[hole.index] for hole in template.holes]
            wanted = [waiting[v] for v in operands if not isinstance(v, Literal) and v in waiting]
            if not wanted:
                break
            first = len(waiting) - len(wanted)
            if wanted == list(range(first, len(waiting))):
                taken = {w.var: w for w in self._pending[first:]}
                whole = self._fill(template, atoms, taken)
                room = min(_LONGEST, WIDTH - _MARGIN - len(INDENT) * self._depth)
                if whole.parts <= _MOST_PARTS and len(whole.text) <= room:
                    del self._pending[first:]
                    return whole
            self._flush(min(wanted) + 1)
        return self._fill(template, atoms, {})

    def _fill(
        self, template: TextTemplate, atoms: Sequence[Atom], taken: dict[Var, Pending]
    ) -> Pending:
        texts, parts = {}, 1
        for hole in template.holes:
            atom = atoms[hole.index]
            if isinstance(atom, Literal):
                text, level = self._module.literal(atom, template.typed)
            elif atom in taken:
                text, level = taken[atom].text, taken[atom].level
                parts += taken[atom].parts
            else:
                text, level = self._texts[atom], ATOM
            texts[hole.index] = f"({text})" if level < hole.level else text
        pieces = filled_holes(template.pieces, texts) if texts else template.pieces
        return Pending(None, flat(pieces), pieces, template.level, parts)

    def _flush(self, count: int | None = None) -> None:
        """Write the first `count` pending results as lines, or all of them."""
        count = len(self._pending) if count is None else count
        flushed, self._pending = self._pending[:count], self._pending[count:]
        for w in flushed:
            assert w.var is not None
            self._comment(w.origin)
            self.assign(w.var, w.pieces)

    def _comment(self, origin: FunctionOrigin | None) -> None:
        """Write a comment with the origin of the next lines, if it changes."""
        if origin is None or origin == self._origin:
            return
        same_file = self._origin is not None and self._origin.file == origin.file
        # Operations of a module without locations have its lines, in no function.
        parts = (origin.function, None if same_file else origin.file)
        text = ", ".join(filter(None, parts))
        self.lines.append(f"{INDENT * self._depth}# {text}{origin.behind}")
        self._origin = origin

    # --- results ------------------------------------------------------------------------------

    def _targets(
        self, structure: Grouping, variables: Sequence[Atom], hints: dict[int, str]
    ) -> Targets:
        """Return the structure with a name and a type for each of its variables."""
        if isinstance(structure, tuple):
            return [self._targets(part, variables, hints) for part in structure]
        if structure is None:
            return self._names.unused(), None
        var = variables[structure]
        if not self._uses[var]:
            return self._names.unused(), None
        return self.name(var, hints.get(structure)), type_of(var.aval)

    def _return(self, results: object) -> None:
        pieces = pieces_of(results, self)
        if isinstance(results, tuple) and results:
            pieces = [replace(pieces[0], bare=True)]  # type: ignore[type-var]
        template = TextTemplate(pieces, ATOM, None)
        self._enter(self._around)
        whole = self._filled(template, [*self._jaxpr.outvars, *self._jaxpr.invars])
        self._flush()
        types = ", ".join(type_of(v.aval) for v in self._jaxpr.outvars)
        suffix = f"  # {types}" if whole.parts > 1 else ""
        room = WIDTH - len(INDENT) * self._depth - len("return ") - len(whole.text)
        self.lines += statement(
            "return ", whole.pieces, suffix * (len(suffix) <= room), self._depth
        )

    # --- definitions for expressions ------------------------------------------------------------

    def function(self, function: PythonFunction) -> str:
        """Return the name of a function, and define it here or at module level."""
        is_determined = self._module.determines_symbols(function)
        if function.kept and is_determined:
            return self._module.function(function)
        if function.kept and function.key in self._module.functions_around:
            return self._module.functions_around[function.key]
        captured = [self._captured(self._operands[i]) for i in function.captured]
        texts = dict(zip(function.jaxpr.invars, captured, strict=False))
        if function.rules and is_determined and self._module.are_constants(captured):
            # Its rules may call it, so it must be at module level.
            key = (*function.key, *captured)
            return self._module.function(replace(function, kept=True, key=key), texts)
        if self._depth >= _DEEPEST and not function.decorators and is_determined:
            return self._hoisted_function(function, captured)
        if function.kept:
            name = self._module.claim(function.name)
            self._module.functions_around[function.key] = name
        else:
            name = self._names.claim(function.name)
        passed = enumerate(function.passed, len(captured))
        named = ((i, self._operands[slot]) for i, slot in passed)
        hints = {i: self._hints[v] for i, v in named if type(v) is not Literal and v in self._hints}
        names = self._names.inside(captured)
        with self._module.within(self._entered):
            lines = define(self._module, function, name, texts, names, self._depth, hints)
        if self.lines and self.lines[-1]:
            self.lines.append("")
        self.lines += [*lines, ""]
        return name

    def _hoisted_function(self, function: PythonFunction, captured: Sequence[str]) -> str:
        """Return a module-level function with its captured values as arguments."""
        count = len(captured)
        alone = replace(
            function,
            parameters=(*range(count), *function.parameters),
            titles=(*["values"] * count, *function.titles),
            captured=(),
            closed_over=count,
            key=(open_jaxpr(function.jaxpr), function.parameters),
        )
        name = self._module.function(alone)
        if not captured:
            return name
        self.mention("partial")
        return f"partial({', '.join((name, *captured))})"

    def _captured(self, atom: Atom) -> str:
        """Return the name of an operand in a local function."""
        if not isinstance(atom, Literal):
            if any(w.var is atom for w in self._pending):
                self._flush()
            return self._texts[atom]
        # As an array it is a constant of the loop instead of a literal in its body.
        pieces = pieces_of(call("jnp.asarray", literal(atom).typed), self)
        name = self._names.fresh()
        comment = f"  # {type_of(atom.aval)}"
        self.lines += statement(f"{name} = ", pieces, comment, self._depth)
        return name


# --- functions --------------------------------------------------------------------------------


def gap(depth: int) -> list[str]:
    """Return the blank lines between definitions."""
    return [""] if depth else ["", ""]


def define(
    module: PythonModule,
    function: PythonFunction,
    name: str,
    texts: dict[Var, str],
    names: LocalNames,
    depth: int,
    hints: dict[int, str] | None = None,
) -> list[str]:
    """Return the lines that define a function with its decorators and derivative rules.

    `texts` has the names of captured values, `names` are for its body; `hints` are names for
    arguments without names of their own.
    """
    lines = []
    for decorator in function.decorators:
        lines += statement("@", decorator.pieces(module), "", depth)
    if function.kept and function.renamed and name != function.name:
        lines.append(f"{INDENT * depth}{module.renaming(function.name)}")
    lines += _undecorated(module, function, name, texts, names, depth, hints or {})
    for method, functions, kwargs in function.rules:
        items: list[list[Piece]] = []
        for rule in functions:
            rule_name = module.claim(rule.name) if not depth else names.claim(rule.name)
            inside = names.inside(())
            lines += [*gap(depth), *define(module, rule, rule_name, {}, inside, depth)]
            items.append([rule_name])
        items += [[f"{k}=", *pieces_of(v, module)] for k, v in kwargs.items()]
        lines += gap(depth)
        defined: list[Piece] = [f"{name}.{method}", Bracket("(", items, ")", call=True)]
        lines += statement("", defined, "", depth)
    return lines


def _undecorated(
    module: PythonModule,
    function: PythonFunction,
    name: str,
    texts: dict[Var, str],
    names: LocalNames,
    depth: int,
    hints: dict[int, str],
) -> list[str]:
    if function.raises is not None:
        raised = statement("raise ", function.raises.pieces(module), "", depth + 1)
        return [*definition(name, function.titles, [None] * len(function.titles), depth), *raised]
    jaxpr = open_jaxpr(function.jaxpr)
    arg_names = jaxpr.debug_info.arg_names or ()
    if len(arg_names) == len(jaxpr.invars):
        named = [i for i, text in enumerate(arg_names) if text]
        hints |= zip(named, local_names([arg_names[i] for i in named]), strict=True)
    body = Block(module, function.jaxpr, texts, names, depth + 1)
    parameters: list[str] = []
    types: list[str | None] = []
    for structure, title in zip_longest(function.parameters, function.titles, fillvalue="values"):
        if isinstance(structure, int):
            var = jaxpr.invars[structure]
            parameters.append(body.name(var, hints.get(structure)))
            types.append(type_of(var.aval))
        else:
            parameters.append(names.claim(title))
            types.append(None)
    places: dict[int, str] = {}
    for structure, parameter in zip(function.parameters, parameters, strict=True):
        places.update(_places(structure, parameter))
        if isinstance(structure, tuple) and structure:
            body.unpack(structure, jaxpr.invars, [parameter], hints)
    start = len(body.lines)
    closed_over = jaxpr.invars[: len(function.captured) or function.closed_over]
    body.stage(closed_over or jaxpr.constvars)
    with module.inside(function.setting):
        body.write(slots(function.results))
    if not depth:
        body.bind_symbols(places, start)
    return [*definition(name, parameters, types, depth), *body.lines]


def _places(structure: Grouping, text: str) -> Iterator[tuple[int, str]]:
    """Yield the expression of each argument in a structure, given that of the whole."""
    if isinstance(structure, int):
        yield structure, text
    for i, part in enumerate(structure if isinstance(structure, tuple) else ()):
        yield from _places(part, f"{text}[{i}]")


# --- arguments ------------------------------------------------------------------------------------
# The signature of an emitted function: the program's arguments and results as pytrees.
#
# The function is called like the original: `def loss(params, x)`. It accesses the leaves of
# `params` by path, or by their flat index if a node has no key paths.
#
# Results are pytrees too, although the module imports only JAX. A node of a class takes its
# structure from an argument with the same structure (`state` of `step(state) -> state`); otherwise
# it is a named tuple with the name and fields of the class, or a dict or tuple if its children are
# not fields.


@dataclass
class CallSignature:
    """The signature of a program.

    `parameters` are the texts between the parentheses, `call` an example of them in a call.
    `places` has the expression of each flat argument. `flattened` maps local names to expressions
    of the arguments whose leaves they hold.
    """

    parameters: list[str] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    flattened: dict[str, str] = field(default_factory=dict)

    def place(self, arg: Any, root: str) -> None:
        """Record the expression of each leaf of an argument, given that of the argument."""
        leaves = _leaves(arg)
        if leaves is None:
            name = self.free(f"{identifier(root)}_leaves")
            self.flattened[name] = root
            for at, leaf in enumerate(_with_held(arg)):
                if not isinstance(leaf, StaticLeaf):
                    self.places[leaf] = f"{name}[{at}]"
        for i, access, _ in leaves or ():
            self.places[i] = root + access

    def free(self, hint: str) -> str:
        """Return a name similar to the hint that no parameter has."""
        taken = (*self.parameters, *self.flattened, *ROOTS)
        return next(name for name in numbered(hint) if name not in taken)


def call_signature(program: Program) -> CallSignature:
    """Return the signature of the function that is emitted for a program."""
    count = program.in_tree.num_leaves
    args, kwargs = filled(program.in_tree, range(count))
    called = CallSignature(places=[""] * count)
    names = [_parameter(arg, program.arg_names, i) for i, arg in enumerate(args)]
    rest = _rest(names)
    for position, (arg, (name, _)) in enumerate(zip(args, names, strict=True)):
        if position < rest:
            name = called.free(name)
            called.parameters.append(name)
            called.place(arg, name)
        else:
            called.place(arg, f"{name}[{position - rest}]")
    called.call += called.parameters
    if rest < len(args):
        called.parameters.append(f"*{names[-1][0]}")
        called.call.append(called.parameters[-1])
    if all(_is_name(key) and key not in (*called.parameters, *ROOTS) for key in kwargs):
        if kwargs and rest == len(args):
            called.parameters.append("*")
        called.parameters += kwargs
        called.call += [f"{key}={key}" for key in kwargs]
        roots = {key: key for key in kwargs}
    else:
        others = called.free("keywords")
        called.parameters.append(f"**{others}")
        called.call.append(f"**{others}")
        roots = {key: f"{others}[{plain_text(key)}]" for key in kwargs}
    for key, arg in kwargs.items():
        called.place(arg, roots[key])
    return called


def _rest(names: Sequence[tuple[str, int | None]]) -> int:
    """Return the position of the first of the `*args`, determined by names and indexes."""
    for start in range(len(names)):
        name = names[start][0]
        behind = enumerate(names[start:])
        if all(pair == (name, i) for i, pair in behind):
            return start
    return len(names)


def _with_held(tree: Any) -> list[Any]:
    """Return the leaves of a caller's tree, including those held in its structure."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, StaticLeaf))


def _leaves(tree: Any) -> list[tuple[int, str, str]] | None:
    """Return each leaf with its path in Python and in JAX; None if one has no Python path."""
    leaves = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        steps = [_step(key) for key in path]
        if None in steps:
            return None
        leaves.append((leaf, "".join(map(str, steps)), keystr(path)))
    return leaves


def _step(key: Any) -> str | None:
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}" if _is_name(key.name) else None
    if isinstance(key, DictKey) and type(key.key) in (str, int, bool):
        return f"[{plain_text(key.key)}]"
    return None


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _parameter(arg: Any, names: Sequence[str], position: int) -> tuple[str, int | None]:
    """Return the start of an argument's paths: a name, and an index if it is `args[0]`."""
    leaves = _leaves(arg)
    if leaves is None:
        words = {re.split(r"\W", names[i])[0] for i in jax.tree.leaves(arg)}
    else:
        words = {names[i].removesuffix(path) for i, _, path in leaves}
    root = words.pop() if len(words) == 1 else ""
    root = f"{root}_" if root in ROOTS else root
    match = re.fullmatch(r"(\w+)\[(\d+)\]", root)
    if match and _is_name(match[1]):
        return match[1], int(match[2])
    return (root if _is_name(root) else f"arg{position}"), None


def local_names(places: Sequence[str]) -> list[str]:
    """Return a short unique name per argument: `params["mlp"]["up"]` is `up` or `mlp_up`."""
    choices = [list(_hints(place)) for place in places]
    chosen = [0] * len(places)
    while True:
        names = [choice[n] for choice, n in zip(choices, chosen, strict=True)]
        uses = Counter(names)
        longer = [
            n + 1 if uses[name] > 1 and n + 1 < len(choice) else n
            for name, n, choice in zip(names, chosen, choices, strict=True)
        ]
        if longer == chosen:
            return names
        chosen = longer


def _hints(place: str) -> Iterator[str]:
    """Yield names for an argument, shortest first: the last word, the last two, with the first."""
    words = re.findall(r"\w+", place) or ["x"]
    for count in range(1, len(words)):
        last = words[-count:]
        if not last[0].isdigit():
            yield "_".join(last)
        yield "_".join([words[0], *last])
    yield "_".join(words)


# --- results ----------------------------------------------------------------------------------


def result_structure(program: Program, called: CallSignature) -> tuple[Any, str | None]:
    """Return the results as nested containers of indexes, and a note on replaced classes."""
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    results = _ResultBuilder()
    roots = dict(zip(called.parameters, args, strict=False)) | kwargs
    for name, arg in roots.items():
        if name in called.parameters and not name.startswith("*"):
            results.note(arg, name)
    count = program.out_tree.num_leaves
    structure = results.built(filled(program.out_tree, range(count)))
    if not results.classes:
        return structure, None
    names = ", ".join(sorted(results.classes))
    return structure, f"These results are named tuples of a class's fields: {names}."


class _ResultBuilder:
    """Builds results. `known` has the expressions of nodes in arguments by their structure."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[str, Any]] = {}
        self.classes: set[str] = set()

    def note(self, tree: Any, text: str) -> None:
        """Record the nodes of classes in an argument that have a path."""
        keys, children, structure = one_level(tree)
        if isinstance(tree, int):
            return
        if _is_class(structure):
            self.known.setdefault(jax.tree.structure(tree), (text, tree))
        for key, child in zip(keys, children, strict=True):
            step = _step(key)
            if step is not None:
                self.note(child, text + step)

    def built(self, tree: Any) -> Any:
        """Return a tree of indexes in Python's containers and calls that build other nodes."""
        if isinstance(tree, int):
            return Slot(tree)
        if isinstance(tree, StaticLeaf):
            return tree.value if type(tree.value) in LITERALS else None
        keys, children, structure = one_level(tree)
        if _is_class(structure) and jax.tree.structure(tree) in self.known:
            return self._like_an_argument(tree)
        parts = [self.built(child) for child in children]
        if (tree.owner if isinstance(tree, SubstituteNode) else type(tree)) in DESCRIBED_AS_TUPLES:
            return tuple(parts)
        if not _is_class(structure):
            return _container(tree, keys, parts)
        if isinstance(tree, OrderedDict):
            return call("OrderedDict", _dictionary(tree, parts))
        return self._class(tree, keys, parts)

    def _like_an_argument(self, tree: Any) -> Expression:
        """Return a node with the structure of an argument's node, including its held objects."""
        text, _ = self.known[jax.tree.structure(tree)]
        leaves = [
            Name(f"jax.tree.leaves({text})[{at}]") if isinstance(leaf, StaticLeaf) else Slot(leaf)
            for at, leaf in enumerate(_with_held(tree))
        ]
        return call("jax.tree.unflatten", call("jax.tree.structure", Name(text)), leaves)

    def _class(self, tree: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        owner = tree.owner if isinstance(tree, SubstituteNode) else type(tree)
        class_name = tree.type_name if isinstance(tree, Opaque) else owner.__qualname__
        fields = [key.name if isinstance(key, GetAttrKey) else "" for key in keys]
        if all(_is_name(name) and not name.startswith("_") for name in fields):
            name = identifier(class_name.rpartition(".")[2])
            self.classes.add(name)
            namedtuple_call = call("namedtuple", name, fields)
            cls = ModuleValue((name, *fields), name, namedtuple_call)
            return CallExpression(cls, (), dict(zip(fields, parts, strict=True)))
        texts = [key.key if isinstance(key, DictKey) else None for key in keys]
        if all(type(text) is str for text in texts) and len(set(texts)) == len(texts):
            return dict(zip(texts, parts, strict=True))
        return tuple(parts)


def _is_class(tree: Any) -> bool:
    """Return True if the root of a structure is not a Python container."""
    data = tree.node_data()
    return data is not None and data[0] not in (type(None), tuple, list, dict)


def _container(tree: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
    if isinstance(tree, dict):
        return _dictionary([key.key for key in keys], parts)
    return None if tree is None else type(tree)(parts)


def _dictionary(keys: Iterable[object], parts: list[Any]) -> object:
    """Return a dict, or a tuple if a key has a user's class, which the module cannot name."""
    try:
        for key in keys:
            as_expression(key)
    except TypeError:
        return tuple(parts)
    return dict(zip(keys, parts, strict=True))
