"""Gradients that are zero, and checkpoints that save nothing."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxprtool.analysis.gradient_flow import GradientFlow, Stop, gradient_flow
from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.basics.quantities import some
from jaxprtool.ir.core.equations import is_inexact
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program

#: The maximum number of arrays of the first argument whose stops are named.
_MOST_ARRAYS = 32

#: The share of a function's operations in one checkpoint above which it saves nothing.
_WHOLE = 0.95

#: Functions of fewer operations need no checkpoint at all, and no finding about one.
LEAST_OPERATIONS = 10_000

_BAD_ZERO = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"scale": "f32[64]", "w": "f32[64]"}, "f32[8,64]")
    def f(params, x):
        steps = jnp.round(params["scale"] * 127.0)  # JT801
        return jnp.square(x * params["w"] * steps).mean()
"""

_GOOD_ZERO = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"scale": "f32[64]", "w": "f32[64]"}, "f32[8,64]")
    def f(params, x):
        exact = params["scale"] * 127.0
        steps = exact + jax.lax.stop_gradient(jnp.round(exact) - exact)
        return jnp.square(x * params["w"] * steps).mean()
"""

_BAD_CHECKPOINT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
    @jax.checkpoint
    def f(layers, x):  # JT802
        for w in layers:
            x = jax.nn.gelu(x @ w)
        return x.mean()
"""

_GOOD_CHECKPOINT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
    def f(layers, x):
        @jax.checkpoint
        def layer(x, w):
            return jax.nn.gelu(x @ w)

        for w in layers:
            x = layer(x, w)
        return x.mean()
"""


@lint_rule("JT801", "zero-gradient", bad=_BAD_ZERO, good=_GOOD_ZERO, kind="wrong")
def zero_gradients(program: LintedProgram) -> Iterator[Found]:
    """The gradient of a loss with respect to an array of its first argument is zero.

    Every path from the array to the result goes through an operation without a derivative: `round`,
    a comparison, a cast to integers, `argmax`. The rule does not report `stop_gradient`, unless the
    gradient with respect to every argument is zero, nor metrics that count, such as an accuracy.
    """
    if program.has_backward or not program.is_loss or not isinstance(program.program, Program):
        return
    top = program.top.arguments
    floats = [i for i, value in enumerate(top) if is_inexact(value) and value.live_readers]
    moved = [i for i in floats if top[i] in program.differentiable]
    stopped = [i for i in program.first_argument if i in floats and i not in moved]
    if not moved:
        yield from _without_gradient(program, stopped)
    elif len(stopped) == len(program.first_argument):
        return  # the first argument is data
    for position in stopped[:_MOST_ARRAYS] if moved else ():
        flow = gradient_flow(program.program, [position])
        meant = any(stop.primitive == "stop_gradient" for stop in flow.stops)
        if flow.reached or not flow.zero or not flow.stops or meant:
            continue
        yield _zero(program, flow, flow.argument, program.about.arguments[position].bytes or 0)


def _without_gradient(program: LintedProgram, stopped: list[int]) -> Iterator[Found]:
    """Yield a finding if the gradient with respect to all arguments is zero."""
    arrays = [i for i in stopped if program.top.arguments[i].elements > 1]
    if not arrays or _counts(program.top.results[0]):
        return
    assert isinstance(program.program, Program)
    flow = gradient_flow(program.program, stopped)
    if not flow.reached and flow.zero and flow.stops:
        size = sum(program.about.arguments[i].bytes or 0 for i in arrays)
        yield _zero(program, flow, "every argument", size)


def _zero(program: LintedProgram, flow: GradientFlow, what: str, size: int) -> Found:
    names = some([f"{each.primitive} ({each.source})" for each in flow.stops], 3)
    verb = "stops" if len(flow.stops) == 1 else "stop"
    return Found(
        _node(program, flow.stops[0]),
        f"the gradient with respect to {what} is zero: {names} {verb} every path",
        "pass the gradient straight through: x + stop_gradient(round(x) - x)",
        "{bytes} that are never trained",
        bytes=size,
    )


def _counts(value: Value, most: int = 1000) -> bool:
    """Return True for a metric: a number computed from comparisons, and not from other steps."""
    todo, seen = [value], {value}
    for each in todo:
        node = each.node
        if node is None or each.dtype == bool:
            continue
        is_cut = not is_inexact(each) and any(map(is_inexact, node.ins))
        if is_cut or node.traits.stops_derivative or node.inner or len(seen) > most:
            return False
        todo += [other for other in node.ins if other not in seen]
        seen.update(node.ins)
    return True


def _node(program: LintedProgram, stop: Stop) -> Node | None:
    """Return the equation at which a tangent stops."""
    for node in program.of(stop.primitive):
        if stop.frame is not None and program.frame(node) == stop.frame:
            return node
    return next((n for n in program.nodes if stop.frame and program.frame(n) == stop.frame), None)


@lint_rule("JT802", "useless-checkpoint", bad=_BAD_CHECKPOINT, good=_GOOD_CHECKPOINT)
def useless_checkpoints(program: LintedProgram) -> Iterator[Found]:
    """A `jax.checkpoint` around nearly the whole function does not lower the peak.

    The backward pass first recomputes the whole function and stores all of its values, so the peak
    is as high as without the checkpoint. Checkpoints of parts, one after the other, lower it. A
    checkpoint whose policy saves everything is reported too.
    """
    if program.has_backward or not program.is_loss:
        return
    total = sum(node.operations for node in program.nodes if node.scope is program.top)
    if total < LEAST_OPERATIONS:
        return
    seen, around_others = set[int](), set[int]()
    for node in program.nodes:
        calls = [eqn for eqn in node.around if traits(eqn).call == "remat"]
        around_others.update(map(id, calls[:-1]))
    for node in program.nodes:
        for depth, eqn in enumerate(node.around):
            if traits(eqn).call != "remat" or id(eqn) in seen:
                continue
            seen.add(id(eqn))
            policy, call = eqn.params.get("policy"), node.path[: depth + 1]
            where = None if program.frame_of(call) is None else call
            if policy is jax.checkpoint_policies.everything_saveable:
                yield Found(
                    where,
                    "the policy of this checkpoint saves everything: it does not lower the peak",
                    "use another policy, or remove the checkpoint",
                    "the memory of all residuals",
                )
            elif policy is None and node.scope.parent is None and id(eqn) not in around_others:
                own = program.top.number(node.scope.count.of(eqn))
                if own >= _WHOLE * total:
                    yield Found(
                        where,
                        "one checkpoint holds nearly all of the function: it does not lower the "
                        "peak",
                        "checkpoint parts (each layer), or remove it",
                        "{flops} that a GPU or TPU computes again in the backward pass (XLA for "
                        "the CPU merges them with the forward pass)",
                        flops=own,
                    )
