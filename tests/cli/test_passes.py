import json


def test_passes_are_listed_with_help_and_origin(cli):
    result = cli("passes")
    assert result.code == 0 and result.err == ""
    (line,) = [line for line in result.out.splitlines() if line.startswith("dce ")]
    assert "Remove every equation" in line and line.endswith("jaxprtool")


def test_the_listing_as_json(cli):
    document = json.loads(cli("passes", "--json").out)
    assert {"dce"} <= {p["name"] for p in document["passes"]}
    assert all(list(p) == ["name", "help", "origin"] for p in document["passes"])
    assert document["pipelines"]["-O0"] == "none"


def test_one_pass_is_explained_and_not_listed(cli):
    assert cli("passes", "dce").code == 2


def test_a_plugin_that_raises_is_one_warning_and_the_rest_works(cli, folder):
    (folder / "broken.py").write_text("raise RuntimeError('two\\nlines')\n")
    result = cli("passes", "--plugin", "broken.py", "--plugin", "no_such_module_at_all")
    assert result.code == 0 and "dce" in result.out
    assert len(result.lines) == 2
    assert result.lines[0] == ("warning: plug-in broken.py is left out: RuntimeError: two lines")
    assert "no_such_module_at_all" in result.lines[1]


def test_a_plugin_that_raises_does_not_stop_a_pipeline(cli, folder):
    (folder / "broken2.py").write_text("import nothing_of_that_name\n")
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--plugin", "broken2.py")
    assert result.code == 0 and "cos" in result.out
    assert [line for line in result.lines if line.startswith("warning: plug-in broken2.py")]
