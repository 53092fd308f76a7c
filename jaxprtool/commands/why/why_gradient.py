"""`why_gradient`: why a gradient is missing, zero, NaN, or zero on some inputs.

    answer = jaxprtool.why_gradient(program, "params['w']", (params, batch))
    answer.groups[0].kind, answer.groups[0].causes

The program is analysed first, without running it (`commands.why.gradients`). If a path of
operations with derivatives leads to the result, the gradient is run on the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.points import point
from jaxprtool.commands.nans.nans import BadValue, find_nan
from jaxprtool.commands.run.checked import Path, vanishing
from jaxprtool.commands.why.gradients import (
    SINGULAR,
    ZERO_DERIVATIVE,
    Cause,
    GradientAnswer,
    GradientFlow,
    GradientGroup,
    StopReason,
    differentiated_result,
    gradient_flow,
    known_gradient,
)
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.execute.running.run import flat_arguments, run
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import regions, sub_jaxprs
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import structure
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.passes import Pipeline
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.retrace import retraced
from jaxprtool.passes.transforms.derivatives import Grad, ValueAndGrad

T = TypeVar("T")


def why_gradient(
    program: Program,
    argument: str,
    args: object = None,
    *,
    to: str | None = None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> GradientAnswer:
    """Return why the gradient with respect to an argument is zero, NaN or missing.

    Args:
        program: A `Program`.
        argument: An argument by its path (`params['w']`), or `params` for all below it.
        args: The arguments of the program, as a tuple, or as any pytree of the same leaves; random
            ones by default. They are used only if a path of operations with derivatives leads to
            the result.
        to: The result to differentiate; by default the only one that is a real scalar.
        on_progress: Called with progress messages.

    Raises:
        PointError: If the program has no such argument or result.
        ArgumentsError: If there is no scalar result, or several, or the arguments do not fit.
        UnsupportedError: If JAX cannot differentiate the program in reverse mode.
    """
    program = with_contents(program)
    start = point(program, f"argument:{argument.removeprefix('argument:')}")
    result = differentiated_result(program, to)
    if program.symbols and args is not None:
        program = program.at(list(map(np.shape, flat_arguments(program, args))))
    loss = only_result(program, result)
    positions = [program.arg_names.index(name) for name in start.ends]
    on_progress("following gradients")
    groups = [known_gradient(program, loss, position) for position in positions]
    moving = [i for i, group in enumerate(groups) if group.kind == "nonzero"]
    value = None
    if moving:
        on_progress(f"running the gradient of {program.name}")
        values = _values(program, args)
        ran = _GradientRun(loss, [positions[i] for i in moving], values)
        value = ran.value
        for i, group in zip(moving, ran.groups([groups[i] for i in moving]), strict=True):
            groups[i] = group
    name = program.out_names[result]
    return GradientAnswer(program.name, start.name, name, value, tuple(_folded(groups)))


def only_result(program: Program, position: int) -> Program:
    """Return the program of one result, as a function of flat arguments."""
    jaxpr = jaxcompat.replace_jaxpr(program.jaxpr, outvars=[program.jaxpr.outvars[position]])
    flat = tuple(range(len(program.in_avals)))
    return Dce()(
        program.replace(
            jaxpr=jaxpr,
            in_tree=structure((flat, {})),
            out_tree=structure(0),
            out_names=(program.out_names[position],),
        )
    )


def _values(program: Program, args: object) -> Sequence[Any]:
    if args is not None:
        return flat_arguments(program, args)
    avals = zip(program.arg_names, program.in_avals, strict=True)
    types = {name: jax.ShapeDtypeStruct(aval.shape, aval.dtype) for name, aval in avals}
    return fill_arguments(program, types).arguments


def _folded(groups: Sequence[GradientGroup]) -> Iterator[GradientGroup]:
    """Yield groups; those with the same answer are merged."""
    alike: dict[GradientGroup, list[GradientGroup]] = {}
    for group in groups:
        key = replace(group, arguments=(), norm=None, uses=())
        if group.kind == "missing":  # the leaves of a state have different results and operations
            key = replace(key, reaches=(), causes=())
        alike.setdefault(key, []).append(group)
    for members in alike.values():
        norms = [group.norm for group in members if group.norm is not None]
        yield replace(
            members[0],
            arguments=_joined(group.arguments for group in members),
            reaches=_joined(group.reaches for group in members),
            causes=_joined(group.causes for group in members),
            uses=_joined(group.uses for group in members),
            norm=float(np.sqrt(np.sum(np.square(norms)))) if norms else None,
        )


def _joined(groups: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(entry for group in groups for entry in group))


class _GradientRun:
    """The gradient of a scalar, run on given inputs.

    Args:
        loss: A program with one result, a function of flat arguments.
        positions: The arguments to differentiate with respect to.
        values: The flat arguments.
    """

    def __init__(self, loss: Program, positions: Sequence[int], values: Sequence[Any]):
        self._loss = loss
        self._frames = frames_now(loss.roots)
        self._program = pullback(loss, positions)
        cotangent = np.ones((), loss.out_avals[0].dtype)
        self._values = [*values, cotangent]
        ran = run(self._program, self._values, repeat=0)
        self.value = float(np.asarray(ran.outputs[0].value, np.float64))
        self._gradients = [output.value for output in ran.outputs[1:]]

    def groups(self, known: Sequence[GradientGroup]) -> list[GradientGroup]:
        """Return the groups of gradients, given the groups that the program alone determines."""
        norms = list(map(_norm, self._gradients))
        groups = [replace(group, norm=norm) for group, norm in zip(known, norms, strict=True)]
        bad = [i for i, norm in enumerate(norms) if not np.isfinite(norm)]
        zero = [i for i, norm in enumerate(norms) if norm == 0 and self._gradients[i].size]
        if bad:
            bad_values = find_nan(self._program, tuple(self._values)).found
            for i in bad:
                groups[i] = self._not_finite(groups[i], i, bad_values)
        if zero:
            vanished = vanishing(self._program, self._values, [i + 1 for i in zero])
            for i, paths in zip(zero, vanished, strict=True):
                if paths is None:  # zero in JAX for all inputs
                    groups[i] = replace(groups[i], kind="zero", norm=None)
                else:
                    causes = tuple(dict.fromkeys(map(self._vanished, paths)))
                    groups[i] = replace(groups[i], kind="vanishing", causes=causes)
        return groups

    def _not_finite(
        self, group: GradientGroup, number: int, bad_values: Sequence[BadValue]
    ) -> GradientGroup:
        name = self._program.out_names[number + 1]
        is_nan = bool(np.isnan(np.asarray(self._gradients[number])).any())
        first = next((bad_value for bad_value in bad_values if name in bad_value.reaches), None)
        causes = () if first is None else (self._singular(first),)
        return replace(group, kind="NaN" if is_nan else "infinity", causes=causes)

    def _singular(self, bad: BadValue) -> Cause:
        """Return the cause of a NaN or an infinity."""
        if bad.argument:
            return Cause(bad.argument, UNKNOWN, "", reason=f"the argument contains {_a(bad.kind)}")
        alike = self._primal_at(bad.source)
        is_forward = any(name == bad.primitive for name in alike)
        forward = bad.primitive if is_forward else next((n for n in alike if n in SINGULAR), "")
        reason = SINGULAR.get(forward or bad.primitive, StopReason(""))
        remedy = reason.remedy and f"guard the operand, not only the result: {reason.remedy}"
        return Cause(
            bad.primitive,
            bad.source.user,
            bad.code,
            bad.path,
            bad.iteration,
            "" if is_forward else forward,
            reason.text,
            remedy,
        )

    def _vanished(self, path: Path) -> Cause:
        """Return the cause of a zero cotangent."""
        source, primitive = self._frames.line_of(path), str(path[-1].primitive.name)
        # The derivatives of several operations on a line may have the same primitive.
        alike = dict.fromkeys(
            name
            for name in self._primal_at(source)
            if name in ZERO_DERIVATIVE and ZERO_DERIVATIVE[name].derivative == primitive
        )
        forward = " or ".join(alike) or primitive
        reason = ZERO_DERIVATIVE.get(forward, StopReason("its derivative is zero on these inputs"))
        around = [i for i, eqn in enumerate(path[:-1]) if _is_loop(eqn)]
        inside = ", in at least one iteration" if around else ""
        return Cause(
            primitive,
            source.user,
            self._frames.code_of(path),
            tuple(self._frames.named(path[: i + 1]) for i in around),
            forward="" if forward == primitive else forward,
            reason=reason.text + inside,
            remedy=reason.remedy,
        )

    def _primal_at(self, source: Place) -> list[str]:
        """Return the operations of the program on a line, or else on the user's line."""
        exact, near = [], []
        for path in _paths(jaxcompat.open_jaxpr(self._loss.jaxpr), ()):
            line = self._frames.line_of(path)
            if line == source:
                exact.append(_name(path[-1]))
            elif source and line.user == source.user:
                near.append(_name(path[-1]))
        return exact or near


def pullback(loss: Program, positions: Sequence[int]) -> Program:
    """Return a program of the arguments and a cotangent, to the result and its gradients."""
    evaluate = jaxcompat.jaxpr_as_fun(loss.jaxpr)

    def pullback(*args: Any) -> tuple[Any, ...]:
        *values, cotangent = args

        def of(*chosen: Any) -> Any:
            arguments = list(values)
            for position, value in zip(positions, chosen, strict=True):
                arguments[position] = value
            (result,) = evaluate(*arguments)
            return result

        result, back = jax.vjp(of, *(values[i] for i in positions))
        return (result, *back(cotangent))

    count = len(loss.in_avals)
    return retraced(
        loss,
        "grad",
        pullback,
        in_tree=structure((tuple(range(count + 1)), {})),
        avals=[*loss.in_avals, loss.out_avals[0].to_ct_aval()],
        arg_names=[*loss.arg_names, "cotangent"],
        out_names=[*loss.out_names, *(loss.arg_names[i] for i in positions)],
    )


def _norm(value: Any) -> float:
    array = np.asarray(value)
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return float(np.linalg.norm(wide))


def _is_loop(eqn: JaxprEqn) -> bool:
    inside = regions(eqn)
    return inside is not None and inside.repeats


def _a(kind: str) -> str:
    return "a NaN" if kind == "NaN" else "an infinity"


def _paths(jaxpr: Jaxpr, around: Path) -> Iterator[Path]:
    """Yield the equations at every depth, except in functions with custom derivative rules."""
    for eqn in jaxpr.eqns:
        path = (*around, eqn)
        yield path
        for _, inner in () if traits(eqn).custom_derivative else sub_jaxprs(eqn):
            yield from _paths(jaxcompat.open_jaxpr(inner), path)


def _name(eqn: JaxprEqn) -> str:
    named = traits(eqn).custom_derivative and "call_jaxpr" in eqn.params
    return jaxcompat.custom_name(eqn) if named else str(eqn.primitive.name)


# --- gradients ------------------------------------------------------------------------------------
# Zero gradients, and the equations of the differentiated program that stop them.


def zero_gradient_flows(
    traced: Program, gradient: Program, pipeline: Pipeline, results: Sequence[str]
) -> Iterator[GradientFlow]:
    """Yield the equations that stop the gradient for each zero result.

    Args:
        traced: The program before the passes.
        gradient: The program after them.
        pipeline: The passes. Yields nothing unless they differentiate the traced program.
        results: Names of results of `gradient`.
    """
    passes = [transform for transform in pipeline.passes() if not transform.preserves]
    if len(passes) != 1 or not isinstance(passes[0], Grad | ValueAndGrad):
        return
    argnums = passes[0].argnums
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    sizes = [tree.num_leaves for tree in traced.in_tree.children()[0].children()]
    leaves: list[int] = []
    for number in numbers:
        first = sum(sizes[: number % len(sizes)])
        leaves += range(first, first + sizes[number])
    # The gradients are after the value and before the forwarded results.
    first = 1 if isinstance(passes[0], ValueAndGrad) else 0
    names = gradient.out_names[first : first + len(leaves)]
    for name, position in zip(names, leaves, strict=False):
        if name in results:
            flow = gradient_flow(traced, [position])
            if flow.zero and not flow.reached:
                yield flow
