"""The plug-in in runs of pytest: fixtures, the option, tracebacks, and its import time."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from jaxprtool.testing.places import TestPlace
from tests.share import on_one_release

pytest_plugins = "pytester"

TESTS = """
import jax, jax.numpy as jnp
from jaxprtool.testing import assert_budget

def loss(x):
    return (jnp.tanh(x) ** 2).sum()

class TestLoss:
    def test_snapshot(self, jaxpr_snapshot):
        jaxpr_snapshot(loss, jnp.ones(3))

def test_budget():
    assert_budget(loss, jnp.ones(3), equations=1)

def test_error():
    assert_budget(loss, jnp.ones(3), equatoins=1, flops="many")

def test_compiles_again(jax_compiles):
    step = jax.jit(lambda x: x + 1)
    step(jnp.ones(3))
    with jax_compiles(at_most=0):
        step(jnp.ones(3))
    with jax_compiles(at_most=0):
        step(jnp.ones(4))

def test_compiles_once(jax_compiles):
    step = jax.jit(lambda x: x + 2)
    with jax_compiles(at_most=1):
        for _ in range(3):
            step(jnp.ones(3))

def test_raises(jax_compiles):
    with jax_compiles(at_most=0):
        jax.jit(lambda x: x)(1.0)
        raise KeyError("mine")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest with only this plug-in, since others take long to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*options):
        plugin = "jaxprtool.testing.pytest_plugin"
        return pytester.runpytest_subprocess("-p", plugin, "-p", "no:cacheprovider", *options)

    return run


@on_one_release
def test_fixtures_and_assertions_in_a_run(pytester, run):
    pytester.makepyfile(test_model=TESTS)
    result = run()
    result.assert_outcomes(passed=1, failed=5)
    text = result.stdout.str()
    assert "has no snapshot __jaxprs__/test_model/TestLoss.test_snapshot.jaxpr" in text
    assert "loss has 3 equations, but the budget is 1 equation" in text
    assert "got an unexpected keyword argument 'equatoins'" in text
    assert "the block compiled 1 program, but the budget is 0 programs" in text
    assert "x: f32[3] → f32[4] at test_model.py:23" in text
    assert "KeyError: 'mine'" in text
    # Failures show the test, without frames of ours or of the standard library.
    places = [each for each in result.stdout.lines if ": AssertionError" in each]
    assert places == [
        "test_model.py:9: AssertionError",
        "test_model.py:12: AssertionError",
        "test_model.py:22: AssertionError",
    ]
    assert "contextlib" not in text and "assertions.py" not in text

    result = run("--jaxpr-update", "-k", "snapshot")
    result.assert_outcomes(passed=1, deselected=5)
    assert (pytester.path / "__jaxprs__/test_model/TestLoss.test_snapshot.jaxpr").is_file()


@pytest.mark.proof
def test_collecting_tests_does_not_import_jax(pytester, run):
    pytester.makepyfile(
        test_model="from jaxprtool.testing import __all__\n\ndef test_a(jaxpr_snapshot): pass"
    )
    pytester.makeconftest(
        "import sys\ndef pytest_sessionfinish(): print('JAX', 'jax' in sys.modules)"
    )
    result = run("--collect-only", "-q", "-s")
    result.stdout.fnmatch_lines(["test_model.py::test_a", "JAX False"])


@on_one_release
def test_pytest_finds_the_plugin_and_jaxprtool_does_not_need_pytest():
    (point,) = (each for each in entry_points(group="pytest11") if each.name == "jaxprtool")
    assert point.value == "jaxprtool.testing.pytest_plugin"
    code = "import sys; sys.modules['pytest'] = None; from jaxprtool.testing import *; "
    subprocess.run([sys.executable, "-c", code + "assert_no(abs, 'sin', 1.0)"], check=True)


def test_snapshots_of_tests_have_portable_names(tmp_path):
    place = TestPlace(tmp_path / "test_a.py", "TestA.test_b[x/y:z-f32]")
    assert place.snapshot(place.name).name == "TestA.test_b[x_y_z-f32].jaxpr"
