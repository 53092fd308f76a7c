"""The checks of `jax_debug_nans` and `jax_debug_infs`: NaNs and infinities in results are errors.

JAX checks the results of a jitted function and then runs it again, operation by operation, to find
the source of the NaN. A jaxpr does not state where the function turned these checks off, so a
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
    """Disable JAX's own checks, which also raise for a NaN that no result depends on."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@dataclass(frozen=True)
class FiniteCheck:
    """The values that are forbidden in results."""

    nans: bool
    infs: bool

    @classmethod
    def from_config(cls) -> FiniteCheck:
        """Return the check that JAX's configuration currently requests."""
        return cls(jax.config.jax_debug_nans, jax.config.jax_debug_infs)

    def fault(self, value: object) -> str | None:
        """Describe the forbidden elements of a value, or of a Ref's contents; None if none."""
        if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
            return None
        if isinstance(value, jax.Ref):
            value = value[...]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return None
        # Also while JAX traces a function around this.
        with unchecked(), jax.ensure_compile_time_eval():
            if self.nans and bool(jnp.isnan(value).any()):
                return "a NaN"
            return "an infinity" if self.infs and bool(jnp.isinf(value).any()) else None
