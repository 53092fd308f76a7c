"""Compilation and runs of programs, with results and the time of each step."""

from __future__ import annotations

import inspect
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.experimental import checkify
from jax.experimental.layout import Format
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    BackendError,
    JaxprToolError,
    OutOfMemoryError,
    OutputError,
    PipelineError,
    StructureError,
    UnsupportedError,
    UserFunctionError,
    described,
)
from jaxprtool.execute.running import backends
from jaxprtool.execute.running.arrays import (
    ArraySummary,
    FilledArguments,
    fill_arguments,
    summarize,
)
from jaxprtool.execute.running.backends import hits_counted
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.conversions import all_contents, with_contents, with_scalar_predicates
from jaxprtool.ir.documents import document
from jaxprtool.ir.dtypes import as_array
from jaxprtool.ir.equations import equations
from jaxprtool.ir.evaluation import FiniteCheck, checks_disabled
from jaxprtool.ir.meshes import concrete_mesh, mesh_in_types, on_set_mesh, place_on_mesh, spread
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, require_program
from jaxprtool.ir.symbols import example_sizes, found_sizes
from jaxprtool.ir.trees import SubstituteNode, filled, leaf_paths

#: The number of timed calls of a program without effects.
REPEATS = 10


@dataclass(frozen=True)
class RunOutput:
    """A flat result: its readable path, its type in JAX's notation, its array."""

    name: str
    type: str
    value: jax.Array

    @cached_property
    def summary(self) -> ArraySummary:
        """A summary of the array; computing it reads the whole array."""
        return summarize(self.value)


@dataclass(frozen=True)
class RunTimes:
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
    times: RunTimes
    memory: CompiledMemory | None
    outputs: tuple[RunOutput, ...]


def choose_device(program: Program, platform: str | None, index: int | None) -> jax.Device | None:
    """Return the device to place a program on; None to leave that to JAX and the program.

    A program that names its own devices (a mesh in shard_map or in a sharding) stays on them.
    Raises BackendError if the machine lacks the device, or the program names different devices.
    """
    if platform is None and index is None:
        return None
    chosen = backends.device(platform, index or 0)
    devices = own_devices(program)
    if not devices:
        mesh = mesh_in_types(program)
        if mesh is not None and index is not None and mesh.size > 1:
            raise BackendError(
                f"{program.name} runs on a mesh of {mesh.size} devices, "
                f"so it cannot run on {chosen}",
                hint="omit --device",
            )
        return chosen
    if chosen not in devices or (index is not None and len(devices) > 1):
        names = ", ".join(map(str, devices[:4])) + (", …" if len(devices) > 4 else "")
        raise BackendError(
            f"{program.name} runs on the devices of its own mesh ({names}), so it cannot run on "
            f"{chosen}",
            hint="the function builds the mesh; omit --backend and --device",
        )
    return None


def own_devices(program: Program) -> tuple[jax.Device, ...]:
    """Return the devices named by a program's meshes and shardings, at any depth."""
    devices: dict[jax.Device, None] = {}
    if program.jit is not None:
        options = (
            *program.jit.of_arguments(program.arguments),
            *program.jit.of_results(program.results),
        )
        for asked in options:
            devices.update(dict.fromkeys(_devices_in(asked.placement)))
    for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr)):
        for value in eqn.params.values():
            devices.update(dict.fromkeys(_devices_in(value)))
    return tuple(sorted(devices, key=lambda d: d.id))


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
    with arguments_placed(program, arguments, device) as (arguments, device):
        compilation = compiled_program(program, arguments, on_progress)
        on_progress(f"running {program.name}")
        with failures_reported(program):
            first_time, outs = compilation.first_call(arguments)
            program.require_finite(check, arguments, outs)
            with without_collector():
                times = [compilation.seconds(arguments) for _ in range(repeat)]
    median = statistics.median(times) if times else None
    return RunReport(
        program.name,
        devices_of(outs, device),
        RunTimes(
            compilation.lower,
            compilation.compile,
            compilation.compile_cpu,
            compilation.cached,
            first_time,
            median,
            repeat,
        ),
        compilation.memory,
        tuple(
            RunOutput(name, aval.str_short(short_dtypes=True), value)
            for name, aval, value in zip(program.out_names, program.out_avals, outs, strict=True)
        ),
    )


def has_effects(program: Program) -> bool:
    """Return True if a program has effects that each of its calls repeats, such as prints."""
    return not all(map(jaxcompat.is_removable_effect, program.jaxpr.effects))


@contextmanager
def arguments_placed(
    program: Program, arguments: Sequence[object], device: jax.Device | None
) -> Iterator[tuple[Sequence[object], jax.Device | None]]:
    """Place arguments where a program runs: on its mesh if it has one, or else on a device.

    Yields them and the device, which is None on a mesh. JAX's debug checks are disabled here.
    Raises BackendError if JAX cannot start.
    """
    start_backends()
    mesh = concrete_mesh(program, arguments, device)
    if mesh is not None:
        device, arguments = None, place_on_mesh(program, arguments, mesh)
    place = nullcontext() if device is None else jax.default_device(device)
    # Arguments and constants are transferred here, not by the user's code.
    transfers = jax.transfer_guard("allow")
    with place, checks_disabled(), transfers, nullcontext() if mesh is None else jax.set_mesh(mesh):
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
    with failures_reported(program), arguments_placed(program, arguments, device) as (there, _):
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


def compiled_program(
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
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    sizes = (
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
    )
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
        except RuntimeError as error:
            if failures:  # a primitive of a package may raise its own error for that of JAX
                first = failures[0]
                if isinstance(first, KeyboardInterrupt):
                    raise first from None
                raise UserFunctionError(f"{program.name} raised {error_line(first)}") from first
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise
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
    devices = {d for out in outs if isinstance(out, jax.Array) for d in out.devices()}
    return tuple(sorted(devices, key=lambda d: d.id)) or (backends.device(),)


def error_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):  # the figures are not in the first line
        return described(error).removeprefix(f"{type(error).__name__}: ")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --- calls ----------------------------------------------------------------------------------------
# Calls of a compiled program as `jax.jit` calls the function that it was traced from.
#
# A call of `jax.jit` flattens its arguments and builds the containers of its results. With hundreds
# of arrays this takes as long as the rest of the call, so a program is compiled as a function of
# the arguments that it was traced with, and its times are those of the user's own calls.

#: The bytes that copies of donated arguments may take, for several calls.
_MOST_COPIES = 1 << 26


@dataclass(frozen=True)
class CallForm:
    """The function that is compiled for a program, and how it is called.

    Attributes:
        fun: The function.
        keywords: The keyword arguments of `jax.jit` for it.
        donated: The positions of the donated arguments of the program.
        groups: The structure of each argument of the function; None if the arguments are flat.
        effects: Whether the program has effects, for which a call waits.
    """

    fun: Callable[..., Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()
    groups: Sequence[Any] | None = None
    effects: bool = False

    def nested(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a call from the flat arguments of the program."""
        if self.groups is None:
            return flat
        rest = iter(flat)
        return [filled(group, islice(rest, group.num_leaves)) for group in self.groups]

    def calls(self, flat: Sequence[Any], count: int) -> list[Sequence[Any]]:
        """Return the arguments of several calls, with a copy of donated ones for each."""
        if not self.donated:
            return [self.nested(flat)] * count
        return [self.nested(self._copied(flat)) for _ in range(count)]

    def most(self, flat: Sequence[Any]) -> int:
        """Return the number of calls for which donated arguments may be copied at once."""
        size = sum(getattr(flat[i], "nbytes", 0) for i in self.donated)
        return max(1, _MOST_COPIES // max(size, 1))

    def _copied(self, flat: Sequence[Any]) -> Sequence[Any]:
        arrays = {i: flat[i] for i in self.donated if isinstance(flat[i], jax.Array)}
        copies = jax.block_until_ready(_copies(arrays))  # not part of the call
        return [copies.get(i, a) for i, a in enumerate(flat)]


@jax.jit
def _copies(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return copies, which are made at once: hundreds of small programs would delay the call."""
    return {i: array.copy() for i, array in arrays.items()}


def call_form(program: Program) -> CallForm:
    """Return the function to compile for a program.

    It takes the arguments of the traced function, keyword arguments last. It takes flat arguments
    if `jax.jit` cannot take those: with shardings, if only some leaves of an argument are donated,
    or if the class of a container accepts only arrays.
    """
    flat = jaxcompat.jaxpr_as_fun(program.jaxpr)
    if program.jit is not None:
        program = program.replace(jit=program.jit.placed_by(on_set_mesh))
    keywords, effects = program.jit_keywords, bool(program.jaxpr.effects)
    donated = frozenset(keywords.get("donate_argnums", ()))
    groups = [group for part in program.in_tree.children() for group in part.children()]
    leaves = iter(range(len(program.in_avals)))
    owned = [[i in donated for i in islice(leaves, group.num_leaves)] for group in groups]
    is_partly_donated = any(any(flags) and not all(flags) for flags in owned)
    is_placed = not keywords.keys().isdisjoint(("in_shardings", "out_shardings"))
    if is_partly_donated or is_placed or not all(map(_suits, (program.in_tree, program.out_tree))):
        return CallForm(flat, keywords, donated, None, effects)

    def call(*args: Any) -> Any:
        return filled(program.out_tree, flat(*jax.tree.leaves(args)))

    call.__name__ = program.name
    if (signature := _signature(program, groups)) is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    if keywords:
        keywords["donate_argnums"] = tuple(i for i, flags in enumerate(owned) if any(flags))
    return CallForm(call, keywords, donated, groups, effects)


def _signature(program: Program, groups: Sequence[PyTreeDef]) -> inspect.Signature | None:
    """Return a signature with the names of the arguments, by which JAX names those of a module.

    Returns None if the name of an argument is not known, because it has no leaves or is one of
    several in `*args`.
    """
    paths = iter(program.arg_names)
    roots = [
        {re.split(r"[.\[]", path)[0] for path in islice(paths, group.num_leaves)}
        for group in groups
    ]
    names = [name for root in roots for name in root if len(root) == 1]
    if len(set(names)) < len(groups) or not all(map(str.isidentifier, names)):
        return None
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _suits(tree: PyTreeDef) -> bool:
    """Return True if the container classes accept placeholders of JAX instead of arrays."""
    arguments = filled(tree, [object() for _ in range(tree.num_leaves)])
    leaves = jax.tree.leaves(arguments, is_leaf=lambda node: isinstance(node, SubstituteNode))
    return not any(isinstance(leaf, SubstituteNode) for leaf in leaves)


def seconds_of(form: CallForm, call: Callable[..., Any], arguments: list[Sequence[Any]]) -> float:
    """Return the seconds that calls take, each of which waits until its results are ready.

    If arguments are donated, results are kept until the end: a user's loop passes them to the next
    call, so the time to release hundreds of arrays is not part of a call.

    Args:
        form: The form of the call.
        call: The function, with or without `jax.jit`.
        arguments: The arguments of each call, from `calls`. If some are donated, the list is
            emptied.
    """
    kept, ready = [], jax.block_until_ready
    start = time.perf_counter()
    if form.donated:
        while arguments:
            kept.append(ready(call(*arguments.pop())))
    else:
        for args in arguments:
            ready(call(*args))
    if form.effects:
        jax.effects_barrier()
    return time.perf_counter() - start


# --- arguments ------------------------------------------------------------------------------------
# Checks and conversions of a program's flat arguments before it is run.


def require_count(program: Program, arguments: Sequence[object]) -> None:
    """Raise ArgumentsError unless the number of flat arguments matches the program."""
    count = len(program.in_avals)
    if len(arguments) != count:
        raise ArgumentsError(f"{program.name} takes {count} arrays, not {len(arguments)}")


def flat_arguments(program: Program, args: object) -> list[Any]:
    """Return the flat arguments of a call, with keyword arguments last, or of any other pytree.

    A Ref is replaced by its value.

    Raises:
        ArgumentsError: If `program` is not a Program, or one Ref is given for two arguments.
    """
    require_program(program)
    positional, keywords = filled(program.in_tree, program.in_avals)
    if isinstance(args, tuple | list) and len(args) == len(positional) + len(keywords):
        with suppress(StructureError):
            named = dict(zip(keywords, args[len(positional) :], strict=True))
            return all_contents(program, program.matched(args[: len(positional)], named).leaves)
    return all_contents(program, jax.tree.leaves(args))


def at_one_size(
    before: Program, after: Program, arguments: Sequence[Any] | None = None
) -> tuple[Program, Program]:
    """Return the programs at the sizes of the flat arguments of `before`, or at small sizes.

    Raises ArgumentsError if no sizes fit.
    """
    if arguments is not None and len(arguments) == len(before.in_avals):
        before = before.at(list(map(np.shape, arguments)))
    elif before.arg_names == after.arg_names:  # `after` may have fewer symbols than `before`
        after = after.specialized(example_sizes(after.name, after.in_avals))
        return before.at([aval.shape for aval in after.in_avals]), after
    else:
        before = before.specialized(example_sizes(before.name, before.in_avals))
    shapes = {name: aval.shape for name, aval in before.arguments}
    common = [(name, aval) for name, aval in after.arguments if name in shapes]
    sizes = found_sizes(after.name, common, [shapes[name] for name, _ in common])
    return before, after.specialized(sizes)


def require_runnable(program: Program) -> None:
    """Raise UnsupportedError for a program that cannot be run on its own."""
    if program.axis_env:
        axes = ", ".join(repr(name) for name, _ in program.axis_env)
        raise UnsupportedError(
            f"{program.name} cannot be run: it has the free named axes {axes}",
            "bind one with batch(axis_name=…)",
        )


def fitting(program: Program, arguments: Sequence[object]) -> list[Any]:
    """Return flat arguments as arrays of a program's argument types.

    Raises:
        ArgumentsError: If their number or a type differs, if one is a type instead of an array, or
            if a size exceeds its bound.
    """
    require_count(program, arguments)
    return [as_array(x) for x in program.checked(arguments)]


# --- init apply -----------------------------------------------------------------------------------
# Running of the two programs of `unzip`: init, and apply on its results.


@dataclass(frozen=True)
class InitApplyReport:
    """The runs of init and apply.

    Attributes:
        init: The run of init.
        apply: The run of apply.
        variables: The variables, by path.
        filled: The arguments of the whole program, and which of them are random.
    """

    init: RunReport
    apply: RunReport
    variables: dict[str, jax.Array]
    filled: FilledArguments


def run_init_apply(
    whole: Program,
    parts: Mapping[str, Program],
    arguments: Sequence[object],
    seed: int,
    platform: str | None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> InitApplyReport:
    """Run init, and apply on its results, with the arguments that `run` would use.

    Args:
        whole: The program before the split.
        parts: `init` and `apply`.
        arguments: The flat arguments of the whole: arrays, or types to be filled.
        seed: The seed of random values.
        platform: The platform to run on; None for JAX's default.
        on_progress: Called with progress messages: "compiling init".

    Raises:
        PipelineError: If `parts` are not init and apply.
        OutputError: If two variables have the same path.
        ArgumentsError: As in `fill_arguments`.
    """
    if parts.keys() != {"init", "apply"}:
        names = ", ".join(parts)
        raise PipelineError(f"--run takes init and apply, but the passes returned {names}")
    whole, init, apply = map(with_contents, (whole, parts["init"], parts["apply"]))
    filled = fill_arguments(whole, dict(zip(whole.arg_names, arguments, strict=True)), seed)
    values = dict(zip(whole.arg_names, filled.arguments, strict=True))
    device = choose_device(init, platform, None)
    init_report = run(init, fill_arguments(init, values).arguments, device, 0, on_progress)
    paths = leaf_paths(init.out_tree)
    variables = dict(zip(paths, (out.value for out in init_report.outputs), strict=True))
    if len(variables) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise OutputError(f"two variables have the path '{twice}'")
    values |= {out.name: out.value for out in init_report.outputs}
    device = choose_device(apply, platform, None)
    apply_report = run(
        apply, fill_arguments(apply, values).arguments, device, on_progress=on_progress
    )
    return InitApplyReport(init_report, apply_report, variables, filled)
