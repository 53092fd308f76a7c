"""Inlining: replace calls by the equations of their bodies, at every depth.

Calls are inlined from the outside in, so that each equation is written once, however deep the calls
are nested. Equations keep their source locations and contexts, and get the name scopes of the call.

A call stays as it is

*   if it has settings of its own (`has_own_settings`): a jit with donated operands, shardings,
    layouts, compiler options or `keep_unused`, one marked to be inlined by XLA (`inline=` in JAX
    0.12), and every call under `compute_on` or `set_xla_metadata`, which mark the call as a whole.
    `force=True` inlines these too;

*   if inlining it would be wrong: a `nest` call with a value sown inside, whose scope is part of
    the name, or a call with constants that the enclosing body, such as that of a remat, cannot
    hold;

*   if the program would grow too much: n nested functions, each called twice, are 2**n copies when
    all are inlined. If a program would have more than `MOST_EQUATIONS` equations, and more than
    twice as many as before, shared bodies that would be longer than `LONG` stay shared.

`custom_jvp`, `custom_vjp` and `custom_vmap` are inlined only on request, since the user's rule of
differentiation or batching is then lost. So is `remat`: the body of one that JAX has differentiated
(`differentiated=True`) recomputes values of the forward pass, and once it is inlined, cse or XLA
merges the two and keeps the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError, did_you_mean
from jaxprtool.ir.equations import Contains, bodies, is_flat
from jaxprtool.ir.expansions import expansion_rules
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import called_body, view
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.ir.traits import primitives_with, traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, Jaxpr, JaxprEqn
from jaxprtool.passes import Pass
from jaxprtool.primitives import scope_of, sow_p

#: The values of a jit's `inline` parameter that permit inlining here.
_INLINEABLE = (False, True, "jax_late")

#: A program may always grow to this number of equations.
MOST_EQUATIONS = 10_000

#: A longer body stays shared if the program would grow beyond that.
LONG = 100


@dataclass(frozen=True)
class Inline(Pass):
    """Replace calls by the equations of their bodies, at every depth.

    Other passes can then work across function boundaries. Equations keep their source lines and
    name scopes.

    Args:
        calls: The calls to inline, any of `jit`, `closed_call`, `custom_jvp`, `custom_vjp`,
            `custom_vmap` and `remat`. Inlining one of the last four discards its purpose: the
            user's derivative or batching rule, or the recomputation.
        force: Also inline calls with settings of their own: donation, shardings, layouts, compiler
            options, `keep_unused`, and marks such as `compute_on`.

    Note:
        Calls of long shared bodies stay if inlining them would give the program more than 10,000
        equations and more than twice as many as before. A call of `nest` with a value sown inside
        stays too.

    Example:
        def f(x):
            return jax.nn.silu(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p inline
        { lambda ; a:f32[3]. let b:f32[3] = logistic a; c:f32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "inline"
    group: ClassVar[str] = "clean up"

    calls: tuple[str, ...] = ("jit", "closed_call")
    force: bool = False

    def __post_init__(self) -> None:
        calls = primitives_with(lambda primitive: bool(primitive.call))
        kinds = list(dict.fromkeys(traits(name).call for name in calls))
        for call in self.calls:
            if call not in kinds:
                raise PipelineError(
                    f"unknown kind of call '{call}' for pass 'inline'; available: "
                    f"{', '.join(kinds)}",
                    did_you_mean(call, kinds),
                )

    def __call__(self, program: Program) -> Program:
        sows = Contains(lambda eqn: eqn.primitive is sow_p)

        # An equation with other operands has the same parameters and context.
        known: dict[tuple[int, int], tuple[JaxprEqn, _Inlined | None]] = {}

        def opened(eqn: JaxprEqn) -> _Inlined | None:
            """Return the body of a call that may be inlined; None for every other equation."""
            key = id(eqn.params), id(eqn.ctx)
            if (found := known.get(key)) is None:
                # Asked for when the lengths are counted, and when it is inlined.
                body = body_of(eqn)
                found = known[key] = eqn, None if body is None else _Inlined.of(body)
            return found[1]

        def body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
            if traits(eqn).call not in self.calls or (not self.force and has_own_settings(eqn)):
                return None
            body = called_body(eqn)
            if body is None:  # a `custom_vmap` has no view: its body is the function itself
                seen = view(eqn)
                body = jaxcompat.close_jaxpr(eqn.params["call"]) if seen is None else seen.body
            if scope_of(eqn) is not None and sows(body):
                return None
            return body if len(body.constvars) == len(body.consts) else None

        stay = _too_long(program.jaxpr, opened)

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                call = opened(eqn)
                if call is None or call.jaxpr in stay or not writer.can_hold(call.body):
                    return None
                return writer.splice(call.body, eqn.invars, eqn, rule=None if call.flat else rule)

            return rule

        return program.replace(jaxpr=rewrite(program.jaxpr, visitor, outside_in=True, flat=False))


class _Inlined(NamedTuple):
    """The body of a call that may be inlined, closed and open, and whether it is flat."""

    body: ClosedJaxpr
    jaxpr: Jaxpr
    flat: bool

    @classmethod
    def of(cls, body: ClosedJaxpr) -> _Inlined:
        jaxpr = jaxcompat.open_jaxpr(body)
        return cls(body, jaxpr, is_flat(jaxpr))


@dataclass(frozen=True)
class InlineExported(Pass):
    """Replace calls of `jax.export` artifacts by the equations of their modules.

    The equations are read from the StableHLO of the artifact, with the lines and name scopes of the
    function that was exported. Other passes, `cost` and `grad` then see them.

    Raises:
        UnsupportedError: If an artifact is for several platforms, or cannot be read.

    Example:
        $ jaxprtool opt model.exported -p "inline_exported, grad"
    """

    name: ClassVar[str] = "inline_exported"
    group: ClassVar[str] = "clean up"

    def __call__(self, program: Program) -> Program:
        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if eqn.primitive.name != "call_exported":
                    return None
                read = expansion_rules.get("call_exported")
                return writer.splice(read(eqn), eqn.invars, eqn)

            return rule

        return program.replace(jaxpr=rewrite(program.jaxpr, visitor))


def _too_long(jaxpr: AnyJaxpr, opened: Callable[[JaxprEqn], _Inlined | None]) -> set[Jaxpr]:
    """Return the open bodies whose calls must stay to bound the growth of the program."""
    calls: dict[Jaxpr, list[Jaxpr]] = {}  # the bodies to inline, by the body that calls them
    other_bodies = [jaxcompat.open_jaxpr(jaxpr)]  # the bodies of all other equations

    def explore(body: Jaxpr) -> None:
        called, others = [], []
        for eqn in () if is_flat(body) else body.eqns:
            if (call := opened(eqn)) is not None:
                called.append(call.jaxpr)
                if call.flat:
                    calls[call.jaxpr] = []
            else:
                others += [inner for _, inner in bodies(eqn)]
        for inner in (*called, *others):
            if inner not in calls:
                explore(inner)
        calls[body] = called  # after the bodies in it
        other_bodies.extend(others)

    explore(other_bodies[0])
    mentions = Counter([*other_bodies, *chain.from_iterable(calls.values())])
    stay: set[Jaxpr] = set()

    def lengths(most: float) -> dict[Jaxpr, int]:
        """Return the new number of equations of each body, if longer shared ones stay."""
        counts: dict[Jaxpr, int] = {}
        for body, inner in calls.items():
            counts[body] = len(body.eqns) + sum(counts[b] - 1 for b in inner if b not in stay)
            if counts[body] > most and mentions[body] > 1:
                stay.add(body)
        return counts

    inlined, now = lengths(math.inf), sum(len(body.eqns) for body in calls)
    if sum(inlined[body] for body in set(other_bodies)) > max(MOST_EQUATIONS, 2 * now):
        lengths(LONG)
    return stay


def has_own_settings(call: JaxprEqn) -> bool:
    """Return True if a call has settings of its own, which would be lost if it were inlined."""
    if call.ctx.compute_type is not None or call.ctx.xla_metadata:
        return True
    if call.primitive.name != "jit":
        return False
    p = call.params
    return (
        any(p["donated_invars"])
        or p["keep_unused"]
        or bool(p["compiler_options_kvs"])
        or not all(map(jaxcompat.is_unspecified, (*p["in_shardings"], *p["out_shardings"])))
        or not {*p["in_layouts"], *p["out_layouts"]} <= {None}
        or jaxcompat.inline_as_word(p["inline"]) not in _INLINEABLE
    )
