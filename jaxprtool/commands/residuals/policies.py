"""`residuals`: what a gradient keeps for its backward pass, by policy, and what to save instead.

found = jaxprtool.residuals(program)
found.total_bytes, found.residuals[0].source, found.policies["dots_saveable"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.dtypes import float0
from jax.extend.core.primitives import jit_p, reduce_precision_p

from jaxprtool import jaxcompat
from jaxprtool.commands.cost.estimate import total_flops
from jaxprtool.commands.memory.estimate import peak_memory
from jaxprtool.commands.residuals import residuals as analysis
from jaxprtool.commands.residuals.residuals import (
    Named,
    Placement,
    Proposal,
    Residuals,
    SavedValue,
    Saving,
    kept_values,
    nameable_values,
    named_values,
    placement_peak,
    residual_count,
    total_bytes,
    total_size,
)
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.custom_rules import POLICIES, POLICY_FACTORIES
from jaxprtool.ir.documents import bytes_of, in_bytes
from jaxprtool.ir.equations import (
    all_jaxprs,
    equations,
    free_variables,
    holders,
    substitute,
    type_of,
    with_operands,
)
from jaxprtool.ir.equivalence import equivalent
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, Programs, require_program
from jaxprtool.ir.regions import Call, CustomJVP, view
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.scopes import is_backward
from jaxprtool.ir.trees import filled, structure, unique
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Params, Var
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.retrace import (
    chosen_argnums,
    positional,
    positional_roots,
    root_of,
    trace_errors_reported,
)
from jaxprtool.passes.transforms.calls import Checkpoint, policy_of
from jaxprtool.passes.transforms.linear import Vjp
from jaxprtool.passes.transforms.scoped_checkpoint import checkpoint_levels, name_values

# --- residuals ------------------------------------------------------------------------------------
# `residuals`: the values that a gradient keeps for its backward pass, also under each policy.

#: The policy that saves only arguments.
_NOTHING = "nothing_saveable"

#: The compared policies: those of JAX without arguments, each under one name.
_NAMES = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    _NOTHING,
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
    require_program(program)
    limit = bytes_of(budget) if isinstance(budget, str) else budget
    if not gives_one_float(program) and (inside := halves_inside(program)) is not None:
        if limit is not None:
            raise ArgumentsError(
                f"a budget needs a loss, but {program.name} has its gradient inside",
                "give the loss as TARGET",
            )
        forward, backward = inside["forward"], inside["backward"]
        saved, total = (
            analysis.passed_residuals(forward, backward, {}),
            analysis.total_bytes(backward),
        )
        return Residuals(program.name, total, saved, {}, is_inside=True)
    program, numbers, names = differentiated(program, argnums)
    policies = policies_of(program)
    with without_collector():
        gradient = Vjp(argnums=numbers)(program)
        forward, backward = gradient["forward"], gradient["backward"]
        saved = analysis.passed_residuals(forward, backward, policies)
        whole = WholeCheckpoint(program, numbers)
        kept = {name: whole.kept_bytes(policy) for name, policy in policies.items()}
        total = analysis.total_bytes(backward)
        placed: tuple[Placement, ...] = ()
        if total is not None and (peaks or (limit is not None and limit < total)):
            sources = [*policies, *_offloading(program)]
            placed = tuple(placements(program, gradient, whole, sources, compiled))
        proposed = None
        if limit is not None:
            proposed = proposal(program, numbers, gradient, limit, placed, compiled)
    placed = placed if peaks else ()
    return Residuals(
        program.name, total, saved, kept, proposed, placed, argnums=numbers, with_respect_to=names
    )


def _offloading(program: Program) -> Iterator[str]:
    """Yield the policy that offloads the named values of a program to the host, if it has any."""
    if names := checkpoint_names(program):
        yield (
            f"save_and_offload_only_these_names(names_which_can_be_saved=[], "
            f"names_which_can_be_offloaded={names}, offload_src='device', "
            "offload_dst='pinned_host')"
        )


class WholeCheckpoint:
    """The gradients of a program under `jax.checkpoint`, one for each policy.

    Bytes and gradients equal those of `checkpoint(policy=…), vjp(argnums=…)`. The program is
    differentiated and transposed once for all policies.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.

    Raises:
        UnsupportedError: If JAX cannot differentiate the program under `jax.checkpoint`.
    """

    def __init__(self, program: Program, argnums: Sequence[int]) -> None:
        whole = Checkpoint()(program)
        self._program, self.argnums = program, tuple(argnums)
        self._jaxpr = jaxcompat.open_jaxpr(whole.jaxpr)
        groups = positional(whole)
        self._chosen = [whole.jaxpr.invars[i] for number in argnums for i in groups[number]]
        moving = {v for v in self._chosen if v.aval.to_tangent_aval().dtype != float0}
        (self._eqn,) = whole.jaxpr.eqns
        self._tangents = [type(v) is not Literal and v in moving for v in self._eqn.invars]
        with self._as_vjp():
            self._jvp = jaxcompat.CheckpointedJvp(self._eqn, self._tangents)
        constants = [Var(v.aval) for v in self._jvp.arguments[: len(self._jvp.consts)]]
        self._split: list[tuple[_RecordedPolicy, jaxcompat.CheckpointHalves]] = []
        #: The operands by argument of the derivative.
        self._operands = dict(
            zip(self._jvp.arguments, [*constants, *self._eqn.invars], strict=True)
        )
        self._consts = {
            **dict(zip(whole.jaxpr.constvars, whole.jaxpr.consts, strict=True)),
            **dict(zip(constants, self._jvp.consts, strict=True)),
        }

    @contextmanager
    def _as_vjp(self) -> Iterator[None]:
        """Bind the program's axes, and report JAX's errors as the pass `vjp` does."""
        program = self._program
        with trace_errors_reported(program, Vjp.name), jaxcompat.axes_bound(program.axis_env):
            yield

    @cached_method
    def _halves(self, policy: Callable[..., Any]) -> jaxcompat.CheckpointHalves:
        """Return the halves under a policy: JAX splits once for policies that answer alike."""
        for asked, halves in self._split:
            if asked.answers_like(policy):
                return halves
        asked = _RecordedPolicy(policy)
        with self._as_vjp():
            halves = self._jvp.halves(asked)
        self._split.append((asked, halves))
        return halves

    def kept_bytes(self, policy: Callable[..., Any]) -> int | None:
        """Return the bytes that the gradient keeps under a policy; None if sizes are symbolic."""
        halves = self._halves(policy)
        read = [self._operands.get(v) for v in halves.backward.invars[len(halves.residuals) :]]
        values = {v for v in (*halves.residuals, *read) if type(v) is Var and v not in self._consts}
        return total_size(v.aval for v in values)

    def gradient(self, policy: Callable[..., Any]) -> ClosedJaxpr | None:
        """Return the gradient under a policy, as `joined_halves` does.

        None if JAX splits a loop or branch by the policy, if a result or a chosen argument has no
        gradient, or if the call is JAX's new checkpoint, whose parameters are others.
        """
        if "jaxpr" not in self._eqn.params:
            return None
        jvp, halves = self._jvp, self._halves(policy)
        moving = [v for v, flag in zip(self._eqn.invars, self._tangents, strict=True) if flag]
        is_whole = moving == self._chosen and self._eqn.outvars == self._jaxpr.outvars
        if not (is_whole and all(jvp.has_tangent)) or jvp.jaxpr.effects:
            return None
        holding = (eqn for body in all_jaxprs(jvp.jaxpr) for eqn, _ in holders(body))
        if not all(isinstance(view(eqn), Call | CustomJVP | NoneType) for eqn in holding):
            return None
        with self._as_vjp():
            recomputed, values, transpose = jvp.transposed(halves.backward, _are_equal)
        if transpose.constvars or len(transpose.outvars) != len(moving):
            return None
        # All in the variables of the derivative.
        names = dict(zip(transpose.invars, values, strict=False))
        saved = halves.backward.invars[: len(halves.residuals)]
        reads = [v for v in halves.backward.invars if v in self._operands]
        inner = jaxcompat.new_jaxpr(
            (),
            (),
            [*saved, *reads, *transpose.invars[len(values) :]],
            substitute(transpose.outvars, names),
            [*recomputed, *(with_operands(eqn, names) for eqn in transpose.eqns)],
            transpose.debug_info,
        )
        forward, arguments = halves.forward()
        operands = self._operands | dict(
            zip(forward.invars, substitute(arguments, self._operands), strict=True)
        )
        outs = substitute(forward.outvars, operands)
        count = len(outs) - len(saved)
        cotangents = [Var(v.aval) for v in transpose.invars[len(values) :]]
        body = {"jaxpr": jaxcompat.open_jaxpr(inner), "policy": policy, "differentiated": True}
        late = self._eqn.replace(
            invars=[*outs[count:], *(operands[v] for v in reads), *cotangents],
            outvars=[Var(v.aval) for v in transpose.outvars],
            params={**self._eqn.params, **body},
        )
        return jaxcompat.new_jaxpr(
            list(self._consts),
            list(self._consts.values()),
            [*self._jaxpr.invars, *cotangents],
            [*outs[:count], *late.outvars],
            [*(with_operands(eqn, operands) for eqn in _rounded(forward, halves.residuals)), late],
            self._jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        )


def _are_equal(one: Jaxpr, other: Jaxpr) -> bool:
    """Return True if two jaxprs are known to be the same up to the names of variables."""
    try:
        return equivalent(one, other)
    except UnsupportedError:  # the rule of a custom derivative cannot be traced
        return False


def _rounded(forward: Jaxpr, residuals: Iterable[Atom]) -> Iterator[JaxprEqn]:
    """Yield the equations of a forward pass with the rounding that JAX inserts after residuals.

    JAX rounds those that the forward pass reads too. JAX's own function searches all equations for
    each of them.
    """
    read = {v for eqn in forward.eqns for v in eqn.invars if type(v) is Var}
    rounded = {v for v in residuals if v in read and _is_inexact(v.aval)}
    for eqn in forward.eqns:
        exact = {v: Var(v.aval) for v in eqn.outvars if v in rounded and not _rounds(eqn, v)}
        yield eqn.replace(outvars=[exact.get(v, v) for v in eqn.outvars]) if exact else eqn
        for residual, var in reversed(exact.items()):
            yield eqn.replace(
                primitive=reduce_precision_p,
                invars=[var],
                outvars=[residual],
                params=_precision(var),
                effects=set(),
            )


def _rounds(eqn: JaxprEqn, residual: Var) -> bool:
    return eqn.primitive is reduce_precision_p and eqn.params == _precision(residual)


def _precision(var: Var) -> Params:
    """Return the parameters of a `reduce_precision` to the dtype of a variable."""
    kept = jnp.finfo(var.aval.dtype)
    return {"exponent_bits": kept.nexp, "mantissa_bits": kept.nmant}


def policies_of(program: Program) -> dict[str, Any]:
    """Return JAX's policies, and the one that saves named values if there are any."""
    policies = {name: POLICIES[name] for name in _NAMES}
    names = checkpoint_names(program)
    if names:
        listed = ", ".join(map(repr, names))
        policies[f"save_only_these_names({listed})"] = POLICY_FACTORIES["save_only_these_names"](
            *names
        )
    return policies


# --- budget ---------------------------------------------------------------------------------------
# Proposals of values that `jax.checkpoint` should save within a budget of bytes.
#
# The names to save are chosen by a model (`.residuals`) and verified: the program is
# differentiated under `jax.checkpoint` with them. If it keeps other values than predicted, the
# model is updated and the choice repeated. Of these names and of JAX's policies, in each place
# (`placements`), the one with the lowest peak memory is proposed.

#: A part of the names of policies that move values to the memory of the host.
_OFFLOAD = "offload"

#: The number of times a choice is repeated with an updated model.
_TRIES = 5


def proposal(
    program: Program,
    argnums: Argnums,
    gradient: Programs,
    budget: int,
    rows: Sequence[Placement],
    compiled: bool = False,
) -> Proposal:
    """Return what to save so that the gradient of a program stays within a budget.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.
        gradient: The result of the pass `vjp` on it, forward and backward.
        budget: The number of bytes that may be kept.
        rows: The memory of the gradient as it is, and with each policy in each place.
        compiled: Whether to compile the gradients, for the peaks that XLA states.

    Raises:
        ArgumentsError: If nothing stays within the budget, with the minimum possible; if sizes
            are symbolic.
    """
    kept, needed = total_bytes(gradient["backward"]), _flops(gradient)
    if kept is None:
        hint = 'write them in --args, or -p "specialize(n=512)"'
        raise ArgumentsError("a budget needs sizes that are numbers", hint)
    if kept <= budget:
        return Proposal(budget, "", (), kept, needed, needed)
    plain, *tested = rows
    choice = _SavedValueChoice(program, argnums, budget)
    tested += choice.placements(compiled)
    least = min(choice.bytes, *(placement.total_bytes for placement in tested))
    if least > budget:
        raise ArgumentsError(
            f"no choice of values to save keeps {program.name} within {budget:,} bytes: the "
            f"minimum is {least:,}, including arguments that are read again",
            f"the minimum budget is {least}, which is {in_bytes(least)}",
        )
    fitting = [placement for placement in tested if placement.total_bytes <= budget]
    lower = [
        placement for placement in fitting if placement_peak(placement) < placement_peak(plain)
    ]
    best = min(lower, key=_rank, default=None)
    chosen = choice.policy, choice.values, choice.bytes, choice.flops
    if choice.bytes > budget:
        fits = min(fitting, key=lambda placement: placement.flops)
        chosen = fits.policy, (), fits.total_bytes, fits.flops
    cheaper = None if best is None else _cheaper(best, plain, lower)
    return Proposal(budget, *chosen, needed, plain, best, cheaper)


def _rank(placement: Placement) -> tuple[object, ...]:
    """Return a sort key for placements, the best first."""
    offloads = _OFFLOAD in placement.policy  # its transfers are in no figure
    is_simple = placement.policy == _policy(())
    return (
        placement_peak(placement),
        offloads,
        placement.flops,
        placement.total_bytes,
        not is_simple,
    )


def _cheaper(best: Placement, plain: Placement, lower: Sequence[Placement]) -> Placement | None:
    """Return the placement of the fewest FLOPs that saves at least half as much as the best."""
    limit = (placement_peak(best) + placement_peak(plain)) / 2
    worth = [p for p in lower if placement_peak(p) <= limit and _OFFLOAD not in p.policy]
    cheapest = min(
        worth, key=lambda placement: (placement.flops, placement_peak(placement)), default=best
    )
    return cheapest if cheapest.flops < best.flops else None


class _SavedValueChoice:
    """The named values to save within a budget, with the fewest FLOPs.

    Args:
        program: The program.
        argnums: The positional arguments to differentiate with respect to.
        budget: The number of bytes that may be kept.

    Attributes:
        policy: The policy that saves them, as source.
        values: The values.
        bytes: The bytes that are kept with the policy around the whole program. More than the
            budget if no choice fits.
        flops: The FLOPs of the gradient with it.
    """

    def __init__(self, program: Program, argnums: Argnums, budget: int) -> None:
        self._argnums = argnums
        self._program, places = _with_names(program)
        labelled = Vjp(argnums=argnums)(self._program)
        jaxpr = jaxcompat.open_jaxpr(labelled["forward"].jaxpr)
        existing = checkpoint_names(program)
        model = Saving(jaxpr, kept_values(labelled["forward"], labelled["backward"]), existing)
        proven = _choose(self._program, argnums, model, budget)
        largest = sorted(proven.names, key=lambda name: -model.bytes[name])
        new = [label for label in largest if label not in existing]
        # New names differ from those in the program, whose other values would be saved too.
        called = unique([*existing, *(places[label].name for label in new)])[len(existing) :]
        names = {
            **dict(zip(existing, existing, strict=True)),
            **dict(zip(new, called, strict=True)),
        }
        self.values = tuple(
            SavedValue(names[label], places[label].source, places[label].code, model.bytes[label])
            for label in largest
        )
        self._labels = proven.names
        self.policy = _policy([value.name for value in self.values])
        self.bytes, self.flops = proven.bytes, proven.flops

    def placements(self, compiled: bool) -> Iterator[Placement]:
        """Yield the memory of the gradient with these values saved, in each place."""
        for only in places(self._program) if self.values else ():
            with suppress(UnsupportedError):  # it has effects
                policy = _policy(self._labels)
                placement = measured_placement(self._program, self._argnums, only, policy, compiled)
                yield replace(placement, policy=self.policy)


def _flops(gradient: Programs) -> Any:
    """Return the FLOPs of a gradient: of its forward and backward programs."""
    return sum(total_flops(program) for _, program in gradient.items())


# --- values that can be saved -----------------------------------------------------------------


def checkpoint_names(program: Program) -> list[str]:
    """Return the names of `checkpoint_name` in a program."""
    return sorted({str(eqn.params["name"]) for eqn in _names(program)})


def _names(program: Program) -> list[JaxprEqn]:
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in eqns if eqn.primitive.name == "name"]


def _with_names(program: Program) -> tuple[Program, dict[str, Named]]:
    """Return a program with a name for each value of a user's expression, and the named values.

    A value that already has a name keeps it.
    """
    frames, jaxpr = frames_now(program.roots), jaxcompat.open_jaxpr(program.jaxpr)
    places: dict[str, Named] = {}
    for eqn in _names(program):
        name = str(eqn.params["name"])
        places.setdefault(name, Named(name, frames.line_of([eqn]), ""))
    nameable = nameable_values(jaxpr, frames)
    primitives = {v: str(e.primitive.name) for e in equations(jaxpr) for v in e.outvars}
    new = unique([*places, *map(str, range(len(nameable)))])[len(places) :]
    labels = {
        v: label for label, values in zip(new, nameable.values(), strict=True) for v in values
    }
    places.update(zip(new, named_values(nameable, primitives, frames), strict=True))
    return name_values(program, labels), places


# --- choice of the saved values ---------------------------------------------------------------


class _Proven(NamedTuple):
    """Names to save, and the measured bytes and FLOPs of the gradient with them."""

    names: tuple[str, ...]
    bytes: int
    flops: int


def _choose(program: Program, argnums: Argnums, model: Saving, budget: int) -> _Proven:
    """Return the best names to save within a budget, or those that keep least if none fit."""
    proven: dict[tuple[str, ...], _Proven] = {}
    limit = budget
    for _ in range(_TRIES):
        names = model.choose(limit)
        if names is None or names in proven:
            break
        proven[names] = _prove(program, argnums, names)
        limit = budget + model.kept(names) - proven[names].bytes
    if not any(choice.bytes <= budget for choice in proven.values()):
        for names in ((), model.least()):
            proven.setdefault(names, _prove(program, argnums, names))
    fitting = [choice for choice in proven.values() if choice.bytes <= budget]
    if not fitting:
        return min(proven.values(), key=lambda choice: choice.bytes)
    return min(fitting, key=lambda choice: (choice.flops, choice.bytes))


def _prove(program: Program, argnums: Argnums, names: Sequence[str]) -> _Proven:
    """Return the measurements of a program's gradient under `jax.checkpoint` with names saved."""
    gradient = Vjp(argnums=argnums)(Checkpoint(_policy(names))(program))
    return _Proven(tuple(names), total_bytes(gradient["backward"]) or 0, _flops(gradient))


def _policy(names: Sequence[str]) -> str:
    """Return the source of a policy that saves these names."""
    return f"save_only_these_names({', '.join(map(repr, names))})" if names else _NOTHING


# --- placements -----------------------------------------------------------------------------------
# Find where `jax.checkpoint` lowers the peak memory of a program's gradient.
#
# The places are the whole function, the scopes that hold products, each call of such a scope, the
# bodies of loops, and a loop's body together with that of a nested loop. For each place, the
# program is rewritten and differentiated, and the memory of the result is estimated or taken from
# XLA.

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
    program: Program,
    gradient: Programs,
    whole: WholeCheckpoint,
    policies: Sequence[str],
    compiled: bool = False,
) -> Iterator[Placement]:
    """Yield the memory of a program's gradient as it is, and with each policy in each place.

    Places with effects, which `jax.checkpoint` does not support, and places where it drops no
    residual are left out.

    Args:
        program: A program with differentiable results, and sizes that are numbers.
        gradient: The result of the pass `vjp` on it, forward and backward.
        whole: Its gradients under `jax.checkpoint`.
        policies: The policies, as source. The first, which saves everything, is used only for the
            whole function.
        compiled: Whether to compile each gradient, for the peak that XLA states.
    """
    plain = _measured(joined_halves(gradient), total_bytes(gradient["backward"]), (), "", compiled)
    yield plain
    for only in places(program):
        place = _CheckpointedPlace(program, whole, only, compiled)
        try:
            if only and place.measured(_NOTHING).total_bytes >= plain.total_bytes:
                continue
            yield from map(place.measured, policies if only == () else policies[1:])
        except UnsupportedError:  # it has effects
            continue


class _CheckpointedPlace:
    """A place for `jax.checkpoint`, and the gradients with it there.

    JAX asks a policy about equations, so policies that answer alike give the same gradient, which
    is measured once.
    """

    def __init__(
        self, program: Program, whole: WholeCheckpoint, only: Only, compiled: bool
    ) -> None:
        self._program, self._whole, self._only = program, whole, only
        self._compiled = compiled
        self._placements: list[tuple[_RecordedPolicy, Placement]] = []

    @cached_method
    def measured(self, source: str) -> Placement:
        """Return the memory and FLOPs of the gradient under a policy.

        Raises UnsupportedError if the place has effects.
        """
        policy = policy_of(source)
        for asked, placement in self._placements:
            if asked.answers_like(policy):
                return replace(placement, policy=source)
        # JAX knows these two by `is`.
        is_plain = policy in (POLICIES["everything_saveable"], POLICIES[_NOTHING])
        asked = _RecordedPolicy(policy)
        gradient = self._gradient(policy if is_plain else asked)
        placement = _measured(*gradient, self._only, source, self._compiled)
        if not is_plain:
            self._placements.append((asked, placement))
        return placement

    def _gradient(self, policy: Callable[..., Any]) -> tuple[ClosedJaxpr, int | None]:
        """Return the gradient under a policy as one jaxpr, and the bytes that it keeps."""
        whole = self._whole
        if self._only == () and (joined := whole.gradient(policy)) is not None:
            return joined, whole.kept_bytes(policy)
        gradient = Vjp(argnums=whole.argnums)(self._under(policy))
        return joined_halves(gradient), total_bytes(gradient["backward"])

    def _under(self, policy: Callable[..., Any]) -> Program:
        """Return the program with a policy here. JAX caches the derivatives of shared bodies."""

        def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
            if eqn.params.get("policy") is not _placeholder:
                return None
            return [eqn.replace(params={**eqn.params, "policy": policy})]

        program = self._checkpointed()
        return program.replace(jaxpr=map_equations(program.jaxpr, rule))

    @cached_method
    def _checkpointed(self) -> Program:
        """Return the program with a placeholder for the policy.

        Calls of one body are those of one jit that JAX inlines, whose derivative it caches. They
        lose their source lines.
        """
        jits: dict[Jaxpr, Params] = {}

        def called(eqn: JaxprEqn) -> JaxprEqn:
            if eqn.params.get("policy") is not _placeholder:
                return eqn
            body = jaxcompat.open_jaxpr(eqn.params["jaxpr"])
            if body not in jits:
                jits[body] = jaxcompat.inlined_call_params(eqn)
            return eqn.replace(primitive=jit_p, params=jits[body])

        program = _checkpointed(self._program, self._only, _placeholder)
        eqns = list(map(called, program.jaxpr.eqns))
        return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))


def _placeholder(*_: Any, **__: Any) -> bool:
    """Stand for the policies of a place."""
    return False


class _RecordedPolicy:
    """A policy of `jax.checkpoint` that records what it is asked, and its answers."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy
        self._answers: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def __call__(self, *args: Any, **params: Any) -> Any:
        answer = self._policy(*args, **params)
        self._answers.append((args, params, answer))
        return answer

    def answers_like(self, policy: Callable[..., Any]) -> bool:
        """Return True if a policy gives the same answers to all that this one was asked."""
        return all(policy(*args, **params) == answer for args, params, answer in self._answers)


def measured_placement(
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
    joined, kept_bytes = joined_halves(gradient), total_bytes(gradient["backward"])
    return _measured(joined, kept_bytes, only, policy, compiled)


def _measured(
    gradient: ClosedJaxpr, kept_bytes: int | None, only: Only, policy: str, compiled: bool
) -> Placement:
    assert kept_bytes is not None
    stated = _compiled_bytes(gradient) if compiled else None
    peak, flops = peak_memory(gradient), total_flops(gradient)
    return Placement(only, policy, kept_bytes, peak.peak_bytes, flops, stated, tuple(peak.unknown))


def _checkpointed(program: Program, only: Only, policy: Any) -> Program:
    if not only:
        return Checkpoint(policy)(program)
    for pattern in reversed(only):
        program = Checkpoint(policy, only=pattern)(program)
    return program


def joined_halves(gradient: Programs) -> ClosedJaxpr:
    """Return the halves of a gradient as one jaxpr, of arguments and cotangents."""
    forward, backward = gradient["forward"], gradient["backward"]
    main = filled(forward.out_tree, range(forward.out_tree.num_leaves))[0]
    first, count = len(jax.tree.leaves(main)), residual_count(backward)
    ahead, back = forward.jaxpr, backward.jaxpr
    passed = dict(zip(back.invars, ahead.outvars[first : first + count], strict=False))
    constants = {
        v: const
        for half in (ahead, back)
        for v, const in zip(half.constvars, half.consts, strict=True)
    }
    return jaxcompat.new_jaxpr(
        list(constants),
        list(constants.values()),
        [*ahead.invars, *back.invars[count:]],
        [
            *ahead.outvars[:first],
            *ahead.outvars[first + count :],
            *substitute(back.outvars, passed),
        ],
        [*ahead.eqns, *(with_operands(eqn, passed) for eqn in back.eqns)],
        ahead.debug_info._replace(arg_names=None, result_paths=None),
    )


def _compiled_bytes(jaxpr: ClosedJaxpr) -> int | None:
    """Return the peak memory that XLA states for a jaxpr, in bytes; None if it states none."""
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    told: Any = jax.jit(jaxcompat.jaxpr_as_fun(jaxpr)).lower(*args).compile().memory_analysis()
    if told is None:
        return None
    sizes = told.argument_size_in_bytes, told.output_size_in_bytes, told.temp_size_in_bytes
    return int(sum(sizes) - told.alias_size_in_bytes)


# --- inner gradient -------------------------------------------------------------------------------
# Split a training step, which has its gradient inside, into a forward and a backward part.
#
# JAX marks the equations of a backward pass in their name stacks: `transpose(jvp(…))`. The values
# that they read from other equations are the residuals.


def halves_inside(program: Program) -> Programs | None:
    """Return the forward and the backward part of a gradient in a program; None without one.

    The forward part is the whole program, with the residuals as its only results. The backward part
    takes the residuals, like that of the pass `vjp`.
    """
    inlined = Inline()(program)
    jaxpr = inlined.jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if is_backward(eqn)]
    if not eqns:
        return None
    constants = set(jaxcompat.open_jaxpr(jaxpr).constvars)
    free = [v for v in free_variables(eqns) if v not in constants]
    named = {f"{position:06}": 0 for position in range(len(free))}
    outs = [v for eqn in eqns for v in eqn.outvars]
    debug = jaxcompat.open_jaxpr(jaxpr).debug_info
    consts = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    backward = jaxcompat.new_jaxpr(list(consts), list(consts.values()), free, outs, eqns, debug)
    forward = inlined.replace(
        jaxpr=jaxcompat.replace_jaxpr(jaxpr, outvars=free),
        out_tree=structure(((), named)),
        out_names=tuple(named),
    )
    late = inlined.replace(
        jaxpr=backward,
        in_tree=structure(((named,), {})),
        arg_names=tuple(named),
        out_tree=structure([0] * len(outs)),
        out_names=tuple(f"result[{i}]" for i in range(len(outs))),
    )
    return Programs({"forward": forward, "backward": late})


def differentiated(
    program: Program, argnums: int | Sequence[int]
) -> tuple[Program, tuple[int, ...], tuple[str, ...]]:
    """Return a program with the user's arguments, and which are differentiated, with their names.

    Args:
        program: The program. That of a function of a library, such as `eqx.filter_jit`, takes the
            user's arguments in one; they are told apart by their names.
        argnums: The positions of the user's arguments.

    Raises:
        ArgumentsError: If there is no argument at a position, or it has no floating-point array.
    """
    program = _with_own_arguments(program)
    numbers = chosen_argnums(program, "residuals", argnums)
    roots, groups = positional_roots(program), positional(program)
    names = [root or f"argument {number}" for number, root in enumerate(roots)]
    moving = [any(_is_inexact(program.in_avals[i]) for i in group) for group in groups]
    for number in numbers:
        if not moving[number]:
            types = [type_of(program.in_avals[i]) for i in groups[number]]
            what = f"is {types[0]}" if len(types) == 1 else "has no floating-point array"
            floats = ", ".join(f"{i} ({names[i]})" for i, flag in enumerate(moving) if flag)
            raise ArgumentsError(
                f"{program.name} has no gradient with respect to argument {number}: "
                f"{names[number]} {what}",
                f"--argnums takes the position of another: {floats}" if floats else None,
            )
    return program, numbers, tuple(names[number] for number in numbers)


def _with_own_arguments(program: Program) -> Program:
    """Return a program with one positional argument for each of the user's.

    The program changes only if one of its arguments holds several, and they are in order.
    """
    groups = positional(program)
    roots = [root_of(name) for name in program.arg_names]
    if all(len({roots[i] for i in group}) <= 1 for group in groups):
        return program
    flat = [i for group in groups for i in group]
    runs = [list(run) for _, run in groupby(flat, lambda i: roots[i])]
    if len(runs) > len({roots[i] for i in flat}):
        return program
    _, keywords = filled(program.in_tree, range(len(program.arg_names)))
    return program.replace(in_tree=structure((tuple(runs), keywords)))


def _is_inexact(aval: Aval) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", None), jnp.inexact)


def gives_one_float(program: Program) -> bool:
    """Return True if a program returns a single floating-point number, such as a loss."""
    results = program.out_avals
    return (
        len(results) == 1 and getattr(results[0], "shape", None) == () and is_float_aval(results[0])
    )


def is_float_aval(aval: Aval) -> bool:
    """Return True for the type of floating-point numbers."""
    return jnp.issubdtype(getattr(aval, "dtype", None), jnp.floating)
