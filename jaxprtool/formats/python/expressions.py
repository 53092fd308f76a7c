"""Python expressions that rules propose, also for literals, parameters and symbols.

A rule builds an expression from `Slot`s (the equation's operands), calls, operators and plain
Python values. Its `pieces` are its text for the layout, with a hole for each operand.
"""

from __future__ import annotations

import ast
import builtins
import enum
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from keyword import iskeyword
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import jax
import jax.extend.core.primitives
import jax.extend.random
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.layout import Bracket, Hole, Piece, identifier, statement
from jaxprtool.ir.dtypes import is_foreign
from jaxprtool.ir.equations import equations, type_of
from jaxprtool.ir.symbols import names_of, names_of_factor
from jaxprtool.jaxcompat import ClosedJaxpr, Jaxpr, Primitive, Var

# --- expressions ----------------------------------------------------------------------------------
# Python expressions that rules propose.

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
    "pl": "from jax.experimental import pallas as pl",
    "pltpu": "from jax.experimental.pallas import tpu as pltpu",
    "plsc": "from jax.experimental.pallas import tpu_sc as plsc",
    "plgpu": "from jax.experimental.pallas import triton as plgpu",
    "mgpu": "from jax.experimental.pallas import mosaic_gpu as mgpu",
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


class NameScope(Protocol):
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

    def pieces(self, scope: NameScope) -> list[Piece]:
        """Return the expression's text."""
        raise NotImplementedError


@dataclass(frozen=True)
class Slot(Expression):
    """The equation's operand with this index."""

    index: int

    def pieces(self, scope: NameScope) -> list[Piece]:
        return [Hole(self.index)]


@dataclass(frozen=True)
class Name(Expression):
    """A public name: `jnp.float32`, `lax.max`."""

    path: str

    def pieces(self, scope: NameScope) -> list[Piece]:
        scope.mention(self.path)
        return [self.path]


@dataclass(frozen=True)
class Attribute(Expression):
    """An attribute: `x.mT`."""

    of: Expression
    name: str

    def pieces(self, scope: NameScope) -> list[Piece]:
        return [*_within(self.of, ATOM, scope), f".{self.name}"]


@dataclass(frozen=True)
class CallExpression(Expression):
    """`function(*args, **kwargs)`; arguments are expressions or plain values."""

    function: Expression
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def pieces(self, scope: NameScope) -> list[Piece]:
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

    def pieces(self, scope: NameScope) -> list[Piece]:
        items: list[list[Piece]] = [
            _slice(k, scope) if isinstance(k, slice) else pieces_of(k, scope) for k in self.key
        ]
        return [*_within(self.of, ATOM, scope), Bracket("[", items, "]", call=True)]


def _slice(key: slice, scope: NameScope) -> list[Piece]:
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

    def pieces(self, scope: NameScope) -> list[Piece]:
        return [scope.module_value(self)]


@dataclass(frozen=True)
class Assignment(Expression):
    """`ref[0] = value`: a statement without a value."""

    to: Subscript
    what: object

    def pieces(self, scope: NameScope) -> list[Piece]:
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

    def pieces(self, scope: NameScope) -> list[Piece]:
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

    def pieces(self, scope: NameScope) -> list[Piece]:
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
class BinaryOperation(Expression):
    """A binary operation: `left + right`."""

    symbol: str
    left: object
    right: object

    @property
    def level(self) -> int:  # type: ignore[override]
        return _INFIX[self.symbol]

    def pieces(self, scope: NameScope) -> list[Piece]:
        level = self.level
        # Comparisons chain, and powers are written without spaces: nested ones get parentheses.
        tight = level + 1 if level != POWER else ATOM
        left = _within(self.left, tight if level in (COMPARE, POWER) else level, scope)
        between = "**" if level == POWER else f" {self.symbol} "
        return [*left, between, *_within(self.right, tight, scope)]


@dataclass(frozen=True)
class UnaryOperation(Expression):
    """A unary operation: `-x`, `~x`."""

    symbol: str
    of: Expression
    level: int = SIGN

    def pieces(self, scope: NameScope) -> list[Piece]:
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
        or next((make for kind, make in constructors.items() if isinstance(value, kind)), None)
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
    constructed = _constructed(value)
    if constructed is not value:
        return as_expression(constructed)
    plain_text(value)
    return value


def pieces_of(value: Any, scope: NameScope) -> list[Piece]:
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
    constructed = _constructed(value)
    return [plain_text(value)] if constructed is value else pieces_of(constructed, scope)


def plain_text(value: Any) -> str:
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


def _within(value: object, level: int, scope: NameScope) -> list[Piece]:
    """Return the text of `value`, in parentheses if its precedence is below `level`."""
    if isinstance(value, Slot):
        return [Hole(value.index, level)]
    pieces = pieces_of(value, scope)
    value_level = value.level if isinstance(value, Expression) else ATOM
    return ["(", *pieces, ")"] if value_level < level else pieces


# --- symbols --------------------------------------------------------------------------------------
# Symbolic dimensions in an emitted module: their expressions and definitions.
#
# A function that uses a symbol first computes it from the shapes of its arguments, as JAX does:
#
#     n = x.shape[0]
#     m = y.shape[0] - 2 * n
#
# A function whose own arguments do not determine its symbols is nested in one whose arguments do.


@dataclass(frozen=True)
class Symbol(Expression):
    """The variable that holds the size of a symbol."""

    name: str

    def pieces(self, scope: NameScope) -> list[Piece]:
        return [scope.symbol(self.name)]


@dataclass(frozen=True)
class ArgumentSize(Expression):
    """A dimension of an argument: `x.shape[0]`."""

    argument: str
    axis: int

    def pieces(self, scope: NameScope) -> list[Piece]:
        return [f"{self.argument}.shape[{self.axis}]"]


@dataclass(frozen=True)
class SizeSolution:
    """The solution for a symbol: the argument size that determines it, equal to `equation`.

    `exact` is True if the equation has a solution for any size.
    """

    size: ArgumentSize
    equation: Any
    value: Any
    exact: bool


# --- writing ----------------------------------------------------------------------------------


def dimension(size: Any) -> Any:
    """Return a symbolic dimension as an expression of its symbols: `2 * n + 1`."""
    terms = jaxcompat.dimension_terms(size)
    # Positive terms first: `3 - n`.
    return _plus(None, sorted(terms, key=lambda term: term[0] < 0))


def _plus(total: Any, terms: Iterable[tuple[int, Any]]) -> Any:
    """Return the sum of an expression and terms with coefficients."""
    for coefficient, factors in terms:
        if total is None:
            total = _product(coefficient, factors)
        else:
            sign = "-" if coefficient < 0 else "+"
            total = BinaryOperation(sign, total, _product(abs(coefficient), factors))
    return 0 if total is None else total


def _product(coefficient: int, factors: Iterable[tuple[Any, int]]) -> Any:
    parts = [_factor(factor, exponent) for factor, exponent in factors]
    if not parts:
        return coefficient
    if coefficient == -1:
        parts[0] = UnaryOperation("-", parts[0])
    elif coefficient != 1:
        parts.insert(0, coefficient)
    return reduce(partial(BinaryOperation, "*"), parts)


def _factor(factor: Any, exponent: int) -> Any:
    if isinstance(factor, str):
        base: Any = Symbol(factor)
    else:
        operation, *operands = factor
        base = _OPERATIONS[operation](*map(dimension, operands))
    return base if exponent == 1 else BinaryOperation("**", base, exponent)


#: Operations of JAX's symbolic dimensions besides products and sums.
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda a, b: BinaryOperation("//", a, b),
    "mod": lambda a, b: BinaryOperation("%", a, b),
    # Python's builtins cannot compare symbolic dimensions when the module is traced with them.
    "max": lambda a, b: call("jax.core.max_dim", a, b),
    "min": lambda a, b: call("jax.core.min_dim", a, b),
}


# --- solving ----------------------------------------------------------------------------------


def solutions(sizes: Iterable[tuple[ArgumentSize, Any]]) -> dict[str, SizeSolution]:
    """Return the solutions of symbols from argument sizes, each based on earlier solutions.

    As in JAX, only equations that are linear in one unknown symbol are solved.
    """
    equations = [(size, equal) for size, equal in sizes if jaxcompat.is_symbolic_dimension(equal)]
    solved: dict[str, SizeSolution] = {}
    while True:
        # A lone symbol needs no arithmetic, so such equations come first.
        todo = sorted(equations, key=lambda e: len(jaxcompat.dimension_terms(e[1])))
        new = next((s for e in todo if (s := _solved(*e, solved)) is not None), None)
        if new is None:
            return solved
        solved[new[0]] = new[1]


def _solved(
    size: ArgumentSize, equation: Any, solved: dict[str, Any]
) -> tuple[str, SizeSolution] | None:
    """Return the only unknown symbol of an equation and its solution, if it is linear in it."""
    terms = jaxcompat.dimension_terms(equation)
    unknown = [t for t in terms if any(names_of_factor(f) - solved.keys() for f, _ in t[1])]
    if len(unknown) != 1:
        return None
    coefficient, ((name, exponent), *more) = unknown[0]
    if more or exponent != 1 or not isinstance(name, str):
        return None
    rest = [term for term in terms if term is not unknown[0]]
    if coefficient == -1:
        value = BinaryOperation("-", _plus(None, rest), size)
    else:
        value = _plus(size, [(-k, factors) for k, factors in rest])
        value = value if coefficient == 1 else BinaryOperation("//", value, coefficient)
    return name, SizeSolution(size, equation, value, coefficient in (1, -1))


# --- functions --------------------------------------------------------------------------------


def sizes_of(variables: Sequence[Var], places: Sequence[str]) -> Iterator[tuple[ArgumentSize, Any]]:
    """Yield each dimension of each argument as an expression and as a size."""
    for var, name in zip(variables, places, strict=True):
        for axis, size in enumerate(getattr(var.aval, "shape", ())):
            yield ArgumentSize(name, axis), size


def determines_its_symbols(function: PythonFunction) -> bool:
    """Return True if the arguments of a function and of its rules determine its symbols."""
    bodies = [function, *(rule for _, rules, _ in function.rules for rule in rules)]
    jaxprs = [jaxcompat.open_jaxpr(f.jaxpr) for f in bodies if f.raises is None]
    return all(
        _needed(jaxpr) <= solutions(sizes_of(jaxpr.invars, [""] * len(jaxpr.invars))).keys()
        for jaxpr in jaxprs
    )


def _needed(jaxpr: Jaxpr) -> set[str]:
    """Return the symbols that an open jaxpr may use, at every depth."""
    symbols = _in_shapes(jaxpr.outvars)
    for eqn in equations(jaxpr):
        symbols |= names_of(list(eqn.params.values())) | _in_shapes(eqn.outvars)
    return symbols


def _in_shapes(variables: Sequence[Var]) -> set[str]:
    return names_of([getattr(v.aval, "shape", ()) for v in variables])


def bindings(
    arguments: Sequence[tuple[Var, str]],
    body: Sequence[str],
    names: dict[str, str],
    scope: NameScope,
) -> list[str]:
    """Return the lines that compute a body's symbols; `names` are their variables.

    `arguments` are variables with their expressions. Raises UnsupportedError if their shapes do not
    determine a symbol.
    """
    tree = ast.parse("\n".join(("def body():", *body)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = {symbol for symbol, name in names.items() if name in used}
    solved = solutions(sizes_of(*zip(*arguments, strict=True))) if arguments else {}
    lines: list[str] = []
    # Last solution first: each is based on the ones before it.
    for symbol, solution in reversed(solved.items()):
        if symbol in missing:
            missing.remove(symbol)
            missing |= names_of(solution.equation) - {symbol}
            lines[:0] = _binding(names[symbol], solution, scope)
    if missing:
        raise _undetermined(sorted(missing), arguments)
    return lines


def _binding(name: str, solution: SizeSolution, scope: NameScope) -> list[str]:
    lines = statement(f"{name} = ", pieces_of(solution.value, scope), "", 1)
    if not solution.exact:
        whole = BinaryOperation("==", solution.size, dimension(solution.equation))
        lines += statement("assert ", whole.pieces(scope), "", 1)
    return lines


def _undetermined(symbols: Sequence[str], arguments: Sequence[tuple[Var, str]]) -> UnsupportedError:
    shapes = [
        f"{place}:{type_of(var.aval)}"
        for var, place in arguments
        if names_of(getattr(var.aval, "shape", ())) & {*symbols}
    ]
    return UnsupportedError(
        f"the size of {', '.join(symbols)} cannot be derived from the shapes of the arguments "
        f"({', '.join(shapes) or 'none has it'})",
        "a symbol can be derived from a size that is linear in it, such as n or 2*n + 1",
    )


# --- values ---------------------------------------------------------------------------------------
# Expressions for parameter values and literals of equations.
#
# This module fills the table by Python type, `expressions.constructors`, for values in JAX
# programs: dtypes, enums, dimension-number records, meshes and shardings, PRNG implementations,
# arrays. Other values are live Python objects and cannot be written.

# --- parameters -------------------------------------------------------------------------------


def dtype_name(dtype: Any) -> Expression:
    """Return a dtype as a function argument: `jnp.float32`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return _dtype(dtype)
    return Name("jnp.bool_" if dtype == np.bool_ else f"jnp.{np.dtype(dtype).name}")


def _dtype(dtype: Any) -> Expression:
    """Return a dtype as a parameter value."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        name = jaxcompat.key_implementation(dtype).name
        # Created outside of any trace, which would otherwise capture the key.
        expression = Attribute(call("jax.random.key", 0, impl=name), "dtype")
        return ModuleValue(("key", name), "key_dtype", expression)
    if is_foreign(dtype):
        raise TypeError(f"the element type {dtype} has no public name")
    if dtype == jax.dtypes.float0:
        return Name("jax.dtypes.float0")
    return call("jnp.dtype", np.dtype(dtype).name)


def _scalar_type(scalar_type: type) -> Expression:
    """Return a dtype that is the class of its scalars in a parameter."""
    if scalar_type.__module__ == "numpy":
        return Name(f"np.{scalar_type.__name__}")
    return dtype_name(np.dtype(scalar_type))


def _float(value: float) -> object:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        bits = np.float64(value).view(np.uint64)
        if bits == np.float64(math.nan).view(np.uint64):
            return Name("jnp.nan")
        return method(method(call("np.uint64", int(bits)), "view", Name("np.float64")), "item")
    return Name("jnp.inf") if value > 0 else UnaryOperation("-", Name("jnp.inf"))


def _enum(member: enum.Enum) -> Expression:
    cls = type(member)
    if cls is jax.memory.Space:
        return Name(f"jax.memory.Space.{member.name}")
    for home, path in ((lax, "lax"), (lax.linalg, "lax.linalg"), (jax, "jax")):
        if getattr(home, cls.__name__, None) is cls:
            return Name(f"{path}.{cls.__name__}.{member.name}")
    raise TypeError(f"{cls.__qualname__} has no public name")


def _record(value: Any) -> Expression:
    cls = type(value)
    if getattr(lax, cls.__name__, None) is not cls:
        raise TypeError(f"{cls.__qualname__} has no public name")
    return _record_of(value, f"lax.{cls.__name__}")


def _record_of(value: Any, path: str) -> Expression:
    """Return a named tuple by the path of its class."""
    defaults = getattr(value, "_field_defaults", {})
    fields = value._asdict().items()
    said = {k: v for k, v in fields if k not in defaults or v != defaults[k]}
    return call(path, **said)


def _types_if_needed(mesh: Mesh | AbstractMesh) -> dict[str, object]:
    if all(t is AxisType.Auto for t in mesh.axis_types):
        return {}
    return {"axis_types": tuple(Name(f"jax.sharding.AxisType.{t.name}") for t in mesh.axis_types)}


def _mesh(mesh: Mesh) -> Expression:
    if mesh.empty:
        return call("jax.sharding.Mesh", call("np.empty", (), Name("np.object_")), ())
    flat = list(mesh.devices.flat)
    everything = call("jax.devices", flat[0].platform)
    ids = [device.id for device in flat]
    if ids == list(range(len(ids))):
        devices: object = Subscript(everything, (slice(None, len(ids)),))
    else:
        devices = [Subscript(everything, (i,)) for i in ids]
    return ModuleValue(mesh, "mesh", _mesh_of(devices, mesh))


def _mesh_of(devices: object, mesh: Mesh | AbstractMesh) -> Expression:
    # Also for one axis: with fewer devices than before, raise an error instead of using a smaller
    # mesh.
    array = method(call("np.array", devices), "reshape", *mesh.axis_sizes)
    return call("jax.sharding.Mesh", array, mesh.axis_names, **_types_if_needed(mesh))


def _abstract_mesh(mesh: AbstractMesh) -> Expression:
    abstract_device = getattr(mesh, "abstract_device", None)
    if abstract_device is not None and not mesh.empty:
        # The kind of devices can only be given by a mesh of such devices.
        everything = call("jax.devices", abstract_device.platform)
        devices = Subscript(everything, (slice(None, mesh.size),))
        return ModuleValue(mesh, "mesh", Attribute(_mesh_of(devices, mesh), "abstract_mesh"))
    expression = call(
        "jax.sharding.AbstractMesh", mesh.axis_sizes, mesh.axis_names, **_types_if_needed(mesh)
    )
    return ModuleValue(mesh, "mesh", expression)


def _partition_spec(spec: PartitionSpec) -> Expression:
    marks = {
        name: frozenset(getattr(spec, name))
        for name in ("reduced", "unreduced")
        if getattr(spec, name, None)
    }
    free = PartitionSpec.UNCONSTRAINED
    parts = [Name("P.UNCONSTRAINED") if part is free else part for part in spec]
    return call("P", *parts, **marks)


def _named_sharding(sharding: NamedSharding) -> Expression:
    memory_kind = sharding.memory_kind
    more = {} if memory_kind is None else {"memory_kind": memory_kind}
    return call("jax.sharding.NamedSharding", sharding.mesh, sharding.spec, **more)


def _single_device(sharding: SingleDeviceSharding) -> Expression:
    (device,) = sharding.device_set
    return call("jax.sharding.SingleDeviceSharding", device)


def _prng(impl: Any) -> Expression:
    for name in ("threefry_prng_impl", "rbg_prng_impl", "unsafe_rbg_prng_impl"):
        if getattr(jax.extend.random, name) is impl:
            return Name(f"rng.{name}")
    raise TypeError(f"the PRNG implementation {impl.name} has no public name")


def array(value: Any, namespace: str = "np") -> Expression:
    """Return a small array: `np.array([1.0, 2.0], np.float32)`, or from its bits if it must be."""
    value = np.asarray(value)
    if not value.size:
        return call(f"{namespace}.zeros", value.shape, dtype_name(value.dtype))
    if not _same_bits(np.array(nested(value), value.dtype), value):
        expression = _from_bits(value)
        return call("jnp.asarray", expression) if namespace == "jnp" else expression
    if namespace == "jnp":
        return call("jnp.array", nested(value), dtype_name(value.dtype))
    return call("np.array", nested(value), _numpy_dtype(value.dtype))


def _from_bits(value: np.ndarray) -> Expression:
    """Return an array by the bits of its numbers: NaNs differ in bits that no text shows."""
    # A complex number is two words.
    size = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(value).reshape(-1).view(f"u{size}")
    listed = call("np.array", words.tolist(), Name(f"np.{words.dtype.name}"))
    expression = method(listed, "view", _numpy_dtype(value.dtype))
    return expression if value.ndim == 1 else method(expression, "reshape", value.shape)


def _word(scalar: Any) -> Expression:
    """Return a NumPy scalar by its bits: `np.uint16(32705).view(jnp.bfloat16)`."""
    word = np.asarray(scalar).view(f"u{scalar.dtype.itemsize}")[()]
    expression = call(f"np.{word.dtype.name}", int(word))
    return method(expression, "view", _numpy_dtype(scalar.dtype))


def _numpy_dtype(dtype: np.dtype) -> Expression:
    """Return a dtype for a function of NumPy: `np.float32`, `jnp.bfloat16`."""
    module = "np" if dtype.type.__module__ == "numpy" else "jnp"
    return Name("np.bool_" if dtype == np.bool_ else f"{module}.{dtype.name}")


def nested(value: np.ndarray) -> Any:
    """Return the array's elements in nested lists, as the shortest exact numbers."""
    if value.ndim:
        return [nested(part) for part in value]
    return python_number(value[()])


_PRNG_IMPLEMENTATION = type(next(iter(jaxcompat.key_implementations().values())))


def primitive(value: Primitive) -> Expression:
    """Return a primitive by its public name; TypeError if it has none."""
    for path, home in (
        ("primitives", jax.extend.core.primitives),
        ("lax", lax),
        ("lax.linalg", lax.linalg),
        ("rng", jax.extend.random),
        *_sparse(),
    ):
        for name in (f"{value.name.replace('-', '_')}_p", *_OTHER_NAMES):
            if vars(home).get(name) is value:
                return Name(f"{path}.{name}")
    raise TypeError(f"the primitive {value.name} is not public")


def _sparse() -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules of JAX's sparse matrices if they are imported."""
    for path in ("sparse", "sparse.bcoo"):
        if module := sys.modules.get(f"jax.experimental.{path}"):
            yield path, module


#: Primitives with a different public name.
_OTHER_NAMES = ("linear_solve_p", "remat_p", "add_jaxvals_p")


def shape_of(aval: Any) -> Expression:
    """Return a type as an abstract argument; raise TypeError if it is not a plain array's."""
    if not hasattr(aval, "dtype"):
        raise TypeError(f"the type {type_of(aval)} has no public name")
    weak = {"weak_type": True} if aval.weak_type else {}
    return call("jax.ShapeDtypeStruct", aval.shape, dtype_name(aval.dtype), **weak)


def _jaxpr(jaxpr: Any) -> Expression:
    """Return a jaxpr as the trace of a local function, with `.jaxpr` for an open one."""
    closed = jaxcompat.close_jaxpr(jaxpr)
    if closed.consts:
        raise TypeError("a jaxpr with constants cannot be written")
    name = identifier(jaxcompat.open_jaxpr(closed).debug_info.func_name)
    results = range(len(closed.outvars))
    function = PythonFunction(closed, name, tuple(range(len(closed.invars))), tuple(results))
    shapes = [shape_of(v.aval) for v in closed.invars]
    expression = CallExpression(CallExpression(Name("jax.make_jaxpr"), (function,)), tuple(shapes))
    return expression if jaxpr is closed else Attribute(expression, "jaxpr")


late_constructors.update(
    {
        f"jax.experimental.{path}": partial(_record_of, path=path)
        for path in ("sparse.util.SparseInfo", "sparse.coo.COOInfo")
    }
)
constructors.update(
    {
        # Before `float` and `complex`, of which f64 and c128 numbers are instances.
        np.floating: lambda value: _typed(value, python_number(value)),
        np.complexfloating: lambda value: _typed(value, python_number(value)),
        float: _float,
        complex: lambda value: call("complex", value.real, value.imag),
        np.bool_: bool,
        np.integer: int,
        jaxcompat.SymbolicDimension: dimension,
        np.dtype: _dtype,
        type: _scalar_type,
        jaxcompat.KeyType: _dtype,
        enum.Enum: _enum,
        lax.GatherDimensionNumbers: _record,
        lax.ScatterDimensionNumbers: _record,
        lax.ConvDimensionNumbers: _record,
        lax.RaggedDotDimensionNumbers: _record,
        Mesh: _mesh,
        AbstractMesh: _abstract_mesh,
        PartitionSpec: _partition_spec,
        NamedSharding: _named_sharding,
        SingleDeviceSharding: _single_device,
        jax.Device: lambda value: Subscript(call("jax.devices", value.platform), (value.id,)),
        _PRNG_IMPLEMENTATION: _prng,
        frozenset: lambda value: call("frozenset", *([sorted(value)] if value else ())),
        slice: lambda value: call("slice", value.start, value.stop, value.step),
        np.ndarray: array,
        np.generic: _word,  # of another type, such as bfloat16
        Primitive: primitive,
        ClosedJaxpr: _jaxpr,
        Jaxpr: _jaxpr,
    }
)


# --- literals ---------------------------------------------------------------------------------


def python_number(value: Any) -> Any:
    """Return the Python number with the shortest text that reproduces a NumPy scalar's bits."""
    dtype = value.dtype
    if dtype == np.bool_:
        return bool(value)
    if np.issubdtype(dtype, np.integer) or jax.dtypes.issubdtype(dtype, np.integer):
        return int(value)
    if np.issubdtype(dtype, np.complexfloating):
        return complex(python_number(value.real), python_number(value.imag))
    if value != value:
        return math.nan  # whatever its bits: `_typed` and `array` compare them
    short = float(str(value))
    with np.errstate(over="ignore"):
        return short if _same_bits(dtype.type(short), value) else float(value)


def _same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@dataclass(frozen=True)
class LiteralText:
    """A literal operand: as a plain Python number, if possible, and with its type.

    `key` distinguishes literals that a rule may treat differently.
    """

    plain: Any
    typed: Any
    key: tuple[object, ...]

    def of(self, typed: bool) -> object:
        """Return the plain number, or the expression with the type."""
        return self.typed if typed else self.plain


def literal(atom: Any) -> LiteralText:
    """Return the texts of a jaxpr's literal."""
    aval, value = atom.aval, atom.val
    if aval.dtype == jax.dtypes.float0:
        nothing = call("np.zeros", aval.shape, Name("jax.dtypes.float0"))
        return LiteralText(nothing, nothing, ("float0",))
    weak = bool(getattr(aval, "weak_type", False))
    scalar = np.asarray(value, aval.dtype)[()]
    bare = python_number(scalar) if not weak else _python_number(value, scalar)
    special = bare in (0, 1) if not isinstance(bare, complex) else False
    wide = isinstance(bare, int) and not -(2**31) <= bare < 2**31
    key = (aval.dtype, weak, bare if special else None, str(bare) if wide else None)
    exact = _same_bits(np.asarray(bare).astype(aval.dtype), scalar)
    typed = bare if weak and exact else _typed(scalar, bare)
    return LiteralText(bare if exact else typed, typed, (*key, exact))


def _python_number(value: Any, scalar: Any) -> Any:
    """Return a weakly typed literal with all digits of its Python number."""
    scalar_types: tuple[Any, ...] = (bool, int, float, complex)
    numbers = (scalar_type(value) for scalar_type in scalar_types if isinstance(value, scalar_type))
    return next(numbers, None) if isinstance(value, scalar_types) else python_number(scalar)


def _typed(scalar: Any, bare: Any) -> Any:
    """Return a NumPy scalar: `np.float32(0.5)`, or from its bits if it must be."""
    dtype = scalar.dtype
    if not _same_bits(np.asarray(bare).astype(dtype), scalar):
        if dtype.kind == "c":
            return Subscript(_from_bits(np.asarray(scalar)[None]), (0,))
        return _word(scalar)
    if dtype.type.__module__ == "numpy":
        return call("np.bool_" if dtype == np.bool_ else f"np.{dtype.name}", bare)
    return call("np.array", bare, Name(f"jnp.{dtype.name}"))
