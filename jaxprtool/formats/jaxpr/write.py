"""Writing of Programs to `.jaxpr` files: a header, and the listing in exact notation.

All parameters without default values are written; constants and literals are exact to the bit; the
rules of custom derivatives are jaxprs; and all equations have the same form, including those that
JAX prints in a special form.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.files import check_path, is_stream
from jaxprtool.formats.jaxpr import constants, params, values
from jaxprtool.formats.jaxpr.constants import ConstantWriter
from jaxprtool.formats.jaxpr.header import LocationComments, header_text
from jaxprtool.formats.jaxpr.params import OPAQUE, encode_opaque
from jaxprtool.formats.jaxpr.syntax import MAX_DEPTH, VERSION
from jaxprtool.formats.jaxpr.values import NO_MESH, Encoder, TypeWriter, Unwritable
from jaxprtool.ir import source_text
from jaxprtool.ir.array_files import ProgramText, constants_file, write_texts
from jaxprtool.ir.custom_rules import BATCHING_HINT, HINT, are_stubs, rules_followed, stubbed
from jaxprtool.ir.equations import bodies, equations, inner_jaxprs, named
from jaxprtool.ir.expansions import without_live_objects
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation import LiteralToken, ParameterToken, PrimitiveName, Type
from jaxprtool.ir.notation.layout import Layout, Selection
from jaxprtool.ir.notation.signatures import Notation, Pieces, Signature, Value, VariableNames
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, require_program
from jaxprtool.ir.rules import missing_plugin
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    context_settings,
)
from jaxprtool.jaxcompat.jaxprs import identity

# --- notation -------------------------------------------------------------------------------------
# The notation of a `.jaxpr` file: JAX's own, plus everything that JAX's leaves out.

#: Encloses the position of a jaxpr in the text of a value.
_MARK = "\0"

NOT_WRITABLE = "cannot be written to a file"

_PRIMITIVE = re.compile(r"[^\W\d][\w.-]*")


class OpaqueEquations(Enum):
    """Which equations are written as opaque ones: see `jaxcompat.opaque`.

    Attributes:
        none: None. An equation that cannot be written is refused.
        unwritable: Those that cannot be written, and those of JAX's kernel languages.
        foreign: These, and all whose primitives `import jax` does not define.
    """

    none = "none"
    unwritable = "unwritable"
    foreign = "foreign"

    def includes(self, module: str | None) -> bool:
        """Return True for every equation of a primitive that this module defines."""
        if module is None or self is OpaqueEquations.none:
            return False
        return self is OpaqueEquations.foreign or module.startswith("jax.")


class FileVariableNames(VariableNames):
    """Names that are unique per variable of a jaxpr and distinct from numbers.

    JAX names all unused results of a jit `_`, and in large jaxprs uses `inf` and `nan` as names.
    """

    def __init__(self, root: Jaxpr, taken: set[str]):
        super().__init__(root, {*taken, "inf", "nan"})

    def __setitem__(self, var: Var, name: str) -> None:
        if name != "_":
            super().__setitem__(var, name)


class FileNotation(Notation):
    """The notation of a file being written, and the data it collects for the header.

    `quoted` are words that need quotes because they are names of jaxprs; `words` are all words
    written without quotes. With `stubs`, callbacks are written as stubs. `opaque` says which
    equations are written as opaque ones; `reasons` has the reason of each that cannot be rebuilt,
    and `modules` the module of each primitive of another package.
    """

    variable_names = FileVariableNames

    def __init__(
        self,
        inline: bool,
        quoted: Iterable[str] = (),
        stubs: bool = False,
        opaque: OpaqueEquations = OpaqueEquations.none,
    ):
        super().__init__()
        self._stubs, self._opaque = stubs, opaque
        self.types = TypeWriter(opaque is not OpaqueEquations.none)
        self.reasons: list[tuple[JaxprEqn, str]] = []
        self.modules: dict[str, str] = {}
        self._bodies_of_opaque: set[Jaxpr] = set()
        #: Whether the jaxpr that is being written is such a body.
        self._in_opaque = False
        self.constants = ConstantWriter(inline)
        self.quoted = frozenset(quoted)
        self.words: set[str] = set()
        #: The mesh in which equations outside of `shard_map`s are traced.
        self.usual_mesh = NO_MESH
        self._consts: dict[Jaxpr, Sequence[object]] = {}
        self._meshes: dict[int, AbstractMesh] = {}
        self._special: dict[type, Callable[[Any], str]] = {
            jax.core.ShapedArray: self._aval,
            jaxcompat.AbstractRef: self._aval,
            jaxcompat.AbstractToken: self._aval,
            jaxcompat.SymbolicDimension: lambda size: f"dim({self.types.dimension(size)!r})",
        }

    def _aval(self, aval: Aval) -> str:
        return f"aval({self.types(aval)!r})"

    # --- types, literals, constants ---------------------------------------------------------------

    def type_of(self, aval: Aval) -> Type:
        token = self._types.get(identity(aval))
        if token is None:
            token = self._types[identity(aval)] = Type(self._noted(f":{self.types(aval)}"))
        return token

    def literal(self, literal: Literal) -> LiteralToken:
        text = constants.literal_text(literal.val, literal.aval)
        return LiteralToken(f" {text}{self.type_of(literal.aval)}")

    def constant_values(self, jaxpr: Jaxpr) -> Sequence[str]:
        consts = jaxpr.consts if jaxcompat.ONE_JAXPR_CLASS else self._consts.get(jaxpr, ())
        if len(consts) != len(jaxpr.constvars):
            raise Unwritable("a jaxpr whose constants have no values")
        pairs = zip(consts, jaxpr.constvars, strict=True)
        return [f"={self.constants.constant(value, var.aval)}" for value, var in pairs]

    # --- equations --------------------------------------------------------------------------------

    def signatures(self, jaxpr: Jaxpr) -> list[Signature]:
        outer, self._in_opaque = self._in_opaque, jaxpr in self._bodies_of_opaque
        signatures = super().signatures(jaxpr)
        self._in_opaque = outer
        return signatures

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key of an equation's context, the mesh of its types, and if it has results."""
        atoms = eqn.outvars or eqn.invars
        mesh = self._meshes.get(identity(atoms[0].aval)) if atoms else self.usual_mesh
        if mesh is None:
            mesh = params.implied_mesh([atoms[0].aval], (), self.usual_mesh)
            self._meshes[identity(atoms[0].aval)] = mesh
        key = identity(eqn.primitive), identity(eqn.ctx), identity(mesh), bool(eqn.outvars)
        if eqn.effects and self._opaque is not OpaqueEquations.none:
            return key, jaxcompat.effect_texts(eqn)
        return key

    def _make(self, eqn: JaxprEqn) -> Signature:
        if type(eqn.params.get("_prim")) not in jaxcompat.HIGH_PRIMITIVES:
            eqn = without_live_objects(eqn)
        eqn = stubbed(eqn) if self._stubs else eqn
        name = params.stable_primitive_name(eqn)
        module = jaxcompat.defining_module(eqn.primitive)
        if module is not None and not module.startswith("jax."):
            self.modules[name] = module
        try:
            if jaxcompat.is_opaque(eqn):
                pairs = self._opaque_pairs(eqn)
            else:
                pairs = self._pairs(eqn, name, self._opaque.includes(module))
        except UnsupportedError as error:
            if self._opaque is OpaqueEquations.none or error.hint in (HINT, BATCHING_HINT):
                raise
            if not self._in_opaque:
                reason = error.message.partition(f"{NOT_WRITABLE}: ")[2] or error.message
                self.reasons.append((eqn, reason))
            pairs = self._opaque_pairs(eqn)
        # Without results and brackets, this would be read as an operand of the previous equation.
        primitive = PrimitiveName(self._noted(name if pairs or eqn.outvars else f"{name}[]"))
        call_name = eqn.params.get("name")
        called = tuple(body for _, value in pairs for body in _bodies(value, call_name))
        return Signature(primitive, pairs, called, named_by_call=name == "jit")

    def _settings(self, eqn: JaxprEqn, is_opaque: bool) -> dict[str, Any]:
        operands, results = ([v.aval for v in atoms] for atoms in (eqn.invars, eqn.outvars))
        mesh = params.implied_mesh(operands, results, self.usual_mesh)
        settings = {f"@{k}": v for k, v in params.encode_context(eqn.ctx, mesh).items()}
        return {f"@{OPAQUE}": jaxcompat.effect_texts(eqn), **settings} if is_opaque else settings

    def _pairs(
        self, eqn: JaxprEqn, name: str, is_opaque: bool
    ) -> list[tuple[ParameterToken, Value]]:
        """Return the settings and parameters of an equation, with their texts and jaxprs."""
        parameter, pairs = "", []
        try:
            if not _PRIMITIVE.fullmatch(name):
                raise Unwritable("a name that is not a word")
            settings = self._settings(eqn, is_opaque)
            for parameter, value in {**settings, **params.encode_params(eqn)}.items():
                token = ParameterToken(self._noted(f"{parameter}="))
                pairs.append((token, self._encoded(name, parameter, value)))
        except Unwritable as error:
            raise unwritable_equation(eqn, error, parameter) from error
        return pairs

    def _opaque_pairs(self, eqn: JaxprEqn) -> list[tuple[ParameterToken, Value]]:
        """Return what `_pairs` does for an opaque equation, from which no value is left out."""
        if not _PRIMITIVE.fullmatch(eqn.primitive.name):
            raise unwritable_equation(eqn, Unwritable("a name that is not a word"))
        shown = {**self._settings(eqn, True), **dict(sorted(eqn.params.items()))}
        outer, self._in_opaque = self._in_opaque, True
        pairs = [
            (ParameterToken(self._noted(f"{k}=")), self._text(v, k == "name", encode_opaque))
            for k, v in shown.items()
        ]
        self._in_opaque = outer
        return pairs

    # --- values -----------------------------------------------------------------------------------

    def _encoded(self, primitive: str, parameter: str, value: Any) -> Value:
        """Return a parameter's value as text, or as jaxprs with text around them."""
        if isinstance(value, params.NamedRule):
            return _RulePieces((f"{self._text(value.name, True)} ", self.hold(value.jaxpr)))
        if isinstance(value, Jaxpr | ClosedJaxpr):
            if isinstance(value, ClosedJaxpr) or params.is_open_body(primitive, parameter):
                return self.hold(value)
        elif type(value) is tuple and value and all(isinstance(v, ClosedJaxpr) for v in value):
            return tuple(map(self.hold, value))
        return self._text(value, parameter == "name")

    def _text(self, value: Any, is_name: bool = False, opaque: Encoder | None = None) -> Value:
        marked: list[Jaxpr] = []

        def mark(jaxpr: AnyJaxpr) -> str:
            if opaque is not None and not _has_constants(jaxpr):
                jaxpr = jaxcompat.consts_as_arguments(jaxpr)
            marked.append(self.hold(jaxpr))
            text = f"{_MARK}{len(marked) - 1}{_MARK}"
            return text if isinstance(jaxpr, ClosedJaxpr) else f"open({text})"

        text = values.encode(value, {**self._special, ClosedJaxpr: mark, Jaxpr: mark}, opaque)
        if type(value) is str and text == value and not is_name:
            self.words.add(value)
            text = repr(value) if value in self.quoted else text
        if _MARK not in text:
            return self._noted(text)
        texts = text.split(_MARK)  # every second one is the position of a jaxpr
        pieces = [marked[int(t)] if i % 2 else self._noted(t) for i, t in enumerate(texts)]
        return Pieces(piece for piece in pieces if piece)

    def hold(self, jaxpr: AnyJaxpr) -> Jaxpr:
        """Return the open jaxpr of a closed one in the program, and record its constants."""
        body = jaxcompat.open_jaxpr(jaxpr)
        if self._in_opaque:
            self._bodies_of_opaque.add(body)
        consts = getattr(jaxpr, "consts", ())
        if any(isinstance(const, jax.core.Tracer) for const in consts):
            raise Unwritable("a traced value, which its function closes over")
        first = self._consts.setdefault(body, consts)
        if len(first) != len(consts) or any(a is not b for a, b in zip(first, consts, strict=True)):
            raise Unwritable("one jaxpr with different constants in two places")
        return body


def _has_constants(jaxpr: AnyJaxpr) -> bool:
    """Return False if the constants of a jaxpr are the operands of its equation."""
    consts = getattr(jaxpr, "consts", ())
    is_traced = any(isinstance(const, jax.core.Tracer) for const in consts)
    return len(consts) == len(jaxcompat.open_jaxpr(jaxpr).constvars) and not is_traced


class _RulePieces(Pieces):
    """The name of a rule's function, and the rule."""


def _bodies(value: Value, name: object) -> list[tuple[str | None, Jaxpr]]:
    """Return the jaxprs of a value, each with its name in case it is written separately."""
    if isinstance(value, str):
        return []
    if isinstance(value, _RulePieces):
        return [(as_word(value[0].strip(" '\"")), value[1])]
    bodies = (value,) if isinstance(value, Jaxpr) else value
    word = as_word(name) if isinstance(name, str) else None
    return [(word, body) for body in bodies if isinstance(body, Jaxpr)]


def as_word(name: str) -> str:
    """Return a valid name similar to this one for a jaxpr that is written separately."""
    word = re.sub(r"\W", "_", name.strip("<>"), flags=re.ASCII) or "_"
    word = f"_{word}" if word[0].isdecimal() else word
    while (
        keyword.iskeyword(word)
        or word in values.NAMES
        or word in values.CONSTRUCTORS
        or word == "_"
    ):
        word += "_"
    return word


def unwritable_equation(eqn: JaxprEqn, fault: Exception, parameter: str = "") -> UnsupportedError:
    """Return the error for an equation that cannot be written, with its source line."""
    holder = f"its parameter {parameter}" if parameter else "it"
    name = eqn.primitive.name
    hint = HINT if traits(name).callback else missing_plugin(name)
    hint = BATCHING_HINT if name == "custom_vmap_call" else hint
    message = f"{named(eqn)} {NOT_WRITABLE}: {holder} holds {fault}"
    return UnsupportedError(message, hint)


# --- write ----------------------------------------------------------------------------------------
# Writing of Programs to `.jaxpr` files: a header, and the listing in exact notation.
#
#     jaxprtool 2
#     jax = '0.10.2'
#     name = 'loss'
#     arguments = (({'b': "params['b']", 'w': "params['w']"}, 'x'), {})
#     results = 'result'
#     files = {'layers.py': 'net/layers.py'}
#
#     { lambda a:f32[3]=[1.0, 2.0, 3.0]; b:f32[4] c:f32[3,4] d:f32[8,3]. let
#         e:f32[8,4] = dot_general[...] d c         # layers.py:12:8 (loss) in layer/dense
#       in (e,) }
#
# The first line has the version of the format. The next entries are the JAX release that wrote it,
# the program's name, and the structures of arguments and results with each value's name in its
# place. Optional entries: `constants`, the name of the file with the large constants; `axis_env`,
# the free named axes with their sizes; `bounds`, the largest values of arguments that are sizes,
# and the largest sums of lengths; `jit`, the options of `jax.jit`; `mesh`, the mesh in which the
# program is traced; `meshes`, by their names in types; `symbols`, the constraints on symbolic
# dimensions; `foreign`, the dtypes and memory spaces that JAX does not have; `modules`, those of
# primitives that `import jax` does not define; `files`, by their names in comments; `digests`, of
# the user's files.

#: The width of a listing in a pipe.
WIDTH = 80


def write(
    program: Program,
    path: str | os.PathLike[str],
    *,
    callbacks: str = "refuse",
    source: bool = True,
) -> None:
    """Write a program to a file, and its large constants to an `.npz` file next to it.

    The constants are part of the text if it goes to a device or a pipe. An existing program is
    replaced atomically with its constants: concurrent readers get the old or the new one.

    Args:
        program: The program to write.
        path: The file to write.
        callbacks: How to handle Python functions that the program calls: "refuse" raises an error,
            "stub" writes each as a stub of the same type that raises when called.
        source: Whether comments include source locations. Name scopes are always written.

    Raises:
        UnsupportedError: With the equation and its source line, if the program contains Python
            functions or other live objects.
        OutputError: If a file cannot be written.
    """
    require_program(program)
    write_program_files([(program, path)], callbacks, source)


def write_program_files(
    programs: Iterable[tuple[Program, str | os.PathLike[str]]],
    callbacks: str = "refuse",
    source: bool = True,
    opaque: OpaqueEquations = OpaqueEquations.none,
) -> list[str]:
    """Write programs with `write`: all of them, or none if one cannot be written.

    Args:
        programs: The programs, each with its file.
        callbacks: As for `write`.
        source: As for `write`.
        opaque: The equations that are written as opaque ones.

    Returns:
        For each equation that is opaque because it cannot be written, the reason.
    """
    texts, stubs = [], are_stubs(callbacks)
    reasons: dict[str, None] = {}
    for program, path in programs:
        name = check_path(path)
        beside = None if is_stream(name) else name
        content, arrays, opaque_here = _rendered(program, beside, stubs, source, opaque)
        texts.append(ProgramText(name, content, arrays))
        reasons |= opaque_here
    write_texts(texts)
    return [*reasons]


def program_file_text(program: Program, callbacks: str = "refuse", source: bool = True) -> str:
    """Return a program as the text of a file without a constants file. Raises UnsupportedError."""
    return _rendered(program, None, are_stubs(callbacks), source)[0]


def text_with_opaque(
    program: Program, callbacks: str, source: bool, opaque: OpaqueEquations
) -> tuple[str, list[str]]:
    """Return the text of `program_file_text` with opaque equations, and the reasons for these."""
    content, _, reasons = _rendered(program, None, are_stubs(callbacks), source, opaque)
    return content, [*reasons]


def rendered(
    program: Program,
    beside: str,
    stubs: bool = False,
    opaque: OpaqueEquations = OpaqueEquations.none,
    digest_of: Callable[[str], str] = source_text.source_digest,
) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of a program's file, and the arrays of its constants file by digest.

    Args:
        program: The program.
        beside: The name that the constants file begins with, as `constants_file` makes it.
        stubs: Whether Python functions are written as stubs of the same type.
        opaque: The equations that are written as opaque ones.
        digest_of: Returns the digest of the text of a file when it ran; "" if it is not known.

    Raises:
        UnsupportedError: As for `write`.
    """
    return _rendered(program, beside, stubs, opaque=opaque, digest_of=digest_of)[:2]


def require_writable(program: Program, callbacks: str = "refuse") -> None:
    """Raise UnsupportedError for a program that cannot be written to a file."""
    _rendered(program, "", are_stubs(callbacks), opaque=OpaqueEquations.unwritable)


@rules_followed()
@without_collector()
def _rendered(
    program: Program,
    path: str | None,
    stubs: bool,
    source: bool = True,
    opaque: OpaqueEquations = OpaqueEquations.none,
    digest_of: Callable[[str], str] = source_text.source_digest,
    quoted: frozenset[str] = frozenset(),
) -> tuple[str, dict[str, np.ndarray], dict[str, None]]:
    """Return the text of a program's file, and its stored arrays: none without a path.

    The last value has the reasons why equations are opaque.
    """
    _require_shallow(program)
    notation = FileNotation(path is None, quoted, stubs, opaque)
    try:
        root = notation.hold(program.jaxpr)
        if root.eqns:
            notation.usual_mesh = context_settings(root.eqns[0].ctx)["cur_abstract_mesh"]
        layout = Layout(root, WIDTH, True, Selection(), None, notation)
        # A word without quotes is read as a text unless it is the name of a jaxpr.
        clashes = notation.words.intersection(layout.shared.values()) - quoted
        if clashes:
            return _rendered(program, path, stubs, source, opaque, digest_of, frozenset(clashes))
        comments = LocationComments(root, layout.names, source, program.roots)
        layout.comment = comments.comment
        body = "".join(layout.tokens())
        arrays = notation.constants.stored
        beside = constants_file(path, arrays) if path and arrays else None
        tables = {
            "foreign": notation.types.foreign,
            "modules": notation.modules,
            "files": comments.files,
            "digests": comments.digests(digest_of),
            "stacks": comments.stacks,
        }
        header = header_text(program, beside, tables, notation.types, notation.usual_mesh)
    except Unwritable as error:
        culprit = _culprit(jaxcompat.open_jaxpr(program.jaxpr), notation)
        message = f"{program.name} cannot be written to a file: it holds {error}"
        raise culprit or UnsupportedError(message) from error
    reasons = _reasons(root, notation.reasons)
    return f"jaxprtool {VERSION}\n{header}\n{body}\n", arrays, reasons


def _reasons(root: Jaxpr, opaque: Sequence[tuple[JaxprEqn, str]]) -> dict[str, None]:
    """Return messages that name equations by the user's lines, from equations with reasons."""
    if not opaque:
        return {}
    around = {id(eqn): outer for outer, eqn in _nested(root)}
    return {
        f"{frames_now().named([*around.get(id(eqn), ()), eqn])} is opaque in the file, which "
        f"cannot be run: {reason}": None
        for eqn, reason in opaque
    }


def _nested(root: Jaxpr) -> Iterator[tuple[tuple[JaxprEqn, ...], JaxprEqn]]:
    """Yield each equation, those of a shared body once, after the equations around it."""
    seen = {root}
    stack: list[tuple[tuple[JaxprEqn, ...], Jaxpr]] = [((), root)]
    while stack:
        outer, jaxpr = stack.pop()
        for eqn in jaxpr.eqns:
            yield outer, eqn
            for _, body in bodies(eqn):
                if body not in seen:
                    seen.add(body)
                    stack.append(((*outer, eqn), body))


def _require_shallow(program: Program) -> None:
    """Raise UnsupportedError if jaxprs are nested more deeply than a reader accepts."""
    level, depth = [jaxcompat.open_jaxpr(program.jaxpr)], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            message = (
                f"{program.name} cannot be written to a file: its jaxprs are nested more than "
                f"{MAX_DEPTH} "
            )
            raise UnsupportedError(f"{message}deep", "inline calls with -p inline")
        level = [*dict.fromkeys(body for jaxpr in level for body in inner_jaxprs(jaxpr))]


def _culprit(jaxpr: Jaxpr, notation: FileNotation) -> UnsupportedError | None:
    """Return the error for the first equation whose types cannot be written."""
    for eqn in equations(jaxpr):
        try:
            for atom in (*eqn.invars, *eqn.outvars):
                notation.type_of(atom.aval)
        except Unwritable as error:
            return unwritable_equation(eqn, error)
    return None
