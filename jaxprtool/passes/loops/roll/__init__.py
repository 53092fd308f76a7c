"""Rolling: turn the unrolled iterations of a Python loop into a scan again.

Repetition is found as in `outline`, and so through the boundaries of calls and at every depth.
Copies that each read results of the previous one are a *chain*, and three or more copies of a chain
become a scan: values passed from copy to copy are carried, values that all of them read are
constants, and values that differ (the weights of a layer, its random key, a literal) are stacked. A
result that is read after the loop is the last carry, or is stacked and unstacked again.

An iteration may be several copies of a body, if its parts look alike, and may read results of
iterations before the previous one: see `rounds`. It may read and update an array at positions that
differ: see `moving_slices`.

Rows of an array are not stacked: the scan takes the array itself. So the backward half of a
gradient becomes a reverse scan over the stacks of the forward half, which include the carry before
each iteration, as in JAX's own derivative of a scan. Copies on the rows of an array that another
scan takes, or returns, become a scan even if they pass nothing on: the update of the parameters of
each layer, say.

Equations between the copies go before the scan, or after it if they depend on a copy. The chain is
cut where they would have to stay in between: where a copy reads a value that depends on another
copy and is not passed on, or at effects, whose order stays. A chain is also cut where the type or
position of a passed value changes. Calls that sow a value, donate, or have settings of their own
(see `inline`) stay.

XLA's convolutions for the CPU are slow in a loop's body, and so an iteration that convolves becomes
one call, marked as a unit that XLA compiles separately (see `outline`). `inline(force=True)`
inlines it.

Every value is the same to the bit, evaluated equation by equation. Besides the rolled code, only
dead code is removed and plain calls are inlined. `unroll`, with a sufficient `max_length`, then
`simplify` and `dce`, restores the equations.

`roll(stack="inside")` stacks in the program, which copies the arrays: `jaxprtool opt` reports how
many bytes. `roll(stack="arguments")` leaves that to the caller: where all rows of a stack are
arguments, the stack is an argument, and the pass returns three programs: `rolled`; `stack`, which
computes its arguments from the original ones; and `unstack`, its inverse. Both take the arguments
that change, and return the same: as a tuple if there are several, and as `(args, kwargs)` if some
are keyword arguments. So a checkpoint can be converted both ways:

    parts = jaxprtool.trace(step, params, state, batch).apply("roll(stack='arguments')")
    params, state = parts["stack"](params, state)
    params, state, loss = parts["rolled"](params, state, batch)
    params, state = parts["unstack"](params, state)

The stacked array takes the place of the first of its rows; the others are replaced by None (see
`arguments`). An argument that is also used outside of its stack is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.equations import Contains, all_jaxprs, equations, holders
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.rewrite import Memo, RewriteRule, Writer, rewrite, with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.inline import Inline, has_own_settings
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.loops.outline import SHORTEST, UsedNames, with_calls
from jaxprtool.passes.loops.outline.choice import Costs
from jaxprtool.passes.loops.roll.chains import FEWEST, MovingSlices, stacking, with_rounds
from jaxprtool.passes.loops.roll.writing import Roller, Stacks, with_stacked_arguments
from jaxprtool.primitives import sow_p

#: Consecutive copies come first: whole layers, not the parts that most layers have in common.
_COSTS = [
    Costs(
        FEWEST,
        SHORTEST,
        body=0.0,
        operand=0.05,
        value=0.3,
        fused=0.0,
        gaps=gaps,
        periods=True,
    )
    for gaps in (False, True)
]

_STACKS = ("inside", "arguments")


@dataclass(frozen=True)
class Roll(Pass):
    """Turn chains of repeated computations, such as the layers of a model, into scans.

    In a chain, each copy reads results of the previous one. Three or more copies become a scan:
    values passed from one copy to the next are carried, values that all copies read are constants,
    and values that differ (the weights of a layer, its random key, a literal) are stacked. The
    backward half of a gradient becomes a reverse scan over the values that the forward half stacks.
    Every value is the same to the bit, evaluated equation by equation.

    Args:
        stack: Where the values that differ between iterations are stacked. `inside`: in the
            program, which copies them; `opt` reports how many bytes. `arguments`: by the caller.
            The result is then three programs: `rolled`; `stack`, which computes its arguments from
            the original ones; and `unstack`, its inverse. So a checkpoint can be converted both
            ways.

    Raises:
        UnsupportedError: With `stack='arguments'`, if an argument is also used outside of its
            stack, or has its own sharding or layout.

    Note:
        A chain is cut at effects, where a copy depends on a value of another copy that is not
        passed along the chain, and where the type of a passed value changes. An iteration with a
        convolution becomes one call of a unit that XLA compiles separately, since XLA's
        convolutions for the CPU are slow in a loop body. `inline(force=True)` inlines that call.

    Example:
        $ jaxprtool opt samples/layers.py:loss -p "value_and_grad, roll" --verify
    """

    name: ClassVar[str] = "roll"
    group: ClassVar[str] = "schedule and compile"

    stack: Literal["inside", "arguments"] = "inside"

    def __post_init__(self) -> None:
        if self.stack not in _STACKS:
            raise PipelineError(
                f"option 'stack' of pass 'roll' must be 'inside' or 'arguments', not {self.stack!r}"
            )

    def __call__(self, program: Program) -> Program | Programs:
        slices = MovingSlices()
        opened = Inline()(program)
        moving = slices.made_dynamic(opened.jaxpr)
        outlined = with_calls(opened.replace(jaxpr=moving), _COSTS, "plain")
        # Functions of the user's program may be too short to be outlined.
        return self._rolled(outlined, slices) or self._rolled(program, slices) or program

    def notes(self, before: Program, after: Program | Programs) -> Iterator[str]:
        """Yield a line on the memory that scans need, or that nothing repeats."""
        if after is before:
            yield f"{before.name} has no repetition"
            return
        totals = stacking(next(iter(after.values())) if isinstance(after, Programs) else after)
        yield (
            f"{before.name} has {plural(totals.scans, 'scan')}; stacking copies "
            f"{in_bytes(totals.copied)}, and stacked results take {in_bytes(totals.results)}"
        )

    def _rolled(self, program: Program, slices: MovingSlices) -> Program | Programs | None:
        """Return a program with chains of calls replaced by scans; None if it has none."""
        bodies = _BodyRoller(program.jaxpr)
        jaxpr, stacks = bodies.rolled(bodies.opened(program.jaxpr))
        if not bodies.any_rolled:
            return None
        new = Dce()(Inline()(program.replace(jaxpr=jaxpr)))
        new = new.replace(jaxpr=slices.made_static(new.jaxpr))
        return new if self.stack == "inside" else with_stacked_arguments(new, stacks)


class _BodyRoller:
    """The state of one run of the pass; a body that equations share is rolled once."""

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        #: True if a loop was created.
        self.any_rolled = False
        self._memo = Memo()
        self._sows = Contains(lambda eqn: eqn.primitive is sow_p)
        marked = map(jaxcompat.marked_name, equations(jaxcompat.open_jaxpr(jaxpr)))
        self._names = UsedNames(name for name in marked if name is not None)

    def rolled(self, jaxpr: AnyJaxpr) -> tuple[AnyJaxpr, Stacks]:
        """Return a body with chains replaced by scans at every depth, and the stacked arrays.

        Calls that form no chain may form one after they are joined into rounds.
        """
        eqns = jaxcompat.open_jaxpr(jaxpr).eqns
        new = [with_bodies(eqn, self._inside) for eqn in eqns]
        if any(a is not b for a, b in zip(new, eqns, strict=True)):
            jaxpr = jaxcompat.replace_jaxpr(jaxpr, eqns=new)
        roller, result = self._chains(jaxpr)
        joined = with_rounds(jaxpr, self._usable)
        if joined is not jaxpr:
            other, shorter = self._chains(joined)
            if _length(shorter) < _length(result):
                roller, result = other, shorter
        self.any_rolled |= roller.rolled
        return result, roller.stacks

    def _chains(self, jaxpr: AnyJaxpr) -> tuple[Roller, AnyJaxpr]:
        """Return the Roller of a body, and the body with its own chains replaced by scans."""
        roller = Roller(jaxpr, self._sows, self._usable, self._names)
        return roller, roller.run()

    def _inside(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return self._memo(lambda: self.rolled(jaxpr)[0], jaxpr)

    def opened(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Inline the bodies that do little more than call another body with several callers.

        The calls of that other body may then form a chain.
        """
        callers: dict[AnyJaxpr, set[AnyJaxpr]] = defaultdict(set)
        for body in all_jaxprs(jaxcompat.open_jaxpr(jaxpr)):
            for eqn, inner in holders(body):
                for _, callee in inner if self._usable(eqn) else ():
                    callers[callee].add(body)

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if not self._usable(eqn):
                    return None
                body = jaxcompat.close_jaxpr(eqn.params["jaxpr"])
                calls = list(filter(self._usable, body.eqns))
                if len(calls) != 1:
                    return None
                called = jaxcompat.open_jaxpr(calls[0].params["jaxpr"])
                if len(callers[called]) < 2 or len(body.eqns) > len(called.eqns):
                    return None
                return writer.splice(body, eqn.invars, eqn) if writer.can_hold(body) else None

            return rule

        return rewrite(jaxpr, visitor, flat=False)

    def _usable(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation may become an iteration of a loop."""
        return (
            traits(eqn).call == "jit"
            and not has_own_settings(eqn)
            and jaxcompat.allowed_in_loops(eqn.effects)
            and not self._sows.inside(eqn)
        )


def _length(jaxpr: AnyJaxpr) -> int:
    return len(jaxcompat.open_jaxpr(jaxpr).eqns)
