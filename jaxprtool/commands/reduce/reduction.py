"""Delta debugging: reduce a program to the smallest one for which a check still holds."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jaxprtool.commands.reduce import checks
from jaxprtool.commands.reduce.checks import (
    FOLDER,
    Check,
    CheckCall,
    MismatchCheck,
    NanCheck,
    PackedKey,
    TimeoutCheck,
    Values,
    keep_kernels,
    parse_check,
    picklable,
)
from jaxprtool.commands.reduce.kernels import ALL_STEPS, stays_valid
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.execute.calls import (
    ForkOutcome,
    Limits,
    call_each_in_fork,
    call_in_fork,
    python_process,
    report,
)
from jaxprtool.formats.jaxpr.read import parse_program, read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.documents import document
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import has_64_bit_types
from jaxprtool.ir.equivalence import Unkeyable, jaxpr_structure
from jaxprtool.ir.evaluation import Interpreter
from jaxprtool.ir.program import Program, require_program
from jaxprtool.jaxcompat import Var, open_jaxpr, replace_jaxpr
from jaxprtool.passes import load_plugin
from jaxprtool.passes.reduction import (
    Candidate,
    ReductionStep,
    can_be_argument,
    equations_left,
    flattened,
    is_well_typed,
)
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.reports import program_document

#: A callback for the line of progress.
_OnProgress = Callable[[str], object]


@document(
    without=("program", "values"),
    names={"is_smaller": "smaller", "program_document": "program"},
    also=("program_document",),
)
@dataclass(frozen=True)
class Reduction:
    """The result of a reduction.

    Attributes:
        program: The smallest program found.
        values: The values of its arguments that the check depends on, by name.
        equations_before: The number of equations of the original program, at every depth.
        equations_after: The number of equations of the smallest program.
        tries: The number of programs tried.
        seconds: The time of the search.
        seen: The fault that the check found in the original program: a signal, a message.
        is_smaller: Whether a smaller program was found.
        holds: Whether the check held again when the result was retried.
        interrupted: Whether the search was interrupted.
    """

    program: Program
    values: dict[str, Any]
    equations_before: int
    equations_after: int
    tries: int
    seconds: float
    seen: str = ""
    is_smaller: bool = True
    holds: bool = True
    interrupted: bool = False

    @property
    def program_document(self) -> documents.Program:
        """The smallest program found."""
        return program_document(self.program)


def reduce(
    program: Program,
    predicate: str | Callable[[Program], object],
    *,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    jobs: int = 2,
    seconds: float | None = None,
    memory: int | None = None,
    plugins: Sequence[str] = (),
    on_progress: _OnProgress = lambda doing: None,
) -> Reduction:
    """Reduce a program to a smaller one for which a predicate still holds.

    The result is a local minimum: no step of the reduction applies at any single site of it.

    Args:
        program: The program.
        predicate: A check in the syntax of `jaxprtool reduce --check`: "crash", "nan", "mismatch -p
            fold", …, or a shell command. Each try runs in a separate process. Or a function of a
            program, which is called in this process, and whose exceptions are not caught.
        values: Values of arguments by name. Arguments left out get random values.
        seed: The seed of random values.
        jobs: The number of tries that run in parallel.
        seconds: The time limit of a try. If None, three times that of the first try, and at least
            10.
        memory: The memory limit of a try, in bytes. If None, there is none.
        plugins: Files or modules with passes, for the pipelines of the check.
        on_progress: Called with each line of progress.

    Returns:
        The smallest program found; on Ctrl-C, the smallest so far.

    Raises:
        ArgumentsError: If the predicate does not hold for the program, or not when tried again.
        UnsupportedError: If the program cannot be written to a file.
    """
    require_program(program)
    start = time.monotonic()
    count = equations_left(program)
    argument_values = dict(values or {})
    if isinstance(predicate, str):
        packed = {name: checks.picklable(value) for name, value in argument_values.items()}
        search = partial(
            reduce_in_forks,
            check=predicate,
            values=packed,
            seed=seed,
            jobs=jobs,
            seconds=seconds,
            memory=memory,
            plugins=tuple(plugins),
            x64=bool(jax.config.jax_enable_x64),
        )
        reduction = _in_process(program, packed, search, on_progress)
    else:
        reduction = _here(program, argument_values, predicate, on_progress)
    return replace(reduction, equations_before=count, seconds=time.monotonic() - start)


def _here(
    program: Program,
    values: dict[str, Any],
    predicate: Callable[[Program], object],
    on_progress: _OnProgress,
) -> Reduction:
    """Reduce with a Python function as the predicate, called in this process."""
    oracle, state = CallingOracle(predicate), ReductionState(program, values)
    if not oracle.holds(state):
        raise ArgumentsError("the predicate is False for the original program")
    if not oracle.holds(state):
        raise ArgumentsError(
            "the predicate is not deterministic: it was False for the original program the "
            "second time"
        )
    best, interrupted = [state], False

    def on_improvement(state: ReductionState, doing: str) -> None:
        best[0] = state
        on_progress(_line(doing, equations_left(state.program), oracle.tries))

    try:
        best[0] = ReductionSearch(oracle, on_improvement).run(state)
    except KeyboardInterrupt:
        interrupted = True
    return _reduction(best[0].program, dict(best[0].values), program, oracle.tries, interrupted)


def _reduction(
    new: Program, values: dict[str, Any], old: Program, tries: int, interrupted: bool, **more: Any
) -> Reduction:
    counts = equations_left(old), equations_left(new)
    is_smaller = counts[1] < counts[0] or len(str(new.jaxpr)) < len(str(old.jaxpr))
    return Reduction(
        new, values, *counts, tries, 0.0, is_smaller=is_smaller, interrupted=interrupted, **more
    )


def _in_process(
    program: Program,
    values: dict[str, Any],
    search: Callable[[str], dict[str, Any]],
    on_progress: _OnProgress,
) -> Reduction:
    """Reduce in another process, which calls `search` with its folder."""
    last: dict[str, Any] = {"tries": 0, "seen": "", "holds": True, "values": values}
    environment, interrupted = {}, False
    if jax.config.jax_num_cpu_devices > 0:
        environment["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)

    def on_report(said: dict[str, Any]) -> None:
        last.update(said)
        if "doing" in said:
            on_progress(_line(said["doing"], said["equations"], said["tries"]))

    with python_process("the reduction failed", environment, on_report) as process:
        write(program, os.path.join(process.folder, ORIGINAL), callbacks="stub")
        try:
            last |= process.call(search, process.folder)
        except KeyboardInterrupt:
            interrupted = True
        best, path = program, os.path.join(process.folder, BEST)
        if os.path.exists(path):
            best = read(path)
    return _reduction(
        best,
        {n: checks.unpickled(v) for n, v in last["values"].items() if n in best.arg_names},
        program,
        last["tries"],
        interrupted,
        seen=last["seen"],
        holds=last["holds"],
    )


def _line(doing: str, equations: int, tries: int) -> str:
    return f"{doing} · {equations} equations · {tries} tries"


# --- script ---------------------------------------------------------------------------------------
# Write a reduced program as a standalone Python script that shows the fault with JAX alone.

_RUN = ["print(jax.block_until_ready(jax.jit({fun})(*arguments)))"]
_TIMEOUT = [
    "start = time.monotonic()",
    "jax.jit({fun}).lower(*arguments).compile()",
    'print(f"compiled in {{time.monotonic() - start:.1f}} s")',
]
_NAN = [
    "results = jax.jit({fun})(*arguments)",
    "print(results)",
    "nans = [bool(jnp.isnan(each).any()) for each in jax.tree.leaves(results)]",
    'raise SystemExit("the result has NaN" if any(nans) else 0)',
]
_MISMATCH = [
    "before = jax.jit({fun})(*arguments)",
    "after = jax.jit(rewritten())(*arguments)",
    'print("before", before)',
    'print("after ", after)',
    "for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):",
    "    np.testing.assert_allclose(one, other, rtol=1e-3)",
]
_BACKENDS = [
    "for name in {backends!r}:",
    "    with jax.default_device(jax.devices(name)[0]):",
    "        print(name, jax.jit({fun})(*arguments))",
]


def script(program: Program, check: Check, values: dict[str, Any]) -> str:
    """Return the source of a script that runs a program as a check does.

    Args:
        program: The program.
        check: The check that holds for it.
        values: The known values of its arguments, by name.

    Raises:
        UnsupportedError: If the program cannot be written as Python.
    """
    after = None
    if isinstance(check, MismatchCheck) and not check.backends:
        program, after = check.pair(program)
    elif check.pipelines:
        program = check.prepared(program)
    lines = _lines(check)
    text, fun = _module(program)
    parts = [_with_environment(text)]
    if after is not None:
        inner, name = _module(after)
        inside = textwrap.indent(f"{inner}\nreturn {name}\n", "    ")
        parts.append(f"\n\ndef rewritten():\n{inside}")
    body = [
        "import time\n" if isinstance(check, TimeoutCheck) else "",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from numpy import inf, nan\n",
    ]
    if has_64_bit_types(program.jaxpr):
        body.append('jax.config.update("jax_enable_x64", True)')
    arguments = ", ".join(map(_literal, check.arguments(program, values)))
    body.append(f"arguments = [{arguments}]")
    body += [line.format(fun=fun, backends=check.backends) for line in lines]
    main = textwrap.indent("\n".join(filter(None, body)), "    ")
    return "".join(parts) + f'\n\nif __name__ == "__main__":\n{main}\n'


def _lines(check: Check) -> Sequence[str]:
    match check:
        case TimeoutCheck():
            return _TIMEOUT
        case NanCheck():
            return _NAN
        case MismatchCheck():
            return _BACKENDS if check.backends else _MISMATCH
    return _RUN


def _module(program: Program) -> tuple[str, str]:
    """Return the source of a program as a module, and the name of its function."""
    text = to_python(program, callbacks="stub", source=False)
    match = re.match(r'"""`(\w+)`', text)
    assert match is not None
    return text, match[1]


def _with_environment(text: str) -> str:
    """Add to a module the environment variables that affect JAX, with their current values.

    These are XLA's flags and the number of CPU devices.
    """
    settings = {"XLA_FLAGS": os.environ.get("XLA_FLAGS")}
    if jax.config.jax_num_cpu_devices > 0:
        settings["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
    lines = [f"os.environ.setdefault({k!r}, {v!r})\n" for k, v in settings.items() if v]
    if not lines:
        return text
    docstring, end, module = text.partition('"""\n\n')
    return f"{docstring}{end}import os\n\n{''.join(lines)}\n{module}"


def _literal(value: Any) -> str:
    """Return a Python expression for the value of an argument; a constant array as `jnp.full`."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value)).tolist()
        words = f"jnp.array({data}, 'uint32')"
        return f"jax.random.wrap_key_data({words}, impl={str(jax.random.key_impl(value))!r})"
    array, dtype = np.asarray(value), value.dtype.name
    if array.size > 16 and (array == array.flat[0]).all():
        return f"jnp.full({array.shape}, {array.flat[0].item()!r}, {dtype!r})"
    return f"jnp.array({array.tolist()!r}, {dtype!r})"


# --- search ---------------------------------------------------------------------------------------
# The search of delta debugging: the smallest program for which a check still holds.
#
# Every step of `passes.reduction` is tried on many of its sites at once, then on half as many, and
# so on. In the first rounds, only large parts of the sites are tried, so that thousands of
# equations take tens of tries. The search ends when no step applies at any single site.

#: The maximum number of parts that sites are divided into, round by round; None for single sites.
_FINEST = (4, 16, 64, None)


@dataclass(frozen=True)
class ReductionState:
    """A program, and the known values of its arguments, by name."""

    program: Program
    values: Values = field(default_factory=dict)


class Oracle(Protocol):
    """The oracle of the search: it decides whether a check holds for a program."""

    #: The number of programs tried.
    tries: int
    #: Whether the check runs programs on random values for arguments without a known one.
    makes_values: bool

    def first(self, states: Iterator[ReductionState]) -> ReductionState | None:
        """Return the first state for which the check holds, or None."""

    def guess(self, state: ReductionState) -> ReductionState | None:
        """Return a small program for which the check may hold, or None."""

    def values_of(self, state: ReductionState) -> dict[Var, Any]:
        """Return the values of top-level variables; empty if the check does not depend on them."""


class ReductionSearch:
    """The reduction of one program.

    Args:
        oracle: The oracle.
        on_progress: Called with the smallest state so far and the name of the step, for progress.
    """

    def __init__(self, oracle: Oracle, on_progress: Callable[[ReductionState, str], object]):
        self._oracle, self._on_progress = oracle, on_progress
        self._values: tuple[Program | None, dict[Var, Any]] = (None, {})
        self.state: ReductionState

    def run(self, state: ReductionState) -> ReductionState:
        """Return the smallest state found.

        Steps need a program with flat pytrees. If the check does not hold for the flattened
        program, as with a pass that takes an argument by its path, the state itself is returned.
        """
        self.state = state
        flat = ReductionState(flattened(state.program), state.values)
        if self._oracle.first(iter((flat,))) is None:
            return state
        guess = self._oracle.guess(flat)
        self.state = self._oracle.first(iter((guess,))) or flat if guess else flat
        granularities = iter(_FINEST)
        finest: int | None = next(granularities)
        while True:
            while finest is not None and finest >= equations_left(self.state.program):
                finest = next(granularities)  # this many parts would be single sites
            previous = self.state
            for step in ALL_STEPS:
                self._step(step, finest)
            self._plainer_values()
            if self.state is previous:
                if finest is None:
                    self._fill()
                    return self.state
                finest = next(granularities)

    def _sites(self, step: ReductionStep) -> Sequence[Any]:
        program = self.state.program
        if step.most is not None and equations_left(program) > step.most:
            return ()
        return list(step.sites(program))

    def _step(self, step: ReductionStep, finest: int | None) -> None:
        """Take a step at as many sites as possible, in chunks that become half as large."""
        if step.keeps:
            self._keep_windows(step)
        sites = self._sites(step)
        size = 1 if step.alone else (len(sites) + 1) // 2 if step.keeps else len(sites)
        least = 1 if finest is None or step.alone else max(1, len(sites) // finest)
        take_chunks(
            lambda: self._sites(step),
            lambda chunks, sites: self._take(step, chunks, sites),
            size,
            least,
        )

    def _keep_windows(self, step: ReductionStep) -> None:
        """Keep only half of the sites, the first, last or middle, as long as the check holds."""
        while True:
            sites = self._sites(step)
            n = len(sites)
            bounds = [(0, n // 2), (n // 2, n), (n // 4, n - n // 4)]
            windows = [sites[a:b] for a, b in bounds if 0 < b - a < n]
            if self._take(step, windows, None) is None:
                return

    def _take(
        self, step: ReductionStep, choices: Sequence[Sequence[Any]], sites: Sequence[Any] | None
    ) -> int | None:
        """Move to the first candidate for which the check holds, and return its choice's number.

        Args:
            step: The step.
            choices: The sites of each candidate.
            sites: All sites. If given, and the step keeps sites, the choices are the sites to drop.
        """
        numbers: dict[int, int] = {}

        def states() -> Iterator[ReductionState]:
            for number, chosen in enumerate(choices):
                if step.keeps and sites is not None:
                    gone = set(map(id, chosen))
                    chosen = [site for site in sites if id(site) not in gone]
                new = self._candidate(step, chosen) if chosen else None
                if new is not None:
                    numbers[id(new)] = number
                    candidates.append(new)
                    yield new

        candidates: list[ReductionState] = []
        self._on_progress(self.state, step.name)
        found = self._oracle.first(states())
        if found is None:
            return None
        self.state = found
        self._on_progress(found, step.name)
        return numbers[id(found)]

    def _candidate(self, step: ReductionStep, chosen: Sequence[Any]) -> ReductionState | None:
        """Apply a step to the sites chosen; return the result if it and its kernels are valid."""
        program = self.state.program
        try:
            candidate = step.apply(program, chosen)
        except Exception:  # the step does not apply to these sites
            return None
        if candidate is None or not is_well_typed(candidate, program):
            return None
        if not stays_valid(candidate.program, program):
            return None
        return self._with_values(candidate)

    def _with_values(self, candidate: Candidate) -> ReductionState:
        """Return a candidate with the known values of its arguments, old and new."""
        known = self.state.values
        values = {n: known[n] for n in candidate.program.arg_names if n in known}
        if candidate.resize is not None:
            values = {n: candidate.resize(v) for n, v in values.items()}
        if candidate.origin is not None:
            if self._values[0] is not candidate.origin:
                origin = ReductionState(candidate.origin, known)
                self._values = candidate.origin, self._oracle.values_of(origin)
            cut = self._values[1]
            values |= {name: cut[v] for name, v in candidate.cut.items() if v in cut}
        return ReductionState(candidate.program, values)

    def _plainer_values(self) -> None:
        """Replace the known values of arguments by zeros, ones or rounded numbers."""
        for name in self.state.program.arg_names:
            value = self.state.values.get(name)
            if value is None or isinstance(value, PackedKey):
                continue
            old = self.state
            choices = [v for v in _plainer(value) if v.tobytes() != value.tobytes()]
            states = [ReductionState(old.program, {**old.values, name: v}) for v in choices]
            if found := self._oracle.first(iter(states)):
                self.state = found
                self._on_progress(found, "simplifying values")

    def _fill(self) -> None:
        """Set values that the check would draw at random to zeros or ones, for the script."""
        values = self.state.values
        avals = dict(zip(self.state.program.arg_names, self.state.program.in_avals, strict=True))
        unknown = {n: a for n, a in avals.items() if n not in values and not is_extended(a.dtype)}
        if not self._oracle.makes_values or not unknown:
            return
        plain = (
            {n: np.full(a.shape, number, a.dtype) for n, a in unknown.items()} for number in (0, 1)
        )
        states = [ReductionState(self.state.program, {**values, **new}) for new in plain]
        self.state = self._oracle.first(iter(states)) or self.state


def _plainer(value: np.ndarray) -> Iterator[np.ndarray]:
    """Yield simpler arrays of the same type, the simplest first."""
    for plain in (np.zeros_like(value), np.ones_like(value)):
        if plain.tobytes() == value.tobytes():
            return
        yield plain
    if value.dtype.kind in "fV":
        yield np.round(value.astype(np.float64), 1).astype(value.dtype)


# --- oracles --------------------------------------------------------------------------------------


class ForkingOracle:
    """Runs a check on each program in a forked process.

    Args:
        check: The check.
        jobs: The number of tries that run in parallel.
        limits: The limits of a try.
        plugins: Files or modules with passes.
    """

    def __init__(self, check: Check, jobs: int, limits: Limits, plugins: Sequence[str]):
        self._check, self._jobs, self._limits, self._plugins = check, jobs, limits, plugins
        self.tries, self._first, self.makes_values = 0, None, check.makes_values
        self._failed: set[Hashable] = set()

    def first_look(self, state: ReductionState, seconds: float | None) -> Any:
        """Try the original program twice, and return the fault that the check found.

        Args:
            state: The original program.
            seconds: The time limit of a try. If None, it is set by the time of the first.

        Raises:
            ArgumentsError: If the check does not hold for it both times.
        """
        one = self._call_in_fork(state)
        self._first = self._check.seen(one)
        if self._first is None:
            said = str(one) or self._check.otherwise
            raise ArgumentsError(
                "the check does not hold for the original program" + (f": {said}" if said else "")
            )
        if seconds is None:
            self._limits = Limits(max(10.0, 3 * one.seconds), self._limits.memory)
        other = self._call_in_fork(state)
        if not self._holds(other):
            said = str(other)
            raise ArgumentsError(
                "the check is not deterministic: it did not hold for the original program the "
                "second time" + (f": {said}" if said else "")
            )
        return self._first

    @property
    def _slow(self) -> Limits:
        """The limits of operations that take longer than a try."""
        return Limits(10 * self._limits.seconds, self._limits.memory)

    def _call(self, state: ReductionState, function: Callable[..., Any] | None = None) -> CheckCall:
        function = function or type(self._check).evidence
        return CheckCall(function, self._check, state.program, state.values, self._plugins)

    def _call_in_fork(self, state: ReductionState) -> ForkOutcome:
        self.tries += 1
        return call_in_fork(self._call(state), self._limits)

    def _holds(self, outcome: ForkOutcome) -> bool:
        seen = self._check.seen(outcome)
        return seen is not None and self._check.same(seen, self._first)

    def holds(self, state: ReductionState) -> bool:
        """Return True if the check holds for a program."""
        return self._holds(self._call_in_fork(state))

    def first(self, states: Iterator[ReductionState]) -> ReductionState | None:
        drawn: list[ReductionState] = []

        def functions() -> Iterator[Callable[[], Any]]:
            for state in states:
                if _key(state) not in self._failed:
                    drawn.append(state)
                    yield self._call(state)

        running = call_each_in_fork(functions(), self._jobs, self._limits)
        try:
            for number, outcome in running:
                self.tries += 1
                if self._holds(outcome):
                    return drawn[number]
                self._failed.add(_key(drawn[number]))
        finally:
            running.close()  # type: ignore[attr-defined]
        return None

    def guess(self, state: ReductionState) -> ReductionState | None:
        outcome = call_in_fork(self._call(state, type(self._check).guess), self._slow)
        if outcome.value is None:
            return None
        program, values = outcome.value
        return ReductionState(parse_program(program, "a guess"), values)

    def values_of(self, state: ReductionState) -> dict[Var, Any]:
        if not self._check.reads_values:
            return {}
        outcome = call_in_fork(self._call(state, _values_of_variables), self._slow)
        return dict(zip(_variables(state.program), outcome.value or (), strict=False))


def _variables(program: Program) -> list[Var]:
    jaxpr = open_jaxpr(program.jaxpr)
    variables = [v for eqn in jaxpr.eqns for v in eqn.outvars if can_be_argument(v)]
    return [*variables, *jaxpr.constvars]


def _values_of_variables(check: Check, program: Program, values: Values) -> list[Any]:
    keep_kernels()
    body = replace_jaxpr(program.jaxpr, outvars=_variables(program))
    results = Interpreter().run(body, check.arguments(program, values))
    return [picklable(value) for value in results]


def _key(state: ReductionState) -> Hashable:
    """Return a key, equal for states with the same jaxpr and values; unique if there is none."""
    values = [state.values.get(name) for name in state.program.arg_names]
    data = tuple(v.tobytes() if isinstance(v, np.ndarray) else v is None for v in values)
    try:
        return jaxpr_structure(state.program.jaxpr), data
    except (Unkeyable, TypeError):
        return object()


class CallingOracle:
    """Calls a predicate in this process, for one program after another."""

    makes_values = False

    def __init__(self, predicate: Callable[[Program], object]):
        self._predicate = predicate
        self.tries = 0

    def holds(self, state: ReductionState) -> bool:
        """Return True if the predicate holds for a program."""
        self.tries += 1
        return bool(self._predicate(state.program))

    def first(self, states: Iterable[ReductionState]) -> ReductionState | None:
        return next(filter(self.holds, states), None)

    def guess(self, state: ReductionState) -> ReductionState | None:
        return None

    def values_of(self, state: ReductionState) -> dict[Var, Any]:
        return {}


# --- chunks ---------------------------------------------------------------------------------------
# The loop of delta debugging: take steps on chunks of a list, which become half as large.

T = TypeVar("T")


def take_chunks(
    sites: Callable[[], Sequence[T]],
    take: Callable[[Sequence[Sequence[T]], Sequence[T]], int | None],
    size: int,
    least: int = 1,
) -> None:
    """Take a step on as many sites as possible, in chunks that become half as large.

    Args:
        sites: Returns the sites that are left; called again after each step taken.
        take: Takes a step on the first of some chunks where that is possible, and returns the
            number of this chunk, or None. It is also given all sites.
        size: The size of the first chunks.
        least: The size of the last.
    """
    left = sites()
    while size >= least and left:
        start = 0
        while start < len(left):
            starts = range(start, len(left), size)
            taken = take([left[i : i + size] for i in starts], left)
            if taken is None:
                break
            start = starts[taken]
            left = sites()
        size = min(size, len(left)) // 2


def minimal_subset(items: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a subset for which a condition holds, but not without any one of its items.

    Args:
        items: The items, for all of which the condition holds. Earlier ones are dropped first.
        holds: The condition on a subset.
    """
    kept = list(items)

    def take(chunks: Sequence[Sequence[T]], _: Sequence[T]) -> int | None:
        nonlocal kept
        for number, chunk in enumerate(chunks):
            rest = [item for item in kept if item not in chunk]
            if holds(rest):
                kept = rest
                return number
        return None

    size, previous = (len(kept) + 1) // 2, None
    while kept and kept != previous:
        previous = kept
        take_chunks(lambda: kept, take, size)
        size = 1
    return kept


# --- process --------------------------------------------------------------------------------------
# The search in a process that forks for every try. It never starts a backend of JAX, whose threads
# a fork would lack.

#: The files in its folder: the original program, and the smallest so far.
ORIGINAL, BEST = "original.jaxpr", "best.jaxpr"


def reduce_in_forks(
    folder: str,
    check: str,
    values: dict[str, Any],
    seed: int,
    jobs: int,
    seconds: float | None,
    memory: int | None,
    plugins: Sequence[str],
    x64: bool,
) -> dict[str, Any]:
    """Reduce the program in a folder. Reports progress and values, and returns the last of them.

    The other arguments are those of `reduce`, with packed values, and whether 64-bit types are
    enabled.
    """
    jax.config.update("jax_enable_x64", x64)
    os.environ[FOLDER] = folder
    best = ReductionState(read(os.path.join(folder, ORIGINAL)), values)

    def on_progress(state: ReductionState, doing: str) -> None:
        nonlocal best
        if state is not best:
            best = state
            write(state.program, os.path.join(folder, BEST), callbacks="stub")
            report({"values": dict(state.values)})
        equations = equations_left(state.program)
        report({"doing": doing, "equations": equations, "tries": oracle.tries})

    try:
        for plugin in plugins:
            load_plugin(plugin)
        limits = Limits(seconds or 600.0, memory)
        oracle = ForkingOracle(parse_check(check, seed), jobs, limits, plugins)
        on_progress(best, "trying the original program")
        seen = oracle.first_look(best, seconds)
        report({"seen": seen if isinstance(seen, str) else ""})
        state = ReductionSearch(oracle, on_progress).run(best)
        on_progress(state, "trying the result again")
        return {"holds": oracle.holds(state), "tries": oracle.tries}
    except JaxprToolError as error:
        raise ArgumentsError(error.message, error.hint) from error
