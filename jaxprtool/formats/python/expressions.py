"""Python expressions as rules propose them: they can be written, and they can be computed.

A rule builds an expression of `Slot`s (the equation's operands), `Call`s, operators and plain
Python values. `.pieces(scope)` is its text, for the layout; `.value(slots)` computes it, so that
an expression can be tried: traced, to see whether it gives the very equation it stands for.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.custom_derivatives
import jax.experimental.compute_on
import jax.experimental.xla_metadata
import jax.extend.core.primitives
import jax.extend.random
import jax.interpreters.ad
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat, primitives
from jaxprtool.formats.python.layout import Bracket, Hole, Piece

#: How tightly an expression binds: what stands in a place that binds tighter gets parentheses.
ANY, COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, SIGN, POWER, ATOM = range(11)


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


#: The modules and names an emitted module may mention, and the import that each needs.
ROOTS: dict[str, tuple[Any, str]] = {
    "jax": (jax, "import jax"),
    "jnp": (jnp, "import jax.numpy as jnp"),
    "np": (np, "import numpy as np"),
    "lax": (lax, "from jax import lax"),
    "primitives": (jax.extend.core.primitives, "from jax.extend.core import primitives"),
    "rng": (jax.extend.random, "from jax.extend import random as rng"),
    "add_any": (
        jax.interpreters.ad.add_jaxvals,
        "from jax.interpreters.ad import add_jaxvals as add_any",
    ),
    "SymbolicZero": (
        jax.custom_derivatives.SymbolicZero,
        "from jax.custom_derivatives import SymbolicZero",
    ),
    "zeros_like_aval": (
        jax.interpreters.ad.zeros_like_aval,
        "from jax.interpreters.ad import zeros_like_aval",
    ),
    "P": (PartitionSpec, "from jax.sharding import PartitionSpec as P"),
    "compute_on": (
        jax.experimental.compute_on.compute_on,
        "from jax.experimental.compute_on import compute_on",
    ),
    "set_xla_metadata": (
        jax.experimental.xla_metadata.set_xla_metadata,
        "from jax.experimental.xla_metadata import set_xla_metadata",
    ),
    "io_callback": (
        jax.experimental.io_callback,
        "from jax.experimental import io_callback",
    ),
    "jaxprtool": (primitives, "import jaxprtool"),
    "Path": (Path, "from pathlib import Path"),
    "partial": (partial, "from functools import partial"),
    "namedtuple": (namedtuple, "from collections import namedtuple"),
    "OrderedDict": (OrderedDict, "from collections import OrderedDict"),
    "slice": (slice, ""),
    **{k: (v, "") for k, v in vars(builtins).items() if _is_exception(v)},
    **{kind.__name__: (kind, "") for kind in (bool, int, float, complex)},
    "frozenset": (frozenset, ""),
}


@cache
def resolved(path: str) -> Any:
    """What a dotted name means; AttributeError if this JAX does not have it."""
    root, *names = path.split(".")
    value = ROOTS[root][0]
    for name in names:
        value = getattr(value, name)
    return value


class Expression:
    """What all expressions have in common. `level` says how tightly it binds."""

    level: int = ATOM

    def value(self, slots: Sequence[Any]) -> Any:
        """What the expression computes from the operands' values."""
        raise NotImplementedError

    def pieces(self, scope: Any) -> list[Piece]:
        """The expression's text; `scope` names what it needs defined or imported first."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slot(Expression):
    """The equation's operand of that index."""

    index: int

    def value(self, slots: Sequence[Any]) -> Any:
        return slots[self.index]

    def pieces(self, scope: Any) -> list[Piece]:
        return [Hole(self.index)]


@dataclass(frozen=True)
class Name(Expression):
    """Something public: `jnp.float32`, `lax.max`."""

    path: str

    def value(self, slots: Sequence[Any]) -> Any:
        return resolved(self.path)

    def pieces(self, scope: Any) -> list[Piece]:
        scope.mention(self.path)
        return [self.path]


@dataclass(frozen=True)
class Attribute(Expression):
    """An attribute: `x.mT`."""

    of: Expression
    name: str

    def value(self, slots: Sequence[Any]) -> Any:
        return getattr(self.of.value(slots), self.name)

    def pieces(self, scope: Any) -> list[Piece]:
        return [*_within(self.of, ATOM, scope), f".{self.name}"]


@dataclass(frozen=True)
class Call(Expression):
    """`function(*args, **kwargs)`; arguments are expressions or plain values."""

    function: Expression
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def value(self, slots: Sequence[Any]) -> Any:
        args = [computed(a, slots) for a in self.args]
        kwargs = {k: computed(v, slots) for k, v in self.kwargs.items()}
        return self.function.value(slots)(*args, **kwargs)

    def pieces(self, scope: Any) -> list[Piece]:
        items = [written(a, scope) for a in self.args]
        items += [[f"{k}=", *written(v, scope)] for k, v in self.kwargs.items()]
        return [*_within(self.function, ATOM, scope), Bracket("(", items, ")", call=True)]


@dataclass(frozen=True)
class Subscript(Expression):
    """`x[1:3, None]`; the key holds ints, slices, None and expressions."""

    of: Expression
    key: tuple[Any, ...]

    def value(self, slots: Sequence[Any]) -> Any:
        key = tuple(computed(k, slots) for k in self.key)
        return self.of.value(slots)[key[0] if len(key) == 1 else key]

    def pieces(self, scope: Any) -> list[Piece]:
        items: list[list[Piece]] = [
            _slice(k, scope) if isinstance(k, slice) else written(k, scope) for k in self.key
        ]
        return [*_within(self.of, ATOM, scope), Bracket("[", items, "]", call=True)]


def _slice(key: slice, scope: Any) -> list[Piece]:
    start, stop, step = (
        [] if n is None else written(n, scope) for n in (key.start, key.stop, key.step)
    )
    return [*start, ":", *stop, *([":", *step] if step else [])]


@dataclass(frozen=True, eq=False)
class Hoisted(Expression):
    """Something that is made once, at the top of the module, and named where it is needed."""

    key: Any
    name: str
    of: Expression

    def value(self, slots: Sequence[Any]) -> Any:
        return self.of.value(slots)

    def pieces(self, scope: Any) -> list[Piece]:
        return [scope.hoisted(self)]


@dataclass(frozen=True)
class Assignment(Expression):
    """`ref[0] = value`: a statement, which gives nothing."""

    to: Subscript
    what: Any

    def value(self, slots: Sequence[Any]) -> Any:
        key = tuple(computed(k, slots) for k in self.to.key)
        self.to.of.value(slots)[key[0] if len(key) == 1 else key] = computed(self.what, slots)

    def pieces(self, scope: Any) -> list[Piece]:
        return [*self.to.pieces(scope), " = ", *written(self.what, scope)]


#: How flat values are grouped: an index, None for nothing, a tuple of these, an `Argument`, or an
#: expression for a value that has no index.
Structure: TypeAlias = Any


@dataclass(frozen=True)
class Argument:
    """In the structure of a function's results: its own argument of that index."""

    index: int


@dataclass(frozen=True, eq=False)
class Made:
    """In the structure of a program's results: what `by` makes of structures.

    Without arguments it is what `by` says.
    """

    by: Expression
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Function(Expression):
    """A Python function with the body of a closed jaxpr.

    `parameters` has a structure of indexes of the jaxpr's arguments for each Python parameter,
    `results` one of indexes of its results; a parameter that is a tuple bears a name of `titles`.
    `captured` are the jaxpr's arguments that are not passed: from their index to the operand's.
    `passed` are those that are, as far as an operand's name would do for the argument too.
    `rules` are methods to call with further functions: `defjvp`. A `kept` function is defined at
    the module's top, once for each `key`, and keeps its name even if another has the same, unless
    that says nothing (not `renamed`).
    `setting` is the context in which JAX traces the body, if that is another than around it. A
    function that does nothing but raise has no jaxpr, and the exception in `raises`.
    """

    jaxpr: Any
    name: str
    parameters: tuple[Structure, ...]
    results: Structure
    titles: tuple[str, ...] = ()
    captured: dict[int, int] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)
    decorators: tuple[Expression, ...] = ()
    rules: tuple[tuple[str, tuple[Function, ...], dict[str, Any]], ...] = ()
    kept: bool = False
    renamed: bool = True
    key: tuple[Any, ...] = ()
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    raises: Expression | None = None

    def value(self, slots: Sequence[Any]) -> Any:
        def function(*args: Any) -> Any:
            flat = {i: slots[k] for i, k in self.captured.items()}
            for structure, arg in zip(self.parameters, args, strict=True):
                flat.update(matched(structure, arg))
            ins = [flat[i] for i in range(len(self.jaxpr.invars))]
            outs = jaxcompat.jaxpr_as_fun(self.jaxpr)(*ins)
            return grouped(self.results, outs, ins, slots)

        function.__name__ = self.name
        for decorator in reversed(self.decorators):
            function = decorator.value(slots)(function)
        for name, functions, kwargs in self.rules:
            getattr(function, name)(*[f.value(slots) for f in functions], **kwargs)
        return function

    def pieces(self, scope: Any) -> list[Piece]:
        return [scope.function(self)]


@dataclass(frozen=True, eq=False)
class Giving(Expression):
    """An expression that gives the equation's results in a structure of its own."""

    of: Expression
    results: Structure

    def value(self, slots: Sequence[Any]) -> Any:
        found = matched(self.results, self.of.value(slots))
        return [found[i] for i in sorted(found)]

    def pieces(self, scope: Any) -> list[Piece]:
        return self.of.pieces(scope)


def matched(structure: Structure, value: Any) -> dict[int, Any]:
    """The parts of a value by the indexes in a structure like its own."""
    if isinstance(structure, int):
        return {structure: value}
    if structure is None:
        return {}
    parts = zip(structure, value, strict=True)
    return {i: v for s, part in parts for i, v in matched(s, part).items()}


def grouped(
    structure: Structure, outs: Sequence[Any], ins: Sequence[Any], slots: Sequence[Any]
) -> Any:
    """Flat values in a structure; the reverse of `matched`."""
    if isinstance(structure, tuple):
        return tuple(grouped(part, outs, ins, slots) for part in structure)
    if isinstance(structure, Argument):
        return ins[structure.index]
    if isinstance(structure, Expression):
        return structure.value(slots)
    return None if structure is None else outs[structure]


_INFIX: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "+": (SUM, operator.add),
    "-": (SUM, operator.sub),
    "*": (PRODUCT, operator.mul),
    "/": (PRODUCT, operator.truediv),
    "//": (PRODUCT, operator.floordiv),
    "%": (PRODUCT, operator.mod),
    "@": (PRODUCT, operator.matmul),
    "**": (POWER, operator.pow),
    "&": (AND, operator.and_),
    "|": (OR, operator.or_),
    "^": (XOR, operator.xor),
    "<<": (SHIFT, operator.lshift),
    ">>": (SHIFT, operator.rshift),
    "==": (COMPARE, operator.eq),
    "!=": (COMPARE, operator.ne),
    "<": (COMPARE, operator.lt),
    "<=": (COMPARE, operator.le),
    ">": (COMPARE, operator.gt),
    ">=": (COMPARE, operator.ge),
}


@dataclass(frozen=True)
class Infix(Expression):
    """A binary operation: `left + right`."""

    symbol: str
    left: Any
    right: Any

    @property
    def level(self) -> int:  # type: ignore[override]
        return _INFIX[self.symbol][0]

    def value(self, slots: Sequence[Any]) -> Any:
        apply = _INFIX[self.symbol][1]
        return apply(computed(self.left, slots), computed(self.right, slots))

    def pieces(self, scope: Any) -> list[Piece]:
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

    def value(self, slots: Sequence[Any]) -> Any:
        apply = operator.neg if self.symbol == "-" else operator.invert
        return apply(self.of.value(slots))

    def pieces(self, scope: Any) -> list[Piece]:
        return [self.symbol, *_within(self.of, POWER, scope)]


def call(path: str, *args: Any, **kwargs: Any) -> Call:
    """A call of something public: `call("jnp.sum", x, axis=0)`."""
    return Call(Name(path), args, kwargs)


def method(x: Expression, name: str, *args: Any, **kwargs: Any) -> Call:
    """A call of a method: `method(x, "reshape", 3, 4)`."""
    return Call(Attribute(x, name), args, kwargs)


def computed(value: Any, slots: Sequence[Any]) -> Any:
    """What an argument computes: an expression, or a tuple, list or dict that may hold some."""
    if isinstance(value, Expression):
        return value.value(slots)
    if type(value) in (tuple, list):
        return type(value)(computed(v, slots) for v in value)
    if type(value) is dict:
        return {k: computed(v, slots) for k, v in value.items()}
    return value


def spelled(value: Any) -> Any:
    """A parameter's value as an expression, or as plain data that holds some.

    TypeError for what has no spelling.
    """
    if isinstance(value, Expression):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(spelled, value))
    if type(value) is dict:
        return {k: spelled(v) for k, v in value.items()}
    spell = spellings.get(type(value)) or spelling_of_kind(value)
    if spell and not (type(value) is float and math.isfinite(value)):
        return spelled(spell(value))
    if spell is None:
        plain(value)
    return value


def written(value: Any, scope: Any) -> list[Piece]:
    """An argument's text: an expression's, or a plain value's, or of a tuple or list of these."""
    if isinstance(value, Expression):
        return value.pieces(scope)
    if type(value) in (tuple, list):
        items = [written(v, scope) for v in value]
        return [sequence(items, value)]
    if type(value) is dict:
        items = [[*written(k, scope), ": ", *written(v, scope)] for k, v in value.items()]
        return [Bracket("{", items, "}")]
    if type(value) is float and math.isfinite(value):
        return [plain(value)]
    spell = spellings.get(type(value)) or spelling_of_kind(value)
    return written(spell(value), scope) if spell else [plain(value)]


#: How a value of a Python type that is no literal is spelled, as an expression. Plug-ins add to
#: it; a type's subclasses are found through `isinstance`, in the order of the table.
spellings: dict[type, Callable[[Any], Any]] = {}


def spelling_of_kind(value: Any) -> Callable[[Any], Any] | None:
    """The spelling of the first type in the table that `value` is an instance of."""
    for kind, spell in spellings.items():
        if isinstance(value, kind):
            return spell
    return None


def plain(value: Any) -> str:
    """The text of None, a bool, a finite number, a string or bytes; TypeError for all else."""
    kind = type(value)
    if kind is str:
        text = repr(value)
        return text if '"' in value else f'"{text[1:-1]}"'.replace("\\'", "'")
    if value is Ellipsis:
        return "..."
    if value is None or kind in (bool, int, float, bytes):
        return repr(value)
    raise TypeError(f"a {kind.__qualname__} has no spelling")


def sequence(items: list[list[Piece]], like: Iterable[Any] = ()) -> Bracket:
    """A tuple of written items, or a list if `like` is one."""
    if isinstance(like, list):
        return Bracket("[", items, "]")
    return Bracket("(", items, ")", single_comma=len(items) == 1)


def _within(value: Any, level: int, scope: Any) -> list[Piece]:
    """`value` in a place that binds as tightly as `level`, in parentheses if it must be."""
    if isinstance(value, Slot):
        return [Hole(value.index, level)]
    pieces = written(value, scope)
    own = value.level if isinstance(value, Expression) else ATOM
    return ["(", *pieces, ")"] if own < level else pieces
