"""For rules of the tables "batch" and "batch_bodies".

`rule(axis, primitive, operands, dims, params)` of "batch" computes on operands of which some have
the batch dimension, and returns results and where theirs is, or None to leave the case to JAX's
rule. `rule(writing, eqn)` of "batch_bodies", for equations that hold jaxprs, is one of the domain
of mapped programs; see `extend.domains`.
"""

from jaxprtool.passes.mapping.batch import Axis, BatchDomain, BatchWriting, batch_body, jaxs_rule
from jaxprtool.passes.mapping.batch.axis import Dim

__all__ = ["Axis", "BatchDomain", "BatchWriting", "Dim", "batch_body", "jaxs_rule"]
