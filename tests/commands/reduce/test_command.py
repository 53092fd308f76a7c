"""`jaxprtool reduce` writes the smallest program for which a check holds, and a script for it."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import jaxlib
import pytest

import jaxprtool
from tests.share import on_one_release

FUNCTIONS = """
    import jax, jax.numpy as jnp

    def chain(x):
        for _ in range(5):
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


@pytest.mark.usefixtures("processes")
def test_a_nan_is_reduced_to_a_script_that_fails_on_its_own(cli, folder):
    (folder / "small.py").write_text('"""`f`, written as Python from its jaxpr by jaxprtool.\n"""')
    case = "reduce", "deep.py:nan_case", "--factory"
    found = cli(*case, "--check", "nan", "-o", "small.jaxpr")
    assert found.code == 0 and "note: reduced 4 equations to " in found.err
    program = jaxprtool.read("small.jaxpr")
    assert len(program.jaxpr.eqns) <= 2
    done = subprocess.run([sys.executable, "small.py"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "the result has NaN\n"


@on_one_release
def test_a_command_as_check_can_return_json(cli):
    found = cli(*CASE, "--check", "grep -q 'sin ' {}", "--json")
    document = json.loads(found.out)
    assert document["equations_before"] == 17 and document["equations_after"] == 1
    assert 5 < document["tries"] < 40 and document["seconds"] > 0 and document["smaller"]


@on_one_release
def test_an_invalid_check_is_a_one_line_error(cli):
    refused = cli(*CASE, "--check", "echo never >&2; false {}")
    assert refused.code == 2 and refused.err.endswith(
        "error: the check does not hold for the original program: exit status 1: never\n"
    )
    assert cli(*CASE, "--check", "crush").err.splitlines()[-1] == "hint: did you mean 'crash'?"
    assert cli(*CASE).err.startswith("error: --check is missing")
    refused = cli(*CASE, "--check", "nan", "-o", "x.py")
    assert refused.err.startswith("error: -o takes FILE.jaxpr or FILE.mlir")


@pytest.mark.usefixtures("processes")
def test_a_module_is_reduced_to_a_module(cli):
    assert cli("emit", *CASE[1:], "--source", "-o", "deep.mlir").code == 0
    check = "grep -q stablehlo.sine {mlir} && grep -q 'sin ' {}"
    found = cli("reduce", "deep.mlir", "--check", check, "-o", "small.mlir")
    assert found.code == 0 and "note: reduced 17 equations to 1 in " in found.err
    text = Path("small.mlir").read_text()
    assert text.count(" stablehlo.") == 1 and 'loc("deep.py":7:' in text
    (eqn,) = jaxprtool.read("small.mlir").jaxpr.eqns
    assert eqn.primitive.name == "sin" and os.path.exists("small.py")


WRONG = """
    from jax import lax
    from jaxprtool import Pass
    from jaxprtool.extend import map_equations

    class Wrong(Pass):
        "Take the product of arrays of seven elements for their difference."

        name = "wrong"

        def __call__(self, program):
            def rule(eqn):
                is_wrong = eqn.primitive.name == "sub" and eqn.outvars[0].aval.shape == (7,)
                return [eqn.replace(primitive=lax.mul_p)] if is_wrong else None

            return program.replace(jaxpr=map_equations(program.jaxpr, rule))
"""


def long_program(operation=lambda x, y: x - y):
    """Return a program of 3,000 operations, one of which is on arrays of seven elements."""

    def model(x):
        for i in range(500):
            x = jnp.sin(x) + jnp.tanh(x) * x - jnp.cos(x)
            if i == 250:
                x = jnp.append(operation(x[:7], x[1:]), x[7:])
        return x

    return jaxprtool.trace(model, jnp.ones(8))


@pytest.mark.sweep
def test_a_wrong_rewrite_is_found_in_a_module_of_3000_operations(cli, folder):
    jaxprtool.write(long_program(), "right.jaxpr")
    jaxprtool.write(long_program(lambda x, y: x * y), "wrong.jaxpr")
    for name in ("right", "wrong"):
        assert cli("emit", f"{name}.jaxpr", "-o", f"{name}.mlir").code == 0
        (folder / f"{name}.jaxpr").unlink()
    lines = (folder / "right.mlir").read_text().splitlines()
    assert sum(" = stablehlo" in line for line in lines) > 3000
    (place,) = [i for i, line in enumerate(lines, 1) if "subtract" in line and "7xf32" in line]

    compared = cli("compare", "right.mlir", "wrong.mlir", "--bisect")
    assert compared.code == 1 and "differs from right.mlir at sub\nright.mlir:" in compared.out
    assert f"right.mlir:{place}\n" in compared.out or f"right.mlir:{place} " in compared.out

    (folder / "wrong.py").write_text(textwrap.dedent(WRONG))
    check = "mismatch -p wrong"
    found = cli(
        "reduce", "right.mlir", "--plugin", "wrong.py", "--check", check, "-o", "small.mlir"
    )
    assert found.code == 0, found.err
    assert (folder / "small.mlir").read_text().count(" = stablehlo") <= 5
    assert subprocess.run([sys.executable, "small.py"], capture_output=True).returncode == 1


def test_the_script_does_not_shadow_a_module_of_the_user(cli, folder):
    before = (folder / "deep.py").read_text()
    refused = cli(*CASE, "--check", "grep -q 'sin ' {}", "-o", "deep.jaxpr")
    assert refused.code == 2 and refused.err.startswith(
        "error: -o deep.jaxpr would overwrite deep.py, which jaxprtool did not write\n"
    )
    assert (folder / "deep.py").read_text() == before


@pytest.mark.sweep
def test_ctrl_c_writes_the_smallest_so_far(folder):
    # The command hangs once the program has been reduced.
    check = "test $(wc -l < {}) -gt 15 || sleep 300; touch tried; grep -q 'sin ' {}"
    command = [sys.executable, "-m", "jaxprtool", *CASE, "--check", check, "-o", "small.jaxpr"]
    child = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not os.path.exists("tried") and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, message = child.communicate(timeout=60)
    assert (
        child.returncode == 130
        and "warning: interrupted: this is the smallest program so far" in message
    )
    assert "sin" in str(jaxprtool.read("small.jaxpr").jaxpr)


STUCK = """
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    from jax.sharding import Mesh, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))

    def norm(x):
        first = lax.axis_index("data") == 0
        x = lax.cond(first, lambda x: lax.pmean(x, "data"), lambda x: x, jnp.sin(x @ x.T))
        return jnp.tanh(x) * 2.0

    def step(x):
        return jnp.cos(jax.shard_map(norm, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                                     check_vma=False)(x)).sum()
"""


@pytest.mark.sweep
def test_a_crash_of_xla_on_two_devices_is_reduced_to_a_script_that_crashes_too(folder):
    # One device waits for the other, which has taken another branch, until XLA aborts.
    (folder / "stuck.py").write_text(textwrap.dedent(STUCK))
    flags = ("warn_stuck", "terminate")
    flags = " ".join(f"--xla_cpu_collective_call_{each}_timeout_seconds=1" for each in flags)
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "2"}
    target = "stuck.py:step", "--args", "f32[4,3]"
    command = [sys.executable, "-m", "jaxprtool", "reduce", *target, "--check", "crash"]
    found = subprocess.run([*command, "-o", "small.jaxpr"], env=env, capture_output=True, text=True)
    assert found.returncode == 0 and "note: first seen: SIGABRT" in found.stderr
    assert re.search("to [2-7] in", found.stderr)
    alone = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run([sys.executable, "small.py"], env=alone, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT and "Expected 2 threads to join" in done.stderr


SUMMED = """
    import jax.numpy as jnp

    def loss(ws, x, table):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        table = table * (table + x.mean())
        return jnp.tanh(table.sum(3)).mean() + x.sum()
"""


@pytest.mark.sweep
@pytest.mark.skipif(jaxlib.__version__ != "0.10.2", reason="mended in later ones")
def test_a_gradient_is_reduced_to_the_two_equations_that_crash_xla(folder):
    # jax-ml/jax#40412
    (folder / "summed.py").write_text(textwrap.dedent(SUMMED))
    types = "f32[6,8,8], f32[4,8], f32[3,1,2,2,8,8,8]"
    command = [sys.executable, "-m", "jaxprtool", "reduce", "summed.py:loss", "--args", types]
    command += ["-p", "grad", "--check", "crash", "-o", "small.jaxpr"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0 and "note: first seen: SIGSEGV" in found.stderr
    small = jaxprtool.read("small.jaxpr").jaxpr
    assert [eqn.primitive.name for eqn in small.eqns] == ["mul", "reduce_sum"]
    assert (folder / "small.py").stat().st_size < 2000  # its arguments are zeros
    assert subprocess.run([sys.executable, "small.py"]).returncode == -signal.SIGSEGV


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


@on_one_release
def test_a_pass_that_fails_leaves_a_reproducer_which_reduce_takes(cli, folder):
    (folder / "broken.py").write_text(textwrap.dedent(BROKEN))
    plugin = "--plugin", "broken.py"
    failed = cli("opt", *CASE[1:], "-p", "dce, broken", *plugin, "--reproducer", "bad")
    assert failed.code != 0 and "note: the program before broken is in bad" in failed.err
    about = json.loads((folder / "bad" / "reproducer.json").read_text())
    assert about["check"] == "error -p broken" and about["versions"].keys() >= {"jax", "jaxlib"}
    found = cli("reduce", "bad", "--json")
    assert json.loads(found.out)["equations_after"] == 1
    assert cli("reduce", ".").err.startswith("error: no reproducer in '.'")
    again = cli("opt", *CASE[1:], "--reproducer", "bad")
    assert again.err == "error: --reproducer takes a new folder, but 'bad' exists\n"


def test_a_successful_run_leaves_no_reproducer(cli, folder):
    assert cli("run", *CASE[1:], "--repeat", "0", "--reproducer", "bad").code == 0
    assert not (folder / "bad").exists()
    assert cli("run", "functions.py:callback", "--reproducer", "bad").code == 3


def test_an_unwritable_file_is_reported_before_the_search(cli):
    found = cli(*CASE, "--check", "false {}", "-o", "nowhere/x.jaxpr")
    assert found.err.startswith("error: cannot write 'nowhere/x.jaxpr': folder '")


@pytest.mark.parametrize("written", ["[]", "{}", '{"check": "crash"}', "crash"])
def test_an_invalid_reproducer_is_a_one_line_error(cli, folder, written):
    (folder / "bad").mkdir()
    assert "hint: opt and run write one with --reproducer" in cli("reduce", "bad").err
    (folder / "bad" / "reproducer.json").write_text(written)
    found = cli("reduce", "bad")
    assert found.code == 2 and "reproducer.json' is not a reproducer: " in found.err


@on_one_release
def test_a_program_with_callbacks_is_reduced_with_stubs(cli, folder):
    functions = """
        import jax, jax.numpy as jnp

        def asked(x):
            y = jax.pure_callback(lambda x: x, x, jnp.sort(x))
            return jnp.sin(y).sum() + jnp.cos(x).sum()
    """
    (folder / "asked.py").write_text(textwrap.dedent(functions))
    case = "asked.py:asked", "--args", "f32[4]"
    found = cli("reduce", *case, "--check", "grep -q pure_callback {}", "-o", "small.jaxpr")
    assert found.code == 0 and " equations to 1 in " in found.err
    assert "was omitted" in (folder / "small.py").read_text()
    (folder / "broken.py").write_text(textwrap.dedent(BROKEN))
    command = "opt", *case, "-p", "broken", "--plugin", "broken.py", "--reproducer", "bad"
    assert "note: the program before broken is in bad" in cli(*command).err
    assert cli("reduce", "bad", "-o", "smaller.jaxpr").code == 0


@on_one_release
def test_a_program_on_which_a_pass_fails_is_reduced(cli, folder):
    plugin = """
    from dataclasses import dataclass
    from typing import ClassVar
    import jaxprtool

    @dataclass(frozen=True)
    class NoTanh(jaxprtool.Pass):
        "Fail on tanh."
        name: ClassVar[str] = "no_tanh"
        def __call__(self, program):
            if "tanh" in {eqn.primitive.name for eqn in program.jaxpr.eqns}:
                raise ValueError("a tanh is here")
            return program
    """
    (folder / "plugin.py").write_text(textwrap.dedent(plugin))
    passes = "-p", "no_tanh", "--plugin", "plugin.py"
    found = cli(*CASE, "--check", "error 'tanh is here'", *passes, "--json")
    assert json.loads(found.out)["equations_after"] == 1
    assert cli(*CASE, "--check", "nan", *passes).code == 2
