"""The rows of `simplify`: patterns and replacements as text, conditions, and their engine.

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
options is in the table of traits (`ir.traits`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any, TypeAlias

import jax
import jax.extend.core.primitives
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import PluginError
from jaxprtool.ir.equations import is_flat, named, type_of
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.ir.traits import nondefault_options, primitives_with, traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, JaxprEqn, Literal, Primitive, Var, open_jaxpr

# --- pattern --------------------------------------------------------------------------------------
# Patterns and replacements as text, `add(x, neg(y))` and `sub(x, y)`, and how they are matched.

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
        constant = writer.value(atom)
        if isinstance(constant, float | int) and self.text != "~0" and constant != float(self.text):
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
    token, _, options = token.rstrip("]").partition("[")
    names = frozenset(n for part in token.split("|") for n in CLASSES.get(part, (part,)))
    return OperationPattern(
        names, tuple(operands), token, frozenset(options.split(",")) - {""}
    ), at + 1


class UseCounts:
    """The number of live uses of each variable of a body while it is rewritten.

    The counts are those of the rewritten body: a rule may have removed the only reader of an
    equation, whose own operands then lose a use, or added a second one.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._counts: Counter[Atom] | None = None
        #: Whether `is_only` has returned False, since this was last set to False.
        self.refused = False

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
        is_only = self.counts[eqn.outvars[0]] == 1
        self.refused |= not is_only
        return is_only

    def replace(self, old: JaxprEqn, new: Sequence[JaxprEqn]) -> None:
        """Update the counts for the replacement of an equation by others."""
        counts = self.counts
        for eqn in new:  # `Counter.update` takes far longer for so few
            for atom in eqn.invars:
                if type(atom) is Var:
                    counts[atom] = counts.get(atom, 0) + 1
        self._forget(old)

    def rename(self, old: JaxprEqn, atom: Atom) -> None:
        """Update the counts for the replacement of an equation's result by an atom."""
        reads = self.counts.pop(old.outvars[0], 0)
        if type(atom) is not Literal:
            self.counts[atom] += reads
        self._forget(old)

    def _forget(self, eqn: JaxprEqn) -> None:
        """Subtract the uses by an equation, and by the equations that are dead without it."""
        removed, counts, definition = [eqn], self.counts, self._writer.definition
        while removed:
            for atom in removed.pop().invars:
                if type(atom) is Literal:
                    continue
                counts[atom] -= 1
                if counts[atom]:
                    continue
                behind = definition.get(atom)
                if behind is None or behind.effects:
                    continue
                if not any(counts[v] for v in behind.outvars):
                    self._writer.dead[id(behind)] = behind
                    removed.append(behind)


class RowMatch:
    """A match of a pattern: the values of its names, and its equations, outermost first."""

    __slots__ = ("eqns", "names", "uses", "writer")

    def __init__(self, writer: Writer, uses: UseCounts) -> None:
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
        return not eqn.params or nondefault_options(eqn) <= pattern.options

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


# --- row ------------------------------------------------------------------------------------------
# A rule of `simplify`: a row of text and conditions, and its outcome for a match.

#: Returns True if a rule holds for a match; the first line of its docstring is shown to the user.
Condition: TypeAlias = Callable[[RowMatch], bool]
#: The parameters of an equation.
Params: TypeAlias = dict[str, Any]
#: The replacement of the equation: an atom for its result, another equation, or None for no change.
Outcome: TypeAlias = Atom | JaxprEqn | None


@dataclass(frozen=True, eq=False)
class SimplifyRule:
    """One rule: an equation that matches `pattern` is replaced by `replacement` (see above).

    All conditions in `when` must hold. `params` returns the parameters of the new equation, or None
    if the rule does not apply; without it they are those of the first equation of the pattern with
    the same primitive. `build` returns the whole outcome instead, and the replacement is then only
    shown.

    `exact` states if every bit of the result is kept, including NaN, infinities and the sign of
    zero: always, never (only for `fast`), or on a condition. If the rule is `once`, the inner
    equations of the pattern must have no other use, and are removed; `build` may then write one
    equation fewer than these with `emit`.
    """

    pattern: str
    replacement: str
    when: tuple[Condition, ...] = ()
    params: Callable[[RowMatch], Params | None] | None = None
    build: Callable[[RowMatch], Outcome] | None = None
    exact: bool | Condition = True
    once: bool = False

    @property
    def name(self) -> str:
        return f"{self.pattern} → {self.replacement}"

    @cached_property
    def tree(self) -> OperationPattern:
        """The parsed pattern. Raises ValueError if it is malformed or not an equation."""
        tree = parsed(self.pattern)
        if not isinstance(tree, OperationPattern):
            raise ValueError(f"the pattern {self.pattern!r} is not an equation")
        return tree

    @cached_property
    def matches(self) -> Matcher:
        return matcher(self.tree)

    @cached_property
    def result(self) -> Node:
        return parsed(self.replacement)

    @property
    def condition(self) -> str:
        """All conditions on a match, in words."""
        functions = [*self.when, *(f for f in (self.params, self.build) if f is not None)]
        once = ["the inner equations have no other use"] if self.once else []
        return "; ".join([*filter(None, map(_description, functions)), *once])

    @property
    def exactness(self) -> str:
        if callable(self.exact):
            return f"exact if {_description(self.exact)}"
        return "exact" if self.exact else "fast"

    def outcome(self, match: RowMatch, fast: bool) -> Outcome:
        """Return the outcome of the rule for a match of its pattern; None if it does not apply."""
        for condition in self.when:
            if not condition(match):
                return None
        if not (fast or self.exact is True or (callable(self.exact) and self.exact(match))):
            return None
        if self.once and not all(map(match.uses.is_only, match.eqns[1:])):
            return None
        if self.build is not None:
            return self.build(match)
        node = self.result
        if isinstance(node, OperandPattern):
            return match[node.text]
        if isinstance(node, NumberPattern):
            return full(match, float(node.text))
        params = self._params(match, node) if self.params is None else self.params(match)
        if params is None:
            return None
        return equation(match, node.text, _operands(match, node.operands), params)

    def _params(self, match: RowMatch, node: OperationPattern) -> Params:
        for eqn in match.eqns:
            if eqn.primitive.name in node.primitives:
                return eqn.params
        return PARAMS.get(node.text, {})


#: The default parameters of a primitive, for those that have any.
PARAMS: dict[str, Params] = {"mul": {"out_dtype": None}}


def _description(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0].removesuffix(".")


def _operands(match: RowMatch, nodes: Sequence[Node]) -> list[Atom]:
    atoms: list[Atom] = []
    for node in nodes:
        if isinstance(node, NumberPattern):
            raise ValueError("a number cannot be an operand in a replacement")
        if isinstance(node, OperationPattern):
            raise ValueError("a replacement must be one equation")
        if node.text.startswith("*"):
            atoms += match[node.text[1:]]
        elif node.text.startswith("-"):
            atom = match[node.text[1:]]
            atoms.append(match.writer.constant(-match.value(node.text[1:]), atom.aval))
        else:
            atoms.append(match[node.text])
    return atoms


def equation(
    match: RowMatch, name: str, operands: Sequence[Atom], params: Params | None = None
) -> JaxprEqn:
    """Return the equation to be replaced with another primitive, operands and parameters."""
    name = match.eqn.primitive.name if name in CLASSES else name
    if params is None:
        params = PARAMS.get(name, {})
    return match.eqn.replace(
        primitive=_primitive(match, name), invars=list(operands), params=params
    )


def emit(match: RowMatch, name: str, operands: Sequence[Atom], params: Params, aval: Aval) -> Var:
    """Write an equation with one result of this type before the one that is replaced."""
    primitive, out = _primitive(match, name), Var(aval)
    eqn = match.eqn.replace(
        primitive=primitive, invars=list(operands), outvars=[out], params=params
    )
    match.writer.add(eqn)
    return out


def _primitive(match: RowMatch, name: str) -> Primitive:
    for eqn in match.eqns:
        if eqn.primitive.name == name:
            return eqn.primitive
    return getattr(jax.extend.core.primitives, f"{name}_p")


def full(match: RowMatch, value: Any) -> Outcome:
    """Return the result as one constant: a literal for a scalar, else a broadcast literal."""
    aval = match.out
    if any(map(jaxcompat.is_symbolic_dimension, aval.shape)) or jaxcompat.varying_axes(aval):
        return None
    data = np.asarray(value).astype(aval.dtype)
    scalar = jax.core.ShapedArray((), aval.dtype, weak_type=aval.weak_type)
    literal = jaxcompat.as_literal(data, scalar)
    if literal is None or aval.shape == ():
        return literal
    params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
    return equation(match, "broadcast_in_dim", [literal], params)


# --- conditions on the type that an equation computes in ----------------------------------------

_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
#: The kind of floats that are powers of two, such as f8_e8m0fnu.
_POWERS = "powers of two"


@cache
def _kind_of(dtype: np.dtype | None) -> type | str | None:
    if jnp.issubdtype(dtype, jnp.floating) and float(jnp.finfo(dtype).min) > 0:
        return _POWERS
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, kind)), None)


def has_zero(dtype: np.dtype) -> bool:
    """Return False for a dtype without zero and negative numbers, which become NaN in it."""
    return _kind_of(dtype) is not _POWERS


def _computes_in(name: str, *kinds: type | str) -> Condition:
    def condition(match: RowMatch) -> bool:
        return _kind_of(match.eqn.invars[-1].aval.dtype) in kinds

    condition.__doc__ = name
    return condition


real = _computes_in("reals", jnp.floating, jnp.integer)
floats = _computes_in("floats", jnp.floating)
signed = _computes_in(
    "a type with negative numbers, or integers", jnp.floating, jnp.complexfloating, jnp.integer
)
discrete = _computes_in("integers or booleans", jnp.integer, jnp.bool_)
integers = _computes_in("integers", jnp.integer)
booleans = _computes_in("booleans", jnp.bool_)

#: These never hold for floating-point or complex numbers.
NEVER_INEXACT = frozenset({discrete, integers, booleans})


def computes_inexact(eqn: JaxprEqn) -> bool:
    """Return True if an equation computes in floating-point or complex numbers."""
    dtype = getattr(eqn.invars[-1].aval, "dtype", None) if eqn.invars else None
    return _kind_of(dtype) in (jnp.floating, jnp.complexfloating, _POWERS)


# --- engine ---------------------------------------------------------------------------------------
# The engine of `simplify`: rows looked up by primitive, tried on each equation until none applies.
#
# A body is traversed once, from the front. The simplified form of an equation depends only on the
# equations before it, and those are final, so that one traversal reaches the fixed point.
#
# It terminates: a row replaces one equation by one atom, or by one equation; a row that writes two
# removes two or more. Rows whose pattern includes the definition of an operand return an equation
# that reads earlier values; those that match one equation alone change it to another primitive, or
# constant, that no row changes back. Rows of a plug-in that undo each other are reported, and so
# are rows that change the type of an equation.

#: Rows that do not undo each other never rewrite an equation this often.
MOST_STEPS = 100

#: The requirement on one of the operands: the name of the primitive that defines it, the value of a
#: constant, or `_CONSTANT` for any constant; None if there is no requirement.
_Head = str | float | None
#: The rows of a primitive by their requirement on an operand.
_Rows = dict[_Head, list[SimplifyRule]]
#: The rows of each primitive: all, and those for floating-point and complex numbers.
_Table = dict[str, tuple[_Rows, _Rows]]
_CONSTANT = "a constant"


class ResultTypes:
    """The result types of equations, inferred once per run for equal signatures."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Aval] = {}

    def __call__(self, eqn: JaxprEqn) -> Aval:
        operands = (v.aval for v in eqn.invars)
        key = (eqn.primitive, eqn.ctx, *operands, *eqn.params.items())
        try:
            return self._known[key]
        except KeyError:
            self._known[key] = aval = self._inferred(eqn)
            return aval
        except TypeError:  # a parameter that is not hashable
            return self._inferred(eqn)

    def _inferred(self, eqn: JaxprEqn) -> Aval:
        with eqn.ctx.manager:
            (aval,), _ = jaxcompat.inferred_types(eqn.primitive, eqn.params, eqn.invars)
        return aval


#: The conditions and functions of a row read at most this many equations behind its pattern.
READ_BEHIND = 1


class SettledEquations:
    """The equations that no row of a run applies to, for the next run of the same rows.

    No row applies to such an equation either if the equations behind it, as far as a row reads,
    are those of the last run. It is left out if a row has refused it because of other uses.
    """

    def __init__(self, rows: Sequence[SimplifyRule]) -> None:
        #: How many equations its rows read, one behind the other, by the name of a primitive.
        self._reads: dict[str, int] = {}
        for row in rows:
            depth = _depth(row.tree) + READ_BEHIND
            for name in row.tree.primitives:
                self._reads[name] = max(depth, self._reads.get(name, 0))
        self._most = max(self._reads.values(), default=0)
        #: The equations written in the last run and in this one, by identity, and those left out.
        self._last: dict[int, JaxprEqn] = {}
        self._written: dict[int, JaxprEqn] = {}
        self._last_open: set[int] = set()
        self._open: set[int] = set()
        #: To what depth the equations of this run, and those behind them, are those of the last.
        self._same: dict[int, int] = {}
        self.types = ResultTypes()

    def start(self) -> None:
        """Start a run."""
        self._last, self._last_open = self._written, self._open
        self._written, self._open, self._same = {}, set(), {}

    def is_settled(self, eqn: JaxprEqn, definition: Mapping[Var, JaxprEqn]) -> bool:
        """Return True if no row applies to an equation, by those that define its operands."""
        number = id(eqn)
        known = self._last.get(number)
        if known is None or known is not eqn:
            return False
        depth = self._most
        for atom in eqn.invars:
            if type(atom) is not Literal and (behind := definition.get(atom)) is not None:
                depth = min(depth, self._same.get(id(behind), 0) + 1)
        self._same[number] = depth
        reads = self._reads.get(eqn.primitive.name, 0)
        return depth >= reads and number not in self._last_open

    def is_settled_body(self, eqns: Sequence[JaxprEqn]) -> bool:
        """Return True if no row applies to the equations of a flat body, and record them.

        Without an equation that the last run has not written, what defines their operands is what
        defined them then.
        """
        numbers = set(map(id, eqns)) if self._last else {0}
        if not (self._last.keys() >= numbers and self._last_open.isdisjoint(numbers)):
            return False
        self._written.update(zip(map(id, eqns), eqns, strict=True))
        self._same.update(dict.fromkeys(numbers, self._most))
        return True

    def add(self, eqn: JaxprEqn, is_settled: bool) -> None:
        """Record an equation that is written. One in two bodies must be settled in both."""
        self._written[id(eqn)] = eqn
        if not is_settled:
            self._open.add(id(eqn))


def _depth(node: Node) -> int:
    """Return how many equations a pattern has, one behind the other."""
    if not isinstance(node, OperationPattern):
        return 0
    return 1 + max(map(_depth, node.operands), default=0)


def simplified(
    jaxpr: AnyJaxpr,
    rows: Sequence[SimplifyRule],
    *,
    fast: bool,
    settled: SettledEquations | None = None,
) -> AnyJaxpr:
    """Apply rows to a jaxpr at every depth; return the same object if none applies.

    Args:
        jaxpr: The jaxpr.
        rows: The rows.
        fast: Apply rows that are not exact, too.
        settled: What the last run of the same rows has found. It is updated.

    Raises:
        PluginError: If rows undo each other endlessly.
    """
    settled = settled or SettledEquations(rows)
    settled.start()
    return rewrite(jaxpr, partial(_visitor, _table_of(tuple(rows), fast), fast, settled))


def _may_be_inexact(row: SimplifyRule, fast: bool) -> bool:
    """Return True if a rule may apply to floating-point and complex numbers."""
    asked = row.when if fast else (*row.when, row.exact)
    return NEVER_INEXACT.isdisjoint(asked)


@lru_cache(maxsize=16)
def _table_of(rows: tuple[SimplifyRule, ...], fast: bool) -> _Table:
    table: _Table = {}
    for row in (row for row in rows if fast or row.exact is not False):
        for primitive in row.tree.primitives:
            of_all, of_inexact = table.setdefault(primitive, ({}, {}))
            for head in _heads(row.tree):
                of_all.setdefault(head, []).append(row)
                if _may_be_inexact(row, fast):
                    of_inexact.setdefault(head, []).append(row)
    return table


def _heads(tree: OperationPattern) -> Sequence[_Head]:
    """Return the requirement of the pattern that the fewest operands meet."""
    # Equations and numbers are rarer than constants.
    for node in sorted(tree.operands, key=lambda node: rank(node) % 2):
        if isinstance(node, OperationPattern):
            return sorted(node.primitives)
        if rank(node) < 2:
            is_number = isinstance(node, NumberPattern) and node.text != "~0"
            return [float(node.text) if is_number else _CONSTANT]
    return [None]


def _visitor(
    table: _Table, fast: bool, settled: SettledEquations, writer: Writer
) -> RewriteRule | None:
    definition, constants, types = writer.definition, writer.constant_values, settled.types
    uses, is_free = UseCounts(writer), not writer.donated  # a donated array limits other rows
    body = open_jaxpr(writer.body)
    if is_free and is_flat(body) and settled.is_settled_body(body.eqns):
        return None

    def rows_of(eqn: JaxprEqn) -> _Rows | None:
        rows = table.get(eqn.primitive.name)
        return None if rows is None else rows[computes_inexact(eqn)]

    def step(eqn: JaxprEqn, rows: _Rows) -> Outcome:
        """Return the outcome of the first rule that applies to an equation."""
        for row in rows.get(None, ()):
            if (outcome := _apply(row, eqn, writer, uses, types, fast)) is not None:
                return outcome
        for atom in eqn.invars:
            if type(atom) is Literal or atom in constants:
                heads = _constant_heads(atom, writer)
            elif (behind := definition.get(atom)) is not None:
                heads = (behind.primitive.name,)
            else:
                continue
            for head in heads:
                for row in rows.get(head, ()):
                    if (outcome := _apply(row, eqn, writer, uses, types, fast)) is not None:
                        return outcome
        return None

    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        if is_free and settled.is_settled(eqn, definition):
            settled.add(eqn, True)
            return None
        rows = rows_of(eqn)
        if rows is None or eqn.effects:
            settled.add(eqn, is_free)
            return None
        new, steps = eqn, 0
        uses.refused = False
        while rows is not None:
            written = len(writer.eqns)
            if (outcome := step(new, rows)) is None:
                break
            if not isinstance(outcome, JaxprEqn):
                uses.rename(new, outcome)
                return [outcome]
            uses.replace(new, [*writer.eqns[written:], outcome])
            new, steps = outcome, steps + 1
            if steps > MOST_STEPS:
                raise PluginError(f"simplify: rules undo each other endlessly on {named(eqn)}")
            rows = rows_of(new)
        settled.add(new, is_free and not uses.refused)
        return None if new is eqn else writer.add(new)

    return rule


def _constant_heads(atom: Atom, writer: Writer) -> Sequence[_Head]:
    value = writer.value(atom)
    if isinstance(value, float | int):
        return _CONSTANT, float(value)
    value = scalar_value(atom, writer)
    if value is None or value.dtype == jax.dtypes.float0:
        return ()
    return _CONSTANT, float(value.real if value.dtype.kind == "c" else value)


def _apply(
    row: SimplifyRule,
    eqn: JaxprEqn,
    writer: Writer,
    uses: UseCounts,
    types: ResultTypes,
    fast: bool,
) -> Outcome:
    match = RowMatch(writer, uses)
    if not row.matches(match, eqn) or _may_strengthen(eqn):
        return None
    if row.once and not all(map(_is_plain, match.eqns)):
        return None
    num_eqns, num_consts = len(writer.eqns), len(writer.constvars)
    outcome = row.outcome(match, fast)
    if isinstance(outcome, JaxprEqn):
        plain = _is_plain(eqn) and _is_plain(outcome)
        accepted = plain and _keeps_type(row, outcome, types(outcome))
    else:
        accepted = outcome is not None and writer.may_replace(eqn.outvars[0], outcome, num_eqns)
    if accepted:
        return outcome
    writer.rollback(num_eqns, num_consts)
    return None


def _may_strengthen(eqn: JaxprEqn) -> bool:
    """Return True for a weakly typed array of inexact numbers.

    Its gradient by JAX's transposes of `pad`, `slice` and others is strongly typed.
    """
    aval = eqn.outvars[0].aval
    return bool(aval.shape and aval.weak_type and computes_inexact(eqn))


def _keeps_type(row: SimplifyRule, eqn: JaxprEqn, computed: Aval) -> bool:
    """Return True if an equation computes the weak type that it is annotated with.

    Raises PluginError if it has another shape or dtype, which is an error of the row.
    """
    aval = eqn.outvars[0].aval
    if computed.shape != aval.shape or computed.dtype != aval.dtype:
        actual, wanted = (type_of(each, weak=True) for each in (computed, aval))
        raise PluginError(
            f"simplify: the rule {row.name} changes {wanted} to {actual}, with {named(eqn)}"
        )
    return bool(computed.weak_type == aval.weak_type)


def _is_plain(eqn: JaxprEqn) -> bool:
    """Return True if no type has a sharding: only JAX can infer that of a new equation."""
    for atoms in eqn.invars, eqn.outvars:
        for atom in atoms:
            if any(getattr(getattr(atom.aval, "sharding", None), "spec", ())):
                return False
    return True
