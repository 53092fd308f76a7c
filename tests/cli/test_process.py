"""The command line as a process of its own: imports, pipes, signals, terminals."""

import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.share import on_one_release

COMMAND = [sys.executable, "-m", "jaxprtool"]

SLOW = """
    import sys, time
    def f(x):
        print("now", flush=True)
        time.sleep(60)
        return x
    if "imported" in sys.argv[2]:
        f(0)
"""


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize(
    "command",
    [
        "['--help']",
        "['show', '--help']",
        "['unzip', '-h']",
        "['--version']",
        "[]",
        "['show']",
        "['show', '--frob']",
    ],
)
def test_help_and_usage_errors_import_neither_jax_nor_numpy(command):
    script = (
        "import sys; from jaxprtool.cli.main import main; main({}); "
        "assert not {{'jax', 'jaxlib', 'numpy'}} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", script.format(command)], check=True, capture_output=True, timeout=60
    )


@on_one_release
def test_residuals_without_a_budget_import_no_solver(folder):
    (folder / "kept.py").write_text("import jax.numpy as jnp\ndef f(x): return jnp.sin(x).sum()\n")
    script = (
        "import sys; from jaxprtool.cli.main import main; "
        "assert main(['residuals', 'kept.py:f', '--args', 'f32[3]']) == 0; "
        "assert 'scipy' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("words", ["s", "show exam", "show example.py:f", "opt x.py:f -p d"])
def test_completion_imports_neither_jax_nor_numpy(folder, words):
    (folder / "example.py").write_text("import jax\ndef first(x): ...\ndef fast(x): ...\n")
    words = ["jaxprtool", *words.split()]
    environment = {
        **os.environ,
        "_JAXPRTOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    script = (
        "import sys; from jaxprtool.cli.main import main; main([]); "
        "assert not {'jax', 'jaxlib', 'numpy'} & sys.modules.keys()"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.usefixtures("processes")
def test_a_process_prints_a_program(folder):
    done = run("show", "functions.py:double")
    assert (done.returncode, done.stdout[:8]) == (0, "{ lambda")


@on_one_release
def test_exit_codes_and_streams_of_a_process(folder):
    missing = run("show", "functions.py:none")
    assert missing.returncode == 2 and missing.stdout == ""
    assert missing.stderr.splitlines()[1].startswith("error: ")
    assert run("show", "functions.py:misfit").returncode == 3


@pytest.mark.usefixtures("processes")
def test_hlo_contains_only_the_users_source_paths(folder):
    script = os.path.join(os.path.dirname(sys.executable), "jaxprtool")
    for command in ([script], COMMAND):
        emit = [*command, "emit", "functions.py:double", "--to", "hlo"]
        hlo = subprocess.run(emit, capture_output=True, text=True, check=True).stdout
        files = hlo.partition("FileNames\n")[2].partition("\n\n")[0].splitlines()
        assert files == ['1 "functions.py"']


@on_one_release
@pytest.mark.parametrize("options", [[], ["--json"], ["--format", "table"]])
def test_a_closed_pipe_is_quiet(folder, options):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [*COMMAND, "show", "functions.py:double", *options],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert result.returncode == 141
    assert result.stderr.splitlines() == ["imported", "traced"]


@on_one_release
@pytest.mark.parametrize("name", ["traced.py", "imported.py"])
def test_an_interrupt_ends_quietly_with_130(folder, name):
    (folder / name).write_text(textwrap.dedent(SLOW))
    # A shell's background jobs ignore interrupts, and so do the children of such a test run.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*COMMAND, "show", f"{name}:f", "--args", "1.0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, ours)
    assert process.stderr.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # Python may kill itself with the signal in the end, which shells report as 130 too.
    assert process.returncode in (130, -signal.SIGINT)
    assert (out, err) == ("", "interrupted\n")


def in_terminal(*arguments, **environment):
    """Return the output of a command on a terminal."""
    master, slave = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=slave,
        stderr=subprocess.DEVNULL,
        env={**clean, "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(master)
    assert process.wait(timeout=60) == 0
    return written.decode()


@on_one_release
def test_a_terminal_gets_colors_unless_no_color(folder):
    assert "\x1b[" in in_terminal("show", "functions.py:double")
    assert "\x1b[" not in in_terminal("show", "functions.py:double", NO_COLOR="1")


@on_one_release
def test_a_terminal_gets_one_page_by_default_and_everything_on_request(folder):
    (folder / "long.py").write_text(
        "import jax.numpy as jnp\n"
        "def sines(x):\n"
        "    for _ in range(60): x = jnp.sin(x)\n"
        "    return x\n"
    )
    command = "show", "long.py:sines", "--args", "f32[3]"
    page = in_terminal(*command, NO_COLOR="1")
    assert "sines: 60 equations" in page and "--full or --pager shows all 60" in page
    assert len(page.splitlines()) <= 24
    whole = in_terminal(*command, "--full", NO_COLOR="1")
    assert whole.count("= sin ") == 60 and "equations" not in whole
    assert "sines: 60 equations" in in_terminal("opt", *command[1:], "-p", "dce", NO_COLOR="1")


@on_one_release
def test_a_terminal_gets_the_times_first_and_at_most_twenty_results(folder):
    (folder / "many.py").write_text(
        "import jax.numpy as jnp\n"
        "def many(x):\n"
        "    return {f'r{chr(97 + i)}': x + i for i in range(24)} | {'z': jnp.log(x - 2)}\n"
    )
    lines = in_terminal("run", "many.py:many", "--args", "1.0", NO_COLOR="1").splitlines()
    assert lines[0].startswith("device") and "later calls" in lines[5]
    assert lines[7].split() == ["result", "type", "value"]
    assert lines[9].split() == ["result['z']", "f32[]", "nan"]
    assert lines[10].split() == ["result['ra']", "f32[]", "1."]
    assert lines[-1] == "… 5 more: --all"


@on_one_release
def test_the_pager_receives_the_listing(folder):
    shown = in_terminal("show", "functions.py:double", "--pager", PAGER="sed s/lambda/PAGED/")
    assert "PAGED" in shown


@on_one_release
def test_a_missing_pager_is_a_one_line_error(folder):
    master, slave = pty.openpty()
    result = subprocess.run(
        [*COMMAND, "show", "functions.py:double", "--pager"],
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PAGER": "no-such-pager"},
        timeout=60,
    )
    os.close(slave)
    os.close(master)
    assert result.returncode == 2
    assert "error: cannot start the pager 'no-such-pager'" in result.stderr


#: XLA ends the process that parses this: a parameter is missing.
UNPARSABLE = """HloModule cut

ENTRY main {
  x = f32[4] parameter(0)
  ROOT y = f32[4] parameter(2)
}
"""


@pytest.mark.proof
def test_a_module_at_which_xla_ends_the_process_is_one_line(tmp_path):
    (tmp_path / "cut.hlo").write_text(UNPARSABLE)
    ended = run("show", "cut.hlo", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: cut.hlo: the HLO parser of this jaxlib fails on it: Check")
