"""The open tables of batching rules, and JAX's own rules for every other primitive.

A rule of `batch_rules` is a Python function that computes with JAX on operands, some of which have
a batch dimension. It is traced once per signature (see `templates`). A rule of `structured_rules`
is for an equation that holds jaxprs (see `mapping.domains`); if it returns False, the rule in
`batch_rules` applies instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.jaxcompat import JaxprEqn, Params, Primitive
from jaxprtool.passes.mapping.batch.axes import BatchError, BatchTypeError
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.domains.domain import StructuredRule


class BatchUnsupported(UnsupportedError, NotImplementedError):
    """An equation that cannot be mapped over an axis; names it and its source line."""


#: The operands of a rule.
Operands = Sequence[jax.Array]

#: `rule(axis, primitive, operands, dims, params) -> (results, dims)`. Results and their dimensions
#: are lists if the primitive has multiple results, as in JAX's own table. At least one operand is
#: mapped, unless the equation has an effect. A rule that returns None leaves the case to JAX's own.
BatchRule = Callable[[Axis, Primitive, Operands, Sequence[Dim], Params], tuple[Any, Any] | None]

#: The open table: a plug-in adds its primitive's rule by name.
batch_rules: RuleTable[BatchRule] = RuleTable()


#: The open table of rules for equations that hold jaxprs.
structured_rules: RuleTable[StructuredRule] = RuleTable()


def jaxs_rule(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[Any, Any]:
    """Apply JAX's own batching rule for a primitive, or one that a package registered in JAX.

    Arguments and results are those of a rule in `batch_rules`. Raises NotImplementedError if there
    is no rule.
    """
    rule = jaxcompat.jaxs_batching_rules.get(primitive)
    if rule is None and not any(dim is not None for dim in dims):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results) if primitive.multiple_results else None
    if rule is None:
        raise NotImplementedError(f"Batching rule for '{primitive}' not implemented")
    return rule(axis.data, tuple(operands), tuple(dims), **params)


def refusal(
    eqn: JaxprEqn, reason: str, error_type: type[JaxprToolError] = BatchUnsupported
) -> JaxprToolError:
    """Return the error for an equation that cannot be batched; its message names the equation."""
    return error_type(f"{named(eqn)} cannot be batched: {reason}")


def failed(eqn: JaxprEqn, error: Exception) -> JaxprToolError:
    """Return the error for an equation whose rule raised one, with its kind and message."""
    reason = " ".join(str(error).split()) or type(error).__name__
    error_types = {ValueError: BatchError, TypeError: BatchTypeError}
    error_type = next(
        (error_types[k] for k in error_types if isinstance(error, k)), BatchUnsupported
    )
    return refusal(eqn, reason, error_type)
