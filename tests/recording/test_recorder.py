"""The records of a `with` block: programs, compilations, calls, saved arguments."""

import importlib
import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.api.targets import find_entry
from jaxprtool.commands.record.record import record
from jaxprtool.commands.record.table import run_summary
from jaxprtool.errors import ArgumentsError, OutputError, TargetError
from jaxprtool.ir import source_text
from jaxprtool.ir.source_text import changed_notes
from jaxprtool.jaxcompat.source_locations import user_frame
from jaxprtool.recording.folder import KeptSources
from jaxprtool.recording.read import read_run
from tests.jax_state import changed, jax_state

#: A line that this file does not contain.
EDIT = "# an" + " edit\n"


def here(text):
    """Return `file.py:N` of the line of this file that contains a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line and "here(" not in line)
    return f"{os.path.basename(__file__)}:{number}"


def events(folder, kind):
    lines = (Path(folder) / "process-0" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that records in a folder, without internal errors."""
    monkeypatch.chdir(tmp_path)
    yield partial(record, "run")
    assert events("run", "failed") == []


def test_each_compilation_of_a_function_is_recorded_with_its_lines_and_times(run):
    with run() as recording:

        @jax.jit  # the decorator
        def scaled(x):
            return x * 2.0

        for size in (3, 3, 4):
            scaled(jnp.ones(size)).block_until_ready()  # the call
    (function,) = recording.run.functions
    assert function.name == "scaled"
    assert function.jit_line == function.line == here("# the decorator")
    assert [each.name for each in function.compilations] == ["scaled", "scaled@2"]
    first, second = function.compilations
    assert first.line == second.line == here("# the call")
    assert first.equations == 1
    assert min(first.trace_seconds, first.lower_seconds, first.compile_seconds) > 0
    assert [each.type for each in (*first.arguments, *second.arguments)] == ["f32[3]", "f32[4]"]
    assert first.reasons == ()
    (reason,) = second.reasons
    assert (reason.kind, reason.path) == ("shape", "x")
    assert (reason.before, reason.after) == ("f32[3]", "f32[4]")


def test_programs_can_be_read_and_compute_the_same(run):
    x = np.linspace(0.0, 1.0, 5, dtype=np.float32)
    with run() as recording:
        f = jax.jit(lambda tree, *, y: {"sum": tree["a"].sum() + y, "all": jnp.sin(tree["a"])})
        expected = f({"a": x}, y=2.0)
    program = recording.programs["lambda"]
    assert program.arg_names == ("tree['a']", "y")
    assert program.out_names == ("result['all']", "result['sum']")
    assert jax.tree.map(np.array_equal, program({"a": x}, y=2.0), expected) == {
        "all": True,
        "sum": True,
    }
    assert find_entry("run/lambda").trace().name == "<lambda>"


def test_source_lines_are_shown_until_their_file_changes(run):
    module = Path("module.py")
    module.write_text("import jax\n\n\n@jax.jit\ndef f(x):\n    return x * 2\n")
    os.utime(module, (0, 0))
    names = {}
    with run():
        exec(compile(module.read_text(), str(module.absolute()), "exec"), names)
        names["f"](1.0)
    (eqn,) = find_entry("run/f").trace().jaxpr.eqns
    assert user_frame(eqn).file == str(module.absolute())
    module.touch()
    with source_text.citations() as cited:
        read_run("run")
    assert not cited
    (eqn,) = find_entry("run/f").trace().jaxpr.eqns
    assert user_frame(eqn).file == str(module.absolute())
    module.write_text("# a comment\n" + module.read_text())
    os.utime(module, (0, 0))  # a new text with an old time
    with source_text.citations() as cited:
        assert read_run("run").functions[0].line == "module.py:4"
    assert [*cited.values()] == ["module.py"]
    program = find_entry("run/f").trace()
    file = user_frame(program.jaxpr.eqns[0]).file
    assert source_text.path(file) == "module.py" and source_text.has_changed(file)
    assert source_text.line(file, 6) == "return x * 2"  # as it was recorded
    assert not source_text.reason(file)
    assert changed_notes(cited) == [
        "module.py has changed since run/ was recorded (1 line); record it again"
    ]
    assert program.jaxpr.debug_info.func_src_info == f"f at {file}:4"


def test_the_page_of_a_run_has_the_text_that_ran_if_it_is_edited_while_it_runs(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # where a module may be reloaded
    module = Path("module.py")
    module.write_text("import jax\n\n\n@jax.jit\ndef f(x):\n    return x * 2\n")
    os.utime(module, (0, 0))
    names = {}
    with run():
        exec(compile(module.read_text(), str(module.absolute()), "exec"), names)
        names["f"](1.0)
        module.write_text(EDIT + module.read_text())
        names["f"](jnp.ones(2))  # compiles again, with the lines of then
    page = Path("run/index.html").read_text()
    assert '"facts">module.py has changed since' not in page and EDIT.strip() not in page
    for name in ("run/f", "run/f@2"):
        file = user_frame(find_entry(name).trace().jaxpr.eqns[0]).file
        assert source_text.line(file, 6) == "return x * 2"


def test_a_file_that_was_edited_before_it_was_first_seen_has_no_text(run):
    module = Path("module.py")
    code = "import jax\n\n\n@jax.jit\ndef f(x):\n    return x * 2\n"
    with run():
        module.write_text(EDIT + code)
        os.utime(module, (2e9, 2e9))
        names = {}
        exec(compile(code, str(module.absolute()), "exec"), names)
        names["f"](1.0)
    page = Path("run/index.html").read_text()
    assert '"facts">module.py has changed since it was' in page and EDIT.strip() not in page
    assert all(EDIT.strip() not in path.read_text() for path in Path("run/sources").iterdir())


def test_a_module_that_was_reloaded_has_no_text_of_before(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "reloaded_module.py"
    path.write_text("x = 1\n")
    os.utime(path, (0, 0))
    module = importlib.import_module("reloaded_module")
    sources = KeptSources(str(tmp_path / "run"), time.time())
    digest = sources.keep(str(path))
    path.write_text(EDIT + "x = 1\n")
    os.utime(path, (2e9, 2e9))
    assert digest and sources.keep(str(path)) == digest
    importlib.reload(module)
    assert sources.keep(str(path)) == ""


@pytest.mark.proof
def test_a_run_keeps_each_text_once_and_no_libraries(run):
    for name in ("one.py", "two.py", "three.py"):
        text = "import jax\n\n\n@jax.jit\ndef f(x):\n    return jax.nn.gelu(x * 2)\n"
        Path(name).write_text(text + ("" if name != "three.py" else "\n"))
        os.utime(name, (0, 0))
    with run():
        for name in ("one.py", "two.py", "three.py"):
            names = {}
            exec(compile(Path(name).read_text(), os.path.abspath(name), "exec"), names)
            names["f"](1.0)
            names["f"](jnp.ones(3))
    own = Path(__file__).read_text()
    texts = [path.read_text() for path in Path("run/sources").iterdir()]
    assert sorted(text for text in texts if text != own) == sorted(
        {Path("one.py").read_text(), Path("three.py").read_text()}
    )


@pytest.mark.proof
def test_jaxs_operations_and_functions_are_grouped_by_the_users_line(run):
    with run() as recording:
        for size in (11, 12):
            jnp.linspace(0, 1, size) + jnp.ones(size)  # eager
    found = recording.run
    assert found.functions == ()
    (line,) = found.outside_jit
    assert line.line == here("# eager")
    assert line.count == sum(line.names.values()) >= 4
    assert line.seconds > 0


def test_staged_programs_are_recorded_even_if_their_arguments_are_deleted(run):
    with run() as recording:

        @jax.jit
        def staged(x, count):
            return x * count

        traced = staged.trace(jax.ShapeDtypeStruct((3,), jnp.float32), 2)
        staged.trace(jax.ShapeDtypeStruct((4,), jnp.float32), 2)
        traced.lower().compile()
    (function,) = recording.run.functions
    (each,) = function.compilations
    assert [argument.type for argument in each.arguments] == ["f32[3]", "~i32[]"]
    assert each.compile_seconds > 0


def test_a_program_that_was_only_lowered_has_no_compilation_time(run):
    with run() as recording:
        jax.jit(lambda x: x + 1).lower(1.0)
    assert recording.compilations[0].compile_seconds is None


def test_jaxs_derivatives_of_a_jitted_function_are_recorded(run):
    with run() as recording:

        @jax.jit
        def square(x):
            return x * x

        jax.grad(lambda x: square(x).sum())(jnp.ones(3))
    found = recording.run.functions
    assert {each.name for each in found} == {"square"}
    assert sum(len(each.compilations) for each in found) >= 2


def test_a_function_called_by_another_is_part_of_its_program(run):
    with run() as recording:
        inner = jax.jit(lambda x: jnp.sin(x))

        @jax.jit
        def outer(x):
            return inner(x) + 1

        outer(1.0)
    assert [each.name for each in recording.run.functions] == ["outer"]


def test_functions_of_one_name_are_numbered(run):
    def make(scale):
        if scale:
            return jax.jit(lambda x: x * 2)
        return jax.jit(lambda x: x + 2)

    with run() as recording:
        make(True)(1.0), make(False)(1.0)
    assert {each.name for each in recording.run.functions} == {"lambda", "lambda-2"}


def test_static_arguments_and_methods_are_named(run):
    class Model:
        def __init__(self, width):
            self.width = width

        @partial(jax.jit, static_argnames=("self", "mode"))
        def apply(self, x, mode):
            return x * self.width

    with run() as recording:
        model = Model(3)
        model.apply(1.0, mode="a")
        model.apply(1.0, mode="b")
    first, second = recording.compilations
    assert first.statics["mode"] == "'a'"
    assert [(each.kind, each.path) for each in second.reasons] == [("static", "mode")]


def test_a_failed_compilation_is_recorded_with_the_error(run):
    with run() as recording, pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: x + 1, compiler_options={"no_such_option": True})(1.0)
    (each,) = recording.compilations
    assert "no_such_option" in each.error
    assert each.file


def test_clearing_a_cache_is_the_reason_for_the_next_compilation(run):
    with run() as recording:
        f = jax.jit(lambda x: x - 1)
        f(1.0)
        f.clear_cache()  # cleared
        f(1.0)
    (reason,) = recording.compilations[1].reasons
    assert (reason.kind, reason.line) == ("cache", here("# cleared"))


def test_config_changes_are_reasons(run):
    with run() as recording:
        f = jax.jit(lambda x: x @ x)
        x = jnp.ones((4, 4))
        f(x)
        with jax.default_matmul_precision("highest"):
            f(x)
    (reason,) = recording.compilations[1].reasons
    assert (reason.kind, reason.path) == ("context", "default_matmul_precision")


# --- constants and callbacks ----------------------------------------------------------------------


def test_large_constants_are_written_once(run):
    data = jnp.arange(5000.0)
    with run() as recording:
        f = jax.jit(lambda i: data[i])
        f(1), f(jnp.arange(2))
    files = list(Path("run/process-0").glob("*.npz"))
    assert len(files) == 1
    assert recording.programs["lambda@2"](jnp.arange(2))[1] == 1


def test_without_constants_they_become_arguments(run):
    data = jnp.arange(5000.0)
    with run(constants=False) as recording:
        jax.jit(lambda i: data[i] * 3.0)(2)
    assert not list(Path("run/process-0").glob("*.npz"))
    program = recording.programs["lambda"]
    assert program.arg_names == ("i", "closed_over[0]")
    assert program.in_avals[1].shape == (5000,)


def test_callbacks_are_stubs(run):
    with run() as recording:

        @jax.jit
        def noisy(x):
            jax.debug.print("{}", x)
            return x + 1

        noisy(1.0)
    assert recording.compilations[0].error == ""
    assert recording.programs["noisy"].name == "noisy"


# --- transfers and calls --------------------------------------------------------------------------


def test_values_that_python_reads_are_counted_by_line(run):
    with run() as recording:
        f = jax.jit(lambda x: x + 1)
        for i in range(3):
            float(f(np.float32(i)))  # waits
    waits = [each for each in recording.run.transfers if each.kind == "to_host"]
    assert [(each.line, each.count, each.bytes) for each in waits] == [(here("# waits"), 3, 12)]


def test_numpy_arguments_are_copied_to_the_device(run):
    with run(calls=True) as recording:
        f = jax.jit(lambda x: x + 1)
        for _ in range(3):
            f(np.ones(4, np.float32))
    (copied,) = (each for each in recording.run.transfers if each.kind == "to_device")
    assert (copied.path, copied.count, copied.bytes) == ("lambda: x", 3, 48)


def test_calls_are_counted_only_on_request(run):
    with run(calls=True) as recording:

        @partial(jax.jit, donate_argnums=0)
        def step(state):
            return state + 1, state.sum()

        state = jnp.zeros(100)
        for _ in range(5):
            state, total = step(state)
    assert float(total) == 400.0
    calls = recording.run.functions[0].calls
    assert (calls.count, calls.timed) == (5, 5)
    assert 0 < calls.longest <= calls.seconds
    assert recording.run.calls_counted


def test_functions_that_are_never_called_use_no_name(run):
    with run(calls=True) as recording:
        jax.jit(lambda x: x)
        jax.jit(lambda x: x + 1)(1.0)
    assert list(recording.programs) == ["lambda"]


def test_a_counted_function_can_be_used_like_any_other(run):
    with run(calls=True):

        @jax.jit
        def double(x):
            """Doubles."""
            return x * 2

        class Model:
            @jax.jit
            def apply(self):
                return 1

            apply_to = jax.jit(lambda self, x: x * 2, static_argnums=0)

        assert isinstance(double, type(jax.jit(len)))
        assert double.__doc__ == "Doubles."
        assert double.lower(1.0).compile()(1.0) == 2.0
        assert jax.vmap(double)(jnp.ones(3)).shape == (3,)
        assert jax.grad(double)(1.0) == 2.0
        assert jax.jit(double)(2.0) == 4.0
        assert Model().apply_to(3.0) == 6.0
    assert double(4.0) == 8.0  # after the block


@pytest.mark.proof
def test_a_transformed_function_behind_a_wrapper_has_the_users_line_and_its_time_of_tracing(run):
    def jitted_by_a_package(fun):
        return jax.jit(Shared(fun))

    class Shared:  # JAX's debug information has one place for all of these: the class
        def __init__(self, fun):
            self.__wrapped__ = fun

        def __call__(self, x):
            return self.__wrapped__(x)

    @jitted_by_a_package  # the batched function
    def batched(x):
        return jnp.sin(x) * 2.0

    @jitted_by_a_package  # the differentiated function
    def differentiated(x):
        return jnp.sin(x) * 3.0

    with run() as recording:
        jax.vmap(batched)(jnp.ones(3))
        jax.vmap(batched)(jnp.ones(3))
        jax.grad(differentiated)(1.0)
        jax.jit(lambda x: jax.vmap(batched)(x))(jnp.ones(4))
    lines = {each.line: each for each in recording.run.functions}
    expected = {
        here("# the batched"),
        here("# the differentiated"),
        here("jax.jit(lambda x: jax.vmap"),
    }
    assert set(lines) == expected
    for function in lines.values():
        assert function.compilations[0].trace_seconds > 0


# --- the flight recorder --------------------------------------------------------------------------


def test_the_last_calls_are_saved_before_their_buffers_are_donated(run):
    with run(keep={"step": 2}) as recording:

        @partial(jax.jit, donate_argnames="state", static_argnames="mode")
        def step(state, key, rate, mode="a"):
            noise = jax.random.normal(key, state["w"].shape, state["w"].dtype)
            return {"w": state["w"] * rate + noise}

        state, key = {"w": jnp.ones(3, jnp.bfloat16)}, jax.random.key(7)
        for i in range(4):
            before = state["w"].copy()
            state = step(state, key, 0.5 + i, mode="b")
        last = state["w"]
    assert recording.run.functions[0].kept == 2
    entry = find_entry("run/step")
    kept_state, kept_key, rate = entry.arguments()
    assert kept_state.dtype == jnp.bfloat16
    assert np.array_equal(kept_state, before)
    assert rate == 3.5
    assert np.array_equal(entry.trace()({"w": jnp.asarray(kept_state)}, kept_key, rate)["w"], last)


def test_a_saved_call_selects_its_compilation(run):
    with run(keep={"f": 1}):

        @jax.jit
        def f(x):
            return x + 1

        f(jnp.ones(3)), f(jnp.ones(4)), f(np.ones(3))
    assert find_entry("run/f").trace().in_avals[0].shape == (3,)
    assert find_entry("run/f@2").trace().in_avals[0].shape == (4,)
    assert isinstance(find_entry("run/f@2").arguments()[0], jax.ShapeDtypeStruct)


def test_a_run_stops_at_the_first_nan(run):
    message = r"result\['loss'\] of call 3 of step has a NaN"
    with (
        pytest.raises(FloatingPointError, match=message),
        run(keep={"step": 1}, until="nan") as recording,
    ):

        @jax.jit
        def step(x):
            return {"loss": jnp.log(x), "next": x - 1}

        x = jnp.float32(1.0)
        while True:
            x = step(x)["next"]
    assert recording.run.functions[0].kept == 1
    assert find_entry("run/step").arguments()[0] == -1.0


@pytest.mark.parametrize(("until", "keep"), [("inf", {"step": 1}), ("nan", {})])
def test_an_end_without_a_check_is_refused(tmp_path, until, keep):
    with (
        pytest.raises(ArgumentsError, match=f"--until {until}"),
        record(tmp_path / "run", keep=keep, until=until),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_arguments_beyond_the_size_limit_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with record("run", keep={"f": 1}, keep_bytes=100):

        @jax.jit
        def f(x):
            return x + 1

        f(jnp.ones(1000))
    assert events("run", "not_kept")[0]["bytes"] == 4000
    assert not Path("run/process-0/kept").exists()


# --- the folder -----------------------------------------------------------------------------------


@pytest.mark.proof
def test_jax_is_unchanged_afterwards(tmp_path):
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()
    before = jax_state()
    with record(tmp_path / "run", calls=True):
        jax.jit(lambda x: x + 2)(1.0).block_until_ready()
    assert changed(before, jax_state()) == []


def test_an_internal_exception_is_recorded_and_not_raised(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("of ours")

    monkeypatch.setattr("jaxprtool.recording.recorder.lowered_program", broken)
    with record(tmp_path / "run") as recording:
        assert jax.jit(lambda x: x + 1)(1.0) == 2.0
    assert events(tmp_path / "run", "failed")[0]["error"] == "RuntimeError: of ours"
    assert "of ours" in recording.run.processes[0].ending


def test_a_run_does_not_overwrite_another(run):
    with run() as first:
        jax.jit(lambda x: x + 1)(1.0)
    with run():
        with pytest.raises(OutputError, match="'run' is being recorded by another"), run():
            pass
        with pytest.raises(OutputError, match="is being recorded"), run(overwrite=True):
            pass
    assert (first.folder, [*first.programs]) == ("run-1", ["lambda"])
    with run(overwrite=True):
        pass
    with record() as newest:
        pass
    assert newest.folder == "run" and Path("run/.gitignore").read_text() == "*\n"
    assert sorted(path.name for path in Path().iterdir()) == ["run", "run-1", "run-2"]
    Path("other").mkdir()
    Path("other/file").touch()
    with pytest.raises(OutputError, match="other files"), record("other", overwrite=True):
        pass


def test_a_truncated_event_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with record("run"):
        jax.jit(lambda x: x + 1)(1.0)
    file = Path("run/process-0/events.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    compiled = next(i for i, line in enumerate(lines) if b'"compiled"' in line)
    file.write_bytes(b"".join(lines[:compiled]) + lines[compiled][:10])
    found = read_run("run")
    assert found.compilations[0].compile_seconds is None
    assert found.processes[0].ending


@pytest.mark.parametrize("phase", ["tracing", "lowering", "compiling"])
def test_a_process_that_is_killed_says_in_what_and_for_how_long(tmp_path, monkeypatch, phase):
    monkeypatch.chdir(tmp_path)

    def step(x):
        return x + 1

    with record("run"):
        jax.jit(step)(1.0)
    file = Path("run/process-0/events.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    begins = next(i for i, line in enumerate(lines) if f'"{phase}"'.encode() in line)
    file.write_bytes(b"".join(lines[: begins + 1]))
    about = json.loads(Path("run/run.json").read_text())
    about["seconds"] = json.loads(lines[begins])["time"] - about["start"] + 395
    Path("run/run.json").write_text(json.dumps(about))
    found = read_run("run")
    [unfinished] = found.unfinished
    assert (unfinished.phase, unfinished.name) == (phase, "step")
    assert "test_recorder.py:" in unfinished.line
    assert unfinished.seconds == pytest.approx(395)
    said = " ".join(run_summary(found, 200).plain().split())
    assert f"{phase} step for 395 s, not finished" in said
    if phase == "compiling":
        assert found.compilations[0].unfinished_seconds == pytest.approx(395)
        assert (found.compile_seconds > 395 and "100.0%" in said) or "99." in said


def test_what_a_running_process_does_is_known(run):
    def step(x):
        found.append(recording.run.unfinished)
        return x + 1

    found = []
    with run() as recording:
        jax.jit(step)(1.0)
        assert recording.run.unfinished == ()
    [unfinished] = found[0]
    assert (unfinished.phase, unfinished.name) == ("tracing", "step")


def test_a_running_recording_has_not_ended(run):
    with run() as recording:
        jax.jit(lambda x: x + 1)(1.0)
        (process,) = recording.run.processes
        assert process.ending == ""
        assert len(recording.compilations) == 1


def test_unknown_names_are_refused_with_similar_ones(run):
    with run():
        jax.jit(lambda x: x + 1)(1.0)
    with pytest.raises(TargetError, match="has no program 'lamda'") as refused:
        find_entry("run/lamda")
    assert refused.value.hint == "did you mean 'run/lambda'?"
    with pytest.raises(TargetError, match="is a recorded run of 1 program"):
        find_entry("run/")
    with pytest.raises(TargetError, match="holds no recorded run"):
        read_run(".")


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"), record(tmp_path / "file" / "run"):
        pass


def test_a_full_disk_stops_the_recording_and_not_the_script(tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings(), record(tmp_path / "run"):
        f = jax.jit(lambda x: x + 1)
        f(1.0)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("jaxprtool.recording.new_run.os.write", full)
        assert f(jnp.ones(2))[0] == 2.0
        assert f(jnp.ones(3))[0] == 2.0
        monkeypatch.undo()
    message = capsys.readouterr().err
    assert message.count("recording stopped") == 1
    assert "No space left on device" in message


# --- what the caller does with arguments and values ---------------------------------------------


@jax.jit
def halved(state):
    return {"w": state["w"] * 0.5}


@pytest.mark.proof
def test_arguments_that_the_caller_drops_in_the_line_of_the_call_are_told_from_those_it_keeps(run):
    with run() as recording:
        step, other = jax.jit(lambda state: halved(state)), jax.jit(lambda old: halved(old))
        state = {"w": jnp.ones((512, 512))}
        state = step(state)
        new = other(state)
        state = new
        small = jax.jit(lambda x: x + 1)(jnp.ones(8))
        del small
    fates = [program.after_call for program in recording.programs.values()]
    assert fates == [(("state['w']", "dropped"),), (("old['w']", "kept"),), ()]


def test_an_array_that_is_given_twice_is_kept(run):
    with run() as recording:
        array = jnp.ones((512, 512))
        array, other = jax.jit(lambda x, y: (x * 2, y * 3))(array, array)
        del other
    [program] = recording.programs.values()
    assert dict(program.after_call) == {"x": "kept", "y": "kept"}


def test_the_values_of_a_call_are_counted_together_when_python_has_specialized_it(run):
    def read(value):
        float(value)

    with run() as recording:
        inverse = jax.jit(lambda x: 1 / x)
        for step in range(20):
            read(inverse(15.0 - min(step, 15)))
    [reads] = recording.run.not_finite
    assert (reads.first, reads.count, reads.bad) == (16, 20, 5)


def test_the_first_value_that_is_not_finite_is_found_where_the_script_reads_it(run):
    with run() as recording:
        scaled = jax.jit(lambda x: x * 10.0)
        for power in range(30, 42, 2):
            float(scaled(10.0**power)), float(scaled(1.0))  # two values
        float(scaled(jnp.nan))  # one value
        np.asarray(scaled(jnp.array([1.0, jnp.inf])))  # a mask
    infinite, nan = recording.run.not_finite
    assert (infinite.line, infinite.is_nan, infinite.type) == (here("# two"), False, "f32[]")
    assert (infinite.first, infinite.count, infinite.bad) == (5, 6, 2)
    assert (nan.line, nan.is_nan, nan.count) == (here("# one value"), True, 1)
