"""Python expressions as rules propose them.

A rule builds an expression of `Slot`s (the equation's operands), calls, operators and plain Python
values. Its `pieces` are its text, for the layout, with a hole for each operand.
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

#: How tightly an expression binds: what stands in a place that binds tighter gets parentheses.
ANY, COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, SIGN, POWER, ATOM = range(11)


#: The names that an emitted module may mention, and the import that each needs.
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
    """Where an expression is written: it imports and defines what the text mentions."""

    def mention(self, path: str) -> None:
        """Import what the first part of a dotted name means."""

    def symbol(self, name: str) -> str:
        """Return the name of the variable that holds the size of a symbol."""

    def module_value(self, value: ModuleValue) -> str:
        """Return the name of something that the module makes once."""

    def helper(self, helper: Helper) -> str:
        """Return the name of a function that the module defines at its top."""

    def function(self, function: PythonFunction) -> str:
        """Return the name of a function, which is defined."""


class Expression:
    """What all expressions have in common. `level` says how tightly it binds."""

    level: int = ATOM

    def pieces(self, scope: Scope) -> list[Piece]:
        """Return the expression's text."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slot(Expression):
    """The equation's operand of that index."""

    index: int

    def pieces(self, scope: Scope) -> list[Piece]:
        return [Hole(self.index)]


@dataclass(frozen=True)
class Name(Expression):
    """Something public: `jnp.float32`, `lax.max`."""

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
        items = [written(a, scope) for a in self.args]
        named = {k: v for k, v in self.kwargs.items() if k.isidentifier() and not iskeyword(k)}
        items += [[f"{k}=", *written(v, scope)] for k, v in named.items()]
        # Names are data: XLA's metadata may have any.
        others = {k: v for k, v in self.kwargs.items() if k not in named}
        items += [["**", *written(others, scope)]] if others else []
        return [*function, Bracket("(", items, ")", call=True)]


@dataclass(frozen=True)
class Subscript(Expression):
    """`x[1:3, None]`; the key holds ints, slices, None and expressions."""

    of: Expression
    key: tuple[object, ...]

    def pieces(self, scope: Scope) -> list[Piece]:
        items: list[list[Piece]] = [
            _slice(k, scope) if isinstance(k, slice) else written(k, scope) for k in self.key
        ]
        return [*_within(self.of, ATOM, scope), Bracket("[", items, "]", call=True)]


def _slice(key: slice, scope: Scope) -> list[Piece]:
    start, stop, step = (
        [] if n is None else written(n, scope) for n in (key.start, key.stop, key.step)
    )
    return [*start, ":", *stop, *([":", *step] if step else [])]


@dataclass(frozen=True, eq=False)
class ModuleValue(Expression):
    """Something that is made once, at the top of the module, and named where it is needed."""

    key: object
    name: str
    of: Expression

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.module_value(self)]


@dataclass(frozen=True)
class Assignment(Expression):
    """`ref[0] = value`: a statement, which gives nothing."""

    to: Subscript
    what: object

    def pieces(self, scope: Scope) -> list[Piece]:
        return [*self.to.pieces(scope), " = ", *written(self.what, scope)]


#: How flat values are grouped: an index, None for nothing, or a tuple of these.
Grouping: TypeAlias = "int | tuple[Grouping, ...] | None"


def slots(results: Results) -> object:
    """Return a slot for each index, in the same structure."""
    if isinstance(results, int):
        return Slot(results)
    return tuple(map(slots, results)) if isinstance(results, tuple) else results


#: What a function returns: indexes, and expressions for values that have none.
Results: TypeAlias = "int | tuple[Results, ...] | Expression | None"


@dataclass(frozen=True, eq=False)
class PythonFunction(Expression):
    """A Python function with the body of a closed jaxpr.

    `parameters` has a structure of indexes of the jaxpr's arguments for each Python parameter; one
    that is a tuple bears a name of `titles`. `results` has indexes of the jaxpr's results, and
    after them of its arguments.
    The first arguments are not passed: they are the operands of the equation with the indexes
    `captured`; those after them are, as far as the names would do for both, the operands `passed`.
    So many as are `closed_over` are passed, but by a function that closes over them.
    `rules` are methods to call with further functions: `defjvp`. A `kept` function is defined at
    the module's top, once for each `key`, and keeps its name even if another has the same, unless
    that says nothing (not `renamed`).
    `setting` is the context in which JAX traces the body, if that is another than around it. A
    function that does nothing but raise has no jaxpr, and the exception in `raises`.
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
        """Return a function that computes the same, of one that captures nothing."""
        indexes = jax.tree.leaves(self.parameters)

        def function(*args: Any) -> Any:
            flat = dict(zip(indexes, jax.tree.leaves(args), strict=True))
            outs = jaxcompat.jaxpr_as_fun(self.jaxpr)(*(flat[i] for i in range(len(flat))))
            return jax.tree.map(outs.__getitem__, self.results)

        function.__name__ = self.name
        return function


@dataclass(frozen=True, eq=False)
class MultiResult:
    """An expression that is known to give an equation's results, in a structure of its own."""

    of: Expression
    results: Grouping


#: What a rule may yield.
Proposal: TypeAlias = Expression | MultiResult


@dataclass(frozen=True)
class Helper(Expression):
    """A function of that name, which a module that mentions it defines by this text.

    `roots` are the names that the text needs imported.
    """

    name: str
    roots: tuple[str, ...]
    text: str

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.helper(self)]


#: How tightly each operator binds.
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
        # Comparisons chain, and powers are written without spaces: neither takes its like bare.
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
    """Return a call of something public: `call("jnp.sum", x, axis=0)`."""
    return CallExpression(Name(path), args, kwargs)


def method(x: Expression, name: str, *args: object, **kwargs: object) -> CallExpression:
    """Return a call of a method: `method(x, "reshape", 3, 4)`."""
    return CallExpression(Attribute(x, name), args, kwargs)


#: How values of a Python type that has no literals are made, as an expression. Plug-ins add to
#: it; a type's subclasses are found through `isinstance`, in the order of the table.
constructors: dict[type, Callable[[Any], object]] = {}

#: The same of types of modules that may not be imported, by the full name of the type.
late_constructors: dict[str, Callable[[Any], object]] = {}


def _constructed(value: object) -> object:
    """Return what makes a value, by the table, or the value itself if it has a literal."""
    if type(value) in (int, str, bool):
        return value
    cls = type(value)
    construct = (
        constructors.get(cls)
        or late_constructors.get(f"{cls.__module__}.{cls.__qualname__}")
        or next((make for kind, make in constructors.items() if isinstance(value, kind)), None)
    )
    return construct(value) if construct else value


def as_expression(value: Any) -> Any:
    """Return a parameter's value as an expression, or as plain data that holds some.

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


def written(value: Any, scope: Scope) -> list[Piece]:
    """Return the text of an argument: an expression, a value, or a container of these.

    Raises:
        TypeError: If it cannot be written.
    """
    if isinstance(value, Expression):
        return value.pieces(scope)
    if type(value) in (tuple, list):
        items = [written(v, scope) for v in value]
        if type(value) is list:
            return [Bracket("[", items, "]")]
        return [Bracket("(", items, ")", single_comma=len(items) == 1)]
    if type(value) is dict:
        items = [[*written(k, scope), ": ", *written(v, scope)] for k, v in value.items()]
        return [Bracket("{", items, "}")]
    made = _constructed(value)
    return [plain(value)] if made is value else written(made, scope)


def plain(value: Any) -> str:
    """The text of None, a bool, a finite number, a string or bytes; TypeError for all else."""
    kind = type(value)
    if kind is str:
        text = repr(value)  # in single quotes, if there are none in it
        return text if '"' in value or text[0] == '"' else f'"{text[1:-1]}"'
    if value is Ellipsis:
        return "..."
    if value is None or kind in (bool, int, float, bytes):
        return repr(value)
    raise TypeError(f"a {kind.__qualname__} is no literal")


def _within(value: object, level: int, scope: Scope) -> list[Piece]:
    """`value` in a place that binds as tightly as `level`, in parentheses if it must be."""
    if isinstance(value, Slot):
        return [Hole(value.index, level)]
    pieces = written(value, scope)
    own = value.level if isinstance(value, Expression) else ATOM
    return ["(", *pieces, ")"] if own < level else pieces
