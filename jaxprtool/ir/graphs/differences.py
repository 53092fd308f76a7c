"""Find the differences between two equations that correspond."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.equality.equation_keys import (
    EquationKeys,
    MatchLevel,
    is_dtype,
    is_label,
    parameters,
)
from jaxprtool.ir.equality.equivalence import same_rules
from jaxprtool.ir.equality.function_keys import function_difference
from jaxprtool.ir.equality.value_keys import effect_kinds
from jaxprtool.ir.graphs.counterparts import MatchedBody
from jaxprtool.ir.rewriting.custom_rules import has_rule
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn
from jaxprtool.jaxcompat import Literal as LiteralAtom

#: The kinds of differences. "operand" means that another value is read, and "call" that the
#: equations of a call are inlined in the other program.
Kind: TypeAlias = Literal["constant", "dtype", "shape", "parameter", "operand", "primitive", "call"]

#: Where the difference is. "order" is that of effects, and "constant" is a constant of the body.
Part: TypeAlias = Literal[
    "operand",
    "result",
    "parameter",
    "rules",
    "order",
    "constant",
    "result of the body",
    "primitive",
    "call",
]


@dataclass(frozen=True)
class Difference:
    """One difference between two equations or bodies.

    Attributes:
        kind: The kind of difference.
        part: Where the difference is.
        name: The name of the parameter, or "".
        place: The position of the operand or result, in the second equation if that has it.
        before: The atom, the type or the value of the parameter in the first program; None if it
            has none. Of two functions, the text of the part that differs.
        after: The same in the second program.
    """

    kind: Kind
    part: Part
    name: str
    place: int
    before: Any
    after: Any


def differences(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> list[Difference]:
    """Return the differences between two counterparts, without those inside their bodies."""
    keys = matched.keys
    if keys.equation(old, MatchLevel.SAME) == keys.equation(new, MatchLevel.SAME):
        return list(_operands(matched, old, new))
    return [
        *_parameters(keys, old, new),
        *_operands(matched, old, new),
        *_results(matched, old, new),
    ]


def _parameters(keys: EquationKeys, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
    before_params, after_params = parameters(old), parameters(new)
    is_call = holds_jaxpr(old.params.values())
    is_other = old.primitive is not new.primitive
    if is_other:
        yield Difference("primitive", "primitive", "", 0, old.primitive.name, new.primitive.name)
    for name in sorted(
        before_params.keys() & after_params.keys()
        if is_other
        else before_params.keys() | after_params.keys()
    ):
        a, b = before_params.get(name), after_params.get(name)
        if is_label(old, name) or keys.value_or_bodies(a) == keys.value_or_bodies(b):
            continue
        # A call with one more operand has a longer tuple: no difference if all elements are equal.
        if is_call and (each := _one_for_each(a, old)) and each == _one_for_each(b, new):
            continue
        kind: Kind = "dtype" if is_dtype(a) and is_dtype(b) else "parameter"
        texts = function_difference(a, b) if callable(a) and callable(b) else None
        yield Difference(kind, "parameter", name, 0, *(texts or (a, b)))
    if not is_other and has_rule(old) and not same_rules(old, new):
        yield Difference("parameter", "rules", "rules", 0, None, None)
    effects = [", ".join(dict.fromkeys(effect_kinds(eqn))) for eqn in (old, new)]
    if effects[0] != effects[1] and not is_call:
        yield Difference("parameter", "parameter", "effects", 0, *effects)
    if old.ctx is not new.ctx:
        yield Difference("parameter", "parameter", "context", 0, old.ctx, new.ctx)


def _one_for_each(value: Any, eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the one value that a parameter has for all operands or results; () otherwise."""
    if not isinstance(value, tuple) or len(value) not in (len(eqn.invars), len(eqn.outvars)):
        return ()
    return value[:1] if all(each is value[0] for each in value) else ()


def _operands(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
    pairs = matched.operand_pairs(old, new)
    for i, j in pairs:
        a, b = old.invars[i], new.invars[j]
        if type(a) is LiteralAtom and type(b) is LiteralAtom:
            yield from _literals(matched.keys, j, a, b)
        elif matched.is_rewired(a, b):
            yield Difference("operand", "operand", "", j, a, b)
    kept = {i for i, _ in pairs}, {j for _, j in pairs}
    for i, atom in enumerate(old.invars):
        if i not in kept[0]:
            yield Difference("operand", "operand", "", i, atom, None)
    for j, atom in enumerate(new.invars):
        if j not in kept[1]:
            yield Difference("operand", "operand", "", j, None, atom)


def _literals(
    keys: EquationKeys, place: int, a: LiteralAtom, b: LiteralAtom
) -> Iterator[Difference]:
    if keys.literal(a) == keys.literal(b):
        return
    other_type = type_difference(keys, a.aval, b.aval)
    if other_type is None or not _same_number(a, b):
        yield Difference("constant", "operand", "", place, a, b)
    if other_type:
        yield Difference(other_type, "operand", "", place, a, b)


def _same_number(a: LiteralAtom, b: LiteralAtom) -> bool:
    """Return True if two literals of different dtypes are the same number in one of the dtypes."""
    if _extreme(a) and _extreme(a) == _extreme(b):
        return True
    values = [np.asarray(x.val) for x in (a, b)]
    return any(
        np.array_equal(values[i].astype(x.aval.dtype), values[1 - i].astype(x.aval.dtype), True)
        for i, x in enumerate((b, a))
    )


def _extreme(literal: LiteralAtom) -> str:
    """Return "least" or "largest" if a literal is that number of its dtype, otherwise ""."""
    dtype = literal.aval.dtype
    try:
        limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    except ValueError:
        return ""
    number = np.asarray(literal.val).astype(dtype)
    return "least" if number == limits.min else "largest" if number == limits.max else ""


def _results(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
    pairs = matched.result_pairs(old, new)
    for i, j in pairs:
        a, b = old.outvars[i].aval, new.outvars[j].aval
        if kind := type_difference(matched.keys, a, b):
            yield Difference(kind, "result", "", j, a, b)
    kept = {i for i, _ in pairs}, {j for _, j in pairs}
    for i, var in enumerate(old.outvars):
        if i not in kept[0]:
            yield Difference("shape", "result", "", i, var.aval, None)
    for j, var in enumerate(new.outvars):
        if j not in kept[1]:
            yield Difference("shape", "result", "", j, None, var.aval)


def type_difference(keys: EquationKeys, a: Aval, b: Aval) -> Kind | None:
    """Return "dtype" or "shape", in which two types differ, or None if they are the same."""
    if keys.type_number(a) == keys.type_number(b):
        return None
    shapes = [tuple(map(str, getattr(x, "shape", ()))) for x in (a, b)]
    return "dtype" if type(a) is type(b) and shapes[0] == shapes[1] else "shape"


def has_other_operand_types(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> bool:
    """Return True if corresponding operands of two counterparts have different types."""

    def is_other(a: Atom, b: Atom) -> bool:
        literal = type(a) is LiteralAtom or type(b) is LiteralAtom
        return not literal and type_difference(matched.keys, a.aval, b.aval) is not None

    pairs = matched.operand_pairs(old, new)
    return any(is_other(old.invars[i], new.invars[j]) for i, j in pairs)
