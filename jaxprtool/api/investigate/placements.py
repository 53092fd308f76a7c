"""Find where `jax.checkpoint` lowers the peak memory of a program's gradient.

The places are the whole function, the scopes that hold products, each call of such a scope, the
bodies of loops, and a loop's body together with that of a nested loop. For each place, the program
is rewritten and differentiated, and the memory of the result is estimated or taken from XLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost import cost
from jaxprtool.analysis.memory import memory
from jaxprtool.analysis.residuals import Placement, residual_count, total_bytes
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import ClosedJaxpr
from jaxprtool.passes.transforms.calls import Checkpoint
from jaxprtool.passes.transforms.linear import Vjp
from jaxprtool.passes.transforms.scoped_checkpoint import checkpoint_levels

#: The patterns of scopes that are put under `jax.checkpoint`, the outermost first; () for all.
Only: TypeAlias = tuple[str, ...]

#: The positional arguments that a program is differentiated with respect to.
Argnums: TypeAlias = tuple[int, ...]

#: The maximum number of places besides the whole function.
_MOST_PLACES = 6


def places(program: Program) -> list[Only]:
    """Return the places for `jax.checkpoint`: the whole function first."""
    levels = checkpoint_levels(program)[:_MOST_PLACES]
    alone = [(level.pattern,) for level in levels]
    loops = [level for level in levels if level.is_loop]
    nested = [(around, level.pattern) for level in loops for around in level.around]
    return [(), *alone, *nested][: 1 + _MOST_PLACES]


def placements(
    program: Program, argnums: Argnums, policies: Sequence[str], compiled: bool = False
) -> Iterator[Placement]:
    """Yield the memory of a program's gradient as it is, and with each policy in each place.

    Places with effects, which `jax.checkpoint` does not support, and places where it drops no
    residual are left out.

    Args:
        program: A program with differentiable results, and sizes that are numbers.
        argnums: The positional arguments to differentiate with respect to.
        policies: The policies, as source. The first, which saves everything, is used only for the
            whole function.
        compiled: Whether to compile each gradient, for the peak that XLA states.
    """
    plain = measured(program, argnums, (), "", compiled)
    yield plain
    for only in places(program):
        if only and not _drops(program, argnums, only, plain):
            continue
        for policy in policies if only == () else policies[1:]:
            try:
                yield measured(program, argnums, only, policy, compiled)
            except UnsupportedError:
                break


def _drops(program: Program, argnums: Argnums, only: Only, plain: Placement) -> bool:
    """Return True if `jax.checkpoint` in a place drops any residuals."""
    try:
        gradient = Vjp(argnums=argnums)(_checkpointed(program, only, "nothing_saveable"))
    except UnsupportedError:  # it has effects
        return False
    return (total_bytes(gradient["backward"]) or 0) < plain.total_bytes


def measured(
    program: Program, argnums: Argnums, only: Only, policy: str, compiled: bool = False
) -> Placement:
    """Return the memory and FLOPs of a program's gradient with `jax.checkpoint` in a place.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.
        only: The place.
        policy: The policy, as source; "" for the program as it is.
        compiled: Whether to compile the gradient, for the peak that XLA states.

    Raises:
        UnsupportedError: If the place has effects.
    """
    gradient = Vjp(argnums=argnums)(_checkpointed(program, only, policy) if policy else program)
    whole = joined(gradient)
    found = total_bytes(gradient["backward"])
    assert found is not None
    flops = sum(cost(half).total.work.flops for _, half in gradient.items())
    stated = _compiled_bytes(whole) if compiled else None
    peak = memory(whole)
    return Placement(only, policy, found, peak.peak_bytes, flops, stated, tuple(peak.unknown))


def _checkpointed(program: Program, only: Only, policy: str) -> Program:
    if not only:
        return Checkpoint(policy)(program)
    for pattern in reversed(only):
        program = Checkpoint(policy, only=pattern)(program)
    return program


def joined(gradient: Programs) -> ClosedJaxpr:
    """Return the halves of a gradient as one jaxpr, of arguments and cotangents."""
    forward, backward = gradient["forward"], gradient["backward"]
    main = filled(forward.out_tree, range(forward.out_tree.num_leaves))[0]
    first, count = len(jax.tree.leaves(main)), residual_count(backward)
    run_forward = jaxcompat.jaxpr_as_fun(forward.jaxpr)
    run_backward = jaxcompat.jaxpr_as_fun(backward.jaxpr)
    arguments = len(forward.in_avals)

    def whole(*flat: Any) -> list[Any]:
        outs = run_forward(*flat[:arguments])
        back = run_backward(*outs[first : first + count], *flat[arguments:])
        return [*outs[:first], *outs[first + count :], *back]

    avals = [*forward.in_avals, *backward.in_avals[count:]]
    return jaxcompat.trace_flat(whole, "gradient", avals)


def _compiled_bytes(jaxpr: ClosedJaxpr) -> int | None:
    """Return the peak memory that XLA states for a jaxpr, in bytes; None if it states none."""
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    told: Any = jax.jit(jaxcompat.jaxpr_as_fun(jaxpr)).lower(*args).compile().memory_analysis()
    if told is None:
        return None
    sizes = told.argument_size_in_bytes, told.output_size_in_bytes, told.temp_size_in_bytes
    return int(sum(sizes) - told.alias_size_in_bytes)
