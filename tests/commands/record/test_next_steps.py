"""What to do about a recorded run: its findings, with the commands to paste."""

import json
import shlex
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.record.next_steps import next_steps
from jaxprtool.commands.record.page import record_cell, run_page
from jaxprtool.commands.record.table import run_summary
from jaxprtool.errors import ProgramFileError
from jaxprtool.recording.read import read_run
from jaxprtool.recording.recorded_run import NextStep, NotFinite


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a run of a training script with several mistakes."""
    folder = str(tmp_path_factory.mktemp("mistakes") / "run")
    with jaxprtool.record(folder):

        @jax.jit
        def step(state, x, key):
            noise = jax.random.normal(key, x.shape) + jax.random.normal(key, x.shape)
            velocity = 0.9 * state["v"] + noise.sum()
            new = {"w": state["w"] - velocity, "v": velocity}
            return new, jnp.log(-jnp.square(x).sum())

        state = {"w": jnp.ones((1024, 512)), "v": jnp.ones((1024, 512))}
        for size in (3, 4):
            state, loss = step(state, jnp.ones(size), jax.random.key(0))
            float(loss)
    return replace(read_run(folder), command=("python", "train.py", "--steps", "2"), folder="run")


@pytest.mark.proof
def test_each_kind_of_finding_has_its_line_and_a_command(recorded):
    nan, lint, donate, again = recorded.next_steps
    file = __file__.rpartition("/")[2]
    assert [step.kind for step in recorded.next_steps] == ["not_finite", "lint", "donate", "again"]
    assert all(file in step.line and step.program == "step" for step in (nan, lint, donate))
    assert nan.text == "all 2 values read here are NaN"
    assert lint.text.startswith(f"1 finding of lint: key reuse at {lint.line}")
    assert donate.text.startswith(
        'donate_argnames="state" of jax.jit saves up to 2.0 MiB at the peak'
    )
    assert again.text.startswith("step was compiled 2 times") and again.program == "step@2"
    for step, words in ((lint, "lint"), (donate, "memory"), (again, "diff")):
        assert step.command.startswith(f"jaxprtool {words} ")


def unreadable(compilation):
    raise ProgramFileError("damaged")


def test_the_command_for_a_nan_records_the_script_again(recorded):
    first, *_ = next_steps(recorded, unreadable)
    assert first.command == "jaxprtool record --keep step --until nan train.py --steps 2"
    other = next_steps(replace(recorded, command=("bash", "a b.sh")), unreadable)[0]
    assert other.command == "jaxprtool record --keep step --until nan -- bash 'a b.sh'"
    cell = next_steps(replace(recorded, command=()), unreadable)[0].command
    assert cell == "%%record --keep step --until nan"


@pytest.mark.parametrize(
    "count, bad, text",
    [
        (8, 6, "the values read here are NaN from number 3 of 8 on"),
        (8, 2, "2 of 8 values read here are NaN, first number 3"),  # the last one may be NaN
        (0, 0, "the values read here are NaN from number 3 on"),  # the process was killed
    ],
)
def test_values_are_nan_from_one_on_if_all_after_it_are(recorded, count, bad, text):
    reads = NotFinite("train.py:8", "f32[]", True, 3, count, bad)
    run = replace(recorded, not_finite=(reads,), functions=())
    assert [step.text for step in next_steps(run, None)] == [text]


def test_a_line_that_reads_a_nan_in_two_calls_is_named_once(recorded):
    first, other = (NotFinite(f"train.py:{n}", "f32[]", True, 3, 8, 6) for n in (8, 9))
    run = replace(recorded, not_finite=(first, first, other), functions=())
    assert [step.line for step in next_steps(run, None)] == ["train.py:8", "train.py:9"]


def test_programs_that_lint_has_no_time_for_are_counted(recorded, monkeypatch):
    monkeypatch.setattr("jaxprtool.commands.record.next_steps._LEAST_SECONDS", -1.0)
    skipped = next_steps(recorded, None, most_of_run=-1.0)[1]
    assert skipped.text == "not checked by lint, to save time: 2 programs of 2"
    assert skipped.command == "jaxprtool lint run/"


@pytest.mark.parametrize("width", [80, 160])
def test_the_summary_ends_with_at_most_ten_lines_that_can_be_pasted(recorded, width):
    steps = (*recorded.next_steps, *(NextStep("again", f"{i}", "", "", "x") for i in range(9)))
    lines = run_summary(replace(recorded, next_steps=steps), width).plain().splitlines()
    lines = lines[lines.index("what to do") :]
    assert len(lines) <= 10 and max(map(len, lines)) <= width
    text = "\n".join(lines).replace(" \\\n      ", " ")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert commands == [step.command for step in steps if step.command][: len(commands)]


def test_the_page_links_to_functions_and_lines(recorded):
    page = run_page(recorded)
    section = page.partition('id="steps"')[2].partition("</section>")[0]
    assert "What to do" in section and section.count('href="#fn0"') == 4
    assert "jaxprtool memory" in section and "all 2 values read here are NaN" in section


def test_report_writes_the_page_of_a_whole_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jaxprtool.record("run"):
        jax.jit(lambda x: x + 1)(jnp.ones(3))
    (tmp_path / "run" / "index.html").unlink()
    assert cli("report", "run/").code == 0 and (tmp_path / "run" / "index.html").exists()
    assert cli("report", "run", "-o", "page.html").code == 0
    assert "1 program" in (tmp_path / "page.html").read_text()
    failed = cli("report", "run", "-p", "dce")
    assert failed.code and "run/NAME" in failed.err


def test_a_kept_call_with_a_nan_is_read_by_nans(recorded):
    step = replace(recorded.functions[0], kept=1)
    ending = "FloatingPointError: result of call 5 of step has a NaN (jaxprtool record --until)"
    process = replace(recorded.processes[0], ending=ending)
    run = replace(recorded, functions=(step,), processes=(process,), not_finite=())
    first = next_steps(run, unreadable)[0]
    assert first.command == "jaxprtool nans run/step" and first.kind == "not_finite"
    run = replace(run, processes=recorded.processes)
    assert next_steps(run, unreadable)[0].command != first.command


def test_another_function_object_needs_no_diff(recorded):
    once, again = recorded.functions[0].compilations
    reason = replace(again.reasons[0], kind="function", path="")
    repeated = replace(again, reasons=(reason,))
    for compilations, command in (
        ((once, repeated), ""),
        ((once, repeated, again), "jaxprtool diff run/step run/step@2"),
    ):
        function = replace(recorded.functions[0], compilations=compilations)
        *_, last = next_steps(replace(recorded, functions=(function,)), unreadable)
        assert last.kind == "again" and last.command == command


def test_a_run_without_findings_names_the_report_of_its_slowest_program(tmp_path):
    with jaxprtool.record(str(tmp_path / "run")):
        jax.jit(lambda x: x + 1)(jnp.ones(3))
    run = replace(read_run(str(tmp_path / "run")), folder="run")
    (step,) = run.next_steps
    assert step.command.startswith("jaxprtool report ")
    assert step.text == "see the FLOPs, bytes, memory and gradient of lambda"


def test_a_gradient_that_is_zero_has_the_command_that_shows_why(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loss(params, x):
        return jnp.square((params["gate"] > 0) * x @ params["w"]).mean()

    with jaxprtool.record("run"):

        @jax.jit
        def step(params, x):
            value, slopes = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value

        step({"gate": jnp.ones(8), "w": jnp.ones((8, 8))}, jnp.ones((4, 8)))
    (zero,) = read_run("run").next_steps
    assert zero.text.startswith("the gradient with respect to params['gate'] is zero: gt (")
    assert zero.command == """jaxprtool why run/step:loss --gradient "params['gate']\""""
    shown = cli(*shlex.split(zero.command)[1:])
    assert shown.code == 0 and "a comparison has no derivative" in shown.out
    (finding,) = json.loads(cli("lint", "run/", "--json").out)["findings"]
    assert (finding["code"], finding["command"]) == ("JT803", zero.command)


def test_an_array_that_was_read_after_it_was_donated_is_named(recorded):
    (function,) = (function for function in recorded.functions if function.name == "step")
    first, *others = function.compilations
    donated = tuple(replace(argument, donated=True) for argument in first.arguments[:1])
    function = replace(function, compilations=(replace(first, arguments=donated), *others))
    ended = "RuntimeError: Array has been deleted with shape=float32[1024,512]."
    processes = tuple(replace(process, ending=ended) for process in recorded.processes)
    run = replace(recorded, processes=processes, functions=(function,), not_finite=())
    step = next_steps(run, unreadable)[0]
    assert step.text.endswith("after step took its memory: step donates state['v']")
    assert step.command == "jaxprtool memory run/step"


def test_a_step_without_a_finding_leads_to_its_gradient(tmp_path):
    with jaxprtool.record(str(tmp_path / "run")):
        jax.jit(lambda w, x: w - jax.grad(quadratic)(w, x))(jnp.ones(4), jnp.ones(4))
    _, hint = read_run(str(tmp_path / "run")).next_steps
    assert hint.command.endswith(":quadratic --gradient w")


def quadratic(w, x):
    return jnp.square(w * x).sum()


def test_the_cell_of_a_notebook_says_how_to_run_it_again(recorded):
    interactive = replace(recorded, command=())
    cell = record_cell(replace(interactive, next_steps=next_steps(interactive, unreadable)))
    assert "<samp>%%record --keep step --until nan</samp>" in cell
