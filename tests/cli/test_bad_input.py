"""Each user mistake is one `error:` line, maybe with a hint, and the right exit code."""

import errno
import os

import pytest

DOUBLE = "functions.py:double"

MISTAKES = {
    "no command of that name": ["shwo", DOUBLE],
    "no target": ["show"],
    "unknown option": ["show", DOUBLE, "--frobnicate"],
    "option without its value": ["show", DOUBLE, "--args"],
    "too many arguments": ["show", DOUBLE, DOUBLE],
    "missing module": ["show", "no_such_module_at_all:f"],
    "missing file": ["show", "nothing.py:f"],
    "missing folder": ["show", "no/such/file.py:f"],
    "no function named": ["show", "functions.py"],
    "missing attribute": ["show", "functions.py:duoble"],
    "target not callable": ["show", "functions.py:not_callable"],
    "no example arguments": ["show", "functions.py:inner"],
    "malformed args": ["show", DOUBLE, "--args", "f32[3"],
    "attribute access in args": ["show", DOUBLE, "--args", "os.environ"],
    "call in args": ["show", DOUBLE, "--args", "__import__('os').system('true')"],
    "comprehension in args": ["show", DOUBLE, "--args", "[x for x in (1, 2)]"],
    "unknown name in args": ["show", DOUBLE, "--args", "f33[3]"],
    "10 MB of args": ["show", DOUBLE, "--args", "1," * 5_000_000],
    "a thousand brackets": ["show", DOUBLE, "--args", "[" * 1000 + "]" * 1000],
    "too many positional arguments": ["show", DOUBLE, "--args", "f32[3], f32[3]"],
    "no such keyword": ["show", DOUBLE, "--args", "y=f32[3]"],
    "static numbers that are none": ["show", DOUBLE, "--static-argnums", "one"],
    "unknown format": ["show", DOUBLE, "--format", "xml"],
    "negative depth": ["show", DOUBLE, "--depth", "-1"],
    "unknown pass": ["opt", DOUBLE, "-p", "dec"],
    "unknown pass option": ["opt", DOUBLE, "-p", "dce(drop_input=True)"],
    "pass option of another type": ["opt", DOUBLE, "-p", "dce(drop_inputs='yes')"],
    "malformed pipeline": ["opt", DOUBLE, "-p", "dce,,dce("],
    "print after a pass not run": ["opt", DOUBLE, "-p", "dce", "--print-after", "cse"],
    "unknown pass to describe": ["explain", "dec"],
    "unknown backend": ["run", DOUBLE, "--backend", "abacus"],
    "device number too high": ["run", DOUBLE, "--backend", "cpu", "--device", "999"],
    "negative device number": ["run", DOUBLE, "--device", "-1"],
    "device that is no number": ["run", DOUBLE, "--device", "first"],
    "negative repeat": ["run", DOUBLE, "--repeat", "-1"],
    "negative seed": ["run", DOUBLE, "--seed", "-1"],
    "symbolic size to run": ["run", DOUBLE, "--args", "f32[n]"],
    "folder to save into missing": ["run", DOUBLE, "--save", "no/such/out.npz"],
    "folder for a file": ["run", DOUBLE, "--save", "."],
}


@pytest.mark.parametrize("command", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(cli, folder, command):
    before = set(os.listdir(folder))
    result = cli(*command)
    said = [line for line in result.lines if line not in ("imported", "traced")]
    assert result.code == 2, result
    assert result.out == ""
    assert said[0].startswith("error: ") and len(said[0]) < 300, said
    assert all(line.startswith("hint: ") for line in said[1:]) and len(said) <= 2, said
    assert "internal error" not in said[0]
    assert set(os.listdir(folder)) - before <= {"__pycache__"}


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["opt", DOUBLE, "-p", "dec"], "hint: did you mean 'dce'?"),
        (["show", "functions.py:duoble"], "hint: did you mean 'double'?"),
        (["shwo", DOUBLE], "hint: did you mean 'show'?"),
        (["run", DOUBLE, "--backend", "cpuu"], "hint: did you mean 'cpu'?"),
        (
            ["show", "--frobnicate", DOUBLE],
            "hint: run `jaxprtool show --help` for its arguments and options",
        ),
    ],
)
def test_similar_names_are_hinted_at(cli, command, hint):
    assert cli(*command).lines[-1] == hint


def test_a_missing_backend_lists_the_available_ones(cli):
    result = cli("run", DOUBLE, "--backend", "abacus")
    assert "no backend 'abacus' on this machine; it has: cpu (" in result.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_without_write_permission_is_an_error(cli, folder):
    (folder / "out.npz").write_text("old")
    (folder / "out.npz").chmod(0o400)
    assert cli("run", DOUBLE, "--save", "out.npz").code == 2


def test_an_unwritable_file_is_detected_before_the_work(cli):
    result = cli("run", DOUBLE, "--save", "no/such/out.npz")
    assert "traced" not in result.lines
    assert result.lines[-1] == "error: cannot write 'no/such/out.npz': No such file or directory"


def test_a_shape_error_shows_only_the_users_frames(cli):
    result = cli("show", "functions.py:misfit")
    assert result.code == 3 and result.out == ""
    assert [line.strip() for line in result.lines[1:5]] == [
        "functions.py:14, in misfit",
        "return inner(x, y)",
        "functions.py:17, in inner",
        "return x + y",
    ]
    assert result.lines[5].startswith("error: misfit raised TypeError: ")
    assert len(result.lines) == 6


@pytest.mark.proof
def test_endless_recursion_is_reported_in_few_lines(cli):
    result = cli("show", "functions.py:endless")
    assert result.code == 3 and len(result.lines) < 12
    assert "times]" in result.err and "RecursionError" in result.lines[-1]


def test_a_module_that_raises_is_reported_as_the_users_own_error(cli, folder):
    (folder / "raises.py").write_text("def f(x): return x\n\n1 / 0\n")
    result = cli("show", "raises.py:f", "--args", "1")
    assert result.code == 3
    assert result.lines[0].strip() == "raises.py:3, in <module>"
    assert "ZeroDivisionError" in result.lines[-1]


def test_traceback_option_shows_the_whole_traceback(cli):
    result = cli("show", "functions.py:misfit", "--traceback")
    assert result.code == 3 and "Traceback (most recent call last)" in result.err
    assert result.lines[-1].startswith("error: misfit raised TypeError: ")
    assert "Traceback" in cli("opt", DOUBLE, "-p", "dec", "--traceback").err


def test_an_internal_error_is_one_line_that_asks_for_a_report(cli, monkeypatch):
    def fail(*_, **__):
        raise KeyError("lost\nit")

    monkeypatch.setattr("jaxprtool.render.terminal.listing.listing", fail)
    result = cli("show", DOUBLE)
    assert result.code == 70
    assert result.lines[-2] == "error: internal error: KeyError: 'lost\\nit'"
    assert result.lines[-1] == "hint: report it with the output of --traceback"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "MemoryError"),
        (ImportError("/lib/x.so: failed to map segment"), "/lib/x.so: failed to map segment"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_out_of_memory_is_not_reported_as_an_internal_error(cli, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxprtool.render.terminal.listing.listing", fail)
    result = cli("show", DOUBLE)
    assert result.code == 2 and result.lines[-2] == f"error: out of memory: {message}"
    assert result.lines[-1].startswith("hint: give the process more memory or threads")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_interrupts_and_closed_pipes_are_quiet(cli, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxprtool.execute.running.backends.survey", fail)
    result = cli("backends")
    assert result.code == code
    assert result.lines == (["interrupted"] if code == 130 else [])


def test_each_warning_is_one_line(cli, folder):
    (folder / "warns.py").write_text(
        "import warnings\ndef f(x):\n    warnings.warn('take\\ncare')\n    return x\n"
    )
    result = cli("show", "warns.py:f", "--args", "1.0")
    assert result.code == 0 and result.lines == ["warning: take care"]
