"""How JAX writes a type, a literal and parameters, in full and in short.

Few programs have more than a hundred different kinds of equation, so the text of an equation's
primitive and parameters, its `Signature`, is computed once for all equations that look alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import type_of, without_defaults
from jaxprtool.ir.notation.names import VariableNames
from jaxprtool.ir.notation.tokens import LiteralToken, ParameterToken, PrimitiveName, Type, width_of
from jaxprtool.ir.regions import holds_jaxpr
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Params
from jaxprtool.jaxcompat.jaxprs import identity

# --- signatures -----------------------------------------------------------------------------------
# How JAX writes a type, a literal, and the parameters of an equation.


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
