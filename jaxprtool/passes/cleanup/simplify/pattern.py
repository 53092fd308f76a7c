"""Patterns and replacements as text, `add(x, neg(y))` and `sub(x, y)`, and how they are matched.

    pattern     := PRIMITIVE ( operand, … )                an equation of that primitive
                 | PRIMITIVE [ option, … ] ( operand, … )  also with these options
    operand     := x | C | *xs | number | pattern

A lower-case letter represents any value, the same one wherever it is repeated. A capital represents
a constant: a literal, or a scalar among the body's constants. A number represents that constant:
`0` is +0 and not -0, which is written `-0`; `~0` has all bits set. `*xs` represents all remaining
operands. A primitive may be several, `add|add_any(x, y)`, or one of `CLASSES`. The operands of a
commutative primitive are tried in both orders.

An equation with an option that is not at its default, such as `out_dtype` of `mul` or `reverse` of
`cumsum`, matches only if the pattern names the option: `cumsum[reverse](x)`. Which parameters are
options is in the table of traits (`ir.core.traits`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from jaxprtool.ir.core.traits import options, primitives_with, traits
from jaxprtool.ir.rewriting.rewrite import Writer
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Literal, Var, open_jaxpr

#: The names of classes of primitives in patterns.
CLASSES: dict[str, tuple[str, ...]] = {
    "elementwise2": primitives_with(lambda t: t.broadcasts),
    "ordered2": primitives_with(lambda t: t.broadcasts and not t.commutative),
    "unary": primitives_with(lambda t: t.shape_exact and not t.broadcasts),
    "resize": ("reshape", "squeeze"),
    "layout": ("reshape", "squeeze", "broadcast_in_dim"),
}

_TOKEN = re.compile(
    r"\s*(\*?[A-Za-z_][\w-]*(?:\|[A-Za-z_][\w-]*)*(?:\[[\w, ]+\])?|-C|-D|-?inf"
    r"|[~-]?\d+(?:\.\d+)?|[(),])"
)


@dataclass(frozen=True)
class OperandPattern:
    """Any value (`x`), any constant (`C`, negated `-C`), or all remaining operands (`*xs`)."""

    text: str

    @property
    def is_constant(self) -> bool:
        return self.text.isupper()


@dataclass(frozen=True)
class NumberPattern:
    """A constant of this value, with the sign of its zero; `~0` has all bits set."""

    text: str

    def is_value(self, atom: Atom, writer: Writer) -> bool:
        # Most constants are Python numbers, which are compared before an array is made of them.
        known = writer.value(atom)
        if isinstance(known, float | int) and self.text != "~0" and known != float(self.text):
            return False
        value = scalar_value(atom, writer)
        if value is None:
            return False
        kind = value.dtype.kind
        if self.text == "~0":
            return bool(kind in "biu" and (value if kind == "b" else ~value == 0))
        if value != float(self.text):
            return False
        if value != 0 or kind in "biu":
            return True
        parts = value.astype(np.complex128) if kind == "c" else value.astype(np.float64)
        negative = np.signbit(parts.real) or np.signbit(parts.imag)
        return bool(negative == self.text.startswith("-"))


@dataclass(frozen=True)
class OperationPattern:
    """An equation of one of these primitives, with no options but these."""

    primitives: frozenset[str]
    operands: tuple[Node, ...]
    text: str
    options: frozenset[str]


Node = OperandPattern | NumberPattern | OperationPattern


def scalar_value(atom: Atom, writer: Writer) -> np.ndarray | None:
    """Return the value of a scalar constant, in its dtype; None for all else, including keys."""
    value = writer.value(atom)
    if value is None or atom.aval.shape != ():
        return None
    try:
        return np.asarray(value, dtype=atom.aval.dtype)
    except TypeError:
        return None


@cache
def parsed(text: str) -> Node:
    """Return the tree of a pattern or a replacement. Raises ValueError if it is malformed."""
    tokens = [re.sub(r"\s", "", m.group(1)) for m in _TOKEN.finditer(text)]
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise ValueError(f"cannot read the pattern {text!r}")
    tokens.append("")
    node, position = _node(tokens, 0)
    if tokens[position]:
        raise ValueError(f"cannot read the pattern {text!r}: unexpected {tokens[position]!r}")
    return node


def _node(tokens: Sequence[str], at: int) -> tuple[Node, int]:
    token = tokens[at]
    if token in ("", "(", ")", ","):
        raise ValueError(f"expected an operand in a pattern, not {token!r}")
    if tokens[at + 1] != "(":
        is_number = token.lstrip("~-")[:1].isdigit() or token.endswith("inf")
        return (NumberPattern if is_number else OperandPattern)(token), at + 1
    at, operands = at + 2, []
    while tokens[at] != ")":
        operand, at = _node(tokens, at)
        operands.append(operand)
        if tokens[at] == ",":
            at += 1
        elif tokens[at] != ")":
            raise ValueError("a closing parenthesis is missing in a pattern")
    token, _, known = token.rstrip("]").partition("[")
    names = frozenset(n for part in token.split("|") for n in CLASSES.get(part, (part,)))
    return OperationPattern(
        names, tuple(operands), token, frozenset(known.split(",")) - {""}
    ), at + 1


class Uses:
    """The number of live uses of each variable of a body while it is rewritten.

    The counts are those of the rewritten body: a rule may have removed the only reader of an
    equation, whose own operands then lose a use, or added a second one.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._counts: Counter[Atom] | None = None

    @property
    def counts(self) -> Counter[Atom]:
        """The counts; they are initialized while the body is still unchanged."""
        if self._counts is None:
            jaxpr = open_jaxpr(self._writer.body)
            self._counts = Counter(v for e in jaxpr.eqns for v in e.invars if type(v) is Var)
            self._counts.update(v for v in jaxpr.outvars if type(v) is Var)
        return self._counts

    def is_only(self, eqn: JaxprEqn) -> bool:
        """Return True if the result of an equation has exactly one use."""
        return self.counts[eqn.outvars[0]] == 1

    def replace(self, old: JaxprEqn, new: Sequence[JaxprEqn]) -> None:
        """Update the counts for the replacement of an equation by others."""
        self.counts.update(v for e in new for v in e.invars if type(v) is Var)
        self._forget(old)

    def rename(self, old: JaxprEqn, atom: Atom) -> None:
        """Update the counts for the replacement of an equation's result by an atom."""
        reads = self.counts.pop(old.outvars[0], 0)
        if type(atom) is not Literal:
            self.counts[atom] += reads
        self._forget(old)

    def _forget(self, eqn: JaxprEqn) -> None:
        """Subtract the uses by an equation, and by the equations that are dead without it."""
        removed = [eqn]
        while removed:
            for atom in removed.pop().invars:
                if type(atom) is Literal:
                    continue
                self.counts[atom] -= 1
                behind = self._writer.definition.get(atom)
                if behind is None or behind.effects:
                    continue
                if not any(self.counts[v] for v in behind.outvars):
                    self._writer.dead[id(behind)] = behind
                    removed.append(behind)


class RowMatch:
    """A match of a pattern: the values of its names, and its equations, outermost first."""

    __slots__ = ("eqns", "names", "uses", "writer")

    def __init__(self, writer: Writer, uses: Uses) -> None:
        self.writer = writer
        self.uses = uses
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
        """The equation that defines its operand, or the first of several."""
        return self.eqns[1]

    @property
    def out(self) -> Aval:
        """The type of the result."""
        return self.eqns[0].outvars[0].aval

    def aval(self, name: str) -> Aval:
        return self.names[name].aval

    def value(self, name: str) -> np.ndarray:
        """Return the value of a constant, in its dtype."""
        value = scalar_value(self.names[name], self.writer)
        assert value is not None, name
        return value


#: Return True if an operand, or an equation, matches; binds names, which are invalid otherwise.
OperandMatcher = Callable[[RowMatch, Any], bool]
Matcher = Callable[[RowMatch, JaxprEqn], bool]


@cache
def matcher(pattern: OperationPattern) -> Matcher:
    """Return the function that matches a pattern with an equation of one of its primitives.

    Patterns become functions because they are tried on most equations of a program.
    """
    nodes = pattern.operands
    rest = nodes[-1].text[1:] if nodes and _is_rest(nodes[-1]) else None
    count = len(nodes) - (rest is not None)
    # The most selective operands are matched first.
    ranked = sorted(enumerate(nodes[:count]), key=lambda pair: rank(pair[1]))
    operands = [(i, _operand_matcher(node)) for i, node in ranked]

    def options_known(eqn: JaxprEqn) -> bool:
        return not eqn.params or options(eqn) <= pattern.options

    def in_order(match: RowMatch, atoms: Sequence[Atom]) -> bool:
        for i, fits in operands:
            if not fits(match, atoms[i]):
                return False
        if rest is not None:
            match.names[rest] = tuple(atoms[count:])
        return True

    def matches(match: RowMatch, eqn: JaxprEqn) -> bool:
        atoms = eqn.invars
        if len(atoms) != count and (rest is None or len(atoms) < count):
            return False
        match.eqns.append(eqn)
        return in_order(match, atoms) and options_known(eqn)

    def matches_in_any_order(match: RowMatch, eqn: JaxprEqn) -> bool:
        eqns, names = len(match.eqns), dict(match.names)
        if matches(match, eqn):
            return True
        if len(eqn.invars) != 2:
            return False
        del match.eqns[eqns + 1 :]
        match.names = names
        exchanged = in_order(match, eqn.invars[::-1]) and options_known(eqn)
        return exchanged and traits(eqn).commutes(eqn.invars[0].aval.dtype)

    if count != 2 or rest is not None or all(rank(node) == 3 for node in nodes):
        return matches
    may_swap = any(traits(name).commutative for name in pattern.primitives)
    return matches_in_any_order if may_swap else matches


def rank(node: Node) -> int:
    """Return how rarely an operand matches: number 0, constant 1, operation 2, any value 3."""
    if isinstance(node, OperandPattern):
        return 1 if node.is_constant else 3
    return 0 if isinstance(node, NumberPattern) else 2


def _is_rest(node: Node) -> bool:
    return isinstance(node, OperandPattern) and node.text.startswith("*")


def _operand_matcher(node: Node) -> OperandMatcher:
    if isinstance(node, NumberPattern):
        return lambda match, atom: node.is_value(atom, match.writer)
    if isinstance(node, OperandPattern):
        text = node.text
        if not node.is_constant:
            return lambda match, atom: match.names.setdefault(text, atom) is atom
        return lambda match, atom: (
            scalar_value(atom, match.writer) is not None
            and match.names.setdefault(text, atom) is atom
        )
    primitives, inner = node.primitives, matcher(node)

    def defined(match: RowMatch, atom: Atom) -> bool:
        eqn = None if type(atom) is Literal else match.writer.definition.get(atom)
        if eqn is None or eqn.primitive.name not in primitives or len(eqn.outvars) != 1:
            return False
        return inner(match, eqn)

    return defined
