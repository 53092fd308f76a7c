"""Find the residuals that the forward half of a program passes to the backward half.

The two halves are those of the pass `vjp`. A residual is an argument, or the result of an equation
of the forward half; it is needed where the backward half reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.recomputation import Recomputation
from jaxprtool.ir.basics.documents import Number, document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.core.equations import size_of, type_of
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.dataflow import DataFlow
from jaxprtool.ir.dataflow.defining_equations import DefiningEquation, DefiningEquations
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Atom, Aval, Jaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Reader:
    """An equation of the backward half that reads a residual.

    Attributes:
        primitive: Its primitive.
        source: The user's line of the equation; "" if unknown.
    """

    primitive: str
    source: str


@dataclass(frozen=True)
class Residual:
    """A value that the backward half needs.

    Attributes:
        type: Its type.
        bytes: Its size in bytes; None if symbolic.
        primitive: The primitive that computes it; "" for an argument.
        argument: The name of the argument; "" for a computed value.
        source: The user's line that computes it, followed by the library's.
        name: Its name from `checkpoint_name`, or "".
        readers: The equations of the backward half that read it, products first.
        recompute: The FLOPs and transcendentals needed to recompute it from the other residuals and
            the arguments; None if the cost of an equation for it is unknown.
        policies: The policies of `jax.checkpoint` that would not save it.
    """

    type: str
    bytes: int | None
    primitive: str
    argument: str
    source: str
    name: str
    readers: tuple[Reader, ...]
    recompute: Number | None
    policies: tuple[str, ...]


@dataclass(frozen=True)
class SavedValue:
    """A value that a proposal saves.

    Attributes:
        name: Its name from `checkpoint_name`.
        source: The user's line, `model.py:13`.
        code: The expression to wrap in `checkpoint_name`; "" if it has the name already, or the
            source file does not exist any more.
        bytes: The bytes that saving it takes, in all iterations of loops.
    """

    name: str
    source: str
    code: str
    bytes: int


@document(also=("passes",))
@dataclass(frozen=True)
class Placement:
    """The cost of a gradient with `jax.checkpoint` at some place of the program.

    Attributes:
        only: The patterns of the scopes or loop bodies under `jax.checkpoint`, the outermost first;
            () for the whole function.
        policy: The policy, as source; "" without `jax.checkpoint`.
        total_bytes: The bytes that are saved.
        peak_bytes: The estimated peak memory of the gradient in bytes, with arguments and results,
            without values offloaded to the host.
        flops: The FLOPs of the gradient.
        compiled_bytes: The peak memory that XLA states for the compiled gradient; None if it was
            not compiled.
        unknown: The primitives whose memory `peak_bytes` does not count, besides that of their
            operands and results.
    """

    only: tuple[str, ...]
    policy: str
    total_bytes: int
    peak_bytes: int
    flops: int
    compiled_bytes: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def passes(self) -> str:
        """The passes that put `jax.checkpoint` there, as source; "" without `jax.checkpoint`."""
        policy = f"policy={self.policy}"
        if not self.only:
            return f"checkpoint({policy})" if self.policy else ""
        parts = (f"checkpoint(only={name!r}, {policy})" for name in reversed(self.only))
        return ", ".join(parts)


@dataclass(frozen=True)
class Proposal:
    """The values to save so that a gradient fits a memory budget.

    Attributes:
        budget: The bytes that may be saved.
        policy: The policy of `jax.checkpoint`, as source; "" if everything fits without one.
        values: The saved values, the largest first.
        total_bytes: The bytes that are saved, measured by differentiating the program with the
            policy.
        flops: The FLOPs of the gradient with the policy.
        flops_before: The FLOPs of the gradient without the policy.
        before: The gradient without the policy.
        placement: The place and the policy within the budget that lower the peak most; None if no
            place lowers it.
        cheaper: A place and a policy with fewer FLOPs, that lower the peak at least half as much;
            None if there are none.
    """

    budget: int
    policy: str
    values: tuple[SavedValue, ...]
    total_bytes: int
    flops: int
    flops_before: int
    before: Placement | None = None
    placement: Placement | None = None
    cheaper: Placement | None = None


@dataclass(frozen=True)
class Residuals(Printed):
    """The values of the forward pass that the backward pass needs.

    Attributes:
        name: The name of the program.
        total_bytes: The bytes of all residuals; None if sizes are symbolic.
        residuals: The residuals, the largest first.
        policies: The bytes that are saved under each policy of `jax.checkpoint` around the whole
            program.
        proposal: The values to save within a budget; None if no budget was given.
        placements: The peaks of the gradient: without `jax.checkpoint`, and under each policy at
            each place; empty if not requested.
        is_inside: Whether the program is a training step with the gradient inside, which has no
            policies.
        argnums: The positional arguments that the program is differentiated with respect to; empty
            for a training step.
        with_respect_to: The names of these arguments.
    """

    name: str
    total_bytes: int | None
    residuals: tuple[Residual, ...]
    policies: Mapping[str, int | None]
    proposal: Proposal | None = None
    placements: tuple[Placement, ...] = ()
    is_inside: bool = False
    argnums: tuple[int, ...] = ()
    with_respect_to: tuple[str, ...] = ()


def residuals(
    forward: Program, backward: Program, policies: Mapping[str, Callable[..., Any]]
) -> tuple[Residual, ...]:
    """Return the residuals that the forward half passes to the backward half, the largest first.

    Args:
        forward: The forward half, as returned by the pass `vjp`.
        backward: The backward half.
        policies: Policies of `jax.checkpoint` by name.
    """
    reading = _Reading(forward, backward, policies)
    found = [reading.residual(*pair) for pair in reading.pairs]
    return tuple(sorted(found, key=lambda each: -(each.bytes or 0)))


def peak_of(placement: Placement) -> int:
    """Return the peak of a gradient in bytes: the one that XLA states, or else the estimate."""
    compiled = placement.compiled_bytes
    return placement.peak_bytes if compiled is None else compiled


def kept_values(forward: Program, backward: Program) -> list[Atom]:
    """Return the results of the forward half that the backward half takes as residuals."""
    main = filled(forward.out_tree, range(forward.out_tree.num_leaves))[0]
    first = len(jax.tree.leaves(main))
    return jaxcompat.open_jaxpr(forward.jaxpr).outvars[first : first + residual_count(backward)]


def total_bytes(backward: Program) -> int | None:
    """Return the bytes of all residuals that a backward half takes; None if one is symbolic."""
    return total_size(backward.in_avals[: residual_count(backward)])


def total_size(avals: Iterable[Aval]) -> int | None:
    """Return the bytes of values of some types; None if one is symbolic."""
    sizes = list(map(size_of, avals))
    return None if None in sizes else sum(size or 0 for size in sizes)


def residual_count(backward: Program) -> int:
    """Return the number of residuals that a backward half takes as its first arguments."""
    args, _ = filled(backward.in_tree, range(backward.in_tree.num_leaves))
    return len(jax.tree.leaves(args[0]))


class _Reading:
    """Reads the residuals of a program from its halves."""

    def __init__(
        self, forward: Program, backward: Program, policies: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._policies = policies
        self._frames = frames_now(forward.roots)
        self._jaxpr = jaxcompat.open_jaxpr(forward.jaxpr)
        self._arguments = dict(zip(self._jaxpr.invars, forward.arg_names, strict=True))
        self._defining_equations = DefiningEquations(self._jaxpr)
        back_jaxpr = jaxcompat.open_jaxpr(backward.jaxpr)
        self._flow = DataFlow(back_jaxpr)
        kept = kept_values(forward, backward)
        #: Each residual as a variable of the forward half, and as a variable of the backward half.
        self.pairs = list(zip(kept, back_jaxpr.invars, strict=False))
        self._definitions = {v: self._definition_of(v) for v in kept if type(v) is not Literal}
        found = [definition for definition in self._definitions.values() if definition is not None]
        self._recomputation = Recomputation(self._jaxpr, frozenset(self._definitions), found)

    def residual(self, value: Atom, taken: Var) -> Residual:
        """Return the description of a residual."""
        definition = None if type(value) is Literal else self._definitions[value]
        argument = "" if type(value) is Literal else self._arguments.get(value, "")
        eqn = None if definition is None else definition.eqn
        return Residual(
            type_of(value.aval),
            size_of(value.aval),
            "" if eqn is None else str(eqn.primitive.name),
            argument,
            ""
            if definition is None
            else self._frames.line_of((*definition.around, definition.eqn)),
            str(eqn.params["name"]) if eqn is not None and eqn.primitive.name == "name" else "",
            tuple(self._readers(taken)),
            0 if definition is None else self._recomputation.operations(definition),
            () if eqn is None else tuple(self._dropping(eqn)),
        )

    def _definition_of(self, value: Var) -> DefiningEquation | None:
        while value in self._defining_equations:
            definition = self._defining_equations.of(value)
            if not isinstance(definition.operand, Var):
                return definition
            value = definition.operand
        return None

    def _readers(self, taken: Var) -> Iterator[Reader]:
        found = dict.fromkeys(
            Reader(str(eqn.primitive.name), self._frames.line_of((eqn,)))
            for eqn in _reading(self._flow, taken)
        )
        yield from sorted(found, key=lambda each: not traits(each.primitive).expensive)

    def _dropping(self, eqn: JaxprEqn) -> Iterator[str]:
        """Yield the policies that would not save the results of an equation."""
        for name, policy in self._policies.items():
            if not jaxcompat.policy_keeps(policy, eqn):
                yield name


def _reading(flow: DataFlow, value: Var) -> Iterator[JaxprEqn]:
    """Yield the equations that compute with a value, looking through moves, casts and bodies."""
    todo, seen = [(flow.top, value)], {(flow.top, value)}
    while todo:
        jaxpr, var = todo.pop()
        new: list[tuple[Jaxpr, Var]] = []
        for position in flow.readers(jaxpr, var):
            eqn = jaxpr.eqns[position]
            like = traits(eqn)
            inside = flow.arguments(eqn, var)
            if inside:
                new += inside
            elif like.moves or like.gives:
                new += [(jaxpr, out) for out in eqn.outvars]
            else:
                yield eqn
        fresh = [each for each in new if each not in seen]
        seen.update(fresh)
        todo += fresh
