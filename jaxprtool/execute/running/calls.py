"""Calls of a compiled program as `jax.jit` calls the function that it was traced from.

A call of `jax.jit` flattens its arguments and builds the containers of its results. With hundreds
of arrays this takes as long as the rest of the call, so a program is compiled as a function of the
arguments that it was traced with, and its times are those of the user's own calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import SubstituteNode, filled

#: The bytes that copies of donated arguments may take, for several calls.
_MOST_COPIES = 1 << 26


@dataclass(frozen=True)
class CallForm:
    """The function that is compiled for a program, and how it is called.

    Attributes:
        fun: The function.
        keywords: The keyword arguments of `jax.jit` for it.
        donated: The positions of the donated arguments of the program.
        groups: The structure of each argument of the function; None if the arguments are flat.
        effects: Whether the program has effects, for which a call waits.
    """

    fun: Callable[..., Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()
    groups: Sequence[Any] | None = None
    effects: bool = False

    def nested(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a call from the flat arguments of the program."""
        if self.groups is None:
            return flat
        rest = iter(flat)
        return [filled(group, islice(rest, group.num_leaves)) for group in self.groups]

    def calls(self, flat: Sequence[Any], count: int) -> list[Sequence[Any]]:
        """Return the arguments of several calls, with a copy of donated ones for each."""
        if not self.donated:
            return [self.nested(flat)] * count
        return [self.nested(self._copied(flat)) for _ in range(count)]

    def most(self, flat: Sequence[Any]) -> int:
        """Return the number of calls for which donated arguments may be copied at once."""
        size = sum(getattr(flat[i], "nbytes", 0) for i in self.donated)
        return max(1, _MOST_COPIES // max(size, 1))

    def _copied(self, flat: Sequence[Any]) -> Sequence[Any]:
        arrays = {i: flat[i] for i in self.donated if isinstance(flat[i], jax.Array)}
        copies = jax.block_until_ready(_copies(arrays))  # not part of the call
        return [copies.get(i, a) for i, a in enumerate(flat)]


@jax.jit
def _copies(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return copies, which are made at once: hundreds of small programs would delay the call."""
    return {i: array.copy() for i, array in arrays.items()}


def call_form(program: Program) -> CallForm:
    """Return the function to compile for a program.

    It takes the arguments of the traced function, keyword arguments last. It takes flat arguments
    if `jax.jit` cannot take those: with shardings, if only some leaves of an argument are donated,
    or if the class of a container accepts only arrays.
    """
    flat = jaxcompat.jaxpr_as_fun(program.jaxpr)
    keywords, effects = program.jit_keywords, bool(program.jaxpr.effects)
    donated = frozenset(keywords.get("donate_argnums", ()))
    groups = [each for part in program.in_tree.children() for each in part.children()]
    leaves = iter(range(len(program.in_avals)))
    owned = [[i in donated for i in islice(leaves, group.num_leaves)] for group in groups]
    is_partly_donated = any(any(flags) and not all(flags) for flags in owned)
    is_placed = not keywords.keys().isdisjoint(("in_shardings", "out_shardings"))
    if is_partly_donated or is_placed or not all(map(_suits, (program.in_tree, program.out_tree))):
        return CallForm(flat, keywords, donated, None, effects)

    def call(*args: Any) -> Any:
        return filled(program.out_tree, flat(*jax.tree.leaves(args)))

    call.__name__ = program.name
    if keywords:
        keywords["donate_argnums"] = tuple(i for i, flags in enumerate(owned) if any(flags))
    return CallForm(call, keywords, donated, groups, effects)


def _suits(tree: PyTreeDef) -> bool:
    """Return True if the container classes accept placeholders of JAX instead of arrays."""
    made = filled(tree, [object() for _ in range(tree.num_leaves)])
    leaves = jax.tree.leaves(made, is_leaf=lambda each: isinstance(each, SubstituteNode))
    return not any(isinstance(each, SubstituteNode) for each in leaves)


def seconds_of(form: CallForm, call: Callable[..., Any], each: list[Sequence[Any]]) -> float:
    """Return the seconds that calls take, each of which waits until its results are ready.

    If arguments are donated, results are kept until the end: a user's loop passes them to the next
    call, so the time to release hundreds of arrays is not part of a call.

    Args:
        form: The form of the call.
        call: The function, with or without `jax.jit`.
        each: The arguments of each call, from `calls`. If some are donated, the list is emptied.
    """
    kept, ready = [], jax.block_until_ready
    start = time.perf_counter()
    if form.donated:
        while each:
            kept.append(ready(call(*each.pop())))
    else:
        for args in each:
            ready(call(*args))
    if form.effects:
        jax.effects_barrier()
    return time.perf_counter() - start
