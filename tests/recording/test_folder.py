"""The phases that a run is in are read while it goes on."""

import json

from jaxprtool.recording.folder import EVENTS, RunningPhases


def test_phases_that_have_not_ended_are_running(tmp_path):
    process = tmp_path / "process-0"
    process.mkdir()
    phases, events = RunningPhases(str(tmp_path)), process / EVENTS

    def names(*lines):
        with events.open("a") as file:
            file.write("".join(line if isinstance(line, str) else json.dumps(line) + "\n"
                               for line in lines))  # fmt: skip
        return [(event["event"], event["name"]) for event in phases.now()]

    assert phases.now() == []
    outer = {"event": "tracing", "id": 1, "name": "step"}
    inner = {"event": "compiling", "id": 2, "name": "init"}
    assert names(outer) == [("tracing", "step")]
    assert names({"event": "source", "file": "a.py"}, inner) == [
        ("tracing", "step"), ("compiling", "init")
    ]  # fmt: skip
    # The end of another phase with the same number, and a line that is not complete.
    assert names({"event": "traced", "id": 2}, '{"event": "compiled", "id"') == [
        ("tracing", "step"), ("compiling", "init")
    ]  # fmt: skip
    assert names(": 2}\n") == [("tracing", "step")]
    assert names({"event": "traced", "id": 1}) == []
