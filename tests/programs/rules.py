"""Functions with deliberately wrong derivative rules.

A rule returns three times the derivative. If a pass loses it, JAX differentiates the body and the
gradients change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RULE_FACTOR = 3.0


def with_jvp_rule(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body` with a forward rule."""
    function = jax.custom_jvp(body)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        outs, out_tangents = jax.jvp(body, primals, tangents)
        return outs, _scaled(out_tangents)

    return function


def with_vjp_rule(body: Callable[..., Any], *, saving: bool) -> Callable[..., Any]:
    """Return `body` with a reverse rule that saves its pullback, or that recomputes everything."""
    function = jax.custom_vjp(body)

    def forward(*xs: Any) -> Any:
        return jax.vjp(body, *xs) if saving else (body(*xs), xs)

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback = saved if saving else jax.vjp(body, *saved)[1]
        return _scaled(pullback(cotangents))

    function.defvjp(forward, backward)
    return function


def _scaled(tangents: Any) -> Any:
    def scale(t: Any) -> Any:
        inexact = jnp.issubdtype(t.dtype, jnp.inexact)
        return t * jnp.asarray(RULE_FACTOR, t.dtype) if inexact else t

    return jax.tree.map(scale, tangents)
