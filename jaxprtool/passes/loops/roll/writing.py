"""Write the scans that replace the chains of calls in one body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.core import structured
from jaxprtool.ir.core.equations import Contains, donations, size_of
from jaxprtool.ir.rewriting.rewrite import Writer
from jaxprtool.jaxcompat import AnyJaxpr, Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.loops.outline.names import Names
from jaxprtool.passes.loops.roll.chains import (
    FEWEST,
    Chain,
    Placement,
    calls_by_body,
    chains,
    fits,
    placement,
)
from jaxprtool.passes.loops.roll.rows import Range, Rows
from jaxprtool.passes.loops.roll.units import as_unit
from jaxprtool.passes.loops.schedule import keep_order

#: Stacked arrays with their rows.
Stacks: TypeAlias = dict[Var, tuple[Atom, ...]]


@dataclass(frozen=True)
class _Result:
    """A value of the body that a loop stacks.

    Attributes:
        value: The value: a result of the body, or an argument that is carried.
        rows: The variable of its value in each iteration; None where it is not needed.
        start: Its value in the first iteration, if that comes from before the loop.
    """

    value: Atom
    rows: list[Var | None]
    start: Var | None = None


class Roller:
    """The state of one body while its chains become scans.

    Args:
        jaxpr: The body.
        sows: Whether an equation sows a value.
        usable: Whether an equation is a call that may become an iteration of a loop.
        names: The names of units that are in use.
    """

    def __init__(
        self, jaxpr: AnyJaxpr, sows: Contains, usable: Callable[[JaxprEqn], bool], names: Names
    ) -> None:
        body = jaxcompat.open_jaxpr(jaxpr)
        self._jaxpr, self._sows, self._usable, self._names = jaxpr, sows, usable, names
        #: The arrays stacked only from arguments of the body, with their rows.
        self.stacks: Stacks = {}
        #: Stacks of arguments come first of all; the rest is in slots, one for each equation of the
        #: original body, so that a loop only changes those between its first and its last call.
        self._first: list[JaxprEqn] = []
        self._slots = [[eqn] for eqn in body.eqns]
        self._slot: dict[int, int] = {}
        self._alive: list[JaxprEqn] = []  # so that their ids stay unique
        self._made_in: dict[Var, int] = dict.fromkeys((*body.constvars, *body.invars), -1)
        self._arguments = set(body.invars)
        self._reads = Counter(v for v in body.outvars if type(v) is not Literal)
        self._rows = Rows()
        self._replaced: set[int] = set()
        #: The arrays that scans take as inputs, or return.
        self._arrays: set[Var] = set()
        for i, eqn in enumerate(body.eqns):
            self._enter([eqn], i)

    def run(self) -> AnyJaxpr:
        """Return the body with chains replaced by scans; the same object if there are none."""
        eqns = jaxcompat.open_jaxpr(self._jaxpr).eqns
        groups = calls_by_body(eqns, self._usable)
        found = [chain for calls in groups for chain in chains(calls)]
        for chain in sorted(found, key=lambda chain: -len(chain.calls)):
            self._roll(chain)
        if not self._replaced:
            return self._jaxpr
        while aligned := [each for calls in groups if (each := self._row_by_row(calls))]:
            # Equations that compute rows come before their readers: none is unstacked in between.
            chain = min(aligned, key=lambda chain: self._window(chain)[-1])
            self._write(chain, self._placement(chain))
        written = [*self._first, *(eqn for slot in self._slots for eqn in slot)]
        return jaxcompat.replace_jaxpr(self._jaxpr, eqns=written)

    @property
    def rolled(self) -> bool:
        """True if a chain has become a scan."""
        return bool(self._replaced)

    # --- selection of calls --------------------------------------------------------------------

    def _roll(self, chain: Chain) -> None:
        """Replace a chain by loops, each as long as possible."""
        start = 0
        while len(chain.calls) - start >= FEWEST:
            rest = Chain(chain.calls[start:], chain.forwarded)
            found = self._placement(rest)
            if len(found.calls) >= FEWEST:
                rest = rest.first(len(found.calls))
                self._write(rest, self._placement(rest))
            start += max(len(found.calls), 1)

    def _row_by_row(self, calls: Sequence[JaxprEqn]) -> Chain | None:
        """Return calls on the rows of an array that a scan takes or returns, if there are any.

        They need not pass results on.
        """
        by_array: dict[tuple[int, Var], dict[int, JaxprEqn]] = {}
        for call in calls:
            if id(call) in self._replaced or call.effects:
                continue
            for position, atom in enumerate(call.invars):
                for array, number in self._rows.of(atom).items():
                    if array in self._arrays:
                        by_array.setdefault((position, array), {}).setdefault(number, call)
        best = max(by_array.values(), key=len, default={})
        ordered = [best[number] for number in sorted(best)]
        ordered = [call for call in ordered if fits(ordered[0], call, {})]
        if len(ordered) < FEWEST:
            return None
        kept = set(map(id, self._placement(Chain(ordered, {})).calls))
        chain = Chain([call for call in ordered if id(call) in kept], {})
        return chain if len(chain.calls) >= FEWEST else None

    def _window(self, chain: Chain) -> range:
        slots = [self._slot[id(call)] for call in chain.calls]
        return range(min(slots), max(slots) + 1)

    def _placement(self, chain: Chain) -> Placement:
        eqns = [eqn for i in self._window(chain) for eqn in self._slots[i]]
        if donations(eqns):
            return Placement([], [], [])
        return placement(chain, eqns, keep_order(eqns, self._sows))

    # --- the scan ------------------------------------------------------------------------------

    def _write(self, chain: Chain, found: Placement) -> None:
        """Replace all calls of a chain by a scan."""
        window, length, calls = self._window(chain), len(chain.calls), chain.calls
        columns = [chain.column(i) for i in chain.xs]

        def usable(array: Var) -> bool:
            # Stacks made for another column of this chain are defined in its window.
            made = self._made_in.get(self._rows.of_slices.get(array, array), window[0])
            return made <= window[-1]

        def cost(columns: Iterable[Sequence[Atom]]) -> tuple[int, int]:
            parts = [self._rows.parts(column, usable) for column in columns]
            return sum(map(_copied, parts)), sum(map(len, parts))

        reverse = cost(column[::-1] for column in columns) < cost(columns)
        writer = Writer(self._jaxpr, False, lambda eqn: eqn)
        xs = [
            self._stacked(writer, column[::-1] if reverse else column, usable, calls[0])
            for column in columns
        ]
        carry_outs, stacked = self._carry_outs(chain), list(self._stacked_results(chain))
        ys = [Var(jaxcompat.stacked_aval(length, result.value.aval)) for result in stacked]
        body = jaxcompat.replace_jaxpr(
            chain.body,
            invars=[chain.body.invars[i] for i in (*chain.consts, *chain.carry, *chain.xs)],
            outvars=[
                *(chain.body.outvars[chain.forwarded[i]] for i in chain.carry),
                *(result.value for result in stacked),
            ],
        )
        if jaxcompat.convolves(body, in_units=False):
            body = as_unit(body, self._names.unique(calls[0].params["name"]), calls[0])
        consts, carry = ([calls[0].invars[i] for i in some] for some in (chain.consts, chain.carry))
        operands, results = (consts, carry, xs), (carry_outs, ys)
        writer.add(structured.scan(body, operands, results, length, reverse, calls[0]))
        for array, result in zip(ys, stacked, strict=True):
            _unstack(writer, array, result.rows[::-1] if reverse else result.rows, calls[0])
            if result.start is not None:
                self._rows.add(result.start, array, length - 1 if reverse else 0)
        self._arrays.update(ys, (x for x in xs if type(x) is not Literal))
        self._replace(window, chain, [*found.before, *writer.eqns, *found.after], writer.eqns)

    def _carry_outs(self, chain: Chain) -> list[Var]:
        """Return the variables that hold the final carries, each once."""
        outs: list[Var] = []
        for i in chain.carry:
            var = chain.calls[-1].outvars[chain.forwarded[i]]
            outs.append(var if self._reads[var] and var not in outs else DropVar(var.aval))
        return outs

    def _stacked_results(self, chain: Chain) -> Iterator[_Result]:
        """Yield the results that a loop in place of a chain must stack."""
        body, positions = chain.body, {out: i for i, out in chain.forwarded.items()}
        counts = Counter(chain.forwarded.values())
        for out, value in enumerate(body.outvars):
            made = [call.outvars[out] for call in chain.calls]
            inside = [counts[out]] * (len(made) - 1) + [0]
            rows = [v if self._reads[v] > n else None for v, n in zip(made, inside, strict=True)]
            if out in positions:
                rows[-1] = None  # the last carry
            if not any(rows):
                continue
            start = chain.calls[0].invars[positions[out]] if out in positions else None
            if isinstance(start, Var) and self._reads[start] > chain.calls[0].invars.count(start):
                yield _Result(body.invars[positions[out]], [None, *rows[:-1]], start)
            else:
                yield _Result(value, rows)

    def _stacked(
        self, writer: Writer, rows: Sequence[Atom], usable: Callable[[Var], bool], like: JaxprEqn
    ) -> Var:
        """Return the array of these rows, which is written if it does not exist."""
        parts = [self._made(writer, part, like) for part in self._rows.parts(rows, usable)]
        if (whole := whole_array(parts)) is not None:
            return whole
        outside = all(type(v) is Literal or v in self._arguments for v in parts)
        if outside:
            writer = Writer(self._jaxpr, False, lambda eqn: eqn)
        array = write_stack(writer, parts, like)
        for i, row in enumerate(rows):
            self._rows.add(row, array, i)
        if outside:
            self.stacks[array] = tuple(rows)
            self._first += writer.eqns
            self._enter(writer.eqns, -1)
        return array

    def _made(self, writer: Writer, part: Atom | Range, like: JaxprEqn) -> Atom | Range:
        """Return a part with an existing array; write the array if its rows are slices."""
        if not isinstance(part, Range) or part.array not in self._rows.of_slices:
            return part
        of = self._rows.of_slices[part.array]
        (array,) = writer.trace(lambda x: [lax.expand_dims(x, [1])], [of], like)
        assert isinstance(array, Var)
        return replace(part, array=array)

    # --- the equations -------------------------------------------------------------------------

    def _replace(
        self, window: range, chain: Chain, eqns: list[JaxprEqn], new: Sequence[JaxprEqn]
    ) -> None:
        """Replace the equations in a window by others, some of which are new."""
        for call in chain.calls:
            self._reads.subtract(v for v in call.invars if type(v) is not Literal)
        self._replaced.update(map(id, chain.calls))
        self._enter(new, window[0])
        for i in window:
            self._slots[i] = []
        self._slots[window[0]] = eqns
        for eqn in eqns:
            self._slot[id(eqn)] = window[0]
            self._made_in.update(dict.fromkeys(eqn.outvars, window[0]))

    def _enter(self, eqns: Sequence[JaxprEqn], slot: int) -> None:
        """Record new equations."""
        self._alive += eqns
        for eqn in eqns:
            self._slot[id(eqn)] = slot
            self._made_in.update(dict.fromkeys(eqn.outvars, slot))
            self._reads.update(v for v in eqn.invars if type(v) is not Literal)
            self._rows.record(eqn)


def whole_array(parts: Sequence[Atom | Range]) -> Var | None:
    """Return the array that consists of exactly these parts, in order; None if there is none."""
    first = parts[0]
    return first.array if isinstance(first, Range) and first.is_whole and len(parts) == 1 else None


def write_stack(writer: Writer, parts: Sequence[Atom | Range], like: JaxprEqn) -> Var:
    """Write the equations that make an array from parts, and return it."""

    def stacked(*values: Any) -> list[Any]:
        if not any(isinstance(part, Range) for part in parts):
            return [lax.stack(values)]
        pieces = [
            lax.slice_in_dim(x, part.start, part.stop)
            if isinstance(part, Range)
            else lax.expand_dims(x, [0])
            for part, x in zip(parts, values, strict=True)
        ]
        return [lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]]

    operands = [part.array if isinstance(part, Range) else part for part in parts]
    (array,) = writer.trace(stacked, operands, like)
    assert isinstance(array, Var)
    return array


def _copied(parts: Sequence[Atom | Range]) -> int:
    """Return the number of bytes, or of values of unknown size, copied to stack parts."""
    if whole_array(parts) is not None:
        return 0
    return sum(
        (part.stop - part.start) * (size_of(part.array.aval, 1) // part.array.aval.shape[0])
        if isinstance(part, Range)
        else size_of(part.aval, 1)
        for part in parts
    )


def _unstack(writer: Writer, array: Var, rows: Sequence[Var | None], like: JaxprEqn) -> None:
    """Write the equations that define variables as the rows of an array."""
    wanted = [i for i, row in enumerate(rows) if row is not None]
    if len(wanted) == 1:
        writer.trace(lambda x: [lax.index_in_dim(x, wanted[0], keepdims=False)], [array], like)
        outvars: list[Any] = [rows[wanted[0]]]
    else:
        writer.trace(lax.unstack, [array], like)
        aval = writer.eqns[-1].outvars[0].aval
        outvars = [DropVar(aval) if row is None else row for row in rows]
    writer.eqns[-1] = writer.eqns[-1].replace(outvars=outvars)
