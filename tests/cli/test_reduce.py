"""`jaxprtool reduce` writes the smallest program for which a check holds, and a script of it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import jaxprtool

FUNCTIONS = """
    import jax, jax.numpy as jnp

    def chain(x):
        for _ in range(20):
            x = jnp.tanh(x) + 1.0
        y = jnp.log(jnp.sin(x) * 0.0)
        return (y - y).sum() + x.sum()

    def case():
        return chain, (jnp.ones(3),)

    def zero(x):
        y = jnp.log(jnp.tanh(x) * 0.0)
        return y - y

    def nan_case():
        return zero, (1.0,)
"""

CASE = "reduce", "deep.py:case", "--factory"


@pytest.fixture(autouse=True)
def deep(folder):
    (folder / "deep.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_a_nan_ends_as_a_script_that_fails_by_itself(cli, folder):
    case = "reduce", "deep.py:nan_case", "--factory"
    found = cli(*case, "--check", "nan", "-o", "small.jaxpr")
    assert found.code == 0 and "note: reduced 4 equations to " in found.err
    program = jaxprtool.read("small.jaxpr")
    assert len(program.jaxpr.eqns) <= 2
    done = subprocess.run([sys.executable, "small.py"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "it gives NaN\n"


def test_the_json_of_a_command_that_is_asked(cli):
    found = cli(*CASE, "--check", "grep -q 'sin ' {}", "--json")
    document = json.loads(found.out)
    assert document["equations_before"] == 47 and document["equations_after"] == 1
    assert 5 < document["tries"] < 40 and document["seconds"] > 0 and document["smaller"]


def test_what_is_wrong_with_a_check_is_one_line(cli):
    refused = cli(*CASE, "--check", "echo never >&2; false {}")
    assert refused.code == 2 and refused.err.endswith(
        "error: the check does not hold for the program as it was given: exit status 1: never\n"
    )
    assert cli(*CASE, "--check", "crush").err.splitlines()[-1] == "hint: did you mean 'crash'?"
    assert cli(*CASE).err.startswith("error: --check says what is to be kept")
    assert cli(*CASE, "--check", "nan", "-o", "x.py").err.startswith("error: -o takes FILE.jaxpr")


@pytest.mark.sweep
def test_ctrl_c_writes_the_smallest_so_far(folder):
    # The command hangs from the moment on that the program has been cut.
    check = "test $(wc -l < {}) -gt 30 || sleep 300; touch tried; grep -q 'sin ' {}"
    command = [sys.executable, "-m", "jaxprtool", *CASE, "--check", check, "-o", "small.jaxpr"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not os.path.exists("tried") and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130 and "warning: interrupted: this is the smallest so far" in said
    assert "sin" in str(jaxprtool.read("small.jaxpr").jaxpr)


BROKEN = """
    from jaxprtool import Pass

    class Broken(Pass):
        \"\"\"Fail on a sine.\"\"\"

        name = "broken"

        def __call__(self, program):
            if any(eqn.primitive.name == "sin" for eqn in program.jaxpr.eqns):
                raise KeyError("no sines")
            return program
"""


def test_a_pass_that_fails_leaves_a_reproducer_which_reduce_takes(cli, folder):
    (folder / "broken.py").write_text(textwrap.dedent(BROKEN))
    plugin = "--plugin", "broken.py"
    failed = cli("opt", *CASE[1:], "-p", "dce, broken", *plugin, "--reproducer", "bad")
    assert failed.code != 0 and "note: the program before broken is in bad" in failed.err
    about = json.loads((folder / "bad" / "reproducer.json").read_text())
    assert about["check"] == "error -p broken" and about["versions"].keys() >= {"jax", "jaxlib"}
    found = cli("reduce", "bad", "--json")
    assert json.loads(found.out)["equations_after"] == 1
    assert cli("reduce", ".").err.startswith("error: there is no reproducer in '.'")
    again = cli("opt", *CASE[1:], "--reproducer", "bad")
    assert again.err == "error: --reproducer takes a new folder, and 'bad' is there\n"


def test_a_run_that_ends_well_leaves_no_reproducer(cli, folder):
    assert cli("run", *CASE[1:], "--repeat", "0", "--reproducer", "bad").code == 0
    assert not (folder / "bad").exists()
    assert cli("run", "functions.py:callback", "--reproducer", "bad").code == 3
