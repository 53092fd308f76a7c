"""`jaxprtool record`: scripts run unchanged, and the records contain what they traced."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxprtool.cli.main import main
from jaxprtool.ir.source_text import Place
from tests.share import on_one_release

SCRIPT = """
    import os, sys, signal
    import jax, jax.numpy as jnp

    @jax.jit
    def step(x):
        return x * 2

    for size in (3, 4):
        print(step(jnp.ones(size))[0])
    print(sys.argv, __name__, "sitecustomize" in repr(sys.path), sys.stdin.read(), flush=True)
    if "raise" in sys.argv:
        raise ValueError("of the script")
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in sys.argv:
        os._exit(5)
    if "wait" in sys.argv:
        signal.pause()
"""

POOL = """
    import multiprocessing

    def work(scale):
        import jax

        @jax.jit
        def scaled(x):
            return x * scale

        return float(scaled(1.0))

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            print(pool.map(work, [2, 3], chunksize=1))
            pool.close()
            pool.join()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(textwrap.dedent(SCRIPT))
    Path("pool.py").write_text(textwrap.dedent(POOL))
    Path("plain.py").write_text("import sys; print('plain'); sys.exit(4)\n")
    return tmp_path


def jaxprtool(*words, **options):
    command = [sys.executable, "-m", "jaxprtool", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def asked(*words, code=0):
    """Return the output of a command, run in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == code
    return out.getvalue()


def shown(run="run"):
    return json.loads(asked("show", f"{run}/", "--json"))


@pytest.mark.usefixtures("processes")
def test_a_script_runs_as_without_record(folder):
    alone = subprocess.run(
        [sys.executable, "script.py", "--steps", "-x"], capture_output=True, text=True, input="in"
    )
    done = jaxprtool("record", "script.py", "--steps", "-x", input="in")
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    said = done.stderr.splitlines()
    assert said[0].startswith("python script.py --steps -x: ")
    assert "x: f32[3] → f32[4] at script.py:10" in done.stderr
    assert "page: run/index.html" in said
    found = shown()
    (function,) = found["functions"]
    assert function["name"] == "step"
    assert Place.from_json(function["place"]) == "script.py:5"
    first, second = function["compilations"]
    assert first["reasons"] == []
    assert [each["kind"] for each in second["reasons"]] == ["shape"]
    assert min(second[f"{each}_seconds"] for each in ("trace", "lower", "compile")) > 0
    assert Place.from_json(found["outside_jit"][0]["place"]) == "script.py:10"
    assert found["exit_code"] == 0
    assert Path("run/index.html").read_text().startswith("<!")
    assert json.loads(Path("run/trace.json").read_text())["traceEvents"]
    assert "f32[4]" in asked("show", "run/step@2")


@on_one_release
@pytest.mark.parametrize(
    ("how", "code", "ending"),
    [
        ("raise", 1, "ValueError: of the script"),
        ("kill", 137, "killed by SIGKILL"),
        ("exit", 5, "it called os._exit(5)"),
    ],
)
def test_records_are_complete_however_the_script_ends(cli, folder, how, code, ending):
    done = cli("record", "-o", "here", "script.py", how)
    assert done.code == code
    found = shown("here")
    assert [each["name"] for each in found["functions"][0]["compilations"]] == ["step", "step@2"]
    assert found["processes"][0]["ending"] == ending
    assert found["exit_code"] == code


@on_one_release
def test_a_compilation_that_takes_long_is_said_while_it_runs(cli, folder, monkeypatch):
    monkeypatch.setattr("jaxprtool.commands.record.command.LONG", 0.01)
    done = cli("record", "-o", "here", "script.py")
    said = r"^(tracing|lowering|compiling) \w+ for \S+ m?s at script.py:\d+$"
    assert done.code == 0 and re.search(said, done.err, re.MULTILINE)


@on_one_release
def test_a_signal_reaches_the_script(folder):
    command = [sys.executable, "-m", "jaxprtool", "record", "script.py", "wait"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        while "script.py" not in process.stdout.readline():
            pass
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "killed by SIGTERM" in said


@on_one_release
def test_processes_started_by_the_script_are_recorded_too(cli, folder):
    done = cli("record", "pool.py")
    assert (done.code, done.out) == (0, "[2.0, 3.0]\n")
    found = shown()
    assert len(found["processes"]) == 2
    assert [len(each["compilations"]) for each in found["functions"]] == [2]
    assert found["differing"] == ["scaled"]
    asked("diff", "run/process-0/scaled", "run/process-1/scaled", code=1)


@on_one_release
def test_any_command_that_starts_python_can_be_recorded(cli, folder, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take long to load
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # ours may need a plug-in: -n of xdist
    Path("test_it.py").write_text(
        "import jax\ndef test_it():\n    assert jax.jit(lambda x: x + 1)(1.0) == 2.0\n"
    )
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    done = cli("record", "--", sys.executable, *command)
    assert done.code == 0
    assert "1 passed" in done.out
    assert [each["name"] for each in shown()["functions"]] == ["lambda"]


@on_one_release
def test_a_module_and_another_sitecustomize_can_be_recorded(cli, folder, monkeypatch):
    Path("package").mkdir()
    Path("package/train.py").write_text("import jax, marked; print(jax.jit(lambda x: x)(2.0))\n")
    Path("sitecustomize.py").write_text("import sys; sys.modules['marked'] = sys\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    done = cli("record", "-m", "package.train")
    assert (done.code, done.out) == (0, "2.0\n")
    assert [Place.from_json(each["place"]) for each in shown()["functions"]] == [
        "package/train.py:1"
    ]


def test_a_script_without_jax_is_reported(cli, folder):
    done = cli("record", "plain.py")
    assert (done.code, done.out) == (4, "plain\n")
    assert "JAX was not imported: nothing was recorded." in done.err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("plan.py",), "no script 'plan.py'", "did you mean 'plain.py'?"),
        (("--", "no-such-command"), "cannot run 'no-such-command'", ""),
        (("-o", "plain.py/run", "plain.py"), "cannot write 'plain.py/run'", ""),
        (("--keep", "step:0", "plain.py"), "--keep step:0: write NAME, or NAME:N", ""),
        (("--until", "nan", "plain.py"), "--until nan needs the functions to check", "--keep NAME"),
        (("--until", "inf", "plain.py"), "--until inf: only nan is known", ""),
    ],
)
def test_mistakes_are_one_line_errors(cli, folder, words, message, hint):
    done = cli("record", *words)
    assert done.code == 2
    assert done.out == ""
    error, *hints = done.err.splitlines()
    assert error.startswith(f"error: {message}")
    assert hint in "".join(hints)
    assert not Path("run").exists()


def test_a_run_is_kept_unless_it_is_to_be_replaced(cli, folder):
    assert cli("record", "plain.py").code == 4
    Path("run/mine.txt").touch()
    done = cli("record", "plain.py")
    assert done.code == 4 and "note: the run in run/ is now run-1/\n" in done.err
    assert Path("run-1/mine.txt").exists() and not Path("run/mine.txt").exists()
    assert cli("record", "--overwrite", "plain.py").code == 4
    assert not Path("run-2").exists()
    assert cli("record", "-o", "run-1", "plain.py").code == 4
    assert Path("run-1-1/mine.txt").exists()
    gone = cli("show", "run-9/step")
    assert gone.code == 2 and gone.err.startswith(
        "error: no run 'run-9'\nhint: the runs here: run-1,"
    )


def test_a_command_that_cannot_run_leaves_the_runs_as_they_were(cli, folder):
    assert cli("record", "plain.py").code == 4
    started = Path("run/run.json").read_text()
    done = cli("record", "--", "no-such-command")
    assert (done.code, "cannot run 'no-such-command'" in done.err) == (2, True)
    assert Path("run/run.json").read_text() == started
    assert not Path("run-1").exists()


@on_one_release
def test_full_shows_every_reason(cli, folder):
    Path("reasons.py").write_text(
        "import jax, numpy as np\n"
        "total = jax.jit(lambda a, b, c: a.sum() + b.sum() + c.sum())\n"
        "one, two = np.ones(1, np.float32), np.ones(2, np.float32)\n"
        "for each in ((one, one, one), (two, one, one), (one, two, one), (one, one, two)):\n"
        "    total(*each)\n"
    )
    assert cli("record", "reasons.py").code == 0
    shown = cli("show", "run", "--full").out
    assert all(f"{name}: f32[1] → f32[2]" in shown for name in "abc")


@on_one_release
def test_functions_to_keep_that_were_never_called_are_named(cli, folder):
    done = cli("record", "--keep", "stp", "script.py")
    assert done.code == 0
    assert "warning: --keep stp: no such function was called; did you mean 'step'?" in done.err


STEPS = """
    import jax, jax.numpy as jnp

    @jax.jit
    def once(x):
        return x + 1

    @jax.jit
    def step(x):
        return jnp.sort(x, axis=0) + 1

    x = once(jnp.ones((200, 200)))
    for _ in range(6):
        x = step(x)
"""


@on_one_release
def test_steps_of_a_script_are_profiled_once_compiled(cli, folder):
    Path("steps.py").write_text(textwrap.dedent(STEPS))
    done = cli("record", "--profile", "3", "steps.py")
    assert done.code == 0 and "the mean of 3 calls" in done.err
    assert "return jnp.sort(x, axis=0) + 1" in done.err
    found = json.loads(cli("profile", "run", "--json").out)
    assert found["calls"] == 3 and Place.from_json(found["lines"][0]["place"]) == "steps.py:10"
    assert "compiling" not in {each["kind"] for each in found["own"]}


@on_one_release
def test_a_script_without_steps_is_reported(cli, folder):
    done = cli("record", "--profile", "3", "script.py")
    assert done.code == 0 and "steps begin with a third call of a function" in done.err


def test_names_of_recorded_programs_are_completed(folder):
    from jaxprtool.cli.completion import complete_target

    run = Path("run/process-0")
    run.mkdir(parents=True)
    Path("run/run.json").write_text("{}")
    for name in ("step", "step@2", "loss"):
        (run / f"{name}.jaxpr").write_text("# a.py:3:4 (loss) from 2\n# a.py:5 (A.look)\n")
    assert complete_target("run/s") == ["run/step", "run/step@2"]
    assert complete_target("run/step@2:lo") == ["run/step@2:look", "run/step@2:loss"]
    assert complete_target("run/process-0/step.jaxpr:los") == ["run/process-0/step.jaxpr:loss"]


def test_a_notebook_is_refused_before_a_run_is_written(cli, folder):
    (folder / "cells.ipynb").write_text('{"cells": [null]}')
    result = cli("record", "cells.ipynb")
    assert result.code == 2 and "'cells.ipynb' is a notebook, not a script" in result.err
    assert "%%record" in result.err and not (folder / "run").exists()
