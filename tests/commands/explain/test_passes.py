import json
import subprocess
import sys

import pytest

from jaxprtool import passes as framework
from jaxprtool.passes.cleanup.simplify import simplify_rules

PLUGIN = """
import dataclasses, typing, jaxprtool
@dataclasses.dataclass(frozen=True)
class Own(jaxprtool.Pass):
    \"\"\"Do nothing at all.\"\"\"
    name: typing.ClassVar[str] = "own"
@dataclasses.dataclass(frozen=True)
class Split(Own):
    \"\"\"Split nothing.\"\"\"
    name: typing.ClassVar[str] = "own_split"
    group: typing.ClassVar[str] = "split"
@dataclasses.dataclass(frozen=True)
class Port(Own):
    \"\"\"Port nothing.\"\"\"
    name: typing.ClassVar[str] = "own_port"
    group: typing.ClassVar[str] = "port"
"""


@pytest.fixture
def registered():
    """Forget the passes that a test registers."""
    before = dict(framework._registered)
    yield
    framework._registered.clear()
    framework._registered.update(before)


def groups(text):
    """Return the lines of each group, by its title."""
    parts = [part.splitlines() for part in text.strip().split("\n\n")]
    return {title: [" ".join(line.split()) for line in lines] for title, *lines in parts}


def test_passes_are_listed_by_purpose(cli):
    result = cli("explain")
    assert result.code == 0 and result.err == ""
    found = groups(result.out)
    ours = ["clean up", "transform", "split", "schedule and compile"]
    assert list(found)[:4] == ours and list(found)[-1] == "pipelines"
    assert any(line.startswith("dce Remove every equation") for line in found["clean up"])
    assert "from jaxprtool" not in found


def test_plugins_choose_a_group_or_make_one(cli, folder, registered):
    (folder / "own.py").write_text(PLUGIN)
    found = groups(cli("explain", "--plugin", "own.py").out)
    assert "own_split Split nothing. (own.py)" in found["split"]
    assert found["port"] == ["own_port Port nothing. (own.py)"]
    assert found["from own.py"] == ["own Do nothing at all."]
    titles = list(found)
    assert titles[4] == "port" and titles.index("from own.py") > 4 and titles[-1] == "pipelines"


def test_a_pass_has_one_line_on_a_terminal(cli, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("jaxprtool.cli.output.width", lambda: 60)
    lines = cli("explain").out.splitlines()
    assert max(map(len, lines)) <= 60 and any(line.endswith(" …") for line in lines)


def test_the_listing_as_json(cli):
    document = json.loads(cli("explain", "--json").out)
    assert {"dce"} <= {p["name"] for p in document["passes"]}
    assert all(list(p) == ["name", "help", "group", "origin"] for p in document["passes"])
    assert document["pipelines"]["-O0"] == "none"


def test_the_former_name_of_the_command_works_with_a_hint(cli):
    result = cli("passes")
    assert result.out == cli("explain").out
    assert result.lines == ["warning: `passes` is now `explain`"]


def test_a_failing_plugin_is_one_warning_and_the_rest_works(cli, folder):
    (folder / "broken.py").write_text("raise RuntimeError('two\\nlines')\n")
    result = cli("explain", "--plugin", "broken.py", "--plugin", "no_such_module_at_all")
    assert result.code == 0 and "dce" in result.out
    assert len(result.lines) == 2
    assert result.lines[0] == ("warning: plug-in broken.py is ignored: RuntimeError: two lines")
    assert "no_such_module_at_all" in result.lines[1]


def test_a_failing_plugin_does_not_stop_a_pipeline(cli, folder):
    (folder / "broken2.py").write_text("import nothing_of_that_name\n")
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--plugin", "broken2.py")
    assert result.code == 0 and "cos" in result.out
    assert [line for line in result.lines if line.startswith("warning: plug-in broken2.py")]


def test_a_pass_and_a_pipeline_are_explained_without_importing_jax():
    code = "import sys; from jaxprtool.cli.main import main; "
    code += "codes = [main(['explain', name]) for name in ('dce', '-O1')]; "
    code += "sys.exit(any(codes) or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_plugin_is_asked_for_its_passes_and_rules(cli, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from jaxprtool.passes.cleanup.simplify import SimplifyRule, simplify_rules\n"
        "simplify_rules.append(SimplifyRule('erf_inv(erf(x))', 'x', exact=False))\n"
    )
    rules = list(simplify_rules)
    try:
        shown = cli("explain", "simplify", "--plugin", str(plugin)).out
    finally:
        simplify_rules[:] = rules
    assert "erf_inv(erf(x))" in shown and "erf_inv(erf(x))" not in cli("explain", "simplify").out
