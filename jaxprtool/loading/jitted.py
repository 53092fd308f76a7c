"""Trace functions under `jax.jit` by their own `trace`.

Partials of such functions and methods are also supported. Their bound values are arguments to JAX,
and constants of the Program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.programs.static_leaf import release
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import ClosedJaxpr


@dataclass(frozen=True)
class Jitted:
    """A function under `jax.jit`, and the arguments that are bound to it."""

    fun: Any
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()

    @classmethod
    def find(cls, fun: Any) -> Jitted | None:
        """Return the function under `jax.jit` that a callable is or binds arguments of."""
        args: tuple[object, ...] = ()
        kwargs: dict[str, object] = {}
        while not jaxcompat.is_jitted(fun):
            if isinstance(fun, functools.partial):
                args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
                fun = fun.func
            elif inspect.ismethod(fun):
                args, fun = (fun.__self__, *args), fun.__func__
            elif jaxcompat.is_jitted(vars(type(fun)).get("__call__")):
                args, fun = (fun, *args), type(fun).__call__
            else:
                return None
        return cls(fun, args, tuple(kwargs.items()))

    def static_places(self, count: int) -> tuple[set[int], set[str]]:
        """Return the static positions among `count` positional arguments, and the static names."""
        numbers, names = self._static(len(self.args) + count)
        return {number - len(self.args) for number in numbers if number >= len(self.args)}, names

    def _static(self, count: int) -> tuple[set[int], set[str]]:
        """Return the same for `count` arguments including the bound ones."""
        numbers, names = jaxcompat.jit_static_arguments(self.fun)
        places = {number + count if number < 0 else number for number in numbers}
        return places & set(range(count)), set(names)

    def trace(
        self, positional: Sequence[tuple[object, bool]], keywords: Mapping[str, tuple[object, bool]]
    ) -> tuple[ClosedJaxpr, object, jaxcompat.TracedOptions]:
        """Return the jaxpr of a call, the types of its results in their tree, and the options.

        The jaxpr takes the traced arguments. Bound arguments, and those that are static in the call
        but not for `jax.jit`, are constants.

        Args:
            positional: The positional arguments, and whether each is static.
            keywords: The keyword arguments by name, and whether each is static.
        """
        args = [*((arg, True) for arg in self.args), *positional]
        kwargs = {**{name: (arg, True) for name, arg in self.kwargs}, **keywords}
        # JAX rejects values that are not arrays.
        given = release((tuple(arg for arg, _ in args), {k: arg for k, (arg, _) in kwargs.items()}))
        stage = self.fun.trace(*given[0], **given[1])
        leaves = self._dynamic_leaves(args, kwargs)
        return self._without_bound(stage, leaves)

    def _dynamic_leaves(
        self, args: Sequence[tuple[object, bool]], kwargs: dict[str, tuple[object, bool]]
    ) -> list[tuple[object, bool]]:
        """Return each flat argument that JAX traces, and whether to make it a constant."""
        numbers, names = self._static(len(args))
        values = [pair for i, pair in enumerate(args) if i not in numbers]
        values += [kwargs[name] for name in sorted(kwargs) if name not in names]
        return [(leaf, bound) for value, bound in values for leaf in jax.tree.leaves(value)]

    @staticmethod
    def _without_bound(
        stage: jax.stages.Traced, leaves: Sequence[tuple[object, bool]]
    ) -> tuple[ClosedJaxpr, object, jaxcompat.TracedOptions]:
        captured = jaxcompat.captured_values(stage)
        traced_options = jaxcompat.traced_options(stage)
        constants = dict(enumerate(captured))
        constants |= {
            len(captured) + i: jnp.asarray(leaf) for i, (leaf, bound) in enumerate(leaves) if bound
        }
        jaxpr = jaxcompat.with_constants(
            jaxcompat.from_jax(stage.jaxpr), list(constants), list(constants.values())
        )
        kept = [i for i, (_, bound) in enumerate(leaves) if not bound]
        traced_options = traced_options._replace(
            donated=tuple(traced_options.donated[i] for i in kept),
            in_placements=tuple(traced_options.in_placements[i] for i in kept),
        )
        return jaxpr, filled(stage.out_tree, jaxpr.out_avals), traced_options
