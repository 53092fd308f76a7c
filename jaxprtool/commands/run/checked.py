"""Checks on the values that a program computes, and cotangents that become zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.compiled import MaskedValue, OriginCounter
from jaxprtool.commands.nans.nans import BadValue, find_nan
from jaxprtool.commands.nans.values import has_state
from jaxprtool.commands.watch.values import FORMATS, Numbers
from jaxprtool.commands.watch.watch import WatchedRow, watch
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.ir.dataflow import BodySlice, Start, forward_slice
from jaxprtool.ir.documents import document
from jaxprtool.ir.equations import has_external_effect
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import regions
from jaxprtool.ir.source_text import Place, place_in
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, Literal, Var

# --- checked --------------------------------------------------------------------------------------
# Checks on the values that a program computes: `nan`, `inf`, `subnormal`, `overflow-f16`.

#: The checks of `find_nan` and the kinds they find.
_NOT_FINITE = {"nan": "NaN", "inf": "infinity"}

#: All checks. A finite number overflows in a format if it is not finite there, and underflows if it
#: becomes zero.
CHECKS = (
    *_NOT_FINITE,
    "subnormal",
    *(f"{what}-{name}" for what in ("overflow", "underflow") for name in FORMATS),
)


@document(without=("source",), also=("name", "place"), optional=("place",))
@dataclass(frozen=True)
class Finding:
    """Values that fail a check.

    Attributes:
        check: The name of the check.
        primitives: The primitives that compute them; empty for an argument that has a NaN.
        source: The user's line, followed by the library's; or the argument.
        backward: Whether they belong to the backward pass of a gradient.
        iteration: For NaNs and infinities, the iteration of each enclosing loop.
        count: The number of elements that fail.
        size: The number of all elements.
        reaches: The results that have a NaN or an infinity because of them.
    """

    check: str
    primitives: tuple[str, ...]
    source: str
    backward: bool
    iteration: tuple[int, ...]
    count: int
    size: int
    reaches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The line, the argument, or that it is a constant."""
        return str(self.source)

    @property
    def place(self) -> Place | None:
        """The user's line; None for an argument or a constant."""
        return place_in(self.source)


def require_checks(names: Sequence[str]) -> None:
    """Raise ArgumentsError unless these are names of checks."""
    for name in names:
        if name not in CHECKS:
            hint = did_you_mean(name, CHECKS) or f"available: {', '.join(CHECKS)}"
            raise ArgumentsError(f"unknown check '{name}'", hint)


def findings(
    program: Program, args: object, checks: Sequence[str], device: jax.Device | None = None
) -> list[Finding]:
    """Return the findings of each check in turn, in program order.

    NaNs and infinities are reported where they are produced, others for every line that computes
    them.
    """
    require_checks(checks)
    collected: list[Finding] = []
    if any(name in _NOT_FINITE for name in checks):
        bad = find_nan(program, args, device).found
        names = {kind: name for name, kind in _NOT_FINITE.items()}
        collected += (
            _of_bad(names[value.kind], value) for value in bad if names[value.kind] in checks
        )
    others = [name for name in checks if name not in _NOT_FINITE]
    if others:
        rows = watch(program, args, device=device).rows
        by_line = defaultdict[tuple[str, bool], list[WatchedRow]](list)
        for row in rows:
            by_line[row.source, row.backward].append(row)
        for of_line in by_line.values():
            collected += _of_line(of_line, others)
    return sorted(collected, key=lambda finding: checks.index(finding.check))


def _of_bad(check: str, bad: BadValue) -> Finding:
    primitives = (bad.primitive,) if bad.primitive else ()
    source = bad.source or bad.argument or "a constant of the program"
    backward = bool(bad.forward)
    return Finding(
        check, primitives, source, backward, bad.iteration, bad.count, bad.size, bad.reaches
    )


def _of_line(rows: Sequence[WatchedRow], checks: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings among the values of a line and its intermediates."""
    primitives = dict.fromkeys(name for row in reversed(rows) for name in row.primitives)
    size = sum(row.numbers.size for row in rows)
    for check in checks:
        count = sum(_failing(row.numbers, check) for row in rows)
        if count:
            yield Finding(
                *(check, tuple(primitives), rows[0].source, rows[0].backward, ()), count, size
            )


def _failing(numbers: Numbers, check: str) -> int:
    """Return the number of elements that fail a check."""
    what, _, name = check.partition("-")
    if not name:
        return numbers.subnormals
    share: float = getattr(numbers.lost[name], what)
    return round(share * numbers.size)


# --- vanishing ------------------------------------------------------------------------------------
# Find the equations of a pullback at which a cotangent becomes zero on given inputs.
#
# All values that depend on the cotangent are linear in it. The program is compiled once, with two
# counters for each equation that computes such a value: the executions in which all its results are
# zero, and those in which they are zero although the cotangents that it reads are not. From a zero
# gradient, zeros are then followed back to the equations that made them.

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
    with ready_to_step(program, tuple(arguments), None) as (there, placed):
        top = jaxcompat.open_jaxpr(there.jaxpr)
        run = forward_slice(top, Start([(top, top.invars[-1])]))
        linear = _linear(run)
        numbers = {
            id(body_run.jaxpr.eqns[i]): None for body_run in run.runs() for i in body_run.inside
        }
        numbered = {key: number for number, key in enumerate(numbers)}

        def counted(*values: Any) -> Any:
            counter = _ZeroCounter(numbered, linear)
            counter.results(there.jaxpr, list(map(MaskedValue, values)))
            return counter.counts()

        counts = np.asarray(jax.jit(counted)(*placed))
    paths: list[tuple[Path, ...] | None] = []
    for position in results:
        end = top.outvars[position]
        if type(end) is Literal or end not in linear:
            paths.append(None)
            continue
        back = _Back(numbered, linear, counts)
        back.through(top, [i == position for i in range(len(top.outvars))], ())
        paths.append(tuple(back.found.values()))
    return paths


def _linear(run: BodySlice) -> set[Var]:
    """Return the variables that depend on the cotangent, at every depth."""
    linear: set[Var] = set()
    for body_run in run.runs():
        pairs = zip(body_run.jaxpr.invars, body_run.arguments, strict=True)
        linear.update(v for v, flag in pairs if flag)
        for i in body_run.inside:
            linear.update(body_run.jaxpr.eqns[i].outvars)
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

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[MaskedValue]:
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


def _any_nonzero(values: Sequence[MaskedValue]) -> Any:
    nonzero = jnp.array(False)
    for value in values:
        if has_state(value.data):
            nonzero |= (jnp.asarray(value.data) != 0).any()
    return nonzero


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
        self, eqn: JaxprEqn, flags: list[bool], around: Path, vanished: int, zero: int
    ) -> Sequence[bool]:
        """Return which operands to follow, and note the equation if it made zeros."""
        path = (*around, eqn)
        nested = regions(eqn)
        if nested is None:
            if vanished:
                self.found[id(eqn)] = path
            is_zero = zero > vanished
            return [is_zero and type(v) is not Literal and v in self._linear for v in eqn.invars]
        operands = nested.backward(
            flags, lambda number, asked: self.through(nested.jaxprs[number], asked, path)
        )
        inside = any(eqn in other[:-1] for other in self.found.values())
        if vanished and not inside:
            self.found[id(eqn)] = path
        return operands
