"""Find why a gradient is missing, zero or NaN, and the operations that stop it.

The gradient is that of one scalar result, the loss. NaNs, and gradients that are zero only for some
inputs, depend on values: `commands.why.why_gradient` finds them by running the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import or_
from typing import Literal, NamedTuple, TypeAlias

from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.analysis.points import point
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir import source_text
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.custom_rules import RuleRaised, vjp_rule
from jaxprtool.ir.dataflow import Start, backward_slice, forward_slice
from jaxprtool.ir.documents import AnyFloat, Printed, document, listed
from jaxprtool.ir.equations import all_jaxprs, is_inexact, type_of
from jaxprtool.ir.frames import Frames, SourceNames, frames_now
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.regions import Scan, regions, sub_jaxprs
from jaxprtool.ir.scopes import is_differentiated
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Aval, DropVar, Jaxpr, JaxprEqn, Var
from jaxprtool.jaxcompat import Literal as LiteralValue
from jaxprtool.jaxcompat.source_locations import UserFrame

# --- gradient causes ------------------------------------------------------------------------------
# Find why a gradient is missing, zero or NaN, as far as the program alone shows it.

#: The kinds of gradients. "integer" to "zero" follow from the program alone; the others are found
#: by running it. A "vanishing" gradient is zero only on these inputs.
Kind = Literal["integer", "unused", "missing", "zero", "NaN", "infinity", "vanishing", "nonzero"]

#: The maximum number of expressions that read an argument and are followed to the result.
_MOST_USES = 8

#: The maximum number of scalar results, or of last operations, that are named.
_FEW = 5


class StopReason(NamedTuple):
    """Why an operation stops a gradient, what to do, and the primitive of its derivative."""

    text: str
    remedy: str = ""
    derivative: str = ""


def _step(name: str) -> StopReason:
    straight = f"to pass the gradient straight through: x + stop_gradient({name}(x) - x)"
    return StopReason(f"{name} is constant between its steps", straight)


_COMPARISON = StopReason(
    "a comparison has no derivative", "use a smooth function, such as a sigmoid, instead"
)
_INDEX = StopReason(
    "an index has no derivative",
    "use a softmax, a straight-through estimator, or for samples their log-probability",
)

#: Why operations have no derivative, by primitive.
NO_DERIVATIVE: Mapping[str, StopReason] = {
    "stop_gradient": StopReason("the program stops the gradient here on purpose"),
    "convert_element_type": StopReason(
        "a cast to integers or booleans has no derivative", "keep the value in floating point"
    ),
    "round": _step("round"),
    "floor": _step("floor"),
    "ceil": _step("ceil"),
    "sign": _step("sign"),
    "eq": _COMPARISON,
    "ne": _COMPARISON,
    "lt": _COMPARISON,
    "le": _COMPARISON,
    "gt": _COMPARISON,
    "ge": _COMPARISON,
    "argmax": _INDEX,
    "argmin": _INDEX,
}

#: Why operations have a derivative of zero on some inputs, by primitive or custom function. Each
#: holds for the elements whose cotangent is not zero.
ZERO_DERIVATIVE: Mapping[str, StopReason] = {
    "relu": StopReason(
        "no input that the gradient reaches is positive",
        "use leaky_relu, which has a gradient there",
        "select_n",
    ),
    "relu6": StopReason("no input that the gradient reaches is between 0 and 6", "", "select_n"),
    "clamp": StopReason("every input that the gradient reaches is out of bounds", "", "select_n"),
    "select_n": StopReason(
        "it selects the other values wherever the gradient arrives", "", "select_n"
    ),
    "max": StopReason("the other operand is larger wherever the gradient arrives", "", "mul"),
    "min": StopReason("the other operand is smaller wherever the gradient arrives", "", "mul"),
    "abs": StopReason("its input is 0 wherever the gradient arrives", "", "mul"),
    "mul": StopReason("every product is zero", "", "mul"),
    "dot_general": StopReason("every product is zero", "", "dot_general"),
    "gather": StopReason(
        "every index that the gradient reaches is out of bounds, or its gradients cancel",
        "",
        "scatter-add",
    ),
    "add_any": StopReason("the gradients of several uses cancel", "", "add_any"),
    "reduce_sum": StopReason("the gradients of the elements cancel"),
    "cond": StopReason("the branch that runs does not depend on it", "", "cond"),
}

#: Why operations have a NaN or an infinity as derivative, by primitive.
SINGULAR: Mapping[str, StopReason] = {
    "sqrt": StopReason("the derivative of sqrt is infinite at 0", "sqrt(where(x > 0, x, 1))"),
    "rsqrt": StopReason("rsqrt and its derivative are infinite at 0", "rsqrt(where(x > 0, x, 1))"),
    "log": StopReason("log and its derivative are infinite at 0", "log(where(x > 0, x, 1))"),
    "log1p": StopReason("the derivative of log1p is infinite at -1", "log1p(where(x > -1, x, 0))"),
    "gather": StopReason("an index is out of bounds, for which it returns NaN"),
    "div": StopReason("it divides by 0", "x / where(y != 0, y, 1)"),
    "pow": StopReason("the derivative of a power is not finite at 0", "where(x > 0, x, 1) ** p"),
    "acos": StopReason("the derivative of arccos is infinite at -1 and 1"),
    "asin": StopReason("the derivative of arcsin is infinite at -1 and 1"),
    "atan2": StopReason("the derivative of arctan2 is NaN at the origin"),
    "exp": StopReason("exp overflows", "subtract the maximum first, as jax.nn.softmax does"),
}


@document(names={"source": "place"}, without=("code",), optional=("forward", "reason", "remedy"))
@dataclass(frozen=True)
class Cause:
    """An operation at which a gradient stops, or becomes NaN.

    Attributes:
        primitive: The name of its primitive, or of the custom function.
        source: The user's line, `model.py:9`; "" if unknown.
        code: The source text of the line, if its file exists.
        path: The enclosing equations, the outermost first: `scan at model.py:7`.
        iteration: The iteration of each enclosing loop, from 0, if one is to blame.
        forward: The operation whose derivative it is, if it is in the backward pass only.
        reason: Why it stops the gradient, or makes it NaN.
        remedy: What to do.
    """

    primitive: str
    source: Place
    code: str = field(repr=False)
    path: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    forward: str = ""
    reason: str = ""
    remedy: str = ""


class GradientUse(NamedTuple):
    """An expression of the differentiated function that reads an argument.

    Attributes:
        code: Its source text: `critic(params, states)`.
        place: Its line.
    """

    code: str
    place: Place


@document(optional=("type", "norm", "uses"))
@dataclass(frozen=True)
class GradientGroup:
    """Arguments whose gradients are alike.

    Attributes:
        arguments: Their names.
        kind: "integer" (without derivatives), "unused", "missing" (the result does not depend on
            them), "zero" (for all inputs), "NaN", "infinity", "vanishing" (zero on these inputs) or
            "nonzero".
        causes: The operations at which every path to the result stops, or which make the NaN; if
            the gradient is not zero, those that stop some paths; if it is missing, the last
            operations that depend on it.
        reaches: If it is missing, the other results that depend on it.
        type: The type of the arguments if they are integers.
        norm: The norm of all their gradients, if they were computed.
        uses: The expressions that the gradient comes from, if there are several.
    """

    arguments: tuple[str, ...]
    kind: Kind
    causes: tuple[Cause, ...] = ()
    reaches: tuple[str, ...] = ()
    type: str = ""
    norm: AnyFloat | None = None
    uses: tuple[GradientUse, ...] = ()


@document(names={"program": "name"}, optional=("value",))
@dataclass(frozen=True)
class GradientAnswer(Printed):
    """Why the gradient of a result with respect to arguments is missing, zero or NaN, if it is.

    Attributes:
        program: The name of the program.
        what: The argument, or the prefix of several.
        result: The result that is differentiated.
        value: Its value, if it was computed.
        groups: The arguments, grouped by their answer.
    """

    program: str
    what: str
    result: str
    value: AnyFloat | None
    groups: tuple[GradientGroup, ...]


def differentiated_result(program: Program, to: str | None) -> int:
    """Return the position of the result to differentiate.

    Args:
        program: A program.
        to: The name of the result; if None, the program must have one scalar result with floats.

    Raises:
        ArgumentsError: If there is no such result, or more than one, or it is no real scalar.
        PointError: If the program has no result of that name.
    """
    results = list(zip(program.out_names, program.out_avals, strict=True))
    if to is not None:
        target = point(program, to if to.startswith("result:") else f"result:{to}")
        if len(target.ends) > 1:
            hint = f"these are {listed(target.ends, _FEW)}"
            message = f"'{to}' names {len(target.ends)} results, but a gradient is that of one"
            raise ArgumentsError(message, hint)
        position = program.out_names.index(target.ends[0])
        name, aval = results[position]
        if not _is_scalar(aval):
            raise ArgumentsError(
                f"a gradient is that of one real number, but {name} is {type_of(aval)}",
                "return its sum or its mean",
            )
        return position
    scalars = [i for i, (_, aval) in enumerate(results) if _is_scalar(aval)]
    if len(scalars) > 1:  # what a function inside a gradient keeps for its backward part
        scalars = [i for i in scalars if not results[i][0].startswith("residual[")] or scalars
    if len(scalars) == 1:
        return scalars[0]
    if scalars:
        names = listed([results[i][0] for i in scalars], _FEW)
        raise ArgumentsError(
            f"{program.name} has {len(scalars)} scalar results, but a gradient is that of one",
            f"choose one with --to: {names}",
        )
    types = listed([f"{name}: {type_of(aval)}" for name, aval in results], _FEW)
    raise ArgumentsError(
        f"{program.name} has no gradient, since no result is one real number",
        f"it returns {types or 'nothing'}; give a function that returns a loss",
    )


def _is_scalar(aval: Aval) -> bool:
    dtype = getattr(aval, "dtype", None)
    return getattr(aval, "shape", None) == () and jnp.issubdtype(dtype, jnp.floating)


def known_gradient(program: Program, loss: Program, position: int) -> GradientGroup:
    """Return what the program alone shows of the gradient with respect to an argument.

    The kind is "nonzero" if a path of operations with derivatives leads to the result.

    Args:
        program: The program with all results.
        loss: The program with the differentiated result only.
        position: The position of the argument.
    """
    name, aval = program.arg_names[position], program.in_avals[position]
    top = jaxcompat.open_jaxpr(program.jaxpr)
    if not is_inexact(top.invars[position]):
        return GradientGroup((name,), "integer", type=type_of(aval))
    flow = gradient_flow(loss, [position])
    causes = tuple(
        Cause(
            stop.primitive,
            stop.source,
            stop.code,
            reason=(reason := _no_derivative(stop.primitive, stop.has_rule)).text,
            remedy=reason.remedy,
        )
        for stop in flow.stops
    )
    if flow.reached:
        return GradientGroup((name,), "nonzero", causes, uses=tuple(_uses(loss, position)))
    if flow.zero:
        return GradientGroup((name,), "zero", causes)
    run = forward_slice(top, Start([(top, top.invars[position])]))
    reaches = tuple(n for n, flag in zip(program.out_names, run.results, strict=True) if flag)
    eqns = [top.eqns[i] for i in run.inside]
    if not eqns and not reaches:
        return GradientGroup((name,), "unused")
    return GradientGroup((name,), "missing", tuple(_last(program, eqns)), reaches)


def _uses(loss: Program, position: int) -> Iterator[GradientUse]:
    """Yield the expressions of a function through which the gradient of an argument flows.

    Yields nothing unless there are several: a gradient that a `stop_gradient` is to stop, as of the
    target of a temporal difference, is one of them.
    """
    top, frames, names = jaxcompat.open_jaxpr(loss.jaxpr), frames_now(loss.roots), SourceNames()
    argument, readers = top.invars[position], dict[UserFrame, list[int]]()
    for i, eqn in enumerate(top.eqns):
        users = [frame for frame in frames.of(eqn) if frames.is_users(frame.file)]
        if argument in eqn.invars and users:
            inside = (f for f in users if f.function.rpartition(".")[2] == loss.name)
            readers.setdefault(next(inside, users[-1]), []).append(i)
    uses = list[GradientUse]()
    for frame, numbers in readers.items() if 1 < len(readers) <= _MOST_USES else ():
        use, eqns = jaxcompat.Var(argument.aval), list(top.eqns)
        for i in numbers:
            operands = [use if v is argument else v for v in eqns[i].invars]
            eqns[i] = eqns[i].replace(invars=operands)
        jaxpr = jaxcompat.replace_jaxpr(top, invars=[*top.invars, use], eqns=eqns)
        if gradient_flow(jaxpr, [len(top.invars)]).reached:
            text = names.text(frame) or source_text.line(frame.file, frame.line).strip()
            uses.append(GradientUse(text, frames.text(frame)))
    yield from dict.fromkeys(uses) if len(uses) > 1 else ()


def _no_derivative(primitive: str, has_rule: bool) -> StopReason:
    if has_rule:
        return StopReason("its custom rule returns zeros", "check the rule of its derivative")
    return NO_DERIVATIVE.get(primitive, StopReason("it has no derivative"))


def _last(program: Program, eqns: Sequence[JaxprEqn]) -> Iterator[Cause]:
    """Yield the equations whose results no other equation in `eqns` reads."""
    frames = frames_now(program.roots)
    read = {v for eqn in eqns for v in eqn.invars if type(v) is not LiteralValue}
    last = [e for e in eqns if not any(v in read for v in e.outvars if type(v) is not DropVar)]
    for eqn in last[-_FEW:]:
        location = frames.location_of([eqn])
        source = UNKNOWN if location is None else frames.text(location.frame)
        yield Cause(eqn.primitive.name, source, frames.code_of([eqn]))


# --- losses ---------------------------------------------------------------------------------------
# The functions whose gradient a program takes, such as the loss of a training step.

#: The files and lines of a call stack; the columns of one call differ.
Lines: TypeAlias = tuple[tuple[str, int], ...]


def call_lines(stack: Sequence[UserFrame]) -> Lines:
    """Return the files and lines of a call stack."""
    return tuple((frame.file, frame.line) for frame in stack)


def losses_by_lines(jaxpr: Jaxpr, frames: Frames) -> dict[Lines, str]:
    """Return the user's functions that run in gradients, by the lines that call them."""
    eqns = (eqn for body in all_jaxprs(jaxpr) for eqn in body.eqns if is_differentiated(eqn))
    losses = dict[Lines, str]()
    for stack in {eqn.source_info.traceback: frames.of(eqn) for eqn in eqns}.values():
        inside = ""
        for i, frame in enumerate(stack):
            if inside:
                losses.setdefault(call_lines(stack[i:]), inside)
            if frames.is_users(frame.file):
                inside = frame.function.rpartition(".")[2]
        losses.setdefault((), inside)  # the gradient itself is under jax.jit
    return losses


def main_loss(program: Program) -> str:
    """Return the name of the function whose gradient is most of a program; "" if there is none."""
    frames, stacks, others = frames_now(program.roots), list[list[str]](), set[str]()
    todo, seen = [(jaxcompat.open_jaxpr(program.jaxpr), False)], set[Jaxpr]()
    for body, is_call in todo:
        others.add(body.debug_info.func_name)
        for eqn in () if body in seen else body.eqns:
            users = (frame for frame in frames.of(eqn) if frames.is_users(frame.file))
            names = [frame.function.rpartition(".")[2] for frame in users]
            if is_differentiated(eqn):
                stacks.append(names)
                continue
            if not is_call:  # the body of a call may be cached, with the frames of another call
                others.update(names)
            inside = sub_jaxprs(eqn)
            todo += [(jaxcompat.open_jaxpr(inner), bool(traits(eqn).call)) for _, inner in inside]
        seen.add(body)
    called = Counter(
        inner
        for names in stacks
        for inner, outer in pairwise(names)
        if outer in others and inner not in others and inner.isidentifier()
    )
    return called.most_common(1)[0][0] if called else ""


# --- gradient flow --------------------------------------------------------------------------------
# Find the operations with zero derivative that stop the gradient with respect to an argument.
#
# A tangent of the argument is followed through the program, as far as JAX's rules propagate it. It
# stops at operations such as `round`, `stop_gradient`, comparisons and casts to integers, and at
# calls whose custom rule returns zero.


@document(names={"source": "place"}, without=("frame", "code", "has_rule"))
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
    source: Place
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
    values = [(top, v) for i in ends if not isinstance(v := top.outvars[i], LiteralValue)]
    leading = backward_slice(top, Start(values)).members()
    frames = frames_now(about.roots)
    on_the_way = [calls for calls in stopped if all(id(eqn) in leading for eqn in calls)]
    whole = [calls for calls in on_the_way if id(calls[-1]) not in tangents.partial]
    if whole or any(moved[i] for i in ends):
        on_the_way = whole
    names = [output.name for output in about.outputs]
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
    source = UNKNOWN if frame is None else frames.text(frame)
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
    def run(self, jaxpr: Jaxpr, perturbed: tuple[bool, ...]) -> tuple[tuple[bool, ...], _Stops]:
        """Return which results of a body have tangents, and where tangents stop."""
        moving = {v for v, flag in zip(jaxpr.invars, perturbed, strict=True) if flag}
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
        control = None if traits(eqn).custom_derivative else regions(eqn)
        if control is None:
            outs = self._flat(eqn, flags)
            pairs = zip(eqn.outvars, outs, strict=True)
            used = [flag for v, flag in pairs if not isinstance(v, DropVar)]
            if any(used) and not all(used):
                self.partial.add(id(eqn))
            return outs, () if used and all(used) else ((eqn,),)
        bodies = control.jaxprs
        stops: dict[tuple[JaxprEqn, ...], None] = {}

        def through(number: int, facts: list[bool]) -> tuple[bool, ...]:
            pairs = zip(bodies[number].invars, facts, strict=True)
            perturbed = tuple(flag and is_inexact(v) for v, flag in pairs)
            results, inside = self.run(bodies[number], perturbed)
            stops.update(dict.fromkeys((eqn, *calls) for calls in inside))
            return results

        scan = control.view if isinstance(control.view, Scan) else None
        last = None if scan is None else _last_iteration(scan, flags, through)
        outs = control.forward(flags, through, or_)[1] if last is None else last
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
    if rule.raises is not None:
        raise RuleRaised(f"{rule.fwd_name} or {rule.bwd_name}", rule.raises)
    backward = jaxcompat.open_jaxpr(rule.bwd)
    cotangents = [(backward, v) for v in backward.invars[len(rule.forwarded) :]]
    reached = iter(forward_slice(backward, Start(cotangents)).results)
    by_primal = [not zero and next(reached) for zero in rule.in_zeros]
    asked = flags[eqn.params["num_consts"] :]
    moves = any(flag and is_reached for flag, is_reached in zip(asked, by_primal, strict=True))
    return [moves] * len(eqn.outvars)
