"""The checks of a reduction, which must also hold for a smaller program.

    crash                   compiling or running the program dies of a signal
    timeout SECONDS         compiling takes longer than this
    nan                     an equation makes a NaN from finite numbers, and it reaches a result
    mismatch -p PIPELINE    the passes change the results; with two -p, the two results differ
    mismatch --backends A,B the results differ between two backends
    error TEXT              compiling or running fails, and the message contains the text
    anything else           a shell command, with {} for the program's file or {mlir} for its
                            StableHLO, exits with 0

`crash`, `timeout` and `error` also take `-p PIPELINE`: passes to run on the program first.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias

import jax
import numpy as np

from jaxprtool import jaxcompat, processes
from jaxprtool.commands.compare.divergence import diverging_part
from jaxprtool.commands.nans.nans import find_nan, searched
from jaxprtool.commands.nans.values import NAN
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    UnsupportedError,
    UserFunctionError,
    described,
    did_you_mean,
)
from jaxprtool.execute.calls import ForkOutcome
from jaxprtool.execute.running import backends
from jaxprtool.execute.running.arrays import first_value_difference, random_argument
from jaxprtool.execute.running.rounding import Rounding, WideProgram, near, unexplained
from jaxprtool.execute.running.run import failures_reported
from jaxprtool.formats.emission import Emission, format_of
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.equations import is_flat
from jaxprtool.ir.evaluation import Interpreter, bind
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.regions import Cond, Scan, While, view
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn
from jaxprtool.passes import Pipeline, load_plugin
from jaxprtool.passes.reduction import with_body

#: The text of a program, and the values of its arguments.
Guess: TypeAlias = tuple[str, dict[str, Any]]

#: The known values of arguments, by name. Other arguments get random values.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """A check of programs, each in a separate process.

    `evidence` runs in that process, and `seen` and `same` judge its outcome in the process that
    searches.

    Attributes:
        given: The words after the name of the check.
        pipelines: The pipelines of its options `-p`.
        backends: The backends of its option `--backends`.
        seed: The seed of random values for arguments without a known value.
    """

    given: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    seed: int = 0

    #: Whether the check depends on values. Then variables that become arguments keep their values.
    reads_values: ClassVar[bool] = False
    #: Whether the check runs the program on random values for arguments without a known one.
    makes_values: ClassVar[bool] = False
    #: The syntax, for errors.
    usage: ClassVar[str] = ""
    #: The explanation when the check does not hold and the process has printed nothing.
    otherwise: ClassVar[str] = ""

    def validate(self) -> None:
        """Raise ArgumentsError if the words or options are not those of the check."""
        self._require(not self.given and len(self.pipelines) < 2)
        self._require(not self.backends)

    def _require(self, is_right: object) -> None:
        if not is_right:
            raise ArgumentsError(f"write the check as: {self.usage}")

    def evidence(self, program: Program, values: Values) -> Any:
        """Run the program, and return the fault found, or None. Called in a separate process."""
        raise NotImplementedError

    def guess(self, program: Program, values: Values) -> Guess | None:
        """Return a small program for which the check may hold. Called in a separate process."""
        return None

    def seen(self, outcome: ForkOutcome) -> Any:
        """Return the fault found by a try, or None if the check does not hold."""
        return outcome.value

    def same(self, seen: Any, first: Any) -> bool:
        """Return True if the fault of a candidate is that of the original program."""
        return seen is not None

    # --- common functions of checks -----------------------------------------------------------

    def arguments(self, program: Program, values: Values) -> list[Any]:
        """Return flat arguments for a program: the known values, and random ones for the rest."""
        arguments = []
        for i, name in enumerate(program.arg_names):
            value = values.get(name)
            arguments.append(random_argument(program, i, self.seed) if value is None else value)
        return [unpickled(value) for value in arguments]

    def prepared(self, program: Program) -> Program:
        """Return the program after the passes of `-p`."""
        return piped(program, self.pipelines[0]) if self.pipelines else program


def keep_kernels() -> None:
    """Share compiled kernels between tries, most of whose equations are the same."""
    jax.config.update("jax_compilation_cache_dir", os.environ[FOLDER])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def piped(program: Program, pipeline: str) -> Program:
    """Run a pipeline on a program. Raises UnsupportedError if it returns several programs."""
    result = Pipeline.parse(pipeline)(program) if pipeline else program
    if isinstance(result, Programs):
        raise UnsupportedError(f"{pipeline} returns several programs")
    return result


def compiled_function(program: Program, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Compile the flat function of a program."""
    fun = jaxcompat.jaxpr_as_fun(program.jaxpr)
    return jax.jit(fun, **program.jit_keywords).lower(*arguments).compile()


class CrashCheck(Check):
    """Compiling or running the program dies of the same signal as the original."""

    usage = "crash, or crash -p PIPELINE"
    otherwise = "it runs to completion"
    makes_values = True

    def evidence(self, program: Program, values: Values) -> Any:
        program = self.prepared(program)
        arguments = self.arguments(program, values)
        jax.block_until_ready(compiled_function(program, arguments)(*arguments))

    def seen(self, outcome: ForkOutcome) -> Any:
        return None if outcome.timed_out else outcome.signal or None

    def same(self, seen: Any, first: Any) -> bool:
        return bool(seen == first)


class TimeoutCheck(Check):
    """Compiling takes longer than the given number of seconds."""

    usage = "timeout SECONDS, or timeout SECONDS -p PIPELINE"
    otherwise = "it compiles within the limit"

    def validate(self) -> None:
        self._require(len(self.given) == 1 and len(self.pipelines) < 2 and not self.backends)
        try:
            self._require(float(self.given[0]) > 0)
        except ValueError:
            self._require(False)

    def evidence(self, program: Program, values: Values) -> Any:
        program = self.prepared(program)
        fun = jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr), **program.jit_keywords)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        lowered = fun.trace(*types).lower()
        # The default action of the signal kills the process even while it is inside XLA.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(self.given[0]))
        lowered.compile()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def seen(self, outcome: ForkOutcome) -> Any:
        return f"not compiled after {self.given[0]} s" if outcome.signal == "SIGALRM" else None


class NanCheck(Check):
    """The same equation makes a NaN from finite numbers, and it reaches a result or an error."""

    usage = "nan"
    otherwise = "no equation makes a NaN from finite values; see jaxprtool nans"
    reads_values = True

    def validate(self) -> None:
        self._require(not (self.given or self.pipelines or self.backends))

    def evidence(self, program: Program, values: Values) -> Any:
        keep_kernels()
        arguments = self.arguments(program, values)
        for name, value in zip(program.arg_names, arguments, strict=True):
            if not _is_finite(value):
                raise ArgumentsError(f"argument '{name}' is not finite; see jaxprtool nans")
        # Interpreting loops by iteration is slow, so first check whether there is a NaN at all.
        if not is_flat(jaxcompat.open_jaxpr(program.jaxpr)) and not _gives_nan(program, arguments):
            return None
        bad = find_nan(program, tuple(arguments)).found
        nans = [b for b in bad if b.kind == "NaN" and (b.reaches or b.raises) and b.primitive]
        places = [f"{b.primitive} {b.source}" for b in nans]
        return places or None

    def guess(self, program: Program, values: Values) -> Guess | None:
        keep_kernels()
        cone = _nan_cone(program, tuple(self.arguments(program, values)))
        if cone is None:
            return None
        return _guess(program, *cone)

    def same(self, seen: Any, first: Any) -> bool:
        return seen is not None and first[0] in seen


def _nan_cone(program: Program, args: object) -> tuple[ClosedJaxpr, list[Any]] | None:
    """Return a jaxpr of the equation that produces the first NaN that reaches a result.

    If it has infinite operands, the jaxpr includes the equations that produced these, back to
    finite values.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.

    Returns:
        A jaxpr of these equations with the finite values that they read as arguments, and these
        values. None if no equation produces a NaN that reaches a result.
    """
    from jaxprtool.commands.nans.compiled import cone_of

    with searched(program, args, None) as (_, origins, _):
        nans = [o for o in origins if o.state == NAN and (o.reached or o.raises)]
    if not nans or nans[0].step is None:
        return None
    return cone_of(nans[0].step, nans[0].operands)


def _guess(program: Program, body: ClosedJaxpr, operands: Sequence[Any]) -> Guess:
    """Return equations of a program as a guess, with the values of their operands."""
    names = [f"v{i}" for i in range(len(operands))]
    alone = with_body(program.replace(jit=None), body, names)
    by_name = dict(zip(names, map(picklable, operands), strict=True))
    return program_file_text(alone, callbacks="stub"), {
        name: by_name[name] for name in alone.arg_names
    }


class _ByEquation(Interpreter):
    """Runs equations one by one, as kernels that tries share, but loops and branches whole."""

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if isinstance(view(eqn), Scan | While | Cond):
            return bind(eqn, operands)
        return super().equation(eqn, operands)


class MismatchCheck(Check):
    """The results differ after passes, or on another backend, by more than the tolerance."""

    usage = "mismatch -p PIPELINE [-p PIPELINE], or mismatch --backends A,B"
    otherwise = "its results agree within tolerances"
    reads_values = True

    def validate(self) -> None:
        by_passes = 1 <= len(self.pipelines) <= 2 and not self.backends
        self._require(not self.given and (by_passes or len(self.backends) == 2))
        for name in self.backends:
            backends.device(name, 0)
        for pipeline in self.pipelines:
            Pipeline.parse(pipeline)

    def pair(self, program: Program) -> tuple[Program, Program]:
        """Return the two programs whose results should be equal."""
        pipelines = self.pipelines if len(self.pipelines) == 2 else ("", *self.pipelines)
        first, second = (piped(program, pipeline) for pipeline in pipelines)
        return first, second

    def evidence(self, program: Program, values: Values) -> Any:
        arguments = self.arguments(program, values)
        if self.backends:
            return _mismatch(
                (program, program),
                arguments,
                *(self._on(name, program, arguments) for name in self.backends),
            )
        try:
            before, after = self.pair(program)
            if before.arg_names != program.arg_names:
                by_name = dict(zip(program.arg_names, arguments, strict=True))
                arguments = [by_name[name] for name in before.arg_names]
        except (JaxprToolError, KeyError):
            return None
        keep_kernels()
        one, other = (_ByEquation().run(version.jaxpr, arguments) for version in (before, after))
        if first_value_difference(one, other, near) is None:
            return None
        if not is_flat(jaxcompat.open_jaxpr(before.jaxpr)):
            # XLA may round differently inside a loop: compare again, iteration by iteration.
            one, other = (
                Interpreter().run(version.jaxpr, arguments) for version in (before, after)
            )
        return _mismatch((before, after), arguments, one, other)

    def guess(self, program: Program, values: Values) -> Guess | None:
        """Return the equations that the passes rewrite, at the first value that differs."""
        if len(self.pipelines) != 1:
            return None
        keep_kernels()
        before, after = self.pair(program)
        if before.arg_names != program.arg_names or before.arg_names != after.arg_names:
            return None
        part = diverging_part((before, after), self.arguments(program, values))
        return None if part is None else _guess(program, *part)

    def _on(self, name: str, program: Program, arguments: Sequence[Any]) -> list[Any]:
        device = backends.device(name, 0)
        with jax.default_device(device):
            placed = [jax.device_put(value, device) for value in arguments]
            return [np.asarray(out) for out in compiled_function(program, placed)(*placed)]


def _mismatch(
    programs: tuple[Program, Program],
    arguments: Sequence[Any],
    values: Sequence[Any],
    others: Sequence[Any],
) -> str | None:
    """Return the first difference of results that rounding does not explain; None if none."""
    before, after = (Rounding(WideProgram(program), arguments) for program in programs)
    faults = unexplained(before, after, values, others, programs[0].out_names)
    return next(map(str, faults.values()), None)


class ErrorCheck(Check):
    """Rewriting, compiling or running fails with a message that contains the given text."""

    usage = "error TEXT, or error TEXT -p PIPELINE"
    otherwise = "it runs to completion, or fails with another message"
    makes_values = True

    def validate(self) -> None:
        self._require(len(self.pipelines) < 2 and not self.backends)

    def evidence(self, program: Program, values: Values) -> Any:
        try:
            program = self.prepared(program)
            arguments = self.arguments(program, values)
            jax.block_until_ready(compiled_function(program, arguments)(*arguments))
        except Exception as error:
            said = described(error)
            return said if " ".join(self.given) in said else None

    def same(self, seen: Any, first: Any) -> bool:
        if self.given:
            return seen is not None
        return seen is not None and seen.partition(":")[0] == first.partition(":")[0]


class CommandCheck(Check):
    """A shell command that is given the program's file exits with 0."""

    usage = "a command with {} for the program's file, or {mlir} for its StableHLO"

    def validate(self) -> None:
        if not _FILES.search(self.given[0]):
            name = self.given[0].split()[0] if self.given[0].split() else ""
            hint = did_you_mean(name, list(CHECKS))
            raise ArgumentsError(
                f"the check '{self.given[0]}' has no {{}} for the program's file", hint
            )

    def evidence(self, program: Program, values: Values) -> Any:
        start = os.path.join(os.environ[FOLDER], f"try-{os.getpid()}")
        paths = {suffix: f"{start}.{suffix or 'jaxpr'}" for suffix in _FILES.findall(self.given[0])}
        try:
            for path in paths.values():
                emission = Emission(*format_of(path), source=True, callbacks="stub")
                emission.write([(program.name, program)], path)
            command = _FILES.sub(lambda match: shlex.quote(paths[match[1]]), self.given[0])
            done = processes.run_process(["sh", "-c", command])
        finally:
            for path in paths.values():
                with suppress(FileNotFoundError):
                    os.unlink(path)
        print(done.stdout, done.stderr, "" if done.status == 0 else done, sep="\n", flush=True)
        return True if done.status == 0 else None


#: The files of the program in a command: `{}`, or one with a suffix.
_FILES = re.compile(r"(?<!\$)\{((?:mlir)?)\}")

#: The environment variable with the folder for the files of candidates.
FOLDER = "JAXPRTOOL_TRIES"

CHECKS: dict[str, type[Check]] = {
    "crash": CrashCheck,
    "timeout": TimeoutCheck,
    "nan": NanCheck,
    "mismatch": MismatchCheck,
    "error": ErrorCheck,
}


def parse_check(text: str, seed: int = 0) -> Check:
    """Parse a check, as `--check` takes it. Raises ArgumentsError if it is not valid."""
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise ArgumentsError(f"the check {text!r} cannot be read: {error}") from None
    if name not in CHECKS:
        check: Check = CommandCheck((text,), seed=seed)
    else:
        parser = _CheckParser(add_help=False, usage=CHECKS[name].usage)
        parser.add_argument("words", nargs="*")
        parser.add_argument("-p", "--passes", action="append", default=[])
        parser.add_argument("--backends", default="")
        parsed = parser.parse_intermixed_args(words)
        names = tuple(filter(None, parsed.backends.split(",")))
        check = CHECKS[name](tuple(parsed.words), tuple(parsed.passes), names, seed)
    check.validate()
    return check


class _CheckParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"write the check as: {self.usage}")


# --- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedKey:
    """A random key as plain numbers, which can be pickled.

    Attributes:
        implementation: The name of the key's implementation.
        data: The key data.
    """

    implementation: Any
    data: np.ndarray


def picklable(value: Any) -> Any:
    """Convert the value of an argument to one that can be pickled: a NumPy array or PackedKey."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return PackedKey(str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)))
    return np.asarray(value)


def unpickled(value: Any) -> Any:
    """Undo `picklable`."""
    if isinstance(value, PackedKey):
        return jax.random.wrap_key_data(value.data, impl=value.implementation)
    return value


def _is_finite(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, np.inexact):
        return True
    return bool(np.isfinite(np.asarray(value).astype(np.complex128)).all())


def _gives_nan(program: Program, arguments: Sequence[Any]) -> bool:
    """Return True if a result has a NaN or the program raises an error, maybe because of one."""
    try:
        with failures_reported(program):
            outs = jax.block_until_ready(compiled_function(program, arguments)(*arguments))
    except UserFunctionError:
        return True
    floats = [out for out in outs if jax.numpy.issubdtype(out.dtype, np.inexact)]
    return any(bool(jax.numpy.isnan(out).any()) for out in floats)


# --- calls ----------------------------------------------------------------------------------------
# Calls of checks that can be pickled and sent to another Python; programs go as text.

#: A function that can be pickled by its name.
_Function: TypeAlias = Callable[[Check, Program, Values], Any]


@dataclass(frozen=True)
class CheckCall:
    """A call `function(check, program, values)`.

    Attributes:
        function: A function that can be pickled by its name.
        check: The check.
        program: The program.
        values: The known values of its arguments, by name.
        plugins: Files or modules with passes, to load before the call in another Python.
    """

    function: _Function
    check: Check
    program: Program
    values: Values
    plugins: Sequence[str]

    def __call__(self) -> Any:
        return self.function(self.check, self.program, self.values)

    def __reduce__(self) -> Any:
        x64 = bool(jax.config.jax_enable_x64)
        program = program_file_text(self.program, callbacks="stub")
        values = dict(self.values)
        return _received, (self.function, self.check, program, values, self.plugins, x64)


def _received(
    function: _Function,
    check: Check,
    program: str,
    values: Values,
    plugins: Sequence[str],
    x64: bool,
) -> CheckCall:
    jax.config.update("jax_enable_x64", x64)
    for plugin in plugins:
        load_plugin(plugin)
    return CheckCall(function, check, parse_program(program, "a candidate"), values, plugins)
