"""`browse` on the command line: where it refuses to run, and how it restores the terminal."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxprtool.commands.browse import app
from jaxprtool.ir.frames import current_frame_view
from tests.programs.modules import OLD
from tests.share import on_one_release

ROOT = Path(__file__).parents[3]
NET = str(ROOT / "tests" / "commands" / "browse" / "tiny.py") + ":net"


def test_browse_without_a_terminal_is_an_error(cli):
    found = cli("browse", NET)
    assert found.code == 2 and found.out == ""
    assert found.lines[0] == "error: browse needs a terminal, but stdin is not a terminal"


def test_a_program_on_stdin_leaves_no_keyboard_input(cli):
    found = cli("browse", "-")
    assert found.code == 2 and "reads keys from stdin" in found.err


@pytest.fixture
def on_terminal(monkeypatch):
    """Make the streams pass for a terminal."""
    monkeypatch.setattr("jaxprtool.commands.browse.command._require_terminal", lambda target: None)


def test_a_module_of_a_dump_is_opened_without_passes(cli, on_terminal, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(app, "browse", shown.extend)
    path = tmp_path / "module_0001.jit_step.cpu_after_optimizations.txt"
    path.write_text(OLD)
    assert cli("browse", f"{tmp_path}/jit_step").code == 0
    assert [state.module.module.name for state in shown] == ["jit_step"]
    found = cli("browse", str(path), "-p", "dce")
    assert found.code == 2
    assert found.lines == [f"error: '{path}' is an HLO module: -p does not apply"]


#: The escape sequences that restore the previous screen and its cursor.
RESTORED = ("\x1b[?1049l", "\x1b[?25h")

#: Runs the command repeatedly in one process, each time after the previous one has ended.
COMMANDS = f"""
from jaxprtool.cli.main import main
print("ended", main(["browse", {NET!r}, "-p", "dce"]))
print("ended", main(["browse", {NET!r}]))
from jaxprtool.commands.browse import app
from jaxprtool.ir.frames import current_frame_view
app.Browser.action_names = lambda self: 1 / 0
print("ended", main(["browse", {NET!r}]))
main(["browse", {NET!r}])
"""


class Terminal:
    """A Python process on its own terminal."""

    def __init__(self, code, **env):
        self.fd, end = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **env}
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, **streams
        )
        os.close(end)
        self.text = ""

    def read_until(self, wanted):
        """Read until a text appears, and return the output before and after it."""
        end = time.monotonic() + 60
        while wanted not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
        before, _, self.text = self.text.partition(wanted)
        return before

    def press(self, keys):
        os.write(self.fd, keys.encode())

    def wait(self):
        """Read to the end, and return the exit status of the process."""
        with contextlib.suppress(OSError):  # a terminal ends so when its program is gone
            while part := os.read(self.fd, 65536):
                self.text += part.decode(errors="replace")
        return self.process.wait()


@on_one_release
def test_the_terminal_is_restored_however_browse_ends(tmp_path):
    log, editor = tmp_path / "log", tmp_path / "editor"
    editor.write_text(f"#!/bin/sh\necho $@ > {log}; sleep 0.1; echo edited\n")
    editor.chmod(0o755)
    terminal = Terminal(COMMANDS, EDITOR=str(editor))
    terminal.read_until("quit")
    terminal.press("e")
    assert RESTORED[0] in terminal.read_until("edited")
    assert log.read_text().strip() == f"+19 {NET.partition(':')[0]}"
    terminal.read_until("quit")
    terminal.press("q")
    before = terminal.read_until("ended 0")
    assert all(code in before for code in RESTORED)

    terminal.read_until("quit")
    terminal.press("\x03")
    before = terminal.read_until("ended 130")
    assert all(code in before for code in RESTORED) and "interrupted" in before

    terminal.read_until("quit")
    terminal.press("v")
    after = terminal.read_until("ended 70").partition(RESTORED[0])[2]
    assert "internal error: ZeroDivisionError: division by zero" in after
    assert "Traceback" not in after

    terminal.read_until("quit")
    terminal.process.terminate()
    assert terminal.wait() == -signal.SIGTERM
    assert all(code in terminal.text for code in RESTORED)


def test_without_textual_the_error_explains_how_to_install_it(cli, monkeypatch, on_terminal):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = cli("browse", NET)
    assert found.code == 2
    assert found.lines == ["error: browse needs Textual", 'hint: pip install "textual>=8"']


def test_errors_are_reported_before_the_screen_is_taken(cli, on_terminal):
    for arguments in (["nowhere.py:f"], [NET, "-p", "no_such_pass"], [NET, "--args", "f32[2]"]):
        found = cli("browse", *arguments)
        assert found.code == 2 and found.err.startswith("error: ")


def test_the_browser_receives_the_states(cli, on_terminal, monkeypatch):
    given = []
    monkeypatch.setattr(app, "browse", lambda states: given.append((states, current_frame_view())))
    assert cli("browse", NET, "-p", "dce", "--frames", "library").code == 0
    ((states, view),) = given
    assert [state.label for state in states] == ["traced", "dce"] and view.choice == "library"
