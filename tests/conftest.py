"""How JAX and hypothesis run under the tests: quiet, deterministic, on eight CPU devices.

JAX is configured without being imported where that can be had, so that tests of what must not
import it can run in the same process; hence environment variables and not `jax.config`.
"""

import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests run on the CPU whatever the machine has; those of other backends ask for them by name.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A callback that reads its arguments while its own program holds the device would wait for ever.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
# Thousands of tiny programs are compiled and each runs once: compile time is all that counts.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Workers, and runs, share what they compile. JAX's key holds the program, the options and the
# device, so that what is found is what would be compiled.
_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxprtool-tests"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache / f"xla-{version('jaxlib')}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

_COMMON = {
    "deadline": None,
    "derandomize": True,
    "print_blob": False,
    "database": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
}
settings.register_profile("default", max_examples=40, **_COMMON)
settings.register_profile("sweep", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


#: Above so many bytes of resident memory, JAX forgets what it has traced and compiled. Below,
#: tests find what others before them have compiled.
_MOST_MEMORY = 3 * 2**30

#: How often garbage is looked for: JAX traces and lowers by many small objects, few in cycles.
_THRESHOLD = (50_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without looking for garbage, which takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(*_THRESHOLD)
        gc.freeze()  # modules stay: no search for garbage need look at them


def pytest_runtest_teardown(item, nextitem):
    """Clear JAX's caches between two files where they have grown large."""
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and "jax" in sys.modules and _resident_bytes() > _MOST_MEMORY:
        sys.modules["jax"].clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # not Linux
        return 0
