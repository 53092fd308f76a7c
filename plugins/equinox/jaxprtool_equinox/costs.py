"""The costs of Equinox's primitives."""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn

from jaxprtool.extend import rule
from jaxprtool.extend.commands import Work


@rule("cost", "nonbatchable", "nondifferentiable_backward", "nontraceable")
def _the_operand_itself(eqn: JaxprEqn) -> Work:
    return Work()


@rule("cost", "unvmap_all", "unvmap_any", "unvmap_max")
def _reduction(eqn: JaxprEqn) -> Work:
    return Work(flops=max(math.prod(eqn.invars[0].aval.shape) - 1, 0))


@rule("cost", "select_if_vmap")
def _selection(eqn: JaxprEqn) -> Work:
    return Work(flops=math.prod(eqn.outvars[0].aval.shape))


@rule("cost", "maybe_set")
def _update(eqn: JaxprEqn) -> Work:
    """Count the part, the third operand, which is written into the existing array."""
    part = eqn.invars[2].aval
    size = math.prod(part.shape) * part.dtype.itemsize
    return Work(bytes_read=size, bytes_written=size)
