"""The start of JAX's backends, why one does not start, and the caches of the process.

A plug-in is a module of the namespace package `jax_plugins`, or one that a package names as an
entry point of the group `jax_plugins`. JAX imports each and calls its `initialize()`. It starts all
backends at once, when the first array is made or the first program compiled: a backend that the
user has asked for, usually by JAX_PLATFORMS, must start.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from jax.extend import backend as jax_backend

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    BackendError,
    BackendStartError,
    JaxprToolError,
    described,
    did_you_mean,
    user_traceback,
)
from jaxprtool.jaxcompat import AnyJaxpr

# --- backends -------------------------------------------------------------------------------------
# The start of JAX's backends, why one does not start, and the PJRT plug-ins that are installed.

#: Names for any of several platforms.
ALIASES = {"gpu": ("cuda", "rocm")}

#: Valid names, whether or not the machine has these platforms.
KNOWN = ("cpu", "cuda", "gpu", "rocm", "tpu")

#: Why JAX passes over the platform `cuda` without a word.
NO_NVIDIA_GPU = "no NVIDIA GPU is visible to this process"


# --- The start --------------------------------------------------------------------------------


def start_backends() -> None:
    """Start JAX's backends unless they have started.

    JAX starts them by itself when it needs them, but reports a failure by exceptions of any type.

    Raises:
        BackendError: If a backend that must start does not, or a plug-in breaks JAX.
    """
    try:
        jax_backend.get_backend()
    except Exception as error:  # JAX does not catch exceptions of a plug-in's import
        failure = backend_start_error(error) or _broken_plugin(error)
        if failure is None:
            raise
        raise failure from error


def backend_start_error(error: BaseException) -> BackendStartError | None:
    """Return the error to report if JAX raised an exception because a backend does not start.

    Args:
        error: The exception, or an error of ours that it caused.
    """
    while isinstance(error, JaxprToolError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, AssertionError):
        passed_over = _passed_over_all(error)
        return _failure("cuda", NO_NVIDIA_GPU) if passed_over else None
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).strip().partition("\n")[0]
    if failure := jaxcompat.failure_to_start(text):
        return _failure(*failure)
    default = os.environ.get("JAX_PLATFORM_NAME")
    if default and text.startswith((f"Backend '{default}' failed", "Unknown backend")):
        return _failure(default, re.split(r"\.? (?:Available|Platforms)", text)[0])
    return None


def _passed_over_all(error: AssertionError) -> bool:
    """Return True if JAX raised a bare AssertionError because it passed over all platforms."""
    frames = user_traceback(error)
    is_users = bool(frames) and (frames[-1].line or "").startswith("assert")
    return not (str(error) or is_users or set(asked_platforms()) != {"cuda"})


def _failure(name: str, reason: str) -> BackendStartError:
    near = None if name in KNOWN else did_you_mean(name.strip().lower(), KNOWN)
    where = platforms_hint() or "JAX_PLATFORMS=cpu passes over it"
    return BackendStartError(name, reason, f"{where}; {near}" if near else where)


def _broken_plugin(error: Exception) -> BackendError | None:
    """Return the error for the plug-in whose import broke JAX, if there is one."""
    broken = next((plugin for plugin in plugins() if plugin.import_error), None)
    if broken is None:
        return None
    return BackendError(
        f"JAX cannot start: its plug-in {broken.module} raised {described(error)}",
        f"uninstall {broken.package or broken.module}",
    )


def asked_platforms() -> list[str]:
    """Return the platforms that JAX is told to start, in order; none if it may choose."""
    value = jax.config.jax_platforms
    return value.split(",") if value else []


def platforms_hint() -> str | None:
    """Return a hint that says which variable has chosen JAX's platforms, or None if none has."""
    for variable in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        if value := os.environ.get(variable):
            return f"{variable} is set to '{value}' in the environment"
    return None


# --- Plug-ins ---------------------------------------------------------------------------------

_GROUP = "jax_plugins"


@dataclass(frozen=True)
class Plugin:
    """A plug-in: its module, and the package that it is from with its version, "" if unknown."""

    module: str
    package: str = ""
    version: str = ""

    @property
    def import_error(self) -> str | None:
        """The reason why its module cannot be imported; None if it can."""
        if self.module in sys.modules:
            return None
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a plug-in's module may raise anything
            return described(error)
        return None


def plugins() -> list[Plugin]:
    """Return the installed plug-ins by module."""
    spec = find_spec(_GROUP)
    folders = spec.submodule_search_locations if spec is not None else None
    by_module = {
        module.name: Plugin(module.name)
        for module in pkgutil.iter_modules(folders or [], f"{_GROUP}.")
    }
    for entry in metadata.entry_points(group=_GROUP):
        package = entry.dist.name if entry.dist else ""
        version = entry.dist.version if entry.dist else ""
        by_module[entry.value] = Plugin(entry.value, package, version)
    return [by_module[module] for module in sorted(by_module)]


def not_installed() -> list[str]:
    """Return the backends that JAX tries to start although they are not installed."""
    asked = {"tpu": has_tpu_library(), "proxy": "JAX_BACKEND_TARGET" in os.environ}
    return [name for name, installed in asked.items() if not installed]


def has_tpu_library() -> bool:
    """Return True if the library of TPUs is installed."""
    return find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ


# --- caches ---------------------------------------------------------------------------------------
# The caches of the process, and `clear_caches`, which empties all of them.
#
# Values that passes compute for a jaxpr are kept as long as the jaxpr, so that each is computed
# once, and passes map a shared jaxpr to a shared result. A cache may change how long a pass takes,
# never its result. Every cache that outlives one run of a pass is created here; those of
# `jaxcompat` are listed here.


class Cache(Protocol):
    """An object that can be emptied."""

    def clear(self) -> None:
        """Drop all entries."""


C = TypeVar("C", bound=Cache)
S = TypeVar("S")
R = TypeVar("R")
A = ParamSpec("A")

_caches: list[Cache] = [
    *jaxcompat.CONVERTED,
    jaxcompat.ACCEPTED,
    jaxcompat.ACCEPTED_SIGNATURES,
]


def process_cache(cache: C) -> C:
    """Register `cache` with `clear_caches`, and return it."""
    _caches.append(cache)
    return cache


def clear_caches() -> None:
    """Drop all values that jaxprtool has cached for jaxprs and functions.

    Results are the same afterwards; they are computed again when needed. JAX's own caches stay:
    `jax.clear_caches` drops those.
    """
    for cache in _caches:
        cache.clear()


def anchor(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return the object that identifies a jaxpr.

    In JAX 0.10 each view of an open body closes it again. Only the open jaxpr stays the same
    object.
    """
    return jaxpr if getattr(jaxpr, "consts", ()) else jaxcompat.open_jaxpr(jaxpr)


def cached_method(method: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """Decorate a method to cache its results, by its arguments, as long as its object lives."""
    name = f"results of {method.__name__}"

    @wraps(method)
    def cached(self: S, *args: A.args, **kwargs: A.kwargs) -> R:
        results: dict[Hashable, R] = vars(self).setdefault(name, {})
        key = (*args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return cached


class JaxprCache:
    """Values by jaxpr and by request, each kept as long as its jaxpr.

    A value must not refer to its jaxpr, which would then never be freed.

    Args:
        most: The maximum number of requests cached for one jaxpr. If there are more, the values of
            that jaxpr are dropped.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._by_jaxpr: dict[weakref.ref[AnyJaxpr], dict[Hashable, Any]] = {}
        process_cache(self)

    def of(self, jaxpr: AnyJaxpr) -> dict[Hashable, Any]:
        """Return the values kept for a jaxpr, by request."""
        key = anchor(jaxpr)
        # Written for speed, as most bodies are looked up by each pass: a WeakKeyDictionary takes
        # three times as long. A jaxpr is equal only to itself.
        values = self._by_jaxpr.get(weakref.ref(key))
        if values is None or len(values) > self._most:  # the old dictionary may still be in use
            values = {}
            self._by_jaxpr[weakref.ref(key, self._forget)] = values
        return values

    def clear(self) -> None:
        self._by_jaxpr.clear()

    def _forget(self, key: weakref.ref[AnyJaxpr]) -> None:
        self._by_jaxpr.pop(key, None)
