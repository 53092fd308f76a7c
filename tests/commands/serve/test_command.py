import json
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxprtool.commands.serve.command import answer_line
from jaxprtool.commands.serve.workers import Answer

FILES = {
    "helper.py": "SCALE = 2.0\n",
    "m.py": """
        import os, signal, sys, time
        import jax, jax.numpy as jnp, jaxprtool
        from helper import SCALE

        print("imported")

        @jaxprtool.example("f32[3]")
        def f(x):
            return jax.nn.softmax(x) * SCALE

        @jaxprtool.example("f32[3]")
        def ends(x):
            os._exit(0)

        @jaxprtool.example("f32[3]")
        def crashes(x):
            os.kill(os.getpid(), signal.SIGSEGV)

        @jaxprtool.example("f32[3]")
        def leaves(x):
            sys.exit("enough")

        @jaxprtool.example("f32[3]")
        def hangs(x):
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)

        @jaxprtool.example("f32[3]")
        def prints(x):
            os.write(1, b"by a descriptor\\n")
            return x

        def donated():
            return jax.jit(lambda x: x + 1, donate_argnums=0), (jnp.ones(3),)

        @jaxprtool.example("f32[3]")
        def counted(x):
            return x * jax.device_count()
    """,
    "n.py": """
        import jax, jax.numpy as jnp

        print("imported")
        ONES = jnp.ones(3)

        def f(x):
            return x * ONES

        def case():
            print("called")
            return f, (jnp.ones(3),)
    """,
}


class Server:
    """`jaxprtool serve` in a folder, and its answers."""

    def __init__(self, folder):
        self.folder = folder
        unset = ("JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxprtool", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in unset},
        )

    def __call__(self, command, **more):
        self.process.stdin.write(json.dumps({"command": command, **more}).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def write(self, name, text):
        (self.folder / name).write_text(text)


@pytest.fixture(scope="module")
def running_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text))
    server = Server(folder)
    yield server
    out, err = server.process.communicate(timeout=60)
    assert (server.process.returncode, out, err) == (0, b"", b"")


@pytest.fixture
def server(running_server, processes):
    return running_server


def test_a_module_is_imported_and_traced_once(server):
    answers = [server(["cost", "n.py:case", "--factory", "--json"], id=i) for i in range(2)]
    cold, warm = answers
    assert cold == {**warm, "id": 0, "stderr": "imported\ncalled\n", "warm": False}
    assert warm["warm"] and warm["stderr"] == "" and warm["document"]["total"]["flops"] == 3


def test_output_of_a_function_is_no_answer(server):
    assert server("cost m.py:prints --json")["stdout"].startswith("by a descriptor\n{")


def test_a_changed_file_is_imported_again(server):
    for value in "2345":  # within a second, and of the same size
        server.write("helper.py", f"SCALE = {value}.0\n")
        shown = server("show m.py:f")
        assert f" {value}.0:f32[]" in shown["stdout"] and not shown["warm"]
    again = server("show m.py:f")
    server.write("m.py", (server.folder / "m.py").read_text() + "broken(\n")
    broken = server("show m.py:f")
    assert broken["exit_code"] == 3 and "SyntaxError" in broken["stderr"]
    server.write("m.py", textwrap.dedent(FILES["m.py"]))
    assert server("show m.py:f")["stdout"] == again["stdout"]


@pytest.mark.parametrize(
    "name, code, said",
    [
        ("ends", 3, "error: the process ended with status 0 before the command did"),
        ("crashes", 139, "error: the process was killed by signal 11 (SIGSEGV)"),
        ("leaves", 3, "error: leaves called sys.exit('enough') while it was traced"),
        ("hangs", 124, "error: the command did not end within 1 s (timeout_s)"),
    ],
)
def test_a_function_that_ends_its_process_does_not_end_the_server(server, name, code, said):
    answer = server(["cost", f"m.py:{name}"], timeout_s=1 if name == "hangs" else 60)
    assert answer["exit_code"] == code and said in answer["stderr"]
    assert server("cost m.py:f")["exit_code"] == 0


def test_options_of_a_process_do_not_leak(server):
    plain = server("show m.py:f")["stdout"]
    wide = server("show m.py:f --x64 --args f64[3]")["stdout"]
    assert "f64[3]" in wide and "f64" not in plain
    assert server("show m.py:f")["stdout"] == plain
    grad = server("show m.py:f -p jvp --source")["stdout"]
    server("show m.py:f -p jvp,jvp")
    assert server("show m.py:f -p jvp --source")["stdout"] == grad


def test_devices_of_a_command_do_not_leak(server):
    specs = ["--mesh", "x=2", "--in-specs", "P('x')"]
    shardings = ["shardings", "m.py:counted", *specs, "--args", "f32[4]", "--json"]
    shown = server("show m.py:counted")
    assert " 1.0:f32[]" in shown["stdout"]
    sharded = server(shardings)
    assert sharded["exit_code"] == 0 and not sharded["warm"]
    assert server("show m.py:counted")["stdout"] == shown["stdout"]
    assert server(shardings) == {**sharded, "stderr": "", "warm": True}


def test_donated_arguments_are_made_again(server):
    answers = [server("run m.py:donated --factory") for _ in range(3)]
    results = [answer["stdout"].partition("\n")[0] for answer in answers]
    assert results == 3 * ["result: f32[3] [2., 2., 2.]"]


def test_arguments_are_loaded_again(server):
    for value in (1.0, 2.0):
        np.save(server.folder / "x.npy", np.full(3, value))
        answer = server(["run", "m.py:prints", "--args", "load('x.npy')"])
        assert f"[{value:.0f}., {value:.0f}., {value:.0f}.]" in answer["stdout"]


def test_a_command_that_needs_a_terminal_is_refused(server):
    assert "browse needs a terminal" in server("browse m.py:f")["stderr"]


def test_no_process_outlives_the_server(server):
    pid = server.folder / "pid"
    pid.unlink(missing_ok=True)
    with Server(server.folder).process as process:
        process.stdin.write(b'{"command": "cost m.py:hangs"}\n')
        process.stdin.flush()
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.1)
        process.kill()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.1)


class Echo:
    """Answers each command line with its words."""

    def answer(self, words, timeout, fresh):
        return Answer(0, json.dumps([words, timeout, fresh]), "a note\n", True)


@pytest.mark.parametrize("command", [["cost", "m.py:f"], "cost m.py:f", "jaxprtool cost 'm.py:f'"])
def test_a_command_is_a_text_or_its_words(command):
    answer = answer_line(json.dumps({"id": "a", "command": command, "timeout_s": 2}), Echo())
    assert json.loads(answer.pop("stdout")) == [["cost", "m.py:f"], 2, False]
    assert answer == {"id": "a", "exit_code": 0, "stderr": "a note\n", "warm": True}


def test_a_document_is_an_object_and_no_text():
    answer = answer_line('{"command": ["cost", "--json"], "fresh": true}', Echo())
    assert answer["document"] == [["cost", "--json"], None, True] and "stdout" not in answer


@pytest.mark.parametrize(
    "line, said",
    [
        ("cost m.py:f", "the request is not JSON"),
        ("[1]", "the request is not an object"),
        ('{"id": 7}', "the command is not a text or a list of texts"),
        ('{"id": 7, "command": []}', "the command is empty"),
        ('{"id": 7, "command": "jaxprtool"}', "the command is empty"),
        ('{"id": 7, "command": "a \'"}', "the command cannot be split into words: No closing"),
        ('{"id": 7, "comand": "cost"}', "a request has no key 'comand'"),
        ('{"id": 7, "command": "serve"}', "this is `jaxprtool serve` already"),
        ('{"id": 7, "command": "cost", "timeout_s": 0}', "timeout_s is not a positive number"),
        ('{"id": 7, "command": "cost", "timeout_s": true}', "timeout_s is not a positive number"),
        ('{"id": 7, "command": "cost", "fresh": "no"}', "fresh is not true or false"),
    ],
)
def test_a_wrong_request_is_answered(line, said):
    answer = answer_line(line, Echo())
    assert answer["exit_code"] == 2 and said in answer["stderr"]
    assert answer["id"] == (7 if line.startswith('{"id"') else None)


def test_the_protocol_of_tools_needs_its_package(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = cli("serve", "--mcp")
    assert result.code == 2 and result.lines[1] == 'hint: pip install "mcp>=2"'


def test_a_command_traces_a_target_again_if_it_asks_twice(folder, capfd):
    from jaxprtool.cli.session import FunctionOptions, KeptTargets, kept_targets
    from jaxprtool.passes import Pipeline

    kept = KeptTargets()
    token = kept_targets.set(kept)
    try:
        times = []
        for _ in range(2):
            for _ in range(2):
                FunctionOptions("functions.py:double").trace(Pipeline())
                times.append(capfd.readouterr().err.count("traced"))
            kept.earlier, kept.now = kept.now, {}
    finally:
        kept_targets.reset(token)
    assert times == [1, 1, 0, 1]
