"""Find why a gradient is missing, zero or NaN, as far as the program alone shows it.

The gradient is that of one scalar result, the loss. NaNs, and gradients that are zero only for some
inputs, depend on values: `api.investigate.gradient` finds them by running the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.analysis.gradient_flow import gradient_flow
from jaxprtool.analysis.points import point
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.basics.documents import AnyFloat, document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.basics.quantities import listed
from jaxprtool.ir.core.equations import is_inexact, type_of
from jaxprtool.ir.dataflow.slicing import Start, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Aval, DropVar, JaxprEqn
from jaxprtool.jaxcompat import Literal as LiteralValue

#: The kinds of gradients. "integer" to "zero" follow from the program alone; the others are found
#: by running it. A "vanishing" gradient is zero only on these inputs.
Kind = Literal["integer", "unused", "missing", "zero", "NaN", "infinity", "vanishing", "nonzero"]

#: The maximum number of scalar results, or of last operations, that are named.
_FEW = 5


class Reason(NamedTuple):
    """Why an operation stops a gradient, what to do, and the primitive of its derivative."""

    text: str
    remedy: str = ""
    derivative: str = ""


def _step(name: str) -> Reason:
    straight = f"to pass the gradient straight through: x + stop_gradient({name}(x) - x)"
    return Reason(f"{name} is constant between its steps", straight)


_COMPARISON = Reason(
    "a comparison has no derivative", "use a smooth function, such as a sigmoid, instead"
)
_INDEX = Reason(
    "an index has no derivative",
    "use a softmax, a straight-through estimator, or for samples their log-probability",
)

#: Why operations have no derivative, by primitive.
NO_DERIVATIVE: Mapping[str, Reason] = {
    "stop_gradient": Reason("the program stops the gradient here on purpose"),
    "convert_element_type": Reason(
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
ZERO_DERIVATIVE: Mapping[str, Reason] = {
    "relu": Reason(
        "no input that the gradient reaches is positive",
        "use leaky_relu, which has a gradient there",
        "select_n",
    ),
    "relu6": Reason("no input that the gradient reaches is between 0 and 6", "", "select_n"),
    "clamp": Reason("every input that the gradient reaches is out of bounds", "", "select_n"),
    "select_n": Reason("it selects the other values wherever the gradient arrives", "", "select_n"),
    "max": Reason("the other operand is larger wherever the gradient arrives", "", "mul"),
    "min": Reason("the other operand is smaller wherever the gradient arrives", "", "mul"),
    "abs": Reason("its input is 0 wherever the gradient arrives", "", "mul"),
    "mul": Reason("every product is zero", "", "mul"),
    "dot_general": Reason("every product is zero", "", "dot_general"),
    "gather": Reason(
        "every index that the gradient reaches is out of bounds, or its gradients cancel",
        "",
        "scatter-add",
    ),
    "add_any": Reason("the gradients of several uses cancel", "", "add_any"),
    "reduce_sum": Reason("the gradients of the elements cancel"),
    "cond": Reason("the branch that runs does not depend on it", "", "cond"),
}

#: Why operations have a NaN or an infinity as derivative, by primitive.
SINGULAR: Mapping[str, Reason] = {
    "sqrt": Reason("the derivative of sqrt is infinite at 0", "sqrt(where(x > 0, x, 1))"),
    "rsqrt": Reason("rsqrt and its derivative are infinite at 0", "rsqrt(where(x > 0, x, 1))"),
    "log": Reason("log and its derivative are infinite at 0", "log(where(x > 0, x, 1))"),
    "log1p": Reason("the derivative of log1p is infinite at -1", "log1p(where(x > -1, x, 0))"),
    "div": Reason("it divides by 0", "x / where(y != 0, y, 1)"),
    "pow": Reason("the derivative of a power is not finite at 0", "where(x > 0, x, 1) ** p"),
    "acos": Reason("the derivative of arccos is infinite at -1 and 1"),
    "asin": Reason("the derivative of arcsin is infinite at -1 and 1"),
    "atan2": Reason("the derivative of arctan2 is NaN at the origin"),
    "exp": Reason("exp overflows", "subtract the maximum first, as jax.nn.softmax does"),
}


@document(without=("code",), optional=("forward", "reason", "remedy"))
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
    source: str
    code: str = field(repr=False)
    path: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    forward: str = ""
    reason: str = ""
    remedy: str = ""


@document(optional=("type", "norm"))
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
    """

    arguments: tuple[str, ...]
    kind: Kind
    causes: tuple[Cause, ...] = ()
    reaches: tuple[str, ...] = ()
    type: str = ""
    norm: AnyFloat | None = None


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
        found = point(program, to if to.startswith("result:") else f"result:{to}")
        if len(found.ends) > 1:
            hint = f"these are {listed(found.ends, _FEW)}"
            message = f"'{to}' names {len(found.ends)} results, but a gradient is that of one"
            raise ArgumentsError(message, hint)
        position = program.out_names.index(found.ends[0])
        name, aval = results[position]
        if not _is_scalar(aval):
            raise ArgumentsError(
                f"a gradient is that of one real number, but {name} is {type_of(aval)}",
                "return its sum or its mean",
            )
        return position
    scalars = [i for i, (_, aval) in enumerate(results) if _is_scalar(aval)]
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
        return GradientGroup((name,), "nonzero", causes)
    if flow.zero:
        return GradientGroup((name,), "zero", causes)
    run = forward_slice(top, Start([(top, top.invars[position])]))
    reaches = tuple(n for n, flag in zip(program.out_names, run.results, strict=True) if flag)
    eqns = [top.eqns[i] for i in run.inside]
    if not eqns and not reaches:
        return GradientGroup((name,), "unused")
    return GradientGroup((name,), "missing", tuple(_last(program, eqns)), reaches)


def _no_derivative(primitive: str, has_rule: bool) -> Reason:
    if has_rule:
        return Reason("its custom rule returns zeros", "check the rule of its derivative")
    return NO_DERIVATIVE.get(primitive, Reason("it has no derivative"))


def _last(program: Program, eqns: Sequence[JaxprEqn]) -> Iterator[Cause]:
    """Yield the equations whose results no other equation in `eqns` reads."""
    frames = frames_now(program.roots)
    read = {v for eqn in eqns for v in eqn.invars if type(v) is not LiteralValue}
    last = [e for e in eqns if not any(v in read for v in e.outvars if type(v) is not DropVar)]
    for eqn in last[-_FEW:]:
        location = frames.location_of([eqn])
        source = "" if location is None else frames.text(location.frame)
        yield Cause(eqn.primitive.name, source, frames.code_of([eqn]))
