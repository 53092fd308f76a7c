"""`--compiled` in the commands that count: the data each device sends, by line."""

import json
import re

import pytest

from jaxprtool.ir.source_text import Place
from tests.commands.shardings.test_command import MESH, MODEL, STEP, model  # noqa: F401  (a fixture)

GIVEN = STEP[1:]


@pytest.mark.proof
def test_cost_has_the_bytes_each_device_sends_and_the_totals_of_lines(cli):
    found, plain = cli("cost", *GIVEN, "--compiled"), cli("cost", *GIVEN)
    assert found.code == 0
    assert found.out.startswith("step: 8 devices (data=8), each sends 56.0 KiB a call\n")
    assert "added by the partitioner" in found.out and "is not partitioned" not in found.out
    whole = r"^step: .*FLOP, .* with whole arrays$"  # of all devices together
    assert re.search(whole, found.out, re.MULTILINE) and "with whole arrays" not in plain.out
    document = json.loads(cli("cost", *GIVEN, "--compiled", "--json").out)
    assert Place.from_json(document["compiled"]["collectives"][0]["place"]) == "sharded.py:9"
    assert "compiled" not in json.loads(cli("cost", *GIVEN, "--json").out)


def test_cost_has_the_times_of_an_interconnect_and_of_each_device(cli):
    times = "--device", "h100", "--bandwidth", "nvlink4"
    found = cli("cost", *GIVEN, "--compiled", *times)
    assert found.code == 0
    text = re.sub(r"\s+", " ", found.out)
    assert re.search(r"products at least .*s, collectives at least .* could overlap", text)
    assert "on one h100 with whole arrays: at least" in text
    document = json.loads(cli("cost", *GIVEN, "--compiled", *times, "--json").out)["compiled"]
    assert document["compute_seconds"] > 0
    assert all(each["seconds"] > 0 for each in document["collectives"])
    alone = cli("cost", *GIVEN, "--bandwidth", "nvlink4")
    assert alone.code == 2 and alone.err.splitlines()[1] == "hint: add --compiled"


def test_source_has_the_bytes_each_device_sends_at_each_line(cli):
    found = cli("source", *GIVEN, "--compiled")
    first = found.out.splitlines()[0]
    assert found.code == 0 and first.endswith("with whole arrays, each of 8 devices sends 56.0 KiB")
    assert "is not partitioned" not in found.out and "not of your lines" not in found.out
    assert re.search(r"56.0 KiB .*9 .*whole = with_sharding_constraint", found.out)
    (program,) = json.loads(cli("source", *GIVEN, "--compiled", "--json").out)["programs"]
    sent = {line["line"]: line["sent_bytes"] for line in program["files"][0]["lines"]}
    assert sent[9] == 57344 and sent[8] == 0 and program["devices"] == 8


def test_a_report_has_a_view_of_the_devices(cli, folder):
    assert cli("report", *GIVEN, "--compiled", "-o", "page.html").code == 0
    page = (folder / "page.html").read_text()
    shown = "body:has(#view-devices:checked) #report-devices"
    assert 'id="view-devices"' in page and shown in page and "all-gather along data" in page
    # The first lines of the cost, of the memory, and of the devices.
    assert page.count(">step: 8 devices (data=8), each sends 56.0 KiB a call<") == 3
    assert "is not partitioned" not in page
    assert cli("report", *GIVEN, "-o", "plain.html").code == 0
    plain = (folder / "plain.html").read_text()
    assert 'id="view-devices"' not in plain and "is not partitioned" in plain


def test_profile_has_the_bytes_of_collectives_at_each_line(cli, folder):
    found = cli("profile", *GIVEN, "--calls", "2", "-o", "time.html")
    assert found.code == 0 and "collectives move 64.0 KiB to each device" in found.out
    assert "moved" in found.out and " on 8 devices, " in found.out
    assert "1 all-gather" in found.out and "1 all-gather" in (folder / "time.html").read_text()
    document = json.loads(cli("profile", *GIVEN, "--calls", "2", "--json").out)
    moved = [each for line in document["lines"] for each in line["moved"]]
    assert {"kind": "all-gather", "bytes": 65536, "count": 1.0} in moved
    assert document["devices"] == 8
    assert document["moved_bytes"] == sum(line["moved_bytes"] for line in document["lines"])
    alone = cli("profile", "sharded.py:alone", "--args", "f32[8]", "--calls", "2")
    assert alone.code == 0 and "moved" not in alone.out


@pytest.mark.parametrize("command", ["source", "report"])
def test_a_single_device_program_is_refused(cli, folder, command):
    out = ["-o", "page.html"] if command == "report" else []
    found = cli(command, "sharded.py:alone", "--args", "f32[8]", "--compiled", *out)
    assert found.code == 2 and found.out == "" and not (folder / "page.html").exists()
    assert found.err.startswith("error: alone is not partitioned")
