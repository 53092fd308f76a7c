"""`residuals`: the values that a gradient keeps for its backward pass, also under each policy.

found = jaxprtool.residuals(program)
found.total_bytes, found.residuals[0].source, found.policies["dots_saveable"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.dtypes import float0

from jaxprtool import jaxcompat
from jaxprtool.analysis import residuals as analysis
from jaxprtool.analysis.residuals import Placement, Residuals, total_size
from jaxprtool.api.investigate.budget import checkpoint_names, proposal
from jaxprtool.api.investigate.inner_gradient import halves_inside
from jaxprtool.api.investigate.placements import placements
from jaxprtool.api.investigate.source import differentiated, gives_one_float
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.quantities import bytes_of
from jaxprtool.ir.programs.checkpoint_policies import POLICIES, POLICY_FACTORIES
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Literal
from jaxprtool.passes.framework.retrace import positional, reported
from jaxprtool.passes.transforms.calls import Checkpoint
from jaxprtool.passes.transforms.linear import Vjp

#: The compared policies: those of JAX without arguments, each under one name.
_NAMES = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


def residuals(
    program: Program,
    budget: int | str | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    peaks: bool = False,
    compiled: bool = False,
) -> Residuals:
    """Return the values that the gradient of a program keeps for its backward pass.

    If the program is a training step, which has its gradient inside, these are the residuals of
    that gradient.

    Args:
        program: A `Program` with differentiable results.
        budget: The maximum size of the residuals, in bytes or as text, `"8GiB"`. Adds a proposal of
            values to save.
        argnums: The positional arguments to differentiate with respect to, as in `jax.grad`. They
            are those of the user's function, also in a recorded program.
        peaks: Whether to add the peak memory of the gradient under each policy in each place.
        compiled: Whether to compile, and add XLA's own figures of the peaks.

    Raises:
        ArgumentsError: If no choice of values to save stays within the budget, or the budget is
            invalid; if there is no argument at a position, or it has no floating-point array.
        UnsupportedError: As in the pass `vjp`.
    """
    limit = bytes_of(budget) if isinstance(budget, str) else budget
    if not gives_one_float(program) and (inside := halves_inside(program)) is not None:
        if limit is not None:
            raise ArgumentsError(
                f"a budget needs a loss, but {program.name} has its gradient inside",
                "give the loss as TARGET",
            )
        forward, backward = inside["forward"], inside["backward"]
        found, total = analysis.residuals(forward, backward, {}), analysis.total_bytes(backward)
        return Residuals(program.name, total, found, {}, is_inside=True)
    program, numbers, names = differentiated(program, argnums)
    policies = policies_of(program)
    with without_collector():
        gradient = Vjp(argnums=numbers)(program)
        forward, backward = gradient["forward"], gradient["backward"]
        found = analysis.residuals(forward, backward, policies)
        kept = bytes_by_policy(program, policies, numbers)
        total = analysis.total_bytes(backward)
        placed: tuple[Placement, ...] = ()
        if total is not None and (peaks or (limit is not None and limit < total)):
            sources = [*policies, *_offloading(program)]
            placed = tuple(placements(program, numbers, sources, compiled))
        proposed = None
        if limit is not None:
            proposed = proposal(program, numbers, gradient, limit, placed, compiled)
    placed = placed if peaks else ()
    return Residuals(
        program.name, total, found, kept, proposed, placed, argnums=numbers, with_respect_to=names
    )


def _offloading(program: Program) -> Iterator[str]:
    """Yield the policy that offloads the named values of a program to the host, if it has any."""
    if names := checkpoint_names(program):
        yield (
            f"save_and_offload_only_these_names(names_which_can_be_saved=[], "
            f"names_which_can_be_offloaded={names}, offload_src='device', "
            "offload_dst='pinned_host')"
        )


def bytes_by_policy(
    program: Program, policies: Mapping[str, Callable[..., Any]], argnums: Sequence[int]
) -> dict[str, int | None]:
    """Return the bytes that the gradient of a program keeps under each policy.

    They equal those of `checkpoint(policy=…), vjp(argnums=…)`. The program is differentiated once
    for all policies, without building the backward half.

    Args:
        program: The program.
        policies: Policies of `jax.checkpoint` by name.
        argnums: The positional arguments to differentiate with respect to.

    Raises:
        UnsupportedError: If JAX cannot differentiate the program under `jax.checkpoint`.
    """
    whole = Checkpoint()(program)
    jaxpr = jaxcompat.open_jaxpr(whole.jaxpr)
    groups = positional(whole)
    chosen = [jaxpr.invars[i] for number in argnums for i in groups[number]]
    moving = {v for v in chosen if v.aval.to_tangent_aval().dtype != float0}
    (call,) = jaxpr.eqns
    tangents = [type(v) is not Literal and v in moving for v in call.invars]
    constants = set(jaxpr.constvars)
    with reported(program, Vjp.name), jaxcompat.axes_bound(program.axis_env):
        checkpointed = jaxcompat.CheckpointedJvp(call, tangents)
        kept = {name: set(checkpointed.kept(policy)) for name, policy in policies.items()}
    return {name: total_size(v.aval for v in each - constants) for name, each in kept.items()}


def policies_of(program: Program) -> dict[str, Any]:
    """Return JAX's policies, and the one that saves named values if there are any."""
    found = {name: POLICIES[name] for name in _NAMES}
    names = checkpoint_names(program)
    if names:
        listed = ", ".join(map(repr, names))
        found[f"save_only_these_names({listed})"] = POLICY_FACTORIES["save_only_these_names"](
            *names
        )
    return found
