"""What `jax_debug_nans` and `jax_debug_infs` ask for: NaNs and infinities in results are an error.

JAX checks the results of a jitted function and then runs it again, operation by operation, to find
the one that made the NaN. A jaxpr does not say where the function turned these checks off, so a
program is checked in the same way: its results first, and only then its equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@contextmanager
def unchecked() -> Iterator[None]:
    """Turn JAX's own checks off, which stop at a NaN that no result depends on."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@dataclass(frozen=True)
class FiniteCheck:
    """What is forbidden in results."""

    nans: bool
    infs: bool

    @classmethod
    def from_config(cls) -> FiniteCheck:
        """Return the check that JAX's switches ask for now."""
        return cls(jax.config.jax_debug_nans, jax.config.jax_debug_infs)

    def fault(self, value: object) -> str | None:
        """Return what is forbidden and in a value, or in what a Ref holds, in words, or None."""
        if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
            return None
        if isinstance(value, jax.Ref):
            value = value[...]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return None
        if self.nans and bool(jnp.isnan(value).any()):
            return "a NaN"
        return "an infinity" if self.infs and bool(jnp.isinf(value).any()) else None
