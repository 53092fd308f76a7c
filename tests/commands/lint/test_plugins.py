"""Rules are added by the place of our modules, and by the entry-point group `jaxprtool.lint`."""

import sys
import textwrap

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.cli.main import main
from jaxprtool.commands.lint import lint
from jaxprtool.commands.lint import rules as own_rules
from jaxprtool.errors import ArgumentsError, PluginError

RULE = """
    from jaxprtool.extend.commands import Found, lint_rule

    @lint_rule("{code}", "double-tanh", bad="", good="")
    def double_tanh(program):
        \"\"\"A tanh of a tanh.\"\"\"
        for node in program.of("tanh"):
            before = node.ins[0].node
            if before is not None and before.name == "tanh":
                yield Found(node, "tanh of tanh", "use it once", "{{flops}}", flops=node.operations)
"""


@pytest.fixture
def rules_restored(monkeypatch):
    """Load the rules again when they are asked for next, and restore them after the test."""
    rules = {rule.code: rule for rule in lint.all_rules()}
    lint._load.cache_clear()
    yield
    lint.lint_rules.clear()
    lint.lint_rules.update(rules)
    lint._load.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch, rules_restored):
    """Install a package with a module of rules."""

    def install(text, name):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[jaxprtool.lint]\nrules = {name}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.fixture
def add_ours(tmp_path, monkeypatch, rules_restored):
    """Put a module in the folder of our own rules, and return its file."""
    monkeypatch.setattr(own_rules, "__path__", [*own_rules.__path__, str(tmp_path)])

    def add_ours(text, name):
        monkeypatch.delitem(sys.modules, f"{own_rules.__name__}.{name}", raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return path

    return add_ours


def twice(x):
    return jnp.tanh(jnp.tanh(x))


def test_a_rule_of_a_package_is_run_and_selected_like_ours(install):
    install(RULE.format(code="XY101"), "lint_rules_of_xy")
    program = jaxprtool.trace(twice, jnp.ones(8))
    (found,) = jaxprtool.lint(program)
    assert (found.code, found.message, found.cost.flops) == ("XY101", "tanh of tanh", 8)
    assert found.cost.text == "8 FLOPs" and found.line.startswith("tests/commands/lint/")
    assert len(jaxprtool.lint(program, select=["XY"])) == 1
    assert len(jaxprtool.lint(program, ignore=["XY1"])) == 0
    assert len(jaxprtool.lint(program, select="JT1, XY1")) == 1


def test_a_used_code_and_a_failing_module_are_errors_that_name_it(install):
    install(RULE.format(code="JT101"), "lint_rules_of_clash")
    with pytest.raises(PluginError, match=r"JT101 of lint_rules_of_clash .* of 'large-constant'"):
        lint.all_rules()


def test_a_module_that_cannot_be_imported_is_named(install):
    install("import nothing_of_this_name", "lint_rules_broken")
    with pytest.raises(PluginError, match="lint rules of lint_rules_broken cannot be imported"):
        lint.all_rules()


def test_a_module_in_the_folder_of_our_rules_is_loaded(add_ours):
    add_ours(RULE.format(code="JT999"), "added_rules")
    assert "JT999" in {rule.code for rule in lint.all_rules()}


def test_an_error_in_one_of_our_modules_names_its_file_and_is_no_internal_error(add_ours, capsys):
    path = add_ours("from jaxprtool.ir.traits import nothing", "wrong_rules")
    assert main(["lint", f"{__file__}:rounded", "--args", "f32[8]"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"the lint rules of {path} cannot be imported: ImportError: cannot import" in text


def test_a_code_without_a_rule_is_an_error_with_the_existing_ones():
    program = jaxprtool.trace(twice, jnp.ones(8))
    with pytest.raises(ArgumentsError, match="no lint rule has the code 'JT0'"):
        jaxprtool.lint(program, select=["JT0"])


def test_a_bare_jaxpr_is_linted():
    import jax

    closed = jax.make_jaxpr(lambda x: jnp.sort(x)[-3:])(jnp.ones(512))
    assert [found.code for found in jaxprtool.lint(closed)] == ["JT403"]


def test_symbolic_sizes_count_as_typical_sizes():
    program = jaxprtool.load(f"{__file__}:rounded", "f32[n,64]")
    (found,) = jaxprtool.lint(program)
    assert found.code == "JT203" and found.cost.bytes == 512 * 64 * 4


def rounded(x):
    narrow = jnp.tanh(x).astype(jnp.bfloat16)
    return narrow.astype(jnp.float32) + 1
