"""The notation of a `.jaxpr` file: JAX's own, plus everything that JAX's leaves out.

All parameters without default values are written; constants and literals are exact to the bit; the
rules of custom derivatives are jaxprs; and all equations have the same form, including those that
JAX prints in a special form.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr import constants, params, values
from jaxprtool.formats.jaxpr.constants import ConstantWriter
from jaxprtool.formats.jaxpr.types import NO_MESH, TypeWriter
from jaxprtool.formats.jaxpr.values import Unwritable
from jaxprtool.ir.basics.plugins import missing_plugin
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.notation.names import VariableNames
from jaxprtool.ir.notation.signatures import Notation, Pieces, Signature, Value
from jaxprtool.ir.notation.tokens import LiteralToken, ParameterToken, PrimitiveName, Type
from jaxprtool.ir.rewriting.callbacks import BATCHING_HINT, HINT, stubbed
from jaxprtool.ir.rewriting.high import lower_hijax
from jaxprtool.jaxcompat import AnyJaxpr, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: Represents a jaxpr in the text of a value.
_MARK = "\0"

_PRIMITIVE = re.compile(r"[^\W\d][\w.-]*")


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
    written without quotes. With `stubs`, callbacks are written as stubs.
    """

    variable_names = Names

    def __init__(self, inline: bool, quoted: Iterable[str] = (), stubs: bool = False):
        super().__init__()
        self._stubs = stubs
        self.types = TypeWriter()
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

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key of an equation's context, the mesh of its types, and if it has results."""
        atoms = eqn.outvars or eqn.invars
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
        if eqn.primitive.name == jaxcompat.CALL_HIGH:
            written = type(eqn.params["_prim"]) in jaxcompat.HIGH_PRIMITIVES
            eqn = eqn if written else lower_hijax(eqn)
        eqn = stubbed(eqn) if self._stubs else eqn
        name, parameter = params.primitive_name(eqn), ""
        operands, results = ([v.aval for v in atoms] for atoms in (eqn.invars, eqn.outvars))
        try:
            if not _PRIMITIVE.fullmatch(name):
                raise Unwritable("a name that is not a word")
            mesh = params.implied_mesh(operands, results, self.usual_mesh)
            settings = params.encode_context(eqn.ctx, mesh)
            shown = {**{f"@{k}": v for k, v in settings.items()}, **params.encode_params(eqn)}
            pairs: list[tuple[ParameterToken, Value]] = []
            for parameter, value in shown.items():
                token = ParameterToken(self._noted(f"{parameter}="))
                pairs.append((token, self._encoded(name, parameter, value)))
        except Unwritable as error:
            raise unsupported(eqn, error, parameter) from error
        # Without results and brackets, this would be read as an operand of the previous equation.
        primitive = PrimitiveName(self._noted(name if pairs or results else f"{name}[]"))
        given = eqn.params.get("name")
        called = tuple(found for _, value in pairs for found in _bodies(value, given))
        return Signature(primitive, pairs, called, named_by_call=name == "jit")

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

    def _text(self, value: Any, is_name: bool = False) -> Value:
        bodies: list[Jaxpr] = []

        def mark(jaxpr: AnyJaxpr) -> str:
            bodies.append(self.hold(jaxpr))
            return _MARK if isinstance(jaxpr, ClosedJaxpr) else f"open({_MARK})"

        text = values.encode(value, {**self._special, ClosedJaxpr: mark, Jaxpr: mark})
        if type(value) is str and text == value and not is_name:
            self.words.add(value)
            text = repr(value) if value in self.quoted else text
        if not bodies:
            return self._noted(text)
        first, *rest = map(self._noted, text.split(_MARK))
        pieces: list[str | Jaxpr] = [first]
        for body, after in zip(bodies, rest, strict=True):
            pieces += body, after
        return Pieces(piece for piece in pieces if piece)

    def hold(self, jaxpr: AnyJaxpr) -> Jaxpr:
        """Return the open jaxpr of a closed one in the program, and record its constants."""
        body = jaxcompat.open_jaxpr(jaxpr)
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
    message = f"{named(eqn)} cannot be written to a file: {holder} holds {fault}"
    return UnsupportedError(message, hint)
