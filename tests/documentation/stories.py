"""Run tutorials and recipes: pages whose blocks are executed in order, in one folder.

A ```python block that begins with a file's name writes the file, a ```diff block changes it, and a
```console block runs commands. The output of a command is compared word by word, since line breaks
depend on the width of durations.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documentation import shell
from tests.documentation.blocks import ROOT
from tests.documentation.conftest import forget

_BLOCK = re.compile(r"^```(python|diff|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One step of a page.

    Attributes:
        kind: "python", "diff" or "console".
        text: The text of a file, the lines of a change, or a command.
        output: The output of the command, as the page shows it.
    """

    kind: str
    text: str
    output: str = ""


def steps(page: str) -> list[Step]:
    """Return the steps of a page, in order."""
    found = []
    for kind, text in _BLOCK.findall(page):
        if kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append(Step(kind, command, output))
        elif kind == "diff" or re.match(r"# \S+\.py\n", text):
            found.append(Step(kind, text))
    return found


def write(step: Step) -> None:
    """Write the file of a ```python block, or apply a ```diff block."""
    first, _, rest = step.text.partition("\n")
    if step.kind == "python":
        Path(first.removeprefix("# ")).write_text(step.text)
        return
    path, lines = Path(first.removeprefix("--- ")), rest.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(before) == 1, f"{path} does not have these lines once:\n{before}"
    path.write_text(text.replace(before, after))


def run(command: str) -> tuple[int, str]:
    """Return the exit code of a command, and its output. A script runs in a process of its own."""
    if not re.match(r"python |jaxprtool record ", command):
        return shell.run(command)
    start = [sys.executable, "-m", "jaxprtool"] if command.startswith("j") else [sys.executable]
    words = [*start, *command.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def words(printed: str) -> str:
    """Return the words of an output without durations, file sizes and line breaks."""
    printed = re.sub(r"(wrote \S+), [\d.]+ \w+", r"\1", printed)
    text = re.sub(r"\b[\d.]+(e-\d+)? ?(s|ms|µs)\b( \(from the cache\))?", "TIME", printed)
    lines = text.splitlines()
    lines = [re.sub(r"\b[\d.]+%", "SHARE", line) if "TIME" in line else line for line in lines]
    text = re.sub(r"\b\d+\.\d{4,}\b", lambda m: f"{float(m[0]):.4g}", "\n".join(lines))
    return " ".join(re.sub(r"─+", "─", text).split())


def matches(shown: str, printed: str) -> bool:
    """Return True if a page shows this output. A line `...` matches any number of lines."""
    parts = re.split(r"^\s*\.\.\.\n", shown, flags=re.MULTILINE)
    pattern = r"(?:.* )?".join(
        re.escape(words(part)) + " " if words(part) else "" for part in parts
    )
    return re.fullmatch(pattern, f"{words(printed)} ".lstrip()) is not None


def play(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute the steps of a page in an empty folder, and compare the outputs.

    Args:
        page: The text of the page.
        place: The folder, the same for all pages, as JAX caches the source lines of what it traced.
        monkeypatch: Undoes changes of this process.
    """
    shutil.rmtree(place)
    place.mkdir()
    (place / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    # Python takes a file for unchanged if it is written twice in a second with the same size.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("FORCE_COLOR", "JAX_COMPILATION_CACHE_DIR", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    for step in steps(page):
        if step.kind != "console":
            write(step)
            continue
        forget(place)
        code, printed = run(step.text)
        assert code in ((2,) if step.output.startswith("error:") else (0, 1)), printed
        if not matches(step.output, printed):
            raise AssertionError(f"{step.text}\n{printed}")
