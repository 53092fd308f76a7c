"""Find the equations of a pullback at which a cotangent becomes zero on given inputs.

All values that depend on the cotangent are linear in it. The program is compiled once, with two
counters for each equation that computes such a value: the executions in which all its results are
zero, and those in which they are zero although the cotangents that it reads are not. From a zero
gradient, zeros are then followed back to the equations that made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.compiled import Masked, OriginCounter
from jaxprtool.execute.nans.states import has_state
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.execute.stepping.effects import has_external_effect
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.dataflow.slicing import Run, Start, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, Literal, Var

#: An equation, preceded by those whose bodies contain it.
Path: TypeAlias = tuple[JaxprEqn, ...]


def vanishing(
    program: Program, arguments: Sequence[Any], results: Sequence[int]
) -> list[tuple[Path, ...] | None]:
    """Return, for each of some zero results, the equations that made the cotangents zero.

    Args:
        program: A pullback, which takes the cotangent as its last argument.
        arguments: Its flat arguments.
        results: The positions of the results.

    Returns:
        For each result the equations, or None if it does not depend on the cotangent.
    """
    with ready_to_step(program, tuple(arguments), None) as (there, given):
        top = jaxcompat.open_jaxpr(there.jaxpr)
        run = forward_slice(top, Start([(top, top.invars[-1])]))
        linear = _linear(run)
        numbers = {id(each.jaxpr.eqns[i]): None for each in run.runs() for i in each.inside}
        numbered = {key: number for number, key in enumerate(numbers)}

        def counted(*values: Any) -> Any:
            counter = _ZeroCounter(numbered, linear)
            counter.results(there.jaxpr, list(map(Masked, values)))
            return counter.counts()

        counts = np.asarray(jax.jit(counted)(*given))
    found: list[tuple[Path, ...] | None] = []
    for position in results:
        end = top.outvars[position]
        if type(end) is Literal or end not in linear:
            found.append(None)
            continue
        back = _Back(numbered, linear, counts)
        back.through(top, [i == position for i in range(len(top.outvars))], ())
        found.append(tuple(back.found.values()))
    return found


def _linear(run: Run) -> set[Var]:
    """Return the variables that depend on the cotangent, at every depth."""
    linear: set[Var] = set()
    for each in run.runs():
        pairs = zip(each.jaxpr.invars, each.arguments, strict=True)
        linear.update(v for v, flag in pairs if flag)
        for i in each.inside:
            linear.update(each.jaxpr.eqns[i].outvars)
    return linear


class _ZeroCounter(OriginCounter):
    """Counts how often the results of each equation are zero, under tracing.

    The first count is of executions that read a nonzero cotangent.
    """

    def __init__(
        self,
        numbers: Mapping[int, int],
        linear: set[Var],
        axes: tuple[Any, ...] = (),
        varying: bool = False,
    ):
        super().__init__(numbers, None, axes, varying)
        self._linear = linear

    def inner(self) -> _ZeroCounter:
        return _ZeroCounter(self._numbers, self._linear, self._axes, self._varying)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Masked]:
        if not eqn.outvars and has_external_effect(eqn):
            return []  # a print, already done by the run of the gradient
        return self.bound(eqn, operands)

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = super().equation(eqn, operands)
        number = self._numbers.get(id(eqn))
        if number is not None:
            pairs = zip(eqn.invars, operands, strict=True)
            read = [x for v, x in pairs if type(v) is not Literal and v in self._linear]
            is_zero = ~_any_nonzero(results)
            counts = jnp.stack([is_zero & _any_nonzero(read), is_zero]).astype(jnp.int32)
            self._single[number] = self._single.get(number, 0) + counts
        return results


def _any_nonzero(values: Sequence[Masked]) -> Any:
    found = jnp.array(False)
    for value in values:
        if has_state(value.data):
            found |= (jnp.asarray(value.data) != 0).any()
    return found


class _Back:
    """Follows zeros back to the equations that made them.

    Attributes:
        found: These equations, by the `id` of the innermost.
    """

    def __init__(self, numbers: Mapping[int, int], linear: set[Var], counts: np.ndarray):
        self._numbers, self._linear, self._counts = numbers, linear, counts
        self.found: dict[int, Path] = {}

    def through(self, jaxpr: Jaxpr, wanted: Sequence[bool], around: Path) -> list[bool]:
        """Follow results of a body back; return which of its arguments are reached."""
        ends = zip(jaxpr.outvars, wanted, strict=True)
        zeros = {v for v, flag in ends if flag and type(v) is not Literal}
        for eqn in reversed(jaxpr.eqns):
            flags = [v in zeros for v in eqn.outvars]
            number = self._numbers.get(id(eqn))
            if number is not None and any(flags):
                asked = self._operands(eqn, flags, around, *self._counts[number])
                pairs = zip(eqn.invars, asked, strict=True)
                zeros.update(v for v, flag in pairs if flag and type(v) is not Literal)
        return [v in zeros for v in jaxpr.invars]

    def _operands(
        self, eqn: JaxprEqn, flags: list[bool], around: Path, made: int, zero: int
    ) -> Sequence[bool]:
        """Return which operands to follow, and note the equation if it made zeros."""
        path = (*around, eqn)
        held = regions(eqn)
        if held is None:
            if made:
                self.found[id(eqn)] = path
            is_zero = zero > made
            return [is_zero and type(v) is not Literal and v in self._linear for v in eqn.invars]
        operands = held.backward(
            flags, lambda number, asked: self.through(held.jaxprs[number], asked, path)
        )
        inside = any(eqn in each[:-1] for each in self.found.values())
        if made and not inside:
            self.found[id(eqn)] = path
        return operands
