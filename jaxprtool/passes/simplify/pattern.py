"""Patterns and replacements as text, `add(x, neg(y))` and `sub(x, y)`, and how they are matched.

    pattern     := PRIMITIVE ( operand, … )          an equation of that primitive
    operand     := x | C | *xs | number | pattern

A lower-case letter stands for any value, the same one wherever it is written twice. A capital
stands for a constant: a literal, or a scalar among the body's constants. A number stands for that
constant: `0` is +0 and not -0, which is written `-0`; `~0` has all bits set. `*xs` stands for all
operands that are left. A primitive may be several, `reshape|squeeze(x)`, or one of `CLASSES`. The
operands of a commutative primitive are tried in both orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from jaxprtool.ir.writer import Writer
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal

COMMUTATIVE = frozenset("add add_any mul max min and or xor eq ne".split())

#: What a pattern may call primitives of a kind. Those of `elementwise2` broadcast dimensions of
#: size 1, and scalars, by themselves; those of `unary` compute each element from one operand.
CLASSES: dict[str, frozenset[str]] = {
    "elementwise2": frozenset(
        "add and atan2 complex div eq ge gt le lt max min mul ne nextafter or pow rem "
        "shift_left shift_right_arithmetic shift_right_logical sub xor".split()
    ),
    "unary": frozenset(
        "abs cbrt ceil conj convert_element_type cos cosh erf erf_inv erfc exp exp2 expm1 floor "
        "imag integer_pow is_finite log log1p logistic neg not real round rsqrt sign sin sinh "
        "sqrt square tan tanh".split()
    ),
}

_TOKEN = re.compile(
    r"\s*(\*?[A-Za-z_][\w-]*(?:\|[A-Za-z_][\w-]*)*|-C|-D|-?inf|[~-]?\d+(?:\.\d+)?|[(),])"
)


@dataclass(frozen=True)
class Name:
    """Any value (`x`), any constant (`C`), a constant negated (`-C`), or all that is left (`*xs`)."""

    text: str

    @property
    def is_constant(self) -> bool:
        return self.text.isupper()

    @property
    def is_rest(self) -> bool:
        return self.text.startswith("*")


@dataclass(frozen=True)
class Number:
    """A constant of this value, with the sign of its zero; `~0` has all bits set."""

    text: str

    def is_value(self, atom: Atom, writer: Writer) -> bool:
        # Most constants are Python numbers, and are told apart before an array is made of them.
        known = writer.value(atom)
        if isinstance(known, float | int) and self.text != "~0" and known != float(self.text):
            return False
        value = scalar_value(atom, writer)
        if value is None:
            return False
        kind = value.dtype.kind
        if self.text == "~0":
            return bool(kind in "biu" and (value if kind == "b" else ~value == 0))
        if not value == float(self.text):
            return False
        if value != 0 or kind in "biu":
            return True
        parts = value.astype(np.complex128) if kind == "c" else value.astype(np.float64)
        negative = np.signbit(parts.real) or np.signbit(parts.imag)
        return bool(negative == self.text.startswith("-"))


@dataclass(frozen=True)
class Call:
    """An equation of one of these primitives."""

    primitives: frozenset[str]
    operands: tuple[Node, ...]
    text: str


Node = Name | Number | Call


def scalar_value(atom: Atom, writer: Writer) -> np.ndarray | None:
    """The value of a scalar constant, in its dtype; None for all else, keys among them."""
    value = writer.value(atom)
    if value is None or atom.aval.shape != ():
        return None
    try:
        return np.asarray(value, dtype=atom.aval.dtype)
    except TypeError:
        return None


@cache
def parsed(text: str) -> Node:
    """The tree of a pattern or a replacement. Raises ValueError if it is malformed."""
    tokens = [m.group(1) for m in _TOKEN.finditer(text)]
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise ValueError(f"cannot read the pattern {text!r}")
    tokens.append("")
    node, position = _node(tokens, 0)
    if tokens[position]:
        raise ValueError(f"cannot read the pattern {text!r}: what is {tokens[position]!r}?")
    return node


def _node(tokens: Sequence[str], at: int) -> tuple[Node, int]:
    token = tokens[at]
    if token in ("", "(", ")", ","):
        raise ValueError(f"a pattern wants an operand, not {token!r}")
    if tokens[at + 1] != "(":
        is_number = token.lstrip("~-")[:1].isdigit() or token.endswith("inf")
        return (Number if is_number else Name)(token), at + 1
    at, operands = at + 2, []
    while tokens[at] != ")":
        operand, at = _node(tokens, at)
        operands.append(operand)
        if tokens[at] == ",":
            at += 1
        elif tokens[at] != ")":
            raise ValueError("a pattern lacks a closing parenthesis")
    names = frozenset(n for part in token.split("|") for n in CLASSES.get(part, (part,)))
    return Call(names, tuple(operands), token), at + 1


class Match:
    """Where a pattern has matched: the values of its names, and its equations, outermost first."""

    __slots__ = ("eqns", "names", "writer")

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.eqns: list[JaxprEqn] = []
        self.names: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    @property
    def eqn(self) -> JaxprEqn:
        """The equation to be replaced."""
        return self.eqns[0]

    @property
    def inner(self) -> JaxprEqn:
        """The equation that defines its operand, or the first of those."""
        return self.eqns[1]

    @property
    def out(self) -> Any:
        """The type of the result."""
        return self.eqns[0].outvars[0].aval

    def aval(self, name: str) -> Any:
        return self.names[name].aval

    def value(self, name: str) -> np.ndarray:
        """The value of a constant, in its dtype."""
        value = scalar_value(self.names[name], self.writer)
        assert value is not None, name
        return value

    def matches(self, pattern: Call, eqn: JaxprEqn) -> bool:
        """Whether the pattern fits an equation; binds the names if it does."""
        for operands in _orders(pattern, eqn):
            eqns, names = len(self.eqns), dict(self.names)
            self.eqns.append(eqn)
            if self._operands(pattern.operands, operands):
                return True
            del self.eqns[eqns:]
            self.names = names
        return False

    def _operands(self, nodes: Sequence[Node], atoms: Sequence[Atom]) -> bool:
        if nodes and isinstance(last := nodes[-1], Name) and last.is_rest:
            if len(atoms) < len(nodes) - 1:
                return False
            self.names[last.text[1:]] = tuple(atoms[len(nodes) - 1 :])
            nodes, atoms = nodes[:-1], atoms[: len(nodes) - 1]
        return len(nodes) == len(atoms) and all(map(self._operand, nodes, atoms))

    def _operand(self, node: Node, atom: Atom) -> bool:
        if isinstance(node, Call):
            eqn = None if type(atom) is Literal else self.writer.definition.get(atom)
            return (
                eqn is not None
                and eqn.primitive.name in node.primitives
                and len(eqn.outvars) == 1
                and self.matches(node, eqn)
            )
        if isinstance(node, Number):
            return node.is_value(atom, self.writer)
        if node.is_constant and scalar_value(atom, self.writer) is None:
            return False
        return self.names.setdefault(node.text, atom) is atom


def _orders(pattern: Call, eqn: JaxprEqn) -> Iterator[Sequence[Atom]]:
    operands = eqn.invars
    yield operands
    if len(operands) == 2 and eqn.primitive.name in COMMUTATIVE:
        yield operands[::-1]
