"""Masking of cumulative sums, products and extremes, forward and in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.slicing import flip_logical
from jaxprtool.passes.mapping.mask.table import MaskContext, MaskRule, mask_rules
from jaxprtool.passes.mapping.mask.values import Facts, Filled, Padded


def _cumulative(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a cumulative sum or product with this identity."""

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        axis, reverse = eqn.params["axis"], eqn.params["reverse"]
        fills = {axis: identity(x.dtype)}
        made = context.apply(
            lambda array: context.bind(eqn, array),
            [x],
            x.shape,
            needed=[fills if reverse else {}],
            derivative=[fills],
            mixed=[axis],
        )
        return Filled(made, fills) if reverse else made

    return apply


rule(mask_rules, "cumsum")(_cumulative(lambda dtype: 0))
rule(mask_rules, "cumprod")(_cumulative(lambda dtype: 1))


@rule(mask_rules, "cummax", "cummin", "cumlogsumexp")
def _extreme(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    """Scan forward even in reverse, on reversed elements, so that padding comes last.

    The fill could be equal to an infinite element, and receive a part of its derivative.
    """
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    turn = reverse and context.bounds.is_masked(x.shape[axis])
    if turn:
        array = flip_logical(context, x.array, x.shape, [axis])
        x = Padded(array, Facts.unknown(x.shape, active=x.active))
    made = context.apply(
        lambda array: context.bind(eqn, array, reverse=reverse and not turn),
        [x],
        x.shape,
        derivative=[{axis: 0}],
        mixed=[axis],
    )
    return flip_logical(context, made, x.shape, [axis]) if turn else made
