"""Find the residuals that `jax.checkpoint` saves, by JAX's own rules.

When JAX differentiates a checkpointed function, it splits it into equations that are computed
immediately, and equations that the backward pass computes from residuals. Here it is split without
building the backward pass, in a small part of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import effects
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import remat_p

from jaxprtool.jaxcompat.aliases import Atom
from jaxprtool.jaxcompat.jaxprs import close_jaxpr, jax_dce_jaxpr, open_jaxpr

#: Returns whether the results of an equation may be saved.
Policy = Callable[..., Any]

#: Whether XLA keeps barriers when it compiles for the CPU. Older releases removed them early, and
#: merged the equations that `jax.checkpoint` recomputes with the forward pass.
_BARRIERS_STAY = jax.__version_info__ >= (0, 11)


def behind_barrier(eqn: JaxprEqn) -> Sequence[bool]:
    """Return, for each operand, whether XLA keeps a barrier between it and its definition.

    JAX inserts a barrier before the equations that a differentiated `jax.checkpoint` recomputes.
    """
    prevents = _BARRIERS_STAY and _prevents_merging(eqn)
    return prevents if isinstance(prevents, tuple) else (prevents,) * len(eqn.invars)


def has_barrier(eqn: JaxprEqn) -> bool:
    """Return True if JAX inserts a barrier before the equations of a call, kept by XLA or not."""
    prevents = _prevents_merging(eqn)
    return any(prevents) if isinstance(prevents, tuple) else prevents


def _prevents_merging(eqn: JaxprEqn) -> bool | tuple[bool, ...]:
    """Return whether an equation is behind a barrier, or whether each of its operands is."""
    if eqn.primitive is remat_p and eqn.params["differentiated"]:
        prevents: bool | tuple[bool, ...] = eqn.params["prevent_cse"]
        return prevents
    return eqn.primitive.name == "optimization_barrier"


class CheckpointedJvp:
    """The forward-mode derivative of a call of `jax.checkpoint`.

    Args:
        eqn: The call.
        differentiated: Whether each of its operands has a tangent.

    Raises:
        NotImplementedError: If JAX does not differentiate it.
    """

    def __init__(self, eqn: JaxprEqn, differentiated: Sequence[bool]) -> None:
        body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["_prim"].jaxpr
        refused = effects.remat_allowed_effects.filter_not_in(body.effects)
        if refused:
            raise NotImplementedError(f"checkpoint does not take effects such as {refused}")
        jvp, _ = ad.jvp_jaxpr(close_jaxpr(body), list(differentiated), False)
        #: The operands by argument; None for a constant.
        self._operands = [*(None for _ in jvp.consts), *eqn.invars]
        self._jaxpr = pe.convert_constvars_jaxpr(open_jaxpr(jvp))
        tangents = len(self._jaxpr.invars) - len(self._operands)
        self._unknown = [*(False for _ in self._operands), *(True for _ in range(tangents))]

    def kept(self, policy: Policy) -> Iterator[Atom]:
        """Yield the values that a policy saves: operands of the call, and values computed in it."""
        count = len(self._unknown)
        known, staged, out_unknown, out_staged, residuals = pe.partial_eval_jaxpr_custom(
            self._jaxpr, self._unknown, [True] * count, False, False, policy
        )
        wanted = [unknown for unknown, each in zip(out_unknown, out_staged, strict=True) if each]
        _, read, *_ = jax_dce_jaxpr(staged, wanted)
        first = len(known.outvars) - residuals
        values = [v for v, is_read in zip(known.outvars[first:], read, strict=False) if is_read]
        yield from dict.fromkeys(v for v in values if type(v) is not Literal)
        arguments = zip(self._operands, read[residuals:], strict=False)
        yield from (v for v, is_read in arguments if is_read and type(v) is Var)
