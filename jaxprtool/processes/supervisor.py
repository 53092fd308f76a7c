"""The supervisor of a command: it kills the command when the parent process has ended.

`jaxprtool.processes` runs it as a script: `supervisor.py LIFELINE MEMORY COMMAND...`. It imports
little, so that it starts fast.

LIFELINE is the reading end of a pipe whose writing end only the parent holds. It closes when the
parent closes it, and when the parent dies, however that happens. PR_SET_PDEATHSIG is not enough: it
is sent when the thread that started the child ends, and grandchildren do not inherit it.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(lifeline: int, memory: int, command: list[str]) -> None:
    """Run a command, kill the processes that it has left behind, and end with its status.

    Args:
        lifeline: The descriptor of the pipe that closes when the command should be killed.
        memory: The limit of private memory, in bytes; 0 for none.
        command: The program and its arguments.
    """
    # As a subreaper, this process inherits orphaned descendants, even those in other groups.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        _execute(memory, command)
    with suppress(OSError):  # the child has called it already, and has executed the command
        os.setpgid(child, child)
    threading.Thread(target=_kill_at_end, args=(lifeline, child), daemon=True).start()
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            break
    _kill_all(child)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _execute(memory: int, command: list[str]) -> None:
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory:
            # Not RLIMIT_AS, which counts addresses that drivers reserve and never use.
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; a command would too
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _kill_at_end(lifeline: int, child: int) -> None:
    os.read(lifeline, 1)
    _kill_all(child)
    os._exit(128 + signal.SIGKILL)


def _kill_all(child: int) -> None:
    """Kill the process group of a child and, on Linux, all of its descendants."""
    _kill(-child)
    if sys.platform != "linux":
        return
    while children := _children():
        for pid in children:
            _kill(pid)
            with suppress(ChildProcessError):  # the other thread has already waited for it
                os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return the process ids of this process's children, from /proc."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid():
                pids.append(int(name))
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
