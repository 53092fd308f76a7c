"""Masking of products of matrices."""

from __future__ import annotations

from typing import Any

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Padded


@rule(mask_rules, "dot_general")
def _dot_general(context: MaskContext, eqn: JaxprEqn, x: Padded, y: Padded) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    operands = (x, y)
    free = [
        [i for i in range(z.ndim) if i not in (*contracted[k], *batch[k])]
        for k, z in enumerate(operands)
    ]
    # The derivative with respect to one operand is a product that sums over the other's free axes.
    derivative: list[dict[int, int]] = [{}, {}]
    mixed = []
    start = len(batch[0])
    for k, other in enumerate((y, x)):
        if other.active:
            derivative[k] = dict.fromkeys(free[k], 0)
            mixed += [start + i for i in range(len(free[k]))]
        start += len(free[k])
    return context.apply(
        lambda a, b: context.bind(eqn, a, b),
        operands,
        eqn.outvars[0].aval.shape,
        needed=[dict.fromkeys(axes, 0) for axes in contracted],
        derivative=derivative,
        mixed=mixed,
    )


@rule(mask_rules, "ragged_dot_general")
def _ragged_dot_general(
    context: MaskContext, eqn: JaxprEqn, x: Padded, y: Padded, groups: Padded
) -> Any:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, _ = numbers.dot_dimension_numbers
    if context.axes(groups):
        raise refusal(eqn, "the number of groups is masked")
    shape = eqn.outvars[0].aval.shape
    return context.apply(
        lambda a, b, sizes: context.bind(eqn, a, b, sizes),
        [x, y, groups],
        shape,
        needed=[*(dict.fromkeys(axes, 0) for axes in contracted), {}],
        derivative=[dict.fromkeys(range(x.ndim), 0), dict.fromkeys(range(y.ndim), 0), {}],
        mixed=range(len(shape)),
    )
