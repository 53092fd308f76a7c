"""What XLA has compiled, kept from one start to the next: JAX's own cache, in the user's folder.

JAX bounds its cache by going through all of it whenever it adds an entry, which takes longer than
to compile the small kernels that `--verify` runs; and where a process was killed between the two
files of an entry, 0.10 adds no more. So the bound is kept here, once a day.
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

#: The settings of JAX that the functions here change.
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)

#: Bytes that all entries may take; beyond it the least recently used ones go.
LIMIT = 2**30

#: Seconds between two looks at how much there is.
_INTERVAL = 24 * 60 * 60

#: The file by which backup tools know a cache; its age is that of the last look.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# What XLA has compiled, by jaxprtool.\n"


def keep_compiled() -> None:
    """Have JAX keep what it compiles in the user's cache folder.

    A cache that JAX is told of already (`JAX_COMPILATION_CACHE_DIR`), or is told to do without,
    stays as it is.

    Raises:
        OSError: If the folder cannot be written.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    import platformdirs  # which only who runs something needs

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
    """Have JAX read and keep nothing that is compiled."""
    _enable(False)


@contextmanager
def compiled_afresh() -> Iterator[None]:
    """Have what is compiled within take the time that it takes: JAX's persistent cache is off.

    What the backend needs to compile anything at all is done before.
    """
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
    """Have JAX look again where what it compiles is kept: it asks only once."""
    compilation_cache.reset_cache()


def prune(folder: Path, limit: int) -> None:
    """Remove the least recently used files of a folder if all of them take more than `limit`.

    A quarter of the limit is then free, also while others read and write there.
    """
    files = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process has removed it
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
    """Give a function that counts what JAX has had from its cache within, instead of compiling."""
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
    """Return a name for processors that understand the same instructions, as XLA emits them.

    JAX's key does not say for which processor a program was compiled, and home folders are shared.
    """
    instructions = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = (line for line in lines if line.startswith(("flags", "Features")))
        instructions = next(known, instructions)
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
