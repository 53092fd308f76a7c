"""The newest run is `run`; older ones are renamed, and none that is being written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxprtool.errors import OutputError
from jaxprtool.recording.folder import PROCESS, RUN, missing_run, runs_beside, write_json_file
from jaxprtool.recording.new_run import ProcessFolder, RunLock, new_run

#: Locks a folder in another process until it is killed.
HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def begun(path=None, start=1.0, overwrite=False, ended=True):
    """Begin a run, and return it."""
    run = new_run(path, overwrite)
    ending = {"exit_code": 0} if ended else {}
    write_json_file(os.path.join(run.path, RUN), {"start": start, "folder": os.getcwd(), **ending})
    return run


def starts():
    """Return when each run began, the newest first."""
    return {run: json.loads(Path(run, RUN).read_text())["start"] for run in runs_beside("run")}


def test_older_runs_are_numbered_in_order():
    for start in (1.0, 2.0, 3.0):
        begun(start=start).close()
    assert starts() == {"run": 3.0, "run-2": 2.0, "run-1": 1.0}
    assert [*starts()] == ["run", "run-2", "run-1"]  # the newest first
    begun("deep/exp/").close()
    assert begun("deep/exp").older == "deep/exp-1"


def test_a_run_that_is_written_is_neither_renamed_nor_replaced():
    first = begun(ended=False)
    second = begun(start=2.0)
    assert (second.path, second.is_other, first.path) == ("run-1", True, "run")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="'run' is being recorded by another process"):
            new_run("run", overwrite)
    first.close()
    third = begun(start=3.0)
    assert (third.path, third.older) == ("run", "run-2")


def test_the_lock_of_a_process_ends_when_it_is_killed():
    begun(ended=False).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, "run"], stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    with begun(start=2.0) as second:
        assert second.is_other
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert begun(start=3.0).older == "run-2"


def test_runs_that_begin_at_the_same_time_do_not_clash():
    def record(number):
        time.sleep(random.random() / 100)
        with begun(start=float(number)) as run:
            time.sleep(random.random() / 50)
            process = ProcessFolder(run.path, float(number))
            process.start({})
            process.close()
        return number

    with ThreadPoolExecutor(8) as pool:
        numbers = [*pool.map(record, range(40))]
    assert sorted(starts().values()) == numbers
    assert all((Path(path) / "process-0" / PROCESS).exists() for path in starts())


def test_without_locks_a_run_without_an_end_is_not_renamed(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    begun(ended=False).close()
    assert begun(start=2.0).path == "run-1"
    write_json_file("run/run.json", {"start": 1.0, "exit_code": 0})
    assert begun(start=3.0).older == "run-2"


def test_a_process_that_outlives_its_run_does_not_write_to_the_next():
    begun(start=1.0).close()
    begun(start=2.0).close()
    with pytest.raises(OSError, match="its run has ended"):
        ProcessFolder("run", 1.0).start({})
    assert not Path("run/process-0").exists()


def test_a_record_that_was_killed_at_its_start_leaves_a_folder_that_is_used_again():
    begun(start=1.0).close()
    os.rename("run", "run-1")  # and killed here
    with begun(start=2.0) as run:
        assert (run.path, run.older) == ("run", "")
    Path("run/run.json").unlink()  # or before this was written
    assert (begun(start=3.0).path, [*starts()]) == ("run", ["run", "run-1"])


def test_a_folder_with_other_files_is_left_alone():
    Path("run").mkdir()
    Path("run/model.py").touch()
    with pytest.raises(OutputError, match="other files in it"):
        new_run(None, overwrite=True)
    assert Path("run/model.py").exists() and not Path("run/.gitignore").exists()


def test_a_run_that_cannot_be_renamed_is_left_as_it_is(tmp_path, monkeypatch):
    begun(start=1.0).close()
    monkeypatch.chdir("run")
    with pytest.raises(OutputError, match="cannot rename the run") as raised:
        new_run(".", overwrite=False)
    assert "--overwrite" in raised.value.hint and Path("run.json").exists()
    new_run(".", overwrite=True).close()


def test_a_run_that_could_not_begin_gives_the_older_one_its_name_back():
    begun(start=1.0).close()
    begun(start=2.0).undo()
    assert starts() == {"run": 1.0}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("run-9/step", "no run 'run-9'"),
        ("run-9/", "no run 'run-9'"),
        ("run-9/process-1/step@2", "no run 'run-9'"),
        ("exp/step", "no run 'exp'"),
        ("run/step", None),  # is of a run that exists
        ("model/net.py:loss", None),
        ("some_model", None),
    ],
)
def test_a_missing_run_is_named_with_those_that_exist(target, message):
    begun().close()
    begun(start=2.0).close()
    error = missing_run(target)
    assert (None if error is None else error.message) == message
    assert error is None or error.hint == "the runs here: run, run-1"


def test_without_runs_a_missing_one_says_how_to_record():
    assert missing_run("exp/step") is None
    assert missing_run("run/step").hint == "write one with `jaxprtool record script.py`"
    Path("run.py").touch()
    assert missing_run("run") is None


def test_a_lock_on_a_folder_that_does_not_exist_is_none():
    RunLock("none").close()


@pytest.mark.parametrize(
    "path, message",
    [
        ("", "-o names no folder"),
        ("/", "-o names '/', in which nothing but a run may be"),
        ("file/run", "cannot write 'file/run': 'file' is not a folder"),
        ("file", "cannot write 'file': 'file' is not a folder"),
    ],
)
def test_a_name_that_no_folder_can_have_is_refused(path, message):
    Path("file").touch()
    with pytest.raises(OutputError) as error:
        new_run(path, False)
    assert error.value.message == message
