"""The page of a recorded run, and its notebook cell: contents, and that names stay text."""

import base64
import gzip
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.analysis.stats import stats
from jaxprtool.commands.cost.estimate import ProgramCost, cost, work_by_equation
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.commands.record.page import Details, record_cell, run_page, with_listing
from jaxprtool.recording.recorded_run import Run
from tests.render.recorded import HOSTILE, PROCESS, compilation, hostile, large, step, training
from tests.render.test_page import Reading

FILES = {"train.py": "\n" * 10 + "@jax.jit\ndef step(params, batch):\n    pass\n" + "\n" * 40}


def details(run, files=None):
    """Return the details of a program, the same for all."""
    program = jaxprtool.trace(jax.grad(lambda w: jnp.tanh(w).sum()), jnp.ones((3, 4)))
    found = Details(
        program,
        stats(program),
        work_by_equation(program),
        cost(program, "line"),
        memory(program),
        ProgramCost(program).by_frame(),
    )
    return dict.fromkeys(files or [each.file for each in with_listing(run)], found)


def unpacked(text, prefix):
    """Return the unpacked parts of a page, by id."""
    scripts = re.findall(rf'<script type="text/plain" id="({prefix}\d+)">([^<]*)</script>', text)
    return {name: gzip.decompress(base64.b64decode(packed)).decode() for name, packed in scripts}


def test_a_page_has_the_functions_and_their_compilations():
    run = training()
    text = run_page(run, details(run), FILES, trace="trace.json")
    read = Reading(text)
    assert [each["id"] for each in read.of("tbody") if "id" in each] == ["fn0", "fn1", "fn2"]
    assert "trace.json" in [each["href"] for each in read.of("a") if "download" in each]
    parts, programs = unpacked(text, "part"), unpacked(text, "program")
    assert len(parts) == 3 and len(programs) == 12
    for html in (*parts.values(), *programs.values()):
        Reading(html)
    step = parts["part0"]
    assert step.count('class="compilation"') == 3 and "compared with step@2" in step
    assert "pad batch, or: jaxprtool.jit(step, shapes=" in step
    assert "TARGET run/step@3" in step and "calls were not counted" in step
    assert "Memory" in programs["program0"] and "tanh" in programs["program0"]


def test_the_flame_graph_has_the_whole_compile_time():
    run = training()
    text = run_page(run, details(run), FILES)
    (graph,) = re.findall(r'<span class="data" hidden>(.*?)</span>', text)
    ((quantity, root, _, lines),) = json.loads(graph)
    assert quantity == "compile time" and root[1] == pytest.approx(run.compile_seconds)
    amounts = {name: amount for name, amount, *_ in root[4]}
    for function in run.functions:
        assert amounts[function.name] == pytest.approx(function.seconds)
    assert sum(lines.values()) == pytest.approx(run.compile_seconds)
    program = unpacked(text, "program")["program0"]
    assert program.index("live at the peak</button>") < program.index("Memory")


def test_later_compilations_show_the_arguments_that_differ():
    (first, second, *_) = step().compilations
    (params, batch) = second.arguments
    shorter = replace(second, arguments=(params, replace(batch, shape=(4, 13))))
    again = replace(step(), compilations=(first, shorter))
    html = unpacked(run_page(training(functions=(again,))), "part")["part0"]
    assert html.count("i32[4,17] → <i>i32[4,13]</i>") == html.count('class="differs"') == 1
    assert html.count("params[") == 1 and "1 other as in step" in html


def test_lines_link_to_the_source_and_back():
    text = run_page(training(), {}, FILES)
    read = Reading(text)
    targets = {each["href"] for each in read.of("a") if "href" in each}
    ids = set(read.ids)
    assert {"#f0-12", "#f0-31", "#q=%22train.py%3A31%22"} <= targets and "f0-31" in ids
    assert all(each[1:] in ids for each in targets if re.match(r"#(f\d|fn)", each))
    line = text[text.index('id="f0-31"') :].partition("</span>")[0]
    assert "<small>25.3 s</small>" in line  # from step, init and the lambda
    without = Reading(run_page(training()))
    assert not without.of("aside") and "#f0-12" not in {e.get("href") for e in without.of("a")}


@pytest.mark.proof
def test_all_scripts_belong_to_the_page():
    for run in (hostile(), training(), large(20)):
        text = run_page(
            run, details(run), {"train.py": HOSTILE, HOSTILE: HOSTILE}, trace="trace.json"
        )
        read = Reading(text)
        scripts = read.of("script")
        assert [each for each in scripts if each.get("type") != "text/plain"] == [{}]
        policy = next(e["content"] for e in read.of("meta") if "http-equiv" in e)
        assert "default-src 'none'" in policy and "sha256-" in policy
        assert not read.of("img") and "onerror=alert(1)>" not in text
        for html in (*unpacked(text, "part").values(), *unpacked(text, "program").values()):
            inside = Reading(html)
            assert not inside.of("script") and not inside.of("img")
            assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", html)


def test_differences_between_processes_are_shown():
    text = run_page(training(), differences={"step": "- add a b\n+ <b>mul</b> a b"})
    assert "- add a b\n+ &lt;b&gt;mul" in text and 'id="differing"' in text


def test_the_listing_of_a_written_program_leads_to_its_source(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import jax\n@jax.jit\ndef step(x):\n    return x * 2\n")
    monkeypatch.chdir(tmp_path)
    jaxprtool.write(jaxprtool.load("train.py:step", "f32[3]"), "step.jaxpr")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    program = jaxprtool.read("../step.jaxpr")
    run = training()
    shown = {run.functions[0].compilations[0].file: Details(program, stats(program))}
    text = run_page(run, shown, {"train.py": (tmp_path / "train.py").read_text()})
    (listing,) = unpacked(text, "program").values()
    assert '<a href="#f0-4">train.py:4</a>' in listing


def test_a_page_has_the_listings_of_the_most_expensive_programs():
    run = large(10)
    assert [each.name for each in with_listing(run, 360)] == ["f0", "f1", "f2"]
    (first, *rest) = run.functions
    lost = replace(first, compilations=(compilation("f0", file=""),))
    assert with_listing(replace(run, functions=(lost, *rest)), 240)[0].name == "f1"
    text = run_page(run, details(run, [each.file for each in with_listing(run, 360)]))
    assert "The listings of 7 programs are not on this page" in text
    assert len(unpacked(text, "program")) == 3
    parts = unpacked(text, "part")
    assert "data-program" in parts["part0"] and "jaxprtool show run/f9" in parts["part9"]


def test_programs_of_the_same_name_in_processes_keep_their_listings():
    (first, second, *_) = step().compilations
    other = replace(second, name="step", process=1, file="process-1/step.jaxpr", reasons=())
    run = training(functions=(replace(step(), compilations=(first, other)),))
    text = run_page(run, details(run))
    assert len(unpacked(text, "program")) == 2
    lanes = [each for each in Reading(text).of("div") if each.get("class") == "lane"]
    assert len(lanes) == 2 and "process 1" in text


@pytest.mark.parametrize("processes", [(), (PROCESS,), (replace(PROCESS, jax=""),)])
def test_an_empty_run(processes):
    text = run_page(Run("run", ("python", "x.py"), 0.0, None, (), (), (), processes))
    used = bool(processes and processes[0].jax)
    assert ("Nothing was compiled." in text) == used != ("JAX was not imported" in text)
    assert not Reading(text).of("figure")


def test_a_cell_has_the_table_and_the_page():
    whole = run_page(training())
    text = record_cell(training(), "run/index.html", whole)
    read = Reading(text)
    assert not read.of("script")
    assert "run/index.html" in [each["href"] for each in read.of("a")]
    (frame,) = read.of("iframe")
    assert frame["srcdoc"] == whole and frame["sandbox"] == "allow-scripts"
    assert "batch: i32[4,17] → i32[4,13]" in text and "82.8%" in text
    assert "<iframe" not in record_cell(training()) and "480 more" in record_cell(large())
    assert not Reading(record_cell(hostile())).of("img")
    assert "JAX was not imported" in record_cell(Run("run", (), 0.0, None, (), ()))
