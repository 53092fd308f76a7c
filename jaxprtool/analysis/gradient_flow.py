"""Find the operations with zero derivative that stop the gradient with respect to an argument.

A tangent of the argument is followed through the program, as far as JAX's rules propagate it. It
stops at operations such as `round`, `stop_gradient`, comparisons and casts to integers, and at
calls whose custom rule returns zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import or_

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.equations import is_inexact
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import Scan
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.slicing import Start, backward_slice, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature
from jaxprtool.ir.rewriting.custom_rules import vjp_rule
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame


@document(without=("frame", "code", "has_rule"))
@dataclass(frozen=True)
class Stop:
    """An operation at which a tangent stops, on the way to a result.

    Attributes:
        primitive: The name of its primitive, or of the custom function.
        source: The user's line, `model.py:9`; "" if unknown.
        frame: The same as a frame; None if unknown.
        code: The source text of the line, if its file exists.
        has_rule: Whether it is a custom function, whose rule returns zeros.
    """

    primitive: str
    source: str
    frame: UserFrame | None = field(repr=False)
    code: str = field(repr=False)
    has_rule: bool = field(repr=False)


@document(without=("argument", "type"))
@dataclass(frozen=True)
class GradientFlow:
    """Which results the tangent of an argument reaches, and where it stops.

    Attributes:
        argument: The name of the argument, the first if there are several.
        zero: The results that depend on the argument but have a zero derivative with respect to it.
        reached: The results whose derivative is not known to be zero.
        stops: The operations at which the tangent stops on the way to a result in `zero`.
        type: The argument's type if it has no derivatives (integers); else "".
    """

    argument: str
    zero: tuple[str, ...]
    reached: tuple[str, ...]
    stops: tuple[Stop, ...]
    type: str


def gradient_flow(program: Program | AnyJaxpr, positions: Sequence[int]) -> GradientFlow:
    """Follow the tangents of several flat arguments, given by position, at the same time."""
    about = program_signature(program)
    top = about.jaxpr
    first = about.arguments[positions[0]]
    moving = {v for v in (top.invars[i] for i in positions) if is_inexact(v)}
    if not moving:
        return GradientFlow(first.name, (), (), (), first.type)
    forward = forward_slice(top, Start([(top, v) for v in moving]))
    tangents = _Tangents()
    moved, stopped = tangents.run(top, tuple(v in moving for v in top.invars))
    ends = [
        i
        for i, (atom, flag) in enumerate(zip(top.outvars, forward.results, strict=True))
        if flag and is_inexact(atom)
    ]
    values = [(top, v) for i in ends if not isinstance(v := top.outvars[i], Literal)]
    leading = backward_slice(top, Start(values)).members()
    frames = frames_now(about.roots)
    on_the_way = [calls for calls in stopped if all(id(eqn) in leading for eqn in calls)]
    whole = [calls for calls in on_the_way if id(calls[-1]) not in tangents.partial]
    if whole or any(moved[i] for i in ends):
        on_the_way = whole
    names = [each.name for each in about.outputs]
    return GradientFlow(
        first.name,
        tuple(names[i] for i in ends if not moved[i]),
        tuple(names[i] for i in ends if moved[i]),
        tuple(dict.fromkeys(_stop(frames, calls) for calls in on_the_way)),
        "",
    )


def _stop(frames: Frames, calls: Sequence[JaxprEqn]) -> Stop:
    eqn = calls[-1]
    # A primitive of a class (`VJPHiPrimitive`) has its own derivative too, but holds no function.
    named = traits(eqn).custom_derivative and "call_jaxpr" in eqn.params
    name = jaxcompat.custom_name(eqn) if named else eqn.primitive.name
    location = frames.location_of(calls)
    frame = None if location is None else location.frame
    source = "" if frame is None else frames.text(frame)
    return Stop(name, source, frame, frames.code_of(calls), named)


#: Equations at which tangents stop, each preceded by the equations whose bodies contain it.
_Stops = tuple[tuple[JaxprEqn, ...], ...]


class _Tangents:
    """Follows tangents through a program, each body once for each set of perturbed arguments."""

    def __init__(self) -> None:
        self._equations: dict[Hashable, list[bool]] = {}
        #: Equations of which only some results have tangents; a sort has none for its indices.
        self.partial: set[int] = set()

    @cached_method
    def run(self, jaxpr: Jaxpr, given: tuple[bool, ...]) -> tuple[tuple[bool, ...], _Stops]:
        """Return which results of a body have tangents, and where tangents stop."""
        moving = {v for v, flag in zip(jaxpr.invars, given, strict=True) if flag}
        stops: list[tuple[JaxprEqn, ...]] = []
        for eqn in jaxpr.eqns:
            flags = [isinstance(v, Var) and v in moving for v in eqn.invars]
            if any(flags):
                outs, inside = self._through(eqn, flags)
                stops += inside
                moving.update(v for v, flag in zip(eqn.outvars, outs, strict=True) if flag)
        results = tuple(isinstance(v, Var) and v in moving for v in jaxpr.outvars)
        return results, tuple(stops)

    def _through(self, eqn: JaxprEqn, flags: list[bool]) -> tuple[Sequence[bool], _Stops]:
        held = None if traits(eqn).custom_derivative else regions(eqn)
        if held is None:
            outs = self._flat(eqn, flags)
            pairs = zip(eqn.outvars, outs, strict=True)
            used = [flag for v, flag in pairs if not isinstance(v, DropVar)]
            if any(used) and not all(used):
                self.partial.add(id(eqn))
            return outs, () if used and all(used) else ((eqn,),)
        bodies = held.jaxprs
        stops: dict[tuple[JaxprEqn, ...], None] = {}

        def through(number: int, facts: list[bool]) -> tuple[bool, ...]:
            pairs = zip(bodies[number].invars, facts, strict=True)
            given = tuple(flag and is_inexact(v) for v, flag in pairs)
            results, inside = self.run(bodies[number], given)
            stops.update(dict.fromkeys((eqn, *calls) for calls in inside))
            return results

        scan = held.view if isinstance(held.view, Scan) else None
        last = None if scan is None else _last_iteration(scan, flags, through)
        outs = held.forward(flags, through, or_)[1] if last is None else last
        return outs, tuple(stops)

    def _flat(self, eqn: JaxprEqn, flags: list[bool]) -> list[bool]:
        """Return which results of an equation without bodies have tangents."""
        exact = [is_inexact(v) for v in eqn.outvars]
        if not any(exact):
            return exact
        types = (str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars, *eqn.outvars))
        custom = traits(eqn).custom_derivative
        key = id(eqn) if custom else (eqn.primitive, *types)
        key = key, tuple(flags)
        if key not in self._equations:
            try:
                outs = _of_custom_vjp(eqn, flags) if "bwd" in eqn.params else _of_jvp(eqn, flags)
            except Exception:  # JAX may have no rule, and a user's rule may raise anything
                outs = exact
            self._equations[key] = outs
        return [a and b for a, b in zip(self._equations[key], exact, strict=True)]


#: The maximum number of iterations of a loop that are followed one by one.
_MAX_ITERATIONS = 64


def _last_iteration(
    scan: Scan, flags: Sequence[bool], through: Callable[[int, list[bool]], Sequence[bool]]
) -> list[bool] | None:
    """Return which results of a scan have tangents; the carries are those of the last iteration.

    Returns None if that depends on more iterations than are followed.
    """
    count, first = len(scan.carry), len(scan.consts)
    last = first + count
    if not isinstance(scan.length, int) or scan.length < 1:
        return None
    facts, ys = list(flags), [False] * len(scan.ys)
    for _ in range(min(scan.length, _MAX_ITERATIONS)):
        outs = list(through(0, facts))
        ys = [a or b for a, b in zip(ys, outs[count:], strict=True)]
        if outs[:count] == facts[first:last]:
            return facts[first:last] + ys
        facts[first:last] = outs[:count]
    return facts[first:last] + ys if scan.length <= _MAX_ITERATIONS else None


def _of_jvp(eqn: JaxprEqn, flags: Sequence[bool]) -> list[bool]:
    """Return which results have tangents that depend on the tangents of operands.

    Tangents that the rule returns as zeros do not.
    """
    closed, with_tangents = jaxcompat.equation_jvp(eqn, flags)
    jaxpr = jaxcompat.open_jaxpr(closed)
    tangents = [(jaxpr, v) for v in jaxpr.invars[len(eqn.invars) :]]
    reached = iter(forward_slice(jaxpr, Start(tangents)).results[len(eqn.outvars) :])
    return [flag and next(reached) for flag in with_tangents]


def _of_custom_vjp(eqn: JaxprEqn, flags: Sequence[bool]) -> list[bool]:
    """Return True for all results if the cotangent of an operand depends on those of results."""
    rule = vjp_rule(eqn)
    backward = jaxcompat.open_jaxpr(rule.bwd)
    given = [(backward, v) for v in backward.invars[len(rule.forwarded) :]]
    reached = iter(forward_slice(backward, Start(given)).results)
    by_primal = [not zero and next(reached) for zero in rule.in_zeros]
    asked = flags[eqn.params["num_consts"] :]
    moves = any(flag and each for flag, each in zip(asked, by_primal, strict=True))
    return [moves] * len(eqn.outvars)
