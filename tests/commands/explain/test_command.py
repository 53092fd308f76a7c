import json
import shlex

import pytest

from jaxprtool.passes import available
from jaxprtool.passes.cleanup.simplify import simplify_rules


def own_passes():
    return [name for name, source in available().items() if source.origin == "jaxprtool"]


def test_the_rules_of_simplify_are_a_table(cli):
    result = cli("explain", "simplify")
    assert result.code == 0 and result.err == ""
    lines = [line.split() for line in result.out.splitlines()]
    assert ["mul|div(x,", "1)", "→", "x", "reals"] in lines
    assert ["sub(x,", "-0)", "→", "x", "only", "with", "fast=True"] in lines
    assert ["fast:", "bool", "=", "False"] in lines
    assert max(map(len, result.out.splitlines())) <= 80


def test_rules_are_folded_by_family_on_a_terminal(terminal):
    folded, full = terminal("explain", "simplify"), terminal("explain", "simplify", "--full")
    assert folded.count("more; --full shows them") == 5 and "more:" not in full
    assert len(folded.splitlines()) < 80 < len(full.splitlines())


@pytest.mark.proof
def test_no_word_is_broken_and_lines_fit(cli):
    for name in [*own_passes(), "-O3", "dot_general"]:
        shown = cli("explain", name).out
        assert max(map(len, shown.splitlines())) <= 80, name
        message = json.loads(cli("explain", name, "--json").out)
        listed = [
            *message.get("options", ()),
            *message.get("sections", ()),
            *message.get("passes", ()),
        ]
        texts = [
            message["text"],
            *message.get("refuses", ()),
            *(text for d in listed for key, text in d.items() if key != "name"),
        ]
        if "traits" not in message:
            assert set(" ".join(filter(None, texts)).split()) <= set(shown.split()) | NOT_SHOWN, (
                name
            )


NOT_SHOWN = {"repeated", "once,", "at", "the", "end"}


@pytest.mark.proof
def test_passes_explain_their_options(cli):
    for name in own_passes():
        message = json.loads(cli("explain", name, "--json").out)
        assert all(option["help"] for option in message["options"]), name
        assert message["group"] and (message["sections"] or name == "hessian"), name


@pytest.mark.parametrize("name", own_passes())
def test_examples_of_passes_match_their_results(cli, folder, name):
    sections = {
        s["title"]: s["text"] for s in json.loads(cli("explain", name, "--json").out)["sections"]
    }
    code, _, session = sections.get("Example", "").partition("$ ")
    command, _, shown = session.partition("\n")
    if not code:  # from a function of the reader
        return
    (folder / "f.py").write_text(f"import jax\nimport jax.numpy as jnp\nimport jaxprtool\n\n{code}")
    result = cli(*shlex.split(command)[1:])
    written, wanted = (
        [line.rstrip() for line in text.strip().splitlines()] for text in (result.out, shown)
    )
    assert result.code == 0 and written == wanted


def test_numpy_style_docstrings_are_formatted(cli, folder):
    (folder / "scaling.py").write_text(NUMPY_STYLE)
    shown = cli("explain", "scaled", "--plugin", "scaling.py").out
    lines = list(filter(None, shown.splitlines()))
    assert lines[0] == "scaled   from scaling.py"
    assert lines[1] == "Scale each result."
    assert (
        "  factor: float = 2.0" in lines and "      By how much; see `jax.numpy.multiply`." in lines
    )
    assert lines[lines.index("Errors") + 1] == "  • If the factor is zero."
    assert lines[lines.index("Example") + 1] == '    >>> program.apply("scaled")'
    assert lines[lines.index("Notes") + 1] == "   • one"


NUMPY_STYLE = '''
from dataclasses import dataclass
from typing import ClassVar
from jaxprtool import Pass

@dataclass(frozen=True)
class Scaled(Pass):
    """Scale each result.

    Parameters
    ----------
    factor : float
        By how much; see :func:`jax.numpy.multiply`.

    Raises
    ------
    UnsupportedError
        If the factor is zero.

    Examples
    --------
    >>> program.apply("scaled")

    Notes
    -----
    - one
    - two
    """

    name: ClassVar[str] = "scaled"
    factor: float = 2.0
'''


def test_the_rules_are_available_as_json(cli):
    explained = json.loads(cli("explain", "simplify", "--json").out)
    assert len(explained["rules"]) == len(simplify_rules)
    assert all(
        list(rule) == ["pattern", "replacement", "condition", "exact", "family"]
        for rule in explained["rules"]
    )
    assert {"mul(x, 0)", "pad(x, y)"} <= {rule["pattern"] for rule in explained["rules"]}


def test_a_pass_is_explained_by_its_docstring(cli):
    result = cli("explain", "dce")
    assert result.out.splitlines()[0] == "dce   clean up; from jaxprtool; part of -O1, -O2, -O3"
    assert "Liveness" not in result.out  # the docstring of its module, which is for contributors
    explained = json.loads(cli("explain", "dce", "--json").out)
    assert explained["origin"] == "jaxprtool" and "rules" not in explained
    assert explained["pipelines"] == ["-O1", "-O2", "-O3"]
    (option,) = explained["options"]
    assert option.pop("help").startswith("Also remove the program's own unused arguments")
    assert option == {"name": "drop_inputs", "type": "bool", "default": "False"}


def test_a_named_pipeline_is_explained_by_its_passes(cli):
    assert cli("explain", "-O1").out == cli("explain", "O1").out
    explained = json.loads(cli("explain", "-O2", "--json").out)
    assert [p["name"] for p in explained["passes"]][-3:] == ["dce", "hoist", "schedule"]
    assert explained["passes"][-1]["when"] == "once, at the end"
    third = json.loads(cli("explain", "-O3", "--json").out)["passes"]
    assert third[:-1] == explained["passes"] and third[-1]["name"] == "outline"


def test_rules_of_a_plug_in_are_listed(cli, folder, monkeypatch):
    monkeypatch.setattr("jaxprtool.passes.cleanup.simplify.simplify_rules", list(simplify_rules))
    (folder / "more.py").write_text(
        "from jaxprtool.passes.cleanup.simplify import SimplifyRule, simplify_rules\n"
        "simplify_rules.append(SimplifyRule('halve(double(x))', 'x'))\n"
    )
    assert "halve(double(x))" in cli("explain", "simplify", "--plugin", "more.py").out


def test_unknown_names_are_reported(cli):
    assert cli("explain", "simplifi").lines == [
        "error: unknown pass 'simplifi'",
        "hint: did you mean 'simplify'?",
    ]
    assert cli("explain", "-O9").lines[0] == "error: '-O9' is not a pipeline"
    assert (
        cli("explain", "dce", "-O1").lines[0]
        == "error: explain takes one name, not 'dce' and '-O1'"
    )


def test_a_primitive_is_explained_by_its_traits_and_rules(cli):
    result = cli("explain", "dot_general")
    assert result.code == 0 and "Costs far more than reading its result." in result.out
    assert "  cost, jaxpr, mask, memory, python, ragged" in result.out.splitlines()
    explained = json.loads(cli("explain", "max", "--json").out)
    assert {"name": "broadcasts", "value": "True"}.items() <= explained["traits"][2].items()
    assert {rule["pattern"] for rule in explained["rules"]} == {"max(x, C)", "max(x, x)"}


def test_a_primitive_with_the_name_of_a_pass_needs_jaxs_spelling(cli):
    assert cli("explain", "jit").out.startswith("jit   transform; from jaxprtool")
    assert cli("explain", "jit_p").out.startswith("jit   a primitive")
    assert cli("explain", "scn").lines == [
        "error: unknown pass 'scn'",
        "hint: did you mean 'scan'?",
    ]


def test_traits_of_a_plug_ins_primitive_are_shown(cli, folder):
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


def test_a_code_of_lint_is_explained_with_an_example_and_what_to_write_instead(cli):
    out = cli("explain", "JT602").out
    assert out.startswith("JT602") and "key-reuse" in out and "makes results wrong" in out
    assert out.index("Example") < out.index("Instead") < out.index("# jaxprtool: ignore[JT602]")
    document = json.loads(cli("explain", "jt602", "--json").out)
    assert document["code"] == "JT602" and "jax.random" in document["bad"]


def test_an_unknown_code_of_lint_names_those_that_exist(cli):
    result = cli("explain", "JT999")
    assert result.code == 2 and "no rule of lint has the code JT999" in result.err
    assert "JT602" in result.err or "did you mean" in result.err


def test_the_schema_of_a_command_is_printed(cli):
    printed = cli("explain", "--schema", "backends")
    schema = json.loads(printed.out)
    names = [document["title"] for document in schema["anyOf"]]
    assert printed.code == 0 and names == ["BackendsDocument", "ErrorDocument"]
    unknown = cli("explain", "--schema", "backend")
    assert unknown.code == 2 and unknown.lines[0].startswith("error: 'backend' is no command")
    assert unknown.lines[1] == "hint: did you mean 'backends'?"


def test_a_budget_of_bytes_limits_any_document(cli):
    printed = cli("explain", "--json", "--max-bytes", "2000")
    document = json.loads(printed.out)
    assert 1500 < len(printed.out) <= 2000 and document["omitted"]["passes"] > 0
    few = cli("explain", "--json", "--max-bytes", "20")
    assert few.code == 2 and "is too small" in json.loads(few.out)["error"]["message"]
    assert cli("explain", "--max-bytes", "2000").lines == [
        "error: --max-bytes limits the document of --json",
        "hint: add --json",
    ]
