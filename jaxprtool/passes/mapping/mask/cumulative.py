"""Masking of cumulative sums, products and extremes, forward and in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.reductions import identities, one
from jaxprtool.passes.mapping.mask.slicing import flip_logical
from jaxprtool.passes.mapping.mask.table import MaskContext, MaskRule, mask_rules
from jaxprtool.passes.mapping.mask.values import Facts, Filled, Padded


def _cumulative(neutral: int, identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a cumulative sum or product.

    Args:
        neutral: The number that changes no finite sum or product, for the derivative.
        identity: The identity, a function of the dtype. Forward, the padding comes last, and the
            values need none.
    """

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        axis, reverse = eqn.params["axis"], eqn.params["reverse"]
        fills = identities(context, x, [axis], identity) if reverse else {}
        made = context.apply(
            lambda array: context.bind(eqn, array),
            [x],
            x.shape,
            needed=[fills],
            derivative=[{axis: neutral}],
            mixed=[axis],
        )
        return Filled(made, fills) if reverse else made

    return apply


rule(mask_rules, "cumsum")(_cumulative(0, lambda dtype: 0))
rule(mask_rules, "cumprod")(_cumulative(1, one))


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
