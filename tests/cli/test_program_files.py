"""Programs in files and pipes, from the command line."""

import importlib
import itertools
import json
import os
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from tests.cli.platforms import lines


def test_opt_writes_a_file_for_show_run_and_opt(cli, folder):
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "-o", "w.jaxpr")
    assert (result.code, result.out) == (0, "")
    shown = cli("show", "w.jaxpr")
    assert shown.out == cli("opt", "functions.py:wasteful", "-p", "dce").out
    assert "primitive" in cli("show", "w.jaxpr", "--stats").out
    ran = cli("run", "w.jaxpr", "--args", "ones(f32[2])")
    assert ran.code == 0 and "0.5403" in ran.out
    assert cli("opt", "w.jaxpr", "-p", "dce").out == shown.out


def test_programs_go_through_pipes(cli, folder, monkeypatch):
    first = cli("opt", "functions.py:wasteful", "-o", "-")
    assert first.out.startswith("jaxprtool 2\n")
    with open("piped", "w") as file:
        file.write(first.out)
    with open("piped") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        second = cli("opt", "-", "-p", "dce")
    assert second.code == 0
    assert second.out == cli("opt", "functions.py:wasteful", "-p", "dce").out


def test_several_programs_go_into_a_folder(cli, folder):
    (folder / "halves.py").write_text(
        "import jaxprtool\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "@dataclass(frozen=True)\n"
        "class Halves(jaxprtool.Pass):\n"
        "    '''Give the program twice.'''\n"
        "    name: ClassVar[str] = 'cli_file_halves'\n"
        "    def __call__(self, program):\n"
        "        return jaxprtool.Programs({'left': program, 'right': program})\n"
        "jaxprtool.register(Halves)\n"
    )
    arguments = ("opt", "functions.py:double", "--plugin", "halves.py", "-p", "cli_file_halves")
    refused = cli(*arguments, "-o", "one.jaxpr")
    assert (
        refused.code == 2
        and "takes one program, but the passes returned left, right" in refused.err
    )
    assert "-o one/" in refused.err and not os.path.exists("one.jaxpr")
    assert cli(*arguments, "-o", "both/").code == 0
    left, right = (jaxprtool.read(f"both/{name}.jaxpr") for name in ("left", "right"))
    assert jaxprtool.equivalent(left, right)


def test_stats_still_come_on_stderr_when_the_program_goes_to_a_file(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--stats", "-o", "w.jaxpr")
    assert result.out == "" and "dce" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "nowhere/w.jaxpr"), "cannot write 'nowhere/w.jaxpr'"),
        (("-o", ""), "the path to write to is empty"),
        (("-o", "functions.py/"), "cannot create the folder 'functions.py/'"),
        (("-o", "-", "--json"), "cannot both write to stdout"),
        (
            ("-o", "functions.py"),
            "opt writes .jaxpr and .html files, but -o names 'functions.py'",
        ),
    ],
)
def test_an_unwritable_place_is_a_one_line_error(cli, arguments, message):
    result = cli("opt", "functions.py:double", *arguments)
    assert result.code == 2 and message in result.err
    assert result.lines[-1 if "hint" not in result.err else -2].startswith("error: ")


def test_a_program_with_a_callback_is_refused_and_no_file_is_left(cli, folder):
    before = sorted(os.listdir())
    result = cli("opt", "functions.py:callback", "-o", "c.jaxpr")
    assert result.code == 2
    assert "pure_callback" in result.err and "functions.py:" in result.err
    assert sorted(set(os.listdir()) - {"__pycache__"}) == sorted(set(before) - {"__pycache__"})


def test_callbacks_are_written_as_stubs_on_request(cli, folder):
    refused = cli("opt", "functions.py:callback", "-o", "c.jaxpr")
    assert "--callbacks stub" in refused.lines[-1] and "-p drop_checks" in refused.lines[-1]
    assert cli("opt", "functions.py:callback", "-o", "c.jaxpr", "--callbacks", "stub").code == 0
    result = cli("run", "c.jaxpr")
    assert result.code == 3
    assert result.lines[-1].startswith(
        "error: callback raised RuntimeError: the function functions"
    )
    assert ".callback.<locals>.fail was omitted" in result.lines[-1]
    assert cli("opt", "c.jaxpr", "-o", "again.jaxpr").code == 0


def test_an_unsupported_program_is_refused_before_verification(cli, folder, monkeypatch):
    monkeypatch.setattr("jaxprtool.commands.compare.verify.Runs.compare", None)
    result = cli("opt", "functions.py:callback", "-p", "-O1", "--verify", "-o", "c.jaxpr")
    assert result.code == 2 and "pure_callback" in result.lines[-2]
    assert not os.path.exists("c.jaxpr")


def test_a_program_can_be_written_after_a_pass_removes_its_checks(cli, folder):
    arguments = ("opt", "functions.py:debugged", "-o", "d.jaxpr", "--verify")
    assert cli(*arguments, "-p", "dce").code == 2
    assert cli(*arguments, "-p", "dce, drop_checks").lines == [
        "verified: 2 passes on the same inputs"
    ]
    assert cli("run", "d.jaxpr").code == 0


def test_a_program_that_takes_refs_is_a_file_that_every_command_runs(cli, folder):
    (folder / "refs.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(r: jax.Ref, x):\n"
        "    r[...] += jnp.log(x)\n"
        "    return r[...].sum()\n"
        "counter = jax.new_ref(jnp.zeros(()))\n"
        "def count(x):\n"
        "    counter[...] += x\n"
        "    return counter[...]\n"
    )
    arguments = ("--args", "new_ref(zeros(f32[3])), ones(f32[3])")
    ran = cli("run", "refs.py:step", *arguments)
    assert ran.out.splitlines()[:2] == ["result: f32[] 0.", "r[...]: f32[3] [0., 0., 0.]"]
    verified = cli("opt", "refs.py:step", *arguments, "-O2", "--verify", "-o", "step.jaxpr")
    assert (verified.code, "verified" in verified.err) == (0, True)
    for given in (arguments, ("--args", "zeros(f32[3]), ones(f32[3])")):
        assert cli("run", "step.jaxpr", *given).out.splitlines()[:2] == ran.out.splitlines()[:2]
    assert "r, x filled with random values" in cli("run", "step.jaxpr").err
    assert "no equation makes" in cli("nans", "step.jaxpr", *arguments).out
    assert (
        "reaches result, r[...]" in cli("nans", "step.jaxpr", "--args", "f32[3], zeros(f32[3])").out
    )
    assert "jnp.log(x)" in cli("watch", "step.jaxpr", *arguments).out
    for target in ("step.jaxpr", "refs.py:step"):
        compared = cli("compare", target, *arguments, "-p", "", "-p", "-O1", "--op-by-op")
        assert compared.out.count("2 results, bitwise equal") == 3
    compared = cli("compare", "refs.py:count", "--args", "1.0", "-p", "", "-p", "-O1")
    assert "2 results, bitwise equal" in compared.out
    refused = cli("run", "step.jaxpr", "--args", "f32[3], new_ref(f32[3])")
    assert "error: argument 'x' is a Ref, but the program takes f32[3]" in refused.lines
    hint = 'pass them, e.g. --args "new_ref(f32[8,128]), f32[8,128]"'
    assert hint in cli("show", "refs.py:step").err


# --- programs with opaque equations ---------------------------------------------------------------

KERNEL = """
    from dataclasses import dataclass

    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    @dataclass(frozen=True)
    class Options:
        stages: int = 2

    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    @jax.jit
    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = pl.pallas_call(double, shape, compiler_params=Options(), interpret=True)(x)
        return jnp.tanh(y).sum()
"""

#: Commands that only look at a program, or rewrite what is around an opaque equation.
LOOKING = """
    show run/step
    show run/step --format tree
    show run/step --format table
    show run/step --json
    show run/step -o page.html
    source run/step
    cost run/step
    memory run/step
    lint run/step
    outline run/step
    why run/step x
    diff run/step run/step
    report run/step -o report.html
    opt run/step -p -O2
    emit run/step --to jaxpr
    emit run/step --to dot
"""

#: Commands that run, compile or differentiate it.
RUNNING = """
    run run/step
    nans run/step
    watch run/step
    bench run/step
    profile run/step
    determinism run/step
    cost run/step --compiled
    memory run/step --compiled
    residuals run/step
    opt run/step -p grad
    vmap run/step --axis-size 2
    emit run/step --to hlo
    emit run/step --to python
"""


def test_commands_enable_the_64_bit_types_that_a_recorded_script_had(cli, folder):
    with jax.enable_x64(True), jaxprtool.record("run"):

        @jax.jit
        def step(x):
            return x.sum()

        step(jnp.ones(3))
    assert "f64[3]" in cli("show", "run/step").out
    assert cli("diff", "run/step", "run/step").code == 0
    assert cli("show", "functions.py:wasteful").code == 0 and not jax.config.jax_enable_x64


@pytest.mark.proof
def test_a_recorded_step_with_a_kernel_is_a_target_of_all_but_what_runs_it(
    cli, folder, monkeypatch
):
    monkeypatch.syspath_prepend(folder)
    (folder / "kernel.py").write_text(textwrap.dedent(KERNEL))
    with jaxprtool.record("run"):
        importlib.import_module("kernel").step(jnp.ones((8, 128)))
    results = {line: cli(*line.split()) for line in lines(LOOKING)}
    assert not [(line, result.err) for line, result in results.items() if result.code]
    for line, result in list(results.items())[:3]:
        assert result.out.count("# opaque: cannot be run here") == 1, line
    assert "opaque: cannot be run here" in (folder / "page.html").read_text()
    for line in lines(RUNNING):
        result = cli(*line.split())
        assert result.code == 2, (line, result)
        assert re.match(r"error: .*pallas_call at kernel\.py:\d+", result.lines[0]), result.lines


#: A computation that runs one operation, or call, after another of this kind.
TWICE = """
{0} {{
  x = f32[4]{{0}} parameter(0)
  y = f32[4]{{0}} {1}(x){2}
  ROOT z = f32[4]{{0}} {1}(y){2}
}}
"""


@pytest.mark.parametrize("schedule", ["", ", is_scheduled=true"], ids=["before", "scheduled"])
def test_computations_that_each_call_another_twice_are_read_once(cli, tmp_path, schedule):
    names, file = [*(f"c{number}" for number in range(39)), "ENTRY main"], tmp_path / "calls.hlo"
    bodies = [TWICE.format("c0", "tanh", "")]
    bodies += [TWICE.format(b, "call", f", to_apply={a}") for a, b in itertools.pairwise(names)]
    file.write_text(f"HloModule calls{schedule}\n" + "".join(bodies))
    assert cli("show", str(file)).out.count(" = tanh") == 2
    cost = json.loads(cli("cost", str(file), "--json").out)
    assert cost["total"]["transcendentals"] == 4 * 2**40
    assert cli("diff", str(file), str(file), "--kernels").code == 0
    assert cli("report", str(file), "-o", str(tmp_path / "page.html")).code == 0
    assert cli("memory", str(file)).code == (0 if schedule else 2)
