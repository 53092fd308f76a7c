import os
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxprtool.execute.running import backends
from jaxprtool.execute.running.run import run
from tests.execute.programs import program

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder, and JAX's initial configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (None, True, 1.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def entries(home):
    return [path for path in home.rglob("*") if path.is_file() and "-cache" in path.name]


def cached(constant):
    """Run a program that is unique for each constant, and return whether it was in the cache."""
    jax.clear_caches()
    x = np.arange(3, dtype=np.float32)
    report = run(program(lambda x: x * constant, x), [x], repeat=0)
    np.testing.assert_array_equal(report.outputs[0].value, x * constant)
    return report.times.cached


def test_small_programs_are_compiled_once_too(home):
    backends.keep_compiled()
    assert not cached(3)
    assert cached(3)
    assert not cached(4)
    assert entries(home / "jaxprtool" / "xla")


def test_another_processor_has_its_own_entries(home, monkeypatch):
    backends.keep_compiled()
    own = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(backends.platform, "machine", lambda: "abacus")
    backends.keep_compiled()
    assert jax.config.jax_compilation_cache_dir != own


def test_the_users_jax_configuration_takes_precedence(home):
    jax.config.update("jax_compilation_cache_dir", str(home / "own"))
    backends.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(home / "own")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    backends.keep_compiled()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    backends.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_cache_is_not_used_when_compiling_afresh(home):
    backends.keep_compiled()
    backends.compile_afresh()
    assert not cached(5) and not cached(5)
    assert entries(home) == []


def test_a_folder_that_cannot_be_made_is_an_error(home):
    (home / "jaxprtool").write_text("no folder")
    with pytest.raises(OSError):
        backends.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_least_recently_used_entries_are_removed_first(tmp_path):
    for i in range(8):
        path = tmp_path / "cpu" / f"{i}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 + (i if i != 1 else 50), 1000))  # the second was read last
    backends.prune(tmp_path, 800)
    assert len(entries(tmp_path)) == 8
    backends.prune(tmp_path, 600)
    assert sorted(path.name[0] for path in entries(tmp_path)) == ["1", "5", "6", "7"]


def test_the_size_of_the_folder_is_limited_once_a_day(home, monkeypatch):
    monkeypatch.setattr(backends, "LIMIT", 100)
    backends.keep_compiled()
    folder = home / "jaxprtool" / "xla"
    big = folder / "cpu-cache"
    big.write_bytes(b"x" * 101)
    for age, left in (0, True), (2 * 24 * 60 * 60, False):
        then = time.time() - age
        os.utime(folder / "CACHEDIR.TAG", (then, then))
        jax.config.update("jax_compilation_cache_dir", None)
        backends.keep_compiled()
        assert big.exists() == left
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f0688")
