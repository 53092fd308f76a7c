"""The process of a short script makes the summary that `record` would make, or none."""

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxprtool.commands.record.record import finished, printed_summary
from jaxprtool.recording.new_run import new_run, run_recorded
from jaxprtool.recording.settings import Settings, SummaryRequest, summary_environment
from tests.share import on_one_release

FILES = ("index.html", "trace.json", "run.json")

STEP = """
    import jax, jax.numpy as jnp

    @jax.jit
    def step(x):
        return x * jnp.log(x)

    for size in (3, 4):
        print(step(jnp.zeros(size))[0], flush=True)
"""

#: Scripts that end as Python says, and their exit codes.
SUMMARIZED = {
    "as usual": ("", 0),
    "with an exception": ("raise ValueError('of the script')", 1),
    "in a function": ("import sys; sys.exit()", 0),
}

#: Scripts that might be disturbed, or of which `record` would show something else.
OTHERS = {
    "another exit code": ("import sys; sys.exit(3)", 3),
    "a sudden end": ("import os; os._exit(0)", 0),
    "a signal": ("import os; os.kill(os.getpid(), 9)", 137),
    "a thread": (
        "from threading import Thread; Thread(target=__import__('time').sleep, args=[9], "
        "daemon=True).start()",
        0,
    ),
    "another folder": ("import os; os.chdir('/')", 0),
    "another setting": ("jax.config.update('jax_enable_x64', True)", 0),
    "a tracer": ("import sys; sys.setprofile(lambda *event: None)", 0),
    "an alarm": ("import signal; signal.alarm(60)", 0),
    "a fault": ("import jaxprtool; jaxprtool.ir.documents.METHODS.clear()", 0),
}


def recorded(source, **change):
    """Record a script with `STEP` and more, and return how it ended."""
    Path("script.py").write_text(textwrap.dedent(STEP) + source)
    with new_run("run", overwrite=False):
        request = SummaryRequest(
            os.getpid(), "run", 80, False, None, False, False, None, summary_environment()
        )
        settings = Settings(os.path.abspath("run"), time.time(), summary=request, **change)
        return run_recorded([sys.executable, "script.py"], settings), request


@on_one_release
@pytest.mark.parametrize("name", SUMMARIZED)
def test_a_process_makes_the_page_and_the_summary_of_record(name, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, code = SUMMARIZED[name]
    ended, request = recorded(source)
    assert ended.exit_code == code and "NaN" in ended.summary
    made = {file: Path("run", file).read_text() for file in FILES}
    about = json.loads(made["run.json"])
    assert about["exit_code"] == code
    for key in ("digests", "next_steps"):
        del about[key]
    Path("run/run.json").write_text(json.dumps(about))
    assert printed_summary(finished("run"), request) == ended.summary
    assert {file: Path("run", file).read_text() for file in FILES} == made
    assert not list(Path("run").glob("*/summary.json"))


@on_one_release
@pytest.mark.parametrize("name", OTHERS)
def test_other_processes_leave_the_summary_to_record(name, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, code = OTHERS[name]
    ended, _ = recorded(source)
    assert ended.exit_code == code and ended.summary is None
    run = finished("run")
    assert run.exit_code == code and [function.name for function in run.functions] == ["step"]


@on_one_release
def test_a_long_script_leaves_the_summary_to_record(processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "import jaxprtool.recording.recorder as recorder; recorder.SHORT = 0"
    assert recorded(source)[0].summary is None


@on_one_release
def test_several_processes_leave_the_summary_to_record(processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import jax'])"
    ended, _ = recorded(source)
    assert ended.exit_code == 0 and ended.summary is None
    assert len(finished("run").processes) == 2
