"""`--compiled` in the commands that count: what each device sends, by line."""

import json
import re

import pytest

from tests.cli.test_shardings import MESH, MODEL, STEP, model  # noqa: F401  (a fixture)

GIVEN = STEP[1:]


def test_cost_has_what_each_device_sends_beside_the_lines_of_all(cli):
    found = cli("cost", *GIVEN, "--compiled")
    assert found.code == 0
    assert found.out.startswith("step: 8 devices (data=8), each sends 56.0 KiB a call\n")
    assert "added by the partitioner" in found.out and "is not partitioned" not in found.out
    assert re.search(r"^step: .*FLOP", found.out, re.MULTILINE)  # of all devices together
    document = json.loads(cli("cost", *GIVEN, "--compiled", "--json").out)
    assert document["compiled"]["collectives"][0]["line"] == "sharded.py:9"
    assert "compiled" not in json.loads(cli("cost", *GIVEN, "--json").out)


def test_source_has_what_each_device_sends_at_each_line(cli):
    found = cli("source", *GIVEN, "--compiled")
    assert found.code == 0 and "each of 8 devices sends 56.0 KiB" in found.out
    assert re.search(r"56.0 KiB .*9 .*whole = with_sharding_constraint", found.out)
    (program,) = json.loads(cli("source", *GIVEN, "--compiled", "--json").out)["programs"]
    sent = {line["line"]: line["sent_bytes"] for line in program["files"][0]["lines"]}
    assert sent[9] == 57344 and sent[8] == 0 and program["devices"] == 8


def test_a_report_has_a_view_of_the_devices(cli, folder):
    assert cli("report", *GIVEN, "--compiled", "-o", "page.html").code == 0
    page = (folder / "page.html").read_text()
    shown = "body:has(#view-devices:checked) #report-devices"
    assert 'id="view-devices"' in page and shown in page and "all-gather along data" in page
    assert cli("report", *GIVEN, "-o", "plain.html").code == 0
    assert 'id="view-devices"' not in (folder / "plain.html").read_text()


def test_profile_has_what_collectives_move_at_each_line(cli):
    found = cli("profile", *GIVEN, "--calls", "2")
    assert found.code == 0 and "collectives move 64.0 KiB to each device" in found.out
    assert "moved" in found.out and " on 8 devices, " in found.out
    document = json.loads(cli("profile", *GIVEN, "--calls", "2", "--json").out)
    assert document["moved_bytes"] == sum(line["moved_bytes"] for line in document["lines"])
    alone = cli("profile", "sharded.py:alone", "--args", "f32[8]", "--calls", "2")
    assert alone.code == 0 and "moved" not in alone.out


@pytest.mark.parametrize("command", ["cost", "source"])
def test_a_program_of_one_device_is_refused(cli, command):
    found = cli(command, "sharded.py:alone", "--args", "f32[8]", "--compiled")
    assert found.code == 2 and found.out == ""
    assert found.err.startswith("error: alone is not partitioned")
