"""The summary of a recorded run fits one screen and has the reasons. Names do not wrap."""

import re
from dataclasses import replace

import pytest

from jaxprtool.commands.record.table import (
    SCREEN,
    command_text,
    count_rows,
    reason_text,
    recompiled,
    run_summary,
)
from jaxprtool.recording.recorded_run import NextStep, Process, Reason, Run
from tests.render.recorded import HOSTILE, PROCESS, compilation, hostile, large, training


def shown(run, width=80, page="run/index.html", top=None):
    return run_summary(run, width, page, top).plain()


def test_a_summary_of_a_training_script():
    assert shown(training()).splitlines() == [
        "python train.py --steps 100: 41.2 s, 28.4 s (68.9%) of it compiling 12 programs",
        "and 61 small ones, 1 from the persistent cache, exit code 0",
        "",
        "share    total    trace   lower   compile   programs   function",
        "────────────────────────────────────────────────────────────────────────────",
        "82.8%   23.5 s      2 s   1.3 s    20.2 s          3   step  train.py:12",
        " 4.1%   1.15 s   100 ms   50 ms       1 s          1   init  model.py:9",
        " 2.3%   640 ms    80 ms   80 ms    480 ms          8   <lambda>  train.py:40",
        "",
        "compiled more than once, and why",
        "  step, compiled 3 times      batch: i32[4,17] → i32[4,13] at train.py:31, in 2",
        "                              of them",
        "                              lr: ~f32[] → f32[] (~: weak type) at train.py:31",
        "                              advice: pad batch, or: jaxprtool.jit(step,",
        "                              shapes={'batch': 'i32[4,n]'})",
        "                              advice: jnp.asarray(lr, 'float32')",
        "  <lambda>, compiled 8 times  another lambda object at train.py:40, in 7 of them",
        "                              advice: call jax.jit once, before the loop",
        "",
        "61 small computations compiled outside of jit, 3.1 s: train.py:24 (38),",
        "data.py:8 (23)",
        "Python waited 100 times for values from the device, 2.1 s: train.py:44 (100)",
        "copied to the device at each call: step: batch (1.0 MiB)",
        "page: run/index.html",
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("make", [training, large, hostile])
def test_a_summary_fits_a_screen(make, width):
    lines = shown(make(), width).splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= width
    assert lines[-1] == "page: run/index.html"


def test_a_list_that_is_too_long_ends_with_a_whole_item():
    outside = [replace(training().outside_jit[0], line=f"linen_gpt.py:{n}") for n in range(10, 40)]
    text = shown(replace(training(), outside_jit=outside))
    (line,) = re.findall(r"compiled outside of jit.*?(?=\nPython)", text, re.DOTALL)
    assert re.search(r"linen_gpt\.py:\d+ \(38\), …$", line) and "… …" not in text


def test_a_single_row_is_not_cut_to_a_line_that_counts_it():
    steps = [NextStep("again", f"{n}", command="jaxprtool") for n in range(9)]
    run = replace(training(), functions=training().functions[:2], next_steps=steps)
    assert "init  model.py:9" in shown(run)
    assert "init  model.py:9" not in shown(run, top=1)


def test_long_names_keep_their_ends():
    rows = [line for line in shown(large()).splitlines() if "…" in line and " ms " in line]
    assert len(rows) > 5 and len({row.split()[-1] for row in rows}) == len(rows)
    assert "490 more" in shown(large(), 120)


def test_a_summary_names_the_command_that_shows_all_rows():
    run = replace(large(), folder="run-2")
    assert "\nall rows: jaxprtool show run-2/ --all\n" in shown(run)
    assert "all rows: " not in shown(training())
    assert "all rows: " not in shown(run, top=count_rows(run))


def test_all_rows_are_shown_on_request():
    text = shown(large(30), 200, top=100)
    assert "_29  package/modules/transformer/attention_layers.py:29" in text and "more" not in text


def test_escape_sequences_in_names_are_escaped():
    text = shown(hostile(), 120)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "\\x1b[31m" in text


def test_an_empty_run():
    empty = Run("run", ("python", "x.py"), 0.2, 0, (), (), (), (replace(PROCESS, jax=""),))
    assert shown(empty, page="").splitlines() == [
        "python x.py: 200 ms, exit code 0",
        "",
        "JAX was not imported: nothing was recorded.",
    ]
    used = replace(empty, processes=(PROCESS,), exit_code=3)
    assert "exit code 3\n\nNothing was compiled." in shown(used)
    assert "JAX was not imported" in shown(replace(empty, processes=(), command=()))


def test_failures_and_processes_are_named():
    processes = (PROCESS, Process(1, 4712, ("python",), 1.0, 2.0, "0.12", "", "killed by SIGKILL"))
    text = shown(training(processes=processes, differing=("step",), exit_code=-9))
    assert "2 processes, exit code -9" in " ".join(text.split())
    assert "process 1: killed by SIGKILL\n" in text
    assert "programs that differ between processes: step\n" in text
    (step, *rest) = training().functions
    failed = compilation("step", 0.0, (0.1, 0.1, None), error="no such op")
    unwritten = compilation("step@2", error="disk full")
    both = replace(step, kept=2, compilations=(failed, unwritten))
    text = shown(training(functions=(both, *rest)))
    assert "failed: step: no such op\nnot written: step@2: disk full\n" in text
    assert "step (2)\n" in text


def test_a_function_of_several_processes_has_one_row():
    (first, *rest) = training().functions
    other = tuple(replace(c, process=1) for c in first.compilations)
    both = replace(first, compilations=(*first.compilations, *other))
    text = shown(training(functions=(both, *rest)))
    assert "47 s" in text and text.count("  step  train.py:12") == 1
    assert "step, compiled 6 times in 2 processes  batch" in text


def test_more_compilation_time_than_wall_time_has_no_share():
    assert "28.4 s of compiling 12 programs" in shown(training(seconds=10.0))


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Reason("static", "n", "3", "4", "a.py:2"), "static n: 3 → 4 at a.py:2"),
        (Reason("context", "enable_x64", "False", "True", ""), "setting enable_x64: False → True"),
        (Reason("closure", "scale", "1.0", "2.0", ""), "closed-over scale: 1.0 → 2.0"),
        (Reason("cache", "", "", "cleared at a.py:9", "a.py:9"), "cache: cleared at a.py:9"),
        (Reason("structure", "", "2 arguments", "3 arguments", ""), "arguments: 2 arguments → 3"),
    ],
)
def test_reasons_are_in_the_users_terms(reason, text):
    assert reason_text(reason).startswith(text)


def test_functions_without_reasons_are_not_recompiled():
    assert [each.function.name for each in recompiled(training().functions)] == ["step", "<lambda>"]
    assert recompiled(large().functions) == []


def test_a_command_is_one_line():
    assert command_text(("python", "-c", "import jax\nprint(1)")) == (
        "python -c 'import jax print(1)'"
    )
    assert command_text(("/usr/bin/python3", "/home/me/train.py")) == "python3 /home/me/train.py"
    assert len(command_text((HOSTILE,) * 9)) == 60 and command_text(()) == "a run"
