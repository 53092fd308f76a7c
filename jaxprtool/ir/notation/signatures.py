"""Names of variables, and how JAX writes a type, a literal and parameters, in full and in short."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, filterfalse, product
from operator import attrgetter
from string import ascii_lowercase
from typing import Any, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import DataFlow
from jaxprtool.ir.equations import holders, type_of, without_defaults
from jaxprtool.ir.frames import Range, Root, SourceNames, frames_now, range_of
from jaxprtool.ir.notation import LiteralToken, ParameterToken, PrimitiveName, Type, width_of
from jaxprtool.ir.regions import Region, holds_jaxpr, regions
from jaxprtool.jaxcompat import (
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Params,
    Var,
)
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.jaxcompat.source_locations import FrameReader, UserFrame, names_given

# --- names ----------------------------------------------------------------------------------------
# Name variables, and find the jaxprs that are printed once and referred to by name.
#
# JAX names variables in the order in which they are written: a, b, …, z, ba, bb, …. There are three
# exceptions. A result of the outermost jaxpr that nothing uses is `_`. The name of a shared jaxpr
# is skipped. The arguments and results of a jit's body take the names of the variables that the
# call passes and binds.

#: A body with more equations than this is printed separately even if it is used once.
LONGEST_INLINE_BODY = 10


def shared_jaxprs(
    root: Jaxpr, calls: Callable[[Jaxpr], Sequence[tuple[str | None, Jaxpr]]]
) -> dict[Jaxpr, str]:
    """Return the jaxprs below `root` that are printed once, at the top, with their names, in order.

    These occur more than once, or are long. `calls` returns the open jaxprs in the equations of a
    jaxpr, each with the name that its equation gives it.
    """
    uses: Counter[Jaxpr] = Counter()
    names: dict[Jaxpr, str] = {}
    queue = deque([root])
    while queue:
        jaxpr = queue.popleft()
        uses[jaxpr] += 1
        if uses[jaxpr] > 2:
            continue  # its bodies have been visited twice already, which is enough
        for name, body in calls(jaxpr):
            queue.append(body)
            if name is not None:
                names.setdefault(body, name.strip("<>"))
    long = {j for j in uses if j is not root and len(j.eqns) > LONGEST_INLINE_BODY}
    return _distinct({j: names.get(j, "jaxpr") for j, n in uses.items() if n > 1 or j in long})


def _distinct(names: dict[Jaxpr, str]) -> dict[Jaxpr, str]:
    """Return `names` with a number appended to each name that was used before."""
    taken: Counter[str] = Counter()
    result = {}
    for jaxpr, wanted in names.items():
        name = wanted
        # With the number, the name may equal another one: after `h11`, the second `h1` is `h12`.
        while name in taken:
            name = f"{wanted}{taken[wanted]}"
            taken[wanted] += 1
        taken[name] += 1
        result[jaxpr] = name
    return result


def fresh_names(taken: set[str]) -> Iterator[str]:
    """Yield a, b, …, z, ba, bb, …: numbers in base 26 with letters as digits, except `taken` ones.

    Each has a space before it, which is removed only after a parenthesis.
    """
    names = map("".join, _digits())
    return filterfalse({f" {name}" for name in taken}.__contains__, names) if taken else names


def _digits() -> Iterator[tuple[str, ...]]:
    yield from product(" ", ascii_lowercase)
    for more in count(1):
        yield from product(" ", ascii_lowercase[1:], *[ascii_lowercase] * more)


class VariableNames:
    """The names of variables, each assigned at its first mention.

    `spaced` holds the names, each after a space, by the identity of the variable; so a jaxpr must
    outlive its names. JAX's printing rules use it as the mapping from variables to names that they
    expect.
    """

    def __init__(self, root: Jaxpr, taken: set[str]):
        self.fresh = fresh_names(taken)
        self._followed: set[int] = set()
        used = set(map(identity, root.outvars))
        used.update(map(identity, chain.from_iterable(map(attrgetter("invars"), root.eqns))))
        bound = set(map(identity, chain.from_iterable(map(attrgetter("outvars"), root.eqns))))
        self.spaced = dict.fromkeys(bound - used, " _")

    def mention(self, var: Var) -> str:
        """Return the name of a variable, after a space."""
        name = self.spaced.get(identity(var))
        if name is None:
            name = " _" if isinstance(var, DropVar) else next(self.fresh)
            self.spaced[identity(var)] = name
        return name

    def __getitem__(self, var: Var) -> str:
        return self.mention(var)[1:]

    def __setitem__(self, var: Var, name: str) -> None:
        self.spaced[identity(var)] = " " + name

    def __contains__(self, var: object) -> bool:
        return identity(var) in self.spaced

    def get(self, var: Var, default: str | None = None) -> str | None:
        """Return the name of `var` if it has been mentioned."""
        name = self.spaced.get(identity(var))
        return default if name is None else name[1:]

    def follow_call(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        """Name the arguments and results of `body` like those of `eqn`, which calls it.

        Only the first call for an equation counts, as an equation may be laid out twice.
        """
        if identity(eqn) not in self._followed:
            self._followed.add(identity(eqn))
            self._name_alike(body.invars, eqn.invars)
            self._name_alike(body.outvars, eqn.outvars)

    def _name_alike(self, variables: Sequence[Atom], models: Sequence[Atom]) -> None:
        if len(variables) != len(models):
            return
        used = set()
        for var, model in zip(variables, models, strict=True):
            if isinstance(model, Literal) or isinstance(var, Literal):
                continue
            if identity(model) not in used and var not in self:
                used.add(identity(model))
                self[var] = self[model]


# --- user names -----------------------------------------------------------------------------------
# Name variables as the user does: arguments by their paths, values by names in the source.
#
#     params['w']          an argument
#     hidden               the value of `hidden = x @ w + b`
#     hidden_1             the next one of this name, as in the second iteration of a Python loop
#
# A value has the name that the user's source gives to the outermost expression that computes it.
# Parts of that expression, and values that a library computes on the way, have letters as in JAX's
# notation. So do values of backward passes, which come from the same expressions. A program
# that was read from a file has the names that the file states.

#: The names that `nnx.jit` and `eqx.filter_jit` give to the arrays of objects.
_FLATTENED = re.compile(r"\w+\.states\[\d+\]|dynamic_(?:no)?donate\[")

#: A name that can be used as it is.
_NAME = re.compile(r"[A-Za-z_]\w*")


class UserNames(VariableNames):
    """The names of variables: the user's, or else those of `VariableNames`.

    Args:
        root: The program's jaxpr.
        taken: The names of shared jaxprs.
        arguments: The paths of its arguments.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(
        self,
        root: Jaxpr,
        taken: set[str],
        arguments: Sequence[str],
        roots: Sequence[Root] = (),
    ):
        super().__init__(root, taken)
        #: The names in each body, which is a separate scope, like a user's function.
        scopes = {root: Counter(taken)}
        self._assign_names(zip(root.invars, arguments, strict=True), scopes[root])
        finder = _Finder(roots)
        callers = DataFlow(root).holders
        for jaxpr in callers:
            self._assign_names(finder.names(jaxpr), scopes[jaxpr])
            for eqn, inside in holders(jaxpr):
                for _, body in inside:
                    if body not in scopes:
                        scopes[body] = Counter(taken)
                        inside_of = regions(eqn) if len(callers[body]) == 1 else None
                        region = None if inside_of is None else inside_of.region_of(body)
                        if region is not None:
                            self._follow_flattened(eqn, body, region, scopes[body])
                        self._assign_names(_parameters(body), scopes[body])
                        if region is not None:
                            self._follow_captured(eqn, body, region, scopes[body])
        self.fresh = fresh_names(set().union(*scopes.values()))

    def follow_call(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        """Leave the variables of a call's body the names that they have."""

    def _assign_names(self, names: Iterable[tuple[Var, str]], scope: Counter[str]) -> None:
        """Name variables in a body, with a number appended to names that are used already."""
        for var, wanted in names:
            if identity(var) not in self.spaced:
                name = wanted
                while name in scope:
                    name = f"{wanted}_{scope[wanted]}"
                    scope[wanted] += 1
                scope[name] += 1
                self.spaced[identity(var)] = f" {name}"

    def _follow_flattened(
        self, eqn: JaxprEqn, body: Jaxpr, region: Region, scope: Counter[str]
    ) -> None:
        """Give the arrays of a flattened model the names of their operands outside."""
        flattened = [(var, name) for var, name in _parameters(body) if _FLATTENED.match(name)]
        operands = dict(zip(body.invars, region.ins, strict=True)) if flattened else {}
        for var, _ in flattened:
            if outer := self.spaced.get(identity(eqn.invars[operands[var]]), "")[1:]:
                self._assign_names([(var, outer)], scope)

    def _follow_captured(
        self, eqn: JaxprEqn, body: Jaxpr, region: Region, scope: Counter[str]
    ) -> None:
        """Give loop-invariant arguments of a body the names of their operands outside."""
        for var, operand, same in zip(body.invars, region.ins, region.loop_invariant, strict=True):
            name = self.spaced.get(identity(eqn.invars[operand]), "")[1:]
            if same and name and name not in scope:
                self._assign_names([(var, name)], scope)


def source_names(root: Jaxpr, roots: Sequence[Root]) -> dict[Var, str]:
    """Return the names in the user's source for the values of equations, at every depth."""
    finder = _Finder(roots)
    return {var: name for jaxpr in DataFlow(root).holders for var, name in finder.names(jaxpr)}


def _within(part: Range, whole: Range) -> bool:
    """Return True if an expression is another one, or a part of it."""
    return whole[:2] <= part[:2] and part[2:] <= whole[2:]


def _parameters(body: Jaxpr) -> list[tuple[Var, str]]:
    """Return the arguments of a body that its function names."""
    names = body.debug_info.arg_names or ()
    if len(names) != len(body.invars):
        return []
    return [(var, name) for var, name in zip(body.invars, names, strict=True) if name]


class _Finder:
    """Finds the names in the user's source for the values of equations."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._sources = SourceNames()
        self._frames, self._reader = frames_now(roots, chosen=False), FrameReader()
        #: The user's own frames in each traceback, by its number, the innermost frame first.
        self._own: list[list[tuple[UserFrame, Range]]] = []
        #: The names that a file states, by the same numbers.
        self._given: list[list[str]] = []
        self._numbers: dict[object, int] = {}
        self._transposed: dict[int, bool] = {}
        self._known: dict[tuple[Any, ...], str | None] = {}

    def names(self, jaxpr: Jaxpr) -> list[tuple[Var, str]]:
        """Return the named values of the equations of a jaxpr, and their names."""
        numbers = [*map(self._number, jaxpr.eqns)]
        readers: dict[int, list[int]] = defaultdict(list)
        for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
            for atom in eqn.invars:
                readers[identity(atom)].append(number)
        named = []
        for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
            hints = self._own[number] or self._given[number]
            if not hints or self._is_transposed(eqn):
                continue
            for i, var in enumerate(eqn.outvars):
                if isinstance(var, DropVar):
                    continue
                result = (i, len(eqn.outvars)) if len(eqn.outvars) > 1 else None
                if names := self._given[number]:
                    name = names[i] if len(names) == len(eqn.outvars) else None
                else:
                    name = self._name(number, result, *readers.get(identity(var), ()))
                if name:
                    named.append((var, name))
        return named

    def _number(self, eqn: JaxprEqn) -> int:
        """Return the number of an equation's traceback; equal tracebacks have equal numbers."""
        numbers = self._numbers
        number = numbers.setdefault(eqn.source_info.traceback, len(numbers))
        if number == len(self._own):
            frames = self._reader.frames(eqn)
            user_frames = [f for f in frames if self._frames.is_users(f.file)]
            self._own.append([(frame, range_of(frame)) for frame in user_frames])
            self._given.append(names_given(eqn))
        return number

    def _is_transposed(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation belongs to a backward pass."""
        key = identity(eqn.source_info.name_stack)
        if key not in self._transposed:
            self._transposed[key] = "transpose(" in jaxcompat.name_stack(eqn)
        return self._transposed[key]

    def _name(self, number: int, result: tuple[int, int] | None, *readers: int) -> str | None:
        """Return the name of the expression of an equation but none of its readers."""
        key = number, result, *readers
        if key not in self._known:
            self._known[key] = self._found(number, result, readers)
        return self._known[key]

    def _found(
        self, number: int, result: tuple[int, int] | None, readers: Sequence[int]
    ) -> str | None:
        returned = False
        for frame, place in self._own[number]:
            read = {p for reader in readers for f, p in self._own[reader] if f.file == frame.file}
            if returned:  # the next iteration of a loop may read it by the same call
                read.discard(place)
            if any(_within(place, other) for other in read):
                return None
            name = self._sources.assigned(frame, read, result)
            if name is not None:
                return name if _NAME.fullmatch(name) else None
            result, returned = None, self._sources.returned(frame, read)
        return None


# --- signatures -----------------------------------------------------------------------------------
# How JAX writes a type, a literal, and the parameters of an equation.
#
# Few programs have more than a hundred different kinds of equation, so the text of an equation's
# primitive and parameters, its `Signature`, is computed once for all equations that look alike.


class Pieces(tuple):
    """A value that is written as one text with jaxprs in it: its pieces, strings and jaxprs."""


#: The form of a parameter's value: a text, a jaxpr, several in parentheses, or a mixture.
Value: TypeAlias = str | Jaxpr | tuple[Jaxpr, ...] | Pieces


#: The parameters that a listing shows, by name and in order.
Shown: TypeAlias = list[tuple[str, Any]]


# --- selection of parameters ------------------------------------------------------------------


def _without(*names: str) -> Callable[[Params], Shown]:
    """Return all parameters in alphabetical order, except some that the types imply."""
    return lambda params: sorted((k, v) for k, v in params.items() if k not in names)


def _unless_none(name: str) -> Callable[[Params], Shown]:
    hidden = _without(name)
    return lambda p: sorted(p.items()) if p.get(name) is not None else hidden(p)


def _dot_general(params: Params) -> Shown:
    contract, batch = params["dimension_numbers"]
    lists = tuple(tuple(map(list, pair)) for pair in (contract, batch))
    shown = {k: v for k, v in params.items() if v is not None and k != "out_sharding"}
    return sorted({**shown, "dimension_numbers": lists}.items())


def _broadcast_in_dim(params: Params) -> Shown:
    hidden = {"shape", "sharding"}
    if not params["broadcast_dimensions"]:
        hidden.add("broadcast_dimensions")
    return sorted((k, v) for k, v in params.items() if k not in hidden)


#: By parameter of jit: whether a value is left out. `inline` always is.
_JIT_TRIVIAL: dict[str, Callable[[Any], bool]] = {
    "inline": lambda inline: True,
    "donated_invars": lambda donated: not any(donated),
    "in_shardings": lambda shardings: all(map(jaxcompat.is_unspecified, shardings)),
    "out_shardings": lambda shardings: all(map(jaxcompat.is_unspecified, shardings)),
    "in_layouts": lambda layouts: all(layout is None for layout in layouts),
    "out_layouts": lambda layouts: all(layout is None for layout in layouts),
    "keep_unused": lambda keep: not keep,
    "ctx_mesh": lambda mesh: mesh.empty,
    "compiler_options_kvs": lambda options: not options,
}


def _jit(params: Params) -> Shown:
    shown = {
        k: v
        for k, v in params.items()
        if k != "name" and not (k in _JIT_TRIVIAL and _JIT_TRIVIAL[k](v))
    }
    return [("name", params["name"]), *sorted(shown.items())]


def _custom_derivative(functions: dict[str, str]) -> Callable:
    """Return a rule that shows the body's name, and the names of functions as other parameters.

    `functions` maps the parameter that holds each function to the parameter shown.
    """

    def shown(params: Params) -> Shown:
        rest = {k: v for k, v in params.items() if k not in functions and k != "out_trees"}
        if not rest["num_consts"]:
            del rest["num_consts"]
        for param, name in functions.items():
            rest[name] = params[param].debug_info.func_name
        name = jaxcompat.open_jaxpr(params["call_jaxpr"]).debug_info.func_name
        return [("name", name), *sorted(rest.items())]

    return shown


def _custom_lin(params: Params) -> Shown:
    shown = {k: v for k, v in params.items() if k != "out_avals"}
    return sorted({**shown, "bwd": params["bwd"].debug_info.func_name}.items())


#: JAX's printing rules that only choose and order the parameters, and the parameters that each
#: shows. Equations of primitives that have another rule are written by that rule itself.
SHOWN_PARAMS: dict[str, Callable[[Params], Shown]] = {
    "_unary_with_accuracy_pp_rule": _unless_none("accuracy"),
    "_binary_with_out_dtype_pp_rule": _unless_none("out_dtype"),
    "_convert_elt_type_pp_rule": _without("sharding"),
    "_dot_general_pp_rule": _dot_general,
    "_broadcast_in_dim_pp_rule": _broadcast_in_dim,
    "_pp_reshard": lambda params: [],
    "_pp_check": _without("err_tree"),
    "_pjit_pp_rule": _jit,
    "_custom_jvp_call_pp_rule": _custom_derivative({"jvp_jaxpr_fun": "jvp"}),
    "_custom_vjp_call_pp_rule": _custom_derivative({"fwd_jaxpr_thunk": "fwd", "bwd": "bwd"}),
    "_custom_lin_pp_rule": _custom_lin,
}


# --- signatures -------------------------------------------------------------------------------


@dataclass(eq=False)
class Signature:
    """The common part of equations of one primitive and the same parameters.

    Attributes:
        name: The name of the primitive.
        pairs: The parameters to show, with their values.
        called: All jaxprs of the equation, with the names that it gives them.
        by_rule: Whether JAX's own rule writes the equation.
        named_by_call: Whether the variables of a jit's body are named after those of the call.
        head: The primitive and its parameters on one line; None if a jaxpr is among them.
    """

    name: PrimitiveName
    pairs: list[tuple[ParameterToken, Value]]
    called: tuple[tuple[str | None, Jaxpr], ...] = ()
    by_rule: bool = False
    named_by_call: bool = False
    head: list[str] | None = field(init=False)

    def __post_init__(self) -> None:
        has_bodies = any(value and not isinstance(value, str) for _, value in self.pairs)
        self.head = None if has_bodies or self.by_rule else [self.name, *_flat(self.pairs)]


def _flat(pairs: list[tuple[ParameterToken, Value]]) -> list[str]:
    """Return the pieces of `[axes=(0,) keepdims=True]`, or no pieces."""
    tokens: list[str] = []
    for name, value in pairs:
        tokens += (" " if tokens else "[", name, str(value))
    if tokens:
        tokens.append("]")
    return tokens


class Notation:
    """The text of types, literals and signatures as JAX writes them, each computed once.

    Values are cached by identity, so the jaxpr must outlive its notation. Subclasses write some of
    them differently.
    """

    #: The names of variables.
    variable_names: Callable[[Jaxpr, set[str]], VariableNames] = VariableNames

    #: Whether weak types are marked.
    weak: bool = False

    def __init__(self) -> None:
        #: The width of a token: its length, until a token is seen that is not ASCII.
        self.width_of: Callable[[str], int] = len
        self._types: dict[int, Type] = {}
        self._values: dict[int, str] = {}
        self._signatures: dict[Hashable, Signature] = {}
        self._alike: dict[Hashable, Signature] = {}
        self._of_jaxpr: dict[Jaxpr, list[Signature]] = {}

    def type_of(self, aval: Aval) -> Type:
        """Return the type of a variable where it is bound: `:f32[3]`."""
        token = self._types.get(identity(aval))
        if token is None:
            text = ":" + type_of(aval, self.weak)
            token = self._types[identity(aval)] = Type(self._noted(text))
        return token

    def literal(self, literal: Literal) -> LiteralToken:
        """Return a literal with its type, after a space: ` 2.0:f32[]`."""
        aval = literal.aval
        typed = bool(getattr(aval, "dtype", None))
        return LiteralToken(" " + value_text(literal) + (self.type_of(aval) if typed else ""))

    def constant_values(self, jaxpr: Jaxpr) -> Sequence[str]:
        """Return `=value` for each constant of a jaxpr; nothing if values are not shown."""
        return ()

    def signatures(self, jaxpr: Jaxpr) -> list[Signature]:
        """Return the signature of each equation of `jaxpr`."""
        signatures = self._of_jaxpr.get(jaxpr)
        if signatures is None:
            signatures = self._of_jaxpr[jaxpr] = []
            cache, context_key = self._signatures, self.context_key
            for eqn in jaxpr.eqns:
                params = eqn.params
                key = context_key(eqn)
                if params:
                    key = (*key, *params, *map(identity, params.values()))
                signature = cache.get(key)
                if signature is None:
                    signature = cache[key] = self.signature(eqn)
                signatures.append(signature)
        return signatures

    def signature(self, eqn: JaxprEqn) -> Signature:
        """Return the signature of one equation."""
        # Often the parameters differ only in the identity of equal tuples of numbers.
        values = [
            str(value)
            if type(value) is tuple and value and type(value[0]) in _PLAIN
            else identity(value)
            for value in eqn.params.values()
        ]
        key = (*self.context_key(eqn), *eqn.params, *values)
        signature = self._alike.get(key)
        if signature is None:
            signature = self._alike[key] = self._make(eqn)
        return signature

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key for what a signature depends on besides parameters: here the primitive."""
        return (identity(eqn.primitive),)

    def called(self, jaxpr: Jaxpr) -> list[tuple[str | None, Jaxpr]]:
        """Return the jaxprs that the equations of `jaxpr` hold, each with the name it is given."""
        return [call for signature in self.signatures(jaxpr) for call in signature.called]

    def _make(self, eqn: JaxprEqn) -> Signature:
        primitive, params = eqn.primitive, eqn.params
        rule = jaxcompat.printing_rule(primitive)
        by_rule = rule is not None and rule not in SHOWN_PARAMS
        if by_rule or holds_jaxpr(params.values()):
            call_name = params.get("name")
            called = tuple((call_name, body) for body in jaxcompat.printed_jaxprs(eqn))
        else:
            called = ()
        if by_rule:
            return Signature(self._primitive(eqn), [], called, by_rule=True)
        rows: list[tuple[str, Value]] = []
        if primitive.name == "pallas_call":
            from jaxprtool.ir.kernel_calls import kernel_rows  # few programs have kernels

            rows = [(name, self._noted(text)) for name, text in kernel_rows(eqn)]
        chosen = SHOWN_PARAMS[rule](params) if rule else sorted(params.items())
        shown = (item for item in chosen if not (rows and item[0] in _IN_ROWS))
        pairs = rows + [(name, self._value(value)) for name, value in shown]
        tokens = [(ParameterToken(self._noted(f"{name}=")), value) for name, value in pairs]
        named = rule == "_pjit_pp_rule"
        return Signature(self._primitive(eqn), tokens, called, named_by_call=named)

    def _primitive(self, eqn: JaxprEqn) -> PrimitiveName:
        return PrimitiveName(self._noted(eqn.primitive.name))

    def _value(self, value: object) -> Value:
        """Return the text of a parameter's value, or its jaxprs."""
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return jaxcompat.open_jaxpr(value)
        if type(value) is tuple and all(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
            return tuple(map(jaxcompat.open_jaxpr, value))
        return self.text(value)

    def text(self, value: object) -> str:
        """Return the text of a parameter's value that is not a jaxpr."""
        if type(value) in _BUILTINS:
            return self._noted(_object_text(value))
        text = self._values.get(identity(value))
        if text is None:
            text = self._values[identity(value)] = self._noted(_object_text(value))
        return text

    def _noted(self, text: str) -> str:
        if not text.isascii():
            self.width_of = width_of
        return text


#: A tuple that begins with one of these is compared by its text, not by identity.
_PLAIN = {int, tuple}

#: Computing their texts is as fast as a look-up.
_BUILTINS = {bool, float, int, tuple, type(None)}


def value_text(literal: Literal) -> str:
    """Return the value of a literal, without its type; `[...]` if it is an array."""
    value = literal.val
    shape = getattr(value, "shape", None)
    if shape is None:
        value = np.asarray(value)
        shape = value.shape
    return "[...]" if shape else str(value.item())


def _object_text(value: object) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(map(repr, sorted(value)))}}})"
    return _without_addresses(str(value))


_ADDRESS = re.compile(r" at 0x([0-9a-fA-F]+)")


def _without_addresses(text: str) -> str:
    """Replace the digits of memory addresses in `text` by X, so that two runs print alike."""
    if " at 0x" not in text:
        return text
    return _ADDRESS.sub(lambda match: " at 0x" + "X" * len(match[1]), text)


# --- terse ----------------------------------------------------------------------------------------
# JAX's notation in short: without default values of parameters, and with long values cut.
#
# split[axis=0 sizes=(3, 4)]            of JAX's split[axis=0 sizes=(np.int64(3), np.int64(4))]

#: The maximum length of a parameter's value.
_LONGEST = 100

_NUMPY_SCALAR = re.compile(r"\bnp\.(?:u?int|float)\d+\(([^()]*)\)")


class TerseNotation(Notation):
    """Writes equations without parameters at their defaults: None, known flags, steps of one.

    A longer value of a parameter is cut in its middle, and NumPy's numbers are written as Python's.

    Args:
        whole: Whether to write values as they are.
    """

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self._whole = whole

    def text(self, value: object) -> str:
        """Return the text of a parameter's value that is not a jaxpr."""
        if self._whole:
            return super().text(value)
        record = without_defaults(value)
        text = super().text(value) if record is value else self._noted(_object_text(record))
        text = _NUMPY_SCALAR.sub(r"\1", text)
        if len(text) <= _LONGEST:
            return text
        half = (_LONGEST - 1) // 2
        return self._noted(f"{text[:half]}…{text[-half:]}")

    def context_key(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        """Return a key for the primitive, and for the dtype, which a default may depend on."""
        return (*super().context_key(eqn), _result_dtype(eqn))

    def _make(self, eqn: JaxprEqn) -> Signature:
        whole = super()._make(eqn)
        pairs = [
            (name, value)
            for name, value in whole.pairs
            if not _is_default(name.removesuffix("="), eqn)
        ]
        if len(pairs) == len(whole.pairs):
            return whole
        return Signature(whole.name, pairs, whole.called, whole.by_rule, whole.named_by_call)


#: The defaults of parameters with two values. All other parameters are written, since the default
#: of one primitive may not be that of another.
_BOOLEANS = {
    "compute_left_eigenvectors": True,
    "compute_right_eigenvectors": True,
    "compute_uv": True,
    "conjugate_a": False,
    "full_matrices": True,
    "indices_are_sorted": False,
    "is_stable": True,
    "prevent_cse": True,
    "reverse": False,
    "symbolic_zeros": False,
    "symmetrize_input": True,
    "transpose_a": False,
    "unique_indices": False,
    "unit_diagonal": False,
    "weak_type": False,
}

#: Parameters of kernels that are not written if they are false or empty.
_FLAGS = ("debug", "input_output_aliases", "interpret")

#: Those that the rows of a kernel's grid and blocks say.
_IN_ROWS = ("grid_mapping", "out_avals")

#: Parameters that are numbers, or tuples of numbers, and are one by default.
_ONE = {
    "base_dilation",
    "batch_group_count",
    "feature_group_count",
    "lhs_dilation",
    "rhs_dilation",
    "strides",
    "unroll",
    "window_dilation",
    "window_strides",
}


def _is_default(name: str, eqn: JaxprEqn) -> bool:
    value = eqn.params.get(name, ...)
    if name in _FLAGS and eqn.primitive.name == "pallas_call":
        return not value
    if isinstance(value, bool):
        return value is _BOOLEANS.get(name)
    if name == "preferred_element_type":
        return value is None or value == _result_dtype(eqn)
    if name in _ONE:
        return value is None or _numbers(value) == {1}
    if name == "padding":
        return isinstance(value, tuple) and _numbers(value) == {0}
    if name == "linear":
        return isinstance(value, tuple) and not any(value)
    return value is None


def _numbers(value: Any) -> set[Any]:
    """Return the numbers in a number, or in a tuple of tuples of numbers."""
    if not isinstance(value, tuple):
        return {value}
    return set().union(*map(_numbers, value))


def _result_dtype(eqn: JaxprEqn) -> Any:
    return getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
