"""Reduction steps on single equations, at every depth: replace them by something simpler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import NO_OPTIONS, Cond, Scan, ShardMap, While, view
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.forward import Forward
from jaxprtool.passes.reduction.candidates import (
    Candidate,
    ReductionStep,
    fresh_names,
    is_array,
    is_variable,
    simpler,
    with_body,
)

#: A function that writes something simpler and returns the new results, or None if it cannot.
_Replacement = Callable[[Writer, JaxprEqn], Sequence[Atom] | None]

#: An equation, identified by its first result, which stays the same when operands are renamed.
_Site: TypeAlias = Var


def _every(program: Program) -> list[JaxprEqn]:
    """Return all equations with results, at every depth."""
    found = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in found if eqn.outvars]


def _replaced(replacement: _Replacement) -> Callable[[Program, Sequence[_Site]], Candidate | None]:
    """Return an `apply` for a step that replaces the equations at the chosen sites."""

    def apply(program: Program, chosen: Sequence[_Site]) -> Candidate | None:
        sites = set(map(id, chosen))

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                wanted = eqn.outvars and id(eqn.outvars[0]) in sites
                return replacement(writer, eqn) if wanted else None

            return rule

        jaxpr = rewrite(program.jaxpr, visitor)
        return None if jaxpr is program.jaxpr else Candidate(with_body(program, jaxpr))

    return apply


# --- calls, branches and loops ----------------------------------------------------------------


def _held(eqn: JaxprEqn) -> Regions | None:
    """Return the regions of an equation; None for `shard_map`, whose body cannot be spliced."""
    held = regions(eqn)
    return None if held is None or isinstance(held.view, ShardMap) else held


def _calls(program: Program) -> Sequence[_Site]:
    found = ((eqn, _held(eqn)) for eqn in _every(program))
    return [eqn.outvars[0] for eqn, held in found if held is not None and held.kind == "call"]


def _inlined(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    held = _held(eqn)
    if held is None or not writer.can_hold(held.bodies[0]):
        return None
    return writer.splice(held.bodies[0], eqn.invars, eqn)


def _loops(program: Program) -> Sequence[_Site]:
    kinds = (Scan, While)
    return [eqn.outvars[0] for eqn in _every(program) if isinstance(view(eqn), kinds)]


def _one_iteration(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    """Replace a loop by its first iteration."""
    loop = view(eqn)
    if not writer.can_hold(loop.body):
        return None
    if isinstance(loop, While):
        return writer.splice(loop.body, [*loop.body_consts, *loop.carry], eqn)
    if not isinstance(loop.length, int) or loop.length == 0:
        return None
    first = loop.length - 1 if loop.reverse else 0

    def rows(*xs: Any) -> list[Any]:
        return [lax.index_in_dim(x, first, keepdims=False) for x in xs]

    def stacks(*ys: Any) -> list[Any]:
        return [jnp.broadcast_to(y[None], (loop.length, *y.shape)) for y in ys]

    xs = writer.trace(rows, loop.xs, eqn) if loop.xs else []
    outs = writer.splice(loop.body, [*loop.consts, *loop.carry, *xs], eqn)
    count = len(loop.carry)
    return [*outs[:count], *(writer.trace(stacks, outs[count:], eqn) if loop.ys else ())]


def _branches(program: Program) -> Sequence[_Site]:
    return [eqn.outvars[0] for eqn in _every(program) if isinstance(view(eqn), Cond)]


def _branch(number: int) -> _Replacement:
    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        cond = view(eqn)
        body = cond.branches[number]
        return writer.splice(body, cond.operands, eqn) if writer.can_hold(body) else None

    return replacement


def _tidied(program: Program, chosen: Sequence[int]) -> Candidate | None:
    """Drop operands and results of bodies that are not used."""
    new = with_body(program, Forward()(program).jaxpr)
    return Candidate(new) if simpler(new, program) else None


# --- values -----------------------------------------------------------------------------------


def _with_operands(program: Program) -> Sequence[_Site]:
    """Return the equations that read variables, the last first."""
    return [eqn.outvars[0] for eqn in _every(program) if any(map(is_variable, eqn.invars))][::-1]


def _computed(program: Program) -> Sequence[_Site]:
    """Return the equations of `_with_operands` whose results are all arrays of numbers."""
    numeric = {
        eqn.outvars[0]
        for eqn in _every(program)
        if all(is_array(v) and not is_extended(v.aval.dtype) for v in eqn.outvars)
    }
    return [v for v in _with_operands(program) if v in numeric]


def _operand(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    """Return an operand of the same type for each result, preferring different operands."""
    atoms: list[Atom] = []
    for var in eqn.outvars:
        like = [
            v for v in eqn.invars if is_variable(v) and v.aval.str_short() == var.aval.str_short()
        ]
        if not like and type(var) is not DropVar:
            return None
        new = [v for v in like if v not in atoms]
        atoms.append((new or like or [var])[0])
    return atoms


def _constant(value: int) -> _Replacement:
    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        avals = [v.aval for v in eqn.outvars]
        literals = [jaxcompat.as_literal(value, aval) for aval in avals]
        if all(literals):
            return literals  # type: ignore[return-value]

        def full() -> list[Any]:
            return [jnp.full(aval.shape, value, aval.dtype) for aval in avals]

        return writer.trace(full, (), eqn)

    return replacement


def _literals(program: Program) -> Sequence[tuple[Var, int]]:
    return [
        (eqn.outvars[0], i)
        for eqn in _every(program)
        for i, atom in enumerate(eqn.invars)
        if type(atom) is Literal and np.ndim(atom.val) == 0 and atom.val not in (0, 1)
    ]


def _plain_literals(program: Program, chosen: Sequence[tuple[Var, int]]) -> Candidate | None:
    """Replace literals by ones."""
    positions = {(id(var), i) for var, i in chosen}

    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        invars = list(eqn.invars)
        for i, atom in enumerate(invars):
            if (id(eqn.outvars[0]), i) in positions:
                invars[i] = jaxcompat.as_literal(1, atom.aval) or atom
        return writer.add(eqn.replace(invars=invars))

    return _replaced(replacement)(program, [var for var, _ in chosen])


def _constants(program: Program) -> Sequence[int]:
    return range(len(program.jaxpr.constvars))


def _constants_as_arguments(program: Program, chosen: Sequence[int]) -> Candidate | None:
    """Turn constants into arguments."""
    jaxpr = program.jaxpr
    new = [jaxpr.constvars[i] for i in chosen]
    left = [i for i in range(len(jaxpr.constvars)) if i not in set(chosen)]
    names = fresh_names(program, "c", len(new))
    body = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=[jaxpr.constvars[i] for i in left],
        consts=[jaxpr.consts[i] for i in left],
        invars=[*jaxpr.invars, *new],
    )
    made = with_body(program, body, [*program.arg_names, *names])
    return Candidate(made, program, dict(zip(names, new, strict=True)))


# --- parameters -------------------------------------------------------------------------------


def _options(program: Program) -> Sequence[tuple[Var, str, object]]:
    """Return the parameters that may be replaced, with the replacement."""
    found: list[tuple[Var, str, object]] = []
    for eqn in _every(program):
        for name, value in eqn.params.items():
            plain = _plain(eqn, name, value)
            if plain != value:
                found.append((eqn.outvars[0], name, plain))
    return found


def _plain(eqn: JaxprEqn, name: str, value: object) -> object:
    """Return the simplest value of a parameter, or the value itself if the equation needs it."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return value if value == 0 else 1
    if isinstance(value, tuple) and name in NO_OPTIONS:
        return (NO_OPTIONS[name],) * len(value)
    is_needed = callable(value) or view(eqn) is not None  # a rule, a callback, or bodies
    return value if is_needed else None


def _without_options(
    program: Program, chosen: Sequence[tuple[Var, str, object]]
) -> Candidate | None:
    plain: dict[int, dict[str, object]] = {}
    for var, name, value in chosen:
        plain.setdefault(id(var), {})[name] = value

    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom]:
        params = {**eqn.params, **plain[id(eqn.outvars[0])]}
        return writer.add(eqn.replace(params=params))

    return _replaced(replacement)(program, [var for var, _, _ in chosen])


def _jit(program: Program) -> Sequence[int]:
    return () if program.jit is None else (0,)


def _without_jit(program: Program, chosen: Sequence[int]) -> Candidate:
    return Candidate(program.replace(jit=None))


#: The maximum number of equations of a program in which single parameters and literals are
#: simplified.
_SMALL = 60

CALLS = (
    ReductionStep("dropping the jit", _jit, _without_jit),
    ReductionStep("inlining calls", _calls, _replaced(_inlined)),
)

INSIDE = (
    ReductionStep("taking branches", _branches, _replaced(_branch(0))),
    ReductionStep("taking branches", _branches, _replaced(_branch(-1))),
    ReductionStep("running loops once", _loops, _replaced(_one_iteration)),
    ReductionStep("simplifying bodies", lambda program: (0,), _tidied),
    ReductionStep("replacing results by operands", _with_operands, _replaced(_operand)),
    ReductionStep("replacing values by zeros", _computed, _replaced(_constant(0))),
    ReductionStep("replacing values by ones", _computed, _replaced(_constant(1))),
    ReductionStep("resetting parameters", _options, _without_options, most=_SMALL),
    ReductionStep("turning constants into arguments", _constants, _constants_as_arguments),
    ReductionStep("replacing numbers by ones", _literals, _plain_literals, most=_SMALL),
)
