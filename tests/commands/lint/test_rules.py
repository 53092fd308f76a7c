"""Every rule finds its bad example, with its line, and nothing in the good one."""

import re
import textwrap

import jax
import pytest

import jaxprtool
from jaxprtool.commands.lint.lint import LintedProgram, all_rules, lint
from tests.commands.lint.programs import HEAD, PROGRAMS
from tests.programs import harness_share
from tests.programs.corpus import corpus, wasteful_corpus
from tests.programs.samples import sample_files, sample_programs
from tests.share import first_and_proofs, share

RULES = {rule.code: rule for rule in all_rules()}


@pytest.fixture
def linted(tmp_path, monkeypatch):
    """Return the locations and codes that a text must have, and its program."""

    def linted(text):
        path = tmp_path / f"linted{len(list(tmp_path.iterdir()))}.py"  # modules are imported once
        path.write_text(text)
        monkeypatch.chdir(tmp_path)
        program = jaxprtool.load(f"{path}:f")
        wanted = [
            (f"{path.name}:{number}", code)
            for number, line in enumerate(text.splitlines(), 1)
            for code in re.findall(r"# (JT\d+)$", line)
        ]
        return sorted(wanted), program

    before = jax.config.jax_enable_x64
    yield linted
    jax.config.update("jax_enable_x64", before)  # a text may set it


def places(found):
    return sorted((each.line, each.code) for each in found)


@pytest.mark.parametrize("code", RULES)
def test_the_bad_example_is_found_with_its_line_and_the_good_one_is_not(code, linted):
    rule = RULES[code]
    wanted, program = linted(rule.bad)
    findings = lint(program)
    assert wanted == [(line, code) for line, _ in wanted] != [] and places(findings) == wanted
    (first,) = findings
    assert first.kind == rule.kind and first.cost.text and first.advice and first.frames
    for finding in rule.check(LintedProgram(program)):
        named = {unit for unit in ("bytes", "flops") if f"{{{unit}}}" in finding.cost}
        numbers = {unit for unit in ("bytes", "flops") if getattr(finding, unit)}
        assert named == numbers, "the phrase of a cost names the numbers that the finding has"
    wanted, program = linted(rule.good)
    assert wanted == places(lint(program)) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_marked_lines_are_found_and_no_others(name, linted):
    wanted, program = linted(HEAD + textwrap.dedent(PROGRAMS[name]))
    assert places(lint(program)) == wanted


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_samples_have_no_findings(file):
    for case in sample_programs(file):
        assert places(lint(case.program())) == []


@pytest.mark.proof
def test_random_programs_and_jaxs_own_are_linted():
    cases = [case for _, case in share((*corpus(), *wasteful_corpus()))] + harness_share()[::4]
    assert len(cases) > 100
    found = []
    for case in cases:
        with case.setting():
            found += lint(case.program()).findings
    # Random programs reuse keys and print in loops; nothing else in them is expensive.
    assert {each.code for each in found} <= {"JT601", "JT602"}
