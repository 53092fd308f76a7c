"""The persistent compilation cache of JAX in the user's cache folder.

JAX bounds its cache by a scan of all entries for each new one, which takes longer than compiling
the small kernels of `--verify`. Also, JAX 0.10 adds no entries after a process was killed between
the two files of an entry. Therefore this module enforces the bound, once a day.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxprtool.ir.basics.backends import start_backends

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
        known = (line for line in lines if line.startswith(("flags", "Features")))
        instructions = next(known, instructions)
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
