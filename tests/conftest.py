"""Configure JAX, hypothesis and pytest: quiet, deterministic, on eight CPU devices.

JAX is configured without importing it where possible, so that tests of code that must not import it
can run in the same process. Hence environment variables and not `jax.config`.

`pytest` leaves out the proofs: what is tested on many programs, on all pages, or in processes of
its own. A test is a proof if the name of its file has the word, if it tests the programs of proofs,
if it asks for the fixture `processes`, or if it has the mark. `pytest --all` runs them too. A file
that is named runs whole.
"""

import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from tests import cpu_times, share

# Tests run on the CPU whatever the machine has. Tests of other backends name them explicitly.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several workers may compile for TPUs that the machine lacks.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Otherwise, a callback that reads its arguments while its program holds the device would deadlock.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
# Thousands of tiny programs are compiled and run once each, so only compile time matters.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Workers, and runs, share compilations. JAX's key includes the program, the options and the device,
# so that a cached program is the one that would be compiled.
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


#: Above this resident memory in bytes, JAX's caches are cleared. Below, tests reuse compilations of
#: earlier tests. Memory that is not returned to the system does not count again.
_most_memory = 3 * 2**30

#: The threshold of garbage collection: JAX's traces make many small objects, few of them in cycles.
_THRESHOLD = (50_000, 20, 50)


def pytest_addoption(parser):
    group = parser.getgroup("jaxprtool")
    group.addoption("--all", action="store_true", help="run the proofs too")
    group.addoption(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="run one proof of N, chosen by its name and the JAX release",
    )
    group.addoption(
        "--dearest",
        action="store_true",
        help="list the dearest tests, and fail if one that is no proof takes too long",
    )


def pytest_configure(config):
    config.pluginmanager.register(cpu_times)  # for the tests of plug-ins too


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without garbage collection, which takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(*_THRESHOLD)
        gc.freeze()  # modules are permanent, so garbage collections can skip them


def _has_proofs(path: Path) -> bool:
    """Return True if the place of a file of tests says that they are proofs."""
    folder = Path(__file__).parent
    return "proof" in path.name or any(
        path.is_relative_to(folder / n) for n in ("programs", "sweep")
    )


def _leaves_proofs_out(config) -> bool:
    """Return True unless proofs are asked for, or other tests than usual: `pytest -m sweep`."""
    return not config.option.all and "not sweep" in config.option.markexpr


def pytest_ignore_collect(collection_path, config):
    is_proof = collection_path.suffix == ".py" and _has_proofs(collection_path)
    return True if is_proof and _leaves_proofs_out(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the proofs, and leave them out."""
    chosen, proofs, left_out = [], [], _leaves_proofs_out(config)
    for item in items:
        if _has_proofs(item.path) or "processes" in item.fixturenames:
            item.add_marker("proof")
        is_proof = item.get_closest_marker("proof") is not None
        is_named = item.session.isinitpath(item.path)
        is_left_out = left_out or not _is_sampled(item, config.option.sample)
        (proofs if is_proof and is_left_out and not is_named else chosen).append(item)
    if proofs:
        config.hook.pytest_deselected(items=proofs)
        items[:] = chosen


def _is_sampled(item, count: int) -> bool:
    """Return True if a proof is in the sample of one in `count`, another one on each release."""
    return (crc32(item.nodeid.encode()) + share.HALF) % count == 0


@pytest.fixture
def processes():
    """Mark a test as a proof, since it starts processes that import JAX."""


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """An empty current folder, whose modules are removed from Python when the test ends.

    If they stayed, Python's path would have the folder of each test that has run, and each
    `functions.py` would need a longer search for a name that no other module has.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - modules:
        # Modules of the library that a test imported first are kept.
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def pytest_runtest_teardown(item, nextitem):
    """Clear JAX's caches between two files if they have grown large."""
    global _most_memory
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and "jax" in sys.modules and _resident_bytes() > _most_memory:
        sys.modules["jax"].clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _most_memory = max(_most_memory, _resident_bytes() + 2**30)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # not Linux
        return 0
