"""Runs two programs on the same inputs and compares their results and effects.

Integers, booleans, keys, types, NaNs and infinities must be equal, floats and complex numbers up to
the errors that rounding explains (`execute.running.rounding`). XLA fuses the bodies of calls, loops
and branches, and differences in rounding may grow. So programs whose results differ are also run
one equation at a time, and that run decides. Most passes change no result there; only if one does
are the errors of rounding estimated, since this takes longer to compile.

Random integers are small indices. A program without effects is also run on negative and large
ones, unless it raises for them. There the results need not be finite.

Effects of callbacks are compared by their operands, in order. A program with such effects always
runs one equation at a time. A callback without results is not called. A callback with results is
called for the first program, and its results are reused for the second, so that a data generator
does not advance in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import checkify

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.nans import count_nonfinite, finite_fill, unproven
from jaxprtool.errors import (
    CheckError,
    Details,
    JaxprToolError,
    UnsupportedError,
    described,
)
from jaxprtool.execute.running.arrays import (
    Comparison,
    ValueDifference,
    first_value_difference,
    refitted,
    values_agree,
    with_wide_integers,
)
from jaxprtool.execute.running.rounding import (
    Rounding,
    WideProgram,
    explained,
    near,
    unexplained,
)
from jaxprtool.execute.running.run import (
    at_one_size,
    failures_reported,
    fitting,
    flat_arguments,
    has_effects,
    require_runnable,
)
from jaxprtool.execute.stepping import (
    Effects,
    EquationCall,
    ExecutionTrace,
    SteppingInterpreter,
    effects_differ,
    first_difference,
)
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.custom_rules import is_check
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.evaluation import Interpreter, checks_disabled
from jaxprtool.ir.meshes import spread
from jaxprtool.ir.program import Program, require_program
from jaxprtool.jaxcompat import JaxprEqn


def verify(before: Program, after: Program, args: object = None, *, seed: int = 0) -> None:
    """Raise CheckError unless two programs compute the same results and effects.

    The final values of Ref arguments are compared too; the given Refs are not modified. Warns about
    a result that is not finite in most elements, since this proves little.

    Args:
        before: The first program.
        after: The second program. It may lack some of the arguments, which are matched by name.
        args: The arguments of `before`, as a tuple, or as any pytree of the same leaves; None for
            random values. Symbols get the sizes of the arguments, or small sizes without arguments.
        seed: The seed of random values.

    Raises:
        CheckError: If the programs differ. The message names the first differing result. The
            `details`, shown in a traceback, have the position, the error, and the first equation
            that computes a different value.
        ArgumentsError: If the arguments do not fit.
        UnsupportedError: If a program has free named axes, and so cannot run.
        BackendError: If JAX cannot start.
    """
    require_program(before)
    require_program(after)
    arguments = None if args is None else flat_arguments(before, args)
    if before.symbols or after.symbols:
        before, after = at_one_size(before, after, arguments)
    for program in (before, after):
        require_runnable(program)
    runs = random_runs(before, {}, seed) if arguments is None else Runs(before, arguments)
    for what in runs.compare(after).unproven():
        warnings.warn(f"{what}, {runs.inputs}: equal results prove little", stacklevel=2)


class Runs:
    """A program on fixed arguments, run at the first comparison; `inputs` describes them.

    `others` are its runs on other integers, which `compare` compares too.

    Args:
        program: The program.
        arguments: The arguments.
        inputs: Their description.
        wide: The program in double precision, if there are runs on other arguments too.
        reference: The errors of the program from which passes made this one, if any.
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        program: Program,
        arguments: Sequence[object],
        inputs: str = "the given values",
        wide: WideProgram | None = None,
        reference: Rounding | None = None,
    ):
        start_backends()
        self.program, self.inputs = with_contents(program), inputs
        self._arguments = fitting(self.program, arguments)
        self._run: _VerifiedRun | None = None
        self.rounding = Rounding(wide or WideProgram(self.program), self._arguments, reference)
        self.others: Sequence[Runs] = ()

    @checks_disabled()
    @jax.transfer_guard("allow")
    def compare(
        self,
        after: Program,
        checks: bool = True,
        on_progress: Callable[[str], object] = lambda doing: None,
    ) -> Runs:
        """Return the runs of `after` on the same arguments.

        Without `checks`, its debug checks and prints may differ. `on_progress` is called with
        progress messages. Raises CheckError, which names the first difference. NaNs are compared
        like other values, whatever JAX's debug settings are.
        """
        after = with_contents(after, self.program)
        _same_results_declared(self.program, after)
        wide = WideProgram(after)
        runs = self._compared(after, wide, checks, on_progress)
        others = [other for other in self.others if other._succeeds()]
        runs.others = [other._compared(after, wide, checks, on_progress) for other in others]
        return runs

    def _compared(
        self, after: Program, wide: WideProgram, checks: bool, on_progress: Callable[[str], object]
    ) -> Runs:
        """Return the runs of another program on these arguments alone."""
        runs = Runs(after, self._arguments_of(after), self.inputs, wide, self.rounding)
        stepped = has_effects(self.program) or has_effects(after)
        if self._run is None or self._run.stepped != stepped:
            on_progress("running the program before the pass")
            self._run = _run(self.program, self._arguments, stepped, ())
        old = self._run
        effects = [e for e in old.effects if checks or not is_check(e.eqn)]
        on_progress("running the program after the pass")
        try:
            new = runs._run = _run(after, runs._arguments, stepped, effects)
        except JaxprToolError as error:
            message = f"{after.name} can no longer be run: {error.message}"
            raise CheckError(message, details=self._about()) from error
        agree = _operands_agree(self.rounding, runs.rounding, effects, new.effects)
        fault = effects_differ(effects, new.effects, agree)
        if fault is not None:
            message = f"{after.name} has different effects: {fault}"
            raise CheckError(message, details=self._about(fault))
        fault = self._fault(runs, old, new)
        if fault is not None:
            on_progress("looking for the first equation that differs")
        if fault is not None and (where := self._where_first(runs)) is not None:
            message = f"{after.name} computes something else: {fault}"
            raise CheckError(message, details=self._about(fault, where))
        return runs

    def unproven(self) -> list[str]:
        """Return a message for each result of the last run that is not finite in most elements."""
        return unproven(self.program.out_names, self.results())

    def nonfinite(self) -> tuple[int, int]:
        """Return the number of non-finite elements in the results, and the number of all."""
        values = self.results()
        return sum(map(count_nonfinite, values)), sum(getattr(x, "size", 0) for x in values)

    @checks_disabled()
    @jax.transfer_guard("allow")
    def results(self) -> list[Any]:
        """Return the results, after a run if there was none."""
        if self._run is None:
            self._run = _run(self.program, self._arguments, has_effects(self.program), ())
        return self._run.values

    def _succeeds(self) -> bool:
        """Return False if the program raises for these arguments."""
        try:
            self.results()
        except JaxprToolError:
            return False
        return True

    def _about(self, fault: ValueDifference | None = None, where: Details = ()) -> Details:
        """Return further details of a fault: its place and the inputs."""
        return [*(fault.details if fault else ()), *where, ("inputs", self.inputs)]

    def _arguments_of(self, after: Program) -> list[Any]:
        """Return the arguments for another program, which may have fewer."""
        by_name = dict(zip(self.program.arg_names, self._arguments, strict=True))
        if after.arg_names == self.program.arg_names:
            return self._arguments
        for name in after.arg_names:
            if name not in by_name:
                raise CheckError(
                    f"{after.name} takes an argument '{name}' that it did not take before"
                )
        return [by_name[name] for name in after.arg_names]

    def _fault(self, after: Runs, old: _VerifiedRun, new: _VerifiedRun) -> ValueDifference | None:
        """Return the first difference of results that rounding does not explain."""
        if first_value_difference(old.values, new.values, near) is None:
            return None
        if not old.stepped:
            one, other = (runs._by_equation() for runs in (self, after))
            if (
                one is not None
                and other is not None
                and first_value_difference(one, other, near) is None
            ):
                return None
        return next(iter(self._faults(after, old.values, new.values).values()), None)

    def _by_equation(self) -> list[Any] | None:
        """Return the results of single equations; None for many, or if one only runs compiled."""
        try:
            return _Single().run(self.program.jaxpr, spread(self.program, self._arguments))
        except Exception:  # primitives may raise anything when run
            return None

    def _faults(
        self, after: Runs, before_values: Sequence[Any], after_values: Sequence[Any]
    ) -> dict[int, ValueDifference]:
        """Return the differences of results that rounding does not explain, by position."""
        names = after.program.out_names
        return unexplained(self.rounding, after.rounding, before_values, after_values, names)

    def _where_first(self, after: Runs) -> Details | None:
        """Return the first differing equations; None if results agree when run one by one."""
        old = ExecutionTrace(self.program.jaxpr, self._arguments, Effects())
        new = ExecutionTrace(after.program.jaxpr, after._arguments, Effects(old.effects.events))
        pairs = [x.data for x in old.results], [x.data for x in new.results]
        wrong = list(self._faults(after, *pairs))
        return first_difference(old, new, wrong) if wrong else None


class _Single(Interpreter):
    """Runs equations one by one, up to a number that takes less time than an estimate of errors."""

    def __init__(self) -> None:
        self._left = 10_000

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        self._left -= 1
        if self._left < 0:
            raise UnsupportedError("too many equations")
        return super().equation(eqn, operands)


def random_runs(program: Program, by_name: Mapping[str, Any], seed: int = 0) -> Runs:
    """Return the runs of a program on given values by name and random values otherwise.

    Random values are chosen so that results are finite where possible.
    """
    program = with_contents(program)
    values, _ = refitted(program, by_name)
    runs_by_id: dict[int, Runs] = {}

    def run(arguments: Sequence[Any]) -> list[Any]:
        runs = runs_by_id[id(arguments)] = Runs(program, arguments)
        return runs.results()

    filled = finite_fill(program, values, run, seed)
    runs = runs_by_id[id(filled.arguments)]
    runs.inputs = filled.described(seed)
    if not has_effects(program):
        runs.others = [
            Runs(
                program,
                draw.arguments,
                f"{draw.described(seed)}, negative and large integers",
                runs.rounding.wide,
            )
            for draw in with_wide_integers(program, filled, seed)
        ]
    return runs


@checks_disabled()
@jax.transfer_guard("allow")
def other_effects(
    programs: tuple[Program, Program],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    roundings: tuple[Rounding, Rounding],
    checks: bool = True,
) -> str:
    """Return the first difference in the effects of two programs; "" if there is none.

    Both run one equation at a time. Without `checks`, debug checks and prints may differ.
    """
    if not any(map(has_effects, programs)):
        return ""
    old = _run(programs[0], arguments[0], True, ())
    effects = [e for e in old.effects if checks or not is_check(e.eqn)]
    new = _run(programs[1], arguments[1], True, effects)
    agree = _operands_agree(*roundings, effects, new.effects)
    return str(effects_differ(effects, new.effects, agree) or "")


def _operands_agree(
    before: Rounding,
    after: Rounding,
    effects: Sequence[EquationCall],
    others: Sequence[EquationCall],
) -> Callable[[int, int], Comparison]:
    """Return the function that returns the comparison of operands of effects.

    Operands of effects outside of loops and branches are compared like results. Operands that are
    close are the same at once, since estimating errors takes time.
    """

    @cache
    def places() -> list[dict[int, int]]:
        pairs = ((before, effects), (after, others))
        return [rounding.operand_places([e.eqn for e in events]) for rounding, events in pairs]

    def agree(number: int, i: int) -> Comparison:
        def compare(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            clear, tolerated = near(a, b)
            if clear.all():
                return clear, tolerated
            one, other = (table.get(number) for table in places())
            if one is None or other is None or "err_tree" in effects[number].eqn.params:
                return values_agree(a, b)
            return explained(before, after, (one + i, other + i), a, b)

        return compare

    return agree


def _same_results_declared(before: Program, after: Program) -> None:
    if before.out_names != after.out_names:
        names = (", ".join(p.out_names) or "nothing" for p in (before, after))
        raise CheckError("{} returns {} before, {} after".format(after.name, *names))
    pairs = zip(before.out_names, before.out_avals, after.out_avals, strict=True)
    for name, old, new in pairs:
        types = type_of(old, weak=True), type_of(new, weak=True)
        if types[0] != types[1]:
            raise CheckError("{} of {} is {} before, {} after".format(name, after.name, *types))


@dataclass
class _VerifiedRun:
    """Results and effects of a run, and whether it was done one equation at a time."""

    values: list[Any]
    effects: Sequence[EquationCall]
    stepped: bool


def _run(
    program: Program, arguments: Sequence[Any], stepped: bool, earlier: Sequence[EquationCall]
) -> _VerifiedRun:
    steps = SteppingInterpreter(earlier)
    arguments = spread(program, arguments)  # equations run without the `jax.jit` that shards them
    with failures_reported(program):
        try:
            if stepped:
                values = steps.run(program.jaxpr, arguments)
            else:
                values = jaxcompat.jaxpr_as_fun(program.jaxpr)(*arguments)
            return _VerifiedRun(jax.block_until_ready(list(values)), steps.effects.events, stepped)
        except (jax.errors.JaxRuntimeError, checkify.JaxRuntimeError):
            raise  # raised by `failures_reported`
        except Exception as error:  # primitives may raise anything when run
            raise UnsupportedError(f"{program.name} cannot be run: {described(error)}") from error
