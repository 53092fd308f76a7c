"""The trace of a recorded run follows the trace event format: its slices nest in tracks."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from jaxprtool.recording.recorded_run import Process, Run, perfetto
from tests.render.recorded import PROCESS, compilation, hostile, large, step, training

#: The required and the optional keys of an event, by phase.
REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "M": {"name", "pid", "tid"},
}
METADATA = {
    "process_name": str,
    "process_labels": str,
    "process_sort_index": int,
    "thread_name": str,
    "thread_sort_index": int,
}


def events(run):
    """Return the events of a run's trace, after a check of each."""
    found = json.loads(perfetto(run))
    assert found.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str | float) for value in found["otherData"].values())
    for each in found["traceEvents"]:
        assert each.keys() - {"ph", "args"} == REQUIRED[each["ph"]]
        assert type(each["pid"]) is type(each["tid"]) is int and each["pid"] > 0
        if each["ph"] == "M":
            (value,) = each["args"].values()
            assert type(value) is METADATA[each["name"]]
        else:
            assert each["name"] and each["ts"] >= 0 and each.get("dur", 0) >= 0
            assert each.get("s", "p") in ("g", "p", "t")
    return found["traceEvents"]


def tracks(found):
    """Return the slices of each track, by its process and thread."""
    slices = defaultdict(list)
    for each in found:
        if each["ph"] == "X":
            slices[each["pid"], each["tid"]].append(each)
    return slices


def names(found):
    """Return the name of each track."""
    return {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in found
        if each["name"] == "thread_name"
    }


@pytest.mark.parametrize("make", [training, large, hostile])
def test_slices_of_a_track_nest(make):
    found = events(make())
    assert tracks(found).keys() == names(found).keys()
    for slices in tracks(found).values():
        open_until = []
        for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
            while open_until and open_until[-1] <= each["ts"]:
                open_until.pop()
            end = round(each["ts"] + each["dur"], 3)
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_a_compilation_has_its_phases_and_reasons():
    found = events(training())
    again = next(each for each in found if each["name"] == "step@2")
    assert (again["ts"], again["dur"], again["cat"]) == (14e6, 8.2e6, "compiled again")
    (reason,) = again["args"]["reasons"]
    assert reason.startswith("shape: batch: i32[4,17] → i32[4,13] at train.py:31 (pad batch")
    inside = [
        each["name"]
        for each in tracks(found)[again["pid"], again["tid"]]
        if again["ts"] <= each["ts"] and each["ts"] + each["dur"] <= again["ts"] + again["dur"]
    ]
    assert inside == ["step@2", "trace", "lower", "compile"]


def test_each_function_has_its_own_track():
    found = events(training())
    assert list(names(found).values()) == ["process", "compilations", "step", "init", "<lambda>"]
    assert [each["name"] for each in found if each["ph"] == "i"] == [
        "38 outside of jit at train.py:24",
        "23 outside of jit at data.py:8",
    ]


def test_overlapping_slices_go_to_additional_tracks():
    inner = replace(step(), name="inner", compilations=(compilation("inner", 2.1),))
    found = events(training(functions=(step(), inner)))
    assert list(names(found).values())[1:4] == ["compilations", "compilations", "step"]


def test_processes_are_separate():
    (first, *rest) = step().compilations
    both = replace(step(), compilations=(first, *(replace(each, process=1) for each in rest)))
    second = Process(1, 4712, ("python", "-c", "pass"), 1.0, 2.0, "0.12", "", "killed by SIGKILL")
    found = events(training(functions=(both,), processes=(PROCESS, second)))
    assert {each["pid"] for each in found if each["name"] == "step@2"} == {2}
    called = [each["args"]["name"] for each in found if each["name"] == "process_name"]
    assert called == ["0: python train.py --steps 100", "1: python -c pass"]
    assert any(each.get("args", {}).get("ending") == "killed by SIGKILL" for each in found)


def test_an_empty_run():
    assert events(Run("run", (), 0.0, None, (), ())) == []
    failed = replace(step(), compilations=(compilation("step", 0.0, (0.0, 0.0, None)),))
    assert len(events(training(functions=(failed,), outside_jit=(), processes=()))) == 6
