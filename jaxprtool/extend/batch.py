"""Types and functions for rules of the tables "batch" and "batch_bodies".

`rule(axis, primitive, operands, dims, params)` of "batch" computes on operands, some of which have
a batch dimension. It returns the results and their batch dimensions, or None to use JAX's rule.
`rule(builder, eqn)` of "batch_bodies", for equations that hold jaxprs, is a rule of the domain of
mapped programs; see `extend.domains`.
"""

from jaxprtool.passes.mapping.batch import (
    Axis,
    BatchBodyBuilder,
    BatchDomain,
    batch_body,
    jaxs_rule,
)
from jaxprtool.passes.mapping.batch.axes import Dim

__all__ = ["Axis", "BatchBodyBuilder", "BatchDomain", "Dim", "batch_body", "jaxs_rule"]
