import json


def test_with_json_an_error_is_a_document(cli):
    found = cli("cost", "nowhere.py:f", "--json")
    error = json.loads(found.out)["error"]
    assert error["message"] == "no file 'nowhere.py'" and error["exit_code"] == found.code == 2
    assert found.lines[0] == f"error: {error['message']}"


def test_a_failing_check_adds_no_second_document(cli):
    found = cli("memory", "functions.py:wasteful", "--limit", "1", "--json")
    assert found.code == 1 and "peak_bytes" in json.loads(found.out)
