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

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias
from typing import Literal as OneOf

import jax
from jax import lax
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError, UnsupportedError
from jaxprtool.ir import regions
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.equations import (
    Contains,
    all_jaxprs,
    donated_operands,
    equations,
    holders,
    named,
    size_of,
    substitute,
)
from jaxprtool.ir.program import Program, Programs, ValueOptions
from jaxprtool.ir.regions import call, keep
from jaxprtool.ir.rewrite import Memo, RewriteRule, Writer, rewrite, with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled, structure
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    DebugInfo,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)
from jaxprtool.passes import Pass
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.inline import Inline, has_own_settings
from jaxprtool.passes.loops.outline import SHORTEST, UsedNames, with_calls, with_calls_inlined
from jaxprtool.passes.loops.outline.choice import Costs
from jaxprtool.passes.loops.roll.chains import (
    FEWEST,
    Chain,
    KnownRows,
    LoopPlacement,
    MovingSlices,
    Range,
    calls_by_body,
    can_stack,
    chains,
    placement,
    stacking,
    with_rounds,
)
from jaxprtool.passes.loops.schedule import keep_order
from jaxprtool.passes.retrace import retraced
from jaxprtool.passes.transforms.calls import remaining
from jaxprtool.primitives import sow_p

# --- writing --------------------------------------------------------------------------------------
# Write the scans that replace chains of calls, with stacked arguments and units.


#: Stacked arrays with their rows.
Stacks: TypeAlias = dict[Var, tuple[Atom, ...]]


@dataclass(frozen=True)
class _StackedResult:
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
        self, jaxpr: AnyJaxpr, sows: Contains, usable: Callable[[JaxprEqn], bool], names: UsedNames
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
        self._rows = KnownRows()
        self._replaced: set[int] = set()
        #: The arrays that scans take as inputs, or return.
        self._arrays: set[Var] = set()
        for i, eqn in enumerate(body.eqns):
            self._enter([eqn], i)

    def run(self) -> AnyJaxpr:
        """Return the body with chains replaced by scans; the same object if there are none."""
        eqns = jaxcompat.open_jaxpr(self._jaxpr).eqns
        groups = calls_by_body(eqns, self._usable)
        candidates = [chain for calls in groups for chain in chains(calls)]
        for chain in sorted(candidates, key=lambda chain: -len(chain.calls)):
            self._roll(chain)
        if not self._replaced:
            return self._jaxpr
        while aligned := [rowwise for calls in groups if (rowwise := self._row_by_row(calls))]:
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
            placed = self._placement(rest)
            if len(placed.calls) >= FEWEST:
                rest = rest.first(len(placed.calls))
                self._write(rest, self._placement(rest))
            start += max(len(placed.calls), 1)

    def _row_by_row(self, calls: Sequence[JaxprEqn]) -> Chain | None:
        """Return calls on the rows of an array that a scan takes or returns, if there are any.

        They need not pass results on.
        """
        by_array: dict[tuple[int, Var], dict[int, JaxprEqn]] = {}
        for called in calls:
            if id(called) in self._replaced or called.effects:
                continue
            for position, atom in enumerate(called.invars):
                for array, number in self._rows.of(atom).items():
                    if array in self._arrays:
                        by_array.setdefault((position, array), {}).setdefault(number, called)
        best = max(by_array.values(), key=len, default={})
        ordered = [best[number] for number in sorted(best)]
        ordered = [call for call in ordered if can_stack(ordered[0], call, {})]
        if len(ordered) < FEWEST:
            return None
        kept = set(map(id, self._placement(Chain(ordered, {})).calls))
        chain = Chain([call for call in ordered if id(call) in kept], {})
        return chain if len(chain.calls) >= FEWEST else None

    def _window(self, chain: Chain) -> range:
        slots = [self._slot[id(call)] for call in chain.calls]
        return range(min(slots), max(slots) + 1)

    def _placement(self, chain: Chain) -> LoopPlacement:
        eqns = [eqn for i in self._window(chain) for eqn in self._slots[i]]
        if donated_operands(eqns):
            return LoopPlacement([], [], [])
        return placement(chain, eqns, keep_order(eqns, self._sows))

    # --- the scan ------------------------------------------------------------------------------

    def _write(self, chain: Chain, placed: LoopPlacement) -> None:
        """Replace all calls of a chain by a scan."""
        window, length, calls = self._window(chain), len(chain.calls), chain.calls
        columns = [chain.column(i) for i in chain.xs]

        def usable(array: Var) -> bool:
            # Stacks made for another column of this chain are defined in its window.
            position = self._made_in.get(self._rows.of_slices.get(array, array), window[0])
            return position <= window[-1]

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
        writer.add(regions.scan(body, operands, results, length, reverse, calls[0]))
        for array, result in zip(ys, stacked, strict=True):
            _unstack(writer, array, result.rows[::-1] if reverse else result.rows, calls[0])
            if result.start is not None:
                self._rows.add(result.start, array, length - 1 if reverse else 0)
        self._arrays.update(ys, (x for x in xs if type(x) is not Literal))
        self._replace(window, chain, [*placed.before, *writer.eqns, *placed.after], writer.eqns)

    def _carry_outs(self, chain: Chain) -> list[Var]:
        """Return the variables that hold the final carries, each once."""
        outs: list[Var] = []
        for i in chain.carry:
            var = chain.calls[-1].outvars[chain.forwarded[i]]
            outs.append(var if self._reads[var] and var not in outs else DropVar(var.aval))
        return outs

    def _stacked_results(self, chain: Chain) -> Iterator[_StackedResult]:
        """Yield the results that a loop in place of a chain must stack."""
        body, positions = chain.body, {out: i for i, out in chain.forwarded.items()}
        counts = Counter(chain.forwarded.values())
        for out, value in enumerate(body.outvars):
            outs = [call.outvars[out] for call in chain.calls]
            inside = [counts[out]] * (len(outs) - 1) + [0]
            rows = [v if self._reads[v] > n else None for v, n in zip(outs, inside, strict=True)]
            if out in positions:
                rows[-1] = None  # the last carry
            if not any(rows):
                continue
            start = chain.calls[0].invars[positions[out]] if out in positions else None
            if isinstance(start, Var) and self._reads[start] > chain.calls[0].invars.count(start):
                yield _StackedResult(body.invars[positions[out]], [None, *rows[:-1]], start)
            else:
                yield _StackedResult(value, rows)

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
        for called in chain.calls:
            self._reads.subtract(v for v in called.invars if type(v) is not Literal)
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


# --- arguments ------------------------------------------------------------------------------------
# Stacked arguments in place of the rows that a program would stack itself.
#
# Of the arguments of one stack, the first is replaced by the stacked array, and the others are
# removed: a whole argument is omitted, a part of one is None, which JAX's trees skip. So
# `{"layer_0": {"w": f32[4]}, "layer_1": {"w": f32[4]}}` becomes
# `{"layer_0": {"w": f32[2,4]}, "layer_1": {"w": None}}`, whatever the classes of its nodes.
#
# A result, or a part of one, that has the tree of a changed argument is changed in the same way.

#: The stacked arrays of a program, each with its rows, as numbers of arguments.
Groups = dict[Var, list[int]]


def with_stacked_arguments(
    program: Program, stacks: Mapping[Var, Sequence[Atom]]
) -> Program | Programs:
    """Turn arrays that a program stacks from its arguments into arguments.

    Args:
        program: A program without dead code.
        stacks: The arrays, each with its rows.

    Returns:
        The new program and the functions that stack and unstack the arguments that change; the
        program itself if none does.

    Raises:
        UnsupportedError: If an argument is also used outside of its stack, or has a sharding.
    """
    numbers = {v: i for i, v in enumerate(program.jaxpr.invars)}
    computed = {v for eqn in program.jaxpr.eqns for v in eqn.outvars}
    groups = {
        array: [numbers[v] for v in rows if isinstance(v, Var)]
        for array, rows in stacks.items()
        if array in computed and all(isinstance(v, Var) and v in numbers for v in rows)
    }
    groups = {array: rows for array, rows in groups.items() if len(set(rows)) == len(rows)}
    if not groups:
        return program
    lifted = _lifted(program, groups)
    _check_unused(lifted, groups)
    first = {rows[0]: array for array, rows in groups.items()}
    removed = {i for rows in groups.values() for i in rows[1:]}
    free = [i not in removed for i in range(len(numbers))]
    invars = [first.get(i, v) for i, v in enumerate(lifted.jaxpr.invars[: len(numbers)])]
    arguments = _StackedArguments(program, groups, remaining(program, free))
    rolled = program.replace(
        jaxpr=jaxcompat.replace_jaxpr(lifted.jaxpr, invars=keep(invars, free)),
        in_tree=structure(arguments.after),
        arg_names=keep(program.arg_names, free),
    )
    rolled = _with_donations(program, rolled, groups)
    rolled = _with_stacked_results(rolled, arguments)
    return Programs({"rolled": rolled, "stack": arguments.stack(), "unstack": arguments.unstack()})


def _lifted(program: Program, groups: Groups) -> Program:
    """Return the program with the stacked arrays as additional arguments at the end."""
    jaxpr = program.jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if not any(v in groups for v in eqn.outvars)]
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, eqns=eqns, invars=[*jaxpr.invars, *groups])
    more = [program.arg_names[rows[0]] for rows in groups.values()]
    tree = structure((tuple(range(len(jaxpr.invars))), {}))
    names = (*program.arg_names, *more)
    return Dce()(program.replace(jaxpr=jaxpr, in_tree=tree, arg_names=names))


def _check_unused(program: Program, groups: Groups) -> None:
    """Raise UnsupportedError if a row of a stack is read, or has a sharding of its own."""
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    asked = program.jit.of_arguments(program.arguments) if program.jit is not None else ()
    for i in (i for rows in groups.values() for i in rows):
        name = program.arg_names[i]
        if asked and asked[i].placement is not None:
            raise UnsupportedError(f"roll: argument {name} has its own sharding or layout")
        if reader := _reader(jaxpr, jaxpr.invars[i]):
            raise UnsupportedError(
                f"roll: argument {name} is also used outside the repetition: it is {reader}",
                "roll(stack='inside') does not change the arguments",
            )


def _reader(jaxpr: Jaxpr, var: Var) -> str:
    """Return the first use of an argument, in words; empty if it is not used."""
    for eqn in jaxpr.eqns:
        if var in eqn.invars:
            return f"read by {named(eqn)}"
    return "a result" if var in jaxpr.outvars else ""


def _with_donations(before: Program, after: Program, groups: Groups) -> Program:
    """Return the program with stacked arguments donated if all their rows were."""
    if before.jit is None:
        return after
    asked = before.jit.of_arguments(before.arguments)
    more = tuple(
        ValueOptions(asked[rows[0]].name, array.aval.shape, array.aval.dtype, donated=True)
        for array, rows in groups.items()
        if all(asked[i].donated for i in rows)
    )
    return after.replace(jit=replace(before.jit, arguments=(*before.jit.arguments, *more)))


# --- the arguments that change ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _StackedArguments:
    """The arguments of a program before and after some of them are stacked.

    Attributes:
        program: The program before.
        groups: The stacked arrays.
        after: The positional and keyword arguments after, as numbers of flat ones before.
    """

    program: Program
    groups: Groups
    after: tuple[tuple[Any, ...], dict[str, Any]]

    @property
    def changed(self) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments that change, before stacking, as numbers."""
        args, kwargs = filled(self.program.in_tree, range(len(self.program.arg_names)))
        changes = self._changes
        return [v for v in args if changes(v)], {k: v for k, v in kwargs.items() if changes(v)}

    def _changes(self, value: object) -> bool:
        numbers = {i for rows in self.groups.values() for i in rows}
        return not numbers.isdisjoint(jax.tree.leaves(value))

    def _both(self) -> tuple[Any, Any]:
        """Return the changed arguments before and after: those of `stack` and of `unstack`."""
        args, kwargs = self.after
        changes = self._changes
        after = tuple(filter(changes, args)), {k: v for k, v in kwargs.items() if changes(v)}
        before = self.changed
        return (tuple(before[0]), before[1]), after

    def stack(self) -> Program:
        """Return the program that stacks arguments."""
        before, after = self._both()
        arrays = {rows[0]: rows for rows in self.groups.values()}

        def values(leaves: dict[int, Any], i: int) -> Any:
            return lax.stack([leaves[j] for j in arrays[i]]) if i in arrays else leaves[i]

        return self._traced("stack", before, after, values)

    def unstack(self) -> Program:
        """Return the inverse of the program `stack`."""
        before, after = self._both()
        row = {i: (rows[0], n) for rows in self.groups.values() for n, i in enumerate(rows)}

        def values(leaves: dict[int, Any], i: int) -> Any:
            if i not in row:
                return leaves[i]
            array, number = row[i]
            return lax.index_in_dim(leaves[array], number, keepdims=False)

        return self._traced("unstack", after, before, values)

    def _traced(
        self, name: str, taken: Any, returned: Any, value: Callable[[dict[int, Any], int], Any]
    ) -> Program:
        """Return a program from some arguments to others."""
        program, numbers = self.program, jax.tree.leaves(taken)
        stacked = {rows[0]: array.aval for array, rows in self.groups.items()}
        avals = (
            program.in_avals
            if name == "stack"
            else {**dict(enumerate(program.in_avals)), **stacked}
        )
        args, kwargs = returned
        result = (args, kwargs) if kwargs else args[0] if len(args) == 1 else args

        def fun(*args: Any, **kwargs: Any) -> Any:
            leaves = dict(zip(numbers, jax.tree.leaves((args, kwargs)), strict=True))
            return jax.tree.map(lambda i: value(leaves, i), result)

        return retraced(
            program.replace(name=f"{program.name}_{name}", jit=None),
            "roll",
            fun,
            in_tree=structure(taken),
            avals=[avals[i] for i in numbers],
            arg_names=[program.arg_names[i] for i in numbers],
        )


# --- results of the tree of an argument -------------------------------------------------------


def _with_stacked_results(program: Program, arguments: _StackedArguments) -> Program:
    """Return the program with results stacked where they have the tree of an argument."""
    jaxpr = program.jaxpr
    rows = KnownRows()
    for eqn in jaxpr.eqns:
        rows.record(eqn)
    outvars, removed = list(jaxpr.outvars), set[int]()
    writer = Writer(jaxpr, False, lambda eqn: eqn)
    for group in _result_groups(program, arguments):
        values = [jaxpr.outvars[i] for i in group]
        parts = rows.parts(values, lambda _: True)
        whole = whole_array(parts)
        outvars[group[0]] = whole or write_stack(writer, parts, jaxpr.eqns[-1])
        removed.update(group[1:])
    if not removed:
        return program
    free = [i not in removed for i in range(len(outvars))]
    out = filled(program.out_tree, [0 if flag else None for flag in free])
    new = jaxcompat.replace_jaxpr(
        jaxpr, eqns=[*jaxpr.eqns, *writer.eqns], outvars=keep(outvars, free)
    )
    names = keep(program.out_names, free)
    return Dce()(program.replace(jaxpr=new, out_tree=structure(out), out_names=names))


def _result_groups(program: Program, arguments: _StackedArguments) -> Iterator[list[int]]:
    """Yield each group of flat results that is stacked."""
    args, kwargs = arguments.changed
    positions: dict[PyTreeDef, list[list[int]]] = {}
    for value in (*args, *kwargs.values()):
        numbers, tree = jax.tree.flatten(value)
        within = [rows for rows in arguments.groups.values() if set(rows) <= set(numbers)]
        positions[tree] = [[i - numbers[0] for i in rows] for rows in within]

    def walk(tree: PyTreeDef, start: int) -> Iterator[list[int]]:
        if tree in positions:
            groups = [[start + i for i in rows] for rows in positions[tree]]
            if all(_one_type(program, rows) for rows in groups):
                yield from groups
            return
        for child in tree.children():
            yield from walk(child, start)
            start += child.num_leaves

    yield from walk(program.out_tree, 0)


def _one_type(program: Program, results: Sequence[int]) -> bool:
    avals = [program.out_avals[i] for i in results]
    return all(
        getattr(a, "shape", None) == avals[0].shape and a.dtype == avals[0].dtype for a in avals
    )


# --- units ----------------------------------------------------------------------------------------
# Replace an iteration of a loop by one call of a unit, which XLA compiles separately.
#
# XLA uses its fast convolutions for the CPU only at the top level of a module. A loop's body is not
# a module, but a unit that it calls is: without the unit, an iteration with a convolution is twenty
# times slower.


def as_unit(body: ClosedJaxpr, name: str, like: JaxprEqn) -> ClosedJaxpr:
    """Return a body that calls a unit with the computation of a body.

    Values that the body only forwards, which the unit would copy at every call, bypass it.

    Args:
        body: The body.
        name: The name of the unit. Units that call one another have different names.
        like: An equation, whose context and source location the call gets.
    """
    old = jaxcompat.open_jaxpr(body)
    invars = [Var(v.aval) for v in old.invars]
    atoms = dict(zip(old.invars, invars, strict=True))
    computed = dict.fromkeys(v for v in old.outvars if type(v) is not Literal and v not in atoms)
    atoms |= {v: Var(v.aval) for v in computed}
    debug = DebugInfo("jit", name, ("",) * len(invars), None)
    unit = jaxcompat.replace_jaxpr(body, outvars=list(computed), debug_info=debug)
    eqn = call(unit, invars, [atoms[v] for v in computed], like)
    eqn = eqn.replace(ctx=jaxcompat.marked(like.ctx, "unit", name), effects=unit.effects)
    outvars = substitute(old.outvars, atoms)
    return jaxcompat.new_jaxpr((), (), invars, outvars, [eqn], debug)


# --- roll -----------------------------------------------------------------------------------------

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

    stack: OneOf["inside", "arguments"] = "inside"

    def __post_init__(self) -> None:
        if self.stack not in _STACKS:
            raise PipelineError(
                f"option 'stack' of pass 'roll' must be 'inside' or 'arguments', not {self.stack!r}"
            )

    def __call__(self, program: Program) -> Program | Programs:
        slices = MovingSlices()
        moving = slices.made_dynamic(with_calls_inlined(program))
        outlined = with_calls(program.replace(jaxpr=moving), _COSTS, "plain")
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
