"""The devices of this machine by PJRT platform, and lookup of a device by name.

Platforms have JAX's names (`cpu`, `cuda`, `rocm`, `tpu`, or a plug-in's own name); `gpu` is `cuda`
or `rocm`, whichever this machine has. A query starts all backends known to JAX, which logs each
missing one; here, only a missing backend that was requested is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.extend import backend as jax_backend

from jaxprtool import jaxcompat
from jaxprtool.errors import BackendError, BackendStartError, described, did_you_mean
from jaxprtool.ir.basics.backends import (
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


@dataclass(frozen=True)
class Backend:
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
class Failure:
    """A backend or plug-in that is installed and does not start, and the reason in one line."""

    name: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """The backends of this machine, the installed plug-ins, and those that do not start."""

    backends: list[Backend]
    plugins: list[Plugin]
    failures: list[Failure]


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
            found = _started(None) if jaxcompat.has_backends() else []
        else:
            asked, found = {}, _started(jax_backend.get_backend())
    for name in not_installed():
        failed.pop(name, None)
    failed |= asked
    installed = plugins()
    for plugin in installed:
        if (reason := plugin.import_error) is not None:
            failed[plugin.package or plugin.module] = reason
    names = {*failed, *(backend.platform for backend in found)}
    wants_cuda = not {"cuda", "gpu"}.isdisjoint(asked_platforms())
    if "cuda" not in names and (
        wants_cuda or any("xla_cuda" in plugin.module for plugin in installed)
    ):
        failed["cuda"] = NO_NVIDIA_GPU
    failures = [Failure(name, _first_line(reason)) for name, reason in sorted(failed.items())]
    return Survey(found, installed, failures)


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
    if not topology:
        try:
            return _backend(platform).devices
        except BackendError as error:
            if platform.lower() not in KNOWN:
                raise
            absent = error
    else:
        absent = BackendError(f"XLA cannot compile for '{backend}'")
    names = ALIASES.get(platform.lower(), (platform.lower(),))
    if names == ("tpu",) and not (topology and has_tpu_library()):
        install = "" if has_tpu_library() else ", with the package libtpu"
        absent.hint = f"name a TPU, which need not be present{install}: --backend tpu:v5e:2x2"
        raise absent
    try:
        return topologies.get_topology_desc(topology, names[0]).devices
    except Exception as error:  # plug-ins may raise anything
        reason = _first_line(described(error))
        absent.hint = f"XLA cannot compile for it without the machine: {reason}"
        raise absent from error


def backends() -> list[Backend]:
    """Return every backend of this machine, the default one first.

    Raises BackendError if JAX cannot start, for instance if JAX_PLATFORMS names a missing one.
    """
    jaxcompat.keep_backend_probing_quiet()
    start_backends()
    return _started(jax_backend.get_backend())


def _started(default: Any) -> list[Backend]:
    """Return the backends that have started; `default` is the client of the default one."""
    found = []
    for platform, client in jax_backend.backends().items():
        version = _first_line(client.platform_version)
        devices = tuple(client.local_devices())
        found.append(Backend(platform, version, devices, client is default))
    return sorted(found, key=lambda b: (not b.default, b.platform))


def device(platform: str | None = None, index: int = 0) -> jax.Device:
    """Return the device number `index` of a platform, or of the default one.

    Raises BackendError, which lists the existing ones, if the platform or device is missing.
    """
    found = _backend(platform)
    if not 0 <= index < len(found.devices):
        numbers = "0" if len(found.devices) == 1 else f"0 to {len(found.devices) - 1}"
        raise BackendError(
            f"no device {index} on backend '{found.platform}'; it has {_count(found)}: {numbers}",
            _host_devices_hint(found, index),
        )
    return found.devices[index]


def _backend(platform: str | None) -> Backend:
    there = backends()
    if platform is None:
        return there[0]
    wanted = platform.lower()
    names = ALIASES.get(wanted, (wanted,))
    for candidate in there:
        if candidate.platform.lower() in names:
            return candidate
    has = ", ".join(f"{b.platform} ({_count(b)})" for b in there)
    raise BackendError(
        f"no backend '{platform}' on this machine; it has: {has}",
        _why_missing(wanted)
        if wanted in KNOWN
        else did_you_mean(wanted, [*KNOWN, *(b.platform for b in there)]) or _why_missing(wanted),
    )


def _count(backend: Backend) -> str:
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


def _host_devices_hint(backend: Backend, index: int) -> str | None:
    if backend.platform != "cpu" or index < 0:
        return None
    flag = f"--xla_force_host_platform_device_count={index + 1}"
    return f"XLA_FLAGS={flag} creates {index + 1} devices on one CPU"


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
