"""`--no-cache`, and the warnings about an unusable cache."""

import json

import pytest

from tests.execute.running.test_compile_cache import entries, home  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("home")
DOUBLE = "functions.py:double"


def compiled(cli, *options):
    import jax

    jax.clear_caches()
    result = cli("run", DOUBLE, "--json", "--args", "arange(3)", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)["times"]["cached"], warnings(result)


def warnings(result):
    return [line for line in result.lines if line.startswith("warning")]


@pytest.mark.proof
def test_a_second_run_finds_the_compiled_program_in_the_cache(cli):
    assert compiled(cli) == (False, [])
    assert compiled(cli) == (True, [])
    assert "(from the cache)" in cli("run", DOUBLE, "--args", "arange(3)").out
    assert compiled(cli, "--no-cache") == (False, [])


def test_only_commands_that_run_cache_compiled_programs(cli, home):  # noqa: F811
    assert cli("opt", DOUBLE, "-p", "jit").code == 0
    assert not (home / "jaxprtool").exists()
    assert cli("opt", DOUBLE, "-p", "jit", "--verify", "--no-cache").code == 0
    assert not (home / "jaxprtool").exists()


def test_verify_caches_compiled_programs(cli, home):  # noqa: F811
    assert cli("opt", DOUBLE, "-p", "jit", "--verify").code == 0
    assert entries(home)


def test_an_unwritable_folder_is_one_warning(cli, home):  # noqa: F811
    (home / "jaxprtool").write_text("no folder")
    cached, warned = compiled(cli)
    assert not cached and len(warned) == 1
    assert "compiled programs are not cached: " in warned[0]


def test_a_damaged_cache_is_one_warning(cli, home):  # noqa: F811
    assert cli("opt", DOUBLE, "-p", "jit", "--verify").code == 0
    compiled(cli)
    for path in entries(home):
        path.write_bytes(b"damaged")
    import jax

    jax.clear_caches()
    result = cli("opt", DOUBLE, "-p", "jit", "--verify")
    assert result.code == 0
    assert len(warnings(result)) == 1
    assert "JAX's compilation cache failed: " in warnings(result)[0]


@pytest.mark.parametrize(
    ("command", "missing"), [("opt", "--verify"), ("unzip", "--run")], ids=lambda x: x
)
def test_no_cache_is_refused_where_nothing_runs(cli, command, missing):
    result = cli(command, DOUBLE, "--no-cache")
    assert result.code == 2
    assert result.lines[-2:] == [
        f"error: --no-cache needs {missing}",
        f"hint: add {missing}",
    ]
