"""A hypothesis strategy for random well-typed programs: `random_programs()`.

It draws a plan (`plans.py`): plain data that prints as the code that makes it, and that shrinks to
few simple steps on few small arguments. `build.py` makes a function of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from tests.programs.build import arguments_of, function_of
from tests.programs.case import Case
from tests.programs.ops import COLLECTIVES, DTYPES, DTYPES_X64, OPS, SHAPES, Operation, Type
from tests.programs.plans import (
    DIFFERENCES,
    Block,
    Call,
    Cond,
    Const,
    Copy,
    Detail,
    Effect,
    Mutate,
    Op,
    Plan,
    Repeat,
    Scan,
    Shared,
    Stack,
    Step,
    While,
)
from tests.programs.waste import WASTEFUL

Draw = Callable[[st.SearchStrategy[Any]], Any]

#: The maximum nesting depth of bodies. The program's own body has level 0.
MAX_DEPTH = 3

#: The relative frequency of dtypes. Floats are most frequent, so that gradients are non-trivial.
_WEIGHTS = {"f32": 12, "i32": 3, "bool": 3, "key<fry>": 3}
_FLOAT_ARRAYS = st.builds(Type, st.just("f32"), st.sampled_from([(3,), (), (2, 3)]))
_REFS = st.integers(0, 9)


def random_programs(*, collectives: bool = False) -> st.SearchStrategy[RandomProgram]:
    """Random programs, with arguments. Those with collectives need the axes `ops.AXES`."""
    return _plans(OPS | COLLECTIVES if collectives else OPS).map(RandomProgram)


def wasteful_programs() -> st.SearchStrategy[RandomProgram]:
    """Random programs that rewriting passes can improve, half of them on special values."""

    def special(plan: Plan, specials: bool) -> RandomProgram:
        return RandomProgram(replace(plan, specials=specials))

    return st.builds(special, _plans(OPS | WASTEFUL), st.booleans())


def repeating_programs() -> st.SearchStrategy[RandomProgram]:
    """Random programs with copies of bodies, some of which differ slightly."""
    return _plans(OPS, repeats=True).map(RandomProgram)


def layered_programs() -> st.SearchStrategy[RandomProgram]:
    """Random programs of chained layers, with the parameters of each layer in trees."""
    return _plans(OPS, layers=True).map(RandomProgram)


@dataclass(frozen=True)
class RandomProgram:
    """A drawn plan. `case()` returns the program and its arguments."""

    plan: Plan

    def case(self) -> Case:
        """Return the plan's function with its arguments."""
        setting = Case("", print, (), x64=self.plan.x64).setting()
        with setting:
            args = arguments_of(self.plan)
        return Case("random", function_of(self.plan), args, x64=self.plan.x64)


@dataclass(frozen=True)
class _Scope:
    """What may be drawn in a body: its depth, types, operations and effects."""

    depth: int
    types: st.SearchStrategy[Type]
    operations: dict[str, Operation] = field(hash=False)
    effects: frozenset[str] = frozenset(("debug", "ordered", "io", "ref"))
    loops: bool = True
    repeats: bool = False

    def inner(self, **changes: Any) -> _Scope:
        return replace(self, depth=self.depth + 1, **changes)

    def called(self, how: str) -> _Scope:
        """Return the scope of a body that is called through `how`, as in `Call` and `Copy`."""
        if how.startswith("custom"):
            return self.inner(effects=frozenset(), loops=how == "custom_jvp" and self.loops)
        return self.inner(effects=self.effects & {"debug"} if how == "remat" else self.effects)


def _types(dtypes: st.SearchStrategy[str]) -> st.SearchStrategy[Type]:
    return st.builds(Type, dtypes, st.sampled_from(SHAPES))


@st.composite
def _plans(
    draw: Draw, operations: dict[str, Operation], *, repeats: bool = False, layers: bool = False
) -> Plan:
    x64 = draw(st.sampled_from([False] * 5 + [True]))
    weights = {name: _WEIGHTS.get(name, 1) for name in DTYPES}
    if x64:
        weights |= dict.fromkeys(DTYPES_X64, 3)
    dtypes = st.sampled_from([name for name, weight in weights.items() for _ in range(weight)])
    # Few types in a program, so that many operands have matching types.
    palette = draw(st.lists(_types(dtypes), min_size=1, max_size=4))
    types = st.one_of(st.sampled_from(palette), _types(dtypes), st.sampled_from(palette))
    scope = _Scope(0, types, operations, repeats=repeats)
    # JAX fails to trace the derivatives of some programs with refs.
    if trains := layers and draw(st.booleans()):
        scope = replace(scope, effects=frozenset())
    functions = draw(st.lists(_blocks(scope.inner()), max_size=2))
    body = draw(_blocks(scope))
    if repeats:
        body = replace(body, steps=(*body.steps, draw(_repeats(scope))))
    stacks: tuple[Stack, ...] = ()
    if layers:
        stacks, steps = draw(_layers(scope))
        outputs = draw(st.lists(st.integers(0, 29), min_size=1, max_size=5))
        body = Block(body.inputs, (*body.steps[:3], *steps), tuple(outputs))
    return Plan(
        stacks=stacks,
        trains=trains and bool(stacks),
        body=body,
        functions=tuple(functions),
        seed=draw(st.integers(0, 99)),
        specials=draw(st.sampled_from([False, False, False, True])),
        weak=draw(st.sampled_from([False, False, True])),
        x64=x64,
    )


@lru_cache
def _refs(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[_REFS] * count)


@st.composite
def _blocks(
    draw: Draw,
    scope: _Scope,
    inputs: tuple[Type, ...] | None = None,
    outputs: int | None = None,
    more: int = 0,
) -> Block:
    """Draw a body. Its inputs and the number of its outputs are drawn unless given.

    It has at least `more` steps more than usual at its depth.
    """
    if inputs is None:
        inputs = tuple(draw(st.lists(scope.types, max_size=3)))
        if scope.depth == 0:
            inputs = (draw(st.one_of(_FLOAT_ARRAYS, _FLOAT_ARRAYS, scope.types)), *inputs)
    least, most = ((2, 9), (0, 4), (0, 3), (0, 2))[scope.depth]
    steps = draw(st.lists(_steps(scope), min_size=least + more, max_size=most + more))
    if outputs is None:
        outputs = draw(st.integers(1, 4 if scope.depth == 0 else 3))
    return Block(inputs, tuple(steps), draw(_refs(outputs)))


# Hypothesis validates each strategy object, so bodies of one scope share one.
@lru_cache
def _steps(scope: _Scope) -> st.SearchStrategy[Step]:
    plain = [_ops(scope), _ops(scope), _ops(scope), _constants(scope)]
    if scope.effects:
        plain.append(_effects(scope))
    if "ref" in scope.effects:
        plain.append(_mutations(scope))
    if scope.depth == 0:
        plain.append(_shared_calls(scope))
    if scope.depth >= MAX_DEPTH:
        return st.one_of(plain)
    nested = [_calls(scope), _conds(scope), _scans(scope)]
    if scope.repeats:
        nested.append(_repeats(scope))
    if scope.loops:
        nested.append(_whiles(scope))
    return st.one_of([*plain, *nested])


@st.composite
def _ops(draw: Draw, scope: _Scope) -> Op:
    t = draw(scope.types)
    names = [name for name, op in scope.operations.items() if t.kind in op.kinds]
    # Operations other than the plain ones are the subject of the program, so they are frequent.
    names += [name for name in names if name not in OPS] * 2
    name = draw(st.sampled_from(names))
    return Op(name, t, draw(_refs(scope.operations[name].arity)))


def _constants(scope: _Scope) -> st.SearchStrategy[Const]:
    arrays = scope.types.filter(lambda t: t.kind != "k")
    return st.builds(Const, arrays, st.integers(0, 9))


@st.composite
def _shared_calls(draw: Draw, scope: _Scope) -> Shared:
    return Shared(draw(st.integers(0, 1)), draw(_refs(3)))


@st.composite
def _calls(draw: Draw, scope: _Scope) -> Call:
    how = draw(
        st.sampled_from(["jit", "jit", "remat", "custom_jvp", "custom_vjp", "custom_vjp_saving"])
    )
    body = draw(_blocks(scope.called(how)))
    return Call(how, body, draw(_refs(len(body.inputs))))


@st.composite
def _scans(draw: Draw, scope: _Scope) -> Scan:
    carry = tuple(draw(st.lists(scope.types, max_size=3)))
    xs = tuple(draw(st.lists(scope.types, max_size=2)))
    body = draw(_blocks(scope.inner(), (*carry, *xs), len(carry) + draw(st.integers(0, 2))))
    length = draw(st.sampled_from([2, 1, 3, 0]))
    return Scan(
        body,
        draw(_refs(len(carry))),
        draw(_refs(len(xs))),
        length,
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def _whiles(draw: Draw, scope: _Scope) -> While:
    carry = tuple(draw(st.lists(scope.types, min_size=1, max_size=3)))
    body = draw(_blocks(scope.inner(), carry, len(carry)))
    limit = draw(st.sampled_from([2, 0, 3]))
    return While(body, draw(_refs(len(carry))), limit, draw(st.booleans()), draw(st.booleans()))


@st.composite
def _conds(draw: Draw, scope: _Scope) -> Cond:
    inputs = tuple(draw(st.lists(scope.types, max_size=3)))
    outs = tuple(draw(st.lists(scope.types, max_size=3)))
    branches = draw(st.lists(_blocks(scope.inner(), inputs), min_size=2, max_size=3))
    return Cond(tuple(branches), draw(_REFS), draw(_refs(len(inputs))), outs)


@st.composite
def _repeats(draw: Draw, scope: _Scope) -> Repeat:
    how = draw(st.sampled_from(["", "jit", "", "donating", "", "remat", "", "custom_jvp"]))
    inner = scope.called(how)
    inputs = tuple(draw(st.lists(scope.types, min_size=1, max_size=3)))
    body = draw(_blocks(inner, inputs, more=2))
    detail = Detail(draw(_FLOAT_ARRAYS), (draw(_REFS), draw(_REFS)))
    at = draw(st.integers(0, len(body.steps)))
    body = replace(body, steps=(*body.steps[:at], detail, *body.steps[at:]))
    kinds = [kind for kind in DIFFERENCES if kind != "effect" or "ordered" in inner.effects]
    differences = st.sampled_from(draw(st.sampled_from([[""], [*[""] * 8, *kinds]])))
    copies = st.builds(Copy, _refs(len(inputs)), differences, st.just(how))
    count = draw(st.sampled_from([4, 3, 6, 2, 8] if scope.depth == 0 else [3, 2]))
    return Repeat(
        body,
        tuple(draw(copies) for _ in range(count)),
        tuple(draw(st.lists(_ops(scope), max_size=2))),
        *(draw(st.sampled_from(flags)) for flags in ([True, True, False], *[[False, True]] * 2)),
    )


@st.composite
def _layers(draw: Draw, scope: _Scope) -> tuple[tuple[Stack, ...], tuple[Step, ...]]:
    """Draw chained layers, sometimes followed by other layers, and the stacks of both."""
    stacks, steps = [], []
    parameters = st.one_of(_FLOAT_ARRAYS, scope.types)
    for number in range(draw(st.sampled_from([1, 1, 1, 2]))):
        least = draw(st.sampled_from([1, 1, 2, 0]))
        types = draw(st.lists(parameters, min_size=least, max_size=3))
        count = draw(st.sampled_from([4, 7, 5, 3, 8]))
        if types:
            tree = draw(st.sampled_from(["list", "dict", "tuple", "columns"]))
            leaks = draw(st.sampled_from([False] * 7 + [True]))
            stacks.append(Stack(tuple(types), count, tree, leaks))
        steps.append(draw(_layer_copies(scope, tuple(types), count, number)))
        steps += draw(st.lists(_ops(scope), max_size=2))
    return tuple(stacks), tuple(steps)


@st.composite
def _layer_copies(
    draw: Draw, scope: _Scope, row: tuple[Type, ...], count: int, stack: int
) -> Repeat:
    how = draw(st.sampled_from(["", "jit"] * 5 + ["remat", "custom_jvp"]))
    inner = scope.called(how)
    carry = draw(st.lists(st.one_of(_FLOAT_ARRAYS, scope.types), min_size=1, max_size=3))
    shared = draw(st.lists(scope.types, max_size=1))
    body = draw(_blocks(inner, (*carry, *shared, *row), len(carry) + draw(st.integers(0, 2))))
    # The output depends on the input and on a parameter.
    ends = len(carry) + len(shared) + len(row) - 1
    floats = carry[0] if carry[0].kind == "f" else Type("f32", (3,))
    first, detail = Op("mul", floats, (ends, 0)), Detail(floats, (0, draw(_REFS)))
    body = replace(body, steps=(first, detail, *body.steps), outputs=(0, *body.outputs[1:]))
    odd = draw(st.sampled_from([None] * 8 + [0, count // 2, count - 1]))
    kinds = [kind for kind in DIFFERENCES if kind != "effect" or "ordered" in inner.effects]
    difference = draw(st.sampled_from(kinds))
    args = draw(_refs(len(body.inputs)))
    own = draw(st.booleans())
    copies = [
        Copy(draw(_refs(len(args))) if own else args, difference if i == odd else "", how)
        for i in range(count)
    ]
    between = draw(st.sampled_from([(), (), (), (draw(_ops(scope)),)]))
    flags = [draw(st.booleans()) for _ in range(3)]
    return Repeat(body, tuple(copies), between, True, *flags[:2], stack=stack, reverse=flags[2])


def _effects(scope: _Scope) -> st.SearchStrategy[Effect]:
    hows = ["pure"]
    if "debug" in scope.effects:
        hows.append("debug")
    if "ordered" in scope.effects:
        hows.append("ordered_debug")
    if "io" in scope.effects:
        hows += ["io", "ordered_io"]
    return st.builds(Effect, st.sampled_from(hows), _REFS)


def _mutations(scope: _Scope) -> st.SearchStrategy[Mutate]:
    within = st.sampled_from(["here", "jit", "scan", "cond", "while"])
    arrays = scope.types.filter(lambda t: t.kind not in "k")
    return st.builds(Mutate, arrays, _REFS, _REFS, within, st.booleans())
