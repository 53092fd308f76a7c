"""The README tells the truth: its commands are run, and give the output that it shows.

A ```console block holds commands after `$` and their output; a line that is `...` stands for any
number of lines. Durations are not compared, numbers to four digits. Files that the commands need
are the ```python blocks that begin with a file's name. A ```text block shows what depends on the
machine, and is not run.
"""

import doctest
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def examples():
    """Each command of the README with the output that it shows."""
    for text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


EXAMPLES = list(examples())


@pytest.fixture
def folder(tmp_path):
    """A folder with the samples and the files that the README has one write."""
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    for text in blocks("python"):
        first, _, _ = text.partition("\n")
        if first.startswith("# "):
            (tmp_path / first.removeprefix("# ")).write_text(text)
    return tmp_path


def run(command, folder):
    """A command's exit code and what it prints, on both streams, in 80 columns without colours."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def normalised(text):
    """Lines without durations, the last digits of numbers, and the blanks that align columns."""
    text = re.sub(r"\b[\d.]+(e-\d+)? (s|ms|µs)\b", "TIME", text)
    text = re.sub(r"\b\d+\.\d{4,}\b", lambda m: f"{float(m[0]):.4g}", text)
    text = re.sub(r"(?<=\S) +", " ", text).replace(" ,", ",")
    return [line.rstrip() for line in text.strip().splitlines()]


def pattern(lines):
    """A regular expression for lines of which `...` stands for any number."""
    any_lines = r"(?:[^\n]*\n)*?"
    parts = [any_lines if line.strip() == "..." else re.escape(line) + r"\n" for line in lines]
    return re.compile("".join(parts))


@pytest.mark.parametrize("command, output", EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_a_command_prints_what_the_readme_shows(command, output, folder):
    code, printed = run(command, folder)
    assert code == (2 if "error:" in output else 0), printed
    actual = "".join(f"{line}\n" for line in normalised(printed))
    expected = normalised(output)
    if not pattern(expected).fullmatch(actual):
        assert actual.splitlines() == expected  # fails, and shows where they differ


def test_the_first_command_of_the_quick_start_ends_by_showing_a_program(folder):
    first, second = (text.strip() for text in blocks("sh")[:2])
    install, command = first.split(" && ")
    assert install == "pip install -e ."
    assert second.startswith("pip install -e ") and second.endswith(" && pytest")
    code, printed = run(command, folder)
    assert code == 0
    assert "dot_general" in printed and "scan" in printed


def test_python_examples_give_what_the_readme_shows(folder, monkeypatch):
    monkeypatch.chdir(folder)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    for text in blocks("pycon"):
        test = doctest.DocTestParser().get_doctest(text, {}, "README.md", "README.md", 0)
        assert test.examples
        report = []
        assert runner.run(test, out=report.append).failed == 0, "".join(report)


def test_the_dependency_table_is_the_one_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"": project["dependencies"], **project["optional-dependencies"]}
    del declared["models"]  # the models themselves
    table = README.partition("| dependency | why |")[2].partition("\n\n")[0]
    shown = {
        name: extra
        for names, extra in re.findall(r"^\| (`.*?`)(?: \((\w+)\))? \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert shown == {
        re.match(r"[\w-]+", requirement)[0]: extra
        for extra, requirements in declared.items()
        for requirement in requirements
    }


def test_links_to_files_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_model_has_a_row_without_failures():
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", README, re.MULTILINE)
    models = {p.stem for p in (ROOT / "tests" / "models" / "zoo").glob("[!_]*.py")}
    told = {name: cells for name, cells in rows if name in models}
    assert set(told) == models
    assert not any("**no**" in cells for cells in told.values())
