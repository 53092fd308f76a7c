"""Reading of Programs from `.jaxpr` files.

Nothing in a file is run or imported: names are looked up in tables, values are read with `ast`, and
JAX's own type checker checks every equation before the program is returned.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, described, did_you_mean
from jaxprtool.files import opened_plain
from jaxprtool.formats.jaxpr import params, syntax, values
from jaxprtool.formats.jaxpr.constants import Constants
from jaxprtool.formats.jaxpr.header import (
    Header,
    bound_of,
    complete_comments,
    parsed_jit_options,
    read_header,
    read_stacks,
    source_infos_by_comment,
)
from jaxprtool.formats.jaxpr.params import OPAQUE, Params
from jaxprtool.formats.jaxpr.syntax import (
    MAX_DEPTH,
    BinderSyntax,
    BodySyntax,
    EquationSyntax,
    ExpressionSyntax,
    FileSyntax,
    FileText,
    OperationSyntax,
    ParameterSyntax,
)
from jaxprtool.formats.jaxpr.values import TypeReader, is_whole
from jaxprtool.ir import source_text
from jaxprtool.ir.custom_rules import jvp_rule, vjp_rule
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.frames import Root, frames_now
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, CustomJVP, CustomVJP, While, view
from jaxprtool.ir.rules import missing_plugin
from jaxprtool.ir.symbols import Bound
from jaxprtool.jaxcompat import (
    Atom,
    Aval,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
)
from jaxprtool.jaxcompat.source_locations import is_installed

#: The entry of the header with the JAX release.
_RELEASE = re.compile(r"^jax = '([^']*)'\r?$", re.MULTILINE)

#: The types of 64-bit numbers, by what their names end in.
_WIDE_TYPES = {"64": ("f64", "i64", "u64"), "128": ("c128",)}


def read(
    path: str | os.PathLike[str], sources: Root | None = None, *, opaque: bool = False
) -> Program:
    """Return the Program in a `.jaxpr` file, or in a StableHLO module, in text or bytecode.

    Large constants of a `.jaxpr` file are in an `.npz` file next to it.

    Args:
        path: The file.
        sources: The folder of the user's source files that equations come from, by default the
            current one. Their lines are shown next to equations if they have not changed.
        opaque: Whether operations of a module that cannot be read are kept as equations, and
            equations of a `.jaxpr` file that this release of JAX lacks the primitive of.

    Raises:
        ProgramFileError: If the file does not exist, is malformed, or has ill-typed equations; the
            message has the place.
        UnsupportedError: If a module has an operation that cannot be read.
    """
    name = os.fsdecode(path)
    data, version = _contents(name)
    if not is_program(data):
        from jaxprtool.formats.stablehlo import is_stablehlo, read_module_program

        if is_stablehlo(data):
            return read_module_program(data, name, opaque=opaque)
    while True:
        try:
            return parse_program(data, name, Path(name), sources, opaque=opaque)
        except ProgramFileError:
            old_version = version
            data, version = _contents(name)
            if version == old_version:
                raise
            # The file was replaced in the meantime, and its constants removed.


def _contents(name: str) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of a file, and a key that differs for other files of the same name."""
    try:
        with opened_plain(name) as file:
            status = os.fstat(file.fileno())
            return file.read(), (status.st_ino, status.st_mtime_ns)
    except (OSError, ValueError) as error:  # ValueError for an invalid path
        said = getattr(error, "strerror", None) or error
        raise ProgramFileError(
            f"{name!r}: {said}" if "\0" in name else f"{name}: {said}"
        ) from error


def release_of(path: str | os.PathLike[str]) -> str:
    """Return the JAX release that wrote a file; "" if its header does not say.

    Raises:
        ProgramFileError: If the file cannot be read.
    """
    data, _ = _contents(os.fsdecode(path))
    match = _RELEASE.search(data.decode(errors="replace"))
    return match[1] if match else ""


def is_program(data: bytes) -> bool:
    """Return True if these bytes begin like a `.jaxpr` file."""
    return data.removeprefix(b"\xef\xbb\xbf").startswith(b"jaxprtool ")


def parse_program(
    data: str | bytes,
    name: str,
    path: Path | None = None,
    sources: Root | None = None,
    *,
    opaque: bool = False,
) -> Program:
    """Return the Program in a file's text.

    Args:
        data: The text.
        name: The file's name in error messages.
        path: The file of the text, if its large constants are next to it.
        sources: As for `read`.
        opaque: As for `read`.

    Raises:
        ProgramFileError: As for `read`.
    """
    text = data if isinstance(data, str) else _decoded(data, name)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    # Ignore warnings about invalid escapes and unusual parameters.
    with warnings.catch_warnings(action="ignore"), without_collector():
        return _program(FileText(name, text), path, sources, opaque)


def _program(source: FileText, path: Path | None, sources: Root | None, opaque: bool) -> Program:
    file = syntax.parse_file(source)
    header = read_header(source, file.header)
    files = _files(header, path, sources)
    try:
        stacks = read_stacks(header.stacks, files)
    except ValueError as error:
        raise source.fail(file.header["stacks"].position, str(error)) from None
    infos = source_infos_by_comment((comment for _, comment in source.comments), files, stacks)
    complete_comments(file, infos)
    try:
        types = TypeReader(header.meshes, header.symbols, header.mesh, header.foreign)
    except ValueError as error:
        raise source.fail(file.header["foreign"].position, str(error)) from None
    debug_info = DebugInfo("jit", header.name, header.arguments[1], header.results[1])
    _check_counts(source, file, header)
    constants = Constants(_constants_files(path, header.constants))
    with closing(constants), _precision(source), jaxcompat.axes_bound(header.axis_env):
        builder = FileBuilder(file, types, constants, infos, header.modules, opaque)
        jaxpr = builder.program(debug_info)
    program = Program(
        name=header.name,
        jaxpr=jaxpr,
        in_tree=header.arguments[0],
        out_tree=header.results[0],
        arg_names=header.arguments[1],
        out_names=header.results[1],
        axis_env=header.axis_env,
        roots=() if sources is None else (sources,),
    )
    if header.bounds:
        program = program.replace(bounds=_bounds(source, file, program, header, types))
    if header.jit is None:
        return program
    try:
        return program.replace(jit=parsed_jit_options(program, header.jit))
    except ValueError as error:
        raise source.fail(file.header["jit"].position, str(error)) from None


def _files(header: Header, path: Path | None, sources: Root | None) -> dict[str, str]:
    """Return the names of source files in frames, by their names in comments.

    The user's files have the names of `source_text.name_read`. Without `sources`, they are looked
    for in the current folder. Libraries keep their paths in the folder of packages.
    """
    files = dict(header.files)
    for name, relative in header.files.items():
        recorded = header.digests.get(name)
        if recorded is None and is_installed(relative):
            continue
        file = os.path.join("" if sources is None else sources.base, relative)
        if recorded is None:  # written before files had digests
            is_same = sources is not None and _is_older(file, path)
        else:
            is_same = recorded != "" and recorded == source_text.source_digest(file)
        files[name] = source_text.name_read(relative, file, recorded or "", is_same)
    return files


def _is_older(file: str, path: Path | None) -> bool:
    try:
        return path is not None and os.stat(file).st_mtime <= path.stat().st_mtime
    except OSError:
        return False


def _constants_files(path: Path | None, name: str | None) -> list[Path]:
    """Return the possible constants files: next to the file, or to the target of its link."""
    if path is None:
        return []
    # Early files did not name their constants file, which was named after them.
    beside = path.with_name(name or f"{path.name}.npz")
    return [beside, path.resolve().with_name(beside.name)]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        from jaxprtool.formats.lowering import is_exported

        message, hint = f"{name}:{line}:{column}: the text is not valid UTF-8", None
        if is_exported(data):
            message = f"{name} is an artifact of jax.export"
            hint = f"jaxprtool.load('{name}') returns its program"
        raise ProgramFileError(message, hint) from None


def _check_counts(source: FileText, file: syntax.FileSyntax, header: Header) -> None:
    counts = (
        ("arguments", header.arguments[1], file.body.arguments),
        ("results", header.results[1], file.body.results),
    )
    for entry, names, binders in counts:
        if len(names) != len(binders):
            message = f"{len(names)} {entry} are named here, but the program has {len(binders)}"
            raise source.fail(file.header[entry].position, message)


def _bounds(
    source: FileText, file: syntax.FileSyntax, program: Program, header: Header, types: TypeReader
) -> tuple[tuple[str, Bound], ...]:
    avals, bounds = dict(program.arguments), []
    for name, value in header.bounds.items():
        position = file.header["bounds"].position
        if not np.issubdtype(getattr(avals.get(name), "dtype", None), np.integer):
            raise source.fail(position, f"'{name}' is not an argument that is a size")
        try:
            bounds.append((name, bound_of(value, types)))
        except ValueError as error:
            raise source.fail(position, str(error)) from None
    return tuple(bounds)


def _precision(source: FileText) -> AbstractContextManager[object]:
    """Return the setting that enables 64-bit types, if the file has any."""
    wide = any(
        f"{size}{mark}" in source.text and any(f"{name}{mark}" in source.text for name in names)
        for size, names in _WIDE_TYPES.items()
        for mark in "[<"
    )
    return jax.enable_x64(True) if wide else nullcontext()


# --- building -------------------------------------------------------------------------------------
# Construction of jaxprs from the syntax tree of a `.jaxpr` file, with all names and types checked.
#
# Jaxprs are built from the outside in, since a `shard_map` binds the axes used in its body: a body
# is built when the parameter that contains it is read. Types and effects come from JAX's own
# checker, which is called once for all equations with the same primitive, parameters and types in
# the same scope.
#
# The rules of custom derivatives are built last. JAX needs them only for differentiation, and a
# rule may call its own function.

#: The context of each `shard_map` and kernel around a jaxpr, outermost first: the function of
#: jaxcompat that enters it, and its arguments by name.
Scope: TypeAlias = tuple[tuple[Callable[..., Any], tuple[tuple[str, Any], ...]], ...]


@contextmanager
def _entered(scope: Scope) -> Iterator[None]:
    """Set JAX's settings to those of a scope."""
    with ExitStack() as stack:
        for enter, arguments in scope:
            stack.enter_context(enter(**dict(arguments)))
        yield


@dataclass(eq=False)
class ReadParams:
    """The parameters of an operation, read in a scope, and the settings of its context.

    If `reusable`, they hold for all of its equations in the scope, and `checked` has one checked
    equation per combination of operand and result types.
    """

    given: Params
    settings: Params
    reusable: bool
    checked: dict[tuple[object, ...], JaxprEqn] = field(default_factory=dict)


class FileBuilder:
    """Builds the jaxprs of one file.

    `source_infos` has the source info of each comment, and `modules` the module of each primitive
    that `import jax` does not define.
    """

    def __init__(
        self,
        file: FileSyntax,
        types: TypeReader,
        constants: Constants,
        source_infos: Mapping[str | None, object],
        modules: Mapping[str, str],
        opaque: bool = False,
    ):
        self.file = file
        self.source = file.source
        self.types = types
        self.constants = constants
        self.source_infos = source_infos
        self.modules = modules
        #: The meaning of names in all parameters.
        self.type_names: dict[str, Any] = {"aval": types, "dim": types.dimension}
        self._literals: dict[str, Literal] = {}
        self._params: dict[Scope, dict[OperationSyntax, ReadParams]] = {}
        self._shared: dict[tuple[str, Scope], ClosedJaxpr | None] = {}
        self._rules: dict[tuple[BodySyntax, Scope], Callable[[], ClosedJaxpr]] = {}
        self._waiting: list[Callable[[], object]] = []
        self._keeps_unknown = opaque  #: Whether equations that cannot be read are opaque.
        self._depth = 0
        #: The number of opaque equations whose bodies are being built.
        self._opaque = 0
        #: The equations around the jaxpr that is being built, for their names and places.
        self._around: list[JaxprEqn] = []

    def program(self, debug_info: DebugInfo) -> ClosedJaxpr:
        """Return the program's closed jaxpr. Raises ProgramFileError."""
        jaxpr = self.jaxpr(self.file.body, (), debug_info)
        while self._waiting:
            self._waiting.pop()()
        return jaxpr

    # --- jaxprs -------------------------------------------------------------------------------

    def jaxpr(self, tree: BodySyntax, scope: Scope, debug_info: DebugInfo) -> ClosedJaxpr:
        """Return the closed jaxpr of a tree in the current scope, which has been entered."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.source.fail(tree.position, f"jaxprs are nested more than {MAX_DEPTH} deep")
        env: dict[str, Atom] = {}
        consts = [self._constant(binder) for binder in tree.constants]
        constvars, invars = self._bound(tree.constants, env), self._bound(tree.arguments, env)
        for binder in tree.arguments:
            if binder.value is not None:
                raise self.source.fail(
                    binder.position, "only a constant, before the ';', has a value"
                )
        eqns = self._equations(tree.equations, env, scope)
        outvars = self._atoms(tree.results, env, tree.results_at)
        for i, atom in enumerate(outvars):
            if _is_ref(atom):
                position = self._find(tree.results_at, *tree.results[: i + 1])
                raise self.source.fail(position, "a ref cannot be a result")
        try:
            jaxpr = jaxcompat.new_jaxpr(constvars, consts, invars, outvars, eqns, debug_info)
        except ValueError:
            message = (
                "an equation has an effect on a ref that is neither an argument nor created here"
            )
            raise self.source.fail(tree.position, message) from None
        self._depth -= 1
        return jaxpr

    def _constant(self, binder: BinderSyntax) -> object:
        aval = self._type(binder.type, binder.position)
        if binder.value is None:
            raise self.source.fail(binder.position, f"the constant '{binder.name}' has no value")
        with self._faults_of(binder.value):
            return self.constants.array(binder.value.parse(self.source), aval)

    def _bound(self, binders: Sequence[BinderSyntax], env: dict[str, Atom]) -> list[Var]:
        variables = []
        for binder in binders:
            variable = Var(self._type(binder.type, binder.position))
            if binder.name in env:
                raise self._bound_twice(binder.name, binder.position)
            if binder.name != "_":
                env[binder.name] = variable
            variables.append(variable)
        return variables

    def _bound_twice(self, name: str, position: int) -> ProgramFileError:
        return self.source.fail(position, f"'{name}' is already bound")

    # --- atoms --------------------------------------------------------------------------------

    def _atoms(self, names: Sequence[str], env: dict[str, Atom], start: int) -> list[Atom]:
        """Return the atoms of names and literals; `start` is a position before all of them."""
        atoms = [*map(env.get, names)]
        if None in atoms:
            for i, name in enumerate(names):
                if atoms[i] is None:
                    position = self._find(start, *names[: i + 1])
                    env[name] = atoms[i] = self._literal(name, env, position)
        return atoms  # type: ignore[return-value]

    def _find(self, start: int, *texts: str) -> int:
        """Return the position of the last of several consecutive texts, from `start` on."""
        position = end = start
        for text in texts:
            position = self.source.text.index(text, end)
            end = position + len(text)
        return position

    def _literal(self, text: str, env: Mapping[str, Atom], position: int) -> Literal:
        literal = self._literals.get(text)
        if literal is None:
            if ":" not in text:
                hint = did_you_mean(text, env) if len(text) > 2 else None
                raise self.source.fail(position, f"no variable '{text}' here", hint)
            if text not in self.file.literals:
                number, _, type_ = text.partition(":")
                self.file.literals[text] = ExpressionSyntax(number, position, {}), type_
            value, type_ = self.file.literals[text]
            aval = self._type(type_, position)
            with self._faults_of(value):
                literal = Literal(self.constants.literal(value.parse(self.source), aval), aval)
            self._literals[text] = literal
        return literal

    def _type(self, text: str, position: int) -> Aval:
        try:
            return self.types(text)
        except Exception as error:  # of any class: JAX's types check their arguments
            raise self.source.fail(position, f"bad type {text}: {_said(error)}") from error

    @contextmanager
    def _faults_of(self, expression: ExpressionSyntax) -> Iterator[None]:
        """Add the place in the file to errors about an expression."""
        try:
            yield
        except values.Unreadable as error:
            position = expression.position_of(error.node)
            raise self.source.fail(position, str(error)) from error
        except (RecursionError, MemoryError):
            raise self.source.fail(expression.position, "this value cannot be read") from None

    # --- equations ----------------------------------------------------------------------------

    def _equations(
        self, trees: Sequence[EquationSyntax], env: dict[str, Atom], scope: Scope
    ) -> list[JaxprEqn]:
        # A large file spends most of its time here, and most equations look like earlier ones and
        # bind one variable: for them, everything is looked up in local variables.
        eqns: list[JaxprEqn] = []
        known, infos = self._params.setdefault(scope, {}), self.source_infos
        for tree in trees:
            operands: list[Any] = [*map(env.get, tree.operands)]
            if None in operands:
                operands = self._atoms(tree.operands, env, tree.operands_at)
            read = known.get(tree.operation)
            if read is None:
                read = self._read(tree, scope)
            key = *map(id, map(_aval_of, operands)), None, *tree.types
            like = read.checked.get(key)
            if like is None:
                like = self._checked(tree, operands, read)
                if read.reusable and not any(map(_is_ref, operands)):
                    read.checked[key] = like
            name = tree.results[0] if len(tree.results) == 1 else "_"
            if name == "_" or name in env:
                results = self._results(tree, like, env)
            else:
                variable = env[name] = Var(like.outvars[0].aval)
                results = [variable]
            primitive, info = like.primitive, infos[tree.comment]
            eqn = JaxprEqn(operands, results, primitive, like.params, like.effects, info, like.ctx)
            eqns.append(eqn)
            if primitive.name in RULE_CHECKS and not jaxcompat.is_opaque(like):
                self._waiting.append(partial(self._check_rules, tree, eqn))
        return eqns

    def _results(self, tree: EquationSyntax, like: JaxprEqn, env: dict[str, Atom]) -> list[Var]:
        """Return the variables that an equation binds, of the types of one like it."""
        results: list[Var] = []
        for name, var in zip(tree.results, like.outvars, strict=True):
            if name == "_":
                results.append(DropVar(var.aval))
                continue
            if name in env:
                position = self._result_position(tree, len(results))
                raise self._bound_twice(name, position)
            variable = env[name] = Var(var.aval)
            results.append(variable)
        return results

    def _check_rules(self, tree: EquationSyntax, eqn: JaxprEqn) -> None:
        with self._faults_in(tree):
            RULE_CHECKS[eqn.primitive.name](eqn)

    def _checked(self, tree: EquationSyntax, operands: list[Atom], read: ReadParams) -> JaxprEqn:
        """Return the equation with JAX's types and effects, if the file has these types."""
        declared = [
            None if text is None else self._type(text, self._result_position(tree, i))
            for i, text in enumerate(tree.types)
        ]
        may_be_opaque = OPAQUE in read.settings or self._opaque or self._keeps_unknown
        if may_be_opaque and None not in declared:
            described = (name for name, value in read.given.items() if not is_whole(value))
            if OPAQUE in read.settings and (name := next(described, None)) is not None:
                reason = f"the file only describes its {name}"
                return self._opaque_equation(tree, operands, read, declared, reason)
            try:
                return self._real_equation(tree, operands, read, declared)
            except ProgramFileError as error:
                return self._opaque_equation(tree, operands, read, declared, error.message)
        return self._real_equation(tree, operands, read, declared)

    def _opaque_equation(
        self,
        tree: EquationSyntax,
        operands: list[Atom],
        read: ReadParams,
        declared: Sequence[Any],
        reason: str,
    ) -> JaxprEqn:
        """Return an equation that is only described by the file, for this reason."""
        name, types = tree.operation.primitive, [atom.aval for atom in operands]
        settings = {k: v for k, v in read.settings.items() if k != OPAQUE}
        info = self.source_infos[tree.comment]
        with self._faults_in(tree):
            context = params.decode_context(settings, types, declared, self.types.mesh)
            eqn = _only_with_place(name, info).replace(
                invars=operands, params=read.given, ctx=context
            )
            # A primitive that this release lacks must have an effect if it has no results.
            unstated = () if declared or self._opaque else (name,)
            effects = jaxcompat.effects_of(read.settings.get(OPAQUE, unstated))
            place = frames_now().named([*self._around, eqn])
            primitive = jaxcompat.opaque_primitive(
                name, tuple(types), tuple(declared), effects, place, reason, self._hint(name)
            )
            avals, resolved = jaxcompat.inferred_types(primitive, read.given, operands)
        variables = [Var(aval) for aval in avals]
        return eqn.replace(primitive=primitive, outvars=variables, effects=resolved)

    def _hint(self, primitive: str) -> str:
        """Return the hint for a primitive that this process does not have."""
        if module := self.modules.get(primitive):
            return missing_plugin(primitive) or f"--plugin {module} imports the primitive"
        return "give the function itself as the TARGET, FILE:FUNCTION"

    def _real_equation(
        self, tree: EquationSyntax, operands: list[Atom], read: ReadParams, declared: Sequence[Any]
    ) -> JaxprEqn:
        name, types = tree.operation.primitive, [atom.aval for atom in operands]
        settings = {k: v for k, v in read.settings.items() if k != OPAQUE}
        with self._faults_in(tree):
            if name in self.modules and name not in jaxcompat.registered_primitives():
                raise params.UnknownPrimitive(f"unknown primitive '{name}'")
            primitive, parameters = params.decode_params(name, read.given, types, declared)
            avals = [aval for aval in declared if aval is not None]
            context = params.decode_context(settings, types, avals, self.types.mesh)
            eqn = JaxprEqn(operands, [], primitive, parameters, set(), None, context)
            check_bodies(eqn)
            with context.manager:
                types, effects = jaxcompat.inferred_types(primitive, parameters, operands)
        variables = [Var(aval) for aval in self._agreed(tree, declared, types)]
        return eqn.replace(outvars=variables, effects=effects)

    @contextmanager
    def _faults_in(self, tree: EquationSyntax) -> Iterator[None]:
        """Add the place of an equation in the file to errors about it."""
        name = tree.operation.primitive
        try:
            yield
        except ProgramFileError:
            raise
        except params.UnknownPrimitive as error:
            hint = missing_plugin(name) or did_you_mean(name, jaxcompat.registered_primitives())
            hint = self._hint(name) if name in self.modules else hint
            raise self.source.fail(tree.operation.position, str(error), hint) from error
        except Exception as error:  # the file may contain anything, and rules may raise anything
            hint = None
            if None in tree.types:
                hint = f"the type of '{tree.results[-1]}' may be missing"
            raise self.source.fail(tree.position, f"{name}: {_said(error)}", hint) from error

    def _agreed(
        self, tree: EquationSyntax, declared: Sequence[Aval | None], actual: Sequence[Aval]
    ) -> list[Aval]:
        """Return the types of an equation's results: as declared, if they match the actual ones."""
        name = tree.operation.primitive
        if len(declared) != len(actual):
            message = f"{name} returns {len(actual)} results, not {len(declared)}"
            raise self.source.fail(tree.position, message)
        for i, (said, inferred) in enumerate(zip(declared, actual, strict=True)):
            if said is not None and not jaxcompat.fits(said, inferred):
                message = f"declared {tree.types[i]}, but {name} returns {type_of(inferred)}"
                raise self.source.fail(self._result_position(tree, i), message)
        pairs = zip(declared, actual, strict=True)
        return [inferred if said is None else said for said, inferred in pairs]

    def _result_position(self, tree: EquationSyntax, index: int) -> int:
        pairs = zip(tree.results[:index], tree.types[:index], strict=True)
        texts = [text or "" for pair in pairs for text in pair]
        return self._find(tree.position, *texts, tree.results[index])

    # --- parameters ---------------------------------------------------------------------------

    def _read(self, tree: EquationSyntax, scope: Scope) -> ReadParams:
        """Return the parameters of an equation."""
        name, info = tree.operation.primitive, self.source_infos[tree.comment]
        self._around.append(_only_with_place(name, info))
        read = self._read_operation(tree.operation, scope)
        self._around.pop()
        return read

    def _read_operation(self, operation: OperationSyntax, scope: Scope) -> ReadParams:
        holding = [p for p in operation.parameters if self._mentions_jaxpr(p)]
        read = ReadParams({}, {}, reusable=not holding)
        for parameter in operation.parameters:
            if parameter in holding:
                continue
            value = self._value(parameter, self.type_names)
            if isinstance(value, str) and "jaxpr" in parameter.name:
                hint = did_you_mean(value, self.file.shared)
                message = f"no jaxpr '{value}' in this file"
                raise self.source.fail(parameter.value.position, message, hint)
            table = read.settings if parameter.name[0] == "@" else read.given
            table[parameter.name.removeprefix("@")] = value
        if OPAQUE in read.settings:
            read.reusable = False
        if not holding:
            if read.reusable:
                self._params[scope][operation] = read
            return read
        is_opaque = OPAQUE in read.settings
        self._opaque += is_opaque
        for parameter in holding:
            with self._inside(operation, scope, read.given, is_opaque) as inner:
                decoded = self._holder(operation.primitive, parameter, inner, read.given, is_opaque)
                read.given[parameter.name] = decoded
        self._opaque -= is_opaque
        return read

    def _mentions_jaxpr(self, parameter: ParameterSyntax) -> bool:
        if parameter.name[0] == "@":  # a setting; its words may equal names of jaxprs
            return False
        if parameter.value.bodies:
            return True
        words = _WORD.findall(parameter.value.text) if self.file.shared else ()
        return parameter.name != "name" and any(word in self.file.shared for word in words)

    def _value(self, parameter: ParameterSyntax, names: Mapping[str, Any]) -> object:
        with self._faults_of(parameter.value):
            return values.decode(parameter.value.parse(self.source), names)

    def _holder(
        self,
        primitive: str,
        parameter: ParameterSyntax,
        scope: Scope,
        parameters: Params,
        is_opaque: bool,
    ) -> object:
        """Return the value of a parameter that contains jaxprs."""
        label = parameters.get("name")
        names = _ParameterNames(self, parameter, scope, label if isinstance(label, str) else "")
        is_rule = parameter.name in params.RULES.get(primitive, ()) and not is_opaque
        node = parameter.value.parse(self.source)
        # The name of a rule that raises is in quotes, if another rule has the name.
        if parameter.named is None and not (is_rule and isinstance(node, ast.Name)):
            return self._value(parameter, names)
        with self._faults_of(parameter.named or parameter.value):
            name = values.decode((parameter.named or parameter.value).parse(self.source))
        tree = names.tree(node.id) if isinstance(node, ast.Name) else None
        if tree is None or not isinstance(name, str):
            message = f"{parameter.name} must be a name and a jaxpr"
            raise self.source.fail(parameter.position, message)
        return params.NamedRule(name, self._rule(tree, scope, name))

    def _rule(self, tree: BodySyntax, scope: Scope, name: str) -> Callable[[], ClosedJaxpr]:
        """Return a function that returns a rule's jaxpr once built; the same for equal rules."""
        if (tree, scope) not in self._rules:

            @cache
            def rule() -> ClosedJaxpr:
                with _entered(scope):
                    return self.jaxpr(tree, scope, _debug_info("custom rule", name))

            self._rules[tree, scope] = rule
            self._waiting.append(rule)
        return self._rules[tree, scope]

    def shared_jaxpr(self, name: str, scope: Scope, debug_info: DebugInfo) -> ClosedJaxpr:
        """Return the jaxpr with this name in the file."""
        tree, key = self.file.shared[name], (name, scope)
        if key not in self._shared:
            self._shared[key] = None
            self._shared[key] = self.jaxpr(tree, scope, debug_info)
        if self._shared[key] is None:
            raise self.source.fail(tree.position, f"'{name}' contains itself")
        return self._shared[key]

    @contextmanager
    def _inside(
        self, operation: OperationSyntax, scope: Scope, parameters: Params, is_opaque: bool
    ) -> Iterator[Scope]:
        """Enter the settings and the scope of an equation's bodies."""
        arguments: dict[str, Any] = {}
        with ExitStack() as stack:
            try:
                if operation.primitive == "shard_map" and not is_opaque:
                    enter: Callable[..., Any] = jaxcompat.inside_shard_map
                    names = ("mesh", "newly_manual_axes", "check_vma")
                    arguments = {name: parameters[name] for name in names}
                elif axes := jaxcompat.kernel_axes(parameters):
                    enter, arguments = jaxcompat.inside_kernel, {"axes": axes}
                inner = (*scope, (enter, tuple(arguments.items()))) if arguments else scope
                hash(inner)
                stack.enter_context(_entered(inner[len(scope) :]))
            except Exception as error:  # the file may contain anything
                message = f"{operation.primitive}: {_said(error)}"
                raise self.source.fail(operation.position, message) from error
            yield inner


@dataclass(frozen=True, eq=False)
class _ParameterNames(Mapping[str, Any]):
    """The names in a parameter that contains jaxprs, which are built on lookup."""

    builder: FileBuilder
    parameter: ParameterSyntax
    scope: Scope
    label: str

    def tree(self, name: str) -> BodySyntax | None:
        """Return the tree of the jaxpr with this name."""
        return self.parameter.value.bodies.get(name) or self.builder.file.shared.get(name)

    def __getitem__(self, name: str) -> Any:
        debug_info = _debug_info(self.parameter.name, self.label or self.parameter.name)
        if name in self.parameter.value.bodies:
            return self.builder.jaxpr(self.parameter.value.bodies[name], self.scope, debug_info)
        if name in self.builder.file.shared:
            return self.builder.shared_jaxpr(name, self.scope, debug_info)
        return self.builder.type_names[name]

    def __contains__(self, name: object) -> bool:
        return any(name in names for names in self._known())

    def __iter__(self) -> Iterator[str]:
        return chain(*self._known())

    def __len__(self) -> int:
        return sum(map(len, self._known()))

    def _known(self) -> tuple[Mapping[str, object], ...]:
        return self.parameter.value.bodies, self.builder.file.shared, self.builder.type_names


def _only_with_place(name: str, source_info: object) -> JaxprEqn:
    """Return an equation with only the name of its primitive and where it comes from."""
    return JaxprEqn([], [], Primitive(name), {}, set(), source_info, None)


_WORD = re.compile(r"[^\W\d]\w*")


def _debug_info(what: str, name: str) -> DebugInfo:
    return DebugInfo(what, name, None, None)


def _said(error: Exception) -> str:
    """Return a short one-line message for a JAX exception about an equation."""
    text = " ".join(str(error).split())
    if missing := re.search(r"missing \d+ required .*arguments?: (.*)", text):
        return f"missing: {missing[1]}"
    if unknown := re.search(r"unexpected keyword argument ('\w+')", text):
        return f"no parameter {unknown[1]}"
    if isinstance(error, KeyError):
        return f"missing: {text}"
    if not text or not isinstance(error, ValueError | TypeError | NotImplementedError):
        return f"it does not take these operands and parameters ({described(error)})"
    return text if len(text) <= 300 else text[:297] + "..."


_aval_of = attrgetter("aval")


def _is_ref(atom: Atom) -> bool:
    return isinstance(atom.aval, jaxcompat.AbstractRef)


# --- body checks ----------------------------------------------------------------------------------
# Checks of an equation's jaxprs in a `.jaxpr` file that JAX's type checker leaves out.
#
# JAX's type checker compares the operands of a scan or a branch with its body, but not those of
# other calls and loops, and does not check the rules of custom derivatives. Without these checks,
# an invalid program would fail only when it is run or differentiated.

_CHECKED = {c for v in (Call, CustomJVP, CustomVJP, While) for c in v.primitives}


def check_bodies(eqn: JaxprEqn) -> None:
    """Raise ValueError if the bodies of a call or a loop do not accept its operands."""
    match view(eqn) if eqn.primitive.name in _CHECKED else None:
        case Call() | CustomJVP() | CustomVJP() as call:
            _fit("the body takes", _types(call.body.invars), _types(call.operands))
        case While() as loop:
            carry = _types(loop.carry)
            _fit("cond_jaxpr takes", _types(loop.cond.invars), _types(loop.cond_consts) + carry)
            _fit("body_jaxpr takes", _types(loop.body.invars), _types(loop.body_consts) + carry)
            _fit("body_jaxpr returns", _types(loop.body.outvars), carry)
            # The predicate is a bool, or under vmap one bool per batch element.
            gives = [type_of(aval) for aval in _types(loop.cond.outvars)]
            if len(gives) != 1 or not gives[0].startswith("bool["):
                raise ValueError(f"cond_jaxpr returns {' '.join(gives) or 'nothing'}, not a bool")


# --- the rules of custom derivatives --------------------------------------------------------------


def _check_jvp(eqn: JaxprEqn) -> None:
    rule = jvp_rule(eqn)
    if rule.raises is not None:
        return
    primals, results = _primals(eqn), _types(eqn.outvars)
    tangents = [aval.to_tangent_aval() for aval in primals]
    out_tangents = [aval.to_tangent_aval() for aval in _nonzero(results, rule.out_zeros)]
    _fit("jvp takes", _types(rule.jaxpr.invars), [*primals, *tangents], _alike)
    _fit("jvp returns", _types(rule.jaxpr.outvars), [*results, *out_tangents], _alike)


def _check_vjp(eqn: JaxprEqn) -> None:
    rule = vjp_rule(eqn)
    if rule.raises is not None:
        return
    primals, results = _primals(eqn), _types(eqn.outvars)
    fwd, bwd, gives = rule.fwd, rule.bwd, _types(rule.fwd.outvars)
    if len(rule.forwarded) != len(bwd.invars) - len(results):
        raise ValueError(
            f"bwd takes {len(bwd.invars)} operands, which are not residuals and cotangents"
        )
    new = iter(gives[: len(gives) - len(results)])
    residuals = [next(new, None) if i is None else primals[i] for i in rule.forwarded]
    if None in residuals or any(True for _ in new):
        raise ValueError("the numbers of residuals of fwd and bwd differ")
    cotangents = [aval.to_ct_aval() for aval in results]
    wanted = [aval.to_ct_aval() for aval in _nonzero(primals, rule.in_zeros)]
    _fit("fwd takes", _types(fwd.invars), primals, _alike)
    _fit("fwd returns", gives[len(gives) - len(results) :], results, _alike)
    _fit("bwd takes", _types(bwd.invars), [*residuals, *cotangents], _alike)
    _fit("bwd returns", _types(bwd.outvars), wanted, _alike)


#: Functions that raise ValueError if the rules of a custom derivative do not fit the equation.
RULE_CHECKS: dict[str, Callable[[JaxprEqn], None]] = {
    "custom_jvp_call": _check_jvp,
    "custom_vjp_call": _check_vjp,
}


def _types(atoms: Sequence[Atom]) -> list[Aval]:
    return [atom.aval for atom in atoms]


def _primals(eqn: JaxprEqn) -> list[Aval]:
    return _types(eqn.invars[eqn.params["num_consts"] :])


def _nonzero(avals: Sequence[Aval], zeros: Sequence[bool]) -> list[Aval]:
    return [aval for aval, zero in zip(avals, zeros, strict=True) if not zero]


def _fit(
    what: str,
    avals: Sequence[Aval],
    wanted: Sequence[Aval],
    fits: Callable[[Aval, Aval], bool] = jaxcompat.fits,
) -> None:
    if len(avals) != len(wanted):
        raise ValueError(f"{what} {len(avals)} values, not {len(wanted)}")
    for aval, other in zip(avals, wanted, strict=True):
        if not fits(aval, other):
            raise ValueError(f"{what} {type_of(aval)}, not {type_of(other)}")


def _alike(aval: Aval, other: Aval) -> bool:
    """Return True if dtypes and shapes match; other parts may differ in a derivative."""
    return all(getattr(aval, k, None) == getattr(other, k, None) for k in ("shape", "dtype"))
