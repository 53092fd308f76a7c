"""A user's pattern or replacement, traced at given types to jaxprs that can be matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.ir.basics import dtypes
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn
from jaxprtool.passes.cleanup.inline import Inline

#: Calls are inlined, in patterns as in programs.
PLAIN_CALLS = Inline()
#: A gradient has the bodies of functions with custom derivatives instead of the calls.
ALL_CALLS = Inline(calls=("jit", "closed_call", "custom_jvp", "custom_vjp"))


class Traced:
    """A function's closed jaxpr at some types, and the structure of its results."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_tree: PyTreeDef,
        avals: Sequence[Aval],
        like: JaxprEqn | None = None,
        results: Sequence[Aval | None] | None = None,
    ):
        """Trace the function in the context of an equation, with results as weak as `results`.

        Raises whatever the function raises.
        """
        trees = []

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            args, kwargs = jax.tree.unflatten(in_tree, leaves)
            outs, tree = jax.tree.flatten(fun(*args, **kwargs))
            trees.append(tree)
            outs = [x if isinstance(x, jax.core.Tracer) else jnp.asarray(x) for x in outs]
            if results is None or len(results) != len(outs):
                return outs
            return [_with_weakness(x, aval) for x, aval in zip(outs, results, strict=True)]

        with _wide(avals):
            closed = jaxcompat.trace_in_setting(flat, avals, like)
        self.closed = inlined(closed, PLAIN_CALLS)
        self.out_tree = trees[-1]

    @property
    def out_avals(self) -> list[Aval]:
        return [v.aval for v in self.closed.outvars]

    def forms(self) -> list[ClosedJaxpr]:
        """Return the jaxprs to search for: with custom derivatives as calls, and inlined."""
        bare = inlined(self.closed, ALL_CALLS)
        return [self.closed] if bare is self.closed else [self.closed, bare]


def inlined(closed: ClosedJaxpr, inline: Inline) -> ClosedJaxpr:
    """Return a closed jaxpr after inlining; the same object if there is nothing to inline."""
    return inline(Program("pattern", closed, None, None, (), ())).jaxpr


def _with_weakness(x: jax.Array, aval: Aval | None) -> jax.Array:
    """Return a value with the expected weak or strong type, if that is the only difference."""
    now = jax.typeof(x)
    if aval is None or not hasattr(now, "weak_type"):
        return x
    if now.weak_type == aval.weak_type or now.strip_weak_type() != aval.strip_weak_type():
        return x
    convert = jax.lax.convert_element_type_p.bind
    return convert(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def _wide(avals: Sequence[Aval]) -> AbstractContextManager[None]:
    """Return a context in which 64-bit types are kept, whatever JAX's configuration is."""
    narrow = not any(dtypes.needs_x64(aval.dtype) for aval in avals)
    return nullcontext() if narrow else jax.enable_x64(True)
