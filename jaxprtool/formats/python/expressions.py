"""Python expressions that rules propose.

A rule builds an expression from `Slot`s (the equation's operands), calls, operators and plain
Python values. Its `pieces` are its text for the layout, with a hole for each operand.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Protocol, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.formats.python.layout import Bracket, Hole, Piece

#: Precedence levels: an expression in a place of higher precedence gets parentheses.
ANY, COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, SIGN, POWER, ATOM = range(11)


#: The names that an emitted module may use, and their imports.
ROOTS: dict[str, str] = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
    "primitives": "from jax.extend.core import primitives",
    "jaxpr_as_fun": "from jax.extend.core import jaxpr_as_fun",
    "rng": "from jax.extend import random as rng",
    "sparse": "from jax.experimental import sparse",
    "add_any": "from jax.interpreters.ad import add_jaxvals as add_any",
    "SymbolicZero": "from jax.custom_derivatives import SymbolicZero",
    "zeros_like_aval": "from jax.interpreters.ad import zeros_like_aval",
    "P": "from jax.sharding import PartitionSpec as P",
    "compute_on": "from jax.experimental.compute_on import compute_on",
    "set_xla_metadata": "from jax.experimental.xla_metadata import set_xla_metadata",
    "io_callback": "from jax.experimental import io_callback",
    "jaxprtool": "import jaxprtool",
    "Path": "from pathlib import Path",
    "partial": "from functools import partial",
    "namedtuple": "from collections import namedtuple",
    "OrderedDict": "from collections import OrderedDict",
    **dict.fromkeys(("slice", "bool", "int", "float", "complex", "frozenset"), ""),
    **{
        name: ""
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    },
}


class Scope(Protocol):
    """The scope of an expression, which imports and defines the names in its text."""

    def mention(self, path: str) -> None:
        """Import the first part of a dotted name."""

    def symbol(self, name: str) -> str:
        """Return the name of the variable that holds the size of a symbol."""

    def module_value(self, value: ModuleValue) -> str:
        """Return the name of a value that the module creates once."""

    def helper(self, helper: Helper) -> str:
        """Return the name of a helper function, and define it at module level."""

    def function(self, function: PythonFunction) -> str:
        """Return the name of a function, and define it."""


class Expression:
    """The base class of expressions. `level` is the precedence."""

    level: int = ATOM

    def pieces(self, scope: Scope) -> list[Piece]:
        """Return the expression's text."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slot(Expression):
    """The equation's operand with this index."""

    index: int

    def pieces(self, scope: Scope) -> list[Piece]:
        return [Hole(self.index)]


@dataclass(frozen=True)
class Name(Expression):
    """A public name: `jnp.float32`, `lax.max`."""

    path: str

    def pieces(self, scope: Scope) -> list[Piece]:
        scope.mention(self.path)
        return [self.path]


@dataclass(frozen=True)
class Attribute(Expression):
    """An attribute: `x.mT`."""

    of: Expression
    name: str

    def pieces(self, scope: Scope) -> list[Piece]:
        return [*_within(self.of, ATOM, scope), f".{self.name}"]


@dataclass(frozen=True)
class CallExpression(Expression):
    """`function(*args, **kwargs)`; arguments are expressions or plain values."""

    function: Expression
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def pieces(self, scope: Scope) -> list[Piece]:
        function = _within(self.function, ATOM, scope)
        items = [pieces_of(a, scope) for a in self.args]
        named = {k: v for k, v in self.kwargs.items() if k.isidentifier() and not iskeyword(k)}
        items += [[f"{k}=", *pieces_of(v, scope)] for k, v in named.items()]
        # Names may be arbitrary strings, as in XLA's metadata.
        others = {k: v for k, v in self.kwargs.items() if k not in named}
        items += [["**", *pieces_of(others, scope)]] if others else []
        return [*function, Bracket("(", items, ")", call=True)]


@dataclass(frozen=True)
class Subscript(Expression):
    """`x[1:3, None]`; the key holds ints, slices, None and expressions."""

    of: Expression
    key: tuple[object, ...]

    def pieces(self, scope: Scope) -> list[Piece]:
        items: list[list[Piece]] = [
            _slice(k, scope) if isinstance(k, slice) else pieces_of(k, scope) for k in self.key
        ]
        return [*_within(self.of, ATOM, scope), Bracket("[", items, "]", call=True)]


def _slice(key: slice, scope: Scope) -> list[Piece]:
    start, stop, step = (
        [] if n is None else pieces_of(n, scope) for n in (key.start, key.stop, key.step)
    )
    return [*start, ":", *stop, *([":", *step] if step else [])]


@dataclass(frozen=True, eq=False)
class ModuleValue(Expression):
    """A value that is created once at module level and used by name."""

    key: object
    name: str
    of: Expression

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.module_value(self)]


@dataclass(frozen=True)
class Assignment(Expression):
    """`ref[0] = value`: a statement without a value."""

    to: Subscript
    what: object

    def pieces(self, scope: Scope) -> list[Piece]:
        return [*self.to.pieces(scope), " = ", *pieces_of(self.what, scope)]


#: The grouping of flat values: an index, None for no value, or a tuple of these.
Grouping: TypeAlias = "int | tuple[Grouping, ...] | None"


def slots(results: Results) -> object:
    """Return a slot for each index in the same structure."""
    if isinstance(results, int):
        return Slot(results)
    return tuple(map(slots, results)) if isinstance(results, tuple) else results


#: The results of a function: indexes, and expressions for values without an index.
Results: TypeAlias = "int | tuple[Results, ...] | Expression | None"


@dataclass(frozen=True, eq=False)
class PythonFunction(Expression):
    """A Python function with the body of a closed jaxpr.

    The first arguments of the jaxpr are captured instead of passed.

    Attributes:
        jaxpr: The jaxpr; None for a function that only raises.
        name: The name of the function.
        parameters: For each Python parameter, a structure of indexes of the jaxpr's arguments.
        results: A structure of indexes of the jaxpr's results, followed by those of its arguments.
        titles: The names of the parameters that are tuples.
        captured: The indexes of the operands that are captured.
        closed_over: The number of leading operands that a local function closes over and passes.
        passed: The indexes of the operands that are passed, whose names the parameters may share.
        decorators: The decorators.
        rules: Methods to call with further functions: `defjvp`.
        kept: Whether it is defined at module level, once per `key`.
        renamed: Whether a kept function keeps its name even if another function has it; False if
            the name is generic.
        key: The key of a kept function.
        setting: The context in which JAX traces the body, if it differs from the outer one.
        raises: The exception of a function that only raises.
    """

    jaxpr: Any
    name: str
    parameters: tuple[Grouping, ...]
    results: Results
    titles: tuple[str, ...] = ()
    captured: Sequence[int] = ()
    closed_over: int = 0
    passed: Sequence[int] = ()
    decorators: tuple[Expression, ...] = ()
    rules: tuple[tuple[str, tuple[PythonFunction, ...], Mapping[str, object]], ...] = ()
    kept: bool = False
    renamed: bool = True
    key: tuple[object, ...] = ()
    setting: Callable[[], AbstractContextManager[object]] = nullcontext
    raises: Expression | None = None

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.function(self)]

    def traceable(self) -> Callable[..., Any]:
        """Return an equivalent callable of a function without captured values."""
        indexes = jax.tree.leaves(self.parameters)

        def function(*args: Any) -> Any:
            flat = dict(zip(indexes, jax.tree.leaves(args), strict=True))
            outs = jaxcompat.jaxpr_as_fun(self.jaxpr)(*(flat[i] for i in range(len(flat))))
            return jax.tree.map(outs.__getitem__, self.results)

        function.__name__ = self.name
        return function


@dataclass(frozen=True, eq=False)
class MultiResult:
    """An expression known to return an equation's results, with the structure of its results."""

    of: Expression
    results: Grouping


#: The types that a rule may yield.
Proposal: TypeAlias = Expression | MultiResult


@dataclass(frozen=True)
class Helper(Expression):
    """A function with this name, defined by this text in modules that use it.

    `roots` are the names that the text needs to import.
    """

    name: str
    roots: tuple[str, ...]
    text: str

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.helper(self)]


#: The precedence of each operator.
_INFIX: dict[str, int] = {
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("*", "/", "//", "%", "@"), PRODUCT),
    **dict.fromkeys(("<<", ">>"), SHIFT),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), COMPARE),
    "**": POWER,
    "&": AND,
    "|": OR,
    "^": XOR,
}


@dataclass(frozen=True)
class Infix(Expression):
    """A binary operation: `left + right`."""

    symbol: str
    left: object
    right: object

    @property
    def level(self) -> int:  # type: ignore[override]
        return _INFIX[self.symbol]

    def pieces(self, scope: Scope) -> list[Piece]:
        level = self.level
        # Comparisons chain, and powers are written without spaces: nested ones get parentheses.
        tight = level + 1 if level != POWER else ATOM
        left = _within(self.left, tight if level in (COMPARE, POWER) else level, scope)
        between = "**" if level == POWER else f" {self.symbol} "
        return [*left, between, *_within(self.right, tight, scope)]


@dataclass(frozen=True)
class Prefix(Expression):
    """A unary operation: `-x`, `~x`."""

    symbol: str
    of: Expression
    level: int = SIGN

    def pieces(self, scope: Scope) -> list[Piece]:
        return [self.symbol, *_within(self.of, POWER, scope)]


def call(path: str, *args: object, **kwargs: object) -> CallExpression:
    """Return a call of a public function: `call("jnp.sum", x, axis=0)`."""
    return CallExpression(Name(path), args, kwargs)


def method(x: Expression, name: str, *args: object, **kwargs: object) -> CallExpression:
    """Return a call of a method: `method(x, "reshape", 3, 4)`."""
    return CallExpression(Attribute(x, name), args, kwargs)


#: Constructors of expressions for values of Python types without literals. Plug-ins add to it;
#: subclasses are matched by `isinstance`, in the order of the table.
constructors: dict[type, Callable[[Any], object]] = {}

#: Constructors for types of modules that may not be imported, by the full name of the type.
late_constructors: dict[str, Callable[[Any], object]] = {}


def _constructed(value: object) -> object:
    """Return the table's expression for a value, or the value itself if it has a literal."""
    if type(value) in (int, str, bool):
        return value
    cls = type(value)
    construct = (
        constructors.get(cls)
        or late_constructors.get(f"{cls.__module__}.{cls.__qualname__}")
        or next((make for each, make in constructors.items() if isinstance(value, each)), None)
    )
    return construct(value) if construct else value


def as_expression(value: Any) -> Any:
    """Return a parameter's value as an expression, or as plain data with expressions.

    Raises:
        TypeError: If it cannot be written.
    """
    if isinstance(value, Expression):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(as_expression, value))
    if type(value) is dict:
        return {k: as_expression(v) for k, v in value.items()}
    made = _constructed(value)
    if made is not value:
        return as_expression(made)
    plain(value)
    return value


def pieces_of(value: Any, scope: Scope) -> list[Piece]:
    """Return the text of an argument: an expression, a value, or a container of these.

    Raises:
        TypeError: If it cannot be written.
    """
    if isinstance(value, Expression):
        return value.pieces(scope)
    if type(value) in (tuple, list):
        items = [pieces_of(v, scope) for v in value]
        if type(value) is list:
            return [Bracket("[", items, "]")]
        return [Bracket("(", items, ")", single_comma=len(items) == 1)]
    if type(value) is dict:
        items = [[*pieces_of(k, scope), ": ", *pieces_of(v, scope)] for k, v in value.items()]
        return [Bracket("{", items, "}")]
    made = _constructed(value)
    return [plain(value)] if made is value else pieces_of(made, scope)


def plain(value: Any) -> str:
    """Return the text of None, a bool, a finite number, a string or bytes; else raise TypeError."""
    cls = type(value)
    if cls is str:
        text = repr(value)  # in single quotes if it contains none
        return text if '"' in value or text[0] == '"' else f'"{text[1:-1]}"'
    if value is Ellipsis:
        return "..."
    if value is None or cls in (bool, int, float, bytes):
        return repr(value)
    raise TypeError(f"a {cls.__qualname__} is not a literal")


def _within(value: object, level: int, scope: Scope) -> list[Piece]:
    """Return the text of `value`, in parentheses if its precedence is below `level`."""
    if isinstance(value, Slot):
        return [Hole(value.index, level)]
    pieces = pieces_of(value, scope)
    own = value.level if isinstance(value, Expression) else ATOM
    return ["(", *pieces, ")"] if own < level else pieces
