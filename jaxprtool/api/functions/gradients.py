"""Zero gradients, and the equations of the differentiated program that stop them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxprtool.analysis.gradient_flow import GradientFlow, gradient_flow
from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.framework.pipeline import Pipeline
from jaxprtool.passes.transforms.derivatives import Grad, ValueAndGrad


def zero_gradients(
    traced: Program, gradient: Program, pipeline: Pipeline, results: Sequence[str]
) -> Iterator[GradientFlow]:
    """Yield the equations that stop the gradient for each zero result.

    Args:
        traced: The program before the passes.
        gradient: The program after them.
        pipeline: The passes. Yields nothing unless they differentiate the traced program.
        results: Names of results of `gradient`.
    """
    passes = [each for each in pipeline.passes() if not each.preserves]
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
