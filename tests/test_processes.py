"""Commands in separate processes never outlive their limits, this process, or its parent."""

import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jaxprtool import files, processes
from jaxprtool.errors import OutputError, TooFewDevicesError, UnsupportedError
from jaxprtool.execute import calls
from tests.external import needs

#: Starts a process that starts another one in its own session. Writes the ids of both.
FAMILY = """
import os, subprocess, sys, time
if sys.argv[1:]:
    inner = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(f"{os.getpid()} {inner.pid}")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(300)
"""
#: Runs these processes through jaxprtool.processes.
PARENT = """
import sys
from jaxprtool import processes
processes.run_process([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def family(path):
    wait_for(path.exists)
    return [int(word) for word in path.read_text().split()]


def test_a_command_returns_its_status_and_output():
    done = processes.run_process(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.status, done.signal, done.stdout, done.stderr) == (3, None, "out\n", "err\n")
    assert not done.timed_out and not done.crashed and str(done) == "exit status 3: err"


def test_a_missing_command_is_reported():
    done = processes.run_process(["./no-such-command"])
    assert done.status == 127 and str(done).endswith("./no-such-command: No such file or directory")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL", "SIGFPE"])
def test_a_crash_is_reported_by_its_signal(name):
    done = processes.run_process(python(f"import os, signal; os.kill(os.getpid(), signal.{name})"))
    assert done.crashed and done.status is None and str(done) == name


def test_a_fatal_check_of_xla_is_reported_for_a_crash():
    code = "import os, sys; print('F1 a.cc:1] Check failed: x\\n*** stack', file=sys.stderr, "
    done = processes.run_process(python(code + "flush=True); os.abort()"))
    assert str(done) == "SIGABRT: F1 a.cc:1] Check failed: x"


def test_after_a_timeout_all_descendants_are_killed(tmp_path):
    done = processes.run_process(python(FAMILY, str(tmp_path / "pids")), seconds=1)
    assert done.timed_out and not done.crashed and str(done) == "timed out after 1 s"
    assert not any(map(is_alive, family(tmp_path / "pids")))


@needs("setsid")
def test_descendants_left_by_a_command_are_killed_without_waiting(tmp_path):
    command = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' & echo done; sleep 0.2"
    done = processes.run_process(["sh", "-c", command])
    assert done.status == 0 and done.stdout == "done\n" and done.seconds < 100
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_out_of_memory_is_an_error_of_the_command():
    done = processes.run_process(python("bytearray(1 << 30)"), memory=1 << 28)
    assert done.status == 1 and str(done).endswith("MemoryError")
    assert processes.run_process(python("bytearray(1 << 26)"), memory=1 << 28).status == 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV"])
def test_children_die_with_their_parent(name, tmp_path):
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        python(PARENT, FAMILY, str(pids)),
        stderr=subprocess.DEVNULL,
        # A shell starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children = family(pids)
    assert all(map(is_alive, children))
    parent.send_signal(getattr(signal, name))
    parent.wait(30)
    wait_for(lambda: not any(map(is_alive, children)))


def test_a_command_outlives_the_thread_that_started_it():
    import threading

    started = []
    command = ["sh", "-c", "sleep 0.3; echo done"]
    thread = threading.Thread(target=lambda: started.append(processes.Child(command)))
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.wait().stdout == "done\n"


def test_the_end_of_endless_output_is_kept():
    done = processes.run_process(
        python("import os\nfor _ in range(80): os.write(1, b'a' * (1 << 20))")
    )
    assert set(done.stdout) == {"a"} and len(done.stdout) == 1 << 24


def test_a_command_that_closes_its_streams_is_waited_for():
    assert processes.run_process(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 4"]).status == 4
    assert processes.run_process(["sh", "-c", "exec >&- 2>&-; sleep 300"], seconds=0.3).timed_out


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        processes.run_process(["true"])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_temporary_folder_is_removed_with_its_processes_on_a_signal(ending, tmp_path):
    script = """
        import sys
        from jaxprtool import processes
        with processes.temporary_folder() as folder:
            processes.run_process(["sh", "-c", f"echo {folder} > {sys.argv[1]}; exec sleep 300"])
    """
    written = tmp_path / "folder"
    parent = subprocess.Popen(
        python(textwrap.dedent(script), str(written)),
        stderr=subprocess.PIPE,
        # `nohup` starts its command with SIGHUP ignored.
        preexec_fn=lambda: signal.signal(ending, signal.SIG_DFL),
    )
    wait_for(lambda: written.exists() and written.read_text().endswith("\n"))
    folder = written.read_text().strip()
    assert os.path.isdir(folder)
    parent.send_signal(ending)
    assert parent.wait(30) == -ending and parent.stderr.read() == b""
    assert not os.path.exists(folder)


# --- calls ----------------------------------------------------------------------------------------


def test_a_process_is_called_many_times_and_keeps_its_state():
    with calls.python_process("it crashed", {"OF_THE_CHILD": "1"}) as process:
        assert process.call(os.getenv, "OF_THE_CHILD") == "1"
        assert process.call(operator.concat, b"a" * (1 << 20), b"b")[-2:] == b"ab"
        assert process.call(os.getpid) == process.call(os.getpid) != os.getpid()
        assert os.listdir(process.folder) == []
    assert not os.path.exists(process.folder)


def test_a_generator_sends_its_next_value_when_it_is_asked(tmp_path):
    (tmp_path / "inner").mkdir()
    with calls.python_process("it crashed") as process:
        assert process.call(os.walk, str(tmp_path)) == (str(tmp_path), ["inner"], [])
        assert process.next() == (str(tmp_path / "inner"), [], [])


def test_reports_precede_the_result_and_what_is_printed_is_no_part_of_them():
    reports = []
    with calls.python_process("it crashed", on_report=reports.append) as process:
        assert process.call(print, "noise") is None
        assert process.call(os.write, 1, b"noise") == 5
        assert process.call(os.read, 0, 1) == b""
        assert process.call(calls.report, [1]) is None
    assert reports == [[1]]


def test_an_error_for_the_user_is_raised_here_and_the_process_stays():
    with calls.python_process("it crashed") as process:
        with pytest.raises(OutputError, match="cannot write '/': it is a folder"):
            process.call(files.check_path, "/")
        assert process.call(operator.add, 1, 2) == 3


def test_an_error_keeps_all_it_says_when_it_is_sent():
    error = TooFewDevicesError("too few\ndevices", "add some", ["x"])
    error.details = (("inputs", "random"),)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is TooFewDevicesError and str(again) == "too few devices"
    assert vars(again) == vars(error) and again.axes == ("x",)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((os.kill, 0, signal.SIGSEGV), "it crashed: SIGSEGV"),
        ((sys.exit, "error: no"), "it crashed: exit status 1: error: no"),
        (
            (operator.truediv, 1, 0),
            "it crashed: exit status 1: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_the_death_of_a_called_process_is_one_line(call, said):
    with (
        calls.python_process("it crashed") as process,
        pytest.raises(UnsupportedError) as raised,
    ):
        process.call(*call)
    assert raised.value.message == said
