"""The parts of a rewrite: the user's functions, traced at declared types to graphs.

A `Definition` has the forms of a pattern at given types, its replacement there, and the user's
check.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    PluginError,
    UserFunctionError,
    described,
    did_you_mean,
)
from jaxprtool.ir import dtypes
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import (
    free_variables,
    is_array,
    named,
    needed_equations,
    type_of,
    variables,
)
from jaxprtool.ir.keys import same_array
from jaxprtool.ir.notation import expressions, types
from jaxprtool.ir.notation.types import SizeExpression
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import ShardMap, holds_jaxpr, regions, sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.primitives import sow_p

# --- definition -----------------------------------------------------------------------------------
# The parts of a rewrite: the user's functions, and the types that they are declared for.


@dataclass(frozen=True, eq=False)
class Match:
    """One place in a program where a pattern was found.

    Attributes:
        rewrite: The name of the rewrite.
        types: The type of each argument of the pattern, by its name (`q`, `params['w']`), with
            `.shape`, `.dtype` and `.ndim`.
        values: The values of those arguments that are constants: an array, or a NumPy scalar, also
            for an array filled with one number.
        sizes: The sizes that the pattern names, by name.
        equations: The equations of the program to replace.
        source: The user's source line of the last of these, `file.py:12`; None if unknown.
    """

    rewrite: str
    types: dict[str, Aval]
    values: dict[str, Any]
    sizes: dict[str, Any]
    equations: tuple[JaxprEqn, ...]
    source: str | None

    def __str__(self) -> str:
        """Return a text such as `attention(q: f32[8,64], k: f32[8,64]) at model.py:12`."""
        shown = ", ".join(
            f"{name}={self.values[name]}"
            if getattr(self.values.get(name), "shape", None) == ()
            else f"{name}: {type_of(aval)}"
            for name, aval in self.types.items()
        )
        return f"{self.rewrite}({shown})" + (f" at {self.source}" if self.source else "")


UserFunction = Callable[..., Any]
Check = Callable[[Match], bool]


class Definition:
    """A user's pattern, its replacement and its condition."""

    name: str

    def __init__(
        self,
        pattern: UserFunction,
        args: Sequence[object],
        kwargs: dict[str, object],
        name: str | None,
    ):
        self.name = name or getattr(pattern, "__name__", "rewrite").strip("<>")
        self.__doc__ = pattern.__doc__
        self.pattern = pattern
        self.replacement: UserFunction | None = None
        self.condition: Check | None = None
        example, self.arg_names = _arguments(self.name, pattern, args, kwargs)
        leaves, self.in_tree = jax.tree.flatten(example)
        self.declarations = [
            declared(leaf, f"argument {path} of rewrite '{self.name}'")
            for leaf, path in zip(leaves, self.arg_names, strict=True)
        ]
        self._skeletons: dict[Hashable, list[Pattern]] = {}
        self._check_pattern()

    def to(self, replacement: UserFunction) -> UserFunction:
        """Set the replacement of the pattern, as a decorator; it takes the same arguments."""
        self.replacement = replacement
        return replacement

    def check(self, condition: Check) -> Check:
        """Set the check, as a decorator: a function that returns True if a match is replaced."""
        self.condition = condition
        return condition

    def skeletons(self, floats: np.dtype | None, more: int, symbolic: bool) -> list[Pattern]:
        """Return the forms of the pattern at example types.

        The types have dtype `floats` for floats, and `more` dimensions for an ellipsis. With
        `symbolic`, forms with symbolic sizes are included.
        """
        key = floats, more, symbolic, dtypes.x64_enabled()
        if key not in self._skeletons:
            forms = self._forms(distinct_sizes(self.declarations), floats, more)
            if symbolic:
                names = size_names(self.declarations)
                forms += self._forms(symbols_by_name(names), floats, more)
            self._skeletons[key] = forms
        return self._skeletons[key]

    def _forms(self, sizes: dict[str, Any], floats: np.dtype | None, more: int) -> list[Pattern]:
        forms = []
        for weak in (False, True) if any(d.is_scalar for d in self.declarations) else (False,):
            avals = tuple(d.aval(sizes, floats, more, weak) for d in self.declarations)
            at = self.pattern_at(avals, None)
            forms += [] if at is None else at[1]
        return forms

    def pattern_at(
        self, avals: Sequence[Aval], like: JaxprEqn | None
    ) -> tuple[TracedFunction, list[Pattern]] | None:
        """Return the pattern at these types, traced in the context of an equation, and its forms.

        Returns None where the pattern raises, or does not need all its arguments.
        """
        try:
            traced = TracedFunction(self.pattern, self.in_tree, avals, like)
        except Exception:  # the user's function does not support these types
            return None
        forms = [form for form in map(Pattern, traced.forms()) if _fault(form) is None]
        return (traced, forms) if forms else None

    def replacement_at(
        self,
        avals: Sequence[Aval],
        like: JaxprEqn,
        match: Match,
        pattern: TracedFunction,
        results: Sequence[Aval | None],
    ) -> ClosedJaxpr:
        """Return the jaxpr of the replacement at these types, with the wanted results.

        `results` are the types of all results, None for unwanted ones.
        """
        assert self.replacement is not None
        what = f"the replacement of rewrite '{self.name}'"
        try:
            traced = TracedFunction(self.replacement, self.in_tree, avals, like, results)
        except JaxprToolError:
            raise
        except Exception as error:
            raise UserFunctionError(
                f"{what} raised {described(error)} for {match}",
                f"exclude such matches with a check (@{self.name}.check)",
            ) from error
        if traced.out_tree != pattern.out_tree:
            raise PluginError(
                f"{what} returns {traced.out_tree}, but the pattern returns {pattern.out_tree}"
            )
        for new, old in zip(traced.out_avals, results, strict=True):
            if old is not None and new != old:
                types_of = f"{type_of(new)}, but the pattern returns {type_of(old)}"
                raise PluginError(f"{what} returns {types_of}, for {match}")
        if traced.closed.effects:
            raise PluginError(f"{what} has effects: {_shown_effects(traced.closed)}")
        return dce_body(traced.closed, [old is not None for old in results], instantiate=True)[0]

    def accepts(self, match: Match) -> bool:
        """Return True if the user's check, if any, accepts a match."""
        if self.condition is None:
            return True
        try:
            return bool(self.condition(match))
        except Exception as error:
            raise PluginError(
                f"the check of rewrite '{self.name}' raised {described(error)} for {match}"
            ) from error

    def _check_pattern(self) -> None:
        """Raise if the function is not a valid pattern."""
        sizes = distinct_sizes(self.declarations)
        avals = [d.aval(sizes) for d in self.declarations]
        what = f"the pattern of rewrite '{self.name}'"
        try:
            traced = TracedFunction(self.pattern, self.in_tree, avals)
        except Exception as error:
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            hint = f"it was traced with {shown}; use other sizes with f32[8,64]" if shown else None
            raise UserFunctionError(f"{what} raised {described(error)}", hint) from error
        if traced.closed.effects:
            raise PluginError(f"{what} has effects: {_shown_effects(traced.closed)}")
        form = Pattern(traced.closed)
        if fault := _fault(form):
            unused = list(compress(self.arg_names, [not flag for flag in form.used_inputs]))
            shown = f": {', '.join(unused)}" if unused and form.eqns else ""
            raise PluginError(f"{what} {fault}{shown}")


def _fault(form: Pattern) -> str | None:
    """Return why a graph is not a valid pattern; None if it is."""
    if not any(form.computed):
        return "computes nothing: its results are arguments or constants"
    if any(eqn.effects or eqn.primitive is sow_p for eqn in form.eqns):
        return "has effects, or calls sow"
    if not all(form.used_inputs):
        return "does not use all its arguments"
    if not form.is_connected():
        return "has parts that share no value; make each a separate pattern"
    return None


def _shown_effects(closed: ClosedJaxpr) -> str:
    return ", ".join(named(eqn) for eqn in closed.eqns if eqn.effects)


def _arguments(
    name: str, fun: UserFunction, args: Sequence[object], kwargs: dict[str, object]
) -> tuple[object, list[str]]:
    """Return the example arguments of a pattern as `(args, kwargs)`, and a name for each leaf."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ArgumentsError(
            f"the types given do not fit the pattern of rewrite '{name}': {error}"
        ) from None
    bound_values = []
    for parameter in bound.signature.parameters.values():
        value = bound.arguments.get(parameter.name, ())
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound_values += [(f"{parameter.name}[{i}]", element) for i, element in enumerate(value)]
        elif parameter.name in bound.arguments and parameter.kind is not parameter.VAR_KEYWORD:
            bound_values.append((parameter.name, value))
    bound_values = bound_values[: len(bound.args)] + sorted(bound.kwargs.items())
    names = [
        path + jax.tree_util.keystr(inner)
        for path, value in bound_values
        for inner, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]
    return (bound.args, bound.kwargs), names


# --- types ----------------------------------------------------------------------------------------
# The declared types of a pattern's arguments: examples, and the requirements on a match.
#
# A declaration is text in the notation of a jaxpr, `f32[n,d]`, or anything with a shape and a
# dtype, or a number. It matches arrays of the same kind of dtype (`f32` for every float, `i32` for
# every integer) with the same number of dimensions, or at least as many if the text begins with an
# ellipsis: `f32[...,n,d]`. A number is an example of a size. A name is one size, the same wherever
# it occurs in the pattern, and an expression of names (`2*n`) is computed from these.

_HINT = "write types as a jaxpr prints them: f32[n,d], bf16[...,8,n], i32[]"

_KINDS = (jax.dtypes.prng_key, jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclass(frozen=True)
class Declared:
    """One declared type."""

    dtype: np.dtype
    dims: tuple[int | SizeExpression, ...]
    more_dims: bool = False

    @property
    def is_scalar(self) -> bool:
        return not self.dims and not self.more_dims

    def aval(
        self,
        sizes: Mapping[str, Any],
        floats: np.dtype | None = None,
        more: int = 0,
        weak: bool = False,
    ) -> Aval:
        """Return a type of this declaration, with these sizes for the names.

        `floats` is the dtype of those declared as floats, if not their own; `more` is how many
        dimensions an ellipsis represents; with `weak`, scalars are weakly typed, as Python's are.
        """
        leading = tuple(range(2, 2 + more)) if self.more_dims else ()
        dtype = floats if floats is not None and kind(self.dtype) is jnp.floating else self.dtype
        shape = (*leading, *(_size(dim, sizes) for dim in self.dims))
        return jaxcompat.array_type(shape, dtype, weak and self.is_scalar)


def declared(value: object, what: str) -> Declared:
    """Return the declaration of a leaf of the example arguments; `what` names it in messages.

    Raises ArgumentsError if it is not a declaration.
    """
    if isinstance(value, str):
        return _read(value, what)
    try:
        aval = jax.api_util.shaped_abstractify(value)
        return Declared(aval.dtype, tuple(aval.shape))
    except (TypeError, AttributeError):
        type_name = type(value).__name__
        raise ArgumentsError(
            f"{what} is declared by a {type_name}, which is not a type", _HINT
        ) from None


def kind(dtype: np.dtype) -> Any:
    """Return the kind of a dtype; dtypes of the same kind match each other."""
    return next((group for group in _KINDS if jax.dtypes.issubdtype(dtype, group)), dtype)


def size_names(declarations: Sequence[Declared]) -> list[str]:
    """Return the names of sizes in declarations, in order."""
    sizes = (dim for d in declarations for dim in d.dims if isinstance(dim, SizeExpression))
    return list(dict.fromkeys(name for size in sizes for name in size.names))


def distinct_sizes(declarations: Sequence[Declared]) -> dict[str, int]:
    """Return a distinct size for each name that is unlikely to occur otherwise."""
    primes = (n for n in count(11) if all(n % d for d in range(2, n)))
    return dict(zip(size_names(declarations), primes, strict=False))


def symbols_by_name(names: Sequence[str]) -> dict[str, Any]:
    """Return a symbolic size for each name."""
    from jax import export  # seldom needed, and slow to import

    if not names:
        return {}
    symbols = export.symbolic_shape(", ".join(f"size{i}" for i in range(len(names))))
    return dict(zip(names, symbols, strict=True))


def sizes_in(declarations: Sequence[Declared], avals: Sequence[Aval]) -> dict[str, Any] | None:
    """Return the sizes by name with which these types fit the declarations; None if they do not."""
    sizes: dict[str, Any] = {}
    expected: list[tuple[SizeExpression, Any]] = []
    for declaration, aval in zip(declarations, avals, strict=True):
        rank = len(declaration.dims)
        if aval.ndim < rank or (aval.ndim > rank and not declaration.more_dims):
            return None
        if kind(aval.dtype) is not kind(declaration.dtype):
            return None
        for dim, size in zip(declaration.dims, aval.shape[aval.ndim - rank :], strict=True):
            if isinstance(dim, SizeExpression) and isinstance(dim.node, ast.Name):
                if not _equal(sizes.setdefault(dim.node.id, size), size):
                    return None
            elif isinstance(dim, SizeExpression):
                expected.append((dim, size))
    return sizes if all(_equal(dim(sizes), size) for dim, size in expected) else None


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except Exception:  # for symbolic dimensions, equality may be undecidable
        return False


def _size(dim: int | SizeExpression, sizes: Mapping[str, Any]) -> Any:
    return dim(sizes) if isinstance(dim, SizeExpression) else dim


def _read(text: str, what: str) -> Declared:
    source = expressions.parse_arguments(text, f"the type of {what}", ArgumentsError, types=True)
    if len(source.args) != 1 or source.keywords:
        raise ArgumentsError(f"the type of {what} is '{text}', which is not a single type", _HINT)
    (node,) = source.args
    where = source.type_at(node)
    if where is None:
        raise source.not_allowed(node, _HINT)
    try:
        parsed = types.parse_type(source.text[where])
    except ValueError as error:
        raise source.fail(node, str(error), _HINT) from None
    if parsed.memory_space or parsed.axes:
        raise source.fail(node, f"'{source.segment(node)}' has more than a dtype and sizes", _HINT)
    if parsed.dtype not in dtypes.array_dtypes():
        near = did_you_mean(parsed.dtype, dtypes.array_dtypes())
        raise source.fail(node, f"'{parsed.dtype}' is not a dtype", near or _HINT)
    more = bool(parsed.dims) and parsed.dims[0].size == "..."
    sizes = tuple(_dimension(source, where.start, dim) for dim in parsed.dims[more:])
    declaration = Declared(dtypes.array_dtypes()[parsed.dtype], sizes, more)
    declaration.aval(dict.fromkeys(size_names([declaration]), 97))
    return declaration


def _dimension(
    source: expressions.ParsedArguments, start: int, dim: types.Dimension
) -> int | SizeExpression:
    size = types.size_in(source, start, dim)
    try:
        value = size(dict.fromkeys(size.names, 97))
    except ArgumentsError:
        value = -1
    if value < 0 or dim.axes:
        hint = "a size must be a number, a name, or an expression of names such as 2*n"
        raise source.fail_at(start + dim.at, f"'{dim.size}' is not a size", hint)
    return size if size.names else value


# --- tracing --------------------------------------------------------------------------------------
# A user's pattern or replacement, traced at given types to jaxprs that can be matched.

#: Calls are inlined, in patterns as in programs.
PLAIN_CALLS = Inline()
#: A gradient has the bodies of functions with custom derivatives instead of the calls.
ALL_CALLS = Inline(calls=("jit", "closed_call", "custom_jvp", "custom_vjp"))


class TracedFunction:
    """A function's closed jaxpr at some types, and the structure of its results."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_tree: PyTreeDef,
        avals: Sequence[Aval],
        like: JaxprEqn | None = None,
        results: Sequence[Aval | None] | None = None,
    ):
        """Trace the function in the context of an equation, with results as weak as `results`.

        Raises whatever the function raises.
        """
        trees = []

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            args, kwargs = jax.tree.unflatten(in_tree, leaves)
            outs, tree = jax.tree.flatten(fun(*args, **kwargs))
            trees.append(tree)
            outs = [x if isinstance(x, jax.core.Tracer) else jnp.asarray(x) for x in outs]
            if results is None or len(results) != len(outs):
                return outs
            return [_with_weakness(x, aval) for x, aval in zip(outs, results, strict=True)]

        with _wide(avals):
            closed = jaxcompat.trace_in_setting(flat, avals, like)
        self.closed = inlined(closed, PLAIN_CALLS)
        self.out_tree = trees[-1]

    @property
    def out_avals(self) -> list[Aval]:
        return [v.aval for v in self.closed.outvars]

    def forms(self) -> list[ClosedJaxpr]:
        """Return the jaxprs to search for: with custom derivatives as calls, and inlined."""
        bare = inlined(self.closed, ALL_CALLS)
        return [self.closed] if bare is self.closed else [self.closed, bare]


def inlined(closed: ClosedJaxpr, inline: Inline) -> ClosedJaxpr:
    """Return a closed jaxpr after inlining; the same object if there is nothing to inline."""
    return inline(Program("pattern", closed, None, None, (), ())).jaxpr


def _with_weakness(x: jax.Array, aval: Aval | None) -> jax.Array:
    """Return a value with the expected weak or strong type, if that is the only difference."""
    now = jax.typeof(x)
    if aval is None or not hasattr(now, "weak_type"):
        return x
    if now.weak_type == aval.weak_type or now.strip_weak_type() != aval.strip_weak_type():
        return x
    convert = jax.lax.convert_element_type_p.bind
    return convert(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def _wide(avals: Sequence[Aval]) -> AbstractContextManager[None]:
    """Return a context in which 64-bit types are kept, whatever JAX's configuration is."""
    narrow = not any(dtypes.needs_x64(aval.dtype) for aval in avals)
    return nullcontext() if narrow else jax.enable_x64(True)


# --- graphs ---------------------------------------------------------------------------------------
# Dataflow graphs: a pattern, and a body of a program, indexed alike.
#
# Both are lists of equations with, for each variable, the equation that defines it. Both track
# values filled with one number: literals, scalar constants, and broadcasts of these. JAX moves
# these about, into constants or out of loops, so they are compared by value.


class DataflowGraph(DefUse):
    """The equations of a jaxpr, with the definitions and uses of its variables.

    `known` has the arguments of the jaxpr that are filled with one number, with that number.
    """

    def __init__(self, jaxpr: AnyJaxpr, known: Mapping[Var, np.generic | None] | None = None):
        body = jaxcompat.open_jaxpr(jaxpr)
        super().__init__(body.eqns)
        self.inputs: list[Var] = list(body.invars)
        self.outputs: list[Atom] = list(body.outvars)
        self.results = set(variables(self.outputs))
        consts = jaxpr.consts if isinstance(jaxpr, jaxcompat.ClosedJaxpr) else ()
        #: The values of its constants; those of an open jaxpr are not known.
        self.constants: dict[Var, Any] = dict(zip(body.constvars, consts, strict=False))
        self.known: Mapping[Var, np.generic | None] = known or {}

    @cached_property
    def by_primitive(self) -> dict[str, list[int]]:
        """The positions of the equations of each primitive, in order."""
        positions: dict[str, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            positions[eqn.primitive.name].append(i)
        return dict(positions)

    @cached_property
    def dead(self) -> frozenset[int]:
        """The positions of dead equations; gradients are full of them."""
        needed = set(map(id, needed_equations(self.eqns, self.outputs, _has_effects)))
        return frozenset(i for i, eqn in enumerate(self.eqns) if id(eqn) not in needed)

    def dead_after(self, removed: frozenset[int]) -> set[int]:
        """Return the dead equations that depend on results of these equations."""
        dead: set[int] = set()
        todo = list(removed)
        while todo:
            for v in self.eqns[todo.pop()].outvars:
                new = [i for i in self.readers(v) if i in self.dead and i not in dead]
                dead.update(new)
                todo += new
        return dead - removed

    def number(self, atom: Atom) -> Any:
        """Return the number that fills a value, as a NumPy scalar; None if unknown."""
        if type(atom) is Literal:
            return np.asarray(atom.val).astype(atom.aval.dtype)[()]
        return self._number(atom)

    def value(self, atom: Atom) -> Any:
        """Return the number that fills a value, or a constant array; None if unknown."""
        number = self.number(atom)
        return number if number is not None else self.constants.get(atom)

    @cached_method
    def _number(self, var: Var) -> Any:
        if var in self.known:
            return self.known[var]
        if var in self.constants:
            value = self.constants[var]
            if getattr(var.aval, "shape", None) == () and _is_plain(var.aval):
                return np.asarray(value).astype(var.aval.dtype)[()]
            return None
        eqn = self.equation(var)
        if eqn is None:
            return None
        moves = traits(eqn).gives in ("layout", "part")
        if not (moves or eqn.primitive.name == "convert_element_type") or len(eqn.invars) != 1:
            return None
        number = self.number(eqn.invars[0])
        dtype = var.aval.dtype
        if number is None or number.dtype == dtype:
            return number
        # Of conversions to another type those of integers are exact, or wrap as NumPy's do.
        integers = np.issubdtype(number.dtype, np.integer) and np.issubdtype(dtype, np.integer)
        return number.astype(dtype) if integers else None


class Pattern(DataflowGraph):
    """A pattern's graph, without equations that its results do not need.

    `root` is the equation at which a search starts: the last one.
    """

    def __init__(self, closed: ClosedJaxpr):
        super().__init__(closed)
        varying: set[Var] = set(self.inputs)
        for eqn in self.eqns:
            if any(v in varying for v in eqn.invars if type(v) is not Literal):
                varying.update(eqn.outvars)
        #: Which results are computed from arguments: the others are arguments, or constants.
        self.computed = [
            type(v) is not Literal and v in varying and v not in self.inputs for v in self.outputs
        ]
        computed = compress(self.outputs, self.computed)
        self.eqns = needed_equations(self.eqns, computed, _has_effects)
        used = free_variables(self.eqns)
        self.used_inputs = [v in used for v in self.inputs]
        self.root = len(self.eqns) - 1
        #: The equations that depend on no argument.
        self.constant_positions = [
            i for i, eqn in enumerate(self.eqns) if not any(v in varying for v in eqn.outvars)
        ]

    @cached_property
    def needed(self) -> frozenset[str]:
        """The primitives that a body must contain to have a match."""
        numbers = (i for i, eqn in enumerate(self.eqns) if self.number(eqn.outvars[0]) is None)
        return frozenset(self.eqns[i].primitive.name for i in numbers)

    @cached_property
    def skeleton(self) -> Hashable:
        """The graph without its types and parameters: a key for a first, rough search."""
        number = {v: i for i, v in enumerate(self.inputs)}
        rows = []
        for eqn in self.eqns:
            operands = [number.get(v, -1) if type(v) is not Literal else -1 for v in eqn.invars]
            rows.append((eqn.primitive.name, tuple(operands), len(eqn.outvars)))
            for v in eqn.outvars:
                number[v] = len(number)
        outs = [number[v] for v, flag in zip(self.outputs, self.computed, strict=True) if flag]
        return tuple(rows), tuple(outs)

    def is_connected(self) -> bool:
        """Return True if each equation can be reached from the root through shared values."""
        reached: set[Var] = set()
        near, left = [self.eqns[self.root]], self.eqns[: self.root]
        while near:
            reached.update(v for eqn in near for v in _variables(eqn))
            near = [eqn for eqn in left if not reached.isdisjoint(_variables(eqn))]
            left = [eqn for eqn in left if reached.isdisjoint(_variables(eqn))]
        return not left


def _variables(eqn: JaxprEqn) -> list[Var]:
    return variables((*eqn.invars, *eqn.outvars))


def _has_effects(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects)


def _is_plain(aval: Aval) -> bool:
    return is_array(aval) and isinstance(aval.dtype, np.dtype)


# --- numbers passed to bodies ------------------------------------------------------------------


def known_arguments(holders: Mapping[AnyJaxpr, Sequence[JaxprEqn]]) -> dict[Var, np.generic | None]:
    """Return the arguments of bodies, each with the number that always fills it, or None.

    A loop gets its constants, and a call its operands, from outside; where these are known to be
    filled with a number, so is the argument. `holders` has the equations in each body that hold
    bodies, as `bodies_in` returns them.
    """
    numbers: dict[Var, np.generic | None] = {}
    changed = True
    while changed:  # a number becomes unknown if callers differ, and so do those derived from it
        changed = False
        for body, eqns in holders.items():
            graph = DataflowGraph(body, numbers)
            for eqn in eqns:
                for var, atom in _body_arguments(eqn):
                    number = None if atom is None else graph.number(atom)
                    previous = numbers.setdefault(var, number)
                    if previous is not None and not same_number(previous, number):
                        numbers[var] = None
                        changed = True
    return numbers


def bodies_in(jaxpr: AnyJaxpr) -> dict[AnyJaxpr, list[JaxprEqn]]:
    """Return a jaxpr and all bodies in it, outer before inner, with their structured equations."""
    holders: dict[AnyJaxpr, list[JaxprEqn]] = {}
    todo = [jaxpr]
    for body in todo:
        if body not in holders:
            eqns = [e for e in body.eqns if e.params and holds_jaxpr(e.params.values())]
            holders[body] = eqns
            todo += [inner for eqn in eqns for _, inner in sub_jaxprs(eqn)]
    return holders


def _body_arguments(eqn: JaxprEqn) -> list[tuple[Var, Atom | None]]:
    """Return the arguments of an equation's bodies, with the operand each equals, or None."""
    inside = regions(eqn)
    if inside is None or isinstance(inside.view, ShardMap):
        return []
    return [
        (var, eqn.invars[i] if is_invariant else None)
        for body, region in zip(inside.bodies, inside.regions, strict=True)
        for var, i, is_invariant in zip(body.invars, region.ins, region.loop_invariant, strict=True)
    ]


def same_number(a: np.generic, b: np.generic | None) -> bool:
    """Return True if two NumPy scalars are equal to the bit; False if the second is None."""
    return b is not None and same_array(a, b)
