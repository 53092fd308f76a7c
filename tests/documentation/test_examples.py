"""Run the commands of the documentation, and compare their output with the pages.

A ```console block holds commands after `$` and their output. A line `...` matches any number of
lines. Durations are not compared, and numbers to four digits. Files that the commands need are the
```python blocks that begin with a file's name. A ```text block shows machine-dependent output, and
is not run.
"""

import doctest
import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import shell
from tests.documentation.blocks import PAGES, ROOT, blocks
from tests.share import share, shared_proofs

#: Pages whose commands are independent of each other.
SINGLE = [page for page in PAGES if not page.startswith(("docs/tutorials/", "docs/howto/"))]


def examples(pages):
    """Return each distinct command of pages, with the output that the page shows."""
    found = {}
    for _, text in blocks("console", pages):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found[command, output] = None
    return list(found)


#: The examples of the README, and the share of those of other pages.
EXAMPLES = examples(["README.md"])
OTHERS = share([each for each in examples(SINGLE) if each not in EXAMPLES])
SESSIONS = blocks("pycon")
BLOCKS = [*blocks("python", SINGLE), *blocks("toml", SINGLE)]
FILES = {
    text.partition("\n")[0].removeprefix("# "): text for _, text in BLOCKS if text.startswith("# ")
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the path of one shared folder, as JAX caches the source lines of what it traced."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def folder(place, monkeypatch):
    """A folder with the samples and the files that the pages define, as the working directory."""
    shutil.rmtree(place)
    place.mkdir()
    (place / "samples").symlink_to(ROOT / "samples")
    for name, text in FILES.items():
        (place / name).write_text(text)
    monkeypatch.chdir(place)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the objects of a command are not permanent
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # for the pytest of these tests only
    environment, path = dict(os.environ), list(sys.path)
    yield place
    sys.path[:] = path
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


def test_files_with_the_same_name_have_the_same_text():
    assert len(FILES) == sum(text.startswith("# ") for _, text in BLOCKS)


def normalised(text):
    """Return lines without durations, progress, file sizes, last digits of numbers, and padding.

    The number of lines of a program's header depends on the length of its paths.
    """
    text = re.sub(r"<stdin>:\d+:", "<stdin>:N:", text)
    text = re.sub(r"\b[\d.]+(e-\d+)? (s|ms|µs)\b( \(from the cache\))?", "TIME", text)
    text = re.sub(r"\b\d+\.\d{4,}\b", lambda m: f"{float(m[0]):.4g}", text)
    text = re.sub(r"^(wrote \S+), .*", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\S) +", " ", text).replace(" ,", ",")
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return [line for line in lines if not line.endswith(" · TIME")]  # progress on a slow machine


def pattern(lines):
    """Return a regular expression for lines, in which `...` matches any number of lines."""
    any_lines = r"(?:[^\n]*\n)*?"
    parts = [any_lines if line.strip() == "..." else re.escape(line) + r"\n" for line in lines]
    return re.compile("".join(parts))


#: Commands that exit with 1 if they find something.
FAILING = tuple(f"jaxprtool {name}" for name in ("nans", "compare", "determinism", "diff", "lint"))


@pytest.mark.parametrize(
    "command, output",
    [
        *(pytest.param(*each, id=each[0]) for each in EXAMPLES),
        *(pytest.param(*each, id=each[0], marks=pytest.mark.proof) for each in OTHERS),
    ],
)
def test_a_command_prints_the_output_on_its_page(command, output, folder):
    code, printed = shell.run(command)
    failed = (1, 2) if "shapecheck" in command or "--limit" in command else (2,)
    done = (1,) if command.startswith(FAILING) or command == "jaxprtool check" else (0,)
    assert code in (failed if "error:" in output else done), printed
    actual = "".join(f"{line}\n" for line in normalised(printed))
    expected = normalised(output)
    if not pattern(expected).fullmatch(actual):
        assert actual.splitlines() == expected  # fails, and shows the difference


@pytest.mark.usefixtures("processes")
def test_the_first_command_of_the_quick_start_ends_with_what_was_compiled(folder):
    first, second = (text.strip() for _, text in blocks("sh", ["README.md"])[:2])
    install, command = first.split(" && ")
    assert install == "pip install -e ."
    assert second.startswith("pip install -e ") and second.endswith(" && pytest")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step 60: loss" in done.stdout
    assert "letters: i32[16,13] → i32[10,13]" in done.stderr


def test_examples_of_the_api_reference_return_the_results_shown(folder):
    path = ROOT / "docs" / "api" / "jaxprtool.rst"
    found = doctest.testfile(str(path), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert found.attempted > 30 and found.failed == 0


@pytest.mark.parametrize("page, text", [SESSIONS[0], *shared_proofs(SESSIONS[1:])])
def test_a_python_session_prints_the_output_on_its_page(page, text, folder):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    test = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    assert test.examples
    report = []
    assert runner.run(test, out=report.append).failed == 0, "".join(report)
