"""The devices of this machine by PJRT platform, and lookup of a device by name.

Platforms have JAX's names (`cpu`, `cuda`, `rocm`, `tpu`, or a plug-in's own name); `gpu` is `cuda`
or `rocm`, whichever this machine has. A query starts all backends known to JAX, which logs each
missing one; here, only a missing backend that was requested is reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
from jax.extend import backend as jax_backend

from jaxprtool import jaxcompat
from jaxprtool.errors import BackendError, did_you_mean

#: Names for any of several platforms.
ALIASES = {"gpu": ("cuda", "rocm")}

#: Valid names, whether or not the machine has these platforms.
KNOWN = ("cpu", "cuda", "gpu", "rocm", "tpu")


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


def backends() -> list[Backend]:
    """Return every backend of this machine, the default one first.

    Raises BackendError if JAX can start none, for instance if JAX_PLATFORMS names a missing one.
    """
    jaxcompat.keep_backend_probing_quiet()
    try:
        clients = jax_backend.backends()
        default = jax_backend.get_backend()
    except RuntimeError as error:
        raise BackendError(_first_line(error), _platforms_hint()) from error
    found = []
    for platform, client in clients.items():
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
        else did_you_mean(wanted, [*KNOWN, *(b.platform for b in there)]),
    )


def _count(backend: Backend) -> str:
    n = len(backend.devices)
    return f"{n} device{'' if n == 1 else 's'}"


def _why_missing(platform: str) -> str | None:
    """Return JAX's message about a known backend that it could not start."""
    if (allowed := os.environ.get("JAX_PLATFORMS")) and platform not in allowed.split(","):
        return _platforms_hint()
    try:
        jax.devices(platform)
    except RuntimeError as error:
        text = _first_line(error).split(" Available backends")[0].rstrip(".")
        return f"JAX reports: {text}" if "failed to initialize" in text else None
    return None


def _platforms_hint() -> str | None:
    allowed = os.environ.get("JAX_PLATFORMS")
    return f"JAX_PLATFORMS is set to '{allowed}' in the environment" if allowed else None


def _host_devices_hint(backend: Backend, index: int) -> str | None:
    if backend.platform != "cpu" or index < 0:
        return None
    flag = f"--xla_force_host_platform_device_count={index + 1}"
    return f"XLA_FLAGS={flag} creates {index + 1} devices on one CPU"


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
