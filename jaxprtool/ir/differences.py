"""Match the equations of two programs, and find what differs and what a rewrite changed.

Two programs are matched as graphs, body by body:

1. Equations are paired by value numbering: forwards, if they compute the same from the same values,
   and backwards, if the same is computed from their results.
2. The matching spreads from pairs to the definitions of their operands and the readers of their
   results.
3. The equations left are paired by their neighbourhood, and then by their operands alone.

These steps are taken for equations that are the same, then for those that differ in a dtype or a
constant, and then for those that share only the primitive (`equation_keys.MatchLevel`). At the end,
equations of different primitives with the same neighbours are paired.

A body is matched with the body that the counterpart of its equation holds. A body shared by
several equations is matched once with each different counterpart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from typing import Literal as OneOf

import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.body_matching import MatchedBody, match_bodies
from jaxprtool.ir.custom_rules import has_rule
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import (
    EquationKeys,
    MatchLevel,
    is_dtype,
    is_label,
    parameters,
    same_primitive,
    same_rules,
    same_rules_for_types,
)
from jaxprtool.ir.keys import effect_kinds, function_difference
from jaxprtool.ir.regions import Region, holds_jaxpr, regions, sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, JaxprEqn, Literal

# --- counterparts ---------------------------------------------------------------------------------
# Match the equations of two programs, regardless of order and names.


def counterparts(
    before: AnyJaxpr,
    after: AnyJaxpr,
    arguments: Sequence[tuple[int, int]] | None = None,
    results: Sequence[tuple[int, int]] | None = None,
) -> list[MatchedBody]:
    """Match the equations of two programs.

    Args:
        before: The jaxpr of the first program.
        after: The jaxpr of the second program.
        arguments: The positions of the arguments that correspond. If None, those at the same
            positions do.
        results: The same for results.

    Returns:
        The bodies that correspond: the programs' own first, and each body before those in it.
    """
    keys = EquationKeys()
    a, b = jaxcompat.open_jaxpr(before), jaxcompat.open_jaxpr(after)
    ins = _in_place(a.invars, b.invars) if arguments is None else arguments
    outs = _in_place(a.outvars, b.outvars) if results is None else results
    matches: list[MatchedBody] = []
    todo = deque([_BodyPair(before, after, ins, outs)])
    seen = {(a, b)}
    while todo:
        bodies = todo.popleft()
        pair = bodies.before, bodies.after
        both = match_bodies(keys, pair, bodies.arguments, bodies.results)
        for matched in _with_opened(both, bodies.path):
            matches.append(matched)
            for inner in _bodies_of_pairs(matched):
                opened = jaxcompat.open_jaxpr(inner.before), jaxcompat.open_jaxpr(inner.after)
                if opened not in seen:
                    seen.add(opened)
                    todo.append(inner)
    return matches


def _with_opened(
    matched: MatchedBody,
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...],
    call: tuple[int, JaxprEqn] | None = None,
) -> Iterator[MatchedBody]:
    """Yield two matched bodies, and then the bodies of calls that only one of them has."""
    matched.path, matched.call = path, call
    matched.pairs = dict(sorted(matched.pairs.items()))
    yield matched
    for inlined in matched.opened_calls:
        eqn = matched.graphs[inlined.which].eqns[inlined.position]
        yield from _with_opened(inlined.inside, (*path, (eqn, eqn)), (inlined.which, eqn))


@dataclass(frozen=True, eq=False)
class _BodyPair:
    """Two bodies to match, their corresponding arguments and results, and the path to them."""

    before: AnyJaxpr
    after: AnyJaxpr
    arguments: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...] = ()


def _in_place(a: Sequence[object], b: Sequence[object]) -> list[tuple[int, int]]:
    return [(i, i) for i in range(min(len(a), len(b)))]


def _bodies_of_pairs(matched: MatchedBody) -> Iterator[_BodyPair]:
    """Yield the bodies that the counterparts in two matched bodies hold, in order."""
    for old, new in matched.equations:
        if not (holds_jaxpr(old.params.values()) and holds_jaxpr(new.params.values())):
            continue
        if not same_primitive(old, new) and not (traits(old).call and traits(new).call):
            continue
        bodies = [[body for _, body in sub_jaxprs(eqn)] for eqn in (old, new)]
        path = (*matched.path, (old, new))
        for a, b in zip(*bodies, strict=False):
            edges = _edges(old, a), _edges(new, b)
            arguments = _arguments(matched, (old, new), (a, b), edges)
            yield _BodyPair(
                a, b, arguments, _counterpart_results(matched, (old, new), (a, b), edges), path
            )


#: The regions of the bodies of two counterparts; None for a body that has no region.
_TwoEdges: TypeAlias = tuple[Region | None, Region | None]


def _edges(eqn: JaxprEqn, body: AnyJaxpr) -> Region | None:
    """Return the region of one of an equation's bodies, or None if it has none."""
    inside, opened = regions(eqn), jaxcompat.open_jaxpr(body)
    region = None if inside is None else inside.region_of(opened)
    return region if region is not None and len(region.ins) == len(opened.invars) else None


def _arguments(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    edges: _TwoEdges,
) -> list[tuple[int, int]]:
    """Return the corresponding arguments of two bodies.

    Arguments correspond if their operands do; the others are paired in order.
    """
    counts = [len(jaxcompat.open_jaxpr(body).invars) for body in bodies]
    pairs: dict[int, int] = {}
    if edges[0] is not None and edges[1] is not None:
        ins = edges[0].ins, edges[1].ins
        if len(pair[0].invars) != len(pair[1].invars):
            others = dict(matched.operand_pairs(*pair))
            positions = {k: j for j, k in enumerate(ins[1])}
            return [
                (i, positions[others[k]])
                for i, k in enumerate(ins[0])
                if others.get(k) in positions
            ]
        operands = [
            [eqn.invars[k] for k in indices] for indices, eqn in zip(ins, pair, strict=True)
        ]
        # The same place first: loops are often given the same value twice.
        pairs = {
            i: i for i, (x, y) in enumerate(zip(*operands, strict=False)) if matched.agree(x, y)
        }
        free: dict[int, deque[int]] = defaultdict(deque)
        taken = set(pairs.values())
        for j, atom in enumerate(operands[1]):
            if j not in taken:
                free[id(atom)].append(j)
        for i, atom in enumerate(operands[0]):
            partner = None if type(atom) is Literal else matched.counterpart(atom)
            if i not in pairs and (candidates := free.get(id(partner))):
                pairs[i] = candidates.popleft()
    taken = set(pairs.values())
    left = (
        [i for i in range(counts[0]) if i not in pairs],
        [j for j in range(counts[1]) if j not in taken],
    )
    return [*pairs.items(), *zip(*left, strict=False)]


def _counterpart_results(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    edges: _TwoEdges,
) -> list[tuple[int, int]]:
    """Return the corresponding results of two bodies, by the results of their equations."""
    outs = [jaxcompat.open_jaxpr(body).outvars for body in bodies]
    if len(outs[0]) == len(outs[1]) or edges[0] is None or edges[1] is None:
        return _in_place(*outs)
    positions = edges[0].outs, edges[1].outs
    partner = dict(matched.result_pairs(*pair))
    index_of = {k: j for j, k in enumerate(positions[1])}
    return [
        (i, index_of[partner[k]])
        for i, k in enumerate(positions[0])
        if k is not None and partner.get(k) in index_of
    ]


# --- differences ----------------------------------------------------------------------------------
# Find the differences between two equations that correspond.

#: The kinds of differences. "operand" means that another value is read, and "call" that the
#: equations of a call are inlined in the other program.
Kind: TypeAlias = OneOf["constant", "dtype", "shape", "parameter", "operand", "primitive", "call"]

#: Where the difference is. "order" is that of effects, and "constant" is a constant of the body.
Part: TypeAlias = OneOf[
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
        *_result_differences(matched, old, new),
    ]


def _parameters(keys: EquationKeys, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
    before_params, after_params = parameters(old), parameters(new)
    is_call = holds_jaxpr(old.params.values())
    is_other = not same_primitive(old, new)
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
        if is_call and (common := _one_for_each(a, old)) and common == _one_for_each(b, new):
            continue
        kind: Kind = "dtype" if is_dtype(a) and is_dtype(b) else "parameter"
        texts = function_difference(a, b) if callable(a) and callable(b) else None
        yield Difference(kind, "parameter", name, 0, *(texts or (a, b)))
    if not is_other and has_rule(old) and not _like_rules(old, new):
        yield Difference("parameter", "rules", "rules", 0, None, None)
    effects = [", ".join(dict.fromkeys(effect_kinds(eqn))) for eqn in (old, new)]
    if effects[0] != effects[1] and not is_call:
        yield Difference("parameter", "parameter", "effects", 0, *effects)
    if old.ctx is not new.ctx:
        yield Difference("parameter", "parameter", "context", 0, old.ctx, new.ctx)


def _like_rules(old: JaxprEqn, new: JaxprEqn) -> bool:
    """Return True if two custom calls have equal rules, or the same ones of other types."""
    if same_rules(old, new):
        return True
    types = [[str(atom.aval) for atom in eqn.invars] for eqn in (old, new)]
    return types[0] != types[1] and same_rules_for_types(old, new)


def _one_for_each(value: Any, eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the one value that a parameter has for all operands or results; () otherwise."""
    if not isinstance(value, tuple) or len(value) not in (len(eqn.invars), len(eqn.outvars)):
        return ()
    return value[:1] if all(element is value[0] for element in value) else ()


def _operands(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
    pairs = matched.operand_pairs(old, new)
    for i, j in pairs:
        a, b = old.invars[i], new.invars[j]
        if type(a) is Literal and type(b) is Literal:
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


def _literals(keys: EquationKeys, place: int, a: Literal, b: Literal) -> Iterator[Difference]:
    if keys.literal(a) == keys.literal(b):
        return
    other_type = type_difference(keys, a.aval, b.aval)
    if other_type is None or not _same_number(a, b):
        yield Difference("constant", "operand", "", place, a, b)
    if other_type:
        yield Difference(other_type, "operand", "", place, a, b)


def _same_number(a: Literal, b: Literal) -> bool:
    """Return True if two literals of different dtypes are the same number in one of the dtypes."""
    if _extreme(a) and _extreme(a) == _extreme(b):
        return True
    values = [np.asarray(x.val) for x in (a, b)]
    return any(
        np.array_equal(values[i].astype(x.aval.dtype), values[1 - i].astype(x.aval.dtype), True)
        for i, x in enumerate((b, a))
    )


def _extreme(literal: Literal) -> str:
    """Return "least" or "largest" if a literal is that number of its dtype, otherwise ""."""
    dtype = literal.aval.dtype
    try:
        limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    except ValueError:
        return ""
    number = np.asarray(literal.val).astype(dtype)
    return "least" if number == limits.min else "largest" if number == limits.max else ""


def _result_differences(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> Iterator[Difference]:
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
        literal = type(a) is Literal or type(b) is Literal
        return not literal and type_difference(matched.keys, a.aval, b.aval) is not None

    pairs = matched.operand_pairs(old, new)
    return any(is_other(old.invars[i], new.invars[j]) for i, j in pairs)


# --- changes --------------------------------------------------------------------------------------
# Find the equations of a program that a rewrite removed, and those that it added.
#
# An equation stays if its counterpart (`ir.differences`) does the same on values of the same types.
# Its operands may have another name, or replace values that were removed. But if an operand's old
# value still exists and the equation now reads another one, it is a different equation.
#
# Bodies are compared with the bodies of the counterpart: a change inside a loop leaves the loop
# itself unchanged, unless its operands or results are different.


@dataclass(frozen=True)
class Changes:
    """The equations, by `id`, of each program without a counterpart in the other.

    Attributes:
        removed: Those of the program before, in bodies too.
        added: Those of the program after.
    """

    removed: frozenset[int]
    added: frozenset[int]


def changes(before: AnyJaxpr, after: AnyJaxpr) -> Changes:
    """Return the equations of two programs that have no counterpart in the other.

    A body that several equations share is compared once with each body that replaced it. An
    equation in it has a counterpart if it has one in any of these bodies.
    """
    kept: tuple[set[int], set[int]] = set(), set()
    for matched in counterparts(before, after):
        for old, new in matched.equations:
            if _is_kept(matched, old, new):
                kept[0].add(id(old))
                kept[1].add(id(new))
    removed, added = (
        frozenset(id(eqn) for eqn in equations(jaxcompat.open_jaxpr(jaxpr))) - ids
        for jaxpr, ids in zip((before, after), kept, strict=True)
    )
    return Changes(removed, added)


def _is_kept(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> bool:
    if old is new:
        return True
    read = zip(old.invars, new.invars, strict=False)
    is_known = matched.counterpart
    if any(is_known(a) is not None and not matched.agree(a, b) for a, b in read):
        return False
    return not differences(matched, old, new)
