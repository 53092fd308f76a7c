"""Run two programs on the same inputs and compare all that they do.

Integers, booleans, keys, types, NaNs and infinities must be equal, floats and complex numbers by
the tolerance of their dtype. XLA rounds the bodies of loops and branches as a whole, and what it
rounds otherwise may grow: programs whose results differ are also run one equation at a time, and
that decides.

What a program does besides, through callbacks, is compared by what each of them is given, in
order. For that a program with such effects runs one equation at a time from the first. A callback
that gives nothing is not called; one that gives something is called for the program before, and
the program after is handed the same, so that a generator of data does not move on between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import checkify

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    CheckError,
    Details,
    JaxprToolError,
    UnsupportedError,
    described,
)
from jaxprtool.execute.nans.finite import finite_fill, nonfinite, unproven
from jaxprtool.execute.running.arguments import (
    at_one_size,
    fitting,
    flat_arguments,
    require_runnable,
)
from jaxprtool.execute.running.arrays import Difference, difference, values_agree
from jaxprtool.execute.running.fill import refitted
from jaxprtool.execute.running.run import failures_reported
from jaxprtool.execute.stepping.effects import Effects, Event, effects_differ
from jaxprtool.execute.stepping.execution_trace import ExecutionTrace, first_difference
from jaxprtool.execute.stepping.interpreter import SteppingInterpreter
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.evaluation.nonfinite import unchecked
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import with_contents
from jaxprtool.ir.rewriting.callbacks import is_check


def verify(before: Program, after: Program, args: object = None, *, seed: int = 0) -> None:
    """Raise CheckError unless both programs compute the same.

    `args` are the arguments of `before`, in order, as arrays or in any pytree; without them they
    are random values by type, drawn with `seed`. Symbols in types get the sizes that the arguments
    have; without arguments, small ones. Warns of a result that is not finite in most elements, of
    which little is proved. `after` may lack some of the arguments, which are told
    apart by name. The error says which result differs first; its `details`, which a traceback
    shows, say where and by how much, and name the first equation that computes something else.
    What Refs among the arguments hold afterwards is compared, too; the Refs that are given stay as
    they are.
    Raises ArgumentsError for arguments that do not fit, and UnsupportedError for a program that
    cannot run: one that has free named axes.
    """
    arguments = None if args is None else flat_arguments(before, args)
    if before.symbols or after.symbols:
        before, after = at_one_size(before, after, arguments)
    for program in (before, after):
        require_runnable(program)
    runs = random_runs(before, {}, seed) if arguments is None else Runs(before, arguments)
    for what in runs.compare(after).unproven():
        warnings.warn(f"{what}, {runs.inputs}: that both give the same proves little", stacklevel=2)


class Runs:
    """A program on fixed arguments, run when it is first compared; errors say what `inputs` are."""

    @jax.transfer_guard("allow")
    def __init__(
        self, program: Program, arguments: Sequence[object], inputs: str = "the values given"
    ):
        self.program, self.inputs = with_contents(program), inputs
        self._arguments = fitting(self.program, arguments)
        self._run: _Run | None = None

    @unchecked()
    @jax.transfer_guard("allow")
    def compare(
        self,
        after: Program,
        checks: bool = True,
        told: Callable[[str], object] = lambda doing: None,
    ) -> Runs:
        """Return the runs of `after` on the same arguments.

        Without `checks`, it need not check and print what this program does for debugging. `told`
        is told what is done. Raises
        CheckError, naming what differs first, if it does not do the same. A NaN is a value
        like others here, whatever JAX's switches say.
        """
        after = with_contents(after, self.program)
        _same_results_declared(self.program, after)
        runs = Runs(after, self._arguments_of(after), self.inputs)
        stepped = _has_effects(self.program) or _has_effects(after)
        if self._run is None or self._run.stepped != stepped:
            told("running what it was given")
            self._run = _run(self.program, self._arguments, stepped, ())
        old = self._run
        effects = [e for e in old.effects if checks or not is_check(e.eqn)]
        told("running what it made")
        try:
            new = runs._run = _run(after, runs._arguments, stepped, effects)
        except JaxprToolError as error:
            message = f"{after.name} cannot be run any more: {error.message}"
            raise CheckError(message, details=self._about()) from error
        fault = effects_differ(effects, new.effects)
        if fault is not None:
            message = f"{after.name} does something else: {fault}"
            raise CheckError(message, details=self._about(fault))
        fault = difference(old.values, new.values, values_agree, after.out_names)
        if fault is not None:
            told("looking for the first equation that differs")
        if fault is not None and (where := self._where_first(runs)) is not None:
            message = f"{after.name} computes something else: {fault}"
            raise CheckError(message, details=self._about(fault, where))
        return runs

    def unproven(self) -> list[str]:
        """Return what to say of each result of the last run that is not finite in most elements."""
        return unproven(self.program.out_names, self.results())

    def nonfinite(self) -> tuple[int, int]:
        """Return how many elements of the results are not finite, and how many there are."""
        values = self.results()
        return sum(map(nonfinite, values)), sum(getattr(x, "size", 0) for x in values)

    @unchecked()
    @jax.transfer_guard("allow")
    def results(self) -> list[Any]:
        """Return the results, of a run of its own if there was none."""
        if self._run is None:
            self._run = _run(self.program, self._arguments, _has_effects(self.program), ())
        return self._run.values

    def _about(self, fault: Difference | None = None, where: Details = ()) -> Details:
        """Return what else is known of a fault: where it is, and what the inputs are."""
        return [*(fault.details if fault else ()), *where, ("inputs", self.inputs)]

    def _arguments_of(self, after: Program) -> list[Any]:
        """Return the arguments of another program, which may have fewer."""
        known = dict(zip(self.program.arg_names, self._arguments, strict=True))
        if after.arg_names == self.program.arg_names:
            return self._arguments
        for name in after.arg_names:
            if name not in known:
                raise CheckError(f"{after.name} takes an argument '{name}' that was not there")
        return [known[name] for name in after.arg_names]

    def _where_first(self, after: Runs) -> Details | None:
        """Return which equations differ first; None if results agree when each runs by itself."""
        old = ExecutionTrace(self.program.jaxpr, self._arguments, Effects())
        new = ExecutionTrace(after.program.jaxpr, after._arguments, Effects(old.effects.events))
        pairs = zip(old.results, new.results, strict=True)
        wrong = [
            i for i, (a, b) in enumerate(pairs) if difference([a.data], [b.data], values_agree)
        ]
        return first_difference(old, new, wrong) if wrong else None


def random_runs(program: Program, given: Mapping[str, Any], seed: int = 0) -> Runs:
    """Return the runs of a program on given values by name, and random ones for the others.

    Random values are chosen so that results are finite, as far as they can be.
    """
    program = with_contents(program)
    values, _ = refitted(program, given)
    made: dict[int, Runs] = {}

    def run(arguments: Sequence[Any]) -> list[Any]:
        runs = made[id(arguments)] = Runs(program, arguments)
        return runs.results()

    filled = finite_fill(program, values, run, seed)
    runs = made[id(filled.arguments)]
    runs.inputs = filled.described(seed)
    return runs


def _same_results_declared(before: Program, after: Program) -> None:
    if before.out_names != after.out_names:
        names = (", ".join(p.out_names) or "nothing" for p in (before, after))
        raise CheckError("{} gives {} before, {} after".format(after.name, *names))
    pairs = zip(before.out_names, before.out_avals, after.out_avals, strict=True)
    for name, old, new in pairs:
        types = type_of(old, weak=True), type_of(new, weak=True)
        if types[0] != types[1]:
            raise CheckError("{} of {} is {} before, {} after".format(name, after.name, *types))


def _has_effects(program: Program) -> bool:
    return not all(map(jaxcompat.is_removable_effect, program.jaxpr.effects))


@dataclass
class _Run:
    """What a program gave and did, and whether it was run one equation at a time."""

    values: list[Any]
    effects: Sequence[Event]
    stepped: bool


def _run(
    program: Program, arguments: Sequence[Any], stepped: bool, earlier: Sequence[Event]
) -> _Run:
    steps = SteppingInterpreter(earlier)
    with failures_reported(program):
        try:
            if stepped:
                values = steps.run(program.jaxpr, arguments)
            else:
                values = jaxcompat.jaxpr_as_fun(program.jaxpr)(*arguments)
            return _Run(jax.block_until_ready(list(values)), steps.effects.events, stepped)
        except (jax.errors.JaxRuntimeError, checkify.JaxRuntimeError):
            raise  # told by `failures_reported`
        except Exception as error:  # whatever a primitive raises when it runs
            raise UnsupportedError(f"{program.name} cannot be run: {described(error)}") from error
