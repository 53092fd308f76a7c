import json

from jaxprtool.passes.simplify import simplify_rules


def test_the_rules_of_simplify_are_a_table(cli):
    result = cli("explain", "simplify")
    assert result.code == 0 and result.err == ""
    lines = [line.split() for line in result.out.splitlines()]
    assert ["equation", "replacement", "condition", "exact"] in lines
    assert ["neg(neg(x))", "x", "exact"] in lines
    assert ["fast", "bool", "False"] in lines
    assert max(map(len, result.out.splitlines())) <= 100


def test_prose_is_as_wide_as_the_terminal_and_code_stays(cli):
    lines = cli("explain", "unzip").out.splitlines()
    code = '        w = variable(jax.random.normal(key, (3, 8)), name="w")'
    assert code in lines and max(map(len, lines)) <= 80


def test_markdown_is_laid_out_and_code_is_bold_on_a_terminal(cli, monkeypatch):
    piped = cli("explain", "-O1").out
    assert "|" not in piped
    assert ["level", "passes"] in [line.split() for line in piped.splitlines()]
    assert "`simplify_rules` is" in cli("explain", "simplify").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1msimplify_rules\x1b[22m is" in cli("explain", "simplify").out


def test_the_rules_as_json(cli):
    explained = json.loads(cli("explain", "simplify", "--json").out)
    assert len(explained["rules"]) == len(simplify_rules)
    assert all(
        list(rule) == ["pattern", "replacement", "condition", "exact"]
        for rule in explained["rules"]
    )
    assert {"mul(x, 0)", "pad(x, y)"} <= {rule["pattern"] for rule in explained["rules"]}


def test_a_pass_is_explained_by_all_that_its_docstrings_say(cli):
    result = cli("explain", "dce")
    assert "Liveness flows backwards" in result.out
    assert "drop_inputs   bool   False" in result.out.splitlines()
    explained = json.loads(cli("explain", "dce", "--json").out)
    assert explained["origin"] == "jaxprtool" and "rules" not in explained
    assert explained["options"] == [{"name": "drop_inputs", "type": "bool", "default": "False"}]


def test_a_named_pipeline_is_explained_by_its_passes(cli):
    assert cli("explain", "-O1").out == cli("explain", "O1").out
    explained = json.loads(cli("explain", "-O2", "--json").out)
    assert [p["name"] for p in explained["passes"]][-3:] == ["dce", "hoist", "schedule"]
    assert explained["passes"][-1]["when"] == "once, at the end"
    third = json.loads(cli("explain", "-O3", "--json").out)["passes"]
    assert third[:-1] == explained["passes"] and third[-1]["name"] == "outline"


def test_rules_of_a_plug_in_are_among_them(cli, folder, monkeypatch):
    monkeypatch.setattr("jaxprtool.passes.simplify.simplify_rules", list(simplify_rules))
    (folder / "more.py").write_text(
        "from jaxprtool.passes.simplify import Row, simplify_rules\n"
        "simplify_rules.append(Row('halve(double(x))', 'x'))\n"
    )
    assert "halve(double(x))" in cli("explain", "simplify", "--plugin", "more.py").out


def test_what_cannot_be_explained_is_said(cli):
    assert cli("explain", "simplifi").lines == [
        "error: unknown pass 'simplifi'",
        "hint: did you mean 'simplify'?",
    ]
    assert cli("explain", "-O9").lines[0] == "error: '-O9' is no pipeline"
    assert cli("explain").lines[0] == "error: explain wants a pass"
    assert (
        cli("explain", "dce", "-O1").lines[0]
        == "error: explain takes one name, not 'dce' and '-O1'"
    )


def test_a_primitive_is_explained_by_its_traits_and_rules(cli):
    result = cli("explain", "dot_general")
    assert result.code == 0 and "Costs far more than reading its result." in result.out
    assert "It has rules of its own in: jaxpr, python" in result.out
    explained = json.loads(cli("explain", "max", "--json").out)
    assert {"name": "broadcasts", "value": "True"}.items() <= explained["traits"][2].items()
    assert {rule["pattern"] for rule in explained["rules"]} == {"max(x, C)", "max(x, x)"}


def test_a_primitive_that_a_pass_is_named_like_is_spelled_as_jax_does(cli):
    assert cli("explain", "jit").out.startswith("jit (from jaxprtool)")
    assert "'jit'" in cli("explain", "jit_p").out
    assert cli("explain", "scn").lines == [
        "error: unknown pass 'scn'",
        "hint: did you mean 'scan'?",
    ]


def test_the_traits_of_a_primitive_of_a_plug_in_are_told(cli, folder):
    (folder / "prims.py").write_text(
        "from jax.extend.core import Primitive\n"
        "from jax.interpreters import mlir\n"
        "from jaxprtool.extend import add_traits, rule\n"
        "half = Primitive('half_of_explain')\n"
        "mlir.register_lowering(half, lambda ctx, x: [x])\n"
        "add_traits('half_of_explain', draws=True)\n"
        "rule('dce', 'half_of_explain')(lambda *args: None)\n"
    )
    explained = json.loads(cli("explain", "half_of_explain", "--plugin", "prims.py", "--json").out)
    assert [trait["name"] for trait in explained["traits"]] == ["draws"]
    assert explained["tables"] == ["dce"]
