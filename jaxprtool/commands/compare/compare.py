"""`compare`: comparison of variants of a program on the same inputs.

    found = jaxprtool.compare(program, (params, batch), passes=["", "-O2"])
    found.within, found.variants[1].results[0].absolute

Variants are all combinations of programs, pipelines, precisions, backends, and compiled or
op-by-op execution. The first one is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxprtool.api.targets import RunInputs
from jaxprtool.commands.compare.divergence import (
    Comparison,
    Divergence,
    SmallestArgument,
    find_divergence,
    input_text,
    minimized,
    scaled,
)
from jaxprtool.commands.compare.requested import (
    Axes,
    Planned,
    inputs_from,
    pipelines_of,
    planned,
    programs_of,
    several,
)
from jaxprtool.commands.compare.variants import (
    Compared,
    IsolatedRunner,
    OnProgress,
    Runner,
    Tolerance,
    Variant,
    arguments_of,
    compared,
    positions_of,
)
from jaxprtool.commands.compare.verify import other_effects
from jaxprtool.commands.nans.nans import finite_fill
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.execute.running.arrays import FilledArguments, fill_arguments, with_wide_integers
from jaxprtool.execute.running.rounding import Rounding, WideProgram
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.documents import plural
from jaxprtool.ir.program import Program
from jaxprtool.passes import Pipeline
from jaxprtool.passes.cleanup.inline import Inline


def compare(
    programs: Program | Sequence[Program],
    args: object = None,
    *,
    passes: str | Pipeline | Sequence[str | Pipeline] = ("",),
    backends: str | Sequence[str | None] = (None,),
    precisions: str | Sequence[str | None] = (None,),
    op_by_op: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    bisect: bool = False,
    isolate: bool = False,
    trials: int = 1,
) -> Comparison:
    """Run variants on the same inputs, and compare their results with those of the first.

    Args:
        programs: A `Program`, or several.
        args: The arguments of the first, as a tuple, or as any pytree of the same leaves; None for
            random values.
        passes: Pipelines: `["", "-O2"]`.
        backends: Backends: `["cpu", "gpu"]`.
        precisions: Default precisions of matrix products and convolutions, as for
            `jax.default_matmul_precision`.
        op_by_op: Whether each variant also runs op by op, so that nothing is fused.
        rtol: The relative tolerance. By default, the errors that rounding explains are tolerated.
        atol: The absolute tolerance; if only one of the two is given, the other is 0.
        seed: The seed of random values.
        bisect: Whether to search for the pass and the equation at which variants diverge.
        isolate: Whether each variant runs in its own process, so that a compiler crash does not end
            this one. The search of `bisect` still runs in this process.
        trials: The number of random inputs to try. The first one for which a variant is not within
            tolerance is reduced as far as possible, and the result is for the reduced input.

    Raises:
        ArgumentsError: If there is only one variant, the arguments do not fit, the programs differ
            in argument or result types, a tolerance is negative, or `trials` is less than one.
        PipelineError: If a pipeline returns several programs.
        BackendError: If this machine lacks a backend.
    """
    traced = programs_of(programs)
    if trials < 1:
        raise ArgumentsError(f"trials must be at least 1, not {trials}")
    axes = Axes(pipelines_of(passes), several(backends), several(precisions), op_by_op)
    axes.require_backends()
    plan = planned([(program.name, program) for program in traced], axes)
    inputs, tolerance = inputs_from(traced, args), Tolerance(rtol, atol)
    return compare_planned(plan, inputs, tolerance, Checks(seed, trials, bisect, isolate))


@dataclass(frozen=True)
class Checks:
    """Options for running and comparing variants.

    Attributes:
        seed: The seed of random inputs.
        trials: The number of random inputs to try.
        bisect: Whether to search for where variants diverge.
        isolate: Whether each variant runs in its own process.
    """

    seed: int = 0
    trials: int = 1
    bisect: bool = False
    isolate: bool = False


def compare_planned(
    plan: Sequence[Planned],
    inputs: Callable[[Program], RunInputs],
    tolerance: Tolerance,
    checks: Checks,
    on_progress: OnProgress = lambda doing: None,
) -> Comparison:
    """Return the comparison of planned variants; `inputs` returns the inputs of a program."""
    if len(plan) < 2:
        raise ArgumentsError(
            "compare needs at least two variants",
            'add -p "" -p "-O2", --backends cpu,gpu, --op-by-op, or another TARGET',
        )
    start_backends()  # otherwise the failure of each variant would be a result
    run_inputs = inputs(plan[0].variant.program)
    filled = fill_arguments(run_inputs.program, run_inputs.values, checks.seed)
    shapes = [getattr(value, "shape", ()) for value in filled.arguments]
    variants = _Variants([entry.at(shapes) for entry in plan], tolerance, checks, on_progress)
    variants.require_same_types(filled.arguments)
    if filled.random:
        filled = variants.finite_inputs(run_inputs)
    text = filled.described(checks.seed)
    template = Comparison(run_inputs.program.name, plan[0].variant.name, text, filled.random, ())
    if checks.trials == 1:
        return variants.completed(template, filled.arguments)
    if not filled.random:
        message = f"several trials need random arguments, but {run_inputs.program.name} has none"
        raise ArgumentsError(message, "give some arguments by type alone: f32[8,3]")
    free = [name in filled.random for name in run_inputs.program.arg_names]
    for trial in range(checks.trials):
        on_progress(f"trial {trial + 1} of {checks.trials}")
        seed = checks.seed + trial
        drawn = fill_arguments(run_inputs.program, run_inputs.values, seed, filled.within)
        if trial and (wide := with_wide_integers(run_inputs.program, drawn, seed)):
            drawn = wide[trial % len(wide)]
        arguments = scaled(drawn.arguments, free, trial)
        tried = variants.completed(template, arguments, bisect=False)
        if not tried.within:
            return variants.smallest(tried, arguments, free, trial)
    return replace(tried, inputs=f"{checks.trials} random inputs; the last is shown")


class _Variants:
    """Variants that run on any inputs, each one compiled once."""

    def __init__(
        self, plan: Sequence[Planned], tolerance: Tolerance, checks: Checks, on_progress: OnProgress
    ) -> None:
        self._reference, *self._others = plan
        self._tolerance, self._checks, self._on_progress = tolerance, checks, on_progress
        if checks.isolate and checks.trials > 1:
            raise ArgumentsError(
                "--isolate cannot be combined with several trials, which run in one process"
            )
        runner = IsolatedRunner if checks.isolate else Runner
        self._wide = {entry.variant.name: WideProgram(entry.variant.program) for entry in plan}
        self._runners = {entry.variant.name: runner(entry.variant, on_progress) for entry in plan}

    def require_same_types(self, arguments: Sequence[Any]) -> None:
        """Raise ArgumentsError if argument or result types differ from the reference's."""
        for other in self._others:
            arguments_of(other.variant, self._reference.variant.program, arguments)

    def finite_inputs(self, inputs: RunInputs) -> FilledArguments:
        """Return inputs for which the reference's results are finite where possible."""
        run = self._runners[self._reference.variant.name]
        try:
            return finite_fill(inputs.program, inputs.values, run, self._checks.seed)
        except JaxprToolError:  # reported when `completed` runs it
            return fill_arguments(inputs.program, inputs.values, self._checks.seed)

    def completed(
        self, template: Comparison, arguments: Sequence[Any], bisect: bool = True
    ) -> Comparison:
        """Return a comparison with the variants' results and, if `bisect`, divergences."""
        first = self._reference.variant
        template = replace(template, arguments=tuple(arguments))
        try:
            results = self._runners[first.name](arguments)
        except JaxprToolError as error:
            return replace(template, error=error.message)
        variants = tuple(self._compared(other, results, arguments) for other in self._others)
        partings: tuple[Divergence, ...] = ()
        if bisect and self._checks.bisect:
            search = Bisection(
                self._reference, arguments, results, self._tolerance, self._on_progress
            )
            partings = tuple(
                search.within(other, done.values)
                if all(result.within for result in done.results)
                else search.of(other, done.values)
                for other, done in zip(self._others, variants, strict=True)
                if self._diverges(other, done)
            )
        return replace(template, variants=variants, partings=partings)

    def _diverges(self, planned: Planned, done: Compared) -> bool:
        """Return True if results are beyond tolerance, or only those of another program differ."""
        others = planned.target != self._reference.target
        agree = all(result.equal if others else result.within for result in done.results)
        return not (done.error or agree)

    def _compared(
        self, planned: Planned, results: Sequence[Any], arguments: Sequence[Any]
    ) -> Compared:
        variant = planned.variant
        values = arguments_of(variant, self._reference.variant.program, arguments)
        run = partial(self._runners[variant.name], values)
        roundings = (
            Rounding(self._wide[self._reference.variant.name], arguments),
            Rounding(self._wide[variant.name], values),
        )
        done = compared(variant, results, run, self._tolerance, roundings)
        if done.error:
            return done
        programs = self._reference.variant.program, variant.program
        checks = self._reference.keeps_checks and planned.keeps_checks
        try:
            return replace(
                done, effects=other_effects(programs, (arguments, values), roundings, checks)
            )
        except JaxprToolError as error:
            return replace(done, error=error.message)

    def smallest(
        self, tried: Comparison, arguments: Sequence[Any], free: Sequence[bool], trial: int
    ) -> Comparison:
        """Return the comparison on a reduced input for which the same variant fails."""
        bad = next((i for i, variant in enumerate(tried.variants) if not variant.within), None)

        def fails(values: Sequence[Any]) -> bool:
            if bad is None:
                return bool(self.completed(tried, values, bisect=False).error)
            try:
                results = self._runners[self._reference.variant.name](values)
            except JaxprToolError:
                return False
            return not self._compared(self._others[bad], results, values).within

        self._on_progress("looking for a smaller input")
        values, count = minimized(arguments, free, fails)
        names = self._reference.variant.program.arg_names
        text = (
            f"the input of trial {trial + 1} of {self._checks.trials}, minimized in "
            f"{plural(count, 'run')}"
        )
        said = [
            SmallestArgument(name, input_text(value))
            for name, value, is_free in zip(names, values, free, strict=True)
            if is_free
        ]
        reduced = replace(tried, inputs=text, smallest=tuple(said))
        return self.completed(reduced, values)


# --- bisect ---------------------------------------------------------------------------------------
# Bisection: the pass and the equation at which a variant diverges from the reference.
#
# If two variants of one function differ in backend, precision or compilation, this is first tested
# as the cause. Otherwise the programs between passes form a chain: from the result of the
# reference's passes back to the traced function, and from there to the result of the variant's
# passes. A binary search, as in LLVM's opt-bisect-limit, finds the first program with different
# results, which is compared equation by equation with its predecessor.

_INLINE = Inline(("jit", "closed_call", "custom_jvp", "custom_vjp", "custom_vmap"), force=True)


@dataclass(frozen=True, eq=False)
class _Link:
    """A program between passes, and the pass that produced it from its predecessor."""

    step: str
    variant: Variant


class Bisection:
    """The search for where variants diverge from a reference.

    Args:
        reference: The reference.
        arguments: Its arguments.
        results: Its results.
        tolerance: The tolerance.
        on_progress: Called with progress messages.
    """

    def __init__(
        self,
        reference: Planned,
        arguments: Sequence[Any],
        results: Sequence[Any],
        tolerance: Tolerance,
        on_progress: OnProgress,
    ):
        self._reference, self._arguments, self._results = reference, arguments, results
        self._tolerance, self._on_progress = tolerance, on_progress
        self._program = reference.variant.program

    def of(self, other: Planned, results: Sequence[Any]) -> Divergence:
        """Return where a variant with known results diverges."""
        first = self._reference
        if other.target != first.target:
            return self._divergence(first.variant, other.variant, (self._results, results))
        chain = self._chain(other)
        moved = chain[0].variant
        same_run = _how(first) == _how(other)
        if not same_run and (len(chain) == 1 or not self._agrees(moved)):
            result_pair = (self._results, results) if len(chain) == 1 else None
            divergence = self._divergence(first.variant, moved, result_pair)
            return replace(divergence, variant=other.variant.name)
        return self._by_passes(chain, other)

    def within(self, other: Planned, results: Sequence[Any]) -> Divergence:
        """Return where the bits of another program, with results within tolerance, first differ."""
        variants = self._reference.variant, other.variant
        return replace(self._divergence(*variants, (self._results, results), True), within=True)

    def _by_passes(self, chain: Sequence[_Link], other: Planned) -> Divergence:
        low, high = 0, len(chain) - 1
        while high - low > 1:
            middle = (low + high) // 2
            self._on_progress(f"pass {middle} of {len(chain) - 1}")
            if self._agrees(chain[middle].variant):
                low = middle
            else:
                high = middle
        divergence = self._divergence(chain[low].variant, chain[high].variant)
        if not divergence.found and low > 0:
            from_first = self._divergence(chain[0].variant, chain[high].variant)
            divergence = from_first if from_first.found else divergence
        return replace(
            divergence,
            reference=self._reference.variant.name,
            variant=other.variant.name,
            step=chain[high].step,
            place=high,
            passes=len(chain) - 1,
        )

    def _chain(self, other: Planned) -> list[_Link]:
        """Return the programs between the reference and a variant, run like the variant."""
        back, there = self._reference.states, other.states
        same = 0
        for (a, _), (b, _) in zip(back, there, strict=False):
            if a != b:
                break
            same += 1
        undone = [text for text, _ in back[same:]]
        links = [
            _Link(
                f"without {undone[i - same + 1]}" if i + 1 < len(back) else "",
                self._at(other, back[i][1]),
            )
            for i in range(len(back) - 1, same - 2, -1)
        ]
        links += [_Link(text, self._at(other, program)) for text, program in there[same:]]
        return list(self._kept(links))

    def _kept(self, links: Sequence[_Link]) -> Iterator[_Link]:
        """Yield the comparable programs; the passes of skipped ones are added to the next."""
        steps: list[str] = []
        for i, link in enumerate(links):
            steps.append(link.step)
            if i in (0, len(links) - 1) or self._fits(link.variant):
                redone = {f"without {step}" for step in steps}
                yield replace(link, step=", ".join(x for x in steps if x not in redone))
                steps = []

    def _at(self, other: Planned, program: Program) -> Variant:
        if program.symbols:
            program = program.at([getattr(value, "shape", ()) for value in self._arguments])
        return other.at_state(program)

    def _fits(self, variant: Variant) -> bool:
        """Return True if a program has the argument and result types of the reference."""
        try:
            arguments_of(variant, self._program, self._arguments)
        except (ArgumentsError, IndexError):
            return False
        return True

    def _agrees(self, variant: Variant) -> bool:
        """Return True if the results of a program equal the reference's within tolerance."""
        values = arguments_of(variant, self._program, self._arguments)
        runner = Runner(variant, self._on_progress)
        return compared(variant, self._results, lambda: runner(values), self._tolerance).within

    def _divergence(
        self,
        first: Variant,
        second: Variant,
        results: Any = None,
        exact: bool = False,
    ) -> Divergence:
        """Return the equation at which two variants diverge."""
        arguments = tuple(
            arguments_of(variant, self._program, self._arguments) for variant in (first, second)
        )
        places = [positions_of(variant.program, self._program) for variant in (first, second)]
        positions = [(places[0].index(p), j) for j, p in enumerate(places[1]) if p in places[0]]

        def searched(variants: tuple[Variant, Variant]) -> Divergence:
            values = arguments[0], arguments[1]
            return find_divergence(
                variants,
                values,
                results,
                self._tolerance,
                self._on_progress,
                positions,
                exact,
            )

        whole = searched((first, second))
        if first.program.jaxpr is second.program.jaxpr or not whole.at_call:
            return whole
        opened = searched((_opened(first), _opened(second)))
        if not opened.found:
            return whole
        # Equations inside a call lack the user's source line if JAX traced its function before.
        return opened if opened.source else replace(opened, source=whole.source, code=whole.code)


def _opened(variant: Variant) -> Variant:
    """Return a variant with inlined calls, since a pass may have inlined calls of the other one."""
    program = _INLINE(variant.program)
    assert isinstance(program, Program)
    return replace(variant, program=program)


def _how(planned: Planned) -> Any:
    """Return the backend, precision and compilation mode of a variant."""
    return planned.variant.platform, planned.variant.op_by_op, planned.precision
