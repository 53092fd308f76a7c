"""What is to be kept of a program while it is reduced: the checks that can be asked for by name.

    crash                   XLA, or what runs, dies of a signal
    timeout SECONDS         it takes longer than this to compile
    nan                     it gives a NaN of finite arguments, by the same equation
    mismatch -p PIPELINE    its results are others after these passes, or between two of them
    mismatch --backends A,B they are others on another backend
    error TEXT              it cannot be compiled, or run, and the message has this text
    anything else           a command of the shell, with {} for the program's file, exits with 0

`crash`, `timeout` and `error` take `-p PIPELINE` too: passes to run on the program first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias

import jax
import numpy as np

from jaxprtool import jaxcompat, processes
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    UnsupportedError,
    described,
    did_you_mean,
)
from jaxprtool.execute import backends
from jaxprtool.execute.compare.arrays import difference, values_agree
from jaxprtool.execute.fill import random_argument
from jaxprtool.execute.nans import find_nan, nan_maker
from jaxprtool.execute.tries import Tried
from jaxprtool.formats.jaxpr.write import text, write
from jaxprtool.ir.equations import is_flat
from jaxprtool.ir.interpret import Interpreter, bind
from jaxprtool.ir.program import Program, Programs
from jaxprtool.ir.structured import Cond, Scan, While, view
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.pipeline import Pipeline
from jaxprtool.passes.reduction.candidates import with_body

#: The text of a program, and the values of its arguments.
Guess: TypeAlias = tuple[str, dict[str, Any]]

#: The values of arguments by name; those that are not known are random.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """A check of programs, each in a process of its own.

    Attributes:
        given: The words after its name.
        pipelines: The pipelines of its options `-p`.
        backends: The backends of its option `--backends`.
        seed: Of random values for arguments that have none.
    """

    given: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    seed: int = 0

    #: Whether it depends on the values of arguments; else those that are cut off are random.
    reads_values: ClassVar[bool] = False
    #: Whether it runs the program, whatever the values of its arguments are.
    makes_values: ClassVar[bool] = False
    #: How it is written, for an error.
    usage: ClassVar[str] = ""
    #: What is said of a program for which it does not hold, if the program says nothing.
    otherwise: ClassVar[str] = ""

    def validate(self) -> None:
        """Raise ArgumentsError for words and options that it does not take."""
        self._require(not self.given and len(self.pipelines) < 2)
        self._require(not self.backends)

    def _require(self, is_right: object) -> None:
        if not is_right:
            raise ArgumentsError(f"the check is to be written: {self.usage}")

    def evidence(self, program: Program, values: Values) -> Any:
        """Run in a process of its own: return what there is to be seen; None for nothing."""
        raise NotImplementedError

    def guess(self, program: Program, values: Values) -> Guess | None:
        """Run in a process of its own: return a small program for which the check may hold."""
        return None

    def seen(self, tried: Tried) -> Any:
        """Return what is seen of a try; None if the check does not hold."""
        return tried.value

    def same(self, seen: Any, first: Any) -> bool:
        """Return whether what is seen is what was seen of the program as it was given."""
        return seen is not None

    # --- what checks share --------------------------------------------------------------------

    def arguments(self, program: Program, values: Values) -> list[Any]:
        """Return flat arguments of a program."""
        found = []
        for i, name in enumerate(program.arg_names):
            value = values.get(name)
            found.append(random_argument(program, i, self.seed) if value is None else value)
        return [unpacked(value) for value in found]

    def prepared(self, program: Program) -> Program:
        """Return the program after the passes of `-p`."""
        return piped(program, self.pipelines[0]) if self.pipelines else program


def keep_kernels() -> None:
    """Have all tries share what they compile: most equations of a try are those of the last."""
    jax.config.update("jax_compilation_cache_dir", os.environ[FOLDER])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def piped(program: Program, pipeline: str) -> Program:
    """Return what a pipeline makes of a program. Raises JaxprToolError if that is several."""
    result = Pipeline.parse(pipeline)(program) if pipeline else program
    if isinstance(result, Programs):
        raise UnsupportedError(f"{pipeline} makes several programs")
    return result


def compiled(program: Program, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Compile the flat function of a program."""
    fun = jaxcompat.jaxpr_as_fun(program.jaxpr)
    return jax.jit(fun, **program.jit_keywords).lower(*arguments).compile()


class Crash(Check):
    """XLA, or what runs, dies of a signal: the same as of the program as it was given."""

    usage = "crash, or crash -p PIPELINE"
    otherwise = "it runs to its end"
    makes_values = True

    def evidence(self, program: Program, values: Values) -> Any:
        program = self.prepared(program)
        arguments = self.arguments(program, values)
        jax.block_until_ready(compiled(program, arguments)(*arguments))

    def seen(self, tried: Tried) -> Any:
        return None if tried.timed_out else tried.signal or None

    def same(self, seen: Any, first: Any) -> bool:
        return bool(seen == first)


class Timeout(Check):
    """It takes longer than so many seconds to compile."""

    usage = "timeout SECONDS, or timeout SECONDS -p PIPELINE"
    otherwise = "it compiles in time"

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
        # The signal kills the process wherever it is then.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(self.given[0]))
        lowered.compile()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def seen(self, tried: Tried) -> Any:
        return f"not compiled after {self.given[0]} s" if tried.signal == "SIGALRM" else None


class Nan(Check):
    """It gives a NaN that the same equation makes, of arguments that are finite."""

    usage = "nan"
    otherwise = "it gives no NaN that an equation makes of finite numbers: see jaxprtool nans"
    reads_values = True

    def validate(self) -> None:
        self._require(not (self.given or self.pipelines or self.backends))

    def evidence(self, program: Program, values: Values) -> Any:
        keep_kernels()
        arguments = self.arguments(program, values)
        for name, value in zip(program.arg_names, arguments, strict=True):
            if not _is_finite(value):
                raise ArgumentsError(f"argument '{name}' is not finite: see jaxprtool nans")
        # To follow loops round by round takes several times as long as to run them.
        if not is_flat(jaxcompat.open_jaxpr(program.jaxpr)) and not _gives_nan(program, arguments):
            return None
        made = find_nan(program, tuple(arguments)).found
        found = [f"{b.primitive} {b.source}" for b in made if b.kind == "NaN" and b.reaches]
        return found or None

    def guess(self, program: Program, values: Values) -> Guess | None:
        keep_kernels()
        made = nan_maker(program, tuple(self.arguments(program, values)))
        if made is None:
            return None
        names = [f"v{i}" for i in range(len(made[1]))]
        alone = with_body(program.replace(jit=None), made[0], names)
        given = dict(zip(names, map(packed, made[1]), strict=True))
        return text(alone, callbacks="stub"), {name: given[name] for name in alone.arg_names}

    def same(self, seen: Any, first: Any) -> bool:
        return seen is not None and first[0] in seen


class _ByEquation(Interpreter):
    """Runs each equation as a kernel, which tries have in common, and loops and branches whole."""

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if isinstance(view(eqn), Scan | While | Cond):
            return bind(eqn, operands)
        return super().equation(eqn, operands)


class Mismatch(Check):
    """Its results are others after passes, or on another backend, beyond tolerance."""

    usage = "mismatch -p PIPELINE [-p PIPELINE], or mismatch --backends A,B"
    otherwise = "its results are the same, up to tolerances"
    reads_values = True

    def validate(self) -> None:
        by_passes = 1 <= len(self.pipelines) <= 2 and not self.backends
        self._require(not self.given and (by_passes or len(self.backends) == 2))
        for name in self.backends:
            backends.device(name, 0)
        for pipeline in self.pipelines:
            Pipeline.parse(pipeline)

    def pair(self, program: Program) -> tuple[Program, Program]:
        """Return the two programs that are to give the same."""
        pipelines = self.pipelines if len(self.pipelines) == 2 else ("", *self.pipelines)
        first, second = (piped(program, pipeline) for pipeline in pipelines)
        return first, second

    def evidence(self, program: Program, values: Values) -> Any:
        arguments = self.arguments(program, values)
        if self.backends:
            one, other = (self._on(name, program, arguments) for name in self.backends)
            fault = difference(one, other, values_agree, program.out_names)
            return None if fault is None else str(fault)
        try:
            before, after = self.pair(program)
            if before.arg_names != program.arg_names:
                known = dict(zip(program.arg_names, arguments, strict=True))
                arguments = [known[name] for name in before.arg_names]
        except (JaxprToolError, KeyError):
            return None
        keep_kernels()
        one, other = (_ByEquation().run(each.jaxpr, arguments) for each in (before, after))
        fault = difference(one, other, values_agree, before.out_names)
        if fault is not None and not is_flat(jaxcompat.open_jaxpr(before.jaxpr)):
            # XLA may round what is in a loop otherwise: round by round it does not.
            one, other = (Interpreter().run(each.jaxpr, arguments) for each in (before, after))
            fault = difference(one, other, values_agree, before.out_names)
        return None if fault is None else str(fault)

    def _on(self, name: str, program: Program, arguments: Sequence[Any]) -> list[Any]:
        device = backends.device(name, 0)
        with jax.default_device(device):
            placed = [jax.device_put(value, device) for value in arguments]
            return [np.asarray(out) for out in compiled(program, placed)(*placed)]


class Error(Check):
    """It cannot be rewritten, compiled or run, for a reason whose message has a text."""

    usage = "error TEXT, or error TEXT -p PIPELINE"
    otherwise = "it runs to its end, or fails with another message"
    makes_values = True

    def validate(self) -> None:
        self._require(len(self.pipelines) < 2 and not self.backends)

    def evidence(self, program: Program, values: Values) -> Any:
        try:
            program = self.prepared(program)
            arguments = self.arguments(program, values)
            jax.block_until_ready(compiled(program, arguments)(*arguments))
        except Exception as error:
            said = described(error)
            return said if " ".join(self.given) in said else None

    def same(self, seen: Any, first: Any) -> bool:
        if self.given:
            return seen is not None
        return seen is not None and seen.partition(":")[0] == first.partition(":")[0]


class Command(Check):
    """A command of the shell exits with 0, given the program's file."""

    usage = "a command with {} for the program's file"

    def validate(self) -> None:
        if "{}" not in self.given[0]:
            name = self.given[0].split()[0] if self.given[0].split() else ""
            hint = did_you_mean(name, list(CHECKS))
            raise ArgumentsError(f"the check '{self.given[0]}' has no {{}} for the file", hint)

    def evidence(self, program: Program, values: Values) -> Any:
        path = os.path.join(os.environ[FOLDER], f"try-{os.getpid()}.jaxpr")
        write(program, path, callbacks="stub")
        try:
            command = self.given[0].replace("{}", shlex.quote(path))
            done = processes.run(["sh", "-c", command])
        finally:
            os.unlink(path)
        print(done.stdout, done.stderr, "" if done.status == 0 else done, sep="\n", flush=True)
        return True if done.status == 0 else None


#: The environment variable with the folder for the files of candidates.
FOLDER = "JAXPRTOOL_TRIES"

CHECKS: dict[str, type[Check]] = {
    "crash": Crash,
    "timeout": Timeout,
    "nan": Nan,
    "mismatch": Mismatch,
    "error": Error,
}


def parse(text: str, seed: int = 0) -> Check:
    """Return the check that a text asks for. Raises ArgumentsError for one that is not right."""
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise ArgumentsError(f"the check {text!r} cannot be read: {error}") from None
    if name not in CHECKS:
        check: Check = Command((text,), seed=seed)
    else:
        parser = _Parser(add_help=False, usage=CHECKS[name].usage)
        parser.add_argument("words", nargs="*")
        parser.add_argument("-p", "--passes", action="append", default=[])
        parser.add_argument("--backends", default="")
        found = parser.parse_intermixed_args(words)
        names = tuple(filter(None, found.backends.split(",")))
        check = CHECKS[name](tuple(found.words), tuple(found.passes), names, seed)
    check.validate()
    return check


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"the check is to be written: {self.usage}")


# --- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedKey:
    """A random key as plain numbers, which can be sent to another process."""

    implementation: Any
    data: np.ndarray


def packed(value: Any) -> Any:
    """Return an array as one of NumPy's, and a key as its numbers."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return PackedKey(str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)))
    return np.asarray(value)


def unpacked(value: Any) -> Any:
    """Undo `packed`."""
    if isinstance(value, PackedKey):
        return jax.random.wrap_key_data(value.data, impl=value.implementation)
    return value


def _is_finite(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, np.inexact):
        return True
    return bool(np.isfinite(np.asarray(value).astype(np.complex128)).all())


def _gives_nan(program: Program, arguments: Sequence[Any]) -> bool:
    outs = compiled(program, arguments)(*arguments)
    floats = [out for out in outs if jax.numpy.issubdtype(out.dtype, np.inexact)]
    return any(bool(jax.numpy.isnan(out).any()) for out in floats)
