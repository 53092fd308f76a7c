"""`residuals`: what a gradient keeps between its halves, and what each policy would keep.

found = jaxprtool.residuals(program)
found.total_bytes, found.residuals[0].source, found.policies["dots_saveable"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxprtool.analysis import residuals as analysis
from jaxprtool.analysis.residuals import Residual
from jaxprtool.api.budget import Proposal, checkpoint_names, proposal
from jaxprtool.ir.checkpoint_policies import MAKERS, POLICIES
from jaxprtool.ir.program import Program
from jaxprtool.ir.quantities import bytes_of
from jaxprtool.passes.transforms.calls import Checkpoint
from jaxprtool.passes.transforms.linear import Vjp

#: The policies that are compared: those of JAX that need no argument, each by one name.
_NAMES = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


@dataclass(frozen=True)
class Residuals:
    """What the backward pass of a program needs of the forward pass.

    Attributes:
        name: The program.
        total_bytes: The bytes of all residuals; None if sizes are symbolic.
        residuals: The residuals, the largest first.
        policies: The bytes that are kept under each policy of `jax.checkpoint`, around all of it.
        proposal: What to save so that a budget is kept; None if none was asked for.
    """

    name: str
    total_bytes: int | None
    residuals: tuple[Residual, ...]
    policies: Mapping[str, int | None]
    proposal: Proposal | None = None


def residuals(program: Program, budget: int | str | None = None) -> Residuals:
    """Return what the gradient of a program keeps between its forward and backward half.

    Args:
        program: A `Program` of results that can be differentiated.
        budget: So many bytes may be kept, `"8GiB"`: adds a proposal what to save.

    Raises:
        ArgumentsError: If no choice of values to save keeps the budget, or it cannot be read.
        UnsupportedError: As the pass `vjp` does.
    """
    limit = bytes_of(budget) if isinstance(budget, str) else budget
    policies = _policies(program)
    halves = Vjp()(program)
    forward, backward = halves["forward"], halves["backward"]
    totals = {
        name: analysis.total_bytes(Vjp()(Checkpoint(policy)(program))["backward"])
        for name, policy in policies.items()
    }
    return Residuals(
        program.name,
        analysis.total_bytes(backward),
        analysis.residuals(forward, backward, policies),
        totals,
        None if limit is None else proposal(program, halves, limit),
    )


def _policies(program: Program) -> dict[str, Any]:
    """Return JAX's policies, and the one that keeps what has a name, if something has."""
    found = {name: POLICIES[name] for name in _NAMES}
    names = checkpoint_names(program)
    if names:
        listed = ", ".join(map(repr, names))
        found[f"save_only_these_names({listed})"] = MAKERS["save_only_these_names"](*names)
    return found
