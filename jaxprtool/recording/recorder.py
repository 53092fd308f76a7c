"""Write each compilation of this process to the folder of a run when it happens."""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, OutputError, UnsupportedError
from jaxprtool.files import file_written_whole
from jaxprtool.formats.jaxpr.write import OpaqueEquations, rendered
from jaxprtool.ir import source_text
from jaxprtool.ir.array_files import constants_file, write_npz
from jaxprtool.ir.custom_rules import with_closed_over
from jaxprtool.ir.documents import METHODS, as_json
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.meshes import is_over_devices
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import JitOptions, Program, with_lifted
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.trees import structure, unique
from jaxprtool.jaxcompat import open_jaxpr
from jaxprtool.jaxcompat.compile_hooks import (
    Around,
    CompileTimes,
    JitCall,
    Lowering,
    is_operation,
    observed,
    unobserved,
)
from jaxprtool.jaxcompat.source_locations import is_installed, is_users_file
from jaxprtool.recording import calls, describe, folder
from jaxprtool.recording.calls import CallClock, CountedCalls, Counters, KeptCalls
from jaxprtool.recording.describe import (
    CacheKey,
    FunctionObject,
    argument,
    cache_key_options,
    context,
    given_argument,
)
from jaxprtool.recording.folder import COUNTERS, KeptSources
from jaxprtool.recording.new_run import ProcessFolder
from jaxprtool.recording.settings import (
    SHORT,
    VARIABLE,
    Settings,
    SummaryRequest,
    summary_environment,
)
from jaxprtool.recording.values import ObjectNumbers, array_type_text

#: The functions that make loops and branches, by primitive, and parameters that are numbers.
_LOOPS = {"while": "jax.lax.while_loop", "scan": "jax.lax.scan", "cond": "jax.lax.cond"}
_LOOP_PARAMETERS = ("length", "reverse", "unroll")


@dataclass(frozen=True)
class _WrittenEvent:
    """A function or a program of which an event was written, with the number of the event."""

    number: int
    name: str


class Recorder:
    """Records this process: an observer of `compile_hooks`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._folder = ProcessFolder(settings.run, settings.start)
        self._sources = KeptSources(settings.run, time.time(), self._kept_source)
        self._sites = CallSites(self._seen)
        self._lock = threading.RLock()
        self._on = self._stopped = False
        self._failures: set[str] = set()
        self._constants: ConstantsStore | None = None
        self._counters: Counters | None = None
        self._clock: CallClock | None = None
        self._steps: ProfiledSteps | None = None
        self._waits: dict[FileLine, int | None] = {}
        self._next = 0
        self._numbers = ObjectNumbers()
        self._jits: dict[int, tuple[int, CallSite, int]] = {}
        self._made: Counter[FileLine] = Counter()
        self._names: dict[str, str] = {}
        self._origins: dict[str, set[FileLine]] = {}
        self._loops: Counter[str] = Counter()
        self._compilations: Counter[str] = Counter()
        self.equations = 0
        self._cleared = 0
        self._cleared_line = FileLine("", 0)
        self._fates = ArgumentFates(self._sites)
        self._reads = FiniteReads()

    @contextlib.contextmanager
    def recording(
        self, uncaught: Callable[[], BaseException | None] = lambda: None
    ) -> Iterator[None]:
        """Record what JAX compiles in a `with` block.

        Args:
            uncaught: Called at the end of a block that did not raise; returns the exception that
                ends the process, or None.
        """
        self._write({"event": "started", "time": time.time()})
        self._on = True
        try:
            with observed(self):
                yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(uncaught())

    def _end(self, error: BaseException | None) -> None:
        """Write the end of the process or the block, with the exception that ends it."""
        self._on = False
        if self._clock is not None:
            self._clock.stop()
        if self._steps is not None:
            self._steps.stop()
        self._write_fates()
        self._fates.stop()
        for event in self._reads.totals():
            self._write(event)
        self._write({"event": "ended", "time": time.time(), "error": _in_short(error)})
        self._stopped = True
        self._folder.close()

    @property
    def folder(self) -> str:
        """The folder of this process; "" as long as there is none."""
        return self._folder.path

    def fork(self) -> None:
        """Continue in a new folder: this process is a fork of the recorded one."""
        self._folder = ProcessFolder(self.settings.run, self.settings.start)
        self._lock = threading.RLock()
        self._constants = self._counters = self._clock = self._steps = None
        self._waits.clear()

    # --- sources -------------------------------------------------------------------------------

    def _seen(self, file: str) -> None:
        """Keep the text of a file of the user's when it is first seen, before it may be edited."""
        if self._stopped or not self.settings.programs:
            return
        try:
            self._sources.keep(file)
        except OutputError as error:
            self._stop(error)

    def _kept_source(self, file: str, digest: str) -> None:
        self._write({"event": "source", "file": file, "digest": digest})

    # --- the observer --------------------------------------------------------------------------

    def jit_made(self, fun: Any, jit: Any, made: Any) -> Around | None:
        if is_operation(fun):
            return None
        site = self._sites.here()
        number = id(jit)
        with self._lock:
            self._jits[number] = (len(self._made), site, self._made[site.user])
            self._made[site.user] += 1
        weakref.finalize(made, self._jits.pop, number, None).atexit = False
        if not (self.settings.calls or self.settings.keep or self.settings.profile):
            return None
        function = self._described(calls.behind_jit(fun), {})
        if not function.line.file or not is_users_file(function.line.file):
            return None
        return self._around(function)

    def describe(self, call: JitCall) -> CacheKey:
        return self._key(call, self._sites.here())

    def begins(self, phase: str, name: str) -> _WrittenEvent:
        written = _WrittenEvent(self._number(), name)
        self._write_phase(phase, written)
        return written

    def traced(self, begun: _WrittenEvent) -> None:
        self._write({"event": "traced", "id": begun.number})

    def compiling(self, lowered: _WrittenEvent) -> None:
        self._write_phase("compiling", lowered)

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def _write_phase(self, phase: str, written: _WrittenEvent) -> None:
        """Write that a phase begins, before a process may be killed in it."""
        user = self._sites.here().user
        about = {"name": written.name, "user": user, "time": time.time()}
        self._write({"event": phase, "id": written.number, **about})

    def lowered(self, lowering: Lowering) -> _WrittenEvent:
        site = self._sites.here()
        number = self._number() if lowering.begun is None else lowering.begun.number
        traced = lowering.call or lowering.origin
        event = {
            "event": "lowered",
            "id": number,
            "start": lowering.start if traced is None else traced.start,
            "trace": 0.0 if traced is None else traced.trace_seconds,
            "lower": lowering.seconds,
            "cpu": lowering.cpu + (0.0 if traced is None else traced.trace_cpu),
            "user": site.user,
            "library": site.library,
        }
        if lowering.error is not None:
            event["error"] = _in_short(lowering.error)
        with without_collector():  # JAX keeps millions of objects
            function = self._function(lowering)
            if _is_jax(lowering, function):
                event |= {"operation": lowering.name}
            else:
                event |= self._program(lowering, function, site)
            self._write(event)
        self._write_fates()
        return _WrittenEvent(number, str(event.get("program", lowering.name)))

    def compiled(self, lowered: _WrittenEvent, times: CompileTimes) -> None:
        event = {
            "event": "compiled",
            "id": lowered.number,
            "seconds": times.seconds,
            "cpu": times.cpu,
            "cached": times.cached,
        }
        if times.error is not None:
            event["error"] = _in_short(times.error)
        self._write(event)

    def cleared(self, fun: Any) -> None:
        self._cleared += 1
        self._cleared_line = self._sites.here().user

    def waited(self, array: jax.Array, value: Any, seconds: float) -> None:
        site = self._sites.here()
        line = site.user
        if not line.file:
            return  # a wait inside JAX, as for a callback
        for event in self._reads.read(site, array, value):
            self._write(event)
        if line not in self._waits:
            self._waits[line] = self._counter({"of": "to_host", "user": line})
        counter = self._waits[line]
        if counter is not None and self._counters is not None:
            self._counters.add(counter, seconds, array.nbytes)

    def failed(self, error: Exception) -> None:
        """Write an exception of the recorder, once for each kind. The script goes on."""
        text = _in_short(error)
        if text not in self._failures:
            self._failures.add(text)
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            at = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
            self._write({"event": "failed", "error": text, "at": at})

    # --- calls ---------------------------------------------------------------------------------

    def _around(self, function: _FunctionIdentity) -> Around:
        """Return a wrapper of the calls of a function, which is active during the recording."""
        call: Around | None = None

        def around(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal call
            if not self._on:
                return jitted(*args, **kwargs)
            if call is None:
                call = self._watched(function)
            return call(jitted, args, kwargs)

        return around

    def _watched(self, function: _FunctionIdentity) -> Around:
        """Return a wrapper that counts and keeps the calls of a function as the settings ask."""
        settings, name = self.settings, self._name(function)
        call: Around = _called
        if settings.calls:
            counter = self._counter({"of": "calls", "function": name})
            if counter is not None and self._counters is not None:
                if self._clock is None:
                    self._clock = CallClock(self._counters)
                call = CountedCalls(self._clock, counter)
        if last := dict(settings.keep).get(name):
            folder, limit = self._folder.path, settings.keep_bytes
            call = KeptCalls(call, folder, name, last, limit, settings.until, self._write)
        if settings.profile:
            if self._steps is None:
                steps = settings.profile
                self._steps = ProfiledSteps(self._folder.path, steps, self.failed)
            call = ProfiledCalls(call, name, self._steps)
        return call

    # --- programs ------------------------------------------------------------------------------

    def _function(self, lowering: Lowering) -> _FunctionIdentity:
        """Return the function that is lowered: the user's, inside the wrappers of libraries."""
        if lowering.call is None:
            line = self._origin(lowering)
            return _FunctionIdentity(lowering.name, line, f"{line} {lowering.name}")
        if is_operation(lowering.call.fun):
            info = _body(lowering).debug_info if _is_loop(lowering) else None
            line = FileLine("", 0) if info is None else _defined(info)
            return _FunctionIdentity(lowering.name, line, f"{line} {lowering.name}")
        return self._described(lowering.call.fun, lowering.call.statics)

    def _origin(self, lowering: Lowering) -> FileLine:
        """Return the line of the user's function that JAX has transformed.

        JAX names the function that was given to `jax.jit`, which may be a library's. Of a backward
        pass, which JAX lowers when the call has ended, the user's is that of the forward pass.
        """
        info, call = open_jaxpr(lowering.jaxpr).debug_info, lowering.origin
        if call is None:
            lines = self._origins.get(info.func_src_info, set())
            return next(iter(lines)) if len(lines) == 1 else _defined(info)
        line = self._described(call.fun, call.statics).line
        if not line.file:
            line = _defined(info)
        self._origins.setdefault(info.func_src_info, set()).add(line)
        return line

    def _described(self, fun: Any, statics: Mapping[str, Any]) -> _FunctionIdentity:
        about = describe.described_call(fun, None, (), statics, self._numbers).function
        return _FunctionIdentity(
            about.name, FileLine(about.file, about.line, about.name), about.code
        )

    def _program(
        self, lowering: Lowering, function: _FunctionIdentity, site: CallSite
    ) -> dict[str, Any]:
        """Write a program, and return the facts about it."""
        # Imported late: it takes long, and not every script has a program to write.

        call = lowering.call
        if call is None:
            key = self._key_without_call(lowering, site)
        elif is_operation(call.fun):
            key = self._key_of_loop(lowering, function, site)
        else:
            key = lowering.described or self._key(call, site)
        program = lowered_program(lowering, [leaf.path for leaf in key.arguments])
        if key.function.wrapper == "jax.pmap":  # JAX compiles it under another name
            program = program.replace(name=key.function.name)
        with self._lock:
            name = self._name(function)
            self._compilations[name] += 1
            count = self._compilations[name]
        stem = name if count == 1 else f"{name}@{count}"
        size = equation_count(program)
        self.equations += size
        event = {
            "function": name,
            "defined": function.line,
            "program": stem,
            "equations": size,
            "foreign": _is_foreign(program),
            "key": key.to_json(),
            "results": as_json(
                [
                    argument(path, aval)
                    for path, aval in zip(program.out_names, program.out_avals, strict=True)
                ]
            ),
        }
        if self.settings.programs:
            event |= self._written(program, f"{stem}.jaxpr")
            if call is not None and "file" in event and lowering.error is None:
                self._fates.watch(stem, program, call.flat, site.user)
        return event

    def _written(self, program: Program, file: str) -> dict[str, Any]:
        """Write a program to a file, and return the facts about the file."""
        try:
            if self._constants is None:
                limit = self.settings.constants
                self._constants = ConstantsStore(self._folder.path, limit, self._sources.keep)
            self._constants.write(program, file)
        except OutputError as error:
            self._stop(error)
        except JaxprToolError as error:
            return {"unwritten": str(error)}
        else:
            return {"file": file}
        return {}

    def _name(self, function: _FunctionIdentity) -> str:
        """Return the name of a function in the run: Python's, with a number if it is taken."""
        group = function.code
        if group not in self._names:
            plain = re.sub(r"[^\w.-]+", "_", function.name).strip("_.-") or "function"
            taken, name, number = set(self._names.values()), plain, 1
            while name in taken:
                number += 1
                name = f"{plain}-{number}"
            self._names[group] = name
        return self._names[group]

    def _key(self, call: JitCall, site: CallSite) -> CacheKey:
        _, jit_site, in_loop = self._jits.get(id(call.jit), (0, site, 0))
        about = describe.described_call(
            call.fun,
            call.in_tree,
            call.arg_names,
            call.statics,
            self._numbers,
            call.jit,
            _place(jit_site.user),
        )
        return CacheKey(
            function=about.function.object,
            structure=about.structure,
            arguments=tuple(
                map(given_argument, about.names, call.avals, call.flat, call.options.donated)
            ),
            statics=about.statics,
            options=cache_key_options(call.options),
            context=context(),
            cleared=self._cleared,
            cleared_line=_place(self._cleared_line),
            in_loop=in_loop,
            line=_place(site.user),
        )

    def _key_of_loop(
        self, lowering: Lowering, function: _FunctionIdentity, site: CallSite
    ) -> CacheKey:
        """Return the key of a loop that ran outside of `jit`.

        JAX knows only the jaxpr of its body. If the arguments, parameters and settings equal those
        of an earlier compilation, the body must be another function object.
        """
        [eqn] = open_jaxpr(lowering.jaxpr).eqns
        plain = {k: v for k, v in eqn.params.items() if type(v) in (bool, int)}
        statics = {k: repr(v) for k, v in plain.items() if k in _LOOP_PARAMETERS}
        key = replace(self._key_without_call(lowering, site), statics=statics)
        same = repr((function.code, key.arguments, statics, key.context, key.cleared))
        with self._lock:
            self._loops[same] += 1
            number = self._loops[same]
        name = eqn.primitive.name
        body = FunctionObject(number, 0, key.line, "function", {}, name, _LOOPS.get(name, name))
        return replace(key, function=body)

    def _key_without_call(self, lowering: Lowering, site: CallSite) -> CacheKey:
        """Return the key of a program that JAX derived, as the gradient of a jitted function."""
        program_names = open_jaxpr(lowering.jaxpr).debug_info.arg_names or ()
        avals = lowering.jaxpr.in_avals
        names = list(program_names) if len(program_names) == len(avals) else [""] * len(avals)
        named = [name or f"arg[{i}]" for i, name in enumerate(names)]
        return CacheKey(
            function=FunctionObject(0, 0, UNKNOWN, "function", {}, lowering.name),
            structure={},
            arguments=tuple(map(argument, named, avals)),
            statics={},
            options={},
            context=context(),
            cleared=self._cleared,
            cleared_line=_place(self._cleared_line),
            line=_place(site.user),
        )

    # --- writing -------------------------------------------------------------------------------

    def _write(self, event: dict[str, Any]) -> None:
        if self._stopped:
            return
        try:
            with self._lock:
                if not self._folder.path:
                    self._folder.start(_about())
            self._folder.append(event)
        except OSError as error:
            self._stop(OutputError(f"cannot write '{self.settings.run}': {error.strerror}"))
        except OutputError as error:
            self._stop(error)

    def _stop(self, error: OutputError) -> None:
        """Stop recording, with one line; the script goes on."""
        if not self._stopped:
            self._stopped = True
            print(f"jaxprtool: recording stopped: {error.message}", file=sys.stderr)

    def _write_fates(self) -> None:
        """Write what callers have done with arguments since the last time."""
        for program, fates in self._fates.taken().items():
            self._write({"event": "after_call", "program": program, "fates": fates})

    def _counter(self, about: dict[str, Any]) -> int | None:
        """Return a new counter, and write what it counts."""
        with self._lock:
            if self._counters is None:
                if not self._folder.path or self._stopped:
                    return None
                self._counters = Counters(self._folder.file(COUNTERS))
            counter = self._counters.new()
        if counter is not None:
            self._write({"event": "counter", "counter": counter, **about})
        return counter


def _called(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return jitted(*args, **kwargs)


@dataclass(frozen=True)
class _FunctionIdentity:
    """A function: its name, its line, and a text that identifies its code."""

    name: str
    line: FileLine
    code: str


def _is_loop(lowering: Lowering) -> bool:
    """Return True for a loop or a branch whose bodies are written by a user or a library."""
    eqns = open_jaxpr(lowering.jaxpr).eqns
    if len(eqns) != 1 or not bodies(eqns[0]):
        return False
    file = _defined(_body(lowering).debug_info).file
    return bool(file) and is_users_file(file)


def _body(lowering: Lowering) -> Any:
    """Return the body of a loop, or the first branch."""
    [eqn] = open_jaxpr(lowering.jaxpr).eqns
    return open_jaxpr(bodies(eqn)[0][1])


def _is_foreign(program: Program) -> bool:
    """Return True if another package than JAX defines a primitive of a program."""
    primitives = {eqn.primitive for eqn in equations(open_jaxpr(program.jaxpr))}
    return any(jaxcompat.defining_module(each) is not None for each in primitives)


def _defined(info: Any) -> FileLine:
    """Return the line at which the function of a jaxpr is defined, by its debug information."""
    return FileLine(info.func_filename or "", info.func_lineno or 0, info.func_name)


def _is_jax(lowering: Lowering, function: _FunctionIdentity) -> bool:
    """Return True for an operation or a function of JAX that is called outside of `jit`."""
    if lowering.call is not None and is_operation(lowering.call.fun):
        return not _is_loop(lowering)
    file = function.line.file
    return bool(file) and not is_users_file(file)


def _place(line: FileLine) -> Place:
    """Return a line for a key; paths are shortened when the run is read."""
    return Place(line.file, line.line, line.function, line.file)


def _about() -> dict[str, Any]:
    """Return the facts about this process."""
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "folder": _folder(),
        "start": time.time(),
        "jax": jax.__version__,
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _in_short(error: BaseException | None) -> str:
    """Return an exception in one line."""
    if error is None:
        return ""
    try:
        text = " ".join(str(error).split())
    except Exception:  # `__str__` of a user's exception may raise anything
        text = ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# --- programs -------------------------------------------------------------------------------------
# Make a Program from a lowering of JAX, and write it with its constants, shared and limited.

#: Constants of fewer bytes are part of a program's text, and are always written.
SMALL = 1024


def lowered_program(lowering: Lowering, arguments: Sequence[str]) -> Program:
    """Return the program that JAX lowers, with the trees of its call.

    Args:
        lowering: The lowering.
        arguments: The user's names of the flat arguments.
    """
    jaxpr = with_closed_over(jaxcompat.from_jax(lowering.jaxpr))
    in_avals, out_avals = jaxpr.in_avals, jaxpr.out_avals
    call = lowering.call
    if call is None:
        in_tree, out_tree = structure((tuple(in_avals), {})), structure(list(out_avals))
    else:
        in_tree, out_tree = call.in_tree, call.out_tree
    debug_info = jaxcompat.open_jaxpr(lowering.jaxpr).debug_info
    names = arguments if len(arguments) == len(in_avals) else debug_info.arg_names
    arg_names = _names(names, len(in_avals), "arg")
    results: Sequence[str | None] | None = debug_info.result_paths
    if call is not None and results is not None:
        results = calls.user_result_paths(call.fun, call.out_tree, [path or "" for path in results])
    out_names = _names(results, len(out_avals), "result")
    taken = list(zip(arg_names, in_avals, strict=True))
    options = None
    if call is not None:
        outputs = list(zip(out_names, out_avals, strict=True))
        options = JitOptions.from_traced(taken, outputs, call.options)
    placements = [_over_mesh(sharding) for sharding in lowering.in_shardings]
    if any(placements):
        # JAX compiles for the devices of arguments that lie on several devices.
        options = (options or JitOptions()).placing(taken, placements)
    return Program(
        name=lowering.name,
        jaxpr=jaxpr,
        in_tree=in_tree,
        out_tree=out_tree,
        arg_names=arg_names,
        out_names=out_names,
        jit=options,
        sharded=tuple(
            name
            for name, sharding in zip(arg_names, lowering.in_shardings, strict=True)
            if is_over_devices(sharding) and not isinstance(sharding, NamedSharding)
        ),
    )


def _over_mesh(sharding: Any) -> NamedSharding | None:
    """Return a sharding if it is over a mesh of several devices, else None."""
    is_known = isinstance(sharding, NamedSharding) and is_over_devices(sharding)
    return sharding if is_known else None


def _names(jax_names: Sequence[str | None] | None, count: int, root: str) -> tuple[str, ...]:
    """Return unique names for `count` values; `root[i]` for values that JAX has not named."""
    names = list(jax_names or ())
    if len(names) != count:
        names = [None] * count
    return unique([name or f"{root}[{i}]" for i, name in enumerate(names)])


def equation_count(program: Program) -> int:
    """Return the number of equations of a program, at all depths."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


class ConstantsStore:
    """Writes programs to a folder, and each set of large constants once.

    Args:
        folder: The folder.
        limit: The maximum size of all constants, in bytes. A program whose constants do not fit
            takes them as arguments `closed_over[i]`.
        digest_of: As for `rendered`.
    """

    def __init__(
        self,
        folder: str,
        limit: int,
        digest_of: Callable[[str], str] = source_text.source_digest,
    ) -> None:
        self._folder, self._left, self._digest_of = folder, limit, digest_of

    def write(self, program: Program, name: str) -> None:
        """Write a program to a file of this name.

        Raises:
            UnsupportedError: If the program cannot be written to a file.
            OutputError: If the file cannot be written.
        """
        if self._large(program) > self._left:
            program = with_constants_lifted(program)
        text, arrays = rendered(
            program,
            "constants",
            stubs=True,
            opaque=OpaqueEquations.foreign,
            digest_of=self._digest_of,
        )
        if arrays:
            path = os.path.join(self._folder, constants_file("constants", arrays))
            if not os.path.exists(path):
                with file_written_whole(path) as file:
                    write_npz(file, arrays)
                self._left -= sum(array.nbytes for array in arrays.values())
        with file_written_whole(os.path.join(self._folder, name)) as file:
            file.write(text.encode())

    def _large(self, program: Program) -> int:
        return sum(size for size in map(_bytes, program.jaxpr.consts) if size >= SMALL)


def with_constants_lifted(program: Program) -> Program:
    """Return a program that takes its large constants as arguments `closed_over[i]`."""
    jaxpr = program.jaxpr
    pairs = list(zip(jaxcompat.open_jaxpr(jaxpr).constvars, jaxpr.consts, strict=True))
    lifted = [var for var, value in pairs if _bytes(value) >= SMALL]
    kept = [(var, value) for var, value in pairs if _bytes(value) < SMALL]
    new = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=[var for var, _ in kept],
        consts=[value for _, value in kept],
        invars=[*jaxcompat.open_jaxpr(jaxpr).invars, *lifted],
    )
    return with_lifted(program, new, len(lifted))


def _bytes(value: Any) -> int:
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    return int(np.prod(shape, dtype=np.int64)) * getattr(dtype, "itemsize", 0)


# --- profiled steps -------------------------------------------------------------------------------
# Implement `--profile`: run JAX's profiler during the first steps of a script.
#
# A step is a call of the first function under `jax.jit` that is called three times; by then it is
# compiled. A step lasts until the next call, so that it includes what the script does in between.

#: The call of a function that begins the first step.
_FIRST = 3

#: The folder of the profile in that of a process.
FOLDER = "profile"


class ProfiledSteps:
    """Profiles the first steps of a process.

    Args:
        folder: The folder of the process.
        steps: The number of steps to profile.
        failed: Called with the error if nothing can be profiled.
    """

    def __init__(self, folder: str, steps: int, failed: Callable[[Exception], None]) -> None:
        self._folder, self._left, self._failed = os.path.join(folder, FOLDER), steps, failed
        self._counts: Counter[str] = Counter()
        self._function: str | None = None
        self._step: contextlib.AbstractContextManager[object] | None = None
        # Without this, programs from JAX's compilation cache may have lines of an earlier source.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)

    def called(self, function: str) -> None:
        """Note that a function is about to be called."""
        if self._function is None:
            self._counts[function] += 1
            if self._counts[function] == _FIRST:
                self._start(function)
        elif function == self._function and self._step is not None:
            self._left -= 1
            if self._left:
                self._step.__exit__(None, None, None)
                self._begin()
            else:
                self.stop()

    def stop(self) -> None:
        """End the last step, and write the profile."""
        if self._step is None:
            return
        from jaxprtool.execute.profile import MODULE, finish, live_modules

        with unobserved():
            finish()
        self._step.__exit__(None, None, None)
        self._step = None
        jax.profiler.stop_trace()
        # The profiler lacks the modules that come from JAX's compilation cache.
        for number, data in enumerate(live_modules()):
            with open(os.path.join(self._folder, f"{number}{MODULE}"), "wb") as file:
                file.write(data)

    def _start(self, function: str) -> None:
        from jaxprtool.execute.profile import finish, start  # most recordings profile nothing

        self._function = function
        with unobserved():
            finish()
        try:
            start(self._folder)
        except UnsupportedError as error:  # the script runs its own profiler
            self._failed(error)
        else:
            self._begin()

    def _begin(self) -> None:
        from jaxprtool.execute.profile import step

        self._step = step()
        self._step.__enter__()


class ProfiledCalls:
    """Reports each call of a function to the steps.

    Args:
        call: Calls the function.
        name: The name of the function in the run.
        steps: The steps of the process.
    """

    def __init__(self, call: Callable[..., Any], name: str, steps: ProfiledSteps) -> None:
        self._call, self._name, self._steps = call, name, steps

    def __call__(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._steps.called(self._name)
        return self._call(jitted, args, kwargs)


# --- call sites -----------------------------------------------------------------------------------
# Find the user's line that is running: the nearest frame of the user's code on the stack.


class FileLine(NamedTuple):
    """A line of a file, in a function. `file` is "" if no line is known."""

    file: str
    line: int
    function: str = ""


class CallSite(NamedTuple):
    """Where a call comes from.

    Attributes:
        user: The nearest line of the user's code, or of a library if there is none.
        library: The innermost line of a library called from there; without a file if there is none.
        instruction: The instruction of the user's line, which tells its calls apart.
    """

    user: FileLine
    library: FileLine
    instruction: int = 0


NOWHERE = FileLine("", 0)

#: The opcode PRECALL of Python 3.11, and its size with its cache.
_PRECALL, _PRECALL_BYTES = dis.opmap.get("PRECALL"), 4


class CallSites:
    """Reads sites from the running stack.

    The kind of each file is cached, so that reading a stack takes a few microseconds.

    Args:
        seen: Called with each file of the user's when it is first seen.
    """

    def __init__(self, seen: Callable[[str], None] = lambda file: None) -> None:
        self._kinds: dict[str, int] = {}
        self._seen = seen

    def here(self) -> CallSite:
        """Return the site of the caller."""
        frame: FrameType | None = sys._getframe(1)
        library = NOWHERE
        while frame is not None:
            file = frame.f_code.co_filename
            kind = self._kinds.get(file)
            if kind is None:
                kind = self._kinds[file] = _kind(file)
                if kind == 2:
                    self._seen(file)
            if kind == 2:
                return CallSite(_line(frame), library, _instruction(frame))
            if kind == 1 and not library.file:
                library = _line(frame)
            frame = frame.f_back
        return CallSite(library, NOWHERE)


def _line(frame: FrameType) -> FileLine:
    code = frame.f_code
    return FileLine(code.co_filename, frame.f_lineno, code.co_qualname)


def _instruction(frame: FrameType) -> int:
    """Return the offset of the instruction that a frame runs, in bytes."""
    # Python 3.11 runs a specialized call in the PRECALL before its CALL.
    is_precall = frame.f_code.co_code[frame.f_lasti] == _PRECALL
    return frame.f_lasti + _PRECALL_BYTES if is_precall else frame.f_lasti


def _kind(file: str) -> int:
    """Return 0 for a file of Python, JAX or this package, 1 for a library, 2 for the user."""
    if file.startswith("<frozen ") or not is_users_file(file):
        return 0
    return 1 if is_installed(file) else 2


# --- arguments after a call -----------------------------------------------------------------------
# Find out whether the caller of a function drops its arguments in the line of the call.
#
# In `state = step(state)`, the last reference to the old state goes away in this line, so that it
# could have been donated. Only the calls that compile are watched, by weak references: other calls
# do not pass through Python.

#: Programs whose watched arguments have fewer bytes in total are not watched.
_LEAST_WATCHED = 1 << 20


class ArgumentFates:
    """Watches arguments that have the type of a result, and notes where they are freed.

    Args:
        sites: Finds the line that is running.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._references = dict[int, weakref.ref[Any]]()  # by identity: arrays have no hash
        # A reference may die in the garbage collector, which may run in any function: while this
        # list is appended to, no lock is needed, as there would be to write an event.
        self._freed: list[tuple[str, str, bool]] = []

    def watch(self, program_name: str, program: Program, flat: Sequence[Any], at: FileLine) -> None:
        """Watch the arguments of a call at a line, which has lowered a program."""
        if len(flat) != len(program.arg_names):
            return
        kinds = {(aval.shape, aval.dtype) for aval in program.out_avals if hasattr(aval, "dtype")}
        watched = [
            (name, leaf)
            for name, leaf in zip(program.arg_names, flat, strict=True)
            if isinstance(leaf, jax.Array) and (leaf.shape, leaf.dtype) in kinds
        ]
        if sum(leaf.nbytes for _, leaf in watched) < _LEAST_WATCHED:
            return
        given = Counter(map(id, flat))
        for name, leaf in watched:
            if given[id(leaf)] > 1:  # the call reads it as another argument: XLA cannot donate it
                self._freed.append((program_name, name, False))
                continue
            reference = weakref.ref(leaf, self._note(program_name, name, at))
            self._references[id(reference)] = reference

    def _note(self, program: str, name: str, at: FileLine) -> Callable[[weakref.ref[Any]], None]:
        def freed(reference: weakref.ref[Any]) -> None:
            self._references.pop(id(reference), None)
            self._freed.append((program, name, self._sites.here().user == at))

        return freed

    def stop(self) -> None:
        """Watch no longer: at the end of the process, arguments are freed without a line."""
        self._references.clear()

    def taken(self) -> dict[str, dict[str, str]]:
        """Return what callers did with arguments, by program and name, once."""
        freed, self._freed = self._freed, []
        fates: dict[str, dict[str, str]] = {}
        for program, name, is_dropped in freed:
            fates.setdefault(program, {})[name] = "dropped" if is_dropped else "kept"
        return fates


# --- values that the script reads -----------------------------------------------------------------
# Look for NaN and infinities in the values that the script reads, such as a loss that it prints.
#
# A value is on the host when it is read, so that a look at it costs a microsecond. One that the
# script has read already is not seen again.

#: Larger arrays are not looked at, in elements. Infinities count only in single numbers, since
#: arrays such as masks have them on purpose.
_MOST_READ = 1 << 18

#: The kinds of dtypes of floats: "V" is that of the small floats of ML.
_FLOATS = "fcV"


@dataclass(slots=True)
class _ReadsOfCall:
    """The values that one call of a line has read.

    Attributes:
        count: Their number.
        bad: The number of those that are not finite.
    """

    count: int = 0
    bad: int = 0


class FiniteReads:
    """Counts the values that are read, and those that are not finite."""

    def __init__(self) -> None:
        self._calls: dict[tuple[FileLine, int], _ReadsOfCall] = {}

    def read(self, site: CallSite, array: jax.Array, value: Any) -> Iterator[dict[str, Any]]:
        """Yield an event for the first value of a call that is not finite."""
        if array.dtype.kind not in _FLOATS or getattr(value, "size", 1) > _MOST_READ:
            return
        place = site.user, site.instruction
        reads = self._calls.get(place)
        if reads is None:
            reads = self._calls[place] = _ReadsOfCall()
        reads.count += 1
        try:
            is_nan, is_bad = False, not np.isfinite(value).all()
            if is_bad:
                is_nan = bool(np.isnan(value).any())
                is_bad = is_nan or array.size == 1
        except TypeError:  # a dtype that NumPy cannot check
            return
        if is_bad:
            reads.bad += 1
            if reads.bad == 1:
                yield {
                    "event": "not_finite",
                    "user": site.user,
                    "instruction": site.instruction,
                    "read": reads.count,
                    "is_nan": is_nan,
                    "type": array_type_text(array),
                }

    def totals(self) -> Iterator[dict[str, Any]]:
        """Yield an event for each call that has read a value that is not finite."""
        for (line, instruction), reads in self._calls.items():
            if reads.bad:
                yield {
                    "event": "reads",
                    "user": line,
                    "instruction": instruction,
                    "count": reads.count,
                    "bad": reads.bad,
                }


# --- process --------------------------------------------------------------------------------------
# Start recording in a Python process, as soon as it has imported JAX, and summarize it at its end.
#
# `launch` starts the process with the folder `site` on PYTHONPATH, whose `sitecustomize` calls
# `begin` after the import of JAX.
#
# `record` prints a summary and writes a page, both of which need JAX, whose import takes longer
# than a short script. So the process of a short script makes both when it ends, for the exit code
# that Python gives it, and `record` takes them if it ended so. Where that could disturb the
# process, or would show something else than `record` does, `record` imports JAX.

#: The maximum number of equations of all programs that a process summarizes.
_MOST_EQUATIONS = 5000


def begin() -> None:
    """Record this process until its end."""
    settings = Settings.from_json(os.environ[VARIABLE])
    recorder = Recorder(settings)
    stack = contextlib.ExitStack()
    stack.enter_context(recorder.recording(uncaught))
    atexit.register(_ends, recorder, stack, dict(jax.config.values))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder.fork)


def _ends(recorder: Recorder, stack: contextlib.ExitStack, config: Mapping[str, Any]) -> None:
    """Write the end of the process, and summarize the run if it is short."""
    code = 0 if uncaught() is None else 1
    stack.close()
    request = recorder.settings.summary
    if request is None or not _may_summarize(recorder, request, config):
        return
    with contextlib.suppress(Exception):  # Python flushes again, and reports the fault
        sys.stdout.flush()
    with contextlib.suppress(BaseException):  # a fault is not the script's: `record` summarizes
        METHODS["summarize_run"](recorder.settings, request, code, recorder.folder)


def _may_summarize(recorder: Recorder, request: SummaryRequest, config: Mapping[str, Any]) -> bool:
    """Return True if the summary made here is that of `record`, and disturbs nothing."""
    settings = recorder.settings
    has_alarm = hasattr(signal, "getitimer") and any(signal.getitimer(signal.ITIMER_REAL))
    return (
        os.getppid() == request.command
        and time.time() - settings.start < SHORT
        and recorder.equations <= _MOST_EQUATIONS
        and not (has_alarm or sys.gettrace() or sys.getprofile())
        and threading.active_count() == 1
        and summary_environment() == request.environment
        and _folder() == folder.run_json(settings.run).get("folder")
        and jax.config.values == config
        and len(folder.processes(settings.run)) == 1
    )


def uncaught() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None.

    `sys.last_value` alone is not enough: pytest and IPython store caught exceptions there.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_back is None else None
