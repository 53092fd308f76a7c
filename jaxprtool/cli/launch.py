"""The start of JAX, and `run` in several processes or for a limited time.

A run with `--launch` or `--coordinator` is supervised: this process starts the same command once
for each process on this machine, shows their output, and ends them all when one fails, because a
process that JAX or XLA aborts cannot report an error itself.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from glob import glob
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from jaxprtool.cli import output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.output import OnProgress
from jaxprtool.errors import BackendError
from jaxprtool.files import SUPERVISED, remove_unfinished

if TYPE_CHECKING:
    from jaxprtool.cli.session import FunctionOptions
    from jaxprtool.processes import ClusterPlace, Failure, Stream

# --- start ----------------------------------------------------------------------------------------
# The start of JAX, which is imported only after the command line has been validated.

#: Called when the command has ended.
_at_end: ContextVar[contextlib.ExitStack] = ContextVar("_at_end")

#: Called with True if a command wants another number of devices than is set, and with False after a
#: command whose number stays, because JAX has started its devices.
on_other_devices: ContextVar[Callable[[bool], object]] = ContextVar(
    "on_other_devices", default=lambda is_late: None
)


@contextlib.contextmanager
def jax_settings_restored() -> Iterator[None]:
    """Restore JAX's configuration after a command, since other code may run in this process."""
    with contextlib.ExitStack() as stack:
        token = _at_end.set(stack)
        try:
            yield
        finally:
            _at_end.reset(token)


def until_the_end(context: contextlib.AbstractContextManager[object]) -> None:
    """Enter a context that is left when the command has ended."""
    _at_end.get().enter_context(context)


def _restore_at_end(*settings: str) -> None:
    import jax

    for name in settings:
        _at_end.get().callback(_restore, name, jax.config.values[name])


def _restore(name: str, value: object) -> None:
    import jax

    try:
        jax.config.update(name, value)
    except RuntimeError:  # the number of devices stays once they have started
        on_other_devices.get()(False)


def start_jax(on_progress: OnProgress, x64: bool = False) -> None:
    """Import and configure JAX, and warn about an unknown release."""
    on_progress("importing JAX")
    _keep_libtpu_quiet()
    with _interrupts_delayed(), _imports_frozen():
        from jaxprtool import jaxcompat
    for path in _own_frames():
        jaxcompat.hide_frames(path)
    jaxcompat.keep_backend_probing_quiet()
    if x64:
        use_x64(True)
    if version := jaxcompat.untested_version():
        output.warning(f"jaxprtool has not been tested with JAX {version}")


#: What keeps libtpu from asking a cloud's metadata server for the TPU, from complaining, and from
#: refusing to compile in two processes.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def _keep_libtpu_quiet() -> None:
    """Set the environment of libtpu where it only compiles, on a machine without a TPU."""
    if find_spec("libtpu") is None or glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"):
        return
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)


def uses_x64() -> bool:
    """Return whether JAX's 64-bit types are enabled."""
    from jaxprtool.ir import dtypes

    return dtypes.x64_enabled()


def use_x64(enabled: bool) -> None:
    """Enable or disable JAX's 64-bit types from now on."""
    import jax

    _restore_at_end("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)


def use_host_devices(count: int) -> None:
    """Use this many virtual devices of the CPU, and no other devices.

    Raises BackendError if JAX has started its devices.
    """
    import jax

    _restore_at_end("jax_platforms", "jax_num_cpu_devices")
    try:
        if jax.config.values["jax_num_cpu_devices"] != count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        raise BackendError(
            f"--host-devices {count} comes too late: JAX has started its devices",
            "start JAX's devices neither in a plug-in nor before this command",
        ) from None
    jax.config.update("jax_platforms", "cpu")


def use_virtual_devices(count: int) -> None:
    """Let the CPU have this many virtual devices, beside the devices of the machine.

    A number that the environment or a module has set is kept, and so are devices that have started.
    """
    import jax

    _restore_at_end("jax_num_cpu_devices")
    is_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    configured = jax.config.values["jax_num_cpu_devices"]
    if configured != count:
        on_other_devices.get()(True)
    with contextlib.suppress(RuntimeError):  # JAX has started its devices
        if configured in (-1, count):
            jax.config.update("jax_num_cpu_devices", -1 if is_flag else count)


def use_cache(wanted: bool) -> None:
    """Enable JAX's compilation cache in the user's cache folder, or disable it."""
    from jaxprtool.execute.running import backends

    _at_end.get().callback(backends.forget)
    _restore_at_end(*backends.SETTINGS)
    if not wanted:
        backends.compile_afresh()
        return
    try:
        backends.keep_compiled()
    except OSError as error:
        output.warning(f"compiled programs are not cached: {error.strerror or error}")


def _own_frames() -> Iterator[str]:
    """Yield the files on the stack below a command: Typer, Click, and Python's entry point.

    JAX would treat them as user code, and list them as sources of the HLO.
    """
    for name in ("typer", "click"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield os.path.join(os.path.dirname(file), "")
    yield "<frozen "
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(script).partition(".")[0] == "jaxprtool":
        yield script


@contextlib.contextmanager
def _imports_frozen() -> Iterator[None]:
    """Pause the garbage collector during the first import of JAX, whose objects stay alive."""
    if "jaxprtool.jaxcompat" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C: JAX's extension modules crash if their import is interrupted."""
    delayed: list[int] = []
    try:
        handler = signal.signal(signal.SIGINT, lambda number, frame: delayed.append(number))
    except ValueError:  # only possible in the main thread; others are not interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if delayed:
        raise KeyboardInterrupt


# --- launch ---------------------------------------------------------------------------------------

#: The exit code of a run whose time was up, as of the command `timeout`.
TIMED_OUT = 124

#: The arguments of the command line.
command_line: ContextVar[tuple[str, ...]] = ContextVar("command_line")

#: Messages of gloo, which several threads may print at the same time.
_GLOO = re.compile(rb"\[Gloo\] Rank |\d+ is connected to \d+ peer ranks")

#: Messages of libraries when the system has no more memory or threads.
_LIMIT = re.compile(r"bad_alloc|pthread_create|cannot allocate ", re.IGNORECASE)

_PROCESSES = Panel("Processes and machines")

Launch = Annotated[
    int | None,
    _PROCESSES.option(
        "--launch",
        "N",
        "Run in N processes on this machine, with one CPU device each (or JAX_NUM_CPU_DEVICES).",
        min=1,
    ),
]
Coordinator = Annotated[
    str | None,
    _PROCESSES.option(
        "--coordinator",
        "HOST:PORT",
        "Join a cluster: the address of process 0. Not needed under Slurm, Open MPI, Kubernetes.",
    ),
]
NumProcesses = Annotated[
    int | None,
    _PROCESSES.option("--num-processes", "N", "The number of processes of the cluster.", min=1),
]
ProcessId = Annotated[
    int | None,
    _PROCESSES.option("--process-id", "K", "The number of this process, from 0.", min=0),
]
Timeout = Annotated[
    float | None,
    _PROCESSES.option(
        "--timeout",
        "SECONDS",
        "End the run, with all its processes and exit code 124, after this time.",
        min=0.1,
    ),
]


def supervise(
    launch: int | None, place: ClusterPlace | None, timeout: float | None, save: str | None
) -> None:
    """Run this command in child processes, if its options ask for it, and exit.

    If they fail or are killed, unfinished parts of the file or folder `save` are removed.

    Raises:
        typer.Exit: With the exit code of the run.
        typer.BadParameter: If options contradict each other.
    """
    if launch and place:
        raise typer.BadParameter("--launch starts its own cluster: omit --coordinator")
    if is_supervised() or not (launch or place or timeout):
        return
    from jaxprtool.processes import ended_by_signals, run_together

    mark = os.urandom(8).hex()
    bare = _without("--timeout", _without("--launch", command_line.get()))
    command = [sys.executable, "-m", "jaxprtool", *bare]
    commands = [command]
    env = {**os.environ, SUPERVISED: mark, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    if launch:
        env.setdefault("JAX_NUM_CPU_DEVICES", "1")
        cluster = ["--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(launch)]
        commands = [[*command, *cluster, "--process-id", str(i)] for i in range(launch)]
    names = {0: place.number} if place else {}
    shown = _ProcessOutput(names, bool(launch))
    # The other processes of a cluster may still write to a folder that all of them see.
    unfinished = save if place is None or place.number == 0 else None
    with ended_by_signals(), _unfinished_removed(unfinished, mark):
        failure = run_together(commands, env, shown.line, timeout)
    if failure is not None:
        raise typer.Exit(_reported(failure, names, bool(launch), timeout))
    raise typer.Exit(0)


def place_of(coordinator: str | None, count: int | None, number: int | None) -> ClusterPlace | None:
    """Return the place in the cluster that the options name, or None.

    Raises:
        typer.BadParameter: If only some of them are given, or one is not valid.
    """
    if coordinator is None and count is None and number is None:
        return None
    if coordinator is None or count is None or number is None:
        raise typer.BadParameter("--coordinator, --num-processes and --process-id go together")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"--coordinator takes HOST:PORT, not '{coordinator}'")
    if number >= count:
        raise typer.BadParameter(f"--process-id is {number}, but there are {count} processes")
    from jaxprtool.processes import ClusterPlace

    return ClusterPlace(coordinator, count, number)


def join_cluster(place: ClusterPlace | None, function: FunctionOptions) -> bool:
    """Join the cluster that the options name, or that a scheduler has started this process for.

    All processes compute the results, since each holds shards of them, but only the first prints
    them. The module of TARGET is imported before backends start, because it may set their options.

    Returns:
        Whether this process shows the results.

    Raises:
        BackendError: If this process cannot join or start its devices, or the mesh does not use all
            devices of the cluster.
    """
    from jaxprtool.execute.running import backends
    from jaxprtool.execute.running import backends as cluster

    if place is None and not cluster.is_started_by_cluster():
        return True
    until_the_end(output.only_python_on_stdout())  # gloo prints a line for each group it connects
    cluster.join(place)
    function.import_module()
    backends.backends()  # errors of their start are reported here
    if mesh := function.tracing.mesh:
        cluster.require_all(math.prod(mesh.values()))
    if not cluster.is_first():
        sys.stdout = io.StringIO()
    return cluster.is_first()


def leave_at_once(code: int) -> None:
    """End a failed process of a cluster without waiting for the other processes, as JAX would.

    They may wait for this process in a collective, without end.
    """
    # A thread may still be importing JAX.
    is_initialized = getattr(sys.modules.get("jax.distributed"), "is_initialized", None)
    if code and is_initialized is not None and is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def is_supervised() -> bool:
    """Return True in a process that `supervise` has started."""
    return SUPERVISED in os.environ


@contextmanager
def _unfinished_removed(save: str | None, mark: str) -> Iterator[None]:
    """Remove unfinished files of the processes at the end; report a signal that ended the run."""
    from jaxprtool.processes import Terminated

    try:
        yield
    except Terminated as ended:
        name = signal.Signals(ended.number).name
        output.error(f"the run was ended by signal {ended.number} ({name})")
        raise
    finally:
        if save is not None:
            remove_unfinished(save, mark)


class _ProcessOutput:
    """Shows the output of processes: stdout of the first unchanged, other lines with a number."""

    def __init__(self, names: dict[int, int], launched: bool):
        self._names, self._launched = names, launched

    def line(self, number: int, stream: Stream, line: bytes) -> None:
        if _GLOO.match(line):
            return
        file = sys.stdout if stream == "stdout" else sys.stderr
        unlabelled = not self._launched or (stream == "stdout" and number == 0)
        text = line.decode(errors="replace")
        file.write(text if unlabelled else f"[{self._names.get(number, number)}] {text}")
        file.flush()


def _reported(
    failure: Failure, names: dict[int, int], launched: bool, timeout: float | None
) -> int:
    """Print what a failed process said, and return the exit code of the run."""
    if failure.process is None:
        output.error(f"the run did not end within {timeout:g} s (--timeout)")
        return TIMED_OUT
    name = f"process {names.get(failure.process, failure.process)}"
    if failure.signal is not None and failure.signal != signal.SIGABRT:
        signal_name = signal.Signals(failure.signal).name
        output.error(
            f"{name} was killed by signal {failure.signal} ({signal_name})", _hint(failure)
        )
        return 128 + failure.signal
    said = [line for line in failure.said if line.strip()]
    if failure.signal is not None or not said:
        how = f"exit code {failure.status}" if failure.signal is None else "aborted by XLA"
        output.error(f"{name} failed: {' '.join(said[:1]) or how}", _hint(failure))
        return 128 + failure.signal if failure.signal else failure.status or 1
    first = said[0].removeprefix("error: ")
    if said[0] == first and first != "interrupted":
        output.error(f"{name} failed: {first}", _hint(failure))  # a line of a library's
    else:
        output.error(f"{name}: {first}" if launched and said[0] != first else first)
    for line in said[1:]:
        output.say(line)
    return failure.status or 1


def _hint(failure: Failure) -> str | None:
    """Return what may have ended a process that could not report it itself."""
    if failure.signal == signal.SIGKILL:
        return "Linux kills processes when its memory or that of a container is full: see `dmesg`"
    if any(map(_LIMIT.search, failure.said)):
        return "the process reached a limit of memory or threads: see `ulimit -a`"
    return None


def _without(option: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line without an option and its value."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return tuple(kept)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
