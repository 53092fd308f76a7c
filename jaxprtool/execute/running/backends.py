"""Where programs run: devices by platform, clusters of processes, and the compilation cache.

Platforms have JAX's names (`cpu`, `cuda`, `rocm`, `tpu`, or a plug-in's own name); `gpu` is `cuda`
or `rocm`, whichever this machine has. A query starts all backends known to JAX, which logs each
missing one; here, only a missing backend that was requested is reported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils, topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import backend as jax_backend

from jaxprtool import jaxcompat
from jaxprtool.errors import BackendError, BackendStartError, described, did_you_mean
from jaxprtool.ir.backends import (
    ALIASES,
    KNOWN,
    NO_NVIDIA_GPU,
    Plugin,
    asked_platforms,
    has_tpu_library,
    not_installed,
    platforms_hint,
    plugins,
    start_backends,
)

if TYPE_CHECKING:
    from jaxprtool.processes import ClusterPlace

# --- backends -------------------------------------------------------------------------------------
# The devices of this machine by PJRT platform, and lookup of a device by name.


@dataclass(frozen=True)
class StartedBackend:
    """A PJRT platform that JAX could start, with its devices in this process."""

    platform: str
    version: str
    devices: tuple[jax.Device, ...]
    default: bool

    @property
    def kinds(self) -> str:
        """The distinct models of the devices: `NVIDIA H100`."""
        return ", ".join(dict.fromkeys(d.device_kind for d in self.devices))


@dataclass(frozen=True)
class FailedBackend:
    """A backend or plug-in that is installed and does not start, and the reason in one line."""

    name: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """The backends of this machine, the installed plug-ins, and those that do not start."""

    backends: list[StartedBackend]
    plugins: list[Plugin]
    failures: list[FailedBackend]


def survey() -> Survey:
    """Start the backends, and return them with those that were asked for or installed and fail.

    JAX stops at a backend that must start and does not, so backends that it would start later are
    missing. Raises BackendError if a plug-in breaks JAX.
    """
    with jaxcompat.failures_to_start() as failed:
        try:
            start_backends()
        except BackendStartError as error:
            asked = {error.backend: error.reason}
            started = _started(None) if jaxcompat.has_backends() else []
        else:
            asked, started = {}, _started(jax_backend.get_backend())
    for name in not_installed():
        failed.pop(name, None)
    failed |= asked
    installed = plugins()
    for plugin in installed:
        if (reason := plugin.import_error) is not None:
            failed[plugin.package or plugin.module] = reason
    names = {*failed, *(backend.platform for backend in started)}
    wants_cuda = not {"cuda", "gpu"}.isdisjoint(asked_platforms())
    if "cuda" not in names and (
        wants_cuda or any("xla_cuda" in plugin.module for plugin in installed)
    ):
        failed["cuda"] = NO_NVIDIA_GPU
    failures = [FailedBackend(name, _first_line(reason)) for name, reason in sorted(failed.items())]
    return Survey(started, installed, failures)


def memory_of(device: jax.Device) -> int | None:
    """Return the memory of a device that JAX may use, in bytes; None if it does not say."""
    try:
        stats = device.memory_stats()
    except Exception:  # PJRT plug-ins need not implement it
        return None
    return (stats or {}).get("bytes_limit")


def devices_to_compile_for(backend: str) -> Sequence[jax.Device]:
    """Return the devices of a backend, or descriptions of devices that this machine lacks.

    Args:
        backend: The name of a backend, or of a platform and of a machine that its plug-in can
            describe: `tpu:v5e:2x2`.

    Raises:
        BackendError: If there is no such backend, and no plug-in that describes it.
    """
    platform, _, topology = backend.partition(":")
    if platform.lower() == "tpu" and topology:
        return _absent_tpu(backend, topology)
    if not topology:
        try:
            return _backend(platform).devices
        except BackendError as error:
            if platform.lower() not in KNOWN:
                raise
            absent = error
    else:
        absent = BackendError(f"XLA cannot compile for '{backend}'")
    if platform.lower() == "tpu":
        install = "" if has_tpu_library() else ", with the package libtpu"
        absent.hint = f"name a TPU, which need not be present{install}: --backend tpu:v5e:2x2"
        raise absent
    try:
        name = ALIASES.get(platform.lower(), (platform.lower(),))[0]
        return topologies.get_topology_desc(topology, name).devices
    except Exception as error:  # plug-ins may raise anything
        reason = _first_line(described(error))
        absent.hint = f"XLA cannot compile for it without the machine: {reason}"
        raise absent from error


def _absent_tpu(backend: str, topology: str) -> Sequence[jax.Device]:
    """Return descriptions of the devices of a TPU: `v5e:2x2`."""
    failed = f"XLA cannot compile for '{backend}'"
    if not has_tpu_library():
        raise BackendError(f"{failed} without the package libtpu", "pip install libtpu")
    hint = "name the chip, and the number of chips along each axis: --backend tpu:v5e:2x4"
    sizes = topology.rpartition(":")[2].split("x")
    if not all(size.strip("0") for size in sizes):  # libtpu ends the process
        raise BackendError(f"{failed}: it has no chips", hint)
    try:
        return topologies.get_topology_desc(topology, "tpu").devices
    except Exception as error:  # plug-ins may raise anything
        reason = _first_line(error)
        if "lockfile" in reason:
            reason, hint = "another process uses libtpu", "set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
        raise BackendError(f"{failed}: {reason}", hint) from error


def backends() -> list[StartedBackend]:
    """Return every backend of this machine, the default one first.

    Raises BackendError if JAX cannot start, for instance if JAX_PLATFORMS names a missing one.
    """
    jaxcompat.keep_backend_probing_quiet()
    start_backends()
    return _started(jax_backend.get_backend())


def _started(default: Any) -> list[StartedBackend]:
    """Return the backends that have started; `default` is the client of the default one."""
    started = []
    for platform_name, client in jax_backend.backends().items():
        version = _first_line(client.platform_version)
        devices = tuple(client.local_devices())
        started.append(StartedBackend(platform_name, version, devices, client is default))
    return sorted(started, key=lambda b: (not b.default, b.platform))


def device(platform: str | None = None, index: int = 0) -> jax.Device:
    """Return the device number `index` of a platform, or of the default one.

    Raises BackendError, which lists the existing ones, if the platform or device is missing.
    """
    backend = _backend(platform)
    if not 0 <= index < len(backend.devices):
        numbers = "0" if len(backend.devices) == 1 else f"0 to {len(backend.devices) - 1}"
        raise BackendError(
            f"no device {index} on backend '{backend.platform}'; it has {_count(backend)}: "
            f"{numbers}",
            _host_devices_hint(backend, index),
        )
    return backend.devices[index]


def _backend(platform: str | None) -> StartedBackend:
    there = backends()
    if platform is None:
        return there[0]
    wanted = platform.lower()
    names = ALIASES.get(wanted, (wanted,))
    for candidate in there:
        if candidate.platform.lower() in names:
            return candidate
    has = ", ".join(f"{b.platform} ({_count(b)})" for b in there)
    near = None if wanted in KNOWN else did_you_mean(wanted, [*KNOWN, *(b.platform for b in there)])
    if ":" in wanted:
        near = "a device that this machine lacks can be compiled for, as by memory --compiled"
    hint = near or _why_missing(wanted)
    raise BackendError(f"no backend '{platform}' on this machine; it has: {has}", hint)


def _count(backend: StartedBackend) -> str:
    n = len(backend.devices)
    return f"{n} device{'' if n == 1 else 's'}"


def _why_missing(platform: str) -> str | None:
    """Return JAX's message about a known backend that it could not start."""
    allowed = set(asked_platforms())
    names = ALIASES.get(platform, (platform,))
    if allowed and allowed.isdisjoint((platform, *names)):
        return platforms_hint()
    if "cuda" in allowed.intersection(names):
        return NO_NVIDIA_GPU
    try:
        jax.devices(platform)
    except RuntimeError as error:
        text = _first_line(error).split(" Available backends")[0].rstrip(".")
        return f"JAX reports: {text}" if "failed to initialize" in text else None
    return None


def _host_devices_hint(backend: StartedBackend, index: int) -> str | None:
    if backend.platform != "cpu" or index < 0:
        return None
    flag = f"--xla_force_host_platform_device_count={index + 1}"
    return f"XLA_FLAGS={flag} creates {index + 1} devices on one CPU"


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]


# --- cluster --------------------------------------------------------------------------------------
# The cluster of processes that run one program: joining it, and values that all of them share.

#: The time limit for the start of all processes of a cluster, in seconds.
PATIENCE = 60

#: The variables with the number of processes that `srun` or `mpirun` starts. In the script of a
#: job of Slurm, which is one process, the first one is not set; SLURM_NTASKS is.
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def is_started_by_cluster(env: Mapping[str, str] = os.environ) -> bool:
    """Return True if Slurm, Open MPI or Kubernetes has started this process in a cluster."""
    sizes = [env.get(name, "") for name in _SIZES]
    several = any(size.isdigit() and int(size) > 1 for size in sizes)
    return several or ("KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env)


def join(place: ClusterPlace | None, seconds: float = PATIENCE) -> None:
    """Join a cluster, before JAX starts a backend.

    Args:
        place: The place of this process; None to let JAX detect it.
        seconds: The time to wait for the other processes.

    Raises:
        BackendError: If the coordinator does not answer, or JAX cannot join.
    """
    try:
        if place is None:
            jax.distributed.initialize(initialization_timeout=int(seconds))
            return
        if place.number:
            _await_coordinator(place.coordinator, seconds)
        jax.distributed.initialize(
            place.coordinator, place.count, place.number, initialization_timeout=int(seconds)
        )
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().partition("\n")[0]
        raise BackendError(f"this process cannot join the cluster: {text}") from error


def _await_coordinator(address: str, seconds: float) -> None:
    """Wait until the coordinator listens, since JAX aborts the process if it does not."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, min(5, seconds))).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise BackendError(
                    f"the coordinator {address} did not answer within {seconds:.0f} s: "
                    f"{error.strerror or error}",
                    "start the command with --process-id 0 on that machine",
                ) from error
            time.sleep(0.2)


def require_all(size: int) -> None:
    """Raise BackendError if a mesh of `size` devices does not use all devices of the cluster."""
    if size < jax.device_count():
        raise BackendError(
            f"the mesh has {size} device{'s' if size > 1 else ''}, but the {jax.process_count()} "
            f"processes have {jax.device_count()}",
            "a run in several processes uses all devices: make the mesh larger, or give each "
            "process fewer devices with --host-devices",
        )


def is_first() -> bool:
    """Return True in the process that shows results: the only one, or number 0 of a cluster."""
    return jax.process_index() == 0


@contextmanager
def _together() -> Iterator[None]:
    """Raise BackendError if a collective fails, because another process has ended."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError for a failed compilation
        text = str(error).strip().partition("\n")[0]
        raise BackendError(f"another process of the cluster has ended: {text}") from error


def wait_for_all() -> None:
    """Wait until all processes of the cluster have called this.

    Raises:
        BackendError: If one has ended instead.
    """
    if jax.process_count() > 1:
        with _together():
            multihost_utils.process_allgather(np.int32(0))


def gathered_array(array: Any) -> Any:
    """Return an array with all of its shards; all processes of the cluster must call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        with _together():
            return multihost_utils.process_allgather(array, tiled=True)
    return array


def exchanged(data: bytes) -> list[bytes]:
    """Return the `data` of each process of the cluster, by process number."""
    with _together():
        sizes = multihost_utils.process_allgather(np.int32(len(data))).ravel()
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


# --- compile cache --------------------------------------------------------------------------------
# The persistent compilation cache of JAX in the user's cache folder.
#
# JAX bounds its cache by a scan of all entries for each new one, which takes longer than compiling
# the small kernels of `--verify`. Also, JAX 0.10 adds no entries after a process was killed between
# the two files of an entry. Therefore this module enforces the bound, once a day.

#: The JAX settings changed by this module.
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)

#: The limit of all entries in bytes; above it the least recently used ones are removed.
LIMIT = 2**30

#: Seconds between two checks of the size.
_INTERVAL = 24 * 60 * 60

#: The file that marks a cache for backup tools; its age is that of the last check.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Programs compiled by XLA, for jaxprtool.\n"
)


def keep_compiled() -> None:
    """Enable JAX's compilation cache in the user's cache folder.

    A cache that is already configured (`JAX_COMPILATION_CACHE_DIR`) or disabled is left as it is.

    Raises:
        OSError: If the folder cannot be written.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    import platformdirs  # only needed to run a program

    whole = Path(platformdirs.user_cache_dir("jaxprtool")) / "xla"
    folder = whole / _machine()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tag = whole / _TAG
    if not tag.exists() or time.time() - tag.stat().st_mtime > _INTERVAL:
        tag.write_text(_TAG_TEXT)
        prune(whole, LIMIT)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no permission to write in {folder}")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compile_afresh() -> None:
    """Disable JAX's compilation cache."""
    _enable(False)


@contextmanager
def compiled_afresh() -> Iterator[None]:
    """Disable JAX's persistent cache in a `with` block, to measure compile times.

    One-time initialization of the backend's compiler is done before. Raises BackendError if JAX
    cannot start.
    """
    start_backends()
    enabled = jax.config.jax_enable_compilation_cache
    _enable(False)
    jax.jit(lambda: jax.numpy.zeros(())).lower().compile()
    try:
        yield
    finally:
        _enable(enabled)


def _enable(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    forget()


def forget() -> None:
    """Reset JAX's cache, since JAX reads its location only once."""
    compilation_cache.reset_cache()


def prune(folder: Path, limit: int) -> None:
    """Remove the least recently used files of a folder if its size exceeds `limit`.

    Afterwards a quarter of the limit is free. Other processes may use the folder meanwhile.
    """
    files = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed by another process
            if path.is_file() and path.name != _TAG:
                status = path.stat()
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in files)
    room = limit if total <= limit else limit * 3 // 4
    for _, size, path in sorted(files):
        if total <= room:
            break
        with suppress(OSError):
            path.unlink()
        total -= size


@contextmanager
def hits_counted() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of cache hits in the `with` block."""
    hits = 0

    def heard(event: str, **_: object) -> None:
        nonlocal hits
        hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(heard)
    try:
        yield lambda: hits
    finally:
        jax.monitoring.unregister_event_listener(heard)


def _machine() -> str:
    """Return a name shared by processors with the same instruction set extensions.

    JAX's cache key does not include the processor, and home folders may be shared.
    """
    instructions = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flag_lines = (line for line in lines if line.startswith(("flags", "Features")))
        instructions = next(flag_lines, instructions)
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
