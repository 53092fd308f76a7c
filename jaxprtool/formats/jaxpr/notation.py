"""The notation of a `.jaxpr` file: JAX's own, plus everything that JAX's leaves out.

All parameters without default values are written; constants and literals are exact to the bit; the
rules of custom derivatives are jaxprs; and all equations have the same form, including those that
JAX prints in a special form.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr import constants, params, values
from jaxprtool.formats.jaxpr.constants import ConstantWriter
from jaxprtool.formats.jaxpr.opaque import OPAQUE, encode_opaque
from jaxprtool.formats.jaxpr.types import NO_MESH, TypeWriter
from jaxprtool.formats.jaxpr.values import Encoder, Unwritable
from jaxprtool.ir.basics.plugins import missing_plugin
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.notation.names import VariableNames
from jaxprtool.ir.notation.signatures import Notation, Pieces, Signature, Value
from jaxprtool.ir.notation.tokens import LiteralToken, ParameterToken, PrimitiveName, Type
from jaxprtool.ir.rewriting.callbacks import BATCHING_HINT, HINT, stubbed
from jaxprtool.ir.rewriting.high import without_live_objects
from jaxprtool.jaxcompat import AnyJaxpr, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: Encloses the position of a jaxpr in the text of a value.
_MARK = "\0"

NOT_WRITABLE = "cannot be written to a file"

_PRIMITIVE = re.compile(r"[^\W\d][\w.-]*")


class Opaque(Enum):
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
        if module is None or self is Opaque.none:
            return False
        return self is Opaque.foreign or module.startswith("jax.")


class Names(VariableNames):
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

    variable_names = Names

    def __init__(
        self,
        inline: bool,
        quoted: Iterable[str] = (),
        stubs: bool = False,
        opaque: Opaque = Opaque.none,
    ):
        super().__init__()
        self._stubs, self._opaque = stubs, opaque
        self.types = TypeWriter(opaque is not Opaque.none)
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
        text = constants.literal(literal.val, literal.aval)
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
        found = super().signatures(jaxpr)
        self._in_opaque = outer
        return found

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key of an equation's context, the mesh of its types, and if it has results."""
        atoms = eqn.outvars or eqn.invars
        if eqn.effects and self._opaque is not Opaque.none:
            return self._context_key(eqn, atoms), jaxcompat.effect_texts(eqn)
        return self._context_key(eqn, atoms)

    def _context_key(self, eqn: JaxprEqn, atoms: Sequence[Any]) -> tuple[Hashable, ...]:
        if not atoms:
            return identity(eqn.primitive), identity(eqn.ctx), -1
        mesh = self._meshes.get(identity(atoms[0].aval))
        if mesh is None:
            avals = [atom.aval for atom in atoms]
            mesh = self._meshes[identity(avals[0])] = params.implied_mesh(
                avals, (), self.usual_mesh
            )
        return identity(eqn.primitive), identity(eqn.ctx), identity(mesh), bool(eqn.outvars)

    def _make(self, eqn: JaxprEqn) -> Signature:
        if type(eqn.params.get("_prim")) not in jaxcompat.HIGH_PRIMITIVES:
            eqn = without_live_objects(eqn)
        eqn = stubbed(eqn) if self._stubs else eqn
        name = params.primitive_name(eqn)
        module = jaxcompat.defining_module(eqn.primitive)
        if module is not None and not module.startswith("jax."):
            self.modules[name] = module
        try:
            if jaxcompat.is_opaque(eqn):
                pairs = self._opaque_pairs(eqn)
            else:
                pairs = self._pairs(eqn, name, self._opaque.includes(module))
        except UnsupportedError as error:
            if self._opaque is Opaque.none or error.hint in (HINT, BATCHING_HINT):
                raise
            if not self._in_opaque:
                reason = error.message.partition(f"{NOT_WRITABLE}: ")[2] or error.message
                self.reasons.append((eqn, reason))
            pairs = self._opaque_pairs(eqn)
        # Without results and brackets, this would be read as an operand of the previous equation.
        primitive = PrimitiveName(self._noted(name if pairs or eqn.outvars else f"{name}[]"))
        given = eqn.params.get("name")
        called = tuple(found for _, value in pairs for found in _bodies(value, given))
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
            raise unsupported(eqn, error, parameter) from error
        return pairs

    def _opaque_pairs(self, eqn: JaxprEqn) -> list[tuple[ParameterToken, Value]]:
        """Return what `_pairs` does for an opaque equation, from which no value is left out."""
        if not _PRIMITIVE.fullmatch(eqn.primitive.name):
            raise unsupported(eqn, Unwritable("a name that is not a word"))
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
        known = self._consts.setdefault(body, consts)
        if len(known) != len(consts) or any(a is not b for a, b in zip(known, consts, strict=True)):
            raise Unwritable("one jaxpr with different constants in two places")
        return body


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


def unsupported(eqn: JaxprEqn, fault: Exception, parameter: str = "") -> UnsupportedError:
    """Return the error for an equation that cannot be written, with its source line."""
    holder = f"its parameter {parameter}" if parameter else "it"
    name = eqn.primitive.name
    hint = HINT if traits(name).callback else missing_plugin(name)
    hint = BATCHING_HINT if name == "custom_vmap_call" else hint
    message = f"{named(eqn)} {NOT_WRITABLE}: {holder} holds {fault}"
    return UnsupportedError(message, hint)
