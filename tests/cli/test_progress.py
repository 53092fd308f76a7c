"""The progress line that commands show on a terminal."""

import contextlib
import io
import os
import pty
import re
import sys
import time

import pytest

from jaxprtool.cli import output


class Terminal:
    """A terminal behind `sys.stdin`, `sys.stdout` and `sys.stderr`."""

    def __init__(self):
        self._master, slave = pty.openpty()
        self.streams = {
            "stdin": os.fdopen(slave, closefd=False),
            "stdout": os.fdopen(os.dup(slave), "w", buffering=1),
            "stderr": os.fdopen(slave, "w", buffering=1),
        }
        self._written = ""

    @contextlib.contextmanager
    def attached(self):
        """Connect the streams of `sys` to the terminal."""
        with pytest.MonkeyPatch.context() as patch:
            for name, stream in self.streams.items():
                patch.setattr(sys, name, stream)
            yield

    @contextlib.contextmanager
    def shown(self):
        with self.attached(), output.progress_shown() as on_progress:
            yield on_progress

    def written(self):
        """Return all output so far."""
        os.set_blocking(self._master, False)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._master, 65536):
                self._written += piece.decode()
        return self._written

    def type(self, text):
        os.write(self._master, text.encode())

    def screen(self):
        """Return the visible lines. The cursor is in the last one."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", self.written()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part == "\x1b[1A":
                row -= 1
            elif not part.startswith("\x1b"):
                lines[row] = lines[row][:column].ljust(column) + part
                column += len(part)
        return lines[: row + 1]

    def wait_for(self, text):
        deadline = time.monotonic() + 20
        while text not in self.screen()[-1]:
            assert time.monotonic() < deadline, self.screen()
            time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "PATIENCE", 0.1)
    monkeypatch.setattr(output, "_TICK", 0.02)
    return Terminal()


def test_short_steps_show_no_line(terminal, monkeypatch):
    monkeypatch.setattr(output, "PATIENCE", 60)
    with terminal.shown() as on_progress:
        on_progress("tracing f")
        print("result")
    assert terminal.written() == "result\r\n"


def test_a_long_step_shows_the_line_until_it_is_done(terminal):
    with terminal.shown() as on_progress:
        on_progress("tracing f")
        terminal.wait_for(" tracing f")
        on_progress("fold 1/2")
        terminal.wait_for(" fold 1/2")
        assert len(terminal.screen()) == 1
    assert terminal.screen() == [""]
    assert terminal.written().rfind("\x1b[?25h") > terminal.written().rfind("\x1b[?25l")


def test_the_elapsed_time_is_updated_every_second(terminal):
    with terminal.shown() as on_progress:
        on_progress("compiling f")
        terminal.wait_for("compiling f · 1 s")


def test_an_empty_text_shows_no_line(terminal):
    with terminal.shown() as on_progress:
        on_progress("rendering")
        terminal.wait_for("rendering")
        on_progress("")
        assert terminal.screen() == [""]
        time.sleep(0.3)
        assert terminal.screen() == [""]


def test_output_of_the_program_gets_its_own_lines(terminal):
    with terminal.shown() as on_progress:
        on_progress("tracing f")
        for stream, text in ("stdout", "one\n"), ("stderr", "two\n"):
            terminal.wait_for("tracing f")
            print(text, end="", file=getattr(sys, stream))
        terminal.wait_for("tracing f")
        print("thr", end="", flush=True)
        time.sleep(0.3)
        assert terminal.screen() == ["one", "two", "thr"]
        sys.stdout.writelines(["ee\n", "four\n"])
        terminal.wait_for("tracing f")
    assert terminal.screen() == ["one", "two", "three", "four", ""]


def test_output_of_a_pipe_may_still_reach_the_terminal(terminal):
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        terminal.streams["stdout"] = pipe
        with terminal.shown() as on_progress:
            on_progress("rendering")
            terminal.wait_for("rendering")
            print("a line for less", flush=True)
            assert terminal.screen() == [""]


def test_the_line_does_not_overwrite_a_prompt(terminal):
    with terminal.shown() as on_progress:
        on_progress("tracing f")
        terminal.wait_for("tracing f")
        assert sys.stdin.encoding  # which `input` asks for
        assert terminal.screen() == [""]
        time.sleep(0.3)
        assert terminal.screen() == [""]
        terminal.type("first\nsecond\n")
        assert next(iter(sys.stdin)) == "first\n"


def test_an_interrupt_leaves_a_clean_terminal(terminal):
    with pytest.raises(KeyboardInterrupt), terminal.shown() as on_progress:
        on_progress("compiling f")
        terminal.wait_for("compiling f")
        raise KeyboardInterrupt
    assert terminal.screen() == [""]


def test_streams_are_restored_unless_the_program_replaced_them(terminal):
    own = io.StringIO()
    with terminal.attached():
        with output.progress_shown():
            assert sys.stderr.isatty() and sys.stderr is not terminal.streams["stderr"]
            sys.stdout = own
        assert sys.stdout is own
        assert sys.stdin is terminal.streams["stdin"] and sys.stderr is terminal.streams["stderr"]


def test_a_stderr_that_is_no_terminal_gets_a_line_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.05)
    with output.progress_shown() as on_progress:
        for doing in ("", "run 1 of 2", "run 2 of 2"):
            on_progress(doing)
            time.sleep(0.4)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["run 1 of 2", "run 2 of 2"]
    assert captured.out == ""


def test_a_message_that_stays_gets_another_line_with_its_seconds(monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(output, "SAME_LINE_SECONDS", 1.1)
    with output.progress_shown() as on_progress:
        on_progress("compiling f")
        time.sleep(2)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "compiling f" and second.startswith("compiling f · ")


@pytest.mark.parametrize("kind", ["pipe", "dumb"])
def test_only_a_terminal_shows_the_line(terminal, monkeypatch, kind):
    with terminal.attached():
        if kind == "pipe":
            monkeypatch.setattr(sys, "stderr", io.StringIO())
        else:
            monkeypatch.setenv("TERM", "dumb")
        streams = sys.stdin, sys.stdout, sys.stderr
        with output.progress_shown() as on_progress:
            on_progress("tracing f")
            assert (sys.stdin, sys.stdout, sys.stderr) == streams
            time.sleep(0.3)
    assert terminal.written() == ""


def test_a_long_text_is_cut_to_the_width_of_the_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with terminal.shown() as on_progress:
        on_progress("tracing a_function_of_a_long_name")
        terminal.wait_for("tracing a_funct")
        assert len(terminal.screen()) == 1 and len(terminal.screen()[0]) < 20


# --- the texts ------------------------------------------------------------------------------------

START = ["importing JAX", "loading functions.py:double", "tracing double"]
RUN = ["lowering double", "compiling double", "running double"]
WAYS = "trying roll and outline"
OUTLINED = [f"{doing} as traced" for doing in RUN]


@pytest.mark.parametrize(
    ("command", "stages"),
    [
        (["show", "-p", "dce, cse"], [*START, "dce 1/2", "cse 2/2", "rendering"]),
        (["run"], [*START, *RUN]),
        (["emit", "--to", "hlo"], [*START, "emitting hlo"]),
        (["vmap", "--axis-size", "2"], [*START, "batch 1/1", "rendering"]),
        (["outline", "--compile"], [*START, "outlining", WAYS, *OUTLINED]),
        (["backends"], ["importing JAX", "looking for devices"]),
    ],
)
def test_each_command_shows_its_steps(cli, monkeypatch, command, stages):
    assert told_by(cli, monkeypatch, *command) == stages


def told_by(cli, monkeypatch, command, *options, target="functions.py:double"):
    told = []
    monkeypatch.setattr(output, "progress_shown", lambda: contextlib.nullcontext(told.append))
    result = cli(command, *([] if command == "backends" else [target]), *options)
    assert result.code == 0, result.err
    return told


def test_passes_are_counted_across_named_pipelines_and_verify_counts_comparisons(cli, monkeypatch):
    options = "--args", "zeros(f32[3])", "-p", "inline, -O1", "--verify", "-o", "out.jaxpr"
    told = told_by(cli, monkeypatch, "opt", *options)
    count = int(told[3].partition("/")[2])
    assert count > 3 and told[3:5] == [f"inline 1/{count}", told[4]]
    assert told[2 + count].endswith(f" {count}/{count}")


def test_verify_names_the_running_pass(cli, monkeypatch):
    target, options = "functions.py:wasteful", ("-p", "dce, jit, cse", "--verify")
    told = told_by(cli, monkeypatch, "opt", *options, target=target)
    assert told[-4:] == [
        "verify: dce 1/2 · running the program before the pass",
        "verify: dce 1/2 · running the program after the pass",
        "verify: jit 2/2 · running the program after the pass",
        "rendering",
    ]


@pytest.mark.proof
def test_unzip_names_the_running_half(cli, monkeypatch, folder):
    (folder / "functions.py").write_text(
        "import jax, jaxprtool\n"
        "@jaxprtool.example('key<fry>[]', 'f32[3]')\n"
        "def double(key, x):\n"
        "    w = jaxprtool.variable(jax.random.normal(key, (3,)), name='w')\n"
        "    return w * x\n"
    )
    told = told_by(cli, monkeypatch, "unzip", "--run", "-p", "dce")
    halves = [f"{doing}_{half}" for half in ("init", "apply") for doing in RUN]
    assert told == [*START, "splitting double", "dce 1/1", "dce 1/1", *halves, "rendering"]
