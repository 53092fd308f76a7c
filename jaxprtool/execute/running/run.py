"""Compilation and runs of programs, with results and the time of each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental import checkify
from jax.experimental.layout import Format

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    BackendError,
    JaxprToolError,
    OutOfMemoryError,
    UnsupportedError,
    UserFunctionError,
    described,
)
from jaxprtool.execute.running import backends
from jaxprtool.execute.running.arguments import fitting, flat_arguments, require_runnable
from jaxprtool.execute.running.calls import CallForm, call_form, seconds_of
from jaxprtool.execute.running.compile_cache import hits_counted
from jaxprtool.execute.running.summary import Summary, summarize
from jaxprtool.ir.basics.backends import start_backends
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.evaluation.nonfinite import FiniteCheck, unchecked
from jaxprtool.ir.programs.meshes import concrete_mesh, mesh_in_types, placed, spread
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import with_contents
from jaxprtool.ir.programs.scalar_predicates import with_scalar_predicates

#: The number of timed calls of a program without effects.
REPEATS = 10


@dataclass(frozen=True)
class Output:
    """A flat result: its readable path, its type in JAX's notation, its array."""

    name: str
    type: str
    value: jax.Array

    @cached_property
    def summary(self) -> Summary:
        """A summary of the array; computing it reads the whole array."""
        return summarize(self.value)


@dataclass(frozen=True)
class Times:
    """The time of each step of a run, in seconds.

    Attributes:
        lower: Lowering; None under `jax_disable_jit`.
        compile: Compiling; None under `jax_disable_jit`.
        compile_cpu: The CPU time of all threads while the program was compiled.
        cached: Whether the executable was found in JAX's compilation cache.
        first_call: The first call.
        repeat: The median of the calls after the first; None if there were none.
        repeats: The number of these calls.
    """

    lower: float | None
    compile: float | None
    compile_cpu: float | None
    cached: bool
    first_call: float
    repeat: float | None
    repeats: int


@dataclass(frozen=True)
class CompiledMemory:
    """The memory of a compiled program, in bytes.

    Attributes:
        arguments: The bytes of the arguments.
        outputs: The bytes of the results.
        temporary: The additional bytes that it needs while it runs.
    """

    arguments: int
    outputs: int
    temporary: int


@document(without=("name", "devices", "outputs"), flat=("times",))
@dataclass(frozen=True)
class RunReport:
    """How a program was compiled and run.

    Attributes:
        name: The name of the program.
        devices: The devices that it ran on.
        times: The time of each step.
        memory: Its memory; None if the backend does not report it.
        outputs: The results.
    """

    name: str
    devices: tuple[jax.Device, ...]
    times: Times
    memory: CompiledMemory | None
    outputs: tuple[Output, ...]


def choose_device(program: Program, platform: str | None, index: int | None) -> jax.Device | None:
    """Return the device to place a program on; None to leave that to JAX and the program.

    A program that names its own devices (a mesh in shard_map or in a sharding) stays on them.
    Raises BackendError if the machine lacks the device, or the program names different devices.
    """
    if platform is None and index is None:
        return None
    chosen = backends.device(platform, index or 0)
    own = own_devices(program)
    if not own:
        mesh = mesh_in_types(program)
        if mesh is not None and index is not None and mesh.size > 1:
            raise BackendError(
                f"{program.name} runs on a mesh of {mesh.size} devices, "
                f"so it cannot run on {chosen}",
                hint="omit --device",
            )
        return chosen
    if chosen not in own or (index is not None and len(own) > 1):
        names = ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else "")
        raise BackendError(
            f"{program.name} runs on the devices of its own mesh ({names}), so it cannot run on "
            f"{chosen}",
            hint="the function builds the mesh; omit --backend and --device",
        )
    return None


def own_devices(program: Program) -> tuple[jax.Device, ...]:
    """Return the devices named by a program's meshes and shardings, at any depth."""
    found: dict[jax.Device, None] = {}
    if program.jit is not None:
        options = (
            *program.jit.of_arguments(program.arguments),
            *program.jit.of_results(program.results),
        )
        for asked in options:
            found.update(dict.fromkeys(_devices_in(asked.placement)))
    for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr)):
        for value in eqn.params.values():
            found.update(dict.fromkeys(_devices_in(value)))
    return tuple(sorted(found, key=lambda d: d.id))


def _devices_in(value: object) -> Iterator[jax.Device]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _devices_in(item)
    elif isinstance(value, Format):
        yield from _devices_in(value.sharding)
    elif isinstance(value, jax.sharding.NamedSharding):
        yield from _devices_in(value.mesh)
    elif isinstance(value, jax.sharding.Mesh) and not value.empty:
        yield from value.devices.flat


def run(
    program: Program,
    arguments: Sequence[object],
    device: jax.Device | None = None,
    repeat: int | None = None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> RunReport:
    """Compile a program, call it once, and then `repeat` times more to time it.

    Args:
        program: The program.
        arguments: Its flat arguments, one per invar.
        device: The device to run on; by default placed by JAX and the arguments.
        repeat: The number of timed calls. By default `REPEATS`, or 0 for a program with effects
            (prints, callbacks), so that these occur once.
        on_progress: Called with progress messages: "lowering", "compiling", "running", and the
            program's name.

    Raises:
        UnsupportedError: If the program cannot be compiled.
        BackendError: If the device cannot run it.
        UserFunctionError: If a user's callback or check fails, or `jax_debug_nans` or
            `jax_debug_infs` reject a result.
    """
    if repeat is None:
        repeat = 0 if has_effects(program) else REPEATS
    check = FiniteCheck.from_config()
    with ready(program, arguments, device) as (arguments, device):
        made = compiled(program, arguments, on_progress)
        on_progress(f"running {program.name}")
        with failures_reported(program):
            first_time, outs = made.first_call(arguments)
            program.require_finite(check, arguments, outs)
            with without_collector():
                times = [made.seconds(arguments) for _ in range(repeat)]
    median = statistics.median(times) if times else None
    return RunReport(
        program.name,
        devices_of(outs, device),
        Times(made.lower, made.compile, made.compile_cpu, made.cached, first_time, median, repeat),
        made.memory,
        tuple(
            Output(name, aval.str_short(short_dtypes=True), value)
            for name, aval, value in zip(program.out_names, program.out_avals, outs, strict=True)
        ),
    )


def has_effects(program: Program) -> bool:
    """Return True if a program has effects that each of its calls repeats, such as prints."""
    return not all(map(jaxcompat.is_removable_effect, program.jaxpr.effects))


@contextmanager
def ready(
    program: Program, arguments: Sequence[object], device: jax.Device | None
) -> Iterator[tuple[Sequence[object], jax.Device | None]]:
    """Place arguments where a program runs: on its mesh if it has one, or else on a device.

    Yields them and the device, which is None on a mesh. JAX's debug checks are disabled here.
    Raises BackendError if JAX cannot start.
    """
    start_backends()
    mesh = concrete_mesh(program, arguments, device)
    if mesh is not None:
        device, arguments = None, placed(program, arguments, mesh)
    place = nullcontext() if device is None else jax.default_device(device)
    # Arguments and constants are transferred here, not by the user's code.
    transfers = jax.transfer_guard("allow")
    with place, unchecked(), transfers, nullcontext() if mesh is None else jax.set_mesh(mesh):
        if device is not None:
            arguments = [jax.device_put(a, device) for a in arguments]
        elif jax.process_count() > 1:
            arguments = spread(program, arguments)
        yield arguments, device


@contextmanager
def ready_to_step(
    program: Program, args: object, device: jax.Device | None
) -> Iterator[tuple[Program, Sequence[Any]]]:
    """Prepare a program and its arguments for a run equation by equation.

    Args:
        program: A program, of any sizes.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        device: The device to run on; by default placed by JAX and the arguments.

    Yields:
        The program at the sizes of its arguments, without Ref arguments and with scalar loop
        predicates; and its flat arguments.

    Raises:
        ArgumentsError: If the arguments do not fit.
        UnsupportedError: If the program has free named axes.
        BackendError: If JAX cannot start.
    """
    start_backends()
    arguments = flat_arguments(program, args)
    if program.symbols:
        program = program.at(list(map(np.shape, arguments)))
    require_runnable(program)
    program = with_contents(program)
    arguments = fitting(program, arguments)
    program = with_scalar_predicates(program)
    with failures_reported(program), ready(program, arguments, device) as (there, _):
        # Equations run without the `jax.jit` that would shard the arguments.
        yield program, there if device is not None else spread(program, there)


@dataclass(frozen=True)
class Compiled:
    """A compiled program, and the cost of compiling it.

    Attributes:
        form: The function that was compiled.
        jitted: The function under `jax.jit`.
        executable: The executable; None under `jax_disable_jit`.
        lower: The seconds of lowering.
        compile: The seconds of compiling.
        compile_cpu: The CPU time of compiling.
        cached: Whether the executable was found in JAX's compilation cache.
        memory: The memory of the program.
    """

    form: CallForm
    jitted: Callable[..., Any]
    executable: jax.stages.Compiled | None = None
    lower: float | None = None
    compile: float | None = None
    compile_cpu: float | None = None
    cached: bool = False
    memory: CompiledMemory | None = None

    def call(self, flat: Sequence[object]) -> list[Any]:
        """Return the flat results for flat arguments, which are all kept."""
        (args,) = self.form.calls(flat, 1)
        return jax.tree.leaves(self.jitted(*args))

    def first_call(self, flat: Sequence[object]) -> tuple[float, list[Any]]:
        """Return the seconds of a call, and its flat results."""
        (args,) = self.form.calls(flat, 1)
        seconds, results = _timed(self.jitted, *args)
        return seconds, jax.tree.leaves(results)

    def seconds(self, flat: Sequence[object], count: int = 1) -> float:
        """Return the seconds of some calls, one after the other."""
        return seconds_of(self.form, self.jitted, self.form.calls(flat, count))


def compiled(
    program: Program, arguments: Sequence[object], on_progress: Callable[[str], object]
) -> Compiled:
    """Compile a program; under `jax_disable_jit`, its equations are compiled when they run."""
    require_runnable(program)
    form = call_form(program)
    checked = jaxcompat.has_checks(program.jaxpr)
    if checked:
        form = replace(form, fun=checkify.checkify(form.fun))
    if jax.config.jax_disable_jit:
        return Compiled(form, _raising(form.fun) if checked else form.fun)
    on_progress(f"lowering {program.name}")
    jitted = jax.jit(form.fun, **form.keywords)
    try:
        traced = jitted.trace(*form.nested(arguments))
        lower_time, lowered = _timed(traced.lower)
        on_progress(f"compiling {program.name}")
        start = time.process_time()
        with hits_counted() as hits:
            # Calls of `jitted` reuse this executable, and are faster than calling it directly.
            compile_time, executable = _timed(lowered.compile)
        compile_cpu = time.process_time() - start
    except JaxprToolError:
        raise
    except Exception as error:  # lowering rules may raise anything
        kind = _kind(error, UnsupportedError)
        raise kind(f"{program.name} cannot be compiled: {_one_line(error)}") from error
    call = _raising(jitted) if checked else jitted
    memory = _memory(executable)
    return Compiled(
        form, call, executable, lower_time, compile_time, compile_cpu, hits() > 0, memory
    )


def _memory(compiled: jax.stages.Compiled) -> CompiledMemory | None:
    """Return the memory of a compiled program; None if its backend does not report it."""
    known = compiled.memory_analysis()
    if known is None:
        return None
    sizes = known.argument_size_in_bytes, known.output_size_in_bytes, known.temp_size_in_bytes
    return CompiledMemory(*sizes)


def _raising(checked: Callable) -> Callable:
    """Return a function that raises the error returned by a function under `checkify`."""

    def call(*flat: object) -> object:
        failure, outs = checked(*flat)
        failure.throw()
        return outs

    return call


def _timed(fun: Callable, *args: object) -> tuple[float, Any]:
    """Return the seconds until a call's results and ordered effects are ready, and its value."""
    start = time.perf_counter()
    value = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return time.perf_counter() - start, value


@contextmanager
def failures_reported(program: Program) -> Iterator[None]:
    """Turn exceptions of a running program into errors of the user, the device or the program."""
    with jaxcompat.callback_failures() as failures:
        try:
            yield
        except checkify.JaxRuntimeError as error:
            raise UserFunctionError(
                f"a check in {program.name} failed: {_one_line(error)}"
            ) from error
        except FloatingPointError as error:
            raise UserFunctionError(str(error)) from error
        except jax.errors.JaxRuntimeError as error:
            if failures:
                first = failures[0]
                if isinstance(first, KeyboardInterrupt):
                    raise first from None
                raise UserFunctionError(
                    f"{program.name} raised {type(first).__name__}: {_one_line(first)}"
                ) from first
            kind = _kind(error, BackendError)
            raise kind(f"{program.name} failed while it ran: {_one_line(error)}") from error


def _kind(error: Exception, otherwise: type[JaxprToolError]) -> type[JaxprToolError]:
    """Return OutOfMemoryError if an error of JAX says that memory is full, else `otherwise`."""
    return OutOfMemoryError if "RESOURCE_EXHAUSTED" in str(error) else otherwise


def devices_of(outs: Sequence[object], device: jax.Device | None) -> tuple[jax.Device, ...]:
    """Return the devices of results; `device` if the program was placed on it."""
    if device is not None:
        return (device,)
    # Arrays of dtype float0 have no data and no device.
    found = {d for out in outs if isinstance(out, jax.Array) for d in out.devices()}
    return tuple(sorted(found, key=lambda d: d.id)) or (backends.device(),)


def _one_line(error: BaseException) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):  # the figures are not in the first line
        return described(error).removeprefix(f"{type(error).__name__}: ")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
